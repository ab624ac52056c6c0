// The rows of low-latency dispatch: where they lie as lines, how a unit is made of a token and written to its final rows.
#pragma once

constexpr bool kQuantised = sizeof(X) > 1;

// The rows of a source.
__device__ __forceinline__ u8* lines_at(const DispatchArgs& args, i32 at, i32 source) {
  const RegionMap& map = args.world.map;
  const i64 units = line_position(args.world, source, 0) * args.world.row_units;
  return array_at(args, at, map.lines, map.lines_stride) + units * kUnitBytes;
}

// The records of a source.
__device__ __forceinline__ u8* meta_lines_at(const DispatchArgs& args, i32 at, i32 source) {
  const RegionMap& map = args.world.map;
  const i64 lines = line_position(args.world, source, 0) * args.world.meta_lines;
  return array_at(args, at, map.meta_lines, map.meta_lines_stride) + lines * kLineBytes;
}

__device__ __forceinline__ u8* count_lines_at(const DispatchArgs& args, i32 at, i32 source) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.count_lines, map.count_lines_stride) + source * args.world.count_lines * kLineBytes;
}

__device__ __forceinline__ u8* head_at(const DispatchArgs& args, i32 at, i32 source) {
  return array_at(args, at, args.world.map.heads, args.world.map.heads_stride) + source * 16;
}

// 16 bytes of what travels for a token: the row, then the caller's scales.
__device__ __forceinline__ Vector load_raw(const DispatchArgs& args, i32 token, i32 offset) {
  const World& world = args.world;
  const i64 row = static_cast<i64>(token) * world.row_bytes;
  if (offset < world.row_bytes) return *reinterpret_cast<const Vector*>(args.x + row + offset);
  const i32 at = offset - world.row_bytes;
  const u8* scales = args.x_scales + static_cast<i64>(token) * world.scale_bytes;
  return at < world.scale_bytes ? load_bytes(scales + at, world.scale_bytes - at)
                                : Vector{0, 0};
}

// This lane's part of a unit as it lies in x, perhaps on its way. Not words where bytes travel: the compiler would take loads apart,
// and so wait for them, as soon as they are under way.
template <class T>
struct LoadedOf {
  quant::Columns<T> first, second;
};
template <>
struct LoadedOf<u8> : Unit {};
using Loaded = LoadedOf<X>;
constexpr bool kMakesFirst = sizeof(X) == 4;  // before the next is asked for: registers do not hold two

// Asks for unit `index` of a token's row.
template <class T>
__device__ __forceinline__ LoadedOf<T> load_unit(const DispatchArgs& args, i32 token, i32 index) {
  const World& world = args.world;
  const i32 at = first_offset();
  LoadedOf<T> loaded = {};
  if constexpr (sizeof(T) > 1) {
    const T* row = reinterpret_cast<const T*>(args.x) + static_cast<i64>(token) * world.hidden;
    if (!is_tag_lane()) {
      loaded.first = quant::columns_of<T>(load_words<T, 16>(row, index * kUnitColumns + at, world.hidden).at);
      loaded.second = quant::columns_of<T>(load_words<T, 16>(row, index * kUnitColumns + at + kSecond, world.hidden).at);
    }
  } else {
    const i32 offset = index * kUnitData + at;
    loaded.first = load_raw(args, token, offset);
    if (!is_tag_lane()) loaded.second = load_raw(args, token, offset + kSecond);
  }
  return loaded;
}

// The unit as it travels.
template <class T>
__device__ __forceinline__ Unit make_unit(const DispatchArgs& args, const LoadedOf<T>& loaded) {
  if constexpr (sizeof(T) > 1) return quantize_unit(loaded.first, loaded.second, args.power_of_two != quant::kFp32);
  else return loaded;
}

// What a lane has to do with the scales of a fp8 unit: lane b with those of its block b, wherever the row goes; lanes behind the last
// block pad packed words with zero bytes.
struct UnitScale {
  u32 bits;
  i64 offset;  // from the row's first scale, bytes
  bool wanted;
};

__device__ __forceinline__ UnitScale scale_in(const DispatchArgs& args, const Unit& unit, i32 index, i32 num_rows) {
  const i32 blocks = (args.world.hidden + quant::kBlock - 1) / quant::kBlock;
  const i32 first = index * kUnitBlocks, block = first + lane_idx();
  const bool packed = args.power_of_two == quant::kPacked;
  const bool real = lane_idx() < kUnitBlocks && block < blocks;
  const bool pads = packed && first + kUnitBlocks >= blocks && block >= blocks && block < (blocks + 3) / 4 * 4;
  const u32 bits = scale_of_block(unit, lane_idx());
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  const i64 offset = !packed ? block * 4 : args.scale_row_stride == 0 ? block : block / 4 * column * 4 + block % 4;
  return {real ? bits : 0, offset, real || pads};
}

