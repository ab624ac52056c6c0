"""Request connections: what comes and goes in frames, whole or in pieces, wrong, too much, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch

from crossdock.client import AsyncClient, Client, ClientError, DeadlineExceeded, InvalidRequest, client, dialling
from crossdock.common.addresses import format_address, split_address
from crossdock.common.rpc import ListenError
from crossdock.protocol import frames
from crossdock.protocol.frames import Error, FrameKind
from crossdock.worker.requests import greeter, request_server, served_connection
from crossdock.worker.requests.admission import RequestValidator
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.served_connection import MAX_IN_FLIGHT
from crossdock.worker.steps.request_sockets import RequestSockets
from crossdock.worker.steps.work import Failure, Refused
from tests.services.cluster import Batch, E, H, K
from tests.services.control_world import TIMEOUT_S, until
from tests.services.request_world import (
    CANCELLED,
    ENDED,
    EXHAUSTED,
    INVALID,
    KIB,
    LATE,
    UNIMPLEMENTED,
    Guest,
    packet,
    request_of,
    tensors,
    world,
)

both_kinds = pytest.mark.parametrize("near", [True, False])


@pytest.fixture(params=["near", "far"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where clients are: on the worker's host, or on no host that it knows."""
    if request.param == "far":
        monkeypatch.setattr(dialling, "_own_host", str)
    return str(request.param)


async def ended(guest: Guest) -> None:
    """The worker has closed the connection; nothing but errors of it came before."""
    with contextlib.suppress(*ENDED):
        while True:
            number, got = await guest.answer()
            assert isinstance(got, Error), number


async def test_clients_find_their_way(tmp_path: Path, place: str) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        for num_tokens in (1, 7, 64, 2000, 3):
            batch = Batch.random(num_tokens)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
            work = made.engine.seen[-1]
            assert torch.equal(work.topk_ids, batch.ids.int())
        batches = [Batch.random(5) for _ in range(3 * MAX_IN_FLIGHT)]
        answers = await asyncio.gather(*(asking.forward(1, *tensors(each)) for each in batches))
        assert all(torch.equal(answer, 2 * each.x) for answer, each in zip(answers, batches, strict=True))
        (connection,) = made.connections
        assert (connection.line.sock.family == socket.AF_UNIX) is (place == "near")
        assert str(connection.client).startswith("unix:uid=" if place == "near" else "ipv4:127.0.0.1")
    await until(lambda: made.budget.num_bytes == 0)
    await until(lambda: not len(made.requests))


@both_kinds
async def test_a_request_in_pieces_is_a_request(tmp_path: Path, near: bool) -> None:
    """Byte by byte, and cut anywhere; several at once."""
    async with world(tmp_path) as made, Guest(made, near) as guest:
        for byte in guest.hello():
            guest.sock.sendall(bytes([byte]))
        assert (await guest.frame())[0].kind == FrameKind.WELCOME
        batch = Batch.random(2)
        whole, head = packet(1, batch), len(frames.forward(*request_of(1, batch)))
        for byte in whole:
            guest.sock.sendall(bytes([byte]))
            await asyncio.sleep(0)
        assert torch.equal((await guest.answer())[1], 2 * batch.x)  # type: ignore[arg-type]
        for cut in (1, 4, 16, 17, head, head + 1, head + batch.x.nbytes, len(whole) - 1):
            made.engine.seen.clear()
            guest.sock.sendall(whole[:cut])
            await asyncio.sleep(0.01)
            assert not made.engine.seen
            guest.sock.sendall(whole[cut:])
            assert torch.equal((await guest.answer())[1], 2 * batch.x)  # type: ignore[arg-type]
        others = [Batch.random(number) for number in range(1, 9)]
        guest.sock.sendall(b"".join(packet(number, each) for number, each in enumerate(others)))
        got = dict([await guest.answer() for _ in others])
        assert all(torch.equal(got[number], 2 * each.x) for number, each in enumerate(others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "fields", "words"),
    [
        (Batch.random(5), {"layer": 0}, "layer"),
        (Batch(1, torch.zeros(5, H).bfloat16(), torch.zeros(5, K).int(), torch.zeros(5, K)), {}, "x: expected dtype"),
        (Batch(1, torch.zeros(5, H + 1), torch.zeros(5, K).int(), torch.zeros(5, K)), {}, "x: expected shape"),
        (Batch(1, torch.zeros(5, H), torch.zeros(5, K + 1).int(), torch.zeros(5, K + 1)), {}, "topk_ids: expected"),
        (Batch(1, torch.zeros(5, H), torch.full((5, K), E), torch.zeros(5, K)), {}, f"got {E}"),
        (Batch(1, torch.zeros(5, H), torch.full((5, K), -2), torch.zeros(5, K)), {}, "got -2"),
        (Batch(1, torch.zeros(100, H), torch.full((100, K), -2), torch.zeros(100, K)), {}, "got -2"),
        (Batch(1, torch.zeros(5, H), torch.zeros(5, K).int(), torch.full((5, K), float("nan"))), {}, "got NaN"),
    ],
)
async def test_a_wrong_request_is_refused_and_the_next_one_is_served(
    tmp_path: Path, batch: Batch, fields: dict[str, object], words: str
) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        for number in range(3):
            answer = await guest.ask(number, batch, **fields)
            assert isinstance(answer, Error)
            assert (answer.code, words in answer.message) == (INVALID, True), answer
        assert not made.engine.seen
        right = Batch.random(5)
        assert torch.equal(await guest.ask(7, right), 2 * right.x)  # type: ignore[arg-type]
        await until(lambda: made.budget.num_bytes == 0)


