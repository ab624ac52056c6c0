"""One MoE layer as vLLM runs it: its own `FusedMoEKernel`, its own (or our) prepare/finalize class, experts in torch.

Each rank holds its experts; what comes out is compared with a loop over tokens and all experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_kernels import quant
from tests.engines import Calls, counted

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = (16, 5, 0, 9)
NUM_EXPERTS, TOPK, WIDTH, MAX_TOKENS = 8, 3, 32, 16
PLACED = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""Round-robin placement of eight experts on four ranks: expert e is number PLACED[e] in the order of ranks."""
LL, HT, GRAPH = "deepep_low_latency", "deepep_high_throughput", "deepep_v2"
CLASSES = {
    ("deep_ep", LL): "DeepEPLLPrepareAndFinalize",
    ("deep_ep", HT): "DeepEPHTPrepareAndFinalize",
    ("native", LL): "PlacedFinalizer",
    ("native", HT): "HighThroughputFinalizer",
    ("native", GRAPH): "GraphFinalizer",
}
"""Class of a plugin in the place of a backend of vLLM's."""


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        plugin: value of CROSSDOCK_VLLM.
        backend: as `--all2all-backend` names it.
        fp8: rows are quantised in blocks of 128 on the way, or before.
        scale: where not by blocks: "token" for a scale per token, "given" for one of all rows.
        hidden: H; vLLM's own low-latency class takes a few sizes only.
        topk: K; with 1 the router's weight is applied to the input.
        missing: some tokens have no expert, others fewer than K.
        round_robin: expert e lives where `PLACED[e]` says.
        strided: the ids are columns of a wider table, as of a router that appends shared experts.
        tokens: T of each rank.
        whole: nothing runs between the halves of a dispatch or a combine.
        rounded: scales of blocks are powers of two, as DeepGEMM's; dispatch quantises where shapes are fixed.
        masked: DeepGEMM's masked kernels are there, so that native low latency gives the batched format.
    """

    plugin: str
    backend: str
    fp8: bool = False
    scale: str = ""
    hidden: int = 2048
    topk: int = TOPK
    tokens: tuple[int, ...] = TOKENS
    missing: bool = False
    round_robin: bool = False
    strided: bool = False
    rounded: bool = False
    masked: bool = False
    whole: bool = False

    @property
    def batched(self) -> bool:
        return self.backend == LL and (self.masked or self.plugin == "deep_ep")

    @property
    def finalizer(self) -> str:
        """Name of the class."""
        return "BatchedFinalizer" if self.masked else CLASSES[self.plugin, self.backend]


class Inputs:
    """Weights of all experts, and this rank's tokens."""

    def __init__(self, case: Case, rank: int, step: int) -> None:
        torch.manual_seed(0)
        self.w1 = (torch.randn(NUM_EXPERTS, 2 * WIDTH, case.hidden) / 30).to(BF16)
        self.w2 = (torch.randn(NUM_EXPERTS, case.hidden, WIDTH) / 10).to(BF16)
        torch.manual_seed(100 + rank + 1000 * step)
        tokens = case.tokens[rank]
        self.x = (torch.randn(tokens, case.hidden) / 3).to(BF16)
        ids = [torch.randperm(NUM_EXPERTS)[: case.topk] for _ in range(tokens)]
        self.ids = torch.stack(ids) if ids else torch.empty(0, case.topk, dtype=torch.int64)
        if case.missing:
            self.ids[torch.rand(self.ids.shape) < 0.3] = -1
            self.ids[:1] = -1
        if case.strided:
            self.ids = torch.cat([self.ids, self.ids], 1)[:, : case.topk]
        self.weights = torch.rand(tokens, case.topk)

    def ffn(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = (x.float() @ self.w1[expert].float().T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ self.w2[expert].float().T

    def expected(self, case: Case) -> torch.Tensor:
        total = torch.zeros(self.x.shape)
        for t, k in (self.ids >= 0).nonzero().tolist():
            expert = int(PLACED[self.ids[t, k]] if case.round_robin else self.ids[t, k])
            if case.topk == 1:
                total[t] += self.ffn(self.x[t : t + 1] * self.weights[t, k].to(BF16), expert)[0]
            else:
                total[t] += self.weights[t, k] * self.ffn(self.x[t : t + 1], expert)[0]
        return total


def quantized(
    x: torch.Tensor, scale: Any, quant_dtype: Any, per_act_token_quant: bool = False, block_shape: Any = None, **_: Any
) -> tuple[torch.Tensor, Any]:
    """Stands for vLLM's quantiser, whose kernels need a GPU."""
    if quant_dtype is None:
        return x, None
    if block_shape is not None:
        return quant.quantize(x)
    assert per_act_token_quant == (scale is None)
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-6) / 448 if scale is None else scale
    return (x.float() / scale).to(FP8), scale


def experts_of(case: Case, inputs: Inputs, first: int, num_local: int) -> Any:
    """An experts class of vLLM's kind, in plain torch."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )

    def rows_of(hidden_states: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        assert (scale is not None) == case.fp8 == (hidden_states.dtype == FP8)
        if scale is None:
            return hidden_states
        if case.scale:
            assert scale.shape[-1] == 1
            return (hidden_states.float() * scale).to(BF16)
        return quant.dequantize(hidden_states, scale).to(BF16)

    class Base(mk.FusedMoEExpertsModular):  # type: ignore[misc]
        _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda *_: True)
        _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(lambda *_: True)

        def supports_expert_map(self) -> bool:
            return True

    class Standard(Base):
        activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)

        def workspace_shapes(self, rows: int, width: int, hidden: int, *_: Any) -> tuple[tuple[int, ...], ...]:
            return (0,), (0,), (rows, hidden)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **kw: Any) -> None:
            ids, weights, expert_map = kw["topk_ids"], kw["topk_weights"], kw["expert_map"]
            assert case.plugin != "native" or len(hidden_states) <= sum(case.tokens), "rows that no rank has sent"
            rows, total = rows_of(hidden_states, kw["a1q_scale"]), torch.zeros(hidden_states.shape)
            for m in range(len(rows)):
                for k in range(ids.shape[1]):
                    local = -1 if ids[m, k] < 0 else int(expert_map[ids[m, k]])
                    weight = 1.0 if kw["apply_router_weight_on_input"] else weights[m, k]
                    if local >= 0:
                        total[m] += weight * inputs.ffn(rows[m : m + 1], first + local)[0]
            output.copy_(total)
            if kw["expert_tokens_meta"] is not None and kw["expert_tokens_meta"].expert_num_tokens is not None:
                counts = kw["expert_tokens_meta"].expert_num_tokens
                assert counts.tolist() == [int((ids == first + local).sum()) for local in range(num_local)]

    class Batched(Base):
        activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.BatchedExperts)

        def workspace_shapes(
            self, rows: int, width: int, hidden: int, topk: int, total: int, local: int, *_: Any
        ) -> Any:
            return (0,), (0,), (local, self.max_num_tokens * self.num_dispatchers, hidden)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceDelegate()

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **kw: Any) -> None:
            assert hidden_states.shape == (num_local, self.max_num_tokens * self.num_dispatchers, case.hidden)
            counts = kw["expert_tokens_meta"].expert_num_tokens
            assert counts.dtype == torch.int32
            rows = rows_of(hidden_states, kw["a1q_scale"])
            output.fill_(float("nan"))
            for local in range(num_local):
                filled = rows[local, : counts[local]]
                output[local, : counts[local]] = inputs.ffn(filled, first + local).to(output.dtype)

    return Batched if case.batched else Standard


def finalizer_of(case: Case, rank: int, first: int) -> Any:
    """vLLM's factory builds it, from whatever is bound to its names; only the manager is not a live one."""
    from vllm.model_executor.layers.fused_moe import all2all_utils

    if case.plugin == "native":
        tables = (PLACED, PLACED.argsort(), PLACED.argsort()[2 * rank : 2 * rank + 2]) if case.round_robin else None
        return all2all_utils.maybe_make_prepare_finalize(
            _layer_config(case), _quant_config(case), routing_tables=tables, allow_new_interface=True
        )
    import deep_ep
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize

    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=case.batched, explicitly_destroy=True)
    if case.batched:
        return DeepEPLLPrepareAndFinalize(buffer, MAX_TOKENS, 4, use_fp8_dispatch=case.fp8)
    return DeepEPHTPrepareAndFinalize(buffer, num_dispatchers=4, dp_size=4, rank_expert_offset=first)


