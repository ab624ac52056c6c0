"""One rank's operations on the device: outputs, argument records, launches. Knows tensors and the byte map; knows
neither processes nor how regions came to be mapped (see `transport`), so that tests can run many ranks on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.device import abi
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink import plan
from ep_kernels.transports.nvlink.tables import Tables
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode, ScaleFormat

SEND, RECEIVE, BOTH = 1, 2, 3
_OP_WORDS = 4
_ROW = 16


class Memory(Protocol):
    """This rank's region, as far as the engine cares."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over its bytes."""


@dataclass(slots=True)
class Call:
    """One operation, ready to be launched (whole or by halves).

    Attributes:
        variant: kernel.
        launch: grid and shared memory.
        args: its argument record; `args.work.halves` says which half runs.
        keep: tensors that the kernel reads or writes.
    """

    variant: jit.Variant
    launch: plan.Launch
    args: Any
    keep: list[Any] = field(default_factory=list)

    def halves(self, which: int) -> Any:
        """The argument record for SEND, RECEIVE or BOTH."""
        self.args.work = self.launch.work(which)
        return self.args


@dataclass(frozen=True, slots=True)
class DispatchState:
    """`DispatchHandle.state`: the routing of one dispatch, apart from any recycled buffer.

    Attributes:
        home: int32 [T, K, 2], rank and position of each of this rank's (token, k); rank -1 = none.
        places: int32 [R, M, K], row of `tokens` that serves (source, position, k); -1 = none, -2 = dropped.
        weights: float32 [R, M, K].
        tokens: int32 [R, M], index of the token at its source.
        source_rows: int32 [R], positions that each source filled.
        topk_weights: float32 [T, K]; a copy where combine reads it (exact), since callers may overwrite theirs.
    """

    home: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    source_rows: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(slots=True)
class Dispatch:
    """A dispatch under way: its call and what it writes."""

    call: Call
    outputs: dict[str, torch.Tensor | None]
    state: DispatchState
    trim: Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]
    seq: int
    num_tokens: int
    mode: Mode


