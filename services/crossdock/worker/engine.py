"""The engine of one rank: requests of many clients become steps that all ranks take together.

    any thread                      the engine's thread, for one epoch: `run(comm, experts)`
    submit(work) ──┐                ┌─> exchange: what I want, how my last step went   (8 int64, all ranks)
    withdraw(work) ├─> batcher ─────┤   answer the step before, if every rank's experts did their part
    close(failure) ┘   (one lock)   │   choose_step: the same decision everywhere
                                    └── dispatch -> experts -> combine, or sleep until a request or a peer comes

What can go wrong, and what happens:
* A request is bad: refused before it gets here (`admission.py`).
* The experts of a rank raise: it sends zeros so that nobody waits, and says `failed` in the next exchange; every rank
  then answers that step's requests with INTERNAL. The group goes on.
* A peer is silent or gone, the epoch ended, or anything else breaks inside the communicator: everything here is
  answered UNAVAILABLE (or with what `close` said), `run` returns the fault, and the session forms the next epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import grpc
import torch

from crossdock.common import log
from crossdock.worker.batcher import Batcher
from crossdock.worker.expert_mlps import Experts
from crossdock.worker.expert_tables import ExpertTables
from crossdock.worker.device_stream import stream_of
from crossdock.worker.stepper import Batch, Stepper
from crossdock.worker.steps import Departure, DesyncError, Proposal, Step, choose_step
from crossdock.worker.worker_telemetry import Telemetry
from crossdock.worker.work import Done, Failure, Fault, Left, Refused, Timing, Work
from ep_kernels import EpError, MoECommunicator, PeerTimeout

_log = log.get(__name__)

_CPU = torch.device("cpu")
_IDLE_S = 1.0
"""Longest sleep of an idle rank; requests and peers end it at once."""


class Engine:
    """Queue and steps of one rank. It outlives epochs. Requests are refused until `open` (from then on they wait for
    `run`), and again after `close`.

    Args:
        max_tokens_per_step: M.
        telemetry: where steps and samples are counted.
        device: where steps are computed.

    Raises:
        DeviceLost: the device does not work.
    """

    def __init__(self, max_tokens_per_step: int, telemetry: Telemetry, device: torch.device = _CPU) -> None:
        self._max_tokens, self._telemetry, self._lane = max_tokens_per_step, telemetry, stream_of(device)
        self._lock = threading.Condition()
        self._batcher = Batcher()
        self._running: list[Work] = []
        self._refusal: Failure | None = Failure(grpc.StatusCode.UNAVAILABLE, "joining: the group has not formed yet")
        self._draining = self._leaving = self._sleeping = self._paused = False
        self._epoch = 0
        self._comm: MoECommunicator | None = None
        self._holdings: ExpertTables | None = None
        self._num_steps = 0

    # Any thread.

    def submit(self, work: Work) -> None:
        """Queue a request; `work.reply` will be called once. Raises Refused while closed or draining."""
        with self._lock:
            if self._refusal is not None:
                raise Refused(self._refusal)
            if self._draining:
                raise Refused(Failure(grpc.StatusCode.UNAVAILABLE, "draining: this worker is going away"))
            if work.num_tokens:
                self._batcher.add(work)
                self._wake()
        if not work.num_tokens:
            self._answer([work], Done(torch.empty_like(work.x), work.timing))

    def withdraw(self, work: Work, failure: Failure) -> None:
        """Answer a request with `failure` now, wherever it is; a step that already carries it drops its rows."""
        with self._lock:
            self._batcher.remove(work)
            self._lock.notify_all()
        self._answer([work], failure)

    def open(self) -> None:
        """Take requests from now on."""
        with self._lock:
            self._refusal, self._paused = None, False

    def close(self, failure: Failure) -> None:
        """Answer everything that is here, and everything that comes, with `failure`."""
        with self._lock:
            self._refusal = failure
            works = self._batcher.clear() + self._running
            self._lock.notify_all()
        self._answer(works, failure)

    def drain(self) -> None:
        """Refuse what comes, serve what is here."""
        with self._lock:
            self._draining = True
            self._wake()

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running. False on timeout."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._batcher and not self._running, timeout_s)

    def leave(self) -> None:
        """End `run` on all ranks between two steps, as soon as no draining rank has work."""
        with self._lock:
            self._leaving = True
            self._wake()

    def pause(self) -> None:
        """End `run` between two steps, on this rank alone: its communicator will be told who is left."""
        with self._lock:
            self._paused = True
            self._wake()

    def nudge(self) -> None:
        """Exchange words with the other ranks even if nobody has work: the holdings have news."""
        with self._lock:
            self._wake()

    def num_queued(self) -> int:
        """Requests that wait for a step."""
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
        self, comm: MoECommunicator, experts: Experts | None, epoch: int, holdings: ExpertTables | None = None
    ) -> Fault | Left:
        """Take steps until the epoch ends. Everything still here is answered before this returns.

        Args:
            comm: GROUPED, of this epoch; only this thread uses it, but for `wake` and `abort`.
            experts: of this rank, in the order of its slots; None if it has none.
            epoch: for error messages.
            holdings: which slot of the communicator holds which expert; None: they have the same number.
        """
        with self._lock:
            self._comm, self._num_steps, self._holdings, self._epoch = comm, 0, holdings, epoch
        ended: Fault | Left
        try:
            self._lane.enter()
            ended = self._loop(comm, Stepper(comm, experts, self._lane, holdings))
        except PeerTimeout as error:
            ended = Fault(str(error), (error.peer,))
        except (EpError, DesyncError) as error:
            ended = Fault(str(error))
        except Exception as error:  # a bug must cost this epoch, not the process
            _log.exception("engine failed", epoch=epoch)
            ended = Fault(f"engine: {type(error).__name__}: {error}")
        with self._lock:
            self._comm = None
            failure = self._refusal or _failure_of(ended, epoch)
        self.close(failure)
        self._rest()
        return ended

    def _loop(self, comm: MoECommunicator, stepper: Stepper) -> Left | Fault:
        batch: Batch | None = None
        while True:
            if batch is None:
                self._sleep(comm)
            if self._paused:
                return Fault("the group goes on without a rank")
            words = comm.exchange(self._propose(batch).words())
            proposals = {rank: Proposal.parse(each) for rank, each in enumerate(words) if each is not None}
            if batch is not None:
                self._settle(batch, [rank for rank, proposal in proposals.items() if proposal.failed])
                batch = None
            if self._holdings is not None:
                self._holdings.settle([proposal.placement for proposal in proposals.values()])
            decision = choose_step(proposals, self._max_tokens)
            if isinstance(decision, Departure):
                return Left(decision.ranks)
            if isinstance(decision, Step):
                batch = self._step(stepper, decision)
            self._telemetry.collect(comm)

    def _sleep(self, comm: MoECommunicator) -> None:
        """Return when there is something to say: a request waits, this rank wants to leave, or a peer is asking."""
        while True:
            with self._lock:
                news = self._holdings is not None and self._holdings.has_news()
                self._sleeping = not (self._batcher or self._leaving or self._paused or news)
                if not self._sleeping:
                    return
            if comm.wait_for_peer(_IDLE_S):
                with self._lock:
                    self._sleeping = False
                return
            self._telemetry.collect(comm)

    def _propose(self, batch: Batch | None) -> Proposal:
        """What to say in the next exchange. Requests that nobody waits for any more are dropped here."""
        now_ns = time.monotonic_ns()
        placement = self._holdings.word() if self._holdings is not None else 0
        with self._lock:
            expired = self._batcher.expire(now_ns)
            proposal = Proposal.of(
                self._batcher.head(now_ns),
                self._num_steps,
                draining=self._draining,
                leaving=self._leaving,
                failed=batch is not None and bool(batch.error),
                placement=placement,
            )
        self._answer(expired, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline passed in the queue"))
        return proposal

    def _step(self, stepper: Stepper, plan: Step) -> Batch:
        now_ns = time.monotonic_ns()
        with self._lock:
            slices = self._batcher.take(plan.layer, plan.max_tokens, now_ns)
            self._running = [piece.work for piece in slices]
            self._num_steps += 1
        for piece in slices:
            if piece.start == 0:
                piece.work.timing = Timing(queue_ns=now_ns - piece.work.arrived_ns)
        if self._holdings is not None:
            slices = [piece for piece in slices if not self._is_lost(piece.work, plan.layer)]
        batch = stepper.step(plan.layer, plan.max_tokens, slices)
        self._telemetry.step(batch.record)
        return batch

    def _is_lost(self, work: Work, layer: int) -> bool:
        """Whether a request asks for an expert that the lost ranks have taken with them; if so, it is answered."""
        route = self._holdings.route(layer) if self._holdings is not None else None
        experts = route.lost_in(work.topk_ids) if route is not None else []
        if not experts or self._comm is None:
            return bool(experts)
        lost = tuple(rank for rank, active in enumerate(self._comm.active) if not active)
        named = f"experts {_names(tuple(experts))} of layer {layer} are lost with rank {_names(lost)}"
        message = f"epoch {self._epoch}: {named}; no other rank has a copy"
        self.withdraw(work, Failure(grpc.StatusCode.UNAVAILABLE, message, lost, self._epoch))
        return True

    def _settle(self, batch: Batch, failed_ranks: list[int]) -> None:
        """All ranks have told how the step went: hand out the rows, or say whose part failed."""
        if failed_ranks:
            why = batch.error or "the log of that rank says why"
            failure = Failure(grpc.StatusCode.INTERNAL, f"rank {failed_ranks} failed in this step: {why}")
            for piece in batch.slices:
                self.withdraw(piece.work, failure)
        else:
            self._hand_out(batch)
        self._rest()

    def _hand_out(self, batch: Batch) -> None:
        row, record = 0, batch.record
        for piece in batch.slices:
            work, rows = piece.work, batch.z[row : row + piece.num_tokens]
            row += piece.num_tokens
            if work.answered:
                continue
            work.timing = work.timing.plus_step(record.dispatch_ns, record.experts_ns, record.combine_ns)
            if piece.num_tokens == work.num_tokens:
                work.y = rows.to(work.x.dtype, copy=len(batch.slices) > 1)  # a view would keep everybody's rows
            else:
                work.y = torch.empty_like(work.x) if work.y is None else work.y
                work.y[piece.start : piece.stop] = rows
            if piece.is_last:
                self._answer([work], Done(work.y, work.timing))

    def _rest(self) -> None:
        """Between two steps: nothing is running."""
        with self._lock:
            self._running = []
            self._lock.notify_all()


def _failure_of(ended: Fault | Left, epoch: int) -> Failure:
    """What requests are told that this epoch did not serve."""
    if isinstance(ended, Left):
        ranks, why = ended.ranks, f"rank {_names(ended.ranks)} left"
    elif ended.silent_ranks:
        ranks, why = ended.silent_ranks, f"lost rank {_names(ended.silent_ranks)}: {ended.reason}"
    else:
        ranks, why = (), ended.reason
    return Failure(grpc.StatusCode.UNAVAILABLE, f"epoch {epoch} ended: {why}", ranks, epoch)


def _names(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
