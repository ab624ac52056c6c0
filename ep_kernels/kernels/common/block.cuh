// Who works together: the blocks of one rank, their warps and lanes; which ranks take part; how a block's shared memory
// begins. On a GPU of its own a rank is the whole grid; in the loop-back harness one cooperative launch holds the teams
// of all ranks, so that they are resident together.
#pragma once

#include "types.h"
#include "variant.h"

namespace ep {

constexpr u32 kBarrierBytes = 512;  // shared memory of a block starts with the mbarriers, then a wait per peer

struct Team {
  i32 block;       // this block within the rank
  i32 num_blocks;  // blocks of the rank
};

constexpr u32 kSend = 1, kReceive = 2;  // work.halves

// C linkage, as of all words of static shared memory: where they lie follows from their order, not from namespaces.
extern "C" {
__shared__ u8 active_ranks[MAX_RANKS];
}

// Whether the rank of this thread's number takes part, on its way. Changes only while no kernel runs.
__device__ __forceinline__ u8 ask_active(const World& world) {
  static_assert(THREADS >= MAX_RANKS, "a thread for each rank");
  return threadIdx.x < static_cast<u32>(world.size) ? world.active[threadIdx.x] : 0;
}

// All threads, once, before a block barrier that comes before any question.
__device__ __forceinline__ void keep_active(const World& world, u8 active) {
  if (threadIdx.x < static_cast<u32>(world.size)) active_ranks[threadIdx.x] = active;
}

__device__ __forceinline__ void load_active(const World& world) { keep_active(world, ask_active(world)); }

__device__ __forceinline__ bool is_active(i32 rank) { return active_ranks[rank] != 0; }

// [R] nanoseconds that this block waited for each peer.
__device__ __forceinline__ u64* waits_at(u8* shared) { return reinterpret_cast<u64*>(shared + kBarrierBytes); }

// What follows them.
__device__ __forceinline__ u8* after_waits(const World& world, u8* shared) {
  return shared + kBarrierBytes + (world.size + 1) / 2 * 16;
}

__device__ __forceinline__ i32 lane_idx() { return threadIdx.x & 31; }
__device__ __forceinline__ i32 warp_idx() { return threadIdx.x >> 5; }
__device__ __forceinline__ i32 num_warps() { return blockDim.x >> 5; }

}  // namespace ep
