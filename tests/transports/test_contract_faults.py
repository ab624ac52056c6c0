"""The contract when peers are late, silent or dead. Nothing hangs, the error names the peer, and the rest go on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ep_kernels.types import Capabilities, Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.hosts import is_over_hosts
from tests.transports import faults, sleepers
from tests.transports.faults import SLACK_S
from tests.worlds import RankDied, World

Worlds = Callable[[int], World]
MOMENTS = ["dispatch", "dispatch sent", "combine", "barrier", "exchange"]
MODES: dict[str, dict[str, Any]] = {
    "ll": {"mode": Mode.LL},
    "ht": {"mode": Mode.HT},
    "auto": {"mode": Mode.AUTO, "layout": Layout.GROUPED, "ll_max_tokens": 2},
    "rank-major": {"mode": Mode.LL, "layout": Layout.RANK_MAJOR},
}
EXACT = {"mode": Mode.LL, "layout": Layout.EXPERT_MAJOR, "exact_combine": True}
LEAVING: list[dict[str, Any]] = [MODES["ll"], MODES["ht"], EXACT]


SILENT = [
    *((when, name) for when in ("dispatch", "combine") for name in ("ll", "ht")),
    *((when, "ll") for when in MOMENTS[3:]),  # the same in every mode
]


@pytest.mark.parametrize(("when", "mode"), SILENT)
def test_silent_rank(world: Worlds, transport: str, when: str, mode: str) -> None:
    case, victim = faults.silent_case(3, draw_seed()), 1
    seen = world(3).run(faults.one_goes_silent, transport, case, victim, when, MODES[mode])
    assert seen[victim] is None
    for loss in faults.losses(seen):
        assert loss.peer == victim
        assert not loss.gone
        assert loss.op == when
        assert faults.PATIENCE_S * 0.9 <= loss.waited_s < faults.PATIENCE_S + SLACK_S


KILLED = [
    *((when, name) for when in MOMENTS[:3] for name in MODES),
    *((when, "ll") for when in MOMENTS[3:]),  # the same in every mode
]


@pytest.mark.parametrize(("when", "mode"), KILLED)
def test_killed_rank(transport: str, when: str, mode: str) -> None:
    case, victim = faults.silent_case(3, draw_seed()), 2
    world = World(3)
    results = world.run(faults.one_dies, transport, case, victim, when, MODES[mode], may_die=(victim,))
    assert isinstance(results[victim], RankDied)
    for rank in (0, 1):
        loss, valid = results[rank]
        assert loss.peer == victim
        assert loss.gone
        assert loss.waited_s < SLACK_S, "a dead process is seen long before the deadline of 30 s"
        assert not any(valid), "every token wanted an expert of the lost rank"


@pytest.mark.parametrize("when", MOMENTS)
def test_a_rank_that_is_given_up_is_not_waited_for(world: Worlds, transport: str, when: str) -> None:
    case, victim = faults.silent_case(3, draw_seed()), 1
    seen = world(3).run(faults.one_is_given_up, transport, case, victim, when)
    for loss in faults.losses(seen):
        assert (loss.peer, loss.gone) == (victim, False)
        assert loss.waited_s < SLACK_S, "long before the deadline of 30 s"


def test_with_a_rank_that_is_given_up_nobody_is_waited_for(world: Worlds, transport: str) -> None:
    case = faults.silent_case(3, draw_seed())
    took = world(3).run(faults.one_is_given_up_while_another_is_awaited, transport, case)
    assert max(took) < SLACK_S, "long before the deadline of 30 s"


def test_killed_rank_in_inference_mode(transport: str) -> None:
    case = faults.silent_case(3, draw_seed())
    results = World(3).run(faults.one_dies_in_inference_mode, transport, case, may_die=(2,))
    for rank in (0, 1):
        loss, _ = results[rank]
        assert (loss.peer, loss.gone) == (2, True)
        assert loss.waited_s < SLACK_S


@pytest.mark.parametrize("layout", list(Layout))
def test_replicas_take_over(transport: str, layout: Layout) -> None:
    everywhere = ((0, 1, 2), (2, 0, 1), (1, 2, 0))
    case = RoutingCase(3, 2, 64, (5, 4, 3), "uniform", draw_seed(), everywhere)
    results = World(3).run(
        faults.one_dies, transport, case, 0, "dispatch", {"mode": Mode.HT, "layout": layout}, may_die=(0,)
    )
    assert isinstance(results[0], RankDied)
    assert all(all(valid) for _, valid in results[1:])


def test_two_losses_in_turn(transport: str) -> None:
    results = World(4).run(faults.two_die_in_turn, transport, faults.silent_case(4, draw_seed()), may_die=(1, 3))
    assert results[0] == results[2] == [1, 3]


def test_planned_leave(world: Worlds, transport: str) -> None:
    world(3).run(faults.planned_leave, transport, faults.silent_case(3, draw_seed()))


@pytest.mark.parametrize("when", ["dispatch", "combine", "exchange"])
def test_sleeper_hears_that_it_was_left_out(world: Worlds, transport: str, when: str) -> None:
    for seed in range(4):  # how far the others are ahead
        said = world(3).run(faults.one_is_left_out, transport, faults.silent_case(3, 1000 + seed), when)[0]
        assert said.startswith((f"{when}: rank ", "check: rank ")), said  # on GPUs `check` may be the first to say it


@pytest.mark.parametrize(
    ("overrides", "lost_by"),
    [(MODES["ht"], "deadline"), (MODES["auto"], "give_up")],
    ids=["ht", "auto"],
)
def test_sleeper_that_wakes_after_a_regroup_harms_nobody(
    world: Worlds, transport: str, overrides: dict[str, Any], lost_by: str
) -> None:
    case = faults.silent_case(3, draw_seed())
    said = world(3).run(sleepers.one_sleeps_through_a_regroup, transport, case, overrides, lost_by)[0]
    # Over hosts what the others had sent of that dispatch may still complete it, with the reference's bits.
    late = ("combine: rank ",) if is_over_hosts(transport) else ()
    assert said.startswith(("dispatch: rank ", "check: rank ", *late)), said
    assert said.endswith("has gone on in epoch 1 without this rank")


def test_set_active_is_collective(world: Worlds, transport: str) -> None:
    world(3).run(faults.rejoin_fails_without_everyone, transport, faults.silent_case(3, draw_seed()))


def test_rank_missing_at_bring_up(transport: str) -> None:
    said = World(3).run(faults.dies_in_bring_up, transport, faults.silent_case(3, 1), 1, may_die=(1,))
    assert all("ranks [1] did not arrive" in text for text in (said[0], said[2]))


@pytest.mark.parametrize("size", [2, 4])
def test_slow_rank_is_waited_for(world: Worlds, transport: str, capabilities: Capabilities, size: int) -> None:
    if not capabilities.samples:
        pytest.skip("leaves no samples")
    assert all(world(size).run(faults.late_but_in_time, transport, faults.silent_case(size, draw_seed()), 0.3))


@pytest.mark.parametrize("overrides", LEAVING, ids=["ll", "ht", "exact"])
def test_close_right_after_the_last_combine(world: Worlds, transport: str, overrides: dict[str, Any]) -> None:
    case = replace(faults.silent_case(3, draw_seed()), tokens=(3, 0, 4), max_tokens=4)
    world(3).run(faults.leaves_at_once, transport, case, overrides)


def test_close_with_a_dead_peer(transport: str) -> None:
    results = World(3).run(faults.dead_before_close, transport, faults.silent_case(3, 1), may_die=(0,))
    assert max(results[1:]) < SLACK_S
