"""Every kernel against the reference, many ranks on one GPU: layouts, payloads, combines, ranks past a warp, wrap of
the sequence numbers, phases, any number of blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels.types import Layout, Mode, Overflow, ScaleFormat
from tests.cases import KINDS, RoutingCase, cases, draw_seed, replicated
from tests.gpu.loopback import BOTH, Loopback
from tests.gpu.loopback_check import check

pytestmark = pytest.mark.gpu(1)
SPLIT = (1, 2)
FP8 = torch.float8_e4m3fn


def run(steps: list[RoutingCase], mode: Mode, overrides: dict[str, Any], **options: Any) -> None:
    blocks = options.pop("blocks", None)
    loop = Loopback(lambda group: steps[0].config(group, **overrides), steps[0].num_ranks, blocks)
    for n, case in enumerate(steps):
        turn = mode if mode is not Mode.AUTO else (Mode.LL, Mode.HT)[n % 2]
        check(loop, case, turn, **options)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_routing(size: int, mode: Mode, layout: Layout) -> None:
    steps = cases(size, 9, hidden_size=136, num_experts=2 * size + 1, topk=3)
    run(steps, mode, {"mode": mode, "layout": layout})


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("size", "crossover"), [(3, 0), (3, 1), (4, 5), (5, 33)])
def test_auto_between_its_crossover_and_its_most_tokens(size: int, crossover: int, layout: Layout, exact: bool) -> None:
    """Lines have room for as many tokens as LL may bring, everything else for those of HT; gradients' weights too."""
    if exact and not layout.per_expert:
        pytest.skip("exact_combine is for per-expert layouts")
    most = 2 * crossover + 3
    overrides = {"mode": Mode.AUTO, "layout": layout, "ll_max_tokens": crossover, "exact_combine": exact}
    steps = []
    for number in range(6):
        tokens = tuple((crossover, most)[number % 2] - rank % 2 * min(1, crossover) for rank in range(size))
        steps.append(RoutingCase(2 * size + 1, 3, 136, tokens, "single_none", draw_seed(), max_tokens=most))
    run(steps, Mode.AUTO, overrides)
    run(steps, Mode.AUTO, overrides, phases=SPLIT, backward=True)


@pytest.mark.parametrize("exact_shapes", [False, True])
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
@pytest.mark.parametrize("size", [1, 3])
def test_ids_as_experts_read_them(size: int, mode: Mode, exact_shapes: bool) -> None:
    overrides = {"mode": mode, "layout": Layout.FLAT, "absent_id": 77, "exact_shapes": exact_shapes}
    for phases in ((BOTH,), SPLIT):
        run(cases(size, 9, hidden_size=136, num_experts=2 * size + 1, topk=3), mode, overrides, phases=phases)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_phases_and_backward(mode: Mode, layout: Layout) -> None:
    steps = cases(3, 6, hidden_size=64, num_experts=7, topk=4)
    run(steps, mode, {"mode": mode, "layout": layout}, phases=SPLIT)
    run(steps, mode, {"mode": mode, "layout": layout}, backward=True)