def _layer_config(case: Case) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    parallel = FusedMoEParallelConfig.make_no_parallel()
    if case.plugin == "native":
        parallel.dp_size = parallel.ep_size = 4
        parallel.ep_rank = parallel.dp_rank = dist.get_rank()
        parallel.use_ep, parallel.all2all_backend = True, case.backend
    return FusedMoEConfig(
        num_experts=NUM_EXPERTS, experts_per_token=case.topk, hidden_dim=case.hidden, intermediate_size=WIDTH,
        num_local_experts=NUM_EXPERTS // 4, num_logical_experts=NUM_EXPERTS, moe_parallel_config=parallel,
        activation=MoEActivation.SILU, in_dtype=BF16, device="cpu", routing_method=RoutingMethodType.TopK,
        max_num_tokens=MAX_TOKENS,
    )  # fmt: skip


def _quant_config(case: Case) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    if case.scale == "token":
        return FusedMoEQuantConfig.make(FP8, per_act_token_quant=True)
    if case.scale == "given":
        return FusedMoEQuantConfig.make(FP8, a1_scale=torch.tensor([2.0 / 448]))
    return FusedMoEQuantConfig.make(FP8, block_shape=[128, 128]) if case.fp8 else FusedMoEQuantConfig.make()


@contextmanager
def engine(case: Case, rank: int, num_halves: int = 1) -> Iterator[None]:
    """What vLLM's engine would have set up: plugins, config, group's manager, forward context, workspaces."""
    os.environ["CROSSDOCK_VLLM"], os.environ["VLLM_LOGGING_LEVEL"] = case.plugin, "ERROR"
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from crossdock import vllm_plugin

    vllm_plugin.register()  # a rank process runs several cases; vLLM loads plugins once
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import all2all_utils, modular_kernel
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    with ExitStack() as stack:
        enter = stack.enter_context
        reset_workspace_manager()
        init_workspace_manager(torch.device("cpu"), num_halves)
        enter(set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))))
        enter(mock.patch.object(modular_kernel, "PIN_MEMORY", False, create=True))
        enter(mock.patch.object(type(current_platform), "fp8_dtype", return_value=FP8))
        if case.plugin == "native":
            manager = _manager(case, rank)
            stack.callback(manager.destroy)
            enter(mock.patch.object(all2all_utils, "get_ep_all2all_manager", return_value=manager))
            configured = mock.Mock()
            configured.model_config.enforce_eager = False
            enter(mock.patch.object(all2all_utils, "get_current_vllm_config", return_value=configured))
            from crossdock.vllm_plugin import compat, high_throughput, low_latency

            enter(mock.patch.object(compat, "batches", return_value=case.masked))
            enter(mock.patch.object(compat, "overlaps", return_value=not case.whole))

            enter(mock.patch.object(compat, "rounds_scales", return_value=case.rounded))
            enter(mock.patch.object(high_throughput, "_quantize", mock.Mock() if case.rounded else quantized))
            enter(mock.patch.object(low_latency, "_quantize", quantized))
            step = mock.Mock()
            step.dp_metadata.num_tokens_across_dp_cpu, step.dp_metadata.local_sizes = torch.tensor(case.tokens), None
            enter(mock.patch.object(high_throughput, "_forward_context", return_value=step))
        elif not case.batched:
            from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht

            enter(mock.patch.object(deepep_ht, "moe_kernel_quantize_input", quantized))
        yield


