"""What ranks do in test_domain_over_hosts.py: regions are mapped by CUDA IPC handles of tickets, and nothing of one
host is used: no descriptor is handed over, words and life of processes come over the network."""

from __future__ import annotations

import time
from typing import Any

import torch

from ep_kernels.errors import PeerTimeout
from ep_kernels.network import NetworkConfig
from tests.cases import RoutingCase
from tests.gpu import veth
from tests.transports.faults import kill_self
from tests.transports.steps import Place, Store, check_step, next_case, settled

LABELS, NAMESPACES = "labels", "namespaces"


def steps(rank: int, size: int, store: Store, kind: str, case: RoutingCase, overrides: Any) -> list[int]:
    """Steps of fresh routing, bitwise the reference; an exchange; which ranks share a host with this one."""
    with _place(rank, size, store).communicator(case, network=_network(rank, store, kind), **overrides) as comm:
        for number in range(4):
            check_step(comm, next_case(case, number))
        comm.barrier()
        words = comm.exchange([rank] * 8)
        assert words == [(peer,) * 8 for peer in range(size)]
        domain = comm._transport._domain
        return sorted(domain.watch.ranks)


def killed(rank: int, size: int, store: Store, kind: str, case: RoutingCase, overrides: Any) -> tuple[int, bool, float]:
    """The last rank kills itself; the others name it, long before the deadline, and go on without it."""
    place = _place(rank, size, store)
    with place.communicator(case, network=_network(rank, store, kind), timeout_s=30.0, **overrides) as comm:
        check_step(comm, case)
        comm.barrier()
        if rank == size - 1:
            kill_self()
        begun = time.monotonic()
        try:
            while True:
                settled(comm, lambda: check_step(comm, case))
        except PeerTimeout as error:
            seen = error
        waited_s = time.monotonic() - begun
        comm.set_active([peer != size - 1 for peer in range(size)], 1)
        for number in range(3):
            check_step(comm, next_case(case, number))
        return seen.peer, seen.gone, waited_s


def _place(rank: int, size: int, store: Store) -> Place:
    from ep_kernels.transports.nvlink.memory import domain, memory

    ipc: Any = memory.HandleKind.CUDA_IPC
    memory.choose_kind = lambda device, handle="auto": (ipc, {})
    domain.SPAN_HOSTS = ("fabric", ipc.value)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return Place(rank, size, store, "nvlink")


def _network(rank: int, store: Store, kind: str) -> NetworkConfig:
    """In a namespace of this rank's own; or by a label that no other rank of this host has. Raises OSError where there
    can be no namespaces."""
    if kind == LABELS:
        return NetworkConfig(listen="127.0.0.1:0", domain=f"host {rank}")
    return NetworkConfig(listen=f"{veth.join(rank, store)}:0")
