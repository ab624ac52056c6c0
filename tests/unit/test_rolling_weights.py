"""Another checkpoint for a group that serves: the control plane's side, as values."""

from __future__ import annotations

import pytest

from crossdock.common.call_errors import InvalidArgument
from crossdock.common.config import PlacementConfig
from crossdock.control.placement.checkpoints import Checkpoints, Ref, experts_of, number_of, weights_of
from crossdock.control.placement.expert_reports import Kind, Report
from crossdock.control.placement.placement_manager import PlacementManager
from crossdock.protocol.v1 import control_pb2 as pb

R, E, LAYERS = 2, 4, (1, 3, 5)
NEW = ("/models/new", "beef")


class Group:
    """Ranks that load layer by layer, together, as workers do."""

    def __init__(self, manager: PlacementManager) -> None:
        self.manager, self.held, self.switched, self.now = manager, manager.tables, 0, 1.0
        self.told, self.known = manager.version, manager.checkpoints

    def tell(self, rank: int, error: str = "") -> None:
        self.now += 1
        before = self.held
        goal = self.manager.tables
        to_switch = self.switched + sum(a != b for a, b in zip(before, goal, strict=True))
        layers = tuple(table[rank] for table in before)
        report = Report(self.manager.version, self.switched, to_switch, error, layers, ((),) * len(layers), self.known)
        self.manager.record_report(rank, report, self.now)

    def switch(self, layers: int) -> None:
        """So many layers more, then all ranks tell."""
        self.known = self.manager.checkpoints
        goal = list(self.held)
        changed = [n for n, (a, b) in enumerate(zip(self.held, self.manager.tables, strict=True)) if a != b]
        for number in changed[:layers]:
            goal[number] = self.manager.tables[number]
        self.held, self.switched = tuple(goal), self.switched + len(changed[:layers])
        version = self.manager.version
        for rank in range(R):
            if self.manager.version == version:
                self.tell(rank)

    def arrive(self) -> None:
        """Until there is nothing more to do."""
        for _ in range(10):
            self.switched = 0
            self.switch(len(LAYERS))
            self.now += 10
            if not self.manager.settle(self.now) and not self.manager.is_moving:
                return
        raise AssertionError(self.manager)


def group() -> Group:
    manager = PlacementManager(PlacementConfig(), R)
    manager.set_kind(Kind(E, LAYERS))
    manager.form(["a", "b"], 0.0)
    return Group(manager)


def test_weight_ids() -> None:
    table = ((0, 3), (1, 2))
    assert weights_of(table, E, 2) == ((8, 11), (9, 10))
    assert experts_of(weights_of(table, E, 2), E) == table
    assert number_of(weights_of(table, E, 2), E) == 2
    assert number_of(((), (5,)), E) == 1


def test_all_layers_end_on_the_new_checkpoint() -> None:
    made = group()
    manager, before = made.manager, made.manager.tables
    assert manager.load(*NEW, 1.0) == 1
    assert manager.numbers == (1, 1, 1)
    assert experts_of(manager.tables[0], E) == before[0]
    made.switch(2)
    assert manager.is_moving
    made.arrive()
    assert manager.last_change.startswith("loaded in")
    assert manager.numbers == (1, 1, 1)
    known = manager.checkpoints
    assert (known.settled, known.wanted, known.refs) == (1, 1, (Ref(1, *NEW),))
    assert manager.load("/models/third", "cafe", 100.0) == 2
    made.arrive()
    assert [ref.number for ref in manager.checkpoints.refs] == [1, 2]
    assert manager.load("/models/fourth", "f00d", 200.0) == 3
    assert [ref.number for ref in manager.checkpoints.refs] == [2, 3], "the first is in use no more"


@pytest.mark.parametrize("switched", [0, 1, 2])
def test_a_rank_that_cannot_load_turns_all_back(switched: int) -> None:
    made = group()
    manager = made.manager
    manager.load(*NEW, 1.0)
    made.switch(switched)
    made.tell(1, error="layer 3: hidden_size: expected 64, got 128")
    assert "rank 1: layer 3: hidden_size: expected 64, got 128" in manager.last_change
    made.arrive()
    assert manager.numbers == (0, 0, 0)
    assert manager.last_change.startswith("rolled back: rank 1")
    assert manager.checkpoints.wanted == manager.checkpoints.settled == 0
    assert manager.load(*NEW, 500.0) == 2, "workers may know number 1 as something that failed"


def test_what_layers_still_have_is_known_while_another_one_is_loaded() -> None:
    """Ranks refuse tables with a checkpoint that they know nothing of, and no epoch could begin with these."""
    made = group()
    manager = made.manager
    manager.load(*NEW, 1.0)
    made.switch(1)
    made.tell(1, error="layer 3: unreadable")
    made.switched = 0
    made.switch(len(LAYERS))
    assert not manager.is_moving
    assert manager.load("/models/third", "cafe", 50.0) == 2
    manager.form(["a", "b"], 60.0)
    assert manager.numbers == (1, 0, 0)
    assert [ref.number for ref in manager.checkpoints.refs] == [1, 2]


@pytest.mark.parametrize("switched", [0, 1, 2])
def test_an_epoch_that_ends_in_between_begins_with_what_was_reached_and_goes_on(switched: int) -> None:
    made = group()
    manager = made.manager
    manager.load(*NEW, 1.0)
    made.switch(switched)
    manager.form(["a", "b"], 5.0)
    goal = manager.epoch_goal
    assert goal is not None
    assert [number_of(table, E) for table in goal.tables] == [1] * switched + [0] * (3 - switched)
    made.held = goal.tables
    made.arrive()
    assert manager.numbers == (1, 1, 1)
    assert manager.last_change.startswith("loaded in")


