"""A small world for an exhaustive search: the real group machine, workers that follow worker/group/session.py and its
control_client.py, and everything that can go wrong a few times each. States are values; `moves` are all that can happen
next.

Time is left out: between two moves all leases are fresh; a lease, a deadline or a recovery ends by a move of its own.
With experts, a worker fetches placements. Answers may come late, as may views of a control plane that was replaced.

A region is named by (uid, process, how many it has made), so no two tables of regions are equal by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from crossdock.control.group import blame, resize
from crossdock.control.group.group import MAX_PAUSE_S, advance, new_group
from crossdock.control.group.group_state import (
    Effect,
    Event,
    Group,
    Heartbeat,
    Leave,
    Phase,
    Prior,
    Publish,
    PublishRegion,
    Ready,
    Refusal,
    Refuse,
    Register,
    Scale,
    Settings,
    Tick,
    Wanted,
    Worker,
)
from crossdock.control.group.ranks import Place
from crossdock.protocol.v1 import control_pb2 as pb
from tests.unit.placement_model import Holding, Side, drops, report_of, takes

LEASE_S, FORM_S, RECOVER_S = 4.0, 100.0, 50.0
Table = tuple[tuple[int, str, int, bytes], ...]
"""(rank, uid, incarnation, region) by rank."""


@dataclass(frozen=True)
class View:
    """What a worker was last told. table: of the ranks of this epoch; own: this worker's slot, which may be above
    them; plan: the members of the epoch that is planned next, by rank."""

    epoch: int
    phase: Phase
    table: Table
    active: frozenset[int] | None = None
    term: int = 0
    world_size: int = 0
    own: int | None = None
    wanted: Wanted | None = None
    plan: tuple[tuple[str, int], ...] = ()

    @property
    def seats(self) -> Table:
        """Those that take part."""
        return tuple(row for row in self.table if self.active is None or row[0] in self.active)


@dataclass(frozen=True)
class Peer:
    """One worker process, as far as the protocol goes.

    stage: "out" (between epochs), "asking" (for the placement), "published", "meeting" (it goes on without somebody,
        and waits for the others that do), "mapped", "ready", "serving", "gone" (it left, or was told to stop).
    mapped: the regions that its communicator has mapped, as long as that can be used.
    term: the greatest that it has seen in a view.
    answer: of the control plane to its last question for a placement; it comes later.
    held, target: the placement that it holds, and the one that it goes to.
    prepared: the planned epoch for which it has loaded its experts.
    wanted: the size of the group that it was told last.
    """

    uid: str
    incarnation: int = 1
    alive: bool = True
    registered: bool = False
    view: View | None = None
    prior: Prior | None = None
    joined: int = 0
    stage: str = "out"
    table: Table = ()
    mapped: Table = ()
    fault: tuple[int, tuple[int, ...]] | None = None
    made: int = 0
    term: int = 0
    answer: Holding | None = None
    held: Holding | None = None
    target: Holding | None = None
    prepared: tuple[tuple[str, int], ...] = ()
    wanted: Wanted | None = None

    @property
    def region(self) -> bytes:
        return f"{self.uid}.{self.incarnation}.{self.made}".encode()

    @property
    def rank(self) -> int | None:
        if self.view is None:
            return None
        return next((r for r, uid, inc, _ in self.view.table if (uid, inc) == (self.uid, self.incarnation)), None)


@dataclass(frozen=True)
class Budget:
    """How often each disturbance may still happen."""

    crashes: int = 0
    silences: int = 0
    cuts: int = 0
    restarts: int = 0
    leaves: int = 0
    deadlines: int = 0
    takeovers: int = 0
    plans: int = 0
    scales: int = 0


@dataclass(frozen=True)
class World:
    """Control plane, workers, and the disturbances that are left.

    side: where experts are; None: workers without placements.
    former: the control plane that was replaced last, and its term; what it said may come late.
    """

    group: Group
    peers: tuple[Peer, ...]
    budget: Budget
    side: Side | None = None
    term: int = 0
    former: tuple[int, Group] | None = None

    @property
    def serving(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.alive and peer.stage == "serving"]


def start(size: int, budget: Budget, *, elastic: bool = False, experts: bool = False, most: int = 0) -> World:
    """Nothing has happened yet; as many workers as slots, or `most`, the largest size of the group."""
    settings = Settings(size, LEASE_S, FORM_S, RECOVER_S, elastic, max_workers=most)
    peers = tuple(Peer(f"h/{local}") for local in range(most or size))
    return World(calm(new_group(settings, 0.0)), peers, budget, Side() if experts else None)


def calm(group: Group) -> Group:
    """The same state with all clocks set back to 0."""
    members = group.members.each(lambda m: replace(m, lease_until=LEASE_S, num_blamed=0))
    until = None if group.recover_until is None else RECOVER_S
    held = tuple(replace(one, at=0.0) for one in group.blames if one.epoch == group.epoch)
    failed = min(group.num_failed_epochs, 3)  # more make a longer pause, no more
    return replace(
        group, members=members, recover_until=until, since=0.0, ticked_at=0.0, blames=held, num_failed_epochs=failed
    )


def moves(world: World, *, disturbed: bool = True) -> Iterator[tuple[str, World]]:
    """(what happens, the world after) for everything that can happen next; not disturbed: only what workers do."""
    for peer in world.peers:
        if peer.alive and peer.stage != "gone":
            for name, after in _steps(world, peer):
                yield f"{peer.uid} {name}", after
        elif not peer.alive:
            yield f"{peer.uid} starts anew", _put(world, Peer(peer.uid, peer.incarnation + 1))
    if world.group.recovering:
        yield "recovery ends", _tick(world, RECOVER_S)
    elif world.group.phase is Phase.FORMING and world.group.full:
        yield "the pause ends", _tick(world, MAX_PAUSE_S)
    if world.side is not None and world.side.rebalance is not None:
        yield "a plan is made", replace(world, side=world.side.planned(world.group))
    if _all_can_switch(world):
        yield "experts move", replace(world, peers=tuple(replace(peer, held=peer.target) for peer in world.peers))
    if blame.held(world.group):
        yield "reports were heard", _tick(world, blame.HOLD_S)
    if disturbed:
        yield from _disturbances(world)


def _disturbances(world: World) -> Iterator[tuple[str, World]]:
    left = world.budget
    for peer in world.peers:
        if left.crashes and peer.alive:
            dead = replace(peer, alive=False, stage="out")
            yield f"{peer.uid} crashes", _put(replace(world, budget=replace(left, crashes=left.crashes - 1)), dead)
        if left.cuts and any(m.uid == peer.uid for m in world.group.members):
            yield f"lease of {peer.uid} ends", _expire(replace(world, budget=replace(left, cuts=left.cuts - 1)), peer)
        if left.silences and peer.alive and peer.stage in {"meeting", "mapped", "ready", "serving"}:
            for rank, uid, _, _ in peer.table:
                if uid != peer.uid:
                    after = _broken(peer, (rank,))
                    budget = replace(left, silences=left.silences - 1)
                    yield f"{peer.uid} finds rank {rank} silent", _put(replace(world, budget=budget), after)
        if left.leaves and peer.alive and peer.registered and peer.stage != "gone":
            after, _ = _tell(
                replace(world, budget=replace(left, leaves=left.leaves - 1)), Leave(peer.uid, peer.incarnation)
            )
            yield f"{peer.uid} leaves", _put(after, replace(peer, alive=False, stage="out", registered=False))
    if left.restarts:
        yield "control plane restarts", _anew(replace(world, budget=replace(left, restarts=left.restarts - 1)))
    if left.takeovers:
        after = _anew(replace(world, budget=replace(left, takeovers=left.takeovers - 1)))
        yield "another leads", replace(after, term=world.term + 1, former=(world.term, world.group))
    if left.plans and world.side is not None and (side := world.side.asked(world.group, world.term)) is not None:
        yield "a plan is begun", replace(world, side=side, budget=replace(left, plans=left.plans - 1))
    if left.scales and not world.group.recovering:
        for size in {world.group.wanted.workers - 1, world.group.wanted.workers + 1}:
            after, refused = _tell(replace(world, budget=replace(left, scales=left.scales - 1)), Scale(size))
            if not refused:
                yield f"{size} workers are wanted", after
    if left.deadlines and world.group.phase is Phase.EXCHANGING:
        after = replace(world, budget=replace(left, deadlines=left.deadlines - 1))
        yield "exchange takes too long", _tick(after, FORM_S)


def _anew(world: World) -> World:
    """A control plane that knows nothing; what the one before has answered is under way."""
    peers = tuple(
        replace(peer, registered=False, answer=peer.answer and replace(peer.answer, stale=True)) for peer in world.peers
    )
    fresh = calm(new_group(world.group.settings, 0.0, leap_of(world)))
    return replace(world, group=fresh, peers=peers, side=None if world.side is None else Side())


def leap_of(world: World) -> int:
    """Of the control plane that comes next: another one each time, and far above what one counts in a search."""
    return 100 * (1 + world.budget.restarts + world.budget.takeovers)


def _steps(world: World, peer: Peer) -> Iterator[tuple[str, World]]:
    """What a worker that follows the protocol may do now."""
    yield from _late(world, peer)
    if not peer.registered:
        yield "registers", _register(world, peer)
        return
    seen = _seen(world.group, peer, world.term)
    if peer.view != seen:
        yield "looks", _put(world, _look(peer, seen))
    yield from _beats(world, peer)
    yield from _follows(world, peer)
    plan = peer.view.plan if peer.view is not None else ()
    if (peer.uid, peer.incarnation) in plan and peer.prepared != plan:
        yield "prepares", _put(world, replace(peer, prepared=plan))
    if peer.view is None:
        return
    current = peer.view.epoch == peer.joined
    if (
        peer.stage == "out"
        and peer.view.phase is Phase.EXCHANGING
        and peer.view.epoch > peer.joined
        and peer.rank is not None
    ):
        if peer.view.active is None and world.side is not None:
            yield "asks for a placement", _ask(world, replace(peer, joined=peer.view.epoch, held=None, target=None))
        elif peer.view.active is None:
            yield "publishes", _publish(world, peer)
        elif peer.rank in peer.view.active:
            yield "goes on", _put(world, _continue_without_lost(peer))
    if peer.stage == "published" and current and all(region for *_, region in peer.view.table):
        table = peer.view.table
        yield "maps", _put(world, replace(peer, stage="mapped", table=table, mapped=table))
    if peer.stage == "meeting" and _all_meet(world, peer):
        yield "meets the others", _put(world, replace(peer, stage="mapped"))
    if peer.stage == "mapped":
        after, refused = _tell(
            world, Ready(peer.uid, peer.incarnation, peer.joined, peer.held and peer.held.goal.version)
        )
        yield "gets ready", _put(after, replace(peer, stage="ready") if not refused else _broken(peer, ()))
    if peer.stage == "ready" and current and peer.view.phase is Phase.SERVING:
        prior = replace(peer.prior, ready=True) if peer.prior and peer.prior.epoch == peer.joined else peer.prior
        yield "serves", _put(world, replace(peer, stage="serving", prior=prior))


def _ask(world: World, peer: Peer) -> World:
    assert world.side is not None
    answer = world.side.placement(world.group, peer.joined)
    return _put(world, replace(peer, stage="asking", answer=answer) if answer else _broken(peer, ()))


def _follows(world: World, peer: Peer) -> Iterator[tuple[str, World]]:
    """A worker and placements: at the begin of an epoch, and a newer one while it serves (expert_mover.py)."""
    if peer.stage == "asking" and peer.answer is not None:
        if drops(peer.answer):
            yield "asks again", _ask(world, peer)
        elif peer.view is None or peer.view.epoch != peer.joined or peer.rank is None:
            yield "cannot publish", _put(world, _broken(peer, ()))
        else:
            yield "publishes", _publish(world, replace(peer, held=peer.answer, target=peer.answer, answer=None))
    if world.side is None or peer.stage != "serving" or peer.target is None:
        return
    newest = peer.target.goal.version
    if peer.answer is not None:
        kept = not drops(peer.answer) and peer.answer.goal.version > newest
        yield (
            "hears of a placement",
            _put(world, replace(peer, target=peer.answer if kept else peer.target, answer=None)),
        )
    elif peer.view is not None and peer.view.epoch == peer.joined and world.side.version > newest:
        answer = world.side.placement(world.group, peer.joined)
        if answer is not None:
            yield "asks for a newer placement", _put(world, replace(peer, answer=answer))


def _all_can_switch(world: World) -> bool:
    """All ranks are ready for the same version, by their words: expert_tables.py's `apply_agreed`."""
    told = {(peer.joined, peer.target.goal.version) for peer in world.serving if peer.target is not None}
    whole = len(world.serving) == len(world.peers)
    return whole and len(told) == 1 and any(peer.held != peer.target for peer in world.peers)


