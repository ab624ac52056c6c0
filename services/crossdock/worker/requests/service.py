"""ExpertService over gRPC, for any client: streams of requests become `Work` for the engine; answers are sent in any
order. Ours sends frames (request_server.py).

An invalid request is answered in the stream (`Error` with a grpc status code) and the stream stays open; only invalid
bytes or a message over the size limit end it.

A client is the names in its certificate, or else its host: all its streams share one account (budget.py). A stream is
read while its client has less than `max_queued_bytes_per_client` here. Then one that has requests here is read once
more, and keeps that request in hand: cancel messages behind it wait, deadlines and hanging up work at once. One that
has none is not read. The client feels gRPC's flow control. Past `max_queued_bytes` of all clients together, requests
are refused with RESOURCE_EXHAUSTED.

Bytes count until the answer was written, that is until flow control let all of it go. A stream whose client takes no
answer for `request_timeout_s` is given up: all but the answer that is being written is dropped. Where a request waits
or is refused for want of room, the one that has waited longest to write is given up after `STALLED_S`.
"""
# ruff: noqa: N802  (the methods of a servicer are named in expert.proto)

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from crossdock.common import log
from crossdock.common.access import CALL_PERMITS, CALLER, host_of
from crossdock.common.call_errors import CallError, FailedPrecondition, InvalidArgument, ResourceExhausted, code_number
from crossdock.common.tasks import call_in_loop
from crossdock.common.tracing import RequestTrace, TraceContext, context_of_call
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.requests.admission import REQUEST_BYTES, Tokens
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.budget import STALLED_S
from crossdock.worker.requests.request_server import RequestServer
from crossdock.worker.steps import request_trace
from crossdock.worker.steps.work import Done, Failure, Refused, Work
from ep_kernels import LatencySample

SERVICE_NAME = expert_pb2.DESCRIPTOR.services_by_name["ExpertService"].full_name

_log = log.get(__name__)

MAX_STEPS, OPS_PER_STEP = 1000, 3
"""Steps of a trace; a step is an exchange, a dispatch and a combine."""
_MAX_UNREAD = 1024
"""Unread answers of a client before its stream is no longer read; errors cost no bytes of the budget."""


class ExpertService(expert_pb2_grpc.ExpertServiceServicer):
    """The servicer.

    Args:
        requests: request connections of this worker.
        describe: returns the answer to Describe.
        drain: serves queued requests and leaves the group.
    """

    def __init__(
        self,
        backend: Backend,
        requests: RequestServer,
        describe: Callable[[], expert_pb2.DescribeResponse],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self._backend, self._describe, self._drain = backend, describe, drain
        self._streams: set[_Stream] = set()
        self.requests = requests
        self._none_left = asyncio.Event()
        self._ended: CallError | None = None

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def end(self, error: CallError, timeout_s: float) -> None:
        """End every stream with `error` once its client has taken the answers that are there already. Returns when no
        stream is left, or after `timeout_s`; a stream that comes later ends at once."""
        self._ended = error
        for stream in self._streams:
            stream.end(error)
        until = time.monotonic() + timeout_s
        await self.requests.end(timeout_s)
        if self._streams:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), max(0.0, until - time.monotonic()))

    async def Describe(self, request: expert_pb2.DescribeRequest, context: Any) -> expert_pb2.DescribeResponse:
        return self.requests.describe(self._describe())

    async def Drain(self, request: expert_pb2.DrainRequest, context: Any) -> expert_pb2.DrainResponse:
        """Answered when the queue is empty and the group was left; the process ends then."""
        await self._drain()
        return expert_pb2.DrainResponse()

    async def Trace(self, request: expert_pb2.TraceRequest, context: Any) -> expert_pb2.TraceResponse:
        """The last operations, as far as they have been collected."""
        state = self._describe()
        if not state.world_size:
            raise FailedPrecondition("trace: this worker has no rank yet")
        return trace_of(self._backend.telemetry.recent(), request, state.rank, state.epoch)

    async def Forward(
        self, requests: AsyncIterator[expert_pb2.ForwardRequest], context: Any
    ) -> AsyncIterator[expert_pb2.ForwardResponse]:
        """Many requests in flight, answered in any order: ForwardResponse messages."""
        if self._ended is not None:
            raise self._ended
        parent = context_of_call(context) if self._backend.tracer is not None else None
        stream = _Stream(self._backend, _client_of(context), parent)
        self._streams.add(stream)
        if (permits := CALL_PERMITS.get(None)) is not None:
            permits.on_loss(stream.lose)
        stream.reader = asyncio.create_task(stream.read(requests))
        try:
            async for response in stream.answers():
                yield response
        finally:
            stream.reader.cancel()
            stream.reader = None  # breaks the cycle of stream, task and error
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
    """An answer; `num_bytes` are released once it is written."""

    request_id: int
    answer: Done | Failure
    num_bytes: int = 0


