"""What a stream does for an all-gather by copy engines: pure lists of copies, waits and writes.

Push (outs registered), rank r of R, operation `seq`:

    word = seq, signature; READY[r] of r + 1, r + 2, ... <- word "my outs are free"
    begun = seq                                         for this rank's host: its stream may have to wait
    for p in r + 1, r + 2, ...:  wait READY[p]; out of p, shard r <- x, part by part; SHARD[r] of p <- word
    for p in r - 1, r - 2, ...:  wait SHARD[p]
    the operation is over; seen <- SHARD; ended = seq

All ranks send to the next rank at once, so no two send to one. A flag travels as a copy behind its shard, on one
stream: a stream's write to a peer's memory is not supported by newer drivers. Waits and writes are of local memory.

A push costs the host more than a small one's bytes cost the links: a copy is a call of the driver of 5 us. So where a
push repeats, its copies are two graphs, of flags and of shards with their flags, each launched in 2 us, and the waits
between them stand side by side, which makes them one call:

    word; launch READY[r] of all p <- word
    begun, wait READY[p] of all p; launch for all p: out of p, shard r <- x; SHARD[r] of p <- word
    wait SHARD[p] of all p; ...

Where a product may follow a shard by halves, HALF[r] of p <- word stands behind the first half, whether p waits for it
or not.

With a stride of x each peer gets another shard: terms of a sum, into its slot. A push may be put on the stream in
parts, peer by peer, as its shards are made.

Pull (outs anywhere): the shard lies in the slot of `copies` that the parity of seq names. SHARD is sent first; then,
for p in r + 1, r + 2, ...: wait SHARD[p]; out, shard p <- slot of p. Two slots suffice: kernels/collective_abi.py says
why.

In a CUDA graph a pull whose waits are those of kernels/collectives/copy_wait.cuh, from registered outs where x is in
place, so nothing is staged.

A flag is 16 bytes: seq, which is waited for, and the operation's signature (0: not known), which hosts compare when the
operation has ended. Marks are events, from which copy_times.py makes latency records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FLAG_BYTES, WORD_BYTES = 16, 8
SEEN_SLOTS = 64
"""Operations whose flags the host can still look at when they have ended."""
SMALL_BYTES = 1 << 20
"""Most bytes of a shard whose sending is not marked, and whose arrivals are not marked and waited for one by one, which
would cost the host more than is gained: seven such shards take the links 20 us."""


COPY, WAIT, WRITE, MARK, GRAPH = range(5)
"""Kinds of steps, as in native/launch.cpp."""

StreamOp = tuple[int, int, int, int]
"""(kind, to, source, amount). COPY: `amount` bytes from `source` to `to`. WAIT: until the word at `to` is `amount` or
more. WRITE: `amount` into the word at `to`. MARK: the event `to`. GRAPH: all of the executable graph `to`. Plain
tuples: a call makes dozens."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A part of an all-gather.

    Attributes:
        x: address of this rank's shard.
        out: push: of `out` from the base of every rank's region; pull: its address here.
        slot: pull: where the shard lies, from the base of every rank's region.
        num_bytes: of the shard that move.
        stride: bytes from one shard of `out` to the next.
        slot_stride: pull: bytes from one shard to the next, from `slot` on.
        x_stride: push: bytes from what one rank gets to what the next gets, from `x` on; 0: all get the same.
        half: push of one part: bytes that have a flag of their own; 0: none.
    """

    x: int
    out: int
    slot: int
    num_bytes: int
    stride: int
    slot_stride: int = 0
    x_stride: int = 0
    half: int = 0


@dataclass(frozen=True, slots=True)
class CopyPlaces:
    """Addresses that the steps use.

    Attributes:
        rank: this rank.
        active: [R], who takes part.
        regions: [R], base of every rank's region as mapped here.
        ready, shard, half: of the rows of flags, from the base of a region.
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
    half: int = 0

    def others(self, step: int) -> list[int]:
        """Active peers in the order rank + step, rank + 2 * step, ..."""
        size = len(self.active)
        order = ((self.rank + i * step) % size for i in range(1, size))
        return [peer for peer in order if self.active[peer]]


def arrival(places: CopyPlaces, peer: int, seq: int, half: bool = False) -> StreamOp:
    """Wait for a peer's shard, or the first half of it (push), or for its slot (pull)."""
    row = places.half if half else places.shard
    return WAIT, places.regions[places.rank] + row + FLAG_BYTES * peer, 0, seq


@dataclass(frozen=True, slots=True)
class CopyMarks:
    """Events that the stream passes; 0: none.

    Attributes:
        end: when all is there.
        sent: behind this rank's last copy to a peer.
        arrived: by peer, behind the wait for its shard.
    """

    end: int = 0
    sent: int = 0
    arrived: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(events: Sequence[int], arrivals: Sequence[int]) -> CopyMarks:
        """The events of an operation: end and, where peers are distinguished, sent and one for each of `arrivals`."""
        sent = events[1] if arrivals else 0
        return CopyMarks(events[0], sent, dict(zip(arrivals, events[2:], strict=False)))

    def listed(self) -> list[int]:
        """The events, as `of` takes them."""
        return [event for event in (self.end, self.sent, *self.arrived.values()) if event]


NO_MARKS = CopyMarks()


def is_small(parts: Sequence[CopyPart]) -> bool:
    """Whether the shards of a push are not told apart."""
    return sum(part.num_bytes for part in parts) <= SMALL_BYTES


def marked(places: CopyPlaces, parts: Sequence[CopyPart]) -> tuple[int, ...]:
    """Peers whose shards have a mark each in a push."""
    return () if is_small(parts) else tuple(places.others(-1))


