"""The event loop that all clients for threads share: it follows control planes and opens connections."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class SharedLoop:
    """An event loop in a thread, for all clients of this process: grpc.aio wakes up every loop of a process for each
    message of any. It ends when its last user has given it back."""

    _lock = threading.Lock()
    _now: SharedLoop | None = None
    _process = object()

    def __init__(self) -> None:
        self._loop, self._users, self._made_in = asyncio.new_event_loop(), 0, SharedLoop._process
        self._thread = threading.Thread(target=self._loop.run_forever, name="crossdock-client", daemon=True)
        self._thread.start()

    @classmethod
    def borrow(cls) -> SharedLoop:
        with cls._lock:
            shared = cls._now = cls._now or cls()
            shared._users += 1
            return shared

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that made it: its thread is not here."""
        return self._made_in is not SharedLoop._process

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            SharedLoop._now = None
        self.start(_all_ended()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @classmethod
    def forget(cls) -> None:
        """After a fork: the thread is not in this process."""
        cls._lock, cls._now, cls._process = threading.Lock(), None, object()


os.register_at_fork(after_in_child=SharedLoop.forget)


async def _all_ended() -> None:
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
