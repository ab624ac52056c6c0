"""The dashboard's panels over one run, drawn from what a Prometheus answered.

    python -m tests.observability.picture ANSWERS.json.gz [PNG]        draws what a run has kept (`--out`)

The expressions are those of the generated dashboard. Heat maps of the waits are shown side by side, one for each fault.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

from tests.house import dashboard
from tests.observability.prometheus import Prometheus

WINDOW, STEP_S = "15s", 2
SERIES = (
    "Epochs", "Request latency", "Dispatch, every call", "Verdict: steps lost to", "Share of the bound",
    "Tokens answered", "Step by phase",
)  # fmt: skip
MATRIX = "Who waits for whom"
GROUND, PANEL, INK, FAINT, GRID = "#0e1116", "#161b22", "#e6edf3", "#8b949e", "#2a313c"
COLOURS = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#39c5cf", "#d29922", "#ff7b72")
STATES = {1: ("FORMING", "#d29922"), 2: ("EXCHANGING", "#e3b341"), 3: ("SERVING", "#238636")}
WORDS = {
    "stopped": "SIGSTOP pulses", "limited": "CPU limit", "hot_expert": "hot expert", "skewed": "skewed routing",
    "killed": "killed",
}  # fmt: skip

THEME = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": FAINT, "grid.color": GRID,
    "axes.facecolor": PANEL, "figure.facecolor": GROUND, "axes.edgecolor": GRID, "xtick.color": FAINT,
    "ytick.color": FAINT, "axes.grid": True, "grid.linewidth": 0.6, "axes.titlelocation": "left", "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.titlecolor": INK, "legend.frameon": False, "legend.fontsize": 7.5,
    "axes.spines.top": False, "axes.spines.right": False, "legend.labelcolor": FAINT,
}  # fmt: skip

Answers = dict[str, Any]


def queries(title: str) -> list[tuple[str, str]]:
    """Expressions and legends of a panel of the dashboard, for all groups."""
    panels = json.loads(dashboard.dashboard_json())["panels"]
    (panel,) = [one for one in panels if one["title"] == title]
    return [
        (
            one["expr"].replace("$__rate_interval", WINDOW).replace('"$job"', '".+"').replace('"$group"', '"default"'),
            one["legendFormat"],
        )
        for one in panel["targets"]
    ]


def ask(server: Prometheus, begin_s: float, end_s: float, faults: list[dict[str, Any]]) -> Answers:
    """What the panels show from `begin_s` to `end_s`; `faults`: name, rank, begin_s, end_s, fired_s (None: not)."""
    span = {"start": str(begin_s), "end": str(end_s), "step": str(STEP_S)}
    panels = {
        title: [
            {"legend": _legend(legend, one["metric"]), "labels": one["metric"], "points": one["values"]}
            for expression, legend in queries(title)
            for one in server.get("query_range", query=expression, **span)["result"]
        ]
        for title in SERIES
    }
    moments = {"calm": faults[0]["begin_s"] - 2, **{one["name"]: one["end_s"] - 2 for one in faults if one["shown"]}}
    (expression, _), *_ = queries(MATRIX)
    matrices = {
        name: [
            (int(one["metric"]["rank"]), int(one["metric"]["peer"]), float(one["value"][1]))
            for one in server.get("query", query=expression, time=str(moment))["result"]
        ]
        for name, moment in moments.items()
    }
    return {"begin_s": begin_s, "end_s": end_s, "faults": faults, "panels": panels, "matrices": matrices}


def _legend(legend: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def keep(answers: Answers, path: Path) -> None:
    """Write them down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(answers).encode(), mtime=0))


