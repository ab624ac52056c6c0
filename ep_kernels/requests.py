"""What the async calls return: half an operation, to be finished by `wait()`; and which of them still are to be."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ep_kernels.errors import HandleError
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


class Unreceived(NamedTuple):
    """A request that has not been waited for.

    Attributes:
        finish: what its `wait()` calls, weakly: dead once the request has been dropped.
        receive: runs the receive half.
    """

    finish: weakref.ref[Any]
    receive: Callable[[], Any]


class InFlight:
    """Dispatches, or combines, of one communicator.

    Attributes:
        num_begun: so far; the number of the next one.
        pending: requests that have not been waited for, by number, the oldest first.

    Args:
        kind: in errors.
        device: type of the device that operations run on.
    """

    def __init__(self, kind: str, most: int, device: str = "cpu") -> None:
        self.kind, self._most, self._is_gpu = kind, most, device == "cuda"
        self.num_begun = 0
        self.pending: dict[int, Unreceived] = {}

    def has_room(self) -> bool:
        return not self.pending or next(iter(self.pending)) > self.num_begun - self._most

    def check(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        """The operation that is to begin may take the buffers of the `max_in_flight`-th before it, or let peers do so
        before this rank begins another: a request for that one that is still pending would get other rows. Raises
        HandleError.

        A request that was dropped (an exception came between, say) is received first, by `run`: nobody can wait for it
        any more, and its peers wait until this rank has read its rows. Not while a CUDA graph is captured, which would
        repeat that."""
        while not self.has_room():
            oldest = next(iter(self.pending))
            finish, receive = self.pending[oldest]
            if finish() is not None or (self._is_gpu and torch.cuda.is_current_stream_capturing()):
                raise HandleError(
                    f"{self.kind}: expected every request waited for before max_in_flight = {self._most} later ones "
                    f"begin, got one that was begun {self.num_begun - oldest} before this and is pending; wait() for "
                    "it first"
                )
            del self.pending[oldest]
            run(receive)

    def wait_for(self, number: int, finish: Callable[[], T], receive: Callable[[], Any]) -> Callable[[], T]:
        """That operation's request is pending from now on; `finish`, which its `wait()` has to call, once, and which
        takes it out of `pending`."""
        self.pending[number] = Unreceived(weakref.ref(finish), receive)
        return finish

    def begin(self) -> int:
        """An operation has begun, and did not fail for want of memory; its number."""
        number = self.num_begun
        self.num_begun = number + 1
        return number
