"""A worker without a group, and callers of it without `crossdock.client`: by shared memory, and by TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from crossdock.client import AsyncClient
from crossdock.common import rpc
from crossdock.common.access import RateLimiter
from crossdock.common.config import WorkerConfig
from crossdock.common.metrics import WorkerMetrics
from crossdock.protocol import wire
from crossdock.protocol.request_buffer import Places, SharedMemory, described, host_identity
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.requests.admission import RequestValidator
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.budget import Budget
from crossdock.worker.requests.service import ExpertService
from crossdock.worker.steps.engine import Engine
from crossdock.worker.steps.work import Done, Work
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from tests.services.cluster import Batch, H, K, write_model
from tests.services.control_world import TIMEOUT_S

KIB = 1 << 10
INVALID, EXHAUSTED, LATE = 3, 8, 4
"""Codes of errors."""


class Doubling(Engine):
    """Answers each request with twice its rows, once it is let go, made by the first of `models` that is left, the last
    one for ever; remembers what came."""

    def __init__(self, telemetry: WorkerTelemetry) -> None:
        super().__init__(64, telemetry)
        self.go, self.seen, self.models = threading.Event(), list[Work](), list[str]()
        self.go.set()

    def submit(self, work: Work) -> None:
        self.seen.append(work)
        threading.Thread(target=self._serve, args=(work,), daemon=True).start()

    def _serve(self, work: Work) -> None:
        self.go.wait(TIMEOUT_S)
        work.y = torch.empty_like(work.x) if work.y is None else work.y
        if not work.answered:
            work.y.copy_(2 * work.x)
            model = self.models.pop(0) if len(self.models) > 1 else "".join(self.models)
            self._answer([work], Done(work.y, work.timing, model))


class World:
    """A worker without a group."""

    def __init__(self, folder: Path, **settings: object) -> None:
        write_model(folder)
        telemetry = self._telemetry = WorkerTelemetry(WorkerMetrics(), (H * 4, H * 4))
        self.engine = Doubling(telemetry)
        config = self.config = WorkerConfig(model=str(folder), **settings)  # type: ignore[arg-type]
        validator = RequestValidator(Checkpoint.open(folder).spec, torch.float32)
        backend = Backend(config, validator, self.engine, telemetry, Budget(1 << 20, 64 << 20), RateLimiter(0))

        async def drain() -> None:
            raise AssertionError("nobody asks for it")

        self.service = ExpertService(backend, expert_pb2.DescribeResponse, drain)
        self.buffers = self.service.buffers

    async def start(self) -> None:
        self.buffers.listen()
        self.server = await rpc.server(8 << 20, rpc.Health([]))
        expert_pb2_grpc.add_ExpertServiceServicer_to_server(self.service, self.server)
        self.address = rpc.bind(self.server, self.config.listen)
        await self.server.start()

    async def stop(self) -> None:
        self.buffers.close()
        await self.server.stop(0)
        self._telemetry.close()


@contextlib.asynccontextmanager
async def world(folder: Path, **settings: object) -> AsyncIterator[World]:
    made = World(folder, **settings)
    await made.start()
    try:
        yield made
    finally:
        made.engine.go.set()
        await made.stop()


class Guest:
    """A buffer without `crossdock.client`."""

    def __init__(self, world: World, num_bytes: int = 64 * KIB, host: str | None = None) -> None:
        self._channel = rpc.aio_channel(world.address)
        stub = expert_pb2_grpc.ExpertServiceStub(self._channel)
        host = host_identity() if host is None else host
        asked = expert_pb2.OpenBufferRequest(host=host, num_bytes=num_bytes, tcp=not host)
        self.call = stub.OpenBuffer(asked, timeout=TIMEOUT_S)
        self.sock: socket.socket | None = None

    async def __aenter__(self) -> Guest:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.sock is not None:
            self.sock.close()
        await self._channel.close(0)

    async def redeem(self, ticket: bytes | None = None) -> Guest:
        """Raises OSError: no memory came."""
        self.offer = await self.call.read()
        self.sock = self.dial(self.offer.socket)
        self.sock.send(self.offer.ticket if ticket is None else ticket)
        _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, self.sock, 1, 1)
        if not fds:
            raise OSError("no memory")
        self.fd = fds[0]
        self.memory = SharedMemory(self.fd, self.offer.num_bytes)
        return self

    @staticmethod
    def dial(name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(TIMEOUT_S)
        sock.connect(f"\0{name}")
        return sock

    @property
    def place(self) -> str:
        """Where the offer is redeemed."""
        return self.offer.socket or str(self.offer.port)

    def y(self, num_tokens: int) -> torch.Tensor:
        """Of the last answer, [T, H]."""
        return self.memory.tensor(torch.float32, (num_tokens, H), Places.of(num_tokens, H, K, 4).y)

    def write(self, batch: Batch) -> Places:
        places = Places.of(len(batch.x), H, K, 4)
        few = (len(batch.x), K)
        self.memory.tensor(torch.float32, (len(batch.x), H), places.x).copy_(batch.x)
        self.memory.tensor(torch.int32, few, places.ids).copy_(batch.ids)
        self.memory.tensor(torch.float32, few, places.weights).copy_(batch.weights)
        return places

    async def ask(self, request_id: int, num_tokens: int, **fields: object) -> expert_pb2.ForwardResponse:
        self.tell(request_id, num_tokens, **fields)
        return await self.answer()

    def tell(self, request_id: int, num_tokens: int, **fields: object) -> None:
        assert self.sock is not None
        self.sock.send(self.message(request_id, num_tokens, **fields).SerializeToString())

    @staticmethod
    def message(request_id: int, num_tokens: int, **fields: object) -> expert_pb2.ForwardRequest:
        request = expert_pb2.ForwardRequest(
            id=request_id,
            layer=1,
            x=described(torch.float32, (num_tokens, H)),
            topk_ids=described(torch.int32, (num_tokens, K)),
            topk_weights=described(torch.float32, (num_tokens, K)),
        )
        for name, value in fields.items():
            if isinstance(value, expert_pb2.Tensor):
                getattr(request, name).CopyFrom(value)
            else:
                setattr(request, name, value)
        return request

    async def answer(self) -> expert_pb2.ForwardResponse:
        assert self.sock is not None
        packet = await asyncio.to_thread(self.sock.recv, 4096)
        if not packet:
            raise EOFError
        return expert_pb2.ForwardResponse.FromString(packet)


class RemoteGuest(Guest):
    """A connection without `crossdock.client`."""

    def __init__(self, world: World, num_bytes: int = 64 * KIB) -> None:
        super().__init__(world, num_bytes, "")

    async def redeem(self, ticket: bytes | None = None) -> Guest:
        """Raises OSError: it was refused."""
        self.offer = await self.call.read()
        assert (self.offer.socket, self.offer.port > 0) == ("", True)
        self.sock = self.dial(self.place)
        self.sock.sendall(self.offer.ticket if ticket is None else ticket)
        if await asyncio.to_thread(self.sock.recv, 1) != b".":
            raise OSError("refused")
        return self

    @staticmethod
    def dial(name: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(name)), TIMEOUT_S)

    def y(self, num_tokens: int) -> torch.Tensor:
        return self._y

    def write(self, batch: Batch) -> Places:
        self.batch = batch
        return Places.of(len(batch.x), H, K, 4)

    def packet(self, request_id: int, num_tokens: int, **fields: object) -> bytes:
        """All bytes of a request; of a cancellation, its message."""
        request = self.message(request_id, num_tokens, **fields)
        tensors = [] if request.cancel else [self.batch.x, self.batch.ids.int(), self.batch.weights]
        return framed(request) + b"".join(bytes(wire.bytes_of(tensor)) for tensor in tensors)

    def tell(self, request_id: int, num_tokens: int, **fields: object) -> None:
        assert self.sock is not None
        self.sock.sendall(self.packet(request_id, num_tokens, **fields))

    async def answer(self) -> expert_pb2.ForwardResponse:
        """Raises EOFError, ConnectionError."""
        answer = expert_pb2.ForwardResponse.FromString(await self._read(*struct.unpack("<I", await self._read(4))))
        if not answer.HasField("error"):
            rows = bytearray(await self._read(self.batch.x.nbytes))
            self._y = torch.frombuffer(rows, dtype=torch.float32).view(-1, H)
        return answer

    async def _read(self, count: int) -> bytes:
        assert self.sock is not None
        data = b""
        while len(data) < count:
            part = await asyncio.to_thread(self.sock.recv, count - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def framed(request: expert_pb2.ForwardRequest) -> bytes:
    """Its message as a connection carries it."""
    message = request.SerializeToString()
    return struct.pack("<I", len(message)) + message


async def warm(client: AsyncClient, world: World) -> None:
    """Calls until the client has a buffer."""
    async with asyncio.timeout(TIMEOUT_S):
        while not len(world.buffers):
            await client.forward(1, *tensors(Batch.random(3)))
            await asyncio.sleep(0.01)


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.x, batch.ids, batch.weights
