"""The byte map and the launch plans: pure arithmetic, checked without a GPU."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.errors import ConfigError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.engine import LaunchEngine
from ep_kernels.transports.nvlink.calls.tables import wire_bytes
from ep_kernels.transports.nvlink.transport import NvlinkTransport
from ep_kernels.types import Layout, Mode
from tests.emulator.machine import without_driver
from tests.gpu.loopback_group import LoopGroup

OF_LL = (
    "row_lines",
    "metadata_lines",
    "count_lines",
    "count_packets",
    "combine_lines",
    "weight_lines",
    "routing_packets",
)
FLAGGED = ("counts", "arrivals")
OF_HT = (*FLAGGED, "routing_ids", "metadata", "scales", "combine_rows", "combine_weights", "combine_routing_ids")
OF_COMBINE = (
    *(name for name in OF_HT if name.startswith("combine")),
    "combine_lines",
    "weight_lines",
    "routing_packets",
)
MAKERS = (plan.dispatch_launch, plan.combine_launch)


def config(rank: int = 0, size: int = 8, **changes: Any) -> MoEConfig:
    fields = {"num_experts": 256, "hidden_size": 7168, "topk": 8, "max_tokens_per_rank": 128, "mode": Mode.AUTO}
    return MoEConfig(group=LoopGroup(rank, size), **(fields | changes))


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
@pytest.mark.parametrize("layout", list(Layout))
def test_arrays_do_not_overlap(mode: Mode, layout: Layout) -> None:
    sizes = plan.sizes_of(config(mode=mode, layout=layout, quantize=True, combine_dtype=torch.float8_e4m3fn))
    regions, shape = abi.region_map(sizes.shape), sizes.shape
    end = len(abi.FLAGS) * shape.size * 8
    for name in abi.ARRAYS:
        first = getattr(regions, name)
        assert first >= end, name
        assert first % abi.ALIGN == 0
        absent = (name in OF_LL and mode is Mode.HT) or (name in OF_HT and mode is Mode.LL)
        absent |= name == "arrivals" and not layout.per_expert
        slots = shape.combine_slots if name in OF_COMBINE else shape.dispatch_slots
        end = first + (0 if absent else slots * getattr(regions, f"{name}_stride"))
    assert 0 <= regions.num_bytes - end < abi.ALIGN


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
@pytest.mark.parametrize("layout", list(Layout))
def test_what_must_be_blank(mode: Mode, layout: Layout) -> None:
    """Flags, and all arrays with flags in their data: HT's behind them, LL's together at the end; no output byte."""
    assert abi.ARRAYS[-len(OF_LL) :] == OF_LL
    sizes = plan.sizes_of(config(mode=mode, layout=layout))
    regions, engine = abi.region_map(sizes.shape), LaunchEngine.__new__(LaunchEngine)
    engine.tables = SimpleNamespace(world=SimpleNamespace(map=regions))  # type: ignore[assignment]
    (flags, flags_end), (lines, lines_end) = engine.blank_bytes
    assert (flags, lines_end) == (regions.flags, regions.num_bytes)
    assert flags_end >= len(abi.FLAGS) * sizes.shape.size * 8
    for name in OF_LL:
        slots = sizes.shape.combine_slots if name in OF_COMBINE else sizes.shape.dispatch_slots
        size = 0 if mode is Mode.HT else slots * getattr(regions, f"{name}_stride")
        assert lines <= getattr(regions, name) <= getattr(regions, name) + size <= lines_end, name
    for name in FLAGGED:
        absent = mode is Mode.LL or (name == "arrivals" and not layout.per_expert)
        size = 0 if absent else sizes.shape.dispatch_slots * getattr(regions, f"{name}_stride")
        assert flags <= getattr(regions, name) <= getattr(regions, name) + size <= flags_end or absent, name
    for name in set(OF_HT) - set(FLAGGED):
        assert flags_end <= getattr(regions, name) <= lines, name
    rows_end = regions.rows + sizes.shape.dispatch_slots * regions.rows_stride
    assert flags_end <= regions.rows < rows_end <= lines


@pytest.mark.parametrize("size", [1, 3, 16, 17, abi.MAX_RANKS])
@pytest.mark.parametrize("layout", list(Layout))
def test_count_and_routing_packets_are_16_bytes_of_a_rank(layout: Layout, size: int) -> None:
    """16 bytes per rank, stored as one: so aligned. Counts beside them only where rows are grouped per expert."""
    shape = plan.sizes_of(config(size=size, layout=layout)).shape
    regions = abi.region_map(shape)
    for first, stride in (
        (regions.count_packets, regions.count_packets_stride),
        (regions.routing_packets, regions.routing_packets_stride),
    ):
        assert first % 16 == stride % 16 == 0
        assert 16 * size <= stride < 16 * size + abi.ALIGN
    experts = -(-256 // size) if layout.per_expert else 0
    assert abi.LINE_INTS * (shape.count_lines - 1) < experts <= abi.LINE_INTS * shape.count_lines or experts == 0
    assert (shape.count_lines == 0) == (not layout.per_expert)
    assert (regions.count_lines_stride == 0) == (not layout.per_expert)


@pytest.mark.parametrize("topk", [1, 3, 7, 8, 32])
@pytest.mark.parametrize(
    ("changes", "row", "partial"),
    [
        ({"hidden_size": 480, "dtype": torch.bfloat16}, 1, 1),
        ({"hidden_size": 7168, "dtype": torch.bfloat16}, 15, 15),
        ({"hidden_size": 488, "dtype": torch.bfloat16}, 2, 2),
        ({"hidden_size": 7168, "quantize": True}, 8, 15),
        ({"hidden_size": 896, "quantize": True, "combine_dtype": torch.float8_e4m3fn}, 1, 1),
        ({"hidden_size": 912, "quantize": True, "combine_dtype": torch.float8_e4m3fn}, 2, 2),
        ({"hidden_size": 944, "dtype": torch.uint8, "scale_columns": 16, "scale_dtype": torch.uint8}, 1, 2),
        ({"hidden_size": 944, "dtype": torch.uint8, "scale_columns": 17, "scale_dtype": torch.uint8}, 2, 2),
    ],
)
def test_lines_hold_what_travels(changes: dict[str, Any], row: int, partial: int, topk: int) -> None:
    """Whole rows, with the scales that travel beside or inside them; a metadata entry per k."""
    shape = plan.sizes_of(config(topk=topk, **changes)).shape
    assert (shape.row_packets, shape.combine_packets) == (row, partial)
    assert abi.LINE_ENTRIES * (shape.metadata_lines - 1) < topk <= abi.LINE_ENTRIES * shape.metadata_lines
    assert abi.LINE_INTS * (shape.weight_lines - 1) < topk <= abi.LINE_INTS * shape.weight_lines
    assert shape.metadata_lines * abi.LINE_ENTRIES * abi.METADATA_BYTES <= shape.metadata_lines * abi.LINE_BYTES


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("mode", "asked", "tokens", "held"),
    [
        (Mode.LL, None, 4096, 4096),
        (Mode.LL, 64, 4096, 4096),  # not looked at
        (Mode.AUTO, None, 4096, plan.LL_MAX_TOKENS[Layout.GROUPED]),
        (Mode.AUTO, None, 16, 16),
        (Mode.AUTO, 64, 4096, 64),
        (Mode.AUTO, 64, 63, 63),
        (Mode.AUTO, 8192, 4096, 4096),
        (Mode.AUTO, 0, 4096, 1),  # steps without any token run LL
    ],
)
def test_lines_are_for_steps_that_run_low_latency(
    mode: Mode, asked: int | None, tokens: int, held: int, exact: bool
) -> None:
    """AUTO takes HT past its crossover; the arrays of HT, and what callers see, are for all tokens."""
    c = config(mode=mode, layout=Layout.GROUPED, max_tokens_per_rank=tokens, ll_max_tokens=asked, exact_combine=exact)
    shape = plan.sizes_of(c).shape
    regions, each = abi.region_map(shape), shape.size if not exact else shape.topk
    assert (shape.max_tokens, shape.ll_tokens, shape.num_partials) == (tokens, held, each)
    assert regions.row_lines_stride == held * 8 * 15 * abi.PACKET_BYTES
    assert regions.metadata_lines_stride == held * 8 * 2 * abi.LINE_BYTES
    assert regions.combine_lines_stride == held * each * 15 * abi.PACKET_BYTES
    assert regions.weight_lines_stride == held * 8 * abi.LINE_BYTES
    assert regions.rows_stride == tokens * 8 * 8 * 7168 * 2
    assert regions.combine_rows_stride == tokens * each * 7168 * 2
    assert regions.combine_weights_stride == tokens * 8 * 8 * 4


def test_map_is_equal_on_all_ranks() -> None:
    for changes in ({"num_experts": 13, "topk": 3}, {"num_experts": 3, "topk": 2}):
        for layout in Layout:
            maps = {bytes(abi.region_map(plan.sizes_of(config(r, layout=layout, **changes)).shape)) for r in range(8)}
            assert len(maps) == 1


def test_slots_follow_what_may_be_open() -> None:
    for flight in (1, 2, 5):
        assert plan.sizes_of(config(max_in_flight=flight)).shape.dispatch_slots == flight + 1
        assert plan.sizes_of(config(max_in_flight=flight, mode=Mode.HT)).shape.dispatch_slots == flight


@pytest.mark.parametrize("tokens", [1, 8, 128, 4096])
@pytest.mark.parametrize(
    ("hidden", "quantize"),  # fp8 rows are multiples of 16 bytes, so 2056 columns are not quantised
    [(h, q) for h in (16, 2056, 2880, 7168, 16384) for q in (False, True) if not (q and h % 16)],
)
def test_launches_fit(tokens: int, hidden: int, quantize: bool) -> None:
    c = config(max_tokens_per_rank=tokens, hidden_size=hidden, quantize=quantize)
    sizes = plan.sizes_of(c)
    for mode in (Mode.LL, Mode.HT):
        for launch in (make(c, sizes, mode, 132) for make in MAKERS):
            assert launch.shared_bytes <= plan.SHARED_BYTES
            assert launch.work(3).phases == 3
            assert 1 <= launch.num_blocks <= 132
            if mode is Mode.LL:
                assert 1 <= launch.num_senders < launch.num_blocks
                assert launch.work(1).num_senders == launch.num_senders
                continue
            if mode is Mode.HT and launch == plan.combine_launch(c, sizes, mode, 132):
                continue
            assert launch.segment_bytes % plan.SEGMENT_UNIT == 0
            assert launch.segment_bytes <= plan.MAX_SEGMENT
            stages = plan.WARPS * jit.NUM_STAGES * (launch.segment_bytes + plan.STAGE_EXTRA)
            assert launch.stage_offset + stages == launch.shared_bytes


@pytest.mark.parametrize("num_sms", [2, 3, 7, 64, 132, 148])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_ll_blocks_send_or_receive(layout: Layout, quantize: bool, num_sms: int) -> None:
    """One block on each multiprocessor; some send, some receive, however few there are."""
    c = config(layout=layout, quantize=quantize, combine_dtype=torch.float8_e4m3fn if quantize else None)
    for make in MAKERS:
        launch = make(c, plan.sizes_of(c), Mode.LL, num_sms)
        assert launch.num_blocks == num_sms
        assert 1 <= launch.num_senders < num_sms
        assert not launch.cooperative


def test_few_ll_blocks_still_fill_the_links() -> None:
    """A share that is right for a whole GPU leaves too few senders of a part of one."""

    def senders(num_sms: int) -> int:
        c = config(layout=Layout.EXPERT_MAJOR)
        return plan.dispatch_launch(c, plan.sizes_of(c), Mode.LL, num_sms).num_senders

    assert [senders(n) for n in (16, 24, 32)] == [int(n * plan.FEW_SHARE) for n in (16, 24, 32)]
    assert senders(64) == plan.ENOUGH_SENDERS
    assert senders(132) == int(132 * plan.DISPATCH_SENDERS[True, False]) > plan.ENOUGH_SENDERS


def test_tables_of_an_ll_block_fit_or_are_refused() -> None:
    """They grow with experts and tokens; what AUTO never runs in LL takes no room."""
    most = {"experts": 0, "tokens": 0}
    for shift in range(5, 18):
        for name, field in (("experts", "num_experts"), ("tokens", "max_tokens_per_rank")):
            c = config(mode=Mode.LL, **{field: 1 << shift})
            if most[name] < 1 << (shift - 1) and shift > 5:
                with pytest.raises(ConfigError, match="max_tokens_per_rank, num_experts"):
                    plan.dispatch_launch(c, plan.sizes_of(c), Mode.LL, 132)
                continue
            with suppress(ConfigError):
                assert plan.dispatch_launch(c, plan.sizes_of(c), Mode.LL, 132).shared_bytes <= plan.SHARED_BYTES
                most[name] = 1 << shift
    assert most["experts"] >= 1 << 12
    assert most["tokens"] == 1 << 14
    large = config(mode=Mode.AUTO, max_tokens_per_rank=1 << 17)
    assert plan.dispatch_launch(large, plan.sizes_of(large), Mode.LL, 132).shared_bytes < plan.SHARED_BYTES


@pytest.mark.parametrize("layout", list(Layout))
def test_a_lone_block_sends_and_receives(layout: Layout) -> None:
    c = config(layout=layout)
    for make in MAKERS:
        launch = make(c, plan.sizes_of(c), Mode.LL, 1)
        assert (launch.num_blocks, launch.num_senders) == (1, 1)


@pytest.mark.parametrize(("size", "experts"), [(1, 8), (4, 15), (8, 256), (9, 100), (abi.MAX_RANKS, 300)])
@pytest.mark.parametrize("layout", list(Layout))
def test_dispatch_has_room_for_its_tables(layout: Layout, size: int, experts: int) -> None:
    """The arrays of `carve_ll` (kernels/routing/ll_scan.cuh), one by one, behind barriers and waits."""
    c = config(size=size, num_experts=experts, layout=layout)
    stride = c.resolved_expert_map.stride if layout.per_expert else 0
    keys = size * stride
    table, row_start, counts, start, total, offset = experts, size + 1, keys, keys, stride, stride + 1
    words = table + row_start + counts + start + total + offset + size * (1 + stride)
    chunks = -(-plan.ll_tokens(c) // 32)
    masks = keys * chunks if keys * chunks <= abi.MAX_MASK_WORDS else 0
    pointers = 2 * size
    launch = plan.dispatch_launch(c, plan.sizes_of(c), Mode.LL, 132)
    assert launch.shared_bytes == 512 + -(-8 * size // 16) * 16 + 8 * (32 * chunks + pointers) + 4 * (words + masks)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("size", [1, 4, 9, abi.MAX_RANKS])
def test_combine_has_room_for_its_addresses_and_rows(size: int, layout: Layout) -> None:
    """Behind barriers and waits an address per rank (`recv_buffers` in kernels/ll/combine.cuh), then, where rows are
    summed, those of two partials per warp."""
    c = config(size=size, layout=layout)
    launch = plan.combine_launch(c, plan.sizes_of(c), Mode.LL, 132)
    control = 512 + -(-8 * size // 16) * 16 + 8 * size
    assert 0 <= launch.stage_offset - control < 128
    assert launch.stage_offset % 128 == 0
    assert launch.segment_bytes == (min(c.topk, plan.STAGED_ROWS) * 1024 if layout.per_expert else 0)
    assert launch.shared_bytes == launch.stage_offset + 16 * 2 * launch.segment_bytes


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("topk", [1, 8, 32])
def test_rows_of_a_sum_fit_in_every_dtype(output: torch.dtype, fp8: bool, topk: int) -> None:
    """A lane has the columns of two vectors of 16 bytes, as they travel, of one row at least."""
    moved = torch.float8_e4m3fn if fp8 else output
    c = config(
        size=abi.MAX_RANKS,
        num_experts=256,
        topk=topk,
        layout=Layout.EXPERT_MAJOR,
        output_dtype=output,
        combine_dtype=moved,
    )
    launch = plan.combine_launch(c, plan.sizes_of(c), Mode.LL, 132)
    row = 32 * 2 * (16 // moved.itemsize) * output.itemsize
    assert 1 <= launch.segment_bytes // row <= topk
    assert launch.segment_bytes % row == 0
    assert launch.shared_bytes <= plan.SHARED_BYTES


def test_rows_of_a_sum_on_gpus_for_workstations() -> None:
    """Their blocks have 99 KB: three rows of bf16, one that becomes fp8, none of fp32 that does."""
    block_bytes = 99 * 1024 - plan.STATIC_BYTES

    def launch(**changes: Any) -> plan.Launch:
        c = config(size=4, layout=Layout.EXPERT_MAJOR, mode=Mode.LL, **changes)
        return plan.combine_launch(c, plan.sizes_of(c), Mode.LL, 132, block_bytes)

    assert launch().segment_bytes == 3 * 1024
    assert launch(combine_dtype=torch.float8_e4m3fn).segment_bytes == 2048
    assert launch().shared_bytes <= block_bytes
    with pytest.raises(ConfigError, match=r"output_dtype, combine_dtype.*131072 bytes"):
        launch(output_dtype=torch.float32, combine_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_combine_takes_the_blocks_that_its_bytes_need(size: int) -> None:
    """More where rows are summed on their way out, or where less travels; as many as given where a number is given."""

    def blocks(**changes: Any) -> int:
        c = config(size=size, mode=Mode.HT, **changes)
        return plan.combine_launch(c, plan.sizes_of(c), Mode.HT, 132).num_blocks

    flat, grouped = blocks(layout=Layout.FLAT), blocks(layout=Layout.GROUPED)
    assert 0 < flat <= plan.HT_BLOCKS
    assert 0 < grouped <= plan.HT_BLOCKS
    assert size > 8 or flat < grouped
    assert flat * plan.SEND_GBPS >= plan.LINK_GBPS
    assert flat < blocks(layout=Layout.FLAT, combine_dtype=torch.float8_e4m3fn) <= plan.HT_BLOCKS
    assert {n % plan.BLOCK_UNIT for n in (flat, grouped)} == {0}
    assert blocks(layout=Layout.FLAT, num_sms=132) == 132


@pytest.mark.parametrize(("size", "blocks"), [(2, 44), (4, 32), (8, 28), (64, 24)])
def test_combine_of_short_rows_takes_the_blocks_that_their_number_needs(size: int, blocks: int) -> None:
    """Receiving a token's rows takes a block no longer than the links take to carry them."""
    c = config(size=size, mode=Mode.HT, layout=Layout.FLAT, hidden_size=2048, topk=8)
    ranks = size * (1 - (1 - 1 / size) ** 8)
    assert ranks * plan.RECV_PARTIAL_NS / blocks <= ranks * (size - 1) / size * 4096 / plan.LINK_GBPS
    assert plan.combine_blocks(c) == blocks


