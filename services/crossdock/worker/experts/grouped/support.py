"""Whether the grouped products of this folder serve a layer here, and why not. Imports no Triton."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import tempfile
from pathlib import Path

import torch

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import Stack

_BLOCK, _STEP = 128, 64


def compile_into(folder: str) -> None:
    """Keep compiled kernels in this folder of `kernel_cache_dir`; "": in the user's home. Where that cannot be written,
    as in a container with a read-only root, in one of this user's for temporary files: Triton compiles nothing without.
    Nothing where Triton is not installed."""
    if importlib.util.find_spec("triton") is not None:
        from triton import knobs

        wanted = Path(folder, "triton") if folder else Path(knobs.cache.dir)
        knobs.cache.dir = str(wanted if _can_write(wanted) else _temporary())


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _temporary() -> Path:
    """The same after a restart. What is compiled there is run, so no other user may have made it."""
    folder = Path(tempfile.gettempdir(), f"crossdock-triton-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if is_ours else Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


def reason_against(first: Stack, down: Stack, gating: Gating, dtype: torch.dtype) -> str:
    """Why these weights are not multiplied by grouped products; "": they are."""
    if first.data.device.type != "cuda":
        return f"they are for GPUs, and weights are on {first.data.device}"
    if torch.cuda.get_device_capability(first.data.device) < (9, 0):
        return "they need a GPU of compute capability 9.0 or more"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return reason_in_shapes(first, down, gating, dtype)


def reason_in_shapes(first: Stack, down: Stack, gating: Gating, dtype: torch.dtype) -> str:
    """The same, of formats and sizes alone."""
    format, sizes = first.format, f"{first.rows} x {first.columns} and {down.rows} x {down.columns}"
    if any(stack.data.shape[-1] % 16 for stack in (first, down)):
        return f"rows of the matrices, {sizes}, are no multiple of 16 bytes"
    if format.kind != "fp8":
        whole = not format.block[1] or _STEP % format.block[1] == 0 or format.block[1] % _STEP == 0
        return "" if dtype is torch.bfloat16 and whole else f"{format} with {dtype}"
    if format.block not in {(_BLOCK, _BLOCK), (1, 0), (0, 0)}:
        return f"they know no {format}"
    if first.bias is not None:
        return "fp8 with biases"
    blocks, whole = format.block == (_BLOCK, _BLOCK), down.columns % _BLOCK == 0
    straddles = first.parts == (1 if fused_rule(gating) != "plain" else 2)
    if blocks and not whole and straddles and gating.halves == 2:
        return f"a block of {_BLOCK} rows does not end where gate ends, after {down.columns} rows"
    return ""


def fused_rule(gating: Gating) -> str:
    """The rule of `Gating` that the first product computes itself; "plain": none."""
    silu = gating.act in ("silu", "swish")
    return gating.rule if gating.rule == "scaled" or (gating.rule == "gated" and silu) else "plain"
