"""Every metric of Crossdock, declared once: name, unit, meaning, labels, literal buckets.

Each process has one of these objects and so one registry; nothing is registered globally. Names follow Prometheus'
rules: prefix `crossdock_`, base unit at the end, `_total` for counters. `declarations()` generates the table in
docs/metrics.md.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        """Count values."""
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


@dataclass(frozen=True, slots=True)
class Declaration:
    """One declared metric.

    Attributes:
        name: as it appears on /metrics.
        kind: "counter", "gauge" or "histogram".
        unit: "seconds", "bytes", or the thing counted.
        help: one sentence.
        labels: label names.
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...]


class _Registry(CollectorRegistry):
    """Without the `_created` series of counters and histograms, which no rule or panel reads. The library's own switch
    is one for all registries of a process, other programs' too."""

    def collect(self) -> Iterator[Metric]:
        """The families, as exposed."""
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class DeclaredMetrics:
    """A registry and its declarations."""

    def __init__(self) -> None:
        self.registry = _Registry()
        self._declared: list[Declaration] = []
        ProcessCollector(registry=self.registry)
        info = self._gauge("build_info", "1", "Always 1; the label is the running version", "version")
        info.labels(version=crossdock.__version__).set(1)

    def declarations(self) -> list[Declaration]:
        """The metrics of this process, in order of declaration."""
        return list(self._declared)

    def _declare(self, name: str, kind: str, unit: str, text: str, labels: Sequence[str]) -> str:
        self._declared.append(Declaration(f"{NAMESPACE}_{name}", kind, unit, text, tuple(labels)))
        return f"{text} ({unit})." if unit != "1" else f"{text}."

    def _counter(self, name: str, unit: str, text: str, *labels: str) -> Counter:
        text = self._declare(name, "counter", unit, text, labels)
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, unit: str, text: str, *labels: str) -> Gauge:
        text = self._declare(name, "gauge", unit, text, labels)
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _seconds(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> BatchedHistogram:
        return self._histogram(name, "seconds", text, buckets, *labels)

    def _histogram(self, name: str, unit: str, text: str, buckets: Sequence[float], *labels: str) -> BatchedHistogram:
        text = self._declare(name, "histogram", unit, text, labels)
        return BatchedHistogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)