@pytest.mark.parametrize(("hidden", "size", "blocks"), [(2048, 4, 64), (2048, 8, 48), (2880, 8, 32), (7168, 8, 28)])
def test_combine_of_short_rows_that_are_summed_takes_more(hidden: int, size: int, blocks: int) -> None:
    """The time per row does not depend on its length; rows of 7168 columns are bound by their bytes."""
    c = config(size=size, mode=Mode.HT, layout=Layout.GROUPED, hidden_size=hidden, topk=8)
    ranks = size * (1 - (1 - 1 / size) ** 8)
    links_ns = ranks * (size - 1) / size * hidden * 2 / plan.LINK_GBPS
    assert blocks == plan.HT_BLOCKS or (8 + 2 * ranks) * plan.REDUCE_ROW_NS / blocks <= links_ns
    assert plan.combine_blocks(c) == blocks


@pytest.mark.parametrize(
    ("layout", "size", "blocks"), [(Layout.FLAT, 4, 48), (Layout.FLAT, 8, 40), (Layout.GROUPED, 8, 48)]
)
def test_combine_of_fp8_partials_takes_more(layout: Layout, size: int, blocks: int) -> None:
    """A block converts fp8 more slowly than it moves bytes, and the links carry half the bytes."""
    c = config(size=size, mode=Mode.HT, layout=layout, hidden_size=7168, topk=8, combine_dtype=torch.float8_e4m3fn)
    ranks = size * (1 - (1 - 1 / size) ** 8)
    rows, moved = 8 if layout.per_expert else ranks, 7168 + 7168 // 128 * 4
    through = 2 * 7168 * (rows + 1) + 2 * ranks * moved
    assert through / plan.COMBINE_GBPS[True] / blocks <= ranks * (size - 1) / size * moved / plan.LINK_GBPS
    assert plan.combine_blocks(c) == blocks


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_dispatch_takes_the_blocks_that_its_bytes_need(size: int) -> None:
    """More where rows become fp8 on the way; all where the receiver copies; as given where a number is given."""

    def blocks(**changes: Any) -> int:
        c = config(size=size, mode=Mode.HT, **changes)
        return plan.dispatch_launch(c, plan.sizes_of(c), Mode.HT, 132).num_blocks

    flat = blocks(layout=Layout.FLAT)
    assert 0 < flat < plan.HT_BLOCKS
    assert flat == blocks(layout=Layout.RANK_MAJOR)
    assert flat < blocks(layout=Layout.FLAT, quantize=True) <= plan.HT_BLOCKS
    assert flat % plan.BLOCK_UNIT == 0
    assert blocks(layout=Layout.GROUPED) == plan.HT_BLOCKS
    assert blocks(layout=Layout.FLAT, num_sms=132) == 132


