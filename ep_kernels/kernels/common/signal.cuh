// Signals between blocks and between ranks: arrive (last block of a rank), notify (flag of one block), add_arrival
// (normalized arrival counter of all blocks), await; flow-control credit; the check that all ranks use the same
// routing.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/push.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep {

// Whether a thread of this block has found the rank stopped. All threads; a block barrier. `counter` and `other` are
// the counters that the caller has loaded: the last block to send overwrites them for the next operation, and a load
// whose result is unused could complete after that, so each thread uses its results before it arrives here. No counter
// is ~0.
__device__ __forceinline__ bool is_stopped(u64 stop, u64 counter, u64 other) {
  return __syncthreads_or((stop != STOP_RUNNING) | ((counter & other) == ~0ull)) != 0;
}

// True in the last block to arrive, whose thread then sees all writes of all blocks. One thread of every block, once
// per use of `counter`, after a block barrier. Resets the counter for a later launch.
__device__ __forceinline__ bool arrive(const World& world, Team team, u32 counter) {
  u64* count = &world.state->blocks_done[counter];
  const bool last = ptx::add_acq_rel_gpu(count, 1) == static_cast<u64>(team.num_blocks - 1);
  if (last) ptx::store_volatile(count, 0);
  return last;
}

// The thread of a block that ends its send phase; NETWORK: its warp, which has a lane for each rank to push to.
__device__ __forceinline__ bool is_last_to_send() {
  return NETWORK ? warp_idx() == num_warps() - 1 : threadIdx.x == THREADS - 1;
}

// flag[kind] = value at a remote rank. False: the rank is mapped.
__device__ __forceinline__ bool pushes_flag(const World& world, i32 peer, u32 kind, u64 value) {
  if (!is_remote(world, peer)) return false;
  net::push_word(world, peer, kind, value,
                 kind == FLAG_STARTED ? OP_DISPATCH : kind == FLAG_COMBINE_STARTED ? OP_COMBINE : OP_BARRIER);
  return true;
}

// Stores flag[kind] = value at every active peer, with release. All threads of one block.
__device__ __forceinline__ void notify_peers(const World& world, u32 kind, u64 value) {
  for (i32 i = threadIdx.x; i < world.size; i += blockDim.x) {
    const i32 peer = (world.rank + i) % world.size;
    if constexpr (NETWORK) ptx::fence_sys();
    if (is_active(peer) && pushes_flag(world, peer, kind, value)) continue;
    if (is_active(peer)) ptx::store_release_sys(flag_at(world, peer, kind, world.rank), value);
  }
}

// Credit: the operation that a peer must have started before its slot, last used by operation `last`, may be written.
// That start is in stream order after the peer's last read of the slot. With as many slots as operations in flight it
// is this very operation, `seq`; with one more slot, the one before.
__device__ __forceinline__ u64 free_from(const World& world, u64 last, u64 seq) {
  return last == 0 ? 0 : min(seq, last + world.num_in_flight);
}

// Announces to every active peer that this rank has started operation `seq`. One warp. The flag stands for reads of
// earlier kernels, which are complete by stream order, so a relaxed store is enough.
__device__ __forceinline__ void warp_send_started(const World& world, u32 kind, u64 seq) {
#pragma unroll 1
  for (i32 peer = lane_idx(); peer < world.size; peer += 32) {
    if (is_active(peer) && pushes_flag(world, peer, kind, seq)) continue;
    if (is_active(peer)) ptx::store_relaxed_sys(flag_at(world, peer, kind, world.rank), seq);
  }
}

// Flow-control credit for a slot, per lane: the operation that used the slot last, and the last operation that peer
// `lane` has started. Loaded early and tested late: a flag only grows while its ranks are active, so an old value is
// safe (ranks that are left out: barrier.cuh). The flag stands for reads that ended with the peer's earlier kernels,
// and the stores that depend on it are not issued before its value has been loaded.
struct Credit {
  u64 last, seen;
};

__device__ __forceinline__ Credit warp_load_credit(const World& world, u32 kind, const u64* slot_seq) {
  Credit credit = {ptx::load_cached(slot_seq), 0};
  if (lane_idx() < world.size && is_remote(world, lane_idx())) {
    credit.seen = ptx::load_cached(net::seen_at(world, kind, lane_idx()));
    return credit;
  }
  if (lane_idx() < world.size) credit.seen = ptx::load_cached(flag_at(world, world.rank, kind, lane_idx()));
  return credit;
}

// Waits until every active peer has started operation `value`, which proves that its last read of the slot is over; a
// remote one, whose box this rank alone writes, the operation that frees the slot. One warp; false after a failed wait.
__device__ __forceinline__ bool warp_await_credit(const World& world, u32 kind, Credit credit, u64 value, u32 op) {
  bool ok = true;
  const u64 needed = free_from(world, credit.last, value);
#pragma unroll 1
  for (i32 base = 0; NETWORK && base < world.size; base += 32) {
    const i32 peer = base + lane_idx();
    const bool awaited = peer < world.size && is_active(peer) && is_remote(world, peer);
    ok &= spin::warp_wait(world, needed, op, PHASE_CREDIT, peer,
                          [&] { return !awaited || net::look(world, kind, peer, needed) >= needed; });
  }
#pragma unroll 1
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    if (is_active(peer) && !is_remote(world, peer) && (peer >= 32 || credit.seen < value))
      ok &= spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, PHASE_CREDIT, peer);
  return __all_sync(~0u, ok);
}

