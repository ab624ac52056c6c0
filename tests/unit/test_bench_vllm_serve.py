"""vLLM's server under load, without vLLM or a GPU: what is asked, what answers mean, and what happens to processes."""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.vllm import QWEN3, Refused, plan, serve, serving
from benchmarks.vllm import __main__ as bench
from benchmarks.vllm.serving import Load, Setting
from tests.unit.test_bench_vllm import pretend

AG, OURS = plan.runs_of(serving.USUAL, eager=False)
SETTING = Setting(2, serving.WHOLE, ("0.26.0", "2.11.0", "H200"))
LOAD = Load("closed", 2, 8)


def taken(scale: float = 1.0, completed: int = 8) -> dict[str, Any]:
    """As vLLM's load generator gives it."""
    return dict.fromkeys(serving.FIGURES.values(), 10.0 * scale) | {"completed": completed, "label": None}


def test_loads_are_chosen_by_name() -> None:
    every = serving.loads_of("")
    assert [load.name for load in serving.loads_of("prefill-8,closed-1")] == ["prefill-8", "closed-1"]
    assert serving.loads_of(",".join(load.name for load in every)) == every
    assert {load.kind for load in every} == {"closed", "open", "prefill"}
    with pytest.raises(Refused, match=r"--loads: expected some of closed-1,.*prefill-8, got 'closed-3'"):
        serving.loads_of("closed-1,closed-3")


def test_servers_take_turns_after_a_round_that_does_not_count() -> None:
    found = serving.jobs([LOAD, Load("open", 16, 160)], 2, 2)
    order = [(job.load.name, job.turn, job.server) for job in found]
    assert order[:4] == [("closed-2", -1, 1), ("closed-2", -1, 0), ("open-16", -1, 1), ("open-16", -1, 0)]
    assert order[4:6] == [("closed-2", 0, 0), ("closed-2", 0, 1)]
    assert order[8:10] == [("closed-2", 1, 1), ("closed-2", 1, 0)]
    assert [job.load.requests for job in found[:4]] == [4, 4, 16, 16], "a few"
    prompts = [job.load.arguments("url", "folder", job.turn) for job in found]
    assert len({tuple(words) for words in prompts}) == 6, "new in each turn, the same for both servers"


def test_a_word_is_a_token_and_lengths_are_those_of_conversations(tmp_path: Path) -> None:
    for name, text in serving.files(serving.WHOLE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    longest = max(map(len, tokenizer.get_vocab()))
    text = " ".join([serving._word(serving.WHOLE.vocabulary - 1)] * serving.LONG_PROMPT)
    assert len(text) <= longest * serving.LONG_PROMPT, "vLLM refuses prompts of more characters"
    assert len(tokenizer) == serving.WHOLE.vocabulary
    ids = [2, 77, 151_935]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.vocab_size, config.num_experts) == (48, 151_936, 128)
    lines = [each["conversations"] for each in json.loads((tmp_path / serving.CONVERSATIONS).read_text())]
    assert len(lines) == max(load.requests for load in serving.loads_of("") if load.kind == "open")
    prompts, answers = ([len(line[n]["value"].split()) for line in lines] for n in (0, 1))
    assert statistics.mean(prompts) == pytest.approx(serving.MEAN_IN, rel=0.15)
    assert statistics.mean(answers) == pytest.approx(serving.MEAN_OUT, rel=0.15)
    assert max(prompts) + max(answers) <= serving.MOST_LENGTH
    assert serving.LONG_PROMPT + serving.SHORT_ANSWER <= serving.MOST_LENGTH


def test_fp8_weights_are_in_the_config() -> None:
    assert "quantization_config" not in plan.config_json(QWEN3)
    blocks = plan.config_json(replace(QWEN3, weights="fp8"))["quantization_config"]
    assert (blocks["quant_method"], blocks["weight_block_size"]) == ("fp8", [128, 128])


def test_a_result_that_lacks_answers_is_a_fault() -> None:
    good = serving.row_of(AG, LOAD, 0, taken(), SETTING)
    assert (good.fault, good.itl_p50_ms, good.layers, good.weights) == ("", 10.0, 48, "bf16")
    assert serving.row_of(AG, LOAD, 0, taken(completed=7), SETTING).fault == "expected 8 answers, got 7"
    assert serving.row_of(AG, LOAD, 0, {"fault": "gone"}, SETTING).fault == "gone"


def test_a_table_has_medians_and_how_they_stand_to_the_first_server() -> None:
    rows = [serving.row_of(AG, LOAD, turn, taken(), SETTING) for turn in range(3)]
    rows += [serving.row_of(OURS, LOAD, turn, taken(scale), SETTING) for turn, scale in enumerate((0.5, 0.9, 7))]
    rows.append(serving.row_of(OURS, LOAD, 3, {"fault": "gone"}, SETTING))
    head, first, second = (line.split() for line in serving.table(rows).splitlines())
    assert head[-3:] == ["itl_to_first", "tokens_to_first", "fault"]
    assert first[-2:] == ["1.000", "1.000"]
    assert second[-3:] == ["0.900", "0.900", "gone"]


