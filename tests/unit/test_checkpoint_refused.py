"""Checkpoints that say nonsense: each is refused as it is opened, by a CheckpointError that names file and field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.experts import memory_need
from tests.unit.moe_files import Sizes, config_of, draw_weights, quantise, tensors_of, write_files, write_gpt_oss

SIZES = Sizes(num_experts=2, hidden=32, inner=16, layers=1)
E8M0 = torch.float8_e8m0fnu
Change = Callable[[torch.Tensor], torch.Tensor]


def _refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("qwen3_moe", {"dtype": ["bfloat16"]}, r"dtype: expected one of .*, got \['bfloat16'\]"),
        ("qwen3_moe", {"num_hidden_layers": 10**12}, r"num_hidden_layers: expected .*1048576, got 1000000000000"),
        ("qwen3_moe", {"hidden_size": True}, "hidden_size: expected"),
        ("qwen3_moe", {"num_experts": []}, r"num_experts: expected a positive int up to 1048576, got \[\]"),
        ("qwen3_moe", {"num_experts_per_tok": [2, 1]},
         r"num_experts_per_tok: expected the same in all layers, got \[2, 1\]"),
        ("gpt_oss", {"swiglu_limit": float("nan")}, "swiglu_limit: expected a finite number above 0, got nan"),
        ("gpt_oss", {"swiglu_alpha": float("inf")}, "swiglu_alpha: expected a finite number above 0, got inf"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": 1}}},
         "fp8, of which config.json does not say how it is scaled: serve"),
        ("qwen3_moe", {"quantization_config": "fp8"}, "quantization_config: expected an object, got 'fp8'"),
    ],
)  # fmt: skip
def test_config(tmp_path: Path, family: str, fields: dict[str, Any], words: str) -> None:
    if family == "gpt_oss":
        write_gpt_oss(tmp_path)
    else:
        tensors = tensors_of(family, SIZES, draw_weights(SIZES))
        save_file(quantise(tensors) if "quantization_config" in fields else tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config_of(family, SIZES)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    _refused(tmp_path, words)


@pytest.mark.parametrize("fields", [{"llm_config": {}}, {"language_config": {}}, {"auto_map": {"AutoModel": "x.Y"}}])
def test_a_model_of_custom_code(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internvl_chat"} | fields))
    _refused(
        tmp_path, "got 'internvl_chat', a model of custom code: convert it to the one that transformers itself has"
    )


def test_config_that_is_nested_too_deeply(tmp_path: Path) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES))
    (tmp_path / "config.json").write_text('{"x": ' + "[" * 100_000)
    _refused(tmp_path, r"config\.json: unreadable")


def test_files_without_end(tmp_path: Path) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES), num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    for path in (min(tmp_path.glob("model-*.safetensors")), index, tmp_path / "config.json"):
        path.unlink()
        os.mkfifo(path)
        _refused(tmp_path, f"{path.name}: unreadable: expected a regular file" if path != index else "found")
    (tmp_path / "config.json").unlink()
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10 << 30)
    _refused(tmp_path, r"config\.json: unreadable: expected at most 67108864 bytes, got more")


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    _refused(tmp_path / ("a" * 300), "File name too long")


@pytest.mark.parametrize("name", ["", ".", "..", "../model.safetensors", "a/b", "/etc/passwd", "a\0b", "\ud800"])
def test_a_shard_outside_the_directory(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES), num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    tensor = "model.layers.0.mlp.experts.0.gate_proj.weight"
    index.write_text(json.dumps(found | {"weight_map": found["weight_map"] | {tensor: name}}))
    _refused(tmp_path, "expected file names of this directory, got ")


def _with(path: Path, change: dict[str, Change]) -> None:
    """Change tensors of model.safetensors, by the end of their name."""
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        for end, how in change.items():
            if name.endswith(end):
                tensors[name] = how(tensors[name]).contiguous()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({".weight": lambda x: x.abs().to(E8M0)}, "expected float .*, got torch.float8_e8m0fnu"),
        (
            {"up_proj.weight": lambda x: x.to(torch.uint8)},
            "expected float as in the layer's other experts, got torch.uint8",
        ),
    ],
)
def test_a_dtype_of_float_weights(tmp_path: Path, change: dict[str, Change], words: str) -> None:
    write_files(tmp_path, "qwen3_moe", SIZES, draw_weights(SIZES))
    _with(tmp_path, change)
    _refused(tmp_path, words)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_dtype_of_fp8_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bytes would be taken for numbers: 127 for 2^0."""
    write_files(tmp_path, "deepseek_v3", SIZES, draw_weights(SIZES), fp8=True)
    _with(tmp_path, {"_scale_inv": lambda x: (x * 0).to(dtype)})
    _refused(tmp_path, f"gate_proj.weight_scale_inv: expected .*float32.*, got {dtype}")


def test_powers_of_two_as_fp8_scales_are_read_as_numbers(tmp_path: Path) -> None:
    write_files(tmp_path, "deepseek_v3", SIZES, draw_weights(SIZES), fp8=True)
    _with(tmp_path, {"_scale_inv": lambda x: (x * 0 + 0.25).to(E8M0)})
    checkpoint = Checkpoint.open(tmp_path)
    first, down = (stack[0] for stack in checkpoint.stacks(0, 1, torch.float32, "cpu"))
    checkpoint.read_expert(0, 0, first, down)
    assert down.scales is not None
    assert down.scales.unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_scales": lambda x: x.float()}, "_scales: expected .*uint8.*, got torch.float32"),
        ({"_bias": lambda x: x.to(torch.uint8)}, "_bias: expected .*float32.*, got torch.uint8"),
    ],
)
def test_a_dtype_of_mxfp4(tmp_path: Path, change: dict[str, Change], words: str) -> None:
    write_gpt_oss(tmp_path)
    _with(tmp_path, change)
    _refused(tmp_path, words)


def test_mxfp4_of_columns_that_are_not_whole_blocks(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, hidden=65, inner=96)
    _refused(tmp_path, "expected a multiple of 32 columns in mxfp4, got 65")


@pytest.mark.parametrize("rank_gib", [float("nan"), float("inf"), -1.0])
def test_memory_of_a_rank(tmp_path: Path, rank_gib: float) -> None:
    with pytest.raises(CheckpointError, match="--rank-gib: expected"):
        memory_need.describe(tmp_path, 1, "", rank_gib)
