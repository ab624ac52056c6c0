"""What the expert kernels are given: the rows that a rank of an engine has, in each of vLLM's two formats.

Standard: the rows [R*T, H] of all ranks' tokens and their K expert ids; so allgather_reducescatter and HT have them.
Batched: slots [L, R*M, H] and how many are filled [L]; so the low-latency backends have them. M is what vLLM lets a
rank bring to a step (`max_num_batched_tokens`; for these backends its default is 256), whatever it brings: a prefill of
more tokens takes several steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.vllm import Model, aligned, cells

MOST_TOKENS = 256
"""vLLM's default of M: `SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP`."""
LARGER = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's experts in one step of an engine.

    Attributes:
        step: "decode", "prefill", or "empty": no rank brings a token.
        tokens: that each rank brings to one step of the engine.
        slots: M; 0 for the standard format.
        engine_steps: that all tokens of a rank take.
    """

    step: str
    tokens: int
    slots: int
    engine_steps: int = 1

    @property
    def format(self) -> str:
        """As vLLM calls it."""
        return "batched" if self.slots else "standard"

    def rows(self, model: Model) -> int:
        """(token, expert) rows that a rank has in one step, on average: those of R ranks' tokens, over R."""
        return self.tokens * model.topk


def cases_of(decode: int, prefill: int) -> list[Case]:
    """For these tokens per rank: the standard format, which takes a prefill whole, and the batched one with several
    M. Beside each batched case of a prefill stands a standard one of as many tokens: what the format alone costs."""
    found = [Case("decode", decode, 0), Case("decode", decode, MOST_TOKENS), Case("decode", decode, decode)]
    found += [Case("empty", 0, MOST_TOKENS), Case("prefill", prefill, 0)]
    for most in (MOST_TOKENS, LARGER):
        if most < prefill:
            steps = -(-prefill // most)
            found += [Case("prefill", most, 0, steps), Case("prefill", most, most, steps)]
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one case.

    Attributes:
        experts: vLLM's class.
        step, tokens, slots, engine_steps: of the case.
        rows: (token, expert) rows of a rank, on average; the batched format has L x R x M slots for them.
        config: block sizes that vLLM chose.
        sorted_run: its place among the runs.
        layer_us: of the experts of one layer, in one step: median over replays.
        total_ms: of all layers and all engine steps.
        gpu, vllm, torch, triton: name and versions.
    """

    experts: str
    format: str
    step: str
    ranks: int
    tokens: int
    slots: int
    engine_steps: int
    rows: int
    config: str
    sorted_run: int
    layer_us: float
    total_ms: float
    gpu: str
    vllm: str
    torch: str
    triton: str


@dataclass(frozen=True, slots=True)
class Where:
    """What a row says of the machine."""

    gpu: str
    vllm: str
    torch: str
    triton: str


def rows_of(
    case: Case, model: Model, ranks: int, experts: str, config: str, times_us: Sequence[float], where: Where
) -> list[Row]:
    """A row for each run, fastest first."""
    return [
        Row(
            experts, case.format, case.step, ranks, case.tokens, case.slots, case.engine_steps,
            case.rows(model), config, place, round(time_us, 2),
            round(time_us * model.layers * case.engine_steps / 1e3, 3),
            where.gpu, where.vllm, where.torch, where.triton,
        )
        for place, time_us in enumerate(sorted(times_us))
    ]  # fmt: skip


SHOWN = ("experts", "step", "tokens", "slots", "engine_steps", "rows", "layer_us", "total_ms", "config")


def table(rows: Sequence[Row]) -> str:
    """The median run of each case."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.experts, row.step, row.tokens, row.slots), []).append(row)
    middle = [next(r for r in group if r.layer_us == _median(group)) for group in found.values()]
    return aligned(SHOWN, [cells(row, SHOWN) for row in middle])


def _median(rows: Sequence[Row]) -> float:
    return statistics.median_low(row.layer_us for row in rows)
