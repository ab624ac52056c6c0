"""Every metric of Crossdock, declared once: name, unit, meaning, labels, literal buckets.

Each process owns one of these objects and so one registry; nothing is registered globally. Names carry the prefix
`crossdock_` and end in their unit. The table in docs/operations.md is made from `declarations()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

import crossdock

__all__ = [
    "ControlMetrics",
    "Counter",
    "Declaration",
    "FrameworkMetrics",
    "Gauge",
    "GuardedMetrics",
    "Histogram",
    "HostMetrics",
    "WorkerMetrics",
]

NAMESPACE = "crossdock"

STEP_BUCKETS = (
    2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0, 10.0,
)  # fmt: skip
"""Seconds. Literals, because computed ones print as le="4.9999999999999996e-06"."""

REQUEST_BUCKETS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
RPC_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One metric as it was declared.

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


class _Metrics:
    """A registry and what was declared in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._declared: list[Declaration] = []
        ProcessCollector(registry=self.registry)
        info = self._gauge("build_info", "1", "Always 1; the label names the running version", "version")
        info.labels(version=crossdock.__version__).set(1)

    def declarations(self) -> list[Declaration]:
        """What this process exports, in order of declaration."""
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

    def _seconds(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        text = self._declare(name, "histogram", "seconds", text, labels)
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)


class GuardedMetrics(_Metrics):
    """What a process with a gRPC server exports about who is let in, and about its own certificate."""

    def _declare_guards(self) -> None:
        self.calls_refused_total = self._counter(
            "calls_refused_total",
            "calls",
            "Calls turned away: unauthenticated, permission, rate, full or value",
            "reason",
        )
        self.certificate_not_after_seconds = self._gauge(
            "certificate_not_after_seconds", "seconds", "Unix time when this process's certificate ends; 0 without one"
        )
        self.certificate_reloads_total = self._counter(
            "certificate_reloads_total", "readings", "Certificates read again after a change: ok or failed", "result"
        )
        self.grpc_core_lines_total = self._counter(
            "grpc_core_lines_total",
            "lines",
            "Lines of gRPC's core, by subject: handshake (a TLS handshake failed) or other",
            "about",
        )
        self.event_loop_tasks = self._gauge("event_loop_tasks", "tasks", "Tasks of this process's event loop")

    def count_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count this loop's tasks at each scrape."""
        self.event_loop_tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class WorkerMetrics(GuardedMetrics):
    """What an expert worker exports. There is no rank label: Prometheus' `instance` is the worker."""

    def __init__(self) -> None:
        super().__init__()
        self._declare_data_plane()
        self._declare_service()
        self._declare_membership()
        self._declare_guards()

    def _declare_data_plane(self) -> None:
        self.op_seconds = self._seconds(
            "op_seconds",
            "Time inside one dispatch or combine; phase is send, wait (for the slowest peer) or total",
            STEP_BUCKETS,
            "op",
            "mode",
            "phase",
        )
        self.peer_wait_seconds_total = self._counter(
            "peer_wait_seconds_total", "seconds", "Time until that peer's data had arrived, summed", "op", "peer"
        )
        self.peer_timeouts_total = self._counter(
            "peer_timeouts_total", "timeouts", "Waits that ended because that peer was silent or dead", "peer"
        )
        self.bytes_total = self._counter(
            "bytes_total",
            "bytes",
            "Payload of this rank's tokens that went to (dispatch) or came from (combine) other ranks",
            "op",
        )

    def _declare_service(self) -> None:
        self.requests_total = self._counter("requests_total", "requests", "Forward requests answered", "code")
        self.request_seconds = self._seconds(
            "request_seconds", "From a request's arrival to its answer, queueing included", REQUEST_BUCKETS
        )
        self.tokens_total = self._counter("tokens_total", "tokens", "Tokens that clients sent here and got answered")
        self.steps_total = self._counter("steps_total", "steps", "Steps this rank took part in, empty ones included")
        self.step_phase_seconds = self._seconds(
            "step_phase_seconds", "One step by phase: dispatch, experts, combine", STEP_BUCKETS, "phase"
        )
        self.expert_rows_total = self._counter(
            "expert_rows_total", "rows", "Rows computed by that expert, over all layers", "expert"
        )
        self.expert_copies_loaded_total = self._counter(
            "expert_copies_loaded_total", "copies", "Experts of one layer that were loaded while the group served"
        )
        self.expert_switch_seconds = self._seconds(
            "expert_switch_seconds", "How long steps waited for a layer to change its experts", STEP_BUCKETS
        )
        self.queued_requests = self._gauge("queued_requests", "requests", "Requests waiting for a step")
        self.queued_bytes = self._gauge(
            "queued_bytes", "bytes", "Bytes of requests and of answers that are not written yet"
        )
        self.telemetry_dropped_total = self._counter(
            "telemetry_dropped_total", "records", "Steps and samples that were not counted: too many, or malformed"
        )
        self.streams_dropped_total = self._counter(
            "streams_dropped_total", "streams", "Forward streams ended because their client did not read its answers"
        )

    def _declare_membership(self) -> None:
        self.epoch = self._gauge("epoch", "1", "Membership counter of the group this worker is in")
        self.members = self._gauge("members", "workers", "Members of the group as this worker sees it")
        self.rank = self._gauge("rank", "1", "This worker's rank; -1 before it has one")
        self.serving = self._gauge("serving", "1", "1 while requests are served, 0 while joining or re-forming")
        self.experts_loaded_bytes = self._gauge("experts_loaded_bytes", "bytes", "Memory held by this rank's experts")


