"""Which shards `all_gather_matmul` multiplies together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch

from ep_kernels.collectives import matmul


@pytest.mark.parametrize(
    ("num_shards", "columns", "sizes"),
    [
        (8, 0, [1] * 8),
        (8, 1792, [1] * 8),
        (8, 2560, [1, 1, 1, 1, 1, 1, 2]),
        (8, 3584, [1, 1, 1, 1, 4]),
        (8, 6656, [1, 1, 1, 1, 4]),
        (8, 1 << 20, [1, 1, 1, 1, 4]),
        (3, 6656, [1, 1, 1]),
        (2, 6656, [1, 1]),
        (1, 6656, [1]),
    ],
)
def test_as_many_as_have_come(num_shards: int, columns: int, sizes: list[int]) -> None:
    assert matmul.group_sizes(num_shards, columns) == sizes


def test_each_shard_is_in_one_group_and_never_waited_for_with_others() -> None:
    """A group of several has come by the time that the products before are done."""
    for num_shards, columns in itertools.product(range(1, 20), (100, 2000, 2500, 5000, 9999)):
        sizes = matmul.group_sizes(num_shards, columns)
        assert sum(sizes) == num_shards
        now, come = sizes[0] * columns / matmul.COLUMNS, 0
        for size in sizes[1:]:
            come += size
            assert size == 1 or come <= now, (num_shards, columns)
            now = max(now, come) + size * columns / matmul.COLUMNS


class Pending:
    """Shards in an order, some together; asserts that each product waits for its own alone."""

    def __init__(self, order: list[list[int]], halves: bool = False) -> None:
        self.order, self.num_given, self.halves = order, 0, halves

    def shards(self) -> Iterator[list[int]]:
        for together in self.order:
            self.num_given += 1
            yield together

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize(
    "order", [[[5], [4], [3], [2], [1], [0], [7], [6]], [[0, 1, 2, 3, 4, 5, 6, 7]], [[2], [0, 7, 1]]]
)
@pytest.mark.parametrize("columns", [0, 3584, 6656])
def test_every_row_is_multiplied_once(monkeypatch: pytest.MonkeyPatch, order: list[list[int]], columns: int) -> None:
    """Whatever the groups; rows of ranks that take no part, too."""
    sizes = matmul.group_sizes
    monkeypatch.setattr(matmul, "group_sizes", lambda num_shards, _: sizes(num_shards, columns))
    here = {rank for together in order for rank in together}
    x, w = torch.randn(8 * 3, 5), [torch.randn(5, 4), torch.randn(5, 2)]
    rows: list[int] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: (rows.append(len(a)), multiply(a, b, out=out)))
    twice = torch.bmm  # of two places at once
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: (rows.append(2 * a.shape[1]), twice(a, b, out=out)))
    ys = matmul.follow(Pending(order), x, w, 8, [rank in here for rank in range(8)])
    assert sum(rows) == 2 * len(x)
    for y, each in zip(ys, w, strict=True):
        torch.testing.assert_close(y, x @ each)


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("active", [(True, True), (False, True), (True, False)])
def test_every_half_is_multiplied_once(rows: int, active: tuple[bool, bool]) -> None:
    x, w = torch.randn(2 * rows, 5), [torch.randn(5, 4)]
    order = [[2 * rank, 2 * rank + 1] for rank in range(2) if active[rank]][:1]
    order += [[2 * rank + half] for rank in (1,) for half in range(2) if all(active)]
    pending = Pending(order, halves=True)
    torch.testing.assert_close(matmul.follow(pending, x, w, 2, active)[0], x @ w[0])
    assert pending.num_given == len(order)


def test_shards_are_halved_where_one_product_would_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "HALF_ROWS", 4)
    monkeypatch.setattr(matmul, "COLUMNS", 10)
    x = torch.empty(9, 3)
    assert matmul.half_bytes(x, 2) == 4 * 3 * 4
    assert matmul.half_bytes(x, 3) == 0, "two products follow each other"
    assert matmul.half_bytes(x[:7], 2) == 0, "too few rows"
    assert matmul.takes_halves([torch.empty(3, 5), torch.empty(3, 4)])
    assert not matmul.takes_halves([torch.empty(3, 5), torch.empty(3, 5)]), "the links wait for the product"


class Stream:
    """Writes down what it waits for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def record_event(self) -> str:
        return f"begin of {self.name}"

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


def test_turns_run_beside_each_other_and_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a turn fails."""
    said: list[str] = []
    own, other = Stream("own", said), Stream("other", said)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: own)
    monkeypatch.setattr(matmul, "_streams_beside", lambda _, count: [other][:count])
    current: list[str] = []

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    seen = []

    def turns(fails: bool) -> None:
        with contextlib.closing(matmul._lanes(torch.device("cuda", 0), 2)) as lanes:
            for _, number in zip(lanes, range(3), strict=False):
                seen.append(current[-1])
                assert not (fails and number == 1)

    turns(fails=False)
    assert seen == ["own", "other", "own"]
    assert said == ["other waits for begin of own", "own waits for other"]
    with pytest.raises(AssertionError):
        turns(fails=True)
    assert said[2:] == said[:2]
