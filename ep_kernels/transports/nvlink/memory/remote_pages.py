"""Pages of ranks of other hosts: copies, which their owners send over the network whenever they write to them.

    block b of a page: the word that vouches for it, and eight others (`mailbox`)

A rank pushes a block of its page to each rank of another host, with the block's number as immediate. At the other end
native/host_words.cpp takes it over when all of it is there, words first, so a copy is read as a page of this host is.
The connections also show which ranks are alive: a rank whose connections end counts as dead, one that leaves sends the
epoch first.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.network import Channel, ChannelMemory, Network
from ep_kernels.transports.nvlink.gpu import launch

PAGE_BYTES, BLOCK_WORDS = 4096, 9
"""As native/host_words.cpp has them."""


class RemotePages:
    """The copies here, and the connections over which this rank's own page is sent.

    Args:
        gone: address of [size] int64: set to `abi.DEAD` for ranks whose connections end; kernels read it.

    Attributes:
        ranks: those of other hosts; empty before `connect`.

    Raises:
        TransportError: the network cannot be opened.
    """

    def __init__(
        self, config: NetworkConfig, rank: int, size: int, page: mmap.mmap, gone: int, timeout_s: float
    ) -> None:
        self._lib, self._size = launch.library(), size
        self._landing, self._pages = (mmap.mmap(-1, size * PAGE_BYTES, flags=mmap.MAP_PRIVATE) for _ in range(2))
        self._joined, self._told = (ctypes.c_int64 * size)(), [0] * size
        areas = (_address(self._landing), _address(self._pages), gone, ctypes.addressof(self._joined))
        self._words: int | None = self._lib.cd_words_open(*areas)
        if not self._words:
            raise TransportError("nvlink: out of memory")
        network = Network.of(config)
        memory = ChannelMemory(
            _address(page), PAGE_BYTES, _address(self._landing), PAGE_BYTES, self._lib.cd_words_handler(), self._words
        )
        self._channel = Channel(network, rank, size, memory, timeout_s)
        self._tickets: dict[int, NetworkTicket] = {}

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._tickets)

    def ticket(self) -> NetworkTicket:
        return self._channel.ticket()

    def page(self, rank: int) -> memoryview:
        """[512] int64: the copy of that rank's page."""
        return memoryview(self._pages)[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES].cast("q")

    def connect(self, tickets: Mapping[int, NetworkTicket], timeout_s: float) -> None:
        """With ranks of other hosts; they do the same. Raises PeerTimeout, TransportError."""
        self._tickets |= tickets
        self._channel.connect(tickets, timeout_s)

    def connect_again(self, mask: int, timeout_s: float) -> int | None:
        """Try for so long to connect with those of `mask` that are of other hosts, where no connection stands. A rank
        that was not reached; None: all were."""
        try:
            self._channel.connect({rank: one for rank, one in self._tickets.items() if mask >> rank & 1}, timeout_s)
        except PeerTimeout as error:
            return error.peer
        return None

    def abort(self, reason: str) -> None:
        """Connecting ends in AbortedError, now and later. Any thread."""
        self._channel.abort(reason)

    def give_up(self, ranks: Sequence[int]) -> None:
        """Connecting with one of these ends in PeerTimeout, now and later. Any thread."""
        self._channel.give_up(ranks)

    def send(self, block: int, mask: int, full: Callable[[int], None]) -> None:
        """Send that block of the own page to the ranks of `mask` on other hosts. While the ring is full, which the
        proxy empties whatever peers do, it calls `full` with the rank, which naps or raises. Nothing after `close`."""
        for rank in self._tickets:
            if mask >> rank & 1:
                self._told[rank] = self._joined[rank]
                while not self._channel.push(rank, 8 * BLOCK_WORDS * block, 8 * BLOCK_WORDS, block):
                    full(rank)

    def send_again(self, block: int, mask: int, full: Callable[[int], None]) -> None:
        """Send the block again to ranks whose connections are newer than the last send, which may be lost."""
        self.send(
            block, mask & sum(1 << rank for rank in self._tickets if self._joined[rank] != self._told[rank]), full
        )

    def is_quiet(self, mask: int) -> bool:
        """Whether what was sent to the ranks of `mask` has left the own page."""
        return self._channel.is_quiet(mask)

    def leave(self, rank: int, epoch: int) -> None:
        """Send the epoch to a rank that takes no part in it, and close its connections."""
        if rank in self._tickets:
            self._channel.leave(rank, epoch)

    def is_up(self, rank: int) -> bool:
        return bool(self._channel.up() >> rank & 1)

    def close(self) -> None:
        """Part from all in order. Idempotent; the copies stay while they are referenced."""
        self._channel.close()
        self._channel.free()
        words, self._words = self._words, None
        if words:
            self._lib.cd_words_close(words)

    def close_in_child(self) -> None:
        self._channel.close_in_child()
        self._words = None


def _address(area: mmap.mmap) -> int:
    """Address of a writable mapping, which stays as long as the object."""
    return ctypes.addressof(ctypes.c_char.from_buffer(area))
