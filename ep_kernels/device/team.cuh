// Who works together: the blocks of one rank. On a GPU of its own a rank is the whole grid; in the loop-back harness one
// cooperative launch holds the teams of all ranks, so that they are resident together.
// Also the signals of every operation: meet (grid barrier), arrive (last block), tell (one block speaks), add_share (every
// block speaks), await; and how ranks find out that they do not mean the same routing.
#pragma once

constexpr u32 kBarrierBytes = 512;  // shared memory of a block starts with the mbarriers, then a wait per peer
constexpr u64 kWhole = 1ull << 20;  // what an operation adds to a counter of shares, all blocks together

struct Team {
  i32 block;       // this block within the rank
  i32 num_blocks;  // blocks of the rank
};

// [R] nanoseconds that this block waited for each peer.
__device__ __forceinline__ u64* waits_at(u8* shared) { return reinterpret_cast<u64*>(shared + kBarrierBytes); }

// What follows them.
__device__ __forceinline__ u8* after_waits(const World& world, u8* shared) {
  return shared + kBarrierBytes + (world.size + 1) / 2 * 16;
}

__device__ __forceinline__ i32 lane_idx() { return threadIdx.x & 31; }
__device__ __forceinline__ i32 warp_idx() { return threadIdx.x >> 5; }
__device__ __forceinline__ i32 num_warps() { return blockDim.x >> 5; }

// One thread of every block calls it once per use of `ticket`, after a block barrier. True in the last block to arrive,
// whose thread then sees all writes of all blocks. The ticket is used again by a later launch.
__device__ __forceinline__ bool arrive(const World& world, Team team, u32 ticket) {
  u64* count = &world.state->tickets[ticket];
  const bool last = ptx::add_acq_rel_gpu(count, 1) == static_cast<u64>(team.num_blocks - 1);
  if (last) ptx::store_volatile(count, 0);
  return last;
}

// All blocks of the rank meet. False when the rank was stopped. All blocks must be resident (cooperative launch).
__device__ __forceinline__ bool meet(const World& world, Team team, u32 op) {
  __shared__ bool ok;
  __syncthreads();
  if (threadIdx.x == 0) {
    State* state = world.state;
    const u64 generation = ptx::load_acquire_gpu(&state->meet_generation);
    if (ptx::add_acq_rel_gpu(&state->meet_count, 1) == static_cast<u64>(team.num_blocks - 1)) {
      ptx::store_release_gpu(&state->meet_count, 0);
      ptx::store_release_gpu(&state->meet_generation, generation + 1);
      ok = true;
    } else {
      ok = spin::wait_for(world, &state->meet_generation, generation + 1, op, PHASE_BLOCKS, world.rank);
    }
  }
  __syncthreads();
  return ok;
}

// One block tells every active peer: flag[kind] = value. Call by all threads of the block.
__device__ __forceinline__ void tell_peers(const World& world, u32 kind, u64 value) {
  for (i32 i = threadIdx.x; i < world.size; i += blockDim.x) {
    const i32 peer = (world.rank + i) % world.size;
    if (world.active[peer]) ptx::store_release_sys(flag_at(world, peer, kind, world.rank), value);
  }
}

// Every block tells every active peer that its share of operation `seq` is done; the last share brings the peer's counter
// to seq * kWhole, whatever the number of blocks. Call by all threads, after a block barrier that follows all stores:
// bar.sync -> red.release.sys covers what any thread of the block wrote.
__device__ __forceinline__ void add_share(const World& world, Team team, u32 kind) {
  const u64 share = kWhole / team.num_blocks;
  const u64 mine = team.block == 0 ? kWhole - share * (team.num_blocks - 1) : share;
  for (i32 i = threadIdx.x; i < world.size; i += blockDim.x) {
    const i32 peer = (world.rank + i) % world.size;
    if (world.active[peer]) ptx::add_release_sys(flag_at(world, peer, kind, world.rank), mine);
  }
}

// One warp waits until flag[kind] of every active peer is >= value; false for lanes whose wait failed.
__device__ __forceinline__ bool warp_await_peers(const World& world, u32 kind, u64 value, u32 op, u32 phase) {
  bool ok = true;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    if (world.active[peer]) ok &= spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, phase, peer);
  return ok;
}

// One block waits until flag[kind] of every active peer is >= value. Afterwards all threads of the block, and copies that
// they start, see what the peers wrote. `waited_ns` (may be null) gets the time at which each peer was there, from `start`.
__device__ __forceinline__ bool await_peers(const World& world, u32 kind, u64 value, u32 op, u32 phase, u64 start,
                                            u64* waited_ns) {
  bool failed = false;
  for (i32 peer = threadIdx.x; peer < world.size; peer += blockDim.x) {
    if (!world.active[peer]) continue;
    failed |= !spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, phase, peer);
    if (waited_ns != nullptr) waited_ns[peer] = peer == world.rank ? 0 : ptx::now_ns() - start;
  }
  const bool all_there = __syncthreads_or(failed) == 0;
  ptx::fence_proxy_async();
  return all_there;
}

// ---- routings that must be the same on all ranks ----

// The seq of the dispatch whose routing rank `from` brings, as rank `at` reads it: `offset` of the slot's array.
__device__ __forceinline__ u64* origin_at(const World& world, i32 at, u64 offset, i32 from) {
  return region_at<u64>(world, at, offset) + from;
}

// Origins are written and read by a block's last warp, whose lanes have least to do in small operations; others return at once.
__device__ __forceinline__ bool handles_origins() { return warp_idx() == num_warps() - 1; }

// Tells all active peers which routing this rank brings. One block, once the slot is free; a later release carries it.
__device__ __forceinline__ void send_origin(const World& world, u64 offset, u64 origin) {
  for (i32 peer = lane_idx(); handles_origins() && peer < world.size; peer += 32)
    if (world.active[peer]) *origin_at(world, peer, offset, world.rank) = origin;
}

// Whether a peer that this thread looks at brought another routing. All threads of a block that has acquired from all peers;
// the block's answer is __syncthreads_or of its threads'.
__device__ __forceinline__ bool origin_differs(const World& world, u64 offset, u64 origin) {
  bool differs = false;
  for (i32 peer = lane_idx(); handles_origins() && peer < world.size; peer += 32)
    differs |= world.active[peer] && ptx::load_volatile(origin_at(world, world.rank, offset, peer)) != origin;
  return differs;
}

// Tells the host, unless it has still to read of another: it raises HandleError, and the group goes on. One block.
__device__ __forceinline__ void report_difference(const World& world, u32 op, u64 offset, u64 origin) {
  if (threadIdx.x != 0) return;
  Difference* report = &world.host->difference;
  if (ptx::load_relaxed_sys(&report->status) != 0) return;
  i32 peer = 0;
  u64 theirs = origin;
  while (peer < world.size && theirs == origin) {
    if (world.active[peer]) theirs = ptx::load_volatile(origin_at(world, world.rank, offset, peer));
    if (theirs == origin) ++peer;
  }
  report->op = op;
  report->peer = peer;
  report->mine = origin;
  report->theirs = theirs;
  ptx::store_release_sys(&report->status, 1);
}
