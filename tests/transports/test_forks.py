"""A rank's process may fork: the child is refused by name, and the parent's group does not notice."""

from collections.abc import Callable

import pytest

from tests.cases import RoutingCase, draw_seed
from tests.transports import forks
from tests.transports.faults import SLACK_S, silent_case
from tests.worlds import RankDied, World

Worlds = Callable[[int], World]


@pytest.mark.parametrize("how", forks.EXITS)
def test_the_group_does_not_notice_a_child(transport: str, how: str) -> None:
    case = RoutingCase(5, 3, 64, (4, 0, 6), "uniform", draw_seed(), max_tokens=6)
    pool = World(3)
    pids = pool.pids
    results = pool.run(forks.one_forks, transport, case, how)
    pool.close()
    said, kept = results[forks.FORKING][0]
    names = ["dispatch" if name == "wait" else name for name in forks.RAISING]
    for name, text in zip(names, said, strict=True):
        assert text.startswith(f"{name}: the communicator is that of process {pids[forks.FORKING]}, and this is a")
        assert "spawn or forkserver" in text
    assert kept == []
    assert max(took for _, took in results) < SLACK_S, "close waits for no child"


def test_a_dead_rank_is_seen_whatever_its_child_does(transport: str) -> None:
    pool = World(3)
    results = pool.run(forks.parent_dies, transport, silent_case(3, draw_seed()), may_die=(forks.VICTIM,))
    assert isinstance(results[forks.VICTIM], RankDied)
    assert max(results[0], results[2]) < SLACK_S, "long before the deadline of 30 s"


def test_children_of_children_and_of_closed_groups(world: Worlds, transport: str) -> None:
    case = RoutingCase(4, 2, 64, (3, 2), "uniform", draw_seed(), max_tokens=4)
    for pid, *said in world(2).run(forks.another_generation, transport, case):
        assert all(text.startswith(f"barrier: the communicator is that of process {pid},") for text in said)
