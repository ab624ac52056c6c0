"""The expert MLPs of one rank: grouped GEMM, gated activation, grouped GEMM. Independent of ranks and of routing.

`down(act(gate(x)) * up(x))` for each expert's group of rows. Where torch has a grouped GEMM for this device and dtype,
and weight rows are a multiple of 16 bytes, it is used; else a loop of torch.mm over the experts that have rows. There
is no GEMM of our own. On a GPU the grouped GEMM reads the groups' offsets there: the host waits for nothing, and rows
past the last group cost nothing. The loop needs the offsets on the host.

Precision. Sums inside a product are fp32. What a product is rounded to depends on where it is computed:
* A GPU, and bf16 on a CPU with bf16 products (AVX-512 BF16, AMX): to the weights' dtype, as in any model there. The
  activation between the products is computed in fp32 and rounded once.
* Half types on other CPUs: an expert's weights are widened into one scratch buffer for each call, and nothing is
  rounded between the two products.
* Weights held in float32 (`expert_dtype` of a worker): the same without widening for each call, for twice the memory.
Give `forward` an `out` of `output_dtype`, and the communicator that output dtype, and combine does not round either.

Letters: N rows, L experts here, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional

from crossdock.worker.checkpoint import Checkpoint, CheckpointError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
"""By config.json's hidden_act."""

Progress = Callable[[int, int], None]
"""(done_bytes, total_bytes), called after each expert. What it raises ends the loading."""
Weights = tuple[torch.Tensor, torch.Tensor]
"""gate_up [L, 2I, H] and down [L, H, I] of one layer."""


