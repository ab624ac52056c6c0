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
    """What a frame is."""

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


DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
"""Of x and y, by their code."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

_HEADER = struct.Struct("<IHBBQ")
_HELLO = struct.Struct("<4sHHH")
_WELCOME = struct.Struct("<HHI")
_FORWARD = struct.Struct("<IIIHBBIHHI")
_ANSWER = struct.Struct("<QQQQIIIBBH")
_ERROR = struct.Struct("<IHHQ")
_MEMORY = struct.Struct("<I")
_KINDS = frozenset(FrameKind)
_WITH_ROWS = frozenset({FrameKind.FORWARD, FrameKind.ANSWER})
_BUFFER_BYTES = 32 << 10
"""Read at once: a small request comes in one piece with its header."""
_RECORD_BYTES = 16 << 10
"""Of TLS: smaller frames are joined into one."""


class FrameError(ValueError):
    """The other end does not speak this protocol, or breaks its limits: the connection ends."""


class Frame(NamedTuple):
    """Header and fields of one frame; `num_rows_bytes` follow it."""

    kind: int
    id: int
    fields: bytes
    num_rows_bytes: int


class Forward(NamedTuple):
    """A request: `ForwardRequest` of expert.proto, with the shapes of its tensors. place: where they are in the memory
    that both ends map; NOWHERE: they follow."""

    id: int
    layer: int
    num_tokens: int
    hidden: int
    topk: int
    dtype: torch.dtype
    timeout_ms: int
    model: str
    traceparent: str
    place: int = NOWHERE

    @property
    def num_bytes(self) -> int:
        """Of x [T, H], topk_ids int32 [T, K] and topk_weights float32 [T, K], which follow each other."""
        return request_bytes(self.num_tokens, self.hidden, self.topk, self.dtype)


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
    """Of the rows of a request."""
    return num_tokens * (hidden * dtype.itemsize + 8 * topk)


def plain(kind: FrameKind, frame_id: int = 0) -> bytes:
    """A frame without fields."""
    return _HEADER.pack(0, 0, kind, 0, frame_id)


def hello(token: str, name: str = "") -> bytes:
    """What a client says first. token: "" for none; name: of the UNIX socket that it has called, "" for TCP."""
    secret, called = token.encode(), name.encode()
    fields = _HELLO.pack(MAGIC, VERSION, len(secret), len(called)) + secret + called
    return _HEADER.pack(0, len(fields), FrameKind.HELLO, 0, 0) + fields


def hello_of(frame: Frame) -> tuple[int, str, str]:
    """(version, token, name). Raises FrameError."""
    magic, version, count, called = _unpack(_HELLO, frame)
    texts, is_whole = frame.fields[_HELLO.size :], len(frame.fields) == _HELLO.size + count + called
    if frame.kind != FrameKind.HELLO or magic != MAGIC or not is_whole or count > MAX_TOKEN_BYTES:
        raise FrameError("hello: expected one of this protocol, got something else")
    return version, _text(texts[:count], "token"), _text(texts[count:], "name")


def welcome(num_requests: int, max_request_bytes: int) -> bytes:
    """A worker's answer to it: how much may be in flight on this connection."""
    fields = _WELCOME.pack(VERSION, num_requests, max_request_bytes)
    return _HEADER.pack(0, len(fields), FrameKind.WELCOME, 0, 0) + fields


def welcome_of(frame: Frame) -> tuple[int, int]:
    """(requests in flight, bytes of one). Raises FrameError."""
    _, num_requests, num_bytes = _unpack(_WELCOME, frame)
    if frame.kind != FrameKind.WELCOME or not num_requests or not num_bytes:
        raise FrameError(f"welcome: expected one, got a frame of kind {frame.kind}")
    return num_requests, num_bytes


