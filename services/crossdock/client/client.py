"""Python clients of the expert service, for asyncio and for threads.

    client = Client("127.0.0.1:7400")                    # a control plane, or one worker
    y = client.forward(layer, x, topk_ids, topk_weights)  # [T, H], dtype of x

A batch is spread over the ranks, each with a share of the tokens, in requests of at most REQUEST_BYTES. Streams to the
workers stay open. Views are followed: requests in flight to a lost rank are retried until their deadline (forward is
idempotent). A request that a worker refuses for lack of resources is retried alone at the next worker, within a budget
(retry.py).

Letters: T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tenacity
import torch

from crossdock.client.directory import Directory, ServingWorkers
from crossdock.client.errors import ClientError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from crossdock.client.retry import RetryBudget
from crossdock.client.stream import WorkerStream
from crossdock.common.security import security_of
from crossdock.common.settings import SecurityConfig
from crossdock.common.tracing import current_traceparent
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2

Result = TypeVar("Result")

MAX_MESSAGE_BYTES = 64 << 20
"""Largest accepted answer."""
REQUEST_BYTES = (2 << 20) - (64 << 10)
"""A larger share is sent as several requests: a worker can start before all of it has arrived, and accepts messages of
at most its `max_message_bytes`, 2 MiB by default."""
_BUDGET_S = 0.1
"""Polling interval of a request that waits for a token of the retry budget; randomized down to half."""
AVOID_S = 2.0
"""How long a worker with a broken connection is avoided, if there are others: each serves every token."""
MIN_TOKENS_PER_WORKER = 64
"""Smallest share: each costs a message and may cost a step."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Share:
    """Rows start..stop of a batch, for the worker at position `worker` of the list."""

    worker: int
    start: int
    stop: int


