"""Where the experts are, how busy they are, and the way to a better placement. No I/O, no thread: the clock is given.

    reports of the ranks (with each heartbeat) ─▶ load of every expert, decayed ─▶ propose() ─▶ start(plan)
                                               └▶ how far the ranks are on the way ─▶ settled, or turned back

One placement is in force, or aimed at, at any time: `version`. The ranks agree among themselves, layer by layer, when
to switch; this page only names the goal and learns from their reports how far they are. When one of them cannot load,
or the way takes too long, the goal becomes what was reached. When an epoch ends on the way, the next one begins at what
was reached, too: each rank loads the difference between what it holds and what it is told, so that a report that comes
too late costs time, never a wrong answer.

The placement at which an epoch begins is frozen by `form` (`begun`): until the epoch serves, every rank must fetch the
same one. Only an epoch that serves gets another goal.

All of this is soft: after a restart the reports tell what is where. Until all of them agree `version` is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crossdock.common.config import PlacementConfig
from crossdock.control.balancer import check, filled, first_table
from crossdock.control.plans import Plan, Snapshot
from crossdock.control.tables import Shape, Table

_MAX_WEIGHT = 1e9


@dataclass(frozen=True, slots=True)
class Kind:
    """What a model asks of a placement: E, and the numbers of its MoE layers."""

    num_experts: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank holds. `layers`: experts by slot, for each MoE layer in order. `rows`: what each of them computed
    since the report before; empty for none."""

    version: int
    switched: int
    to_switch: int
    error: str
    layers: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def done(self) -> bool:
        """Whether the rank has come to the end of its way."""
        return self.switched == self.to_switch and not self.error


@dataclass(frozen=True, slots=True)
class Goal:
    """One version of the tables, by layer."""

    version: int
    tables: tuple[Table, ...]


@dataclass(slots=True)
class _Move:
    """A move that is under way."""

    before: tuple[Table, ...]
    begun: float
    retreat: bool = False


@dataclass(slots=True)
class Outcome:
    """How a move ended: result is "done" or "turned back"."""

    result: str
    text: str


