"""The low-latency backend in vLLM: fixed shapes, made for CUDA graphs.

Its experts get the standard format, unless they are DeepGEMM's masked kernels (`compat.batches`): other batched kernels
of vLLM compute mostly empty slots. Unlike DeepEP's calls, ours get the weights with dispatch: each rank sums the rows
of its experts, so a token returns once per rank instead of once per expert. Any hidden size of whole 16-byte rows; all
layers share one communicator per shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from crossdock.deep_ep.pool import PooledCommunicator
from crossdock.vllm_plugin import compat
from crossdock.vllm_plugin.base import Finalizer, quantized_rows, round_up, scaled_alone, weighted_input
from crossdock.vllm_plugin.errors import PluginError
from crossdock.vllm_plugin.high_throughput import StandardFinalizer
from crossdock.vllm_plugin.managers import LayerContext
from ep_kernels import Layout, Mode, ScaleFormat

_BATCHED: Any = compat.find("FusedMoEActivationFormat").BatchedExperts
_Metadata: Any = compat.find("ExpertTokensMetadata")
_Delegate: Any = compat.find("TopKWeightAndReduceDelegate")
_quantize: Any = compat.find("moe_kernel_quantize_input")
_batched_scales: Any = compat.find("normalize_batched_scales_shape")
_run_hook: Any = compat.find("dbo_maybe_run_recv_hook")

Prepared = tuple[torch.Tensor, torch.Tensor | None, Any, None, None]


class BatchShape(NamedTuple):
    """Parameters of one communicator. `scales`: format of those that dispatch makes, or None."""

    max_tokens: int
    hidden: int
    dtype: torch.dtype
    scale_columns: int
    output_dtype: torch.dtype
    num_experts: int
    topk: int
    scales: ScaleFormat | None


class LowLatencyFinalizer:
    """Replaces vLLM's `DeepEPLLPrepareAndFinalize`; arguments as vLLM's factory gives them. Makes an object of the
    format that vLLM has chosen experts for."""

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int) -> int:
        """Rows of whole 16-byte words also as fp8."""
        return round_up(hidden_size, 1)

    def __new__(
        cls,
        buffer: LayerContext,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: torch.Tensor | None = None,
        physical_to_global: torch.Tensor | None = None,
        local_expert_global_ids: torch.Tensor | None = None,
    ) -> Finalizer:
        if compat.batches():
            return BatchedFinalizer(buffer, max_tokens_per_rank, num_dispatchers, use_fp8_dispatch, global_to_physical)
        return PlacedFinalizer(buffer, num_dispatchers, global_to_physical, physical_to_global)


class PlacedFinalizer(StandardFinalizer):
    """The standard format, in fixed shapes, for any placement of experts.

    Args:
        to_physical, to_global: [E] an expert's place in the order of ranks, and back; None: they lie in that order.
    """

    def __init__(
        self, link: LayerContext, num_dispatchers: int, to_physical: torch.Tensor | None, to_global: torch.Tensor | None
    ) -> None:
        first = link.pool.rank * link.pool.experts_per_rank(link.num_experts)
        super().__init__(link, num_dispatchers, first, True)
        self._physical = None if to_physical is None else to_physical.int()
        self._global = None if to_global is None else to_global.int()

    def _dispatch(
        self, payload: Any, topk_ids: torch.Tensor, weights: torch.Tensor, num_experts: int, a1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Any]:
        """Experts look ids up in vLLM's own numbering."""
        ids = physical(topk_ids, self._physical)
        rows, scales, ids, weights, metadata = super()._dispatch(payload, ids, weights, num_experts, a1)
        if self._global is not None:
            ids = self._global.index_select(0, ids.flatten()).view(ids.shape)
        return rows, scales, ids, weights, metadata


