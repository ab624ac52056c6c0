"""A small world for an exhaustive search: the real group machine, workers that follow worker/link.py and session.py,
and everything that can go wrong a few times each. States are values; `moves` are all that can happen next.

Time is left out: between two moves all leases are fresh; a lease, a deadline or a recovery ends by a move of its own.
A region is named by (uid, process, how many it has made), so no two tables of regions are equal by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from crossdock.control import blame
from crossdock.control.group import new_group, step
from crossdock.control.ranks import Place
from crossdock.control.records import (
    Event,
    Group,
    Heartbeat,
    Leave,
    Phase,
    Prior,
    PublishRegion,
    Ready,
    Refusal,
    Refuse,
    Register,
    Settings,
    Tick,
    Worker,
)

LEASE_S, FORM_S, RECOVER_S = 4.0, 100.0, 50.0
Table = tuple[tuple[int, str, int, bytes], ...]
"""(rank, uid, incarnation, region) by rank."""


@dataclass(frozen=True)
class View:
    """What a worker was last told."""

    epoch: int
    phase: Phase
    table: Table
    active: frozenset[int] | None = None

    @property
    def seats(self) -> Table:
        """Those that take part."""
        return tuple(row for row in self.table if self.active is None or row[0] in self.active)


@dataclass(frozen=True)
class Peer:
    """One worker process, as far as the protocol goes.

    stage: "out" (between epochs), "published", "meeting" (it goes on without somebody, and waits for the others that
        do), "mapped", "ready", "serving", "gone" (it left, or was told to stop).
    mapped: the regions that its communicator has mapped, as long as that can be used.
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


@dataclass(frozen=True)
class World:
    """Control plane, workers, and the disturbances that are left."""

    group: Group
    peers: tuple[Peer, ...]
    budget: Budget

    @property
    def serving(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.alive and peer.stage == "serving"]


def start(size: int, budget: Budget, max_failed: int = 2, *, elastic: bool = False) -> World:
    """Nothing has happened yet; as many workers as slots."""
    settings = Settings(size, LEASE_S, FORM_S, RECOVER_S, max_failed, elastic)
    peers = tuple(Peer(f"h/{local}") for local in range(size))
    return World(calm(new_group(settings, 0.0)), peers, budget)


def calm(group: Group) -> Group:
    """The same state with all clocks set back to 0."""
    members = group.members.each(lambda m: replace(m, lease_until=LEASE_S, num_blamed=0))
    until = None if group.recover_until is None else RECOVER_S
    held = tuple(replace(one, at=0.0) for one in group.blames if one.epoch == group.epoch)
    return replace(group, members=members, recover_until=until, since=0.0, ticked_at=0.0, blames=held)


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
        peers = tuple(replace(peer, registered=False) for peer in world.peers)
        fresh = calm(new_group(world.group.settings, 0.0))
        yield "control plane restarts", World(fresh, peers, replace(left, restarts=left.restarts - 1))
    if left.deadlines and world.group.phase is Phase.EXCHANGING:
        after = replace(world, budget=replace(left, deadlines=left.deadlines - 1))
        yield "exchange takes too long", _tick(after, FORM_S)


def _steps(world: World, peer: Peer) -> Iterator[tuple[str, World]]:
    """What a worker that follows the protocol may do now."""
    if not peer.registered:
        yield "registers", _register(world, peer)
        return
    seen = _seen(world.group, peer)
    if peer.view != seen:
        yield "looks", _put(world, _look(peer, seen))
    yield from _beats(world, peer)
    if peer.view is None:
        return
    current = peer.view.epoch == peer.joined
    if (
        peer.stage == "out"
        and peer.view.phase is Phase.EXCHANGING
        and peer.view.epoch > peer.joined
        and peer.rank is not None
    ):
        if peer.view.active is None:
            yield "publishes", _publish(world, peer)
        elif peer.rank in peer.view.active:
            yield "goes on", _put(world, _go_on(peer))
    if peer.stage == "published" and current and all(region for *_, region in peer.view.table):
        table = peer.view.table
        yield "maps", _put(world, replace(peer, stage="mapped", table=table, mapped=table))
    if peer.stage == "meeting" and _all_meet(world, peer):
        yield "meets the others", _put(world, replace(peer, stage="mapped"))
    if peer.stage == "mapped":
        after, refused = _tell(world, Ready(peer.uid, peer.incarnation, peer.joined))
        yield "gets ready", _put(after, replace(peer, stage="ready") if not refused else _broken(peer, ()))
    if peer.stage == "ready" and current and peer.view.phase is Phase.SERVING:
        prior = replace(peer.prior, ready=True) if peer.prior and peer.prior.epoch == peer.joined else peer.prior
        yield "serves", _put(world, replace(peer, stage="serving", prior=prior))


