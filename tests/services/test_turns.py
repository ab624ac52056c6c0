"""More Forward streams of one host than a worker reads at once: they take turns between requests, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from crossdock.client.errors import DeadlineExceeded
from crossdock.client.shares import read_rows
from crossdock.client.stream import WorkerStream
from crossdock.common import call_limits, rpc
from crossdock.common.access import CallAuthorizer
from crossdock.common.call_limits import IDLE_S, TURN_S, CallLimits, Permit, PermitPool
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.services.cluster import Batch
from tests.services.control_world import TIMEOUT_S, Clock
from tests.services.request_world import World
from tests.services.test_streams_end import tight

STREAMS = 3
"""As many are read at once."""


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[World]:
    made = World(folder)
    made.buffers.listen()
    limits = CallLimits(256, 64, 4 * STREAMS, STREAMS)
    made.server = await rpc.server(8 << 20, rpc.Health([]), authorizer=CallAuthorizer(None, limits=limits))
    expert_pb2_grpc.add_ExpertServiceServicer_to_server(made.service, made.server)
    made.address = rpc.bind(made.server, "127.0.0.1:0")
    await made.server.start()
    try:
        yield made
    finally:
        made.engine.go.set()
        await made.stop()


@contextlib.asynccontextmanager
async def streams(world: World, number: int) -> AsyncIterator[list[WorkerStream]]:
    """Each with a connection of its own, as of clients in processes of their own."""
    made = [WorkerStream(world.address, 0, 0, 8 << 20) for _ in range(number)]
    try:
        yield made
    finally:
        await asyncio.gather(*[stream.close() for stream in made])


async def ask(stream: WorkerStream, num_tokens: int, timeout_s: float = TIMEOUT_S) -> float:
    """Seconds of one request, whose answer is right. Raises ClientError."""
    batch, began = Batch.random(num_tokens), time.monotonic()
    tensors = {"x": batch.x, "topk_ids": batch.ids, "topk_weights": batch.weights}
    response = await stream.forward(expert_pb2.ForwardRequest(layer=1), tensors, timeout_s)
    read_rows(response, y := torch.empty_like(batch.x))
    assert torch.equal(y, 2 * batch.x)
    return time.monotonic() - began


async def calls(stream: WorkerStream, seconds: float, in_flight: int = 1) -> list[float]:
    """Of requests without a pause."""
    until, took = time.monotonic() + seconds, list[float]()

    async def one_after_the_other() -> None:
        while time.monotonic() < until:
            took.append(await ask(stream, 1 + len(took) % 5))

    await asyncio.gather(*[one_after_the_other() for _ in range(in_flight)])
    return took


@pytest.mark.parametrize("in_flight", [1, 4])
async def test_four_times_as_many_streams_as_are_read_take_turns(tmp_path: Path, in_flight: int) -> None:
    async with served(tmp_path) as world, streams(world, 4 * STREAMS) as those:
        took = await asyncio.gather(*[calls(stream, 4.0, in_flight) for stream in those])
    number = [len(each) for each in took]
    assert min(number) > max(number) / 4, f"some have hardly a turn: {number}"
    assert max(map(max, took)) < 2.0


async def test_what_a_stream_has_not_sent_goes_by_the_next_one(tmp_path: Path) -> None:
    """A hundred requests at once; the worker answers none before the turn is over."""
    async with served(tmp_path) as world, streams(world, 2 * STREAMS) as those:
        world.engine.go.clear()
        asked = [asyncio.create_task(ask(stream, 1)) for stream in those for _ in range(100)]
        while len(world.engine.seen) < STREAMS * 100:
            await asyncio.sleep(0.01)
        first = asyncio.create_task(asyncio.sleep(IDLE_S))
        while not first.done() and len(world.engine.seen) == STREAMS * 100:
            await asyncio.sleep(0.01)
        assert not first.done(), "the others are read though nothing is answered"
        world.engine.go.set()
        await asyncio.gather(*asked)


async def test_a_request_has_its_deadline_on_a_stream_whose_turn_is_over(tmp_path: Path) -> None:
    async with served(tmp_path) as world, streams(world, 1) as (stream,):
        world.engine.go.clear()
        waiting = asyncio.create_task(ask(stream, 1, 1.0))
        while not world.engine.seen:
            await asyncio.sleep(0.01)
        stream._end_turn(stream._reader)
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            await waiting
        world.engine.go.set()
        assert await ask(stream, 2) < TIMEOUT_S


class Deaf:
    """A client that does not look at `turn_over`: it goes on with its stream."""

    def __init__(self, world: World) -> None:
        self._channel = rpc.aio_channel(world.address)
        self._stream = expert_pb2_grpc.ExpertServiceStub(self._channel).Forward(timeout=TIMEOUT_S)
        self.told = self.answers = 0

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            await self._stream.write(Batch.random(1).message(1))
            while (answer := await self._stream.read()).turn_over:
                self.told += 1
            assert answer.id == 1
            self.answers += 1

    async def close(self) -> None:
        await self._channel.close(0)


async def test_who_goes_on_is_served_and_holds_no_other_turn(tmp_path: Path) -> None:
    async with served(tmp_path) as world, streams(world, STREAMS) as those:
        deaf = [Deaf(world) for _ in range(STREAMS - 1)]
        until = time.monotonic() + 4.0
        await asyncio.gather(
            *[each.run(until) for each in deaf],
            *[calls(stream, 4.0) for stream in those],
        )  # fmt: skip
        assert all(each.told == 1 and each.answers > 10 for each in deaf)
        for each in deaf:
            await each.close()


class Line:
    """A pool of two permits, and what was told to whom."""

    def __init__(self) -> None:
        self.clock, self.told = Clock(), list[str]()
        self.pool = PermitPool(8, 2, self.clock)

    def acquire(self, name: str, *, can_end: bool = True) -> Permit:
        permit = self.pool.acquire("peer", name, lambda: None)
        assert permit is not None
        permit.end_turn = (lambda: self.told.append(name)) if can_end else None
        return permit

    def wait(self, seconds: float, *, read: Sequence[Permit] = ()) -> None:
        self.clock.now += seconds
        for permit in read:
            self.pool.progress(permit)


def test_turns_end_in_order_once_a_request_was_read_and_as_many_as_wait() -> None:
    line = Line()
    first, second = line.acquire("first"), line.acquire("second")
    line.wait(2 * TURN_S)
    line.pool.end_turns("peer")
    assert line.told == [], "no call waits"
    with line.pool.waiter("peer") as released:
        line.pool.end_turns("peer")
        assert line.told == [], "neither has had a request read"
        line.wait(0.01, read=[second])
        line.pool.end_turns("peer")
        assert line.told == ["second"]
        line.wait(0.01, read=[first])
        line.pool.end_turns("peer")
        assert line.told == ["second"], "one waits, one was told"
        line.wait(IDLE_S, read=[first, second])
        line.pool.end_turns("peer")
        assert line.told == ["second", "first"], "the second goes on, so it no longer counts"
        assert not released.is_set()
        line.pool.release(second)
        assert released.is_set()
    assert not line.pool.is_waited_for("peer")


def test_a_turn_is_not_shorter_than_it_may_be_and_calls_of_one_request_have_none() -> None:
    line = Line()
    young, plain = line.acquire("young"), line.acquire("plain", can_end=False)
    with line.pool.waiter("peer"):
        line.wait(TURN_S / 2, read=[young, plain])
        line.pool.end_turns("peer")
        assert line.told == []
        line.wait(TURN_S, read=[young, plain])
        line.pool.end_turns("other")
        assert line.told == []
        line.pool.end_turns("peer")
        assert line.told == ["young"]


async def test_who_has_waited_longest_is_next() -> None:
    pool, order = PermitPool(8, 1), list[int]()
    held = pool.acquire("peer", "held", lambda: None)
    assert held is not None

    async def wait(number: int) -> None:
        permits = call_limits.CallPermits(PermitPool(9, 9), pool, PermitPool(9, 9), "peer", str(number))
        await permits.acquire_reading()
        order.append(number)
        await asyncio.sleep(0.05)
        permits.release()

    waiting = []
    for number in range(5):
        waiting.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(0.01)
    pool.release(held)
    waiting.append(asyncio.create_task(wait(5)))
    await asyncio.gather(*waiting)
    assert order == list(range(6))


async def test_a_stream_that_loses_its_permit_during_a_write_ends_with_a_status(tmp_path: Path) -> None:
    """Else its client waits until its deadline for answers that never come."""
    num_tokens = 1000  # 256 KB, of which a client that does not read takes 64 KiB
    async with served(tmp_path) as world, streams(world, 1) as (other,):
        channels = [tight(world.address) for _ in range(STREAMS)]
        unread = [expert_pb2_grpc.ExpertServiceStub(channel).Forward(timeout=TIMEOUT_S) for channel in channels]
        for stream in unread:
            await stream.write(Batch.random(num_tokens).message(1))
        while len(world.engine.seen) < STREAMS:
            await asyncio.sleep(0.01)
        assert await ask(other, 3) < 5 * IDLE_S
        reading = [asyncio.create_task(end_of(stream)) for stream in unread]
        done, others = await asyncio.wait(reading, timeout=TIMEOUT_S / 4, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for task in others:
            task.cancel()
        for channel in channels:
            await channel.close()


async def end_of(stream: Any) -> grpc.StatusCode:
    """How it ends, once its client reads and goes on with it."""
    with contextlib.suppress(grpc.RpcError):
        while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    code: grpc.StatusCode = await stream.code()
    return code
