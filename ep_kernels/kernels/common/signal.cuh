// The signals of every operation: arrive (last block), tell (one block speaks), add_share (every block), await; credit;
// and how ranks find out that they do not mean the same routing.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep {

// Whether a thread of this block has found the rank stopped. All threads; a block barrier. The last block to send sets
// the counters for the next operation, and a load that nobody has used may be answered later than that. So each thread
// passes the counters that it loads, and has them when it arrives here. No counter is ~0.
__device__ __forceinline__ bool is_stopped(u64 stop, u64 counter, u64 other) {
  return __syncthreads_or((stop != STOP_RUNNING) | ((counter & other) == ~0ull)) != 0;
}

// One thread of every block calls it once per use of `ticket`, after a block barrier. True in the last block to arrive,
// whose thread then sees all writes of all blocks. The ticket is used again by a later launch.
__device__ __forceinline__ bool arrive(const World& world, Team team, u32 ticket) {
  u64* count = &world.state->tickets[ticket];
  const bool last = ptx::add_acq_rel_gpu(count, 1) == static_cast<u64>(team.num_blocks - 1);
  if (last) ptx::store_volatile(count, 0);
  return last;
}

// One block tells every active peer: flag[kind] = value. Call by all threads of the block.
__device__ __forceinline__ void tell_peers(const World& world, u32 kind, u64 value) {
  for (i32 i = threadIdx.x; i < world.size; i += blockDim.x) {
    const i32 peer = (world.rank + i) % world.size;
    if (is_active(peer)) ptx::store_release_sys(flag_at(world, peer, kind, world.rank), value);
  }
}

// First operation of a peer that proves a slot free over there, `last` being the slot's last use: its start is in
// stream order after its last read of the slot. With as many slots as open operations that is this very one, `seq`;
// with one more, the one before.
__device__ __forceinline__ u64 free_from(const World& world, u64 last, u64 seq) {
  return last == 0 ? 0 : min(seq, last + world.num_in_flight);
}

// One warp tells every active peer that this rank has started operation `seq`. What it vouches for, reads of earlier
// kernels, is complete by stream order, so nothing needs to be ordered here.
__device__ __forceinline__ void warp_tell_started(const World& world, u32 kind, u64 seq) {
#pragma unroll 1
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    if (is_active(peer)) ptx::store_relaxed_sys(flag_at(world, peer, kind, world.rank), seq);
}

// What a warp must know before anything is written to a slot: who used it last, and what the peer of this lane has
// started. Loaded early and looked at late; a flag only grows while its ranks take part, so an old one is safe (of
// ranks that do not: barrier.cuh). What it vouches for are reads that ended with the peer's earlier kernels, and the
// stores that depend on it are not issued before its value is here.
struct Credit {
  u64 last, seen;
};

__device__ __forceinline__ Credit warp_ask_credit(const World& world, u32 kind, const u64* slot_seq) {
  Credit credit = {ptx::load_cached(slot_seq), 0};
  if (lane_idx() < world.size) credit.seen = ptx::load_cached(flag_at(world, world.rank, kind, lane_idx()));
  return credit;
}

// One warp: whether every active peer has started operation `value`, which proves its last use of the slot over.
__device__ __forceinline__ bool warp_await_credit(const World& world, u32 kind, Credit credit, u64 value, u32 op) {
  bool ok = true;
#pragma unroll 1
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    if (is_active(peer) && (peer >= 32 || credit.seen < value))
      ok &= spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, PHASE_CREDIT, peer);
  return __all_sync(~0u, ok);
}

// One warp of every block tells every active peer that the block's share of operation `seq` is done; the last share
// brings the peer's counter to seq * kWhole, whatever the number of blocks. `num_ops`: operations since the last that
// added shares, this one included, as all blocks read it before the last of them arrives. Call after a warp barrier
// that follows the warp's stores and an acquire of those of other warps: red.release.sys covers both.
__device__ __forceinline__ void warp_add_share(const World& world, Team team, u32 kind, u64 num_ops) {
  const u64 whole = num_ops * kWhole, share = whole / team.num_blocks;
  const u64 mine = team.block == 0 ? whole - share * (team.num_blocks - 1) : share;
  for (i32 i = lane_idx(); i < world.size; i += 32) {
    const i32 peer = (world.rank + i) % world.size;
    if (is_active(peer)) ptx::add_release_sys(flag_at(world, peer, kind, world.rank), mine);
  }
}

// One warp waits until flag[kind] of every active peer is >= value; false for lanes whose wait failed.
__device__ __forceinline__ bool warp_await_peers(const World& world, u32 kind, u64 value, u32 op, u32 phase) {
  bool ok = true;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    if (is_active(peer)) ok &= spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, phase, peer);
  return ok;
}

// One block waits until flag[kind] of every active peer is >= value. Afterwards all threads of the block see what the
// peers wrote; copies that they start would need a proxy fence. `waited_ns` (may be null) gets the time at which each
// peer was there, from `start`.
__device__ __forceinline__ bool await_peers(const World& world, u32 kind, u64 value, u32 op, u32 phase, u64 start,
                                            u64* waited_ns) {
  bool failed = false;
  for (i32 peer = threadIdx.x; peer < world.size; peer += blockDim.x) {
    if (!is_active(peer)) continue;
    failed |= !spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, phase, peer);
    if (waited_ns != nullptr) waited_ns[peer] = peer == world.rank ? 0 : ptx::now_ns() - start;
  }
  return __syncthreads_or(failed) == 0;
}

// ---- routings that must be the same on all ranks ----

// The seq of the dispatch whose routing rank `from` brings, as rank `at` reads it: `offset` of the slot's array.
__device__ __forceinline__ u64* origin_at(const World& world, i32 at, u64 offset, i32 from) {
  return region_at<u64>(world, at, offset) + from;
}

// Origins are read by a block's last warp, whose lanes have least to do in small operations; others return at once.
__device__ __forceinline__ bool handles_origins() { return warp_idx() == num_warps() - 1; }

// Whether a peer that this thread looks at brought another routing. All threads of a block that has acquired from all
// peers; the block's answer is __syncthreads_or of its threads'.
__device__ __forceinline__ bool origin_differs(const World& world, u64 offset, u64 origin) {
  bool differs = false;
  for (i32 peer = lane_idx(); handles_origins() && peer < world.size; peer += 32)
    differs |= is_active(peer) && ptx::load_volatile(origin_at(world, world.rank, offset, peer)) != origin;
  return differs;
}

// Tells the host, unless it has still to read of another: it raises HandleError, and the group goes on. One thread;
// origin_at(peer) is what a peer brought.
template <class Origin>
__device__ __forceinline__ void report_difference(const World& world, u32 op, u64 origin, Origin origin_from) {
  Difference* report = &world.host->difference;
  if (ptx::load_relaxed_sys(&report->status) != 0) return;
  i32 peer = 0;
  u64 theirs = origin;
  while (peer < world.size && theirs == origin) {
    if (is_active(peer)) theirs = origin_from(peer);
    if (theirs == origin) ++peer;
  }
  report->op = op;
  report->peer = peer;
  report->mine = origin;
  report->theirs = theirs;
  ptx::store_release_sys(&report->status, 1);
}

// The same for origins that lie in the region at `offset`. One block.
__device__ __forceinline__ void report_difference(const World& world, u32 op, u64 offset, u64 origin) {
  if (threadIdx.x != 0) return;
  report_difference(world, op, origin,
                    [&](i32 peer) { return ptx::load_volatile(origin_at(world, world.rank, offset, peer)); });
}

}  // namespace ep
