"""The contract of calls: handles, requests, arguments, several communicators, gradients, life. For every transport."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels import MoECommunicator
from ep_kernels.types import Capabilities, Layout, Mode, ScaleFormat
from tests.cases import RoutingCase, draw_seed, replicated
from tests.transports import calls, devices, gradients, lives
from tests.transports.steps import run_story
from tests.worlds import World

Worlds = Callable[[int], World]
Story = Callable[[MoECommunicator, RoutingCase], Any]
LAYOUTS = list(Layout)
LL_HT = [Mode.LL, Mode.HT]
WAYS = [(mode, layout) for mode in LL_HT for layout in LAYOUTS]
EACH_LAYOUT = [(Mode.HT if layout in (Layout.FLAT, Layout.GROUPED) else Mode.LL, layout) for layout in LAYOUTS]
ANY_LAYOUT: list[Story] = [
    calls.previous_handle,
    calls.two_in_flight,
    calls.handles_of_different_steps,
    calls.dual_batch,
    gradients.backward_matches_reference,
]
ONE_CALL: list[Story] = [
    calls.inputs_may_be_reused,
    calls.expired_views,
    calls.bad_arguments,
    calls.wide_ids,
    calls.sampled,
    calls.received,
]


def case_of(size: int, kind: str = "uniform", **changes: Any) -> RoutingCase:
    tokens = tuple((3 * rank + 2) % 7 for rank in range(size))
    return replace(RoutingCase(2 * size + 1, 3, 64, tokens, kind, draw_seed(), max_tokens=6), **changes)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
@pytest.mark.parametrize("story", ANY_LAYOUT)
def test_stories_of_every_layout(world: Worlds, transport: str, story: Story, mode: Mode, layout: Layout) -> None:
    case = case_of(3, "single_none")
    world(3).run(run_story, transport, story, case, {"mode": mode, "layout": layout})


@pytest.mark.parametrize("exact_shapes", [True, False])
@pytest.mark.parametrize("story", [calls.previous_handle, calls.two_in_flight, gradients.backward_matches_reference])
def test_stories_with_quirks(world: Worlds, transport: str, story: Story, exact_shapes: bool) -> None:
    case = case_of(4, experts=replicated(4, 9, 4, draw_seed()))
    overrides = {"mode": Mode.HT, "layout": Layout.GROUPED, "exact_shapes": exact_shapes, "expert_alignment": 4}
    if story is calls.previous_handle:
        overrides |= {"quantize": True, "max_in_flight": 3}
    world(4).run(run_story, transport, story, case, overrides)


@pytest.mark.parametrize(("mode", "layout"), EACH_LAYOUT)
@pytest.mark.parametrize("story", ONE_CALL)
def test_stories_of_one_call(
    world: Worlds, transport: str, capabilities: Capabilities, story: Story, mode: Mode, layout: Layout
) -> None:
    if story is calls.sampled and not capabilities.samples:
        pytest.skip("leaves no samples")
    case = case_of(2, tokens=(4, 3))
    world(2).run(run_story, transport, story, case, {"mode": mode, "layout": layout})


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_too_many_in_flight(world: Worlds, transport: str, max_in_flight: int) -> None:
    overrides = {"max_in_flight": max_in_flight}
    world(3).run(run_story, transport, calls.too_many_in_flight, case_of(3), overrides)


def test_steps_of_different_sizes(world: Worlds, transport: str, capabilities: Capabilities) -> None:
    if capabilities.device_type == "cuda":
        pytest.skip("LL and HT wait for each other on the device: a PeerTimeout")
    overrides = {"mode": Mode.AUTO, "layout": Layout.GROUPED, "ll_max_tokens": 6}
    case = case_of(3, max_tokens=8)
    world(3).run(run_story, transport, calls.steps_of_different_sizes, case, overrides)


@pytest.mark.parametrize(("mode", "layout"), [(Mode.LL, Layout.EXPERT_MAJOR), (Mode.HT, Layout.FLAT)])
def test_dropped_requests(world: Worlds, transport: str, mode: Mode, layout: Layout) -> None:
    world(3).run(run_story, transport, calls.dropped_requests, case_of(3), {"mode": mode, "layout": layout})


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_request_may_be_overtaken(world: Worlds, transport: str, mode: Mode, max_in_flight: int) -> None:
    overrides = {"mode": mode, "max_in_flight": max_in_flight}
    world(3).run(run_story, transport, calls.overtaken, case_of(3), overrides)


def test_validate(world: Worlds, transport: str) -> None:
    case = case_of(2, tokens=(4, 3))
    world(2).run(run_story, transport, calls.validates, case, {"mode": Mode.LL, "validate": True})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_weights(world: Worlds, transport: str, layout: Layout) -> None:
    case = case_of(2, tokens=(4, 3))
    world(2).run(run_story, transport, calls.nan_weights_propagate, case, {"mode": Mode.HT, "layout": layout})


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED, Layout.FLAT])
@pytest.mark.parametrize("mode", LL_HT)
def test_overflow_raises(world: Worlds, transport: str, mode: Mode, layout: Layout) -> None:
    case = case_of(3, "one_expert", tokens=(6, 6, 1))
    overrides = {"mode": mode, "layout": layout, "max_recv_rows": 4}
    dropped = world(3).run(run_story, transport, calls.overflow_raises, case, overrides)
    assert sorted(dropped) == [0, 0, 13 - 4]


@pytest.mark.parametrize("mode", LL_HT)
def test_repeated_ids_overflow(world: Worlds, transport: str, mode: Mode) -> None:
    overrides = {"mode": mode, "layout": Layout.EXPERT_MAJOR}
    world(3).run(run_story, transport, calls.repeated_ids_overflow, case_of(3, tokens=(6, 6, 6)), overrides)


@pytest.mark.parametrize("exact_shapes", [True, False])
@pytest.mark.parametrize(("mode", "layout"), WAYS)
@pytest.mark.parametrize("story", [devices.any_stream, devices.never_waits_for_the_device])
def test_stories_of_devices(
    world: Worlds, transport: str, capabilities: Capabilities, story: Story, mode: Mode, layout: Layout,
    exact_shapes: bool,
) -> None:  # fmt: skip
    if capabilities.device_type == "cpu":
        pytest.skip("its calls end with the operation, on no stream")
    overrides = {"mode": mode, "layout": layout, "exact_shapes": exact_shapes}
    world(2).run(run_story, transport, story, case_of(2, tokens=(4, 3)), overrides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_close(world: Worlds, transport: str, layout: Layout) -> None:
    world(2).run(run_story, transport, calls.closed, case_of(2, tokens=(4, 3)), {"mode": Mode.HT, "layout": layout})


def test_abort(world: Worlds, transport: str) -> None:
    world(2).run(run_story, transport, calls.aborts, case_of(2, tokens=(4, 3)), {"mode": Mode.LL})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exchange_and_doorbell(world: Worlds, transport: str, size: int) -> None:
    world(size).run(run_story, transport, calls.meetings, case_of(size), {})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients(world: Worlds, transport: str, capabilities: Capabilities, size: int, layout: Layout) -> None:
    if torch.float32 not in capabilities.dtypes:
        pytest.skip("does not carry float32")
    for mode, kind in zip(LL_HT, ("out_of_range", "uniform"), strict=True):
        case = case_of(size, kind, hidden_size=16)
        overrides = {"mode": mode, "layout": layout, "dtype": torch.float32}
        world(size).run(run_story, transport, gradients.differentiable, case, overrides)


@pytest.mark.parametrize("mode", LL_HT)
def test_two_communicators(world: Worlds, transport: str, mode: Mode) -> None:
    world(3).run(lives.two_communicators, transport, case_of(3), {"mode": mode})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_switches(world: Worlds, transport: str, layout: Layout) -> None:
    world(3).run(lives.ll_and_ht_agree, transport, case_of(3), layout)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("hidden_size", {"hidden_size": 128}),
        ("num_experts", {"num_experts": 8}),
        ("topk", {"topk": 2}),
        ("max_tokens_per_rank", {"max_tokens_per_rank": 7}),
        ("mode", {"mode": Mode.HT, "layout": Layout.EXPERT_MAJOR}),
        ("layout", {"layout": Layout.RANK_MAJOR}),
        ("quantize", {"quantize": True}),
        ("expert_map", {"experts": True}),
        ("timeout_s", {"timeout_s": 21.0}),
        ("max_in_flight", {"max_in_flight": 5}),
    ],
)
def test_mismatch_is_refused_everywhere(world: Worlds, transport: str, field: str, change: dict[str, Any]) -> None:
    case = case_of(3)
    if "experts" in change:
        change = {"expert_map": replace(case, experts=((6, 5), (4, 3, 2), (1, 0))).expert_map}
    for odd in (0, 2):
        said = world(3).run(lives.mismatch, transport, case, odd, change)
        assert len(set(said)) == 1, said
        assert said[0].startswith(f"{field}: expected ")
        assert f"on rank {odd or 1}" in said[0]
        assert "on rank 0" in said[0]


def test_epoch_mismatch_is_refused(world: Worlds, transport: str) -> None:
    said = world(3).run(lives.epoch_mismatch, transport, case_of(3))
    assert set(said) == {"bring-up: rank 1 is in epoch 1, rank 0 in epoch 0"}


def test_nothing_leaks(world: Worlds, transport: str) -> None:
    assert world(3).run(lives.born_and_closed, transport, case_of(3), 50, timeout_s=280) == [[], [], []]


@pytest.mark.slow
def test_ten_thousand_iterations(world: Worlds, transport: str) -> None:
    """Of four ranks; of two where they would share devices, whose turns would be most of the time."""
    size = 4 if transport != "nvlink" or torch.cuda.device_count() >= 4 else 2
    case = RoutingCase(6, 3, 16, (0,) * size, "uniform", draw_seed(), max_tokens=6)
    overrides = {"mode": Mode.AUTO, "layout": Layout.GROUPED, "dtype": torch.float32, "ll_max_tokens": 3}
    world(size).run(run_story, transport, lives.counted_iterations, case, overrides, timeout_s=560)


@pytest.mark.parametrize("mode", LL_HT)
def test_weights_given_at_combine(world: Worlds, transport: str, mode: Mode) -> None:
    overrides = {"mode": mode, "layout": Layout.EXPERT_MAJOR, "exact_combine": True}
    world(3).run(run_story, transport, calls.weights_at_home, case_of(3, "single_none"), overrides)
    overrides["exact_combine"] = False
    world(3).run(run_story, transport, calls.weights_at_home_need_exact_combine, case_of(3), overrides)


@pytest.mark.parametrize(
    "quirk", [{}, {"quantize": True}, {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED}]
)
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_buffers_are_known_early(world: Worlds, transport: str, layout: Layout, quirk: dict[str, Any]) -> None:
    case, overrides = case_of(3, hidden_size=256), {"mode": Mode.LL, "layout": layout, **quirk}
    world(3).run(run_story, transport, calls.buffers_before_they_are_full, case, overrides)
    world(3).run(run_story, transport, calls.buffers_of_exact_shapes, case_of(3), {"mode": Mode.HT})
