"""Ranks whose memory this process maps: one region of each, the hosts' mailbox beside it, and the watch over processes.

    domain = Domain(group, timeout_s, abi, host, network)
    ticket = domain.allocate(num_bytes, device)       # then blank what must be zero, before the ticket is published
    domain.import_regions(tickets)                    # everybody's, in rank order

Ranks of one host hand descriptors over, and watch each other's processes. Of another host, as of another tray of an
NVL72, a fabric handle in the ticket gives the region; page and life of the process come over the network.

Knows bytes, descriptors and processes; neither operations nor what lies where in a region.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ep_kernels.config import Group
from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.transports.nvlink.memory import links, mailbox, sharing, ticket
from ep_kernels.transports.nvlink.memory.host_page import HostPage
from ep_kernels.transports.nvlink.memory.landing import Landing
from ep_kernels.transports.nvlink.memory.ticket import Host, RegionTicket

_log = logging.getLogger(__name__)
SPAN_HOSTS = ("fabric",)
"""Kinds of handles by which the GPUs of one NVLink fabric map regions of other hosts."""


class PeerWatch:
    """Reports each peer's death, once, until closed.

    Attributes:
        ranks: those that are watched.

    Args:
        pids: process id of each peer as this process numbers processes; 0, in another PID namespace: not watched.
        tell: called with the rank, in the thread of the watch.
    """

    def __init__(self, pids: Mapping[int, int], tell: Callable[[int], None]) -> None:
        self._watched: dict[int, int] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError):
                self._watched[os.pidfd_open(pid)] = rank
        self.ranks, self._tell = frozenset(self._watched.values()), tell
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="crossdock-peer-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (*self._watched, self._end):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._end:
                    return
                self._tell(self._watched[fd])
                poll.unregister(fd)

    def close(self) -> None:
        """End the thread. Idempotent. A byte ends it: processes that were forked meanwhile may hold the pipe open."""
        if self._ending >= 0:
            os.write(self._ending, b"\0")
            self._thread.join()
            self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's descriptors: after the thread's end, or in a forked child, which has none."""
        for fd in (*self._watched, self._end, self._ending):
            if fd >= 0:
                os.close(fd)
        self._watched, self._end, self._ending = {}, -1, -1


def needs_boxes(network: NetworkConfig | None, device: torch.device, handle: str) -> bool:
    """Whether what goes to ranks of other hosts takes the network, since this GPU's memory cannot be mapped there by
    the `memory_handle` of the configuration. Logs why."""
    from ep_kernels.transports.nvlink.memory import memory

    if network is None:
        return False
    kind, _ = memory.choose_kind(device.index, handle)
    needs = kind.value not in SPAN_HOSTS
    _log.info("nvlink: rows to ranks of other hosts go %s", "over the network" if needs else "over the NVLink fabric")
    return needs


