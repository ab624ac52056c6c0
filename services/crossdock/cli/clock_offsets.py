"""How far the ranks' clocks are apart, estimated from the operations themselves. Pure.

Rank i has the data of rank j at `a` on its clock, not before j sent it at `p` on j's: offset(i) - offset(j) <= a - p
for each operation. The least of these is the upper bound, the other direction gives the lower one. The middle is the
estimate, half of the distance its error: as small as the shortest way there and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossdock.protocol.v1.expert_pb2 import Operation

Trace = Mapping[int, Sequence[Operation]]
"""Operations by rank."""


@dataclass(frozen=True, slots=True)
class Offset:
    """To be added to a rank's times, to have those of the reference. `error_ns`: infinite where nothing bounds it."""

    offset_ns: int
    error_ns: float


def offsets(trace: Trace) -> dict[int, Offset]:
    """The offset of each rank's clock to that of the lowest rank."""
    reference = min(trace)
    found = {reference: Offset(0, 0.0)}
    for rank in trace:
        if rank == reference:
            continue
        ahead, behind = _bound(trace, rank, reference), _bound(trace, reference, rank)
        if math.isfinite(ahead) and math.isfinite(behind):  # -behind <= clock(rank) - clock(reference) <= ahead
            found[rank] = Offset(-round((ahead - behind) / 2), abs(ahead + behind) / 2)
        else:
            found[rank] = Offset(0, math.inf)
    return found


def _bound(trace: Trace, receiver: int, sender: int) -> float:
    """The least time from a send at `sender` to its arrival at `receiver`, each by its own clock; infinite: none."""
    sent = {(one.op, one.seq): one.start_ns + one.send_ns for one in trace[sender]}
    ways = [
        one.start_ns + one.send_ns + one.wait_ns[sender] - sent[one.op, one.seq]
        for one in trace[receiver]
        if (one.op, one.seq) in sent and sender < len(one.wait_ns)
    ]
    return min(ways, default=math.inf)
