"""A worker's membership in the group: join, serve, re-form, leave. `Session.join` is the start-up sequence.

    join: registered ─▶ a complete group is forming ─▶ rank ─▶ load that rank's experts ─▶ publish the region, map the
          peers' regions, first barrier ─▶ Ready ─▶ SERVING
    serve: the engine takes steps until the epoch ends, experts move meanwhile (expert_mover.py) ─▶ join the next
          epoch, in the same process, experts kept

An elastic group continues without a lost rank: the remaining ranks keep communicator and experts, pass the remaining
ranks to the communicator (`set_active`), and serve. A standby loads its experts and waits to be admitted, to the slot
of a lost rank or as one more rank. Before the group is scaled, ranks that serve load what they lack afterwards
(`_prepare`).

An epoch ends for one of three reasons: the control plane has a newer one (a rank was lost, left or was replaced); the
engine found a peer silent and reported it, so that a newer one begins; or ranks left between two steps. In each case
requests here fail fast with UNAVAILABLE, with ranks and epoch. The loss or restart of the control plane ends no epoch:
see control_client.py. process.py has the process around a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from crossdock.common import log
from crossdock.common.call_errors import CallError
from crossdock.common.tasks import background, end_tasks
from crossdock.protocol.v1 import control_pb2
from crossdock.worker.checkpoints.checkpoint import CheckpointError
from crossdock.worker.experts import device as devices
from crossdock.worker.experts.device import DeviceLost
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.experts.expert_tables import ExpertTables, MoveCancelled
from crossdock.worker.experts.placement import Placement, PlacementError
from crossdock.worker.group.control_client import ControlPlaneClient, JoinRefused, View
from crossdock.worker.group.expert_mover import ExpertMover
from crossdock.worker.group.model import Model
from crossdock.worker.group.same_weights import Parcel, differences
from crossdock.worker.group.seat import ControlGroup, Seat, is_standby, seat_in
from crossdock.worker.group.threads import in_thread
from crossdock.worker.group.worker_status import WorkerStatus
from crossdock.worker.steps.engine import Engine
from crossdock.worker.steps.work import Failure, Fault, Left
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from ep_kernels import EpError, MoECommunicator, PeerTimeout, TransportError

_log = log.get(__name__)


class WeightsComparison:
    """Of one worker, over all its epochs. Make and use it on the event loop.

    Args:
        model: gives the sums.
        report: called with an epoch and why it must end.
    """

    def __init__(self, model: Model, report: Callable[[int, Fault], None]) -> None:
        self._model, self._report = model, report
        self._gathered: tuple[Placement, list[Parcel]] | None = None
        self._reading: asyncio.Future[tuple[list[int], int]] | None = None
        self._weights = ""

    def weights(self, version: int | None) -> str:
        """Of rank 0: digest of every byte of the group's experts, once all ranks were compared with its files. Empty if
        the placement that they follow has another version: then not all that they hold was compared."""
        compared = self._gathered is not None and self._gathered[0].version == version
        return self._weights if compared else ""

    def packing(self, placement: Placement, rank: int) -> Callable[[bytes], Parcel]:
        """What makes a parcel of this rank's region. Blocks: not on the event loop."""
        expected = self._model.read_all(placement)[0] if rank == 0 and self._model.is_read(placement) else []
        return functools.partial(Parcel, sum=self._model.sum(placement, rank), expected=expected)

    def take(self, seat: Seat, placement: Placement, parcels: list[Parcel]) -> None:
        """Compare what all ranks have published. Raises JoinRefused: this rank's weights are not those of rank 0;
        TransportError: another rank's are not."""
        self._gathered, self._weights = (placement, parcels), ""
        wrong = differences(parcels[0].expected, parcels)
        if seat.rank in wrong:
            raise JoinRefused(wrong[seat.rank])
        if wrong:
            raise TransportError(next(iter(wrong.values())))

    async def run(self, seat: Seat) -> None:
        """Of rank 0, while it serves: read all of the checkpoint, and report a rank that has other weights. A read that
        outlasts the epoch goes on; there is one at a time."""
        if seat.rank or self._gathered is None:
            return
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])
        placement, parcels = self._gathered
        self._reading = in_thread("whole checkpoint", self._model.read_all, placement)
        await asyncio.wait([self._reading])
        try:
            expected, whole = self._reading.result()
        except CheckpointError as error:
            _log.warning("cannot compare the weights of all ranks", error=error)
            return
        there = [words for rank, words in differences(expected, parcels).items() if seat.mask[rank]]
        if there:
            self._report(seat.epoch, Fault(there[0]))
            return
        self._weights = f"{whole:016x}"
        _log.info("all ranks have the weights of this checkpoint", weights=self._weights)