SERVE = """
import http.server, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
own = sys.argv[sys.argv.index("--all2all-backend") + 1] == "allgather_reducescatter"
print("Using", "AgRsAll2AllManager" if own else "Another", "all2all manager.", flush=True)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""


def test_servers_are_ready_or_say_why_and_end_with_the_block(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SERVE)
    with serve.servers([AG, OURS], "folder", 2, tmp_path, 60, command) as started:
        assert started[0].fault == ""
        assert started[0].answers()
        assert started[1].fault == "something else was measured: no rank's log says that it uses GraphManager"
        pids = [each.process.pid for each in started]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_server_that_ends_and_one_that_is_late_are_faults(tmp_path: Path) -> None:
    with serve.servers([AG], "f", 2, tmp_path, 60, (sys.executable, "-c", "raise ValueError('no GPU')")) as (dead,):
        assert dead.fault.startswith("the server ended with 1: ValueError: no GPU")
    with serve.servers([AG], "f", 2, tmp_path, 0.5, (sys.executable, "-c", "import time; time.sleep(600)")) as (late,):
        assert late.fault == "not ready within 0.5 s: its log is empty"


GENERATE = """
import json, sys, time
order = json.loads(sys.argv[2])
with open(order["out"], "w") as file:
    for words in order["jobs"]:
        if words[0] == "die": sys.exit("ValueError: no server")
        if words[0] == "hang": time.sleep(600)
        print(json.dumps({"completed": int(words[0])}), file=file, flush=True)
"""


VLLM = {
    "vllm/entrypoints/cli/main.py": "def main():\n" + textwrap.indent(SERVE, "    "),
    "vllm/benchmarks/serve.py": """
def add_cli_args(parser):
    parser.add_argument("--num-prompts", type=int)
def main(args):
    if args.num_prompts == 32:
        raise ValueError("no such load")
    return dict.fromkeys(NAMES, 3.0) | {"completed": args.num_prompts}
""",
    "vllm/utils/argparse_utils.py": """
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, words):
        return self.parse_known_args(words)[0]
""",
}
"""As much of vLLM as the children import."""


def test_each_load_runs_on_each_server_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program, its children too; two GPUs and a vLLM, as it seems."""
    for name, text in VLLM.items():
        (tmp_path / name).parent.mkdir(parents=True)
        figures = repr(list(serving.FIGURES.values()))
        (tmp_path / name).write_text(text.replace("NAMES", figures), encoding="utf-8")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, root, root / "services"))))
    pretend(monkeypatch, "0.26.0", 2)
    words = ["--serve", "--out", str(tmp_path / "out"), "--backends", "ag,ag+eager", "--runs", "2"]
    assert bench.main([*words, "--loads", "closed-1,prefill-8", "--weights", "fp8"]) == 0
    with (tmp_path / "out" / "vllm-serve.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["turn"], row["load"], row["mode"]) for row in rows] == [
        (turn, load, mode)
        for turn, modes in (("0", ("graphs", "eager")), ("1", ("eager", "graphs")))
        for load in ("closed-1", "prefill-8")
        for mode in modes
    ]
    assert {(row["weights"], row["layers"], row["itl_p50_ms"]) for row in rows} == {("fp8", "48", "3.0")}
    model = json.loads((tmp_path / "out" / "run.json").read_text())["config"]["model"]
    assert (model["weights"], model["vocabulary"]) == ("fp8", 151_936)
    assert bench.main([*words, "--backends", "ag,ll+dbo"]) == 2, "servers are not started with it"
    assert bench.main([*words, "--loads", "closed-8"]) == 1, "32 requests: the generator raises"
    with (tmp_path / "out" / "vllm-serve.csv").open(newline="", encoding="utf-8") as file:
        assert {row["fault"] for row in csv.DictReader(file)} == {"ValueError: no such load"}


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("die", "the load generator ended with 1: ValueError: no server"),
        ("hang", "b gave nothing within 3 s"),
    ],
)
def test_results_come_in_order_and_those_that_do_not_are_faults(word: str, fault: str, tmp_path: Path) -> None:
    jobs = [("a", ["5"]), ("b", [word]), ("c", ["6"])]
    found = list(serve.results(jobs, tmp_path / "log", tmp_path / "out", 3, (sys.executable, "-c", GENERATE)))
    assert found == [{"completed": 5}, {"fault": fault}, {"fault": fault}]
    good = list(serve.results(jobs[:1], tmp_path / "log", tmp_path / "out", 30, (sys.executable, "-c", GENERATE)))
    assert good == [{"completed": 5}], "nothing of the earlier run"
