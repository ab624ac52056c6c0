"""High throughput in vLLM: each token once per rank; the experts apply weights and reduce.

`HighThroughputFinalizer` gives exact shapes and reads the device for them (prefill, eager). `GraphFinalizer` gives
fixed shapes, does not read the device and so works in CUDA graphs; small steps run LL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from crossdock.deep_ep.high_throughput import HighThroughput
from crossdock.deep_ep.pool import PooledCommunicator
from crossdock.vllm_plugin import compat
from crossdock.vllm_plugin.base import Finalizer, quantized_rows, round_up, scaled_alone, weighted_input
from crossdock.vllm_plugin.managers import LayerContext
from ep_kernels import Layout, Mode, MoECommunicator

_STANDARD: Any = compat.find("FusedMoEActivationFormat").Standard
_Metadata: Any = compat.find("ExpertTokensMetadata")
_Delegate: Any = compat.find("TopKWeightAndReduceDelegate")
_Contiguous: Any = compat.find("TopKWeightAndReduceContiguous")
_quantize: Any = compat.find("moe_kernel_quantize_input")
_forward_context: Any = compat.find("get_forward_context")
_overlapping: Any = compat.find("dbo_enabled")
_to_comm: Any = compat.find("dbo_yield_and_switch_from_compute_to_comm")
_to_compute_sync: Any = compat.find("dbo_switch_to_compute_sync")
_to_compute: Any = compat.find("dbo_switch_to_compute")
_back_to_comm: Any = compat.find("dbo_switch_to_comm")
_comm_to_compute: Any = compat.find("dbo_yield_and_switch_from_comm_to_compute")

Prepared = tuple[torch.Tensor, torch.Tensor | None, Any, torch.Tensor, torch.Tensor]


class HighThroughputFinalizer(Finalizer):
    """Replaces vLLM's `DeepEPHTPrepareAndFinalize`; arguments as vLLM's factory gives them."""

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        """Rows of whole 16-byte words also as fp8."""
        return round_up(hidden_size, 1)

    def __init__(self, buffer: LayerContext, num_dispatchers: int, dp_size: int, rank_expert_offset: int) -> None:
        super().__init__(buffer, num_dispatchers)
        self._calls = HighThroughput(buffer.pool)
        self._first_expert = rank_expert_offset

    @property
    def activation_format(self) -> Any:
        """[N, H]."""
        return _STANDARD

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
    ) -> Callable[[], Prepared]:
        """Both phases, since shapes are exact; returns the function that gives vLLM the rows."""
        x, weights = weighted_input(a1, topk_weights, apply_router_weight_on_input)
        payload, common, done = self._payload(x, quant_config, defer_input_quant)
        _to_comm()
        _crossing(*payload, topk_ids, weights)
        rows, scales, ids, source_weights, metadata = self._dispatch(
            payload, topk_ids, weights.float(), num_experts, a1
        )
        _to_compute_sync()
        _crossing(rows, scales, ids, source_weights, None if metadata is None else metadata.expert_num_tokens)

        def receive() -> Prepared:
            if done or not len(rows):
                return rows, scales if common is None else common, metadata, ids, source_weights
            given = quant_config.a1_gscale if quant_config.quant_dtype == "nvfp4" else quant_config.a1_scale
            q, scale = _quantized(rows, given, quant_config)
            return q, scale, metadata, ids, source_weights

        return receive

    def _payload(
        self, x: torch.Tensor, quant_config: Any, defer: bool
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor | None, bool]:
        """((rows as they travel, their scales), the common scale of all rows, whether the rows are quantised
        already)."""
        if defer or quant_config.quant_dtype is None:
            return (x, None), None, True
        if quant_config.is_block_quantized:
            return _quantized(x, quant_config.a1_scale, quant_config), None, True
        if scaled_alone(quant_config):
            q, scales, common = quantized_rows(_quantize, x, quant_config)
            return (q, scales), common, True
        return (x, None), None, False

    def _elsewhere(self, num_experts: int) -> int:
        """An expert of another rank."""
        return num_experts - 1 if self._first_expert == 0 else 0

    def _dispatch(
        self, payload: Any, topk_ids: torch.Tensor, weights: torch.Tensor, num_experts: int, a1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Any]:
        """Rows, scales, global ids, weights, counts. An entry without a local expert names an expert of another
        rank, because experts look up every id in their map."""
        kind = self._calls.kind(payload, num_experts, topk_ids.shape[1], 0, output_dtype=a1.dtype)
        with self._watched():
            got = self._calls.dispatch(payload, topk_ids.contiguous(), weights.contiguous(), kind, keep=False)
        self._keep(got.handle)
        ids = torch.where(got.topk_idx < 0, self._elsewhere(num_experts), got.topk_idx + self._first_expert)
        counted = torch.tensor(got.counted, dtype=torch.int32, device="cpu")
        metadata = _Metadata(expert_num_tokens=got.counts, expert_num_tokens_cpu=counted)
        return got.x, got.scales, ids, got.topk_weights, metadata

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Prepared:
        """As `prepare_async`, with its result."""
        return self.prepare_async(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
            defer_input_quant,
        )()  # fmt: skip

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Send; returns the function that receives into `output`."""
        y = _reduced(fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
        _to_comm()
        _crossing(y, output)
        receive = self._combine(y, output)
        _to_compute()

        def receiver() -> None:
            _back_to_comm()
            receive()
            _comm_to_compute()

        return receiver

    def _combine(self, y: torch.Tensor, output: torch.Tensor) -> Callable[[], None]:
        handle = self._kept()
        z = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        with self._watched():
            rows, inner = handle.for_combine(y)
            request = handle.comm.combine_async(rows, inner, out=z)

        def receive() -> None:
            with self._watched():
                request.wait()
            if z is not output:
                output.copy_(z)

        return receive

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """As `finalize_async`, with its result."""
        self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )()


