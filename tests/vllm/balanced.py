"""What ranks do in test_eplb.py: a layer whose experts vLLM's load balancer moves between steps.

Six experts on eight places, two per rank. What the tests stand in for is only what wants a GPU: the Triton kernel that
maps ids, and the stream that the balancer waits for.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.vllm.layers import NUM_EXPERTS, WIDTH, Case, Inputs, apply, engine, finalizer_of, joined

NUM_LOGICAL = 6
NUM_LOCAL = NUM_EXPERTS // 4
AT_FIRST = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]])
"""Physical to logical, as vLLM begins: copies of the first experts fill up."""
LOADS = torch.tensor([[[1.0, 1, 1, 1, 1, 50]], [[1.0, 1, 90, 1, 40, 1]], [[1.0, 1, 1, 1, 1, 1]]])
"""Of the logical experts, before each rearrangement."""


class Moved(Inputs):
    """Experts are computed with what this rank holds, the expected result with what the model has."""

    def __init__(self, case: Case, rank: int, step: int, held: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(case, rank, step)
        self.rank, self.held = rank, held
        self.ids = torch.where(self.ids < 0, -1, self.ids % NUM_LOGICAL)

    def ffn(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        w1, w2 = (weights[expert - self.rank * NUM_LOCAL] for weights in self.held)
        return gated(x, w1.view(2 * WIDTH, -1), w2.view(-1, WIDTH))

    def wanted(self) -> torch.Tensor:
        total = torch.zeros(self.x.shape)
        for t, k in (self.ids >= 0).nonzero().tolist():
            expert = int(self.ids[t, k])
            total[t] += self.weights[t, k] * gated(self.x[t : t + 1], self.w1[expert], self.w2[expert])[0]
        return total


def gated(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """One expert."""
    gate, up = (x.float() @ w1.float().T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().T


def physical(ids: torch.Tensor, placed: torch.Tensor) -> torch.Tensor:
    """Logical ids [T, K] as vLLM's router gives them to the backend: copies in turn. Counts nothing."""
    from vllm.distributed.eplb.eplb_state import compute_logical_maps

    places, copies = (table[0] for table in compute_logical_maps(placed, NUM_LOGICAL))
    turn = torch.arange(ids.numel()).view(ids.shape) % copies[ids.clamp(min=0)]
    return torch.where(ids < 0, -1, places[ids.clamp(min=0), turn])


def rearranged(load: torch.Tensor, placed: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """vLLM's policy says where experts go, its communicator moves their weights in place; the new map [1, places]."""
    from vllm.distributed.eplb import eplb_communicator, rebalance_execute
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    new = DefaultEplbPolicy.rebalance_experts(load, NUM_EXPERTS, 1, 1, 4, placed)
    with ExitStack() as stack:
        for place in (torch.cuda, torch.accelerator):
            stack.enter_context(mock.patch.object(place, "current_stream"))
        stack.enter_context(mock.patch.object(eplb_communicator, "PIN_MEMORY", False, create=True))
        rebalance_execute.rearrange_expert_weights_inplace(
            placed, new, [list(held)], [torch.empty_like(w) for w in held], dist.group.WORLD,
            eplb_communicator.TorchDistGlooStagedEplbCommunicator(dist.group.WORLD),
        )  # fmt: skip
    return new


def run(rank: int, size: int, store: Any, case: Case) -> tuple[list[list[int]], list[int]]:
    """A step, then one after each rearrangement; (the maps that were in force, communicators after each step)."""
    with joined(rank, size, store), engine(case, rank):
        return _steps(case, rank)


def _steps(case: Case, rank: int) -> tuple[list[list[int]], list[int]]:
    finalizer = finalizer_of(case, rank, rank * NUM_LOCAL)
    model = Inputs(case, rank, 0)
    mine = AT_FIRST[0, rank * NUM_LOCAL :][:NUM_LOCAL]
    held = model.w1[mine].flatten(1).contiguous(), model.w2[mine].flatten(1).contiguous()
    placed, maps, made = AT_FIRST.clone(), [], []
    for step in range(len(LOADS) + 1):
        if step:
            placed = rearranged(LOADS[step - 1], placed, held)
        inputs = Moved(case, rank, step, held)
        z = apply(case, finalizer, inputs, rank, physical(inputs.ids, placed))
        torch.testing.assert_close(z.float(), inputs.wanted(), atol=6e-2, rtol=6e-2)
        maps.append(placed[0].tolist())
        pool = finalizer._link.pool if case.plugin == "native" else finalizer.buffer._pool
        made.append(len(pool.communicators()))
    return maps, made
