"""The control plane's service: messages become events, effects become Watch streams, log lines and metrics.

All state is one frozen `Group`; every handler is one `step` of group.py on the event loop, so there is no lock. Watch
streams are conflated: a slow watcher skips views and gets the newest. Nothing is written to disk.
"""
# ruff: noqa: N802  (the methods of a servicer are named in control.proto)

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from crossdock.common import log as logs
from crossdock.common.access import CALLER, Caller, Role, check_uid
from crossdock.common.call_errors import (
    AlreadyExists,
    CallError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from crossdock.common.config import ControlConfig
from crossdock.common.control_channel import LEASE_KEY
from crossdock.common.metrics import ControlMetrics
from crossdock.common.postmortem_record import MAX_CHARS, parse
from crossdock.control.group import blame, group_state
from crossdock.control.group.group import advance, new_group
from crossdock.control.group.group_state import (
    Blamed,
    Cordon,
    Effect,
    Event,
    Group,
    Lost,
    Phase,
    Publish,
    Refusal,
    Refuse,
    RefusedWorker,
    Scale,
    Settings,
    Tick,
    Uncordon,
    Waits,
)
from crossdock.control.group.recovery import MAX_LEAP
from crossdock.control.latency import latency_watch
from crossdock.control.placement import views
from crossdock.control.placement.placement_service import PlacementService
from crossdock.control.server.watchers import Watchers
from crossdock.control.topology import discovery
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc, topology_pb2

_LONG_REBALANCE_S, _REBALANCE_PAUSES = 0.1, 10
"""A rebalance of a large model takes seconds of a core, and any client may ask: at most a tenth of the time is spent on
it."""
log = logs.get(__name__)

REFUSALS: dict[Refusal, type[CallError]] = {
    Refusal.UNKNOWN_WORKER: NotFound,
    Refusal.REPLACED: AlreadyExists,
    Refusal.NAME_TAKEN: AlreadyExists,
    Refusal.WRONG_EPOCH: FailedPrecondition,
    Refusal.WRONG_PHASE: FailedPrecondition,
    Refusal.MIXED_PLACEMENT: FailedPrecondition,
    Refusal.MIXED_GROUP: FailedPrecondition,
    Refusal.GROUP_FULL: ResourceExhausted,
    Refusal.BAD_VALUE: InvalidArgument,
    Refusal.BARRED: ResourceExhausted,
}
"""Status of each refusal; call_errors.py has their meanings."""


_NO_CALLER = Caller((), frozenset(Role), "", guarded=False)


MAX_RECORDS = 256
MAX_CHANGES = 256


STATES = ("ready", "joining", "sick", "spare", "cordoned", "quarantined")
_EXCLUDED = ("cordoned", "quarantined")


class GroupMeasures:
    """The group's state as metrics: gauges of its members, and how long it was without service, and why.

    Args:
        metrics: of the control plane.
    """

    def __init__(self, metrics: ControlMetrics) -> None:
        self._metrics = metrics
        self._since: float | None = None
        self._cause = self._lost = ""

    def lost(self, cause: str) -> None:
        """A member was lost; called before `changed`."""
        self._metrics.members_lost_total.labels(cause=cause).inc()
        self._lost = self._lost or cause

    def blamed(self, rank: int) -> None:
        """A member reported that rank silent."""
        self._metrics.silent_rank_reports_total.labels(rank=str(rank)).inc()

    def changed(self, before: Group, after: Group, now: float) -> None:
        """The state has changed. Time without service counts from the end of a serving epoch; its cause is the first
        loss, else silence that was reported."""
        if (after.phase, after.epoch) == (before.phase, before.epoch):
            self._lost = ""
            return
        self._metrics.group_state_transitions_total.labels(to=after.phase.value).inc()
        if before.phase is Phase.SERVING and self._since is None:
            self._since, self._cause = now, self._lost or ("silent" if after.broken_ranks else "other")
        self._lost = ""
        if after.phase is Phase.SERVING and self._since is not None:
            self._metrics.reform_duration_seconds.labels(cause=self._cause).observe(now - self._since)
            self._since = None

    def measure(self, group: Group) -> None:
        """Set the gauges."""
        metrics, active = self._metrics, group.active
        metrics.epoch.set(group.epoch)
        metrics.world_size.set(group.world_size)
        metrics.wanted_workers.set(group.wanted.workers)
        metrics.members.set(len(group.members))
        metrics.active_ranks.set(min(len(group.members), group.world_size) if active is None else len(active))
        barred = Counter(bar.cause for bar in group.bars)
        for cause in _EXCLUDED:
            metrics.excluded_workers.labels(cause=cause).set(barred[cause])
        for phase in Phase:
            metrics.group_state.labels(state=phase.value).set(phase is group.phase)
        self.measure_members(group)

    def measure_members(self, group: Group) -> None:
        """Set the gauges that change without a change of the view, too."""
        sick = blame.sick(group)
        self._metrics.sick_ranks.set(len(sick))
        states = Counter(
            "sick" if member.uid in sick else "ready" if member.ready else "joining" for member in group.members
        )
        states["spare"] = len(group.spares)
        states.update({cause: sum(bar.cause == cause for bar in group.bars) for cause in _EXCLUDED})
        for state in STATES:
            self._metrics.member_states.labels(state=state).set(states[state])


class Postmortems:
    """The last post-mortem records of members, and the last changes of the group. Bounded; lost with the process."""

    def __init__(self) -> None:
        self._records: deque[pb.Postmortem] = deque(maxlen=MAX_RECORDS)
        self._changes: deque[pb.GroupChange] = deque(maxlen=MAX_CHANGES)

    def record(self, request: pb.HeartbeatRequest) -> None:
        """Keep the record of a member's heartbeat; workers repeat it until there is a newer epoch. One that is too long
        or does not parse is dropped: the fault beside it counts."""
        uid, text = request.worker.uid, request.postmortem
        if not text or len(text) > MAX_CHARS or any(one.uid == uid and one.record == text for one in self._records):
            return
        if text.isprintable() and parse(text) is not None:
            self._records.append(pb.Postmortem(uid=uid, arrived_unix_s=time.time(), record=text))

    def changed(self, group: Group) -> None:
        """Keep a change of the group."""
        change = pb.GroupChange(unix_s=time.time(), epoch=group.epoch, state=group.phase.value, reason=group.why)
        self._changes.append(change)

    def message(self) -> pb.PostmortemsResponse:
        """All of them."""
        return pb.PostmortemsResponse(postmortems=self._records, changes=self._changes)


class WorkerKeys:
    """The keys of the members: only the process that registered a uid may act for it.

    Each worker process makes a random key and sends it as metadata with every call. The key of Register is stored as a
    hash with the incarnation; calls for that incarnation with another key are refused. So a certificate or token shared
    by many workers lets none of them send heartbeats, leave or publish for another. A newer incarnation brings its own
    key: which certificate may take over a uid is configured by `{uid}` in `access.worker_names`. Workers without a key
    are bound by their certificate alone.
    """

    def __init__(self) -> None:
        self._bound: dict[str, tuple[int, bytes]] = {}

    def check(self, worker: pb.WorkerId, context: Any) -> None:
        """Check the caller of a worker's call. Raises PermissionDenied."""
        caller = CALLER.get(_NO_CALLER)
        if not caller.speaks_for(worker.uid):
            raise PermissionDenied(f"worker {worker.uid}: expected its own certificate, got {caller}")
        incarnation, key = self._bound.get(worker.uid, (0, b""))
        if incarnation == worker.incarnation and key and not hmac.compare_digest(key, _key_of(context)):
            raise PermissionDenied(f"worker {worker.uid}: expected the key of its lease, got another one or none")

    def bind(self, worker: pb.WorkerId, context: Any) -> None:
        """Store the key of an accepted registration."""
        key = _key_of(context)
        if key:
            self._bound[worker.uid] = (worker.incarnation, key)
        else:
            self._bound.pop(worker.uid, None)

    def forget(self, uid: str) -> None:
        """Remove the key of a former member."""
        self._bound.pop(uid, None)


def _key_of(context: Any) -> bytes:
    """Hash of the call's key, b"" = none."""
    for key, value in (context.invocation_metadata() if context is not None else None) or ():
        if key == LEASE_KEY:
            return hashlib.sha256(str(value).encode()).digest()
    return b""


class ControlPlane(control_pb2_grpc.ControlPlaneServicer):
    """The ControlPlane service of one group.

    Args:
        config: of this process.
        metrics: of this process.
        clock: monotonic seconds.
        labels: returns the platform's labels of hosts, by hostname.
    """

    def __init__(
        self,
        config: ControlConfig,
        metrics: ControlMetrics,
        clock: Callable[[], float] = time.monotonic,
        labels: Callable[[], Mapping[str, discovery.Labels]] = dict,
    ) -> None:
        settings = Settings(
            config.num_ranks,
            config.lease_s,
            config.form_timeout_s,
            config.recover_s,
            elastic=config.elastic,
            blame_epochs=config.blame_epochs,
            blame_window_s=config.blame_window_s,
            quarantine_s=config.quarantine_s,
            min_workers=config.min_workers,
            max_workers=config.most_workers,
            follow_workers=config.follow_workers,
        )
        # State: lost with the process, told again by workers.
        self._id = secrets.randbits(63) | 1
        self._clock, self._metrics, self._labels = clock, metrics, labels
        self._facts: dict[str, tuple[topology_pb2.HostFacts, int]] = {}
        self._planned: tuple[int, float, pb.ExpertsResponse] | None = None
        self._topology: tuple[int, dict[str, discovery.Labels], bytes] | None = None
        self._limits = views.Limits.of(config.most_workers)
        self._group = new_group(settings, clock(), 1 + secrets.randbelow(MAX_LEAP))
        self._version = 1
        self._stats: dict[str, pb.WorkerStats] = {}
        # Parts beside the state machine.
        self._keys = WorkerKeys()
        self._watchers = Watchers(config.most_workers, metrics)
        self._rendered: dict[bool, tuple[int, bytes]] = {}
        self._experts = PlacementService(
            config.placement, config.num_ranks, metrics, clock, lambda: self._group, self._announce
        )
        self._postmortems, self._measures = Postmortems(), GroupMeasures(metrics)
        self._latency, self._slow_s = latency_watch.LatencyWatch(metrics), config.quarantine_slow_s
        self._measure()

    @property
    def group(self) -> Group:
        """The current state."""
        return self._group

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Add a worker to the group, or renew its membership."""
        host = request.host
        views.check_incarnation(request.worker.incarnation, time.time_ns())
        self._keys.check(request.worker, context)
        event = views.register_event(request, self._limits, self._max_epoch(), self._labels().get(host.hostname))
        kind, known = self._experts.kind_of(request), self._experts.checkpoints_of(request)
        response = pb.RegisterResponse(lease_s=self._group.settings.lease_s)
        if not self._admit(event, request, response, lambda: self._experts.set_kind(kind, known)):
            return response
        self._keys.bind(request.worker, context)
        host.DiscardUnknownFields()
        self._topology = None
        self._facts[event.worker.uid] = host, discovery.gpu_index(host, request.gpu_uuid, request.local_rank)
        response.epoch = self._group.epoch
        return response

    def _admit(
        self,
        event: group_state.Register,
        request: pb.RegisterRequest,
        response: pb.RegisterResponse,
        accepted: Callable[[], None],
    ) -> bool:
        """Apply the event. False: the worker is barred, and `response` says so."""
        worker = event.worker
        bar = views.remembered_bar(self._group, worker, request.barred, self._clock(), self._id)
        if bar is not None:
            self._apply(Cordon((bar,)))
        try:
            self._apply(event, accepted)
        except ResourceExhausted:
            bar = self._group.bar_of(worker)
            if bar is None:
                self._apply(Waits(worker))
                raise
            response.barred.CopyFrom(views.bar_message(bar, self._clock(), self._id))
            return False
        except (FailedPrecondition, AlreadyExists) as error:
            self._apply(RefusedWorker(worker.uid, str(error)))
            raise
        return True

    async def PublishRegion(self, request: pb.PublishRegionRequest, context: Any) -> pb.PublishRegionResponse:
        """Store a member's region for this epoch."""
        self._keys.check(request.worker, context)
        self._apply(views.publish_event(request, self._limits))
        return pb.PublishRegionResponse()

    async def Ready(self, request: pb.ReadyRequest, context: Any) -> pb.ReadyResponse:
        """Mark a member as ready: it has mapped all regions."""
        self._keys.check(request.worker, context)
        self._apply(views.ready_event(request))
        return pb.ReadyResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """Renew a lease; record reports of silent ranks and of experts."""
        self._keys.check(request.worker, context)
        report = self._experts.check_report(self._group, request)
        views.check_stats(request.stats)
        latency_watch.check(request.stats.latency, self._limits.world_size)
        prepared = self._experts.is_prepared(self._group, request)
        self._apply(views.heartbeat_event(request, self._limits, self._max_epoch(), prepared))
        self._metrics.heartbeats_total.inc()
        self._postmortems.record(request)
        if report is not None:
            self._experts.record_report(request.epoch, *report)
        response, member = pb.HeartbeatResponse(epoch=self._group.epoch), self._group.member(request.worker.uid)
        if request.HasField("stats") and member is not None:  # its own report may have ended its membership
            self._latency.record(self._group, request, self._clock())
            request.stats.DiscardUnknownFields()  # unknown fields would be copied into every view
            self._stats[request.worker.uid] = request.stats
        bar = self._group.bar_of(member.worker) if member is not None else None
        if bar is not None:
            response.barred.CopyFrom(views.bar_message(bar, self._clock(), self._id))
        return response

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        """Remove a member. OK also if it is already gone."""
        self._keys.check(request.worker, context)
        self._apply(views.leave_event(request))
        return pb.LeaveResponse()

    async def Topology(self, request: pb.TopologyRequest, context: Any) -> bytes:
        """Hosts and seats. Rendered once per state of the group, since any client may ask."""
        labels, made = dict(self._labels()), self._topology
        if made is None or made[:2] != (self._version, labels):
            response = views.topology_response(self._group, self._facts, labels)
            made = self._topology = (self._version, labels, response.SerializeToString())
        return made[2]

    async def Placement(self, request: pb.PlacementRequest, context: Any) -> pb.PlacementResponse:
        """The expert tables of an epoch."""
        return self._experts.placement(self._group, request)

    async def Experts(self, request: pb.ExpertsRequest, context: Any) -> pb.ExpertsResponse:
        """Load of the experts and the move that would follow. A slow rebalance is reused for ten times its duration."""
        version, now = self._experts.version, time.monotonic()
        if self._planned is None or self._planned[0] != version or now >= self._planned[1]:
            answer = await self._experts.experts()
            took_s = time.monotonic() - now
            fresh_s = _REBALANCE_PAUSES * took_s if took_s > _LONG_REBALANCE_S else 0.0
            self._planned = version, time.monotonic() + fresh_s, answer
        return self._planned[2]

    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:
        """Move experts now."""
        return await self._experts.rebalance()

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        """Have more or fewer workers."""
        if request.workers >= self._group.settings.min_workers:  # else that is what is wrong
            self._experts.check_size(request.workers)
        self._apply(Scale(request.workers))
        log.warning("scaling", workers=self._group.world_size, wanted=self._group.wanted.workers)
        return pb.ScaleResponse(workers=self._group.wanted.workers, world_size=self._group.world_size)

    async def Load(self, request: pb.LoadRequest, context: Any) -> pb.LoadResponse:
        """Load another checkpoint now."""
        return self._experts.load(request)

    async def Cordon(self, request: pb.CordonRequest, context: Any) -> pb.CordonResponse:
        """Bar workers from registering again; with `drain`, the answers to their heartbeats ask them to leave."""
        bars = views.bars_of(self._group, request)
        self._apply(Cordon(bars))
        log.warning("cordoned", workers=", ".join(bar.uid for bar in bars), drain=request.drain, reason=bars[0].reason)
        return pb.CordonResponse(barred=views.bar_messages(bars, self._clock(), self._id))

    async def Uncordon(self, request: pb.UncordonRequest, context: Any) -> pb.UncordonResponse:
        """Lift bars."""
        bars = views.bars_to_lift(self._group, request)
        self._apply(Uncordon(frozenset(bar.uid for bar in bars)))
        log.warning("uncordoned", workers=", ".join(bar.uid for bar in bars))
        return pb.UncordonResponse(barred=views.bar_messages(bars, self._clock(), self._id))

    async def Postmortems(self, request: pb.PostmortemsRequest, context: Any) -> pb.PostmortemsResponse:
        """What ranks knew when a wait failed."""
        return self._postmortems.message()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.GroupView | bytes]:
        """The newest view, then each change, until the caller or this process ends the stream."""
        worker, brief, table_once, latency = _identity(request), request.brief, request.table_once, request.latency
        del request  # the stream is long-lived, and must not keep the request alive
        if worker.uid:
            self._keys.check(worker, context)
        inside = views.is_member(self._group, worker)
        changed, has_table = self._watchers.enter(inside), 0
        try:
            while not self._watchers.stopped:
                changed.clear()
                if views.is_replaced(self._group, worker):
                    advice = "if two hosts have one name, set worker.uid on one of them"
                    raise AlreadyExists(f"worker {worker.uid}: a newer process holds its rank; {advice}")
                message, has_table = self._view(worker, brief, table_once, has_table, latency=latency)
                yield message
                await changed.wait()
            raise Unavailable("the control plane is stopping")
        finally:
            self._watchers.leave(changed, inside)

    def tick(self) -> None:
        """Advance time."""
        self._apply(Tick())
        self._measures.measure_members(self._group)
        self._latency.tick(self._group, self._clock())
        slow = self._latency.slow(self._group, self._slow_s, self._clock()) if self._slow_s else None
        if slow is not None:
            self._apply(slow)
        self._experts.tick(self._group.phase is Phase.SERVING and self._group.active is None)

    def stop(self) -> None:
        """End every Watch stream with UNAVAILABLE, so that watchers find the new leader; clear the group's gauges."""
        self._watchers.stopped = True
        self._experts.stop()
        self._metrics.clear_group()
        self._watchers.notify_now()

    def _max_epoch(self) -> int:
        return views.greatest_epoch(self._group, time.time())

    def _view(
        self, worker: pb.WorkerId, brief: bool, table_once: bool, has_table: int = 0, *, latency: bool = False
    ) -> tuple[pb.GroupView | bytes, int]:
        """The view for a watcher, and the epoch of the last region table sent to it; `has_table`: the one before."""
        group, inside = self._group, views.is_member(self._group, worker)
        if not (brief and inside):
            stats, experts = self._stats, self._placement_view()
            whole = views.group_view(group, self._version, self._clock(), stats, regions=inside, experts=experts)
            whole.barred.extend(views.bar_messages(group.bars, self._clock(), self._id))
            if latency:
                self._latency.show(whole, self._clock())
            return whole, has_table
        table = group.sealed and not (table_once and _needs_no_table(group, has_table))
        return self._brief(worker, table), group.epoch if table else has_table

    def _brief(self, worker: pb.WorkerId, table: bool) -> bytes:
        """The region table, or the state and this member. Bytes, since many watchers get the same."""
        group, rendered = self._group, self._rendered.get(table)
        if rendered is None or rendered[0] != self._version:
            make = views.table_view if table else views.brief_view
            rendered = self._version, make(group, self._version, self._placement_view()).SerializeToString()
            self._rendered[table] = rendered
        return rendered[1] if table else rendered[1] + views.own_seat(group, worker).SerializeToString()

    def _placement_view(self) -> views.PlacementView:
        experts, group = self._experts, self._group
        return views.PlacementView(experts.version, experts.next_version(group), experts.scaling(group))

    def _announce(self) -> None:
        """Notify the watchers of another placement."""
        self._version += 1
        self._watchers.notify_now()

    def _apply(self, event: Event, accepted: Callable[[], None] = lambda: None) -> None:
        """Apply an event to the group; `accepted` is called if it is not refused, before watchers are notified."""
        before = self._group
        self._group, effects = advance(before, event, self._clock())
        if not any(isinstance(effect, Refuse) for effect in effects):
            accepted()
        for effect in effects:
            self._perform(effect, before)

    def _perform(self, effect: Effect, before: Group) -> None:
        match effect:
            case Refuse(refusal, message):
                raise REFUSALS[refusal](message)
            case Lost(rank, uid, cause):
                self._measures.lost(cause)
                self._stats.pop(uid, None)
                self._latency.forget(uid)
                self._facts.pop(uid, None)
                if cause != "replaced":
                    self._keys.forget(uid)
                log.warning("member lost", lost_rank=rank, uid=uid, cause=cause)
            case Blamed(rank, by_rank, num_blamed):
                self._measures.blamed(rank)
                log.warning("rank reported silent", silent_rank=rank, by_rank=by_rank, times=num_blamed)
            case Publish():
                self._publish(before)

    def _publish(self, before: Group) -> None:
        group = self._group
        self._version += 1
        self._experts.group_changed(before, group)
        self._measures.changed(before, group, self._clock())
        if (group.phase, group.epoch) != (before.phase, before.epoch):
            self._postmortems.changed(group)
        self._measure()
        log.info(
            "group changed",
            state=group.phase.value,
            epoch=group.epoch,
            members=f"{len(group.members)}/{group.world_size}",
            regions="complete" if group.sealed else "missing",
            reason=group.why,
        )
        gathering = _is_gathering(before) and _is_gathering(group) and group.epoch == before.epoch
        self._watchers.notify(full=group.full, wait=gathering)

    def _measure(self) -> None:
        if not self._watchers.stopped:
            self._measures.measure(self._group)


def _identity(request: pb.WatchRequest) -> pb.WorkerId:
    """Checked identity of a watcher; keeps no reference to `request`. Raises InvalidArgument."""
    check_uid(request.worker.uid)
    return pb.WorkerId(uid=request.worker.uid, incarnation=request.worker.incarnation)


def _needs_no_table(group: Group, has_table: int) -> bool:
    """Whether a member that has the table of epoch `has_table` needs no other: it is current, all members have used the
    current one, or the group continues with an earlier one."""
    return has_table == group.epoch or group.active is not None or group.phase is Phase.SERVING


def _is_gathering(group: Group) -> bool:
    """Whether members can still join and leave within this epoch."""
    return group.phase in {Phase.FORMING, Phase.EXCHANGING} and not group.sealed
