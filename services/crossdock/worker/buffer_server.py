"""Request buffers: requests of clients of this host, without gRPC's copies (request_buffer.py of the protocol).

OpenBuffer is a gRPC call like Forward: the same role, permits and connection limits, and as long as it is open, so is
the buffer. Its ticket is good once. Answers are sent by the thread that has them. Requests are read by the thread of
the steps while it is awake (`request_sockets.py`), else by a thread that waits for all sockets.

What a client can do to its memory: change it at any time, so x is only ever read as numbers, and ids and weights are
copied before they are checked; not resize it, for it is sealed. Its bytes count, from the offer until the call ends,
against `max_shared_bytes` and a quarter of that for one client; then the pages are freed, even if the client maps them
still. A client that sends without reading answers loses its buffer, and so does one whose request has failed after it
was queued: a step may be writing rows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import selectors
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from crossdock.common import log, rpc
from crossdock.common.tasks import call_in_loop
from crossdock.common.tracing import RequestTrace
from crossdock.protocol.request_buffer import (
    MAX_BUFFER_BYTES,
    MAX_PACKET_BYTES,
    RepeatedRequests,
    RoutingCopy,
    SharedMemory,
    SharedRows,
    host_identity,
)
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker import request_trace
from crossdock.worker.answers import fill, response_of
from crossdock.worker.backend import Backend
from crossdock.worker.request_sockets import RequestSockets
from crossdock.worker.work import Done, Failure, Refused, Work

_log = log.get(__name__)

SHARE_OF_CLIENT = 4
"""One client gets this part of `max_shared_bytes`."""
_TICK_S, _REDEEM_S = 0.25, 5.0
"""Interval in which deadlines are looked at; time to redeem a ticket, and to send one after connecting."""
_PAUSE_S = 0.02
"""After a connection that could not be accepted."""
_MAX_PENDING = 64
"""Connections that have not sent a ticket."""
_MAX_TEXT = 1024
_GONE = Failure(grpc.StatusCode.CANCELLED, "the client closed its request buffer")


@dataclass(slots=True, eq=False)
class _Offer:
    """A buffer that was offered; `sock` once its ticket was redeemed.

    Attributes:
        client: whose it is.
        num_bytes: its size.
        progress: records traffic on its call.
        ended: set when the buffer is gone; of `loop`.
    """

    client: Hashable
    num_bytes: int
    progress: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    until: float = 0.0
    sock: socket.socket | None = None


class RequestBuffers:
    """All request buffers of a worker. Make it on the event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._host = backend, host_identity()
        self._max_bytes = backend.config.max_shared_bytes
        self._held: dict[Hashable, int] = {}
        self._offers: dict[bytes, _Offer] = {}
        self._open: dict[_Buffer, None] = {}
        self._pending: dict[socket.socket, float] = {}
        self.request_sockets = RequestSockets()
        backend.engine.read_from(self.request_sockets)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._name, self._closed, self._looked_at = "", False, 0.0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_bytes(self) -> int:
        """Of all buffers, offered or open."""
        return sum(self._held.values())

    @contextlib.asynccontextmanager
    async def offered(
        self, client: Hashable, request: expert_pb2.OpenBufferRequest, progress: Callable[[], None]
    ) -> AsyncIterator[tuple[expert_pb2.OpenBufferResponse, asyncio.Event]]:
        """Offer a buffer for the block, which may wait for its end. Raises rpc.CallError."""
        self._check(client, request)
        self._listen()
        offer, ticket = _Offer(client, request.num_bytes, progress, asyncio.get_running_loop()), secrets.token_bytes(32)
        self._held[client] = self._held.get(client, 0) + offer.num_bytes
        offer.until = time.monotonic() + _REDEEM_S
        self._offers[ticket] = offer
        try:
            yield (
                expert_pb2.OpenBufferResponse(socket=self._name, ticket=ticket, num_bytes=offer.num_bytes),
                offer.ended,
            )
        finally:
            self._offers.pop(ticket, None)
            offer.ended.set()  # before the look at its socket: the thread looks in the other order
            if offer.sock is not None:
                _end(offer.sock)
            self._held[client] -= offer.num_bytes
            if not self._held[client]:
                del self._held[client]

    def close(self) -> None:
        """End all buffers and offer no more. Idempotent."""
        self._closed = True
        for buffer in list(self._open):
            _end(buffer.sock)

    def _check(self, client: Hashable, request: expert_pb2.OpenBufferRequest) -> None:
        if not self._host or request.host != self._host:
            raise rpc.FailedPrecondition("host: expected a client of this host and network namespace")
        if self._closed:
            raise rpc.Unavailable("this worker has left the group")
        if not 0 < request.num_bytes <= MAX_BUFFER_BYTES:
            raise rpc.InvalidArgument(f"num_bytes: expected 1..{MAX_BUFFER_BYTES}, got {request.num_bytes}")
        most, held = self._max_bytes // SHARE_OF_CLIENT, self._held.get(client, 0)
        if held + request.num_bytes > most or self.num_bytes + request.num_bytes > self._max_bytes:
            raise rpc.ResourceExhausted(
                f"num_bytes: expected at most {most} shared with one client and {self._max_bytes} in all, this would "
                f"make it {held + request.num_bytes} and {self.num_bytes + request.num_bytes}"
            )

    def _listen(self) -> None:
        if self._listener is not None:
            return
        self._name = f"crossdock-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(_MAX_PENDING)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self.request_sockets, selectors.EVENT_READ, self.request_sockets.poll_selected)
        threading.Thread(target=self._run, name="request buffers", daemon=True).start()

    # The thread.

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(_TICK_S):
                self._safely(key.data)
            now = time.monotonic()
            if now - self._looked_at >= _TICK_S:
                self._looked_at = now
                self.request_sockets.poll()  # a step may take long
                self._safely(functools.partial(self._expire, now))

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # one buffer must not end the others, nor this thread
            _log.exception("request buffer failed")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # no descriptor is free, for instance: the connection waits
            time.sleep(_PAUSE_S)
            return
        sock.setblocking(False)
        if len(self._pending) >= _MAX_PENDING:
            self._drop_pending(next(iter(self._pending)))
        self._pending[sock] = time.monotonic() + _REDEEM_S
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._redeem, sock))

    def _drop_pending(self, sock: socket.socket) -> None:
        del self._pending[sock]
        self._selector.unregister(sock)
        sock.close()

    def _redeem(self, sock: socket.socket) -> None:
        """The first packet of a connection: a ticket, for which it gets the memory."""
        del self._pending[sock]
        self._selector.unregister(sock)
        fd, offer = -1, None
        try:
            offer = self._offers.pop(sock.recv(64), None)
            if offer is None or self._closed:
                raise OSError("no such ticket")
            memory, fd = SharedMemory.make(offer.num_bytes)
            socket.send_fds(sock, [b"."], [fd])
        except OSError as error:
            _log.debug("no request buffer", why=str(error))
            sock.close()
            if offer is not None:
                call_in_loop(offer.loop, offer.ended.set)
            return
        finally:
            if fd >= 0:
                socket.close(fd)
        offer.sock = sock
        buffer = _Buffer(self._backend, offer, sock, memory, self._drop)
        self._open[buffer] = None
        self.request_sockets.add(sock, buffer.read)
        if offer.ended.is_set():  # its call ended in between
            _end(sock)

    def _drop(self, buffer: _Buffer) -> None:
        self.request_sockets.remove(buffer.sock)
        self._open.pop(buffer, None)
        buffer.sock.close()
        call_in_loop(buffer.offer.loop, buffer.offer.ended.set)

    def _expire(self, now: float) -> None:
        for sock, until in list(self._pending.items()):
            if now > until:
                self._drop_pending(sock)
        for ticket, offer in list(self._offers.items()):
            if now > offer.until and self._offers.pop(ticket, None) is not None:
                call_in_loop(offer.loop, offer.ended.set)
        for buffer in list(self._open):
            buffer.expire()


