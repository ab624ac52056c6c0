"""How streams end when a worker goes: after the answers that are there, in order, whatever the client has read yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
import torch

from crossdock.common import rpc
from crossdock.common.config import WorkerConfig
from crossdock.common.metrics import WorkerMetrics
from crossdock.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.admission import Door
from crossdock.worker.batcher import Budget
from crossdock.worker.checkpoint import Checkpoint
from crossdock.worker.engine import Engine
from crossdock.worker.service import Backend, ExpertService
from crossdock.worker.telemetry import Telemetry
from crossdock.worker.work import Failure
from tests.services.cluster import Batch, H, write_model
from tests.services.control_world import TIMEOUT_S

GONE = rpc.Unavailable("this worker has left the group")


def service_of(folder: Path, engine: Engine, telemetry: Telemetry) -> ExpertService:
    write_model(folder)
    door = Door(Checkpoint.open(folder).spec, torch.float32)
    backend = Backend(WorkerConfig(model=str(folder)), door, engine, telemetry, Budget(1 << 20, 1 << 20))

    async def drain() -> None:
        raise AssertionError("nobody asks for it")

    return ExpertService(backend, expert_pb2.DescribeResponse, drain)


async def test_a_stream_ends_after_its_answers_and_no_other_begins(tmp_path: Path) -> None:
    telemetry = Telemetry(WorkerMetrics(), (H * 4, H * 4))
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
        assert str(rpc.error_of(raised.value)) == str(GONE)
        await ending
        with pytest.raises(grpc.RpcError) as raised:
            await stub.Forward(timeout=TIMEOUT_S).read()
        assert str(rpc.error_of(raised.value)) == str(GONE)
    await server.stop(0)
    telemetry.close()
