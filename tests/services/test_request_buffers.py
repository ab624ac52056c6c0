"""Request buffers: what a client and a worker share, and what a wrong client can do with it; by both ways."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError

from crossdock.client import (
    AsyncClient,
    Client,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    blocking,
    buffer_pool,
    direct,
    opened_buffer,
)
from crossdock.client.buffer_pool import BufferPool, Way
from crossdock.client.directory import ServingWorkers
from crossdock.client.retry import RetryBudget
from crossdock.common import rpc
from crossdock.common.access import METHODS
from crossdock.protocol.request_buffer import Places, RepeatedRequests, RequestMemory, SharedMemory, described
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.requests import buffer_server, served_buffer, ticket_listener
from crossdock.worker.requests.admission import RequestValidator
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.served_buffer import ServedBuffer
from crossdock.worker.steps.work import Failure, Refused, Work
from tests.no_descriptors import processor_s
from tests.services.cluster import Batch, E, H, K
from tests.services.control_world import TIMEOUT_S, until
from tests.services.fakes import FakeControl, view_of
from tests.services.request_world import EXHAUSTED, INVALID, KIB, LATE, Guest, RemoteGuest, tensors, warm, world

both_ways = pytest.mark.parametrize("way", ["shared", "tcp"])
Kind = type[Guest] | type[RemoteGuest]
both_kinds = pytest.mark.parametrize("kind", [Guest, RemoteGuest])


@pytest.mark.parametrize("way", ["auto", "shared", "tcp"])
async def test_a_client_opens_one_by_itself(tmp_path: Path, way: Way) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, way=way) as client:
        await warm(client, made)
        for num_tokens in (1, 7, 64, 2000, 3):  # the fourth needs a larger one, and goes by gRPC meanwhile
            batch = Batch.random(num_tokens)
            assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)
            work = made.engine.seen[-1]
            assert torch.equal(work.topk_ids, batch.ids.int())
            assert torch.equal(work.topk_weights, batch.weights)
        answers = await asyncio.gather(*(client.forward(1, *tensors(Batch.random(5))) for _ in range(20)))
        assert len(answers) == 20
        assert made.buffers.num_connections == (len(made.buffers) if way == "tcp" else 0)
    await until(lambda: made.buffers.num_bytes == 0)


@both_ways
async def test_the_first_call_opens_one_and_its_stream_ends(tmp_path: Path, way: Way) -> None:
    """A host has few streams: 64 clients that kept theirs would take them from one another."""
    async with world(tmp_path) as made, AsyncClient(made.address, way=way) as client:
        made.engine.go.clear()
        batches = [Batch.random(3) for _ in range(2)]
        first = asyncio.create_task(client.forward(1, *tensors(batches[0])))
        await until(lambda: len(made.buffers) == 1 and len(made.engine.seen) == 1)
        assert made.service.num_streams == 1  # a request is in flight
        made.engine.go.set()
        assert torch.equal(await first, 2 * batches[0].x)
        await until(lambda: made.service.num_streams == 0)
        assert torch.equal(await client.forward(1, *tensors(batches[1])), 2 * batches[1].x)
        assert isinstance(made.engine.seen[-1].stream, ServedBuffer)
        answers = await asyncio.gather(*(client.forward(1, *tensors(batches[0])) for _ in range(10)))
        assert all(torch.equal(answer, 2 * batches[0].x) for answer in answers)
        await until(lambda: made.service.num_streams == 0)


@both_ways
async def test_inference_mode_may_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """Shared memory and answers are written in and outside of it, and by other threads."""
    monkeypatch.setattr(blocking, "QUIET_S", 0.0)  # each answer is read by the client's own thread

    def ask(client: Client) -> None:
        for num_tokens in (3, 300):
            batch = Batch.random(num_tokens)
            assert torch.equal(client.forward(1, *tensors(batch)), 2 * batch.x)

    def ask_often(client: Client) -> None:
        with torch.inference_mode():
            while not len(made.buffers):
                ask(client)
            for _ in range(5):
                ask(client)
        for _ in range(5):
            ask(client)

    async with world(tmp_path) as made:
        client = await asyncio.to_thread(functools.partial(Client, made.address, way=way))
        await asyncio.to_thread(ask_often, client)
        assert isinstance(made.engine.seen[-1].stream, ServedBuffer)
        await asyncio.to_thread(client.close)


async def test_all_buffers_that_a_call_lacks_are_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take one call by gRPC for each of them."""
    client, opened = AsyncClient("nowhere:1", min_tokens_per_worker=1), list[int]()
    workers = ServingWorkers(1, ((0, "a:1"), (1, "b:1"), (2, "c:1")))
    client._directory, client._pool = SimpleNamespace(now=workers), BufferPool(asyncio.get_running_loop())  # type: ignore[assignment]
    monkeypatch.setattr(client, "_open_buffer", lambda service, worker, num_bytes: opened.append(worker))
    assert client.begin(client.batch_of(1, tensors(Batch.random(3)), TIMEOUT_S)) is None
    await until(lambda: len(opened) == 3)
    assert sorted(opened) == [0, 1, 2]


