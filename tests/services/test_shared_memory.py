"""Rows of large requests in memory that a client and its worker map: where they lie, who may ask, what is refused."""

from __future__ import annotations

import asyncio
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from crossdock.client import AsyncClient, Client, DeadlineExceeded, InvalidRequest, connection, dialling, shared_rows
from crossdock.client.shares import Share, split
from crossdock.protocol import frames, wire
from crossdock.protocol.frames import FrameKind
from crossdock.protocol.shared_memory import PLACE_BYTES, SharedMemory
from crossdock.worker.requests import request_slots
from crossdock.worker.requests.served_connection import ServedConnection
from tests.services import frame_oracle
from tests.services.cluster import Batch, E, H, K
from tests.services.control_world import until
from tests.services.request_world import ENDED, Guest, World, request_of, tensors, world

T = 1 + connection._SMALL_BYTES // (4 * H)
"""Tokens of the smallest request that goes there."""
MIB = 1 << 20


class Sharing(Guest):
    """A guest of the worker's host that has asked for memory."""

    def __init__(self, made: World) -> None:
        super().__init__(made, near=True)
        self.memory: SharedMemory | None = None

    async def share(self, num_bytes: int) -> int:
        """Ask; how much was given."""
        self.sock.sendall(frames.memory(num_bytes))
        data, (descriptor,), _, _ = await asyncio.to_thread(socket.recv_fds, self.sock, 20, 1)
        given = int.from_bytes(data[16:20], "little")
        self.memory = SharedMemory(descriptor, given)
        os.close(descriptor)
        return given

    def lay(self, number: int, batch: Batch, place: int) -> bytes:
        """Put the rows there; the frame that says so."""
        assert self.memory is not None
        rows = b"".join(bytes(wire.bytes_of(part)) for part in (batch.x, batch.ids.int(), batch.weights))
        self.memory.array[place : place + len(rows)] = memoryview(rows)
        return frames.forward(*request_of(number, batch, place=place))

    async def picked(self, number: int, batch: Batch, place: int) -> torch.Tensor:
        """The rows of the answer that comes next."""
        assert self.memory is not None
        frame, rows = await self.frame()
        about = frame_oracle.answer_of(frame.fields)
        assert (frame.id, about.in_place, rows) == (number, True, b"")
        return self.memory.bytes[place : place + batch.x.nbytes].view(torch.float32).view(batch.x.shape).clone()


def is_shared(made: World, index: int = -1) -> bool:
    """Whether a request's rows were in memory that a client maps."""
    at = made.engine.seen[index].x.data_ptr()
    shared = [each for one in made.connections for each in one._shared]
    return any(each.bytes.data_ptr() <= at < each.bytes.data_ptr() + each.num_bytes for each in shared)


