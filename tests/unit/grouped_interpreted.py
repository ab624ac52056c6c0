"""The grouped products of quantised experts in Triton's interpreter, on the CPU; prints JSON: case -> relative error.

A program of its own: Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import NVFP4, Format, Stack
from crossdock.worker.experts.grouped.kernels import E2M1_REST, HALF, STEP, _decoded, _of_step, quantise_rows
from crossdock.worker.experts.grouped.products import GroupedProducts, Tile
from crossdock.worker.experts.grouped.support import fused_rule, reason_in_shapes
from tests.unit.grouped_cases import CASES, INT4, drawn, floats, groups, layer, tokens_of

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


@triton.jit
def decode(
    codes: Any, scales: Any, zeros: Any, out: Any, width: tl.constexpr, bits: tl.constexpr, element: tl.constexpr,
    wide: tl.constexpr,
) -> None:  # fmt: skip
    """out [HALF, STEP]: what a step of a product makes of codes [HALF, wide]."""
    row = tl.arange(0, HALF)
    given = tl.load(codes + row[:, None] * wide + tl.arange(0, wide)[None, :])
    scale = _of_step(scales, row, HALF, 0, STEP, width)
    values = _decoded(given, scale, zeros, row, HALF, 0, STEP, width, bits, element)
    tl.store(out + row[:, None] * STEP + tl.arange(0, STEP)[None, :], values)


def decoded() -> Iterator[tuple[str, float]]:
    """Each format's largest relative difference to the format's own definition: of all codes and, of NVFP4, all scales
    that are numbers."""
    for name, format in {"nvfp4": NVFP4, "int4": INT4, "int8": Format("int8", (1, 64), torch.bfloat16)}.items():
        stack = drawn(1, format, HALF.value, STEP.value, 1, False)
        assert stack.scales is not None
        stack.data.copy_(torch.randint(256, stack.data.shape, dtype=torch.uint8))
        rest = 1.0
        if format is NVFP4:
            numbers = torch.arange(256, dtype=torch.uint8)[: stack.scales.shape[2]].view(torch.float8_e4m3fn)
            stack.scales.copy_(torch.where(numbers.isnan(), 0.0, numbers.float())[None, None, :, None])
            assert stack.whole is not None
            stack.whole.fill_(1.0)
            rest = E2M1_REST.value
        out = torch.empty(HALF.value, STEP.value, dtype=torch.bfloat16)
        width, bits, element = format.block[1], format.bits, format.element
        decode[(1,)](stack.data, stack.scales, stack.zeros, out, width, bits, element, STEP.value * bits // 8)
        right = floats(stack[0])
        yield f"decoded {name}", float(((out.float() * rest - right).abs() / right.abs().clamp(min=1e-30)).max())


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    print(json.dumps(dict([*errors(), *decoded()])))
