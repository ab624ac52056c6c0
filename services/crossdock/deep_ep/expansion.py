"""DeepEP V2's expanded rows: of rows that came once per token, one for each expert that the token has here, those of an
expert together. Pure functions of tensors on any device; none reads the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crossdock.deep_ep.high_throughput import Payload

SCALES_ALIGNED = 4
"""Column-major scales lie this many rows apart, or a multiple: 16 bytes, as TMA loads them."""


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """Which row is a copy of which.

    Attributes:
        slots: int64 [N, K], the expanded row of each (token, k); P = none.
        origins: int64 [P], row * K + k of which each is a copy; -1 = padding.
    """

    slots: torch.Tensor
    origins: torch.Tensor

    @staticmethod
    def of(topk_idx: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int) -> Expansion:
        """Experts in ascending order, the rows of one in ascending order, then padding to a multiple of `alignment`.

        Args:
            topk_idx: int64 [N, K], local ids, -1 = none. counts: [L], how often each id occurs.
            num_rows: P.
        """
        counts = counts.long()
        begins = groups(counts, alignment)[1] - counts
        ids = torch.where(topk_idx < 0, len(counts), topk_idx).flatten()
        ordered, order = ids.sort(stable=True)
        shift = torch.cat([begins - (counts.cumsum(0) - counts), begins.new_zeros(1)])
        place = torch.arange(len(ids), device=ids.device) + shift[ordered]
        place = torch.where((ordered < len(counts)) & (place < num_rows), place, num_rows)
        slots = torch.empty_like(place).scatter_(0, order, place)
        origins = torch.full((num_rows + 1,), -1, device=ids.device).scatter_(0, place, order)
        return Expansion(slots.view(topk_idx.shape), origins[:num_rows])

    def rows(self, x: torch.Tensor, zero_padding: bool) -> torch.Tensor:
        """[N, B] to [P, B]; without `zero_padding` padding is unspecified."""
        taken = _words(x)[self.origins.clamp(min=0) // self.slots.shape[1]]
        if zero_padding:
            taken.masked_fill_((self.origins < 0)[:, None], 0)
        return taken.view(x.dtype)

    def weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """[N, K] to [P]; padding is 0."""
        taken = topk_weights.flatten()[self.origins.clamp(min=0)]
        return torch.where(self.origins < 0, 0.0, taken)

    def payload(self, x: torch.Tensor, scales: torch.Tensor | None, zero_padding: bool) -> Payload:
        """Rows and scales."""
        return self.rows(x, zero_padding), None if scales is None else self.rows(scales, zero_padding)

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """[P, H] to [N, H]: the rows of a token, summed in fp32 in ascending k, rounded once."""
        total = torch.zeros(len(self.slots), y.shape[1], dtype=torch.float32, device=y.device)
        for slots in self.slots.unbind(1):
            total += torch.where((slots < len(y))[:, None], _taken(y, slots).float(), 0.0)
        return total.to(y.dtype)

    def folded(self, weights: torch.Tensor) -> torch.Tensor:
        """[P] to [N, K], 0 where there is no row."""
        return torch.where(self.slots < len(weights), _taken(weights, self.slots), 0.0)


def groups(counts: torch.Tensor, alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the groups of experts that received `counts` [L], each padded to a multiple of `alignment`: int64 [L], where
    each ends with its padding, and where without."""
    padded = (counts.long() + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    return ends, ends - padded + counts


def most_rows(num_rows: int, topk: int, num_local: int, alignment: int) -> int:
    """P that suffices for any routing of N rows that gives a token an expert once."""
    most = num_rows * min(topk, num_local) + (alignment - 1) * num_local
    return -(-most // alignment) * alignment


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """[N, S] with the row index as the fast one, columns `SCALES_ALIGNED` rows apart or a multiple."""
    stride = -(-max(1, len(scales)) // SCALES_ALIGNED) * SCALES_ALIGNED
    room = scales.new_empty(scales.shape[1], stride).T[: len(scales)]
    return room.copy_(scales)


def _taken(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[index], anything where the index is past the end."""
    if not len(values):
        return values.new_zeros(*index.shape, *values.shape[1:])
    return values[index.clamp(max=len(values) - 1)]


def _words(x: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that can be indexed anywhere."""
    return x.view(torch.uint8) if x.itemsize == 1 else x
