"""What host and GPU share: records and the region's byte map, declared once here and rendered to C++ for the kernels.

`header()` is put in front of every kernel source, with static_asserts on sizes, so the two sides cannot disagree;
`fingerprint()` goes into the ticket, so two ranks with different byte maps never form a group.

A rank's region, which its peers write (D dispatch slots, C combine slots; each array 256-byte aligned):

    flags                u64 [FLAGS, R]            flag[kind][peer]: seq of `peer`; arrival counters: * ARRIVAL_TOTAL
                         u64 [R, ceil(M / CHUNK)]  HT, behind them, progress: last seq whose chunk is complete
    rows                     [D, capacity, H]      rows in their final place: output

HT; counts and arrivals must be zero before use:

    counts               16B [D, R, (keys + R)/2]  by source: pairs with their flag (routing/ht_counts.cuh)
    arrivals             u64 [D, R, M]             per-expert layouts, by (source, position): last seq whose row is here
    routing_ids          u64 [D, R]                by source: seq of the dispatch that made its routing
    metadata             16B [D, R, M, K]          by (source, position): local expert or -1, row, weight, token
    scales                   [D, R, M, S]          by (source, position); row-major ones of rank-wise layouts as `rows`
    combine_rows             [C, R, M, H]          by (expert rank, position): partials, fp8 scales; exact: [C, M, K, H]
    combine_weights      f32 [C, R, M, K]          numbers that travel beside them
    combine_routing_ids  u64 [C, R]                by expert rank

LL: LL128 lines and packets (layout/ll128.cuh); count and routing packets, 16 bytes stored as one. M' is the most tokens
per rank of a step that runs LL (AUTO: its crossover). Their flags, seq, must be zero before anybody writes:

    row_lines                [D, R, M', packets]   by (source, position): a row with its scales
    metadata_lines           [D, R, M', lines]     by (source, position): as metadata
    count_lines              [D, R, lines]         by source: rows per local expert; none in rank-wise layouts
    count_packets        u64 [D, R, 2]             by source: rows to this rank | routing age << 32, seq
    combine_lines            [C, R, M', packets]   as combine_rows, exact: [C, M', K, packets]
    weight_lines             [C, R, M', lines]     as combine_weights
    routing_packets      u64 [C, R, 2]             by expert rank: routing_id, seq
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

FLAGS = ("STARTED", "METADATA", "PAYLOAD", "COMBINE_STARTED", "COMBINE", "BARRIER", "LEFT_OUT", "SENT", "COMBINE_SENT")
"""The last two: what `peer` has sent, in its own flags, and in others' as they last read it (kernels/barrier.cuh)."""
OPS = ("dispatch", "combine", "barrier", "all_gather", "reduce_scatter", "all_reduce")
STOPS = ("RUNNING", "TIMED_OUT", "ABORTED", "GONE", "LEFT_OUT")
"""Why a rank stopped: not at all; a deadline; its host ended all waits; the peer is dead, or went on without it."""
DEAD, GIVEN_UP, ALSO_LEFT_OUT = 1, 2, 1 << 63
"""World.gone: known to be dead, or not waited for. Flag LEFT_OUT beside an epoch: that peer was left out, too."""
PHASES = ("blocks", "credit", "counts", "payload", "barrier", "shards", "sums")
DONE_COUNTERS = ("DISPATCH_SEND", "COMBINE_SEND")
OP_WORDS = 2
"""Device words of an operation: its seq, and the number of its latency record (common/trace.cuh)."""
MAX_SLOTS, MAX_RANKS = 66, 64
MAX_MASK_WORDS = 16384
"""LL dispatch: maximum words of a block's expert masks; above it, rows per expert are counted entry by entry."""
LINE_BYTES, PACKET_BYTES, PACKET_DATA, PACKET_COLUMNS = 128, 1024, 960, 896
LINE_INTS, LINE_ENTRIES, COUNT_PACKET_BYTES = 28, 7, 16
"""How LL rows travel: see kernels/layout/ll128.cuh."""
SAMPLE_CAPACITY, SAMPLE_WORDS, COMPLETE_RECORD = 4096, 9, 1 << 32
"""The last: last word of a complete latency record."""
ARRIVAL_TOTAL = 1 << 20
"""What an operation adds to a normalized arrival counter (flags METADATA and PAYLOAD), all blocks together."""
CHUNK = 4
"""HT combine: positions of a source that are announced together."""
RING_SIZE, SEQ_BITS, MAX_PARTS, MAX_SLICES, SLICE_PARTS = 4096, 18, 1024, 31, 32
"""Of the network: descriptors in a ring; immediates (box_words.cpp); slices of rows, beside the head, the last one."""
METADATA_BYTES, PAIR_BYTES, ALIGN, BOX_UNIT, PAGE = 16, 16, 256, 2 << 20, 4096


