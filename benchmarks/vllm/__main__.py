"""Measure vLLM's backends, or its expert kernels alone; print, write. See the package."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import benchmarks.vllm as package
from benchmarks import facts
from benchmarks.vllm import QWEN3, Refused, cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 where nothing can be measured here."""
    options = parsed(arguments)
    try:
        check(num_gpus_needed=1)
        return experts(options)
    except Refused as refused:
        print(f"benchmarks.vllm: {refused}", file=sys.stderr)
        return 2


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=package.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the csv and run.json")
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, a GPU each")
    parser.add_argument("--runs", type=int, default=3, help="times that each figure is taken")
    parser.add_argument("--decode", type=int, default=32, help="sequences per rank in a decode step")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens per rank of a prefill")
    parser.add_argument("--experts", action="store_true", help="the expert kernels alone, on one GPU")
    parser.add_argument("--replays", type=int, default=20, help="with --experts: timed graphs per run")
    options = parser.parse_args(arguments)
    if options.experts and QWEN3.experts % options.ranks:
        parser.error(f"--ranks: expected a divisor of {QWEN3.experts} experts, got {options.ranks}")
    return options


def check(num_gpus_needed: int) -> None:
    """Raises Refused where vLLM or a GPU is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise Refused("needs vLLM >= 0.26 (pip install 'crossdock[vllm]'), this Python has none")
    found = torch.cuda.device_count()
    if found < num_gpus_needed:
        raise Refused(f"needs {num_gpus_needed} NVIDIA GPUs, this machine has {found}")


def experts(options: argparse.Namespace) -> int:
    """Measure every case, write after each, so that a late failure costs no earlier figure."""
    import triton
    import vllm

    from benchmarks.vllm import kernels

    where = cases.Where(torch.cuda.get_device_name(0), vllm.__version__, torch.__version__, triton.__version__)
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
    config = {key: value for key, value in vars(options).items() if key not in ("out", "commit")}
    found = facts.of_control(sys.argv[1:], config | {"model": asdict(QWEN3)}, "benchmarks.vllm")
    if options.commit:
        found["commit"] = options.commit
    facts.keep(
        options.out, name, kind, rows, found | facts.of_gpus(num_gpus) | ({"earlier": earlier} if earlier else {})
    )


if __name__ == "__main__":
    sys.exit(main())
