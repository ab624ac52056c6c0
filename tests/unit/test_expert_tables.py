"""Experts on the move within one rank, and several ranks in step: what is switched when, and what never is."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.experts.expert_mlps import ExpertMLPs, HeldLayer
from crossdock.worker.experts.expert_tables import ExpertTables, LoadTask, MoveCancelled
from crossdock.worker.experts.placement import FROM_CONFIG, Placement, PlacementError, SlotMap
from tests.unit.moe_files import Sizes, draw_weights, write_files

E, R, P = 4, 2, 6
LAYERS = (1, 3)
FIRST = Placement(1, R, dict.fromkeys(LAYERS, (0, 1, 2, 2, 3, 0)))
SECOND = Placement(2, R, {1: (0, 1, 3, 2, 3, 0), 3: (1, 1, 2, 2, 3, 0)})
THIRD = Placement(3, R, {1: (0, 1, 3, 2, 3, 0), 3: (0, 1, 2, 2, 3, 0)})


def tables(tables: ExpertTables) -> list[tuple[int, ...]]:
    return [tables.held(layer) for layer in LAYERS]


def exchange(*ranks: ExpertTables) -> None:
    """What all of them do before a step."""
    words, loaded = zip(*[rank.progress() for rank in ranks], strict=True)
    for rank in ranks:
        rank.apply_agreed(words, loaded)


@pytest.fixture
def ranks() -> list[ExpertTables]:
    return [ExpertTables(FIRST, E, rank, None) for rank in range(R)]


def test_slots_of_tokens_take_the_copies_in_turn() -> None:
    route = SlotMap((0, 1, 2, 2, 3, 0), E)
    ids = torch.tensor([[0, 2], [0, 2], [-1, 3]], dtype=torch.int32)
    assert route.slots(ids, 0).tolist() == [[0, 2], [5, 3], [-1, 4]]
    assert route.slots(ids, 1).tolist() == [[5, 3], [0, 2], [-1, 4]]
    assert route.slots(ids, 0).dtype is torch.int32
    plain = SlotMap((0, 1, 2, 3), E)
    assert plain.slots(ids, 1) is ids
    assert SlotMap((3, 2, 1, 0), E).slots(ids, 1).tolist() == [[3, 1], [3, 1], [-1, 0]]


@pytest.mark.parametrize("live", [(False, True, True, True), (False, False, True, True), (False,) * 4])
def test_no_expert_is_none_whichever_experts_are_lost(live: tuple[bool, ...]) -> None:
    """-1 is looked up like expert 0, which need not be there."""
    route = SlotMap((0, 1, 2, 3), E, live)
    ids = torch.tensor([[-1, -1], [-1, 3]] if live[3] else [[-1, -1]], dtype=torch.int32)
    assert 0 in route.lost
    assert not route.lost_in(ids)
    assert route.slots(ids, 1).tolist() == ids.tolist()


def test_a_layer_is_switched_when_all_have_loaded_it(ranks: list[ExpertTables]) -> None:
    for rank in ranks:
        rank.set_target(SECOND)
        assert rank.has_pending_change()
    exchange(*ranks)
    first = [rank.next_task() for rank in ranks]
    assert first == [LoadTask(2, 1, (0, 1, 3)), LoadTask(2, 1, (2, 3, 0))]
    ranks[0].stage(first[0], None)
    exchange(*ranks)
    assert tables(ranks[0]) == [(0, 1, 2), (0, 1, 2)], "the other rank has not loaded it"
    ranks[1].stage(first[1], None)
    exchange(*ranks)
    assert [tables(rank) for rank in ranks] == [[(0, 1, 3), (0, 1, 2)], [(2, 3, 0), (2, 3, 0)]]
    for rank in ranks:
        rank.stage(rank.next_task(), None)
    exchange(*ranks)
    assert tables(ranks[0]) == [(0, 1, 3), (1, 1, 2)]
    assert not ranks[0].has_pending_change()
    report = ranks[0].report()
    assert (report.version, report.switched, report.to_switch, report.error) == (2, 2, 2, "")
    assert [list(layer.experts) for layer in report.layers] == [[0, 1, 3], [1, 1, 2]]


def test_who_cannot_load_keeps_all_others_where_they_are(ranks: list[ExpertTables]) -> None:
    for rank in ranks:
        rank.set_target(SECOND)
    exchange(*ranks)
    ranks[0].stage(ranks[0].next_task(), None)
    task = ranks[1].next_task()
    ranks[1].fail(task, "no such file")
    for _ in range(3):
        exchange(*ranks)
    assert [tables(rank)[0] for rank in ranks] == [(0, 1, 2), (2, 3, 0)]
    assert ranks[1].report().error == "no such file"
    for rank in ranks:
        rank.set_target(Placement(3, R, FIRST.layers))
    exchange(*ranks)
    exchange(*ranks)
    report = ranks[1].report()
    assert (report.version, report.to_switch, report.error) == (3, 0, "")


def test_what_is_loaded_for_a_former_plan_is_dropped(ranks: list[ExpertTables]) -> None:
    for rank in ranks:
        rank.set_target(SECOND)
    exchange(*ranks)
    old = ranks[0].next_task()
    ranks[0].set_target(THIRD)
    with pytest.raises(MoveCancelled):
        ranks[0].check(old)
    exchange(*ranks)
    ranks[0].stage(old, None)
    exchange(*ranks)
    assert tables(ranks[0])[0] == (0, 1, 2)


def test_the_loader_is_let_go_when_the_epoch_ends(ranks: list[ExpertTables]) -> None:
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(MoveCancelled):
            ranks[0].next_task()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ranks[0].close()
    assert ended.wait(10)
    thread.join()


def test_ranks_never_differ_in_a_step_whatever_comes_when() -> None:
    """Plans, loads and failures reach three ranks in any order; after each exchange all have the same tables."""
    switches = sum(_wander(random.Random(seed)) for seed in range(200))
    assert switches > 200, "worlds in which nothing moves show nothing"


def _wander(rng: random.Random) -> int:
    def drawn(version: int) -> Placement:
        rows = {layer: rng.sample([*range(E), *rng.choices(range(E), k=P - E)], P) for layer in LAYERS}
        checkpoints = {layer: rng.choice([0, 0, version]) for layer in LAYERS}
        return Placement(version, 3, {layer: tuple(row) for layer, row in rows.items()}, checkpoints)

    plan, switches = drawn(1), 0
    ranks = [ExpertTables(plan, E, rank, None) for rank in range(3)]
    for _ in range(200):
        rank = rng.choice(ranks)
        match rng.choice(["plan", "hear", "hear", "load", "load", "load", "fail", "exchange", "exchange"]):
            case "plan" if rng.random() < 0.2:
                plan = drawn(plan.version + 1)
            case "hear" if rank.version != plan.version:
                rank.set_target(plan)
            case "load" if rank._wants_a_layer():
                rank.stage(rank.next_task(), None)
            case "fail" if rank._wants_a_layer() and rng.random() < 0.05:
                rank.fail(rank.next_task(), "why not")
            case "exchange":
                before = ranks[0]._rows | ranks[0]._weights
                exchange(*ranks)
                assert ranks[0]._rows == ranks[1]._rows == ranks[2]._rows
                assert ranks[0].weights() == ranks[1].weights() == ranks[2].weights()
                assert ranks[0].closing == ranks[1].closing == ranks[2].closing
                switches += before != ranks[0]._rows | ranks[0]._weights
    return switches


def test_weights_go_with_the_tables(tmp_path: Path) -> None:
    sizes = Sizes(num_experts=4, hidden=16, inner=8, layers=2)
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", sizes, draw_weights(sizes)))
    experts = ExpertMLPs.load(checkpoint, {0: (0, 1), 1: (0, 1)}, dtype=torch.float32)
    wanted = ExpertMLPs.load(checkpoint, {0: (0, 1), 1: (3, 0)}, dtype=torch.float32)
    seen: list[tuple[int, int]] = []
    weights = experts.stage(checkpoint, 1, (3, 0), lambda done, total: seen.append((done, total)))
    assert seen == [(experts.num_bytes // 4, experts.num_bytes // 4)], "only the expert that was not there is read"
    tokens, offsets, counts = torch.randn(4, 16), torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([2, 2])
    before = experts.forward(1, tokens, offsets, counts)
    loaded: list[int] = []
    tables = ExpertTables(
        Placement(1, 1, {0: (0, 1), 1: (0, 1)}), 4, 0, experts, lambda copies, took_ns: loaded.append(copies)
    )
    tables.set_target(Placement(2, 1, {0: (0, 1), 1: (3, 0)}))
    exchange(tables)
    tables.stage(tables.next_task(), weights)
    assert torch.equal(experts.forward(1, tokens, offsets, counts), before)
    exchange(tables)
    assert torch.equal(experts.forward(1, tokens, offsets, counts), wanted.forward(1, tokens, offsets, counts))
    assert torch.equal(experts.forward(0, tokens, offsets, counts), wanted.forward(0, tokens, offsets, counts))
    assert experts.ids == {0: (0, 1), 1: (3, 0)}
    assert loaded == [1]


@pytest.mark.parametrize("row", [(3, 0, 2), (2,), (1, 0, 3, 2)])
def test_a_rank_of_another_number_of_slots_reads_only_what_it_lacks(tmp_path: Path, row: tuple[int, ...]) -> None:
    """What was prepared is copied as well; both layers have the new number before a step runs."""
    sizes = Sizes(num_experts=4, hidden=16, inner=8, layers=2)
    checkpoint = Checkpoint.open(write_files(tmp_path, "mixtral", sizes, draw_weights(sizes)))
    experts, seen = ExpertMLPs.load(checkpoint, (0, 1), dtype=torch.float32), list[tuple[int, int]]()
    missing = tuple(expert for expert in row if expert not in (0, 1))
    more = {
        layer: HeldLayer(missing, experts.read(checkpoint, layer, missing), FROM_CONFIG) for layer in (0, 1) if missing
    }
    for layer in (0, 1):
        staged = experts.stage(checkpoint, layer, row, lambda *done: seen.append(done), more=more.get(layer))
        experts.replace(layer, row, *staged)
    experts.resized()
    wanted = ExpertMLPs.load(checkpoint, row, dtype=torch.float32)
    assert not seen, "everything was here"
    assert (experts.num_experts, experts.num_bytes, experts.ids) == (len(row), wanted.num_bytes, wanted.ids)
    tokens, counts = torch.randn(2 * len(row), 16), torch.full((len(row),), 2)
    offsets = torch.arange(0, 2 * len(row) + 1, 2, dtype=torch.int32)
    for layer in (0, 1):
        assert torch.equal(
            experts.forward(layer, tokens, offsets, counts), wanted.forward(layer, tokens, offsets, counts)
        )


def test_a_report_names_a_placement_that_is_not_taken_up_yet() -> None:
    """Else a new control plane that hears the report gives the same number to other tables."""
    rank = ExpertTables(FIRST, E, 0, None)
    rank.set_target(SECOND)
    report = rank.report()
    assert (report.version, report.switched, report.to_switch) == (2, 0, 1)
    assert [tuple(layer.experts) for layer in report.layers] == [(0, 1, 2), (0, 1, 2)]
    rank.progress()
    assert (rank.report().version, rank.report().to_switch) == (2, 2)


def test_placements_that_do_not_fit_are_refused() -> None:
    def parse(num_slots: int, *rows: list[int]) -> Placement:
        message = pb.PlacementResponse(version=4, num_slots=num_slots)
        for row in rows:
            message.layers.add(experts=row)
        return Placement.parse(message, E, R, LAYERS)

    good = parse(5, [0, 1, 2, 3, 3], [3, 2, 1, 0, 0])
    assert [good.of_rank(3, rank) for rank in range(R)] == [(3, 2, 1), (0, 0)]
    for rows, said in (
        (([0, 1, 2, 3, 3],), "layers: expected 2 of them, got 1"),
        (([0, 1, 2, 3], [0, 1, 2, 3, 3]), "layer 1: expected 5 slots, got 4"),
        (([0, 1, 2, 3, 4], [0, 1, 2, 3, 3]), "layer 1: expected every expert"),
        (([0, 1, 2, 3, 3], [0, 1, 2, 2, 1]), "layer 3: expected every expert"),
    ):
        with pytest.raises(PlacementError, match=said):
            parse(5, *rows)