_WORDS: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "u8": ctypes.c_uint8,
}


class Records:
    """The records of one header, in the order in which they are declared.

    Args:
        base: records of a header that is included before this one.
    """

    def __init__(self, base: Records | None = None) -> None:
        self._types: dict[str, Any] = dict(base._types if base else _WORDS)
        self._declared: list[tuple[str, list[tuple[str, str, str]], int]] = []

    def declare(self, name: str, *fields: tuple[str, str, str], align: int = 0) -> Any:
        """Declare a struct. A field is (name, type, contract); a type is i32, u32, u64, f32, `T*`, `T[n]` or a
        record. `align`: bytes to which the GPU may take it to be aligned, so that it moves in one
        access; 0 = as C++ does."""
        members = []
        for field, kind, _ in fields:
            if kind.endswith("*"):
                members.append((field, ctypes.c_uint64))
            elif kind.endswith("]"):
                base, count = kind[:-1].split("[")
                members.append((field, self._types[base] * int(count)))
            else:
                members.append((field, self._types[kind]))
        struct = type(name, (ctypes.Structure,), {"_fields_": members, "__slots__": ()})  # no other names are taken
        self._types[name] = struct
        self._declared.append((name, list(fields), align))
        return struct

    def lines(self) -> Iterator[str]:
        """C++ declarations of every record."""
        for name, fields, align in self._declared:
            yield f"struct alignas({align}) {name} {{" if align else f"struct {name} {{"
            for field, kind, contract in fields:
                base, bracket, count = kind.partition("[")
                array = f"[{count}" if bracket else ""
                yield f"  {base} {field}{array};" + (f"  // {contract}" if contract else "")
            yield "};"
            size = ctypes.sizeof(self._types[name])
            yield f'static_assert(sizeof({name}) == {size}, "{name}: host and GPU differ");'


records = Records()
_record = records.declare

