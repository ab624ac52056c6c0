"""Matmuls whose terms copy engines bring, over the copies of `test_nvlink_copies`: ranks are threads, the stream of
each is its thread, and the kernel that adds is the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives import copied_sums
from ep_kernels.collectives.choose import copies_terms, sums_whole
from ep_kernels.collectives.collective_types import CollectiveCapabilities
from ep_kernels.collectives.matmul import Factors
from ep_kernels.collectives.work import Work, in_step
from ep_kernels.errors import ArgumentError, PeerTimeout, TransportError
from ep_kernels.transports.nvlink.copy_engines.collective_copies import NvlinkTerms
from tests.cases import draw_seed
from tests.collectives.faults import failing
from tests.emulator.machine import without_driver
from tests.unit.test_nvlink_copies import SLOT_BYTES, SLOTS, Ranks

COLUMNS, INNER = 24, 16


class Rank:
    """What `NvlinkTerms` needs of a transport, of its engine and of a launch."""

    epoch = 0

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.copies, self.group = ranks, ranks.engines[rank], SimpleNamespace(rank=rank)
        self.map = SimpleNamespace(reduce_row=SLOT_BYTES // ranks.size // 256 * 256)
        self.terms = NvlinkTerms(self, self, self.copies, lambda: 0, lambda call: call(), self.check)  # type: ignore

    def copy_slot(self, seq: int) -> int:
        return SLOTS + seq % 2 * SLOT_BYTES

    def add_terms(self, own: torch.Tensor, out: torch.Tensor, slot: int, shares: bool) -> Callable[[], None]:
        places = [slot + other * self.map.reduce_row for other in range(self.ranks.size)]
        region = self.ranks.regions[self.group.rank]

        def row(place: int) -> torch.Tensor:
            found: torch.Tensor = region[place : place + own.nbytes].view(own.dtype).view(own.shape)
            return found

        def add() -> None:
            rows = [own if other == self.group.rank else row(place) for other, place in enumerate(places)]
            out.copy_(reference.all_reduce(rows)[0])  # type: ignore[arg-type]
            if shares:
                row(places[self.group.rank]).copy_(out)

        return add

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """That the tensor is here."""
        if tensor.dtype is torch.float64:
            raise ArgumentError(name, "a tensor that is here", "another")

    def await_end(self, seq: int) -> None:
        deadline = time.monotonic() + 20.0
        while not self.copies.has_ended(seq):
            assert time.monotonic() < deadline, f"operation {seq} has not ended"
            time.sleep(1e-4)

    def raise_fault(self) -> None:
        if (fault := self.ranks.hosts[self.group.rank].fault()) is not None:
            raise fault


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    without_driver(monkeypatch)
    monkeypatch.setattr(copied_sums, "PIECE_BYTES", 1)
    found: list[Ranks] = []

    def make(size: int, timeout_s: float = 60.0) -> Ranks:
        found.append(Ranks(size, timeout_s))
        return found[-1]

    yield make
    for each in found:
        each.close()


def drawn(size: int, rows: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x and w of every rank, whose products are exact, so that no GEMM may round them otherwise."""
    generator = torch.Generator().manual_seed(draw_seed())

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    return [whole(rows, INNER) for _ in range(size)], [whole(INNER, COLUMNS) for _ in range(size)]


def by_all(call: Callable[[Rank], Any], ranks: Ranks) -> list[Any]:
    with ThreadPoolExecutor(ranks.size) as pool:
        return list(pool.map(call, [Rank(ranks, rank) for rank in range(ranks.size)]))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
