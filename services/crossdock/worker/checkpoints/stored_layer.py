"""How one layer's experts lie in the files: names, format, order of rows. Read from the tensors, layer by layer, since
checkpoints mix them; config.json says only what shapes and types leave open.

Letters: E experts, H hidden size, I intermediate size of one expert, L experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from crossdock.worker.checkpoints.names import HINT, NOT_COMPUTED, Names, packed_as
from crossdock.worker.checkpoints.packings import FLOATS, FP8, PACKINGS, PLAIN, Packing, named
from crossdock.worker.checkpoints.shards import CheckpointError, Shards
from crossdock.worker.checkpoints.weights import FLOAT, MXFP4, MXFP8, NVFP4, Format, Stack, from_codes


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
        one_less: GPTQ's zeros are stored one less than they mean.

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
        one_less: bool,
    ) -> None:
        self._shards, self._names, self._sizes, self._one_less = shards, names, sizes, one_less
        self._parts, self._stacked = len(names.naming.first), names.naming.stacked
        self._alternates = names.naming.interleaved or (alternates and self._parts == 1)
        name = names.first(0)[0]
        self._packing, self.format = self._recognised(name, fp8)
        self.dtype = self._dtype_of(named(name, self._packing.data))
        self._transposed = self._is_transposed(transposed)
        self._check_order(name, sizes.hidden, 0 if self._stacked else None)

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
        index, format, target = expert if self._stacked else None, self.format, into.data[rows]
        if format.kind == "float":
            weight = self._shards.read(name, index)
            target.copy_(_gate_first(weight.t() if self._transposed else weight, split))
        else:
            self._check_order(name, into.columns, index)
            shape = target.shape[0], into.columns
            data, scales, zeros, whole = self._packing.read(
                format, shape, lambda end: self._shards.read(named(name, end), index), self._one_less
            )
            data, scales = _gate_first(data, split), _gate_first(scales, split)
            zeros = None if zeros is None else _gate_first(zeros, split)
            if into.format.kind == "float":
                wide = torch.empty(shape, dtype=torch.float32, device="cpu")
                target.copy_(from_codes(format, data, scales, wide, zeros, whole))
            else:
                target.copy_(data)
                for held, stored in ((into.scales, scales), (into.zeros, zeros), (into.whole, whole)):
                    if held is not None and stored is not None:
                        held[part].copy_(stored)
        if into.bias is not None:
            into.bias[rows].copy_(_gate_first(self._shards.read(f"{name}_bias", index), split))

    def _check_order(self, name: str, columns: int, index: int | None) -> None:
        """Raises CheckpointError: columns that share a scale do not lie side by side."""
        groups = named(name, self._packing.groups) if self._packing.groups else name
        if groups == name or groups not in self._shards:
            return
        self._check(groups, [(*self._stack(), columns)], (torch.int32,))
        found, width = self._shards.read(groups, index), self.format.block[1] or columns
        wrong = (found != torch.arange(columns, dtype=found.dtype, device="cpu") // width).nonzero()
        if len(wrong):
            (column,) = wrong[0].tolist()
            raise CheckpointError(
                f"{self._shards.file(groups)}: {groups}: expected column {column} in group {column // width}, got "
                f"{int(found[column])}: columns in act-order (desc_act) are not computed here: quantise without it"
            )

    def stored(self, expert: int) -> Iterator[tuple[str, int | None]]:
        """(name, index) of all tensors of the expert: matrices, scales, biases."""
        index = expert if self._stacked else None
        for name in (*self._names.first(expert), self._names.down(expert)):
            yield from self._tensors(name, index)
            if self._sizes.bias:
                yield f"{name}_bias", index

    def sampled(self, expert: int, turn: int) -> Iterator[tuple[str, int | None]]:
        """(name, index) of one matrix of the expert, the turn-th, and of its scales."""
        names = (*self._names.first(expert), self._names.down(expert))
        return self._tensors(names[turn % len(names)], expert if self._stacked else None)

    def _tensors(self, name: str, index: int | None) -> Iterator[tuple[str, int | None]]:
        return ((named(name, end), index) for end in self._packing.ends(self.format))

    def check(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each matrix, without the dimension of experts. Raises CheckpointError: one is
        missing, or has another type or shape."""
        sizes, names = self._sizes, self._names
        for expert in range(1 if self._stacked else sizes.num_experts):
            for name in names.first(expert):
                yield self._check_tensor(name, sizes.halves * sizes.inner // self._parts, sizes.hidden)
            yield self._check_tensor(names.down(expert), sizes.hidden, sizes.inner)

    def _check_tensor(self, name: str, rows: int, columns: int) -> tuple[str, torch.dtype, tuple[int, ...]]:
        format, stack, data = self.format, self._stack(), named(name, self._packing.data)
        for word, size, unit in zip(("rows", "columns"), (rows, columns), self._packing.unit(format), strict=True):
            if size % unit:
                where = f"{self._shards.file(data)}: {data}"
                raise CheckpointError(f"{where}: expected a multiple of {unit} {word} in {format}, got {size}")
        turned = (columns, rows) if self._transposed else (rows, columns)
        (_, (shape, *_), right), *others = self._packing.tensors(format, *turned)
        dtype = self._check(data, [(*stack, *shape)], right, f"{format} as in the layer's other experts")
        for end, shapes, right in others:
            self._check(named(name, end), [(*stack, *each) for each in shapes], right)
        if format.kind == "float" and any(named(name, each.scales) in self._shards for each in PACKINGS):
            raise CheckpointError(f"{self._shards.file(name)}: {name}: expected float without scales, got scales")
        if self._sizes.bias:
            self._check(f"{name}_bias", [(*stack, rows)], FLOATS)
        return data, dtype, shape

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
        if packed := packed_as(name + end for end in NOT_COMPUTED if name + end in self._shards):
            raise CheckpointError(f"{self._shards.file(name)}: {name}: {packed}, not computed here: {HINT}")
        return self._shards.describe(name)[0]

    def _recognised(self, name: str, fp8: Sequence[Format]) -> tuple[Packing, Format]:
        """Of `name`, the layer's first matrix: the one that its tensors fit."""
        rows, columns = self._sizes.halves * self._sizes.inner // self._parts, self._sizes.hidden
        candidates = list(self._candidates(name, columns, fp8))
        if not candidates:
            dtype = self._dtype_of(name)
            candidates = [(FP8, MXFP8)] if dtype is torch.float8_e4m3fn else [(PLAIN, FLOAT)]
        fitting = [each for each in candidates if self._fits(name, *each, rows, columns)]
        packing, format = (fitting or candidates)[0]
        where = f"{self._shards.file(named(name, packing.data))}: {named(name, packing.data)}"
        if format.element == "e4m3" and not fp8 and not fitting:
            raise CheckpointError(f"{where}: fp8, of which config.json does not say how it is scaled: {HINT}")
        if len({each.shared(rows, columns) for _, each in fitting}) > 1:
            shape, words = self._shards.describe(named(name, packing.scales))[1], [str(each) for _, each in fitting]
            raise CheckpointError(f"{where}: scales of {list(shape)} fit {' and '.join(words)}")
        if self._alternates and format.block[0] > 1:
            raise CheckpointError(f"{where}: gate and up alternate within blocks of {format}")
        return packing, format

    def _candidates(self, name: str, columns: int, fp8: Sequence[Format]) -> Iterator[tuple[Packing, Format]]:
        """How a matrix may be stored that has such tensors, by names and types."""
        for packing in PACKINGS:
            data, scales = named(name, packing.data), named(name, packing.scales)
            if data not in self._shards or (data == name and scales not in self._shards):
                continue
            dtype, (scale, shape) = self._dtype_of(data), self._shards.describe(scales)
            if dtype is torch.float8_e4m3fn:
                yield from ((packing, format) for format in (*fp8, MXFP8))
            elif dtype is torch.int32:
                is_awq = self._shards.describe(data)[1][-2:-1] == (columns,)
                if is_awq == (packing.order == "awq") or packing.order == "rows":
                    num = (1, 1, *shape)[-1 if packing.order == "rows" else -2]
                    block = 1, 0 if num < 2 or columns % num else columns // num
                    zeros = named(name, packing.zeros) in self._shards
                    yield packing, Format("int4", block, scale, zeros)
                    yield from () if packing.order == "awq" else ((packing, Format("int8", block, scale, zeros)),)
            elif dtype not in FLOATS:
                yield packing, NVFP4 if scale is torch.float8_e4m3fn else MXFP4

    def _fits(self, name: str, packing: Packing, format: Format, rows: int, columns: int) -> bool:
        for end, shapes, dtypes in packing.tensors(format, rows, columns):
            if (tensor := named(name, end)) not in self._shards:
                return False
            dtype, shape = self._shards.describe(tensor)
            if dtype not in dtypes or shape not in [(*self._stack(), *each) for each in shapes]:
                return False
        return True

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
