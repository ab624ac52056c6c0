"""The metrics of a rank inside another engine, declared as those of our own processes are."""

from __future__ import annotations

from crossdock.common.metrics import STEP_BUCKETS, DeclaredMetrics

__all__ = ["FrameworkMetrics"]


_RANK = ("group", "rank")


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
