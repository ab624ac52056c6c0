"""Dispatch and combine as the caller sees them: buffers and handle state around the two native halves."""

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

_MODES = (Mode.LL, Mode.HT)
_TOTALS = ("num_rows", "num_dropped", "num_invalid_ids")


class OperationContext(Protocol):
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

    def __init__(self, transport: OperationContext, args: DispatchArgs) -> None:
        self._transport, self._args = transport, args
        self._comm = transport.native()
        self._epoch = transport.epoch
        config = transport.config
        self.slot = transport.next_slot(0)
        self._buffers = self._comm.buffers[self.slot]
        previous: RoutingState | None = None if args.previous is None else args.previous.state
        tokens = args.topk_ids.shape[0]
        self._state = FreshState(self._comm.places, tokens) if previous is None else again(previous)
        state, scales = self._state, self._buffers.scale_bytes()
        *routing, valid, counts, offsets = state.addresses()
        self._op = native.dispatch_op(
            (*routing, state.origin), (tokens, _MODES.index(args.mode)),
            (args.x.data_ptr(), _address(args.scales), args.topk_ids.data_ptr(), args.topk_weights.data_ptr()),
            (previous is None, config.exact_shapes),
            (valid, self._buffers.tokens().data_ptr(), _address(scales), 0, 0, counts, offsets),
        )  # fmt: skip
        if previous is not None:
            self._op.num_rows, self._op.num_dropped, self._op.num_invalid = previous.totals
        self._ids: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None

    def _make_ids(self) -> None:
        """Room for what rank-wise layouts say of a row, made while routes are under way."""
        if self._buffers.layout.per_expert:
            return
        geometry, config = self._transport.geometry, self._transport.config
        self._ids = torch.empty(geometry.capacity, geometry.topk, dtype=torch.int32, device=CPU)
        self._weights = torch.empty(geometry.capacity, geometry.topk, dtype=torch.float32, device=CPU)
        if config.absent_id is not None and not config.exact_shapes:
            self._ids.fill_(config.absent_id), self._weights.zero_()
        self._op.out_ids, self._op.out_weights = self._ids.data_ptr(), self._weights.data_ptr()

    def send(self) -> None:
        """The send half."""
        comm = self._comm
        self._transport.judge(comm.lib.cd_dispatch_send(comm.pointer, ctypes.byref(self._op)))
        self._args = None  # type: ignore[assignment]  # x and the rest are staged; the caller may have them back
        recycle(self._buffers.tokens())

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
            self._make_ids()
            self._transport.ended(self)
            self._transport.judge(comm.lib.cd_dispatch_place(comm.pointer, ctypes.byref(self._op)))
            result = self._finish()  # while rows of other hosts are under way
            self._transport.judge(comm.lib.cd_dispatch_receive(comm.pointer, ctypes.byref(self._op)))
            self._transport.num_dropped += self._op.num_dropped
            self._result = result
        return self._result

    def _finish(self) -> tuple[DispatchOutput, DispatchHandle]:
        op, state = self._op, self._state
        lead = self._buffers.lead(op.num_rows)
        state.totals = op.num_rows, op.num_dropped, op.num_invalid
        state.origin = op.routing.origin
        made = DispatchHandle(0, op.seq, op.routing.tokens, _MODES[op.routing.mode], self._epoch, state, lead)
        rank_wise = self._ids, self._weights
        return lazy_output(delivered_field(self._buffers, state, lead, op.packed_stride, rank_wise)), made


def delivered_field(
    buffers: SlotBuffers,
    state: RoutingParts,
    lead: tuple[int, ...],
    packed_stride: int = 0,
    rank_wise: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
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
    """See `base.PendingCombine`."""

    def __init__(self, transport: OperationContext, args: CombineArgs) -> None:
        self._transport, self._args = transport, args
        self._comm = transport.native()
        self._epoch = transport.epoch
        self._state: RoutingState = args.handle.state
        if args.topk_weights is not None:
            self._state = self._state.weighted(args.topk_weights.clone())
        self.slot = transport.next_slot(1)
        self.dispatch_slot = args.handle.seq % transport.geometry.in_flight
        registered = self._comm.buffers[self.dispatch_slot].expert_outputs
        lent = args.y.numel() > 0 and args.y.data_ptr() == registered.data_ptr()
        tokens, topk = args.handle.num_tokens, int(transport.geometry.topk)
        checks.made(torch.empty(0, dtype=torch.uint8, device=CPU))  # z will have memory
        self._weights = None if args.row_weights is None else torch.empty(tokens, topk, dtype=torch.float32, device=CPU)
        *routing, _, _, _ = self._state.addresses()
        self._op = native.combine_op(
            (*routing, self._state.origin), (tokens, _MODES.index(args.handle.mode)),
            (args.y.data_ptr(), _address(args.row_weights)), (self.dispatch_slot if lent else -1, args.apply_weights),
            (0, _address(self._weights), 0),
        )  # fmt: skip
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
            z = torch.empty(shape, dtype=config.resolved_output_dtype, device=CPU) if out is None else out
            self._op.z, self._op.z_type = z.data_ptr(), native.type_code(z.dtype)
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


def _same_epoch(transport: OperationContext, epoch: int) -> None:
    if transport.epoch != epoch:
        raise HandleError(f"wait: begun in epoch {epoch}, the group is in epoch {transport.epoch}")


def _shaped(values: torch.Tensor | None, lead: tuple[int, ...]) -> torch.Tensor | None:
    if values is None:
        return None
    return values[: lead[0]] if len(lead) == 1 else values.view(*lead, values.shape[1])


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
