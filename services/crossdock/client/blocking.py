"""The client for threads: AsyncClient in an event loop of its own.

A call that goes through request buffers stays in its caller's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from crossdock.client.client import MIN_TOKENS_PER_WORKER, AsyncClient
from crossdock.client.direct import QUIET_S, DirectCall
from crossdock.client.errors import ClientError, Overloaded, Unavailable
from crossdock.client.shares import check, on_host
from crossdock.common.settings import SecurityConfig
from crossdock.protocol.v1 import expert_pb2

Result = TypeVar("Result")


class Client:
    """Thread-safe client. Arguments as AsyncClient."""

    def __init__(
        self,
        target: str,
        *,
        retry: bool = True,
        min_tokens_per_worker: int = MIN_TOKENS_PER_WORKER,
        model: str = "",
        security: SecurityConfig | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._client = AsyncClient(
            target,
            retry=retry,
            min_tokens_per_worker=min_tokens_per_worker,
            model=model,
            security=security,
            shared_memory=shared_memory,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crossdock-client", daemon=True)
        self._thread.start()
        self._lock, self._closed = threading.Lock(), False

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
        batch = self._client.batch_of(layer, on_host(x, topk_ids, topk_weights), timeout_s)
        call = self._client.begin(batch)
        out = self._read(call) if call is not None else None
        if out is None:
            out = self._run(self._client.by_stream(batch, call.refused if call is not None else None))
        return out.to(x.device)

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
        """Close all connections. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            end = asyncio.run_coroutine_threadsafe(self._end(), self._loop) if first else None
        if end is not None:
            end.result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if end is not None:
            self._loop.close()

    async def _end(self) -> None:
        """Close all connections, and let open calls finish before the loop stops."""
        await self._client.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        with self._lock:  # calls are scheduled before `_end`, which waits for them
            if self._closed:
                coroutine.close()
                raise ClientError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
