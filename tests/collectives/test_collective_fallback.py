"""torch.distributed serves what the transport cannot: the same values, one warning that says why, or a clear error."""

from collections.abc import Callable

import pytest

from crossdock.common.transports import needs_gpu
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


def test_not_while_a_rank_is_left_out(world: Worlds, transport: str) -> None:
    world(3).run(stories.not_while_a_rank_is_left_out, transport)