class _Stream:
    """One client's stream. Lives on the event loop; only `reply` callbacks come from the engine's thread."""

    def __init__(self, backend: Backend, client: Hashable, parent: TraceContext | None = None) -> None:
        self._backend, self._parent = backend, parent
        self._loop = asyncio.get_running_loop()
        self.reader: asyncio.Task[None] | None = None
        self._pending: dict[int, _Pending] = {}
        self._events: asyncio.Queue[_Answer | CallError | None] = asyncio.Queue()
        self._room = asyncio.Event()
        in_loop = functools.partial(call_in_loop, self._loop)
        self._quota = backend.budget.open(
            client, lambda: in_loop(self._room.set), self.stalled_s, lambda why: in_loop(self.give_up, why)
        )
        self.client = client
        self._read_all = self._given_up = False
        self._writing_since: float | None = None
        self._writing_bytes = 0
        self._alarm: asyncio.TimerHandle | None = None

    async def read(self, requests: AsyncIterator[expert_pb2.ForwardRequest]) -> None:
        """Read requests until the client has no more. Invalid bytes end the stream."""
        request: expert_pb2.ForwardRequest | None = None
        coming = aiter(requests)
        try:
            while True:
                if unread := self._quota.unread_bytes:
                    await self._until_it_fits(unread)
                request = await anext(coming, None)
                if request is None:
                    break
                if not request.cancel:
                    await self._until_it_fits(_num_bytes(request))
                self._take(request)
                request = None  # the next one may take long
        except Exception as error:
            _log.seldom("stream ended: unreadable request", error=error)
            self._events.put_nowait(InvalidArgument(f"request: not a ForwardRequest ({type(error).__name__})"))
        finally:
            del request  # an exception raised here keeps this frame alive
        self._read_all = True
        self._events.put_nowait(None)

    async def _until_it_fits(self, num_bytes: int) -> None:
        """Until there is room for a request of that size, and the client has read enough of its answers."""
        quota = self._quota
        while not (self._events.qsize() < _MAX_UNREAD and quota.has_room(num_bytes)):
            self._backend.budget.make_room(quota, of_client=True)
            self._room.clear()
            quota.wait(num_bytes)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALLED_S):  # wait_for can lose the end of this task
                    await self._room.wait()
        quota.stop_waiting()

    async def answers(self) -> AsyncIterator[expert_pb2.ForwardResponse]:
        """Answers as they come, until the client has sent everything and has every answer. Each is requested
        after the previous one was written."""
        while not (self._read_all and not self._pending and self._events.empty()):
            event = await self._events.get()
            if isinstance(event, CallError):
                raise event
            if event is not None:
                message, num_bytes = _message(event), event.num_bytes
                del event  # keep one copy only while the client reads
                self._writing_since, self._writing_bytes = self._loop.time(), num_bytes
                if self._alarm is None:
                    self._look_at_the_write()
                try:
                    yield message
                finally:
                    self._writing_since, self._writing_bytes = None, 0
                self._quota.release(num_bytes)
                self._room.set()

    def _look_at_the_write(self) -> None:
        """Give the stream up if its write takes too long; else look again when it may, as long as there is one. Most
        writes end long before."""
        timeout_s, self._alarm = self._backend.config.request_timeout_s, None
        if self._writing_since is None:
            return
        left_s = timeout_s - self.stalled_s()
        if left_s <= 0:
            self.give_up(f"an answer was not taken within {timeout_s:g} s")
        else:
            self._alarm = self._loop.call_later(left_s, self._look_at_the_write)

    def stalled_s(self) -> float:
        """How long the current write has been blocked; 0 without one."""
        return 0.0 if self._writing_since is None else self._loop.time() - self._writing_since

    def give_up(self, why: str) -> None:
        """Drop everything but the answer that is being written: grpc keeps that one until its client takes it or hangs
        up, so it stays in the account; then the stream ends. Idempotent."""
        if not self._given_up:
            self._backend.telemetry.dropped_stream()
            _log.debug("stream given up: its answers are not read", client=self.client, why=why)
            error = ResourceExhausted(f"answers: expected a client that reads them: {why}")
            self._drop("the client does not read its answers", error)

    def lose(self) -> None:
        """The same for a stream whose permit another call has taken. Idempotent."""
        if not self._given_up:
            error = ResourceExhausted("calls: another call of this caller took the permit of this one")
            self._drop("another call took the permit of its stream", error)

    def _drop(self, why: str, error: CallError) -> None:
        self._given_up, self._writing_since = True, None
        if self.reader is not None:
            self.reader.cancel()
        self._withdraw_all(why)
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(error)
        self._quota.release(self._quota.num_bytes - self._writing_bytes)

    def end(self, error: CallError) -> None:
        self._events.put_nowait(error)

    def hang_up(self) -> None:
        """The stream has ended: withdraw its requests."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._withdraw_all("the client hung up")
        self._quota.close()

    def _withdraw_all(self, why: str) -> None:
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.timer.cancel()
            self._backend.engine.withdraw(each.work, Failure(grpc.StatusCode.CANCELLED, why))
            self._backend.telemetry.answered(grpc.StatusCode.CANCELLED, 0, 0.0, trace=each.work.trace, why=why)

    def _take(self, request: expert_pb2.ForwardRequest) -> None:
        if request.cancel:
            self._withdraw(request.id, Failure(grpc.StatusCode.CANCELLED, "cancelled by the client"))
            return
        received_ns = time.monotonic_ns()
        trace = request_trace.begin(self._backend.tracer, request, self._parent, received_ns)
        try:
            self._backend.check_rate(self.client)
            self._backend.engine.expect()  # not before: it wakes all ranks
            if request.id in self._pending:
                raise Refused(
                    Failure(grpc.StatusCode.INVALID_ARGUMENT, f"id: {request.id} is in flight on this stream")
                )
            tokens = self._backend.validator.validate(request)
            self._submit(request, tokens, received_ns, trace)
        except Refused as refused:
            code, why = refused.failure.code, refused.failure.message
            _log.debug("request refused", request=request.id, client=self.client, code=code.name, why=why)
            self._backend.telemetry.answered(code, 0, 0.0, trace=trace, why=why)
            self._events.put_nowait(_Answer(request.id, refused.failure))

    def _submit(
        self, request: expert_pb2.ForwardRequest, tokens: Tokens, received_ns: int, trace: RequestTrace | None
    ) -> None:
        """Give a checked request to the engine. Raises Refused."""
        backend, request_id = self._backend, request.id
        timeout_s = backend.timeout_s(request)
        work = backend.work_of(
            request, tokens, self.client, self, lambda answer: self._reply(request_id, answer), trace
        )
        request_trace.admitted(work, received_ns)
        num_bytes = tokens.num_bytes
        self._quota.charge(num_bytes)
        late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"deadline: not served within {timeout_s:g} s")
        timer = self._loop.call_later(timeout_s, self._withdraw, request_id, late)
        self._pending[request_id] = _Pending(work, num_bytes, timer)
        try:
            backend.engine.submit(work)
        except Refused:
            del self._pending[request_id]
            timer.cancel()
            self._quota.release(num_bytes)
            raise

    def _withdraw(self, request_id: int, failure: Failure) -> None:
        if request_id in self._pending:
            self._backend.engine.withdraw(self._pending[request_id].work, failure)

    def _reply(self, request_id: int, answer: Done | Failure) -> None:
        """Called by the engine, from any thread."""
        call_in_loop(self._loop, self._answered, request_id, answer)

    def _answered(self, request_id: int, answer: Done | Failure) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        pending.timer.cancel()
        code = grpc.StatusCode.OK if isinstance(answer, Done) else answer.code
        seconds = (time.monotonic_ns() - pending.work.arrived_ns) * 1e-9
        queue_s = answer.timing.queue_ns * 1e-9 if isinstance(answer, Done) else 0.0
        why, trace = "" if isinstance(answer, Done) else answer.message, pending.work.trace
        if why:
            write = _log.seldom if code is grpc.StatusCode.INTERNAL else _log.debug
            traced = {} if trace is None else {"trace": trace.trace_id}
            where = {"layer": pending.work.layer, "client": self.client, **traced}
            write("request failed", request=request_id, code=code.name, why=why, **where)
        self._events.put_nowait(_Answer(request_id, answer, pending.num_bytes))
        count = self._backend.telemetry.answered  # once the answer was written
        self._loop.call_soon(count, code, pending.work.num_tokens, seconds, queue_s, trace, why)


def trace_of(
    samples: Sequence[LatencySample], request: expert_pb2.TraceRequest, rank: int, epoch: int
) -> expert_pb2.TraceResponse:
    """The operations of the last steps. Raises InvalidArgument."""
    if not 1 <= request.steps <= MAX_STEPS:
        raise InvalidArgument(f"steps: expected 1..{MAX_STEPS}, got {request.steps}")
    operations = [
        expert_pb2.Operation(
            op=one.op, mode=one.mode, seq=one.seq, tokens=one.tokens, start_ns=one.start_ns, send_ns=one.send_ns,
            total_ns=one.total_ns, wait_ns=one.peer_wait_ns,
        )
        for one in samples[-request.steps * OPS_PER_STEP :]
    ]  # fmt: skip
    return expert_pb2.TraceResponse(rank=rank, epoch=epoch, operations=operations)


def _num_bytes(request: expert_pb2.ForwardRequest) -> int:
    """What it will count, about."""
    return 3 * request.ByteSize() + REQUEST_BYTES


def _message(event: _Answer) -> expert_pb2.ForwardResponse:
    request_id, answer = event.request_id, event.answer
    if isinstance(answer, Failure):
        number = code_number(answer.code)
        error = expert_pb2.Error(code=number, message=answer.message, lost_ranks=answer.lost_ranks, epoch=answer.epoch)
        return expert_pb2.ForwardResponse(id=request_id, error=error)
    timing, y = expert_pb2.Timing(**answer.timing._asdict()), wire.encode(answer.y)
    return expert_pb2.ForwardResponse(id=request_id, y=y, timing=timing, model=answer.model)


def _client_of(context: Any) -> Hashable:
    """The names of the caller's certificate, or else its host."""
    caller = CALLER.get(None)
    return (caller.names or caller.host) if caller is not None else host_of(context)
