"""An expert MLP over quantised weights on a GPU: rows quantised, grouped GEMM with the activation, grouped GEMM.

    fp8      tokens -> e4m3 with a scale per 128 columns -> e4m3 products, fp32 sums -> activation in fp32 -> e4m3 with
             a scale per 128 columns -> e4m3 products, fp32 sums -> out
    MXFP4    tokens in bf16 -> weights become bf16 in registers, exactly -> activation in fp32 -> bf16 -> out; those of
             experts with many rows become bf16 in memory first, where there is room

Weights are read as they are stored. Nothing is written between the first product and the activation where the rule is
gated silu or scaled; other rules run in torch on the first product's rows, as they do in bf16.

Tiles are chosen by the average number of rows per expert (`TILES`). The host knows no count, and its number of rows may
be a bound: where that is large, a product is launched once per kind of tile, each for the experts whose number of rows
is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from crossdock.worker.gating import Gating
from crossdock.worker.grouped.product import grouped_product
from crossdock.worker.grouped.row_quantiser import quantise_rows
from crossdock.worker.grouped.support import fused_rule
from crossdock.worker.grouped.widen import widen_mxfp4
from crossdock.worker.weights import Stack

BLOCK = 128
_STEP = {"fp8": (BLOCK, 1), "mxfp4": (64, 2), "bf16": (64, 1)}
"""Columns of a step by kind of format, as in `sums.py`; how many are in an element."""
_WIDEN_BLOCK = 2048
"""Bytes of a program that widens."""
_QUANTISER_ROWS, _QUANTISER_PROGRAMS = 32, 8
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch divides its work.

    Attributes:
        most: rows of an expert, up to which this tile computes it, from the former tile's on.
        rows: of a tile.
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
    "mxfp4": (Tile(16, 16, True, 4, 4, 3), Tile(255, 64, True, 4, 4, 2)),
    "bf16": (Tile(_MOST, 128, False, 8, 4, 1),),
}
"""By kind of format, in ascending order of rows; measured on an H100 with a DeepSeek-V3 rank's experts. "bf16": of
MXFP4's experts with more rows than its last tile computes."""


@dataclass(frozen=True, slots=True)
class ProductRows:
    """Input of a product: [N, A] in e4m3 and scales [ceil(A / 128), N], or bf16 and None."""

    values: torch.Tensor
    scales: torch.Tensor | None


