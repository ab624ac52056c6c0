// Experts of both dispatches: the ranks that hold them, and the counters that number their rows. A counter is (rank *
// local_stride + local expert), or num_keys + rank for rows.
#pragma once

#include "types.h"
#include "variant.h"

namespace ep {

constexpr bool kPerExpert = LAYOUT == EXPERT_MAJOR || LAYOUT == GROUPED;
constexpr i32 kDropped = -2;  // a row past the receive capacity; -1 = no row on this rank

// Route.rank without a destination: no expert, no active replica, id out of range.
constexpr i32 kNoExpert = -1, kNoReplica = -2, kBadId = -3;

// One logical expert: its rank and expert slot, and the list of its active replicas; one 16-byte load.
struct alignas(16) Expert {
  i32 rank;  // kNoReplica without an active replica
  i32 slot;
  i32 num_replicas;
  i32 first_replica;
};

__device__ __forceinline__ i32 num_keys(const World& world) { return world.size * world.local_stride; }
__device__ __forceinline__ i32 num_counters(const World& world) { return num_keys(world) + world.size; }

// The table of experts in shared memory: rank << 16 | local expert, or negative.
constexpr i32 kReplicated = -4;  // several replicas, used in rotation

// The experts do not change while kernels run. All threads; a block barrier must follow.
__device__ __forceinline__ void fill_expert_table(const World& world, i32* table) {
#pragma unroll 1
  for (i32 i = threadIdx.x; i < world.num_experts; i += THREADS) {
    const Expert expert = reinterpret_cast<const Expert*>(world.experts)[i];
    table[i] = expert.num_replicas > 1 ? kReplicated : expert.rank < 0 ? expert.rank : expert.rank << 16 | expert.slot;
  }
}

__device__ __noinline__ i32 choose_replica(const World& world, i32 id, i32 token) {
  const Expert expert = reinterpret_cast<const Expert*>(world.experts)[id];
  const i32 chosen = expert.first_replica + (world.rank + token) % expert.num_replicas;
  return world.replica_ranks[chosen] << 16 | world.replica_slots[chosen];
}

// rank << 16 | local expert of an id, negative as Route.rank; kReplicated is resolved by choose_replica. No branch.
__device__ __forceinline__ i32 look_up(const World& world, const i32* table, i32 id) {
  const bool in_range = static_cast<u32>(id) < static_cast<u32>(world.num_experts);
  const i32 key = table[in_range ? id : 0];
  return in_range ? key : id == -1 ? kNoExpert : kBadId;
}

__device__ __forceinline__ i32 key_of(const World& world, const i32* table, i32 id, i32 token) {
  const i32 key = look_up(world, table, id);
  return key == kReplicated ? choose_replica(world, id, token) : key;
}

}  // namespace ep
