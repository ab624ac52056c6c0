"""What a host says of itself, as a message: `probe()` -> `HostFacts` of topology.proto. Translates, decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from crossdock.protocol.v1 import topology_pb2 as pb
from ep_kernels import topology

_MOST_CHARS = 256
"""Most characters of a reason; the control plane takes no longer texts."""
_MOST_NICS, _MOST_GIDS = 64, 8
"""Most NICs of a host, GIDs of a NIC that the control plane takes: a host may show hundreds of virtual functions."""


def host_facts(hostname: str = "", facts: topology.HostFacts | None = None) -> pb.HostFacts:
    """The message of a host.

    Args:
        hostname: the name by which the platform knows it; "" = as the kernel has it.
        facts: of a host that was probed already; None probes this one.
    """
    facts = facts or topology.probe()
    return pb.HostFacts(
        hostname=hostname or facts.hostname,
        boot_id=facts.boot_id,
        num_cpus=facts.num_cpus,
        memory_bytes=facts.memory_bytes,
        numa_nodes=len(facts.numa_nodes),
        gpus=[_gpu(gpu, facts) for gpu in facts.gpus],
        nics=[_nic(nic) for nic in _registered(facts.nics)],
        no_gpus_reason=" ".join(facts.no_gpus_reason.split())[:_MOST_CHARS],
        driver_version=facts.driver_version,
        cuda_version=facts.cuda_version,
        machine=facts.machine,
    )


def _registered(nics: Sequence[topology.Nic]) -> list[topology.Nic]:
    """As many as are taken, those first that work."""
    places = sorted(range(len(nics)), key=lambda place: nics[place].state != "ACTIVE")
    return [nics[place] for place in sorted(places[:_MOST_NICS])]


def _gpu(gpu: topology.Gpu, facts: topology.HostFacts) -> pb.Gpu:
    fabric = gpu.fabric or topology.Fabric("", "", "", 0)
    clocks = gpu.clocks or topology.Clocks(0, 0, 0, 0, ())
    return pb.Gpu(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        pci_bus_id=gpu.pci_address,
        numa_node=gpu.numa_node,
        nvlink_domain=facts.boot_id if gpu.num_nvlinks and not gpu.mig else "",
        pcie_path=gpu.pcie_path,
        pcie_gbps=gpu.pcie_gbps,
        capability=gpu.capability,
        num_nvlinks=gpu.num_nvlinks,
        max_nvlinks=len(gpu.nvlinks),
        nvlink_gbps=gpu.nvlink_gbps,
        nvlink_switch=any(link.active and link.remote == "switch" for link in gpu.nvlinks),
        fabric_state=fabric.state,
        fabric_error=fabric.error,
        fabric_cluster=fabric.cluster_uuid,
        fabric_clique=fabric.clique_id,
        mig=bool(gpu.mig),
        peers=[_peer(gpu, peer, facts) for peer in gpu.peers],
        ecc_uncorrected=gpu.ecc.uncorrected if gpu.ecc else 0,
        held_back_by=clocks.held_back_by,
        sm_mhz=clocks.sm_mhz,
        max_sm_mhz=clocks.max_sm_mhz,
    )


def _peer(gpu: topology.Gpu, peer: topology.Peer, facts: topology.HostFacts) -> pb.GpuPeer:
    address = next((other.pci_address for other in facts.gpus if other.index == peer.index), "")
    direct = sum(link.active and link.remote == "gpu" and link.remote_pci == address for link in gpu.nvlinks)
    access = peer.read if peer.read != "ok" else peer.write
    return pb.GpuPeer(index=peer.index, nvlink=peer.nvlink, access=access, num_links=direct)


def _nic(nic: topology.Nic) -> pb.Nic:
    return pb.Nic(
        name=nic.name,
        link_layer=nic.link_layer,
        state=nic.state,
        rate_bits_per_s=int(nic.rate_gbps * 1e9),
        numa_node=nic.numa_node,
        pcie_path=nic.pcie_path,
        physical_state=nic.physical_state,
        gids=[gid.gid for gid in nic.gids[:_MOST_GIDS]],
        roce=max((gid.kind for gid in nic.gids if nic.link_layer == "Ethernet"), default=""),
        mtu_bytes=nic.mtu_bytes,
    )
