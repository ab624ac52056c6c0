"""The hosts' small exchange beside the GPUs: one page of shared memory per rank, written by its owner, read by all.

    page: exchanges entered | words of even exchanges | words of odd exchanges
          | epoch that this rank would agree to | its words, number of exchanges, mask | epoch that its mask agreed to

A rank enters exchange n by writing its words to half n % 2 and then `number` = n. It cannot enter n + 2 before
everybody entered n + 1, so a half is never overwritten while somebody still reads it. Survivors of a loss may have
stopped in different exchanges, so they agree on the next epoch in a place of its own. A rank that looks at a peer which
has agreed to an epoch without it hears so: it was left out, and what the peer publishes now is not for it.
Waiting sleeps (never spins). Fences stand between words and the number that vouches for them, on both sides: Arm's
processors, as beside GB200, would not keep that order.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

from ep_kernels.errors import AbortedError, PeerTimeout, TransportError
from ep_kernels.transports.base import EXCHANGE_WORDS
from ep_kernels.transports.nvlink import launch

PAGE_BYTES = mmap.PAGESIZE
_EPOCH = 1 + 2 * EXCHANGE_WORDS
_AGREED = _EPOCH + 1 + EXCHANGE_WORDS
_MASK_WORDS, _MASK_BITS = 4, 63
_FIRST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class Mailbox:
    """This rank's page and its view of the others'.

    Args:
        rank: this rank.
        gone: tells whether a rank's process is known to be dead.
    """

    def __init__(self, rank: int, gone: Callable[[int], bool]) -> None:
        self._rank, self._gone, self._fence = rank, gone, launch.fence()
        self.fd = os.memfd_create("crossdock-mailbox", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PAGE_BYTES)
        self._maps: list[mmap.mmap] = []  # each holds a descriptor of its own
        self._pages: list[memoryview] = []
        self._active: list[bool] = []
        self._number = self._epoch = 0
        self._woken = threading.Event()
        self._aborted: str | None = None
        self._given_up: frozenset[int] = frozenset()

    def attach(self, fds: Sequence[int]) -> None:
        """Map everybody's page, in rank order."""
        self._maps = [mmap.mmap(fd, PAGE_BYTES) for fd in fds]
        self._pages = [memoryview(page).cast("q") for page in self._maps]
        self._active = [True] * len(self._pages)

    def exchange(self, words: Sequence[int], timeout_s: float) -> list[tuple[int, ...] | None]:
        """All-gather of EXCHANGE_WORDS int64. Raises PeerTimeout, AbortedError, TransportError if left out."""
        number = self._number = self._number + 1
        start = 1 + number % 2 * EXCHANGE_WORDS
        mine = self._pages[self._rank]
        for i, word in enumerate(words):
            mine[start + i] = word
        self._fence()
        mine[0] = number
        self._await_all("exchange", 0, number, timeout_s)
        answers = self._read(start)
        self.check_left_out("exchange")  # after the read: what was read may have been for others
        return answers

    def agree(self, mask: Sequence[bool], epoch: int, words: Sequence[int], timeout_s: float) -> list[tuple[int, ...]]:
        """Everybody's words (at most 3) for this epoch; collective of the ranks in `mask`, whose exchanges then go on
        in step. Raises as `exchange`, and TransportError where ranks bring different masks."""
        self._active = list(mask)
        mine, bits = self._pages[self._rank], _mask_words(mask)
        for i, word in enumerate((*words, self._number, *bits)):
            mine[_EPOCH + 1 + i] = word
        self._fence()
        mine[_EPOCH] = epoch
        self._await_all("set_active", _EPOCH, epoch, timeout_s)
        self.check()
        answers = self._read(_EPOCH + 1)
        for peer, answer in enumerate(answers):
            if answer is not None and (self._pages[peer][_EPOCH] != epoch or answer[-_MASK_WORDS:] != bits):
                raise _left_out("set_active", peer, self._pages[peer][_EPOCH])
        self._number = max(answer[len(words)] for answer in answers if answer is not None)
        self._epoch = mine[_AGREED] = epoch
        return [answer for answer in answers if answer is not None]

    def is_ahead(self) -> bool:
        """Whether some rank, active or not, has agreed to an epoch that this rank has not. Any thread."""
        epoch = self._epoch
        return any(page[_AGREED] > epoch for page in self._pages)

    def check_left_out(self, op: str) -> None:
        """Raise TransportError where a peer has agreed to an epoch that this rank has not. Any thread."""
        if not self.is_ahead():
            return
        reached = max(self._epoch, self._pages[self._rank][_EPOCH])  # an epoch that this rank is entering is no news
        for peer, (active, page) in enumerate(zip(self._active, self._pages, strict=True)):
            if active and page[_AGREED] > reached:
                raise _left_out(op, peer, page[_AGREED])

    def _read(self, start: int) -> list[tuple[int, ...] | None]:
        self._fence()
        found = [
            tuple(page[start : start + EXCHANGE_WORDS]) if active else None
            for page, active in zip(self._pages, self._active, strict=True)
        ]
        self._fence()  # what is looked at next is whether these were for this rank
        return found

    def _await_all(self, op: str, word: int, number: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for peer in range(len(self._pages)):
            if self._active[peer]:
                self._await(op, peer, word, number, deadline, timeout_s)

    def _await(self, op: str, peer: int, word: int, number: int, deadline: float, timeout_s: float) -> None:
        page, nap = self._pages[peer], _FIRST_NAP_S
        while page[word] < number:
            self.check()
            if word == 0:
                self.check_left_out(op)
            lost = next((rank for rank in self._given_up if self._active[rank]), None)
            gone, now = self._gone(peer), time.monotonic()
            if (gone or lost is not None or now > deadline) and page[word] < number:
                silent = peer if lost is None else lost
                raise PeerTimeout(
                    peer=silent, op=op, phase="words", expected=number, seen=self._pages[silent][word],
                    waited_s=timeout_s - (deadline - now), gone=gone, given_up=lost is not None,
                )  # fmt: skip
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def wait_for_peer(self, timeout_s: float) -> bool:
        """See `base.Transport`. Raises as `exchange`, without PeerTimeout."""
        deadline, nap = time.monotonic() + timeout_s, _FIRST_NAP_S
        while True:
            if any(a and page[0] > self._number for a, page in zip(self._active, self._pages, strict=True)):
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
        """End a `wait_for_peer`."""
        self._woken.set()

    def check(self) -> None:
        """Raise AbortedError after `abort`."""
        if self._aborted is not None:
            raise AbortedError(self._aborted)

    def abort(self, reason: str) -> None:
        """End every wait, present and future, in AbortedError(reason)."""
        self._aborted = self._aborted or reason

    def give_up(self, ranks: Sequence[int]) -> None:
        """While these are active, every wait ends in PeerTimeout, present and future. Any thread."""
        self._given_up = self._given_up.union(ranks)

    def close(self) -> None:
        """Give the page's descriptor back; the mappings die with the object. Idempotent; also in a forked child."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def forsake(self) -> None:
        """In a forked child: close its copies of the page and of the others'."""
        self.close()
        for view, page in zip(self._pages, self._maps, strict=True):
            view.release()
            page.close()
        self._pages, self._maps = [], []


def _mask_words(mask: Sequence[bool]) -> tuple[int, ...]:
    bits = sum(1 << rank for rank, alive in enumerate(mask) if alive)
    return tuple(bits >> (_MASK_BITS * i) & ((1 << _MASK_BITS) - 1) for i in range(_MASK_WORDS))


def _left_out(op: str, peer: int, epoch: int) -> TransportError:
    return TransportError(f"{op}: rank {peer} has gone on in epoch {epoch} without this rank")
