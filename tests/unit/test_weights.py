"""Quantised experts: held in the checkpoint's bytes, and computed within the quantisation's own error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.checkpoints.weights import MXFP4, Format, Stack, from_codes
from crossdock.worker.experts import expert_mlps as experts_module
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from tests.unit.moe_files import Sizes, config_of, draw_weights, tensors_of, write_files, write_gpt_oss, write_tensors

SIZES = Sizes(num_experts=3, hidden=192, inner=136, layers=2)
COUNTS = [5, 0, 2]


def _forward(experts: ExpertMLPs, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    offsets = torch.tensor([0, *COUNTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return experts.forward(layer, tokens, offsets, counts, out=torch.full(tokens.shape, torch.nan))


def _assert_computes_what_is_stored(path: Path, *, of_file: float = 1.0) -> Checkpoint:
    """The same rows as from weights that were made floats at the start; in the bytes of the file."""
    checkpoint = Checkpoint.open(path)
    spec = checkpoint.spec
    tokens = torch.randn(sum(COUNTS), spec.hidden_size)
    own = range(spec.num_experts)
    held = ExpertMLPs.load(checkpoint, own, dtype=torch.float32)
    wide = ExpertMLPs.load(checkpoint, own, dtype=torch.float32, widen=True)
    assert held.num_bytes == pytest.approx(of_file * (path / "model.safetensors").stat().st_size, rel=0.05)
    for layer in spec.moe_layers:
        torch.testing.assert_close(_forward(held, layer, tokens), _forward(wide, layer, tokens), rtol=1e-4, atol=1e-4)
    moved = held.stage(checkpoint, spec.moe_layers[0], [1, 2, 0])
    other = ExpertMLPs.load(checkpoint, [1, 2, 0], dtype=torch.float32)
    for stack, wanted in zip(moved, other.held(spec.moe_layers[0]).weights, strict=True):
        assert all(map(torch.equal, stack.tensors, wanted.tensors))
    return checkpoint


def _fp8(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Per channel [B, 1], or per tensor []."""
    out = {}
    for name, tensor in tensors.items():
        scale = tensor.abs().amax(-1, keepdim=True) / 448 if kind == "channel" else tensor.abs().max() / 448
        out |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return out


@pytest.mark.parametrize("layout", ["named", "fused"])
@pytest.mark.parametrize("sizes", [SIZES, Sizes(num_experts=3, hidden=256, inner=128, layers=1)])
def test_fp8_blocks(tmp_path: Path, layout: str, sizes: Sizes) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write_files(tmp_path, "deepseek_v3", sizes, draw_weights(sizes), layout=layout, config=config, fp8=True)
    checkpoint = _assert_computes_what_is_stored(tmp_path)
    assert {str(each) for each in checkpoint.spec.formats} == {"fp8, a scale per block of 128 x 128"}


@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_fp8_of_compressed_tensors(tmp_path: Path, kind: str) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": kind}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES) | {"quantization_config": config}))
    write_tensors(tmp_path, _fp8(tensors_of("qwen3_moe", SIZES, draw_weights(SIZES)), kind))
    checkpoint = _assert_computes_what_is_stored(tmp_path)
    assert {str(each) for each in checkpoint.spec.formats} == {f"fp8, a scale per {kind}"}


def test_mxfp4(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, 256, 160)
    spec = _assert_computes_what_is_stored(tmp_path).spec
    assert (str(spec.formats[0]), spec.bias, spec.gating.rule, spec.dtype) == ("mxfp4", True, "scaled", torch.bfloat16)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Layer by layer against the experts of gpt-oss with its dequantised weights, in bfloat16's exact values."""
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    tensors = write_gpt_oss(tmp_path)
    experts = ExpertMLPs.load(Checkpoint.open(tmp_path), range(3), dtype=torch.float32)
    config = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    for layer in range(2):
        module = GptOssExperts(config).float()
        at = f"model.layers.{layer}.mlp.experts."
        for name in ("gate_up_proj", "down_proj"):
            packed = tensors[f"{at}{name}_blocks"], tensors[f"{at}{name}_scales"]
            getattr(module, name).data = convert_moe_packed_tensors(*packed, dtype=torch.float32)
            getattr(module, f"{name}_bias").data = tensors[f"{at}{name}_bias"].float()
        x, ids = torch.randn(7, 64), torch.tensor([[0]] * 5 + [[2]] * 2)
        with torch.no_grad():
            expected = module(x, ids, torch.ones(7, 1))
        torch.testing.assert_close(_forward(experts, layer, x), expected, rtol=1e-4, atol=1e-3)


