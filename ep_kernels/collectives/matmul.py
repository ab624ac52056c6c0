"""Matmuls that overlap with a collective. Schedules only: the GEMMs are torch's.

On GPUs the current stream computes, and a second stream of the device runs what is summed meanwhile; on the CPU the
same calls run one after another. Chunks and shards are rows or columns of the product, never parts of its inner
dimension, so every product is the one that a whole matmul has, as far as the GEMM library gives a row, or a column, the
same bits in any batch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch

from ep_kernels.collectives.work import Work
from ep_kernels.errors import ArgumentError
from ep_kernels.transports.collective_base import PendingGather

_MAX_CHUNKS = 1024
BESIDE_SMS = 64
"""Multiprocessors of a sum beside a product, where the caller does not say. A product of 8192 x 8192 x 16384 and its
all-reduce, 4 chunks, two H100: 3737 us on 8, 3352 on 16, 3360 on 32, 3170 on 64."""
COLUMNS = 2048
"""Of bf16 weights with which the rows of a shard are multiplied for as long as the next shard takes to arrive, however
many rows and however wide: about 650 TFLOP/s over 343 GB/s, as on H100 and H200."""
HALF_ROWS = 1024
"""Fewest rows of half a shard that are a product of their own: with fewer, their tiles fill no GPU."""
COLUMN_PIECES = 4
"""Pieces of the rows whose columns are gathered: the product of one runs beside the gather of the next."""
LANES = 2
"""Streams on which products run in turn: the last tiles of one leave multiprocessors to the first of the next."""


def check_weights(x: object, weights: Sequence[object], parts: int = 1) -> None:
    """x [n, K / parts] and w [K, N] of its dtype and device. Raises ArgumentError."""
    if not isinstance(x, torch.Tensor) or x.ndim != 2:
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ArgumentError("x", "a tensor [n, K]", got)
    inner = parts * x.shape[1]
    for w in weights:
        if not isinstance(w, torch.Tensor) or w.ndim != 2 or w.shape[0] != inner:
            got = list(w.shape) if isinstance(w, torch.Tensor) else type(w).__name__
            raise ArgumentError("w", f"a tensor [{inner}, N]", got)
        if w.layout is not torch.strided:
            raise ArgumentError("w", "a dense tensor", w.layout)
        if w.dtype != x.dtype or w.device != x.device:
            raise ArgumentError("w", f"{x.dtype} on {x.device} as x", f"{w.dtype} on {w.device}")


def check_chunks(chunks: object) -> int:
    """A number of chunks. Raises ArgumentError."""
    if type(chunks) is not int or not 1 <= chunks <= _MAX_CHUNKS:
        raise ArgumentError("chunks", f"an int in 1..{_MAX_CHUNKS}", repr(chunks))
    return chunks


def is_last(dim: object) -> bool:
    """Whether that dimension of a matrix is the last one. Raises ArgumentError."""
    if type(dim) is not int or dim not in (0, 1, -1):
        raise ArgumentError("dim", "0, or 1 or -1, the last", repr(dim))
    return dim != 0


def group_sizes(num_shards: int, columns: int) -> list[int]:
    """How many shards each product takes, in the order of arrival: one, this rank's own first, until all have come, and
    half of them at least; then the others together. A matmul of few rows is slower; where the links are what takes
    long, each shard is multiplied as it comes.

    Example: 8 shards, 2560 columns, so a product takes as long as 1.25 arrivals: all have come when 6 are done.
    [1, 1, 1, 1, 1, 1, 2]
    """
    if columns < COLUMNS:
        return [1] * num_shards
    singles = max(math.ceil((num_shards - 1) * COLUMNS / columns), math.ceil(num_shards / 2))
    return [1] * singles + [num_shards - singles] * (singles < num_shards)


def sms_beside(asked: int | None, default: int | None, chunks: int) -> int | None:
    """Multiprocessors of a sum beside the product of another chunk: as the caller or the config says, else few."""
    return BESIDE_SMS if asked is None and default is None and chunks > 1 else asked


def half_bytes(x: torch.Tensor, size: int) -> int:
    """Bytes of the half of a shard x [n, K] that is announced before the other has arrived; 0: shards are not halved.
    Equal on all ranks: what a rank sends does not depend on the weights of another."""
    half = x.shape[0] // 2
    return half * x.shape[1] * x.itemsize if size == 2 and half >= HALF_ROWS else 0


def takes_halves(weights: Sequence[torch.Tensor]) -> bool:
    """Whether this rank multiplies a half that is announced before the other has arrived. Of two ranks one product
    waits for all that comes: where the links are what takes long, half of it need not."""
    return sum(w.shape[1] for w in weights) < COLUMNS


@torch.no_grad()
def follow(
    pending: PendingGather, gathered: torch.Tensor, weights: Sequence[torch.Tensor], size: int, active: Sequence[bool]
) -> list[torch.Tensor]:
    """`gathered @ w` for each w, by shards, or halves of them, in the order in which they arrive; those of inactive
    ranks last."""
    rows, parts = gathered.shape[0] // size, 2 if pending.halves else 1
    ys = [gathered.new_empty(gathered.shape[0], w.shape[1]) for w in weights]
    inactive = [parts * rank + i for rank, alive in enumerate(active) if not alive for i in range(parts)]
    columns = sum(w.shape[1] for w in weights) if gathered.is_cuda else 0
    sizes = group_sizes(parts * size - len(inactive), columns)
    groups = _grouped(itertools.chain(pending.shards(), [inactive]), sizes)
    with contextlib.closing(_lanes(gathered.device, LANES if gathered.is_cuda else 1)) as lanes:
        for _ in lanes:
            group = next(groups, None)  # waits on this lane
            if group is None:
                break
            runs = [(_row(first, rows, parts), _row(last, rows, parts)) for first, last in _runs(group)]
            for y, w in zip(ys, weights, strict=True):
                _multiply(gathered, w, y, runs)
    return ys


def _row(number: int, rows: int, parts: int) -> int:
    """The first row of a part of the shards, of `parts` parts of `rows` rows each."""
    return number // parts * rows + number % parts * (rows // parts)


def _multiply(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """Rows [first, last) of y for each run; two runs of one length, as where ranks wrap around, by one product."""
    if len(runs) == 2 and runs[0][1] - runs[0][0] == runs[1][1] - runs[1][0]:
        (first, last), (second, _) = runs
        both = [
            t.as_strided((2, last - first, t.shape[1]), ((second - first) * t.shape[1], t.shape[1], 1),
                         t.storage_offset() + first * t.shape[1])
            for t in (x, y)
        ]  # fmt: skip
        torch.bmm(both[0], w.expand(2, *w.shape), out=both[1])
        return
    for first, last in runs:
        torch.mm(x[first:last], w, out=y[first:last])


def _grouped(arrivals: Iterable[list[int]], sizes: Iterable[int]) -> Iterator[list[int]]:
    """Ranks in groups of those sizes or, where more come together, larger ones."""
    come: list[int] = []
    wanted = iter(sizes)
    size = next(wanted, 1)
    for together in arrivals:
        come += together
        if len(come) >= size:
            yield come
            come, size = [], next(wanted, 1)
    if come:
        yield come


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of ranks that lie side by side."""
    listed = sorted(ranks)
    starts = [i for i, rank in enumerate(listed) if i == 0 or listed[i - 1] != rank - 1]
    for start, end in zip(starts, [*starts[1:], len(listed)], strict=True):
        yield listed[start], listed[end - 1] + 1


