"""Ranks in step while a layer gets weights of other checkpoints: no request ever has rows of two, and none waits long.

Queues, tables and the choice of steps are the engine's own; time, loading and the network are numbers.
"""

from __future__ import annotations

import random

import pytest

from crossdock.worker.experts.expert_tables import ExpertTables
from crossdock.worker.experts.placement import Placement
from crossdock.worker.steps.batcher import Batcher
from crossdock.worker.steps.steps import NOTHING, Proposal, Step, choose_step
from crossdock.worker.steps.work import Work
from tests.unit.test_batcher import work

E, M, LAYERS = 2, 16, (1, 2)


class Rank:
    """One rank. `cuts`: it cuts requests, unlike a worker."""

    def __init__(self, rank: int, size: int, placement: Placement, *, cuts: bool = False) -> None:
        self.batcher, self.tables, self.cuts = Batcher(), ExpertTables(placement, E, rank, None), cuts

    def propose(self, step: int, now_ns: int) -> Proposal:
        word, loaded = self.tables.progress((lambda layer: False) if self.cuts else self.batcher.has_cut)
        head = self.batcher.head(now_ns)
        return Proposal(step, *(head or NOTHING), placement=word, loaded=loaded)

    def weights(self, layer: int) -> int:
        return self.tables.weights()[LAYERS.index(layer)].number


class Group:
    """Several ranks, and which checkpoints the rows of each request met."""

    def __init__(self, rng: random.Random, size: int, *, cuts: bool = False) -> None:
        self.rng, self.size, self.now_ns, self.steps, self.version, self.number = rng, size, 0, 0, 1, 0
        self.ranks = [Rank(rank, size, self._placement(), cuts=cuts) for rank in range(size)]
        self.met: dict[Work, set[int]] = {}

    def _placement(self) -> Placement:
        rows, checkpoints = dict.fromkeys(LAYERS, tuple(range(E)) * self.size), dict.fromkeys(LAYERS, self.number)
        return Placement(self.version, self.size, rows, checkpoints)

    def load(self) -> None:
        """Another checkpoint is wanted."""
        self.version, self.number = self.version + 1, self.number + 1
        for rank in self.ranks:
            rank.tables.set_target(self._placement())

    def is_loaded(self) -> bool:
        return all(rank.weights(layer) == self.number for rank in self.ranks for layer in LAYERS)

    def ask(self, most: int) -> None:
        rank, client = self.rng.choice(self.ranks), f"c{self.rng.randrange(4)}"
        asked = work(client, self.rng.choice(LAYERS), self.rng.randint(1, most), self.now_ns)
        self.met[asked] = set()
        rank.batcher.add(asked)

    def exchange(self) -> None:
        """One exchange, and the step that it leads to."""
        self.now_ns += 10
        sent = [rank.propose(self.steps, self.now_ns).words() for rank in self.ranks]
        proposals = [Proposal.parse(words) for words in sent]
        for rank in self.ranks:
            rank.tables.apply_agreed([one.placement for one in proposals], [one.loaded for one in proposals])
        plan = choose_step(dict(enumerate(proposals)), M)
        if isinstance(plan, Step):
            self.steps += 1
            for rank in self.ranks:
                whole = rank.tables.closing == plan.layer and not rank.cuts
                for piece in rank.batcher.take(plan.layer, plan.max_tokens, self.now_ns, whole=whole):
                    self.met[piece.work].add(rank.weights(plan.layer))

    def mixed(self) -> list[Work]:
        return [one for one, met in self.met.items() if len(met) > 1]


def run(group: Group, *, most: int, rate: float, exchanges: int = 400) -> int:
    """Checkpoints one after the other under load; how many were loaded whole."""
    loaded = 0
    for _ in range(exchanges):
        if group.is_loaded():
            loaded += group.number > 0
            group.load()
        for rank in group.ranks:
            if rank.tables._wants_a_layer() and group.rng.random() < 0.3:
                rank.tables.stage(rank.tables.next_task(), None)
        while group.rng.random() < rate:
            group.ask(most)
        group.exchange()
    return loaded


@pytest.mark.parametrize("most", [12, M, 5 * M], ids=["short", "up to a step", "longer than a step"])
@pytest.mark.parametrize("rate", [0.4, 0.7])
def test_no_request_has_rows_of_two_checkpoints(most: int, rate: float) -> None:
    for seed in range(10):
        group = Group(random.Random(seed), 3)
        assert run(group, most=most, rate=rate) > 3, "under load the group gets to each checkpoint"
        assert not group.mixed()


def test_without_it_some_would_have() -> None:
    groups = [Group(random.Random(seed), 3, cuts=True) for seed in range(10)]
    for group in groups:
        run(group, most=M, rate=0.7)
    assert any(group.mixed() for group in groups)


def test_an_idle_group_switches_without_requests() -> None:
    group = Group(random.Random(), 3)
    group.load()
    assert all(rank.tables.has_pending_change() for rank in group.ranks), "they take up what is wanted"
    for _ in LAYERS:
        group.exchange()
        for rank in group.ranks:
            rank.tables.stage(rank.tables.next_task(), None)
        group.exchange()
        assert {rank.tables.closing for rank in group.ranks} <= set(LAYERS)
        assert all(rank.tables.has_pending_change() for rank in group.ranks), "else they would sleep now"
        group.exchange()
    assert group.is_loaded()
    group.exchange()
    assert not any(rank.tables.has_pending_change() for rank in group.ranks)


def test_a_request_of_many_steps_holds_one_layer_back_until_its_end() -> None:
    group = Group(random.Random(), 2)
    long, later = work("a", 1, 3 * M), work("b", 1, 2 * M)
    group.met = {long: set(), later: set()}
    group.ranks[0].batcher.add(long)
    group.load()
    group.exchange()
    for rank in group.ranks:
        rank.tables.stage(rank.tables.next_task(), None)
    group.exchange()
    group.ranks[1].batcher.add(later)
    for _ in range(2):
        assert group.ranks[0].weights(1) == 0
        group.exchange()
    assert (group.ranks[0].weights(1), group.met[long], long.num_waiting) == (1, {0}, 0)
    group.exchange()
    assert group.met[later] == {1}


def test_a_worker_of_an_older_release_says_that_it_is_ready_at_once() -> None:
    """Its word is that of a rank that is ready, and the flag is never set: the others wait for what they have cut."""
    group = Group(random.Random(), 2)
    group.load()
    group.exchange()
    new, old = (rank.tables for rank in group.ranks)
    version = group.version << 16
    new.stage(new.next_task(), None)
    assert new.progress(lambda layer: True) == (version, True)
    new.apply_agreed([version, version + 1], [True, False])
    assert new.closing == 1
    assert new.progress(lambda layer: True) == (version, True)
    new.apply_agreed([version, version + 1], [True, False])
    assert new.progress(lambda layer: False) == (version + 1, True)
    new.apply_agreed([version + 1, version + 1], [True, False])
    assert (new.weights()[0].number, new.closing) == (1, None)
    assert old.weights()[0].number == 0, "not asked"
