"""A gRPC caller by hand, for what no well-behaved library sends: unfinished messages, resets, false lengths, headers
without end. Everything happens in the caller's own thread; what the server says is read where it is waited for."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from crossdock.common.addresses import split_address

Connect = Callable[[str], socket.socket]
"""From host:port to a socket on which HTTP/2 can begin."""

_HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
_CONNECT_S, _ANSWER_S, _STALLED_S = 5.0, 3.0, 3.0
_READ_BYTES = 1 << 16
_RESET_CANCEL = 8
_FRAME_BYTES, _PREFIX_MAX = 1 << 14, 127
_HEADERS_FRAME, _CONTINUATION, _END_HEADERS = 1, 9, 4
_BROKEN = (OSError, EOFError, h2.exceptions.H2Error)


def plain(address: str) -> socket.socket:
    """A socket to host:port, in plain text."""
    return socket.create_connection(split_address(address), _CONNECT_S)


class Caller:
    """One connection to a gRPC port.

    Args:
        address: host:port.
        connect: how to reach it.

    Attributes:
        socket: the connection.
        http: its state.
        status: grpc-status of the first call that has one; "": none yet.
        ended: streams that the server has ended.
        closed: the server, or `close`, has ended the connection.
    """

    def __init__(self, address: str, connect: Connect = plain) -> None:
        self.socket = connect(address)
        config = h2.config.H2Configuration(client_side=True, validate_outbound_headers=False, header_encoding="utf-8")
        self.http = h2.connection.H2Connection(config)
        self.status, self.ended, self.closed = "", set[int](), False
        self.http.initiate_connection()
        self.flush()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self.socket.close()

    def flush(self) -> None:
        """Send what is ready."""
        self.socket.sendall(self.http.data_to_send())

    def call(self, path: str, *, reset: bool = False) -> int:
        """Begin a call, and perhaps cancel it at once; its stream."""
        stream: int = self.http.get_next_available_stream_id()
        self.http.send_headers(stream, [(":path", path), *_HEADERS])
        if reset:
            self.http.reset_stream(stream, _RESET_CANCEL)
        self.flush()
        return stream

    def send_part(self, stream: int, size: int, num_bytes: int, timeout_s: float = _STALLED_S) -> int:
        """The first `num_bytes` of a message of `size`; how many the server took before it ended the call, or gave no
        room for `timeout_s`."""
        sent = 0
        with contextlib.suppress(*_BROKEN):
            self.http.send_data(stream, b"\0" + struct.pack(">I", size))
            while sent < num_bytes and not self._is_over(stream):
                room = min(self.http.local_flow_control_window(stream), self.http.max_outbound_frame_size)
                if room > 0:
                    chunk = min(room, num_bytes - sent)
                    self.http.send_data(stream, bytes(chunk))
                    self.flush()
                    sent += chunk
                elif not self.read(timeout_s):
                    break
            self.flush()
        return sent

    def wait_ended(self, stream: int, timeout_s: float) -> bool:
        """Whether the server ends the call, or hangs up, in time."""
        last_at = time.monotonic() + timeout_s
        with contextlib.suppress(*_BROKEN):
            while not self._is_over(stream) and self.read(last_at - time.monotonic()):
                pass
        return self._is_over(stream)

    def read(self, timeout_s: float) -> bool:
        """Take what comes, and answer it; False: nothing did. Raises OSError, H2Error."""
        self.socket.settimeout(max(timeout_s, 1e-3))
        try:
            data = self.socket.recv(_READ_BYTES)
        except TimeoutError:
            return False
        except OSError:
            self.closed = True
            raise
        finally:
            self.socket.settimeout(_CONNECT_S)
        self.closed = not data
        for event in self.http.receive_data(data) if data else ():
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self.status = self.status or dict(event.headers or ()).get("grpc-status", "")
            if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self.ended.add(event.stream_id or 0)
            if isinstance(event, h2.events.ConnectionTerminated):
                self.closed = True
        if not self.closed:
            self.flush()
        return True

    def _is_over(self, stream: int) -> bool:
        return self.closed or stream in self.ended


def false_message(address: str, path: str, prefix: bytes, connect: Connect = plain) -> str:
    """A message whose five bytes of prefix are `prefix`, and 100 of zeros; how the call ends."""
    caller = Caller(address, connect)
    stream = caller.call(path)
    caller.http.send_data(stream, prefix + b"\0" * 100)
    caller.flush()
    over = caller.wait_ended(stream, _ANSWER_S)
    closed = caller.closed
    caller.close()
    if caller.status:
        return f"status {caller.status}"
    return ("closed" if closed else "reset") if over else "nothing"


def rapid_reset(address: str, path: str, number: int, connect: Connect = plain) -> str:
    """Begin and cancel calls as fast as can be; how many were sent."""
    caller, sent = Caller(address, connect), 0
    with contextlib.suppress(*_BROKEN):
        while sent < number and not caller.closed:
            caller.call(path, reset=True)
            sent += 1
            if sent % 100 == 0:
                caller.read(0.0)
    caller.close()
    return f"{sent} sent"


def huge_headers(address: str, path: str, number: int, connect: Connect = plain) -> str:
    """Calls with a header of 1 MB each."""
    caller, sent = Caller(address, connect), 0
    with contextlib.suppress(*_BROKEN):
        while sent < number:
            block = _plain_block([(":path", path), *_HEADERS, ("x-a", os.urandom(500_000).hex())])
            caller.socket.sendall(_header_frames(2 * sent + 1, block))
            sent += 1
    caller.close()
    return f"closed after {sent}"


def _plain_block(headers: list[tuple[str, str]]) -> bytes:
    """HPACK, each header as a literal that enters no table."""

    def text(word: str) -> bytes:
        size, out = len(word), bytearray()
        if size < _PREFIX_MAX:
            return bytes([size]) + word.encode()
        size -= _PREFIX_MAX
        out.append(_PREFIX_MAX)
        while size >= 1 << 7:
            out.append(size % (1 << 7) | 1 << 7)
            size >>= 7
        out.append(size)
        return bytes(out) + word.encode()

    return b"".join(b"\0" + text(name) + text(value) for name, value in headers)


def _header_frames(stream: int, block: bytes) -> bytes:
    """A HEADERS frame and what continues it."""
    parts = [block[at : at + _FRAME_BYTES] for at in range(0, len(block), _FRAME_BYTES)]
    frames = bytearray()
    for number, part in enumerate(parts):
        kind = _CONTINUATION if number else _HEADERS_FRAME
        flags = _END_HEADERS if number == len(parts) - 1 else 0
        frames += struct.pack(">I", len(part))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + part
    return bytes(frames)


class Unfinished:
    """Connections that each send all of a message but its last byte, and wait. Blocks until no more is taken.

    Args:
        num_bytes: length that each message claims.
    """

    def __init__(self, address: str, path: str, number: int, num_bytes: int, connect: Connect = plain) -> None:
        self._address, self._path, self._num_bytes, self._connect = address, path, num_bytes, connect
        self._open: list[Caller] = []
        self._lock, self.sent_bytes = threading.Lock(), 0
        threads = [threading.Thread(target=self._send, daemon=True) for _ in range(number)]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join(30)

    def close(self) -> None:
        """Hang up."""
        for each in self._open:
            each.close()

    def _send(self) -> None:
        with contextlib.suppress(*_BROKEN):
            caller = Caller(self._address, self._connect)
            with self._lock:
                self._open.append(caller)
            sent = caller.send_part(caller.call(self._path), self._num_bytes, self._num_bytes - 1)
            with self._lock:
                self.sent_bytes += sent