def split(num_tokens: int, num_workers: int, first: int, max_tokens: int, min_tokens: int) -> list[Share]:
    """Cut a batch into even shares, one per worker, and shares into requests. Pure.

    Args:
        num_tokens: T > 0.
        num_workers: number of workers.
        first: worker of the first share.
        max_tokens: limit of one request.
        min_tokens: smallest share; fewer workers are used if necessary.
    """
    parts = max(1, min(num_workers, num_tokens // min_tokens))
    bounds = [part * num_tokens // parts for part in range(parts + 1)]
    return [
        Share((first + part) % num_workers, start, min(start + max_tokens, bounds[part + 1]))
        for part in range(parts)
        for start in range(bounds[part], bounds[part + 1], max_tokens)
    ]


class AsyncClient:
    """For asyncio: use it inside one event loop, from any number of tasks. `Client` is the same for threads.

    Args:
        target: host:port of a control plane (its workers are found and followed; several, separated by commas, where
            it has replicas), or of one worker.
        retry: retry Unavailable and Overloaded until the deadline.
        min_tokens_per_worker: see MIN_TOKENS_PER_WORKER.
        model: expected fingerprint of the service; empty: any.
        security: certificates and token, for example from `load_security`; None: plain text.
    """

    def __init__(
        self,
        target: str,
        *,
        retry: bool = True,
        min_tokens_per_worker: int = MIN_TOKENS_PER_WORKER,
        model: str = "",
        security: SecurityConfig | None = None,
    ) -> None:
        self._security = security_of(security) if security is not None else None
        self.target, self._retry, self._model = target, retry, model
        self._min_tokens = min_tokens_per_worker
        self._directory: Directory | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._turn = 0
        self._budget = RetryBudget()
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def describe(self, timeout_s: float = 60.0) -> expert_pb2.DescribeResponse:
        """Describe the served model and the group. Raises ClientError."""

        async def attempt(left_s: float) -> expert_pb2.DescribeResponse:
            service = await self._service(left_s)
            return await self._stream(service, 0).describe(left_s)

        return await self._until(attempt, timeout_s)

    async def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        timeout_s: float = 60.0,
    ) -> torch.Tensor:
        """Run the routed experts of one layer.

        Args:
            layer: the layer's number in the model.
            x: [T, H] in the service's dtype.
            topk_ids: int32 or int64 [T, K], logical expert ids; -1 = no expert.
            topk_weights: float [T, K], final: scaling factors are already in.
            timeout_s: deadline of the call, including retries.

        Returns:
            [T, H], dtype and device of x.

        Raises:
            InvalidRequest: a wrong shape, dtype, layer or id.
            Unavailable: the group does not serve (with retry: until the deadline); has the lost ranks.
            DeadlineExceeded: no answer within timeout_s.
            Overloaded: the service refused more work (with retry: until the deadline).
            NotAllowed: the service does not know this caller.
        """
        _check(x, topk_ids, topk_weights)
        if x.shape[0] == 0:
            return x.new_empty(x.shape)
        parts = (x.detach().cpu(), topk_ids.cpu(), topk_weights.detach().float().cpu())
        turn, self._turn = self._turn, self._turn + 1
        deadline, out = time.monotonic() + timeout_s, torch.empty_like(parts[0])
        service = await self._until(self._service, timeout_s)
        shares = split(x.shape[0], len(service.workers), turn, _most_tokens(parts), self._min_tokens)
        await _all([self._share(layer, parts, share, out, deadline - time.monotonic()) for share in shares])
        return out.to(x.device)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))
        if self._directory is not None:
            await self._directory.close()

    async def _until(self, attempt: Callable[[float], Awaitable[Result]], timeout_s: float) -> Result:
        """Call attempt(seconds left) until it succeeds, fails permanently, or the deadline passes."""
        deadline = time.monotonic() + timeout_s
        last: ClientError | None = None

        async def once() -> Result:
            nonlocal last
            if isinstance(last, Overloaded):
                await self._wait_for_budget(last, deadline)
            if self._closed:
                raise ClientError("the client is closed")
            try:
                return await attempt(max(0.0, deadline - time.monotonic()))
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error}; before that: {last}" if last else str(error)) from last
            except (Unavailable, Overloaded) as error:
                if self._closed:
                    raise ClientError("the client is closed") from error
                last = error
                if isinstance(error, Unavailable) and self._directory is not None:
                    self._directory.recheck()
                raise

        if not self._retry:
            return await once()
        policy = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((Unavailable, Overloaded)),
            stop=tenacity.stop_before_delay(timeout_s),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        return await policy(once)

    async def _share(
        self, layer: int, parts: tuple[torch.Tensor, ...], share: Share, out: torch.Tensor, timeout_s: float
    ) -> None:
        """Compute some rows; each retry goes to the next worker."""
        rows, tries = slice(share.start, share.stop), 0

        async def attempt(left_s: float) -> expert_pb2.ForwardResponse:
            nonlocal tries
            deadline = time.monotonic() + left_s
            service = await self._service(left_s)
            worker, tries = (share.worker + tries) % len(service.workers), tries + 1
            left_s = max(0.0, deadline - time.monotonic())
            request = self._request(layer, tuple(part[rows] for part in parts), left_s)
            return await self._stream(service, worker).forward(request, left_s)

        response = await self._until(attempt, timeout_s)
        self._budget.answered()
        out[rows] = _rows(response, out.dtype, (share.stop - share.start, out.shape[1]))

    async def _wait_for_budget(self, refused: Overloaded, deadline: float) -> None:
        """Wait for a token of the retry budget. Raises `refused` at the deadline."""
        while not self._budget.take():
            if time.monotonic() >= deadline or self._closed:
                raise refused
            await asyncio.sleep(_BUDGET_S * random.uniform(0.5, 1.0))

    def _request(self, layer: int, parts: tuple[torch.Tensor, ...], left_s: float) -> expert_pb2.ForwardRequest:
        x, topk_ids, topk_weights = (wire.encode(part) for part in parts)
        return expert_pb2.ForwardRequest(
            layer=layer,
            x=x,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            timeout_ms=max(1, int(left_s * 1000)),
            model=self._model,
            traceparent=current_traceparent(),
        )

    async def _service(self, left_s: float) -> ServingWorkers:
        if self._directory is None:
            self._directory = Directory(self.target, self._security)
        service = await self._directory.service(left_s, wait=self._retry)
        if not service.workers:
            raise Unavailable(f"the group (epoch {service.epoch}) has no ready worker", (), service.epoch)
        here = {address for _, address in service.workers}
        gone = [address for address, stream in self._streams.items() if address not in here and stream.idle]
        for stream in [self._streams.pop(address) for address in gone]:
            await stream.close()
        return self._without_broken(service)

    def _without_broken(self, service: ServingWorkers) -> ServingWorkers:
        """Without workers that broke recently or do not respond; with all of them if no other is left."""
        since = time.monotonic() - AVOID_S
        streams = self._streams.items()
        broken = {address for address, stream in streams if stream.unresponsive or stream.broken_at > since}
        left = tuple(worker for worker in service.workers if worker[1] not in broken)
        return replace(service, workers=left) if left else service

    def _stream(self, service: ServingWorkers, worker: int) -> WorkerStream:
        rank, address = service.workers[worker]
        stream = self._streams.get(address)
        if stream is None:
            stream = WorkerStream(address, rank, service.epoch, MAX_MESSAGE_BYTES, self._security)
            self._streams[address] = stream
        stream.epoch = service.epoch
        return stream


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
    ) -> None:
        self._client = AsyncClient(
            target, retry=retry, min_tokens_per_worker=min_tokens_per_worker, model=model, security=security
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
        return self._run(self._client.forward(layer, x, topk_ids, topk_weights, timeout_s=timeout_s))

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


async def _all(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _most_tokens(parts: tuple[torch.Tensor, ...]) -> int:
    """Rows that fit in one request."""
    row_bytes = sum(part.shape[1] * part.element_size() for part in parts)
    return max(1, REQUEST_BYTES // max(1, row_bytes))


def _check(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    for name, tensor, dtypes in (
        ("x", x, _FLOATS),
        ("topk_ids", topk_ids, _INTS),
        ("topk_weights", topk_weights, _FLOATS),
    ):
        if tensor.ndim != 2:
            raise InvalidRequest(f"{name}: expected 2 dimensions, got {tensor.ndim}")
        if tensor.dtype not in dtypes:
            raise InvalidRequest(f"{name}: expected dtype one of {dtypes}, got {tensor.dtype}")
    expected = (x.shape[0], topk_ids.shape[1])
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != expected:
            raise InvalidRequest(f"{name}: expected {list(expected)}, got {list(tensor.shape)}")


def _rows(response: expert_pb2.ForwardResponse, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    try:
        rows = wire.decode(response.y, name="y", dtypes=[dtype], ndim=2)
    except wire.WireError as error:
        raise ClientError(f"answer: {error}") from error
    if tuple(rows.shape) != shape:
        raise ClientError(f"answer: y: expected {list(shape)}, got {list(rows.shape)}")
    return rows
