"""One MoE layer as SGLang runs it: its own dispatcher classes over Crossdock's `deep_ep`, experts in torch.

Each rank holds its experts; what comes out is compared with a loop over tokens and all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_kernels import quant
from tests.engines import Calls, counted
from tests.sglang import wheel
from tests.vllm.layers import NUM_EXPERTS, TOKENS, TOPK, Inputs, joined

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NUM_LOCAL = NUM_EXPERTS // len(TOKENS)
NORMAL, LL, V2 = "deepep normal", "deepep low_latency", "deepep_v2"
BACKENDS = (NORMAL, LL, V2)


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        backend: one of BACKENDS.
        fp8: rows are quantised in blocks of 128 on the way, or before.
        prefill: deepep_v2: of a prefill, for whose rows the host waits; else of a decode.
        expand: deepep_v2: a prefill asks for a row per (token, expert); a decode always does.
        asynchronous: the dispatcher's async_finish; of LL: with events instead of hooks.
        late: LL: single-batch overlap; the experts write their rows after combine has begun.
        missing: some tokens have no expert, others fewer than K.
    """

    backend: str
    fp8: bool = False
    prefill: bool = False
    expand: bool = True
    asynchronous: bool = False
    late: bool = False
    missing: bool = False
    tokens: tuple[int, ...] = TOKENS
    hidden: int = 256
    topk: int = TOPK
    strided: bool = False
    round_robin: bool = False


def run(rank: int, size: int, store: Any, case: Case) -> tuple[str, float, Calls]:
    """Three steps of the layer; (name of the dispatcher's class, largest error, what was called of `deep_ep`)."""
    with joined(rank, size, store), ExitStack() as stack:
        v1, v2 = wheel.load()
        assert v1.use_deepep, v1._deepep_import_error
        assert v2.use_deepep_v2, v2._deepep_v2_import_error
        enter = stack.enter_context
        properties = SimpleNamespace(multi_processor_count=132)
        enter(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        enter(mock.patch.dict(wheel.RESOURCES.buffers, clear=True))
        output = "fp8" if case.fp8 else "bf16"
        enter(mock.patch.object(wheel.CHOSEN, "deepep_dispatcher_output_dtype", output))
        given = "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"
        enter(mock.patch.object(wheel.ENVS, given, SimpleNamespace(get=lambda: case.expand)))
        enter(mock.patch.object(wheel.BATCH, "is_prefill", case.prefill or case.backend == NORMAL))
        calls = enter(counted())
        made = dispatcher_of(case, v1, v2)
        worst = max(step(case, made, rank, number) for number in range(3))
        for state in wheel.RESOURCES.buffers.values():
            state.buffer.destroy()
        return type(made).__name__, worst, calls


def dispatcher_of(case: Case, v1: Any, v2: Any) -> Any:
    """As SGLang's layer makes it."""
    sizes = {
        "group": dist.group.WORLD, "router_topk": case.topk, "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_LOCAL, "hidden_size": case.hidden, "params_dtype": BF16,
    }  # fmt: skip
    if case.backend == V2:
        return v2.DeepEPv2Dispatcher(**sizes, use_fp8_dispatch=case.fp8)
    hooked = case.backend == LL and not case.asynchronous
    return v1.DeepEPDispatcher(
        **sizes, permute_fusion=True, deepep_mode=v1.DeepEPMode.AUTO, async_finish=case.asynchronous,
        return_recv_hook=hooked,
    )  # fmt: skip


def step(case: Case, made: Any, rank: int, number: int) -> float:
    """The largest error of one step."""
    inputs = Inputs(case, rank, number)  # type: ignore[arg-type]
    router = SimpleNamespace(topk_ids=inputs.ids.int(), topk_weights=inputs.weights)
    out = made.dispatch(inputs.x, router)
    experts = {NORMAL: normal, LL: low_latency, V2: elastic}[case.backend]
    combined, write = experts(case, inputs, out, rank * NUM_LOCAL)
    if case.late:
        overlap = SimpleNamespace(
            overlap=True, stream=mock.MagicMock(), wait_event=None, num_sms=3, signal=torch.zeros(64), threshold=None
        )
        made.set_overlap_args(overlap, {"block_m": 64, "threshold": 129})
        with mock.patch.object(torch.cuda, "stream"), mock.patch.object(torch.cuda, "current_stream"):
            made.combine_a(combined)
            write()
            z = made.combine_b()
        made.clear_overlap_args()
    else:
        write()
        z = made.combine(combined)
    want = inputs.expected(case)  # type: ignore[arg-type]
    torch.testing.assert_close(z.float(), want, atol=6e-2, rtol=6e-2)
    return float((z.float() - want).abs().max()) if len(want) else 0.0


def rows_of(case: Case, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What experts read."""
    assert rows.dtype == (FP8 if case.fp8 else BF16)
    assert (scales is not None) == case.fp8
    return rows if scales is None else quant.dequantize(rows, scales.contiguous()).to(BF16)


Made = tuple[Any, Callable[[], object]]
"""Input of combine, and what writes its rows."""


def normal(case: Case, inputs: Inputs, out: Any, first: int) -> Made:
    """Rows once per token: weighed and summed here."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPNormalCombineInput  # type: ignore[import-not-found]

    counts = [-(-int((out.topk_ids == local).sum()) // 128) * 128 for local in range(NUM_LOCAL)]
    assert out.num_recv_tokens_per_expert == counts
    y = weighed(
        inputs, rows_of(case, out.hidden_states, out.hidden_states_scale), out.topk_ids, out.topk_weights, first
    )
    return DeepEPNormalCombineInput(y, out.topk_ids, out.topk_weights), lambda: None


def weighed(inputs: Inputs, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """What this rank's experts make of rows that came once, [N, H]."""
    total = torch.zeros(rows.shape)
    for n, k in (ids >= 0).nonzero().tolist():
        total[n] += weights[n, k] * inputs.ffn(rows[n : n + 1], first + int(ids[n, k]))[0]
    return total.to(BF16)


def low_latency(case: Case, inputs: Inputs, out: Any, first: int) -> Made:
    """Slots of each expert, unweighted."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput

    rows = rows_of(case, out.hidden_states, out.hidden_states_scale)
    y = torch.full(rows.shape, float("nan"), dtype=BF16)

    def write() -> None:
        for local in range(NUM_LOCAL):
            filled = rows[local, : out.masked_m[local]]
            y[local, : out.masked_m[local]] = inputs.ffn(filled, first + local).to(BF16)

    return DeepEPLLCombineInput(y, out.topk_ids, out.topk_weights), write


def elastic(case: Case, inputs: Inputs, out: Any, first: int) -> Made:
    """Rows of each expert together, weighted, or as `normal`."""
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput  # type: ignore[import-not-found]

    rows = rows_of(case, out.hidden_states, out.hidden_states_scale)
    assert out.is_expanded == (case.expand or not case.prefill)
    assert out.use_masked_gemm == (not case.prefill)
    if not out.is_expanded:
        y = weighed(inputs, rows, out.topk_ids, out.topk_weights, first)
        return DeepEPv2CombineInput(y, out.topk_weights), lambda: None
    y, begin = torch.full(rows.shape, float("nan"), dtype=BF16), 0
    for local, end in enumerate(out.psum_num_recv_tokens_per_expert.tolist()):
        own = slice(begin, end)
        y[own] = (inputs.ffn(rows[own], first + local) * out.topk_weights[own, None]).to(BF16)
        begin = -(-end // out.expert_alignment) * out.expert_alignment
    return DeepEPv2CombineInput(y, out.topk_weights), lambda: None
