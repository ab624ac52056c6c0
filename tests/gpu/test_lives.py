"""Communicators come and go: nothing leaks, and a graph that outlives its communicator does no harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_kernels.types import Mode
from tests.cases import RoutingCase, draw_seed
from tests.gpu import lives
from tests.transports.faults import SLACK_S, silent_case
from tests.worlds import World

pytestmark = pytest.mark.gpu(2)
SPARE_BYTES = 256 << 20
"""Of a device: other processes come and go on it. Thirty leaked regions (10 MiB and more) take more."""
TRIFLE_BYTES = 64 << 10


@pytest.mark.slow
def test_a_hundred_lives_leave_nothing(world: Callable[[], World]) -> None:
    pool = world()
    tokens = tuple((3 * rank + 2) % 7 for rank in range(pool.size))
    case = RoutingCase(2 * pool.size + 1, 3, 1024, tokens, "uniform", draw_seed(), max_tokens=512)
    for more, kept_bytes, missing_bytes in pool.run(lives.born_and_closed, "nvlink", case, 100, timeout_s=240):
        assert more == []
        assert kept_bytes < TRIFLE_BYTES
        assert missing_bytes < SPARE_BYTES


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
