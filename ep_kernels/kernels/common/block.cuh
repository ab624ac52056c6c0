// A team is the blocks of one rank. Here also: warp and lane indices, the active ranks, and the start of a block's
// shared memory. On a GPU a rank is the whole grid; in the loop-back harness one cooperative launch holds the teams of
// all ranks, so that they are resident together.
#pragma once

#include "types.h"
#include "variant.h"

namespace ep {

constexpr u32 kBarrierBytes = 512;  // shared memory of a block starts with mbarriers; then come the waits per peer

struct Team {
  i32 block;       // this block within the rank
  i32 num_blocks;  // blocks of the rank
};

constexpr u32 kSend = 1, kReceive = 2;  // phases: bits of work.phases

// C linkage, as for all static shared memory at namespace scope: its layout then follows from the order of definitions,
// not from mangled names.
extern "C" {
__shared__ u8 active_ranks[MAX_RANKS];
}

// Starts the load of whether rank threadIdx.x is active. The set changes only while no kernel runs.
__device__ __forceinline__ u8 prefetch_active(const World& world) {
  static_assert(THREADS >= MAX_RANKS, "a thread for each rank");
  return threadIdx.x < static_cast<u32>(world.size) ? world.active[threadIdx.x] : 0;
}

// All threads, once; a block barrier must follow before is_active is called.
__device__ __forceinline__ void store_active(const World& world, u8 active) {
  if (threadIdx.x < static_cast<u32>(world.size)) active_ranks[threadIdx.x] = active;
}

__device__ __forceinline__ void load_active(const World& world) { store_active(world, prefetch_active(world)); }

__device__ __forceinline__ bool is_active(i32 rank) { return active_ranks[rank] != 0; }

// [R] nanoseconds that this block waited for each peer.
__device__ __forceinline__ u64* waits_at(u8* shared) { return reinterpret_cast<u64*>(shared + kBarrierBytes); }

// Shared memory behind mbarriers and waits.
__device__ __forceinline__ u8* after_waits(const World& world, u8* shared) {
  return shared + kBarrierBytes + (world.size + 1) / 2 * 16;
}

__device__ __forceinline__ i32 lane_idx() { return threadIdx.x & 31; }
__device__ __forceinline__ i32 warp_idx() { return threadIdx.x >> 5; }
__device__ __forceinline__ i32 num_warps() { return blockDim.x >> 5; }

}  // namespace ep
