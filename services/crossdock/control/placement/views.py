"""Conversion of messages: checked requests become events and bars, the state becomes a GroupView. Pure.

An invalid value is refused with `InvalidArgument` before the state machine sees it, so no peer can make the state
large, and no text of a peer can break a log line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from google.protobuf.message import Message

from crossdock.common.access import MAX_UID_CHARS, check_uid
from crossdock.common.call_errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from crossdock.common.rpc import MAX_SENT_BYTES
from crossdock.control.group import blame, cordon
from crossdock.control.group.group_state import (
    Bar,
    Group,
    Heartbeat,
    HolderPlace,
    Leave,
    Member,
    Prior,
    PublishRegion,
    Ready,
    Register,
    Wanted,
    Worker,
)
from crossdock.control.group.ranks import NetworkPlace
from crossdock.control.topology import discovery
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import topology_pb2

MAX_NAME_CHARS = MAX_UID_CHARS
MAX_TEXT_CHARS = 1000
MAX_REGION_BYTES = 64 << 10
MAX_LEAD = 1 << 20
MAX_WORKERS = 1 << 16
MAX_SCALES = 1 << 53
CLOCK_FLOOR = 1 << 40
MAX_LOCAL_RANK = 1 << 16
MAX_PORT = (1 << 16) - 1
MAX_HOST_BYTES = 64 << 10
MAX_LOST_NAMED = 128
MAX_GPUS = 64
MAX_NICS = 64
MAX_SETTINGS = 64
MAX_HELD_MODELS = 16
MAX_SETTINGS_BYTES = 4 << 10
MAX_AHEAD_S = 600
"""Largest accepted lead of a worker's clock: an incarnation is a start time and the newest one wins, so one from far in
the future could never be replaced. Clocks kept by NTP differ by less than a second."""


MAX_BARS_NAMED = 16
"""Limit of workers named in an error."""


def bars_of(group: Group, request: pb.CordonRequest) -> tuple[Bar, ...]:
    """The bars of a cordon request. Raises InvalidArgument, NotFound, ResourceExhausted."""
    found = cordon.named(group, _bar_name(request.name))
    if not found:
        known = sorted({member.uid for member in group.members} | {spare.uid for spare in group.spares})
        more = f" and {len(known) - MAX_BARS_NAMED} more" if len(known) > MAX_BARS_NAMED else ""
        named = ", ".join(known[:MAX_BARS_NAMED]) or "none"
        raise NotFound(f"name: expected a rank, a worker or a host of this group ({named}{more}), got {request.name!r}")
    if len(group.bars) + len(found) > cordon.MAX_BARS:
        raise ResourceExhausted(f"cordon: expected at most {cordon.MAX_BARS} workers, got more")
    reason = printable(request.reason, MAX_NAME_CHARS) or "by an operator"
    return tuple(Bar(uid, hostname, "cordoned", reason, drain=request.drain) for uid, hostname in found)


def bars_to_lift(group: Group, request: pb.UncordonRequest) -> tuple[Bar, ...]:
    """The bars of an uncordon request. Raises InvalidArgument, NotFound."""
    uids = {uid for uid, _ in cordon.named(group, _bar_name(request.name))}
    found = tuple(bar for bar in group.bars if bar.uid in uids)
    if not found:
        known = ", ".join(bar.uid for bar in group.bars[:MAX_BARS_NAMED]) or "none"
        raise NotFound(f"name: expected a cordoned or quarantined worker ({known}), got {request.name!r}")
    return found


def remembered_bar(group: Group, worker: Worker, message: pb.Barred, now: float, own_id: int) -> Bar | None:
    """The bar that a worker remembers from another control plane; None: none, or this one knows better."""
    cordoned = message.cause == "cordoned"
    if message.told_by == own_id or not (cordoned or message.cause == "quarantined"):
        return None
    if group.bar_of(worker) is not None or len(group.bars) >= cordon.MAX_BARS:
        return None
    reason = printable(message.reason, MAX_NAME_CHARS)
    if cordoned:
        return Bar(worker.uid, worker.place.hostname, message.cause, reason, drain=message.drain)
    if not (math.isfinite(message.left_s) and 0 < message.left_s <= group.settings.quarantine_s):
        return None
    until = now + message.left_s
    return Bar(worker.uid, worker.place.hostname, message.cause, reason, until, worker.incarnation)


def bar_message(bar: Bar, now: float, own_id: int) -> pb.Barred:
    """A bar as a message for workers and watchers."""
    left_s = 0.0 if bar.until is None else max(0.001, bar.until - now)
    return pb.Barred(
        uid=bar.uid,
        hostname=bar.hostname,
        cause=bar.cause,
        reason=bar.reason,
        left_s=left_s,
        drain=bar.drain,
        told_by=own_id,
    )


def bar_messages(bars: Sequence[Bar], now: float, own_id: int) -> list[pb.Barred]:
    return [bar_message(bar, now, own_id) for bar in bars]


def _bar_name(name: str) -> str:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidArgument(f"name: expected a rank, a worker or a host, got {name[:MAX_NAME_CHARS]!r}")
    return name


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that depend on the configuration."""

    world_size: int
    max_region_bytes: int

    @staticmethod
    def of(world_size: int) -> Limits:
        """Limits such that a view with all regions and names fits in one message."""
        room = MAX_SENT_BYTES // world_size - 11 * MAX_NAME_CHARS
        return Limits(world_size, max(1, min(MAX_REGION_BYTES, room)))


