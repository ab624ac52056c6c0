"""Ranks that this process does not map, since they are on other hosts: what its kernels write and read instead.

    remote = RemoteRanks(network, rank, size, shape, host)
    ticket = remote.ticket()                          # for the ranks of other hosts
    remote.connect(tickets, timeout_s)                # by rank, of those ranks
    tables.set_network(remote.record())

For each of them there is an outbox, in which kernels lay what goes to that rank, and an inbox for what comes from it,
both in pinned host memory and with one byte map. The network copies an outbox to the inbox at the other end, part by
part, when a kernel pushes a descriptor (kernels/common/push.cuh), and sets words when all of an operation has come.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.errors import ConfigError, TransportError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.network import Channel, ChannelMemory, Network
from ep_kernels.transports.nvlink import launch
from ep_kernels.transports.nvlink.host_page import HostPage
from ep_kernels.types import CombineOrder, PeerTraffic

_PAGE = 4096
_NORESERVE = 0x4000
"""Linux: memory is counted when touched. Boxes of ranks that are mapped never are."""
_ONE_LANE = 1 << 30
_NAP_S = 50e-6
_SMALLEST_STRIPE, _STRIPES = 1 << 20, abi.MAX_PARTS // 2


def pin(address: int, num_bytes: int) -> None:
    """Let the GPU reach host memory, at the same address. Raises TransportError."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(status):
        raise TransportError(
            f"nvlink: {num_bytes} bytes of host memory for ranks of other hosts cannot be pinned (cudaHostRegister: "
            f"{int(status)}); raise the limit of the container, or make max_tokens_per_rank smaller"
        )


def unpin(address: int) -> None:
    """Once no kernel uses it."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


class RemoteRanks:
    """Boxes, words and the channel of one rank.

    Attributes:
        ranks: those that are reached over the network; from `connect` on.
        channel: of the network.

    Args:
        network: of the configuration.
        rank, size: of this rank, R.
        shape: of its region.
        host: its page, which hears of dead ranks.
        register, unregister: make host memory reachable by the GPU, and give it back.

    Raises:
        TransportError: the network cannot be had, or memory is short.
    """

    def __init__(
        self,
        network: NetworkConfig,
        rank: int,
        size: int,
        shape: abi.Shape,
        host: HostPage,
        register: Callable[[int, int], None] = pin,
        unregister: Callable[[int], None] = unpin,
    ) -> None:
        self._rank, self._size, self._register, self._unregister = rank, size, register, unregister
        self._tickets: dict[int, NetworkTicket] = {}
        self._map = abi.box_map(shape)
        self.box_bytes = -(-int(self._map.num_bytes) // _PAGE) * _PAGE
        self._pinned: list[int] = []
        total = size * self.box_bytes
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._memory = mmap.mmap(-1, 2 * total, flags=flags)
            self._memory.madvise(mmap.MADV_DONTFORK)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"nvlink: no room for {2 * total} bytes of addresses: {error}") from error
        self._outboxes = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._inboxes = self._outboxes + total
        self.words = torch.zeros(len(abi.FLAGS), size, dtype=torch.int64, pin_memory=True)
        self._lib = launch.boxes()
        self._native = self._lib.cd_boxes_new(size, self.words.data_ptr(), host.gone_address)
        handler, box = self._lib.cd_boxes_handler(), self.box_bytes
        memory = ChannelMemory(self._outboxes, total, self._inboxes, box, handler, self._native, box)
        self.channel = Channel(Network.of(network), rank, size, memory)
        self._stripe = stripe_of(self.box_bytes, network.lanes)
        self._ring = self.channel.for_device(self._stripe)
        assert self._ring.size == abi.RING_SIZE

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._tickets)

    def ticket(self) -> NetworkTicket:
        """For the ranks of other hosts."""
        return self.channel.ticket()

    def connect(self, tickets: Mapping[int, NetworkTicket], timeout_s: float) -> None:
        """Pin what the GPU and these ranks share, and connect with them. Raises PeerTimeout, TransportError."""
        if not self._pinned:
            self._pin(self._ring.ring, self._ring.num_bytes)
            for rank in tickets:
                for boxes in (self._outboxes, self._inboxes):
                    self._pin(boxes + rank * self.box_bytes, self.box_bytes)
        self._tickets = dict(tickets)
        self.channel.connect(tickets, timeout_s)

    def _pin(self, address: int, num_bytes: int) -> None:
        self._register(address, num_bytes)
        self._pinned.append(address)

    def record(self) -> Any:
        """For the kernels: `abi.Network`."""
        return abi.Network(
            remote=sum(1 << rank for rank in self.ranks), outboxes=self._outboxes, inboxes=self._inboxes,
            stride=self.box_bytes, stripe=self._stripe, words=self.words.data_ptr(), ring=self._ring.ring,
            popped=self._ring.popped, map=self._map,
        )  # fmt: skip

    def settle(self, timeout_s: float, mask: Sequence[bool] | None = None) -> None:
        """Once kernels have ended: wait until nothing is still to be sent to the ranks of `mask` (None: to any whose
        connections stand); at most so long."""
        until = time.monotonic() + timeout_s
        wanted = sum(1 << rank for rank in self.ranks if mask is None or mask[rank])
        while not self.channel.is_quiet(wanted & self.channel.up()) and time.monotonic() < until:
            time.sleep(_NAP_S)

    def go_on(self, mask: Sequence[bool], epoch: int, timeout_s: float) -> None:
        """Part from ranks that take no part any longer: they hear of the epoch, and write no more. Connect with those
        of `mask` whose connections have ended. Raises PeerTimeout, TransportError."""
        for rank in self.ranks:
            if not mask[rank]:
                self.channel.leave(rank, epoch)
        self.channel.connect({rank: self._tickets[rank] for rank in self.ranks if mask[rank]}, timeout_s)

    def restart(self, dispatch: int, combine: int, barrier: int) -> None:
        """All ranks go on from these numbers."""
        self._lib.cd_boxes_restart(self._native, dispatch, combine, barrier)

    def peers(self) -> list[PeerTraffic]:
        """See `base.MemberTransport.traffic`."""
        up, by_rank = self.channel.up(), self.channel.traffic()
        found = [(rank, by_rank[rank]) for rank in sorted(self.ranks)]
        return [
            PeerTraffic(rank, bool(up >> rank & 1), one.sent_messages, one.sent_bytes, one.received_messages)
            for rank, one in found
        ]

    def close(self) -> None:
        """Part from all. No kernel runs any more; one that begins reads `words` and nothing else. Idempotent."""
        if self._native is None:
            return
        self.channel.close()
        for address in reversed(self._pinned):
            self._unregister(address)
        self._pinned.clear()
        self.channel.free()
        self._lib.cd_boxes_free(self._native)
        self._native = None

    def forsake(self) -> None:
        """In a forked child: nothing of this is used any more."""
        self._native = None


def stripe_of(box_bytes: int, lanes: int) -> int:
    """Bytes of one place always take one lane, that of their stripe; an operation may have MAX_PARTS parts."""
    if lanes == 1:
        return _ONE_LANE
    stripe = _SMALLEST_STRIPE
    while stripe * _STRIPES < box_bytes:
        stripe *= 2
    return stripe


def check(config: MoEConfig) -> None:
    """Raise ConfigError for what GPUs cannot do over a network."""
    where = "with transport nvlink over a network; transport cpu has it"
    if config.exact_combine:
        raise ConfigError("exact_combine", f"False {where}", True)
    if config.combine_order is not CombineOrder.RANK:
        raise ConfigError("combine_order", f"CombineOrder.RANK {where}", config.combine_order)
