"""The counters of communicators as metrics: rows dropped, traffic with ranks of other hosts."""

from __future__ import annotations

import weakref

from crossdock.common.metrics import WorkerMetrics
from ep_kernels import MoECommunicator, PeerTraffic


class CommunicatorCounts:
    """Counters of one worker over all its communicators. Traffic is exported of groups of several hosts only.

    Args:
        metrics: of this worker.
    """

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
