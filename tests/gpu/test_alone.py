"""LL and HT on one GPU, by one rank: what plain calls (`nvlink/calls/operations.py`) do in graphs, over streams, in
compiled functions and below `deep_ep`. Several ranks: tests/transports, test_several_gpus.py, test_compile.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ep_kernels.types import Layout, Mode, Overflow, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.compiled import How, compiled_gradients, compiled_layers
from tests.gpu import stories
from tests.transports import calls, deep_ep_steps, devices, gradients
from tests.transports.steps import run_story
from tests.worlds import World

pytestmark = pytest.mark.gpu(1)
NO_HOST_WAIT = {"exact_shapes": False, "overflow": Overflow.DROP}
WAYS = [(Mode.LL, Layout.EXPERT_MAJOR), (Mode.HT, Layout.FLAT), (Mode.HT, Layout.GROUPED), (Mode.LL, Layout.RANK_MAJOR)]
COMPILE_S = 240


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


def case_of(most: int = 24) -> RoutingCase:
    return RoutingCase(9, 4, 256, (most - 4,), "uniform", draw_seed(), max_tokens=most)


@pytest.mark.parametrize("story", [stories.replayed_graph, partial(stories.phases_in_a_graph, replays=40)])
@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_graphs(alone: World, mode: Mode, layout: Layout, story: Any) -> None:
    alone.run(run_story, "nvlink", story, case_of(), {"mode": mode, "layout": layout, **NO_HOST_WAIT})


@pytest.mark.parametrize(
    "story",
    [
        stories.delayed,
        calls.previous_handle,
        calls.two_in_flight,
        calls.inputs_may_be_reused,
        calls.bad_arguments,
        calls.wide_ids,
        calls.received,
        devices.any_stream,
        devices.never_waits_for_the_device,
        gradients.backward_matches_reference,
    ],
)
@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_stories(alone: World, mode: Mode, layout: Layout, story: Any) -> None:
    alone.run(run_story, "nvlink", story, case_of(), {"mode": mode, "layout": layout})


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_weights_given_at_combine(alone: World, mode: Mode) -> None:
    overrides = {"mode": mode, "layout": Layout.EXPERT_MAJOR, "exact_combine": True}
    alone.run(run_story, "nvlink", calls.weights_at_home, case_of(), overrides)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("scales", [None, ScaleFormat.FP32, ScaleFormat.UE8M0_PACKED])
def test_deep_ep_low_latency(alone: World, scales: ScaleFormat | None, hooked: bool) -> None:
    case = RoutingCase(8, 3, 256, (6,), "single_none", draw_seed(), max_tokens=8)
    alone.run(deep_ep_steps.run, deep_ep_steps.ll_steps, case, "nvlink", scales, hooked)


def test_deep_ep_high_throughput(alone: World) -> None:
    case = RoutingCase(8, 3, 128, (6,), "single_none", draw_seed(), max_tokens=8)
    alone.run(deep_ep_steps.run, deep_ep_steps.ht_waits_once, case, "nvlink")
    for asynchronous in (False, True):
        alone.run(deep_ep_steps.run, deep_ep_steps.ht_steps, case, "nvlink", asynchronous)


@pytest.mark.parametrize(("mode", "layout"), WAYS[:2])
def test_compiled_layers(alone: World, mode: Mode, layout: Layout) -> None:
    """By graphs of the compiler, and with any number of tokens."""
    chosen = {"mode": mode, "layout": layout, "timeout_s": 60.0}
    for how, more in ((How(mode="reduce-overhead", replays=True), NO_HOST_WAIT), (How(dynamic=True), {})):
        story = partial(compiled_layers, how=how)
        alone.run(run_story, "nvlink", story, case_of(), chosen | more, timeout_s=COMPILE_S)


def test_compiled_training(alone: World) -> None:
    overrides = {"mode": Mode.HT, "layout": Layout.FLAT, "timeout_s": 60.0}
    alone.run(run_story, "nvlink", partial(compiled_gradients, how=How()), case_of(), overrides, timeout_s=COMPILE_S)
