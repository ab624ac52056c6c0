"""Layers of quantised experts for tests of the grouped products: formats, activations, sizes that end in odd places."""

from __future__ import annotations

import itertools

import torch

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import MXFP4, MXFP8, NVFP4, Format, Stack

BLOCKS, CHANNEL, TENSOR = Format("fp8", (128, 128)), Format("fp8", (1, 0)), Format("fp8")
INT4, INT8 = Format("int4", (1, 32), torch.float16, zeros=True), Format("int8", (1, 0), torch.bfloat16)
SILU, SCALED, GELU = Gating(), Gating("scaled", limit=1.5, alpha=1.7), Gating(act="gelu")
CASES: dict[str, tuple[Format, Gating, int, int, int, bool]] = {
    "blocks": (BLOCKS, SILU, 256, 384, 2, False),
    "blocks, one tensor": (BLOCKS, SILU, 256, 256, 1, False),
    "blocks, short ends": (BLOCKS, Gating(limit=0.5), 272, 144, 2, False),
    "blocks, gelu": (BLOCKS, GELU, 256, 128, 2, False),
    "blocks, ungated": (BLOCKS, Gating("ungated", act="relu2"), 256, 144, 1, False),
    "channel": (CHANNEL, SILU, 272, 144, 2, False),
    "tensor": (TENSOR, SILU, 256, 128, 2, False),
    "mxfp4": (MXFP4, SCALED, 288, 96, 1, True),
    "mxfp4, silu": (MXFP4, SILU, 256, 128, 1, False),
    "mxfp4, gelu": (MXFP4, GELU, 256, 128, 1, True),
    "mxfp8": (MXFP8, SILU, 288, 96, 2, False),
    "nvfp4": (NVFP4, SILU, 288, 96, 2, False),
    "int4, zeros": (INT4, SILU, 288, 96, 2, False),
    "int4": (Format("int4", (1, 128), torch.bfloat16), SILU, 256, 128, 2, False),
    "int8, channel": (INT8, SILU, 272, 144, 2, False),
}
"""Format, gating, H, I, parts, biases."""


def layer(name: str, num: int) -> tuple[tuple[Stack, Stack], Gating]:
    """Weights of `num` experts of a case."""
    format, gating, hidden, inner, parts, bias = CASES[name]
    first = drawn(num, format, gating.halves * inner, hidden, parts, bias)
    return (first, drawn(num, format, hidden, inner, 1, bias)), gating


def groups(counts: list[int], padding: int) -> tuple[list[int], int]:
    """First row of each group and the end of the last; `padding` rows behind each that nobody owns."""
    *begins, end = [0, *itertools.accumulate(count + padding for count in counts)]
    return begins, end


def tokens_of(counts: list[int], padding: int, hidden: int, more: int = 0) -> torch.Tensor:
    """bf16; NaN where no expert owns a row."""
    begins, end = groups(counts, padding)
    tokens = torch.full((end + more, hidden), torch.nan).bfloat16()
    for begin, count in zip(begins, counts, strict=True):
        tokens[begin : begin + count] = torch.randn(count, hidden).bfloat16()
    return tokens


def drawn(num: int, format: Format, rows: int, columns: int, parts: int, bias: bool) -> Stack:
    """Random weights."""
    stack = Stack.empty(format, (num, rows, columns), torch.bfloat16, "cpu", bias=bias, parts=parts)
    assert stack.scales is not None
    if format.element == "e4m3":
        stack.data.copy_(torch.randn(stack.data.shape))
    else:
        stack.data.random_(0, 256)
    if format.scale is torch.float8_e8m0fnu:
        stack.scales.view(torch.uint8).random_(120, 125)
    else:
        stack.scales.copy_(torch.rand(stack.scales.shape).add_(0.5).mul_(columns**-0.5))
    if stack.zeros is not None:
        stack.zeros.random_(0, 16)
    if stack.whole is not None:
        stack.whole.copy_(torch.rand(stack.whole.shape).add_(0.5))
    if stack.bias is not None:
        stack.bias.normal_()
    return stack


def floats(expert: Stack) -> torch.Tensor:
    """One expert's matrix."""
    whole = torch.empty(expert.rows, expert.columns)
    scratch = torch.empty(1 << 20)
    for begin, end in expert.tiles():
        whole[begin:end] = expert.tile(begin, end, scratch)
    return whole
