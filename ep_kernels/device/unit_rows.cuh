// The rows of low-latency dispatch: where they lie as lines, how a unit is made of a token and written to its final rows.
#pragma once

constexpr bool kQuantised = sizeof(X) > 1;

__device__ __forceinline__ u8* lines_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.lines, map.lines_stride) +
         line_position(args.world, source, position) * args.world.row_units * kUnitBytes;
}

__device__ __forceinline__ u8* meta_lines_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.meta_lines, map.meta_lines_stride) +
         line_position(args.world, source, position) * args.world.meta_lines * kLineBytes;
}

__device__ __forceinline__ u8* count_lines_at(const DispatchArgs& args, i32 at, i32 source) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.count_lines, map.count_lines_stride) + source * args.world.count_lines * kLineBytes;
}

__device__ __forceinline__ u8* head_at(const DispatchArgs& args, i32 at, i32 source) {
  return array_at(args, at, args.world.map.heads, args.world.map.heads_stride) + source * 16;
}

// 16 columns from `column` on as fp32; 0 past the row.
template <class T>
__device__ __forceinline__ void load_columns(const T* row, i32 column, i32 hidden, f32 (&value)[16]) {
  constexpr i32 N = kColumns<T>;
#pragma unroll
  for (i32 i = 0; i < 16; i += N) {
    Vec<T, N> loaded = {};
    if (column + i < hidden) loaded = *reinterpret_cast<const Vec<T, N>*>(row + column + i);
#pragma unroll
    for (i32 j = 0; j < N; ++j) value[i + j] = widen(loaded.at[j]);
  }
}

// 16 bytes of what travels for a token: the row, then the caller's scales.
__device__ __forceinline__ Vector load_raw(const DispatchArgs& args, i64 token, i32 offset) {
  const World& world = args.world;
  if (offset < world.row_bytes) return *reinterpret_cast<const Vector*>(args.x + token * world.row_bytes + offset);
  const i32 at = offset - world.row_bytes;
  return at < world.scale_bytes ? load_bytes(args.x_scales + token * world.scale_bytes + at, world.scale_bytes - at)
                                : Vector{0, 0};
}

// This lane's part of unit `index` of a token's row.
__device__ __forceinline__ Unit make_unit(const DispatchArgs& args, i32 token, i32 index) {
  const World& world = args.world;
  const i32 at = first_offset();
  if constexpr (kQuantised) {
    f32 first[16] = {}, second[16] = {};
    const X* row = reinterpret_cast<const X*>(args.x) + static_cast<i64>(token) * world.hidden;
    if (!is_tag_lane()) {
      load_columns(row, index * kUnitColumns + at, world.hidden, first);
      load_columns(row, index * kUnitColumns + at + kSecond, world.hidden, second);
    }
    return quantize_unit(first, second, args.power_of_two != quant::kFp32);
  } else {
    const i32 offset = index * kUnitData + at;
    Unit made = {load_raw(args, token, offset), {0, 0}};
    if (!is_tag_lane()) made.second = load_raw(args, token, offset + kSecond);
    return made;
  }
}

// Byte of a block's packed scale, or start of its fp32 scale, in out_scales.
__device__ __forceinline__ u8* scale_at(const DispatchArgs& args, i32 row, i32 block, i32 num_rows) {
  const World& world = args.world;
  if (args.scale_row_stride == 0) {
    const i32 size = args.power_of_two == quant::kPacked ? 1 : 4;
    return args.out_scales + static_cast<i64>(row) * world.scale_bytes + block * size;
  }
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : LAYOUT == RANK_MAJOR ? world.max_tokens : 1 << 30;
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  const i64 word = static_cast<i64>(row / per_group) * args.scale_group_stride + block / 4 * column +
                   static_cast<i64>(row % per_group) * args.scale_row_stride;
  return args.out_scales + word * 4 + block % 4;
}

// Scales that a fp8 unit carries, to their places; the last unit pads packed words with zero bytes.
__device__ __forceinline__ void write_scales(const DispatchArgs& args, const Unit& unit, i32 index, i32 row, i32 num_rows) {
  const World& world = args.world;
  const i32 group = lane_idx() >> 3, blocks = (world.hidden + quant::kBlock - 1) / quant::kBlock;
  if (!is_tag_lane() || group > 1) return;
  const bool packed = args.power_of_two == quant::kPacked;
#pragma unroll 2
  for (i32 i = 0; i < 4 - group; ++i) {
    const i32 block = index * 7 + group * 4 + i;
    if (block < blocks && !packed) *reinterpret_cast<u32*>(scale_at(args, row, block, num_rows)) = word_of(unit.first, i);
    if (block < blocks && packed) *scale_at(args, row, block, num_rows) = static_cast<u8>(word_of(unit.first, i) >> 23);
    if (packed && block == blocks - 1)
      for (i32 pad = blocks; pad < (blocks + 3) / 4 * 4; ++pad) *scale_at(args, row, pad, num_rows) = 0;
  }
}

