"""Routing cases: who sends how many tokens to which experts, with what payload. Seeded, so every rank draws the same.

A case is a value: its repr is enough to run it again. `draw_seed()` is fresh in every session.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from ep_kernels.config import MoEConfig
from ep_kernels.routing import ExpertMap


def draw_seed() -> int:
    """A fresh seed; it shows in the repr of the case it is used for."""
    return secrets.randbelow(1 << 31)


@dataclass(frozen=True)
class RoutingCase:
    """One step of all ranks.

    Attributes:
        tokens: T of each rank; its length is R.
        kind: a key of KINDS.
        experts: each rank's logical experts by slot (replicas allowed), or None for contiguous blocks.
        max_tokens: M, or None for the largest T (at least 1).
    """

    num_experts: int
    topk: int
    hidden_size: int
    tokens: tuple[int, ...]
    kind: str = "uniform"
    seed: int = 0
    experts: tuple[tuple[int, ...], ...] | None = None
    max_tokens: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def expert_map(self) -> ExpertMap:
        if self.experts is None:
            return ExpertMap.contiguous(self.num_experts, self.num_ranks)
        return ExpertMap.from_ranks(self.experts)

    def config(self, group: Any, **overrides: Any) -> MoEConfig:
        """A MoEConfig of this case's sizes."""
        fields: dict[str, Any] = {
            "group": group,
            "num_experts": self.num_experts,
            "hidden_size": self.hidden_size,
            "topk": self.topk,
            "max_tokens_per_rank": self.max_tokens or max(1, *self.tokens),
            "expert_map": None if self.experts is None else self.expert_map,
        }
        return MoEConfig(**(fields | overrides))

    def _generator(self, rank: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 64 + rank) * 8 + stream)

    def topk_ids(self, rank: int) -> torch.Tensor:
        """int32 [T, K]."""
        return KINDS[self.kind](self, rank, self._generator(rank, 0)).int()

    def topk_weights(self, rank: int) -> torch.Tensor:
        """float32 [T, K], both signs."""
        return torch.randn(self.tokens[rank], self.topk, generator=self._generator(rank, 1))

    def x(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, H]: normal values over a wide range (random bytes for byte formats); one token has special values."""
        shape, generator = (self.tokens[rank], self.hidden_size), self._generator(rank, 2)
        if dtype.itemsize == 1:
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
        exponent = torch.randint(-6, 6, (*shape[:1], -(-shape[1] // 128)), generator=generator)
        spread = torch.exp2(exponent.float()).repeat_interleave(128, 1)[:, : shape[1]]
        x = torch.randn(shape, generator=generator) * spread
        if len(x):
            token = int(torch.randint(0, len(x), (1,), generator=generator))
            special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 1e-7, 6e4])
            hit = torch.rand(shape[1], generator=generator) < 0.3
            x[token, hit] = special[torch.randint(0, len(special), (int(hit.sum()),), generator=generator)]
        return x.to(dtype)

    def scales(self, rank: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, S]: random bytes of a caller's own scales."""
        shape = (self.tokens[rank], columns * dtype.itemsize)
        return torch.randint(0, 256, shape, generator=self._generator(rank, 3), dtype=torch.uint8).view(dtype)


