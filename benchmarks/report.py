"""Where results lie: one csv per mode, run.json beside it, and the table on the screen."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import COPY, PAYLOAD, Result

COLUMNS = [
    "backend",
    "op",
    "mode",
    "layout",
    "tokens",
    "hidden",
    "experts",
    "topk",
    "ranks",
    "dispatch_dtype",
    "combine_dtype",
    "sms",
    "routing",
    "timing",
    "p50_us",
    "p99_us",
    "bound_us",
    "physical_gbps",
]
OPS = ("dispatch", "combine")


def rows(result: Result) -> list[dict[str, object]]:
    """csv rows of one case. `bound_us` is a plain memcpy of the sent bytes by all ranks at once, same rounds;
    `physical_gbps` counts the bytes that leave a rank; `sms` is threads per rank."""
    case = result.case
    dtype = str(case.dtype).removeprefix("torch.")
    return [
        {
            "backend": backend,
            "op": op,
            "mode": case.mode.value,
            "layout": case.layout.value,
            "tokens": case.tokens,
            "hidden": case.hidden,
            "experts": case.experts,
            "topk": case.topk,
            "ranks": case.ranks,
            "dispatch_dtype": dtype,
            "combine_dtype": dtype,
            "sms": 1,
            "routing": case.routing,
            "timing": "eager",
            "p50_us": f"{result.p50(backend, op):.1f}",
            "p99_us": f"{result.p99(backend, op):.1f}",
            "bound_us": f"{result.p50(COPY, op):.1f}",
            "physical_gbps": f"{result.bytes_per_op / result.p50(backend, op) / 1e3:.3f}",
        }
        for backend, op in result.slowest_us
        if backend != COPY
    ]


def write(folder: Path, results: Sequence[Result], config: dict[str, object]) -> None:
    """`<mode>.csv` for each mode, and run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for mode in dict.fromkeys(result.case.mode for result in results):
        lines = [row for result in results if result.case.mode is mode for row in rows(result)]
        with (folder / f"{mode.value}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    (folder / "run.json").write_text(json.dumps(_run_facts(config), indent=2) + "\n", encoding="utf-8")


def _run_facts(config: dict[str, object]) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average_before": config.pop("load_average"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "config": config,
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.machine()


def ratio(result: Result, ours: str, baseline: str, op: str) -> float:
    """How many times faster ours is, by medians."""
    return result.p50(baseline, op) / result.p50(ours, op)


def lines(result: Result, ours: str, baseline: str) -> list[str]:
    """The table's lines of one case; each ends with `ratio <x>`."""
    case = result.case
    name = f"{case.mode.value:3} {case.layout.value:13}"
    return [
        f"{name} {op:9} {ours} {result.p50(ours, op) / 1e3:7.2f} ms p50 {result.p99(ours, op) / 1e3:7.2f} p99"
        f"   {baseline} {result.p50(baseline, op) / 1e3:7.2f} p50 {result.p99(baseline, op) / 1e3:7.2f} p99"
        f"   (its bare all_to_all {result.p50(baseline + PAYLOAD, op) / 1e3:6.2f},"
        f" x{ratio(result, ours, baseline + PAYLOAD, op):.2f})   ratio {ratio(result, ours, baseline, op):.2f}"
        for op in OPS
    ]
