"""The hosts' small exchange beside the GPUs: one page of shared memory per rank, written by its owner, read by all.

    page: four blocks of nine words; the first word of a block vouches for the others
          number of an even exchange | its words      number of an odd one | its words
          epoch that this rank would agree to | its words, number of exchanges, mask      epoch that its mask agreed to

A rank enters exchange n by writing its words to block n % 2 and then n. It cannot enter n + 2 before everybody entered
n + 1, so a block is never overwritten while a peer still reads it. Survivors of a loss may have stopped in different
exchanges, so they agree on the next epoch in a block of its own. A rank that reads the page of a peer which has agreed
to an epoch without it raises: it was left out, and what the peer publishes now is not for it. Waiting sleeps (never
spins).
Fences stand between words and the number that vouches for them, on both sides: Arm's processors, as beside GB200, would
not keep that order.

Pages of ranks of other hosts are copies that the network keeps (`remote_pages`); nothing else differs.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_uint64

from ep_kernels.errors import AbortedError, PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.network import STAYS, require, settled
from ep_kernels.telemetry import RING_SIZE
from ep_kernels.transports.base import EXCHANGE_WORDS
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.memory.remote_pages import BLOCK_WORDS, PAGE_BYTES, RemotePages
from ep_kernels.types import LatencySample

_AGREE, _AGREED = 2, 3
"""Blocks beside those of exchanges, 0 and 1."""
_AGREED_AT = _AGREED * BLOCK_WORDS
_MASK_WORDS, _MASK_BITS = 2, 32
"""Words of a mask of ranks, and bits in each."""
_FIRST_NAP_S, _LONGEST_NAP_S, _REDIAL_S = 20e-6, 1e-3, 1.0


class Mailbox:
    """This rank's page and its view of the others'.

    Args:
        gone: tells whether a rank's process is known to be dead.
    """

    def __init__(self, rank: int, gone: Callable[[int], bool]) -> None:
        self._rank, self._gone, self._fence = rank, gone, launch.library().cd_fence
        self.fd = os.memfd_create("crossdock-mailbox", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PAGE_BYTES)
        self.remote: RemotePages | None = None
        self._maps: list[mmap.mmap] = [mmap.mmap(self.fd, PAGE_BYTES)]  # each holds a descriptor of its own
        self._pages: list[memoryview] = []
        self._active: list[bool] = []
        self._number = self._epoch = 0
        self._woken = threading.Event()
        self._aborted: str | None = None
        self._given_up: frozenset[int] = frozenset()
        self._unreached: int | None = None
        self._samples: deque[LatencySample] = deque(maxlen=RING_SIZE)

    def open_network(self, config: NetworkConfig, size: int, gone: int, timeout_s: float) -> NetworkTicket:
        """Reach ranks of other hosts, too; the ticket by which they reach this one. `gone`, `timeout_s`: as
        `RemotePages` has them. Raises TransportError."""
        self.remote = RemotePages(config, self._rank, size, self._maps[0], gone, timeout_s)
        return self.remote.ticket()

    def attach(self, fds: Sequence[int]) -> None:
        """Map everybody's page, in rank order; -1: the copy of a rank that `connect` has named."""
        own = self._maps[0]
        pages = []
        for rank, fd in enumerate(fds):
            if fd < 0:
                assert self.remote is not None
                pages.append(self.remote.page(rank))
                continue
            mapped = own if rank == self._rank else mmap.mmap(fd, PAGE_BYTES)
            self._maps += [] if mapped is own else [mapped]
            pages.append(memoryview(mapped).cast("q"))
        self._pages = pages
        self._active = [True] * len(pages)

    def connect(self, tickets: Mapping[int, NetworkTicket], timeout_s: float) -> None:
        """With ranks of other hosts. Raises PeerTimeout, TransportError."""
        if self.remote is not None:
            self.remote.connect(tickets, timeout_s)

    def exchange(self, words: Sequence[int], timeout_s: float, *, sampled: bool = True) -> list[tuple[int, ...] | None]:
        """All-gather of EXCHANGE_WORDS int64. Raises PeerTimeout, AbortedError, TransportError if left out."""
        number = self._number = self._number + 1
        start_ns = time.monotonic_ns()
        self._write("exchange", number % 2, number, words, timeout_s)
        send_ns = time.monotonic_ns() - start_ns
        waits_ns = self._await_all("exchange", number % 2, number, timeout_s)
        answers = self._read(number % 2)
        self.check_left_out("exchange")  # after the read: what was read may have been for others
        if sampled:
            total_ns = time.monotonic_ns() - start_ns
            self._samples.append(
                LatencySample("exchange", "host", number, 0, start_ns, send_ns, tuple(waits_ns), total_ns)
            )
        return answers

    def samples(self) -> list[LatencySample]:
        """Exchanges since the last call, oldest first. Any thread."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def agree(
        self, mask: Sequence[bool], epoch: int, words: tuple[int, int, int], up: int, timeout_s: float
    ) -> list[tuple[tuple[int, ...], int]]:
        """Each rank's words and mask of ranks `up` for this epoch, () and 0 of ranks outside `mask`; collective of the
        ranks in `mask`, whose exchanges then go on in step. Raises as `exchange`, PeerTimeout also where words of
        before have not left for one of them, and TransportError where ranks bring different masks."""
        self._active = list(mask)
        bits = _mask_words(self._active_bits())
        require(self.settle(timeout_s), "set_active", timeout_s)
        self.check()
        self._write("set_active", _AGREE, epoch, (*words, self._number, *_mask_words(up), *bits), timeout_s)
        self._await_all("set_active", _AGREE, epoch, timeout_s)
        self.check()
        answers = self._read(_AGREE)
        for peer, answer in enumerate(answers):
            if answer is not None and (self._vouched(peer, _AGREE) != epoch or answer[-_MASK_WORDS:] != bits):
                raise _left_out("set_active", peer, self._vouched(peer, _AGREE))
        self._number = max(answer[3] for answer in answers if answer is not None)
        self._epoch = epoch
        self._write("set_active", _AGREED, epoch, (), timeout_s)
        return [((), 0) if answer is None else (answer[:3], _mask_of(answer[4:])) for answer in answers]

    def is_ahead(self) -> bool:
        """Whether some rank, active or not, has agreed to an epoch that this rank has not. Any thread."""
        epoch = self._epoch
        return any(page[_AGREED_AT] > epoch for page in self._pages)

    def watched(self) -> list[tuple[int, int]]:
        """(address of a word, the most that it says) of each rank: `is_ahead` where one says more. Good until
        `close_in_child` and as long as this object."""
        return [(addressof(c_uint64.from_buffer(page, 8 * _AGREED_AT)), self._epoch) for page in self._pages]

    def check_left_out(self, op: str) -> None:
        """Raise TransportError where a peer has agreed to an epoch that this rank has not. Any thread."""
        if not self.is_ahead():
            return
        reached = max(self._epoch, self._vouched(self._rank, _AGREE))  # an epoch that this rank is entering is no news
        for peer, active in enumerate(self._active):
            if active and self._vouched(peer, _AGREED) > reached:
                raise _left_out(op, peer, self._vouched(peer, _AGREED))

    def leave(self, mask: Sequence[bool], epoch: int) -> None:
        """Close the connections with ranks of other hosts outside `mask`; the last message names the epoch."""
        for rank in self.remote.ranks if self.remote is not None else ():
            if not mask[rank] and self.remote is not None:
                self.remote.leave(rank, epoch)

    def settle(self, timeout_s: float) -> int:
        """Wait until all words for active ranks of other hosts have left this rank's page, at most so long, and not
        after `abort`; the ranks whose words have not, a bit each. `close` drops what has not left."""
        if self.remote is None:
            return 0
        ranks = sum(1 << rank for rank in self.remote.ranks if self._active[rank])
        return settled(self.remote.is_quiet, ranks, timeout_s, self._is_over)

    def _is_over(self) -> bool:
        """Whether waits end at once: what follows says why."""
        return self._aborted is not None or self._lost() is not None

    def _lost(self) -> int | None:
        return next((rank for rank in self._given_up if self._active[rank]), None)

    def _renew(self, deadline: float) -> None:
        """Connections with active ranks of other hosts that were lost, or that one side had parted from, are made
        again, and what was sent before is sent again."""
        if self.remote is not None:
            bits = self._active_bits()
            left_s = max(0.0, deadline - time.monotonic())
            self._unreached = self.remote.connect_again(bits, min(_REDIAL_S, left_s))
            self.remote.send_again(_AGREE, bits, lambda rank: self._nap("set_active", rank, _AGREE, deadline, left_s))

    def _active_bits(self) -> int:
        return sum(1 << rank for rank, active in enumerate(self._active) if active)

    def _write(self, op: str, block: int, number: int, words: Sequence[int], timeout_s: float) -> None:
        """A block of this rank's page: the words, then what vouches for them; then to ranks of other hosts. Raises
        as `exchange`."""
        mine, start = self._pages[self._rank], block * BLOCK_WORDS
        for i, word in enumerate(words, start + 1):
            mine[i] = word
        self._fence()
        mine[start] = number
        if self.remote is not None:  # epochs are sent to ranks that take no part, too
            bits, deadline = self._active_bits(), time.monotonic() + timeout_s
            bits = bits if block < _AGREE else (1 << len(self._pages)) - 1
            self.remote.send(block, bits, lambda rank: self._nap(op, rank, block, deadline, timeout_s))

    def _nap(self, op: str, peer: int, block: int, deadline: float, timeout_s: float) -> None:
        """A moment of a wait for the own proxy, by which words for `peer` leave. Raises as `exchange`."""
        self.check()
        lost, now = self._lost(), time.monotonic()
        if lost is not None or now > deadline:
            rank = peer if lost is None else lost
            raise PeerTimeout(
                peer=rank, op=op, phase="credit", expected=self._vouched(self._rank, block),
                seen=self._seen(rank, block), waited_s=timeout_s - (deadline - now), given_up=lost is not None,
                end=STAYS if lost is None else "",
            )  # fmt: skip
        time.sleep(_FIRST_NAP_S)

    def _vouched(self, peer: int, block: int) -> int:
        return int(self._pages[peer][block * BLOCK_WORDS])

    def _read(self, block: int) -> list[tuple[int, ...] | None]:
        self._fence()
        start = 1 + block * BLOCK_WORDS
        found = [
            tuple(page[start : start + EXCHANGE_WORDS]) if active else None
            for page, active in zip(self._pages, self._active, strict=True)
        ]
        self._fence()  # what is looked at next is whether these were for this rank
        return found

    def _await_all(self, op: str, block: int, number: int, timeout_s: float) -> list[int]:
        """[R] nanoseconds until each rank's words were seen, 0 of this one and of inactive ones."""
        began_ns, nap, waits_ns = time.monotonic_ns(), _FIRST_NAP_S, [0] * len(self._pages)
        deadline = time.monotonic() + timeout_s
        left = [peer for peer, active in enumerate(self._active) if active and peer != self._rank]
        while True:
            now_ns = time.monotonic_ns()
            for peer in [peer for peer in left if self._vouched(peer, block) >= number]:
                waits_ns[peer] = now_ns - began_ns
                left.remove(peer)
            if not left:
                return waits_ns
            self.check()
            if block == _AGREE:
                self._renew(deadline)
            else:
                self.check_left_out(op)
            self._check_silent(op, left, block, number, deadline, timeout_s)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def _check_silent(
        self, op: str, left: Sequence[int], block: int, number: int, deadline: float, timeout_s: float
    ) -> None:
        """Raise PeerTimeout where a rank need not be waited for any longer: the deadline has passed, or it is gone."""
        lost = self._lost()
        dead, now = next((peer for peer in left if self._is_dead(peer, block)), None), time.monotonic()
        if dead is None and lost is None and now <= deadline:
            return
        peer = left[0] if dead is None else dead
        if self._vouched(peer, block) < number:
            silent = peer if lost is None else lost
            raise PeerTimeout(
                peer=silent, op=op, phase="words", expected=number, seen=self._seen(silent, block),
                waited_s=timeout_s - (deadline - now), gone=dead is not None, given_up=lost is not None,
            )  # fmt: skip

    def _is_dead(self, peer: int, block: int) -> bool:
        """In set_active connections that have ended are made again, those of words first: only a rank that is not
        reached is dead."""
        is_made_again = block == _AGREE and self.remote is not None and peer in self.remote.ranks
        return self._gone(peer) and (not is_made_again or peer == self._unreached)

    def _seen(self, peer: int, block: int) -> int:
        """The last exchange that a peer has entered, or the epoch that it would agree to."""
        return self._vouched(peer, block) if block == _AGREE else max(self._vouched(peer, 0), self._vouched(peer, 1))

    def wait_for_peer(self, timeout_s: float) -> bool:
        """See `base.Transport`. Raises as `exchange`, without PeerTimeout."""
        deadline, nap = time.monotonic() + timeout_s, _FIRST_NAP_S
        while True:
            if any(active and self._seen(peer, 0) > self._number for peer, active in enumerate(self._active)):
                return True
            self.check_left_out("wait_for_peer")
            self.check()
            left = deadline - time.monotonic()
            if self._woken.wait(max(0.0, min(nap, left))):
                self._woken.clear()
                return True
            if left <= 0:
                return False
            nap = min(2 * nap, 2 * _LONGEST_NAP_S)

    def wake(self) -> None:
        self._woken.set()

    def check(self) -> None:
        if self._aborted is not None:
            raise AbortedError(self._aborted)

    def abort(self, reason: str) -> None:
        """End every wait, present and future, in AbortedError(reason)."""
        self._aborted = self._aborted or reason
        if self.remote is not None:
            self.remote.abort(reason)

    def give_up(self, ranks: Sequence[int]) -> None:
        """While these are active, every wait ends in PeerTimeout, present and future. Any thread."""
        self._given_up = self._given_up.union(ranks)
        if self.remote is not None:
            self.remote.give_up(ranks)

    def close(self) -> None:
        """Part from ranks of other hosts, give the page's descriptor back; the mappings die with the object.
        Idempotent."""
        if self.remote is not None:
            self.remote.close()
        self._give_back()

    def _give_back(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close_in_child(self) -> None:
        """In a forked child: close its copies of the page and of the others'."""
        self._give_back()
        if self.remote is not None:
            self.remote.close_in_child()
        for view in self._pages:
            view.release()
        for page in self._maps:
            page.close()
        self._pages, self._maps = [], []


def _mask_words(mask: int) -> tuple[int, ...]:
    return tuple(mask >> (_MASK_BITS * i) & ((1 << _MASK_BITS) - 1) for i in range(_MASK_WORDS))


def _mask_of(words: Sequence[int]) -> int:
    """The mask in the first words, as `_mask_words` made them."""
    return sum(words[i] << (_MASK_BITS * i) for i in range(_MASK_WORDS))


def _left_out(op: str, peer: int, epoch: int) -> TransportError:
    return TransportError(f"{op}: rank {peer} has gone on in epoch {epoch} without this rank")
