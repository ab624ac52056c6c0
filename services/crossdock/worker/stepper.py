"""One step of one rank: dispatch -> experts -> combine. Knows tensors and the communicator; no queue and no lock.

A rank must never stop in the middle of a step: its peers wait for its rows. So what fails here on its own account
(the experts raise; dispatch refuses its arguments) ends in `Batch.error`, and the step goes on with zeros or without
tokens. Only what the communicator raises about its peers leaves `step` as an exception.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crossdock.common import log
from crossdock.worker.experts import Experts
from crossdock.worker.telemetry import StepRecord
from crossdock.worker.work import Slice
from ep_kernels import ArgumentError, DispatchHandle, DispatchOutput, ExpertMap, MoECommunicator

_log = log.get(__name__)

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x [T, H], topk_ids int32 [T, K], topk_weights float32 [T, K]."""


@dataclass(slots=True)
class Batch:
    """This rank's share of one step.

    Attributes:
        slices: whose rows; in the order of the rows of z.
        z: [T, H] in the communicator's output dtype.
        error: why this rank's own part failed, or empty.
        record: numbers for telemetry.
    """

    slices: Sequence[Slice]
    z: torch.Tensor
    error: str
    record: StepRecord


class Stepper:
    """Steps of one epoch.

    Args:
        comm: of this epoch, GROUPED.
        experts: this rank's, in slot order; None if it has none.
    """

    def __init__(self, comm: MoECommunicator, experts: Experts | None) -> None:
        self._comm, self._experts, config = comm, experts, comm.config
        self._output_dtype = config.resolved_output_dtype
        self._none: Tokens = (
            torch.empty(0, config.hidden_size, dtype=config.dtype),
            torch.empty(0, config.topk, dtype=torch.int32),
            torch.empty(0, config.topk, dtype=torch.float32),
        )
        homes = ExpertMap.contiguous(config.num_experts, comm.size).replicas
        self._home = torch.tensor([copies[0][0] for copies in homes] + [comm.rank])

    def step(self, layer: int, max_tokens: int, slices: Sequence[Slice]) -> Batch:
        """Take one step. Collective.

        Args:
            layer: MoE layer number, equal on all ranks.
            max_tokens: bound of every rank's tokens, equal on all ranks.
            slices: this rank's tokens for it; may be none.

        Raises: TransportError and its kinds.
        """
        tokens = _gather(slices) if slices else self._none
        started_ns = time.monotonic_ns()
        out, handle, error = self._dispatch(tokens, max_tokens)
        dispatched_ns = time.monotonic_ns()
        y, failed = self._compute(layer, out, handle)
        computed_ns = time.monotonic_ns()
        z = self._comm.combine(y, handle)
        combined_ns = time.monotonic_ns()
        record = StepRecord(
            num_tokens=tokens[0].shape[0],
            rows_per_expert=out.counts.clone(),
            remote_rows=self._count_remote_rows(tokens[1]),
            dispatch_ns=dispatched_ns - started_ns,
            experts_ns=computed_ns - dispatched_ns,
            combine_ns=combined_ns - computed_ns,
        )
        return Batch(slices, z, f"layer {layer}: {error or failed}" if error or failed else "", record)

    def _dispatch(self, tokens: Tokens, max_tokens: int) -> tuple[DispatchOutput, DispatchHandle, str]:
        try:
            return *self._comm.dispatch(*tokens, step_tokens=max_tokens), ""
        except ArgumentError as error:  # nothing was sent: the peers still wait for this rank's dispatch
            _log.exception("dispatch refused its arguments")
            return *self._comm.dispatch(*self._none, step_tokens=max_tokens), f"dispatch: {error}"

    def _compute(self, layer: int, out: DispatchOutput, handle: DispatchHandle) -> tuple[torch.Tensor, str]:
        """Expert rows [N, H] and "", or zeros and why the experts raised."""
        y = self._comm.combine_input(handle)
        if self._experts is None or out.offsets is None or not out.tokens.shape[0]:
            return y, ""
        try:
            return self._experts.forward(layer, out.tokens, out.offsets, out.counts, out=y), ""
        except Exception as error:  # whatever it is, the peers are waiting for these rows
            _log.exception("experts failed", layer=layer)
            return y.zero_(), f"experts: {type(error).__name__}: {error}"

    def _count_remote_rows(self, topk_ids: torch.Tensor) -> int:
        """Rows that leave this rank: one per (token, distinct other rank)."""
        if not topk_ids.shape[0]:
            return 0
        ranks = self._home[topk_ids.long()]  # -1 finds the last entry: this rank
        reached = torch.zeros(ranks.shape[0], self._comm.size, dtype=torch.bool).scatter_(1, ranks, True)
        return int(reached.sum()) - int(reached[:, self._comm.rank].sum())


def _gather(slices: Sequence[Slice]) -> Tokens:
    """The rows of all slices, in order."""
    if len(slices) == 1:
        (piece,) = slices
        rows, work = slice(piece.start, piece.stop), piece.work
        return work.x[rows], work.topk_ids[rows], work.topk_weights[rows]
    return (
        torch.cat([piece.work.x[piece.start : piece.stop] for piece in slices]),
        torch.cat([piece.work.topk_ids[piece.start : piece.stop] for piece in slices]),
        torch.cat([piece.work.topk_weights[piece.start : piece.stop] for piece in slices]),
    )
