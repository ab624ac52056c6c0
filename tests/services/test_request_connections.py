"""Request buffers of clients of other hosts: what comes and goes over TCP, in pieces, wrong, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch

from crossdock.client import AsyncClient, InvalidRequest, buffer_pool
from crossdock.common.addresses import format_address, split_address
from crossdock.common.rpc import ListenError
from crossdock.common.settings import SecurityConfig
from crossdock.protocol.request_buffer import Places, described
from crossdock.protocol.request_connection import TICKET_BYTES
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.requests import buffer_server, ticket_listener
from crossdock.worker.requests.served_buffer import ServedBuffer, end
from crossdock.worker.requests.served_connection import ServedConnection
from tests.services.cluster import Batch, H, K
from tests.services.control_world import TIMEOUT_S, until
from tests.services.request_world import INVALID, KIB, Guest, RemoteGuest, World, framed, tensors, warm, world

GUARDED = SecurityConfig(cert_file="c", key_file="k", ca_file="a")
ENDED = (EOFError, ConnectionError)


@contextlib.asynccontextmanager
async def large_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[World, RemoteGuest, torch.Tensor]]:
    """A world of small socket buffers, and a guest that has sent a request of 6,000 rows and not read its answer."""
    monkeypatch.setattr(buffer_server, "SOCKET_BYTES", 4 * KIB)
    async with world(tmp_path) as made, RemoteGuest(made, 4096 * KIB) as guest:
        await guest.redeem()
        guest.write(batch := Batch.random(6000))
        await asyncio.to_thread(guest.tell, 1, 6000)
        yield made, guest, batch.x


def connection_of(made: World) -> ServedBuffer:
    """The only one."""
    (buffer,) = made.buffers._open
    return buffer


async def test_a_request_in_pieces_is_a_request(tmp_path: Path) -> None:
    """Byte by byte, and cut anywhere: the ticket, the message, the tensors; several after each other."""
    async with world(tmp_path) as made, RemoteGuest(made) as guest:
        guest.offer = await guest.call.read()
        guest.sock = guest.dial(guest.place)
        guest.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in guest.offer.ticket:
            guest.sock.sendall(bytes([byte]))
        assert await asyncio.to_thread(guest.sock.recv, 1) == b"."
        batch = Batch.random(2)
        guest.write(batch)
        packet, message = guest.packet(1, 2), framed(guest.message(1, 2))
        for byte in packet:
            guest.sock.sendall(bytes([byte]))
            await asyncio.sleep(0)
        assert not (await guest.answer()).HasField("error")
        assert torch.equal(guest.y(2), 2 * batch.x)
        for cut in (1, 4, 5, len(message), len(message) + 1, len(message) + batch.x.nbytes, len(packet) - 1):
            guest.sock.sendall(packet[:cut])
            await asyncio.sleep(0.01)
            assert len(made.engine.seen) == 1
            guest.sock.sendall(packet[cut:])
            assert (await guest.answer()).id == 1
            assert torch.equal(guest.y(2), 2 * batch.x)
            made.engine.seen.pop()


async def test_a_ticket_is_for_the_way_that_it_was_offered_for(tmp_path: Path) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as remote, Guest(made) as near:
        remote.offer, near.offer = await remote.call.read(), await near.call.read()
        for guest, other in ((remote, near), (near, remote)):
            with guest.dial(guest.place) as sock:
                sock.sendall(other.offer.ticket)
                assert await asyncio.to_thread(sock.recv, 1) == b""
        assert made.buffers.num_bytes == 128 * KIB
        assert not len(made.buffers)


@pytest.mark.parametrize(
    ("num_tokens", "fields", "words"),
    [
        (0, {}, "x: expected 1 to as many rows"),
        (10_000, {}, "x: expected 1 to as many rows"),
        (1 << 40, {}, "dimensions in 0"),
        (-5, {}, "dimensions in 0"),
        (5, {"layer": 0}, "layer"),
        (5, {"x": described(torch.bfloat16, (5, H))}, "x: expected dtype"),
        (5, {"x": described(torch.float32, (5, H + 1))}, "x: expected shape"),
        (5, {"x": expert_pb2.Tensor(dtype="float32", shape=[5])}, "2 dimensions"),
        (5, {"topk_ids": described(torch.int64, (5, K))}, "topk_ids: expected dtype"),
        (5, {"topk_ids": described(torch.int32, (6, K))}, "topk_ids: expected shape"),
        (5, {"topk_weights": described(torch.float32, (5, 1))}, "topk_weights: expected shape"),
    ],
)
async def test_a_message_is_refused_before_its_tensors_come(
    tmp_path: Path, num_tokens: int, fields: dict[str, object], words: str
) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as guest:
        await guest.redeem()
        assert guest.sock is not None
        guest.sock.sendall(framed(guest.message(1, num_tokens, **fields)))
        answer = await guest.answer()
        assert (answer.id, words in answer.error.message) == (1, True), answer
        with pytest.raises(ENDED):
            await guest.answer()
        await until(lambda: made.buffers.num_bytes == 0)
        assert not made.engine.seen


@pytest.mark.parametrize("size", [0, 4097, 1 << 31, (1 << 32) - 1])
async def test_a_message_of_a_wrong_size_ends_the_connection(tmp_path: Path, size: int) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as guest:
        await guest.redeem()
        assert guest.sock is not None
        guest.sock.sendall(struct.pack("<I", size))
        with pytest.raises(ENDED):
            await guest.answer()
        await until(lambda: made.buffers.num_bytes == 0)


async def test_garbage_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as guest, RemoteGuest(made) as other:
        await guest.redeem()
        await other.redeem()
        assert guest.sock is not None
        guest.sock.sendall(struct.pack("<I", 100) + b"\xff" * 5000)
        with pytest.raises(ENDED):
            await guest.answer()
        other.write(batch := Batch.random(7))
        assert not (await other.ask(1, 7)).HasField("error")
        assert torch.equal(other.y(7), 2 * batch.x)


async def test_who_stops_in_the_middle_of_a_request_is_given_up(tmp_path: Path) -> None:
    """And keeps nobody waiting meanwhile."""
    async with world(tmp_path) as made, RemoteGuest(made) as guest, RemoteGuest(made) as other:
        await guest.redeem()
        await other.redeem()
        guest.write(Batch.random(50))
        other.write(Batch.random(5))
        assert guest.sock is not None
        guest.sock.sendall(guest.packet(1, 50)[:-1000])
        for number in range(3):
            assert not (await other.ask(number, 5)).HasField("error")
        assert made.buffers.num_connections == 2
        for late_s, left in ((-TIMEOUT_S, 2), (1.0, 1)):  # to be idle is no reason
            made.buffers._expire(time.monotonic() + made.config.request_timeout_s + late_s)
            await until(lambda left=left: made.buffers.num_connections == left)  # type: ignore[misc]
        with pytest.raises(ENDED):
            await guest.answer()
        await until(lambda: made.buffers.num_bytes == 64 * KIB)
        assert len(made.engine.seen) == 3
        assert not (await other.ask(9, 5)).HasField("error")


@pytest.mark.parametrize("reads", [True, False])
async def test_who_does_not_read_an_answer_keeps_no_step_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    async with large_answer(tmp_path, monkeypatch) as (made, guest, x):
        await until(lambda: bool(made.engine.seen) and made.engine.seen[0].answered)
        await until(lambda: connection_of(made).is_sending)
        if reads:
            assert not (await guest.answer()).HasField("error")
            assert torch.equal(guest.y(6000), 2 * x)
            assert not (await guest.ask(2, 6000)).HasField("error")
        else:
            made.buffers._expire(time.monotonic() + made.config.request_timeout_s + 1.0)
            await until(lambda: made.buffers.num_bytes == 0)


async def test_one_request_at_a_time(tmp_path: Path) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as guest, RemoteGuest(made) as other:
        await guest.redeem()
        await other.redeem()
        made.engine.go.clear()
        for each in (guest, other):
            each.write(Batch.random(2))
            each.tell(1, 2)
        await until(lambda: len(made.engine.seen) == 2)
        guest.tell(2, 2)
        with pytest.raises(ENDED):
            await guest.answer()
        await until(lambda: made.buffers.num_bytes == 64 * KIB)
        assert other.sock is not None
        other.sock.sendall(other.packet(1, 2, cancel=True))
        assert (await other.answer()).error.code == grpc.StatusCode.CANCELLED.value[0]
        await until(lambda: made.buffers.num_bytes == 0)


async def test_a_request_and_its_cancellation_may_come_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as guest:
        await guest.redeem()
        guest.write(Batch.random(1))
        assert guest.sock is not None
        guest.tell(1, 1, cancel=True)  # of nothing
        made.engine.go.clear()
        guest.sock.sendall(guest.packet(2, 1) + guest.packet(2, 1, cancel=True))
        assert (await guest.answer()).error.code == grpc.StatusCode.CANCELLED.value[0]
        assert made.engine.seen[0].answered


async def test_an_answer_that_is_being_sent_outlives_a_worker_that_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with large_answer(tmp_path, monkeypatch) as (made, guest, x):
        await until(lambda: bool(len(made.buffers)) and connection_of(made).is_sending)
        made.buffers.close()
        assert not (await guest.answer()).HasField("error")
        assert torch.equal(guest.y(6000), 2 * x)


@pytest.mark.parametrize("how", ["reset", "left"])
async def test_a_call_whose_connection_breaks_goes_on_by_grpc(tmp_path: Path, how: str) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, way="tcp") as client:
        await warm(client, made)
        made.engine.go.clear()
        before, batch = len(made.engine.seen), Batch.random(9)
        call = asyncio.create_task(client.forward(1, *tensors(batch)))
        await until(lambda: len(made.engine.seen) == before + 1)
        first, broken = made.engine.seen[-1], connection_of(made)
        assert isinstance(first.stream, ServedConnection)
        if how == "reset":
            broken.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end(broken.sock)
        else:
            made.buffers.close()
        await until(lambda: len(made.engine.seen) == before + 2)
        assert not isinstance(made.engine.seen[-1].stream, ServedBuffer)
        made.engine.go.set()
        assert torch.equal(await call, 2 * batch.x)
        assert first.answered


async def test_a_wrong_request_is_the_callers_error_by_any_way(tmp_path: Path) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, way="tcp") as client:
        for _ in range(2):
            await warm(client, made)
            with pytest.raises(InvalidRequest, match="x: expected shape"):
                await client.forward(1, torch.zeros(3, H + 1), *tensors(Batch.random(3))[1:])


async def test_where_no_connection_is_to_be_had_calls_go_by_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, and tries again rarely."""
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    async with world(tmp_path) as made, AsyncClient(made.address, way="tcp") as client:
        made.buffers.port, opened = nobody, list[int]()
        offered = made.buffers.offered

        def counted(*arguments: object) -> object:
            opened.append(1)
            return offered(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(made.buffers, "offered", counted)
        for _ in range(6):
            batch = Batch.random(9)
            assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)
            await asyncio.sleep(0.05)
        assert sum(opened) == 1
        assert made.buffers.num_bytes == 0
        pool = client._pool
        assert pool is not None
        assert pool._not_before[made.address] - time.monotonic() > buffer_pool._RARELY_S - TIMEOUT_S
    assert len([record for record in caplog.records if "go by gRPC" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("settings", "tcp"), [({"security": GUARDED}, True), ({"request_port": None}, True), ({}, False)]
)
async def test_who_is_offered_none(tmp_path: Path, settings: dict[str, object], tcp: bool) -> None:
    """Plain TCP regards no certificates and no tokens; of the client it says whether it would do."""
    async with world(tmp_path, **settings) as made:
        assert bool(made.buffers.port) is not tcp
        async with RemoteGuest(made) as guest, Guest(made, host="elsewhere") as other:
            with pytest.raises(grpc.RpcError) as raised:
                await (guest if tcp else other).redeem()
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_client_with_certificates_asks_for_none() -> None:
    loop = asyncio.get_running_loop()
    asked = [buffer_pool.BufferPool(loop, way, guarded=guarded) for way in ("auto", "tcp") for guarded in (False, True)]
    assert [(bool(pool._host), pool._tcp) for pool in asked] == [
        (True, True), (True, False), (False, True), (False, False),
    ]  # fmt: skip
    shared = buffer_pool.BufferPool(loop, "shared")
    assert (bool(shared._host), shared._tcp) == (True, False)


@pytest.mark.parametrize(("given", "pooled"), [({"way": "grpc"}, False), ({}, True)])
async def test_grpc_alone_by_either_word(tmp_path: Path, given: dict[str, object], pooled: bool) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, **given) as client:  # type: ignore[arg-type]
        batch = Batch.random(3)
        assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)
        assert (client._pool is not None) is pooled
    with pytest.raises(InvalidRequest, match="way: expected one of auto, shared, tcp, grpc, got 'udp'"):
        AsyncClient("nowhere:1", way="udp")  # type: ignore[arg-type]


