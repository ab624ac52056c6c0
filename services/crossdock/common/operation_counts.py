"""Latency samples of operations as metrics, counted many at a time; children of labels are looked up once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from crossdock.common.histograms import BatchedHistogram
from crossdock.common.metrics import Counter

PAUSE_S = 50e-6
"""Between two parts of the work: a thread that waits for the interpreter, like that of steps, has it in between."""


class Sample(Protocol):
    """What is counted of an operation (`ep_kernels.LatencySample`)."""

    @property
    def op(self) -> str:
        """Its name."""

    @property
    def mode(self) -> str:
        """Its algorithm."""

    @property
    def send_ns(self) -> int:
        """Until the own rows were sent."""

    @property
    def total_ns(self) -> int:
        """Of the whole operation."""

    @property
    def peer_wait_ns(self) -> Sequence[int]:
        """Of each rank."""


S = TypeVar("S", bound=Sample)


class OperationCounts:
    """Counts the samples of one rank.

    Args:
        durations: labels `before`, op, mode, phase, transport.
        waits: labels `before`, op, peer.
        before: values of the first labels.
        transport: value of that label.
    """

    def __init__(
        self, durations: BatchedHistogram, waits: Counter, transport: str, before: tuple[str, ...] = ()
    ) -> None:
        self._durations, self._waits, self._transport, self._before = durations, waits, transport, before
        self._phases: dict[tuple[str, str], tuple[BatchedHistogram, ...]] = {}
        self._peers: dict[tuple[str, int], Counter] = {}

    def count(self, samples: Sequence[Sample]) -> None:
        """Count them, with a pause after those of an operation."""
        for (op, mode), chosen in by_kind(samples):
            send, wait, total = self._phases_of(op, mode)
            send.observe_many(one.send_ns * 1e-9 for one in chosen)
            wait.observe_many(max(one.peer_wait_ns, default=0) * 1e-9 for one in chosen)
            total.observe_many(one.total_ns * 1e-9 for one in chosen)
            for peer, waits_ns in enumerate(zip(*(one.peer_wait_ns for one in chosen), strict=True)):
                if waited_ns := sum(waits_ns):
                    self._peer(op, peer).inc(waited_ns * 1e-9)
            time.sleep(PAUSE_S)

    def _phases_of(self, op: str, mode: str) -> tuple[BatchedHistogram, ...]:
        if (op, mode) not in self._phases:
            labels = [(*self._before, op, mode, phase, self._transport) for phase in ("send", "wait", "total")]
            self._phases[op, mode] = tuple(self._durations.labels(*each) for each in labels)
        return self._phases[op, mode]

    def _peer(self, op: str, peer: int) -> Counter:
        if (op, peer) not in self._peers:
            self._peers[op, peer] = self._waits.labels(*self._before, op, str(peer))
        return self._peers[op, peer]


def by_kind(samples: Sequence[S]) -> Iterator[tuple[tuple[str, str], list[S]]]:
    """The samples of each operation and algorithm."""
    kinds: dict[tuple[str, str], list[S]] = {}
    for sample in samples:
        kinds.setdefault((sample.op, sample.mode), []).append(sample)
    yield from kinds.items()
