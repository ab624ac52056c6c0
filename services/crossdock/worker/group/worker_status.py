"""State of the worker for /readyz, Describe, the gauges and the log; of loading also a progress bar on a terminal.

Written on the event loop (`loading` in the loading thread), read by any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from crossdock.common import log
from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.group.seat import Seat
from crossdock.worker.steps.work import Fault

_log = log.get(__name__)

_LOG_EVERY_S = 5.0


class LoadingBar:
    """Draws on stderr while bytes come in; gone when all are there, or when it is closed. Any thread."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._lock, self._closed = threading.Lock(), not self._console.is_terminal
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """Draw `done_bytes` of `total_bytes`; nothing where stderr is no terminal."""
        with self._lock:
            if not self._closed:
                self._draw(done_bytes, total_bytes)

    def close(self) -> None:
        """Draw nothing from now on, and give a terminal its cursor back. Idempotent."""
        with self._lock:
            self._closed = True
            self._stop()

    def _draw(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            columns = (TextColumn("loading experts"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("load", total=total_bytes)
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes)
        if done_bytes >= total_bytes:
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class WorkerStatus:
    """State of one worker.

    Args:
        metrics: membership gauges are set here.
        on_serving: called with True when serving begins, with False when it ends.
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
        return self.is_serving and not self._is_draining, "draining" if self._is_draining else self._text

    def waiting(self) -> None:
        """Not serving, and without a seat, perhaps as a spare: nothing of a former one is exported."""
        self._metrics.rank.set(-1)
        self._metrics.epoch.set(0)
        self._metrics.members.set(0)
        self.joining("waiting for the group to be complete")

    def joining(self, text: str) -> None:
        """Not serving; `text` is the reason."""
        self._say(False, text if text.startswith("re-forming") else f"joining: {text}")

    def seated(self, seat: Seat) -> None:
        """A complete group has assigned this seat."""
        self.seat = seat
        log.bind(rank=seat.rank, epoch=seat.epoch)
        _log.info("rank assigned", size=seat.size)
        self._metrics.rank.set(seat.rank)
        self._metrics.epoch.set(seat.epoch)
        self._metrics.members.set(sum(seat.mask))

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Progress of loading, from the loading thread."""
        self._text = f"joining: loading experts, {done_bytes * 100 // max(total_bytes, 1)} %"
        self._bar.show(done_bytes, total_bytes)
        if time.monotonic() - self._logged_s > _LOG_EVERY_S or done_bytes == total_bytes:
            self._logged_s = time.monotonic()
            _log.info("loading experts", done_bytes=done_bytes, total_bytes=total_bytes)

    def serving(self, seat: Seat) -> None:
        _log.info("serving")
        without = "".join(f", without rank {rank}" for rank, active in enumerate(seat.mask) if not active)
        self._say(True, f"serving: rank {seat.rank} of {seat.size}, epoch {seat.epoch}{without}")

    def faulty(self, fault: Fault) -> None:
        for peer in fault.silent_ranks:
            self._metrics.peer_timeouts_total.labels(str(peer)).inc()

    def draining(self) -> None:
        _log.info("draining")
        self._is_draining = True
        self._on_serving(False)

    def close(self) -> None:
        self._bar.close()

    def _say(self, serving: bool, text: str) -> None:
        self._text = text
        self._metrics.serving.set(serving)
        if serving != self.is_serving:
            self.is_serving = serving
            self._on_serving(serving and not self._is_draining)
