"""Routing: maps, replica choice, canonical order, offsets."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from ep_kernels.config import receive_rows
from ep_kernels.errors import ConfigError
from ep_kernels.routing import (
    ExpertMap,
    delivered,
    expert_rows,
    group_offsets,
    rank_rows,
    route,
)
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase, routing_cases
from tests.groups import LonelyGroup


def test_contiguous_gives_the_first_ranks_one_more() -> None:
    experts = ExpertMap.contiguous(10, 4)
    assert [experts.num_local_experts(r) for r in range(4)] == [3, 3, 2, 2]
    assert [experts.experts_of(r) for r in range(4)] == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]
    assert experts.stride == 3
    assert ExpertMap.contiguous(2, 3).experts_of(2) == ()


def test_replicas_from_lists() -> None:
    experts = ExpertMap.from_ranks([[0, 2], [1, 0]])
    assert experts.replicas == (((0, 0), (1, 1)), ((1, 0),), ((0, 1),))
    assert experts.num_experts == 3


@pytest.mark.parametrize(
    ("replicas", "ranks", "says"),
    [
        ((((0, 0),), ()), 1, "at least one copy of expert 1"),
        ((((0, 0),), ((0, 0),)), 1, "each once"),
        ((((0, 1),),), 1, "slots 0..0"),
        ((((2, 0),),), 2, "a rank in 0..1"),
        ((((-1, 0),),), 2, "a rank in 0..1"),
    ],
)
def test_bad_maps_are_refused(replicas: tuple[tuple[tuple[int, int], ...], ...], ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        ExpertMap(replicas, ranks)
    assert error.value.field == "expert_map"


def test_lists_with_a_hole_or_a_negative_are_refused() -> None:
    with pytest.raises(ConfigError, match="copy of expert 1"):
        ExpertMap.from_ranks([[0], [2]])
    with pytest.raises(ConfigError, match="experts >= 0"):
        ExpertMap.from_ranks([[0, -1]])


def test_tables_leave_out_inactive_ranks() -> None:
    experts = ExpertMap.from_ranks([[0, 2], [1, 0]])
    first, ranks, slots = experts.tables([True, False])
    assert first.tolist() == [0, 1, 1, 2]
    assert ranks.tolist() == [0, 0]
    assert slots.tolist() == [0, 1]


def test_replicas_share_the_tokens_evenly() -> None:
    experts = ExpertMap.from_ranks([[0], [0], [0]])
    for source in range(3):
        chosen = route(experts, torch.zeros(9, 1, dtype=torch.int32), source).rank[:, 0].tolist()
        assert chosen == [(source + t) % 3 for t in range(9)]
        assert Counter(chosen) == {0: 3, 1: 3, 2: 3}


def test_a_lost_rank_hands_over_to_replicas_and_flags_the_rest() -> None:
    experts = ExpertMap.from_ranks([[0], [1, 0]])
    ids = torch.tensor([[0, 1], [0, -1], [1, 7]])
    here = route(experts, ids, 0, [True, False])
    assert here.rank.tolist() == [[0, -1], [0, -1], [-1, -1]]
    assert here.valid.tolist() == [False, True, False]
    assert here.num_invalid_ids == 1


def test_no_copy_left_anywhere() -> None:
    gone = route(ExpertMap.from_ranks([[], [0]]), torch.tensor([[0]]), 0, [True, False])
    assert gone.rank.tolist() == [[-1]]
    assert not gone.valid.any()


def test_worked_example_of_the_docstring() -> None:
    experts = ExpertMap.contiguous(3, 2)
    routes = [route(experts, torch.empty(0, 2), 0), route(experts, torch.tensor([[2, 0], [-1, 1]]), 1)]
    assert routes[1].rank.tolist() == [[1, 0], [-1, 0]]
    assert routes[1].slot.tolist() == [[0, 0], [-1, 1]]
    rows = expert_rows(routes, 0, 2)
    assert (rows.source.tolist(), rows.token.tolist(), rows.k.tolist()) == ([1, 1], [0, 1], [1, 1])
    assert rows.group.tolist() == [0, 1]
    assert rank_rows(routes, 0).token.tolist() == [0, 1]


@settings(max_examples=150)
@given(routing_cases())
def test_rows_are_canonical_and_complete(case: RoutingCase) -> None:
    experts = case.expert_map
    ids = [case.topk_ids(r) for r in range(case.num_ranks)]
    routes = [route(experts, i, r) for r, i in enumerate(ids)]
    wanted: dict[int, list[tuple[int, int, int, int]]] = {r: [] for r in range(case.num_ranks)}
    pairs: dict[int, set[tuple[int, int]]] = {r: set() for r in range(case.num_ranks)}
    for s, mine in enumerate(ids):
        for t, row in enumerate(mine.tolist()):
            for k, e in enumerate(row):
                if 0 <= e < case.num_experts:
                    rank, slot = experts.replicas[e][(s + t) % len(experts.replicas[e])]
                    wanted[rank].append((slot, s, t, k))
                    pairs[rank].add((s, t))
        assert routes[s].valid.all()
        assert routes[s].num_invalid_ids == sum(e < -1 or e >= case.num_experts for row in mine.tolist() for e in row)
    for rank in range(case.num_ranks):
        num_local = experts.num_local_experts(rank)
        rows = expert_rows(routes, rank, num_local)
        got = list(zip(*(getattr(rows, n).tolist() for n in ("group", "source", "token", "k")), strict=True))
        assert got == sorted(wanted[rank])
        assert rows.counts.tolist() == [sum(w[0] == slot for w in wanted[rank]) for slot in range(num_local)]
        assert all(rows.index[i] == sum(g[0] == got[i][0] for g in got[:i]) for i in range(len(got)))
        flat = rank_rows(routes, rank)
        assert list(zip(flat.source.tolist(), flat.token.tolist(), strict=True)) == sorted(pairs[rank])


def test_group_offsets() -> None:
    counts = torch.tensor([3, 0, 8, 1])
    assert group_offsets(counts, 1).tolist() == [0, 3, 3, 11, 12]
    assert group_offsets(counts, 8).tolist() == [0, 8, 8, 16, 24]
    assert group_offsets(torch.tensor([], dtype=torch.long), 4).tolist() == [0]


@settings(max_examples=60)
@given(routing_cases())
def test_default_capacity_holds_whatever_arrives(case: RoutingCase) -> None:
    group = LonelyGroup(size=case.num_ranks)
    routes = [route(case.expert_map, case.topk_ids(r), r) for r in range(case.num_ranks)]
    grouped = case.config(group, mode=Mode.HT, layout=Layout.GROUPED, expert_alignment=8)
    flat = case.config(group, mode=Mode.HT)
    for rank in range(case.num_ranks):
        num_local = case.expert_map.num_local_experts(rank)
        need = group_offsets(expert_rows(routes, rank, num_local).counts, 8)[-1]
        assert receive_rows(grouped, num_local) >= need
        assert receive_rows(grouped, num_local) % 8 == 0
        assert receive_rows(flat, num_local) >= len(rank_rows(routes, rank).token)
        if case.kind != "repeated":
            slots = case.config(group)
            assert receive_rows(slots, num_local) >= max(expert_rows(routes, rank, num_local).counts, default=0)


def test_delivered_rows() -> None:
    from ep_kernels import reference

    case = RoutingCase(4, 2, 16, (3, 2), seed=5)
    for layout in Layout:
        config = case.config(LonelyGroup(size=2), mode=Mode.HT, layout=layout, exact_shapes=False)
        xs = [case.x(r, torch.bfloat16) for r in range(2)]
        outs, _ = reference.dispatch(
            config, xs, [case.topk_ids(r) for r in range(2)], [case.topk_weights(r) for r in range(2)]
        )
        for out in outs:
            assert int(delivered(out).sum()) == int(out.counts.sum())
