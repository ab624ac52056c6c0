"""Control plane and workers as real processes, a tiny model for them, and a bare gRPC caller: no `crossdock.client`."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from safetensors.torch import save_file

from crossdock import wire
from crossdock.common import rpc
from crossdock.common.config import ControlConfig, LogConfig, PlacementConfig, WorkerConfig
from crossdock.common.settings import SecurityConfig
from crossdock.supervisor import Supervisor
from crossdock.v1 import expert_pb2, expert_pb2_grpc
from crossdock.v1.control_pb2 import GroupView

PLAIN = SecurityConfig()
LAYERS, E, H, INNER, K = 3, 8, 64, 32, 2
FORM_S, ANSWER_S = 90, 30

Answer = expert_pb2.ForwardResponse


def write_model(directory: Path) -> dict[str, torch.Tensor]:
    """Write the experts of a tiny random Qwen3-MoE as float32; layer 0 is dense. Returns the tensors by name."""
    generator = torch.Generator().manual_seed(torch.seed())
    shapes = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": torch.randn(shape, generator=generator) * 0.2
        for layer in range(1, LAYERS)
        for expert in range(E)
        for name, shape in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(
        f'{{"model_type": "qwen3_moe", "num_hidden_layers": {LAYERS}, "num_experts": {E}, "hidden_size": {H},'
        f' "moe_intermediate_size": {INNER}, "num_experts_per_tok": {K}, "hidden_act": "silu",'
        ' "mlp_only_layers": [0], "dtype": "float32"}'
    )
    return tensors


@dataclass(frozen=True)
class Batch:
    """The tensors of one request."""

    layer: int
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def random(num_tokens: int, layer: int = 1) -> Batch:
        """Fresh tokens and fresh routing; about one id in nine is -1."""
        shape = (num_tokens, K)
        return Batch(layer, torch.randn(num_tokens, H), torch.randint(-1, E, shape), torch.rand(shape))

    def message(self, request_id: int, **fields: object) -> expert_pb2.ForwardRequest:
        """As it travels."""
        return expert_pb2.ForwardRequest(
            id=request_id,
            layer=self.layer,
            x=wire.encode(self.x),
            topk_ids=wire.encode(self.ids),
            topk_weights=wire.encode(self.weights),
            **fields,  # type: ignore[arg-type]
        )

    def expected(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """A dense MoE layer in float64: every expert on every token, then the weighted sum of the chosen ones."""
        x = self.x.double()
        rows = torch.stack([_mlp(tensors, self.layer, expert, x) for expert in range(E)], 1)
        rows = torch.cat([rows, torch.zeros_like(rows[:, :1])], 1)  # -1 finds zeros
        chosen = rows.gather(1, self.ids.long().remainder(E + 1)[..., None].expand(-1, -1, H))
        return (chosen * self.weights.double()[..., None]).sum(1)


def _mlp(tensors: dict[str, torch.Tensor], layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (
        tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"].double()
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Caller:
    """One Forward stream to one worker. A thread sorts the answers; a stream that ends gives its error to all."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address, 64 << 20)
        self.stub = expert_pb2_grpc.ExpertServiceStub(self._channel)
        self._outbox: queue.Queue[expert_pb2.ForwardRequest | None] = queue.Queue()
        self._waiting: dict[int, Future[Answer]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._call = self.stub.Forward(iter(self._outbox.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """End the stream at once."""
        self._call.cancel()
        self._outbox.put(None)
        self._thread.join(ANSWER_S)
        self._channel.close()

    def send(self, message: expert_pb2.ForwardRequest) -> Future[Answer]:
        """Send a message as it is; its answer comes by its id."""
        future: Future[Answer] = Future()
        with self._lock:
            self._waiting[message.id] = future
        self._outbox.put(message)
        return future

    def ask(self, batch: Batch, **fields: object) -> Future[Answer]:
        """Send a request under a fresh id."""
        return self.send(batch.message(next(self._ids), **fields))

    def forward(self, batch: Batch, **fields: object) -> Answer:
        """Send a request and wait for its answer."""
        return self.ask(batch, **fields).result(ANSWER_S)

    def cancel(self, request_id: int) -> None:
        """Withdraw a request."""
        self._outbox.put(expert_pb2.ForwardRequest(id=request_id, cancel=True))

    def _read(self) -> None:
        error: Exception = EOFError("the stream ended")
        try:
            for answer in self._call:
                with self._lock:
                    future = self._waiting.pop(answer.id)
                future.set_result(answer)
        except grpc.RpcError as caught:
            error = rpc.error_of(caught)
        with self._lock:
            left, self._waiting = self._waiting, {}
        for future in left.values():
            future.set_exception(error)


def rows(answer: Answer) -> torch.Tensor:
    """y of a good answer."""
    assert not answer.HasField("error"), answer.error
    return wire.decode(answer.y, name="y", dtypes=(torch.float32,), ndim=2)


def check(answer: Answer, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
    """The answer is the dense layer's, up to float32 rounding."""
    torch.testing.assert_close(rows(answer).double(), batch.expected(tensors), rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Cluster:
    """A serving group."""

    supervisor: Supervisor
    tensors: dict[str, torch.Tensor]
    view: GroupView

    def address(self, rank: int) -> str:
        """Where the worker of a rank serves."""
        return next(str(member.address) for member in self.view.members if member.rank == rank)

    def caller(self, rank: int) -> Caller:
        """A new stream to the worker of a rank."""
        return Caller(self.address(rank))


def cluster(
    folder: Path,
    *,
    num_workers: int = 4,
    lease_s: float = 10.0,
    recover_s: float = 20.0,
    guard: SecurityConfig = PLAIN,
    placement: PlacementConfig | None = None,
    elastic: bool = False,
    **worker: object,
) -> Iterator[Cluster]:
    """Start a group, give it, stop it: the body of a fixture. A guarded one logs all that it does."""
    log = LogConfig(level="debug" if guard.is_on else "info")
    tensors = write_model(folder / "model")
    control = ControlConfig(
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        world_size=num_workers,
        lease_s=lease_s,
        recover_s=recover_s,
        security=guard,
        log=log,
        placement=placement or PlacementConfig(),
        elastic=elastic,
    )
    common = {"security": guard, "log": log, **worker}
    workers = [
        WorkerConfig(model=str(folder / "model"), local_rank=rank, uid=f"w{rank}", **common)  # type: ignore[arg-type]
        for rank in range(num_workers)
    ]
    with Supervisor(control, workers, folder / "logs") as supervisor:
        yield Cluster(supervisor, tensors, supervisor.wait_serving(FORM_S))