@dataclass(frozen=True, slots=True)
class PlacementView:
    """What a view says of experts: versions of the newest placement and of that of the planned epoch, and what a group
    that is scaled waits for."""

    version: int = 0
    planned: int = 0
    scaling: str = ""


NO_PLACEMENT = PlacementView()


def check_incarnation(incarnation: int, now_ns: int) -> None:
    """Raises FailedPrecondition: it is too far in the future of this clock."""
    ahead_s = (incarnation - now_ns) / 1e9
    if ahead_s > MAX_AHEAD_S:
        limit = f"expected a start (ns since 1970) at most {MAX_AHEAD_S} s ahead of the control plane's clock"
        raise FailedPrecondition(f"worker.incarnation: {limit}, got {incarnation}, {ahead_s:.0f} s ahead")


def greatest(known: int | None, unix_s: float) -> int:
    """The highest epoch, or placement version, that is accepted from a worker.

    A control plane that knows the number of its group is at most slightly behind its workers: MAX_LEAD is far more than
    a former one can have counted unseen. A restarted one learns the number from workers. No group counts as fast as the
    clock's milliseconds, so the milliseconds since 1970 bound every true number, and an accepted number stays below
    them for the next control plane, too. Without this limit one wrong number would exhaust the range.

    Args:
        known: the group's own number; None: not known yet.
        unix_s: seconds since 1970; CLOCK_FLOOR (the year 2004) covers a clock that was never set.
    """
    clock = max(CLOCK_FLOOR, int(unix_s * 1e3))
    return clock if known is None else max(known, min(known + MAX_LEAD, clock))


def greatest_epoch(group: Group, unix_s: float) -> int:
    return greatest(group.epoch if group.placed and not group.recovering else None, unix_s)


def register_event(
    request: pb.RegisterRequest, limits: Limits, max_epoch: int, labels: discovery.Labels | None = None
) -> Register:
    """Check a RegisterRequest; `max_epoch`: see `greatest_epoch`; `labels`: the platform's labels of its host. Raises
    InvalidArgument."""
    uid, incarnation = _worker_id(request.worker)
    if request.local_rank > MAX_LOCAL_RANK:
        raise InvalidArgument(f"local_rank: expected <= {MAX_LOCAL_RANK}, got {request.local_rank}")
    _check_host(request.host)
    gpu = discovery.gpu_index(request.host, request.gpu_uuid, request.local_rank)
    network = _network(request.network) if request.HasField("network") else None
    place = discovery.place(uid, request.local_rank, request.host, gpu, labels)
    place = replace(place, memory_domain=network.domain if network else "")
    worker = Worker(
        place,
        incarnation,
        address=_name("address", request.address),
        http_address=_name("http_address", request.http_address),
        transport=_name("transport", request.transport),
        abi=_name("abi", request.abi),
        model=_name("model", request.model),
        https=request.https,
        network=network,
        boot_id=request.host.boot_id,
        communicator=_communicator(request),
        holder=_holder(request.holder) if request.HasField("holder") else None,
    )
    prior = _prior(request.prior, limits, max_epoch) if request.HasField("prior") else None
    return Register(worker, prior, _wanted(request.wanted) if request.HasField("wanted") else None)


