"""The definition against a dense MoE in float64, which knows nothing of ranks, layouts or rows."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_kernels import quant, reference
from ep_kernels.config import MoEConfig
from ep_kernels.routing import delivered, route
from ep_kernels.types import CombineOrder, DispatchOutput, Layout, Mode, Overflow, ScaleFormat
from tests.cases import RoutingCase, draw_seed, replicated, routing_cases
from tests.compare import packed_layout, same_bits
from tests.groups import LonelyGroup

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def matrices(case: RoutingCase) -> torch.Tensor:
    """One [H, H] float64 expert per logical id, entries multiples of 1/4: exact in every dtype used here."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (case.num_experts, case.hidden_size, case.hidden_size)
    return torch.randint(-2, 3, shape, generator=generator).double() / 4


def dense(
    case: RoutingCase, xs: list[torch.Tensor], rank: int, active: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of w * expert(x), sum of |w * expert(x)|) in float64, by the text of the contract."""
    experts, ids, weights = matrices(case), case.topk_ids(rank), case.topk_weights(rank).double()
    total = torch.zeros(xs[rank].shape, dtype=torch.float64)
    size = total.clone()
    for t in range(len(ids)):
        for k, e in enumerate(ids[t].tolist()):
            if 0 <= e < case.num_experts and any(active[r] for r, _ in case.expert_map.replicas[e]):
                term = weights[t, k] * (xs[rank][t].double() @ experts[e])
                total[t] += term
                size[t] += term.abs()
    return total, size


def run_experts(case: RoutingCase, config: MoEConfig, out: DispatchOutput, rank: int) -> torch.Tensor:
    """What a caller does with the rows of each layout, in float64; NaN where nothing was delivered."""
    experts, mine = matrices(case), torch.tensor(case.expert_map.experts_of(rank), dtype=torch.long)
    tokens = out.tokens.double() if out.scales is None else quant.dequantize(out.tokens, out.scales).double()
    y = torch.full(tokens.shape, float("nan"), dtype=torch.float64)
    if out.layout is Layout.EXPERT_MAJOR:
        for slot, e in enumerate(mine.tolist()):
            n = int(out.counts[slot])
            y[slot, :n] = tokens[slot, :n] @ experts[e]
    elif out.layout is Layout.GROUPED:
        assert out.offsets is not None
        for slot, e in enumerate(mine.tolist()):
            first = int(out.offsets[slot])
            rows = slice(first, first + int(out.counts[slot]))
            y[rows] = tokens[rows] @ experts[e]
    else:
        assert out.topk_ids is not None
        assert out.topk_weights is not None
        for row in delivered(out).nonzero().tolist():
            at = tuple(row)
            y[at] = 0
            for slot, w in zip(out.topk_ids[at].tolist(), out.topk_weights[at].double(), strict=True):
                if slot >= 0:
                    y[at] += w * (tokens[at] @ experts[int(mine[slot])])
    return y.to(config.resolved_output_dtype)


def config_of(case: RoutingCase, layout: Layout, **overrides: Any) -> MoEConfig:
    return case.config(LonelyGroup(size=case.num_ranks), mode=Mode.HT, layout=layout, **overrides)


def inputs(case: RoutingCase, dtype: torch.dtype) -> list[torch.Tensor]:
    """Finite payloads."""
    return [case.x(r, dtype).float().nan_to_num(1.0, 2.0, 3.0).clamp(-64, 64).to(dtype) for r in range(case.num_ranks)]


@settings(max_examples=60)
@given(
    routing_cases(),
    st.sampled_from(list(Layout)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_equals_a_dense_moe(case: RoutingCase, layout: Layout, dtype: torch.dtype, lose_one: bool) -> None:
    if case.kind == "repeated" and layout is Layout.EXPERT_MAJOR:
        case = replace(case, kind="uniform")
    active = [r != 1 or not lose_one for r in range(case.num_ranks)]
    config, xs = config_of(case, layout, dtype=dtype), inputs(case, dtype)
    ids = [case.topk_ids(r) for r in range(case.num_ranks)]
    weights = [case.topk_weights(r) for r in range(case.num_ranks)]
    outs, step = reference.dispatch(config, xs, ids, weights, active=active)
    zs, _ = reference.combine(step, [run_experts(case, config, out, r) for r, out in enumerate(outs)])
    for rank in range(case.num_ranks):
        if not active[rank]:
            assert len(zs[rank]) == 0
            continue
        want, size = dense(case, xs, rank, active)
        # each term is rounded once as y, once as a partial, once as z, besides fp32 sums of at most 2K + R terms
        bound = size * (4 * EPS[dtype] + 32 * EPS[torch.float32]) + 1e-6
        assert ((zs[rank].double() - want).abs() <= bound).all()
        assert torch.equal(outs[rank].valid, route(case.expert_map, ids[rank], rank, active).valid)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_quantised_dispatch_delivers_the_quantiser(layout: Layout, scale_format: ScaleFormat) -> None:
    case = RoutingCase(5, 3, 144, (4, 0, 6), "single_none", draw_seed())
    config = config_of(case, layout, quantize=True, scale_format=scale_format)
    xs = [case.x(r, torch.bfloat16) for r in range(3)]
    ids, weights = [case.topk_ids(r) for r in range(3)], [case.topk_weights(r) for r in range(3)]
    outs, step = reference.dispatch(config, xs, ids, weights)
    for rank, out in enumerate(outs):
        assert out.tokens.dtype == torch.float8_e4m3fn
        assert out.scales is not None
        if scale_format is ScaleFormat.UE8M0_PACKED:
            packed_layout(out.scales)
        for source in range(3):
            place = step.places[rank][source]
            q, scales = quant.quantize(xs[source], scale_format)
            for t, k in (place >= 0).nonzero().tolist():
                row = int(place[t, k])
                same_bits(out.tokens.flatten(0, -2)[row], q[t], f"{case} rank {rank} token {source}/{t}")
                same_bits(out.scales.flatten(0, -2)[row], scales[t], f"{case} scales of {source}/{t}")


def test_fp8_combine_error() -> None:
    case = RoutingCase(8, 4, 256, (5, 7), "uniform", draw_seed())
    config = config_of(case, Layout.GROUPED, combine_dtype=torch.float8_e4m3fn)
    xs = inputs(case, torch.bfloat16)
    ids, weights = [case.topk_ids(r) for r in range(2)], [case.topk_weights(r) for r in range(2)]
    outs, step = reference.dispatch(config, xs, ids, weights)
    zs, _ = reference.combine(step, [run_experts(case, config, out, r) for r, out in enumerate(outs)])
    for rank in range(2):
        want, size = dense(case, xs, rank, [True, True])
        blocks = size.view(-1, 2, 128).amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
        assert ((zs[rank].double() - want).abs() <= size * 2**-3 + blocks * 2**-8).all()


def test_exact_and_pre_reduced_differ_only_in_rounding() -> None:
    case = RoutingCase(8, 6, 64, (9, 4), "uniform", draw_seed())
    ids, weights = [case.topk_ids(r) for r in range(2)], [case.topk_weights(r) for r in range(2)]
    results = []
    for exact in (False, True):
        config = config_of(case, Layout.EXPERT_MAJOR, exact_combine=exact, output_dtype=torch.float32)
        outs, step = reference.dispatch(config, inputs(case, torch.bfloat16), ids, weights)
        results.append(reference.combine(step, [run_experts(case, config, o, r) for r, o in enumerate(outs)])[0])
    assert not torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)


def test_negative_zero_survives_a_single_term() -> None:
    case = RoutingCase(2, 1, 16, (1, 0), "uniform", 3)
    for layout in Layout:
        config = config_of(case, layout)
        outs, step = reference.dispatch(
            config, [torch.full((1, 16), -0.0).bfloat16(), torch.empty(0, 16).bfloat16()],
            [case.topk_ids(r) for r in range(2)], [torch.ones(1, 1), torch.empty(0, 1)],
        )  # fmt: skip
        zs, _ = reference.combine(step, [out.tokens for out in outs])
        assert zs[0].signbit().all(), layout


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED, Layout.FLAT])
def test_overflow_drops_in_canonical_order(layout: Layout) -> None:
    case = RoutingCase(3, 2, 16, (4, 4), "k_hot", draw_seed())
    full = config_of(case, layout, overflow=Overflow.DROP)
    tight = config_of(case, layout, overflow=Overflow.DROP, max_recv_rows=3)
    args = ([case.x(r, torch.bfloat16) for r in range(2)], [case.topk_ids(r) for r in range(2)],
            [case.topk_weights(r) for r in range(2)])  # fmt: skip
    everything, _ = reference.dispatch(full, *args)
    kept, step = reference.dispatch(tight, *args)
    for all_rows, few in zip(everything, kept, strict=True):
        assert int(few.num_dropped) == int(all_rows.counts.sum() - few.counts.sum())
        if layout is Layout.EXPERT_MAJOR:
            assert few.counts.tolist() == all_rows.counts.clamp(max=3).tolist()
            same_bits(few.tokens, all_rows.tokens[:, :3], "first slots")
        else:
            assert len(few.tokens) == min(3, len(all_rows.tokens))
            same_bits(few.tokens, all_rows.tokens[:3], "first rows")
    zs, _ = reference.combine(step, [out.tokens for out in kept])
    lost = [all((step.places[d][s][t] < 0).all() for d in range(2)) for s in range(2) for t in range(4)]
    assert any(lost), "the case is tight enough to lose whole tokens"
    assert all((torch.cat(zs)[i] == 0).all() for i, gone in enumerate(lost) if gone)


def test_row_weights_come_home() -> None:
    case = RoutingCase(6, 3, 16, (5, 2), "single_none", draw_seed(), replicated(2, 6, 2, 4))
    weights = [case.topk_weights(r) for r in range(2)]
    ids = [case.topk_ids(r) for r in range(2)]
    for layout in Layout:
        outs, step = reference.dispatch(
            config_of(case, layout), [case.x(r, torch.bfloat16) for r in range(2)], ids, weights
        )
        if layout.per_expert:
            rows = [torch.full(out.tokens.shape[:-1], float("nan")) for out in outs]
            for rank in range(2):
                for source in range(2):
                    place = step.places[rank][source]
                    rows[rank].view(-1)[place[place >= 0]] = weights[source][place >= 0]
        else:
            rows = [out.topk_weights for out in outs if out.topk_weights is not None]
        _, home = reference.combine(step, [o.tokens for o in outs], row_weights=rows, apply_weights=False)
        assert home is not None
        for rank in range(2):
            assert torch.equal(home[rank], torch.where(ids[rank] >= 0, weights[rank], 0.0))


def test_order_of_domains_is_that_of_ranks_in_one_domain_and_another_in_two() -> None:
    """In two domains, the sum of the other one is rounded as it crosses: the bits differ for somebody."""
    case = RoutingCase(8, 6, 64, (9, 7, 8, 5), seed=draw_seed())
    base = case.config(LonelyGroup(0, 4))
    ids, weights = [case.topk_ids(r) for r in range(4)], [case.topk_weights(r) for r in range(4)]

    def combined(order: CombineOrder, domains: list[int] | None) -> list[torch.Tensor]:
        config = msgspec.structs.replace(base, combine_order=order)
        xs = [
            torch.randn(t, 64, generator=torch.Generator().manual_seed(r)).bfloat16() for r, t in enumerate(case.tokens)
        ]
        outs, step = reference.dispatch(config, xs, ids, weights)
        return reference.combine(step, [out.tokens for out in outs], domains=domains)[0]

    by_rank = combined(CombineOrder.RANK, [0, 0, 2, 2])
    one = combined(CombineOrder.DOMAIN, [0, 0, 0, 0])
    two = combined(CombineOrder.DOMAIN, [0, 0, 2, 2])
    assert all(torch.equal(a, b) for a, b in zip(by_rank, one, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(by_rank, two, strict=True))


def test_order_of_domains_by_hand() -> None:
    """2^-8, 1 and 2^-8 in bf16, whose last bit of 1 is 2^-7: a partial alone in its domain crosses as it is; the sum of
    two crosses rounded, and loses the bit, but not in the domain of the token's own rank."""
    case = RoutingCase(3, 3, 8, (1, 0, 0))
    config = msgspec.structs.replace(case.config(LonelyGroup(0, 3)), combine_order=CombineOrder.DOMAIN)
    ids = [torch.tensor([[0, 1, 2]], dtype=torch.int32), *[torch.zeros(0, 3, dtype=torch.int32)] * 2]
    weights = [torch.ones(1, 3), *[torch.zeros(0, 3)] * 2]
    xs = [torch.ones(1, 8).bfloat16(), *[torch.zeros(0, 8).bfloat16()] * 2]
    outs, step = reference.dispatch(config, xs, ids, weights)
    values, kept = (2.0**-8, 1.0, 2.0**-8), 1 + 2.0**-7
    ys = [torch.full_like(out.tokens, value) for out, value in zip(outs, values, strict=True)]
    for domains, want in (([0, 1, 2], kept), ([0, 1, 1], 1.0), ([0, 0, 0], kept), ([0, 0, 2], kept)):
        z = reference.combine(step, ys, domains=domains)[0][0]
        assert z[0, 0] == torch.tensor(want).bfloat16(), domains