class Engine:
    """Prepares and finishes the operations of one rank.

    Args:
        config: of the communicator.
        device: CUDA device.
        num_sms: multiprocessors that this rank may fill.
    """

    def __init__(self, config: MoEConfig, device: torch.device, num_sms: int) -> None:
        self._config, self._device = config, device
        self.sizes = plan.sizes_of(config)
        self.tables = Tables(config, self.sizes, device, num_sms)
        modes = (Mode.LL, Mode.HT)
        self._dispatch = {mode: plan.dispatch_launch(config, self.sizes, mode, num_sms) for mode in modes}
        self._combine = {mode: plan.combine_launch(config, self.sizes, mode, num_sms) for mode in modes}
        self._memory: Memory | None = None
        self._num_dispatches = self._num_combines = 0

    # What it needs.

    @property
    def region_bytes(self) -> int:
        """Size of the region."""
        return int(self.tables.world.map.num_bytes)

    @property
    def flag_bytes(self) -> int:
        """Bytes at the region's start that must be zero before peers write."""
        return int(self.tables.world.map.counts)

    def attach(self, memory: Memory, addresses: list[int]) -> None:
        """This rank's region, and the address of every rank's."""
        self._memory = memory
        self.tables.set_peers(addresses)

    def restart_slots(self) -> None:
        """All ranks choose slots from the first one again."""
        self._num_dispatches = self._num_combines = 0

    def restart_flags(self, dispatch: int, combine: int) -> None:
        """Counters of shares, which broken operations leave in between, as if so many operations were complete."""
        assert self._memory is not None
        kinds, size = len(abi.FLAGS), self._config.group.size
        flags = self._memory.view(self.tables.world.map.flags, (kinds, size), torch.int64)
        flags[abi.FLAGS.index("PAYLOAD")] = dispatch * abi.WHOLE
        flags[abi.FLAGS.index("COMBINE")] = combine * abi.WHOLE

    def variants(self) -> dict[jit.Variant, plan.Launch]:
        """Every kernel that this configuration can launch."""
        c = self._config
        modes = (Mode.LL, Mode.HT) if c.mode is Mode.AUTO else (c.mode,)
        return {
            **{self._dispatch_variant(mode): self._dispatch[mode] for mode in modes},
            **{self._combine_variant(): self._combine[mode] for mode in modes},
            jit.Variant("barrier"): plan.Launch(1, 0, 0, 0),
        }

    def _dispatch_variant(self, mode: Mode) -> jit.Variant:
        c = self._config
        quantized = plan.CPP_TYPES[c.dtype] if c.quantize else "u8"
        return jit.dispatch_variant(mode.value, plan.LAYOUTS[c.resolved_layout], quantized)

    def _combine_variant(self) -> jit.Variant:
        c = self._config
        kind = 2 if c.exact_combine else 0 if c.resolved_layout.per_expert else 1
        return jit.combine_variant(
            kind, plan.CPP_TYPES[c.resolved_output_dtype], plan.CPP_TYPES[c.resolved_combine_dtype]
        )

    def barrier(self) -> Call:
        """All ranks meet."""
        return Call(jit.Variant("barrier"), plan.Launch(1, 0, 0, 0), abi.BarrierArgs(self.tables.world))

    # Dispatch.

    def dispatch(self, args: DispatchArgs) -> Dispatch:
        """Everything but the launch."""
        c, sizes = self._config, self.sizes
        slot = self._num_dispatches % sizes.shape.dispatch_slots
        self._num_dispatches += 1
        x, num_tokens = _aligned(args.x), args.x.shape[0]
        state = self._state(args)
        outputs = self._outputs(num_tokens)
        scales, scale_args = self._scales(slot)
        op = self._empty((_OP_WORDS,), torch.int64)
        record = abi.DispatchArgs(
            world=self.tables.world, num_tokens=num_tokens, slot=slot, power_of_two=plan.POWER_OF_TWO[c.scale_format],
            op=op.data_ptr(), x=x.data_ptr(), x_scales=_pointer(args.scales), topk_ids=args.topk_ids.data_ptr(),
            topk_weights=args.topk_weights.data_ptr(), home=state.home.data_ptr(), places=state.places.data_ptr(),
            weights=state.weights.data_ptr(), tokens=state.tokens.data_ptr(), source_rows=state.source_rows.data_ptr(),
            valid=_pointer(outputs["valid"]), num_invalid_ids=_pointer(outputs["num_invalid_ids"]),
            counts=_pointer(outputs["counts"]), offsets=_pointer(outputs["offsets"]),
            num_rows=_pointer(outputs["num_rows"]), num_dropped=_pointer(outputs["num_dropped"]),
            out_ids=_pointer(outputs["topk_ids"]), out_weights=_pointer(outputs["topk_weights"]), **scale_args,
        )  # fmt: skip
        call = Call(self._dispatch_variant(args.mode), self._dispatch[args.mode], record, [x, op, args, scales])
        trim = self._trimmer(slot, scales)
        return Dispatch(call, outputs, state, trim, self._num_dispatches, num_tokens, args.mode)

    def finish(self, step: Dispatch, num_rows: int | None, epoch: int) -> tuple[DispatchOutput, DispatchHandle]:
        """Output and handle; `num_rows` trims compact layouts, None leaves worst-case shapes."""
        layout = self._config.resolved_layout
        rows = self.sizes.output_rows[0] if num_rows is None else num_rows
        tokens, scales = step.trim(rows)
        outputs = dict(step.outputs)
        if layout is Layout.FLAT:
            outputs["topk_ids"], outputs["topk_weights"] = (
                None if t is None else t[:rows] for t in (outputs["topk_ids"], outputs["topk_weights"])
            )
        out = DispatchOutput(layout=layout, tokens=tokens, scales=scales, **outputs)  # type: ignore[arg-type]
        handle = DispatchHandle(
            owner=0, seq=step.seq, num_tokens=step.num_tokens, mode=step.mode, epoch=epoch, state=step.state
        )
        return out, handle

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _state(self, args: DispatchArgs) -> DispatchState:
        c = self._config
        positions = (c.group.size, c.max_tokens_per_rank)
        return DispatchState(
            home=self._empty((args.x.shape[0], c.topk, 2), torch.int32),
            places=self._empty((*positions, c.topk), torch.int32),
            weights=self._empty((*positions, c.topk), torch.float32),
            tokens=self._empty(positions, torch.int32),
            source_rows=self._empty((c.group.size,), torch.int32),
            topk_weights=args.topk_weights.clone() if c.exact_combine else args.topk_weights,
        )

    def _outputs(self, num_tokens: int) -> dict[str, torch.Tensor | None]:
        c, layout = self._config, self._config.resolved_layout
        numbers = self._empty((3, 1), torch.int32)
        groups = self.sizes.num_local if layout.per_expert else c.group.size
        ids = None if layout.per_expert else (*self.sizes.output_rows, c.topk)
        return {
            "counts": self._empty((groups,), torch.int32),
            "offsets": self._empty((groups + 1,), torch.int32) if layout is Layout.GROUPED else None,
            "topk_ids": None if ids is None else self._empty(ids, torch.int32),
            "topk_weights": None if ids is None else self._empty(ids, torch.float32),
            "valid": self._empty((num_tokens,), torch.bool),
            "num_rows": numbers[0],
            "num_dropped": numbers[1],
            "num_invalid_ids": numbers[2],
        }

    def _packed(self) -> bool:
        return self._config.scale_format is ScaleFormat.UE8M0_PACKED

    def _scales(self, slot: int) -> tuple[torch.Tensor | None, dict[str, int]]:
        """(where the kernel writes scales, its arguments); rank-major rows of bytes are read in place."""
        sizes, layout = self.sizes, self._config.resolved_layout
        columns, rows = sizes.scale_columns, sizes.output_rows
        if columns == 0 or (layout is Layout.RANK_MAJOR and not self._packed()):
            return None, {}
        if not self._packed():
            scales = self._empty((*rows, columns), sizes.scale_dtype)
            return scales, {"out_scales": scales.data_ptr()}
        pad = _round_up(rows[-1], 4)
        scales = self._empty((*rows[:-1], columns, pad), torch.int32)
        exact = len(rows) == 1 and self._config.exact_shapes
        strides = {
            "scale_row_stride": 1,
            "scale_column_stride": 0 if exact else pad,
            "scale_group_stride": columns * pad,
        }
        return scales, {"out_scales": scales.data_ptr(), **strides}

    def _trimmer(
        self, slot: int, scales: torch.Tensor | None
    ) -> Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]:
        """trim(rows) -> (tokens, scales) of that many rows, views of the slot's buffers."""
        c, sizes, layout = self._config, self.sizes, self._config.resolved_layout
        byte_map, memory = self.tables.world.map, self._memory
        assert memory is not None
        staged = layout is Layout.RANK_MAJOR
        base, stride = (byte_map.staged, byte_map.staged_stride) if staged else (byte_map.rows, byte_map.rows_stride)
        offset = base + slot * stride
        compact = len(sizes.output_rows) == 1

        def trim(rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            lead = (rows,) if compact else sizes.output_rows
            tokens = memory.view(offset, (*lead, c.hidden_size), c.payload_dtype)
            if sizes.scale_columns == 0:
                return tokens, None
            if scales is None:
                at = byte_map.scales + slot * byte_map.scales_stride
                return tokens, memory.view(at, (*lead, sizes.scale_columns), sizes.scale_dtype)
            if not self._packed():
                return tokens, scales[:rows] if compact else scales
            if compact:
                return tokens, scales.as_strided((rows, sizes.scale_columns), (1, _round_up(rows, 4)))
            return tokens, scales.transpose(-1, -2)[..., : lead[-1], :]

        return trim

    # Combine.

    def combine(self, args: CombineArgs) -> tuple[Call, Callable[[torch.Tensor | None], Any]]:
        """(the call, receive(out) -> (z, weights), which completes its arguments for the receiving half)."""
        c, handle = self._config, args.handle
        state: DispatchState = handle.state
        slot = self._num_combines % self.sizes.shape.combine_slots
        self._num_combines += 1
        y = _aligned(args.y)
        op = self._empty((_OP_WORDS,), torch.int64)
        record = abi.CombineArgs(
            world=self.tables.world, num_tokens=handle.num_tokens, slot=slot, apply_weights=int(args.apply_weights),
            mode=int(handle.mode is Mode.HT), op=op.data_ptr(), y=y.data_ptr(), row_weights=_pointer(args.row_weights),
            places=state.places.data_ptr(), weights=state.weights.data_ptr(), tokens=state.tokens.data_ptr(),
            source_rows=state.source_rows.data_ptr(), home=state.home.data_ptr(),
            topk_weights=state.topk_weights.data_ptr(),
        )  # fmt: skip
        call = Call(self._combine_variant(), self._combine[handle.mode], record, [y, op, args])

        def receive(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            z = out if out is not None and out.data_ptr() % _ROW == 0 else self._empty(
                (handle.num_tokens, c.hidden_size), c.resolved_output_dtype
            )  # fmt: skip
            weights = None
            if args.row_weights is not None:
                weights = self._empty((handle.num_tokens, c.topk), torch.float32)
            record.z, record.z_weights = z.data_ptr(), _pointer(weights)
            return z, weights

        return call, receive

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """Rows in the shape of the handle's tokens; kernels read expert rows wherever they lie, so any memory will
        do.
        """
        return self._empty((*handle.rows_shape, self._config.hidden_size), self._config.resolved_output_dtype)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """float32 [L, slots] | [N], 0 for rows that serve nobody."""
        state: DispatchState = handle.state
        shape = torch.Size(handle.rows_shape)
        positions = torch.arange(self._config.max_tokens_per_rank, device=self._device)
        filled = positions[None, :, None] < state.source_rows[:, None, None]
        places = torch.where(filled & (state.places >= 0), state.places, shape.numel()).flatten().long()
        rows = torch.zeros(shape.numel() + 1, device=self._device)
        rows.scatter_(0, places, state.weights.flatten())
        return rows[:-1].view(shape)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The copy engine wants 16-byte addresses; a view that starts elsewhere is copied."""
    return rows if rows.data_ptr() % _ROW == 0 else rows.clone()


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
