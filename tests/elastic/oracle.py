"""What each layout of the experts answers, to the bit, without the product's own code.

The model's experts are exact in float32: gates so large that silu(g) is g, and small whole numbers elsewhere, so every
product and every sum of an expert is a whole number below 2^24. What rounds is the combine alone: the rows of a token
are weighted and summed in ascending k on each rank, then over ranks in ascending order. So the bits of an answer tell
which experts shared a rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYER, E, H, INNER, K = 0, 24, 64, 32, 5
_GATE = 32.0
"""Of the first column, where x is 1: sigmoid(32) is 1 in float32."""

Layout = tuple[int, ...]
"""Rank of each expert; one copy each."""


@dataclass(frozen=True)
class Model:
    """Matrices of all experts: gate, up [E, INNER, H], down [E, H, INNER], float64."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def write(folder: Path) -> Model:
        """A checkpoint of one layer."""
        gate = torch.randint(0, 2, (E, INNER, H)).double()
        gate[:, :, 0] = _GATE
        model = Model(gate, *(torch.randint(-1, 2, shape).double() for shape in ((E, INNER, H), (E, H, INNER))))
        folder.mkdir(parents=True)
        tensors = {
            f"model.layers.{LAYER}.mlp.experts.{expert}.{name}.weight": matrix[expert].float().contiguous()
            for name, matrix in (("gate_proj", model.gate), ("up_proj", model.up), ("down_proj", model.down))
            for expert in range(E)
        }
        save_file(tensors, folder / "model.safetensors")
        config = {
            "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": E, "hidden_size": H,
            "moe_intermediate_size": INNER, "num_experts_per_tok": K, "hidden_act": "silu", "dtype": "float32",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return model

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert on every token: [T, E, H], whole numbers as float32."""
        made = torch.einsum("eih,th->tei", self.gate, x.double()) * torch.einsum("eih,th->tei", self.up, x.double())
        found = torch.einsum("ehi,tei->teh", self.down, made)
        assert found.abs().max() < 1 << 24
        return found.float()


@dataclass(frozen=True)
class Question:
    """Tokens x [T, H], experts [T, K] and weights [T, K] of one request, and the rows of the chosen experts."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def random(model: Model, num_tokens: int) -> Question:
        """Fresh tokens, fresh routing; no expert twice for a token."""
        x = torch.randint(0, 4, (num_tokens, H)).float()
        x[:, 0] = 1.0
        ids = torch.rand(num_tokens, E).argsort(1)[:, :K]
        rows = model.rows(x).gather(1, ids[:, :, None].expand(-1, -1, H))
        return Question(x, ids, torch.rand(num_tokens, K), rows)

    def answer(self, layout: Layout) -> torch.Tensor:
        """The bits of that layout: float32 [T, H]."""
        ranks = torch.tensor(layout)[self.ids]
        total = torch.zeros(len(self.x), H)
        for token in range(len(self.x)):
            partials = []
            for rank in sorted(set(ranks[token].tolist())):
                terms = [self.rows[token, k] * self.weights[token, k] for k in range(K) if ranks[token, k] == rank]
                partials.append(_ascending(terms))
            total[token] = _ascending(partials)
        return total


def _ascending(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
