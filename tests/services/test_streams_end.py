"""How streams end.

When a worker goes: after the answers that are there, in order, whatever the client has read yet. When a client does not
read: after a while, or when its bytes are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from crossdock.common import rpc
from crossdock.common.access import RateLimiter
from crossdock.common.call_errors import Unavailable, error_of
from crossdock.common.config import WorkerConfig
from crossdock.common.metrics import WorkerMetrics
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.requests import budget as budget_module
from crossdock.worker.requests.admission import RequestValidator
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.budget import Budget
from crossdock.worker.requests.request_server import RequestServer
from crossdock.worker.requests.service import ExpertService
from crossdock.worker.steps.engine import Engine
from crossdock.worker.steps.work import Done, Failure, Work
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from tests.services.cluster import Batch, H, write_model
from tests.services.control_world import TIMEOUT_S, until

GONE = Unavailable("this worker has left the group")


def service_of(
    folder: Path, engine: Engine, telemetry: WorkerTelemetry, max_bytes_per_client: int = 1 << 20, **settings: float
) -> ExpertService:
    write_model(folder)
    validator = RequestValidator(Checkpoint.open(folder).spec, torch.float32)
    config = WorkerConfig(model=str(folder), **settings)  # type: ignore[arg-type]
    backend = Backend(config, validator, engine, telemetry, Budget(max_bytes_per_client, 64 << 20), RateLimiter(0))

    async def drain() -> None:
        raise AssertionError("nobody asks for it")

    return ExpertService(backend, RequestServer(backend), expert_pb2.DescribeResponse, drain)


async def test_a_stream_ends_after_its_answers_and_no_other_begins(tmp_path: Path) -> None:
    telemetry = WorkerTelemetry(WorkerMetrics(), (H * 4, H * 4))
    engine = Engine(64, telemetry)
    engine.open()
    service = service_of(tmp_path, engine, telemetry)
    server = await rpc.server(1 << 20, rpc.Health([]))
    expert_pb2_grpc.add_ExpertServiceServicer_to_server(service, server)
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.aio_channel(address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        stream = stub.Forward(timeout=TIMEOUT_S)
        for number in range(8):
            await stream.write(Batch.random(3).message(number))
        async with asyncio.timeout(TIMEOUT_S):
            while engine.num_queued() < 8:
                await asyncio.sleep(0.01)
        engine.close(Failure(grpc.StatusCode.UNAVAILABLE, "draining"))
        ending = asyncio.create_task(service.end(GONE, TIMEOUT_S))
        answers = [await stream.read() for _ in range(8)]
        with pytest.raises(grpc.RpcError) as raised:
            await stream.read()
        assert sorted(answer.id for answer in answers) == list(range(8))
        assert {answer.error.message for answer in answers} == {"draining"}
        assert str(error_of(raised.value)) == str(GONE)
        await ending
        with pytest.raises(grpc.RpcError) as raised:
            await stub.Forward(timeout=TIMEOUT_S).read()
        assert str(error_of(raised.value)) == str(GONE)
    await server.stop(0)
    telemetry.close()


class Answering(Engine):
    """Answers each request at once with its own rows."""

    def submit(self, work: Work) -> None:
        work.reply(Done(work.x, work.timing))


@contextlib.asynccontextmanager
async def served(folder: Path, **settings: float) -> AsyncIterator[tuple[str, WorkerMetrics]]:
    metrics = WorkerMetrics()
    telemetry = WorkerTelemetry(metrics, (H * 4, H * 4))
    service = service_of(folder, Answering(64, telemetry), telemetry, **settings)  # type: ignore[arg-type]
    metrics.queued_bytes.set_function(lambda: service._backend.budget.num_bytes)
    server = await rpc.server(8 << 20, rpc.Health([]))
    expert_pb2_grpc.add_ExpertServiceServicer_to_server(service, server)
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address, metrics
    finally:
        await server.stop(0)
        telemetry.close()


def value(metrics: WorkerMetrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"crossdock_{name}") or 0.0


def tight(address: str) -> grpc.aio.Channel:
    """A channel that takes 64 KiB of what nobody reads, however fast the line is."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", 8 << 20)]
    return grpc.aio.insecure_channel(address, options=options)


LARGE = 8192
"""Tokens of a request whose answer does not fit any buffer on the way: H * 4 * LARGE is 2 MiB."""


async def write(stream: Any, messages: Sequence[expert_pb2.ForwardRequest]) -> None:
    for message in messages:
        await stream.write(message)


async def test_a_stream_whose_answers_are_not_read_is_given_up(tmp_path: Path) -> None:
    """All but the answer that is being written is dropped; the stream ends when its client has taken that one."""
    limits = {"request_timeout_s": 2.0, "max_bytes_per_client": 16 << 20}
    async with served(tmp_path, **limits) as (address, metrics), tight(address) as channel:
        stream = expert_pb2_grpc.ExpertServiceStub(channel).Forward(timeout=TIMEOUT_S)
        for number in range(3):
            await stream.write(Batch.random(LARGE).message(number))
        await until(lambda: value(metrics, "queued_bytes") > 9 * LARGE * H * 4)
        await until(lambda: value(metrics, "streams_dropped_total") == 1)
        assert 0 < value(metrics, "queued_bytes") < 4 * LARGE * H * 4
        assert (await stream.read()).HasField("y")
        with pytest.raises(grpc.RpcError, match="expected a client that reads them"):
            await stream.read()
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: value(metrics, "queued_bytes") == 0)


async def test_unread_answers_of_many_streams_hold_no_more_than_a_client_may(tmp_path: Path) -> None:
    limit = 4 << 20
    async with served(tmp_path, max_bytes_per_client=limit) as (address, metrics), tight(address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        message = Batch.random(LARGE // 2).message(1)
        unread = [stub.Forward(timeout=TIMEOUT_S) for _ in range(10)]
        writing = [asyncio.create_task(write(stream, [message] * 3)) for stream in unread]
        await until(lambda: value(metrics, "queued_bytes") >= limit)
        for _ in range(20):
            assert value(metrics, "queued_bytes") <= 2 * limit
            await asyncio.sleep(0.02)
        for stream, task in zip(unread, writing, strict=True):
            task.cancel()
            stream.cancel()
        await until(lambda: value(metrics, "queued_bytes") == 0)
        reading = stub.Forward(timeout=TIMEOUT_S)
        await reading.write(message)
        assert (await reading.read()).HasField("y")


async def test_the_stream_that_reads_least_is_given_up_where_room_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "STALLED_S", 0.0)
    async with served(tmp_path, max_bytes_per_client=7 << 20) as (address, metrics), tight(address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        unread, reading = stub.Forward(timeout=TIMEOUT_S), stub.Forward(timeout=TIMEOUT_S)
        for number in range(2):  # one that is being written and one that waits; both count three times their rows
            await unread.write(Batch.random(LARGE).message(number))
        await until(lambda: value(metrics, "queued_bytes") > 11 << 20)
        await reading.write(Batch.random(LARGE).message(1))
        assert (await reading.read()).HasField("y")
        assert value(metrics, "streams_dropped_total") == 1
