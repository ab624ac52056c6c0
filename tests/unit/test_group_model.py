"""Every order of events of small groups: nobody serves with somebody of another epoch, and every run can end well."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import deque
from dataclasses import replace

import pytest

from crossdock.control.group import group as machine
from crossdock.control.group import resize
from crossdock.control.group.group_state import Phase
from crossdock.control.placement.expert_reports import Goal
from crossdock.control.placement.placement_service import PlacementService, _CachedRebalance
from tests.unit import group_model
from tests.unit.group_model import Budget, Peer, World, moves, start

ROUNDS = 90
PAIRS = [
    Budget(crashes=1, restarts=1),
    Budget(cuts=1, restarts=1),
    Budget(silences=1, restarts=1),
    Budget(leaves=1, restarts=1),
    Budget(restarts=2),
    Budget(crashes=1, cuts=1),
    Budget(crashes=1, silences=1, deadlines=1),
]
"""Disturbances of two workers that `python -m tests.unit.test_group_model` (make model) searches, in minutes."""


def faults_of(world: World) -> str:
    """What must never be true; "" = all is well."""
    serving = world.serving
    for one in serving:
        assert one.table
        ranks = [rank for rank, *_ in one.table]
        settings = world.group.settings
        sizes = range(settings.min_workers, settings.most_workers + 1) if settings.max_workers else [len(world.peers)]
        whole = ranks == list(range(len(ranks))) and len(ranks) in sizes
        itself = any((uid, incarnation) == (one.uid, one.incarnation) for _, uid, incarnation, _ in one.table)
        if not itself or not (whole or world.group.settings.elastic):
            return f"{one.uid} serves with ranks {ranks}"
        for other in serving:
            names_it = any(region == other.region for *_, region in one.table)
            named = any(region == one.region for *_, region in other.table)
            if names_it and named and (one.joined, one.table) != (other.joined, other.table):
                return f"{one.uid} at epoch {one.joined} and {other.uid} at {other.joined} serve with each other"
            if one.joined == other.joined and one.table != other.table:
                return f"{one.uid} and {other.uid} serve different tables under epoch {one.joined}"
            held = {peer.held.goal.tables for peer in (one, other) if peer.held is not None}
            if one.joined == other.joined and len(held) > 1:
                return f"{one.uid} and {other.uid} hold different experts under epoch {one.joined}"
    for peer in world.peers:
        if peer.view is not None and peer.view.term < peer.term:
            return f"{peer.uid} acts on a view of term {peer.view.term} after one of term {peer.term}"
    group = world.group
    if group.phase is Phase.SERVING:
        for one in serving:
            members = tuple(
                (m.rank, m.uid, m.worker.incarnation, m.region) for m in group.members if m.rank in group.taking_part
            )
            if one.joined == group.epoch and one.registered and one.table != members:
                return f"{one.uid} serves another table than the control plane's under epoch {group.epoch}"
    return ""


def ends_well(world: World, good: set[World]) -> bool:
    """Whether workers that go on, undisturbed, come to serve one table; `good`: worlds known to."""
    path = []
    for _ in range(ROUNDS):
        if world in good:
            break
        path.append(world)
        tables = {(peer.joined, peer.table) for peer in world.serving}
        group, wanted = world.group, world.group.wanted.workers
        if group.phase is Phase.SERVING and len(world.serving) == wanted == group.world_size and len(tables) == 1:
            break
        before = world
        for peer in range(len(world.peers)):
            mine = f"{world.peers[peer].uid} "
            for name, after in moves(world, disturbed=False):
                if name.startswith(mine) and after != world:
                    world = after
                    break
        if world == before:
            clocks = {"recovery ends", "reports were heard", "the pause ends"}
            ended = [after for name, after in moves(world, disturbed=False) if name in clocks]
            if not ended:
                return False
            world = ended[0]
    else:
        return False
    good.update(path)
    return True


def serving(size: int, budget: Budget, *, elastic: bool = True, experts: bool = False) -> World:
    """A group that serves, and what may still happen to it."""
    world = start(size, Budget(), elastic=elastic, experts=experts)
    while len(world.serving) < size:
        world = next(after for _, after in moves(world) if after != world)
    return replace(world, budget=budget)


def resizing(budget: Budget, *, elastic: bool, size: int = 0) -> World:
    """A group that serves with two of three workers. `size`: of the epoch that is planned, for which all are prepared;
    0: none is."""
    world = start(2, Budget(), elastic=elastic, most=3)
    while len(world.serving) < 2:
        world = next(after for _, after in moves(world) if after != world)
    if size:
        world = dict(moves(replace(world, budget=Budget(scales=1))))[f"{size} workers are wanted"]
        world = dict(moves(world))["h/2 registers"] if size > len(world.serving) else world
        for step in ("looks", "prepares"):
            for uid in [member.uid for member in world.group.members][:size]:
                world = dict(moves(world))[f"{uid} {step}"]
    return replace(world, budget=budget)


def search(
    size: int, budget: Budget, *, most: int, elastic: bool = False, first: World | None = None
) -> tuple[int, bool]:
    """Look at every world that can be reached: (how many, whether that was all). Asserts that all is well."""
    first = first or start(size, budget, elastic=elastic)
    parents: dict[World, tuple[World | None, str]] = {first: (None, "")}
    queue, good = deque([first]), set[World]()
    while queue and len(parents) < most:
        world = queue.popleft()
        fault = faults_of(world)
        if not fault and not ends_well(world, good):
            fault = "it does not end in SERVING, whatever the workers do"
        assert not fault, f"{fault}\n{story(world, parents)}"
        for name, after in moves(world):
            if after not in parents:
                parents[after] = (world, name)
                queue.append(after)
    return len(parents), not queue


def story(world: World, parents: dict[World, tuple[World | None, str]]) -> str:
    lines: list[str] = []
    at: World | None = world
    while at is not None:
        before, name = parents[at]
        states = ", ".join(f"{p.uid}.{p.incarnation} {p.stage}@{p.joined}" for p in at.peers)
        lines.append(f"{name:<32} -> {at.group.phase.value} {at.group.epoch}: {states}")
        at = before
    return "\n".join(reversed(lines))


@pytest.mark.parametrize(
    "budget",
    [
        Budget(),
        Budget(crashes=1),
        Budget(cuts=1),
        Budget(silences=2),
        Budget(restarts=1),
        Budget(leaves=1),
        Budget(deadlines=2),
    ],
    ids=lambda budget: " ".join(f"{k}={v}" for k, v in vars(budget).items() if v) or "calm",
)
def test_two_workers_in_every_order(budget: Budget) -> None:
    count, whole = search(2, budget, most=60_000)
    assert whole, f"{count} worlds were not all"
    assert count > 20


@pytest.mark.parametrize("budget", [Budget(crashes=1), Budget(cuts=1), Budget(silences=1), Budget(leaves=1)], ids=str)
def test_two_elastic_workers_in_every_order(budget: Budget) -> None:
    count, whole = search(2, budget, most=60_000, elastic=True)
    assert whole, f"{count} worlds were not all"


@pytest.mark.parametrize("budget", [Budget(crashes=1), Budget(silences=1), Budget(leaves=1)], ids=str)
def test_three_elastic_workers_lose_one_in_every_order(budget: Budget) -> None:
    """Two go on. No worker is started anew: the others must serve without it, and then `most` worlds with it."""
    search(3, budget, most=500, first=serving(3, budget))


@pytest.mark.parametrize("budget", [Budget(crashes=1, restarts=1), Budget(leaves=1, restarts=1)], ids=str)
def test_three_elastic_workers_lose_one_and_the_control_plane(budget: Budget) -> None:
    search(3, budget, most=500, first=serving(3, budget))


def parted(budget: Budget) -> World:
    """h/1 serves epoch 2 alone, and h/0, whose lease has ended, has not heard of it: it still serves epoch 1."""
    world = serving(2, Budget(cuts=1))
    own = ("looks", "goes on", "meets the others", "gets ready", "looks", "serves")
    for name in ("lease of h/0 ends", *(f"h/1 {step}" for step in own)):
        world = dict(moves(world))[name]
    assert [peer.joined for peer in world.serving] == [1, 2]
    return replace(world, budget=budget)


@pytest.mark.parametrize("first", [parted(Budget(restarts=1)), serving(2, Budget(restarts=2))], ids=["parted", "whole"])
def test_two_elastic_workers_report_to_different_control_planes(first: World) -> None:
    """Each may be alone for a while; they never serve different tables under one epoch."""
    count, whole = search(2, first.budget, most=60_000, first=first)
    assert whole, f"{count} worlds were not all"


@pytest.mark.parametrize(
    ("leap", "first"),
    [(0, parted(Budget(restarts=1))), (100, serving(2, Budget(restarts=2)))],
    ids=["no leap", "the same leap"],
)
def test_the_search_sees_two_control_planes_that_count_alike(
    leap: int, first: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: above what one worker remembers, both begin the same epoch, each with another worker."""
    monkeypatch.setattr(group_model, "leap_of", lambda world: leap)
    with pytest.raises(AssertionError, match=f"serve different tables under epoch {2 + leap}"):
        search(2, first.budget, most=60_000, first=first)


