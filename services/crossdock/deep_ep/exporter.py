"""Exports the counts of communicators inside another engine to Prometheus: one daemon thread per process.

Latency records come from the transports' own rings; received tokens, where enabled, from a counter to which each
dispatch adds, on the device. Any thread may read both at any time: no operation waits for that, and a CUDA graph
capture is not disturbed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field

from crossdock.common.config import FrameworkConfig
from crossdock.common.log import get
from crossdock.common.metrics import FrameworkMetrics
from crossdock.common.operation_counts import OperationCounts, by_kind, lost
from ep_kernels import EpError, MoECommunicator, PeerTimeout
from ep_kernels.telemetry import Samples

log = get(__name__)

COLLECT_S = 0.25
"""A ring holds 4096 records: 16,000 operations a second."""


@dataclass(slots=True)
class _WatchedCommunicator:
    """One communicator.

    Attributes:
        labels: `group` and `rank`; read at the start, because the group may end before the communicator.
        received: tokens of each rank, as far as they are counted.
        failing: reading it has failed unexpectedly, which the log shows.
        next_seq: of each operation's next sample.
        transport: as a label.
        num_dropped: rows dropped, as far as they are counted.
        operations: counts its samples; made with the first.
        lock: held while it is counted.
    """

    labels: tuple[str, str]
    received: list[int]
    failing: bool = False
    next_seq: dict[str, int] = field(default_factory=dict)
    transport: str = "cpu"
    num_dropped: int = 0
    operations: OperationCounts | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class FrameworkTelemetry:
    """Counts of this process's communicators."""

    def __init__(self) -> None:
        self.metrics = FrameworkMetrics()
        self._watched: weakref.WeakKeyDictionary[MoECommunicator, _WatchedCommunicator] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.address = ""
        """host:port of the endpoint, once it is served."""
        self._served = False

    def watch(self, comm: MoECommunicator, settings: FrameworkConfig) -> None:
        """Count its operations from now on, and serve them, as the settings say."""
        listen = settings.listen_of(comm.rank)
        if settings.traffic:
            comm.count_received()
        with self._lock:
            labels = (settings.group, str(comm.rank))
            about = _WatchedCommunicator(labels, [0] * comm.size, transport=comm.config.transport)
            self._watched[comm] = about
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="crossdock-telemetry", daemon=True)
                self._thread.start()
            if listen and not self._served:
                self._served = True
                self._serve(listen)

    def _serve(self, listen: str) -> None:
        from crossdock.common.http import page_of, serve_http  # brings gRPC along, which engines rarely need
        from crossdock.common.rpc import ListenError

        try:
            server = serve_http(listen, page_of(self.metrics.registry), lambda: (True, "ok"))
            self.address = server.address
            log.info(f"crossdock: metrics are served on {self.address}")  # engines' logs show the text alone
        except ListenError as error:
            log.warning(f"crossdock: metrics are not served: {error}")

    def timed_out(self, group: str, rank: int, peer: int) -> None:
        self.metrics.ep_peer_timeouts_total.labels(group, str(rank), str(peer)).inc()

    def collect(self) -> None:
        with self._lock:
            watched = list(self._watched.items())
        for comm, about in watched:
            self._collect(comm, about)

    def leave(self, comm: MoECommunicator) -> None:
        """Count the records of a communicator that is about to be closed, once its operations have ended."""
        with self._lock:
            about = self._watched.get(comm)
        if about is not None:
            comm.drain()
            self._collect(comm, about)

    def _collect(self, comm: MoECommunicator, about: _WatchedCommunicator) -> None:
        with about.lock:
            try:
                self._count(about, comm.samples())
                self._count_received(about, comm.received(), comm.row_bytes)
                self._count_dropped(about, comm.dropped_rows())
            except EpError:
                return  # closed or broken meanwhile: its calls say so
            except Exception:  # one that cannot be read does not end the counts of the others
                if not about.failing:
                    about.failing = True
                    log.exception(f"crossdock: rank {about.labels[1]}: counts of a communicator are lost")

    def _count(self, about: _WatchedCommunicator, samples: Samples) -> None:
        metrics, kinds = self.metrics, list(by_kind(samples))
        for op, number in lost(kinds, about.next_seq).items():
            metrics.ep_samples_dropped_total.labels(*about.labels, op).inc(number)
        if about.operations is None:
            durations, waits = metrics.ep_operation_duration_seconds, metrics.ep_peer_wait_seconds_total
            about.operations = OperationCounts(durations, waits, about.transport, about.labels)
        about.operations.count(kinds)
        for one in kinds:
            metrics.ep_tokens_total.labels(*about.labels, one.op, one.mode).inc(int(one.tokens.sum()))

    def _count_received(self, about: _WatchedCommunicator, received: list[int] | None, row_bytes: int) -> None:
        """Count the tokens received since the last call; `received`: the totals, or None where not known at present."""
        if received is None:
            return
        metrics = self.metrics
        news = [now - before for now, before in zip(received, about.received, strict=True)]
        about.received = received
        for peer, tokens in enumerate(news):
            metrics.ep_received_tokens_total.labels(*about.labels, str(peer)).inc(tokens)
            if str(peer) != about.labels[1]:
                metrics.ep_received_bytes_total.labels(*about.labels, str(peer)).inc(tokens * row_bytes)

    def _count_dropped(self, about: _WatchedCommunicator, num_dropped: int | None) -> None:
        """`num_dropped`: the total, or None once the communicator is closed."""
        if num_dropped is not None:
            self.metrics.ep_rows_dropped_total.labels(*about.labels).inc(num_dropped - about.num_dropped)
            about.num_dropped = num_dropped

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(COLLECT_S):
            self.collect()


@functools.cache
def telemetry() -> FrameworkTelemetry:
    """This process's; made at the first call."""
    return FrameworkTelemetry()


def watch(comm: MoECommunicator, settings: FrameworkConfig) -> None:
    """Count the operations of a communicator, unless the settings turn it off."""
    if settings.metrics:
        telemetry().watch(comm, settings)


def leave(comm: MoECommunicator, settings: FrameworkConfig) -> None:
    """Count what a communicator has done, before it is closed or given up."""
    if settings.metrics:
        telemetry().leave(comm)


class CountingTimeouts:
    """A context in which a PeerTimeout is counted, and raised on. May be entered again, also while it is open.

    Args:
        settings: its group; may turn it off.
    """

    def __init__(self, rank: int, settings: FrameworkConfig) -> None:
        self._rank, self._settings = rank, settings

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerTimeout):
            self.count(error)

    def count(self, error: PeerTimeout) -> None:
        """One. For those whom a context costs too much."""
        if self._settings.metrics:
            telemetry().timed_out(self._settings.group, self._rank, error.peer)
