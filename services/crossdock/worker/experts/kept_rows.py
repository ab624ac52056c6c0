"""Memory for rows that every step writes anew.

The process gives large blocks back to the system when they are freed (freed_memory.py), so a new block costs a page
fault for each 4 KiB: more than the product that fills it. To make a small tensor takes 30 us where the caches have
something else, as they have between two requests: so its tensors are kept, too.
"""

from __future__ import annotations

import torch

_KEPT_BYTES = 16 << 20
"""Larger blocks are not kept: their products take longer."""
_VIEWS = 64
"""Shapes whose tensors are kept."""


class KeptRows:
    """One block, for one tensor at a time. One thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def take(self, num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, columns], undefined; valid until the next call."""
        kept = self._views.get((num_rows, columns, dtype))
        if kept is not None:
            return kept
        num_bytes = num_rows * columns * dtype.itemsize
        if self._device.type != "cpu" or not 0 < num_bytes <= _KEPT_BYTES:
            return torch.empty(num_rows, columns, dtype=dtype, device=self._device)
        grows = self._block.shape[0] < num_bytes
        if grows or len(self._views) == _VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            if grows:
                self._block = torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8, device="cpu")
            made = self._block[:num_bytes].view(dtype).view(num_rows, columns)
        self._views[num_rows, columns, dtype] = made
        return made
