"""What a dispatch hands out: numbers in memory of its own, and views of the slot's buffers. One allocation holds the
numbers of a call and its routing, and a tensor is made when its field is first read: each costs the host microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.plan import Sizes, StateMap
from ep_kernels.types import Layout, ScaleFormat

_ALIGN = 16
SlotMemory = tuple[torch.Tensor, torch.Tensor | None]
"""Memory of a dispatch's rows and scales; that of the rows is the region's."""


@dataclass(frozen=True, slots=True)
class NumberOffsets:
    """Offsets of the numbers of a dispatch in its memory, bytes; 0 also for those that its layout does not have, which
    are never the first."""

    num_rows: int
    num_dropped: int
    num_invalid_ids: int
    counts: int
    valid: int
    offsets: int = 0
    topk_ids: int = 0
    topk_weights: int = 0


class RecordAddresses:
    """Addresses in the records of one configuration.

    Attributes:
        state: byte map of the routing and of what is carried.
        carried_at, ids_at, kept_at, routing_at, num_bytes: in the memory of one dispatch: its numbers, what it carries,
            narrowed ids, a copy of its weights, its routing.
        num_rows_at: there, with num_dropped behind it.

    Args:
        number_bytes: of them all.
        routed_bytes: of the most ids, and of the most weights.
        keeps: whether weights are copied.
    """

    def __init__(
        self, state: StateMap, numbers: Mapping[str, FieldPlace], number_bytes: int, routed_bytes: int, keeps: bool
    ) -> None:
        self.state = state
        self.carried_at = round_up(number_bytes, _ALIGN)
        self.ids_at = self.carried_at + round_up(state.carried_bytes, _ALIGN)
        self.kept_at = self.ids_at + round_up(routed_bytes, _ALIGN)
        self.routing_at = self.kept_at + round_up(routed_bytes * keeps, _ALIGN)
        self.num_bytes = self.routing_at + state.routing_bytes
        self.num_rows_at = numbers["num_rows"].offset
        assert numbers["num_dropped"].offset == self.num_rows_at + 4, "they are read together"
        self._numbers = NumberOffsets(**{name: place.offset for name, place in numbers.items()})

    def dispatch(
        self, block: int, routing: int, routing_id: int, carried: int, x: int, x_scales: int, topk_ids: int,
        weights: int, scales: int,
    ) -> tuple[int, ...]:  # fmt: skip
        """Addresses of a dispatch's record, in its order."""
        at, to = self.state, self._numbers
        return (
            carried, routing_id, x, x_scales, topk_ids, weights, routing + at.routes, block + to.valid,
            block + to.num_invalid_ids, routing + at.dst_rows, carried + at.weights, routing + at.tokens,
            routing + at.source_rows, routing + at.saved_counts, block + to.counts, to.offsets and block + to.offsets,
            block + to.num_rows, block + to.num_dropped, scales, to.topk_ids and block + to.topk_ids,
            to.topk_weights and block + to.topk_weights,
        )  # fmt: skip

    def combine(
        self,
        op: int,
        routing: int,
        routing_id: int,
        carried: int,
        y: int,
        row_weights: int,
        weights: int,
        z: int,
        z_weights: int,
    ) -> tuple[int, ...]:
        """Addresses of a combine's record, in its order."""
        at = self.state
        return (
            op, routing_id, y, row_weights, routing + at.dst_rows, carried + at.weights, routing + at.tokens,
            routing + at.source_rows, routing + at.routes, weights, z, z_weights,
        )  # fmt: skip


class Memory(Protocol):
    """This rank's region, as far as this file cares."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over its bytes."""


