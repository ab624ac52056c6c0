"""What the control plane makes of reports: loads, plans, and the way from one placement to the next."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from crossdock.common.config import PlacementConfig
from crossdock.control.placement.balancer import copies_of
from crossdock.control.placement.expert_reports import Kind, Report
from crossdock.control.placement.placement_manager import PlacementManager
from crossdock.control.placement.rebalance import Rebalance, domain_imbalance, total_imbalance
from crossdock.control.placement.tables import Table

R, E = 2, 4
KIND = Kind(E, (1, 3))
CONFIG = PlacementConfig(redundant_experts=2, rebalance_s=60, load_half_life_s=100, move_timeout_s=50)
HOT = (10, 10, 10, 100)


def made(config: PlacementConfig = CONFIG) -> PlacementManager:
    manager = PlacementManager(config, R)
    manager.set_kind(KIND)
    manager.form(["a", "b"], 0.0)
    return manager


def report(manager: PlacementManager, rank: int, loads: tuple[int, ...] | None = None, **fields: object) -> Report:
    """As a rank tells that holds what it should; each copy computes its share."""
    held = tuple(table[rank] for table in manager.tables)
    counts = [copies_of(table, E) for table in manager.tables]
    rows = tuple(
        tuple(loads[expert] // counts[number][expert] for expert in row) if loads else ()
        for number, row in enumerate(held)
    )
    base = Report(manager.version, 0, 0, "", held, rows)
    return replace(base, **fields)  # type: ignore[arg-type]


def plan(manager: PlacementManager, now: float = 1.0) -> Rebalance:
    snapshot = manager.snapshot(now)
    assert snapshot is not None
    return snapshot.rebalance()


def hot(manager: PlacementManager) -> Rebalance:
    """Expert 3, of which there is one copy, is asked for most; the plan to mend that."""
    for rank in range(R):
        assert manager.record_report(rank, report(manager, rank, HOT), 1.0) is None
    return plan(manager)


def test_the_first_placement_is_whole_and_named() -> None:
    manager = made()
    assert manager.version == 1
    assert len(manager.tables) == len(KIND.layers)
    assert [sum(len(held) for held in table) for table in manager.tables] == [6, 6]
    assert plan(manager).moves == 0, "no load, no reason to move"


def test_loads_decay_and_are_rows_a_second() -> None:
    manager = made()
    for second in range(400):
        for rank in range(R):
            manager.record_report(rank, report(manager, rank, HOT), float(second))
    assert manager.rows_per_s(400.0)[0] == pytest.approx(HOT, rel=0.05)
    assert manager.rows_per_s(500.0)[1] == pytest.approx([one / 2 for one in HOT], rel=0.08)


def test_loads_are_counted_after_any_pause() -> None:
    """A group that waits for a worker over a weekend brings no reports."""
    manager = made()
    for now in (1.0, 1.0 + 1e4 * CONFIG.load_half_life_s):
        for rank in range(R):
            manager.record_report(rank, report(manager, rank, HOT), now)
    assert manager.rows_per_s(now)[0] == pytest.approx([one * math.log(2) / 100 for one in HOT], rel=0.01)


def test_a_move_is_over_when_all_ranks_say_so() -> None:
    manager = made()
    better = hot(manager)
    assert better.moves > 0
    assert better.imbalance_after < better.imbalance
    assert manager.is_worth_it(better)
    assert manager.start(better, 2.0)
    assert manager.version == 2
    assert manager.tables == better.after
    assert not manager.start(better, 2.0), "of a former placement"
    way = {"switched": 2, "to_switch": 2}
    assert manager.record_report(0, report(manager, 0, **way), 3.0) is None
    assert manager.record_report(1, report(manager, 1, switched=1, to_switch=2), 3.0) is None
    assert manager.moving == (1, 2)
    ended = manager.record_report(1, report(manager, 1, **way), 4.5)
    assert ended is not None
    assert (ended.result, ended.text) == ("done", "moved in 2.5 s")
    assert not manager.is_moving
    assert manager.version == 2


def test_who_cannot_load_turns_it_back_to_what_was_reached() -> None:
    manager = made()
    before = manager.tables
    better = hot(manager)
    manager.start(better, 2.0)
    half = (better.after[0], before[1])
    held = [tuple(table[rank] for table in half) for rank in range(R)]
    manager.record_report(0, report(manager, 0, switched=1, to_switch=2, layers=held[0]), 3.0)
    failed = report(manager, 1, switched=1, to_switch=2, layers=held[1], error="layer 3: gone")
    ended = manager.record_report(1, failed, 3.0)
    assert ended is not None
    assert (ended.result, ended.text) == ("rolled_back", "rolled back: rank 1: layer 3: gone")
    assert manager.version == 3
    assert manager.tables == half
    for rank in range(R):
        assert manager.record_report(rank, report(manager, rank), 4.0) is None
    assert not manager.is_moving


def test_a_move_that_takes_too_long_is_turned_back() -> None:
    manager = made()
    before = manager.tables
    manager.start(hot(manager), 2.0)
    assert manager.expire(51.0) is None
    ended = manager.expire(52.0)
    assert ended is not None
    assert ended.text == "rolled back: ranks 0, 1 took longer than 50 s"
    assert manager.tables == before
    assert manager.expire(200.0) is None
    assert not manager.is_moving, "a rolling_back that nobody takes is given up"


def test_an_epoch_that_ends_on_the_way_goes_on_from_what_was_reached() -> None:
    manager = made()
    before = manager.tables
    better = hot(manager)
    manager.start(better, 2.0)
    reached = (better.after[0][0], before[1][0])
    manager.record_report(0, report(manager, 0, switched=1, to_switch=2, layers=reached), 3.0)
    manager.form(["a", "b"], 4.0)
    assert manager.version == 3
    assert manager.tables == (better.after[0], before[1])
    manager.form(["a", "b"], 5.0)
    assert manager.version == 3, "nothing has changed"


def test_a_new_control_plane_learns_where_everything_is() -> None:
    old = made()
    better = hot(old)
    old.start(better, 2.0)
    new = PlacementManager(CONFIG, R)
    new.set_kind(KIND)
    new.recovered(["a", "b"])
    assert new.version == 0
    assert new.tables == ()
    told = [report(old, rank, switched=2, to_switch=2) for rank in range(R)]
    new.record_report(0, told[0], 1.0)
    assert new.version == 0
    new.record_report(1, replace(told[1], switched=1), 1.0)
    assert new.version == 0, "rank 1 is still on its way"
    new.record_report(1, told[1], 2.0)
    assert (new.version, new.tables) == (2, better.after)


def test_a_new_control_plane_of_a_group_without_a_rank_fills_its_slots() -> None:
    """Else the rank's successor never hears what to load, and is never taken in."""
    old, new = made(), PlacementManager(CONFIG, R)
    new.set_kind(KIND)
    new.recovered(["a", "b"], frozenset({1}))
    new.record_report(0, report(old, 0), 1.0)
    assert new.version == old.version
    for table, before in zip(new.tables, old.tables, strict=True):
        assert table[0] == before[0]
        assert len(table[1]) == len(before[1])
        assert min(copies_of(table, KIND.num_experts)) >= 1
    new.form(["a", "b"], 2.0)
    assert not new._missing


