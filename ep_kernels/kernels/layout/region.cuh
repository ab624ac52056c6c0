// Addresses in the regions of ranks, one function each. The byte map itself is in abi.py; LL128 lines are in
// layout/ll128.cuh.
#pragma once

#include "types.h"
#include "variant.h"

namespace ep {

template <class T>
__device__ __forceinline__ T* region_at(const World& world, i32 rank, u64 offset) {
  return reinterpret_cast<T*>(world.peers[rank] + offset);
}

// ---- ranks that are reached over the network ----

// False in groups of one domain, whose kernels have none of this (NETWORK).
__device__ __forceinline__ bool is_remote(const World& world, i32 rank) {
  return NETWORK && (world.state->network.remote >> rank & 1) != 0;
}

// Of ranks `at` and `from`, of which one is this rank, the other.
__device__ __forceinline__ i32 other_of(const World& world, i32 at, i32 from) {
  return at == world.rank ? from : at;
}

// Where what `from` sends to `at` lies here, at `offset` of a box: in this rank's outbox for `at`, or in its inbox of
// `from`. A box has one source, so that offset is of (slot, position) alone. One of the two ranks is remote.
__device__ __forceinline__ u8* box_at(const World& world, i32 at, i32 from, u64 offset) {
  const Network& network = world.state->network;
  const u64 boxes = at == world.rank ? network.inboxes : network.outboxes;
  return reinterpret_cast<u8*>(boxes + other_of(world, at, from) * network.stride + offset);
}

// What the network says of `from`, a remote rank: words that this rank's proxy writes or, of rows, that of the rail.
__device__ __forceinline__ u64* words_of(const World& world, bool of_rows, i32 from) {
  const Network& network = world.state->network;
  return of_rows ? reinterpret_cast<u64*>(network.carrier_words[from]) : network.words;
}

// The flag that rank `from` writes and rank `at` polls. Of a remote `from`: a word that a proxy writes; none of a
// remote `at` (common/push.cuh).
__device__ __forceinline__ u64* flag_at(const World& world, i32 at, u32 kind, i32 from) {
  if constexpr (NETWORK)
    if (is_remote(world, from))
      return words_of(world, kind == FLAG_PAYLOAD, from) + static_cast<u64>(kind) * world.size + from;
  return region_at<u64>(world, at, world.map.flags) + static_cast<u64>(kind) * world.size + from;
}

__device__ __forceinline__ i64 position_of(const World& world, i32 source, i32 position) {
  return static_cast<i64>(source) * world.max_tokens + position;
}

__device__ __forceinline__ u8* array_at(const DispatchArgs& args, i32 rank, u64 offset, u64 stride) {
  return region_at<u8>(args.world, rank, offset + args.slot * stride);
}

// ---- HT dispatch ----

// Token metadata, which travel beside a row, once per (token, k); 16 bytes, one store.
struct alignas(16) TokenMetadata {
  i32 local_expert;  // -1 = no expert of this rank serves this k
  i32 dst_row;       // Route.dst_row
  f32 weight;
  i32 token;         // index at the source
};

// [K] token metadata of a position.
__device__ __forceinline__ TokenMetadata* metadata_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return reinterpret_cast<TokenMetadata*>(array_at(args, at, map.metadata, map.metadata_stride)) +
         position_of(args.world, source, position) * args.world.topk;
}

__device__ __forceinline__ u8* scales_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.scales, map.scales_stride) +
         position_of(args.world, source, position) * args.world.scale_bytes;
}

__device__ __forceinline__ u8* row_at(const DispatchArgs& args, i32 at, i32 row) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.rows, map.rows_stride) + static_cast<i64>(row) * args.world.row_bytes;
}

__device__ __forceinline__ u64 routing_ids_at(const DispatchArgs& args) {
  return args.world.map.routing_ids + args.slot * args.world.map.routing_ids_stride;
}

// Arrival flag: last seq whose row of (source, position) has arrived at rank `at`. Per-expert layouts.
__device__ __forceinline__ u64* arrival_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return reinterpret_cast<u64*>(array_at(args, at, map.arrivals, map.arrivals_stride)) +
         position_of(args.world, source, position);
}

// ---- HT combine ----

__device__ __forceinline__ u8* combine_row_at(const CombineArgs& args, i32 rank, i64 row) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.combine_rows + args.slot * map.combine_rows_stride) +
         row * args.world.combine_row_bytes;
}

__device__ __forceinline__ f32* combine_weights_at(const CombineArgs& args, i32 rank, i64 position) {
  const RegionMap& map = args.world.map;
  return region_at<f32>(args.world, rank, map.combine_weights + args.slot * map.combine_weights_stride) +
         position * args.world.topk;
}

__device__ __forceinline__ u64 routing_ids_at(const CombineArgs& args) {
  return args.world.map.combine_routing_ids + args.slot * args.world.map.combine_routing_ids_stride;
}

// Progress flag in the region of rank `at`: last seq in which `expert_rank` has completed the chunk of this
// position.
__device__ __forceinline__ u64* progress_at(const World& world, i32 at, i32 expert_rank, i32 position) {
  const i32 chunks = (world.max_tokens + CHUNK - 1) / CHUNK;
  return region_at<u64>(world, at, world.map.flags) + NUM_FLAGS * world.size + static_cast<i64>(expert_rank) * chunks +
         position / CHUNK;
}

}  // namespace ep
