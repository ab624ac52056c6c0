"""A worker and a control plane that live in the test's own process: real gRPC, no processes, no data plane.

`FakeWorker` serves all experts of a layer by itself and can be told to misbehave; `FakeControl` says the views it is
given. For tests of the client, which must not care who is at the other end.
"""

# ruff: noqa: N802  (the methods of a servicer are named in the protos)
from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.protocol import frames, wire
from crossdock.protocol.frames import FrameKind, FrameSocket
from crossdock.protocol.v1 import control_pb2, control_pb2_grpc, expert_pb2, expert_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.experts.expert_mlps import ExpertMLPs

Answer = expert_pb2.ForwardResponse
Behaviour = Callable[[expert_pb2.ForwardRequest], Answer | None]
"""What to answer to a request; None: nothing, ever."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def dense(experts: ExpertMLPs, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All experts on one rank: the weighted sum [T, H] in fp32 order of ascending k, in the dtype of x.

    Args:
        experts: slots are expert ids.
        layer, x, ids, weights: as a Forward request, decoded.
    """
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    num_none = int((flat < 0).sum())
    counts = torch.bincount(flat[flat >= 0], minlength=experts.num_experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    kept = order[num_none:]
    rows = torch.zeros(flat.numel(), x.shape[1])
    grouped = x[kept // ids.shape[1]]
    rows[kept] = experts.forward(layer, grouped, offsets.int(), counts.int()).float()
    return (rows.view(*ids.shape, -1) * weights[..., None]).sum(1).to(x.dtype)


class _Served:
    """A gRPC server of one servicer on a free port of 127.0.0.1."""

    def __init__(self, max_message_bytes: int = 64 << 20) -> None:
        options = [("grpc.max_receive_message_length", max_message_bytes)]
        self._server = grpc.server(ThreadPoolExecutor(16), options=options)
        self._add(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _add(self, server: grpc.Server) -> None:
        raise AssertionError("a subclass adds its servicer")

    def kill(self) -> None:
        """End every call at once, as a killed process does."""
        self._server.stop(None).wait()


class FakeWorker(_Served, expert_pb2_grpc.ExpertServiceServicer):
    """Serves `given` as its description. `behave` may be replaced at any time; `seen` and `cancelled` record what came;
    `num_streams` counts connections and streams. Without `pongs` it says nothing to who asks whether it is there."""

    pongs = True

    def __init__(
        self,
        given: expert_pb2.DescribeResponse,
        behave: Behaviour,
        max_message_bytes: int = 64 << 20,
        max_request_bytes: int = 16 << 20,
    ) -> None:
        self.behave, self.max_request_bytes = behave, max_request_bytes
        self.seen: list[expert_pb2.ForwardRequest] = []
        self.cancelled: queue.Queue[int] = queue.Queue()
        self.num_streams = 0
        self._front = FrameFront(self)
        description = self.description = expert_pb2.DescribeResponse()
        description.CopyFrom(given)
        description.request_port = self._front.port
        super().__init__(max_message_bytes)

    def _add(self, server: grpc.Server) -> None:
        expert_pb2_grpc.add_ExpertServiceServicer_to_server(self, server)

    def kill(self) -> None:
        self._front.kill()
        super().kill()

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests seen."""
        return sum(request.x.shape[0] for request in self.seen)

    def Describe(self, request: Any, context: Any) -> expert_pb2.DescribeResponse:
        return self.description

    def Forward(self, requests: Iterator[expert_pb2.ForwardRequest], context: Any) -> Iterator[Answer]:
        self.num_streams += 1
        for request in requests:
            if request.cancel:
                self.cancelled.put(request.id)
                continue
            self.seen.append(request)
            answer = self.behave(request)
            if answer is not None:
                answer.id = request.id
                yield answer


class FrameFront:
    """Request connections of a `FakeWorker`, each served by its `Forward`, which sees messages."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker, self._sock = worker, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._sock.getsockname()[1])
        self._open: list[FrameSocket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def kill(self) -> None:
        """End all connections, and take no more."""
        for sock in (self._sock, *(line.sock for line in self._open)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                self._open.append(FrameSocket(sock, 64 << 20))
                threading.Thread(target=self._serve, args=(self._open[-1],), daemon=True).start()

    def _serve(self, line: FrameSocket) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._next(line)
            frames.hello_of(line.frame())
            line.send([frames.welcome(32, self._worker.max_request_bytes)])
            for answer in self._worker.Forward(self._requests(line), None):
                self._answer(line, answer)

    @staticmethod
    def _next(line: FrameSocket) -> int:
        while (got := line.next()) == frames.NOTHING:
            pass
        return got

    def _requests(self, line: FrameSocket) -> Iterator[expert_pb2.ForwardRequest]:
        while True:
            try:
                kind, number = self._next(line), line.state.id
            except EOFError:
                return
            if kind == FrameKind.CANCEL:
                yield expert_pb2.ForwardRequest(id=number, cancel=True)
            elif kind == FrameKind.FORWARD:
                request = line.forward()
                rows = torch.empty(request.num_bytes, dtype=torch.uint8)
                if not line.rows_to(rows.data_ptr(), rows):
                    assert self._next(line) == frames.ROWS
                yield message_of(request, rows.numpy().data)
            elif kind == FrameKind.PING and self._worker.pongs:
                line.send([frames.plain(FrameKind.PONG, number)])

    @staticmethod
    def _answer(line: FrameSocket, answer: Answer) -> None:
        if answer.HasField("error"):
            error = answer.error
            about = frames.Error(error.code, error.epoch, tuple(error.lost_ranks), error.message)
            line.send([frames.error(answer.id, about)])
            return
        y = wire.decode(answer.y, name="y", dtypes=FLOATS, ndim=2)
        told = frames.Answer(0, 0, 0, 0, 1, y.shape[0], y.shape[1], y.dtype, answer.model)
        line.send([frames.answer(answer.id, told), wire.bytes_of(y)])


def message_of(request: frames.Forward, rows: memoryview) -> expert_pb2.ForwardRequest:
    """A request in a frame, as the message that says the same."""
    tokens, hidden, topk, dtype = request.num_tokens, request.hidden, request.topk, request.dtype
    x_end, ids_end = tokens * hidden * dtype.itemsize, tokens * (hidden * dtype.itemsize + 4 * topk)

    def tensor(begin: int, end: int, kind: torch.dtype, columns: int) -> expert_pb2.Tensor:
        return expert_pb2.Tensor(data=bytes(rows[begin:end]), dtype=wire.NAMES[kind], shape=(tokens, columns))

    return expert_pb2.ForwardRequest(
        id=request.id,
        layer=request.layer,
        x=tensor(0, x_end, dtype, hidden),
        topk_ids=tensor(x_end, ids_end, torch.int32, topk),
        topk_weights=tensor(ids_end, len(rows), torch.float32, topk),
        timeout_ms=request.timeout_ms,
        model=request.model,
        traceparent=request.traceparent,
    )


class FakeControl(_Served, control_pb2_grpc.ControlPlaneServicer):
    """Says views to whoever watches, and by its health service that it leads, while `leads` is set."""

    leads = True

    def __init__(self, view: control_pb2.GroupView) -> None:
        self._view, self._changed, self._stopped = view, threading.Condition(), False
        super().__init__()

    def _add(self, server: grpc.Server) -> None:
        control_pb2_grpc.add_ControlPlaneServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(_Leading(self), server)

    def say(self, view: control_pb2.GroupView) -> None:
        """Change the view."""
        with self._changed:
            self._view = view
            self._changed.notify_all()

    def kill(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        super().kill()

    def Watch(self, request: Any, context: Any) -> Iterator[control_pb2.GroupView]:
        said = None
        while context.is_active() and not self._stopped:
            with self._changed:
                self._changed.wait_for(lambda said=said: self._view is not said or self._stopped, 0.5)
                view = self._view
            if view is not said and not self._stopped:
                said = view
                yield view


class _Leading(health_pb2_grpc.HealthServicer):
    """Health of a `FakeControl`."""

    def __init__(self, control: FakeControl) -> None:
        self._control = control

    def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._control.leads else statuses.NOT_SERVING)


def view_of(
    workers: Sequence[FakeWorker | None],
    *,
    epoch: int = 1,
    state: control_pb2.GroupState = control_pb2.SERVING,
    reason: str = "",
) -> control_pb2.GroupView:
    """A group of these workers by rank; None is a hole."""
    members = [
        control_pb2.Member(rank=rank, address=worker.address, ready=state == control_pb2.SERVING)
        for rank, worker in enumerate(workers)
        if worker is not None
    ]
    lost = [rank for rank, worker in enumerate(workers) if worker is None]
    return control_pb2.GroupView(epoch=epoch, state=state, members=members, lost_ranks=lost, reason=reason)


def echo(request: expert_pb2.ForwardRequest) -> Answer:
    """Answers x + layer: quick, and shows which rows came back where."""
    x = wire.decode(request.x, name="x", dtypes=FLOATS, ndim=2)
    return Answer(y=wire.encode(x + request.layer))


def refuse(code: grpc.StatusCode, message: str, lost_ranks: Sequence[int] = (), epoch: int = 0) -> Behaviour:
    """Answers an error."""
    error = expert_pb2.Error(code=code.value[0], message=message, lost_ranks=lost_ranks, epoch=epoch)
    return lambda request: Answer(error=error)


def serve(experts: ExpertMLPs) -> Behaviour:
    """Answers with what these experts make of the rows."""

    def behave(request: expert_pb2.ForwardRequest) -> Answer:
        x = wire.decode(request.x, name="x", dtypes=FLOATS, ndim=2)
        ids = wire.decode(request.topk_ids, name="topk_ids", dtypes=(torch.int32, torch.int64), ndim=2)
        weights = wire.decode(request.topk_weights, name="topk_weights", dtypes=(torch.float32,), ndim=2)
        return Answer(y=wire.encode(dense(experts, request.layer, x, ids, weights)))

    return behave


def worker_of(checkpoint: Checkpoint, dtype: torch.dtype) -> FakeWorker:
    """A worker that serves all experts of a checkpoint."""
    spec = checkpoint.spec
    description = expert_pb2.DescribeResponse(
        model=spec.fingerprint,
        family=spec.family,
        num_layers=spec.num_layers,
        moe_layers=spec.moe_layers,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        topk=spec.topk,
        dtype=wire.NAMES[dtype],
        serving=True,
        formats=[format.kind for format in spec.formats],
    )
    return FakeWorker(description, serve(ExpertMLPs.load(checkpoint, range(spec.num_experts), dtype=dtype)))
