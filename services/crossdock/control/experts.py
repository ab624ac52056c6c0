"""The experts' side of the control plane: messages ↔ curator.py, plans made in a thread, log lines and metrics."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdock.common import log as logs
from crossdock.common import rpc
from crossdock.common.config import PlacementConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control.curator import Curator, Kind, Outcome, Report
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
        announce: called when members must hear of another placement.
    """

    def __init__(
        self,
        config: PlacementConfig,
        world_size: int,
        metrics: ControlMetrics,
        clock: Callable[[], float],
        announce: Callable[[], None],
    ) -> None:
        self._curator = Curator(config, world_size)
        self._metrics, self._clock, self._announce = metrics, clock, announce
        self._made: _Made | None = None
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
        message = request.experts
        error = "".join(char if char.isprintable() else " " for char in message.error[:MAX_ERROR_CHARS])
        held = tuple(tuple(layer.experts) for layer in message.layers)
        rows = tuple(tuple(layer.rows) for layer in message.layers)
        report = Report(message.version, message.switched, message.to_switch, error, held, rows)
        try:
            self._curator.check_report(member.rank, report)
        except ValueError as wrong:
            raise rpc.InvalidArgument(str(wrong)) from None
        return member.rank, report

    def hear(self, rank: int, report: Report) -> None:
        """Take a checked report."""
        before = self.version
        self._tell(self._curator.hear(rank, report, self._clock()), before)

    def tick(self, serving: bool) -> None:
        """Let time pass."""
        now, before = self._clock(), self.version
        self._tell(self._curator.expire(now), before)
        if serving and self._curator.is_due(now) and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def placement(self, group: Group, request: pb.PlacementRequest) -> pb.PlacementResponse:
        """The tables of an epoch. Raises FailedPrecondition."""
        tables = self._curator.tables
        if group.phase not in {Phase.EXCHANGING, Phase.SERVING} or request.epoch != group.epoch or not tables:
            raise rpc.FailedPrecondition(f"placement: expected one of epoch {group.epoch}, got {request.epoch}")
        response = pb.PlacementResponse(version=self.version, num_slots=len(_row(tables[0])))
        for table in tables:
            response.layers.add(experts=_row(table))
        return response

    async def rebalance(self, group: Group) -> pb.RebalanceResponse:
        """Start what a plan of now says. Raises FailedPrecondition."""
        if group.phase is not Phase.SERVING or group.active is not None or not self.version:
            missing = " without some ranks" if group.active is not None else ""
            raise rpc.FailedPrecondition(
                f"rebalance: expected a whole group that serves, got {group.phase.value}{missing}"
            )
        if self._curator.is_moving:
            raise rpc.FailedPrecondition("rebalance: experts are moving already")
        plan = (await self._plan()).plan
        started = self._start(plan)
        return pb.RebalanceResponse(version=self.version, moves=plan.moves if started else 0)

    async def experts(self) -> pb.ExpertsResponse:
        """Everything there is to show."""
        curator, kind = self._curator, self._curator.kind
        response = pb.ExpertsResponse(
            version=self.version, world_size=curator.world_size, last_change=curator.last_change
        )
        if kind is None or not self.version:
            return response
        response.layers_switched, response.layers_moving = curator.moving
        made = await self._plan()
        snapshot, plan = made.snapshot, made.plan
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
            now, made = self._clock(), self._made
            if made is None or made.plan.base != self.version or now - made.at > PLAN_FRESH_S:
                snapshot = self._curator.snapshot(now)
                if snapshot is None:
                    raise rpc.Unavailable("experts: it is not known yet where they are")
                made = _Made(snapshot, await asyncio.to_thread(snapshot.plan), now)
                self._made = made
                self._metrics.expert_imbalance.set(made.plan.imbalance)
            return made

    async def _look(self) -> None:
        """Move experts if that pays."""
        try:
            plan = (await self._plan()).plan
        except rpc.Unavailable:
            return
        if self._curator.is_worth_it(plan):
            self._start(plan)

    def _start(self, plan: Plan) -> bool:
        if not self._curator.start(plan, self._clock()):
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
