"""HTTP/2 by hand, for what no well-behaved library sends: unfinished messages, resets, false lengths, huge headers."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from tests.attack.scene import Scene

_HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
_READ_BYTES = 1 << 16
_RESET_CANCEL = 8
_FRAME_BYTES, _PREFIX_MAX = 1 << 14, 127
_HEADERS_FRAME, _CONTINUATION, _END_HEADERS = 1, 9, 4


class Connection:
    """One connection to a gRPC port."""

    def __init__(self, scene: Scene, address: str, timeout_s: float = 5.0) -> None:
        self.socket = scene.connect(address, timeout_s)
        config = h2.config.H2Configuration(client_side=True, validate_outbound_headers=False, header_encoding="utf-8")
        self.http = h2.connection.H2Connection(config)
        self.http.initiate_connection()
        self.flush()

    def flush(self) -> None:
        """Send what is ready."""
        self.socket.sendall(self.http.data_to_send())

    def open(self, path: str, *more: tuple[str, str]) -> int:
        """Headers of a new call; its stream."""
        stream: int = self.http.get_next_available_stream_id()
        self.http.send_headers(stream, [(":path", path), *_HEADERS, *more])
        self.flush()
        return stream

    def read(self) -> list[h2.events.Event]:
        """What came; raises OSError where nothing does, EOFError at the end."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise EOFError("closed by the server")
        events: list[h2.events.Event] = self.http.receive_data(data)
        self.flush()
        return events

    def close(self) -> None:
        """At once."""
        self.socket.close()


def ends_with(connection: Connection, seconds: float) -> str:
    """grpc-status and message of the first call that ends; or how the connection did."""
    deadline = time.monotonic() + seconds
    connection.socket.settimeout(seconds)
    try:
        while time.monotonic() < deadline:
            for event in connection.read():
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    headers = dict(event.headers)
                    if "grpc-status" in headers:
                        return f"status {headers['grpc-status']}"
                if isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    return "reset"
    except (OSError, EOFError, h2.exceptions.H2Error) as error:
        return "closed" if isinstance(error, EOFError | ConnectionError) else f"{type(error).__name__}"
    return "nothing"


def false_message(scene: Scene, address: str, path: str, prefix: bytes) -> str:
    """A message whose five bytes of prefix are `prefix`, and 100 of zeros."""
    connection = Connection(scene, address)
    stream = connection.open(path)
    connection.http.send_data(stream, prefix + b"\0" * 100)
    connection.flush()
    answer = ends_with(connection, 3.0)
    connection.close()
    return answer


def rapid_reset(scene: Scene, address: str, path: str, number: int) -> str:
    """Open and cancel calls as fast as can be; how many were sent."""
    connection, sent = Connection(scene, address), 0
    with contextlib.suppress(OSError, EOFError, h2.exceptions.H2Error):
        for sent in range(number):
            stream = connection.http.get_next_available_stream_id()
            connection.http.send_headers(stream, [(":path", path), *_HEADERS])
            connection.http.reset_stream(stream, _RESET_CANCEL)
            connection.flush()
            if sent % 100 == 0:
                connection.socket.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    connection.read()
                connection.socket.settimeout(5.0)
    connection.close()
    return f"{sent + 1} sent"


def huge_headers(scene: Scene, address: str, path: str, number: int) -> str:
    """Calls with a header of 1 MB each."""
    connection, sent = Connection(scene, address), 0
    with contextlib.suppress(OSError, EOFError, h2.exceptions.H2Error):
        while sent < number:
            block = _plain_block([(":path", path), *_HEADERS, ("x-a", os.urandom(500_000).hex())])
            connection.socket.sendall(_header_frames(2 * sent + 1, block))
            sent += 1
    connection.close()
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
    """Streams that each send all of a message but its last byte, and wait.

    Args:
        num_bytes: length that each message claims.
    """

    def __init__(self, scene: Scene, address: str, path: str, number: int, num_bytes: int) -> None:
        self._scene, self._address, self._path, self._num_bytes = scene, address, path, num_bytes
        self._open: list[socket.socket] = []
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
        sent = 0
        with contextlib.suppress(OSError, EOFError, h2.exceptions.H2Error):
            connection = Connection(self._scene, self._address, 3.0)
            with self._lock:
                self._open.append(connection.socket)
            stream = connection.open(self._path)
            connection.http.send_data(stream, b"\0" + struct.pack(">I", self._num_bytes))
            while sent < self._num_bytes - 1:
                window = connection.http.local_flow_control_window(stream)
                size = min(window, connection.http.max_outbound_frame_size, self._num_bytes - 1 - sent)
                if size > 0:
                    connection.http.send_data(stream, b"\0" * size)
                    connection.flush()
                    sent += size
                else:
                    connection.read()
        with self._lock:
            self.sent_bytes += sent