def _distinct(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    order = torch.rand(case.tokens[rank], case.num_experts, generator=generator).argsort(1)
    return order[:, : case.topk]


def _zipf(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    popularity = 1.0 / torch.arange(1, case.num_experts + 1).double() ** 1.2
    if not case.tokens[rank]:
        return _distinct(case, rank, generator)
    return torch.multinomial(popularity.expand(case.tokens[rank], -1), case.topk, generator=generator)


def _k_hot(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    same = torch.randperm(case.num_experts, generator=torch.Generator().manual_seed(case.seed))
    return same[: case.topk].expand(case.tokens[rank], -1).contiguous()


def _one_expert(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    ids = torch.full((case.tokens[rank], case.topk), -1)
    ids[:, case.seed % case.topk] = case.seed % case.num_experts
    return ids


def _experts_of(offset: int) -> Callable[[RoutingCase, int, torch.Generator], torch.Tensor]:
    def draw(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
        held = set(case.expert_map.experts_of((rank + offset) % case.num_ranks))
        mine = torch.tensor(sorted(held), dtype=torch.long)
        order = torch.rand(case.tokens[rank], len(mine), generator=generator).argsort(1)[:, : case.topk]
        return torch.nn.functional.pad(mine[order], (0, case.topk - order.shape[1]), value=-1)

    return draw


def _none(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    return torch.full((case.tokens[rank], case.topk), -1)


def _single_none(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    ids = _distinct(case, rank, generator)
    hole = torch.randint(0, case.topk, (len(ids), 1), generator=generator)
    return ids.scatter(1, hole, -1)


def _repeated(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, case.num_experts, (case.tokens[rank], case.topk), generator=generator)


def _out_of_range(case: RoutingCase, rank: int, generator: torch.Generator) -> torch.Tensor:
    ids = _distinct(case, rank, generator)
    wrong = torch.tensor([-2, case.num_experts, case.num_experts + 7, -(1 << 31), (1 << 31) - 1])
    hit = torch.rand(ids.shape, generator=generator) < 0.3
    return torch.where(hit, wrong[torch.randint(0, len(wrong), ids.shape, generator=generator)], ids)


KINDS: dict[str, Callable[[RoutingCase, int, torch.Generator], torch.Tensor]] = {
    "uniform": _distinct,
    "zipf": _zipf,
    "k_hot": _k_hot,
    "one_expert": _one_expert,
    "own_rank": _experts_of(0),
    "other_rank": _experts_of(1),
    "none": _none,
    "single_none": _single_none,
    "out_of_range": _out_of_range,
    "repeated": _repeated,
}
"""How ids are drawn. All but "repeated" give distinct ids within a token."""


def token_patterns(num_ranks: int, most: int) -> list[tuple[int, ...]]:
    """T by rank: nobody, one rank only, all but one, one each, all full, uneven."""
    return [
        (0,) * num_ranks,
        (most,) + (0,) * (num_ranks - 1),
        (0,) + (most,) * (num_ranks - 1),
        (1,) * num_ranks,
        (most,) * num_ranks,
        tuple((3 * rank + 2) % (most + 1) for rank in range(num_ranks)),
    ]


def cases(num_ranks: int, most: int, *, hidden_size: int, num_experts: int, topk: int) -> list[RoutingCase]:
    """Every kind on the uneven and the full pattern, and every pattern on "uniform"; M = most."""
    patterns = token_patterns(num_ranks, most)
    pairs = [(kind, patterns[n % 2 - 2]) for n, kind in enumerate(KINDS) if kind != "repeated"]
    pairs += [("uniform", pattern) for pattern in patterns]
    return [
        RoutingCase(num_experts, topk, hidden_size, tokens, kind, draw_seed(), max_tokens=most)
        for kind, tokens in pairs
    ]


def replicated(num_ranks: int, num_experts: int, extra: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Random placement by rank: every expert once, and `extra` replicas anywhere (also twice on one rank)."""
    generator = torch.Generator().manual_seed(seed)
    more = torch.randint(0, num_experts, (extra,), generator=generator).tolist()
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in [*range(num_experts), *more]:
        ranks[int(torch.randint(0, num_ranks, (1,), generator=generator))].append(expert)
    return tuple(map(tuple, ranks))


@st.composite
def routing_cases(draw: st.DrawFn, num_ranks: int | None = None, hidden_sizes: Sequence[int] = (16, 48)) -> RoutingCase:
    """Any small case; "repeated" included."""
    ranks = num_ranks or draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    topk = draw(st.integers(1, experts))
    tokens = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    seed = draw(st.integers(0, 1 << 30))
    extra = draw(st.integers(0, 4))
    placed = replicated(ranks, experts, extra, seed) if extra else None
    kind = draw(st.sampled_from(sorted(KINDS)))
    return RoutingCase(experts, topk, draw(st.sampled_from(hidden_sizes)), tuple(tokens), kind, seed, placed)
