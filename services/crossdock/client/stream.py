"""Connection of a client to one worker: a channel and one Forward stream, shared by all requests that go by gRPC.

Answers come in any order and are matched by id. A broken stream fails its requests in flight and is reopened by the
next request. A worker may end a stream's turn to read others of this host: what was sent is answered there, the rest
goes by the next stream. If requests wait and no answer comes for a while, the worker is probed on the side: a cut
network path breaks no connection, and keepalive alone takes twenty seconds to notice. A worker that does not answer the
probe counts as `unresponsive` and is probed again by new connections until it answers.

Requests are written by grpc's own task from an outbox: cancelling a request must not cancel the write of a message,
because grpc would end the whole stream.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.client.errors import ClientError, DeadlineExceeded, InvalidRequest, Unavailable, from_answer, from_call
from crossdock.client.shares import Response
from crossdock.common import rpc
from crossdock.common.security import Security
from crossdock.common.tasks import background, end_tasks, wait_for_end
from crossdock.protocol.tensor_messages import packed, response_of
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc

_QUIET_S, _ALIVE_S = 1.0, 3.0
"""Silence after which a worker with open requests is probed, and the deadline of the probe."""
_GRACE_S = 5.0
"""Time for requests on a channel with old certificates to end."""

_STREAM_S = 300.0
"""Age at which a stream is replaced between two requests: servers close old connections, with ten minutes for open
streams."""

Answer = asyncio.Future[Response] | concurrent.futures.Future[Response]
"""Future of one answer: for a coroutine, or for a thread, which must not cancel it."""


_Outbox = asyncio.Queue[tuple[int, bytes] | None]
"""Requests to write: whose answer is awaited (0: a cancellation), and its bytes; None ends the stream."""


class _Asked(NamedTuple):
    """A request in flight, the bytes of its message, and the outbox of its stream."""

    answer: Answer
    num_bytes: int
    outbox: _Outbox


_FORWARD = "/crossdock.v1.ExpertService/Forward"
_TOO_LARGE = re.compile(r"SERVER: Received message larger than max \(\d+ vs\. (\d+)\)")
"""How gRPC ends a stream for a message above the worker's limit."""


