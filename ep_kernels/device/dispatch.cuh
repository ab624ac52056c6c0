// What both dispatch algorithms share: where things lie, and when a slot may be written. The receiving half is in receive.cuh.
//
// Compile-time numbers: LAYOUT (below) and X, the type that is quantised to fp8 (u8 = rows travel as they are).
#pragma once

constexpr i32 EXPERT_MAJOR = 0, GROUPED = 1, RANK_MAJOR = 2, FLAT = 3;
constexpr bool kPerExpert = LAYOUT == EXPERT_MAJOR || LAYOUT == GROUPED;
constexpr i32 kDropped = -2;  // a place past the receive capacity; -1 = not served here

// What travels beside a row, once per (token, k); 16 bytes, one store.
struct alignas(16) Meta {
  i32 local_expert;  // -1 = this k is not served here
  i32 place;         // Home.place
  f32 weight;
  i32 token;         // index at the source
};

// Shared memory of a block, as far as both have it.
struct Scratch {
  i32* start;      // LL: [num_keys] by (source, local expert): first row
  i32* total;      // [local experts] rows that arrive for each
  i32* offset;     // [local experts + 1] first row of each, padded
  i32* row_start;  // [R + 1] prefix sum of the rows that each source sent
  u64 origin;      // seq of the dispatch that made the routing: this one, or an earlier one whose handle is used again
};

__device__ __forceinline__ i64 position_of(const World& world, i32 source, i32 position) {
  return static_cast<i64>(source) * world.max_tokens + position;
}

__device__ __forceinline__ u8* array_at(const DispatchArgs& args, i32 rank, u64 offset, u64 stride) {
  return region_at<u8>(args.world, rank, offset + args.slot * stride);
}

// [K] records of a position.
__device__ __forceinline__ Meta* meta_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return reinterpret_cast<Meta*>(array_at(args, at, map.meta, map.meta_stride)) +
         position_of(args.world, source, position) * args.world.topk;
}

__device__ __forceinline__ u8* scales_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.scales, map.scales_stride) +
         position_of(args.world, source, position) * args.world.scale_bytes;
}

// HT: the caller reads scales where senders put them, at the rows' final places; else they lie by (source, position) until they are
// moved there. Equal on all ranks.
__device__ __forceinline__ bool scales_land(const DispatchArgs& args) {
  return !kPerExpert && args.out_scales == scales_at(args, args.world.rank, 0, 0);
}

// HT: where the scales of a row of this source go.
__device__ __forceinline__ u8* scales_of(const DispatchArgs& args, i32 at, i32 position, i32 place) {
  const i64 number = scales_land(args) ? place : position_of(args.world, args.world.rank, position);
  return scales_at(args, at, 0, 0) + number * args.world.scale_bytes;
}

__device__ __forceinline__ u8* row_at(const DispatchArgs& args, i32 at, i32 row) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.rows, map.rows_stride) + static_cast<i64>(row) * args.world.row_bytes;
}

__device__ __forceinline__ u64 origins_at(const DispatchArgs& args) {
  return args.world.map.origins + args.slot * args.world.map.origins_stride;
}

// The origin of the routing that this rank brings to operation `seq`.
__device__ __forceinline__ u64 origin_of(const DispatchArgs& args, u64 seq) {
  return args.cached ? ptx::load_volatile(args.origin) : seq;
}