@pytest.mark.parametrize("switched", [1, 2, 3])
def test_a_new_leader_ends_on_one_checkpoint(switched: int) -> None:
    made = group()
    made.manager.load(*NEW, 1.0)
    made.switch(switched)
    left = made.manager
    new = PlacementManager(PlacementConfig(), R)
    new.set_kind(Kind(E, LAYERS))
    new.learn(made.known)
    new.recovered(["a", "b"])
    goal, version = left.tables, left.version
    for rank in range(R):  # the ranks go on by themselves
        layers = tuple(table[rank] for table in goal)
        new.record_report(rank, Report(version, 3, 3, "", layers, ((),) * 3, made.known), 9.0)
    assert new.numbers == (1, 1, 1)
    made.manager, made.held = new, new.tables
    made.arrive()
    assert new.checkpoints.settled == new.checkpoints.wanted == 1


def test_a_new_leader_that_must_form_at_once_keeps_what_was_settled() -> None:
    made = group()
    made.manager.load(*NEW, 1.0)
    made.arrive()
    new = PlacementManager(PlacementConfig(), R)
    new.set_kind(Kind(E, LAYERS))
    new.learn(made.manager.checkpoints)
    new.form(["a", "b"], 5.0)
    assert new.numbers == (1, 1, 1)
    old = Checkpoints(1, 0, 0, ())
    new.learn(old)
    assert new.checkpoints == made.manager.checkpoints, "an older state is not learnt"


def test_what_a_new_leader_is_told_late_undoes_nothing() -> None:
    """Its ranks know a state of a high version, of a group that it had to form anew, and repeat it once more."""
    new = PlacementManager(PlacementConfig(), R)
    new.set_kind(Kind(E, LAYERS))
    known = Checkpoints(57, 1, 1, (Ref(1, "/models/before", "f"),))
    new.learn(known)
    new.form(["a", "b"], 5.0)
    assert new.load(*NEW, 6.0) == 2
    new.learn(known)
    assert new.checkpoints.wanted == 2
    made = Group(new)
    made.arrive()
    assert new.numbers == (2, 2, 2)
    assert new.checkpoints.settled == new.checkpoints.wanted == 2


@pytest.mark.parametrize("remembers", [False, True], ids=["started again", "cut off"])
def test_a_group_whose_workers_have_all_left(remembers: bool) -> None:
    """Those that are started again have the checkpoint of their config, perhaps of another model; those that were only
    cut off know better."""
    made = group()
    manager = made.manager
    manager.load(*NEW, 1.0)
    made.arrive()
    before, known = manager.tables, manager.checkpoints
    manager.emptied()
    if remembers:
        manager.learn(known)
    manager.form(["a", "b"], 50.0)
    assert manager.numbers == (int(remembers),) * 3
    assert [experts_of(table, E) for table in manager.tables] == [experts_of(table, E) for table in before]
    assert manager.load("/models/third", "cafe", 100.0) == 2, "someone may know number 1"


def test_moves_keep_the_checkpoint() -> None:
    made = group()
    made.manager.load(*NEW, 1.0)
    made.arrive()
    snapshot = made.manager.snapshot(50.0)
    assert snapshot is not None
    assert max(max(held) for table in snapshot.tables for held in table) < E
    plan = snapshot.rebalance()
    turned = tuple(tuple(held[::-1] for held in table) for table in plan.before)
    assert made.manager.start(type(plan)(plan.base, plan.before, turned, 2.0, 1.0, 1), 60.0)
    assert made.manager.numbers == (1, 1, 1)


@pytest.mark.parametrize(
    "message",
    [
        pb.Checkpoints(version=1, wanted=3),
        pb.Checkpoints(version=1 << 40),
        pb.Checkpoints(refs=[pb.CheckpointRef(number=0)]),
        pb.Checkpoints(refs=[pb.CheckpointRef(number=1 << 20)]),
        pb.Checkpoints(refs=[pb.CheckpointRef(number=1, path="a\nb")]),
        pb.Checkpoints(refs=[pb.CheckpointRef(number=1, path="a" * 5000)]),
        pb.Checkpoints(refs=[pb.CheckpointRef(number=number) for number in range(1, 12)]),
    ],
)
def test_wrong_messages_are_refused(message: pb.Checkpoints) -> None:
    with pytest.raises(InvalidArgument, match="checkpoints"):
        Checkpoints.parse(message, 1 << 20)


def test_a_message_comes_back() -> None:
    known = Checkpoints(7, 1, 2, (Ref(1, "/a", "x"), Ref(2, "/b", "y")))
    assert Checkpoints.parse(known.message(), 7) == known


@pytest.mark.parametrize("heard", [(1, 0), (0, 1)])
def test_a_new_leader_of_ranks_that_heard_different_things(heard: tuple[int, int]) -> None:
    """The old one died while it told them: the ranks alone never come to agree."""
    made = group()
    before, version = made.manager.tables, made.manager.version
    made.manager.load(*NEW, 1.0)
    new = PlacementManager(PlacementConfig(), R)
    new.set_kind(Kind(E, LAYERS))
    new.learn(made.manager.checkpoints)
    new.recovered(["a", "b"])
    for second in (1.0, 2.0, 4.0):
        for rank in range(R):
            layers = tuple(table[rank] for table in before)
            told = Report(version + heard[rank], 0, 3 * heard[rank], "", layers, ((),) * 3)
            new.record_report(rank, told, second)
            assert (new.version > 0) == (second > 3.0 and new.is_moving)
    assert new.version == made.manager.version + 1
    assert new.tables == before
    made.manager, made.held, made.known = new, before, new.checkpoints
    made.arrive()
    assert new.numbers == (1, 1, 1)
