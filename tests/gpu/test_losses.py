"""A rank is killed or stopped while kernels run. Nothing hangs, the error names the rank and the phase, the rest go
on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase, draw_seed
from tests.gpu import losses
from tests.transports.faults import PATIENCE_S, SLACK_S, silent_case
from tests.worlds import RankDied, World

pytestmark = pytest.mark.gpu(2)
MODES: list[dict[str, Any]] = [
    {"mode": Mode.LL, "layout": Layout.EXPERT_MAJOR},
    {"mode": Mode.HT, "layout": Layout.GROUPED},
    {"mode": Mode.HT, "layout": Layout.FLAT},
    {"mode": Mode.LL, "layout": Layout.RANK_MAJOR},
]
NO_HOST_WAIT = {"exact_shapes": False, "overflow": Overflow.DROP}
NAMES = ["ll-expert-major", "ht-grouped", "ht-flat", "ll-rank-major"]


def num_ranks() -> int:
    return min(4, torch.cuda.device_count())


def phases(mode: Mode, when: str) -> set[tuple[str, str]]:
    """(operation, phase) at which survivors may miss a rank that died in its dispatch."""
    dispatch = {("dispatch", "credit"), ("dispatch", "counts"), ("dispatch", "payload")}
    combine = {("combine", "credit"), ("combine", "payload")}
    if when == losses.QUEUED:
        return dispatch
    # LL had sent its rows before it waited; HT may get to that while the process is being taken down
    return combine if mode is Mode.LL else dispatch | combine


def replicated_case(size: int) -> RoutingCase:
    """Every rank has a copy of each expert."""
    everywhere = tuple(tuple((slot + rank) % 3 for slot in range(3)) for rank in range(size))
    return RoutingCase(3, 2, 64, (5,) * size, "uniform", draw_seed(), everywhere)


@pytest.mark.parametrize("when", [losses.SPINNING, losses.QUEUED])
@pytest.mark.parametrize("overrides", MODES, ids=NAMES)
def test_rank_killed_in_its_dispatch(overrides: dict[str, Any], when: str) -> None:
    size = num_ranks()
    case, victim = replicated_case(size), size - 1
    world = World(size)
    results = world.run(losses.killed, "nvlink", case, victim, when, overrides | NO_HOST_WAIT, may_die=(victim,))
    assert isinstance(results[victim], RankDied)
    for rank in range(size - 1):
        loss, valid = results[rank]
        assert loss.peer == victim
        assert loss.gone
        assert (loss.op, loss.phase) in phases(overrides["mode"], when)
        assert loss.waited_s < SLACK_S, "a dead process is seen long before the deadline of 30 s"
        assert all(valid), "every expert has a copy on each rank"


@pytest.mark.parametrize("overrides", MODES, ids=NAMES)
def test_graph_goes_on_without_a_dead_rank(overrides: dict[str, Any]) -> None:
    size = num_ranks()
    world = World(size)
    results = world.run(
        losses.graph_outlives_a_rank, "nvlink", replicated_case(size), 0, overrides | NO_HOST_WAIT, may_die=(0,)
    )  # fmt: skip
    assert isinstance(results[0], RankDied)
    for loss in results[1:]:
        assert (loss.peer, loss.gone, loss.op) == (0, True, "dispatch")
        assert loss.waited_s < SLACK_S


@pytest.mark.parametrize("when", [losses.BEFORE_DISPATCH, losses.BEFORE_COMBINE])
@pytest.mark.parametrize("overrides", MODES[:2], ids=NAMES[:2])
def test_rank_stopped_and_continued(overrides: dict[str, Any], when: str) -> None:
    size, victim = num_ranks(), 0
    world = World(size)
    seen = world.run(
        losses.stopped, "nvlink", silent_case(size, draw_seed()), victim, when, overrides | NO_HOST_WAIT
    )  # fmt: skip
    world.close()
    assert seen[victim] is None
    for loss in seen[1:]:
        assert loss.peer == victim
        assert not loss.gone
        assert loss.op == when.rsplit(maxsplit=1)[-1]
        assert PATIENCE_S * 0.9 <= loss.waited_s < PATIENCE_S + SLACK_S
