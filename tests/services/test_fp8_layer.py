"""A DeepSeek-V3 layer in fp8, served by four ranks from the bytes of its checkpoint. `make test-layer` takes the real
sizes, 256 experts of 7168 x 2048 (11.3 GB); `make test` the same with small matrices."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from crossdock.cli import app
from crossdock.client import Client
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.host.supervisor import Supervisor
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import Format, Stack
from tests.services.cluster import ANSWER_S, FORM_S, STEP_S, TEST_S
from tests.services.forked import forked_children

pytestmark = pytest.mark.timeout(TEST_S)
RANKS, EXPERTS, TOPK, BLOCK = 4, 256, 8, 128
PER_FILE = 16


@dataclass(frozen=True)
class Layer:
    """A generated checkpoint of one layer."""

    path: Path
    hidden: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        """In the checkpoint, of all experts."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))


def write_layer(path: Path, hidden: int, inner: int) -> Layer:
    """Random e4m3 matrices with block scales, under DeepSeek-V3's names, 16 experts a file."""
    path.mkdir()
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    drawn = torch.randn(2 * hidden * inner).to(torch.float8_e4m3fn)
    names: dict[str, str] = {}
    for number in range(EXPERTS // PER_FILE):
        tensors = {}
        for expert in range(number * PER_FILE, (number + 1) * PER_FILE):
            for name, (rows, columns) in sizes.items():
                at, begin = f"model.layers.0.mlp.experts.{expert}.{name}.weight", int(torch.randint(rows * columns, ()))
                tensors[at] = drawn[begin : begin + rows * columns].view(rows, columns).clone()
                scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)).add_(0.5).mul_(columns**-0.5)
                tensors[f"{at}_scale_inv"] = scales
        file = f"model-{number:05}.safetensors"
        save_file(tensors, path / file)
        names |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOPK, "hidden_size": hidden, "moe_intermediate_size": inner, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return Layer(path, hidden, inner)


@pytest.fixture(scope="module")
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layer]:
    whole, folder = request.config.getoption("--whole-layer"), tmp_path_factory.mktemp("fp8")
    if whole and shutil.disk_usage(folder).free < 15 << 30:
        pytest.skip("needs 15 GB of free disk")
    yield write_layer(folder / "model", *((7168, 2048) if whole else (512, 256)))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def told(layer: Layer) -> dict[str, int]:
    """What `crossdock memory --model` says, before anything is loaded."""
    args = ["memory", "--model", str(layer.path), "--ranks", str(RANKS), "--rank-gib", "3", "--json"]
    done = CliRunner().invoke(app.app, args)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.output))


def test_experts_take_the_bytes_of_the_checkpoint(layer: Layer, told: dict[str, int]) -> None:
    assert told["model_bytes"] == pytest.approx(layer.expert_bytes, rel=0.05)
    assert told["rank_bytes"] * RANKS == told["model_bytes"]
    assert (told["fits"], told["experts_per_rank"], told["expert_bytes"] * EXPERTS) == (
        True, EXPERTS // RANKS, told["model_bytes"],
    )  # fmt: skip


def expected(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The dequantised layer in float32, one expert at a time."""
    checkpoint, z = Checkpoint.open(layer.path), torch.zeros(x.shape)
    first, down = (stack[0] for stack in checkpoint.stacks(0, 1, torch.bfloat16, "cpu"))
    for expert in ids.unique().tolist():
        checkpoint.read_expert(0, expert, first, down)
        token, place = (ids == expert).nonzero(as_tuple=True)
        inner = x[token].float() @ floats(first).t()
        hidden = Gating()(inner, torch.empty(inner.shape[0], layer.inner))
        z.index_add_(0, token, hidden @ floats(down).t() * weights[token, place, None])
    checkpoint.close()
    return z


def floats(expert: Stack) -> torch.Tensor:
    """One matrix."""
    assert expert.format == Format("fp8", (BLOCK, BLOCK))
    whole = torch.empty(expert.rows, expert.columns)
    scratch = torch.empty(max(1 << 19, BLOCK * expert.columns))
    for begin, end in expert.tiles():
        whole[begin:end] = expert.tile(begin, end, scratch)
    return whole


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is not a mapped file, shared memory aside."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def ask(layer: Layer, supervisor: Supervisor) -> tuple[float, list[float]]:
    """Error of the rows of a step, relative to the dequantised layer, and the seconds of two."""
    with Client(supervisor.control_address, min_tokens_per_worker=1) as client:
        x, weights = torch.randn(RANKS, layer.hidden).bfloat16(), torch.rand(RANKS, TOPK)
        ids = torch.rand(RANKS, EXPERTS).argsort(-1)[:, :TOPK]
        took = []
        for _ in range(2):
            asked = time.monotonic()
            z = client.forward(0, x, ids, weights, timeout_s=ANSWER_S)
            took.append(time.monotonic() - asked)
    right = expected(layer, x, ids, weights)
    return float((z.float() - right).norm() / right.norm()), took


def serving(layer: Layer, folder: Path, ranks: int, **options: str) -> Supervisor:
    """A group that is about to serve the layer."""
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=ranks, lease_s=6.0)
    workers = [
        WorkerConfig(model=str(layer.path), local_rank=rank, max_tokens_per_step=32, step_timeout_s=STEP_S, **options)
        for rank in range(ranks)
    ]
    return Supervisor(control, workers, folder / "logs")


def test_four_ranks_serve_it(layer: Layer, told: dict[str, int], tmp_path: Path) -> None:
    began = time.monotonic()
    with forked_children(), serving(layer, tmp_path, RANKS) as supervisor:
        supervisor.wait_serving(FORM_S)
        formed = time.monotonic()
        error, took = ask(layer, supervisor)
        held = [anonymous_bytes(pid) for pid in supervisor.worker_pids()]
    mib = ", ".join(f"{size >> 20:,}" for size in held)
    print(
        f"\n{EXPERTS} experts of {layer.hidden} x {layer.inner}: {layer.expert_bytes:,} bytes in files, "
        f"{told['model_bytes']:,} told, {told['rank_bytes'] >> 20:,} MiB a rank; workers hold {mib} MiB; "
        f"serving after {formed - began:.1f} s, {RANKS} tokens in {took[0]:.2f} and {took[1]:.2f} s, error {error:.5f}"
    )
    assert error < 0.01
    base = 1 << 30
    assert max(held) < 1.05 * told["rank_bytes"] + base, "floats of the weights are held, or a second copy"


@pytest.mark.gpu(1)
def test_one_gpu_serves_it(layer: Layer, tmp_path: Path) -> None:
    """By grouped products, which quantise rows too: a wider limit, and no line in the log that says otherwise."""
    with serving(layer, tmp_path, 1, transport="nvlink") as supervisor:
        supervisor.wait_serving(FORM_S)
        error, took = ask(layer, supervisor)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    print(f"\none GPU: {RANKS} tokens in {took[0]:.3f} and {took[1]:.3f} s, error {error:.5f}")
    assert 0.01 < error < 0.08
    assert "one after the other" not in logs
