"""Checkpoints whose tokens are compared: the caller's own, or small ones of random weights, as the demo makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm import Refused

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


def folders_of(text: str) -> dict[str, Path | None]:
    """Checkpoints by name, as the command line gives them: some of SMALL, which have no folder yet, and folders. Raises
    Refused."""
    found: dict[str, Path | None] = {}
    for word in filter(None, text.split(",")):
        folder = None if word in SMALL else Path(word).resolve()
        if folder and not (folder / "config.json").is_file():
            raise Refused(f"--tokens: expected {', '.join(SMALL)} or a folder with a config.json, got {word!r}")
        name = folder.name if folder else word
        if name in found:
            raise Refused(f"--tokens: expected models of different names, got {name!r} twice")
        found[name] = folder
    return found


def made(name: str, parent: Path, hidden_size: int = HIDDEN) -> Path:
    """One of SMALL, written below `parent`."""
    from crossdock.demo.models import write_checkpoint

    return write_checkpoint(name, parent / name, dtype=torch.bfloat16, hidden_size=hidden_size, **SMALL[name])