class GuardedMetrics(DeclaredMetrics):
    """Metrics of a process with a gRPC server: its calls, certificates, event loop."""

    def _declare_guards(self) -> None:
        self.rpc_refusals_total = self._counter(
            "rpc_refusals_total",
            "calls",
            "Refused calls: unauthenticated, permission, rate, full or value",
            "reason",
        )
        self.certificate_expiry_timestamp_seconds = self._gauge(
            "certificate_expiry_timestamp_seconds",
            "seconds",
            "Unix time at which this process's certificate expires; 0 without one",
        )
        self.certificate_reloads_total = self._counter(
            "certificate_reloads_total", "reloads", "Reloads of changed certificates: ok or failed", "result"
        )
        self.grpc_core_log_lines_total = self._counter(
            "grpc_core_log_lines_total",
            "lines",
            "Log lines of gRPC's core, by topic: handshake (a failed TLS handshake) or other",
            "topic",
        )
        self.event_loop_tasks = self._gauge("event_loop_tasks", "tasks", "Tasks of this process's event loop")
        self.event_loop_lag_seconds = self._seconds(
            "event_loop_lag_seconds", "Delay of a timer of this process's event loop, once a second", REQUEST_BUCKETS
        )
        self.rpc_duration_seconds = self._seconds(
            "rpc_duration_seconds", "Duration of one unary call", RPC_BUCKETS, "method", "code"
        )

    def observe_rpc(self, method: str, code: str, seconds: float) -> None:
        """Count a finished call; streams last as long as their callers live."""
        if method not in _STREAMS:
            self.rpc_duration_seconds.labels(method=method, code=code).observe(seconds)

    def count_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count this loop's tasks at each scrape."""
        self.event_loop_tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class WorkerMetrics(GuardedMetrics):
    """Metrics of an expert worker. There is no rank label: it is a series' `instance` and, where a host exports all of
    its processes, `process`."""

    def __init__(self) -> None:
        super().__init__()
        self._declare_data_plane()
        self._declare_device()
        self._declare_network()
        self._declare_service()
        self._declare_membership()
        self._declare_guards()

    def _declare_data_plane(self) -> None:
        self.operation_duration_seconds = self._seconds(
            "operation_duration_seconds",
            "Duration of one dispatch or combine; phase is send, wait (for the slowest peer) or total",
            STEP_BUCKETS,
            "op",
            "mode",
            "phase",
            "transport",
        )
        self.peer_wait_seconds_total = self._counter(
            "peer_wait_seconds_total", "seconds", "Time until that peer's data arrived, summed", "op", "peer"
        )
        self.peer_timeouts_total = self._counter(
            "peer_timeouts_total", "timeouts", "Waits that timed out because that peer was silent or dead", "peer"
        )
        self.payload_bytes_total = self._counter(
            "payload_bytes_total",
            "bytes",
            "Payload of this rank's tokens sent to (dispatch) or received from (combine) other ranks",
            "op",
            "transport",
        )
        self.wire_bytes_total = self._counter(
            "wire_bytes_total",
            "bytes",
            "Payload as it travels: with scales, routing, padding",
            "op",
            "transport",
        )
        self.rows_dropped_total = self._counter(
            "rows_dropped_total", "rows", "Rows that dispatch dropped here, past the receive capacity; 0 in a worker"
        )
        self.samples_dropped_total = self._counter(
            "samples_dropped_total", "samples", "Samples of operations lost because their ring was full", "op"
        )

    def _declare_device(self) -> None:
        self.device_memory_used_bytes = self._gauge(
            "device_memory_used_bytes", "bytes", "Memory of this rank's GPU in use, by all processes; 0 on a CPU"
        )
        self.transport_peak_bytes_per_second = self._gauge(
            "transport_peak_bytes_per_second",
            "bytes/s",
            "Most that this rank can send or read: its GPU's NVLinks in one direction, or one processor's copy rate",
        )

    def _declare_network(self) -> None:
        self.network_link_up = self._gauge(
            "network_link_up",
            "1",
            "1 while the connections with that active rank of another host stand, 0 while they do not",
            "peer",
        )
        self.network_sent_messages_total = self._counter(
            "network_sent_messages_total", "messages", "Messages to that rank of another host", "peer"
        )
        self.network_sent_bytes_total = self._counter(
            "network_sent_bytes_total",
            "bytes",
            "Bytes of rows and records to that rank of another host; a host gets each row once, through one rank",
            "peer",
        )
        self.network_received_messages_total = self._counter(
            "network_received_messages_total", "messages", "Messages from that rank of another host", "peer"
        )

    def _declare_service(self) -> None:
        self.requests_total = self._counter("requests_total", "requests", "Forward requests answered", "code")
        self.request_duration_seconds = self._seconds(
            "request_duration_seconds",
            "Time from a request's arrival to its answer or error, including queueing; not of refused ones",
            REQUEST_BUCKETS,
            "code",
        )
        self.queue_duration_seconds = self._seconds(
            "queue_duration_seconds", "Time of an answered request until its first step", REQUEST_BUCKETS
        )
        self.tokens_total = self._counter("tokens_total", "tokens", "Tokens of answered requests")
        self.steps_total = self._counter("steps_total", "steps", "Steps of this rank, including empty ones")
        self.step_tokens = self._histogram(
            "step_tokens", "tokens", "Tokens of this rank in one step; 0: it only took part", TOKEN_BUCKETS
        )
        self.max_tokens_per_step = self._gauge("max_tokens_per_step", "tokens", "Most tokens of one rank in one step")
        self.last_step_timestamp_seconds = self._gauge(
            "last_step_timestamp_seconds", "seconds", "Unix time of the last step that ended well; 0: none yet"
        )
        self.step_phase_duration_seconds = self._seconds(
            "step_phase_duration_seconds",
            "Duration of one step by phase: dispatch, experts, combine",
            STEP_BUCKETS,
            "phase",
        )
        self.expert_rows_total = self._counter(
            "expert_rows_total", "rows", "Rows computed by that expert, over all layers", "expert"
        )
        self.expert_copies_loaded_total = self._counter(
            "expert_copies_loaded_total", "copies", "Expert copies (per layer) loaded while the group served"
        )
        self.expert_switch_duration_seconds = self._seconds(
            "expert_switch_duration_seconds", "Delay of a step by the switch of a layer to other experts", STEP_BUCKETS
        )
        self._declare_queue()

    def _declare_queue(self) -> None:
        self.queued_requests = self._gauge("queued_requests", "requests", "Requests waiting for a step")
        self.queued_bytes = self._gauge("queued_bytes", "bytes", "Bytes of queued requests and unwritten answers")
        self.telemetry_records_dropped_total = self._counter(
            "telemetry_records_dropped_total", "records", "Telemetry records dropped: queue full, or malformed"
        )
        self.open_streams = self._gauge("open_streams", "streams", "Forward streams that are open")
        self.open_request_connections = self._gauge(
            "open_request_connections", "connections", "Request connections that are open"
        )
        self.streams_dropped_total = self._counter(
            "streams_dropped_total", "streams", "Connections and streams closed: their client did not read its answers"
        )

    def _declare_membership(self) -> None:
        self.epoch = self._gauge("epoch", "1", "Epoch of the group, as seen by this worker; 0 without a rank")
        self.members = self._gauge(
            "members", "workers", "Members of the group, as seen by this worker; 0 without a rank"
        )
        self.rank = self._gauge("rank", "1", "This worker's rank; -1 without one")
        self.serving = self._gauge("serving", "1", "1 while serving requests, 0 while joining or re-forming")
        self.expert_weights_bytes = self._gauge("expert_weights_bytes", "bytes", "Memory held by this rank's experts")


