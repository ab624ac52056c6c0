"""Counts of the engine and its communicators, exported to Prometheus and in heartbeats.

The engine's thread only puts small records into a queue; a thread of this module does the slow part (histogram
buckets; labels are looked up once).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

import grpc
import numpy as np

from crossdock.common import log
from crossdock.common.helper_thread import HelperThread
from crossdock.common.metrics import Counter, WorkerMetrics
from crossdock.common.operation_counts import OperationCounts, Operations, by_kind, lost
from crossdock.common.tracing import RequestTrace
from crossdock.protocol.v1 import control_pb2
from ep_kernels import LatencySample, MoECommunicator, PeerTraffic
from ep_kernels.telemetry import Samples

_log = log.get(__name__)

_COLLECT_S, _COLLECT_STEPS = 0.5, 1000
"""Samples are collected so often, or after so many steps. The ring holds 4096 records; a step writes three."""
_BATCH_S = 0.1
"""Records are counted so long after the first of them: a thread that woke up in each step would stop the engine's."""
_PAUSE_S = 50e-6
"""In the middle of that work, 0.1 to 0.4 ms each half: the engine's thread may wait for the interpreter."""
_MAX_BATCH = 1024
"""Records that are taken from the queue at a time."""
_MAX_RECORDS, _MAX_ANSWERS = 4096, 1 << 16
"""Limit of queued records, and of answers; further ones are dropped and counted."""


R = TypeVar("R")
RemoteRows = Callable[[Sequence[bytes]], int]


OPS = ("exchange", "dispatch", "combine")
"""In the order of a step."""
_MAX_TOTALS = 1 << 14
"""Operations of an interval of which quantiles are made; later ones are summed only."""
_MAX_RECENT = 3000
"""Operations that are kept for a post-mortem and a trace."""
_NS = 1e-9


class _Operation:
    """Sums of one kind of operation."""

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = self.wait_ns = 0
        self.totals_ns: list[int] = []
        self.late_ns = np.zeros(0, np.int64)

    def add(self, found: Operations) -> None:
        self.count += len(found.seq)
        self.total_ns += int(found.total_ns.sum())
        self.totals_ns += found.total_ns[: _MAX_TOTALS - len(self.totals_ns)].tolist()
        self.wait_ns += int(found.waits_ns.max(1).sum())
        late_ns = late(found.waits_ns).sum(0)
        self.late_ns = self.late_ns + late_ns if self.late_ns.shape == late_ns.shape else late_ns

    def message(self, op: str) -> control_pb2.OperationLatency:
        p50, p99 = np.quantile(self.totals_ns, (0.5, 0.99)) * _NS
        late_s, wait_s = (self.late_ns * _NS).tolist(), self.wait_ns * _NS
        return control_pb2.OperationLatency(op=op, count=self.count, p50_s=p50, p99_s=p99, late_s=late_s, wait_s=wait_s)


