"""What a group waits for: a pure function over where the time of its steps went in an interval.

    judge(evidence, usual) -> Judgement

Ranks meet in every step, so one late rank makes all others wait. `late[op][i][j]` is the time that rank i waited for
rank j beyond the typical peer, summed over the operations of the interval. From it

    common   of j: what the others wait for j alike (the median over i). A rank that is late because it was kept waiting
             itself is not slow: the culprit must also wait less than the others do
    pair     of (i, j): what i waits for j and the others do not

The largest `common` is a slow rank, or what it computes: if it is late with its experts, and they had more rows than
those of the others at the same time per row, the routing is. Ranks of one host that are all late are a slow host; two
hosts of which each waits for the other, and no rank for its neighbours, have a slow line; a `pair` that is largest is a
slow link. If all have become slower together, and nobody waits, the slowness is uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

OPS = ("exchange", "dispatch", "combine")
MIN_STEPS = 12
"""Fewer steps than these tell nothing."""
MIN_LOST = 0.17
"""Share of the time of steps that must be lost to a cause, beyond the next one, for it to be named."""
CLEAR, CLEAR_OF_SEVERAL = 1.5, 2.0
"""How many times as much as the next cause it must have cost; if it is a pair of ranks, or a host."""
RISE = 2.0
"""The same of what is beyond the usual."""
CERTAIN = 0.75
"""Confidence from which on a cause is named although all ranks are slower than usual."""
BUSIER = 0.25
"""How much less than the others a slow rank must wait itself, as a share of what they wait for it."""
LOADED = 1.5
"""Rows of a rank over those of the median rank, from which on its load explains that it is late."""
SLOWER = 2.0
"""Time per row, and per step, over the usual ones, from which on all are slow."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's sums over an interval.

    Attributes:
        steps: number of them.
        step_s, waits_s, experts_s: seconds of all its steps; of its waits for the last peer therein, of its experts.
        rows: computed by its experts.
        hot_expert, hot_rows: the expert that computed most of them, and how many.
        late_s: by operation, by peer: seconds waited for it beyond the typical peer.
        host: ranks of one host share memory.
    """

    steps: int
    step_s: float
    waits_s: float
    experts_s: float
    rows: int
    hot_expert: int
    hot_rows: int
    late_s: Mapping[str, Sequence[float]]
    host: str = ""


@dataclass(frozen=True, slots=True)
class Usual:
    """Waits and times while nothing was wrong.

    Attributes:
        per_step_s, per_row_s: seconds of the experts of all ranks together.
        link_share: share of steps lost between the two hosts that lose most: a network is slower than shared memory.
        waited_for, busier: by rank, shares of the steps: what the others wait for it, and how much less than they it
            waits. Where ranks share processors some are always a little later than others.
    """

    per_step_s: float
    per_row_s: float
    link_share: float = 0.0
    waited_for: Mapping[int, float] = field(default_factory=dict)
    busier: Mapping[int, float] = field(default_factory=dict)

    def mixed(self, other: Usual, share: float) -> Usual:
        """This one with a share of another."""

        def mix(a: float, b: float) -> float:
            return a + share * (b - a)

        ranks = self.waited_for.keys() & other.waited_for.keys()
        return Usual(
            mix(self.per_step_s, other.per_step_s),
            mix(self.per_row_s, other.per_row_s),
            mix(self.link_share, other.link_share),
            {rank: mix(self.waited_for[rank], other.waited_for[rank]) for rank in ranks},
            {rank: mix(self.busier[rank], other.busier[rank]) for rank in ranks},
        )


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the group waits for.

    Attributes:
        kind: "unknown" (too few steps), "nothing", "slow_rank", "slow_host", "slow_link", "hot_expert",
            "skewed_routing" or "uniform_slowness".
        ranks: that are named; of a link its two ends.
        hosts: of these, where the host or the line between two hosts is named.
        expert: the hot one; -1: none.
        lost_share: of the time of steps.
        confidence: 0..1, how clearly this cause stands out against the next one.
        detail: figures, in words.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    expert: int = -1
    lost_share: float = 0.0
    confidence: float = 0.0
    detail: str = ""

    @property
    def named(self) -> tuple[object, ...]:
        return self.kind, self.ranks, self.hosts, self.expert


@dataclass(frozen=True)
class _Sums:
    """The waits of an interval, taken apart. `ranks`: those with figures; the rest is by position in them: `common` by
    operation, `total` of all operations, `net` the same of ranks that wait less than the others, else 0."""

    ranks: Sequence[int]
    times: Sequence[RankTimes]
    step_s: float
    common: dict[str, list[float]] = field(default_factory=dict)
    pair: list[list[float]] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    busier: list[float] = field(default_factory=list)
    net: list[float] = field(default_factory=list)


def judge(times: Mapping[int, RankTimes], usual: Usual | None = None) -> Judgement:
    """What the ranks, by number, waited for in an interval; `usual`: None where it is not known."""
    ranks = sorted(rank for rank, one in times.items() if one.steps >= MIN_STEPS and one.step_s > 0)
    if len(ranks) < 2 or len(ranks) < len(times):
        return Judgement("unknown", detail="too few steps")
    sums = _sums(ranks, [times[rank] for rank in ranks])
    slower = _uniform(sums, usual)
    for found in (_slow_link(sums), _slow_host_link(sums, usual), _slow_host(sums), _slow_rank(sums, usual)):
        if found is not None and (slower is None or found.confidence >= CERTAIN):
            return found
    return slower or Judgement("nothing", confidence=_calm(sums))


def usual_of(times: Mapping[int, RankTimes]) -> Usual | None:
    """What is usual by these times, in which nothing is wrong; None: too few steps."""
    steps, rows = sum(one.steps for one in times.values()), sum(one.rows for one in times.values())
    experts_s = sum(one.experts_s for one in times.values())
    if steps < MIN_STEPS or not rows or not experts_s:
        return None
    ranks = sorted(times)
    sums = _sums(ranks, [times[rank] for rank in ranks])
    link_share = max(_host_links(sums).values(), default=0.0) / sums.step_s
    waited_for, busier = (
        {rank: cost / sums.step_s for rank, cost in zip(ranks, costs, strict=True)}
        for costs in (sums.total, sums.busier)
    )
    return Usual(experts_s / steps, experts_s / rows, link_share, waited_for, busier)


def _sums(ranks: Sequence[int], times: Sequence[RankTimes]) -> _Sums:
    sums = _Sums(ranks, times, sum(one.step_s for one in times) / len(times))
    places = range(len(ranks))
    late = {op: [[_at(one.late_s.get(op, ()), rank) for rank in ranks] for one in times] for op in OPS}
    for op in OPS:
        sums.common[op] = [_typical([late[op][i][j] for i in places if i != j]) for j in places]
    for i in places:
        sums.pair.append([
            0.0 if i == j else sum(max(0.0, late[op][i][j] - sums.common[op][j]) for op in OPS) for j in places
        ])  # fmt: skip
    for j in places:
        others = sorted(one.waits_s for i, one in enumerate(times) if i != j)
        sums.busier.append(others[len(others) // 2] - times[j].waits_s)
        sums.total.append(sum(sums.common[op][j] for op in OPS))
        sums.net.append(sums.total[j] if sums.busier[j] >= BUSIER * sums.total[j] else 0.0)
    return sums


def _at(values: Sequence[float], rank: int) -> float:
    return values[rank] if rank < len(values) else 0.0


def _typical(values: Sequence[float]) -> float:
    """The median; of two the smaller one, so that one pair of three ranks does not look like a slow rank."""
    return sorted(values)[(len(values) - 1) // 2]


def _clear(lost_s: float, next_s: float, sums: _Sums, clear: float = CLEAR_OF_SEVERAL) -> bool:
    return lost_s - next_s >= MIN_LOST * sums.step_s and lost_s >= clear * next_s


def _confidence(lost_s: float, next_s: float) -> float:
    return round(lost_s / (lost_s + next_s), 3)


def _slow_link(sums: _Sums) -> Judgement | None:
    """One pair costs more than any rank, and than any pair that does not touch it at both ends."""
    places = range(len(sums.ranks))
    if len(sums.ranks) < 3:
        return None
    both = {(i, j): sums.pair[i][j] + sums.pair[j][i] for i in places for j in places if i < j}
    (i, j), lost_s = max(both.items(), key=lambda item: item[1])
    others = [cost for pair, cost in both.items() if pair != (i, j)]
    next_s = max(*others, *sums.net)
    if not _clear(lost_s, next_s, sums):
        return None
    ends = sums.ranks[i], sums.ranks[j]
    hosts = tuple(dict.fromkeys((sums.times[i].host, sums.times[j].host)))
    one, other = sums.pair[i][j] / sums.step_s, sums.pair[j][i] / sums.step_s
    detail = f"rank {ends[0]} waits for {ends[1]} {one:.0%} of its steps, {ends[1]} for {ends[0]} {other:.0%}"
    return _finding("slow_link", ends, lost_s, next_s, sums, hosts=hosts if len(hosts) > 1 else (), detail=detail)


def _blocks(sums: _Sums) -> dict[str, list[int]]:
    blocks: dict[str, list[int]] = {}
    for place, one in enumerate(sums.times):
        blocks.setdefault(one.host, []).append(place)
    return blocks


def _between(sums: _Sums, waiting: Sequence[int], late: Sequence[int]) -> float:
    """What ranks of one host wait for each of another's, on average."""
    costs = [
        sum(_at(sums.times[i].late_s.get(op, ()), sums.ranks[j]) for op in OPS) for i in waiting for j in late if i != j
    ]
    return sum(costs) / len(costs) if costs else 0.0


