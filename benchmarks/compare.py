"""`python -m benchmarks.compare <before> <after>`: two result folders of one GPU kind and count, case by case.

Prints the medians and after / before, worst first. Refuses folders of other GPUs or another number of them: their
figures say nothing about each other. A difference within the run-to-run spread of both is marked "~".
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import facts, report
from benchmarks.gpu.tables import NAMES

SAME = ("gpu", "num_gpus")
KEY = (
    "backend", "op", "mode", "layout", "tokens", "hidden", "experts", "topk", "ranks", "dispatch_dtype",
    "combine_dtype", "routing", "timing", "form", "l2",
)  # fmt: skip

BY_SMS = ("floor", "sweep", "ll_sms", "layer")
"""Tables in which a case stands once for each number of multiprocessors."""


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; 2 where there is none to make."""
    folders = sys.argv[1:] if arguments is None else arguments
    if len(folders) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    before, after = map(Path, folders)
    refusal = why_not(before, after)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    print("\n".join(lines(before, after)))
    return 0


def why_not(before: Path, after: Path) -> str:
    """Why the two must not be compared, "" if they may: every run that wrote a table of either counts."""
    for name in SAME:
        old, new = ({str(run.get(name)) for run in facts.standing(folder)} for folder in (before, after))
        if old != new or len(old) != 1 or old == {"None"}:
            said = [f"{' or '.join(sorted(found))} in {at}" for found, at in ((old, before), (new, after))]
            return f"not comparable: {name} is {' and '.join(said)}"
    return ""


def lines(before: Path, after: Path) -> list[str]:
    """One line per case that both have, the largest after / before first."""
    found = []
    for table in NAMES:
        old = {_key(table, line): line for line in report.read(before, table)}
        for line in report.read(after, table):
            earlier = old.get(_key(table, line))
            if earlier is not None:
                found.append((float(line["p50_us"]) / float(earlier["p50_us"]), table, earlier, line))
    return [_line(*entry) for entry in sorted(found, key=lambda entry: -entry[0])]


def _key(table: str, line: dict[str, str]) -> tuple[str, ...]:
    sms = (line["sms"],) if table in BY_SMS else ()
    return (*(line[name] for name in KEY), *sms)


def _line(ratio: float, table: str, old: dict[str, str], new: dict[str, str]) -> str:
    spread = max(float(line["spread_pct"] or 0) for line in (old, new))
    noise = " ~" if abs(ratio - 1) * 100 <= spread else ""
    case = " ".join(filter(None, (new[name] for name in KEY if name not in ("experts", "topk", "ranks"))))
    return f"{ratio:6.3f}{noise:2} {old['p50_us']:>9} -> {new['p50_us']:>9} us  {table}: {case} ({new['sms']} SMs)"


if __name__ == "__main__":
    sys.exit(main())
