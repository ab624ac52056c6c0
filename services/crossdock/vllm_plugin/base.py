"""Shared base of the prepare/finalize classes. vLLM makes one object per MoE layer; all share the manager's link."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.deep_ep.exporter import CountingTimeouts
from crossdock.vllm_plugin import compat
from crossdock.vllm_plugin.managers import LayerContext
from ep_kernels import ArgumentError

_Base: Any = compat.find("FusedMoEPrepareAndFinalizeModular")
current_ubatch: Any = compat.find("dbo_current_ubatch_id")
ROW_BYTES = 16
"""Rows travel as 16-byte words."""
ROW_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Quantised rows that travel as they are."""
IN_FLIGHT = 2
"""Micro-batches of vLLM's dual-batch overlap."""


def round_up(hidden_size: int, itemsize: int) -> int:
    """The next hidden size whose rows are whole 16-byte words."""
    unit = ROW_BYTES // itemsize
    return -(-hidden_size // unit) * unit


def weighted_input(a1: torch.Tensor, topk_weights: torch.Tensor, on_input: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, the weights that combine applies). `on_input` (K = 1): x is multiplied here."""
    if not on_input:
        return a1, topk_weights
    if topk_weights.shape[1] != 1:
        raise ArgumentError("apply_router_weight_on_input", "top-1 routing", f"top-{topk_weights.shape[1]}")
    return a1 * topk_weights.to(a1.dtype), torch.ones_like(topk_weights)


def scaled_alone(quant_config: Any) -> bool:
    """Whether a row's quantisation does not depend on other rows: a scale per token, or a given scale. Such rows are
    quantised at their source rank and travel at one byte a column."""
    if quant_config.quant_dtype not in ROW_DTYPES or quant_config.block_shape is not None:
        return False
    given = quant_config.a1_scale
    return bool(quant_config.per_act_token_quant) if given is None else given.numel() == 1


def quantized_rows(
    quantize: Any, x: torch.Tensor, quant_config: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Rows that are `scaled_alone`: (q [T, H], scales float32 [T, 1] to travel beside them, None) or (q, None, the one
    scale of all rows [1, 1], which every rank has)."""
    q, scales = quantize(
        x, quant_config.a1_scale, quant_config.quant_dtype, quant_config.per_act_token_quant, quant_config.block_shape
    )
    if quant_config.a1_scale is not None:
        return q, None, quant_config.a1_scale.view(1, 1)
    return q, scales.view(-1, 1), None


class Finalizer(_Base):  # type: ignore[misc]
    """Base of the standard and of the batched format."""

    def __init__(self, link: LayerContext, num_dispatchers: int) -> None:
        super().__init__()
        self._link, self._num_dispatchers = link, num_dispatchers
        self._timeouts = CountingTimeouts(link.pool.rank, link.settings)
        self._handles: list[Any] = [None] * IN_FLIGHT
        self._halves = compat.overlaps()

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        return True

    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype that our kernels read, so that no conversion is needed."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def supports_async(self) -> bool:
        """Whether dispatch and combine come in two halves: where shared experts, or the other half of a batch, run
        between them. Else each is one launch."""
        return self._halves

    def _watched(self) -> Any:
        return self._timeouts

    def _keep(self, handle: Any) -> None:
        self._handles[current_ubatch()] = handle

    def _kept(self) -> Any:
        return self._handles[current_ubatch()]
