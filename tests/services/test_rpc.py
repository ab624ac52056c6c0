"""common/rpc.py between two real ends: errors that travel, deadlines, retries, limits, ports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from crossdock.common import rpc
from crossdock.common.call_errors import (
    Aborted,
    CallError,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    Unavailable,
    code_number,
    code_of_number,
    error_for,
    error_of,
    status_of,
)
from crossdock.protocol.v1.control_pb2 import TopologyRequest
from crossdock.protocol.v1.control_pb2_grpc import ControlPlaneStub
from tests.services.control_world import TIMEOUT_S, lasting_port, occupied_port, unused_address

ECHO = "/crossdock.test.Echo/Echo"
Observed = list[tuple[str, str]]


@contextlib.asynccontextmanager
async def echo(
    behave: Callable[[bytes], Awaitable[bytes]], observed: Observed | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """A server with one method of raw bytes, and the same as a stream; yields its address."""

    async def unary(request: bytes, context: object) -> bytes:
        return await behave(request)

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        yield await behave(request)

    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }

    def observe(method: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        if observed is not None:
            observed.append((method, code))

    server = await rpc.server(1 << 16, rpc.Health([]), observe=observe)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("crossdock.test.Echo", handlers),))
    address = rpc.bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def _echo(request: bytes) -> bytes:
    return request


def _raising(error: BaseException) -> Callable[[bytes], Awaitable[bytes]]:
    async def behave(request: bytes) -> bytes:
        raise error

    return behave


@pytest.mark.parametrize("kind", CallError.__subclasses__(), ids=lambda kind: kind.__name__)
async def test_an_error_arrives_as_it_was_raised(kind: type[CallError]) -> None:
    observed: Observed = []
    async with (
        echo(_raising(kind("field: expected 1, got 2")), observed) as address,
        rpc.aio_channel(address) as channel,
    ):
        with pytest.raises(kind, match="field: expected 1, got 2"):
            await rpc.call(channel.unary_unary(ECHO), b"", timeout_s=TIMEOUT_S)
        stream = channel.unary_stream("/crossdock.test.Echo/Stream")(b"", timeout=TIMEOUT_S)
        assert await stream.read() == b"first"
        with pytest.raises(grpc.RpcError) as raised:
            await stream.read()
        assert type(error_of(raised.value)) is kind
    assert observed == [("Echo", kind.code.name), ("Stream", kind.code.name)]


async def test_a_bug_tells_the_caller_its_type_and_nothing_else() -> None:
    async with echo(_raising(KeyError("secret"))) as address, rpc.aio_channel(address) as channel:
        with pytest.raises(Internal, match="KeyError") as raised:
            await rpc.call(channel.unary_unary(ECHO), b"", timeout_s=TIMEOUT_S)
        assert "secret" not in str(raised.value)


def test_every_status_has_an_error_and_a_number() -> None:
    for code in grpc.StatusCode:
        assert code_of_number(code_number(code)) is code
        error = error_for(code, "why")
        assert str(error) == "why"
        assert type(error) is CallError or status_of(error) == (code, "why")
    assert code_of_number(12345) is grpc.StatusCode.UNKNOWN
    assert status_of(TimeoutError())[0] is grpc.StatusCode.DEADLINE_EXCEEDED


class _Broken(grpc.RpcError):
    """As grpc.aio raises it when a connection is reset under a read."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INTERNAL

    def details(self) -> str:
        return "Internal error from Core"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("crossdock-leader", "a:1"),)


def test_a_line_that_broke_is_unavailable_and_a_leader_is_named() -> None:
    error = error_of(_Broken())
    assert isinstance(error, Unavailable)
    assert error.leader == "a:1"


def test_an_address_where_nobody_listens_is_named_in_few_words() -> None:
    with unused_address() as address, rpc.channel(address) as channel, pytest.raises(Unavailable) as raised:
        rpc.call_sync(ControlPlaneStub(channel).Topology, TopologyRequest(), timeout_s=TIMEOUT_S)
    assert str(raised.value) == f"no connection to {address}: Connection refused"


async def test_a_silent_server_ends_in_the_callers_deadline() -> None:
    with occupied_port() as address:
        async with rpc.aio_channel(address) as channel:
            with pytest.raises((DeadlineExceeded, Unavailable)):
                await rpc.call(channel.unary_unary(ECHO), b"", timeout_s=0.3)
        with rpc.channel(address) as blocking, pytest.raises((DeadlineExceeded, Unavailable)):
            await asyncio.to_thread(rpc.call_sync, blocking.unary_unary(ECHO), b"", timeout_s=0.3)


