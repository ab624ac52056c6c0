"""Where experts lie: every table is whole, balanced, stable; beside the published heuristic, on zipf loads."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import eplb
from benchmarks.placement import CASES, Case, apart, drift, measure, zipf_load
from crossdock.control.placement.balancer import (
    balance,
    check,
    copies_of,
    first_table,
    imbalance,
    num_moved,
    rank_loads,
    resized,
)
from crossdock.control.placement.tables import Shape, Table


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[Shape, list[float], list[float]]:
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    slots = draw(st.integers(experts, experts * ranks))
    size = draw(st.integers(1, ranks))
    loads = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e9)), min_size=experts, max_size=experts)
    return Shape(experts, slots, tuple(rank // size for rank in range(ranks))), draw(loads), draw(loads)


@settings(suppress_health_check=[HealthCheck.too_slow])  # drawing is slow where the machine is busy
@given(_worlds(), st.integers(1, 3))
def test_every_table_is_whole(world: tuple[Shape, list[float], list[float]], min_copies: int) -> None:
    shape, load, later = world
    least = min(min_copies, shape.num_ranks, shape.num_slots // shape.num_experts)
    first = balance(load, shape, min_copies=min_copies)
    for table in (first, balance(later, shape, first, min_copies=min_copies)):
        check(table, shape)
        assert all(len(set(held)) == len(held) for held in table), "two copies on one rank help nobody"
        assert min(copies_of(table, shape.num_experts)) >= least
    check(first_table(shape, min_copies), shape)


def test_without_copies_the_first_table_is_blocks_in_rank_order() -> None:
    assert first_table(Shape(7, 7, (0, 0, 0))) == ((0, 1, 2), (3, 4), (5, 6))
    assert first_table(Shape(2, 2, (0, 0, 0))) == ((0,), (1,), ())


def test_hot_experts_get_the_copies() -> None:
    shape = Shape(4, 8, (0, 0, 1, 1))
    table = balance([90, 10, 10, 10], shape)
    assert copies_of(table, 4)[0] == 4
    load = [30, 30, 10, 10]
    table = balance(load, shape)
    assert copies_of(table, 4) == [3, 3, 1, 1]
    assert rank_loads(load, table) == pytest.approx([20, 20, 20, 20])


def test_copies_lie_in_different_domains() -> None:
    shape = Shape(16, 32, (0, 0, 1, 1))
    table = balance([1.0] * 16, shape, min_copies=2)
    assert set(copies_of(table, 16)) == {2}
    assert apart(table, shape) == 1


def test_what_is_balanced_stays() -> None:
    shape, rng = Shape(64, 72, (0,) * 8), random.Random(5)
    load = zipf_load(64, 1.0, rng)
    table = balance(load, shape)
    noise = [one * rng.uniform(0.995, 1.005) for one in load]
    assert balance(noise, shape, table) == table


def test_what_stays_on_a_rank_keeps_its_slot() -> None:
    shape, rng = Shape(64, 72, (0,) * 8), random.Random(6)
    load = zipf_load(64, 1.0, rng)
    before = balance(load, shape)
    after = balance(drift(load, rng), shape, before)
    assert after != before
    for old, new in zip(before, after, strict=True):
        assert all(old.index(expert) == new.index(expert) for expert in set(old) & set(new))


def test_a_hot_expert_is_worth_few_moves() -> None:
    shape = Shape(64, 72, (0,) * 8)
    before = balance([1.0] * 64, shape)
    load = [1.0] * 64
    load[17] = 12.0
    after = balance(load, shape, before)
    assert imbalance(load, before) > 1.5
    assert imbalance(load, after) < 1.1
    assert num_moved(before, after) <= 24


@pytest.mark.parametrize("case", CASES, ids=str)
def test_beside_the_published_heuristic(case: Case) -> None:
    row = measure(case, num_seeds=1)
    assert row.ours <= row.eplb + 1e-3
    assert row.ours <= row.greedy + 1e-3
    assert row.ours_domains <= row.ours + 1e-3
    assert row.ours_again <= row.eplb_again + 0.05
    assert row.ours_moved < row.eplb_moved


def test_the_baselines_are_what_they_say() -> None:
    shape = Shape(8, 12, (0, 0, 1, 1))
    load = [90.0, 40, 30, 20, 10, 5, 4, 1]
    global_table, in_groups = eplb.eplb(load, shape), eplb.eplb_hierarchical(load, shape, 4)
    for table in (eplb.greedy(load, shape), global_table, in_groups):
        check(table, shape)
    assert copies_of(global_table, 8) == [4, 2, 1, 1, 1, 1, 1, 1]
    homes = [{shape.domains[rank] for rank in range(4) if expert in in_groups[rank]} for expert in range(8)]
    assert all(homes[first] == homes[first + 1] and len(homes[first]) == 1 for first in range(0, 8, 2))


@pytest.mark.parametrize(
    ("table", "said"),
    [(((0, 1), (2,)), "slots by rank"), (((0, 1), (2, 2)), r"got it wrong for \[3\]")],
)
def test_tables_that_are_not_whole_are_refused(table: Table, said: str) -> None:
    shape = Shape(4, 4, (0, 0))
    with pytest.raises(ValueError, match=said):
        check(table, shape)
    with pytest.raises(ValueError, match=said):
        balance([1.0] * 4, shape, table)


def test_loads_and_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="num_slots"):
        Shape(4, 9, (0, 0))
    with pytest.raises(ValueError, match="domains"):
        Shape(4, 4, ())
    for load in ([1.0] * 3, [1.0, 1.0, 1.0, -1.0]):
        with pytest.raises(ValueError, match="load"):
            balance(load, Shape(4, 4, (0, 0)))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_worlds(), st.integers(1, 8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_group_of_another_size_loads_what_its_new_slots_hold(
    world: tuple[Shape, list[float], list[float]], size: int, min_copies: int, order: random.Random
) -> None:
    """Any ranks stay, under any numbers. A rank keeps as many experts as it has slots, and loads the rest. Only where
    the copies of an expert would meet on one rank, a few more are moved, at most as many as there are extra copies."""
    shape, load, later = world
    before = balance(load, shape, min_copies=min_copies)
    slots = min(shape.num_slots, shape.num_experts * size)
    after = Shape(shape.num_experts, slots, tuple(order.choices(range(size), k=size)))
    stay = order.sample(range(shape.num_ranks), min(size, shape.num_ranks))
    former = order.sample([*stay, *(None for _ in range(size - len(stay)))], size)
    rows = tuple(() if rank is None else before[rank] for rank in former)
    table = resized(later, after, rows, min_copies)
    check(table, after)
    least = sum(max(0, after.capacity(rank) - len(row)) for rank, row in enumerate(rows))
    moved = num_moved(rows, table)
    assert least <= moved <= least + slots - shape.num_experts
    if slots == shape.num_experts:
        assert moved == least, "one copy each: not one byte more than the slots that are new"


@pytest.mark.parametrize(("ranks", "size", "least"), [(4, 6, 84), (6, 3, 127), (8, 4, 128), (4, 5, 51)])
def test_bytes_of_a_resize_are_those_of_theory_and_the_load_stays_spread(ranks: int, size: int, least: int) -> None:
    """256 experts, one copy each: 4 -> 6 loads 2/6 of them, 6 -> 3 half, and each part has its share of hot ones."""
    load = zipf_load(256, 1.0, random.Random(7))
    before = balance(load, Shape(256, 256, (0,) * ranks))
    rows = tuple(before[rank] if rank < ranks else () for rank in range(size))
    table = resized(load, Shape(256, 256, (0,) * size), rows)
    assert num_moved(rows, table) == least
    assert imbalance(load, table) < 1.1 * max(imbalance(load, balance(load, Shape(256, 256, (0,) * size))), 1.0)
