"""The suite that every transport passes: dispatch and combine are, bit for bit, what the reference says.

What happens when peers are late, dead or wrong is in test_contract_faults.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_kernels.types import Capabilities, CombineOrder, Layout, Mode, Overflow, ScaleFormat
from tests.cases import KINDS, RoutingCase, cases, draw_seed, replicated, routing_cases
from tests.hosts import lacks
from tests.transports.steps import run_cases
from tests.worlds import World

Worlds = Callable[[int], World]
LAYOUTS = list(Layout)
MODES = [Mode.LL, Mode.HT, Mode.AUTO]
WAYS = [(mode, layout) for mode in (Mode.LL, Mode.HT) for layout in LAYOUTS]
FP8 = torch.float8_e4m3fn


def skip_unless(capabilities: Capabilities, overrides: dict[str, Any], transport: str = "") -> None:
    """A transport need not carry every dtype or algorithm; it says so itself."""
    dtype = overrides.get("dtype", torch.bfloat16)
    if dtype not in capabilities.dtypes:
        pytest.skip(f"does not carry {dtype}")
    if overrides.get("quantize", False) not in capabilities.quantize:
        pytest.skip(f"quantises {capabilities.quantize}")
    wanted = {Mode.AUTO: {Mode.LL, Mode.HT}}.get(overrides["mode"], {overrides["mode"]})
    if not wanted <= set(capabilities.modes):
        pytest.skip(f"has only {capabilities.modes}")
    if lacks(transport, overrides):
        pytest.skip("GPUs have no order of domains over a network")


@pytest.mark.parametrize(("mode", "layout"), [*WAYS, *((Mode.AUTO, layout) for layout in LAYOUTS)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_kind_of_routing(
    world: Worlds, transport: str, capabilities: Capabilities, size: int, mode: Mode, layout: Layout
) -> None:
    overrides: dict[str, Any] = {"mode": mode, "layout": layout}
    turns: tuple[int | None, ...] = (None,)
    if mode is Mode.AUTO:
        overrides["ll_max_tokens"] = 4
        turns = (0, 9, None, 3)
    skip_unless(capabilities, overrides)
    steps = cases(size, 9, hidden_size=136, num_experts=2 * size + 1, topk=3)
    world(size).run(run_cases, transport, steps, overrides, turns)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_eight_ranks(world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, layout: Layout) -> None:
    overrides = {"mode": mode, "layout": layout}
    skip_unless(capabilities, overrides)
    steps = [RoutingCase(20, 6, 128, (3, 0, 5, 1, 2, 8, 4, 6), kind, draw_seed(), max_tokens=8) for kind in
             ("uniform", "zipf", "k_hot")]  # fmt: skip
    world(8).run(run_cases, transport, steps, overrides)


PAYLOADS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "fp8 fp32-scales": {"quantize": True},
    "fp8 ue8m0": {"quantize": True, "scale_format": ScaleFormat.UE8M0},
    "fp8 ue8m0 packed": {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    "mxfp8": {"quantize": "mxfp8"},
    "nvfp4 of fp16": {"quantize": "nvfp4", "dtype": torch.float16},
    "fp16 fp8 packed": {"dtype": torch.float16, "quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    "given fp8": {"dtype": FP8, "scale_columns": 3},
    "given mxfp8": {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
    "given int32 scales": {"dtype": torch.int8, "scale_columns": 1, "scale_dtype": torch.int32},
    "bf16 with scales": {"scale_columns": 2, "scale_dtype": torch.bfloat16},
    "to fp32": {"output_dtype": torch.float32},
    "fp8 combine": {"combine_dtype": FP8},
    "fp8 both ways": {"quantize": True, "combine_dtype": FP8},
    "fp8 combine of fp32": {"dtype": torch.float32, "combine_dtype": FP8},
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_payloads(
    world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, layout: Layout, payload: str
) -> None:
    overrides = {"mode": mode, "layout": layout, **PAYLOADS[payload]}
    skip_unless(capabilities, overrides)
    kinds = ("uniform", "single_none", "one_expert", "uniform")
    hidden = 288 if overrides.get("quantize") == "nvfp4" else 272
    steps = [RoutingCase(7, 3, hidden, (5, 0, 6), kind, draw_seed(), max_tokens=6) for kind in kinds]
    world(3).run(run_cases, transport, steps, overrides)


EXACT: list[dict[str, Any]] = [{}, {"dtype": torch.float32}, {"output_dtype": torch.float32}]


@pytest.mark.parametrize("payload", EXACT)
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED])
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_exact_combine(
    world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, layout: Layout, payload: dict[str, Any]
) -> None:
    overrides = {"mode": mode, "layout": layout, "exact_combine": True, **payload}
    skip_unless(capabilities, overrides, transport)
    steps = cases(3, 6, hidden_size=144, num_experts=7, topk=4)
    world(3).run(run_cases, transport, steps, overrides)


SHAPES = [
    RoutingCase(5, 2, 2056, (3, 4)),
    RoutingCase(8, 8, 2880, (3, 2)),
    RoutingCase(3, 2, 128, (4, 1)),
    RoutingCase(6, 6, 16, (7, 2)),
    RoutingCase(1, 1, 8, (2, 3)),
    RoutingCase(40, 32, 64, (3, 5)),
    RoutingCase(300, 8, 1032, (1, 6)),
    RoutingCase(2, 2, 24, (5, 0, 4)),
    RoutingCase(1, 1, 32, (5, 0, 4, 4)),
    RoutingCase(6, 3, 7168, (1, 1, 1, 1)),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"R{c.num_ranks}-E{c.num_experts}-K{c.topk}-H{c.hidden_size}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_shapes(
    world: Worlds, transport: str, capabilities: Capabilities, layout: Layout, case: RoutingCase
) -> None:
    for quantize in (False, True):
        if quantize and case.hidden_size % 16:
            continue
        overrides = {"mode": Mode.AUTO, "layout": layout, "ll_max_tokens": 0, "quantize": quantize}
        skip_unless(capabilities, overrides)
        steps = [replace(case, kind=kind, seed=draw_seed()) for kind in ("uniform", "single_none")]
        world(case.num_ranks).run(run_cases, transport, steps, overrides, (None, 0))


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_replicas(world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, layout: Layout) -> None:
    overrides = {"mode": mode, "layout": layout}
    skip_unless(capabilities, overrides)
    seed = draw_seed()
    steps = [
        replace(case, experts=replicated(3, 6, 5, seed), seed=draw_seed())
        for case in cases(3, 7, hidden_size=64, num_experts=6, topk=4)
    ]
    world(3).run(run_cases, transport, steps, overrides)


@pytest.mark.parametrize("exact_shapes", [True, False])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("mode", MODES)
def test_grouped_alignment_and_worst_case_shapes(
    world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, alignment: int, exact_shapes: bool
) -> None:
    overrides = {
        "mode": mode,
        "layout": Layout.GROUPED,
        "expert_alignment": alignment,
        "exact_shapes": exact_shapes,
        "quantize": True,
        "scale_format": ScaleFormat.UE8M0_PACKED,
    }
    skip_unless(capabilities, overrides)
    steps = cases(3, 6, hidden_size=144, num_experts=5, topk=3)
    steps += [replace(steps[0], kind="repeated", seed=draw_seed())]
    world(3).run(run_cases, transport, steps, overrides)


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
@pytest.mark.parametrize("max_recv_rows", [None, 5])
@pytest.mark.parametrize("absent_id", [None, 4])
def test_flat_worst_case_shapes(
    world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, max_recv_rows: int | None,
    absent_id: int | None,
) -> None:  # fmt: skip
    overrides = {"mode": mode, "layout": Layout.FLAT, "exact_shapes": False, "max_recv_rows": max_recv_rows,
                 "overflow": Overflow.DROP, "absent_id": absent_id}  # fmt: skip
    skip_unless(capabilities, overrides)
    world(3).run(run_cases, transport, cases(3, 6, hidden_size=32, num_experts=5, topk=3), overrides)


@pytest.mark.parametrize(
    ("layout", "exact"),
    [
        (Layout.EXPERT_MAJOR, False),
        (Layout.EXPERT_MAJOR, True),
        (Layout.GROUPED, False),
        (Layout.GROUPED, True),
        (Layout.FLAT, False),
    ],
)
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_overflow_drops(
    world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, layout: Layout, exact: bool
) -> None:
    overrides = {"mode": mode, "layout": layout, "overflow": Overflow.DROP, "exact_combine": exact, "max_recv_rows": 4}
    if layout is Layout.GROUPED:
        overrides["expert_alignment"] = 2
    skip_unless(capabilities, overrides, transport)
    steps = [RoutingCase(4, 3, 64, (6, 1, 6), kind, draw_seed(), max_tokens=6) for kind in KINDS for _ in range(2)]
    world(3).run(run_cases, transport, steps, overrides)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_zero_copy_combine(
    world: Worlds, transport: str, capabilities: Capabilities, mode: Mode, layout: Layout
) -> None:
    overrides = {"mode": mode, "layout": layout}
    skip_unless(capabilities, overrides)
    steps = cases(3, 6, hidden_size=144, num_experts=5, topk=3)
    world(3).run(run_cases, transport, steps, overrides, (None,), True)


CONFIGS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(MODES),
        "layout": st.sampled_from(LAYOUTS),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
        "quantize": st.booleans(),
        "scale_format": st.sampled_from([ScaleFormat.FP32, ScaleFormat.UE8M0]),
        "combine_dtype": st.sampled_from([None, FP8]),
        "exact_shapes": st.booleans(),
        "max_in_flight": st.integers(1, 3),
        "overflow": st.just(Overflow.DROP),
        "ll_max_tokens": st.integers(0, 6),
    }
).filter(lambda drawn: not drawn["quantize"] or drawn["dtype"] is not torch.float32)


@pytest.mark.parametrize("size", [2, 3])
def test_anything(world: Worlds, transport: str, capabilities: Capabilities, size: int) -> None:
    @settings(max_examples=25)
    @given(st.lists(routing_cases(num_ranks=size), min_size=1, max_size=3), CONFIGS)
    def check(drawn: Sequence[RoutingCase], overrides: dict[str, Any]) -> None:
        skip_unless(capabilities, overrides)
        first = drawn[0]
        same = [replace(first, kind=c.kind, seed=c.seed, tokens=c.tokens, max_tokens=6) for c in drawn]
        world(size).run(run_cases, transport, same, overrides, (None, 0, 6))

    check()


BY_DOMAIN = [
    (4 * ((row + column) % 2), layout, payload)
    for row, layout in enumerate(LAYOUTS)
    for column, payload in enumerate(("bf16", "to fp32", "fp8 combine", "fp16"))
]
"""Every pair of two."""


@pytest.mark.parametrize(("two_hop_tokens", "layout", "payload"), BY_DOMAIN)
def test_combine_by_domain(
    world: Worlds, transport: str, capabilities: Capabilities, two_hop_tokens: int, layout: Layout, payload: str
) -> None:
    order = {"combine_order": CombineOrder.DOMAIN, "two_hop_tokens": two_hop_tokens}
    overrides = {"mode": Mode.HT, "layout": layout, **order, **PAYLOADS.get(payload, {})}
    skip_unless(capabilities, overrides, transport)
    steps = cases(4, 6, hidden_size=272, num_experts=9, topk=5)
    world(4).run(run_cases, transport, steps, overrides)
