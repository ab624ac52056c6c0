"""An expert MLP over quantised weights on a GPU: rows quantised, grouped GEMM with the activation, grouped GEMM.

    fp8      tokens -> e4m3 with a scale per 128 columns -> e4m3 products, fp32 sums -> activation in fp32 -> e4m3 with
             a scale per 128 columns -> e4m3 products, fp32 sums -> out
    others   tokens in bf16 -> weights become bf16 in registers -> activation in fp32 -> bf16 -> out

Weights are read as they are stored. Nothing is written between the first product and the activation where the rule is
gated silu or scaled; other rules run in torch on the first product's rows, as they do in bf16.

Tiles are chosen by the average number of rows per expert (`TILES`). The host knows no count, and its number of rows may
be a bound: where that is large, a product is launched once per kind of tile, each for the experts whose number of rows
is its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import Stack
from crossdock.worker.experts.grouped.kernels import grouped_product, quantise_rows
from crossdock.worker.experts.grouped.support import fused_rule

BLOCK, STEP = 128, 64
"""Columns of a step of fp8 and of other formats, as in `kernels.py`."""
_QUANTISER_ROWS, _QUANTISER_PROGRAMS = 32, 8
_MOST = 2**31 - 1


_ALIGNED = 16
"""Bytes, as Triton compiles for: it reads more at once where a tensor begins at a multiple."""


class Launcher:
    """Launches of one Triton kernel that repeat: its compiled form is kept, so a launch binds no arguments by name and
    looks nothing up. That took longer than the kernels of a few rows. One thread at a time.

    Args:
        function: `triton.jit`'s.
    """

    def __init__(self, function: Any) -> None:
        self._function, self._compiled = function, dict[Hashable, Any]()

    def __call__(
        self, programs: int, args: tuple[Any, ...], constants: Mapping[str, Hashable], options: Mapping[str, int]
    ) -> None:
        """Launch on the current stream.

        Args:
            programs: of the grid.
            args: in the kernel's order; of tensor descriptors, the types and blocks follow from the constants.
            constants: its constexpr arguments, which follow `args`, in the kernel's order.
            options: of the compiler.
        """
        key = (*map(_kind, args), *constants.values(), *options.values())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._function[(programs,)](*args, **constants, **options)
        else:
            compiled[(programs, 1, 1)](*args, *constants.values())


def _kind(arg: Any) -> Hashable:
    """What Triton compiles an argument for."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNED == 0
    if isinstance(arg, int):
        return arg == 1, arg % _ALIGNED == 0, arg >> 31
    return arg is None


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch divides its work.

    Attributes:
        most: rows of an expert, up to which this tile computes it, from the former tile's on.
        swap: weights take the rows' side of the tensor cores' product.
        warps, stages: of a program; blocks of columns in flight.
        programs: per multiprocessor.
    """

    most: int
    rows: int
    swap: bool
    warps: int
    stages: int
    programs: int


TILES: dict[str, tuple[Tile, ...]] = {
    "fp8": (Tile(64, 32, True, 4, 3, 2), Tile(_MOST, 128, False, 8, 4, 1)),
    "packed": (Tile(16, 16, True, 4, 4, 3), Tile(_MOST, 64, True, 4, 4, 2)),
}
"""Tiles of fp8 and of other formats, in ascending order of rows; measured on an H100 with a DeepSeek-V3 rank's experts
(of the others: MXFP4)."""


@dataclass(frozen=True, slots=True)
class ProductRows:
    """Input of a product: [N, A] in e4m3 and scales [ceil(A / 128), N], or bf16 and None."""

    values: torch.Tensor
    scales: torch.Tensor | None


_quantise_rows, _grouped_product = Launcher(quantise_rows), Launcher(grouped_product)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """One of a layer's two stacks as launches take it.

    Attributes:
        weights: where they lie.
        scales, factors: as the kernel reads them.
        constants: of the kernel, which are the same in all launches.
        experts: as the kernel wants it.
    """

    stack: Stack
    weights: TensorDescriptor
    scales: torch.Tensor
    factors: torch.Tensor | None
    constants: dict[str, Hashable]
    experts: int

    @staticmethod
    def of(stack: Stack, rule: str) -> _Matrices:
        data = stack.data.view(-1, stack.data.shape[-1])
        blocks, scales, factors, scale_rows, apart = _scales(stack, gated=rule != "plain")
        constants: dict[str, Hashable] = {
            "bits": stack.format.bits, "element": stack.format.element, "blocks": blocks, "rule": rule,
            "columns": stack.columns, "width": stack.format.block[1] or stack.columns,
            "weight_rows": stack.rows, "out_columns": stack.rows // (1 if rule == "plain" else 2),
            "scale_rows": scale_rows, "scales_apart": apart,
        }  # fmt: skip
        experts = max(2, triton.next_power_of_2(stack.data.shape[0]))
        described = TensorDescriptor.from_tensor(data, [BLOCK, _step(stack) * stack.format.bits // 8])
        return _Matrices(stack, described, scales, factors, constants, experts)


class GroupedProducts:
    """The expert MLPs of one GPU. One thread at a time.

    Args:
        gating: between the products.
        tiles: by kind of format.
        every_tile: launch all of them, whatever the number of rows.
    """

    def __init__(
        self,
        gating: Gating,
        num_processors: int,
        tiles: dict[str, tuple[Tile, ...]] | None = None,
        *,
        every_tile: bool = False,
    ) -> None:
        self._gating, self._num_processors, self._tiles = gating, num_processors, tiles or TILES
        self._every_tile, self._rule = every_tile, fused_rule(gating)
        self._limit = math.inf if gating.limit is None else gating.limit
        self._matrices: dict[int, tuple[_Matrices, _Matrices]] = {}

    @staticmethod
    def compiled(weights: tuple[Stack, Stack], gating: Gating, dtype: torch.dtype) -> GroupedProducts:
        """For rows of that dtype on the weights' GPU, its kernels compiled (seconds, or from Triton's cache)."""
        device, columns = weights[0].data.device, weights[0].columns
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        made = GroupedProducts(gating, num_processors, every_tile=True)
        rows = torch.zeros(BLOCK, columns, dtype=dtype, device=device)
        none = torch.zeros(weights[0].data.shape[0] + 1, dtype=torch.int32, device=device)
        made.forward(0, weights, rows, none, none[1:], torch.empty_like(rows))
        return GroupedProducts(gating, num_processors)

    def forget(self, layer: int) -> None:
        self._matrices.pop(layer, None)

    def forward(
        self,
        layer: int,
        weights: tuple[Stack, Stack],
        tokens: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write `out` [N, H], contiguous, in any float dtype.

        Args:
            layer: that has these weights, until it is forgotten.
            weights: of `support.reason_against` None.
            tokens: [N, H] float, columns contiguous.
            offsets, counts: int32 [L + 1], [L], as in `ExpertMLPs.forward`.
        """
        if not tokens.shape[0]:
            return
        pair = self._matrices.get(layer)
        if pair is None:
            pair = self._matrices[layer] = (_Matrices.of(weights[0], self._rule), _Matrices.of(weights[1], "plain"))
        first, down = pair
        groups = offsets, counts
        rows = self._rows(tokens, first.stack, offsets)
        if self._rule == "plain":
            inner = tokens.new_empty(tokens.shape[0], first.stack.rows, dtype=torch.bfloat16)
            self._product(first, rows, groups, ProductRows(inner, None))
            hidden = self._gating(inner, inner.new_empty(inner.shape[0], down.stack.columns))
            rows = self._rows(hidden, down.stack, offsets)
        else:
            hidden_rows = _empty(tokens, tokens.shape[0], down.stack)
            self._product(first, rows, groups, hidden_rows)
            rows = hidden_rows
        self._product(down, rows, groups, ProductRows(out, None))

    def _rows(self, tokens: torch.Tensor, stack: Stack, offsets: torch.Tensor) -> ProductRows:
        """Input of a product, as its format takes it."""
        if stack.format.kind != "fp8":
            return ProductRows(tokens.to(torch.bfloat16).contiguous(), None)
        rows = _empty(tokens, tokens.shape[0], stack)
        args = (
            tokens, rows.values, rows.scales, offsets, offsets.shape[0] - 1, tokens.shape[0], tokens.stride(0),
        )  # fmt: skip
        constants = {"columns": stack.columns, "tile_rows": _QUANTISER_ROWS}
        _quantise_rows(self._num_processors * _QUANTISER_PROGRAMS, args, constants, {})
        return rows

    def _product(
        self, matrices: _Matrices, rows: ProductRows, groups: Sequence[torch.Tensor], out: ProductRows
    ) -> None:
        offsets, counts = groups
        stack, (num_experts, *_), num_rows = matrices.stack, matrices.stack.data.shape, rows.values.shape[0]
        kind = "fp8" if stack.format.kind == "fp8" else "packed"
        for least, most, tile in self._launches(kind, num_rows, num_experts):
            described = TensorDescriptor.from_tensor(rows.values, [tile.rows, _step(stack)])
            args = (
                described, rows.scales, matrices.weights, matrices.scales, stack.zeros, matrices.factors, stack.bias,
                out.values, out.scales, offsets, counts, num_experts, num_rows, least, most, self._limit,
                self._gating.alpha,
            )  # fmt: skip
            of_tile = {"swap": tile.swap, "tile_rows": tile.rows, "experts": matrices.experts}
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            _grouped_product(self._num_processors * tile.programs, args, matrices.constants | of_tile, options)

    def _launches(self, kind: str, num_rows: int, num_experts: int) -> list[tuple[int, int, Tile]]:
        """(least, most rows of an expert, tile): one launch with the first tile that fits the average, whatever single
        experts have; with rows for the last one, every tile, each for its experts: `num_rows` may be a bound."""
        *few, last = self._tiles[kind]
        for tile in few:
            if num_rows <= tile.most * num_experts and not self._every_tile:
                return [(1, _MOST, tile)]
        begins = [1, *(tile.most + 1 for tile in few)]
        return [(begin, tile.most, tile) for begin, tile in zip(begins, (*few, last), strict=True)]


