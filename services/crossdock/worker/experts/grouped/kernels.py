"""The kernels: a grouped GEMM over quantised weights with what follows a product, and the quantiser of rows. Triton.

`GroupedProducts` in products.py launches them. Persistent: each program takes every num_programs-th tile, found from
the groups' offsets on the device. The host knows no count and waits for nothing; a launch without tiles reads the
counts and ends.

A tile is some rows of one expert's group by two halves of HALF columns: gate and up, which meet in the activation, or
neighbours. Tiles of one expert that read the same weights follow one another: all but the first find them in the L2.
Rows and weights come by TMA into shared memory, some blocks of columns ahead. Past the last column it writes zeros;
rows past an expert's are its neighbour's, and what comes of them is not stored.

Arguments of `grouped_product`, beside those of `sums_fp8` and `sums_packed`: factors and bias [L, weight_rows] or None,
of each row of weights; out [N, out_columns]; out_scales, of e4m3 rows for the next product; least, most: rows of the
experts that this launch computes; scale_rows: rows of scales of an expert; scales_apart: from a half's to the other's.
`experts`: a power of two, at least their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Columns of a step: in fp8 they share a scale."""
STEP = tl.constexpr(64)
"""Columns of a step of packed weights: with more, a program's registers leave no room for others."""
HALF = tl.constexpr(128)
"""Columns of a half: as many as share a scale once they are the next product's input."""
LARGEST = tl.constexpr(448.0)
"""Largest number of e4m3."""
E2M1_UNIT, E2M1_REST = tl.constexpr(2.0**118), tl.constexpr(2.0**8)
"""By both, e2m1's bits in a float are too small. The scales of e4m3 take the first and are still floats, the sums the
second."""


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


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def quantise_rows(
    rows, small, scales, offsets, num_experts, num_rows, row_stride,
    columns: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Rows to e4m3 with a scale per 128 columns, as the fp8 products take them. Persistent, over the groups' rows only.

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
def _of_step(values, row, end, k, columns: tl.constexpr, width: tl.constexpr):
    """[HALF, groups] of one step: the scales, or zeros, of the groups of `width` columns in it; 0 past the last."""
    number = k // width + tl.arange(0, STEP // width if width < STEP else 1)
    inside = (row < end)[:, None] & (number < columns // width)[None, :]
    return tl.load(values + row[:, None].to(tl.int64) * (columns // width) + number[None, :], mask=inside, other=0.0)


@triton.jit
def _wide(values, width: tl.constexpr):
    """[HALF, groups] -> [HALF, STEP] float32."""
    each: tl.constexpr = STEP if width > STEP else width
    return tl.broadcast_to(values.to(tl.float32)[:, :, None], (HALF, STEP // each, each)).reshape(HALF, STEP)


@triton.jit
def _decoded(
    codes, scale, zeros, row, end, k, columns: tl.constexpr, width: tl.constexpr, bits: tl.constexpr,
    element: tl.constexpr,
):  # fmt: skip
    """uint8 codes of one step -> bf16 [HALF, STEP], scaled: e2m1 exactly, but for E2M1_REST; else rounded once.

    A code becomes a float by its bits alone. The two bits of e2m1's exponent and that of its mantissa lie at the end
    of a float's exponent and the begin of its mantissa: 2^126 less, subnormals too. An integer is added to a power of
    two, whose product with the scale is taken off again: in one step, of scales of up to 15 bits without rounding.
    """
    scale = scale.to(tl.float32)
    if element == "e2m1":
        signed = codes.to(tl.int8, bitcast=True).to(tl.int32)
        wide = tl.join(signed << 28 >> 6, signed << 18).reshape(HALF, STEP) & -0x7E400000
        values = wide.to(tl.float32, bitcast=True) * _wide(scale * E2M1_UNIT, width)
    else:
        if bits == 4:
            wide = tl.join(codes.to(tl.int32) << 16, codes.to(tl.int32) << 12).reshape(HALF, STEP)
            wide, base = wide & 0xF0000 | 0x43000000, 128.0
        else:
            wide, base = codes.to(tl.int32) << 15 | 0x43800000, 256.0
        zero = base / 16 if bits == 4 else base / 2
        if zeros is not None:
            zero = _of_step(zeros, row, end, k, columns, width).to(tl.float32)
        values = tl.fma(wide.to(tl.float32, bitcast=True), _wide(scale, width), -_wide((base + zero) * scale, width))
    return values.to(tl.bfloat16)


@triton.jit
def _add_packed(
    sums, codes, some, scales, zeros, row, end, k, columns: tl.constexpr, width: tl.constexpr, bits: tl.constexpr,
    element: tl.constexpr,
):  # fmt: skip
    """Add one step's product; some: bf16 [STEP, tile_rows]. A scale of 255, MX's NaN, gives Inf or NaN."""
    scale = _of_step(scales, row, end, k, columns, width)
    if element == "int" or scales.dtype.element_ty != tl.uint8:
        values = _decoded(codes, scale, zeros, row, end, k, columns, width, bits, element)
        sums = tl.dot_scaled(values, None, "bf16", some, None, "bf16", sums)
    else:
        sums = tl.dot_scaled(codes, scale, element, some, None, "bf16", sums, fast_math=True)
    return sums


@triton.jit
def sums_packed(
    rows, weights, scales, zeros, row_0, row_1, end, first, columns: tl.constexpr, width: tl.constexpr,
    bits: tl.constexpr, element: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Both halves, [tile_rows, HALF] each. Weights become bf16 in registers, and are the side of the product that may
    lie there.

    Args:
        rows, weights: descriptors of bf16 [N, columns], and of the codes of all experts' rows, as in `weights.py`.
        scales, zeros: [all experts' rows, columns / width]; powers of two as uint8; zeros may be None; `end`: number
            of these rows.
        element: of codes of so many bits: "e2m1", "e4m3", "int".
    """
    sums_0 = tl.zeros((HALF, tile_rows), tl.float32)
    sums_1 = tl.zeros((HALF, tile_rows), tl.float32)
    line = tl.arange(0, HALF)
    for k in tl.range(0, columns, STEP):
        some = rows.load([first, k]).T
        codes_0, codes_1 = weights.load([row_0, k * bits // 8]), weights.load([row_1, k * bits // 8])
        sums_0 = _add_packed(sums_0, codes_0, some, scales, zeros, row_0 + line, end, k, columns, width, bits, element)
        sums_1 = _add_packed(sums_1, codes_1, some, scales, zeros, row_1 + line, end, k, columns, width, bits, element)
    if element == "e2m1" and scales.dtype.element_ty != tl.uint8:
        sums_0, sums_1 = sums_0 * E2M1_REST, sums_1 * E2M1_REST
    return sums_0.T, sums_1.T


@triton.jit(do_not_specialize=["num_rows", "num_experts", "least", "most"])
def grouped_product(
    rows, row_scales, weights, weight_scales, weight_zeros, factors, bias, out, out_scales,
    offsets, counts, num_experts, num_rows, least, most, limit, alpha,
    bits: tl.constexpr, element: tl.constexpr, blocks: tl.constexpr, rule: tl.constexpr, columns: tl.constexpr,
    width: tl.constexpr,
    weight_rows: tl.constexpr, out_columns: tl.constexpr, scale_rows: tl.constexpr, scales_apart: tl.constexpr,
    swap: tl.constexpr, tile_rows: tl.constexpr, experts: tl.constexpr,
):  # fmt: skip
    """out = rows of each expert times its weights transposed; with a rule other than "plain", the activation of it."""
    gated: tl.constexpr = rule != "plain"
    is_fp8: tl.constexpr = row_scales is not None
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
        if is_fp8:
            left, right = _fp8(
                rows, row_scales, weights, weight_scales, expert, row, row_0, column, first, num_rows, columns,
                apart, scale_rows, scales_apart, blocks, swap, tile_rows,
            )  # fmt: skip
        else:
            all_rows = num_experts * weight_rows
            left, right = sums_packed(
                rows, weights, weight_scales, weight_zeros, row_0, row_0 + apart, all_rows, first, columns, width,
                bits, element, tile_rows,
            )  # fmt: skip
        left = _per_row(left, factors, bias, row_0, weight_rows - column)
        right = _per_row(right, factors, bias, row_0 + apart, weight_rows - column - apart)
        quantise: tl.constexpr = gated and is_fp8
        if gated:
            left = activated(left, right, limit, alpha, rule == "scaled")
        store_rows(left, out, out_scales, row, end, column, num_rows, out_columns, quantise)
        if not gated:
            store_rows(right, out, out_scales, row, end, column + HALF, num_rows, out_columns, quantise)


@triton.jit
def _per_row(sums, factors, bias, row, left):
    """Times the factor of each row of weights, plus its bias, where there are such."""
    if factors is not None:
        sums *= _along(factors + row, left)
    if bias is not None:
        sums += _along(bias + row, left)
    return sums


@triton.jit
def _along(values, left):
    """[1, HALF] of a bias or of scales; 0 past the last of `left`."""
    column = tl.arange(0, HALF)
    return tl.load(values + column, mask=column < left, other=0).to(tl.float32)[None, :]


@triton.jit
def _fp8(
    rows, row_scales, weights, scales, expert, row, row_0, column, first,
    num_rows, columns: tl.constexpr, apart: tl.constexpr, scale_rows: tl.constexpr,
    scales_apart: tl.constexpr, blocks: tl.constexpr, swap: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    """Both halves; scaled where there are blocks of 128 x 128."""
    grid: tl.constexpr = (columns + BLOCK - 1) // BLOCK
    number, of_tile = column // HALF, scales
    if blocks:
        of_tile += (expert * scale_rows + number) * grid
    return sums_fp8(
        rows, row_scales, weights, of_tile, number + scales_apart < scale_rows, row, row_0, row_0 + apart, first,
        num_rows, columns, scales_apart * grid, blocks, swap, tile_rows,
    )  # fmt: skip
