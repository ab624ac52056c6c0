"""FSDP2 with our all-gather: the same losses, bit for bit. DeepSpeed's all-gathers, collectives in torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossdock.common.transports import needs_gpu
from tests.collectives import training
from tests.worlds import World

Worlds = Callable[[int], World]
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mixed": True},
    "prefetch": {"prefetch": True},
    "kept after forward": {"reshard": False},
    "async unshard": {"async": True, "mixed": True},
}


@pytest.mark.parametrize("how", HOW)
def test_losses_are_bit_identical(world: Worlds, transport: str, how: str) -> None:
    for calls, registered in world(2).run(training.with_and_without, transport, HOW[how], 16 << 20):
        assert calls >= 80
        assert registered == calls


def test_three_ranks(world: Worlds, transport: str) -> None:
    if needs_gpu(transport) and torch.cuda.device_count() < 3:
        pytest.skip("NCCL wants a GPU for each rank: needs 3")
    world(3).run(training.with_and_without, transport, {}, 16 << 20)


def test_a_pool_that_is_too_small(world: Worlds, transport: str) -> None:
    for calls, registered in world(2).run(training.with_and_without, transport, {}, 8 << 10):
        assert 0 < registered < calls


def test_no_pool(world: Worlds, transport: str) -> None:
    """Shards are staged: nothing else is registered, as the caller wants it, and nobody is warned."""
    for calls, registered in world(2).run(training.with_and_without, transport, {"prefetch": True}, 0):
        assert calls >= 80
        assert registered == 0


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs on GPUs where there are any")
def test_steps_of_the_benchmark(world: Worlds, transport: str, size: int) -> None:
    """3 ranks: some rows are padded."""
    if needs_gpu(transport):
        pytest.skip("its model is on CPUs here")
    world(size).run(training.benchmark_steps)


def test_ranks_of_another_group(world: Worlds, transport: str) -> None:
    world(2).run(training.wrong_group, transport)


def test_a_buffer_that_one_rank_holds(world: Worlds) -> None:
    world(2).run(training.held_buffers)


def test_other_ranks_at_the_same_places(world: Worlds) -> None:
    world(4).run(training.other_ranks)


def test_gathers_of_deepspeed(world: Worlds, transport: str) -> None:
    """Over a stand-in; steps of the real one are in tests/deepspeed."""
    world(2).run(training.zero_without_deepspeed, transport)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(world: Worlds, transport: str, dynamic: bool) -> None:
    world(2).run(training.compiled, transport, "aot_eager", dynamic)


@pytest.mark.slow
def test_compiled_by_inductor(world: Worlds, transport: str) -> None:
    world(2).run(training.compiled, transport, "inductor", False, timeout_s=300)
