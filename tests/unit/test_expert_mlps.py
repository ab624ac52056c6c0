"""The expert MLPs: grouped rows in, the dense definition's rows out; only the experts asked for are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.checkpoints.gating import ACTIVATIONS
from crossdock.worker.experts import expert_mlps as experts_module
from crossdock.worker.experts.expert_mlps import ExpertMLPs, has_grouped_mm
from tests.unit.moe_files import Sizes, draw_weights, write_files

SIZES = Sizes(num_experts=8, hidden=64, inner=32, layers=2)
COUNTS = [5, 0, 1, 0, 17, 3, 0, 2]


def _groups(counts: list[int], alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    padded = [-(-count // alignment) * alignment for count in counts]
    offsets = torch.tensor([0, *padded], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return offsets, torch.tensor(counts, dtype=torch.int32)


def _dense(tokens: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    x = tokens.double()
    hidden = torch.nn.functional.silu(x @ gate.double().t()) * (x @ up.double().t())
    return hidden @ down.double().t()


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 products."""
    monkeypatch.setattr(experts_module, "has_products", lambda dtype: dtype is torch.float32)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("loop", [False, True], ids=["grouped_mm", "loop"])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_is_the_dense_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, alignment: int, loop: bool
) -> None:
    if loop:
        monkeypatch.setattr(experts_module, "has_grouped_mm", lambda device, dtype: False)
    weights = draw_weights(SIZES)
    checkpoint = Checkpoint.open(write_files(tmp_path, "qwen3_moe", SIZES, weights))
    own = list(range(8))
    experts = ExpertMLPs.load(checkpoint, own, dtype=dtype)
    offsets, counts = _groups(COUNTS, alignment)
    tokens = torch.full((int(offsets[-1]) + 3, SIZES.hidden), float("nan"), dtype=dtype)
    for slot in own:
        start, count = int(offsets[slot]), COUNTS[slot]
        tokens[start : start + count] = torch.randn(count, SIZES.hidden).to(dtype)
    rows = torch.empty(tokens.shape, dtype=experts.output_dtype)
    for layer in checkpoint.spec.moe_layers:
        rounded = experts.forward(layer, tokens, offsets, counts)
        assert experts.forward(layer, tokens, offsets, counts, out=rows) is rows
        assert rounded.dtype is dtype
        for slot in own:
            group = slice(int(offsets[slot]), int(offsets[slot]) + COUNTS[slot])
            expected = _dense(tokens[group], *(part.to(dtype) for part in weights[layer, slot]))
            torch.testing.assert_close(rows[group].double(), expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(rounded[group], rows[group].to(dtype))


@pytest.mark.parametrize("inner", [1, 5, 34])
def test_odd_intermediate_sizes(tmp_path: Path, inner: int) -> None:
    sizes = Sizes(num_experts=3, hidden=16, inner=inner, layers=1)
    weights = draw_weights(sizes)
    experts = ExpertMLPs.load(
        Checkpoint.open(write_files(tmp_path, "mixtral", sizes, weights)), [0, 1, 2], dtype=torch.float32
    )
    offsets, counts = _groups([2, 0, 3], 1)
    tokens = torch.randn(5, 16)
    rows = experts.forward(0, tokens, offsets, counts).double()
    torch.testing.assert_close(rows[:2], _dense(tokens[:2], *weights[0, 0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[2:], _dense(tokens[2:], *weights[0, 2]), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("widening")
def test_half_types_are_computed_in_fp32_inside(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, draw_weights(SIZES)))
    assert ExpertMLPs.load(checkpoint, [0], dtype=torch.bfloat16).output_dtype is torch.float32


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_bf16_products_are_rounded_as_the_definition_rounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Each product once, the activation once; nothing else, and with sums in fp32."""
    monkeypatch.setattr(experts_module, "has_products", lambda dtype: True)
    weights = draw_weights(SIZES)
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, weights))
    experts = ExpertMLPs.load(checkpoint, [0], dtype=torch.bfloat16)
    assert experts.output_dtype is torch.bfloat16
    offsets, counts = _groups([rows], 1)
    tokens = torch.randn(rows, SIZES.hidden).bfloat16()
    got = experts.forward(0, tokens, offsets, counts, out=torch.empty(rows, SIZES.hidden)).double()
    gate, up, down = (part.bfloat16().double() for part in weights[0, 0])
    inner = torch.nn.functional.silu((tokens.double() @ gate.t()).bfloat16().double())
    hidden = (inner * (tokens.double() @ up.t()).bfloat16().double()).bfloat16().double()
    expected = hidden @ down.t()
    torch.testing.assert_close(got, expected.bfloat16().double(), rtol=2**-7, atol=2**-8)
    once = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(once) < 2**-8, "of a product rounded once; fp32 sums add nothing that counts"


def test_weights_held_wider_are_not_rounded(tmp_path: Path) -> None:
    weights = draw_weights(SIZES)
    experts = ExpertMLPs.load(
        Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, weights)), [3], dtype=torch.float32
    )
    assert (experts.output_dtype, experts.num_bytes) == (torch.float32, 2 * 3 * SIZES.hidden * SIZES.inner * 4)
    offsets, counts = _groups([9], 1)
    tokens = torch.randn(9, SIZES.hidden).bfloat16()
    rows = experts.forward(1, tokens, offsets, counts, out=torch.empty(9, SIZES.hidden))
    torch.testing.assert_close(rows.double(), _dense(tokens, *weights[1, 3]), rtol=1e-5, atol=1e-5)
    assert torch.equal(experts.forward(1, tokens, offsets, counts), rows.bfloat16())


def test_rows_past_num_rows_are_left_alone(tmp_path: Path) -> None:
    weights = draw_weights(SIZES)
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, weights))
    experts = ExpertMLPs.load(checkpoint, [0, 1], dtype=torch.float32)
    offsets, counts = _groups([2, 3], 1)
    tokens = torch.cat([torch.randn(5, SIZES.hidden), torch.full((4, SIZES.hidden), float("nan"))])
    out = torch.full(tokens.shape, 7.0)
    experts.forward(0, tokens, offsets, counts, out=out, num_rows=6)
    torch.testing.assert_close(out[:2].double(), _dense(tokens[:2], *weights[0, 0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[2:5].double(), _dense(tokens[2:5], *weights[0, 1]), rtol=1e-5, atol=1e-5)
    assert (out[6:] == 7.0).all()
    assert experts.forward(0, tokens, offsets, counts, num_rows=6)[:5].isfinite().all()


def test_no_rows_at_all(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, draw_weights(SIZES)))
    for dtype in (torch.float32, torch.bfloat16):
        experts = ExpertMLPs.load(checkpoint, [1, 2], dtype=dtype)
        offsets, counts = _groups([0, 0], 1)
        assert experts.forward(0, torch.empty(0, SIZES.hidden, dtype=dtype), offsets, counts).shape == (0, SIZES.hidden)


@pytest.mark.parametrize("layout", ["named", "fused"])
def test_only_own_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    weights = draw_weights(SIZES)
    checkpoint = Checkpoint.open(write_files(tmp_path, "deepseek_v3", SIZES, weights, layout=layout))
    reads: set[int] = set()
    shards = checkpoint._shards
    original = shards.read

    def record(name: str, index: int | None = None) -> torch.Tensor:
        named = re.search(r"experts\.(\d+)\.", name)
        reads.add(int(named.group(1)) if named else -1 if index is None else index)
        return original(name, index)

    monkeypatch.setattr(shards, "read", record)
    seen: list[tuple[int, int]] = []
    experts = ExpertMLPs.load(
        checkpoint, [6, 2], dtype=torch.float32, progress=lambda done, total: seen.append((done, total))
    )
    assert reads == {2, 6}
    one = 3 * SIZES.hidden * SIZES.inner * 4
    assert experts.num_bytes == 4 * one
    assert seen == [(one * n, 4 * one) for n in range(1, 5)]
    offsets, counts = _groups([3, 3], 1)
    tokens = torch.randn(6, SIZES.hidden)
    rows = experts.forward(1, tokens, offsets, counts)
    torch.testing.assert_close(rows[:3].double(), _dense(tokens[:3], *weights[1, 6]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[3:].double(), _dense(tokens[3:], *weights[1, 2]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["named", "fused"])
def test_other_experts_pages_stay_on_disk(tmp_path: Path, layout: str) -> None:
    sizes = Sizes(num_experts=32, hidden=512, inner=256, layers=1)  # 1.5 MiB each; pages are mapped up to 2 MiB at once
    checkpoint = Checkpoint.open(write_files(tmp_path, "qwen3_moe", sizes, draw_weights(sizes), layout=layout))
    file = tmp_path / "model.safetensors"
    ExpertMLPs.load(checkpoint, [3], dtype=torch.float32)
    assert _resident_bytes(file) < file.stat().st_size / 4


def _resident_bytes(file: Path) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_progress_may_end_the_loading(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, draw_weights(SIZES)))

    def stop(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ExpertMLPs.load(checkpoint, [0], dtype=torch.float32, progress=stop)


@pytest.mark.parametrize("expert_ids", [[], [8], [-1], [0, 99]])
def test_expert_ids_out_of_range(tmp_path: Path, expert_ids: list[int]) -> None:
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, draw_weights(SIZES)))
    with pytest.raises(ValueError, match=r"expert_ids: expected some in 0\.\.7, got"):
        ExpertMLPs.load(checkpoint, expert_ids, dtype=torch.float32)


def test_unknown_layer_and_activation(tmp_path: Path) -> None:
    weights = draw_weights(SIZES)
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", SIZES, weights))
    experts = ExpertMLPs.load(checkpoint, [0], dtype=torch.float32)
    offsets, counts = _groups([1], 1)
    with pytest.raises(ValueError, match=r"layer: expected one of \[0, 1\], got 7"):
        experts.forward(7, torch.randn(1, SIZES.hidden), offsets, counts)
    odd = write_files(tmp_path, "mixtral", SIZES, weights, config={"hidden_act": "xielu"})
    with pytest.raises(CheckpointError, match=r"hidden_act: expected one of .* got 'xielu'"):
        Checkpoint.open(odd)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_of_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(1000) * 4
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x))


def test_probe_answers_for_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert has_grouped_mm(torch.device("cpu"), dtype) in (True, False)
    assert not has_grouped_mm(torch.device("cpu"), torch.bfloat16)
