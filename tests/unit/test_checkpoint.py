"""Checkpoint directories: every family, both layouts, fp8; and a clear word for everything that can be wrong."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.shards import Shards
from crossdock.worker.experts.placement import WeightsOf
from crossdock.worker.group.model import OpenCheckpoints
from tests.unit.moe_files import (
    Sizes,
    Weights,
    config_of,
    draw_weights,
    quantise,
    tensors_of,
    write_files,
    write_tensors,
)

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
SIZES = Sizes(num_experts=4, hidden=32, inner=16, layers=2)


def _read(checkpoint: Checkpoint, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec = checkpoint.spec
    first, down = (stack[0] for stack in checkpoint.stacks(layer, 1, torch.float32, "cpu", widen=True))
    for stack in (first, down):
        stack.data.fill_(float("nan"))
    checkpoint.read_expert(layer, expert, first, down)
    assert first.data.shape == (2 * spec.intermediate_size, spec.hidden_size)
    return first.data, down.data


def _assert_holds(checkpoint: Checkpoint, weights: Weights) -> None:
    for (layer, expert), (gate, up, down) in weights.items():
        got_gate_up, got_down = _read(checkpoint, layer, expert)
        assert torch.equal(got_gate_up, torch.cat([gate, up]))
        assert torch.equal(got_down, down)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("layout", ["named", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_layout(tmp_path: Path, family: str, layout: str, num_shards: int) -> None:
    sizes = dataclasses.replace(SIZES, first=1) if family.startswith("deepseek") else SIZES
    weights = draw_weights(sizes)
    checkpoint = Checkpoint.open(write_files(tmp_path, family, sizes, weights, layout=layout, num_shards=num_shards))
    spec = checkpoint.spec
    assert (spec.family, spec.num_experts, spec.hidden_size, spec.intermediate_size) == (family, 4, 32, 16)
    assert spec.moe_layers == tuple(range(sizes.first, sizes.first + 2))
    assert (spec.num_layers, spec.topk, spec.gating, spec.dtype) == (sizes.first + 2, 2, Gating(), torch.float32)
    _assert_holds(checkpoint, weights)
    checkpoint.close()
    _assert_holds(checkpoint, weights)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes(tmp_path: Path, family: str, fused: bool) -> None:
    import transformers

    from crossdock.demo.models import write_checkpoint

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "topk": 2, "num_layers": 2}
    write_checkpoint(family, tmp_path, fused=fused, max_shard_bytes=200_000, **sizes)  # type: ignore[arg-type]
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint = Checkpoint.open(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    layers = {
        number: layer.mlp.experts for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")
    }
    assert checkpoint.spec.moe_layers == tuple(layers)
    for number, module in layers.items():
        for expert in range(8):
            gate_up, down = _read(checkpoint, number, expert)
            assert torch.equal(gate_up, module.gate_up_proj[expert])
            assert torch.equal(down, module.down_proj[expert])


@pytest.mark.parametrize("layout", ["named", "fused"])
def test_fp8_blocks_are_dequantised(tmp_path: Path, layout: str) -> None:
    sizes = Sizes(num_experts=3, hidden=192, inner=136, layers=1)
    weights = draw_weights(sizes)
    small = {key: tuple(part * 10.0**expert for part in parts) for key, parts in weights.items() for expert in [key[1]]}
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write_files(tmp_path, "deepseek_v3", sizes, small, layout=layout, config=config, fp8=True)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.spec.dtype is torch.bfloat16
    for (layer, expert), (gate, up, down) in small.items():
        gate_up_got, down_got = _read(checkpoint, layer, expert)
        for got, expected in ((gate_up_got, torch.cat([gate, up])), (down_got, down)):
            torch.testing.assert_close(got, expected, rtol=2**-4, atol=float(expected.abs().max()) * 2**-9)


def test_fp8_needs_scales_of_the_right_shape(tmp_path: Path) -> None:
    sizes = Sizes(num_experts=2, hidden=256, inner=128, layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v3", sizes)))
    tensors = quantise(tensors_of("deepseek_v3", sizes, draw_weights(sizes)))
    scale = "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"
    write_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if name != scale})
    with pytest.raises(CheckpointError, match=f"tensor {scale} is missing"):
        Checkpoint.open(tmp_path)
    write_tensors(tmp_path, tensors | {scale: torch.ones(2, 1)})
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv: expected \[1, 2\], got \[2, 1\]"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("layout", ["named", "fused"])
def test_a_draft_layer_is_none_of_the_models(tmp_path: Path, layout: str) -> None:
    """DeepSeek-V3 publishes its own as layer 61, past the last one."""
    sizes = Sizes(num_experts=2, hidden=16, inner=8, layers=6)
    drawn = draw_weights(sizes)
    kept = {key: parts for key, parts in drawn.items() if key[0] in (1, 3, 5)}
    path = write_files(
        tmp_path, "qwen3_moe", sizes, kept, layout=layout, config={"num_hidden_layers": 5, "decoder_sparse_step": 2}
    )
    checkpoint = Checkpoint.open(path)
    assert checkpoint.spec.moe_layers == (1, 3)
    _assert_holds(checkpoint, {key: parts for key, parts in kept.items() if key[0] < 5})


@pytest.mark.parametrize(
    "config",
    [
        {"mlp_only_layers": [0, 2]},
        {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
        {"decoder_sparse_step": 2},
    ],
)
def test_experts_alone_are_enough_where_the_config_names_the_dense_layers(
    tmp_path: Path, config: dict[str, object]
) -> None:
    sizes = Sizes(num_experts=2, hidden=16, inner=8, layers=4)
    kept = {key: parts for key, parts in draw_weights(sizes).items() if key[0] in (1, 3)}
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", sizes) | config))
    write_tensors(tmp_path, tensors_of("qwen3_moe", sizes, kept))
    assert Checkpoint.open(tmp_path).spec.moe_layers == (1, 3)
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", sizes)))
    with pytest.raises(CheckpointError, match=r"layer 0 has no experts, and config\.json does not name it as dense"):
        Checkpoint.open(tmp_path)


def test_old_and_new_config_keys(tmp_path: Path) -> None:
    weights = draw_weights(SIZES)
    config = {"dtype": None, "torch_dtype": "float16", "num_experts": None, "num_local_experts": 4}
    spec = Checkpoint.open(write_files(tmp_path, "qwen3_moe", SIZES, weights, config=config)).spec
    assert (spec.num_experts, spec.dtype) == (4, torch.float16)
    config = {"dtype": None}
    assert (
        Checkpoint.open(write_files(tmp_path, "qwen3_moe", SIZES, weights, config=config)).spec.dtype is torch.float32
    )


def test_sizes_for_each_layer(tmp_path: Path) -> None:
    """Hunyuan-A13B's config.json has lists of one value."""
    sizes = Sizes(num_experts=4, hidden=32, inner=16, layers=2)
    lists = {"num_experts_per_tok": [2, 2], "moe_intermediate_size": [16, 16], "num_experts": [4, 4]}
    spec = Checkpoint.open(write_files(tmp_path, "qwen3_moe", sizes, draw_weights(sizes), config=lists)).spec
    assert (spec.topk, spec.intermediate_size, spec.num_experts) == (2, 16, 4)


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    weights = draw_weights(SIZES)
    first = Checkpoint.open(write_files(tmp_path / "a", "mixtral", SIZES, weights)).spec.fingerprint
    assert Checkpoint.open(write_files(tmp_path / "b", "mixtral", SIZES, weights)).spec.fingerprint == first
    others = [
        write_files(tmp_path / "c", "mixtral", SIZES, draw_weights(SIZES)),
        write_files(tmp_path / "d", "mixtral", SIZES, weights, config={"hidden_act": "gelu"}),
        write_files(tmp_path / "e", "mixtral", SIZES, weights, config={"num_experts_per_tok": 1}),
        write_files(tmp_path / "f", "qwen3_moe", SIZES, weights),
    ]
    prints = {Checkpoint.open(path).spec.fingerprint for path in others}
    assert len(prints) == len(others)
    assert first not in prints


