"""Collectives by copy engines: the parts of an all-gather, the terms of sums, and what of them is staged.

Under capture a kernel of two warps waits between the copies: a stream's own wait could not count at a replay, nor be
released at a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp
from ep_kernels.kernels import collective_abi
from ep_kernels.transports.collective_base import GatherArgs, GatherPart, SentTerms
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.copy_engines import collective_plan as plan
from ep_kernels.transports.nvlink.copy_engines.collective_engine import CollectiveEngine
from ep_kernels.transports.nvlink.copy_engines.collective_work import CopyPlan, CopyWork, PlanOwner, WorkOwner
from ep_kernels.transports.nvlink.copy_engines.copies import CopyEngines
from ep_kernels.transports.nvlink.gpu import copy_schedule
from ep_kernels.transports.nvlink.gpu.copy_schedule import CopyPart
from ep_kernels.transports.nvlink.gpu.launch import Quiet
from ep_kernels.transports.nvlink.gpu.signature import signature
from ep_kernels.transports.nvlink.memory.memory import Mapping


def copy_by_kernel(to: torch.Tensor, source: torch.Tensor) -> None:
    """uint8 [n] to another place of this GPU, by multiprocessors: a copy engine moves bytes within one GPU at a
    fraction of its memory's speed. Eight bytes at a time where they are aligned: torch's kernels of single bytes are
    slow. Nothing where both are the same place."""
    if not to.numel() or to.data_ptr() == source.data_ptr():
        return
    if (to.data_ptr() | source.data_ptr() | to.numel()) % 8 == 0:
        to, source = to.view(torch.int64), source.view(torch.int64)
    torch.bitwise_or(source, 0, out=to)


class GatherCopies:
    """All-gathers of one rank.

    Args:
        offset_of: of a tensor in the region; None where it is not registered.
    """

    def __init__(
        self,
        owner: PlanOwner,
        engine: CollectiveEngine,
        engines: CopyEngines,
        stream: torch.cuda.Stream,
        region: Mapping,
        offset_of: Callable[[torch.Tensor], int | None],
    ) -> None:
        self._owner, self._engine, self._engines = owner, engine, engines
        self._stream, self._offset_of = stream, offset_of
        self._rank, self._size = engine.group.rank, engine.group.size
        self._slot_bytes = int(engine.map.slot_stride)
        slots = [engine.copy_slot(seq) for seq in range(collective_abi.SLOTS)] + [engine.graph_slot]
        self._slots = [region.view(slot, (self._slot_bytes,), torch.uint8) for slot in slots]

    def push(self, parts: Sequence[GatherPart], args: GatherArgs) -> CopyWork:
        """`parts` of `args` into registered outs."""
        listed, word = self._pushed(parts, args.half_bytes)
        behind = torch.cuda.current_stream().cuda_stream
        seq = self._engines.begin(listed, word, True, _storages(parts), behind)
        splits = not copy_schedule.is_small(listed)
        halves = args.half_bytes > 0 and args.takes_halves
        return self._work(parts, seq, splits, halves)

    def pull(self, parts: Sequence[GatherPart]) -> CopyWork:
        """Into any outs."""
        word = self._signature(parts, Algorithm.COPY_PULL, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        rounds = list(plan.gather_rounds([part.x.numel() for part in parts], self._slot_bytes))
        seq = 0
        for ranges in rounds:
            seq = self._pull_round(parts, ranges, word)
        return self._work(parts, seq, len(rounds) == 1)

    def capture(self, parts: Sequence[GatherPart], launch: Callable[[torch.cuda.Stream, Call], None]) -> None:
        """Under capture: a pull, on a branch of the graph, by `launch` of kernels on the stream of the copies."""
        offsets = [self._offset_of(part.out) for part in parts]
        in_place = all(self.own(part).data_ptr() == part.x.data_ptr() for part in parts)
        direct = [
            CopyPart(0, part.out.data_ptr(), offset, part.x.numel(), part.x.numel(), part.x.numel())
            for part, offset in zip(parts, offsets, strict=True) if offset is not None and in_place
        ]  # fmt: skip
        whole = len(direct) == len(parts)
        word = self._signature(parts, Algorithm.COPY_PULL, offsets if whole else None)
        lengths = [part.x.numel() for part in parts]
        rounds: list[Any] = [direct] if whole else list(plan.gather_rounds(lengths, self._slot_bytes))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for each in rounds:
                listed = each if whole else self._stage(parts, each, self._engine.graph_slot, self._slots[-1])
                launch(self._stream, self._engine.copy_wait(word, 0))
                self._engines.graph_copies(listed)
                launch(self._stream, self._engine.copy_wait(word, 1))
            for part in parts:
                copy_by_kernel(self.own(part), part.x)

    def plan_for(self, part: GatherPart, quiet: Quiet) -> CopyPlan | None:
        """The plan of a push of one part in its place; None for other operations."""
        if self.own(part).data_ptr() != part.x.data_ptr():
            return None
        listed, word = self._pushed([part])
        return CopyPlan(self._owner, self._engines, lambda: self._engines.template(listed, word, quiet), self._rank)

    def own(self, part: GatherPart) -> torch.Tensor:
        return part.out[self._rank * part.x.numel() :][: part.x.numel()]

    def _signature(self, parts: Sequence[GatherPart], algorithm: Algorithm, places: Any) -> int:
        lengths = [part.x.numel() for part in parts]
        more = [(part.dtype, length) for part, length in zip(parts[1:], lengths[1:], strict=True)]
        return signature(CollectiveOp.ALL_GATHER, algorithm, parts[0].dtype, sum(lengths), (more, places))

    def _pushed(self, parts: Sequence[GatherPart], half: int = 0) -> tuple[list[CopyPart], int]:
        """(parts as copy engines push them, signature)."""
        offsets = [self._offset_of(part.out) for part in parts]
        listed = [
            CopyPart(part.x.data_ptr(), offset, 0, part.x.numel(), part.x.numel(), half=half)
            for part, offset in zip(parts, offsets, strict=True) if offset is not None
        ]  # fmt: skip
        return listed, self._signature(parts, Algorithm.COPY_PUSH, (offsets, half))

    def _pull_round(self, parts: Sequence[GatherPart], ranges: Sequence[plan.PartRange], word: int) -> int:
        seq = self._engines.seq + 1
        with torch.cuda.stream(self._stream):
            listed = self._stage(parts, ranges, self._engine.copy_slot(seq), self._slots[seq % collective_abi.SLOTS])
        return self._engines.begin(listed, word, False, _storages(parts))

    def _stage(
        self, parts: Sequence[GatherPart], ranges: Sequence[plan.PartRange], slot: int, staged: torch.Tensor
    ) -> list[CopyPart]:
        """Copy this rank's shards into a slot, on the current stream."""
        listed, at = [], 0
        for each in ranges:
            part = parts[each.index]
            copy_by_kernel(staged[at : at + each.num_bytes], part.x[each.begin :][: each.num_bytes])
            out = part.out.data_ptr() + each.begin
            listed.append(CopyPart(0, out, slot + at, each.num_bytes, part.x.numel()))
            at += -(-each.num_bytes // 16) * 16
        return listed

    def _work(self, parts: Sequence[GatherPart], seq: int, splits: bool, halves: bool = False) -> CopyWork:
        apart = [part for part in parts if self.own(part).data_ptr() != part.x.data_ptr()]
        for part in apart:
            copy_by_kernel(self.own(part), part.x)
        placed = torch.cuda.current_stream().record_event() if apart else None
        epoch, arrivals = self._owner.epoch, self._engines.arrivals()
        return CopyWork(self._owner, seq, self._rank, arrivals, splits, placed, epoch, halves and splits)


def _storages(parts: Sequence[GatherPart]) -> list[Any]:
    """What holds their memory. Not the tensors: the caller may watch for their end, to use the memory again in the
    order of streams, long before the host sees that the copies have ended."""
    return [tensor.untyped_storage() for part in parts for tensor in (part.x, part.out)]


class NvlinkTerms:
    """Terms of sums: rows go into the staging slots of the ranks that sum them, sums are read from there. See
    `collective_base.TermCopies`.

        send    slot[source] of each peer <- rows[peer], behind what the stream has now, or    operation of the copies
                has when those rows are made
        add     the stream waits for all of them; out = sum in ascending rank                  kernel, add_terms.cuh
                shares: also into slot[own rank], from where peers read it
        share   out[peer] <- slot[peer] of each peer                                           operation of the copies

    All are in the slot of the parity of the operation's number, as any operation of the copies: a share comes two or
    four operations after its terms were sent. A slot may be written again two operations later
    (kernels/collective_abi.py): what a peer reads of it belongs to an operation, too, and terms are sent behind the
    stream's sum of those before.

    Args:
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
        self._owner.await_end(sent.seq)
        self._launch(self._engine.add_terms(own, out, sent.slot, shares))

    def share(self, sent: SentTerms, out: torch.Tensor) -> CopyWork:
        assert self._engine.copy_slot(self._engines.seq + 1) == sent.slot, "an odd number of operations later"
        num_bytes = out[0].nbytes
        part = CopyPart(0, out.data_ptr(), sent.slot, num_bytes, num_bytes, slot_stride=self.row_bytes)
        op = CollectiveOp.ALL_REDUCE
        word = signature(op, Algorithm.COPY_PULL, out.dtype, out.nbytes, None)
        seq = self._engines.begin([part], word, False, out, self._enter(), op.value)
        rank, epoch = self._engine.group.rank, self._owner.epoch
        return CopyWork(self._owner, seq, rank, self._engines.arrivals(), True, None, epoch)
