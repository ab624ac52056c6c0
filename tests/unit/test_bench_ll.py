"""What the benchmark says of low latency beside its pairs: the floor, its share in each pair, what `--cases` names."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernels, report
from benchmarks.cases import Case
from benchmarks.gpu import Inputs, crossdock
from benchmarks.gpu.deepep import DeepEp
from benchmarks.gpu.tables import FLOOR, GROUPS, NAMES, TABLES, cases_of, chosen
from ep_kernels import Layout, Mode, jit

ROOT = Path(__file__).resolve().parents[2]
PAIR = Case(Mode.LL, Layout.RANK_MAJOR)


def sample(case: Case, op: str, timing: str, p50: float) -> report.Sample:
    """Each rank sends 100 rows to each other one."""
    return report.Sample("crossdock", op, case, timing, False, [[p50] * 3], [[9.0]], torch.full((1, 4, 4), 100), 64)


def floor(op: str, overlapped: bool, blocks: int, *runs: float) -> report.Floor:
    return report.Floor(op, overlapped, blocks, 4, [[value] * 3 for value in runs])


# Pairs against floor + bound.


def test_a_pair_as_a_multiple_of_floor_and_bound() -> None:
    """Bound 24.58 us + floor 5.42 us: 60 us are twice as much."""
    bound = 300 * 2 * 14336 / 350e3
    line = report.above_floor(sample(PAIR, "pair", "graph", 60.0).line(), 30.0 - bound)
    assert line["floor_us"] == f"{30.0 - bound:.2f}"
    assert line["multiple"] == "2.00"


def test_without_a_floor_there_is_no_multiple() -> None:
    line = report.above_floor(sample(PAIR, "pair", "graph", 60.0).line(), None)
    assert (line["floor_us"], line["multiple"]) == ("", "")


@pytest.mark.parametrize(
    ("case", "op", "timing"),
    [(PAIR, "dispatch", "eager"), (replace(PAIR, mode=Mode.HT, layout=Layout.FLAT), "pair", "graph")],
)
def test_only_graphs_of_low_latency_pairs_have_a_floor(case: Case, op: str, timing: str) -> None:
    line = sample(case, op, timing, 60.0).line()
    assert report.above_floor(line, 5.0) == line


def test_the_floor_is_the_fastest_exchange() -> None:
    found = [
        floor("launch", True, 1, 1.0),
        floor("exchange", False, 1, 6.0),
        floor("exchange", True, 132, 4.5),
        floor("exchange", True, 1, 4.0, 4.2),
        floor("release", True, 1, 3.0),
    ]
    assert report.floor_us(found) == 4.0
    assert report.floor_us(found[:1]) is None
    assert report.floor_us([sample(PAIR, "pair", "graph", 1.0)]) is None


def test_runs_are_merged() -> None:
    both = floor("exchange", True, 1, 4.0).merged(floor("exchange", True, 1, 5.0, 6.0))
    line = both.line()
    assert (line["p50_us"], line["runs"], line["iterations"], line["spread_pct"]) == ("5.00", 3, 9, "50.0")
    times = {name: [[value]] for name, value in (("gemm", 180.0), ("alone", 160.0), ("send", 5.0), ("receive", 8.0))}
    first = report.Overlap("dispatch", PAIR, "gemm", times, 132)
    again = replace(first, times=times | {"gemm": [[140.0]]})
    assert first.line()["ratio"] == "1.125"
    assert again.merged(again).merged(first).line()["ratio"] == "0.875"
    assert first.merged(again).line()["runs"] == 2


def test_all_columns_reach_the_csv(tmp_path: Path) -> None:
    lines = [report.above_floor(sample(PAIR, op, timing, 9.0).line(), 4.0) for op, timing in
             (("dispatch", "eager"), ("pair", "graph"))]  # fmt: skip
    report.write(tmp_path, "ll", lines)
    first, second = report.read(tmp_path, "ll")
    assert list(first) == [*report.GPU_COLUMNS, "floor_us", "multiple"]
    assert (first["multiple"], second["floor_us"]) == ("", "4.00")


# Which tables.


def test_the_floor_comes_before_what_is_compared_with_it() -> None:
    assert chosen("ht,ll", "") == [FLOOR, "ht", "ll"]
    assert chosen("ht", "") == ["ht"]
    assert chosen("", "") == list(NAMES)
    assert chosen("ll,floor", "") == ["ll", FLOOR]
    assert chosen("", "ll") == ["floor", "ll", "ll_sms", "overlap"]
    assert {name for group in GROUPS.values() for name in group} == set(NAMES)


@pytest.mark.parametrize("extent", ["full", "core", "quick"])
def test_every_number_of_multiprocessors_has_both_layouts(extent: str) -> None:
    cases = [measured.case for measured in cases_of("ll_sms", 4, extent)]
    layouts = {(case.tokens, case.num_sms): set() for case in cases}  # type: dict[tuple[int, int | None], set[Layout]]
    for case in cases:
        layouts[case.tokens, case.num_sms].add(case.layout)
    assert {tokens for tokens, _ in layouts} == {8, 128}
    assert all(found == {Layout.RANK_MAJOR, Layout.EXPERT_MAJOR} for found in layouts.values())
    if extent == "full":
        assert sorted({sms for _, sms in layouts if sms}) == [8, 16, 24, 32, 48, 64, 96, 132]


def test_core_measures_single_calls_where_they_are_promised() -> None:
    eager = {m.case.tokens for m in cases_of("ll", 4, "core") if any(loop.timing == "eager" for loop in m.loops)}
    assert eager == {1, 128}
    assert all(any(loop.timing == "graph" for loop in m.loops) for m in cases_of("ll", 4, "core"))
    assert "overlap" in TABLES


# The kernels of the floor.


def test_the_kernels_of_the_floor_are_lean() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from benchmarks.gpu import floor as floors

    found = {r.entry: r for r in kernels.resources_of(jit.compile_source(floors.source(), "floor", "sm_90a"))}
    assert set(found) == set(floors.KERNELS.values())
    for entry in found.values():
        assert entry.spill_bytes == entry.stack_bytes == entry.shared_bytes == 0
        assert entry.registers <= 32, entry


def test_what_arrived_is_checked() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from benchmarks.gpu import floor as floors

    words = [[floors.word(rank, block, 9) for rank in range(3)] for block in range(2)]
    assert len({word for row in words for word in row} | {floors.word(0, 0, 8)}) == 7
    counts, arrived = torch.full((4, 2), 9), torch.tensor([words] * 4)
    assert floors.fault(counts, arrived, 0, 9) == ""
    assert "ended at the deadline" in floors.fault(counts, arrived, 2, 9)
    assert "24 of 24" in floors.fault(counts + 1, arrived, 0, 10)
    late = arrived.clone()
    late[3, 1, 0] = floors.word(0, 1, 8)
    assert "1 of 24" in floors.fault(counts, late, 0, 9)
    swapped = arrived.flip(1)
    assert "24 of 24" in floors.fault(counts, swapped, 0, 9)
    counts[2, 1] = 8
    assert "1 blocks did not exchange 9 times" in floors.fault(counts, arrived, 0, 9)


@pytest.mark.gpu(2)
def test_floor_and_overlap_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.run", "--device", "cuda", "--tables", "floor,overlap", "--quick"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": paths, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, text=True, timeout=200, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    with (tmp_path / "floor.csv").open(newline="") as file:
        floors = list(csv.DictReader(file))
    assert len(floors) == 12
    assert all(0 < float(line["p50_us"]) < 1000 for line in floors)
    assert len(report.read(tmp_path, "overlap")) == 8


# The overlap's loop, on a clock of its own: which part of an iteration each figure is.


class Clock:
    """Microseconds of a GPU that does one thing after the other."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def pass_us(self, duration_us: float) -> None:
        self.now_us += duration_us

    def events(self, count: int) -> list[Any]:
        return [Mark(self) for _ in range(count)]


