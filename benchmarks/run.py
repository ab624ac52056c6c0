"""Measure dispatch and combine; tables, csv, run.json and plots go to `--out`.

`python -m benchmarks.run --device cpu`: crossdock against gloo on this host's processors. Prints one line per (mode,
layout, op), each ending with `ratio <x>`, and exits with 1 if any ratio is below the promise.

`torchrun --nproc-per-node <GPUs> -m benchmarks.run --device cuda`: crossdock, NCCL and whatever else is installed, one
process per GPU. Exits with 1 if a result was wrong or a case failed. What is inside the times stands at the top of each
module of `benchmarks/backends` (processors) and `benchmarks/gpu`; how times are taken, in `benchmarks/gpu/measure.py`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import facts, report
from benchmarks.cases import CPU_CASES
from benchmarks.gpu.tables import GROUPS, NAMES
from benchmarks.measure import measure

BACKENDS = ("crossdock", "gloo")
"""Ours, then the baseline that ratios refer to."""
PROMISE = 3.0
SMALL = (1, 8)
"""Tokens per rank of further rows, which show what a call costs; the promise is not about them."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write. Returns the exit code."""
    options = _parse(arguments)
    if options.device == "cuda":
        from benchmarks.gpu import run

        return run.main(options)
    return _on_processors(options)


def _on_processors(options: argparse.Namespace) -> int:
    ours, baseline = BACKENDS
    load = os.getloadavg()
    print(
        f"{options.rounds} rounds, {ours} and {baseline} in turn; slowest of the ranks; one thread per rank", flush=True
    )
    results = []
    for tokens, case in itertools.product((options.tokens, *SMALL), CPU_CASES):
        sized = replace(case, tokens=tokens, ranks=options.ranks)
        results.append(measure(sized, BACKENDS, options.rounds, options.seed))
        print("\n".join(report.lines(results[-1], ours, baseline)), flush=True)
    out = options.out or Path(f"docs/results/{datetime.date.today().isoformat()}-cpux{options.ranks}")
    for mode in dict.fromkeys(result.case.mode for result in results):
        report.write(out, mode.value, [row for r in results if r.case.mode is mode for row in report.rows(r)])
    config: dict[str, object] = {"rounds": options.rounds, "seed": options.seed, "device": "cpu"}
    facts.write(out, facts.of_this_run(config, options.commit) | {"load_average_before": load})
    print(f"written to {out}")
    held = [result for result in results if result.case.tokens == options.tokens]
    worst = min(report.ratio(result, ours, baseline, op) for result in held for op in report.OPS)
    if worst < options.promise:
        print(f"worst ratio {worst:.2f} is below {options.promise}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="folder (default: docs/results/<date>-<device>x<ranks>)")
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--seed", type=int, default=int(datetime.datetime.now(datetime.UTC).timestamp()))
    cpu = parser.add_argument_group("cpu")
    cpu.add_argument("--rounds", type=int, default=100)
    cpu.add_argument("--tokens", type=int, default=128, help="tokens per rank")
    cpu.add_argument("--ranks", type=int, default=4)
    cpu.add_argument("--promise", type=float, default=PROMISE, help="exit 1 if a ratio is below")
    cuda = parser.add_argument_group("cuda")
    cuda.add_argument("--tables", default="", help=f"some of {','.join(NAMES)} (default: all)")
    cuda.add_argument("--cases", default="", choices=("", *GROUPS), help="a group of tables; results are kept")
    cuda.add_argument("--backends", default="", help="only these, comma-separated (default: all that are installed)")
    cuda.add_argument("--runs", type=int, default=2, help="times that everything is set up and measured")
    cuda.add_argument("--iterations", type=int, default=100, help="timed iterations of each run")
    cuda.add_argument(
        "--extent", choices=("full", "core", "quick"), default="full", help="fewer cases, not fewer iterations"
    )
    cuda.add_argument("--seconds", type=float, default=600, help="no case begins later; earlier tables and runs first")
    cuda.add_argument("--quick", action="store_true", help="one run, few cases, few iterations: a check, not a result")
    cuda.add_argument("--note", default="", help="kept in run.json, such as the environment that NCCL was given")
    options = parser.parse_args(arguments)
    unknown = [name for name in filter(None, options.tables.split(",")) if name not in NAMES]
    if unknown or (options.tables and options.cases):
        parser.error(f"--tables: some of {','.join(NAMES)}, and not beside --cases; got {options.tables}")
    return options


if __name__ == "__main__":
    sys.exit(main())
