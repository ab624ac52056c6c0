"""The bench of vLLM's backends without vLLM or a GPU: what is run, what times mean, what is said where nothing runs."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import facts
from benchmarks.vllm import QWEN3, Refused, cases, launch, models, plan, tokens, trace
from benchmarks.vllm import __main__ as bench
from benchmarks.vllm.plan import Outcome

AG = plan.Run(plan.BACKENDS["ag"], "graphs")
VERSIONS = ("0.26.0", "2.11.0", "H200")

# What is asked for.


def test_the_usual_runs_are_those_that_are_published() -> None:
    found = [(run.backend.slot, run.backend.tier, run.mode) for run in plan.runs_of(plan.USUAL, eager=False)]
    path = Path(__file__).parents[2] / "docs/results/2026-11-28-h200x2-vllm/vllm-steps.csv"
    with path.open(newline="", encoding="utf-8") as file:
        published = [(line["backend"], line["tier"], line["mode"]) for line in csv.DictReader(file)]
    assert found == list(dict.fromkeys(published))


def test_eager_turns_graphs_off_and_names_each_run_once() -> None:
    assert [run.name for run in plan.runs_of("ll,ag,ag+eager", eager=True)] == [
        "deepep_low_latency-native-eager",
        "allgather_reducescatter-built-in-eager",
    ]


def test_dual_batch_overlap_is_asked_for_where_vllm_has_it_and_proven_by_the_log() -> None:
    runs = plan.runs_of("ll+dbo,ht1+dbo,ll1+eager+dbo,ll1+dbo+eager,ll", eager=False)
    assert [run.mode for run in runs] == ["graphs+dbo", "eager+dbo", "eager+dbo", "graphs"]
    assert [len(run.signs) for run in runs] == [2, 2, 2, 1]
    assert plan.environment(runs[0], 0, 2, 5)["VLLM_LOGGING_LEVEL"] == "DEBUG", "vLLM says it there"
    for name in ("ag+dbo", "deepep_v2+dbo"):
        with pytest.raises(Refused, match=rf"expected \+dbo behind one of deepep_low_latency,.* got '{name[:2]}"):
            plan.runs_of(name, eager=False)


def test_an_engine_is_told_its_backend_and_its_mode() -> None:
    for run in plan.runs_of("ag,deepep_v2,ht1,ll+eager,ll+dbo,ht+dbo", eager=False):
        given = plan.engine_arguments(run, "folder", 0, "dummy")
        assert given["all2all_backend"] == run.backend.slot
        assert given.get("enforce_eager", False) == run.eager == ("compilation_config" not in given)
        assert given.get("enable_dbo", False) == run.halved == ("dbo_decode_token_threshold" in given)
        assert "max_num_batched_tokens" not in given
        assert plan.environment(run, 1, 2, 5)["CROSSDOCK_VLLM"] == run.backend.tier.replace("built in", "off")
    assert plan.engine_arguments(AG, "folder", 512, "dummy")["max_num_batched_tokens"] == 512
    assert plan.LONG + plan.START <= plan.MOST_LENGTH
    assert plan.PROMPT + 1 <= plan.MOST_LENGTH


# Where nothing can be measured.


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None, gpus: int) -> None:
    """This vLLM and so many GPUs."""

    def version_of(name: str) -> str:
        if name != "vllm":
            return "3.6.0"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(facts, "of_gpus", lambda _: {})


# Figures.


def test_a_decode_step_is_the_time_between_two_tokens() -> None:
    assert plan.step_ms([1.0, 1.1, 1.2], [1.0 + 0.04, 1.1 + 0.08, 1.2 + 9], 11) == pytest.approx(8.0)


def kernel(name: str, launch: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": launch}}


def test_a_step_is_one_launch_of_many_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FEWEST", 3)
    first = [kernel("a", 7, 10, 4), kernel("b", 7, 12, 4), kernel("a", 7, 20, 1)]
    second = [kernel("b", 8, 50, 2), kernel("a", 8, 40, 2), kernel("b", 8, 49, 10)]
    others = [kernel("alone", 1, 0, 5), {"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}]
    steps = trace.replays([*second, *others, *first])
    assert [trace.replay_of(step) for step in steps] == [trace.Replay(11, 7, 3), trace.Replay(19, 12, 3)]
    assert trace.median_of([trace.replay_of(step) for step in steps]) == trace.Replay(15, 9.5, 3)
    assert trace.kernel_times(steps) == [trace.KernelTime("b", 1.5, 8), trace.KernelTime("a", 1.5, 3.5)]
    run = plan.runs_of("ag", eager=False)[0]
    rows = plan.kernel_rows(run, Outcome([{"kernels": [("b", 1.5, 8.0)]}, {}]))
    assert rows == [plan.KernelRow("allgather_reducescatter", "built in", 0, "b", 1.5, 8.0)]


def test_a_table_shows_the_median_of_the_slowest_rank() -> None:
    results = [
        {"decode": [5.0, 3.0, 40.0], "prefill": [200.0, 201.0, 199.0], "graph": [1.9], "most_tokens": 256},
        {"decode": [4.0, 6.0, 7.0], "prefill": [1.0, 2.0, 3.0], "most_tokens": 256},
    ]
    rows = plan.rows_of(AG, 2, Outcome(results), VERSIONS)
    assert [(row.rank, row.step, row.sorted_run, row.ms) for row in rows[:4]] == [
        (0, "decode", 0, 3.0), (0, "decode", 1, 5.0), (0, "decode", 2, 40.0), (0, "prefill", 0, 199.0),
    ]  # fmt: skip
    broken = plan.rows_of(plan.runs_of("ll", eager=False)[0], 2, Outcome(fault="rank 1 ended with 9", rank=1), VERSIONS)
    headings, first, second = plan.table([*rows, *broken]).splitlines()
    assert headings.split() == [
        "backend",
        "tier",
        "mode",
        "most_tokens",
        "decode_ms",
        "prefill_ms",
        "graph_ms",
        "fault",
    ]
    assert first.split() == ["allgather_reducescatter", "built", "in", "graphs", "256", "6.00", "200.00", "1.90"]
    assert second.split()[-5:] == ["rank", "1", "ended", "with", "9"]


# The expert kernels' cases.


def test_each_batched_prefill_stands_beside_a_standard_one_of_as_many_tokens() -> None:
    found = cases.cases_of(32, 8192)
    batched = [case for case in found if case.step == "prefill" and case.slots]
    assert [(case.slots, case.engine_steps) for case in batched] == [(256, 32), (1024, 8)]
    for case in batched:
        assert case.tokens * case.engine_steps == 8192
        assert cases.Case("prefill", case.tokens, 0, case.engine_steps) in found
    assert [case.slots for case in found if case.step == "decode"] == [0, 256, 32]
    assert all(case.tokens <= (case.slots or 8192) for case in found)


def test_a_row_counts_all_layers_and_all_steps() -> None:
    case = cases.Case("prefill", 256, 256, 32)
    rows = cases.rows_of(case, QWEN3, 2, "Experts", "m=64", [30.0, 10.0, 20.0], cases.Where("H200", "1", "2", "3"))
    assert [row.layer_us for row in rows] == [10.0, 20.0, 30.0]
    assert rows[0].total_ms == pytest.approx(10.0 * 16 * 32 / 1e3)
    assert rows[0].rows == 256 * 8
    assert cases.table(rows).splitlines()[1].split()[6] == "20.0"


# An engine's processes; a script stands for them.

SIZES = launch.Sizes(ranks=2, decode=2, prefill=1, runs=1, deadline_s=20)
BEGIN = "import json, os, sys, time; order = json.loads(sys.argv[1]); "
WRITE = "open(order['result'], 'w').write(json.dumps([order['rank'], os.environ['VLLM_DP_RANK']])); "
SAY = "print('Using AgRsAll2AllManager all2all manager.'); "


def started(script: str, folder: Path, sizes: launch.Sizes = SIZES) -> Outcome:
    job = launch.Job("", AG, {}, folder)
    ((_, outcome),) = launch.outcomes([job], sizes, 1, (sys.executable, "-c", BEGIN + script))
    return outcome


def test_each_rank_is_told_who_it_is_and_gives_its_result(tmp_path: Path) -> None:
    assert started(SAY + WRITE, tmp_path) == Outcome([[0, "0"], [1, "1"]])  # type: ignore[list-item]


def test_a_rank_that_dies_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    script = (
        "open(order['result'] + '.pid', 'w').write(str(os.getpid())); "
        "order['rank'] and sys.exit('ValueError: no such thing') or time.sleep(600)"
    )
    begun = time.monotonic()
    outcome = started(script, tmp_path)
    assert (outcome.fault, outcome.rank) == ("rank 1 ended with 1: ValueError: no such thing", 1)
    assert time.monotonic() - begun < SIZES.deadline_s
    waiting = tmp_path / "rank-0.json.pid"
    if waiting.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(waiting.read_text()), 0)


def test_an_engine_that_hangs_ends_with_its_deadline(tmp_path: Path) -> None:
    hasty = launch.Sizes(ranks=2, decode=2, prefill=1, runs=1, deadline_s=1)
    outcome = started("print('compiling', flush=True); time.sleep(600)", tmp_path, hasty)
    assert outcome.fault.startswith("ranks [0, 1] had not loaded within 1 s: ")


def test_what_is_started_ends_with_the_program_that_was_told_to_end(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` and schedulers do."""
    rank = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    code = (
        "import signal, sys; from pathlib import Path; from benchmarks.vllm import __main__ as bench, launch, plan\n"
        "signal.signal(signal.SIGTERM, bench.ended)\n"
        "sizes = launch.Sizes(ranks=1, decode=1, prefill=1, runs=1, deadline_s=60)\n"
        f"job = launch.Job('', plan.runs_of('ag', eager=False)[0], {{}}, Path({str(tmp_path)!r}))\n"
        f"list(launch.outcomes([job], sizes, 1, (sys.executable, '-c', {rank!r})))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "rank-0.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not _runs(int(log.read_text()))


def test_a_backend_that_is_not_ours_is_no_result(tmp_path: Path) -> None:
    outcome = started(WRITE, tmp_path)
    assert outcome.fault == "something else was measured: no rank's log says that it uses AgRsAll2AllManager"


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    started_pid = int(process.stdout.readline())
    process.stdout.close()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    launch.stop([process], patient=False)
    assert not _runs(started_pid)


def _runs(pid: int) -> bool:
    """Not ended: a zombie that nobody waits for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Tokens of one backend beside those of another.


def said(*sequences: tuple[list[int], float]) -> dict[str, Any]:
    """What a rank gives: each sequence's tokens, every logprob of which is the given one."""
    return {
        "tokens": [ids for ids, _ in sequences],
        "logprobs": [[{str(token): logprob, "-1": -9.0} for token in ids] for ids, logprob in sequences],
    }


def test_sequences_are_compared_until_they_part() -> None:
    first = [said(([1, 2, 3], -1.0), ([4, 5, 6], -1.0)), said(([7, 8, 9], -1.0))]
    other = [said(([1, 2, 3], -1.02), ([4, 0, 6], -1.03)), said(([7, 8, 9], -1.0))]
    row = tokens.row_of("m", AG, Outcome(other), first, 2, VERSIONS)
    assert (row.sequences, row.compared, row.equal, row.parted, row.fault) == (3, 8, 7, 1, "")
    # gaps: half 0.02 and half 0; 0.03 and 0 of a token, 0 and "only one side has it" of the next; 0
    assert (row.gap_median, row.gap_worst) == (0.01, 0.015)
    same = tokens.row_of("m", AG, Outcome(first), first, 2, VERSIONS)
    assert (same.compared, same.equal, same.parted, same.gap_worst) == (9, 9, 0, 0.0)


@pytest.mark.parametrize("logprob", [-1.3, float("nan")])
def test_a_rank_that_is_wrong_is_a_fault_and_so_is_no_answer(logprob: float) -> None:
    """However right the others are, and however soon wrong sequences part."""
    first = [said(*[([1, 2, 3, 4], -1.0)] * 24) for _ in range(4)]
    far = {"tokens": [[1, 2, 3, 4]] * 24, "logprobs": [[{"1": logprob, "-1": logprob}] * 4] * 24}
    row = tokens.row_of("m", AG, Outcome([*first[:3], far]), first, 4, VERSIONS)
    assert row.gap_median == 0.0
    assert row.fault.startswith("logprobs of a rank are ")
    lost = {"tokens": [[9, 9, 9, 9]] * 24, "logprobs": [[{"9": -1.0}] * 4] * 24}
    row = tokens.row_of("m", AG, Outcome([*first[:3], lost]), first, 4, VERSIONS)
    assert (row.parted, row.gap_median) == (24, 0.0)
    assert row.fault == "logprobs of a rank are inf apart; rounding makes 0.1 at most"
    broken = tokens.row_of("m", AG, Outcome(fault="rank 0 ended with 9", rank=0), first, 1, VERSIONS)
    assert (broken.fault, broken.compared) == ("rank 0 ended with 9", None)
    lines = tokens.table([row, broken]).splitlines()
    assert lines[0].split() == list(tokens.SHOWN)
    assert "None" not in lines[2]


def test_prompts_are_the_same_each_time_and_uneven_over_the_ranks() -> None:
    assert tokens.prompts_of(1) == tokens.prompts_of(1) != tokens.prompts_of(0)
    assert [len(tokens.prompts_of(rank)) for rank in range(3)] == [24, 27, 30]
    lengths = {len(ids) for ids in tokens.prompts_of(2)}
    assert len(lengths) > 10
    assert max(lengths) + tokens.NEW <= plan.MOST_LENGTH


@pytest.mark.parametrize("name", models.SMALL)
def test_a_small_checkpoint_is_one(name: str, tmp_path: Path) -> None:
    folder = models.made(name, tmp_path, hidden_size=64)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == name
    assert config["num_experts_per_tok"] == models.SMALL[name]["topk"]
    assert config.get("kv_lora_rank") == models.SMALL[name].get("fields", {}).get("kv_lora_rank")
    assert list(folder.glob("*.safetensors"))
    assert models.folders_of(f"{folder},") == {name: folder}
    with pytest.raises(Refused, match=f"expected models of different names, got '{name}' twice"):
        models.folders_of(f"{name},{folder}")


# The whole program, over a package that stands for vLLM.

STAND_IN = """
import gzip, json, os, sys, time
def note(what):
    with open("NOTES", "a") as file:
        file.write(f"{json.loads(sys.argv[1])['arguments']['all2all_backend']} {what}\\n")
class SamplingParams:
    def __init__(self, **given):
        self.new = given["max_tokens"]
class Thing:
    def __init__(self, **given):
        self.__dict__.update(given)
class LLM:
    def __init__(self, **given):
        self.given = given
        note("loads")
        print("Using AgRsAll2AllManager all2all manager.\\nUsing GraphManager all2all manager.", flush=True)
        if given["enforce_eager" if "enforce_eager" in given else "seed"]:
            raise ValueError("no eager here")
        config = Thing(scheduler_config=Thing(max_num_batched_tokens=77))
        self.llm_engine, self.seen = Thing(vllm_config=config), set()
    def generate(self, prompts, how, use_tqdm):
        note("works")
        ids = {tuple(prompt["prompt_token_ids"]) for prompt in prompts}
        assert len(ids) == len(prompts) and not ids & self.seen, "prompts that the prefix cache knows"
        self.seen |= ids
        time.sleep(how.new / 1000)
        step = {0: Thing(logprob=-1.0)}
        outputs = [Thing(token_ids=[0] * how.new, logprobs=[step] * how.new)]
        times = Thing(first_token_ts=1.0, last_token_ts=1.0 + (how.new - 1) / 1000)
        return [Thing(outputs=outputs, metrics=times) for _ in prompts]
    def start_profile(self):
        self.folder = self.given["profiler_config"]["torch_profiler_dir"]
    def stop_profile(self):
        kernel = {"cat": "kernel", "name": "k", "dur": 10, "args": {"correlation": 1}}
        os.makedirs(self.folder)
        with gzip.open(self.folder + "/a.json.gz", "wt") as file:
            json.dump({"traceEvents": [kernel | {"ts": 20 * n} for n in range(60)]}, file)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs and a vLLM, as it seems; the folder that results go to."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "vllm.py").write_text(STAND_IN.replace("NOTES", str(tmp_path / "notes")))
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path / "path", root, root / "services"))))
    pretend(monkeypatch, "0.26.0", 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def test_tokens_are_compared_with_those_of_the_first_engine(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert bench.main(["--out", "out", "--tokens", "mine", "--backends", "ag,ag+eager"]) == 1, "the second failed"
    with (stand_in / "vllm-tokens.csv").open(newline="", encoding="utf-8") as file:
        first, broken = csv.DictReader(file)
    assert (first["model"], first["sequences"], first["compared"], first["equal"]) == ("mine", "51", "816", "816")
    assert (first["gap_worst"], first["fault"]) == ("0.0", "")
    assert "ValueError: no eager here" in broken["fault"]
    assert "no eager here" in capsys.readouterr().out
    config = json.loads((stand_in / "run.json").read_text())["config"]
    assert config["tokens"] == "mine"
    assert not {"model", "prefill"} & set(config), "what was not run"


def test_engines_load_side_by_side_and_are_timed_one_after_the_other(stand_in: Path, tmp_path: Path) -> None:
    words = ["--out", "out", "--backends", "ag,deepep_v2", "--runs", "1", "--decode", "2", "--prefill", "512"]
    assert bench.main([*words, "--at-once", "2"]) == 0
    notes = (tmp_path / "notes").read_text().splitlines()
    assert {note.split()[1] for note in notes[:4]} == {"loads"}, "two ranks of each"
    works = list(dict.fromkeys(notes[4:]))
    assert works == ["allgather_reducescatter works", "deepep_v2 works"]
    assert notes[4:] == sorted(notes[4:]), "no step of one between those of the other"


def test_engines_are_measured_and_one_that_fails_is_a_row(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = stand_in
    words = ["--out", "out", "--backends", "ag,ag+eager", "--runs", "2", "--decode", "3", "--prefill", "1024"]
    assert bench.main(words) == 1, "one of the two gave no times"
    with (out / "vllm-steps.csv").open(newline="", encoding="utf-8") as file:
        lines: list[dict[str, Any]] = list(csv.DictReader(file))
    measured, broken = lines[:-1], lines[-1]
    assert {(line["rank"], line["step"], line["sorted_run"]) for line in measured} == {
        (rank, step, run) for rank in "01" for step in ("decode", "prefill") for run in "01"
    } | {(rank, "graph", "0") for rank in "01"}
    with (out / "vllm-kernels.csv").open(newline="", encoding="utf-8") as file:
        assert [(line["rank"], line["kernel"], line["count"]) for line in csv.DictReader(file)] == [
            ("0", "k", "60.0"), ("1", "k", "60.0"),
        ]  # fmt: skip
    assert all(float(line["ms"]) >= 1.0 for line in measured if line["step"] == "prefill"), "a millisecond per token"
    assert all(line["most_tokens"] == "77" and line["vllm"] == "0.26.0" for line in measured)
    assert (broken["mode"], broken["ms"]) == ("eager", "")
    assert "ValueError: no eager here" in broken["fault"]
    assert "no eager here" in capsys.readouterr().out
    run = json.loads((out / "run.json").read_text())
    assert run["command"].startswith("python -m benchmarks.vllm")
    assert run["config"]["model"]["experts"] == 128
