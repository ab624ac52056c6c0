"""Which RDMA port and which GID a rank uses, each with its reason. Pure functions of the facts of a host.

    nic_of_gpus(probe())["0000:1b:00.0"].why     # "PIX from GPU 0, 400 Gb/s"

The nearest usable port by PCIe distance wins. Of equally near ones the one that fewest GPUs of the host have, then the
fastest, then the first by name: every process of a host computes the same for all GPUs, so ranks spread over the ports
without a message between them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ep_kernels.errors import TransportError
from ep_kernels.network.network_config import NetworkConfig
from ep_kernels.topology import Gid, Gpu, HostFacts, Nic, distance, probe
from ep_kernels.topology.facts import DISTANCES
from ep_kernels.topology.sysfs import natural

ROCE_V2 = "RoCE v2"
_OF_LIBFABRIC = "-rdm"
"""Ending of libfabric's name for an EFA device."""


@dataclass(frozen=True, slots=True)
class NicChoice:
    """The port of one rank.

    Attributes:
        nic: the port.
        distance: a word of `topology.DISTANCES`; "" = unknown.
        why: why this one, in words.
        gid: its address; None = it has none (InfiniBand addresses by LID).
        gid_why: why this one.
    """

    nic: Nic
    distance: str
    why: str
    gid: Gid | None
    gid_why: str


def nic_of_gpus(facts: HostFacts, devices: Sequence[str] = (), gid_index: int = -1) -> dict[str, NicChoice]:
    """The port of each GPU of a host, by PCI address of the GPU.

    Args:
        devices: ports to choose from, as "mlx5_0", "mlx5_0/1" or "mlx5_0:1"; empty: all.
        gid_index: entry of the GID table; -1: chosen.

    Raises:
        TransportError: there is no usable port, and what is wrong with each; or no such port or entry.
    """
    usable = usable_nics(facts.nics, devices)
    uses = dict.fromkeys((nic.name for nic in usable), 0)
    found: dict[str, NicChoice] = {}
    for gpu in sorted(facts.gpus, key=lambda gpu: gpu.pci_address):
        near = min(_distance_key(gpu, nic) for nic in usable)
        equal = [nic for nic in usable if _distance_key(gpu, nic) == near]
        best = min(equal, key=lambda nic: (uses[nic.name], -nic.rate_gbps, natural(nic.name)))
        uses[best.name] += 1
        word, _ = _measured(gpu, best)
        why = f"{word or 'unknown distance'} from GPU {gpu.index}, {best.rate_gbps:g} Gb/s"
        if len(equal) > 1:
            why += f"; {len(equal)} ports are as near, fewest GPUs use this one"
        found[gpu.pci_address] = NicChoice(best, word, why + _of(devices), *best_gid(best, gid_index))
    return found


def nic_of_rank(
    facts: HostFacts, gpu: str = "", local_rank: int = 0, devices: Sequence[str] = (), gid_index: int = -1
) -> NicChoice:
    """The port of one rank.

    Args:
        gpu: UUID or PCI address of the rank's GPU; "": it computes on CPUs.
        local_rank: its number on this host. Used where no GPU decides: ranks take the ports in turn.
        devices, gid_index: as in `nic_of_gpus`.

    Raises:
        TransportError: as `nic_of_gpus`; also a GPU that this host does not have.
    """
    if gpu:
        address = next((one.pci_address for one in facts.gpus if one.uuid == gpu), gpu)
        try:
            return nic_of_gpus(facts, devices, gid_index)[address]
        except KeyError:
            known = ", ".join(one.pci_address for one in facts.gpus) or f"none ({facts.no_gpus_reason})"
            raise TransportError(f"network: expected a GPU of this host, {known}, got {gpu}") from None
    usable = sorted(usable_nics(facts.nics, devices), key=lambda nic: natural(nic.name))
    nic = usable[local_rank % len(usable)]
    why = f"no GPU: local rank {local_rank} takes port {local_rank % len(usable)} of {len(usable)}{_of(devices)}"
    return NicChoice(nic, "", why, *best_gid(nic, gid_index))


