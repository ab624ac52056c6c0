"""Steps of a model whose parameters FSDP2 shards, by who gathers them: NCCL, NCCL's copy engines, or ours, twice.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 torchrun --nproc-per-node 8 -m benchmarks.gpu.fsdp --all-gather crossdock

Weights and tokens are random and the same for every choice and every run of a seed, and kernels are deterministic, for
which torch wants that variable (the size is Hopper's default), so the printed losses must be equal bit by bit: a gather
moves bytes. Forward and backward prefetch one block ahead. The choice holds for the blocks; what is outside of them
(embedding, head) is gathered once a step, by NCCL. The first WARMUP steps are not timed. Prints one line of JSON, from
rank 0: median and 99th percentile of a step (slowest rank, ms), peak memory with what was registered (largest rank,
GiB), first and last loss, and a hash over the bits of all. In the table of collectives they take turns in one model.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.collective_backends import NCCL_POLICY_ZERO, Windows, nccl_group
from benchmarks.gpu.fsdp_model import SIZES, VOCABULARY, Size, buffer_bytes, sharded
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives.fsdp import AllGather
from ep_kernels.errors import ArgumentError
from ep_kernels.groups import TorchGroup
from ep_kernels.kernels import collective_abi
from ep_kernels.telemetry import quantile
from ep_kernels.transports.nvlink.copy_engines import collective_plan

GATHERS = ("nccl", "nccl_ce", "crossdock", "crossdock_staged")
"""The last has no registered buffers: shards are staged, a part at a time."""
WARMUP, SETTLE, LEARNING_RATE = 10, 2, 1e-4
DEADLINE_S = 300.0
BUFFERS = 2
"""Of a block's parameters, in registered memory: what FSDP2 uses at once, with one block prefetched."""
STAGING_BYTES, STAGED_BYTES = 1 << 20, 32 << 20
"""With registered buffers, into which gathers are in place, and without."""


def bytes_before_pool(config: CollectiveConfig) -> int:
    """Bytes of a rank's region that are not its pool: flags and staging."""
    sizes = collective_plan.sizes_of(config.group.size, config.pool_bytes, config.staging_bytes)
    return int(collective_abi.collective_map(sizes).pool)


