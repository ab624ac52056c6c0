"""How long dispatch and combine take on clusters that are not here: EP8 to EP512, by arithmetic alone.

    python -m benchmarks.scale [--out DIR]

A topology is hosts of GPUs, a NIC for each, and constants. Three ways to move rows between hosts: a row per
expert, a row per rank (direct), a row per host that its ranks share over NVLink (two hops). Uniform routing. `scale` is
the forecast; `check` are figures that were measured, here or by others, beside what the same arithmetic says of them.
docs/lab/scale.md reads both.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import facts

HIDDEN, TOPK, EXPERTS = 7168, 8, 256
BF16, FP8 = 2 * HIDDEN, HIDDEN + HIDDEN // 128 * 4
"""Bytes of a row."""
WAYS = "per expert", "direct", "two hops"
TOKENS = 1, 8, 32, 128, 512, 4096
SIZES = 8, 16, 32, 64, 128, 256, 512
CHUNK_BYTES = 1 << 20
"""What a rail passes on at a time."""
RESULTS = Path(__file__).parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Topology:
    """A cluster.

    Attributes:
        name: of it.
        gpus: ranks of a host; each has a NIC, its rail.
        network_gbps: GB/s that leave a rank over its NIC, and reach it.
        link_gbps: GB/s that leave a GPU over NVLink; 0: a host has one rank.
        fixed_us: an operation without bytes: launch, credit, fence, last reads.
        network_us: one message, from its push to the other end, without the time of its bytes.
        message_us: a message more, of one proxy.
        hop_us: from the arrival at a rail until another GPU of its host sees it, without the time of the bytes.
    """

    name: str
    gpus: int
    network_gbps: float
    link_gbps: float
    fixed_us: float
    network_us: float
    message_us: float
    hop_us: float


AWAKE = Topology("2 H100 as 2 hosts, graphs", 1, 2.3, 0, 35, 15, 0.5, 0)
ASLEEP = dataclasses.replace(AWAKE, name="2 H100 as 2 hosts, eager", fixed_us=155)
"""The same where each operation wakes a proxy: 100 to 150 us (docs/lab/network-speed.md)."""
FOUR = Topology("4 H100 as 2 hosts", 2, 2.3, 350, 35, 33, 0.5, 10)
CPUS = tuple(
    Topology(f"16 processors as 2 hosts of {gpus}", gpus, gbps, 8, 200, 5, 0.5, 0)
    for gpus, gbps in ((1, 2.418), (2, 2.21))
)
"""Rates of the provider's own stream beside them."""
DEEPEP = Topology("H800, 8 x 400 Gb/s", 8, 48, 160, 30, 9, 0, 0)
POD = Topology("H100, 8 x 400 Gb/s", 8, 48, 343, 30, 9, 0.5, 6)
SLOW = Topology("H100, 8 x 100 Gb/s", 8, 12, 343, 30, 9, 0.5, 6)
FORECASTS = POD, SLOW


@dataclass(frozen=True)
class Step:
    """What ranks bring.

    Attributes:
        ranks: of the group, R.
        tokens: of each rank, T.
        row_bytes: as a row moves.
    """

    ranks: int
    tokens: int
    row_bytes: int


def hit(experts: int) -> float:
    """That a token with TOPK distinct experts of EXPERTS has one of these."""
    return 1 - math.comb(EXPERTS - experts, TOPK) / math.comb(EXPERTS, TOPK)


def hit_ranks(ranks: int, group: int) -> float:
    """That a token has an expert on one of these ranks, of `group` with equal parts of the experts; beyond EXPERTS
    ranks some hold copies, of which a token has one."""
    return hit(round(EXPERTS * ranks / group)) if group <= EXPERTS else 1 - (1 - ranks / group) ** TOPK


def rows_between_hosts(way: str, ranks: int, gpus: int) -> float:
    """Rows of a token that leave its host."""
    away = ranks - min(gpus, ranks)
    if way == "per expert":
        return TOPK * away / ranks
    if way == "direct":
        return away * hit_ranks(1, ranks)
    return away / gpus * hit_ranks(min(gpus, ranks), ranks)


