"""The worker's client of the control plane: register, watch, heartbeat, and restore the state a restarted one lost.

It holds the newest view of the group and has no policy. Two tasks run on the event loop for the life of the worker,
independent of loading and computing in other threads:
* `_watch`: Register (with the remembered membership), then Watch; repeated when the stream breaks;
* `_heartbeat_loop`: a heartbeat every third of the lease; a reported fault is repeated until the epoch changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from crossdock.common import log, rpc
from crossdock.common.call_errors import (
    AlreadyExists,
    CallError,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    error_of,
)
from crossdock.common.control_channel import LEASE_KEY, TERM_KEY, ControlPlaneChannel
from crossdock.common.log import Logger
from crossdock.common.security import Security
from crossdock.common.tasks import end_tasks
from crossdock.protocol.v1 import control_pb2, control_pb2_grpc
from crossdock.worker.steps.work import Fault

_log = log.get(__name__)

_CALL_S = 5.0
"""Deadline of one call; a call longer than a lease is useless."""
_GROUP_CALL_S = 20.0
"""Deadline of calls that all members make at the same moment (PublishRegion, Ready): thousands of them keep a server
busy for seconds, and a timeout would cost the group an epoch. Two leases if that is longer, as in large groups."""
_RETRY_S = (0.1, 2.0)
"""First and longest pause between attempts to connect."""
_SILENCE_S = (2.0, 60.0)
"""First and longest time between two warnings that there is no control plane."""
_SPARE_S = 1.0
"""Longest pause of a spare between attempts to register."""

View = control_pb2.GroupView


WARN_EVERY_S = 30.0
"""Interval of warnings about refused heartbeats."""


class Refusals:
    """Refused heartbeats since the last accepted one."""

    def __init__(self) -> None:
        self._last = ""
        self._warned_at = -WARN_EVERY_S

    def note(self, error: CallError, lease_s: float, log: Logger) -> None:
        """Note a failed heartbeat. An unreachable control plane is temporary; a refusal is permanent, so it is logged
        at intervals, and again when the lease is lost."""
        if isinstance(error, Unavailable | DeadlineExceeded | Cancelled):
            log.debug("heartbeat failed", error=error)
            return
        self._last = f"{error.code.name}: {error}"
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning("heartbeat refused", error=self._last, lease_s=lease_s)

    def lease_lost(self, error: CallError, log: Logger) -> None:
        """The lease was lost: log the refusals before it."""
        if self._last:
            log.warning("lease lost", error=error, heartbeats_refused=self._last)
        self.clear()

    def clear(self) -> None:
        """A heartbeat was accepted."""
        self._last = ""


def why_barred(barred: control_pb2.Barred) -> str:
    """Why a worker is barred from the group, and until when."""
    until = f"for {barred.left_s:.0f} s more" if barred.left_s else f"until `crossdock uncordon {barred.uid}`"
    return f"{barred.cause}: {barred.reason}, {until}"


class JoinRefused(Exception):
    """The control plane refused this worker: another model, another ABI, or a newer process of the same uid.

    Attributes:
        permanent: no retry can succeed with this configuration.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class ControlPlaneClient:
    """Client of the control plane for one worker. Make and use it inside the running loop.

    Args:
        target: host:port of the control plane, or several (`ControlPlaneChannel`).
        registration: the Register request; `prior` is filled in here.
        stats: called for each heartbeat.
        security: TLS and tokens; None: plain text.
        experts: called for each heartbeat: the expert report; None: no report.

    Attributes:
        trouble: why there is no connection; empty if there is one.
        spare: the group is full or has barred this worker; registration is retried.
        on_drain: called when an operator drains this worker.
    """

    def __init__(
        self,
        target: str,
        registration: control_pb2.RegisterRequest,
        stats: Callable[[], control_pb2.WorkerStats],
        security: Security | None = None,
        experts: Callable[[], control_pb2.ExpertReport | None] = lambda: None,
    ) -> None:
        self._channel = ControlPlaneChannel(target, security)
        self._stub = control_pb2_grpc.ControlPlaneStub(self._channel.grpc_channel)
        self._key = secrets.token_hex(16)
        self._term = 0
        self._num_streams = 0
        self._answered_at = time.monotonic()
        self._unanswered = False
        self._registration, self._stats, self._experts = registration, stats, experts
        self._view, self._table = View(), View()
        self._changed = asyncio.Condition()
        self._refused: JoinRefused | None = None
        self._prior: control_pb2.PriorMembership | None = None
        self._fault: tuple[int, Fault] | None = None
        self._prepared: int | None = None
        self._unprepared = ""
        self._leaving = False
        self._barred = control_pb2.Barred()
        self._refusals = Refusals()
        self._lease_s = 3.0
        self.on_drain: Callable[[], None] = lambda: None
        self.trouble = ""
        self.spare = False
        self._heartbeat_now = asyncio.Event()
        self._register_again = asyncio.Event()
        self._silent_until, self._silence_s = 0.0, _SILENCE_S[0]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def view(self) -> View:
        """The newest view; before the first one: epoch 0, no members."""
        return self._view

    @property
    def registered(self) -> bool:
        """True once a view has arrived."""
        return bool(self._view.version)

    @property
    def _group_call_s(self) -> float:
        return max(_GROUP_CALL_S, 2 * self._lease_s)

    def start(self) -> None:
        """Start the two tasks."""
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._heartbeat_loop())]

    async def supervise(self) -> None:
        """Wait while both tasks run. Raises the error that ended one of them, which is a bug."""
        tasks = self._tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        await asyncio.Future()  # both ended normally: refused, or closed

    async def wait(self, wanted: Callable[[View], bool]) -> View:
        """Wait for a view that `wanted` accepts. Raises JoinRefused if there will be no more views."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._refused is not None or wanted(self._view))
            if self._refused is not None:
                raise self._refused
            return self._view

    async def wait_first_answer(self) -> None:
        """Wait for a view, or for the state `spare`. Raises JoinRefused."""
        await self.wait(lambda view: view.version > 0 or self.spare)

    async def region_table(self, epoch: int) -> Sequence[bytes] | None:
        """Wait for the regions of all ranks in `epoch`; None: that epoch is over. Raises JoinRefused."""
        await self.wait(lambda view: view.epoch > epoch or self._table.epoch == epoch)
        over = self._view.epoch > epoch or self._table.epoch != epoch
        return None if over else [member.region for member in self._table.members[: self._table.world_size]]

    def own_member(self, view: View) -> control_pb2.Member | None:
        """This worker's entry in a view."""
        worker = self._registration.worker
        rank = self._prior.rank if self._prior is not None else 0
        if rank < len(view.members) and view.members[rank].worker == worker:  # a complete table is by rank
            return view.members[rank]
        return next((member for member in view.members if member.worker == worker), None)

    async def publish_region(self, epoch: int, rank: int, region: bytes) -> None:
        """Publish this rank's region for `epoch`. Raises CallError (FailedPrecondition: the epoch is over)."""
        size = self._view.world_size if self._view.epoch == epoch else 0
        self._prior = control_pb2.PriorMembership(epoch=epoch, rank=rank, region=region, world_size=size)
        request = control_pb2.PublishRegionRequest(worker=self._registration.worker, epoch=epoch, region=region)
        await self._call("PublishRegion", request, self._group_call_s, retry_s=self._group_call_s)

    async def ready(self, epoch: int, placement: int) -> None:
        """Report that this rank can serve `epoch` with that version of the placement. Raises CallError
        (FailedPrecondition: the epoch is over, or other ranks hold another version)."""
        request = control_pb2.ReadyRequest(worker=self._registration.worker, epoch=epoch, placement=placement)
        await self._call("Ready", request, self._group_call_s, retry_s=self._group_call_s)

    async def placement(self, epoch: int, *, of_next: bool = False) -> control_pb2.PlacementResponse:
        """Fetch the placement of `epoch`, or of the one that is planned after it. Raises CallError (FailedPrecondition:
        the epoch is over, or none is planned).

        An answer that was in flight when the Watch stream ended may be from a former leader, whose successor may use
        the same version for other tables. Such an answer is dropped and the call is repeated."""
        worker = self._registration.worker if of_next else None
        request = control_pb2.PlacementRequest(epoch=epoch, next_of=worker)
        while True:
            stream = self._num_streams
            answer: control_pb2.PlacementResponse = await self._call(
                "Placement", request, self._group_call_s, retry_s=self._group_call_s
            )
            if stream == self._num_streams:
                if answer.layers:
                    self._registration.checkpoints.CopyFrom(answer.checkpoints)  # for whatever leader comes next
                return answer

    def serving(self, epoch: int) -> None:
        """Remember that the group of `epoch` serves, to report it to a restarted control plane."""
        if self._prior is not None and self._prior.epoch == epoch:
            self._prior.ready = True

    def report(self, epoch: int, fault: Fault) -> None:
        """Say that `epoch` is broken, now and with every heartbeat until there is a newer one."""
        self._fault = (epoch, fault)
        if self._prior is not None and self._prior.epoch <= epoch:
            self._prior.ready = False
        self._heartbeat_now.set()

    @property
    def is_prepared(self) -> bool:
        """Whether the experts of the planned epoch in the newest view are here."""
        return self._prepared == self._view.next_placement

    def prepared(self, version: int | None, why_not: str = "") -> None:
        """Set the planned placement whose experts this worker holds, None for none, or why it cannot load them."""
        if (version, why_not) != (self._prepared, self._unprepared):
            self._prepared, self._unprepared = version, why_not
            self._heartbeat_now.set()

    async def wait_replaced(self, timeout_s: float) -> bool:
        """Say that this worker is being stopped, and wait until the group has no need of it any more. False: the group
        waits for the successors of those that leave, or it took too long."""
        own = self.own_member(self._view)
        if not self._view.follows_workers or own is None or own.rank >= self._view.world_size:
            return False
        self._leaving = True
        self._heartbeat_now.set()
        with contextlib.suppress(TimeoutError, JoinRefused):
            await asyncio.wait_for(self.wait(lambda view: self.own_member(view) is None), timeout_s)
            return True
        return False

    async def leave(self, reason: str) -> None:
        """Leave the group; nothing is sent after this. Best effort: the lease expires otherwise."""
        await self._stop_tasks()
        request = control_pb2.LeaveRequest(worker=self._registration.worker, reason=reason)
        with contextlib.suppress(CallError):
            await self._call("Leave", request, 2.0)

    async def close(self) -> None:
        """Stop both tasks and close the channel."""
        await self._stop_tasks()
        await self._channel.close()

    async def _stop_tasks(self) -> None:
        await end_tasks(*self._tasks)

    async def _watch(self) -> None:
        pause_s = _RETRY_S[0]
        if self._channel.has_several_targets:
            await self._fail_over(None)
        while self._refused is None:
            try:
                if not await self._register(self._channel.first_call_s(_CALL_S, pause_s)):
                    await asyncio.sleep(_SPARE_S * random.uniform(0.5, 1.0))
                    continue
                pause_s, self.trouble = _RETRY_S[0], ""
                self._silent_until, self._silence_s = 0.0, _SILENCE_S[0]
                await self._follow()
            except (AlreadyExists, FailedPrecondition, InvalidArgument) as error:
                await self._refuse(JoinRefused(str(error), permanent=isinstance(error, InvalidArgument)))
            except CallError as error:
                self.trouble = str(error)
                self._log_absence(error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                await self._fail_over(error)
                pause_s = min(2 * pause_s, _RETRY_S[1])

    def _log_absence(self, error: CallError) -> None:
        """Warn of a control plane that does not answer: at once, then after pauses that double up to a minute. Attempts
        do not become as rare: one that was restarted takes back its group for `recover_s` alone."""
        now = time.monotonic()
        if now < self._silent_until:
            return
        _log.warning("no control plane", error=error, next_warning_in_s=self._silence_s)
        self._silent_until, self._silence_s = now + self._silence_s, min(2 * self._silence_s, _SILENCE_S[1])

    async def _fail_over(self, error: CallError | None) -> None:
        if await self._channel.fail_over(error):
            self._stub = control_pb2_grpc.ControlPlaneStub(self._channel.grpc_channel)

    async def _call(self, method: str, request: Any, timeout_s: float, *, retry_s: float = 0) -> Any:
        """Make one call; a retry goes to the current leader. Raises CallError."""

        def attempt(message: Any, **more: Any) -> Any:
            return getattr(self._stub, method)(message, metadata=self._metadata(), **more)

        return await rpc.call(attempt, request, timeout_s=timeout_s, retry_s=retry_s)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((LEASE_KEY, self._key), (TERM_KEY, str(self._term)))

    async def _register(self, timeout_s: float) -> bool:
        """Register; False: the group is full, or has barred this worker. Raises CallError."""
        request = control_pb2.RegisterRequest()
        request.CopyFrom(self._registration)
        request.barred.CopyFrom(self._barred)
        if self._prior is not None:
            request.prior.CopyFrom(self._prior)
        try:
            response: control_pb2.RegisterResponse = await self._call("Register", request, timeout_s)
        except ResourceExhausted as error:
            self._barred.Clear()
            await self._wait_as_spare(str(error))
            return False
        if response.barred.cause:
            self._barred.CopyFrom(response.barred)
            await self._wait_as_spare(why_barred(response.barred))
            return False
        self.spare, self._lease_s = False, response.lease_s
        _log.info("registered", epoch=response.epoch, lease_s=response.lease_s)
        return True

    async def _wait_as_spare(self, why: str) -> None:
        if not self.spare or self.trouble.partition(":")[0] != why.partition(":")[0]:
            _log.info("waiting as a spare", why=why)
        async with self._changed:
            self.spare, self.trouble = True, why
            self._changed.notify_all()

    async def _follow(self) -> None:
        """Read views until the stream ends (raises CallError) or `_heartbeat_loop` asks for a new registration."""
        self._register_again.clear()
        self._answered_at, self._unanswered = time.monotonic(), False
        again = asyncio.create_task(self._register_again.wait())
        reader = asyncio.create_task(self._read_views())
        try:
            await asyncio.wait({reader, again}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            if self._unanswered:
                raise Unavailable(f"no heartbeat was answered for {self._lease_s:g} s")
        finally:
            self._num_streams += 1
            for task in (reader, again):
                task.cancel()

    async def _read_views(self) -> bool:
        request = control_pb2.WatchRequest(worker=self._registration.worker, brief=True, table_once=True)
        stream = self._stub.Watch(request, metadata=self._metadata())
        try:
            async for view in stream:
                await self._take_view(view)
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            stream.cancel()
        raise Unavailable("the control plane ended the Watch stream")

    async def _take_view(self, view: View) -> None:
        if view.term < self._term:
            raise Unavailable(f"a view of term {view.term} is outdated: term {self._term} has begun")
        self._term = view.term
        if self._fault is not None and view.epoch > self._fault[0]:
            self._fault = None
        self._remember(view)
        async with self._changed:
            self._view = view
            if view.HasField("wanted"):
                self._registration.wanted.CopyFrom(view.wanted)  # for whatever leader comes next
            ranks = view.members[: view.world_size]  # standbys have ranks above
            if len(ranks) == view.world_size and ranks[-1].region:  # all members have a region, or none
                self._table = view
            self._changed.notify_all()

    def _remember(self, view: View) -> None:
        """Update the remembered membership for a newer epoch: a restarted control plane must not learn that the old
        epoch still serves, nor form a group under an epoch that this worker has already seen."""
        own_member = self.own_member(view)
        seen = self._prior.epoch if self._prior is not None else 0
        final = self._prior is not None or view.state == control_pb2.EXCHANGING
        if view.epoch <= seen or not final:
            return
        if own_member is not None:
            kept = self._prior.region if self._prior is not None and own_member.rank in view.active_ranks else b""
            self._prior = control_pb2.PriorMembership(
                epoch=view.epoch,
                rank=own_member.rank,
                region=own_member.region or kept,
                active_ranks=view.active_ranks,
                world_size=view.world_size,
            )
        elif self._prior is not None:  # lost and not yet registered again: no seat in the newer epoch
            self._prior.ready = False

    async def _refuse(self, error: JoinRefused) -> None:
        async with self._changed:
            self._refused = error
            self._changed.notify_all()

    async def _heartbeat_loop(self) -> None:
        while self._refused is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heartbeat_now.wait(), self._lease_s / 3)
            self._heartbeat_now.clear()
            if self.registered:
                await self._send_heartbeat()

    async def _send_heartbeat(self) -> None:
        try:
            response = await self._call("Heartbeat", self._heartbeat(), max(0.5, self._lease_s * 2 / 3))
        except NotFound as error:
            self._refusals.lease_lost(error, _log)
            if not self._leaving:
                self._register_again.set()
        except AlreadyExists as error:
            await self._refuse(JoinRefused(str(error)))
        except CallError as error:
            self._refusals.note(error, self._lease_s, _log)
            self._check_answers()
        else:
            self._answered_at = time.monotonic()
            self._refusals.clear()
            self._record_bar(response.barred)

    def _record_bar(self, barred: control_pb2.Barred) -> None:
        """Record the bar of this member, to report it to the next control plane."""
        if barred.drain and not self._barred.drain:
            _log.warning("drain requested", why=why_barred(barred))
            self.on_drain()
        self._barred.CopyFrom(barred)

    def _check_answers(self) -> None:
        """Fail over if no heartbeat was answered for a lease: a stopped or unreachable leader may break no
        connection."""
        if time.monotonic() - self._answered_at > self._lease_s:
            self._unanswered = True
            self._register_again.set()

    def _heartbeat(self) -> control_pb2.HeartbeatRequest:
        epoch = self._prior.epoch if self._prior is not None else 0
        request = control_pb2.HeartbeatRequest(worker=self._registration.worker, epoch=epoch, stats=self._stats())
        request.loaded, request.prepared = self._prepared is not None, self._prepared or 0
        request.unprepared, request.leaving = self._unprepared, self._leaving
        experts = self._experts()
        if experts is not None:
            request.experts.CopyFrom(experts)
        if self._fault is not None:
            request.epoch, fault = self._fault
            request.silent_ranks.extend(fault.silent_ranks)
            request.fault, request.postmortem = fault.reason, fault.postmortem
        return request
