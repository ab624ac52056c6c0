"""All request connections of a worker: the sockets it listens on, and the thread that waits for them.

Clients of this host connect to a UNIX socket in the abstract namespace, others to a TCP port; `Describe` names both.
Where the worker has certificates both speak TLS, the former until both ends know each other. Requests are read by the
thread of the steps while it is awake (`request_sockets.py`), else by a thread that waits for all sockets. Answers are
sent by the thread that has them.
"""

from __future__ import annotations

import asyncio
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable

from crossdock.common import descriptors, log, rpc
from crossdock.common.access import CallAuthorizer
from crossdock.common.addresses import bound_to, family_of, format_address, not_bound, split_address
from crossdock.common.call_errors import ResourceExhausted, Unavailable
from crossdock.common.helper_thread import HelperThread, go_on
from crossdock.common.security import Security
from crossdock.protocol import frames
from crossdock.protocol.frames import FrameError, FrameKind, FrameSocket
from crossdock.protocol.same_host import host_identity
from crossdock.protocol.v1 import control_pb2, expert_pb2
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.greeter import MAX_STRANGERS, Greeter
from crossdock.worker.requests.request_slots import RequestSlots
from crossdock.worker.requests.served_connection import MAX_IN_FLIGHT, ServedConnection
from crossdock.worker.steps.request_sockets import RequestSockets

_log = log.get(__name__)

TICK_S = 0.25
"""Interval in which deadlines are looked at."""
SOCKET_BYTES = 512 << 10
"""Most that the kernel may hold of a connection, in either direction; its own limit may be lower."""
MAX_CONNECTIONS, SHARE_OF_CLIENT = 1024, 4
"""Of all clients, fewer where descriptors are; one client gets this part of them."""
IDLE_S = 1.0
"""Without a request for so long, a connection may be closed for another of its client."""
OLD_S = 1800.0
"""Age at which a client is asked to dial again: an expired certificate, or a token, is noticed by then."""
GRACE_S = 600.0
"""Time for it."""


class RequestServer:
    """All request connections of a worker.

    Args:
        security: TLS and tokens of this worker; None: plain text.
        authorizer: of its callers; None: all are welcome.
        give: takes the connection of another worker, which reads weights; raises CallError. None: there are no weights.
    """

    def __init__(
        self,
        backend: Backend,
        security: Security | None = None,
        authorizer: CallAuthorizer | None = None,
        give: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._backend, self._security, self._authorizer, self._give = backend, security, authorizer, give
        spec = backend.validator.spec
        self._slots = RequestSlots(spec.hidden_size, spec.topk, backend.validator.dtype)
        self._host, self._open, self._lock = host_identity(), dict[ServedConnection, None](), threading.Lock()
        self.request_sockets = RequestSockets()
        backend.engine.read_from(self.request_sockets)
        self._selector, self._greeters = selectors.DefaultSelector(), list[Greeter]()
        self._max_request_bytes = min(frames.MAX_REQUEST_BYTES, backend.config.max_queued_bytes_per_client)
        self._name, self.port, self._closed, self._looked_at = "", 0, False, 0.0

    def __len__(self) -> int:
        return len(self._open)

    def listen(self) -> None:
        """Take connections from now on. Raises rpc.ListenError."""
        config = self._backend.config
        address = format_address(split_address(config.listen)[0], config.request_port)
        try:
            sock = _tcp_listener(*split_address(address))
        except OSError as error:
            raise rpc.ListenError(f"request_port: {not_bound(address, error)}") from error
        self.port = sock.getsockname()[1]
        here = socket.socket(socket.AF_UNIX)
        self._name = f"crossdock-{secrets.token_hex(16)}"
        here.bind(f"\0{self._name}")
        for each, name in ((sock, ""), (here, self._name)):
            each.setblocking(False)
            each.listen(MAX_STRANGERS)
            about = name, self._security, self._authorizer
            self._greeters.append(Greeter(each, self._selector, *about, self._welcome))
        self._selector.register(self.request_sockets, selectors.EVENT_READ, self.request_sockets.poll_selected)
        HelperThread("request connections", go_on, self._turn).start()

    def describe(self, response: expert_pb2.DescribeResponse) -> expert_pb2.DescribeResponse:
        response.request_port, response.request_socket, response.request_host = self.port, self._name, self._host
        return response

    @property
    def holder(self) -> control_pb2.Holder:
        """Where other workers read weights."""
        return control_pb2.Holder(port=self.port, socket=self._name, host=self._host)

    async def end(self, timeout_s: float) -> None:
        """Take no more connections, and end all: those with requests or answers here once these are gone, or after
        `timeout_s`."""
        self._closed = True
        until = time.monotonic() + timeout_s
        for connection in self._connections():
            connection.go_away()
        while any(not connection.is_idle for connection in self._connections()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self.close()

    def close(self) -> None:
        """End all connections at once. Idempotent."""
        self._closed = True
        for connection in self._connections():
            connection.end()

    def _connections(self) -> tuple[ServedConnection, ...]:
        with self._lock:
            return tuple(self._open)

    # The thread.

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            self._safely(key.data)
        now = time.monotonic()
        if now - self._looked_at >= TICK_S:
            self._looked_at = now
            self._safely(self.request_sockets.poll)  # a step may take long
            for greeter in self._greeters:
                greeter.expire(now)
            for connection in self._connections():
                connection.expire(now)
                if now - connection.opened_at > OLD_S + GRACE_S:
                    connection.end()
                elif now - connection.opened_at > OLD_S and not connection.was_sent_away:
                    connection.go_away()

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # one connection must not end the others, nor this thread
            _log.seldom("request connection failed", traceback=traceback.format_exc().strip())

    def _welcome(self, client: object, line: FrameSocket, kind: FrameKind) -> None:
        """A connection of a known client. Raises CallError, OSError, FrameError."""
        if self._closed:
            raise Unavailable("this worker has left the group")
        if kind == FrameKind.READER:
            if self._give is None or line.has_read_more:
                raise FrameError("reader: expected one that waits for its welcome, at a worker with weights")
            self._give(line.sock)
            return
        self._make_place(client)
        line.state.max_rows_bytes = self._max_request_bytes
        connection = ServedConnection(self._backend, self._slots, self.request_sockets, client, line, self._drop)
        with self._lock:
            self._open[connection] = None
        self.request_sockets.add(line.sock, connection.read)
        connection.welcome(frames.welcome(MAX_IN_FLIGHT, self._max_request_bytes))
        self.request_sockets.again(connection.read)  # TLS may hold what came behind HELLO

    def _make_place(self, client: object) -> None:
        """Close a connection that its client does not use, if there are as many as may be. Raises CallError."""
        most = descriptors.share(MAX_CONNECTIONS, descriptors.REQUESTS)
        everybody = self._connections()
        own = [connection for connection in everybody if connection.client == client]
        full = len(own) >= max(1, most // SHARE_OF_CLIENT)
        if not full and len(everybody) < most:
            return
        now = time.monotonic()
        idle = [each for each in (own if full else everybody) if each.is_idle and now - each.used_at > IDLE_S]
        if not idle:
            limit = f"{max(1, most // SHARE_OF_CLIENT)} of one client and {most} in all"
            raise ResourceExhausted(f"connections: expected at most {limit}, got one more")
        min(idle, key=lambda each: each.used_at).end()

    def _drop(self, connection: ServedConnection) -> None:
        self.request_sockets.remove(connection.line.sock)
        with self._lock:
            self._open.pop(connection, None)
        connection.line.close()


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
