"""Dispatch and combine as the caller sees them: buffers and handle state around the two native halves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ep_kernels import quant
from ep_kernels.config import MoEConfig
from ep_kernels.errors import HandleError
from ep_kernels.lazy_output import lazy_output
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode

_MODES = (Mode.LL, Mode.HT)
_TOTALS = ("num_rows", "num_dropped", "num_invalid_ids")


@dataclass(slots=True)
class RoutingState:
    """What a handle keeps of a dispatch on this rank. R ranks, M most tokens, W = K for per-expert layouts, else 1.

    Attributes:
        dest: int32 [T, K], places (rank * stride + slot) of this rank's tokens, -1 = none.
        weights: float32 [T, K] of this rank's tokens.
        rows: int32 [R, M, W], row of this rank's output that serves each source's token, -1 = none; first T_s tokens.
        row_weights: float32 [R, M, K], weights of each source's tokens (per-expert layouts), else empty.
        source_tokens: int32 [R], T_s of each source.
        counts, offsets: int32, as in DispatchOutput (offsets also where it has none).
        valid: bool [T].
        totals: rows delivered, rows dropped, invalid ids.
        origin: sequence number of the dispatch that made it; 0 until it has been sent.
        rows_shape: leading shape of the tokens that were handed out.
    """

    dest: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    row_weights: torch.Tensor
    source_tokens: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    valid: torch.Tensor
    totals: tuple[int, int, int]
    origin: int
    rows_shape: tuple[int, ...]

    def native(self, mode: Mode) -> native.Routing:
        """The same, by address."""
        return native.Routing(
            dest=self.dest.data_ptr(),
            weights=self.weights.data_ptr(),
            rows=self.rows.data_ptr(),
            row_weights=self.row_weights.data_ptr(),
            source_tokens=self.source_tokens.data_ptr(),
            origin=self.origin,
            tokens=len(self.dest),
            mode=_MODES.index(mode),
        )

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`."""
        numbers = torch.tensor([*self.totals, self.origin])
        return [
            self.dest, self.weights, self.rows, self.row_weights, self.source_tokens,
            self.counts, self.offsets, self.valid, numbers,
        ]  # fmt: skip

    @classmethod
    def restore(cls, tensors: Sequence[torch.Tensor], rows_shape: tuple[int, ...]) -> RoutingState:
        """What `flatten` was made of."""
        *totals, origin = tensors[-1].tolist()
        values: list[Any] = [*tensors[:-1], tuple(totals), origin, rows_shape]
        return cls(*values)

    def weight_of_rows(self) -> torch.Tensor:
        """float32 in `rows_shape`: each row's weight, 0 past the counts."""
        out = torch.zeros(self.rows_shape)
        for rows, weights, tokens in zip(self.rows, self.row_weights, self.source_tokens.tolist(), strict=True):
            served = rows[:tokens] >= 0
            out.view(-1)[rows[:tokens][served].long()] = weights[:tokens][served]
        return out

    def rows_of_sources(self) -> torch.Tensor:
        """int32 [R], tokens of each source that have a row here."""
        sent = torch.arange(self.rows.shape[1])[None, :] < self.source_tokens[:, None]
        return (sent & (self.rows >= 0).any(-1)).sum(1, dtype=torch.int32)


class OperationHome(Protocol):
    """What an operation needs of the transport that it is of."""

    config: MoEConfig
    geometry: native.Geometry
    epoch: int
    num_dropped: int

    def native(self) -> NativeComm:
        """The native object, kept alive by the caller while it uses it. Raises ClosedError, AbortedError."""

    def next_slot(self, op: int) -> int:
        """Slot of the next dispatch (0) or combine (1)."""

    def ended(self, pending: CpuDispatch | CpuCombine) -> None:
        """The receive half of `pending` runs now; it must not run again, even if it fails."""

    def judge(self, status: int) -> None:
        """Turn a native status into the exception it stands for."""


