"""The benchmark without a GPU: routing, bounds, the check of results, csv, table, plots, comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import bounds, compare, facts, gpu, plot, report, table
from benchmarks.cases import ROUTINGS, Case, draw, make_steps, ranks_of, rows_sent
from benchmarks.gpu import Inputs, check, crossdock, layer
from benchmarks.gpu.measure import Bench
from benchmarks.gpu.tables import GROUPS, LAYER_SHAPES, NAMES, TABLES, WANT_FLOOR, Loop, cases_of
from ep_kernels import Layout, Mode, StoreGroup
from tests.worlds import World

SMALL = Case(Mode.HT, Layout.FLAT, ranks=4, tokens=24, hidden=256, experts=16, topk=4)


# Routing and bounds.


@pytest.mark.parametrize("routing", list(ROUTINGS))
def test_ids_are_distinct_and_fresh(routing: str) -> None:
    case = replace(SMALL, routing=routing)
    ids, weights = draw(case, 1, 7)
    again, _ = draw(case, 1, 7)
    other, _ = draw(case, 1, 8)
    assert ids.dtype == torch.int32
    assert ids.shape == weights.shape == (24, 4)
    assert torch.equal(ids, again)
    assert not torch.equal(ids, other)
    for row in ids.tolist():
        chosen = [e for e in row if e != -1]
        assert len(set(chosen)) == len(chosen)
        assert all(0 <= e < 16 for e in chosen)


def test_the_routings_are_what_their_names_say() -> None:
    case = replace(SMALL, tokens=4096, experts=64)
    drawn = {routing: draw(replace(case, routing=routing), 0, 3)[0] for routing in ROUTINGS}
    counts = {routing: torch.bincount(ids[ids >= 0], minlength=64) for routing, ids in drawn.items()}
    assert counts["uniform"].max() < 1.5 * counts["uniform"].float().mean()
    assert counts["zipf"].max() > 6 * counts["zipf"].float().mean()
    assert (counts["khot"] > 0).sum() == 4
    assert (drawn["holes"] == -1).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert ranks_of(case, drawn["masked"]).max() == 2


def test_bound_by_hand() -> None:
    """Rank 0 sends 3 rows to rank 1 and keeps 5; rank 1 sends 1 row: the busiest port moves 3 rows."""
    case = Case(Mode.LL, Layout.RANK_MAJOR, ranks=2, hidden=1024, quantize=True)
    rows = torch.tensor([[[5, 3], [1, 9]]])
    assert bounds.busiest_rows(rows) == 3
    assert bounds.sent_rows(rows) == 2
    assert case.moved_bytes("dispatch") == 1024 + 4 * 8
    assert case.moved_bytes("combine") == 2048
    assert bounds.bound_us(case, rows, "dispatch") == pytest.approx(3 * 1056 / 350e3)
    assert bounds.bound_us(case, rows, "pair") == pytest.approx(3 * (1056 + 2048) / 350e3)
    assert bounds.gbps(8) == 343


def test_the_published_bounds_come_out() -> None:
    """T = 4096 on 8 GPUs: 793 us on average; the busiest port of a drawn routing is a little later."""
    case = Case(Mode.HT, Layout.FLAT, ranks=8, tokens=4096)
    rows = torch.stack([torch.stack([bounds.rows_to(case, draw(case, rank, 5)[0]) for rank in range(8)])])
    assert bounds.sent_rows(rows) == pytest.approx(4096 * 4.633, rel=0.01)
    assert 785 < bounds.bound_us(case, rows, "dispatch") < 830


@pytest.mark.parametrize("routing", list(ROUTINGS))
def test_rows_are_counted_once_per_rank(routing: str) -> None:
    case = replace(SMALL, routing=routing)
    (step,) = make_steps(case, 1, 11)
    rows = torch.stack([bounds.rows_to(case, ids) for ids in step.topk_ids])
    for source in range(case.ranks):
        assert rows[source].sum() == rows_sent(case, step, source, remote_only=False)
        assert bounds.remote(rows)[source].sum() == rows_sent(case, step, source, remote_only=True)


@pytest.mark.parametrize("extent", ["full", "core", "quick"])
@pytest.mark.parametrize("name", list(TABLES))
def test_no_case_stands_twice_in_a_table(name: str, extent: str) -> None:
    cases = [measured.case for measured in cases_of(name, 4, extent)]
    assert cases
    assert len(set(cases)) == len(cases)
    flushed = [Loop("eager", True) in m.loops or m.case.mode is Mode.LL for m in cases_of(name, 4, extent)]
    assert all(flushed) or name in ("auto", "overlap", "layer")


# The check of results: against transports that are right, and against wrong results.


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    pool = World(4)
    yield pool
    pool.close()


def untimed(rank: int, size: int, store: Any, case: Case, backend: str, seed: int) -> list[str]:
    """Round trips of a GPU backend on processors, gloo in NCCL's place; the faults that were noted."""
    group = StoreGroup(store, rank, size)
    if backend == "crossdock":
        made: gpu.Backend = crossdock.Crossdock(case, group, transport="cpu")
        bench = Bench(made, case, rank, seed, None, "cpu")
        bench.round_trips("test")
        made.close()
        return bench.faults
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        bench = Bench(gpu.load(backend, case, rank, group), case, rank, seed, None, "cpu")
        bench.round_trips("test")
        return bench.faults
    finally:
        dist.destroy_process_group()


