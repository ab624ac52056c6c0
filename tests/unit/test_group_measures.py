"""Time without service by cause, members by state; a replica that leads no more exports none of it."""

from __future__ import annotations

from crossdock.common.metrics import ControlMetrics
from crossdock.control.group.group import advance, new_group
from crossdock.control.group.group_state import (
    Blamed,
    Event,
    Heartbeat,
    Leave,
    Lost,
    PublishRegion,
    Ready,
    Register,
    Settings,
    Tick,
    Waits,
)
from crossdock.control.server.server import GroupMeasures
from tests.unit.test_blame import worker


class World:
    """A group and its measures, as the server uses them."""

    def __init__(self) -> None:
        self.metrics, self.now = ControlMetrics(), 0.0
        self.measures = GroupMeasures(self.metrics)
        self.group = new_group(Settings(2, 10.0, 1e6, 0.0), 0.0)
        self.register()

    def take(self, event: Event, after_s: float = 0.001) -> None:
        self.now += after_s
        before, (self.group, effects) = self.group, advance(self.group, event, self.now)
        for effect in effects:
            if isinstance(effect, Lost):
                self.measures.lost(effect.cause)
            elif isinstance(effect, Blamed):
                self.measures.blamed(effect.rank)
        self.measures.changed(before, self.group, self.now)
        self.measures.measure(self.group)

    def register(self) -> None:
        for number in range(2):
            self.take(Register(worker(number)))
        self.form()

    def form(self, after_s: float = 0.001) -> None:
        members = self.group.members
        for member in members:
            self.take(PublishRegion(member.uid, 1, self.group.epoch, b"x"), after_s)
        for member in members:
            self.take(Ready(member.uid, 1, self.group.epoch))

    def reforms(self, cause: str) -> tuple[float | None, float | None]:
        value, name = self.metrics.registry.get_sample_value, "crossdock_reform_duration_seconds"
        return value(f"{name}_count", {"cause": cause}), value(f"{name}_sum", {"cause": cause})

    def states(self) -> dict[str, float]:
        found = {}
        for family in self.metrics.registry.collect():
            if family.name == "crossdock_member_states":
                found = {one.labels["state"]: one.value for one in family.samples if one.value}
        return found


def test_a_reported_silence_costs_until_the_group_serves_again() -> None:
    world = World()
    assert world.reforms("silent") == (None, None), "forming for the first time is no re-forming"
    first, second = (member.uid for member in world.group.members)
    world.take(Heartbeat(first, 1, world.group.epoch, (1,), "PeerTimeout"))
    world.form(after_s=1.0)
    count, total = world.reforms("silent")
    assert count == 1
    assert total is not None
    assert 2.0 < total < 2.1
    assert second


def test_the_first_loss_is_the_cause() -> None:
    world = World()
    world.take(Leave(world.group.members[1].uid, 1, "drained"))
    world.take(Tick(), after_s=2.0)
    world.take(Register(worker(1)))
    world.form()
    assert world.reforms("left")[0] == 1
    assert world.reforms("lease") == (None, None)
    for _ in range(6):
        world.take(Tick(), after_s=2.0)  # a longer pause would be forgiven
    world.register()
    assert world.reforms("lease")[0] == 1


def test_members_by_state() -> None:
    world = World()
    assert world.states() == {"ready": 2}
    world.take(Waits(worker(9)))
    assert world.states() == {"ready": 2, "spare": 1}
    world.take(Leave(world.group.members[1].uid, 1, "drained"))
    assert world.states() == {"joining": 1, "spare": 1}
    world.metrics.clear_group()
    assert world.states() == {}
    groups = {"epoch", "members", "active_ranks", "sick_ranks", "group_state", "excluded_workers", "verdict_lost_ratio"}
    for family in world.metrics.registry.collect():
        if family.name.removeprefix("crossdock_") in groups:
            assert not any(one.value for one in family.samples), family.name