def test_the_search_sees_ranks_that_go_on_with_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a worker that goes on as if nobody were lost."""

    def go_on(peer: Peer) -> Peer:
        assert peer.view is not None
        return replace(peer, stage="mapped", joined=peer.view.epoch, table=peer.mapped)

    monkeypatch.setattr(group_model, "_continue_without_lost", go_on)
    budget = Budget(leaves=1)
    with pytest.raises(AssertionError, match="serves another table"):
        search(3, budget, most=20_000, first=serving(3, budget))


EXPERTS = [
    Budget(plans=1, silences=1),
    Budget(plans=1, crashes=1),
    Budget(plans=1, cuts=1),
    Budget(plans=1, leaves=1),
    Budget(plans=1, deadlines=1),
    Budget(plans=1, restarts=1),
    Budget(plans=1, takeovers=1),
    Budget(plans=2, takeovers=1),
]


@pytest.mark.parametrize("budget", EXPERTS[:-1], ids=str)
def test_two_workers_whose_experts_move_in_every_order(budget: Budget) -> None:
    """All ranks that serve an epoch hold the same tables. Whole searches from the start are for `make model`."""
    search(2, budget, most=2500, first=serving(2, budget, elastic=False, experts=True))


def test_the_search_sees_experts_that_start_to_move_while_an_epoch_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is started whatever the group does by then, answers are what is newest, and Ready compares nothing."""

    def start_at_once(experts: PlacementService, made: _CachedRebalance) -> bool:
        started = experts._manager.start(made.rebalance, 0.0)
        experts._manager.epoch_goal = Goal(experts._manager.version, experts._manager.tables)
        return started

    budget = Budget(plans=1, silences=1)
    first = serving(2, budget, elastic=False, experts=True)
    monkeypatch.setattr(PlacementService, "_start", start_at_once)
    search(2, budget, most=2500, first=first)  # Ready alone is enough
    monkeypatch.setattr(machine, "_check_same_placement", lambda *_: None)
    with pytest.raises(AssertionError, match="hold different experts under epoch 2"):
        search(2, budget, most=2500, first=first)


