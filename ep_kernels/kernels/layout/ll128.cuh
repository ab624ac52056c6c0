// LL128 lines and packets: how rows of low-latency mode travel, in the manner of NCCL's LL128 protocol. Every line
// carries its own flag, and the receiver polls the line itself: no separate announcement, fence or count.
//
//   line    128 bytes, stored by 8 lanes, 16 bytes each; the last 8 bytes are the flag: the operation's seq
//   packet  8 lines = 1024 bytes, stored by a warp with two stores per lane; lanes 7, 15, 23, 31 ("flag lanes") store
//           the flags
//
//   lane            0 .. 6              7               8 .. 14 ...
//   line 0..3   vector 0 .. 6    [low of 56 | flag]   vector 7 .. 13 ...     [low of 57 | flag] ...
//   line 4..7   vector 28 .. 34  [high of 56 | flag]  vector 35 .. 41 ...    [high of 57 | flag] ...
//
// A packet carries 60 vectors of 16 bytes (960 bytes), each at an aligned offset of the row in both memories. A packet
// of a row that is quantised on the way (below) carries 56 vectors (896 columns), and the scales of their 7 blocks in
// vectors 56 and 57.
//
// Memory contract: the 128 bytes of a line that one warp instruction stores reach a peer's memory as a whole, and one
// warp instruction loads them as a whole. PTX promises this for 16 bytes only; NVLink and L2 move lines, and NCCL's
// LL128 protocol rests on the same. A flag value is never used twice for an address: seq grows for the life of the
// region.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep::ll {

constexpr i32 kLineBytes = 128, kPacketBytes = 1024, kPacketData = 960, kPacketColumns = 896;
constexpr i32 kPacketHalf = 512;      // bytes of a packet that one store instruction of a warp moves
constexpr i32 kSecondOffset = 448;    // of a lane's second vector from its first, bytes of the row
constexpr i32 kLineInts = 28;         // 32-bit words of a line of numbers
constexpr i32 kLineEntries = 7;         // 16-byte metadata entries of a line

// Index of (rank, position) in arrays of LL128 lines, which are sized by ll_tokens; other arrays by max_tokens.
__device__ __forceinline__ i32 line_position(const World& world, i32 rank, i32 position) {
  return rank * world.ll_tokens + position;
}

struct alignas(16) Vector {
  u64 low, high;
};

// One lane's part of a packet. Flag lanes: only `first`.
struct Packet {
  Vector first, second;
};

// Up to 16 of `count` bytes, at any alignment.
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

__device__ __forceinline__ bool is_flag_lane() { return (lane_idx() & 7) == 7; }

// Byte offset of this lane's first vector in the data of a packet.
__device__ __forceinline__ i32 first_offset() {
  return is_flag_lane() ? 2 * kSecondOffset + 16 * (lane_idx() >> 3) : 16 * (lane_idx() - (lane_idx() >> 3));
}

__device__ __forceinline__ void store_packet(u8* at, const Packet& packet, u64 flag) {
  const bool flagged = is_flag_lane();
  u8* mine = at + lane_idx() * 16;
  ptx::store_pair(mine, packet.first.low, flagged ? flag : packet.first.high);
  ptx::store_pair(mine + kPacketHalf, flagged ? packet.first.high : packet.second.low,
                  flagged ? flag : packet.second.high);
}

// Polls a packet once. False in a lane whose lines have another flag. Does not wait for its loads before the result is
// used, so several polls may be issued before one vote. !wanted (uniform in the warp): loads nothing and returns true,
// without a branch.
__device__ __forceinline__ bool poll_packet(const u8* at, u64 flag, Packet* packet, bool wanted = true) {
  const u8* mine = at + lane_idx() * 16;
  const Vector a = ptx::load_pair_if<Vector>(mine, wanted), b = ptx::load_pair_if<Vector>(mine + kPacketHalf, wanted);
  const bool flagged = is_flag_lane();
  packet->first = {a.low, flagged ? b.low : a.high};
  packet->second = b;
  return !flagged | !wanted | (a.high == flag & b.high == flag);
}

// Up to four lines of any content: lane i stores vector i; of a flag lane only `low` travels.
__device__ __forceinline__ void store_lines(u8* at, i32 num_lines, Vector mine, u64 flag) {
  if (lane_idx() < 8 * num_lines) ptx::store_pair(at + lane_idx() * 16, mine.low, is_flag_lane() ? flag : mine.high);
}