def _late(world: World, peer: Peer) -> Iterator[tuple[str, World]]:
    if world.former is not None and peer.view is not None and takes(peer.term, world.former[0]):
        late = _seen(world.former[1], peer, world.former[0])
        if late != peer.view:
            yield "hears late", _put(world, _look(peer, late))


def _continue_without_lost(peer: Peer) -> Peer:
    """`set_active` on the communicator that it has: a collective of those that go on."""
    assert peer.view is not None
    seats = peer.view.seats
    if not set(seats) <= set(peer.mapped):
        return _broken(replace(peer, joined=peer.view.epoch), ())
    return replace(peer, stage="meeting", joined=peer.view.epoch, table=seats)


def _all_meet(world: World, peer: Peer) -> bool:
    there = {(other.uid, other.incarnation) for other in world.peers if other.alive and other.joined == peer.joined}
    return all((uid, incarnation) in there for _, uid, incarnation, _ in peer.table)


def _register(world: World, peer: Peer) -> World:
    host, _, local = peer.uid.partition("/")
    worker = Worker(Place(peer.uid, host, int(local)), peer.incarnation, "a", "b", "cpu", "abi", "model")
    welcomed = world if world.side is None else replace(world, side=world.side.welcomed(world.group))
    after, refused = _tell(welcomed, Register(worker, peer.prior, peer.wanted))
    if refused:
        after = replace(after, side=world.side)
    if refused is Refusal.GROUP_FULL:  # a spare; the ranks that it served with have left it
        return world if peer.stage == "out" else _put(world, replace(_broken(peer, ()), fault=None))
    return _put(after, replace(peer, registered=not refused, stage=peer.stage if not refused else "gone"))


