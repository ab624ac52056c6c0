"""Data model of the group state machine: its state, its events and its effects. Frozen values only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from crossdock.control.group.ranks import Claim, NetworkPlace, Place, Slot, assign_first_ranks


class Phase(enum.Enum):
    """State of the group; the names are those of `GroupState` in control.proto."""

    FORMING = "FORMING"
    EXCHANGING = "EXCHANGING"
    SERVING = "SERVING"


class Refusal(enum.Enum):
    """Why an event was refused. A refused event changes nothing."""

    UNKNOWN_WORKER = "unknown worker"
    REPLACED = "replaced"
    NAME_TAKEN = "name taken"
    WRONG_EPOCH = "wrong epoch"
    WRONG_PHASE = "wrong phase"
    MIXED_PLACEMENT = "mixed placement"
    MIXED_GROUP = "mixed group"
    GROUP_FULL = "group full"
    BAD_VALUE = "bad value"
    BARRED = "barred"


@dataclass(frozen=True, slots=True)
class Settings:
    """Constant settings of a group. Times in seconds."""

    world_size: int
    """Ranks of a group of which no worker remembers another number."""
    lease_s: float
    form_timeout_s: float
    recover_s: float
    elastic: bool = False
    """The remaining ranks continue without a lost one; see elastic.py."""
    blame_epochs: int = 3
    """Epochs in which a rank is reported silent within `blame_window_s` before it counts as sick."""
    blame_window_s: float = 600.0
    quarantine_s: float = 600.0
    """Duration of a quarantine; 0: no quarantine."""
    min_workers: int = 1
    max_workers: int = 0
    """Bounds of `Wanted.workers`; 0: `world_size`."""
    follow_workers: bool = False
    """The group wants the workers that there are: those that wait come in, and who leaves takes its slot along."""

    @property
    def most_workers(self) -> int:
        """`max_workers`, the default resolved."""
        return self.max_workers or self.world_size

    def bounded(self, workers: int) -> int:
        """The nearest number of workers that is allowed."""
        return min(max(workers, self.min_workers), self.most_workers)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers the group is to have. Of two, the one of the higher version is right; 0: from the config."""

    workers: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Prior:
    """A worker's memory of the group, for a restarted control plane."""

    epoch: int
    rank: int
    region: bytes
    ready: bool
    active: frozenset[int] | None = None
    """Active ranks of that epoch; None: all."""
    world_size: int = 0
    """Ranks of that epoch; 0: not known."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A member reported another one as silent. Kept for `blame_window_s`, once per pair and epoch."""

    epoch: int
    accuser: str
    accused: str
    at: float
    report: str = ""
    """The report as text."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Excludes a worker from the group, if cordoned only once it has left.

    Attributes:
        cause: "cordoned" | "quarantined".
        until: when it expires; None: until an operator lifts it.
        incarnation: excludes this process of the uid and older ones; 0: every process.
        drain: the worker is asked to leave.
    """

    uid: str
    hostname: str
    cause: str
    reason: str
    until: float | None = None
    incarnation: int = 0
    drain: bool = False

    def holds_for(self, worker: Worker) -> bool:
        return self.uid == worker.uid and (not self.incarnation or worker.incarnation <= self.incarnation)


@dataclass(frozen=True, slots=True)
class Spare:
    """A worker that was refused because the group is full, and retries about once a second."""

    uid: str
    hostname: str
    asked_at: float


