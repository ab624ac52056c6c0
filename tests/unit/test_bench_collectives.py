"""What the benchmark of collectives makes of its measurements, and what it calls wrong."""

from __future__ import annotations

import csv
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks import plot
from benchmarks.gpu.collective_cases import BACKENDS, OPS, PRODUCTS, CollectiveCase, bound_us, cases
from benchmarks.gpu.collective_tables import Taken, line_of, wrong
from benchmarks.gpu.collective_targets import Line, Target, judged, with_ratios

GATHER = CollectiveCase("all_gather", 16 << 20)
RESULTS = Path(__file__).parents[2] / "docs" / "results"
STANDING = RESULTS / "2026-11-30-h200x2-collectives"
PUBLISHED = {
    STANDING: set[str](), RESULTS / "2026-11-26-h200x2-collectives": {"7"},
    RESULTS / "2026-11-26-h200x4-collectives": set[str](),
}  # fmt: skip
"""T7, FSDP2, was measured in one of them."""


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_operation_has_three_backends_at_every_size(ranks: int) -> None:
    backends: dict[tuple[object, ...], set[str]] = {}
    for name, case in cases(ranks, quick=False):
        assert name in BACKENDS
        alike = case.t, case.op, case.num_bytes, case.m, case.n, case.k
        backends.setdefault(alike, set()).add(name)
    for (t, op, *_), found in backends.items():
        if op != "matmul" and not (op == "all_gather" and t in "34"):  # yardsticks of the rows
            assert len(found) >= 3, (t, op)
            assert "crossdock" in found
    assert {op for _, op, *_ in backends} == {op for op in OPS if op != "fsdp_step"}
    assert {t for t, *_ in backends} == {"1, 2", "3", "4", "5", "6"}


def taken(backend: str, runs: list[list[float]], case: CollectiveCase = GATHER, **fields: object) -> Line:
    return line_of(Taken(backend, replace(case, **fields), runs), 4)  # type: ignore[arg-type]


def test_a_ratio_is_to_our_best_of_the_same_operation() -> None:
    lines = with_ratios([
        taken("crossdock", [[80.0], [82.0]], num_sms=8),
        taken("crossdock", [[60.0], [60.0]], num_sms=32),
        taken("nccl", [[90.0], [90.0]]),
        taken("nccl", [[9.0]], num_bytes=1 << 20),
    ])  # fmt: skip
    ours = "crossdock all_gather sms=32"
    assert [(line.ratio, line.ratio_to) for line in lines] == [("", ""), ("", ""), (1.5, ours), ("", "")]
    assert [line.spread_pct for line in lines] == [2.5, 0.0, 0.0, ""]
    assert lines[1].gbps == pytest.approx(3 * (16 << 20) / 60e3, rel=1e-2)


def test_our_own_are_measured_by_the_longer_of_their_parts() -> None:
    shape = {"m": 4096, "n": 1792, "k": 4096, "t": "4"}
    lines = [
        taken("cublas", [[90.0]], op="matmul", num_bytes=0, **shape),
        taken("crossdock", [[60.0]], t="4"),
        taken("nccl", [[100.0]], t="4"),
        taken("crossdock", [[120.0]], op="all_gather_matmul", **shape),
        taken("nccl", [[180.0]], op="all_gather_matmul", **shape),
    ]
    made = with_ratios(lines)
    assert (made[3].ratio, made[3].ratio_to) == (0.75, "cublas matmul sms=auto")
    assert (made[4].ratio, made[4].ratio_to) == (1.5, "crossdock all_gather_matmul sms=auto")
    what = "all-gather and matmul 4096 x 1792 x 4096"
    assert judged(lines, 4) == [
        Target("4", f"{what}, efficiency", 0.75, ">=", 0.6, "yes"),
        Target("4", f"{what}, to cublas and nccl", 1.5, ">=", round(0.9 * 1.9, 3), "no"),
    ]
    assert judged(lines, 8)[1].target == 1.05
    assert judged(lines[3:], 4) == [], "a run that was cut, or of some operations, lacks the parts"


def beside(backend: str, us: float, order: str = "gather_first", mib: int = 64) -> Line:
    square = {"m": 8192, "n": 8192, "k": 8192, "num_bytes": mib << 20, "t": "3"}
    return taken(backend, [[us]], op="matmul_beside_gather", algorithm=order, **square)