def _seen(group: Group, peer: Peer, term: int) -> View:
    member = group.member(peer.uid)
    inside = member is not None and member.worker.incarnation == peer.incarnation and group.sealed
    table = tuple(
        (m.rank, m.uid, m.worker.incarnation, m.region if inside else b"")
        for m in group.members
        if m.rank < group.world_size
    )
    own = member.rank if member is not None and member.worker.incarnation == peer.incarnation else None
    return View(group.epoch, group.phase, table, group.active, term, group.world_size, own, group.wanted, _plan(group))


def _plan(group: Group) -> tuple[tuple[str, int], ...]:
    return tuple((member.uid, member.worker.incarnation) for member in resize.next_members(group))


def _look(peer: Peer, view: View) -> Peer:
    """A view comes: control_client.py's `_take_view` and `_remember`, and a session whose epoch is over."""
    fault = None if peer.fault is not None and view.epoch > peer.fault[0] else peer.fault
    peer = replace(peer, view=view, fault=fault, term=max(peer.term, view.term), wanted=view.wanted)
    past = peer.prior.epoch if peer.prior is not None else 0
    final = peer.prior is not None or view.phase is Phase.EXCHANGING
    if view.epoch > past and final:
        seatless = replace(peer.prior, ready=False) if peer.prior is not None else None
        own = next((region for rank, *_, region in view.table if rank == peer.rank), b"")
        prior = seatless if view.own is None else Prior(view.epoch, view.own, own, False, view.active, view.world_size)
        peer = replace(peer, prior=prior)
    if peer.stage != "out" and view.epoch > peer.joined:
        peer = replace(peer, stage="out", table=(), answer=None)
    return peer


