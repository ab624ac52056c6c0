"""A client's end of a request buffer: memory shared with a worker of this host, or a connection to one of another.

Each carries one request at a time (request_buffer.py and request_connection.py of the protocol). Whatever goes wrong
with one, it is closed, which withdraws its request.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import select
import socket
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

import torch
from google.protobuf.message import DecodeError

from crossdock.client.errors import Unavailable, from_answer
from crossdock.client.shares import Parts
from crossdock.common.tracing import current_traceparent
from crossdock.protocol import wire
from crossdock.protocol.request_buffer import (
    MAX_PACKET_BYTES,
    Places,
    RepeatedRequests,
    RequestMemory,
    RequestRows,
    SharedMemory,
    described,
)
from crossdock.protocol.request_connection import Receiver, Sender
from crossdock.protocol.v1 import expert_pb2

_SMALL_BYTES = 64 << 10
"""Bytes of a request and its answer up to which both are copied through memory of our own."""
_FEW = 64
"""Ids for which Python is faster than numpy."""
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


class RequestBuffer(ABC):
    """One buffer, with at most one request in flight: `write`, `send`, `push` until all is sent, `read_into`. One
    thread at a time; `close` from any.

    Args:
        address: of its worker.
        sock: connected, without blocking; the ticket was redeemed.
        num_bytes: what fits.
        end: called once when it is closed.

    Attributes:
        model: fingerprint of the checkpoint that made the last answer.
        opened_at, used_at: when it was opened, and given back last, monotonic seconds.
    """

    def __init__(self, address: str, sock: socket.socket, num_bytes: int, end: Callable[[], None]) -> None:
        self.address, self.num_bytes = address, num_bytes
        self.opened_at = self.used_at = time.monotonic()
        self._sock, self._end = sock, end
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._id, self._requests = 0, RepeatedRequests()
        self._shape: tuple[torch.dtype, int, int, int] | None = None
        self.closed, self.model = False, ""

    @property
    def is_sending(self) -> bool:
        """Whether a part of its request is not sent yet."""
        return False

    def fileno(self) -> int:
        """For event loops."""
        return self._sock.fileno()

    @abstractmethod
    def write(self, parts: Parts) -> None:
        """Take the tensors of a request that fits."""

    def send(self, layer: int, timeout_s: float, model: str) -> bool:
        """Send the request of what was written, or the first part of it. Whether all is sent. Raises Unavailable."""
        assert self._shape is not None
        self._id += 1
        fields = *self._shape, layer, max(1, int(timeout_s * 1000)), model, current_traceparent()
        return self._send(self._requests.packet_of(self._id, fields, functools.partial(_request, *fields)))

    def push(self) -> bool:
        """Send more of it. Whether all is sent."""
        return True

    def read_into(self, out: torch.Tensor, timeout_s: float) -> bool:
        """Wait for the answer or a part of it, and copy its rows. Whether it is whole. Raises ClientError."""
        return bool(self._poll.poll(max(0.0, 1e3 * timeout_s))) and self._receive(out)

    def close(self) -> None:
        """End it; a request in flight is withdrawn. Idempotent."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._end()

    @abstractmethod
    def _send(self, packet: bytes) -> bool:
        """Send the message of a request. Whether all is sent. Raises Unavailable."""

    @abstractmethod
    def _receive(self, out: torch.Tensor) -> bool:
        """Read what is there of an answer. Whether that was all. Raises ClientError."""

    def _check(self, packet: bytes) -> None:
        """Raises ClientError: an error, or another answer."""
        response = expert_pb2.ForwardResponse.FromString(packet)
        if response.HasField("error"):
            raise from_answer(response.error)
        if response.id != self._id:
            raise Unavailable(f"worker {self.address}: expected the answer to request {self._id}, got {response.id}")
        self.model = response.model

    def _gone(self) -> Unavailable:
        return Unavailable(f"worker {self.address}: the request buffer was closed")


class SharedBuffer(RequestBuffer):
    """In memory that a worker of this host shares; packets on `sock` say what is there.

    Args:
        address, sock, end: as RequestBuffer.
        memory: shared.
    """

    def __init__(self, address: str, sock: socket.socket, memory: SharedMemory, end: Callable[[], None]) -> None:
        super().__init__(address, sock, memory.num_bytes, end)
        self._memory = memory
        self._rows: RequestRows

    def write(self, parts: Parts) -> None:
        """Copy the tensors of a request that fits."""
        shape = _shape_of(parts)
        if shape != self._shape:
            self._shape = dtype, tokens, hidden, topk = shape
            self._rows = self._memory.rows(tokens, hidden, topk, dtype)
        _copy(parts, self._rows)

    def _send(self, packet: bytes) -> bool:
        try:
            self._sock.send(packet)
        except OSError as error:
            raise self._gone() from error
        return True

    def _receive(self, out: torch.Tensor) -> bool:
        try:
            packet = self._sock.recv(MAX_PACKET_BYTES)
        except OSError as error:
            raise self._gone() from error
        if not packet:
            raise self._gone()
        self._check(packet)
        _take(out, self._rows)
        return True


