"""Request buffers of a client: memory shared with workers of this host (see request_buffer.py of the protocol).

The client opens them by itself, one for each call that it has in flight, when a call would have needed one; meanwhile,
and where there is none to be had, calls go by gRPC. A `DirectCall` writes the shares of a batch into buffers and reads
their answers, in the caller's own thread or in the event loop; whatever goes wrong with a buffer, it is closed, which
withdraws its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import select
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
import torch

from crossdock.client.errors import DeadlineExceeded, Overloaded, Unavailable, from_answer
from crossdock.client.shares import Parts, Share, rows_like
from crossdock.client.stream import WorkerStream
from crossdock.common.tasks import background, call_in_loop
from crossdock.common.tracing import current_traceparent
from crossdock.protocol.request_buffer import (
    MAX_BUFFER_BYTES,
    MAX_PACKET_BYTES,
    RepeatedRequests,
    SharedMemory,
    SharedRows,
    described,
    host_identity,
)
from crossdock.protocol.v1 import expert_pb2

QUIET_S = 1.0
"""Without an answer for so long, the worker is probed."""
_OPEN_S, _AGAIN_S, _IDLE_S = 5.0, 5.0, 30.0
"""Time to open a buffer; pause after one was refused; age at which an unused one is closed."""
_MIN_BYTES, _FEW_BYTES = 64 << 10, 64 << 10
_FEW = 64
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


class RequestBuffer:
    """One buffer, with at most one request in flight. One thread at a time; `close` from any.

    Args:
        address: of its worker.
        sock: connected; the ticket was redeemed.
        memory: shared.
        end: called once when it is closed.
    """

    def __init__(self, address: str, sock: socket.socket, memory: SharedMemory, end: Callable[[], None]) -> None:
        self.address, self.num_bytes, self.used_at = address, memory.num_bytes, time.monotonic()
        self._sock, self._memory, self._end = sock, memory, end
        self._shared: SharedRows
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._id, self._requests = 0, RepeatedRequests()
        self.closed = False

    def fileno(self) -> int:
        """For event loops."""
        return self._sock.fileno()

    def write(self, parts: Parts) -> None:
        """Write the tensors of a request that fits."""
        x, ids, weights = parts
        shared = self._shared = self._memory.rows(x.shape[0], x.shape[1], ids.shape[1], x.dtype)
        _copy(x, shared.x)
        _copy(ids, shared.ids) if ids.dtype is torch.int32 else _narrow(ids, shared.ids)
        _copy(weights, shared.weights)

    def send(self, layer: int, timeout_s: float, model: str) -> None:
        """Tell the worker of what was written. Raises Unavailable."""
        x, (tokens, topk) = self._shared.x, self._shared.ids.shape
        self._id += 1
        fields = x.dtype, tokens, x.shape[1], topk, layer, max(1, int(timeout_s * 1000)), model, current_traceparent()
        try:
            self._sock.send(self._requests.packet_of(self._id, fields, functools.partial(_request, *fields)))
        except OSError as error:
            raise self._gone() from error

    def read_into(self, out: torch.Tensor, timeout_s: float) -> bool:
        """Wait for the answer, and copy its rows. False: not there yet. Raises ClientError."""
        try:
            if not self._poll.poll(max(0.0, timeout_s * 1e3)):
                return False
            packet = self._sock.recv(MAX_PACKET_BYTES)
        except OSError as error:
            raise self._gone() from error
        if not packet:
            raise self._gone()
        response = expert_pb2.ForwardResponse.FromString(packet)
        if response.HasField("error"):
            raise from_answer(response.error)
        if response.id != self._id:
            raise Unavailable(f"worker {self.address}: expected the answer to request {self._id}, got {response.id}")
        _copy(self._shared.y, out)
        return True

    def close(self) -> None:
        """End it; a request in flight is withdrawn. Idempotent."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._end()

    def _gone(self) -> Unavailable:
        return Unavailable(f"worker {self.address}: the request buffer was closed")


