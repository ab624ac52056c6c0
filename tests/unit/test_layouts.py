"""Layouts of published checkpoints, layer by layer: each against weights that are dequantised here, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.checkpoints.model_config import sparse_layers
from crossdock.worker.experts import memory_need
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.experts.placement import WeightsOf
from tests.unit.moe_files import Sizes, config_of, draw_weights, tensors_of, write_tensors

SIZES = Sizes(num_experts=3, hidden=192, inner=96, layers=3)
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
Quantiser = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A matrix, or several -> what is stored, by what follows its name; and the weights that are meant, in float64."""


def scaled(height: int, width: int, suffix: str, shape: tuple[int, ...] | None = None) -> Quantiser:
    """fp8 with a scale for so many rows and columns, 0: all; `shape` of the stored scales of one matrix."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape[-2:]
        row, column = torch.arange(rows) // (height or rows), torch.arange(columns) // (width or columns)
        grid = torch.rand(*weight.shape[:-2], int(row[-1]) + 1, int(column[-1]) + 1) * 0.01 + 0.001
        each = grid[..., row, :][..., column]
        small = (weight / each).to(FP8)
        stored = grid if shape is None else grid.reshape((*weight.shape[:-2], *shape))
        return {"": small, suffix: stored}, small.double() * each.double()

    return quantise


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 along the last dimension: from its low end on, each word has the codes in this order."""
    count = 32 // bits
    each = codes.long().unflatten(-1, (-1, count))
    word = sum(each[..., order[at]] << bits * at for at in range(count))
    return (torch.as_tensor(word) + 2**31).remainder(2**32).sub(2**31).int().contiguous()


def integers(packing: str, bits: int, group: int, scale: torch.dtype, *, zeros: bool = True, v1: int = 1) -> Quantiser:
    """Codes of 4 or 8 bits, `group` columns to a scale (0: all), as compressed-tensors, AWQ or GPTQ packs them."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if weight.ndim == 3:
            pairs = [quantise(each) for each in weight]
            return {end: torch.stack([own[end] for own, _ in pairs]) for end in pairs[0][0]}, torch.stack(
                [meant for _, meant in pairs]
            )
        rows, columns = weight.shape
        width, half = group or columns, 1 << bits - 1
        grid = (torch.rand(rows, columns // width) * 0.02 + 0.01).to(scale)
        zero = torch.randint(0, 2 * half, grid.shape) if zeros else torch.full(grid.shape, half)
        each, middle = (x.repeat_interleave(width, 1) for x in (grid.double(), zero))
        codes = (weight / each + middle).round().clamp(0, 2 * half - 1).long()
        meant = (codes - middle) * each
        if packing == "compressed":
            stored = {"_packed": words(codes, bits), "_scale": grid, "_shape": torch.tensor(weight.shape)}
            return stored | ({"_zero_point": words(zero.t(), bits).t().contiguous()} if zeros else {}), meant
        if packing == "awq":
            stored = {"qweight": words(codes.t(), bits, AWQ_ORDER), "qzeros": words(zero.t(), bits, AWQ_ORDER)}
        else:
            less = (zero - v1) % (2 * half)
            stored = {"qweight": words(codes, bits).t().contiguous(), "qzeros": words(less.t(), bits)}
            stored["g_idx"] = (torch.arange(columns) // width).int()
        return stored | {"scales": grid.t().contiguous()}, meant

    return quantise


def floats(names: tuple[str, str, str], element: str, width: int, number: float = 1.0) -> Quantiser:
    """e4m3 or e2m1 with a scale per `width` columns: a power of two, or e4m3 times one number of all, which is stored
    under the last name; compressed-tensors stores its inverse."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grid = torch.randint(120, 127, (*weight.shape[:-1], weight.shape[-1] // width), dtype=torch.uint8)
        scale, stored_scale, whole = torch.exp2(grid.double() - 127), grid, {}
        if names[2]:
            stored_scale = (torch.rand(grid.shape) + 0.5).to(FP8)
            scale = stored_scale.double() * number
            said = 1 / number if names[2] == "_global_scale" else number
            whole = {names[2]: torch.full((*weight.shape[:-2], *((1,) if "global" in names[2] else ())), said)}
        each = scale.repeat_interleave(width, -1)
        if element == "e4m3":
            codes = (weight / each).clamp(-448, 448).to(FP8)
            return {names[0]: codes, names[1]: stored_scale, **whole}, codes.double() * each
        nearest = ((weight / each)[..., None] - E2M1).abs().argmin(-1)
        data = (nearest[..., ::2] | nearest[..., 1::2] << 4).to(torch.int8 if names[1] == "scale" else torch.uint8)
        if names[1] == "scale":
            stored_scale = stored_scale.view(torch.float8_e8m0fnu)
        return {names[0]: data, names[1]: stored_scale, **whole}, E2M1[nearest] * each

    return quantise


