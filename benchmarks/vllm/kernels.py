"""vLLM's expert kernels of one rank, alone on one GPU: nothing travels.

* vLLM chooses the class for the format, as it does in an engine, and is given workspaces as it makes them: the output
  lies where the first product lay.
* A CUDA graph holds the experts of all layers, one after the other, on SETS routings in turn; the time of a replay,
  between two events, is divided by the layers. Weights are many times the L2, so one set of them serves all layers.
* Routing is uniform, drawn afresh for each run and put in place before its replays. Slots that no row fills hold NaN.
* Before it is timed, each batched case is compared with the standard experts on the same tokens.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend

from benchmarks.gpu.measure import events
from benchmarks.vllm import Model, Refused
from benchmarks.vllm.cases import Case
from crossdock.tune.measure import captured

SETS, WARMUP = 4, 3
CLOSE = 3e-2
"""Largest difference of the two formats, over the largest value: each rounds to bf16 where the other does not."""


@dataclass
class Tokens:
    """What all ranks bring to a step: x [R*T, H] bf16, ids [R*T, K] int32 of all E, weights [R*T, K] fp32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def drawn(model: Model, rows: int, seed: int, device: str) -> Tokens:
        """Uniform routing, K different experts each."""
        own = torch.Generator(device).manual_seed(seed)
        x = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device=device).normal_(generator=own)
        weights, ids = torch.rand(rows, model.experts, generator=own, device=device).topk(model.topk)
        return Tokens(x, ids.int(), weights / weights.sum(1, keepdim=True))

    def load(self, other: Tokens) -> None:
        """Put these in place."""
        self.x.copy_(other.x)
        self.ids.copy_(other.ids)
        self.weights.copy_(other.weights)


