"""Connection of a client to one worker: a channel and one Forward stream, kept open and shared by all requests.

Answers come in any order and are matched by id. A broken stream fails its requests in flight and is reopened by the
next request. If requests wait and no answer comes for a while, the worker is probed on the side: a cut network path
breaks no connection, and keepalive alone takes twenty seconds to notice. A worker that does not answer the probe counts
as `unresponsive` and is probed again by new connections until it answers.

Requests are written by grpc's own task from an outbox: cancelling a request must not cancel the write of a message,
because grpc would end the whole stream.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.client.errors import ClientError, DeadlineExceeded, InvalidRequest, Unavailable, from_answer, from_call
from crossdock.client.shares import Response
from crossdock.common import rpc
from crossdock.common.security import Security
from crossdock.common.tasks import background
from crossdock.protocol.tensor_messages import packed, response_of
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc

_QUIET_S, _ALIVE_S = 1.0, 3.0
"""Silence after which a worker with open requests is probed, and the deadline of the probe."""
_GRACE_S = 5.0
"""Time for requests on a channel with old certificates to end."""

_STREAM_S = 300.0
"""Age at which a stream is replaced between two requests: servers close old connections, with ten minutes for open
streams."""

_Outbox = asyncio.Queue[tuple[int, bytes] | None]
"""Requests to write: whose answer is awaited (0: a cancellation), and its bytes; None ends the stream."""
_FORWARD = "/crossdock.v1.ExpertService/Forward"


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
        self.address, self.epoch = address, epoch
        self._rank, self._max_message_bytes, self._security = rank, max_message_bytes, security
        self._former: set[asyncio.Task[None]] = set()
        self._dial()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Response]] = {}
        self._outbox: _Outbox = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._opened_at = self._last_answer_at = 0.0
        self._silent = False
        self._probing: asyncio.Task[None] | None = None
        self.broken_at = float("-inf")

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._pending

    @property
    def unresponsive(self) -> bool:
        """Whether it failed a probe and has not answered one since."""
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
        if self._reader is not None and not self._pending and time.monotonic() - self._opened_at > _STREAM_S:
            self._leave(self._reader)
        if self._reader is None:
            self._renew()
            self._opened_at = time.monotonic()
            self._outbox, self._silent = asyncio.Queue(), False
            self._reader = asyncio.create_task(self._read(self._outbox))
        if not self._pending:
            self._last_answer_at = time.monotonic()
        outbox, request.id = self._outbox, next(self._ids)
        answer = self._pending[request.id] = asyncio.get_running_loop().create_future()
        try:
            packet = packed(request, tensors)
            if len(packet) > self._max_message_bytes:  # gRPC would end the stream, and with it all other requests
                raise InvalidRequest(f"x: expected a row of at most {self._max_message_bytes} bytes, got {len(packet)}")
            outbox.put_nowait((request.id, packet))
            async with asyncio.timeout(timeout_s):
                response: Response = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{self._where()}: no answer within {timeout_s:.3f} s") from None
        finally:
            if self._pending.pop(request.id, None) is not None and not self._has_answer(answer):
                cancel = expert_pb2.ForwardRequest(id=request.id, cancel=True)
                outbox.put_nowait((0, cancel.SerializeToString()))
        if response.message.HasField("error"):
            raise from_answer(response.message.error)
        return response

    def open_buffer(self, request: expert_pb2.OpenBufferRequest) -> Any:
        """The open call of a request buffer."""
        self._renew()
        return self._stub.OpenBuffer(request)

    async def is_alive(self) -> bool:
        """Whether the worker answers a probe."""
        return await self._is_alive(self._channel)

    async def close(self) -> None:
        """Close; requests in flight end with Unavailable."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        self._fail(self._closed())  # a reader that had not started has not failed them
        await self._channel.close(None)
        await asyncio.gather(*self._former, return_exceptions=True)

    def _leave(self, reader: asyncio.Task[None]) -> None:
        """Release an idle stream: it ends by itself, and the next request opens another one."""
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
        failure: ClientError | None = None
        watching = background(self._watch(asyncio.current_task()), "watching a stream")
        try:
            async for response in self._open(self._write(outbox)):
                self._last_answer_at = time.monotonic()
                answer = self._pending.pop(response.message.id, None)
                if answer is not None and not answer.done():
                    answer.set_result(response)
        except grpc.RpcError as error:
            failure = self._broken(rpc.error_of(error))
        finally:
            watching.cancel()
            outbox.put_nowait(None)
            if self._reader is asyncio.current_task():
                self._reader, self.broken_at = None, time.monotonic()
                self._fail(failure or self._closed())

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
        """Whether it answers at all, if only that it has no health service."""
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await rpc.call(check, health_pb2.HealthCheckRequest(), timeout_s=_ALIVE_S)
        except (rpc.DeadlineExceeded, rpc.Unavailable):
            return False
        except rpc.CallError:
            return True
        return True

    def _fail(self, failure: ClientError) -> None:
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(failure)

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