@pytest.mark.parametrize(
    ("limits", "dispatch", "combine"),
    [
        ({"dispatch_sms": 24}, 24, None),
        ({"combine_sms": 24}, None, 24),
        ({"num_sms": 40, "combine_sms": 24}, 40, 24),
        ({"dispatch_sms": 8, "combine_sms": 500}, 8, 132),
    ],
)
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_each_operation_has_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, limits: dict[str, int], dispatch: int | None, combine: int | None
) -> None:
    without_driver(monkeypatch)

    def blocks(**fields: int) -> list[int]:
        engine = LaunchEngine(config(size=8, mode=mode, layout=Layout.GROUPED, **fields), torch.device("cpu"), 132)
        return [made[mode].launch.num_blocks for made in (engine.dispatch_operations, engine.combine_operations)]

    free = blocks()
    assert blocks(**limits) == [dispatch or free[0], combine or free[1]]


def test_a_lone_rank_has_no_links_to_wait_for() -> None:
    c = config(size=1, mode=Mode.HT, layout=Layout.FLAT)
    assert plan.combine_launch(c, plan.sizes_of(c), Mode.HT, 132).num_blocks == plan.HT_BLOCKS
    assert plan.dispatch_launch(c, plan.sizes_of(c), Mode.HT, 132).num_blocks == plan.HT_BLOCKS
    assert plan.combine_launch(c, plan.sizes_of(c), Mode.HT, 5).num_blocks == 5


