"""Expert weights as they are held: floats, or codes of 4 or 8 bits with scales. Tensors only; knows no model.

Quantised weights take the bytes that they have in the checkpoint. They become floats a tile of rows at a time
(`Stack.tile`), never a layer, and not a whole matrix either. One formula for all formats:

    weight = (value of the code - zero) * scale * whole

    kind    code              columns of a scale    scale                     zero              whole
    fp8     e4m3              by Format.block       float32
    mxfp8   e4m3              32                    e8m0, a power of two
    mxfp4   e2m1              32                    e8m0
    nvfp4   e2m1              16                    e4m3                                        float32
    int4    0 .. 15           by Format.block       float16, bfloat16, ...    as stored, or 8
    int8    0 .. 255          by Format.block       float16, bfloat16, ...    as stored, or 128

    data    [L, B, A] float, e4m3 or uint8; of 4 bits uint8 [L, B, A / 2], column 2i in the low half of byte i
    scales  [L, P, R, C]: of the P parts of B (gate and up were two tensors), each in blocks of (B / P / R) x (A / C),
            the last ones short. zeros: uint8 of the same shape
    whole   float32 [L, P, 1, 1]

Letters: L experts here, B rows (outputs) and A columns (inputs) of a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from crossdock.worker.checkpoints.weight_memory import WeightMemory

_TILE_ELEMENTS = 1 << 19
_PAIR = {2: torch.int32, 4: torch.int64}
"""An integer as large as two floats, by the bytes of one."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ELEMENTS = {"fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1", "int4": "int", "int8": "int"}
_ALIGN = 64
"""Tensors in one memory begin at a multiple of so many bytes."""
_BITS = {"mxfp4": 4, "nvfp4": 4, "int4": 4}
"""Of a code, where they are not 8."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the matrices of a checkpoint's experts are stored.

    Attributes:
        kind: see above.
        block: rows and columns that share a scale; 0: all of them. (1, 0) is per channel, (0, 0) per tensor.
        scale: dtype of scales.
        zeros: they are stored.
    """

    kind: Literal["float", "fp8", "mxfp8", "mxfp4", "nvfp4", "int4", "int8"] = "float"
    block: tuple[int, int] = (0, 0)
    scale: torch.dtype = torch.float32
    zeros: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return _BITS.get(self.kind, 8)

    @property
    def element(self) -> str:
        """What a code is: "e4m3" | "e2m1" | "int"; "": there are none."""
        return _ELEMENTS.get(self.kind, "")

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of a matrix of this shape."""
        (height, width) = self.block
        return -(-rows // height) if height else 1, -(-columns // width) if width else 1

    def shared(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a matrix of this shape that share a scale."""
        return min(self.block[0] or rows, rows), min(self.block[1] or columns, columns)

    def __str__(self) -> str:
        if self.kind not in ("fp8", "int4", "int8"):
            return self.kind
        (height, width) = self.block
        shared = {(1, 0): "channel", (0, 0): "tensor"}.get(self.block, f"block of {height} x {width}")
        return f"{self.kind}, a scale per {f'{width} columns' if height == 1 and width else shared}" + (
            ", with zeros" if self.zeros else ""
        )