def by_halves(rank: int, size: int, store: Any, case: Case, seed: int) -> list[str]:
    """Steps whose halves are apart, on processors; what is wrong with them."""
    backend = crossdock.Crossdock(case, StoreGroup(store, rank, size), transport="cpu")
    faults = []
    for number in range(3):
        ids, weights = draw(case, rank, seed + number)
        inputs = Inputs(torch.randn(case.tokens, case.hidden).to(case.dtype), ids, weights)
        out = backend.result(inputs).fill_(float("nan"))
        received = backend.send_dispatch(inputs)()
        assert bool(out.isnan().all())
        backend.send_combine(backend.experts(received), received, out)()
        faults.append(backend.fault(inputs, out, check.toy(case, inputs)))
    backend.close()
    return faults


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.FLAT])
def test_the_halves_give_what_the_whole_gives(world: World, layout: Layout) -> None:
    assert world.run(by_halves, replace(SMALL, layout=layout), 21) == [[""] * 3] * 4


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    ("quantize", "fp8_combine"), [(False, False), (True, False), (True, True), ("mxfp8", False), ("nvfp4", False)]
)
def test_the_check_agrees_with_a_right_transport(
    world: World, layout: Layout, quantize: bool | str, fp8_combine: bool
) -> None:
    case = replace(SMALL, layout=layout, quantize=quantize, fp8_combine=fp8_combine)
    assert world.run(untimed, case, "crossdock", 5) == [[]] * 4


@pytest.mark.parametrize("form", ["exact", "cached"])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "uniform"])
def test_the_check_knows_every_routing_and_form(world: World, routing: str, form: str) -> None:
    case = replace(SMALL, layout=Layout.GROUPED, routing=routing, form=form)
    assert world.run(untimed, case, "crossdock", 9) == [[]] * 4


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("nccl", SMALL),
        ("nccl", replace(SMALL, routing="holes", form="cached")),
        ("nccl", replace(SMALL, routing="masked")),
        ("nccl_bare", SMALL),
        ("nccl_bare", replace(SMALL, quantize=True, routing="khot")),
        ("agrs", SMALL),
        ("agrs", replace(SMALL, mode=Mode.LL, layout=Layout.RANK_MAJOR, routing="holes")),
    ],
)
def test_the_baselines_are_right(world: World, backend: str, case: Case) -> None:
    assert world.run(untimed, case, backend, 3) == [[]] * 4


def inputs_of(case: Case) -> Inputs:
    ids, weights = draw(case, 0, 1)
    return Inputs(torch.randn(case.tokens, case.hidden).to(case.dtype), ids, weights)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.GROUPED])
@pytest.mark.parametrize("exact", [False, True])
def test_wrong_results_are_noticed(layout: Layout, exact: bool) -> None:
    """A swapped pair of tokens, an unwritten row, a row of an expert that was not asked for."""
    case = replace(SMALL, layout=layout)
    inputs = inputs_of(case)
    want = check.expected(case, inputs, check.toy(case, inputs))
    assert not check.fault(want.clone(), want, exact=exact)
    swapped = want[[1, 0, *range(2, case.tokens)]]
    unwritten = want.clone()
    unwritten[5] = float("nan")
    other = replace(inputs, topk_ids=(inputs.topk_ids + 1) % case.experts)
    misled = check.expected(case, other, check.toy(case, other))
    assert all(check.fault(bad, want, exact=exact) for bad in (swapped, unwritten, misled))


def test_one_bit_is_noticed() -> None:
    inputs = inputs_of(SMALL)
    want = check.expected(SMALL, inputs, check.given_x(inputs))
    got = want.clone()
    got.view(torch.int16)[3, 7] ^= 1
    assert "1 of 24 rows" in check.fault(got, want, exact=True)