@pytest.mark.parametrize(("size", "experts", "topk"), [(1, 8, 8), (4, 15, 3), (8, 256, 8), (abi.MAX_RANKS, 300, 32)])
@pytest.mark.parametrize("layout", list(Layout))
def test_ht_dispatch_has_room_for_its_tables(layout: Layout, size: int, experts: int, topk: int) -> None:
    """The arrays of `make_scratch` (routing/ht_scan.cuh), one by one, between barriers and waits and the stages."""
    c = config(size=size, num_experts=experts, layout=layout, topk=topk)
    stride = c.resolved_expert_map.stride
    n, groups = size * stride + size, stride if layout.per_expert else 0
    part_counts, tile_prefix, block_prefix, dst_offset, all_sources = 2 * plan.WARPS * n, 4 * n, 4 * n, 4 * n, 4 * n
    source_rows, row_start, offset, words = 4 * size, 4 * (size + 1), 4 * (groups + 1), 4 * 4
    table, capacities = 4 * experts, 4 * size
    tables = table + capacities + plan.TILE_BYTES + part_counts + tile_prefix + block_prefix + dst_offset
    tables += all_sources + source_rows + row_start + offset + words
    launch = plan.dispatch_launch(c, plan.sizes_of(c), Mode.HT, 132)
    assert launch.stage_offset == -(-(512 + -(-8 * size // 16) * 16 + tables) // 128) * 128
    assert launch.cooperative


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float16, 2)])
@pytest.mark.parametrize("hidden", [16, 272, 2880, 7168, 16384])
def test_rows_are_loaded_as_they_lie_and_quantised_in_place(hidden: int, dtype: torch.dtype, width: int) -> None:
    """A stage holds a segment of x before it is fp8; segments are whole scale blocks, whose scales fit behind them."""
    c = config(hidden_size=hidden, dtype=dtype, quantize=True, max_tokens_per_rank=4096)
    launch = plan.dispatch_launch(c, plan.sizes_of(c), Mode.HT, 132)
    columns, rest = divmod(launch.segment_bytes, width)
    assert rest == 0
    assert columns % plan.SEGMENT_UNIT == 0
    assert columns // 128 * 4 <= plan.STAGE_EXTRA