async def test_an_empty_request_has_an_empty_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        answer = await guest.ask(1, Batch.random(0))
        assert isinstance(answer, torch.Tensor)
        assert answer.shape == (0, H)


HEAD = frames.HEADER


def with_fields(*fields: int, place: int = frames.NOWHERE) -> bytes:
    """A request of three tokens, which says that."""
    layout = struct.Struct("<IIIHBBIHHI")
    return frames.forward(*request_of(1, Batch.random(3)))[: -layout.size] + layout.pack(*fields, place)


@pytest.mark.parametrize(
    "hostile",
    [
        HEAD.pack(0, 4097, FrameKind.PING, 0, 0),
        HEAD.pack(1, 0, FrameKind.PING, 0, 0),
        HEAD.pack((16 << 20) + 1, 24, FrameKind.FORWARD, 0, 1),
        HEAD.pack((1 << 32) - 1, 24, FrameKind.FORWARD, 0, 1),
        HEAD.pack(0, 0, FrameKind.FORWARD, 0, 1),
        HEAD.pack(0, 0, 0, 0, 1),
        HEAD.pack(0, 0, 77, 0, 1),
        HEAD.pack(0, 0, FrameKind.PING, 1, 1),
        frames.plain(FrameKind.GOAWAY),
        frames.hello(""),
        with_fields(1, 9, H, K, 1, 0, 0, 0, 0),
        with_fields(1, 3, H, K, 9, 0, 0, 0, 0),
        with_fields(1, 3, H, K, 1, 0, 0, 9, 0),
        frames.forward(*request_of(1, Batch.random(3), model="xx"))[:-2] + b"\xff\xff",
        b"\xff" * 5000,
        b"GET / HTTP/1.1\r\n\r\n" * 10,
    ],
)
async def test_what_is_not_this_protocol_ends_its_connection_and_no_other(tmp_path: Path, hostile: bytes) -> None:
    async with (
        world(tmp_path, max_queued_bytes_per_client=64 << 20) as made,
        Guest(made) as guest,
        Guest(made) as other,
    ):
        await guest.greet()
        await other.greet()
        guest.sock.sendall(hostile)
        await ended(guest)
        batch = Batch.random(7)
        assert torch.equal(await other.ask(1, batch), 2 * batch.x)  # type: ignore[arg-type]
        assert len(made.requests) == 1
        await until(lambda: made.budget.num_bytes == 0)


async def test_any_bytes_at_all_end_in_answers_or_an_end(tmp_path: Path) -> None:
    """Requests with some of their bytes changed, cut, or doubled, by a dice with a seed."""
    dice = torch.Generator().manual_seed(5)

    def roll(most: int) -> int:
        return int(torch.randint(most, (), generator=dice))

    async with world(tmp_path) as made:
        for _ in range(120):
            data = bytearray(packet(1, Batch.random(1 + roll(4)), model="f00d") + packet(2, Batch.random(2)))
            for _ in range(1 + roll(3)):
                at = roll(80) if roll(2) else roll(len(data))
                data[at : at + roll(3)] = bytes([roll(256) for _ in range(roll(3))])
            async with Guest(made) as guest:
                await guest.greet()
                guest.sock.sendall(data)
                guest.sock.shutdown(socket.SHUT_WR)
                guest.sock.settimeout(TIMEOUT_S)
                with contextlib.suppress(*ENDED):
                    while True:
                        await guest.frame()
        async with Guest(made) as guest:
            batch = Batch.random(3)
            assert torch.equal(await (await guest.greet()).ask(1, batch), 2 * batch.x)  # type: ignore[arg-type]
        await until(lambda: made.budget.num_bytes == 0)


