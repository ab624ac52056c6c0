// Distribution of work: static (WorkItem), by warps from a work counter (WarpWorkCounter, LL), by blocks from a work
// counter (BlockWorkCounter, HT); and the order in which peers are served.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "types.h"

namespace ep {

// A work item (position, source, index), numbered with index fastest. Static distribution: warp w of a team takes every
// num_items_at_once-th item; advance_item advances without division.
struct WorkItem {
  i32 position, source, index;
};

__device__ __forceinline__ WorkItem work_item_at(i32 number, Divisor items, Divisor sources) {
  const i32 rest = divide(number, items), position = divide(rest, sources);
  return {position, rest - position * sources.value, number - rest * items.value};
}

__device__ __forceinline__ void advance_item(WorkItem& item, WorkItem step, i32 items, i32 sources) {
  item.index += step.index;
  item.source += step.source;
  item.position += step.position;
  if (item.index >= items) {
    item.index -= items;
    ++item.source;
  }
  if (item.source >= sources) {
    item.source -= sources;
    ++item.position;
  }
}

// Peer offset i is rank (this rank + 1 + i) % R: peers are served from the next rank on, this rank last.
__device__ __forceinline__ i32 offset_of_rank(const World& world, i32 rank) {
  const i32 peer_offset = rank - world.rank - 1;
  return peer_offset < 0 ? peer_offset + world.size : peer_offset;
}

__device__ __forceinline__ i32 rank_at_offset(const World& world, i32 peer_offset) {
  const i32 rank = peer_offset + world.rank + 1;
  return rank < world.size ? rank : rank - world.size;
}

__device__ __forceinline__ i32 first_item(Team team) { return team.block + team.num_blocks * warp_idx(); }
__device__ __forceinline__ i32 num_items_at_once(Team team) { return team.num_blocks * num_warps(); }

// Work counter of the warps of a rank: NVLink does not serve all SMs alike, so warps take items as they get to them.
// The first two items of each warp are fixed; later ones are taken from the counter one item ahead. The last block to
// arrive at the end of the send phase resets the counter.
struct WarpWorkCounter {
  Divisor items, sources;
  i32 base;       // first item that is taken from the counter
  u64* counter;   // items taken from `base` on
  u64 taken;      // lane 0: result of the last atomic, perhaps in flight; item base + taken follows `item`
  WorkItem item;  // the present item
};

// + threadIdx.y (= 0) hides that the address is uniform; otherwise the compiler aggregates the atomic over the warp and
// blocks on its result (0.6 us per item).
__device__ __forceinline__ WarpWorkCounter warp_work_counter(Team team, i32 warps, Divisor items, Divisor sources,
                                                             u64* counter) {
  const i32 first = first_item(team), step = team.num_blocks * warps;
  return {items, sources, 2 * step, counter + threadIdx.y, static_cast<u64>(first - step),
          work_item_at(first, items, sources)};
}

// Advances to the next item and starts the atomic for the one after.
__device__ __forceinline__ void take_next(WarpWorkCounter& work) {
  work.item = work_item_at(work.base + static_cast<i32>(__shfl_sync(~0u, work.taken, 0)), work.items, work.sources);
  if (lane_idx() == 0) work.taken = ptx::take_relaxed_gpu(work.counter, 1);
}

// Work counter of the blocks of a rank, for items 0 .. total - 1: links and memory do not serve all blocks alike. Item
// `block` of each block is fixed; later ones are taken from the counter. One warp. It takes one item ahead, so the
// result is there when it is needed; not from item `first_tail` on, which a block takes only when it has room. Each
// block that had a fixed item takes until it gets one that does not exist; the last one to do so resets the counter for
// the next launch. Blocks of a stopped rank may end without that: its state is made anew.
struct BlockWorkCounter {
  u64* counter;
  i32 total, first_tail, blocks;
  bool prefetched;  // one item is taken ahead
  u64 taken;        // lane 0: result of the last atomic; its item is taken + blocks

  __device__ __forceinline__ void prefetch() {
    if (lane_idx() == 0) taken = ptx::take_relaxed_gpu(counter, 1);
  }

  // The next item; -1 = none is left, after which it must not be called again.
  __device__ __forceinline__ i32 next() {
    if (!prefetched) prefetch();
    const u64 item = __shfl_sync(~0u, taken, 0) + blocks, end = static_cast<u64>(total);
    if (item < end) {
      prefetched = static_cast<i32>(item) < first_tail;
      if (prefetched) prefetch();
      return static_cast<i32>(item);
    }
    if (lane_idx() == 0 && item == end + blocks - 1) ptx::store_volatile(counter, 0);
    return -1;
  }
};

// + threadIdx.y (= 0) hides that the address is uniform (warp_work_counter).
__device__ __forceinline__ BlockWorkCounter block_work_counter(Team team, u64* counter, i32 total, i32 first_tail) {
  return {counter + threadIdx.y, total, first_tail, team.num_blocks, true,
          static_cast<u64>(static_cast<i64>(team.block - team.num_blocks))};
}

}  // namespace ep
