"""Where every (token, k) goes and in which order rows lie: pure functions, shared by the reference and the transports.

Moves no payload and knows no memory. Letters as in `types`. The whole routing is a function of (topk_ids, expert map,
active mask), so every rank that sees another's ids computes the same answer.

Worked example: E = 3 experts on R = 2 ranks, `ExpertMap.contiguous(3, 2)`: experts 0, 1 are slots 0, 1 of rank 0;
expert 2 is slot 0 of rank 1. Rank 1 dispatches topk_ids [[2, 0], [-1, 1]]: token 0 goes to (rank 1, slot 0) and
(rank 0, slot 0), token 1 to (rank 0, slot 1) only. Rank 0 receives two rows per expert-wise layout, expert 0 first, and
two rows per rank-wise layout, token 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_kernels.errors import ConfigError
from ep_kernels.types import DispatchOutput, Layout


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Logical expert -> the places that hold a copy of it.

    Attributes:
        replicas: for each logical expert its copies as (rank, slot), in the order in which they are chosen.
        num_ranks: R.

    Raises ConfigError unless every expert has a copy, no (rank, slot) is used twice and the slots of each rank are
    0 .. L-1 without a hole (L may be 0).
    """

    replicas: tuple[tuple[tuple[int, int], ...], ...]
    num_ranks: int

    def __post_init__(self) -> None:
        slots: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for expert, copies in enumerate(self.replicas):
            if not copies:
                raise ConfigError("expert_map", f"at least one copy of expert {expert}", copies)
            for rank, slot in copies:
                if not 0 <= rank < self.num_ranks:
                    raise ConfigError("expert_map", f"expert {expert} on a rank in 0..{self.num_ranks - 1}", rank)
                slots[rank].append(slot)
        for rank, used in enumerate(slots):
            if sorted(used) != list(range(len(used))):
                raise ConfigError("expert_map", f"slots 0..{len(used) - 1} of rank {rank}, each once", sorted(used))

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertMap:
        """Blocks in rank order, one copy each; the first E % R ranks own one expert more."""
        share, more = divmod(num_experts, num_ranks)
        sizes = [share + (rank < more) for rank in range(num_ranks)]
        return cls(tuple(((rank, slot),) for rank, size in enumerate(sizes) for slot in range(size)), num_ranks)

    @classmethod
    def from_ranks(cls, experts: Sequence[Sequence[int]]) -> ExpertMap:
        """From each rank's list of logical experts, by slot. An expert named by several ranks (or twice by one) has
        replicas, chosen in (rank, slot) order."""
        num_experts = 1 + max((e for row in experts for e in row), default=-1)
        copies: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
        for rank, row in enumerate(experts):
            for slot, expert in enumerate(row):
                if expert < 0:
                    raise ConfigError("expert_map", f"experts >= 0 on rank {rank}", expert)
                copies[expert].append((rank, slot))
        return cls(tuple(map(tuple, copies)), len(experts))

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.replicas)

    @property
    def stride(self) -> int:
        """Most local experts of any rank, ceil(E / R) for contiguous maps: equal on all ranks, so strides use it."""
        return max(self.num_local_experts(rank) for rank in range(self.num_ranks))

    def num_local_experts(self, rank: int) -> int:
        """L of that rank."""
        return sum(owner == rank for copies in self.replicas for owner, _ in copies)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """The logical experts of that rank, by slot."""
        held = {slot: e for e, copies in enumerate(self.replicas) for owner, slot in copies if owner == rank}
        return tuple(held[slot] for slot in range(len(held)))

    def tables(self, active: Sequence[bool] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The copies on active ranks as int32 tensors (first [E+1], ranks [P], slots [P]): expert e has the copies
        first[e] .. first[e+1]-1, none if all its ranks are gone."""
        kept = [[c for c in copies if active is None or active[c[0]]] for copies in self.replicas]
        flat = [c for copies in kept for c in copies]
        lengths = torch.tensor([0] + [len(copies) for copies in kept], dtype=torch.int32, device="cpu")
        first = lengths.cumsum(0, dtype=torch.int32)
        pairs = torch.tensor(flat, dtype=torch.int32, device="cpu").reshape(-1, 2)
        return first, pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


@dataclass(frozen=True, slots=True)
class Route:
    """Where the tokens of one source rank go.

    Attributes:
        rank: int64 [T, K], destination rank, -1 = none (no expert, or every copy gone).
        slot: int64 [T, K], local expert there, -1 = none.
        valid: bool [T], False where a chosen expert has no active copy.
        num_invalid_ids: ids below -1 or past E-1; they act as -1.
    """

    rank: torch.Tensor
    slot: torch.Tensor
    valid: torch.Tensor
    num_invalid_ids: int


def route(expert_map: ExpertMap, topk_ids: torch.Tensor, source: int, active: Sequence[bool] | None = None) -> Route:
    """Route topk_ids [T, K] (int32 or int64) of rank `source`.

    Of an expert's n active copies in listed order, token t takes number (source + t) % n: no state, no randomness, and
    a step's tokens spread evenly.
    """
    first, ranks, slots = (t.long() for t in expert_map.tables(active))
    none = torch.tensor([-1], device="cpu")
    ranks, slots = torch.cat([ranks, none]), torch.cat([slots, none])
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < expert_map.num_experts)
    safe = torch.where(known, ids, 0)
    copies = first[safe + 1] - first[safe]
    reached = known & (copies > 0)
    turn = (source + torch.arange(ids.shape[0], device="cpu"))[:, None] % copies.clamp(min=1)
    place = torch.where(reached, first[safe] + turn, len(ranks) - 1)
    valid = ~(known & (copies == 0)).any(1)
    invalid = int(((ids < -1) | (ids >= expert_map.num_experts)).sum())
    return Route(ranks[place], slots[place], valid, invalid)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that one destination rank receives, in canonical order; int64 [N] each.

    Attributes:
        source, token: where the row comes from.
        k: which of the token's K choices the row serves; all 0 where rows are per (token, rank).
        group: local expert (rows per expert) or source rank (rows per rank).
        index: number of the row within its group.
        counts: int64 [L] or [R], rows per group.
    """

    source: torch.Tensor
    token: torch.Tensor
    k: torch.Tensor
    group: torch.Tensor
    index: torch.Tensor
    counts: torch.Tensor


def expert_rows(routes: Sequence[Route], rank: int, num_local_experts: int) -> Rows:
    """One row per (token, k) that `rank` serves, ordered by (local expert, source, token, k)."""
    hits = [(r.rank == rank).nonzero() for r in routes]
    source = torch.cat([torch.full((len(h),), s, device="cpu") for s, h in enumerate(hits)])
    token, k = torch.cat(hits).unbind(1)
    slot = torch.cat([r.slot[h[:, 0], h[:, 1]] for r, h in zip(routes, hits, strict=True)])
    order = slot.argsort(stable=True)
    return _rows(source[order], token[order], k[order], slot[order], num_local_experts)


def rank_rows(routes: Sequence[Route], rank: int) -> Rows:
    """One row per (token, rank), ordered by (source, token)."""
    hits = [(r.rank == rank).any(1).nonzero()[:, 0] for r in routes]
    source = torch.cat([torch.full((len(h),), s, device="cpu") for s, h in enumerate(hits)])
    token = torch.cat(hits)
    return _rows(source, token, torch.zeros_like(token), source, len(routes))


def _rows(source: torch.Tensor, token: torch.Tensor, k: torch.Tensor, group: torch.Tensor, num_groups: int) -> Rows:
    counts = torch.bincount(group, minlength=num_groups)
    start = counts.cumsum(0) - counts
    return Rows(source, token, k, group, torch.arange(len(group), device="cpu") - start[group], counts)


def group_offsets(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """int64 [L+1]: start row of each group when groups are padded to `alignment` rows."""
    padded = (counts + alignment - 1) // alignment * alignment
    return torch.cat([padded.new_zeros(1), padded.cumsum(0)])


def delivered(out: DispatchOutput) -> torch.Tensor:
    """bool, the leading shape of `out.tokens`: True for rows that hold a token for an expert here; False for padding
    and rows past the counts."""
    shape = out.tokens.shape[:-1]
    index = torch.arange(shape[-1], device=out.tokens.device)
    match out.layout:
        case Layout.EXPERT_MAJOR | Layout.RANK_MAJOR:
            return index < out.counts[:, None]
        case Layout.FLAT:
            return index < out.num_rows
        case Layout.GROUPED:
            assert out.offsets is not None
            first, end = out.offsets[:-1], out.offsets[:-1] + out.counts
            return ((index[:, None] >= first) & (index[:, None] < end)).any(1)