// Adds this block's part of an operation to the normalized arrival counter at every active peer: all parts together
// bring the counter to seq * kArrivalTotal, whatever the number of blocks. One warp of every block. `num_ops`:
// operations since the last one that added to it, this one included; all blocks read it before the last of them
// arrives. Call after a warp barrier that follows the warp's stores and an acquire of those of other warps:
// red.release.sys covers both.
__device__ __forceinline__ void warp_add_arrival(const World& world, Team team, u32 kind, u64 num_ops) {
  const u64 total = num_ops * kArrivalTotal, part = total / team.num_blocks;
  const u64 mine = team.block == 0 ? total - part * (team.num_blocks - 1) : part;
  for (i32 i = lane_idx(); i < world.size; i += 32) {
    const i32 peer = (world.rank + i) % world.size;
    if (is_active(peer)) ptx::add_release_sys(flag_at(world, peer, kind, world.rank), mine);
  }
}

// Waits until flag[kind] of every active peer is >= value. One warp; false in lanes whose wait failed.
__device__ __forceinline__ bool warp_await_peers(const World& world, u32 kind, u64 value, u32 op, u32 phase) {
  bool ok = true;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    if (is_active(peer)) ok &= spin::wait_for(world, flag_at(world, world.rank, kind, peer), value, op, phase, peer);
  return ok;
}

// Waits until flag[kind] of every active peer is >= value. All threads of one block, which then see what the peers
// wrote; bulk copies would need a proxy fence. `waited_ns` (may be null): time from `start` to each peer's flag.
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

// ---- routing_id: all ranks must use the same routing in one operation ----

// The routing_id that rank `from` uses, as rank `at` reads it; `offset` of the slot's array in the region.
__device__ __forceinline__ u64* routing_id_at(const World& world, i32 at, u64 offset, i32 from) {
  return region_at<u64>(world, at, offset) + from;
}

// Routing ids are read by a block's last warp, which has least to do in small operations.
__device__ __forceinline__ bool is_routing_id_warp() { return warp_idx() == num_warps() - 1; }

// Whether one of this thread's peers uses another routing. All threads of a block that has acquired from all peers; the
// block's result is __syncthreads_or over its threads.
__device__ __forceinline__ bool routing_id_differs(const World& world, u64 offset, u64 routing_id) {
  bool differs = false;
  for (i32 peer = lane_idx(); is_routing_id_warp() && peer < world.size; peer += 32)
    differs |= is_active(peer) && ptx::load_volatile(routing_id_at(world, world.rank, offset, peer)) != routing_id;
  return differs;
}

// Reports a routing mismatch to the host, unless an earlier report is still unread: the host raises HandleError, and
// the group stays usable. One thread; routing_id_from(peer): the peer's routing_id.
template <class RoutingIdFrom>
__device__ __forceinline__ void report_mismatch(const World& world, u32 op, u64 routing_id,
                                                RoutingIdFrom routing_id_from) {
  RoutingMismatch* report = &world.host->mismatch;
  if (ptx::load_relaxed_sys(&report->status) != 0) return;
  i32 peer = 0;
  u64 theirs = routing_id;
  while (peer < world.size && theirs == routing_id) {
    if (is_active(peer)) theirs = routing_id_from(peer);
    if (theirs == routing_id) ++peer;
  }
  report->op = op;
  report->peer = peer;
  report->mine = routing_id;
  report->theirs = theirs;
  ptx::store_release_sys(&report->status, 1);
}

// The same for routing ids in the region at `offset`. One block.
__device__ __forceinline__ void report_mismatch(const World& world, u32 op, u64 offset, u64 routing_id) {
  if (threadIdx.x != 0) return;
  report_mismatch(world, op, routing_id,
                  [&](i32 peer) { return ptx::load_volatile(routing_id_at(world, world.rank, offset, peer)); });
}

namespace net {

// `arrive` for a whole warp: its last lane arrives for the block, and all see what that lane has acquired. Without a
// network one thread calls it.
__device__ __forceinline__ bool last_arrives(const World& world, i32 num_blocks, u32 counter) {
  if constexpr (!NETWORK) return arrive(world, {0, num_blocks}, counter);
  bool last = false;
  if (lane_idx() == 31) last = arrive(world, {0, num_blocks}, counter);
  __syncwarp();
  return __any_sync(~0u, last);
}

// Whether no rank of this host goes on without this one, in whose inboxes it has read rows: there could have been those
// of a later operation. Survivors say so before they begin one. One warp, behind its reads.
__device__ __noinline__ bool warp_takes_part(const World& world, u32 op, u64 seq) {
  bool ok = true;
  ptx::fence_sys();
#pragma unroll 1
  for (i32 peer = lane_idx(); peer < world.size; peer += 32) {
    if (!is_active(peer) || is_remote(world, peer)) continue;
    const u64 left_in = ptx::load_relaxed_sys(flag_at(world, world.rank, FLAG_LEFT_OUT, peer));
    if (left_in != 0) ok = spin::give_up(world, STOP_LEFT_OUT, op, PHASE_PAYLOAD, peer, seq, left_in, 0);
  }
  return __all_sync(~0u, ok);
}

// push(peer) for all active remote ranks, a lane for each; for none where an operation has failed. One warp of the last
// block: what any block has stored is pushed.
template <class Push>
__device__ __forceinline__ void for_remotes(const World& world, Push push) {
  if constexpr (!NETWORK) return;
  if (ptx::load_volatile(&world.state->aborted) == STOP_RUNNING) {
#pragma unroll 1
    for (i32 peer = lane_idx(); peer < world.size; peer += 32)
      if (is_active(peer) && is_remote(world, peer)) push(peer);
  }
  __syncwarp();
}

}  // namespace net

}  // namespace ep