__device__ __forceinline__ bool poll_lines(const u8* at, i32 num_lines, u64 flag, Vector* mine) {
  const bool present = lane_idx() < 8 * num_lines;
  if (present) *mine = ptx::load_pair<Vector>(at + lane_idx() * 16);
  return !present || !is_flag_lane() || mine->high == flag;
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

// Exact combine over a network: a box holds the rows of a source, one per (token, k) that the expert rank serves, by
// token, then by k. [T, K] the row of (token, k) in the box of its rank, which is remote; behind the [M, K] routes.
__device__ __forceinline__ i32* box_rows_of(const World& world, Route* routes) {
  return reinterpret_cast<i32*>(routes + static_cast<i64>(world.max_tokens) * world.topk);
}

// ---- addresses in the region of `rank`: dispatch ----

// Of a remote rank, or a remote source: in a box (layout/region.cuh).
__device__ __forceinline__ bool is_boxed(const World& world, i32 rank, i32 source) {
  return is_remote(world, other_of(world, rank, source));
}

__device__ __forceinline__ const RegionMap& box_map(const World& world) { return world.state->network.map; }

// Row packets of a source: [M', row_packets]. Those for ranks of another host lie in the box of this rank's rail there,
// those of a remote source in the inbox of its rail here.
__device__ __forceinline__ u8* row_packets_at(const DispatchArgs& args, i32 rank, i32 source) {
  if constexpr (NETWORK) if (is_boxed(args.world, rank, source)) {
    const RegionMap& box = box_map(args.world);
    const u64 offset = box.row_lines + args.slot * box.row_lines_stride;
    if (rank != args.world.rank) return box_at(args.world, rank, source, offset);
    return reinterpret_cast<u8*>(args.world.state->network.carried[source] + offset);
  }
  const RegionMap& map = args.world.map;
  const i64 packets = line_position(args.world, source, 0) * args.world.row_packets;
  return array_at(args, rank, map.row_lines, map.row_lines_stride) + packets * kPacketBytes;
}

// Token metadata of a source: [M', metadata_lines].
__device__ __forceinline__ u8* metadata_lines_at(const DispatchArgs& args, i32 rank, i32 source) {
  if constexpr (NETWORK) if (is_boxed(args.world, rank, source)) {
    const RegionMap& box = box_map(args.world);
    return box_at(args.world, rank, source, box.metadata_lines + args.slot * box.metadata_lines_stride);
  }
  const RegionMap& map = args.world.map;
  const i64 lines = line_position(args.world, source, 0) * args.world.metadata_lines;
  return array_at(args, rank, map.metadata_lines, map.metadata_lines_stride) + lines * kLineBytes;
}

__device__ __forceinline__ u8* count_lines_at(const DispatchArgs& args, i32 rank, i32 source) {
  if constexpr (NETWORK) if (is_boxed(args.world, rank, source)) {
    const RegionMap& box = box_map(args.world);
    return box_at(args.world, rank, source, box.count_lines + args.slot * box.count_lines_stride);
  }
  const RegionMap& map = args.world.map;
  return array_at(args, rank, map.count_lines, map.count_lines_stride) + source * args.world.count_lines * kLineBytes;
}

// The count packet of a source, 16 bytes: {rows | routing age << 32, seq}.
__device__ __forceinline__ u8* count_packet_at(const DispatchArgs& args, i32 rank, i32 source) {
  if constexpr (NETWORK) if (is_boxed(args.world, rank, source)) {
    const RegionMap& box = box_map(args.world);
    return box_at(args.world, rank, source, box.count_packets + args.slot * box.count_packets_stride);
  }
  return array_at(args, rank, args.world.map.count_packets, args.world.map.count_packets_stride) + source * 16;
}

// ---- addresses in the region of `rank`: combine ----

// The combine receive buffer, as `expert_rank` writes it: packet row * combine_packets + index. Packet numbers fit in
// 31 bits, as a packet is 1024 bytes. A box begins with the row of the expert rank's first position.
__device__ __forceinline__ u8* combine_recv_at(const CombineArgs& args, i32 rank, i32 expert_rank) {
  if constexpr (NETWORK) if (is_boxed(args.world, rank, expert_rank)) {
    const RegionMap& box = box_map(args.world);
    const i64 before = static_cast<i64>(line_position(args.world, expert_rank, 0)) * args.world.combine_packets;
    return box_at(args.world, rank, expert_rank, box.combine_lines + args.slot * box.combine_lines_stride) -
           before * kPacketBytes;
  }
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.combine_lines + args.slot * map.combine_lines_stride);
}