def push(
    places: CopyPlaces, seq: int, signature: int, parts: Sequence[CopyPart], marks: CopyMarks = NO_MARKS
) -> list[StreamOp]:
    """The steps of operation `seq`, in order."""
    steps = push_begin(places, seq, signature)
    for peer in places.others(1):
        steps += push_to(places, peer, seq, parts)
    return steps + push_end(places, seq, marks)


def push_begin(places: CopyPlaces, seq: int, signature: int) -> list[StreamOp]:
    """The steps before any shard is sent."""
    return [*_word(places, seq, signature), *ready_flags(places), _begun(places, seq)]


def push_to(places: CopyPlaces, peer: int, seq: int, parts: Sequence[CopyPart]) -> list[StreamOp]:
    """The steps that send this rank's shard to a peer."""
    return [_permission(places, peer, seq), *_shard(places, peer, parts)]


def push_end(places: CopyPlaces, seq: int, marks: CopyMarks = NO_MARKS) -> list[StreamOp]:
    """The steps behind the last shard."""
    return _arrivals(places, seq, marks) + _end(places, seq, marks)


def push_by_graphs(
    places: CopyPlaces, seq: int, signature: int, ready: int, shards: int, marks: CopyMarks = NO_MARKS
) -> list[StreamOp]:
    """The steps of a push by graphs of `ready_flags` and of `all_shards`."""
    steps = [*_word(places, seq, signature), (GRAPH, ready, 0, 0), _begun(places, seq)]
    steps += [_permission(places, peer, seq) for peer in places.others(1)]
    steps.append((GRAPH, shards, 0, 0))
    return steps + _arrivals(places, seq, marks) + _end(places, seq, marks)


def ready_flags(places: CopyPlaces) -> list[StreamOp]:
    """To every peer: this rank's outs may be written."""
    return [_flag(places, peer, places.ready) for peer in places.others(1)]


def all_shards(places: CopyPlaces, parts: Sequence[CopyPart]) -> list[StreamOp]:
    """To every peer: this rank's shard, and its flag behind it."""
    return [step for peer in places.others(1) for step in _shard(places, peer, parts)]


def pull(
    places: CopyPlaces, seq: int, signature: int, parts: Sequence[CopyPart], marks: CopyMarks = NO_MARKS
) -> list[StreamOp]:
    """The steps of operation `seq`, in order, once the shard lies in the slot."""
    after = places.others(1)
    steps = _word(places, seq, signature)
    steps += [_flag(places, peer, places.shard) for peer in after]
    steps += [*_mark(marks.sent), _begun(places, seq)]
    for peer in after:
        steps += [arrival(places, peer, seq), *_mark(marks.arrived.get(peer, 0)), *_pulled(places, peer, parts)]
    return steps + _end(places, seq, marks)


def graph_copies(places: CopyPlaces, parts: Sequence[CopyPart]) -> list[StreamOp]:
    """The copies of a pull in a CUDA graph, between the two launches of kernels/collectives/copy_wait.cuh."""
    return [step for peer in places.others(1) for step in _pulled(places, peer, parts)]


def _pulled(places: CopyPlaces, peer: int, parts: Sequence[CopyPart]) -> list[StreamOp]:
    region = places.regions[peer]
    return [
        (COPY, part.out + peer * part.stride, region + part.slot + peer * part.slot_stride, part.num_bytes)
        for part in parts
        if part.num_bytes
    ]


def _permission(places: CopyPlaces, peer: int, seq: int) -> StreamOp:
    return WAIT, places.regions[places.rank] + places.ready + FLAG_BYTES * peer, 0, seq


def _shard(places: CopyPlaces, peer: int, parts: Sequence[CopyPart]) -> list[StreamOp]:
    region, steps = places.regions[peer], list[StreamOp]()
    for part in parts:
        to, source = region + part.out + places.rank * part.stride, part.x + peer * part.x_stride
        if part.half:
            steps += [(COPY, to, source, part.half), _flag(places, peer, places.half)]
        if part.num_bytes > part.half:
            steps.append((COPY, to + part.half, source + part.half, part.num_bytes - part.half))
    return [*steps, _flag(places, peer, places.shard)]


def _flag(places: CopyPlaces, peer: int, row: int) -> StreamOp:
    return COPY, places.regions[peer] + row + FLAG_BYTES * places.rank, places.word, FLAG_BYTES


def _arrivals(places: CopyPlaces, seq: int, marks: CopyMarks) -> list[StreamOp]:
    steps = _mark(marks.sent)
    for peer in places.others(-1):
        steps += [arrival(places, peer, seq), *_mark(marks.arrived.get(peer, 0))]
    return steps


def _mark(event: int) -> list[StreamOp]:
    return [(MARK, event, 0, 0)] if event else []


def _word(places: CopyPlaces, seq: int, signature: int) -> list[StreamOp]:
    return [(WRITE, places.word, 0, seq), (WRITE, places.word + WORD_BYTES, 0, signature)]


def _begun(places: CopyPlaces, seq: int) -> StreamOp:
    return WRITE, places.begun, 0, seq


def _end(places: CopyPlaces, seq: int, marks: CopyMarks) -> list[StreamOp]:
    num_bytes = FLAG_BYTES * len(places.active)
    seen, shards = places.seen + seq % SEEN_SLOTS * num_bytes, places.regions[places.rank] + places.shard
    return [*_mark(marks.end), (COPY, seen, shards, num_bytes), (WRITE, places.ended, 0, seq)]
