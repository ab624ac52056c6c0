"""ExpertService over gRPC: streams of requests become `Work` for the engine, its answers go back in any order.

A bad request is answered in the stream (`Error` with a grpc status code) and the stream stays up; only bytes that are
no message at all, or a message over the size limit, end it.

A client is one stream. Its requests are read while it has less than `max_queued_bytes_per_client` here and reads its
answers; then one more is read and kept in hand, and the client feels gRPC's flow control (cancel messages behind that
one wait too, but deadlines and hanging up work at once). Past `max_queued_bytes` of all clients together, requests are
refused with RESOURCE_EXHAUSTED.
"""
# ruff: noqa: N802  (the methods of a servicer are named in expert.proto)

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from crossdock import wire
from crossdock.common import log, rpc
from crossdock.common.access import Limiter
from crossdock.common.config import WorkerConfig
from crossdock.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.admission import Door, Tokens
from crossdock.worker.batcher import Budget
from crossdock.worker.engine import Engine
from crossdock.worker.telemetry import Telemetry
from crossdock.worker.work import Done, Failure, Refused, Work

SERVICE_NAME = expert_pb2.DESCRIPTOR.services_by_name["ExpertService"].full_name

_log = log.get(__name__)

_MAX_UNREAD = 1024
"""Answers that a client may leave unread before its stream is read no further; errors cost no bytes of the budget."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What every stream uses."""

    config: WorkerConfig
    door: Door
    engine: Engine
    telemetry: Telemetry
    budget: Budget


class ExpertService(expert_pb2_grpc.ExpertServiceServicer):
    """The servicer.

    Args:
        backend: where requests go.
        describe: the answer to Describe, now.
        drain: finishes what is queued and leaves the group.
    """

    def __init__(
        self,
        backend: Backend,
        describe: Callable[[], expert_pb2.DescribeResponse],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self._backend, self._describe, self._drain = backend, describe, drain
        self._streams: set[_Stream] = set()
        self._none_left = asyncio.Event()
        self._ended: rpc.CallError | None = None

    async def end(self, error: rpc.CallError, timeout_s: float) -> None:
        """End every stream with `error` once its client has taken the answers that are there already. Returns when no
        stream is left, or after `timeout_s`; a stream that comes later ends at once."""
        self._ended = error
        for stream in self._streams:
            stream.end(error)
        if self._streams:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), timeout_s)

    async def Describe(self, request: expert_pb2.DescribeRequest, context: Any) -> expert_pb2.DescribeResponse:
        """What is served here, and how the group is."""
        return self._describe()

    async def Drain(self, request: expert_pb2.DrainRequest, context: Any) -> expert_pb2.DrainResponse:
        """Answered when the queue is empty and the group was left; the process ends then."""
        await self._drain()
        return expert_pb2.DrainResponse()

    async def Forward(
        self, requests: AsyncIterator[expert_pb2.ForwardRequest], context: Any
    ) -> AsyncIterator[expert_pb2.ForwardResponse]:
        """Many requests in flight, answered in any order."""
        if self._ended is not None:
            raise self._ended
        stream = _Stream(self._backend)
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            async for response in stream.answers():
                yield response
        finally:
            reader.cancel()
            stream.hang_up()
            self._streams.discard(stream)
            if self._ended is not None and not self._streams:
                self._none_left.set()


@dataclass(slots=True)
class _Pending:
    """A request in the engine: its work, the bytes that it holds, its deadline's timer."""

    work: Work
    num_bytes: int
    timer: asyncio.TimerHandle


@dataclass(frozen=True, slots=True)
class _Answer:
    """What goes back; `num_bytes` are given back once it was written."""

    request_id: int
    answer: Done | Failure
    num_bytes: int = 0


