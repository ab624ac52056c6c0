"""The families in docs/models.md, as a recorded run of `make test-families` has them: printed, or written (--write)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from crossdock.worker.checkpoints.families import FAMILIES, NOT_SERVED

ROOT = Path(__file__).parents[2]
PAGE, RECORDED = ROOT / "docs/models.md", ROOT / "docs/results/2026-11-29-families/families.jsonl"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
_WIDTH = 120


def table(recorded: str) -> str:
    """What ran, family by family: both ways of naming tensors, each of the sizes; and the reasons of the others."""
    lines = [json.loads(line) for line in recorded.splitlines()]
    runs = {(line["family"], line["model"], line["sizes"]): set[bool]() for line in lines}
    for line in lines:
        runs[line["family"], line["model"], line["sizes"]].add(line["published"])
    both = {run for run, formats in runs.items() if formats == {True, False}}
    alone = [name for name in FAMILIES if (name, name, "even") in both]
    odd = [name for name in alone if {(name, name, "odd, top 1"), (name, name, "odd, all")} <= both]
    outer = {family: model for family, model, sizes in sorted(both) if family != model and sizes == "even"}
    version, worst = lines[0]["transformers"], max(line["difference"] for line in lines)
    text = [
        f"With `transformers` {version}, {len(alone)} families gave equal tokens in both ways of naming tensors; "
        f"the largest difference of a logit was {worst:.1g} (float32):",
        ", ".join(f"`{name}`" for name in sorted(alone)) + ".",
        f"{len(outer)} of them also inside of a model of images or sounds: "
        + ", ".join(f"`{model}`" for _, model in sorted(outer.items())) + ".",
        f"{len(odd)} also with 7 experts of 72 x 24, top 1 and top 7; not built so: "
        + (", ".join(f"`{name}`" for name in sorted(set(alone) - set(odd))) or "none") + ".",
        "Served by their rows of the table, and not built by `transformers`: "
        + (", ".join(f"`{name}`" for name in sorted(set(FAMILIES) - set(alone))) or "none") + ".",
    ]  # fmt: skip
    served = "\n\n".join(_wrapped(part) for part in text)
    rows = "\n".join(f"| `{name}` | {why} |" for name, why in NOT_SERVED.items())
    return f"{served}\n\nNot served:\n\n| family | reason |\n|---|---|\n{rows}\n"


def between(page: str) -> str:
    """The part of the page that is generated."""
    return page.partition(BEGIN)[2].partition(END)[0]


def _wrapped(text: str) -> str:
    out = [""]
    for word in text.split(" "):
        if out[-1] and len(out[-1]) + 1 + len(word) > _WIDTH:
            out.append("")
        out[-1] += f" {word}" if out[-1] else word
    return "\n".join(out)


def main() -> None:
    """Print it; --write: put it into the page."""
    made = table(RECORDED.read_text())
    if "--write" in sys.argv[1:]:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.split(END)[1])
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