def forward(request: Forward) -> bytes:
    """Header and fields of a request. Raises FrameError: a text is too long."""
    number, layer, tokens, hidden, topk, dtype, timeout_ms, model, traceparent, place = request
    texts = model.encode(), traceparent.encode()
    size = _FORWARD.size + len(texts[0]) + len(texts[1])
    if size > MAX_FIELDS_BYTES:
        raise FrameError(f"model: expected at most {MAX_FIELDS_BYTES - _FORWARD.size} bytes, got {len(texts[0])}")
    lengths = len(texts[0]), len(texts[1])
    try:
        head = _HEADER.pack(request.num_bytes if place == NOWHERE else 0, size, FrameKind.FORWARD, 0, number)
        fields = _FORWARD.pack(layer, tokens, hidden, topk, CODES[dtype], 0, timeout_ms, *lengths, place)
    except struct.error as error:
        raise FrameError(f"x: expected a request that a frame can hold, got {request}: {error}") from None
    return b"".join((head, fields, *texts))


def forward_of(frame: Frame) -> Forward:
    """The request. Raises FrameError: malformed, or rows of another size than its shapes have."""
    layer, tokens, hidden, topk, code, zero, timeout_ms, model_bytes, trace_bytes, place = _unpack(_FORWARD, frame)
    dtype, end = DTYPES.get(code), _FORWARD.size + model_bytes
    if dtype is None or zero or len(frame.fields) != end + trace_bytes:
        raise FrameError("forward: expected fields that fit each other, got others")
    model = _text(frame.fields[_FORWARD.size : end], "model") if model_bytes else ""
    traceparent = _text(frame.fields[end:], "traceparent") if trace_bytes else ""
    request = Forward(frame.id, layer, tokens, hidden, topk, dtype, timeout_ms, model, traceparent, place)
    following = request.num_bytes if place == NOWHERE else 0
    if following != frame.num_rows_bytes:
        raise FrameError(f"forward: expected {following} bytes of rows, got {frame.num_rows_bytes}")
    return request


def answer(number: int, about: Answer) -> bytes:
    """Header and fields of an answer."""
    *times, tokens, hidden, dtype, model, in_place = about
    text = model.encode()
    size, rows = _ANSWER.size + len(text), 0 if in_place else tokens * hidden * dtype.itemsize
    head = _HEADER.pack(rows, size, FrameKind.ANSWER, 0, number)
    return head + _ANSWER.pack(*times, tokens, hidden, CODES[dtype], in_place, len(text)) + text


def answer_of(frame: Frame) -> Answer:
    """The answer. Raises FrameError."""
    queue, dispatch, experts, combine, steps, tokens, hidden, code, in_place, count = _unpack(_ANSWER, frame)
    text, dtype = frame.fields[_ANSWER.size :], DTYPES.get(code)
    following = 0 if dtype is None or in_place else tokens * hidden * dtype.itemsize
    if dtype is None or in_place > 1 or len(text) != count or frame.num_rows_bytes != following:
        raise FrameError("answer: expected fields that fit each other, got others")
    times = queue, dispatch, experts, combine
    return Answer(*times, steps, tokens, hidden, dtype, _text(text, "model"), bool(in_place))


