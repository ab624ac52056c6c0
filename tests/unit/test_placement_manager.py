"""What the control plane makes of reports: loads, plans, and the way from one placement to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossdock.common.config import PlacementConfig
from crossdock.control.placement_manager import PlacementManager, Kind, Report
from crossdock.control.balancer import copies_of
from crossdock.control.plans import Plan, domain_imbalance, total_imbalance
from crossdock.control.tables import Table

R, E = 2, 4
KIND = Kind(E, (1, 3))
CONFIG = PlacementConfig(redundant_experts=2, rebalance_s=60, load_half_life_s=100, move_timeout_s=50)
HOT = (10, 10, 10, 100)


def made(config: PlacementConfig = CONFIG) -> PlacementManager:
    curator = PlacementManager(config, R)
    curator.welcome(KIND)
    curator.form(["a", "b"], 0.0)
    return curator


def report(curator: PlacementManager, rank: int, loads: tuple[int, ...] | None = None, **fields: object) -> Report:
    """As a rank tells that holds what it should; each copy computes its share."""
    held = tuple(table[rank] for table in curator.tables)
    counts = [copies_of(table, E) for table in curator.tables]
    rows = tuple(
        tuple(loads[expert] // counts[number][expert] for expert in row) if loads else ()
        for number, row in enumerate(held)
    )
    base = Report(curator.version, 0, 0, "", held, rows)
    return replace(base, **fields)  # type: ignore[arg-type]


def plan(curator: PlacementManager, now: float = 1.0) -> Plan:
    snapshot = curator.snapshot(now)
    assert snapshot is not None
    return snapshot.plan()


def hot(curator: PlacementManager) -> Plan:
    """Expert 3, of which there is one copy, is asked for most; the plan to mend that."""
    for rank in range(R):
        assert curator.hear(rank, report(curator, rank, HOT), 1.0) is None
    return plan(curator)


def test_the_first_placement_is_whole_and_named() -> None:
    curator = made()
    assert curator.version == 1
    assert len(curator.tables) == len(KIND.layers)
    assert [sum(len(held) for held in table) for table in curator.tables] == [6, 6]
    assert plan(curator).moves == 0, "no load, no reason to move"


def test_loads_decay_and_are_rows_a_second() -> None:
    curator = made()
    for second in range(400):
        for rank in range(R):
            curator.hear(rank, report(curator, rank, HOT), float(second))
    assert curator.rows_per_s(400.0)[0] == pytest.approx(HOT, rel=0.05)
    assert curator.rows_per_s(500.0)[1] == pytest.approx([one / 2 for one in HOT], rel=0.08)


def test_a_move_is_over_when_all_ranks_say_so() -> None:
    curator = made()
    better = hot(curator)
    assert better.moves > 0
    assert better.imbalance_after < better.imbalance
    assert curator.is_worth_it(better)
    assert curator.start(better, 2.0)
    assert curator.version == 2
    assert curator.tables == better.after
    assert not curator.start(better, 2.0), "of a former placement"
    way = {"switched": 2, "to_switch": 2}
    assert curator.hear(0, report(curator, 0, **way), 3.0) is None
    assert curator.hear(1, report(curator, 1, switched=1, to_switch=2), 3.0) is None
    assert curator.moving == (1, 2)
    ended = curator.hear(1, report(curator, 1, **way), 4.5)
    assert ended is not None
    assert (ended.result, ended.text) == ("done", "moved in 2.5 s")
    assert not curator.is_moving
    assert curator.version == 2


def test_who_cannot_load_turns_it_back_to_what_was_reached() -> None:
    curator = made()
    before = curator.tables
    better = hot(curator)
    curator.start(better, 2.0)
    half = (better.after[0], before[1])
    held = [tuple(table[rank] for table in half) for rank in range(R)]
    curator.hear(0, report(curator, 0, switched=1, to_switch=2, layers=held[0]), 3.0)
    failed = report(curator, 1, switched=1, to_switch=2, layers=held[1], error="layer 3: gone")
    ended = curator.hear(1, failed, 3.0)
    assert ended is not None
    assert (ended.result, ended.text) == ("turned back", "turned back: rank 1: layer 3: gone")
    assert curator.version == 3
    assert curator.tables == half
    for rank in range(R):
        assert curator.hear(rank, report(curator, rank), 4.0) is None
    assert not curator.is_moving


def test_a_move_that_takes_too_long_is_turned_back() -> None:
    curator = made()
    before = curator.tables
    curator.start(hot(curator), 2.0)
    assert curator.expire(51.0) is None
    ended = curator.expire(52.0)
    assert ended is not None
    assert ended.text == "turned back: ranks 0, 1 took longer than 50 s"
    assert curator.tables == before
    assert curator.expire(200.0) is None
    assert not curator.is_moving, "a retreat that nobody takes is given up"


def test_an_epoch_that_ends_on_the_way_goes_on_from_what_was_reached() -> None:
    curator = made()
    before = curator.tables
    better = hot(curator)
    curator.start(better, 2.0)
    reached = (better.after[0][0], before[1][0])
    curator.hear(0, report(curator, 0, switched=1, to_switch=2, layers=reached), 3.0)
    curator.form(["a", "b"], 4.0)
    assert curator.version == 3
    assert curator.tables == (better.after[0], before[1])
    curator.form(["a", "b"], 5.0)
    assert curator.version == 3, "nothing has changed"


def test_a_new_control_plane_learns_where_everything_is() -> None:
    old = made()
    better = hot(old)
    old.start(better, 2.0)
    new = PlacementManager(CONFIG, R)
    new.welcome(KIND)
    new.recovered(["a", "b"])
    assert new.version == 0
    assert new.tables == ()
    told = [report(old, rank, switched=2, to_switch=2) for rank in range(R)]
    new.hear(0, told[0], 1.0)
    assert new.version == 0
    new.hear(1, replace(told[1], switched=1), 1.0)
    assert new.version == 0, "rank 1 is still on its way"
    new.hear(1, told[1], 2.0)
    assert (new.version, new.tables) == (2, better.after)


def test_a_new_control_plane_of_a_group_without_a_rank_fills_its_slots() -> None:
    """Else the rank's successor never hears what to load, and is never taken in."""
    old, new = made(), PlacementManager(CONFIG, R)
    new.welcome(KIND)
    new.recovered(["a", "b"], frozenset({1}))
    new.hear(0, report(old, 0), 1.0)
    assert new.version == old.version
    for table, before in zip(new.tables, old.tables, strict=True):
        assert table[0] == before[0]
        assert len(table[1]) == len(before[1])
        assert min(copies_of(table, KIND.num_experts)) >= 1
    new.form(["a", "b"], 2.0)
    assert not new._missing


