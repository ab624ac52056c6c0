"""Frames of a request connection, byte by byte, and the socket that carries them: docs/request-protocol.md.

    client                                       worker
    HELLO   version, token       ──────────────▶ role checked
            ◀──────────────────  WELCOME         version, requests in flight, bytes of a request
    FORWARD id, layer, shapes, ... x ids weights ▶ fields checked, then the rows are received where a step reads them
    CANCEL  id                   ──────────────▶
            ◀────────────────── ANSWER id, times, y · ERROR id, code, message          in any order
    PING ──▶ PONG,  GOAWAY ◀──   no new request here: dial again
    MEMORY  bytes                ──────────────▶ of one host: the rows of FORWARD and ANSWER may lie in memory
            ◀──────────────────  MEMORY          that both map (shared_memory.py), in place of behind the frame

    READER in the place of HELLO: another worker, which reads weights; what follows WELCOME is in messages.py of peers/

Nothing is allocated for what a header says before it was checked against the limits of its kind.

Letters: T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from crossdock.protocol import native

NOTHING, ROWS = native.NOTHING, native.ROWS
"""What `FrameSocket.next` says but for the kind of a frame."""
VERSION = 1
MAGIC = b"XDCK"
MAX_FIELDS_BYTES = 4096
MAX_REQUEST_BYTES = 16 << 20
"""Of x, ids and weights; a worker may say less."""
MAX_TOKEN_BYTES = 2048
NOWHERE = (1 << 32) - 1
"""The place of rows that follow their frame."""
MAX_TEXT_BYTES = 1024
"""Of an error's message; longer ones are cut."""


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    FORWARD = 3
    ANSWER = 4
    ERROR = 5
    CANCEL = 6
    PING = 7
    PONG = 8
    GOAWAY = 9
    MEMORY = 10
    READER = 11


DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
"""Of x and y, by their code."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

HEADER = struct.Struct("<IHBBQ")
"""Bytes of rows and of fields, kind, 0, id."""
FORWARD, ANSWER = struct.Struct("<IHBBQIIIHBBIHHI"), struct.Struct("<IHBBQQQQQIIIBBH")
"""Header and fields, without texts."""
_FORWARD, _ANSWER = struct.Struct("<IIIHBxIHHI"), struct.Struct("<QQQQIIIB?H")
_FORWARD_KIND, _ANSWER_KIND = int(FrameKind.FORWARD), int(FrameKind.ANSWER)
_HELLO = struct.Struct("<4sHHH")
_WELCOME = struct.Struct("<HHI")
_ERROR = struct.Struct("<IHHQ")
_MEMORY = struct.Struct("<I")
_RECORD_BYTES = 16 << 10
"""Of TLS: smaller frames are joined into one."""


class FrameError(ValueError):
    """The other end does not speak this protocol, or breaks its limits: the connection ends."""


class Frame(NamedTuple):
    """Header and fields of a frame without rows."""

    kind: int
    id: int
    fields: bytes


class Forward(NamedTuple):
    """A request: `ForwardRequest` of expert.proto, with the shapes of its tensors. place: where they are in the memory
    that both ends map; NOWHERE: they follow. num_bytes: of x [T, H], topk_ids int32 [T, K] and topk_weights float32
    [T, K], which follow each other."""

    id: int
    layer: int
    num_tokens: int
    hidden: int
    topk: int
    dtype: torch.dtype
    timeout_ms: int
    model: str
    traceparent: str
    num_bytes: int
    place: int = NOWHERE


class Answer(NamedTuple):
    """An answer; y [T, H] follows, or is where x was. Times in nanoseconds."""

    queue_ns: int
    dispatch_ns: int
    experts_ns: int
    combine_ns: int
    steps: int
    num_tokens: int
    hidden: int
    dtype: torch.dtype
    model: str
    in_place: bool = False


class Error(NamedTuple):
    """An error, as `Error` of expert.proto."""

    code: int
    epoch: int
    lost_ranks: tuple[int, ...]
    message: str


def request_bytes(num_tokens: int, hidden: int, topk: int, dtype: torch.dtype) -> int:
    return num_tokens * (hidden * dtype.itemsize + 8 * topk)


def plain(kind: FrameKind, frame_id: int = 0) -> bytes:
    return HEADER.pack(0, 0, kind, 0, frame_id)


def hello(token: str, name: str = "", kind: FrameKind = FrameKind.HELLO) -> bytes:
    """What a client says first. token: "" for none; name: of the UNIX socket that it has called, "" for TCP; kind:
    READER from a worker that reads weights."""
    secret, called = token.encode(), name.encode()
    fields = _HELLO.pack(MAGIC, VERSION, len(secret), len(called)) + secret + called
    return HEADER.pack(0, len(fields), kind, 0, 0) + fields


def hello_of(frame: Frame) -> tuple[int, str, str]:
    """(version, token, name). Raises FrameError."""
    magic, version, count, called = _unpack(_HELLO, frame)
    texts, is_whole = frame.fields[_HELLO.size :], len(frame.fields) == _HELLO.size + count + called
    is_first = frame.kind in (FrameKind.HELLO, FrameKind.READER)
    if not is_first or magic != MAGIC or not is_whole or count > MAX_TOKEN_BYTES:
        raise FrameError("hello: expected one of this protocol, got something else")
    return version, _text(texts[:count], "token"), _text(texts[count:], "name")


def welcome(num_requests: int, max_request_bytes: int) -> bytes:
    """A worker's answer to it: how much may be in flight on this connection."""
    fields = _WELCOME.pack(VERSION, num_requests, max_request_bytes)
    return HEADER.pack(0, len(fields), FrameKind.WELCOME, 0, 0) + fields


