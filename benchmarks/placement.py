"""How well experts are placed: imbalance and moves on zipf loads, beside greedy and EPLB. No group, no weights.

    python -m benchmarks.placement [--out DIR] [--seeds N]        (make bench-placement)

A load is zipf over a random order of the experts. It then drifts: each expert's by a factor between 0.7 and 1.4, and
two of the ten hottest change places with cold ones. Imbalance is the most loaded rank over the mean one, when the
copies of an expert share its rows evenly.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import eplb, facts
from benchmarks.parts import Parts
from crossdock.control.placement.balancer import balance, copies_of, first_table, imbalance, num_moved
from crossdock.control.placement.tables import Shape, Table

NUM_GROUPS = 8
HOT = 10


@dataclass(frozen=True, slots=True)
class Case:
    """E, R, copies beyond one each, ranks of an NVLink domain, zipf exponent."""

    experts: int
    ranks: int
    redundant: int
    domain_ranks: int
    zipf: float

    @property
    def shape(self) -> Shape:
        """The input of `balance`."""
        domains = tuple(rank // self.domain_ranks for rank in range(self.ranks))
        return Shape(self.experts, self.experts + self.redundant, domains)


CASES = tuple(
    Case(experts, ranks, redundant, min(8, ranks), zipf)
    for experts, ranks, redundant in ((64, 8, 0), (64, 8, 8), (128, 8, 16), (256, 8, 32), (256, 32, 32), (256, 64, 64))
    for zipf in (0.5, 1.0)
)


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the seeds of one case.

    Attributes:
        experts, ranks, redundant, domain_ranks, zipf: of the case.
        blocks, greedy, eplb, eplb_groups, ours: imbalance of each from nothing; eplb_groups is EPLB's hierarchical
            policy over NVLink domains.
        ours_domains: imbalance between domains.
        apart: share of the experts with copies whose copies lie in as many domains as they can.
        kept: imbalance of our table once the load has drifted.
        eplb_again, eplb_moved: after the drift: imbalance, and copies loaded for it, in percent of all.
        ours_again, ours_moved: the same.
        first_ms, ours_ms: CPU time of one call from nothing, and of one after the drift.
    """

    experts: int
    ranks: int
    redundant: int
    domain_ranks: int
    zipf: float
    blocks: float
    greedy: float
    eplb: float
    eplb_groups: float
    ours: float
    ours_domains: float
    apart: float
    kept: float
    eplb_again: float
    eplb_moved: float
    ours_again: float
    ours_moved: float
    first_ms: float
    ours_ms: float


def zipf_load(num_experts: int, exponent: float, rng: random.Random) -> list[float]:
    """Shares that sum to 1, over a random order of the experts."""
    shares = [1 / rank**exponent for rank in range(1, num_experts + 1)]
    rng.shuffle(shares)
    total = sum(shares)
    return [share / total for share in shares]


def drift(load: Sequence[float], rng: random.Random) -> list[float]:
    """The load of a later hour."""
    later = [one * rng.uniform(0.7, 1.4) for one in load]
    order = sorted(range(len(later)), key=later.__getitem__, reverse=True)
    for hot, cold in zip(rng.sample(order[:HOT], 2), rng.sample(order[HOT:], 2), strict=True):
        later[hot], later[cold] = later[cold], later[hot]
    return later


def measure(case: Case, num_seeds: int) -> Row:
    """One row."""
    samples = [_sample(case, random.Random(seed)) for seed in range(num_seeds)]
    means = {name: round(statistics.fmean(sample[name] for sample in samples), 4) for name in samples[0]}
    values: dict[str, Any] = asdict(case) | means
    return Row(**values)


def _sample(case: Case, rng: random.Random) -> dict[str, float]:
    shape = case.shape
    load = zipf_load(case.experts, case.zipf, rng)
    begun = time.process_time()
    ours = balance(load, shape)
    first_s, rival = time.process_time() - begun, eplb.eplb(load, shape)
    later = drift(load, rng)
    begun = time.process_time()
    again = balance(later, shape, ours)
    took_s = time.process_time() - begun
    rival_again = eplb.eplb(later, shape)
    slots = shape.num_slots
    first: dict[str, Callable[[], Table]] = {
        "blocks": lambda: first_table(Shape(case.experts, case.experts, shape.domains)),
        "greedy": lambda: eplb.greedy(load, shape),
        "eplb": lambda: rival,
        "eplb_groups": lambda: eplb.eplb_hierarchical(load, shape, NUM_GROUPS),
        "ours": lambda: ours,
    }
    return {name: imbalance(load, make()) for name, make in first.items()} | {
        "ours_domains": imbalance(load, ours, shape.domains),
        "apart": apart(ours, shape),
        "kept": imbalance(later, ours),
        "eplb_again": imbalance(later, rival_again),
        "eplb_moved": 100 * num_moved(rival, rival_again) / slots,
        "ours_again": imbalance(later, again),
        "ours_moved": 100 * num_moved(ours, again) / slots,
        "first_ms": 1e3 * first_s,
        "ours_ms": 1e3 * took_s,
    }


def apart(table: Table, shape: Shape) -> float:
    """Share of the experts with copies whose copies lie in as many domains as they can; 1 where none has."""
    counts, num_domains = copies_of(table, shape.num_experts), len(set(shape.domains))
    homes: list[set[int]] = [set() for _ in counts]
    for rank, held in enumerate(table):
        for expert in held:
            homes[expert].add(shape.domains[rank])
    several = [(len(found), min(count, num_domains)) for found, count in zip(homes, counts, strict=True) if count > 1]
    return sum(found == most for found, most in several) / len(several) if several else 1.0


def main(words: Sequence[str] | None = None) -> int:
    """Measure all cases; print each as it is done; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Measure how well experts are placed.")
    parser.add_argument("--out", type=Path, help="folder for placement.csv and run.json; none: print only")
    parser.add_argument("--seeds", type=int, default=20, help="loads per case")
    arguments = parser.parse_args(words)
    given = sys.argv[1:] if words is None else words
    about = facts.of_control(given, {"seeds": arguments.seeds}, "benchmarks.placement")
    table = Parts(arguments.out, "placement", Row, lambda: about, _show)
    for case in CASES:
        table.measure(str(case), lambda case=case: [measure(case, arguments.seeds)])  # type: ignore[misc]
    return table.status


def _show(row: Row) -> None:
    print("  ".join(f"{field.name} {getattr(row, field.name)}" for field in fields(Row)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
