"""RDMA on this host: the port and GID of each GPU, whether NICs reach GPU memory, and how much memory may be locked."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossdock.common.plural import counted
from crossdock.doctor.findings import Finding, Level, fail, judge, ok, warn
from ep_kernels import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.nics import NicChoice, nic_of_gpus, nic_of_rank
from ep_kernels.topology import HostFacts

_CAP_IPC_LOCK = 14
_OPEN_DRIVER = "Open Kernel Module"


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """What the kernel allows.

    Attributes:
        peermem: the module nvidia_peermem is loaded.
        open_driver: the NVIDIA driver is that of the open kernel modules, which exports memory as dma-buf.
        locked_bytes: soft limit of locked memory, -1 = none.
        ipc_lock: this process may lock more than that (CAP_IPC_LOCK).
    """

    peermem: bool
    open_driver: bool
    locked_bytes: int
    ipc_lock: bool


def read(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> RdmaFacts:
    """Read it all; nothing raises for what is not there."""
    return RdmaFacts(
        peermem=(sys / "module/nvidia_peermem").exists(),
        open_driver=_OPEN_DRIVER in _text(proc / "driver/nvidia/version"),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        ipc_lock=_has_capability(_text(proc / "self/status"), _CAP_IPC_LOCK),
    )


def judge_nics(
    facts: HostFacts, rdma: RdmaFacts, devices: Sequence[str] = (), gid_index: int = -1
) -> Iterator[Finding]:
    """Findings about the ports, the first for each GPU which port and GID it uses. `devices`, `gid_index`: of the
    configuration."""
    if not facts.nics:
        return
    try:
        choices = (
            nic_of_gpus(facts, devices, gid_index)
            if facts.gpus
            else {"": nic_of_rank(facts, devices=devices, gid_index=gid_index)}
        )
    except TransportError as error:
        cure = "check cable, switch port and address of one; name ports that are up in worker.network.devices"
        yield (fail if devices or gid_index >= 0 else warn)("rdma-nic", str(error), "no rank can use RDMA here", cure)
        return
    for choice in choices.values():
        yield ok("rdma-nic", _shown(choice))
    yield from _shared(choices.values())
    if facts.gpus:
        yield _gpu_direct(rdma)


def judge_memlock(provider: str, rdma: RdmaFacts) -> Finding:
    """Whether a provider may lock the memory that it registers."""
    if "tcp" in provider.partition(";")[0]:
        return ok("data-memlock", f"not needed: provider {provider} locks no memory")
    if rdma.locked_bytes < 0 or rdma.ipc_lock:
        return ok("data-memlock", "unlimited" if rdma.locked_bytes < 0 else "CAP_IPC_LOCK")
    cause = f"provider {provider} registers hundreds of MiB, and a registration over the limit is refused"
    cure = (
        "ulimit -l unlimited; LimitMEMLOCK=infinity of the unit, in Kubernetes of containerd's; or CAP_IPC_LOCK as root"
    )
    return judge("data-memlock", False, f"{rdma.locked_bytes >> 10} KiB", cause, cure, level=Level.WARN)


def judge_retries(provider: str, step_timeout_s: float) -> Iterator[Finding]:
    """Whether a link that is broken is noticed before the deadline of a step: a queue pair repeats a packet first."""
    retry_s = NetworkConfig(provider=provider).retry_s
    if not retry_s:
        return
    what = f"a queue pair gives up after {retry_s:.1f} s at most, a step after {step_timeout_s:g} s"
    cause = "a broken link ends in the step's deadline, which names the rank and not the link"
    cure = f"worker.step_timeout_s of {2 * retry_s:.0f} or more"
    yield judge("rdma-retry", step_timeout_s > retry_s, what, cause, cure, level=Level.WARN)


def _shown(choice: NicChoice) -> str:
    gid = f"GID {choice.gid.index} {choice.gid.gid}, " if choice.gid else ""
    return f"{choice.nic.name}: {choice.why}; {gid}{choice.gid_why}"


def _shared(choices: Iterable[NicChoice]) -> Iterator[Finding]:
    uses: dict[str, int] = {}
    for choice in choices:
        uses[choice.nic.name] = uses.get(choice.nic.name, 0) + 1
    if shared := {name: count for name, count in uses.items() if count > 1}:
        words = ", ".join(f"{name}: {counted(count, 'GPU')}" for name, count in shared.items())
        cause = "each of their ranks gets a part of its rate"
        yield warn(
            "rdma-shared", words, cause, "enable a NIC near to each GPU, or name others in worker.network.devices"
        )


def _gpu_direct(rdma: RdmaFacts) -> Finding:
    if rdma.peermem or rdma.open_driver:
        return ok("gpu-direct", "nvidia_peermem" if rdma.peermem else "dma-buf, by the open kernel modules")
    what = "neither nvidia_peermem nor the driver's open kernel modules (dma-buf)"
    cause = "NICs do not reach GPU memory: rows are staged through pinned host memory"
    return warn("gpu-direct", what, cause, "modprobe nvidia_peermem, or install the open kernel modules of the driver")


def _has_capability(status: str, number: int) -> bool:
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> number & 1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