ARRAYS = (
    "counts", "arrivals", "routing_ids", "metadata", "scales", "rows", "combine_rows", "combine_weights",
    "combine_routing_ids", "row_lines", "metadata_lines", "count_lines", "count_packets", "combine_lines",
    "weight_lines", "routing_packets",
)  # fmt: skip
"""The arrays that have slots, in the order in which they lie."""
RegionMap = _record(
    "RegionMap",
    *[(name, "u64", "byte offset in the region") for name in ("flags", *ARRAYS)],
    *[(f"{name}_stride", "u64", "bytes from one slot to the next") for name in ARRAYS],
    ("num_bytes", "u64", "size of the region"),
)
Network = _record(
    "Network",
    ("remote", "u64", "ranks that are reached over the network, a bit each"),
    ("outboxes", "u64", "base of the [R] outboxes, which the network reads; of remote ranks alone there is memory"),
    ("inboxes", "u64", "the same of the inboxes, which it writes"),
    ("stride", "u64", "bytes from one box to the next"),
    ("stripe", "u64", "most bytes of a descriptor, which lie between two multiples of it"),
    (
        "words",
        "u64*",
        "pinned, [FLAGS, R] of remote ranks: their flags, as the network brings them; behind them [2, R] "
        "low 32 bits of the next dispatch, combine << 32 | its slices, a bit each",
    ),
    ("ring", "u8*", "pinned: descriptors (ep_kernels/network/native/ring.hpp)"),
    ("popped", "u64*", "pinned: descriptors that the network has taken"),
    ("rows", f"u64[{MAX_RANKS}]", "rows that the dispatch that runs has for a rank"),
    ("host_rows", f"u64[{MAX_RANKS}]", "rows that it has in the outbox of a rail, for all ranks of that host"),
    ("map", "RegionMap", "byte map of a box: a region's part that belongs to one source"),
    ("looking", f"u64[{MAX_RANKS}]", "1 = a thread reads a word of that rank"),
    ("slice_rows", "u64[2]", "rows of a slice of dispatch, of combine; 0 = one part alone says that rows are here"),
    ("rails", "u64", "remote ranks to which rows of a dispatch go, each for its host; a bit of their peer offset each"),
    ("members", f"u64[{MAX_RANKS}]", "by peer offset of a rail: ranks that read them there, by peer offset"),
    ("rail_of", f"u64[{MAX_RANKS}]", "by peer offset of a remote rank: the rail by which it gets rows, likewise"),
    ("carriers", f"u64[{MAX_RANKS}]", "of a remote source: the rank of this host that gets its rows, its rail here"),
    ("carried", f"u64[{MAX_RANKS}]", "likewise: that rank's inbox of it"),
    ("carrier_words", f"u64[{MAX_RANKS}]", "likewise: that rank's `words`, which say that rows are here"),
    ("seen", f"u64[{len(FLAGS) * MAX_RANKS}]", "[FLAGS, MAX_RANKS] words as a kernel last read them"),
    ("slices_seen", f"u64[{2 * MAX_RANKS}]", "[2, MAX_RANKS] slice_words as a kernel last read them"),
    ("staged", f"u64[{2 * MAX_RANKS * 32}]", "[2, MAX_RANKS, 32] packets of a slice that are in the outbox"),
    ("heads_done", "u64", "blocks that have written their part of a dispatch's head"),
    ("popped_seen", "u64", "`popped`, as a kernel last read it"),
    ("tail", "u64", "descriptors that kernels have pushed"),
    ("exact", "u64", "1 = combine is exact: token metadata say where the token's rows begin in the box"),
    ("slice_lag", "u64", "slices that must have come after one before it is read, unless all have come"),
)
State = _record(
    "State",
    ("items_taken", "u64[32]", "LL: work counters of the send warps: of dispatch at 0, of combine at 16"),
    ("dispatch_seq", "u64", "dispatches sent; lives on the device, so that a replayed graph goes on counting"),
    ("combine_seq", "u64", "combines sent"),
    ("barrier_seq", "u64", "barriers entered"),
    ("counted_dispatch_seq", "u64", "seq of the last dispatch that added to arrival counters (HT, for LL's too)"),
    ("chunks_taken", "u64", "HT combine, work counter: chunks to send; 0 between launches"),
    ("tokens_taken", "u64", "the same: batches of tokens to receive"),
    ("aborted", "u64", "sticky: index into STOPS"),
    ("blocks_routed", "u64", "HT dispatch that runs: blocks whose routes are final"),
    ("segments_taken", "u64", "HT dispatch that runs, work counter: segments that all blocks share"),
    ("invalid_ids", "u64", "ids out of range seen by the dispatch that runs"),
    ("sample_head", "u64", "latency records begun"),
    ("blocks_done", f"u64[{len(DONE_COUNTERS)}]", "blocks that have finished the send phase, by operation"),
    ("dispatch_slot_seq", f"u64[{MAX_SLOTS}]", "seq that used a dispatch slot last"),
    ("combine_slot_seq", f"u64[{MAX_SLOTS}]", "seq that used a combine slot last"),
    ("network", "Network", "NETWORK variants: how ranks of other hosts are reached; last, for the others' sake"),
)
Postmortem = _record(
    "Postmortem",
    ("status", "u64", "index into STOPS; written last"),
    ("op", "u64", "index into OPS"),
    ("phase", "u64", "index into PHASES"),
    ("peer", "u64", "who was waited for"),
    ("expected", "u64", "seq waited for"),
    ("seen", "u64", "seq last seen, 0 = not known; LEFT_OUT: what the peer's flag said"),
    ("waited_ns", "u64", "how long"),
    ("block", "u64", "of the kernel that waited"),
)
RoutingMismatch = _record(
    "RoutingMismatch",
    ("status", "u64", "1 = ranks brought different routings to one operation; written last, cleared by the host"),
    ("op", "u64", "index into OPS"),
    ("peer", "u64", "first rank that differs"),
    ("mine", "u64", "seq of the dispatch whose routing this rank brought"),
    ("theirs", "u64", "that of the peer"),
)
HostPage = _record(
    "HostPage",
    ("abort", "u64", "set by the host: end every wait"),
    ("clock_ns", "u64", "GPU clock, written by barrier: the host relates it to its own"),
    ("dropped", "u64", "rows dropped here so far, past the receive capacity"),
    ("postmortem", "Postmortem", "the first wait that failed"),
    ("mismatch", "RoutingMismatch", "the first that the host has not read"),
)
Route = _record(
    "Route",
    ("rank", "i32", "destination; -1 no expert, -2 every copy is gone, -3 the id is out of range"),
    ("position", "i32", "of the token's row at that rank, among this source's rows"),
    ("local_expert", "i32", "index there"),
    ("dst_row", "i32", "row there, -2 = dropped; LL: relative to the first row of this source for the expert"),
    align=16,
)
World = _record(
    "World",
    ("rank", "i32", "this rank"),
    ("size", "i32", "R, rank slots"),
    ("hidden", "i32", "H"),
    ("topk", "i32", "K"),
    ("max_tokens", "i32", "M"),
    ("ll_tokens", "i32", "most tokens per rank of a step that runs LL: M, or AUTO's crossover where that is less"),
    ("num_experts", "i32", "E"),
    ("local_stride", "i32", "most local experts of any rank"),
    ("num_local", "i32", "L, local experts of this rank"),
    ("capacity", "i32", "receive capacity: slots per expert, or N"),
    ("alignment", "i32", "rows to which groups are padded"),
    ("num_in_flight", "i32", "P: views expire P dispatches later"),
    ("row_bytes", "i32", "payload bytes of a row as it travels"),
    ("scale_bytes", "i32", "bytes of a row's scales, 0 = none"),
    ("combine_row_bytes", "i32", "bytes of a combine row with its scales, padded to 16"),
    ("row_packets", "i32", "LL: packets of a row"),
    ("combine_packets", "i32", "LL: packets of a combine row"),
    ("metadata_lines", "i32", "LL: lines of a row's metadata"),
    ("count_lines", "i32", "LL: lines of a source's counts per expert, 0 in rank-wise layouts"),
    ("first_id", "i32", "rank-wise layouts: what local experts count from in the caller's ids"),
    ("absent_id", "i32", "the caller's id of an expert that is not here"),
    ("filled_rows", "i32", "FLAT: rows whose ids the caller reads though they did not come; 0 = none"),
    ("timeout_ns", "u64", "deadline of every wait"),
    ("peers", f"u64[{MAX_RANKS}]", "[R] base of each rank's region as mapped here"),
    ("active", "u8*", "[R] 1 = takes part"),
    ("experts", "i32*", "[E, 4] first active replica's rank (-2: none) and slot, number of replicas, first of them"),
    ("replica_ranks", "i32*", "[replicas] rank of a replica"),
    ("replica_slots", "i32*", "[replicas] its expert slot there"),
    ("capacities", "i32*", "[R] receive capacity of each rank"),
    ("state", "State*", "this rank's counters"),
    ("host", "HostPage*", "pinned host memory"),
    ("gone", "u64*", "[R] pinned: not 0 = the rank is not waited for; GONE_DEAD = its process is known to be dead"),
    ("block_counts", "u8*", "[pairs, blocks] pairs of counters with their flag (kernels/routing/ht_counts.cuh)"),
    ("zeros", "u8*", "[H] a row of zeros"),
    ("samples", "u64*", f"[{SAMPLE_CAPACITY}, {SAMPLE_WORDS} + R] ring of latency records, device memory"),
    ("map", "RegionMap", "byte map, equal on all ranks but for `rows` past the end"),
)
Work = _record(
    "Work",
    ("segment_bytes", "u32", "HT dispatch: of a row's segment; LL combine: of a partial's prefetched rows"),
    ("stage_offset", "u32", "where the stages start in shared memory"),
    ("phases", "u32", "1 = send, 2 = receive, 3 = both"),
    ("num_senders", "u32", "LL: blocks that send; the others receive. All of them: each does both"),
)
PipelineSizes = _record(
    "PipelineSizes",
    ("num_segments", "i32", "of a row"),
    ("columns", "i32", "of a segment; the last may have less"),
    ("row_stage_bytes", "u32", "of a stage for a segment of y"),
    ("segment_bytes", "u32", "of a segment as it travels, scales included"),
    ("partial_stage_bytes", "u32", "of a stage for one"),
    ("num_row_stages", "u32", "stages for segments of y"),
    ("num_partial_stages", "u32", "stages for segments that this block reduces; 0 = rows travel from where they lie"),
    ("num_recv_stages", "u32", "stages for received segments"),
)
DispatchArgs = _record(
    "DispatchArgs",
    ("world", "World", ""),
    ("work", "Work", ""),
    ("num_tokens", "i32", "T"),
    ("slot", "i32", "dispatch slot, chosen by the host, equal on all ranks"),
    ("scale_row_stride", "i32", "packed scales: elements between rows, 0 = row-major bytes"),
    ("scale_column_stride", "i32", "packed scales: elements between columns"),
    ("scale_group_stride", "i32", "packed scales, EXPERT_MAJOR and RANK_MAJOR: elements between groups"),
    ("power_of_two", "i32", "quantiser: 0 = fp32 scales, 1 = powers of two, 2 = packed powers of two"),
    ("cached", "i32", "1 = the routing of an earlier dispatch is used again"),
    ("op", "u64*", "[2] device words of this operation: seq, number of its latency record"),
    ("routing_id", "u64*", "[1] cached: seq of the dispatch that made the routing"),
    ("x", "u8*", "[T, H] caller's rows"),
    ("x_scales", "u8*", "[T, S] caller's scales, null = none"),
    ("topk_ids", "i32*", "[T, K] logical experts"),
    ("topk_weights", "f32*", "[T, K]"),
    ("routes", "Route*", "[T, K] out (cached: in); exact over a network: behind M * K of them box rows (ll128.cuh)"),
    ("valid", "u8*", "[T] out: 0 where every copy of a chosen expert is gone"),
    ("num_invalid_ids", "i32*", "[1] out"),
    ("dst_rows", "i32*", "[R, M, K] out (HT, cached: in): row that serves (source, position, k), -1 none, -2 dropped"),
    ("weights", "f32*", "[R, M, K] out: weights as sent, 0 where dst_rows are -1"),
    ("tokens", "i32*", "[R, M] out: token index at its source, or first row in its box (HT, cached: not touched)"),
    ("source_rows", "i32*", "[R] out (HT, cached: in): rows (positions) that each source sent"),
    ("saved_counts", "i32*", "[2 G + 3] out (HT, cached: in): counts [G], offsets [G + 1], rows, dropped; G = L or R"),
    ("counts", "i32*", "[L] or [R] out: DispatchOutput.counts"),
    ("offsets", "i32*", "[L+1] out, GROUPED, or null"),
    ("num_rows", "i32*", "[1] out"),
    ("num_dropped", "i32*", "[1] out"),
    ("out_scales", "u8*", "scales in their final layout, or null"),
    ("out_ids", "i32*", "[R, M, K] or [N, K] ids of the rows' experts, rank-wise layouts"),
    ("out_weights", "f32*", "same shape"),
)
CombineArgs = _record(
    "CombineArgs",
    ("world", "World", ""),
    ("work", "Work", ""),
    ("num_tokens", "i32", "T of the dispatch"),
    ("slot", "i32", "combine slot"),
    ("apply_weights", "i32", "0 = sum rows as they are"),
    ("mode", "i32", "0 = LL, 1 = HT: for the latency record"),
    ("positional", "i32", "LL: 1 = the row of y is source * M + position"),
    ("pipelines", "PipelineSizes", "HT: stages in shared memory"),
    ("op", "u64*", "[2] device words of this operation"),
    ("routing_id", "u64*", "[1] seq of the dispatch that made the routing"),
    ("y", "u8*", "[rows, H] expert output, output dtype"),
    ("row_weights", "f32*", "[rows] or [rows, K], null = none"),
    ("dst_rows", "i32*", "[R, M, K] of the dispatch"),
    ("weights", "f32*", "[R, M, K]"),
    ("tokens", "i32*", "[R, M]"),
    ("source_rows", "i32*", "[R]"),
    ("routes", "Route*", "[T, K]"),
    ("topk_weights", "f32*", "[T, K] of the dispatch (exact combine)"),
    ("z", "u8*", "[T, H] out, output dtype"),
    ("z_weights", "f32*", "[T, K] out, or null"),
)
QuantizeArgs = _record(
    "QuantizeArgs",
    ("num_tokens", "i32", "T"),
    ("hidden", "i32", "H, a multiple of 16"),
    ("x", "u8*", "[T, H] of the variant's type, 16-byte aligned"),
    ("global_scale", "f32*", "[1] NVFP4's"),
    ("rows", "u8*", "[T, H] or [T, H / 2] out"),
    ("scales", "u8*", "[T, ceil(H / 32)] or [T, H / 16] out"),
)
BarrierArgs = _record(
    "BarrierArgs",
    ("world", "World", ""),
    ("left_out_epoch", "u64", "0 = meet; else only leave out ranks that take no part: the others go on in this epoch"),
)