@pytest.mark.parametrize("listen", ["[::1]:0", "0.0.0.0:0", "[::]:0"])
async def test_ipv6(tmp_path: Path, listen: str) -> None:
    """Every interface is that of both address families, as it is for gRPC."""
    async with world(tmp_path, listen=listen) as made:
        address = format_address("::1", split_address(made.address)[1])
        async with AsyncClient(address, way="tcp") as client:
            await warm(client, made)
            batch = Batch.random(3)
            assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)
            assert made.buffers.num_connections == 1


async def test_a_port_in_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"request_port: expected an address .* got 127.0.0.1:{port}"):
            async with world(tmp_path, request_port=port):
                pass


async def test_few_connections_without_a_ticket(tmp_path: Path) -> None:
    async with world(tmp_path) as made, RemoteGuest(made) as guest, Guest(made) as near:
        guest.offer, near.offer = await guest.call.read(), await near.call.read()
        strangers = [guest.dial(guest.place) for _ in range(2 * ticket_listener.MAX_PENDING)]
        for stranger in strangers:
            stranger.sendall(b"x" * (TICKET_BYTES - 1))
        (listener, _) = made.buffers._listeners
        await until(lambda: len(listener._pending) == ticket_listener.MAX_PENDING)
        for stranger in strangers[: ticket_listener.MAX_PENDING]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 1) == b""
        with guest.dial(guest.place) as sock, near.dial(near.place) as here:
            for mine, offer in ((sock, guest.offer), (here, near.offer)):
                mine.sendall(offer.ticket)
                assert await asyncio.to_thread(mine.recv, 1) == b"."
        for stranger in strangers:
            stranger.close()
        await until(lambda: not listener._pending)