def _host_links(sums: _Sums) -> dict[tuple[str, str], float]:
    """Time that each of two hosts waits for the other, by pair. Empty where no rank has a neighbour to compare with."""
    blocks = _blocks(sums)
    if all(len(places) < 2 for places in blocks.values()):
        return {}
    return {
        (a, b): min(_between(sums, blocks[a], blocks[b]), _between(sums, blocks[b], blocks[a]))
        for a in blocks for b in blocks if a < b
    }  # fmt: skip


def _slow_host_link(sums: _Sums, usual: Usual | None) -> Judgement | None:
    """Two hosts of which each waits for the other, and for nobody else as long, nor as long as usual. Where there are
    two hosts only, what is usual must be known."""
    both, blocks = _host_links(sums), _blocks(sums)
    if not both or (len(both) == 1 and usual is None):
        return None
    (a, b), lost_s = max(both.items(), key=lambda item: item[1])
    inside = [_between(sums, places, places) for places in blocks.values()]
    others = [cost for pair, cost in both.items() if pair != (a, b)]
    next_s = max([*inside, *others, usual.link_share * sums.step_s if usual is not None else 0.0])
    if not _clear(lost_s, next_s, sums, CLEAR):
        return None
    ranks = tuple(sorted(sums.ranks[place] for place in (*blocks[a], *blocks[b])))
    detail = f"each waits for the other {lost_s / sums.step_s:.0%} of its steps"
    return _finding("slow_link", ranks, lost_s, next_s, sums, hosts=(a, b), detail=detail)