@pytest.mark.parametrize("layout", ["named", "fused"])
def test_fingerprint_tells_quantisations_apart(layout: str, tmp_path: Path) -> None:
    """One that differs in the scales alone, or in the weights of a single expert, whichever that is."""
    tensors = quantise(tensors_of("qwen3_moe", SIZES, draw_weights(SIZES), layout))
    (config := tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES)))

    def fingerprint(changed: dict[str, torch.Tensor]) -> str:
        write_tensors(tmp_path, tensors | changed)
        return Checkpoint.open(config.parent).spec.fingerprint

    def of_expert(expert: int, scales: bool) -> dict[str, torch.Tensor]:
        """The tensors of one expert in one layer, with other weights or other scales."""
        layer = f"layers.{SIZES.first}.mlp.experts."
        here = layer if layout == "fused" else f"{layer}{expert}."
        changed = {
            name: each.clone() for name, each in tensors.items() if here in name and ("_scale" in name) == scales
        }
        for each in changed.values():
            part = each[expert] if layout == "fused" else each
            part.copy_((part.float() * 2 + 1).to(part.dtype))
        assert changed
        return changed

    first = fingerprint({})
    others = [fingerprint(of_expert(expert, scales)) for expert in range(SIZES.num_experts) for scales in (False, True)]
    assert fingerprint({}) == first
    assert len({first, *others}) == 1 + len(others)


