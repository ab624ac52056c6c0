"""Ranks that this process does not map, since they are on other hosts: what its kernels write and read instead.

    remote = RemoteRanks(network, rank, size, shape, host, boxes, timeout_s)
    ticket = remote.ticket()                          # for the ranks of other hosts
    remote.connect(tickets, timeout_s)                # by rank, of those ranks
    tables.set_network(remote.record())

For each of them there is an outbox, in which kernels lay what goes to that rank, and an inbox for what comes from it,
both in pinned host memory or on the GPU (gpu_direct.py) and with one byte map. The network copies an outbox to the
inbox at the other end, part by part, when a kernel pushes a descriptor (kernels/common/push.cuh), and sets words when
all of an operation has come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.errors import ConfigError, TransportError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.network import Channel, ChannelMemory, Network, settled
from ep_kernels.transports.nvlink.calls.plan import slice_lag, slices_of
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.memory.host_page import HostPage
from ep_kernels.transports.nvlink.network.boxes import Boxes, pin, unpin
from ep_kernels.types import CombineOrder, PeerTraffic

_ONE_LANE = 1 << 30
_SMALLEST_STRIPE, _STRIPES = 1 << 20, abi.MAX_PARTS // 2


class RemoteRanks:
    """Boxes, words and the channel of one rank.

    Attributes:
        ranks: those that are reached over the network; from `connect` on.
        channel: of the network.

    Args:
        host: its page, in which dead ranks are marked.
        boxes: where they lie; `close` gives them back.
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
        boxes: Boxes,
        timeout_s: float,
        register: Callable[[int, int], None] = pin,
        unregister: Callable[[int], None] = unpin,
    ) -> None:
        self._rank, self._size, self._boxes = rank, size, boxes
        self._register, self._unregister = register, unregister
        self._tickets: dict[int, NetworkTicket] = {}
        # Boxes: outboxes, then inboxes, one of each per rank.
        self._map, self._exact = abi.box_map(shape), shape.exact
        self.box_bytes = abi.box_bytes(shape)
        total = size * self.box_bytes
        self._outboxes = boxes.reserve(2 * total)
        self._inboxes = self._outboxes + total
        self._dma_bufs = (ctypes.c_int32 * (2 * size))(*[-1] * (2 * size))
        # Words that kernels and the network's handler share.
        self.words = torch.zeros(len(abi.FLAGS), size, dtype=torch.int64, pin_memory=True, device="cpu")
        self._lib = launch.library()
        self._slices = torch.zeros(2, size, dtype=torch.int64, device="cpu", pin_memory=True)
        words, slices = self.words.data_ptr(), self._slices.data_ptr()
        self._native = self._lib.cd_boxes_new(size, words, slices, host.gone_address)
        if boxes.flush is not None:
            self._lib.cd_boxes_flush(self._native, boxes.flush.enter, boxes.flush.context, boxes.flush.run)
        # The channel to the other hosts, and the ring into which kernels push.
        handler, box = self._lib.cd_boxes_handler(), self.box_bytes
        dma_bufs = ctypes.addressof(self._dma_bufs) if boxes.is_device else 0
        places = self._outboxes, total, self._inboxes, box, handler, self._native
        memory = ChannelMemory(*places, box=box, dma_bufs=dma_bufs, device=boxes.device)
        self.channel = Channel(Network.of(network), rank, size, memory, timeout_s)
        self._ring, self._is_pinned = self.channel.for_device(stripe_of(self.box_bytes, network.lanes)), False
        assert self._ring.size == abi.RING_SIZE
        self._check_stripe()
        # Rows that leave together.
        self._slice_rows = slices_of(shape, self._ring.stripe)
        self._slice_lag = slice_lag(network, self._slice_rows[0] * shape.row_packets * abi.PACKET_BYTES)

    def _check_stripe(self) -> None:
        most = self._ring.stripe * _STRIPES
        if self.box_bytes > most:
            self.close()
            raise TransportError(
                f"nvlink: the provider writes {self._ring.stripe} bytes at once: {self.box_bytes} bytes for each rank "
                f"of another host are more than {most}; make max_tokens_per_rank smaller"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._tickets)

    def ticket(self) -> NetworkTicket:
        return self.channel.ticket()

    def connect(self, tickets: Mapping[int, NetworkTicket], timeout_s: float) -> None:
        """Make memory that the GPU and these ranks share, and connect with them. Raises PeerTimeout, TransportError."""
        if not self._is_pinned:
            self._register(self._ring.ring, self._ring.num_bytes)
            self._is_pinned = True
            for rank in tickets:
                for number, boxes in ((rank, self._outboxes), (self._size + rank, self._inboxes)):
                    self._dma_bufs[number] = self._boxes.take(boxes + rank * self.box_bytes, self.box_bytes)
        self._tickets = dict(tickets)
        self.channel.connect(tickets, timeout_s)

    def record(self) -> Any:
        """For the kernels: `abi.Network`."""
        return abi.Network(
            remote=sum(1 << rank for rank in self.ranks), outboxes=self._outboxes, inboxes=self._inboxes,
            stride=self.box_bytes, stripe=self._ring.stripe, words=self.words.data_ptr(), ring=self._ring.ring,
            popped=self._ring.popped, map=self._map, slice_words=self._slices.data_ptr(),
            slice_rows=(ctypes.c_uint64 * 2)(*self._slice_rows), exact=self._exact, slice_lag=self._slice_lag,
        )  # fmt: skip

    def settle(self, timeout_s: float, mask: Sequence[bool] | None = None) -> int:
        """Once kernels have ended: wait until nothing is still to be sent to the ranks of `mask` (None: to any) whose
        connections stand; at most so long, and not after `abort`. Those for which something is, a bit each."""
        channel, wanted = self.channel, sum(1 << rank for rank in self.ranks if mask is None or mask[rank])

        def is_quiet(ranks: int) -> bool:
            return channel.is_quiet(ranks & channel.up())

        return settled(is_quiet, wanted, timeout_s, lambda: channel.aborted is not None or channel.has_given_up(wanted))

    def go_on(self, mask: Sequence[bool], epoch: int, up: Sequence[int], timeout_s: float) -> None:
        """Close the connections with ranks that take no part any longer, after the epoch was sent to them. Connect with
        those of `mask` whose connections have ended, at either end. `up`: `channel.up()` of each rank, 0 of those
        outside `mask`. Raises PeerTimeout, TransportError."""
        for rank in self.ranks:
            if not mask[rank]:
                self.channel.leave(rank, epoch)
        wanted = {rank: self._tickets[rank] for rank in self.ranks if mask[rank]}
        self.channel.connect(wanted, timeout_s, [rank for rank in wanted if not up[rank] >> self._rank & 1])

    def restart(self, dispatch: int, combine: int, barrier: int) -> None:
        """All ranks go on from these numbers. No kernel runs, and its counters have restarted (`Tables.restart`)."""
        self.channel.restart_ring()
        self._lib.cd_boxes_restart(self._native, dispatch, combine, barrier)

    def peers(self) -> list[PeerTraffic]:
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
        self._boxes.close()
        if self._is_pinned:
            self._unregister(self._ring.ring)
        self._is_pinned = False
        self.channel.free()
        self._lib.cd_boxes_free(self._native)
        self._native = None

    def close_in_child(self) -> None:
        self._native = None
        self._boxes.close_in_child()


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
    if config.combine_order is not CombineOrder.RANK:
        raise ConfigError("combine_order", f"CombineOrder.RANK {where}", config.combine_order)