// Byte in out_scales of a row's first scale.
__device__ __forceinline__ i64 scales_from(const DispatchArgs& args, i32 row) {
  const World& world = args.world;
  if (args.scale_row_stride == 0) return static_cast<i64>(row) * world.scale_bytes;
  if (LAYOUT == GROUPED || LAYOUT == FLAT) return static_cast<i64>(row) * args.scale_row_stride * 4;
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : world.max_tokens, group = row / per_group;
  return (group * static_cast<i64>(args.scale_group_stride) + (row - group * per_group) * static_cast<i64>(args.scale_row_stride)) * 4;
}

// A unit of a received row to the final rows `rows` of this lane's that `placed` (a ballot) names.
__device__ __forceinline__ void write_unit(const DispatchArgs& args, const Unit& unit, i32 index, i32 row_of_lane, u32 placed,
                                           i32 num_rows) {
  const World& world = args.world;
  const i32 offset = first_offset() + index * (kQuantised ? kUnitColumns : kUnitData);
  const bool first = offset < world.row_bytes && !(kQuantised && is_tag_lane());
  const bool second = offset + kSecond < world.row_bytes && !is_tag_lane();
  u8* to = row_at(args, world.rank, 0) + offset;
  UnitScale scale = {};
  i64 scales_of_lane = 0;
  if constexpr (kQuantised) {
    scale = scale_in(args, unit, index, num_rows);
    scales_of_lane = scales_from(args, row_of_lane);
  }
#pragma unroll 1
  for (u32 left = placed; left != 0; left &= left - 1) {
    const i32 leader = __ffs(left) - 1, row = __shfl_sync(~0u, row_of_lane, leader);
    u8* at = to + static_cast<i64>(row) * world.row_bytes;
    if (first) *reinterpret_cast<Vector*>(at) = unit.first;
    if (second) *reinterpret_cast<Vector*>(at + kSecond) = unit.second;
    if constexpr (kQuantised) {
      u8* one = args.out_scales + __shfl_sync(~0u, scales_of_lane, leader) + scale.offset;
      if (scale.wanted && args.power_of_two == quant::kPacked) *one = static_cast<u8>(scale.bits >> 23);
      else if (scale.wanted) *reinterpret_cast<u32*>(one) = scale.bits;
      continue;
    }
    if (world.scale_bytes == 0) continue;
    u8* scales = args.out_scales + static_cast<i64>(row) * world.scale_bytes;
    const i32 one = offset - world.row_bytes, two = one + kSecond;
    if (one >= 0 && one < world.scale_bytes) store_bytes(scales + one, unit.first, world.scale_bytes - one);
    if (two >= 0 && two < world.scale_bytes && !is_tag_lane()) store_bytes(scales + two, unit.second, world.scale_bytes - two);
  }
}

// What one warp looks at: a unit of a row, or (index = row_units) its records.
struct Arrival {
  Turn turn;
  const u8 *lines, *records;  // where they land
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

// Where to look: found out once, for each address is a chain of loads. Units are fewer than 2^31, as they are of 1024 bytes.
__device__ __forceinline__ void locate(const DispatchArgs& args, const LlScratch& scratch, Arrival& arrival) {
  const World& world = args.world;
  const i32 number = line_position(world, source_at(world, arrival.turn), arrival.turn.position);
  arrival.lines = scratch.here[0] + static_cast<i64>(number * world.row_units + arrival.turn.index) * kUnitBytes;
  arrival.records = scratch.here[1] + static_cast<i64>(number * world.meta_lines) * kLineBytes;
}

__device__ __forceinline__ void look(const DispatchArgs& args, Arrival& arrival, u64 seq) {
  const World& world = args.world;
  arrival.there = is_records(world, arrival) || peek_unit(arrival.lines, seq, &arrival.unit);
  if (kPerExpert || is_records(world, arrival))
    arrival.there &= peek_lines(arrival.records, min(4, world.meta_lines), seq, &arrival.record);
}

// This lane's record (k = lane) of an arrival that is there. K > 28: the fifth line is awaited here; false: in vain.
__device__ __forceinline__ bool record_of(const DispatchArgs& args, const Arrival& arrival, u64 seq, Meta* record) {
  const World& world = args.world;
  const i32 k = lane_idx();
  Vector got = shuffle(arrival.record, (k / kLineMetas * 8 + k % kLineMetas) & 31);
  if (world.meta_lines > 4) {
    Vector more = {};
    const i32 source = source_at(world, arrival.turn);
    const u8* at = arrival.records + 4 * kLineBytes;
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source, [&] { return peek_lines(at, 1, seq, &more); }))
      return false;
    const Vector late = shuffle(more, (k - 4 * kLineMetas) & 31);
    if (k >= 4 * kLineMetas) got = late;
  }
  const i32 expert = k < world.topk ? static_cast<i32>(word_of(got, 0)) : -1;
  *record = {expert, static_cast<i32>(word_of(got, 1)), __uint_as_float(word_of(got, 2)), static_cast<i32>(word_of(got, 3))};
  return true;
}
