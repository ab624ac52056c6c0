"""What is measured: shapes, layouts, and fresh routing for every iteration. Pure functions of a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_kernels import Layout, Mode

FP8_BLOCK, MX_BLOCK, NV_BLOCK = 128, 32, 16
"""Columns that share one scale in fp8, MXFP8 and NVFP4."""
BOUNDED = 1.25
"""Of form "bounded", where what comes after must not work on rows of the worst case."""


@dataclass(frozen=True)
class Case:
    """One line of the table (two or three: dispatch, combine, pair).

    Attributes:
        tokens: T of every rank; also M, the most tokens per rank that buffers are made for.
        routing: a key of ROUTINGS.
        quantize: rows go out quantised, inside the operation: True: fp8 with an fp32 scale per 128 columns; "mxfp8",
            "nvfp4".
        fp8_combine: partial sums come home as fp8 with fp32 scales.
        num_sms: multiprocessors that an operation may fill; None: the backend's own choice.
        form: "" (worst-case rows, no host wait), "exact" (rows as many as arrived, one host read) or "cached" (the
            routing of an earlier dispatch is used again), or "bounded" (room for BOUNDED times the mean of rows).
        exact_combine: combine returns a row per (token, k), weighted by the source rank, not a sum per (token, rank).
    """

    mode: Mode
    layout: Layout
    ranks: int = 4
    tokens: int = 128
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    dtype: torch.dtype = torch.bfloat16
    routing: str = "uniform"
    quantize: bool | str = False
    fp8_combine: bool = False
    num_sms: int | None = None
    form: str = ""
    exact_combine: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in `dtype`."""
        return self.hidden * self.dtype.itemsize

    def moved_bytes(self, op: str) -> int:
        """Bytes of one row as `op` moves it, scales included; of "pair": one row each way."""
        if op == "pair":
            return self.moved_bytes("dispatch") + self.moved_bytes("combine")
        made = self.quantize if op == "dispatch" else self.fp8_combine
        if made == "nvfp4":
            return self.hidden // 2 + self.hidden // NV_BLOCK
        if made == "mxfp8":
            return self.hidden + -(-self.hidden // MX_BLOCK)
        return self.hidden + 4 * -(-self.hidden // FP8_BLOCK) if made else self.row_bytes

    def dtype_of(self, op: str) -> str:
        """How a row moves in "dispatch" or "combine"."""
        made = self.quantize if op == "dispatch" else self.fp8_combine
        if isinstance(made, str):
            return made
        return "fp8" if made else str(self.dtype).removeprefix("torch.")


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
    """`count` steps; the same on every rank."""
    drawn = [[draw(case, rank, seed + 1000 * n) for rank in range(case.ranks)] for n in range(count)]
    return [Step(tuple(ids for ids, _ in step), tuple(weights for _, weights in step)) for step in drawn]


def draw(case: Case, rank: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_ids int32 [T, K], topk_weights float32 [T, K] in 0..1) of one rank in the step that `seed` names."""
    own = torch.Generator(device).manual_seed(seed * 64 + rank)
    order = torch.randperm(case.experts, generator=torch.Generator().manual_seed(seed)).to(device)
    ids = ROUTINGS[case.routing](case, order, own)
    weights = torch.rand(case.tokens, case.topk, generator=own, device=device)
    return ids.int().contiguous(), weights


def _uniform(case: Case, order: torch.Tensor, own: torch.Generator) -> torch.Tensor:
    scores = torch.rand(case.tokens, case.experts, generator=own, device=order.device)
    return scores.topk(case.topk).indices


def _zipf(case: Case, order: torch.Tensor, own: torch.Generator) -> torch.Tensor:
    """The n-th most wanted expert is drawn in proportion to n^-1.2; which one that is, each step decides anew."""
    wish = -1.2 * torch.arange(1, case.experts + 1, device=order.device).log()
    noise = torch.rand(case.tokens, case.experts, generator=own, device=order.device).clamp(min=1e-20)
    return order[(wish - (-noise.log()).log()).topk(case.topk).indices]  # Gumbel: top-k is drawing without putting back


def _khot(case: Case, order: torch.Tensor, own: torch.Generator) -> torch.Tensor:
    """Every token of the step wants the same K experts."""
    return order[: case.topk].expand(case.tokens, -1)


def _holes(case: Case, order: torch.Tensor, own: torch.Generator) -> torch.Tensor:
    """Uniform, each id -1 with probability 1/4."""
    ids = _uniform(case, order, own)
    return torch.where(torch.rand(ids.shape, generator=own, device=ids.device) < 0.25, -1, ids)


def _masked(case: Case, order: torch.Tensor, own: torch.Generator) -> torch.Tensor:
    """Uniform, but no token goes to the experts of the last rank (their ids are -1)."""
    ids = _uniform(case, order, own)
    return torch.where(ranks_of(case, ids) == case.ranks - 1, -1, ids)


Draw = Callable[[Case, torch.Tensor, torch.Generator], torch.Tensor]
ROUTINGS: dict[str, Draw] = {"uniform": _uniform, "zipf": _zipf, "khot": _khot, "holes": _holes, "masked": _masked}


def ranks_of(case: Case, ids: torch.Tensor) -> torch.Tensor:
    """Rank that holds each expert, experts in contiguous equal blocks; -1 where the id is -1."""
    return ids.long().div(case.experts // case.ranks, rounding_mode="floor")


def sends(case: Case, step: Step, source: int, rank: int) -> torch.Tensor:
    """Tokens of `source` that `rank` gets, once each, ascending."""
    return (ranks_of(case, step.topk_ids[source]) == rank).any(1).nonzero()[:, 0]


def rows_sent(case: Case, step: Step, source: int, *, remote_only: bool) -> int:
    """Deduplicated rows that `source` sends: one per (token, rank)."""
    others = [r for r in range(case.ranks) if r != source or not remote_only]
    return sum(len(sends(case, step, source, r)) for r in others)