class ControlMetrics(GuardedMetrics):
    """Metrics of the control plane."""

    def __init__(self) -> None:
        super().__init__()
        self._declare_guards()
        self._declare_leadership()
        self._declare_membership()
        self._declare_placement()

    def _declare_leadership(self) -> None:
        self.is_leader = self._gauge("is_leader", "1", "1 while this replica leads; exactly one of a group must")
        self.leader_term = self._gauge("leader_term", "1", "Term of this replica's leadership; 0 without one")
        self.leader_terms_total = self._counter("leader_terms_total", "terms", "Leaderships begun by this replica")
        self.leader_lease_failures_total = self._counter(
            "leader_lease_failures_total", "attempts", "Failed reads and writes of the leader's Kubernetes Lease"
        )

    def _declare_membership(self) -> None:
        self.epoch = self._gauge("epoch", "1", "Epoch of the group; each change of membership raises it")
        self.members = self._gauge("members", "workers", "Live members of the group")
        self.member_states = self._gauge(
            "member_states",
            "workers",
            "Workers by state: ready, joining, sick, spare, cordoned or quarantined",
            "state",
        )
        self.reform_duration_seconds = self._seconds(
            "reform_duration_seconds",
            "Time without service from the end of one epoch until the group serves again, by its first cause",
            REFORM_BUCKETS,
            "cause",
        )
        self.active_ranks = self._gauge(
            "active_ranks", "ranks", "Active ranks: fewer than members while standbys wait to be readmitted"
        )
        self.world_size = self._gauge("world_size", "ranks", "Configured number of ranks")
        self.group_state = self._gauge("group_state", "1", "1 for the group's current state, 0 for the others", "state")
        self.group_state_transitions_total = self._counter(
            "group_state_transitions_total", "transitions", "Transitions of the group's state, by new state", "to"
        )
        self.heartbeats_total = self._counter("heartbeats_total", "heartbeats", "Heartbeats accepted")
        self.members_lost_total = self._counter("members_lost_total", "workers", "Members lost, by cause", "cause")
        self.silent_rank_reports_total = self._counter(
            "silent_rank_reports_total", "reports", "Reports of that rank as silent, once per member and epoch", "rank"
        )
        self.sick_ranks = self._gauge("sick_ranks", "ranks", "Members repeatedly reported silent that keep their slot")
        self.excluded_workers = self._gauge(
            "excluded_workers", "workers", "Workers excluded from the group: cordoned or quarantined", "cause"
        )
        self.watch_streams = self._gauge("watch_streams", "streams", "Open Watch streams")
        self.verdict_lost_ratio = self._gauge(
            "verdict_lost_ratio",
            "1",
            "Share of the time of steps that the group loses to what the latency verdict names; absent: nothing named",
            "kind",
            "subject",
        )

    def _declare_placement(self) -> None:
        self.placement_version = self._gauge(
            "placement_version", "1", "Version of the current placement of experts, or of the goal of a move"
        )
        self.expert_imbalance_ratio = self._gauge(
            "expert_imbalance_ratio", "1", "Rows of the most loaded rank over the mean, all layers; 1 is perfect"
        )
        self.expert_moves_total = self._counter(
            "expert_moves_total",
            "moves",
            "Moves of experts while the group serves, by result: done or rolled_back",
            "result",
        )

    def clear_group(self) -> None:
        """Clear the gauges of the group: this replica has stopped leading."""
        counted = self.epoch, self.members, self.active_ranks, self.watch_streams, self.sick_ranks
        for gauge in (*counted, self.placement_version, self.expert_imbalance_ratio):
            gauge.set(0)
        for labelled in (self.group_state, self.member_states, self.excluded_workers, self.verdict_lost_ratio):
            labelled.clear()


