"""The definition of dispatch and combine: all ranks in one process, plain torch, no speed. Transports give its bits.

    outputs, step = reference.dispatch(config, xs, topk_ids, topk_weights)     # lists, one entry per rank
    zs, _ = reference.combine(step, [experts(out) for out in outputs])

What is bitwise equal everywhere: every delivered row, its scales, counts, offsets, local ids and weights, and the
result of combine. What is not: rows past the counts (here zeros, elsewhere unspecified), and which of the NaN encodings
a NaN in a result of combine has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ep_kernels import quant
from ep_kernels.config import MoEConfig, receive_rows
from ep_kernels.routing import Route, Rows, expert_rows, group_offsets, rank_rows, route
from ep_kernels.types import CombineOrder, DispatchOutput, Layout, ScaleFormat

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Arrivals:
    """Where one rank puts the rows that it receives.

    Attributes:
        rows: in canonical order.
        place: int64 [N], of each of them in the output (leading shape flattened); -1 = dropped.
        shape: leading shape of the output.
        offsets: int64 [L+1], start of each expert's group, cut at the capacity (GROUPED).
        places: places[source] is int64 [T, K]: the place that serves (token, k); -1 = not there, or dropped. In
            rank-wise layouts it is the token's one row, at each k that it serves.
    """

    rows: Rows
    place: torch.Tensor
    shape: tuple[int, ...]
    offsets: torch.Tensor
    places: list[torch.Tensor]


@dataclass(frozen=True)
class ReferenceStep:
    """What combine needs of a dispatch.

    Attributes:
        weights: float32 [T, K] of each source rank.
        routes: the `Route` of each source rank.
        arrivals: by destination rank.
    """

    config: MoEConfig
    active: tuple[bool, ...]
    weights: list[torch.Tensor]
    routes: list[Route]
    arrivals: list[Arrivals]

    @property
    def places(self) -> list[list[torch.Tensor]]:
        """places[destination][source]: see `Arrivals`."""
        return [each.places for each in self.arrivals]


def routed(
    config: MoEConfig, topk_ids: Tensors, topk_weights: Tensors, active: Sequence[bool] | None = None
) -> ReferenceStep:
    """Where every row goes, without any. Inactive ranks send and receive nothing."""
    num_ranks, experts = config.group.size, config.resolved_expert_map
    alive = tuple(active) if active is not None else (True,) * num_ranks
    routes = [route(experts, ids[: None if alive[s] else 0], s, alive) for s, ids in enumerate(topk_ids)]
    arrivals = [_arrivals(config, routes, rank) for rank in range(num_ranks)]
    return ReferenceStep(config, alive, list(topk_weights), routes, arrivals)


def _arrivals(config: MoEConfig, routes: list[Route], rank: int) -> Arrivals:
    num_local = config.resolved_expert_map.num_local_experts(rank)
    per_expert = config.resolved_layout.per_expert
    rows = expert_rows(routes, rank, num_local) if per_expert else rank_rows(routes, rank)
    place, shape, offsets = _places(config, rows, num_local)
    return Arrivals(rows, place, shape, offsets, _place_tables(config, routes, rows, place, rank))


def dispatch(
    config: MoEConfig,
    xs: Tensors,
    topk_ids: Tensors,
    topk_weights: Tensors,
    *,
    scales: Tensors | None = None,
    active: Sequence[bool] | None = None,
) -> tuple[list[DispatchOutput], ReferenceStep]:
    """Deliver x [T, H] of every rank (with its own scales [T, S], or NVFP4's global scale [1], if any). Inactive ranks
    send and receive nothing."""
    step = routed(config, topk_ids, topk_weights, active)
    if config.quantize:
        pairs = [quant.quantize_for(config, x, scales[rank] if scales else None) for rank, x in enumerate(xs)]
        xs, scales = [q for q, _ in pairs], [scale for _, scale in pairs]
    return [_receive(step, xs, scales, rank) for rank in range(config.group.size)], step


def _receive(step: ReferenceStep, xs: Tensors, scales: Tensors | None, rank: int) -> DispatchOutput:
    config, layout, here = step.config, step.config.resolved_layout, step.routes[rank]
    arrivals = step.arrivals[rank]
    rows, place, shape, offsets = arrivals.rows, arrivals.place, arrivals.shape, arrivals.offsets
    counts = torch.bincount(rows.group[place >= 0], minlength=len(rows.counts))
    tokens = _deliver(xs, rows, place, shape)
    scale = None if scales is None else _deliver(scales, rows, place, shape)
    if scale is not None and config.scale_format is ScaleFormat.UE8M0_PACKED:
        scale = quant.pack(scale)
    ids = weights = None
    if not layout.per_expert:
        mine = [r.rank == rank for r in step.routes]
        first, absent = _ids_here(config, rank)
        local = [torch.where(m, first + r.slot, absent).int() for m, r in zip(mine, step.routes, strict=True)]
        ids = _deliver(local, rows, place, shape)
        if config.absent_id is not None:
            ids[int(counts.sum()) :] = absent  # FLAT: those are the rows that did not come
        pairs = zip(mine, step.weights, strict=True)
        weights = _deliver([torch.where(m, w[: len(m)], 0.0) for m, w in pairs], rows, place, shape)
    return DispatchOutput(
        layout=layout,
        tokens=tokens,
        scales=scale,
        counts=counts.int(),
        offsets=offsets.int() if layout is Layout.GROUPED else None,
        topk_ids=ids,
        topk_weights=weights,
        num_rows=(offsets[-1:] if layout is Layout.GROUPED else counts.sum(0, keepdim=True)).int(),
        valid=here.valid,
        num_dropped=(place < 0).sum(0, keepdim=True).int(),
        num_invalid_ids=torch.tensor([here.num_invalid_ids], dtype=torch.int32, device="cpu"),
    )


def _ids_here(config: MoEConfig, rank: int) -> tuple[int, int]:
    """(id of a rank's first expert, id of an expert that is not there) in `DispatchOutput.topk_ids`."""
    if config.absent_id is None:
        return 0, -1
    own = config.resolved_expert_map.experts_of(rank)
    return own[0] if own else 0, config.absent_id


def _places(config: MoEConfig, rows: Rows, num_local: int) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """(place of each row, -1 past the capacity; leading shape of the output; group offsets cut at the capacity)."""
    capacity = receive_rows(config, num_local)
    if config.resolved_layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
        place = torch.where(rows.index < capacity, rows.group * capacity + rows.index, -1)
        return place, (len(rows.counts), capacity), rows.counts
    offsets = group_offsets(rows.counts, config.expert_alignment)
    place = offsets[rows.group] + rows.index
    offsets = offsets.clamp(max=capacity)
    shape = (int(offsets[-1]) if config.exact_shapes else capacity,)
    return torch.where(place < capacity, place, -1), shape, offsets


def _place_tables(
    config: MoEConfig, routes: list[Route], rows: Rows, place: torch.Tensor, rank: int
) -> list[torch.Tensor]:
    tables = []
    for source, r in enumerate(routes):
        table, here = torch.full_like(r.rank, -1), rows.source == source
        if config.resolved_layout.per_expert:
            table[rows.token[here], rows.k[here]] = place[here]
        else:
            table[rows.token[here]] = place[here][:, None]
            table[r.rank != rank] = -1
        tables.append(table)
    return tables


def _deliver(columns: Tensors, rows: Rows, place: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Gather columns[source][token] to `place`: bytes are moved, never converted."""
    row_bytes = columns[0].shape[1] * columns[0].itemsize
    flat = torch.zeros(math.prod(shape), row_bytes, dtype=torch.uint8, device="cpu")
    for source, column in enumerate(columns):
        chosen = (rows.source == source) & (place >= 0)
        rows_as_bytes = column.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        flat[place[chosen]] = rows_as_bytes[rows.token[chosen]]
    return flat.view(columns[0].dtype).reshape(*shape, columns[0].shape[1])


def combine(
    step: ReferenceStep,
    ys: Tensors,
    *,
    row_weights: Tensors | None = None,
    apply_weights: bool = True,
    domains: Sequence[int] | None = None,
    sources: Sequence[int] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return the expert rows of every rank to their source ranks.

    Returns (z [T, H] in the output dtype, per-row numbers as [T, K] or None), a list with an entry per source rank.

    domains: [R], lowest rank of each rank's domain, for `CombineOrder.DOMAIN`. None: one domain.
    sources: the source ranks whose results are wanted. None: all.
    """
    wanted = range(len(step.routes)) if sources is None else sources
    pad = [torch.cat([y.flatten(0, -2).float(), _zeros(1, y.shape[-1])]) for y in ys]  # row -1 is zeros
    gather = _exact_terms if step.config.exact_combine else _rank_terms
    zs = []
    for source in wanted:
        r = step.routes[source]
        weights = step.weights[source][: len(r.rank)] if apply_weights else torch.ones_like(r.rank).float()
        terms = gather(step, pad, source, weights)
        by_domain = step.config.combine_order is CombineOrder.DOMAIN and not step.config.exact_combine
        if domains is not None and by_domain:
            terms = _domain_terms(step.config, list(terms), source, domains)
        total = _sum(terms, (len(r.rank), step.config.hidden_size))
        zs.append(total.to(step.config.resolved_output_dtype))
    return zs, None if row_weights is None else [_returned_weights(step, row_weights, s) for s in wanted]


Term = tuple[torch.Tensor, torch.Tensor]
"""(value float32 [T, H], present bool [T])."""


def _sum(terms: Iterable[Term], shape: tuple[int, int]) -> torch.Tensor:
    """Sum in fp32 in the given order, from the first present value (not from 0, which would turn -0 into +0)."""
    total, seen = _zeros(*shape), torch.zeros(shape[0], 1, dtype=torch.bool, device="cpu")
    for value, present in terms:
        total = torch.where(present[:, None], torch.where(seen, total + value, value), total)
        seen = seen | present[:, None]
    return total


def _rank_terms(step: ReferenceStep, ys: Tensors, source: int, weights: torch.Tensor) -> Iterable[Term]:
    """One partial per rank that holds the token, ascending: its rows, weighted, in ascending k; rounded as it moves."""
    for rank, y in enumerate(ys):
        place = step.places[rank][source]
        if step.config.resolved_layout.per_expert:
            terms = ((y[p] * w[:, None], p >= 0) for p, w in zip(place.T, weights.T, strict=True))
            partial = _sum(terms, (len(place), y.shape[1]))
        else:
            partial = y[place.amax(1)]
        yield _moved(step.config, partial), (step.routes[source].rank == rank).any(1)


def _domain_terms(config: MoEConfig, partials: list[Term], source: int, domains: Sequence[int]) -> Iterable[Term]:
    """One sum per domain, ascending by its lowest rank; that of another domain than the source's is rounded once more,
    unless it is one partial, which crosses as it is."""
    for lowest in sorted(set(domains)):
        inside = [partial for partial, domain in zip(partials, domains, strict=True) if domain == lowest]
        total = _sum(inside, (partials[0][0].shape[0], partials[0][0].shape[1]))
        count = torch.stack([present for _, present in inside]).sum(0)
        if lowest != domains[source]:
            total = torch.where((count > 1)[:, None], _moved(config, total), total)
        yield total, count > 0


def _exact_terms(step: ReferenceStep, ys: Tensors, source: int, weights: torch.Tensor) -> Iterable[Term]:
    """Every routed row as it moves, weighted at the source rank, in ascending k."""
    destination = step.routes[source].rank
    for k in range(destination.shape[1]):
        row = _zeros(len(destination), step.config.hidden_size)
        for rank, y in enumerate(ys):
            row = torch.where((destination[:, k] == rank)[:, None], y[step.places[rank][source][:, k]], row)
        yield _moved(step.config, row) * weights[:, k, None], destination[:, k] >= 0


def _moved(config: MoEConfig, value: torch.Tensor) -> torch.Tensor:
    """What fp32 becomes by travelling in the combine dtype."""
    if config.resolved_combine_dtype == torch.float8_e4m3fn:
        return quant.dequantize(*quant.quantize(value))
    return value.to(config.resolved_combine_dtype).float()


def _returned_weights(step: ReferenceStep, row_weights: Tensors, source: int) -> torch.Tensor:
    returned = _zeros(*step.routes[source].rank.shape)
    choice = torch.arange(returned.shape[1], device="cpu").expand_as(returned)
    for rank, numbers in enumerate(row_weights):
        place = step.places[rank][source]
        here = place >= 0
        if step.config.resolved_layout.per_expert:
            returned[here] = numbers.flatten()[place[here]]
        else:
            returned[here] = numbers.flatten(0, -2)[place[here], choice[here]]
    return returned


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")
