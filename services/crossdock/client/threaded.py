"""What a client does for callers in threads: the event loop that all of them share, and calls by open streams.

A `StreamCall` packs requests and reads answers in its caller's thread; the loop only writes packets and matches answers
by id. Whatever has to be opened, or tried again, is left to the coroutines of `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from crossdock.client.errors import ClientError, DeadlineExceeded, Overloaded, Unavailable
from crossdock.client.shares import ForwardCall, Response, Share, read_rows, rows_like
from crossdock.client.stream import WorkerStream, answered
from crossdock.common.tasks import call_in_loop
from crossdock.protocol.v1 import expert_pb2

Result = TypeVar("Result")
Failed = dict[Share, ClientError]
"""Shares that another worker, or a later time, may serve, and why not this one now."""


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
        """The loop, for one more user."""
        with cls._lock:
            shared = cls._now = cls._now or cls()
            shared._users += 1
            return shared

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that made it: its thread is not here."""
        return self._made_in is not SharedLoop._process

    def give_back(self) -> None:
        """One user less."""
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
        """Run a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @classmethod
    def forget(cls) -> None:
        """After a fork: the thread is not in this process."""
        cls._lock, cls._now, cls._process = threading.Lock(), None, object()


os.register_at_fork(after_in_child=SharedLoop.forget)


async def _all_ended() -> None:
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


class StreamCall:
    """A batch whose shares go by streams. One thread.

    Args:
        batch: the call.
        credit: called for each answer.

    Attributes:
        out: [T, H], filled by `read`.
    """

    def __init__(self, batch: ForwardCall, credit: Callable[[], None]) -> None:
        self._batch, self._credit, self._timeout_s = batch, credit, batch.deadline - time.monotonic()
        self._sent: list[tuple[Share, WorkerStream, int, concurrent.futures.Future[Response]]] = []
        self.out: torch.Tensor

    def send(self, share: Share, stream: WorkerStream, request: expert_pb2.ForwardRequest) -> None:
        """Send one share; `request` without tensors. Raises InvalidRequest."""
        whole = len(self._batch.parts[0]) == share.stop - share.start
        parts = self._batch.parts if whole else [part[share.start : share.stop] for part in self._batch.parts]
        try:
            number, packet = stream.packed(request, dict(zip(("x", "topk_ids", "topk_weights"), parts, strict=True)))
        except BaseException:
            self._withdraw()
            raise
        answer: concurrent.futures.Future[Response] = concurrent.futures.Future()
        self._sent.append((share, stream, number, answer))
        call_in_loop(stream.loop, stream.send, number, packet, answer)

    def read(self) -> Failed:
        """Wait for all answers, until the deadline of the batch. Raises ClientError: what no retry cures."""
        self.out, failed = rows_like(self._batch.parts[0]), Failed()
        try:
            while self._sent:
                share, stream, _, answer = self._sent[0]
                left_s = self._batch.deadline - time.monotonic()
                try:
                    response = answered(answer.result(max(0.0, left_s)))
                    read_rows(response, self.out[share.start : share.stop])
                    self._batch.models[share] = response.message.model
                    self._credit()
                except (Unavailable, Overloaded) as error:
                    failed[share] = error
                except DeadlineExceeded:  # a TimeoutError, too: the worker's answer
                    raise
                except TimeoutError:
                    raise stream.late(self._timeout_s) from None
                self._sent.pop(0)
        finally:
            self._withdraw()
        return failed

    def _withdraw(self) -> None:
        """Cancel the requests that have no answer yet."""
        for _, stream, number, _ in self._sent:
            call_in_loop(stream.loop, stream.withdraw, number)
        self._sent = []
