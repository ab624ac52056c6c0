"""Device operations of one rank: outputs, argument records, launches. Depends on tensors and the byte map, not on
processes nor on how regions are mapped (`transport`), so that tests can run many ranks on one GPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ep_kernels import checks, jit, quant
from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.lazy_output import recycle
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.calls import plan, routing_state
from ep_kernels.transports.nvlink.calls.addresses import RecordAddresses
from ep_kernels.transports.nvlink.calls.left_out import Unsent, unsent_in
from ep_kernels.transports.nvlink.calls.outputs import Memory, Outputs
from ep_kernels.transports.nvlink.calls.plan import most_blocks
from ep_kernels.transports.nvlink.calls.routing_state import DispatchState, Span
from ep_kernels.transports.nvlink.calls.tables import Tables
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode

SEND, RECEIVE, BOTH = 1, 2, 3
_ROW = 16
_DISPATCH = (
    ("num_tokens", "slot", "scale_row_stride", "scale_column_stride", "scale_group_stride", "power_of_two", "cached"),
    ("op", "routing_id", "x", "x_scales", "topk_ids", "topk_weights", "routes", "valid", "num_invalid_ids", "dst_rows",
     "weights", "tokens", "source_rows", "saved_counts", "counts", "offsets", "num_rows", "num_dropped", "out_scales",
     "out_ids", "out_weights"),
)  # fmt: skip
"""What a dispatch sets in its record, in the record's order; a combine:"""
_COMBINE = (
    ("num_tokens", "slot", "apply_weights", "mode", "positional"),
    ("op", "routing_id", "y", "row_weights", "dst_rows", "weights", "tokens", "source_rows", "routes", "topk_weights",
     "z", "z_weights"),
)  # fmt: skip


class RecordTemplate:
    """Makes copies of one record. What a call sets are two runs of neighbouring fields: int32, then addresses.

    Args:
        record: with its constant fields set.
        numbers, addresses: names of the fields of each run, in the order of the record.
    """

    def __init__(self, record: ctypes.Structure, numbers: Sequence[str], addresses: Sequence[str]) -> None:
        self._type: Any = type(record)
        self._bytes = bytes(record)
        self._numbers, self._numbers_at = self._run(numbers, "i")
        self._addresses, self._addresses_at = self._run(addresses, "Q")

    def _run(self, names: Sequence[str], code: str) -> tuple[struct.Struct, int]:
        packed = struct.Struct(f"={len(names)}{code}")
        first = int(getattr(self._type, names[0]).offset)
        width = struct.calcsize(f"={code}")
        at = [getattr(self._type, name).offset for name in names]
        assert at == [first + width * i for i in range(len(names))], f"{self._type.__name__}: not neighbours: {names}"
        return packed, first

    def record(self, numbers: Sequence[int], addresses: Sequence[int]) -> Any:
        """A copy with these words."""
        made = self._type.from_buffer_copy(self._bytes)
        self._numbers.pack_into(made, self._numbers_at, *numbers)
        self._addresses.pack_into(made, self._addresses_at, *addresses)
        return made


@dataclass(slots=True)
class Operation:
    """A kernel of one configuration.

    Attributes:
        variant, launch: as in `Call`.
        records: makes its argument records; from `LaunchEngine.attach` on.
        start: launches it; the transport keeps it here.
    """

    variant: jit.Variant
    launch: plan.Launch
    records: Any = None
    start: Any = None


@dataclass(slots=True)
class Call:
    """One operation, ready to be launched (whole or by phases).

    Attributes:
        variant: kernel.
        launch: grid and shared memory.
        args: its argument record, for `phases`.
        keep: keeps the tensors alive that the kernel reads or writes.
        phases: SEND, RECEIVE or BOTH; stays BOTH where the record has no phases.
        operation: that it is one of, or None.
    """

    variant: jit.Variant
    launch: plan.Launch
    args: Any
    keep: list[Any] = field(default_factory=list)
    phases: int = BOTH
    operation: Operation | None = None

    def of_phases(self, phases: int) -> Any:
        """The argument record for SEND, RECEIVE or BOTH."""
        if self.phases != phases:
            self.phases, self.args.work = phases, self.launch.work(phases)
        return self.args


@dataclass(slots=True)
class Dispatch:
    """A dispatch in progress: its call, the memory of its numbers, its scales."""

    call: Call
    block: torch.Tensor
    scales: torch.Tensor | None
    state: DispatchState
    slot: int
    seq: int
    num_tokens: int
    mode: Mode


