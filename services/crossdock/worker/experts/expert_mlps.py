"""The expert MLPs of one rank: grouped GEMM, gated activation, grouped GEMM. Independent of ranks and of routing.

`down(gating(first(x)))` for each expert's group of rows, where `first` is gate and up (`gating.py`). Where torch has a
grouped GEMM for this device and dtype, and weight rows are a multiple of 16 bytes, it is used; else a loop of torch.mm
over the experts that have rows. On a GPU the grouped GEMM reads the groups' offsets there: the host waits for nothing,
and rows past the last group cost nothing. The loop needs the offsets on the host.

Quantised weights stay as they are stored (`weights.py`). GPUs multiply them by grouped GEMMs of our own, in Triton
(`grouped/`), since torch has none for blocks on Hopper, nor for MXFP4; where these do not serve, and on CPUs, the loop
makes floats of one tile of rows at a time, in the dtype that products are computed in, and multiplies it in the cache.

Precision. Sums inside a product are fp32. What a product is rounded to depends on where it is computed:
* A GPU, and bf16 on a CPU with bf16 products (AVX-512 BF16, AMX): to the weights' dtype, as in any model there. The
  activation between the products is computed in fp32 and rounded once.
* fp8 on a GPU: rows are quantised to e4m3 before each product, a scale per 128 columns (`grouped/products.py`).
* Half types on other CPUs: an expert's weights are widened into one scratch buffer for each call, and nothing is
  rounded between the two products.
* Weights held in float32 (`expert_dtype` of a worker): the same without widening for each call, for twice the memory.
Give `forward` an `out` of `output_dtype`, and the communicator that output dtype, and combine does not round either.

Letters: N rows, L experts here, H hidden size, I intermediate size of one expert, A columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from crossdock.common import log
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.expert_sources import FROM_DISK, OneExpert, Sources
from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import Format, Stack, allocated, tile_elements
from crossdock.worker.experts.grouped import support
from crossdock.worker.experts.kept_rows import KeptRows
from crossdock.worker.experts.placement import FROM_CONFIG, WeightsOf

if TYPE_CHECKING:
    from crossdock.worker.experts.grouped.products import GroupedProducts

_log = log.get(__name__)

Progress = Callable[[int, int], None]
"""(done_bytes, total_bytes), called after each expert. What it raises ends the loading."""
Weights = tuple[Stack, Stack]
"""The first matrices [L, 2I, H] (gate rows before up rows; ungated: [L, I, H]) and down [L, H, I] of one layer."""


class HeldLayer(NamedTuple):
    """Experts of one layer.

    Attributes:
        ids: by slot.
        weights: of the slots.
        of: their checkpoint.
    """

    ids: tuple[int, ...]
    weights: Weights
    of: WeightsOf

    def expert(self, slot: int) -> OneExpert:
        """That of a slot."""
        return OneExpert(self.ids[slot], self.weights[0][slot], self.weights[1][slot])


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
    """Experts one after the other: where torch has no grouped GEMM for their dtype, and we have none for their format.
    One thread at a time: buffers are kept between calls.

    Args:
        weights: the first matrices and down, of any layer: formats and shapes.
        gating: between the products.
    """

    def __init__(self, weights: Sequence[Stack], gating: Gating, dtype: torch.dtype) -> None:
        device = weights[0].data.device
        self._gating, self._dtype = gating, dtype
        self._matrices: dict[int, list[tuple[_Matrix, _Matrix]]] = {}
        sizes = [_widened_elements(stack, dtype) for stack in weights]
        self._scratch = torch.empty(max(sizes), device=device, dtype=dtype)
        self._inner, self._hidden, self._rows = (KeptRows(device) for _ in range(3))

    def forget(self, layer: int) -> None:
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
                rows = tokens[start : start + count]
                rows = rows if rows.dtype is self._dtype else rows.to(self._dtype)
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


class ExpertMLPs:
    """The experts of one rank, for all MoE layers. One thread at a time (buffers are kept between calls).

    Attributes:
        dtype: that products are rounded to, where they are not computed in float32.
        output_dtype: of the computed rows: an `out` of this dtype is not rounded.
        num_experts: L.
        num_bytes: bytes of weights held.
    """

    def __init__(
        self,
        weights: dict[int, Weights],
        gating: Gating,
        dtype: torch.dtype,
        ids: Mapping[int, tuple[int, ...]] | None = None,
        of: Mapping[int, WeightsOf] | None = None,
    ) -> None:
        """
        Args:
            weights: per layer, contiguous, on one device; each layer in a format of its own.
            dtype: of float weights and of biases.
            ids: per layer the logical expert of each slot; None: 0 .. L-1.
            of: per layer the checkpoint of its weights; None: that of the config.
        """
        self._gating, self.dtype = gating, dtype
        first, _ = next(iter(weights.values()))
        self._device, self.num_experts = first.data.device, first.data.shape[0]
        ids = dict.fromkeys(weights, tuple(range(self.num_experts))) if ids is None else ids
        of = of or {}
        self._layers = {
            layer: HeldLayer(ids[layer], pair, of.get(layer, FROM_CONFIG)) for layer, pair in weights.items()
        }
        self.num_bytes = sum(stack.num_bytes for pair in weights.values() for stack in pair)
        widened = self._device.type == "cpu" and not has_products(dtype)
        self.output_dtype = torch.float32 if widened else dtype
        self._computed: dict[tuple[Format, int], ExpertLoop | GroupedProducts | None] = {}
        for pair in weights.values():
            self._prepare(pair)

    def _prepare(self, weights: Weights) -> None:
        """Choose what computes weights of this format; None: torch's grouped GEMM."""
        first, down = weights
        if _kind(first) in self._computed:
            return
        plain = first.format.kind == "float"
        aligned = all(stack.columns * self.dtype.itemsize % 16 == 0 for stack in weights)
        made: ExpertLoop | GroupedProducts | None = None
        if not (plain and aligned and has_grouped_mm(self._device, self.dtype)):
            made = None if plain else products_for((first, down), self._gating, self.dtype)
            made = ExpertLoop(weights, self._gating, self.output_dtype) if made is None else made
        self._computed[_kind(first)] = made

    @staticmethod
    def load(
        checkpoint: Checkpoint | Mapping[int, Checkpoint],
        expert_ids: Sequence[int] | Mapping[int, Sequence[int]],
        *,
        dtype: torch.dtype,
        widen: bool = False,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
        sources: Sources = FROM_DISK,
        of: Mapping[int, WeightsOf] | None = None,
    ) -> ExpertMLPs:
        """Read these experts of every MoE layer, and no others, one at a time: peak memory is what is held, plus one.

        Args:
            checkpoint: an opened checkpoint; for all layers, or by layer, all of one shape.
            expert_ids: logical expert id of each local slot, in slot order; for all layers, or by layer.
            dtype: float32 | bfloat16 | float16, of float weights and of products.
            widen: make floats of quantised weights here, instead of in each step.
            device: where to hold them.
            progress: called after each expert.
            sources: where they are read.
            of: as of `ExpertMLPs`.

        Raises:
            CheckpointError: unreadable weights.
            MemoryError: no room on a CPU.
            ValueError: no expert_ids, or one out of range.
        """
        some = next(iter(checkpoint.values())) if isinstance(checkpoint, Mapping) else checkpoint
        spec, by_layer = some.spec, checkpoint if isinstance(checkpoint, Mapping) else {}
        ids = _by_layer(expert_ids, spec.moe_layers)
        total = sum(len(row) * expert_bytes(some, layer, dtype, widen) for layer, row in ids.items())
        reader = _Reader((dtype, widen), device, total, progress, sources)
        weights = {layer: reader.layer(by_layer.get(layer, some), layer, row) for layer, row in ids.items()}
        return ExpertMLPs(weights, spec.gating, dtype, ids, of)

    def stage(
        self,
        checkpoint: Checkpoint,
        layer: int,
        expert_ids: Sequence[int],
        progress: Progress | None = None,
        *,
        of: WeightsOf = FROM_CONFIG,
        more: HeldLayer | None = None,
        sources: Sources = FROM_DISK,
    ) -> Weights:
        """Weights of a layer for other experts than are held, or of another checkpoint: those that are held are copied,
        the others are read. Changes nothing here; `replace` takes them.

        Args, Raises: as `load`; of: the checkpoint; more: experts of it that were `read`, to copy as well.
        """
        if more is not None and more.ids == tuple(expert_ids):
            staged = more.weights
        else:
            held = [each for each in (self.held(layer), more) if each is not None and each.of == of]
            staged = self.read(checkpoint, layer, expert_ids, progress, held, sources)
        self._prepare(staged)
        return staged

    @property
    def ids(self) -> dict[int, tuple[int, ...]]:
        """Per layer the logical expert of each slot."""
        return {layer: held.ids for layer, held in self._layers.items()}

    @property
    def layers(self) -> dict[int, HeldLayer]:
        """What is held now. Any thread."""
        return dict(self._layers)

    def held(self, layer: int) -> HeldLayer:
        """What is held of a layer now. Any thread."""
        return self._layers[layer]

    def read(
        self,
        checkpoint: Checkpoint,
        layer: int,
        expert_ids: Sequence[int],
        progress: Progress | None = None,
        held: Sequence[HeldLayer] = (),
        sources: Sources = FROM_DISK,
    ) -> Weights:
        """Weights of a layer, as they are held here: experts in `held` are copied, the others are read.

        Args, Raises: as `load`.
        """
        kind = self.dtype, self._layers[layer].weights[0].format.kind == "float"
        known = {expert for each in held for expert in each.ids}
        total = len(set(expert_ids) - known) * expert_bytes(checkpoint, layer, *kind)
        return _Reader(kind, self._device, total, progress, sources).layer(checkpoint, layer, expert_ids, held)

    def resized(self) -> None:
        """Every layer has another number of slots, by `replace`. Not while a step runs."""
        sizes = {len(held.ids) for held in self._layers.values()}
        if len(sizes) > 1:
            raise ValueError(f"resized: expected as many experts in each layer, got {sorted(sizes)}")
        self.num_experts = sizes.pop()
        self.num_bytes = sum(stack.num_bytes for held in self._layers.values() for stack in held.weights)

    def replace(
        self, layer: int, expert_ids: Sequence[int], first: Stack, down: Stack, *, of: WeightsOf = FROM_CONFIG
    ) -> None:
        """Hold other weights for a layer, of the same shapes; of another number of slots: for each layer, then
        `resized`. Not while a step uses it. of: their checkpoint."""
        self._layers[layer] = HeldLayer(tuple(expert_ids), (first, down), of)
        for computed in self._computed.values():
            if computed is not None:
                computed.forget(layer)

    def forward(
        self,
        layer: int,
        tokens: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor | None = None,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """Run each expert over its group of rows.

        Args:
            tokens: [N, H] of `dtype`, or of a smaller one, rows grouped by expert (`Layout.GROUPED`).
            offsets: int32 [L + 1], first row of each group, padding included.
            counts: int32 [L], rows of each group without padding.
            out: [N, H] of any float dtype to write into, or None for a new tensor of the dtype of tokens.
            num_rows: no group ends past it; None: N. What lies past it is neither read nor written.

        Returns:
            [N, H], `out` if that was given; rows past a group's count hold anything.

        Raises:
            ValueError: a layer without experts here.
        """
        if layer not in self._layers:
            raise ValueError(f"layer: expected one of {sorted(self._layers)}, got {layer}")
        first, down = self._layers[layer].weights
        computed = self._computed[_kind(first)]
        if isinstance(computed, ExpertLoop):
            rows = torch.empty_like(tokens) if out is None else out
            return computed.forward(layer, (first, down), tokens, (offsets, counts), rows)
        if computed is not None:
            return self._quantised(computed, layer, tokens, offsets, counts, out, num_rows)
        slots = _slots(offsets, tokens.shape[0]) if first.bias is not None else None
        inner = self._grouped_product(tokens.to(self.dtype), first, offsets, slots)
        hidden = inner.new_empty(inner.shape[0], down.columns)
        self._gating(inner[:num_rows], hidden[:num_rows])
        return _delivered(self._grouped_product(hidden, down, offsets, slots), out, tokens.dtype, num_rows)

    def _quantised(
        self,
        products: GroupedProducts,
        layer: int,
        tokens: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor | None,
        num_rows: int | None,
    ) -> torch.Tensor:
        rows = out if out is not None and out.dtype is self.dtype and out.is_contiguous() else None
        rows = torch.empty_like(tokens, dtype=self.dtype) if rows is None else rows
        products.forward(layer, self._layers[layer].weights, tokens[:num_rows], offsets, counts, rows[:num_rows])
        return rows if rows is out else _delivered(rows, out, tokens.dtype, num_rows)

    @staticmethod
    def _grouped_product(
        rows: torch.Tensor, stack: Stack, offsets: torch.Tensor, slots: torch.Tensor | None
    ) -> torch.Tensor:
        """slots: int64 [N], of each row, where there is a bias."""
        product = grouped_mm(rows, stack.data, offsets[1:])
        if stack.bias is not None and slots is not None:
            product += stack.bias.index_select(0, slots)
        return product


def products_for(weights: Weights, gating: Gating, dtype: torch.dtype) -> GroupedProducts | None:
    """Grouped GEMMs for quantised weights, compiled; None, and a line in the log of a GPU's worker, where there are
    none."""
    reason = support.reason_against(*weights, gating, dtype)
    if not reason:
        from crossdock.worker.experts.grouped.products import GroupedProducts

        try:
            return GroupedProducts.compiled(weights, gating, dtype)
        except Exception as error:  # the compiler's: no C compiler, no folder to write to, another Triton
            reason = f"{type(error).__name__}: {error}"
    if weights[0].data.device.type == "cuda":
        _log.warning("quantised experts are computed one after the other", reason=reason, format=str(weights[0].format))
    return None


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's grouped GEMM: rows [N, A] in groups that end at int32 ends [L], times weight [L, B, A] transposed."""
    function = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    return function(rows, weight.transpose(1, 2), offs=ends)


def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch's grouped GEMM works here and agrees with torch.mm, for uneven and empty groups and with unowned
    rows behind them; tested at run time, since versions and devices differ. On a CPU half types go to the loop."""
    if device.type == "cpu" and dtype is not torch.float32:
        return False
    rows = torch.arange(24 * 16, device=device).remainder(7).to(dtype).view(24, 16)
    rows[16:] = torch.nan
    weight = torch.arange(4 * 32 * 16, device=device).remainder(5).to(dtype).view(4, 32, 16)
    ends = torch.tensor([5, 5, 13, 16], dtype=torch.int32, device=device)
    expected = torch.cat([rows[:5] @ weight[0].t(), rows[5:13] @ weight[2].t(), rows[13:16] @ weight[3].t()])
    try:
        unowned = grouped_mm(rows, weight, torch.zeros_like(ends))
        return unowned.shape == (24, 32) and torch.equal(grouped_mm(rows, weight, ends)[:16], expected)
    except (RuntimeError, AttributeError):
        return False


def has_products(dtype: torch.dtype) -> bool:
    """True for float32, and for bfloat16 if this CPU multiplies it in hardware: torch's GEMM is then 2 to 5 times as
    fast as widening for each call. By its instructions, not by a measurement, so that equal hosts give equal bits."""
    tests = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return dtype is torch.float32 or (dtype is torch.bfloat16 and any(test is not None and test() for test in tests))


def expert_bytes(checkpoint: Checkpoint, layer: int, dtype: torch.dtype, widen: bool = False) -> int:
    """Bytes of one expert of that layer, as held."""
    return sum(stack.num_bytes for stack in checkpoint.stacks(layer, 1, dtype, "meta", widen=widen))


def _kind(first: Stack) -> tuple[Format, int]:
    """What weights have in common that are computed in one way."""
    return first.format, first.parts


def _delivered(rows: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, num_rows: int | None) -> torch.Tensor:
    """The first num_rows rows copied into `out`; without one, the rows in that dtype."""
    if out is None:
        return rows.to(dtype)
    out[:num_rows].copy_(rows[:num_rows])
    return out


def _slots(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 [N]: the group of each row; the last one for rows behind all groups."""
    rows = torch.arange(num_rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=offsets.shape[0] - 2)


def _by_layer(
    expert_ids: Sequence[int] | Mapping[int, Sequence[int]], layers: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    named = expert_ids if isinstance(expert_ids, Mapping) else dict.fromkeys(layers, expert_ids)
    return {layer: tuple(named[layer]) for layer in layers}


class _Reader:
    """Fills layers with experts and counts bytes."""

    def __init__(
        self,
        held: tuple[torch.dtype, bool],
        device: str | torch.device,
        total: int,
        progress: Progress | None,
        sources: Sources,
    ) -> None:
        """held: `dtype` and `widen` of `load`; total: bytes that will be read, in all layers."""
        self._held, self._device, self._progress, self._sources = held, device, progress, sources
        self._done, self._total = 0, total

    def layer(
        self,
        checkpoint: Checkpoint,
        layer: int,
        ids: Sequence[int],
        held: Sequence[HeldLayer] = (),
    ) -> Weights:
        """The experts `ids` by slot; those in `held` are copied."""
        spec = checkpoint.spec
        if not ids or not all(0 <= expert < spec.num_experts for expert in ids):
            raise ValueError(f"expert_ids: expected some in 0..{spec.num_experts - 1}, got {list(ids)}")
        shapes = checkpoint.stacks(layer, len(ids), self._held[0], "meta", widen=self._held[1])
        first, down = allocated(shapes, self._device)
        experts = [OneExpert(expert, first[slot], down[slot]) for slot, expert in enumerate(ids)]
        wanted = []
        for each in experts:
            known = next((pair for pair in held if each.expert in pair.ids), None)
            if known is None:
                wanted.append(each)
                continue
            for target, source in zip(each.tensors, known.expert(known.ids.index(each.expert)).tensors, strict=True):
                target.copy_(source)
            each.hash()
        for filled in self._sources.fill(checkpoint, layer, wanted):
            filled.hash()
            self._done += filled.num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        return first, down