class LatencySums:
    """Where the time of one rank's steps went since the last report: what the verdict is made of. Written by the
    telemetry thread, taken by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._recent: deque[Sequence[LatencySample]] = deque()
        self._clear()

    def _clear(self) -> None:
        self._ops: dict[str, _Operation] = {}
        self._report = control_pb2.LatencyReport()
        self._rows: dict[int, int] = {}

    def add_samples(self, samples: Sequence[LatencySample], kinds: Sequence[Operations]) -> None:
        """Count operations of one communicator; `kinds`: the same ones by kind."""
        with self._lock:
            self._recent.append(samples)
            while sum(map(len, self._recent)) - len(self._recent[0]) >= _MAX_RECENT:
                self._recent.popleft()
            for found in kinds:
                if found.op in OPS:
                    self._ops.setdefault(found.op, _Operation()).add(found)

    def forget_recent(self) -> None:
        with self._lock:
            self._recent.clear()

    def recent(self) -> list[LatencySample]:
        with self._lock:
            batches = list(self._recent)
        return [sample for batch in batches for sample in batch][-_MAX_RECENT:]

    def add_steps(self, number: int, steps_ns: int, experts_ns: int, num_tokens: int, rows: dict[int, int]) -> None:
        """Count steps; `rows`: computed, by expert."""
        with self._lock:
            report = self._report
            report.steps += number
            report.step_s += steps_ns * _NS
            report.experts_s += experts_ns * _NS
            report.tokens += num_tokens
            for expert, count in rows.items():
                self._rows[expert] = self._rows.get(expert, 0) + count

    def take(self) -> control_pb2.LatencyReport:
        """The report since the last one."""
        with self._lock:
            report, ops, rows = self._report, self._ops, self._rows
            now_s = time.monotonic()
            report.interval_s, self._since_s = now_s - self._since_s, now_s
            self._clear()
        if "exchange" in ops:
            report.step_s += ops["exchange"].total_ns * _NS
        if rows:
            report.rows = sum(rows.values())
            report.hot_expert, report.hot_rows = max(rows.items(), key=lambda pair: pair[1])
        report.operations.extend(ops[op].message(op) for op in OPS if op in ops)
        return report


def late(waits_ns: np.ndarray) -> np.ndarray:
    """[n, R] what each peer was waited for beyond the typical one, of waits int64 [n, R]; ns.

    A rank that is early waits for all alike, and for nobody more. The typical peer is the lower median over all ranks,
    this one (0) included, so up to half of them may be late."""
    middle = (waits_ns.shape[1] - 1) // 2
    typical = np.partition(waits_ns, middle, axis=1)[:, middle]
    found: np.ndarray = np.maximum(waits_ns - typical[:, None], 0)
    return found


class CommunicatorCounts:
    """Counters of one worker over all its communicators. Traffic is exported of groups of several hosts only."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._comm: weakref.ref[MoECommunicator] | None = None
        self._counted: dict[int, PeerTraffic] = {}
        self._num_dropped = 0

    def count(self, comm: MoECommunicator) -> None:
        """Add what has changed since the last call; the counters of a communicator begin at 0."""
        if self._comm is None or self._comm() is not comm:
            self._comm, self._counted, self._num_dropped = weakref.ref(comm), {}, 0
        num_dropped = comm.dropped_rows() or self._num_dropped
        self._metrics.rows_dropped_total.inc(num_dropped - self._num_dropped)
        self._num_dropped = num_dropped
        active = comm.active
        for now in comm.traffic():
            self._count(now)
            if active[now.peer]:
                self._metrics.network_link_up.labels(str(now.peer)).set(now.is_up)
            else:
                self._metrics.network_link_up.remove(str(now.peer))

    def epoch_ended(self) -> None:
        """The communicator's epoch has ended: no link is expected to be up."""
        self._metrics.network_link_up.clear()

    def _count(self, now: PeerTraffic) -> None:
        before = self._counted.get(now.peer) or PeerTraffic(now.peer, now.is_up, 0, 0, 0)
        self._counted[now.peer] = now
        peer, metrics = str(now.peer), self._metrics
        metrics.network_sent_messages_total.labels(peer).inc(now.sent_messages - before.sent_messages)
        metrics.network_sent_bytes_total.labels(peer).inc(now.sent_bytes - before.sent_bytes)
        metrics.network_received_messages_total.labels(peer).inc(now.received_messages - before.received_messages)


class StepRecord(NamedTuple):
    """One step of this rank.

    Attributes:
        num_tokens: of this rank.
        rows_per_expert: int32 [L], as bytes: rows computed by its experts.
        topk_ids: of its tokens, int32 pieces [t, K], as bytes.
        remote_rows: counts the rows that tokens with such ids sent to other ranks (one per token and distinct rank).
        dispatch_ns, experts_ns, combine_ns: time in each phase.
        experts: logical expert of each slot in that layer; None: those of `WorkerTelemetry.holds`.
        exemplar: labels of a traced request of the step.
        wire_bytes: of one row in dispatch and in combine, as it travels.
    """

    num_tokens: int
    rows_per_expert: bytes
    topk_ids: Sequence[bytes]
    remote_rows: RemoteRows
    dispatch_ns: int
    experts_ns: int
    combine_ns: int
    layer: int = 0
    experts: tuple[int, ...] | None = None
    exemplar: dict[str, str] | None = None
    wire_bytes: tuple[int, int] = (0, 0)


