"""What the two Buffers share: communicators, a stream, counts of timeouts, checks of arguments."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.common.config import FrameworkConfig
from crossdock.deep_ep.events import CommStream
from crossdock.deep_ep.exporter import CountingTimeouts
from crossdock.deep_ep.high_throughput import HighThroughput, Payload
from crossdock.deep_ep.pool import Pool
from ep_kernels import ArgumentError

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""x [T, H], or (x, scales [T, S] or [T])."""


class Calls:
    """Communication of one group of ranks.

    Args:
        group: torch.distributed.ProcessGroup, gloo or nccl.
        explicitly_destroy: as given; `destroy()` may be called either way, and is when the object is collected.
    """

    def __init__(self, group: Any, explicitly_destroy: bool) -> None:
        self._settings = FrameworkConfig.from_env()
        self._pool = Pool(group, self._settings)
        self._high, self._streams = HighThroughput(self._pool), CommStream()
        self._watched = CountingTimeouts(self._pool.rank, self._settings)
        self.group, self.explicitly_destroy = group, explicitly_destroy

    def destroy(self) -> None:
        """Free every communicator, after the launched operations have finished (see `MoECommunicator.close`).
        Idempotent. No call works afterwards (ClosedError)."""
        self._pool.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.close()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which asynchronous calls run."""
        return self._streams.stream()


def payload_of(x: Rows, alignment: int) -> Payload:
    """(x, its scales or None); the alignment, too, is checked before anything is sent."""
    if type(alignment) is not int or alignment < 1:
        raise ArgumentError("expert_alignment", "an int >= 1", repr(alignment))
    return x if isinstance(x, tuple) else (x, None)


def checked_ids(value: torch.Tensor | None) -> torch.Tensor:
    """int64 [T, K], contiguous. ArgumentError otherwise."""
    return _matrix("topk_idx", value, torch.int64)


def checked_weights(value: torch.Tensor | None) -> torch.Tensor:
    """float32 [T, K], contiguous. ArgumentError otherwise."""
    return _matrix("topk_weights", value, torch.float32)


def with_bias(z: torch.Tensor, bias: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """z and up to two tensors [T, H], summed in fp32."""
    if not bias:
        return z
    total = z.float()
    for each in bias:
        total += each
    return total.to(z.dtype)


def biases(value: torch.Tensor | tuple[torch.Tensor, ...] | None, num_tokens: int, hidden: int) -> Any:
    """Those of a combine, as a tuple. ArgumentError unless they are up to two [T, H]."""
    given = () if value is None else value if isinstance(value, tuple) else (value,)
    if len(given) > 2 or any(each.shape != (num_tokens, hidden) for each in given):
        raise ArgumentError("bias", f"up to two [{num_tokens}, {hidden}]", [list(each.shape) for each in given])
    return given


def _matrix(name: str, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if value is None or value.ndim != 2 or value.dtype != dtype:
        got = None if value is None else (list(value.shape), value.dtype)
        raise ArgumentError(name, f"{str(dtype).removeprefix('torch.')} [T, K]", got)
    return value.contiguous()