def test_the_fingerprint_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = os.pread

    def noted_pread(fd: int, length: int, at: int) -> bytes:
        sizes.append(length)
        return plain(fd, length, at)

    monkeypatch.setattr(os, "pread", noted_pread)
    Checkpoint.open(write_files(tmp_path / "m", "qwen3_moe", SIZES, draw_weights(SIZES), fp8=True))
    header = sizes[:2]
    assert header[0] == 8
    assert len(sizes[2:]) == 2 * SIZES.num_experts * SIZES.layers
    assert max(sizes[2:]) <= 256


def test_missing_directory_and_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of("mixtral", SIZES)))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*pytorch_model\.bin"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"config\.json: unreadable"),
        (b"\xff\xfe", r"config\.json: unreadable"),
        ("[]", "expected a JSON object, got list"),
        ('{"model_type": "llama"}', r"model_type: expected one of \['afmoe', .*'zaya'\], got 'llama'"),
        ("{}", "model_type: expected a string, got None"),
        ('{"model_type": "mixtral"}', "num_hidden_layers is missing"),
        ('{"model_type": "mixtral", "num_hidden_layers": "2"}', "expected a positive int up to 1048576, got '2'"),
        ('{"model_type": "mixtral", "num_hidden_layers": 0}', "expected a positive int up to 1048576, got 0"),
        ('{"model_type": "mixtral", "num_hidden_layers": true}', "expected a positive int up to 1048576, got True"),
    ],
)
def test_broken_config(tmp_path: Path, text: str | bytes, words: str) -> None:
    write_files(tmp_path, "mixtral", SIZES, draw_weights(SIZES))
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dtype": "float64"}, "dtype: expected one of .* got 'float64'"),
        ({"quantization_config": {"weight_block_size": [0, 128]}}, r"weight_block_size: .* got \[0, 128\]"),
        ({"num_hidden_layers": 3}, "layer 2 has no experts, and config.json does not name it as dense"),
        ({"num_experts": 5}, r"tensor model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight is missing"),
        ({"hidden_size": 48}, r"experts\.0\.gate_proj\.weight: expected \[16, 48\], got \[16, 32\]"),
    ],
)
def test_config_that_does_not_fit(tmp_path: Path, config: dict[str, object], words: str) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES), config=config)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def _drop_tensor(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if "experts" in name)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, file)