def plain(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """bfloat16."""
    return {"": weight.bfloat16()}, weight.bfloat16().double()


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with such weights in its groups."""
    targets = (["re:.*experts.*"], ["re:.*self_attn.*"])
    named = {
        f"group_{n}": {"targets": target, "weights": group}
        for n, (group, target) in enumerate(zip(groups, targets, strict=False))
    }
    return {"quant_method": "compressed-tensors", "config_groups": named, **more}


def float8(strategy: str, block: list[int] | None = None) -> dict[str, Any]:
    return {"type": "float", "num_bits": 8, "strategy": strategy, "block_structure": block}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group"}
PER_TENSOR = scaled(0, 0, "_scale", ())
F16, BF16, ZEROS = torch.float16, torch.bfloat16, "int4, a scale per 32 columns, with zeros"
ONE, BLOCK = "fp8, a scale per tensor", "fp8, a scale per block of 128 x 128"
LAYOUTS: dict[str, tuple[dict[str, Any] | None, tuple[Quantiser, ...], set[str]]] = {
    "AutoFP8, static": ({"quant_method": "fp8", "activation_scheme": "static"}, (PER_TENSOR,), {ONE}),
    "AutoFP8, one-element scales": (
        {"quant_method": "fp8", "activation_scheme": "static"}, (scaled(0, 0, "_scale", (1,)),), {ONE},
    ),
    "fp8 per tensor, _scale_inv": (
        {"quant_method": "fp8", "weight_block_size": None}, (scaled(0, 0, "_scale_inv", ()),), {ONE},
    ),
    "fp8 without a block size": ({"quant_method": "fp8"}, (scaled(128, 128, "_scale_inv"),), {BLOCK}),
    "fp8 blocks named weight_scale": (BLOCKS, (scaled(128, 128, "_scale"),), {BLOCK}),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, (PER_TENSOR,), {ONE}),
    "ModelOpt, hf_quant_config.json alone": (None, (PER_TENSOR,), {ONE}),
    "bf16 last layer": (BLOCKS, (*[scaled(128, 128, "_scale_inv")] * 2, plain), {BLOCK, "float"}),
    "bf16 first layer": (
        {**BLOCKS, "modules_to_not_convert": ["model.layers.0"]},
        (plain, *[scaled(128, 128, "_scale_inv")] * 2), {BLOCK, "float"},
    ),
    "bf16 ignored": (
        compressed(float8("channel"), ignore=["re:.*layers.1.*"]),
        (scaled(1, 0, "_scale"), plain, scaled(1, 0, "_scale")), {"fp8, a scale per channel", "float"},
    ),
    "two groups": (
        compressed(float8("block", [128, 128]), float8("channel")), (scaled(128, 128, "_scale"),), {BLOCK},
    ),
    "two groups, of one layer each": (
        compressed(float8("block", [64, 64]), float8("channel")),
        (scaled(1, 0, "_scale"), scaled(64, 64, "_scale"), plain),
        {"fp8, a scale per channel", "fp8, a scale per block of 64 x 64", "float"},
    ),
    "int8 attention": (
        compressed(float8("tensor"), {"type": "int", "num_bits": 8, "strategy": "channel"}), (PER_TENSOR,), {ONE},
    ),
    "int4 attention": (compressed(INT4), (plain,), {"float"}),
    "AWQ attention": ({"quant_method": "awq", "bits": 4}, (plain,), {"float"}),
    "torchao": ({"quant_method": "torchao"}, (plain,), {"float"}),
    "pack-quantized": (
        compressed(INT4), (integers("compressed", 4, 32, BF16, zeros=False),), {"int4, a scale per 32 columns"},
    ),
    "pack-quantized, asymmetric": (
        compressed(INT4), (integers("compressed", 4, 32, BF16),), {"int4, a scale per 32 columns, with zeros"},
    ),
    "pack-quantized, channel, 8 bits": (
        compressed(INT4), (integers("compressed", 8, 0, torch.float32, zeros=False),), {"int8, a scale per channel"},
    ),
    "AWQ": ({"quant_method": "awq", "version": "GEMM"}, (integers("awq", 4, 32, F16),), {ZEROS}),
    "AWQ, last layer float": (
        {"quant_method": "awq"}, (*[integers("awq", 4, 32, F16)] * 2, plain), {ZEROS, "float"},
    ),
    "GPTQ": ({"quant_method": "gptq"}, (integers("gptq", 4, 32, F16),), {ZEROS}),
    "GPTQ, second version": (
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, (integers("gptq", 4, 32, F16, v1=0),), {ZEROS},
    ),
    "GPTQ, channel, 8 bits": (
        {"quant_method": "gptq"}, (integers("gptq", 8, 0, F16),), {"int8, a scale per channel, with zeros"},
    ),
    "NVFP4 of compressed-tensors": (
        compressed(), (floats(("_packed", "_scale", "_global_scale"), "e2m1", 16, 0.01),), {"nvfp4"},
    ),
    "NVFP4 of ModelOpt": (
        {"quant_method": "modelopt"}, (floats(("", "_scale", "_scale_2"), "e2m1", 16, 0.01),), {"nvfp4"},
    ),
    "MXFP4 of compressed-tensors": (compressed(), (floats(("_packed", "_scale", ""), "e2m1", 32),), {"mxfp4"}),
    "MXFP4 of Quark": ({"quant_method": "quark"}, (floats(("", "_scale", ""), "e2m1", 32),), {"mxfp4"}),
    "MXFP4 of DeepSeek-V4": ({"quant_method": "fp8"}, (floats(("", "scale", ""), "e2m1", 32),), {"mxfp4"}),
    "MXFP8": (compressed(), (floats(("", "_scale", ""), "e4m3", 32),), {"mxfp8"}),
    "MXFP8 named weight_scale_inv": (
        {"quant_method": "mxfp8"}, (floats(("", "_scale_inv", ""), "e4m3", 32),), {"mxfp8"},
    ),
}  # fmt: skip
ONLY_NAMED = ("AWQ", "GPTQ", "DeepSeek-V4")
"""Packings that no checkpoint has with one tensor for all experts."""
CASES = [
    (name, layout)
    for layout in ("named", "fused")
    for name, (_, (first, *_), _) in LAYOUTS.items()
    if layout == "named" or first is plain or not any(each in name for each in ONLY_NAMED)
]


def write(folder: Path, config: dict[str, Any] | None, layers: tuple[Quantiser, ...], layout: str = "named") -> Tensors:
    """A checkpoint, the last quantiser for the layers that are left. Returns its weights in float64, by name."""
    said = {"dtype": "bfloat16"} | ({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES) | said))
    stored, meant = {}, {}
    for name, weight in tensors_of("qwen3_moe", SIZES, draw_weights(SIZES), layout).items():
        layer = int(name.split(".")[2])
        parts, meant[name] = layers[min(layer, len(layers) - 1)](weight)
        for suffix, tensor in parts.items():
            stored[(name if suffix[:1] in ("", "_", ".") else name.removesuffix("weight")) + suffix] = tensor
    write_tensors(folder, stored)
    return meant


def expected(meant: Tensors, layer: int, layout: str, rows: torch.Tensor, expert: int) -> torch.Tensor:
    at = f"model.layers.{layer}.mlp.experts."
    if layout == "fused":
        gate, up = meant[f"{at}gate_up_proj"][expert].chunk(2)
        down = meant[f"{at}down_proj"][expert]
    else:
        gate, up, down = (meant[f"{at}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = rows.double()
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layout(tmp_path: Path, name: str, layout: str) -> None:
    config, layers, formats = LAYOUTS[name]
    if name == "AutoFP8, one-element scales" and layout == "fused":
        layers = (scaled(0, 0, "_scale", (1, 1)),)
    meant = write(tmp_path, config, layers, layout)
    if "hf_quant_config" in name:
        (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    checkpoint = Checkpoint.open(tmp_path)
    assert {str(each) for each in checkpoint.spec.formats} == formats
    for widen in (False, True):
        experts = ExpertMLPs.load(checkpoint, range(3), dtype=torch.float32, widen=widen)
        if not widen and plain not in layers:
            assert experts.num_bytes < 1.05 * (tmp_path / "model.safetensors").stat().st_size
        for layer in range(SIZES.layers):
            rows, offsets = torch.randn(6, SIZES.hidden), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
            got = experts.forward(layer, rows, offsets, torch.full((3,), 2, dtype=torch.int32))
            for expert in range(3):
                own = slice(2 * expert, 2 * expert + 2)
                right = expected(meant, layer, layout, rows[own], expert)
                torch.testing.assert_close(got[own].double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_memory_of_layers_in_several_formats(tmp_path: Path) -> None:
    write(tmp_path, BLOCKS, (plain, scaled(128, 128, "_scale_inv")))
    found, one = memory_need.describe(tmp_path, 3), 3 * 192 * 96
    fp8 = one + 4 * (2 + 2 + 2)
    assert found["format"] == f"float; {BLOCK}"
    assert (found["expert_bytes"], found["moving_bytes"]) == (2 * one, 2 * one)
    assert found["rank_bytes"] == 2 * one + 2 * fp8
    held = ExpertMLPs.load(Checkpoint.open(tmp_path), [0], dtype=torch.bfloat16)
    assert held.num_bytes == found["rank_bytes"]


def test_a_layer_of_another_checkpoint_may_be_stacked(tmp_path: Path) -> None:
    """`crossdock load` of the same model in other names: gate and up have their scales in one tensor."""
    held: dict[str, tuple[Checkpoint, Tensors]] = {}
    for layout in ("named", "fused"):
        (tmp_path / layout).mkdir()
        meant = write(tmp_path / layout, BLOCKS, (scaled(128, 128, "_scale_inv"),), layout)
        held[layout] = Checkpoint.open(tmp_path / layout), meant
    experts = ExpertMLPs.load(held["named"][0], range(3), dtype=torch.float32)
    experts.replace(1, range(3), *experts.stage(held["fused"][0], 1, range(3), of=WeightsOf(1)), of=WeightsOf(1))
    rows, counts = torch.randn(4, SIZES.hidden), torch.tensor([0, 4, 0], dtype=torch.int32)
    for layer, layout in ((0, "named"), (1, "fused")):
        got = experts.forward(layer, rows, torch.tensor([0, 0, 4, 4], dtype=torch.int32), counts)
        right = expected(held[layout][1], layer, layout, rows, 1)
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_names_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    weights = draw_weights(SIZES)
    named, fused = (tensors_of("qwen3_moe", SIZES, weights, layout) for layout in ("named", "fused"))
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES)))
    write_tensors(tmp_path, {name: x for name, x in (named | fused).items() if (name in fused) == (".1." in name[:15])})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.spec.moe_layers == (0, 1, 2)
    for (layer, expert), (gate, up, down) in weights.items():
        first, second = (stack[0] for stack in checkpoint.stacks(layer, 1, torch.float32, "cpu"))
        checkpoint.read_expert(layer, expert, first, second)
        assert torch.equal(first.data, torch.cat([gate, up]))
        assert torch.equal(second.data, down)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("layout", ["named", "fused"])
def test_a_layer_without_experts_is_named(tmp_path: Path, layer: int, layout: str) -> None:
    """Its attention is there: a shard that the index left out, or names that nobody knows."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES)))
    tensors = tensors_of("qwen3_moe", SIZES, draw_weights(SIZES), layout)
    kept = {name: each for name, each in tensors.items() if not name.startswith(f"model.layers.{layer}.")}
    write_tensors(tmp_path, kept | {f"model.layers.{layer}.self_attn.q_proj.weight": torch.ones(2, 2)})
    for opened in (Checkpoint.open, lambda path: memory_need.describe(path, 1)):
        with pytest.raises(CheckpointError, match=rf"layer {layer} has no experts, and config\.json does not name it"):
            opened(tmp_path)


def test_a_layer_with_experts_that_the_config_names_as_dense(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES) | {"mlp_only_layers": [1]}))
    write_tensors(tmp_path, tensors_of("qwen3_moe", SIZES, draw_weights(SIZES)))
    with pytest.raises(CheckpointError, match=r"layer 1 has experts, and config\.json names it as dense"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 2}, (4,)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"num_dense_layers": 2}, (2, 3, 4, 5)),
        ({"dense_mlp_idx": 5}, (5,)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}, (1, 3)),
        ({"moe_layer_end_index": -1}, (0, 1, 2, 3, 4, 5)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 3}, (2, 5)),
        ({"moe_layers": [0, 5, 9], "interleave_moe_layer_step": 3}, (0, 5)),
        ({"hybrid_override_pattern": "ME*-EM"}, (1, 4)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp", "mamba"]}, (1, 3)),
        ({"layers_block_type": ["mamba", "attention"]}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_layer_types": ["dense", "sparse", "hash_moe", "moe", *"--"], "num_dense_layers": 5}, (1, 2, 3)),
    ],
)  # fmt: skip
def test_which_layers_have_experts(keys: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert sparse_layers(keys, 6) == layers


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace: expected an int of at least 0, got '1'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected an int of at least 1, got 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: expected a list of ints, got 3"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: expected one for each of 3 layers, got 1"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq: expected one for each of 3 layers, got 1"),
    ],
)
def test_keys_of_layers_that_say_nonsense(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES) | keys))
    write_tensors(tmp_path, tensors_of("qwen3_moe", SIZES, draw_weights(SIZES)))
    with pytest.raises(CheckpointError, match=rf"config\.json: {words}"):
        Checkpoint.open(tmp_path)