@pytest.mark.parametrize("way", ["shared", "tcp", "grpc"])
async def test_a_process_that_forked_is_refused(tmp_path: Path, way: Way) -> None:
    """Two processes on one connection would get each other's answers, and no thread is there for calls by gRPC."""

    def in_child(client: Client) -> bool:
        """Whether each call is refused there, and at once. Threads that gRPC begins in a child may end it before."""
        if pid := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return in_child(client) if status == -signal.SIGSEGV else status == 0
        signal.alarm(5)  # which ends a child that waits
        for call in (lambda: client.forward(1, *tensors(Batch.random(3))), client.describe):
            with contextlib.suppress(ClientError):
                call()
                os._exit(1)
        client.close()
        os._exit(0)

    def ask(client: Client) -> bool:
        """In the parent, before and after."""
        for _ in range(2):
            while way != "grpc" and not len(made.buffers):
                client.forward(1, *tensors(Batch.random(3)))
            batch = Batch.random(3)
            assert torch.equal(client.forward(1, *tensors(batch)), 2 * batch.x)
            refused = in_child(client)
        return refused

    async with world(tmp_path) as made:
        client = await asyncio.to_thread(functools.partial(Client, made.address, way=way))
        assert await asyncio.to_thread(ask, client)
        await asyncio.to_thread(client.close)


@both_ways
async def test_an_old_one_is_replaced_between_two_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """Servers end the calls of a connection half an hour old, in the middle of a request maybe."""
    async with world(tmp_path) as made, AsyncClient(made.address, way=way, retry=False) as client:
        await warm(client, made)
        (first,) = made.buffers._open
        with monkeypatch.context() as later:
            later.setattr(buffer_pool, "_OLD_S", 0.0)
            await client.forward(1, *tensors(Batch.random(3)))
        await until(lambda: first not in made.buffers._open)
        await warm(client, made)
        assert first not in made.buffers._open


@both_ways
async def test_threads_share_one_client(tmp_path: Path, way: Way) -> None:
    def ask(client: Client) -> None:
        for _ in range(40):
            batch = Batch.random(int(torch.randint(1, 50, ())))
            assert torch.equal(client.forward(1, *tensors(batch)), 2 * batch.x)

    async with world(tmp_path) as made:
        client = await asyncio.to_thread(functools.partial(Client, made.address, way=way))
        await asyncio.gather(*(asyncio.to_thread(ask, client) for _ in range(4)))
        await until(lambda: 1 <= len(made.buffers) <= 4)  # one that was too small may just be closing
        assert any(isinstance(work.stream, ServedBuffer) for work in made.engine.seen)
        await asyncio.to_thread(client.close)


@pytest.mark.parametrize("settings", [{"max_shared_bytes": 0}, {"max_shared_bytes": 4 * 63 * KIB}])
@both_ways
async def test_without_room_calls_go_by_grpc(tmp_path: Path, settings: dict[str, int], way: Way) -> None:
    async with world(tmp_path, **settings) as made, AsyncClient(made.address, way=way) as client:
        for _ in range(3):
            batch = Batch.random(9)
            assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)
            await asyncio.sleep(0.02)
        assert not len(made.buffers)
        async with Guest(made) as guest:
            with pytest.raises(grpc.RpcError, match="expected at most"):
                await guest.redeem()


