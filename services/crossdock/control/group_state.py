"""What the group machine works on: its state, the events it takes, the effects it asks for. Frozen values only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crossdock.control.ranks import Place, Slot


class Phase(enum.Enum):
    """State of the group; the names are those of `GroupState` in control.proto."""

    FORMING = "FORMING"
    EXCHANGING = "EXCHANGING"
    SERVING = "SERVING"
    FAILED = "FAILED"


class Refusal(enum.Enum):
    """Why an event was refused. A refused event changes nothing."""

    UNKNOWN_WORKER = "unknown worker"
    REPLACED = "replaced"
    WRONG_EPOCH = "wrong epoch"
    WRONG_PHASE = "wrong phase"
    MIXED_PLACEMENT = "mixed placement"
    MIXED_GROUP = "mixed group"
    GROUP_FULL = "group full"
    BAD_VALUE = "bad value"
    BARRED = "barred"


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers that never change in the life of a group. Times in seconds."""

    world_size: int
    lease_s: float
    form_timeout_s: float
    recover_s: float
    max_failed_epochs: int = 8
    """Epochs that may break one after the other, with unchanged members and without serving, before FAILED."""
    elastic: bool = False
    """Ranks that are left go on without one that is lost; see elastic.py."""
    blame_epochs: int = 3
    """Epochs in which a rank is called silent within `blame_window_s` before it counts as sick."""
    blame_window_s: float = 600.0
    quarantine_s: float = 600.0
    """How long a sick worker is kept out; 0: nobody is."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A worker's memory of the group, told to a control plane that has none."""

    epoch: int
    rank: int
    region: bytes
    ready: bool
    active: frozenset[int] | None = None
    """The ranks that took part in that epoch; None: all."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A member called another one silent. Kept for `blame_window_s`, once for each pair and epoch."""

    epoch: int
    accuser: str
    accused: str
    at: float
    told: str = ""
    """The report in words."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A worker that is kept out, or (cordoned) not let in again once it is out.

    Attributes:
        cause: "cordoned" | "quarantined".
        until: when it ends by itself; None: when an operator says so.
        incarnation: that process and older ones of the uid; 0: every process.
        drain: the worker is to leave by itself.
    """

    uid: str
    hostname: str
    cause: str
    reason: str
    until: float | None = None
    incarnation: int = 0
    drain: bool = False

    def holds_for(self, worker: Worker) -> bool:
        """Whether this process of the uid is kept out."""
        return self.uid == worker.uid and (not self.incarnation or worker.incarnation <= self.incarnation)


