"""The routing of a dispatch, kept for its combine and for dispatches that use it again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ep_kernels import checks
from ep_kernels.transports.cpu import native
from ep_kernels.types import Layout

CPU = torch.device("cpu")
"""Said wherever a tensor is made: torch's default device is the caller's."""


@dataclass(slots=True)
class RoutingState:
    """What a handle keeps of a dispatch on this rank: see `base.HandleState`. R ranks, M most tokens, W = K for
    per-expert layouts, else 1.

    Attributes:
        dest: int32 [T, K], places (rank * stride + slot) of this rank's tokens, -1 = none.
        weights: float32 [T, K] of this rank's tokens.
        rows: int32 [R, M, W], row of this rank's output that serves each source's token, -1 = none; first T_s tokens.
        row_weights: float32 [R, M, K], weights of each source's tokens (per-expert layouts), else empty.
        source_tokens: int32 [R], T_s of each source.
        source_dest: int32 [R, M, K], dest of the sources for which this rank is the collector, where combines go by
            collectors; else empty.
        counts, offsets: int32, as in DispatchOutput (offsets also where it has none).
        valid: bool [T].
        totals: rows delivered, rows dropped, invalid ids.
        origin: sequence number of the dispatch that made it; 0 until it has been sent.
    """

    dest: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    row_weights: torch.Tensor
    source_tokens: torch.Tensor
    source_dest: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    valid: torch.Tensor
    totals: tuple[int, int, int]
    origin: int

    @staticmethod
    def of(tensors: Iterable[torch.Tensor], totals: tuple[int, int, int], origin: int) -> RoutingState:
        values: list[Any] = [*tensors, totals, origin]
        return RoutingState(*values)

    @staticmethod
    def restore(flat: Sequence[torch.Tensor]) -> RoutingState:
        delivered, dropped, invalid, origin = flat[-1].tolist()
        return RoutingState.of(flat[:-1], (delivered, dropped, invalid), origin)

    def tensors(self) -> list[torch.Tensor]:
        """All of it but the numbers, in the order of `native.Routing`; then counts, offsets and valid."""
        return [
            self.dest, self.weights, self.rows, self.row_weights, self.source_tokens, self.source_dest, self.counts,
            self.offsets, self.valid,
        ]  # fmt: skip

    def addresses(self) -> tuple[int, ...]:
        return tuple([tensor.data_ptr() for tensor in self.tensors()])

    def weighted(self, weights: torch.Tensor) -> RoutingState:
        made = self.of(self.tensors(), self.totals, self.origin)
        made.weights = weights
        return made

    def again(self) -> RoutingState:
        """The same routing with new weights: what the receive half writes again gets memory of its own."""
        made = self.weighted(checks.made(torch.empty_like(self.weights)))
        made.row_weights = torch.empty_like(made.row_weights)
        return made

    def flatten(self) -> list[torch.Tensor]:
        return [*self.tensors(), torch.tensor([*self.totals, self.origin], device=CPU)]

    def weight_of_rows(self, rows_shape: tuple[int, ...]) -> torch.Tensor:
        """float32 in this leading shape of the tokens: each row's weight, 0 past the counts."""
        out = torch.zeros(rows_shape, dtype=torch.float32, device=CPU)
        for rows, weights, tokens in zip(self.rows, self.row_weights, self.source_tokens.tolist(), strict=True):
            served = rows[:tokens] >= 0
            out.view(-1)[rows[:tokens][served].long()] = weights[:tokens][served]
        return out

    def rows_of_sources(self) -> torch.Tensor:
        """int32 [R], tokens of each source that have a row here."""
        sent = torch.arange(self.rows.shape[1], device=CPU)[None, :] < self.source_tokens[:, None]
        return (sent & (self.rows >= 0).any(-1)).sum(1, dtype=torch.int32)


class PartPlace(NamedTuple):
    """Where a part of a state lies in its memory, int32 words, at M tokens; `of_tokens`: it has T rows of them."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_tokens: bool

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        return (tokens, *self.shape[1:]) if self.of_tokens else self.shape


class StatePlaces:
    """Places of the state of one geometry: nine tensors in one allocation.

    Attributes:
        parts: by name.
        offsets: in bytes, in the order of `RoutingState.addresses`.
        blank: of the size of them all. Taking after it is the cheapest allocation.
    """

    def __init__(self, geometry: native.Geometry) -> None:
        topk, most, ranks = int(geometry.topk), int(geometry.max_tokens), int(geometry.ranks)
        per_expert = geometry.layout < native.layout_code(Layout.RANK_MAJOR)
        groups = int(geometry.local_experts) if per_expert else ranks
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {
            "dest": ((most, topk), torch.int32, True),
            "weights": ((most, topk), torch.float32, True),
            "rows": ((ranks, most, topk if per_expert else 1), torch.int32, False),
            "row_weights": ((ranks, most, topk) if per_expert else (0,), torch.float32, False),
            "source_tokens": ((ranks,), torch.int32, False),
            "source_dest": ((ranks, most, topk) if geometry.by_domain else (0,), torch.int32, False),
            "counts": ((groups,), torch.int32, False),
            "offsets": ((groups + 1,), torch.int32, False),
            "valid": ((most,), torch.bool, True),
        }
        self.parts: dict[str, PartPlace] = {}
        end = 0
        for name, (shape, dtype, of_tokens) in shapes.items():
            self.parts[name] = PartPlace(end, shape, dtype, of_tokens)
            end += -(-math.prod(shape) * dtype.itemsize // 4)
        self.offsets = tuple(4 * place.offset for place in self.parts.values())
        self.blank = torch.empty(1, dtype=torch.int32, device=CPU).expand(end)

    def apart(self, tokens: int) -> RoutingState:
        """A state of T = `tokens` whose tensors are allocations of their own."""
        parts = (torch.empty(one.shape_of(tokens), dtype=one.dtype, device=CPU) for one in self.parts.values())
        return RoutingState.of(parts, (0, 0, 0), 0)


class FreshState(RoutingState):
    """State of a new routing; its tensors are made when they are read.

    Args:
        places: of the geometry.
        tokens: T.
    """

    __slots__ = ("block", "places", "tokens")

    def __init__(self, places: StatePlaces, tokens: int) -> None:
        self.places, self.tokens = places, tokens
        self.block = checks.made(torch.empty_like(places.blank))
        self.totals, self.origin = (0, 0, 0), 0

    def part(self, name: str) -> torch.Tensor:
        place = self.places.parts[name]
        shape = place.shape_of(self.tokens)
        length = math.prod(shape)
        if place.dtype.itemsize == 4:
            found = self.block[place.offset : place.offset + length]
            found = found if place.dtype is torch.int32 else found.view(place.dtype)
        else:
            found = self.block.view(torch.uint8)[4 * place.offset : 4 * place.offset + length].view(place.dtype)
        return found if len(shape) == 1 else found.view(shape)

    def addresses(self) -> tuple[int, ...]:
        base, (a, b, c, d, e, f, g, h, i) = self.block.data_ptr(), self.places.offsets
        return base + a, base + b, base + c, base + d, base + e, base + f, base + g, base + h, base + i


def _part(name: str) -> property:
    return property(lambda self: self.part(name))


for _name in RoutingState.__slots__[:9]:
    setattr(FreshState, _name, _part(_name))
