"""Every metric of Crossdock, declared once: name, unit, meaning, labels, literal buckets.

Each process has one of these objects and so one registry; nothing is registered globally. Names follow Prometheus'
rules: prefix `crossdock_`, base unit at the end, `_total` for counters. `declarations()` generates the table in
docs/metrics.md.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector

import crossdock

__all__ = [
    "BatchedHistogram",
    "ControlMetrics",
    "Counter",
    "Declaration",
    "DeclaredMetrics",
    "FrameworkMetrics",
    "Gauge",
    "GuardedMetrics",
    "Histogram",
    "HostMetrics",
    "WorkerMetrics",
]

NAMESPACE = "crossdock"
_STREAMS = frozenset({"Watch", "Forward"})
_DIGITS = ("1", "1.5", "2", "3", "4", "6", "8")


def decades(first: int, last: int) -> tuple[float, ...]:
    """Bounds from 10^first to 10^last, each at most 1.5 times the one before. Parsed, because computed ones print as
    le="4.9999999999999996e-06"."""
    return (*(float(f"{digit}e{power}") for power in range(first, last) for digit in _DIGITS), float(f"1e{last}"))


class BatchedHistogram(Histogram):
    """A histogram that takes many values at once: a batch is sorted into the buckets outside of their locks."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a value. Without an exemplar its bucket is found by halves, not by one comparison a bucket."""
        if exemplar:
            super().observe(amount, exemplar)
            return
        made: Any = self
        made._raise_if_not_observable()
        made._sum.inc(amount)
        made._buckets[bisect_left(made._upper_bounds, amount)].inc(1)

    def observe_many(self, values: Iterable[float]) -> None:
        made: Any = self
        made._raise_if_not_observable()
        ordered = sorted(values)
        if not ordered:
            return
        made._sum.inc(sum(ordered))
        first = bisect_left(made._upper_bounds, ordered[0])
        last = bisect_left(made._upper_bounds, ordered[-1], first)
        counted = 0
        for bound, bucket in zip(made._upper_bounds[first : last + 1], made._buckets[first : last + 1], strict=True):
            below = bisect_right(ordered, bound, counted)
            if below > counted:
                bucket.inc(below - counted)
            counted = below


STEP_BUCKETS = decades(-6, 1)
"""Seconds: 1 us to 10 s."""
REQUEST_BUCKETS = decades(-4, 2)
REFORM_BUCKETS = decades(-2, 3)
TOKEN_BUCKETS = (0, 1, 2, *(number << shift for shift in range(12) for number in (3, 4)))
RPC_BUCKETS = decades(-4, 1)
_RANK = ("group", "rank")
"""Labels of every metric of a rank inside another engine."""


