// How low-latency dispatch finds out where rows go: each block for itself, one barrier between the ids and the first
// row that leaves. ep_kernels/routing.py is the definition.
//
// A thread stands for an entry (token, k) and notes its hop (common/scheduler.cuh) in shared memory. Then each warp
// numbers rows: a lane stands for a token, 32 of them are a chunk, and a ballot per hop leaves in the hop's lane which
// of them go there, so that all positions of a token are known at once; chunks before are counted on the way.
// Worked example, rank 1 of 2, tokens to ranks {0}, {0, 1}, {1}: hop 0 is rank 0, masks 01, 11, 10; ballot of hop 1 =
// 110, so token 2's row is position 1 at rank 1.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/scheduler.cuh"
#include "routing/experts.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// Shared memory of a block.
struct LlScratch : Scratch {
  u64* masks;       // [T, rounded up to whole chunks] hops of each token (bit i)
  u8** lines_to;    // [R] by hop, this rank's part of lines there
  u8** records_to;  // [R] and of meta_lines
  const u8** here;  // [2] where this rank's lines and meta_lines begin
  i32* table;    // [E] rank << 16 | local expert, kGone, kChoose
  i32* before;   // [num_keys] rows per (rank, local expert): the block that tells
  i32* arrived;  // [R, 1 + local_stride] rows from each source, and for each local expert
  u32* seen;     // [num_keys, chunks of M] tokens that want an expert (bit of a token in its chunk), null = none
  bool* twice;   // whether a token wants one twice
};

__device__ __forceinline__ i32 arrived_stride(const World& world) { return 1 + (kPerExpert ? world.local_stride : 0); }

__device__ __forceinline__ i32 chunks_of(const World& world) { return (world.ll_tokens + 31) / 32; }

__device__ __forceinline__ LlScratch carve_ll(const World& world, u8* shared, bool* twice, const u8** here) {
  LlScratch scratch;
  scratch.twice = twice;
  scratch.here = here;
  const i32 keys = kPerExpert ? num_keys(world) : 0, groups = kPerExpert ? world.local_stride : 0;
  scratch.origin = 0;
  scratch.masks = reinterpret_cast<u64*>(after_waits(world, shared));
  scratch.lines_to = reinterpret_cast<u8**>(scratch.masks + chunks_of(world) * 32);
  scratch.records_to = scratch.lines_to + world.size;
  scratch.table = reinterpret_cast<i32*>(scratch.records_to + world.size);
  scratch.row_start = scratch.table + world.num_experts;
  scratch.before = scratch.row_start + world.size + 1;
  scratch.start = scratch.before + keys;
  scratch.total = scratch.start + keys;
  scratch.offset = scratch.total + groups;
  scratch.arrived = scratch.offset + groups + 1;
  const bool fits = kPerExpert && keys * chunks_of(world) <= MOST_SEEN;
  scratch.seen = fits ? reinterpret_cast<u32*>(scratch.arrived + world.size * (1 + groups)) : nullptr;
  return scratch;
}

// Of a routing used again. After a dispatch that was stopped its memory may hold anything, and the abort word is not
// here yet when this is looked at: what cannot be is nowhere. With `place`, which its records need, all four words are
// read: the register of one that nobody reads would be used for something else at once, which waits until the load is
// here (deliver_unit, docs/kernels/ll.md).
__device__ __forceinline__ i32 key_of(const World& world, const Home& home) {
  const bool known = home.rank < world.size && home.position >= 0 &&
                     static_cast<u32>(home.slot) < static_cast<u32>(world.local_stride);
  return home.rank < 0 ? home.rank : known ? home.rank << 16 | home.slot : kNowhere;
}

// Ids of the first entries (token, k) that a thread looks at, on their way.
constexpr i32 kIdsAhead = 2;
struct Ids {
  i32 at[kIdsAhead];
};

__device__ __forceinline__ i32 load_id(const DispatchArgs& args, i32 entry) {
  return !args.cached && entry < args.num_tokens * args.world.topk ? args.topk_ids[entry] : kNowhere;
}

__device__ __forceinline__ Ids ask_ids(const DispatchArgs& args) {
  Ids ids;
#pragma unroll
  for (i32 a = 0; a < kIdsAhead; ++a) ids.at[a] = load_id(args, threadIdx.x + a * THREADS);
  return ids;
}

// Calls visit(token, key) for each entry of this rank's, a thread for each; lanes past the last have kNowhere. All
// threads of a block.
template <class Visit>
__device__ __forceinline__ void for_entries(const DispatchArgs& args, const LlScratch& scratch, const Ids& ids,
                                            Divisor topk, Visit visit) {
  const World& world = args.world;
  const i32 entries = args.num_tokens * world.topk;
  auto look = [&](i32 entry, i32 id) {
    const i32 token = divide(entry, topk);
    i32 key = kNowhere;
    if (!args.cached) key = key_of(world, scratch.table, id, token);
    else if (entry < entries) key = key_of(world, args.home[entry]);
    visit(token, key);
  };
  i32 next = load_id(args, threadIdx.x + kIdsAhead * THREADS);  // of later ones, one is on its way
#pragma unroll
  for (i32 a = 0; a < kIdsAhead; ++a)
    if (warp_idx() * 32 + a * THREADS < entries) look(threadIdx.x + a * THREADS, ids.at[a]);
#pragma unroll 1
  for (i32 entry = threadIdx.x + kIdsAhead * THREADS; entry - lane_idx() < entries; entry += THREADS) {
    const i32 id = next;
    next = load_id(args, entry + THREADS);
    look(entry, id);
  }
}

