"""One step of one rank: dispatch -> experts -> combine. Uses tensors and the communicator; has no queue and no lock.

A rank must never stop in the middle of a step, because its peers wait for its rows. So a local failure (the experts
raise; dispatch refuses its arguments) is stored in `Batch.error`, and the step continues with NaN or without tokens.
NaN is what a sum of it becomes, so a token without NaN owes nothing to a rank that failed, and is right.
Only errors of the communicator about its peers, and a lost GPU, leave `step` as exceptions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from crossdock.common import log
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.experts.expert_tables import ExpertTables
from crossdock.worker.steps.device_stream import DeviceStream
from crossdock.worker.steps.work import Slice
from crossdock.worker.telemetry.worker_telemetry import StepRecord
from ep_kernels import ArgumentError, DispatchHandle, DispatchOutput, ExpertMap, MoECommunicator, checks

_log = log.get(__name__)

Tokens = Sequence[torch.Tensor]
"""x [T, H], topk_ids int32 [T, K], topk_weights float32 [T, K]."""


@dataclass(slots=True)
class Batch:
    """This rank's share of one step.

    Attributes:
        layer, max_tokens: of the step, equal on all ranks.
        slices: of the requests, in the order of the rows of z.
        topk_ids: of its tokens: slots, int32 pieces [t, K], as bytes: a request's may be others after its answer.
        z: [T, H] in host memory; of a CPU: valid until the next step, or where a request wants its rows.
        rows_per_expert: int32 [L] in host memory; of a CPU: valid until the next step.
        phases_ns: of dispatch, experts, combine.
        error: of this rank's experts, or empty.
        unconfirmed: a rank may have failed in it: this one, or one whose rows are NaN.
        start_ns: monotonic time at which dispatch began.
    """

    layer: int
    max_tokens: int
    slices: Sequence[Slice]
    topk_ids: Sequence[bytes]
    z: torch.Tensor
    rows_per_expert: torch.Tensor
    phases_ns: tuple[int, int, int]
    error: str
    unconfirmed: bool
    start_ns: int


class Stepper:
    """Steps of one epoch. Make and use it in one thread.

    Args:
        comm: of this epoch, GROUPED.
        experts: of this rank, in slot order; None if it has no slots.
        stream: of the communicator's device; entered.
        tables: expert of each slot; None: slot and expert numbers are equal.
        queued: called when a GPU has all work of a step, and this thread has only to wait for it.
    """

    def __init__(
        self,
        comm: MoECommunicator,
        experts: ExpertMLPs | None,
        stream: DeviceStream,
        tables: ExpertTables | None = None,
        queued: Callable[[], None] | None = None,
    ) -> None:
        self._tables, self._queued = tables, queued
        self._comm, self._experts, config = comm, experts, comm.config
        self._rank, self._hidden_size, self._rows_per_token = comm.rank, config.hidden_size, comm.size * config.topk
        self._output_dtype = config.resolved_output_dtype
        self._rounds = checks.rounds_sums(config, stream.device.type)
        self._stream = stream
        self._none: Tokens = (
            torch.empty(0, config.hidden_size, dtype=config.dtype, device="cpu"),
            torch.empty(0, config.topk, dtype=torch.int32, device="cpu"),
            torch.empty(0, config.topk, dtype=torch.float32, device="cpu"),
        )
        self._wire_bytes: dict[int, tuple[int, int]] = {}
        self._none_on_device = [part.to(stream.device) for part in self._none]
        self._no_inputs = comm.step_inputs(*self._none_on_device)
        owners = ExpertMap.contiguous(config.num_experts, comm.size).replicas
        self._rank_of_slot = np.array([copies[0][0] for copies in owners] + [comm.rank])

    def step(self, layer: int, max_tokens: int, slices: Sequence[Slice]) -> Batch:
        """Take one step; returns when its rows are in host memory. Collective.

        Args:
            layer: MoE layer number, equal on all ranks.
            max_tokens: upper bound of tokens per rank, equal on all ranks.
            slices: this rank's tokens; may be empty.

        Raises: TransportError and its kinds.
        """
        # One whole request, or none: the step in kept memory.
        if self._rounds and (not slices or (len(slices) == 1 and slices[0].is_whole)):
            batch = self._kept_step(layer, max_tokens, slices)
            if batch is not None:
                return batch
        # Rows of all requests, ids as expert slots.
        stream, parts = self._stream, _parts(slices) or [[part] for part in self._none]
        parts[1] = self._slots(layer, parts[1])
        if len(parts[0]) > 1 and stream.device.type == "cpu":  # joined where dispatch reads them
            rows = self._comm.dispatch_input(sum(map(len, parts[0])))
            parts[0] = [torch.cat(parts[0], out=rows)]
        # Dispatch, experts, combine, on the step's stream.
        start_ns = time.monotonic_ns()
        with stream.running():
            out, handle, error = self._dispatch(stream.copy_in(parts), max_tokens)
            stream.mark()
            y, failed = self._compute(layer, max_tokens, out, handle)
            stream.mark()
            stream.copy_out(self._comm.combine(y, handle, out=self._output(slices, handle.num_tokens)), out.counts)
            if self._queued is not None and stream.device.type == "cuda":
                self._queued()
            result = stream.wait()
        # Errors of the device, and whether another rank may have sent NaN.
        if stream.device.type == "cuda":  # on a CPU each call raises its own errors
            self._comm.check()
        why = f"layer {layer}: {error or failed}" if error or failed else ""
        unconfirmed = bool(why) or any(map(math.isnan, _first_column(slices, result.z).tolist()))
        told = list(map(_bytes_of, parts[1]))
        return Batch(
            layer, max_tokens, slices, told, result.z, result.rows_per_expert, result.phases_ns, why, unconfirmed,
            start_ns,
        )  # fmt: skip

    def _kept_step(self, layer: int, max_tokens: int, slices: Sequence[Slice]) -> Batch | None:
        """The step of at most one request on a CPU, its sums written where it wants them. None: it has not begun, and
        takes the long way."""
        # The request's tensors, ids as expert slots.
        x, own_ids, weights = slices[0].tokens() if slices else self._none
        route = self._tables.route(layer) if self._tables is not None else None
        ids = route.slots(own_ids, self._rank) if route is not None else own_ids
        kept = slices[0].work.kept if slices and ids is own_ids else None
        told = bytes(kept.ids_bytes) if kept is not None else _bytes_of(ids) if slices else b""
        z, start_ns = self._own_output(slices), time.monotonic_ns()  # nothing that may fail while peers wait
        # Dispatch.
        inputs = kept.inputs if kept is not None else None if slices else self._no_inputs
        if inputs is None or inputs.owner != self._no_inputs.owner:
            inputs = self._comm.step_inputs(x, ids, weights)
            if kept is not None:
                kept.inputs = inputs
        step = self._comm.begin_step(inputs, max_tokens)
        if step is None:
            return None
        sent_ns = time.monotonic_ns()
        # Experts, into the memory that combine reads.
        why, num_rows = "", step.tokens.shape[0]
        if num_rows and self._experts is not None:
            most_rows = min(num_rows, self._rows_per_token * max_tokens)
            try:
                self._experts.forward(layer, step.tokens, step.offsets, step.counts, out=step.y, num_rows=most_rows)
            except Exception as error:  # the peers wait for these rows in any case
                _log.exception("experts failed", layer=layer)
                step.y.fill_(torch.nan)
                why = f"layer {layer}: experts: {type(error).__name__}: {error}"
        # Combine, and whether another rank may have sent NaN.
        computed_ns = time.monotonic_ns()
        self._comm.end_step(step, z)
        phases_ns = sent_ns - start_ns, computed_ns - sent_ns, time.monotonic_ns() - computed_ns
        unconfirmed = bool(why)
        if slices and not why:
            unconfirmed = any(map(math.isnan, _first_column(slices, z).tolist()))
        return Batch(layer, max_tokens, slices, (told,), z, step.counts, phases_ns, why, unconfirmed, start_ns)

    def _own_output(self, slices: Sequence[Slice]) -> torch.Tensor:
        """The y of at most one request."""
        if not slices:
            return self._none[0]
        work = slices[0].work
        work.y = torch.empty_like(work.x) if work.y is None else work.y
        return work.y

    def record_of(self, batch: Batch) -> StepRecord:
        """What telemetry counts of a step; before the next one."""
        layer, max_tokens = batch.layer, batch.max_tokens
        held = self._tables.held(layer) if self._tables is not None else None
        exemplar, num_tokens = None, 0
        for piece in batch.slices:
            num_tokens += piece.stop - piece.start
            if exemplar is None and piece.work.trace is not None:
                exemplar = piece.work.trace.exemplar
        if max_tokens not in self._wire_bytes:
            self._wire_bytes[max_tokens] = self._comm.wire_bytes(max_tokens)
        rows = batch.rows_per_expert.numpy().tobytes()
        counts = num_tokens, rows, batch.topk_ids, self._count_remote_rows
        return StepRecord(*counts, *batch.phases_ns, layer, held, exemplar, self._wire_bytes[max_tokens])

    def _output(self, slices: Sequence[Slice], num_tokens: int) -> torch.Tensor | None:
        """Where combine writes z [T, H]; of a request that has the step alone: to where its rows are wanted. None:
        anywhere."""
        if len(slices) == 1 and num_tokens and slices[0].is_whole and self._rounds:
            return self._own_output(slices)
        return self._stream.output(num_tokens, self._hidden_size, self._output_dtype)

    def _slots(self, layer: int, ids: list[torch.Tensor]) -> list[torch.Tensor]:
        route = self._tables.route(layer) if self._tables is not None else None
        if route is None:
            return ids
        return [route.slots(torch.cat(ids) if len(ids) > 1 else ids[0], self._rank)]

    def _dispatch(self, tokens: Tokens, max_tokens: int) -> tuple[DispatchOutput, DispatchHandle, str]:
        x, topk_ids, topk_weights = tokens
        try:
            return *self._comm.dispatch(x, topk_ids, topk_weights, step_tokens=max_tokens), ""
        except ArgumentError as error:  # nothing was sent, and the peers wait for this rank's dispatch
            _log.exception("dispatch refused its arguments")
            x, topk_ids, topk_weights = self._none_on_device
            return *self._comm.dispatch(x, topk_ids, topk_weights, step_tokens=max_tokens), f"dispatch: {error}"

    def _compute(
        self, layer: int, max_tokens: int, out: DispatchOutput, handle: DispatchHandle
    ) -> tuple[torch.Tensor, str]:
        """Expert rows [N, H] and "", or NaN and the error of the experts."""
        experts, comm = self._experts, self._comm
        tokens, offsets = out.tokens, out.offsets
        if experts is None or offsets is None or not len(tokens):
            return comm.combine_input(handle), ""
        # On a GPU combine reads rows anywhere; on a CPU rows made in its buffer save a copy.
        made_in_place = self._stream.device.type == "cuda" and experts.output_dtype is self._output_dtype
        y = None if made_in_place else comm.combine_input(handle)
        most_rows = min(len(tokens), self._rows_per_token * max_tokens)
        try:
            return experts.forward(layer, tokens, offsets, out.counts, out=y, num_rows=most_rows), ""
        except Exception as error:  # the peers wait for these rows in any case
            _log.exception("experts failed", layer=layer)
            rows = comm.combine_input(handle) if y is None else y
            return rows.fill_(torch.nan), f"experts: {type(error).__name__}: {error}"

    def _count_remote_rows(self, topk_ids: Sequence[bytes]) -> int:
        """Rows that leave this rank for int32 pieces topk_ids [t, K]: one per (token, distinct other rank)."""
        ids = np.frombuffer(b"".join(topk_ids), np.int32).reshape(-1, self._none[1].shape[1])
        ranks = self._rank_of_slot[ids]  # -1 finds the last entry: this rank
        reached = np.zeros((len(ranks), self._comm.size), bool)
        np.put_along_axis(reached, ranks, True, 1)
        return int(reached.sum()) - int(reached[:, self._comm.rank].sum())


def _bytes_of(ids: torch.Tensor) -> bytes:
    return ids.numpy().tobytes()


def _parts(slices: Sequence[Slice]) -> list[list[torch.Tensor]]:
    """The rows of all slices, in order: pieces of x, of topk_ids, of topk_weights. Empty without slices."""
    if len(slices) == 1:
        x, ids, weights = slices[0].tokens()
        return [[x], [ids], [weights]]
    rows = [piece.tokens() for piece in slices]
    return [list(part) for part in zip(*rows, strict=True)]


def _first_column(slices: Sequence[Slice], z: torch.Tensor) -> torch.Tensor:
    """z [:, 0]; a view that a request has of it is there already."""
    work = slices[0].work if len(slices) == 1 else None
    return work.kept.first_column if work is not None and work.kept is not None and z is work.y else z[:, 0]