def welcome_of(frame: Frame) -> tuple[int, int]:
    """(requests in flight, bytes of one). Raises FrameError."""
    _, num_requests, num_bytes = _unpack(_WELCOME, frame)
    if frame.kind != FrameKind.WELCOME or not num_requests or not num_bytes:
        raise FrameError(f"welcome: expected one, got a frame of kind {frame.kind}")
    return num_requests, num_bytes


def forward(
    number: int,
    layer: int,
    num_tokens: int,
    hidden: int,
    topk: int,
    dtype: torch.dtype,
    timeout_ms: int,
    model: str,
    traceparent: str,
    num_bytes: int,
    place: int = NOWHERE,
) -> bytes:
    """Header and fields of a request, arguments as of `Forward`. Raises FrameError: a text is too long, or a number too
    large."""
    texts = (model.encode(), traceparent.encode()) if model or traceparent else (b"", b"")
    lengths = len(texts[0]), len(texts[1])
    size, rows = _FORWARD.size + sum(lengths), num_bytes if place == NOWHERE else 0
    if size > MAX_FIELDS_BYTES:
        raise FrameError(f"model: expected at most {MAX_FIELDS_BYTES - _FORWARD.size} bytes, got {lengths[0]}")
    sizes = layer, num_tokens, hidden, topk
    try:
        head = FORWARD.pack(rows, size, _FORWARD_KIND, 0, number, *sizes, CODES[dtype], 0, timeout_ms, *lengths, place)
    except struct.error as error:
        raise FrameError(f"x: expected a request that a frame can hold, got {sizes}: {error}") from None
    return head + texts[0] + texts[1] if size > _FORWARD.size else head


def answer(number: int, about: Answer) -> bytes:
    """Header and fields of an answer."""
    queue_ns, dispatch_ns, experts_ns, combine_ns, steps, tokens, hidden, dtype, model, in_place = about
    text, rows = model.encode(), 0 if in_place else tokens * hidden * dtype.itemsize
    size, times = _ANSWER.size + len(text), (queue_ns, dispatch_ns, experts_ns, combine_ns)
    shape = tokens, hidden, CODES[dtype], in_place
    return ANSWER.pack(rows, size, _ANSWER_KIND, 0, number, *times, steps, *shape, len(text)) + text