def test_reduce_scatter(made: Callable[..., Ranks], size: int, dtype: torch.dtype, last: bool) -> None:
    """Several in turn over the same slots, in as many pieces as are asked for, or as staging wants; of rows or, where
    ranks divide them, of columns."""
    ranks = made(size)
    for rows, pieces in ((1, 1), (7, 2), (40, 1), (33, 5)):
        xs, ws = drawn(size, size * rows, dtype)
        ws = [w[:, : COLUMNS // size * size].contiguous() for w in ws]

        def call(one: Rank, xs: Any = xs, ws: Any = ws, pieces: int = pieces) -> torch.Tensor:
            rank = one.group.rank
            return copied_sums.scattered(one.terms, Factors(xs[rank], ws[rank], size, last), rank, pieces, [])

        total = reference.all_reduce([x @ w for x, w in zip(xs, ws, strict=True)])[0]
        assert total is not None
        for out, want in zip(by_all(call, ranks), total.chunk(size, dim=int(last)), strict=True):
            assert torch.equal(out, want), (rows, pieces)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_reduce(made: Callable[..., Ranks], size: int) -> None:
    """The last rows are summed by the caller's own all_reduce; others than that are not."""
    ranks = made(size)
    for rows, pieces in ((3, 1), (64, 4), (200, 2), (90, 7)):
        xs, ws = drawn(size, rows, torch.float32)
        products = [x @ w for x, w in zip(xs, ws, strict=True)]
        want, last = reference.all_reduce(products)[0], list[int]()

        def call(
            one: Rank, xs: Any = xs, ws: Any = ws, want: Any = want, last: Any = last, pieces: int = pieces
        ) -> torch.Tensor:
            rank = one.group.rank

            def reduce(tail: torch.Tensor) -> Work[torch.Tensor]:
                last.append(len(tail))
                tail.copy_(want[len(want) - len(tail) :])
                return Work(tail, SimpleNamespace(is_completed=lambda: True), lambda _: None)

            return copied_sums.reduced(one.terms, reduce, xs[rank], ws[rank], rank, size, pieces, [])

        assert all(torch.equal(out, want) for out in by_all(call, ranks)), (rows, pieces)  # type: ignore[arg-type]
        most = copied_sums.most_rows(Rank(ranks, 0).terms, COLUMNS, torch.float32)
        copied = size * sum(copied_sums.reduced_pieces(rows, size, pieces, most))
        assert last == ([rows - copied] * size if rows > copied else [])
        assert rows < 4 * size or copied >= rows // 2


def test_a_rank_that_sends_nothing_is_named(made: Callable[..., Ranks]) -> None:
    ranks = made(2, 0.05)
    alone, (xs, ws) = Rank(ranks, 0), drawn(2, 8, torch.float32)
    copied_sums.scattered(alone.terms, Factors(xs[0], ws[0], 2, False), 0, 1, [])
    with pytest.raises(PeerTimeout, match="rank 1") as found:
        alone.raise_fault()
    assert (found.value.op, found.value.phase) == ("reduce_scatter", "credit")


def test_what_was_begun_is_told(made: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, where the terms lie on another device; two pieces, where memory is used up in the second."""
    ranks, begun = made(2), list[object]()
    alone, (xs, ws) = Rank(ranks, 0), drawn(2, 16, torch.float64)
    with pytest.raises(ArgumentError, match="x: expected a tensor that is here"):
        copied_sums.scattered(alone.terms, Factors(xs[0], ws[0], 2, False), 0, 2, begun)
    assert (begun, alone.copies.seq) == ([], 0)
    monkeypatch.setattr(torch, "mm", failing(torch.mm, 1))
    broken = list[TransportError]()
    with pytest.raises(MemoryError), in_step(begun, broken.append):
        copied_sums.scattered(alone.terms, Factors(xs[0].float(), ws[0].float(), 2, False), 0, 2, begun)
    assert (len(begun), alone.copies.seq) == (2, 2)
    assert [str(each) for each in broken] == ["a call ended between its operations: MemoryError: no more"]


@pytest.mark.parametrize(
    ("rows", "pieces", "most", "lengths"),
    [
        (3584, 4, 2048, [1024, 1024, 1024, 512]),
        (8192, 2, 700, [512] * 16),
        (300, 2, 4096, [256, 44]),
        (300, 1, 100, [100, 100, 100]),
        (5, 8, 4, [1] * 5),
        (2048, 2, 1024, [1024, 1024]),
    ],
)
def test_rows_of_pieces(rows: int, pieces: int, most: int, lengths: list[int]) -> None:
    assert copied_sums.piece_rows(rows, pieces, most) == lengths


def test_few_bytes_are_one_piece() -> None:
    least = copied_sums.PIECE_BYTES
    of_two = [copied_sums.scattered_pieces(3, n, 2) for n in (0, least, 2 * least - 1, 2 * least, 9 * least)]
    of_four = [copied_sums.scattered_pieces(3, n, 4) for n in (0, 2 * least, 4 * least)]
    assert (of_two, of_four) == ([1, 1, 1, 2, 3], [1, 1, 3])


def test_rows_of_pieces_of_an_all_reduce() -> None:
    assert copied_sums.reduced_pieces(8192, 2, 4, 2048) == [2048, 1536]
    assert copied_sums.reduced_pieces(8192, 2, 8, 2048) == [1024, 1024, 1024, 512]
    assert copied_sums.reduced_pieces(8, 2, 4, 100) == [2, 1]
    for rows in range(200):
        for size, pieces, most in ((2, 1, 3), (3, 4, 100), (8, 2, 5)):
            lengths = copied_sums.reduced_pieces(rows, size, pieces, most)
            assert len(lengths) % 2 == 0
            assert size * sum(lengths) <= rows
            assert all(0 < length <= most for length in lengths)


def test_when_copy_engines_bring_terms() -> None:
    can = CollectiveCapabilities("cuda", False, True, "", {}, term_min_bytes=100)
    assert copies_terms(200, 2, None, can)
    assert copies_terms(200, 2, 0, can)
    assert not copies_terms(199, 2, None, can), "too small"
    assert not copies_terms(200, 2, 8, can), "the caller names multiprocessors"
    assert not copies_terms(200, 1, None, can), "nobody else"
    assert not copies_terms(200, 2, None, CollectiveCapabilities("cpu", False, False, "", {})), "it has none"


def test_when_a_product_is_summed_as_a_whole() -> None:
    can = CollectiveCapabilities("cuda", False, True, "", {}, term_min_bytes=100)
    assert sums_whole(199, 2, None, can)
    assert sums_whole(0, 1, 0, can)
    assert not sums_whole(200, 2, None, can), "copy engines bring its terms"
    assert not sums_whole(199, 2, 8, can), "the caller names multiprocessors"
    assert not sums_whole(1, 2, None, CollectiveCapabilities("cpu", False, False, "", {})), "it has none"
