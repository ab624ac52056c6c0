"""From the facts of hosts to a topology: domains, rails, a transport for each pair, and why others are off. Pure.

    topology = join(hosts, labels)
    topology.devices[3].domain                       # NVLink domain of a device
    topology.reach(0, 9).transport                   # "nvlink" | "cpu" | "tcp" | "none"; .off: why no others

A *domain* is a set of GPUs in which every pair is connected by NVLink: the GPUs of a host, or of many hosts with one
NVLink fabric. A *rail* is the number of a GPU's own NIC among those of its host, so GPUs of one rail share a leaf
switch if hosts are cabled alike. `served` shows whether this release can use the transport for the pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from crossdock.common.transports import GPU_LINKS, LINKS, MEMORY, SOCKETS, installed
from crossdock.control.group.ranks import Area, NetworkPlace, Place, natural
from crossdock.protocol.v1 import topology_pb2 as pb

CPU = -1
"""`Device.gpu` of a host without GPUs."""
WORDS = ("SELF", "PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe distances from near to far, in the words of `nvidia-smi topo`; `ep_kernels.topology.distance` explains them."""
FAR = len(WORDS)
_ONE_SWITCH = 4


TCP = "tcp"
"""Name of the path over SOCKETS."""


@dataclass(frozen=True, slots=True)
class PathKind:
    """A transport as far as paths between devices go. Fields as in `TransportFacts`."""

    name: str
    over: str
    cross_host: bool
    about: str = ""


