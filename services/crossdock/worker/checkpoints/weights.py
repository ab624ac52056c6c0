"""Expert weights as they are held: in float, in fp8 e4m3 with scales, or in MXFP4. Tensors only; knows no model.

Bytes of quantised weights are those of the checkpoint. They become floats a tile of rows at a time (`Stack.tile`),
never a layer, and not a whole matrix either.

    float    data [L, B, A] float
    fp8      data [L, B, A] e4m3, scales float32 [L, P, R, C]: of the P parts of B (gate and up were two tensors), each
             in blocks of (B / P / R) x (A / C), the last ones short
    mxfp4    data uint8 [L, B, A / 2]: column 2i in the low half of byte i; scales uint8 [L, B, A / 32], powers of two
             with bias 127, as OCP's MX formats have them

Letters: L experts here, B rows (outputs) and A columns (inputs) of a matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

MX_BLOCK = 32
"""Columns that share one scale in MXFP4."""
_TILE_ELEMENTS = 1 << 19
_PAIR = {2: torch.int32, 4: torch.int64}
"""An integer as large as two floats, by the bytes of one."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Format:
    """How the matrices of a checkpoint's experts are stored.

    Attributes:
        kind: see above.
        block: fp8: rows and columns that share a scale; 0: all of them. (1, 0) is per channel, (0, 0) per tensor.
    """

    kind: Literal["float", "fp8", "mxfp4"] = "float"
    block: tuple[int, int] = (0, 0)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of an fp8 matrix of this shape."""
        (height, width) = self.block
        return -(-rows // height) if height else 1, -(-columns // width) if width else 1

    def shared(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of an fp8 matrix of this shape that share a scale."""
        return min(self.block[0] or rows, rows), min(self.block[1] or columns, columns)

    def __str__(self) -> str:
        if self.kind != "fp8":
            return self.kind
        shared = {(1, 0): "channel", (0, 0): "tensor"}.get(self.block, "block of {} x {}".format(*self.block))
        return f"fp8, a scale per {shared}"


FLOAT = Format()


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix of several experts, or of one, then without the leading L.

    Attributes:
        data, scales: see the head of this page; scales None in float.
        parts: P.
    """

    format: Format
    data: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    parts: int = 1

    @staticmethod
    def empty(
        format: Format,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        bias: bool = False,
        parts: int = 1,
    ) -> Stack:
        """Room for [L, B, A]; dtype: of float weights and of the bias."""
        num, rows, columns = shape
        make = functools.partial(torch.empty, device=device)
        added = make(num, rows, dtype=dtype) if bias else None
        if format.kind == "float":
            return Stack(format, make(num, rows, columns, dtype=dtype), None, added)
        if format.kind == "mxfp4":
            data = make(num, rows, columns // 2, dtype=torch.uint8)
            return Stack(format, data, make(num, rows, columns // MX_BLOCK, dtype=torch.uint8), added)
        data = make(num, rows, columns, dtype=torch.float8_e4m3fn)
        grid = format.grid(rows // parts, columns)
        return Stack(format, data, make(num, parts, *grid, dtype=torch.float32), added, parts)

    @property
    def rows(self) -> int:
        """B."""
        return self.data.shape[-2]

    @property
    def columns(self) -> int:
        """A."""
        return self.data.shape[-1] * (2 if self.format.kind == "mxfp4" else 1)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.data, self.scales, self.bias) if tensor is not None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __getitem__(self, slot: int) -> Stack:
        """One expert's, as views."""
        scales, bias = (None if tensor is None else tensor[slot] for tensor in (self.scales, self.bias))
        return replace(self, data=self.data[slot], scales=scales, bias=bias)

    def copy_(self, other: Stack) -> None:
        """Take another one's contents; same format and shape."""
        for target, source in zip(self.tensors, other.tensors, strict=True):
            target.copy_(source)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """(first, end) of rows, so that each tile lies in one part and begins with a block."""
        height = max(1, self.format.block[0])
        step = max(1, _TILE_ELEMENTS // self.columns // height) * height
        part = self.rows // self.parts
        for start in range(0, self.rows, part):
            for first in range(start, start + part, step):
                yield first, min(first + step, start + part)

    def tile(self, first: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """Rows first..end of one expert (see `tiles`) as floats into `out`, a flat buffer. Returns a view of it."""
        tile = out[: (end - first) * self.columns].view(end - first, self.columns)
        if self.format.kind == "mxfp4":
            assert self.scales is not None
            return from_mxfp4(self.data[first:end], self.scales[first:end], tile)
        assert self.scales is not None
        part, start = divmod(first, self.rows // self.parts)
        height = self.format.block[0] or self.rows
        scales = self.scales[part, start // height : -(-(start + end - first) // height)]
        return from_fp8(self.data[first:end], scales, (height, self.format.block[1] or self.columns), tile)


def tile_elements(columns: int, format: Format) -> int:
    """Elements of the buffer that `Stack.tile` needs."""
    return max(_TILE_ELEMENTS, columns * max(1, format.block[0]))


def from_fp8(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> torch.Tensor:
    """e4m3 [B, A] times its block scales [ceil(B / block[0]), ceil(A / block[1])] into `out`, rounded once."""
    rows, columns = weight.shape
    height, width = min(block[0], rows), min(block[1], columns)
    _from_e4m3(weight, out)
    if rows % height or columns % width:
        scales = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        return out.mul_(scales)
    out.view(rows // height, height, columns // width, width).mul_(scales[:, None, :, None])
    return out


def from_mxfp4(weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """uint8 [B, A / 2] and uint8 scales [B, A / 32] -> [B, A] into `out`, exact in bfloat16 and float32."""
    pairs, powers = _mxfp4_tables(out.dtype, out.device)
    whole = pairs.index_select(0, weight.reshape(-1).int()).view(out.dtype)
    factors = powers.index_select(0, scales.reshape(-1).int())
    torch.mul(whole.view(-1, MX_BLOCK), factors[:, None], out=out.view(-1, MX_BLOCK))
    return out


def _from_e4m3(weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same values. On a CPU two at a time from a table that fits the L2: twelve times as fast as torch's own."""
    if weight.device.type != "cpu" or weight.shape[-1] % 2 or not weight.is_contiguous() or not out.is_contiguous():
        out.copy_(weight)
        return
    pairs = _e4m3_pairs(out.dtype)
    torch.index_select(pairs, 0, weight.view(torch.uint16).view(-1).int(), out=out.view(-1).view(pairs.dtype))


@functools.cache
def _e4m3_pairs(dtype: torch.dtype) -> torch.Tensor:
    """By two bytes: their values, as one integer of both."""
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(dtype)
    both = torch.arange(1 << 16, device="cpu")
    return torch.stack([values[both & 255], values[both >> 8]], dim=1).view(_PAIR[dtype.itemsize]).squeeze(1)


@functools.cache
def _mxfp4_tables(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """By byte: its two values, as one integer of both; and the power of two of a scale."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device="cpu")
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
    powers = torch.tensor(
        [2.0 ** (scale - 127) for scale in range(255)] + [math.nan], dtype=torch.float32, device="cpu"
    )
    return pairs.view(_PAIR[dtype.itemsize]).squeeze(1).to(device), powers.to(dtype).to(device)
