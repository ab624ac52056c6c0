"""One worker as a client sees it: a channel and one Forward stream that is kept open and shared by all requests.

Answers come in any order and are matched by id. A stream that breaks fails what was under way on it and is opened
again by the next request. One that says nothing for a while although requests wait is asked, on the side, whether it is
there: a line that was cut breaks no connection, and keepalive alone would take twenty seconds. Who does not say so is
asked again and again, by new connections, and is `cut_off` until it does.

Requests are written by grpc's own task from an outbox: cancelling a request must not cancel the write of a message,
because grpc would end the whole stream.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.client.errors import ClientError, DeadlineExceeded, Unavailable, from_answer, from_call
from crossdock.common import rpc
from crossdock.common.security import Security
from crossdock.common.tasks import beside
from crossdock.v1 import expert_pb2, expert_pb2_grpc

_QUIET_S, _ALIVE_S = 1.0, 3.0
"""A worker that owes answers and has sent none for so long is asked whether it is there, and has so long to say it."""
_GRACE_S = 5.0
"""What is under way on a channel with former certificates has so long to end."""

_STREAM_S = 300.0
"""A stream that is older is left for a new one between two requests: servers end connections that grow old, and give
what is open there ten minutes."""

_Outbox = asyncio.Queue[expert_pb2.ForwardRequest | None]
"""What is to be written; None ends the stream."""


class WorkerStream:
    """Make and use it inside the running loop.

    Args:
        address: host:port of the worker's ExpertService.
        rank: its rank, for errors; None if unknown.
        epoch: of the view that named it, for errors.
        max_message_bytes: largest message in either direction.
        security: TLS and tokens; None: plain text.

    Attributes:
        broken_at: when its line broke last, monotonic seconds.
    """

    def __init__(
        self, address: str, rank: int | None, epoch: int, max_message_bytes: int, security: Security | None = None
    ) -> None:
        self.address, self.epoch = address, epoch
        self._rank, self._max_message_bytes, self._security = rank, max_message_bytes, security
        self._former: set[asyncio.Task[None]] = set()
        self._dial()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[expert_pb2.ForwardResponse]] = {}
        self._outbox: _Outbox = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._opened_at = self._heard_at = 0.0
        self._silent = False
        self._asking: asyncio.Task[None] | None = None
        self.broken_at = float("-inf")

    @property
    def idle(self) -> bool:
        """True while no request is under way."""
        return not self._pending

    @property
    def cut_off(self) -> bool:
        """True from when it was found silent until it has said that it is there."""
        return self._asking is not None and not self._asking.done()

    async def describe(self, timeout_s: float) -> expert_pb2.DescribeResponse:
        """What is served there. Raises ClientError."""
        self._renew()
        try:
            description: expert_pb2.DescribeResponse = await rpc.call(
                self._stub.Describe, expert_pb2.DescribeRequest(), timeout_s=timeout_s
            )
        except rpc.CallError as error:
            raise self._broken(error) from error
        return description

    async def forward(self, request: expert_pb2.ForwardRequest, timeout_s: float) -> expert_pb2.ForwardResponse:
        """Send one request (its id is set here) and wait for its answer.

        Raises:
            ClientError: what the answer says, or what became of the stream. A request that is given up, by deadline or
                by cancelling this call, is cancelled at the worker too.
        """
        if self._reader is not None and not self._pending and time.monotonic() - self._opened_at > _STREAM_S:
            self._leave(self._reader)
        if self._reader is None:
            self._renew()
            self._opened_at = time.monotonic()
            self._outbox, self._silent = asyncio.Queue(), False
            self._reader = asyncio.create_task(self._read(self._outbox))
        if not self._pending:
            self._heard_at = time.monotonic()
        outbox, request.id = self._outbox, next(self._ids)
        answer = self._pending[request.id] = asyncio.get_running_loop().create_future()
        outbox.put_nowait(request)
        try:
            async with asyncio.timeout(timeout_s):
                response: expert_pb2.ForwardResponse = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{self._where()}: no answer within {timeout_s:.3f} s") from None
        finally:
            if self._pending.pop(request.id, None) is not None and not self._has_answer(answer):
                outbox.put_nowait(expert_pb2.ForwardRequest(id=request.id, cancel=True))
        if response.HasField("error"):
            raise from_answer(response.error)
        return response

    async def close(self) -> None:
        """Hang up; requests under way end with Unavailable."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        self._fail(self._closed())  # a reader that had not begun yet told nobody
        await self._channel.close(None)
        await asyncio.gather(*self._former, return_exceptions=True)

    def _leave(self, reader: asyncio.Task[None]) -> None:
        """Of a stream that owes nothing: it ends by itself, and the next request opens another one."""
        self._outbox.put_nowait(None)
        self._reader = None
        self._former.add(reader)
        reader.add_done_callback(self._former.discard)

    def _dial(self) -> None:
        self._version = self._security.version if self._security is not None else 0
        self._channel = self._channel_to_it()
        self._stub = expert_pb2_grpc.ExpertServiceStub(self._channel)

    def _channel_to_it(self) -> grpc.aio.Channel:
        name = self._security.config.worker_name if self._security is not None else ""
        return rpc.aio_channel(self.address, self._max_message_bytes, self._security, name)

    def _renew(self) -> None:
        """A channel keeps the certificates it was made with, and a line that may be cut: make another one then."""
        outdated = self._security is not None and self._security.version != self._version
        if self._reader is None and (outdated or self._silent):
            task = beside(self._channel.close(_GRACE_S), "the end of a channel")
            self._former.add(task)
            task.add_done_callback(self._former.discard)
            self._dial()

    @staticmethod
    def _has_answer(answer: asyncio.Future[expert_pb2.ForwardResponse]) -> bool:
        return answer.done() and not answer.cancelled()

    async def _read(self, outbox: _Outbox) -> None:
        failure: ClientError | None = None
        watching = beside(self._watch(asyncio.current_task()), "the watch over a stream")
        try:
            async for response in self._stub.Forward(self._write(outbox)):
                self._heard_at = time.monotonic()
                answer = self._pending.pop(response.id, None)
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
        """End the stream when the worker is not there any more."""
        while True:
            await asyncio.sleep(_QUIET_S)
            if not self._pending or time.monotonic() - self._heard_at < _QUIET_S:
                continue
            if await self._is_there(self._channel):
                self._heard_at = time.monotonic()
            elif reader is not None:
                self._silent = True
                if not self.cut_off:
                    self._asking = beside(self._ask(), "the question whether a worker is there")
                reader.cancel()
                return

    async def _ask(self) -> None:
        """Until it says that it is there; each time by a new connection, for the old one may be dead."""
        there = False
        while not there:
            await asyncio.sleep(_QUIET_S)
            channel = self._channel_to_it()
            try:
                there = await self._is_there(channel)
            finally:
                await channel.close(None)

    async def _is_there(self, channel: grpc.aio.Channel) -> bool:
        """Whether it says anything at all, if only that it has no health service."""
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

    async def _write(self, outbox: _Outbox) -> AsyncIterator[expert_pb2.ForwardRequest]:
        while (request := await outbox.get()) is not None:
            if request.cancel or request.id in self._pending:
                yield request

    def _broken(self, error: rpc.CallError) -> ClientError:
        return from_call(error, self._where(), self._lost(), self.epoch)

    def _closed(self) -> ClientError:
        why = f"silent for {_QUIET_S + _ALIVE_S:g} s" if self._silent else "the connection was closed"
        return Unavailable(f"{self._where()}: {why}", self._lost(), self.epoch)

    def _lost(self) -> tuple[int, ...]:
        return () if self._rank is None else (self._rank,)

    def _where(self) -> str:
        return f"worker {self.address}" if self._rank is None else f"rank {self._rank} ({self.address})"
