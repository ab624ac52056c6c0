"""Steps of a model whose parameters DeepSpeed's ZeRO-3 shards, by who gathers them: DeepSpeed itself, or ours.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.zero --steps 100                    (needs the package deepspeed)
    torchrun --nproc-per-node 2 -m benchmarks.gpu.zero --steps 100 --all-gather crossdock       (one of them alone)

Both take turns in one model of random weights and tokens, for a few steps each; then a model of the same seed is
trained by DeepSpeed alone, as many steps. A gather moves bytes, so all losses must be equal bit by bit; where one is
not, the exit status is 1. Kernels are deterministic, for which GPUs want CUBLAS_WORKSPACE_CONFIG=:4096:8. On CPUs it
runs over gloo and the `cpu` transport, without times. Prints a line of JSON for each, from rank 0: median and 99th
percentile of a step (slowest rank, ms), peak memory with what was registered (largest rank, GiB), first and last loss,
and a hash over the bits of all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.fsdp import DEADLINE_S, SETTLE, Steps, Trained, line_of, local_rank, peak_gib
from benchmarks.gpu.fsdp_model import SIZES, Model, Size
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives.zero import ZeroGathers
from ep_kernels.groups import TorchGroup
from ep_kernels.transports.collective_base import bytes_before_pool

GATHERS = ("deepspeed", "crossdock")
TURNS, LEARNING_RATE = 3, 1e-4
STAGING_MIB = 32
"""Of a shard that is under way: larger ones are DeepSpeed's own, or travel in rounds (`--rounds`)."""


def config_of(size: Size, on_gpu: bool) -> dict[str, Any]:
    """DeepSpeed's: its defaults for ZeRO-3, bf16 on GPUs. Parameters of the tiny model are sharded, too."""
    zero: dict[str, Any] = {"stage": 3}
    if size == SIZES["tiny"]:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 4096}
    return {
        "train_micro_batch_size_per_gpu": size.batch, "zero_optimization": zero, "bf16": {"enabled": on_gpu},
        "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 30,
    }  # fmt: skip


class Training(Steps):
    """A model that ZeRO-3 shards."""

    def __init__(self, size: Size, seed: int, device: torch.device) -> None:
        import deepspeed

        super().__init__(size, seed, device)
        torch.manual_seed(seed)
        with torch.device(device):
            model = Model(size)
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[0] ** -0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        made = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(size, self._on_gpu))
        self._engine: Any = made[0]

    def _learn(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss

    def close(self) -> None:
        """Give the model's memory back."""
        self._engine.destroy()
        del self._engine
        gc.collect()


class Ours:
    """Our collectives over the world, and the bytes that they hold."""

    def __init__(self, staging_mib: int, rounds: bool) -> None:
        transport = "nvlink" if torch.cuda.is_available() else "cpu"
        config = CollectiveConfig(
            group=TorchGroup(), transport=transport, pool_bytes=0, staging_bytes=staging_mib << 20
        )
        self.coll, self._most = Collectives(config), 1 << 40 if rounds else None
        self.num_bytes = bytes_before_pool(config)

    @contextlib.contextmanager
    def gathering(self, name: str) -> Iterator[None]:
        """`name` of GATHERS serves DeepSpeed meanwhile."""
        import deepspeed

        with ZeroGathers(self.coll, deepspeed, self._most) if name == "crossdock" else contextlib.nullcontext():
            yield


def in_turns(
    names: Sequence[str], size: Size, steps: int, seed: int, device: torch.device, how: tuple[int, bool]
) -> dict[str, Trained]:
    """A new model, whose parameters each of `names` gathers in turn, in all about `steps` steps; how: of `Ours`."""
    ours, training = Ours(*how), Training(size, seed, device)
    each = max(1, steps // (TURNS * len(names)) - SETTLE)
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for name in [*names] * TURNS:
        with ours.gathering(name):
            training.steps(SETTLE)
            peak_gib(0, device)
            ms, peaks = taken[name]
            ms += training.steps(each)
            peaks.append(peak_gib(ours.num_bytes if name == "crossdock" else 0, device))
    losses = training.all_losses()
    training.close()
    ours.coll.close()
    return {name: Trained(ms, max(peaks), losses) for name, (ms, peaks) in taken.items()}


def alone(size: Size, steps: int, seed: int, device: torch.device) -> list[float]:
    """Losses of a model that DeepSpeed alone serves."""
    training = Training(size, seed, device)
    training.steps(steps)
    losses = training.all_losses()
    training.close()
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, print; 1 where losses differ."""
    import deepspeed

    options = _parse(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", auto_mpi_discovery=False, verbose=False)
    size = SIZES[options.model]
    size = dataclasses.replace(size, batch=options.batch or size.batch)
    names = (options.all_gather,) if options.all_gather else GATHERS
    found = in_turns(names, size, options.steps, options.seed, device, (options.staging_mib, options.rounds))
    first = next(iter(found.values()))
    other = first.first_other(alone(size, len(first.losses), options.seed, device))
    if dist.get_rank() == 0:
        for name, trained in found.items():
            line = line_of(name, options.model, size, trained)
            how = {"staging_mib": options.staging_mib, "rounds": options.rounds, "deepspeed": deepspeed.__version__}
            print(json.dumps(line | {"first_other_loss": other} | how), flush=True)
    dist.destroy_process_group()
    return 0 if other is None else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.zero", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--all-gather", choices=GATHERS, help="one of them alone; without it both take turns")
    parser.add_argument("--staging-mib", type=int, default=STAGING_MIB, help="of a slot; larger shards go another way")
    parser.add_argument("--rounds", action="store_true", help="larger shards in rounds through the slots")
    parser.add_argument("--model", choices=sorted(SIZES), default="dense")
    parser.add_argument("--batch", type=int, help="sequences per rank")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