def test_experts_move_unasked_only_when_it_is_time_and_pays() -> None:
    manager = made()
    assert not manager.is_due(10.0), "the first look only starts the clock"
    assert not manager.is_due(69.0)
    assert manager.is_due(70.0)
    assert not manager.is_due(71.0)
    better = hot(manager)
    assert manager.is_worth_it(better)
    assert not manager.is_worth_it(replace(better, imbalance_after=better.imbalance * 0.96))
    manager.start(better, 80.0)
    assert not manager.is_due(200.0), "while experts move"
    asked = made(PlacementConfig())
    assert not asked.is_due(0.0)
    assert not asked.is_due(1e6), "only when asked"


def test_another_model_voids_everything() -> None:
    manager = made()
    hot(manager)
    manager.set_kind(Kind(8, (0,)))
    assert manager.version == 0
    manager.form(["a", "b"], 9.0)
    assert [sum(map(len, table)) for table in manager.tables] == [10]
    assert manager.rows_per_s(9.0) == ((0.0,) * 8,)


def test_domains_and_layers_are_summed() -> None:
    one: Table = ((0, 1), (2, 3))
    assert total_imbalance([HOT, (10, 10, 10, 10)], [one, one]) == pytest.approx((110 + 20) / (65 + 20))
    manager = made()
    hot(manager)
    snapshot = manager.snapshot(1.0)
    assert snapshot is not None
    assert domain_imbalance(snapshot) == pytest.approx(total_imbalance(snapshot.loads, snapshot.tables))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": ((0, 1, 2),), "rows": ((),)}, "expected 2 of them, got 1"),
        ({"layers": ((0, 1, 2), (0, 1)), "rows": ((), ())}, "as many slots in each"),
        ({"layers": ((0, 1, 9), (0, 1, 2)), "rows": ((), ())}, "expected experts < 4, got 9"),
        ({"layers": ((0, 1, 2), (0, 1, 2)), "rows": ((1,), ())}, "expected 3 of them or none, got 1"),
    ],
)
def test_odd_reports_are_refused(fields: dict[str, object], said: str) -> None:
    manager = made()
    with pytest.raises(ValueError, match=said):
        manager.check_report(0, report(manager, 0, **fields))


def test_copies_that_no_rank_could_hold_are_refused() -> None:
    manager = PlacementManager(PlacementConfig(redundant_experts=5), R)
    with pytest.raises(ValueError, match="redundant_experts: expected at most 4"):
        manager.check_kind(KIND, R)
