"""The baseline that gathers everything: NCCL `all_gather` of all tokens, `reduce_scatter` of all partials; bf16.

Inside the times. LL, RANK_MAJOR: dispatch gathers tokens, ids and weights and finds which rows concern this rank (all
rows stand in its output, those of other ranks too); combine zeroes rows without a token, and reduce-scatters. HT,
FLAT: dispatch also selects its rows (the host waits for their number); combine puts them back among zeros. The sum over
ranks is NCCL's, in bf16.
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
class Gathered:
    """rows [R*T, H] or [N, H]; ids and weights beside them; `index` [N] of the rows among all, None where all stand."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    index: torch.Tensor | None


class GatherScatter:
    """See `gpu.Backend`; what a dispatch returns is Gathered."""

    rotates = True
    sms: dict[str, int]

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank, self.sms = case, rank, {}

    def prepare(self, inputs: Inputs) -> None:
        """See `Backend`."""

    def dispatch(self, inputs: Inputs, previous: Any = None) -> Any:
        """See `Backend`."""
        case, share = self._case, self._case.experts // self._case.ranks
        x, ids, weights = (self._all(t) for t in (inputs.x, inputs.topk_ids, inputs.topk_weights))
        local = torch.where(ranks_of(case, ids) == self._rank, ids % share, -1)
        if case.mode is Mode.LL:
            return Gathered(x, local, weights, None)
        index = (local >= 0).any(1).nonzero()[:, 0]
        x, local, weights = (t.index_select(0, index) for t in (x, local, weights))
        return Gathered(x, local, weights, index)

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        gathered = mine.new_empty(self._case.ranks * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(gathered, mine)
        return gathered

    def tokens(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        return received.rows  # type: ignore[no-any-return]

    def experts(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        return check.toy_rank_wise(received.rows, received.ids, received.weights, self._case.dtype)

    def combine(self, y: torch.Tensor, received: Any, inputs: Inputs, out: torch.Tensor) -> None:
        """See `Backend`."""
        if received.index is None:
            rows = torch.where((received.ids >= 0).any(1)[:, None], y, 0)
        else:
            rows = y.new_zeros(self._case.ranks * self._case.tokens, self._case.hidden)
            rows.index_copy_(0, received.index, y)
        dist.reduce_scatter_tensor(out, rows)

    def result(self, inputs: Inputs) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty_like(inputs.x)

    def fault(self, inputs: Inputs, out: torch.Tensor, row: Row) -> str:
        """See `Backend`."""
        return check.fault(out, check.expected(self._case, inputs, row), exact=False)

    def close(self) -> None:
        """See `Backend`."""


def create(case: Case, rank: int, group: Any) -> GatherScatter:
    """See `gpu.load`."""
    layout = Layout.RANK_MAJOR if case.mode is Mode.LL else Layout.FLAT
    if case.layout is not layout or case.quantize or case.fp8_combine or case.num_sms or case.form:
        raise Unavailable("agrs: bf16, RANK_MAJOR for LL and FLAT for HT, with NCCL's own choice of multiprocessors")
    return GatherScatter(case, rank)