// A unit of a received row to the final rows `rows` of this lane's that `placed` (a ballot) names.
__device__ __forceinline__ void write_unit(const DispatchArgs& args, const Unit& unit, i32 index, i32 row_of_lane, u32 placed,
                                           i32 num_rows) {
  const World& world = args.world;
  const i32 offset = first_offset() + index * (kQuantised ? kUnitColumns : kUnitData);
  const bool first = offset < world.row_bytes && !(kQuantised && is_tag_lane());
  const bool second = offset + kSecond < world.row_bytes && !is_tag_lane();
  u8* to = row_at(args, world.rank, 0) + offset;
#pragma unroll 1
  for (u32 left = placed; left != 0; left &= left - 1) {
    const i32 row = __shfl_sync(~0u, row_of_lane, __ffs(left) - 1);
    u8* at = to + static_cast<i64>(row) * world.row_bytes;
    if (first) *reinterpret_cast<Vector*>(at) = unit.first;
    if (second) *reinterpret_cast<Vector*>(at + kSecond) = unit.second;
    if (kQuantised) write_scales(args, unit, index, row, num_rows);
    if (kQuantised || world.scale_bytes == 0) continue;
    u8* scales = args.out_scales + static_cast<i64>(row) * world.scale_bytes;
    const i32 one = offset - world.row_bytes, two = one + kSecond;
    if (one >= 0 && one < world.scale_bytes) store_bytes(scales + one, unit.first, world.scale_bytes - one);
    if (two >= 0 && two < world.scale_bytes && !is_tag_lane()) store_bytes(scales + two, unit.second, world.scale_bytes - two);
  }
}

// What one warp looks at: a unit of a row, or (index = row_units) its records.
struct Arrival {
  Turn turn;
  Unit unit;
  Vector record;  // lane i: vector i of the first four lines of records
  bool there;     // this lane's lines are
  bool delivered; // before the counts were here
};

__device__ __forceinline__ bool is_records(const World& world, const Arrival& arrival) {
  return arrival.turn.index == world.row_units;
}

__device__ __forceinline__ i32 source_at(const World& world, Turn turn) {
  const i32 source = turn.source + world.rank;
  return source < world.size ? source : source - world.size;
}

__device__ __forceinline__ void look(const DispatchArgs& args, Arrival& arrival, u64 seq) {
  const World& world = args.world;
  const i32 source = source_at(world, arrival.turn), position = arrival.turn.position;
  arrival.there = true;
  if (!is_records(world, arrival))
    arrival.there =
        peek_unit(lines_at(args, world.rank, source, position) + arrival.turn.index * kUnitBytes, seq, &arrival.unit);
  if (kPerExpert || is_records(world, arrival))
    arrival.there &=
        peek_lines(meta_lines_at(args, world.rank, source, position), min(4, world.meta_lines), seq, &arrival.record);
}

// This lane's record (k = lane) of an arrival that is there. K > 28: the fifth line is awaited here; false: in vain.
__device__ __forceinline__ bool record_of(const DispatchArgs& args, const Arrival& arrival, u64 seq, Meta* record) {
  const World& world = args.world;
  const i32 k = lane_idx();
  Vector got = shuffle(arrival.record, (k / kLineMetas * 8 + k % kLineMetas) & 31);
  if (world.meta_lines > 4) {
    Vector more = {};
    const i32 source = source_at(world, arrival.turn);
    const u8* at = meta_lines_at(args, world.rank, source, arrival.turn.position) + 4 * kLineBytes;
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source, [&] { return peek_lines(at, 1, seq, &more); }))
      return false;
    const Vector late = shuffle(more, (k - 4 * kLineMetas) & 31);
    if (k >= 4 * kLineMetas) got = late;
  }
  const i32 expert = k < world.topk ? static_cast<i32>(word_of(got, 0)) : -1;
  *record = {expert, static_cast<i32>(word_of(got, 1)), __uint_as_float(word_of(got, 2)), static_cast<i32>(word_of(got, 3))};
  return true;
}
