"""Shared memory of HT combine: what `calls/plan.py` plans is what `kernels/ht/` may rely on."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_kernels import jit
from ep_kernels.config import FP8_BLOCK, MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.types import Layout, Mode
from tests.gpu.loopback_group import LoopGroup

HIDDEN = (16, 48, 2056, 2880, 7168, 8192, 8208, 16384, 1 << 20)
WIDTHS = [(2, 2), (4, 4), (2, 1), (4, 1)]
"""Bytes of a column of y, and as sent."""
CONTROL, BLOCK = 4096, plan.SHARED_BYTES


def plans(y_bytes: int, moved: int) -> Iterator[tuple[int, bool, bool, plan.PipelineStages]]:
    """(hidden, whether rows are copied, whether they stay in their stages, stages)."""
    for hidden in (*HIDDEN, *(16 * random.randint(1, 4096) for _ in range(20))):
        for copies, in_place in {(False, False), (y_bytes == moved, y_bytes == moved), (False, moved == 1)}:
            yield hidden, copies, in_place, plan.plan_stages(hidden, y_bytes, moved, copies, in_place, CONTROL, BLOCK)


def max_segment_bytes(moved: int) -> int:
    return plan.MAX_FP8_SEGMENT_BYTES if moved == 1 else plan.MAX_SEGMENT_BYTES


def text_of(file: str) -> str:
    return (jit.SOURCES / f"{file}.cuh").read_text()


def constant(file: str, name: str) -> int:
    """A number that a file of the kernels names."""
    (found,) = re.findall(rf"\b{name} = (\d+)[,;]", text_of(file))
    return int(found)


def config(size: int, **changes: Any) -> MoEConfig:
    fields: dict[str, Any] = {
        "num_experts": 256,
        "hidden_size": 7168,
        "topk": 8,
        "max_tokens_per_rank": 128,
        "mode": Mode.HT,
    }
    return MoEConfig(group=LoopGroup(0, size), **(fields | changes))


@pytest.mark.parametrize(("y_bytes", "moved"), WIDTHS)
def test_segments_make_up_a_row(y_bytes: int, moved: int) -> None:
    """Every column in one segment, none empty; what the copy engine moves is whole 16 bytes at such an address."""
    for hidden, copies, in_place, found in plans(y_bytes, moved):
        assert (found.num_segments - 1) * found.columns < hidden <= found.num_segments * found.columns
        scales = -(-found.columns // FP8_BLOCK) * 4 if moved == 1 else 0
        assert found.columns * moved + scales <= found.segment_bytes <= found.partial_stage_bytes
        assert found.columns * y_bytes <= max_segment_bytes(moved)
        assert found.columns * y_bytes <= found.row_stage_bytes
        assert (
            found.segment_bytes % 16
            == found.partial_stage_bytes % 128
            == found.row_stage_bytes % 128
            == found.stage_offset % 128
            == 0
        )
        last = hidden - (found.num_segments - 1) * found.columns
        assert {columns * y_bytes % 16 for columns in (found.columns, last)} == {0}
        assert found.num_segments == 1 or found.columns % plan.COLUMN_UNIT == 0
        assert not copies or found.segment_bytes >= found.columns * y_bytes
        if in_place and moved == 1:  # scales are written when 64 words of each lane have been read
            assert found.segment_bytes <= min(found.row_stage_bytes, 64 * 4 * 32)


@pytest.mark.parametrize(("y_bytes", "moved"), WIDTHS)
def test_stages_fit_and_nobody_starves(y_bytes: int, moved: int) -> None:
    """The storing warp keeps stages that are still being read: fewer than there are, or it would wait for itself."""
    pending_rows, pending_partials, closing = (
        constant("ht/combine_send", "kPendingRowReads"),
        constant("ht/combine_send", "kPendingPartialReads"),
        4,
    )
    for _, copies, in_place, found in plans(y_bytes, moved):
        assert found.stage_offset >= CONTROL
        assert found.stage_offset + found.num_bytes <= BLOCK
        assert 2 <= found.num_row_stages <= (plan.MAX_SEND_STAGES if in_place else plan.MAX_REDUCE_STAGES)
        assert 2 <= found.num_recv_stages <= plan.MAX_RECV_STAGES
        if not in_place:
            few, many = constant("ht/combine_reduce", "kMinTeamWarps"), constant("ht/combine_reduce", "kMaxTeamWarps")
            group = 32 * (4 if moved == 1 else 16 // y_bytes)
            groups = -(-max_segment_bytes(moved) // y_bytes // (many * group))
            teams = 8 // (few if found.columns <= few * groups * group else many)
            assert max(teams, pending_partials + 1) <= found.num_partial_stages <= plan.MAX_PARTIAL_STAGES, (
                "a stage for each team, in order"
            )
            continue
        assert found.num_partial_stages == 0
        assert found.num_row_stages > pending_rows
        assert copies or found.num_row_stages >= pending_rows + closing, "a stage for the end, for each reduce warp"
        if found.num_segments == 1 and found.row_stage_bytes <= constant("ht/combine_block", "kShortRowBytes"):
            assert found.num_row_stages - pending_rows >= (found.num_row_stages + 1) // 2, (
                "a load of half the stages would wait for itself"
            )


def test_numbers_that_both_sides_name_agree() -> None:
    assert constant("ht/combine_block", "kMaxSendStages") == plan.MAX_SEND_STAGES
    assert constant("ht/combine_block", "kMaxReduceStages") == plan.MAX_REDUCE_STAGES
    assert constant("ht/combine_block", "kMaxPartialStages") == plan.MAX_PARTIAL_STAGES
    assert constant("ht/combine_block", "kMaxRecvStages") == plan.MAX_RECV_STAGES
    assert constant("ht/combine_reduce", "kMaxSegmentBytes") == plan.MAX_SEGMENT_BYTES
    assert constant("ht/combine_reduce", "kMaxFp8SegmentBytes") == plan.MAX_FP8_SEGMENT_BYTES
    assert constant("ht/combine_block", "kShortRowBytes") == plan.SHORT_BYTES


@pytest.mark.parametrize("size", [1, 2, 7, 8, abi.MAX_RANKS])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_launch_holds_control_and_stages(layout: Layout, size: int) -> None:
    """Barriers, waits per peer, rows per source, segments, load requests: what `combine_team` lays before stages."""
    exact = layout.per_expert
    for c in (config(size, layout=layout), config(size, layout=layout, exact_combine=exact)):
        launch, found = plan.combine_launch(c, plan.sizes_of(c), Mode.HT, 24), plan.combine_stages(c)
        copies = c.exact_combine or not layout.per_expert
        control = (
            512 + -(-8 * size // 16) * 16 + -(-4 * size // 16) * 16 + plan.max_stages(copies) * plan.SEGMENT_INFO_BYTES
        )
        control += plan.LOAD_REQUEST_BYTES if copies else 0
        assert control <= launch.stage_offset < control + 128
        assert launch.shared_bytes == launch.stage_offset + found.num_bytes <= plan.SHARED_BYTES
        assert (found.num_partial_stages == 0) == copies


@pytest.mark.parametrize("size", [1, 4, abi.MAX_RANKS])
@pytest.mark.parametrize("tokens", [1, 4, 5, 4096])
def test_every_chunk_has_a_word(size: int, tokens: int) -> None:
    """Behind the flags, for each expert rank; none where LL alone runs."""
    shape = plan.sizes_of(config(size, max_tokens_per_rank=tokens)).shape
    words = (len(abi.FLAGS) + -(-tokens // abi.CHUNK)) * size
    assert 0 <= abi.region_map(shape).counts - 8 * words < abi.ALIGN
    without = plan.sizes_of(config(size, max_tokens_per_rank=tokens, mode=Mode.LL)).shape
    assert 0 <= abi.region_map(without).counts - 8 * len(abi.FLAGS) * size < abi.ALIGN


def test_fp8_travels_with_its_scales_in_one_row() -> None:
    for combine_dtype, row_bytes in ((torch.float8_e4m3fn, 7168 + 7168 // 128 * 4), (torch.bfloat16, 14336)):
        c = config(4, combine_dtype=combine_dtype)
        assert plan.sizes_of(c).shape.combine_row_bytes == row_bytes


@pytest.mark.parametrize(
    ("named", "value", "says", "row"),
    [
        ("MAX_SEND_STAGES", 6, "stages of rows: expected at least 7, got 6", (7168, 2, 1, False, True)),
        ("MAX_SEND_STAGES", 3, "stages of rows: expected at least 4, got 3", (7168, 2, 2, True, True)),
        ("MAX_REDUCE_STAGES", 3, "stages of rows: expected at least 4, got 3", (7168, 2, 2, False, False)),
        ("MAX_PARTIAL_STAGES", 3, "stages of partials: expected at least 4", (2048, 2, 2, False, False)),
        ("NUM_LONG_PARTIALS", 1, "stages of partials: expected at least 2", (7168, 2, 2, False, False)),
    ],
)
def test_a_plan_with_fewer_stages_than_the_kernel_counts_on_is_refused(
    named: str, value: int, says: str, row: tuple[int, int, int, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.plan_stages(*row, CONTROL, BLOCK)
    monkeypatch.setattr(plan, named, value)
    with pytest.raises(AssertionError, match=says):
        plan.plan_stages(*row, CONTROL, BLOCK)


def test_the_kernel_counts_on_as_many_stages_as_the_plan_has() -> None:
    converting = re.search(r"kNumReduceWarps = kCopies \? 0 : kConverts \? (\d+) : (\d+)", text_of("ht/combine_block"))
    reading = constant("ht/combine_send", "kPendingRowReads")
    assert converting is not None
    converting_warps, summing_warps = map(int, converting.groups())
    assert (reading + converting_warps, reading + 1) == (plan.MIN_CONVERT_STAGES, plan.MIN_ROW_STAGES)
    assert (summing_warps, constant("ht/combine_reduce", "kMaxTeamWarps")) == (
        plan.REDUCE_WARPS,
        plan.MAX_TEAM_WARPS,
    )
    assert f"kMinTeamWarps = {plan.MIN_TEAM_WARPS};" in text_of("ht/combine_reduce")