class ExpertMLPs:
    """The experts of one rank, for all MoE layers. One thread at a time (there is one scratch buffer).

    Attributes:
        dtype: of the weights as held.
        output_dtype: of the computed rows: an `out` of this dtype is not rounded.
        num_experts: L.
        num_bytes: bytes of weights held.
        ids: per layer the logical expert of each slot.
    """

    def __init__(
        self,
        weights: dict[int, Weights],
        hidden_act: str,
        ids: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """
        Args:
            weights: per layer, contiguous, one dtype and device.
            hidden_act: key of ACTIVATIONS.
            ids: per layer the logical expert of each slot; None: 0 .. L-1.
        """
        self._weights, self._act = weights, activation(hidden_act)
        gate_up, down = next(iter(weights.values()))
        self.dtype, device = gate_up.dtype, gate_up.device
        self.num_experts = gate_up.shape[0]
        self.ids = dict.fromkeys(weights, tuple(range(self.num_experts))) if ids is None else dict(ids)
        self.num_bytes = sum(part.nbytes for pair in weights.values() for part in pair)
        aligned = all(part.shape[-1] * part.element_size() % 16 == 0 for part in (gate_up, down))
        self._grouped = aligned and has_grouped_mm(device, self.dtype)
        widened = device.type == "cpu" and self.dtype is not torch.float32 and not has_products(self.dtype)
        self.output_dtype = torch.float32 if widened else self.dtype
        if widened:
            self._scratch = torch.empty(max(gate_up[0].numel(), down[0].numel()), device=device)

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        expert_ids: Sequence[int] | Mapping[int, Sequence[int]],
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
    ) -> ExpertMLPs:
        """Read these experts of every MoE layer, and no others, one at a time: peak memory is what is held, plus one.

        Args:
            checkpoint: an opened checkpoint.
            expert_ids: logical expert id of each local slot, in slot order; for all layers, or by layer.
            dtype: float32 | bfloat16 | float16, what to hold.
            device: where to hold them.
            progress: called after each expert.

        Raises:
            CheckpointError: unreadable weights, or an activation that is not supported.
            ValueError: no expert_ids, or one out of range.
        """
        spec = checkpoint.spec
        activation(spec.hidden_act)
        ids = _by_layer(expert_ids, spec.moe_layers)
        total_bytes = sum(len(row) for row in ids.values()) * expert_bytes(checkpoint, dtype)
        reader = _Reader(checkpoint, dtype, device, total_bytes, progress)
        return ExpertMLPs({layer: reader.layer(layer, row) for layer, row in ids.items()}, spec.hidden_act, ids)

    def stage(
        self, checkpoint: Checkpoint, layer: int, expert_ids: Sequence[int], progress: Progress | None = None
    ) -> Weights:
        """Weights of a layer for other experts than are held: those that are held are copied, the others are read.
        Changes nothing here; `replace` takes them.

        Args, Raises: as `load`; as many expert_ids as there are slots.
        """
        gate_up, down = self._weights[layer]
        if len(expert_ids) != self.num_experts:
            raise ValueError(f"expert_ids: expected {self.num_experts} of them, got {len(expert_ids)}")
        fresh = len(set(expert_ids) - set(self.ids[layer]))
        total_bytes = fresh * expert_bytes(checkpoint, self.dtype)
        reader = _Reader(checkpoint, self.dtype, gate_up.device, total_bytes, progress)
        return reader.layer(layer, expert_ids, self.ids[layer], (gate_up, down))

    def replace(self, layer: int, expert_ids: Sequence[int], gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Hold other weights for a layer, of the same shapes. Not while a step uses it."""
        self._weights[layer] = gate_up, down
        self.ids[layer] = tuple(expert_ids)

    @torch.no_grad()
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
            layer: the layer's number in the model.
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
        if layer not in self._weights:
            raise ValueError(f"layer: expected one of {sorted(self._weights)}, got {layer}")
        if not self._grouped:
            return self._loop(layer, tokens, offsets, counts, torch.empty_like(tokens) if out is None else out)
        gate_up, down = self._weights[layer]
        inner = grouped_mm(tokens.to(self.dtype), gate_up, offsets[1:])
        hidden = inner.new_empty(inner.shape[0], inner.shape[1] // 2)
        self._gate(inner[:num_rows], hidden[:num_rows])
        rows = grouped_mm(hidden, down, offsets[1:])
        if out is None:
            return rows.to(tokens.dtype)
        out[:num_rows].copy_(rows[:num_rows])
        return out

    def _loop(
        self, layer: int, tokens: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """One expert after the other; reads offsets and counts on the host."""
        gate_up, down = self._weights[layer]
        for slot, (start, count) in enumerate(zip(offsets[:-1].tolist(), counts.tolist(), strict=True)):
            if count:
                rows = tokens[start : start + count].to(self.output_dtype)
                inner = torch.mm(rows, self._widen(gate_up[slot]).t())
                hidden = self._gate(inner, inner.new_empty(count, inner.shape[1] // 2))
                out[start : start + count] = torch.mm(hidden, self._widen(down[slot]).t())
        return out

    def _gate(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[N, 2I] -> act(gate) * up [N, I] into `out`, rounded once."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.mul(self._act(gate.float()), up, out=out)

    def _widen(self, weight: torch.Tensor) -> torch.Tensor:
        """The matrix in `output_dtype`; valid until the next call."""
        if weight.dtype is self.output_dtype:
            return weight
        return self._scratch[: weight.numel()].view(weight.shape).copy_(weight)


def activation(hidden_act: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that config.json's hidden_act names. Raises CheckpointError for one that is not supported."""
    if hidden_act not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act: expected one of {sorted(ACTIVATIONS)}, got {hidden_act!r}")
    return ACTIVATIONS[hidden_act]


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
    """True if this CPU multiplies bf16 in hardware; torch's GEMM is then 2 to 5 times as fast as widening per call.
    By the CPU's instructions, not by a measurement, so that equal hosts give equal bits."""
    tests = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return dtype is torch.bfloat16 and any(test is not None and test() for test in tests)


def expert_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of one expert of one layer, as held."""
    return 3 * checkpoint.spec.hidden_size * checkpoint.spec.intermediate_size * dtype.itemsize


def _by_layer(
    expert_ids: Sequence[int] | Mapping[int, Sequence[int]], layers: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    named = expert_ids if isinstance(expert_ids, Mapping) else dict.fromkeys(layers, expert_ids)
    return {layer: tuple(named[layer]) for layer in layers}


class _Reader:
    """Fills layers with experts and counts bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str | torch.device,
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._done_bytes, self._total_bytes, self._progress = 0, total_bytes, progress

    def layer(
        self, layer: int, ids: Sequence[int], held: Sequence[int] = (), weights: Weights | None = None
    ) -> Weights:
        """The experts `ids` by slot; those among `held` are copied out of `weights`."""
        spec = self._checkpoint.spec
        if not ids or not all(0 <= expert < spec.num_experts for expert in ids):
            raise ValueError(f"expert_ids: expected some in 0..{spec.num_experts - 1}, got {list(ids)}")
        hidden, inner = spec.hidden_size, spec.intermediate_size
        gate_up = torch.empty(len(ids), 2 * inner, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(len(ids), hidden, inner, dtype=self._dtype, device=self._device)
        for slot, expert in enumerate(ids):
            if weights is not None and expert in held:
                for target, source in zip((gate_up, down), weights, strict=True):
                    target[slot].copy_(source[held.index(expert)])
                continue
            self._checkpoint.read_expert(layer, expert, gate_up[slot], down[slot])
            self._done_bytes += expert_bytes(self._checkpoint, self._dtype)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
        return gate_up, down
