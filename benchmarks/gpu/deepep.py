"""DeepEP V1 (`deep_ep.Buffer`), where it is installed; run with commit 567632d.

Inside the times, HT (FLAT): layout kernel, counts, which the host waits for, payload, ids and weights; combine without
weighting. LL (EXPERT_MAJOR): one row per (token, expert), quantised inside where the case asks for it; combine weights.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.gpu import Inputs, Row, Unavailable, check
from ep_kernels import Layout, Mode, quant

_STEP = 4
"""LL takes a multiple of this as its largest T."""


class DeepEp:
    """See `gpu.Backend`; what a dispatch returns is (rows, scales or None, ids, weights, handle)."""

    sms: dict[str, int]

    def __init__(self, case: Case, library: Any) -> None:
        self._case, self._library, self.sms = case, library, {}
        self.rotates = case.mode is Mode.LL
        group = dist.group.WORLD
        self._most = -(-case.tokens // _STEP) * _STEP
        if case.mode is Mode.LL:
            size = library.Buffer.get_low_latency_rdma_size_hint(self._most, case.hidden, case.ranks, case.experts)
            queues = case.experts // case.ranks
            self._buffer = library.Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=queues)
            return
        self._configs = library.Buffer.get_dispatch_config(case.ranks), library.Buffer.get_combine_config(case.ranks)
        size = max(config.get_nvl_buffer_size_hint(case.row_bytes, case.ranks) for config in self._configs)
        self._buffer = library.Buffer(group, size, 0)

    def prepare(self, inputs: Inputs) -> None:
        """See `Backend`."""

    def dispatch(self, inputs: Inputs, previous: Any = None) -> Any:
        """See `Backend`."""
        case, ids = self._case, inputs.topk_ids.long()
        if case.mode is Mode.LL:
            rows, counts, handle, _, _ = self._buffer.low_latency_dispatch(
                inputs.x, ids, self._most, case.experts, use_fp8=case.quantize
            )
            rows, scales = rows if case.quantize else (rows, None)
            return rows, scales, counts, None, handle
        if previous is not None:
            rows, *_ = self._buffer.dispatch(inputs.x, handle=previous[4], config=self._configs[0])
            return rows, None, *previous[2:]
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, case.experts)
        rows, ids, weights, _, handle, _ = self._buffer.dispatch(
            inputs.x,
            topk_idx=ids,
            topk_weights=inputs.topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            config=self._configs[0],
        )
        return rows, None, ids, weights, handle

    def tokens(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        return received[0]  # type: ignore[no-any-return]

    def experts(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        rows, scales, ids, weights, _ = received
        tokens = rows if scales is None else quant.dequantize(rows, scales.contiguous())
        if self._case.mode is Mode.HT:
            return check.toy_rank_wise(tokens, ids, weights, self._case.dtype)
        slots = torch.arange(len(tokens), device=tokens.device)
        return check.toy_per_expert(tokens, (1 + slots / 4)[:, None], self._case.dtype)

    def combine(self, y: torch.Tensor, received: Any, inputs: Inputs, out: torch.Tensor) -> None:
        """See `Backend`."""
        *_, handle = received
        if self._case.mode is Mode.LL:
            self._buffer.low_latency_combine(y, inputs.topk_ids.long(), inputs.topk_weights, handle, out=out)
        else:
            out.copy_(self._buffer.combine(y, handle, config=self._configs[1])[0])

    def result(self, inputs: Inputs) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty_like(inputs.x)

    def fault(self, inputs: Inputs, out: torch.Tensor, row: Row) -> str:
        """See `Backend`."""
        return check.fault(out, check.expected(self._case, inputs, row), exact=False)

    def close(self) -> None:
        """See `Backend`."""
        del self._buffer


def create(case: Case, rank: int, group: Any) -> DeepEp:
    """See `gpu.load`."""
    try:
        library = importlib.import_module("deep_ep")
    except ImportError as error:
        raise Unavailable(f"deepep: {error}") from None
    layout = Layout.EXPERT_MAJOR if case.mode is Mode.LL else Layout.FLAT
    if case.layout is not layout or case.fp8_combine or case.num_sms or (case.quantize and case.mode is Mode.HT):
        raise Unavailable("deepep: EXPERT_MAJOR for LL, FLAT bf16 for HT, with its own choice of multiprocessors")
    return DeepEp(case, library)
