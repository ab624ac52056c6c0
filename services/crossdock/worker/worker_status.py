"""How the worker is, in one place: what /readyz, Describe, the gauges and the log lines say.

Changed on the event loop (`loading` in the loading thread), read from anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from crossdock.common import log
from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.progress import LoadingBar
from crossdock.worker.seat import Seat
from crossdock.worker.work import Fault

_log = log.get(__name__)

_LOG_EVERY_S = 5.0


class WorkerStatus:
    """See the module's head.

    Args:
        metrics: whose membership gauges are kept.
        on_serving: told True when requests are served, False when they are not any more.
    """

    def __init__(self, metrics: WorkerMetrics, on_serving: Callable[[bool], None]) -> None:
        self._metrics, self._on_serving = metrics, on_serving
        self.seat: Seat | None = None
        self.is_serving = False
        self._is_draining = False
        self._text = "joining: looking for the control plane"
        self._logged_s = 0.0
        self._bar = LoadingBar()
        metrics.rank.set(-1)
        metrics.serving.set(0)

    def ready(self) -> tuple[bool, str]:
        """What /readyz says."""
        return self.is_serving and not self._is_draining, "draining" if self._is_draining else self._text

    def joining(self, text: str) -> None:
        """Not serving; `text` says what is waited for."""
        self._say(False, text if text.startswith("re-forming") else f"joining: {text}")

    def seated(self, seat: Seat) -> None:
        """There is a complete group, and this is our seat."""
        self.seat = seat
        log.bind(rank=seat.rank, epoch=seat.epoch)
        _log.info("seated", size=seat.size)
        self._metrics.rank.set(seat.rank)
        self._metrics.epoch.set(seat.epoch)
        self._metrics.members.set(sum(seat.mask))

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Progress of the weights, from the thread that loads them."""
        self._text = f"joining: loading experts, {done_bytes * 100 // max(total_bytes, 1)} %"
        self._bar.show(done_bytes, total_bytes)
        if time.monotonic() - self._logged_s > _LOG_EVERY_S or done_bytes == total_bytes:
            self._logged_s = time.monotonic()
            _log.info("loading experts", done_bytes=done_bytes, total_bytes=total_bytes)

    def serving(self, seat: Seat) -> None:
        """The group serves."""
        _log.info("serving")
        without = "".join(f", without rank {rank}" for rank, active in enumerate(seat.mask) if not active)
        self._say(True, f"serving: rank {seat.rank} of {seat.size}, epoch {seat.epoch}{without}")

    def faulty(self, fault: Fault) -> None:
        """The epoch broke here."""
        for peer in fault.silent_ranks:
            self._metrics.peer_timeouts_total.labels(str(peer)).inc()

    def draining(self) -> None:
        """No new requests from now on."""
        _log.info("draining")
        self._is_draining = True
        self._on_serving(False)

    def close(self) -> None:
        """The process ends, perhaps in the middle of loading."""
        self._bar.close()

    def _say(self, serving: bool, text: str) -> None:
        self._text = text
        self._metrics.serving.set(serving)
        if serving != self.is_serving:
            self.is_serving = serving
            self._on_serving(serving and not self._is_draining)
