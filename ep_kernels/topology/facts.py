"""The records that `probe` fills in: plain, frozen, comparable. And how far apart two devices are on PCIe."""

from __future__ import annotations

from dataclasses import dataclass

PciePath = tuple[str, ...]
"""From the host bridge to the device: ("pci0000:15", "0000:15:01.0", ..., "0000:1b:00.0"). Empty: none."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: its number, the processors in it, its memory, and the kernel's distance to each node (10 = local;
    empty: not told)."""

    node: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink of a GPU.

    Attributes:
        link: its number on this GPU.
        active: up.
        remote: what is at the other end: "gpu", "switch", "cpu", or "unknown".
        remote_pci: PCI address of the other end; "" where the driver does not tell (switches in a guest).
        gbps: gigabytes per second in one direction, 0 = not told.
    """

    link: int
    active: bool
    remote: str
    remote_pci: str
    gbps: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """A GPU's place in an NVLink fabric that a fabric manager has set up.

    Attributes:
        state: "not supported", "not started", "in progress" or "completed".
        error: the fabric manager's own complaint, "" = none.
        cluster_uuid: of the NVLink domain over several hosts; "" where the fabric ends with this host.
        clique_id: the part of the cluster whose GPUs reach each other.
    """

    state: str
    error: str
    cluster_uuid: str
    clique_id: int


@dataclass(frozen=True, slots=True)
class Ecc:
    """Memory errors since the driver was loaded. `enabled` None: the GPU has no ECC."""

    enabled: bool | None
    corrected: int
    uncorrected: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """Megahertz of multiprocessors and memory now and at most, and why they are lower, in words."""

    sm_mhz: int
    max_sm_mhz: int
    memory_mhz: int
    max_memory_mhz: int
    held_back_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """What the driver says of access from one GPU to another of this host; each is "ok" or the driver's reason.

    Attributes:
        index: of the other GPU.
        nvlink, read, write, atomics: by way of NVLink; reads, writes and atomics at all.
    """

    index: int
    nvlink: str
    read: str
    write: str
    atomics: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML reports it.

    Attributes:
        index, uuid, name: as NVML has them.
        memory_bytes: total.
        pci_address: e.g. "0000:1b:00.0".
        numa_node: from sysfs, -1 = unknown.
        pcie_path: from sysfs.
        pcie_gbps: gigabytes per second of its PCIe link in one direction, at its best; 0 = unknown.
        capability: compute capability, e.g. "9.0"; "" = unknown.
        nvlinks: every link that the GPU has, up or not.
        fabric: None where the driver knows no fabrics.
        mig: whether it is cut into MIG instances; None where it cannot be.
        ecc, clocks: None = not told.
        num_processes: that compute on it, of other containers too; None = not told.
        peers: the other GPUs of this host, by index.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    pci_address: str
    numa_node: int
    pcie_path: PciePath = ()
    pcie_gbps: float = 0.0
    capability: str = ""
    nvlinks: tuple[NvLink, ...] = ()
    fabric: Fabric | None = None
    mig: bool | None = None
    ecc: Ecc | None = None
    clocks: Clocks | None = None
    num_processes: int | None = None
    peers: tuple[Peer, ...] = ()

    @property
    def num_nvlinks(self) -> int:
        """Active NVLinks."""
        return sum(link.active for link in self.nvlinks)

    @property
    def nvlink_gbps(self) -> float:
        """Gigabytes per second that leave by its active NVLinks together, 0 = not told."""
        return sum(link.gbps for link in self.nvlinks if link.active)


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of an RDMA port: index, kind ("IB/RoCE v1" or "RoCE v2"), text, and network device ("" = none)."""

    index: int
    kind: str
    gid: str
    netdev: str


@dataclass(frozen=True, slots=True)
class Nic:
    """One RDMA port.

    Attributes:
        device, port: e.g. "mlx5_0", 1.
        link_layer: "InfiniBand" or "Ethernet".
        state: "ACTIVE", "DOWN", ...
        rate_gbps: gigabits per second.
        numa_node: -1 = unknown.
        pcie_path: from sysfs.
        physical_state: "LinkUp", "Polling", "Disabled", ...
        gids: the entries that are in use.
        mtu_bytes: of the network device (Ethernet); 0 = none, or unknown.
    """

    device: str
    port: int
    link_layer: str
    state: str
    rate_gbps: float
    numa_node: int
    pcie_path: PciePath = ()
    physical_state: str = ""
    gids: tuple[Gid, ...] = ()
    mtu_bytes: int = 0

    @property
    def name(self) -> str:
        """ "mlx5_0/1"."""
        return f"{self.device}/{self.port}"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host states about itself.

    Attributes:
        hostname: as the kernel has it.
        boot_id: identity of this boot; two processes with one boot_id share a kernel.
        machine: processor architecture, e.g. "x86_64".
        num_cpus: processors this process may run on.
        memory_bytes: installed memory, 0 = unknown.
        numa_nodes: by number; empty where the kernel tells none.
        gpus: by NVML index.
        no_gpus_reason: why `gpus` is empty, "" where it is not.
        nics: RDMA ports, by device and port.
        driver_version: of the NVIDIA driver, "" = none.
        cuda_version: newest CUDA that the driver runs, e.g. "13.0"; "" = none.
    """

    hostname: str
    boot_id: str
    machine: str
    num_cpus: int
    memory_bytes: int
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    no_gpus_reason: str
    nics: tuple[Nic, ...]
    driver_version: str = ""
    cuda_version: str = ""


DISTANCES = ("SELF", "PIX", "PXB", "PHB", "NODE", "SYS")
"""From near to far, in the words of `nvidia-smi topo`: the same device; one PCIe switch between; several; the host
bridge; two host bridges of one NUMA node; the link between processors."""
_ONE_SWITCH = 4


def distance(one: PciePath, other: PciePath, one_numa: int = -1, other_numa: int = -1) -> tuple[str, int]:
    """How far apart two devices are: (a word of DISTANCES, PCIe hops between them); ("", 0) where a path is unknown."""
    if not one or not other:
        return "", 0
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    hops = len(one) + len(other) - 2 * shared
    if hops == 0 or one[-1].rsplit(".", 1)[0] == other[-1].rsplit(".", 1)[0]:
        return DISTANCES[0], 0
    if shared > 1:
        return DISTANCES[1] if hops <= _ONE_SWITCH else DISTANCES[2], hops
    if shared == 1:
        return DISTANCES[3], hops
    same_node = one_numa == other_numa and one_numa >= 0
    return DISTANCES[4] if same_node else DISTANCES[5], hops
