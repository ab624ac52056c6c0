"""How one layer's experts lie in the files: names, format, order of rows. Read from the tensors, layer by layer, since
checkpoints mix them; config.json says only what shapes and types leave open.

Letters: E experts, H hidden size, I intermediate size of one expert, L experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from crossdock.worker.checkpoints.names import HINT, Names, packed_as
from crossdock.worker.checkpoints.shards import CheckpointError, Shards
from crossdock.worker.checkpoints.weights import FLOAT, MX_BLOCK, Format, Stack, from_fp8, from_mxfp4

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DATA = {"float": _FLOATS, "fp8": (torch.float8_e4m3fn,), "mxfp4": (torch.uint8,)}
_SCALES = {"fp8": (*_FLOATS, torch.float8_e8m0fnu), "mxfp4": (torch.uint8,)}
"""dtypes of matrices and of their scales, by format."""
_FP8_SCALES = ("_scale_inv", "_scale")
"""What follows a matrix' name in the name of its scales: DeepSeek's, and compressed-tensors', ModelOpt's, AutoFP8's."""

_PACKED_BESIDE = ("_scale_2", "_weight_scale_2", ".absmax")
"""What lies beside a matrix of a format that is not computed here."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Of one layer: E, H and I; halves: 2 with a gate; bias: both products add one."""

    num_experts: int
    hidden: int
    inner: int
    halves: int
    bias: bool


