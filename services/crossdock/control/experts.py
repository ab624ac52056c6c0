"""The experts' side of the control plane: messages ↔ curator.py, plans made in a thread, log lines and metrics."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdock.common import log as logs
from crossdock.common import rpc
from crossdock.common.config import PlacementConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.common.tasks import beside
from crossdock.control import views
from crossdock.control.curator import Curator, Goal, Kind, Outcome, Report
from crossdock.control.placement import Table, imbalance
from crossdock.control.plans import Plan, Snapshot, domain_imbalance, rank_shares
from crossdock.control.records import Group, Phase
from crossdock.v1 import control_pb2 as pb

MAX_EXPERTS = 1 << 14
MAX_LAYERS = 1 << 10
MAX_ERROR_CHARS = 1000
PLAN_FRESH_S = 2.0
"""A plan is made once for all who ask within so long."""

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan and what it was made from."""

    epoch: int
    kind: Kind
    snapshot: Snapshot
    plan: Plan
    at: float


class Experts:
    """Where the experts of the group are, and how they get elsewhere.

    Args:
        config: of placement.
        world_size: R.
        metrics: where to count.
        clock: monotonic seconds.
        group: the state as it is now. Plans are made in a thread, so it is looked at again after each of them.
        announce: called when members must hear of another placement.
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
        self._curator = Curator(config, world_size)
        self._metrics, self._clock, self._group, self._announce = metrics, clock, group, announce
        self._made: _Made | None = None
        self._stopped = False
        self._planning = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Of the placement, for the views."""
        return self._curator.version

    def kind_of(self, request: pb.RegisterRequest) -> Kind | None:
        """What a registration says of its model; None: it takes no placements. Raises InvalidArgument, also where the
        configured copies do not fit: no wait mends that."""
        layers = tuple(request.moe_layers)
        if not request.num_experts:
            return None
        if request.num_experts > MAX_EXPERTS or not 1 <= len(layers) <= MAX_LAYERS:
            got = f"{request.num_experts} experts in {len(layers)} layers"
            raise rpc.InvalidArgument(f"num_experts: expected <= {MAX_EXPERTS} in 1..{MAX_LAYERS} layers, got {got}")
        if any(later <= layer for layer, later in itertools.pairwise(layers)):
            raise rpc.InvalidArgument("moe_layers: expected numbers in ascending order")
        kind = Kind(request.num_experts, layers)
        try:
            self._curator.check_kind(kind)
        except ValueError as error:
            raise rpc.InvalidArgument(str(error)) from None
        return kind

    def welcome(self, kind: Kind | None) -> None:
        """A worker with this model is in the group."""
        if kind is not None:
            self._curator.welcome(kind)

    def changed(self, before: Group, after: Group) -> None:
        """The group has changed; called before anybody is told."""
        began = (before.phase, before.epoch) != (after.phase, after.epoch)
        domains = [member.worker.place.nvlink_domain or member.worker.place.hostname for member in after.members]
        if began and after.phase is Phase.EXCHANGING:
            self._curator.form(domains, self._clock())
        elif began and after.phase is Phase.SERVING and before.recovering:
            held = {member.rank: domain for member, domain in zip(after.members, domains, strict=True)}
            by_rank = [held.get(rank, f"rank {rank}") for rank in range(after.settings.world_size)]
            missing = frozenset(range(after.settings.world_size)) - after.taking_part
            self._curator.recovered(by_rank, missing)
        self._metrics.placement_version.set(self.version)

    def check(self, group: Group, request: pb.HeartbeatRequest) -> tuple[int, Report] | None:
        """The rank and what it reports of its experts; None: nothing that counts now. Raises InvalidArgument."""
        member = group.member(request.worker.uid)
        current = group.phase is Phase.SERVING and request.epoch == group.epoch
        if member is None or not request.HasField("experts") or not current or self._curator.kind is None:
            return None
        message, most = request.experts, views.greatest(self.version or None, time.time())
        if message.version > most:
            raise rpc.InvalidArgument(f"experts.version: expected <= {most}, got {message.version}")
        error = "".join(char if char.isprintable() else " " for char in message.error[:MAX_ERROR_CHARS])
        held = tuple(tuple(layer.experts) for layer in message.layers)
        rows = tuple(tuple(layer.rows) for layer in message.layers)
        report = Report(message.version, message.switched, message.to_switch, error, held, rows)
        try:
            self._curator.check_report(member.rank, report)
        except ValueError as wrong:
            raise rpc.InvalidArgument(str(wrong)) from None
        return member.rank, report

    def hear(self, epoch: int, rank: int, report: Report) -> None:
        """Take a checked report about `epoch`, unless the heartbeat that brought it has ended that epoch."""
        group = self._group()
        if group.phase is not Phase.SERVING or group.epoch != epoch:
            return
        before = self.version
        self._tell(self._curator.hear(rank, report, self._clock()), before)

    def tick(self, serving: bool) -> None:
        """Let time pass."""
        now, before = self._clock(), self.version
        self._tell(self._curator.expire(now), before)
        if serving and self._curator.is_due(now) and (self._looking is None or self._looking.done()):
            self._looking = beside(self._look(), "the look at where experts should be")

    def placement(self, group: Group, request: pb.PlacementRequest) -> pb.PlacementResponse:
        """The tables of an epoch: those at which it begins until it serves, then the newest. Raises
        FailedPrecondition."""
        curator = self._curator
        goal = {
            Phase.EXCHANGING: curator.begun,
            Phase.SERVING: Goal(curator.version, curator.tables) if curator.version else None,
        }.get(group.phase)
        if request.epoch != group.epoch or goal is None:
            raise rpc.FailedPrecondition(f"placement: expected one of epoch {group.epoch}, got {request.epoch}")
        response = pb.PlacementResponse(version=goal.version, num_slots=len(_row(goal.tables[0])))
        for table in goal.tables:
            response.layers.add(experts=_row(table))
        return response

    def stop(self) -> None:
        """Nothing is started after this."""
        self._stopped = True
        if self._looking is not None:
            self._looking.cancel()

    async def rebalance(self) -> pb.RebalanceResponse:
        """Start what a plan of now says. Raises FailedPrecondition."""
        if why := self._obstacle(self._group().epoch):
            raise rpc.FailedPrecondition(f"rebalance: {why}")
        made = await self._plan()
        if why := self._obstacle(made.epoch):
            raise rpc.FailedPrecondition(f"rebalance: while the plan was made: {why}")
        started = self._start(made)
        return pb.RebalanceResponse(version=self.version, moves=made.plan.moves if started else 0)

    def _obstacle(self, epoch: int) -> str:
        """Why no experts of `epoch` can be moved now; "" = they can."""
        group = self._group()
        if self._stopped:
            return "this control plane decides no more"
        if group.phase is not Phase.SERVING or group.active is not None or not self.version:
            missing = " without some ranks" if group.active is not None else ""
            return f"expected a whole group that serves, got {group.phase.value}{missing}"
        if group.epoch != epoch:
            return f"expected epoch {epoch}, got {group.epoch}"
        return "experts are moving already" if self._curator.is_moving else ""

    async def experts(self) -> pb.ExpertsResponse:
        """Everything there is to show."""
        curator = self._curator
        response = pb.ExpertsResponse(
            version=self.version, world_size=curator.world_size, last_change=curator.last_change
        )
        if curator.kind is None or not self.version:
            return response
        response.layers_switched, response.layers_moving = curator.moving
        made = await self._plan()
        kind, snapshot, plan = made.kind, made.snapshot, made.plan
        response.version = snapshot.version
        response.num_experts, response.num_slots = kind.num_experts, snapshot.shape.num_slots
        response.imbalance, response.imbalance_if_moved = plan.imbalance, plan.imbalance_after
        response.would_move = plan.moves
        response.rank_loads.extend(rank_shares(snapshot))
        response.domains.extend(snapshot.shape.domains)
        response.domain_imbalance = domain_imbalance(snapshot)
        for number, load, now, then in zip(kind.layers, snapshot.loads, plan.before, plan.after, strict=True):
            response.layers.add(
                layer=number,
                slots=_row(now),
                load=load,
                imbalance=imbalance(load, now),
                imbalance_if_moved=imbalance(load, then),
                slots_if_moved=_row(then),
            )
        return response

    async def _plan(self) -> _Made:
        async with self._planning:
            now, made, epoch, kind = self._clock(), self._made, self._group().epoch, self._curator.kind
            of_now = made is not None and (made.epoch, made.plan.base) == (epoch, self.version)
            if made is None or not of_now or now - made.at > PLAN_FRESH_S:
                snapshot = self._curator.snapshot(now)
                if snapshot is None or kind is None:
                    raise rpc.Unavailable("experts: it is not known yet where they are")
                made = _Made(epoch, kind, snapshot, await asyncio.to_thread(snapshot.plan), now)
                self._made = made
                if not self._stopped:  # a successor's gauge by now
                    self._metrics.expert_imbalance.set(made.plan.imbalance)
            return made

    async def _look(self) -> None:
        """Move experts if that pays."""
        try:
            made = await self._plan()
        except rpc.Unavailable:
            return
        if self._curator.is_worth_it(made.plan):
            self._start(made)

    def _start(self, made: _Made) -> bool:
        """Start a plan, if the group still serves the epoch that it was made for: in any other one, ranks may be
        fetching the placement just now."""
        plan = made.plan
        if self._obstacle(made.epoch) or not self._curator.start(plan, self._clock()):
            return False
        self._metrics.placement_version.set(self.version)
        figures = {"imbalance": round(plan.imbalance, 4), "then": round(plan.imbalance_after, 4)}
        log.info("experts move", placement=self.version, copies=plan.moves, **figures)
        self._announce()
        return True

    def _tell(self, outcome: Outcome | None, before: int) -> None:
        if outcome is not None:
            say = log.info if outcome.result == "done" else log.warning
            say("experts moved" if outcome.result == "done" else "move of experts", what=outcome.text)
            self._metrics.expert_moves_total.labels(result=outcome.result).inc()
        if self.version != before:
            self._metrics.placement_version.set(self.version)
            self._announce()


def _row(table: Table) -> Sequence[int]:
    return [expert for held in table for expert in held]
