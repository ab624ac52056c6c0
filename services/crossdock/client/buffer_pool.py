"""The request buffers of a client, and the way in which it opens them.

It opens them by itself, one for each call that it has in flight, when a call would have needed one: memory shared with
a worker of this host, a TCP connection to one of another. Meanwhile, and where there is neither, calls go by gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Literal

import grpc

from crossdock.client.opened_buffer import RequestBuffer, RequestConnection, SharedBuffer
from crossdock.client.stream import WorkerStream
from crossdock.common import log
from crossdock.common.addresses import AddressError, split_address
from crossdock.common.tasks import background, call_in_loop
from crossdock.protocol.request_buffer import MAX_BUFFER_BYTES, SharedMemory, host_identity
from crossdock.protocol.request_connection import REDEEMED, prepare
from crossdock.protocol.v1 import expert_pb2

_log = log.get(__name__)

Way = Literal["auto", "shared", "tcp", "grpc"]
"""How requests go to a worker: what fits it, in this order; or this one, and gRPC while it is not to be had."""
_OPEN_S, _AGAIN_S, _RARELY_S, _IDLE_S = 5.0, 5.0, 300.0, 30.0
"""Time to open a buffer; pause after one was refused, and where there will hardly be any; age at which an unused one is
closed."""
_OLD_S = 300.0
"""Age at which one is replaced between two requests: servers end the calls of old connections (see stream.py)."""
_MIN_BYTES = 64 << 10
_NEVER = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
"""What a worker says that offers no buffer to this client."""


class _Unreachable(OSError):
    """The port that a worker has offered."""


class BufferPool:
    """The buffers of one client, by worker. `take`, `give_back` and `close` from any thread, `open_one` in the loop.

    Args:
        loop: of the client.
        way: not gRPC alone.
        guarded: the client has certificates or a token, so its rows go through no plain TCP connection.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, way: Way = "auto", *, guarded: bool = False) -> None:
        self.loop = loop
        self._host = host_identity() if way != "tcp" else ""
        self._tcp = way != "shared" and not guarded
        self._idle: dict[str, deque[RequestBuffer]] = {}
        self._all: set[RequestBuffer] = set()
        self._opening: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._closed = False

    def take(self, address: str, num_bytes: int) -> RequestBuffer | None:
        """An idle buffer of at least that size. A smaller one is closed, for calls have grown, and an old one."""
        idle = self._idle.get(address)
        while idle:
            try:
                buffer = idle.pop()
            except IndexError:
                break
            if buffer.num_bytes >= num_bytes and not buffer.closed and time.monotonic() - buffer.opened_at < _OLD_S:
                return buffer
            buffer.close()
        return None

    def give_back(self, buffer: RequestBuffer) -> None:
        """Return a buffer that has no request in flight."""
        buffer.used_at = now = time.monotonic()
        idle = self._idle.get(buffer.address)
        if idle is None:
            idle = self._idle.setdefault(buffer.address, deque())
        idle.append(buffer)
        if self._closed:
            buffer.close()
        try:
            if now - idle[0].used_at > _IDLE_S:
                idle.popleft().close()
        except IndexError:  # taken meanwhile
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
            stream.release()
        except (OSError, TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
            never = isinstance(error, _Unreachable) or (isinstance(error, grpc.RpcError) and error.code() in _NEVER)
            if never and address not in self._not_before:
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                _log.info("requests to a worker go by gRPC", worker=address, why=why)
            self._not_before[address] = time.monotonic() + (_RARELY_S if never else _AGAIN_S)
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
        asked = expert_pb2.OpenBufferRequest(host=self._host, num_bytes=num_bytes, tcp=self._tcp)
        call, ended = stream.open_buffer(asked), asyncio.Event()

        def end() -> None:
            call_in_loop(self.loop, ended.set)

        try:
            offer = await call.read()
            if offer is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                raise OSError("no offer")
            buffer = await (_connected if offer.port else _mapped)(stream.address, offer, end)
        except BaseException:
            call.cancel()
            raise
        self._not_before.pop(stream.address, None)
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


async def _mapped(address: str, offer: expert_pb2.OpenBufferResponse, end: Callable[[], None]) -> RequestBuffer:
    """Redeem an offer of shared memory. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    fds: list[int] = []
    try:
        sock.connect(f"\0{offer.socket}")
        sock.send(offer.ticket)
        await ready(sock)
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not fds:
            raise OSError("no memory came")
        return SharedBuffer(address, sock, SharedMemory(fds[0], offer.num_bytes), end)
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            socket.close(fd)


async def _connected(address: str, offer: expert_pb2.OpenBufferResponse, end: Callable[[], None]) -> RequestBuffer:
    """Redeem an offer of a TCP port. Raises OSError."""
    try:
        async with asyncio.timeout(_OPEN_S / 2):
            sock = await _dialled(split_address(address)[0], offer.port)
    except (OSError, TimeoutError, AddressError) as error:
        raise _Unreachable(f"port {offer.port}: {error or 'no answer'}") from error
    try:
        sock.send(offer.ticket)
        await ready(sock)
        if sock.recv(len(REDEEMED)) != REDEEMED:
            raise OSError("the ticket was refused")
        return RequestConnection(address, sock, offer.num_bytes, end)
    except BaseException:
        sock.close()
        raise


async def _dialled(host: str, port: int) -> socket.socket:
    """Connected to the first address that a host has and that answers. Raises OSError."""
    loop, failed = asyncio.get_running_loop(), OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            prepare(sock)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
    raise failed


async def ready(sock: Any, *, writable: bool = False) -> None:
    """Wait until a socket has something to read, or is at its end; or can be written."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    number = sock.fileno()

    def set_done() -> None:
        if not done.done():
            done.set_result(None)

    (loop.add_writer if writable else loop.add_reader)(number, set_done)
    try:
        await done
    finally:
        (loop.remove_writer if writable else loop.remove_reader)(number)
