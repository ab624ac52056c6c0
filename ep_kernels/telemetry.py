"""Latency records on the host: what transports write, as a sequence of LatencySample and as words for whoever counts
many at once.

A record: op, mode, tokens, ranks (int32), seq (uint64), start_ns, send_ns, total_ns (int64), then one int64 of waiting
nanoseconds per rank: the used part of the C struct `Sample`, which has room for MAX_RANKS. Native byte order; it never
leaves the process.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from ep_kernels.types import LatencySample

MAX_RANKS = 64
RING_SIZE = 4096
"""Records that a ring keeps; older ones are lost."""
_HEAD = struct.Struct("=4iQ3q")
_MODES = ("ll", "ht")
_ALGORITHMS = ("pull", "one_shot", "two_shot")
_OPS = {
    0: ("dispatch", _MODES),
    1: ("combine", _MODES),
    3: ("exchange", ("host",)),
    5: ("all_gather", _ALGORITHMS),
    6: ("reduce_scatter", _ALGORITHMS),
    7: ("all_reduce", _ALGORITHMS),
}
"""Operations that write records, by number, and how they may run."""
Kind = tuple[str, str]
"""Name and algorithm of an operation: `op` and `mode` of a LatencySample."""
KINDS: Mapping[tuple[int, int], Kind] = {
    (op, mode): (name, algorithm) for op, (name, modes) in _OPS.items() for mode, algorithm in enumerate(modes)
}
"""Kinds of operations by the numbers in a record."""


def record_bytes(ranks: int) -> int:
    return _HEAD.size + 8 * ranks


class Samples(Sequence[LatencySample]):
    """Records of one communicator, oldest first. A LatencySample is made where it is looked at.

    Args:
        records: [n * record_bytes(ranks)]; not copied.
        kinds: by the numbers `op` and `mode` of a record.

    Raises:
        ValueError: not a whole number of records.
    """

    def __init__(
        self,
        records: bytes | bytearray,
        ranks: int,
        kinds: Mapping[tuple[int, int], Kind] = KINDS,
    ) -> None:
        self.records, self.ranks, self.kinds = records, ranks, kinds
        self._bytes = record_bytes(ranks)
        if len(records) % self._bytes:
            raise ValueError(f"records: expected a multiple of {self._bytes} bytes, got {len(records)}")

    @classmethod
    def of(cls, samples: Iterable[LatencySample]) -> Samples:
        """The same operations as records."""
        if isinstance(samples, cls):
            return samples
        numbers: dict[Kind, tuple[int, int]] = {}
        records, ranks = bytearray(), 0
        for one in samples:
            op, mode = numbers.setdefault((one.op, one.mode), (len(numbers), 0))
            ranks = ranks or len(one.peer_wait_ns)
            head = op, mode, one.tokens, ranks, one.seq, one.start_ns, one.send_ns, one.total_ns
            records += struct.pack(f"=4iQ{3 + ranks}q", *head, *one.peer_wait_ns)
        return cls(records, ranks, {number: kind for kind, number in numbers.items()})

    def __len__(self) -> int:
        return len(self.records) // self._bytes

    def __iter__(self) -> Iterator[LatencySample]:
        return map(self._at, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> LatencySample: ...
    @overload
    def __getitem__(self, index: slice) -> list[LatencySample]: ...
    def __getitem__(self, index: int | slice) -> LatencySample | list[LatencySample]:
        numbers = range(len(self))[index]
        return self._at(numbers) if isinstance(numbers, int) else list(map(self._at, numbers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def kind(self, op: int, mode: int) -> Kind:
        """The kind of the operation with these numbers. Raises ValueError: no transport writes them."""
        found = self.kinds.get((op, mode))
        if found is None:
            raise ValueError(f"records: no such operation: op {op}, mode {mode}")
        return found

    def _at(self, number: int) -> LatencySample:
        at = number * self._bytes
        op, mode, tokens, ranks, seq, start, send, total = _HEAD.unpack_from(self.records, at)
        if ranks != self.ranks:
            raise ValueError(f"records: expected {self.ranks} ranks, got {ranks}")
        name, algorithm = self.kind(op, mode)
        waits = struct.unpack_from(f"={ranks}q", self.records, at + _HEAD.size)
        return LatencySample(name, algorithm, seq, tokens, start, send, waits, total)


def merged(*parts: Sequence[LatencySample]) -> Sequence[LatencySample]:
    """All of them by when they began; where only one has any, it as it is."""
    found = [part for part in parts if len(part)]
    if len(found) < 2:
        return found[0] if found else ()
    return sorted(itertools.chain(*found), key=lambda sample: sample.start_ns)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of the values does not exceed (0 < q <= 1); NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