def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """DeepSeek's block scales against the definition, in float64: the error of a row is far below fp8's own."""
    sizes, weights = Sizes(2, 256, 128, 1), draw_weights(Sizes(2, 256, 128, 1))
    write_files(tmp_path, "deepseek_v3", sizes, weights, fp8=True)
    experts = ExpertMLPs.load(Checkpoint.open(tmp_path), range(2), dtype=torch.float32)
    tokens = torch.randn(4, 256)
    offsets, counts = torch.tensor([0, 0, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    got = experts.forward(0, tokens, offsets, counts).double()
    gate, up, down = (part.double() for part in weights[0, 1])
    x = tokens.double()
    expected = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 1e-3 < float(error) < 2**-4 * 2, "of e4m3, three bits of mantissa; a wrong scale is far off"


@pytest.mark.parametrize("native", [True, False], ids=["bf16 products", "fp32 products"])
def test_tiles_cover_every_row_once(monkeypatch: pytest.MonkeyPatch, native: bool, tmp_path: Path) -> None:
    monkeypatch.setattr(experts_module, "has_products", lambda dtype: native)
    monkeypatch.setattr("crossdock.worker.checkpoints.weights._TILE_ELEMENTS", 1000)
    write_gpt_oss(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    held = ExpertMLPs.load(checkpoint, range(3), dtype=torch.bfloat16)
    wide = ExpertMLPs.load(checkpoint, range(3), dtype=torch.bfloat16, widen=True)
    first = held.held(0).weights[0]
    rows = [row for begin, end in first[0].tiles() for row in range(begin, end)]
    assert rows == list(range(first.rows))
    assert len(list(first[0].tiles())) > 3
    tokens = torch.randn(sum(COUNTS), 64).bfloat16()
    got, expected = _forward(held, 0, tokens), _forward(wide, 0, tokens)
    assert float((got - expected).norm() / expected.norm()) < 2**-8


def test_every_mxfp4_byte_and_scale() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    both = values + [-value for value in values]
    data = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(16, 1)
    for dtype in (torch.float32, torch.bfloat16):
        got = from_codes(MXFP4, data, scales.view(torch.float8_e8m0fnu), torch.empty(16, 32, dtype=dtype))
        for row in range(16):
            power = 2.0 ** (120 + row - 127)
            wanted = [both[byte >> shift & 15] * power for byte in data[row].tolist() for shift in (0, 4)]
            assert got[row].tolist() == wanted
    nan = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert from_codes(MXFP4, data[:1], nan, torch.empty(1, 32)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_e4m3_byte_beside_every_other(dtype: torch.dtype) -> None:
    both = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(256, 512)
    weight = both.view(torch.float8_e4m3fn)
    got = from_codes(Format("fp8"), weight, torch.ones(1, 1), torch.empty(256, 512, dtype=dtype))
    torch.testing.assert_close(got, weight.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert got.isnan().any()


@pytest.mark.parametrize("shape", [(256, 256), (300, 200), (7, 5), (128, 130)])
def test_fp8_scales_of_short_blocks(shape: tuple[int, int]) -> None:
    weight, block = torch.randn(shape).to(torch.float8_e4m3fn), (128, 128)
    scales = torch.rand(Format("fp8", block).grid(*shape)) + 0.5
    got = from_codes(Format("fp8", block), weight, scales, torch.empty(shape))
    rows, columns = torch.arange(shape[0]) // 128, torch.arange(shape[1]) // 128
    assert torch.equal(got, weight.float() * scales[rows][:, columns])


def test_sizes_are_known_without_memory() -> None:
    for format, element in ((Format(), 2.0), (Format("fp8", (128, 128)), 1 + 4 / 128**2), (MXFP4, 17 / 32)):
        stack = Stack.empty(format, (256, 4096, 7168), torch.bfloat16, "meta", parts=2)
        assert stack.num_bytes == 256 * 4096 * 7168 * element


def test_one_expert_in_another_format_is_found(tmp_path: Path) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES))
    tensors = tensors_of("qwen3_moe", SIZES, draw_weights(SIZES))
    odd = "model.layers.1.mlp.experts.2.up_proj.weight"
    write_tensors(tmp_path, tensors | {odd: tensors[odd].to(torch.float8_e4m3fn)})
    with pytest.raises(
        CheckpointError, match=f"{odd}: expected float as in the layer's other experts, got torch.float8_e4m3fn"
    ):
        Checkpoint.open(tmp_path)
