// What a rank tells ranks of other hosts: descriptors in a ring in pinned host memory, which the proxy thread takes
// (ep_kernels/network/native/ring.hpp). One descriptor: write these bytes of my outbox for that rank to the same place
// of its inbox of mine, then give it this immediate.
//
//   source rank                                        proxy              expert rank
//   all blocks: lines -> outbox
//   last block: places in the ring, fence, descriptors -> bytes --------> inbox
//                                                         immediates ---> words[kind][source] = seq, when all are here
//                                                                         wait for the word, then read lines
//
// Memory order. All blocks' stores happen before their arrival (arrive: acq_rel, gpu), the last block's fence is of the
// system, and a descriptor is one 16-byte store behind it: a proxy that sees its parity sees the bytes. The proxy
// stores the word (release) after the bytes of every part; a kernel loads it (acquire, system), then the lines. Tags of
// lines say nothing here: the memory model does not promise that 128 bytes come as a whole.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

#if NETWORK  // what other variants only declare would move their code

namespace ep::net {

__device__ __forceinline__ u32 immediate(u32 kind, u32 parts, u64 seq) {
  return kind << 28 | (parts - 1) << SEQ_BITS | static_cast<u32>(seq & ((1u << SEQ_BITS) - 1));
}

// Waits until the ring has room for descriptor `at`. The proxy takes descriptors without waiting for anybody.
__device__ __noinline__ bool await_room(const World& world, u64 at, u32 op, i32 peer) {
  Network& network = world.state->network;
  const bool ok = spin::wait_for(world, network.popped, at + 1 - RING_SIZE, op, PHASE_CREDIT, peer);
  ptx::max_relaxed_gpu(&network.popped_seen, ptx::load_relaxed_sys(network.popped));
  return ok;
}

// Places of the ring that a thread has taken and must fill, each with a descriptor, in order. Any threads at once.
struct Places {
  u64 next, popped;  // popped: of an earlier look
};

// Two trips to the L2 at once, in front of the fence: they are over when it is.
__device__ __forceinline__ Places take_places(const World& world, u32 count) {
  Network& network = world.state->network;
  const u64 popped = ptx::load_volatile(&network.popped_seen);  // in flight beside the next
  return {ptx::take_relaxed_gpu(&network.tail, count), popped};
}

__device__ __forceinline__ void push(const World& world, Places& places, i32 peer, u64 offset, u32 num_bytes, u32 imm,
                                     u32 op) {
  const Network& network = world.state->network;
  const u64 at = places.next++;
  if (at >= places.popped + RING_SIZE) {
    if (!await_room(world, at, op, peer)) return;
    places.popped = ptx::load_volatile(&network.popped_seen);
  }
  const u64 parity = (at / RING_SIZE) % 2 == 0 ? 1ull << 63 : 0;
  ptx::store_pair(network.ring + at % RING_SIZE * 16, num_bytes | static_cast<u64>(imm) << 32,
                  offset | static_cast<u64>(peer) << 48 | parity);
}

// A word without bytes: `kind` of this rank is `seq` at `peer`.
__device__ __forceinline__ void push_word(const World& world, i32 peer, u32 kind, u64 seq, u32 op) {
  Places place = take_places(world, 1);
  push(world, place, peer, 0, 0, immediate(kind, 1, seq), op);
}

// Bytes of the outbox for `peer`.
struct Run {
  u64 offset, num_bytes;
};

__device__ __forceinline__ u32 parts_of(const Network& network, const Run& run) {
  if (run.num_bytes == 0) return 0;
  return static_cast<u32>((run.offset + run.num_bytes - 1) / network.stripe - run.offset / network.stripe + 1);
}

// All runs of one operation for `peer`, and with the last of them, in whatever order they come, flag[kind] = seq there.
// One thread that sees all of their bytes: the fence of the system between those and the descriptors is here.
template <i32 N>
__device__ __forceinline__ void push_runs(const World& world, i32 peer, u32 kind, Run (&runs)[N], u64 seq, u32 op) {
  const Network& network = world.state->network;
  u32 parts = 0;
#pragma unroll 1
  for (i32 i = 0; i < N; ++i) {
    runs[i].offset += peer * network.stride;
    parts += parts_of(network, runs[i]);
  }
  Places places = take_places(world, parts);
  ptx::fence_sys();
#pragma unroll 1
  for (i32 i = 0; i < N; ++i) {
    Run left = runs[i];
#pragma unroll 1
    while (left.num_bytes != 0) {
      const u64 in_stripe = network.stripe - left.offset % network.stripe;
      const u64 n = left.num_bytes < in_stripe ? left.num_bytes : in_stripe;
      push(world, places, peer, left.offset, static_cast<u32>(n), immediate(kind, parts, seq), op);
      left.offset += n;
      left.num_bytes -= n;
    }
  }
}

// ---- what has come ----

// [R] 1 = a warp of this block has seen that everything of this operation is here from that rank: the one that awaits
// count packets, or routing ids.
__device__ __forceinline__ u32* arrived_from() {
  __shared__ u32 arrived[MAX_RANKS];
  return arrived;
}

// All threads, once; a block barrier must follow before has_arrived is called.
__device__ __forceinline__ void init_arrived() {
  if (threadIdx.x < MAX_RANKS) arrived_from()[threadIdx.x] = 0;
}

// Whether everything that `source` sends in operation `seq` is here; true for ranks that are mapped, whose lines say it
// themselves. Then this thread sees it.
__device__ __forceinline__ bool has_arrived(const World& world, u32 kind, i32 source, u64 seq) {
  if (!is_remote(world, source)) return true;
  u32* arrived = arrived_from() + source;
  if (ptx::load_acquire_block(arrived) != 0) return true;
  if (look(world, kind, source, seq) < seq) return false;
  ptx::store_release_block(arrived, 1);
  return true;
}

// Whether a warp of this block has found that; it reads no host memory, which a warp per block is enough for. All lanes
// name one source.
__device__ __forceinline__ bool warp_knows_arrived(const World& world, i32 source) {
  return !is_remote(world, source) || __all_sync(~0u, ptx::load_acquire_block(arrived_from() + source) != 0);
}

}  // namespace ep::net

#endif
