"""The experts' side of the control plane as values, for the search of group_model.py: the real `PlacementService` and
`PlacementManager`, made anew from a frozen state for each move. The model has one MoE layer and two experts per rank; a
rebalance of an even term turns those of rank 0 round, one of an odd term those of rank 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossdock.common.call_errors import FailedPrecondition
from crossdock.common.config import PlacementConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control.group.group_state import Group
from crossdock.control.placement.expert_reports import Goal, Kind, Move, Report
from crossdock.control.placement.placement_manager import PlacementManager
from crossdock.control.placement.placement_service import PlacementService, _CachedRebalance
from crossdock.control.placement.rebalance import Rebalance
from crossdock.protocol.v1 import control_pb2 as pb

METRICS, CONFIG = ControlMetrics(), PlacementConfig()


@dataclass(frozen=True)
class Holding:
    """A placement of which a rank was told.

    stale: the answer was under way when the stream of views ended.
    """

    epoch: int
    goal: Goal
    stale: bool = False


@dataclass(frozen=True)
class Side:
    """What `PlacementService` knows. `rebalance`: one that is being made in a thread."""

    kind: Kind | None = None
    version: int = 0
    epoch_goal: Goal | None = None
    highest: int = 0
    tables: tuple[tuple[tuple[int, ...], ...], ...] = ()
    domains: tuple[int, ...] = ()
    way: tuple[tuple[tuple[tuple[int, ...], ...], ...], bool] | None = None
    reports: tuple[tuple[int, Report], ...] = ()
    rebalance: _CachedRebalance | None = None

    def thaw(self, group: Group) -> PlacementService:
        """The real thing in this state."""
        size = group.world_size
        experts = PlacementService(CONFIG, size, METRICS, lambda: 0.0, lambda: group, lambda: None)
        experts._manager = PlacementManager(
            CONFIG,
            size,
            self.kind,
            self.version,
            self.epoch_goal,
            "",
            self.highest,
            self.tables,
            self.domains,
            None if self.way is None else Move(self.way[0], 0.0, self.way[1]),
            dict(self.reports),
            frozenset(),
            [] if self.kind is None else [[0.0] * self.kind.num_experts for _ in self.kind.layers],
        )
        return experts

    def after(self, experts: PlacementService) -> Side:
        """The state of the real thing after a move."""
        manager = experts._manager
        return Side(
            manager.kind,
            manager.version,
            manager.epoch_goal,
            manager._highest,
            manager._tables,
            manager._domains,
            None if manager._move is None else (manager._move.before, manager._move.rolling_back),
            tuple(sorted(manager._reports.items())),
            self.rebalance,
        )

    def welcomed(self, group: Group) -> Side:
        """A worker of the group has registered."""
        experts = self.thaw(group)
        experts.set_kind(Kind(2 * group.world_size, (0,)))
        return self.after(experts)

    def changed(self, before: Group, after: Group) -> Side:
        """The group has changed."""
        experts = self.thaw(after)
        experts.group_changed(before, after)
        return self.after(experts)

    def asked(self, group: Group, term: int) -> Side | None:
        """Somebody asks to move experts: a rebalance is being made. None: refused, or one is made already."""
        experts = self.thaw(group)
        snapshot = experts._manager.snapshot(0.0)
        if self.rebalance is not None or experts._obstacle(group.epoch) or snapshot is None or self.kind is None:
            return None
        turned = tuple(
            tuple(held[::-1] if rank == term % 2 else held for rank, held in enumerate(table)) for table in self.tables
        )
        made = Rebalance(self.version, self.tables, turned, 2.0, 1.0, moves=1)
        return replace(self, rebalance=_CachedRebalance(group.epoch, self.kind, snapshot, made, 0.0))

    def planned(self, group: Group) -> Side:
        """The rebalance is made."""
        assert self.rebalance is not None
        experts = self.thaw(group)
        experts._start(self.rebalance)
        return replace(self.after(experts), rebalance=None)

    def placement(self, group: Group, epoch: int) -> Holding | None:
        """The answer to a worker; None: refused."""
        try:
            answer = self.thaw(group).placement(group, pb.PlacementRequest(epoch=epoch))
        except FailedPrecondition:
            return None
        slots = [layer.experts for layer in answer.layers]
        tables = tuple(tuple((row[slot], row[slot + 1]) for slot in range(0, len(row), 2)) for row in slots)
        return Holding(epoch, Goal(answer.version, tables))

    def reported(self, group: Group, before: Group, request: pb.HeartbeatRequest) -> Side:
        """A heartbeat was taken, and the group was `before` it."""
        told = self.thaw(before).check_report(before, request)
        if told is None:
            return self
        experts = self.thaw(group)
        experts.record_report(request.epoch, *told)
        return self.after(experts)


def report_of(held: Goal, target: Goal, rank: int) -> pb.ExpertReport:
    """What a serving rank tells that holds `held` and was told of `target`."""
    moving = held.version != target.version
    report = pb.ExpertReport(version=target.version, to_switch=int(moving))
    for table in held.tables:
        report.layers.add(experts=table[rank])
    return report


def takes(seen: int, term: int) -> bool:
    """Whether a worker that has seen term `seen` acts on a view of `term`: control_client.py's `_take_view`."""
    return term >= seen


def drops(answer: Holding) -> bool:
    """Whether a worker asks again: control_client.py's `placement`."""
    return answer.stale
