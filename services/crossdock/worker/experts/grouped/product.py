"""The kernel: a grouped GEMM over quantised weights, and what follows a product. Triton.

`GroupedProducts` in products.py launches it. Persistent: each program takes every num_programs-th tile, found from the
groups' offsets on the device. The host knows no count and waits for nothing; a launch without tiles reads the counts
and ends.

Arguments, beside those of `sums.py`: bias [L, weight_rows] or None; out [N, out_columns]; out_scales, of e4m3 rows for
the next product; least, most: rows of the experts that this launch computes; scale_rows: rows of scales of an expert;
scales_apart: from a half's to the other's. `experts`: a power of two, at least their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.worker.experts.grouped.sums import BLOCK, sums_fp8, sums_mxfp4
from crossdock.worker.experts.grouped.tiles import HALF, activated, find_tile, row_tiles_of, store_rows


@triton.jit(do_not_specialize=["num_rows", "num_experts", "least", "most"])
def grouped_product(
    rows, row_scales, weights, weight_scales, bias, out, out_scales,
    offsets, counts, num_experts, num_rows, least, most, limit, alpha,
    format: tl.constexpr, rule: tl.constexpr, has_bias: tl.constexpr, columns: tl.constexpr,
    weight_rows: tl.constexpr, out_columns: tl.constexpr, scale_rows: tl.constexpr, scales_apart: tl.constexpr,
    swap: tl.constexpr, tile_rows: tl.constexpr, experts: tl.constexpr,
):  # fmt: skip
    """out = rows of each expert times its weights transposed; with a rule other than "plain", the activation of it."""
    gated: tl.constexpr = rule != "plain"
    step: tl.constexpr = HALF if gated else 2 * HALF
    apart: tl.constexpr = out_columns if gated else HALF
    num_columns: tl.constexpr = (out_columns + step - 1) // step
    row_tiles = row_tiles_of(counts, num_experts, least, most, tile_rows, experts)
    for tile in range(tl.program_id(0), tl.sum(row_tiles, 0) * num_columns, tl.num_programs(0)):
        expert, row_tile, column_tile = find_tile(tile, row_tiles, num_columns, experts)
        begin = tl.load(offsets + expert)
        first, end = begin + row_tile * tile_rows, begin + tl.load(counts + expert)
        row, column = first + tl.arange(0, tile_rows), column_tile * step
        row_0 = expert * weight_rows + column
        if format == "mxfp4":
            all_rows = num_experts * weight_rows
            left, right = sums_mxfp4(
                rows, weights, weight_scales, row_0, row_0 + apart, all_rows, first, columns, tile_rows
            )
        else:
            left, right = _fp8(
                rows, row_scales, weights, weight_scales, expert, row, row_0, column, first, num_rows, columns,
                weight_rows, apart, scale_rows, scales_apart, format, swap, tile_rows,
            )  # fmt: skip
        if has_bias:
            left += _along(bias + row_0, weight_rows - column)
            right += _along(bias + row_0 + apart, weight_rows - column - apart)
        quantise: tl.constexpr = gated and format != "mxfp4"
        if gated:
            left = activated(left, right, limit, alpha, rule == "scaled")
        store_rows(left, out, out_scales, row, end, column, num_rows, out_columns, quantise)
        if not gated:
            store_rows(right, out, out_scales, row, end, column + HALF, num_rows, out_columns, quantise)


@triton.jit
def _along(values, left):
    """[1, HALF] of a bias or of scales; 0 past the last of `left`."""
    column = tl.arange(0, HALF)
    return tl.load(values + column, mask=column < left, other=0).to(tl.float32)[None, :]


@triton.jit
def _fp8(
    rows, row_scales, weights, scales, expert, row, row_0, column, first,
    num_rows, columns: tl.constexpr, weight_rows: tl.constexpr, apart: tl.constexpr, scale_rows: tl.constexpr,
    scales_apart: tl.constexpr, format: tl.constexpr, swap: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Both halves, scaled: per block of 128 x 128, or per row of weights."""
    blocks: tl.constexpr = format == "fp8 blocks"
    grid: tl.constexpr = (columns + BLOCK - 1) // BLOCK
    number, of_tile = column // HALF, scales
    if blocks:
        of_tile += (expert * scale_rows + number) * grid
    left, right = sums_fp8(
        rows, row_scales, weights, of_tile, number + scales_apart < scale_rows, row, row_0, row_0 + apart, first,
        num_rows, columns, scales_apart * grid, blocks, swap, tile_rows,
    )  # fmt: skip
    if not blocks:
        left *= _along(scales + row_0, weight_rows - column)
        right *= _along(scales + row_0 + apart, weight_rows - column - apart)
    return left, right