class Factors:
    """Of a product x @ w whose sum is scattered: each rank gets some of its rows, or of its columns.

    Attributes:
        rows, columns: of what a rank gets.

    Args:
        x, w: [T, K], [K, N]; T or N is a multiple of `size`.
        last: ranks get columns.
    """

    def __init__(self, x: torch.Tensor, w: torch.Tensor, size: int, last: bool) -> None:
        self.x, self.w, self.size, self.last = x, w, size, last
        self.rows = x.shape[0] if last else x.shape[0] // size
        self.columns = w.shape[1] // size if last else w.shape[1]

    def multiply(self, rank: int, first: int, end: int, out: torch.Tensor) -> None:
        """Rows [first, end) of what a rank gets, into out [end - first, columns]."""
        if self.last:
            torch.mm(self.x[first:end], self.w[:, rank * self.columns : (rank + 1) * self.columns], out=out)
        else:
            torch.mm(self.x[rank * self.rows + first : rank * self.rows + end], self.w, out=out)

    def product(self, first: int, end: int) -> torch.Tensor:
        """[R, end - first, columns]: of every rank."""
        if not self.last and end - first == self.rows:
            return torch.mm(self.x, self.w).view(self.size, self.rows, self.columns)
        made = self.x.new_empty(self.size, end - first, self.columns)
        for rank in range(self.size):
            self.multiply(rank, first, end, made[rank])
        return made


@torch.no_grad()
def scattered(
    scatter: Callable[[torch.Tensor, torch.Tensor], Work[torch.Tensor]],
    factors: Factors,
    chunks: int,
    works: list[Work[torch.Tensor]],
) -> torch.Tensor:
    """reduce_scatter(x @ w). A chunk has some rows of what every rank gets, so that its sum is some rows of out.

    Args:
        scatter: begins a reduce_scatter of (rows [R * m, N], out [m, N]).
        works: empty; gets what was begun.
    """
    rows, out = factors.rows, factors.x.new_empty(factors.rows, factors.columns)
    if chunks == 1:
        works.append(scatter(factors.product(0, rows).flatten(0, 1), out))
        return works[0].wait()
    overlap = _Overlap(factors.x)
    for first, last in _cuts(rows, chunks):
        product = factors.product(first, last)
        with overlap.behind(product):
            works.append(scatter(product.flatten(0, 1), out[first:last]))
    overlap.join(works, out)
    return out


