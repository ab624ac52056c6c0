"""The expert MLPs of one rank: grouped GEMM, gated activation, grouped GEMM. Knows nothing of ranks or of routing.

`down(act(gate(x)) * up(x))` for each expert's group of rows. Where torch has a grouped GEMM for this device and dtype,
and weight rows are a multiple of 16 bytes, it is used; else a loop of torch.mm over the experts that have rows. There
is no GEMM of our own. On a GPU the grouped GEMM reads the groups' offsets there: the host waits for nothing, and rows
past the last group cost nothing. The loop needs the offsets on the host.

Precision. On a CPU the loop computes bf16 and fp16 models in fp32 inside: an expert's weights are widened into one
scratch buffer and nothing is rounded between the two products. On CPUs without bf16 matrix units that is the faster way
too (from some 16 rows on), and it is what lets a served model be closer to an fp32 run than the plain bf16 model is.
Give `forward` an `out` of `output_dtype`, and the communicator that output dtype, and rows go home unrounded as well.
On a GPU products are rounded to the weights' dtype, as in any model there; sums inside a product are fp32.

Letters: N rows, L experts here, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Experts:
    """The experts of one rank, for all MoE layers. One thread at a time (there is one scratch buffer).

    Attributes:
        dtype: of the weights as held, and of the rows that `forward` takes.
        output_dtype: in which rows are made: what an `out` must have for nothing to be rounded.
        num_experts: L.
        num_bytes: bytes of weights held.
    """

    def __init__(self, weights: dict[int, tuple[torch.Tensor, torch.Tensor]], hidden_act: str) -> None:
        """
        Args:
            weights: per layer (gate_up [L, 2I, H], down [L, H, I]), contiguous, one dtype and device.
            hidden_act: key of ACTIVATIONS.
        """
        self._weights, self._act = weights, activation(hidden_act)
        gate_up, down = next(iter(weights.values()))
        self.dtype, device = gate_up.dtype, gate_up.device
        self.num_experts = gate_up.shape[0]
        self.num_bytes = sum(part.nbytes for pair in weights.values() for part in pair)
        aligned = all(part.shape[-1] * part.element_size() % 16 == 0 for part in (gate_up, down))
        self._grouped = aligned and has_grouped_mm(device, self.dtype)
        widened = not self._grouped and device.type == "cpu"
        self.output_dtype = torch.float32 if widened else self.dtype
        if widened and self.dtype is not torch.float32:
            self._scratch = torch.empty(max(gate_up[0].numel(), down[0].numel()), device=device)

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        expert_ids: Sequence[int],
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
    ) -> Experts:
        """Read these experts of every MoE layer, and no others, one at a time: peak memory is what is held, plus one.

        Args:
            checkpoint: an opened checkpoint.
            expert_ids: logical expert id of each local slot, in slot order.
            dtype: float32 | bfloat16 | float16, what to hold and compute in.
            device: where to hold them.
            progress: called after each expert.

        Raises:
            CheckpointError: unreadable weights, or an activation that is not supported.
            ValueError: no expert_ids, or one out of range.
        """
        spec = checkpoint.spec
        if not expert_ids or not all(0 <= expert < spec.num_experts for expert in expert_ids):
            raise ValueError(f"expert_ids: expected some in 0..{spec.num_experts - 1}, got {list(expert_ids)}")
        activation(spec.hidden_act)
        num, hidden, inner = len(expert_ids), spec.hidden_size, spec.intermediate_size
        expert_bytes = 3 * hidden * inner * dtype.itemsize
        total_bytes = expert_bytes * num * len(spec.moe_layers)
        done_bytes, weights = 0, {}
        for layer in spec.moe_layers:
            gate_up = torch.empty(num, 2 * inner, hidden, dtype=dtype, device=device)
            down = torch.empty(num, hidden, inner, dtype=dtype, device=device)
            for slot, expert in enumerate(expert_ids):
                checkpoint.read_expert(layer, expert, gate_up[slot], down[slot])
                done_bytes += expert_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
            weights[layer] = gate_up, down
        return Experts(weights, spec.hidden_act)

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
            tokens: [N, H] of `dtype`, rows grouped by expert (`Layout.GROUPED`).
            offsets: int32 [L + 1], first row of each group, padding included.
            counts: int32 [L], rows of each group without padding.
            out: [N, H] of any float dtype to write into, or None for a new tensor of `dtype`.
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
        inner = grouped_mm(tokens, gate_up, offsets[1:])
        hidden = inner.new_empty(inner.shape[0], inner.shape[1] // 2)
        self._gate(inner[:num_rows], hidden[:num_rows])
        rows = grouped_mm(hidden, down, offsets[1:])
        if out is None:
            return rows
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
    """True if torch's grouped GEMM works here and agrees with torch.mm, for uneven and empty groups and with rows of
    nobody behind them; found by trying, since versions and devices differ. On a CPU half types go to the fp32 loop
    instead: see this page's head."""
    if device.type == "cpu" and dtype is not torch.float32:
        return False
    rows = torch.arange(24 * 16, device=device).remainder(7).to(dtype).view(24, 16)
    rows[16:] = torch.nan
    weight = torch.arange(4 * 32 * 16, device=device).remainder(5).to(dtype).view(4, 32, 16)
    ends = torch.tensor([5, 5, 13, 16], dtype=torch.int32, device=device)
    expected = torch.cat([rows[:5] @ weight[0].t(), rows[5:13] @ weight[2].t(), rows[13:16] @ weight[3].t()])
    try:
        nobody = grouped_mm(rows, weight, torch.zeros_like(ends))
        return nobody.shape == (24, 32) and torch.equal(grouped_mm(rows, weight, ends)[:16], expected)
    except (RuntimeError, AttributeError):
        return False