@both_kinds
async def test_of_one_client_a_quarter(tmp_path: Path, kind: Kind) -> None:
    async with world(tmp_path, max_shared_bytes=4 * 130 * KIB) as made, contextlib.AsyncExitStack() as held:
        guests = [await (await held.enter_async_context(kind(made))).redeem() for _ in range(2)]
        third = await held.enter_async_context(kind(made))
        with pytest.raises(grpc.RpcError, match="expected at most 133120 shared with one client"):
            await third.redeem()
        guests[0].call.cancel()
        await until(lambda: made.buffers.num_bytes == 64 * KIB)
        async with Guest(made) as another:
            await another.redeem()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"host": "another"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"num_bytes": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"num_bytes": 1 << 62}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_wrong_offers(tmp_path: Path, fields: dict[str, object], code: grpc.StatusCode) -> None:
    async with world(tmp_path) as made, Guest(made, **fields) as guest:  # type: ignore[arg-type]
        with pytest.raises(grpc.RpcError) as raised:
            await guest.redeem()
        assert raised.value.code() is code
        assert made.buffers.num_bytes == 0


@both_kinds
async def test_a_ticket_is_good_once_and_only_while_its_call_is_open(tmp_path: Path, kind: Kind) -> None:
    async with world(tmp_path) as made, kind(made) as guest, kind(made) as other:
        await guest.redeem()
        for ticket in (guest.offer.ticket, os.urandom(32)):
            with guest.dial(guest.place) as thief:
                thief.send(ticket)
                assert (await asyncio.to_thread(socket.recv_fds, thief, 1, 1))[:2] == (b"", [])
        offer = await other.call.read()
        other.call.cancel()
        await until(lambda: made.buffers.num_bytes == 64 * KIB)
        with guest.dial(guest.place) as late:
            late.send(offer.ticket)
            assert (await asyncio.to_thread(socket.recv_fds, late, 1, 1))[:2] == (b"", [])
        guest.write(Batch.random(5))
        assert not (await guest.ask(1, 5)).HasField("error")


@both_kinds
async def test_a_ticket_that_nobody_redeems_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    for module in (buffer_server, ticket_listener):
        monkeypatch.setattr(module, "REDEEM_S", 0.1)
    async with world(tmp_path) as made, kind(made) as guest:
        guest.offer = await guest.call.read()
        with guest.dial(guest.place) as stranger:
            await until(lambda: made.buffers.num_bytes == 0)
            assert await asyncio.to_thread(stranger.recv, 1) == b""