ORDERED = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(list(Layout)),
        "combine_dtype": st.sampled_from([None, torch.float8_e4m3fn]),
        "combine_order": st.sampled_from(list(CombineOrder)),
    }
)


@settings(max_examples=60)
@given(routing_cases(), ORDERED, st.data())
def test_the_order_of_sums_is_the_one_that_is_written_down(
    case: RoutingCase, overrides: dict[str, Any], data: st.DataObject
) -> None:
    """Token by token and addend by addend, for any hosts: the same bits; near the sum in float64; DOMAIN of one host is
    RANK."""
    config = config_of(case, **overrides)
    ranks = range(case.num_ranks)
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=case.num_ranks, max_size=case.num_ranks))
    domains = [drawn.index(host) for host in drawn]
    xs = [torch.randn(case.tokens[r], case.hidden_size, generator=seeded(case, r)).bfloat16() for r in ranks]
    ids, weights = [case.topk_ids(r) for r in ranks], [case.topk_weights(r) for r in ranks]
    outs, step = reference.dispatch(config, xs, ids, weights)
    ys = [torch.randn(out.tokens.shape, generator=seeded(case, 7 + r)).bfloat16() for r, out in enumerate(outs)]
    zs, _ = reference.combine(step, ys, domains=domains)
    for source in ranks:
        same_bits(zs[source], summed(step, ys, source, domains), f"z of rank {source}")
        exact, size = summed_exactly(step, ys, source)
        most = 0.2 if config.combine_dtype is not None else 4 * EPS[torch.bfloat16]
        assert ((zs[source].double() - exact).abs() <= most * size).all()
    one = msgspec.structs.replace(config, combine_order=CombineOrder.DOMAIN)
    by_rank = msgspec.structs.replace(config, combine_order=CombineOrder.RANK)
    together, apart = (
        reference.combine(replace(step, config=each), ys, domains=[0] * case.num_ranks)[0] for each in (one, by_rank)
    )
    for a, b in zip(together, apart, strict=True):
        same_bits(a, b, "one host")


