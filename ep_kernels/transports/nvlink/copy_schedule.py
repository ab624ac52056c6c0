"""What a stream does for an all-gather by copy engines: pure lists of copies, waits and writes.

Push (outs registered), rank r of R, operation `seq`:

    begun = seq                                         this rank's host hears that its stream has come here
    word = value; READY[r] of r + 1, r + 2, ... <- word "my outs are free", 8 bytes each
    for p in r + 1, r + 2, ...:  wait READY[p]; out of p, shard r <- x, part by part; SHARD[r] of p <- word
    for p in r - 1, r - 2, ...:  wait SHARD[p]
    seen <- SHARD; ended = seq

All ranks send to the next rank at once, so no two send to one. A flag travels as a copy behind its shard, on one
stream: a stream's write to a peer's memory is not supported by newer drivers. Waits and writes are of local memory.

Pull (outs anywhere): the shard lies in the slot of `copies` that the parity of seq names. SHARD is sent first; then,
for p in r + 1, r + 2, ...: wait SHARD[p]; out, shard p <- slot of p. Two slots suffice: kernels/collective_abi.py says
why.

A flag's value is seq << 16 | 16 bits of the operation's signature; waits are for `seq << 16` or more.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SIGNATURE_BITS = 16
WORD_BYTES = 8


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
        word: a word of this rank's device memory.
        begun, ended: words of pinned host memory.
        seen: [R] words of pinned host memory, for this operation.
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


def value_of(seq: int, signature: int) -> int:
    """Of an operation's flags."""
    return seq << SIGNATURE_BITS | zlib.crc32(signature.to_bytes(8, "little")) & (1 << SIGNATURE_BITS) - 1


def awaited(seq: int) -> int:
    """The least value of a flag of operation `seq`."""
    return seq << SIGNATURE_BITS


def arrival(places: CopyPlaces, peer: int, seq: int) -> CopyStep:
    """Wait for a peer's shard (push), or for its slot (pull)."""
    return _wait(places, places.shard, peer, seq)


def push(places: CopyPlaces, seq: int, value: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The steps of operation `seq`, in order."""
    steps = [_write(places.begun, seq), _write(places.word, value)]
    steps += [_flag(places, places.ready, peer) for peer in places.others(1)]
    for peer in places.others(1):
        steps.append(_wait(places, places.ready, peer, seq))
        for part in parts:
            to = places.regions[peer] + part.out + places.rank * part.stride
            steps += _copy(to, part.x, part.num_bytes)
        steps.append(_flag(places, places.shard, peer))
    steps += [arrival(places, peer, seq) for peer in places.others(-1)]
    return steps + _end(places, seq)


def pull(places: CopyPlaces, seq: int, value: int, parts: Sequence[CopyPart]) -> list[CopyStep]:
    """The steps of operation `seq`, in order, once the shard lies in the slot."""
    steps = [_write(places.begun, seq), _write(places.word, value)]
    steps += [_flag(places, places.shard, peer) for peer in places.others(1)]
    for peer in places.others(1):
        steps.append(arrival(places, peer, seq))
        for part in parts:
            to = part.out + peer * part.stride
            steps += _copy(to, places.regions[peer] + part.slot, part.num_bytes)
    return steps + _end(places, seq)


def _copy(to: int, source: int, num_bytes: int) -> list[CopyStep]:
    return [CopyStep(StepKind.COPY, to, source, num_bytes)] if num_bytes else []


def _write(to: int, value: int) -> CopyStep:
    return CopyStep(StepKind.WRITE, to, 0, value)


def _flag(places: CopyPlaces, row: int, peer: int) -> CopyStep:
    to = places.regions[peer] + row + WORD_BYTES * places.rank
    return CopyStep(StepKind.COPY, to, places.word, WORD_BYTES)


def _wait(places: CopyPlaces, row: int, peer: int, seq: int) -> CopyStep:
    at = places.regions[places.rank] + row + WORD_BYTES * peer
    return CopyStep(StepKind.WAIT, at, 0, awaited(seq))


def _end(places: CopyPlaces, seq: int) -> list[CopyStep]:
    shards = places.regions[places.rank] + places.shard
    seen = CopyStep(StepKind.COPY, places.seen, shards, WORD_BYTES * len(places.active))
    return [seen, _write(places.ended, seq)]
