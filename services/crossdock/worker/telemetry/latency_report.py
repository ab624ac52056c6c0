"""Where the time of this rank's steps went, summed between two heartbeats: what the verdict is made of.

Of each wait only what is beyond the typical peer's counts: a rank that is early waits for all alike, and for nobody
more. The typical peer is the lower median over all ranks, this one (0) included, so up to half of them may be late.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from crossdock.common.operation_counts import Operations
from crossdock.protocol.v1 import control_pb2
from ep_kernels import LatencySample

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
    """Sums of one rank since the last report. Written by the telemetry thread, taken by the event loop."""

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
        """The epoch has ended: numbers of operations begin again."""
        with self._lock:
            self._recent.clear()

    def recent(self) -> list[LatencySample]:
        """The last operations. Any thread."""
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
    """[n, R] what each peer was waited for beyond the typical one, of waits int64 [n, R]; ns."""
    middle = (waits_ns.shape[1] - 1) // 2
    typical = np.partition(waits_ns, middle, axis=1)[:, middle]
    found: np.ndarray = np.maximum(waits_ns - typical[:, None], 0)
    return found
