"""What is measured: shapes, layouts, and fresh routing for every iteration. Pure functions of a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_kernels import Layout, Mode


@dataclass(frozen=True)
class Case:
    """One line of the table (two: dispatch and combine)."""

    mode: Mode
    layout: Layout
    ranks: int = 4
    tokens: int = 128
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    dtype: torch.dtype = torch.bfloat16
    routing: str = "uniform"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.hidden * self.dtype.itemsize


CPU_CASES = (
    Case(Mode.LL, Layout.RANK_MAJOR),
    Case(Mode.LL, Layout.EXPERT_MAJOR),
    Case(Mode.HT, Layout.FLAT),
    Case(Mode.HT, Layout.GROUPED),
)


@dataclass(frozen=True)
class Step:
    """Routing of one iteration, of all ranks: ids [R][T, K] int32 (distinct in a row), weights [R][T, K] float32."""

    topk_ids: tuple[torch.Tensor, ...]
    topk_weights: tuple[torch.Tensor, ...]


def make_steps(case: Case, count: int, seed: int) -> list[Step]:
    """`count` steps of uniform random distinct experts; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(count):
        scores = [torch.rand(case.tokens, case.experts, generator=generator) for _ in range(case.ranks)]
        ids = tuple(s.topk(case.topk).indices.int().contiguous() for s in scores)
        weights = tuple(torch.rand(case.tokens, case.topk, generator=generator) for _ in range(case.ranks))
        steps.append(Step(ids, weights))
    return steps


def ranks_of(case: Case, ids: torch.Tensor) -> torch.Tensor:
    """Rank that holds each expert, experts in contiguous equal blocks."""
    return ids.long() // (case.experts // case.ranks)


def sends(case: Case, step: Step, source: int, rank: int) -> torch.Tensor:
    """Tokens of `source` that `rank` gets, once each, ascending."""
    return (ranks_of(case, step.topk_ids[source]) == rank).any(1).nonzero()[:, 0]


def rows_sent(case: Case, step: Step, source: int, *, remote_only: bool) -> int:
    """Deduplicated rows that `source` sends: one per (token, rank)."""
    others = [r for r in range(case.ranks) if r != source or not remote_only]
    return sum(len(sends(case, step, source, r)) for r in others)