class WorkerStream:
    """Stream to one worker. Make and use it inside the running loop.

    Args:
        address: host:port of the worker's ExpertService.
        rank: its rank, for errors; None if unknown.
        epoch: of the view with this worker, for errors.
        max_message_bytes: largest message in either direction.
        security: TLS and tokens; None: plain text.

    Attributes:
        broken_at: when its stream broke last, monotonic seconds.
    """

    def __init__(
        self, address: str, rank: int | None, epoch: int, max_message_bytes: int, security: Security | None = None
    ) -> None:
        self.address, self.epoch, self.loop = address, epoch, asyncio.get_running_loop()
        self._rank, self._max_message_bytes, self._security = rank, max_message_bytes, security
        self._request_bytes = max_message_bytes
        self._former: set[asyncio.Task[None]] = set()
        self._dial()
        self._ids = itertools.count(1)
        self._pending: dict[int, _Asked] = {}
        self._outbox: _Outbox = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._opened_at = self._last_answer_at = 0.0
        self._silent = self._ended = self._is_spare = False
        self._probing: asyncio.Task[None] | None = None
        self.broken_at = float("-inf")

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._pending

    @property
    def unresponsive(self) -> bool:
        """Whether the worker failed a probe and has not answered one since."""
        return self._probing is not None and not self._probing.done()

    async def describe(self, timeout_s: float) -> expert_pb2.DescribeResponse:
        """Describe the served model. Raises ClientError."""
        self._renew()
        try:
            description: expert_pb2.DescribeResponse = await rpc.call(
                self._stub.Describe, expert_pb2.DescribeRequest(), timeout_s=timeout_s
            )
        except rpc.CallError as error:
            raise self._broken(error) from error
        return description

    async def forward(
        self, request: expert_pb2.ForwardRequest, tensors: Mapping[str, torch.Tensor], timeout_s: float
    ) -> Response:
        """Send one request (its id is set here), with tensors by field, and wait for its answer.

        Raises:
            ClientError: of the answer or of the stream. A request that is given up, by deadline or by cancelling this
                call, is also cancelled at the worker.
        """
        self._open_stream()
        number, packet = self.packed(request, tensors)
        answer = self.loop.create_future()
        try:
            self._put(number, packet, answer)
            async with asyncio.timeout(timeout_s):
                response: Response = await answer
        except TimeoutError:
            raise self.late(timeout_s) from None
        finally:
            if not self._has_answer(answer):
                self.withdraw(number)
        return answered(response)

    def packed(self, request: expert_pb2.ForwardRequest, tensors: Mapping[str, torch.Tensor]) -> tuple[int, bytes]:
        """A request of this stream: its id, which is set here, and its bytes. Any thread. Raises InvalidRequest."""
        request.id = next(self._ids)
        packet = packed(request, tensors)
        if len(packet) > self._request_bytes:  # gRPC would end the stream, and with it all other requests
            raise self._too_large(len(packet))
        return request.id, packet

    def send(self, number: int, packet: bytes, answer: concurrent.futures.Future[Response]) -> None:
        """Send a packed request of another thread, which waits for `answer`, at most until it calls `withdraw` in this
        loop."""
        try:
            self._open_stream()
            self._put(number, packet, answer)
        except Exception as error:
            answer.set_exception(error)

    def withdraw(self, number: int) -> None:
        """Cancel a request whose caller has stopped waiting."""
        if (asked := self._pending.pop(number, None)) is not None:
            asked.outbox.put_nowait((0, expert_pb2.ForwardRequest(id=number, cancel=True).SerializeToString()))
            self._leave_if_spare()

    def late(self, timeout_s: float) -> DeadlineExceeded:
        """The error of a request that was not answered in time."""
        return DeadlineExceeded(f"{self._where()}: no answer within {max(0.0, timeout_s):.3f} s")

    def release(self) -> None:
        """Close the stream once no request is in flight: requests go by buffers. A later one opens another stream.
        Workers let a host have few streams that are open."""
        self._is_spare = True
        self._leave_if_spare()

    def open_buffer(self, request: expert_pb2.OpenBufferRequest) -> Any:
        """The open call of a request buffer."""
        self._renew()
        return self._stub.OpenBuffer(request)

    async def is_alive(self) -> bool:
        """Whether the worker answers a probe."""
        return await self._is_alive(self._channel)

    async def close(self) -> None:
        """Close; requests in flight and later ones end with Unavailable."""
        self._ended = True
        if self._reader is not None:
            await end_tasks(self._reader)
        if self._probing is not None:  # it may have begun meanwhile
            await end_tasks(self._probing)
        self._fail(self._closed())  # a reader that had not started has not failed them
        await self._channel.close(None)
        await wait_for_end(*self._former)

    def _open_stream(self) -> None:
        """Open the stream, or another one in the place of an old one. Raises Unavailable: it is closed for good."""
        if self._ended:
            raise self._closed()
        if self._reader is not None and not self._pending and time.monotonic() - self._opened_at > _STREAM_S:
            self._leave(self._reader)
        if self._reader is None:
            self._renew()
            self._opened_at = time.monotonic()
            self._outbox, self._silent, self._is_spare = asyncio.Queue(), False, False
            self._reader = asyncio.create_task(self._read(self._outbox))

    def _put(self, number: int, packet: bytes, answer: Answer) -> None:
        if not self._pending:
            self._last_answer_at = time.monotonic()
        self._pending[number] = _Asked(answer, len(packet), self._outbox)
        self._outbox.put_nowait((number, packet))

    def _end_turn(self, reader: asyncio.Task[None] | None) -> None:
        """Send no more by this stream: what it has not sent yet goes by another one."""
        if reader is None or self._reader is not reader:
            return
        unsent, is_spare = [self._outbox.get_nowait() for _ in range(self._outbox.qsize())], self._is_spare
        for request in unsent:
            if request and not request[0]:  # the cancellation of a request that was sent by this one
                self._outbox.put_nowait(request)
        self._leave(reader)
        for request in unsent:
            if request and (asked := self._pending.get(request[0])) is not None:
                self._open_stream()
                self._is_spare = is_spare
                self._put(*request, asked.answer)

    def _leave_if_spare(self) -> None:
        if self._is_spare and self._reader is not None and not self._pending:
            self._leave(self._reader)

    def _leave(self, reader: asyncio.Task[None]) -> None:
        """Release a stream: it ends by itself once it has its answers, and the next request opens another one."""
        self._outbox.put_nowait(None)
        self._reader = None
        self._former.add(reader)
        reader.add_done_callback(self._former.discard)

    def _dial(self) -> None:
        self._version = self._security.version if self._security is not None else 0
        self._channel = self._channel_to_it()
        self._stub = expert_pb2_grpc.ExpertServiceStub(self._channel)
        self._open = self._channel.stream_stream(_FORWARD, None, response_of)

    def _channel_to_it(self) -> grpc.aio.Channel:
        name = self._security.config.worker_name if self._security is not None else ""
        return rpc.aio_channel(self.address, self._max_message_bytes, self._security, name)

    def _renew(self) -> None:
        """Replace the channel if its certificates are outdated or its connection may be dead."""
        outdated = self._security is not None and self._security.version != self._version
        if self._reader is None and (outdated or self._silent):
            task = background(self._channel.close(_GRACE_S), "closing a channel")
            self._former.add(task)
            task.add_done_callback(self._former.discard)
            self._dial()

    @staticmethod
    def _has_answer(answer: asyncio.Future[Response]) -> bool:
        return answer.done() and not answer.cancelled()

    async def _read(self, outbox: _Outbox) -> None:
        failure, fits = None, True
        watching = background(self._watch(asyncio.current_task()), "watching a stream")
        try:
            async for response in self._open(self._write(outbox)):
                self._last_answer_at = time.monotonic()
                if response.message.turn_over:
                    self._end_turn(asyncio.current_task())
                asked = self._pending.pop(response.message.id, None)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result(response)
                self._leave_if_spare()
        except grpc.RpcError as error:
            why = rpc.error_of(error)
            fits = not self._fail_too_large(why)
            failure = self._broken(why) if fits else None
        finally:
            watching.cancel()
            outbox.put_nowait(None)
            if self._reader is asyncio.current_task():
                self._reader = None
                self.broken_at = time.monotonic() if fits else self.broken_at
            self._fail(failure or self._closed(), outbox)

    async def _watch(self, reader: asyncio.Task[None] | None) -> None:
        """End the stream if the worker does not respond."""
        while True:
            await asyncio.sleep(_QUIET_S)
            if not self._pending or time.monotonic() - self._last_answer_at < _QUIET_S:
                continue
            if await self._is_alive(self._channel):
                self._last_answer_at = time.monotonic()
            elif reader is not None:
                self._silent = True
                if not self.unresponsive:
                    self._probing = background(self._probe_until_alive(), "the probe of a worker")
                reader.cancel()
                return

    async def _probe_until_alive(self) -> None:
        """Probe until it answers; each time by a new connection, since the old one may be dead."""
        alive = False
        while not alive:
            await asyncio.sleep(_QUIET_S)
            channel = self._channel_to_it()
            try:
                alive = await self._is_alive(channel)
            finally:
                await channel.close(None)

    async def _is_alive(self, channel: grpc.aio.Channel) -> bool:
        """Whether the worker answers at all, if only that it has no health service."""
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await rpc.call(check, health_pb2.HealthCheckRequest(), timeout_s=_ALIVE_S)
        except (rpc.DeadlineExceeded, rpc.Unavailable):
            return False
        except rpc.CallError:
            return True
        return True

    def _fail(self, failure: ClientError, outbox: _Outbox | None = None) -> None:
        """Requests of that stream, or of all."""
        for number, asked in list(self._pending.items()):
            if outbox is None or asked.outbox is outbox:
                del self._pending[number]
                if not asked.answer.done():
                    asked.answer.set_exception(failure)

    def _fail_too_large(self, error: rpc.CallError) -> bool:
        """Whether a stream has ended for a message above the worker's limit, which is known from now on. Requests that
        were too large fail; the others may be sent again."""
        found = _TOO_LARGE.search(str(error))
        if found is None:
            return False
        self._request_bytes = int(found[1])
        for number, asked in list(self._pending.items()):
            if asked.num_bytes > self._request_bytes and not asked.answer.done():
                del self._pending[number]
                asked.answer.set_exception(self._too_large(asked.num_bytes))
        return True

    def _too_large(self, num_bytes: int) -> InvalidRequest:
        return InvalidRequest(
            f"x: expected a request of at most {self._request_bytes} bytes for {self._where()}, got {num_bytes}"
        )

    async def _write(self, outbox: _Outbox) -> AsyncIterator[bytes]:
        while (request := await outbox.get()) is not None:
            if not request[0] or request[0] in self._pending:
                yield request[1]

    def _broken(self, error: rpc.CallError) -> ClientError:
        return from_call(error, self._where(), self._lost(), self.epoch)

    def _closed(self) -> ClientError:
        why = f"silent for {_QUIET_S + _ALIVE_S:g} s" if self._silent else "the connection was closed"
        return Unavailable(f"{self._where()}: {why}", self._lost(), self.epoch)

    def _lost(self) -> tuple[int, ...]:
        return () if self._rank is None else (self._rank,)

    def _where(self) -> str:
        return f"worker {self.address}" if self._rank is None else f"rank {self._rank} ({self.address})"


def answered(response: Response) -> Response:
    """An answer. Raises ClientError: it is an error."""
    if response.message.HasField("error"):
        raise from_answer(response.message.error)
    return response
