"""Counters on the device of the tokens that dispatch brought."""

from __future__ import annotations

import torch

_counters: list[torch.Tensor] = []
"""Those on GPUs, for good: the graph of a communicator that is closed may be replayed, and adds to them."""


def counter(size: int, device: torch.device) -> torch.Tensor:
    """int64 [R], 0."""
    with torch.inference_mode(False):
        made = torch.zeros(size, dtype=torch.int64, device=device)
    if device.type != "cpu":
        _counters.append(made)
    return made
