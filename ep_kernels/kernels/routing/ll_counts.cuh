// How many rows come, before they come: one block of a source counts and tells, every block of a destination waits for
// it. A head per pair of ranks says how many rows and which routing; where rows are grouped per expert, lines say how
// many for each.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "layout/ll128.cuh"
#include "routing/experts.cuh"
#include "routing/ll_scan.cuh"
#include "types.h"

namespace ep::ll {

// Rows per rank, and ids out of range; rows per expert are in scratch.before.
struct Told {
  i32 rows[MAX_RANKS], invalid;
};

// Counts an entry in one block's shared memory, which is zero; `fresh`: the first of its token for its rank. All lanes.
__device__ __forceinline__ void count_entry(const World& world, const LlScratch& scratch, Told& told, i32 key,
                                            bool fresh) {
  const u32 same = __match_any_sync(~0u, fresh ? key >> 16 : -1);
  if (fresh && lane_idx() == __ffs(same) - 1) atomicAdd(&told.rows[key >> 16], __popc(same));
  if (kPerExpert && key >= 0) atomicAdd(&scratch.before[index_of(world, key)], 1);
  if (key == kInvalid) atomicAdd(&told.invalid, 1);
}

// One warp tells everybody how many rows come, before rows fill the links: `low` to rank `lane`, `high` to rank 32 +
// lane.
__device__ __forceinline__ void tell_heads(const DispatchArgs& args, i32 low, i32 high, u64 origin, u64 seq) {
  const i32 rank = args.world.rank;
  for (i32 peer = lane_idx(); peer < args.world.size; peer += 32)
    if (is_active(peer))
      ptx::store_pair(head_at(args, peer, rank), static_cast<u32>(peer < 32 ? low : high) | (seq - origin) << 32, seq);
}

// One block tells how many for each expert; its first warp, which tells heads, last.
__device__ __forceinline__ void tell_counts(const DispatchArgs& args, const LlScratch& scratch, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 peer = (warp_idx() + num_warps() - 1) % num_warps(); kPerExpert && peer < world.size; peer += num_warps()) {
    if (!is_active(peer)) continue;
    const i32* counts = scratch.before + peer * world.local_stride;
    auto word = [&](i32 i) -> u32 { return i < world.local_stride ? counts[i] : 0; };
#pragma unroll 1
    for (i32 line = 0; line < world.count_lines; line += 4) {
      const i32 at = (line + (lane_idx() >> 3)) * kLineInts + (lane_idx() & 7) * 4;
      store_lines(count_lines_at(args, peer, world.rank) + line * kLineBytes, min(4, world.count_lines - line),
                  vector_of(word(at), word(at + 1), word(at + 2), word(at + 3)), seq);
    }
  }
}

// ---- at the destination ----

constexpr i32 kHere = 0, kFailed = 1, kDiffers = 2;  // counts of all sources: are here, a wait failed, another routing

__device__ __forceinline__ u64 origin_told(const Vector& head) { return head.high - (head.low >> 32); }

// Row counts of all sources to scratch.arrived. One warp.
__device__ __forceinline__ i32 await_heads(const DispatchArgs& args, const LlScratch& scratch, u64 origin, u64 seq,
                                           u64 start, u64* waits) {
  const World& world = args.world;
  bool differs = false;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 source = base + lane_idx();
    const bool asked = source < world.size && is_active(source);
    Vector head = {0, seq};
    u64 waited = 0;
    const u8* at = head_at(args, world.rank, asked ? source : world.rank);
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_COUNTS, source, [&] {
          if (asked) head = ptx::load_pair<Vector>(at);
          if (head.high != seq) waited = ptx::now_ns() - start;
          return head.high == seq;
        }))
      return kFailed;
    if (asked && source != world.rank) note_wait(waits, source, waited);
    differs |= asked && origin_told(head) != origin;
    if (source < world.size) scratch.arrived[source * arrived_stride(world)] = asked ? static_cast<i32>(head.low) : 0;
  }
  return __any_sync(~0u, differs) ? kDiffers : kHere;
}

// Rows per local expert of one source. One warp; false after a failed wait.
__device__ __forceinline__ bool await_count_lines(const DispatchArgs& args, const LlScratch& scratch, i32 source,
                                                  u64 seq) {
  const World& world = args.world;
  i32* to = scratch.arrived + source * arrived_stride(world) + 1;
  if (!is_active(source)) {
    for (i32 i = lane_idx(); i < world.local_stride; i += 32) to[i] = 0;
    return true;
  }
#pragma unroll 1
  for (i32 line = 0; line < world.count_lines; line += 4) {
    Vector mine = {};
    const u8* at = count_lines_at(args, world.rank, source) + line * kLineBytes;
    const i32 lines = min(4, world.count_lines - line);
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_COUNTS, source,
                         [&] { return peek_lines(at, lines, seq, &mine); }))
      return false;
    const i32 first = (line + (lane_idx() >> 3)) * kLineInts + (lane_idx() & 7) * 4;
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      if (!is_tag_lane() && lane_idx() < 8 * lines && first + i < world.local_stride) to[first + i] = word_of(mine, i);
  }
  return true;
}

}  // namespace ep::ll