def _copy(rows: torch.Tensor, into: torch.Tensor) -> None:
    """into, contiguous, becomes rows. torch's function for that takes longer than to copy a few."""
    plain = type(rows) is torch.Tensor and rows.dtype is into.dtype and rows.is_contiguous() and not rows.is_neg()
    if plain and into.is_contiguous() and into.nbytes <= _FEW_BYTES:
        ctypes.memmove(into.data_ptr(), rows.data_ptr(), into.nbytes)
    else:
        into.copy_(rows)


def _narrow(ids: torch.Tensor, into: torch.Tensor) -> None:
    """into, int32, becomes int64 ids: what no int32 holds becomes another number that the worker refuses."""
    few = [number for row in ids.tolist() for number in row] if ids.numel() <= _FEW else []
    if few and min(few) >= _LEAST and max(few) <= _MOST:  # torch's functions would take longer
        (ctypes.c_int32 * len(few)).from_address(into.data_ptr())[:] = few
    else:
        into.copy_(ids.clamp(_LEAST, _MOST))


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


class BufferPool:
    """The buffers of one client, by worker. `take`, `give_back` and `close` from any thread, `open_one` in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._idle: dict[str, deque[RequestBuffer]] = {}
        self._all: set[RequestBuffer] = set()
        self._opening: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._closed = False

    def take(self, address: str, num_bytes: int) -> RequestBuffer | None:
        """An idle buffer of at least that size. A smaller one is closed: calls have grown."""
        idle = self._idle.get(address)
        while idle:
            try:
                buffer = idle.pop()
            except IndexError:
                break
            if buffer.num_bytes >= num_bytes and not buffer.closed:
                return buffer
            buffer.close()
        return None

    def give_back(self, buffer: RequestBuffer) -> None:
        """It has no request in flight."""
        buffer.used_at = now = time.monotonic()
        idle = self._idle.setdefault(buffer.address, deque())
        idle.append(buffer)
        if self._closed:
            buffer.close()
        try:
            if now - idle[0].used_at > _IDLE_S:
                idle.popleft().close()
        except IndexError:  # another thread has taken it
            pass

    def claim(self, address: str, num_bytes: int) -> bool:
        """Whether to open a buffer of that size for a worker now; then no other is, until `open_one` has ended. Not if
        one is idle: this is asked late."""
        if any(buffer.num_bytes >= num_bytes for buffer in tuple(self._idle.get(address, ()))):
            return False
        may = address not in self._opening and time.monotonic() >= self._not_before.get(address, 0.0)
        if not may or self._closed or num_bytes > MAX_BUFFER_BYTES:
            return False
        self._opening.add(address)
        return True

    async def open_one(self, stream: WorkerStream, num_bytes: int) -> None:
        """Open one more buffer, if the worker lets us. It was claimed."""
        address, size = stream.address, max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        try:
            async with asyncio.timeout(_OPEN_S):
                await self._open(stream, min(size, MAX_BUFFER_BYTES))
        except (OSError, TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
            code = error.code() if isinstance(error, grpc.RpcError) else None
            never = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
            self._not_before[address] = float("inf") if code in never else time.monotonic() + _AGAIN_S
        finally:
            self._opening.discard(address)

    def keep(self, addresses: Collection[str]) -> None:
        """Close the buffers of all other workers."""
        for buffer in [each for each in tuple(self._all) if each.address not in addresses]:
            buffer.close()
        for gone in [address for address in self._not_before if address not in addresses]:
            self._not_before.pop(gone, None)

    def close(self) -> None:
        """Close all. Idempotent."""
        self._closed = True
        for buffer in tuple(self._all):
            buffer.close()

    async def _open(self, stream: WorkerStream, num_bytes: int) -> None:
        call = stream.open_buffer(expert_pb2.OpenBufferRequest(host=host_identity(), num_bytes=num_bytes))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        fds: list[int] = []
        try:
            offer = await call.read()
            if offer is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                raise OSError("no offer")
            sock.connect(f"\0{offer.socket}")
            sock.send(offer.ticket)
            await readable(sock)
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not fds:
                raise OSError("no memory came")
            memory = SharedMemory(fds[0], num_bytes)
        except BaseException:
            sock.close()
            call.cancel()
            raise
        finally:
            for fd in fds:
                socket.close(fd)
        ended = asyncio.Event()
        buffer = RequestBuffer(stream.address, sock, memory, lambda: call_in_loop(self.loop, ended.set))
        self._all.add(buffer)
        self.give_back(buffer)  # before the next is wanted
        call.add_done_callback(lambda _: ended.set())
        background(self._until_ended(buffer, call, ended), "a request buffer")

    async def _until_ended(self, buffer: RequestBuffer, call: Any, ended: asyncio.Event) -> None:
        """The life of a buffer: as long as its call."""
        try:
            await ended.wait()
        finally:
            self._all.discard(buffer)
            buffer.close()
            with contextlib.suppress(ValueError, IndexError):  # not idle, or taken meanwhile
                self._idle[buffer.address].remove(buffer)
            call.cancel()


async def readable(sock: Any) -> None:
    """Wait until a socket has something to read, or is at its end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    number = sock.fileno()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(number, set_ready)
    try:
        await ready
    finally:
        loop.remove_reader(number)


