"""Which holder gives which expert. Pure; the same answer in every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def shared_among(
    wanted: Mapping[int, int],
    holders_of: Callable[[int], Sequence[int]],
    loads: list[int],
    is_near: Sequence[bool],
    turn: int,
) -> dict[int, list[int]]:
    """Share experts among those that hold them: one of this host before others, of these the one that has given the
    fewest, and of equal ones each reader begins with another.

    Args:
        wanted: experts by key.
        holders_of: numbers of those that hold an expert.
        loads: experts that each has given; counted up here.
        is_near: by holder, whether it is of this host.
        turn: a number of the reader, as its rank.

    Returns:
        Keys by holder. What nobody holds is not among them.
    """
    made: dict[int, list[int]] = {}
    for key, expert in wanted.items():
        found = holders_of(expert)
        if not found:
            continue
        best = min(found, key=lambda holder: (not is_near[holder], loads[holder], (holder + turn) % len(loads)))
        loads[best] += 1
        made.setdefault(best, []).append(key)
    return made
