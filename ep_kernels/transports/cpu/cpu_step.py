"""Steps in memory that is kept: what a dispatch and its combine need of Python is made once for each slot."""

from __future__ import annotations

import ctypes
import struct

import torch

from ep_kernels.lazy_output import recycle
from ep_kernels.transports.base import StepInputs
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm
from ep_kernels.transports.cpu.cpu_routing import FreshState
from ep_kernels.types import Mode

_LL = Mode.LL
_GIVEN, _RETURNED = struct.Struct("=2i4Q4i"), struct.Struct("=Q2i2Q2i2Q2i")
"""Of a DispatchOp, from `routing.tokens` on: tokens, mode, x, scales, ids, weights, fresh, exact_shapes, wide_ids, pad.
Of a CombineOp, from `routing.origin` on: origin, tokens, mode, y, row_weights, outputs_slot, apply_weights, z,
z_weights, z_type, to_collect."""
_GIVEN_AT = native.DispatchOp.routing.offset + native.Routing.tokens.offset
_RETURNED_AT = native.CombineOp.routing.offset + native.Routing.origin.offset
_VIEWS = 64
"""Numbers of rows of which views are kept."""


class CpuStep:
    """See `types.KeptStep`; of one slot.

    Args:
        comm: whose it is.
        slot: of its dispatches.
    """

    def __init__(self, comm: NativeComm, slot: int) -> None:
        self._comm, self._slot = comm, slot
        self._buffers, self._rows = comm.buffers[slot], comm.buffers[slot].tokens()
        self._state = state = FreshState(comm.places, 0)
        self.counts, self.offsets = state.counts, state.offsets
        *routing, counts, offsets, valid = state.addresses()
        out = valid, *self._buffers.addresses(), 0, 0, counts, offsets
        self._dispatch = native.dispatch_op((*routing, 0), (0, 0), (0,) * 4, (0,) * 3, out)
        self._combine = native.combine_op((*routing, 0), (0, 0), (0, 0), (-1, 1), (0, 0, 0))
        self._at = ctypes.byref(self._dispatch), ctypes.byref(self._combine)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._y_address = self._buffers.expert_outputs.data_ptr()
        self.num_tokens = self._mode = self._num_rows = 0
        self._capacity = self._rows.shape[0]
        self.tokens, self.y = self._view(0)

    def dispatch(self, inputs: StepInputs, mode: Mode) -> int:
        """Both phases, and peers no longer read y. The native status."""
        op, comm, exact = self._dispatch, self._comm, self._buffers.exact_shapes
        tokens, is_ht, (x, ids, weights) = inputs.num_tokens, mode is not _LL, inputs.addresses
        _GIVEN.pack_into(op, _GIVEN_AT, tokens, is_ht, x, 0, ids, weights, 1, exact, inputs.wide_ids, 0)
        recycle(self._rows)
        status: int = comm.lib.cd_dispatch(comm.pointer, self._at[0], native.STEP)
        if not status:
            self.num_tokens, self._mode = tokens, is_ht
            self._num_rows = num_rows = op.num_rows if exact else self._capacity
            self.tokens, self.y = self._views.get(num_rows) or self._view(num_rows)
        return status

    def combine(self, z: int, z_type: int) -> int:
        """Of the rows in y, into [T, H] there. The native status."""
        comm, slot = self._comm, self._slot if self._num_rows else -1
        origin, tokens, mode = self._dispatch.seq, self.num_tokens, self._mode
        _RETURNED.pack_into(
            self._combine, _RETURNED_AT, origin, tokens, mode, self._y_address, 0, slot, 1, z, 0, z_type, 0
        )
        status: int = comm.lib.cd_combine(comm.pointer, self._at[1], native.BOTH)
        return status

    def _view(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._views) == _VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            views = self._rows[:num_rows], self._buffers.expert_outputs[:num_rows]
        self._views[num_rows] = views
        return views
