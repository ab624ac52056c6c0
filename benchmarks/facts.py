"""What is kept of a run: its tables, and run.json, what a reader needs to judge them and to make them again."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("cuda-bindings", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "numpy", "triton", "deep_ep", "vllm")


def write(folder: Path, facts: dict[str, object]) -> None:
    """run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def write_table(folder: Path, name: str, columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> None:
    """`<name>.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def keep(folder: Path, name: str, kind: type, rows: Iterable[Any], facts: dict[str, object]) -> None:
    """`<name>.csv`, a line for each row of that dataclass, and run.json."""
    write_table(folder, name, [field.name for field in fields(kind)], map(asdict, rows))
    write(folder, facts)


def read(folder: Path) -> dict[str, Any]:
    """run.json."""
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def standing(folder: Path) -> list[dict[str, Any]]:
    """The runs that the folder's run.json tells of, itself first; "tables" names each one's csv files."""
    if not (folder / "run.json").exists():
        return []
    found = read(folder)
    here = sorted(path.stem for path in folder.glob("*.csv"))
    itself = {key: value for key, value in found.items() if key != "earlier"}
    return [{"tables": here} | itself, *found.get("earlier", [])]


def without(runs: Sequence[dict[str, Any]], tables: Collection[str]) -> list[dict[str, Any]]:
    """Of those runs, what is left once `tables` are written anew: "earlier" of the new run.json."""
    left = [run | {"tables": [name for name in run["tables"] if name not in tables]} for run in runs]
    return [run for run in left if run["tables"]]


def of_table(run: dict[str, Any], table: str) -> dict[str, Any]:
    """Of a run.json, the facts of the run that wrote the table."""
    return next((entry for entry in run.get("earlier", []) if table in entry["tables"]), run)


def of_this_run(
    config: dict[str, object], commit: str | None = None, module: str = "benchmarks.run"
) -> dict[str, object]:
    """Facts of this host and this command, `python -m module`. `commit`: where the tree has no history of its own."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "command": command(sys.argv[1:], module),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "config": config,
    }


def of_control(
    arguments: Sequence[str], config: dict[str, object], module: str = "benchmarks.control"
) -> dict[str, object]:
    """The same of a run of benchmarks.control, or of another module without torch."""
    return of_this_run(config) | {"command": command(arguments, module)}


def command(arguments: Sequence[str], module: str = "benchmarks.run") -> str:
    """The command without `--out`, which names a place on that machine; of a GPU run, what every process was given."""
    named = [word for word in arguments if not word.startswith("--out=")]
    kept = [word for n, word in enumerate(named) if word != "--out" and named[max(0, n - 1)] != "--out"]
    return " ".join(["python", "-m", module, *kept])


def folder_of_gpus(num_gpus: int, parent: str = "docs/results") -> Path:
    """Where results of today are kept: <date>-<gpu>x<n>."""
    name = torch.cuda.get_device_name(0).lower().replace("nvidia", "").strip()
    return Path(f"{parent}/{datetime.date.today().isoformat()}-{re.sub('[^a-z0-9]+', '-', name)}x{num_gpus}")


def of_gpus(num_gpus: int) -> dict[str, object]:
    """Names, driver, clocks and versions, as NVML and torch say them now."""
    facts: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(0),
        "num_gpus": num_gpus,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "libraries": {name: found for name in LIBRARIES if (found := version(name))},
    }
    try:
        import pynvml

        pynvml.nvmlInit()
        facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        facts["clocks"] = [_clocks(pynvml, index) for index in range(num_gpus)]
    except Exception as error:  # whatever NVML lacks here, the figures are still good
        facts["driver"] = f"unknown ({error})"
    return facts


def _clocks(nvml: Any, index: int) -> dict[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    found: dict[str, object] = {"power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)}
    for name, kind in (("sm_mhz", nvml.NVML_CLOCK_SM), ("memory_mhz", nvml.NVML_CLOCK_MEM)):
        found[name] = nvml.nvmlDeviceGetClockInfo(handle, kind)
        found[f"max_{name}"] = nvml.nvmlDeviceGetMaxClockInfo(handle, kind)
    return found


def version(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
