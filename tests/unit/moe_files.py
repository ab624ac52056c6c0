"""Tiny checkpoint directories for tests, written tensor by tensor without transformers, so that they can be odd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(layer, expert) -> (gate [I, H], up [I, H], down [H, I]), float32."""


@dataclass(frozen=True)
class Sizes:
    """E, H, I and the number of MoE layers."""

    num_experts: int
    hidden: int
    inner: int
    layers: int
    first: int = 0


def draw_weights(sizes: Sizes) -> Weights:
    """Fresh random weights, scaled by fan-in."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    inner, hidden = sizes.inner, sizes.hidden
    return {
        (layer, expert): (matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
        for layer in range(sizes.first, sizes.first + sizes.layers)
        for expert in range(sizes.num_experts)
    }


def config_of(family: str, sizes: Sizes) -> dict[str, Any]:
    """A config.json for these sizes."""
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": sizes.first + sizes.layers,
        "hidden_size": sizes.hidden,
        "num_experts_per_tok": 2,
        "dtype": "float32",
    }
    if family == "mixtral":
        return config | {"num_local_experts": sizes.num_experts, "intermediate_size": sizes.inner}
    config |= {"moe_intermediate_size": sizes.inner, "intermediate_size": 7}
    if family == "qwen3_moe":
        return config | {"num_experts": sizes.num_experts}
    return config | {"n_routed_experts": sizes.num_experts, "first_k_dense_replace": sizes.first}


def tensors_of(family: str, sizes: Sizes, weights: Weights, layout: str = "named") -> dict[str, torch.Tensor]:
    """The expert tensors under the names of the family ("named") or of transformers 5 in memory ("fused")."""
    tensors = {}
    if layout == "fused":
        for layer in sorted({layer for layer, _ in weights}):
            own = [weights[layer, expert] for expert in range(sizes.num_experts)]
            at = f"model.layers.{layer}.mlp.experts"
            tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in own])
            tensors[f"{at}.down_proj"] = torch.stack([down for _, _, down in own])
        return tensors
    block, names = ("mlp", ("gate_proj", "up_proj", "down_proj"))
    if family == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    for (layer, expert), parts in weights.items():
        for name, part in zip(names, parts, strict=True):
            tensors[f"model.layers.{layer}.{block}.experts.{expert}.{name}.weight"] = part
    return tensors


def quantise(tensors: dict[str, torch.Tensor], block: int = 128) -> dict[str, torch.Tensor]:
    """fp8 e4m3 with block scales, as DeepSeek-V3 publishes: X -> X, X_scale_inv."""
    out = {}
    for name, tensor in tensors.items():
        if "norm" in name:
            out[name] = tensor
            continue
        rows, columns = tensor.shape[-2:]
        grid = torch.empty(*tensor.shape[:-2], -(-rows // block), -(-columns // block))
        small = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for i in range(grid.shape[-2]):
            for j in range(grid.shape[-1]):
                at = (..., slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                grid[..., i, j] = tensor[at].abs().amax(dim=(-1, -2)) / 448
                small[at] = (tensor[at] / grid[..., i, j, None, None]).to(torch.float8_e4m3fn)
        out[name], out[f"{name}_scale_inv"] = small, grid
    return out


def write_files(
    directory: Path,
    family: str,
    sizes: Sizes,
    weights: Weights,
    *,
    layout: str = "named",
    num_shards: int = 1,
    config: dict[str, Any] | None = None,
    fp8: bool = False,
) -> Path:
    """Write config.json and model.safetensors, or `num_shards` files with an index."""
    tensors = tensors_of(family, sizes, weights, layout)
    for layer in range(sizes.first + sizes.layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(1, 1)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(family, sizes) | (config or {})))
    write_tensors(directory, quantise(tensors) if fp8 else tensors, num_shards)
    return directory


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Write the tensors alone."""
    tensors = tensors | {"model.embed_tokens.weight": torch.randn(4, 4)}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    files = [f"model-{n + 1:05}-of-{num_shards:05}.safetensors" for n in range(num_shards)]
    weight_map = {name: files[n % num_shards] for n, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gpt_oss(folder: Path, hidden: int = 64, inner: int = 96) -> dict[str, torch.Tensor]:
    """Two layers of three experts in MXFP4, as gpt-oss is published."""
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
        "hidden_size": hidden, "intermediate_size": inner, "swiglu_limit": 7.0, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    tensors = {}
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{at}_blocks"] = torch.randint(0, 256, (3, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{at}_scales"] = torch.randint(122, 127, (3, rows, columns // 32), dtype=torch.uint8)
            tensors[f"{at}_bias"] = torch.randn(3, rows, dtype=torch.bfloat16)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
