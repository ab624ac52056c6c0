"""Control plane and workers as real processes, a tiny model for them, and a bare gRPC caller: no `crossdock.client`."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import grpc
import torch
from safetensors.torch import save_file

from crossdock.common import rpc
from crossdock.common.call_errors import CallError, error_of
from crossdock.common.config import ControlConfig, LogConfig, PlacementConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.common.settings import SecurityConfig
from crossdock.host.supervisor import Supervisor
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView

PLAIN = SecurityConfig()
LAYERS, E, H, INNER, K = 3, 8, 64, 32, 2
FORM_S, ANSWER_S = 240, 120
"""Deadlines for a machine that is busy with other things; nothing is expected to take so long."""
TEST_S = 1200
"""`pytest.mark.timeout` of files whose tests wait for processes."""
STEP_S = 100.0
"""Longest silence of a peer in a step. A rank that dies is noticed at once; one that is only slow is not lost."""

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
            error = error_of(caught)
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

    def look(self) -> GroupView:
        """The group as it is now; waits for a control plane that is being started."""
        deadline = time.monotonic() + FORM_S
        while True:
            try:
                with rpc.channel(self.supervisor.control_address) as channel:
                    return current_view(channel, ANSWER_S)
            except CallError:
                assert time.monotonic() < deadline, "no control plane"
                time.sleep(0.05)

    def until(self, wanted: Callable[[GroupView], bool]) -> Cluster:
        """As soon as a view is as wanted: the cluster with the addresses of then."""
        deadline = time.monotonic() + FORM_S
        while not wanted(view := self.look()):
            assert time.monotonic() < deadline, view
            time.sleep(0.05)
        return Cluster(self.supervisor, self.tensors, view)

    def now(self) -> Cluster:
        """As soon as all ranks serve: the cluster with the addresses of then."""
        return self.until(lambda view: view.state == SERVING and not view.active_ranks)

    def place(self, rank: int) -> int:
        """Which of the supervisor's workers has a rank."""
        uid = next(member.worker.uid for member in self.view.members if member.rank == rank)
        return int(uid.removeprefix("w"))

    def page(self, rank: int, name: str) -> str:
        """What a worker's HTTP server says, asked without a proxy; of an error, too."""
        where = next(member.http_address for member in self.view.members if member.rank == rank)
        try:
            with build_opener(ProxyHandler({})).open(f"http://{where}/{name}", timeout=ANSWER_S) as response:
                return str(response.read().decode())
        except HTTPError as error:
            return error.read().decode()

    def metric(self, rank: int, name: str) -> float:
        """A sample from a worker's /metrics."""
        lines = self.page(rank, "metrics").splitlines()
        return float(next(line for line in lines if line.startswith(f"crossdock_{name}{{")).split()[-1])

    @contextlib.contextmanager
    def killed(self, *ranks: int) -> Iterator[None]:
        """kill -9, all at once. Nobody is started in their places until the block ends."""
        with without_successors(self.supervisor, *map(self.place, ranks)):
            for rank in ranks:
                os.kill(self.supervisor.worker_pids()[self.place(rank)], signal.SIGKILL)
            yield

    @contextlib.contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """SIGSTOP one worker: no step is finished until the block ends."""
        pid = self.supervisor.worker_pids()[self.place(rank)]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def without_successors(supervisor: Supervisor, *places: int) -> Iterator[None]:
    """Hold the supervisor's hand: it starts no process in these places until the block ends."""
    with contextlib.ExitStack() as held:
        for place in places:
            held.enter_context(supervisor._workers[place]._lock)
        yield


def cluster(
    folder: Path,
    *,
    num_workers: int = 4,
    spares: int = 0,
    lease_s: float = 60.0,
    recover_s: float = 200.0,
    guard: SecurityConfig = PLAIN,
    placement: PlacementConfig | None = None,
    elastic: bool = False,
    **worker: object,
) -> Iterator[Cluster]:
    """Start a group, give it, stop it: the body of a fixture. A guarded one logs all that it does.

    Workers that are `spares` wait beside it. Leases are long, so that nobody is lost but who is meant to be: a
    successor, or a peer that tells, is sooner.
    """
    log = LogConfig(level="debug" if guard.is_on else "info")
    tensors = write_model(folder / "model")
    control = ControlConfig(
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        world_size=num_workers,
        max_workers=num_workers + spares,
        lease_s=lease_s,
        recover_s=recover_s,
        security=guard,
        log=log,
        placement=placement or PlacementConfig(),
        elastic=elastic,
    )
    common = {"security": guard, "log": log, "step_timeout_s": STEP_S, **worker}
    workers = [
        WorkerConfig(model=str(folder / "model"), local_rank=rank, uid=f"w{rank}", **common)  # type: ignore[arg-type]
        for rank in range(num_workers + spares)
    ]
    with Supervisor(control, workers, folder / "logs") as supervisor:
        yield Cluster(supervisor, tensors, supervisor.wait_serving(FORM_S))