async def test_many_clients_with_requests_of_any_size(tmp_path: Path) -> None:
    async def ask(client: AsyncClient) -> None:
        for _ in range(12):
            batch = Batch.random(int(torch.randint(1, 600, ())))
            assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)

    async with world(tmp_path) as made:
        clients = [AsyncClient(made.address, way="tcp") for _ in range(8)]
        await asyncio.gather(*map(ask, clients))
        assert made.buffers.num_connections >= 4
        seen = {type(work.stream) for work in made.engine.seen[-30:]}
        assert ServedConnection in seen
        for client in clients:
            await client.close()
        await until(lambda: made.buffers.num_bytes == 0)
    assert Places.of(1, H, K, 4).num_bytes < 64 * KIB


@pytest.mark.parametrize("kind", [Guest, RemoteGuest])
async def test_what_a_running_step_reads_outlives_its_request(tmp_path: Path, kind: type[Guest]) -> None:
    """Cancelled, it may still be in a step: what is sent behind it, checked or not, goes nowhere."""
    async with world(tmp_path) as made, kind(made) as guest:
        await guest.redeem()
        assert guest.sock is not None
        made.engine.go.clear()
        guest.write(batch := Batch.random(3))
        guest.tell(1, 3)
        await until(lambda: len(made.engine.seen) == 1)
        ((buffer,), work) = made.buffers._open, made.engine.seen[0]
        with made.buffers.request_sockets._reading:  # until all is there
            wrong = Batch(1, batch.x, torch.full_like(batch.ids, 1 << 30), batch.weights)
            for number, changes in ((1, {"cancel": True}), (2, {}), (2, {"cancel": True}), (3, {})):
                if number == 3:
                    guest.write(wrong)
                guest.tell(number, 3, **changes)
        await until(lambda: buffer not in made.buffers._open)
        assert len(made.engine.seen) == 1
        assert torch.equal(work.topk_ids, batch.ids.int())