class GraphFinalizer(HighThroughputFinalizer):
    """Replaces vLLM's `DeepEPV2PrepareAndFinalize`; arguments as vLLM's factory gives them."""

    def __init__(
        self, buffer: LayerContext, num_dispatchers: int, dp_size: int, rank_expert_offset: int, num_experts: int,
        num_topk: int, use_fp8_dispatch: bool = False, use_cudagraph: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(buffer, num_dispatchers, dp_size, rank_expert_offset)
        self._fixed = use_cudagraph

    def _dispatch(
        self, payload: Any, topk_ids: torch.Tensor, weights: torch.Tensor, num_experts: int, a1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Any]:
        """As above; in graphs R * (the step's most tokens) rows; rows that did not arrive name experts of other
        ranks."""
        if not self._fixed:
            return super()._dispatch(payload, topk_ids, weights, num_experts, a1)
        shape = self._shape(payload, num_experts, topk_ids.shape[1], a1.dtype)
        place = self._link.pool.get(shape) or self._make(shape, payload)
        step = _step_tokens(len(a1), shape.max_tokens)
        x, scales = payload
        packed = x.contiguous() if scales is None else (x.contiguous(), scales.contiguous())
        with self._watched(), self._link.pool.step(place, shape) as comm:
            out, inner = comm.dispatch(packed, topk_ids.contiguous(), weights.contiguous(), step_tokens=step)
        self._keep(_Fixed(comm, inner))
        rows = self._link.pool.size * step
        assert out.topk_ids is not None
        assert out.topk_weights is not None
        local = out.topk_ids[:rows]
        arrived = torch.arange(rows, device=local.device)[:, None] < out.num_rows
        ids = torch.where(arrived & (local >= 0), local.long() + self._first_expert, self._elsewhere(num_experts))
        source_weights = torch.where(arrived, out.topk_weights[:rows], 0.0)
        return out.tokens[:rows], None if out.scales is None else out.scales[:rows], ids, source_weights, None

    def _shape(self, payload: Any, num_experts: int, topk: int, dtype: torch.dtype) -> GraphShape:
        x, scales = payload
        columns, scale_dtype = (0, None) if scales is None else (scales.shape[1], scales.dtype)
        most, hidden = self._link.max_tokens, x.shape[1]
        return GraphShape(most, hidden, x.dtype, columns, scale_dtype, dtype, num_experts, topk)

    def _make(self, shape: GraphShape, payload: Any) -> PooledCommunicator:
        self._link.pool.experts_per_rank(shape.num_experts)
        scaled: dict[str, Any] = {}
        if shape.scale_columns:
            scaled = {"scale_columns": shape.scale_columns, "scale_dtype": shape.scale_dtype}
        return self._link.pool.make(
            shape, shape, payload[0], shape.max_tokens, mode=Mode.AUTO, layout=Layout.FLAT, exact_shapes=False,
            dtype=shape.dtype, output_dtype=shape.output_dtype, num_experts=shape.num_experts, topk=shape.topk,
            hidden_size=shape.hidden, **scaled,
        )  # fmt: skip


class GraphShape(NamedTuple):
    """Parameters of one communicator of GraphFinalizer."""

    max_tokens: int
    hidden: int
    dtype: torch.dtype
    scale_columns: int
    scale_dtype: torch.dtype | None
    output_dtype: torch.dtype
    num_experts: int
    topk: int


class _Fixed:
    """The handle of a step in fixed shapes."""

    def __init__(self, comm: MoECommunicator, inner: Any) -> None:
        self.comm, self._inner = comm, inner

    def for_combine(self, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Combine wants the shape of all rows, and reads those that arrived."""
        room = self.comm.combine_input(self._inner)
        room[: len(y)].copy_(y)
        return room, self._inner


def _crossing(*tensors: torch.Tensor | None) -> None:
    """Dual-batch overlap: these tensors were made on the other of vLLM's two streams and are used on the current
    one. Torch's allocator must not reuse their memory before this stream has finished with them."""
    if _overlapping():
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


def _step_tokens(mine: int, most: int) -> int:
    """Most tokens of any rank in this step, a power of two: equal on all ranks, because all pad in the same way."""
    metadata = _forward_context().dp_metadata
    tokens = mine if metadata is None else int(metadata.num_tokens_across_dp_cpu.max())
    return min(most, 1 << max(tokens - 1, 0).bit_length())


def _quantized(x: torch.Tensor, scale: torch.Tensor | None, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, scales = _quantize(
        x, scale, quant_dtype=quant_config.quant_dtype, per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
    )  # fmt: skip
    return q, scales.view(1, 1) if scales is not None and scales.numel() == 1 else scales


def _reduced(
    y: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, on_input: bool, reduce: Any
) -> torch.Tensor:
    """The experts' rows, weighted and summed over k unless the experts have done that."""
    if not y.numel():
        return y
    chosen = _Contiguous() if isinstance(reduce, _Delegate) else reduce
    done: torch.Tensor = chosen.apply(
        output=None, fused_expert_output=y, topk_weights=topk_weights, topk_ids=topk_ids,
        apply_router_weight_on_input=on_input,
    )  # fmt: skip
    return done
