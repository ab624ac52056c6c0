"""Pure arithmetic: sizes, byte map, grid and shared memory of every launch. Takes and returns values; touches no
GPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_kernels import jit, quant
from ep_kernels.config import FP8_BLOCK, MoEConfig, receive_rows
from ep_kernels.errors import ConfigError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.types import Layout, Mode, ScaleFormat

STATIC_BYTES = 1024
"""Shared memory that the compiler may take."""
SHARED_BYTES = 227 * 1024 - STATIC_BYTES
"""Dynamic shared memory that a block may take beside, on Hopper's and Blackwell's GPUs for servers."""
WARPS, LL_WARPS = jit.NUM_THREADS // 32, jit.WIDE_THREADS // 32
STAGE_EXTRA = 512
SEGMENT_UNIT = 512
"""Segments are multiples of this: whole fp8 scale blocks, and whole words of packed scales."""
MAX_SEGMENT = 16384
SMALL_SEGMENT = 2048
"""Steps of few tokens cut rows into segments as short as this, so that all warps share them."""
HT_BLOCKS = 64
"""Most blocks of an HT launch: enough to fill NVLink, the rest of the GPU stays free."""
LINK_GBPS = 350
"""NVLink bandwidth of a GPU, one way; measured on H200 (docs/lab/kernels/ht.md)."""
COMBINE_GBPS, DISPATCH_GBPS = {False: 60, True: 45}, {False: 25, True: 19}
"""GB/s that one block moves through its shared memory, in and out: HT combine by whether partials are fp8, HT dispatch
by whether it quantises. LINK_GBPS over this: the number of blocks that keeps the links busy (same source)."""
SEND_GBPS = 15
"""HT combine, copied rows: most that one block sends, because it takes long rows only when it has stages for them."""
RECV_PARTIAL_NS = 250
"""HT combine, copied rows: time of a block per received row, however short."""
REDUCE_ROW_NS = 130
"""HT combine, reduced rows: time of a block per row, per partial it makes, and per partial it receives."""
BLOCK_UNIT = 4
TILE_BYTES = 9 * 2048
"""Bytes of a tile of routed entries in HT dispatch (kernels/routing/ht_scan.cuh)."""
LAYOUTS = {Layout.EXPERT_MAJOR: 0, Layout.GROUPED: 1, Layout.RANK_MAJOR: 2, Layout.FLAT: 3}
CPP_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e4m3fn: "e4m3",
}  # fmt: skip
STAGED_ROWS = 6
"""Most rows of a partial that a warp of LL combine prefetches together, where rows are per expert. 3, 4 and 7 were
slower on 2 H200, 5 no faster: docs/lab/kernels/ll.md."""
LL_MAX_TOKENS = {
    Layout.RANK_MAJOR: 512,
    Layout.FLAT: 512,
    Layout.EXPERT_MAJOR: 512,
    Layout.GROUPED: 512,
}
"""AUTO's crossover by layout: most tokens per rank at which an LL pair is faster than an HT pair, bf16, H 7168, K 8.
Source: docs/results/2026-11-22-h200x4/auto.csv (grouped): LL is ahead at 512 (141 against 177 us) and still at 2048,
the largest step measured (512 against 545). Kept at 512 all the same: LL takes every multiprocessor, and its buffers
grow with the crossover. `crossdock tune` finds it for a machine."""
MAX_RANKS = abi.MAX_RANKS
"""Ranks of one NVLink domain; their addresses travel with each launch."""
DISPATCH_SENDERS = {(False, False): 0.15, (False, True): 0.3, (True, False): 0.12, (True, True): 0.3}
COMBINE_SENDERS = {(False, False): 0.4, (False, True): 0.4, (True, False): 0.5, (True, True): 0.6}
"""Shares of an LL launch's blocks that send, by whether rows are per expert and whether they become fp8 on the way: who
quantises needs more hands. Measured on 4 H200: docs/lab/kernels/ll.md."""
ENOUGH_SENDERS, FEW_SHARE = 9, 0.3
"""Few blocks need a larger share to fill the links, up to this many senders: on 24 blocks a pair of 128 tokens took 76
us with 7 senders, and 97 with 4 (rank-major, 4 H200, kernels of version 8: docs/lab/kernels/ll.md)."""
POWER_OF_TWO = {ScaleFormat.FP32: 0, ScaleFormat.UE8M0: 1, ScaleFormat.UE8M0_PACKED: 2}


MAX_SEND_STAGES, MAX_REDUCE_STAGES, MAX_PARTIAL_STAGES, MAX_RECV_STAGES = 12, 16, 4, 12
"""Maximum stages per pipeline, which is the number of its mbarriers."""
SEGMENT_INFO_BYTES = 16
LOAD_REQUEST_BYTES = 32 * 16
"""An entry of the queue to the load-issue warp: one request per lane (kernels/ht/combine_recv.cuh)."""
NUM_LONG_PARTIALS, SHORT_BYTES = 3, 8192
"""Stages for partials that are longer than SHORT_BYTES: each leaves one stage less for rows."""
MIN_CONVERT_STAGES, MIN_ROW_STAGES = 7, 4
"""Minimum stages for rows that become fp8 in place, and for other rows: those that a store still reads (3,
kernels/ht/combine_send.cuh), and those that end the pipeline: one for each of 4 reduce warps, else 1."""
REDUCE_WARPS, MAX_TEAM_WARPS, MIN_TEAM_WARPS = 8, 4, 2
"""Reduce warps, and the sizes of their teams (kernels/ht/combine_block.cuh, kernels/ht/combine_reduce.cuh)."""
MAX_SEGMENT_BYTES = 16384
"""Most bytes of a segment, which fill a stage."""
MAX_FP8_SEGMENT_BYTES = 14336
"""Most bytes of a segment where rows become fp8 in their stages: the scales, which lie behind the fp8 columns, are
first written when 8 KiB of the row have been read (common/quantize.cuh). A multiple of COLUMN_UNIT columns of two and
of four bytes."""
COLUMN_UNIT = 512
"""Segments of a row that has several: whole scale blocks, whole 16 bytes of scales."""
RECV_SHARE = 0.36
"""Part of the memory for rows and received partials that the latter get. Rows of several experts are summed before they
leave, so more bytes are loaded than received."""
COPIED_RECV_SHARE = 0.7
"""Share of the stages that receive, for copied rows: rows that wait in stages arrive late (docs/lab/kernels/ht.md)."""


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """Sizes in bytes, as in `abi.PipelineSizes`, and the offset of the first stage."""

    num_segments: int
    columns: int
    row_stage_bytes: int
    segment_bytes: int
    partial_stage_bytes: int
    num_row_stages: int
    num_partial_stages: int
    num_recv_stages: int
    stage_offset: int

    @property
    def num_bytes(self) -> int:
        num_partials = self.num_partial_stages + self.num_recv_stages
        return self.num_row_stages * self.row_stage_bytes + num_partials * self.partial_stage_bytes

    @property
    def combine_row_bytes(self) -> int:
        """A row of the combine receive buffer: segments with their scales."""
        return self.num_segments * self.segment_bytes

    def record(self) -> Any:
        return abi.PipelineSizes(*(getattr(self, name) for name, _ in abi.PipelineSizes._fields_))


def max_stages(in_place: bool) -> int:
    """Stages of all pipelines at most; each has a SegmentInfo."""
    return (MAX_SEND_STAGES if in_place else MAX_REDUCE_STAGES) + MAX_PARTIAL_STAGES + MAX_RECV_STAGES


def plan_stages(
    hidden: int, y_bytes: int, sent_bytes: int, copies: bool, in_place: bool, control_bytes: int, block_bytes: int
) -> PipelineStages:
    """As many stages as fit.

    Args:
        hidden: columns of a row.
        y_bytes, sent_bytes: of a column of y, and as sent: the same, or 1 = fp8 with scales.
        copies: rows are copied.
        in_place: rows are copied, or become fp8 in the stage in which they lie.
        control_bytes: shared memory in front of the stages.
        block_bytes: shared memory of a block.
    """
    max_segment = MAX_FP8_SEGMENT_BYTES if sent_bytes == 1 else MAX_SEGMENT_BYTES
    num_segments = -(-hidden * y_bytes // max_segment)
    columns = hidden if num_segments == 1 else _padded(-(-hidden // num_segments), COLUMN_UNIT)
    scales = _padded(-(-columns // FP8_BLOCK) * 4, 16) if sent_bytes == 1 else 0
    segment = _padded(columns * sent_bytes, 16) + scales
    row, partial = _padded(columns * y_bytes, 128), _padded(segment, 128)
    offset = _padded(control_bytes, 128)
    num_partials = 0 if in_place else MAX_PARTIAL_STAGES if partial <= SHORT_BYTES else NUM_LONG_PARTIALS
    left = block_bytes - offset - num_partials * partial
    num_recv = min(MAX_RECV_STAGES, int(left * (COPIED_RECV_SHARE if copies else RECV_SHARE)) // partial)
    num_rows = min(MAX_SEND_STAGES if in_place else MAX_REDUCE_STAGES, (left - num_recv * partial) // row)
    least = MIN_ROW_STAGES if copies or not in_place else MIN_CONVERT_STAGES
    assert num_rows >= least, f"stages of rows: expected at least {least}, got {num_rows}"
    if not in_place:
        teams = num_teams(columns, y_bytes, sent_bytes)
        assert num_partials >= teams, f"stages of partials: expected at least {teams}, one per team, got {num_partials}"
    return PipelineStages(num_segments, columns, row, segment, partial, num_rows, num_partials, num_recv, offset)


def num_teams(columns: int, y_bytes: int, sent_bytes: int) -> int:
    """Reduce teams, each of which takes every `num_teams`-th stage (kernels/ht/combine_reduce.cuh)."""
    max_columns = (MAX_FP8_SEGMENT_BYTES if sent_bytes == 1 else MAX_SEGMENT_BYTES) // y_bytes
    group = 32 * (4 if sent_bytes == 1 else 16 // y_bytes)
    max_groups = -(-max_columns // (MAX_TEAM_WARPS * group))
    return REDUCE_WARPS // (MIN_TEAM_WARPS if columns <= MIN_TEAM_WARPS * max_groups * group else MAX_TEAM_WARPS)


def _padded(num: int, unit: int) -> int:
    return -(-num // unit) * unit


@dataclass(frozen=True, slots=True)
class Sizes:
    """What follows from a MoEConfig alone; equal on all ranks, `capacity` and `num_local` apart.

    Attributes:
        num_keys: R * most local experts of any rank.
        num_local: L of this rank.
        scale_columns, scale_dtype: of the scales in `DispatchOutput`; columns 0 = none.
        row_bytes: payload of one row as it travels.
        capacity, capacities: receive capacity of this rank and of each rank (`config.receive_rows`).
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
    columns, dtype = quant.delivered_scales(c)
    grouped = max(n * k for n, k in zip(locals_, capacities, strict=True))
    rows_of = {Layout.EXPERT_MAJOR: grouped, Layout.RANK_MAJOR: ranks * c.max_tokens_per_rank}
    output_rows = {Layout.EXPERT_MAJOR: (num_local, capacity), Layout.RANK_MAJOR: (ranks, c.max_tokens_per_rank)}
    shape = _shape_of(c, columns * dtype.itemsize, rows_of.get(layout, max(capacities)))
    most = grouped if layout is Layout.EXPERT_MAJOR else 0
    records = ranks * c.max_tokens_per_rank * c.topk
    _check_limits(c, max(records, shape.num_partials * c.max_tokens_per_rank, most, *capacities))
    return Sizes(
        shape.num_keys, num_local, num_local if layout.per_expert else ranks, columns, dtype, shape.scale_bytes,
        shape.row_bytes, capacity, capacities, output_rows.get(layout, (capacity,)), shape,
    )  # fmt: skip


