"""Whether backends give the same tokens: greedy ones of the same prompts, and how far logprobs are apart. Pure.

Prompts are random and of uneven number and length over the ranks. Two sequences are compared until they part: what
comes after a different token says nothing. Sums in another order move logprobs by the rounding of bf16, and where two
tokens were that close, the greedy one becomes the other; so a run agrees where the gap is that of rounding.
"""

from __future__ import annotations

import itertools
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
NOISE = 0.05
"""Most that the median gap between logprobs may be. Right backends had 0 to 0.021 on 4 GPUs, wrong rows 0.2 to 0.8."""
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
        gap_median, gap_p90, gap_max: between logprobs of one token that both have among their TOP.
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
    gap_p90: float | None
    gap_max: float | None
    vllm: str
    torch: str
    gpu: str
    fault: str


Found = Mapping[str, Any]
"""What a rank gives: "tokens" [N][NEW], "logprobs" [N][NEW] of {token: logprob}."""


def row_of(
    model: str, run: Run, outcome: Outcome, first: Sequence[Found], ranks: int, versions: tuple[str, str, str]
) -> Row:
    """`first`: results of the backend that the others are compared with; nothing = it failed."""
    row = Row(
        model, run.backend.slot, run.backend.tier, run.mode, ranks, None, None, None, None, None, None, None, *versions,
        outcome.fault,
    )  # fmt: skip
    if outcome.fault or not first:
        return replace(row, fault=outcome.fault or "nothing to compare with: the first backend gave no tokens")
    pairs = list(_pairs(first, outcome.results))
    until = [_until(a["tokens"], b["tokens"]) for a, b in pairs]
    parted = sum(a["tokens"] != b["tokens"] for a, b in pairs)
    gaps = sorted(
        abs(there[token] - logprob)
        for length, (a, b) in zip(until, pairs, strict=True)
        for here, there in itertools.islice(zip(a["logprobs"], b["logprobs"], strict=True), length)
        for token, logprob in here.items()
        if token in there
    )
    median = statistics.median(gaps)
    return replace(
        row, sequences=len(pairs), compared=sum(until), equal=sum(until) - parted, parted=parted,
        gap_median=round(median, 4), gap_p90=round(gaps[int(0.9 * len(gaps))], 4), gap_max=round(gaps[-1], 4),
        fault=f"logprobs are {median:.2f} apart, by median; rounding makes {NOISE}" if median > NOISE else "",
    )  # fmt: skip


def _pairs(first: Sequence[Found], second: Sequence[Found]) -> Iterator[tuple[Found, Found]]:
    """Sequence by sequence, of all ranks."""
    for a, b in zip(first, second, strict=True):
        for n in range(len(a["tokens"])):
            yield tuple({name: found[name][n] for name in ("tokens", "logprobs")} for found in (a, b))  # type: ignore[misc]


def _until(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens up to the first that differs, with it."""
    return next((n + 1 for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


SHOWN = ("model", "backend", "tier", "mode", "compared", "equal", "parted", "gap_median", "gap_p90", "gap_max", "fault")


def table(rows: Sequence[Row]) -> str:
    """For people."""
    return aligned(SHOWN, [["" if cell == "None" else cell for cell in cells(row, SHOWN)] for row in rows])
