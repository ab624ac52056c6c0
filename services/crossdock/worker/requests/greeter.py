"""A listening socket of request connections: each has a deadline to say who it is, by TLS and HELLO, before anything
of it is kept; few at a time have not.

Over a UNIX socket TLS ends with that: what follows does not leave the kernel, and goes without. A client says in HELLO
which socket it has called. Only this process can have that name, so nobody is between the two.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crossdock.common import descriptors, log
from crossdock.common.access import CallAuthorizer, host_of
from crossdock.common.call_errors import CallError, Unavailable, Unimplemented, code_number
from crossdock.common.security import Security
from crossdock.protocol import frames
from crossdock.protocol.frames import FrameError, FrameSocket

MAX_STRANGERS = 64
"""Connections that have not said who they are, fewer where descriptors are; above it the oldest is closed."""
GREETING_S = 5.0
"""Time for it."""
METHODS = {
    frames.FrameKind.HELLO: "/crossdock.v1.ExpertService/Forward",
    frames.FrameKind.READER: "/crossdock.v1.ExpertService/ReadWeights",
}
"""The call whose rules hold for a connection, by its first frame."""

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class OtherEnd:
    """The other end, as the authorizer asks a gRPC call about it."""

    address: str
    certificate: Mapping[str, tuple[bytes, ...]]
    token: str = ""

    def peer(self) -> str:
        return self.address

    def auth_context(self) -> Mapping[str, tuple[bytes, ...]]:
        """Names in its certificate, by kind."""
        return self.certificate

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Its token."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


@dataclass(slots=True, eq=False)
class _Stranger:
    """A connection that has not said who it is, and until when it may; then, whose it is."""

    line: FrameSocket
    until: float
    is_secure: bool
    client: object = None
    kind: frames.FrameKind = frames.FrameKind.HELLO


class Greeter:
    """One listening socket. Everything is called by the thread that selects.

    Args:
        sock: listens, and does not block.
        selector: of that thread.
        name: of the UNIX socket, in the abstract namespace; empty: TCP.
        security: TLS and tokens of this worker; None: plain text.
        authorizer: of its callers; None: all are welcome.
        welcome: called with a client (the names in its certificate, or its host), its connection, which is its own
            from then on, and the kind of its first frame. Raises CallError.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        name: str,
        security: Security | None,
        authorizer: CallAuthorizer | None,
        welcome: Callable[[object, FrameSocket, frames.FrameKind], None],
    ) -> None:
        self._sock, self._selector, self._security = sock, selector, security
        self._name, self._authorizer, self._welcome = name, authorizer, welcome
        self._strangers: dict[_Stranger, None] = {}
        self._accepts = False
        self.expire(0.0)

    def expire(self, now: float) -> None:
        """Close connections that are past their deadline, and accept more again."""
        if not self._accepts:
            self._accepts = True
            self._selector.register(self._sock, selectors.EVENT_READ, self._accept)
        for stranger in [each for each in self._strangers if now > each.until]:
            self._drop(stranger).sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:  # no descriptor is free, for instance: the connection waits, and nobody else does
            self._accepts = False
            self._selector.unregister(self._sock)
            return
        sock.setblocking(False)
        if len(self._strangers) >= descriptors.share(MAX_STRANGERS, descriptors.STRANGERS):
            self._drop(next(iter(self._strangers))).sock.close()
        context = self._security.request_server() if self._security is not None else None
        try:
            frames.prepare(sock)
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it is gone again
            sock.close()
            return
        stranger = _Stranger(FrameSocket(sock, 0), time.monotonic() + GREETING_S, context is None)
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._read, stranger))

    def _read(self, stranger: _Stranger) -> None:
        """The handshake of TLS, HELLO, and the end of TLS, in one piece or several."""
        if stranger not in self._strangers:  # it was closed for another since it was selected
            return
        try:
            if not self._is_known(stranger):
                return
            line = self._drop(stranger)
            if line.sock.family == socket.AF_UNIX and isinstance(line.sock, ssl.SSLSocket):
                line = stranger.line = FrameSocket(frames.plain_socket(line.sock), 0)
            self._welcome(stranger.client, line, stranger.kind)
            return
        except CallError as error:
            about = frames.Error(code_number(error.code), 0, (), str(error))
            with contextlib.suppress(OSError):
                stranger.line.send([frames.error(0, about)])
        except (EOFError, OSError, FrameError) as error:
            _log.debug("no request connection", why=str(error))
        if stranger in self._strangers:
            self._drop(stranger)
        stranger.line.sock.close()

    def _is_known(self, stranger: _Stranger) -> bool:
        """Whether it has said who it is, and over a UNIX socket TLS has ended. Raises CallError, EOFError, OSError,
        FrameError."""
        sock = stranger.line.sock
        try:
            if not stranger.is_secure:
                assert isinstance(sock, ssl.SSLSocket)
                sock.do_handshake()  # what it writes is less than any socket's buffer
                stranger.is_secure = True
            if stranger.client is None:
                if stranger.line.next() == frames.NOTHING:
                    return False
                frame = stranger.line.frame()
                hello, stranger.kind = frames.hello_of(frame), frames.FrameKind(frame.kind)
                stranger.client = self._client_of(sock, METHODS[stranger.kind], *hello)
            if sock.family == socket.AF_UNIX and isinstance(sock, ssl.SSLSocket):
                sock.unwrap()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        return True

    def _client_of(self, sock: socket.socket, method: str, version: int, token: str, called: str) -> object:
        """Whose connection it is. Raises CallError."""
        if version != frames.VERSION:
            raise Unimplemented(f"version: expected {frames.VERSION}, got {version}")
        if called != self._name:
            raise Unavailable("name: expected this worker's socket, got another's")
        peer = OtherEnd(_address_of(sock), _names_in(sock), token)
        if self._authorizer is None:
            return host_of(peer)
        caller = self._authorizer.admit(method, peer)
        return caller.names or caller.host

    def _drop(self, stranger: _Stranger) -> FrameSocket:
        del self._strangers[stranger]
        self._selector.unregister(stranger.line.sock)
        return stranger.line


def _address_of(sock: socket.socket) -> str:
    """As gRPC writes it; of this host, the user of the other end."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"unix:uid={uid}:0"
    host, port, *_ = sock.getpeername()
    host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _names_in(sock: socket.socket) -> dict[str, tuple[bytes, ...]]:
    """Names in the certificate of the other end, which was verified; none without one."""
    shown: Mapping[str, Any] = (sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None) or {}
    others, subject = shown.get("subjectAltName", ()), shown.get("subject", ())
    return {
        "peer_uri": tuple(str(name).encode() for kind, name in others if kind == "URI"),
        "peer_dns": tuple(str(name).encode() for kind, name in others if kind == "DNS"),
        "x509_common_name": tuple(str(name).encode() for ((kind, name), *_) in subject if kind == "commonName"),
    }
