"""Checkpoints whose tokens are compared: the caller's own, or small ones of random weights, as the demo makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm import Refused
from crossdock.demo.models import write_checkpoint

SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "topk": 8, "intermediate_size": 256},
    "deepseek_v2": {
        "num_experts": 64, "topk": 6, "intermediate_size": 256,
        "fields": {
            "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        },
    },
    "mixtral": {"num_experts": 16, "topk": 2, "intermediate_size": 512},
}  # fmt: skip
"""By family, arguments of `write_checkpoint`; heads as vLLM's attention kernels have them."""
HIDDEN = 2048


def folder_of(name: str, parent: Path, hidden_size: int = HIDDEN) -> Path:
    """Of a checkpoint: a name in SMALL, which is written below `parent`, or a path. Raises Refused."""
    if name in SMALL:
        return write_checkpoint(name, parent / name, dtype=torch.bfloat16, hidden_size=hidden_size, **SMALL[name])
    if not (Path(name) / "config.json").is_file():
        raise Refused(f"--tokens: expected {', '.join(SMALL)} or a folder with a config.json, got {name!r}")
    return Path(name).resolve()
