"""Matmuls whose products are summed with terms that copy engines bring: nothing but products and sums is on the
multiprocessors, and no sum waits while it holds them.

A piece has some rows of each rank. Its product is computed for the other ranks first, and is on its way to each while
the next ones are computed; this rank's own rows come when the terms of the others have had time to arrive:

    stream   product of piece 0 for others | 1 for others | 0, own | sum 0 | 2 for others | 1, own | sum 1 | ...
    copies     piece 0, rank by rank ---->    | piece 1 --->   | ...

An all-reduce goes on with each sum to the other ranks, two pieces at a time: staging has two slots, which pieces and
sums take in turn. Its last rows are summed by multiprocessors, which no product needs any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ep_kernels.collectives.matmul import Factors
from ep_kernels.collectives.work import Work
from ep_kernels.transports.collective_base import PendingCollective, SentTerms, TermCopies

TILES = (512, 128)
"""Rows of a product that the tiles of a GEMM divide, most first."""
PIECE_BYTES = 16 << 20
"""Fewest that a rank sends in a piece, to all others, but for a product that is smaller as a whole: of 4096 x 4096 x
1792 two pieces took 165 us and one 149, of twice the rows 237 and 250 (two H200)."""
OF_SEVERAL = 4
"""So many times PIECE_BYTES where there are several others, since rows leave rank by rank: on four H100 one piece took
475 us where two took 497 (16384 x 4096 x 1792), and as long from twice those bytes on."""
TAIL = 8
"""The last 1 / TAIL of the rows of an all-reduce is summed by multiprocessors: that takes as long as copy engines need
to move a piece there and back, and with fewer rows the last product would be too small."""


def piece_rows(rows: int, pieces: int, most: int) -> list[int]:
    """Lengths of about `pieces` pieces of `rows` rows, each at most `most`. All but the last are equal: multiples of
    a tile where a piece has that many rows.

    Example: 3584 rows in 4 pieces of at most 2048: [1024, 1024, 1024, 512].
    """
    step = max(1, -(-rows // pieces))
    step = min(most, next((-(-step // tile) * tile for tile in TILES if step >= tile), step))
    step = next((step // tile * tile for tile in TILES if step >= tile), step)
    return [min(step, rows - first) for first in range(0, rows, step)]


@torch.no_grad()
def scattered(terms: TermCopies, factors: Factors, rank: int, pieces: int, begun: list[object]) -> torch.Tensor:
    """reduce_scatter(x @ w): what this rank gets of it. `begun`: gets the operations."""
    rows, columns, x, size = factors.rows, factors.columns, factors.x, factors.size
    pieces = scattered_pieces(pieces, rows * columns * x.itemsize, size)
    out = x.new_empty(rows, columns)

    def finish(own: torch.Tensor, first: int, sent: SentTerms) -> None:
        last = first + own.shape[1]
        factors.multiply(rank, first, last, own[rank])
        terms.add(sent, own[rank], out[first:last])

    waiting: list[tuple[torch.Tensor, int, SentTerms]] = []
    for first, length in _places(piece_rows(rows, pieces, most_rows(terms, columns, x.dtype))):
        product = x.new_empty(size, length, columns)

        def multiply(peer: int, rows: torch.Tensor, first: int = first) -> None:
            factors.multiply(peer, first, first + len(rows), rows)

        sent = _send(terms, multiply, product, rank, begun)
        waiting.append((product, first, sent))
        if len(waiting) > 1:
            finish(*waiting.pop(0))
    for each in waiting:
        finish(*each)
    return out


@torch.no_grad()
def reduced(
    terms: TermCopies,
    reduce: Callable[[torch.Tensor], Work[torch.Tensor]],
    x: torch.Tensor,
    w: torch.Tensor,
    rank: int,
    size: int,
    pieces: int,
    begun: list[object],
) -> torch.Tensor:
    """all_reduce(x @ w): [T, N] of x [T, K] and w [K, N].

    Args:
        reduce: begins an all_reduce of rows [m, N] in place.
        begun: gets the operations.
    """
    out, works = x.new_empty(x.shape[0], w.shape[1]), list[PendingCollective]()
    lengths = reduced_pieces(x.shape[0], size, pieces, most_rows(terms, w.shape[1], x.dtype))
    at = 0
    for two in zip(lengths[::2], lengths[1::2], strict=True):
        sent = []
        for length in two:
            xs, rows = (each[at : at + size * length].view(size, length, each.shape[1]) for each in (x, out))

            def multiply(peer: int, out: torch.Tensor, xs: torch.Tensor = xs) -> None:
                torch.mm(xs[peer], w, out=out)

            sent.append((xs, rows, _send(terms, multiply, rows, rank, begun)))
            at += size * length
        for xs, rows, each in sent:
            torch.mm(xs[rank], w, out=rows[rank])
            terms.add(each, rows[rank], rows[rank], shares=True)
            works.append(terms.share(each, rows))
    if at < x.shape[0]:
        torch.mm(x[at:], w, out=out[at:])
        reduce(out[at:]).wait()
    for work in works:
        work.wait()
    return out


def scattered_pieces(pieces: int, num_bytes: int, size: int) -> int:
    """As many as the caller wants, where those that bring `num_bytes` to each of the others are not too small."""
    least = PIECE_BYTES * (OF_SEVERAL if size > 2 else 1)
    return max(1, min(pieces, (size - 1) * num_bytes // least))


def reduced_pieces(rows: int, size: int, pieces: int, most: int) -> list[int]:
    """Rows of each rank in the pieces of an all-reduce, an even number; the rows behind them are the last ones. Half as
    many pieces as the caller wants: on two H100 2 took 0.97 of the time of 4, for products lose less.

    Example: 8192 rows of 2 ranks in 4 pieces of at most 2048: [2048, 1536], and 1024 rows are left.
    """
    tile = next((tile for tile in TILES if rows >= TAIL * size * tile), 1)
    share = (rows - rows // TAIL) // size // tile * tile
    lengths = piece_rows(share, max(2, pieces // 4 * 2), most) if share else []
    return lengths[: len(lengths) // 2 * 2]


def most_rows(terms: TermCopies, columns: int, dtype: torch.dtype) -> int:
    """Rows of a rank that one piece may have."""
    return terms.row_bytes // max(1, columns * dtype.itemsize)


def _send(
    terms: TermCopies,
    multiply: Callable[[int, torch.Tensor], None],
    rows: torch.Tensor,
    rank: int,
    begun: list[object],
) -> SentTerms:
    """Begin to bring to each other rank p what `multiply` makes for it in rows[p] of [R, m, N]; `begun` gets the
    operation."""

    def made() -> Iterator[int]:
        begun.append(rows.shape)
        for step in range(1, len(rows)):  # all ranks send at once, no two to one
            peer = (rank + step) % len(rows)
            multiply(peer, rows[peer])
            yield peer

    return terms.send(rows, made())


def _places(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, length)."""
    first = 0
    for length in lengths:
        yield first, length
        first += length