class WindowGathers:
    """What `AllGather` needs of a `Collectives`, by NCCL's copy engines: memory of one window, the policy that leaves
    multiprocessors alone, and FSDP's stream, which is not the default one."""

    def __init__(self, num_bytes: int) -> None:
        self._group = nccl_group(None, NCCL_POLICY_ZERO)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._windows = Windows(self._group)
        self._slab, self._used = self._windows.empty((num_bytes,), torch.uint8), 0
        self._windows.register()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Collectives.empty`; never returned."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        first, self._used = self._used, self._used + -(-num_bytes // 512) * 512
        if self._used > self._slab.numel():
            self._used = first
            raise ArgumentError("shape", f"room among {self._slab.numel()} bytes", list(shape))
        return self._slab[first : first + num_bytes].view(dtype).view(*shape)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, beside: bool = False) -> Any:
        """As `Collectives.all_gather`."""
        assert out is not None, "FSDP2 gathers into memory of its own"
        return dist.all_gather_into_tensor(out, x, group=self._group, async_op=True)

    def close(self) -> None:
        """Give the window back."""
        self._windows.close()
        del self._slab


@dataclass(frozen=True)
class Gathering:
    """Who gathers the parameters of the blocks.

    Attributes:
        name: of GATHERS.
        hook: for `set_custom_all_gather`.
        apart, within: bytes that it registered outside of torch's memory, and in it.
        close: gives them back.
    """

    name: str
    hook: Any
    apart: int
    within: int
    close: Callable[[], None]


class Plain:
    """What FSDP2 does where nothing else is said: the process group's all-gather into ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def gathering(name: str, size: Size) -> Gathering:
    """`name`, with room for what FSDP2 uses of such blocks; collective over the world."""
    if name == "nccl":
        return Gathering(name, Plain(), 0, 0, lambda: None)
    pool_bytes = BUFFERS * (buffer_bytes(size, dist.get_world_size()) + 4096)
    if name == "nccl_ce":
        windows: Any = WindowGathers(pool_bytes)
        return Gathering(name, AllGather(windows), 0, pool_bytes, windows.close)
    transport, staging_bytes = "nvlink" if torch.cuda.is_available() else "cpu", STAGING_BYTES
    if name == "crossdock_staged":
        pool_bytes, staging_bytes = 0, STAGED_BYTES
    coll = Collectives(
        CollectiveConfig(
            group=TorchGroup(), transport=transport, pool_bytes=pool_bytes, staging_bytes=staging_bytes, num_sms=0
        )
    )
    return Gathering(name, AllGather(coll), bytes_before_pool(coll.config) + pool_bytes, 0, coll.close)


@dataclass(frozen=True)
class Trained:
    """What steps took and gave.

    Attributes:
        ms: of each timed step, on the slowest rank.
        peak_gib: of the largest rank, with what was registered outside of torch's memory.
        losses: of all steps, summed over ranks.
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


def make_deterministic() -> None:
    """From now on kernels give the same bits in every run."""
    torch.use_deterministic_algorithms(True)  # warn_only leaves the gradients of attention to atomics
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time, not bits
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients differ from run to run


class Steps(ABC):
    """Steps of a new model, whose process group is torch's default one; collective over it. A subclass makes the model
    and learns.

    Attributes:
        losses: of each step, on this rank.
    """

    def __init__(self, size: Size, seed: int, device: torch.device) -> None:
        make_deterministic()
        self._size, self._device, self._on_gpu = size, device, device.type == "cuda"
        self._tokens = torch.Generator().manual_seed(seed * 64 + dist.get_rank())
        self.losses: list[torch.Tensor] = []

    @abstractmethod
    def _learn(self, batch: torch.Tensor) -> torch.Tensor:
        """A step; the loss before it."""

    def steps(self, count: int) -> list[float]:
        """Milliseconds of each on the slowest rank; 0 on CPUs. Waits for the device."""
        marks = [self._step() for _ in range(count)] + [self._mark()]
        if self._on_gpu:
            torch.cuda.synchronize()
        took = [a.elapsed_time(b) if a is not None else 0.0 for a, b in itertools.pairwise(marks)]
        slowest = torch.tensor(took, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def _mark(self) -> Any:
        if not self._on_gpu:
            return None
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def _step(self) -> Any:
        shape = self._size.batch, self._size.sequence + 1
        batch = torch.randint(VOCABULARY, shape, generator=self._tokens).to(self._device)
        mark = self._mark()
        self.losses.append(self._learn(batch).detach())
        return mark

    def all_losses(self) -> list[float]:
        """Summed over ranks."""
        everyone = torch.stack(self.losses).double()
        dist.all_reduce(everyone)
        return everyone.tolist()


def peak_gib(apart: int, device: torch.device) -> float:
    """Peak memory of the largest rank since the last look, with `apart` bytes that are not torch's; 0 on CPUs."""
    if device.type != "cuda":
        return 0.0
    memory = torch.tensor([(torch.cuda.max_memory_allocated() + apart) / 2**30], dtype=torch.float64, device=device)
    torch.cuda.reset_peak_memory_stats()
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    return float(memory)


class Training(Steps):
    """A model that FSDP2 shards."""

    def __init__(self, size: Size, seed: int, device: torch.device) -> None:
        super().__init__(size, seed, device)
        self._model = sharded(size, device, seed)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=self._on_gpu)

    def use(self, hook: Any) -> None:
        """From now on that one gathers the parameters of the blocks."""
        blocks: Any = self._model.blocks
        for block in blocks:
            block.set_custom_all_gather(hook)

    def _learn(self, batch: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss: torch.Tensor = self._model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss

    def peak_gib(self, used: Gathering, registered: Sequence[Gathering]) -> float:
        """Of the largest rank since the last look, had `used` alone been registered."""
        return peak_gib(used.apart - sum(each.within for each in registered if each is not used), self._device)


def trained(gather: str, size: Size, steps: int, seed: int, device: torch.device) -> Trained:
    """All steps of a new model with one gather; the first WARMUP are not timed."""
    training, used, warm = Training(size, seed, device), gathering(gather, size), min(steps, WARMUP)
    training.use(used.hook)
    training.steps(warm)
    ms = training.steps(steps - warm)
    found = Trained(ms, training.peak_gib(used, [used]), training.all_losses())
    used.close()
    return found


def in_turns(
    gathers: Sequence[Gathering], size: Size, turns: int, steps: int, seed: int, device: torch.device
) -> dict[str, list[Trained]]:
    """A new model, whose parameters each of `gathers` gathers in turn for SETTLE + `steps` steps, `turns` times, behind
    WARMUP steps with the first: by name, what the timed steps of each turn took. All have the losses of the model."""
    training = Training(size, seed, device)
    training.use(gathers[0].hook)
    training.steps(WARMUP)
    taken: list[tuple[str, list[float], float]] = []
    for _ in range(turns):
        for used in gathers:
            training.use(used.hook)
            training.steps(SETTLE)
            training.peak_gib(used, gathers)
            ms = training.steps(steps)
            taken.append((used.name, ms, training.peak_gib(used, gathers)))
    losses, found = training.all_losses(), dict[str, list[Trained]]()
    for name, ms, peak in taken:
        found.setdefault(name, []).append(Trained(ms, peak, losses))
    return found


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
