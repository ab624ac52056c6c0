"""A gRPC caller by hand: it sends a message in part, and never the rest."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from crossdock.common.addresses import split_address

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_CHUNK = 16384


class Caller:
    """One connection.

    Args:
        address: host:port of a server in plain text.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_connection(split_address(address))
        self._window, self._windows, self._first = 65535, dict[int, int](), 65535
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self.ended: set[int] = set()
        self.closed = False
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        self._socket.sendall(preface + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1)))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def call(self, stream: int, path: str) -> None:
        """Begin a call; `stream` is odd and greater than the last one."""
        with self._changed:
            self._windows[stream] = self._first
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        self._send(_frame(_HEADERS, _END_HEADERS, stream, b"".join(_field(*field) for field in fields.items())))

    def send_part(self, stream: int, size: int, num_bytes: int, timeout_s: float) -> int:
        """The first `num_bytes` of a message of `size`; how many the server took."""
        prefix = b"\0" + struct.pack(">I", size)
        self._send(_frame(_DATA, 0, stream, prefix))
        with self._changed:
            self._window -= len(prefix)
            self._windows[stream] -= len(prefix)
        sent = 0
        while sent < num_bytes:
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_over(stream) or self._room(stream) > 0, timeout_s):
                    return sent
                chunk = min(_CHUNK, num_bytes - sent, self._room(stream))
                if self._is_over(stream):
                    return sent
                self._window -= chunk
                self._windows[stream] -= chunk
            self._send(_frame(_DATA, 0, stream, bytes(chunk)))
            sent += chunk
        return sent

    def wait_ended(self, stream: int, timeout_s: float) -> bool:
        """Whether the server ends the call, or hangs up, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over(stream), timeout_s)

    def _is_over(self, stream: int) -> bool:
        return self.closed or stream in self.ended

    def _room(self, stream: int) -> int:
        return min(self._window, self._windows[stream])

    def _send(self, data: bytes) -> None:
        with self._writing, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def _read(self) -> None:
        left = b""
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                left += data
                while len(left) >= 9 and len(left) >= 9 + int.from_bytes(left[:3], "big"):
                    size = int.from_bytes(left[:3], "big")
                    self._take(left[3], left[4], int.from_bytes(left[5:9], "big"), left[9 : 9 + size])
                    left = left[9 + size :]
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind in {_SETTINGS, _PING} and not flags & _ACK:
            self._send(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        with self._changed:
            if kind == _WINDOW and stream:
                self._windows[stream] = self._windows.get(stream, self._first) + int.from_bytes(body, "big")
            elif kind == _WINDOW:
                self._window += int.from_bytes(body, "big")
            elif kind == _SETTINGS:
                for at in range(0, len(body), 6):
                    key, value = struct.unpack(">HI", body[at : at + 6])
                    if key == 4:
                        self._windows = {each: room + value - self._first for each, room in self._windows.items()}
                        self._first = value
            elif kind == _RST or (kind in {_HEADERS, _DATA} and flags & _END_STREAM):
                self.ended.add(stream)
            self._changed.notify_all()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _field(name: str, value: str) -> bytes:
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
