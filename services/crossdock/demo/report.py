"""The demo's last word: one line per family and dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from crossdock.demo.compare import Comparison
from crossdock.demo.scrape import PHASES, Buckets, quantile


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        family, dtype: what was served.
        verdict: how it compared.
        phases: the workers' step-phase histograms.
        tokens_per_s: teacher-forced tokens through the model with remote experts.
        urls: where metrics were scraped; nobody listens there when the group has ended.
    """

    family: str
    dtype: str
    verdict: Comparison
    phases: Mapping[str, Buckets]
    tokens_per_s: float
    urls: Sequence[str]


def table(rows: Sequence[Row]) -> Table:
    """The table; fits 80 columns."""
    made = Table(box=box.SIMPLE_HEAD, padding=0, caption="phases of a step: p50/p99 in ms")
    for heading in ("family", "dtype"):
        made.add_column(heading, no_wrap=True)
    for heading in ("tokens\nequal", "max logit\ndiff", *PHASES, "tokens/s"):
        made.add_column(heading, no_wrap=True, justify="right")
    for row in rows:
        colour = "red" if row.verdict.failures else "green"
        made.add_row(
            row.family,
            row.dtype,
            f"[{colour}]{row.verdict.tokens}[/]",
            f"{row.verdict.max_difference:.2g}",
            *(_quantiles(row.phases[phase]) for phase in PHASES),
            f"{row.tokens_per_s:.0f}",
        )
    return made


def as_dict(rows: Sequence[Row], problem: str = "") -> dict[str, object]:
    """Plain JSON types; `problem`: what ended the run before all rows were made."""
    return {
        "passed": bool(rows) and not problem and not any(row.verdict.failures for row in rows),
        "problem": problem,
        "rows": [
            {
                "family": row.family,
                "dtype": row.dtype,
                "tokens_equal": row.verdict.tokens,
                "max_logit_difference": row.verdict.max_difference,
                "detail": row.verdict.detail,
                "failures": list(row.verdict.failures),
                "tokens_per_s": row.tokens_per_s,
                "metrics": list(row.urls),
            }
            for row in rows
        ],
    }


def notes(rows: Sequence[Row]) -> str:
    """What the numbers of each row mean."""
    return "\n".join(f"{row.family} {row.dtype}: {row.verdict.detail}" for row in rows)


def _quantiles(buckets: Buckets) -> str:
    return "/".join(_milliseconds(quantile(buckets, share)) for share in (0.5, 0.99))


def _milliseconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.2f}" if seconds < 1e-3 else f"{seconds * 1e3:.{1 if seconds < 1e-2 else 0}f}"


def shorten(urls: Sequence[str]) -> list[str]:
    """The first address in full, of the others the port."""
    return [*urls[:1], *(":" + url.rpartition(":")[2].partition("/")[0] for url in urls[1:])]
