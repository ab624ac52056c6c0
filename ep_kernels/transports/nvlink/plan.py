"""Pure arithmetic: sizes, byte map, grid and shared memory of every launch. Takes and returns values; touches no
GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels import jit, quant
from ep_kernels.config import FP8_BLOCK, MoEConfig
from ep_kernels.device import abi
from ep_kernels.errors import ConfigError
from ep_kernels.routing import receive_rows
from ep_kernels.types import Layout, Mode, ScaleFormat

SHARED_BYTES = 227 * 1024 - 1024
"""Dynamic shared memory that a block of Hopper and Blackwell may take, less what the compiler takes."""
WARPS = jit.NUM_THREADS // 32
STAGE_EXTRA = 512
PIECE_UNIT = 512
"""Pieces are multiples of this: whole fp8 scale blocks, and whole words of packed scales."""
MAX_PIECE = 16384
SMALL_PIECE = 2048
"""Steps of few tokens cut rows as fine as this, so that all warps share them."""
HT_BLOCKS = 64
"""Blocks of an HT launch: enough to fill NVLink, the rest of the GPU stays free."""
TILE_BYTES = 10 * 2048
"""Of HT dispatch: a tile of routed entries (device/order.cuh)."""
LAYOUTS = {Layout.EXPERT_MAJOR: 0, Layout.GROUPED: 1, Layout.RANK_MAJOR: 2, Layout.FLAT: 3}
CPP_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e4m3fn: "e4m3",
}  # fmt: skip
LL_MAX_TOKENS = {
    Layout.RANK_MAJOR: 512,
    Layout.FLAT: 512,
    Layout.EXPERT_MAJOR: 512,
    Layout.GROUPED: 512,
}
"""AUTO's crossover by layout: most tokens per rank at which an LL pair is faster than an HT pair, bf16, H 7168, K 8.
Source: docs/results/2026-11-21-h200x4/auto.csv (grouped), taken before LL's rows travelled as lines, which made LL
faster: LL was ahead at 512 (199 against 244 us) and still at 2048, the largest step measured (675 against 787). Kept at
512 until HT is tuned and the other layouts are measured."""
MAX_RANKS = abi.MAX_RANKS
"""Ranks of one NVLink domain; their addresses travel with each launch."""
FEW_TOKENS = 16
"""LL steps of so few tokens per rank at most run one block on a multiprocessor, others two if they may fill the GPU."""
FEW, MANY = 0, 1
STEPS = (FEW_TOKENS, FEW_TOKENS + 1)
"""A number of tokens of each kind."""
SENDERS = {False: ((0.3, 0.2), (0.5, 0.4)), True: ((0.4, 0.3), (0.6, 0.6))}
"""By whether rows are per expert: shares of an LL launch's blocks that send, of few tokens and of many, in a dispatch
and in a combine. Measured on 4 H200: docs/kernels/ll.md."""
POWER_OF_TWO = {ScaleFormat.FP32: 0, ScaleFormat.UE8M0: 1, ScaleFormat.UE8M0_PACKED: 2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What follows from a MoEConfig alone; equal on all ranks, `capacity` and `num_local` apart.

    Attributes:
        num_keys: R * most local experts of any rank.
        num_local: L of this rank.
        num_groups: length of `DispatchOutput.counts`.
        scale_columns, scale_dtype: of the scales in `DispatchOutput`; columns 0 = none.
        scale_bytes: of one row.
        row_bytes: payload of one row as it travels.
        capacity, capacities: receive capacity of this rank and of each rank (`routing.receive_rows`).
        output_rows: leading shape of `tokens` without trimming.
        shape: from which the byte map follows.
    """

    num_keys: int
    num_local: int
    num_groups: int
    scale_columns: int
    scale_dtype: torch.dtype
    scale_bytes: int
    row_bytes: int
    capacity: int
    capacities: tuple[int, ...]
    output_rows: tuple[int, ...]
    shape: abi.Shape


def sizes_of(c: MoEConfig) -> Sizes:
    """All sizes of a configuration. Raises ConfigError where the kernels cannot hold it."""
    experts, ranks, layout = c.resolved_expert_map, c.group.size, c.resolved_layout
    locals_ = [experts.num_local_experts(rank) for rank in range(ranks)]
    num_local = locals_[c.group.rank]
    capacities = tuple(receive_rows(c, n) for n in locals_)
    capacity = capacities[c.group.rank]
    columns, dtype = _scales(c)
    grouped = max(n * k for n, k in zip(locals_, capacities, strict=True))
    rows_of = {Layout.EXPERT_MAJOR: grouped, Layout.RANK_MAJOR: ranks * c.max_tokens_per_rank}
    output_rows = {
        Layout.EXPERT_MAJOR: (num_local, capacity),
        Layout.RANK_MAJOR: (ranks, c.max_tokens_per_rank),
    }
    shape = _shape_of(c, columns * dtype.itemsize, rows_of.get(layout, max(capacities)))
    most = grouped if layout is Layout.EXPERT_MAJOR else 0
    _check_limits(c, max(shape.home_rows, most, *capacities))
    return Sizes(
        shape.num_keys, num_local, num_local if layout.per_expert else ranks, columns, dtype, shape.scale_bytes,
        shape.row_bytes, capacity, capacities, output_rows.get(layout, (capacity,)), shape,
    )  # fmt: skip