def test_an_overlap_counts_beside_peers_that_overlap() -> None:
    """By the best of both orders, of ours and of theirs."""
    product = taken("cublas", [[1500.0]], op="matmul", num_bytes=0, m=8192, n=8192, k=8192, t="3")
    gathers = [taken(name, [[200.0]], num_bytes=64 << 20, t="3") for name in ("crossdock", "nccl_ce")]
    ours = [beside("crossdock", 1510.0), beside("crossdock", 1600.0, "product_first")]
    them = [beside("nccl_ce", 1650.0, "sequential"), beside("nccl_ce", 1640.0), beside("nccl", 1300.0)]
    them += [beside("nccl", 1700.0, "sequential"), beside("nccl", 1250.0, "product_first")]
    found = {target.what: target for target in judged([product, *gathers, *ours, *them], 2)}
    what = "matmul beside a gather of 64 MiB"
    assert found[f"{what}, share of the gather that is hidden"].value == 0.95
    assert found[f"{what}, nccl to ours"] == Target("3", f"{what}, nccl to ours", 0.828, ">=", 1.1, "no")
    void = found[f"{what}, nccl_ce to ours"]
    assert (void.value, void.met) == (1.086, "void: its overlap takes 0.99 of its own sequence")


def test_chunks_that_slow_a_peer_down_say_nothing() -> None:
    kind = {"op": "matmul_all_reduce", "num_bytes": 1 << 27, "m": 8192, "n": 8192, "k": 8192, "t": "6"}
    ours = taken("crossdock", [[100.0]], **kind)
    for two, met in ((120.0, "yes"), (140.0, "void: its two streams take longer than one")):
        them = [
            taken("nccl", [[us]], algorithm=how, **kind) for how, us in (("two_streams", two), ("sequential", 130.0))
        ]
        assert [target.met for target in judged([ours, *them], 4)] == [met]


def read(folder: Path, name: str, kind: type) -> list[dict[str, str]]:
    """Without T8, an operation that has been removed since."""
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [field.name for field in fields(kind)]
    return [row for row in rows if row["t"] != "8"]


def number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)  # type: ignore[no-any-return]
        except ValueError:
            continue
    return text


def test_plots_of_a_published_run(tmp_path: Path) -> None:
    for name in ("run.json", "collectives.csv"):
        shutil.copy(STANDING / name, tmp_path)
    written = plot.draw(tmp_path)
    names = [f"{name}.{kind}" for name in ("gathers", "reductions") for kind in ("svg", "png")]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 10_000 for path in written)


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_ratios_and_judgements_follow_from_the_published_times(folder: Path) -> None:
    """Of the folders that docs/collectives.md names."""
    rows = read(folder, "collectives", Line)
    lines = [Line(**{name: text if name == "t" else number(text) for name, text in row.items()}) for row in rows]  # type: ignore[arg-type]
    assert with_ratios([replace(line, ratio="", ratio_to="") for line in lines]) == lines
    for op in {line.op for line in lines} - {"matmul"}:
        assert len({line.backend for line in lines if line.op == op}) >= 3, op
    assert {line.t for line in lines} == {"1, 2", "3", "4", "5", "6"} | PUBLISHED[folder]
    told = [{name: str(value) for name, value in vars(target).items()} for target in judged(lines, lines[0].ranks)]
    assert told == read(folder, "targets", Target)


def test_the_bound_is_of_bytes_that_leave_a_gpu_or_of_products() -> None:
    assert bound_us(replace(GATHER, num_sms=8), 8) == pytest.approx(7 * (16 << 20) / 343e3)
    for unnamed in (None, 0):  # copy engines may do it
        assert bound_us(replace(GATHER, num_sms=unnamed), 8) == pytest.approx(7 * (16 << 20) / 386e3)
    assert bound_us(CollectiveCase("all_reduce", 8 << 20), 4) == pytest.approx(2 * 3 / 4 * (8 << 20) / 350e3)
    assert bound_us(CollectiveCase("reduce_scatter", 1 << 20), 2) == pytest.approx((1 << 20) / 350e3)
    square = CollectiveCase("matmul_all_reduce", 1 << 20, m=8192, n=8192, k=8192)
    assert bound_us(square, 2) == pytest.approx(2 * 8192**3 / 989e6)


@pytest.mark.parametrize("op", PRODUCTS)
def test_shapes_of_products(op: str) -> None:
    """Rows of all ranks are m; a gather has some of them before, a scatter behind."""
    case = CollectiveCase(op, 4096, m=64, n=6, k=10)
    before = {"all_gather_matmul": (16, 10), "matmul_beside_gather": (2048,)}.get(op, (64, 10))
    after = {"matmul_reduce_scatter": (16, 6), "matmul_beside_gather": (8192,)}.get(op, (64, 6))
    assert (case.shape_in(4), case.shape_out(4)) == (before, after)


def test_what_is_wrong() -> None:
    reduce, want = CollectiveCase("all_reduce", 8), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    near = torch.tensor([1.0, 2.015625], dtype=torch.bfloat16)
    assert wrong("nccl", reduce, near, want) == ""
    assert wrong("crossdock", reduce, near, want) == "other bits than the definition"
    assert wrong("nccl", GATHER, near, want) == "other bits than the definition"
    assert wrong("crossdock", replace(reduce, op="matmul_all_reduce"), near, want) == ""
    assert wrong("nccl", reduce, want * float("nan"), want).startswith("off by nan")
    assert wrong("crossdock", reduce, want.clone(), want) == ""
