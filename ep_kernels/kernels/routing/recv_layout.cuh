// The receive phase that both dispatches share: final layout of received rows, and the counts that the caller gets.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "types.h"
#include "variant.h"

namespace ep {

constexpr bool kQuantised = sizeof(X) > 1;  // this dispatch quantises rows to fp8

// Shared memory of a block; the part that both dispatches have.
struct Scratch {
  i32* start;      // LL: [num_keys] by (source, local expert): first row
  i32* total;      // [local experts] received rows of each
  i32* offset;     // [local experts + 1] first row of each, padded
  i32* row_start;  // [R + 1] prefix sum of the rows of each source
  u64 routing_id;  // seq of the dispatch that made the routing; an earlier one if the routing is cached
};

// The routing_id of this rank in operation `seq`.
__device__ __forceinline__ u64 routing_id_of(const DispatchArgs& args, u64 seq) {
  return args.cached ? ptx::load_volatile(args.routing_id) : seq;
}

// From the counts of all sources (HT, cached: from the handle): row_start, and per local expert start, total and
// (GROUPED) offset of the rows that reach this rank. False where the routing_id of a peer differs; then no offsets are
// computed. All threads; ends with a block barrier. start[source * local_stride + e] is relative to the expert's group;
// cached per-expert layouts have no start, because final rows are in the handle. count(source, e): rows for local
// expert e; e = -1: for any expert.
template <class Count>
__device__ __forceinline__ bool lay_out(const DispatchArgs& args, Scratch& scratch, bool by_expert, bool differs,
                                        Count count) {
  const World& world = args.world;
  if (warp_idx() == 0)
    scratch.row_start[world.size] = prefix_sum(world.size, scratch.row_start, [&](i32 s) { return count(s, -1); });
  for (i32 e = threadIdx.x; by_expert && e < world.num_local; e += blockDim.x) {
    i32 sum = 0;
    for (i32 source = 0; source < world.size; ++source) {
      scratch.start[source * world.local_stride + e] = sum;
      sum += count(source, e);
    }
    scratch.total[e] = sum;
  }
  if (__syncthreads_or(differs) != 0) return false;
  if (LAYOUT != GROUPED || !by_expert) return true;
  if (warp_idx() == 0)
    scratch.offset[world.num_local] =
        prefix_sum(world.num_local, scratch.offset, [&](i32 e) { return aligned(scratch.total[e], world.alignment); });
  __syncthreads();
  return true;
}

// First final row of a source's rows (rank-wise layouts), and of its rows for a local expert (the others).
__device__ __forceinline__ i32 first_row(const DispatchArgs& args, const Scratch& scratch, i32 source) {
  return LAYOUT == FLAT ? scratch.row_start[source] : source * args.world.max_tokens;
}

__device__ __forceinline__ i32 first_row(const DispatchArgs& args, const Scratch& scratch, i32 source,
                                         i32 local_expert) {
  const i32 group = LAYOUT == GROUPED ? scratch.offset[local_expert] : local_expert * args.world.capacity;
  return group + scratch.start[source * args.world.local_stride + local_expert];
}

// A final row, or kDropped past the capacity. `capacity` is slots per expert (EXPERT_MAJOR) or rows.
__device__ __forceinline__ i32 admit(i32 row, i32 local_expert, i32 capacity) {
  if (LAYOUT == RANK_MAJOR) return row;
  return row < (LAYOUT == EXPERT_MAJOR ? (local_expert + 1) * capacity : capacity) ? row : kDropped;
}

__device__ __forceinline__ i32 source_of(const Scratch& scratch, i64 row) {
  i32 source = 0;
  while (row >= scratch.row_start[source + 1]) ++source;
  return source;
}

// Offsets in args.saved_counts.
struct SavedCounts {
  i32 groups;  // G: counts are at 0
  i32 offsets, num_rows, num_dropped;
};

__device__ __forceinline__ SavedCounts saved_counts_at(const World& world) {
  const i32 groups = kPerExpert ? world.num_local : world.size;
  return {groups, groups, 2 * groups + 1, 2 * groups + 2};
}

__device__ __forceinline__ i32 rows_delivered(const DispatchArgs& args, const Scratch& scratch) {
  if (args.cached) return args.saved_counts[saved_counts_at(args.world).num_rows];
  const i32 all = LAYOUT == GROUPED ? scratch.offset[args.world.num_local] : scratch.row_start[args.world.size];
  return min(all, args.world.capacity);
}

__device__ __forceinline__ void write_totals(const DispatchArgs& args, i32 num_rows, i32 num_dropped) {
  const World& world = args.world;
  *args.num_rows = num_rows;
  *args.num_dropped = num_dropped;
  if (num_dropped != 0)
    ptx::store_relaxed_sys(&world.host->dropped, ptx::load_relaxed_sys(&world.host->dropped) + num_dropped);
}

// Counts, offsets and totals of DispatchOutput, and the handle's copy of them. One block.
__device__ __forceinline__ void write_counts(const DispatchArgs& args, const Scratch& scratch) {
  const World& world = args.world;
  const SavedCounts at = saved_counts_at(world);
  __shared__ i32 delivered_sum, total_sum;
  if (threadIdx.x == 0) delivered_sum = total_sum = 0;
  __syncthreads();
  // Rows of each group, without those past the capacity.
  for (i32 g = threadIdx.x; g < at.groups; g += blockDim.x) {
    const i32 total = kPerExpert ? scratch.total[g] : scratch.row_start[g + 1] - scratch.row_start[g];
    const i32 first = LAYOUT == GROUPED ? scratch.offset[g] : LAYOUT == FLAT ? scratch.row_start[g] : 0;
    const i32 delivered = LAYOUT == RANK_MAJOR ? total : max(0, min(total, world.capacity - first));
    args.counts[g] = args.saved_counts[g] = delivered;
    atomicAdd(&delivered_sum, delivered);
    atomicAdd(&total_sum, total);
  }
  // Offsets (GROUPED), and rows of each source.
  for (i32 g = threadIdx.x; LAYOUT == GROUPED && g <= at.groups; g += blockDim.x)
    args.offsets[g] = args.saved_counts[at.offsets + g] = min(scratch.offset[g], world.capacity);
  for (i32 s = threadIdx.x; s < world.size; s += blockDim.x)
    args.source_rows[s] = scratch.row_start[s + 1] - scratch.row_start[s];
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Totals.
  const i32 num_rows = LAYOUT == GROUPED ? rows_delivered(args, scratch) : delivered_sum;
  args.saved_counts[at.num_rows] = num_rows;
  args.saved_counts[at.num_dropped] = total_sum - delivered_sum;
  write_totals(args, num_rows, total_sum - delivered_sum);
}

// The same for RANK_MAJOR, which drops no rows and needs no offsets. One warp; rows(source): rows of that source.
template <class Rows>
__device__ __forceinline__ void write_rank_counts(const DispatchArgs& args, Rows rows) {
  const World& world = args.world;
  const SavedCounts at = saved_counts_at(world);
  i32 sum = 0;
#pragma unroll 1
  for (i32 source = lane_idx(); source < world.size; source += 32) {
    const i32 mine = rows(source);
    args.counts[source] = args.saved_counts[source] = args.source_rows[source] = mine;
    sum += mine;
  }
  sum = __reduce_add_sync(~0u, sum);
  if (lane_idx() != 0) return;
  args.saved_counts[at.num_rows] = sum;
  args.saved_counts[at.num_dropped] = 0;
  write_totals(args, sum, 0);
}

// The same for a cached routing, from the handle's copy. One block.
__device__ __forceinline__ void write_saved_counts(const DispatchArgs& args) {
  const SavedCounts at = saved_counts_at(args.world);
  for (i32 g = threadIdx.x; g < at.groups; g += blockDim.x) args.counts[g] = args.saved_counts[g];
  for (i32 g = threadIdx.x; LAYOUT == GROUPED && g <= at.groups; g += blockDim.x)
    args.offsets[g] = args.saved_counts[at.offsets + g];
  if (threadIdx.x == 0) write_totals(args, args.saved_counts[at.num_rows], args.saved_counts[at.num_dropped]);
}

// Entry k of a final row as the caller reads it; rank-wise layouts.
__device__ __forceinline__ void write_entry(const DispatchArgs& args, i64 entry, const TokenMetadata& metadata) {
  const i32 expert = metadata.local_expert;
  args.out_ids[entry] = expert < 0 ? args.world.absent_id : args.world.first_id + expert;
  args.out_weights[entry] = metadata.weight;
}

// FLAT: entries of the rows from `first` on that the caller reads though they did not come. All threads of a team.
__device__ __forceinline__ void fill_entries(const DispatchArgs& args, Team team, i32 first, i32 end) {
  const i32 topk = args.world.topk, step = team.num_blocks * THREADS;
  const i32 last = min(end, args.world.filled_rows) * topk;  // 31 bits: plan.sizes_of
#pragma unroll 1
  for (i32 i = first * topk + team.block * THREADS + threadIdx.x; i < last; i += step) {
    args.out_ids[i] = args.world.absent_id;
    args.out_weights[i] = 0.0f;
  }
}

// Zeroes the counts: after a failed wait, or where routing_ids differ, no row may look delivered. A handle that is
// reused stays as it is. One block.
__device__ __noinline__ void write_no_counts(const DispatchArgs& args) {
  const SavedCounts at = saved_counts_at(args.world);
  for (i32 g = threadIdx.x; g < at.groups; g += blockDim.x) args.counts[g] = 0;
  for (i32 g = threadIdx.x; LAYOUT == GROUPED && g <= at.groups; g += blockDim.x) args.offsets[g] = 0;
  if (threadIdx.x == 0) *args.num_rows = *args.num_dropped = 0;
  if (LAYOUT == FLAT) fill_entries(args, {0, 1}, 0, args.world.filled_rows);
  if (args.cached) return;
  for (i32 i = threadIdx.x; i < 2 * at.groups + 3; i += blockDim.x) args.saved_counts[i] = 0;
  for (i32 s = threadIdx.x; s < args.world.size; s += blockDim.x) args.source_rows[s] = 0;
}

// The receive phase cannot deliver: the payload did not arrive (the failed wait has reported it), or routing_ids differ
// (`arrived`), which is reported here.
__device__ __forceinline__ void deliver_nothing(const DispatchArgs& args, Team team, const Scratch& scratch,
                                                bool arrived) {
  if (team.block != 0) {  // ids that this block has not written must not be read as ids
    if (LAYOUT == FLAT) fill_entries(args, {0, 1}, 0, args.world.filled_rows);
    return;
  }
  write_no_counts(args);
  if (arrived) report_mismatch(args.world, OP_DISPATCH, routing_ids_at(args), scratch.routing_id);
}

}  // namespace ep
