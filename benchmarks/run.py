"""`python -m benchmarks.run --device cpu --out docs/results/<date>-cpux4`: crossdock against gloo on this host.

Prints one line per (mode, layout, op), each ending with `ratio <x>`, writes csv and run.json, and exits with 1 if any
ratio is below the promise. What is inside the times stands in `backends/crossdock.py` and `backends/gloo.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import report
from benchmarks.cases import CPU_CASES
from benchmarks.measure import measure

BACKENDS = {"cpu": ("crossdock", "gloo")}
"""Per device: ours, then the baseline that ratios refer to, then others."""
CASES = {"cpu": CPU_CASES}
PROMISE = 3.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write. Returns the exit code."""
    options = _parse(arguments)
    backends, load = BACKENDS[options.device], os.getloadavg()
    ours, baseline = backends[:2]
    print(
        f"{options.rounds} rounds, {ours} and {baseline} in turn; slowest of the ranks; one thread per rank", flush=True
    )
    results = []
    for case in CASES[options.device]:
        sized = replace(case, tokens=options.tokens, ranks=options.ranks)
        results.append(measure(sized, backends, options.rounds, options.seed))
        print("\n".join(report.lines(results[-1], ours, baseline)), flush=True)
    config = {"rounds": options.rounds, "seed": options.seed, "device": options.device, "load_average": load}
    report.write(options.out, results, config)
    print(f"written to {options.out}")
    worst = min(report.ratio(result, ours, baseline, op) for result in results for op in report.OPS)
    if worst < options.promise:
        print(f"worst ratio {worst:.2f} is below {options.promise}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    today = datetime.date.today().isoformat()
    parser.add_argument("--device", choices=sorted(BACKENDS), default="cpu")
    parser.add_argument("--out", type=Path, help="folder (default: docs/results/<date>-<device>x<ranks>)")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(datetime.datetime.now(datetime.UTC).timestamp()))
    parser.add_argument("--tokens", type=int, default=128, help="tokens per rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--promise", type=float, default=PROMISE, help="exit 1 if a ratio is below")
    options = parser.parse_args(arguments)
    options.out = options.out or Path(f"docs/results/{today}-{options.device}x{options.ranks}")
    return options


if __name__ == "__main__":
    sys.exit(main())