def test_the_layers_experts() -> None:
    """Grouped products are those of each expert for itself; the halves of the tokens make up the whole."""
    experts = layer.Experts.drawn(3, 64, 32, 5, "cpu")
    offsets = torch.tensor([0, 16, 16, 40], dtype=torch.int32)
    tokens = torch.randn(40, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    got = experts((SimpleNamespace(tokens=tokens, offsets=offsets), None))
    for e, (first, past) in enumerate(pairwise(offsets.tolist())):
        gate, up = (tokens[first:past] @ experts.up[e]).chunk(2, dim=1)
        want = (torch.nn.functional.silu(gate) * up) @ experts.down[e]
        assert torch.allclose(got[first:past].float(), want.float(), atol=0.02)
    inputs = inputs_of(SMALL)
    first_half, second = layer.halved(inputs)
    assert torch.equal(torch.cat([first_half.x, second.x]), inputs.x)
    assert torch.equal(torch.cat([first_half.topk_ids, second.topk_ids]), inputs.topk_ids)


# csv, table, plots, comparison.

FACTS = {
    "gpu": "NVIDIA H200", "num_gpus": 4, "date": "2026-01-02T03:04:05+00:00", "commit": "c0ffee" * 6,
    "driver": "580.1", "torch": "2.11", "nccl": "2.28.9",
}  # fmt: skip


def sample(case: Case, backend: str, op: str, loop: Loop, p50: float) -> report.Sample:
    rows = torch.full((2, case.ranks, case.ranks), 100)
    times = [[p50 * 0.9, p50, p50 * 1.5], [p50 * 1.1] * 3]
    return report.Sample(backend, op, case, loop.timing, loop.flush, times, [[9.0], [11.0]], rows, 132)


def overlap_of(case: Case, op: str, gemm_us: float) -> report.Overlap:
    """The product takes 5 % longer beside the operation than alone."""
    times = {"gemm": gemm_us, "alone": gemm_us / 1.05, "send": 7.0, "receive": 11.0}
    runs = {name: [[value * 0.9, value, value * 1.2], [value] * 3] for name, value in times.items()}
    return report.Overlap(op, case, "gemm 1 x 2 x 3", runs, 64)


def layer_of(case: Case, level: str, time_us: float) -> report.Layer:
    return report.Layer(level, case, [[time_us, time_us * 0.9, time_us * 1.1]], case.num_sms or 64)


def floors(scale: float = 1.0) -> list[report.Floor]:
    """Two kernels cost 3 us and half of that overlapped; an exchange adds 2, by release 4."""
    return [
        report.Floor(op, form, blocks, 4, [[scale * (3 - 1.5 * form + more + blocks / 1000)] * 3] * 2)
        for op, more in (("launch", 0.0), ("exchange", 2.0), ("release", 4.0))
        for blocks in (1, 132)
        for form in (False, True)
    ]


def folder_of(path: Path, scale: float = 1.0, **facts: object) -> Path:
    """A result folder as a run would leave it."""
    path.mkdir()
    for name, lines in tables_of(scale).items():
        report.write(path, name, lines)
    (path / "run.json").write_text(json.dumps(FACTS | facts))
    return path


@cache
def tables_of(scale: float) -> dict[str, list[report.Line]]:
    """The lines of each table, times `scale`."""
    tables = {"floor": [floor.line() for floor in floors(scale)]}
    for name in TABLES:
        lines: list[report.Line] = []
        for measured in cases_of(name, 4, "quick"):
            if name == "overlap":
                lines += [overlap_of(measured.case, op, 170.0 * scale).line() for op in ("dispatch", "combine")]
                continue
            if name == "layer":
                levels = {"experts": 800.0, "sequential": 1000.0, "op": 900.0, "op_shared": 950.0}
                lines += [layer_of(measured.case, level, us * scale).line() for level, us in levels.items()]
                continue
            for loop in measured.loops:
                ops = ("pair",) if loop.timing == "graph" else ("dispatch", "combine")
                time = scale * (10 + measured.case.tokens / 10)
                filled = replace(measured.case, num_sms=None)
                lines += [
                    replace(sample(filled, b, op, loop, time), sms=measured.case.num_sms or 64).line()
                    for op in ops
                    for b in ("crossdock", *(("nccl",) if not measured.backends else ()))
                ]
        floor = report.floor_us(floors(scale)) if name in WANT_FLOOR else None
        tables[name] = [report.above_floor(line, floor) for line in lines]
    return tables


def test_a_line_of_the_csv() -> None:
    case = Case(Mode.LL, Layout.RANK_MAJOR, ranks=4)
    line = sample(case, "crossdock", "pair", Loop("graph", False), 40.0).line()
    assert list(report.GPU_COLUMNS[:18]) == report.COLUMNS
    assert set(line) == set(report.GPU_COLUMNS)
    assert line["p50_us"] == "44.00"
    assert line["p99_us"] == "60.00"
    assert line["spread_pct"] == "10.0"
    assert line["bound_us"] == f"{300 * 2 * 14336 / 350e3:.2f}"
    assert line["physical_gbps"] == f"{300 * 2 * 14336 / 44e3:.1f}"
    assert line["logical_bytes"] == 128 * 8 * 2 * 14336
    assert (line["runs"], line["iterations"], line["host_us"]) == (2, 6, "9.0")


def test_the_table_shows_every_case_once(tmp_path: Path) -> None:
    text = table.markdown(folder_of(tmp_path / "a"))
    assert text.startswith("4 x NVIDIA H200, 2026-01-02, commit `c0ffeec0ffee`")
    assert all(title in text for title in table.TITLES.values())
    rows = [line for line in text.splitlines() if line.startswith("| 128 | rank_major")]
    assert [row.split(" | ")[2] for row in rows] == ["bf16", "fp8 + bf16", "fp8"]
    assert text.count("\n| 24 | ") == 1
    for hidden, experts in LAYER_SHAPES:  # one line each
        assert f"| {hidden} | {experts} | 1024 | 24 | 800 | 1000 | 900 | 950 | x 1.11 |" in text
    assert text.count("4 x NVIDIA H200") == 1
    assert "| a line to each peer, theirs polled | 5.00 | 5.13 | 3.50 | 3.63 |" in text
    assert "| expert_major | 128 | combine | 161.90 | 170.00 | 1.050 | 7.00 | 11.00 |" in text


def test_tables_of_an_earlier_run_stand_below_its_own_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")
    (before,) = facts.standing(folder)
    assert set(before["tables"]) == set(NAMES)
    left = facts.without([before], GROUPS["ll"])
    assert [set(run["tables"]) for run in left] == [set(GROUPS["ht"])]
    assert facts.without(left, NAMES) == []
    facts.write(folder, FACTS | {"commit": "beef" * 10, "tables": list(GROUPS["ll"]), "earlier": left})
    assert [run["commit"] for run in facts.standing(folder)] == ["beef" * 10, FACTS["commit"]]
    text = table.markdown(folder)
    new, old = text.index("beefbeefbeef"), text.index("c0ffeec0ffee")
    assert new < text.index(table.TITLES["ll"]) < text.index(table.TITLES["overlap"]) < old
    assert old < text.index(table.TITLES["ht"])


def test_the_plots_are_written(tmp_path: Path) -> None:
    written = plot.draw(folder_of(tmp_path / "a"))
    assert sorted(p.name for p in written) == sorted(
        f"{name}.{kind}" for name in ("latency", "ll_sms", "bandwidth", "throughput") for kind in ("png", "svg")
    )
    assert all(path.stat().st_size > 10_000 for path in written)


def test_compare_gives_ratios_worst_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = folder_of(tmp_path / "a"), folder_of(tmp_path / "b", scale=1.05)
    assert compare.main([str(before), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ratios = [float(line.split()[0]) for line in lines]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(1.05, abs=0.01)
    assert all("~" in line for line in lines if "  ll: " in line)  # within the spread of 10 %
    assert not any("~" in line for line in lines if "  floor: " in line)
    assert any("132 SMs" in line for line in lines)
    kinds = [line.split(" us  ")[1] for line in lines]
    assert len(set(kinds)) == len(kinds)
    assert {kind.partition(":")[0] for kind in kinds} == set(NAMES)


@pytest.mark.parametrize("facts", [{"num_gpus": 8}, {"gpu": "NVIDIA B200"}, {"gpu": None}])
def test_compare_refuses_other_machines(
    tmp_path: Path, facts: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = folder_of(tmp_path / "a"), folder_of(tmp_path / "b", **facts)
    assert compare.main([str(before), str(after)]) == 2
    printed = capsys.readouterr()
    assert "not comparable" in printed.err
    assert not printed.out


@pytest.mark.parametrize(("odd", "other"), [("before", {"num_gpus": 8}), ("after", {"gpu": "NVIDIA B200"})])
def test_compare_looks_at_every_run_of_a_folder(
    tmp_path: Path, odd: str, other: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {name: folder_of(tmp_path / name) for name in ("before", "after")}
    for name, folder in folders.items():
        left = facts.without(facts.standing(folder), GROUPS["ll"])
        strange = [run | other if odd == name else run for run in left]
        facts.write(folder, FACTS | {"tables": list(GROUPS["ll"]), "earlier": strange})
    assert compare.main([str(folder) for folder in folders.values()]) == 2
    printed = capsys.readouterr()
    ((field, value),) = other.items()
    assert f"not comparable: {field} is " in printed.err
    assert str(value) in printed.err
    assert not printed.out
