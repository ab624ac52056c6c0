"""vLLM's standard format: each token once per rank; the experts apply weights and reduce. Small steps run LL.

Shapes are fixed (the rows of all ranks' tokens) where CUDA graphs want that, and where nearly every token goes to every
rank anyway: then the host waits for nothing, and of rows that travel unquantised, by experts in the order of ranks, no
kernel is launched but a dispatch and a combine. Otherwise shapes are exact, and the host waits for the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from crossdock.deep_ep.high_throughput import HighThroughput
from crossdock.deep_ep.pool import PooledCommunicator
from crossdock.vllm_plugin import compat
from crossdock.vllm_plugin.base import Finalizer, quantized_rows, round_up, scaled_alone, weighted_input
from crossdock.vllm_plugin.managers import LayerContext
from ep_kernels import DispatchHandle, Layout, Mode, MoECommunicator, ScaleFormat
from ep_kernels.config import FP8_BLOCK

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
WHOLE = 0.85
"""Share of all tokens from which on a rank is given room for all: the rows that do not come cost the experts less than
the wait for their number costs the host. Not of rows with scales: DeepGEMM pads what it has no counts of."""


class StandardFinalizer(Finalizer):
    """What the backends of the standard format share.

    Args:
        first_expert: id of this rank's first expert.
        fixed: shapes are fixed in every step, as CUDA graphs want them.
    """

    def __init__(self, link: LayerContext, num_dispatchers: int, first_expert: int, fixed: bool) -> None:
        super().__init__(link, num_dispatchers)
        self._calls = HighThroughput(link.pool)
        self._first_expert, self._fixed = first_expert, fixed

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
        """Both phases, in one launch; returns the function that gives vLLM the rows."""
        x, weights = weighted_input(a1, topk_weights, apply_router_weight_on_input)
        payload, common, done = self._payload(x, quant_config, defer_input_quant)
        _to_comm()
        _crossing(payload.x, payload.scales, topk_ids, weights)
        rows, scales, ids, source_weights, metadata = self._dispatch(
            payload, topk_ids, weights.float(), num_experts, a1
        )
        _to_compute_sync()
        _crossing(rows, scales, ids, source_weights, None if metadata is None else metadata.expert_num_tokens)

        def receive() -> Prepared:
            if done or not len(rows):
                return rows, scales if common is None else common, metadata, ids, source_weights
            given = quant_config.a1_gscale if quant_config.quant_dtype == "nvfp4" else quant_config.a1_scale
            fresh = rows
            if metadata is None and not quant_config.per_act_token_quant:  # rows that did not come are of other steps
                fresh = torch.where((source_weights != 0).any(1, keepdim=True), rows, 0)
            q, scale = _quantized(fresh, given, quant_config)
            return q, scale, metadata, ids, source_weights

        return receive

    def _payload(self, x: torch.Tensor, quant_config: Any, defer: bool) -> tuple[Payload, torch.Tensor | None, bool]:
        """(rows as dispatch takes them, the common scale of all rows, whether the experts get them quantised)."""
        if defer or quant_config.quant_dtype is None:
            return Payload(x), None, True
        if quant_config.is_block_quantized:
            if self._fixed and _by_dispatch(quant_config):
                return Payload(x, quantize=True), None, True
            return Payload(*_quantized(x, quant_config.a1_scale, quant_config)), None, True
        if scaled_alone(quant_config):
            q, scales, common = quantized_rows(_quantize, x, quant_config)
            return Payload(q, scales), common, True
        return Payload(x), None, False

    def _elsewhere(self, num_experts: int) -> int:
        """An expert of another rank: experts look every id up in a table, and there find that it is not here."""
        return num_experts - 1 if self._first_expert == 0 else 0

    def _dispatch(
        self, payload: Payload, topk_ids: torch.Tensor, weights: torch.Tensor, num_experts: int, a1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Any]:
        """Rows, scales, global ids, weights, counts."""
        ids, weights = topk_ids.contiguous(), weights.contiguous()
        with self._watched():
            whole = payload.scales is None and share_of_tokens(self._link.pool.size, ids.shape[1]) >= WHOLE
            if self._fixed or whole:
                return self._fixed_rows(payload, ids, weights, num_experts, a1.dtype)
            return self._exact_rows(payload, ids, weights, num_experts, a1.dtype)

    def _fixed_rows(
        self, payload: Payload, ids: torch.Tensor, weights: torch.Tensor, num_experts: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, None]:
        """As many rows as the step has tokens on all ranks, of which those that did not come name experts of other
        ranks. Neither the host waits nor is anything launched but the dispatch."""
        x, scales = payload.x, payload.scales
        packed = x.contiguous() if scales is None else (x.contiguous(), scales.contiguous())
        shape = self._shape(payload, num_experts, ids.shape[1], dtype)
        place = self._link.pool.get(shape) or self._make(shape, x)
        step, rows = _step_tokens(ids, shape.max_tokens, self._link.pool.size)
        with self._link.pool.step(place, shape) as comm:
            out, handle = comm.dispatch(packed, ids, weights, step_tokens=step)
        self._keep(_Fixed(comm, comm.trimmed(handle, rows)))
        assert out.topk_ids is not None
        assert out.topk_weights is not None
        scale = None if out.scales is None else out.scales[:rows]
        return out.tokens[:rows], scale, out.topk_ids[:rows], out.topk_weights[:rows], None

    def _exact_rows(
        self, payload: Payload, ids: torch.Tensor, weights: torch.Tensor, num_experts: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Any]:
        """The rows that arrived; the host waits for their number."""
        pair = (payload.x, payload.scales)
        kind = self._calls.kind(pair, num_experts, ids.shape[1], 0, output_dtype=dtype)
        got = self._calls.dispatch(pair, ids, weights, kind, keep=False)
        self._keep(got.handle)
        here = torch.where(got.topk_idx < 0, self._elsewhere(num_experts), got.topk_idx + self._first_expert)
        counted = torch.tensor(got.counted, dtype=torch.int32, device="cpu")
        metadata = _Metadata(expert_num_tokens=got.counts, expert_num_tokens_cpu=counted)
        return got.x, got.scales, here, got.topk_weights, metadata

    def _shape(self, payload: Payload, num_experts: int, topk: int, dtype: torch.dtype) -> StandardShape:
        x, scales, quantize = payload
        columns, scale_dtype = (0, None) if scales is None else (scales.shape[1], scales.dtype)
        most, hidden = self._link.max_tokens, x.shape[1]
        return StandardShape(most, hidden, x.dtype, columns, scale_dtype, quantize, dtype, num_experts, topk)

    def _make(self, shape: StandardShape, x: torch.Tensor) -> PooledCommunicator:
        self._link.pool.experts_per_rank(shape.num_experts)
        scaled: dict[str, Any] = {}
        if shape.quantize:
            scaled = {"quantize": True, "scale_format": ScaleFormat.UE8M0}
        elif shape.scale_columns:
            scaled = {"scale_columns": shape.scale_columns, "scale_dtype": shape.scale_dtype}
        return self._link.pool.make(
            shape, shape, x, shape.max_tokens, mode=Mode.AUTO, layout=Layout.FLAT, exact_shapes=False,
            absent_id=self._elsewhere(shape.num_experts), dtype=shape.dtype, output_dtype=shape.output_dtype,
            num_experts=shape.num_experts, topk=shape.topk, hidden_size=shape.hidden, **scaled,
        )  # fmt: skip

    def prepare(self, *args: Any, **named: Any) -> Prepared:
        return self.prepare_async(*args, **named)()

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
        """As `finalize_async`, with its result, in one launch."""
        y = _reduced(fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
        handle = self._kept()
        z = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        with self._watched():
            rows, inner = handle.for_combine(y)
            handle.comm.combine(rows, inner, out=z)
        if z is not output:
            output.copy_(z)


class HighThroughputFinalizer(StandardFinalizer):
    """Replaces vLLM's `DeepEPHTPrepareAndFinalize`; arguments as vLLM's factory gives them."""

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        """Rows of whole 16-byte words also as fp8."""
        return round_up(hidden_size, 1)

    def __init__(self, buffer: LayerContext, num_dispatchers: int, dp_size: int, rank_expert_offset: int) -> None:
        super().__init__(buffer, num_dispatchers, rank_expert_offset, False)


class GraphFinalizer(StandardFinalizer):
    """Replaces vLLM's `DeepEPV2PrepareAndFinalize`; arguments as vLLM's factory gives them."""

    maybe_roundup_layer_hidden_size = staticmethod(HighThroughputFinalizer.maybe_roundup_layer_hidden_size)

    def __init__(
        self, buffer: LayerContext, num_dispatchers: int, dp_size: int, rank_expert_offset: int, num_experts: int,
        num_topk: int, use_fp8_dispatch: bool = False, use_cudagraph: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(buffer, num_dispatchers, rank_expert_offset, use_cudagraph)


class Payload(NamedTuple):
    """Rows as dispatch takes them.

    Attributes:
        x: [T, H].
        scales: [T, S] of rows that are quantised already, or None.
        quantize: dispatch quantises to fp8 in blocks of 128, with scales of powers of two: the bits of vLLM's own
            quantiser, and one kernel less.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None
    quantize: bool = False


