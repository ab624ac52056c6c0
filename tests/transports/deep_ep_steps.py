"""What a rank does with `crossdock.deep_ep`: every call that frameworks make, compared with plain torch over the inputs
of all ranks. Knows nothing of the communicator below, so that it is a second opinion."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from crossdock.common.config import FrameworkConfig
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.common.transports import installed
from crossdock.deep_ep import Buffer, EventHandle, EventOverlap
from ep_kernels import (
    AbortedError,
    ArgumentError,
    ClosedError,
    ConfigError,
    HandleError,
    Mode,
    MoECommunicator,
    quant,
)
from ep_kernels.types import ScaleFormat
from tests.cases import RoutingCase
from tests.hosts import overrides_of

BF16 = torch.bfloat16
DEADLINE_S = 30.0
"""Less than what a world waits for its ranks: a silent one is named."""


@dataclass(frozen=True)
class Peers:
    """Everybody's inputs of one step, and what they mean for this rank."""

    case: RoutingCase
    rank: int
    device: str

    @property
    def num_local(self) -> int:
        return self.case.num_experts // self.case.num_ranks

    def x(self, rank: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        values = torch.randn(self.case.tokens[rank], self.case.hidden_size, generator=self._generator(rank))
        return values.to(dtype)

    def _generator(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.case.seed * 97 + rank)

    def ids(self, rank: int) -> torch.Tensor:
        return self.case.topk_ids(rank).long()

    def weights(self, rank: int) -> torch.Tensor:
        return self.case.topk_weights(rank).abs()

    def mine(self, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        r = self.rank
        return self.x(r, dtype).to(self.device), self.ids(r).to(self.device), self.weights(r).to(self.device)

    def arrivals(self, expert: int) -> list[tuple[int, int]]:
        """(source rank, token) of each row of a global expert, in order."""
        return [
            (source, token)
            for source in range(self.case.num_ranks)
            for token in (self.ids(source) == expert).any(1).nonzero().flatten().tolist()
        ]

    def rows(self) -> list[tuple[int, int]]:
        """(source rank, token) of each row that comes to this rank once."""
        low = self.rank * self.num_local
        here = [((ids := self.ids(s)) >= low) & (ids < low + self.num_local) for s in range(self.case.num_ranks)]
        return [(s, t) for s, hit in enumerate(here) for t in hit.any(1).nonzero().flatten().tolist()]

    def expected(self, scale: Callable[[int], float]) -> torch.Tensor:
        """[T, H] of this rank where expert e multiplies by scale(e), rows rounded to bf16."""
        x, ids, weights = self.x(self.rank).float(), self.ids(self.rank), self.weights(self.rank)
        total = torch.zeros_like(x)
        for k in range(ids.shape[1]):
            factor = torch.tensor([0.0 if e < 0 else scale(e) for e in ids[:, k].tolist()])
            total += (x * factor[:, None]).to(BF16).float() * weights[:, k, None]
        return total


def factor_of(expert: int) -> float:
    """What expert e does to a row."""
    return 0.25 + expert % 5


def run(
    rank: int, size: int, store: Any, story: Callable[..., Any], case: RoutingCase, transport: str, *rest: Any
) -> Any:
    """A story over a fresh Buffer of a fresh process group. The transport follows from where the tensors are."""
    device = installed()[transport.partition("-")[0]].device_type
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    over = overrides_of(transport, rank, size, seed=case.seed).get("network")
    network = None if over is None else WorkerNetworkConfig(**msgspec.structs.asdict(over))
    settings = FrameworkConfig(timeout_s=DEADLINE_S, exit_on_fault=False, traffic=True, network=network)
    with mock.patch.object(FrameworkConfig, "from_env", return_value=settings):
        buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        try:
            return story(buffer, Peers(case, rank, device), *rest)
        finally:
            buffer.destroy()
            dist.destroy_process_group()


def next_step(peers: Peers, number: int) -> Peers:
    """Other numbers of the same shapes."""
    return Peers(RoutingCase(**{**peers.case.__dict__, "seed": peers.case.seed + number}), peers.rank, peers.device)


@contextmanager
def raises(kind: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(kind, match=match):
        yield


# Low latency.


def ll_rows(peers: Peers, received: Any, counts: torch.Tensor, handle: Any, scales: ScaleFormat | None) -> torch.Tensor:
    """Check what arrived; returns the experts' outputs."""
    case, most = peers.case, handle[2]
    tokens, raw = received if scales else (received, None)
    assert tokens.shape == (peers.num_local, case.num_ranks * most, case.hidden_size)
    assert counts.dtype == torch.int32
    source, ranges = handle[0].cpu(), handle[1].cpu()
    y = torch.full(tokens.shape, float("nan"), dtype=BF16, device=peers.device)
    for local in range(peers.num_local):
        expert = peers.rank * peers.num_local + local
        arrived = peers.arrivals(expert)
        count = int(counts[local])
        assert count == len(arrived)
        assert source[local, :count].tolist() == [token for _, token in arrived]
        for rank in range(case.num_ranks):
            begin, number = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & 0xFFFFFFFF
            assert [source_rank for source_rank, _ in arrived[begin : begin + number]] == [rank] * number
        want = torch.stack([peers.x(s)[t] for s, t in arrived]) if arrived else torch.empty(0, case.hidden_size)
        got = tokens[local, :count].cpu()
        if raw is not None:
            q, scale = quant.quantize(want, scales or ScaleFormat.FP32)
            assert raw.stride(-2) == 1, "scales are column-major"
            assert torch.equal(got.view(torch.uint8), q.view(torch.uint8))
            assert torch.equal(raw[local, :count].cpu(), scale.cpu())
        else:
            assert torch.equal(got, want.to(BF16))
        y[local, :count] = (want.float() * factor_of(expert)).to(BF16).to(peers.device)
    return y


def ll_steps(buffer: Buffer, peers: Peers, scales: ScaleFormat | None, hooked: bool) -> None:
    """Dispatch and combine, several times over: rows, counts, sources, ranges, scales, sums, statistics."""
    case = peers.case
    options = {
        "use_fp8": scales is not None, "round_scale": scales not in (None, ScaleFormat.FP32),
        "use_ue8m0": scales is ScaleFormat.UE8M0_PACKED, "return_recv_hook": hooked,
    }  # fmt: skip
    stats = torch.zeros(peers.num_local, dtype=torch.int32, device=peers.device)
    seen = torch.zeros(peers.num_local, dtype=torch.int64)
    for number in range(5):
        step = next_step(peers, number)
        x, ids, weights = step.mine()
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, case.max_tokens or 0, case.num_experts, cumulative_local_expert_recv_stats=stats, **options
        )
        assert event.event is None
        if hooked:
            with raises(HandleError, "its receive hook has not been called"):
                buffer.low_latency_combine(x, ids, weights, handle)
        hook()
        hook()  # a second call does nothing
        y = ll_rows(step, received, counts, handle, scales)
        seen += counts.cpu()
        assert torch.equal(stats.cpu().long(), seen)
        out = torch.full_like(x, 7.0) if number % 2 else None
        z, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=hooked, out=out)
        hook()
        assert out is None or z is out
        torch.testing.assert_close(z.float().cpu(), step.expected(factor_of), atol=2e-2, rtol=2e-2)
    assert len(buffer._pool.communicators()) == 1


def ll_two_at_once(buffer: Buffer, peers: Peers) -> None:
    """Dual-batch overlap: two dispatches open, hooks called late and in the other's turn; then zero copy."""
    case = peers.case
    for number in range(3):
        steps = [next_step(peers, 2 * number + n) for n in range(2)]
        sent = [
            buffer.low_latency_dispatch(*s.mine()[:2], case.max_tokens or 0, case.num_experts, use_fp8=False,
                                        return_recv_hook=True)
            for s in steps
        ]  # fmt: skip
        ys = []
        for step, (received, counts, handle, _, hook) in zip(steps, sent, strict=True):
            hook()
            ys.append(ll_rows(step, received, counts, handle, None))
        homes = [
            buffer.low_latency_combine(y, *s.mine()[1:], handle, return_recv_hook=True)
            for s, y, (_, _, handle, _, _) in zip(steps, ys, sent, strict=True)
        ]
        for step, (z, _, hook) in zip(steps, homes, strict=True):
            hook()
            torch.testing.assert_close(z.float().cpu(), step.expected(factor_of), atol=2e-2, rtol=2e-2)
    handle = sent[1][2]
    with raises(ArgumentError, "zero_copy: expected get_next"):
        buffer.low_latency_combine(ys[1], *steps[1].mine()[1:], handle, zero_copy=True)
    buffer.get_next_low_latency_combine_buffer(handle).copy_(ys[1])
    z, _, _ = buffer.low_latency_combine(ys[1], *steps[1].mine()[1:], handle, zero_copy=True)
    torch.testing.assert_close(z.float().cpu(), steps[1].expected(factor_of), atol=2e-2, rtol=2e-2)


def ll_wrong(buffer: Buffer, peers: Peers) -> None:
    """Arguments that are wrong are named, before anything is sent."""
    x, ids, weights = peers.mine()
    most, experts = peers.case.max_tokens or 0, peers.case.num_experts
    with raises(ArgumentError, "topk_idx: expected int64"):
        buffer.low_latency_dispatch(x, ids.int(), most, experts)
    with raises(ArgumentError, "num_experts: expected a multiple"):
        buffer.low_latency_dispatch(x, ids, most, experts + 1)
    with raises(ArgumentError, "use_ue8m0: expected False unless"):
        buffer.low_latency_dispatch(x, ids, most, experts, use_ue8m0=True)
    with raises(ArgumentError, "handle: expected what low_latency_dispatch gave"):
        buffer.low_latency_combine(x, ids, weights, (1, 2))  # type: ignore[arg-type]
    with raises(ArgumentError, "enable_shrink"):
        Buffer(dist.group.WORLD, enable_shrink=True)
    with raises(ArgumentError, "new_num_sms"):
        Buffer.set_num_sms(3)
    with raises(ArgumentError, "combine_sms: expected None or a positive int, got 0"):
        Buffer.set_operation_sms(None, 0)
    buffer.destroy()
    with raises(ClosedError, "destroyed"):
        buffer.low_latency_dispatch(x, ids, most, experts)


# High throughput.


def ht_dispatch(buffer: Buffer, peers: Peers, x: Any, **options: Any) -> Any:
    """Layout and dispatch as frameworks call them."""
    _, ids, weights = peers.mine()
    asynchronous = options.get("async_finish", False)
    before = EventOverlap(EventHandle()) if asynchronous else None
    per_rank, rdma, per_expert, to_rank, event = buffer.get_dispatch_layout(
        ids, peers.case.num_experts, previous_event=before, async_finish=asynchronous
    )
    if asynchronous:
        event.current_stream_wait()
    owners = torch.where(ids >= 0, ids // peers.num_local, -1).cpu()
    want = torch.stack([(owners == rank).any(1) for rank in range(peers.case.num_ranks)], 1)
    assert torch.equal(to_rank.cpu(), want)
    assert per_rank.tolist() == want.sum(0).tolist()
    assert rdma is None
    assert per_expert.tolist() == [int((ids == e).sum()) for e in range(peers.case.num_experts)]
    past = torch.where(ids < 0, peers.case.num_experts + 10_000, ids)  # counts as no expert
    assert buffer.get_dispatch_layout(past, peers.case.num_experts)[2].tolist() == per_expert.tolist()
    result = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=to_rank,
        num_tokens_per_expert=per_expert, previous_event=event, **options,
    )  # fmt: skip
    if asynchronous:
        assert result[-1].event is not None
        result[-1].current_stream_wait()
    return result


def ht_check(peers: Peers, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Local ids and weights of what arrived."""
    low = peers.rank * peers.num_local
    for row, (source, token) in enumerate(peers.rows()):
        want = peers.ids(source)[token]
        here = (want >= low) & (want < low + peers.num_local)
        assert ids[row].tolist() == torch.where(here, want - low, -1).tolist()
        assert weights[row].tolist() == torch.where(here, peers.weights(source)[token], 0.0).tolist()


def ht_experts(peers: Peers, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What this rank's experts make of the rows, weighed and reduced."""
    low, total = peers.rank * peers.num_local, torch.zeros(rows.shape, device=rows.device)
    for local in range(peers.num_local):
        share = torch.where(ids == local, weights, 0.0).sum(1, keepdim=True)
        total += (rows.float() * factor_of(low + local)).to(BF16).float() * share
    return total.to(BF16)


def ht_waits_once(buffer: Buffer, peers: Peers) -> None:
    """On a GPU: a step reads the device once, as torch sees it; its combine and its routing again do not."""
    x, ids, weights = peers.mine()
    _, _, per_expert, _, _ = buffer.get_dispatch_layout(ids, peers.case.num_experts)

    def waits(call: Callable[[], Any]) -> tuple[int, Any]:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                result = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(each.message) for each in seen), result

    def step() -> Any:
        return buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=per_expert)

    step()
    number, (rows, _, _, _, handle, _) = waits(step)
    assert number == 1
    assert waits(lambda: buffer.combine(rows, handle))[0] == 0
    assert waits(lambda: buffer.dispatch(x, handle=handle))[0] == 0