def test_experts_move_unasked_only_when_it_is_time_and_pays() -> None:
    curator = made()
    assert not curator.is_due(10.0), "the first look only starts the clock"
    assert not curator.is_due(69.0)
    assert curator.is_due(70.0)
    assert not curator.is_due(71.0)
    better = hot(curator)
    assert curator.is_worth_it(better)
    assert not curator.is_worth_it(replace(better, imbalance_after=better.imbalance * 0.96))
    curator.start(better, 80.0)
    assert not curator.is_due(200.0), "while experts move"
    asked = made(PlacementConfig())
    assert not asked.is_due(0.0)
    assert not asked.is_due(1e6), "only when asked"


def test_another_model_voids_everything() -> None:
    curator = made()
    hot(curator)
    curator.welcome(Kind(8, (0,)))
    assert curator.version == 0
    curator.form(["a", "b"], 9.0)
    assert [sum(map(len, table)) for table in curator.tables] == [10]
    assert curator.rows_per_s(9.0) == ((0.0,) * 8,)


def test_domains_and_layers_are_summed() -> None:
    one: Table = ((0, 1), (2, 3))
    assert total_imbalance([HOT, (10, 10, 10, 10)], [one, one]) == pytest.approx((110 + 20) / (65 + 20))
    curator = made()
    hot(curator)
    snapshot = curator.snapshot(1.0)
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
    curator = made()
    with pytest.raises(ValueError, match=said):
        curator.check_report(0, report(curator, 0, **fields))


def test_copies_that_no_rank_could_hold_are_refused() -> None:
    curator = PlacementManager(PlacementConfig(redundant_experts=5), R)
    with pytest.raises(ValueError, match="redundant_experts: expected at most 4"):
        curator.check_kind(KIND)
