"""How requests and answers follow each other on a connection to a client of another host, whose memory nobody shares.

    client                                            worker
    OpenBuffer(num_bytes, tcp) ─────── gRPC ────────▶ checks role, security, room; offers a port and a ticket
    connect, ticket ─────────── TCP ────────────────▶ makes memory of its own, sends one byte
    size, ForwardRequest without data ──────────────▶ checks it, so knows how many bytes follow
    x, ids, weights ────────────────────────────────▶ received where a step reads x
    ◀────────────────── size, ForwardResponse without y
    y ◀─────────────────────────────────────────────  sent from where the step wrote it
    either end closes the connection ═══════════════▶ the other end has its end

A size is an uint32, little-endian, of the message alone: what the tensors take follows from their shapes. Both ends
have sockets that do not block, and go on where they stopped.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from crossdock.protocol.request_buffer import MAX_PACKET_BYTES

Into = TypeVar("Into")

TICKET_BYTES = 32
REDEEMED = b"."
"""A worker's answer to a ticket."""
_SIZE = struct.Struct("<I")
_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 20,  # seconds, also shorter than what firewalls remember
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,  # milliseconds in which the other end takes or acknowledges nothing
}
_READS = 4
"""Of one call; the socket keeps what is left."""
_FIRST_BYTES = 32 << 10
"""Of a message and what follows it that are read at once: small requests come in one piece."""


def prepare(sock: socket.socket) -> None:
    """Of either end: small packets leave at once, and a silent path ends the connection. Raises OSError."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Sender:
    """A message with tensors, on its way into a socket. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._left: list[memoryview] = []
        self._num_left = 0

    @property
    def pending(self) -> bool:
        """Whether something is not sent yet."""
        return self._num_left > 0

    def start(self, message: bytes, tensors: Sequence[memoryview] = ()) -> bool:
        """Send this next; the bytes of the tensors stay as they are until all is sent. Returns and raises as `push`."""
        self._left = [memoryview(_SIZE.pack(len(message)) + message), *tensors]
        self._num_left = sum(map(len, self._left))
        return self.push()

    def push(self) -> bool:
        """Send what the socket takes now. Whether all is sent. Raises OSError."""
        try:
            sent = self._sock.sendmsg(self._left) if self._num_left else 0
        except BlockingIOError:
            return False
        self._num_left -= sent
        self._left = _after(self._left, sent) if self._num_left else []
        return not self._num_left

    def drop(self) -> None:
        """Send no more."""
        self._left, self._num_left = [], 0


class Receiver:
    """Messages, and the tensors after each, out of a socket. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._read = bytearray(_FIRST_BYTES)
        self._view = memoryview(self._read)
        self._have = self._end = 0
        self._into: list[memoryview] = []

    @property
    def has_more(self) -> bool:
        """Whether bytes of a next message have been read already."""
        return self._have > 0

    def message(self) -> bytes | None:
        """The next message; `begin` is due then. None: not whole yet.

        Raises:
            EOFError: the end, or the connection is broken.
            DecodeError: no message is of that size.
        """
        found = self._whole() if self._have else None
        if found is None:
            room = self._view[self._have :] if self._have else self._view
            self._have += self._received(self._sock.recv_into, room)
            found = self._whole()
        return found

    def begin(self, tensors: Sequence[memoryview] = ()) -> None:
        """The tensors that follow the message go there."""
        at, have, self._into = self._end, self._have, []
        for tensor in tensors:
            count = len(tensor)
            if at + count <= have:
                tensor[:] = self._view[at : at + count]
            else:
                count = have - at
                tensor[:count] = self._view[at:have]
                self._into.append(tensor[count:])
            at += count
        self._have -= at
        if self._have:
            self._read[: self._have] = bytes(self._view[at : at + self._have])

    def fill(self) -> bool:
        """Receive tensors as far as they are here. Whether they are whole. Raises EOFError."""
        if not self._into:
            return True
        for _ in range(_READS):
            count = self._received(self._received_into, self._into) if self._into else 0
            if not count:
                break
            self._into = _after(self._into, count)
        return not self._into

    def _received_into(self, parts: list[memoryview]) -> int:
        return self._sock.recvmsg_into(parts)[0]

    @staticmethod
    def _received(read: Callable[[Into], int], into: Into) -> int:
        """How many bytes; 0: there are none yet."""
        try:
            count = read(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise EOFError from error
        if not count:
            raise EOFError
        return count

    def _whole(self) -> bytes | None:
        if self._have < _SIZE.size:
            return None
        (size,) = _SIZE.unpack_from(self._read)
        if not 0 < size <= MAX_PACKET_BYTES:
            raise DecodeError(f"message: expected 1..{MAX_PACKET_BYTES} bytes, got {size}")
        self._end = _SIZE.size + size
        return bytes(self._view[_SIZE.size : self._end]) if self._have >= self._end else None


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