def ht_steps(buffer: Buffer, peers: Peers, asynchronous: bool) -> None:
    """Steps that grow; rows that stay when others come; the same routing again; weights brought home."""
    kept = []
    for number, factor in enumerate((1, 3, 40, 2)):
        tokens = tuple(factor * t for t in peers.case.tokens)
        step = Peers(
            RoutingCase(**{**peers.case.__dict__, "tokens": tokens, "seed": peers.case.seed + number}),
            peers.rank, peers.device,
        )  # fmt: skip
        x = step.mine()[0]
        rows, ids, weights, counts, handle, _ = ht_dispatch(buffer, step, x, async_finish=asynchronous)
        want = torch.stack([step.x(s)[t] for s, t in step.rows()]) if step.rows() else x.new_empty(0, x.shape[1]).cpu()
        assert torch.equal(rows.cpu(), want.to(BF16))
        assert ids.dtype == torch.int64
        ht_check(step, ids.cpu(), weights.cpu())
        assert counts == [int((ids == local).sum()) for local in range(step.num_local)]
        y = ht_experts(step, rows, ids, weights)
        z, none, event = buffer.combine(y, handle, async_finish=asynchronous)
        event.current_stream_wait()
        assert none is None
        torch.testing.assert_close(z.float().cpu(), step.expected(factor_of), atol=5e-2, rtol=5e-2)
        kept.append((step, rows, want, handle, weights, ids))
        for old, old_rows, old_want, old_handle, old_weights, old_ids in kept:
            assert torch.equal(old_rows.cpu(), old_want.to(BF16)), "rows are the caller's to keep"
            ht_again(buffer, old, old_handle, old_weights, old_ids)


