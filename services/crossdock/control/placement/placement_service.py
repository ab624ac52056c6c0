"""Placement part of the control plane's service: messages ↔ PlacementManager, rebalances computed in a thread, logs and
metrics."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from crossdock.common import log as logs
from crossdock.common.call_errors import FailedPrecondition, InvalidArgument, Unavailable
from crossdock.common.config import PlacementConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.common.tasks import background
from crossdock.control.group import resize
from crossdock.control.group.group_state import Group, Member, Phase
from crossdock.control.group.ranks import Place
from crossdock.control.placement import views
from crossdock.control.placement.balancer import imbalance
from crossdock.control.placement.checkpoints import (
    MAX_CHARS,
    MAX_NUMBER,
    Checkpoints,
    experts_of,
    number_of,
    weights_of,
)
from crossdock.control.placement.expert_reports import Goal, Kind, Outcome, Report
from crossdock.control.placement.placement_manager import PlacementManager
from crossdock.control.placement.rebalance import Rebalance, Snapshot, domain_imbalance, rank_shares
from crossdock.control.placement.tables import Table
from crossdock.protocol.v1 import control_pb2 as pb

MAX_EXPERTS = 1 << 14
MAX_LAYERS = 1 << 10
MAX_ERROR_CHARS = 1000
_MOST_NAMED = 8
REBALANCE_FRESH_S = 2.0
"""Lifetime of a rebalance, in which it is reused."""

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _CachedRebalance:
    """A rebalance and its input."""

    epoch: int
    kind: Kind
    snapshot: Snapshot
    rebalance: Rebalance
    at: float


@dataclass(frozen=True, slots=True)
class _Planned:
    """The epoch that is planned next: its members, and their placement. `inside`, `of`: what it was made from."""

    inside: dict[str, int]
    of: tuple[object, ...] = ()
    members: tuple[Member, ...] = ()
    goal: Goal | None = None

    def is_begun(self, group: Group) -> bool:
        """Whether the group has begun it."""
        seats = [(m.rank, m.uid, m.worker.incarnation) for m in group.members if m.rank < group.world_size]
        same = seats == [(m.rank, m.uid, m.worker.incarnation) for m in self.members]
        return same and len(seats) == group.world_size and group.active is None


class PlacementService:
    """Placement of the experts of one group, and their moves.

    Args:
        clock: monotonic seconds.
        group: returns the current state. Plans are made in a thread, so it is checked again after each of them.
        announce: called when the members must be notified of another placement.
    """

    def __init__(
        self,
        config: PlacementConfig,
        world_size: int,
        metrics: ControlMetrics,
        clock: Callable[[], float],
        group: Callable[[], Group],
        announce: Callable[[], None],
    ) -> None:
        self._manager = PlacementManager(config, world_size)
        self._metrics, self._clock, self._group, self._announce = metrics, clock, group, announce
        self._cached: _CachedRebalance | None = None
        self._planned, self._announced = _Planned({}), 0
        self._unprepared: dict[str, str] = {}
        self._served: dict[str, int] = {}
        self._stopped = False
        self._planning = asyncio.Lock()
        self._rebalance_task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._manager.version

    def kind_of(self, request: pb.RegisterRequest) -> Kind | None:
        """The experts in a registration; None: the worker takes no placements. Raises InvalidArgument, also if the
        configured copies do not fit, which is permanent."""
        layers = tuple(request.moe_layers)
        if not request.num_experts:
            return None
        if request.num_experts > MAX_EXPERTS or not 1 <= len(layers) <= MAX_LAYERS:
            got = f"{request.num_experts} experts in {len(layers)} layers"
            raise InvalidArgument(f"num_experts: expected <= {MAX_EXPERTS} in 1..{MAX_LAYERS} layers, got {got}")
        if any(later <= layer for layer, later in itertools.pairwise(layers)):
            raise InvalidArgument("moe_layers: expected numbers in ascending order")
        kind = Kind(request.num_experts, layers)
        try:
            self._manager.check_kind(kind, self._group().world_size)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        return kind

    def set_kind(self, kind: Kind | None, checkpoints: Checkpoints | None = None) -> None:
        """Set the model of a registered worker, and what it knows of checkpoints."""
        if kind is not None:
            self._manager.set_kind(kind)
            self._manager.learn(checkpoints or Checkpoints())

    def checkpoints_of(self, message: pb.RegisterRequest | pb.ExpertReport) -> Checkpoints:
        """What a worker knows of checkpoints. Raises InvalidArgument."""
        return Checkpoints.parse(message.checkpoints, views.greatest(self.version or None, time.time()))

    def group_changed(self, before: Group, after: Group) -> None:
        """Update the placement; called before watchers are notified."""
        began, planned = (before.phase, before.epoch) != (after.phase, after.epoch), self._planned
        self._unprepared = {uid: why for uid, why in self._unprepared.items() if after.member(uid) and not began}
        if before.members and not after.members:
            self._manager.emptied()
        if began:
            self._served = {uid: started for uid, started in self._served.items() if after.member(uid) is not None}
        if began and after.phase is Phase.SERVING:
            ranks = after.taking_part
            self._served |= {each.uid: each.worker.incarnation for each in after.members if each.rank in ranks}
        places = {member.rank: member.worker.place for member in after.members}
        domains = [_domain(places.get(rank)) for rank in range(after.world_size)]
        if began and after.phase is Phase.EXCHANGING:
            goal = planned.goal if before.phase is Phase.SERVING and planned.is_begun(after) else None
            goal = goal if goal is not None and goal.version > self.version else None
            self._manager.form(domains, self._clock(), goal)
        elif began and after.phase is Phase.SERVING and before.recovering:
            missing = frozenset(range(after.world_size)) - after.taking_part
            self._manager.recovered(domains, missing)
        self._metrics.placement_version.set(self.version)

    def check_report(self, group: Group, request: pb.HeartbeatRequest) -> tuple[int, Report] | None:
        """The rank and its checked expert report; None: no report, or not for the serving epoch. Raises
        InvalidArgument."""
        member = group.member(request.worker.uid)
        current = group.phase is Phase.SERVING and request.epoch == group.epoch
        if (
            member is None
            or member.rank >= group.world_size
            or not request.HasField("experts")
            or not current
            or self._manager.kind is None
        ):
            return None
        message, most = request.experts, views.greatest(self.version or None, time.time())
        if message.version > most:
            raise InvalidArgument(f"experts.version: expected <= {most}, got {message.version}")
        error = "".join(char if char.isprintable() else " " for char in message.error[:MAX_ERROR_CHARS])
        held = tuple(tuple(layer.experts) for layer in message.layers)
        rows = tuple(tuple(layer.rows) for layer in message.layers)
        report = Report(message.version, message.switched, message.to_switch, error, held, rows)
        try:
            self._manager.check_report(member.rank, report)
        except ValueError as wrong:
            raise InvalidArgument(str(wrong)) from None
        numbers, size = [layer.checkpoint for layer in message.layers], self._manager.kind.num_experts
        if max(numbers, default=0) >= MAX_NUMBER:
            raise InvalidArgument(f"experts.layers.checkpoint: expected < {MAX_NUMBER}, got {max(numbers)}")
        known = self.checkpoints_of(message)
        weights = tuple(weights_of((one,), size, number)[0] for one, number in zip(held, numbers, strict=True))
        return member.rank, replace(report, layers=weights, checkpoints=known)

    def record_report(self, epoch: int, rank: int, report: Report) -> None:
        """Record a checked report of `epoch`, unless its heartbeat has ended that epoch."""
        group = self._group()
        if group.phase is not Phase.SERVING or group.epoch != epoch:
            return
        self._manager.learn(report.checkpoints)
        before = self.version
        self._publish(self._manager.record_report(rank, report, self._clock()), before)

    def tick(self, serving: bool) -> None:
        now, before = self._clock(), self.version
        self._publish(self._manager.expire(now), before)
        if not self._obstacle(self._group().epoch) and self._manager.settle(now):
            log.info("checkpoint", placement=self.version, wanted=self._manager.checkpoints.wanted)
            self._metrics.placement_version.set(self.version)
            self._announce()
        elif self._announced != self.next_version(self._group()):
            self._announce()
        if serving and self._manager.is_due(now) and (self._rebalance_task is None or self._rebalance_task.done()):
            self._rebalance_task = background(self._rebalance_if_worth(), "placement planning")

    def next_version(self, group: Group) -> int:
        """Version of the placement for which members of the planned epoch prepare; 0: none is planned, or it is not
        known yet."""
        manager = self._manager
        inside = group.members.positions  # another one as soon as any member is
        of = group.wanted, group.phase, group.epoch, self.version, manager.is_moving, self._stopped
        if inside is not self._planned.inside or of != self._planned.of:
            planned, goal = resize.next_members(group), None
            if planned and not self._stopped:
                now = {member.uid: member.rank for member in group.members if member.rank < group.world_size}
                former = [now.get(member.uid) for member in planned]
                goal = manager.next_goal([_domain(member.worker.place) for member in planned], former, self._clock())
            self._planned = _Planned(inside, of, planned, goal)
        self._announced = self._planned.goal.version if self._planned.goal else 0
        return self._announced

    def is_prepared(self, group: Group, request: pb.HeartbeatRequest) -> bool:
        """Whether the sender holds what it needs in the planned epoch, and notes why it cannot."""
        version = self.next_version(group)
        if request.unprepared and version and group.member(request.worker.uid) is not None:
            self._unprepared[request.worker.uid] = views.printable(request.unprepared, MAX_ERROR_CHARS)
        else:
            self._unprepared.pop(request.worker.uid, None)
        return request.loaded and (not request.prepared or request.prepared == version)

    def scaling(self, group: Group) -> str:
        """What a group of another size than the wanted one waits for."""
        wanted = group.wanted.workers
        if wanted == group.world_size or group.recovering:
            return ""
        what = f"scaling from {group.world_size} to {wanted} workers: "
        if len(group.members) < wanted:
            return f"{what}{len(group.members)} of {wanted} are here"
        if not self.next_version(group):
            return f"{what}waiting until the group serves and no experts move"
        planned = self._planned.members
        ready = {member.uid for member in group.members if member.prepared}
        why = "".join(f"; {uid}: {words}" for uid, words in sorted(self._unprepared.items())[:_MOST_NAMED])
        return f"{what}{sum(m.uid in ready for m in planned)} of {len(planned)} have loaded their experts{why}"

    def check_size(self, workers: int) -> None:
        """Raises InvalidArgument: the configured copies of experts do not fit on so many ranks."""
        if self._manager.kind is not None:
            try:
                self._manager.check_kind(self._manager.kind, workers)
            except ValueError as error:
                raise InvalidArgument(f"workers: {error}, R = {workers}") from None

    def next_placement(self, group: Group, request: pb.PlacementRequest) -> pb.PlacementResponse:
        """The tables of the planned epoch, and the rank of the worker that asks. Raises FailedPrecondition."""
        version, goal, planned = self.next_version(group), self._planned.goal, self._planned.members
        if request.epoch != group.epoch or not version or goal is None:
            raise FailedPrecondition(f"placement: no epoch is planned after {group.epoch}, got {request.epoch}")
        rank = next((member.rank for member in planned if member.uid == request.next_of.uid), None)
        if rank is None:
            return pb.PlacementResponse(version=version, world_size=len(planned))
        response = self._tables(goal)
        response.world_size, response.rank = len(planned), rank
        return response

    def placement(self, group: Group, request: pb.PlacementRequest) -> pb.PlacementResponse:
        """The tables of an epoch: the frozen ones until it serves, then the newest. Raises FailedPrecondition."""
        if request.HasField("next_of"):
            return self.next_placement(group, request)
        manager = self._manager
        goal = {
            Phase.EXCHANGING: manager.epoch_goal,
            Phase.SERVING: Goal(manager.version, manager.tables) if manager.version else None,
        }.get(group.phase)
        if request.epoch != group.epoch or goal is None:
            raise FailedPrecondition(f"placement: expected one of epoch {group.epoch}, got {request.epoch}")
        return self._tables(goal)

    def _tables(self, goal: Goal) -> pb.PlacementResponse:
        manager = self._manager
        response = pb.PlacementResponse(version=goal.version, num_slots=len(_row(goal.tables[0])))
        size = manager.kind.num_experts if manager.kind is not None else 1
        for table in goal.tables:
            response.layers.add(experts=_row(experts_of(table, size)), checkpoint=number_of(table, size))
        response.checkpoints.CopyFrom(manager.checkpoints.message())
        response.holders.extend(self._holders())
        return response

    def _holders(self) -> Iterator[pb.Holder]:
        """Members that have served: in this epoch or a former one, so they hold experts."""
        for member in self._group().members:
            worker, place = member.worker, member.worker.holder
            if place is not None and self._served.get(member.uid) == worker.incarnation:
                yield pb.Holder(address=worker.address, port=place.port, socket=place.socket, host=place.host)

    def stop(self) -> None:
        """Start no further moves."""
        self._stopped = True
        if self._rebalance_task is not None:
            self._rebalance_task.cancel()

    def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        """Start to load another checkpoint. Raises FailedPrecondition, InvalidArgument."""
        if why := self._obstacle(self._group().epoch):
            raise FailedPrecondition(f"load: {why}")
        if (
            not request.path
            or not request.fingerprint
            or max(map(len, (request.path, request.fingerprint))) > MAX_CHARS
        ):
            raise InvalidArgument(f"path, fingerprint: expected texts of 1..{MAX_CHARS} characters")
        if not (request.path + request.fingerprint).isprintable():
            raise InvalidArgument("path, fingerprint: expected printable characters")
        number = self._manager.load(request.path, request.fingerprint, self._clock())
        self._metrics.placement_version.set(self.version)
        log.info("loading started", placement=self.version, checkpoint=number, path=request.path)
        self._announce()
        return pb.LoadResponse(version=self.version, number=number, layers=len(self._manager.tables))

    async def rebalance(self) -> pb.RebalanceResponse:
        """Compute a rebalance and start it. Raises FailedPrecondition."""
        if why := self._obstacle(self._group().epoch):
            raise FailedPrecondition(f"rebalance: {why}")
        made = await self._rebalance()
        if why := self._obstacle(made.epoch):
            raise FailedPrecondition(f"rebalance: while it was computed: {why}")
        started = self._start(made)
        return pb.RebalanceResponse(version=self.version, moves=made.rebalance.moves if started else 0)

    def _obstacle(self, epoch: int) -> str:
        """Why no experts can be moved in `epoch`; "" = they can."""
        group = self._group()
        if self._stopped:
            return "this control plane has stopped leading"
        if group.phase is not Phase.SERVING or group.active is not None or not self.version:
            missing = " without some ranks" if group.active is not None else ""
            return f"expected a complete serving group, got {group.phase.value}{missing}"
        if group.epoch != epoch:
            return f"expected epoch {epoch}, got {group.epoch}"
        if self.next_version(group):
            return self.scaling(group) or "ranks are readmitted"
        return "experts are moving already" if self._manager.is_moving else ""

    async def experts(self) -> pb.ExpertsResponse:
        """Placement, load and rebalance, for display."""
        # What is so, whether or not anything can be balanced.
        manager = self._manager
        response = pb.ExpertsResponse(
            version=self.version, world_size=manager.world_size, last_change=manager.last_change
        )
        response.checkpoints.CopyFrom(manager.checkpoints.message())
        if manager.kind is None or not self.version:
            return response
        response.layers_switched, response.layers_moving = manager.moving
        # What would be: a rebalance, computed or kept.
        made = await self._rebalance()
        kind, snapshot, rebalance = made.kind, made.snapshot, made.rebalance
        response.version = snapshot.version
        response.num_experts, response.num_slots = kind.num_experts, snapshot.shape.num_slots
        response.imbalance, response.imbalance_if_moved = rebalance.imbalance, rebalance.imbalance_after
        response.would_move = rebalance.moves
        response.rank_loads.extend(rank_shares(snapshot))
        response.domains.extend(snapshot.shape.domains)
        response.domain_imbalance = domain_imbalance(snapshot)
        # Layer by layer.
        for number, load, now, then in zip(kind.layers, snapshot.loads, rebalance.before, rebalance.after, strict=True):
            response.layers.add(
                layer=number,
                slots=_row(now),
                load=load,
                imbalance=imbalance(load, now),
                imbalance_if_moved=imbalance(load, then),
                slots_if_moved=_row(then),
            )
        return response

    async def _rebalance(self) -> _CachedRebalance:
        async with self._planning:
            now, made, epoch, kind = self._clock(), self._cached, self._group().epoch, self._manager.kind
            of_now = made is not None and (made.epoch, made.rebalance.base) == (epoch, self.version)
            if made is None or not of_now or now - made.at > REBALANCE_FRESH_S:
                snapshot = self._manager.snapshot(now)
                if snapshot is None or kind is None:
                    raise Unavailable("experts: their placement is not known yet")
                made = _CachedRebalance(epoch, kind, snapshot, await asyncio.to_thread(snapshot.rebalance), now)
                self._cached = made
                if not self._stopped:  # the gauge may already belong to a successor
                    self._metrics.expert_imbalance_ratio.set(made.rebalance.imbalance)
            return made

    async def _rebalance_if_worth(self) -> None:
        """Start a move if it gains enough."""
        try:
            made = await self._rebalance()
        except Unavailable:
            return
        if self._manager.is_worth_it(made.rebalance):
            self._start(made)

    def _start(self, made: _CachedRebalance) -> bool:
        """Start it if the group still serves its epoch: in any other epoch, ranks may be fetching the placement."""
        rebalance = made.rebalance
        if self._obstacle(made.epoch) or not self._manager.start(rebalance, self._clock()):
            return False
        self._metrics.placement_version.set(self.version)
        figures = {"imbalance": round(rebalance.imbalance, 4), "then": round(rebalance.imbalance_after, 4)}
        log.info("move started", placement=self.version, copies=rebalance.moves, **figures)
        self._announce()
        return True

    def _publish(self, outcome: Outcome | None, before: int) -> None:
        if outcome is not None:
            say = log.info if outcome.result == "done" else log.warning
            say("move done" if outcome.result == "done" else "move rolled back", what=outcome.text)
            self._metrics.expert_moves_total.labels(result=outcome.result).inc()
        if self.version != before:
            self._metrics.placement_version.set(self.version)
            self._announce()


def _domain(place: Place | None) -> str | None:
    return None if place is None else place.nvlink_domain or place.hostname


def _row(table: Table) -> Sequence[int]:
    return [expert for held in table for expert in held]
