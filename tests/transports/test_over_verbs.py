"""A short form of the contract over hosts by `verbs`, in ranks that find a libibverbs of our own (tests/fake_verbs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels.types import Layout, Mode
from tests import fake_verbs
from tests.cases import RoutingCase, cases, draw_seed
from tests.transports import calls, faults, gradients
from tests.transports.faults import PATIENCE_S, SLACK_S, Loss, lose, meet, silent_case
from tests.transports.steps import Place, check_step, next_case, run_cases, run_story
from tests.transports.test_contract_calls import case_of
from tests.transports.test_over_hosts import run_counted
from tests.worlds import RankDied, World

pytestmark = pytest.mark.skipif(bool(fake_verbs.missing()), reason=fake_verbs.missing())
VERBS, SHUFFLED = "cpu-verbs-halves", "cpu-shuffled_verbs-each"


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[[], World]]:
    """world(): three ranks that have the fake."""
    fake_verbs.LIBRARY.build()  # once, and not within what a world waits for its ranks
    made = World(3)

    def ready() -> World:
        made.run(with_fake)
        return made

    yield ready
    made.close()


def with_fake(rank: int, size: int, store: Any) -> None:
    """In a rank."""
    fake_verbs.load()


def device_fails(rank: int, size: int, store: Any, case: RoutingCase, kind: int) -> list[Loss]:
    """The device of rank 2, alone on its host, fails in the middle of steps, three times: everybody names a rank at
    once, and set_active of all makes queue pairs anew. What was seen."""
    place, seen = Place(rank, size, store, VERBS), []
    fake = fake_verbs.load()
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        for turn in range(3):
            for number in range(3):
                check_step(comm, next_case(case, 10 * turn + number))
            comm.barrier()
            if rank == 2:
                fake.event(0, kind)
            seen.append(lose(lambda: check_step(comm, next_case(case, 99))))
            meet(store, rank, size, f"seen {turn}")
            comm.set_active([True] * size, turn + 1)
        check_step(comm, next_case(case, 50))
        comm.barrier()
    return seen


@pytest.mark.parametrize(("over", "layout"), [*[(VERBS, layout) for layout in Layout], (SHUFFLED, Layout.GROUPED)])
def test_every_kind_of_routing(world: Callable[[], World], over: str, layout: Layout) -> None:
    steps = cases(3, 9, hidden_size=136, num_experts=9, topk=3)
    world().run(run_cases, over, steps, {"layout": layout, "mode": Mode.AUTO, "ll_max_tokens": 4}, (0, 9, None, 3))


@pytest.mark.parametrize("story", [calls.previous_handle, calls.two_in_flight, gradients.backward_matches_reference])
def test_stories(world: Callable[[], World], story: Any) -> None:
    fields = {"mode": Mode.LL, "layout": Layout.EXPERT_MAJOR}
    world().run(run_story, SHUFFLED, story, case_of(3, "single_none"), fields)


def test_iterations(world: Callable[[], World]) -> None:
    case = replace(case_of(3, hidden_size=16), topk=3, tokens=(0,) * 3, num_experts=6)
    overrides = {"mode": Mode.AUTO, "layout": Layout.GROUPED, "dtype": torch.float32, "ll_max_tokens": 3}
    world().run(run_counted, VERBS, case, overrides, 600)


@pytest.mark.parametrize("when", ["dispatch", "combine"])
def test_killed_rank(world: Callable[[], World], when: str) -> None:
    results = world().run(faults.one_dies, VERBS, silent_case(3, draw_seed()), 2, when, {}, may_die=(2,))
    assert isinstance(results[2], RankDied)
    for loss, _ in results[:2]:
        assert (loss.peer, loss.gone) == (2, True)
        assert loss.waited_s < SLACK_S


@pytest.mark.parametrize("kind", [fake_verbs.PAIR_FATAL, fake_verbs.DEVICE_FATAL, fake_verbs.QUEUE_ERROR])
def test_a_device_that_fails(world: Callable[[], World], kind: int) -> None:
    for rank, seen in enumerate(world().run(device_fails, silent_case(3, draw_seed()), kind)):
        for loss in seen:
            assert loss.gone
            assert loss.peer == 2 or (rank == 2 and loss.peer in (0, 1))
            assert loss.waited_s < PATIENCE_S