def _slow_host(sums: _Sums) -> Judgement | None:
    """All ranks of one host of several are late, and those of the others are not."""
    blocks = {name: places for name, places in _blocks(sums).items() if len(places) > 1}
    if not blocks or len(_blocks(sums)) < 2:
        return None
    least = {name: min(sums.net[place] for place in places) for name, places in blocks.items()}
    name = max(least, key=lambda one: least[one])
    next_s = max(sums.total[place] for place in range(len(sums.ranks)) if place not in blocks[name])
    if not _clear(least[name], next_s, sums):
        return None
    ranks = tuple(sums.ranks[place] for place in blocks[name])
    detail = f"the others wait for each of its ranks at least {least[name] / sums.step_s:.0%} of their steps"
    return _finding("slow_host", ranks, least[name], next_s, sums, hosts=(name,), detail=detail)


def _slow_rank(sums: _Sums, usual: Usual | None) -> Judgement | None:
    """One rank is late for all others, or later than usual by more than they are."""
    late = max(range(len(sums.ranks)), key=lambda place: sums.net[place])
    lost_s, next_s = sums.net[late], max(cost for place, cost in enumerate(sums.total) if place != late)
    if _clear(lost_s, next_s, sums, CLEAR):
        return _why_late(sums, late, lost_s, next_s)
    if usual is None or not set(sums.ranks) <= usual.waited_for.keys():
        return None
    late = max(range(len(sums.ranks)), key=lambda place: sums.total[place])
    rises = [cost - usual.waited_for[rank] * sums.step_s for rank, cost in zip(sums.ranks, sums.total, strict=True)]
    rise_s, next_s = rises[late], max(0.0, *(rise for place, rise in enumerate(rises) if place != late))
    busier_s = sums.busier[late] - usual.busier[sums.ranks[late]] * sums.step_s
    if busier_s < BUSIER * rise_s or rise_s - next_s < MIN_LOST * sums.step_s or rise_s < RISE * next_s:
        return None
    return _why_late(sums, late, rise_s, next_s)