@pytest.mark.parametrize(
    ("name", "careless", "budget"),
    [
        ("drops", lambda answer: False, Budget(plans=2, takeovers=1)),
        ("takes", lambda peer, term: True, Budget(takeovers=1)),
    ],
    ids=["answers", "views"],
)
def test_the_search_sees_what_a_former_control_plane_says_late(
    name: str, careless: object, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_model, name, careless)
    with pytest.raises(AssertionError, match=r"hold different experts|acts on a view of term|does not end"):
        search(2, budget, most=30_000, first=serving(2, budget, elastic=False, experts=True))


RESIZES = [
    Budget(scales=1, crashes=1),
    Budget(scales=1, silences=1),
    Budget(scales=1, cuts=1),
    Budget(scales=1, leaves=1),
    Budget(scales=1, restarts=1),
    Budget(scales=1, takeovers=1),
    Budget(scales=1, deadlines=1),
    Budget(scales=2),
]
"""One worker more or fewer, and a disturbance at any moment. Whole searches are for `make model`: 5,000 to 90,000
worlds each."""


@pytest.mark.parametrize("elastic", [False, True], ids=["whole", "elastic"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_worker_leaves_or_comes_and_any_disturbance_meets_the_switch(size: int, elastic: bool) -> None:
    """From the moment at which all are prepared and none has said so."""
    for budget in (*(replace(one, scales=0) for one in RESIZES[:-1]), Budget(scales=1)):
        search(2, budget, most=20, first=resizing(budget, elastic=elastic, size=size))


def test_another_number_is_wanted_in_every_order() -> None:
    search(2, Budget(scales=1), most=150, first=resizing(Budget(scales=1), elastic=False))


def test_the_search_sees_a_size_that_changes_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the planned epoch gets the number of the one before."""
    raised = resize.raise_epoch
    monkeypatch.setattr(resize, "raise_epoch", lambda group, epoch, now: raised(group, epoch - 1, now))
    with pytest.raises(AssertionError, match=r"serves another table|different tables|does not end"):
        search(2, Budget(), most=400, first=resizing(Budget(), elastic=False, size=3))


def test_three_workers_in_every_order() -> None:
    assert search(3, Budget(), most=10_000)[1]


@pytest.mark.parametrize("elastic", [False, True], ids=["whole", "elastic"])
@pytest.mark.parametrize("seed", range(2))
def test_long_lives_of_larger_groups(seed: int, elastic: bool) -> None:
    """Walks through worlds of three and four workers, with many disturbances, too many worlds to see all of them."""
    generator = random.Random(seed)
    for walk in range(12):
        world = start(3 + walk % 2, Budget(3, 3, 3, 3, 1, 3), elastic=elastic)
        steps: list[str] = []
        for _ in range(120):
            found = list(moves(world))
            if not found:  # all serve, and nothing more can go wrong
                break
            calm_ones = [move for move in found if " " in move[0] and not _is_disturbance(move[0])]
            name, world = generator.choice(calm_ones if calm_ones and generator.random() < 0.85 else found)
            steps.append(name)
            assert not faults_of(world), f"{faults_of(world)}\n" + "\n".join(steps)
        assert ends_well(world, set()), "it does not end\n" + "\n".join(steps)


def _is_disturbance(name: str) -> bool:
    return any(word in name for word in ("crash", "silent", "lease", "restart", "leaves", "too long"))


def test_the_search_sees_two_tables_under_one_epoch() -> None:
    """A planted fault: a worker that serves on with the table of its past."""
    world = start(2, Budget())
    one, other = (
        replace(peer, stage="serving", joined=3, made=1, table=((0, "h/0", 1, b"h/0.1.1"), (1, "h/1", 1, name)))
        for peer, name in zip(world.peers, (b"h/1.1.1", b"h/1.1.2"), strict=True)
    )
    assert "serve with each other" in faults_of(replace(world, peers=(one, other)))
    apart = replace(other, table=((0, "h/0", 1, b"h/0.1.9"), other.table[1]))
    assert "different tables" in faults_of(replace(world, peers=(one, apart)))


if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    logging.disable(logging.CRITICAL)
    kinds = [("workers", start(2, pair)) for pair in PAIRS]
    kinds += [("elastic workers", start(2, pair, elastic=True)) for pair in PAIRS]
    kinds += [("workers whose experts move", start(2, pair, experts=True)) for pair in EXPERTS]
    kinds += [
        ("workers, then one more or fewer", resizing(pair, elastic=elastic))
        for pair in RESIZES
        for elastic in (False, True)
    ]
    for kind, first in kinds:
        began = time.monotonic()
        count, whole = search(2, first.budget, most=most, first=first)
        what = ", ".join(f"{name} {value}" for name, value in vars(first.budget).items() if value)
        seconds = time.monotonic() - began
        print(f"2 {kind}, {what}: {count} worlds{'' if whole else ' (not all)'}, {seconds:.0f} s", flush=True)