class Mark:
    """As torch.cuda.Event."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.at_us = clock, -1.0

    def record(self) -> None:
        self.at_us = self._clock.now_us

    def synchronize(self) -> None:
        assert self.at_us >= 0

    def elapsed_time(self, end: Mark) -> float:
        return (end.at_us - self.at_us) / 1e3


class Pretended(crossdock.Crossdock):
    """Sends in 7 us (combine: 8) and receives in 11 (12); the product takes 50 us more while something is open."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.sms, self.open, self.sent = clock, {"dispatch": 99}, 0, []  # type: ignore[var-annotated]

    def result(self, inputs: Inputs) -> torch.Tensor:
        return torch.zeros(2, 2)

    def tokens(self, received: Any) -> torch.Tensor:
        return torch.zeros(2, 2)

    def _half(self, name: str, send_us: float, receive_us: float) -> Callable[[], Any]:
        self.clock.pass_us(send_us)
        self.open += 1
        self.sent.append(name)

        def receive() -> str:
            self.clock.pass_us(receive_us)
            self.open -= 1
            return name

        return receive

    def send_dispatch(self, inputs: Inputs) -> Callable[[], Any]:
        return self._half("dispatch", 7.0, 11.0)

    def send_combine(self, y: torch.Tensor, received: Any, out: torch.Tensor) -> Callable[[], Any]:
        assert received == "dispatch"
        return self._half("combine", 8.0, 12.0)


