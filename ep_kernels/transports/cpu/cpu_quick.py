"""Plain operations by one native call each, without what only other operations need: halves that are apart, scales,
a routing that is used again, rows of other hosts. Where anything is unlike that, the operation takes the long way."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

from ep_kernels import checks
from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import ArgumentError, HandleError
from ep_kernels.lazy_output import lazy_output, recycle
from ep_kernels.transports.base import Delivered
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm
from ep_kernels.transports.cpu.cpu_routing import CPU, FreshState
from ep_kernels.transports.cpu.cpu_step import CpuStep
from ep_kernels.transports.cpu.operations import OperationContext, delivered_field
from ep_kernels.types import DispatchHandle, Layout, Mode


class QuickContext(OperationContext, Protocol):
    """What quick calls need of the transport that they are of."""

    comm: NativeComm | None
    reason: str | None

    def is_idle(self) -> bool:
        """Whether no operation has begun whose receive half is still to come."""


class CpuQuickCalls:
    """See `base.QuickCalls`. For GROUPED payloads without scales, on one host.

    Args:
        transport: whose it is.
        number: of the communicator.
        ll_max_tokens: the mode of a step of more tokens is HT, where `mode` is AUTO.
    """

    def __init__(self, transport: QuickContext, number: int, ll_max_tokens: int) -> None:
        config = transport.config
        self._transport, self._number, self._ll_max_tokens = transport, number, ll_max_tokens
        self._hidden, self._topk, self._most = config.hidden_size, config.topk, config.max_tokens_per_rank
        self._dtype, self._out_dtype = config.dtype, config.resolved_output_dtype
        rounded = (config.dtype,) if checks.rounds_sums(config, "cpu") else ()
        self._z_dtypes = (self._out_dtype, *rounded)
        self._config = config
        num_local = config.resolved_expert_map.num_local_experts(config.group.rank)
        self._keeps_steps = not may_overflow(config, num_local)  # so none raises CapacityError
        self._steps: dict[int, CpuStep] = {}
        self._step: CpuStep | None = None

    def _comm(self) -> NativeComm | None:
        transport = self._transport
        return transport.comm if transport.reason is None and transport.is_idle() else None

    def dispatch(
        self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any, step_tokens: int | None = None
    ) -> Delivered | None:
        """See `base.QuickCalls`."""
        comm, transport = self._comm(), self._transport
        if comm is None or previous is not None or not _is_plain(x, self._dtype, self._hidden):
            return None
        rows = x.shape[0]
        most = self._most if step_tokens is None else step_tokens
        if not self._are_of(rows, most, topk_ids, topk_weights):
            return None
        mode = checks.resolve_mode(self._config, most, self._ll_max_tokens)
        buffers, state = comm.buffers[transport.next_slot(0)], FreshState(comm.places, rows)
        *routing, valid, counts, offsets = state.addresses()
        tokens = buffers.tokens()
        op = native.dispatch_op(
            (*routing, 0), (rows, mode is not Mode.LL), (x.data_ptr(), 0, topk_ids.data_ptr(), topk_weights.data_ptr()),
            (1, self._config.exact_shapes), (valid, tokens.data_ptr(), 0, 0, 0, counts, offsets),
        )  # fmt: skip
        recycle(tokens)
        transport.judge(comm.lib.cd_dispatch(comm.pointer, ctypes.byref(op)))
        transport.num_dropped += op.num_dropped
        state.totals, state.origin = (op.num_rows, op.num_dropped, op.num_invalid), op.routing.origin
        lead = buffers.lead(op.num_rows)
        handle = DispatchHandle(self._number, op.seq, rows, mode, transport.epoch, state, lead, topk_ids, topk_weights)
        return lazy_output(delivered_field(buffers, state, lead)), handle, op.num_dropped

    def _are_of(self, rows: int, most: Any, topk_ids: Any, topk_weights: Any) -> bool:
        """Whether a dispatch of `rows` tokens takes them as they are."""
        return (
            type(most) is int
            and rows <= most <= self._most
            and _is_plain(topk_ids, torch.int32, self._topk, rows)
            and _is_plain(topk_weights, torch.float32, self._topk, rows)
        )

    def begin_step(self, x: Any, topk_ids: Any, topk_weights: Any, step_tokens: int) -> CpuStep | None:
        """See `base.QuickCalls`."""
        comm = self._comm()  # None also with a request under way
        if comm is None or not self._keeps_steps or torch.is_grad_enabled():  # autograd may have saved the former rows
            return None
        if not _is_plain(x, self._dtype, self._hidden):
            return None
        rows = x.shape[0]
        if not self._are_of(rows, step_tokens, topk_ids, topk_weights):
            return None
        slot: int = comm.lib.cd_next(comm.pointer, 0) % len(comm.buffers)
        step = self._steps.get(slot)
        if step is None:
            with torch.inference_mode(False):
                step = self._steps[slot] = CpuStep(comm, slot, self._config.exact_shapes)
        mode = checks.resolve_mode(self._config, step_tokens, self._ll_max_tokens)
        self._step = step
        status = step.dispatch(rows, mode is not Mode.LL, x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr())
        if status:
            self._transport.judge(status)
        return step

    def end_step(self, step: Any, out: Any) -> None:
        """See `base.QuickCalls`."""
        if type(step) is not CpuStep or step is not self._step:
            raise HandleError("step: expected the one that was begun last and has not ended")
        if not self._is_room(out, step.num_tokens):
            checks.tensor("out", out, (step.num_tokens, self._hidden), self._z_dtypes, "cpu")
        if step.shares(out):
            raise ArgumentError("out", "memory apart from y", "bytes in common")
        self._step = None
        status = step.combine(out.data_ptr(), native.type_code(out.dtype))
        if status:
            self._transport.judge(status)

    def close(self) -> None:
        """See `base.QuickCalls`."""
        self._steps.clear()
        self._step = None

    def combine(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> torch.Tensor | None:
        """See `base.QuickCalls`."""
        comm, transport = self._comm(), self._transport
        if comm is None or topk_weights is not None or type(handle) is not DispatchHandle:
            return None
        z: torch.Tensor
        state, rows = handle.state, handle.num_tokens
        if handle.owner != self._number or handle.epoch != transport.epoch or type(state) is tuple:
            return None
        if not (_is_plain(y, self._out_dtype, self._hidden) and (len(y),) == handle.rows_shape):
            return None
        if out is None:
            z = checks.made(torch.empty(rows, self._hidden, dtype=self._out_dtype, device=CPU))
        elif self._is_room(out, rows) and not checks.share_memory(y, out):
            z = out
        else:
            return None
        slot = handle.seq % len(comm.buffers)
        lent = len(y) > 0 and y.data_ptr() == comm.buffers[slot].expert_outputs.data_ptr()
        *routing, _, _, _ = state.addresses()
        op = native.combine_op(
            (*routing, state.origin), (rows, handle.mode is not Mode.LL), (y.data_ptr(), 0), (slot if lent else -1, 1),
            (z.data_ptr(), 0, native.type_code(z.dtype)),
        )  # fmt: skip
        transport.judge(comm.lib.cd_combine(comm.pointer, ctypes.byref(op)))
        return z

    def _is_room(self, out: Any, rows: int) -> bool:
        dtype = out.dtype if type(out) is torch.Tensor else None
        return dtype in self._z_dtypes and _is_plain(out, dtype, self._hidden, rows)

    def dispatch_async(self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any) -> None:
        """See `base.QuickCalls`: its halves are apart."""

    def combine_async(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> None:
        """See `base.QuickCalls`: its halves are apart."""


def serves(config: MoEConfig) -> bool:
    """Whether there are quick calls for it."""
    plain = config.network is None and not config.quantize and not config.scale_columns
    return plain and config.resolved_layout is Layout.GROUPED


def _is_plain(tensor: Any, dtype: torch.dtype | None, columns: int, rows: int | None = None) -> bool:
    """Whether `checks.tensor` would take it; rows: None: whatever there are."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.dim() != 2:
        return False
    found = tensor.shape
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and found[1] == columns
        and (rows is None or found[0] == rows)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.data_ptr() != 0 or not found[0])
    )
