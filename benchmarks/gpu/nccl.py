"""The baseline: torch.distributed over NCCL, `all_to_all_single` of the same deduplicated rows, FLAT layout, bf16.

Inside the times. Dispatch: the distinct ranks of each token, the order of the rows (one `nonzero`, which the host
waits for), the exchange of counts (which the host reads, because NCCL wants the splits there), packing by
`index_select`, the payload, and the local ids and weights that belong to the rows. Combine: the payload, and the sum
over ranks, gathered and summed in fp32. "cached": order, splits and local ids are taken from the earlier dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case, ranks_of
from benchmarks.gpu import Inputs, Row, Unavailable, check
from ep_kernels import Layout, Mode


@dataclass(frozen=True)
class Routing:
    """Of one dispatch: order of packed rows, splits, and for each (token, rank) its packed row (N where none)."""

    token_of: torch.Tensor
    sent: list[int]
    got: list[int]
    place: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Nccl:
    """See `gpu.Backend`; what a dispatch returns is (rows [N, H], Routing)."""

    rotates = True
    sms: dict[str, int]

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank, self.sms = case, rank, {}

    def prepare(self, inputs: Inputs) -> None:
        """See `Backend`."""

    def dispatch(self, inputs: Inputs, previous: Any = None) -> Any:
        """See `Backend`."""
        routing = self._route(inputs) if previous is None else previous[1]
        packed = inputs.x.index_select(0, routing.token_of)
        rows = packed.new_empty(sum(routing.got), self._case.hidden)
        dist.all_to_all_single(rows, packed, routing.got, routing.sent)
        return rows, routing

    def _route(self, inputs: Inputs) -> Routing:
        case, ranks = self._case, torch.arange(self._case.ranks, device=inputs.x.device)
        owner = ranks_of(case, inputs.topk_ids)
        hit = (owner[:, :, None] == ranks).any(1)  # [T, R]
        rank_of, token_of = hit.T.nonzero(as_tuple=True)
        counts = hit.sum(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, got = torch.stack((counts, theirs)).tolist()
        place = torch.full(hit.shape, len(token_of), device=hit.device)
        place[token_of, rank_of] = torch.arange(len(token_of), device=hit.device)
        facts = torch.cat([inputs.topk_ids, inputs.topk_weights.view(torch.int32)], 1).index_select(0, token_of)
        received = facts.new_empty(sum(got), 2 * case.topk)
        dist.all_to_all_single(received, facts, got, sent)
        share = case.experts // case.ranks
        ids, weights = received[:, : case.topk], received[:, case.topk :].view(torch.float32)
        local = torch.where(ranks_of(case, ids) == self._rank, ids % share, -1)
        return Routing(token_of, sent, got, place, local, weights)

    def tokens(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        return received[0]  # type: ignore[no-any-return]

    def experts(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        rows, routing = received
        return check.toy_rank_wise(rows, routing.ids, routing.weights, self._case.dtype)

    def combine(self, y: torch.Tensor, received: Any, inputs: Inputs, out: torch.Tensor) -> None:
        """See `Backend`."""
        routing = received[1]
        num_rows = len(routing.token_of)
        home = y.new_empty(num_rows + 1, self._case.hidden)
        home[num_rows].zero_()  # stands for what is not there
        dist.all_to_all_single(home[:num_rows], y, routing.sent, routing.got)
        wide = home.index_select(0, routing.place.flatten())
        torch.sum(wide.view(*routing.place.shape, -1), 1, out=out)

    def result(self, inputs: Inputs) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty_like(inputs.x)

    def fault(self, inputs: Inputs, out: torch.Tensor, row: Row) -> str:
        """See `Backend`."""
        return check.fault(out, check.expected(self._case, inputs, row), exact=False)

    def close(self) -> None:
        """See `Backend`."""


def create(case: Case, rank: int, group: Any) -> Nccl:
    """See `gpu.load`."""
    if case.layout is not Layout.FLAT or case.mode is not Mode.HT or case.quantize or case.num_sms:
        raise Unavailable("nccl: measured for HT, FLAT, bf16, with its own choice of multiprocessors")
    return Nccl(case, rank)