class HostMetrics(DeclaredMetrics):
    """Metrics of the supervisor of one host (`crossdock up`) about its processes, whose own are on the same page."""

    def __init__(self) -> None:
        super().__init__()
        self.process_up = self._gauge("process_up", "1", "1 while that process runs and listens", "process")
        self.process_restarts_total = self._counter(
            "process_restarts_total", "restarts", "Restarts of that process", "process"
        )
        self.process_scraped = self._gauge(
            "process_scraped", "1", "1 if that process's metrics are on this page, 0 if it did not answer", "process"
        )


class FrameworkMetrics(DeclaredMetrics):
    """Metrics of a rank inside another engine. The engine may serve all ranks on one page, which it writes itself:
    hence the labels `rank` and `group`."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_operation_duration_seconds = self._seconds(
            "ep_operation_duration_seconds",
            "Duration of one dispatch or combine; phase is send, wait (for the slowest peer) or total",
            STEP_BUCKETS,
            *_RANK, "op", "mode", "phase", "transport",
        )  # fmt: skip
        self.ep_samples_dropped_total = self._counter(
            "ep_samples_dropped_total", "samples", "Samples lost because their ring was full", *_RANK, "op"
        )
        self.ep_rows_dropped_total = self._counter(
            "ep_rows_dropped_total", "rows", "Rows that dispatch dropped here, past the receive capacity", *_RANK
        )
        self.ep_tokens_total = self._counter(
            "ep_tokens_total", "tokens", "Tokens of this rank in an operation", *_RANK, "op", "mode"
        )
        self.ep_received_tokens_total = self._counter(
            "ep_received_tokens_total", "tokens",
            "Tokens of that peer received by this rank's experts, once each; includes its own",
            *_RANK, "peer",
        )  # fmt: skip
        self.ep_received_bytes_total = self._counter(
            "ep_received_bytes_total", "bytes", "Rows and scales received by dispatch from that other rank",
            *_RANK, "peer",
        )  # fmt: skip
        self.ep_peer_wait_seconds_total = self._counter(
            "ep_peer_wait_seconds_total", "seconds", "Time until that peer's data arrived, summed",
            *_RANK, "op", "peer",
        )  # fmt: skip
        self.ep_peer_timeouts_total = self._counter(
            "ep_peer_timeouts_total",
            "timeouts",
            "Waits that timed out because that peer was silent or dead",
            *_RANK,
            "peer",
        )
