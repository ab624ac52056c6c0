"""Files made from types are what the types make now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ep_kernels import jit
from tests.house import chart, dashboard
from tests.house.generate import BEGIN, END, METRICS, editor_headers, generated
from tests.house.tree import name_of

MADE = generated()


@pytest.mark.parametrize("path", MADE, ids=name_of)
def test_a_generated_file_is_what_is_made_now(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == MADE[path], "run `make schema`"


def test_headers_for_editors_say_what_a_variant_is_compiled_with() -> None:
    made = {path.name: text for path, text in editor_headers().items()}
    for variant in (jit.dispatch_variant("ll", 1, "bf16"), jit.combine_variant("ll", 0, "bf16", "bf16")):
        lines = set(jit.source(variant).splitlines())
        assert all(line in lines for line in made["types.h"].splitlines() if not line.startswith("#"))
        assert all(name in made["variant.h"] for name, _ in variant.constants)


def test_tables_have_one_place_each() -> None:
    for path, marks in ((METRICS, (BEGIN, END)), (chart.README, (chart.BEGIN, chart.END))):
        assert [path.read_text().count(mark) for mark in marks] == [1, 1]


def test_every_metric_that_people_watch_is_on_the_dashboard() -> None:
    shown = set(re.findall(r"crossdock_\w+?(?=_bucket|_count|\b)", MADE[dashboard.PLACES[0]]))
    known = {re.sub(r"_(bucket|count|sum)$", "", name) for name in dashboard.exported()}
    left_out = known - shown - {"crossdock_build_info"}
    assert left_out == {
        "crossdock_serving", "crossdock_expert_weights_bytes", "crossdock_heartbeats_total",
        "crossdock_event_loop_tasks",
    }  # fmt: skip


def test_a_grouping_is_told_from_an_expression_in_parentheses() -> None:
    """`group_left (metric > 0)` is no PromQL: what follows group_left are labels."""
    expressions = [
        target["expr"]
        for panel in json.loads(dashboard.dashboard_json())["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(expressions) > 60
    wrong = [one for one in expressions if re.search(r"group_(left|right) \((?![\w, ]*\))", one)]
    assert not wrong, wrong


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(dashboard.dashboard_json())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < dashboard.COLUMNS


def test_a_metric_that_nobody_exports_is_refused() -> None:
    with pytest.raises(ValueError, match="crossdock_tokens"):
        dashboard._filtered("rate(crossdock_tokens{}[1m])", dashboard.exported())
