"""One MoE layer as Megatron trains it: its flex dispatcher over our `deep_ep`, and plain all-to-all beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives

import crossdock
from tests.engines import Calls, counted
from tests.vllm.layers import NUM_EXPERTS, TOKENS, TOPK, joined

HIDDEN = 64
NUM_LOCAL = NUM_EXPERTS // len(TOKENS)


class Case(NamedTuple):
    """What is run.

    Attributes:
        asynchronous: dispatch and combine on a stream of their own, as Megatron asks by default.
        capacity: a capacity factor: tokens without a weight are dropped.
    """

    asynchronous: bool = False
    capacity: float | None = None
    tokens: tuple[int, ...] = TOKENS


def run(rank: int, size: int, store: Any, case: Case) -> tuple[list[float], Calls]:
    """Two steps of the layer, forward and backward; the largest difference of the output and of each gradient, and what
    was called of `deep_ep`."""
    if (path := str(Path(crossdock.__file__).parent / "deep_ep" / "path")) not in sys.path:
        sys.path.insert(0, path)
    from megatron.core.transformer.moe import fused_a2a  # type: ignore[import-not-found]

    assert fused_a2a.HAVE_DEEP_EP
    assert not fused_a2a.HAVE_HYBRIDEP
    with joined(rank, size, store), torch.compiler.set_stance("force_eager"), counted() as calls:
        try:
            return [max(pair) for pair in zip(*(step(rank, case, number) for number in range(2)), strict=True)], calls
        finally:
            fused_a2a._buffer.destroy()
            fused_a2a._buffer = None


def dispatcher(rank: int, case: Case) -> Any:
    """As Megatron's layer makes it with moe_flex_dispatcher_backend=deepep."""
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher  # type: ignore[import-not-found]
    from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=NUM_EXPERTS, moe_router_topk=TOPK,
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep", moe_router_dtype="fp32",
        expert_model_parallel_size=len(TOKENS), moe_expert_capacity_factor=case.capacity,
        moe_pad_expert_input_to_capacity=False, moe_router_load_balancing_type="none",
    )  # fmt: skip
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=None, tp_ep=dist.group.WORLD)
    own = list(range(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL))
    return MoEFlexTokenDispatcher(NUM_LOCAL, own, config, groups)


def step(rank: int, case: Case, number: int) -> list[float]:
    """Differences between Megatron's dispatcher and plain all-to-all."""
    torch.manual_seed(100 * number + rank)
    x, scores = torch.randn(case.tokens[rank], HIDDEN), torch.randn(case.tokens[rank], NUM_EXPERTS)
    weights, grad = torch.randn(NUM_LOCAL, HIDDEN, HIDDEN) / 8, torch.randn(case.tokens[rank], HIDDEN)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(TOPK).indices, True)
    if case.capacity:
        chosen &= torch.rand(chosen.shape) < 0.7
    results = []
    for layer in (flex, plain):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, scores, weights)]
        probs = torch.where(chosen, leaves[1].sigmoid(), 0.0)
        z = layer(rank, case, leaves[0], probs, chosen, leaves[2])
        z.backward(grad)
        results.append([z.detach(), *(leaf.grad for leaf in leaves)])
    differences = []
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        differences.append(float((got - want).abs().max()) if got.numel() else 0.0)
        assert not want.numel() or float(want.abs().max()) > 0 or not any(case.tokens)
    return differences


def expert(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One."""
    return torch.nn.functional.silu(rows @ weight)


def flex(
    rank: int, case: Case, x: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Megatron's calls in the order of its layer."""
    made, options = dispatcher(rank, case), (case.asynchronous, case.asynchronous)
    rows, shown = made.dispatch_preprocess(x[:, None], chosen, probs)
    rows, shown = made.token_dispatch(rows, shown, *options)
    rows, counts, shown = made.dispatch_postprocess(rows, shown)
    parts = zip(rows.split(counts.tolist()), shown.split(counts.tolist()), weights, strict=True)
    y = torch.cat([expert(part, weight) * prob[:, None] for part, prob, weight in parts])
    z = made.token_combine(made.combine_preprocess(y), *options)
    return made.combine_postprocess(z)[:, 0]  # type: ignore[no-any-return]


def plain(
    rank: int, case: Case, x: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same by torch's all-to-all: a row per (token, expert), there and back."""
    experts, tokens = chosen.T.nonzero().T
    sent = torch.bincount(experts, minlength=NUM_EXPERTS)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    by_source = came.view(len(TOKENS), NUM_LOCAL)
    there, back = sent.view(len(TOKENS), NUM_LOCAL).sum(1).tolist(), by_source.sum(1).tolist()
    rows = collectives.all_to_all_single(x.new_empty(sum(back), HIDDEN), x[tokens], back, there)
    local = torch.arange(NUM_LOCAL).repeat(len(TOKENS)).repeat_interleave(by_source.flatten())
    y = torch.zeros_like(rows)
    for number, weight in enumerate(weights):
        y = torch.where((local == number)[:, None], expert(rows, weight), y)
    home = collectives.all_to_all_single(x.new_empty(len(tokens), HIDDEN), y, there, back)
    return torch.zeros_like(x).index_add(0, tokens, home * probs[tokens, experts][:, None])
