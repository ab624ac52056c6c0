"""Ranks whose memory this process maps: one region of each, the hosts' mailbox beside it, and the watch over processes.

    domain = Domain(group, timeout_s, abi, host)
    ticket = domain.allocate(num_bytes, device)       # then blank what must be zero, before the ticket is published
    domain.import_regions(tickets)                    # everybody's, in rank order

Knows bytes, descriptors and processes; neither operations nor what lies where in a region.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ep_kernels.config import Group
from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink import links, mailbox, sharing, watch
from ep_kernels.transports.nvlink.host_page import HostPage
from ep_kernels.transports.nvlink.links import TICKET


class Domain:
    """This rank's region and those of its peers.

    Attributes:
        region: this rank's memory; from `allocate` on.
        mappings: [R] everybody's region as this process maps it; from `import_regions` on.
        mailbox: the hosts' small exchange; from `allocate` on.
        watch: tells `host` of dead peers; from `import_regions` on.

    Args:
        group: who takes part.
        timeout_s: deadline of a peer's answer, seconds.
        abi: what all ranks must have in common; ASCII, at most 16 characters.
        host: this rank's page of host memory, which knows who is dead.
    """

    region: Any
    mailbox: mailbox.Mailbox
    watch: watch.PeerWatch

    def __init__(self, group: Group, timeout_s: float, abi: str, host: HostPage) -> None:
        self._group, self._timeout_s, self._abi, self._host = group, timeout_s, abi, host
        self._open: list[Any] = []  # what close() closes, in order of creation
        self.mappings: list[Any] = []
        self._lends = False

    @property
    def addresses(self) -> list[int]:
        """[R] device pointers to everybody's region."""
        return [mapping.address for mapping in self.mappings]

    def allocate(self, num_bytes: int, device: torch.device, cure: str = "") -> bytes:
        """Make the region, of unknown content, and the ticket by which peers map it. `cure`: what makes the region
        smaller, for the error where the GPU has no room. Raises TransportError."""
        from ep_kernels.transports.nvlink import memory

        self._device = device
        memory.free_returned()
        kind, _ = memory.choose_kind(device.index)
        self.region = memory.allocate(kind, num_bytes, device.index, cure)
        self._open.append(self.region)
        self.mailbox = mailbox.Mailbox(self._group.rank, self._host.is_gone)
        self._open.append(self.mailbox)
        fds = [self.mailbox.fd] + ([self.region.fd] if self.region.fd >= 0 else [])
        self._lends = kind is memory.HandleKind.CUDA_IPC
        self._desk = sharing.Desk(fds, self._lends)
        self._open.append(self._desk)
        gpu: Any = torch.cuda.get_device_properties(device)
        place = links.pci_number(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id)
        address = self._desk.address
        head = (self._abi.encode(), kind.value.encode(), self.region.mapping.num_bytes, place, len(address))
        return TICKET.pack(*head) + address + bytes(self.region.token)

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """Map everybody's region and page, and watch the peers' processes. Raises TransportError naming the rank."""
        if self._lends:  # all ranks are here, so what they had before is closed
            from ep_kernels.transports.nvlink import memory

            memory.free_returned()
        pages, mappings, pids = [], [], {}
        try:
            for rank, ticket in enumerate(tickets):
                if rank == self._group.rank:
                    page, mapping = os.dup(self.mailbox.fd), self.region.mapping
                else:
                    page, mapping, pids[rank] = self._import(rank, ticket)
                pages.append(page)
                mappings.append(mapping)
            self.mappings = mappings
            self.mailbox.attach(pages)
        finally:
            for fd in pages:
                os.close(fd)
        self.watch = watch.PeerWatch(pids, self._host.mark_gone)
        self._open.append(self.watch)

    def _import(self, rank: int, ticket: bytes) -> tuple[int, Any, int]:
        """(descriptor of the rank's mailbox page, its mapped region, its process id here or 0)."""
        from ep_kernels.transports.nvlink import memory

        abi, name, num_bytes, _, length = TICKET.unpack_from(ticket)
        address, token = ticket[TICKET.size : TICKET.size + length], ticket[TICKET.size + length :]
        if abi.decode() != self._abi:
            raise TransportError(f"nvlink: region ABI of rank {rank}: expected {self._abi}, got {abi.decode()}")
        kind = memory.HandleKind(name.rstrip(b"\0").decode())
        num_fds = 2 if kind is memory.HandleKind.POSIX_FD else 1
        fds, pid, lease = sharing.borrow(rank, address, num_fds, self._timeout_s)
        if kind is not memory.HandleKind.CUDA_IPC:  # the driver itself counts who has the memory
            lease.close()
        try:
            return fds[0], memory.redeem(kind, num_bytes, self._device.index, fds[-1], token, lease), pid
        except TransportError as error:
            os.close(fds[0])
            lease.close()
            raise TransportError(f"nvlink: cannot map the memory of rank {rank}: {error}") from error
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def close(self) -> None:
        """Let go of everybody's region, once no kernel of this rank uses it. Views keep this rank's own alive; peers
        keep their mappings of it. Idempotent."""
        if self._open and self._lends:
            from ep_kernels.transports.nvlink import memory

            memory.keep(self.region.mapping, self._desk.is_lent)
        for part in reversed(self._open):
            part.close()
        self._open, self.mappings = [], []

    def free_returned(self) -> None:
        """After `close`, once this rank's own views of the region are gone: free what peers have given back."""
        if self._lends:
            from ep_kernels.transports.nvlink import memory

            memory.free_returned()

    def forsake(self) -> None:
        """In a forked child: close its copies of all descriptors."""
        for part in (*self._open, *self.mappings):
            part.forsake()
