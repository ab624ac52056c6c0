"""What only real peers show: graphs, drifting ranks, streams, serving sizes. The contract suite runs beside this."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase, draw_seed
from tests.gpu import stories
from tests.transports.steps import run_story
from tests.worlds import World

pytestmark = pytest.mark.gpu(2)
Worlds = Callable[[int], World]
LL_HT = [Mode.LL, Mode.HT]


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[[], World]]:
    """One rank per GPU; made late, since the parent must not touch CUDA."""
    pools: list[World] = []

    def all_gpus() -> World:
        if not pools:
            pools.append(World(min(8, torch.cuda.device_count())))
        return pools[0]

    yield all_gpus
    for pool in pools:
        pool.close()


def case_of(size: int, hidden: int = 256, most: int = 24) -> RoutingCase:
    tokens = tuple(most - 5 * rank % most for rank in range(size))
    return RoutingCase(4 * size + 1, 4, hidden, tokens, "uniform", draw_seed(), max_tokens=most)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", LL_HT)
def test_graph_replay(world: Callable[[], World], mode: Mode, layout: Layout) -> None:
    pool = world()
    overrides = {"mode": mode, "layout": layout, "exact_shapes": False, "overflow": Overflow.DROP}
    pool.run(run_story, "nvlink", stories.replayed_graph, case_of(pool.size), overrides)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", LL_HT)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_drifting_ranks(world: Callable[[], World], mode: Mode, layout: Layout, max_in_flight: int) -> None:
    pool = world()
    overrides = {"mode": mode, "layout": layout, "max_in_flight": max_in_flight}
    pool.run(run_story, "nvlink", stories.delayed, case_of(pool.size), overrides)


@pytest.mark.parametrize("mode", LL_HT)
def test_two_streams(world: Callable[[], World], mode: Mode) -> None:
    pool = world()
    pool.run(stories.two_streams, "nvlink", case_of(pool.size), {"mode": mode})


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", LL_HT)
@pytest.mark.parametrize("quantize", [False, True])
def test_serving_sizes(world: Callable[[], World], mode: Mode, layout: Layout, quantize: bool) -> None:
    pool = world()
    tokens = tuple(64 - 3 * rank for rank in range(pool.size))
    case = RoutingCase(256, 8, 7168, tokens, "uniform", draw_seed(), max_tokens=64)
    overrides = {"mode": mode, "layout": layout, "quantize": quantize}
    pool.run(run_story, "nvlink", stories.agrees_at_any_size, case, overrides)
