"""Facts of the GPUs by NVML. Each is queried separately: one that is not available does not affect the others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ep_kernels.topology import sysfs
from ep_kernels.topology.facts import Clocks, Ecc, Fabric, Gpu, NvLink, Peer

T = TypeVar("T")

_REMOTE = {0: "gpu", 1: "cpu", 2: "switch"}
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "I/O hub topology not supported",
    4: "disabled by registry key",
    5: "not supported",
}
_P2P_READ, _P2P_WRITE, _P2P_NVLINK, _P2P_ATOMICS = 0, 1, 2, 3
_HELD_BACK = {
    0x2: "clocks set by an administrator",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_MEGA = 1e-3


@dataclass(frozen=True, slots=True)
class Found:
    """GPUs and versions; `reason` says why there are no GPUs."""

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    driver_version: str = ""
    cuda_version: str = ""


def read(sys: Path, nvml: Any = None) -> Found:
    """Ask NVML, and sysfs below `sys` about the same devices."""
    if nvml is None:
        nvml = _bindings()
    if nvml is None:
        return Found(reason="NVML bindings (nvidia-ml-py) are not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Found(reason=f"NVML: {error}")
    try:
        return _read(nvml, sys)
    except nvml.NVMLError as error:
        return Found(reason=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def _bindings() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _read(nvml: Any, sys: Path) -> Found:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    ask = _Asker(nvml)
    gpus = [_gpu(ask, index, handle, sys) for index, handle in enumerate(handles)]
    gpus = [replace(gpu, peers=_peers(ask, gpu.index, handles)) for gpu in gpus]
    cuda = ask.of(lambda: int(nvml.nvmlSystemGetCudaDriverVersion()), 0)
    return Found(
        gpus=tuple(gpus),
        reason="" if gpus else "NVML finds no device",
        driver_version=ask.of(lambda: _string(nvml.nvmlSystemGetDriverVersion()), ""),
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
    )


class _Asker:
    """Asks NVML one thing at a time; an answer that is not to be had is the default."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self._refusals: tuple[type[Exception], ...] = (nvml.NVMLError, AttributeError)

    def of(self, question: Callable[[], T], default: T) -> T:
        """The answer; `default` where driver, GPU or bindings have none."""
        try:
            return question()
        except self._refusals:
            return default


def _gpu(ask: _Asker, index: int, device: Any, sys: Path) -> Gpu:
    nvml = ask.nvml
    # NVML writes the PCI domain with eight digits, the kernel with four.
    address = _string(nvml.nvmlDeviceGetPciInfo(device).busId).lower()[-len("0000:00:00.0") :]
    folder = sysfs.pci_device(sys, address)
    capability = ask.of(lambda: nvml.nvmlDeviceGetCudaComputeCapability(device), None)
    mig = ask.of(lambda: nvml.nvmlDeviceGetMigMode(device)[0], None)
    return Gpu(
        index=index,
        uuid=_string(nvml.nvmlDeviceGetUUID(device)),
        name=_string(nvml.nvmlDeviceGetName(device)),
        memory_bytes=ask.of(lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).total), 0),
        pci_address=address,
        numa_node=sysfs.number(sysfs.text_of(folder / "numa_node")),
        pcie_path=sysfs.pcie_path(sys, folder),
        pcie_gbps=sysfs.pcie_gbps(folder),
        capability="{}.{}".format(*capability) if capability else "",
        nvlinks=_nvlinks(ask, device),
        fabric=_fabric(ask, device),
        mig=None if mig is None else bool(mig),
        ecc=_ecc(ask, device),
        clocks=_clocks(ask, device),
        num_processes=ask.of(lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(device)), None),
    )


def _nvlinks(ask: _Asker, device: Any) -> tuple[NvLink, ...]:
    links: list[NvLink] = []
    for number in range(ask.nvml.NVML_NVLINK_MAX_LINKS):
        link = _nvlink(ask, device, number)
        if link is None:
            break
        links.append(link)
    return tuple(links)


def _nvlink(ask: _Asker, device: Any, link: int) -> NvLink | None:
    nvml = ask.nvml
    state = ask.of(lambda: int(nvml.nvmlDeviceGetNvLinkState(device, link)), -1)
    if state < 0:
        return None
    kind = ask.of(lambda: int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link)), -1)
    address = ask.of(lambda: _string(nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId), "")
    gbps = _nvlink_gbps(ask, device, link) if state else 0.0
    return NvLink(link, bool(state), _REMOTE.get(kind, "unknown"), address.lower()[-len("0000:00:00.0") :], gbps)


def _nvlink_gbps(ask: _Asker, device: Any, link: int) -> float:
    nvml = ask.nvml
    fields = [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link), (nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0)]
    answers: list[Any] = ask.of(lambda: list(nvml.nvmlDeviceGetFieldValues(device, fields)), [])
    for answer in answers:
        if answer.nvmlReturn == 0 and answer.value.uiVal:
            return round(float(answer.value.uiVal) * _MEGA, 3)
    return 0.0


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h. Some releases of nvidia-ml-py give the cluster 80 bytes where the driver writes
    16, and so read what follows from behind the answer."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


def _fabric(ask: _Asker, device: Any) -> Fabric | None:
    nvml = ask.nvml

    def answer() -> Any:
        info = _FabricInfo()
        nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info))
        return info

    info = ask.of(answer, None)
    if info is None:
        return None
    uuid = bytes(info.clusterUuid).hex()
    named = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])) if uuid.strip("0") else ""
    error = _string(ask.of(lambda: nvml.nvmlErrorString(info.status), "")) if info.status else ""
    return Fabric(_FABRIC_STATES.get(info.state, "unknown"), error, named, int(info.cliqueId))


def _ecc(ask: _Asker, device: Any) -> Ecc | None:
    nvml = ask.nvml
    enabled = ask.of(lambda: bool(nvml.nvmlDeviceGetEccMode(device)[0]), None)
    if not enabled:
        return Ecc(enabled, 0, 0)

    def errors(kind: int) -> int:
        return ask.of(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(device, kind, 0)), 0)

    corrected, uncorrected = errors(0), errors(1)
    return Ecc(enabled, corrected, uncorrected)


def _clocks(ask: _Asker, device: Any) -> Clocks | None:
    nvml = ask.nvml

    def megahertz(question: str, kind: int) -> int:
        return ask.of(lambda: int(getattr(nvml, question)(device, kind)), 0)

    most = megahertz("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)
    if not most:
        return None
    reasons = ask.of(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)), 0)
    return Clocks(
        sm_mhz=megahertz("nvmlDeviceGetClockInfo", _CLOCK_SM),
        max_sm_mhz=most,
        memory_mhz=megahertz("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
        max_memory_mhz=megahertz("nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY),
        held_back_by=tuple(word for bit, word in _HELD_BACK.items() if reasons & bit),
    )


def _peers(ask: _Asker, index: int, handles: list[Any]) -> tuple[Peer, ...]:
    nvml = ask.nvml

    def status(other: int, what: int) -> str:
        number = ask.of(lambda: int(nvml.nvmlDeviceGetP2PStatus(handles[index], handles[other], what)), -1)
        return _P2P_STATUS.get(number, "unknown")

    return tuple(
        Peer(
            index=other,
            nvlink=status(other, _P2P_NVLINK),
            read=status(other, _P2P_READ),
            write=status(other, _P2P_WRITE),
            atomics=status(other, _P2P_ATOMICS),
        )
        for other in range(len(handles))
        if other != index
    )


def _string(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
