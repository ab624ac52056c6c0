"""The grouped products of quantised experts in Triton's interpreter, on the CPU; prints JSON: case -> relative error.

A program of its own: Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import Format, Stack
from crossdock.worker.experts.grouped.kernels import quantise_rows
from crossdock.worker.experts.grouped.products import GroupedProducts, Tile
from crossdock.worker.experts.grouped.support import fused_rule, reason_in_shapes
from tests.unit.grouped_cases import CASES, floats, groups, layer, tokens_of

MOST = 2**31 - 1
TILES = {
    "fp8": (Tile(16, 16, True, 4, 2, 1), Tile(MOST, 32, False, 4, 2, 1)),
    "packed": (Tile(16, 16, True, 4, 2, 1), Tile(MOST, 32, True, 4, 2, 1)),
}
COUNTS = [5, 0, 37, 16]
PADDING = 3
"""Rows behind each group that nobody owns."""


def requantised(rows: torch.Tensor, format: Format) -> torch.Tensor:
    """Rows as a product takes them: through the kernel's own quantiser, or bf16. Checks the quantiser against torch's
    e4m3, apart from two slips of the interpreter (Triton 3.9): where rounding carries into the exponent, it halves the
    value; it cuts subnormals off (below 2**-6)."""
    if format.kind != "fp8":
        return rows.bfloat16().float()
    num, columns = rows.shape
    grid = -(-columns // 128)
    small = torch.zeros(num, columns, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(grid, num)
    offsets = torch.tensor([0, num], dtype=torch.int32)
    quantise_rows[(2,)](rows, small, scales, offsets, 1, num, rows.stride(0), columns=columns, tile_rows=16)
    padded = torch.nn.functional.pad(rows, (0, grid * 128 - columns)).view(num, grid, 128)
    largest = padded.abs().amax(2)
    right = torch.where(largest == 0, 1.0, largest / 448)
    torch.testing.assert_close(scales.t(), right, rtol=1e-6, atol=0)
    x = (padded / scales.t()[:, :, None]).view(num, -1)[:, :columns]
    found, (mantissa, exponent) = small.float(), torch.frexp(x)
    near = (found - x).abs() <= 2.0 ** (exponent - 5) * 1.0001
    halved = (found * 2 == 2.0**exponent * mantissa.sign()) & (mantissa.abs() > 0.9)
    cut = x.abs() < 2**-6
    wrong = ~(near | halved | cut)
    assert not bool(wrong.any()), (found[wrong], x[wrong])
    return found * scales.t().repeat_interleave(128, 1)[:, :columns]


def expected(weights: tuple[Stack, Stack], gating: Gating, slot: int, rows: torch.Tensor) -> torch.Tensor:
    """What the dequantised weights give in float32 for rows that are quantised before each product."""
    for number, stack in enumerate(weights):
        expert = stack[slot]
        bias = 0 if expert.bias is None else expert.bias.float()
        rows = requantised(rows, stack.format) @ floats(expert).t() + bias
        if number == 0:
            if fused_rule(gating) == "plain":
                rows = rows.bfloat16()
            rows = gating(rows, torch.empty(rows.shape[0], weights[1].columns, dtype=rows.dtype)).float()
    return rows


def found(weights: tuple[Stack, Stack], gating: Gating, tokens: torch.Tensor) -> torch.Tensor:
    """What the kernels make of them."""
    begins, end = groups(COUNTS, PADDING)
    out = torch.full(tokens.shape, 7.0)
    counts, offsets = (torch.tensor(values, dtype=torch.int32) for values in (COUNTS, [*begins, end]))
    GroupedProducts(gating, 3, TILES).forward(0, weights, tokens, offsets, counts, out)
    for begin, count in zip(begins, COUNTS, strict=True):
        assert bool((out[begin + count : begin + count + PADDING] == 7).all()), "a row of nobody was written"
    return out


def errors() -> Iterator[tuple[str, float]]:
    """Each case's largest relative error of an expert."""
    for name in CASES:
        weights, gating = layer(name, len(COUNTS))
        assert reason_in_shapes(*weights, gating, torch.bfloat16) == "", name
        tokens = tokens_of(COUNTS, PADDING, weights[0].columns, more=20)
        out, worst = found(weights, gating, tokens), 0.0
        for slot, (begin, count) in enumerate(zip(groups(COUNTS, PADDING)[0], COUNTS, strict=True)):
            if count:
                own = slice(begin, begin + count)
                right = expected(weights, gating, slot, tokens[own].float())
                worst = max(worst, float((out[own] - right).norm() / right.norm()))
        yield name, worst


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    print(json.dumps(dict(errors())))