async def test_a_call_whose_channel_is_closed_is_unavailable() -> None:
    """A worker that fails over closes the channel to a leader that hangs. grpc then raises CancelledError in whoever
    waits for an answer, which would end that task, and with it the worker's session."""
    asked = asyncio.Event()

    async def hang(request: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(TIMEOUT_S)
        return request

    async with echo(hang) as address:
        for closes in (True, False):
            channel = rpc.aio_channel(address)
            asked.clear()
            call = asyncio.create_task(rpc.call(channel.unary_unary(ECHO), b"", timeout_s=TIMEOUT_S))
            await asked.wait()
            if closes:
                await channel.close(0.01)
                with pytest.raises(Unavailable, match="the channel was closed during the call"):
                    await call
                with pytest.raises(Unavailable, match="Channel is closed"):
                    await rpc.call(channel.unary_unary(ECHO), b"", timeout_s=TIMEOUT_S)
            else:
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await channel.close(None)


async def test_unavailable_is_tried_again_until_somebody_answers() -> None:
    address = f"127.0.0.1:{lasting_port()}"
    async with rpc.aio_channel(address) as channel:
        with pytest.raises(Unavailable):
            await rpc.call(channel.unary_unary(ECHO), b"1", timeout_s=TIMEOUT_S)
        with pytest.raises(Unavailable):
            await rpc.call(channel.unary_unary(ECHO), b"2", timeout_s=TIMEOUT_S, retry_s=0.5)
        waiting = asyncio.create_task(
            rpc.call(channel.unary_unary(ECHO), b"3", timeout_s=TIMEOUT_S, retry_s=2 * TIMEOUT_S)
        )
        await asyncio.sleep(0)
        async with echo(_echo, listen=address):
            assert await waiting == b"3"
            with rpc.channel(address) as blocking:
                method = blocking.unary_unary(ECHO)
                answer = await asyncio.to_thread(rpc.call_sync, method, b"4", timeout_s=TIMEOUT_S, retry_s=TIMEOUT_S)
            assert answer == b"4"


async def test_only_unavailable_is_tried_again() -> None:
    calls: list[bytes] = []

    async def behave(request: bytes) -> bytes:
        calls.append(request)
        raise Aborted("lost a race")

    async with echo(behave) as address, rpc.aio_channel(address) as channel:
        with pytest.raises(Aborted):
            await rpc.call(channel.unary_unary(ECHO), b"x", timeout_s=TIMEOUT_S, retry_s=TIMEOUT_S)
    assert calls == [b"x"]


async def test_a_message_over_the_limit_is_refused_and_the_server_stays() -> None:
    async with echo(_echo) as address, rpc.aio_channel(address) as channel:
        method = channel.unary_unary(ECHO)
        with pytest.raises(ResourceExhausted):
            await rpc.call(method, bytes(1 << 17), timeout_s=TIMEOUT_S)
        assert await rpc.call(method, b"small", timeout_s=TIMEOUT_S) == b"small"


@pytest.mark.parametrize("listen", ["", "localhost", ":80", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:-1", "a:b"])
async def test_a_malformed_address_is_named(listen: str) -> None:
    server = await rpc.server(1 << 16, rpc.Health([]))
    with pytest.raises(rpc.ListenError, match="listen: expected host:port"):
        rpc.bind(server, listen)


async def test_a_port_in_use_is_not_shared() -> None:
    server = await rpc.server(1 << 16, rpc.Health([]))
    async with echo(_echo) as address:
        with pytest.raises(rpc.ListenError, match=f"where nothing listens yet, got {address}"):
            rpc.bind(server, address)


class _Request:
    """What a call brought."""

    def __init__(self, data: bytes) -> None:
        self.data = data


async def test_a_stream_does_not_keep_its_request() -> None:
    kept: list[weakref.ref[_Request]] = []

    async def stream(request: _Request, context: object) -> AsyncIterator[bytes]:
        kept.append(weakref.ref(request))
        del request
        yield b"first"
        await asyncio.Event().wait()

    handler = grpc.unary_stream_rpc_method_handler(stream, _Request)
    server = await rpc.server(1 << 16, rpc.Health([]))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("crossdock.test.Echo", {"S": handler}),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.aio_channel(address) as channel:
        call = channel.unary_stream("/crossdock.test.Echo/S")(b"request", timeout=TIMEOUT_S)
        assert await call.read() == b"first"
        gc.collect()
        assert [each() for each in kept] == [None]
        call.cancel()
    await server.stop(0)