class ControlMetrics(GuardedMetrics):
    """What the control plane exports."""

    def __init__(self) -> None:
        super().__init__()
        self._declare_guards()
        self.leading = self._gauge("leading", "1", "1 while this control plane decides; of replicas one does")
        self.term = self._gauge("term", "1", "Number of the present reign among replicas; 0 without one")
        self.leaderships_total = self._counter("leaderships_total", "reigns", "Times this replica began to lead")
        self.lease_failures_total = self._counter(
            "lease_failures_total", "attempts", "Readings and renewals of the Kubernetes Lease that failed"
        )
        self.epoch = self._gauge("epoch", "1", "Membership counter of the group")
        self.members = self._gauge("members", "workers", "Live members of the group")
        self.active_ranks = self._gauge(
            "active_ranks", "ranks", "Ranks that take part: fewer than members while some are still to be taken in"
        )
        self.world_size = self._gauge("world_size", "ranks", "Ranks that the group is configured for")
        self.state = self._gauge("state", "1", "1 for the state the group is in, 0 for the others", "state")
        self.transitions_total = self._counter("transitions_total", "changes", "Changes of state, by new state", "to")
        self.heartbeats_total = self._counter("heartbeats_total", "heartbeats", "Heartbeats accepted")
        self.lost_total = self._counter("lost_total", "workers", "Members lost, by cause", "cause")
        self.blamed_total = self._counter(
            "blamed_total", "reports", "Times a member called that rank silent, once per member and epoch", "rank"
        )
        self.sick_ranks = self._gauge(
            "sick_ranks", "ranks", "Members called silent again and again that keep their place"
        )
        self.barred_workers = self._gauge(
            "barred_workers", "workers", "Workers kept out of the group: cordoned or quarantined", "cause"
        )
        self.watchers = self._gauge("watchers", "streams", "Open Watch streams")
        self.placement_version = self._gauge(
            "placement_version", "1", "Placement of experts that is in force or aimed at"
        )
        self.expert_imbalance = self._gauge(
            "expert_imbalance", "1", "Rows of the most loaded rank over the mean rank's, all layers; 1 is perfect"
        )
        self.expert_moves_total = self._counter(
            "expert_moves_total", "moves", "Moves of experts while the group serves, by result", "result"
        )
        self.rpc_seconds = self._seconds("rpc_seconds", "Time to answer one unary call", RPC_BUCKETS, "method", "code")

    def clear_group(self) -> None:
        """Take back what is said of the group: this control plane no longer decides for it."""
        counted = self.epoch, self.members, self.active_ranks, self.watchers
        for gauge in (*counted, self.placement_version, self.expert_imbalance):
            gauge.set(0)
        self.state.clear()


class HostMetrics(_Metrics):
    """What the supervisor of one host (`crossdock up`) exports about the processes it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self._gauge("up", "1", "1 while that process runs and has said that it listens", "process")
        self.restarts = self._gauge("restarts", "restarts", "Times that process was started anew", "process")


class FrameworkMetrics(_Metrics):
    """What a rank inside another engine exports. The engine may serve all ranks' values on one page: hence `rank`."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_seconds = self._seconds(
            "ep_seconds",
            "Time inside one dispatch or combine; phase is send, wait (for the slowest peer) or total",
            STEP_BUCKETS,
            "rank",
            "op",
            "mode",
            "phase",
        )
        self.ep_tokens_total = self._counter(
            "ep_tokens_total", "tokens", "Tokens that this rank brought to an operation", "rank", "op", "mode"
        )
        self.ep_received_tokens_total = self._counter(
            "ep_received_tokens_total", "tokens",
            "Tokens of that peer that dispatch brought to this rank's experts, once each; its own included",
            "rank", "peer",
        )  # fmt: skip
        self.ep_received_bytes_total = self._counter(
            "ep_received_bytes_total", "bytes", "Rows and scales that dispatch brought here from that other rank",
            "rank", "peer",
        )  # fmt: skip
        self.ep_peer_wait_seconds_total = self._counter(
            "ep_peer_wait_seconds_total", "seconds", "Time until that peer's data had arrived, summed",
            "rank", "op", "peer",
        )  # fmt: skip
        self.ep_peer_timeouts_total = self._counter(
            "ep_peer_timeouts_total",
            "timeouts",
            "Waits that ended because that peer was silent or dead",
            "rank",
            "peer",
        )