class StoredLayer:
    """One layer's experts in the files.

    Args:
        names: of the layer's tensors.
        sizes: that they must have.
        alternates: rows of gate and up alternate where one tensor holds both.
        transposed: stacked float tensors are [E, H, 2I] and [E, I, H], where H = I leaves it open.
        fp8: the formats that fp8 matrices may have; those that do not fit the scales are left out.

    Attributes:
        dtype: of the first tensor.
        format: of all matrices.

    Raises:
        CheckpointError: a missing tensor, or one of a type that is not computed here.
    """

    def __init__(
        self,
        shards: Shards,
        names: Names,
        sizes: LayerSizes,
        fp8: Sequence[Format],
        *,
        alternates: bool,
        transposed: bool,
    ) -> None:
        self._shards, self._names, self._sizes = shards, names, sizes
        self._parts, self._stacked = len(names.naming.first), names.naming.stacked
        self._alternates = names.naming.interleaved or (alternates and self._parts == 1)
        self._data, self._scales = "", ""
        name = names.first(0)[0]
        if f"{name}_blocks" in shards:
            self.dtype, self.format, self._data, self._scales = torch.uint8, Format("mxfp4"), "_blocks", "_scales"
        else:
            self.dtype = self._dtype_of(name)
            self.format = self._fp8_format(name, fp8) if self.dtype is torch.float8_e4m3fn else FLOAT
        self._transposed = self._is_transposed(transposed)

    def stacks(
        self, num: int, dtype: torch.dtype, device: str | torch.device, *, widen: bool = False
    ) -> tuple[Stack, Stack]:
        """Room for the two matrices of `num` experts; see `Checkpoint.stacks`."""
        format, sizes = FLOAT if widen else self.format, self._sizes
        hidden, inner, bias = sizes.hidden, sizes.inner, sizes.bias
        return (
            Stack.empty(format, (num, sizes.halves * inner, hidden), dtype, device, bias=bias, parts=self._parts),
            Stack.empty(format, (num, hidden, inner), dtype, device, bias=bias),
        )

    def read_expert(self, expert: int, first: Stack, down: Stack) -> None:
        of_first = self._names.first(expert)
        for part, name in enumerate(of_first):
            rows = first.rows // len(of_first)
            self._read(name, expert, first, slice(part * rows, (part + 1) * rows), part, split=self._alternates)
        self._read(self._names.down(expert), expert, down, slice(None), 0, split=False)

    def _read(self, name: str, expert: int, into: Stack, rows: slice, part: int, *, split: bool) -> None:
        """One matrix into rows of `into`. split: its rows alternate between gate and up."""
        index = expert if self._stacked else None
        weight = self._shards.read(name + self._data, index)
        scales = self._shards.read(name + self._scales, index) if self._scales else None
        if self.format.kind == "mxfp4":
            weight = weight.flatten(1)
        if self._transposed:
            weight = weight.t()
        if into.format.kind == "float":
            weight = self._as_float(weight, scales, into.data.dtype)
        elif scales is not None and into.scales is not None:
            into_scales = into.scales[part] if into.format.kind == "fp8" else into.scales[rows]
            into_scales.copy_(_gate_first(scales, split).view_as(into_scales))
        into.data[rows].copy_(_gate_first(weight, split))
        if into.bias is not None:
            into.bias[rows].copy_(_gate_first(self._shards.read(f"{name}_bias", index), split))

    def _as_float(self, weight: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if scales is None:
            return weight
        if self.format.kind == "mxfp4":
            return from_mxfp4(
                weight, scales, torch.empty(weight.shape[0], 2 * weight.shape[1], dtype=torch.float32, device="cpu")
            )
        block = tuple(size or whole for size, whole in zip(self.format.block, weight.shape, strict=True))
        grid = scales.float().view(self.format.grid(*weight.shape))
        return from_fp8(
            weight, grid, (block[0], block[1]), torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        ).to(dtype)

    def stored(self, expert: int) -> Iterator[tuple[str, int | None]]:
        """(name, index) of all tensors of the expert: matrices, scales, biases."""
        index = expert if self._stacked else None
        for name in (*self._names.first(expert), self._names.down(expert)):
            yield name + self._data, index
            if self._scales:
                yield name + self._scales, index
            if self._sizes.bias:
                yield f"{name}_bias", index

    def sampled(self, expert: int, turn: int) -> Iterator[tuple[str, int | None]]:
        """(name, index) of one matrix of the expert, the turn-th, and of its scales."""
        names = (*self._names.first(expert), self._names.down(expert))
        name, index = names[turn % len(names)], expert if self._stacked else None
        yield name + self._data, index
        if self._scales:
            yield name + self._scales, index

    def check(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each matrix, without the dimension of experts. Raises CheckpointError: one is
        missing, or has another type or shape."""
        sizes, names = self._sizes, self._names
        for expert in range(1 if self._stacked else sizes.num_experts):
            for name in names.first(expert):
                yield self._check_tensor(name, sizes.halves * sizes.inner // self._parts, sizes.hidden)
            yield self._check_tensor(names.down(expert), sizes.hidden, sizes.inner)

    def _check_tensor(self, name: str, rows: int, columns: int) -> tuple[str, torch.dtype, tuple[int, ...]]:
        stack, format = self._stack(), self.format
        expected = {
            "float": (columns, rows) if self._transposed else (rows, columns),
            "fp8": (rows, columns),
            "mxfp4": (rows, columns // MX_BLOCK, MX_BLOCK // 2),
        }[format.kind]
        data = name + self._data
        if format.kind == "mxfp4" and columns % MX_BLOCK:
            where = self._shards.file(data)
            raise CheckpointError(f"{where}: {data}: expected a multiple of {MX_BLOCK} columns in mxfp4, got {columns}")
        dtype = self._check(
            data, [(*stack, *expected)], _DATA[format.kind], f"{format} as in the layer's other experts"
        )
        if self._scales:
            self._check(name + self._scales, self._scale_shapes(format, rows, columns), _SCALES[format.kind])
        elif any(name + suffix in self._shards for suffix in _FP8_SCALES):
            raise CheckpointError(f"{self._shards.file(name)}: {name}: expected float without scales, got scales")
        if self._sizes.bias:
            self._check(f"{name}_bias", [(*stack, rows)], _FLOATS)
        return data, dtype, expected

    def _check(
        self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], words: str = ""
    ) -> torch.dtype:
        """The dtype. Raises CheckpointError: none of these shapes, or none of these dtypes."""
        dtype, shape = self._dtype_of(name), self._shards.describe(name)[1]
        where = f"{self._shards.file(name)}: {name}"
        if dtype not in dtypes:
            words = words or f"one of {', '.join(map(str, dtypes))}"
            raise CheckpointError(f"{where}: expected {words}, got {dtype}")
        if shape not in shapes:
            raise CheckpointError(f"{where}: expected {list(shapes[0])}, got {list(shape)}")
        return dtype

    def _dtype_of(self, name: str) -> torch.dtype:
        """Raises CheckpointError: missing, or of a format that is not computed here."""
        if packed := packed_as(name + end for end in _PACKED_BESIDE if name + end in self._shards):
            raise CheckpointError(f"{self._shards.file(name)}: {name}: {packed}, not computed here: {HINT}")
        return self._shards.describe(name)[0]

    def _fp8_format(self, name: str, formats: Sequence[Format]) -> Format:
        """The one whose scales have the shape of those of `name`, the layer's first matrix; notes their suffix."""
        where = f"{self._shards.file(name)}: {name}"
        if not formats:
            raise CheckpointError(f"{where}: fp8, of which config.json does not say how it is scaled: {HINT}")
        self._scales = next((suffix for suffix in _FP8_SCALES if name + suffix in self._shards), _FP8_SCALES[0])
        rows, columns = self._sizes.halves * self._sizes.inner // self._parts, self._sizes.hidden
        shape = self._shards.describe(name + self._scales)[1]
        fitting = [each for each in formats if shape in self._scale_shapes(each, rows, columns)] or list(formats[:1])
        format = fitting[0]
        meanings = {each.shared(rows, columns) for each in fitting}
        if len(meanings) > 1:
            raise CheckpointError(f"{where}: scales of {list(shape)} fit {' and '.join(map(str, fitting))}")
        if self._alternates and format.block[0] > 1:
            raise CheckpointError(f"{where}: gate and up alternate within blocks of {format}")
        return format

    def _scale_shapes(self, format: Format, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Of the scales of a matrix. One scale of a whole matrix may have fewer dimensions."""
        if format.kind == "mxfp4":
            return [(*self._stack(), rows, columns // MX_BLOCK)]
        shape = (*self._stack(), *format.grid(rows, columns))
        return [shape, shape[:-1], shape[:-2]] if format.block == (0, 0) else [shape]

    def _stack(self) -> tuple[int, ...]:
        return (self._sizes.num_experts,) if self._stacked else ()

    def _is_transposed(self, where_square: bool) -> bool:
        sizes = self._sizes
        if not self._stacked or self.format.kind != "float":
            return False
        if sizes.hidden == sizes.inner:
            return where_square
        shape = self._shards.describe(self._names.down(0))[1]
        return shape == (sizes.num_experts, sizes.inner, sizes.hidden)


def _gate_first(tensor: torch.Tensor, alternating: bool) -> torch.Tensor:
    """[2I, ...] with alternating rows -> all gate rows, then all up rows."""
    return torch.cat([tensor[::2], tensor[1::2]]) if alternating else tensor