class StandardShape(NamedTuple):
    """Parameters of one communicator of fixed shapes."""

    max_tokens: int
    hidden: int
    dtype: torch.dtype
    scale_columns: int
    scale_dtype: torch.dtype | None
    quantize: bool
    output_dtype: torch.dtype
    num_experts: int
    topk: int


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """A step in fixed shapes: its communicator, and the handle of the rows that the experts got."""

    comm: MoECommunicator
    handle: DispatchHandle

    def for_combine(self, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Combine reads the experts' rows where they lie."""
        return y.contiguous(), self.handle


def _crossing(*tensors: torch.Tensor | None) -> None:
    """Dual-batch overlap: these tensors were made on the other of vLLM's two streams and are used on the current
    one. Torch's allocator must not reuse their memory before this stream has finished with them."""
    if _overlapping():
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


def share_of_tokens(ranks: int, topk: int) -> float:
    """Part of all tokens that a rank gets where each chooses `topk` of many experts evenly."""
    return 1 - (1 - 1 / ranks) ** topk


def _step_tokens(ids: torch.Tensor, most: int, ranks: int) -> tuple[int, int]:
    """Most tokens of any rank in this step, as vLLM has agreed them, and tokens of all: `local_sizes` where ranks of
    one DP group share their tokens, else each of a DP group's ranks has all of its. Steps that are captured are of
    ranks that are padded alike: room for as many rows, whatever is said."""
    metadata = _forward_context().dp_metadata
    if metadata is None:
        mine = min(most, len(ids))
        return mine, ranks * mine
    sizes = metadata.local_sizes or metadata.num_tokens_across_dp_cpu.tolist()
    tokens = [min(most, size) for size in sizes]
    largest = max(tokens)
    alike = (ids.is_cuda and torch.cuda.is_current_stream_capturing()) or ranks % len(tokens)
    return largest, ranks * largest if alike else ranks // len(tokens) * sum(tokens)


def _by_dispatch(quant_config: Any) -> bool:
    """Whether dispatch quantises to the bits of vLLM's own quantiser."""
    known = quant_config.quant_dtype == torch.float8_e4m3fn and quant_config.block_shape[-1] == FP8_BLOCK
    return known and compat.rounds_scales()


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