def _why_late(sums: _Sums, late: int, lost_s: float, next_s: float) -> Judgement:
    """Because of its rows, or of itself."""
    rank = sums.ranks[late]
    share = f"the others wait for it {lost_s / sums.step_s:.0%} of their steps"
    one, rest = sums.times[late], [each for place, each in enumerate(sums.times) if place != late]
    typical_rows = median(each.rows for each in rest)
    per_row = [each.experts_s / each.rows for each in rest if each.rows]
    in_combine = sums.common["combine"][late] >= 0.5 * sums.total[late]
    as_fast = one.rows and (not per_row or one.experts_s / one.rows <= LOADED * median(per_row))
    if in_combine and as_fast and one.rows >= LOADED * max(typical_rows, 1):
        surplus = one.rows - typical_rows
        times = f"{one.rows / typical_rows:.1f} times the typical rank's" if typical_rows else "nearly all"
        detail = f"{share}; it computes {times} rows"
        if one.hot_rows >= 0.6 * surplus:
            detail += f", {one.hot_rows / one.rows:.0%} of them for expert {one.hot_expert}"
            return _finding("hot_expert", (rank,), lost_s, next_s, sums, expert=one.hot_expert, detail=detail)
        return _finding("skewed_routing", (rank,), lost_s, next_s, sums, detail=detail)
    return _finding("slow_rank", (rank,), lost_s, next_s, sums, detail=share)


def _uniform(sums: _Sums, usual: Usual | None) -> Judgement | None:
    times = sums.times
    if usual is None or not all(one.rows for one in times):
        return None
    per_step_s = sum(one.experts_s for one in times) / sum(one.steps for one in times)
    per_row_s = min(one.experts_s / one.rows for one in times)
    slower = min(per_step_s / usual.per_step_s, per_row_s / usual.per_row_s)
    if slower < SLOWER:
        return None
    detail = f"experts take {slower:.1f} times as long as usual on all ranks"
    confidence = round(min(1.0, slower / SLOWER - 0.5), 3)
    share = 1 - 1 / slower
    return Judgement("uniform_slowness", tuple(sums.ranks), lost_share=share, confidence=confidence, detail=detail)


def _calm(sums: _Sums) -> float:
    """Distance of the largest loss from being named."""
    return round(max(0.0, 1 - max(sums.net) / sums.step_s), 3)


def _finding(
    kind: str,
    ranks: tuple[int, ...],
    lost_s: float,
    next_s: float,
    sums: _Sums,
    *,
    hosts: tuple[str, ...] = (),
    expert: int = -1,
    detail: str = "",
) -> Judgement:
    share = min(1.0, (lost_s - next_s) / sums.step_s)
    return Judgement(kind, ranks, hosts, expert, share, _confidence(lost_s, next_s), detail)