def draw(answers: Answers, path: Path) -> None:
    """One picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(THEME)
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(16, 11.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, hspace=0.03, wspace=0.02)  # type: ignore[union-attr]
    top, maps, middle, low = figure.subfigures(4, 1, height_ratios=(1.5, 2.7, 2.6, 2.6))
    for part in (top, maps, middle, low):
        part.set_facecolor(GROUND)
    figure.suptitle(
        "Crossdock: a group under load, faults injected one after the other; the panels of its dashboard, as Prometheus"
        " answered them",
        x=0.008, ha="left", fontsize=12, color=INK,
    )  # fmt: skip
    _epochs(top.subplots(), answers)
    _matrices(maps, answers)
    left, centre, right = middle.subplots(1, 3)
    _lines(left, answers, "Request latency", "ms", 1e3, only="OK")
    _lines(centre, answers, "Verdict: steps lost to", "% of the steps", 100, fill=True)
    _lines(right, answers, "Share of the bound", "% of one processor's copy rate", 100)
    left, centre, right = low.subplots(1, 3)
    _stack(left, answers, "Tokens answered")
    _calls(centre, answers, "Dispatch, every call")
    _lines(right, answers, "Step by phase", "ms", 1e3, only="p50")
    figure.savefig(path, dpi=120, facecolor=GROUND)
    pyplot.close(figure)


def _since(answers: Answers, points: list[tuple[float, str]]) -> tuple[list[float], list[float]]:
    return [at - answers["begin_s"] for at, _ in points], [float(value) for _, value in points]


def _shade(axes: Any, answers: Answers) -> None:
    """Faults, and the time axis."""
    from matplotlib.ticker import MultipleLocator

    for fault in answers["faults"]:
        axes.axvspan(
            fault["begin_s"] - answers["begin_s"],
            fault["end_s"] - answers["begin_s"],
            color="#ff7b72",
            alpha=0.09,
            lw=0,
        )
    axes.set_xlim(0, answers["end_s"] - answers["begin_s"])
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.xaxis.set_major_formatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}")


def _epochs(axes: Any, answers: Answers) -> None:
    """A bar of states, a bar of epochs, and what was injected when, with the moment at which the alert fired."""
    axes.set_title("Epochs; what was injected, and when the alert CrossdockSlow named it (triangle)", pad=8)
    _shade(axes, answers)
    for one in answers["panels"]["Epochs"]:
        times, values = _since(answers, one["points"])
        runs: list[tuple[float, float, float]] = []
        for at, value in zip(times, values, strict=True):
            if runs and runs[-1][2] == value and at - runs[-1][1] <= 3 * STEP_S:
                runs[-1] = (runs[-1][0], at + STEP_S, value)
            else:
                runs.append((at, at + STEP_S, value))
        place = 1 if one["legend"] == "state" else 0
        for begin, end, value in runs:
            text, colour = (
                STATES[int(value)] if place else (f"epoch {int(value)}", ("#1f3a5f", "#2d5a88")[int(value) % 2])
            )
            axes.barh(place, end - begin, left=begin, height=0.72, color=colour, lw=0)
            if end - begin > 12:
                axes.text((begin + end) / 2, place, text, ha="center", va="center", fontsize=8, color="white")
    for fault in answers["faults"]:
        begin, end = fault["begin_s"] - answers["begin_s"], fault["end_s"] - answers["begin_s"]
        axes.barh(2, max(end - begin, 2), left=begin, height=0.72, color="#da3633", alpha=0.85, lw=0)
        axes.text(
            begin + 2, 2.62, f"{WORDS[fault['name']]}, rank {fault['rank']}", fontsize=8, color="#ffa198", va="center"
        )
        if fault["fired_s"] is not None:
            axes.plot(begin + fault["fired_s"], 2, marker="^", ms=7, color="white")
            axes.text(
                begin + fault["fired_s"] + 2, 2, f"{fault['fired_s']:.0f} s", fontsize=7.5, color="white", va="center"
            )
    axes.set_yticks((0, 1, 2), ("epoch", "state", "fault"))
    axes.set_ylim(-0.5, 3.0)
    axes.grid(visible=False)
    axes.tick_params(length=0)


def _matrices(figure: Any, answers: Answers) -> None:
    """Rank by peer, for each fault."""
    found = {name: cells for name, cells in answers["matrices"].items() if cells}
    panels = figure.subplots(1, max(5, len(found)), squeeze=False)[0]
    for empty in panels[len(found) :]:
        empty.set_axis_off()
    figure.suptitle("Who waits for whom: share of its time that a rank (row) waits for a peer (column)",
                    x=0.008, ha="left", fontsize=10, fontweight="bold")  # fmt: skip
    size = 1 + max(max(rank, peer) for cells in found.values() for rank, peer, _ in cells)
    ranks = {one["name"]: one["rank"] for one in answers["faults"]}
    for axes, (name, cells) in zip(panels, found.items(), strict=False):
        grid = [[0.0] * size for _ in range(size)]
        for rank, peer, share in cells:
            grid[rank][peer] = share
        image = axes.imshow(grid, cmap="magma", vmin=0, vmax=0.5)
        axes.set_title("nothing injected" if name == "calm" else f"{WORDS[name]}, rank {ranks[name]}", fontsize=9)
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        if name != "calm":
            axes.get_xticklabels()[ranks[name]].set(color="#ffa198", fontweight="bold")
    bar = figure.colorbar(image, ax=panels, shrink=0.85, pad=0.01, format=lambda value, _: f"{value:.0%}")
    bar.outline.set_edgecolor(GRID)


def _lines(
    axes: Any, answers: Answers, title: str, unit: str, scale: float, only: str = "", fill: bool = False
) -> None:
    axes.set_title(title)
    _shade(axes, answers)
    chosen = [one for one in answers["panels"][title] if only in one["legend"]]
    for number, one in enumerate(sorted(chosen, key=lambda one: one["legend"])):
        times, values = _since(answers, one["points"])
        shown = [scale * value if math.isfinite(value) else math.nan for value in values]
        gaps = _broken(times, shown)
        axes.plot(*gaps, color=COLOURS[number % len(COLOURS)], lw=1.4, label=one["legend"])
        if fill:
            axes.fill_between(*gaps, color=COLOURS[number % len(COLOURS)], alpha=0.25, lw=0)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    if chosen:
        axes.legend(loc="upper left", ncols=2)


def _broken(times: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """With gaps where there was no answer."""
    ats, shown = list(times[:1]), list(values[:1])
    for before, at, value in zip(times, times[1:], values[1:], strict=False):
        if at - before > 1.5 * STEP_S:
            ats.append((before + at) / 2)
            shown.append(math.nan)
        ats.append(at)
        shown.append(value)
    return ats, shown


def _stack(axes: Any, answers: Answers, title: str) -> None:
    """One area for each worker."""
    axes.set_title(f"{title}, by worker")
    _shade(axes, answers)
    lines = sorted(answers["panels"][title], key=lambda one: one["legend"])
    grid = sorted({at for one in lines for at, _ in one["points"]})
    rows = []
    for one in lines:
        values = {at: float(value) for at, value in one["points"]}
        rows.append([values.get(at, 0.0) for at in grid])
    axes.stackplot([at - answers["begin_s"] for at in grid], rows, colors=COLOURS, alpha=0.85, lw=0)
    axes.set_ylabel("tokens per second")


def _calls(axes: Any, answers: Answers, title: str) -> None:
    """Every call by its duration: buckets over time."""
    axes.set_title("Every dispatch by its duration")
    lines = [one for one in answers["panels"][title] if one["labels"]["le"] != "+Inf"]
    lines.sort(key=lambda one: float(one["labels"]["le"]))
    grid = sorted({at for one in lines for at, _ in one["points"]})
    counts = [{at: float(value) for at, value in one["points"]} for one in lines]
    rows = [
        [max(0.0, counts[i].get(at, 0.0) - (counts[i - 1].get(at, 0.0) if i else 0.0)) ** 0.5 for at in grid]
        for i in range(len(lines))
    ]
    edges = [1e3 * float(one["labels"]["le"]) for one in lines]
    seen = [i for i, row in enumerate(rows) if max(row) > 0]
    first, last = seen[0], seen[-1] + 1
    axes.pcolormesh(
        [at - answers["begin_s"] for at in grid], edges[first:last], rows[first:last], cmap="magma", shading="nearest"
    )
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.grid(visible=False)
    _shade(axes, answers)


def main() -> None:
    """Draw what was kept."""
    source = Path(sys.argv[1])
    draw(
        json.loads(gzip.decompress(source.read_bytes())),
        Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_name("dashboard.png"),
    )


if __name__ == "__main__":
    main()
