// What both dispatches know of experts and of the counters by which rows are numbered: a counter is (rank * local_stride + local
// expert), or num_keys + rank for rows.
#pragma once

constexpr i32 kNowhere = -1, kGone = -2, kInvalid = -3;  // Home.rank without a destination

// One logical expert: where it is, or where its active copies are listed; one 16-byte load.
struct alignas(16) Expert {
  i32 rank;  // kGone without an active copy
  i32 slot;
  i32 num_copies;
  i32 first_copy;
};

__device__ __forceinline__ i32 num_keys(const World& world) { return world.size * world.local_stride; }
__device__ __forceinline__ i32 num_counters(const World& world) { return num_keys(world) + world.size; }
