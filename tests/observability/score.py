"""How often the verdict is right, on modelled groups and on recorded looks.

    python -m tests.observability.score [LOOKS.jsonl[.gz] ...] [--cases 2000] [--out DIR]

A look is right if it names the kind of the injected fault, and its rank; a look without a fault that names anything is
a false alarm. `--out` writes score.csv and run.json.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts
from crossdock.control.latency.verdict import Judgement, RankTimes, Usual, judge, usual_of
from tests.unit.lockstep import Lockstep

KINDS = {
    "none": "nothing", "stopped": "slow_rank", "limited": "slow_rank", "niced": "slow_rank", "hot_expert": "hot_expert",
    "skewed": "skewed_routing", "throttled": "slow_link", "uniform": "uniform_slowness", "slow_host": "slow_host",
}  # fmt: skip
"""The right verdict on each fault."""
RANKED = {"stopped", "limited", "niced", "hot_expert", "skewed"}


def is_right(fault: str, rank: int, found: Judgement) -> bool:
    """Whether a finding names the fault, and its rank where it has one."""
    return found.kind == KINDS[fault] and (fault not in RANKED or found.ranks == (rank,))


def times_of(look: Mapping[str, Any]) -> dict[int, RankTimes]:
    """The figures of a recorded look."""
    return {int(rank): _rank_times(figures) for rank, figures in look["ranks"].items()}


def _rank_times(figures: Mapping[str, Any]) -> RankTimes:
    waits_s = sum(one.get("wait_s", 0.0) for one in figures.get("operations", ()))
    late = {one["op"]: tuple(one.get("late_s", ())) for one in figures.get("operations", ())}
    return RankTimes(
        int(figures.get("steps", 0)), figures.get("step_s", 0.0), waits_s, figures.get("experts_s", 0.0),
        int(figures.get("rows", 0)), int(figures.get("hot_expert", 0)), int(figures.get("hot_rows", 0)), late,
        figures.get("host", ""),
    )  # fmt: skip


def recorded(looks: Sequence[Mapping[str, Any]]) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """(fault, "right" or what was said) of each look; and of what is shown at the end of each fault, which two looks in
    a row must have said. What is usual is learned from the looks without a fault, per recording."""
    calm: dict[str, Usual] = {}
    for one in looks:
        usual = usual_of(times_of(one)) if one["fault"] == "none" else None
        if usual is not None:
            calm[one["run"]] = calm[one["run"]].mixed(usual, 0.2) if one["run"] in calm else usual
    counts: Counter[tuple[str, str]] = Counter()
    shown: Counter[tuple[str, str]] = Counter()
    for _, segment in itertools.groupby(looks, key=lambda one: (one["run"], one["fault"], one["rank"], one["began"])):
        said, last = Judgement("nothing"), Judgement("nothing")
        for one in segment:
            found = judge(times_of(one), calm.get(one["run"]))
            said, last = (found if found.named in {last.named, said.named} else said), found
            counts[_told(one, found)] += 1
        shown[_told(one, said)] += 1
    return counts, shown


def _told(look: Mapping[str, Any], found: Judgement) -> tuple[str, str]:
    return look["fault"], "right" if is_right(look["fault"], look["rank"], found) else found.kind


def modelled_case(made: random.Random) -> tuple[str, int, Lockstep]:
    """A group of 4 to 16 ranks with one fault of a size that costs a sixth of its steps or more, or with none."""
    size = made.choice((4, 6, 8, 16))
    rank = made.randrange(size)
    two = tuple("ab"[2 * each // size] for each in range(size))
    fault = made.choice((*KINDS, *["none"] * 4))
    group = Lockstep(two if fault in {"throttled", "slow_host"} else ("a",) * size, noise=made.choice((0.1, 0.3, 1.0)))
    factor = made.uniform(2.0, 5.0)
    match fault:
        case "stopped":
            group.stop = rank, made.uniform(0.1, 0.5), 0.05
        case "limited" | "niced":
            group.slow = {rank: factor}
        case "hot_expert" | "skewed":
            rows = int(100 * factor)
            group.rows, group.hot = {rank: rows}, {rank: (7, int(rows * (0.75 if fault == "hot_expert" else 0.2)))}
        case "throttled":
            group.wire_s = lambda i, j: 1e-3 * factor * (two[i] != two[j])
        case "uniform":
            group.slow = dict.fromkeys(range(size), factor + 1)
        case "slow_host":
            group.slow = {each: factor for each in range(size) if two[each] == two[rank]}
    return fault, rank, group


def modelled_counts(cases: int, seed: int) -> Counter[tuple[str, str]]:
    """As `recorded`, of modelled groups."""
    made = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    for _ in range(cases):
        fault, rank, group = modelled_case(made)
        calm = Lockstep(group.hosts, noise=group.noise).run(60, made.randrange(1 << 30))
        found = judge(group.run(made.randrange(100, 300), made.randrange(1 << 30)), usual_of(calm))
        counts[fault, "right" if is_right(fault, rank, found) else found.kind] += 1
    return counts


def rates(counts: Counter[tuple[str, str]]) -> tuple[float, float]:
    """Share of faults that were not named right, and of calm looks that named something."""
    faults = sum(number for (fault, _), number in counts.items() if fault != "none")
    wrong = sum(number for (fault, said), number in counts.items() if fault != "none" and said != "right")
    calm = sum(number for (fault, _), number in counts.items() if fault == "none")
    alarms = sum(number for (fault, said), number in counts.items() if fault == "none" and said != "right")
    return wrong / max(faults, 1), alarms / max(calm, 1)


def modelled(cases: int, seed: int) -> tuple[float, float]:
    """`rates` of modelled groups."""
    return rates(modelled_counts(cases, seed))


def read(path: Path) -> list[dict[str, Any]]:
    """The looks of a file; `began`: numbers the faults."""
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    looks = [json.loads(line) | {"run": path.name} for line in text.splitlines()]
    began = 0
    for before, one in zip([None, *looks], looks, strict=False):
        began += before is not None and one["at_s"] <= before["at_s"]
        one["began"] = began
    return looks


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("looks", nargs="*", type=Path)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = {"modelled": modelled_counts(options.cases, options.seed)}
    if options.looks:
        sources["recorded looks"], sources["recorded, shown"] = recorded(
            [look for path in options.looks for look in read(path)]
        )
    rows = [
        (source, fault, said, number)
        for source, counts in sources.items()
        for (fault, said), number in sorted(counts.items())
    ]
    for row in rows:
        print(*row)
    shares = {source: rates(counts) for source, counts in sources.items()}
    summary = {source: {"named_wrong": wrong, "false_alarms": alarms} for source, (wrong, alarms) in shares.items()}
    print(json.dumps(summary, indent=1))
    if options.out:
        columns = ("source", "fault", "said", "looks")
        facts.write_table(options.out, "score", columns, [dict(zip(columns, row, strict=True)) for row in rows])
        config = summary | {"cases": options.cases, "seed": options.seed, "looks": [one.name for one in options.looks]}
        facts.write(options.out, facts.of_this_run(config, module="tests.observability.score"))


if __name__ == "__main__":
    main()