@dataclass(frozen=True, slots=True)
class HolderPlace:
    """Where a worker gives weights: TCP port, UNIX socket, and the kernel and network namespace of that."""

    port: int
    socket: str
    host: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as it registered."""

    place: Place
    incarnation: int
    address: str
    http_address: str
    transport: str
    abi: str
    model: str
    https: bool = False
    """`http_address` takes TLS only."""
    network: NetworkPlace | None = None
    boot_id: str = ""
    """Boot id of the worker's host; empty: unknown."""
    communicator: tuple[tuple[str, str], ...] = ()
    """Names and values of the communicator's settings."""
    holder: HolderPlace | None = None
    """Where other workers read weights from it; None: nowhere."""

    @property
    def uid(self) -> str:
        return self.place.uid


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker in its slot."""

    worker: Worker
    rank: int
    lease_until: float
    claim: Prior | None = None
    region: bytes = b""
    """Published in this epoch; empty before."""
    ready: bool = False
    placement: int = 0
    """With `ready`: version of the placement that it holds."""
    prepared: bool = False
    """It holds the experts of its rank in the epoch that is planned next: resize.py."""
    leaving: bool = False
    """It is being stopped, and serves until the group has no need of it, or its time is up."""
    num_blamed: int = 0
    """Reports of this member as silent."""

    @property
    def uid(self) -> str:
        return self.worker.uid

    @property
    def claimed_rank(self) -> Claim | None:
        return None if self.claim is None else Claim(self.claim.epoch, self.claim.rank)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.uid})"


class Members(tuple[Member, ...]):
    """Members by rank: a tuple with an index by uid and progress counters, updated at constant cost per event.

    Attributes:
        positions: uid -> position. The same object as long as no member joins, leaves or moves, so that comparing
            membership is one identity check.
        num_published: members with a region.
        num_ready: members that are ready.
    """

    positions: dict[str, int]
    num_published: int
    num_ready: int

    def __new__(cls, members: Iterable[Member] = ()) -> Members:
        made = super().__new__(cls, members)
        made.positions = {member.uid: position for position, member in enumerate(made)}
        made.num_published = sum(bool(member.region) for member in made)
        made.num_ready = sum(member.ready for member in made)
        return made

    def find(self, uid: str) -> Member | None:
        position = self.positions.get(uid)
        return None if position is None else self[position]

    def put(self, member: Member) -> Members:
        """Replace the member with the same uid; the ranks must be equal."""
        at = self.positions[member.uid]
        before = self[at]
        made = tuple.__new__(Members, (*self[:at], member, *self[at + 1 :]))
        same = before.worker.incarnation == member.worker.incarnation
        made.positions = self.positions if same else dict(self.positions)
        made.num_published = self.num_published + bool(member.region) - bool(before.region)
        made.num_ready = self.num_ready + member.ready - before.ready
        return made

    def each(self, change: Callable[[Member], Member]) -> Members:
        """Apply `change` to each member; uids and ranks must stay."""
        made = tuple.__new__(Members, map(change, self))
        made.positions = self.positions
        made.num_published = sum(bool(member.region) for member in made)
        made.num_ready = sum(member.ready for member in made)
        return made


def with_first_ranks(members: Sequence[Member], world_size: int) -> Members:
    ranks = assign_first_ranks({member.worker.place: member.claimed_rank for member in members}, world_size)
    ranked = [replace(member, rank=ranks[member.uid]) for member in members]
    return Members(sorted(ranked, key=lambda member: member.rank))


@dataclass(frozen=True, slots=True)
class Group:
    """The whole state. Invariant: EXCHANGING and SERVING have a member in every slot below `world_size`, or (`active`)
    in each active one. Members in higher slots are standbys: they join when the group grows."""

    settings: Settings
    world_size: int
    """Ranks of this epoch."""
    wanted: Wanted
    phase: Phase
    epoch: int
    members: Members
    """Live members, by rank."""
    owners: tuple[Place | None, ...]
    """Current or last owner of each of `num_slots` slots. All None until ranks are final."""
    placed: bool
    """Ranks are final, from the first complete group on."""
    recover_until: float | None
    """End of the recovery period after a restart; None once recovery is decided."""
    highest_reported: int
    """Highest epoch that a worker remembered when it registered; 0: none did."""
    since: float
    """When `phase` or `epoch` changed."""
    ticked_at: float
    num_failed_epochs: int
    """Epochs in a row, of unchanged members, that broke before they served; not those that waited `lease_s` for a
    rank."""
    reason: str
    broken_ranks: tuple[int, ...]
    """Ranks that were lost, replaced or reported silent since the last epoch."""
    active: frozenset[int] | None = None
    """Ranks that continue with the regions of an earlier epoch while others are missing; None: all ranks, with regions
    of this epoch."""
    blames: tuple[Blame, ...] = ()
    """Oldest first. Removed together with the accused process."""
    bars: tuple[Bar, ...] = ()
    spares: tuple[Spare, ...] = ()
    """In the order of their last request."""
    refused: RefusedWorker | None = None
    """The last one that wanted an empty slot, or that of its uid; None once a worker has joined."""
    leap: int = 0
    """Distance from numbers that other control planes may have counted, different in each one; see recovery.py."""

    @property
    def why(self) -> str:
        """`reason`, and why a worker was refused that is missing: what views and errors show."""
        if self.refused is None or self.full or self.member(self.refused.uid) is not None:
            return self.reason
        return f"{self.reason}; refused: {self.refused.message}"

    @property
    def recovering(self) -> bool:
        return self.recover_until is not None

    @property
    def full(self) -> bool:
        """Every rank of this epoch has a member: standbys never wait while a slot below `world_size` is empty."""
        return len(self.members) >= self.world_size

    @property
    def num_slots(self) -> int:
        """Slots for members: of this epoch, and of the one that is wanted."""
        return max(self.world_size, self.wanted.workers)

    @property
    def sealed(self) -> bool:
        """All regions of this epoch are published, so members may have mapped them."""
        return self.active is not None or self.members.num_published == self.world_size

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        held = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.world_size) if rank not in held)

    @property
    def slots(self) -> tuple[Slot, ...]:
        live = {member.rank: member.worker.place for member in self.members}
        return tuple(Slot(live.get(rank, owner), rank in live) for rank, owner in enumerate(self.owners))

    @property
    def taking_part(self) -> frozenset[int]:
        """Active ranks of this epoch, with or without a live member."""
        return frozenset(range(self.world_size)) if self.active is None else self.active

    def member(self, uid: str) -> Member | None:
        return self.members.find(uid)

    def bar_of(self, worker: Worker) -> Bar | None:
        return next((bar for bar in self.bars if bar.holds_for(worker)), None)


@dataclass(frozen=True, slots=True)
class Register:
    worker: Worker
    prior: Prior | None = None
    wanted: Wanted | None = None
    """As the worker was last told."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An operator wants another number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class Waits:
    """A compatible worker was refused because the group is full: it is a spare."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class RefusedWorker:
    """A worker can never be a member as it is configured."""

    uid: str
    message: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """Add bars. A bar replaces the one of the same uid."""

    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Uncordon:
    """An operator lifts bars."""

    uids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Slow:
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class PublishRegion:
    uid: str
    incarnation: int
    epoch: int
    region: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    uid: str
    incarnation: int
    epoch: int
    placement: int = 0
    """Version of the placement whose experts the sender holds; 0: it takes none."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    uid: str
    incarnation: int
    epoch: int
    """Epoch of the sender's communicator; 0 before its first one."""
    silent_ranks: tuple[int, ...] = ()
    fault: str = ""
    prepared: bool = False
    """The sender holds the experts of its rank in the epoch that is planned next."""
    leaving: bool = False
    """The sender is being stopped."""


@dataclass(frozen=True, slots=True)
class Leave:
    uid: str
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has advanced. Expected at least four times per lease."""


Event = (
    Register
    | Scale
    | Waits
    | RefusedWorker
    | PublishRegion
    | Ready
    | Heartbeat
    | Leave
    | Cordon
    | Uncordon
    | Slow
    | Tick
)


@dataclass(frozen=True, slots=True)
class Publish:
    """The view of the group changed: notify every watcher."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the event; the state is unchanged."""

    refusal: Refusal
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is gone. cause: "lease" | "left" | "replaced" | "quarantined" | "scaled"."""

    rank: int
    uid: str
    cause: str


@dataclass(frozen=True, slots=True)
class Blamed:
    """A member reported another one as silent, which ended an epoch. The blamed member keeps its slot."""

    rank: int
    by_rank: int
    num_blamed: int


Effect = Publish | Refuse | Lost | Blamed
