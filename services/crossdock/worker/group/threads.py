"""Blocking work beside the event loop, in daemon threads: a stuck one never keeps the process from ending.

`torch.set_num_threads` reaches MKL and OpenMP of the calling thread only: elsewhere the first product starts a team of
as many threads as the host has processors, which spin between products. So each thread sets it for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from crossdock.common.helper_thread import HelperThread

Result = TypeVar("Result")


def in_thread(name: str, function: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:
    """Call `function(*args)` in a new daemon thread; the future has its result or exception. Products in that thread
    use the number of threads set by `torch.set_num_threads` in the calling thread.

    Cancelling the future only stops the waiting: the thread runs to its end.
    """
    loop, num_threads = asyncio.get_running_loop(), torch.get_num_threads()
    future: asyncio.Future[Result] = loop.create_future()
    waiting = [future]  # emptied: an exception holds the frame of `run`, which must not hold the future that has it

    def settle(result: Result | None, error: BaseException | None) -> None:
        settled = waiting.pop()
        if settled.done():
            return
        if error is not None:
            settled.set_exception(error)
        else:
            settled.set_result(result)  # type: ignore[arg-type]

    def report(result: Result | None, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            torch.set_num_threads(num_threads)
            result = function(*args)
        except BaseException as error:
            report(None, error)
        else:
            report(result, None)

    HelperThread(name, run).start()
    return future