def test_crossover_is_known_for_every_layout() -> None:
    assert plan.LL_MAX_TOKENS.keys() == set(Layout)


def test_more_ranks_than_a_launch_carries_are_refused() -> None:
    plan.sizes_of(config(size=plan.MAX_RANKS))
    with pytest.raises(ConfigError, match="group: expected at most 64 ranks"):
        plan.sizes_of(config(size=plan.MAX_RANKS + 1))


def test_too_many_experts_are_refused() -> None:
    c = config(num_experts=1 << 16)
    with pytest.raises(ConfigError, match="num_experts"):
        plan.dispatch_launch(c, plan.sizes_of(c), Mode.LL, 132)


def test_what_kernels_count_in_32_bits_is_bounded() -> None:
    """A received row has a record for each k, and HT dispatch numbers all of them."""
    most = (1 << 31) // (8 * 32)
    few = {"size": 8, "topk": 32, "mode": Mode.HT, "layout": Layout.FLAT, "max_recv_rows": 1024}
    plan.sizes_of(config(**few, max_tokens_per_rank=most - 1))
    with pytest.raises(ConfigError, match="max_tokens_per_rank: expected fewer than 2"):
        plan.sizes_of(config(**few, max_tokens_per_rank=most))


def test_header_is_what_ctypes_says() -> None:
    text = abi.header()
    for record in (abi.State, abi.World, abi.DispatchArgs, abi.CombineArgs):
        assert f"static_assert(sizeof({record.__name__}) == {ctypes.sizeof(record)}" in text
        for field, _ in record._fields_:
            assert f" {field}" in text
    assert f"MAX_RANKS = {abi.MAX_RANKS}, MAX_MASK_WORDS = {abi.MAX_MASK_WORDS};" in text


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("common/wait", "kArrivalTotalBits", abi.ARRIVAL_TOTAL.bit_length() - 1),
        ("layout/ll128", "kLineBytes", abi.LINE_BYTES),
        ("layout/ll128", "kPacketBytes", abi.PACKET_BYTES),
        ("layout/ll128", "kPacketData", abi.PACKET_DATA),
        ("layout/ll128", "kPacketColumns", abi.PACKET_COLUMNS),
        ("layout/ll128", "kLineInts", abi.LINE_INTS),
        ("routing/ht_scan", "kTileEntries", plan.TILE_BYTES // 9),
        ("layout/ll128", "kLineEntries", abi.LINE_ENTRIES),
        ("common/trace", "kNumOpWords", abi.OP_WORDS),
        ("ht/dispatch_send", "kStageExtra", plan.STAGE_EXTRA),
    ],
)
def test_numbers_that_both_sides_name_agree(file: str, name: str, value: int) -> None:
    text = (jit.SOURCES / f"{file}.cuh").read_text()
    assert re.findall(rf"\b{name} = (\d+)[,;]", text) == [str(value)]


