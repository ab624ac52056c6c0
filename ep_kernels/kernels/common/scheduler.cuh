// Which warp does which item: in turn, from a queue that the warps of a rank share, or by units that its blocks claim.
// Ranks are served in turn, the next one first.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "types.h"

namespace ep {

// A warp's place among items (position, source, index), which the warps of a team take in turn, index fastest; it moves
// on without division.
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

// Ranks are served in turn, the next one first and this very one last: hop i is rank (this + 1 + i) % R.
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

// Work that the warps of a rank take as they come to it, since the links serve some later than others. The first two
// items of each warp are its own; later ones are asked for an item ahead. The last block to arrive resets `taken`.
struct Queue {
  Divisor items, sources;
  i32 base;    // first item that is nobody's
  u64* taken;  // of those, how many have been taken
  u64 answer;  // lane 0: to what was asked last, perhaps on its way: base + answer comes after `turn`
  Turn turn;   // what comes now
};

// Were `taken` known to be the same in all lanes, the compiler would ask for the whole warp at once and wait for the
// answer there and then, 0.6 us per item: hence threadIdx.y, which is 0.
__device__ __forceinline__ Queue queue_of(Team team, i32 warps, Divisor items, Divisor sources, u64* taken) {
  const i32 first = first_item(team), step = team.num_blocks * warps;
  return {
      items, sources, 2 * step, taken + threadIdx.y, static_cast<u64>(first - step), turn_of(first, items, sources)};
}

// Goes on to what comes next, and asks for one more.
__device__ __forceinline__ void refill(Queue& queue) {
  queue.turn = turn_of(queue.base + static_cast<i32>(__shfl_sync(~0u, queue.answer, 0)), queue.items, queue.sources);
  if (lane_idx() == 0) queue.answer = ptx::take_relaxed_gpu(queue.taken, 1);
}

// Units of work, numbered 0 .. total - 1, that the blocks of a rank take from a counter: links and memory do not serve
// all of them equally well. The first of each block is its own, unit `block`; the counter knows of those after them.
// One warp; it asks a unit ahead, so that the answer is there when it is needed, but from unit `late` on asks when it
// has room. Each block that had one of its own takes until it hears of one that does not exist; the last to hear sets
// the counter back for the next launch. A block that ends otherwise has a rank that was stopped, whose state is made
// anew.
struct Claims {
  u64* counter;
  i32 total, late, blocks;
  bool asked;  // a unit ahead
  u64 answer;  // of lane 0: to what was asked last; `blocks` before the unit

  __device__ __forceinline__ void ask() {
    if (lane_idx() == 0) answer = ptx::take_relaxed_gpu(counter, 1);
  }

  // The next unit; -1: there are no more, and this is not called again.
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

// threadIdx.y is 0: were the counter known to be the same in all lanes, the compiler would wait for each answer there
// and then (queue_of).
__device__ __forceinline__ Claims claims_of(Team team, u64* counter, i32 total, i32 late) {
  return {counter + threadIdx.y, total, late, team.num_blocks, true,
          static_cast<u64>(static_cast<i64>(team.block - team.num_blocks))};
}

}  // namespace ep