def column_pieces(num_bytes: int, least: int) -> int:
    """Pieces of a shard of so many bytes whose columns are gathered; `least`: fewest bytes that are worth one."""
    return max(1, min(COLUMN_PIECES, num_bytes // max(1, least)))


@torch.no_grad()
def follow_columns(
    gather: Callable[[torch.Tensor], Work[torch.Tensor]],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gathered: torch.Tensor,
    active: Sequence[bool],
    pieces: int,
    works: list[Work[torch.Tensor]],
) -> list[torch.Tensor]:
    """`gathered @ w` for each w, with gathered [n, R * k] made of the columns x [n, k] of every rank, those of inactive
    ranks apart. Shards come one behind the other, so each piece of rows is put in its place once it is there.

    Args:
        gather: begins an all_gather of rows [m, k].
        works: empty; gets what was begun.
    """
    size, ys = len(active), [x.new_empty(x.shape[0], w.shape[1]) for w in weights]
    by_rank, cuts = gathered.view(x.shape[0], size, x.shape[1]), list(_cuts(x.shape[0], pieces))
    for number, (first, last) in enumerate(cuts):
        for begin, end in cuts[len(works) : number + 2]:  # the next one is on its way while this one is multiplied
            works.append(gather(x[begin:end]))
        shards = works[number].wait().view(size, last - first, x.shape[1])
        for rank, alive in enumerate(active):
            if alive:
                by_rank[first:last, rank].copy_(shards[rank])
        for y, w in zip(ys, weights, strict=True):
            torch.mm(gathered[first:last], w, out=y[first:last])
    return ys


@torch.no_grad()
def reduced(
    reduce: Callable[[torch.Tensor], Work[torch.Tensor]],
    x: torch.Tensor,
    w: torch.Tensor,
    chunks: int,
    works: list[Work[torch.Tensor]],
) -> torch.Tensor:
    """all_reduce(x @ w), in place, chunk by chunk of the rows.

    Args:
        reduce: begins an all_reduce of rows [m, N] in place.
        works: empty; gets what was begun.
    """
    if chunks == 1:
        works.append(reduce(torch.mm(x, w)))
        return works[0].wait()
    out, overlap = x.new_empty(x.shape[0], w.shape[1]), _Overlap(x)
    for first, last in _cuts(x.shape[0], chunks):
        torch.mm(x[first:last], w, out=out[first:last])
        with overlap.behind(out):
            works.append(reduce(out[first:last]))
    overlap.join(works, out)
    return out


def _cuts(rows: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Chunks of equal size, the last shorter; one empty chunk of no rows."""
    step = max(1, -(-rows // chunks))
    for first in range(0, max(rows, 1), step):
        yield first, min(first + step, rows)


_kept_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _streams_beside(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """So many streams of a device, the same each time."""
    kept = _kept_streams.setdefault(device, [])
    while len(kept) < count:
        kept.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return kept[:count]


def _lanes(device: torch.device, count: int) -> Generator[None, None, None]:
    """Turn after turn another of `count` streams is the current one, at first the caller's: what is queued in one turn
    runs beside what others queue, and behind what the caller's stream had before; that goes on behind all of it. One
    stream, or none on the CPU: turns follow each other."""
    if count == 1:
        yield from itertools.repeat(None)
    own = torch.cuda.current_stream(device)
    others, used = _streams_beside(device, count - 1), list[torch.cuda.Stream]()
    begun = own.record_event()
    try:
        for turn in itertools.count():
            lane = own if turn % count == 0 else others[turn % count - 1]
            if lane is not own and lane not in used:
                lane.wait_event(begun)
                used.append(lane)
            with torch.cuda.stream(lane):
                yield
    finally:
        for lane in used:
            own.wait_stream(lane)


class _Overlap:
    """A stream beside the current one; nothing on the CPU."""

    def __init__(self, like: torch.Tensor) -> None:
        self._beside = _streams_beside(like.device, 1)[0] if like.device.type == "cuda" else None

    @contextlib.contextmanager
    def behind(self, made: torch.Tensor) -> Iterator[None]:
        """What runs here begins after what made that tensor, and beside what the current stream runs next."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(made.device))
        made.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            yield

    def join(self, works: Sequence[Work[torch.Tensor]], out: torch.Tensor) -> None:
        """The current stream goes on when all of them are done."""
        with self.behind(out):
            for work in works:
                work.wait()
        if self._beside is not None:
            torch.cuda.current_stream(out.device).wait_stream(self._beside)
