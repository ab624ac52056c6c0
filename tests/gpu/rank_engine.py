"""The operations of one rank whose launches are another's: records are filled as for a communicator, and handed out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.calls.engine import Call, LaunchEngine
from ep_kernels.transports.nvlink.calls.operation_plan import STATE_BYTES, Surroundings
from ep_kernels.transports.nvlink.calls.operations import NvlinkDispatch, NvlinkOperations
from ep_kernels.transports.nvlink.calls.routing_state import DispatchState, ends, with_rows
from ep_kernels.transports.nvlink.calls.streams import StreamOrder
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.types import DispatchHandle, DispatchOutput


class _Unlaunched:
    """Stands for a kernel."""

    def prepared(self, *_: Any, **__: Any) -> launch.Prepared:
        return launch.Prepared()


class Filled:
    """A dispatch, ready to be launched.

    Attributes:
        call: its launch.
        state: of its handle to be.
        slot, seq: of it.
        known: rows that will come, where a former dispatch says so; or None.
    """

    def __init__(self, pending: NvlinkDispatch, call: Call) -> None:
        self.call, self.state, self.places = call, pending.state, pending.places
        self.slot, self.seq = int(call.args.slot), pending.state.seq
        is_known = pending.plan.trims and pending.plan.numbers is None
        self.known = ends(self.state.words)[1] if is_known else None


class RankEngine(LaunchEngine):
    """An engine with its operations; arguments as `LaunchEngine`'s."""

    def __init__(self, config: MoEConfig, device: torch.device, num_sms: int, *more: Any) -> None:
        super().__init__(config, device, num_sms, *more)
        self._operations: NvlinkOperations | None = None

    @property
    def operations(self) -> NvlinkOperations:
        """Made when the regions are known."""
        if self._operations is None:
            around = Surroundings(self._device, StreamOrder(self._device), launch.Quiet([]), None, 0, launch.library())
            kernels = dict.fromkeys(self.variants(), _Unlaunched())
            self._operations = NvlinkOperations(self, around, kernels, self, 0, False)  # type: ignore[arg-type]
        return self._operations

    def dispatch(self, args: DispatchArgs) -> Filled:
        """With a record of both phases."""
        args.at_once = True
        pending = self.operations.fill_dispatch(args)
        state, how = pending.state, self.dispatch_operations[args.mode]
        record = abi.DispatchArgs.from_buffer_copy(state.words, STATE_BYTES)
        self.num_dispatches = state.seq
        return Filled(pending, Call(*how, record, [args, pending]))

    def number(self, step: Filled, name: str) -> torch.Tensor:
        """A field that the kernel fills, of all its rows."""
        return self.outputs.number(step.state.block, name)

    def finish(self, step: Filled, num_rows: int | None, epoch: int) -> tuple[DispatchOutput, DispatchHandle]:
        """Output and handle; `num_rows` trims compact layouts, None leaves worst-case shapes."""
        step.state.words = with_rows(step.state.words, self.outputs.rows[0] if num_rows is None else num_rows)
        read: Any = SimpleNamespace(numbers=None, trims=self.outputs.compact and num_rows is not None)
        out, handle = self.operations.delivered(read, step.state, step.places)
        handle.epoch = epoch
        region = step.places[0].untyped_storage().data_ptr()
        kept = [each for each in map(partial(getattr, handle.state), DispatchState.__slots__) if torch.is_tensor(each)]
        assert all(each.untyped_storage().data_ptr() != region for each in kept), "a handle keeps the region"
        return out, handle

    def combine(self, args: CombineArgs) -> tuple[Call, Callable[[None], tuple[torch.Tensor, torch.Tensor | None]]]:
        """The launch of both phases, and what gives z and the weights that are returned."""
        args.at_once = True
        pending = self.operations.fill_combine(args)
        how = self.combine_operations[args.handle.mode]
        self.num_combines += 1
        record = abi.CombineArgs.from_buffer_copy(pending.words, STATE_BYTES)
        return Call(*how, record, [args, pending, pending.z, pending.weights]), lambda _: (pending.z, pending.weights)
