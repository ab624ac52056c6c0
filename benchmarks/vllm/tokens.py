"""Whether backends give the same tokens: greedy ones of the same prompts, and how far logprobs are apart. Pure.

Prompts are random and of uneven number and length over the ranks. Two sequences are compared until they part: what
comes after a different token says nothing. Sums in another order move logprobs by the rounding of bf16, and where two
tokens were that close, the greedy one becomes the other; so backends agree where the gaps are those of rounding.

A sequence's gap is the median of those between its logprobs; a token that only one side has among its best, and a NaN,
are infinitely far apart. A wrong sequence parts at once and has few of them, so it counts as much as any other; what is
judged is the rank that is worst off.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.vllm import aligned, cells
from benchmarks.vllm.plan import Outcome, Run

NEW, TOP = 16, 5
"""Tokens of each sequence; logprobs that are kept of each."""
SEQUENCES, MORE = 24, 3
"""Of rank 0; of each next rank in addition."""
SHORTEST, LONGEST = 5, 64
IDS = range(2, 250)
"""Tokens of prompts: every model has these."""
QUARTILE, NOISE = 0.75, 0.1
"""So large a part of each rank's sequences has to have a gap of at most NOISE. Logprobs of right backends were 0 to
0.02 apart on 4 GPUs (median; p90 0.06) and 0.05 (0.09) on 2, those of wrong rows 0.2 to 0.8: docs/vllm.md."""
USUAL = "ag+eager,ht1,deepep_v2,ll1,ll"


def prompts_of(rank: int) -> list[list[int]]:
    """The same in every run."""
    drawn = random.Random(rank)
    lengths = [drawn.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES + MORE * rank)]
    return [drawn.choices(IDS, k=length) for length in lengths]


@dataclass(frozen=True, slots=True)
class Row:
    """A backend on a model, against the first backend.

    Attributes:
        compared, equal: tokens, until their sequences part; parted: sequences that do.
        gap_median: of all sequences' gaps.
        gap_worst: of the rank whose is largest: what QUARTILE of its sequences do not exceed.
        fault: why there is no figure, or what is wrong with it.
    """

    model: str
    backend: str
    tier: str
    mode: str
    ranks: int
    sequences: int | None
    compared: int | None
    equal: int | None
    parted: int | None
    gap_median: float | None
    gap_worst: float | None
    vllm: str
    torch: str
    gpu: str
    fault: str


Found = Mapping[str, Any]
"""What a rank gives: "tokens" [N][NEW], "logprobs" [N][NEW] of {token: logprob}."""


def row_of(
    model: str, run: Run, outcome: Outcome, first: Sequence[Found], ranks: int, versions: tuple[str, str, str]
) -> Row:
    """`first`: results of the backend that the others are compared with; none: it gave no tokens."""
    row = Row(
        model, run.backend.slot, run.backend.tier, run.mode, ranks, None, None, None, None, None, None, *versions,
        outcome.fault,
    )  # fmt: skip
    if outcome.fault or not first:
        return replace(row, fault=outcome.fault or "not compared: the first backend gave no tokens")
    of_ranks = [list(_sequences(a, b)) for a, b in zip(first, outcome.results, strict=True)]
    every = [sequence for rank in of_ranks for sequence in rank]
    compared, parted = sum(one.compared for one in every), sum(one.parted for one in every)
    worst = max(sorted(one.gap for one in rank)[int(QUARTILE * len(rank))] for rank in of_ranks)
    return replace(
        row, sequences=len(every), compared=compared, equal=compared - parted, parted=parted,
        gap_median=round(statistics.median(one.gap for one in every), 4), gap_worst=round(worst, 4),
        fault=f"logprobs of a rank are {worst:.2f} apart; rounding makes {NOISE} at most" if worst > NOISE else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Beside:
    """Two sequences beside each other: tokens until they part, whether they do, and their gap."""

    compared: int
    parted: bool
    gap: float


def _sequences(a: Found, b: Found) -> Iterator[Beside]:
    """Of one rank."""
    for ids, others, here, there in zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=True)))
        compared = min(same + 1, len(ids))
        gaps = [
            abs(theirs.get(token, math.inf) - logprob)
            for mine, theirs in zip(here[:compared], there[:compared], strict=True)
            for token, logprob in mine.items()
        ]
        yield Beside(compared, same < len(ids), statistics.median(math.inf if math.isnan(gap) else gap for gap in gaps))


SHOWN = ("model", "backend", "tier", "mode", "compared", "equal", "parted", "gap_median", "gap_worst", "fault")


def table(rows: Sequence[Row]) -> str:
    """For people."""
    return aligned(SHOWN, [["" if cell == "None" else cell for cell in cells(row, SHOWN)] for row in rows])
