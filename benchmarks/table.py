"""`python -m benchmarks.table docs/results/<folder>`: the tables of one GPU run as Markdown, as README shows them.

One line per case and operation; one column per backend, in microseconds (median, slowest rank), and the share of the
links' bound that crossdock reaches. Figures of two folders are never mixed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import facts, report

Csv = dict[str, str]
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
NAMES = {"nccl_bare": "NCCL, bytes only", "nccl": "NCCL", "agrs": "NCCL AG + RS", "deepep": "DeepEP"}
TITLES = {
    "floor": "Floor: µs per two kernels in a row, CUDA graph of 10 such pairs",
    "ll": "Low latency: µs per dispatch + combine pair, CUDA graph of 10 pairs",
    "ll_sms": "LL over the number of multiprocessors, bf16, µs per pair",
    "overlap": "Overlap: a matrix product while an operation has been sent and not yet received, µs",
    "ht": "High throughput: µs per call, L2 flushed, routing and counts included",
    "formats": "Rows that dispatch quantises, bf16 combine: µs per call of HT, per pair of LL (CUDA graph of 10 pairs)",
    "sweep": "HT over the number of multiprocessors, bf16, µs",
    "layer": "A whole MoE layer, bf16: dispatch, grouped products, combine, µs",
    "auto": "Where HT overtakes LL: µs per pair, CUDA graph",
}

ABOVE_FLOOR = {"floor_us": "floor", "multiple": "x (floor + bound)"}
"""Columns of LL pairs, where the run has them."""
LEVELS = {
    "experts": "experts alone",
    "sequential": "sequential",
    "op": "two halves, overlapped",
    "op_shared": "and no SMs left alone",
}
"""Forms of the layer."""
FLOORS = {
    "launch": "empty kernels",
    "exchange": "a line to each peer, theirs polled",
    "release": "a word and a released flag to each peer, theirs acquired",
}


def main(arguments: list[str] | None = None) -> int:
    """Print the Markdown."""
    folders = sys.argv[1:] if arguments is None else arguments
    if len(folders) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    print(markdown(Path(folders[0])))
    return 0


def markdown(folder: Path) -> str:
    """All tables that the folder has, each group below the line that says where and when."""
    run = facts.read(folder)
    said, parts = "", []
    makers = {
        "floor": _floor, "ll": _ll, "ll_sms": _ll_sms, "overlap": _overlap, "ht": _ht, "formats": _formats,
        "sweep": _sweep, "layer": _layer, "auto": _auto,
    }  # fmt: skip
    for name, maker in makers.items():
        lines = report.read(folder, name)
        if lines:
            where = heading(facts.of_table(run, name))
            parts += [where] if where != said else []
            said = where
            parts.append(f"**{TITLES[name]}**\n\n{maker(lines)}")
    return "\n\n".join(parts)


def heading(run: dict[str, Any]) -> str:
    """GPUs or processors, date, commit, and versions, as far as the run tells."""
    machine = f"{run['num_gpus']} x {run['gpu']}" if "gpu" in run else f"{run['num_cpus']} x {run['processor']}"
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", str(run["commit"]))
    versions = {"driver": "driver", "torch": "torch", "nccl": "NCCL", "vllm": "vLLM"}
    known = run | run.get("libraries", {})
    parts = [machine, str(run["date"])[:10], f"commit `{commit}`"]
    return ", ".join([*parts, *(f"{shown} {known[name]}" for name, shown in versions.items() if name in known)])


def payload(line: Csv) -> str:
    """How rows move: "bf16", or "fp8 + bf16" for dispatch and combine."""
    out, back = (SHORT.get(line[f"{op}_dtype"], line[f"{op}_dtype"]) for op in ("dispatch", "combine"))
    if line["op"] != "pair":
        return out if line["op"] == "dispatch" else back
    return out if out == back else f"{out} + {back}"


def grid(head: list[str], body: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _by_backend(lines: list[Csv], key: tuple[str, ...], shown: dict[str, str]) -> str:
    """One line per value of `key`, one column per backend."""
    backends = [name for name in dict.fromkeys(line["backend"] for line in lines) if name != "crossdock"]
    groups: dict[tuple[str, ...], dict[str, Csv]] = {}
    for line in lines:
        groups.setdefault((*(line[k] for k in key), payload(line)), {})[line["backend"]] = line
    above = [column for column in ABOVE_FLOOR if column in lines[0]]
    head = [*shown.values(), "rows", "crossdock", "p99", "bound", "% of bound", *(ABOVE_FLOOR[c] for c in above)]
    head += [NAMES.get(backend, backend) for backend in backends]
    body = []
    for values, found in groups.items():
        if "crossdock" not in found:
            continue
        ours = found["crossdock"]
        others = [found[b]["p50_us"] if b in found else "-" for b in backends]
        row = [ours["p50_us"], ours["p99_us"], ours["bound_us"], ours["bound_pct"], *(ours[c] or "-" for c in above)]
        body.append([*(v or "-" for v in values[: len(shown)]), values[-1], *row, *others])
    return grid(head, body)


def _floor(lines: list[Csv]) -> str:
    blocks = sorted({int(line["sms"]) for line in lines})
    columns = [(form, str(n)) for form in ("plain", "overlapped") for n in blocks]
    found = {(line["op"], line["form"], line["sms"]): line["p50_us"] for line in lines}
    head = ["two kernels", *(f"{form}, {n} block{'s' * (n != '1')}" for form, n in columns)]
    return grid(head, ([what, *(found.get((op, *column), "-") for column in columns)] for op, what in FLOORS.items()))


def _ll(lines: list[Csv]) -> str:
    warm = [line for line in lines if line["op"] == "pair" and line["l2"] == "warm"]
    return _by_backend(warm, ("tokens", "layout"), {"tokens": "T", "layout": "layout"})


def _ht(lines: list[Csv]) -> str:
    shown = {"op": "op", "tokens": "T", "layout": "layout", "routing": "routing", "form": "form", "sms": "SMs"}
    ours = {(*_case(line),): line["sms"] for line in lines if line["backend"] == "crossdock"}
    filled = [line | {"sms": ours.get(_case(line), "")} for line in lines if not _told_already(line)]
    return _by_backend(filled, tuple(shown), shown)


def _formats(lines: list[Csv]) -> str:
    shown = {"mode": "mode", "op": "op", "tokens": "T", "layout": "layout"}
    return _by_backend([line for line in lines if line["op"] != "combine"], tuple(shown), shown)


def _told_already(line: Csv) -> bool:
    """A bf16 combine after an fp8 dispatch is the combine of the bf16 case."""
    return line["op"] == "combine" and line["dispatch_dtype"] != line["combine_dtype"]


def _case(line: Csv) -> tuple[str, ...]:
    names = ("op", "tokens", "layout", "routing", "form", "dispatch_dtype", "combine_dtype")
    return tuple(line[name] for name in names)


def _ll_sms(lines: list[Csv]) -> str:
    return _over_sms([line | {"what": f"T = {line['tokens']} {line['layout']}"} for line in lines])


def _overlap(lines: list[Csv]) -> str:
    shown = {
        "mode": "mode", "layout": "layout", "tokens": "T", "op": "open meanwhile", "alone_us": "product alone",
        "p50_us": "beside it", "ratio": "ratio", "send_us": "send", "receive_us": "receive",
    }  # fmt: skip
    return grid(list(shown.values()), ([line[name] for name in shown] for line in lines))


def _sweep(lines: list[Csv]) -> str:
    return _over_sms([line | {"what": f"T = {line['tokens']} {line['layout']} {line['op']}"} for line in lines])


def _layer(lines: list[Csv]) -> str:
    """What the communication adds to the experts alone, and what overlap makes of it."""
    found = {(_shape(line), line["form"]): float(line["p50_us"]) for line in lines}
    body = []
    for shape in dict.fromkeys(_shape(line) for line in lines):
        times = [found.get((shape, level)) for level in LEVELS]
        if times[1] is None:
            continue
        best = min((time for time in times[2:] if time is not None), default=None)
        gain = "-" if best is None else f"x {times[1] / best:.2f}"
        body.append([*shape, *("-" if time is None else f"{time:.0f}" for time in times), gain])
    return grid(["H", "experts", "T", "SMs", *LEVELS.values(), "gain"], body)


def _shape(line: Csv) -> tuple[str, ...]:
    return line["hidden"], line["experts"], line["tokens"], line["sms"]


def _over_sms(lines: list[Csv]) -> str:
    """One line per number of multiprocessors, one column per "what"."""
    columns = list(dict.fromkeys(line["what"] for line in lines))
    found = {(line["sms"], line["what"]): line for line in lines}
    head = ["SMs", *columns]
    return grid(
        head,
        (
            [sms, *(found[sms, column]["p50_us"] if (sms, column) in found else "-" for column in columns)]
            for sms in dict.fromkeys(line["sms"] for line in lines)
        ),
    )


def _auto(lines: list[Csv]) -> str:
    found = {(line["layout"], line["tokens"], line["mode"]): float(line["p50_us"]) for line in lines}
    body = []
    for layout, tokens in dict.fromkeys((line["layout"], line["tokens"]) for line in lines):
        low, high = (found.get((layout, tokens, mode)) for mode in ("ll", "ht"))
        if low is not None and high is not None:
            body.append([layout, tokens, f"{low:.1f}", f"{high:.1f}", "LL" if low <= high else "HT"])
    return grid(["layout", "T", "LL", "HT", "faster"], body)


if __name__ == "__main__":
    sys.exit(main())