class RequestConnection(RequestBuffer):
    """Over TCP: tensors are sent from where their caller has them, and received where it wants them; small ones by
    memory of its own, since copies of them cost less than views."""

    def __init__(self, address: str, sock: socket.socket, num_bytes: int, end: Callable[[], None]) -> None:
        super().__init__(address, sock, num_bytes, end)
        self._sender, self._receiver = Sender(sock), Receiver(sock)
        self._memory = RequestMemory(_SMALL_BYTES)
        self._rows: RequestRows | None = None
        self._parts: Sequence[memoryview] = ()
        self._is_answered = False

    @property
    def is_sending(self) -> bool:
        """Whether a part of its request is not sent yet."""
        return self._sender.pending

    def write(self, parts: Parts) -> None:
        """Keep the tensors of a request that fits; they stay as they are until it is sent."""
        dtype, tokens, hidden, topk = self._shape = _shape_of(parts)
        x, ids, weights = parts
        self._rows = None
        if Places.of(tokens, hidden, topk, dtype.itemsize).num_bytes <= _SMALL_BYTES:
            self._rows = self._memory.rows(tokens, hidden, topk, dtype)
            _copy(parts, self._rows)
            self._parts = self._rows.sent
            return
        if ids.dtype is not torch.int32:
            ids = _narrow(ids, torch.empty(ids.shape, dtype=torch.int32, device="cpu"))
        self._parts = [wire.bytes_of(part) for part in (x, ids, weights)]

    def push(self) -> bool:
        """Send more of it. Whether all is sent."""
        try:
            return self._sender.push()
        except OSError:  # an answer may say why; else there is the end to read
            self._sender.drop()
            return True

    def _send(self, packet: bytes) -> bool:
        parts, self._parts = self._parts, ()
        try:
            return self._sender.start(packet, parts)
        except OSError:  # as `push`
            self._sender.drop()
            return True

    def _receive(self, out: torch.Tensor) -> bool:
        try:
            if not self._is_answered:
                packet = self._receiver.message()
                if packet is None:
                    return False
                self._check(packet)
                self._receiver.begin([wire.bytes_of(out) if self._rows is None else self._rows.answered])
                self._is_answered = True
            self._is_answered = not self._receiver.fill()
        except (EOFError, DecodeError) as error:
            raise self._gone() from error
        if self._rows is not None and not self._is_answered:
            _take(out, self._rows)
        return not self._is_answered


def _shape_of(parts: Parts) -> tuple[torch.dtype, int, int, int]:
    x, ids, _ = parts
    return x.dtype, *x.shape, ids.shape[1]


def _copy(parts: Parts, rows: RequestRows) -> None:
    x, ids, weights = parts
    wire.move(x, rows.start + rows.places.x)
    if ids.dtype is not torch.int32:
        _narrow(ids, rows.ids)
    else:
        wire.move(ids, rows.start + rows.places.ids)
    wire.move(weights, rows.start + rows.places.weights)


def _take(out: torch.Tensor, rows: RequestRows) -> None:
    """out, rows of an answer that the client has made, becomes y."""
    ctypes.memmove(out.data_ptr(), rows.start + rows.places.y, len(rows.answered))


def _narrow(ids: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """into, int32, becomes int64 ids: what no int32 holds becomes another number that the worker refuses."""
    if ids.numel() <= _FEW:
        few = list(itertools.chain.from_iterable(ids.tolist()))
        if few and min(few) >= _LEAST and max(few) <= _MOST:
            narrow = array("i", few)
            ctypes.memmove(into.data_ptr(), narrow.buffer_info()[0], 4 * len(narrow))
            return into
    into.numpy()[...] = ids.numpy().clip(_LEAST, _MOST)  # as `wire.move`: in this thread
    return into


def _request(
    dtype: torch.dtype, tokens: int, hidden: int, topk: int, layer: int, timeout_ms: int, model: str, traceparent: str
) -> expert_pb2.ForwardRequest:
    """Without an id."""
    return expert_pb2.ForwardRequest(
        layer=layer,
        x=described(dtype, (tokens, hidden)),
        topk_ids=described(torch.int32, (tokens, topk)),
        topk_weights=described(torch.float32, (tokens, topk)),
        timeout_ms=timeout_ms,
        model=model,
        traceparent=traceparent,
    )
