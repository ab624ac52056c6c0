"""Terms of sums by copy engines: rows go into the staging slots of the ranks that sum them, sums are read from there.

    send    slot[source] of each peer <- rows[peer], behind what the stream has now, or   an operation of the copies
            has when those rows are made
    add     the stream waits for all of them; out = sum in ascending rank                 kernels/collectives/add_terms
            shares: also into slot[own rank], from where peers read it
    share   out[peer] <- slot[peer] of each peer                                          an operation of the copies

All are in the slot of the parity of the operation's number, as any operation of the copies: a share comes two or four
operations after its terms were sent. A slot may be written again two operations later (kernels/collective_abi.py): what
a peer reads of it belongs to an operation, too, and terms are sent behind the stream's sum of those before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp
from ep_kernels.transports.collective_base import SentTerms
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.copy_engines.collective_engine import CollectiveEngine
from ep_kernels.transports.nvlink.copy_engines.collective_work import CopyWork, WorkOwner
from ep_kernels.transports.nvlink.copy_engines.copies import CopyEngines
from ep_kernels.transports.nvlink.gpu.copy_schedule import CopyPart
from ep_kernels.transports.nvlink.gpu.signature import signature


class NvlinkTerms:
    """See `collective_base.TermCopies`.

    Args:
        owner: the transport.
        engine, engines: of this rank.
        enter: the CUstream that is current, made to wait for what was launched before on another.
        launch: of a kernel, there.
        check: raises ArgumentError for a tensor, by name, that is not on this rank's device.
    """

    def __init__(
        self,
        owner: WorkOwner,
        engine: CollectiveEngine,
        engines: CopyEngines,
        enter: Callable[[], int],
        launch: Callable[[Call], None],
        check: Callable[[str, torch.Tensor], None],
    ) -> None:
        self._owner, self._engine, self._engines, self._enter, self._launch = owner, engine, engines, enter, launch
        self._check = check
        self.row_bytes = int(engine.map.reduce_row)

    def send(self, rows: torch.Tensor, made: Iterable[int]) -> SentTerms:
        """See `collective_base.TermCopies`."""
        self._check("x", rows)
        slot, num_bytes, engines = self._engine.copy_slot(self._engines.seq + 1), rows[0].nbytes, self._engines
        parts = [CopyPart(rows.data_ptr(), slot, 0, num_bytes, self.row_bytes, x_stride=num_bytes)]
        op = CollectiveOp.REDUCE_SCATTER
        word = signature(op, Algorithm.COPY_PUSH, rows.dtype, rows.nbytes, None)
        seq = engines.begin_push(parts, word, rows, self._enter(), op.value)
        for peer in made:
            engines.push_to(seq, peer, parts, self._enter())
        engines.end_push(seq, parts)
        return SentTerms(seq, slot)

    def add(self, sent: SentTerms, own: torch.Tensor, out: torch.Tensor, *, shares: bool = False) -> None:
        """See `collective_base.TermCopies`."""
        self._owner.await_end(sent.seq)
        self._launch(self._engine.add_terms(own, out, sent.slot, shares))

    def share(self, sent: SentTerms, out: torch.Tensor) -> CopyWork:
        """See `collective_base.TermCopies`."""
        assert self._engine.copy_slot(self._engines.seq + 1) == sent.slot, "an odd number of operations later"
        num_bytes = out[0].nbytes
        part = CopyPart(0, out.data_ptr(), sent.slot, num_bytes, num_bytes, slot_stride=self.row_bytes)
        op = CollectiveOp.ALL_REDUCE
        word = signature(op, Algorithm.COPY_PULL, out.dtype, out.nbytes, None)
        seq = self._engines.begin([part], word, False, out, self._enter(), op.value)
        rank, epoch = self._engine.group.rank, self._owner.epoch
        return CopyWork(self._owner, seq, rank, self._engines.arrivals(), True, None, epoch)
