"""Who is quarantined, whatever the members say of each other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.control.group import blame
from crossdock.control.group.group import advance, new_group
from crossdock.control.group.group_state import (
    Effect,
    Event,
    Group,
    Heartbeat,
    Lost,
    Member,
    Phase,
    PublishRegion,
    Ready,
    Register,
    Settings,
    Slow,
    Tick,
    Waits,
    Worker,
)
from crossdock.control.group.ranks import Place

sizes = st.integers(3, 7)
said = st.lists(st.sets(st.integers(0, 6), min_size=1), min_size=1, max_size=12)


def worker(number: int) -> Worker:
    return Worker(Place(f"h{number}/0", f"h{number}"), 1, "a", "b", "cpu", "abi", "model")


class World:
    """A group whose members do what they should, but for what the test lets them say."""

    def __init__(self, size: int, *, elastic: bool = False, quarantine_s: float = 600.0) -> None:
        self.size, self.now = size, 0.0
        rules = Settings(size, 1e6, 1e6, 0.0, elastic=elastic, quarantine_s=quarantine_s)
        self.group: Group = new_group(rules, 0.0)
        self.lost: list[Lost] = []
        for number in range(size):
            self.take(Register(worker(number)))
        self.serve()

    def take(self, event: Event) -> tuple[Effect, ...]:
        self.now += 0.001
        self.group, effects = advance(self.group, event, self.now)
        self.lost += [effect for effect in effects if isinstance(effect, Lost)]
        return effects

    def says(self, uid: str, epoch: int, *ranks: int) -> None:
        self.take(Heartbeat(uid, 1, epoch, ranks, "PeerTimeout"))

    def a_spare_waits(self) -> None:
        self.take(Waits(worker(99)))

    def tick(self) -> None:
        self.now += blame.HOLD_S
        self.take(Tick())

    def serve(self) -> None:
        """Everybody does what the epoch asks of it."""
        for _ in range(4):
            inside: list[Member] = [m for m in self.group.members if m.rank in self.group.taking_part]
            for member in inside if self.group.active is None else []:
                self.take(PublishRegion(member.uid, 1, self.group.epoch, member.uid.encode()))
            for member in inside:
                self.take(Ready(member.uid, 1, self.group.epoch))
            for member in [m for m in self.group.members if m.rank not in self.group.taking_part]:
                self.take(Heartbeat(member.uid, 1, self.group.epoch, prepared=True))

    @property
    def quarantined(self) -> set[str]:
        return {lost.uid for lost in self.lost if lost.cause == "quarantined"}


def test_a_slow_rank_is_quarantined_only_where_a_spare_replaces_it() -> None:
    world = World(4)
    uid = world.group.members[2].uid
    world.take(Slow(uid, "slow for 60 s"))
    assert world.quarantined == set()
    assert world.group.phase is Phase.SERVING, "a slow rank that serves is better than none"
    world.a_spare_waits()
    world.take(Slow("nobody", "x"))
    assert world.quarantined == set()
    world.take(Slow(uid, "slow for 60 s"))
    assert world.quarantined == {uid}
    assert "slow for 60 s" in world.group.reason
    world.take(Slow(world.group.members[0].uid, "x"))
    assert world.quarantined == {uid}, "the group does not serve, and the spare has gone in"


def test_slowness_quarantines_nobody_where_quarantine_is_off_or_there_is_no_room() -> None:
    for size, quarantine_s in ((2, 600.0), (4, 0.0)):
        world = World(size, quarantine_s=quarantine_s)
        world.a_spare_waits()
        world.take(Slow(world.group.members[1].uid, "x"))
        assert world.quarantined == set()


@settings(deadline=None, max_examples=60)
@given(size=sizes, reports=said, elastic=st.booleans(), well=st.booleans())
def test_a_healthy_rank_is_never_quarantined_by_the_word_of_a_single_sick_one(
    size: int, reports: list[set[int]], *, elastic: bool, well: bool
) -> None:
    """It says anything, epoch after epoch; the others, where they say anything, name it."""
    world = World(size, elastic=elastic)
    for ranks in reports:
        epoch = world.group.epoch
        world.a_spare_waits()
        world.says("h0/0", epoch, *(rank for rank in ranks if rank < size))
        if well:
            world.says(f"h{1 + epoch % (size - 1)}/0", epoch, 0)
        world.tick()
        world.serve()
    assert world.quarantined <= {"h0/0"}


@settings(deadline=None, max_examples=50)
@given(size=sizes, elastic=st.booleans(), sick=st.integers(0, 6), first=st.integers(1, 6), second=st.integers(1, 6))
def test_a_rank_blamed_by_two_is_out_within_one_tick_when_a_spare_waits(
    size: int, sick: int, first: int, second: int, *, elastic: bool
) -> None:
    sick %= size
    witnesses = {(sick + number % size) % size for number in (first, second)} - {sick}
    world = World(size, elastic=elastic)
    epoch = world.group.epoch
    world.a_spare_waits()
    for witness in sorted(witnesses):
        world.says(f"h{witness}/0", epoch, sick)
    world.tick()
    assert world.quarantined == ({f"h{sick}/0"} if len(witnesses) == 2 else set())
    assert world.group.epoch == epoch + bool(witnesses)


def test_without_a_spare_a_sick_rank_keeps_its_place_and_is_named() -> None:
    world = World(4)
    for epoch in range(1, 4):
        world.says("h0/0", epoch, 2)
        world.says("h1/0", epoch, 2)
        world.serve()
    assert not world.quarantined
    assert blame.sick(world.group) == {"h2/0": "reported silent in 3 epochs by h0/0, h1/0 within 600 s"}
    world.now += 600.0
    world.take(Tick())
    assert not blame.sick(world.group)


def test_two_that_disagree_are_named_though_neither_is_quarantined() -> None:
    world = World(4)
    world.a_spare_waits()
    for number in range(world.group.settings.blame_epochs):
        assert not blame.sick(world.group), number
        world.says("h0/0", world.group.epoch, 2)
        world.serve()
    assert blame.sick(world.group) == {
        "h2/0": "reported silent in 3 epochs by h0/0 alone: either of the two may be sick"
    }
    assert not world.quarantined


def test_a_group_that_serves_is_not_disturbed_for_what_was_said_before_a_spare_came() -> None:
    world = World(4)
    world.says("h0/0", 1, 2)
    world.says("h1/0", 1, 2)
    world.serve()
    world.a_spare_waits()
    world.tick()
    assert (world.group.phase, world.quarantined) == (Phase.SERVING, set())


def test_nobody_is_quarantined_in_a_group_of_two_or_when_it_is_switched_off() -> None:
    for size, quarantine_s in ((2, 600.0), (4, 0.0)):
        world = World(size, quarantine_s=quarantine_s)
        for epoch in range(1, 6):
            world.a_spare_waits()
            for witness in range(1, size):
                world.says(f"h{witness}/0", epoch, 0)
            world.serve()
        assert not world.quarantined


def test_fewer_than_half_of_the_ranks_are_in_quarantine() -> None:
    world = World(5)
    for number in range(3):
        world.a_spare_waits()
        epoch, out = world.group.epoch, {member.rank for member in world.group.members}
        says = [m.uid for m in world.group.members if m.rank != number][:2]
        for uid in says:
            world.says(uid, epoch, number)
        world.take(Register(worker(10 + number)))
        world.serve()
        assert out
    assert len(world.quarantined) == 2


def test_many_reports_at_once_are_decided_quickly() -> None:
    """Every survivor of a large elastic group names one of many that are lost: one epoch, and no search of hours."""
    size, gone = 200, 20
    world = World(size, elastic=True)
    for number in range(gone, size):
        world.says(f"h{number}/0", 1, number % gone)
    world.tick()
    assert world.group.active == frozenset(range(gone, size))
    assert world.group.epoch == 2
