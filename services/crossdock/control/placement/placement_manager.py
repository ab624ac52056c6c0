"""Placement of experts: load, the current version of the tables, and moves to a better one. No I/O, no thread, no
clock.

    reports of the ranks (with each heartbeat) ─▶ decayed load of every expert ─▶ snapshot() ─▶ start(rebalance)
                                               └▶ progress of the ranks ─▶ move done, or rolled back

`version` names the current placement, or the goal of the current move. The ranks agree among themselves, layer by
layer, when to switch; this class only sets the goal and follows their reports. If a rank cannot load, or the move times
out, the layers already switched become the new goal. If an epoch ends during a move, the next epoch begins with those
layers, too: each rank loads the difference between what it holds and the goal, so a late report costs time, never a
wrong answer.

`form` freezes the placement at which an epoch begins (`epoch_goal`): until the epoch serves, every rank must fetch the
same one. Only a serving epoch gets another goal.

Another checkpoint is loaded in the same way (`load`): tables hold weight ids (checkpoints.py), so a layer that is to
have other weights is a layer that changes. If such a move fails, or an epoch ends during it, layers may differ; then
`settle` moves all of them to the checkpoint that is wanted, which is the former one after a failure.

All of this is soft state: after a restart it is restored from the reports. Until all of them agree `version` is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from crossdock.common.config import PlacementConfig
from crossdock.control.placement.balancer import check, filled, first_table, resized
from crossdock.control.placement.checkpoints import NO_CHECKPOINTS, Checkpoints, experts_of, number_of, weights_of
from crossdock.control.placement.expert_reports import Goal, Kind, Move, Outcome, Report
from crossdock.control.placement.rebalance import Rebalance, Snapshot
from crossdock.control.placement.tables import Shape, Table, numbered

_MAX_WEIGHT = 1e9
_MAX_HALVINGS = 64.0
"""At a time: what was counted before that many half-lives is nothing."""
_SETTLE_S = 2.0
"""Pause between attempts to make all layers have one checkpoint."""


@dataclass(slots=True)
class PlacementManager:
    """Placement of one control plane.

    Args:
        config: of this control plane.
        world_size: R, of the epoch that is served or begins.

    Attributes:
        kind: experts of the served model; None before the first worker.
        version: of the current placement or the goal of a move; 0 = unknown. Versions are never reused, for any model.
        epoch_goal: placement of all ranks at the start of the epoch of the last `form`.
        last_change: outcome of the last move, as text.
        checkpoints: of the group.
    """

    config: PlacementConfig
    world_size: int
    kind: Kind | None = None
    version: int = 0
    epoch_goal: Goal | None = None
    last_change: str = ""
    _highest: int = 0
    _tables: tuple[Table, ...] = ()
    _domains: tuple[int, ...] = ()
    _move: Move | None = None
    _reports: dict[int, Report] = field(default_factory=dict)
    _missing: frozenset[int] = frozenset()
    """Inactive ranks of the recovered group, until the group re-forms."""
    _loads: list[list[float]] = field(default_factory=list)
    _weight: float = 1.0
    _decayed_at: float = 0.0
    _counting_since: float = math.inf
    _searched_at: float = -math.inf
    checkpoints: Checkpoints = NO_CHECKPOINTS
    _settled_at: float = -math.inf
    _apart_since: float = math.inf

    # The group.

    def check_kind(self, kind: Kind, world_size: int) -> None:
        """Raise ValueError if the configured copies do not fit on so many ranks."""
        most = kind.num_experts * (world_size - 1)
        if self.config.redundant_experts > most:
            got = self.config.redundant_experts
            raise ValueError(f"placement.redundant_experts: expected at most {most}, E * (R - 1), got {got}")

    def set_kind(self, kind: Kind) -> None:
        """Set the served model; another one resets all state."""
        if kind != self.kind:
            self.kind, self.version, self._tables, self._move, self.epoch_goal = kind, 0, (), None, None
            self._loads = [[0.0] * kind.num_experts for _ in kind.layers]
            self._reports.clear()

    def form(self, domains: Sequence[str | None], now: float, planned: Goal | None = None) -> None:
        """Fix the placement of a forming group.

        Args:
            domains: name of the NVLink domain or host of each rank, in rank order; None: that rank is missing.
            now: seconds.
            planned: what its ranks have prepared for; None: what they hold, made fit for another number of ranks.
        """
        self.world_size = len(domains)
        if self.kind is None:
            return
        if None not in domains or len(self._domains) != len(domains):
            self._domains = numbered(domains)
        reached = self._reached() if planned is None else planned.tables
        if not self.checkpoints.version:
            reached = tuple(weights_of(table, self.kind.num_experts, 0) for table in reached)
        known = max([self._highest, *(report.version for report in self._reports.values())])
        shape = self.shape
        if reached and len(reached[0]) != len(domains):
            former = [rank if rank < len(reached[0]) else None for rank in range(len(domains))]
            reached = self._resized(reached, former, now)
        if not reached or any(_slots(table) != shape.num_slots for table in reached):
            first = first_table(shape, self.config.min_copies)
            reached = (weights_of(first, shape.num_experts, self.checkpoints.settled),) * len(self.kind.layers)
        if planned is not None:
            self._set_goal(planned.version, reached)
        elif reached != self._tables or self._move is not None or not self.version:
            self._set_goal(known + 1, reached)
        self._missing = frozenset()
        self.epoch_goal = Goal(self.version, self._tables)
        if self._move is not None:
            again = self.checkpoints.wanted != self.checkpoints.settled
            self.last_change = f"{'loading again' if again else 'rolled back'}: the epoch ended during the move"
        self._move = None
        self._reports.clear()

    def next_goal(self, domains: Sequence[str | None], former: Sequence[int | None], now: float) -> Goal | None:
        """The placement of an epoch that is planned, whose ranks were ranks `former` of this one (None: none). None:
        the placement is unknown, or experts are moving."""
        if not self.version or self.is_moving or self.kind is None:
            return None
        if list(former) == list(range(self.world_size)):
            return Goal(self.version, self._tables)
        self._highest += 1
        shape = replace(self.shape, domains=numbered(domains))
        return Goal(self._highest, self._resized(self._tables, former, now, shape))

    def _resized(
        self, tables: Sequence[Table], former: Sequence[int | None], now: float, shape: Shape | None = None
    ) -> tuple[Table, ...]:
        shape = shape or self.shape
        made = []
        for table, load in zip(tables, self.rows_per_s(now), strict=True):
            rows = tuple(() if rank is None else table[rank] for rank in former)
            fit = resized(load, shape, experts_of(rows, shape.num_experts), self.config.min_copies)
            made.append(weights_of(fit, shape.num_experts, number_of(table, shape.num_experts)))
        return tuple(made)

    def recovered(self, domains: Sequence[str | None], missing: frozenset[int] = frozenset()) -> None:
        """The group continued to serve under a new control plane; without the ranks `missing`."""
        self.world_size = len(domains)
        self._domains, self._missing = numbered(domains), missing

    # Reports.

    def check_report(self, rank: int, report: Report) -> None:
        """Raise ValueError unless the report is valid for this group."""
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

    def record_report(self, rank: int, report: Report, now: float) -> Outcome | None:
        """Record a checked report of a serving rank. Returns the outcome of the move if the report ended it."""
        self._decay(now)
        for load, held, rows in zip(self._loads, report.layers, report.rows, strict=True):
            for expert, count in zip(held, rows, strict=False):
                load[expert % len(load)] += count * self._weight
        self._reports[rank] = report
        if self._move is None:
            self._adopt()
            self._take_over(now)
            return None
        return self._follow(rank, report, now)

    def rows_per_s(self, now: float) -> tuple[tuple[float, ...], ...]:
        """Load of each expert, by layer: rows per second, decayed."""
        self._decay(now)
        rate = math.log(2) / self.config.load_half_life_s
        seen_s = max(now - self._counting_since, 1e-3)
        whole = max(1 - math.exp(-seen_s * rate), 1e-6)  # corrects for a window that is not yet full
        return tuple(tuple(one * rate / whole / self._weight for one in load) for load in self._loads)

    # Moves.

    @property
    def shape(self) -> Shape:
        """Experts, slots and domains, as configured."""
        assert self.kind is not None
        slots = self.kind.num_experts + self.config.redundant_experts
        return Shape(self.kind.num_experts, slots, self._domains or (0,) * self.world_size)

    @property
    def moving(self) -> tuple[int, int]:
        """Layers switched and layers to switch; (0, 0) without a move."""
        reports = [report for report in self._reports.values() if report.version == self.version]
        if self._move is None:
            return 0, 0
        return min((r.switched for r in reports), default=0), max((r.to_switch for r in reports), default=0)

    @property
    def is_moving(self) -> bool:
        """Whether experts are moving."""
        return self._move is not None

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables of `version`, by layer; empty if unknown."""
        return self._tables if self.version else ()

    def is_due(self, now: float) -> bool:
        """Whether to search for a better placement now; if so, restarts the interval."""
        every_s = self.config.rebalance_s
        if every_s <= 0 or not self.version or self.is_moving or now - self._searched_at < every_s:
            return False
        first, self._searched_at = self._searched_at == -math.inf, now
        return not first

    def snapshot(self, now: float) -> Snapshot | None:
        """Input of a rebalance; None while the placement is unknown."""
        if not self.version or self.kind is None:
            return None
        slots = sum(len(held) for held in self._tables[0])
        shape = Shape(self.kind.num_experts, slots, self._domains)
        tables = tuple(experts_of(table, shape.num_experts) for table in self._tables)
        return Snapshot(self.version, shape, tables, self.rows_per_s(now), self.config.min_copies)

    def start(self, rebalance: Rebalance, now: float) -> bool:
        """Start a move. False if it is outdated or moves nothing."""
        if rebalance.base != self.version or self.is_moving or not rebalance.moves:
            return False
        assert self.kind is not None
        size = self.kind.num_experts
        after = [weights_of(table, size, number) for table, number in zip(rebalance.after, self.numbers, strict=True)]
        self._move = Move(self._tables, now)
        self._set_goal(self._highest + 1, tuple(after))
        gain = f"imbalance {rebalance.imbalance:.3f}, then {rebalance.imbalance_after:.3f}"
        self.last_change = f"moving {rebalance.moves} copies: {gain}"
        return True

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of each layer's checkpoint, by the goal."""
        size = self.kind.num_experts if self.kind is not None else 1
        return tuple(number_of(table, size) for table in self._tables)

    def learn(self, checkpoints: Checkpoints) -> None:
        """A member knows these: the newest are right. Versions given out later are higher."""
        if checkpoints.version > self.checkpoints.version:
            self.checkpoints, self._highest = checkpoints, max(checkpoints.version, self._highest)

    def emptied(self) -> None:
        """No member is left: the next ones have the checkpoint of their config, unless they know better."""
        self.checkpoints = replace(self.checkpoints, version=0, settled=0, wanted=0)

    def load(self, path: str, fingerprint: str, now: float) -> int:
        """Start to load another checkpoint in every layer; its number."""
        self.checkpoints = self.checkpoints.with_next(path, fingerprint, self._highest + 1, self.numbers)
        self._move_to_wanted(now)
        self.last_change = f"loading {path}"
        return self.checkpoints.wanted

    def settle(self, now: float) -> bool:
        """Make all layers of a complete, serving group have the wanted checkpoint. True: there is another goal."""
        known = self.checkpoints
        if not self.version or self.is_moving:
            return False
        if set(self.numbers) == {known.wanted}:
            if known.settled == known.wanted:
                return False
            self.checkpoints = known.arrived(self._highest + 1)
            self._set_goal(self._highest + 1, self._tables)  # nothing changes but what the workers know
            self.last_change = self.last_change or "loaded"
            return True
        if now - self._settled_at < _SETTLE_S:
            return False
        self._settled_at = now
        self._move_to_wanted(now)
        return True

    def _move_to_wanted(self, now: float) -> None:
        assert self.kind is not None
        self._move = Move(self._tables, now, loading=True)
        goal = [weights_of(table, self.kind.num_experts, self.checkpoints.wanted) for table in self._tables]
        self._set_goal(self._highest + 1, tuple(goal))

    def is_worth_it(self, rebalance: Rebalance) -> bool:
        """Whether it gains enough for an automatic move."""
        return (
            bool(rebalance.moves)
            and rebalance.imbalance - rebalance.imbalance_after >= self.config.min_gain * rebalance.imbalance
        )

    def expire(self, now: float) -> Outcome | None:
        """Roll back a move that has timed out."""
        if self._move is None:
            return None
        times = len(self._tables) if self._move.loading else 1
        if now - self._move.began < times * self.config.move_timeout_s:
            return None
        late = [str(rank) for rank in range(self.world_size) if not self._is_done(rank)]
        return self._roll_back(f"ranks {', '.join(late)} took longer than {self.config.move_timeout_s:g} s", now)

    def _follow(self, rank: int, report: Report, now: float) -> Outcome | None:
        assert self._move is not None
        if report.version == self.version and report.error:
            return self._roll_back(f"rank {rank}: {report.error}", now)
        if not all(self._is_done(each) for each in range(self.world_size)):
            return None
        took_s, move, self._move = now - self._move.began, self._move, None
        self._adopt()
        if move.rolling_back or (move.loading and self.checkpoints.wanted == self.checkpoints.settled):
            return None  # `last_change` says why it was rolled back
        self.last_change = f"{'loaded' if move.loading else 'moved'} in {took_s:.1f} s"
        return Outcome("done", self.last_change)

    def _roll_back(self, why: str, now: float) -> Outcome | None:
        """Set the layers already switched as the goal. If a rollback fails, too, the reports decide."""
        assert self._move is not None
        if self._move.rolling_back:
            self._move = None
            return None
        reached = self._reached()
        if self._move.loading:
            self.checkpoints = self.checkpoints.given_up(self._highest + 1)
        self._move = Move(reached, now, rolling_back=True)
        self._set_goal(self._highest + 1, reached)
        self.last_change = f"rolled back: {why}"
        return Outcome("rolled_back", self.last_change)

    def _is_done(self, rank: int) -> bool:
        report = self._reports.get(rank)
        return report is not None and report.version == self.version and report.done

    def _reached(self) -> tuple[Table, ...]:
        """By layer: the goal if any rank has switched to it (all ranks switch together), else the table before."""
        if self._move is None:
            return self._tables
        layers = []
        for number, (before, after) in enumerate(zip(self._move.before, self._tables, strict=True)):
            switched = any(
                report.version == self.version and before[rank] != after[rank] == report.layers[number]
                for rank, report in self._reports.items()
            )
            layers.append(after if switched else before)
        return tuple(layers)

    def _adopt(self) -> None:
        """Adopt the reported tables once all ranks agree: after a restart, or after a move with another outcome."""
        reports = {rank: self._reports.get(rank) for rank in range(self.world_size) if rank not in self._missing}
        done = [report for report in reports.values() if report is not None and report.done]
        if self.kind is None or len(done) < len(reports) or len({report.version for report in done}) > 1:
            return
        if done[0].version < self.version or not self._domains:
            return
        tables = self._held()
        if tables and (tables != self._tables or done[0].version != self.version):
            self._set_goal(done[0].version, tables)

    def _take_over(self, now: float) -> None:
        """After a restart, if the ranks do not agree, since some learned of a move and others did not: what they hold
        becomes a new goal for all."""
        expected = self.world_size - len(self._missing)
        if self.version or self.kind is None or len(self._reports) < expected or not self._domains:
            self._apart_since = math.inf
            return
        self._apart_since = min(self._apart_since, now)
        if now - self._apart_since >= _SETTLE_S and (tables := self._held()):
            known = max(self._highest, *(report.version for report in self._reports.values()))
            self._move = Move(tables, now, rolling_back=True)
            self._set_goal(known + 1, tables)

    def _held(self) -> tuple[Table, ...]:
        """What all ranks hold; empty if it is no valid table (they switched between two reports)."""
        assert self.kind is not None
        tables, size = tuple(self._table_of(number) for number in range(len(self.kind.layers))), self.kind.num_experts
        try:
            for table in tables:
                check(experts_of(table, size), Shape(size, _slots(table), self._domains))
                if weights_of(table, size, number_of(table, size)) != table:
                    return ()
        except ValueError:
            return ()
        return tables

    def _set_goal(self, version: int, tables: tuple[Table, ...]) -> None:
        self.version, self._tables, self._highest = version, tables, max(version, self._highest)

    def _table_of(self, number: int) -> Table:
        held = [
            None if rank in self._missing else self._reports[rank].layers[number] for rank in range(self.world_size)
        ]
        if not self._missing:
            return tuple(one for one in held if one is not None)
        size, known = self.shape.num_experts, tuple(one for one in held if one is not None)
        experts = [None if one is None else experts_of((one,), size)[0] for one in held]
        return weights_of(filled(experts, self.shape), size, number_of(known, size))

    def _decay(self, now: float) -> None:
        """Decay former counts relative to new ones, which get the growing factor `_weight`."""
        self._counting_since = min(self._counting_since, now)
        if self._decayed_at:
            self._weight *= 2 ** min(_MAX_HALVINGS, (now - self._decayed_at) / self.config.load_half_life_s)
        self._decayed_at = now
        if self._weight > _MAX_WEIGHT:
            self._loads = [[one / self._weight for one in load] for load in self._loads]
            self._weight = 1.0


def _slots(table: Table) -> int:
    return sum(len(held) for held in table)
