"""The inner loops of the grouped GEMM: one tile's sums over all columns, for weights in fp8 and in MXFP4. Triton.

Rows and weights come by TMA into shared memory, some blocks of columns ahead. Past the last column it writes zeros;
rows past an expert's are its neighbour's, and what comes of them is not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crossdock.worker.experts.grouped.tiles import HALF

BLOCK = tl.constexpr(128)
"""Columns of a step: in fp8 they share a scale."""
MX_STEP = tl.constexpr(64)
"""Columns of a step in MXFP4: with more, a program's registers leave no room for others."""
MX_BLOCK = tl.constexpr(32)
"""Columns that share a scale in MXFP4."""


@triton.jit
def _add_block(sums, rows, weights, factor, swap: tl.constexpr):
    """Add one block's product: summed by the tensor cores, then scaled and added in fp32."""
    if swap:
        product, factors = tl.dot(weights, rows.T), factor[None, :]
    else:
        product, factors = tl.dot(rows, weights.T), factor[:, None]
    return tl.fma(product, tl.broadcast_to(factors, product.shape), sums)


@triton.jit
def _scales(
    row_scales, scales, has_second, row, num_rows, k, steps: tl.constexpr, apart: tl.constexpr, blocks: tl.constexpr
):  # fmt: skip
    """Of the rows and of both halves' weights in block k: 1 for weights without blocks, anything past the last."""
    of_rows = tl.load(row_scales + k * num_rows + row, mask=(row < num_rows) & (k < steps), other=0)
    if blocks:
        inside = k < steps
        return of_rows, tl.load(scales + k, mask=inside), tl.load(scales + apart + k, mask=inside & has_second)
    return of_rows, 1.0, 1.0


@triton.jit
def sums_fp8(
    rows, row_scales, weights, scales, has_second, row, row_0, row_1,
    first, num_rows, columns: tl.constexpr, apart: tl.constexpr, blocks: tl.constexpr, swap: tl.constexpr,
    tile_rows: tl.constexpr,
):  # fmt: skip
    """Both halves, [tile_rows, HALF] each.

        sums[r, b] = sum over blocks k: (rows[r, k] . weights[b, k]) * row_scales[k, r] * scale[b, k]

    The tensor cores add with 14 bits: no more than 128 products at once. Few rows are bound by the weights' bytes;
    then the weights take the side that is 64 wide at least, and rows the other (swap).

    Scales are asked for before a block's product and used after it: the tensor cores do not wait for them.

    Args:
        rows, weights: descriptors of e4m3 [N, columns], and of all experts' matrices, one below the other.
        row_scales: [columns / BLOCK, num_rows].
        scales: of the first half's weights, one per block of columns (blocks), else unused; `apart` further are the
            second half's, if it has any (has_second).
        row: numbers of the rows. row_0, row_1: first rows of weights of the halves.
    """
    sums_0 = tl.zeros((HALF, tile_rows) if swap else (tile_rows, HALF), tl.float32)
    sums_1 = tl.zeros((HALF, tile_rows) if swap else (tile_rows, HALF), tl.float32)
    steps: tl.constexpr = (columns + BLOCK - 1) // BLOCK
    scale, scale_0, scale_1 = _scales(row_scales, scales, has_second, row, num_rows, 0, steps, apart, blocks)
    factor_0, factor_1 = scale * scale_0, scale * scale_1
    for k in tl.range(0, steps):
        scale, scale_0, scale_1 = _scales(row_scales, scales, has_second, row, num_rows, k + 1, steps, apart, blocks)
        some = rows.load([first, k * BLOCK])
        sums_0 = _add_block(sums_0, some, weights.load([row_0, k * BLOCK]), factor_0, swap)
        sums_1 = _add_block(sums_1, some, weights.load([row_1, k * BLOCK]), factor_1, swap)
        factor_0, factor_1 = scale * scale_0, scale * scale_1
    if swap:
        sums_0, sums_1 = sums_0.T, sums_1.T
    return sums_0, sums_1


@triton.jit
def _mx_scales(scales, row, end, k, columns: tl.constexpr):
    """uint8 [HALF, MX_STEP / MX_BLOCK] of one step."""
    number = k // MX_BLOCK + tl.arange(0, MX_STEP // MX_BLOCK)
    inside = (row < end)[:, None] & (number < columns // MX_BLOCK)[None, :]
    return tl.load(scales + row[:, None].to(tl.int64) * (columns // MX_BLOCK) + number[None, :], mask=inside, other=0)


@triton.jit
def sums_mxfp4(
    rows, weights, scales, row_0, row_1, end, first, columns: tl.constexpr,
    tile_rows: tl.constexpr,
):  # fmt: skip
    """Both halves, [tile_rows, HALF] each. Weights become bf16 in registers, exactly, and are the side of the product
    that may lie there. A scale of 255, MX's NaN, gives Inf or NaN.

    Args:
        rows, weights: descriptors of bf16 [N, columns] and of uint8 [all experts' rows, columns / 2].
        scales: [all experts' rows, columns / 32]; `end`: number of these rows.
    """
    sums_0 = tl.zeros((HALF, tile_rows), tl.float32)
    sums_1 = tl.zeros((HALF, tile_rows), tl.float32)
    line = tl.arange(0, HALF)
    for k in tl.range(0, columns, MX_STEP):
        some = rows.load([first, k]).T
        scale_0 = _mx_scales(scales, row_0 + line, end, k, columns)
        scale_1 = _mx_scales(scales, row_1 + line, end, k, columns)
        weights_0, weights_1 = weights.load([row_0, k // 2]), weights.load([row_1, k // 2])
        sums_0 = tl.dot_scaled(weights_0, scale_0, "e2m1", some, None, "bf16", sums_0, fast_math=True)
        sums_1 = tl.dot_scaled(weights_1, scale_1, "e2m1", some, None, "bf16", sums_1, fast_math=True)
    return sums_0.T, sums_1.T
