"""A generated checkpoint of experts alone, under Qwen3-MoE's names: bf16, or e4m3 with block scales."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK = 128
_PER_FILE = 16


def write_experts(
    path: Path, hidden: int, inner: int, experts: int, topk: int, *, layers: int = 1, fp8: bool = False, seed: int = 0
) -> Path:
    """Random weights, scaled by fan-in.

    Args:
        path: made.
        hidden, inner, experts, topk: H, I, E, K.
        layers: MoE layers.
        fp8: e4m3 with a float32 scale for each 128 x 128 block; else bf16.
        seed: of the weights.
    """
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2 * hidden * inner, generator=generator).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    files: dict[str, str] = {}
    pairs = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    for begin in range(0, len(pairs), _PER_FILE):
        tensors: dict[str, torch.Tensor] = {}
        for layer, expert in pairs[begin : begin + _PER_FILE]:
            for name, (rows, columns) in sizes.items():
                at = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                start = int(torch.randint(hidden * inner, (), generator=generator))
                matrix = drawn[start : start + rows * columns].view(rows, columns)
                tensors[at] = matrix.clone() if fp8 else matrix * columns**-0.5
                if fp8:
                    tensors[f"{at}_scale_inv"] = torch.full((-(-rows // BLOCK), -(-columns // BLOCK)), columns**-0.5)
        file = f"model-{begin:05}.safetensors"
        save_file(tensors, path / file)
        files |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": topk,
        "hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(config))
    return path