def publish_event(request: pb.PublishRegionRequest, limits: Limits) -> PublishRegion:
    """Check a PublishRegionRequest. Raises InvalidArgument."""
    return PublishRegion(*_worker_id(request.worker), request.epoch, _region("region", request.region, limits))


def ready_event(request: pb.ReadyRequest) -> Ready:
    """Check a ReadyRequest. Raises InvalidArgument."""
    return Ready(*_worker_id(request.worker), request.epoch, request.placement)


def heartbeat_event(request: pb.HeartbeatRequest, limits: Limits, max_epoch: int, prepared: bool = False) -> Heartbeat:
    """Check a HeartbeatRequest; `max_epoch`: see `greatest_epoch`; `prepared`: for the planned epoch. Raises
    InvalidArgument."""
    if len(request.silent_ranks) > limits.world_size:
        got = len(request.silent_ranks)
        raise InvalidArgument(f"silent_ranks: expected at most {limits.world_size} of them, got {got}")
    _check_epoch("epoch", request.epoch, max_epoch)
    silent = tuple(sorted(set(request.silent_ranks)))
    return Heartbeat(
        *_worker_id(request.worker), request.epoch, silent, printable(request.fault), prepared, request.leaving
    )


def check_stats(stats: pb.WorkerStats) -> None:
    """Check the statistics of a heartbeat, which are copied into every view. Raises InvalidArgument."""
    if len(stats.models) > MAX_HELD_MODELS:
        raise InvalidArgument(f"stats.models: expected at most {MAX_HELD_MODELS}, got {len(stats.models)}")
    for held in stats.models:
        _name("stats.models.fingerprint", held.fingerprint)
    _name("stats.weights", stats.weights)
    if not (math.isfinite(stats.tokens_per_s) and stats.tokens_per_s >= 0):
        raise InvalidArgument(f"stats.tokens_per_s: expected a finite number >= 0, got {stats.tokens_per_s}")


def leave_event(request: pb.LeaveRequest) -> Leave:
    """Check a LeaveRequest. Raises InvalidArgument."""
    return Leave(*_worker_id(request.worker), printable(request.reason))


def is_member(group: Group, worker: pb.WorkerId) -> bool:
    """Whether `worker` is a live member in just this incarnation."""
    member = group.member(worker.uid)
    return member is not None and member.worker.incarnation == worker.incarnation


def is_replaced(group: Group, worker: pb.WorkerId) -> bool:
    """Whether a newer process of the same uid is a live member."""
    member = group.member(worker.uid)
    return member is not None and member.worker.incarnation > worker.incarnation


def group_view(
    group: Group,
    version: int,
    now: float,
    stats: Mapping[str, pb.WorkerStats],
    *,
    regions: bool,
    experts: PlacementView = NO_PLACEMENT,
) -> pb.GroupView:
    """Render the state with all its members.

    Args:
        version: grows with every change of one control-plane process.
        now: on the clock of the machine; gives the heartbeat ages.
        stats: uid -> statistics of the last heartbeat.
        regions: include regions, for members only; sent only once the table is complete.
        experts: versions of their placements.
    """
    with_regions = regions and group.sealed
    view = _headline(group, version, experts)
    sick = blame.sick(group)
    for member in group.members:
        age_s = max(0.0, now - (member.lease_until - group.settings.lease_s))
        message = _member(member, age_s, stats.get(member.uid))
        message.sick = sick.get(member.uid, "")
        if with_regions:
            message.region = member.region
        view.members.append(message)
    return view