async def test_what_a_wrong_client_gets(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.redeem()
        batch = Batch.random(5)
        places = guest.write(batch)
        assert not (await guest.ask(1, 5)).HasField("error")
        assert torch.equal(guest.memory.tensor(torch.float32, (5, H), places.y), 2 * batch.x)
        wrong: list[tuple[int, dict[str, object], str]] = [
            (0, {}, "x: expected 1 to as many rows"),
            (10_000, {}, "x: expected 1 to as many rows"),
            (1 << 40, {}, "dimensions in 0"),
            (5, {"layer": 0}, "layer"),
            (5, {"x": described(torch.bfloat16, (5, H))}, "x: expected dtype"),
            (5, {"x": described(torch.float32, (5, H + 1))}, "x: expected shape"),
            (5, {"topk_ids": described(torch.int64, (5, K))}, "topk_ids: expected dtype"),
            (5, {"topk_ids": described(torch.int32, (6, K))}, "topk_ids: expected shape"),
            (5, {"topk_weights": described(torch.float32, (5, 1))}, "topk_weights: expected shape"),
        ]
        for number, (num_tokens, fields, words) in enumerate(wrong):
            answer = await guest.ask(2 + number, num_tokens, **fields)
            assert words in answer.error.message, answer
        for bad, words in ((E, "topk_ids: expected -1"), (-2, "topk_ids")):
            guest.memory.tensor(torch.int32, (5, K), places.ids)[3, 1] = bad
            assert words in (await guest.ask(50, 5)).error.message
        guest.write(batch)
        guest.memory.tensor(torch.float32, (5, K), places.weights)[4, 0] = torch.inf
        assert "topk_weights" in (await guest.ask(51, 5)).error.message
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(guest.fd, size)
        assert guest.sock is not None
        guest.sock.send(b"\xff" * 100)
        with pytest.raises(EOFError):
            await guest.answer()
    await until(lambda: made.buffers.num_bytes == 0)


@pytest.mark.parametrize("way", ["shared", "tcp"])
async def test_shares_of_another_checkpoint_are_sent_again(tmp_path: Path, way: Way) -> None:
    """Worker 0 has switched when the share of worker 1 is served: that one is sent again."""
    async with world(tmp_path / "0") as first, world(tmp_path / "1") as second:
        control, batch = FakeControl(view_of([first, second])), Batch.random(6)  # type: ignore[list-item]
        try:
            async with AsyncClient(control.address, way=way, min_tokens_per_worker=1) as client:
                while not (len(first.buffers) and len(second.buffers)) or first.service.num_streams:
                    await client.forward(1, *tensors(batch))
                first.engine.models, second.engine.models = ["new"], ["old", "new"]
                before = len(first.engine.seen), len(second.engine.seen)
                assert torch.equal(await client.forward(1, *tensors(batch)), 2 * batch.x)
            assert len(second.engine.seen) == before[1] + 2
            assert len(first.engine.seen) <= before[0] + 2, "once more if its answer was read first"
        finally:
            await asyncio.to_thread(control.kill)


async def test_what_a_client_changes_after_it_was_checked_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.redeem()
        batch = Batch.random(5)
        places = guest.write(batch)
        made.engine.go.clear()
        guest.tell(1, 5)
        await until(lambda: len(made.engine.seen) == 1)
        guest.memory.tensor(torch.int32, (5, K), places.ids).fill_(E + 7)
        guest.memory.tensor(torch.float32, (5, K), places.weights).fill_(torch.nan)
        work = made.engine.seen[0]
        assert torch.equal(work.topk_ids, batch.ids.int())
        assert torch.equal(work.topk_weights, batch.weights)
        answer = await guest.ask(2, 5)
        assert answer.id == 2
        assert answer.error.code == INVALID
        made.engine.go.set()
        assert (await guest.answer()).id == 1


async def test_the_buffer_of_a_dead_client_is_freed(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.redeem()
        guest.write(Batch.random(100))
        assert os.fstat(guest.fd).st_blocks
        made.engine.go.clear()
        guest.tell(1, 100)
        await until(lambda: len(made.engine.seen) == 1)
        assert guest.sock is not None
        guest.sock.close()
        await until(lambda: made.engine.seen[0].answered)
        await until(lambda: made.buffers.num_bytes == 0)
        await until(lambda: os.fstat(guest.fd).st_blocks == 0)  # although this end maps it still


@both_kinds
@pytest.mark.parametrize("way", ["late", "cancelled"])
async def test_a_request_that_fails_in_the_queue_is_answered_and_its_buffer_ends(
    tmp_path: Path, way: str, kind: Kind
) -> None:
    """A step may be writing its rows: the next request would find them in its own."""
    async with world(tmp_path) as made, kind(made) as guest:
        await guest.redeem()
        guest.write(Batch.random(2))
        made.engine.go.clear()
        guest.tell(1, 2, timeout_ms=1 if way == "late" else 60_000)
        if way == "cancelled":
            guest.tell(1, 2, cancel=True)
        expected = LATE if way == "late" else rpc.code_number(grpc.StatusCode.CANCELLED)
        assert (await guest.answer()).error.code == expected
        with pytest.raises(EOFError):
            await guest.answer()
        await until(lambda: made.buffers.num_bytes == 0)
        assert made.engine.seen[0].answered


async def test_a_client_that_reads_no_answers_loses_its_buffer(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.redeem()

        def flood() -> None:
            for number in range(100_000):
                guest.tell(number, 1, layer=99)

        with pytest.raises(OSError, match=r"."):
            await asyncio.to_thread(flood)
        await until(lambda: made.buffers.num_bytes == 0)


@both_ways
async def test_a_dead_worker_hangs_no_client(tmp_path: Path, way: Way) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, retry=False, way=way) as client:
        await warm(client, made)
        made.engine.go.clear()
        waiting = asyncio.create_task(client.forward(1, *tensors(Batch.random(3))))
        await until(lambda: not made.engine.seen[-1].answered)
        made.buffers.close()
        with pytest.raises(Unavailable, match="request buffer was closed"):
            await asyncio.wait_for(waiting, TIMEOUT_S)


@both_ways
async def test_a_silent_worker_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    monkeypatch.setattr(direct, "QUIET_S", 0.1)
    async with world(tmp_path) as made, AsyncClient(made.address, retry=False, way=way) as client:
        await warm(client, made)
        made.engine.go.clear()
        probes = [True, True, False]

        async def is_alive(address: str) -> bool:
            assert address == made.address
            return probes.pop(0)

        monkeypatch.setattr(client, "_is_alive", is_alive)
        with pytest.raises(Unavailable, match="silent"):
            await client.forward(1, *tensors(Batch.random(3)))
        assert not probes
        await until(lambda: made.engine.seen[-1].answered)


@both_ways
async def test_a_refusal_counts_as_one_however_it_came(tmp_path: Path, way: Way) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, way=way) as client:
        await warm(client, made)
        client._budget = RetryBudget(most=0.0, per_s=0.0)
        sent: list[Work] = []

        def refuse(work: Work) -> None:
            sent.append(work)
            raise Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))

        made.engine.submit = refuse  # type: ignore[method-assign]
        with pytest.raises(Overloaded, match="full"):
            await client.forward(1, *tensors(Batch.random(3)), timeout_s=0.3)
        assert len(sent) == 1, "without a token of the budget it is not sent again"


