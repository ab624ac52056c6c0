"""The Python client of the expert service for asyncio; blocking.py has the one for threads.

    client = Client("127.0.0.1:7400")                    # a control plane, or one worker
    y = client.forward(layer, x, topk_ids, topk_weights)  # [T, H], dtype of x

A batch is spread over the ranks, each with a share of the tokens, in requests of at most REQUEST_BYTES. To a worker of
this host the tensors go through shared memory, to others over a TCP connection of their own where there is one
(buffer_pool.py), without any setting; else through a stream. Views are followed: requests in flight to a lost rank are
retried until their deadline (forward is idempotent). A request that a worker refuses for lack of resources is retried
alone at the next worker, within a budget (retry.py).

Letters: T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar, get_args

import tenacity
import torch

from crossdock.client.buffer_pool import BufferPool, Way
from crossdock.client.direct import DirectCall
from crossdock.client.directory import Directory, ServingWorkers
from crossdock.client.errors import ClientError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from crossdock.client.opened_buffer import RequestBuffer
from crossdock.client.retry import RetryBudget
from crossdock.client.shares import (
    MAX_TIMEOUT_S,
    ForwardCall,
    Parts,
    Response,
    Share,
    check,
    check_timeout,
    cut,
    most_tokens,
    on_host,
    read_rows,
    rows_like,
    split,
)
from crossdock.client.stream import WorkerStream
from crossdock.client.threaded import Failed, StreamCall
from crossdock.common.security import security_of
from crossdock.common.settings import SecurityConfig
from crossdock.common.tasks import background, call_in_loop, end_tasks
from crossdock.common.tracing import current_traceparent
from crossdock.protocol.request_buffer import Places
from crossdock.protocol.v1 import expert_pb2

Result = TypeVar("Result")

MAX_MESSAGE_BYTES = 64 << 20
"""Largest accepted answer."""
_BUDGET_S = 0.1
"""Polling interval of a request that waits for a token of the retry budget; randomized down to half."""
AVOID_S = 2.0
"""How long a worker with a broken connection is avoided, if there are others: each serves every token."""
MIN_TOKENS_PER_WORKER = 64
"""Smallest share: each costs a message and may cost a step."""


class AsyncClient:
    """For asyncio: use it inside one event loop, from any number of tasks. `Client` is the same for threads.

    Args:
        target: host:port of a control plane (its workers are found and followed; several, separated by commas, where
            it has replicas), or of one worker.
        retry: retry Unavailable and Overloaded until the deadline.
        min_tokens_per_worker: see MIN_TOKENS_PER_WORKER.
        model: fingerprint of the only checkpoint whose rows are wanted; empty: any.
        security: certificates and token, for example from `load_security`; None: plain text.
        way: of the tensors. auto: memory shared with workers of this host, a TCP connection to others, or else gRPC;
            shared, tcp: this one or gRPC; grpc: gRPC alone. With `security` there is no tcp, which is plain text.
    """

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
        if min_tokens_per_worker < 1:
            raise InvalidRequest(f"min_tokens_per_worker: expected 1 or more, got {min_tokens_per_worker}")
        if way not in get_args(Way):
            raise InvalidRequest(f"way: expected one of {', '.join(get_args(Way))}, got {way!r}")
        self._security = security_of(security) if security is not None else None
        self.target, self._retry, self._model = target, retry, model
        self._min_tokens = min_tokens_per_worker
        self._directory: Directory | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._kept: ServingWorkers | None = None
        self._way: Way = way
        self._pool: BufferPool | None = None
        self._turns = itertools.count()
        self._budget = RetryBudget()
        self._closed = False

    @property
    def retries(self) -> bool:
        """Whether Unavailable and Overloaded are retried."""
        return self._retry

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def describe(self, timeout_s: float = 60.0) -> expert_pb2.DescribeResponse:
        """Describe the served model and the group. Raises ClientError."""
        check_timeout(timeout_s)

        async def attempt(left_s: float) -> expert_pb2.DescribeResponse:
            return await self._stream(await self._service(left_s), 0).describe(left_s)

        return await self._until(attempt, min(timeout_s, MAX_TIMEOUT_S))

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
            timeout_s: deadline of the call, including retries; at most MAX_TIMEOUT_S.

        Returns:
            [T, H], dtype and device of x.

        Raises:
            InvalidRequest: a wrong shape, dtype, layer, id or timeout_s.
            Unavailable: the group does not serve (with retry: until the deadline); has the lost ranks.
            DeadlineExceeded: no answer within timeout_s.
            Overloaded: the service refused more work (with retry: until the deadline).
            NotAllowed: the service does not know this caller.
            ModelMismatch: the layer has another checkpoint than `model` of this client.
        """
        check(layer, x, topk_ids, topk_weights, timeout_s)
        if x.shape[0] == 0:
            return x.new_empty(x.shape)
        batch = self.batch_of(layer, on_host(x, topk_ids, topk_weights), timeout_s)
        call = self.begin(batch)
        out = await self.finish(call) if call is not None else None
        if out is None:
            out = await self.by_stream(batch, call.refused if call is not None else None)
        await self.unmix(batch, out)
        return out.to(x.device)

    def batch_of(self, layer: int, parts: Parts, timeout_s: float) -> ForwardCall:
        """One call; its shares begin at the next worker."""
        return ForwardCall(layer, parts, time.monotonic() + min(timeout_s, MAX_TIMEOUT_S), next(self._turns), {})

    def begin(self, batch: ForwardCall) -> DirectCall | None:
        """Send a batch through request buffers, if there is one for each share now. Any thread."""
        service = self._directory.now if self._directory is not None else None
        if self._pool is None or service is None or not service.workers or self._closed:
            return None
        x, ids, _ = batch.parts
        shares = split(x.shape[0], len(service.workers), batch.turn, x.shape[0], self._min_tokens)
        found = list[tuple[Share, RequestBuffer]]()
        for share in shares:
            address = service.workers[share.worker][1]
            num_bytes = Places.of(share.stop - share.start, x.shape[1], ids.shape[1], x.element_size()).num_bytes
            buffer = self._pool.take(address, num_bytes)
            if buffer is None:
                call_in_loop(self._pool.loop, self._open_buffer, service, share.worker, num_bytes)
            else:
                found.append((share, buffer))
        call = DirectCall(self._pool, batch, found)
        if len(found) < len(shares):
            call.give_back()
            return None
        return call if call.send(self._model) else None

    async def finish(self, call: DirectCall) -> torch.Tensor | None:
        """The rows of a begun call; None: it failed in a way that another worker, or a later time, may cure."""
        try:
            await call.finish(self._is_alive)
        except (Unavailable, Overloaded):
            if not self._retry:
                raise
            return None
        self._budget.answered()
        return call.out

    def begin_stream(self, batch: ForwardCall) -> StreamCall | None:
        """Send a batch by the streams that are open. None: one is not, or workers have changed. Any thread. Raises
        ClientError."""
        service = self._directory.now if self._directory is not None else None
        if service is None or service is not self._kept or not service.workers or self._closed:
            return None
        service, x, streams = self._without_broken(service), batch.parts[0], list[tuple[Share, WorkerStream]]()
        for share in split(x.shape[0], len(service.workers), batch.turn, most_tokens(batch.parts), self._min_tokens):
            stream = self._streams.get(service.workers[share.worker][1])
            if stream is None:
                return None
            stream.epoch = service.epoch
            streams.append((share, stream))
        call = StreamCall(batch, self._budget.answered)
        for share, stream in streams:
            call.send(share, stream, self._request(batch.layer, batch.deadline - time.monotonic()))
        return call

    async def again(self, batch: ForwardCall, failed: Failed, out: torch.Tensor) -> None:
        """Compute the rows of shares that have failed once. Raises ClientError; at once, if nothing is retried."""
        for error in failed.values():
            if not self._retry:
                raise error
            if isinstance(error, Unavailable) and self._directory is not None:
                self._directory.recheck()
        await _all([self._share(batch, share, out, error) for share, error in failed.items()])

    async def unmix(self, batch: ForwardCall, out: torch.Tensor) -> None:
        """Compute shares again that a switch of the layer's checkpoint has parted from the others, until all rows are
        of one. Raises ClientError."""
        while stale := batch.stale():
            for share in stale:
                del batch.models[share]
            requests = [request for share in stale for request in cut(share, most_tokens(batch.parts))]
            await _all([self._share(batch, request, out, None) for request in requests])

    async def by_stream(self, batch: ForwardCall, refused: Overloaded | None = None) -> torch.Tensor:
        """The rows of a batch over gRPC, with retries. refused: it was, before; so this is a retry already."""
        batch.models.clear()
        parts, left_s, knows_workers = batch.parts, max(0.0, batch.deadline - time.monotonic()), self._kept is not None
        service, out = await self._until(self._service, left_s), rows_like(parts[0])
        call = self.begin(batch) if not knows_workers else None  # its first call opens buffers, too
        if call is not None and (answered := await self.finish(call)) is not None:
            return answered
        refused = refused if call is None else call.refused
        shares = split(out.shape[0], len(service.workers), batch.turn, most_tokens(parts), self._min_tokens)
        await _all([self._share(batch, share, out, refused, service) for share in shares])
        return out

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))
        if self._directory is not None:
            await self._directory.close()

    async def _until(
        self, attempt: Callable[[float], Awaitable[Result]], timeout_s: float, last: ClientError | None = None
    ) -> Result:
        """Call attempt(seconds left) until it succeeds, fails permanently, or the deadline passes. last: the error of
        an attempt before."""
        deadline = time.monotonic() + timeout_s

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

        try:
            return await once()  # as a rule the only one: a policy costs as much as the rest of a call's client
        except (Unavailable, Overloaded) as error:
            if not self._retry:
                raise
            failed: list[ClientError] = [error]

        async def again() -> Result:
            if failed:
                raise failed.pop()
            return await once()

        return await _retrying(deadline - time.monotonic())(again)

    async def _share(
        self,
        batch: ForwardCall,
        share: Share,
        out: torch.Tensor,
        failed: ClientError | None,
        first: ServingWorkers | None = None,
    ) -> None:
        """Compute some rows; each retry goes to the next worker. failed: it is one already. first: who serves now."""
        rows, tries = slice(share.start, share.stop), int(failed is not None)

        async def attempt(left_s: float) -> Response:
            nonlocal tries, first
            deadline = time.monotonic() + left_s
            service, first = first or await self._service(left_s), None
            worker, tries = (share.worker + tries) % len(service.workers), tries + 1
            left_s = max(0.0, deadline - time.monotonic())
            tensors = dict(zip(("x", "topk_ids", "topk_weights"), (part[rows] for part in batch.parts), strict=True))
            return await self._stream(service, worker).forward(self._request(batch.layer, left_s), tensors, left_s)

        response = await self._until(attempt, batch.deadline - time.monotonic(), failed)
        self._budget.answered()
        read_rows(response, out[rows])
        batch.models[share] = response.message.model

    async def _wait_for_budget(self, refused: Overloaded, deadline: float) -> None:
        """Wait for a token of the retry budget. Raises `refused` at the deadline."""
        while not self._budget.take():
            if time.monotonic() >= deadline or self._closed:
                raise refused
            await asyncio.sleep(_BUDGET_S * random.uniform(0.5, 1.0))

    def _request(self, layer: int, left_s: float) -> expert_pb2.ForwardRequest:
        """Without tensors."""
        timeout_ms, trace = max(1, int(left_s * 1000)), current_traceparent()
        return expert_pb2.ForwardRequest(layer=layer, timeout_ms=timeout_ms, model=self._model, traceparent=trace)

    async def _service(self, left_s: float) -> ServingWorkers:
        if self._directory is None:
            self._directory = Directory(self.target, self._security)
            if self._way != "grpc":
                self._pool = BufferPool(asyncio.get_running_loop(), self._way, guarded=self._security is not None)
        service = self._kept = await self._directory.service(left_s, wait=self._retry)
        if not service.workers:
            raise Unavailable(f"the group (epoch {service.epoch}) has no ready worker", (), service.epoch)
        here = {address for _, address in service.workers}
        if self._pool is not None:
            self._pool.keep(here)
        gone = [address for address, stream in self._streams.items() if address not in here and stream.idle]
        for stream in [self._streams.pop(address) for address in gone]:
            await stream.close()
        return self._without_broken(service)

    def _without_broken(self, service: ServingWorkers) -> ServingWorkers:
        """Without workers that broke recently or do not respond; with all of them if no other is left."""
        since = time.monotonic() - AVOID_S
        streams = tuple(self._streams.items())
        broken = {address for address, stream in streams if stream.unresponsive or stream.broken_at > since}
        left = tuple(worker for worker in service.workers if worker[1] not in broken) if broken else ()
        return replace(service, workers=left) if left else service

    def _open_buffer(self, service: ServingWorkers, worker: int, num_bytes: int) -> None:
        """Open one more request buffer of a worker, beside the calls."""
        pool, address = self._pool, service.workers[worker][1]
        if pool is not None and not self._closed:
            stream = self._stream(service, worker)
            if pool.claim(address, num_bytes):
                background(pool.open_one(stream, num_bytes), "opening a request buffer")

    async def _is_alive(self, address: str) -> bool:
        stream = self._streams.get(address)
        alive = stream is not None and await stream.is_alive()
        if stream is not None and not alive:
            stream.broken_at = time.monotonic()
        return alive

    def _stream(self, service: ServingWorkers, worker: int) -> WorkerStream:
        rank, address = service.workers[worker]
        stream = self._streams.get(address)
        if stream is None:
            stream = WorkerStream(address, rank, service.epoch, MAX_MESSAGE_BYTES, self._security)
            self._streams[address] = stream
        stream.epoch = service.epoch
        return stream


def _retrying(timeout_s: float) -> tenacity.AsyncRetrying:
    """The policy for errors that a later time may cure."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type((Unavailable, Overloaded)),
        stop=tenacity.stop_before_delay(timeout_s),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        reraise=True,
    )


async def _all(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure cancels the others and is raised."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)