// Weight lines of a position of `expert_rank`.
__device__ __forceinline__ u8* weight_lines_at(const CombineArgs& args, i32 rank, i32 expert_rank, i32 position) {
  const World& world = args.world;
  if constexpr (NETWORK) if (is_boxed(world, rank, expert_rank)) {
    const RegionMap& box = box_map(world);
    return box_at(world, rank, expert_rank, box.weight_lines + args.slot * box.weight_lines_stride) +
           static_cast<i64>(position) * lines_for(world.topk, kLineInts) * kLineBytes;
  }
  const RegionMap& map = world.map;
  const i64 number = line_position(world, expert_rank, position);
  return region_at<u8>(world, rank, map.weight_lines + args.slot * map.weight_lines_stride) +
         number * lines_for(world.topk, kLineInts) * kLineBytes;
}

// 16 bytes from an expert rank: {routing_id that it combines, seq}.
__device__ __forceinline__ u8* routing_packet_at(const CombineArgs& args, i32 rank, i32 expert_rank) {
  if constexpr (NETWORK) if (is_boxed(args.world, rank, expert_rank)) {
    const RegionMap& box = box_map(args.world);
    return box_at(args.world, rank, expert_rank, box.routing_packets + args.slot * box.routing_packets_stride);
  }
  const RegionMap& map = args.world.map;
  const u64 offset = map.routing_packets + args.slot * map.routing_packets_stride;
  return region_at<u8>(args.world, rank, offset) + expert_rank * 16;
}

// ---- fp8 packets: rows that are quantised on the way ----
//
// 56 vectors of 16 columns; the first two flag lanes carry the scales of their 7 blocks. A lane holds vectors `index`
// and 28 + `index`; flag lanes hold none: zeros.
//
//   block      0       1        2         3               4         5         6
//   vectors    0..7    8..15    16..23    24..27 28..31   32..39    40..47    48..55
//              first of a lane                   second of a lane
//
// Lane b divides for block b, so a warp divides twice per packet.

constexpr i32 kPacketBlocks = kPacketColumns / quant::kBlock;

// Index of this lane's first vector in a packet.
__device__ __forceinline__ i32 vector_index() { return lane_idx() - (lane_idx() >> 3); }
__device__ __forceinline__ i32 first_block() { return vector_index() / 8; }
__device__ __forceinline__ i32 second_block() { return (28 + vector_index()) / 8; }

__device__ __forceinline__ Vector vector_of(const Vec<u32, 4>& words) {
  return vector_of(words.at[0], words.at[1], words.at[2], words.at[3]);
}

// 16 columns of each vector as fp8, with the scales of their blocks. Columns past the row must be 0.
template <class T>
__device__ __forceinline__ Packet quantize_packet(const quant::Columns<T>& first, const quant::Columns<T>& second,
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
  for (i32 b = 0; b < kPacketBlocks; ++b) {
    u32 mine = b <= 3 && first_block() == b ? amax_first : 0;
    if (b >= 3 && second_block() == b) mine = max(mine, amax_second);
    const u32 block_amax = __reduce_max_sync(~0u, mine);
    if (lane_idx() == b) amax = block_amax;
  }
  const f32 scale = quant::scale_of(amax, power_of_two), inverse = __fdiv_rn(1.0f, scale);
  const f32 inverse_first = __shfl_sync(~0u, inverse, first_block()),
            inverse_second = __shfl_sync(~0u, inverse, second_block());
  const u32 scale_bits = lane_idx() < kPacketBlocks ? __float_as_uint(scale) : 0;
  u32 scales[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) scales[i] = __shfl_sync(~0u, scale_bits, (lane_idx() >> 3) * 4 + i);
  const Vec<u32, 4> a = quant::encode(first, inverse_first, all_finite),
                    b = quant::encode(second, inverse_second, all_finite);
  if (is_flag_lane()) return {vector_of(scales[0], scales[1], scales[2], scales[3]), {0, 0}};
  return {vector_of(a), vector_of(b)};
}

// Bits of the scale of block b of a packet; each lane names its own b.
__device__ __forceinline__ u32 scale_of_block(const Packet& packet, i32 b) {
  const Vector scales = shuffle(packet.first, b / 4 * 8 + 7);
  return word_of(scales, b % 4);
}

}  // namespace ep::ll
