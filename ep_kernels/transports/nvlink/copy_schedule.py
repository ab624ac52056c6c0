"""What a stream does for an all-gather by copy engines: pure lists of copies, waits and writes.

Push (outs registered), rank r of R, operation `seq`:

    begun = seq                                         this rank's host hears that its stream has come here
    word = seq, signature; READY[r] of r + 1, r + 2, ... <- word "my outs are free"
    for p in r + 1, r + 2, ...:  wait READY[p]; out of p, shard r <- x, part by part; SHARD[r] of p <- word
    for p in r - 1, r - 2, ...:  wait SHARD[p]
    seen <- SHARD; ended = seq

All ranks send to the next rank at once, so no two send to one. A flag travels as a copy behind its shard, on one
stream: a stream's write to a peer's memory is not supported by newer drivers. Waits and writes are of local memory.

Pull (outs anywhere): the shard lies in the slot of `copies` that the parity of seq names. SHARD is sent first; then,
for p in r + 1, r + 2, ...: wait SHARD[p]; out, shard p <- slot of p. Two slots suffice: kernels/collective_abi.py says
why.

In a CUDA graph a pull whose waits are those of kernels/collectives/copy_wait.cuh, from registered outs where x is in
place, so nothing is staged.

A flag is 16 bytes: seq, which is waited for, and the operation's signature (0: not known), which hosts compare when the
operation has ended.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

FLAG_BYTES, WORD_BYTES = 16, 8
SEEN_SLOTS = 64
"""Operations whose flags the host can still look at when they have ended."""


COPY, WAIT, WRITE = range(3)
"""Kinds of steps, as in native/launch.cpp."""

CopyStep = tuple[int, int, int, int]
"""(kind, to, source, amount). COPY: `amount` bytes from `source` to `to`. WAIT: until the word at `to` is `amount` or
more. WRITE: `amount` into the word at `to`. Plain tuples: a call makes dozens."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A part of an all-gather.

    Attributes:
        x: address of this rank's shard.
        out: push: of `out` from the base of every rank's region; pull: its address here.
        slot: pull: where the shard lies, from the base of every rank's region.
        num_bytes: of the shard that move.
        stride: bytes from one shard of `out` to the next.
        slot_stride: pull: the shard of rank p lies p times so many bytes behind `slot`.
    """

    x: int
    out: int
    slot: int
    num_bytes: int
    stride: int
    slot_stride: int = 0


@dataclass(frozen=True, slots=True)
class CopyPlaces:
    """Addresses that the steps use.

    Attributes:
        rank: this rank.
        active: [R], who takes part.
        regions: [R], base of every rank's region as mapped here.
        ready, shard: of the rows of flags, from the base of a region.
        word: two words of this rank's device memory.
        begun, ended: words of pinned host memory.
        seen: [SEEN_SLOTS, R, 2] words of pinned host memory, by seq modulo SEEN_SLOTS.
    """

    rank: int
    active: tuple[bool, ...]
    regions: tuple[int, ...]
    ready: int
    shard: int
    word: int
    begun: int
    ended: int
    seen: int

    def others(self, step: int) -> list[int]:
        """Active peers in the order rank + step, rank + 2 * step, ..."""
        size = len(self.active)
        order = ((self.rank + i * step) % size for i in range(1, size))
        return [peer for peer in order if self.active[peer]]


def arrival(places: CopyPlaces, peer: int, seq: int) -> CopyStep:
    """Wait for a peer's shard (push), or for its slot (pull)."""
    return WAIT, places.regions[places.rank] + places.shard + FLAG_BYTES * peer, 0, seq


def push(places: CopyPlaces, seq: int, signature: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The steps of operation `seq`, in order."""
    after, own, ready = places.others(1), FLAG_BYTES * places.rank, places.regions[places.rank] + places.ready
    steps = _begin(places, seq, signature)
    steps += [(COPY, places.regions[peer] + places.ready + own, places.word, FLAG_BYTES) for peer in after]
    for peer in after:
        region = places.regions[peer]
        steps.append((WAIT, ready + FLAG_BYTES * peer, 0, seq))
        for part in parts:
            if part.num_bytes:
                steps.append((COPY, region + part.out + places.rank * part.stride, part.x, part.num_bytes))
        steps.append((COPY, region + places.shard + own, places.word, FLAG_BYTES))
    steps += [arrival(places, peer, seq) for peer in places.others(-1)]
    return steps + _end(places, seq)


def pull(places: CopyPlaces, seq: int, signature: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The steps of operation `seq`, in order, once the shard lies in the slot."""
    after, own = places.others(1), FLAG_BYTES * places.rank
    steps = _begin(places, seq, signature)
    steps += [(COPY, places.regions[peer] + places.shard + own, places.word, FLAG_BYTES) for peer in after]
    for peer in after:
        steps.append(arrival(places, peer, seq))
        steps += _pulled(places, peer, parts)
    return steps + _end(places, seq)


def graph_copies(places: CopyPlaces, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The copies of a pull in a CUDA graph, between the two launches of kernels/collectives/copy_wait.cuh."""
    return [step for peer in places.others(1) for step in _pulled(places, peer, parts)]


def _pulled(places: CopyPlaces, peer: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    region = places.regions[peer]
    return [
        (COPY, part.out + peer * part.stride, region + part.slot + peer * part.slot_stride, part.num_bytes)
        for part in parts
        if part.num_bytes
    ]


def _begin(places: CopyPlaces, seq: int, signature: int) -> list[CopyStep]:
    word = places.word
    return [(WRITE, places.begun, 0, seq), (WRITE, word, 0, seq), (WRITE, word + WORD_BYTES, 0, signature)]


def _end(places: CopyPlaces, seq: int) -> list[CopyStep]:
    num_bytes = FLAG_BYTES * len(places.active)
    seen, shards = places.seen + seq % SEEN_SLOTS * num_bytes, places.regions[places.rank] + places.shard
    return [(COPY, seen, shards, num_bytes), (WRITE, places.ended, 0, seq)]


_ANY_SEQ = 1 << 62
"""Stands for the number of an operation in a template; no address, length or signature is it."""
_STEP_WORDS = 4
"""Of a step as the driver's caller takes it."""


class PushTemplate:
    """`push` for any number: what does not depend on it is packed once.

    Args:
        places, parts, signature: as in `push`.
    """

    def __init__(self, places: CopyPlaces, parts: Sequence[CopyPart], signature: int) -> None:
        self.signature = signature
        steps = push(places, _ANY_SEQ, signature, parts)
        self._words = array("Q", itertools.chain.from_iterable(steps))
        self._numbers = [i for i, word in enumerate(self._words) if word == _ANY_SEQ]
        self._seen = (len(steps) - 2) * _STEP_WORDS + 1  # where the last copy but one, of `_end`, goes to
        self._first, self._row = places.seen, FLAG_BYTES * len(places.active)

    def words(self, seq: int) -> array[int]:
        """The steps of operation `seq`, packed; good until the next call."""
        words = self._words
        for at in self._numbers:
            words[at] = seq
        words[self._seen] = self._first + seq % SEEN_SLOTS * self._row
        return words
