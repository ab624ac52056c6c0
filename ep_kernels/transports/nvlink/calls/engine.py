"""What the device operations of one rank need: kernels and grids, tables, memory of outputs. Depends on tensors and the
byte map, not on processes nor on how regions are mapped (`transport`), so that tests can run many ranks on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls import plan, routing_state
from ep_kernels.transports.nvlink.calls.left_out import Unsent, unsent_in
from ep_kernels.transports.nvlink.calls.outputs import Memory, Outputs, RecordAddresses
from ep_kernels.transports.nvlink.calls.plan import most_blocks
from ep_kernels.transports.nvlink.calls.routing_state import Span, TensorState
from ep_kernels.transports.nvlink.calls.tables import Tables
from ep_kernels.types import DispatchHandle, Layout, Mode

SEND, RECEIVE, BOTH = 1, 2, 3


class Operation(NamedTuple):
    """A kernel of one configuration, with its grid and shared memory."""

    variant: jit.Variant
    launch: plan.Launch


@dataclass(slots=True)
class Call:
    """One launch.

    Attributes:
        variant, launch: kernel; grid and shared memory.
        args: its argument record.
        keep: keeps the tensors alive that the kernel reads or writes.
    """

    variant: jit.Variant
    launch: plan.Launch
    args: Any
    keep: list[Any] = field(default_factory=list)


class LaunchEngine:
    """What the operations of one rank have in common.

    Args:
        num_sms: multiprocessors that this rank may fill at most.
        block_bytes: dynamic shared memory that a block may take there.
    """

    def __init__(
        self, config: MoEConfig, device: torch.device, num_sms: int, block_bytes: int = plan.SHARED_BYTES
    ) -> None:
        self.config, self._device = config, device
        # Grid and sizes.
        dispatch_sms = most_blocks(config, config.resolved_dispatch_sms, num_sms)
        combine_sms = most_blocks(config, config.resolved_combine_sms, num_sms)
        self.sizes = plan.sizes_of(config)
        self.tables = Tables(config, self.sizes, device, dispatch_sms)
        self.outputs = Outputs(config, self.sizes, device)
        self._state_map = plan.state_map(config, self.sizes)
        # Kernels of both operations, for each mode.
        modes = (Mode.LL, Mode.HT) if config.mode is Mode.AUTO else (config.mode,)
        self.dispatch_operations = {
            mode: Operation(
                self._dispatch_variant(mode),
                plan.dispatch_launch(config, self.sizes, plan.algorithm(config, mode), dispatch_sms),
            )
            for mode in modes
        }
        self.combine_operations = {
            mode: Operation(
                self._combine_variant(mode),
                plan.combine_launch(config, self.sizes, plan.algorithm(config, mode), combine_sms, block_bytes),
            )
            for mode in modes
        }
        # Memory of calls: where everything lies in one allocation.
        self._memory: Memory | None = None
        routed = config.max_tokens_per_rank * config.topk * 4
        self.addresses = RecordAddresses(
            self._state_map, self.outputs.places, self.outputs.num_bytes, routed, config.exact_combine
        )
        word = torch.empty(1, dtype=torch.int32, device=device)  # most fields are int32: a view of one is one operation
        self.blanks = word.expand(self.addresses.routing_at // 4), word.expand(self.addresses.num_bytes // 4)
        """Of the size of a call's memory: with `previous`, without. Taking after them is the cheapest allocation."""
        # What every call needs of the configuration.
        self.power_of_two = plan.POWER_OF_TWO[config.scale_format]
        self.positional = config.resolved_layout is Layout.RANK_MAJOR
        self._op = torch.empty(abi.OP_WORDS, dtype=torch.int64, device=device)
        """Of combines whose phases are one launch; of others it is the call's own."""
        self.op_address = self._op.data_ptr()
        self.num_dispatches = self.num_combines = 0

    # Region.

    @property
    def region_bytes(self) -> int:
        return int(self.tables.world.map.num_bytes)

    @property
    def blank_bytes(self) -> tuple[tuple[int, int], ...]:
        """Byte ranges [begin, end) that must be zero before peers write: flags, and arrays with flags in their data."""
        byte_map = self.tables.world.map
        return ((0, int(byte_map.routing_ids)), (int(byte_map.row_lines), int(byte_map.num_bytes)))

    def attach(self, memory: Memory, addresses: list[int]) -> None:
        """Set this rank's region, and the address of every rank's region as mapped here."""
        self._memory = memory
        self.outputs.attach(memory)
        self.tables.set_peers(addresses)

    def detach(self) -> None:
        self._memory = None
        self.outputs.attach(None)

    def restart_slots(self) -> None:
        """Start again with the first slots, on all ranks alike."""
        self.num_dispatches = self.num_combines = 0

    def _flags(self) -> torch.Tensor:
        """int64 [FLAGS, R] of this rank."""
        assert self._memory is not None
        shape = len(abi.FLAGS), self.config.group.size
        return self._memory.view(self.tables.world.map.flags, shape, torch.int64)

    def unsent(self, mask: Sequence[bool]) -> list[Unsent]:
        """Operations that live ranks outside `mask` have started but not sent, as read by the last `barrier` with an
        epoch. Synchronises."""
        return unsent_in(self._flags().tolist(), mask, self.tables.host.is_gone)

    def restart_flags(self, dispatch: int, combine: int) -> None:
        """Set the arrival counters, which broken operations leave between two values, to those after `dispatch` and
        `combine` complete operations; clear LEFT_OUT."""
        flags = self._flags()
        flags[abi.FLAGS.index("METADATA")] = flags[abi.FLAGS.index("PAYLOAD")] = dispatch * abi.ARRIVAL_TOTAL
        flags[abi.FLAGS.index("COMBINE")] = combine
        flags[abi.FLAGS.index("LEFT_OUT")] = 0

    def variants(self) -> dict[jit.Variant, plan.Launch]:
        """Every kernel that this configuration can launch; launches of one kernel differ in their grid alone."""
        chosen = (*self.dispatch_operations.values(), *self.combine_operations.values())
        barrier = self._of_group(jit.Variant("barrier"))
        general = {barrier: plan.Launch(1, 0, 0, 0), jit.NARROW: plan.narrow_launch(self.config)}
        return {each.variant: each.launch for each in chosen} | general

    def _of_group(self, variant: jit.Variant) -> jit.Variant:
        return replace(variant, network=self.config.network is not None)

    def _dispatch_variant(self, mode: Mode) -> jit.Variant:
        c = self.config
        quantized = plan.CPP_TYPES[c.dtype] if c.quantize else "u8"
        name = plan.algorithm(c, mode).value
        return self._of_group(jit.dispatch_variant(name, plan.LAYOUTS[c.resolved_layout], quantized))

    def _combine_variant(self, mode: Mode) -> jit.Variant:
        c = self.config
        kind = 2 if c.exact_combine else 0 if c.resolved_layout.per_expert else 1
        output, moved = plan.CPP_TYPES[c.resolved_output_dtype], plan.CPP_TYPES[c.resolved_combine_dtype]
        return self._of_group(jit.combine_variant(plan.algorithm(c, mode).value, kind, output, moved))

    def barrier(self, left_out_epoch: int = 0) -> Call:
        """A barrier of all ranks; with an epoch > 0, leave out the inactive ranks instead: the active ones continue in
        that epoch."""
        args = abi.BarrierArgs(self.tables.world, left_out_epoch)
        return Call(self._of_group(jit.Variant("barrier")), plan.Launch(1, 0, 0, 0), args)

    # What users of a handle see.

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def blank_state(self, num_tokens: int) -> TensorState:
        carried = self._empty((self._state_map.carried_bytes,), torch.uint8)
        routing = self._empty((self._state_map.routing_bytes,), torch.uint8)
        weights = self._empty((num_tokens, self.config.topk), torch.float32)
        own = Span.whole(carried)
        return TensorState(Span.whole(routing), own, own, weights)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """Rows in the shape of the handle's tokens, in any memory: kernels read expert rows by address."""
        return self._empty((*handle.rows_shape, self.config.hidden_size), self.config.resolved_output_dtype)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        return routing_state.row_weights(handle, self.config, self._state_map)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        return routing_state.source_rows(handle, self.config, self._state_map)