@both_ways
async def test_deadlines_and_wrong_requests(tmp_path: Path, way: Way) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address, way=way) as client:
        await warm(client, made)
        batch = Batch.random(3)
        for bad in (E, 1 << 40, -(1 << 40)):
            batch.ids[1, 1] = bad
            with pytest.raises(InvalidRequest, match="topk_ids"):
                await client.forward(1, *tensors(batch))
            await warm(client, made)
        made.engine.go.clear()
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.forward(1, *tensors(Batch.random(3)), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - began < TIMEOUT_S
        await until(lambda: made.engine.seen[-1].answered)


async def test_a_refused_shape_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """Requests that repeat are not parsed again: of each, only the id is its own."""
    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.redeem()
        five, nine = Batch.random(5), Batch.random(9)
        guest.write(five)
        made.engine.go.clear()
        guest.tell(1, 5)
        await until(lambda: len(made.engine.seen) == 1)
        guest.tell(2, 9)
        busy = await guest.answer()
        assert (busy.id, busy.error.code) == (2, INVALID)
        made.engine.go.set()
        assert (await guest.answer()).id == 1
        places = guest.write(nine)
        for number in (3, 300, 1 << 40):
            assert (await guest.ask(number, 9)).id == number
            assert len(made.engine.seen[-1].x) == 9
            y = guest.memory.tensor(torch.float32, (9, H), places.y)
            assert torch.equal(y, 2 * nine.x)
            y.zero_()


@both_kinds
@pytest.mark.parametrize("num_tokens", [3, 100])
async def test_values_of_few_and_of_many_tokens_are_checked(tmp_path: Path, num_tokens: int, kind: Kind) -> None:
    async with world(tmp_path) as made, kind(made) as guest:
        await guest.redeem()
        batch = Batch.random(num_tokens)
        for tensor, wrong, said in (
            (batch.ids, E, f"got {E}"), (batch.ids, -2, "got -2"), (batch.weights, float("nan"), "got NaN"),
            (batch.weights, float("-inf"), "got NaN or infinity"),
        ):  # fmt: skip
            before = tensor[-1, 0].item()
            tensor[-1, 0] = wrong
            guest.write(batch)
            answer = await guest.ask(1, num_tokens)
            assert (answer.error.code, said in answer.error.message) == (INVALID, True)
            tensor[-1, 0] = before
        guest.write(batch)
        assert not (await guest.ask(2, num_tokens)).HasField("error")


def test_packets_that_repeat_say_what_protobuf_says() -> None:
    ours, theirs = RepeatedRequests(), RepeatedRequests()

    def make(layer: int) -> expert_pb2.ForwardRequest:
        shape = described(torch.float32, (5, H))
        return expert_pb2.ForwardRequest(layer=layer, x=shape, timeout_ms=60_000, model="m")

    numbers = [1, 2, 127, 128, 300, (1 << 32) + 5, (1 << 64) - 1]
    for turn, layer in enumerate((1, 1, 7)):
        for number in numbers:
            packet = ours.packet_of(number, (layer,), functools.partial(make, layer))
            expected = make(layer)
            expected.id = number
            assert packet == expected.SerializeToString()
            found, repeats = theirs.request_of(packet)
            assert (found, repeats) == (expected, number != 1 or turn == 1)
    assert theirs.request_of(ours.packet_of(9, (7,), lambda: make(7))) == (theirs._request, True)


@pytest.mark.parametrize("hostile", [b"\x08", b"\x08" + b"\xff" * 12, b"\x08\x05\x08\x06", b"\x10\x01", b"\x08\x05"])
def test_odd_ids_are_protobufs_to_judge(hostile: bytes) -> None:
    requests, fresh = RepeatedRequests(), RepeatedRequests()
    plain = expert_pb2.ForwardRequest(id=4, layer=3).SerializeToString()
    assert requests.request_of(plain)[0].layer == 3
    for _ in range(2):
        try:
            expected = expert_pb2.ForwardRequest.FromString(hostile)
        except DecodeError:
            with pytest.raises(DecodeError):
                requests.request_of(hostile)
        else:
            assert requests.request_of(hostile)[0] == expected == fresh.request_of(hostile)[0]
    assert requests.request_of(plain)[0] == expert_pb2.ForwardRequest(id=4, layer=3)


def test_who_may_not_call_forward_may_not_get_a_buffer() -> None:
    assert METHODS["/crossdock.v1.ExpertService/OpenBuffer"] == METHODS["/crossdock.v1.ExpertService/Forward"]


def test_rows_of_one_shape_are_made_once() -> None:
    memory, fd = SharedMemory.make(64 * KIB)
    os.close(fd)
    first = memory.rows(5, H, K, torch.float32)
    assert memory.rows(5, H, K, torch.float32) is first
    other = memory.rows(9, H, K, torch.bfloat16)
    assert (other.x.shape, other.ids.shape, other.weights.shape, other.y.shape) == ((9, H), (9, K), (9, K), (9, H))
    places = Places.of(9, H, K, 2)
    assert [rows.data_ptr() - other.x.data_ptr() for rows in (other.ids, other.weights, other.y)] == [
        places.ids - places.x, places.weights - places.x, places.y - places.x,
    ]  # fmt: skip
    first.y.fill_(3.0)
    assert torch.equal(memory.rows(5, H, K, torch.float32).y, torch.full((5, H), 3.0))


def test_a_copy_of_routing_is_out_of_its_senders_reach() -> None:
    memory, fd = SharedMemory.make(64 * KIB)
    os.close(fd)
    rows = memory.rows(3, H, K, torch.bfloat16)
    batch = Batch.random(3)
    rows.ids.copy_(batch.ids)
    rows.weights.copy_(batch.weights)
    copied = rows.routing
    copied.take()
    rows.ids.fill_(E)
    rows.weights.fill_(torch.nan)
    assert torch.equal(copied.ids, batch.ids)
    assert torch.equal(copied.weights, batch.weights)
    assert copied.id_values.tolist() == batch.ids.flatten().tolist()
    assert copied.weight_values.tolist() == batch.weights.flatten().tolist()
    rows.y.copy_(torch.arange(3.0).view(3, 1).expand(3, H))
    assert rows.first_column.tolist() == [0.0, 1.0, 2.0]


def test_what_a_request_chose_stays_until_the_next_answer() -> None:
    """The record of its step is written after its answer, when the next requests may be here, wrong ones too."""
    memory, fd = SharedMemory.make(64 * KIB)
    os.close(fd)
    rows = memory.rows(3, H, K, torch.float32)

    def took(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows.ids.fill_(number)
        rows.weights.fill_(number)
        rows.routing.take()
        assert rows.routing.id_values.tolist() == [number] * (3 * K)
        return rows.routing.ids, rows.routing.weights

    first = took(1)
    rows.routing.turn()
    refused, second = took(-7), took(2)
    assert all(torch.equal(part, torch.full_like(part, 1)) for part in first)
    rows.routing.turn()
    took(3)
    assert all(torch.equal(part, torch.full_like(part, 2)) for part in second)
    assert refused[0].data_ptr() == second[0].data_ptr()
    assert memory.rows(3, H, K, torch.float32) is rows


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (torch.tensor([[0, -1], [(1 << 31) - 1, -(1 << 31)]]), None),
        (torch.tensor([[1 << 31, 0]]), [[(1 << 31) - 1, 0]]),
        (torch.tensor([[1, -(1 << 40)]]), [[1, -(1 << 31)]]),
        (torch.arange(200).view(100, 2), None),
        (torch.arange(6).view(2, 3).t(), None),
    ],
)
def test_ids_of_a_client_become_int32_as_they_are(ids: torch.Tensor, expected: list[list[int]] | None) -> None:
    into = torch.empty(ids.shape, dtype=torch.int32)
    opened_buffer._narrow(ids, into)
    assert into.tolist() == (ids.tolist() if expected is None else expected)


