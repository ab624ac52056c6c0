"""Device operations of one rank: outputs, argument records, launches. Depends on tensors and the byte map, not on
processes nor on how regions are mapped (`transport`), so that tests can run many ranks on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink import plan
from ep_kernels.transports.nvlink.left_out import Unsent, unsent_in
from ep_kernels.transports.nvlink.outputs import Memory, Outputs
from ep_kernels.transports.nvlink.tables import Tables
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode

SEND, RECEIVE, BOTH = 1, 2, 3
_ROW = 16


@dataclass(slots=True)
class Call:
    """One operation, ready to be launched (whole or by phases).

    Attributes:
        variant: kernel.
        launch: grid and shared memory.
        args: its argument record; `args.work.phases` selects the phases.
        keep: keeps the tensors alive that the kernel reads or writes.
    """

    variant: jit.Variant
    launch: plan.Launch
    args: Any
    keep: list[Any] = field(default_factory=list)

    def of_phases(self, phases: int) -> Any:
        """The argument record for SEND, RECEIVE or BOTH."""
        self.args.work = self.launch.work(phases)
        return self.args


@dataclass(slots=True)
class DispatchState:
    """`DispatchHandle.state`: the routing of one dispatch, apart from any recycled buffer. A dispatch with
    `previous_handle` shares `routing` and `routing_id` with it.

    Attributes:
        routing: routes, dst_rows, tokens, source_rows and saved_counts of `abi.DispatchArgs`, by `plan.StateMap`.
        routing_id: the `carried` of the dispatch that made the routing; its first word is that dispatch's seq.
        carried: words of the operation, then weights, by `plan.StateMap`.
        topk_weights: float32 [T, K]; a copy where combine reads it (exact), since callers may overwrite theirs.
        num_rows: rows delivered; None: the host has not read it.
    """

    routing: torch.Tensor
    routing_id: torch.Tensor
    carried: torch.Tensor
    topk_weights: torch.Tensor
    num_rows: int | None = None

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`."""
        return [self.routing, self.carried, self.routing_id[: 8 * abi.OP_WORDS], self.topk_weights]


