// Count exchange of HT dispatch, from block to block and from rank to rank: two counters in the low word of 16 bytes,
// the operation's seq in the high one. The pair is its own flag: no barrier, no fence and no separate flag.
//
// Counters that are exchanged: rows per (rank, local expert), then rows per rank; in rank-wise layouts only the latter.
// Among blocks, pair p of block b lies at [p][b], so that a warp reads the pairs of 32 blocks with one load.
//
// The count warps of a block exchange them: all warps in per-expert layouts, which have hundreds of counters; else the
// metadata warp alone, while the other warps continue.
//
// Memory contract: 16 aligned bytes, one store and one load (as count packets of LL), which PTX promises of .b128. seq
// grows for the life of the region, so no flag value occurs twice; mapped memory is zero before any peer writes.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "types.h"

namespace ep::ht {

constexpr u64 kNoCounts = ~0ull;  // a peer reuses a routing: it sends no counts
constexpr i32 kPairUnroll = 4;    // loads of a lane in flight

struct alignas(16) Pair {
  u64 low, high;
};

__device__ __forceinline__ bool is_metadata_warp() { return warp_idx() == num_warps() - 1; }

__device__ __forceinline__ bool is_count_warp() { return kPerExpert || is_metadata_warp(); }
__device__ __forceinline__ i32 count_warp_idx() { return kPerExpert ? warp_idx() : 0; }
__device__ __forceinline__ i32 num_count_warps() { return kPerExpert ? num_warps() : 1; }
__device__ __forceinline__ i32 count_thread_idx() { return count_warp_idx() * 32 + lane_idx(); }

__device__ __forceinline__ void sync_count_warps() {
  if (kPerExpert) __syncthreads();
  else __syncwarp();
}

// True if `holds` in any thread of the count warps; also a barrier of them.
__device__ __forceinline__ bool any_count_thread(bool holds) {
  if (kPerExpert) return __syncthreads_or(holds) != 0;
  const bool any = __any_sync(~0u, holds) != 0;
  __syncwarp();
  return any;
}

__device__ __forceinline__ i32 first_counter(const World& world) { return kPerExpert ? 0 : num_keys(world); }
__device__ __forceinline__ i32 num_pairs(const World& world) {
  return (num_counters(world) - first_counter(world) + 1) / 2;
}

// Pair p of a rank's counters.
__device__ __forceinline__ u64 pair_of(const World& world, const i32* counters, i32 p) {
  const i32 i = first_counter(world) + 2 * p;
  const u32 high = i + 1 < num_counters(world) ? counters[i + 1] : 0;
  return static_cast<u32>(counters[i]) | static_cast<u64>(high) << 32;
}

// Calls visit(counter, value) for both counters of pair p.
template <class Visit>
__device__ __forceinline__ void unpack_pair(const World& world, i32 p, u64 low, Visit visit) {
  const i32 i = first_counter(world) + 2 * p;
  visit(i, static_cast<i32>(low));
  if (i + 1 < num_counters(world)) visit(i + 1, static_cast<i32>(low >> 32));
}

__device__ __forceinline__ u8* block_pair_at(const World& world, Team team, i32 p, i32 block) {
  return world.block_counts + (static_cast<i64>(p) * team.num_blocks + block) * sizeof(Pair);
}

// Pair p of `source`, in the region of rank `at`.
__device__ __forceinline__ u8* pair_at(const DispatchArgs& args, i32 at, i32 source, i32 p) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.counts, map.counts_stride) +
         (static_cast<i64>(source) * (num_counters(args.world) / 2 + 1) + p) * sizeof(Pair);
}

// Sends this block's counters to the blocks after it. Count warps.
__device__ __forceinline__ void send_block_counts(const World& world, Team team, const i32* counters, u64 seq) {
  for (i32 p = count_thread_idx(); p < num_pairs(world); p += num_count_warps() * 32)
    ptx::store_pair(block_pair_at(world, team, p, team.block), pair_of(world, counters, p), seq);
}

// block_prefix[counter] = sum over the blocks before this one. Count warps; false in a warp whose wait failed.
__device__ __forceinline__ bool sum_block_prefix(const World& world, Team team, i32* block_prefix, u64 seq) {
  const i32 pairs = num_pairs(world), step = num_count_warps();
  bool ok = true;
  for (i32 first = count_warp_idx(); first < pairs && ok; first += step * kPairUnroll) {
    u64 sum[kPairUnroll] = {};
    // A lane for each block before this one: poll until it has said its counters.
    for (i32 base = 0; base < team.block && ok; base += 32) {
      const i32 block = base + lane_idx();
      Pair pair[kPairUnroll];
      ok = spin::warp_wait(world, seq, OP_DISPATCH, PHASE_BLOCKS, world.rank, [&] {
        bool ready = true;
#pragma unroll
        for (i32 j = 0; j < kPairUnroll; ++j) {
          pair[j] = {0, seq};
          if (block < team.block && first + j * step < pairs)
            pair[j] = ptx::load_pair<Pair>(block_pair_at(world, team, first + j * step, block));
        }
#pragma unroll
        for (i32 j = 0; j < kPairUnroll; ++j) ready &= pair[j].high == seq;
        return ready;
      });
#pragma unroll
      for (i32 j = 0; j < kPairUnroll; ++j) {
        const u32 low = __reduce_add_sync(~0u, static_cast<u32>(pair[j].low));
        const u32 high = __reduce_add_sync(~0u, static_cast<u32>(pair[j].low >> 32));
        sum[j] += low | static_cast<u64>(high) << 32;
      }
    }
#pragma unroll
    for (i32 j = 0; j < kPairUnroll; ++j)
      if (first + j * step < pairs && lane_idx() == 0)
        unpack_pair(world, first + j * step, sum[j], [&](i32 i, i32 value) { block_prefix[i] = value; });
  }
  return ok;
}

