"""Collectives under way: on the current stream, by kernels, or on the stream of the copy engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ep_kernels.errors import HandleError


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
