"""Collectives under way: on the current stream, by kernels, or on the stream of the copy engines. And their plans: an
operation like an earlier one, whose records are filled but for two addresses, is launched by one call.

A plan is valid for arguments of the same shape, dtype, registered offset and options, and only as long as the same
ranks take part. A plan begins nothing where there may be something to tell, where the kernel before was on another
stream, or, for copy engines, under graph capture: it says None, and the operation takes the long way, which sees to all
of that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ep_kernels.errors import HandleError, TransportError
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.copy_engines.copies import CopyEngines
from ep_kernels.transports.nvlink.copy_engines.repeat_records import DISTURBED, KernelRepeat, PushTemplate
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.gpu.launch import Quiet


class WorkOwner(Protocol):
    """What a work asks of its transport."""

    @property
    def epoch(self) -> int:
        """Membership counter."""

    def raise_fault(self) -> None:
        """Raise what failed on the device so far."""

    def await_shard(self, seq: int, peer: int, half: bool = False) -> None:
        """The current stream waits for a peer's shard of an all-gather by copy engines, or the first half of it."""

    def await_end(self, seq: int) -> None:
        """The current stream waits for the end of one."""

    def has_ended(self, seq: int) -> bool:
        """Whether the copy engines are through with one."""


class KernelWork:
    """See `collective_base.PendingGather`. What kernels do is in order on the stream on which they were launched.

    Args:
        ranks: whose shards come, this rank first.
    """

    __slots__ = ("_epoch", "_event", "_owner", "_ranks", "_stream", "_waited")
    halves = False

    def __init__(self, owner: WorkOwner, stream: torch.cuda.Stream, ranks: Sequence[int], epoch: int) -> None:
        self._owner, self._stream, self._ranks, self._epoch = owner, stream, ranks, epoch
        self._event: torch.cuda.Event | None = None
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            return
        if self._epoch != self._owner.epoch:
            require_epoch(self._epoch, self._owner.epoch)
        stream = self._stream
        if torch._C._cuda_getCurrentRawStream(stream.device_index) != stream.cuda_stream:
            torch.cuda.current_stream(stream.device).wait_event(self._marked())
        self._waited = True
        self._owner.raise_fault()

    def _marked(self) -> torch.cuda.Event:
        if self._event is None:
            self._event = self._stream.record_event()
        return self._event

    def is_completed(self) -> bool:
        """See `collective_base.PendingCollective`. The first call marks the stream: what was launched there since then
        counts, too."""
        if self._epoch != self._owner.epoch or torch.cuda.is_current_stream_capturing():
            return False
        return bool(self._marked().query())  # type: ignore[no-untyped-call]

    def shards(self) -> Iterator[list[int]]:
        self.wait()
        yield list(self._ranks)


class CopyWork:
    """See `collective_base.PendingGather`, for an all-gather by copy engines.

    Args:
        arrivals: peers in the order in which their shards come; each may be waited for alone where `splits`.
        placed: behind the kernel that puts this rank's own shard in its place; None where it is there.
        halves: shards come by halves.
    """

    __slots__ = ("_arrivals", "_epoch", "_owner", "_placed", "_rank", "_seq", "_splits", "_waited", "halves")

    def __init__(
        self,
        owner: WorkOwner,
        seq: int,
        rank: int,
        arrivals: Sequence[int],
        splits: bool,
        placed: torch.cuda.Event | None,
        epoch: int,
        halves: bool = False,
    ) -> None:
        self.halves = halves
        self._owner, self._seq, self._rank, self._arrivals, self._splits = owner, seq, rank, arrivals, splits
        self._epoch, self._placed, self._waited = epoch, placed, False

    def _await_own(self) -> None:
        if self._placed is not None:
            torch.cuda.current_stream().wait_event(self._placed)

    def wait(self) -> None:
        if self._waited:
            return
        if self._epoch != self._owner.epoch:
            require_epoch(self._epoch, self._owner.epoch)
        self._waited = True
        if self._placed is not None:
            self._await_own()
        self._owner.await_end(self._seq)
        self._owner.raise_fault()

    def is_completed(self) -> bool:
        if self._epoch != self._owner.epoch or not self._owner.has_ended(self._seq):
            return False
        return self._placed is None or bool(self._placed.query())  # type: ignore[no-untyped-call]

    def shards(self) -> Iterator[list[int]]:
        require_epoch(self._epoch, self._owner.epoch)
        self._await_own()
        yield [2 * self._rank, 2 * self._rank + 1] if self.halves else [self._rank]
        for peer in self._arrivals if self._splits else ():
            if self.halves:
                self._owner.await_shard(self._seq, peer, half=True)
                yield [2 * peer]
            self._owner.await_shard(self._seq, peer)
            yield [2 * peer + 1] if self.halves else [peer]
        self.wait()
        if self._arrivals and not self._splits:
            yield list(self._arrivals)


