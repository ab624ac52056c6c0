// Records of HT dispatch, 16 bytes per (token, k): the clerk tells its block's tokens' to their ranks, a rank works up
// those that come.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ht_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"

namespace ep::ht {

// A lane stands for a (token, k), or (position, k), of as many as there is room for.
struct EntryLanes {
  i32 each, sub, k;  // tokens together; this lane's among them, and its k
  u32 group;         // lanes of its token; 0: it has none

  __device__ __forceinline__ bool has(i32 token, Range tokens) const { return group != 0 && token < tokens.past; }
};

__device__ __forceinline__ EntryLanes entry_lanes(i32 topk) {
  const i32 each = 32 / topk, sub = lane_idx() / topk;
  return {each, sub, lane_idx() % topk, sub < each ? (topk == 32 ? ~0u : (1u << topk) - 1) << (sub * topk) : 0};
}

// ---- the sending half ----

// What a lane of the clerk knows, of its tokens and of as many after them: side by side, since each is a chain of
// exchanges.
struct Entries {
  static constexpr i32 kTogether = 2;
  Home home[kTogether];
  f32 weight[kTogether];
};

__device__ __forceinline__ Entries load_entries(const DispatchArgs& args, const EntryLanes& lanes, i32 first,
                                                Range tokens) {
  Entries entries;
#pragma unroll
  for (i32 i = 0; i < Entries::kTogether; ++i) {
    const i32 token = first + i * lanes.each + lanes.sub;
    const bool there = lanes.has(token, tokens);
    const i64 entry = static_cast<i64>(token) * args.world.topk + lanes.k;
    entries.home[i] = there ? args.home[entry] : Home{kNowhere, -1, -1, -1};
    entries.weight[i] = there ? args.topk_weights[entry] : 0.0f;
  }
  return entries;
}

// The tokens' records to each of their ranks, once. All lanes.
__device__ __forceinline__ void tell_entries(const DispatchArgs& args, const EntryLanes& lanes, const Entries& entries,
                                             i32 first) {
  constexpr i32 kTogether = Entries::kTogether;
  u64 ranks[kTogether], to[kTogether];  // ranks of this k and of those before it; where this k's rank has its records
  u32 left[kTogether];                  // lanes whose rank is to be told, the first k of each rank
#pragma unroll
  for (i32 i = 0; i < kTogether; ++i) ranks[i] = entries.home[i].rank < 0 ? 0 : 1ull << entries.home[i].rank;
#pragma unroll 1
  for (i32 step = 1; step < args.world.topk; step *= 2)
#pragma unroll
    for (i32 i = 0; i < kTogether; ++i) {
      const u64 before = __shfl_up_sync(~0u, ranks[i], step);
      if (lanes.k >= step) ranks[i] |= before;
    }
#pragma unroll
  for (i32 i = 0; i < kTogether; ++i) {
    const Home& home = entries.home[i];
    const u64 before = __shfl_up_sync(~0u, ranks[i], 1);
    const bool leads = home.rank >= 0 && (lanes.k == 0 || (before >> home.rank & 1) == 0);
    to[i] = leads ? reinterpret_cast<u64>(meta_at(args, home.rank, args.world.rank, home.position)) : 0;
    left[i] = __ballot_sync(~0u, leads) & lanes.group;
  }
#pragma unroll 1
  for (;;) {
    u32 some = 0;
#pragma unroll
    for (i32 i = 0; i < kTogether; ++i) some |= left[i];
    if (!__any_sync(~0u, some != 0)) return;
#pragma unroll
    for (i32 i = 0; i < kTogether; ++i) {
      const Home& home = entries.home[i];
      const i32 from = left[i] != 0 ? __ffs(left[i]) - 1 : 0, rank = __shfl_sync(~0u, home.rank, from);
      Meta* const records = reinterpret_cast<Meta*>(__shfl_sync(~0u, to[i], from));
      const bool here = home.rank == rank;
      if (left[i] != 0)
        records[lanes.k] = {here ? home.slot : -1, home.place, here ? entries.weight[i] : 0.0f,
                            first + i * lanes.each + lanes.sub};
      left[i] &= left[i] - 1;
    }
  }
}

// Of this block's tokens: records to their ranks, and what the caller is told: valid [T], ids out of range. One warp.
__device__ __forceinline__ void tell_records(const DispatchArgs& args, Range tokens) {
  constexpr i32 kTogether = Entries::kTogether;
  const EntryLanes lanes = entry_lanes(args.world.topk);
  u32 invalid = 0;
  Entries ahead = load_entries(args, lanes, tokens.first, tokens);
#pragma unroll 1
  for (i32 first = tokens.first; first < tokens.past; first += kTogether * lanes.each) {
    const Entries entries = ahead;
    ahead = load_entries(args, lanes, first + kTogether * lanes.each, tokens);
#pragma unroll
    for (i32 i = 0; i < kTogether; ++i) {
      const i32 token = first + i * lanes.each + lanes.sub;
      const u32 gone = __ballot_sync(~0u, entries.home[i].rank == kGone);
      invalid += __popc(__ballot_sync(~0u, entries.home[i].rank == kInvalid));
      if (lanes.k == 0 && lanes.has(token, tokens)) args.valid[token] = (gone & lanes.group) == 0;
    }
    tell_entries(args, lanes, entries, first);
  }
  if (invalid != 0 && lane_idx() == 0) atomicAdd(&args.world.state->invalid_ids, static_cast<u64>(invalid));
  __syncwarp();
}

// ---- the receiving half ----

// The records of every peer are here, and all of them brought the same routing. One warp.
__device__ __noinline__ bool await_records(const DispatchArgs& args, u64 origin, u64 seq) {
  const World& world = args.world;
  if (!__all_sync(~0u, warp_await_peers(world, FLAG_RECORDS, seq * kWhole, OP_DISPATCH, PHASE_PAYLOAD))) return false;
  bool differs = false;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    differs |= is_active(peer) && ptx::load_volatile(origin_at(world, world.rank, origins_at(args), peer)) != origin;
  return !__any_sync(~0u, differs);
}

// What combine and the caller need of every received position: places, weights, tokens, ids. One warp, a lane per
// (position, k); warps of the block take a few positions at a time until all of its share are done.
__device__ __forceinline__ void record_rows(const DispatchArgs& args, Team team, const HtScratch& scratch) {
  constexpr i32 kTogether = 4;
  const World& world = args.world;
  const EntryLanes lanes = entry_lanes(world.topk);
  const i32 topk = world.topk, each = lanes.each, k = lanes.k;
  const i32 rows = scratch.row_start[world.size];
#pragma unroll 1
  for (;;) {
    u32 taken = 0;
    if (lane_idx() == 0) taken = atomicAdd(scratch.next_record, 1u);
    const i32 number = static_cast<i32>(__shfl_sync(~0u, taken, 0)) * team.num_blocks + team.block;
    const i32 first = number * kTogether * each;
    if (first >= rows) return;
    Meta meta[kTogether];
    i32 source[kTogether];
    i32 from = 0;
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      const i32 i = first + j * each + lanes.sub;
      source[j] = -1;
      if (lanes.group == 0 || i >= rows) continue;
      while (i >= scratch.row_start[from + 1]) ++from;
      source[j] = from;
      meta[j] = meta_at(args, world.rank, from, i - scratch.row_start[from])[k];
    }
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      if (source[j] < 0) continue;
      const i32 position = first + j * each + lanes.sub - scratch.row_start[source[j]];
      const i64 at = position_of(world, source[j], position);
      args.weights[at * topk + k] = meta[j].weight;
      if (!args.cached) {
        args.places[at * topk + k] = meta[j].local_expert < 0 ? -1 : meta[j].place;
        if (k == 0) args.tokens[at] = meta[j].token;
      }
      if (kPerExpert) continue;
      const i32 row = admit(first_row(args, scratch, source[j]) + position, 0, world.capacity);
      if (row < 0) continue;
      args.out_ids[static_cast<i64>(row) * topk + k] = meta[j].local_expert;
      args.out_weights[static_cast<i64>(row) * topk + k] = meta[j].weight;
    }
  }
}

}  // namespace ep::ht