_LEAVE_GRACE_S = 0.25
"""Delay before leaving, so that ranks that are stopped together leave in one step."""
_LEAVE_AGREEMENT_S = 2.0
"""Longest wait for the peers to agree to the departure of this rank."""
_RETRY_S = 0.5
_PREPARE_AGAIN_S = 10.0
"""Pause after experts of a planned epoch could not be loaded."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Result of `join`: the seat in a serving group, its communicator, this rank's experts (None: it has no slots), and
    the expert tables of all ranks."""

    seat: Seat
    comm: MoECommunicator
    experts: ExpertMLPs | None
    tables: ExpertTables


class Session:
    """Membership of one worker over all its epochs. Make and use it on the event loop.

    Args:
        control: client of the control plane; started.
        model: the served model; makes communicators for it.
        status: readiness of the process.
        telemetry: counts by expert.
        mover: fetches placements and moves experts.
    """

    def __init__(
        self,
        control: ControlPlaneClient,
        model: Model,
        engine: Engine,
        status: WorkerStatus,
        telemetry: WorkerTelemetry,
        mover: ExpertMover,
    ) -> None:
        self._mover = mover
        self._control, self._model, self._engine, self._status = control, model, engine, status
        self._telemetry = telemetry
        self._epoch = 0
        self._comm: MoECommunicator | None = None
        self._aborted = False
        self._left = asyncio.Event()
        self._leaves = False
        self.comparison = WeightsComparison(model, self._report)

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
            # A seat, and the placement for it.
            await self._control.wait(lambda view: view.version > 0)
            self._status.waiting()
            if self._leaves and self._control.own_member(self._control.view) is None:
                _log.warning("left the group", why=self._control.view.reason)
                self._model.release()
            self._leaves = False
            seat = await self._next_seat()
            self._status.seated(seat)
            placement = await self._placement(seat)
            if placement is None:
                continue
            # The experts of that rank.
            experts = await in_thread("load", self._model.load, placement, seat.rank, self._loading)
            if seat.active is None:
                await in_thread("sum", self._model.sum, placement, seat.rank)
            self._telemetry.holds(experts.ids if experts else {}, self._model.num_bytes)
            # Regions of all ranks, first barrier.
            self._status.joining("exchanging regions")
            comm = await self._connect(seat, placement)
            if comm is None:
                continue
            # Ready; then SERVING, or again with the next view.
            self._engine.open()  # before Ready: a client may see SERVING before this rank does
            if await self._report_ready(seat, placement) and await self._is_serving(seat):
                self._control.serving(seat.epoch)
                num_experts, switched = self._model.spec.num_experts, self._telemetry.switched
                tables = ExpertTables(
                    placement, num_experts, seat.rank, experts, switched, seat.mask, self._model.spec.fingerprint
                )
                return Membership(seat, comm, experts, tables)
            self._engine.close(failure_of(self._control.view))

    def _loading(self, done_bytes: int, total_bytes: int) -> None:
        self._status.loading(done_bytes, total_bytes)
        self._telemetry.loaded(done_bytes)

    async def _next_seat(self) -> Seat:
        """Wait for a seat in an epoch newer than the last one tried."""
        while True:
            view = await self._control.wait(lambda view: view.epoch > self._epoch and self._concerns(view))
            seat = seat_in(view, self._control)
            if seat is None:
                await self._load_as_standby(view)
                continue
            self._control.prepared(None)
            self._epoch = seat.epoch
            if seat.active is None:
                self._close_comm()
            return seat

    def _concerns(self, view: View) -> bool:
        if seat_in(view, self._control) is not None:
            return True
        return is_standby(view, self._control) and bool(view.next_placement) and not self._control.is_prepared

    async def _load_as_standby(self, view: View) -> None:
        """The group serves without this worker: load the experts that it is to have, and say so."""
        self._control.prepared(None)
        self._close_comm()
        self._status.joining("loading as a standby of a serving group")
        try:
            planned = await self._mover.fetch_next(view)
        except (CallError, PlacementError) as error:
            _log.info("no placement", error=error, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)
            return
        if planned is None:  # it has no seat there, so nothing is missing
            self._control.prepared(view.next_placement)
        else:
            placement, rank = planned
            experts = await in_thread("load", self._model.load, placement, rank, self._loading)
            await in_thread("sum", self._model.sum, placement, rank)
            self._telemetry.holds(experts.ids if experts else {}, self._model.num_bytes)
            self._status.joining("waiting to be admitted by a serving group")
            self._control.prepared(placement.version)

    async def _prepare(self, seat: Seat) -> None:
        """While the group serves `seat`'s epoch: load what this rank lacks in the epoch that is planned next."""
        tried = 0

        def another(view: View) -> bool:
            return view.epoch == seat.epoch and view.next_placement != tried

        def check(done_bytes: int, total_bytes: int) -> None:
            if self._control.view.next_placement != tried:
                raise MoveCancelled

        while True:
            view = await self._control.wait(another)
            tried = view.next_placement
            self._control.prepared(None)
            self._model.forget_prepared()
            try:
                planned = await self._mover.fetch_next(view) if tried else None
                self._leaves = bool(tried) and planned is None
                if self._leaves:
                    _log.warning("this worker will leave the group", why=view.scaling)
                elif planned is not None:
                    await in_thread("prepare", self._model.prepare, *planned, check)
                    await in_thread("sum", self._model.sum, *planned)  # which the switch needs
                    self._control.prepared(planned[0].version)
            except MoveCancelled:
                _log.info("another epoch is planned", was=tried, now=self._control.view.next_placement)
            except (CallError, PlacementError) as error:
                _log.info("no placement", error=error, retry_s=_RETRY_S)
                await asyncio.sleep(_RETRY_S)
                tried = 0
            except JoinRefused:
                raise
            except Exception as error:  # must be reported: the group waits for this rank, and it may pass
                _log.exception("cannot load the experts of the planned epoch", retry_s=_PREPARE_AGAIN_S)
                self._control.prepared(None, f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PREPARE_AGAIN_S)
                tried = 0

    async def _placement(self, seat: Seat) -> Placement | None:
        """Fetch the placement of this epoch; None on failure, which is reported."""
        try:
            return await self._mover.fetch(seat)
        except (CallError, PlacementError) as error:
            self._report(seat.epoch, Fault(f"placement: {error}"))
        return None

    async def _connect(self, seat: Seat, placement: Placement) -> MoECommunicator | None:
        """The communicator of this epoch, after the first barrier; None on failure, which is reported."""
        try:
            if seat.active is None:
                pack = await in_thread("sum", self.comparison.packing, placement, seat.rank)
                group = ControlGroup(seat, self._control, asyncio.get_running_loop(), pack)
                self._comm = await in_thread("connect", self._model.connect, group, placement.num_slots)
                self._aborted = False
                self.comparison.take(seat, placement, group.parcels)
            else:
                await self._continue_without_lost(seat)
            return self._comm
        except PeerTimeout as error:
            self._report(seat.epoch, Fault(str(error), (error.peer,)))
        except EpError as error:
            self._report(seat.epoch, Fault(str(error)))
        except (DeviceLost, JoinRefused):
            raise
        except Exception as error:  # out of memory, of file descriptors, ...: the next epoch may work
            _log.exception("cannot connect")
            self._report(seat.epoch, Fault(f"{type(error).__name__}: {error}"))
        return None

    async def _continue_without_lost(self, seat: Seat) -> None:
        """Pass the remaining ranks to the communicator: a collective of these, interrupted if one of them is lost."""
        comm = self._comm
        if comm is None or self._aborted:
            raise TransportError("no communicator to continue with")

        def agree() -> None:
            devices.enter(self._model.device)
            comm.set_active(seat.mask, seat.epoch)

        agreeing = in_thread("set active", agree)
        newer = asyncio.ensure_future(self._control.wait(lambda view: view.epoch > seat.epoch))
        try:
            either: set[asyncio.Future[Any]] = {agreeing, newer}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not agreeing.done():
                self._interrupt(newer, comm, seat, _failure_in(newer))
            await agreeing
        finally:
            newer.cancel()
            del agreeing, either  # their exception would keep this frame, and so the communicator, alive

    async def _report_ready(self, seat: Seat, placement: Placement) -> bool:
        try:
            await self._control.ready(seat.epoch, placement.version)
        except CallError as error:
            self._report(seat.epoch, Fault(f"ready: {error}"))
            return False
        return True

    async def _is_serving(self, seat: Seat) -> bool:
        """Wait until all ranks are ready. False if the epoch ended instead."""

        def decided(view: View) -> bool:
            return view.epoch > seat.epoch or (view.epoch == seat.epoch and view.state == control_pb2.SERVING)

        return (await self._control.wait(decided)).epoch == seat.epoch

    async def _serve(self, membership: Membership) -> None:
        """Take steps until the epoch ends."""
        seat, comm, tables = membership.seat, membership.comm, membership.tables
        self._status.serving(seat)
        steps = in_thread("engine", self._engine.run, comm, membership.experts, seat.epoch, tables)
        moving = background(self._mover.run(seat, tables), "the expert mover", JoinRefused)
        comparing = background(self.comparison.run(seat), "the comparison of weights")
        preparing = background(self._prepare(seat), "preparing for another epoch", JoinRefused)
        newer = asyncio.ensure_future(self._control.wait(lambda view: view.epoch > seat.epoch))
        try:
            either: set[asyncio.Future[Any]] = {steps, newer}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            witness = steps.done()
            if not witness:  # a wait for a peer that ends from here on was interrupted
                self._end_epoch(newer, comm, seat)
            ended = await steps
            self._status.joining("re-forming: " + (ended.reason if isinstance(ended, Fault) else "ranks left"))
            await self._follow_up(ended, seat, newer, witness=witness)
        finally:
            newer.cancel()
            await end_tasks(moving, comparing, preparing)

    def _end_epoch(self, newer: asyncio.Future[View], comm: MoECommunicator, seat: Seat) -> None:
        """The control plane has ended the epoch: fail the requests and stop the engine. If this rank keeps its
        communicator, the engine stops between two steps, or where it waits for a lost rank."""
        failure = _failure_in(newer)
        self._engine.close(failure)
        self._interrupt(newer, comm, seat, failure)

    def _interrupt(self, newer: asyncio.Future[View], comm: MoECommunicator, seat: Seat, failure: Failure) -> None:
        """Interrupt waits for ranks of `seat` that are lost; if all ranks re-form, interrupt every wait."""
        if newer.exception() is None and seat.rank in newer.result().active_ranks:
            left = newer.result().active_ranks
            self._engine.pause()
            comm.give_up([rank for rank, takes_part in enumerate(seat.mask) if takes_part and rank not in left])
            return
        self._aborted = True
        comm.abort(failure.message)

    async def _follow_up(self, ended: Fault | Left, seat: Seat, newer: asyncio.Future[View], *, witness: bool) -> None:
        """After the engine has stopped: leave, or report the fault and wait for a newer epoch."""
        if self._left.is_set() or (isinstance(ended, Left) and seat.rank in ended.ranks):
            self._left.set()
            return
        _log.warning("epoch ended", why=ended)
        if isinstance(ended, Fault) and (witness or not newer.done()):
            self._report(seat.epoch, ended, witness=witness)
        self._engine.close(failure_of(await newer))

    def _report(self, epoch: int, fault: Fault, *, witness: bool = False) -> None:
        """`witness`: this rank itself found the silent peers, so the report counts in the next epoch, too."""
        if self._control.view.epoch > epoch and not (witness and fault.silent_ranks):
            return
        _log.warning("reporting a fault", reason=fault.reason, silent_ranks=list(fault.silent_ranks))
        self._status.faulty(fault)
        self._control.report(epoch, fault)

    def _close_comm(self) -> None:
        """Close the communicator, only after the group has ended its epoch: peers that wait would take this rank for
        dead."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None

    async def wait_left(self) -> None:
        await self._left.wait()

    async def drain(self, timeout_s: float) -> None:
        """Serve queued requests, refuse new ones, then leave between two steps, which ends `run`. After `timeout_s` the
        remaining requests are answered UNAVAILABLE. A group that follows its workers gets smaller first."""
        self._status.draining()
        self._engine.drain()
        began = time.monotonic()
        if await self._control.wait_replaced(timeout_s):
            self._left.set()
        timeout_s = max(0.0, timeout_s - (time.monotonic() - began))
        emptied, _ = await asyncio.gather(
            in_thread("drain", self._engine.wait_empty, timeout_s), asyncio.sleep(_LEAVE_GRACE_S)
        )
        if not emptied:
            _log.warning("drain timed out", timeout_s=timeout_s, queued=self._engine.num_queued())
        if emptied and self._comm is not None and self._status.is_serving:
            self._engine.leave()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), _LEAVE_AGREEMENT_S)
        self._engine.close(Failure(grpc.StatusCode.UNAVAILABLE, "draining: this worker is leaving"))
        if self._comm is not None and not self._left.is_set():
            self._comm.abort("leaving")
        self._left.set()


def failure_of(view: View) -> Failure:
    """The answer to requests while the group of `view` does not serve."""
    lost = tuple(sorted({*view.lost_ranks, *view.broken_ranks}))
    named = f"lost rank {', '.join(map(str, lost))}; " if lost else ""
    message = f"re-forming at epoch {view.epoch}: {named}{view.reason}"
    return Failure(grpc.StatusCode.UNAVAILABLE, message, lost, view.epoch)


def _failure_in(newer: asyncio.Future[View]) -> Failure:
    return failure_of(newer.result()) if newer.exception() is None else _replaced(newer.exception())


def _replaced(error: BaseException | None) -> Failure:
    return Failure(grpc.StatusCode.UNAVAILABLE, f"this worker has left the group: {error}")