def error(number: int, about: Error) -> bytes:
    """A whole error; number 0: of the connection."""
    code, epoch, ranks, message = about
    text = message.encode()[:MAX_TEXT_BYTES]
    ranks = ranks[: (MAX_FIELDS_BYTES - MAX_TEXT_BYTES - _ERROR.size) // 4]
    fields = _ERROR.pack(code, len(ranks), len(text), epoch) + struct.pack(f"<{len(ranks)}I", *ranks) + text
    return HEADER.pack(0, len(fields), FrameKind.ERROR, 0, number) + fields


def error_of(frame: Frame) -> Error:
    """The error. Raises FrameError."""
    code, num_ranks, count, epoch = _unpack(_ERROR, frame)
    end = _ERROR.size + 4 * num_ranks
    if len(frame.fields) != end + count:
        raise FrameError("error: expected fields that fit each other, got others")
    ranks = struct.unpack_from(f"<{num_ranks}I", frame.fields, _ERROR.size)
    return Error(code, epoch, ranks, frame.fields[end:].decode(errors="replace"))


def memory(num_bytes: int) -> bytes:
    """A client's question for shared memory of that size; a worker's answer, with its descriptor, or 0: none."""
    return HEADER.pack(0, _MEMORY.size, FrameKind.MEMORY, 0, 0) + _MEMORY.pack(num_bytes)


def memory_of(frame: Frame) -> int:
    """How many bytes. Raises FrameError."""
    return int(_unpack(_MEMORY, frame)[0])


def _unpack(layout: struct.Struct, frame: Frame) -> tuple[Any, ...]:
    if len(frame.fields) < layout.size:
        raise FrameError(f"kind {frame.kind}: expected {layout.size} bytes of fields or more, got {len(frame.fields)}")
    return layout.unpack_from(frame.fields)


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FrameError(f"{name}: expected UTF-8, got something else") from None


class FrameSocket:
    """One end of a connection: frames in and out of a socket that does not block. One thread at a time reads, by the
    native half (native/frames.cpp) but for TLS, of which Python receives; any thread sends. TLS lets one thread in at a
    time, and so does this.

    Args:
        sock: connected; may be wrapped in TLS.
        max_rows_bytes: of a frame that comes in.

    Attributes:
        state: what the native half knows; `takes_descriptor`: one may come beside the next frame, of a UNIX socket.
        moved_at: when something left last, or began to wait, monotonic seconds.
    """

    def __init__(self, sock: socket.socket, max_rows_bytes: int) -> None:
        self.sock, self.moved_at = sock, 0.0
        self._is_tls, self._lock = isinstance(sock, ssl.SSLSocket), threading.Lock()
        self._out = deque[_Leaving]()
        memory = bytearray(ctypes.sizeof(native.Line))
        self.state = native.Line.from_buffer(memory)
        self.state.fd, self.state.is_tls, self.state.descriptor = sock.fileno(), self._is_tls, -1
        self.state.max_rows_bytes, self.state.heard_ns = max_rows_bytes, time.monotonic_ns()
        self._buffer, self._at = memoryview(memory)[native.Line.buffer.offset :], ctypes.addressof(self.state)
        self._native, self._into = native.load(), object()

    @property
    def is_sending(self) -> bool:
        """Whether something that was given to `send` has not left."""
        return bool(self._out)

    @property
    def has_read_more(self) -> bool:
        """Whether something is here that the socket does not show: else wait for that, which costs less than to try."""
        return self.state.begin < self.state.end or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0)

    @property
    def heard_at(self) -> float:
        """When something came last, or this was made, monotonic seconds."""
        return float(self.state.heard_ns * 1e-9)

    def send(
        self, parts: Sequence[bytes | memoryview], sent: Callable[[], None] | None = None, descriptor: int = -1
    ) -> bool:
        """Send a frame behind those that wait. Whether all have left; else `push` goes on.

        Args:
            parts: of the frame; they stay as they are until then.
            sent: called once they have left.
            descriptor: goes beside them, and is closed then.

        Raises:
            OSError: the connection is broken.
        """
        with self._lock:
            if not self._out:
                if descriptor < 0 and not self._is_tls:  # as a rule all of it leaves at once
                    count = self._sent_now(parts)
                    if count == (len(parts[0]) if len(parts) == 1 else sum(map(len, parts))):
                        if sent is not None:
                            sent()
                        return True
                    parts = _after([memoryview(part) for part in parts], count)
                self.moved_at = time.monotonic()
            self._out.append(_Leaving([memoryview(part) for part in parts if part], sent, descriptor))
            return self._push()

    def _sent_now(self, parts: Sequence[bytes | memoryview]) -> int:
        try:
            return self.sock.send(parts[0]) if len(parts) == 1 else self.sock.sendmsg(parts)
        except BlockingIOError:
            return 0

    def push(self) -> bool:
        """Send what the socket takes now. Whether nothing waits. Raises OSError."""
        if not self._out:
            return True
        with self._lock:
            return self._push()

    def shut_down(self) -> None:
        """Have both ends see the end of it. Any thread."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that reads: its number may be another socket's next, so nobody sends meanwhile. Idempotent."""
        with self._lock:
            self.sock.close()
            self.state.fd = -1
            for number in [self.state.descriptor, *(leaving.descriptor for leaving in self._out)]:
                close(number)
            self.state.descriptor = -1
            self._out.clear()

    def _push(self) -> bool:
        while self._out:
            leaving = self._out[0]
            try:
                count = self._sent(leaving)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            leaving.parts, self.moved_at = _after(leaving.parts, count), time.monotonic()
            if not leaving.parts:
                self._out.popleft()
                if leaving.sent is not None:
                    leaving.sent()
        return True

    def _sent(self, leaving: _Leaving) -> int:
        parts = leaving.parts
        if leaving.descriptor >= 0:
            count = socket.send_fds(self.sock, parts, [leaving.descriptor])
            close(leaving.descriptor)
            leaving.descriptor = -1
            return count
        if not self._is_tls:
            return self.sock.sendmsg(parts)
        if len(parts) > 1 and sum(map(len, parts)) <= _RECORD_BYTES:
            parts[:] = [memoryview(b"".join(parts))]
        return self.sock.send(parts[0])

    def next(self) -> int:
        """The kind of the next frame, whose rows are due to `rows_to` then; ROWS: those of the last one are whole;
        NOTHING: not yet. Raises FrameError, EOFError."""
        got: int = self._native.cd_next(self._at)
        return got if got > 0 else self._more(got)

    def wait(self, timeout_s: float, *, writes: bool = False) -> int:
        """The same, once there is something to read; NOTHING after that time, and where the socket can be written and
        `writes`; a signal ends it early. Raises FrameError, EOFError."""
        got: int = self._native.cd_wait(self._at, int(1e9 * timeout_s), writes)
        return got if got > 0 else self._more(got)

    def frame(self) -> Frame:
        """The frame that came last; neither a request nor an answer."""
        line = self.state
        return Frame(line.kind, line.id, bytes(self._buffer[line.fields_at : line.fields_at + line.fields_bytes]))

    def forward(self) -> Forward:
        """The request that came last. Raises FrameError: a text is not UTF-8."""
        line = self.state
        fields = _FORWARD.unpack_from(self._buffer, line.fields_at)
        layer, tokens, hidden, topk, code, timeout_ms, model_bytes, trace_bytes, place = fields
        texts, model, traceparent = line.fields_at + _FORWARD.size, "", ""
        if model_bytes or trace_bytes:
            end = texts + model_bytes
            model = _text(bytes(self._buffer[texts:end]), "model")
            traceparent = _text(bytes(self._buffer[end : end + trace_bytes]), "traceparent")
        return Forward(
            line.id, layer, tokens, hidden, topk, DTYPES[code], timeout_ms, model, traceparent,
            line.request_bytes, place,
        )  # fmt: skip

    def answer(self) -> Answer:
        """The answer that came last. Raises FrameError: a text is not UTF-8."""
        at = self.state.fields_at
        fields = _ANSWER.unpack_from(self._buffer, at)
        queue_ns, dispatch_ns, experts_ns, combine_ns, steps, tokens, hidden, code, in_place, count = fields
        model = _text(bytes(self._buffer[at + _ANSWER.size : at + _ANSWER.size + count]), "model") if count else ""
        times = queue_ns, dispatch_ns, experts_ns, combine_ns
        return Answer(*times, steps, tokens, hidden, DTYPES[code], model, in_place)

    def rows_to(self, address: int, memory: object) -> bool:
        """The rows of that frame go there; 0: nowhere. Whether they are whole; else `next` goes on, and the memory
        lives until then. Raises EOFError."""
        self._into = memory
        got: int = self._native.cd_rows(self._at, address)
        return (got if got > 0 else self._more(got)) == native.ROWS

    def _more(self, got: int) -> int:
        """What it means; TLS is read here. Raises FrameError, EOFError."""
        if got == native.NOTHING and self._is_tls:
            while got == native.NOTHING and self._receive():
                got = self._native.cd_next(self._at)
        if got == native.WRONG:
            raise FrameError("frame: expected one of this protocol within its limits, got something else")
        if got == native.ENDED:
            raise EOFError(os.strerror(self.state.error) if self.state.error else "closed by the other end")
        return got

    def _receive(self) -> bool:
        """By TLS, to where the native half wants it: rows as far as they are here, record by record. Whether there was
        something. Raises EOFError."""
        line, room, total = self.state, self._buffer[self.state.end :], 0
        are_rows = bool(line.left and line.into)
        if are_rows:
            room = memoryview((ctypes.c_uint8 * line.left).from_address(line.into))
        try:
            while room:
                with self._lock:
                    count = self.sock.recv_into(room)
                if not count:
                    raise EOFError("closed by the other end")
                total, room = total + count, room[count:] if are_rows else room[:0]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as broken:
            raise EOFError(str(broken)) from broken
        if not total:
            return False
        if are_rows:
            line.left, line.into = line.left - total, line.into + total
        else:
            line.end += total
        line.heard_ns = time.monotonic_ns()
        return True


class _Leaving:
    """A frame on its way out."""

    __slots__ = ("descriptor", "parts", "sent")

    def __init__(self, parts: list[memoryview], sent: Callable[[], None] | None, descriptor: int) -> None:
        self.parts, self.sent, self.descriptor = parts, sent, descriptor


def close(descriptor: int) -> None:
    """Of a file; negative: none."""
    if descriptor >= 0:
        os.close(descriptor)


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 20,  # seconds, also shorter than what firewalls remember
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,  # milliseconds in which the other end takes or acknowledges nothing
}


def prepare(sock: socket.socket) -> None:
    """Of either end of TCP: small frames leave at once, and a silent path ends the connection. Raises OSError."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _OPTIONS.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def plain_socket(sock: socket.socket) -> socket.socket:
    """The same connection without TLS, which both ends have ended."""
    plain = socket.socket(fileno=sock.detach())
    plain.setblocking(False)
    return plain