class DirectCall:
    """A batch whose shares go through request buffers.

    Args:
        pool: of the buffers.
        deadline: monotonic seconds.

    Attributes:
        refused: the worker had no room for it.
        out: [T, H], filled by `read` or `finish`; there once it was sent.
    """

    def __init__(self, pool: BufferPool, deadline: float) -> None:
        self.refused: Overloaded | None = None
        self.out: torch.Tensor
        self._pool, self._deadline = pool, deadline
        self._waiting: list[tuple[Share, RequestBuffer]] = []

    def add(self, share: Share, buffer: RequestBuffer) -> None:
        """One more share, before `send`."""
        self._waiting.append((share, buffer))

    def send(self, layer: int, parts: Parts, model: str) -> bool:
        """Send all shares. False: a worker is gone."""
        left_s = self._deadline - time.monotonic()
        try:
            for share, buffer in self._waiting:  # workers that are told together serve them in one step
                whole = len(self._waiting) == 1
                buffer.write(parts if whole else [part[share.start : share.stop] for part in parts])
            for _, buffer in self._waiting:
                buffer.send(layer, left_s, model)
            self.out = rows_like(parts[0])  # the workers are at it
        except BaseException as error:
            self.abandon()
            if isinstance(error, Unavailable):
                return False
            raise
        return True

    def give_back(self) -> None:
        """Send nothing."""
        for _, buffer in self._waiting:
            self._pool.give_back(buffer)
        self._waiting = []

    def read(self, timeout_s: float) -> bool:
        """Wait for all answers in this thread. False: some are missing. Raises ClientError."""
        until = min(time.monotonic() + timeout_s, self._deadline)
        try:
            while self._waiting:
                share, buffer = self._waiting[-1]
                whole = share.stop - share.start == len(self.out)
                rows = self.out if whole else self.out[share.start : share.stop]
                if not buffer.read_into(rows, until - time.monotonic()):
                    return False
                self._waiting.pop()
                self._pool.give_back(buffer)
        except BaseException as error:
            self.refused = error if isinstance(error, Overloaded) else None
            self.abandon()
            raise
        return True

    async def finish(self, is_alive: Callable[[str], Awaitable[bool]]) -> None:
        """Wait for all answers in the event loop. Raises ClientError; a worker that fails a probe is Unavailable."""
        try:
            while not self.read(0.0):
                _, buffer = self._waiting[-1]
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"worker {buffer.address}: no answer before the deadline")
                try:
                    async with asyncio.timeout(min(QUIET_S, left_s)):
                        await readable(buffer)
                except TimeoutError:
                    if left_s > QUIET_S and not await is_alive(buffer.address):
                        raise Unavailable(f"worker {buffer.address}: silent") from None
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Withdraw what was not answered."""
        for _, buffer in self._waiting:
            buffer.close()
        self._waiting = []