PAYLOADS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "fp8": {"quantize": True},
    "fp8 packed": {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    "fp16 fp8 ue8m0": {"dtype": torch.float16, "quantize": True, "scale_format": ScaleFormat.UE8M0},
    "given fp8": {"dtype": FP8, "scale_columns": 3},
    "given fp8, whole 16 bytes": {"dtype": FP8, "scale_columns": 4},
    "given fp8, finer": {"dtype": FP8, "scale_columns": 132},
    "given mxfp8": {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
    "fp8 both ways": {"quantize": True, "combine_dtype": FP8},
    "mxfp8": {"quantize": "mxfp8"},
    "mxfp8 of fp16": {"quantize": "mxfp8", "dtype": torch.float16},
    "nvfp4": {"quantize": "nvfp4"},
    "nvfp4 of fp16": {"quantize": "nvfp4", "dtype": torch.float16},
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_payloads(mode: Mode, layout: Layout, payload: str) -> None:
    kinds = ("uniform", "single_none", "one_expert", "uniform")
    hidden = 2880 if payload.startswith("nvfp4") else 272
    steps = [RoutingCase(7, 3, hidden, (5, 0, 6), kind, draw_seed(), max_tokens=6) for kind in kinds]
    run(steps, mode, {"mode": mode, "layout": layout, **PAYLOADS[payload]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moved", [FP8, None])
@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.FLAT])
def test_wide_rows(layout: Layout, moved: torch.dtype | None, dtype: torch.dtype) -> None:
    """Rows of several segments, segments of several quantiser rounds, short last ones; some values not finite. Reduce
    teams of HT combine with two and four warps, few and many groups of columns."""
    overrides = {"mode": Mode.HT, "layout": layout, "dtype": dtype, "combine_dtype": moved}
    for hidden in (8336, 8192, 7168, 4608, 4096, 2880, 1024 + 16 // dtype.itemsize):
        case = RoutingCase(7, 3, hidden, (5, 1), "single_none", draw_seed())
        quantize = moved is not None and dtype is not torch.float32 and hidden % 16 == 0
        run([case], Mode.HT, {**overrides, "quantize": quantize})


@pytest.mark.parametrize("payload", [{}, {"output_dtype": torch.float32}])
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED])
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_exact(mode: Mode, layout: Layout, payload: dict[str, Any]) -> None:
    steps = cases(3, 6, hidden_size=144, num_experts=7, topk=4)
    run(steps, mode, {"mode": mode, "layout": layout, "exact_combine": True, **payload})


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED, Layout.FLAT])
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
@pytest.mark.parametrize("exact", [False, True])
def test_overflow(mode: Mode, layout: Layout, exact: bool) -> None:
    if exact and not layout.per_expert:
        pytest.skip("exact_combine is for per-expert layouts")
    overrides: dict[str, Any] = {"mode": mode, "layout": layout, "overflow": Overflow.DROP, "max_recv_rows": 4}
    overrides |= {"exact_combine": exact, "expert_alignment": 2 if layout is Layout.GROUPED else 1}
    steps = [RoutingCase(4, 3, 64, (6, 1, 6), kind, draw_seed(), max_tokens=6) for kind in KINDS for _ in range(2)]
    run(steps, mode, overrides)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_replicas_and_odd_shapes(mode: Mode, layout: Layout) -> None:
    for case in cases(3, 7, hidden_size=64, num_experts=6, topk=4):
        run([replace(case, experts=replicated(3, 6, 5, draw_seed()))], mode, {"mode": mode, "layout": layout})
    for case in (
        RoutingCase(40, 32, 64, (3, 5), seed=draw_seed()),
        RoutingCase(300, 8, 1032, (1, 6), seed=draw_seed()),
        RoutingCase(2, 2, 24, (5, 0, 4), seed=draw_seed()),
        RoutingCase(1, 1, 8, (2, 3), seed=draw_seed()),
        RoutingCase(6, 3, 7168, (1, 1, 1, 1), seed=draw_seed()),
    ):
        run([case], mode, {"mode": mode, "layout": layout})


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
@pytest.mark.parametrize("size", [8, 33, 64])
def test_many_ranks(size: int, mode: Mode, layout: Layout) -> None:
    tokens = tuple((5 * r + 3) % 8 for r in range(size))
    steps = [RoutingCase(2 * size + 3, 6, 128, tokens, kind, draw_seed(), max_tokens=8) for kind in ("uniform", "zipf")]
    run(steps, mode, {"mode": mode, "layout": layout})


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
@pytest.mark.parametrize("quantize", [False, True])
def test_serving_shape_at_any_number_of_blocks(mode: Mode, layout: Layout, quantize: bool) -> None:
    """A lone block, which does all; blocks that share the work; as many as fit the GPU together. Slots of 256 experts
    would be gigabytes for the reference to fill."""
    experts = 64 if layout is Layout.EXPERT_MAJOR else 256
    case = RoutingCase(experts, 8, 7168, (128, 128, 128, 77), "uniform", draw_seed(), max_tokens=128)
    small = replace(case, tokens=(16, 0, 1, 16))
    for blocks in (1, 7, 33):
        run([case, small], mode, {"mode": mode, "layout": layout, "quantize": quantize}, blocks=blocks)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("blocks", [1, 3, None])
