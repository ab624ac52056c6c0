"""The data port: one listening socket and one thread of a process. It lets members of a group in, and nobody else.

A connection that has not proved membership within 5 s is closed; so is the oldest of more than 256 that have not.
Whatever it sends, at most HELLO_BYTES + PROOF_BYTES of it are read before that.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ep_kernels.errors import TransportError
from ep_kernels.network import handshake
from ep_kernels.network.address import takes_both
from ep_kernels.network.handshake import Greeting
from ep_kernels.network.network_config import split

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_PENDING = 256
_BACKLOG = 256

Admit = Callable[[Greeting, socket.socket], None]
"""Takes over the socket of a member."""


@dataclass(slots=True)
class _Pending:
    """A connection before its proof."""

    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    hello: Greeting | None = None
    challenge: bytes = b""

    @property
    def wanted(self) -> int:
        """Bytes that it may still send."""
        expected = handshake.HELLO_BYTES + (handshake.PROOF_BYTES if self.hello is not None else 0)
        return expected - len(self.received)


@dataclass(frozen=True, slots=True)
class Registration:
    """What belongs to a token that a hello may name: its secret, the one that is shared with the owner of a key, and
    who takes the connection."""

    secret: bytes
    pair: Callable[[bytes], bytes]
    admit: Admit


class Listener:
    """Accepts connections until `close`. Any thread.

    Attributes:
        address: (host, port) as bound.
        refused: connections that were closed because they were no member's, by reason; logged at 1, 10, 100, ...

    Raises:
        TransportError: the port cannot be listened on.
    """

    def __init__(self, listen: str) -> None:
        host, port = split(listen)
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._socket = socket.create_server(
                place[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=takes_both(host)
            )
        except OSError as error:
            raise TransportError(f"network.listen: cannot listen on {listen}: {error.strerror or error}") from error
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.refused: dict[str, int] = {}
        self._registered: dict[int, Registration] = {}
        self._lock = threading.RLock()  # as that of `Network`
        self._pending: dict[socket.socket, _Pending] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="crossdock-network-accept", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._close_sockets()
            raise TransportError(f"network: the thread of the data port cannot be started: {error}") from error

    def open(self, token: int, registration: Registration) -> None:
        with self._lock:
            self._registered[token] = registration

    def shut(self, token: int) -> None:
        """Nobody is admitted by `token` any more. Idempotent."""
        with self._lock:
            self._registered.pop(token, None)

    def close(self) -> None:
        self._waker.close()
        self._thread.join()

    def close_in_child(self) -> None:
        self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in (self._socket, self._waker, self._woken, *self._pending):
            connection.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            until = min((one.until for one in self._pending.values()), default=None)
            ready = self._selector.select(None if until is None else max(0.0, until - time.monotonic()))
            for key, _ in ready:
                if key.fileobj is self._woken:
                    self._close_sockets()
                    return
                if key.fileobj is self._socket:
                    self._accept()
                elif pending := self._pending.get(key.fileobj):  # type: ignore[call-overload]
                    self._read(pending)  # unless one that was accepted in this turn has displaced it
            for pending in [one for one in self._pending.values() if one.until <= time.monotonic()]:
                self._refuse(pending, "silent")

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # gone again, or out of descriptors: the next one may work
            time.sleep(0.01)
            return
        connection.setblocking(False)
        if len(self._pending) >= MAX_PENDING:
            self._refuse(min(self._pending.values(), key=lambda one: one.until), "too many at once")
        pending = _Pending(connection, time.monotonic() + HANDSHAKE_S)
        self._pending[connection] = pending
        try:
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:  # the host's limit of watched descriptors; this thread must go on
            self._refuse(pending, "no room")

    def _read(self, pending: _Pending) -> None:
        try:
            chunk = pending.connection.recv(pending.wanted)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._refuse(pending, "closed")
            return
        pending.received += chunk
        if pending.wanted:
            return
        if pending.hello is None:
            self._challenge(pending)
        else:
            self._judge(pending, pending.hello)

    def _challenge(self, pending: _Pending) -> None:
        try:
            pending.hello = handshake.decode(bytes(pending.received))
        except ValueError:
            self._refuse(pending, "no hello")
            return
        pending.challenge = secrets.token_bytes(handshake.CHALLENGE_BYTES)
        self._send(pending, pending.challenge)

    def _judge(self, pending: _Pending, hello: Greeting) -> None:
        with self._lock:
            found = self._registered.get(hello.token)
        raw = bytes(pending.received[: handshake.HELLO_BYTES])
        given = bytes(pending.received[handshake.HELLO_BYTES :])
        # An unknown token takes as long as a wrong secret, and nobody but a member costs more.
        secret = b"" if found is None else found.secret
        expected = handshake.membership(secret, raw, pending.challenge)
        is_member = handshake.is_proof(given[: handshake.MAC_BYTES], expected)
        if found is None or not is_member:
            self._refuse(pending, "unknown group" if found is None else "wrong secret")
            return
        pair = found.pair(hello.key)
        if not handshake.is_proof(given[handshake.MAC_BYTES :], handshake.ownership(pair, raw, pending.challenge)):
            self._refuse(pending, "not its key")
            return
        if not self._send(pending, handshake.answer(pair, raw, pending.challenge)):
            return
        self._forget(pending)
        try:
            found.admit(hello, pending.connection)
        except Exception as error:  # a member's words that make no sense end its connection, not this thread
            pending.connection.close()
            self._count("not admitted", f": {error}")

    def _send(self, pending: _Pending, words: bytes) -> bool:
        """A few bytes into an empty socket buffer."""
        try:
            pending.connection.sendall(words)
        except OSError:
            self._refuse(pending, "closed")
            return False
        return True

    def _refuse(self, pending: _Pending, why: str) -> None:
        self._forget(pending)
        pending.connection.close()
        self._count(why)

    def _count(self, why: str, more: str = "") -> None:
        number = self.refused[why] = self.refused.get(why, 0) + 1
        if str(number).strip("0") == "1":  # 1, 10, 100, ...: a scanner must not fill the log
            log.warning("data port %s:%d: refused %d connections: %s%s", *self.address, number, why, more)

    def _forget(self, pending: _Pending) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pending.connection)
        self._pending.pop(pending.connection, None)
