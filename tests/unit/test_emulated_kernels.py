"""Every kernel's own source, run on the CPU, against the reference. What a GPU must show besides: tests/gpu."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels import jit
from ep_kernels.errors import PeerTimeout
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase, cases, draw_seed, replicated
from tests.emulator.build import build
from tests.emulator.machine import Emulated, without_driver
from tests.gpu.loopback import Loopback
from tests.gpu.loopback_check import check, check_what_a_stop_left, combine_of
from tests.tools import needs

pytestmark = [
    needs("g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64"),
    pytest.mark.timeout(600),
]
SPLIT, BOTH = (1, 2), (3,)
MODES = [Mode.LL, Mode.HT]
FP8 = torch.float8_e4m3fn
FP8_PARTIALS = [jit.combine_variant("ht", kind, "bf16", "e4m3") for kind in (0, 1)]
LAYOUTS = [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR]
"""The others differ from these in arithmetic that the GPU tests look at; each kernel takes seconds to compile."""


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled side by side, before the clock of any test runs."""
    wanted = [v for v in jit.all_variants() if _is_wanted(v)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (replace(v, loopback=True) for v in wanted)))


def _is_wanted(variant: jit.Variant) -> bool:
    of = dict(variant.constants)
    if variant.kernel.endswith("dispatch"):
        return of["LAYOUT"] in ("0", "2", "3") and (of["X"] == "u8" or (of["X"], of["LAYOUT"]) == ("bf16", "0"))
    if variant.kernel.endswith("combine"):
        moved = ("bf16", "e4m3") if variant in FP8_PARTIALS else ("bf16",)
        return of["KIND"] in ("0", "1") and of["Y"] == "bf16" and of["C"] in moved
    return False