@dataclass(slots=True)
class PlacementManager:
    """See the module's head. One per control plane.

    Args:
        config: of this control plane.
        world_size: R.

    Attributes:
        kind: of the model that the group serves; None before the first worker.
        version: of the placement in force or aimed at; 0 = not known. A number is used once, whatever the model.
        begun: the placement at which all ranks begin the epoch that `form` was called for last.
        last_change: what came of the last move, in words.
    """

    config: PlacementConfig
    world_size: int
    kind: Kind | None = None
    version: int = 0
    begun: Goal | None = None
    last_change: str = ""
    _highest: int = 0
    _tables: tuple[Table, ...] = ()
    _domains: tuple[int, ...] = ()
    _way: _Move | None = None
    _reports: dict[int, Report] = field(default_factory=dict)
    _missing: frozenset[int] = frozenset()
    """Ranks that take no part in the group that was taken over, until all form anew."""
    _loads: list[list[float]] = field(default_factory=list)
    _weight: float = 1.0
    _weighed_at: float = 0.0
    _observed_since: float = math.inf
    _looked_at: float = -math.inf

    # The group.

    def check_kind(self, kind: Kind) -> None:
        """Raise ValueError where slots for this many experts cannot be had."""
        most = kind.num_experts * (self.world_size - 1)
        if self.config.redundant_experts > most:
            got = self.config.redundant_experts
            raise ValueError(f"placement.redundant_experts: expected at most {most}, E * (R - 1), got {got}")

    def welcome(self, kind: Kind) -> None:
        """A worker has registered: another model than before voids everything."""
        if kind != self.kind:
            self.kind, self.version, self._tables, self._way, self.begun = kind, 0, (), None, None
            self._loads = [[0.0] * kind.num_experts for _ in kind.layers]
            self._reports.clear()

    def form(self, domains: Sequence[str], now: float) -> None:
        """A complete group is forming: fix where its experts lie.

        Args:
            domains: name of the NVLink domain or host of each rank, in rank order; of fewer where some are missing.
            now: seconds.
        """
        if self.kind is None:
            return
        if len(domains) == self.world_size or not self._domains:
            self._domains = _numbered(domains)
        reached = self._reached()
        known = max([self._highest, *(report.version for report in self._reports.values())])
        shape = self.shape
        if not reached or any(_slots(table) != shape.num_slots for table in reached):
            reached = (first_table(shape, self.config.min_copies),) * len(self.kind.layers)
        if reached != self._tables or self._way is not None or not self.version:
            self._aim(known + 1, reached)
        self._missing = frozenset()
        self.begun = Goal(self.version, self._tables)
        if self._way is not None:
            self.last_change = "turned back: the epoch ended on the way"
        self._way = None
        self._reports.clear()

    def recovered(self, domains: Sequence[str], missing: frozenset[int] = frozenset()) -> None:
        """The group served all along, under a control plane that is gone; without the ranks `missing`."""
        self._domains, self._missing = _numbered(domains), missing

    # Reports.

    def check_report(self, rank: int, report: Report) -> None:
        """Raise ValueError unless the report can be one of this rank in this group."""
        kind = self.kind
        if kind is None or len(report.layers) != len(kind.layers):
            expected = 0 if kind is None else len(kind.layers)
            raise ValueError(f"experts.layers: expected {expected} of them, got {len(report.layers)}")
        sizes = {len(held) for held in report.layers}
        if len(sizes) > 1 or max(sizes) > kind.num_experts * self.world_size:
            raise ValueError(f"experts.layers: expected as many slots in each, got {sorted(sizes)[:8]}")
        for held, rows in zip(report.layers, report.rows, strict=True):
            if any(expert >= kind.num_experts for expert in held):
                raise ValueError(f"experts.layers: expected experts < {kind.num_experts}, got {max(held)}")
            if rows and len(rows) != len(held):
                raise ValueError(f"experts.rows: expected {len(held)} of them or none, got {len(rows)}")

    def hear(self, rank: int, report: Report, now: float) -> Outcome | None:
        """Take a checked report of a serving rank. Returns how a move ended, if that is what it told."""
        self._weigh(now)
        for load, held, rows in zip(self._loads, report.layers, report.rows, strict=True):
            for expert, count in zip(held, rows, strict=False):
                load[expert] += count * self._weight
        self._reports[rank] = report
        if self._way is None:
            self._adopt()
            return None
        return self._follow(rank, report, now)

    def rows_per_s(self, now: float) -> tuple[tuple[float, ...], ...]:
        """Load of each expert, by layer: rows a second, older ones weighing less."""
        self._weigh(now)
        rate = math.log(2) / self.config.load_half_life_s
        seen_s = max(now - self._observed_since, 1e-3)
        whole = max(1 - math.exp(-seen_s * rate), 1e-6)  # a young control plane has seen a part of its window only
        return tuple(tuple(one * rate / whole / self._weight for one in load) for load in self._loads)

    # Moves.

    @property
    def shape(self) -> Shape:
        """Experts, slots and domains as they are configured."""
        assert self.kind is not None
        slots = self.kind.num_experts + self.config.redundant_experts
        return Shape(self.kind.num_experts, slots, self._domains or (0,) * self.world_size)

    @property
    def moving(self) -> tuple[int, int]:
        """Layers switched, and layers that change in all; (0, 0) when nothing moves."""
        reports = [report for report in self._reports.values() if report.version == self.version]
        if self._way is None:
            return 0, 0
        return min((r.switched for r in reports), default=0), max((r.to_switch for r in reports), default=0)

    @property
    def is_moving(self) -> bool:
        """Whether a move is under way."""
        return self._way is not None

    @property
    def tables(self) -> tuple[Table, ...]:
        """By layer: what is in force, or aimed at; empty when it is not known."""
        return self._tables if self.version else ()

    @property
    def domains(self) -> tuple[int, ...]:
        """Number of the NVLink domain of each rank."""
        return self._domains

    def is_due(self, now: float) -> bool:
        """Whether it is time to look for a better placement; if so, the next time is counted from now."""
        every_s = self.config.rebalance_s
        if every_s <= 0 or not self.version or self.is_moving or now - self._looked_at < every_s:
            return False
        first, self._looked_at = self._looked_at == -math.inf, now
        return not first

    def snapshot(self, now: float) -> Snapshot | None:
        """What a plan can be made from; None while it is not known where the experts are."""
        if not self.version or self.kind is None:
            return None
        slots = sum(len(held) for held in self._tables[0])
        shape = Shape(self.kind.num_experts, slots, self._domains)
        return Snapshot(self.version, shape, self._tables, self.rows_per_s(now), self.config.min_copies)

    def start(self, plan: Plan, now: float) -> bool:
        """Aim at a plan. False if it is of a former placement, or moves nothing."""
        if plan.base != self.version or self.is_moving or not plan.moves:
            return False
        self._way = _Move(self._tables, now)
        self._aim(self._highest + 1, plan.after)
        self.last_change = (
            f"moving {plan.moves} copies: imbalance {plan.imbalance:.3f}, then {plan.imbalance_after:.3f}"
        )
        return True

    def is_worth_it(self, plan: Plan) -> bool:
        """Whether a plan gains enough to start it unasked."""
        return bool(plan.moves) and plan.imbalance - plan.imbalance_after >= self.config.min_gain * plan.imbalance

    def expire(self, now: float) -> Outcome | None:
        """Turn back a move that has taken too long."""
        if self._way is None or now - self._way.begun < self.config.move_timeout_s:
            return None
        late = [str(rank) for rank in range(self.world_size) if not self._has_arrived(rank)]
        return self._turn_back(f"ranks {', '.join(late)} took longer than {self.config.move_timeout_s:g} s", now)

    def _follow(self, rank: int, report: Report, now: float) -> Outcome | None:
        assert self._way is not None
        if report.version == self.version and report.error:
            return self._turn_back(f"rank {rank}: {report.error}", now)
        if not all(self._has_arrived(each) for each in range(self.world_size)):
            return None
        took_s, retreat, self._way = now - self._way.begun, self._way.retreat, None
        self._adopt()
        if retreat:
            return None
        self.last_change = f"moved in {took_s:.1f} s"
        return Outcome("done", self.last_change)

    def _turn_back(self, why: str, now: float) -> Outcome | None:
        """Aim at what was reached. A retreat that fails is given up: what the reports say is in force then."""
        assert self._way is not None
        if self._way.retreat:
            self._way = None
            return None
        reached = self._reached()
        self._way = _Move(reached, now, retreat=True)
        self._aim(self._highest + 1, reached)
        self.last_change = f"turned back: {why}"
        return Outcome("turned back", self.last_change)

    def _has_arrived(self, rank: int) -> bool:
        report = self._reports.get(rank)
        return report is not None and report.version == self.version and report.done

    def _reached(self) -> tuple[Table, ...]:
        """By layer: the goal where a rank holds it already (a switch is everybody's), else what was before."""
        if self._way is None:
            return self._tables
        layers = []
        for number, (before, after) in enumerate(zip(self._way.before, self._tables, strict=True)):
            switched = any(
                report.version == self.version and before[rank] != after[rank] == report.layers[number]
                for rank, report in self._reports.items()
            )
            layers.append(after if switched else before)
        return tuple(layers)

    def _adopt(self) -> None:
        """Believe the reports once all ranks agree: after a restart, or when a way has ended elsewhere than planned."""
        reports = {rank: self._reports.get(rank) for rank in range(self.world_size) if rank not in self._missing}
        told = [report for report in reports.values() if report is not None and report.done]
        if self.kind is None or len(told) < len(reports) or len({report.version for report in told}) > 1:
            return
        if told[0].version < self.version or not self._domains:
            return
        tables = tuple(self._table_of(number) for number in range(len(self.kind.layers)))
        if tables == self._tables and told[0].version == self.version:
            return
        try:
            for table in tables:
                check(table, Shape(self.kind.num_experts, _slots(table), self._domains))
        except ValueError:
            return
        self._aim(told[0].version, tables)

    def _aim(self, version: int, tables: tuple[Table, ...]) -> None:
        self.version, self._tables, self._highest = version, tables, max(version, self._highest)

    def _table_of(self, number: int) -> Table:
        held = [
            None if rank in self._missing else self._reports[rank].layers[number] for rank in range(self.world_size)
        ]
        return filled(held, self.shape) if self._missing else tuple(one for one in held if one is not None)

    def _weigh(self, now: float) -> None:
        """What is counted now weighs more than what was counted before; by `_weight`, which grows."""
        self._observed_since = min(self._observed_since, now)
        if self._weighed_at:
            self._weight *= 2 ** ((now - self._weighed_at) / self.config.load_half_life_s)
        self._weighed_at = now
        if self._weight > _MAX_WEIGHT:
            self._loads = [[one / self._weight for one in load] for load in self._loads]
            self._weight = 1.0


def _slots(table: Table) -> int:
    return sum(len(held) for held in table)


def _numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Equal names, equal numbers, in the order of their first appearance."""
    numbers: Mapping[str, int] = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)
