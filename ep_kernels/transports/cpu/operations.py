"""Dispatch and combine as the caller sees them: a record that is filled once, a native call that runs both phases or
one of them, and what it has delivered."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from ep_kernels import checks, quant
from ep_kernels.config import MoEConfig
from ep_kernels.errors import HandleError
from ep_kernels.lazy_output import lazy_output, recycle
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm, SlotBuffers
from ep_kernels.transports.cpu.cpu_routing import CPU, FreshState, RoutingParts, RoutingState, again
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode

_LL = Mode.LL
_TOTALS = ("num_rows", "num_dropped", "num_invalid_ids")


class OperationContext(Protocol):
    """What an operation needs of the transport that it is of."""

    config: MoEConfig
    geometry: native.Geometry
    epoch: int
    num_dropped: int

    def native(self) -> NativeComm:
        """The native object, kept alive by the caller while it uses it. Raises ClosedError, AbortedError."""

    def ended(self, pending: CpuDispatch | CpuCombine) -> None:
        """The receive half of `pending` runs now; it must not run again, even if it fails."""

    def judge(self, status: int) -> None:
        """Turn a native status into the exception it stands for."""


class CpuDispatch:
    """See `base.PendingDispatch`. Unless `args.at_once` its rows are sent when it is made."""

    __slots__ = (
        "_args", "_buffers", "_comm", "_epoch", "_op", "_rank_wise", "_result", "_state", "_step", "_transport", "slot",
    )  # fmt: skip

    def __init__(self, transport: OperationContext, comm: NativeComm, args: DispatchArgs) -> None:
        self._transport, self._comm, self._epoch = transport, comm, transport.epoch
        self._args: DispatchArgs | None = args
        self.slot = slot = comm.next[0] % len(comm.buffers)
        self._buffers = buffers = comm.buffers[slot]
        previous, (tokens, _), ids, mode = args.previous, args.x.shape, args.topk_ids, args.mode
        self._step = tokens, mode
        self._state = state = FreshState(comm.places, tokens) if previous is None else again(previous.state)
        scales = 0 if args.scales is None else args.scales.data_ptr()
        *routing, valid, counts, offsets = state.addresses()
        self._op = native.dispatch_op(
            (*routing, state.origin), (tokens, mode is not _LL),
            (args.x.data_ptr(), scales, ids.data_ptr(), args.topk_weights.data_ptr()),
            (previous is None, buffers.exact_shapes, ids.dtype is torch.int64),
            (valid, *buffers.addresses(), 0, 0, counts, offsets), state.totals,
        )  # fmt: skip
        self._rank_wise: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None
        if not args.at_once:
            self._run(native.SEND)
            self._args = None  # x and the rest are staged; the caller may have them back

    def _run(self, phases: int) -> None:
        if phases & native.SEND:
            recycle(self._buffers.tokens())
        comm = self._comm
        status = comm.lib.cd_dispatch(comm.pointer, ctypes.byref(self._op), phases)
        if status:
            self._transport.judge(status)

    def _make_rank_wise(self) -> None:
        """Room for what rank-wise layouts say of a row: ids and weights."""
        geometry, config = self._transport.geometry, self._transport.config
        ids = torch.empty(geometry.capacity, geometry.topk, dtype=torch.int32, device=CPU)
        weights = torch.empty(geometry.capacity, geometry.topk, dtype=torch.float32, device=CPU)
        if config.absent_id is not None and not config.exact_shapes:
            ids.fill_(config.absent_id), weights.zero_()
        self._op.out_ids, self._op.out_weights = ids.data_ptr(), weights.data_ptr()
        self._rank_wise = ids, weights

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        lead = self._buffers.lead(0)
        stride = -(-lead[-1] // quant.ROW_PAD) * quant.ROW_PAD
        return self._buffers.tokens()[: lead[0]], self._buffers.scales(lead, stride), self._state.counts

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        if self._result is None:
            if not self._buffers.per_expert:
                self._make_rank_wise()
            if self._args is not None:
                self._run(native.BOTH)
            else:
                _same_epoch(self._transport, self._epoch)
                self._transport.native()
                self._transport.ended(self)
                self._run(native.RECEIVE)
            self._result = self._delivered()
        return self._result

    def _delivered(self) -> tuple[DispatchOutput, DispatchHandle]:
        op, state, buffers = self._op, self._state, self._buffers
        seq, num_rows, num_dropped = op.seq, op.num_rows, op.num_dropped
        self._transport.num_dropped += num_dropped
        state.totals, state.origin = (num_rows, num_dropped, op.num_invalid), state.origin or seq
        lead = buffers.lead(num_rows)
        made = DispatchHandle(0, seq, *self._step, self._epoch, state, lead)
        return lazy_output(_fields(buffers, state, lead, op.packed_stride, self._rank_wise)), made


def _fields(
    buffers: SlotBuffers,
    state: RoutingParts,
    lead: tuple[int, ...],
    packed_stride: int,
    rank_wise: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Callable[[str], Layout | torch.Tensor | None]:
    """Makes the fields of a DispatchOutput of leading shape `lead`; rank_wise: ids and weights of rows."""

    def field(name: str) -> Layout | torch.Tensor | None:
        match name:
            case "layout":
                return buffers.layout
            case "tokens":
                return buffers.tokens()[: lead[0]]
            case "scales":
                return buffers.scales(lead, packed_stride)
            case "counts" | "valid":
                return getattr(state, name)  # type: ignore[no-any-return]
            case "offsets":
                return state.offsets if buffers.layout is Layout.GROUPED else None
            case "topk_ids" | "topk_weights":
                return _shaped(rank_wise[name == "topk_weights"], lead)
            case _:
                return torch.tensor([state.totals[_TOTALS.index(name)]], dtype=torch.int32, device=CPU)

    return field


class CpuCombine:
    """See `base.PendingCombine`. Unless `args.at_once` its rows are sent when it is made."""

    __slots__ = ("_args", "_comm", "_epoch", "_op", "_state", "_transport", "_weights", "_z", "dispatch_slot", "slot")

    def __init__(self, transport: OperationContext, comm: NativeComm, args: CombineArgs) -> None:
        self._transport, self._comm, self._epoch = transport, comm, transport.epoch
        self._args: CombineArgs | None = args
        handle, y, row_weights, buffers = args.handle, args.y, args.row_weights, comm.buffers
        state: RoutingState = handle.state
        if args.topk_weights is not None:
            state = state.weighted(args.topk_weights if args.at_once else args.topk_weights.clone())
        self._state = state
        self.slot = comm.next[1] % len(buffers)
        self.dispatch_slot = slot = handle.seq % len(buffers)
        lent = handle.rows_shape[0] > 0 and y.data_ptr() == buffers[slot].expert_outputs.data_ptr()
        tokens, weights, of_rows, of_tokens = handle.num_tokens, None, 0, 0
        if row_weights is not None:
            weights = torch.empty(tokens, transport.config.topk, dtype=torch.float32, device=CPU)
            of_rows, of_tokens = row_weights.data_ptr(), weights.data_ptr()
        self._weights = weights
        *routing, _, _, _ = state.addresses()
        self._op = native.combine_op(
            (*routing, state.origin), (tokens, handle.mode is not _LL),
            (y.data_ptr(), of_rows), (slot if lent else -1, args.apply_weights), (0, of_tokens, 0),
        )  # fmt: skip
        self._z: torch.Tensor | None = None
        if not args.at_once:
            checks.made(torch.empty(0, dtype=torch.uint8, device=CPU))  # z will have memory
            comm.collecting[self.slot] = self._op, state
            self._run(native.SEND)
            self._args = None  # the rows are staged, or lent

    def _run(self, phases: int) -> None:
        comm = self._comm
        status = comm.lib.cd_combine(comm.pointer, ctypes.byref(self._op), phases)
        if status:
            self._transport.judge(status)

    def finish(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """What is left of it, once; into `out` if it has not run yet."""
        if self._z is None:
            transport, op, z = self._transport, self._op, out
            if z is None:
                hidden, dtype = self._comm.outputs
                z = checks.made(torch.empty(op.routing.tokens, hidden, dtype=dtype, device=CPU))
            op.z, op.z_type = z.data_ptr(), native.type_code(z.dtype)
            if self._args is not None:
                self._run(native.BOTH)
            else:
                _same_epoch(transport, self._epoch)
                transport.native()
                transport.ended(self)
                self._run(native.RECEIVE)
            self._z = z
        return self._z

    def wait(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        z = self.finish(out)
        if out is not None and z is not out:
            z = out.copy_(z)
        return z, self._weights


def _same_epoch(transport: OperationContext, epoch: int) -> None:
    if transport.epoch != epoch:
        raise HandleError(f"wait: begun in epoch {epoch}, the group is in epoch {transport.epoch}")


def _shaped(values: torch.Tensor | None, lead: tuple[int, ...]) -> torch.Tensor | None:
    if values is None:
        return None
    return values[: lead[0]] if len(lead) == 1 else values.view(*lead, values.shape[1])