async def test_large_requests_go_there_and_small_ones_do_not(tmp_path: Path) -> None:
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        expected = [(T, True), (T, True), (1, False), (3 * T, True), (T - 5, True), (T // 2, False)]
        for num_tokens, there in expected:
            batch = Batch.random(num_tokens)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
            assert is_shared(made) is there, num_tokens
        held = made.requests._slots._shared
        assert sum(held.values()) > 0
    await until(lambda: not held)
    await until(lambda: made.budget.num_bytes == 0)


async def test_requests_of_another_host_do_not_go_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_own_host", str)
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        for _ in range(3):
            batch = Batch.random(T)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
        assert not made.requests._slots._shared
        async with Guest(made) as guest:  # and who asks by TCP gets none
            await guest.greet()
            guest.sock.sendall(frames.memory(MIB))
            frame, _ = await guest.frame()
            assert (frame.kind, frames.memory_of(frame)) == (FrameKind.MEMORY, 0)


async def test_threads_wait_for_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one or two of eight; who has waited longest comes first, and small requests overtake."""
    most = 4096 * (1 + T * H // 400)
    monkeypatch.setattr(shared_rows, "SHARED_BYTES", most)
    async with world(tmp_path, max_queued_bytes_per_client=64 * MIB) as made:

        def ask(asking: Client) -> None:
            for turn in range(30):
                batch = Batch.random(T + 7 * turn if turn % 3 else 1)
                assert torch.equal(asking.forward(1, *tensors(batch)), 2 * batch.x)

        with Client(made.address) as asking, ThreadPoolExecutor(8) as pool:
            await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(pool, ask, asking) for _ in range(8)))
            shared = asking._requests._connections[made.address]._shared
            assert shared._memory is not None
            assert (shared._num_live, shared._memory._used) == (0, {})
            assert shared._memory.num_bytes == most  # it has grown, and the worker has taken back what was there before
            assert [each.num_bytes for each in made.connections[0]._shared] == [most]
            assert set(made.requests._slots._idle) == {1}  # no large one has gone through the socket


async def test_more_than_a_request_goes_in_several_that_alternate_between_workers() -> None:
    assert split(10, 2, 1, 1, 2) == [
        Share(1, 0, 1),
        Share(0, 5, 6),
        Share(1, 1, 3),
        Share(0, 6, 8),
        Share(1, 3, 5),
        Share(0, 8, 10),
    ]


async def test_a_place_whose_request_failed_is_not_used_again(tmp_path: Path) -> None:
    """A step may still read and write it; one that was refused on arrival is free. There is other memory then, and the
    worker takes that back in which no step has anything."""
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        await asking.forward(1, *tensors(Batch.random(T)))
        shared, served = asking._requests._connections[made.address]._shared, made.connections[0]
        first = shared._memory
        assert first is not None
        wrong = Batch.random(T)
        wrong.ids[3, 1] = E
        with pytest.raises(InvalidRequest):
            await asking.forward(1, *tensors(wrong))
        assert not first._used
        for is_running in (True, False):
            before, number = shared._memory, len(made.engine.seen)
            made.engine.go.clear()
            late = asyncio.create_task(asking.forward(1, *tensors(Batch.random(T)), timeout_s=0.5))
            await until(lambda: len(made.engine.seen) > number)  # noqa: B023
            made.engine._running = made.engine.seen[-1:] if is_running else []
            assert is_shared(made)
            with pytest.raises(DeadlineExceeded):
                await late
            made.engine.go.set()
            for _ in range(3):
                batch = Batch.random(T)
                assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
                assert is_shared(made)
            assert before is not None
            assert shared._memory is not before
            assert before._used
            assert len(served._shared) == 1 + is_running
        assert made.requests._slots._shared == {served.client: served._shared[0].num_bytes}


async def test_what_a_client_changes_meanwhile_is_its_own_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as made, Sharing(made) as guest:
        await guest.greet()
        assert await guest.share(MIB) == MIB
        made.engine.go.clear()
        batch, ids_at = Batch.random(10), 4096 + 40 * H
        guest.sock.sendall(guest.lay(1, batch, 4096))
        await until(lambda: len(made.engine.seen) == 1)
        assert guest.memory is not None
        guest.memory.array[4096 : ids_at + 80 * K] = 0xFF
        work = made.engine.seen[0]
        assert torch.equal(work.topk_ids, batch.ids.int())
        assert torch.equal(work.topk_weights, batch.weights)
        made.engine.go.set()
        await guest.picked(1, batch, 4096)
        for number, place in ((2, 64), (3, MIB - PLACE_BYTES * 100)):
            guest.sock.sendall(guest.lay(number, batch, place))
            assert torch.equal(await guest.picked(number, batch, place), 2 * batch.x)


async def test_requests_at_one_place_have_routings_of_their_own(tmp_path: Path) -> None:
    """A step may read those of the first when the second comes; whoever is answered leaves them to the next."""
    async with world(tmp_path) as made, Sharing(made) as guest:
        await guest.greet()
        assert await guest.share(MIB) == MIB
        batches = [Batch.random(10) for _ in range(3)]
        for turn in range(2):
            made.engine.go.clear()
            for number, batch in enumerate(batches):
                guest.sock.sendall(guest.lay(number, batch, 128))
                await until(lambda: len(made.engine.seen) == 3 * turn + number + 1)  # noqa: B023
            works = made.engine.seen[-3:]
            for work, batch in zip(works, batches, strict=True):
                assert torch.equal(work.topk_ids, batch.ids.int())
                assert torch.equal(work.topk_weights, batch.weights)
            assert len({work.topk_ids.data_ptr() for work in works}) == 3
            made.engine.go.set()
            for _ in batches:
                assert frame_oracle.answer_of((await guest.frame())[0].fields).in_place
        await until(lambda: len(made.connections[0]._places) == 1)


@pytest.mark.parametrize("place", [MIB, MIB - PLACE_BYTES, 32, frames.NOWHERE - 63, MIB + PLACE_BYTES])
async def test_a_place_outside_ends_the_connection(tmp_path: Path, place: int) -> None:
    async with world(tmp_path) as made, Sharing(made) as guest, Guest(made, near=True) as without:
        await guest.greet()
        await without.greet()
        assert await guest.share(MIB) == MIB
        for each, where in ((guest, place), (without, 0)):
            each.sock.sendall(frames.forward(*request_of(1, Batch.random(10), place=where)))
            with pytest.raises(ENDED):
                await each.frame()
        assert not made.engine.seen
        await until(lambda: not made.connections)
        assert not made.requests._slots._shared


async def test_it_is_counted_per_client_and_refused_past_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_slots, "MAX_SHARED_BYTES", 4 * MIB)
    async with world(tmp_path) as made, Sharing(made) as one, Sharing(made) as two:
        await one.greet()
        await two.greet()
        assert await one.share(MIB) == MIB
        assert await one.share(MIB) == MIB  # what it had is taken back then
        for wanted in (2 * MIB, 0, (1 << 32) - 1):
            two.sock.sendall(frames.memory(wanted))
            frame, _ = await two.frame()
            assert (frame.kind, frames.memory_of(frame)) == (FrameKind.MEMORY, 0)
        batch = Batch.random(10)  # what it has stays
        one.sock.sendall(one.lay(1, batch, 0))
        assert torch.equal(await one.picked(1, batch, 0), 2 * batch.x)
        memory = one.memory
        assert memory is not None
        one.sock.close()
        await until(lambda: len(made.connections) == 1)
        assert await two.share(2 * MIB) == 2 * MIB
        await until(lambda: not memory.array.any())  # its pages are gone, though it is mapped here still
    async with world(tmp_path / "other") as made, AsyncClient(made.address) as asking:
        monkeypatch.setattr(request_slots, "MAX_SHARED_BYTES", 0)
        for _ in range(3):
            batch = Batch.random(T)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)


@pytest.mark.parametrize("lacks", ["room", "descriptor"])
async def test_who_cannot_map_it_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    def failing(*_: object) -> None:
        raise OSError("no room")

    def send(self: ServedConnection, parts: list[bytes | memoryview], *slot: object, descriptor: int = -1) -> None:
        frames.close(descriptor)
        honest(self, parts, *slot)  # type: ignore[arg-type]

    honest = ServedConnection._send
    async with world(tmp_path) as made, AsyncClient(made.address) as asking:
        if lacks == "room":
            monkeypatch.setattr(shared_rows, "SharedMemory", failing)
        else:
            monkeypatch.setattr(ServedConnection, "_send", send)
        for _ in range(3):
            batch = Batch.random(T)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
            assert not is_shared(made)
        assert len(made.connections) == len(made.connections[0]._shared) == 1


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            async with AsyncClient(made.address) as asking:
                for num_tokens in (T, 2 * T, 4 * T, 4 * T):
                    await asking.forward(1, *tensors(Batch.random(num_tokens)))
        await until(lambda: not made.connections)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_memory_whose_size_can_change_is_refused(tmp_path: Path) -> None:
    shared, descriptor = SharedMemory.make(4096)
    with pytest.raises(OSError, match="expected 8192 bytes whose size is sealed"):
        SharedMemory(descriptor, 8192)
    os.close(descriptor)
    open_ended = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_ended, 4096)
    with pytest.raises(OSError, match="size is sealed"):
        SharedMemory(open_ended, 4096)
    os.close(open_ended)
    assert [shared.take(each) for each in (1, 64, 65, 4000)] == [0, 64, 128, None]
    shared.give_back(64)
    assert [shared.take(each) for each in (65, 10, 3840)] == [256, 64, None]
