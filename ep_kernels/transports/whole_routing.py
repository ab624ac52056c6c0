"""The routing of all ranks, as the state of a handle: for transports whose ranks tell each other their ids.

Every rank computes from it where every row goes, as `ep_kernels/reference.py` says, and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_kernels import reference
from ep_kernels.config import MoEConfig


@dataclass(frozen=True, slots=True)
class WholeRouting:
    """See `base.HandleState`. R ranks, M most tokens per rank, K experts per token.

    Attributes:
        ids: int32 [R, M, K], as dispatched; -1 past a rank's tokens.
        weights: float32 [R, M, K]; 0 there.
        tokens: int32 [R], T of each rank; 0 of one that took no part.
        origin: int64 [1], `seq` of the dispatch that made it, which others may use again.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    origin: torch.Tensor

    @classmethod
    def blank(cls, config: MoEConfig, device: str) -> WholeRouting:
        """Uninitialised."""
        shape = config.group.size, config.max_tokens_per_rank, config.topk
        return cls(
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:1], dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int64, device=device),
        )

    @classmethod
    def of(
        cls, config: MoEConfig, ids: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], origin: int
    ) -> WholeRouting:
        """From int32 and float32 [T, K] of each rank, which are copied."""
        made = cls.blank(config, ids[0].device.type)
        made.ids.fill_(-1), made.weights.zero_(), made.origin.fill_(origin)
        for rank, (chosen, gates) in enumerate(zip(ids, weights, strict=True)):
            made.tokens[rank] = rows = len(chosen)
            made.ids[rank, :rows], made.weights[rank, :rows] = chosen, gates
        return made

    def flatten(self) -> list[torch.Tensor]:
        return [self.ids, self.weights, self.tokens, self.origin]

    def step(self, config: MoEConfig, active: Sequence[bool]) -> reference.ReferenceStep:
        """Where the rows of the dispatch went, which was made while these ranks were active."""
        tokens = self.tokens.tolist()
        ids, weights = (
            [rows[:number] for rows, number in zip(part.cpu(), tokens, strict=True)]
            for part in (self.ids, self.weights)
        )
        return reference.routed(config, ids, weights, active)

    def row_weights(self, config: MoEConfig, active: Sequence[bool], rows_shape: tuple[int, ...]) -> torch.Tensor:
        made, step = torch.zeros(rows_shape, dtype=torch.float32, device="cpu"), self.step(config, active)
        for places, weights in zip(step.arrivals[config.group.rank].places, step.weights, strict=True):
            served = places >= 0
            made.view(-1)[places[served]] = weights[: len(places)][served]
        return made.to(self.ids.device)

    def source_rows(self, config: MoEConfig, active: Sequence[bool]) -> torch.Tensor:
        here = [(route.rank == config.group.rank).any(1).sum() for route in self.step(config, active).routes]
        return torch.stack(here).int().to(self.ids.device)

    def num_rows(self, config: MoEConfig, active: Sequence[bool]) -> int:
        """Rows of a compact layout that arrived here, padding included, less those that were dropped."""
        arrivals = self.step(config, active).arrivals[config.group.rank]
        if config.resolved_layout.per_expert:
            return int(arrivals.offsets[-1])
        return int((arrivals.place >= 0).sum())
