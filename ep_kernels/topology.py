"""What this host is: processors, memory, NUMA nodes, GPUs, RDMA devices. States facts, decides nothing.

Reads /proc and /sys (their places are parameters, so a fixture can stand in) and asks NVML where it is installed.
Nothing here raises for what a host does not have: absent facts are empty, None, or said as a reason.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: its number, the processors in it and its memory."""

    node: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML tells it.

    Attributes:
        index, uuid, name: as NVML has them.
        memory_bytes: total.
        pci_address: e.g. "0000:1b:00.0".
        numa_node: from sysfs, -1 = unknown.
        num_nvlinks: active NVLinks.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    pci_address: str
    numa_node: int
    num_nvlinks: int


@dataclass(frozen=True, slots=True)
class Nic:
    """One RDMA port: link layer is "InfiniBand" or "Ethernet"; the rate is in Gb/s; NUMA node -1 = unknown."""

    device: str
    port: int
    link_layer: str
    state: str
    rate_gbps: float
    numa_node: int


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


def probe(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> HostFacts:
    """Look around. `proc` and `sys` are where those file systems are mounted."""
    gpus, reason = _gpus(sys)
    return HostFacts(
        hostname=_text(proc / "sys/kernel/hostname") or platform.node(),
        boot_id=_text(proc / "sys/kernel/random/boot_id"),
        machine=platform.machine(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_kilobytes(_text(proc / "meminfo"), "MemTotal"),
        numa_nodes=_numa_nodes(sys),
        gpus=gpus,
        no_gpus_reason=reason,
        nics=_nics(sys),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's "0-3,8" as numbers; what is not a number or range is left out."""
    cpus: list[int] = []
    for part in text.split(","):
        if match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part):
            cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cpus)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _kilobytes(text: str, key: str) -> int:
    match = re.search(rf"{key}:\s*(\d+) kB", text)
    return int(match[1]) * 1024 if match else 0


def _number(text: str, default: int = -1) -> int:
    try:
        return int(text)
    except ValueError:
        return default


def _numa_nodes(sys: Path) -> tuple[NumaNode, ...]:
    folders = (sys / "devices/system/node").glob("node[0-9]*")
    nodes = [
        NumaNode(
            node=_number(folder.name.removeprefix("node")),
            cpus=parse_cpu_list(_text(folder / "cpulist")),
            memory_bytes=_kilobytes(_text(folder / "meminfo"), "MemTotal"),
        )
        for folder in folders
    ]
    return tuple(sorted(nodes, key=lambda node: node.node))


def _nics(sys: Path) -> tuple[Nic, ...]:
    nics = []
    for device in sorted((sys / "class/infiniband").glob("*")):
        numa = _number(_text(device / "device/numa_node"))
        for port in sorted((device / "ports").glob("[0-9]*"), key=lambda p: _number(p.name)):
            rate = re.match(r"[\d.]+", _text(port / "rate"))
            nics.append(
                Nic(
                    device=device.name,
                    port=_number(port.name),
                    link_layer=_text(port / "link_layer"),
                    state=_text(port / "state").rpartition(": ")[2],
                    rate_gbps=float(rate[0]) if rate else 0.0,
                    numa_node=numa,
                )
            )
    return tuple(nics)


def _gpus(sys: Path) -> tuple[tuple[Gpu, ...], str]:
    """(GPUs, "") or ((), why there are none)."""
    try:
        import pynvml
    except ImportError:
        return (), "NVML bindings (nvidia-ml-py) are not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    try:
        gpus = tuple(_gpu(pynvml, index, sys) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
    return gpus, "" if gpus else "NVML finds no device"


def _gpu(nvml: Any, index: int, sys: Path) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    # NVML writes the PCI domain with eight digits, the kernel with four.
    address = _string(nvml.nvmlDeviceGetPciInfo(device).busId).lower()[-len("0000:00:00.0") :]
    return Gpu(
        index=index,
        uuid=_string(nvml.nvmlDeviceGetUUID(device)),
        name=_string(nvml.nvmlDeviceGetName(device)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device).total),
        pci_address=address,
        numa_node=_number(_text(sys / "bus/pci/devices" / address / "numa_node")),
        num_nvlinks=_active_nvlinks(nvml, device),
    )


def _active_nvlinks(nvml: Any, device: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(device, link))
        except nvml.NVMLError:
            break
    return active


def _string(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
