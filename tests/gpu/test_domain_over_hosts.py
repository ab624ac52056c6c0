"""One domain whose ranks share no host: network namespaces of one machine with a GPU, regions by CUDA IPC. What a rack
of several trays does with fabric handles, which one machine cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_kernels.types import Layout, Mode
from tests import tools
from tests.cases import RoutingCase, draw_seed
from tests.gpu import over_hosts
from tests.transports.faults import SLACK_S
from tests.worlds import RankDied, RankFailed, World

pytestmark = pytest.mark.gpu(1)
MODES: dict[str, dict[str, Any]] = {
    "ll": {"mode": Mode.LL, "layout": Layout.EXPERT_MAJOR},
    "ht": {"mode": Mode.HT, "layout": Layout.GROUPED},
}


@pytest.fixture(params=[over_hosts.LABELS, over_hosts.NAMESPACES])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[World, str]]:
    """Ranks, and what keeps them apart. Those that have moved into a namespace stay there."""
    separate = request.param == over_hosts.NAMESPACES
    world = World(2 if separate else min(4, max(2, torch.cuda.device_count())))
    yield world, request.param
    world.close()


def run(pool: tuple[World, str], story: Any, overrides: Any, may_die: tuple[int, ...] = ()) -> list[Any]:
    world, kind = pool
    try:
        return world.run(story, kind, case_of(world.size), overrides, may_die=may_die)
    except RankFailed as error:
        if "OSError: [Errno" in str(error) and kind == over_hosts.NAMESPACES:
            tools.skip("network namespaces", str(error).strip().splitlines()[-1])
        raise


def case_of(size: int) -> RoutingCase:
    everywhere = tuple(tuple((slot + rank) % 3 for slot in range(3)) for rank in range(size))
    return RoutingCase(3, 2, 256, (5,) * size, "uniform", draw_seed(), everywhere)


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_ranks_that_share_no_host(pool: tuple[World, str], mode: str) -> None:
    watched = run(pool, over_hosts.steps, MODES[mode])
    assert watched == [[]] * pool[0].size, "a process of another host cannot be watched"


def test_a_killed_rank_of_another_host(pool: tuple[World, str]) -> None:
    victim = pool[0].size - 1
    results = run(pool, over_hosts.killed, MODES["ht"], may_die=(victim,))
    assert isinstance(results[victim], RankDied)
    for peer, gone, waited_s in results[:victim]:
        assert (peer, gone) == (victim, True)
        assert waited_s < SLACK_S
