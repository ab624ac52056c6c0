"""What expert placement is compared with: the heuristic that DeepSeek published as EPLB, and a plain greedy one.

Written anew from EPLB's description (DeepSeek-V3 technical report, section 3.4, and the README of deepseek-ai/EPLB).
Both start from nothing at each call: neither knows the table of before.
"""

from __future__ import annotations

from collections.abc import Sequence

from crossdock.control.placement.tables import Load, Shape, Table


def greedy(load: Load, shape: Shape) -> Table:
    """One copy each, and one more for as many of the most loaded as there is room; the heaviest copy first, on the
    least loaded rank with room."""
    order = sorted(range(shape.num_experts), key=lambda expert: (-load[expert], expert))
    more = set(order[: shape.num_slots - shape.num_experts])
    copies = [(expert, load[expert] / (1 + (expert in more))) for expert in order for _ in range(1 + (expert in more))]
    return _rows(copies, pack([share for _, share in copies], [shape.capacity(r) for r in range(shape.num_ranks)]))


def eplb(load: Load, shape: Shape) -> Table:
    """EPLB's global policy: one more copy again and again for the expert with the most load per copy, then balanced
    packing of all copies on all ranks."""
    copies = replicate(load, range(shape.num_experts), shape.num_slots)
    return _rows(copies, pack([share for _, share in copies], [shape.capacity(r) for r in range(shape.num_ranks)]))


def eplb_hierarchical(load: Load, shape: Shape, num_groups: int) -> Table:
    """EPLB's hierarchical policy: groups of experts are packed on domains, then copies are made and packed in each.

    Domains of equal size, and a number of groups that they divide.
    """
    domains = sorted(set(shape.domains))
    size = shape.num_experts // num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(num_groups)]
    homes = pack([sum(load[e] for e in group) for group in groups], [num_groups // len(domains)] * len(domains))
    table: list[tuple[int, ...]] = [()] * shape.num_ranks
    for number, domain in enumerate(domains):
        ranks = [rank for rank, home in enumerate(shape.domains) if home == domain]
        experts = [e for group, home in zip(groups, homes, strict=True) if home == number for e in group]
        copies = replicate(load, experts, shape.num_slots // len(domains))
        rows = _rows(copies, pack([share for _, share in copies], [shape.capacity(r) for r in ranks]))
        for rank, row in zip(ranks, rows, strict=True):
            table[rank] = row
    return tuple(table)


def replicate(load: Load, experts: Sequence[int], num_slots: int) -> list[tuple[int, float]]:
    """Each copy's expert and its share of the load."""
    counts = dict.fromkeys(experts, 1)
    for _ in range(num_slots - len(counts)):
        counts[max(counts, key=lambda expert: load[expert] / counts[expert])] += 1
    return [(expert, load[expert] / count) for expert, count in counts.items() for _ in range(count)]


def pack(weights: Sequence[float], capacity: Sequence[int]) -> list[int]:
    """Balanced packing: the heaviest first, each into the lightest pack with room. The pack of each weight."""
    packs, room, sums = [0] * len(weights), list(capacity), [0.0] * len(capacity)
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        packs[index] = min((pack for pack in range(len(room)) if room[pack]), key=lambda pack: (sums[pack], pack))
        room[packs[index]] -= 1
        sums[packs[index]] += weights[index]
    return packs


def _rows(copies: Sequence[tuple[int, float]], ranks: Sequence[int]) -> Table:
    return tuple(
        tuple(expert for (expert, _), home in zip(copies, ranks, strict=True) if home == rank)
        for rank in range(max(ranks) + 1)
    )