def test_many_tokens_in_a_block(blocks: int | None, layout: Layout) -> None:
    """HT routes by tiles of 2048 (token, k): several in a block, the last one short; ids that come twice in a token."""
    case = RoutingCase(24, 8, 64, (700, 0, 513), "uniform", draw_seed(), max_tokens=700)
    loop = Loopback(lambda group: case.config(group, mode=Mode.HT, layout=layout), 3, blocks)
    handles = check(loop, case, Mode.HT)
    check(loop, replace(case, kind="repeated", seed=draw_seed()), Mode.HT)
    check(loop, case, Mode.HT, again=replace(case, seed=draw_seed()), previous=handles)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("phases", [(BOTH,), SPLIT])
def test_small_and_large_steps_in_turn(layout: Layout, phases: tuple[int, ...]) -> None:
    """LL: fewer and more tokens than a chunk of 32, one more than whole chunks, few beside many."""
    most = 72
    counts = ((16, 17, most), (1, 0, 2), (most, most, 16), (31, 33, 32))
    steps = [RoutingCase(9, 4, 272, tokens, "uniform", draw_seed(), max_tokens=most) for tokens in counts]
    for blocks in (1, 2, None):
        run(steps, Mode.LL, {"mode": Mode.LL, "layout": layout}, phases=phases, blocks=blocks)


@pytest.mark.parametrize("start", [(1 << 31) - 4, (1 << 32) - 4])
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
def test_sequence_numbers_past_32_bits(mode: Mode, start: int) -> None:
    """AUTO: runs of LL steps, which add nothing to arrival counters, between HT steps, which add for them."""
    case = RoutingCase(5, 2, 64, (4, 3), "uniform", 0, max_tokens=4)
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=Layout.GROUPED), 2)
    loop.preset(start)
    for number in range(9):
        turn = mode if mode is not Mode.AUTO else (Mode.HT, Mode.LL, Mode.LL)[number % 3]
        check(loop, replace(case, seed=draw_seed()), turn)


HANDLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "odd places": ({"experts": replicated(3, 7, 4, 1)}, {"expert_alignment": 4}),
    "fp8 both ways": ({}, {"quantize": True, "combine_dtype": FP8}),
    "packed": ({}, {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED}),
    "worst case": ({"kind": "out_of_range"}, {"exact_shapes": False}),
    "overflow": ({"kind": "zipf"}, {"max_recv_rows": 4, "overflow": Overflow.DROP}),
    "exact": ({}, {"exact_combine": True}),
}


@pytest.mark.parametrize("what", HANDLES)
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_previous_handle(mode: Mode, layout: Layout, what: str) -> None:
    changes, overrides = HANDLES[what]
    if layout is not Layout.GROUPED:
        overrides = {key: value for key, value in overrides.items() if key != "expert_alignment"}
    if (what == "overflow" and layout is Layout.RANK_MAJOR) or (what == "exact" and not layout.per_expert):
        pytest.skip("no such configuration")
    case = replace(RoutingCase(7, 3, 272, (5, 0, 6), "single_none", draw_seed(), max_tokens=6), **changes)
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=layout, **overrides), 3)
    handles = check(loop, case, mode)
    for number in range(5):
        check(loop, replace(case, seed=draw_seed()), mode)  # other routings in between
        again = replace(case, seed=draw_seed())
        phases = SPLIT if number % 2 else (BOTH,)
        newer = check(loop, case, mode, phases, again=again, previous=handles)
        check(loop, case, mode, backward=True, again=again, previous=newer)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
@pytest.mark.parametrize(("size", "blocks"), [(33, None), (64, None), (4, 1), (4, 7), (4, 33)])
def test_previous_handle_at_any_size(size: int, blocks: int | None, mode: Mode, layout: Layout) -> None:
    tokens = tuple((5 * r + 3) % 8 for r in range(size))
    case = RoutingCase(2 * size + 3, 6, 1040, tokens, "uniform", draw_seed(), max_tokens=8)
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=layout), size, blocks)
    handles = check(loop, case, mode)
    check(loop, case, mode, again=replace(case, seed=draw_seed()), previous=handles)
