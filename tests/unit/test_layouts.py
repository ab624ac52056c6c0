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
from tests.unit.moe_files import Sizes, config_of, draw_weights, tensors_of, write_tensors

SIZES = Sizes(num_experts=3, hidden=200, inner=72, layers=3)
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
}  # fmt: skip


def write(folder: Path, config: dict[str, Any] | None, layers: tuple[Quantiser, ...], layout: str = "named") -> Tensors:
    """A checkpoint, the last quantiser for the layers that are left. Returns its weights in float64, by name."""
    said = {"dtype": "bfloat16"} | ({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES) | said))
    stored, meant = {}, {}
    for name, weight in tensors_of("qwen3_moe", SIZES, draw_weights(SIZES), layout).items():
        layer = int(name.split(".")[2])
        parts, meant[name] = layers[min(layer, len(layers) - 1)](weight)
        stored |= {f"{name}{suffix}": tensor for suffix, tensor in parts.items()}
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


@pytest.mark.parametrize("layout", ["named", "fused"])
@pytest.mark.parametrize("name", LAYOUTS)
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
        for layer in range(SIZES.layers):
            rows, offsets = torch.randn(6, SIZES.hidden), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
            got = experts.forward(layer, rows, offsets, torch.full((3,), 2, dtype=torch.int32))
            for expert in range(3):
                own = slice(2 * expert, 2 * expert + 2)
                right = expected(meant, layer, layout, rows[own], expert)
                torch.testing.assert_close(got[own].double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_memory_of_layers_in_several_formats(tmp_path: Path) -> None:
    write(tmp_path, BLOCKS, (plain, scaled(128, 128, "_scale_inv")))
    found, one = memory_need.describe(tmp_path, 3), 3 * 200 * 72
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
    experts.replace(1, range(3), *experts.stage(held["fused"][0], 1, range(3), number=1), checkpoint=1)
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
        ((_beside("_scale_2"),), r"experts\.0\.gate_proj\.weight: NVFP4 of ModelOpt, not computed here: serve"),
        ((_beside(".absmax"),), "bitsandbytes, not computed here: serve"),
        ((_instead("_packed", "_scale", "_global_scale"),), "experts of layer 0 are NVFP4 of compressed-tensors"),
        ((_instead("_packed", "_scale"),), "layer 0 are packed integers of compressed-tensors, not"),
        ((plain, plain, _instead("_packed")), "experts of layer 2 are packed integers"),
        ((plain, lambda weight: ({".qweight": torch.ones(1)}, weight)), "experts of layer 1 are int4 of AWQ or GPTQ"),
        ((lambda weight: ({"": weight, "_scale": torch.ones(1)}, weight),), "expected float without scales, got"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_named(tmp_path: Path, layers: tuple[Quantiser, ...], words: str) -> None:
    write(tmp_path, None, layers)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_scales_that_fit_two_groups_are_refused(tmp_path: Path) -> None:
    groups = compressed(float8("block", [128, 128]), float8("block", [128, 100]))
    write(tmp_path, groups, (scaled(128, 100, "_scale"),))
    with pytest.raises(CheckpointError, match=r"scales of \[1, 2\] fit .*128 x 128 and .*128 x 100"):
        Checkpoint.open(tmp_path)


def test_fp8_of_a_method_that_is_not_known(tmp_path: Path) -> None:
    write(tmp_path, {"quant_method": "quark"}, (PER_TENSOR,))
    with pytest.raises(CheckpointError, match=r"fp8, of which config\.json does not say how it is scaled: serve"):
        Checkpoint.open(tmp_path)