class Experts(ABC):
    """The experts of rank 0 of an engine. A subclass knows its format.

    Args:
        weights: of its L experts, [L, 2 * inner, H] and [L, H, inner].
    """

    def __init__(self, model: Model, ranks: int, case: Case, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.model, self.ranks, self.case, self._weights = model, ranks, case, weights
        self._device = weights[0].device.type
        self.num_local = len(weights[0])
        sizes = {"max_num_tokens": case.slots, "num_dispatchers": ranks} if case.slots else {}
        config = layer_config(model, ranks, case, self._device)
        self.kernel: Any = select_unquantized_moe_backend(config)[1](config, FusedMoEQuantConfig.make(), **sizes)
        self.sets = [self.drawn(number) for number in range(SETS)]
        self._place()
        self._spaces = self._workspaces()

    @property
    def num_rows(self) -> int:
        """R*T."""
        return self.ranks * self.case.tokens

    def drawn(self, seed: int) -> Tokens:
        """Tokens of this case."""
        return Tokens.drawn(self.model, self.num_rows, seed, self._device)

    def redraw(self, seed: int) -> None:
        """Other tokens, where the graph reads them."""
        for number, tokens in enumerate(self.sets):
            tokens.load(self.drawn(seed + number))
        self._place()

    def run(self) -> None:
        """All layers."""
        for layer in range(self.model.layers):
            self._layer(layer % SETS)

    @abstractmethod
    def result(self, number: int) -> torch.Tensor:
        """What this rank's experts add to each token of a set, float32 [R*T, H]."""

    def block_sizes(self) -> str:
        """As vLLM chose them."""
        up, down = self._weights
        rows = self.ranks * (self.case.slots or self.case.tokens)
        found = try_get_optimal_moe_config(
            up.size(), down.size(), self.model.topk, self.kernel.quant_config.config_name(torch.bfloat16), rows
        )
        return " ".join(f"{name.removeprefix('BLOCK_SIZE_').lower()}={value}" for name, value in found.items())

    @abstractmethod
    def _place(self) -> None:
        """Put the sets where the format wants them."""

    @abstractmethod
    def _layer(self, number: int) -> torch.Tensor:
        """One layer's experts on a set; what they give, in the workspace."""

    def _workspaces(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The larger one, the smaller one, the output within the larger one."""
        up, model = self._weights[0], self.model
        inner, second, out = self.kernel.workspace_shapes(
            self.num_rows,
            up.shape[1],
            model.hidden,
            model.topk,
            model.experts,
            self.num_local,
            None,
            MoEActivation.SILU,
        )
        common = up.new_empty(max(math.prod(inner), math.prod(out)))
        room = common[: math.prod(inner)].view(inner), up.new_empty(second)
        return *room, common[: math.prod(out)].view(out)

    def _apply(self, rows: torch.Tensor, tokens: Tokens, counts: Any, expert_map: torch.Tensor | None) -> torch.Tensor:
        inner, second, out = self._spaces
        up, down = self._weights
        self.kernel.apply(
            output=out, hidden_states=rows, w1=up, w2=down, topk_weights=tokens.weights, topk_ids=tokens.ids,
            activation=MoEActivation.SILU, global_num_experts=self.model.experts, expert_map=expert_map,
            a1q_scale=None, a2_scale=None, workspace13=inner, workspace2=second, expert_tokens_meta=counts,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return out


class Standard(Experts):
    """Rows as they came; the experts weigh and sum over k."""

    def __init__(self, model: Model, ranks: int, case: Case, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(model, ranks, case, weights)
        self._map = torch.full((model.experts,), -1, dtype=torch.int32, device=self._device)
        self._map[: self.num_local] = torch.arange(self.num_local, dtype=torch.int32, device=self._device)

    def _place(self) -> None:
        """They are where they are wanted."""

    def _layer(self, number: int) -> torch.Tensor:
        tokens = self.sets[number]
        return self._apply(tokens.x, tokens, None, self._map)

    def result(self, number: int) -> torch.Tensor:
        """See `Experts`."""
        return self._layer(number).float()


class Batched(Experts):
    """Rows in the slots of their experts; the weights are left to combine."""

    def __init__(self, model: Model, ranks: int, case: Case, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        up = weights[0]
        shape = len(up), ranks * case.slots, model.hidden
        self._slots = [up.new_empty(shape) for _ in range(SETS)]
        self._counts = [torch.zeros(len(up), dtype=torch.int32, device=up.device) for _ in range(SETS)]
        super().__init__(model, ranks, case, weights)

    def _place(self) -> None:
        for tokens, slots, counts in zip(self.sets, self._slots, self._counts, strict=True):
            token, _, expert, slot = self._homes(tokens)
            slots.fill_(math.nan)
            slots[expert, slot] = tokens.x[token]
            counts.copy_(torch.bincount(expert, minlength=self.num_local))

    def _homes(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each row of this rank: token, k, expert, slot; rows of an expert in the order of tokens."""
        token, k = (tokens.ids < self.num_local).nonzero(as_tuple=True)
        expert, order = tokens.ids[token, k].long().sort(stable=True)
        counts = torch.bincount(expert, minlength=self.num_local)
        slot = torch.arange(len(expert), device=self._device) - (counts.cumsum(0) - counts)[expert]
        return token[order], k[order], expert, slot

    def _layer(self, number: int) -> torch.Tensor:
        counts = mk.ExpertTokensMetadata(expert_num_tokens=self._counts[number], expert_num_tokens_cpu=None)
        return self._apply(self._slots[number], self.sets[number], counts, None)

    def result(self, number: int) -> torch.Tensor:
        """See `Experts`."""
        out, tokens = self._layer(number), self.sets[number]
        token, k, expert, slot = self._homes(tokens)
        total = torch.zeros(self.num_rows, self.model.hidden, device=self._device)
        return total.index_add_(0, token, tokens.weights[token, k, None] * out[expert, slot].float())


def layer_config(model: Model, ranks: int, case: Case, device: str) -> Any:
    """As an engine's layer has it on rank 0. Triton is what vLLM takes on Hopper; elsewhere it may take kernels that
    want other weights."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.dp_size = parallel.ep_size = ranks
    parallel.use_ep = True
    parallel.all2all_backend = "deepep_low_latency" if case.slots else "allgather_reducescatter"
    return FusedMoEConfig(
        num_experts=model.experts, experts_per_token=model.topk, hidden_dim=model.hidden,
        intermediate_size=model.inner, num_local_experts=model.experts // ranks, num_logical_experts=model.experts,
        activation=MoEActivation.SILU, device=device, routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel, in_dtype=torch.bfloat16, max_num_tokens=case.slots or case.tokens,
        moe_backend="triton",
    )  # fmt: skip


def weights_of(model: Model, num_local: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random, so that values keep their size."""
    up = torch.empty(num_local, 2 * model.inner, model.hidden, dtype=torch.bfloat16, device=device)
    down = torch.empty(num_local, model.hidden, model.inner, dtype=torch.bfloat16, device=device)
    return up.normal_(0, model.hidden**-0.5), down.normal_(0, model.inner**-0.5)


def made(case: Case, model: Model, ranks: int, weights: tuple[torch.Tensor, torch.Tensor]) -> Experts:
    """The experts of the case's format. Raises Refused where vLLM's batched ones give other results than its standard
    ones on the same tokens."""
    if not case.slots:
        return Standard(model, ranks, case, weights)
    found = Batched(model, ranks, case, weights)
    if not case.tokens:
        return found
    want = Standard(model, ranks, Case(case.step, case.tokens, 0), weights)
    for number in range(2):
        expected = want.result(number)
        apart = float((found.result(number) - expected).abs().max() / expected.abs().max())
        if not apart <= CLOSE:  # NaN is not
            raise Refused(f"{type(found.kernel).__name__}: {apart:.3g} off {type(want.kernel).__name__}, {case}")
    return found


def times_us(experts: Experts, runs: int, replays: int) -> Iterator[float]:
    """Microseconds per layer of each run."""
    graph = captured(experts.run)
    for run in range(runs):
        experts.redraw(1000 * (run + 1))
        taken = []
        for _ in range(WARMUP + replays):
            begin, end = events(2)
            begin.record()
            graph.replay()
            end.record()
            taken.append((begin, end))
        torch.cuda.synchronize()
        spans = [begin.elapsed_time(end) * 1e3 for begin, end in taken[WARMUP:]]
        yield statistics.median(spans) / experts.model.layers