@dataclass(frozen=True, slots=True)
class Spare:
    """A worker that found no place a moment ago, and asks again about once a second."""

    uid: str
    hostname: str
    asked_at: float


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker says about itself when it registers."""

    place: Place
    incarnation: int
    address: str
    http_address: str
    transport: str
    abi: str
    model: str
    https: bool = False
    """`http_address` takes TLS only."""

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
    placement: int | None = None
    """With `ready`: version of the placement that it holds; None: a worker of an older version does not tell."""
    loaded: bool = False
    """Outside of a group that goes on without it, and it holds its experts: it can be taken in at once."""
    num_blamed: int = 0
    """How often others called this rank silent in the life of this member."""

    @property
    def uid(self) -> str:
        return self.worker.uid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.uid})"


class Members(tuple[Member, ...]):
    """Members by rank: a tuple that also finds one by uid, and knows how many have come how far, at no cost per event.

    Attributes:
        places: uid -> position. The same object as long as nobody comes, goes or moves, so that "are these the same
            members" is one comparison.
        num_published: members with a region.
        num_ready: members that are ready.
    """

    places: dict[str, int]
    num_published: int
    num_ready: int

    def __new__(cls, members: Iterable[Member] = ()) -> Members:
        made = super().__new__(cls, members)
        made.places = {member.uid: place for place, member in enumerate(made)}
        made.num_published = sum(bool(member.region) for member in made)
        made.num_ready = sum(member.ready for member in made)
        return made

    def find(self, uid: str) -> Member | None:
        """The member of that name."""
        place = self.places.get(uid)
        return None if place is None else self[place]

    def put(self, member: Member) -> Members:
        """The same members, with `member` in the place of the one of its name; their ranks must be equal."""
        place = self.places[member.uid]
        before = self[place]
        made = tuple.__new__(Members, (*self[:place], member, *self[place + 1 :]))
        same = before.worker.incarnation == member.worker.incarnation
        made.places = self.places if same else dict(self.places)
        made.num_published = self.num_published + bool(member.region) - bool(before.region)
        made.num_ready = self.num_ready + member.ready - before.ready
        return made

    def each(self, change: Callable[[Member], Member]) -> Members:
        """The same members in the same places, each changed."""
        made = tuple.__new__(Members, map(change, self))
        made.places = self.places
        made.num_published = sum(bool(member.region) for member in made)
        made.num_ready = sum(member.ready for member in made)
        return made


@dataclass(frozen=True, slots=True)
class Group:
    """The whole state. Invariant: EXCHANGING, SERVING and FAILED have a member in every slot,
    or (`active`) in each of those that go on."""

    settings: Settings
    phase: Phase
    epoch: int
    members: Members
    """By rank, live ones only."""
    owners: tuple[Place | None, ...]
    """By rank: who holds or last held the slot. All None until ranks are final."""
    placed: bool
    """Ranks are final: from the first complete group on, nobody is renumbered."""
    recover_until: float | None
    """Still listening for a group that served under a former process, until then; None once that is decided."""
    highest_reported: int
    """Greatest epoch that a worker remembered while recovering."""
    since: float
    """When `phase` or `epoch` changed."""
    ticked_at: float
    num_failed_epochs: int
    reason: str
    broken_ranks: tuple[int, ...]
    """Ranks that were lost, replaced or called silent when the epoch before ended, or since."""
    active: frozenset[int] | None = None
    """Ranks that go on with the regions of an earlier epoch while others are missing; None: all of this epoch's own."""
    blames: tuple[Blame, ...] = ()
    """Oldest first. A process that is gone takes what was said of it along."""
    bars: tuple[Bar, ...] = ()
    spares: tuple[Spare, ...] = ()
    """The last to ask last."""

    @property
    def recovering(self) -> bool:
        return self.recover_until is not None

    @property
    def full(self) -> bool:
        return len(self.members) == self.settings.world_size

    @property
    def sealed(self) -> bool:
        """Every region of this epoch is published, so the table was handed out and members may have mapped it."""
        return self.active is not None or (self.full and self.members.num_published == len(self.members))

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        held = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.settings.world_size) if rank not in held)

    @property
    def slots(self) -> tuple[Slot, ...]:
        live = {member.rank: member.worker.place for member in self.members}
        return tuple(Slot(live.get(rank, owner), rank in live) for rank, owner in enumerate(self.owners))

    @property
    def taking_part(self) -> frozenset[int]:
        """The ranks of this epoch, whether their members are there or not."""
        return frozenset(range(self.settings.world_size)) if self.active is None else self.active

    def member(self, uid: str) -> Member | None:
        return self.members.find(uid)

    def bar_of(self, worker: Worker) -> Bar | None:
        """What keeps this process out."""
        return next((bar for bar in self.bars if bar.holds_for(worker)), None)


@dataclass(frozen=True, slots=True)
class Register:
    worker: Worker
    prior: Prior | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """A worker of the right kind was refused because the group is full: it is a spare."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Cordon:
    """Workers are kept out once they are out. A bar takes the place of the one that its uid had."""

    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Uncordon:
    """An operator lets workers in again."""

    uids: frozenset[str]


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
    placement: int | None = None
    """Version of the placement whose experts the sender holds; None: it does not tell."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    uid: str
    incarnation: int
    epoch: int
    """Of the sender's communicator; 0 before its first."""
    silent_ranks: tuple[int, ...] = ()
    fault: str = ""
    loaded: bool = False
    """The sender is outside of a group that goes on without it, and holds the experts of its rank."""


@dataclass(frozen=True, slots=True)
class Leave:
    uid: str
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Expected at least four times per lease."""


Event = Register | Waits | PublishRegion | Ready | Heartbeat | Leave | Cordon | Uncordon | Tick


@dataclass(frozen=True, slots=True)
class Publish:
    """The view of the group changed: tell every watcher."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the sender with this; nothing changed."""

    refusal: Refusal
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is gone. cause: "lease" | "left" | "replaced" | "quarantined"."""

    rank: int
    uid: str
    cause: str


@dataclass(frozen=True, slots=True)
class Blamed:
    """A member called another one silent and so ended an epoch. The blamed one keeps its slot: it may be only slow."""

    rank: int
    by_rank: int
    num_blamed: int


Effect = Publish | Refuse | Lost | Blamed
