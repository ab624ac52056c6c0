"""Latency records of operations by copy engines. No kernel times them: events on their stream do, in a ring of RING
operations. A reader that is later than that loses the oldest."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ep_kernels.transports.nvlink.gpu.copy_schedule import CopyMarks
from ep_kernels.types import LatencySample

RING = 64
_BEHIND, _END, _SENT, _ARRIVED = range(4)
_MOST = (1 << 31) - 1


class DeviceEvents(Protocol):
    """Events of one device that have times. Any thread."""

    def create(self) -> int:
        """A CUevent."""

    def pass_now(self, event: int) -> bool:
        """Let the device pass it at once; False where it does not get to that in time."""

    def between_ns(self, first: int, second: int) -> int | None:
        """From one to the other; None where the device has not passed both."""

    def close(self) -> None:
        """Give back all that were created."""


class TimedKind(NamedTuple):
    """What operations with the same steps have in common.

    Attributes:
        mode, num_bytes: `mode` and `tokens` of their records.
        arrivals: peers whose shards are marked one by one.
        peers: all that take part.
        op: that of their records.
    """

    mode: str
    num_bytes: int
    arrivals: Sequence[int]
    peers: Sequence[int]
    op: str = "all_gather"


class CopyTimes:
    """Events around the operations of one rank.

    Attributes:
        order: an event for the order of streams, of no operation.
    """

    def __init__(self, size: int, events: DeviceEvents) -> None:
        self._size, self._events, width = size, events, _ARRIVED + size - 1
        self._ring = [(ctypes.c_uint64 * width)(*(events.create() for _ in range(width))) for _ in range(RING)]
        self._addresses = [ctypes.addressof(slot) for slot in self._ring]
        self._ends = [slot[_END] for slot in self._ring]
        self._now = events.create()
        self.order = events.create()
        self._begun: deque[tuple[int, TimedKind]] = deque(maxlen=RING)
        self._newest = 0

    def address(self, seq: int) -> int:
        """Address of the events of operation `seq`, which is to begin: `behind`, then those of `marks`."""
        self._newest = seq
        return self._addresses[seq % RING]

    def note(self, seq: int, kind: TimedKind) -> None:
        self._newest = seq
        self._begun.append((seq, kind))

    def marks(self, seq: int, arrivals: Sequence[int]) -> CopyMarks:
        """The events that an operation passes."""
        return CopyMarks.of(self._ring[seq % RING][_END:], arrivals)

    def behind(self, seq: int) -> int:
        return int(self._ring[seq % RING][_BEHIND])

    def end(self, seq: int) -> int:
        """The event at which an operation ends; after RING more, at which a later one does."""
        return self._ends[seq % RING]

    def take(self, has_ended: Callable[[int], bool]) -> list[LatencySample]:
        """Records of the operations that have ended since the last call, oldest first. One thread at a time."""
        begun, found = self._begun, list[LatencySample]()
        if not begun or not has_ended(begun[0][0]) or not self._events.pass_now(self._now):
            return found
        now_ns = time.monotonic_ns()
        while begun and has_ended(begun[0][0]):
            sample = self._sample(*begun.popleft(), now_ns)
            found += [] if sample is None else [sample]
        return found

    def _sample(self, seq: int, kind: TimedKind, now_ns: int) -> LatencySample | None:
        behind, end, sent, *arrived = self._ring[seq % RING]
        sent = sent if kind.arrivals else end
        ago, send, total = (
            self._events.between_ns(*pair) for pair in ((behind, self._now), (behind, sent), (behind, end))
        )
        waits = [0] * self._size
        for peer in kind.peers:
            waits[peer] = total or 0  # where it is not marked: it was there then
        for peer, event in zip(kind.arrivals, arrived, strict=False):
            waits[peer] = self._events.between_ns(behind, event) or 0
        if ago is None or send is None or total is None or self._newest - seq >= RING:
            return None
        tokens = min(kind.num_bytes, _MOST)
        return LatencySample(kind.op, kind.mode, seq, tokens, now_ns - ago, send, tuple(waits), total)

    def restart(self) -> None:
        """A new epoch begins: what was under way has no record."""
        self._begun.clear()

    def close(self) -> None:
        """Give the events back. Idempotent."""
        self._begun.clear()
        self._events.close()
