"""How quantised matrices lie in files: the ends of their tensors' names, shapes, types, and the way to the one form in
which they are held (`weights.py`).

A matrix X is [B, A]; C scales lie along A. Words are int32 with codes of 4 or 8 bits.

    gpt-oss               X_blocks [B, A / 32, 16], X_scales
    compressed-tensors    X_packed: uint8 [B, A / 2], or words along A; X_scale [B, C]; X_zero_point: words along B
                          [.., C]; X_global_scale, by which the scales are divided
    fp8, MX, ModelOpt     X [B, A], or uint8 [B, A / 2]; X_scale_inv, X_scale or scale; X_scale_2
    GPTQ                  qweight: words along A [.., B]; scales [C, B]; qzeros: words along B [C, ..], one less than
                          they mean; g_idx [A], the row of scales of each column
    AWQ                   qweight [A, ..], qzeros [C, ..]: words along B, columns 0 2 4 6 1 3 5 7; scales [C, B]

Codes of 4 bits lie in a word or a byte with the lowest first. Letters: see `weights.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from crossdock.worker.checkpoints.weights import Format

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts the codes."""

Tensors = Iterator[tuple[str, list[tuple[int, ...]], tuple[torch.dtype, ...]]]
"""(end of a name, shapes and dtypes that are right)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One way, by the ends of names: what follows the matrix' name or, without _, takes the place of its "weight".

    Attributes:
        data, scales, zeros, whole: of the tensors; "": there is none.
        groups: of the row of scales of each column.
        order: of codes.
    """

    data: str = ""
    scales: str = ""
    zeros: str = ""
    whole: str = ""
    groups: str = ""
    order: Literal["rows", "blocks", "gptq", "awq"] = "rows"

    def ends(self, format: Format) -> Iterator[str]:
        """Of the tensors of a matrix of this format, which count as its bytes."""
        yield self.data
        if format.kind != "float":
            yield self.scales
        if format.zeros:
            yield self.zeros
        if format.kind == "nvfp4":
            yield self.whole

    def unit(self, format: Format) -> tuple[int, int]:
        """Numbers that divide rows and columns."""
        if format.kind in ("float", "fp8"):
            return 1, 1
        word = 32 // format.bits if format.element == "int" else 1
        return word if self.order != "rows" else 1, math.lcm(word if self.order != "awq" else 1, format.block[1] or 2)

    def tensors(self, format: Format, rows: int, columns: int) -> Tensors:
        """Of a matrix of this shape."""
        bits, grid, is_word = format.bits, format.grid(rows, columns), format.element == "int"
        words = columns * bits // (32 if is_word else 8)
        shapes = {
            "rows": (rows, words), "blocks": (rows, columns // 32, 16), "gptq": (words, rows),
            "awq": (columns, rows * bits // 32),
        }  # fmt: skip
        codes = (torch.int32,) if is_word else (torch.uint8, torch.int8)
        data = FLOATS if format.kind == "float" else (torch.float8_e4m3fn,) if format.element == "e4m3" else codes
        yield self.data, [shapes[self.order]], data
        turned = self.order in ("gptq", "awq")
        if format.kind != "float":
            shape = grid[::-1] if turned else grid
            yield self.scales, [shape, (1,), ()] if format.block == (0, 0) else [shape], _scale_dtypes(format)
        if format.zeros:
            packed = -(-rows * bits // 32)
            yield self.zeros, [(grid[1], packed) if turned else (packed, grid[1])], (torch.int32,)
        if format.kind == "nvfp4":
            yield self.whole, [(), (1,)], (torch.float32,)

    def read(
        self, format: Format, shape: tuple[int, int], get: Callable[[str], torch.Tensor], one_less: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Codes, scales, zeros and the whole's scale of a matrix, as a `Stack` has them.

        Args:
            shape: of the matrix.
            get: the tensor with this end.
            one_less: GPTQ's zeros are.
        """
        data, scales, zeros = get(self.data), get(self.scales), get(self.zeros) if format.zeros else None
        if self.order == "awq":
            codes = _codes(data, 4, _AWQ_ORDER).t()
            data = codes[:, ::2] | codes[:, 1::2] << 4
        elif format.element != "e4m3":
            data = (data.t().contiguous() if self.order == "gptq" else data).flatten(1).view(torch.uint8)
        if format.scale is torch.float8_e8m0fnu:
            scales = scales.view(format.scale)
        if self.order in ("gptq", "awq"):
            scales = scales.t()
            zeros = None if zeros is None else _codes(zeros, format.bits, _AWQ_ORDER if self.order == "awq" else ()).t()
            if zeros is not None and one_less and self.order == "gptq":
                zeros = zeros + 1 & (1 << format.bits) - 1
        elif zeros is not None:
            zeros = _codes(zeros.t(), format.bits)[:, : shape[0]].t()
        whole = get(self.whole).view(1, 1) if format.kind == "nvfp4" else None
        grid = scales.reshape(format.grid(*shape))
        return data, grid, zeros, 1 / whole if whole is not None and self.whole == "_global_scale" else whole


def _codes(words: torch.Tensor, bits: int, order: Iterable[int] = ()) -> torch.Tensor:
    """int32 [R, n] -> uint8 [R, n * 32 / bits]; order: of those of a word."""
    found = words.contiguous().view(torch.uint8)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), -1).flatten(1)
    return found.view(len(words), -1, 8)[..., list(order)].flatten(1) if order else found


def _scale_dtypes(format: Format) -> tuple[torch.dtype, ...]:
    """That stored scales of a format may have."""
    if format.kind == "fp8":
        return (*FLOATS, torch.float8_e8m0fnu)
    return E8M0 if format.scale is torch.float8_e8m0fnu else (format.scale,)


PLAIN, FP8 = Packing(), Packing("", "_scale_inv")
PACKINGS = (
    Packing("_blocks", "_scales", order="blocks"),
    Packing("_packed", "_scale", "_zero_point", "_global_scale", "_g_idx"),
    Packing("qweight", "scales", "qzeros", groups="g_idx", order="gptq"),
    Packing("qweight", "scales", "qzeros", order="awq"),
    FP8,
    Packing("", "_scale", whole="_scale_2"),
    Packing("", "scale"),
)
"""Of quantised matrices."""


def named(name: str, end: str) -> str:
    """Of a tensor of the matrix `name`."""
    return name + end if end[:1] in ("", "_") else name.removesuffix("weight") + end
