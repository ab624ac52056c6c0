"""One domain whose ranks share no host: network namespaces of one machine with a GPU, regions by CUDA IPC. What a rack
of several trays does with fabric handles, which one machine cannot have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.chaos.netns import Fabric, Host, NoNamespaces
from tests.gpu import over_hosts
from tests.transports.faults import SLACK_S
from tests.worlds import RankDied, World

pytestmark = pytest.mark.gpu(1)
MODES: dict[str, dict[str, Any]] = {
    "ll": {"mode": Mode.LL, "layout": Layout.EXPERT_MAJOR},
    "ht": {"mode": Mode.HT, "layout": Layout.GROUPED},
}


def num_ranks() -> int:
    return min(4, max(2, torch.cuda.device_count()))


@pytest.fixture(params=["labels", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Sequence[Host]]:
    """One for each rank; none: ranks have labels of different hosts only."""
    if request.param == "labels":
        yield ()
        return
    try:
        fabric = Fabric()
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")
    with closing(fabric):
        yield [fabric.host(f"host{rank}", rank + 1) for rank in range(num_ranks())]


def case_of(size: int) -> RoutingCase:
    everywhere = tuple(tuple((slot + rank) % 3 for slot in range(3)) for rank in range(size))
    return RoutingCase(3, 2, 256, (5,) * size, "uniform", draw_seed(), everywhere)


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_ranks_that_share_no_host(hosts: Sequence[Host], mode: str) -> None:
    world = World(num_ranks())
    try:
        watched = world.run(over_hosts.steps, hosts, case_of(world.size), MODES[mode])
    finally:
        world.close()
    assert watched == [[]] * world.size, "a process of another host cannot be watched"


def test_a_killed_rank_of_another_host(hosts: Sequence[Host]) -> None:
    world = World(num_ranks())
    victim = world.size - 1
    results = world.run(over_hosts.killed, hosts, case_of(world.size), MODES["ht"], may_die=(victim,))
    assert isinstance(results[victim], RankDied)
    for peer, gone, waited_s in results[:victim]:
        assert (peer, gone) == (victim, True)
        assert waited_s < SLACK_S
