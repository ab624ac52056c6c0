"""The face of `Mode.AG` (see `transports/base.py`), over the collectives of the transport that the config names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ep_kernels import checks, quant
from ep_kernels.config import MoEConfig
from ep_kernels.errors import ArgumentError
from ep_kernels.gather import gather_memory as memory
from ep_kernels.gather.gather_engine import GatherEngine
from ep_kernels.gather.gather_member import GatherMember
from ep_kernels.gather.gather_operations import GatherCombine, GatherDispatch
from ep_kernels.gather.gather_routing import GatherState
from ep_kernels.transports import collective_base
from ep_kernels.transports.base import CombineArgs, DispatchArgs, RegionArray, RegionMap
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, Mode

_ABI = "ag1"
_kept: list[GatherEngine] = []
"""What graphs of closed communicators still read. The end of a graph is not reported, so it is kept for good."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8)


def create(config: MoEConfig) -> GatherTransport:
    """Build the transport; nothing is allocated yet. Raises TransportError where there are no collectives."""
    return GatherTransport(config)


class GatherTransport(GatherMember):
    """See `base.Transport`."""

    _engine: GatherEngine

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, collective_base.create(memory.collective_config(config)))
        can = self._coll.capabilities
        self.capabilities = Capabilities(can.device_type, False, DTYPES, (Mode.AG,), can.graphs, f"{can.abi}-{_ABI}")
        self._num_dispatches, self._captured = 0, False

    # Life.

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        """See `Transport.allocate`."""
        return self._coll.allocate()

    def barrier(self) -> None:
        """See `MemberTransport.barrier`. The first one allocates registered memory: the ranks have met."""
        super().barrier()
        if not hasattr(self, "_engine"):
            block = self._coll.empty((memory.arrays(self._config)[1],), torch.uint8)
            self._engine = GatherEngine(self._config, self._coll, block)

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """See `MemberTransport.set_active`."""
        super().set_active(mask, epoch)
        self._engine.set_active(mask)
        self._num_dispatches = 0

    def close(self) -> None:
        """See `MemberTransport.close`."""
        super().close()
        engine = self.__dict__.pop("_engine", None)  # its views keep the region
        if engine is not None and self._captured:
            _kept.append(engine)

    def _begin(self) -> None:
        checks.made(torch.empty(0, dtype=torch.uint8, device=self._engine.device))  # what is made later has memory, too
        if self.capabilities.graphs and torch.cuda.is_current_stream_capturing():
            self._captured = True

    def is_captured(self) -> bool:
        """See `Transport.is_captured`."""
        return self._captured

    # Operations.

    def dispatch(self, args: DispatchArgs) -> GatherDispatch:
        """See `Transport.dispatch`."""
        self._begin()
        pending = GatherDispatch(self._engine, args, self._num_dispatches + 1, self._epoch)
        pending.send()
        self._num_dispatches += 1
        return pending

    def combine(self, args: CombineArgs) -> GatherCombine:
        """See `Transport.combine`."""
        self._begin()
        pending = GatherCombine(self._engine, args)
        if not args.at_once:
            pending.send()
        return pending

    def quick(self, number: int, mode: Mode, ll_max_tokens: int) -> None:
        """See `Transport.quick`."""

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """See `Transport.dispatch_input`. Any memory will do: the collectives stage it."""
        shape = num_tokens, self._config.hidden_size
        return torch.empty(shape, dtype=self._config.dtype, device=self._engine.device)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """See `Transport.combine_input`. Any memory will do: combine puts identities among the rows, in a copy."""
        shape = *handle.rows_shape, self._config.hidden_size
        return torch.empty(shape, dtype=self._config.resolved_output_dtype, device=self._engine.device)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """See `Transport.row_weights`."""
        raise ArgumentError("layout", "a per-expert layout", self._config.resolved_layout.value)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        """See `Transport.source_rows`: tokens with an expert here."""
        state: GatherState = handle.state
        return state.here.flatten(1).sum(1, dtype=torch.int32)

    def trimmed(self, handle: DispatchHandle, num_rows: int) -> DispatchHandle:
        """See `Transport.trimmed`."""
        return replace(handle, rows_shape=(num_rows,))

    def dropped_by(self, out: DispatchOutput, handle: DispatchHandle) -> int:
        """See `Transport.dropped_by`: every row has its place."""
        return 0

    def blank_state(self, num_tokens: int) -> GatherState:
        """See `Transport.blank_state`: of a step of M tokens."""
        return GatherState.blank(self._config, num_tokens, self._engine.device)

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        """See `Transport.restore`."""
        return replace(handle, state=GatherState.restore(handle.state))

    def dropped_rows(self) -> int:
        """See `Transport.dropped_rows`: every row has its place."""
        return 0

    def wire_bytes(self, mode: Mode) -> tuple[int, int]:
        """See `Transport.wire_bytes`. Each row goes to every rank, with a place and a weight for each expert."""
        config = self._config
        partial = config.hidden_size * config.resolved_combine_dtype.itemsize
        return quant.row_bytes(config) + 8 * config.topk, partial

    def ll_max_tokens(self) -> int:
        """See `Transport.ll_max_tokens`: there is no LL."""
        return 0

    def _step_tokens(self, num_bytes: int, alone: bool) -> int:
        return memory.step_tokens(self._config, num_bytes, alone)


def region_map(config: MoEConfig) -> RegionMap:
    """See `base.region_map`: what the collectives need for themselves, then the registered arrays."""
    staging = collective_base.bytes_before_pool(memory.collective_config(config))
    found = [RegionArray("collectives", 0, 1, staging, "flags and staging of the collectives")]
    for name, array in memory.arrays(config)[0].items():
        place = staging + array.offset
        found.append(RegionArray(name, place, config.max_in_flight, array.slot_bytes, memory.HOLDS[name]))
    return RegionMap(tuple(found), 0)
