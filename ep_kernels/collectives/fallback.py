"""Collectives by torch.distributed, for what no transport of ours can do: the same calls, its values, its deadlines.

Serves a whole group (ranks on several hosts, GPUs without peer access) or single operations (other dtypes, other
reductions). A rank cannot be left out here, and a wait ends by the process group's own timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_kernels.collectives.collective_types import CollectiveCapabilities
from ep_kernels.errors import AbortedError, ArgumentError, ClosedError, PeerTimeout, TransportError
from ep_kernels.transports.collective_base import CollectiveTransport, GatherArgs, ReduceArgs

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


_FLOATING = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_WHOLE = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool})
_REDUCED = {
    "gloo": _FLOATING | _COMPLEX | _WHOLE,
    "nccl": _FLOATING | _COMPLEX | _WHOLE | {torch.float8_e4m3fn, torch.float8_e5m2},
}
"""dtypes that a backend reduces. With others, gloo fails in `wait`, when ranks are no longer in step."""


def why_not_reduced(backend: str, reduction: str, dtype: torch.dtype) -> str:
    """What torch.distributed's backend cannot do of a reduction; "" where it can, or is not known."""
    known = _REDUCED.get(backend)
    if known is None:
        return ""
    if dtype not in known:
        return f"{backend} reduces {', '.join(sorted(map(str, known)))}"
    if dtype in _COMPLEX and reduction not in ("sum", "avg"):
        return f"complex numbers have no {reduction!r}"
    if backend == "gloo" and reduction == "avg" and dtype in _WHOLE:
        return f"gloo averages {', '.join(sorted(map(str, _FLOATING | _COMPLEX)))}"
    return ""


class TorchPending:
    """See `collective_base.PendingGather`.

    Args:
        after: what is left to do when they are done.
    """

    halves = False

    def __init__(self, works: Sequence[Any], ranks: int, own: int, after: Callable[[], None] | None = None) -> None:
        self._works, self._ranks, self._own, self._after = list(works), ranks, own, after

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            _mapped(work.wait)
        after, self._after = self._after, None
        if after is not None:
            after()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works) and self._after is None

    def shards(self) -> Iterator[list[int]]:
        """See `PendingGather.shards`: all come together."""
        self.wait()
        yield [self._own, *(rank for rank in range(self._ranks) if rank != self._own)]


class TorchCollectives(CollectiveTransport):
    """See `collective_base.CollectiveTransport`.

    Args:
        device_type: of the tensors; "" = what the process group's backend works on.
        reason: why it serves the whole group; "" where it serves single operations.
    """

    def __init__(self, group: Any, device_type: str, reason: str) -> None:
        super().__init__(group)
        self._group, self._size, self._rank = group.process_group, group.size, group.rank
        on_device = device_type or ("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")
        self.capabilities = CollectiveCapabilities(
            device_type=on_device, cross_host=True, graphs=False, abi="torch", algorithms={}, reason=reason
        )
        self.domains = tuple(range(self._size))
        self._reason: str | None = None
        self._lost: set[int] = set()
        self._closed = False
        self._woken = threading.Event()

    # Life.

    def allocate(self) -> bytes:
        return b""

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """See `MemberTransport.import_regions`."""

    def close(self) -> None:
        """See `MemberTransport.close`. The process group is the caller's."""
        self._closed = True

    close_in_child = close

    def abort(self, reason: str) -> None:
        """See `MemberTransport.abort`; a wait that is under way ends by the process group's timeout."""
        self._reason = reason

    def give_up(self, ranks: Sequence[int]) -> None:
        """See `MemberTransport.give_up`, likewise."""
        self._lost.update(ranks)

    # The group.

    def barrier(self) -> None:
        self._usable("barrier")
        _mapped(dist.barrier, group=self._group)

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        if not all(mask):
            raise ArgumentError("mask", "all ranks, for torch.distributed serves this group", list(mask))

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        self._usable("exchange")
        mine = torch.tensor(list(words), device=self.capabilities.device_type)
        rows = mine.new_empty(self._size * len(mine))
        _mapped(dist.all_gather_into_tensor, rows, mine, group=self._group)
        return [tuple(row) for row in rows.view(self._size, -1).tolist()]

    def wait_for_peer(self, timeout_s: float) -> bool:
        """See `MemberTransport.wait_for_peer`; it sees `wake` alone."""
        woken = self._woken.wait(timeout_s)
        self._woken.clear()
        return woken

    def look_for_peer(self, timeout_s: float, fd: int) -> bool:
        return self.wait_for_peer(0.0)

    def wake(self) -> None:
        self._woken.set()

    # Operations.

    def all_gather(self, args: GatherArgs) -> TorchPending:
        self._usable("all_gather")
        works = [
            _mapped(dist.all_gather_into_tensor, part.out, part.x, group=self._group, async_op=True)
            for part in args.parts
            if part.x.numel()
        ]
        return self._begun(works)

    def reduce_scatter(self, args: ReduceArgs, reduction: str = "sum") -> TorchPending:
        self._usable("reduce_scatter")
        self._check_dtype(args.x, reduction)
        op = _REDUCTIONS[reduction]
        if not args.x.numel():
            return TorchPending([], self._size, self._rank)
        return self._begun(
            [_mapped(dist.reduce_scatter_tensor, args.out, args.x, op=op, group=self._group, async_op=True)]
        )

    def all_reduce(self, args: ReduceArgs, reduction: str = "sum") -> TorchPending:
        self._usable("all_reduce")
        self._check_dtype(args.x, reduction)
        if not args.x.numel():
            return TorchPending([], self._size, self._rank)
        if args.out.data_ptr() != args.x.data_ptr():
            args.out.copy_(args.x)
        return self._begun(
            [_mapped(dist.all_reduce, args.out, op=_REDUCTIONS[reduction], group=self._group, async_op=True)]
        )

    def _begun(self, works: Sequence[Any]) -> TorchPending:
        """Beside a transport of GPUs, the current stream goes on behind them, as behind a kernel: blocks of the next
        operation, that wait for peers, could take the multiprocessors for which NCCL's wait on this GPU."""
        if self.capabilities.device_type == "cuda" and not self.capabilities.reason:
            for work in works:
                _mapped(work.wait)
        return TorchPending(works, self._size, self._rank)

    def _check_dtype(self, x: torch.Tensor, reduction: str) -> None:
        """Raise ArgumentError for what the backend would refuse once it has begun."""
        backend = _mapped(self._group._get_backend, x.device).name()
        why = why_not_reduced(backend, reduction, x.dtype)
        if why:
            raise ArgumentError("x", f"a dtype of which torch.distributed has {reduction!r} ({why})", x.dtype)

    def _usable(self, op: str) -> None:
        if self._closed:
            raise ClosedError(f"{op}: closed")
        if self._reason is not None:
            raise AbortedError(self._reason)
        if self._lost:
            raise PeerTimeout(
                peer=min(self._lost), op=op, phase="payload", expected=0, seen=0, waited_s=0, given_up=True
            )


def _mapped(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Errors of torch.distributed as ours."""
    try:
        return call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:  # ValueError: of a group that was destroyed
        raise TransportError(f"torch.distributed: {error}") from error
