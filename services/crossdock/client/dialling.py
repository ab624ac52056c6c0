"""How a client connects to a worker: it asks by gRPC where, over a UNIX socket of its own host or TCP, and says who it
is."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable, Sequence

from crossdock.client.connection import Connection
from crossdock.client.errors import Unavailable, from_answer, from_call
from crossdock.client.shares import REQUEST_BYTES
from crossdock.common import rpc
from crossdock.common.addresses import split_address
from crossdock.common.call_errors import CallError
from crossdock.common.security import Security
from crossdock.protocol import frames
from crossdock.protocol.frames import Frame, FrameError, FrameKind, FrameSocket
from crossdock.protocol.same_host import host_identity
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc

DIAL_S = 5.0
"""Time to connect, from the question to the welcome."""
_own_host: Callable[[], str] = functools.cache(host_identity)


class KnownWorker:
    """A worker as its clients know it.

    Args:
        address: host:port of its ExpertService.
        rank: its rank; None if unknown.
        epoch: of the view with this worker.
        security: TLS and tokens; None: plain text.
    """

    def __init__(self, address: str, rank: int | None, epoch: int, security: Security | None) -> None:
        self.address, self.epoch, self._security = address, epoch, security
        self.where = f"worker {address}" if rank is None else f"rank {rank} ({address})"
        self.lost = () if rank is None else (rank,)

    async def describe(self, timeout_s: float) -> expert_pb2.DescribeResponse:
        """What it serves. Raises ClientError."""
        name = self._security.config.worker_name if self._security is not None else ""
        channel = rpc.aio_channel(self.address, security=self._security, name=name)
        try:
            describe = expert_pb2_grpc.ExpertServiceStub(channel).Describe
            description: expert_pb2.DescribeResponse = await rpc.call(
                describe, expert_pb2.DescribeRequest(), timeout_s=timeout_s
            )
        except CallError as error:
            raise from_call(error, self.where, self.lost, self.epoch) from error
        finally:
            await channel.close(None)
        return description

    async def connect(self, *, read_by_loop: bool) -> Connection:
        """A welcomed connection, which the running loop reads, or else threads do. Raises ClientError: Unavailable,
        NotAllowed, Overloaded."""
        try:
            async with asyncio.timeout(DIAL_S):
                return await self._connect(read_by_loop)
        except (OSError, EOFError, FrameError) as error:  # TimeoutError is an OSError
            if isinstance(error, Unavailable):
                raise
            why = f"no request connection: {error or f'no answer within {DIAL_S:g} s'}"
            raise Unavailable(f"{self.where}: {why}", self.lost, self.epoch) from error

    async def _connect(self, read_by_loop: bool) -> Connection:
        about, host = await self.describe(DIAL_S), split_address(self.address)[0]
        name = about.request_socket if self._is_here(about) else ""
        if name:
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)  # or less, as the kernel allows
            addresses: Sequence[tuple[socket.socket, object]] = [(sock, f"\0{name}")]
        else:
            addresses = await _resolved(host, about.request_port)
        sock = await _first_connected(addresses)
        try:
            sock = await self._secured(sock, host)
            line = FrameSocket(sock, frames.MAX_REQUEST_BYTES)
            line.send([frames.hello(self._security.token() if self._security is not None else "", name)])
            if name and isinstance(sock, ssl.SSLSocket):
                sock = await self._unwrapped(line, sock)
                line = FrameSocket(sock, frames.MAX_REQUEST_BYTES)
            return await self._greeted(line, read_by_loop)
        except BaseException:
            sock.close()
            raise

    def _is_here(self, about: expert_pb2.DescribeResponse) -> bool:
        return bool(about.request_host) and about.request_host == _own_host()

    async def _secured(self, sock: socket.socket, host: str) -> socket.socket:
        """Behind TLS, if authorities are configured. Raises OSError."""
        frames.prepare(sock)
        context = self._security.request_caller() if self._security is not None else None
        if context is None or self._security is None:
            return sock
        name = self._security.config.worker_name or host
        secured = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                await _ready(secured)
            except ssl.SSLWantWriteError:
                await _ready(secured, writable=True)

    async def _unwrapped(self, line: FrameSocket, sock: ssl.SSLSocket) -> socket.socket:
        """The UNIX socket without TLS, once the worker has ended that: it knows its caller, and that nobody is between.
        Raises OSError, EOFError, FrameError, ClientError."""
        try:
            await _answer(line)  # an error, which is raised, or else the end of TLS
        except EOFError:
            sock.unwrap()
            return frames.plain_socket(sock)
        raise FrameError("welcome: expected the end of TLS, got a frame")

    async def _greeted(self, line: FrameSocket, read_by_loop: bool) -> Connection:
        """Raises OSError, EOFError, FrameError, ClientError."""
        num_requests, num_bytes = frames.welcome_of(await _answer(line))
        loop = asyncio.get_running_loop() if read_by_loop else None
        return Connection(self.address, self.where, self.lost, self.epoch, line, num_requests, num_bytes, loop)


async def _answer(line: FrameSocket) -> Frame:
    """What the worker says. Raises EOFError, FrameError, ClientError: an error."""
    while line.next() == frames.NOTHING:
        await _ready(line.sock)
    frame = line.frame()
    if frame.kind == FrameKind.ERROR:
        code, epoch, ranks, message = frames.error_of(frame)
        raise from_answer(expert_pb2.Error(code=code, epoch=epoch, lost_ranks=ranks, message=message))
    return frame


async def _resolved(host: str, port: int) -> list[tuple[socket.socket, object]]:
    if not port:
        raise OSError("the worker takes none")
    made = list[tuple[socket.socket, object]]()
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        made.append((sock, address))
    return made


async def _first_connected(addresses: Sequence[tuple[socket.socket, object]]) -> socket.socket:
    """Of these the first that answers; the others are closed. Raises OSError."""
    failed, found = OSError("no address"), None
    try:
        for sock, address in addresses:
            try:
                await asyncio.get_running_loop().sock_connect(sock, address)  # type: ignore[arg-type]
            except OSError as error:
                failed = error
                continue
            found = sock
            return sock
    finally:
        for sock, _ in addresses:
            if sock is not found:
                sock.close()
    raise failed


async def _ready(sock: socket.socket, *, writable: bool = False) -> None:
    """Wait until a socket has something to read, or is at its end; or can be written."""
    loop, number = asyncio.get_running_loop(), sock.fileno()
    done: asyncio.Future[None] = loop.create_future()

    def set_done() -> None:
        if not done.done():
            done.set_result(None)

    (loop.add_writer if writable else loop.add_reader)(number, set_done)
    try:
        await done
    finally:
        (loop.remove_writer if writable else loop.remove_reader)(number)