class Domain:
    """This rank's region and those of its peers.

    Attributes:
        region: this rank's memory; from `allocate` on.
        mappings: [R] everybody's region as this process maps it, None = it does not; from `import_regions` on.
        boxed: ranks that are not mapped: how their boxes are reached; from `import_regions` on.
        hosts: [R] lowest rank of each rank's host, where one is not mapped; else of the domain: 0; likewise.
        landings: [R] lowest of those that read what the network brings a rank; likewise.
        mailbox: the hosts' small exchange; from `allocate` on.
        watch: tells `host` of dead peers; from `import_regions` on.

    Args:
        timeout_s: deadline of a peer's answer, seconds.
        abi: what all ranks must have in common.
        host: this rank's page of host memory, which knows who is dead.
        network: by which ranks of other hosts are reached; None: all are of this host.
        handle: `memory_handle` of the configuration.
    """

    region: Any
    mailbox: mailbox.Mailbox
    watch: PeerWatch

    def __init__(
        self,
        group: Group,
        timeout_s: float,
        abi: str,
        host: HostPage,
        network: NetworkConfig | None = None,
        handle: str = "auto",
    ) -> None:
        self._group, self._timeout_s, self._abi, self._host, self._handle = group, timeout_s, abi, host, handle
        self._network, self._own = network, (network.domain if network else "") or ticket.own_host()
        self._open: list[Any] = []  # what close() closes, in order of creation
        self.mappings: list[Any] = []
        self.boxed: dict[int, NetworkTicket] = {}
        self._boxes: NetworkTicket | None = None
        self._shares = False
        self.hosts = self.landings = (0,) * group.size
        self._lends = self._lends_for_good = False

    @property
    def addresses(self) -> list[int]:
        """[R] device pointers to everybody's region; 0 = it is not mapped."""
        return [0 if mapping is None else mapping.address for mapping in self.mappings]

    def allocate(
        self,
        num_bytes: int,
        device: torch.device,
        cure: str = "",
        boxes: NetworkTicket | None = None,
        landing: Landing | None = None,
    ) -> bytes:
        """Make the region, of unknown content, and the ticket by which peers map it. `cure`: what makes the region
        smaller, for the error where the GPU has no room. `boxes`: see `ticket.Host`. `landing`: what the network brings
        and ranks of this host read, closed with this; None: they do not. Raises TransportError."""
        from ep_kernels.transports.nvlink.memory import memory

        self._device = device
        memory.free_returned()
        kind, _ = memory.choose_kind(device.index, self._handle)
        self.region = memory.allocate(kind, num_bytes, device.index, cure)
        self._open.append(self.region)
        self.mailbox = mailbox.Mailbox(self._group.rank, self._host.is_gone)
        self._open.append(self.mailbox)
        self._open += [landing] if landing else []
        fds = [self.mailbox.fd, *([landing.fd] if landing else []), *([self.region.fd] if self.region.fd >= 0 else [])]
        self._lends = kind is memory.HandleKind.CUDA_IPC
        self._server = sharing.DescriptorServer(fds, self._lends)
        self._open.append(self._server)
        gpu: Any = torch.cuda.get_device_properties(device)
        place = links.pci_number(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id)
        self._boxes, self._shares = boxes, landing is not None
        size, token = self.region.mapping.num_bytes, bytes(self.region.token)
        return RegionTicket(self._abi, kind.value, size, place, self._server.address, token, self._where()).encode()

    def _where(self) -> Host:
        """This rank's host record, and its network, opened."""
        if self._network is None:
            return Host(self._own)
        words = self.mailbox.open_network(self._network, self._group.size, self._host.gone_address, self._timeout_s)
        return Host(self._own, words, self._boxes, self._shares)

    def import_regions(self, tickets: Sequence[bytes], share: Callable[[int, int], None] | None = None) -> None:
        """Map everybody's region and page, connect with ranks of other hosts, and watch the peers' processes. `share`:
        called with a rank of this host and the descriptor that it gave as `landing`. Raises TransportError naming the
        rank."""
        if self._lends:  # all ranks are here, so what they had before is closed
            from ep_kernels.transports.nvlink.memory import memory

            memory.free_returned()
        pages: list[int] = []
        mappings: list[Any] = []
        pids = {}
        found = [self._read(rank, raw) for rank, raw in enumerate(tickets)]
        remote = self._remote(found)
        self._find_boxes(found, remote)
        try:
            for rank, one in enumerate(found):
                if rank == self._group.rank:
                    page, mapping = os.dup(self.mailbox.fd), self.region.mapping
                elif rank in remote:
                    page, mapping = -1, None if rank in self.boxed else self._import_remote(rank, one)
                else:
                    page, mapping, pids[rank] = self._import(rank, one, share)
                pages.append(page)
                mappings.append(mapping)
            self.mappings = mappings
            self.mailbox.connect(remote, self._timeout_s)
            self.mailbox.attach(pages)
        finally:
            for fd in pages:
                if fd >= 0:
                    os.close(fd)
        self.watch = PeerWatch(pids, self._host.mark_gone)
        self._open.append(self.watch)

    def is_watched(self, rank: int) -> bool:
        """Whether the end of that rank's process would be noticed at once."""
        remote = self.mailbox.remote
        return rank in self.watch.ranks or (remote is not None and rank in remote.ranks and remote.is_up(rank))

    def _read(self, rank: int, raw: bytes) -> RegionTicket:
        """A rank's ticket. Raises TransportError: it cannot be read, or is of another ABI."""
        found = ticket.read(rank, raw)
        if found.abi != self._abi:
            raise TransportError(f"nvlink: region ABI of rank {rank}: expected {self._abi}, got {found.abi}")
        return found

    def _remote(self, found: Sequence[RegionTicket]) -> dict[int, NetworkTicket]:
        """Ranks of other hosts: how they are reached. Empty without a network."""
        if self._network is None:
            return {}
        hosts = [one.host for one in found]
        return {n: host.network for n, host in enumerate(hosts) if host.name != self._own and host.network is not None}

    def _find_boxes(self, found: Sequence[RegionTicket], remote: dict[int, NetworkTicket]) -> None:
        if not remote:
            return
        hosts = [one.host for one in found]
        for rank in remote:
            theirs = hosts[rank].boxes
            if (theirs is None) != (self._boxes is None):
                words = {True: "mapped by fabric handles", False: "reached over the network"}
                raise TransportError(
                    f"nvlink: rank {rank} of another host: expected its memory to be {words[self._boxes is None]} as "
                    f"that of this rank, got {words[theirs is None]}; GPUs of one group must be of one kind"
                )
            if theirs is not None:
                self.boxed[rank] = theirs
        if self.boxed:
            names = [host.name for host in hosts]
            self.hosts = tuple(map(names.index, names))
            places = [host.name if host.shares else rank for rank, host in enumerate(hosts)]
            self.landings = tuple(map(places.index, places))

    def _import_remote(self, rank: int, found: RegionTicket) -> Any:
        """The mapped region of a rank of another host, by what its ticket says alone."""
        from ep_kernels.transports.nvlink.memory import memory

        kind = memory.HandleKind(found.kind)
        if kind is memory.HandleKind.POSIX_FD:
            raise TransportError(
                f"nvlink: cannot map the memory of rank {rank}, which is on another host: expected a fabric handle, "
                "got a file descriptor; GPUs of several hosts need one NVLink fabric and its IMEX channel "
                "(`crossdock doctor` says why there is none)"
            )
        if kind is memory.HandleKind.CUDA_IPC:
            _log.warning(
                "nvlink: rank %d is in another network namespace: its memory is freed when its process ends", rank
            )
            self._lends_for_good = True
        return self._mapped(rank, kind, found, -1)

    def _import(self, rank: int, found: RegionTicket, share: Callable[[int, int], None] | None) -> tuple[int, Any, int]:
        """(descriptor of the rank's mailbox page, its mapped region, its process id here or 0)."""
        from ep_kernels.transports.nvlink.memory import memory

        kind = memory.HandleKind(found.kind)
        num_fds = 1 + found.host.shares + (kind is memory.HandleKind.POSIX_FD)
        fds, pid, lease = sharing.borrow(rank, found.server, num_fds, self._timeout_s)
        if kind is not memory.HandleKind.CUDA_IPC:  # the driver itself counts who has the memory
            lease.close()
        try:
            if share is not None and found.host.shares:
                share(rank, fds[1])
            return fds[0], self._mapped(rank, kind, found, fds[-1], lease), pid
        except TransportError:
            os.close(fds[0])
            lease.close()
            raise
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _mapped(self, rank: int, kind: Any, found: RegionTicket, fd: int, lease: socket.socket | None = None) -> Any:
        from ep_kernels.transports.nvlink.memory import memory

        try:
            return memory.redeem(kind, found.num_bytes, self._device.index, fd, found.token, lease)
        except TransportError as error:
            raise TransportError(f"nvlink: cannot map the memory of rank {rank}: {error}") from error

    def close(self) -> None:
        """Let go of everybody's region, once no kernel of this rank uses it. Views keep this rank's own alive; peers
        keep their mappings of it. Idempotent."""
        if self._open and self._lends:
            from ep_kernels.transports.nvlink.memory import memory

            server, for_good = self._server, self._lends_for_good
            memory.keep(self.region.mapping, lambda: for_good or server.is_lent())
        for part in reversed(self._open):
            part.close()
        self._open, self.mappings = [], []

    def free_returned(self) -> None:
        """After `close`, once this rank's own views of the region are gone: free what peers have given back."""
        if self._lends:
            from ep_kernels.transports.nvlink.memory import memory

            memory.free_returned()

    def close_in_child(self) -> None:
        for part in (*self._open, *self.mappings):
            if part is not None:
                part.close_in_child()
