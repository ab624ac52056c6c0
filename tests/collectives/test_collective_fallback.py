"""torch.distributed serves what the transport cannot: the same values, one warning that says why, or a clear error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.common.transports import needs_gpu
from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.collectives.fallback import TorchCollectives
from ep_kernels.transports.collective_base import GatherArgs, GatherPart, ReduceArgs
from tests.collectives import fallback_stories as stories
from tests.worlds import World

Worlds = Callable[[int], World]
STEPS = {
    "create": "rank 1: no create here",
    "allocate": "rank 1: no allocate here",
    "import_regions": "rank 1: no import_regions here",
}


@pytest.mark.parametrize("step", STEPS)
def test_one_rank_cannot(world: Worlds, step: str) -> None:
    for reason, warned in world(3).run(stories.whole_group, step, 1):
        assert reason == STEPS[step]
        assert warned == [f"collectives by torch.distributed: {reason}"]


def test_links_that_a_barrier_does_not_prove(world: Worlds) -> None:
    for reason, warned in world(3).run(stories.whole_group, "barrier", 1):
        assert reason.startswith("rank 0: barrier: rank 1 did not deliver arrival")
        assert warned == [f"collectives by torch.distributed: {reason}"]


def test_ranks_of_two_hosts(world: Worlds) -> None:
    for reason, warned in world(3).run(stories.whole_group, "other host", 2):
        assert reason.startswith("rank 0: cpu transport: cannot map the region of rank 2: it runs on another host")
        assert warned == [f"collectives by torch.distributed: {reason}"]


@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_to_fall_back_on(world: Worlds, grouped: bool) -> None:
    for said in world(3).run(stories.nothing_to_fall_back_on, grouped):
        assert "it runs on another host" in said
        assert said.endswith("let torch.distributed serve this group")


def test_single_operations(world: Worlds, transport: str) -> None:
    for warned in world(2 if needs_gpu(transport) else 3).run(stories.single_operations, transport):
        assert len(warned) == 1
        assert "all_reduce: dtype torch.int64; transports sum" in warned[0]


def test_sums_that_need_not_be_exact(world: Worlds, transport: str) -> None:
    world(2).run(stories.handed_over, transport)


def test_sums_that_torch_makes_beside_ours(world: Worlds, transport: str) -> None:
    assert world(2).run(stories.handed_over_beside_others, transport) == [6, 6]


def test_a_process_group_that_is_destroyed_first(world: Worlds, transport: str) -> None:
    world(2).run(stories.outlived, transport)


@pytest.mark.parametrize(("reason", "waits"), [("", [1, 1, 1]), ("two hosts", [])])
def test_nccl_keeps_the_order_of_the_stream(monkeypatch: pytest.MonkeyPatch, reason: str, waits: list[int]) -> None:
    """Beside kernels of ours, which wait for peers on multiprocessors; where torch serves the whole group, works
    overlap as ever."""
    waited: list[int] = []

    class Nccl:
        process_group = property(lambda self: self)
        rank, size, epoch = 0, 2, 0

        def _get_backend(self, device: torch.device) -> Any:
            return self

        def name(self) -> str:
            return "nccl"

        def wait(self) -> None:
            waited.append(1)

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *args, **rest: Nccl())
    served, x = TorchCollectives(Nccl(), "cuda", reason), torch.zeros(4)
    part = GatherPart(x.view(torch.uint8), torch.zeros(32, dtype=torch.uint8), x.dtype)
    served.all_gather(GatherArgs((part,), Algorithm.TORCH, None))
    served.all_reduce(ReduceArgs(x, x, Algorithm.TORCH, None))
    served.reduce_scatter(ReduceArgs(x, x[:2], Algorithm.TORCH, None))
    assert waited == waits


def test_not_while_a_rank_is_left_out(world: Worlds, transport: str) -> None:
    world(3).run(stories.not_while_a_rank_is_left_out, transport)
