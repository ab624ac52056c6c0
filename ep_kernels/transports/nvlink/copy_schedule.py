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

A flag is 16 bytes: seq, which is waited for, and the operation's signature (0: not known), which hosts compare when the
operation has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FLAG_BYTES, WORD_BYTES = 16, 8


class StepKind(enum.IntEnum):
    """As in native/launch.cpp."""

    COPY = 0
    WAIT = 1
    WRITE = 2


class CopyStep(NamedTuple):
    """COPY: `amount` bytes from `source` to `to`. WAIT: until the word at `to` is `amount` or more. WRITE: `amount`
    into the word at `to`."""

    kind: StepKind
    to: int
    source: int
    amount: int


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A part of an all-gather.

    Attributes:
        x: address of this rank's shard.
        out: push: of `out` from the base of every rank's region; pull: its address here.
        slot: pull: where the shard lies, from the base of every rank's region.
        num_bytes: of the shard that move.
        stride: bytes from one shard of `out` to the next.
    """

    x: int
    out: int
    slot: int
    num_bytes: int
    stride: int


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
        seen: [R, 2] words of pinned host memory, for this operation.
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
    return _wait(places, places.shard, peer, seq)


def push(places: CopyPlaces, seq: int, signature: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The steps of operation `seq`, in order."""
    steps = _begin(places, seq, signature)
    steps += [_flag(places, places.ready, peer) for peer in places.others(1)]
    for peer in places.others(1):
        steps.append(_wait(places, places.ready, peer, seq))
        for part in parts:
            to = places.regions[peer] + part.out + places.rank * part.stride
            steps += _copy(to, part.x, part.num_bytes)
        steps.append(_flag(places, places.shard, peer))
    steps += [arrival(places, peer, seq) for peer in places.others(-1)]
    return steps + _end(places, seq)


def pull(places: CopyPlaces, seq: int, signature: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The steps of operation `seq`, in order, once the shard lies in the slot."""
    steps = _begin(places, seq, signature)
    steps += [_flag(places, places.shard, peer) for peer in places.others(1)]
    for peer in places.others(1):
        steps.append(arrival(places, peer, seq))
        for part in parts:
            to = part.out + peer * part.stride
            steps += _copy(to, places.regions[peer] + part.slot, part.num_bytes)
    return steps + _end(places, seq)


def _begin(places: CopyPlaces, seq: int, signature: int) -> list[CopyStep]:
    return [_write(places.begun, seq), _write(places.word, seq), _write(places.word + WORD_BYTES, signature)]


def _copy(to: int, source: int, num_bytes: int) -> list[CopyStep]:
    return [CopyStep(StepKind.COPY, to, source, num_bytes)] if num_bytes else []


def _write(to: int, value: int) -> CopyStep:
    return CopyStep(StepKind.WRITE, to, 0, value)


def _flag(places: CopyPlaces, row: int, peer: int) -> CopyStep:
    to = places.regions[peer] + row + FLAG_BYTES * places.rank
    return CopyStep(StepKind.COPY, to, places.word, FLAG_BYTES)


def _wait(places: CopyPlaces, row: int, peer: int, seq: int) -> CopyStep:
    at = places.regions[places.rank] + row + FLAG_BYTES * peer
    return CopyStep(StepKind.WAIT, at, 0, seq)


def _end(places: CopyPlaces, seq: int) -> list[CopyStep]:
    shards = places.regions[places.rank] + places.shard
    seen = CopyStep(StepKind.COPY, places.seen, shards, FLAG_BYTES * len(places.active))
    return [seen, _write(places.ended, seq)]
