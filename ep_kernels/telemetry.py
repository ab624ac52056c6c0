"""The host end of the in-operation clock: raw sample records as transports write them, turned into LatencySample.

A record is the C struct `Sample`: op, mode, tokens, ranks (int32), seq (uint64), start_ns, send_ns, total_ns (int64),
then one int64 of waiting nanoseconds per rank, with room for MAX_RANKS. Native byte order; it never leaves the process.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Iterator, Sequence

from ep_kernels.types import LatencySample

MAX_RANKS = 64
RING_SIZE = 4096
"""Records that a ring keeps; older ones are lost."""
_HEAD = struct.Struct("=4iQ3q")
RECORD_BYTES = _HEAD.size + 8 * MAX_RANKS
_SLICE_BYTES, _PAUSE_S = 64 * RECORD_BYTES, 50e-6
"""Records counted at a time, 0.1 ms of work: then threads that wait for the interpreter, like the one of steps, run."""
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


def decode(records: memoryview | bytes) -> list[LatencySample]:
    """Records in the order in which they lie.

    Raises:
        ValueError: not a whole number of records, or fields that no transport writes.
    """
    if len(records) % RECORD_BYTES:
        raise ValueError(f"records: expected a multiple of {RECORD_BYTES} bytes, got {len(records)}")
    return list(_decode(memoryview(records)))


def _decode(records: memoryview) -> Iterator[LatencySample]:
    for at in range(0, len(records), RECORD_BYTES):
        if at and at % _SLICE_BYTES == 0:
            time.sleep(_PAUSE_S)
        op, mode, tokens, ranks, seq, start, send, total = _HEAD.unpack_from(records, at)
        name, modes = _OPS.get(op, ("", ()))
        if not (0 <= mode < len(modes) and 0 < ranks <= MAX_RANKS):
            raise ValueError(f"records: no such op, mode, ranks: {(op, mode, ranks)}")
        waits = struct.unpack_from(f"={ranks}q", records, at + _HEAD.size)
        yield LatencySample(name, modes[mode], seq, tokens, start, send, waits, total)


def lost(samples: Iterable[LatencySample], next_seq: dict[str, int]) -> dict[str, int]:
    """How many samples of each operation are missing, as they say, or else by their numbers. `next_seq`: the number
    that each operation's next sample should have, empty at first; brought up to date."""
    missing: dict[str, int] = {}
    for sample in samples:
        number = sample.missing
        if number is None:
            expected = next_seq.get(sample.op, 0)
            number = sample.seq - expected if 0 < expected < sample.seq else 0
        if number:
            missing[sample.op] = missing.get(sample.op, 0) + number
        next_seq[sample.op] = sample.seq + 1
    return missing


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of the values does not exceed (0 < q <= 1); NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def slowest_peer(samples: Sequence[LatencySample]) -> tuple[int, int]:
    """(rank that was waited for longest in all, those nanoseconds); (-1, 0) of nothing."""
    totals: dict[int, int] = {}
    for sample in samples:
        for rank, wait in enumerate(sample.peer_wait_ns):
            totals[rank] = totals.get(rank, 0) + wait
    return max(((rank, total) for rank, total in totals.items() if total), key=lambda pair: pair[1], default=(-1, 0))