@cache
def path_kinds() -> tuple[PathKind, ...]:
    """Every transport, those over the best links first; sockets come last."""
    found = [PathKind(one.name, one.over, one.cross_host, one.about) for one in installed().values()]
    found.sort(key=lambda kind: LINKS.index(kind.over))
    if any(kind.over == MEMORY and kind.cross_host for kind in found):
        found.append(PathKind(TCP, SOCKETS, cross_host=True, about="sockets between hosts"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Labels:
    """Location of a host, from the platform's labels. Empty means unknown, never "equal"."""

    clique: str = ""
    product: str = ""
    zone: str = ""
    block: str = ""
    rack: str = ""

    @property
    def area(self) -> Area:
        """From large to small, for the order of ranks."""
        return self.zone, self.block, self.rack


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or a host without GPUs, as a place for a rank.

    Attributes:
        host: index into the hosts that were joined.
        domain: name of its NVLink domain, "" = none; `no_domain` then says why.
        nic: the RDMA port that is nearest to it, "" = none; `no_nic` then says why.
        nic_distance: a word of WORDS, "" = unknown.
        rail: number of that NIC among those that GPUs of its host use, -1 = none.
        network: how its worker says that other hosts reach it; None = it has no network, or no worker.
    """

    host: int
    gpu: int
    domain: str = ""
    no_domain: str = ""
    nic: str = ""
    no_nic: str = ""
    nic_distance: str = ""
    rail: int = -1
    network: NetworkPlace | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """Connection from one device to another.

    Attributes:
        transport: a transport's name, "tcp", "self" or "none": the best served one; if none is served, the best
            that the hardware offers.
        hops: links between them.
        gbps: peak gigabytes per second in one direction; 0 = unknown.
        served: whether this release supports it.
        off: (transport, why) for each that is off, or not served.
        over: the links, as in `common/transports.py`; "" = none.
    """

    transport: str
    hops: int
    gbps: float
    served: bool
    off: tuple[tuple[str, str], ...]
    over: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts, joined. `devices` are by host, then by GPU."""

    hosts: tuple[pb.HostFacts, ...]
    labels: tuple[Labels, ...]
    devices: tuple[Device, ...]

    @property
    def domains(self) -> dict[str, tuple[int, ...]]:
        """Devices by the name of their NVLink domain, in order."""
        found: dict[str, list[int]] = {}
        for number, device in enumerate(self.devices):
            if device.domain:
                found.setdefault(device.domain, []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}

    def name(self, device: int) -> str:
        """ "host/gpu" of a device; a host without GPUs by its own name."""
        here = self.devices[device]
        hostname = self.hosts[here.host].hostname
        return hostname if here.gpu == CPU else f"{hostname}/{here.gpu}"

    def gpu(self, device: int) -> pb.Gpu | None:
        here = self.devices[device]
        return _gpu_of(self.hosts[here.host], here.gpu)

    def nic(self, device: int) -> pb.Nic | None:
        here = self.devices[device]
        return next((nic for nic in self.hosts[here.host].nics if nic.name == here.nic), None)

    def reach(self, one: int, other: int) -> Reach:
        """Connection from device `one` to device `other`."""
        if one == other:
            return Reach("self", 0, 0.0, True, ())
        off: list[tuple[str, str]] = []
        found = Reach("none", 0, 0.0, False, ())
        for kind in path_kinds():
            answer = _FINDERS[kind.over](self, one, other, kind)
            if isinstance(answer, str):
                off += [(kind.name, answer)] if answer else []
                continue
            off += answer.off
            if found.transport == "none" or (answer.served and not found.served):
                found = answer
        return replace(found, off=tuple(off))


def join(hosts: Sequence[pb.HostFacts], labels: Mapping[str, Labels] | None = None) -> Topology:
    """Join the facts of hosts; `labels` by hostname."""
    named = tuple((labels or {}).get(host.hostname, Labels()) for host in hosts)
    devices = [device for number, host in enumerate(hosts) for device in _devices(number, host, named[number])]
    return Topology(tuple(hosts), named, tuple(devices))


def place(uid: str, local_rank: int, host: pb.HostFacts, gpu: int, labels: Labels | None = None) -> Place:
    """Location of a worker, for ranks.py; `gpu`: index of its GPU, CPU = -1."""
    labels = labels or Labels()
    found = next((device for device in _devices(0, host, labels) if device.gpu == gpu), Device(0, CPU))
    return Place(uid, host.hostname, local_rank, found.domain, found.rail, labels.area)


def gpu_index(host: pb.HostFacts, uuid: str, local_rank: int) -> int:
    """The index of a worker's GPU: by UUID if reported, else by local rank; CPU if there is none."""
    for gpu in host.gpus:
        if gpu.uuid == uuid if uuid else gpu.index == local_rank:
            return gpu.index
    return CPU


def nic_distance(gpu: pb.Gpu, nic: pb.Nic) -> tuple[str, int]:
    """(word, hops) between a GPU and a NIC; by NUMA node alone where a PCIe path is unknown; ("", 0) if that is too."""
    one, other = tuple(gpu.pcie_path), tuple(nic.pcie_path)
    same_node = gpu.numa_node == nic.numa_node and gpu.numa_node >= 0
    if not one or not other:
        known = gpu.numa_node >= 0 and nic.numa_node >= 0
        return ("NODE" if same_node else "SYS", 0) if known else ("", 0)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    hops = len(one) + len(other) - 2 * shared
    if shared > 1:
        return "PIX" if hops <= _ONE_SWITCH else "PXB", hops
    return ("PHB" if shared else "NODE" if same_node else "SYS"), hops


def nic_trouble(nic: pb.Nic) -> str:
    """Why a NIC cannot be used; "" = it can."""
    if nic.state != "ACTIVE":
        physical = f", {nic.physical_state}" if nic.physical_state else ""
        return f"{nic.name} is {nic.state or 'in an unknown state'}{physical}"
    if nic.link_layer == "Ethernet" and not nic.gids:
        return f"{nic.name} has no GID: its network device has no address"
    return ""


def gpu_trouble(gpu: pb.Gpu) -> str:
    """Why a GPU is in no NVLink domain whatever the others are; "" = it can be in one."""
    if gpu.mig:
        return "cut into MIG instances, which have no peer access"
    if gpu.fabric_state == "in progress" or (gpu.fabric_state == "not started" and gpu.nvlink_switch):
        return f"NVLink fabric: {gpu.fabric_state}; is the fabric manager running?"
    if gpu.fabric_state == "completed" and gpu.fabric_error:
        return f"NVLink fabric: {gpu.fabric_error}"
    if gpu.max_nvlinks and not gpu.num_nvlinks:
        return f"0 of {gpu.max_nvlinks} NVLinks are up"
    if not gpu.num_nvlinks and not gpu.nvlink_domain:
        return "it has no NVLink"
    return (
        f"compute capability {gpu.capability}: the kernels need {oldest_gpu()}.0 (Hopper) or newer"
        if too_old(gpu)
        else ""
    )


def oldest_gpu() -> int:
    """Major compute capability from which on the kernels of some transport run."""
    return min((facts.oldest_gpu for facts in installed().values() if facts.needs_gpu), default=0)


def too_old(gpu: pb.Gpu) -> bool:
    """Whether no transport's kernels run on it; an unreported version is accepted."""
    major = gpu.capability.partition(".")[0]
    return major.isdecimal() and int(major) < oldest_gpu()


def _devices(number: int, host: pb.HostFacts, labels: Labels) -> list[Device]:
    if not host.gpus:
        return [Device(number, CPU, no_domain=host.no_gpus_reason or "no GPU", no_nic=_no_nic(host))]
    domains = _domains(host, labels)
    nics = _assign_nics(host)
    used = sorted({nic.name for nic in nics.values() if nic}, key=lambda name: _bus_order(host, name))
    devices = []
    for gpu in host.gpus:
        nic = nics[gpu.index]
        domain, why = domains[gpu.index]
        device = Device(number, gpu.index, domain, why)
        if nic is None:
            devices.append(replace(device, no_nic=_no_nic(host)))
        else:
            word, _ = nic_distance(gpu, nic)
            devices.append(replace(device, nic=nic.name, nic_distance=word, rail=used.index(nic.name)))
    return devices


def _domains(host: pb.HostFacts, labels: Labels) -> dict[int, tuple[str, str]]:
    """GPU index -> (domain, "") or ("", why it is in none)."""
    found: dict[int, tuple[str, str]] = {}
    cliques: list[list[pb.Gpu]] = []
    for gpu in host.gpus:
        trouble = gpu_trouble(gpu)
        over_hosts = f"{gpu.fabric_cluster}.{gpu.fabric_clique}" if gpu.fabric_cluster else labels.clique
        if trouble or over_hosts:
            found[gpu.index] = ("", trouble) if trouble else (over_hosts, "")
            continue
        clique = next((clique for clique in cliques if all(_linked(gpu, other) for other in clique)), None)
        if clique is None:
            cliques.append([gpu])
        else:
            clique.append(gpu)
    base = host.boot_id or host.hostname
    for number, clique in enumerate(cliques):
        name = f"{base}:{number}" if len(cliques) > 1 else base
        found.update({gpu.index: (name, "") for gpu in clique})
    return found


def _linked(one: pb.Gpu, other: pb.Gpu) -> bool:
    """Whether two GPUs of one host reach each other over NVLink; unreported links are accepted."""
    links = [(gpu, peer) for gpu, far in ((one, other), (other, one)) for peer in gpu.peers if peer.index == far.index]
    return all(peer.nvlink == "ok" and peer.access == "ok" for _, peer in links)


def _assign_nics(host: pb.HostFacts) -> dict[int, pb.Nic | None]:
    """Each GPU's nearest working NIC; of equally near ones the least used, then the fastest."""
    good = [nic for nic in host.nics if not nic_trouble(nic)]
    uses = dict.fromkeys((nic.name for nic in good), 0)
    found: dict[int, pb.Nic | None] = {}
    for gpu in sorted(host.gpus, key=lambda gpu: gpu.pci_bus_id):

        def key(nic: pb.Nic, gpu: pb.Gpu = gpu) -> tuple[int, int, int, float, tuple[object, ...]]:
            word, hops = nic_distance(gpu, nic)
            near = WORDS.index(word) if word else FAR
            return near, hops, uses[nic.name], -nic.rate_bits_per_s, natural(nic.name)

        best = min(good, key=key, default=None)
        found[gpu.index] = best
        if best is not None:
            uses[best.name] += 1
    return found


def _bus_order(host: pb.HostFacts, name: str) -> tuple[str, tuple[object, ...]]:
    nic = next(nic for nic in host.nics if nic.name == name)
    return nic.pcie_path[-1] if nic.pcie_path else "", natural(name)


def _no_nic(host: pb.HostFacts) -> str:
    return "; ".join(nic_trouble(nic) for nic in host.nics) or "no RDMA device"


def _gpu_of(host: pb.HostFacts, index: int) -> pb.Gpu | None:
    return next((gpu for gpu in host.gpus if gpu.index == index), None)


def _by_links(topology: Topology, one: int, other: int, kind: PathKind) -> Reach | str:
    a, b = topology.devices[one], topology.devices[other]
    for number, device in ((one, a), (other, b)):
        if not device.domain:
            return f"{topology.name(number)}: {device.no_domain}"
    if a.domain != b.domain:
        return _why_not_linked(topology, one, other)
    here, there = topology.gpu(one), topology.gpu(other)
    assert here is not None
    assert there is not None
    direct = next((peer.num_links for peer in here.peers if a.host == b.host and peer.index == b.gpu), 0)
    if direct and here.num_nvlinks:
        return Reach(kind.name, 1, here.nvlink_gbps * direct / here.num_nvlinks, True, (), kind.over)
    joined = kind.cross_host and None not in (a.network, b.network)
    served = joined or _same_kernel(topology, one, other)
    off = () if served else ((kind.name, _why_not_across(kind)),)
    return Reach(kind.name, 2, min(here.nvlink_gbps, there.nvlink_gbps), served, off, kind.over)


def _why_not_across(kind: PathKind) -> str:
    """Why links that lead to another host are not used."""
    return "across hosts: with worker.network only" if kind.cross_host else "across hosts: not in this release"


def _why_not_linked(topology: Topology, one: int, other: int) -> str:
    a, b = topology.devices[one], topology.devices[other]
    if a.host != b.host:
        return f"two NVLink domains: {a.domain} and {b.domain}"
    here = topology.gpu(one)
    peer = next((peer for peer in here.peers if peer.index == b.gpu), None) if here else None
    if peer is None:
        return "no NVLink between them"
    return f"driver: NVLink {peer.nvlink}, peer access {peer.access}"


def _by_memory(topology: Topology, one: int, other: int, kind: PathKind) -> Reach | str:
    if not _same_kernel(topology, one, other):
        return "two hosts: shared memory ends with the host"
    if not _same_domain(topology, one, other):
        return "two domains of one host: other PID namespaces, users or `worker.network.domain`"
    return Reach(kind.name, 1, 0.0, True, (), kind.over)


def _by_sockets(topology: Topology, one: int, other: int, kind: PathKind) -> Reach | str:
    if _same_kernel(topology, one, other) and _same_domain(topology, one, other):
        return ""  # memory comes first: peers would not take it
    networks = []
    for number in (one, other):
        device = topology.devices[number]
        if device.network is None:
            if device.gpu != CPU:
                return "between CPU ranks only, with worker.network"
            return f"{topology.name(number)}: no network configured (worker.network)"
        networks.append(device.network.provider)
    if networks[0] != networks[1]:
        return f"providers differ: {networks[0]} and {networks[1]}"
    return Reach(kind.name, 0, 0.0, True, (), kind.over)


def _same_domain(topology: Topology, one: int, other: int) -> bool:
    """Whether they share memory if their hosts do; a domain that was not told is accepted."""
    networks = topology.devices[one].network, topology.devices[other].network
    domains = {network.domain for network in networks if network is not None and network.domain}
    return len(domains) <= 1 or None in networks


def _same_kernel(topology: Topology, one: int, other: int) -> bool:
    a, b = topology.devices[one].host, topology.devices[other].host
    boots = topology.hosts[a].boot_id, topology.hosts[b].boot_id
    return a == b or (boots[0] == boots[1] != "")


_FINDERS = {GPU_LINKS: _by_links, MEMORY: _by_memory, SOCKETS: _by_sockets}