class LaunchEngine:
    """Prepares and finishes the operations of one rank.

    Args:
        config: of the communicator.
        device: CUDA device.
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
        self._state_map, self._quantiser = plan.state_map(config, self.sizes), _quantiser(config, dispatch_sms)
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
        self._width, self._out_dtype = config.hidden_size, config.resolved_output_dtype
        self._op = torch.empty(abi.OP_WORDS, dtype=torch.int64, device=device)
        """Of combines whose phases are one launch; of others it is the call's own."""
        self.op_address = self._op.data_ptr()
        self.num_dispatches = self.num_combines = 0

    # Region.

    @property
    def region_bytes(self) -> int:
        """Size of the region."""
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
        self._make_records()

    def _make_records(self) -> None:
        """With all that is the same in every call; after `set_peers`, whose addresses they carry."""
        world, c = self.tables.world, self.config
        for dispatch in self.dispatch_operations.values():
            record = abi.DispatchArgs(world=world, work=dispatch.launch.work(BOTH))
            dispatch.records = RecordTemplate(record, *_DISPATCH)
        for combine in self.combine_operations.values():
            stages = plan.combine_stages(c).record()
            record = abi.CombineArgs(world=world, work=combine.launch.work(BOTH), pipelines=stages)
            combine.records = RecordTemplate(record, *_COMBINE)

    def detach(self) -> None:
        """Release the region; no operation may follow."""
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
        if self._quantiser is not None:
            general[self._quantiser.variant] = self._quantiser.launch
        return {each.variant: each.launch for each in chosen} | general

    def _of_group(self, variant: jit.Variant) -> jit.Variant:
        return replace(variant, network=self.config.network is not None)

    def _dispatch_variant(self, mode: Mode) -> jit.Variant:
        c = self.config
        quantized = plan.CPP_TYPES[c.dtype] if c.quantize is True else "u8"
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

    # Dispatch.

    def quantized(self, args: DispatchArgs) -> tuple[Call, DispatchArgs] | None:
        """MXFP8 and NVFP4: the launch that makes their rows, and the dispatch of these. Else None."""
        if self._quantiser is None:
            return None
        x, tokens, of_all = _aligned(args.x), args.x.shape[0], args.scales
        columns, dtype = quant.delivered_scales(self.config)
        rows = self._empty((tokens, self.config.payload_columns), self.config.payload_dtype)
        scales = self._empty((tokens, columns), dtype)
        record = abi.QuantizeArgs(
            tokens, self._width, x.data_ptr(), pointer(of_all), rows.data_ptr(), scales.data_ptr()
        )
        operation = self._quantiser
        keep = [x, of_all, rows, scales]
        call = Call(operation.variant, operation.launch, record, keep, BOTH, operation)
        return call, replace(args, x=rows, scales=scales)

    def dispatch(self, args: DispatchArgs) -> Dispatch:
        """Prepare a dispatch up to its launch."""
        shape, num_tokens = self.sizes.shape, args.x.shape[0]
        assert args.mode is Mode.HT or num_tokens <= shape.ll_tokens, "lines have no room for it"
        # Slot and number of this operation.
        slot, seq = self.num_dispatches % shape.dispatch_slots, self.num_dispatches + 1
        # State that outlives the call, and scales.
        x = _aligned(args.x)
        state, block = self._state(args)
        trimmed = self.config.exact_shapes and (
            state.num_rows is not None or not torch.cuda.is_current_stream_capturing()
        )
        scales, strides = self.outputs.scales(slot, trimmed)
        # The argument record.
        operation = self.dispatch_operations[args.mode]
        record = operation.records.record(
            (num_tokens, slot, *strides, self.power_of_two, args.previous is not None),
            self.addresses.dispatch(
                block.data_ptr(), state.routing.address, state.routing_id.address, state.carried.address, x.data_ptr(),
                pointer(args.scales), args.topk_ids.data_ptr(), args.topk_weights.data_ptr(), pointer(scales),
            ),
        )  # fmt: skip
        keep = [x, args, scales, state, block]
        call = Call(operation.variant, operation.launch, record, keep, BOTH, operation)
        # From here on the operation counts.
        recycle(self.outputs.slot_rows(slot))
        self.num_dispatches = seq  # last: where memory was out, the next dispatch takes the slot that peers expect
        return Dispatch(call, block, scales, state, slot, seq, num_tokens, args.mode)

    def finish(self, step: Dispatch, num_rows: int | None, epoch: int) -> tuple[DispatchOutput, DispatchHandle]:
        """Output and handle; `num_rows` trims compact layouts, None leaves worst-case shapes."""
        outputs, state = self.outputs, step.state
        state.num_rows = num_rows
        rows = outputs.rows if num_rows is None or not outputs.compact else (num_rows,)
        out = outputs.output(step.block, step.slot, step.scales, step.num_tokens, rows[0])
        return out, DispatchHandle(0, step.seq, step.num_tokens, step.mode, epoch, state, rows)

    def number(self, step: Dispatch, name: str) -> torch.Tensor:
        """A field that the kernel fills, of all its rows."""
        return self.outputs.number(step.block, name)

    def buffers(self, step: Dispatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""
        outputs = self.outputs
        return outputs.tokens(step.slot), outputs.all_scales(step.scales), outputs.number(step.block, "counts")

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def blank_state(self, num_tokens: int) -> DispatchState:
        """Buffers for a new routing."""
        carried = self._empty((self._state_map.carried_bytes,), torch.uint8)
        routing = self._empty((self._state_map.routing_bytes,), torch.uint8)
        weights = self._empty((num_tokens, self.config.topk), torch.float32)
        own = Span(carried, 0, carried.numel(), 0)
        return DispatchState(Span(routing, 0, routing.numel(), 0), own, own, weights)

    def _state(self, args: DispatchArgs) -> tuple[DispatchState, torch.Tensor]:
        """(routing, memory of the call's numbers): new, but for what is shared with `previous`."""
        previous: DispatchState | None = None if args.previous is None else args.previous.state
        at, where = self._state_map, self.addresses
        block = checks.made(torch.empty_like(self.blanks[previous is None]))
        base = block.data_ptr()
        carried = Span(block, where.carried_at, at.carried_bytes, base + where.carried_at)
        own_weights = args.topk_weights.clone() if self.config.exact_combine else args.topk_weights
        if previous is not None:
            return DispatchState(previous.routing, previous.routing_id, carried, own_weights, previous.num_rows), block
        routing = Span(block, where.routing_at, at.routing_bytes, base + where.routing_at)
        return DispatchState(routing, carried, carried, own_weights), block

    # Combine.

    def combine(self, args: CombineArgs) -> tuple[Call, Callable[[torch.Tensor | None], Any]]:
        """Prepare a combine. Returns (call, receive); `receive(out) -> (z, weights)` sets the arguments of the receive
        phase."""
        handle = args.handle
        # State of the dispatch; weights of its own, or of this call.
        state: DispatchState = handle.state
        weights = state.topk_weights
        if args.topk_weights is not None:
            weights = args.topk_weights if args.at_once else args.topk_weights.clone()
        # Slot and number of this operation.
        slot, seq = self.num_combines % self.sizes.shape.combine_slots, self.num_combines + 1
        y, op = _aligned(args.y), self._op if args.at_once else self._empty((abi.OP_WORDS,), torch.int64)
        # The argument record; z follows in `receive`.
        operation = self.combine_operations[handle.mode]
        is_ht = plan.algorithm(self.config, handle.mode) is Mode.HT
        record = operation.records.record(
            (handle.num_tokens, slot, args.apply_weights, is_ht, self.positional),
            self.addresses.combine(
                op.data_ptr(), state.routing.address, state.routing_id.address, state.carried.address, y.data_ptr(),
                pointer(args.row_weights), weights.data_ptr(), 0,
            ),
        )  # fmt: skip
        call = Call(
            operation.variant, operation.launch, record, [y, op, args, state, weights], BOTH, operation
        )  # fmt: skip

        def receive(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            z = out
            if z is None or z.data_ptr() % _ROW:
                z = checks.made(self._empty((handle.num_tokens, self._width), self._out_dtype))
            record.z, z_weights = z.data_ptr(), None
            if args.row_weights is not None:
                z_weights = self._empty((handle.num_tokens, self.config.topk), torch.float32)
                record.z_weights = z_weights.data_ptr()
            call.keep += [z, z_weights]
            self.num_combines = seq if args.at_once else self.num_combines
            return z, z_weights

        if not args.at_once:
            self.num_combines = seq  # its send phase follows; otherwise both phases, when `receive` has its memory
        return call, receive

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """Rows in the shape of the handle's tokens, in any memory: kernels read expert rows by address."""
        return self._empty((*handle.rows_shape, self.config.hidden_size), self.config.resolved_output_dtype)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """float32 [L, slots] | [N], 0 for rows of no token."""
        return routing_state.row_weights(handle, self.config, self._state_map)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        """int32 [R], a view of the routing."""
        return routing_state.source_rows(handle, self.config, self._state_map)


def _quantiser(config: MoEConfig, num_sms: int) -> Operation | None:
    """What runs in front of a dispatch that moves MXFP8 or NVFP4."""
    if not isinstance(config.quantize, str):
        return None
    variant = jit.quantize_variant(plan.CPP_TYPES[config.dtype], config.quantize)
    return Operation(variant, plan.quantize_launch(config, num_sms))


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows, copied if they do not start at a multiple of 16 bytes, which the copy engine requires."""
    return rows if rows.data_ptr() % _ROW == 0 else rows.clone()


def pointer(tensor: torch.Tensor | None) -> int:
    """The address of a tensor; 0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()
