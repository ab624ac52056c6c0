"""What a rank does with `crossdock.deep_ep.ElasticBuffer`: every call of DeepEP V2 that is offered, compared with plain
torch over the inputs of all ranks, rows and sums bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossdock.deep_ep import (
    Buffer,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    get_logical_domain_size,
    get_physical_domain_size,
)
from ep_kernels import ArgumentError, ClosedError, ConfigError
from tests.transports.deep_ep_steps import BF16, Peers, factor_of, mine_as, next_step, payload, raises, spoil


class Way(NamedTuple):
    """How a dispatch is asked for."""

    do_expand: bool
    do_cpu_sync: bool
    expert_alignment: int
    kind: str = "bf16"
    asynchronous: bool = False


def elastic(peers: Peers, **options: Any) -> ElasticBuffer:
    """A buffer of the process group's ranks."""
    return ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=peers.case.max_tokens or 0, hidden=peers.case.hidden_size,
        num_topk=peers.case.topk, explicitly_destroy=True, **options,
    )  # fmt: skip


def aligned(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment


def places(peers: Peers, way: Way) -> list[tuple[int, int, int]]:
    """(row, source rank, token) of every row that this rank must get."""
    if not way.do_expand:
        return [(row, source, token) for row, (source, token) in enumerate(peers.rows())]
    found, begin = [], 0
    for local in range(peers.num_local):
        arrived = peers.arrivals(peers.rank * peers.num_local + local)
        found += [(begin + i, source, token) for i, (source, token) in enumerate(arrived)]
        begin += aligned(len(arrived), way.expert_alignment)
    return found


def expert_of_row(peers: Peers, way: Way) -> dict[int, int]:
    """Local expert of each expanded row."""
    found, begin = {}, 0
    for local in range(peers.num_local):
        number = len(peers.arrivals(peers.rank * peers.num_local + local))
        found |= {begin + i: local for i in range(number)}
        begin += aligned(number, way.expert_alignment)
    return found


def check_handle(peers: Peers, handle: EPHandle, way: Way) -> None:
    """Counts and prefix sums."""
    case, a = peers.case, way.expert_alignment
    counts = [len(peers.arrivals(peers.rank * peers.num_local + local)) for local in range(peers.num_local)]
    by_rank = [sum(source == rank for source, _ in peers.rows()) for rank in range(case.num_ranks)]
    padded = [aligned(count, a) for count in counts]
    ends = [sum(padded[: i + 1]) for i in range(len(counts))]
    unpadded = [end - more + count for end, more, count in zip(ends, padded, counts, strict=True)]
    prefix = handle.psum_num_recv_tokens_per_scaleup_rank
    assert prefix.dtype == handle.psum_num_recv_tokens_per_expert.dtype == torch.int32
    assert prefix.tolist() == [sum(by_rank[: i + 1]) for i in range(case.num_ranks)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == (unpadded if way.do_expand else ends)
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.num_recv_tokens_per_expert_list == (padded if way.do_cpu_sync else [])
    assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (way.do_expand, case.num_experts, a)
    assert handle.num_max_tokens_per_rank == case.max_tokens
    most = case.num_ranks * (case.max_tokens or 0)
    expanded = aligned(most * min(case.topk, peers.num_local) + (a - 1) * peers.num_local, a)
    sizes = (len(peers.rows()), sum(padded)) if way.do_cpu_sync else (most, expanded)
    assert (handle.num_recv_tokens, handle.num_expanded_tokens) == sizes


def check_rows(peers: Peers, got: Any, way: Way, num_rows: int) -> None:
    """Rows, and their scales, bit for bit."""
    sent = [payload(peers, source, way.kind) for source in range(peers.case.num_ranks)]
    parts = zip(*(each if isinstance(each, tuple) else (each,) for each in sent), strict=True)
    for tensor, sources in zip(got if isinstance(got, tuple) else (got,), parts, strict=True):
        assert tensor.dtype == sources[0].dtype
        assert tensor.shape == (num_rows, sources[0].shape[1])
        for row, source, token in places(peers, way):
            mine = tensor[row].cpu().contiguous().view(torch.uint8)
            assert torch.equal(mine, sources[source][token].view(torch.uint8))


def check_weights(peers: Peers, ids: Any, weights: torch.Tensor, way: Way) -> None:
    """Local ids and weights; 0 and -1 wherever no expert of this rank is."""
    low = peers.rank * peers.num_local
    want = torch.zeros(weights.shape)
    if way.do_expand:
        assert ids is None
        experts = expert_of_row(peers, way)
        for row, source, token in places(peers, way):
            k = (peers.ids(source)[token] == low + experts[row]).nonzero()[0]
            want[row] = peers.weights(source)[token, k]
    else:
        local = torch.full(ids.shape, -1)
        for row, source, token in places(peers, way):
            here = (peers.ids(source)[token] >= low) & (peers.ids(source)[token] < low + peers.num_local)
            local[row] = torch.where(here, peers.ids(source)[token] - low, -1)
            want[row] = torch.where(here, peers.weights(source)[token], 0.0)
        assert torch.equal(ids.cpu(), local)
    assert torch.equal(weights.cpu(), want)


def one_row(x: torch.Tensor, expert: int, weight: torch.Tensor) -> torch.Tensor:
    """What an expert makes of a row, weighted, as an engine rounds it."""
    return ((x.float() * factor_of(expert)).to(BF16).float() * weight).to(BF16)


def experts(peers: Peers, way: Way, num_rows: int) -> torch.Tensor:
    """Rows for combine; NaN wherever nothing must be read."""
    low = peers.rank * peers.num_local
    y = torch.full((num_rows, peers.case.hidden_size), float("nan"), dtype=BF16)
    of_row = expert_of_row(peers, way)
    for row, source, token in places(peers, way):
        ids, x = peers.ids(source)[token], peers.x(source)[token]
        total = torch.zeros(peers.case.hidden_size)
        for k, expert in enumerate(ids.tolist()):
            if (expert == low + of_row[row]) if way.do_expand else low <= expert < low + peers.num_local:
                total += one_row(x, expert, peers.weights(source)[token, k]).float()
        y[row] = total.to(BF16)
    return y.to(peers.device)


def home(peers: Peers, bias: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
    """What combine gives this rank: a rank's rows in ascending k, rounded, then ranks in ascending order, rounded."""
    x, ids, weights = peers.x(peers.rank), peers.ids(peers.rank), peers.weights(peers.rank)
    total = torch.zeros(x.shape)
    for rank in range(peers.case.num_ranks):
        partial = torch.zeros(x.shape)
        for t, k in ((ids >= 0) & (ids // peers.num_local == rank)).nonzero().tolist():
            partial[t] += one_row(x[t], int(ids[t, k]), weights[t, k]).float()
        total += partial.to(BF16).float()
    for each in bias:
        total = (total.to(BF16).float() if each is bias[0] else total) + each.cpu().float()
    return total.to(BF16)


def steps(_: Buffer, peers: Peers, way: Way) -> None:
    """Dispatch and combine, several times over, in one way."""
    buffer = elastic(peers, use_fp8_dispatch=way.kind == "blocks")
    stats = torch.zeros(peers.num_local, dtype=torch.int32, device=peers.device)
    seen, options = torch.zeros(peers.num_local, dtype=torch.int64), way._asdict()
    kind, asynchronous = options.pop("kind"), options.pop("asynchronous")
    for number in range(3):
        step = next_step(peers, number)
        _, ids, weights = step.mine()
        before = {"previous_event": buffer.capture(), "allocate_on_comm_stream": True} if asynchronous else {}
        got, local, came, handle, event = buffer.dispatch(
            mine_as(step, kind), ids, weights, stats, step.case.num_experts, do_zero_padding=way.do_expand,
            async_with_compute_stream=asynchronous, num_sms=(0, 8, 20)[number], **options, **before,
        )  # fmt: skip
        assert (event.event is not None) == asynchronous
        event.current_stream_wait()
        rows = handle.num_expanded_tokens if way.do_expand else handle.num_recv_tokens
        check_handle(step, handle, way)
        check_rows(step, got, way, rows)
        check_weights(step, local, came, way)
        seen += handle.num_unaligned_recv_tokens_per_expert.cpu()
        assert torch.equal(stats.cpu().long(), seen)
        bias = tuple(torch.randn_like(step.x(step.rank)).to(step.device) for _ in range(number))
        z, brought, event = buffer.combine(
            experts(step, way, rows), handle, topk_weights=came, bias=bias or None,
            async_with_compute_stream=asynchronous, previous_event_before_epilogue=EventOverlap(EventHandle()),
        )  # fmt: skip
        event.current_stream_wait()
        assert torch.equal(z.cpu(), home(step, bias))
        assert torch.equal(brought.cpu(), torch.where(step.ids(step.rank) >= 0, step.weights(step.rank), 0.0))
    buffer.destroy()


def again(_: Buffer, peers: Peers, do_expand: bool, do_cpu_sync: bool) -> None:
    """A handle's routing for other rows and weights, as a backward pass has it, whatever the caller overwrites."""
    buffer, way = elastic(peers), Way(do_expand, do_cpu_sync, 4)
    x, ids, weights = peers.mine()
    _, local, _, handle, _ = buffer.dispatch(
        x, ids, weights, num_experts=peers.case.num_experts, expert_alignment=4, do_expand=do_expand,
        do_cpu_sync=do_cpu_sync,
    )  # fmt: skip
    rows = handle.num_expanded_tokens if do_expand else handle.num_recv_tokens
    kept = handle.topk_idx.clone()
    spoil(x, ids, weights)
    assert torch.equal(handle.topk_idx, kept)
    for kind in ("bf16", "fp32", "blocks"):
        got, found, none, same, _ = buffer.dispatch(mine_as(peers, kind), handle=handle, do_expand=do_expand)
        assert same is handle
        assert none is None
        assert do_expand or torch.equal(found, local)
        check_rows(peers, got, way._replace(kind=kind), rows)
    options = {"handle": handle, "do_expand": do_expand, "do_zero_padding": do_expand}
    got, found, came, _, _ = buffer.dispatch(mine_as(peers, "bf16"), topk_weights=peers.mine()[2], **options)
    check_rows(peers, got, way, rows)
    check_weights(peers, found, came, way)
    z, _, _ = buffer.combine(experts(peers, way, rows), handle)
    assert torch.equal(z.cpu(), home(peers))
    buffer.destroy()


def details(_: Buffer, peers: Peers) -> None:
    """Column-major scales, padding of 0, ids that are not copied, no weights."""
    buffer, (x, ids, weights) = elastic(peers), peers.mine()
    options = {"num_experts": peers.case.num_experts, "expert_alignment": 8, "do_expand": True}
    (rows, scales), _, came, handle, _ = buffer.dispatch(
        mine_as(peers, "blocks"), ids, weights, do_zero_padding=True, use_tma_aligned_col_major_sf=True, **options
    )
    way = Way(True, True, 8, "blocks")
    check_rows(peers, (rows, scales), way, handle.num_expanded_tokens)
    assert scales.stride(0) == 1
    assert scales.stride(1) == max(4, aligned(len(scales), 4))
    padding = torch.ones(len(rows), dtype=torch.bool)
    padding[list(expert_of_row(peers, way))] = False
    assert not rows.cpu()[padding].view(torch.uint8).any()
    assert not scales.cpu()[padding].any()
    assert not came.cpu()[padding].any()
    handle = buffer.dispatch(x, ids, **options, do_handle_copy=False)[3]
    assert handle.topk_idx is ids
    assert buffer.dispatch(x, ids, **options)[2] is None, "no weights came"
    assert len(buffer._pool.communicators()) == 2, "one for each dtype of rows, expanded or not"
    buffer.destroy()


def sizes(_: Buffer, peers: Peers) -> None:
    """What callers ask before they call; the barrier; one communicator for all numbers of tokens up to M."""
    buffer, ranks = elastic(peers), peers.case.num_ranks
    assert (buffer.rank_idx, buffer.num_ranks, buffer.scaleup_rank_idx) == (peers.rank, ranks, peers.rank)
    assert buffer.get_logical_domain_size() == get_logical_domain_size(dist.group.WORLD) == (1, ranks)
    assert buffer.get_physical_domain_size() == get_physical_domain_size(dist.group.WORLD) == (1, ranks)
    hint = ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, 128, 7168, 8)
    assert hint > ranks * 128 * 7168 * 2
    assert hint % (1 << 21) == 0
    assert buffer.num_bytes % (1 << 21) == 0
    assert ElasticBuffer(dist.group.WORLD, num_bytes=4096).num_bytes == 4096
    sms = buffer.get_theoretical_num_sms(num_experts=256, num_topk=8)
    assert sms >= 4
    assert sms % 2 == 0
    assert buffer.get_theoretical_num_qps(sms) == 0
    buffer.barrier()
    _, ids, weights = peers.mine()
    for most in (8, 16, 64, 100):
        rows = buffer.dispatch(
            peers.mine()[0], ids, weights, num_experts=peers.case.num_experts, num_max_tokens_per_rank=most,
            do_cpu_sync=False,
        )[0]  # fmt: skip
        assert len(rows) == ranks * most
    assert len(buffer._pool.communicators()) == 1
    buffer.destroy()
    with raises(ClosedError, "destroyed"):
        buffer.dispatch(*peers.mine(), num_experts=peers.case.num_experts)


def wrong(_: Buffer, peers: Peers) -> None:
    """Arguments that are wrong are named, before anything is sent."""
    buffer, (x, ids, weights), number = elastic(peers), peers.mine(), peers.case.num_experts
    handle = buffer.dispatch(x, ids, weights, num_experts=number, expert_alignment=2)[3]
    with raises(ArgumentError, "topk_idx: expected int64"):
        buffer.dispatch(x, ids.int(), num_experts=number)
    with raises(ArgumentError, "num_experts: expected the number of all experts, got None"):
        buffer.dispatch(x, ids)
    with raises(ArgumentError, "num_max_tokens_per_rank: expected T = "):
        buffer.dispatch(x, ids, num_experts=number, num_max_tokens_per_rank=0)
    with raises(ArgumentError, "do_zero_padding: expected False unless do_expand"):
        buffer.dispatch(x, ids, num_experts=number, do_zero_padding=True)
    with raises(ArgumentError, "cumulative_local_expert_recv_stats: expected int32"):
        buffer.dispatch(x, ids, weights, torch.zeros(1), number)
    with raises(ArgumentError, "expert_alignment: expected an int >= 1, got 0"):
        buffer.dispatch(x, ids, num_experts=number, expert_alignment=0)
    with raises(ArgumentError, "topk_idx: expected None beside a handle"):
        buffer.dispatch(x, ids, handle=handle)
    with raises(ArgumentError, "do_cpu_sync: expected None or False beside a handle"):
        buffer.dispatch(x, handle=handle, do_cpu_sync=True)
    with raises(ArgumentError, "do_expand: expected False as of the handle, got True"):
        buffer.dispatch(x, handle=handle, do_expand=True)
    with raises(ArgumentError, "expert_alignment: expected 2 as of the handle, got 4"):
        buffer.dispatch(x, handle=handle, expert_alignment=4)
    with raises(ArgumentError, "handle: expected what dispatch gave, got tuple"):
        buffer.combine(x, (1, 2))  # type: ignore[arg-type]
    rows = handle.num_recv_tokens
    with raises(ArgumentError, rf"x: expected \[{rows}, H\]"):
        buffer.combine(x.new_zeros(rows + 1, x.shape[1]), handle)
    with raises(ArgumentError, rf"topk_weights: expected float32 \[{rows}, {ids.shape[1]}\]"):
        buffer.combine(x.new_zeros(rows, x.shape[1]), handle, topk_weights=torch.zeros(rows))
    with raises(ArgumentError, "bias: expected up to two"):
        buffer.combine(x.new_zeros(rows, x.shape[1]), handle, bias=torch.zeros(1, 1))
    with raises(ConfigError, r"ElasticBuffer\(num_gpus\): expected no such keyword"):
        elastic(peers, num_gpus=3)
    with raises(ArgumentError, "num_cpu_bytes: expected 0"):
        elastic(peers, num_cpu_bytes=4096)
    buffer.destroy()


def overlapped(buffer: Buffer, peers: Peers, hooked: bool) -> int:
    """Single-batch overlap as SGLang asks for it: the rows are not there yet when combine is called, but when it is
    waited for. The number of lines that the log got."""
    from crossdock.deep_ep import buffer as module

    x, ids, weights = peers.mine()
    with mock.patch.object(module.log, "warning") as said:
        for number in range(2):
            rows, counts, handle, _, _ = buffer.low_latency_dispatch(
                x, ids, peers.case.max_tokens or 0, peers.case.num_experts, use_fp8=False
            )
            y = torch.full_like(rows, float("nan"))
            signals = torch.zeros(peers.num_local, dtype=torch.int32, device=peers.device)
            hopper = {"packed_recv_count": counts, "comp_signal": signals, "block_m": 64, "threshold": 8, "num_sms": 3}
            blackwell = {"src_signals": signals, "src_signal_expect_value": 8}
            z, event, hook = buffer.low_latency_combine(
                x=y, topk_idx=ids, topk_weights=weights, handle=handle, async_finish=not hooked, overlap=True,
                return_recv_hook=hooked, **(hopper, blackwell)[number],
            )  # fmt: skip
            y.copy_(rows)
            for _ in range(2):  # a second call does nothing
                hook() if hooked else event.current_stream_wait()
            torch.testing.assert_close(z.float().cpu(), peers.expected(lambda _: 1.0), atol=2e-2, rtol=2e-2)
        z, _, _ = buffer.low_latency_combine(rows, ids, weights, handle, overlap=False, **hopper)
        torch.testing.assert_close(z.float().cpu(), peers.expected(lambda _: 1.0), atol=2e-2, rtol=2e-2)
        with pytest.raises(ArgumentError, match="overlap: expected False without return_recv_hook or async_finish"):
            buffer.low_latency_combine(rows, ids, weights, handle, overlap=True)
    return len(said.mock_calls)
