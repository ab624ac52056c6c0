"""What `plot.py` draws of a table of collectives: all-gathers over multiprocessors, all-reduces over bytes."""

from __future__ import annotations

from typing import Any

from benchmarks import bounds

Csv = dict[str, str]
COLOURS = {
    "crossdock": "#0b6e4f", "nccl": "#8d99ae", "nccl_symm": "#5c677d", "nccl_ce": "#c98686", "torch": "#7b6fb0",
}  # fmt: skip
NAMES = {"nccl_symm": "nccl, windows", "nccl_ce": "nccl, copy engines", "torch": "torch, symmetric memory"}
MIB = 1 << 20
LABELLED = (4, 8, 16, 32, 64, 132)
"""Multiprocessors that the axis names: all would overlap."""


def gathers(figure: Any, lines: list[Csv]) -> None:
    """GB/s over multiprocessors, a panel for each size; what has no number of them as a line across, and so the rates
    that stores and copy engines reach at best."""
    found = [line for line in lines if line["op"] == "all_gather" and line["t"].startswith("1")]
    ranks = int(found[0]["ranks"])
    ceilings = (
        ("-", bounds.gbps(ranks), "bound of stores"),
        ("-.", bounds.gbps(ranks, copies=True), "bound of copy engines"),
    )
    sizes = sorted({int(line["bytes_per_rank"]) for line in found})
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        here = [line for line in found if int(line["bytes_per_rank"]) == size]
        for backend in dict.fromkeys(line["backend"] for line in here):
            colour, name = COLOURS[backend], NAMES.get(backend, backend)
            mine = [line for line in here if line["backend"] == backend]
            points = sorted((int(ln["sms"]), float(ln["gbps"])) for ln in mine if ln["sms"] not in ("auto", "0"))
            if points:
                axes.plot(*zip(*points, strict=True), label=name, color=colour, marker="o", markersize=4)
            for sms, style in (("auto", "--"), ("0", ":")):
                level = next((float(line["gbps"]) for line in mine if line["sms"] == sms), None)
                if level is not None:
                    how = "as it chooses" if sms == "auto" else "no multiprocessor"
                    axes.axhline(level, color=colour, linestyle=style, label=f"{name}, {how}")
        for style, level, name in ceilings:
            axes.axhline(level, color="black", linewidth=0.7, linestyle=style, label=name)
        axes.set(title=f"{size // MIB} MiB a rank", xlabel="multiprocessors", xscale="log")
        ticks = sorted({int(line["sms"]) for line in here if line["sms"] not in ("auto", "0")})
        axes.set_xticks(ticks, [str(tick) if tick in LABELLED else "" for tick in ticks], fontsize=8)
        axes.minorticks_off()
    panels[0].set(ylabel="GB/s leaving a GPU", ylim=(0, 1.05 * max(level for _, level, _ in ceilings)))
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle("All-gather, bf16, eager: L2 flushed, slowest rank, median")


def reductions(figure: Any, lines: list[Csv]) -> None:
    """Microseconds of all-reduces over bytes, the best of each backend; in CUDA graphs, and eager."""
    panels = figure.subplots(1, 2)
    for axes, timing in zip(panels, ("graph", "eager"), strict=True):
        here = [line for line in lines if line["op"] == "all_reduce" and line["timing"] == timing]
        sizes = sorted({int(line["bytes_per_rank"]) for line in here})
        for backend in dict.fromkeys(line["backend"] for line in here):
            best: dict[int, float] = {}
            for line in here:
                if line["backend"] == backend:
                    size = int(line["bytes_per_rank"])
                    best[size] = min(best.get(size, float("inf")), float(line["p50_us"]))
            if best:
                name = NAMES.get(backend, backend)
                axes.plot(*zip(*sorted(best.items()), strict=True), label=name, color=COLOURS[backend], marker="o")
        axes.set(title="CUDA graph" if timing == "graph" else "eager, L2 flushed", xscale="log", ylim=(0, None))
        labels = [f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB" for size in sizes]
        axes.set_xticks(sizes, labels)
        axes.minorticks_off()
    panels[0].set_ylabel("µs")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle("All-reduce, bf16: slowest rank, median")
