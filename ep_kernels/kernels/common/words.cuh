// What ranks of other hosts have said: words that the network writes, in pinned host memory.
//
// A read takes a microsecond, and reads of one word by many blocks wait for one another. So one thread at a time reads
// words of a rank, for all blocks, and lays what it finds into `seen`, on the device.
//
// Memory order: the reader acquires the word (system) and releases `seen` (gpu), others acquire that: they, too, see
// what came before the word.
#pragma once

#include "common/ptx.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::net {

__device__ __forceinline__ u64* seen_at(const World& world, u32 kind, i32 peer) {
  return world.state->network.seen + kind * MAX_RANKS + peer;
}

// A word of a remote rank: any value if it is at least `wanted`, else the one of now or of a moment ago.
__device__ __noinline__ u64 look(const World& world, u32 kind, i32 peer, u64 wanted) {
  u64* seen = seen_at(world, kind, peer);
  const u64 before = ptx::load_acquire_gpu(seen);
  u64* looking = world.state->network.looking + peer;
  if (before >= wanted || ptx::load_volatile(looking) != 0 || ptx::compare_and_swap_gpu(looking, 0, 1) != 0)
    return before;
  const u64 now = ptx::load_acquire_sys(flag_at(world, world.rank, kind, peer));
  ptx::store_release_gpu(seen, now);
  ptx::store_release_gpu(looking, 0);
  return now;
}

// Slices of an operation (push.cuh).
constexpr u32 kDispatch = 0, kCombine = 1;  // which operation
constexpr u32 kAllSlices = ~0u;

__device__ __forceinline__ u32 slices_in(u64 word, u64 seq) {
  const i32 ahead = static_cast<i32>(static_cast<u32>(word >> 32) - static_cast<u32>(seq));
  if (word == 0 || ahead < 0) return 0;  // 0: not read yet
  return ahead > 0 ? kAllSlices : static_cast<u32>(word);
}

// Slices of operation `seq` of a remote rank that are here: all of `wanted`, or those of now or of a moment ago.
__device__ __noinline__ u32 look_at_slices(const World& world, u32 which, i32 peer, u64 seq, u32 wanted) {
  Network& network = world.state->network;
  u64* seen = network.slices_seen + which * MAX_RANKS + peer;
  const u32 before = slices_in(ptx::load_acquire_gpu(seen), seq);
  u64* looking = network.looking + peer;
  if ((before & wanted) == wanted || ptx::load_volatile(looking) != 0 ||
      ptx::compare_and_swap_gpu(looking, 0, 1) != 0)
    return before;
  const u64* words = words_of(world, which == kDispatch, peer);
  const u64 now = ptx::load_acquire_sys(words + static_cast<u64>(NUM_FLAGS + which) * world.size + peer);
  ptx::store_release_gpu(seen, now);
  ptx::store_release_gpu(looking, 0);
  return slices_in(now, seq);
}

}  // namespace ep::net
