"""Compiled functions on GPUs: Triton code around the operators, CUDA graphs of the compiler, varying T."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase, draw_seed
from tests.compiled import How, compiled_gradients, compiled_layers
from tests.transports.steps import run_story
from tests.worlds import World

pytestmark = pytest.mark.gpu(2)
TIMEOUT_S = 240
STATIC = {"exact_shapes": False, "overflow": Overflow.DROP, "timeout_s": 60.0}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One rank on each of two GPUs."""
    pool = World(2)
    yield pool
    pool.close()


def case_of(hidden: int = 256, most: int = 24) -> RoutingCase:
    return RoutingCase(9, 4, hidden, (most, most - 5), "uniform", draw_seed(), max_tokens=most)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_cuda_graphs_of_the_compiler(world: World, mode: Mode, layout: Layout) -> None:
    story = partial(compiled_layers, how=How(mode="reduce-overhead", replays=True, calls=6))
    world.run(run_story, "nvlink", story, case_of(), STATIC | {"mode": mode, "layout": layout}, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_any_number_of_tokens(world: World, layout: Layout, max_in_flight: int) -> None:
    story = partial(compiled_layers, how=How(dynamic=True))
    overrides = {"mode": Mode.HT, "layout": layout, "max_in_flight": max_in_flight, "timeout_s": 60.0}
    world.run(run_story, "nvlink", story, case_of(), overrides, timeout_s=TIMEOUT_S)


def test_the_algorithm_is_chosen(world: World) -> None:
    story = partial(compiled_layers, how=How(mode="reduce-overhead", replays=True, calls=6))
    overrides = STATIC | {"mode": Mode.AUTO, "layout": Layout.GROUPED, "expert_alignment": 8}
    world.run(run_story, "nvlink", story, case_of(), overrides, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("layout", list(Layout))
def test_training_step(world: World, layout: Layout) -> None:
    story = partial(compiled_gradients, how=How())
    overrides = {"mode": Mode.HT, "layout": layout, "timeout_s": 60.0}
    world.run(run_story, "nvlink", story, case_of(), overrides, timeout_s=TIMEOUT_S)
