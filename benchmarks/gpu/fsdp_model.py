"""The model of `fsdp.py`: a decoder of a few wide blocks with random weights, sharded block by block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

VOCABULARY = 32_000


@dataclass(frozen=True)
class Size:
    """Of the model and a rank's batch. Few, wide blocks: the GPU takes longer than Python on the host."""

    layers: int = 8
    hidden: int = 6144
    heads: int = 48
    inner: int = 16384
    experts: int = 1
    topk: int = 1
    sequence: int = 1024
    batch: int = 2


SIZES = {"dense": Size(), "moe": Size(inner=2048, experts=8, topk=2), "tiny": Size(2, 64, 4, 128, 1, 1, 16, 2)}
"""`tiny` is for a look at the program, on CPUs too."""


class Mlp(nn.Module):
    """SwiGLU of every token, or of each token's best experts, weighted."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._topk = size.topk
        self.router = nn.Linear(size.hidden, size.experts, bias=False) if size.experts > 1 else None
        self._experts = size.experts  # beside each other: FSDP2 shards the first dimension, and pads a short one
        self.up = nn.Parameter(torch.empty(size.experts * size.hidden, 2 * size.inner))
        self.down = nn.Parameter(torch.empty(size.experts * size.inner, size.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to the same."""
        if self.router is None:
            return self._expert(x, 0)
        scores, ids = functional.softmax(self.router(x), dim=-1, dtype=torch.float32).topk(self._topk, dim=-1)
        total = torch.zeros_like(x)
        for e in range(self._experts):  # every expert sees every token: shapes do not depend on the routing
            share = (scores * (ids == e)).sum(-1, keepdim=True).to(x.dtype)
            total = total + share * self._expert(x, e)
        return total

    def _expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        ups, downs = self.up.chunk(self._experts), self.down.chunk(self._experts)
        gate, up = (x @ ups[e]).chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ downs[e]


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._heads = size.heads
        self.before, self.between = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.project = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp = Mlp(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] to the same."""
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.before(x)).view(batch, sequence, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, sequence, hidden))
        moved: torch.Tensor = self.mlp(self.between(x))
        return x + moved


class Model(nn.Module):
    """A decoder with random weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of the next token, []; tokens int64 [B, S + 1]."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).float()
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(size: Size, device: torch.device, seed: int) -> Model:
    """The model, sharded block by block over all ranks, in bf16 with sums of gradients in fp32."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Model(size)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            rows = parameter.shape[0] // (size.experts if ".mlp.up" in name or ".mlp.down" in name else 1)
            nn.init.normal_(parameter, std=0.02 if "embed" in name else rows**-0.5)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    blocks: list[Any] = list(model.blocks)
    for here, after in itertools.pairwise(blocks):
        here.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([here])
    return model


def buffer_bytes(size: Size, ranks: int) -> int:
    """Of the gathered parameters of a block, in bf16: FSDP2 gives each rank as many rows of each as the first has."""
    with torch.device("meta"):
        parameters = list(Block(size).parameters())
    return sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0]) * 2 for p in parameters)
