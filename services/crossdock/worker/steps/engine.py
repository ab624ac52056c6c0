"""The engine of one rank: requests of many clients become steps that all ranks take together.

    any thread                      the engine's thread, for one epoch: `run(comm, experts)`
    submit(work) ──┐                ┌─> sleep until there is a request, or a peer's exchange
    withdraw(work) ├─> batcher ─────┤   exchange: proposal, outcome of an unconfirmed step   (8 int64, all ranks)
    close(failure) ┘   (one lock)   │   choose_step: the same decision on every rank
                                    └── dispatch -> experts -> combine; answer, unless the step is unconfirmed

Failures:
* Invalid request: refused before it gets here (`admission.py`).
* The experts of a rank raise: it sends NaN so that no peer waits, and reports `failed` in the next exchange. A rank
  that got no NaN has answered by then, rightly. The step of one that did is unconfirmed: it answers after that
  exchange, INTERNAL, or with its rows if nobody failed (NaN may be what an expert computed). The group continues.
* A request expects a checkpoint that its layer does not have when a step takes it: FAILED_PRECONDITION.
* A peer is silent or gone, the epoch ended, or the communicator fails otherwise: all requests here are answered
  UNAVAILABLE (or with the failure of `close`), `run` returns the fault, and the session forms the next epoch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import replace

import grpc
import torch

from crossdock.common import log
from crossdock.common.postmortem_record import POSTMORTEM
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.experts.expert_tables import ExpertTables
from crossdock.worker.experts.placement import SlotMap
from crossdock.worker.steps import request_trace
from crossdock.worker.steps.batcher import Batcher
from crossdock.worker.steps.device_stream import stream_of
from crossdock.worker.steps.request_sockets import RequestSockets
from crossdock.worker.steps.stepper import Batch, Stepper
from crossdock.worker.steps.steps import NOTHING, Departure, DesyncError, Proposal, Step, choose_step
from crossdock.worker.steps.work import Done, Failure, Fault, Left, Refused, Timing, Work
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from ep_kernels import AbortedError, EpError, MoECommunicator, PeerTimeout
from ep_kernels.postmortem import record_of

_log = log.get(__name__)

_CPU = torch.device("cpu")
_IDLE_S = 1.0
"""Longest sleep of an idle rank; requests and peers wake it at once."""
_POLL_S, _NO_POLL_S = 1e-3, 0.02
"""An idle rank looks for requests and peers for so long before it sleeps: to be woken takes longer than a small step.
After a look in vain, it sleeps at once for the next while, so that looking takes a twentieth of a processor at most."""
_LONG_NS = 1_000_000
"""In steps that take so long, another thread reads requests; in those of a GPU, once all is queued there: what it does
before delays the launches."""


class Engine:
    """Queue and steps of one rank, over all epochs. Requests are refused until `open` (then they wait for `run`), and
    again after `close`.

    Args:
        max_tokens_per_step: M.
        telemetry: counts steps and samples.

    Raises:
        DeviceLost: the device does not work.
    """

    def __init__(self, max_tokens_per_step: int, telemetry: WorkerTelemetry, device: torch.device = _CPU) -> None:
        self._max_tokens, self._telemetry, self._stream = max_tokens_per_step, telemetry, stream_of(device)
        self._lock = threading.RLock()
        self._emptied = threading.Condition(self._lock)
        self._batcher = Batcher()
        self._running: list[Work] = []
        self._refusal: Failure | None = Failure(grpc.StatusCode.UNAVAILABLE, "joining: the group has not formed yet")
        self._draining = self._leaving = self._sleeping = self._paused = False
        self._epoch = 0
        self._comm: MoECommunicator | None = None
        self._tables: ExpertTables | None = None
        self._num_steps = 0
        self._steps_are_long, self._idle, self._look_from_s = True, False, 0.0
        self._request_sockets = RequestSockets()

    def read_from(self, request_sockets: RequestSockets) -> None:
        """Read these between two steps. Before the first `run`."""
        self._request_sockets = request_sockets

    # Any thread.

    def submit(self, work: Work) -> None:
        """Queue a request; `work.reply` is called once. Raises Refused while closed or draining."""
        with self._lock:
            if self._refusal is not None:
                raise Refused(self._refusal)
            if self._draining:
                raise Refused(Failure(grpc.StatusCode.UNAVAILABLE, "draining: this worker is leaving"))
            if work.num_tokens:
                self._batcher.add(work)
                self._wake()
        if not work.num_tokens:
            self._answer([work], Done(torch.empty_like(work.x), work.timing))

    def expect(self) -> None:
        """A request is being read: the other ranks may wake up meanwhile."""
        comm = self._comm
        if self._idle and comm is not None:
            comm.call_exchange()

    def withdraw(self, work: Work, failure: Failure) -> None:
        """Answer a request with `failure` now; a running step drops its rows."""
        with self._lock:
            self._batcher.remove(work)
            self._emptied.notify_all()
        self._answer([work], failure)

    def open(self) -> None:
        with self._lock:
            self._refusal, self._paused = None, False

    def close(self, failure: Failure) -> None:
        """Answer all current and later requests with `failure`."""
        with self._lock:
            self._refusal = failure
            works = self._batcher.clear() + self._running
            self._emptied.notify_all()
        self._answer(works, failure)

    def drain(self) -> None:
        with self._lock:
            self._draining = True
            self._wake()

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running. False on timeout."""
        with self._emptied:
            return self._emptied.wait_for(lambda: not self._batcher and not self._running, timeout_s)

    def leave(self) -> None:
        """End `run` on all ranks between two steps, as soon as no draining rank has work."""
        with self._lock:
            self._leaving = True
            self._wake()

    def pause(self) -> None:
        """End `run` between two steps, on this rank only, before `set_active` on its communicator."""
        with self._lock:
            self._paused = True
            self._wake()

    def wake(self) -> None:
        """Run one exchange although the queue is empty, so that a pending placement change can be agreed."""
        with self._lock:
            self._wake()

    def running_of(self, stream: Hashable) -> list[Work]:
        """The requests of that stream in a running step, which may be answered already."""
        with self._lock:
            return [work for work in self._running if work.stream is stream]

    def num_queued(self) -> int:
        with self._lock:
            return len(self._batcher)

    def _wake(self) -> None:
        if self._sleeping and self._comm is not None:
            self._comm.wake()

    def _answer(self, works: Iterable[Work], answer: Done | Failure) -> None:
        for work in works:
            with self._lock:
                first, work.answered = not work.answered, True
            if first:
                work.reply(answer)

    # The engine's thread.

    def run(
        self, comm: MoECommunicator, experts: ExpertMLPs | None, epoch: int, tables: ExpertTables | None = None
    ) -> Fault | Left:
        """Take steps until the epoch ends. All requests are answered before this returns.

        Args:
            comm: GROUPED, of this epoch; other threads may call only `wake` and `abort`.
            experts: of this rank, in slot order; None if it has no slots.
            epoch: for error messages.
            tables: expert of each slot; None: slot and expert numbers are equal.
        """
        # From here on other threads see this epoch.
        with self._lock:
            self._comm, self._num_steps, self._tables, self._epoch = comm, 0, tables, epoch
        ended: Fault | Left
        why: Exception | None = None
        # Steps until the epoch ends; why it did.
        try:
            self._stream.enter()
            with torch.no_grad():  # which saves time in each of torch's functions
                ended = self._loop(comm, Stepper(comm, experts, self._stream, tables, self._request_sockets.arm))
        except PeerTimeout as error:
            ended, why = Fault(str(error), (error.peer,)), error
        except (EpError, DesyncError) as error:
            ended, why = Fault(str(error)), error
        except Exception as error:  # a bug must end this epoch, not the process
            _log.exception("engine failed", epoch=epoch)
            ended, why = Fault(f"engine: {type(error).__name__}: {error}"), error
        # The record of a failed wait, with the last samples.
        self._request_sockets.arm()
        samples = self._telemetry.epoch_ended(comm)
        if isinstance(ended, Fault) and why is not None and not isinstance(why, AbortedError):
            record = record_of(why, samples, time.monotonic_ns())
            ended = replace(ended, postmortem=_postmortem(record, comm.rank, epoch, self._num_steps))
        why = None  # it holds this frame, and so the communicator, whose regions a collection would free late
        # Requests that wait or run are answered with the reason.
        with self._lock:
            self._comm = None
            failure = self._refusal or _failure_of(ended, epoch)
        self.close(failure)
        self._clear_running()
        return ended

    def _loop(self, comm: MoECommunicator, stepper: Stepper) -> Left | Fault:
        unconfirmed: Batch | None = None
        rank = comm.rank
        while True:
            # Idle: sleep until there is a request or a peer's exchange.
            if unconfirmed is None:
                self._sleep(comm)
            if self._paused:
                return Fault("the group continues without a lost rank")
            # Exchange: what each rank proposes, and how its last step went.
            words = comm.exchange(self._propose(unconfirmed).words())
            proposals, placements, loaded = dict[int, Proposal](), list[int](), list[bool]()
            for sender, each in enumerate(words):
                if each is not None:
                    proposals[sender] = proposal = Proposal.parse(each)
                    placements.append(proposal.placement)
                    loaded.append(proposal.loaded)
            # Now it is known whether another rank failed in the step before.
            if unconfirmed is not None:
                self._finish(unconfirmed, [sender for sender, proposal in proposals.items() if proposal.failed])
                unconfirmed = None
            # All ranks have the same words, so they switch placements at the same step.
            if self._tables is not None:
                self._tables.apply_agreed(placements, loaded)
            # The same decision on all ranks: leave, step, or nothing.
            decision = choose_step(proposals, self._max_tokens)
            if isinstance(decision, Departure):
                return Left(decision.ranks)
            # The step: answered at once, unless another rank may have failed in it.
            if isinstance(decision, Step):
                batch = self._step(stepper, decision)
                ended_ns = time.monotonic_ns()
                self._steps_are_long = ended_ns - batch.start_ns > _LONG_NS
                request_trace.stepped(batch, rank, self._epoch, self._num_steps, ended_ns)
                if batch.unconfirmed:
                    unconfirmed = batch
                else:
                    self._finish(batch, [])
                self._telemetry.step(stepper.record_of(batch))
            self._telemetry.collect(comm)

    def _sleep(self, comm: MoECommunicator) -> None:
        """Wait until a request waits, this rank leaves, a placement change is pending, or a peer starts an exchange."""
        # First poll for a while, if that has paid lately.
        self._request_sockets.disarm()
        self._idle, began_s = True, time.monotonic()
        until_s = began_s + _POLL_S if began_s >= self._look_from_s else began_s
        while True:
            self._request_sockets.poll()
            # A request, or an order, that is here already?
            with self._lock:
                due = self._batcher or self._leaving or self._paused
                self._sleeping = not (due or (self._tables is not None and self._tables.has_pending_change()))
                if not self._sleeping:
                    break
            # Wait for a peer; asleep, the thread of the sockets reads them.
            left_s = until_s - time.monotonic()
            if left_s > 0:
                woken = comm.look_for_peer(left_s, self._request_sockets.sockets_fileno())
            else:
                self._request_sockets.arm()
                woken = comm.wait_for_peer(_IDLE_S)
            with self._lock:
                self._sleeping = False
            if woken:  # maybe by a peer for a client whose other requests came here: they join the same step
                self._request_sockets.poll(wait=True)
                break
            if left_s <= 0:
                self._telemetry.collect(comm)
        # Polled in vain: not again for some time.
        self._idle, now_s = False, time.monotonic()
        if until_s > began_s and now_s - began_s > _POLL_S:  # in vain, or others wanted the processor
            self._look_from_s = now_s + _NO_POLL_S
        if self._steps_are_long and self._stream.device.type == "cpu":
            self._request_sockets.arm()

    def _propose(self, batch: Batch | None) -> Proposal:
        """The proposal for the next exchange. Expired requests are dropped here."""
        now_ns = time.monotonic_ns()
        with self._lock:
            expired = self._batcher.expire(now_ns)
            progress = self._tables.progress(self._batcher.has_cut) if self._tables is not None else (0, False)
            head, failed = self._batcher.head(now_ns) or NOTHING, batch is not None and bool(batch.error)
            proposal = Proposal(self._num_steps, *head, self._draining, self._leaving, failed, *progress)
        if expired:
            self._answer(expired, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline passed in the queue"))
        return proposal

    def _step(self, stepper: Stepper, plan: Step) -> Batch:
        now_ns = time.monotonic_ns()
        with self._lock:
            whole = self._tables is not None and self._tables.closing == plan.layer
            slices = self._batcher.take(plan.layer, plan.max_tokens, now_ns, whole=whole)
            self._running = [piece.work for piece in slices]
            self._num_steps += 1
        for piece in slices:
            work = piece.work
            if piece.start == 0:
                work.timing = Timing(now_ns - work.arrived_ns)
                if work.trace is not None:
                    request_trace.taken(work, now_ns)
        if self._tables is None:
            return stepper.step(plan.layer, plan.max_tokens, slices)
        fingerprint, route = self._tables.fingerprint(plan.layer), self._tables.route(plan.layer)
        slices = [piece for piece in slices if self._is_of(piece.work, fingerprint)]
        if route is not None and route.lost:
            slices = [piece for piece in slices if not self._is_lost(piece.work, plan.layer, route)]
        return stepper.step(plan.layer, plan.max_tokens, slices)

    def _is_of(self, work: Work, fingerprint: str) -> bool:
        """Whether a request takes rows of that checkpoint; if not, it is answered."""
        if work.model not in ("", fingerprint):
            message = f"model: expected {fingerprint}, which layer {work.layer} has, got {work.model[:64]}"
            self.withdraw(work, Failure(grpc.StatusCode.FAILED_PRECONDITION, message))
            return False
        work.model = fingerprint
        return True

    def _is_lost(self, work: Work, layer: int, route: SlotMap) -> bool:
        """Whether a request needs an expert that only lost ranks held; if so, it is answered."""
        experts = route.lost_in(work.topk_ids)
        if not experts or self._comm is None:
            return bool(experts)
        lost = tuple(rank for rank, active in enumerate(self._comm.active) if not active)
        named = f"experts {_names(tuple(experts))} of layer {layer} are lost with rank {_names(lost)}"
        message = f"epoch {self._epoch}: {named}; no other rank has a copy"
        self.withdraw(work, Failure(grpc.StatusCode.UNAVAILABLE, message, lost, self._epoch))
        return True

    def _finish(self, batch: Batch, failed_ranks: list[int]) -> None:
        """Answer the requests of a finished step: with their rows, or with the failure of a rank."""
        if failed_ranks:
            why = batch.error or "see the log of that rank"
            failure = Failure(grpc.StatusCode.INTERNAL, f"rank {failed_ranks} failed in this step: {why}")
            for piece in batch.slices:
                self.withdraw(piece.work, failure)
        else:
            self._deliver(batch)
        self._clear_running()

    def _deliver(self, batch: Batch) -> None:
        row, alone = 0, len(batch.slices) == 1
        for piece in batch.slices:
            work, rows = piece.work, batch.z if alone else batch.z[row : row + piece.num_tokens]
            row += piece.num_tokens
            if work.answered:
                continue
            work.timing = work.timing.plus_step(*batch.phases_ns)
            if work.y is None and piece.is_whole:
                shared = not alone or self._stream.device.type == "cpu"  # with others, or the next step
                work.y = rows.to(work.x.dtype, copy=shared)
            else:
                work.y = torch.empty_like(work.x) if work.y is None else work.y
                if rows is not work.y:  # combine has not written them there
                    work.y[piece.start : piece.stop] = rows
            if piece.is_last:
                self._answer([work], Done(work.y, work.timing, work.model))

    def _clear_running(self) -> None:
        with self._lock:
            self._running = []
            self._emptied.notify_all()


def _postmortem(record: dict[str, object], rank: int, epoch: int, num_steps: int) -> str:
    """The record as one line of JSON, which is logged too."""
    where = {"unix_s": round(time.time(), 4), "rank": rank, "epoch": epoch, "steps": num_steps}
    line = json.dumps(where | record)
    _log.warning(f"{POSTMORTEM} {line}")
    return line


def _failure_of(ended: Fault | Left, epoch: int) -> Failure:
    """The answer to requests that this epoch did not serve."""
    if isinstance(ended, Left):
        ranks, why = ended.ranks, f"rank {_names(ended.ranks)} left"
    elif ended.silent_ranks:
        ranks, why = ended.silent_ranks, f"lost rank {_names(ended.silent_ranks)}: {ended.reason}"
    else:
        ranks, why = (), ended.reason
    return Failure(grpc.StatusCode.UNAVAILABLE, f"epoch {epoch} ended: {why}", ranks, epoch)


def _names(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
