"""Balancing of experts over the ranks of one MoE layer: load in, slots out. Pure; no clock, no group, no weights.

`balance` decides how many copies each expert gets, and on which ranks. Without a current table it gives copies to the
expert with the most load per copy and packs them, the heaviest first, on the least loaded rank; then it searches: as
long as it gains, the most loaded rank swaps an expert with another rank, or an almost unused copy is replaced by one
more of an expert of that rank. With a current table the search starts there, and a change must lower the load of the
most loaded rank by `worth` of the mean per copy that it loads: a sufficiently balanced table stays. A table made from
scratch is used only if it is better by more than the cost of its moves.

Copies of one expert are on different ranks, and if possible in different NVLink domains: a lost rank or domain then
loses no expert with a copy elsewhere. Domains are balanced because their ranks are.

Letters: E experts, R ranks, P slots of all ranks together (P >= E; the first P % R ranks have one slot more).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from crossdock.control.placement.placement_search import TINY, PlacementSearch
from crossdock.control.placement.tables import Load, Shape, Table

WORTH = 0.002
"""See `balance`: with 8 ranks of 36 slots, a table 10 % from balance is left alone unless 50 copies can mend it."""
_GOOD = 10
"""Below the worth of this many copies a table is good, and none is made from scratch for comparison."""


def first_table(shape: Shape, min_copies: int = 1) -> Table:
    """Before any load is known. Without copies: blocks in rank order, as `ep_kernels.ExpertMap.contiguous` has them."""
    if shape.num_slots > shape.num_experts:
        return balance([1.0] * shape.num_experts, shape, min_copies=min_copies)
    ends = [sum(shape.capacity(before) for before in range(rank + 1)) for rank in range(shape.num_ranks)]
    return tuple(tuple(range(end - shape.capacity(rank), end)) for rank, end in enumerate(ends))


def check(table: Table, shape: Shape) -> None:
    """Raise ValueError unless the table fills every slot, names experts of the model only, and leaves none out."""
    sizes = tuple(len(held) for held in table)
    expected = tuple(shape.capacity(rank) for rank in range(shape.num_ranks))
    if sizes != expected:
        raise ValueError(f"table: expected {expected} slots by rank, got {sizes}")
    named = {expert for held in table for expert in held}
    if named != set(range(shape.num_experts)):
        odd = sorted(named ^ set(range(shape.num_experts)))[:8]
        raise ValueError(f"table: expected each of {shape.num_experts} experts and no others, got it wrong for {odd}")


def filled(held: Sequence[Sequence[int] | None], shape: Shape) -> Table:
    """Complete a table with unknown ranks (None): they get experts without a copy, then those with the fewest copies.
    `check` fails if the known ranks are invalid."""
    counts = [0] * shape.num_experts
    for expert in (expert for experts in held if experts is not None for expert in experts):
        counts[expert] += expert < shape.num_experts
    table = [tuple(experts or ()) for experts in held]
    for rank, experts in enumerate(held):
        if experts is None:
            rarest = sorted(range(shape.num_experts), key=counts.__getitem__)[: shape.capacity(rank)]
            table[rank] = tuple(sorted(rarest))
            for expert in rarest:
                counts[expert] += 1
    return tuple(table)


def copies_of(table: Table, num_experts: int) -> list[int]:
    """Copies of each expert."""
    counts = [0] * num_experts
    for held in table:
        for expert in held:
            counts[expert] += 1
    return counts


def rank_loads(load: Load, table: Table) -> list[float]:
    """Load of each rank when copies share evenly."""
    counts = copies_of(table, len(load))
    return [sum(load[expert] / counts[expert] for expert in held) for held in table]


def imbalance(load: Load, table: Table, groups: Sequence[int] | None = None) -> float:
    """Load of the most loaded rank over the mean rank's; 1 is perfect, and what no load at all gives.

    Args:
        groups: number of the group (an NVLink domain, say) of each rank: compare groups per rank of theirs instead.
    """
    loads = rank_loads(load, table)
    total = sum(loads)
    if total <= 0:
        return 1.0
    mean = total / len(loads)
    if groups is None:
        return max(loads) / mean
    members: dict[int, list[float]] = {}
    for group, one in zip(groups, loads, strict=True):
        members.setdefault(group, []).append(one)
    return max(sum(ones) / len(ones) for ones in members.values()) / mean


def num_moved(before: Table, after: Table) -> int:
    """Copies that a rank must load to come from one table to the other."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def balance(
    load: Load, shape: Shape, current: Table | None = None, *, min_copies: int = 1, worth: float = WORTH
) -> Table:
    """A table for this load.

    Args:
        load: [E], none negative.
        shape: E, P, R and the domains.
        current: the table now, kept where it is good enough; None: there is none.
        min_copies: of each expert, as far as P and R allow it.
        worth: how much of the mean rank's load the most loaded rank must lose for each copy that is loaded.

    Returns:
        A table that `check` accepts; experts that stay on a rank keep their slot.

    Raises:
        ValueError: a load that is negative or of the wrong length, or a `current` that does not fit.
    """
    if len(load) != shape.num_experts or min(load, default=0.0) < 0:
        raise ValueError(f"load: expected {shape.num_experts} numbers >= 0, got {len(load)} from {min(load)}")
    least = max(1, min(min_copies, shape.num_ranks, shape.num_slots // shape.num_experts))
    total = sum(load)
    even = [one + total * TINY + TINY for one in load]  # experts without load are spread, too
    if current is None:
        return _from_scratch(even, shape, least)
    check(current, shape)
    board = PlacementSearch(even, shape, [set(held) for held in current], least)
    board.restore_copies()
    board.search(worth)
    kept = _keep_slots(current, board.table())
    if imbalance(even, kept) < 1 + _GOOD * worth:
        return kept
    fresh = _keep_slots(current, _as_before(current, _from_scratch(even, shape, least), shape))
    return min(kept, fresh, key=lambda table: imbalance(even, table) + worth * num_moved(current, table))


def resized(load: Load, shape: Shape, rows: Sequence[Sequence[int]], min_copies: int = 1) -> Table:
    """The table of a group of another size. As few copies are loaded as possible: each rank keeps as many as it has
    slots for, so what is loaded is the slots that it has beyond that. (One more where a rank with room holds the expert
    already that is left.)

    Args:
        load: [E], none negative.
        shape: E, P, R and the domains afterwards.
        rows: the experts that each rank holds now, all of E among them or in dropped ranks; empty for a new rank; [R].
        min_copies: of each expert, as far as there are slots.

    Returns:
        A table that `check` accepts; experts that stay on a rank come first there, in their order.
    """
    even = [one + sum(load) * TINY + TINY for one in load]
    kept = [_kept(even, row, shape.capacity(rank)) for rank, row in enumerate(rows)]
    # Which copies the other slots get: experts without one, then those with too few, then the most loaded.
    counts = [sum(expert in held for held in kept) for expert in range(shape.num_experts)]
    least = max(1, min(min_copies, shape.num_ranks, shape.num_slots // shape.num_experts))

    def urgency(expert: int) -> tuple[int, float, int]:
        count = counts[expert]
        return min(count, least), -even[expert] / max(count, 1), expert

    open_to = [urgency(expert) for expert in range(shape.num_experts)]
    heapq.heapify(open_to)
    for _ in range(shape.num_slots - sum(counts)):
        while counts[open_to[0][-1]] >= shape.num_ranks:
            heapq.heappop(open_to)
        counts[open_to[0][-1]] += 1
        heapq.heapreplace(open_to, urgency(open_to[0][-1]))
    # Where they lie.
    table = _pack(even, shape, counts, kept)
    stay = ([expert for expert in dict.fromkeys(row) if expert in new] for row, new in zip(rows, table, strict=True))
    return tuple((*first, *sorted(new.difference(first))) for first, new in zip(stay, table, strict=True))


def _kept(load: Load, row: Sequence[int], capacity: int) -> set[int]:
    """As many experts of a rank as it has slots for, with that share of its load as nearly as swaps of two bring it."""
    held = sorted(set(row), key=lambda expert: (-load[expert], expert))
    size, stays = len(held), min(len(held), capacity)
    kept = [held[i] for i in range(size) if i * stays // size != (i + 1) * stays // size]
    gone = [expert for expert in held if expert not in kept]
    over = sum(load[expert] for expert in kept) - sum(load[expert] for expert in held) * stays / max(size, 1)
    while kept and gone:
        one, other = min(itertools.product(kept, gone), key=lambda pair: abs(over - load[pair[0]] + load[pair[1]]))
        after = over - load[one] + load[other]
        if abs(after) >= abs(over):
            break
        over, kept[kept.index(one)], gone[gone.index(other)] = after, other, one
    return set(kept)


def _from_scratch(load: Load, shape: Shape, least: int) -> Table:
    board = PlacementSearch(load, shape, _pack(load, shape, _copies(load, shape, least)), least)
    board.search(worth=0.0)
    return board.table()


def _copies(load: Load, shape: Shape, least: int) -> list[int]:
    """How many copies each expert gets: one more again and again for the one with the most load per copy."""
    counts = [least] * shape.num_experts
    open_to = [(-load[expert] / least, expert) for expert in range(shape.num_experts) if least < shape.num_ranks]
    heapq.heapify(open_to)
    for _ in range(shape.num_slots - least * shape.num_experts):
        expert = open_to[0][1]
        counts[expert] += 1
        if counts[expert] < shape.num_ranks:
            heapq.heapreplace(open_to, (-load[expert] / counts[expert], expert))
        else:
            heapq.heappop(open_to)
    return counts


def _pack(load: Load, shape: Shape, counts: Sequence[int], held: list[set[int]] | None = None) -> list[set[int]]:
    """The heaviest copies first, each on the least loaded rank with room that has no copy of it; the copies of one
    expert in different domains as long as there are domains without one. `held`: copies that have a rank already."""
    held = [set() for _ in shape.domains] if held is None else held
    missing = list(counts)
    for experts in held:
        for expert in experts:
            missing[expert] -= 1
    loads = [sum(load[expert] / counts[expert] for expert in experts) for experts in held]
    for expert in sorted(range(shape.num_experts), key=lambda expert: (-load[expert] / counts[expert], expert)):
        share = load[expert] / counts[expert]
        for _ in range(missing[expert]):
            near = {shape.domains[rank] for rank in range(shape.num_ranks) if expert in held[rank]}
            room = [rank for rank in range(shape.num_ranks) if len(held[rank]) < shape.capacity(rank)]
            fits = [rank for rank in room if expert not in held[rank]]
            if fits:
                rank = min(fits, key=lambda rank: (shape.domains[rank] in near, loads[rank], rank))
            else:
                rank = _make_room(load, counts, held, loads, expert, room[0])
            held[rank].add(expert)
            loads[rank] += share
    return held


def _make_room(
    load: Load, counts: Sequence[int], held: list[set[int]], loads: list[float], expert: int, room: int
) -> int:
    """Every rank with room has the expert: some other rank gives one of its own to `room`, and is returned. There is
    one: an expert has at most R copies, and ranks differ by at most one slot."""
    for rank, experts in enumerate(held):
        spare = experts - held[room]
        if expert not in experts and spare:
            moved = min(spare, key=lambda one: (load[one] / counts[one], one))
            for place, sign in ((rank, -1), (room, 1)):
                loads[place] += sign * load[moved] / counts[moved]
            experts.remove(moved)
            held[room].add(moved)
            return rank
    raise ValueError(f"num_slots: expected room for a copy of expert {expert}, got none")


def _as_before(current: Table, table: Table, shape: Shape) -> Table:
    """The sets of experts, given to the ranks of the same domain and size that hold most of them already."""
    kept = [set(held) for held in current]
    pairs = sorted(
        (-len(kept[old].intersection(table[new])), old, new)
        for old in range(shape.num_ranks)
        for new in range(shape.num_ranks)
        if shape.domains[old] == shape.domains[new] and len(current[old]) == len(table[new])
    )
    taken: dict[int, int] = {}
    given: set[int] = set()
    for _, old, new in pairs:
        if old not in taken and new not in given:
            taken[old] = new
            given.add(new)
    return tuple(table[taken[rank]] for rank in range(shape.num_ranks))


def _keep_slots(current: Table, table: Table) -> Table:
    """The experts of each rank in slots; those that a rank had before keep their slot."""
    rows = []
    for old, new in zip(current, table, strict=True):
        fresh = iter(expert for expert in new if expert not in old)
        seen: set[int] = set()
        row = []
        for expert in old:
            stays = expert in new and expert not in seen
            seen.add(expert)
            row.append(expert if stays else next(fresh))
        rows.append(tuple(row))
    return tuple(rows)
