"""How a worker connects to another one to read weights: over a UNIX socket of the same host, else TCP; TLS where the
group has certificates. The other end: `requests/greeter.py`."""

from __future__ import annotations

import functools
import socket
import ssl
import threading
import time
from collections.abc import Callable

from crossdock.common.addresses import split_address
from crossdock.common.security import Security
from crossdock.protocol import frames
from crossdock.protocol.frames import Frame, FrameError, FrameKind
from crossdock.protocol.same_host import host_identity
from crossdock.worker.experts.placement import Holder
from crossdock.worker.peers.giving import IDLE_S
from crossdock.worker.peers.messages import WeightLine

DIAL_S = 5.0
"""Time to connect, to the welcome."""
_own_host: Callable[[], str] = functools.cache(host_identity)


class Withheld(Exception):
    """The holder does not give what was asked for, and said why."""


def is_near(holder: Holder) -> bool:
    """Whether its UNIX socket can be called from here."""
    return bool(holder.socket and holder.host) and holder.host == _own_host()


def dial(holder: Holder, security: Security | None) -> WeightLine:
    """A welcomed connection. Raises OSError, EOFError, FrameError, Withheld, ValueError: an address that is none."""
    host, name = split_address(holder.address)[0], holder.socket if is_near(holder) else ""
    if name:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DIAL_S)
        sock.connect(f"\0{name}")
    else:
        sock = socket.create_connection((host, holder.port), DIAL_S)
    try:
        frames.prepare(sock)
        context = security.request_caller() if security is not None else None
        if context is not None and security is not None:
            sock = context.wrap_socket(sock, server_hostname=security.config.worker_name or host)
        token = security.token() if security is not None else ""
        sock.sendall(frames.hello(token, name, FrameKind.READER))
        if name and isinstance(sock, ssl.SSLSocket):
            sock = _unwrapped(sock)
        line = WeightLine(sock, DIAL_S)
        frames.welcome_of(_frame(line))
    except BaseException:
        sock.close()
        raise
    return line


def _unwrapped(sock: ssl.SSLSocket) -> socket.socket:
    """The UNIX socket, once the holder has ended TLS. Raises OSError, Withheld."""
    first = sock.recv(frames.HEADER.size)
    if first:
        line = WeightLine(sock, DIAL_S)
        _frame(line, first)
        raise FrameError("welcome: expected the end of TLS, got a frame")
    sock.unwrap()
    return frames.plain_socket(sock)


def _frame(line: WeightLine, head: bytes = b"") -> Frame:
    """The next frame. Raises OSError, EOFError, FrameError, Withheld: it is an error."""
    rest = bytearray(frames.HEADER.size - len(head))
    line.receive_into(memoryview(rest))
    rows, count, kind, _, number = frames.HEADER.unpack(head + rest)
    if rows or count > frames.MAX_FIELDS_BYTES:
        raise FrameError("frame: expected one without rows, got something else")
    fields = bytearray(count)
    line.receive_into(memoryview(fields))
    frame = Frame(kind, number, bytes(fields))
    if kind == FrameKind.ERROR:
        raise Withheld(frames.error_of(frame).message)
    return frame


class WeightLines:
    """Connections to holders, kept for a while after each use. Any thread."""

    def __init__(self, security: Security | None) -> None:
        self._security, self._lock = security, threading.Lock()
        self._idle: dict[Holder, list[tuple[float, WeightLine]]] = {}

    def take(self, holder: Holder) -> WeightLine:
        """One that nobody else has. Raises as `dial`."""
        with self._lock:
            kept = self._idle.get(holder, [])
            while kept:
                at, line = kept.pop()
                if time.monotonic() - at < IDLE_S / 2:
                    return line
                line.close()
        return dial(holder, self._security)

    def give_back(self, holder: Holder, line: WeightLine) -> None:
        """One on which nothing is under way."""
        with self._lock:
            self._idle.setdefault(holder, []).append((time.monotonic(), line))

    def close(self) -> None:
        with self._lock:
            for kept in self._idle.values():
                for _, line in kept:
                    line.close()
            self._idle.clear()