class _Stream:
    """One client's stream. Lives on the event loop; only `reply` callbacks come from the engine's thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._events: asyncio.Queue[_Answer | rpc.CallError | None] = asyncio.Queue()
        self._held_bytes = 0
        self._room = asyncio.Event()
        self._read_all = False
        self._limiter = Limiter(backend.config.max_requests_per_s)

    async def read(self, requests: AsyncIterator[expert_pb2.ForwardRequest]) -> None:
        """Take requests until the client has no more. Bytes that are no message end the stream."""
        try:
            async for request in requests:
                while not (request.cancel or self._has_room()):
                    self._room.clear()
                    await self._room.wait()
                self._take(request)
        except Exception as error:
            _log.warning("stream ended: unreadable request", error=error)
            self._events.put_nowait(rpc.InvalidArgument(f"request: not a ForwardRequest ({type(error).__name__})"))
        self._read_all = True
        self._events.put_nowait(None)

    async def answers(self) -> AsyncIterator[expert_pb2.ForwardResponse]:
        """Answers as they come, until the client has sent everything and has every answer."""
        while not (self._read_all and not self._pending and self._events.empty()):
            event = await self._events.get()
            if isinstance(event, rpc.CallError):
                raise event
            if event is not None:
                yield _response(event)
                self._release(event.num_bytes)
                self._room.set()

    def end(self, error: rpc.CallError) -> None:
        """Raise `error` out of `answers`, after what is there to be told."""
        self._events.put_nowait(error)

    def hang_up(self) -> None:
        """The stream is over: nobody waits for its requests any more."""
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.timer.cancel()
            self._backend.engine.withdraw(each.work, Failure(grpc.StatusCode.CANCELLED, "the client hung up"))
            self._backend.telemetry.answered(grpc.StatusCode.CANCELLED, 0, 0.0)
        self._release(self._held_bytes)

    def _take(self, request: expert_pb2.ForwardRequest) -> None:
        if request.cancel:
            self._withdraw(request.id, Failure(grpc.StatusCode.CANCELLED, "cancelled by the client"))
            return
        try:
            if not self._limiter.allow(self):
                limit = f"requests: expected at most {self._limiter.rate:g} a second on one stream, got more"
                raise _refused(grpc.StatusCode.RESOURCE_EXHAUSTED, limit)
            if request.id in self._pending:
                raise _refused(grpc.StatusCode.INVALID_ARGUMENT, f"id: {request.id} is in flight on this stream")
            self._submit(request, self._backend.door.admit(request))
        except Refused as refused:
            self._backend.telemetry.answered(refused.failure.code, 0, 0.0)
            self._events.put_nowait(_Answer(request.id, refused.failure))

    def _submit(self, request: expert_pb2.ForwardRequest, tokens: Tokens) -> None:
        """Give a checked request to the engine. Raises Refused."""
        backend, request_id = self._backend, request.id
        timeout_s = request.timeout_ms * 1e-3 or backend.config.request_timeout_s
        now_ns = time.monotonic_ns()
        work = Work(
            client=self,
            layer=request.layer,
            x=tokens.x,
            topk_ids=tokens.topk_ids,
            topk_weights=tokens.topk_weights,
            deadline_ns=now_ns + int(timeout_s * 1e9),
            arrived_ns=now_ns,
            reply=lambda answer: self._reply(request_id, answer),
        )
        if not backend.budget.charge(self, tokens.num_bytes):
            limit, size = backend.config.max_queued_bytes, backend.budget.num_bytes + tokens.num_bytes
            message = f"queue: expected at most {limit} bytes waiting here, this request would make it {size}"
            raise _refused(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"deadline: not served within {timeout_s:g} s")
        timer = self._loop.call_later(timeout_s, self._withdraw, request_id, late)
        self._pending[request_id] = _Pending(work, tokens.num_bytes, timer)
        self._held_bytes += tokens.num_bytes
        try:
            backend.engine.submit(work)
        except Refused:
            del self._pending[request_id]
            timer.cancel()
            self._release(tokens.num_bytes)
            raise

    def _withdraw(self, request_id: int, failure: Failure) -> None:
        if request_id in self._pending:
            self._backend.engine.withdraw(self._pending[request_id].work, failure)

    def _reply(self, request_id: int, answer: Done | Failure) -> None:
        """Called by the engine, from any thread. A loop that is closed already has nobody to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answered, request_id, answer)

    def _answered(self, request_id: int, answer: Done | Failure) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        pending.timer.cancel()
        code = grpc.StatusCode.OK if isinstance(answer, Done) else answer.code
        seconds = (time.monotonic_ns() - pending.work.arrived_ns) * 1e-9
        self._backend.telemetry.answered(code, pending.work.num_tokens, seconds)
        self._events.put_nowait(_Answer(request_id, answer, pending.num_bytes))

    def _release(self, num_bytes: int) -> None:
        if num_bytes:
            self._held_bytes -= num_bytes
            self._backend.budget.release(self, num_bytes)
            self._room.set()

    def _has_room(self) -> bool:
        return self._events.qsize() < _MAX_UNREAD and self._backend.budget.has_room(self)


def _response(event: _Answer) -> expert_pb2.ForwardResponse:
    answer = event.answer
    if isinstance(answer, Failure):
        error = expert_pb2.Error(
            code=rpc.code_number(answer.code),
            message=answer.message,
            lost_ranks=answer.lost_ranks,
            epoch=answer.epoch,
        )
        return expert_pb2.ForwardResponse(id=event.request_id, error=error)
    timing = expert_pb2.Timing(
        queue_ns=answer.timing.queue_ns,
        dispatch_ns=answer.timing.dispatch_ns,
        experts_ns=answer.timing.experts_ns,
        combine_ns=answer.timing.combine_ns,
        steps=answer.timing.steps,
    )
    return expert_pb2.ForwardResponse(id=event.request_id, y=wire.encode(answer.y), timing=timing)


def _refused(code: grpc.StatusCode, message: str) -> Refused:
    return Refused(Failure(code, message))