def _beside(*suffixes: str) -> Quantiser:
    """Bytes, and such tensors beside them."""

    def store(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {"": torch.zeros(weight.shape, dtype=torch.uint8)} | {end: torch.ones(1) for end in suffixes}, weight

    return store


def _instead(*suffixes: str) -> Quantiser:
    """Such tensors, and no matrix."""
    return lambda weight: ({end: torch.ones(1) for end in suffixes}, weight)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((_beside("_weight_scale_2"),), r"0\.gate_proj\.weight: NVFP4 of ModelOpt in one tensor .*, not computed here"),
        ((_beside(".absmax"),), "bitsandbytes, not computed here: serve"),
        ((plain, plain, _instead(".absmax")), "experts of layer 2 are bitsandbytes, not computed here: serve"),
        ((lambda weight: ({"": weight, "_scale": torch.ones(1)}, weight),), "expected float without scales, got"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_named(tmp_path: Path, layers: tuple[Quantiser, ...], words: str) -> None:
    write(tmp_path, None, layers)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def _changed(quantiser: Quantiser, end: str, how: Callable[[torch.Tensor], torch.Tensor] | None) -> Quantiser:
    """One of its tensors changed, or left out."""

    def store(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, meant = quantiser(weight)
        changed = {} if how is None else {end: how(tensors[end]).contiguous()}
        return {name: tensor for name, tensor in tensors.items() if name != end} | changed, meant

    return store


GPTQ, AWQ = {"quant_method": "gptq"}, {"quant_method": "awq"}
OF_GPTQ, OF_AWQ, NVFP4 = (
    integers("gptq", 4, 32, F16),
    integers("awq", 4, 32, F16),
    ("_packed", "_scale", "_global_scale"),
)


@pytest.mark.parametrize(
    ("config", "layer", "words"),
    [
        (GPTQ, _changed(OF_GPTQ, "g_idx", lambda x: x[torch.randperm(len(x))]),
         r"model\.safetensors: .*gate_proj\.g_idx: expected column \d+ in group \d, got \d: .*act-order \(desc_act\)"),
        (GPTQ, _changed(OF_GPTQ, "g_idx", lambda x: x[:8]), r"g_idx: expected \[192\], got \[8\]"),
        (GPTQ | {"checkpoint_format": "marlin"}, OF_GPTQ, "checkpoint_format: expected .*gptq_v2.*, got 'marlin'"),
        (AWQ | {"version": "gemv"}, OF_AWQ, r"version: expected one of \['gemm'\], got 'gemv'"),
        (AWQ, _changed(OF_AWQ, "qweight", lambda x: x[:, :5]), r"j\.qweight: expected \[192, 12\], got \[192, 5\]"),
        (GPTQ, _changed(OF_GPTQ, "qweight", lambda x: x[:5]), r"j\.qweight: expected \[24, 96\], got \[5, 96\]"),
        (AWQ, _changed(OF_AWQ, "scales", lambda x: x[:5]), r"gate_proj\.scales: expected \[1, 96\], got \[5, 96\]"),
        (AWQ, _changed(OF_AWQ, "scales", lambda x: x[0, 0]), r"gate_proj\.scales: expected \[1, 96\], got \[\]"),
        (AWQ, _changed(OF_AWQ, "qzeros", lambda x: x.short()), r"qzeros: expected one of .*, got I16"),
        (GPTQ, _changed(OF_GPTQ, "scales", None), r"gate_proj\.scales is missing"),
        (compressed(), _changed(floats(NVFP4, "e2m1", 16), "_global_scale", None), "_global_scale is missing"),
        (compressed(), _changed(floats(NVFP4, "e2m1", 16), "_scale", lambda x: x[:, :6]),
         r"weight_scale: expected \[96, 12\], got \[96, 6\]"),
        (compressed(), _changed(floats(NVFP4, "e2m1", 16), "_packed", lambda x: x[:, :7]),
         r"weight_packed: expected \[96, 96\], got \[96, 7\]"),
    ],
)  # fmt: skip
def test_packed_tensors_that_do_not_fit_are_named(
    tmp_path: Path, config: dict[str, Any], layer: Quantiser, words: str
) -> None:
    write(tmp_path, config, (layer,))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_act_order_of_any_expert_is_found_as_it_is_read(tmp_path: Path) -> None:
    """Only the first matrix of a layer is looked at before; one in act-order gives other weights."""
    turned = _changed(OF_GPTQ, "g_idx", lambda x: x.flip(0))
    each = iter([OF_GPTQ] * 4 + [turned] + [OF_GPTQ] * 22)
    write(tmp_path, GPTQ, (lambda weight: next(each)(weight),))  # noqa: PLW0108 - another one for each matrix
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.g_idx: expected column 0 in group 0, got 5"):
        ExpertMLPs.load(Checkpoint.open(tmp_path), range(3), dtype=torch.float32)


def test_scales_that_fit_two_groups_are_refused(tmp_path: Path) -> None:
    groups = compressed(float8("block", [128, 128]), float8("block", [128, 100]))
    write(tmp_path, groups, (scaled(128, 100, "_scale"),))
    with pytest.raises(CheckpointError, match=r"scales of \[1, 2\] fit .*128 x 128 and .*128 x 100"):
        Checkpoint.open(tmp_path)


def test_fp8_of_a_method_that_is_not_known(tmp_path: Path) -> None:
    write(tmp_path, {"quant_method": "quark"}, (PER_TENSOR,))
    with pytest.raises(CheckpointError, match=r"fp8, of which config\.json does not say how it is scaled: serve"):
        Checkpoint.open(tmp_path)
