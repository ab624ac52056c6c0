"""The floor of any NCCL baseline: `all_to_all_single` of the same number of bytes, and nothing else.

Rows are packed and the splits are known beforehand, outside the time; nothing is unpacked, weighted or summed. In a
graph the routing is that of the capture, because NCCL takes splits from the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bounds import rows_to
from benchmarks.cases import Case
from benchmarks.gpu import Inputs, Row, Unavailable
from ep_kernels import Layout


class Parcel:
    """Prepared for one set of inputs: splits, and rows of random bytes for both ways."""

    def __init__(self, case: Case, counts: list[int], theirs: list[int], device: torch.device) -> None:
        self.sent, self.got = counts, theirs
        self.there, self.back = (
            torch.randint(0, 256, (sum(rows), case.moved_bytes(op)), dtype=torch.uint8, device=device)
            for op, rows in (("dispatch", counts), ("combine", theirs))
        )
        self.arrived = self.there.new_zeros(sum(theirs), case.moved_bytes("dispatch"))
        self.wanted = torch.zeros(len(counts), dtype=torch.int64, device=device)


class NcclBare:
    """See `gpu.Backend`; what a dispatch returns is the Parcel."""

    rotates = False
    sms: dict[str, int]

    def __init__(self, case: Case) -> None:
        self._case, self.sms = case, {}
        self._parcels: dict[int, Parcel] = {}

    def prepare(self, inputs: Inputs) -> None:
        """See `Backend`. The way back is tried once, to know which bytes it must bring."""
        counts = rows_to(self._case, inputs.topk_ids)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        parcel = Parcel(self._case, counts.tolist(), theirs.tolist(), counts.device)
        starts = [sum(parcel.got[:rank]) for rank in range(self._case.ranks)]
        sums = torch.stack([_sum(parcel.back[s : s + n]) for s, n in zip(starts, parcel.got, strict=True)])
        dist.all_to_all_single(parcel.wanted, sums)
        self._parcels[id(inputs)] = parcel

    def dispatch(self, inputs: Inputs, previous: Any = None) -> Any:
        """See `Backend`."""
        parcel = self._parcels[id(inputs)]
        dist.all_to_all_single(parcel.arrived, parcel.there, parcel.got, parcel.sent)
        return parcel

    def tokens(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        return received.arrived  # type: ignore[no-any-return]

    def experts(self, received: Any) -> torch.Tensor:
        """See `Backend`. There are none."""
        return received.back  # type: ignore[no-any-return]

    def combine(self, y: torch.Tensor, received: Any, inputs: Inputs, out: torch.Tensor) -> None:
        """See `Backend`. The prepared bytes go back, whatever `y` is."""
        dist.all_to_all_single(out.view(torch.uint8), received.back, received.sent, received.got)

    def result(self, inputs: Inputs) -> torch.Tensor:
        """See `Backend`."""
        rows, width = sum(self._parcels[id(inputs)].sent), self._case.moved_bytes("combine")
        return torch.empty(rows, width // 2, dtype=torch.bfloat16, device=inputs.x.device)

    def fault(self, inputs: Inputs, out: torch.Tensor, row: Row) -> str:
        """See `Backend`. Compares sums over the bytes that came back with those of the bytes that were sent."""
        parcel = self._parcels[id(inputs)]
        sums = torch.stack([_sum(part) for part in torch.split(out.view(torch.uint8), parcel.sent)])
        return "" if torch.equal(sums, parcel.wanted) else "other bytes came back than were sent"

    def close(self) -> None:
        """See `Backend`."""
        self._parcels.clear()


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """One int64 that depends on every byte and on the order of rows."""
    each = rows.sum(1, dtype=torch.int64)
    return (each * torch.arange(1, len(each) + 1, device=rows.device)).sum()


def create(case: Case, rank: int, group: Any) -> NcclBare:
    """See `gpu.load`."""
    if case.layout not in (Layout.FLAT, Layout.RANK_MAJOR) or case.num_sms or case.form:
        raise Unavailable("nccl_bare: one row per (token, rank), with NCCL's own choice of multiprocessors")
    return NcclBare(case)
