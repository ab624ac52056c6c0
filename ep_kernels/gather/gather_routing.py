"""Routing of `Mode.AG` by torch operators, which never wait for a device: the source turns ids into places, every rank
reads everybody's.

A place is rank * stride + local expert, -1 = none. As `ep_kernels/routing.py` defines; tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels.config import MoEConfig


@dataclass(frozen=True, slots=True)
class GatherState:
    """`DispatchHandle.state`: the routing of a step of S tokens per rank, apart from any recycled buffer.

    Attributes:
        places: int32 [R, S, K] of everybody's tokens; -1 for those of ranks that take no part.
        here: bool [R, S, 1], tokens with an expert of this rank.
        identity: [R, S, 1] in the output dtype, what a rank adds for a token that is not `here` without changing a bit:
            -0.0; +0.0 where the token has no expert anywhere.
        counts: int32 [R], T of each rank.
        valid: bool [T]; num_invalid: int32 [1]: as in `DispatchOutput`.
        origin: number of the dispatch that made it; 0 = not known (a handle that `torch.compile` passed on).
    """

    places: torch.Tensor
    here: torch.Tensor
    identity: torch.Tensor
    counts: torch.Tensor
    valid: torch.Tensor
    num_invalid: torch.Tensor
    origin: int

    @property
    def step_tokens(self) -> int:
        """S."""
        return self.places.shape[1]

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`."""
        return [self.places, self.here, self.identity, self.counts, self.valid, self.num_invalid]

    @classmethod
    def restore(cls, tensors: Sequence[torch.Tensor]) -> GatherState:
        """What `flatten` was made of, but for the origin."""
        values: list[Any] = [*tensors, 0]
        return cls(*values)

    @classmethod
    def blank(cls, config: MoEConfig, num_tokens: int, device: torch.device) -> GatherState:
        """The routing of a step of M tokens, uninitialised."""
        lead = config.group.size, config.max_tokens_per_rank
        dtype = config.resolved_output_dtype
        return cls(
            torch.empty(*lead, config.topk, dtype=torch.int32, device=device),
            torch.empty(*lead, 1, dtype=torch.bool, device=device),
            torch.empty(*lead, 1, dtype=dtype, device=device),
            torch.empty(lead[0], dtype=torch.int32, device=device),
            torch.empty(num_tokens, dtype=torch.bool, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
            0,
        )


class GatherTables:
    """The expert map and who is active, on the device. Changed in place: CUDA graphs that were captured go on.

    Args:
        config: of the communicator.
        device: of the operations.
    """

    def __init__(self, config: MoEConfig, device: torch.device) -> None:
        experts, rank = config.resolved_expert_map, config.group.rank
        self._experts, self._num_experts = experts, config.num_experts
        self.stride, self.rank = experts.stride, rank
        most = sum(len(copies) for copies in experts.replicas)
        self._replicated = most > experts.num_experts
        self._first = torch.zeros(experts.num_experts + 1, dtype=torch.int32, device=device)
        self._copies = torch.ones(experts.num_experts + 1, dtype=torch.int32, device=device)
        self._held = torch.ones(experts.num_experts + 1, dtype=torch.bool, device=device)
        self._places = torch.full((most + 1,), -1, dtype=torch.int32, device=device)
        self._place_of = torch.full((experts.num_experts + 1,), -1, dtype=torch.int32, device=device)  # of no copies
        turns = rank + torch.arange(config.max_tokens_per_rank, dtype=torch.int32, device=device)
        self._turns = turns[:, None]
        self.active = torch.ones(config.group.size, dtype=torch.bool, device=device)
        self.set_active((True,) * config.group.size)

    def set_active(self, mask: Sequence[bool]) -> None:
        """Ranks whose mask is False hold no expert and bring no token."""
        first, ranks, slots = self._experts.tables(mask)
        last = len(self._places) - 1  # where "none" is; ids E and, from behind, -1 name it
        counts = first.diff()
        places = torch.full((last + 1,), -1, dtype=torch.int32, device="cpu")
        places[: len(ranks)] = ranks * self.stride + slots
        self._first.fill_(last)
        self._first[:-1] = torch.where(counts > 0, first[:-1], last).to(self._first.device)
        self._copies[:-1] = counts.clamp(min=1).to(self._copies.device)
        self._held[:-1] = (counts > 0).to(self._held.device)
        self._places.copy_(places)
        self._place_of.copy_(self._places[self._first])
        self.active.copy_(torch.tensor(mask, dtype=torch.bool, device="cpu"))

    def route(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(places int32 [T, K], valid bool [T], number of invalid ids int32 [1]) of this rank's ids int32 [T, K]."""
        unknown = topk_ids != topk_ids.clamp(-1, self._num_experts - 1)
        ids = torch.where(unknown, -1, topk_ids)
        if self._replicated:
            places = self._places[self._first[ids] + self._turns[: len(ids)] % self._copies[ids]]
        else:
            places = self._place_of[ids]
        return places, self._held[ids].all(1), unknown.sum(dtype=torch.int32).reshape(1)

    def local(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(local expert ids int32, -1 = not here; bool, here), of places in any shape."""
        here = torch.div(places, self.stride, rounding_mode="floor") == self.rank
        return torch.where(here, places - self.rank * self.stride, -1), here