def test_a_client_copies_rows_of_any_kind() -> None:
    rows = torch.randn(4, 6)
    negated = torch.complex(rows, rows).conj().imag
    kinds = [rows, rows.t(), rows[::2], rows[:, 1:4], rows.half(), negated, torch.nn.Parameter(rows), rows.expand(4, 6)]
    memory = RequestMemory(1 << 20)
    for each in [*kinds, torch.randn(300, 200)]:
        ids, weights = torch.randint(E, (len(each), K)), torch.rand(len(each), 2 * K)[:, ::2]
        into = memory.rows(*each.shape, K, each.dtype)
        opened_buffer._copy((each.detach(), ids, weights), into)
        assert torch.equal(into.x, each.detach())
        assert torch.equal(into.ids, ids)
        assert torch.equal(into.weights, weights)
        into.y.copy_(into.x)
        out = torch.empty_like(into.x)
        opened_buffer._take(out, into)
        assert torch.equal(out, into.y)


async def test_without_free_descriptors_the_thread_sleeps_and_accepts_later(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Guest(made) as guest:
        offer = await guest.call.read()
        reader = [thread for thread in threading.enumerate() if thread.name == "request buffers"][-1]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            assert processor_s(reader, lambda: sock.connect(f"\0{offer.socket}")) < 0.1
            sock.settimeout(TIMEOUT_S)
            sock.send(offer.ticket)
            _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, sock, 1, 1)
            assert len(fds) == 1
            os.close(fds[0])


