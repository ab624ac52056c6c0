"""What only real peers show: graphs, drifting ranks, streams, long runs, wrapped numbers, serving sizes. The contract
suite runs beside this; lost peers are in test_losses.py, graphs that outlive communicators in test_lives.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase, draw_seed
from tests.gpu import stories
from tests.gpu.endurance import many_iterations
from tests.transports.steps import Place, Store, run_story
from tests.worlds import World

pytestmark = pytest.mark.gpu(2)
LL_HT = [Mode.LL, Mode.HT]
WAYS = [(mode, layout) for mode in LL_HT for layout in Layout]
NO_HOST_WAIT = {"exact_shapes": False, "overflow": Overflow.DROP}


def case_of(size: int, hidden: int = 256, most: int = 24) -> RoutingCase:
    tokens = tuple(most - 5 * rank % most for rank in range(size))
    return RoutingCase(4 * size + 1, 4, hidden, tokens, "uniform", draw_seed(), max_tokens=most)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_graph_replay(world: Callable[[], World], transport: str, mode: Mode, layout: Layout) -> None:
    pool = world()
    overrides = {"mode": mode, "layout": layout, **NO_HOST_WAIT}
    pool.run(run_story, transport, stories.replayed_graph, case_of(pool.size), overrides)


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED, Layout.FLAT])
@pytest.mark.parametrize("mode", LL_HT)
def test_graph_replay_with_few_rows_and_an_idle_rank(
    world: Callable[[], World], transport: str, mode: Mode, layout: Layout
) -> None:
    pool = world()
    tokens = (0, *(9 + rank for rank in range(1, pool.size)))
    case = replace(case_of(pool.size), tokens=tokens)
    overrides = {"mode": mode, "layout": layout, "max_recv_rows": 12, "max_in_flight": 1, **NO_HOST_WAIT}
    pool.run(run_story, transport, stories.replayed_graph, case, overrides)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_a_graph_with_two_in_flight(world: Callable[[], World], transport: str, mode: Mode, layout: Layout) -> None:
    pool = world()
    overrides = {"mode": mode, "layout": layout, **NO_HOST_WAIT}
    pool.run(run_story, transport, stories.phases_in_a_graph, case_of(pool.size), overrides, timeout_s=120)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_drifting_ranks(
    world: Callable[[], World], transport: str, mode: Mode, layout: Layout, max_in_flight: int
) -> None:
    pool = world()
    overrides = {"mode": mode, "layout": layout, "max_in_flight": max_in_flight}
    pool.run(run_story, transport, stories.delayed, case_of(pool.size), overrides)


@pytest.mark.parametrize("mode", LL_HT)
def test_two_streams(world: Callable[[], World], transport: str, mode: Mode) -> None:
    pool = world()
    pool.run(stories.two_streams, transport, case_of(pool.size), {"mode": mode})


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_one_communicator_moves_between_streams(
    world: Callable[[], World], transport: str, mode: Mode, layout: Layout
) -> None:
    pool = world()
    overrides = {"mode": mode, "layout": layout, **NO_HOST_WAIT}
    pool.run(run_story, transport, stories.moved_between_streams, case_of(pool.size), overrides)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("start_at", [(1 << 31) - 4, (1 << 32) - 4])
def test_sequence_numbers_past_32_bits(
    world: Callable[[], World], transport: str, layout: Layout, start_at: int
) -> None:
    pool = world()
    case = replace(case_of(pool.size), max_tokens=32)
    overrides = {"mode": Mode.AUTO, "layout": layout, "ll_max_tokens": 24, **NO_HOST_WAIT}
    pool.run(wrap, transport, case, start_at, overrides)


def wrap(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, start_at: int, overrides: dict[str, Any]
) -> None:
    with Place(rank, size, store, transport).communicator(case, **overrides) as comm:
        stories.wrapped(comm, case, start_at)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
@pytest.mark.parametrize("quantize", [False, True])
def test_serving_sizes(world: Callable[[], World], transport: str, mode: Mode, layout: Layout, quantize: bool) -> None:
    pool = world()
    tokens = tuple(64 - 3 * rank for rank in range(pool.size))
    case = RoutingCase(256, 8, 7168, tokens, "uniform", draw_seed(), max_tokens=64)
    overrides = {"mode": mode, "layout": layout, "quantize": quantize}
    pool.run(run_story, transport, stories.agrees_at_any_size, case, overrides)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(Layout))
def test_ten_thousand_iterations(world: Callable[[], World], transport: str, layout: Layout) -> None:
    pool, iterations = world(), 10_000
    case = replace(case_of(pool.size, hidden=64, most=16), tokens=(0,) * pool.size)
    overrides = {"mode": Mode.AUTO, "layout": layout, "ll_max_tokens": 13, "timeout_s": 20.0, **NO_HOST_WAIT}
    counts = pool.run(endure, transport, case, iterations, overrides, timeout_s=240)
    assert len(set(counts)) == 1
    assert 0.2 < counts[0] / iterations < 0.8, "both algorithms take turns"


def endure(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, iterations: int, overrides: dict[str, Any]
) -> int:
    with Place(rank, size, store, transport).communicator(case, **overrides) as comm:
        return many_iterations(comm, case, iterations)