def ht_again(buffer: Buffer, step: Peers, handle: Any, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """What a backward pass does with a handle: other rows by its routing, and weights brought home."""
    x = step.mine()[0]
    again, *nothing, _ = buffer.internode_dispatch(x * 2, handle=handle)
    assert nothing == [None] * 4
    want = [step.x(s)[t] * 2 for s, t in step.rows()]
    assert torch.equal(again.cpu(), torch.stack(want) if want else again.cpu()[:0])
    z, home, _ = buffer.internode_combine(again, handle, topk_weights=weights, bias=x)
    reached = torch.stack([(step.ids(step.rank) // step.num_local == r).any(1) for r in range(step.case.num_ranks)], 1)
    hits = torch.where((step.ids(step.rank) >= 0).any(1), reached.sum(1), 0)[:, None]
    torch.testing.assert_close(z.float().cpu(), step.x(step.rank).float() * (2 * hits + 1), atol=5e-2, rtol=2e-2)
    assert torch.equal(home.cpu(), torch.where(step.ids(step.rank) >= 0, step.weights(step.rank), 0.0))


def ht_scaled(buffer: Buffer, peers: Peers) -> None:
    """fp8 rows with the caller's scales [T, S] and [T]; alignment; the routing again in another dtype."""
    x, _, _ = peers.mine()
    q, scales = quant.quantize(x)
    (rows, raw), ids, weights, counts, handle, _ = ht_dispatch(buffer, peers, (q, scales), expert_alignment=8)
    pairs = [quant.quantize(peers.x(s)) for s in range(peers.case.num_ranks)]
    for row, (source, token) in enumerate(peers.rows()):
        assert torch.equal(rows[row].cpu().view(torch.uint8), pairs[source][0][token].view(torch.uint8))
        assert torch.equal(raw[row].cpu(), pairs[source][1][token])
    assert counts == [-(-int((ids == local).sum()) // 8) * 8 for local in range(peers.num_local)]
    y = ht_experts(peers, quant.dequantize(rows, raw).to(BF16), ids, weights)
    z, _, _ = buffer.combine(y, handle)
    torch.testing.assert_close(z.float().cpu(), peers.expected(factor_of), atol=0.3, rtol=0.1)
    plain, *_ = buffer.dispatch(x, handle=handle)
    want = [peers.x(s)[t] for s, t in peers.rows()]
    assert torch.equal(plain.cpu(), torch.stack(want) if want else plain.cpu()[:0])
    (_, per_token), *_ = ht_dispatch(buffer, peers, (q, scales[:, 0].contiguous()))
    assert per_token.shape == (len(peers.rows()),)
    assert per_token.tolist() == [float(pairs[s][1][t, 0]) for s, t in peers.rows()]


FORMATS = ("bf16", "fp16", "fp32", "blocks", "tokens", "wide")
"""Of rows: floats; fp8 with scales [T, S] and [T]; rows of another hidden size."""


def payload(peers: Peers, rank: int, kind: str) -> Any:
    """A rank's rows in one of the FORMATS, other ones in each."""
    x = peers.x(rank) + FORMATS.index(kind)
    if kind in ("blocks", "tokens"):
        q, scales = quant.quantize(x)
        return q, scales if kind == "blocks" else scales[:, 0].contiguous()
    return x.repeat(1, 3) if kind == "wide" else x.to({"fp16": torch.float16, "fp32": torch.float32}.get(kind, BF16))


def mine_as(peers: Peers, kind: str) -> Any:
    """This rank's, on its device."""
    made = payload(peers, peers.rank, kind)
    return tuple(each.to(peers.device) for each in made) if isinstance(made, tuple) else made.to(peers.device)


def ht_arrived(peers: Peers, got: Any, kind: str) -> None:
    """The rows, and their scales, that came by the routing of `peers`, bit for bit."""
    sent = [payload(peers, source, kind) for source in range(peers.case.num_ranks)]
    parts = zip(*(each if isinstance(each, tuple) else (each,) for each in sent), strict=True)
    for tensor, sources in zip(got if isinstance(got, tuple) else (got,), parts, strict=True):
        want = [sources[source][token] for source, token in peers.rows()]
        assert tensor.dtype == sources[0].dtype
        assert tensor[: len(want)].shape == (len(want), *sources[0].shape[1:])
        mine = tensor[: len(want)].cpu().flatten().view(torch.uint8)
        assert not want or torch.equal(mine, torch.stack(want).flatten().view(torch.uint8))


def spoil(*values: Any) -> None:
    """The caller uses these tensors for other things."""
    for value in values:
        for tensor in value if isinstance(value, tuple) else (value,):
            tensor.fill_(-1 if tensor.dtype == torch.int64 else 77)


def ht_overwritten(buffer: Buffer, peers: Peers, asynchronous: bool, worst: int) -> None:
    """Between two calls that share a handle, the caller overwrites all that it gave: for each change of format."""
    for first in FORMATS:
        given, ids, weights = mine_as(peers, first), *peers.mine()[1:]
        per_expert = buffer.get_dispatch_layout(ids, peers.case.num_experts)[2]
        got, local, arrived, _, handle, event = buffer.dispatch(
            given, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=per_expert, num_worst_tokens=worst,
            async_finish=asynchronous,
        )  # fmt: skip
        event.current_stream_wait()
        spoil(given, ids, weights, per_expert)
        ht_arrived(peers, got, first)
        ht_check(peers, local.cpu(), arrived.cpu())
        for second in FORMATS:
            given = mine_as(peers, second)
            again, *_, event = buffer.dispatch(given, handle=handle, async_finish=asynchronous)
            event.current_stream_wait()
            spoil(given)
            ht_arrived(peers, again, second)
        rows = got[0] if isinstance(got, tuple) else got
        y = torch.ones(rows.shape, dtype=BF16 if first in ("blocks", "tokens") else rows.dtype, device=peers.device)
        z, home, event = buffer.combine(y, handle, topk_weights=arrived, async_finish=asynchronous)
        event.current_stream_wait()
        spoil(y, arrived)
        owners = torch.where(peers.ids(peers.rank) >= 0, peers.ids(peers.rank) // peers.num_local, -1)
        reached = sum((owners == rank).any(1).long() for rank in range(peers.case.num_ranks))
        assert z[:, 0].cpu().long().tolist() == torch.as_tensor(reached).tolist()
        assert home is not None
        kept = torch.where(owners >= 0, peers.weights(peers.rank), 0.0)
        assert torch.equal(home.cpu(), kept)
    assert len(buffer._pool.communicators()) == len(FORMATS), "a routing used again needs none of its own"


def ll_overwritten(buffer: Buffer, peers: Peers, hooked: bool) -> None:
    """As above, with hooks also before what a call has begun is complete."""
    case = peers.case
    x, ids, weights = peers.mine()
    received, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, case.max_tokens or 0, case.num_experts, use_fp8=False, return_recv_hook=hooked
    )
    spoil(x, ids)
    hook()
    y = ll_rows(peers, received, counts, handle, None)
    z, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=hooked)
    spoil(y, weights)
    hook()
    torch.testing.assert_close(z.float().cpu(), peers.expected(factor_of), atol=2e-2, rtol=2e-2)


def ht_worst(buffer: Buffer, peers: Peers) -> None:
    """Fixed shapes: nothing is read back, what did not arrive has no expert."""
    worst = peers.case.num_ranks * 16
    for number in range(3):
        step = next_step(peers, number)
        x = step.mine()[0]
        rows, ids, weights, counts, handle, _ = ht_dispatch(buffer, step, x, num_worst_tokens=worst)
        assert counts == []
        assert rows.shape == (worst, step.case.hidden_size)
        arrived = len(step.rows())
        ht_check(step, ids.cpu(), weights.cpu())
        assert bool((ids[arrived:] == -1).all())
        assert bool((weights[arrived:] == 0).all())
        z, _, _ = buffer.combine(ht_experts(step, rows.nan_to_num(0, 0, 0), ids, weights), handle)
        torch.testing.assert_close(z.float().cpu(), step.expected(factor_of), atol=5e-2, rtol=5e-2)
    with raises(ArgumentError, "num_worst_tokens: expected a multiple"):
        ht_dispatch(buffer, peers, x, num_worst_tokens=worst + 1)
    with raises(ArgumentError, r"num_worst_tokens: expected R \* T = 20 or more, got 4"):
        _, ids, weights = peers.mine()
        x = torch.zeros(5, peers.case.hidden_size, dtype=BF16, device=peers.device)
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=torch.zeros(8), num_worst_tokens=4)


def sizes(buffer: Buffer, peers: Peers) -> None:
    """Callers that name another size in each step have few communicators, and each gets the shapes of its call."""
    case = peers.case
    x, ids, weights = peers.mine()
    for number in range(12):
        worst = case.num_ranks * (8 + number)
        rows, local, given, _, handle, _ = ht_dispatch(buffer, peers, x, num_worst_tokens=worst)
        assert (len(rows), len(local), len(given)) == (worst, worst, worst)
        z, home, _ = buffer.combine(ht_experts(peers, rows.nan_to_num(0, 0, 0), local, given), handle, given)
        torch.testing.assert_close(z.float().cpu(), peers.expected(factor_of), atol=5e-2, rtol=5e-2)
        assert home is not None
        assert torch.equal(home.cpu(), torch.where(peers.ids(peers.rank) >= 0, peers.weights(peers.rank), 0.0))
    assert len(buffer._pool.communicators()) == 1
    for most in range(8, 20):
        scales = [None, *ScaleFormat][most % 4]
        options = {
            "use_fp8": scales is not None, "round_scale": scales not in (None, ScaleFormat.FP32),
            "use_ue8m0": scales is ScaleFormat.UE8M0_PACKED, "return_recv_hook": most % 3 == 0,
        }  # fmt: skip
        for _ in range(2):
            received, counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, most, case.num_experts, **options)
            hook()
            y = ll_rows(peers, received, counts, handle, scales)
            rows, *raw = received if isinstance(received, tuple) else (received,)
            assert rows.is_contiguous()
            assert not raw or raw[0].stride() == (raw[0].shape[2] * -(-y.shape[1] // 4) * 4, 1, -(-y.shape[1] // 4) * 4)
            zero_copy = most % 2 == 0
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
            z, _, hook = buffer.low_latency_combine(
                y, ids, weights, handle, zero_copy=zero_copy, return_recv_hook=most % 3 == 0
            )
            hook()
            torch.testing.assert_close(z.float().cpu(), peers.expected(factor_of), atol=2e-2, rtol=2e-2)
    for most in range(20, 120, 7):
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, case.num_experts, use_fp8=False)
        ll_rows(peers, rows, counts, handle, None)
        assert handle[2] == most
    made = [c for c in buffer._pool.communicators() if c.config.mode is Mode.LL and not c.config.quantize]
    assert sorted(c.config.max_tokens_per_rank for c in made) == [8, 12, 16, 20, 32, 64, 128]
    with raises(ArgumentError, "num_max_dispatch_tokens_per_rank: expected an int, x has"):
        buffer.low_latency_dispatch(torch.cat([x, x[:1].new_zeros(1, x.shape[1])]), ids, len(x), case.num_experts)


def given_up(buffer: Buffer, peers: Peers) -> None:
    """The least used communicator goes where there are too many: on all ranks the same, not one that a graph of any
    rank has captured; a handle keeps its own."""
    captured = mock.PropertyMock(side_effect=lambda: False)
    with mock.patch("crossdock.deep_ep.pool.MOST", 3), mock.patch.object(MoECommunicator, "is_captured", captured):

        def use(kind: str) -> tuple[Any, Any]:
            rows, *_, handle, _ = ht_dispatch(buffer, peers, mine_as(peers, kind))
            return rows, handle

        def dtypes() -> list[torch.dtype]:
            return [comm.config.dtype for comm in buffer._pool.communicators()]

        rows, handle = use("bf16")
        comm = weakref.ref(handle.comm)
        for kind in ("fp16", "fp32", "blocks"):
            use(kind)
        assert dtypes() == [torch.float16, torch.float32, torch.float8_e4m3fn]
        ht_arrived(peers, buffer.dispatch(mine_as(peers, "tokens"), handle=handle)[0], "tokens")
        hits = buffer.combine(torch.ones_like(rows), handle)[0]
        del handle
        assert comm() is None, "nobody needs it any more"
        assert bool((hits[:, 0] <= peers.case.topk).all())
        use("fp16")
        captured.side_effect = lambda: peers.rank == 1
        use("bf16")
        assert len(dtypes()) == 4, "what a rank has captured stays on all"
        captured.side_effect = lambda: False
        use("wide")
        assert dtypes() == [torch.float16, torch.bfloat16, torch.bfloat16]


def disagree(buffer: Buffer, peers: Peers, name: str) -> tuple[str, float]:
    """What this rank hears, and after how long, where the last rank asks for another communicator."""
    x, ids, weights = peers.mine()
    x, ids, weights, odd = x[:1], ids[:1], weights[:1], peers.rank == peers.case.num_ranks - 1
    experts, most = peers.case.num_experts, 8
    worst = 0 if name in ("combine_sms", "topk") else 8 * peers.case.num_ranks

    def call() -> None:
        if name == "num_max_dispatch_tokens_per_rank":
            buffer.low_latency_dispatch(x, ids, most, experts)
            return
        per_expert = torch.zeros(experts, dtype=torch.int32)
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=per_expert, num_worst_tokens=worst)

    call()
    if odd:
        x = x.half() if name == "dtype" else x
        ids, weights = (ids[:, :1], weights[:, :1]) if name == "topk" else (ids, weights)
        experts, most = experts * (1 + (name == "num_experts")), most * (1 + (name.startswith("num_max")))
        worst *= 64 if name == "num_worst_tokens" else 1
    began = time.monotonic()
    limited = mock.patch.object(Buffer, "_chosen_sms", (None, 24 if odd and name == "combine_sms" else None))
    with limited, pytest.raises(ConfigError if odd else AbortedError) as error:
        call()
    return str(error.value), time.monotonic() - began


def last_counts(buffer: Buffer, peers: Peers) -> tuple[float | None, int]:
    """(tokens that are counted, tokens that were sent) of Buffers that end at once."""
    from crossdock.deep_ep.exporter import telemetry

    labels = {"group": "default", "rank": str(peers.rank), "op": "dispatch", "mode": "ht"}
    before = telemetry().metrics.registry.get_sample_value("crossdock_ep_tokens_total", labels) or 0
    for _ in range(3):
        other = Buffer(dist.group.WORLD)
        ht_dispatch(other, peers, peers.mine()[0])
        other.destroy()
    after = telemetry().metrics.registry.get_sample_value("crossdock_ep_tokens_total", labels) or 0
    return after - before, 3 * peers.case.tokens[peers.rank]


def ht_sms(buffer: Buffer, peers: Peers) -> None:
    """A limit for each operation, or one for both, of communicators from then on."""
    x = peers.mine()[0]
    with mock.patch.object(Buffer, "_chosen_sms", (None, None)), mock.patch.object(Buffer, "num_sms", 20):
        for call, want in (
            (lambda: None, (None, None)),
            (lambda: Buffer.set_num_sms(24), (24, 24)),
            (lambda: Buffer.set_operation_sms(16, None), (16, None)),
        ):
            call()
            handle = ht_dispatch(buffer, peers, x)[4]
            assert (handle.comm.config.resolved_dispatch_sms, handle.comm.config.resolved_combine_sms) == want
    assert len(buffer._pool.communicators()) == 3


def ht_wrong(buffer: Buffer, peers: Peers) -> None:
    """Arguments that are wrong are named."""
    x, ids, weights = peers.mine()
    per_expert = torch.zeros(peers.case.num_experts, dtype=torch.int32)
    with raises(ArgumentError, "num_tokens_per_expert: expected what get_dispatch_layout gave"):
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights)
    with raises(ArgumentError, "topk_weights: expected float32"):
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights.double(), num_tokens_per_expert=per_expert)
    with raises(ArgumentError, "handle: expected what dispatch gave"):
        buffer.combine(x, "handle")  # type: ignore[arg-type]
    *_, handle, _ = ht_dispatch(buffer, peers, x)
    with raises(ArgumentError, "topk_idx, topk_weights: expected None beside a handle"):
        buffer.dispatch(x, handle=handle, topk_idx=ids)


def collected(buffer: Buffer, peers: Peers) -> bool:
    """A Buffer that nobody holds frees its communicators."""
    other = Buffer(dist.group.WORLD)
    ht_dispatch(other, peers, peers.mine()[0])
    comm = other._pool.communicators()[0]
    del other
    gc.collect()
    with raises(ClosedError, "closed"):
        comm.barrier()
    return True