async def test_a_connection_that_cannot_be_accepted_keeps_the_reader_of_requests_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took, accept = list[float](), ticket_listener.TicketListener._accept

    def timed(listener: ticket_listener.TicketListener) -> None:
        began = time.monotonic()
        accept(listener)
        took.append(time.monotonic() - began)

    monkeypatch.setattr(ticket_listener.TicketListener, "_accept", timed)
    async with world(tmp_path) as made, Guest(made) as guest:
        offer = await guest.call.read()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            processor_s(threading.current_thread(), lambda: stranger.connect(f"\0{offer.socket}"))
    assert 1 <= len(took) <= 4, "one attempt in a quarter of a second"
    assert sum(took) < 0.2


async def test_a_buffer_of_a_byte_counts_as_the_least_one(tmp_path: Path) -> None:
    async with world(tmp_path, max_shared_bytes=8 * buffer_server.LEAST_BYTES) as made:
        guests = [await Guest(made, num_bytes=1).redeem(), await Guest(made, num_bytes=1).redeem()]
        assert made.buffers.num_bytes == 2 * buffer_server.LEAST_BYTES
        guests.append(Guest(made, num_bytes=1))
        with pytest.raises(grpc.RpcError, match="num_bytes: expected at most"):
            await guests[2].call.read()
        for guest in guests:
            await guest.__aexit__()
    await until(lambda: made.buffers.num_bytes == 0)


