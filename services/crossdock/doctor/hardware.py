"""The facts of a host, judged: driver, GPUs, NVLink, peer access, NICs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from crossdock.common.transports import GPU_LINKS, installed
from crossdock.control.topology.discovery import Topology, gpu_trouble, join, nic_trouble, oldest_gpu, too_old
from crossdock.doctor.findings import Finding, Level, fail, judge, ok, skipped, warn
from crossdock.protocol.v1 import topology_pb2 as pb

if TYPE_CHECKING:
    from ep_kernels.topology import PeerTrial

LEAST_OF_PAPER = 0.5
"""A copy between two GPUs that reaches less than this of what their NVLinks carry on paper is too slow; healthy ones
reach about 0.8."""
_LEAST_MTU = 4096
_HARMLESS = {"power cap", "clocks set by an administrator"}


Trials: TypeAlias = "Mapping[tuple[str, str], PeerTrial]"
"""Trials by the PCI addresses of the GPUs (from, to)."""


def judge_host(host: pb.HostFacts, *, needs_gpus: bool) -> Iterator[Finding]:
    """Findings from facts alone. needs_gpus: a host without GPUs is a failure."""
    yield _driver(host, needs_gpus=needs_gpus)
    if host.gpus:
        yield from _gpus(host, needs_gpus=needs_gpus)
        yield _domain(join([host]))
    yield from _nics(host)


def judge_sharing(num_processes: Sequence[int | None]) -> Iterator[Finding]:
    """Whether others compute on the GPUs. num_processes: on each of them, by index, None where NVML does not tell;
    empty: there are no GPUs."""
    busy = [f"GPU {gpu}: {count} process{'es' * (count > 1)}" for gpu, count in enumerate(num_processes) if count]
    if busy:
        cause = "processes of one GPU take turns (time-slicing): one that waits for rows stops the one that sends them"
        cure = (
            "give each rank a GPU of its own: end them, unless they are the group that serves here; in Kubernetes "
            "configure no `sharing` in the device plugin"
        )
        yield warn("gpu-sharing", ", ".join(busy), cause, cure)
    elif None in num_processes:
        yield skipped("gpu-sharing", f"NVML does not count the processes of GPU {list(num_processes).index(None)}")
    elif num_processes:
        yield ok("gpu-sharing", "nobody computes on them")


def judge_trials(host: pb.HostFacts, trials: Trials, why_not: str) -> Iterator[Finding]:
    """Peer access, as it was tried; `why_not`: why nothing was tried."""
    if not trials:
        yield skipped("peer-access", why_not)
        return
    topology = join([host])
    numbers = {gpu.pci_bus_id: number for number, gpu in enumerate(host.gpus)}
    broken = {pair: trial.why for pair, trial in trials.items() if not trial.ok}
    for reason in sorted(set(broken.values())):
        pairs = [pair for pair, why in broken.items() if why == reason]
        cure = (
            "check the fabric manager, MIG mode, and ACS and IOMMU settings of the host; then `nvidia-smi topo -p2p rw`"
        )
        yield fail(
            "peer-access", f"{_pairs(pairs, numbers)}: {reason}", "one GPU cannot write the other's memory", cure
        )
    slow = list(_slow(topology, trials, numbers))
    for words in slow:
        cause = "an NVLink is down or in error, or other work ran meanwhile"
        yield warn("peer-bandwidth", words, cause, "`nvidia-smi nvlink -s -e`; run this again on an idle host")
    working = [trial.gbps for trial in trials.values() if trial.ok]
    if working and not slow:
        yield ok("peer-access", f"{len(working)} ordered pairs, {min(working):.0f} to {max(working):.0f} GB/s each")


def _slow(topology: Topology, trials: Trials, numbers: Mapping[str, int]) -> Iterator[str]:
    for (src, dst), trial in trials.items():
        if src in numbers and dst in numbers and trial.ok:
            reach = topology.reach(numbers[src], numbers[dst])
            paper = reach.gbps if reach.over == GPU_LINKS else 0.0
            if trial.gbps < LEAST_OF_PAPER * paper:
                yield (
                    f"GPU {numbers[src]} to GPU {numbers[dst]}: {trial.gbps:.0f} GB/s, expected at least "
                    f"{LEAST_OF_PAPER * paper:.0f} of {paper:.0f} on paper"
                )


def _pairs(pairs: list[tuple[str, str]], numbers: Mapping[str, int]) -> str:
    words = ", ".join(f"{numbers.get(src, src)}-{numbers.get(dst, dst)}" for src, dst in sorted(pairs)[:4])
    return f"GPUs {words}{', ...' if len(pairs) > 4 else ''}"


def _names(*, needs_gpu: bool) -> str:
    return " or ".join(facts.name for facts in installed().values() if facts.needs_gpu is needs_gpu)


def _driver(host: pb.HostFacts, *, needs_gpus: bool) -> Finding:
    if host.gpus:
        return ok("driver", f"{host.driver_version}, CUDA {host.cuda_version}, {len(host.gpus)} GPUs")
    if not needs_gpus:
        return skipped("driver", f"no GPU here ({host.no_gpus_reason}): transport {_names(needs_gpu=False)} only")
    cure = "install the NVIDIA driver; in a container use the NVIDIA runtime and ask for GPUs (nvidia.com/gpu)"
    return fail("driver", host.no_gpus_reason, f"transport {_names(needs_gpu=True)} needs GPUs", cure)


def _gpus(host: pb.HostFacts, *, needs_gpus: bool) -> Iterator[Finding]:
    old = [gpu for gpu in host.gpus if too_old(gpu) and (needs_gpus or gpu.max_nvlinks)]
    if old:
        what = f"GPU {', '.join(str(gpu.index) for gpu in old)}: compute capability {old[0].capability}"
        cause = f"the kernels of {_names(needs_gpu=True)} need {oldest_gpu()}.0 (Hopper) or newer"
        yield (fail if needs_gpus else warn)(
            "capability", what, cause, f"take newer GPUs, or transport {_names(needs_gpu=False)}"
        )
    for gpu in host.gpus:
        trouble = gpu_trouble(gpu)
        if gpu.mig:
            is_fatal = needs_gpus and all(other.mig for other in host.gpus)
            cure = f"`nvidia-smi -i {gpu.index} -mig 0`, or take {'whole' if is_fatal else 'the other'} GPUs"
            yield (fail if is_fatal else warn)("mig", f"GPU {gpu.index}: MIG is on", trouble, cure)
        elif trouble and gpu.max_nvlinks and not too_old(gpu):
            cure = "start nvidia-fabricmanager and look at its log; `nvidia-smi nvlink -s`; reset the GPUs"
            yield fail("nvlink", f"GPU {gpu.index}: {trouble}", "no peer can be reached over NVLink", cure)
        elif gpu.num_nvlinks < gpu.max_nvlinks:
            what = f"GPU {gpu.index}: {gpu.num_nvlinks} of {gpu.max_nvlinks} NVLinks are up"
            yield warn(
                "nvlink", what, "every step waits for the slowest link", "`nvidia-smi nvlink -s -e`; reseat or replace"
            )
    sick = [gpu for gpu in host.gpus if gpu.ecc_uncorrected]
    for gpu in sick:
        what = f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected since the driver was loaded"
        yield fail("ecc", what, "its memory lost data", "drain the host, reset the GPU; replace it if they come again")
    if not sick:
        yield ok("ecc", "no uncorrected memory errors")
    for gpu in host.gpus:
        reasons = [reason for reason in gpu.held_back_by if reason not in _HARMLESS]
        if reasons:
            what = f"GPU {gpu.index}: {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz, held back by {', '.join(reasons)}"
            yield warn("clocks", what, "every step waits for the slowest GPU", "look at cooling and power of the host")


def _domain(topology: Topology) -> Finding:
    sizes = sorted((len(members) for members in topology.domains.values()), reverse=True)
    count = len(topology.devices)
    if not sizes:
        return skipped("nvlink-domain", f"no two of {count} GPUs reach each other over NVLink: transport cpu only")
    words = f"{' + '.join(map(str, sizes))} of {count} GPUs"
    cause = "a group of all of them is not possible over nvlink"
    cure = "`crossdock topo` says why for each pair"
    return judge("nvlink-domain", sizes[0] == count, words, cause, cure, level=Level.WARN)


def _nics(host: pb.HostFacts) -> Iterator[Finding]:
    if not host.nics:
        yield skipped("rdma", "no RDMA device: hosts are joined by sockets only (worker.network)")
        return
    down = [nic_trouble(nic) for nic in host.nics if nic_trouble(nic)]
    if down:
        cure = "check cable, switch port, and subnet manager (InfiniBand) or address (Ethernet); ignore unused ports"
        yield warn("rdma-state", "; ".join(down), "the GPUs near to it use one that is farther away", cure)
    else:
        yield ok("rdma-state", f"{len(host.nics)} ports, all active")
    for nic in host.nics:
        if nic.link_layer == "Ethernet" and not nic_trouble(nic):
            if nic.roce != "RoCE v2":
                cure = "give its network device an address; load RoCE v2 (`cma_roce_mode`)"
                yield warn("rdma-gid", f"{nic.name}: newest is {nic.roce or 'none'}", "RoCE v1 is not routed", cure)
            if 0 < nic.mtu_bytes < _LEAST_MTU:
                what = f"{nic.name}: {nic.mtu_bytes} bytes"
                yield warn("rdma-mtu", what, "small packets cost rate", "set the MTU to 9000 here and on the switches")
    topology = join([host])
    far = [device for device in topology.devices if device.nic_distance == "SYS"]
    if far and host.gpus:
        names = ", ".join(f"GPU {device.gpu} - {device.nic}" for device in far[:4])
        yield warn("rdma-distance", names, "the way leads through the other processor", "enable a NIC near to each GPU")