async def test_who_sends_without_an_end_does_not_keep_the_thread(tmp_path: Path) -> None:
    """Which may be that of the steps."""
    async with world(tmp_path) as made, RemoteGuest(made) as guest, RemoteGuest(made) as other:
        await guest.redeem()
        await other.redeem()
        assert guest.sock is not None
        many = framed(expert_pb2.ForwardRequest(cancel=True)) * 10_000

        def send() -> None:
            with contextlib.suppress(OSError):
                while True:
                    guest.sock.sendall(many)

        sending = asyncio.create_task(asyncio.to_thread(send))
        other.write(batch := Batch.random(2))
        assert not (await other.ask(1, 2)).HasField("error")
        assert torch.equal(other.y(2), 2 * batch.x)
        await sending
        await until(lambda: len(made.buffers) == 1)


async def test_too_many_requests_in_a_second_wake_no_rank_and_keep_the_connection(tmp_path: Path) -> None:
    async with world(tmp_path, max_requests_per_s=2.0) as made, RemoteGuest(made) as guest:
        made.engine.seen.clear()
        await guest.redeem()
        guest.write(Batch.random(2))
        codes = [(await guest.ask(number, 2)).error.code for number in range(40)]
        assert INVALID not in codes
        assert len(made.buffers) == 1
