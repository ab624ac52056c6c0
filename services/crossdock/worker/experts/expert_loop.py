"""Experts one after the other: where torch has no grouped GEMM for their dtype, and we have none for their format.

Letters: N rows, L experts here, H hidden size, I intermediate size of one expert, A columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import Stack, tile_elements
from crossdock.worker.experts.kept_rows import KeptRows


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of one expert. `transposed` [A, B]: where it can be multiplied as it is."""

    stack: Stack
    transposed: torch.Tensor | None
    bias: torch.Tensor | None

    @staticmethod
    def of(stack: Stack, dtype: torch.dtype) -> _Matrix:
        ready = stack.format.kind == "float" and stack.data.dtype is dtype
        bias = None if stack.bias is None else stack.bias.to(dtype)
        return _Matrix(stack, stack.data.t() if ready else None, bias)


class ExpertLoop:
    """Computes them. One thread at a time: buffers are kept between calls.

    Args:
        weights: the first matrices and down, of any layer: formats and shapes.
        gating: between the products.
        dtype: of products and of their results.
    """

    def __init__(self, weights: Sequence[Stack], gating: Gating, dtype: torch.dtype) -> None:
        device = weights[0].data.device
        self._gating, self._dtype = gating, dtype
        self._matrices: dict[int, list[tuple[_Matrix, _Matrix]]] = {}
        sizes = [_widened_elements(stack, dtype) for stack in weights]
        self._scratch = torch.empty(max(sizes), device=device, dtype=dtype)
        self._inner, self._hidden, self._rows = (KeptRows(device) for _ in range(3))

    def forget(self, layer: int) -> None:
        """The layer has other weights from now on."""
        self._matrices.pop(layer, None)

    def forward(
        self,
        layer: int,
        weights: tuple[Stack, Stack],
        tokens: torch.Tensor,
        groups: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """As `ExpertMLPs.forward`; groups: offsets and counts, which are read on the host."""
        experts = self._matrices.get(layer)
        if experts is None:
            slots = range(weights[0].data.shape[0])
            pairs = [(_Matrix.of(weights[0][i], self._dtype), _Matrix.of(weights[1][i], self._dtype)) for i in slots]
            experts = self._matrices[layer] = pairs
        offsets, counts = groups
        for (first, down), start, count in zip(experts, offsets.tolist(), counts.tolist(), strict=False):
            if count:
                rows = tokens[start : start + count].to(self._dtype)
                inner = self._product(rows, first, self._inner.take(count, first.stack.rows, self._dtype))
                hidden = self._gating(inner, self._hidden.take(count, down.stack.columns, self._dtype))
                target = out[start : start + count]
                if target.dtype is self._dtype:
                    self._product(hidden, down, target)
                else:
                    target.copy_(self._product(hidden, down, self._rows.take(count, down.stack.rows, self._dtype)))
        return out

    def _product(self, rows: torch.Tensor, matrix: _Matrix, out: torch.Tensor) -> torch.Tensor:
        """rows [N, A] times one expert's matrix transposed, plus its bias, into `out` [N, B]."""
        stack, bias = matrix.stack, matrix.bias
        if matrix.transposed is not None:
            return _multiply(rows, matrix.transposed, bias, out)
        if stack.format.kind == "float":
            return _multiply(
                rows, self._scratch[: stack.data.numel()].view(stack.data.shape).copy_(stack.data).t(), bias, out
            )
        for begin, end in stack.tiles():
            tile = stack.tile(begin, end, self._scratch).t()
            out[:, begin:end] = _multiply(rows, tile, None if bias is None else bias[begin:end], None)
        return out


def _multiply(
    rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    return torch.mm(rows, matrix, out=out) if bias is None else torch.addmm(bias, rows, matrix, out=out)


def _widened_elements(stack: Stack, dtype: torch.dtype) -> int:
    """Of the buffer in which a matrix of the stack, or a tile of it, becomes floats of that dtype."""
    if stack.format.kind != "float":
        return tile_elements(stack.columns, stack.format)
    return 0 if stack.data.dtype is dtype else stack.rows * stack.columns
