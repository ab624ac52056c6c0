"""The parts of a host on paper, and how they become files and NVML answers."""
# ruff: noqa: N802  (PaperNvml has the names of NVML)

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class PaperGpu:
    """A GPU. bus: its folders below /sys/devices, from the host bridge down. peers: {index: P2P status by NVLink}, all
    others 5 (not supported); access: {index: status}; links: (active, remote kind, remote PCI address)."""

    bus: tuple[str, ...]
    numa: int
    name: str
    memory: int
    links: tuple[tuple[bool, int, str], ...] = ()
    link_mbps: int = 0
    nvlink_peers: frozenset[int] = frozenset()
    access_peers: frozenset[int] = frozenset()
    capability: tuple[int, int] = (9, 0)
    mig: bool | None = False
    fabric_state: int | None = None
    cluster: bytes = bytes(16)
    clique: int = 0
    ecc_uncorrected: int = 0
    throttle: int = 0
    num_processes: int | None = 0
    width: int = 16
    speed: str = "32.0 GT/s PCIe"


@dataclass(frozen=True)
class PaperNic:
    """An RDMA device with one port."""

    name: str
    bus: tuple[str, ...]
    numa: int
    rate: str = "400 Gb/sec (4X NDR)"
    layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    netdev: str = ""
    gids: tuple[str, ...] = ("fe80:0000:0000:0000:a088:c203:0012:3456",)


@dataclass(frozen=True)
class Host:
    """A host on paper; `write` makes it."""

    name: str
    boot_id: str
    numa_cpus: tuple[str, ...]
    gpus: tuple[PaperGpu, ...] = ()
    nics: tuple[PaperNic, ...] = ()
    driver: bool = True

    def write(self, folder: Path) -> tuple[Path, Path, PaperNvml]:
        """(proc, sys, NVML) for `probe`."""
        proc, sys = folder / self.name / "proc", folder / self.name / "sys"
        put(proc / "sys/kernel/hostname", self.name)
        put(proc / "sys/kernel/random/boot_id", self.boot_id)
        put(proc / "meminfo", "MemTotal:       2113376256 kB")
        for node, cpus in enumerate(self.numa_cpus):
            put(sys / f"devices/system/node/node{node}/cpulist", cpus)
            put(sys / f"devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:  1056688128 kB")
            distances = " ".join("10" if other == node else "21" for other in range(len(self.numa_cpus)))
            put(sys / f"devices/system/node/node{node}/distance", distances)
        for gpu in self.gpus:
            device = _pci(sys, gpu.bus, gpu.numa)
            put(device / "max_link_speed", gpu.speed)
            put(device / "max_link_width", str(gpu.width))
        for nic in self.nics:
            _write_nic(sys, nic)
        return proc, sys, PaperNvml(self)


def put(path: Path, text: str) -> None:
    """Write one file of a tree, with the newline that the kernel adds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _pci(sys: Path, bus: tuple[str, ...], numa: int) -> Path:
    device = sys.joinpath("devices", *bus)
    put(device / "numa_node", str(numa))
    link = sys / "bus/pci/devices" / bus[-1]
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(device)
    return device


def _write_nic(sys: Path, nic: PaperNic) -> None:
    device = _pci(sys, nic.bus, nic.numa)
    folder = device / "infiniband" / nic.name
    port = folder / "ports/1"
    for name, text in (
        ("rate", nic.rate),
        ("link_layer", nic.layer),
        ("state", nic.state),
        ("phys_state", nic.physical),
    ):
        put(port / name, text)
    for index, gid in enumerate((*nic.gids, "0000:0000:0000:0000:0000:0000:0000:0000")):
        put(port / f"gids/{index}", gid)
        put(port / f"gid_attrs/types/{index}", "RoCE v2" if nic.layer == "Ethernet" else "IB/RoCE v1")
        if nic.netdev:
            put(port / f"gid_attrs/ndevs/{index}", nic.netdev)
    if nic.netdev:
        put(sys / "class/net" / nic.netdev / "mtu", "9000")
    (folder / "device").symlink_to(device)
    link = sys / "class/infiniband" / nic.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


class PaperNvmlError(Exception):
    """What PaperNvml raises, as pynvml would."""


@dataclass
class PaperNvml:
    """The part of pynvml that `probe` asks, for the GPUs of a host. Handles are indices."""

    host: Host
    NVMLError: type[Exception] = PaperNvmlError
    NVML_NVLINK_MAX_LINKS: int = 36
    NVML_FI_DEV_NVLINK_GET_SPEED: int = 164
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: int = 90
    open: int = field(default=0)

    def nvmlInit(self) -> None:
        if not self.host.driver:
            raise PaperNvmlError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.148.08"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.host.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, device: int) -> Any:
        return SimpleNamespace(busId=b"0000" + self.host.gpus[device].bus[-1].upper().encode())

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{self.host.boot_id}-{device}"

    def nvmlDeviceGetName(self, device: int) -> str:
        return self.host.gpus[device].name

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(total=self.host.gpus[device].memory)

    def nvmlDeviceGetCudaComputeCapability(self, device: int) -> tuple[int, int]:
        return self.host.gpus[device].capability

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:
        mig = self.host.gpus[device].mig
        if mig is None:
            raise PaperNvmlError("Not Supported")
        return [int(mig), int(mig)]

    def _link(self, device: int, link: int) -> tuple[bool, int, str]:
        links = self.host.gpus[device].links
        if link >= len(links):
            raise PaperNvmlError("Invalid Argument")
        return links[link]

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        return int(self._link(device, link)[0])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: int, link: int) -> int:
        return self._link(device, link)[1]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> Any:
        return SimpleNamespace(busId=f"0000{self._link(device, link)[2]}".encode())

    def nvmlDeviceGetFieldValues(self, device: int, fields: list[tuple[int, int]]) -> list[Any]:
        value = SimpleNamespace(uiVal=self.host.gpus[device].link_mbps)
        return [SimpleNamespace(nvmlReturn=3, value=value), SimpleNamespace(nvmlReturn=0, value=value)]

    def nvmlDeviceGetGpuFabricInfo(self, device: int, info: Any) -> None:
        gpu = self.host.gpus[device]
        if gpu.fabric_state is None:
            raise PaperNvmlError("Not Supported")
        written = struct.pack("=16sIIB3x", gpu.cluster, 0, gpu.clique, gpu.fabric_state)  # as nvml.h lays it out
        ctypes.memmove(info, written, len(written))

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:
        count = self.host.gpus[device].num_processes
        if count is None:
            raise PaperNvmlError("Not Supported")
        return [SimpleNamespace(pid=0, usedGpuMemory=None)] * count

    def nvmlDeviceGetEccMode(self, device: int) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetTotalEccErrors(self, device: int, kind: int, counter: int) -> int:
        return self.host.gpus[device].ecc_uncorrected if kind else 0

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return 345 if kind == 1 else 2619

    def nvmlDeviceGetMaxClockInfo(self, device: int, kind: int) -> int:
        return 1980 if kind == 1 else 2619

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:
        return self.host.gpus[device].throttle

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, what: int) -> int:
        gpu = self.host.gpus[one]
        return 0 if other in (gpu.nvlink_peers if what == 2 else gpu.access_peers) else 5
