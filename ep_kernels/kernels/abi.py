"""What host and GPU share: records and the region's byte map, declared once here and rendered to C++ for the kernels.

`header()` is put in front of every kernel source, with static_asserts on sizes, so the two sides cannot disagree;
`fingerprint()` goes into the ticket, so two ranks with different byte maps never form a group.

A rank's region, which its peers write (D dispatch slots, C combine slots; each array 256-byte aligned):

    flags    u64 [FLAGS, R]             flag[kind][peer]: last seq that `peer` announced; those of shares: * WHOLE
             u64 [R, ceil(M / CHUNK)]   HT, behind them: last seq whose partials of CHUNK positions `owner` has brought
    rows         [D, capacity, H]       rows in their final place: output

HT:

    counts   16B [D, R, (keys + R)/2]   by source: tagged pairs (routing/ht_counts.cuh): must be zero before use
    arrivals u64 [D, R, M]              per-expert layouts, by (source, position): last seq whose row is here: likewise
    origins  u64 [D, R]                 by source: seq of the dispatch that made the routing it brings
    meta     16B [D, R, M, K]           by (source, position): local expert or -1, place, weight, token
    scales       [D, R, M, S]           by (source, position); row-major ones of rank-wise layouts as `rows`, to be read
    home         [C, R, M, H]           partials coming home, by (owner, position); exact combine: [C, M, K, H]; fp8
                                        with their scales (kernels/ht/combine_reduce.cuh)
    home_weights f32 [C, R, M, K]       numbers carried home beside them
    home_origins u64 [C, R]             by owner: as origins

LL: lines and units of lines (layout/ll128.cuh), and heads, 16 bytes stored as one. M' is the most tokens per rank of
a step that runs LL (AUTO: its crossover). Their tags, seq, must be zero before anybody writes:

    lines        [D, R, M', units]      by (source, position): a row with its scales
    meta_lines   [D, R, M', lines]      by (source, position): as meta
    count_lines  [D, R, lines]          by source: rows per local expert; none in rank-wise layouts
    heads        u64 [D, R, 2]          by source: rows to this rank | age << 32, seq; routing of dispatch seq - age
    home_lines   [C, R, M', units]      as home, scales inside; exact combine: [C, M', K, units]
    weight_lines [C, R, M', lines]      as home_weights
    home_heads   u64 [C, R, 2]          by owner: as home_origins, seq
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Any

FLAGS = ("STARTED", "RECORDS", "PAYLOAD", "COMBINE_STARTED", "COMBINE", "BARRIER", "LEFT_OUT", "SENT", "COMBINE_SENT")
"""The last two: what `peer` has sent, in its own flags, and in others' as they last read it (kernels/barrier.cuh)."""
OPS = ("dispatch", "combine", "barrier")
STOPS = ("RUNNING", "TIMED_OUT", "ABORTED", "GONE", "LEFT_OUT")
"""Why a rank stopped: not at all; a deadline; its host said so; the peer is dead, or has gone on without it."""
DEAD, GIVEN_UP, OUT_TOO = 1, 2, 1 << 63
"""World.gone: known to be dead, or not waited for. Flag LEFT_OUT beside an epoch: that peer was left out, too."""
PHASES = ("blocks", "credit", "counts", "payload", "barrier")
TICKETS = ("DISPATCH_SEND", "COMBINE_SEND")
OP_WORDS = 2
"""Device words of an operation: its seq, and the number of its latency record (common/trace.cuh)."""
MAX_SLOTS = 66
MAX_RANKS = 64
MOST_SEEN = 16384
"""Most words in which an LL block notes which tokens want which expert; with more it counts entry by entry."""
LINE_BYTES, UNIT_BYTES, UNIT_DATA, UNIT_COLUMNS = 128, 1024, 960, 896
LINE_INTS, LINE_METAS, HEAD_BYTES = 28, 7, 16
"""How LL rows travel: see kernels/layout/ll128.cuh."""
SAMPLE_CAPACITY, SAMPLE_WORDS = 4096, 9
WHOLE_RECORD = 1 << 32
"""Last word of a latency record that is whole."""
WHOLE = 1 << 20
"""What an operation adds to a counter of shares (flags RECORDS and PAYLOAD), all blocks together."""
CHUNK = 4
"""HT combine: positions of a source that are announced together."""
META_BYTES = PAIR_BYTES = 16
ALIGN = 256

_TYPES: dict[str, tuple[str, Any]] = {
    "i32": ("i32", ctypes.c_int32),
    "u32": ("u32", ctypes.c_uint32),
    "u64": ("u64", ctypes.c_uint64),
    "f32": ("f32", ctypes.c_float),
    "u8": ("u8", ctypes.c_uint8),
}
_RECORDS: list[tuple[str, list[tuple[str, str, str]]]] = []