def _truncate(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garble(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(b"\xff" * 16 + file.read_bytes()[16:])


def _escape(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00003", "../model-00002-of-00003"))


def _empty_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "model-00002-of-00003.safetensors").unlink(), "00002-of-00003.*missing shard, named by"),
        (_truncate, "00002-of-00003.safetensors: truncated or corrupt shard"),
        (_garble, "00002-of-00003.safetensors: truncated or corrupt shard"),
        (lambda path: (path / "model-00002-of-00003.safetensors").write_bytes(b""), "truncated or corrupt shard"),
        (_drop_tensor, r"00002-of-00003.*: tensor model\..*experts.* is missing, though"),
        (_escape, r"expected file names of this directory, got '\.\./model-00002"),
        (
            _empty_index,
            r"none of the 2 layers has experts; looked for \['model\.layers\.N\.mlp\.experts\.gate_up_proj'",
        ),
        (lambda path: (path / "model.safetensors.index.json").write_text("{}"), "expected weight_map"),
        (lambda path: (path / "model.safetensors.index.json").write_text("junk"), r"index\.json: unreadable"),
    ],
)
def test_damaged_shards(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES), num_shards=3)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_element_types_that_are_not_weights(tmp_path: Path) -> None:
    tensors = tensors_of("mixtral", SIZES, draw_weights(SIZES))
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    write_files(tmp_path, "mixtral", SIZES, draw_weights(SIZES))
    write_tensors(tmp_path, tensors | {name: torch.zeros(32, 16, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=rf"{name}: expected one of .* got I64"):
        Checkpoint.open(tmp_path)


def test_of_other_checkpoints_the_ones_in_use_stay_open(tmp_path: Path) -> None:
    """Two that could not be loaded have later numbers than the one that the group returns to."""
    sizes, known = Sizes(num_experts=2, hidden=32, inner=16, layers=1), []
    for number in range(4):
        write_files(tmp_path / f"{number}", "qwen3_moe", sizes, draw_weights(sizes))
        fingerprint = Checkpoint.open(tmp_path / f"{number}").spec.fingerprint
        known.append(WeightsOf(number, str(tmp_path / f"{number}"), fingerprint))
    several = OpenCheckpoints(Checkpoint.open(tmp_path / "0"))
    for number in (1, 2, 3, 1, 2, 1, 0):
        assert several.open(known[number]).spec.fingerprint == known[number].fingerprint
    several.close()


def test_a_checkpoint_that_is_closed_during_a_read_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of an epoch that has ended may still read while the next one's opens others."""
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES))
    shards, mapped = Shards(tmp_path), Shards._mapped

    def closed(self: Shards, file: str) -> Any:
        found = mapped(self, file)
        self.close()
        return found

    monkeypatch.setattr(Shards, "_mapped", closed)
    name = next(iter(shards))
    assert shards.read(name).shape == shards.describe(name)[1]


@pytest.mark.parametrize("how", ["others", "truncated", "renamed", "removed"])
def test_a_file_that_was_written_since_it_was_opened_is_not_read(tmp_path: Path, how: str) -> None:
    """It would give other weights than the rest of the layer has, or end the process (SIGBUS). One that was replaced is
    there as long as it is mapped."""
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES))
    shards, (file,) = Shards(tmp_path), tmp_path.glob("*.safetensors")
    name = next(iter(shards))
    before = shards.read(name).clone()
    if how == "renamed":
        other = tmp_path / "other"
        other.write_bytes(bytes(file.stat().st_size))
        other.rename(file)
    elif how == "removed":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size if how == "others" else 100))
        with pytest.raises(CheckpointError, match="expected the file as it was opened, got one that was written since"):
            shards.read(name)
        return
    assert torch.equal(shards.read(name), before)