def test_each_part_of_an_overlap_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    from benchmarks.gpu import overlap

    clock, late = Clock(), []
    backend = Pretended(clock)
    product = SimpleNamespace(out=torch.zeros(1), want=torch.zeros(1), duration_us=lambda: 160.0)
    product.run = lambda: clock.pass_us(160.0 + 50.0 * backend.open)
    monkeypatch.setattr(overlap.Product, "drawn", lambda seed: product)
    monkeypatch.setattr(overlap, "events", clock.events)
    monkeypatch.setattr(overlap, "sleep", lambda us: (late.append(us), clock.pass_us(us)))
    monkeypatch.setattr(overlap.dist, "all_reduce", lambda *_: None)
    bench = SimpleNamespace(
        backend=backend, case=replace(PAIR, ranks=3), rank=1, seed=0, sets=[None] * 12, faults=[], verified=[],
        watch=SimpleNamespace(align=clock.pass_us), given=lambda received: torch.zeros(2, 2),
    )  # fmt: skip
    bench.verify = lambda out, inputs, what: bench.verified.append(what)
    found = overlap.measure(bench, 30)  # type: ignore[arg-type]
    early = [float(number % 3 == 1) for number in range(8, 38)]
    for op, send_us, receive_us in (("dispatch", 7.0, 11.0), ("combine", 8.0, 12.0)):
        want = {"alone": 160.0, "gemm": 210.0, "send": send_us, "receive": receive_us}
        for name, value in want.items():
            assert found[op].times[name] == [pytest.approx([value * each for each in early], abs=1e-3)], (op, name)
    assert (found["dispatch"].sms, found["combine"].sms) == (99, None)
    assert backend.sent == ["dispatch", "combine"] * 38
    assert set(late) == {80.0}
    assert len(late) == 3 * sum(number % 3 != 1 for number in range(38))
    assert len(bench.verified) == 12
    product.out = torch.ones(1)
    overlap.measure(bench, 5)  # type: ignore[arg-type]
    assert len(bench.faults) == 12


@pytest.mark.parametrize(("tokens", "most"), [(1, 4), (8, 8), (30, 32)])
def test_deepep_takes_steps_of_four_tokens(tokens: int, most: int) -> None:
    taken: list[int] = []

    class Buffer:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        @staticmethod
        def get_low_latency_rdma_size_hint(tokens: int, *_: int) -> int:
            taken.append(tokens)
            return 1

        def low_latency_dispatch(self, x: torch.Tensor, ids: torch.Tensor, tokens: int, *_: int, **__: Any) -> Any:
            taken.append(tokens)
            return x, None, None, None, None

    case = Case(Mode.LL, Layout.EXPERT_MAJOR, ranks=2, tokens=tokens, hidden=16, experts=4, topk=2)
    inputs: Any = SimpleNamespace(x=torch.zeros(tokens, 16), topk_ids=torch.zeros(tokens, 2, dtype=torch.int32))
    received = DeepEp(case, SimpleNamespace(Buffer=Buffer)).dispatch(inputs)
    assert (taken, received[0] is inputs.x) == ([most, most], True)