_PRELUDE = """// Generated by ep_kernels/kernels/abi.py: what host and GPU share. Do not edit.
#pragma once
namespace ep {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using f32 = float;
"""


def header() -> str:
    """C++ declarations of every record and constant above."""
    lines = [_PRELUDE, *(f"constexpr u32 FLAG_{name} = {i};" for i, name in enumerate(FLAGS))]
    lines += [f"constexpr u32 OP_{name.upper()} = {i};" for i, name in enumerate(OPS)]
    lines += [f"constexpr u64 STOP_{name} = {i};" for i, name in enumerate(STOPS)]
    lines += [f"constexpr u32 PHASE_{name.upper()} = {i};" for i, name in enumerate(PHASES)]
    lines += [f"constexpr u32 DONE_{name} = {i};" for i, name in enumerate(DONE_COUNTERS)]
    lines += [f"constexpr i32 MAX_RANKS = {MAX_RANKS}, MAX_MASK_WORDS = {MAX_MASK_WORDS};"]
    lines += [f"constexpr u64 GONE_DEAD = {DEAD}, ALSO_LEFT_OUT = {ALSO_LEFT_OUT}ull;"]
    lines.append(f"constexpr i32 NUM_FLAGS = {len(FLAGS)}, CHUNK = {CHUNK}, PAIR_BYTES = {PAIR_BYTES};")
    lines += [f"constexpr u32 SAMPLE_CAPACITY = {SAMPLE_CAPACITY}, SAMPLE_WORDS = {SAMPLE_WORDS};"]
    network = ("COUNT_PACKET_BYTES", "RING_SIZE", "SEQ_BITS", "MAX_SLICES")
    lines += [f"#define {name} {globals()[name]}u" for name in network]  # constants would move code without them
    return "\n".join([*lines, *records.lines(), "}  // namespace ep", ""])


