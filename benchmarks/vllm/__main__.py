"""Measure vLLM's backends, compare their tokens, or measure its expert kernels alone; print, write. See the package."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

import benchmarks.vllm as package
from benchmarks import facts
from benchmarks.vllm import QWEN3, Model, Refused, cases, launch, models, plan, serve, serving, tokens

OLDEST = (0, 26)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 where nothing can be measured here."""
    options = parsed(arguments)
    try:
        usual = (tokens if options.tokens else serving if options.serve else plan).USUAL
        runs = plan.runs_of(options.backends or usual, eager=options.eager)
        if options.tokens and len(runs) < 2:
            raise Refused(f"--backends: expected two or more beside --tokens, got {options.backends!r}")
        folders = models.folders_of(options.tokens)
        loads = serving.loads_of(options.loads)
        check(1 if options.experts else options.ranks)
        if options.experts:
            return experts(options)
        if options.tokens:
            return agreement(options, runs, folders)
        if options.serve:
            if halved := [run.name for run in runs if run.halved]:
                raise Refused(f"--backends: expected no +dbo beside --serve, got {halved[0]}")
            return served(options, runs, loads)
        return steps(options, runs)
    except Refused as refused:
        print(f"benchmarks.vllm: {refused}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    """Of the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=package.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the csv and run.json")
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, a GPU each")
    parser.add_argument("--runs", type=int, default=3, help="times that each figure is taken")
    parser.add_argument("--decode", type=int, default=32, help="sequences per rank in a decode step")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens per rank of a prefill")
    whole = parser.add_argument_group("whole engines")
    known = ",".join(plan.BACKENDS)
    whole.add_argument(
        "--backends", default="", help=f"some of {known}; +eager behind one: no graphs, +dbo: dual-batch overlap"
    )
    whole.add_argument("--eager", action="store_true", help="no CUDA graphs at all")
    whole.add_argument("--max-num-batched-tokens", type=int, default=0, help="of a rank in a step (0: vLLM's choice)")
    whole.add_argument("--at-once", type=int, default=1, help="engines that load side by side, on the same GPUs")
    whole.add_argument("--deadline", type=float, default=600.0, help="seconds of an engine's start, and of its work")
    named = ", ".join(models.SMALL)
    whole.add_argument("--tokens", default="", metavar="MODELS", help=f"compare greedy tokens: {named}, or your folder")
    whole.add_argument("--layers", type=int, default=QWEN3.layers, help="of Qwen3-30B-A3B's 48, in timed steps")
    whole.add_argument("--weights", choices=("bf16", "fp8"), default=QWEN3.weights, help="fp8: in blocks of 128 x 128")
    under_load = parser.add_argument_group("under load")
    under_load.add_argument("--serve", action="store_true", help="`vllm serve` with all 48 layers, `vllm bench serve`")
    under_load.add_argument("--loads", default="", help="some of closed-32,open-8,prefill-8,... (default: all)")
    alone = parser.add_argument_group("expert kernels")
    alone.add_argument("--experts", action="store_true", help="the expert kernels alone, on one GPU")
    alone.add_argument("--replays", type=int, default=20, help="timed graphs per run")
    return parser


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, where they go together."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if QWEN3.experts % options.ranks or options.ranks < 2:
        parser.error(f"--ranks: expected a divisor of {QWEN3.experts} experts above 1, got {options.ranks}")
    if sum(map(bool, (options.experts, options.tokens, options.serve))) > 1:
        parser.error("--tokens, --experts, --serve: expected one of them, got more")
    if not 0 < options.layers <= serving.WHOLE.layers:
        parser.error(f"--layers: expected 1 to {serving.WHOLE.layers}, got {options.layers}")
    if options.experts:
        return options
    if options.at_once < 1:
        parser.error(f"--at-once: expected 1 engine or more, got {options.at_once}")
    if not 0 < options.decode <= plan.MOST_SEQUENCES:
        parser.error(f"--decode: expected 1 to {plan.MOST_SEQUENCES} sequences, got {options.decode}")
    if options.prefill < plan.PROMPT or options.prefill % plan.PROMPT:
        parser.error(f"--prefill: expected a multiple of prompts of {plan.PROMPT} tokens, got {options.prefill}")
    return options


def check(num_gpus_needed: int) -> None:
    """Raises Refused where vLLM or a GPU is missing."""
    version = facts.version("vllm")
    if version is None:
        raise Refused("needs vLLM >= 0.26 (pip install 'crossdock[vllm]'), this Python has none")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise Refused(f"needs vLLM >= 0.26, this one is {version}")
    found = torch.cuda.device_count()
    if found < num_gpus_needed:
        raise Refused(f"needs NVIDIA GPUs: {num_gpus_needed}, this machine has {found}")


def versions_here() -> tuple[str, str, str]:
    """vLLM's, torch's, and the name of the GPU."""
    return facts.version("vllm") or "", torch.__version__, torch.cuda.get_device_name(0)


def steps(options: argparse.Namespace, runs: Sequence[plan.Run]) -> int:
    """Times of one engine after the other; 1 where one gave none."""
    versions, model = versions_here(), model_of(options)
    sizes = launch.Sizes(options.ranks, options.decode, options.prefill // plan.PROMPT, options.runs, options.deadline)
    earlier = facts.without(facts.standing(options.out), ["vllm-steps", "vllm-kernels"])
    rows: list[plan.Row] = []
    kernels: list[plan.KernelRow] = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(plan.config_json(model)), encoding="utf-8")
        jobs = (job(options, "", run, name, "dummy") for run in runs)
        with closing(launch.outcomes(jobs, sizes, options.at_once)) as outcomes:
            for done, outcome in outcomes:
                rows += plan.rows_of(done.run, options.ranks, outcome, versions)
                print(plan.table(rows), flush=True)
                write(options, "vllm-steps", plan.Row, rows, earlier, options.ranks)
                kernels += plan.kernel_rows(done.run, outcome)
                columns = [field.name for field in fields(plan.KernelRow)]
                facts.write_table(options.out, "vllm-kernels", columns, map(asdict, kernels))
    return 1 if any(row.fault for row in rows) else 0


def model_of(options: argparse.Namespace) -> Model:
    """That is timed."""
    if options.serve:
        return replace(serving.WHOLE, weights=options.weights)
    return replace(QWEN3, layers=options.layers, weights=options.weights)


def job(options: argparse.Namespace, model: str, run: plan.Run, folder: str, weights: str) -> launch.Job:
    """An engine over a checkpoint's folder, which starts at once."""
    name = "/".join(filter(None, (model, run.name)))
    print(f"{name}: starting {options.ranks} ranks", flush=True)
    arguments = plan.engine_arguments(run, folder, options.max_num_batched_tokens, weights)
    return launch.Job(model, run, arguments, options.out / "logs" / name)


def agreement(options: argparse.Namespace, runs: Sequence[plan.Run], folders: Mapping[str, Path | None]) -> int:
    """Each model on each engine; 1 where one gave no tokens, or logprobs far from those of the first."""
    versions = versions_here()
    sizes = launch.Sizes(options.ranks, 0, 0, 0, options.deadline, tokens=True)
    earlier = facts.without(facts.standing(options.out), ["vllm-tokens"])
    rows: list[tokens.Row] = []
    firsts: dict[str, Sequence[tokens.Found]] = {}

    def jobs(parent: Path) -> Iterator[launch.Job]:
        for model, given in folders.items():
            folder = str(given or models.made(model, parent))
            for run in runs:
                if firsts.get(model, True):  # else there is nothing to compare it with
                    yield job(options, model, run, folder, "auto")

    with (
        tempfile.TemporaryDirectory() as parent,
        closing(launch.outcomes(jobs(Path(parent)), sizes, options.at_once)) as outcomes,
    ):
        for done, outcome in outcomes:
            first = firsts.setdefault(done.model, outcome.results)
            rows.append(tokens.row_of(done.model, done.run, outcome, first, options.ranks, versions))
            print(tokens.table(rows), flush=True)
            write(options, "vllm-tokens", tokens.Row, rows, earlier, options.ranks)
    return 1 if any(row.fault for row in rows) else 0


def served(options: argparse.Namespace, runs: Sequence[plan.Run], loads: Sequence[serving.Load]) -> int:
    """Each load on each server, in turns; 1 where a server or a load gave no figures."""
    model = model_of(options)
    setting = serving.Setting(options.ranks, model, versions_here())
    earlier = facts.without(facts.standing(options.out), ["vllm-serve"])
    logs, rows = options.out / "logs", list[serving.Row]()
    with tempfile.TemporaryDirectory() as name:
        for file, text in serving.files(model).items():
            (Path(name) / file).write_text(text, encoding="utf-8")
        print(f"starting {', '.join(run.name for run in runs)}: {options.ranks} ranks each", flush=True)
        servers = serve.servers(runs, name, options.ranks, logs, options.deadline, at_once=options.at_once)
        with servers as started:
            failed = [each for each in started if each.fault]
            rows += [serving.row_of(each.run, None, None, {"fault": each.fault}, setting) for each in failed]
            ready = [each for each in started if not each.fault]
            jobs = serving.jobs(loads, len(ready), options.runs)
            asked = [(job.load.name, job.load.arguments(ready[job.server].url, name, job.turn)) for job in jobs]
            with closing(serve.results(asked, logs / "load.log", Path(name) / "results", options.deadline)) as taken:
                for job, found in zip(jobs, taken, strict=True):
                    row = serving.row_of(ready[job.server].run, job.load, job.turn, found, setting)
                    if row.fault or job.turn >= 0:
                        rows.append(row)
                        write(options, "vllm-serve", serving.Row, rows, earlier, options.ranks)
                    print(serving.table([row]).splitlines()[1], flush=True)
    print(serving.table(rows), flush=True)
    return 1 if any(row.fault for row in rows) else 0


def experts(options: argparse.Namespace) -> int:
    """Measure every case, write after each, so that a late failure costs no earlier figure."""
    from benchmarks.vllm import kernels

    vllm, torch_version, gpu = versions_here()
    where = cases.Where(gpu, vllm, torch_version, facts.version("triton") or "")
    earlier = facts.without(facts.standing(options.out), ["vllm-experts"])
    weights = kernels.weights_of(QWEN3, QWEN3.experts // options.ranks, "cuda")
    rows: list[cases.Row] = []
    for case in cases.cases_of(options.decode, options.prefill):
        made = kernels.made(case, QWEN3, options.ranks, weights)
        taken = list(kernels.times_us(made, options.runs, options.replays))
        name, sizes = type(made.kernel).__name__, made.block_sizes()
        rows += cases.rows_of(case, QWEN3, options.ranks, name, sizes, taken, where)
        print(rows[-1], flush=True)
        write(options, "vllm-experts", cases.Row, rows, earlier, 1)
        del made
        torch.cuda.empty_cache()
    print(cases.table(rows))
    return 0


def write(
    options: argparse.Namespace, name: str, kind: type, rows: Sequence[Any], earlier: Sequence[Any], num_gpus: int
) -> None:
    """The table, and run.json, which goes on telling of the folder's other tables."""
    unused = ["out", "commit", "layers", "weights"]  # the model has the last two
    unused += ["runs"] if options.tokens else []
    unused += ["decode", "prefill"] if options.tokens or options.serve else []
    config = {key: value for key, value in vars(options).items() if key not in unused}
    config |= {} if options.tokens else {"model": asdict(QWEN3 if options.experts else model_of(options))}
    found = facts.of_this_run(config, options.commit, "benchmarks.vllm")
    facts.keep(
        options.out, name, kind, rows, found | facts.of_gpus(num_gpus) | ({"earlier": earlier} if earlier else {})
    )


def ended(number: int, _: object) -> None:
    """A signal's handler: what has been started is stopped, what has been written stays."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, ended)
    sys.exit(main())