def seeded(case: RoutingCase, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(case.seed * 16 + stream)


def partials_of(step: reference.ReferenceStep, ys: list[torch.Tensor], source: int, t: int) -> dict[int, torch.Tensor]:
    """float32 [H] by rank that token t was routed to: its rows there, weighted, in ascending k; not yet rounded."""
    per_expert, found = step.config.resolved_layout.per_expert, dict[int, list[torch.Tensor]]()
    for k, rank in enumerate(step.routes[source].rank[t].tolist()):
        rows = found.setdefault(rank, [])
        place = int(step.places[rank][source][t, k]) if rank >= 0 else -1
        if place >= 0 and (per_expert or not rows):
            row = ys[rank].flatten(0, -2)[place].float()
            rows.append(row * step.weights[source][t, k] if per_expert else row)
    found.pop(-1, None)
    return {rank: running(rows) if rows else torch.zeros(ys[rank].shape[-1]) for rank, rows in sorted(found.items())}


def moved(config: MoEConfig, row: torch.Tensor) -> torch.Tensor:
    if config.combine_dtype is None:
        return row.bfloat16().float()
    return quant.dequantize(*quant.quantize(row[None]))[0]


def summed(step: reference.ReferenceStep, ys: list[torch.Tensor], source: int, domains: list[int]) -> torch.Tensor:
    """z [T, H] of a source as docs and `CombineOrder` say it."""
    z = torch.zeros(len(step.routes[source].rank), ys[0].shape[-1])
    for t in range(len(z)):
        addends = {rank: moved(step.config, row) for rank, row in partials_of(step, ys, source, t).items()}
        if step.config.combine_order is CombineOrder.DOMAIN:
            hosts: dict[int, list[torch.Tensor]] = {}
            for rank, row in addends.items():
                hosts.setdefault(domains[rank], []).append(row)
            crossing = {host: len(rows) > 1 and host != domains[source] for host, rows in hosts.items()}
            sums = {host: running(rows) for host, rows in sorted(hosts.items())}
            addends = {host: moved(step.config, row) if crossing[host] else row for host, row in sums.items()}
        if addends:
            z[t] = running(list(addends.values()))
    return z.to(step.config.resolved_output_dtype)


def running(rows: list[torch.Tensor]) -> torch.Tensor:
    """Their sum, one after the other, from the first on."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def summed_exactly(
    step: reference.ReferenceStep, ys: list[torch.Tensor], source: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of all weighted rows, sum of their sizes) in float64; of fp8 the size is that of the largest in the row."""
    shape = (len(step.routes[source].rank), ys[0].shape[-1])
    total, size = torch.zeros(shape, dtype=torch.float64), torch.full(shape, 1e-6, dtype=torch.float64)
    for t in range(shape[0]):
        for row in partials_of(step, ys, source, t).values():
            total[t] += row.double()
            size[t] += row.double().abs().max() if step.config.combine_dtype is not None else row.double().abs()
    return total, size
