"""What a rank knows when a wait of its communicator has failed, as one flat record that is written as JSON. Pure.

{"op": "dispatch", "phase": "payload", "peer": 3, "expected": 812, "seen": 811, "waited_s": 3.0, "gone": false, ...,
 "last_good": {"op": "combine", "seq": 811, "ago_s": 3.01}, "waits_s": {"dispatch": [0, 0.02, 0.01, 0.4]}}
"""

from __future__ import annotations

from collections.abc import Sequence

from ep_kernels.errors import PeerTimeout
from ep_kernels.types import LatencySample

WINDOW_S = 1.0
"""Waits of this last time before the failed one are summed."""
_MAX_CHARS = 1000
_NS = 1e-9


def record_of(error: BaseException, samples: Sequence[LatencySample], now_ns: int) -> dict[str, object]:
    """The record of a failure.

    Args:
        error: that ended the operation. Of a PeerTimeout: operation, phase, peer, sequence numbers expected and seen,
            seconds waited, and the block that waited where a kernel did; of others the words only.
        samples: the last operations of this rank.
        now_ns: monotonic, as their `start_ns`.

    Returns:
        plain JSON types. `last_good` (None: there is no sample) is the last operation that ended well, `waits_s` by
        operation and rank how long peers were waited for in the WINDOW_S before its end.
    """
    found: dict[str, object] = {"reason": str(error)[:_MAX_CHARS]}
    if isinstance(error, PeerTimeout):
        found |= {
            "op": error.op, "phase": error.phase, "peer": error.peer, "expected": error.expected, "seen": error.seen,
            "waited_s": round(error.waited_s, 4), "gone": error.gone, "given_up": error.given_up,
        }  # fmt: skip
        found |= {} if error.block is None else {"block": error.block}
    last = max(samples, key=_ended_ns, default=None)
    if last is None:
        return found | {"last_good": None, "waits_s": {}}
    good = {"op": last.op, "seq": last.seq, "ago_s": round((now_ns - _ended_ns(last)) * _NS, 4)}
    recent = [sample for sample in samples if sample.start_ns >= _ended_ns(last) - WINDOW_S / _NS]
    return found | {"last_good": good, "waits_s": _waits(recent)}


def _ended_ns(sample: LatencySample) -> int:
    return sample.start_ns + sample.total_ns


def _waits(samples: Sequence[LatencySample]) -> dict[str, list[float]]:
    sums: dict[str, list[int]] = {}
    for sample in samples:
        row = sums.setdefault(sample.op, [0] * len(sample.peer_wait_ns))
        for rank, wait_ns in enumerate(sample.peer_wait_ns[: len(row)]):
            row[rank] += wait_ns
    return {op: [round(wait_ns * _NS, 6) for wait_ns in row] for op, row in sums.items()}