def _step(stack: Stack) -> int:
    """Columns of one."""
    return BLOCK if stack.format.kind == "fp8" else STEP


def _empty(like: torch.Tensor, num_rows: int, stack: Stack) -> ProductRows:
    """Room for the input of a product."""
    if stack.format.kind != "fp8":
        return ProductRows(like.new_empty(num_rows, stack.columns, dtype=torch.bfloat16), None)
    values = like.new_empty(num_rows, stack.columns, dtype=torch.float8_e4m3fn)
    return ProductRows(values, like.new_empty(-(-stack.columns // BLOCK), num_rows, dtype=torch.float32))


def _scales(stack: Stack, gated: bool) -> tuple[bool, torch.Tensor, torch.Tensor | None, int, int]:
    """(fp8 in blocks, scales as the kernel reads them, factors of rows of weights, rows of scales per expert, from
    gate's to up's or to the next)."""
    assert stack.scales is not None
    num, parts, height, _ = stack.scales.shape
    is_fp8 = stack.format.kind == "fp8"
    if is_fp8 and stack.format.block == (BLOCK, BLOCK):
        half = height if parts == 2 else stack.rows // 2 // BLOCK
        return True, stack.scales, None, parts * height, half if gated else 1
    whole = stack.scales if is_fp8 else stack.whole
    factors = None if whole is None else whole.expand(num, parts, stack.rows // parts, 1).contiguous()
    is_power = stack.format.scale is torch.float8_e8m0fnu
    return False, stack.scales.view(torch.uint8) if is_power else stack.scales, factors, 0, 0
