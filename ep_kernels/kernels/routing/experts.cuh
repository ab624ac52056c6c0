// Experts of both dispatches: the ranks that hold them, and the counters that number their rows. A counter is (rank *
// local_stride + local expert), or num_keys + rank for rows.
#pragma once

#include "types.h"
#include "variant.h"

namespace ep {

constexpr bool kPerExpert = LAYOUT == EXPERT_MAJOR || LAYOUT == GROUPED;
constexpr i32 kDropped = -2;  // a place past the receive capacity; -1 = no place on this rank

// Home.rank without a destination: no expert, no active replica, id out of range.
constexpr i32 kNowhere = -1, kGone = -2, kInvalid = -3;

// One logical expert: its rank and slot, and the list of its active replicas; one 16-byte load.
struct alignas(16) Expert {
  i32 rank;  // kGone without an active replica
  i32 slot;
  i32 num_copies;
  i32 first_copy;
};

__device__ __forceinline__ i32 num_keys(const World& world) { return world.size * world.local_stride; }
__device__ __forceinline__ i32 num_counters(const World& world) { return num_keys(world) + world.size; }

// The table of experts in shared memory: rank << 16 | local expert, or negative.
constexpr i32 kChoose = -4;  // several replicas, used in rotation

// The experts do not change while kernels run. All threads; a block barrier must follow.
__device__ __forceinline__ void fill_table(const World& world, i32* table) {
#pragma unroll 1
  for (i32 i = threadIdx.x; i < world.num_experts; i += THREADS) {
    const Expert expert = reinterpret_cast<const Expert*>(world.experts)[i];
    table[i] = expert.num_copies > 1 ? kChoose : expert.rank < 0 ? expert.rank : expert.rank << 16 | expert.slot;
  }
}

__device__ __noinline__ i32 choose_copy(const World& world, i32 id, i32 token) {
  const Expert expert = reinterpret_cast<const Expert*>(world.experts)[id];
  const i32 chosen = expert.first_copy + (world.rank + token) % expert.num_copies;
  return world.copies_rank[chosen] << 16 | world.copies_slot[chosen];
}

// rank << 16 | local expert of an id, negative as Home.rank; kChoose is resolved by choose_copy. No branch.
__device__ __forceinline__ i32 look_up(const World& world, const i32* table, i32 id) {
  const bool known = static_cast<u32>(id) < static_cast<u32>(world.num_experts);
  const i32 key = table[known ? id : 0];
  return known ? key : id == -1 ? kNowhere : kInvalid;
}

__device__ __forceinline__ i32 key_of(const World& world, const i32* table, i32 id, i32 token) {
  const i32 key = look_up(world, table, id);
  return key == kChoose ? choose_copy(world, id, token) : key;
}

}  // namespace ep
