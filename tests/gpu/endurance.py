"""Thousands of steps without a host wait between them: fresh routing, counts and algorithm in each.

Payload, weights and gains are small numbers in quarters, so that no sum rounds, in whatever order: z is known without
the reference and checked on the device. The first columns of a row carry its iteration in base 4: a stale row shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_kernels import MoECommunicator
from ep_kernels.routing import delivered
from ep_kernels.types import DispatchOutput
from tests.cases import RoutingCase
from tests.compare import expert, poison, same_bits
from tests.transports.steps import Inputs, check_dispatch

BATCH = 200
"""Iterations whose inputs are drawn, and whose results are read, together."""
CHECKED = 100
"""Every so many iterations are compared with the reference, in full."""
DIGITS = 8


@dataclass
class Batch:
    """Inputs of BATCH iterations of all ranks, equal on all of them.

    Attributes:
        counts: [BATCH, R], T of each rank.
        x: [BATCH, R, M, H]; ids, weights: [BATCH, R, M, K].
    """

    counts: list[list[int]]
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def draw(cls, comm: MoECommunicator, case: RoutingCase, first: int) -> Batch:
        """Of iterations first ... first + BATCH - 1."""
        random = torch.Generator().manual_seed(case.seed * 131_071 + first)
        shape = (BATCH, case.num_ranks, comm.config.max_tokens_per_rank)
        counts = torch.randint(0, shape[2] + 1, shape[:2], generator=random)
        counts[torch.rand(counts.shape, generator=random) < 0.1] = 0
        ids = torch.rand(*shape, case.num_experts, generator=random).argsort(-1)[..., : case.topk].int()
        ids[torch.rand(ids.shape, generator=random) < 0.15] = -1
        weights = torch.randint(1, 3, ids.shape, generator=random).float()
        x = torch.randint(0, 4, (*shape, case.hidden_size), generator=random).to(comm.config.dtype)
        digits = torch.arange(first, first + BATCH)[:, None] // 4 ** torch.arange(DIGITS) % 4
        x[..., :DIGITS] = digits[:, None, None].to(x.dtype)
        return cls(counts.tolist(), x, ids, weights)

    def inputs(self, index: int) -> Inputs:
        """Everybody's arguments of one iteration."""
        xs, ids, weights = (
            [t[index, r, :n] for r, n in enumerate(self.counts[index])] for t in (self.x, self.ids, self.weights)
        )
        return Inputs(xs, None, ids, weights)

    def of_rank(self, rank: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(x, ids, weights) of each iteration, on the device."""
        x, ids, weights = (t[:, rank].to(device).contiguous() for t in (self.x, self.ids, self.weights))
        rows = [counts[rank] for counts in self.counts]
        return [(x[i, :n], ids[i, :n], weights[i, :n]) for i, n in enumerate(rows)]


def many_iterations(comm: MoECommunicator, case: RoutingCase, iterations: int) -> int:
    """Ranks run as far ahead of each other as the operations let them; returns how many steps ran LL."""
    device = comm.capabilities.device_type
    slots = torch.tensor([copies[0][1] for copies in comm.config.resolved_expert_map.replicas], device=device)
    powers, num_low_latency = 4 ** torch.arange(DIGITS, device=device), 0
    for first in range(0, iterations, BATCH):
        batch = Batch.draw(comm, case, first)
        wrong = torch.zeros(2, dtype=torch.int64, device=device)
        for i, (x, ids, weights) in enumerate(batch.of_rank(comm.rank, device)):
            out, handle = comm.dispatch(x, ids, weights, step_tokens=max(batch.counts[i]))
            z = comm.combine(expert(out, x.dtype), handle)
            wrong[0] += (z != exact_result(slots, x, ids, weights)).sum()
            wrong[1] += stale_rows(out, (first + i) // powers % 4)
            num_low_latency += handle.mode.value == "ll"
            if i % CHECKED == 0:
                expected = check_dispatch(comm, batch.inputs(i), out)
                same_bits(z, expected.combined(comm.rank), f"{case}: z of iteration {first + i}")
            poison(out.tokens)
        seen = wrong.tolist()  # waits for the device
        comm.check()
        assert seen == [0, 0], f"{case}: [wrong values of z, stale rows] in {first} ... {first + BATCH - 1}"
    return num_low_latency


def exact_result(slots: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """z with the experts of `tests.compare.expert`, which multiply by 1 + slot / 4."""
    gains = torch.where(ids >= 0, weights * (1 + slots[ids.clamp(min=0).long()] / 4), 0.0)
    return (x.float() * gains.sum(1, keepdim=True)).to(x.dtype)


def stale_rows(out: DispatchOutput, digits: torch.Tensor) -> torch.Tensor:
    """How many delivered rows are not of this iteration."""
    return ((out.tokens[..., :DIGITS] != digits).any(-1) & delivered(out)).sum()