def resolved(
    config: NetworkConfig, gpu: str = "", local_rank: int = 0, facts: HostFacts | None = None
) -> tuple[NetworkConfig, NicChoice | None]:
    """The config with the port of one rank as its only device, as the provider names it. None as the port: the config
    is as it was, since the provider takes network interfaces, as tcp, or devices that the kernel does not list as RDMA.

    Args:
        gpu, local_rank: as in `nic_of_rank`.
        facts: of this host; None: probed.

    Raises:
        TransportError: as `nic_of_rank`.
    """
    if "tcp" in config.provider:
        return config, None
    facts = facts or probe()
    by_libfabric = "libfabric" in config.provider
    devices = [device.removesuffix(_OF_LIBFABRIC) if by_libfabric else device for device in config.devices]
    known = {name for nic in facts.nics for name in (nic.device, nic.name)}
    if by_libfabric and (not known or not known.issuperset(devices)):  # as cxi0 of Slingshot
        return config, None
    choice = nic_of_rank(facts, gpu, local_rank, devices, -1 if by_libfabric else config.gid_index)
    device = choice.nic.device
    named = (device, device + _OF_LIBFABRIC) if by_libfabric else (f"{device}:{choice.nic.port}",)
    return msgspec.structs.replace(config, devices=named), choice


def usable_nics(nics: Sequence[Nic], devices: Sequence[str] = ()) -> list[Nic]:
    """Ports among `devices` (empty: all) that can carry bytes. Raises TransportError if there are none, or one is
    unknown."""
    devices = [device.replace(":", "/") for device in devices]
    names = {nic.name for nic in nics} | {nic.device for nic in nics}
    if unknown := [device for device in devices if device not in names]:
        known = ", ".join(nic.name for nic in nics) or "none"
        raise TransportError(f"network.devices: expected RDMA ports of this host, {known}, got {', '.join(unknown)}")
    named = [nic for nic in nics if not devices or nic.name in devices or nic.device in devices]
    usable = [nic for nic in named if not nic_trouble(nic)]
    if not usable:
        reasons = "; ".join(nic_trouble(nic) for nic in named) or "this host has no RDMA device"
        raise TransportError(f"network: no usable RDMA port: {reasons}")
    return usable


def nic_trouble(nic: Nic) -> str:
    """Why a port cannot carry bytes; "" = it can."""
    if nic.state != "ACTIVE":
        physical = f", {nic.physical_state}" if nic.physical_state else ""
        return f"{nic.name} is {nic.state or 'in an unknown state'}{physical}"
    if nic.link_layer == "Ethernet" and not nic.gids:
        return f"{nic.name} has no GID: its network device has no address"
    return ""


def best_gid(nic: Nic, gid_index: int = -1) -> tuple[Gid | None, str]:
    """(entry of the GID table, why): on Ethernet RoCE v2 with an IPv4 address before IPv6, a routed address before a
    link-local one, then the lowest index; elsewhere the first entry.

    Raises:
        TransportError: no such entry.
    """
    if gid_index >= 0:
        found = next((gid for gid in nic.gids if gid.index == gid_index), None)
        if found is None:
            known = ", ".join(str(gid.index) for gid in nic.gids) or "none"
            raise TransportError(f"network.gid_index: expected an entry of {nic.name}, {known}, got {gid_index}")
        return found, "network.gid_index"
    if not nic.gids:
        return None, "no GID: addressed by LID"
    if nic.link_layer != "Ethernet":
        return nic.gids[0], f"the first one: {nic.link_layer or 'unknown link layer'}"
    best = min(nic.gids, key=lambda gid: (*_gid_key(gid), gid.index))
    v1, kind = _gid_key(best)
    words = f"{best.kind or 'unknown kind'}, {('IPv4', 'IPv6', 'link-local')[kind]}"
    return best, words + ("; no entry is RoCE v2, so it is not routed" if v1 else "")


def _gid_key(gid: Gid) -> tuple[bool, int]:
    """(not RoCE v2, kind of address)."""
    try:
        address = ipaddress.IPv6Address(gid.gid)
    except ValueError:
        return gid.kind != ROCE_V2, 2
    return gid.kind != ROCE_V2, 0 if address.ipv4_mapped else 2 if address.is_link_local else 1


def _measured(gpu: Gpu, nic: Nic) -> tuple[str, int]:
    """Distance; by NUMA node alone where a PCIe path is unknown."""
    if gpu.pcie_path and nic.pcie_path:
        return distance(gpu.pcie_path, nic.pcie_path, gpu.numa_node, nic.numa_node)
    if gpu.numa_node < 0 or nic.numa_node < 0:
        return "", 0
    return ("NODE" if gpu.numa_node == nic.numa_node else "SYS"), 0


def _distance_key(gpu: Gpu, nic: Nic) -> tuple[int, int]:
    word, hops = _measured(gpu, nic)
    return (DISTANCES.index(word) if word else len(DISTANCES)), hops


def _of(devices: Sequence[str]) -> str:
    return f", of network.devices {', '.join(devices)}" if devices else ""