@dataclass(slots=True)
class Dispatch:
    """A dispatch in progress: its call and its output tensors."""

    call: Call
    outputs: dict[str, torch.Tensor | None]
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
        num_sms: multiprocessors that this rank may fill.
        block_bytes: dynamic shared memory that a block may take there.
    """

    def __init__(
        self, config: MoEConfig, device: torch.device, num_sms: int, block_bytes: int = plan.SHARED_BYTES
    ) -> None:
        self._config, self._device = config, device
        self.sizes = plan.sizes_of(config)
        self.tables = Tables(config, self.sizes, device, num_sms)
        self._outputs = Outputs(config, self.sizes, device)
        self._state_map = plan.state_map(config, self.sizes)
        modes = (Mode.LL, Mode.HT) if config.mode is Mode.AUTO else (config.mode,)
        self._dispatch = {
            mode: (
                self._dispatch_variant(mode),
                plan.dispatch_launch(config, self.sizes, plan.algorithm(config, mode), num_sms),
            )
            for mode in modes
        }
        self._combine = {
            mode: (
                self._combine_variant(mode),
                plan.combine_launch(config, self.sizes, plan.algorithm(config, mode), num_sms, block_bytes),
            )
            for mode in modes
        }
        self._pipeline_stages = plan.combine_stages(config).record()
        self._memory: Memory | None = None
        self._num_dispatches = self._num_combines = 0

    # Region.

    @property
    def region_bytes(self) -> int:
        """Size of the region."""
        return int(self.tables.world.map.num_bytes)

    @property
    def flag_bytes(self) -> int:
        """Bytes at the region's start that must be zero before peers write."""
        return int(self.tables.world.map.counts)

    @property
    def blank_bytes(self) -> tuple[tuple[int, int], ...]:
        """Byte ranges [begin, end) that must be zero before peers write: flags, and arrays with flags in their data."""
        byte_map = self.tables.world.map
        return ((0, int(byte_map.routing_ids)), (int(byte_map.row_lines), int(byte_map.num_bytes)))

    def attach(self, memory: Memory, addresses: list[int]) -> None:
        """Set this rank's region, and the address of every rank's region as mapped here."""
        self._memory = memory
        self._outputs.attach(memory)
        self.tables.set_peers(addresses)

    def detach(self) -> None:
        """Release the region; no operation may follow."""
        self._memory = None
        self._outputs.attach(None)

    def restart_slots(self) -> None:
        """Start again with the first slots, on all ranks alike."""
        self._num_dispatches = self._num_combines = 0

    def _flags(self) -> torch.Tensor:
        """int64 [FLAGS, R] of this rank."""
        assert self._memory is not None
        shape = len(abi.FLAGS), self._config.group.size
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
        chosen = [pair for table in (self._dispatch, self._combine) for pair in table.values()]
        return dict(chosen) | {self._of_group(jit.Variant("barrier")): plan.Launch(1, 0, 0, 0)}

    def _of_group(self, variant: jit.Variant) -> jit.Variant:
        return replace(variant, network=self._config.network is not None)

    def _dispatch_variant(self, mode: Mode) -> jit.Variant:
        c = self._config
        quantized = plan.CPP_TYPES[c.dtype] if c.quantize else "u8"
        name = plan.algorithm(c, mode).value
        return self._of_group(jit.dispatch_variant(name, plan.LAYOUTS[c.resolved_layout], quantized))

    def _combine_variant(self, mode: Mode) -> jit.Variant:
        c = self._config
        kind = 2 if c.exact_combine else 0 if c.resolved_layout.per_expert else 1
        output, moved = plan.CPP_TYPES[c.resolved_output_dtype], plan.CPP_TYPES[c.resolved_combine_dtype]
        return self._of_group(jit.combine_variant(plan.algorithm(c, mode).value, kind, output, moved))

    def barrier(self, left_out_epoch: int = 0) -> Call:
        """A barrier of all ranks; with an epoch > 0, leave out the inactive ranks instead: the active ones continue in
        that epoch."""
        args = abi.BarrierArgs(self.tables.world, left_out_epoch)
        return Call(self._of_group(jit.Variant("barrier")), plan.Launch(1, 0, 0, 0), args)

    # Dispatch.

    def dispatch(self, args: DispatchArgs) -> Dispatch:
        """Prepare a dispatch up to its launch."""
        shape = self.sizes.shape
        assert args.mode is Mode.HT or args.x.shape[0] <= shape.ll_tokens, "lines have no room for it"
        slot, seq = self._num_dispatches % shape.dispatch_slots, self._num_dispatches + 1
        x, num_tokens = _aligned(args.x), args.x.shape[0]
        state = self._state(args)
        outputs, addresses = self._outputs.numbers(num_tokens)
        known = state.num_rows is not None or not torch.cuda.is_current_stream_capturing()
        scales, scale_args = self._outputs.scales(slot, trimmed=known and self._config.exact_shapes)
        record = abi.DispatchArgs(
            world=self.tables.world, num_tokens=num_tokens, slot=slot,
            power_of_two=plan.POWER_OF_TWO[self._config.scale_format], cached=int(args.previous is not None),
            op=state.carried.data_ptr(), saved_counts=state.routing.data_ptr() + self._state_map.saved_counts,
            x=x.data_ptr(),
            x_scales=_pointer(args.scales), topk_ids=args.topk_ids.data_ptr(),
            topk_weights=args.topk_weights.data_ptr(), **self._addresses(state), **addresses, **scale_args,
        )  # fmt: skip
        variant, launch = self._dispatch[args.mode]
        call = Call(variant, launch, record, [x, args, scales, state, outputs])
        self._num_dispatches = seq  # last: where memory was out, the next dispatch takes the slot that peers expect
        return Dispatch(call, outputs, scales, state, slot, seq, num_tokens, args.mode)

    def finish(self, step: Dispatch, num_rows: int | None, epoch: int) -> tuple[DispatchOutput, DispatchHandle]:
        """Output and handle; `num_rows` trims compact layouts, None leaves worst-case shapes."""
        step.state.num_rows = num_rows
        rows = self._outputs.rows[0] if num_rows is None else num_rows
        tokens, scales = self._outputs.delivered(step.slot, step.scales, rows)
        numbers: dict[str, Any] = self._outputs.trimmed(step.outputs, rows)
        out = DispatchOutput(layout=self._outputs.layout, tokens=tokens, scales=scales, **numbers)
        handle = DispatchHandle(
            owner=0, seq=step.seq, num_tokens=step.num_tokens, mode=step.mode, epoch=epoch, state=step.state
        )
        return out, handle

    def buffers(self, step: Dispatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""
        tokens, scales = self._outputs.delivered(step.slot, step.scales, self._outputs.rows[0])
        counts = step.outputs["counts"]
        assert counts is not None
        return tokens, scales, counts

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def blank_state(self, num_tokens: int) -> DispatchState:
        """Buffers for a new routing."""
        carried = self._empty((self._state_map.carried_bytes,), torch.uint8)
        routing = self._empty((self._state_map.routing_bytes,), torch.uint8)
        return DispatchState(routing, carried, carried, self._empty((num_tokens, self._config.topk), torch.float32))

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        """See `base.Transport`."""
        routing, carried, routing_id, topk_weights = handle.state
        return replace(handle, state=DispatchState(routing, routing_id, carried, topk_weights))

    def _state(self, args: DispatchArgs) -> DispatchState:
        """Buffers for a new routing; with `previous`, only those that are not shared with it."""
        previous: DispatchState | None = None if args.previous is None else args.previous.state
        carried = self._empty((self._state_map.carried_bytes,), torch.uint8)
        own_weights = args.topk_weights.clone() if self._config.exact_combine else args.topk_weights
        if previous is not None:
            return DispatchState(previous.routing, previous.routing_id, carried, own_weights, previous.num_rows)
        return DispatchState(self._empty((self._state_map.routing_bytes,), torch.uint8), carried, carried, own_weights)

    def _addresses(self, state: DispatchState) -> dict[str, int]:
        """Pointers that dispatch and combine have in common, by their names in both argument records."""
        where, base = self._state_map, state.routing.data_ptr()
        return {
            "routing_id": state.routing_id.data_ptr(),
            "routes": base + where.routes,
            "dst_rows": base + where.dst_rows,
            "weights": state.carried.data_ptr() + where.weights,
            "tokens": base + where.tokens,
            "source_rows": base + where.source_rows,
        }

    # Combine.

    def combine(self, args: CombineArgs) -> tuple[Call, Callable[[torch.Tensor | None], Any]]:
        """Prepare a combine. Returns (call, receive); `receive(out) -> (z, weights)` sets the arguments of the receive
        phase."""
        c, handle = self._config, args.handle
        state: DispatchState = handle.state
        if args.topk_weights is not None:
            state = replace(state, topk_weights=args.topk_weights if args.at_once else args.topk_weights.clone())
        slot, seq = self._num_combines % self.sizes.shape.combine_slots, self._num_combines + 1
        y = _aligned(args.y)
        op = self._empty((abi.OP_WORDS,), torch.int64)
        record = abi.CombineArgs(
            world=self.tables.world, num_tokens=handle.num_tokens, slot=slot, apply_weights=int(args.apply_weights),
            mode=int(plan.algorithm(c, handle.mode) is Mode.HT), op=op.data_ptr(), y=y.data_ptr(),
            row_weights=_pointer(args.row_weights), topk_weights=state.topk_weights.data_ptr(),
            positional=int(c.resolved_layout is Layout.RANK_MAJOR), pipelines=self._pipeline_stages,
            **self._addresses(state),
        )  # fmt: skip
        variant, launch = self._combine[handle.mode]
        call = Call(variant, launch, record, [y, op, args, state])

        def receive(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            z = out if out is not None and out.data_ptr() % _ROW == 0 else self._empty(
                (handle.num_tokens, c.hidden_size), c.resolved_output_dtype
            )  # fmt: skip
            weights = None
            if args.row_weights is not None:
                weights = self._empty((handle.num_tokens, c.topk), torch.float32)
            record.z, record.z_weights = z.data_ptr(), _pointer(weights)
            call.keep += [z, weights]
            self._num_combines = seq if args.at_once else self._num_combines
            return z, weights

        if not args.at_once:
            self._num_combines = seq  # its send phase follows; otherwise both phases, when `receive` has its memory
        return call, receive

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """Rows in the shape of the handle's tokens, in any memory: kernels read expert rows by address."""
        return self._empty((*handle.rows_shape, self._config.hidden_size), self._config.resolved_output_dtype)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """float32 [L, slots] | [N], 0 for rows of no token."""
        state: DispatchState = handle.state
        c, shape, where = self._config, torch.Size(handle.rows_shape), self._state_map
        positions = (c.group.size, c.max_tokens_per_rank, c.topk)
        dst_rows = _part(state.routing, where.dst_rows, positions, torch.int32)
        weights = _part(state.carried, where.weights, positions, torch.float32)
        sources = _part(state.routing, where.source_rows, (c.group.size, 1, 1), torch.int32)
        filled = torch.arange(c.max_tokens_per_rank, device=self._device)[None, :, None] < sources
        dst_rows = torch.where(filled & (dst_rows >= 0), dst_rows, shape.numel()).flatten().long()
        rows = torch.zeros(shape.numel() + 1, device=self._device)
        rows.scatter_(0, dst_rows, weights.flatten())
        return rows[:-1].view(shape)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        """int32 [R], a view of the routing."""
        state: DispatchState = handle.state
        return _part(state.routing, self._state_map.source_rows, (self._config.group.size,), torch.int32)


def _part(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of a byte buffer as a tensor."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + num_bytes].view(dtype).view(shape)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows, copied if they do not start at a multiple of 16 bytes, which the copy engine requires."""
    return rows if rows.data_ptr() % _ROW == 0 else rows.clone()


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
