"""The routing of a dispatch, kept for its combine and for dispatches that use it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ep_kernels import checks
from ep_kernels.transports.cpu import native
from ep_kernels.types import Layout

CPU = torch.device("cpu")
"""Said wherever a tensor is made: torch's default device is the caller's."""


class RoutingParts:
    """What both kinds of state do."""

    __slots__ = ()
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

    def addresses(self) -> tuple[int, ...]:
        """Of dest, weights, rows, row_weights, source_tokens and source_dest, as `native.Routing` has them; of valid,
        counts and offsets."""
        return tuple(
            tensor.data_ptr()
            for tensor in (
                self.dest, self.weights, self.rows, self.row_weights, self.source_tokens, self.source_dest,
                self.valid, self.counts, self.offsets,
            )
        )  # fmt: skip

    def weighted(self, weights: torch.Tensor) -> RoutingState:
        """The state with other weights of this rank's tokens."""
        return RoutingState(
            self.dest, weights, self.rows, self.row_weights, self.source_tokens, self.source_dest,
            self.counts, self.offsets, self.valid, self.totals, self.origin,
        )  # fmt: skip

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`."""
        numbers = torch.tensor([*self.totals, self.origin], device=CPU)
        return [
            self.dest, self.weights, self.rows, self.row_weights, self.source_tokens, self.source_dest,
            self.counts, self.offsets, self.valid, numbers,
        ]  # fmt: skip

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


@dataclass(slots=True)
class RoutingState(RoutingParts):
    """What a handle keeps of a dispatch on this rank. R ranks, M most tokens, W = K for per-expert layouts, else 1.

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

    @classmethod
    def restore(cls, tensors: Sequence[torch.Tensor]) -> RoutingState:
        """What `flatten` was made of."""
        *totals, origin = tensors[-1].tolist()
        values: list[Any] = [*tensors[:-1], tuple(totals), origin]
        return cls(*values)


class PartPlace(NamedTuple):
    """Where a part of a state lies in its memory, int32 words, at M tokens; `of_tokens`: it has T rows of them."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_tokens: bool


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
            "source_dest": (_source_dest(geometry), torch.int32, False),
            "valid": ((most,), torch.bool, True),
            "counts": ((groups,), torch.int32, False),
            "offsets": ((groups + 1,), torch.int32, False),
        }
        self.parts: dict[str, PartPlace] = {}
        end = 0
        for name, (shape, dtype, of_tokens) in shapes.items():
            self.parts[name] = PartPlace(end, shape, dtype, of_tokens)
            end += -(-math.prod(shape) * dtype.itemsize // 4)
        self.offsets = tuple(4 * place.offset for place in self.parts.values())
        self.blank = torch.empty(1, dtype=torch.int32, device=CPU).expand(end)


class FreshState(RoutingParts):
    """State of a new routing; its tensors are made when they are read.

    Args:
        places: of the geometry.
        tokens: T.
    """

    __slots__ = ("block", "origin", "places", "tokens", "totals")

    def __init__(self, places: StatePlaces, tokens: int) -> None:
        self.places, self.tokens = places, tokens
        self.block = checks.made(torch.empty_like(places.blank))
        self.totals, self.origin = (0, 0, 0), 0

    def part(self, name: str) -> torch.Tensor:
        """One of its tensors."""
        place = self.places.parts[name]
        shape = (self.tokens, *place.shape[1:]) if place.of_tokens else place.shape
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


for _name in ("dest", "weights", "rows", "row_weights", "source_tokens", "source_dest", "counts", "offsets", "valid"):
    setattr(FreshState, _name, _part(_name))


def _source_dest(geometry: native.Geometry) -> tuple[int, ...]:
    return (geometry.ranks, geometry.max_tokens, geometry.topk) if geometry.by_domain else (0,)


def fresh_state(geometry: native.Geometry, tokens: int) -> RoutingState:
    """Room for the routing of a dispatch of that many tokens."""
    topk, most = geometry.topk, geometry.max_tokens
    per_expert = geometry.layout < native.layout_code(Layout.RANK_MAJOR)
    groups = geometry.local_experts if per_expert else geometry.ranks
    return RoutingState(
        dest=torch.empty(tokens, topk, dtype=torch.int32, device=CPU),
        weights=torch.empty(tokens, topk, dtype=torch.float32, device=CPU),
        rows=torch.empty(geometry.ranks, most, topk if per_expert else 1, dtype=torch.int32, device=CPU),
        row_weights=torch.empty((geometry.ranks, most, topk) if per_expert else (0,), dtype=torch.float32, device=CPU),
        source_tokens=torch.empty(geometry.ranks, dtype=torch.int32, device=CPU),
        source_dest=torch.empty(_source_dest(geometry), dtype=torch.int32, device=CPU),
        counts=torch.empty(groups, dtype=torch.int32, device=CPU),
        offsets=torch.empty(groups + 1, dtype=torch.int32, device=CPU),
        valid=torch.empty(tokens, dtype=torch.bool, device=CPU),
        totals=(0, 0, 0),
        origin=0,
    )


def again(previous: RoutingState) -> RoutingState:
    """The same routing with new weights: what the receive half writes again gets memory of its own."""
    return RoutingState(
        dest=previous.dest,
        weights=checks.made(torch.empty_like(previous.weights)),
        rows=previous.rows,
        row_weights=torch.empty_like(previous.row_weights),
        source_tokens=previous.source_tokens,
        source_dest=previous.source_dest,
        counts=previous.counts,
        offsets=previous.offsets,
        valid=previous.valid,
        totals=previous.totals,
        origin=previous.origin,
    )