def rows_over_links(way: str, ranks: int, gpus: int) -> float:
    """Rows of a token that cross NVLink: on its own host, and from rails to others of theirs."""
    own = min(gpus, ranks) - 1
    if way == "per expert":
        return TOPK * own / ranks
    if way == "direct":
        return own * hit_ranks(1, ranks)
    hosts = max(1, ranks // gpus)
    return hosts * own * hit_ranks(1, ranks)


def time_us(at: Topology, step: Step, way: str) -> float:
    """One operation of a rank. Network and NVLink work at once; in two hops the last chunk has the second hop alone.
    Combine is the same backwards."""
    rows = rows_between_hosts(way, step.ranks, at.gpus) * step.tokens
    network = rows * step.row_bytes / at.network_gbps / 1e3
    links = rows_over_links(way, step.ranks, at.gpus) * step.tokens * step.row_bytes
    links = links / at.link_gbps / 1e3 if at.link_gbps else 0.0
    if not rows:
        return at.fixed_us + max(links, 0.0)
    peers = (step.ranks - at.gpus) if way != "two hops" else step.ranks // at.gpus - 1
    network = max(network, peers * at.message_us)
    two = way == "two hops" and at.gpus > 1
    chunk = min(rows * step.row_bytes, CHUNK_BYTES) / at.link_gbps / 1e3 if two else 0.0
    return at.fixed_us + at.network_us + max(network, links) + (at.hop_us + chunk if two else 0.0)


# Forecast.


@dataclass(frozen=True, slots=True)
class Forecast:
    """A line of `scale.csv`; the best way apart, microseconds."""

    topology: str
    op: str
    ranks: int
    tokens: int
    per_expert_us: float
    direct_us: float
    two_hops_us: float
    direct_rows: float
    two_hops_rows: float


def forecasts() -> Iterator[Forecast]:
    """Dispatch in fp8 and combine in bf16."""
    for at in FORECASTS:
        for op, row_bytes in (("dispatch", FP8), ("combine", BF16)):
            for ranks in SIZES:
                for tokens in TOKENS:
                    times = [round(time_us(at, Step(ranks, tokens, row_bytes), way), 1) for way in WAYS]
                    rows = [round(rows_between_hosts(way, ranks, at.gpus), 3) for way in WAYS[1:]]
                    yield Forecast(at.name, op, ranks, tokens, *times, *rows)


# Check.


@dataclass(frozen=True, slots=True)
class Check:
    """A line of `check.csv`: what was measured and what the model says, microseconds; off: the model's by the other."""

    what: str
    op: str
    ranks: int
    tokens: int
    measured_us: float
    model_us: float
    off: float
    source: str


def check(at: Topology, step: Step, way: str, op: str, measured_us: float, source: str) -> Check:
    """One figure beside the model's."""
    model = time_us(at, step, way)
    return Check(
        at.name, op, step.ranks, step.tokens, measured_us, round(model, 1), round(model / measured_us, 3), source
    )


PUBLISHED = (
    ("dispatch", FP8, {8: 77, 16: 118, 32: 155, 64: 173, 128: 192, 256: 194}),
    ("combine", BF16, {8: 114, 16: 195, 32: 273, 64: 314, 128: 369, 256: 360}),
)
"""Microseconds by ranks, 128 tokens: DeepEP V1, low latency, a row per expert; published."""


def checks() -> Iterator[Check]:
    """Figures of others, then of here."""
    for op, row_bytes, times in PUBLISHED:
        for ranks, took in times.items():
            yield check(DEEPEP, Step(ranks, 128, row_bytes), "per expert", op, took, "DeepEP V1, published")
    for line in read(RESULTS / "2026-11-26-h100x2-nodes2" / "nodes.csv"):
        if line["layout"] != "expert_major":
            at = AWAKE if line["timing"] == "graph" or line["mode"] == "ht" else ASLEEP
            yield here(at, line, "docs/results/2026-11-26-h100x2-nodes2")
    for line in read(RESULTS / "2026-11-26-h100x4-nodes2" / "nodes.csv"):
        yield here(FOUR, line, "docs/results/2026-11-26-h100x4-nodes2")
    for line in read(RESULTS / "2026-11-26-network" / "network.csv"):
        op, _, rest = line["what"].partition(": ")
        if rest == "ours":  # a dispatch of cpu ranks sends a row per host, a combine in the order of ranks one per rank
            at = CPUS[line["of"].endswith("x 2")]
            step, way = Step(2 * at.gpus, 512, BF16), WAYS[2 if op == "dispatch" else 1]
            yield check(at, step, way, op, 1e3 * float(line["value"]), "docs/results/2026-11-26-network")


def here(at: Topology, line: dict[str, str], source: str) -> Check:
    """Of our kernels, which send a row per rank; of a pair in a graph the half."""
    parts = 2 if line["op"] == "pair" else 1
    step, took = Step(int(line["ranks"]), int(line["tokens"]), BF16), float(line["p50_us"]) / parts
    return check(at, step, "direct", "half of a pair" if parts == 2 else line["op"], took, source)


def read(path: Path) -> list[dict[str, str]]:
    """Lines of a csv file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def crossover(at: Topology, ranks: int, row_bytes: int) -> int | None:
    """Tokens of a rank from which on two hops are faster; None: never."""
    for tokens in range(1, max(TOKENS) + 1):
        step = Step(ranks, tokens, row_bytes)
        if time_us(at, step, "two hops") < time_us(at, step, "direct"):
            return tokens
    return None


# Plots.


def draw(folder: Path, lines: Sequence[Forecast], found: Sequence[Check]) -> None:
    """scale.svg: LL of 128 tokens over ranks; gain.svg: where two hops win; check.svg: model beside measurement."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "crossdock", "font.size": 10, "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False})
    from matplotlib import pyplot

    plots: dict[str, Callable[[Any], None]] = {
        "scale": lambda figure: _scale(figure, lines),
        "gain": lambda figure: _gain(figure, lines),
        "check": lambda figure: _check(figure, found),
    }
    for name, paint in plots.items():
        figure = pyplot.figure(figsize=(10.5, 4.6), layout="constrained")
        paint(figure)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def _scale(figure: Any, lines: Sequence[Forecast]) -> None:
    panels = figure.subplots(1, 2)
    colours = {"per_expert_us": "#8d99ae", "direct_us": "#d17b0f", "two_hops_us": "#0b6e4f"}
    for axes, op in zip(panels, ("dispatch", "combine"), strict=True):
        here = [one for one in lines if (one.topology, one.op, one.tokens) == (POD.name, op, 128)]
        for (column, colour), way in zip(colours.items(), WAYS, strict=True):
            axes.plot([one.ranks for one in here], [getattr(one, column) for one in here], label=way, color=colour,
                      marker="o", markersize=4)  # fmt: skip
        published = {ranks: took for of, _, times in PUBLISHED if of == op for ranks, took in times.items()}
        axes.plot(*zip(*published.items(), strict=True), "x", color="black", label="DeepEP, published (per expert)")
        axes.set(title=op, xlabel="ranks", xscale="log", ylim=(0, None))
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.minorticks_off()
    panels[0].set_ylabel("µs")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle(f"128 tokens per rank, {POD.name}: forecast")


