"""Who answers for whom where ranks agree on a communicator: `deep_ep.agreement` without communicators."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossdock.deep_ep.agreement import Agreement, Wish
from ep_kernels import ArgumentError, ConfigError, HandleError, PeerTimeout, StoreGroup
from tests.waiting import until

PATIENCE_S = 30.0


def ranks_differ(first: int, second: int) -> str:
    return f"num_experts: expected {first} as on rank 0, got '{second} on rank 1'"


class Call(NamedTuple):
    num_experts: int


class Ranks:
    """Two ranks of one process; their threads do not look, the tests do."""

    def __init__(self) -> None:
        self.store, self.refused = dist.HashStore(), list[str]()
        self.agreements = [Agreement(self._group(rank), PATIENCE_S, self.refused.append) for rank in range(2)]
        self.threads = ThreadPoolExecutor(2)
        self.both(1)

    def _group(self, rank: int) -> Any:
        group: Any = StoreGroup(self.store, rank, 2)
        group.store = self.store
        return group

    def ask(self, rank: int, num_experts: int) -> Future[list[Wish]]:
        return self.threads.submit(self.agreements[rank].ask, Call(num_experts), rank + 5, [rank])

    def both(self, num_experts: int) -> list[Wish]:
        asked = [self.ask(rank, num_experts) for rank in range(2)]
        wishes, same = (each.result(PATIENCE_S) for each in asked)
        assert wishes == same
        return wishes

    def hears(self, step: int) -> None:
        """Until rank 1's question of that step is in the store."""
        notes = self.agreements[0]._store
        notes.wait(["step"], timedelta(seconds=PATIENCE_S))
        until(lambda: int(notes.get("step")) == step)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with mock.patch("crossdock.deep_ep.agreement.LOOK_S", 1e6):
        made = Ranks()
        yield made
        for each in made.agreements:
            each.close()
        made.threads.shutdown()


def test_what_each_rank_says_is_known_to_both(ranks: Ranks) -> None:
    for agreement in ranks.agreements:
        agreement.begin(Call(1))
    wishes = ranks.both(2)
    assert [(wish.step, wish.num_tokens, wish.free) for wish in wishes] == [(3, 5, [0]), (3, 6, [1])]
    assert [agreement.step for agreement in ranks.agreements] == [3, 3]


def test_a_rank_that_is_late_is_waited_for(ranks: Ranks) -> None:
    ranks.agreements[1].begin(Call(1))
    asked = ranks.ask(1, 2)
    ranks.hears(3)
    ranks.agreements[0].look()
    ranks.agreements[0].begin(Call(1))  # step 2, which rank 1 has behind it
    ranks.agreements[0].look()
    assert not asked.done()
    assert not ranks.refused
    assert len(ranks.ask(0, 2).result(PATIENCE_S)) == len(asked.result(PATIENCE_S)) == 2


@pytest.mark.parametrize(("mine", "text"), [
    (1, ranks_differ(1, 2)),
    (2, "communicator: expected one that exists as on rank 0, got 'a new one on rank 1'"),
])  # fmt: skip
def test_a_rank_that_has_begun_otherwise_is_answered_for_once(ranks: Ranks, mine: int, text: str) -> None:
    asked = ranks.ask(1, 2)
    ranks.hears(2)
    ranks.agreements[0].begin(Call(mine))
    ranks.agreements[0].look()
    ranks.agreements[0].look()
    with pytest.raises(ConfigError) as error:
        asked.result(PATIENCE_S)
    assert [str(error.value)] == ranks.refused == [text]


LOST = PeerTimeout(peer=1, op="dispatch", phase="counts", expected=2, seen=1, waited_s=1.0)


@pytest.mark.parametrize("error", [ArgumentError("x", "rows", "none"), HandleError("old"), torch.OutOfMemoryError()])
def test_a_step_that_has_sent_nothing_does_not_count(ranks: Ranks, error: Exception) -> None:
    ranks.agreements[0].begin(Call(1))
    ranks.agreements[0].failed(error)
    asked = ranks.ask(1, 2)
    ranks.hears(2)
    ranks.agreements[0].look()
    assert not ranks.refused
    ranks.ask(0, 2).result(PATIENCE_S)
    asked.result(PATIENCE_S)


def test_one_that_a_peer_has_ended_does(ranks: Ranks) -> None:
    ranks.agreements[0].begin(Call(3))
    ranks.agreements[0].failed(LOST)
    ranks.agreements[0].begin(Call(1))  # a host that is ahead of its GPU: the error names the call of that step
    asked = ranks.ask(1, 2)
    ranks.hears(2)
    ranks.agreements[0].look()
    with pytest.raises(ConfigError, match="num_experts: expected 3 as on rank 0"):
        asked.result(PATIENCE_S)


def test_a_rank_that_goes_on_after_its_question_is_refused_hears_nothing_of_itself(ranks: Ranks) -> None:
    test_a_rank_that_has_begun_otherwise_is_answered_for_once(ranks, 1, ranks_differ(1, 2))
    ranks.agreements[1].begin(Call(1))
    ranks.agreements[1].look()
    assert len(ranks.refused) == 1


def test_after_a_fault_ranks_count_alike_again(ranks: Ranks) -> None:
    ranks.agreements[0].begin(Call(1))  # rank 1 has missed it
    for agreement in ranks.agreements:
        agreement.restart(1)
    asked = ranks.ask(1, 2)
    ranks.hears((1 << 32) + 1)
    ranks.agreements[0].look()
    assert not ranks.refused
    assert [wish.step for wish in ranks.ask(0, 2).result(PATIENCE_S)] == [(1 << 32) + 1] * 2
    asked.result(PATIENCE_S)
