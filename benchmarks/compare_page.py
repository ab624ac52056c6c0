"""docs/compare.md: ours beside others where one run measured both, made from the csv in docs/results (`make schema`).

A table is one csv, so one machine and one commit. Each row is a case that ours and another backend have. `x` is the
time of the fastest other one over ours, of rates ours over theirs: below 1 the other one is ahead.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import facts, report, table

Csv = dict[str, str]
OURS = "crossdock"
NAMES = {
    **table.NAMES,
    "nccl_symm": "NCCL, windows",
    "nccl_ce": "NCCL, copy engines",
    "torch": "torch's symmetric memory",
    "gloo": "gloo",
    "gloo-payload": "gloo, bytes only",
    "allgather_reducescatter": "vLLM's default",
}
BARE = ("nccl_bare", "gloo-payload")
"""Backends that only move the bytes: shown, and not counted in `x`."""
LAYOUTS = {"rank_major": "rank-major", "expert_major": "expert-major"}
MIB = 1 << 20
INTRO = """# Compared with others

Ours beside other libraries, in the cases that one run measured for both. `make schema` makes this page from the csv in
`docs/results`; the [method](benchmarks.md#what-a-figure-is) and [what each time
includes](benchmarks.md#what-a-time-includes) are the same for all. Times are medians of the slowest rank, in µs where
nothing else is said. `x` is the time of the fastest other backend over ours, of rates ours over theirs. Where it is
below 1, the other one is ahead. Columns "bytes only" do a part of the job, so `x` leaves them out. Collectives are
ours as chosen by itself, and the others at the best of their settings. Of a case that was measured again on GPUs of the
same kind and number, beside the same others, the newest run counts.

Not measured: NCCL EP, FlashInfer's all-to-all, mscclpp and DeepEP V2; nothing on more than 4 GPUs."""


@dataclass(frozen=True)
class Row:
    """A case that ours and others have in one csv.

    Attributes:
        case: the cells that say which.
        ours: in the unit of the table.
        others: backend -> the same.
        is_rate: more is better.
        sms: multiprocessors of ours; "": not known, or none.
    """

    case: tuple[str, ...]
    ours: float
    others: Mapping[str, float]
    is_rate: bool = False
    sms: str = ""

    @property
    def best(self) -> str:
        """The other backend that is fastest."""
        counted = [name for name in self.others if name not in BARE]
        return (max if self.is_rate else min)(counted, key=self.others.__getitem__)

    @property
    def ratio(self) -> float:
        """How far ours is ahead of the best other one; below 1: behind."""
        other = self.others[self.best]
        return self.ours / other if self.is_rate else other / self.ours


@dataclass(frozen=True)
class Table:
    """What one csv has of ours and others.

    Attributes:
        subject: what it is about, as the heading has it.
        folder: below docs/results.
        name: of the csv.
        run: facts of the run that wrote it.
        columns: headings of `Row.case`.
    """

    subject: str
    folder: str
    name: str
    run: dict[str, Any]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def link(self) -> str:
        """To its csv, from the page."""
        return f"[{self.name}.csv](results/{self.folder}/{self.name}.csv)"


def page(results: Path) -> str:
    """The whole page, of all folders below `results`."""
    tables = newest([made for make in KINDS for folder in sorted(results.iterdir()) for made in make(folder)])
    parts = [INTRO, "## Where others are ahead", behind(tables)]
    for subject in dict.fromkeys(made.subject for made in tables):
        parts.append(f"## {subject}")
        parts += [section(made) for made in reversed(tables) if made.subject == subject]
    return "\n\n".join(parts) + "\n"


def newest(tables: Sequence[Table]) -> list[Table]:
    """Without the cases that a later one has again: of machines of one kind, beside the same others at least."""
    kept = []
    for number, made in enumerate(tables):
        later = [row for other in tables[number + 1 :] if _of_one_kind(made, other) for row in other.rows]
        rows = [
            row
            for row in made.rows
            if not any(row.case == again.case and row.others.keys() <= again.others.keys() for again in later)
        ]
        if rows:
            kept.append(replace(made, rows=tuple(rows)))
    return kept


def _of_one_kind(made: Table, other: Table) -> bool:
    kinds = [(one.subject, one.run.get("gpu"), one.run.get("num_gpus")) for one in (made, other)]
    return kinds[0] == kinds[1] and "gpu" in made.run


def behind(tables: Sequence[Table]) -> str:
    """Every case in which another backend is ahead, the farthest first."""
    every = [(row.ratio, made, row) for made in tables for row in made.rows]
    found = sorted((entry for entry in every if entry[0] < 1), key=lambda entry: entry[0])
    if not found:
        return "In none of the cases below."
    body = [
        [_where(made), ", ".join(filter(None, row.case)), _shown(row.ours), NAMES.get(row.best, row.best),
         _shown(row.others[row.best]), f"{ratio:.2f}"]
        for ratio, made, row in found
    ]  # fmt: skip
    grid = table.grid(["run", "case", "ours", "ahead of it", "theirs", "x"], body)
    return f"{len(found)} of {len(every)} cases:\n\n{grid}"


def section(made: Table) -> str:
    """One table below the line that says where and when, and what its rows lack."""
    others = list(dict.fromkeys(name for row in made.rows for name in row.others))
    has_sms = any(row.sms for row in made.rows)
    head = [*made.columns, "ours", *(["our SMs"] if has_sms else []), *(NAMES.get(name, name) for name in others), "x"]
    body = [
        [
            *row.case,
            _shown(row.ours),
            *([row.sms] if has_sms else []),
            *(_shown(row.others[name]) if name in row.others else "" for name in others),
            f"{row.ratio:.2f}",
        ]
        for row in made.rows
    ]
    named = {*others, *(row.case[0] for row in made.rows)}
    noted = [(what, text) for what, text in made.run.get("lacks", {}).items() if what in named]
    lacks = "\n".join(_wrapped(f"* {NAMES.get(what, what)}: {text}") for what, text in noted)
    where = _wrapped(f"{table.heading(made.run)} ({made.link}):")
    return "\n\n".join(filter(None, [where, table.grid(head, body), lacks]))


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _where(made: Table) -> str:
    run = made.run
    machine = f"{run['num_gpus']} x {run['gpu'].removeprefix('NVIDIA ')}" if "gpu" in run else "processors"
    return f"{machine}, {str(run['date'])[:10]}, {made.link}"


def _shown(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def dispatch_and_combine(folder: Path) -> Iterator[Table]:
    """Low latency and high throughput, of the csv `ll` and `ht`."""
    columns = ("op", "T", "layout", "rows", "routing, form")
    for name, mode in (("ll", "low latency"), ("ht", "high throughput")):
        found: dict[tuple[str, ...], dict[str, Csv]] = {}
        for line in report.read(folder, name):
            if name == "ht" or line.get("l2", "warm") == "warm":
                found.setdefault(_case(line), {})[line["backend"]] = line
        rows = [
            Row(
                case, float(lines[OURS]["p50_us"]), _times(lines), sms=lines[OURS]["sms"] if "l2" in lines[OURS] else ""
            )
            for case, lines in found.items()
            if OURS in lines and set(lines) - {OURS, *BARE}
        ]
        yield from _table(f"Dispatch and combine, {mode}", folder, name, columns, rows)


def _case(line: Csv) -> tuple[str, ...]:
    form = ", ".join(filter(None, (line["routing"], line.get("form", ""))))
    op = {"pair": "pair, in a CUDA graph"}.get(line["op"], line["op"])
    return op, line["tokens"], LAYOUTS.get(line["layout"], line["layout"]), table.payload(line), form


def _times(lines: dict[str, Csv]) -> dict[str, float]:
    return {name: float(line["p50_us"]) for name, line in lines.items() if name != OURS}


def collectives(folder: Path) -> Iterator[Table]:
    """Gathers and sums: ours as chosen by itself, the others at the best of all their settings."""
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    for line in report.read(folder, "collectives"):
        gathers_or_sums = line["op"] in ("all_gather", "reduce_scatter", "all_reduce")
        if gathers_or_sums and (line["backend"] != OURS or line["sms"] == "auto"):
            times = found.setdefault((line["op"], int(line["bytes_per_rank"]), line["timing"]), {})
            times[line["backend"]] = min(float(line["p50_us"]), times.get(line["backend"], float("inf")))
    rows = [
        Row((op, _size(size), timing), times[OURS], {name: time for name, time in times.items() if name != OURS})
        for (op, size, timing), times in sorted(found.items())
        if OURS in times and len(times) > 1
    ]
    yield from _table("Collectives", folder, "collectives", ("op", "bytes per rank", "timing"), rows)


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // 1024} KiB"


SERVED = {
    "itl_p50_ms": ("ms between tokens", False),
    "ttft_p50_ms": ("ms to the first token", False),
    "tokens_per_s": ("tokens/s", True),
}
"""Columns of vllm-serve.csv: what they are, and whether more is better."""


def serving(folder: Path) -> Iterator[Table]:
    """`vllm serve` with ours and with vLLM's default: means over the turns, of which each has both."""
    found: dict[str, dict[str, list[Csv]]] = {}
    for line in report.read(folder, "vllm-serve"):
        if not line["fault"]:
            name = line["backend"] if line["backend"] == "allgather_reducescatter" else OURS
            found.setdefault(line["load"], {}).setdefault(name, []).append(line)
    rows = []
    for load, lines in found.items():
        for column, (what, is_rate) in SERVED.items():
            means = {name: fmean(float(line[column]) for line in turns) for name, turns in lines.items()}
            if len(means) > 1 and OURS in means:
                ours = means.pop(OURS)
                rows.append(Row((load, what), ours, means, is_rate))
    yield from _table("vLLM, serving", folder, "vllm-serve", ("load", "what"), rows)


def _table(subject: str, folder: Path, name: str, columns: tuple[str, ...], rows: Sequence[Row]) -> Iterator[Table]:
    if rows:
        run = facts.read(folder)
        yield Table(subject, folder.name, name, facts.of_table(run, name), columns, tuple(rows))


KINDS: tuple[Callable[[Path], Iterator[Table]], ...] = (dispatch_and_combine, collectives, serving)