def _gain(figure: Any, lines: Sequence[Forecast]) -> None:
    panels = figure.subplots(1, len(FORECASTS), sharey=True)
    for axes, at in zip(panels, FORECASTS, strict=True):
        for tokens in TOKENS:
            here = [one for one in lines if (one.topology, one.op, one.tokens) == (at.name, "combine", tokens)]
            here = [one for one in here if one.ranks > at.gpus]
            axes.plot([one.ranks for one in here], [one.direct_us / one.two_hops_us for one in here], marker="o",
                      markersize=4, label=f"T = {tokens}")  # fmt: skip
        axes.axhline(1, color="black", linestyle=":")
        axes.set(title=at.name, xlabel="ranks", xscale="log")
        axes.set_xticks(SIZES[1:], [str(size) for size in SIZES[1:]])
        axes.minorticks_off()
    panels[0].set_ylabel("direct ÷ two hops")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle("Combine in bf16, H 7168, K 8, E 256: how many times faster in two hops")


def _check(figure: Any, found: Sequence[Check]) -> None:
    axes = figure.subplots()
    for what in dict.fromkeys(one.what for one in found):
        here = [one for one in found if one.what == what]
        axes.plot([one.measured_us for one in here], [one.off for one in here], "o", label=what, markersize=4)
    axes.axhline(1, color="black", linestyle=":")
    axes.set(xlabel="measured, µs", ylabel="model ÷ measured", xscale="log", ylim=(0, 2))
    axes.legend(fontsize=8)
    figure.suptitle("The model beside what was measured")


def main(words: Sequence[str] | None = None) -> int:
    """Write tables and plots, print where the model is off."""
    parser = argparse.ArgumentParser(description="Forecast dispatch and combine on clusters, by arithmetic.")
    parser.add_argument(
        "--out", type=Path, help="folder for scale.csv, check.csv, run.json and plots; none: print only"
    )
    arguments = parser.parse_args(words)
    lines, found = list(forecasts()), list(checks())
    for what in dict.fromkeys(one.what for one in found):
        off = sorted(one.off for one in found if one.what == what)
        spread = f"{off[0]:.2f} to {off[-1]:.2f}, median {off[len(off) // 2]:.2f}"
        print(f"{what}: {len(off)} figures, model ÷ measured {spread}")
    for at in FORECASTS:
        for ranks in SIZES[1:]:
            least = [crossover(at, ranks, row_bytes) for row_bytes in (FP8, BF16)]
            print(f"{at.name}, {ranks} ranks: two hops win from T = {least[0]} (dispatch), {least[1]} (combine)")
    if arguments.out is not None:
        about = facts.of_control(sys.argv[1:] if words is None else words, {}, "benchmarks.scale")
        about["config"] = {at.name: dataclasses.asdict(at) for at in (*FORECASTS, DEEPEP, AWAKE, ASLEEP, FOUR, *CPUS)}
        facts.keep(arguments.out, "scale", Forecast, lines, about)
        facts.keep(arguments.out, "check", Check, found, about)
        draw(arguments.out, lines, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