_ALIGNED: dict[str, int] = {}


def _record(name: str, *fields: tuple[str, str, str], align: int = 0) -> Any:
    """Declare a struct. A field is (name, type, contract); a type is i32, u32, u64, f32, `T*`, `T[n]` or a record.
    `align`: bytes to which the GPU may take it to be aligned, so that it moves in one access; 0 = as C++ does."""
    members = []
    for field, kind, _ in fields:
        if kind.endswith("*"):
            members.append((field, ctypes.c_uint64))
        elif kind.endswith("]"):
            base, count = kind[:-1].split("[")
            members.append((field, _TYPES[base][1] * int(count)))
        else:
            members.append((field, _TYPES[kind][1]))
    struct = type(name, (ctypes.Structure,), {"_fields_": members})
    _TYPES[name] = (name, struct)
    _RECORDS.append((name, list(fields)))
    _ALIGNED[name] = align
    return struct


State = _record(
    "State",
    ("taken", "u64[32]", "LL: what warps have taken to send, of the dispatch that runs at 0, of the combine at 16"),
    ("dispatch_seq", "u64", "dispatches sent; lives on the device, so that a replayed graph goes on counting"),
    ("combine_seq", "u64", "combines sent"),
    ("barrier_seq", "u64", "barriers entered"),
    ("dispatch_shared", "u64", "seq of the last dispatch that added shares: LL needs none, and HT makes up for it"),
    ("chunks_taken", "u64", "HT combine: chunks of rows that blocks have taken to send; 0 between launches"),
    ("tokens_taken", "u64", "the same of tokens that they have taken to sum"),
    ("aborted", "u64", "sticky: index into STOPS"),
    ("settled", "u64", "HT dispatch that runs: blocks that know where their rows go"),
    ("pool", "u64", "HT dispatch that runs: pieces taken of those that all blocks share"),
    ("invalid_ids", "u64", "ids out of range seen by the dispatch that runs"),
    ("sample_head", "u64", "latency records begun"),
    ("tickets", f"u64[{len(TICKETS)}]", "blocks that finished, per role"),
    ("dispatch_slot_seq", f"u64[{MAX_SLOTS}]", "seq that used a dispatch slot last"),
    ("combine_slot_seq", f"u64[{MAX_SLOTS}]", "seq that used a combine slot last"),
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
)
Difference = _record(
    "Difference",
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
    ("dropped", "u64", "rows dropped so far although none should be; only where World.report_dropped"),
    ("postmortem", "Postmortem", "the first wait that failed"),
    ("difference", "Difference", "the first that the host has not read"),
)
Home = _record(
    "Home",
    ("rank", "i32", "destination; -1 no expert, -2 every copy is gone, -3 the id is out of range"),
    ("position", "i32", "of the token's row at that rank, among this source's rows"),
    ("slot", "i32", "local expert there"),
    ("place", "i32", "LL: index among this source's rows for the expert. HT: final row there, -2 = dropped"),
    align=16,
)
ARRAYS = (
    "counts", "arrivals", "origins", "meta", "scales", "rows", "home", "home_weights", "home_origins",
    "lines", "meta_lines", "count_lines", "heads", "home_lines", "weight_lines", "home_heads",
)  # fmt: skip
"""The arrays that have slots, in the order in which they lie."""
RegionMap = _record(
    "RegionMap",
    *[(name, "u64", "byte offset in the region") for name in ("flags", *ARRAYS)],
    *[(f"{name}_stride", "u64", "bytes from one slot to the next") for name in ARRAYS],
    ("num_bytes", "u64", "size of the region"),
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
    ("num_in_flight", "i32", "P: views expire so many dispatches later"),
    ("report_dropped", "i32", "1 = the host is told of dropped rows; it does not read num_dropped"),
    ("row_bytes", "i32", "payload bytes of a row as it travels"),
    ("scale_bytes", "i32", "bytes of a row's scales, 0 = none"),
    ("home_row_bytes", "i32", "bytes of a combine row with its scales, padded to 16"),
    ("row_units", "i32", "LL: units of a row"),
    ("home_units", "i32", "LL: units of a combine row"),
    ("meta_lines", "i32", "LL: lines of a row's records"),
    ("count_lines", "i32", "LL: lines of a source's counts per expert, 0 in rank-wise layouts"),
    ("timeout_ns", "u64", "deadline of every wait"),
    ("peers", f"u64[{MAX_RANKS}]", "[R] base of each rank's region as mapped here"),
    ("active", "u8*", "[R] 1 = takes part"),
    ("experts", "i32*", "[E, 4] first active copy's rank (-2: none) and slot, number of copies, first of them"),
    ("copies_rank", "i32*", "[copies] rank of a copy"),
    ("copies_slot", "i32*", "[copies] local expert of a copy"),
    ("capacities", "i32*", "[R] receive capacity of each rank"),
    ("state", "State*", "this rank's counters"),
    ("host", "HostPage*", "pinned host memory"),
    ("gone", "u64*", "[R] pinned: not 0 = nobody waits for the rank; GONE_DEAD = its process is known to be dead"),
    ("block_counts", "u8*", "[pairs, blocks] tagged pairs of counters (kernels/routing/ht_counts.cuh)"),
    ("zeros", "u8*", "[H] a row of zeros"),
    ("samples", "u64*", f"[{SAMPLE_CAPACITY}, {SAMPLE_WORDS} + R] ring of latency records, device memory"),
    ("map", "RegionMap", "byte map, equal on all ranks but for `rows` past the end"),
)
Work = _record(
    "Work",
    ("piece_bytes", "u32", "bytes of a row that one warp moves at a time"),
    ("stage_offset", "u32", "where the pieces start in shared memory"),
    ("halves", "u32", "1 = send, 2 = receive, 3 = both"),
    ("num_senders", "u32", "LL: blocks that send; the others receive. All of them: each does both"),
)
Rings = _record(
    "Rings",
    ("num_pieces", "i32", "HT combine: pieces of a row"),
    ("columns", "i32", "columns of a piece; the last may have less"),
    ("row_bytes", "u32", "of a stage for a piece of y"),
    ("home_bytes", "u32", "of a piece as it travels, scales included"),
    ("made_bytes", "u32", "of a stage for one"),
    ("num_rows", "u32", "stages for pieces of y"),
    ("num_made", "u32", "stages for pieces that this block makes; 0 = they travel as they are"),
    ("num_home", "u32", "stages for pieces that have come home"),
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
    ("origin", "u64*", "[1] cached: seq of the dispatch that made the routing"),
    ("x", "u8*", "[T, H] caller's rows"),
    ("x_scales", "u8*", "[T, S] caller's scales, null = none"),
    ("topk_ids", "i32*", "[T, K] logical experts"),
    ("topk_weights", "f32*", "[T, K]"),
    ("home", "Home*", "[T, K] out (cached: in)"),
    ("valid", "u8*", "[T] out: 0 where every copy of a chosen expert is gone"),
    ("num_invalid_ids", "i32*", "[1] out"),
    ("places", "i32*", "[R, M, K] out (HT, cached: in): row that serves (source, position, k), -1 none, -2 dropped"),
    ("weights", "f32*", "[R, M, K] out: weights as sent, 0 where places are -1"),
    ("tokens", "i32*", "[R, M] out: token index at its source (HT, cached: not touched)"),
    ("source_rows", "i32*", "[R] out (HT, cached: in): rows (positions) that each source sent"),
    ("kept", "i32*", "[2 G + 3] out (HT, cached: in): counts [G], offsets [G + 1], num_rows, num_dropped; G = L or R"),
    ("counts", "i32*", "[L] or [R] out: DispatchOutput.counts"),
    ("offsets", "i32*", "[L+1] out, GROUPED, or null"),
    ("num_rows", "i32*", "[1] out"),
    ("num_dropped", "i32*", "[1] out"),
    ("out_scales", "u8*", "scales in their final layout, or null"),
    ("out_ids", "i32*", "[R, M, K] or [N, K] local ids, rank-wise layouts"),
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
    ("rings", "Rings", "HT: what lies in shared memory"),
    ("op", "u64*", "[2] device words of this operation"),
    ("origin", "u64*", "[1] seq of the dispatch that made the routing"),
    ("y", "u8*", "[rows, H] expert output, output dtype"),
    ("row_weights", "f32*", "[rows] or [rows, K], null = none"),
    ("places", "i32*", "[R, M, K] of the dispatch"),
    ("weights", "f32*", "[R, M, K]"),
    ("tokens", "i32*", "[R, M]"),
    ("source_rows", "i32*", "[R]"),
    ("home", "Home*", "[T, K]"),
    ("topk_weights", "f32*", "[T, K] of the dispatch (exact combine)"),
    ("z", "u8*", "[T, H] out, output dtype"),
    ("z_weights", "f32*", "[T, K] out, or null"),
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
    lines += [f"constexpr u32 TICKET_{name} = {i};" for i, name in enumerate(TICKETS)]
    lines += [f"constexpr i32 MAX_RANKS = {MAX_RANKS}, MOST_SEEN = {MOST_SEEN};"]
    lines += [f"constexpr u64 GONE_DEAD = {DEAD}, OUT_TOO = {OUT_TOO}ull;"]
    lines.append(f"constexpr i32 NUM_FLAGS = {len(FLAGS)}, CHUNK = {CHUNK}, PAIR_BYTES = {PAIR_BYTES};")
    lines += [f"constexpr u32 SAMPLE_CAPACITY = {SAMPLE_CAPACITY}, SAMPLE_WORDS = {SAMPLE_WORDS};"]
    for name, fields in _RECORDS:
        lines.append(f"struct alignas({_ALIGNED[name]}) {name} {{" if _ALIGNED[name] else f"struct {name} {{")
        for field, kind, contract in fields:
            base, bracket, count = kind.partition("[")
            array = f"[{count}" if bracket else ""
            lines.append(f"  {base} {field}{array};" + (f"  // {contract}" if contract else ""))
        lines.append("};")
        size = ctypes.sizeof(_TYPES[name][1])
        lines.append(f'static_assert(sizeof({name}) == {size}, "{name}: host and GPU differ");')
    return "\n".join([*lines, "}  // namespace ep", ""])


def fingerprint(sources: str) -> str:
    """Hash of the byte map and of the kernels that read it."""
    return hashlib.sha256((header() + sources).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes from which the byte map follows; equal on all ranks.

    Attributes:
        size, max_tokens, topk, num_keys: R, M, K, R * most local experts of any rank.
        ll_tokens: M', most tokens per rank of a step that runs LL.
        row_bytes, scale_bytes: payload and scales of one row.
        capacity_rows: most rows of `rows` on any rank.
        ll, ht: whether the mode may come to use it.
        row_units, meta_lines: LL: units of a row, lines of its records.
        count_lines: LL: lines of a source's counts per expert; 0 in rank-wise layouts.
        home_units, weight_lines: LL: of a combine row, of the numbers beside it.
        num_partials: rows of a token in a combine slot: R, or K (exact).
        home_row_bytes: bytes of each.
        dispatch_slots, combine_slots: D, C.
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
    row_units: int
    meta_lines: int
    count_lines: int
    home_units: int
    weight_lines: int
    num_partials: int
    home_row_bytes: int
    dispatch_slots: int
    combine_slots: int


def count_pairs(num_counters: int) -> int:
    """Room for the tagged pairs of HT dispatch: two counters in each."""
    return num_counters // 2 + 1


def region_map(shape: Shape) -> Any:
    """The byte map of a region: a filled `RegionMap`."""
    positions, home_rows = shape.size * shape.max_tokens, shape.num_partials * shape.max_tokens
    ll_positions, ll_home_rows = shape.size * shape.ll_tokens, shape.num_partials * shape.ll_tokens
    ll_dispatch, ll_combine = shape.dispatch_slots * shape.ll, shape.combine_slots * shape.ll
    ht_dispatch, ht_combine = shape.dispatch_slots * shape.ht, shape.combine_slots * shape.ht
    arrays = (
        ("flags", 1, (len(FLAGS) + -(-shape.max_tokens // CHUNK) * shape.ht) * shape.size * 8),
        ("counts", ht_dispatch, shape.size * count_pairs(shape.num_keys + shape.size) * PAIR_BYTES),
        ("arrivals", ht_dispatch * (shape.count_lines > 0), positions * 8),
        ("origins", ht_dispatch, shape.size * 8),
        ("meta", ht_dispatch, positions * shape.topk * META_BYTES),
        ("scales", ht_dispatch, max(positions, shape.capacity_rows * (shape.count_lines == 0)) * shape.scale_bytes),
        ("rows", shape.dispatch_slots, shape.capacity_rows * shape.row_bytes),
        ("home", ht_combine, home_rows * shape.home_row_bytes),
        ("home_weights", ht_combine, positions * shape.topk * 4),
        ("home_origins", ht_combine, shape.size * 8),
        ("lines", ll_dispatch, ll_positions * shape.row_units * UNIT_BYTES),
        ("meta_lines", ll_dispatch, ll_positions * shape.meta_lines * LINE_BYTES),
        ("count_lines", ll_dispatch, shape.size * shape.count_lines * LINE_BYTES),
        ("heads", ll_dispatch, shape.size * HEAD_BYTES),
        ("home_lines", ll_combine, ll_home_rows * shape.home_units * UNIT_BYTES),
        ("weight_lines", ll_combine, ll_positions * shape.weight_lines * LINE_BYTES),
        ("home_heads", ll_combine, shape.size * HEAD_BYTES),
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
