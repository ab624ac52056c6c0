"""Steps of a model whose parameters FSDP2 shards, by who gathers them: NCCL, NCCL's copy engines, or ours.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 torchrun --nproc-per-node 8 -m benchmarks.gpu.fsdp --all-gather crossdock

Weights and tokens are random and the same for every choice and every run of a seed, and kernels are deterministic, so
the printed losses must be equal bit by bit: a gather moves bytes. Forward and backward prefetch one block ahead. The
first WARMUP steps are not timed. Prints one line of JSON, from rank 0: median and 99th percentile of a step (slowest
rank, ms), peak memory (largest rank, GiB), first and last loss, and a hash over the bits of all losses.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from benchmarks.gpu.collective_backends import NCCL_POLICY_ZERO
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives.fsdp import AllGather
from ep_kernels.groups import TorchGroup
from ep_kernels.telemetry import quantile

GATHERS = ("nccl", "nccl_ce", "crossdock")
WARMUP, VOCABULARY, LEARNING_RATE = 10, 32_000, 1e-4
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Size:
    """Of the model and a rank's batch."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    inner: int = 8192
    experts: int = 1
    topk: int = 1
    sequence: int = 1024
    batch: int = 2


SIZES = {"dense": Size(), "moe": Size(inner=1024, experts=8, topk=2), "tiny": Size(2, 64, 4, 128, 1, 1, 16, 2)}
"""`tiny` is for a look at the program, on CPUs too."""


class Mlp(nn.Module):
    """SwiGLU of every token, or of each token's best experts, weighted."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._topk = size.topk
        self.router = nn.Linear(size.hidden, size.experts, bias=False) if size.experts > 1 else None
        self.up = nn.Parameter(torch.empty(size.experts, size.hidden, 2 * size.inner))
        self.down = nn.Parameter(torch.empty(size.experts, size.inner, size.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to the same."""
        if self.router is None:
            return self._expert(x, 0)
        scores, ids = functional.softmax(self.router(x), dim=-1, dtype=torch.float32).topk(self._topk, dim=-1)
        total = torch.zeros_like(x)
        for e in range(self.up.shape[0]):  # every expert sees every token: shapes do not depend on the routing
            share = (scores * (ids == e)).sum(-1, keepdim=True).to(x.dtype)
            total = total + share * self._expert(x, e)
        return total

    def _expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = (x @ self.up[e]).chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ self.down[e]


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
            nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[-2] ** -0.5)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    blocks: list[Any] = list(model.blocks)
    for here, after in itertools.pairwise(blocks):
        here.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([here])
    return model


def choose_gather(name: str, model: Model, pool_bytes: int) -> Collectives | None:
    """Let that one gather the model's parameters; what must be closed in the end."""
    units: list[Any] = [model, *model.blocks]
    if name == "nccl":
        return None
    if name == "nccl_ce":
        for unit in units:
            if not hasattr(unit, "set_symm_mem_for_comm"):
                raise SystemExit("--all-gather nccl_ce: needs torch 2.13 or later, whose FSDP2 has symmetric memory")
            unit.set_symm_mem_for_comm("NCCL")
        return None
    transport = "nvlink" if torch.cuda.is_available() else "cpu"
    coll = Collectives(CollectiveConfig(group=TorchGroup(), transport=transport, pool_bytes=pool_bytes))
    for unit in units:
        unit.set_custom_all_gather(AllGather(coll))
    return coll


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print."""
    options = _parse(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    _join(options.all_gather, device)
    size = Size(**{**asdict(SIZES[options.model]), **({"batch": options.batch} if options.batch else {})})
    model = sharded(size, device, options.seed)
    coll = choose_gather(options.all_gather, model, options.pool_mib << 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens = torch.Generator().manual_seed(options.seed * 64 + dist.get_rank())
    losses: list[torch.Tensor] = []
    marks: list[Any] = []
    for _ in range(options.steps):
        batch = torch.randint(VOCABULARY, (size.batch, size.sequence + 1), generator=tokens).to(device)
        if on_gpu:
            marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            marks[-1].record()
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if on_gpu:
        torch.cuda.synchronize()
    _tell(options, losses, marks, size, device)
    if coll is not None:
        coll.close()
    dist.destroy_process_group()
    return 0


def local_rank() -> int:
    """This process's rank on its host."""
    return dist.get_node_local_rank(fallback_rank=0)


def _join(gather: str, device: torch.device) -> None:
    options: Any = None
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        if gather == "nccl_ce" and hasattr(options.config, "cta_policy"):
            options.config.cta_policy = NCCL_POLICY_ZERO
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device, pg_options=options)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def _tell(
    options: argparse.Namespace, losses: list[torch.Tensor], marks: list[Any], size: Size, device: torch.device
) -> None:
    everyone = torch.stack(losses).double()
    dist.all_reduce(everyone)
    values = everyone.tolist()
    took = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)][WARMUP:]
    slowest = torch.tensor(took or [0.0], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() if marks else 0
    memory = torch.tensor([peak / 2**30], dtype=torch.float64, device=device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        bits = struct.pack(f"<{len(values)}d", *values)
        found = {
            "all_gather": options.all_gather, "model": options.model, "ranks": dist.get_world_size(),
            "steps": len(values), **asdict(size), "p50_ms": round(quantile(slowest.tolist(), 0.5), 3),
            "p99_ms": round(quantile(slowest.tolist(), 0.99), 3), "peak_gib": round(float(memory), 3),
            "first_loss": values[0], "last_loss": values[-1],
            "losses_sha256": hashlib.sha256(bits).hexdigest(), "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps(found), flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.fsdp", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--all-gather", choices=GATHERS, default="nccl")
    parser.add_argument("--model", choices=sorted(SIZES), default="dense")
    parser.add_argument("--batch", type=int, help="sequences per rank")
    parser.add_argument("--pool-mib", type=int, default=2048, help="registered memory of `crossdock`")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
