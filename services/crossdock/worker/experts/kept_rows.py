"""Memory for rows that every step writes anew.

The process gives large blocks back to the system when they are freed (freed_memory.py), so a new block costs a page
fault for each 4 KiB: more than the product that fills it.
"""

from __future__ import annotations

import torch

_LARGE_BYTES, _KEPT_BYTES = 32 << 10, 16 << 20
"""Smaller blocks come from the allocator's own lists; larger ones are not kept: their products take longer."""


class KeptRows:
    """One block, for one tensor at a time. One thread.

    Args:
        device: where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, columns], undefined; valid until the next call."""
        num_bytes = num_rows * columns * dtype.itemsize
        if self._device.type != "cpu" or not _LARGE_BYTES < num_bytes <= _KEPT_BYTES:
            return torch.empty(num_rows, columns, dtype=dtype, device=self._device)
        if self._block.shape[0] < num_bytes:
            with torch.inference_mode(False):
                self._block = torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8, device="cpu")
        return self._block[:num_bytes].view(dtype).view(num_rows, columns)
