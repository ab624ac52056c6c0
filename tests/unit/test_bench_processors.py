"""Programs of the benchmarks for processors, whole: their rows, what a failure costs, exit status.

What starts processes is replaced where these take seconds to come: by threads, by what they would have said.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import facts, measure, network, network_rates, peers, placement, resume, run
from benchmarks.cases import Case, make_steps
from benchmarks.report import read
from benchmarks.service import __main__ as service
from benchmarks.service import load as service_load
from benchmarks.service import path, turns
from ep_kernels import Layout, Mode
from tests.observability import overhead, overhead_cpu


def failures(folder: Path) -> list[str]:
    found: list[str] = facts.read(folder)["failures"]
    return found


def small(case: Case) -> Case:
    return replace(case, tokens=4, hidden=64, experts=8, topk=2)


def by_threads(case: Case, job: Callable[..., Any], rounds: int) -> list[list[float]]:
    """As `network._in_processes`."""
    store = dist.HashStore()
    with ThreadPoolExecutor(case.ranks) as pool:
        return list(pool.map(lambda rank: job(case, rank, store, rounds), range(case.ranks)))


def timed(case: Case, backends: tuple[str, ...], rounds: int, seed: int) -> measure.Result:
    """As `measure.measure`: each backend takes a millisecond longer than the one before."""
    took = {
        name: {op: [1e-3 * (1 + n)] * rounds for op in ("dispatch", "combine")}
        for n, name in enumerate((*backends, *(f"{b}{measure.PAYLOAD}" for b in backends[-1:]), measure.COPY))
    }
    return measure._summary(case, [took] * case.ranks, seed)


@pytest.mark.parametrize(("promise", "status"), [("1.5", 0), ("3", 1)])
def test_the_cpu_transport_beside_gloo(
    promise: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "measure", timed)
    words = ["--device", "cpu", "--rounds", "3", "--ranks", "2", "--promise", promise, "--out", str(tmp_path)]
    assert run.main(words) == status
    for mode in ("ll", "ht"):
        found = {(line["backend"], line["op"], line["tokens"]) for line in read(tmp_path, mode)}
        assert found >= {(b, op, t) for b in run.BACKENDS for op in ("dispatch", "combine") for t in ("1", "8", "128")}
    assert facts.read(tmp_path)["config"]["rounds"] == 3


def test_a_rank_of_the_cpu_transport_and_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process that `measure` starts, alone."""
    monkeypatch.setattr(measure, "WARMUP", 1)
    case, sent = small(Case(Mode.LL, Layout.RANK_MAJOR, ranks=1)), list[Any]()
    measure._rank(case, ("crossdock",), 2, 3, 0, str(tmp_path / "store"), SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    assert {name: {op: len(took) for op, took in ops.items()} for name, ops in sent[0].items()} == {
        name: {"dispatch": 2, "combine": 2} for name in ("crossdock", measure.COPY)
    }


def test_ring_proxy_and_providers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"_in_processes": by_threads, "measure": timed, "PAUSE_S": 0.001, "OTHER_BYTES": 64}.items():
        monkeypatch.setattr(network, name, value)
    monkeypatch.setattr(network, "WARMUP", 1)
    monkeypatch.setattr(network, "Case", lambda *given, **fields: small(Case(*given, **fields)))
    monkeypatch.setattr(network, "messages", lambda rounds, whole=network.messages: whole(network.BLOCKS))
    monkeypatch.setattr(network, "idle", lambda rounds, whole=network.idle: whole(2))
    assert network.main(["--rounds", "2", "--out", str(tmp_path)]) == 0
    kinds = [line["what"].partition(":")[0] for line in read(tmp_path, "network")]
    assert list(dict.fromkeys(kinds)) == ["ring", "message", "dispatch", "stream", "combine", "wire"]
    assert kinds.count("wire") == 4
    monkeypatch.setattr(network, "dispatches", lambda job, rounds: 1 // 0)
    assert network.main(["--rounds", "2", "--out", str(tmp_path)]) == 1
    assert {line["what"].partition(":")[0] for line in read(tmp_path, "network")} == {"ring", "message", "wire"}
    assert len(failures(tmp_path)) == 2


def test_a_network_of_a_set_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_to = list[float]()
    monkeypatch.setattr(network_rates, "set_rate", set_to.append)
    monkeypatch.setattr(network_rates, "measure", timed)
    monkeypatch.setattr(network, "Case", lambda *given, **fields: small(Case(*given, **fields)))
    assert network.main(["--inside", "--gb-s", "0.5", "1", "--rounds", "2", "--out", str(tmp_path)]) == 0
    lines = read(tmp_path, "network")
    assert set_to == [0.5, 1]
    assert len(lines) == 2 * 9
    assert [line["value"] for line in lines if line["what"] == "combine: one hop's time by two hops'"] == ["0.5"] * 2
    monkeypatch.setattr(network, "become", lambda arguments, module: "no namespaces here")
    for words in (["--gb-s", "0"], ["--gb-s", "1"]):
        with pytest.raises(SystemExit):
            network.main(words)


def test_bytes_that_cross() -> None:
    case = small(Case(Mode.HT, Layout.FLAT, ranks=4))
    step = make_steps(case, 1, 5)[0]
    once = sum(sum(network.runs(case, step, rank)) for rank in range(4))
    assert network_rates.crossing(case, step, once_per_host=True) == once
    wanted = 0
    for source, ids in enumerate(step.topk_ids):
        for chosen in (ids // (case.experts // 4)).tolist():
            wanted += len({rank for rank in chosen if rank // 2 != source // 2})
    assert network_rates.crossing(case, step, once_per_host=False) == wanted * case.row_bytes > once


def test_the_rate_is_that_of_the_loop_back_device() -> None:
    code = "from benchmarks import network_rates; network_rates.set_rate(0.25)"
    words = [sys.executable, "-c", f"{code}; import os; os.system('tc qdisc show dev lo')"]
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", *words],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    except OSError as error:
        pytest.skip(f"needs unshare: {error.strerror}")
    if "tbf" not in done.stdout:
        pytest.skip(f"needs user namespaces and tc: {done.stderr.strip()[-200:]}")
    assert "rate 2Gbit" in done.stdout


def test_where_experts_are_placed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement, "CASES", placement.CASES[:2])
    assert placement.main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    assert len(read(tmp_path, "placement")) == 2
    first, *_ = placement.CASES
    monkeypatch.setattr(
        placement, "measure", lambda case, seeds, whole=placement.measure: whole(case, seeds - (case == first))
    )
    assert placement.main(["--seeds", "1", "--out", str(tmp_path)]) == 1
    assert len(read(tmp_path, "placement")) == len(failures(tmp_path)) == 1


def test_a_control_plane_with_simulated_workers(tmp_path: Path) -> None:
    """In a process of its own: grpc keeps to the first event loop that it sees."""
    code = "import sys; from benchmarks import control; control.STEADY_S = 0.2; sys.exit(control.main(sys.argv[1:]))"
    words = ["--ranks", "0", "2", "--out", str(tmp_path)]  # nobody of no ranks can be lost
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    (line,) = read(tmp_path, "control")
    assert (line["ranks"], float(line["form_s"]) > 0) == ("2", True)
    assert [fault.partition(":")[0] for fault in failures(tmp_path)] == ["0 ranks"]


def test_how_long_clients_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With losses as a scene would tell of them; tests/services has real ones."""

    def measured(folder: Path, losses: Sequence[str], *, elastic: bool, spare: bool) -> Iterator[resume.Row]:
        assert (folder / "model" / "config.json").exists()
        for what in losses:
            if not elastic and spare:
                raise TimeoutError("no spare came")
            yield resume.Row(elastic, spare, what, 1.0, 2.0, 3.0, 4.0, 5)

    monkeypatch.setattr(resume, "measure", measured)
    assert resume.main(["--kills", "1", "--stops", "1", "--inner", "16", "--out", str(tmp_path)]) == 1
    found = [(line["elastic"], line["spare"], line["what"]) for line in read(tmp_path, "resume")]
    assert found == [
        ("True", "False", "kill"), ("True", "False", "stop"), ("True", "True", "kill"), ("False", "False", "kill"),
    ]  # fmt: skip
    assert failures(tmp_path) == ["elastic False, spare True: TimeoutError: no spare came"]


def test_experts_from_other_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small ones are really read; groups that grow are in tests/services."""

    def grown(model: Path, source: str, turn: int) -> Iterator[peers.Grown]:
        if source == "disk":
            raise TimeoutError("not serving")
        yield peers.Grown(source, turn, 1.0, 0.5, 2.0, 3.0, 7, 0, 7)

    def beside(model: Path, measure: Any, rounds: int) -> Any:
        ours, theirs = multiprocessing.Pipe()
        threading.Thread(target=peers.hold, args=(model, theirs), daemon=True).start()
        return measure(model, ours, rounds)

    monkeypatch.setattr(peers, "grow", grown)
    monkeypatch.setattr(peers, "beside", beside)
    monkeypatch.setattr(peers, "PRODUCTS", 3)
    assert peers.main(["--rounds", "2", "--hidden", "64", "--out", str(tmp_path)]) == 1
    rates = read(tmp_path, "rates")
    assert [line["way"].partition(",")[0] for line in rates] == [
        "copy loop", "peer", "TCP alone", "peer", "copy loop", "peer",
    ]  # fmt: skip
    assert all(float(line["gb_s"]) > 0 for line in rates)
    assert [float(line["ms"]) > 0 for line in read(tmp_path, "steps")] == [True] * 3
    assert [line["source"] for line in read(tmp_path, "grow")] == ["peer", "peer"]
    assert failures(tmp_path) == ["disk, 0: TimeoutError: not serving", "disk, 1: TimeoutError: not serving"]


LOAD = SimpleNamespace(run=lambda job: service_load.Measured([0.002, 0.004], 0.006))
PHASES = {"queue": 0.1, "dispatch": 0.2, "experts": 1.0, "combine": 0.2, "request": 2.0, "tokens": 1.0}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that answers in 2 and 4 ms, and says where the time went."""

    @contextmanager
    def group(bench: service.Bench, here: str, there: Any) -> Iterator[str]:
        bench._pages = []
        yield "here"

    counters = SimpleNamespace(means_since=lambda before: PHASES)
    replaced = {
        "LoadProcesses": lambda number: nullcontext(LOAD), "Counters": lambda pages: counters,
        "EchoProcess": lambda: nullcontext(SimpleNamespace(address="there")),
        "SHAPES": {name: (service_load.Sizes(64, 8, 2), 16) for name in service.SHAPES},
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(service, name, value)
    monkeypatch.setattr(service.Bench, "_group", group)


@pytest.mark.usefixtures("served")
def test_the_service_beside_its_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--paths", "in-process,echo,unix,grpc", "--tokens", "1", "--clients", "1", "--seconds", "0.01"]
    words += ["--attach", "0", "--out", str(tmp_path)]
    assert service.main(words) == 0
    for shape in service.SHAPES:
        found = [(line["path"], line["loop"]) for line in read(tmp_path, "service") if line["shape"] == shape]
        assert [path for path, loop in found if not loop] == [f"in-process, threads={n}" for n in threads()]
        assert [one for one in found if one[1]] == [
            ("echo", "closed"), ("unix", "closed"), ("unix", "open"), ("grpc", "closed"),
        ]  # fmt: skip
    assert any(line["what"].startswith("unix") for line in read(tmp_path, "goals"))
    in_process = service.Bench._in_process

    def broken(bench: service.Bench, seconds: float) -> Iterator[Any]:
        yield from in_process(bench, seconds)
        if bench.shape == "model":
            raise RuntimeError("no")

    monkeypatch.setattr(service.Bench, "_in_process", broken)
    assert service.main(words) == 1
    counts = Counter(line["shape"] for line in read(tmp_path, "service"))
    assert counts == {"model": len(threads()), "path": len(threads()) + 4}
    assert failures(tmp_path) == ["model: RuntimeError: no"]


def threads() -> list[int]:
    return [1, service.usable_cpus()]


def test_where_the_time_of_a_call_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one call of 10 ms, of which each part takes one."""
    names = ["read", "submit", "exchange", "dispatch", "experts", "combine", "answer"]
    stamps = [(name, 1.0 + n / 1000, 1.001 + n / 1000) for n, name in enumerate(names)]
    group = SimpleNamespace(
        address="here", stop=lambda: None, taken=lambda: [stamps],
        experts=SimpleNamespace(measure=lambda *_: [0.001]),
    )  # fmt: skip
    replaced = {
        "Group": lambda folder: group, "_wait_serving": lambda group: None, "floor": lambda tokens: [1 / (tokens - 7)],
        "calls": lambda *_: [(0.9995, 1.0095)],
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(path, name, value)
    assert path.main(["--tokens", "1,7,8", "--out", str(tmp_path)]) == 1
    parts = {line["part"]: float(line["p50_us"]) for line in read(tmp_path, "path") if line["tokens"] == "8"}
    assert parts["experts"] == 1000.0
    assert {"in one process", "floor"} < set(parts)
    assert {line["tokens"] for line in read(tmp_path, "path")} == {"1", "7", "8"}
    assert failures(tmp_path) == ["7 tokens: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("rounds_before", [5, 1])
def test_two_trees_in_turns(rounds_before: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = []

    class Told:
        """As a Tree; the second one breaks in a later round."""

        def __init__(self, folder: Path) -> None:
            self.name, self.asked = folder.name, 0

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *_: object) -> None:
            left.append(self.name)

        def ask_undisturbed(self, most: float, again: list[int], *words: object) -> list[float]:
            self.asked += words[-1] == "tcp"
            if self.asked > rounds_before and self.name == "after":
                raise RuntimeError("after: ended before 'took'")
            return [1.0, 2.0, 3.0, 400.0]

    monkeypatch.setattr(turns, "Tree", Told)
    out = tmp_path / "table.txt"
    words = ["before", "after", "--rounds", "2", "--ways", "tcp", "--tokens", "1", "--out", str(out)]
    assert turns.main(words) == (rounds_before == 1)
    whole = 2 - (rounds_before == 1)
    names = [(line.partition(",")[0], line.split()[3]) for line in out.read_text().splitlines()[:-1]]
    assert names == [(way, tree) for way in ("in-process", "tcp") for tree in ("after", "before")][-2 - whole :]
    assert set(left) == {"before", "after"}


def test_latency_records_on_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turns as a clock says; records cost 2 %."""

    def rows(seconds: float, costs: list[overhead.Cost]) -> Iterator[overhead.Row]:
        costs.append(overhead.Cost("a record", "ll", 0.5, "us"))
        yield overhead.row_of("cpu", "records", "ll", 128, [(1e-3, 1.02e-3)] * 8)
        raise RuntimeError("ht: a rank died")

    monkeypatch.setattr(overhead_cpu, "rows", rows)
    assert overhead.main(["--out", str(tmp_path)]) == 1
    (line,) = read(tmp_path, "overhead")
    assert (line["op"], float(line["overhead_percent"])) == ("records", pytest.approx(2.0))
    assert [cost["what"] for cost in read(tmp_path, "cost")] == ["a record"]
    assert failures(tmp_path) == ["operations: RuntimeError: ht: a rank died"]
