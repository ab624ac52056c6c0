"""Ranks that this process does not map, since they are on other hosts: what its kernels write and read instead.

    remote = RemoteRanks(network, rank, size, shape, host, boxes, timeout_s)
    ticket = remote.ticket()                          # for the ranks of other hosts
    remote.share(peer, fd)                            # the landing of each rank of this host, if there is one
    remote.connect(tickets, hosts, landings, timeout_s)  # by rank, of those ranks
    tables.set_network(remote.record())

For each of them there is an outbox, in which kernels lay what goes to that rank, and an inbox for what comes from it,
both in pinned host memory or on the GPU (gpu_direct.py) and with one byte map. The network copies an outbox to the
inbox at the other end, part by part, when a kernel pushes a descriptor (kernels/common/push.cuh), and sets words when
all of an operation has come. Rows of a dispatch go once to each landing (rails.py), into the box of the source's rail
there, where the ranks of that host read them; the others' boxes have no memory for them.
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
from ep_kernels.transports.nvlink.memory.landing import Landing
from ep_kernels.transports.nvlink.network.boxes import Boxes, pin, unpin
from ep_kernels.transports.nvlink.network.rails import Rails
from ep_kernels.types import CombineOrder, PeerTraffic

_ONE_LANE = 1 << 30
_SMALLEST_STRIPE, _STRIPES = 1 << 20, abi.MAX_PARTS // 2
_WORD_BYTES = 8


class RemoteRanks:
    """Boxes, words and the channel of one rank.

    Attributes:
        ranks: those that are reached over the network; from `connect` on.
        channel: of the network.
        words: int64 [FLAGS + 2, R], of `abi.Network`.

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
        self._rails = Rails((), (), ())
        self._made: set[int] = set()  # parts of boxes
        self._reached: list[int] = []  # host memory beside
        self._map, self._exact = abi.box_map(shape), shape.exact
        self._reserve(shape)
        self._lib = launch.library()
        self._native = self._lib.cd_boxes_new(size, self._landings[rank].address, host.gone_address)
        if boxes.flush is not None:
            self._lib.cd_boxes_flush(self._native, boxes.flush.enter, boxes.flush.context, boxes.flush.run)
        # The channel to the other hosts, and the ring into which kernels push.
        handler, box, total = self._lib.cd_boxes_handler(), self.box_bytes, size * self.box_bytes
        dma_bufs = ctypes.addressof(self._dma_bufs) if boxes.is_device else 0
        places = self._outboxes, total, self._inboxes, box, handler, self._native
        memory = ChannelMemory(*places, box=box, dma_bufs=dma_bufs, device=boxes.device)
        self.channel = Channel(Network.of(network), rank, size, memory, timeout_s)
        self._ring = self.channel.for_device(stripe_of(self.box_bytes, network.lanes))
        assert self._ring.size == abi.RING_SIZE
        self._check_stripe()
        # Rows that leave together.
        self._slice_rows = slices_of(shape, self._ring.stripe)
        self._slice_lag = slice_lag(network, self._slice_rows[0] * shape.row_packets * abi.PACKET_BYTES)

    def _reserve(self, shape: abi.Shape) -> None:
        """Outboxes and inboxes, one of each per rank; words in front of those inboxes that ranks of this host share."""
        self.box_bytes = abi.box_bytes(shape)
        self._row_bytes = 0 if self._boxes.is_device else abi.box_row_bytes(shape)
        total, words = self._size * self.box_bytes, (len(abi.FLAGS) + 2) * self._size
        self._head_bytes = -(-words * _WORD_BYTES // abi.PAGE) * abi.PAGE
        own = Landing(self._head_bytes + (0 if self._boxes.is_device else total))
        self._landings = {self._rank: own}
        self.words = torch.frombuffer(own.memory, dtype=torch.int64, count=words).view(-1, self._size)
        self._outboxes = self._boxes.reserve(total)
        self._inboxes = self._boxes.reserve(total) if self._boxes.is_device else own.address + self._head_bytes
        self._dma_bufs = (ctypes.c_int32 * (2 * self._size))(*[-1] * (2 * self._size))

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

    @property
    def landing(self) -> Landing | None:
        """What ranks of this host read here; None: NICs bring it to the GPU, whose memory is not shared."""
        return None if self._boxes.is_device else self._landings[self._rank]

    def share(self, rank: int, fd: int) -> None:
        """Before `connect`: the descriptor of the `landing` of a rank of this host. Raises TransportError."""
        self._landings[rank] = Landing(self._landings[self._rank].num_bytes, fd)

    def connect(
        self, tickets: Mapping[int, NetworkTicket], hosts: Sequence[int], landings: Sequence[int], timeout_s: float
    ) -> None:
        """Make memory that the GPU and these ranks share, and connect with them. `hosts`, `landings`: of `Rails`.
        Raises PeerTimeout, TransportError."""
        self._tickets = dict(tickets)
        self._reach(self._ring.ring, self._ring.num_bytes)
        for landing in self._landings.values():
            self._reach(landing.address, self._head_bytes)
        self._take(Rails(hosts, landings, [True] * self._size))
        self.channel.connect(tickets, timeout_s)

    def _reach(self, address: int, num_bytes: int) -> None:
        """Let kernels reach host memory, once."""
        if num_bytes and address not in self._reached:
            self._register(address, num_bytes)
            self._reached.append(address)

    def _take(self, rails: Rails) -> None:
        """From now on rows go by these rails: memory for them. No kernel runs. Raises TransportError."""
        self._rails = rails
        for rank in self.ranks:
            is_rail, carrier = rails.rail(self._rank, rank) == rank, self._carrier(rank)
            for number, boxes, has_rows in (
                (rank, self._outboxes, is_rail),
                (self._size + rank, self._inboxes, carrier == self._rank),
            ):
                box = boxes + rank * self.box_bytes
                self._make(number, box + self._row_bytes, self.box_bytes - self._row_bytes)
                if has_rows:
                    self._make(number, box, self._row_bytes)
            if carrier != self._rank:
                self._reach(self._carried(rank), self._row_bytes)

    def _make(self, number: int, address: int, num_bytes: int) -> None:
        """A part of a box, once."""
        if num_bytes and address not in self._made:
            self._dma_bufs[number] = self._boxes.take(address, num_bytes)
            self._made.add(address)

    def _carrier(self, source: int) -> int:
        """The rank here in whose inbox rows of a rank of another host are read; this one, where it takes no part."""
        found = self._rails.rail(source, self._rank)
        return self._rank if found is None else found

    def _carried(self, source: int) -> int:
        """Where that inbox begins, as this process has it."""
        carrier = self._carrier(source)
        inboxes = self._inboxes if carrier == self._rank else self._landings[carrier].address + self._head_bytes
        return inboxes + source * self.box_bytes

    def record(self) -> Any:
        """For the kernels: `abi.Network`, of the ranks that take part now."""
        made = abi.Network(
            remote=sum(1 << rank for rank in self.ranks), outboxes=self._outboxes, inboxes=self._inboxes,
            stride=self.box_bytes, stripe=self._ring.stripe, words=self.words.data_ptr(), ring=self._ring.ring,
            popped=self._ring.popped, map=self._map, slice_rows=(ctypes.c_uint64 * 2)(*self._slice_rows),
            exact=self._exact, slice_lag=self._slice_lag,
        )  # fmt: skip
        for rank in self.ranks:
            # As its source: by whom its rows come.
            carrier = made.carriers[rank] = self._carrier(rank)
            made.carried[rank], made.carrier_words[rank] = self._carried(rank), self._landings[carrier].address
            # As its destination: by whom rows go to it.
            rail = self._rails.rail(self._rank, rank)
            if rail is not None:
                here, there = self._offset(rank), self._offset(rail)
                made.rail_of[here] = there
                made.rails |= 1 << there
                made.members[there] |= 1 << here
        return made

    def _offset(self, rank: int) -> int:
        """`offset_of_rank` of kernels/common/scheduler.cuh."""
        return (rank - self._rank - 1) % self._size

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
        outside `mask`. Rows go by the rails of `mask`, as the next `record` says. Raises PeerTimeout,
        TransportError."""
        for rank in self.ranks:
            if not mask[rank]:
                self.channel.leave(rank, epoch)
        self._take(Rails(self._rails.hosts, self._rails.landings, mask))
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
        """Part from all. No kernel runs any more, and none that begins reads anything of this. Idempotent."""
        if self._native is None:
            return
        self.channel.close()
        self._boxes.close()
        while self._reached:
            self._unregister(self._reached.pop())
        self.channel.free()
        self._lib.cd_boxes_free(self._native)
        self._native = None

    def close_in_child(self) -> None:
        self._native = None
        self._boxes.close_in_child()
        self._landings[self._rank].close()


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
