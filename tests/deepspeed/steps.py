"""What each rank does: steps of a small model that ZeRO-3 shards, with our all-gathers and without."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ep_kernels import TorchGroup
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives.zero import ZeroGathers
from tests.collectives.fallback_stories import gloo
from tests.collectives.steps import Store, values
from tests.collectives.training import own_way_of_zero

WIDTH = 33
"""Rows that ranks do not divide."""


class Model(nn.Module):
    """Blocks with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return self.head(x).float().square().mean()


@contextmanager
def begun(rank: int, size: int, store: Store) -> Iterator[ModuleType]:
    """DeepSpeed over a process group of these ranks. It compiles nothing."""
    with gloo(rank, size, store), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # type: ignore[import-not-found]

        patch.setenv("LOCAL_RANK", str(rank))
        patch.setattr(deepspeed.comm.comm, "cdb", None)
        patch.setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        try:
            yield deepspeed
        finally:  # it keeps process groups for the whole process
            deepspeed.utils.groups._release_process_group_references(group=None)


def losses(deepspeed: ModuleType, rank: int, count: int, how: dict[str, Any], stack: ExitStack) -> list[float]:
    """Of `count` steps of a model that is the same on all ranks, as DeepSpeed is configured by `how`; data differ. What
    `stack` is given is ended with the model."""
    on_gpu, bf16 = torch.cuda.is_available(), bool(how.get("bf16"))
    torch.manual_seed(1)
    model = Model().to("cuda" if on_gpu else "cpu")
    zero = {
        "stage": 3, "stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 2000, **how.get("zero", {})
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 5, "zero_optimization": zero, "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 30,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    with stack:
        for step in range(count):
            x = values((5, WIDTH), torch.bfloat16 if bf16 else torch.float32, rank, step).to(engine.device)
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
    engine.destroy()
    gc.collect()
    return found


class Counted(ZeroGathers):
    """How many all-gathers came, and how many went DeepSpeed's own way; large ones go in rounds."""

    def __init__(self, coll: Collectives, deepspeed: ModuleType) -> None:
        super().__init__(coll, deepspeed, max_shard_bytes=1 << 40)
        self.calls, self.theirs = 0, 0
        own = self._theirs

        def counted(*args: Any) -> Any:
            self.theirs += 1
            return own(*args)

        self._theirs = counted

    def _all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._all_gather(*args, **kwargs)


def with_and_without(
    rank: int, size: int, store: Store, transport: str, how: dict[str, Any], count: int
) -> tuple[int, int]:
    """Bit-identical losses; (gathers, those that went DeepSpeed's own way)."""
    with begun(rank, size, store) as deepspeed:
        plain = losses(deepspeed, rank, count, how, ExitStack())
        config = CollectiveConfig(group=TorchGroup(), transport=transport, pool_bytes=0, staging_bytes=4096)
        with Collectives(config) as coll:
            stack = ExitStack()
            counted = stack.enter_context(Counted(coll, deepspeed))
            ours = losses(deepspeed, rank, count, how, stack)
            coll.barrier()
        assert ours == plain
        assert len(set(plain)) == count, "the model learns"
        return counted.calls, counted.theirs


def own_way(rank: int, size: int, store: Store, transport: str) -> None:
    """See `training.own_way_of_zero`."""
    with begun(rank, size, store) as deepspeed:
        own_way_of_zero(deepspeed, rank, size, transport)