def brief_view(group: Group, version: int, experts: PlacementView = NO_PLACEMENT) -> pb.GroupView:
    """View for all members before the table is complete: the state, without members. Missing ranks are listed only if
    they are few."""
    view = _headline(group, version, experts)
    if len(view.lost_ranks) > MAX_LOST_NAMED:
        del view.lost_ranks[:]
    return view


def own_seat(group: Group, worker: pb.WorkerId) -> pb.GroupView:
    """The member itself, in addition to `brief_view`: the concatenated bytes are one message."""
    view = pb.GroupView()
    member = group.member(worker.uid)
    if member is not None and member.worker.incarnation == worker.incarnation:
        view.members.add(rank=member.rank, worker=worker, ready=member.ready)
    return view


def table_view(group: Group, version: int, experts: PlacementView = NO_PLACEMENT) -> pb.GroupView:
    """View for all members once the table is complete: ranks, workers and regions."""
    view = _headline(group, version, experts)
    for member in group.members:
        worker = pb.WorkerId(uid=member.uid, incarnation=member.worker.incarnation)
        view.members.add(rank=member.rank, worker=worker, region=member.region, ready=member.ready)
    return view


def _headline(group: Group, version: int, experts: PlacementView) -> pb.GroupView:
    return pb.GroupView(
        epoch=group.epoch,
        state=group.phase.value,
        world_size=group.world_size,
        reason=group.why,
        lost_ranks=group.lost_ranks if len(group.members) < group.world_size else (),
        version=version,
        model=group.members[0].worker.model if group.members else "",
        broken_ranks=group.broken_ranks,
        num_members=len(group.members),
        placement=experts.version,
        active_ranks=sorted(group.active or ()),
        wanted=pb.Wanted(workers=group.wanted.workers, version=group.wanted.version),
        next_placement=experts.planned,
        scaling=experts.scaling,
        follows_workers=group.settings.follow_workers,
    )


def topology_response(
    group: Group, facts: Mapping[str, tuple[topology_pb2.HostFacts, int]], labels: Mapping[str, discovery.Labels]
) -> pb.TopologyResponse:
    """Render hosts, seats and labels.

    Args:
        facts: uid -> facts of its host, and the index of its GPU there (discovery.CPU = none).
        labels: by hostname.
    """
    response = pb.TopologyResponse(epoch=group.epoch, world_size=group.world_size)
    numbers: dict[bytes, int] = {}
    for member in group.members:
        if member.uid not in facts:
            continue
        host, gpu = facts[member.uid]
        number = numbers.setdefault(host.SerializeToString(deterministic=True), len(numbers))
        if number == len(response.hosts):
            response.hosts.append(host)
        seat = response.seats.add(rank=member.rank, uid=member.uid, host=number, on_gpu=gpu != discovery.CPU)
        seat.gpu = max(gpu, 0)
        if member.worker.network is not None:
            seat.network.CopyFrom(_network_message(member.worker.network))
    for hostname in sorted({host.hostname for host in response.hosts} & set(labels)):
        response.labels.add(hostname=hostname, **asdict(labels[hostname]))
    return response


def _member(member: Member, age_s: float, stats: pb.WorkerStats | None) -> pb.Member:
    return pb.Member(
        rank=member.rank,
        worker=pb.WorkerId(uid=member.uid, incarnation=member.worker.incarnation),
        hostname=member.worker.place.hostname,
        address=member.worker.address,
        http_address=member.worker.http_address,
        https=member.worker.https,
        ready=member.ready,
        heartbeat_age_s=age_s,
        stats=stats,
        network=_network_message(member.worker.network) if member.worker.network else None,
    )


def _network(network: topology_pb2.Network) -> NetworkPlace:
    _check_texts("network", network)
    if not network.provider:
        raise InvalidArgument("network.provider: expected a name, got none")
    return NetworkPlace(*(getattr(network, field.name) for field in fields(NetworkPlace)))


def _network_message(network: NetworkPlace) -> topology_pb2.Network:
    return topology_pb2.Network(**asdict(network))


