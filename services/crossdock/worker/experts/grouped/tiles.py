"""Which tile of which expert a program computes, and what becomes of its sums. Triton; read by `product.py`.

A tile is some rows of one expert's group by two halves of HALF columns: gate and up, which meet in the activation, or
neighbours. Tiles of one expert that read the same weights follow one another: all but the first find them in the L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF = tl.constexpr(128)
"""Columns of a half: as many as share a scale once they are the next product's input."""
LARGEST = tl.constexpr(448.0)
"""Largest number of e4m3."""


@triton.jit
def row_tiles_of(counts, num_experts, least, most, tile_rows: tl.constexpr, experts: tl.constexpr):
    """[experts]: tiles of rows of each expert; 0 where its rows are not least .. most: another launch computes it."""
    expert = tl.arange(0, experts)
    rows = tl.load(counts + expert, mask=expert < num_experts, other=0)
    return tl.where((rows >= least) & (rows <= most), tl.cdiv(rows, tile_rows), 0)


@triton.jit
def find_tile(tile, row_tiles, num_columns, experts: tl.constexpr):
    """(expert, number of the tile of rows, of the tile of columns); num_columns: tiles of columns per expert."""
    number = tl.arange(0, experts)
    ends = tl.cumsum(row_tiles * num_columns, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    own = tl.sum(tl.where(number == expert, row_tiles, 0), 0)
    within = tile - tl.sum(tl.where(number < expert, row_tiles, 0), 0) * num_columns
    return expert, within % own, within // own


@triton.jit
def activated(gate, up, limit, alpha, scaled: tl.constexpr):
    """`gating.Gating` by its rule "gated" with silu, or "scaled"; limit: inf where there is none."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if scaled:
        return gate * tl.sigmoid(gate * alpha) * (up + 1)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def quantised(x):
    """[R, HALF] -> e4m3 and scales [R]: the largest of a row becomes 448; a row of zeros has the scale 1."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def store_rows(
    x, out, out_scales, row, end, first_column, num_rows, columns: tl.constexpr,
    quantise: tl.constexpr,
):  # fmt: skip
    """[R, HALF] into out [N, columns] from its column first_column on; rows before `end`. quantise: with scales into
    out_scales [columns / HALF, num_rows]."""
    column = first_column + tl.arange(0, HALF)
    at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row < end)[:, None] & (column < columns)[None, :]
    if quantise:
        small, scale = quantised(tl.where(inside, x, 0.0))
        tl.store(at, small, mask=inside)
        tl.store(out_scales + first_column // HALF * num_rows + row, scale, mask=row < end)
    else:
        tl.store(at, x.to(out.dtype.element_ty), mask=inside)