async def test_nothing_is_allocated_for_a_request_that_may_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    async with world(tmp_path, max_requests_per_s=1.0) as made, Guest(made) as guest:
        take = made.requests._slots.take
        monkeypatch.setattr(made.requests._slots, "take", lambda tokens: taken.append(tokens) or take(tokens))
        await guest.greet()
        batch = Batch(1, torch.zeros(900, H + 1), torch.zeros(900, K).int(), torch.zeros(900, K))
        assert isinstance(await guest.ask(1, batch), Error)
        codes = [got.code for got in [await guest.ask(n, Batch.random(2)) for n in range(9)] if isinstance(got, Error)]
        assert set(codes) == {EXHAUSTED}
        assert 1 <= len(taken) <= 3
        assert set(taken) == {2}


async def test_who_stops_in_the_middle_of_a_request_is_given_up(tmp_path: Path) -> None:
    """And keeps nobody waiting meanwhile."""
    async with world(tmp_path, request_timeout_s=2.0) as made, Guest(made) as guest, Guest(made) as other:
        await guest.greet()
        await other.greet()
        guest.sock.sendall(packet(1, Batch.random(50))[:-1000])
        for number in range(3):
            batch = Batch.random(5)
            assert torch.equal(await other.ask(number, batch), 2 * batch.x)  # type: ignore[arg-type]
        await ended(guest)
        await until(lambda: made.budget.num_bytes == 0)
        assert len(made.requests) == 1, "to be idle is no reason"
        assert len(made.engine.seen) == 3


@pytest.mark.parametrize("reads", [True, False])
async def test_who_does_not_read_an_answer_keeps_no_step_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(request_server, "SOCKET_BYTES", 4 * KIB)
    settings = {"request_timeout_s": 1.0, "max_queued_bytes_per_client": 16 << 20}
    async with world(tmp_path, **settings) as made, Guest(made) as guest:
        await guest.greet()
        batch = Batch.random(6000)
        await asyncio.to_thread(guest.tell, 1, batch)
        await until(lambda: bool(made.engine.seen) and made.engine.seen[0].answered)
        if reads:
            assert torch.equal((await guest.answer())[1], 2 * batch.x)  # type: ignore[arg-type]
            assert torch.equal(await guest.ask(2, batch), 2 * batch.x)  # type: ignore[arg-type]
        else:
            await until(lambda: not made.connections)
            assert made.metrics.streams_dropped_total._value.get() == 1
        await until(lambda: made.budget.num_bytes == 0)


async def test_a_full_account_is_not_read_and_its_clients_take_turns(tmp_path: Path) -> None:
    """12 connections of one client, of which two requests fit: all are served alike, and none is told to go."""
    size = frames.request_bytes(400, H, K, torch.float32) + KIB
    async with world(tmp_path, max_queued_bytes_per_client=size) as made:
        served = [0] * 12

        async def ask(number: int, asking: AsyncClient) -> None:
            while time.monotonic() < until_s:
                batch = Batch.random(400)
                assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
                served[number] += 1

        clients = [AsyncClient(made.address) for _ in served]
        for asking in clients:
            await asking.forward(1, *tensors(Batch.random(2)))
        until_s, most = time.monotonic() + 3.0, [0]

        async def watch() -> None:
            while time.monotonic() < until_s:
                most[0] = max(most[0], made.budget.num_bytes)
                await asyncio.sleep(0.001)

        await asyncio.gather(watch(), *(ask(number, asking) for number, asking in enumerate(clients)))
        assert most[0] <= 2 * size
        assert min(served) >= 0.5 * max(served) > 2, served
        for asking in clients:
            await asking.close()
        await until(lambda: made.budget.num_bytes == 0)