def error(number: int, about: Error) -> bytes:
    """A whole error; number 0: of the connection."""
    code, epoch, ranks, message = about
    text = message.encode()[:MAX_TEXT_BYTES]
    ranks = ranks[: (MAX_FIELDS_BYTES - MAX_TEXT_BYTES - _ERROR.size) // 4]
    fields = _ERROR.pack(code, len(ranks), len(text), epoch) + struct.pack(f"<{len(ranks)}I", *ranks) + text
    return _HEADER.pack(0, len(fields), FrameKind.ERROR, 0, number) + fields


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
    return _HEADER.pack(0, _MEMORY.size, FrameKind.MEMORY, 0, 0) + _MEMORY.pack(num_bytes)


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
    """One end of a connection: frames in and out of a socket that does not block. One thread at a time reads; any
    thread sends. TLS lets one thread in at a time, and so does this.

    Args:
        sock: connected; may be wrapped in TLS.
        max_rows_bytes: of a frame that comes in.

    Attributes:
        moved_at: when something left last, or began to wait, monotonic seconds.
        heard_at: when something came last, or this was made.
        takes_descriptor: one may come beside the next frame; of a UNIX socket.
        descriptor: which came; whoever takes it closes it.
    """

    def __init__(self, sock: socket.socket, max_rows_bytes: int) -> None:
        self.sock, self.max_rows_bytes = sock, max_rows_bytes
        self.moved_at, self.heard_at = 0.0, time.monotonic()
        self.takes_descriptor, self.descriptor = False, -1
        self._is_tls, self._lock = isinstance(sock, ssl.SSLSocket), threading.Lock()
        self._out = deque[_Leaving]()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._begin = self._end = self._left = 0
        self._into: memoryview | None = None

    @property
    def is_sending(self) -> bool:
        """Whether something that was given to `send` has not left."""
        return bool(self._out)

    @property
    def has_read_more(self) -> bool:
        """Whether something is here that the socket does not show: else wait for that, which costs less than to try."""
        return self._begin < self._end or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0)

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
                self.moved_at = time.monotonic()
            self._out.append(_Leaving([memoryview(part) for part in parts if part], sent, descriptor))
            return self._push()

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
            for number in [self.descriptor, *(leaving.descriptor for leaving in self._out)]:
                close(number)
            self.descriptor = -1
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

    def next(self) -> Frame | None:
        """The next frame; `rows_into` is due then. None: not whole yet. Raises FrameError, EOFError."""
        frame = self._whole() if self._end else None
        if frame is None:
            if self._begin:
                count = self._end - self._begin
                self._buffer[:count] = self._buffer[self._begin : self._end]
                self._begin, self._end = 0, count
            self._end += self._received(self._view[self._end :] if self._end else self._view)
            frame = self._whole()
        return frame

    def rows_to(self, tensor: torch.Tensor) -> bool:
        """Copy the rows of that frame to a contiguous tensor on the host, if all are here already. Whether they are."""
        if self._left > self._end - self._begin:
            return False
        ctypes.memmove(tensor.data_ptr(), self._address + self._begin, self._left)
        self._begin, self._left = self._begin + self._left, 0
        return True

    def rows_into(self, into: memoryview | None) -> None:
        """The rows of that frame go there; None: nowhere."""
        count = min(self._left, self._end - self._begin)
        if into is not None and count:
            into[:count] = self._view[self._begin : self._begin + count]
        self._into, self._left = None if into is None else into[count:], self._left - count
        self._begin += count
        if self._begin == self._end:
            self._begin = self._end = 0

    def fill(self) -> bool:
        """Receive those rows as far as they are here. Whether they are whole. Raises EOFError."""
        while self._left:
            room = self._view[: self._left] if self._into is None else self._into
            count = self._received(room)
            if not count:
                return False
            self._left -= count
            if self._into is not None:
                self._into = self._into[count:]
        self._into = None
        return True

    def _received(self, into: memoryview) -> int:
        """How many bytes; 0: there are none yet."""
        try:
            if self._is_tls:
                with self._lock:
                    count = self.sock.recv_into(into)
            elif self.takes_descriptor:
                count = self._received_beside(into)
            else:
                count = self.sock.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as broken:
            raise EOFError(str(broken)) from broken
        if not count:
            raise EOFError("closed by the other end")
        self.heard_at = time.monotonic()
        return count

    def _received_beside(self, into: memoryview) -> int:
        """With a descriptor, where one came."""
        count, beside, _, _ = self.sock.recvmsg_into([into], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= 4:
                close(self.descriptor)
                self.descriptor = struct.unpack_from("i", data)[0]
        return count

    def _whole(self) -> Frame | None:
        have = self._end - self._begin
        if have < _HEADER.size:
            return None
        num_rows_bytes, count, kind, zero, number = _HEADER.unpack_from(self._buffer, self._begin)
        if zero or kind not in _KINDS or count > MAX_FIELDS_BYTES:
            raise FrameError(f"header: expected a known kind and at most {MAX_FIELDS_BYTES} bytes, got {kind}, {count}")
        if num_rows_bytes > (self.max_rows_bytes if kind in _WITH_ROWS else 0):
            raise FrameError(f"rows: expected at most {self.max_rows_bytes} bytes, got {num_rows_bytes}")
        if have < _HEADER.size + count:
            return None
        start = self._begin + _HEADER.size
        fields, self._begin, self._left = bytes(self._view[start : start + count]), start + count, num_rows_bytes
        if self._begin == self._end:
            self._begin = self._end = 0
        return Frame(kind, number, fields, num_rows_bytes)


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
