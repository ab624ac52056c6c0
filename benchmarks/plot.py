"""`python -m benchmarks.plot docs/results/<folder>`: plots of one GPU run beside its csv files, as SVG and PNG.

latency (LL pair over T, bound dotted), ll_sms (LL pair over multiprocessors), bandwidth (HT over multiprocessors, for
each T), throughput (HT as bars); of collectives gathers (over multiprocessors) and reductions (over bytes). Needs
matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import facts, plot_collectives, report, table

Csv = dict[str, str]
COLOURS = {"crossdock": "#0b6e4f", "nccl": "#8d99ae", "nccl_bare": "#5c677d", "agrs": "#c98686", "deepep": "#7b6fb0"}
OTHER = "#444444"
STYLES = {"fp8 + bf16": ("--", "s"), "fp8": (":", "^")}
"""Line and marker by how rows move; others are solid with dots."""


def main(arguments: list[str] | None = None) -> int:
    """Draw what the folder has data for; returns the exit code."""
    folders = sys.argv[1:] if arguments is None else arguments
    if len(folders) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    draw(Path(folders[0]))
    return 0


def draw(folder: Path) -> list[Path]:
    """The files written."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "crossdock", "font.size": 10, "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False})
    run = facts.read(folder)
    plots: dict[str, tuple[str, Callable[[Any, list[Csv]], None]]] = {
        "latency": ("ll", _latency),
        "ll_sms": ("ll_sms", _ll_sms),
        "bandwidth": ("sweep", _bandwidth),
        "throughput": ("ht", _throughput),
        "gathers": ("collectives", plot_collectives.gathers),
        "reductions": ("collectives", plot_collectives.reductions),
    }
    written = []
    for name, (source, paint) in plots.items():
        lines = report.read(folder, source)
        if lines:
            model = "" if source == "collectives" else " · H 7168, E 256, K 8"
            written += _figure(folder / name, facts.of_table(run, source), lines, paint, model)
    return written


def _figure(
    path: Path, run: dict[str, Any], lines: list[Csv], paint: Callable[[Any, list[Csv]], None], model: str
) -> list[Path]:
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10.5, 4.6), layout="constrained")
    paint(figure, lines)
    what = f"{run['num_gpus']} x {run['gpu']} · {str(run['date'])[:10]} · commit {str(run['commit'])[:12]}"
    figure.supxlabel(what + model, fontsize=8, color="#555555")
    written = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
    for target in written:
        figure.savefig(target, dpi=130, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)
    return written


def _latency(figure: Any, lines: list[Csv]) -> None:
    warm = [line for line in lines if line["op"] == "pair" and line["l2"] == "warm"]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, layout in zip(panels, ("rank_major", "expert_major"), strict=True):
        here = [line for line in warm if line["layout"] == layout]
        for backend, payload in dict.fromkeys((line["backend"], table.payload(line)) for line in here):
            found = [line for line in here if (line["backend"], table.payload(line)) == (backend, payload)]
            style = STYLES.get(payload, ("-", "o"))
            if backend == "crossdock" or payload == "bf16":
                _curve(axes, found, "p50_us", f"{_name(backend)} {payload}", style, COLOURS.get(backend, OTHER))
        ours = [line for line in here if line["backend"] == "crossdock" and table.payload(line) == "bf16"]
        _curve(axes, ours, "bound_us", "bound, bf16", ((0, (1, 3)), None), "black")
        least = [line | {"least": str(least_us(line))} for line in ours if line.get("floor_us")]
        _curve(axes, least, "least", "floor + bound, bf16", ((0, (4, 2)), None), "black")
        axes.set(title=layout.replace("_", "-"), xlabel="tokens per rank", xscale="log", yscale="log")
        ticks = sorted({int(line["tokens"]) for line in here})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
    panels[0].set_ylabel("µs per dispatch + combine pair")
    times = [float(line["p50_us"]) for line in warm]
    low, high = min(times) / 2, max(times) * 1.5
    marks = [value for value in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= value <= high]
    panels[0].set_ylim(low, high)
    panels[0].set_yticks(marks, [str(mark) for mark in marks])
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle("Low latency: CUDA graph of 10 pairs, L2 warm, slowest rank, median")


def least_us(line: Csv) -> float:
    """Floor and bound of an LL pair."""
    return float(line["floor_us"]) + float(line["bound_us"])


def _curve(axes: Any, lines: list[Csv], column: str, label: str, style: tuple[Any, Any], colour: str) -> None:
    points = sorted((int(line["tokens"]), float(line[column])) for line in lines)
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, label=label, linestyle=style[0], marker=style[1], color=colour, markersize=4)


