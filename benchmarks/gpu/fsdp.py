"""Steps of a model whose parameters FSDP2 shards, by who gathers them: NCCL, NCCL's copy engines, or ours.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 torchrun --nproc-per-node 8 -m benchmarks.gpu.fsdp --all-gather crossdock

Weights and tokens are random and the same for every choice and every run of a seed, and kernels are deterministic, for
which torch wants that variable (the size is Hopper's default), so the printed losses must be equal bit by bit: a gather
moves bytes. Forward and backward prefetch one block ahead. The
choice holds for the blocks; what is outside of them (embedding, head) is gathered once a step, by NCCL. The first
WARMUP steps are not timed. Prints one line of JSON, from rank 0: median and 99th percentile of a step (slowest rank,
ms), peak memory with what was registered (largest rank, GiB), first and last loss, and a hash over the bits of all.
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

from benchmarks.gpu.collective_backends import NCCL_POLICY_ZERO, nccl_group
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives.fsdp import AllGather
from ep_kernels.errors import ArgumentError
from ep_kernels.groups import TorchGroup
from ep_kernels.telemetry import quantile
from ep_kernels.transports.collective_base import bytes_before_pool

GATHERS = ("nccl", "nccl_ce", "crossdock")
WARMUP, VOCABULARY, LEARNING_RATE = 10, 32_000, 1e-4
DEADLINE_S = 300.0
BUFFERS = 3
"""Of a block's parameters, in registered memory: what FSDP2 uses at once, with one block prefetched."""
STAGING_BYTES = 1 << 20
"""Gathers of FSDP2 are in place: little is staged."""


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


class Windows:
    """What `AllGather` needs of a `Collectives`, by NCCL's copy engines: memory of one window, the policy that leaves
    multiprocessors alone, and FSDP's stream, which is not the default one."""

    def __init__(self, num_bytes: int) -> None:
        self._group = nccl_group(None, NCCL_POLICY_ZERO)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cuda", torch.cuda.current_device())
        self._backend: Any = self._group._get_backend(device)
        dist.all_reduce(torch.ones(1, device=device), group=self._group)  # windows cannot be the first operation
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._slab = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._backend.register_mem_pool(self._pool, symm=True)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Collectives.empty`; never returned."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        first, self._used = self._used, self._used + -(-num_bytes // 512) * 512
        if self._used > self._slab.numel():
            self._used = first
            raise ArgumentError("shape", f"room among {self._slab.numel()} bytes", list(shape))
        return self._slab[first : first + num_bytes].view(dtype).view(*shape)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> Any:
        """As `Collectives.all_gather`."""
        assert out is not None, "FSDP2 gathers into memory of its own"
        return dist.all_gather_into_tensor(out, x, group=self._group, async_op=True)

    def close(self) -> None:
        """Give the window back."""
        torch.cuda.synchronize()
        self._backend.deregister_mem_pool(self._pool)
        del self._slab


def buffer_bytes(size: Size, ranks: int) -> int:
    """Of the gathered parameters of a block, in bf16: FSDP2 gives each rank as many rows of each as the first has."""
    with torch.device("meta"):
        parameters = list(Block(size).parameters())
    return sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0]) * 2 for p in parameters)


def choose_gather(name: str, model: Model, pool_bytes: int) -> Collectives | Windows | None:
    """Let that one gather the parameters of the blocks; what must be closed in the end."""
    if name == "nccl":
        return None
    if name == "nccl_ce":
        coll: Any = Windows(pool_bytes)
    else:
        transport = "nvlink" if torch.cuda.is_available() else "cpu"
        coll = Collectives(
            CollectiveConfig(
                group=TorchGroup(), transport=transport, pool_bytes=pool_bytes, staging_bytes=STAGING_BYTES, num_sms=0
            )
        )
    blocks: Any = model.blocks
    gather = AllGather(coll)  # one for all: they share its buffers
    for block in blocks:
        block.set_custom_all_gather(gather)
    return coll  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Trained:
    """What steps took and gave.

    Attributes:
        ms: of each timed step, on the slowest rank.
        peak_gib: of the largest rank, with what was registered outside of torch's memory.
        losses: summed over ranks.
    """

    ms: list[float]
    peak_gib: float
    losses: list[float]

    @property
    def losses_sha256(self) -> str:
        """Equal where all losses are, bit by bit."""
        return hashlib.sha256(struct.pack(f"<{len(self.losses)}d", *self.losses)).hexdigest()

    def first_other(self, losses: Sequence[float]) -> int | None:
        """The first step whose loss is another; None where all are equal."""
        return next((i for i, pair in enumerate(zip(self.losses, losses, strict=True)) if pair[0] != pair[1]), None)


def trained(gather: str, size: Size, steps: int, seed: int, device: torch.device) -> Trained:
    """Train a new model; collective over the world, whose process group is torch's default one."""
    on_gpu, pool_bytes = device.type == "cuda", BUFFERS * (buffer_bytes(size, dist.get_world_size()) + 4096)
    torch.use_deterministic_algorithms(True)  # warn_only leaves the gradients of attention to atomics
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time, not bits
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients differ from run to run
    model = sharded(size, device, seed)
    coll = choose_gather(gather, model, pool_bytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=on_gpu)
    tokens = torch.Generator().manual_seed(seed * 64 + dist.get_rank())
    losses: list[torch.Tensor] = []
    marks: list[Any] = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
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
    torch.use_deterministic_algorithms(False)
    apart = bytes_before_pool(coll.config) + pool_bytes if isinstance(coll, Collectives) else 0
    found = _gathered(losses, marks, apart, device)
    if coll is not None:
        coll.close()
    return found


def _gathered(losses: list[torch.Tensor], marks: list[Any], registered: int, device: torch.device) -> Trained:
    everyone = torch.stack(losses).double()
    dist.all_reduce(everyone)
    took = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)][WARMUP:]
    slowest = torch.tensor(took or [0.0], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() + registered if marks else 0
    memory = torch.tensor([peak / 2**30], dtype=torch.float64, device=device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    return Trained(slowest.tolist(), float(memory), everyone.tolist())


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print."""
    options = _parse(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    if on_gpu:
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    size = Size(**{**asdict(SIZES[options.model]), **({"batch": options.batch} if options.batch else {})})
    found = trained(options.all_gather, size, options.steps, options.seed, device)
    if dist.get_rank() == 0:
        print(json.dumps(line_of(options.all_gather, options.model, size, found)), flush=True)
    dist.destroy_process_group()
    return 0


def line_of(gather: str, model: str, size: Size, found: Trained) -> dict[str, object]:
    """What is kept of a run."""
    return {
        "all_gather": gather, "model": model, "ranks": dist.get_world_size(), "steps": len(found.losses),
        **asdict(size), "p50_ms": round(quantile(found.ms, 0.5), 3), "p99_ms": round(quantile(found.ms, 0.99), 3),
        "peak_gib": round(found.peak_gib, 3), "first_loss": found.losses[0], "last_loss": found.losses[-1],
        "losses_sha256": found.losses_sha256, "torch": torch.__version__,
    }  # fmt: skip


def local_rank() -> int:
    """This process's rank on its host."""
    return dist.get_node_local_rank(fallback_rank=0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.fsdp", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--all-gather", choices=GATHERS, default="nccl")
    parser.add_argument("--model", choices=sorted(SIZES), default="dense")
    parser.add_argument("--batch", type=int, help="sequences per rank")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
