"""The page of host memory that kernels write to: what failed, what was found; and what they read of the host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ep_kernels.errors import AbortedError, CapacityError, HandleError, PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.gpu import launch

_OUTGROWN = "a CUDA graph was captured when more ranks were active, and needs more staging now: capture it again"
"""Why a kernel stops by itself."""


_ABORT, _STATUS = abi.HostPage.abort.offset // 8, abi.HostPage.postmortem.offset // 8
"""Words of the page: the abort word, the status of the post-mortem record."""
_MISMATCH = abi.HostPage.mismatch.offset // 8
"""Word of the page: the status of the mismatch."""


class Mismatch(NamedTuple):
    """What a rank and a peer brought to one operation.

    Attributes:
        mine, theirs: the seq of the dispatch whose routing they brought; of a collective: `signature`.
    """

    op: str
    peer: int
    mine: int
    theirs: int


class HostPage:
    """Pinned memory that kernels write: what failed and what was found; and what they read from the host: the abort
    word and who is dead."""

    def __init__(self, size: int) -> None:
        self._words = torch.zeros(ctypes.sizeof(abi.HostPage) // 8, dtype=torch.int64, pin_memory=True, device="cpu")
        self._gone = torch.zeros(size, dtype=torch.int64, pin_memory=True, device="cpu")
        self._page = abi.HostPage.from_address(self._words.data_ptr())
        self._raw = memoryview(self._page).cast("B").cast("Q")  # the cheapest read
        self._fence = launch.library().cd_fence
        self.clock_offset_ns = 0
        self._num_reported = 0
        self.none_dropped = False
        """A dropped row is a finding."""
        self.address, self.gone_address = self._words.data_ptr(), self._gone.data_ptr()
        self.fault_addresses = (self.address + 8 * _ABORT, self.address + 8 * _STATUS)
        """Addresses of the words that are 0 while there is no fault."""
        self.reason = ""
        self._failure: TransportError | None = None

    def abort(self, reason: str) -> None:
        """End this rank's waits on the device, present and future."""
        self.reason = self.reason or reason
        self._page.abort = 1

    def fail(self, error: TransportError) -> None:
        """A wait that no kernel made has failed: `fault` gives this error, and waits on the device end. The first one
        counts. Any thread."""
        self._failure = self._failure or error
        self._page.abort = 1

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Waits that are under way on the device end at once; afterwards none of it is remembered."""
        self._page.abort = 1
        try:
            yield
        finally:
            self.clear()

    def mark_gone(self, rank: int) -> None:
        """Record that the rank's process is dead: kernels stop waiting for it."""
        self._gone[rank] = abi.DEAD

    def give_up(self, rank: int) -> None:
        """Record that kernels stop waiting for the rank, alive or not."""
        if not self._gone[rank]:
            self._gone[rank] = abi.GIVEN_UP

    def is_gone(self, rank: int) -> bool:
        return int(self._gone[rank]) == abi.DEAD

    def is_given_up(self, rank: int) -> bool:
        """Whether that rank is not waited for: it is dead, or given up."""
        return bool(self._gone[rank])

    def is_quiet(self) -> bool:
        """Whether there is no fault, and no mismatch that was not yet raised."""
        return not (self._raw[_ABORT] or self._raw[_STATUS] or self._raw[_MISMATCH])

    def quiet_words(self) -> list[tuple[int, int]]:
        """(address, the most that it may be) of each word that `is_quiet` looks at."""
        return [(self.address + 8 * word, 0) for word in (_ABORT, _STATUS, _MISMATCH)]

    def fault(self) -> TransportError | None:
        """The first wait that failed, as an error."""
        if not self._raw[_ABORT] and not self._raw[_STATUS]:
            return None
        if self._failure is not None and not self.reason:
            return self._failure
        record = self._page.postmortem
        stop = abi.STOPS[record.status]
        self._fence()  # kernels write the status last
        if self._page.abort or stop == "ABORTED":
            return AbortedError(self.reason or _OUTGROWN)
        if stop == "RUNNING":
            return None
        op, phase = abi.OPS[record.op], abi.PHASES[record.phase]
        if stop == "LEFT_OUT":
            return _left_out(op, record.peer, record.seen)
        return PeerTimeout(
            peer=record.peer, op=op, phase=phase, expected=record.expected, seen=record.seen,
            waited_s=record.waited_ns / 1e9, gone=stop == "GONE" and self.is_gone(record.peer),
            given_up=stop == "GONE" and not self.is_gone(record.peer), block=record.block,
        )  # fmt: skip

    def mismatch(self) -> Mismatch | None:
        """Ranks that brought different things to one operation; each is raised once."""
        found = self._page.mismatch
        if not found.status:
            return None
        self._fence()
        told = Mismatch(abi.OPS[found.op], found.peer, found.mine, found.theirs)
        found.status = 0
        return told

    @property
    def num_dropped(self) -> int:
        """Rows that dispatches have dropped here so far, as far as the device has got."""
        return int(self._page.dropped)

    def finding(self) -> HandleError | CapacityError | None:
        """What an operation found that breaks nothing, as an error; each is reported once."""
        found = self.mismatch()
        if found is not None:
            mine, theirs = f"dispatch {found.mine}", f"dispatch {found.theirs}"
            return HandleError(
                f"{found.op}: this rank brought the routing of {mine}, rank {found.peer} that of {theirs}"
            )
        dropped, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
        return CapacityError(dropped, None, None) if self.none_dropped and dropped else None

    def clear(self) -> None:
        """Forget the failed wait, and findings of operations that are void now; not an abort."""
        self._page.abort = int(bool(self.reason))
        self._failure = None
        self._page.postmortem = abi.Postmortem()
        self._page.mismatch = abi.RoutingMismatch()

    def relate_clocks(self) -> None:
        """Call when a barrier has just ended: its last act was to read the GPU's clock."""
        self.clock_offset_ns = time.monotonic_ns() - self._page.clock_ns


def _left_out(op: str, peer: int, word: int) -> TransportError:
    if word & abi.ALSO_LEFT_OUT:
        epoch = word & ~abi.ALSO_LEFT_OUT
        return TransportError(f"{op}: the group has gone on in epoch {epoch} without this rank and rank {peer}")
    return TransportError(f"{op}: rank {peer} has gone on in epoch {word} without this rank")
