"""A worker's parts on one GPU: experts that never make the host wait, and steps whose own part fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.experts import expert_mlps as experts_module
from crossdock.worker.experts.expert_mlps import ExpertMLPs, has_grouped_mm
from crossdock.worker.steps.device_stream import GpuStream
from crossdock.worker.steps.stepper import Stepper
from crossdock.worker.steps.work import Slice, Work
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig, Overflow, StoreGroup
from tests.unit.moe_files import Sizes, draw_weights, write_files, write_gpt_oss

pytestmark = pytest.mark.gpu(1)

SIZES = Sizes(num_experts=8, hidden=64, inner=32, layers=1)
COUNTS = [5, 0, 1, 0, 17, 3, 0, 2]
N, M, K = 64, 16, 2


def bf16_mlp(tokens: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As a GPU rounds: both products and what lies between to bf16, sums in fp32."""
    x = tokens.cpu().float()
    gate, up, down = (part.bfloat16().float() for part in (gate, up, down))
    inner = [(x @ part.t()).bfloat16().float() for part in (gate, up)]
    hidden = (torch.nn.functional.silu(inner[0]) * inner[1]).bfloat16().float()
    return hidden @ down.t()


@pytest.mark.parametrize("loop", [False, True], ids=["grouped_mm", "loop"])
@pytest.mark.parametrize("home", [None, torch.float32], ids=["new", "given"])
def test_experts_of_worst_case_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: bool, home: torch.dtype | None
) -> None:
    if loop:
        monkeypatch.setattr(experts_module, "has_grouped_mm", lambda device, dtype: False)
    else:
        assert has_grouped_mm(torch.device("cuda"), torch.bfloat16)
    weights = draw_weights(SIZES)
    checkpoint = Checkpoint.open(write_files(tmp_path, "qwen3_moe", SIZES, weights))
    experts = ExpertMLPs.load(checkpoint, range(8), dtype=torch.bfloat16, device="cuda")
    assert experts.output_dtype is torch.bfloat16
    counts = torch.tensor(COUNTS, dtype=torch.int32, device="cuda")
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = torch.full((N, SIZES.hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
    tokens[: sum(COUNTS)] = torch.randn(sum(COUNTS), SIZES.hidden, device="cuda").bfloat16()
    out = None if home is None else torch.full((N, SIZES.hidden), torch.nan, dtype=home, device="cuda")
    torch.cuda.set_sync_debug_mode("default" if loop else "error")
    try:
        rows = experts.forward(0, tokens, offsets, counts, out=out, num_rows=40)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (rows.dtype, rows.shape) == (home or torch.bfloat16, (N, SIZES.hidden))
    assert out is None or rows is out
    first = 0
    for slot, count in enumerate(COUNTS):
        group = slice(first, first := first + count)
        expected = bf16_mlp(tokens[group], *weights[0, slot])
        torch.testing.assert_close(rows[group].cpu().float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("widen", [True, False], ids=["grouped_mm and biases", "MXFP4"])
def test_gpt_oss(tmp_path: Path, widen: bool) -> None:
    """As on a CPU, within bfloat16's rounding; held in the checkpoint's bytes unless they are widened."""
    write_gpt_oss(tmp_path, 256, 160)
    _assert_as_on_a_cpu(tmp_path, "grouped GEMM" if widen else "grouped products", 0.02)


@pytest.mark.parametrize(("inner", "computes", "limit"), [(144, "grouped products", 0.08), (136, "loop", 0.02)])
def test_fp8_blocks(tmp_path: Path, inner: int, computes: str, limit: float) -> None:
    """The grouped products quantise rows too: a wider limit."""
    sizes = Sizes(num_experts=3, hidden=256, inner=inner, layers=1)
    write_files(tmp_path, "deepseek_v3", sizes, draw_weights(sizes), fp8=True)
    _assert_as_on_a_cpu(tmp_path, computes, limit)


def _assert_as_on_a_cpu(path: Path, computes: str, limit: float) -> None:
    checkpoint, widen = Checkpoint.open(path), computes == "grouped GEMM"
    on_gpu = ExpertMLPs.load(checkpoint, range(3), dtype=torch.bfloat16, widen=widen, device="cuda")
    ways = {"grouped products": on_gpu._products is not None, "grouped GEMM": on_gpu._grouped}
    assert next((way for way, taken in ways.items() if taken), "loop") == computes
    exact = ExpertMLPs.load(checkpoint, range(3), dtype=torch.float32, widen=widen)
    counts = torch.tensor([5, 0, 9], dtype=torch.int32)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = torch.randn(20, checkpoint.spec.hidden_size).bfloat16()
    expected = exact.forward(0, tokens.float(), offsets, counts)[:14]
    sent = tokens.cuda(), offsets.cuda(), counts.cuda()
    torch.cuda.set_sync_debug_mode("default" if computes == "loop" else "error")
    try:
        rows = on_gpu.forward(0, *sent, num_rows=16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    error = (rows[:14].float().cpu() - expected).norm() / expected.norm()
    assert float(error) < limit
    if not widen:
        assert (
            on_gpu.num_bytes < 0.6 * ExpertMLPs.load(checkpoint, range(3), dtype=torch.bfloat16, widen=True).num_bytes
        )


class Doubles:
    """Experts that double their rows: in a tensor of their own where that is what combine takes, else in the given."""

    def __init__(self, output_dtype: torch.dtype) -> None:
        self.output_dtype = output_dtype

    def forward(
        self, layer: int, tokens: torch.Tensor, *args: Any, out: torch.Tensor | None, num_rows: int
    ) -> torch.Tensor:
        assert num_rows <= tokens.shape[0]
        assert (out is None) == (self.output_dtype is torch.float32)
        rows = 2 * tokens.float()
        return rows if out is None else out.copy_(rows)


class Fails(Doubles):
    """Experts that raise, leaving NaN behind."""

    def forward(self, layer: int, tokens: torch.Tensor, *args: Any, out: torch.Tensor | None, num_rows: int) -> Any:
        if out is not None:
            out.fill_(torch.nan)
        raise RuntimeError("no such luck")


@pytest.fixture
def comm() -> Iterator[MoECommunicator]:
    group = StoreGroup(dist.HashStore(), 0, 1)
    config = MoEConfig(
        group=group, num_experts=4, hidden_size=64, topk=K, max_tokens_per_rank=M, mode=Mode.AUTO,
        layout=Layout.GROUPED, output_dtype=torch.float32, exact_shapes=False, overflow=Overflow.DROP,
        transport="nvlink",
    )  # fmt: skip
    with MoECommunicator(config) as made:
        yield made


def pieces(num_tokens: int) -> list[Slice]:
    work = Work(
        client=0,
        layer=0,
        x=torch.randn(num_tokens, 64).bfloat16(),
        topk_ids=torch.stack([torch.randperm(4)[:K] for _ in range(num_tokens)]).int(),
        topk_weights=torch.rand(num_tokens, K),
        deadline_ns=1 << 62,
        arrived_ns=0,
        reply=lambda answer: None,
    )
    return [Slice(work, 0, num_tokens // 2), Slice(work, num_tokens // 2, num_tokens)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_come_home_and_a_failed_one_is_zeros(comm: MoECommunicator, dtype: torch.dtype) -> None:
    stream = GpuStream(torch.device("cuda", torch.cuda.current_device()))
    kept = []
    for number in range(1, M):
        slices = pieces(number)
        queued = Mock()
        stepper = Stepper(comm, Doubles(dtype), stream, queued=queued)  # type: ignore[arg-type]
        batch = stepper.step(0, M, slices)
        queued.assert_called_once_with()
        work = slices[0].work
        expected = 2 * work.x.float() * work.topk_weights.sum(1, keepdim=True)
        kept.append((batch.z, expected))
        assert batch.error == ""
        record = stepper.record_of(batch)
        expected_rows = work.topk_ids.flatten().bincount(minlength=4).int()
        assert record.rows_per_expert == expected_rows.numpy().tobytes()
        assert record.remote_rows(record.topk_ids) == 0
        assert min(record.dispatch_ns, record.experts_ns, record.combine_ns) > 0
    for z, expected in kept:  # pinned memory that is still held is not used again
        assert z.device.type == "cpu"
        torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    failed = Stepper(comm, Fails(dtype), stream).step(3, M, pieces(9))  # type: ignore[arg-type]
    assert failed.error == "layer 3: experts: RuntimeError: no such luck"
    assert not failed.z.any()
    assert Stepper(comm, Doubles(dtype), stream).step(0, 1, []).z.shape == (0, 64)  # type: ignore[arg-type]


def test_a_lane_copies_what_several_requests_bring() -> None:
    stream = GpuStream(torch.device("cuda", 0))
    parts = [[torch.randn(3, 8), torch.randn(5, 8)], [torch.arange(6).view(2, 3)], [torch.empty(0, 4)]]
    with stream.running():
        there = stream.copy_in(parts)
        stream.mark()
        stream.mark()
        stream.copy_out(there[0] + 1, torch.tensor([8, 0], dtype=torch.int32, device="cuda"))
        result = stream.wait()
    assert [part.device.type for part in there] == ["cuda"] * 3
    assert torch.equal(result.z, torch.cat(parts[0]) + 1)
    assert result.rows_per_expert.tolist() == [8, 0]
    assert there[2].shape == (0, 4)