async def test_who_waits_for_room_is_told_that_the_worker_is_there_and_may_hang_up(tmp_path: Path) -> None:
    size = frames.request_bytes(400, H, K, torch.float32) + KIB
    async with world(tmp_path, max_queued_bytes_per_client=size) as made:
        guests = [await Guest(made).greet() for _ in range(4)]
        made.engine.go.clear()
        for number, guest in enumerate(guests[:2]):
            guest.tell(number, Batch.random(400))
        await until(lambda: len(made.engine.seen) == 2)
        waiting = guests[2:]
        for guest in waiting:
            guest.sock.sendall(packet(9, Batch.random(400))[: 8 * KIB])
        for guest in waiting:
            assert (await guest.frame())[0].kind == FrameKind.PONG
        waiting[0].sock.close()
        await until(lambda: len(made.requests) == 3)
        made.engine.go.set()
        waiting[1].sock.sendall(packet(9, Batch.random(400))[8 * KIB :])
        assert isinstance((await waiting[1].answer())[1], torch.Tensor)
        for guest in guests:
            guest.sock.close()
        await until(lambda: made.budget.num_bytes == 0)


async def test_all_clients_together_are_refused_what_does_not_fit(tmp_path: Path) -> None:
    size = frames.request_bytes(100, H, K, torch.float32) + KIB
    settings = {"max_bytes": 2 * size - 1, "max_queued_bytes_per_client": size + 1}
    async with world(tmp_path, **settings) as made, Guest(made) as guest:
        await guest.greet()
        made.engine.go.clear()
        guest.tell(1, Batch.random(100))
        await until(lambda: len(made.engine.seen) == 1)
        answer = await guest.ask(2, Batch.random(100))
        assert isinstance(answer, Error)
        assert (answer.code, "waiting here" in answer.message) == (EXHAUSTED, True)
        assert made.budget.num_bytes == size


