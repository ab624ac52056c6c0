"""Steps in memory that is kept: what a dispatch and its combine need of Python is made once for each slot."""

from __future__ import annotations

import ctypes
import struct

import torch

from ep_kernels.lazy_output import recycle
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm
from ep_kernels.transports.cpu.cpu_routing import FreshState

_GIVEN, _RETURNED = struct.Struct("=2i4Q"), struct.Struct("=Q2i2Q2i2Q2i")
"""Of a DispatchOp, from `routing.tokens` on: tokens, mode, x, scales, ids, weights. Of a CombineOp, from
`routing.origin` on: origin, tokens, mode, y, row_weights, outputs_slot, apply_weights, z, z_weights, z_type, pad."""
_GIVEN_AT = native.DispatchOp.routing.offset + native.Routing.tokens.offset
_RETURNED_AT = native.CombineOp.routing.offset + native.Routing.origin.offset
_VIEWS = 64
"""Numbers of rows of which views are kept."""


class CpuStep:
    """See `types.KeptStep`; of one slot.

    Args:
        comm: whose it is.
        slot: of its dispatches.
        exact_shapes: of the configuration.
    """

    def __init__(self, comm: NativeComm, slot: int, exact_shapes: bool) -> None:
        self._comm, self._slot, self._exact_shapes = comm, slot, exact_shapes
        self._buffers, self._rows = comm.buffers[slot], comm.buffers[slot].tokens()
        self._state = state = FreshState(comm.places, 0)
        self.counts, self.offsets = state.counts, state.offsets
        *routing, valid, counts, offsets = state.addresses()
        tokens = self._rows.data_ptr()
        self._dispatch = native.dispatch_op(
            (*routing, 0), (0, 0), (0, 0, 0, 0), (1, exact_shapes), (valid, tokens, 0, 0, 0, counts, offsets)
        )
        self._combine = native.combine_op((*routing, 0), (0, 0), (0, 0), (-1, 1), (0, 0, 0))
        self._at = ctypes.byref(self._dispatch), ctypes.byref(self._combine)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._y_address = self._buffers.expert_outputs.data_ptr()
        self._y_end = self._y_address + self._buffers.expert_outputs.nbytes
        self._shape, self._num_rows, self._capacity = (0, 0), 0, self._rows.shape[0]
        self.tokens, self.y = self._view(0)

    def dispatch(self, tokens: int, mode: int, x: int, ids: int, weights: int) -> int:
        """Of that many tokens, whose parts lie there. The native status."""
        op, comm = self._dispatch, self._comm
        recycle(self._rows)
        _GIVEN.pack_into(op, _GIVEN_AT, tokens, mode, x, 0, ids, weights)
        status: int = comm.lib.cd_dispatch_step(comm.pointer, self._at[0], self._slot)
        if not status:
            self._shape = tokens, mode
            num_rows = op.num_rows if self._exact_shapes else self._capacity
            self._num_rows = num_rows
            self.tokens, self.y = self._views.get(num_rows) or self._view(num_rows)
        return status

    def combine(self, z: int, z_type: int) -> int:
        """Of the rows in y, into [T, H] there. The native status."""
        comm, slot = self._comm, self._slot if self._num_rows else -1
        returned = self._dispatch.routing.origin, *self._shape, self._y_address, 0, slot, 1, z, 0, z_type, 0
        _RETURNED.pack_into(self._combine, _RETURNED_AT, *returned)
        status: int = comm.lib.cd_combine(comm.pointer, self._at[1])
        return status

    def shares(self, out: torch.Tensor) -> bool:
        """Whether a contiguous tensor has a byte of this slot's expert outputs."""
        begin = out.data_ptr()
        return begin < self._y_end and begin + out.nbytes > self._y_address

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._shape[0]

    def _view(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._views) == _VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            views = self._rows[:num_rows], self._buffers.expert_outputs[:num_rows]
        self._views[num_rows] = views
        return views
