"""Digests of experts, computed beside the thread that reads them: both need the same bytes while they are in memory."""

from __future__ import annotations

import contextlib
import queue

from crossdock.common.helper_thread import HelperThread, go_on
from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError


class DigestsBeside:
    """Of one worker."""

    def __init__(self) -> None:
        self._read: queue.SimpleQueue[tuple[Checkpoint, int, int]] = queue.SimpleQueue()
        self._thread: HelperThread | None = None

    def add(self, checkpoint: Checkpoint, layer: int, expert: int) -> None:
        """An expert was read from its files. One thread."""
        self._read.put((checkpoint, layer, expert))
        if self._thread is None:
            self._thread = HelperThread("digests", go_on, self._turn)
            self._thread.start()

    def _turn(self) -> None:
        checkpoint, layer, expert = self._read.get()
        with contextlib.suppress(CheckpointError):  # whoever needs the digest will see it
            checkpoint.digest(layer, expert)