def _publish(world: World, peer: Peer) -> World:
    assert peer.view is not None
    assert peer.rank is not None
    peer = replace(peer, joined=peer.view.epoch, made=peer.made + 1, table=(), mapped=())
    peer = replace(peer, prior=Prior(peer.joined, peer.rank or 0, peer.region, False, None, peer.view.world_size))
    after, refused = _tell(world, PublishRegion(peer.uid, peer.incarnation, peer.joined, peer.region))
    return _put(after, replace(peer, stage="published") if not refused else _broken(peer, ()))


def _beats(world: World, peer: Peer) -> Iterator[tuple[str, World]]:
    epoch = peer.prior.epoch if peer.prior is not None else 0
    silent: tuple[int, ...] = ()
    words = ""
    if peer.fault is not None:
        epoch, silent = peer.fault
        words = "broken"
    plan = _plan(world.group)
    beat = Heartbeat(peer.uid, peer.incarnation, epoch, silent, words, prepared=bool(plan) and peer.prepared == plan)
    after, refused = _tell(world, beat)
    if after.side is not None and not refused and peer.stage == "serving" and peer.held and peer.target:
        request = pb.HeartbeatRequest(worker=pb.WorkerId(uid=peer.uid, incarnation=peer.incarnation), epoch=epoch)
        request.experts.CopyFrom(report_of(peer.held.goal, peer.target.goal, peer.rank or 0))
        after = replace(after, side=after.side.reported(after.group, world.group, request))
    if refused is Refusal.UNKNOWN_WORKER:
        peer = replace(peer, registered=False)
    elif refused is Refusal.REPLACED:
        peer = replace(peer, stage="gone")
    after = _put(after, peer)
    if after != world:
        yield "beats", after


