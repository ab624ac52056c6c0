"""docs/compare.md: its rows, the cases in which another backend is ahead, and the results that give no row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import compare_page, facts, report
from benchmarks.compare_page import Row
from tests.house.tree import ROOT

RUN = {"gpu": "NVIDIA H200", "num_gpus": 2, "date": "2026-01-02T03:04:05+00:00", "commit": "c0ffee" * 6}
SHAPE = {
    "mode": "ll", "layout": "rank_major", "tokens": 8, "hidden": 64, "experts": 8, "topk": 2, "ranks": 2,
    "dispatch_dtype": "fp8", "combine_dtype": "bfloat16", "routing": "uniform", "form": "",
}  # fmt: skip


def line(backend: str, p50_us: float, op: str = "pair", **more: object) -> report.Line:
    """A row of ll.csv or ht.csv."""
    timing = "graph" if op == "pair" else "eager"
    sms = 44 if backend == "crossdock" else ""
    return {**SHAPE, "backend": backend, "op": op, "timing": timing, "p50_us": p50_us, "sms": sms, "l2": "warm"} | more


def results(folder: Path, lines: list[report.Line], table: str = "ll", **run: object) -> Path:
    """The parent of a folder of results that a run would leave."""
    report.write(folder, table, lines)
    facts.write(folder, RUN | run)
    return folder.parent


def rows_of(text: str, heading: str) -> list[str]:
    """The rows of the tables below a heading."""
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [row for row in part.splitlines() if row.startswith("|") and not row.endswith(("| --- |", "| x |"))]


def test_a_row_of_ours_and_others(tmp_path: Path) -> None:
    lines = [line("crossdock", 10), line("deepep", 25), line("agrs", 40), line("nccl_bare", 5)]
    text = compare_page.page(results(tmp_path / "b", lines, lacks={"deepep": "20 SMs.", "nccl": "no."}))
    assert rows_of(text, "Dispatch and combine, low latency") == [
        "| pair, in a CUDA graph | 8 | rank-major | fp8 + bf16 | uniform | 10.0 | 44 | 25.0 | 40.0 | 5.0 | 2.50 |"
    ]
    assert "2 x NVIDIA H200, 2026-01-02, commit `c0ffeec0ffee` ([ll.csv](results/b/ll.csv)):" in text
    assert "* DeepEP: 20 SMs." in text
    assert "no." not in text
    assert "In none of the cases below." in text


def test_who_is_ahead_of_ours_stands_first_the_farthest_at_the_top(tmp_path: Path) -> None:
    lines = [line("crossdock", 10, op, tokens=t) for op in ("dispatch", "combine") for t in (8, 16)]
    lines += [line("deepep", 9, "dispatch"), line("nccl", 8, "combine"), line("nccl", 11, "combine", tokens=16)]
    text = compare_page.page(results(tmp_path / "b", lines))
    assert "2 of 3 cases:" in text
    first, second = rows_of(text, "Where others are ahead")
    assert first.endswith("| combine, 8, rank-major, bf16, uniform | 10.0 | NCCL | 8.0 | 0.80 |")
    assert second.endswith("| dispatch, 8, rank-major, fp8, uniform | 10.0 | DeepEP | 9.0 | 0.90 |")
    assert len(rows_of(text, "Dispatch and combine, low latency")) == 3  # dispatch of T = 16: ours alone


def test_runs_are_not_mixed_and_the_newest_is_first(tmp_path: Path) -> None:
    results(tmp_path / "a", [line("crossdock", 10), line("deepep", 20)], date="2026-01-01", num_gpus=4)
    results(tmp_path / "c", [line("crossdock", 5)])
    parent = results(tmp_path / "b", [line("crossdock", 10), line("deepep", 30)])
    ratios = [row.split(" | ")[-1] for row in rows_of(compare_page.page(parent), "Dispatch and combine, low latency")]
    assert ratios == ["3.00 |", "2.00 |"]


@pytest.mark.parametrize(
    "lines", [[line("deepep", 9)], [line("crossdock", 9)], [line("crossdock", 9), line("nccl_bare", 1)]]
)
def test_a_csv_without_a_whole_job_of_both_gives_no_table(tmp_path: Path, lines: list[report.Line]) -> None:
    (made,) = [[*make(results(tmp_path / "a", lines) / "a")] for make in compare_page.KINDS[:1]]
    assert made == []


def test_flushed_pairs_are_left_out(tmp_path: Path) -> None:
    lines = [line(name, us, l2=l2) for name, us, l2 in (
        ("crossdock", 10, "warm"), ("deepep", 20, "warm"), ("crossdock", 1, "flushed"), ("deepep", 90, "flushed"),
    )]  # fmt: skip
    (made,) = compare_page.dispatch_and_combine(results(tmp_path / "a", lines) / "a")
    assert [row.ratio for row in made.rows] == [2.0]


def test_collectives_take_ours_as_chosen_and_the_best_of_others(tmp_path: Path) -> None:
    shape = {"op": "all_reduce", "bytes_per_rank": 1 << 20, "timing": "graph"}
    lines: list[report.Line] = [
        shape | {"backend": name, "sms": sms, "p50_us": us}
        for name, sms, us in (("crossdock", "auto", 8), ("crossdock", 132, 4), ("nccl", "auto", 9), ("nccl", 8, 6))
    ]
    lines.append(lines[0] | {"op": "matmul"})
    (made,) = compare_page.collectives(results(tmp_path / "a", lines, "collectives") / "a")
    (row,) = made.rows
    assert (row.case, row.ours, row.others, row.ratio) == (("all_reduce", "1 MiB", "graph"), 8.0, {"nccl": 6.0}, 0.75)


def test_serving_is_the_mean_of_its_turns(tmp_path: Path) -> None:
    turn = {"load": "closed-8", "itl_p50_ms": 10, "ttft_p50_ms": 100, "tokens_per_s": 50, "fault": ""}
    lines: list[report.Line] = [
        turn | {"backend": "deepep_v2"},
        turn | {"backend": "deepep_v2", "itl_p50_ms": 20},
        turn | {"backend": "deepep_v2", "itl_p50_ms": 900, "fault": "it died"},
        turn | {"backend": "allgather_reducescatter", "itl_p50_ms": 30, "tokens_per_s": 100},
    ]
    (made,) = compare_page.serving(results(tmp_path / "a", lines, "vllm-serve") / "a")
    found = {row.case[1]: (row.ours, row.ratio) for row in made.rows}
    assert found == {"ms between tokens": (15, 2), "ms to the first token": (100, 1), "tokens/s": (50, 0.5)}


def test_the_best_other_one_of_a_rate_is_the_largest() -> None:
    row = Row(("a",), 50, {"a": 100, "b": 200, "nccl_bare": 900}, is_rate=True)
    assert (row.best, row.ratio) == ("b", 0.25)
    assert replace(row, is_rate=False).ratio == 2


def test_every_run_says_what_its_others_lack() -> None:
    """DeepEP ran with its default of SMs, the gathers of others with two buffers: rows of both say so."""
    page = " ".join((ROOT / "docs" / "compare.md").read_text(encoding="utf-8").split())
    noted = [json.loads(path.read_text()).get("lacks", {}) for path in (ROOT / "docs" / "results").glob("*/run.json")]
    assert sum(map(len, noted)) >= 4
    assert all(text in page for lacks in noted for text in lacks.values())


def test_a_case_measured_again_counts_once(tmp_path: Path) -> None:
    results(tmp_path / "2026-01", [line("crossdock", 10), line("deepep", 9), line("crossdock", 7, tokens=16),
                                   line("deepep", 8, tokens=16)])  # fmt: skip
    results(tmp_path / "2026-02", [line("crossdock", 6), line("deepep", 9), line("nccl", 30)])
    results(tmp_path / "2026-03", [line("crossdock", 5), line("nccl", 30)])  # without DeepEP: in place of nothing
    text = compare_page.page(results(tmp_path / "2026-04", [line("crossdock", 9), line("deepep", 8)], num_gpus=4))
    rows = rows_of(text, "Dispatch and combine, low latency")
    assert [row.split(" | ")[1] for row in rows] == ["8", "8", "8", "16"]
    assert "1 of 4 cases:" in text
    assert [row.split(" | ")[5] for row in rows] == ["9.0", "5.0", "6.0", "7.0"]