// Notes in scratch.masks, which is zero, that a token goes to a rank; whether it was noted before. A block barrier
// follows.
__device__ __forceinline__ bool note_rank(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  const i32 hop = hop_of_rank(world, key >> 16);
  const u32 bit = 1u << (hop & 31);
  return atomicOr(reinterpret_cast<u32*>(scratch.masks + token) + (hop >> 5), bit) & bit;
}

// How far a warp has come in the order of tokens. Lane i speaks of hops i (low) and 32 + i (high).
struct Walk {
  i32 chunk;
  i32 low, high;        // rows there in all chunks before
  u32 to_low, to_high;  // tokens of this chunk that go there (bit of a token)
};

__device__ __forceinline__ void enter(const World& world, const LlScratch& scratch, i32 chunk, Walk& walk) {
  const u64 hops = scratch.masks[chunk * 32 + lane_idx()];
  walk.chunk = chunk;
  walk.to_low = transposed(static_cast<u32>(hops), min(world.size, 32));
  if (world.size > 32) walk.to_high = transposed(static_cast<u32>(hops >> 32), world.size - 32);
}

__device__ __forceinline__ Walk start_walk(const World& world, const LlScratch& scratch) {
  Walk walk = {0, 0, 0, 0, 0};
  enter(world, scratch, 0, walk);
  return walk;
}

__device__ __forceinline__ void walk_to(const World& world, const LlScratch& scratch, i32 chunk, Walk& walk) {
#pragma unroll 1
  while (walk.chunk < chunk) {
    walk.low += __popc(walk.to_low);
    walk.high += __popc(walk.to_high);
    enter(world, scratch, walk.chunk + 1, walk);
  }
}

// Where a token of the walk's chunk goes: hops i and 32 + i (bit i); in lane i, its positions there, if it goes there.
struct Stops {
  u32 hops_low, hops_high;
  i32 low, high;
};

__device__ __forceinline__ Stops stops_of(const World& world, const Walk& walk, i32 token) {
  const u32 bit = 1u << (token & 31);
  return {__ballot_sync(~0u, walk.to_low & bit), world.size > 32 ? __ballot_sync(~0u, walk.to_high & bit) : 0,
          walk.low + __popc(walk.to_low & (bit - 1)), walk.high + __popc(walk.to_high & (bit - 1))};
}

// What the lane of a hop has of it; all lanes, which may ask for different ones.
__device__ __forceinline__ i32 of_hop(const World& world, i32 low, i32 high, i32 hop) {
  const i32 found = __shfl_sync(~0u, low, hop & 31);
  if (world.size <= 32) return found;
  const i32 other = __shfl_sync(~0u, high, hop & 31);
  return hop < 32 ? found : other;
}

__device__ __forceinline__ i32 index_of(const World& world, i32 key) {
  return (key >> 16) * world.local_stride + (key & 0xFFFF);
}

// Notes in scratch.seen, which is zero, that a token wants an expert. A block barrier follows.
__device__ __forceinline__ void note_want(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  const u32 bit = 1u << (token & 31);
  if (atomicOr(&scratch.seen[index_of(world, key) * chunks_of(world) + (token >> 5)], bit) & bit) *scratch.twice = true;
}

// How many of this source's rows for the same local expert come before (token, k = lane): Home.place. `key` is this
// lane's, below 0 past K.
__device__ __forceinline__ i32 rows_noted(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  if (key < 0) return -1;
  const u32* seen = scratch.seen + index_of(world, key) * chunks_of(world);
  i32 found = __popc(seen[token >> 5] & ((1u << (token & 31)) - 1));
#pragma unroll 4
  for (i32 chunk = 0; chunk < token >> 5; ++chunk) found += __popc(seen[chunk]);
  return found;
}

// The same where nothing is noted, or a token wants an expert twice: a lane looks at every 32nd entry before the token,
// for kTargets of its keys at a time.
__device__ __noinline__ i32 rows_counted(const DispatchArgs& args, const i32* table, i32 token, i32 key) {
  constexpr i32 kTargets = 4;
  const i32 topk = args.world.topk;
  i32 found = 0;
#pragma unroll 1
  for (i32 first = 0; first < topk; first += kTargets) {
    i32 target[kTargets], count[kTargets] = {};
#pragma unroll
    for (i32 j = 0; j < kTargets; ++j) target[j] = __shfl_sync(~0u, key, (first + j) & 31);
#pragma unroll 1
    for (i32 e = lane_idx(); e < token * topk; e += 32) {
      const i32 other = key_of(args.world, table, args.topk_ids[e], e / topk);
#pragma unroll
      for (i32 j = 0; j < kTargets; ++j) count[j] += other == target[j];
    }
#pragma unroll
    for (i32 j = 0; j < kTargets; ++j) {
      const i32 all = __reduce_add_sync(~0u, count[j]);
      if (lane_idx() == first + j) found = all;
    }
  }
  return found + __popc(__match_any_sync(~0u, key) & ((1u << lane_idx()) - 1));
}

}  // namespace ep::ll
