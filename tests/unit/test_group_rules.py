"""What must hold after any sequence of events, however wild: random runs of the group machine."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from crossdock.control.group.group import advance, new_group
from crossdock.control.group.group_state import (
    Event,
    Group,
    Heartbeat,
    Leave,
    Phase,
    Prior,
    Publish,
    PublishRegion,
    Ready,
    Refuse,
    Register,
    Settings,
    Tick,
    Worker,
)
from crossdock.control.group.ranks import Place
from crossdock.control.placement import views
from crossdock.protocol.v1 import control_pb2 as pb

UIDS = [f"{host}/{local}" for host in "ab" for local in range(3)]
uids = st.sampled_from(UIDS)
incarnations = st.integers(1, 3)
regions = st.sampled_from([b"", b"one", b"two"])
priors = st.none() | st.builds(Prior, st.integers(1, 9), st.integers(0, 5), regions, st.booleans())


class AnyEvents(RuleBasedStateMachine):
    """Workers that follow the protocol, mixed with ones that send anything."""

    @initialize(world_size=st.integers(1, 4))
    def start(self, world_size: int) -> None:
        self.now = 0.0
        self.group = new_group(Settings(world_size, lease_s=3, form_timeout_s=20, recover_s=5), self.now)
        self.tables: dict[int, tuple[tuple[str, int, bytes], ...]] = {}

    def take(self, event: Event) -> bool:
        """One advance, with everything that holds for a single step. Returns whether it was accepted."""
        before = self.group
        self.group, effects = advance(before, event, self.now)
        refused = [effect for effect in effects if isinstance(effect, Refuse)]
        if refused:
            assert self.group is before
            assert len(effects) == 1
            assert refused[0].message
        assert self.group.epoch >= before.epoch
        ahead = isinstance(event, Heartbeat) and event.epoch > before.epoch
        if self.group.epoch > before.epoch and not (ahead or isinstance(event, Register) or before.recovering):
            assert self.group.epoch == before.epoch + 1, "one disruption, one epoch"
        if (self.group.phase, self.group.epoch) != (before.phase, before.epoch):
            assert Publish() in effects
        self._check_a_disruption_ends_the_epoch(before)
        self._check_ranks_are_stable(before)
        self._check_a_table_never_changes()
        self.holds()
        return not refused

    def _check_a_disruption_ends_the_epoch(self, before: Group) -> None:
        who = [(m.uid, m.worker.incarnation) for m in before.members]
        if before.sealed and who != [(m.uid, m.worker.incarnation) for m in self.group.members]:
            assert self.group.epoch > before.epoch
        if self.group.epoch > before.epoch and self.group.phase is not Phase.SERVING:
            assert not any(m.region or m.ready for m in self.group.members), "a new epoch starts from nothing"

    def _check_ranks_are_stable(self, before: Group) -> None:
        if before.placed:
            ranks = {(m.uid, m.worker.incarnation): m.rank for m in before.members}
            assert all(ranks.get((m.uid, m.worker.incarnation), m.rank) == m.rank for m in self.group.members)

    def _check_a_table_never_changes(self) -> None:
        if self.group.sealed:
            table = tuple((m.uid, m.worker.incarnation, m.region) for m in self.group.members)
            assert self.tables.setdefault(self.group.epoch, table) == table, "two tables under one epoch"

    @rule(uid=uids, incarnation=incarnations, prior=priors, model=st.sampled_from(["tiny", "tiny", "tiny", "big"]))
    def register(self, uid: str, incarnation: int, prior: Prior | None, model: str) -> None:
        host, _, local = uid.partition("/")
        place = Place(uid, host, int(local))
        self.take(Register(Worker(place, incarnation, "x:1", "x:2", "cpu", "abi", model), prior))

    @rule(uid=uids, incarnation=incarnations, back=st.integers(-1, 2), region=regions)
    def publish(self, uid: str, incarnation: int, back: int, region: bytes) -> None:
        self.take(PublishRegion(uid, incarnation, max(0, self.group.epoch - back), region))

    @rule(uid=uids, incarnation=incarnations, back=st.integers(-1, 2))
    def ready(self, uid: str, incarnation: int, back: int) -> None:
        self.take(Ready(uid, incarnation, max(0, self.group.epoch - back)))

    @rule(uid=uids, incarnation=incarnations, back=st.integers(-1, 2), silent=st.sets(st.integers(0, 5)))
    def heartbeat(self, uid: str, incarnation: int, back: int, silent: set[int]) -> None:
        self.take(Heartbeat(uid, incarnation, max(0, self.group.epoch - back), tuple(silent)))

    @rule(index=st.integers(0, 3), region=st.sampled_from([b"one", b"two"]))
    def a_member_publishes(self, index: int, region: bytes) -> None:
        for member in self.group.members[index : index + 1]:
            self.take(PublishRegion(member.uid, member.worker.incarnation, self.group.epoch, region))

    @rule()
    def all_members_publish(self) -> None:
        for member in self.group.members:
            self.take(PublishRegion(member.uid, member.worker.incarnation, self.group.epoch, b"one"))

    @rule(index=st.integers(0, 3))
    def a_member_gets_ready(self, index: int) -> None:
        for member in self.group.members[index : index + 1]:
            self.take(Ready(member.uid, member.worker.incarnation, self.group.epoch))

    @rule(uid=uids, incarnation=incarnations)
    def leave(self, uid: str, incarnation: int) -> None:
        self.take(Leave(uid, incarnation))

    @rule(seconds=st.floats(0, 1.4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(Tick())

    @rule(num_ticks=st.integers(1, 20))
    def wait_while_all_beat(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self.now += 0.5
            for member in self.group.members:
                assert self.take(Heartbeat(member.uid, member.worker.incarnation, self.group.epoch))
            self.take(Tick())

    @rule()
    def everybody_does_the_right_thing(self) -> None:
        """From any state, well-behaved workers get to SERVING, and no member is thrown out on the way."""
        size = self.group.world_size
        kind = self.group.members[0].worker.model if self.group.members else "tiny"
        for uid in UIDS:
            if not self.group.full and self.group.member(uid) is None:
                host, _, local = uid.partition("/")
                place = Place(uid, host, int(local))
                assert self.take(Register(Worker(place, 1, "x:1", "x:2", "cpu", "abi", kind)))
        assert self.group.full
        if self.group.recovering:  # some remember a group and some do not: it hears all who may still report
            self.wait_while_all_beat(12)
        if self.group.phase is Phase.FORMING:  # epochs broke in a row: the pause before the next one
            self.wait_while_all_beat(20)
        if self.group.phase is not Phase.SERVING and not self.group.sealed:
            for member in self.group.members:
                region = member.region or b"mine"
                assert self.take(PublishRegion(member.uid, member.worker.incarnation, self.group.epoch, region))
        for member in self.group.members:
            assert self.take(Ready(member.uid, member.worker.incarnation, self.group.epoch))
        assert self.group.phase is Phase.SERVING
        assert len(self.group.members) == size

    @rule()
    def control_plane_restarts_while_serving(self) -> None:
        """A serving group that tells its story serves on at the same epoch, whatever the order of the reports."""
        if self.group.phase is not Phase.SERVING:
            return
        old = self.group
        self.group = new_group(old.settings, self.now)
        for member in sorted(old.members, key=lambda one: one.worker.incarnation):
            self.group, _ = advance(
                self.group, Register(member.worker, Prior(old.epoch, member.rank, member.region, True)), self.now
            )
        assert self.group.phase is Phase.SERVING
        assert self.group.epoch == old.epoch
        told = [(m.uid, m.rank, m.region) for m in self.group.members]
        assert told == [(m.uid, m.rank, m.region) for m in old.members]

    @invariant()
    def holds(self) -> None:
        group = self.group
        ranks = [member.rank for member in group.members]
        assert ranks == sorted(set(ranks)), "two members on one rank"
        assert all(0 <= rank < group.world_size for rank in ranks)
        assert len({member.uid for member in group.members}) == len(group.members)
        if group.phase is not Phase.FORMING:
            assert group.full
            assert group.placed
        if group.phase is Phase.SERVING:
            assert all(member.ready and member.region for member in group.members)
        assert len({member.worker.model for member in group.members}) <= 1

    @invariant()
    def views_tell_the_truth(self) -> None:
        group = self.group
        for regions in (False, True):
            view = views.group_view(group, 1, self.now, {}, regions=regions)
            assert [member.rank for member in view.members] == [member.rank for member in group.members]
            assert sorted([*view.lost_ranks, *(m.rank for m in view.members)]) == list(range(view.world_size))
            with_region = [member for member in view.members if member.region]
            assert len(with_region) == (view.world_size if regions and group.sealed else 0)
            if view.state == pb.SERVING:
                assert all(member.ready for member in view.members)


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_name_at_another_host_says_what_may_be_wrong() -> None:
    def worker(incarnation: int, address: str) -> Register:
        return Register(Worker(Place("vm/0", "vm", 0), incarnation, address, "x:2", "cpu", "abi", "tiny"), None)

    group, _ = advance(new_group(Settings(2, 3.0, 600.0, 5.0), 0.0), worker(1, "10.0.0.1:7500"), 0.0)
    again, _ = advance(group, worker(2, "10.0.0.1:7501"), 1.0)
    assert again.reason == "rank 0 (vm/0) replaced: a newer process of it registered"
    twin, _ = advance(group, worker(2, "10.0.0.2:7500"), 1.0)
    assert twin.reason.endswith("at 10.0.0.2:7500; if two hosts have one name, set worker.uid on one of them")
