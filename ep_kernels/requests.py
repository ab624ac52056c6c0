"""What the async calls return: half an operation, to be finished by `wait()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ep_kernels.types import DispatchHandle, DispatchOutput

T = TypeVar("T")


class Request(Generic[T]):
    """An operation whose send half is done.

    Args:
        finish: runs the receive half; called once.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True after the first `wait`, whether it succeeded or raised."""
        return self._finish is None

    def _wait(self) -> T:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._result.append(finish())
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result[0]


Buffers = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""tokens, scales (or None), counts of a DispatchOutput."""


class DispatchRequest(Request[tuple[DispatchOutput, DispatchHandle]]):
    """What `dispatch_async` returns.

    Args:
        finish: runs the receive half; called once.
        buffers: what `buffers()` gives.
    """

    def __init__(
        self, finish: Callable[[], tuple[DispatchOutput, DispatchHandle]], buffers: Callable[[], Buffers]
    ) -> None:
        super().__init__(finish)
        self._buffers = buffers

    def buffers(self) -> Buffers:
        """(tokens, scales, counts) of the output, for who has to hand them on before `wait()` fills them. Only where no
        shape depends on what arrives: EXPERT_MAJOR, RANK_MAJOR, or `exact_shapes=False`; else ArgumentError."""
        return self._buffers()

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        """Receive. A second call gives the same result, or raises the same error.

        Raises: CapacityError, PeerTimeout, AbortedError, ClosedError; HandleError if `set_active` came between.
        """
        return self._wait()


class CombineRequest(Request[tuple[torch.Tensor, torch.Tensor | None]]):
    """What `combine_async` returns."""

    def wait(self) -> torch.Tensor:
        """z [T, H]. A second call gives the same tensor, or raises the same error. Raises as `DispatchRequest.wait`,
        without CapacityError."""
        return self._wait()[0]

    @property
    def weights(self) -> torch.Tensor:
        """The `row_weights` of the call, returned to this source rank: float32 [T, K], 0 where no row served
        (token, k). Waits."""
        weights = self._wait()[1]
        if weights is None:
            raise AttributeError("weights: combine_async was called without row_weights")
        return weights
