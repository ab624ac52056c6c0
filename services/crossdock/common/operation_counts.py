"""Latency samples of operations in columns, and as metrics: many at a time; children of labels are looked up once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from crossdock.common.metrics import BatchedHistogram, Counter

_NS = 1e-9
_OP, _TOKENS, _SEQ, _, _SEND, _TOTAL, _WAITS = range(7)
"""Words of a record (`ep_kernels.telemetry`): mode is the upper half of the first, ranks that of the second."""
_LOW = (1 << 32) - 1


class RecordedSamples(Protocol):
    """Samples of one communicator (`ep_kernels.telemetry.Samples`)."""

    @property
    def records(self) -> bytes | bytearray:
        """Int64 [n, 6 + R] in bytes."""

    @property
    def ranks(self) -> int:
        """R."""

    def kind(self, op: int, mode: int) -> tuple[str, str]:
        """Name and algorithm."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of one name and algorithm, oldest first, in columns.

    Attributes:
        op, mode: as in a LatencySample.
        seq, tokens, send_ns, total_ns: int64 [n].
        waits_ns: int64 [n, R].
    """

    op: str
    mode: str
    seq: NDArray[np.int64]
    tokens: NDArray[np.int64]
    send_ns: NDArray[np.int64]
    total_ns: NDArray[np.int64]
    waits_ns: NDArray[np.int64]


def by_kind(samples: RecordedSamples) -> Iterator[Operations]:
    """The samples of each operation and algorithm. Raises ValueError: no transport writes such records."""
    words = np.frombuffer(samples.records, np.int64).reshape(-1, _WAITS + samples.ranks).T
    if (words[_TOKENS] >> 32 != samples.ranks).any():
        raise ValueError(f"records: expected {samples.ranks} ranks")
    for number in sorted(set(words[_OP].tolist())):
        columns = words[:, np.flatnonzero(words[_OP] == number)]
        yield Operations(
            *samples.kind(number & _LOW, number >> 32), columns[_SEQ], columns[_TOKENS] & _LOW, columns[_SEND],
            columns[_TOTAL], columns[_WAITS:].T,
        )  # fmt: skip


def lost(kinds: Sequence[Operations], next_seq: dict[str, int]) -> dict[str, int]:
    """How many samples of each operation are missing, by their numbers. `next_seq`: the number
    that each operation's next sample should have, empty at first; brought up to date."""
    found: dict[str, int] = {}
    for op in dict.fromkeys(one.op for one in kinds):
        seq = np.sort(np.concatenate([one.seq for one in kinds if one.op == op]))
        number = int(seq[-1]) + 1 - (next_seq.get(op, 0) or int(seq[0])) - seq.size
        next_seq[op] = int(seq[-1]) + 1
        if number > 0:
            found[op] = number
    return found


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

    def count(self, kinds: Sequence[Operations]) -> None:
        for one in kinds:
            send, wait, total = self._phases_of(one.op, one.mode)
            send.observe_many((one.send_ns * _NS).tolist())
            wait.observe_many((one.waits_ns.max(1) * _NS).tolist())
            total.observe_many((one.total_ns * _NS).tolist())
            for peer, waited_ns in enumerate(one.waits_ns.sum(0).tolist()):
                if waited_ns:
                    self._peer(one.op, peer).inc(waited_ns * _NS)

    def _phases_of(self, op: str, mode: str) -> tuple[BatchedHistogram, ...]:
        if (op, mode) not in self._phases:
            labels = [(*self._before, op, mode, phase, self._transport) for phase in ("send", "wait", "total")]
            self._phases[op, mode] = tuple(self._durations.labels(*each) for each in labels)
        return self._phases[op, mode]

    def _peer(self, op: str, peer: int) -> Counter:
        if (op, peer) not in self._peers:
            self._peers[op, peer] = self._waits.labels(*self._before, op, str(peer))
        return self._peers[op, peer]