@dataclass(slots=True)
class Declaration:
    """One declared metric.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        unit: "seconds", "bytes", or the thing counted.
        help: one sentence.
        labels: label names.
        buckets: a histogram's upper bounds.
        name: as it appears on /metrics: the prefix, then the name of the attribute.
    """

    kind: str
    unit: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    name: str = field(init=False)

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.name = f"{NAMESPACE}_{attribute}"

    def made(self, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        text = f"{self.help} ({self.unit})." if self.unit != "1" else f"{self.help}."
        if self.kind == "histogram":
            return BatchedHistogram(self.name, text, self.labels, registry=registry, buckets=self.buckets)
        return (Counter if self.kind == "counter" else Gauge)(self.name, text, self.labels, registry=registry)


def counter(unit: str, text: str, *labels: str) -> Counter:
    """Declare the counter of this attribute's name."""
    return cast(Counter, Declaration("counter", unit, text, labels))


def gauge(unit: str, text: str, *labels: str) -> Gauge:
    """Declare the gauge of this attribute's name."""
    return cast(Gauge, Declaration("gauge", unit, text, labels))


def histogram(unit: str, text: str, buckets: tuple[float, ...], *labels: str) -> BatchedHistogram:
    """Declare the histogram of this attribute's name."""
    return cast(BatchedHistogram, Declaration("histogram", unit, text, labels, buckets))


class _Registry(CollectorRegistry):
    """Without the `_created` series of counters and histograms, which no rule or panel reads. The library's own switch
    is one for all registries of a process, other programs' too."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class DeclaredMetrics:
    """A registry and its metrics: an object has the metric itself under each name that its class declares."""

    build_info = gauge("1", "Always 1; the label is the running version", "version")

    def __init__(self) -> None:
        self.registry = _Registry()
        ProcessCollector(registry=self.registry)
        self._declared: list[Declaration] = []
        for kind in reversed(type(self).__mro__):
            for attribute, declared in vars(kind).items():
                if isinstance(declared, Declaration):
                    self._declared.append(declared)
                    setattr(self, attribute, declared.made(self.registry))
        self.build_info.labels(version=crossdock.__version__).set(1)

    def declarations(self) -> list[Declaration]:
        """The metrics of this process, in order of declaration."""
        return list(self._declared)


class GuardedMetrics(DeclaredMetrics):
    """Metrics of a process with a gRPC server: its calls, certificates, event loop."""

    rpc_refusals_total = counter("calls", "Refused calls: unauthenticated, permission, rate, full or value", "reason")
    certificate_expiry_timestamp_seconds = gauge(
        "seconds", "Unix time at which this process's certificate expires; 0 without one"
    )
    certificate_reloads_total = counter("reloads", "Reloads of changed certificates: ok or failed", "result")
    grpc_core_log_lines_total = counter(
        "lines", "Log lines of gRPC's core, by topic: handshake (a failed TLS handshake) or other", "topic"
    )
    event_loop_tasks = gauge("tasks", "Tasks of this process's event loop")
    event_loop_lag_seconds = histogram(
        "seconds", "Delay of a timer of this process's event loop, once a second", REQUEST_BUCKETS
    )
    rpc_duration_seconds = histogram("seconds", "Duration of one unary call", RPC_BUCKETS, "method", "code")

    def observe_rpc(self, method: str, code: str, seconds: float) -> None:
        """Count a finished call; streams last as long as their callers live."""
        if method not in _STREAMS:
            self.rpc_duration_seconds.labels(method=method, code=code).observe(seconds)

    def count_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop_tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class WorkerMetrics(GuardedMetrics):
    """Metrics of an expert worker. There is no rank label: it is a series' `instance` and, where a host exports all of
    its processes, `process`."""

    # Data plane.
    operation_duration_seconds = histogram(
        "seconds",
        "Duration of one dispatch or combine; phase is send, wait (for the slowest peer) or total",
        STEP_BUCKETS,
        "op",
        "mode",
        "phase",
        "transport",
    )
    peer_wait_seconds_total = counter("seconds", "Time until that peer's data arrived, summed", "op", "peer")
    peer_timeouts_total = counter("timeouts", "Waits that timed out because that peer was silent or dead", "peer")
    payload_bytes_total = counter(
        "bytes",
        "Payload of this rank's tokens sent to (dispatch) or received from (combine) other ranks",
        "op",
        "transport",
    )
    wire_bytes_total = counter("bytes", "Payload as it travels: with scales, routing, padding", "op", "transport")
    rows_dropped_total = counter("rows", "Rows that dispatch dropped here, past the receive capacity; 0 in a worker")
    samples_dropped_total = counter("samples", "Samples of operations lost because their ring was full", "op")

    # Device.
    device_memory_used_bytes = gauge("bytes", "Memory of this rank's GPU in use, by all processes; 0 on a CPU")
    transport_peak_bytes_per_second = gauge(
        "bytes/s",
        "Most that this rank can send or read: its GPU's NVLinks in one direction, or one processor's copy rate",
    )

    # Network.
    network_link_up = gauge(
        "1", "1 while the connections with that active rank of another host stand, 0 while they do not", "peer"
    )
    network_sent_messages_total = counter("messages", "Messages to that rank of another host", "peer")
    network_sent_bytes_total = counter(
        "bytes",
        "Bytes of rows and records to that rank of another host; a host gets each row once, through one rank",
        "peer",
    )
    network_received_messages_total = counter("messages", "Messages from that rank of another host", "peer")

    # Service.
    requests_total = counter("requests", "Forward requests answered", "code")
    request_duration_seconds = histogram(
        "seconds",
        "Time from a request's arrival to its answer or error, including queueing; not of refused ones",
        REQUEST_BUCKETS,
        "code",
    )
    queue_duration_seconds = histogram("seconds", "Time of an answered request until its first step", REQUEST_BUCKETS)
    tokens_total = counter("tokens", "Tokens of answered requests")
    steps_total = counter("steps", "Steps of this rank, including empty ones")
    step_tokens = histogram("tokens", "Tokens of this rank in one step; 0: it only took part", TOKEN_BUCKETS)
    max_tokens_per_step = gauge("tokens", "Most tokens of one rank in one step")
    last_step_timestamp_seconds = gauge("seconds", "Unix time of the last step that ended well; 0: none yet")
    step_phase_duration_seconds = histogram(
        "seconds", "Duration of one step by phase: dispatch, experts, combine", STEP_BUCKETS, "phase"
    )
    expert_rows_total = counter("rows", "Rows computed by that expert, over all layers", "expert")
    expert_copies_loaded_total = counter("copies", "Expert copies (per layer) loaded while the group served")
    expert_switch_duration_seconds = histogram(
        "seconds", "Delay of a step by the switch of a layer to other experts", STEP_BUCKETS
    )

    expert_read_bytes_total = counter(
        "bytes", "Bytes of experts that were read, by source: peer (another worker) or disk", "source"
    )
    expert_read_seconds_total = counter("seconds", "Time of reading them, by source", "source")
    expert_given_bytes_total = counter("bytes", "Bytes of experts that other workers have read here")
    expert_holder_failures_total = counter(
        "failures", "Workers given up while experts were read from them: lost, slow, refused or damaged", "reason"
    )

    # Queue.
    queued_requests = gauge("requests", "Requests waiting for a step")
    queued_bytes = gauge("bytes", "Bytes of queued requests and unwritten answers")
    telemetry_records_dropped_total = counter("records", "Telemetry records dropped: queue full, or malformed")
    open_streams = gauge("streams", "Forward streams that are open")
    open_request_connections = gauge("connections", "Request connections that are open")
    streams_dropped_total = counter("streams", "Connections and streams closed: their client did not read its answers")

    # Membership.
    epoch = gauge("1", "Epoch of the group, as seen by this worker; 0 without a rank")
    members = gauge("workers", "Members of the group, as seen by this worker; 0 without a rank")
    rank = gauge("1", "This worker's rank; -1 without one")
    serving = gauge("1", "1 while serving requests, 0 while joining or re-forming")
    expert_weights_bytes = gauge("bytes", "Memory held by this rank's experts")


class ControlMetrics(GuardedMetrics):
    # Leadership.
    is_leader = gauge("1", "1 while this replica leads; exactly one of a group must")
    leader_term = gauge("1", "Term of this replica's leadership; 0 without one")
    leader_terms_total = counter("terms", "Leaderships begun by this replica")
    leader_lease_failures_total = counter("attempts", "Failed reads and writes of the leader's Kubernetes Lease")

    # Membership.
    epoch = gauge("1", "Epoch of the group; each change of membership raises it")
    members = gauge("workers", "Live members of the group")
    member_states = gauge("workers", "Workers by state: ready, joining, sick, spare, cordoned or quarantined", "state")
    reform_duration_seconds = histogram(
        "seconds",
        "Time without service from the end of one epoch until the group serves again, by its first cause",
        REFORM_BUCKETS,
        "cause",
    )
    active_ranks = gauge("ranks", "Active ranks: fewer than members while standbys wait to be readmitted")
    world_size = gauge("ranks", "Number of ranks in this epoch")
    wanted_workers = gauge("workers", "Number of workers that the group is to have")
    group_state = gauge("1", "1 for the group's current state, 0 for the others", "state")
    group_state_transitions_total = counter("transitions", "Transitions of the group's state, by new state", "to")
    heartbeats_total = counter("heartbeats", "Heartbeats accepted")
    members_lost_total = counter("workers", "Members lost, by cause", "cause")
    silent_rank_reports_total = counter("reports", "Reports of that rank as silent, once per member and epoch", "rank")
    sick_ranks = gauge("ranks", "Members repeatedly reported silent that keep their slot")
    excluded_workers = gauge("workers", "Workers excluded from the group: cordoned or quarantined", "cause")
    watch_streams = gauge("streams", "Open Watch streams")
    verdict_lost_ratio = gauge(
        "1",
        "Share of the time of steps that the group loses to what the latency verdict names; absent: nothing named",
        "kind",
        "subject",
    )

    # Placement.
    placement_version = gauge("1", "Version of the current placement of experts, or of the goal of a move")
    expert_imbalance_ratio = gauge("1", "Rows of the most loaded rank over the mean, all layers; 1 is perfect")
    expert_moves_total = counter(
        "moves", "Moves of experts while the group serves, by result: done or rolled_back", "result"
    )

    def clear_group(self) -> None:
        """Clear the gauges of the group: this replica has stopped leading."""
        counted = self.epoch, self.members, self.active_ranks, self.wanted_workers, self.watch_streams, self.sick_ranks
        for number in (*counted, self.placement_version, self.expert_imbalance_ratio):
            number.set(0)
        for labelled in (self.group_state, self.member_states, self.excluded_workers, self.verdict_lost_ratio):
            labelled.clear()


class HostMetrics(DeclaredMetrics):
    """Metrics of the supervisor of one host (`crossdock up`) about its processes, whose own are on the same page."""

    process_up = gauge("1", "1 while that process runs and listens", "process")
    process_restarts_total = counter("restarts", "Restarts of that process", "process")
    process_scraped = gauge("1", "1 if that process's metrics are on this page, 0 if it did not answer", "process")


class FrameworkMetrics(DeclaredMetrics):
    """Metrics of a rank inside another engine. The engine may serve all ranks on one page, which it writes itself:
    hence the labels `rank` and `group`."""

    ep_operation_duration_seconds = histogram(
        "seconds",
        "Duration of one dispatch or combine; phase is send, wait (for the slowest peer) or total",
        STEP_BUCKETS,
        *_RANK,
        "op",
        "mode",
        "phase",
        "transport",
    )
    ep_samples_dropped_total = counter("samples", "Samples lost because their ring was full", *_RANK, "op")
    ep_rows_dropped_total = counter("rows", "Rows that dispatch dropped here, past the receive capacity", *_RANK)
    ep_tokens_total = counter("tokens", "Tokens of this rank in an operation", *_RANK, "op", "mode")
    ep_received_tokens_total = counter(
        "tokens", "Tokens of that peer received by this rank's experts, once each; includes its own", *_RANK, "peer"
    )
    ep_received_bytes_total = counter(
        "bytes", "Rows and scales received by dispatch from that other rank", *_RANK, "peer"
    )
    ep_peer_wait_seconds_total = counter("seconds", "Time until that peer's data arrived, summed", *_RANK, "op", "peer")
    ep_peer_timeouts_total = counter(
        "timeouts", "Waits that timed out because that peer was silent or dead", *_RANK, "peer"
    )
