"""Rows to e4m3 with a scale per 128 columns, as the fp8 products take them. Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.worker.experts.grouped.tiles import HALF, quantised


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def quantise_rows(
    rows, small, scales, offsets, num_experts, num_rows, row_stride,
    columns: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Persistent, over the groups' rows only.

    Args:
        rows: float [N, columns], row_stride elements apart.
        small, scales: e4m3 [N, columns] and fp32 [columns / 128, num_rows], written.
    """
    grid: tl.constexpr = (columns + HALF - 1) // HALF
    end = tl.load(offsets + num_experts)
    for tile in range(tl.program_id(0), tl.cdiv(end, tile_rows) * grid, tl.num_programs(0)):
        row_tile = tile // grid
        row, block = row_tile * tile_rows + tl.arange(0, tile_rows), tile - row_tile * grid
        column = block * HALF + tl.arange(0, HALF)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        at = row[:, None].to(tl.int64)
        x = tl.load(rows + at * row_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        values, scale = quantised(x)
        tl.store(small + at * columns + column[None, :], values, mask=inside)
        tl.store(scales + block * num_rows + row, scale, mask=row < end)