def _manager(case: Case, rank: int) -> Any:
    """The manager class that stands in the backend's place, over the test's own process group."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import all2all

    from crossdock.vllm_plugin.compat import SLOTS

    name = next(slot.manager for slot in SLOTS if slot.backend == case.backend)
    group = mock.Mock(rank_in_group=rank, world_size=4)
    with ExitStack() as stack:
        for getter in ("get_dp_group", "get_tp_group"):
            stack.enter_context(mock.patch.object(parallel_state, getter, return_value=group))
        return getattr(all2all, name)(dist.group.WORLD)


@contextmanager
def joined(rank: int, size: int, store: Any) -> Iterator[None]:
    """torch's process group of all ranks."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(rank: int, size: int, store: Any, case: Case) -> tuple[str, float, Calls]:
    """Three steps of the layer; (name of the prepare/finalize class, largest error, what was called of `deep_ep`)."""
    with joined(rank, size, store), engine(case, rank), counted() as calls:
        return *_steps(case, rank), calls


def apply(case: Case, finalizer: Any, inputs: Inputs, rank: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's output for these inputs; `ids`: those that the backend gets, where they are not the inputs' own."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    num_local = NUM_EXPERTS // 4
    first = rank * num_local
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
    own = slice(first, first + num_local)
    expert_map[PLACED.argsort()[own] if case.round_robin else own] = torch.arange(num_local, dtype=torch.int32)
    sizes = {"max_num_tokens": MAX_TOKENS, "num_dispatchers": 4} if case.batched else {}
    experts = experts_of(case, inputs, first, num_local)(_layer_config(case), _quant_config(case), **sizes)
    z: torch.Tensor = mk.FusedMoEKernel(finalizer, experts).apply(
        hidden_states=inputs.x, w1=inputs.w1[first : first + num_local], w2=inputs.w2[first : first + num_local],
        topk_weights=inputs.weights, topk_ids=(inputs.ids if ids is None else ids).to(finalizer.topk_indices_dtype()),
        activation=MoEActivation.SILU, global_num_experts=NUM_EXPERTS, expert_map=expert_map,
        apply_router_weight_on_input=case.topk == 1,
    )  # fmt: skip
    return z


def _steps(case: Case, rank: int) -> tuple[str, float]:
    finalizer, worst = finalizer_of(case, rank, rank * NUM_EXPERTS // 4), 0.0
    for step in range(3):
        inputs = Inputs(case, rank, step)
        z = apply(case, finalizer, inputs, rank)
        want = inputs.expected(case)
        torch.testing.assert_close(z.float(), want, atol=6e-2, rtol=6e-2)
        worst = max(worst, float((z.float() - want).abs().max()) if len(want) else 0.0)
    if case.rounded:
        configs = [comm.config for comm in finalizer._link.pool.communicators()]
        assert [(config.quantize, config.scale_format) for config in configs] == [(True, quant.ScaleFormat.UE8M0)]
    if case.scale:
        assert [comm.config.dtype for comm in finalizer._link.pool.communicators()] == [FP8], "rows travel as fp8"
    return type(finalizer).__name__, worst