FLOAT = Format()
MXFP8, MXFP4 = Format("mxfp8", (1, 32), torch.float8_e8m0fnu), Format("mxfp4", (1, 32), torch.float8_e8m0fnu)
NVFP4 = Format("nvfp4", (1, 16), torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix of several experts, or of one, then without the leading L.

    Attributes:
        data, scales, zeros, whole: see the head of this page; None where the format has none.
        bias: [L, B] float, or None.
        parts: P.
        memory: that all of these lie in, where others may map it; None: there is none.
    """

    format: Format
    data: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    parts: int = 1
    zeros: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    memory: WeightMemory | None = None

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
        code = torch.float8_e4m3fn if format.element == "e4m3" else torch.uint8
        grid = num, parts, *format.grid(rows // parts, columns)
        return Stack(
            format,
            make(num, rows, columns * format.bits // 8, dtype=code),
            make(grid, dtype=format.scale),
            added,
            parts,
            make(grid, dtype=torch.uint8) if format.zeros else None,
            make(num, parts, 1, 1, dtype=torch.float32) if format.kind == "nvfp4" else None,
        )

    @property
    def rows(self) -> int:
        """B."""
        return self.data.shape[-2]

    @property
    def columns(self) -> int:
        """A."""
        return self.data.shape[-1] * 8 // self.format.bits

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are there."""
        every = self.data, self.scales, self.bias, self.zeros, self.whole
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __getitem__(self, slot: int) -> Stack:
        """One expert's, as views."""
        tensors = self.scales, self.bias, self.zeros, self.whole
        scales, bias, zeros, whole = (None if tensor is None else tensor[slot] for tensor in tensors)
        return replace(self, data=self.data[slot], scales=scales, bias=bias, zeros=zeros, whole=whole)

    def copy_(self, other: Stack) -> None:
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
        part, start = divmod(first, self.rows // self.parts)
        height = self.format.block[0] or self.rows
        at = part, slice(start // height, -(-(start + end - first) // height))
        scales, zeros = (None if tensor is None else tensor[at] for tensor in (self.scales, self.zeros))
        tile = out[: (end - first) * self.columns].view(end - first, self.columns)
        assert scales is not None
        return from_codes(
            self.format, self.data[first:end], scales, tile, zeros, None if self.whole is None else self.whole[part]
        )


def allocated(stacks: Sequence[Stack], device: str | torch.device) -> list[Stack]:
    """The same stacks, of device "meta", with room on `device`; on a CPU in one `WeightMemory`. Raises MemoryError:
    there is none on a CPU."""
    if torch.device(device).type != "cpu":
        return [_moved(stack, [torch.empty_like(each, device=device) for each in stack.tensors]) for stack in stacks]
    sizes = [_aligned(each) for stack in stacks for each in stack.tensors]
    memory, end, made = WeightMemory(sum(sizes)), 0, []
    for stack in stacks:
        tensors = []
        for each in stack.tensors:
            tensors.append(memory.bytes[end : end + each.nbytes].view(each.dtype).view(each.shape))
            end += _aligned(each)
        made.append(replace(_moved(stack, tensors), memory=memory))
    return made


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _moved(stack: Stack, tensors: Sequence[torch.Tensor]) -> Stack:
    """tensors: in the order of `Stack.tensors`."""
    given = iter(tensors)

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else next(given)

    data, scales, bias = next(given), moved(stack.scales), moved(stack.bias)
    return replace(stack, data=data, scales=scales, bias=bias, zeros=moved(stack.zeros), whole=moved(stack.whole))


def tile_elements(columns: int, format: Format) -> int:
    """Elements of the buffer that `Stack.tile` needs."""
    return max(_TILE_ELEMENTS, columns * max(1, format.block[0]))


def from_codes(
    format: Format,
    data: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    zeros: torch.Tensor | None = None,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """One matrix, or rows of one, into `out` [B, A], rounded once.

    Args:
        data: [B, A] or, of 4 bits, [B, A / 2].
        scales, zeros: [R, C]. whole: one number.
    """
    _values(format, data, out)
    factors = scales.float() if whole is None else scales.float() * whole
    if format.scale is torch.float8_e8m0fnu and out.dtype is torch.bfloat16:
        factors = factors.to(out.dtype)  # exact, and twice as fast on a CPU
    height, width = format.shared(*out.shape)
    (rows, columns) = out.shape
    if rows % height or columns % width:
        assert zeros is None
        return out.mul_(factors.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns])
    blocks = out.view(rows // height, height, columns // width, width)
    if zeros is not None:
        blocks.sub_(zeros[:, None, :, None])
    blocks.mul_(factors[:, None, :, None])
    return out


def _values(format: Format, data: torch.Tensor, out: torch.Tensor) -> None:
    """Of all codes, two at a time from a table. That of e4m3 fits a CPU's L2, and is twelve times as fast as torch's
    own conversion there."""
    if format.element == "e4m3" and (data.device.type != "cpu" or data.shape[-1] % 2):
        out.copy_(data)
        return
    pairs = _pairs(format, out.dtype, out.device)
    keys = data.contiguous().view(torch.uint8 if format.bits == 4 else torch.uint16).view(-1).int()
    torch.index_select(pairs, 0, keys, out=out.view(-1).view(pairs.dtype))


@functools.cache
def _pairs(format: Format, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """By the bits of two codes: their values, as one integer of both."""
    codes = torch.arange(1 << format.bits, dtype=torch.uint8, device="cpu")
    if format.element == "e4m3":
        values = codes.view(torch.float8_e4m3fn).to(dtype)
    elif format.element == "e2m1":
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device="cpu")
    else:
        values = (codes.int() - (0 if format.zeros else 1 << (format.bits - 1))).to(dtype)
    both = torch.arange(1 << 2 * format.bits, device="cpu")
    pairs = torch.stack([values[both & (1 << format.bits) - 1], values[both >> format.bits]], dim=1)
    return pairs.view(_PAIR[dtype.itemsize]).squeeze(1).to(device)
