// How low-latency rows travel: lines of 128 bytes that carry their own sequence number, so that nothing announces them.
// A receiver polls the line itself; no flag, no fence and no count stands between a store and its use.
//
//   line    128 bytes, written by 8 lanes as one 16-byte store each; its last 8 bytes are the tag: the operation's seq
//   unit    8 lines = 1024 bytes, written by a warp with two stores per lane: lanes 7, 15, 23, 31 carry the tags
//
//   lane            0 .. 6              7              8 .. 14 ...
//   line 0..3   vector 0 .. 6    [low of 56 | tag]   vector 7 .. 13 ...     [low of 57 | tag] ...
//   line 4..7   vector 28 .. 34  [high of 56 | tag]  vector 35 .. 41 ...    [high of 57 | tag] ...
//
// So a unit carries 60 vectors of 16 bytes (960 bytes), each at an aligned place of the row, in both memories. A unit
// of fp8 made on the way (below) carries 56 vectors (896 columns) and in vectors 56 and 57 the scales of its 7 blocks.
//
// Memory contract: the 128 bytes of a line that one warp instruction stores reach the memory of a peer as a whole, and
// one warp instruction loads them as a whole. PTX promises this for 16 bytes only; NVLink and L2 move lines, and NCCL's
// LL128 protocol stands on the same ground. A tag is never used twice for a place: seq grows for the life of the
// region.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep::ll {

constexpr i32 kLineBytes = 128, kUnitBytes = 1024, kUnitData = 960, kUnitColumns = 896;
constexpr i32 kHalf = 512;            // bytes of a unit that one instruction moves
constexpr i32 kSecond = 448;          // distance of a lane's second vector from its first
constexpr i32 kLineInts = 28;         // 32-bit words of a line of numbers
constexpr i32 kLineMetas = 7;         // 16-byte records of a line

// Index of a position in the arrays of lines, which have room for steps that run LL; other arrays have it for
// max_tokens.
__device__ __forceinline__ i32 line_position(const World& world, i32 rank, i32 position) {
  return rank * world.ll_tokens + position;
}

struct alignas(16) Vector {
  u64 low, high;
};

// What a lane holds of a unit. Tag lanes: only `first`.
struct Unit {
  Vector first, second;
};

// Up to 16 of `count` bytes, at any address.
__device__ __noinline__ Vector load_bytes(const u8* from, i32 count) {
  Vector value = {0, 0};
#pragma unroll 1
  for (i32 i = min(count, 16) - 1; i >= 0; --i) {
    value.high = value.high << 8 | value.low >> 56;
    value.low = value.low << 8 | from[i];
  }
  return value;
}

__device__ __noinline__ void store_bytes(u8* to, Vector value, i32 count) {
#pragma unroll 1
  for (i32 i = 0; i < min(count, 16); ++i) {
    to[i] = static_cast<u8>(value.low);
    value.low = value.low >> 8 | value.high << 56;
    value.high >>= 8;
  }
}

__device__ __forceinline__ bool is_tag_lane() { return (lane_idx() & 7) == 7; }

// Byte offset of this lane's first vector in the data of a unit.
__device__ __forceinline__ i32 first_offset() {
  return is_tag_lane() ? 2 * kSecond + 16 * (lane_idx() >> 3) : 16 * (lane_idx() - (lane_idx() >> 3));
}

__device__ __forceinline__ void store_unit(u8* at, const Unit& unit, u64 tag) {
  const bool tagged = is_tag_lane();
  u8* mine = at + lane_idx() * 16;
  ptx::store_pair(mine, unit.first.low, tagged ? tag : unit.first.high);
  ptx::store_pair(mine + kHalf, tagged ? unit.first.high : unit.second.low, tagged ? tag : unit.second.high);
}

// False in a lane whose lines have another tag. Loads are started, not waited for: several may be asked for before the
// vote. Where nothing is `wanted` (the same in all lanes), nothing is loaded and nothing missing, without a branch.
__device__ __forceinline__ bool peek_unit(const u8* at, u64 tag, Unit* unit, bool wanted = true) {
  const u8* mine = at + lane_idx() * 16;
  const Vector a = ptx::load_pair_if<Vector>(mine, wanted), b = ptx::load_pair_if<Vector>(mine + kHalf, wanted);
  const bool tagged = is_tag_lane();
  unit->first = {a.low, tagged ? b.low : a.high};
  unit->second = b;
  return !tagged | !wanted | (a.high == tag & b.high == tag);
}

// Up to four lines of any content: lane i moves vector i; data of tag lanes is lost.
__device__ __forceinline__ void store_lines(u8* at, i32 num_lines, Vector mine, u64 tag) {
  if (lane_idx() < 8 * num_lines) ptx::store_pair(at + lane_idx() * 16, mine.low, is_tag_lane() ? tag : mine.high);
}

__device__ __forceinline__ bool peek_lines(const u8* at, i32 num_lines, u64 tag, Vector* mine) {
  const bool present = lane_idx() < 8 * num_lines;
  if (present) *mine = ptx::load_pair<Vector>(at + lane_idx() * 16);
  return !present || !is_tag_lane() || mine->high == tag;
}

