"""What this host is: processors, memory, NUMA nodes, GPUs and their links, RDMA devices. States facts, decides nothing.

    facts = probe()                      # /proc, /sys and NVML of this host
    facts = probe(proc, sys, nvml)       # of another: folders that look like /proc and /sys, an object like pynvml
    peers = try_peers()                  # opens every GPU and copies bytes between each two of them

Nothing here raises for what a host does not have: absent facts are empty, None, or said as a reason.
What follows from the facts of several hosts (domains, rails, which transport for which pair) is decided elsewhere.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from ep_kernels.topology import nvml as nvml_facts
from ep_kernels.topology.facts import (
    Clocks,
    Ecc,
    Fabric,
    Gid,
    Gpu,
    HostFacts,
    Nic,
    NumaNode,
    NvLink,
    PciePath,
    Peer,
    distance,
)
from ep_kernels.topology.peers import PeerTrial, try_peers
from ep_kernels.topology.sysfs import boot_id, kilobytes, nics, numa_nodes, parse_cpu_list, text_of

__all__ = [
    "Clocks",
    "Ecc",
    "Fabric",
    "Gid",
    "Gpu",
    "HostFacts",
    "Nic",
    "NumaNode",
    "NvLink",
    "PciePath",
    "Peer",
    "PeerTrial",
    "distance",
    "parse_cpu_list",
    "probe",
    "try_peers",
]


def probe(proc: Path = Path("/proc"), sys: Path = Path("/sys"), nvml: Any = None) -> HostFacts:
    """Look around.

    Args:
        proc, sys: where those file systems are mounted.
        nvml: the module pynvml, or an object with its functions and names; None imports it.
    """
    found = nvml_facts.read(sys, nvml)
    return HostFacts(
        hostname=text_of(proc / "sys/kernel/hostname") or platform.node(),
        boot_id=boot_id(proc),
        machine=platform.machine(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=kilobytes(text_of(proc / "meminfo"), "MemTotal"),
        numa_nodes=numa_nodes(sys),
        gpus=found.gpus,
        no_gpus_reason=found.reason,
        nics=nics(sys),
        driver_version=found.driver_version,
        cuda_version=found.cuda_version,
    )
