"""Shared memory of a block of HT combine: stages for rows that are loaded, for partials that are reduced, and for
received partials. Pure arithmetic; the kernel's side is kernels/ht/pipeline.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ep_kernels.config import FP8_BLOCK
from ep_kernels.kernels import abi

MAX_SEND_STAGES, MAX_REDUCE_STAGES, MAX_PARTIAL_STAGES, MAX_RECV_STAGES = 12, 16, 4, 12
"""Maximum stages per pipeline, which is the number of its mbarriers."""
SEGMENT_INFO_BYTES = 16
LOAD_REQUEST_BYTES = 32 * 16
"""An entry of the queue to the load-issue warp: one request per lane (kernels/ht/combine_recv.cuh)."""
NUM_LONG_PARTIALS, SHORT_BYTES = 3, 8192
"""Stages for partials that are longer than SHORT_BYTES: each leaves one stage less for rows."""
MIN_CONVERT_STAGES, MIN_ROW_STAGES = 7, 4
"""Minimum stages for rows that become fp8 in place, and for other rows: those that a store still reads (3,
kernels/ht/combine_send.cuh), and those that end the pipeline: one for each of 4 reduce warps, else 1."""
REDUCE_WARPS, MAX_TEAM_WARPS, MIN_TEAM_WARPS = 8, 4, 2
"""Reduce warps, and the sizes of their teams (kernels/ht/combine_block.cuh, kernels/ht/combine_reduce.cuh)."""
MAX_SEGMENT_BYTES = 16384
"""Most bytes of a segment, which fill a stage."""
MAX_FP8_SEGMENT_BYTES = 14336
"""Most bytes of a segment where rows become fp8 in their stages: the scales, which lie behind the fp8 columns, are
first written when 8 KiB of the row have been read (common/quantize.cuh). A multiple of COLUMN_UNIT columns of two and
of four bytes."""
COLUMN_UNIT = 512
"""Segments of a row that has several: whole scale blocks, whole 16 bytes of scales."""
RECV_SHARE = 0.36
"""Part of the memory for rows and received partials that the latter get. Rows of several experts are summed before they
leave, so more bytes are loaded than received."""
COPIED_RECV_SHARE = 0.7
"""Share of the stages that receive, for copied rows: rows that wait in stages arrive late (docs/lab/kernels/ht.md)."""


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """Sizes in bytes, as in `abi.PipelineSizes`, and the offset of the first stage."""

    num_segments: int
    columns: int
    row_stage_bytes: int
    segment_bytes: int
    partial_stage_bytes: int
    num_row_stages: int
    num_partial_stages: int
    num_recv_stages: int
    stage_offset: int

    @property
    def num_bytes(self) -> int:
        """All stages."""
        num_partials = self.num_partial_stages + self.num_recv_stages
        return self.num_row_stages * self.row_stage_bytes + num_partials * self.partial_stage_bytes

    @property
    def combine_row_bytes(self) -> int:
        """A row of the combine receive buffer: segments with their scales."""
        return self.num_segments * self.segment_bytes

    def record(self) -> Any:
        """The kernel's record."""
        return abi.PipelineSizes(*(getattr(self, name) for name, _ in abi.PipelineSizes._fields_))


def max_stages(in_place: bool) -> int:
    """Stages of all pipelines at most; each has a SegmentInfo."""
    return (MAX_SEND_STAGES if in_place else MAX_REDUCE_STAGES) + MAX_PARTIAL_STAGES + MAX_RECV_STAGES


def plan_stages(
    hidden: int, y_bytes: int, sent_bytes: int, copies: bool, in_place: bool, control_bytes: int, block_bytes: int
) -> PipelineStages:
    """As many stages as fit.

    Args:
        hidden: columns of a row.
        y_bytes, sent_bytes: of a column of y, and as sent: the same, or 1 = fp8 with scales.
        copies: rows are copied.
        in_place: rows are copied, or become fp8 in the stage in which they lie.
        control_bytes: shared memory in front of the stages.
        block_bytes: shared memory of a block.
    """
    max_segment = MAX_FP8_SEGMENT_BYTES if sent_bytes == 1 else MAX_SEGMENT_BYTES
    num_segments = -(-hidden * y_bytes // max_segment)
    columns = hidden if num_segments == 1 else _padded(-(-hidden // num_segments), COLUMN_UNIT)
    scales = _padded(-(-columns // FP8_BLOCK) * 4, 16) if sent_bytes == 1 else 0
    segment = _padded(columns * sent_bytes, 16) + scales
    row, partial = _padded(columns * y_bytes, 128), _padded(segment, 128)
    offset = _padded(control_bytes, 128)
    num_partials = 0 if in_place else MAX_PARTIAL_STAGES if partial <= SHORT_BYTES else NUM_LONG_PARTIALS
    left = block_bytes - offset - num_partials * partial
    num_recv = min(MAX_RECV_STAGES, int(left * (COPIED_RECV_SHARE if copies else RECV_SHARE)) // partial)
    num_rows = min(MAX_SEND_STAGES if in_place else MAX_REDUCE_STAGES, (left - num_recv * partial) // row)
    least = MIN_ROW_STAGES if copies or not in_place else MIN_CONVERT_STAGES
    assert num_rows >= least, f"stages of rows: expected at least {least}, got {num_rows}"
    if not in_place:
        teams = num_teams(columns, y_bytes, sent_bytes)
        assert num_partials >= teams, f"stages of partials: expected at least {teams}, one per team, got {num_partials}"
    return PipelineStages(num_segments, columns, row, segment, partial, num_rows, num_partials, num_recv, offset)


def num_teams(columns: int, y_bytes: int, sent_bytes: int) -> int:
    """Reduce teams, each of which takes every `num_teams`-th stage (kernels/ht/combine_reduce.cuh)."""
    max_columns = (MAX_FP8_SEGMENT_BYTES if sent_bytes == 1 else MAX_SEGMENT_BYTES) // y_bytes
    group = 32 * (4 if sent_bytes == 1 else 16 // y_bytes)
    max_groups = -(-max_columns // (MAX_TEAM_WARPS * group))
    return REDUCE_WARPS // (MIN_TEAM_WARPS if columns <= MIN_TEAM_WARPS * max_groups * group else MAX_TEAM_WARPS)


def _padded(num: int, unit: int) -> int:
    return -(-num // unit) * unit