async def test_more_requests_than_were_allowed_end_the_connection(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        made.engine.go.clear()
        for number in range(MAX_IN_FLIGHT):
            guest.tell(number, Batch.random(1))
        await until(lambda: len(made.engine.seen) == MAX_IN_FLIGHT)
        guest.tell(99, Batch.random(1))
        await ended(guest)
        await until(lambda: all(work.answered for work in made.engine.seen))
        await until(lambda: made.budget.num_bytes == 0)


async def test_an_id_in_flight_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        made.engine.go.clear()
        guest.tell(1, Batch.random(1))
        answer = await guest.ask(1, Batch.random(1))
        assert isinstance(answer, Error)
        assert (answer.code, "in flight" in answer.message) == (INVALID, True)
        made.engine.go.set()
        assert isinstance((await guest.answer())[1], torch.Tensor)


@both_kinds
async def test_cancel_and_deadline_in_any_order(tmp_path: Path, near: bool) -> None:
    """A cancellation may come with its request, for one that is not here, or twice; other requests go on."""
    async with world(tmp_path) as made, Guest(made, near) as guest:
        await guest.greet()
        made.engine.go.clear()
        cancel = frames.plain(FrameKind.CANCEL, 2)
        guest.sock.sendall(cancel + packet(1, Batch.random(1)) + packet(2, Batch.random(1)) + cancel + cancel)
        number, got = await guest.answer()
        assert isinstance(got, Error)
        assert (number, got.code) == (2, CANCELLED)
        guest.tell(3, Batch.random(1), timeout_ms=50)
        number, got = await guest.answer()
        assert isinstance(got, Error)
        assert (number, got.code) == (3, LATE)
        made.engine.go.set()
        assert (await guest.answer())[0] == 1


async def test_who_floods_without_requests_is_cut_off_and_keeps_no_thread(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest, Guest(made) as other:
        await guest.greet()
        await other.greet()
        many = frames.plain(FrameKind.CANCEL, 1) * 10_000

        def send() -> None:
            with contextlib.suppress(OSError):
                while True:
                    guest.sock.sendall(many)

        sending = asyncio.create_task(asyncio.to_thread(send))
        batch = Batch.random(2)
        assert torch.equal(await other.ask(1, batch), 2 * batch.x)  # type: ignore[arg-type]
        await sending
        await until(lambda: len(made.requests) == 1)


async def test_few_connections_that_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as made:
        strangers = [Guest(made) for _ in range(2 * greeter.MAX_STRANGERS)]
        for stranger in strangers:
            stranger.sock.sendall(frames.hello("")[:-1])
        far = made.requests._greeters[0]
        await until(lambda: len(far._strangers) == greeter.MAX_STRANGERS)
        for stranger in strangers[: greeter.MAX_STRANGERS]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.sock.recv, 1) == b""
        async with Guest(made) as guest:
            batch = Batch.random(2)
            assert torch.equal(await (await guest.greet()).ask(1, batch), 2 * batch.x)  # type: ignore[arg-type]
        far.expire(time.monotonic() + greeter.GREETING_S)
        await until(lambda: not far._strangers)
        for stranger in strangers:
            stranger.sock.close()


async def test_few_connections_of_one_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is idle makes place; where none is, the new one is refused."""
    monkeypatch.setattr(request_server, "MAX_CONNECTIONS", 16)
    monkeypatch.setattr(request_server, "IDLE_S", 0.1)
    async with world(tmp_path) as made:
        made.engine.go.clear()
        guests = [await Guest(made).greet() for _ in range(4)]
        for guest in guests[1:]:
            guest.tell(1, Batch.random(1))
        await until(lambda: len(made.engine.seen) == 3)
        await asyncio.sleep(0.2)
        guests.append(await Guest(made).greet())
        await ended(guests[0])
        guests[-1].tell(1, Batch.random(1))
        await until(lambda: len(made.engine.seen) == 4)
        async with Guest(made) as late, Guest(made, near=True) as other:
            late.sock.sendall(frames.hello(""))
            number, got = await late.answer()
            assert isinstance(got, Error)
            assert (number, got.code) == (0, EXHAUSTED)
            await other.greet()
        for guest in guests:
            guest.sock.close()


async def test_another_version_is_told_so(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        guest.sock.sendall(frames.hello("").replace(b"XDCK\1\0", b"XDCK\2\0"))
        number, got = await guest.answer()
        assert isinstance(got, Error)
        assert (number, got.code, "version: expected 1, got 2" in got.message) == (0, UNIMPLEMENTED, True)
        await ended(guest)


async def test_what_a_running_step_reads_outlives_its_request(tmp_path: Path) -> None:
    """Cancelled, it may still be in a step: what is sent behind it goes elsewhere."""
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        made.engine.go.clear()
        first, second = Batch.random(3), Batch.random(3)
        guest.tell(1, first)
        await until(lambda: len(made.engine.seen) == 1)
        guest.sock.sendall(frames.plain(FrameKind.CANCEL, 1))
        assert isinstance((await guest.answer())[1], Error)
        guest.tell(2, second)
        await until(lambda: len(made.engine.seen) == 2)
        assert torch.equal(made.engine.seen[0].x, first.x)
        assert torch.equal(made.engine.seen[0].topk_ids, first.ids.int())
        made.engine.go.set()
        assert torch.equal((await guest.answer())[1], 2 * second.x)  # type: ignore[arg-type]


async def test_a_bug_ends_the_connection_that_met_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client would wait for an answer else, until its deadline."""
    async with world(tmp_path) as made, Guest(made) as guest, Guest(made) as other:
        await guest.greet()
        await other.greet()
        with monkeypatch.context() as broken:
            broken.setattr(RequestValidator, "check_frame", lambda *_: 1 // 0)
            guest.tell(1, Batch.random(5))
            await ended(guest)
        assert isinstance(await other.ask(1, Batch.random(5)), torch.Tensor)
        await until(lambda: made.budget.num_bytes == 0)


async def test_a_request_that_ends_before_it_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are looked at by another thread than the one that reads."""
    late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        with monkeypatch.context() as slow:
            trace = served_connection.request_trace
            slow.setattr(trace, "admitted", lambda work, _: made.engine.withdraw(work, late))
            got = await guest.ask(1, Batch.random(5))
        assert isinstance(got, Error)
        assert got.code == LATE
        assert isinstance(await guest.ask(2, Batch.random(5)), torch.Tensor)


async def test_a_request_above_the_rate_wakes_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[None] = []

    def refuse(*_: object) -> None:
        raise Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many"))

    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.greet()
        monkeypatch.setattr(made.engine, "expect", lambda: woken.append(None))
        assert isinstance(await guest.ask(1, Batch.random(5)), torch.Tensor)
        monkeypatch.setattr(Backend, "check_rate", refuse)
        got = await guest.ask(2, Batch.random(5))
        assert isinstance(got, Error)
        assert (got.code, len(woken)) == (EXHAUSTED, 1)


async def test_a_worker_that_leaves_answers_what_it_has(tmp_path: Path) -> None:
    """Idle clients lose their connection, whose next requests are refused; who waits for an answer gets it."""
    async with world(tmp_path) as made, Guest(made) as guest, Guest(made) as idle:
        await guest.greet()
        await idle.greet()
        made.engine.go.clear()
        batch = Batch.random(5)
        guest.tell(1, batch)
        await until(lambda: len(made.engine.seen) == 1)
        leaving = asyncio.create_task(made.requests.end(TIMEOUT_S))
        assert (await guest.frame())[0].kind == FrameKind.GOAWAY
        made.engine.go.set()
        assert torch.equal((await guest.answer())[1], 2 * batch.x)  # type: ignore[arg-type]
        await leaving
        for each in (guest, idle):
            await ended(each)
        async with Guest(made) as late:
            late.sock.sendall(frames.hello(""))
            assert isinstance((await late.answer())[1], Error)


@pytest.mark.parametrize("how", ["reset", "left"])
async def test_a_call_whose_connection_breaks_goes_on_by_another(tmp_path: Path, how: str, place: str) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        await asking.forward(1, *tensors(Batch.random(3)))
        made.engine.go.clear()
        before, batch = len(made.engine.seen), Batch.random(9)
        call = asyncio.create_task(asking.forward(1, *tensors(batch)))
        await until(lambda: len(made.engine.seen) == before + 1)
        (first,) = made.connections
        if how == "reset" and place == "far":
            first.line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.end()
        await until(lambda: len(made.engine.seen) == before + 2)
        made.engine.go.set()
        assert torch.equal(await call, 2 * batch.x)
        assert made.engine.seen[before].answered


async def test_an_old_one_is_replaced_between_two_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, retry=False) as asking:
        await asking.forward(1, *tensors(Batch.random(3)))
        (first,) = made.connections
        with monkeypatch.context() as later:
            later.setattr(client, "OLD_S", 0.0)
            await asking.forward(1, *tensors(Batch.random(3)))
        await until(lambda: len(made.requests) == 1 and first not in made.connections)
        (second,) = made.connections
        second.go_away()
        await asyncio.sleep(0.1)
        await asking.forward(1, *tensors(Batch.random(3)))
        await until(lambda: second not in made.connections)


async def test_threads_share_one_connection(tmp_path: Path, place: str) -> None:
    """With small requests and ones that no socket takes at once, so that readers and writers change."""

    def ask(asking: Client, number: int) -> None:
        for turn in range(12):
            batch = Batch.random((3, 4000)[(turn + number) % 2])
            assert torch.equal(asking.forward(1, *tensors(batch), timeout_s=TIMEOUT_S), 2 * batch.x)

    async with world(tmp_path, max_queued_bytes_per_client=16 << 20) as made:

        def all_of_them() -> None:
            with Client(made.address) as asking, ThreadPoolExecutor(8) as pool:
                for done in [pool.submit(ask, asking, number) for number in range(8)]:
                    done.result()
                assert len(made.requests) == 1

        await asyncio.to_thread(all_of_them)
        await until(lambda: made.budget.num_bytes == 0)


async def test_inference_mode_may_come_and_go(tmp_path: Path, place: str) -> None:
    """Answers are written in and outside of it, and by other threads."""

    def ask(asking: Client) -> None:
        for num_tokens in (3, 300):
            for mode in (contextlib.nullcontext(), torch.inference_mode(), contextlib.nullcontext()):
                with mode:
                    batch = Batch.random(num_tokens)
                    assert torch.equal(asking.forward(1, *tensors(batch)), 2 * batch.x)

    async with world(tmp_path) as made:
        asking = await asyncio.to_thread(Client, made.address)
        for _ in range(2):
            await asyncio.to_thread(ask, asking)
        await asyncio.to_thread(asking.close)


async def test_a_process_that_forked_is_refused(tmp_path: Path) -> None:
    """Two processes on one connection would get each other's answers."""

    def in_child(asking: Client) -> bool:
        """Whether each call is refused there, and at once. Threads that gRPC begins in a child may end it before."""
        if pid := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return in_child(asking) if status == -signal.SIGSEGV else status == 0
        signal.alarm(5)  # which ends a child that waits
        for call in (lambda: asking.forward(1, *tensors(Batch.random(3))), asking.describe):
            with contextlib.suppress(ClientError):
                call()
                os._exit(1)
        asking.close()
        os._exit(0)

    def ask(asking: Client) -> bool:
        """In the parent, before and after."""
        for _ in range(2):
            batch = Batch.random(3)
            assert torch.equal(asking.forward(1, *tensors(batch)), 2 * batch.x)
            refused = in_child(asking)
        return refused

    async with world(tmp_path) as made:
        asking = await asyncio.to_thread(Client, made.address)
        assert await asyncio.to_thread(ask, asking)
        await asyncio.to_thread(asking.close)


async def test_shares_of_another_checkpoint_are_sent_again(tmp_path: Path, place: str) -> None:
    async with world(tmp_path / "a") as one, world(tmp_path / "b") as two:
        one.engine.models, two.engine.models = ["old", "new"], ["new"]
        asking = AsyncClient(one.address, min_tokens_per_worker=1)
        async with asking:
            await asking._requests._service(TIMEOUT_S)
            directory = asking._requests._directory
            assert directory is not None
            directory._service = client.ServingWorkers(1, ((0, one.address), (1, two.address)))
            batch = Batch.random(40)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
        assert sum(len(work.x) for work in one.engine.seen) == 40
        assert sum(len(work.x) for work in two.engine.seen) == 20


async def test_deadlines_and_wrong_requests(tmp_path: Path, place: str) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        batch = Batch.random(3)
        for bad in (E, 1 << 40, -(1 << 40)):
            batch.ids[1, 1] = bad
            with pytest.raises(InvalidRequest, match="topk_ids"):
                await asking.forward(1, *tensors(batch))
        with pytest.raises(InvalidRequest, match="x: expected shape"):
            await asking.forward(1, torch.zeros(3, H + 1), *tensors(Batch.random(3))[1:])
        with pytest.raises(InvalidRequest, match="model: expected at most"):
            async with AsyncClient(made.address, model="x" * 5000) as other:
                await other.forward(1, *tensors(Batch.random(3)))
        made.engine.go.clear()
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await asking.forward(1, *tensors(Batch.random(3)), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - began < TIMEOUT_S
        await until(lambda: made.engine.seen[-1].answered)
        assert len(made.requests) == 1


@pytest.mark.parametrize("listen", ["[::1]:0", "0.0.0.0:0", "[::]:0"])
async def test_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    """Every interface is that of both address families, as it is for gRPC."""
    monkeypatch.setattr(dialling, "_own_host", str)
    async with world(tmp_path, listen=listen) as made:
        asking = AsyncClient(format_address("::1", split_address(made.address)[1]))
        batch = Batch.random(3)
        assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
        await asking.close()


async def test_a_port_in_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"request_port: expected an address .* got 127.0.0.1:{port}"):
            async with world(tmp_path, request_port=port):
                pass


async def test_a_port_that_is_not_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_own_host", str)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    async with world(tmp_path) as made, AsyncClient(made.address, retry=False) as asking:
        made.requests.port = nobody
        with pytest.raises(ClientError, match=r"no request connection: .*Connect call failed"):
            await asking.forward(1, *tensors(Batch.random(3)))


async def test_without_free_descriptors_the_thread_sleeps_and_accepts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    async with world(tmp_path) as made:
        accept = greeter.Greeter._accept
        failing = [True]

        def seldom(self: greeter.Greeter) -> None:
            tried.append(time.monotonic())
            if failing[0]:
                with monkeypatch.context() as full:
                    full.setattr(self, "_sock", _Full(self._sock))
                    accept(self)
                return
            accept(self)

        monkeypatch.setattr(greeter.Greeter, "_accept", seldom)
        guest = Guest(made)
        await asyncio.sleep(1.0)
        failing[0] = False
        await guest.greet()
        guest.sock.close()


class _Full:
    """A listening socket of a process without free descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> None:
        raise OSError("Too many open files")


def test_other_ends_of_a_unix_socket_are_told_apart_by_user() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert greeter._address_of(here) == f"unix:uid={os.getuid()}:0"


def test_nothing_is_left_to_poll_when_all_are_idle() -> None:
    """An idle selector does not wake up."""
    sockets, calls = RequestSockets(), list[int]()
    sockets.again(lambda: calls.append(1))
    assert select.select([sockets], [], [], TIMEOUT_S)[0]
    sockets.poll_selected()
    sockets.poll_selected()
    assert (calls, select.select([sockets], [], [], 0.05)[0]) == ([1], [])