class GroupedProducts:
    """The expert MLPs of one GPU; holds no weights.

    Args:
        gating: between the products.
        num_processors: multiprocessors of the GPU.
        tiles: by kind of format.
        every_tile: launch all of them, whatever the number of rows.
        kernels: compiled by another object for the same GPU, by what they are compiled for.
    """

    def __init__(
        self,
        gating: Gating,
        num_processors: int,
        tiles: dict[str, tuple[Tile, ...]] | None = None,
        *,
        every_tile: bool = False,
        kernels: dict[tuple[object, ...], Any] | None = None,
    ) -> None:
        self._gating, self._num_processors, self._tiles = gating, num_processors, tiles or TILES
        self._every_tile = every_tile
        self._kernels: dict[tuple[object, ...], Any] = {} if kernels is None else kernels

    @staticmethod
    def compiled(weights: tuple[Stack, Stack], gating: Gating, dtype: torch.dtype) -> GroupedProducts:
        """For rows of that dtype on the weights' GPU, its kernels compiled (seconds, or from Triton's cache)."""
        device, columns = weights[0].data.device, weights[0].columns
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        made = GroupedProducts(gating, num_processors, every_tile=True)
        rows = torch.zeros(BLOCK, columns, dtype=dtype, device=device)
        none = torch.zeros(weights[0].data.shape[0] + 1, dtype=torch.int32, device=device)
        made.forward(weights, rows, none, none[1:], torch.empty_like(rows))
        return GroupedProducts(gating, num_processors, kernels=made._kernels)

    def forward(
        self,
        weights: tuple[Stack, Stack],
        tokens: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write `out` [N, H], contiguous, in any float dtype.

        Args:
            weights: of `support.reason_against` None.
            tokens: [N, H] float, columns contiguous.
            offsets, counts: int32 [L + 1], [L], as in `ExpertMLPs.forward`.
        """
        if not tokens.shape[0]:
            return
        first, down = weights
        groups = offsets, counts
        rule = fused_rule(self._gating)
        rows = self._rows(tokens, first, offsets)
        if rule == "plain":
            inner = tokens.new_empty(tokens.shape[0], first.rows, dtype=torch.bfloat16)
            self._product(first, rows, groups, ProductRows(inner, None), rule)
            hidden = self._gating(inner, inner.new_empty(inner.shape[0], down.columns))
            rows = self._rows(hidden, down, offsets)
        else:
            hidden_rows = _empty(tokens, tokens.shape[0], down)
            self._product(first, rows, groups, hidden_rows, rule)
            rows = hidden_rows
        self._product(down, rows, groups, ProductRows(out, None), "plain")

    def _rows(self, tokens: torch.Tensor, stack: Stack, offsets: torch.Tensor) -> ProductRows:
        """Input of a product, as its format takes it."""
        if stack.format.kind == "mxfp4":
            return ProductRows(tokens.to(torch.bfloat16).contiguous(), None)
        rows = _empty(tokens, tokens.shape[0], stack)
        quantise_rows[(self._num_processors * _QUANTISER_PROGRAMS,)](
            tokens, rows.values, rows.scales, offsets, offsets.shape[0] - 1, tokens.shape[0], tokens.stride(0),
            columns=stack.columns, tile_rows=_QUANTISER_ROWS,
        )  # fmt: skip
        return rows

    def _product(
        self, stack: Stack, rows: ProductRows, groups: Sequence[torch.Tensor], out: ProductRows, rule: str
    ) -> None:
        kind, num_rows, num_experts = stack.format.kind, rows.values.shape[0], stack.data.shape[0]
        launches = self._launches(kind, num_rows, num_experts)
        least = launches[-1][1] + 1
        many = kind == "mxfp4" and (least <= num_rows or self._every_tile)
        wide = self._widened(stack, groups[1], least) if many else None
        if wide is None:
            launches[-1] = launches[-1][0], _MOST, launches[-1][2]
        else:
            self._launch("bf16", stack, wide, rows, groups, out, rule, (least, _MOST, self._tiles["bf16"][0]))
        for launch in launches:
            self._launch(kind, stack, stack.data, rows, groups, out, rule, launch)

    def _widened(self, stack: Stack, counts: torch.Tensor, least: int) -> torch.Tensor | None:
        """MXFP4 matrices in bf16, of the experts with that many rows; None: there is no room."""
        num, num_bytes = stack.data.shape[0], stack.data.shape[1] * stack.data.shape[2]
        try:
            wide = torch.empty(num, stack.rows, stack.columns, dtype=torch.bfloat16, device=stack.data.device)
        except torch.OutOfMemoryError:
            return None
        grid = triton.cdiv(num_bytes, _WIDEN_BLOCK), num
        widen_mxfp4[grid](stack.data, stack.scales, wide, counts, least, num_bytes, block=_WIDEN_BLOCK)
        return wide

    def _launch(
        self,
        kind: str,
        stack: Stack,
        data: torch.Tensor,
        rows: ProductRows,
        groups: Sequence[torch.Tensor],
        out: ProductRows,
        rule: str,
        launch: tuple[int, int, Tile],
    ) -> None:
        """One launch of the kernel: for the weights `data` of that kind, experts with launch[0] .. launch[1] rows."""
        (offsets, counts), (least, most, tile) = groups, launch
        limit = math.inf if self._gating.limit is None else self._gating.limit
        step, packed = _STEP[kind]
        weights = TensorDescriptor.from_tensor(data.view(-1, data.shape[-1]), [BLOCK, step // packed])
        format, scales, scale_rows, apart = _scales(stack, kind, gated=rule != "plain")
        arguments = (
            TensorDescriptor.from_tensor(rows.values, [tile.rows, step]), rows.scales, weights, scales,
            stack.bias, out.values, out.scales, offsets, counts, stack.data.shape[0], rows.values.shape[0],
            least, most, limit, self._gating.alpha,
        )  # fmt: skip
        constants = {
            "format": format, "rule": rule, "has_bias": stack.bias is not None, "columns": stack.columns,
            "weight_rows": stack.rows, "out_columns": out.values.shape[1], "scale_rows": scale_rows,
            "scales_apart": apart, "swap": tile.swap, "tile_rows": tile.rows,
            "experts": max(2, triton.next_power_of_2(stack.data.shape[0])),
        }  # fmt: skip
        grid = (self._num_processors * tile.programs, 1, 1)
        key = (*constants.values(), out.values.dtype, tile, _odd(out.values, offsets, counts))
        kernel = self._kernels.get(key)
        if kernel is None:
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            self._kernels[key] = grouped_product[grid](*arguments, **constants, **options)
        else:  # what Triton would find by looking at each argument
            kernel[grid](*arguments, *constants.values())

    def _launches(self, kind: str, num_rows: int, num_experts: int) -> list[tuple[int, int, Tile]]:
        """(least, most rows of an expert, tile): one launch with the first tile that fits the average, whatever single
        experts have; with rows for the last one, every tile, each for its experts: `num_rows` may be a bound."""
        *few, last = self._tiles[kind]
        for tile in few:
            if num_rows <= tile.most * num_experts and not self._every_tile:
                return [(1, _MOST, tile)]
        begins = [1, *(tile.most + 1 for tile in few)]
        return [(begin, tile.most, tile) for begin, tile in zip(begins, (*few, last), strict=True)]


def _odd(*tensors: torch.Tensor) -> bool:
    """Whether one begins at no multiple of 16 bytes: Triton compiles another kernel for it."""
    return any(tensor.data_ptr() % 16 for tensor in tensors)


def _empty(like: torch.Tensor, num_rows: int, stack: Stack) -> ProductRows:
    """Room for the input of a product."""
    if stack.format.kind == "mxfp4":
        return ProductRows(like.new_empty(num_rows, stack.columns, dtype=torch.bfloat16), None)
    values = like.new_empty(num_rows, stack.columns, dtype=torch.float8_e4m3fn)
    return ProductRows(values, like.new_empty(-(-stack.columns // BLOCK), num_rows, dtype=torch.float32))


def _scales(stack: Stack, kind: str, gated: bool) -> tuple[str, torch.Tensor, int, int]:
    """(format, scales as the kernel reads them, rows of scales per expert, from gate's to up's or to the next)."""
    assert stack.scales is not None
    if kind != "fp8":
        return kind, stack.scales, 0, 0
    num, parts, height, _ = stack.scales.shape
    if stack.format.block == (BLOCK, BLOCK):
        half = height if parts == 2 else stack.rows // 2 // BLOCK
        return "fp8 blocks", stack.scales, parts * height, half if gated else 1
    rows = stack.scales.expand(num, parts, stack.rows // parts, 1).contiguous()
    return "fp8 rows", rows, 0, 0
