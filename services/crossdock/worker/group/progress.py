"""Progress bar of loading, on a terminal only; elsewhere the log and /readyz have the progress."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn


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