// Sends the totals of this rank (null: it reuses a routing) and its routing_id to each peer as soon as that peer's slot
// is free. A silent peer must not delay the others, so each lane waits for a peer of its own. Count warps; the loads of
// `credit` are in flight. A later release of the arrival counter covers the routing_id.
__device__ __forceinline__ void send_counts(const DispatchArgs& args, Credit credit, const i32* totals, u64 routing_id,
                                            u64 seq) {
  const World& world = args.world;
  const u64 needed = free_from(world, credit.last, seq);
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    // A lane for each peer: its slot is free, then all count warps store their part.
    const i32 peer = min(base + lane_idx(), world.size - 1);
    bool sent = base + lane_idx() >= world.size || !is_active(peer);
    u64 seen = base == 0 ? credit.seen : 0;
    spin::warp_wait(world, needed, OP_DISPATCH, PHASE_CREDIT, peer, [&] {
      if (sent) return true;
      if (seen < needed) seen = ptx::load_acquire_sys(flag_at(world, world.rank, FLAG_STARTED, peer));
      if (seen < needed) return false;
#pragma unroll 1
      for (i32 p = count_warp_idx(); p < num_pairs(world); p += num_count_warps())
        ptx::store_pair(pair_at(args, peer, world.rank, p), totals == nullptr ? kNoCounts : pair_of(world, totals, p),
                        seq);
      if (count_warp_idx() == 0) *routing_id_at(world, peer, routing_ids_at(args), world.rank) = routing_id;
      return sent = true;
    });
  }
}

// Receives the counts of all sources: per counter the sum over the sources before this rank and over all; rows[source]
// for this rank. `differs`: a peer reuses a routing. Count warps; false in a warp whose wait failed. This rank's own
// counts come first: their wait is for blocks, not for peers.
__device__ __forceinline__ bool receive_counts(const DispatchArgs& args, i32* source_prefix, i32* totals, i32* rows,
                                               u64 seq, bool* differs) {
  const World& world = args.world;
  const i32 pairs = num_pairs(world), mine = num_keys(world) + world.rank - first_counter(world);
  for (i32 first_pair = count_warp_idx() * 32; first_pair < pairs; first_pair += num_count_warps() * 32) {
    const i32 p = first_pair + lane_idx();
    u64 sum = 0, prefix = 0;
    for (i32 base = 0; base < world.size; base += kPairUnroll) {
      u64 counts[kPairUnroll] = {};
      u32 missing = 0;
      i32 peer = world.rank;
      // Counts of some sources that are still missing.
      for (i32 j = 0; j < kPairUnroll && base + j < world.size; ++j)
        if (p < pairs && is_active(base + j)) missing |= 1u << j;
      const i32 own = world.rank - base;
      const u32 own_bit = own >= 0 && own < kPairUnroll ? 1u << own : 0;
      u32 awaited = own_bit;
      auto poll = [&] {
        Pair pair[kPairUnroll];
#pragma unroll
        for (i32 j = 0; j < kPairUnroll; ++j)
          if (missing >> j & 1) pair[j] = ptx::load_pair<Pair>(pair_at(args, world.rank, base + j, p));
#pragma unroll
        for (i32 j = 0; j < kPairUnroll; ++j) {
          if ((missing >> j & 1) == 0 || pair[j].high != seq) continue;
          counts[j] = pair[j].low;
          missing &= ~(1u << j);
        }
        if ((missing & awaited) != 0) peer = base + __ffs(missing & awaited) - 1;
        return (missing & awaited) == 0;
      };
      // Own ones first, then the others.
      if (own_bit != 0 && !spin::warp_wait(world, seq, OP_DISPATCH, PHASE_BLOCKS, peer, poll)) return false;
      awaited = ~0u;
      if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_COUNTS, peer, poll)) return false;
      // Add them: all, and those before this rank.
#pragma unroll
      for (i32 j = 0; j < kPairUnroll; ++j) {
        const i32 source = base + j;
        if (counts[j] == kNoCounts) *differs = true;
        if (source < world.rank) prefix += counts[j];
        sum += counts[j];
        if (p == mine / 2 && source < world.size) rows[source] = static_cast<i32>(counts[j] >> (mine % 2 * 32));
      }
    }
    // Two counters in a pair.
    if (p >= pairs) continue;
    unpack_pair(world, p, sum, [&](i32 i, i32 value) { totals[i] = value; });
    unpack_pair(world, p, prefix, [&](i32 i, i32 value) { source_prefix[i] = value; });
  }
  return true;
}

}  // namespace ep::ht