__device__ __forceinline__ i32 lines_for(i32 count, i32 per_line) { return (count + per_line - 1) / per_line; }

__device__ __forceinline__ Vector vector_of(u32 a, u32 b, u32 c, u32 d) {
  return {a | static_cast<u64>(b) << 32, c | static_cast<u64>(d) << 32};
}

__device__ __forceinline__ u32 word_of(const Vector& v, i32 i) {
  const u64 half = i < 2 ? v.low : v.high;
  return static_cast<u32>(i & 1 ? half >> 32 : half);
}

__device__ __forceinline__ Vector shuffle(const Vector& v, i32 lane) {
  return {__shfl_sync(~0u, v.low, lane), __shfl_sync(~0u, v.high, lane)};
}

// ---- where lines lie: dispatch ----

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

// ---- where lines lie: combine ----

// Where the rows begin that come home to a rank: unit row * home_units + index, fewer than 2^31, as a unit is of 1024
// bytes.
__device__ __forceinline__ u8* home_lines_at(const CombineArgs& args, i32 rank) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.home_lines + args.slot * map.home_lines_stride);
}

__device__ __forceinline__ u8* weight_lines_at(const CombineArgs& args, i32 rank, i64 position) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.weight_lines + args.slot * map.weight_lines_stride) +
         position * lines_for(args.world.topk, kLineInts) * kLineBytes;
}

// {seq of the dispatch whose routing `from` combines, seq}.
__device__ __forceinline__ u8* head_at(const CombineArgs& args, i32 at, i32 from) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, at, map.home_heads + args.slot * map.home_heads_stride) + from * 16;
}

// ---- rows that become fp8 on the way ----
//
// A unit of lines whose rows become fp8 on the way: 56 vectors of 16 columns, and in the first two tag lanes the
// scales of their 7 blocks. A lane holds vectors `index` and 28 + `index`; tag lanes hold none: zeros.
//
//   block      0       1        2         3               4         5         6
//   vectors    0..7    8..15    16..23    24..27 28..31   32..39    40..47    48..55
//              first of a lane                   second of a lane
//
// Lane b divides for block b, so a warp divides twice per unit.

constexpr i32 kUnitBlocks = kUnitColumns / quant::kBlock;

// Among the vectors of a unit, this lane's first.
__device__ __forceinline__ i32 vector_index() { return lane_idx() - (lane_idx() >> 3); }
__device__ __forceinline__ i32 first_block() { return vector_index() / 8; }
__device__ __forceinline__ i32 second_block() { return (28 + vector_index()) / 8; }

__device__ __forceinline__ Vector vector_of(const Vec<u32, 4>& words) {
  return vector_of(words.at[0], words.at[1], words.at[2], words.at[3]);
}

// 16 columns of each vector as fp8, with the scales of their blocks. Absent columns are 0.
template <class T>
__device__ __forceinline__ Unit quantize_unit(const quant::Columns<T>& first, const quant::Columns<T>& second,
                                              bool power_of_two) {
  u32 amax_first = quant::largest(first), amax_second = quant::largest(second);
  const bool all_finite = !__any_sync(~0u, max(amax_first, amax_second) >= quant::kInfinityOf<T>);
  if (all_finite) {
    amax_first = quant::widen_bits(amax_first, T{});
    amax_second = quant::widen_bits(amax_second, T{});
  } else {
    amax_first = quant::finite_largest(first);
    amax_second = quant::finite_largest(second);
  }
  u32 amax = 0;  // of block `lane`
#pragma unroll
  for (i32 b = 0; b < kUnitBlocks; ++b) {
    u32 mine = b <= 3 && first_block() == b ? amax_first : 0;
    if (b >= 3 && second_block() == b) mine = max(mine, amax_second);
    const u32 most = __reduce_max_sync(~0u, mine);
    if (lane_idx() == b) amax = most;
  }
  const f32 scale = quant::scale_of(amax, power_of_two), inverse = __fdiv_rn(1.0f, scale);
  const f32 inverse_first = __shfl_sync(~0u, inverse, first_block()),
            inverse_second = __shfl_sync(~0u, inverse, second_block());
  const u32 told = lane_idx() < kUnitBlocks ? __float_as_uint(scale) : 0;
  u32 scales[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) scales[i] = __shfl_sync(~0u, told, (lane_idx() >> 3) * 4 + i);
  const Vec<u32, 4> a = quant::encode(first, inverse_first, all_finite),
                    b = quant::encode(second, inverse_second, all_finite);
  if (is_tag_lane()) return {vector_of(scales[0], scales[1], scales[2], scales[3]), {0, 0}};
  return {vector_of(a), vector_of(b)};
}

// Scale of block b of a unit, as bits, to every lane by its own b.
__device__ __forceinline__ u32 scale_of_block(const Unit& unit, i32 b) {
  const Vector scales = shuffle(unit.first, b / 4 * 8 + 7);
  return word_of(scales, b % 4);
}

}  // namespace ep::ll
