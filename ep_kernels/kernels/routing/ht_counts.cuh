// How the counts of an HT dispatch travel, from block to block and from rank to rank: two counters in the low word of
// 16 bytes, the operation's seq in the high one. The pair is its own flag: no barrier, no fence and no announcement
// stands behind it.
//
// Counters that are told: rows per (rank, local expert), then rows per rank; where rows are not grouped per expert,
// only the latter. Among blocks pair p of block b lies at [p][b], so that a warp reads 32 blocks at once.
//
// Who exchanges them is the block's crew: all warps where counters are per expert, which are many; else the clerk
// alone, and the other warps go on meanwhile.
//
// Memory contract: 16 aligned bytes, one store and one load (as heads of LL), which PTX promises of .b128. seq grows
// for the life of the region, so a tag is never met again; what is mapped is blank before any peer writes.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "types.h"

namespace ep::ht {

constexpr u64 kNoCounts = ~0ull;  // a peer brought a handle: no counts
constexpr i32 kPairsTogether = 4;  // loads of a lane under way

struct alignas(16) Pair {
  u64 low, high;
};

__device__ __forceinline__ bool is_clerk() { return warp_idx() == num_warps() - 1; }

__device__ __forceinline__ bool in_crew() { return kPerExpert || is_clerk(); }
__device__ __forceinline__ i32 crew_warp() { return kPerExpert ? warp_idx() : 0; }
__device__ __forceinline__ i32 crew_warps() { return kPerExpert ? num_warps() : 1; }
__device__ __forceinline__ i32 crew_thread() { return crew_warp() * 32 + lane_idx(); }

__device__ __forceinline__ void crew_sync() {
  if (kPerExpert) __syncthreads();
  else __syncwarp();
}

// Whether it holds for any thread of the crew; a barrier, too.
__device__ __forceinline__ bool crew_any(bool holds) {
  if (kPerExpert) return __syncthreads_or(holds) != 0;
  const bool any = __any_sync(~0u, holds) != 0;
  __syncwarp();
  return any;
}

__device__ __forceinline__ i32 first_told(const World& world) { return kPerExpert ? 0 : num_keys(world); }
__device__ __forceinline__ i32 num_pairs(const World& world) {
  return (num_counters(world) - first_told(world) + 1) / 2;
}

// Pair p of a rank's counters.
__device__ __forceinline__ u64 pair_of(const World& world, const i32* counters, i32 p) {
  const i32 i = first_told(world) + 2 * p;
  const u32 high = i + 1 < num_counters(world) ? counters[i + 1] : 0;
  return static_cast<u32>(counters[i]) | static_cast<u64>(high) << 32;
}

// Calls keep(counter, value) for both counters of pair p.
template <class Keep>
__device__ __forceinline__ void unpack_pair(const World& world, i32 p, u64 low, Keep keep) {
  const i32 i = first_told(world) + 2 * p;
  keep(i, static_cast<i32>(low));
  if (i + 1 < num_counters(world)) keep(i + 1, static_cast<i32>(low >> 32));
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

// This block's counters to the blocks after it. The crew.
__device__ __forceinline__ void tell_blocks(const World& world, Team team, const i32* counters, u64 seq) {
  for (i32 p = crew_thread(); p < num_pairs(world); p += crew_warps() * 32)
    ptx::store_pair(block_pair_at(world, team, p, team.block), pair_of(world, counters, p), seq);
}

// before[counter] = sum over the blocks before this one. The crew; false in a warp whose wait failed.
__device__ __forceinline__ bool sum_blocks_before(const World& world, Team team, i32* before, u64 seq) {
  const i32 pairs = num_pairs(world), step = crew_warps();
  bool ok = true;
  for (i32 first = crew_warp(); first < pairs && ok; first += step * kPairsTogether) {
    u64 sum[kPairsTogether] = {};
    for (i32 base = 0; base < team.block && ok; base += 32) {
      const i32 block = base + lane_idx();
      Pair got[kPairsTogether];
      ok = spin::warp_wait(world, seq, OP_DISPATCH, PHASE_BLOCKS, world.rank, [&] {
        bool here = true;
#pragma unroll
        for (i32 j = 0; j < kPairsTogether; ++j) {
          got[j] = {0, seq};
          if (block < team.block && first + j * step < pairs)
            got[j] = ptx::load_pair<Pair>(block_pair_at(world, team, first + j * step, block));
        }
#pragma unroll
        for (i32 j = 0; j < kPairsTogether; ++j) here &= got[j].high == seq;
        return here;
      });
#pragma unroll
      for (i32 j = 0; j < kPairsTogether; ++j) {
        const u32 low = __reduce_add_sync(~0u, static_cast<u32>(got[j].low));
        const u32 high = __reduce_add_sync(~0u, static_cast<u32>(got[j].low >> 32));
        sum[j] += low | static_cast<u64>(high) << 32;
      }
    }
#pragma unroll
    for (i32 j = 0; j < kPairsTogether; ++j)
      if (first + j * step < pairs && lane_idx() == 0)
        unpack_pair(world, first + j * step, sum[j], [&](i32 i, i32 value) { before[i] = value; });
  }
  return ok;
}

// Totals of this rank (null: it brought a handle) and the origin of its routing, to each peer as soon as that peer's
// slot is free: one that is silent must not silence this rank towards the others, so each lane waits for a peer of its
// own. The crew; `credit` has been asked for. The origin is carried by a later share.
__device__ __forceinline__ void tell_ranks(const DispatchArgs& args, Credit credit, const i32* totals, u64 origin,
                                           u64 seq) {
  const World& world = args.world;
  const u64 needed = free_from(world, credit.last, seq);
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 peer = min(base + lane_idx(), world.size - 1);
    bool told = base + lane_idx() >= world.size || !is_active(peer);
    u64 seen = base == 0 ? credit.seen : 0;
    spin::warp_wait(world, needed, OP_DISPATCH, PHASE_CREDIT, peer, [&] {
      if (told) return true;
      if (seen < needed) seen = ptx::load_acquire_sys(flag_at(world, world.rank, FLAG_STARTED, peer));
      if (seen < needed) return false;
#pragma unroll 1
      for (i32 p = crew_warp(); p < num_pairs(world); p += crew_warps())
        ptx::store_pair(pair_at(args, peer, world.rank, p), totals == nullptr ? kNoCounts : pair_of(world, totals, p),
                        seq);
      if (crew_warp() == 0) *origin_at(world, peer, origins_at(args), world.rank) = origin;
      return told = true;
    });
  }
}

// Everybody's counts: per counter the sum over the sources before this rank and over all; rows[source] for this rank.
// `differs`: a peer brought a handle and so no counts. The crew; false in a warp whose wait failed.
__device__ __forceinline__ bool read_counts(const DispatchArgs& args, i32* before, i32* all, i32* rows, u64 seq,
                                            bool* differs) {
  const World& world = args.world;
  const i32 pairs = num_pairs(world), mine = num_keys(world) + world.rank - first_told(world);
  for (i32 slab = crew_warp() * 32; slab < pairs; slab += crew_warps() * 32) {
    const i32 p = slab + lane_idx();
    u64 sum = 0, sum_before = 0;
    for (i32 base = 0; base < world.size; base += kPairsTogether) {
      u64 got[kPairsTogether] = {};
      u32 missing = 0;
      i32 peer = world.rank;
      for (i32 j = 0; j < kPairsTogether && base + j < world.size; ++j)
        if (p < pairs && is_active(base + j)) missing |= 1u << j;
      const i32 own = world.rank - base;
      const u32 first = own >= 0 && own < kPairsTogether ? 1u << own : 0;
      u32 wanted = first;
      auto poll = [&] {
        Pair pair[kPairsTogether];
#pragma unroll
        for (i32 j = 0; j < kPairsTogether; ++j)
          if (missing >> j & 1) pair[j] = ptx::load_pair<Pair>(pair_at(args, world.rank, base + j, p));
#pragma unroll
        for (i32 j = 0; j < kPairsTogether; ++j) {
          if ((missing >> j & 1) == 0 || pair[j].high != seq) continue;
          got[j] = pair[j].low;
          missing &= ~(1u << j);
        }
        if ((missing & wanted) != 0) peer = base + __ffs(missing & wanted) - 1;
        return (missing & wanted) == 0;
      };
      if (first != 0 && !spin::warp_wait(world, seq, OP_DISPATCH, PHASE_BLOCKS, peer, poll)) return false;
      wanted = ~0u;
      if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_COUNTS, peer, poll)) return false;
#pragma unroll
      for (i32 j = 0; j < kPairsTogether; ++j) {
        const i32 source = base + j;
        if (got[j] == kNoCounts) *differs = true;
        if (source < world.rank) sum_before += got[j];
        sum += got[j];
        if (p == mine / 2 && source < world.size) rows[source] = static_cast<i32>(got[j] >> (mine % 2 * 32));
      }
    }
    if (p >= pairs) continue;
    unpack_pair(world, p, sum, [&](i32 i, i32 value) { all[i] = value; });
    unpack_pair(world, p, sum_before, [&](i32 i, i32 value) { before[i] = value; });
  }
  return true;
}

}  // namespace ep::ht
