"""Background tasks whose failure is logged at once, although they are awaited late or never.

self._rebalance_task = background(self._rebalance_if_worth(), "placement planning")
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from crossdock.common import log as logs

Result = TypeVar("Result")

log = logs.get(__name__)

_running: set[asyncio.Future[Any]] = set()
"""References to running tasks: the event loop itself holds them weakly."""


def background(work: Coroutine[Any, Any, Result], what: str, *expected: type[Exception]) -> asyncio.Task[Result]:
    task = asyncio.create_task(work, name=what)
    log_failure(task, what, *expected)
    return task


def log_failure(future: asyncio.Future[Any], what: str, *expected: type[Exception]) -> None:
    """Keep a reference to a future until it ends, and log its failure.

    Args:
        what: its name, for the log.
        expected: errors that are no bug, and are reported elsewhere.
    """

    def ended(future: asyncio.Future[Any]) -> None:
        _running.discard(future)
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, expected):  # `future.result()` would add this frame to the error
            text = "".join(traceback.format_exception(error)).strip()
            log.error(f"{what} ended; this is a bug", error=error, traceback=text)

    _running.add(future)
    future.add_done_callback(ended)


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and `wait_for_end` of them."""
    for task in tasks:
        task.cancel()
    await wait_for_end(*tasks)


async def wait_for_end(*tasks: asyncio.Future[Any]) -> None:
    """Wait until all tasks have ended, whatever the error.

    A cancelled task keeps its error until somebody asks for it, and with the error the frames that raised it. What is
    in them, such as calls and their connections, would stay until a garbage collection where they hold the task, too.
    """
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task.cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                task.result()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call `function(*args)` in a loop, from any thread. Ignored if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
