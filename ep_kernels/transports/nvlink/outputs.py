"""What a dispatch hands out: numbers in tensors of its own, and views of the slot's buffers. Few tensors are made per
call, since each costs the host microseconds."""

from __future__ import annotations

from typing import Protocol

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.plan import Sizes
from ep_kernels.types import Layout, Mode, ScaleFormat


class Memory(Protocol):
    """This rank's region, as far as this file cares."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over its bytes."""


class Outputs:
    """Makes the tensors of one configuration's dispatches.

    Args:
        config: of the communicator.
        sizes: `plan.sizes_of(config)`.
        device: CUDA device.
    """

    def __init__(self, config: MoEConfig, sizes: Sizes, device: torch.device) -> None:
        self._config, self._sizes, self._device = config, sizes, device
        self.layout = config.resolved_layout
        self.rows = sizes.output_rows
        """Leading shape of tokens without trimming."""
        self.compact = len(self.rows) == 1
        self._map = abi.region_map(sizes.shape)
        self._packed = config.scale_format is ScaleFormat.UE8M0_PACKED
        self._lands = config.mode is not Mode.LL and not self.layout.per_expert
        names = ("num_rows", "num_dropped", "num_invalid_ids", "counts")
        grouped = self.layout is Layout.GROUPED
        self._names = (*names, "offsets") if grouped else names
        self._lengths = (1, 1, 1, sizes.num_groups, sizes.num_groups + 1)[: len(self._names)]
        self._starts = tuple(4 * sum(self._lengths[:i]) for i in range(len(self._names)))
        self._memory: Memory | None = None
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    def attach(self, memory: Memory | None) -> None:
        """The region whose slots are handed out; None lets go of it (what was handed out keeps it alive)."""
        self._memory = memory
        self._views.clear()

    def numbers(self, num_tokens: int) -> tuple[dict[str, torch.Tensor | None], dict[str, int]]:
        """(fields of `DispatchOutput` that the kernel fills, their addresses by the names in `abi.DispatchArgs`)."""
        words = torch.empty(sum(self._lengths), dtype=torch.int32, device=self._device)
        valid = torch.empty(num_tokens, dtype=torch.bool, device=self._device)
        base = words.data_ptr()
        addresses = {name: base + start for name, start in zip(self._names, self._starts, strict=True)}
        addresses["valid"] = valid.data_ptr()
        fields: dict[str, torch.Tensor | None] = {"offsets": None, "topk_ids": None, "topk_weights": None}
        fields |= zip(self._names, words.split_with_sizes(self._lengths), strict=True)
        fields["valid"] = valid
        if not self.layout.per_expert:
            shape = (*self.rows, self._config.topk)
            ids = fields["topk_ids"] = torch.empty(shape, dtype=torch.int32, device=self._device)
            weights = fields["topk_weights"] = torch.empty(shape, dtype=torch.float32, device=self._device)
            addresses["out_ids"], addresses["out_weights"] = ids.data_ptr(), weights.data_ptr()
        return fields, addresses

    def trimmed(self, fields: dict[str, torch.Tensor | None], num_rows: int) -> dict[str, torch.Tensor | None]:
        """The fields, of so many rows where the layout is compact."""
        if self.layout is not Layout.FLAT or num_rows == self.rows[0]:
            return fields
        ids, weights = fields["topk_ids"], fields["topk_weights"]
        assert ids is not None
        assert weights is not None
        return fields | {"topk_ids": ids[:num_rows], "topk_weights": weights[:num_rows]}

    def scales(self, slot: int, trimmed: bool) -> tuple[torch.Tensor | None, dict[str, int]]:
        """(where scales will be, the kernel's arguments). Row-major ones of rank-wise layouts are a view of the slot,
        as rows are: HT's senders write them to their final place."""
        columns, rows = self._sizes.scale_columns, self.rows
        if columns == 0:
            return None, {}
        if not self._packed:
            scales = (
                self._slot("scales", slot, columns, self._sizes.scale_dtype)
                if self._lands
                else torch.empty((*rows, columns), dtype=self._sizes.scale_dtype, device=self._device)
            )
            return scales, {"out_scales": scales.data_ptr()}
        pad = round_up(rows[-1], 4)
        scales = torch.empty((*rows[:-1], columns, pad), dtype=torch.int32, device=self._device)
        strides = {
            "scale_row_stride": 1,
            "scale_column_stride": 0 if self.compact and trimmed else pad,
            "scale_group_stride": columns * pad,
        }
        return scales, {"out_scales": scales.data_ptr(), **strides}

    def delivered(
        self, slot: int, scales: torch.Tensor | None, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(tokens, scales) of that many rows (compact layouts) or of all; tokens are a view of the slot."""
        c, columns = self._config, self._sizes.scale_columns
        tokens = self._slot("rows", slot, c.hidden_size, c.payload_dtype)
        tokens = tokens[:num_rows] if self.compact else tokens.view(tokens.shape)
        if columns == 0:
            return tokens, None
        assert scales is not None
        if not self._packed:
            return tokens, scales[:num_rows] if self.compact else scales
        if self.compact:
            return tokens, scales.as_strided((num_rows, columns), (1, round_up(num_rows, 4)))
        return tokens, scales.transpose(-1, -2)[..., : self.rows[-1], :]

    def _slot(self, name: str, slot: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """All rows of a slot of one of the region's arrays."""
        found = self._views.get((name, slot))
        if found is None:
            assert self._memory is not None
            offset = getattr(self._map, name) + slot * getattr(self._map, f"{name}_stride")
            found = self._views[name, slot] = self._memory.view(offset, (*self.rows, columns), dtype)
        return found


def round_up(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-value // unit) * unit
