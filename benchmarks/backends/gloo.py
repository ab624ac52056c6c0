"""The baseline on processors: torch.distributed gloo, moving the same deduplicated rows to the same places.

Inside the times, as inside crossdock's: for dispatch, packing each rank's rows (`index_select`), the exchange of
counts, the ids and weights that belong to the rows, the payload (`all_to_all_single`) and, in per-expert layouts, the
expansion to one row per expert; for combine, the weighted fp32 pre-reduction (per-expert layouts), the payload and the
fp32 sum over ranks at home. Outside: what a rank computes from routing alone (index tensors are made beforehand).
`payload_s` has the `all_to_all_single` of the payload alone.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.backends import Setup
from benchmarks.cases import Step, ranks_of, sends


class Gloo:
    """See `backends.Backend`."""

    def __init__(self, setup: Setup) -> None:
        self._case, self._rank = setup.case, setup.rank
        self.payload_s: dict[str, list[float]] = {"dispatch": [], "combine": []}
        dist.init_process_group("gloo", store=setup.store, rank=setup.rank, world_size=setup.case.ranks)

    def prepare(self, x: torch.Tensor, step: Step) -> None:
        """See `Backend`."""
        case, rank = self._case, self._rank
        here = [sends(case, step, rank, r) for r in range(case.ranks)]
        there = [sends(case, step, s, rank) for s in range(case.ranks)]
        self._out_splits, self._in_splits = [len(t) for t in here], [len(t) for t in there]
        self._x, self._token_of = x, torch.cat(here)
        self._meta = torch.cat([step.topk_ids[rank], step.topk_weights[rank].view(torch.int32)], 1)  # [T, 2K]
        self._meta_packed = torch.empty(len(self._token_of), 2 * case.topk, dtype=torch.int32)
        self._meta_flat = torch.empty(sum(self._in_splits), 2 * case.topk, dtype=torch.int32)
        self._packed = torch.empty(len(self._token_of), case.hidden, dtype=case.dtype)
        self._sum = torch.empty(case.tokens, case.hidden)
        self._flat = torch.empty(sum(self._in_splits), case.hidden, dtype=case.dtype)
        self._home = torch.empty_like(self._packed)
        if case.layout.per_expert:
            self._plan_experts(step, there)

    def _plan_experts(self, step: Step, there: list[torch.Tensor]) -> None:
        case, rank = self._case, self._rank
        rows, experts, weights, first = [], [], [], 0
        for source, tokens in enumerate(there):
            ids = step.topk_ids[source][tokens]
            row, k = (ranks_of(case, ids) == rank).nonzero().unbind(1)
            rows.append(row + first)
            experts.append(ids[row, k])
            weights.append(step.topk_weights[source][tokens][row, k])
            first += len(tokens)
        order = torch.cat(experts).argsort(stable=True)
        self._row_of = torch.cat(rows)[order]
        self._weight_of = torch.cat(weights)[order][:, None]
        self._grouped = torch.empty(len(order), case.hidden, dtype=case.dtype)
        self._partial = torch.empty(first, case.hidden)

    def dispatch(self) -> None:
        """See `Backend`."""
        torch.index_select(self._x, 0, self._token_of, out=self._packed)
        counts = torch.tensor(self._out_splits)
        dist.all_to_all_single(torch.empty_like(counts), counts)
        torch.index_select(self._meta, 0, self._token_of, out=self._meta_packed)
        dist.all_to_all_single(self._meta_flat, self._meta_packed, self._in_splits, self._out_splits)
        self._payload("dispatch", self._flat, self._packed, self._in_splits, self._out_splits)
        if self._case.layout.per_expert:
            torch.index_select(self._flat, 0, self._row_of, out=self._grouped)

    def experts(self) -> None:
        """See `Backend`. The experts do nothing."""

    def combine(self) -> None:
        """See `Backend`."""
        if self._case.layout.per_expert:
            self._partial.zero_().index_add_(0, self._row_of, self._grouped * self._weight_of)
            self._flat.copy_(self._partial)
        self._payload("combine", self._home, self._flat, self._out_splits, self._in_splits)
        self._sum.zero_().index_add_(0, self._token_of, self._home.float())
        self._sum.to(self._case.dtype)

    def _payload(self, op: str, to: torch.Tensor, rows: torch.Tensor, got: list[int], sent: list[int]) -> None:
        began = time.perf_counter()
        dist.all_to_all_single(to, rows, got, sent)
        self.payload_s[op].append(time.perf_counter() - began)

    def barrier(self) -> None:
        """See `Backend`."""
        dist.barrier()

    def close(self) -> None:
        """See `Backend`."""
        dist.destroy_process_group()


def create(setup: Setup) -> Gloo:
    """See `backends.load`."""
    return Gloo(setup)