class DoneWork:
    """An operation that moves nothing.

    Args:
        ranks: whose shards are there.
    """

    halves = False

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def wait(self) -> None:
        """Does nothing: the work is complete."""

    def is_completed(self) -> bool:
        return True

    def shards(self) -> Iterator[list[int]]:
        yield list(self._ranks)


def require_epoch(then: int, now: int) -> None:
    """Raise HandleError where `set_active` came between."""
    if then != now:
        raise HandleError(f"this work was begun in epoch {then}; the group is in epoch {now}")


class PlanOwner(WorkOwner, Protocol):
    """What a plan asks of its transport."""

    def undisturbed(self) -> torch.cuda.Stream | None:
        """The current stream, where a kernel may begin on it as far as Python knows; else None."""

    def used(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """A kernel that uses these was launched on it."""

    def untroubled(self) -> int | None:
        """The current CUstream, where copies may begin behind it, whatever others are behind; else None."""

    def note_capture(self) -> None:
        """A CUDA graph has captured an operation."""


class KernelPlan:
    """One launch.

    Args:
        kernel: a `launch.Kernel`.
        addressed: what of its record has `x` and `out`: itself, or its only part.
        ranks: whose shards come, this rank first.
        quiet: what it looks at first.
    """

    def __init__(
        self, owner: PlanOwner, kernel: Any, call: Call, addressed: Any, ranks: Sequence[int], quiet: Quiet
    ) -> None:
        self._owner, self._ranks, self._epoch, how = owner, ranks, owner.epoch, call.launch
        prepared = kernel.prepared(
            how.num_blocks, call.variant.num_threads, cooperative=how.cooperative, overlapped=how.overlapped
        )
        self._library = kernel.library
        at, kind = ctypes.addressof(addressed), type(addressed)
        x, out = at + kind.x.offset, at + kind.out.offset
        self._record = KernelRepeat(quiet.address, ctypes.addressof(prepared), ctypes.addressof(call.args), x, out)
        self._address, self._repeat = ctypes.addressof(self._record), self._library.cd_repeat_kernel
        self._keep = call.args, kernel, quiet

    def begin(self, x: torch.Tensor, out: torch.Tensor, x_at: int, out_at: int) -> KernelWork | None:
        stream = self._owner.undisturbed()
        if stream is None:
            return None
        status = self._repeat(self._address, stream.cuda_stream, x_at, out_at)
        if status:
            if status == DISTURBED:
                return None
            launch.raise_refused(launch.LAUNCH, status, self._library)
            self._owner.note_capture()
        self._owner.used(x, out)
        return KernelWork(self._owner, stream, self._ranks, self._epoch)


class CopyPlan:
    """A push by copy engines, of a shard that lies in its place.

    Args:
        make: the operation, for x at a fixed place of the pool; None where it has none. Called when it repeats first.
    """

    def __init__(
        self, owner: PlanOwner, engines: CopyEngines, make: Callable[[], PushTemplate | None], rank: int
    ) -> None:
        self._owner, self._engines, self._rank = owner, engines, rank
        self._make: Callable[[], PushTemplate | None] | None = make
        self._template: PushTemplate | None = None
        self._arrivals, self._epoch = engines.arrivals(), owner.epoch

    def begin(self, x: torch.Tensor, out: torch.Tensor, x_at: int, out_at: int) -> CopyWork | None:
        current = self._owner.untroubled()
        if current is None or torch._C._cuda_isCurrentStreamCapturing():
            return None
        template = self._template or self._made()
        if template is None:
            return None
        kept = out.untyped_storage()  # x, too, is in it; not the tensor, for whose end its owner may watch
        seq = self._engines.push_again(template, kept, current)
        if not seq:
            return None
        splits = bool(template.kind.arrivals)
        return CopyWork(self._owner, seq, self._rank, self._arrivals, splits, None, self._epoch)

    def _made(self) -> PushTemplate | None:
        make, self._make = self._make, None
        if make is not None:
            with contextlib.suppress(TransportError):  # the driver makes no such graph: the long way needs none
                self._template = make()
        return self._template
