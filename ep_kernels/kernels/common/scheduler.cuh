// Distribution of work: static (Turn), by warps from a work counter (Queue, LL), by blocks from a work counter (Claims,
// HT); and the order in which peers are served.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "types.h"

namespace ep {

// A work item (position, source, index), numbered with index fastest. Static distribution: warp w of a team takes every
// num_items_at_once-th item; move_on advances without division.
struct Turn {
  i32 position, source, index;
};

__device__ __forceinline__ Turn turn_of(i32 number, Divisor items, Divisor sources) {
  const i32 rest = divide(number, items), position = divide(rest, sources);
  return {position, rest - position * sources.value, number - rest * items.value};
}

__device__ __forceinline__ void move_on(Turn& turn, Turn step, i32 items, i32 sources) {
  turn.index += step.index;
  turn.source += step.source;
  turn.position += step.position;
  if (turn.index >= items) {
    turn.index -= items;
    ++turn.source;
  }
  if (turn.source >= sources) {
    turn.source -= sources;
    ++turn.position;
  }
}

// Peer offset ("hop") i is rank (this rank + 1 + i) % R: peers are served from the next rank on, this rank last.
__device__ __forceinline__ i32 hop_of_rank(const World& world, i32 rank) {
  const i32 hop = rank - world.rank - 1;
  return hop < 0 ? hop + world.size : hop;
}

__device__ __forceinline__ i32 rank_of_hop(const World& world, i32 hop) {
  const i32 rank = hop + world.rank + 1;
  return rank < world.size ? rank : rank - world.size;
}

__device__ __forceinline__ i32 first_item(Team team) { return team.block + team.num_blocks * warp_idx(); }
__device__ __forceinline__ i32 num_items_at_once(Team team) { return team.num_blocks * num_warps(); }

// Work counter of the warps of a rank: NVLink does not serve all SMs alike, so warps take items as they get to them.
// The first two items of each warp are fixed; later ones are taken from the counter one item ahead. The last block to
// arrive at the end of sending resets `taken`.
struct Queue {
  Divisor items, sources;
  i32 base;    // first item that is taken from the counter
  u64* taken;  // items taken from `base` on
  u64 answer;  // lane 0: result of the last atomic, perhaps in flight; item base + answer follows `turn`
  Turn turn;   // the present item
};

// + threadIdx.y (= 0) hides that the address is uniform; otherwise the compiler aggregates the atomic over the warp and
// blocks on its result (0.6 us per item).
__device__ __forceinline__ Queue queue_of(Team team, i32 warps, Divisor items, Divisor sources, u64* taken) {
  const i32 first = first_item(team), step = team.num_blocks * warps;
  return {
      items, sources, 2 * step, taken + threadIdx.y, static_cast<u64>(first - step), turn_of(first, items, sources)};
}

// Advances to the next item and starts the atomic for the one after.
__device__ __forceinline__ void refill(Queue& queue) {
  queue.turn = turn_of(queue.base + static_cast<i32>(__shfl_sync(~0u, queue.answer, 0)), queue.items, queue.sources);
  if (lane_idx() == 0) queue.answer = ptx::take_relaxed_gpu(queue.taken, 1);
}

// Work counter of the blocks of a rank, for units 0 .. total - 1: links and memory do not serve all blocks alike. Unit
// `block` of each block is fixed; later ones are taken from the counter. One warp. It takes one unit ahead, so the
// result is there when it is needed, but from unit `late` on only when it has room. Each block that had a fixed unit
// takes until it gets one that does not exist; the last one to do so resets the counter for the next launch. Blocks of
// a stopped rank may end without that: its state is made anew.
struct Claims {
  u64* counter;
  i32 total, late, blocks;
  bool asked;  // one unit is taken ahead
  u64 answer;  // lane 0: result of the last atomic; its unit is answer + blocks

  __device__ __forceinline__ void ask() {
    if (lane_idx() == 0) answer = ptx::take_relaxed_gpu(counter, 1);
  }

  // The next unit; -1 = none is left, after which it must not be called again.
  __device__ __forceinline__ i32 next() {
    if (!asked) ask();
    const u64 unit = __shfl_sync(~0u, answer, 0) + blocks, most = static_cast<u64>(total);
    if (unit < most) {
      asked = static_cast<i32>(unit) < late;
      if (asked) ask();
      return static_cast<i32>(unit);
    }
    if (lane_idx() == 0 && unit == most + blocks - 1) ptx::store_volatile(counter, 0);
    return -1;
  }
};

// + threadIdx.y (= 0) hides that the address is uniform (queue_of).
__device__ __forceinline__ Claims claims_of(Team team, u64* counter, i32 total, i32 late) {
  return {counter + threadIdx.y, total, late, team.num_blocks, true,
          static_cast<u64>(static_cast<i64>(team.block - team.num_blocks))};
}

}  // namespace ep
