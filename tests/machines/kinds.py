"""The kinds of hosts that the tests and the pages in docs/topology know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.machines.host import Host, PaperGpu, PaperNic

_GIB = 1 << 30
_SWITCH, _GPU = 2, 0
_H100 = "NVIDIA H100 80GB HBM3"
_H100_BUSES = (("15", "1b", 0), ("37", "43", 0), ("48", "52", 0), ("59", "61", 0),
               ("97", "9d", 1), ("bd", "c3", 1), ("c7", "d1", 1), ("d7", "df", 1))  # fmt: skip
"""Host bridge, GPU and NUMA node of the eight, as on a DGX H100."""
_H100_NICS = (("mlx5_0", "18"), ("mlx5_3", "40"), ("mlx5_4", "4f"), ("mlx5_5", "5e"),
              ("mlx5_6", "9a"), ("mlx5_9", "c0"), ("mlx5_10", "ce"), ("mlx5_11", "dc"))  # fmt: skip
_STORAGE_NICS = (("mlx5_1", "29:00.0", 0), ("mlx5_2", "29:00.1", 0), ("mlx5_7", "aa:00.0", 1), ("mlx5_8", "aa:00.1", 1))


def _below_switch(bridge: str, port: str, device: str) -> tuple[str, ...]:
    """A device below a PCIe switch of its own root port: bridge, root port, upstream, downstream, device."""
    up = int(bridge, 16) + 1
    return (
        f"pci0000:{bridge}", f"0000:{bridge}:01.0", f"0000:{up:02x}:00.0",
        f"0000:{up + 1:02x}:{port}.0", f"0000:{device}:00.0",
    )  # fmt: skip


def hgx_h100(number: int = 0) -> Host:
    """8 H100 on one NVSwitch board, 8 ConnectX-7 for them and 4 ports for storage, of which one is down."""
    everybody = frozenset(range(8))
    gpus = [
        PaperGpu(
            _below_switch(bridge, "00", device), numa, _H100, 80 * _GIB,
            links=tuple((True, _SWITCH, f"0000:{5 + link // 6:02x}:00.0") for link in range(18)),
            link_mbps=26562, nvlink_peers=everybody - {index}, access_peers=everybody - {index}, fabric_state=3,
        )
        for index, (bridge, device, numa) in enumerate(_H100_BUSES)
    ]  # fmt: skip
    nics = [
        PaperNic(name, _below_switch(bridge, "01", device), numa)
        for (name, device), (bridge, _, numa) in zip(_H100_NICS, _H100_BUSES, strict=True)
    ]
    for name, address, numa in _STORAGE_NICS:
        bridge = "26" if numa == 0 else "a7"
        bus = (f"pci0000:{bridge}", f"0000:{bridge}:01.0", f"0000:{address}")
        down = name == "mlx5_2"
        nics.append(
            PaperNic(
                name, bus, numa, rate="200 Gb/sec (4X HDR)",
                state="1: DOWN" if down else "4: ACTIVE", physical="3: Disabled" if down else "5: LinkUp",
            )
        )  # fmt: skip
    name = f"h100-{number}"
    return Host(name, f"boot-{name}", ("0-55,112-167", "56-111,168-223"), tuple(gpus), tuple(nics))


def gb200_tray(number: int = 0) -> Host:
    """One of the 18 trays of a GB200 NVL72: 4 GPUs on the rack's NVLink fabric, 4 ConnectX-7, two Grace processors."""
    everybody = frozenset(range(4))
    gpus = [
        PaperGpu(
            (f"pci00{2 * index:02x}:00", f"00{2 * index:02x}:00:00.0", f"00{2 * index:02x}:01:00.0"), index // 2,
            "NVIDIA GB200", 186 * _GIB, links=tuple((True, _SWITCH, "") for _ in range(18)), link_mbps=53125,
            nvlink_peers=everybody - {index}, access_peers=everybody - {index}, capability=(10, 0),
            fabric_state=3, cluster=bytes(range(16)), clique=7, speed="64.0 GT/s PCIe",
        )
        for index in range(4)
    ]  # fmt: skip
    nics = [
        PaperNic(
            f"mlx5_{index}",
            (f"pci00{2 * index:02x}:00", f"00{2 * index:02x}:00:01.0", f"00{2 * index:02x}:03:00.0"),
            index // 2,
        )
        for index in range(4)
    ]
    name = f"gb200-{number}"
    return Host(name, f"boot-{name}", ("0-71", "72-143"), tuple(gpus), tuple(nics))


def pcie_box(number: int = 0) -> Host:
    """4 L40S without NVLink: two below one PCIe switch, each of the others at a root port; one RoCE NIC, two ports."""
    buses = (
        _below_switch("17", "00", "1a"), _below_switch("17", "01", "1b"),
        ("pci0000:17", "0000:17:03.0", "0000:2a:00.0"), ("pci0000:97", "0000:97:01.0", "0000:9a:00.0"),
    )  # fmt: skip
    gpus = tuple(
        PaperGpu(bus, 0 if index < 3 else 1, "NVIDIA L40S", 48 * _GIB, capability=(8, 9), mig=None,
                 access_peers=frozenset({0, 1} - {index} if index < 2 else ()), speed="16.0 GT/s PCIe")
        for index, bus in enumerate(buses)
    )  # fmt: skip
    nic = PaperNic(
        "mlx5_0", ("pci0000:17", "0000:17:05.0", "0000:3a:00.0"), 0, rate="100 Gb/sec (4X EDR)", layer="Ethernet",
        netdev="ens3", gids=(f"0000:0000:0000:0000:0000:ffff:0a00:00{number + 1:02x}",),
    )  # fmt: skip
    name = f"l40s-{number}"
    return Host(name, f"boot-{name}", ("0-31", "32-63"), gpus, (nic, replace(nic, name="mlx5_1", gids=())))


def mig_h100(number: int = 0) -> Host:
    """8 H100 of which GPU 2 is cut into MIG instances, and GPU 5 has uncorrected memory errors and runs hot."""
    host, name = hgx_h100(number), f"mig-{number}"
    gpus = list(host.gpus)
    gpus[2] = replace(gpus[2], mig=True, nvlink_peers=frozenset(), access_peers=frozenset())
    for index, gpu in enumerate(gpus):
        if index != 2:
            gpus[index] = replace(gpu, nvlink_peers=gpu.nvlink_peers - {2}, access_peers=gpu.access_peers - {2})
    gpus[5] = replace(gpus[5], ecc_uncorrected=2, throttle=0x40)
    return replace(host, name=name, boot_id=f"boot-{name}", gpus=tuple(gpus))


def no_gpu(number: int = 0) -> Host:
    """A laptop: no driver, no RDMA."""
    return Host(f"laptop-{number}", f"boot-laptop-{number}", ("0-7",), driver=False)


KINDS: dict[str, tuple[Callable[[int], Host], int]] = {
    "hgx-h100": (hgx_h100, 2),
    "gb200-nvl72": (gb200_tray, 18),
    "pcie-l40s": (pcie_box, 1),
    "mig-h100": (mig_h100, 1),
    "no-gpu": (no_gpu, 1),
}
"""Name -> (maker, hosts of one group)."""