class _Answered(NamedTuple):
    """A request that was answered at monotonic `end_ns`, and why it failed."""

    code: grpc.StatusCode
    num_tokens: int
    seconds: float
    queue_s: float
    trace: RequestTrace | None
    why: str
    end_ns: int


@dataclass(frozen=True, slots=True)
class _Collect:
    """Read the samples and counters of a communicator; None: its epoch has ended."""

    comm: MoECommunicator | None


@dataclass(frozen=True, slots=True)
class _AnswersWait:
    """There are answers."""


_ANSWERED = _AnswersWait()
_Record = StepRecord | Samples | _Collect | _AnswersWait


class WorkerTelemetry:
    """Counts of one worker over all its epochs.

    Args:
        row_bytes: bytes of one row in dispatch and in combine.
        transport: of its communicators, as a label.
    """

    def __init__(self, metrics: WorkerMetrics, row_bytes: tuple[int, int], transport: str = "cpu") -> None:
        self._metrics = metrics
        self._row_bytes = row_bytes
        self._counts = CommunicatorCounts(metrics)
        self._latency = LatencySums()
        self._queue: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()  # bounded by `_put`
        self._answers = deque[_Answered]()
        self._operations = OperationCounts(
            metrics.operation_duration_seconds, metrics.peer_wait_seconds_total, transport
        )
        self._next_seq: dict[str, int] = {}
        self._experts: dict[int, Counter] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._expert_rows: dict[int, int] = {}
        self._rows_lock, self._answers_lock = threading.Lock(), threading.Lock()
        self._scattered = self._failed = False
        self._phases = [
            metrics.step_phase_duration_seconds.labels(phase) for phase in ("dispatch", "experts", "combine")
        ]
        moved = metrics.payload_bytes_total, metrics.wire_bytes_total
        self._payload, self._wire = ([one.labels(op, transport) for op in ("dispatch", "combine")] for one in moved)
        for op in ("exchange", "dispatch", "combine"):
            metrics.samples_dropped_total.labels(op)  # exported as 0 from the start
        self._next_collect_s, self._steps_since_collect = 0.0, 0
        self._num_tokens = self._num_requests = self._num_steps = 0
        self._rate = (time.monotonic(), 0)
        self._expert_ids: tuple[int, ...] = ()
        self._expert_bytes = 0
        self._closing = threading.Event()
        self._thread = HelperThread("telemetry", self._drain)
        self._thread.start()

    def loaded(self, num_bytes: int) -> None:
        """Set the loaded bytes of this rank's experts (loading thread)."""
        self._expert_bytes = num_bytes
        self._metrics.expert_weights_bytes.set(num_bytes)

    def holds(self, expert_ids: Mapping[int, tuple[int, ...]], num_bytes: int) -> None:
        self.loaded(num_bytes)
        rows = set(expert_ids.values()) or {()}
        self._expert_ids = min(rows)
        self._scattered = len(rows) > 1 or any(b != a + 1 for a, b in pairwise(self._expert_ids))

    def switched(self, num_loaded: int, took_ns: int) -> None:
        """Count the switch of a layer: loaded copies, and the delay of steps."""
        self._scattered = True
        self._metrics.expert_copies_loaded_total.inc(num_loaded)
        self._metrics.expert_switch_duration_seconds.observe(took_ns * 1e-9)

    def take_rows(self) -> dict[tuple[int, int], int]:
        """Rows computed by (layer, expert) since the last call."""
        with self._rows_lock:
            rows, self._rows = self._rows, {}
            return rows

    def step(self, record: StepRecord) -> None:
        """Count a step (engine's thread)."""
        self._num_steps += 1
        self._put(record)

    def collect(self, comm: MoECommunicator) -> None:
        """Collect the communicator's latency samples and traffic, at intervals. Called after each step (engine's
        thread)."""
        self._steps_since_collect += 1
        now_s = time.monotonic()
        if now_s >= self._next_collect_s or self._steps_since_collect >= _COLLECT_STEPS:
            self._next_collect_s, self._steps_since_collect = now_s + _COLLECT_S, 0
            self._put(_Collect(comm))

    def epoch_ended(self, comm: MoECommunicator) -> list[LatencySample]:
        """The epoch has ended (engine's thread). Returns the last operations."""
        samples = comm.samples()
        self._put(samples)
        self._queue.put(_Collect(None))  # whatever waits there: links of an epoch that has ended are not up
        return [*self._latency.recent(), *samples]

    def recent(self) -> list[LatencySample]:
        return self._latency.recent()

    def answered(
        self,
        code: grpc.StatusCode,
        num_tokens: int,
        seconds: float,
        queue_s: float = 0.0,
        trace: RequestTrace | None = None,
        why: str = "",
    ) -> None:
        """Count a request that was answered, or refused after 0 seconds; end its trace. Any thread."""
        with self._answers_lock:
            self._num_requests += 1
            self._num_tokens += num_tokens if code is grpc.StatusCode.OK else 0
        if len(self._answers) < _MAX_ANSWERS:
            self._answers.append(_Answered(code, num_tokens, seconds, queue_s, trace, why, time.monotonic_ns()))
            if self._queue.empty():
                self._queue.put(_ANSWERED)
            return
        self._metrics.telemetry_records_dropped_total.inc()
        if trace is not None:
            trace.release()

    def dropped_stream(self) -> None:
        """Count a stream that was closed because its client does not read (service)."""
        self._metrics.streams_dropped_total.inc()

    def stats(self, num_queued: int) -> control_pb2.WorkerStats:
        """Statistics of the next heartbeat; rates are since the last one."""
        now_s, (then_s, then_tokens) = time.monotonic(), self._rate
        self._rate = (now_s, self._num_tokens)
        return control_pb2.WorkerStats(
            tokens_total=self._num_tokens,
            requests_total=self._num_requests,
            steps_total=self._num_steps,
            tokens_per_s=(self._num_tokens - then_tokens) / max(now_s - then_s, 1e-3),
            queued_requests=num_queued,
            first_expert=self._expert_ids[0] if self._expert_ids else 0,
            num_experts=len(self._expert_ids),
            expert_bytes=self._expert_bytes,
            scattered=self._scattered,
            latency=self._latency.take(),
        )

    def close(self) -> None:
        """Count what is in the queue and stop the thread."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _put(self, record: _Record) -> bool:
        """Queue a record, or drop it if the queue is full: False."""
        if self._queue.qsize() >= _MAX_RECORDS:
            self._metrics.telemetry_records_dropped_total.inc()
            return False
        self._queue.put(record)
        return True

    def _drain(self) -> None:
        batch: list[_Record | None] = []
        while not (batch and batch[-1] is None):
            batch = [self._queue.get()]
            self._closing.wait(_BATCH_S)
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            for are_steps, records in groupby(batch, lambda record: isinstance(record, StepRecord)):
                if are_steps:
                    self._count_safely(self._count_steps, cast(list[StepRecord], list(records)))
                else:
                    for record in records:
                        self._count_safely(self._count, record)
            for _ in range(len(self._answers)):
                self._count_safely(self._count_answer, self._answers.popleft())

    def _count_safely(self, count: Callable[[R], None], records: R) -> None:
        try:
            count(records)
        except Exception:  # a faulty record must not end the thread
            self._metrics.telemetry_records_dropped_total.inc(len(records) if isinstance(records, list) else 1)
            if not self._failed:
                self._failed = True
                _log.exception("a record cannot be counted; further ones are counted as dropped")
        time.sleep(0)  # the engine's thread may have the interpreter

    def _count(self, record: _Record | None) -> None:
        if isinstance(record, Samples):
            self._count_samples(record)
        elif isinstance(record, _Collect):
            self._count_experts()
            if record.comm is None:
                self._next_seq = {}
                self._latency.forget_recent()
                self._counts.epoch_ended()
            else:
                self._count_samples(record.comm.samples())
                self._counts.count(record.comm)

    def _count_answer(self, answer: _Answered) -> None:
        trace, metrics = answer.trace, self._metrics
        exemplar = None if trace is None else trace.exemplar
        if answer.code is grpc.StatusCode.OK:
            metrics.tokens_total.inc(answer.num_tokens)
            metrics.queue_duration_seconds.observe(answer.queue_s, exemplar)
        if answer.seconds:
            metrics.request_duration_seconds.labels(answer.code.name).observe(answer.seconds, exemplar)
        metrics.requests_total.labels(answer.code.name).inc()
        if trace is not None:
            trace.end(answer.code, answer.why, answer.end_ns)

    def _count_steps(self, records: list[StepRecord]) -> None:
        moved, computed = self._moved(records), self._computed(records)
        durations = [(record.dispatch_ns, record.experts_ns, record.combine_ns) for record in records]
        self._metrics.steps_total.inc(len(records))
        self._metrics.step_tokens.observe_many(record.num_tokens for record in records)
        self._metrics.last_step_timestamp_seconds.set_to_current_time()
        for histogram, times_ns in zip(self._phases, zip(*durations, strict=True), strict=True):
            of_steps = list(zip(times_ns, records, strict=True))
            histogram.observe_many(time_ns * 1e-9 for time_ns, record in of_steps if not record.exemplar)
            for time_ns, record in of_steps:
                if record.exemplar:
                    histogram.observe(time_ns * 1e-9, record.exemplar)
        for counter, num_bytes in zip((*self._payload, *self._wire), moved, strict=True):
            counter.inc(num_bytes)
        by_expert: dict[int, int] = {}
        with self._rows_lock:
            for (layer, expert), rows in computed.items():
                by_expert[expert] = by_expert.get(expert, 0) + rows
                self._expert_rows[expert] = self._expert_rows.get(expert, 0) + rows
                self._rows[layer, expert] = self._rows.get((layer, expert), 0) + rows
        num_tokens, experts_ns = (sum(map(attrgetter(name), records)) for name in ("num_tokens", "experts_ns"))
        self._latency.add_steps(len(records), sum(map(sum, durations)), experts_ns, num_tokens, by_expert)

    def _moved(self, records: Sequence[StepRecord]) -> list[int]:
        """Bytes of dispatch and of combine: payload, and as they travel."""
        ids: dict[tuple[RemoteRows, tuple[int, int]], list[bytes]] = {}
        for record in records:
            ids.setdefault((record.remote_rows, record.wire_bytes), []).extend(record.topk_ids)
        moved = [0, 0, 0, 0]
        for (remote_rows, wire_bytes), topk_ids in ids.items():
            rows = remote_rows(topk_ids)
            moved = [so_far + rows * each for so_far, each in zip(moved, (*self._row_bytes, *wire_bytes), strict=True)]
        return moved

    def _computed(self, records: Sequence[StepRecord]) -> dict[tuple[int, int], int]:
        """Rows by (layer, expert)."""
        rows: dict[tuple[int, tuple[int, ...] | None, int], list[bytes]] = {}
        for record in records:  # of two epochs, perhaps, with other numbers of experts
            key = record.layer, record.experts, len(record.rows_per_expert)
            rows.setdefault(key, []).append(record.rows_per_expert)
        computed: dict[tuple[int, int], int] = {}
        for (layer, experts, _), counts in rows.items():
            held = self._expert_ids if experts is None else experts
            sums = np.frombuffer(b"".join(counts), np.int32).reshape(len(counts), -1).sum(0).tolist()
            for expert, count in zip(held, sums, strict=False):
                if count:
                    computed[layer, expert] = computed.get((layer, expert), 0) + count
        return computed

    def _count_experts(self) -> None:
        """Export the rows by expert: a counter for each, and so not at each step."""
        counted, self._expert_rows = self._expert_rows, {}
        for expert, rows in counted.items():
            self._expert(expert).inc(rows)

    def _expert(self, expert: int) -> Counter:
        if expert not in self._experts:
            self._experts[expert] = self._metrics.expert_rows_total.labels(str(expert))
        return self._experts[expert]

    def _count_samples(self, samples: Samples) -> None:
        kinds = list(by_kind(samples))
        self._latency.add_samples(samples, kinds)
        time.sleep(_PAUSE_S)
        for op, number in lost(kinds, self._next_seq).items():
            self._metrics.samples_dropped_total.labels(op).inc(number)
        self._operations.count(kinds)