def test_fingerprint_follows_the_crossovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They size AUTO's buffers: versions that differ in them must not form a group."""
    before = NvlinkTransport(config()).capabilities.abi
    assert NvlinkTransport(config()).capabilities.abi == before
    monkeypatch.setitem(plan.LL_MAX_TOKENS, Layout.FLAT, plan.LL_MAX_TOKENS[Layout.FLAT] + 1)
    assert NvlinkTransport(config()).capabilities.abi != before


def test_fingerprint_follows_sources() -> None:
    assert abi.fingerprint("a") != abi.fingerprint("b")
    assert len(abi.fingerprint("a")) == 16


def test_records_take_no_name_that_they_do_not_have() -> None:
    """ctypes would store it beside the record, and the GPU would read zeros."""
    with pytest.raises(AttributeError):
        abi.Work(sender=1)


@pytest.mark.parametrize(
    ("fields", "mode", "expected"),
    [
        # 15 packets of 960 bytes of a row, two lines of 7 entries each; rows as they are, 16 bytes for each expert
        ({}, Mode.LL, (15 * 1024 + 2 * 128, 15 * 1024)),
        ({}, Mode.HT, (14336 + 8 * 16, 14336)),
        # 8 packets of 896 columns with their scales; 56 scales of 4 bytes
        ({"quantize": True}, Mode.LL, (8 * 1024 + 2 * 128, 15 * 1024)),
        ({"quantize": True}, Mode.HT, (7168 + 56 * 4 + 8 * 16, 14336)),
    ],
)
def test_bytes_of_a_row_as_it_travels(fields: dict[str, Any], mode: Mode, expected: tuple[int, int]) -> None:
    config = MoEConfig(
        group=LoopGroup(0, 4), num_experts=256, hidden_size=7168, topk=8, max_tokens_per_rank=128, mode=Mode.AUTO,
        layout=Layout.GROUPED, **fields,
    )  # fmt: skip
    assert wire_bytes(config, mode) == expected