def physical(topk_ids: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Ids int32 [T, K] in the order of ranks, -1 where there is none. `places`: int32 [E], None: they are."""
    if places is None:
        return topk_ids.int()
    return torch.where(topk_ids < 0, -1, places[topk_ids.clamp(min=0).long()])


class BatchedFinalizer(Finalizer):
    """The batched format [L, R*M, H].

    Args:
        max_tokens: M.
        quantized: dispatch quantises rows to fp8 in blocks.
        to_physical: as in `PlacedFinalizer`.
    """

    def __init__(
        self, link: LayerContext, max_tokens: int, num_dispatchers: int, quantized: bool,
        to_physical: torch.Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(link, num_dispatchers)
        self._max_tokens, self._quantized = max_tokens, quantized
        self._scales = ScaleFormat.FP32
        self._physical = None if to_physical is None else to_physical.int()

    def post_init_setup(self, fused_experts: Any) -> None:
        if self._quantized and fused_experts.supports_packed_ue8m0_act_scales():
            self._scales = ScaleFormat.UE8M0_PACKED

    @property
    def activation_format(self) -> Any:
        """[L, R*M, H]."""
        return _BATCHED

    def max_num_tokens_per_rank(self) -> int:
        return self._max_tokens

    def _place(
        self, x: torch.Tensor, columns: int, dtype: torch.dtype, num_experts: int, topk: int
    ) -> PooledCommunicator:
        """Output of rows like x with that many scales; experts return `dtype`."""
        scales = self._scales if self._quantized else None
        shape = BatchShape(self._max_tokens, x.shape[1], x.dtype, columns, dtype, num_experts, topk, scales)
        return self._link.pool.get(shape) or self._make(shape, x)

    def _make(self, shape: BatchShape, x: torch.Tensor) -> PooledCommunicator:
        self._link.pool.experts_per_rank(shape.num_experts)
        scaled: dict[str, Any] = {} if shape.scales is None else {"quantize": True, "scale_format": shape.scales}
        if shape.scale_columns:
            scaled = {"scale_columns": shape.scale_columns, "scale_dtype": torch.float32}
        return self._link.pool.make(
            shape, shape, x, shape.max_tokens, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, dtype=shape.dtype,
            output_dtype=shape.output_dtype, topk=shape.topk, num_experts=shape.num_experts, hidden_size=shape.hidden,
            **scaled,
        )  # fmt: skip

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Prepared]]:
        """Send; returns (hook that receives, function that gives vLLM the rows)."""
        if defer_input_quant and self._quantized:
            raise PluginError("crossdock: experts that want unquantised rows cannot get them from an fp8 dispatch")
        x, weights = weighted_input(a1, topk_weights, apply_router_weight_on_input)
        q, own, common = x, None, None
        early = not self._quantized and not defer_input_quant and scaled_alone(quant_config)
        if early:
            q, own, common = quantized_rows(_quantize, x, quant_config)
        place = self._place(q, 0 if own is None else 1, x.dtype, num_experts, topk_ids.shape[1])
        payload = q.contiguous() if own is None else (q.contiguous(), own.contiguous())
        ids = physical(topk_ids, self._physical)
        with self._watched(), self._link.pool.step(place, place.key) as comm:
            request = comm.dispatch_async(payload, ids.contiguous(), weights.float().contiguous())
        tokens, scales, counts = request.buffers()
        if common is not None:
            scales = _batched_scales(common, tokens.shape[0])
        self._keep((comm, request))

        def hook() -> None:
            with self._watched():
                request.wait()

        done = self._quantized or early or defer_input_quant or quant_config.quant_dtype is None
        return hook, lambda: self._rows(tokens, scales, counts, quant_config, done)

    def _rows(
        self, tokens: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor, quant_config: Any, done: bool
    ) -> Prepared:
        metadata = _Metadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
        if done:
            return tokens, scales, metadata, None, None
        num_local, _, hidden = tokens.shape
        q, scale = _quantize(
            tokens.view(-1, hidden), quant_config.a1_scale, quant_config.quant_dtype,
            quant_config.per_act_token_quant, quant_config.block_shape,
        )  # fmt: skip
        return q.view(num_local, -1, q.shape[-1]), _batched_scales(scale, num_local), metadata, None, None

    def prepare(self, *args: Any, **named: Any) -> Prepared:
        hook, rows = self.prepare_async(*args, **named)
        hook()
        return rows()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Send; returns (hook that receives into `output`, function without effect)."""
        if not isinstance(weight_and_reduce_impl, _Delegate):
            raise PluginError(
                f"crossdock: expected experts that leave the weights to combine, got {weight_and_reduce_impl}"
            )
        comm, request = self._kept()
        z = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        _run_hook()
        with self._watched():
            combining = comm.combine_async(fused_expert_output.contiguous(), request.wait()[1], out=z)

        def hook() -> None:
            with self._watched():
                combining.wait()
            if z is not output:
                output.copy_(z)

        return hook, _nothing

    def finalize(self, *args: Any, **named: Any) -> None:
        self.finalize_async(*args, **named)[0]()


def _nothing() -> None:
    """A function that returns what the hook has received."""
