"""Bytes to another place of one GPU."""

from __future__ import annotations

import torch


def copy_by_kernel(to: torch.Tensor, source: torch.Tensor) -> None:
    """uint8 [n] to another place of this GPU, by multiprocessors: a copy engine moves bytes within one GPU at a
    fraction of its memory's speed. Eight bytes at a time where they are aligned: torch's kernels of single bytes are
    slow. Nothing where both are the same place."""
    if not to.numel() or to.data_ptr() == source.data_ptr():
        return
    if (to.data_ptr() | source.data_ptr() | to.numel()) % 8 == 0:
        to, source = to.view(torch.int64), source.view(torch.int64)
    torch.bitwise_or(source, 0, out=to)