def fingerprint(sources: str) -> str:
    """Hash of the byte map and of the kernels that read it."""
    return hashlib.sha256((header() + sources).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes from which the byte map follows; equal on all ranks.

    Attributes:
        size, max_tokens, ll_tokens, topk, num_keys: R, M, M', K, R * most local experts of any rank.
        row_bytes, scale_bytes: payload and scales of one row.
        capacity_rows: most rows of `rows` on any rank.
        ll, ht, exact: whether the mode may come to use it; whether combine returns each routed row by itself.
        row_packets, metadata_lines: LL: packets of a row, lines of its metadata.
        count_lines: LL: lines of a source's counts per expert; 0 in rank-wise layouts.
        combine_packets, weight_lines: LL: packets of a combine row, lines of the numbers beside it.
        num_partials: rows of a token in a combine slot: R, or K (exact); in a box 1, or K.
        combine_row_bytes, dispatch_slots, combine_slots: bytes of each; D, C.
    """

    size: int
    max_tokens: int
    ll_tokens: int
    topk: int
    num_keys: int
    row_bytes: int
    scale_bytes: int
    capacity_rows: int
    ll: bool
    ht: bool
    exact: bool
    row_packets: int
    metadata_lines: int
    count_lines: int
    combine_packets: int
    weight_lines: int
    num_partials: int
    combine_row_bytes: int
    dispatch_slots: int
    combine_slots: int


def count_pairs(num_counters: int) -> int:
    """Pairs of counters of HT dispatch: two counters in each."""
    return num_counters // 2 + 1


def region_map(shape: Shape) -> Any:
    """The byte map of a region: a filled `RegionMap`."""
    positions, combine_rows = shape.size * shape.max_tokens, shape.num_partials * shape.max_tokens
    ll_positions, ll_combine_rows = shape.size * shape.ll_tokens, shape.num_partials * shape.ll_tokens
    ll_dispatch, ll_combine = shape.dispatch_slots * shape.ll, shape.combine_slots * shape.ll
    ht_dispatch, ht_combine = shape.dispatch_slots * shape.ht, shape.combine_slots * shape.ht
    arrays = (
        ("flags", 1, (len(FLAGS) + -(-shape.max_tokens // CHUNK) * shape.ht) * shape.size * 8),
        ("counts", ht_dispatch, shape.size * count_pairs(shape.num_keys + shape.size) * PAIR_BYTES),
        ("arrivals", ht_dispatch * (shape.count_lines > 0), positions * 8),
        ("routing_ids", ht_dispatch, shape.size * 8),
        ("metadata", ht_dispatch, positions * shape.topk * METADATA_BYTES),
        ("scales", ht_dispatch, max(positions, shape.capacity_rows * (shape.count_lines == 0)) * shape.scale_bytes),
        ("rows", shape.dispatch_slots, shape.capacity_rows * shape.row_bytes),
        ("combine_rows", ht_combine, combine_rows * shape.combine_row_bytes),
        ("combine_weights", ht_combine, positions * shape.topk * 4),
        ("combine_routing_ids", ht_combine, shape.size * 8),
        ("row_lines", ll_dispatch, ll_positions * shape.row_packets * PACKET_BYTES),
        ("metadata_lines", ll_dispatch, ll_positions * shape.metadata_lines * LINE_BYTES),
        ("count_lines", ll_dispatch, shape.size * shape.count_lines * LINE_BYTES),
        ("count_packets", ll_dispatch, shape.size * COUNT_PACKET_BYTES),
        ("combine_lines", ll_combine, ll_combine_rows * shape.combine_packets * PACKET_BYTES),
        ("weight_lines", ll_combine, ll_positions * shape.weight_lines * LINE_BYTES),
        ("routing_packets", ll_combine, shape.size * COUNT_PACKET_BYTES),
    )
    result, offset = RegionMap(), 0
    for name, slots, num_bytes in arrays:
        stride = -(-num_bytes // ALIGN) * ALIGN
        setattr(result, name, offset)
        if name != "flags":
            setattr(result, f"{name}_stride", stride)
        offset += slots * stride
    result.num_bytes = offset
    return result


def box_map(shape: Shape) -> Any:
    """The byte map of an outbox or inbox: what LL moves of a region with one source; no rows."""
    one = replace(shape, size=1, max_tokens=shape.ll_tokens, capacity_rows=0, ll=True, ht=False)
    return region_map(one if shape.exact else replace(one, num_partials=1))


def box_row_bytes(shape: Shape) -> int:
    """Of the first bytes of a box, which are rows of a dispatch alone, whole pages: only boxes of rails need them."""
    box = box_map(shape)
    return int(box.row_lines + shape.dispatch_slots * box.row_lines_stride) // PAGE * PAGE


def box_bytes(shape: Shape) -> int:
    """Of a box in memory: whole units in which drivers map device memory."""
    return -(-int(box_map(shape).num_bytes) // BOX_UNIT) * BOX_UNIT