def _go_on(peer: Peer) -> Peer:
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
    after, refused = _tell(world, Register(worker, peer.prior))
    if refused is Refusal.GROUP_FULL:
        return world
    return _put(after, replace(peer, registered=not refused, stage=peer.stage if not refused else "gone"))


def _seen(group: Group, peer: Peer) -> View:
    member = group.member(peer.uid)
    inside = member is not None and member.worker.incarnation == peer.incarnation and group.sealed
    table = tuple((m.rank, m.uid, m.worker.incarnation, m.region if inside else b"") for m in group.members)
    return View(group.epoch, group.phase, table, group.active)


def _look(peer: Peer, view: View) -> Peer:
    """A view comes: link.py's `_show` and `_remember`, and a session whose epoch is over."""
    fault = None if peer.fault is not None and view.epoch > peer.fault[0] else peer.fault
    peer = replace(peer, view=view, fault=fault)
    past = peer.prior.epoch if peer.prior is not None else 0
    final = peer.prior is not None or view.phase is Phase.EXCHANGING
    if view.epoch > past and final:
        seatless = replace(peer.prior, ready=False) if peer.prior is not None else None
        own = next((region for rank, *_, region in view.table if rank == peer.rank), b"")
        prior = seatless if peer.rank is None else Prior(view.epoch, peer.rank, own, False, view.active)
        peer = replace(peer, prior=prior)
    if peer.stage != "out" and view.epoch > peer.joined:
        peer = replace(peer, stage="out", table=())
    return peer


def _publish(world: World, peer: Peer) -> World:
    assert peer.view is not None
    assert peer.rank is not None
    peer = replace(peer, joined=peer.view.epoch, made=peer.made + 1, table=(), mapped=())
    peer = replace(peer, prior=Prior(peer.joined, peer.rank or 0, peer.region, False))
    after, refused = _tell(world, PublishRegion(peer.uid, peer.incarnation, peer.joined, peer.region))
    return _put(after, replace(peer, stage="published") if not refused else _broken(peer, ()))


def _beats(world: World, peer: Peer) -> Iterator[tuple[str, World]]:
    epoch = peer.prior.epoch if peer.prior is not None else 0
    silent: tuple[int, ...] = ()
    words = ""
    if peer.fault is not None:
        epoch, silent = peer.fault
        words = "broken"
    outside = peer.view is not None and peer.view.active is not None and peer.rank not in peer.view.active
    beat = Heartbeat(peer.uid, peer.incarnation, epoch, silent, words, loaded=outside and peer.rank is not None)
    after, refused = _tell(world, beat)
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
    return replace(peer, stage="out", table=(), prior=prior, fault=None if over else (peer.joined, silent))


def _tell(world: World, event: Event) -> tuple[World, Refusal | None]:
    group, effects = step(world.group, event, 0.0)
    refused = next((effect.refusal for effect in effects if isinstance(effect, Refuse)), None)
    return replace(world, group=calm(group)), refused


def _tick(world: World, now: float) -> World:
    members = world.group.members.each(lambda m: replace(m, lease_until=now + LEASE_S))
    group, _ = step(replace(world.group, members=members, ticked_at=now), Tick(), now)
    return replace(world, group=calm(group))


def _expire(world: World, peer: Peer) -> World:
    members = world.group.members.each(lambda m: replace(m, lease_until=0.0 if m.uid == peer.uid else LEASE_S))
    group, _ = step(replace(world.group, members=members), Tick(), 0.0)
    return replace(world, group=calm(group))


def _put(world: World, peer: Peer) -> World:
    return replace(world, peers=tuple(peer if other.uid == peer.uid else other for other in world.peers))
