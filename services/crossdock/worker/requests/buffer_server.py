"""Request buffers: requests of clients without gRPC's copies and threads (request_buffer.py, request_connection.py of
the protocol).

OpenBuffer is a gRPC call like Forward: the same role, permits and connection limits, and as long as it is open, so is
the buffer. Its ticket is good once, at the listener that it was offered for: a UNIX socket for clients of this host, a
TCP port for those of others, which a worker with certificates or tokens does not have. Answers are sent by the thread
that has them. Requests are read by the thread of the steps while it is awake (`request_sockets.py`), else by a thread
that waits for all sockets.

What a client of this host can do to its memory: change it at any time, so x is only ever read as numbers, and ids and
weights are copied before they are checked; not resize it, for it is sealed. A buffer's bytes, at least `LEAST_BYTES`,
count from the offer until the call ends against `max_shared_bytes` and a quarter of that for one client; then the pages
are freed, even if the client maps them still. A client that sends without reading answers loses its buffer, and so does
one whose request has failed after it was queued: a step may be writing rows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import selectors
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Hashable

from crossdock.common import log, rpc
from crossdock.common.addresses import bound_to, family_of, format_address, not_bound, split_address
from crossdock.common.helper_thread import HelperThread, go_on
from crossdock.common.tasks import call_in_loop
from crossdock.protocol.request_buffer import MAX_BUFFER_BYTES, RequestMemory, SharedMemory, host_identity
from crossdock.protocol.request_connection import REDEEMED, TICKET_BYTES, prepare
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.served_buffer import Offer, ServedBuffer, end
from crossdock.worker.requests.served_connection import ServedConnection
from crossdock.worker.requests.ticket_listener import MAX_PENDING, REDEEM_S, TicketListener
from crossdock.worker.steps.request_sockets import RequestSockets

_log = log.get(__name__)

LEAST_BYTES = 64 << 10
"""Counted of a smaller buffer: it costs a descriptor, a call and, of TCP, the kernel's buffers in any case."""
SHARE_OF_CLIENT = 4
"""One client gets this part of `max_shared_bytes`."""
TICK_S = 0.25
"""Interval in which deadlines are looked at."""
SOCKET_BYTES = 512 << 10
"""Most that the kernel may hold of a connection, in either direction; its own limit may be lower."""