def _shape_of(c: MoEConfig, scale_bytes: int, capacity_rows: int) -> abi.Shape:
    experts, ranks = c.resolved_expert_map, c.group.size
    row_bytes = c.payload_columns * c.payload_dtype.itemsize
    return abi.Shape(
        size=ranks,
        max_tokens=c.max_tokens_per_rank,
        ll_tokens=ll_tokens(c),
        topk=c.topk,
        num_keys=ranks * experts.stride,
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
        capacity_rows=capacity_rows,
        ll=algorithm(c, c.mode) is not Mode.HT,
        ht=c.mode is not Mode.LL and c.network is None,
        exact=c.exact_combine,
        row_packets=_row_packets(c, row_bytes, scale_bytes),
        metadata_lines=-(-c.topk // abi.LINE_ENTRIES),
        count_lines=-(-experts.stride // abi.LINE_INTS) if c.resolved_layout.per_expert else 0,
        combine_packets=_combine_packets(c),
        weight_lines=-(-c.topk // abi.LINE_INTS),
        num_partials=c.topk if c.exact_combine else ranks,
        combine_row_bytes=combine_stages(c).combine_row_bytes,
        dispatch_slots=c.max_in_flight + (algorithm(c, c.mode) is not Mode.HT),
        combine_slots=c.max_in_flight + 1,
    )


def algorithm(c: MoEConfig, mode: Mode) -> Mode:
    """Whose kernels run a mode: over a network LL's run HT, too, with lines for every token. Bits are the same."""
    return Mode.LL if c.network is not None else mode


def ll_tokens(c: MoEConfig) -> int:
    """Most tokens per rank of a step that runs LL; at least 1, so that no table is empty."""
    if c.mode is not Mode.AUTO or c.network is not None:
        return c.max_tokens_per_rank
    crossover = LL_MAX_TOKENS[c.resolved_layout] if c.ll_max_tokens is None else c.ll_max_tokens
    return max(1, min(crossover, c.max_tokens_per_rank))


def _check_limits(c: MoEConfig, most_rows: int) -> None:
    if c.group.size > MAX_RANKS:
        raise ConfigError("group", f"at most {MAX_RANKS} ranks with transport nvlink", c.group.size)
    if most_rows >= 1 << 31:
        raise ConfigError("max_tokens_per_rank", "fewer than 2^31 rows, or records, per buffer", c.max_tokens_per_rank)


def _row_packets(c: MoEConfig, row_bytes: int, scale_bytes: int) -> int:
    """Packets of a row as LL moves it: its bytes and the caller's scales, or fp8 columns whose scales travel inside."""
    if c.quantize is True:
        return -(-c.hidden_size // abi.PACKET_COLUMNS)
    return -(-(row_bytes + scale_bytes) // abi.PACKET_DATA)


def _combine_packets(c: MoEConfig) -> int:
    moved = c.resolved_combine_dtype
    if moved is torch.float8_e4m3fn:
        return -(-c.hidden_size // abi.PACKET_COLUMNS)
    return -(-c.hidden_size * moved.itemsize // abi.PACKET_DATA)


@dataclass(frozen=True, slots=True)
class StateMap:
    """Byte offsets in the two buffers that hold a dispatch's routing (see `routing_state.StateParts`).

    Attributes:
        routes, dst_rows, tokens, source_rows, saved_counts: as in `abi.DispatchArgs`, in the first buffer, of
            `routing_bytes`; box rows (exact combine) behind the routes.
        weights: in the second, whose first words are `abi.DispatchArgs.op`; `carried_bytes`: its size.
    """

    routes: int
    dst_rows: int
    tokens: int
    source_rows: int
    saved_counts: int
    routing_bytes: int
    weights: int
    carried_bytes: int


def state_map(c: MoEConfig, sizes: Sizes) -> StateMap:
    """For T = M; each part 16-byte aligned."""
    positions = c.group.size * c.max_tokens_per_rank
    parts = {
        "routes": c.max_tokens_per_rank * c.topk * (ctypes.sizeof(abi.Route) + 4 * c.exact_combine),
        "dst_rows": positions * c.topk * 4,
        "tokens": positions * 4,
        "source_rows": c.group.size * 4,
        "saved_counts": (2 * sizes.num_groups + 3) * 4,
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
    segment_bytes: int
    cooperative: bool = False
    overlapped: bool = True
    num_senders: int = 0

    def work(self, phases: int) -> Any:
        """The kernel's record: phases 1 = send, 2 = receive, 3 = both."""
        return abi.Work(self.segment_bytes, self.stage_offset, phases, self.num_senders)


def quantize_launch(c: MoEConfig, num_sms: int) -> Launch:
    """Launch of the kernel that makes MXFP8 or NVFP4 of M rows."""
    blocks = c.max_tokens_per_rank * quant.delivered_scales(c)[0]
    return Launch(min(num_sms, -(-blocks // jit.NUM_THREADS)), 0, 0, 0)


def narrow_launch(c: MoEConfig) -> Launch:
    return Launch(-(-c.max_tokens_per_rank * c.topk // jit.NUM_THREADS), 0, 0, 0)


def _launch(num_blocks: int, control_bytes: int, row_bytes: int, num_rows: int, width: int) -> Launch:
    """Launch of HT dispatch; `width`: bytes loaded per byte sent."""
    offset = -(-control_bytes // 128) * 128
    per_stage = (SHARED_BYTES - offset) // (WARPS * jit.NUM_STAGES) - STAGE_EXTRA
    most = min(per_stage // width // SEGMENT_UNIT * SEGMENT_UNIT, MAX_SEGMENT)
    if most < SEGMENT_UNIT:
        raise ConfigError("num_experts", "few enough for one block's counters", f"{control_bytes} bytes of them")
    shared = -(-num_blocks * WARPS // num_rows)  # warps available per row
    segments = max(-(-row_bytes // most), min(shared, -(-row_bytes // SMALL_SEGMENT)))
    segment = -(-row_bytes // segments // SEGMENT_UNIT) * SEGMENT_UNIT * width
    total = offset + WARPS * jit.NUM_STAGES * (segment + STAGE_EXTRA)
    return Launch(num_blocks, total, offset, segment, cooperative=True)


def _ll_launch(num_blocks: int, control_bytes: int, share: float) -> Launch:
    """Some of the blocks send while the others receive; a lone block does both."""
    senders = max(1, int(num_blocks * share), min(ENOUGH_SENDERS, int(num_blocks * FEW_SHARE)))
    return Launch(num_blocks, control_bytes, 0, 0, num_senders=senders)


def _head_bytes(c: MoEConfig) -> int:
    """mbarriers, and a wait per peer."""
    size: int = c.group.size
    return 512 + (size + 1) // 2 * 16


def dispatch_launch(c: MoEConfig, sizes: Sizes, mode: Mode, num_sms: int) -> Launch:
    """How a dispatch runs on a GPU with `num_sms` multiprocessors (or that share of one): one block on each."""
    counters = sizes.num_keys + c.group.size
    # LL: tables of one block, for all tokens of a step.
    if mode is Mode.LL:
        words = c.num_experts + 2 * c.group.size + 2
        if c.resolved_layout.per_expert:
            stride = c.resolved_expert_map.stride
            words += 2 * sizes.num_keys + 2 * stride + c.group.size * stride
            masks = sizes.num_keys * -(-ll_tokens(c) // 32)
            words += masks if masks <= abi.MAX_MASK_WORDS else 0
        wide = -(-ll_tokens(c) // 32) * 32 + 2 * c.group.size
        control = _head_bytes(c) + 8 * wide + 4 * words
        if control > SHARED_BYTES:
            raise ConfigError(
                "max_tokens_per_rank, num_experts", "few enough for one block's tables", f"{control} bytes"
            )
        return _ll_launch(num_sms, control, DISPATCH_SENDERS[c.resolved_layout.per_expert, c.quantize is True])
    # HT: counters per warp, a tile of rows.
    groups = c.resolved_expert_map.stride if c.resolved_layout.per_expert else 0
    words = 4 * counters + 3 * c.group.size + 1 + groups + 1 + c.num_experts + 5
    control = _head_bytes(c) + TILE_BYTES + 2 * WARPS * counters + 4 * words
    blocks = num_sms if c.resolved_dispatch_sms else min(num_sms, dispatch_blocks(c, sizes))
    width = c.dtype.itemsize if c.quantize is True else 1
    return _launch(blocks, control, sizes.row_bytes, c.max_tokens_per_rank, width)


def _staged_bytes(c: MoEConfig, room: int) -> int:
    """Of the rows of a partial that a warp of LL combine has under way together; it has two such partials in hand
    (kernels/ll/combine_send.cuh)."""
    if c.exact_combine or not c.resolved_layout.per_expert:
        return 0
    row = 32 * 2 * (16 // c.resolved_combine_dtype.itemsize) * c.resolved_output_dtype.itemsize
    fit = room // (2 * LL_WARPS * row)
    if fit < 1:
        need = f"dtypes of which two rows per warp fit in {room} bytes of a block's shared memory"
        raise ConfigError("output_dtype, combine_dtype", need, f"{2 * LL_WARPS * row} bytes of them")
    return min(c.topk, STAGED_ROWS, fit) * row


def combine_launch(c: MoEConfig, sizes: Sizes, mode: Mode, num_sms: int, block_bytes: int = SHARED_BYTES) -> Launch:
    """How a combine runs; LL's on GPUs for workstations, too, whose blocks have less shared memory."""
    if mode is Mode.LL:
        fp8 = c.resolved_combine_dtype is torch.float8_e4m3fn
        share = COMBINE_SENDERS[c.resolved_layout.per_expert, fp8]
        offset = -(-(_head_bytes(c) + 8 * c.group.size) // 128) * 128
        staged = _staged_bytes(c, block_bytes - offset)
        launch = _ll_launch(num_sms, offset + 2 * LL_WARPS * staged, share)
        return replace(launch, stage_offset=offset, segment_bytes=staged)
    blocks = num_sms if c.resolved_combine_sms else min(num_sms, combine_blocks(c))
    found = combine_stages(c)
    return Launch(blocks, found.stage_offset + found.num_bytes, found.stage_offset, found.segment_bytes)


def _ranks_of_a_token(c: MoEConfig) -> float:
    """Mean number of ranks that a token goes to, uniform routing."""
    size: int = c.group.size
    return size * float(1 - (1 - 1 / size) ** c.topk)


def _enough_blocks(block_ns: float, over_links: float) -> int:
    """Blocks with which the links are the bottleneck, from the block time of a token and its bytes over the links."""
    if over_links == 0:
        return HT_BLOCKS
    return min(HT_BLOCKS, math.ceil(block_ns / over_links * LINK_GBPS / BLOCK_UNIT) * BLOCK_UNIT)


def dispatch_blocks(c: MoEConfig, sizes: Sizes) -> int:
    """Blocks of an HT dispatch with which the links are the bottleneck of a step of uniform routing.

    A row is loaded once and stored once for each rank. More blocks gain nothing, and are slower with skewed routing
    (docs/lab/kernels/ht.md). Per-expert layouts also copy rows on arrival and get the maximum.
    """
    if c.resolved_layout.per_expert:
        return HT_BLOCKS
    ranks, width = _ranks_of_a_token(c), c.dtype.itemsize if c.quantize is True else 1
    over_links = sizes.row_bytes * ranks * (c.group.size - 1) / c.group.size
    return _enough_blocks(sizes.row_bytes * (width + ranks) / DISPATCH_GBPS[c.quantize is True], over_links)


def combine_blocks(c: MoEConfig) -> int:
    """Blocks of an HT combine with which the links are the bottleneck of a step of uniform routing.

    Per token, a rank moves through shared memory: rows of y, sent partials, received partials, and z. The links carry
    the partials of other ranks. More blocks gain nothing, fewer leave the links idle.
    """
    size: int = c.group.size
    found, output = combine_stages(c), c.resolved_output_dtype.itemsize
    ranks = _ranks_of_a_token(c)
    partials = c.topk if c.exact_combine else ranks
    rows = c.topk if c.resolved_layout.per_expert else ranks
    own = 1 / size if _copies(c) else 0.0  # not copied
    row, moved = c.hidden_size * output, found.combine_row_bytes
    through = row * rows * (1 - own) + moved * partials * (2 - own) + row
    over_links = moved * partials * (size - 1) / size
    block_ns = through / COMBINE_GBPS[c.resolved_combine_dtype.itemsize == 1]
    if _copies(c):
        block_ns = max(block_ns, over_links / SEND_GBPS, partials * RECV_PARTIAL_NS)
    elif c.resolved_layout.per_expert and not c.exact_combine:
        block_ns = max(block_ns, (rows + 2 * partials) * REDUCE_ROW_NS)
    return _enough_blocks(block_ns, over_links)


def combine_stages(c: MoEConfig) -> PipelineStages:
    """The pipelines of a block of an HT combine in shared memory."""
    moved, output = c.resolved_combine_dtype, c.resolved_output_dtype
    single = c.exact_combine or not c.resolved_layout.per_expert
    control = _head_bytes(c) + -(-c.group.size // 4) * 16
    control += SEGMENT_INFO_BYTES * max_stages(single)
    control += LOAD_REQUEST_BYTES if _copies(c) else 0
    return plan_stages(
        c.hidden_size, output.itemsize, moved.itemsize, _copies(c), single, control, SHARED_BYTES
    )  # fmt: skip


def _copies(c: MoEConfig) -> bool:
    """Whether an HT combine copies rows unchanged."""
    single = c.exact_combine or not c.resolved_layout.per_expert
    return single and c.resolved_combine_dtype is c.resolved_output_dtype


LEAST, TOKENS_PER_BLOCK = 4, 4
SLICE_BYTES = 256 << 10
"""At least."""
LAG_BYTES = 2 << 20
"""A GPU that reads what a processor has just received slows what follows by a third: docs/lab/network-speed.md."""


def most_blocks(c: MoEConfig, asked: int | None, num_sms: int) -> int:
    """Of `num_sms`: as many as the caller asks for (None: all), but over a network by itself a few for few tokens.

    What blocks read of one place in host memory, each of them waits for the others' reads of it. Two H100, T = 1: a
    pair takes 84 to 96 us with 4 blocks, 126 to 159 with 16, and 310 to 440 with 132 (680 to 890 when each block read
    words by itself). 16 blocks move 20 GB/s to and from host memory: docs/lab/network-speed.md.
    """
    if c.network is None or asked is not None:
        return min(num_sms, asked or num_sms)
    return min(num_sms, max(LEAST, c.max_tokens_per_rank // TOKENS_PER_BLOCK))


def slice_rows(most_rows: int, row_bytes: int) -> int:
    """Rows of a slice, which leaves when it is staged and is read when it is here; 0: of so few rows there are none."""
    rows = max(-(-SLICE_BYTES // row_bytes), -(-most_rows // abi.MAX_SLICES))
    return rows if most_rows >= 2 * rows else 0


def slice_lag(network: NetworkConfig, slice_bytes: int) -> int:
    """How many slices later one is read: over sockets, `LAG_BYTES` later."""
    return -(-LAG_BYTES // slice_bytes) if slice_bytes and "tcp" in network.carrier else 0


def slices_of(shape: abi.Shape, stripe: int) -> tuple[int, int]:
    """Rows of a slice of dispatch, of combine. None, if it would take too many descriptors, each of `stripe`
    bytes at most."""
    partials = shape.ll_tokens * (shape.topk if shape.exact else 1)
    most_rows = ((shape.ll_tokens, shape.row_packets), (partials, shape.combine_packets))
    rows = [slice_rows(most, count * abi.PACKET_BYTES) for most, count in most_rows]
    most = max(rows[0] * shape.row_packets, rows[1] * shape.combine_packets) * abi.PACKET_BYTES
    fits = most // stripe + 2 <= abi.SLICE_PARTS  # it may begin and end within a stripe
    return (rows[0], rows[1]) if fits else (0, 0)