def _broken(peer: Peer, silent: tuple[int, ...]) -> Peer:
    """Its data plane failed: it stops serving, and reports until there is a newer epoch."""
    prior = replace(peer.prior, ready=False) if peer.prior is not None else None
    over = peer.view is not None and peer.view.epoch > peer.joined
    return replace(peer, stage="out", table=(), prior=prior, answer=None, fault=None if over else (peer.joined, silent))


def _tell(world: World, event: Event) -> tuple[World, Refusal | None]:
    group, effects = advance(world.group, event, 0.0)
    refused = next((effect.refusal for effect in effects if isinstance(effect, Refuse)), None)
    return _changed(world, world.group, group, effects), refused


def _changed(world: World, before: Group, group: Group, effects: tuple[Effect, ...]) -> World:
    side = world.side
    if side is not None and Publish() in effects:
        side = side.changed(before, group)
    return replace(world, group=calm(group), side=side)


def _tick(world: World, now: float) -> World:
    members = world.group.members.each(lambda m: replace(m, lease_until=now + LEASE_S))
    before = replace(world.group, members=members, ticked_at=now)
    return _changed(world, before, *advance(before, Tick(), now))


def _expire(world: World, peer: Peer) -> World:
    members = world.group.members.each(lambda m: replace(m, lease_until=0.0 if m.uid == peer.uid else LEASE_S))
    before = replace(world.group, members=members)
    return _changed(world, before, *advance(before, Tick(), 0.0))


def _put(world: World, peer: Peer) -> World:
    return replace(world, peers=tuple(peer if other.uid == peer.uid else other for other in world.peers))
