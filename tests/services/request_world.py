"""A worker without a group, and callers of it without `crossdock.client`, which send frames by hand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from crossdock.common import rpc
from crossdock.common.access import CallAuthorizer, RateLimiter
from crossdock.common.config import WorkerConfig
from crossdock.common.metrics import WorkerMetrics
from crossdock.common.security import security_of
from crossdock.protocol import frames, wire
from crossdock.protocol.frames import Error, Forward, Frame, FrameKind
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.requests.admission import RequestValidator
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.budget import Budget
from crossdock.worker.requests.request_server import RequestServer
from crossdock.worker.requests.served_connection import ServedConnection
from crossdock.worker.requests.service import ExpertService
from crossdock.worker.steps.engine import Engine
from crossdock.worker.steps.work import Done, Work
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from tests.services import frame_oracle
from tests.services.cluster import Batch, H, write_model
from tests.services.control_world import TIMEOUT_S

KIB = 1 << 10
INVALID, EXHAUSTED, LATE, CANCELLED, UNAUTHENTICATED, UNIMPLEMENTED = 3, 8, 4, 1, 16, 12
"""Codes of errors."""
ENDED = (EOFError, ConnectionError)


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
    """A worker without a group. max_bytes: of all clients; of one a 64th."""

    def __init__(self, folder: Path, max_bytes: int = 64 << 20, **settings: object) -> None:
        write_model(folder)
        self.metrics = WorkerMetrics()
        telemetry = self._telemetry = WorkerTelemetry(self.metrics, (H * 4, H * 4))
        self.engine = Doubling(telemetry)
        settings.setdefault("max_queued_bytes_per_client", max_bytes // 64)
        config = self.config = WorkerConfig(model=str(folder), **settings)  # type: ignore[arg-type]
        validator = RequestValidator(Checkpoint.open(folder).spec, torch.float32)
        self.budget = Budget(config.max_queued_bytes_per_client, max_bytes)
        limiter = RateLimiter(config.max_requests_per_s)
        backend = Backend(config, validator, self.engine, telemetry, self.budget, limiter)

        async def drain() -> None:
            raise AssertionError("nobody asks for it")

        self.security = security_of(config.security)
        self.authorizer = CallAuthorizer(self.security)
        self.requests = RequestServer(backend, self.security, self.authorizer)
        self.service = ExpertService(backend, self.requests, expert_pb2.DescribeResponse, drain)

    @property
    def connections(self) -> tuple[ServedConnection, ...]:
        """Those that are open."""
        return self.requests._connections()

    async def start(self) -> None:
        self.requests.listen()
        self.server = await rpc.server(8 << 20, rpc.Health([]), authorizer=self.authorizer)
        expert_pb2_grpc.add_ExpertServiceServicer_to_server(self.service, self.server)
        self.address = rpc.bind(self.server, self.config.listen, self.security)
        await self.server.start()

    async def stop(self) -> None:
        self.requests.close()
        await self.server.stop(0)
        self._telemetry.close()


@contextlib.asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    made = World(folder, **settings)
    await made.start()
    try:
        yield made
    finally:
        made.engine.go.set()
        await made.stop()


class Guest:
    """A connection without `crossdock.client`.

    Args:
        world: to whose worker.
        near: over its UNIX socket; else TCP.
    """

    def __init__(self, world: World, near: bool = False) -> None:
        self.name = world.requests._name if near else ""
        if near:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(TIMEOUT_S)
            self.sock.connect(f"\0{world.requests._name}")
        else:
            self.sock = socket.create_connection(("127.0.0.1", world.requests.port), TIMEOUT_S)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def __aenter__(self) -> Guest:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    async def greet(self, token: str = "") -> Guest:
        """Raises EOFError, ConnectionError: not welcome."""
        self.sock.sendall(self.hello(token))
        frame, _ = await self.frame()
        assert frames.welcome_of(frame)[0] > 0
        return self

    def hello(self, token: str = "") -> bytes:
        """What it says first."""
        return frames.hello(token, self.name)

    def tell(self, number: int, batch: Batch, **fields: Any) -> None:
        """Send a request."""
        self.sock.sendall(packet(number, batch, **fields))

    async def ask(self, number: int, batch: Batch, **fields: Any) -> torch.Tensor | Error:
        """Send a request and wait for what comes next."""
        self.tell(number, batch, **fields)
        got = await self.answer()
        assert got[0] == number
        return got[1]

    async def answer(self) -> tuple[int, torch.Tensor | Error]:
        """The next answer: its id, and y [T, H] or an error. Raises EOFError, ConnectionError."""
        while True:
            frame, rows = await self.frame()
            if frame.kind == FrameKind.ERROR:
                return frame.id, frames.error_of(frame)
            if frame.kind == FrameKind.ANSWER:
                about = frame_oracle.answer_of(frame.fields)
                y = torch.empty(about.num_tokens, about.hidden, dtype=about.dtype)
                wire.bytes_of(y)[:] = rows
                return frame.id, y

    async def frame(self) -> tuple[Frame, bytearray]:
        """Whatever comes next. Raises EOFError, ConnectionError."""
        rows, size, kind, _, number = frames.HEADER.unpack(await self._read(16))
        return Frame(kind, number, bytes(await self._read(size))), await self._read(rows)

    async def _read(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            part = await asyncio.to_thread(self.sock.recv, count - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def request_of(number: int, batch: Batch, **fields: Any) -> Forward:
    (num_tokens, hidden), topk, dtype = batch.x.shape, batch.ids.shape[1], batch.x.dtype
    num_bytes = frames.request_bytes(num_tokens, hidden, topk, dtype)
    return Forward(number, 1, num_tokens, hidden, topk, dtype, 0, "", "", num_bytes)._replace(**fields)


def packet(number: int, batch: Batch, **fields: Any) -> bytes:
    """All bytes of a request."""
    rows = b"".join(bytes(wire.bytes_of(part)) for part in (batch.x, batch.ids.int(), batch.weights))
    return frames.forward(*request_of(number, batch, **fields)) + rows


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.x, batch.ids, batch.weights
