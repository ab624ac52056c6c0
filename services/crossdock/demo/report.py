"""The demo's last word: one line per family and dtype, with the times of the workers' /metrics."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.table import Table

from crossdock.common.http import ask_http
from crossdock.common.security import Security
from crossdock.demo.compare import Comparison
from crossdock.protocol.v1.control_pb2 import Member

PHASES = ("dispatch", "experts", "combine")
STEP_PHASES = "crossdock_step_phase_duration_seconds"
_TIMEOUT_S, _PAUSE_S = 10.0, 0.1

Buckets = Mapping[float, float]
"""Upper bound in seconds -> observations up to it (cumulative)."""


def fetch(members: Iterable[Member], security: Security | None = None) -> list[str]:
    """The pages of several workers. Raises OSError, or http.client.HTTPException."""
    return [_page(member, security) for member in members]


def phases(members: Sequence[Member], security: Security | None = None, within_s: float = 5.0) -> dict[str, Buckets]:
    """The step-phase histograms of the workers together. Workers count a step when its record comes, after its answer:
    asked again until each phase has been observed, or `within_s` is over. Raises as `fetch` does."""
    until = time.monotonic() + within_s
    while True:
        found = phase_buckets(fetch(members, security))
        if all(quantile(buckets, 1.0) >= 0 for buckets in found.values()) or time.monotonic() > until:
            return found
        time.sleep(_PAUSE_S)


def _page(member: Member, security: Security | None) -> str:
    name = security.config.worker_name if security is not None else ""
    tls = security.http_caller() if security is not None and member.https else None
    status, text = ask_http(member.http_address, "/metrics", _TIMEOUT_S, tls, name)
    if status != HTTPStatus.OK:
        raise OSError(
            f"rank {member.rank}: {member.http_address}/metrics: expected its page, got {status}: {text.strip()}"
        )
    return text


def phase_buckets(pages: Iterable[str]) -> dict[str, Buckets]:
    """The step-phase histogram of all pages together, by phase."""
    summed: dict[str, dict[float, float]] = {phase: defaultdict(float) for phase in PHASES}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"{STEP_PHASES}_bucket" and sample.labels["phase"] in summed:
                    summed[sample.labels["phase"]][float(sample.labels["le"])] += sample.value
    return dict(summed)


def quantile(buckets: Buckets, share: float) -> float:
    """The value below which `share` of the observations lie, linear inside a bucket; NaN without observations.

    As Prometheus' histogram_quantile: past the last finite bound the answer is that bound.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return math.nan
    rank, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low


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
