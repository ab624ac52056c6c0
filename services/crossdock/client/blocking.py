"""The client for threads. A call stays in its caller's thread; the event loop that all clients share finds the workers
and connects to them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from crossdock.client.client import MIN_TOKENS_PER_WORKER, Requests
from crossdock.client.errors import ClientError
from crossdock.client.shares import rows_of_call
from crossdock.common.settings import SecurityConfig
from crossdock.protocol.v1 import expert_pb2

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

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The same, until it has ended: its result. Raises ClientError: the client was closed meanwhile."""
        future = self.start(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientError("the client is closed") from None
        except BaseException:  # a signal in this thread, say: nobody waits for it any more
            future.cancel()
            raise

    @classmethod
    def forget(cls) -> None:
        """After a fork: the thread is not in this process."""
        cls._lock, cls._now, cls._process = threading.Lock(), None, object()


os.register_at_fork(after_in_child=SharedLoop.forget)


async def _all_ended() -> None:
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


class Client:
    """Thread-safe client. Arguments as AsyncClient. It stays with the process that made it, not with one that forked:
    start processes that call by spawn or forkserver."""

    def __init__(
        self,
        target: str,
        *,
        retry: bool = True,
        min_tokens_per_worker: int = MIN_TOKENS_PER_WORKER,
        model: str = "",
        security: SecurityConfig | None = None,
    ) -> None:
        self._loop, self._changed = SharedLoop.borrow(), threading.Condition()
        try:  # of the loop, not of this: nothing here refers back to it
            self._requests = Requests(target, retry, min_tokens_per_worker, model, security, self._loop.run)
        except BaseException:
            self._loop.give_back()
            raise
        self._num_calls, self._closed, self._ended = 0, False, threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        """The target it was made with."""
        return self._requests.target

    def describe(self, timeout_s: float = 60.0) -> expert_pb2.DescribeResponse:
        """See AsyncClient.describe."""
        self._begin()
        try:
            return self._loop.run(self._requests.describe(timeout_s))
        finally:
            self._end()

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        timeout_s: float = 60.0,
    ) -> torch.Tensor:
        """See AsyncClient.forward."""
        rows = rows_of_call(layer, x, topk_ids, topk_weights, timeout_s)
        if not rows.num_tokens:
            return x.new_empty(x.shape)
        self._begin()
        call = self._requests.forward(self._requests.batch_of(layer, rows, timeout_s))
        try:
            call.send(None)  # to its end: where it waits it blocks
        except StopIteration as end:
            out: torch.Tensor = end.value
            return out if rows.tensors[0] is x else out.to(x.device)  # of a tensor of the host nothing is asked
        finally:
            call.close()
            self._end()
        raise RuntimeError("a call of a client for threads was suspended")

    def close(self) -> None:
        """Close all connections. Idempotent. In a process that forked they stay, and its parent's calls go on."""
        if self._loop.is_parents:
            return
        with self._changed:
            first, self._closed = not self._closed, True
        if not first:
            self._ended.wait()
            return
        try:
            self._loop.start(self._requests.close()).result()
            with self._changed:
                self._changed.wait_for(lambda: not self._num_calls)
        finally:
            self._loop.give_back()
            self._ended.set()

    def _begin(self) -> None:
        """A call that `close` waits for. Raises ClientError."""
        if self._loop.is_parents:
            raise ClientError("client: expected a process that spawn or forkserver started, got one that forked")
        with self._changed:
            if self._closed:
                raise ClientError("the client is closed")
            self._num_calls += 1

    def _end(self) -> None:
        with self._changed:
            self._num_calls -= 1
            if self._closed:
                self._changed.notify_all()