def _communicator(request: pb.RegisterRequest) -> tuple[tuple[str, str], ...]:
    """The settings of the worker's communicator, bounded in all, since they are kept for each member."""
    settings = request.communicator
    num_bytes = sum(setting.ByteSize() for setting in settings)
    for got, most, what in ((len(settings), MAX_SETTINGS, "settings"), (num_bytes, MAX_SETTINGS_BYTES, "bytes")):
        if got > most:
            raise InvalidArgument(f"communicator: expected at most {most} {what}, got {got}")
    for setting in settings:
        if not setting.name or not setting.value:
            raise InvalidArgument(f"communicator: expected names and values, got {setting.name!r} = {setting.value!r}")
        _check_texts("communicator", setting)
    pairs = tuple((setting.name, setting.value) for setting in settings)
    if len(dict(pairs)) < len(pairs):
        raise InvalidArgument("communicator: expected different names, got one twice")
    return pairs


def _check_host(host: topology_pb2.HostFacts) -> None:
    """Check the size of host facts and their texts, which are stored and shown."""
    for what, got, most in (
        ("bytes", host.ByteSize(), MAX_HOST_BYTES),
        ("GPUs", len(host.gpus), MAX_GPUS),
        ("NICs", len(host.nics), MAX_NICS),
    ):
        if got > most:
            raise InvalidArgument(f"host: expected at most {most} {what}, got {got}")
    _check_texts("host", host)


def _check_texts(path: str, message: Message) -> None:
    """Check every text of a message, recursively: length and printable characters."""
    for field, value in message.ListFields():
        name = f"{path}.{field.name}"
        for one in value if field.is_repeated else (value,):
            if isinstance(one, str):
                _name(name, one)
            elif isinstance(one, Message):
                _check_texts(name, one)


def _worker_id(worker: pb.WorkerId) -> tuple[str, int]:
    if not worker.uid:
        raise InvalidArgument("worker.uid: expected a name, got none")
    check_uid(worker.uid)
    return worker.uid, worker.incarnation


def _check_epoch(field: str, epoch: int, max_epoch: int, least: int = 0) -> None:
    if not least <= epoch <= max_epoch:
        raise InvalidArgument(f"{field}: expected {least}..{max_epoch}, got {epoch}")


def _prior(prior: pb.PriorMembership, limits: Limits, max_epoch: int) -> Prior:
    _check_epoch("prior.epoch", prior.epoch, max_epoch, least=1)
    active = frozenset(prior.active_ranks[: limits.world_size])
    if len(active) != len(prior.active_ranks) or not active <= frozenset(range(limits.world_size)):
        raise InvalidArgument(f"prior.active_ranks: expected different ranks < {limits.world_size}, got others")
    region = _region("prior.region", prior.region, limits)
    size = prior.world_size if prior.world_size <= limits.world_size else 0  # of a group that may not be so large now
    return Prior(prior.epoch, prior.rank, region, prior.ready, active or None, size)


def _wanted(wanted: pb.Wanted) -> Wanted:
    if not 1 <= wanted.workers <= MAX_WORKERS:
        raise InvalidArgument(f"wanted.workers: expected 1..{MAX_WORKERS}, got {wanted.workers}")
    return Wanted(wanted.workers, min(wanted.version, MAX_SCALES))


def _region(field: str, region: bytes, limits: Limits) -> bytes:
    if len(region) > limits.max_region_bytes:
        raise InvalidArgument(f"{field}: expected at most {limits.max_region_bytes} bytes, got {len(region)}")
    return region


def _holder(holder: pb.Holder) -> HolderPlace:
    """Raises InvalidArgument."""
    if holder.port > MAX_PORT:
        raise InvalidArgument(f"holder.port: expected <= {MAX_PORT}, got {holder.port}")
    return HolderPlace(holder.port, _name("holder.socket", holder.socket), _name("holder.host", holder.host))


def _name(field: str, text: str) -> str:
    if len(text) > MAX_NAME_CHARS:
        raise InvalidArgument(f"{field}: expected at most {MAX_NAME_CHARS} characters, got {len(text)}")
    if not text.isprintable():
        raise InvalidArgument(f"{field}: expected printable characters, got {text!r}")
    return text


def printable(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """Free text, truncated and made printable instead of refused: a fault report must not be lost."""
    return "".join(char if char.isprintable() else " " for char in text[:most]).strip()