class CpuDispatch:
    """See `base.PendingDispatch`."""

    def __init__(self, transport: OperationHome, args: DispatchArgs) -> None:
        self._transport, self._args = transport, args
        self._comm = transport.native()
        self._epoch = transport.epoch
        geometry, config = transport.geometry, transport.config
        self.slot = transport.next_slot(0)
        self._buffers = self._comm.buffers[self.slot]
        previous: RoutingState | None = None if args.previous is None else args.previous.state
        self._state = fresh_state(geometry, len(args.topk_ids)) if previous is None else _again(previous, args)
        self._ids, self._weights = self._received_ids(geometry)
        state, scales = self._state, self._buffers.scale_bytes()
        self._op = native.DispatchOp(
            routing=state.native(args.mode),
            x=args.x.data_ptr(),
            scales=_address(args.scales),
            ids=args.topk_ids.data_ptr(),
            weights=args.topk_weights.data_ptr(),
            fresh=previous is None,
            exact_shapes=config.exact_shapes,
            valid=state.valid.data_ptr(),
            tokens=self._buffers.tokens().data_ptr(),
            out_scales=_address(scales),
            out_ids=_address(self._ids),
            out_weights=_address(self._weights),
            counts=state.counts.data_ptr(),
            offsets=state.offsets.data_ptr(),
        )
        if previous is not None:
            self._op.num_rows, self._op.num_dropped, self._op.num_invalid = previous.totals
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None

    def _received_ids(self, geometry: native.Geometry) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._buffers.layout.per_expert:
            return None, None
        ids = torch.empty(geometry.capacity, geometry.topk, dtype=torch.int32)
        return ids, torch.empty(geometry.capacity, geometry.topk)

    def send(self) -> None:
        """The send half."""
        comm = self._comm
        self._transport.judge(comm.lib.cd_dispatch_send(comm.pointer, ctypes.byref(self._op)))
        self._args = None  # type: ignore[assignment]  # x and the rest are staged; the caller may have them back

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""
        lead = self._buffers.lead(0)
        stride = -(-lead[-1] // quant.ROW_PAD) * quant.ROW_PAD
        return self._buffers.tokens()[: lead[0]], self._buffers.scales(lead, stride), self._state.counts

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        """See `base.PendingDispatch`."""
        if self._result is None:
            _same_epoch(self._transport, self._epoch)
            self._transport.native()
            comm = self._comm
            self._transport.ended(self)
            self._transport.judge(comm.lib.cd_dispatch_place(comm.pointer, ctypes.byref(self._op)))
            result = self._finish()  # while rows of other hosts are under way
            self._transport.judge(comm.lib.cd_dispatch_receive(comm.pointer, ctypes.byref(self._op)))
            self._transport.num_dropped += self._op.num_dropped
            self._result = result
        return self._result

    def _finish(self) -> tuple[DispatchOutput, DispatchHandle]:
        op, state, buffers, ids, weights = self._op, self._state, self._buffers, self._ids, self._weights
        lead, packed_stride = buffers.lead(op.num_rows), op.packed_stride
        state.totals = op.num_rows, op.num_dropped, op.num_invalid
        state.origin, state.rows_shape = op.routing.origin, lead

        def field(name: str) -> torch.Tensor | None:
            match name:
                case "tokens":
                    return buffers.tokens()[: lead[0]]
                case "scales":
                    return buffers.scales(lead, packed_stride)
                case "counts" | "valid":
                    return getattr(state, name)  # type: ignore[no-any-return]
                case "offsets":
                    return state.offsets if buffers.layout is Layout.GROUPED else None
                case "topk_ids":
                    return _shaped(ids, lead)
                case "topk_weights":
                    return _shaped(weights, lead)
                case _:
                    return torch.tensor([state.totals[_TOTALS.index(name)]], dtype=torch.int32)

        made = DispatchHandle(0, op.seq, op.routing.tokens, _MODES[op.routing.mode], self._epoch, state, lead)
        return lazy_output(buffers.layout, field), made


class CpuCombine:
    """See `base.PendingCombine`."""

    def __init__(self, transport: OperationHome, args: CombineArgs) -> None:
        self._transport, self._args = transport, args
        self._comm = transport.native()
        self._epoch = transport.epoch
        self._state: RoutingState = args.handle.state
        if args.topk_weights is not None:
            self._state = replace(self._state, weights=args.topk_weights.clone())
        self.slot = transport.next_slot(1)
        self.dispatch_slot = args.handle.seq % transport.geometry.in_flight
        registered = self._comm.buffers[self.dispatch_slot].expert_outputs
        lent = args.y.numel() > 0 and args.y.data_ptr() == registered.data_ptr()
        tokens, topk = self._state.dest.shape
        self._weights = None if args.row_weights is None else torch.empty(tokens, topk)
        self._op = native.CombineOp(
            routing=self._state.native(args.handle.mode),
            y=args.y.data_ptr(),
            row_weights=_address(args.row_weights),
            outputs_slot=self.dispatch_slot if lent else -1,
            apply_weights=args.apply_weights,
            weights_home=_address(self._weights),
        )
        self._z: torch.Tensor | None = None

    def send(self) -> None:
        """The send half."""
        comm = self._comm
        self._transport.judge(comm.lib.cd_combine_send(comm.pointer, ctypes.byref(self._op)))
        self._args = None  # type: ignore[assignment]  # the rows are staged, or lent

    def finish(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The receive half, once; into `out` if it has not run yet."""
        if self._z is None:
            _same_epoch(self._transport, self._epoch)
            self._transport.native()
            config, comm = self._transport.config, self._comm
            shape = (self._op.routing.tokens, config.hidden_size)
            z = torch.empty(shape, dtype=config.resolved_output_dtype) if out is None else out
            self._op.z = z.data_ptr()
            self._transport.ended(self)
            self._transport.judge(comm.lib.cd_combine_receive(comm.pointer, ctypes.byref(self._op)))
            self._z = z
        return self._z

    def wait(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `base.PendingCombine`."""
        z = self.finish(out)
        if out is not None and z is not out:
            z = out.copy_(z)
        return z, self._weights


def fresh_state(geometry: native.Geometry, tokens: int) -> RoutingState:
    """Room for the routing of a dispatch of that many tokens."""
    topk, most = geometry.topk, geometry.max_tokens
    per_expert = geometry.layout < native.layout_code(Layout.RANK_MAJOR)
    groups = geometry.local_experts if per_expert else geometry.ranks
    return RoutingState(
        dest=torch.empty(tokens, topk, dtype=torch.int32),
        weights=torch.empty(tokens, topk),
        rows=torch.empty(geometry.ranks, most, topk if per_expert else 1, dtype=torch.int32),
        row_weights=torch.empty((geometry.ranks, most, topk) if per_expert else (0,)),
        source_tokens=torch.empty(geometry.ranks, dtype=torch.int32),
        counts=torch.empty(groups, dtype=torch.int32),
        offsets=torch.empty(groups + 1, dtype=torch.int32),
        valid=torch.empty(tokens, dtype=torch.bool),
        totals=(0, 0, 0),
        origin=0,
        rows_shape=(),
    )


def _again(previous: RoutingState, args: DispatchArgs) -> RoutingState:
    """The same routing with new weights: what the receive half writes again gets memory of its own."""
    return RoutingState(
        dest=previous.dest,
        weights=torch.empty_like(previous.weights),
        rows=previous.rows,
        row_weights=torch.empty_like(previous.row_weights),
        source_tokens=torch.empty_like(previous.source_tokens),
        counts=previous.counts,
        offsets=previous.offsets,
        valid=previous.valid,
        totals=previous.totals,
        origin=previous.origin,
        rows_shape=previous.rows_shape,
    )


def _same_epoch(transport: OperationHome, epoch: int) -> None:
    if transport.epoch != epoch:
        raise HandleError(f"wait: begun in epoch {epoch}, the group is in epoch {transport.epoch}")


def _shaped(values: torch.Tensor | None, lead: tuple[int, ...]) -> torch.Tensor | None:
    if values is None:
        return None
    return values[: lead[0]] if len(lead) == 1 else values.view(*lead, values.shape[1])


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