def _ll_sms(figure: Any, lines: list[Csv]) -> None:
    panels = figure.subplots(1, 2, sharey=False)
    for axes, tokens in zip(panels, sorted({line["tokens"] for line in lines}, key=int)[:2], strict=False):
        here = [line for line in lines if line["tokens"] == tokens]
        for layout, colour in (("rank_major", COLOURS["crossdock"]), ("expert_major", "#d17b0f")):
            points = sorted((int(ln["sms"]), float(ln["p50_us"])) for ln in here if ln["layout"] == layout)
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, label=layout.replace("_", "-"), marker="o", color=colour, markersize=4)
        least = [least_us(line) for line in here if line.get("floor_us")]
        if least:
            axes.axhline(min(least), color="black", linestyle=(0, (1, 3)), label="floor + bound")
        axes.set(title=f"T = {tokens}", xlabel="multiprocessors", ylim=(0, None))
        ticks = sorted({int(ln["sms"]) for ln in here})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    panels[0].set_ylabel("µs per dispatch + combine pair")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle("Low latency over num_sms, bf16: CUDA graph of 10 pairs, L2 warm, slowest rank, median")


def _bandwidth(figure: Any, lines: list[Csv]) -> None:
    steps = sorted({line["tokens"] for line in lines}, key=int)
    panels = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    for axes, tokens in zip(panels, steps, strict=True):
        _bandwidth_of(axes, [line for line in lines if line["tokens"] == tokens])
        axes.set(title=f"T = {tokens}", xlabel="multiprocessors")
    panels[0].set_ylabel("GB/s leaving a GPU")
    figure.legend(*panels[-1].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle("High throughput, bf16: fresh routing, L2 flushed, slowest rank, median")


def _bandwidth_of(axes: Any, lines: list[Csv]) -> None:
    for layout, colour in (("flat", COLOURS["crossdock"]), ("grouped", "#d17b0f")):
        for op, style in (("dispatch", "-"), ("combine", "--")):
            here = [line for line in lines if (line["layout"], line["op"]) == (layout, op)]
            points = sorted((int(line["sms"]), float(line["physical_gbps"])) for line in here)
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, label=f"{layout} {op}", linestyle=style, color=colour, marker="o", markersize=3.5)
    first = lines[0]
    ceiling = float(first["physical_gbps"]) * float(first["p50_us"]) / float(first["bound_us"])
    axes.axhline(ceiling, color="black", linestyle=(0, (1, 3)), label="bound of this routing")
    axes.set(ylim=(0, ceiling * 1.12))
    ticks = sorted({int(line["sms"]) for line in lines})
    axes.set_xticks(ticks, [str(t) for t in ticks], fontsize=8)


def _throughput(figure: Any, lines: list[Csv]) -> None:
    chosen = [
        line
        for line in lines
        if line["tokens"] == "4096"
        and line["routing"] == "uniform"
        and not line["form"]
        and line["combine_dtype"] != "fp8"
        and (line["op"] == "dispatch" or line["dispatch_dtype"] != "fp8")
    ]
    kinds = list(dict.fromkeys((line["op"], line["layout"], table.payload(line)) for line in chosen))
    backends = list(dict.fromkeys(line["backend"] for line in chosen))
    axes = figure.subplots()
    width = 0.8 / max(1, len(backends))
    for place, backend in enumerate(backends):
        found = {(ln["op"], ln["layout"], table.payload(ln)): ln for ln in chosen if ln["backend"] == backend}
        at = [n for n, kind in enumerate(kinds) if kind in found]
        heights = [float(found[kinds[n]]["p50_us"]) for n in at]
        spots = [n + (place - (len(backends) - 1) / 2) * width for n in at]
        bars = axes.bar(spots, heights, width * 0.92, label=_name(backend), color=COLOURS.get(backend, OTHER))
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    for n, kind in enumerate(kinds):
        bound = next(float(ln["bound_us"]) for ln in chosen if (ln["op"], ln["layout"], table.payload(ln)) == kind)
        axes.hlines(bound, n - 0.42, n + 0.42, color="black", linestyle=":", label="bound" if n == 0 else None)
    axes.set_xticks(range(len(kinds)), [f"{op}\n{layout} {payload}" for op, layout, payload in kinds])
    axes.set_ylabel("µs per call")
    figure.legend(fontsize=8, loc="outside right upper")
    figure.suptitle("High throughput, T = 4096, uniform routing: L2 flushed, slowest rank, median")


def _name(backend: str) -> str:
    return table.NAMES.get(backend, backend)


if __name__ == "__main__":
    sys.exit(main())
