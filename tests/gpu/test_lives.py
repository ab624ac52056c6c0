"""A graph that outlives its communicator does no harm. (What communicators leave behind: test_memory.py.)"""

from __future__ import annotations

import pytest
import torch

from ep_kernels.types import Mode
from tests.cases import draw_seed
from tests.gpu import lives
from tests.transports.faults import SLACK_S, silent_case
from tests.worlds import World

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_graph_outlives_its_communicator(mode: Mode) -> None:
    world = World(min(4, torch.cuda.device_count()))
    case = silent_case(world.size, draw_seed())
    for took_s in world.run(lives.closed_under_a_graph, "nvlink", case, mode):
        assert took_s < SLACK_S / 3
    world.close()


def test_one_rank_closes_under_a_graph() -> None:
    world = World(min(4, torch.cuda.device_count()))
    case, deadline = silent_case(world.size, draw_seed()), 2.0
    results = world.run(lives.one_closes_under_a_graph, "nvlink", case, deadline)
    world.close()
    assert results[0][1] < deadline + SLACK_S
    for error, took_s in results[1:]:
        assert "rank 0 did not deliver" in error
        assert took_s < deadline + SLACK_S