class FieldPlace(NamedTuple):
    """Place of a field in a call's memory, bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Strides(NamedTuple):
    """Strides of packed scales in elements, as the kernel takes them; `ROW_MAJOR` for others."""

    row: int
    column: int
    group: int


ROW_MAJOR = Strides(0, 0, 0)


class Outputs:
    """Makes the tensors of one configuration's dispatches."""

    def __init__(self, config: MoEConfig, sizes: Sizes, device: torch.device) -> None:
        self._config, self._sizes, self._device = config, sizes, device
        self.layout = config.resolved_layout
        self.rows = sizes.output_rows
        """Leading shape of tokens without trimming."""
        self.compact = len(self.rows) == 1
        self._map = abi.region_map(sizes.shape)
        self._packed = config.scale_format is ScaleFormat.UE8M0_PACKED
        self.scales_shape = self._shape_of_scales()
        """Shape of the memory of a dispatch's scales; () without scales."""
        self._lands = sizes.shape.ht and not self.layout.per_expert  # where HT's kernels are
        self.places, self.num_bytes = self._placed()
        """Places by field; `num_bytes` hold them all."""
        self._memory: Memory | None = None
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    def _placed(self) -> tuple[dict[str, FieldPlace], int]:
        groups, rows = self._sizes.num_groups, (*self.rows, self._config.topk)
        parts: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            (name, (1,), torch.int32) for name in ("num_rows", "num_dropped", "num_invalid_ids")
        ]
        parts.append(("counts", (groups,), torch.int32))
        if self.layout is Layout.GROUPED:
            parts.append(("offsets", (groups + 1,), torch.int32))
        if not self.layout.per_expert:
            parts += [("topk_ids", rows, torch.int32), ("topk_weights", rows, torch.float32)]
        parts.append(("valid", (self._config.max_tokens_per_rank,), torch.bool))
        places, end = {}, 0
        for name, shape, dtype in parts:
            places[name] = FieldPlace(end, shape, dtype)
            end += torch.Size(shape).numel() * dtype.itemsize
        return places, round_up(end, _ALIGN)

    def attach(self, memory: Memory | None) -> None:
        """The region whose slots are handed out; None lets go of it (what was handed out keeps it alive)."""
        self._memory = memory
        self._views.clear()

    def number(self, block: torch.Tensor, name: str) -> torch.Tensor:
        place = self.places[name]
        return part(block, place.offset, place.shape, place.dtype)

    def field(
        self, name: str, block: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None, num_tokens: int,
        num_rows: int,
    ) -> Layout | torch.Tensor | None:  # fmt: skip
        """One of it; `tokens`: all rows of the slot."""
        if name == "layout":
            return self.layout
        if name == "tokens":
            return tokens[:num_rows] if self.compact and num_rows != self.rows[0] else tokens.detach()  # a new view
        if name == "scales":
            return self._trimmed_scales(scales, num_rows)
        if name not in self.places:
            return None
        number = self.number(block, name)
        if name == "valid":
            return number[:num_tokens]
        return number[:num_rows] if self.compact and name in ("topk_ids", "topk_weights") else number

    def slot_rows(self, slot: int) -> torch.Tensor:
        return self._slot("rows", slot, self._config.payload_columns, self._config.payload_dtype)

    @property
    def in_region(self) -> bool:
        """Whether that of the scales is, too."""
        return self._lands and not self._packed

    def scales(self, slot: int, trimmed: bool) -> tuple[torch.Tensor | None, Strides]:
        """(where scales will be, their strides). Row-major ones of rank-wise layouts are a view of the slot, as rows
        are: HT's senders write them to their final place."""
        if not self.scales_shape:
            return None, ROW_MAJOR
        dtype = self._sizes.scale_dtype
        if self.in_region:
            return self._slot("scales", slot, self._sizes.scale_columns, dtype), ROW_MAJOR
        return torch.empty(self.scales_shape, dtype=dtype, device=self._device), self.strides(trimmed)

    def _shape_of_scales(self) -> tuple[int, ...]:
        columns = self._sizes.scale_columns
        if columns == 0:
            return ()
        return (*self.rows[:-1], columns, round_up(self.rows[-1], 4)) if self._packed else (*self.rows, columns)

    def strides(self, trimmed: bool) -> Strides:
        if not self._packed or not self.scales_shape:
            return ROW_MAJOR
        columns, pad = self.scales_shape[-2:]
        return Strides(1, 0 if self.compact and trimmed else pad, columns * pad)

    def all_scales(self, scales: torch.Tensor | None) -> torch.Tensor | None:
        """What `scales` gave, as it is handed out without trimming."""
        return self._trimmed_scales(scales, self.rows[0])

    def _trimmed_scales(self, scales: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
        if scales is None:
            return None
        if not self._packed:
            return scales[:num_rows] if self.compact else scales
        if self.compact:
            return scales.as_strided((num_rows, self._sizes.scale_columns), (1, round_up(num_rows, 4)))
        return scales.transpose(-1, -2)[..., : self.rows[-1], :]

    def _slot(self, name: str, slot: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """All rows of a slot of one of the region's arrays."""
        found = self._views.get((name, slot))
        if found is None:
            assert self._memory is not None
            offset = getattr(self._map, name) + slot * getattr(self._map, f"{name}_stride")
            with torch.inference_mode(False):  # it is handed out again outside of the mode that the first call is in
                found = self._views[name, slot] = self._memory.view(offset, (*self.rows, columns), dtype)
        return found


def part(block: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of some of a buffer (of bytes, or int32) as a tensor, from byte `offset` on."""
    length = math.prod(shape)
    if block.dtype == dtype:
        first = offset // dtype.itemsize
        found = block[first : first + length]
    else:
        found = block.view(torch.uint8)[offset : offset + length * dtype.itemsize].view(dtype)
    return found if len(shape) == 1 else found.view(shape)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
