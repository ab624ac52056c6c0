"""The worker's line to the control plane: register, watch, heartbeat, and tell again what a restarted one forgot.

Policy-free: it knows the newest view of the group and lets others wait for one they like. Two tasks run on the event
loop for the whole life of the worker, whatever loads or computes in threads beside them:
* `_watch`: Register (with what is remembered of the group), Watch, and again from the start when the stream breaks;
* `_beat`: a heartbeat every third of the lease; a fault that was reported is repeated until the epoch has changed.
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
from crossdock.common.control_channel import Line
from crossdock.common.security import Security
from crossdock.protocol.v1 import control_pb2, control_pb2_grpc
from crossdock.worker.refusals import Refusals, why_barred
from crossdock.worker.work import Fault

_log = log.get(__name__)

_CALL_S = 5.0
"""Deadline of one call. A call that takes longer than a lease is lost anyway."""
_PATIENT_S = 20.0
"""Deadline of what all members of a group say at the same moment: its region, and that it is ready. Thousands of them
keep a server busy for seconds, and giving up would cost everybody an epoch. Two leases where that is more: long leases
are given to large groups."""
_RETRY_S = (0.1, 2.0)
"""First and longest pause before a broken line is tried again."""
_SPARE_S = 1.0
"""Longest pause of a spare before it asks again whether there is a place."""

LEASE_KEY = "crossdock-lease-key"
"""Metadata of every call: a secret of this process, by which the control plane knows that it is the same again."""
TERM_KEY = "crossdock-term"
"""Metadata of every call: the greatest term seen. A control plane of a lower one stops deciding when it hears it."""

View = control_pb2.GroupView


class JoinRefused(Exception):
    """The control plane does not take this worker as it is: another model, another ABI, or a newer process of it.

    Attributes:
        never: nor will it take one like it later, whoever else leaves.
    """

    def __init__(self, message: str, *, never: bool = False) -> None:
        super().__init__(message)
        self.never = never


class Link:
    """See the module's head. Make and use it inside the running loop.

    Args:
        target: host:port of the control plane, or several (`Line`).
        registration: what Register says; `prior` is filled in here.
        stats: asked for at each heartbeat.
        security: TLS and tokens; None: plain text.
        experts: asked for at each heartbeat, too: what is held, how busy it was; None: nothing to say.

    Attributes:
        trouble: why there is no line just now, or empty.
        spare: the group has no place for this worker just now, or keeps it out; it goes on asking.
        on_drain: called when an operator wants this worker to leave.
    """

    def __init__(
        self,
        target: str,
        registration: control_pb2.RegisterRequest,
        stats: Callable[[], control_pb2.WorkerStats],
        security: Security | None = None,
        experts: Callable[[], control_pb2.ExpertReport | None] = lambda: None,
    ) -> None:
        self._line = Line(target, security)
        self._stub = control_pb2_grpc.ControlPlaneStub(self._line.channel)
        self._key = secrets.token_hex(16)
        self._term = 0
        self._num_streams = 0
        self._answered_at = time.monotonic()
        self._hung = False
        self._registration, self._stats, self._experts = registration, stats, experts
        self._view, self._table = View(), View()
        self._changed = asyncio.Condition()
        self._refused: JoinRefused | None = None
        self._prior: control_pb2.PriorMembership | None = None
        self._fault: tuple[int, Fault] | None = None
        self._loaded = False
        self._barred = control_pb2.Barred()
        self._refusals = Refusals()
        self._lease_s = 3.0
        self.on_drain: Callable[[], None] = lambda: None
        self.trouble = ""
        self.spare = False
        self._beat_now = asyncio.Event()
        self._register_again = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def view(self) -> View:
        """The newest view; epoch 0 and no members before the first."""
        return self._view

    @property
    def registered(self) -> bool:
        """True once a view has come."""
        return bool(self._view.version)

    @property
    def _patient_s(self) -> float:
        return max(_PATIENT_S, 2 * self._lease_s)

    def start(self) -> None:
        """Begin to register, watch and beat."""
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._beat())]

    async def supervise(self) -> None:
        """Wait as long as both tasks do what they are for. Raises whatever ended one of them; it is a bug."""
        tasks = self._tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        await asyncio.Future()  # both ended on purpose: refused, or closed

    async def wait(self, wanted: Callable[[View], bool]) -> View:
        """The newest view, as soon as `wanted` likes it. Raises JoinRefused if there will be no more views."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._refused is not None or wanted(self._view))
            if self._refused is not None:
                raise self._refused
            return self._view

    async def heard(self) -> None:
        """Wait until the control plane has answered: a view came, or there is no place. Raises JoinRefused."""
        await self.wait(lambda view: view.version > 0 or self.spare)

    async def table(self, epoch: int) -> Sequence[bytes] | None:
        """The regions of all ranks in `epoch`, as soon as all are in; None: that epoch is over. Raises JoinRefused."""
        await self.wait(lambda view: view.epoch > epoch or self._table.epoch == epoch)
        over = self._view.epoch > epoch or self._table.epoch != epoch
        return None if over else [member.region for member in self._table.members]

    def me(self, view: View) -> control_pb2.Member | None:
        """This worker's seat in a view."""
        worker = self._registration.worker
        rank = self._prior.rank if self._prior is not None else 0
        if rank < len(view.members) and view.members[rank].worker == worker:  # a complete table is by rank
            return view.members[rank]
        return next((member for member in view.members if member.worker == worker), None)

    async def publish(self, epoch: int, rank: int, region: bytes) -> None:
        """Give this rank's region for `epoch`. Raises rpc.CallError (FailedPrecondition: the epoch is over)."""
        self._prior = control_pb2.PriorMembership(epoch=epoch, rank=rank, region=region)
        request = control_pb2.PublishRegionRequest(worker=self._registration.worker, epoch=epoch, region=region)
        await self._call("PublishRegion", request, self._patient_s, retry_s=self._patient_s)

    async def ready(self, epoch: int, placement: int) -> None:
        """Everything is in place for `epoch`, with the experts of that version of the placement. Raises rpc.CallError
        (FailedPrecondition: the epoch is over, or other ranks hold another version)."""
        request = control_pb2.ReadyRequest(worker=self._registration.worker, epoch=epoch, placement=placement)
        await self._call("Ready", request, self._patient_s, retry_s=self._patient_s)

    async def placement(self, epoch: int) -> control_pb2.PlacementResponse:
        """Where the experts lie. Raises rpc.CallError (FailedPrecondition: the epoch is over).

        An answer that was under way when the Watch stream ended may be one of a control plane that is gone: its
        successor may use that version for other tables. So it is dropped, and asked for again."""
        request = control_pb2.PlacementRequest(epoch=epoch)
        while True:
            asked = self._num_streams
            answer: control_pb2.PlacementResponse = await self._call(
                "Placement", request, self._patient_s, retry_s=self._patient_s
            )
            if asked == self._num_streams:
                return answer

    def serving(self, epoch: int) -> None:
        """Remember that the group of `epoch` serves: a control plane that forgot it will be told so."""
        if self._prior is not None and self._prior.epoch == epoch:
            self._prior.ready = True

    def report(self, epoch: int, fault: Fault) -> None:
        """Say that `epoch` is broken, now and with every heartbeat until there is a newer one."""
        self._fault = (epoch, fault)
        if self._prior is not None and self._prior.epoch <= epoch:
            self._prior.ready = False
        self._beat_now.set()

    def loaded(self, is_loaded: bool) -> None:
        """Whether this worker, outside of a group that goes on without it, holds the experts of its rank."""
        if is_loaded != self._loaded:
            self._loaded = is_loaded
            self._beat_now.set()

    async def leave(self, reason: str) -> None:
        """Go on purpose; nothing is sent after this. Best effort: a lease ends by itself."""
        await self._stop_tasks()
        request = control_pb2.LeaveRequest(worker=self._registration.worker, reason=reason)
        with contextlib.suppress(rpc.CallError):
            await self._call("Leave", request, 2.0)

    async def close(self) -> None:
        """Stop both tasks and hang up."""
        await self._stop_tasks()
        await self._line.close()

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        pause_s = _RETRY_S[0]
        if self._line.has_choice:
            await self._turn(None)
        while self._refused is None:
            try:
                if not await self._register():
                    await asyncio.sleep(_SPARE_S * random.uniform(0.5, 1.0))
                    continue
                pause_s, self.trouble = _RETRY_S[0], ""
                await self._follow()
            except (rpc.AlreadyExists, rpc.FailedPrecondition, rpc.InvalidArgument) as error:
                await self._refuse(JoinRefused(str(error), never=isinstance(error, rpc.InvalidArgument)))
            except rpc.CallError as error:
                self.trouble = str(error)
                _log.info("no control plane", error=error, retry_s=pause_s)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                await self._turn(error)
                pause_s = min(2 * pause_s, _RETRY_S[1])

    async def _turn(self, error: rpc.CallError | None) -> None:
        if await self._line.turn(error):
            self._stub = control_pb2_grpc.ControlPlaneStub(self._line.channel)

    async def _call(self, method: str, request: Any, timeout_s: float, *, retry_s: float = 0) -> Any:
        """One call; what is tried again goes to whoever leads by then. Raises rpc.CallError."""

        def attempt(message: Any, **more: Any) -> Any:
            return getattr(self._stub, method)(message, metadata=self._metadata(), **more)

        return await rpc.call(attempt, request, timeout_s=timeout_s, retry_s=retry_s)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((LEASE_KEY, self._key), (TERM_KEY, str(self._term)))

    async def _register(self) -> bool:
        """Whether the group has a place for this worker. Raises rpc.CallError."""
        request = control_pb2.RegisterRequest()
        request.CopyFrom(self._registration)
        request.reads_barred = True
        request.barred.CopyFrom(self._barred)
        if self._prior is not None:
            request.prior.CopyFrom(self._prior)
        try:
            response: control_pb2.RegisterResponse = await self._call("Register", request, _CALL_S)
        except rpc.ResourceExhausted as error:
            self._barred.Clear()
            await self._stand_by(str(error))
            return False
        if response.barred.cause:
            self._barred.CopyFrom(response.barred)
            await self._stand_by(why_barred(response.barred))
            return False
        self.spare, self._lease_s = False, response.lease_s
        _log.info("registered", epoch=response.epoch, lease_s=response.lease_s)
        return True

    async def _stand_by(self, why: str) -> None:
        if not self.spare or self.trouble.partition(":")[0] != why.partition(":")[0]:
            _log.info("waiting as a spare", why=why)
        async with self._changed:
            self.spare, self.trouble = True, why
            self._changed.notify_all()

    async def _follow(self) -> None:
        """Take views until the stream ends (raises CallError) or `_beat` wants to register again."""
        self._register_again.clear()
        self._answered_at, self._hung = time.monotonic(), False
        again = asyncio.create_task(self._register_again.wait())
        reader = asyncio.create_task(self._read_views())
        try:
            await asyncio.wait({reader, again}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            if self._hung:
                raise rpc.Unavailable(f"no heartbeat was answered for {self._lease_s:g} s")
        finally:
            self._num_streams += 1
            for task in (reader, again):
                task.cancel()

    async def _read_views(self) -> bool:
        request = control_pb2.WatchRequest(worker=self._registration.worker, brief=True, table_once=True)
        stream = self._stub.Watch(request, metadata=self._metadata())
        try:
            async for view in stream:
                await self._show(view)
        except grpc.RpcError as error:
            raise rpc.error_of(error) from None
        finally:
            stream.cancel()
        raise rpc.Unavailable("the control plane ended the Watch stream")

    async def _show(self, view: View) -> None:
        if view.term < self._term:
            raise rpc.Unavailable(f"a view of term {view.term} came late: term {self._term} has begun")
        self._term = view.term
        if self._fault is not None and view.epoch > self._fault[0]:
            self._fault = None
        self._remember(view)
        async with self._changed:
            self._view = view
            if len(view.members) == view.world_size and view.members[-1].region:  # all have one, or none
                self._table = view
            self._changed.notify_all()

    def _remember(self, view: View) -> None:
        """A newer epoch makes what was remembered void: a control plane that forgot the group must not be told that the
        old one still serves, nor form a new one under the number that this worker has seen already."""
        me = self.me(view)
        seen = self._prior.epoch if self._prior is not None else 0
        final = self._prior is not None or view.state == control_pb2.EXCHANGING
        if view.epoch <= seen or not final:
            return
        if me is not None:
            kept = self._prior.region if self._prior is not None and me.rank in view.active_ranks else b""
            self._prior = control_pb2.PriorMembership(
                epoch=view.epoch, rank=me.rank, region=me.region or kept, active_ranks=view.active_ranks
            )
        elif self._prior is not None:  # lost, and not registered again yet: the newer epoch has no seat to remember
            self._prior.ready = False

    async def _refuse(self, error: JoinRefused) -> None:
        async with self._changed:
            self._refused = error
            self._changed.notify_all()

    async def _beat(self) -> None:
        while self._refused is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat_now.wait(), self._lease_s / 3)
            self._beat_now.clear()
            if self.registered:
                await self._beat_once()

    async def _beat_once(self) -> None:
        try:
            response = await self._call("Heartbeat", self._heartbeat(), max(0.5, self._lease_s * 2 / 3))
        except rpc.NotFound as error:
            self._refusals.lease_lost(error, _log)
            self._register_again.set()
        except rpc.AlreadyExists as error:
            await self._refuse(JoinRefused(str(error)))
        except rpc.CallError as error:
            self._refusals.note(error, self._lease_s, _log)
            self._notice_silence()
        else:
            self._answered_at = time.monotonic()
            self._refusals.clear()
            self._take_bar(response.barred)

    def _take_bar(self, barred: control_pb2.Barred) -> None:
        """What an operator has said of this member. Another control plane is told of it by this worker."""
        if barred.drain and not self._barred.drain:
            _log.warning("to be drained", why=why_barred(barred))
            self.on_drain()
        self._barred.CopyFrom(barred)

    def _notice_silence(self) -> None:
        """A control plane that is stopped or cut off breaks no connection: look for another one."""
        if time.monotonic() - self._answered_at > self._lease_s:
            self._hung = True
            self._register_again.set()

    def _heartbeat(self) -> control_pb2.HeartbeatRequest:
        epoch = self._prior.epoch if self._prior is not None else 0
        request = control_pb2.HeartbeatRequest(worker=self._registration.worker, epoch=epoch, stats=self._stats())
        request.loaded = self._loaded
        experts = self._experts()
        if experts is not None:
            request.experts.CopyFrom(experts)
        if self._fault is not None:
            request.epoch, fault = self._fault
            request.silent_ranks.extend(fault.silent_ranks)
            request.fault = fault.reason
        return request
