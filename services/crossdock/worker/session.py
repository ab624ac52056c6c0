"""A worker's membership, from the first word to the control plane to the last. `Session.join` is the start-up story.

    join: registered ─▶ a complete group is forming ─▶ rank ─▶ load that rank's experts ─▶ publish region, map the
          peers', first barrier ─▶ Ready ─▶ SERVING
    serve: the engine takes steps until the epoch ends, experts move meanwhile (mover.py) ─▶ join the next one, in the
          same process, experts kept

An elastic group goes on without a rank that is lost: those that are left keep communicator and experts, tell the
communicator who is left (`set_active`), and serve. Whoever is outside loads its experts and waits to be taken in.

An epoch ends for one of three reasons: the control plane has a newer one (a rank was lost, left or replaced); the
engine found a peer silent, which is reported so that there will be a newer one; or ranks left between two steps. In
each case requests here fail fast with UNAVAILABLE, naming ranks and epoch. A control plane that is only gone, or comes
back empty, ends nothing: see link.py. The process around a session is in process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc

from crossdock.common import log, rpc
from crossdock.common.tasks import beside
from crossdock.v1 import control_pb2
from crossdock.worker import device as devices
from crossdock.worker.device import DeviceLost
from crossdock.worker.engine import Engine
from crossdock.worker.experts import Experts
from crossdock.worker.holdings import Holdings
from crossdock.worker.link import JoinRefused, Link, View
from crossdock.worker.model import Model
from crossdock.worker.mover import Mover
from crossdock.worker.placement import Placement, PlacementError
from crossdock.worker.seat import ControlGroup, Seat, is_outside, seat_in
from crossdock.worker.status import Status
from crossdock.worker.telemetry import Telemetry
from crossdock.worker.threads import in_thread
from crossdock.worker.work import Failure, Fault, Left
from ep_kernels import EpError, MoECommunicator, PeerTimeout, TransportError

_log = log.get(__name__)

_LEAVE_GRACE_S = 0.25
"""Between the wish to leave and leaving: ranks that are told to stop together shall all have heard it."""
_FAREWELL_S = 2.0
"""Longest wait for the peers to agree that this rank leaves."""
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Membership:
    """What `join` gives: a seat in a serving group, its communicator, this rank's experts (None: it has none), and
    where those of all ranks are."""

    seat: Seat
    comm: MoECommunicator
    experts: Experts | None
    holdings: Holdings


class Session:
    """One worker's life in the group. Make and use it on the event loop.

    Args:
        link: to the control plane; started.
        model: what is served, and how a communicator for it is made.
        engine: takes the steps.
        status: what the rest of the process is told.
        telemetry: told which experts this rank has.
        mover: knows where experts are, and moves them.
    """

    def __init__(
        self, link: Link, model: Model, engine: Engine, status: Status, telemetry: Telemetry, mover: Mover
    ) -> None:
        self._mover = mover
        self._link, self._model, self._engine, self._status = link, model, engine, status
        self._telemetry = telemetry
        self._epoch = 0
        self._comm: MoECommunicator | None = None
        self._aborted = False
        self._outside: int | None = None
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Join and serve, epoch after epoch, until this rank has left. Raises JoinRefused, DeviceLost."""
        try:
            while not self._left.is_set():
                await self._serve(await self.join())
        finally:
            self._close_comm()

    async def join(self) -> Membership:
        """From nothing, or from an epoch that ended, to a seat in a serving group. Raises JoinRefused, DeviceLost."""
        while True:
            await self._link.wait(lambda view: view.version > 0)
            self._status.joining("waiting for the group to be complete")
            seat = await self._next_seat()
            self._status.seated(seat)
            placement = await self._placement(seat)
            if placement is None:
                continue
            experts = await in_thread("load", self._model.load, placement, seat.rank, self._loading)
            self._telemetry.holds(experts.ids if experts else {}, self._model.num_bytes)
            self._status.joining("exchanging regions")
            comm = await self._connect(seat, placement)
            if comm is None:
                continue
            self._engine.open()  # before Ready: a client may hear of SERVING sooner than this rank does
            if await self._say_ready(seat, placement) and await self._is_serving(seat):
                self._link.serving(seat.epoch)
                num_experts, switched = self._model.spec.num_experts, self._telemetry.switched
                holdings = Holdings(placement, num_experts, seat.rank, experts, switched, seat.mask)
                return Membership(seat, comm, experts, holdings)
            self._engine.close(failure_of(self._link.view))

    def _loading(self, done_bytes: int, total_bytes: int) -> None:
        self._status.loading(done_bytes, total_bytes)
        self._telemetry.loaded(done_bytes)

    async def _next_seat(self) -> Seat:
        """Wait for a group to take part in that is newer than what this worker has tried."""
        while True:
            view = await self._link.wait(lambda view: view.epoch > self._epoch and self._concerns(view))
            seat = seat_in(view, self._link)
            if seat is None:
                await self._load_outside(view)
                continue
            self._link.loaded(False)
            self._outside, self._epoch = None, seat.epoch
            if seat.active is None:
                self._close_comm()
            return seat

    def _concerns(self, view: View) -> bool:
        if seat_in(view, self._link) is not None:
            return True
        me = self._link.me(view)
        return me is not None and is_outside(view, self._link) and self._outside != me.rank

    async def _load_outside(self, view: View) -> None:
        """A group goes on without this worker: load the experts of its rank, and say that it can be taken in."""
        me = self._link.me(view)
        assert me is not None
        self._link.loaded(False)
        self._close_comm()
        self._status.joining("loading beside a group that serves")
        try:
            placement = await self._mover.fetch(Seat(view.epoch, me.rank, view.world_size))
        except (rpc.CallError, PlacementError) as error:
            _log.info("no placement", error=error, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)
            return
        experts = await in_thread("load", self._model.load, placement, me.rank, self._loading)
        self._telemetry.holds(experts.ids if experts else {}, self._model.num_bytes)
        now = self._link.me(self._link.view)
        if now is None or now.rank != me.rank or not is_outside(self._link.view, self._link):
            return  # while it loaded it was taken in, or lost its rank
        self._status.joining("waiting to be taken in by a group that serves")
        self._outside = me.rank
        self._link.loaded(True)

    async def _placement(self, seat: Seat) -> Placement | None:
        """Where the experts of this epoch lie; None if it came to nothing."""
        try:
            return await self._mover.fetch(seat)
        except (rpc.CallError, PlacementError) as error:
            self._report(seat.epoch, Fault(f"placement: {error}"))
        return None

    async def _connect(self, seat: Seat, placement: Placement) -> MoECommunicator | None:
        """The communicator of this epoch, after the first barrier; None if the epoch came to nothing."""
        group = ControlGroup(seat, self._link, asyncio.get_running_loop())
        try:
            if seat.active is None:
                self._comm = await in_thread("connect", self._model.connect, group, placement.num_slots)
                self._aborted = False
            else:
                await self._go_on(seat)
            return self._comm
        except PeerTimeout as error:
            self._report(seat.epoch, Fault(str(error), (error.peer,)))
        except EpError as error:
            self._report(seat.epoch, Fault(str(error)))
        except DeviceLost:
            raise
        except Exception as error:  # out of memory, out of file descriptors, ...: this epoch cannot be, the next may
            _log.exception("cannot connect")
            self._report(seat.epoch, Fault(f"{type(error).__name__}: {error}"))
        return None

    async def _go_on(self, seat: Seat) -> None:
        """Tell the communicator who is left; a collective of these, which ends when one of them is lost, too."""
        comm = self._comm
        if comm is None or self._aborted:
            raise TransportError("no communicator to go on with")

        def agree() -> None:
            devices.enter(self._model.device)
            comm.set_active(seat.mask, seat.epoch)

        agreeing = in_thread("go on", agree)
        newer = asyncio.ensure_future(self._link.wait(lambda view: view.epoch > seat.epoch))
        try:
            either: set[asyncio.Future[Any]] = {agreeing, newer}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not agreeing.done():
                self._interrupt(newer, comm, seat, _failure_in(newer))
            await agreeing
        finally:
            newer.cancel()
            del agreeing, either  # an exception of theirs holds this frame, and so the communicator

    async def _say_ready(self, seat: Seat, placement: Placement) -> bool:
        try:
            await self._link.ready(seat.epoch, placement.version)
        except rpc.CallError as error:
            self._report(seat.epoch, Fault(f"ready: {error}"))
            return False
        return True

    async def _is_serving(self, seat: Seat) -> bool:
        """Wait until all ranks are ready. False if the epoch ended instead."""

        def decided(view: View) -> bool:
            return view.epoch > seat.epoch or (view.epoch == seat.epoch and view.state == control_pb2.SERVING)

        return (await self._link.wait(decided)).epoch == seat.epoch

    async def _serve(self, membership: Membership) -> None:
        """Take steps until the epoch ends, for whatever reason."""
        seat, comm, holdings = membership.seat, membership.comm, membership.holdings
        self._status.serving(seat)
        steps = in_thread("engine", self._engine.run, comm, membership.experts, seat.epoch, holdings)
        moving = beside(self._mover.run(seat, holdings), "the mover of experts", JoinRefused)
        newer = asyncio.ensure_future(self._link.wait(lambda view: view.epoch > seat.epoch))
        try:
            either: set[asyncio.Future[Any]] = {steps, newer}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            witness = steps.done()
            if not witness:  # what waits for a peer from here on ends because it is told to
                self._end_epoch(newer, comm, seat)
            ended = await steps
            self._status.joining("re-forming: " + (ended.reason if isinstance(ended, Fault) else "ranks left"))
            await self._follow_up(ended, seat, newer, witness=witness)
        finally:
            newer.cancel()
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    def _end_epoch(self, newer: asyncio.Future[View], comm: MoECommunicator, seat: Seat) -> None:
        """The control plane says that the epoch is over: tell the clients, free the engine. Where this rank goes on
        with its communicator, the engine stops between two steps, or where it waits for a rank that is lost."""
        failure = _failure_in(newer)
        self._engine.close(failure)
        self._interrupt(newer, comm, seat, failure)

    def _interrupt(self, newer: asyncio.Future[View], comm: MoECommunicator, seat: Seat, failure: Failure) -> None:
        """End what waits for ranks that were with `seat` and are lost; where all begin anew, whatever waits."""
        if newer.exception() is None and seat.rank in newer.result().active_ranks:
            left = newer.result().active_ranks
            self._engine.pause()
            comm.give_up([rank for rank, takes_part in enumerate(seat.mask) if takes_part and rank not in left])
            return
        self._aborted = True
        comm.abort(failure.message)

    async def _follow_up(self, ended: Fault | Left, seat: Seat, newer: asyncio.Future[View], *, witness: bool) -> None:
        """After the engine has stopped: leave, or see to it that there will be a newer epoch, and wait for that."""
        if self._left.is_set() or (isinstance(ended, Left) and seat.rank in ended.ranks):
            self._left.set()
            return
        _log.warning("epoch ended", why=ended)
        if isinstance(ended, Fault) and (witness or not newer.done()):
            self._report(seat.epoch, ended, witness=witness)
        self._engine.close(failure_of(await newer))

    def _report(self, epoch: int, fault: Fault, *, witness: bool = False) -> None:
        """`witness`: found by this rank itself, so who is silent is news in the next epoch, too."""
        if self._link.view.epoch > epoch and not (witness and fault.silent_ranks):
            return
        _log.warning("reporting a fault", reason=fault.reason, silent_ranks=list(fault.silent_ranks))
        self._status.faulty(fault)
        self._link.report(epoch, fault)

    def _close_comm(self) -> None:
        """Only when the group is through with it: peers that still wait for this rank shall not take it for dead."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None

    async def wait_left(self) -> None:
        """Wait until this rank has left."""
        await self._left.wait()

    async def drain(self, timeout_s: float) -> None:
        """Serve what is queued, refuse what comes, leave between two steps. `run` ends; returns after that, or when
        `timeout_s` is over and the rest was answered UNAVAILABLE."""
        self._status.draining()
        self._engine.drain()
        emptied, _ = await asyncio.gather(
            in_thread("drain", self._engine.wait_empty, timeout_s), asyncio.sleep(_LEAVE_GRACE_S)
        )
        if not emptied:
            _log.warning("drain timed out", timeout_s=timeout_s, queued=self._engine.num_queued())
        if emptied and self._comm is not None and self._status.is_serving:
            self._engine.leave()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), _FAREWELL_S)
        self._engine.close(Failure(grpc.StatusCode.UNAVAILABLE, "draining: this worker is going away"))
        if self._comm is not None and not self._left.is_set():
            self._comm.abort("leaving")
        self._left.set()


def failure_of(view: View) -> Failure:
    """What requests are told while the group of `view` does not serve."""
    lost = tuple(sorted({*view.lost_ranks, *view.broken_ranks}))
    named = f"lost rank {', '.join(map(str, lost))}; " if lost else ""
    message = f"re-forming at epoch {view.epoch}: {named}{view.reason}"
    return Failure(grpc.StatusCode.UNAVAILABLE, message, lost, view.epoch)


def _failure_in(newer: asyncio.Future[View]) -> Failure:
    return failure_of(newer.result()) if newer.exception() is None else _replaced(newer.exception())


def _replaced(error: BaseException | None) -> Failure:
    return Failure(grpc.StatusCode.UNAVAILABLE, f"this worker is out of the group: {error}")