def _shape_of(c: MoEConfig, scale_bytes: int, capacity_rows: int) -> abi.Shape:
    experts, ranks, moved = c.resolved_expert_map, c.group.size, c.resolved_combine_dtype
    row_bytes = c.hidden_size * c.payload_dtype.itemsize
    return abi.Shape(
        size=ranks,
        max_tokens=c.max_tokens_per_rank,
        topk=c.topk,
        num_keys=ranks * experts.stride,
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
        capacity_rows=capacity_rows,
        ll=c.mode is not Mode.HT,
        ht=c.mode is not Mode.LL,
        row_units=_dispatch_units(c, row_bytes, scale_bytes),
        meta_lines=-(-c.topk // abi.LINE_METAS),
        count_lines=-(-experts.stride // abi.LINE_INTS) if c.resolved_layout.per_expert else 0,
        home_units=_combine_units(c),
        weight_lines=-(-c.topk // abi.LINE_INTS),
        home_rows=c.max_tokens_per_rank * (c.topk if c.exact_combine else ranks),
        home_row_bytes=-(-c.hidden_size * moved.itemsize // 16) * 16,
        home_scale_bytes=-(-c.hidden_size // FP8_BLOCK) * 4 if moved is torch.float8_e4m3fn else 0,
        dispatch_slots=c.max_in_flight + (c.mode is not Mode.HT),
        combine_slots=c.max_in_flight + 1,
    )


def _check_limits(c: MoEConfig, most_rows: int) -> None:
    if c.group.size > MAX_RANKS:
        raise ConfigError("group", f"at most {MAX_RANKS} ranks with transport nvlink", c.group.size)
    if most_rows >= 1 << 31:
        raise ConfigError("max_tokens_per_rank", "fewer than 2^31 rows per buffer", c.max_tokens_per_rank)


def _dispatch_units(c: MoEConfig, row_bytes: int, scale_bytes: int) -> int:
    """Units of a row as LL moves it: its bytes and the caller's scales, or fp8 columns whose scales travel inside."""
    if c.quantize:
        return -(-c.hidden_size // abi.UNIT_COLUMNS)
    return -(-(row_bytes + scale_bytes) // abi.UNIT_DATA)


def _combine_units(c: MoEConfig) -> int:
    moved = c.resolved_combine_dtype
    if moved is torch.float8_e4m3fn:
        return -(-c.hidden_size // abi.UNIT_COLUMNS)
    return -(-c.hidden_size * moved.itemsize // abi.UNIT_DATA)


def _scales(c: MoEConfig) -> tuple[int, torch.dtype]:
    if c.quantize:
        packed = c.scale_format is ScaleFormat.UE8M0_PACKED
        return quant.scale_columns(c.hidden_size, c.scale_format), torch.int32 if packed else torch.float32
    return c.scale_columns, c.scale_dtype


@dataclass(frozen=True, slots=True)
class StateMap:
    """Byte offsets in the two buffers that hold a dispatch's routing (see `engine.DispatchState`).

    Attributes:
        home, places, tokens, source_rows, kept: as in `abi.DispatchArgs`, in the first; `routing_bytes`: its size.
        weights: in the second, whose first words are `abi.DispatchArgs.op`; `carried_bytes`: its size.
    """

    home: int
    places: int
    tokens: int
    source_rows: int
    kept: int
    routing_bytes: int
    weights: int
    carried_bytes: int


def state_map(c: MoEConfig, sizes: Sizes) -> StateMap:
    """For T = M; each part 16-byte aligned."""
    positions = c.group.size * c.max_tokens_per_rank
    parts = {
        "home": c.max_tokens_per_rank * c.topk * ctypes.sizeof(abi.Home),
        "places": positions * c.topk * 4,
        "tokens": positions * 4,
        "source_rows": c.group.size * 4,
        "kept": (2 * sizes.num_groups + 3) * 4,
    }
    offsets, end = {}, 0
    for name, num_bytes in parts.items():
        offsets[name], end = end, end + -(-num_bytes // 16) * 16
    op = abi.OP_WORDS * 8
    return StateMap(**offsets, routing_bytes=end, weights=op, carried_bytes=op + positions * c.topk * 4)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel's launch: grid, shared memory, and the `Work` that tells the kernel. Cooperative where blocks meet,
    else overlapped with the kernel before it (programmatic dependent launch: 0.8 to 1.3 us less per LL pair on 2 H200,
    measured side by side)."""

    num_blocks: int
    shared_bytes: int
    stage_offset: int
    piece_bytes: int
    cooperative: bool = False
    overlapped: bool = True
    num_senders: int = 0
    per_sm: int = 1

    @property
    def num_sms(self) -> int:
        """Multiprocessors that it fills."""
        return -(-self.num_blocks // self.per_sm)

    def work(self, halves: int) -> Any:
        """The kernel's record: halves 1 = send, 2 = receive, 3 = both."""
        return abi.Work(self.piece_bytes, jit.NUM_STAGES, self.stage_offset, halves, self.num_senders)


def _launch(
    num_blocks: int, control_bytes: int, row_bytes: int, num_rows: int, cooperative: bool, width: int = 1
) -> Launch:
    """`width`: bytes that are loaded for each that travels."""
    offset = -(-control_bytes // 128) * 128
    per_stage = (SHARED_BYTES - offset) // (WARPS * jit.NUM_STAGES) - STAGE_EXTRA
    most = min(per_stage // width // PIECE_UNIT * PIECE_UNIT, MAX_PIECE)
    if most < PIECE_UNIT:
        raise ConfigError("num_experts", "few enough for one block's counters", f"{control_bytes} bytes of them")
    shared = -(-num_blocks * WARPS // num_rows)  # warps that one row can have
    pieces = max(-(-row_bytes // most), min(shared, -(-row_bytes // SMALL_PIECE)))
    piece = -(-row_bytes // pieces // PIECE_UNIT) * PIECE_UNIT * width
    total = offset + WARPS * jit.NUM_STAGES * (piece + STAGE_EXTRA)
    return Launch(num_blocks, total, offset, piece, cooperative)


def _ll_launch(c: MoEConfig, num_sms: int, control_bytes: int, shares: tuple[float, float], num_tokens: int) -> Launch:
    """Some of the blocks send while the others receive; a lone block does both. Two on a multiprocessor only where all
    multiprocessors may be filled: nothing would keep pairs together on some."""
    if control_bytes > SHARED_BYTES:
        raise ConfigError("num_experts", "few enough for one block's counters", f"{control_bytes} bytes of them")
    doubles = c.num_sms is None and num_tokens > FEW_TOKENS and 2 * control_bytes <= SHARED_BYTES
    size = MANY if doubles else FEW
    num_blocks = num_sms * (1 + size)
    senders = max(1, int(num_blocks * shares[size])) if num_blocks > 1 else 1
    return Launch(num_blocks, control_bytes, 0, 0, num_senders=senders, per_sm=1 + size)


def _head_bytes(c: MoEConfig) -> int:
    """mbarriers, and a wait per peer."""
    size: int = c.group.size
    return 512 + (size + 1) // 2 * 16


def dispatch_launch(c: MoEConfig, sizes: Sizes, mode: Mode, num_sms: int, num_tokens: int) -> Launch:
    """How a dispatch of T = `num_tokens` runs on a GPU with `num_sms` multiprocessors (or that share of one)."""
    counters = sizes.num_keys + c.group.size
    if mode is Mode.LL:
        words = c.num_experts + 2 * c.group.size + 2
        if c.resolved_layout.per_expert:
            stride = c.resolved_expert_map.stride
            words += 2 * sizes.num_keys + 2 * stride + c.group.size * stride
        shares = SENDERS[c.resolved_layout.per_expert][0]
        return _ll_launch(c, num_sms, _head_bytes(c) + 4 * words, shares, num_tokens)
    groups = c.resolved_expert_map.stride if c.resolved_layout.per_expert else 0
    words = 3 * counters + 2 * c.group.size + 1 + groups + 1 + 4
    control = _head_bytes(c) + TILE_BYTES + 2 * WARPS * counters + 4 * words
    blocks = num_sms if c.num_sms else min(num_sms, HT_BLOCKS)
    width = c.dtype.itemsize if c.quantize else 1
    return _launch(blocks, control, sizes.row_bytes, c.max_tokens_per_rank, True, width)


def combine_launch(c: MoEConfig, sizes: Sizes, mode: Mode, num_sms: int, num_tokens: int) -> Launch:
    """How a combine runs."""
    if mode is Mode.LL:
        return _ll_launch(c, num_sms, _head_bytes(c), SENDERS[c.resolved_layout.per_expert][1], num_tokens)
    blocks = num_sms if c.num_sms else min(num_sms, HT_BLOCKS)
    rows = c.max_tokens_per_rank * min(c.group.size, c.topk)
    return _launch(blocks, _head_bytes(c) + 4 * c.group.size, sizes.shape.home_row_bytes, rows, False)