@both_kinds
async def test_a_bug_ends_the_buffer_that_met_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Its client would wait for an answer else, until its deadline."""
    async with world(tmp_path) as made, kind(made) as guest, kind(made) as other:
        await guest.redeem()
        await other.redeem()
        with monkeypatch.context() as broken:
            broken.setattr(RequestValidator, "rows_in", lambda *_, **__: 1 // 0)
            guest.write(Batch.random(5))
            guest.tell(1, 5)
            with pytest.raises((EOFError, ConnectionError)):
                await guest.answer()
        with monkeypatch.context() as broken:
            broken.setattr(made.buffers, "_expire", lambda now: 1 // 0)
            await asyncio.sleep(3 * buffer_server.TICK_S)
        other.write(Batch.random(5))
        assert not (await other.ask(1, 5)).HasField("error")


@both_kinds
async def test_a_socket_is_not_closed_while_an_answer_is_sent(tmp_path: Path, kind: Kind) -> None:
    """Its number may be another client's next."""
    async with world(tmp_path) as made, kind(made) as guest:
        await guest.redeem()
        (buffer,) = made.buffers._open
        with buffer._sending:
            assert guest.sock is not None
            guest.sock.close()
            await asyncio.sleep(0.1)
            assert buffer.sock.fileno() >= 0
        await until(lambda: buffer.sock.fileno() < 0)


@both_kinds
async def test_a_request_that_ends_before_it_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Deadlines are looked at by another thread than the one that reads."""
    late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
    async with world(tmp_path) as made, kind(made) as guest:
        await guest.redeem()
        guest.write(Batch.random(5))
        with monkeypatch.context() as slow:
            slow.setattr(served_buffer.request_trace, "admitted", lambda work, _: made.engine.withdraw(work, late))
            assert (await guest.ask(1, 5)).error.code == LATE
        with pytest.raises(EOFError):  # a step may write its rows still
            await guest.answer()
        assert None not in made.engine.seen


@pytest.mark.parametrize("way", ["buffer", "connection", "stream"])
async def test_a_request_above_the_rate_wakes_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    expected: list[None] = []
    kind = RemoteGuest if way == "connection" else Guest
    async with world(tmp_path) as made, kind(made) as guest, rpc.aio_channel(made.address) as channel:
        await guest.redeem()
        batch, stream = Batch.random(5), expert_pb2_grpc.ExpertServiceStub(channel).Forward(timeout=TIMEOUT_S)
        guest.write(batch)

        async def ask(number: int) -> expert_pb2.ForwardResponse:
            if way != "stream":
                return await guest.ask(number, 5)
            await stream.write(batch.message(number))
            answer: expert_pb2.ForwardResponse = await stream.read()
            return answer

        monkeypatch.setattr(made.engine, "expect", lambda: expected.append(None))
        monkeypatch.setattr(Backend, "check_rate", lambda *_: None)
        assert not (await ask(1)).HasField("error")
        assert len(expected) == 1

        def refuse(*_: object) -> None:
            raise Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many"))

        monkeypatch.setattr(Backend, "check_rate", refuse)
        assert (await ask(2)).error.code == EXHAUSTED
        assert len(expected) == 1


async def test_what_is_no_new_request_counts_for_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests before the last answer, and cancels of nothing, which end the buffer above the rate."""
    counted: list[None] = []
    refused = Refused(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many"))

    def at_most_three(*_: object) -> None:
        counted.append(None)
        if len(counted) > 3:
            raise refused

    async with world(tmp_path) as made, Guest(made) as guest:
        await guest.redeem()
        guest.write(Batch.random(5))
        monkeypatch.setattr(Backend, "check_rate", at_most_three)
        guest.tell(7, 1, cancel=True)
        made.engine.go.clear()
        guest.tell(1, 5)
        assert [(await guest.ask(number, 5)).error.code for number in (2, 3)] == [INVALID, EXHAUSTED]
        made.engine.go.set()
        assert (await guest.answer()).id == 1
        guest.tell(1, 5, cancel=True)
        with pytest.raises(EOFError):
            await guest.answer()
        await until(lambda: made.buffers.num_bytes == 0)