def run(steps: list[RoutingCase], mode: Mode, layout: Layout, blocks: int | None = None, **more: Any) -> None:
    options = {name: more.pop(name) for name in ("phases", "backward") if name in more}
    loop = Loopback(
        lambda group: steps[0].config(group, mode=mode, layout=layout, **more), steps[0].num_ranks, blocks, Emulated()
    )
    for case in steps:
        check(loop, case, mode, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_routing(size: int, mode: Mode, layout: Layout) -> None:
    run(cases(size, 9, hidden_size=136, num_experts=2 * size + 1, topk=3), mode, layout)


@pytest.mark.parametrize(("dispatch_sms", "combine_sms"), [(1, 4), (4, 1), (None, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_dispatch_and_combine_have_grids_of_their_own(mode: Mode, dispatch_sms: int | None, combine_sms: int) -> None:
    steps = cases(2, 3, hidden_size=136, num_experts=5, topk=3)
    fields = {"dispatch_sms": dispatch_sms, "combine_sms": combine_sms}
    run(steps, mode, Layout.EXPERT_MAJOR, 5, num_sms=3, **fields)


@pytest.mark.parametrize("phases", [BOTH, SPLIT])
@pytest.mark.parametrize("mode", MODES)
def test_ids_as_experts_read_them(mode: Mode, phases: tuple[int, ...]) -> None:
    steps = cases(3, 9, hidden_size=136, num_experts=7, topk=3)
    for exact_shapes in (False, True):
        run(steps, mode, Layout.FLAT, phases=phases, absent_id=77, exact_shapes=exact_shapes)
    most = 5 if mode is Mode.LL else 9
    few = [replace(step, tokens=tuple(min(most, tokens) for tokens in step.tokens)) for step in steps]
    loop = Loopback(
        lambda group: few[0].config(
            group, mode=Mode.AUTO, ll_max_tokens=5, layout=Layout.FLAT, absent_id=77, exact_shapes=False
        ),
        3,
        None,
        Emulated(),
    )
    for case in few:
        check(loop, case, mode, phases)


@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_dispatch_leaves_no_id_that_is_none(mode: Mode) -> None:
    """Experts read all rows of a fixed shape, whatever has failed."""
    case = RoutingCase(5, 4, 64, (3, 8), "uniform", draw_seed(), max_tokens=8)
    options: dict[str, Any] = {"absent_id": 77, "exact_shapes": False, "timeout_s": 60.0}
    loop = Loopback(
        lambda group: case.config(group, mode=mode, layout=Layout.FLAT, **options), 2, 3, Emulated()
    )  # fmt: skip
    check_what_a_stop_left(loop, case, mode, 0x7F, BOTH)


@pytest.mark.parametrize("mode", MODES)
def test_rows_past_the_capacity_are_dropped_and_counted(mode: Mode) -> None:
    steps = [RoutingCase(4, 3, 64, (6, 1, 6), kind, draw_seed(), max_tokens=6) for kind in ("one_expert", "uniform")]
    run(steps, mode, Layout.EXPERT_MAJOR, overflow=Overflow.DROP, max_recv_rows=4)


@pytest.mark.parametrize("columns", [3, 4, 132])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_scales_of_the_caller(mode: Mode, layout: Layout, columns: int) -> None:
    """Of 12 bytes, which the copy engine does not move, of 16, and of more than it has room for."""
    steps = cases(3, 6, hidden_size=128, num_experts=7, topk=3)
    run(steps, mode, layout, dtype=FP8, scale_columns=columns)


@pytest.mark.parametrize("to", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_quantised_in_front(mode: Mode, layout: Layout, to: str) -> None:
    """Special values are in the rows; of MXFP8 the last block is short."""
    steps = cases(3, 6, hidden_size=144 if to == "mxfp8" else 160, num_experts=7, topk=3)
    dtype = torch.float16 if layout is Layout.RANK_MAJOR else torch.bfloat16
    run(steps, mode, layout, quantize=to, dtype=dtype, output_dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_phases_and_backward(mode: Mode, layout: Layout) -> None:
    steps = cases(3, 6, hidden_size=64, num_experts=7, topk=4)
    run(steps, mode, layout, phases=SPLIT)
    run(steps, mode, layout, backward=True)


@pytest.mark.parametrize("phases", [BOTH, SPLIT])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_stopped_dispatch_left_is_not_believed(mode: Mode, layout: Layout, phases: tuple[int, ...]) -> None:
    case = RoutingCase(5, 4, 64, (3, 8), "uniform", draw_seed(), max_tokens=8)
    for left in (0x7F, 0x00, None, None):
        loop = Loopback(lambda group: case.config(group, mode=mode, layout=layout, timeout_s=60.0), 2, 3, Emulated())
        check_what_a_stop_left(loop, case, mode, left, phases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_loaded_without_credit_go_nowhere(layout: Layout) -> None:
    """HT combine loads before it knows; here more chunks than may wait to be told of. What follows the start of a rank
    whose peer may still read the slot is nothing."""
    case = RoutingCase(5, 4, 16, (300, 300), "uniform", draw_seed(), max_tokens=300)
    fields: dict[str, Any] = {"mode": Mode.HT, "layout": layout, "max_in_flight": 1, "timeout_s": 0.05}
    loop = Loopback(lambda group: case.config(group, **fields), 2, 1, Emulated())
    handles = check(loop, case, Mode.HT)
    for granted in (True, False):
        numbers = [loop.put(torch.ones(*h.rows_shape, *(() if layout.per_expert else (4,)))) for h in handles]
        calls = combine_of(loop, handles, numbers)
        peer = loop.memory[1].data.view(torch.int64)
        before = peer.clone()
        loop.launch(calls[:1], 1)
        changed = set((peer != before).nonzero().flatten().tolist())
        started = abi.FLAGS.index("COMBINE_STARTED") * 2
        assert started in changed
        assert (len(changed) > 300) if granted else (changed == {started})
        fault = loop.engines[0].tables.host.fault()
        if granted:
            assert fault is None
            continue
        assert isinstance(fault, PeerTimeout)
        assert fault.phase == "credit"
        assert fault.block in range(max(call.launch.num_blocks for call in calls))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_sums_of_more_rows_than_fit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """LL combine prefetches as many rows of a sum as there is room for, then the others, while those of the next sum
    are in flight; 272 columns are less than a packet."""
    monkeypatch.setattr(plan, "STAGED_ROWS", rows)
    run(cases(2, 7, hidden_size=272, num_experts=20, topk=8)[::3], Mode.LL, Layout.EXPERT_MAJOR)
    run([RoutingCase(20, 8, 1040, (90, 70), "zipf", draw_seed())], Mode.LL, Layout.EXPERT_MAJOR, blocks=2)


@pytest.mark.parametrize("mode", MODES)
def test_quantising_on_the_way(mode: Mode) -> None:
    run(cases(2, 4, hidden_size=272, num_experts=5, topk=3), mode, Layout.EXPERT_MAJOR, quantize=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_replicas_wide_rows_and_lone_blocks(mode: Mode, layout: Layout) -> None:
    for case in cases(3, 7, hidden_size=64, num_experts=6, topk=4)[:3]:
        run([replace(case, experts=replicated(3, 6, 5, draw_seed()))], mode, layout)
    run([RoutingCase(6, 3, 2056, (3, 0, 2), seed=draw_seed())], mode, layout, blocks=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_handles_are_used_again(mode: Mode, layout: Layout) -> None:
    case = RoutingCase(7, 3, 272, (5, 0, 6), "single_none", draw_seed(), max_tokens=6)
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=layout), 3, None, Emulated())
    handles = check(loop, case, mode)
    check(loop, replace(case, seed=draw_seed()), mode)
    check(loop, case, mode, again=replace(case, seed=draw_seed()), previous=handles)


@pytest.mark.parametrize("mode", MODES)
def test_sequence_numbers_past_32_bits(mode: Mode) -> None:
    case = RoutingCase(5, 2, 64, (4, 3), "uniform", 0, max_tokens=4)
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=Layout.EXPERT_MAJOR), 2, None, Emulated())
    loop.preset((1 << 32) - 3)
    for _ in range(5):
        check(loop, replace(case, seed=draw_seed()), mode)


@pytest.mark.parametrize("blocks", [1, 3])
def test_chunks_and_tiles_of_rank_wise_routing(blocks: int) -> None:
    """Partial chunks, several tiles per block, tokens with two experts on a rank; warps without a first segment."""
    case = RoutingCase(24, 8, 64, (530, 0, 97), "uniform", draw_seed(), max_tokens=530)
    few = replace(case, tokens=(33, 1, 5), kind="repeated", max_tokens=33, topk=5)
    for shape in (case, few):
        run([shape, replace(shape, seed=draw_seed())], Mode.HT, Layout.RANK_MAJOR, blocks=blocks)


@pytest.mark.parametrize("blocks", [1, 3])
def test_long_rows_as_they_are(blocks: int) -> None:
    """HT combine takes their chunks, several per block, when stages are free, and has fewer stores in flight."""
    case = RoutingCase(6, 3, 4104, (70, 0, 33), "single_none", draw_seed(), max_tokens=70)
    run([case, replace(case, seed=draw_seed())], Mode.HT, Layout.RANK_MAJOR, blocks=blocks)


@pytest.mark.parametrize("hidden", [208, 7168, 8208])
def test_rows_that_become_fp8_one_by_one(hidden: int) -> None:
    """Reduce warps of HT combine take stages in rotation, filled in any order; short and long rows, two segments."""
    case = RoutingCase(6, 3, hidden, (110, 0, 33), "uniform", draw_seed(), max_tokens=110)
    for blocks in (1, 3):
        run([case], Mode.HT, Layout.RANK_MAJOR, blocks=blocks, combine_dtype=FP8)


SUMMED = [(hidden, torch.bfloat16) for hidden in (208, 4096, 7168, 8192, 8208)]
SUMMED += [(hidden, FP8) for hidden in (208, 2880, 4096, 7168, 8208)]


@pytest.mark.parametrize(("hidden", "moved"), SUMMED)
def test_rows_that_are_summed_by_teams(hidden: int, moved: torch.dtype) -> None:
    """Reduce teams of HT combine, four or two; more sums than tickets; one segment and two. Few groups of columns per
    warp, and the maximum."""
    case = RoutingCase(12, 8, hidden, (90, 0, 33), "uniform", draw_seed(), max_tokens=90)
    for blocks in (1, 3):
        run([case], Mode.HT, Layout.GROUPED, blocks=blocks, combine_dtype=moved)
    if hidden == 208:  # a sum per stage
        run([replace(case, topk=1)], Mode.HT, Layout.GROUPED, blocks=1, combine_dtype=moved)


def test_many_tokens_in_few_blocks() -> None:
    """More than a tile of HT's routing; more rows than the queue of LL gives out by itself."""
    case = RoutingCase(24, 8, 64, (300, 0, 257), "uniform", draw_seed(), max_tokens=300)
    run([case, replace(case, kind="repeated", seed=draw_seed())], Mode.HT, Layout.EXPERT_MAJOR)
    few = replace(case, tokens=(72, 33, 1), max_tokens=72, topk=4)
    run([few], Mode.LL, Layout.EXPERT_MAJOR, blocks=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_more_ranks_than_lanes_and_several_chunks(mode: Mode, layout: Layout) -> None:
    """LL's lanes stand for two ranks each, tokens of earlier chunks count; more ids than are prefetched at once.

    A lane of HT combine's load warp stands for two sources, with different numbers of chunks.
    """
    tokens = (140, 33, *(0,) * 31, 70)
    case = RoutingCase(70, 8, 16, tokens, "uniform", draw_seed(), max_tokens=140)
    blocks = 1 if mode is Mode.LL else 3
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=layout), len(tokens), blocks, Emulated())
    handles = check(loop, case, mode)
    check(loop, case, mode, again=replace(case, seed=draw_seed()), previous=handles)
