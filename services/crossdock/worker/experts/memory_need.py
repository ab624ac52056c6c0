"""How much memory a rank's experts take, computed from a checkpoint's headers, and how much there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from crossdock.common.free_memory import free_memory
from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError, ModelSpec
from crossdock.worker.experts.expert_mlps import expert_bytes
from ep_kernels import ConfigError, MoEConfig
from ep_kernels.groups import PaperGroup

_GIB, _MOST_GIB = 1 << 30, 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by name in a worker's config."""


def rank_bytes(checkpoint: Checkpoint, num_slots: int, dtype: torch.dtype, *, widen: bool = False) -> int:
    """Weights of one rank in all layers.

    Args:
        num_slots: experts per layer here: ceil(E / R) without redundant ones.
        dtype, widen: see `ExpertMLPs.load`.
    """
    return num_slots * sum(expert_bytes(checkpoint, layer, dtype, widen) for layer in checkpoint.spec.moe_layers)


def least_ranks(checkpoint: Checkpoint, available: int, dtype: torch.dtype, *, widen: bool = False) -> int | None:
    """The smallest group whose ranks hold their experts in `available` bytes each; None: not even one expert fits."""
    num_experts, of_one = checkpoint.spec.num_experts, rank_bytes(checkpoint, 1, dtype, widen=widen)
    most = available // of_one
    return -(-num_experts // min(most, num_experts)) if most else None


def check_memory(
    checkpoint: Checkpoint, num_slots: int, device: torch.device, dtype: torch.dtype, *, widen: bool = False
) -> None:
    """Raises CheckpointError: the experts of a rank do not fit; says how many ranks would be enough."""
    needed, available = rank_bytes(checkpoint, num_slots, dtype, widen=widen), available_bytes(device)
    if needed <= available:
        return
    ranks = least_ranks(checkpoint, available, dtype, widen=widen)
    enough = f"{ranks} ranks with as much each would be enough" if ranks else "not even one expert of each layer fits"
    what = f"{num_slots} experts in each of {len(checkpoint.spec.moe_layers)} layers"
    raise CheckpointError(f"{what} take {_gib(needed)}, {_gib(available)} are free on {device}: {enough}")


def check_rows(spec: ModelSpec) -> None:
    """Raises CheckpointError: no transport carries such rows: topk or hidden_size."""
    try:
        MoEConfig(
            group=PaperGroup(0, 1),
            num_experts=spec.num_experts,
            hidden_size=spec.hidden_size,
            topk=spec.topk,
            max_tokens_per_rank=1,
            dtype=spec.dtype,
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def describe(model: Path, ranks: int, expert_dtype: str = "", rank_gib: float | None = None) -> dict[str, Any]:
    """What `crossdock memory --model` shows, in plain JSON types and in bytes.

    Args:
        model: directory of the checkpoint.
        expert_dtype: of a worker's config.
        rank_gib: memory of each rank in GiB; None: what is free here.

    Raises:
        CheckpointError: not a checkpoint that is served, or no such dtype, number of ranks or size of memory.
    """
    if expert_dtype not in ("", *DTYPES) or ranks < 1:
        wanted = f"'' or one of {', '.join(DTYPES)}, and at least 1"
        raise CheckpointError(f"--expert-dtype, --ranks: expected {wanted}, got {expert_dtype!r}, {ranks}")
    if rank_gib is not None and not 0 < rank_gib < _MOST_GIB:
        raise CheckpointError(f"--rank-gib: expected more than 0 and less than {_MOST_GIB}, got {rank_gib:g}")
    checkpoint = Checkpoint.open(model)
    check_rows(checkpoint.spec)
    spec, dtype, widen = checkpoint.spec, DTYPES.get(expert_dtype, checkpoint.spec.dtype), bool(expert_dtype)
    slots = -(-spec.num_experts // ranks)
    per_rank, largest = rank_bytes(checkpoint, slots, dtype, widen=widen), _largest(checkpoint, dtype, widen)
    free = available_bytes(torch.device("cpu")) if rank_gib is None else int(rank_gib * _GIB)
    checkpoint.close()
    return {
        "family": spec.family,
        "format": "float" if widen else "; ".join(sorted({str(each) for each in spec.formats})),
        "dtype": str(dtype).removeprefix("torch."),
        "moe_layers": len(spec.moe_layers),
        "num_experts": spec.num_experts,
        "ranks": ranks,
        "experts_per_rank": slots,
        "expert_bytes": largest,
        "model_bytes": rank_bytes(checkpoint, spec.num_experts, dtype, widen=widen),
        "rank_bytes": per_rank,
        "moving_bytes": slots * largest,
        "available_bytes": free,
        "fits": per_rank <= free,
        "least_ranks": least_ranks(checkpoint, free, dtype, widen=widen),
    }


def _largest(checkpoint: Checkpoint, dtype: torch.dtype, widen: bool) -> int:
    return max(expert_bytes(checkpoint, layer, dtype, widen) for layer in checkpoint.spec.moe_layers)


def available_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of this host and of the container around this process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = free_memory()
    return 1 << 62 if found is None else found


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
