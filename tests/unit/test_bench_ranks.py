"""Programs of the benchmarks for groups of GPUs, whole, without one: their rows, what a failure costs, exit status.

GPUs are pretended (tests/emulator/cuda.py), transports are of processors; of the `nvlink` transport the bring-up runs,
and kernels of the benchmark's own.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import facts
from benchmarks.gpu.collective_cases import ORDERS
from benchmarks.gpu.tables import GROUPS
from benchmarks.report import read
from tests.tools import needs
from tests.unit import bench_ranks
from tests.worlds import World

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64")
needs_emulator = needs("g++")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    pool = World(2)
    yield pool
    pool.close()


def failures(folder: Path) -> list[str]:
    found: list[str] = facts.read(folder)["config"]["failures"]
    return found


LINES = {"floor": 12, "ll": 4, "ll_sms": 1, "overlap": 2, "ht": 4, "formats": 1, "sweep": 2, "layer": 4, "auto": 1}
"""Of one case, on crossdock and by NCCL where that has it."""


@needs_emulator
@pytest.mark.parametrize("cases", GROUPS)
def test_tables_of_dispatch_and_combine(world: World, cases: str, tmp_path: Path) -> None:
    words = ["--cases", cases, "--backends", "crossdock,nccl", "--out", str(tmp_path)]
    for status, printed in world.run(bench_ranks.moe, words):
        assert status == 0, printed
    for name in GROUPS[cases]:
        lines = read(tmp_path, name)
        assert len(lines) == LINES[name], name
        assert all(float(line["p50_us"]) > 0 for line in lines)
    assert failures(tmp_path) == []


def test_gpus_as_two_hosts(world: World, tmp_path: Path) -> None:
    words = ["--ll", "4", "--exact", "4", "--ht", "4", "--out", str(tmp_path)]
    for status, printed in world.run(bench_ranks.hosts, words):
        assert status == 0, printed
    lines = read(tmp_path, "nodes")
    assert len(lines) == 3 * 3 + 2
    assert all(float(line[name]) > 0 for line in lines for name in ("p50_us", "wire_bytes", "theory_bytes"))
    assert [line["what"].partition(":")[0] for line in read(tmp_path, "proxy")] == [
        "ring", "messages of 8 bytes, both ways", "processor of an idle rank",
    ]  # fmt: skip


def test_wrong_results_of_two_hosts_are_no_figures(world: World, tmp_path: Path) -> None:
    words = ["--ll", "4", "--exact", "", "--ht", "4,8", "--out", str(tmp_path)]
    for status, printed in world.run(bench_ranks.hosts, words, True):
        assert status == 1, printed
    assert {line["mode"] for line in read(tmp_path, "nodes")} == {"ll"}
    assert [fault.split()[2] for fault in failures(tmp_path)] == ["T=4:", "T=8:"]


COLLECTIVES = (
    "all_gather", "reduce_scatter", "all_reduce", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
    "matmul_beside_gather",
)  # fmt: skip


def test_collectives_of_ours_and_others(world: World, tmp_path: Path) -> None:
    ops = {*COLLECTIVES, "matmul", "fsdp_step"}
    backends = "crossdock,nccl,nccl_symm,nccl_ce,cublas"
    words = ["--runs", "1", "--iterations", "2", "--backends", backends, "--ops", ",".join(ops)]
    for status, printed in world.run(bench_ranks.collectives, [*words, "--out", str(tmp_path)]):
        assert status == 0, printed
    lines = read(tmp_path, "collectives")
    assert {line["op"] for line in lines} == ops
    assert all(float(line["p50_us"]) > 0 for line in lines)
    assert all({line["backend"] for line in lines if line["op"] == op} >= {"crossdock", "nccl"} for op in COLLECTIVES)
    assert {line["algorithm"] for line in lines if line["op"] == "matmul_beside_gather"} == {*ORDERS, "sequential"}
    assert {line["backend"] for line in lines} == {*backends.split(","), "crossdock_staged"}
    assert {target["t"] for target in read(tmp_path, "targets")} == {"3", "6", "7"}, "others are of sizes of their own"
    assert failures(tmp_path) == []


def test_wrong_sums_cost_no_other_operation(world: World, tmp_path: Path) -> None:
    words = ["--runs", "1", "--iterations", "2", "--backends", "crossdock", "--ops", "all_gather,reduce_scatter"]
    for status, printed in world.run(bench_ranks.collectives, [*words, "--out", str(tmp_path)], True):
        assert status == 1, printed
    assert {line["op"] for line in read(tmp_path, "collectives")} == {"all_gather"}
    assert failures(tmp_path)
    assert all("reduce_scatter" in fault for fault in failures(tmp_path))


@pytest.mark.parametrize("gather", ["nccl", "crossdock"])
def test_steps_of_fsdp(world: World, gather: str) -> None:
    words = ["--model", "tiny", "--steps", "3", "--all-gather", gather]
    (status, printed), (other, nothing) = world.run(bench_ranks.training, words)
    assert (status, other, nothing) == (0, 0, "")
    told = json.loads(printed)
    assert (told["all_gather"], told["ranks"], told["steps"]) == (gather, 2, 3)
    assert len(told["losses_sha256"]) == 64


@pytest.mark.parametrize(("last", "ended"), [(6.0, (0, None)), (6.5, (1, 1))])
def test_steps_of_zero(world: World, last: float, ended: tuple[int, int | None]) -> None:
    """Losses that differ from DeepSpeed's own are told, and the exit status."""
    (status, printed), (other, nothing) = world.run(bench_ranks.zero, ["--model", "tiny", "--steps", "2"], last)
    told = [json.loads(line) for line in printed.splitlines()]
    assert [line["all_gather"] for line in told] == ["deepspeed", "crossdock"]
    assert {(status, line["first_other_loss"]) for line in told} == {ended}
    assert (other, nothing) == (status, "")