class _Buffer:
    """One client's buffer, with at most one request in the engine."""

    def __init__(
        self,
        backend: Backend,
        offer: _Offer,
        sock: socket.socket,
        memory: SharedMemory,
        drop: Callable[[_Buffer], None],
    ) -> None:
        self.offer, self.sock = offer, sock
        self._backend, self._memory, self._drop = backend, memory, drop
        self._work: Work | None = None
        self._requests = RepeatedRequests()
        self._rows: SharedRows | None = None
        self._done = expert_pb2.ForwardResponse()

    def read(self) -> None:
        """A packet, or the end."""
        try:
            packet = self.sock.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        try:
            if packet:
                self._take(*self._requests.request_of(packet))
                return
        except DecodeError:
            _log.warning("request buffer ended: unreadable request")
        except Exception:  # the client would wait for an answer
            _log.exception("request buffer ended")
        work = self._work
        self._drop(self)
        if work is not None:
            self._backend.engine.withdraw(work, _GONE)
        self._memory.give_back()

    def expire(self) -> None:
        """Answer a request that is past its deadline."""
        work = self._work
        if work is not None and work.deadline_ns <= time.monotonic_ns():
            late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline: not served in time")
            self._backend.engine.withdraw(work, late)

    def _take(self, request: expert_pb2.ForwardRequest, repeats: bool) -> None:
        """repeats: but for its id it is the one before."""
        backend, work = self._backend, self._work
        self._rows = self._rows if repeats and not request.model else None  # models come and go
        self.offer.progress()
        if work is not None and request.cancel:
            backend.engine.withdraw(work, Failure(grpc.StatusCode.CANCELLED, "cancelled by the client"))
            return
        if work is not None or request.cancel:
            self._refuse(request)
            return
        received_ns = time.monotonic_ns()
        trace = request_trace.begin(backend.tracer, request, None, received_ns)
        try:
            backend.check_rate(self.offer.client)
            backend.engine.expect()  # not before: it wakes all ranks
            self._work = work = self._work_of(request, trace)
            request_trace.admitted(work, received_ns)
            backend.engine.submit(work)
        except Refused as refused:
            self._work = None
            self._send(request.id, refused.failure)
            code, why = refused.failure.code, refused.failure.message
            backend.telemetry.answered(code, 0, 0.0, trace=trace, why=why)

    def _refuse(self, request: expert_pb2.ForwardRequest) -> None:
        """A request before the last one is answered, or a cancel of none; both count as requests of the client."""
        failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "id: expected no request before the last one is answered")
        try:
            self._backend.check_rate(self.offer.client)
        except Refused as refused:
            failure = refused.failure
            if request.cancel:  # it has no answer that could carry the error
                _end(self.sock)
        if not request.cancel:
            self._send(request.id, failure)

    def _work_of(self, request: expert_pb2.ForwardRequest, trace: RequestTrace | None) -> Work:
        """Raises Refused."""
        validator = self._backend.validator
        if self._rows is None:
            self._rows = validator.rows_in(request, self._memory)
        tokens, reply = validator.taken(self._rows), functools.partial(self._reply, request.id, self._rows.routing)
        return self._backend.work_of(request, tokens, self.offer.client, self, reply, trace, self._rows)

    def _reply(self, request_id: int, routing: RoutingCopy, answer: Done | Failure) -> None:
        """Any thread."""
        work, self._work = self._work, None
        routing.turn()  # the step's record has its ids, and the next request may be here before that is written
        if isinstance(answer, Done):  # one at a time
            self._done.id = request_id
            fill(self._done.timing, answer.timing)
            self._send_packet(self._done.SerializeToString())
        else:
            self._send(request_id, answer)
        if isinstance(answer, Failure):  # a step may still write its rows: no other request may use that memory
            _end(self.sock)
        if work is None:
            return
        code, why = (grpc.StatusCode.OK, "") if isinstance(answer, Done) else (answer.code, answer.message)
        queue_s = answer.timing.queue_ns * 1e-9 if isinstance(answer, Done) else 0.0
        seconds = (time.monotonic_ns() - work.arrived_ns) * 1e-9
        self._backend.telemetry.answered(code, work.num_tokens, seconds, queue_s, work.trace, why)

    def _send(self, request_id: int, failure: Failure) -> None:
        response = response_of(request_id, failure)
        response.error.message = response.error.message[:_MAX_TEXT]
        self._send_packet(response.SerializeToString())

    def _send_packet(self, packet: bytes) -> None:
        try:
            self.sock.send(packet)
        except OSError:  # it does not read, or is gone
            _end(self.sock)


def _end(sock: socket.socket) -> None:
    """Let the thread see the end of a connection."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