class RequestBuffers:
    """All request buffers of a worker. Make it on the event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._host = backend, host_identity()
        self._max_bytes = backend.config.max_shared_bytes
        self._held: dict[Hashable, int] = {}
        self._offers: dict[bytes, Offer] = {}
        self._open: dict[ServedBuffer, None] = {}
        self.request_sockets = RequestSockets()
        backend.engine.read_from(self.request_sockets)
        self._selector = selectors.DefaultSelector()
        self._listeners: list[TicketListener] = []
        self._name, self.port, self._closed, self._looked_at = "", 0, False, 0.0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_connections(self) -> int:
        """Open ones of clients on other hosts."""
        return sum(buffer.offer.tcp for buffer in tuple(self._open))

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, offered or open."""
        return sum(self._held.values())

    def listen(self) -> None:
        """Take TCP connections from now on, unless certificates or tokens are configured, which these would not
        regard, or no port is. Raises rpc.ListenError."""
        config = self._backend.config
        if config.request_port is None or config.security.is_on or not self._max_bytes:
            return
        address = format_address(split_address(config.listen)[0], config.request_port)
        try:
            sock = _tcp_listener(*split_address(address))
        except OSError as error:
            raise rpc.ListenError(f"request_port: {not_bound(address, error)}") from error
        self.port = sock.getsockname()[1]
        self._begin(sock, tcp=True)

    @contextlib.asynccontextmanager
    async def offered(
        self, client: Hashable, request: expert_pb2.OpenBufferRequest, progress: Callable[[], None]
    ) -> AsyncIterator[tuple[expert_pb2.OpenBufferResponse, asyncio.Event]]:
        """Offer a buffer for the block, which may wait for its end. Raises rpc.CallError."""
        tcp = self._check(client, request)
        if not (tcp or self._name):
            self._listen_here()
        ticket, until = secrets.token_bytes(TICKET_BYTES), time.monotonic() + REDEEM_S
        offer = Offer(client, request.num_bytes, tcp, progress, asyncio.get_running_loop(), until)
        charge = _charge(request)
        self._held[client] = self._held.get(client, 0) + charge
        self._offers[ticket] = offer
        response = expert_pb2.OpenBufferResponse(ticket=ticket, num_bytes=offer.num_bytes)
        if tcp:
            response.port = self.port
        else:
            response.socket = self._name
        try:
            yield response, offer.ended
        finally:
            self._offers.pop(ticket, None)
            offer.ended.set()  # before the look at its socket: the thread looks in the other order
            if offer.sock is not None:
                end(offer.sock)
            self._held[client] -= charge
            if not self._held[client]:
                del self._held[client]

    def close(self) -> None:
        """End all buffers, those that send an answer when their call ends, and offer no more. Idempotent."""
        self._closed = True
        for buffer in list(self._open):
            if not buffer.is_sending:
                end(buffer.sock)

    def _check(self, client: Hashable, request: expert_pb2.OpenBufferRequest) -> bool:
        """Whether the buffer is to be reached by TCP. Raises rpc.CallError."""
        is_here = bool(self._host) and request.host == self._host
        if not is_here and not (request.tcp and self.port):
            raise rpc.FailedPrecondition(
                "host: expected a client of this host and network namespace, or a TCP port here"
            )
        if self._closed:
            raise rpc.Unavailable("this worker has left the group")
        if not 0 < request.num_bytes <= MAX_BUFFER_BYTES:
            raise rpc.InvalidArgument(f"num_bytes: expected 1..{MAX_BUFFER_BYTES}, got {request.num_bytes}")
        most, held = self._max_bytes // SHARE_OF_CLIENT, self._held.get(client, 0)
        asked = _charge(request)
        if held + asked > most or self.num_bytes + asked > self._max_bytes:
            raise rpc.ResourceExhausted(
                f"num_bytes: expected at most {most} shared with one client and {self._max_bytes} in all, this would "
                f"make it {held + asked} and {self.num_bytes + asked}"
            )
        return not is_here

    def _listen_here(self) -> None:
        """For clients of this host."""
        name = f"crossdock-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(f"\0{name}")
        self._begin(sock, tcp=False)
        self._name = name

    def _begin(self, sock: socket.socket, *, tcp: bool) -> None:
        """Take connections of a socket, and begin the thread if it is the first."""
        sock.setblocking(False)
        sock.listen(MAX_PENDING)
        redeem = functools.partial(self._redeem, tcp)
        self._listeners.append(TicketListener(sock, self._selector, redeem))
        if len(self._listeners) == 1:
            self._selector.register(self.request_sockets, selectors.EVENT_READ, self.request_sockets.poll_selected)
            HelperThread("request buffers", go_on, self._turn).start()

    # The thread.

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            self._safely(key.data)
        now = time.monotonic()
        if now - self._looked_at >= TICK_S:
            self._looked_at = now
            self._safely(self.request_sockets.poll)  # a step may take long
            self._safely(functools.partial(self._expire, now))

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # one buffer must not end the others, nor this thread
            _log.seldom("request buffer failed", traceback=traceback.format_exc().strip())

    def _redeem(self, tcp: bool, ticket: bytes, sock: socket.socket) -> None:
        """A connection with a ticket gets its buffer."""
        offer = self._offers.get(ticket)
        try:
            if offer is None or offer.tcp is not tcp or self._closed or self._offers.pop(ticket, None) is None:
                offer = None
                raise OSError("no such ticket")
            memory = self._memory_of(offer, sock)
        except OSError as error:
            _log.debug("no request buffer", why=str(error))
            sock.close()
            if offer is not None:
                call_in_loop(offer.loop, offer.ended.set)
            return
        offer.sock = sock
        common = self._backend, offer, memory, self._drop
        buffer = ServedConnection(*common, self.request_sockets) if tcp else ServedBuffer(*common)
        self._open[buffer] = None
        self.request_sockets.add(sock, buffer.read)
        if offer.ended.is_set():  # its call ended in between
            end(sock)

    @staticmethod
    def _memory_of(offer: Offer, sock: socket.socket) -> RequestMemory:
        """Made, and the client told. Raises OSError."""
        if offer.tcp:
            memory = RequestMemory(offer.num_bytes)
            prepare(sock)
            sock.send(REDEEMED)
            return memory
        shared, fd = SharedMemory.make(offer.num_bytes)
        try:
            socket.send_fds(sock, [REDEEMED], [fd])
        finally:
            socket.close(fd)
        return shared

    def _drop(self, buffer: ServedBuffer) -> None:
        self.request_sockets.remove(buffer.sock)
        self._open.pop(buffer, None)
        buffer.sock.close()
        call_in_loop(buffer.offer.loop, buffer.offer.ended.set)

    def _expire(self, now: float) -> None:
        for listener in self._listeners:
            listener.expire(now)
        for ticket, offer in list(self._offers.items()):
            if now > offer.until and self._offers.pop(ticket, None) is not None:
                call_in_loop(offer.loop, offer.ended.set)
        for buffer in list(self._open):
            buffer.expire(now)


def _charge(request: expert_pb2.OpenBufferRequest) -> int:
    """Bytes that a buffer counts."""
    return max(LEAST_BYTES, request.num_bytes)


def _tcp_listener(host: str, port: int) -> socket.socket:
    """Bound, with small buffers, which its connections inherit. Raises OSError."""
    host = bound_to(host)
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
