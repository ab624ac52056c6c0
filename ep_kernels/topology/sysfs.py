"""What the kernel tells in /proc and /sys: NUMA nodes, the PCIe tree, RDMA ports. Every root is a parameter."""

from __future__ import annotations

import re
from pathlib import Path

from ep_kernels.topology.facts import Gid, Nic, NumaNode, PciePath

_ENCODING = {"2.5": 8 / 10, "5.0": 8 / 10}
"""Share of a PCIe lane's bits that carry data, by its GT/s; from 8 GT/s on it is 128/130."""
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def text_of(path: Path) -> str:
    """A file's text without the spaces around it; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def boot_id(proc: Path = Path("/proc")) -> str:
    """Identity of this boot of this host; "" where it cannot be read."""
    return text_of(proc / "sys/kernel/random/boot_id")


def kilobytes(text: str, key: str) -> int:
    """Bytes of a line "key: n kB"; 0 where there is none."""
    match = re.search(rf"{key}:\s*(\d+) kB", text)
    return int(match[1]) * 1024 if match else 0


def number(text: str, default: int = -1) -> int:
    """The whole number that a text is, else `default`."""
    try:
        return int(text)
    except ValueError:
        return default


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's "0-3,8" as numbers; what is not a number or range is left out."""
    cpus: list[int] = []
    for part in text.split(","):
        if match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part):
            cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cpus)


def numa_nodes(sys: Path) -> tuple[NumaNode, ...]:
    folders = (sys / "devices/system/node").glob("node[0-9]*")
    nodes = [
        NumaNode(
            node=number(folder.name.removeprefix("node")),
            cpus=parse_cpu_list(text_of(folder / "cpulist")),
            memory_bytes=kilobytes(text_of(folder / "meminfo"), "MemTotal"),
            distances=tuple(number(word) for word in text_of(folder / "distance").split()),
        )
        for folder in folders
    ]
    return tuple(sorted(nodes, key=lambda node: node.node))


def pci_device(sys: Path, address: str) -> Path:
    return sys / "bus/pci/devices" / address


def pcie_path(sys: Path, device: Path) -> PciePath:
    """The way from the host bridge to a device, as the folders below /sys/devices nest; () for one that is not there or
    not on PCI."""
    if not device.exists():
        return ()
    try:
        parts = device.resolve().relative_to((sys / "devices").resolve()).parts
    except ValueError:
        return ()
    return tuple(part for part in parts if _HOST_BRIDGE.fullmatch(part) or _PCI_ADDRESS.fullmatch(part))


def pcie_gbps(device: Path) -> float:
    """Gigabytes per second of a device's PCIe link in one direction, at its best: idle links run slower to save power.
    0 = unknown."""
    speed = re.match(r"[\d.]+", text_of(device / "max_link_speed"))
    width = number(text_of(device / "max_link_width"), 0)
    if speed is None or not 0 < width <= 32:
        return 0.0
    return round(float(speed[0]) * _ENCODING.get(speed[0], 128 / 130) * width / 8, 1)


def nics(sys: Path) -> tuple[Nic, ...]:
    found = []
    for device in sorted((sys / "class/infiniband").glob("*"), key=lambda path: natural(path.name)):
        path = pcie_path(sys, device / "device")
        numa = number(text_of(device / "device/numa_node"))
        for port in sorted((device / "ports").glob("[0-9]*"), key=lambda p: number(p.name)):
            found.append(_port(sys, device, port, path, numa))
    return tuple(found)


def _port(sys: Path, device: Path, port: Path, path: PciePath, numa: int) -> Nic:
    rate = re.match(r"[\d.]+", text_of(port / "rate"))
    gids = _gids(port)
    mtus = [number(text_of(sys / "class/net" / gid.netdev / "mtu"), 0) for gid in gids if gid.netdev]
    return Nic(
        device=device.name,
        port=number(port.name),
        link_layer=text_of(port / "link_layer"),
        state=text_of(port / "state").rpartition(": ")[2],
        rate_gbps=float(rate[0]) if rate else 0.0,
        numa_node=numa,
        pcie_path=path,
        physical_state=text_of(port / "phys_state").rpartition(": ")[2],
        gids=gids,
        mtu_bytes=max(mtus, default=0),
    )


def _gids(port: Path) -> tuple[Gid, ...]:
    """The table has hundreds of entries; those of zeros are not in use."""
    gids = []
    for file in sorted((port / "gids").glob("[0-9]*"), key=lambda p: number(p.name)):
        gid = text_of(file)
        if gid and gid != _EMPTY_GID:
            attributes = port / "gid_attrs"
            kind, netdev = text_of(attributes / "types" / file.name), text_of(attributes / "ndevs" / file.name)
            gids.append(Gid(number(file.name), kind, gid, netdev))
    return tuple(gids)


def natural(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name)))
