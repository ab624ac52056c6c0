"""The client for threads: AsyncClient in the event loop that all of them share.

A call that goes through request buffers stays in its caller's thread; of one by gRPC only the writing and the matching
of answers are done in the loop.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import torch

from crossdock.client.buffer_pool import Way
from crossdock.client.client import MIN_TOKENS_PER_WORKER, AsyncClient
from crossdock.client.direct import QUIET_S, DirectCall
from crossdock.client.errors import ClientError, Overloaded, Unavailable
from crossdock.client.shares import ForwardCall, check, on_host
from crossdock.client.threaded import SharedLoop
from crossdock.common.settings import SecurityConfig
from crossdock.protocol.v1 import expert_pb2

Result = TypeVar("Result")


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
        way: Way = "auto",
    ) -> None:
        self._client = AsyncClient(
            target,
            retry=retry,
            min_tokens_per_worker=min_tokens_per_worker,
            model=model,
            security=security,
            way=way,
        )
        self._loop, self._open = SharedLoop.borrow(), set[concurrent.futures.Future[Any]]()
        self._lock, self._closed, self._ended = threading.Lock(), False, threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        """The target it was made with."""
        return self._client.target

    def describe(self, timeout_s: float = 60.0) -> expert_pb2.DescribeResponse:
        """See AsyncClient.describe."""
        self._check_process()
        return self._run(self._client.describe(timeout_s))

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
        check(layer, x, topk_ids, topk_weights, timeout_s)
        if x.shape[0] == 0:
            return x.new_empty(x.shape)
        self._check_process()
        batch = self._client.batch_of(layer, on_host(x, topk_ids, topk_weights), timeout_s)
        call = self._client.begin(batch)
        out = self._read(call) if call is not None else self._streamed(batch)
        if out is None:
            out = self._run(self._client.by_stream(batch, call.refused if call is not None else None))
        if batch.stale():
            self._run(self._client.unmix(batch, out))
        return out if x.is_cpu else out.to(x.device)

    def _check_process(self) -> None:
        if self._loop.is_parents:
            raise ClientError("client: expected a process that spawn or forkserver started, got one that forked")

    def _streamed(self, batch: ForwardCall) -> torch.Tensor | None:
        """The rows of a batch by streams that are open. None: one is not."""
        with self._under_way():
            call = self._client.begin_stream(batch)
            failed = call.read() if call is not None else {}
        if call is None:
            return None
        if failed:
            self._run(self._client.again(batch, failed, call.out))
        return call.out

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        """A call in the block is one that `close` waits for."""
        call = concurrent.futures.Future[None]()
        with self._lock:
            if self._closed:
                raise ClientError("the client is closed")
            self._open.add(call)
        try:
            yield
        finally:
            self._open.discard(call)
            call.set_result(None)

    def _read(self, call: DirectCall) -> torch.Tensor | None:
        """The rows of a call, waited for in this thread at first. None: as `AsyncClient.finish`."""
        try:
            if call.read(QUIET_S):
                return call.out
        except (Unavailable, Overloaded):
            if not self._client.retries:
                raise
            return None
        return self._run(self._client.finish(call))

    def close(self) -> None:
        """Close all connections. Idempotent. In a process that forked they stay, and its parent's calls go on."""
        if self._loop.is_parents:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            end = self._loop.start(self._client.close()) if first else None
        if end is None:
            self._ended.wait()
            return
        try:
            end.result()
            concurrent.futures.wait(set(self._open))
        finally:
            self._loop.give_back()
            self._ended.set()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        with self._lock:  # a call that is begun is one that `close` waits for
            if self._closed:
                coroutine.close()
                raise ClientError("the client is closed")
            future = self._loop.start(coroutine)
            self._open.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._open.discard(future)
