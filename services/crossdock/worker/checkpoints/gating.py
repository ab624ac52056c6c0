"""What an expert computes between its two products: activation, gate, clamps. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from crossdock.worker.checkpoints.families import Rule

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""Activations by hidden_act of config.json."""


@dataclass(frozen=True, slots=True)
class Gating:
    """The function between the products, with `gate` and `up` the two halves of the first product's columns.

    Attributes:
        rule: gated: act(gate) * up. ungated: act(up), there is no gate. scaled: gate * sigmoid(alpha * gate) *
            (up + 1), as in gpt-oss. softcapped: cap(gate) * sigmoid(gate) * cap(up), with cap(x) = c * tanh(x / c).
        act: key of ACTIVATIONS; of gated and ungated.
        limit: gate is clamped to at most this, up to at most this on either side, before the rule; None: neither.
        alpha: of scaled.
        caps: c of gate and of up; of softcapped.
    """

    rule: Rule = "gated"
    act: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    caps: tuple[float, float] = (1.0, 1.0)

    @property
    def halves(self) -> int:
        """Columns of the first product per column of the second: 2 with a gate."""
        return 1 if self.rule == "ungated" else 2

    def __call__(self, inner: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[N, 2I] (ungated: [N, I]) -> [N, I] into `out`: computed in float32, rounded once."""
        if self.rule == "ungated":
            return out.copy_(ACTIVATIONS[self.act](inner.float()))
        gate, up = inner.chunk(2, dim=-1)
        gate = gate.float()
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.rule == "scaled":
            gate, up = gate * torch.sigmoid(gate * self.alpha), up.float() + 1
        elif self.rule == "softcapped":
            gate, up = _capped(gate, self.caps[0]) * torch.sigmoid(gate), _capped(up.float(), self.caps[1])
        else:
            gate = ACTIVATIONS[self.act](gate)
        return torch.mul(gate, up, out=out)


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)
