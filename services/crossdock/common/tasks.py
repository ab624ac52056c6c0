"""Tasks that run beside the others, awaited by nobody or much later: none ends without a word.

self._looking = beside(self._look(), "the look at experts")
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from crossdock.common import log as logs

Result = TypeVar("Result")

log = logs.get(__name__)

_running: set[asyncio.Future[Any]] = set()
"""The loop itself holds tasks weakly."""


def beside(work: Coroutine[Any, Any, Result], what: str, *expected: type[Exception]) -> asyncio.Task[Result]:
    """Run `work` as a task; see `watched`."""
    task = asyncio.create_task(work, name=what)
    watched(task, what, *expected)
    return task


def watched(future: asyncio.Future[Any], what: str, *expected: type[Exception]) -> None:
    """Keep a task, or what a thread will say, until it ends; if it fails the log tells so at once.

    Args:
        future: belongs to the running loop.
        what: it is, for the log.
        expected: errors that are no fault of ours, and that somebody else tells of.
    """

    def ended(future: asyncio.Future[Any]) -> None:
        _running.discard(future)
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, expected):  # `future.result()` would tie the error to this frame
            text = "".join(traceback.format_exception(error)).strip()
            log.error(f"{what} ended; this is a bug", error=error, traceback=text)

    _running.add(future)
    future.add_done_callback(ended)
