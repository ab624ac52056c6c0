// What all collectives have in common: how an operation begins and ends, who takes part, signals between the blocks of
// ranks.
//
// Block b of a rank works on the same part of every shard as block b of any other rank, so it waits for those blocks
// alone. Blocks of one rank never wait for one another: a grid need not be resident as a whole.
//
// Memory order. Stores of a block -> block barrier -> st.release.sys of the arrival flag by one thread (cumulative) ->
// ld.acquire.sys of it by a thread of the peer's block -> block barrier -> loads. Slots are used again two operations
// later: collective_abi.py says why that is safe. A registered `out` is written only after COMBINE_STARTED of its rank:
// all that was before on the peer's stream has ended (common/signal.cuh), and a rank that is left out loses the
// permission (barrier.cuh).
#pragma once

#include "collective_types.h"
#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "layout/ll128.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

constexpr u32 kFirst = 0, kSecond = 1;  // stages: arrivals that a block waits for

struct Operation {
  u32 op, mode;  // index into OPS; for the latency record: 0 = LL128 lines, 1 = others
  u64 seq, start, number;
  i32 slot;
};

// Active ranks in ascending order.
extern "C" {
__shared__ i32 active_order[MAX_RANKS];
__shared__ i32 num_active_ranks;
}

__device__ __forceinline__ i32 num_active() { return num_active_ranks; }

// Index of this rank among the active ones.
__device__ __forceinline__ i32 active_index(i32 rank) {
  i32 index = 0;
#pragma unroll 1
  for (i32 i = 0; i < rank; ++i) index += is_active(i);
  return index;
}

__device__ __forceinline__ void list_active(const World& world) {
  if (threadIdx.x < static_cast<u32>(world.size) && is_active(threadIdx.x))
    active_order[active_index(threadIdx.x)] = threadIdx.x;
  if (threadIdx.x == 0) num_active_ranks = active_index(world.size);
}

__device__ __forceinline__ u64* arrival_at(const CollectiveArgs& args, i32 at, u32 stage, i32 block, i32 from) {
  const i64 index = (static_cast<i64>(stage) * MAX_BLOCKS + block) * args.world.size + from;
  return region_at<u64>(args.world, at, args.map.arrivals) + index;
}

// {seq, signature} of `from`.
__device__ __forceinline__ u8* signature_at(const CollectiveArgs& args, i32 at, i32 slot, i32 from) {
  return region_at<u8>(args.world, at, args.map.signatures) + (static_cast<i64>(slot) * args.world.size + from) * 16;
}

__device__ __forceinline__ u8* reduce_row_at(const CollectiveArgs& args, i32 at, i32 slot, i32 from) {
  return region_at<u8>(args.world, at, args.map.reduce) + slot * args.map.slot_stride + from * args.map.reduce_row;
}

__device__ __forceinline__ u8* gather_slot_at(const CollectiveArgs& args, i32 at, i32 slot) {
  return region_at<u8>(args.world, at, args.map.gather) + slot * args.map.slot_stride;
}

// What an operation has to tell and to look at beside its data is for the last two warps of a block, which have no data
// in small operations: one for signatures, one for counters and records, both on the way while others wait for peers.
__device__ __forceinline__ bool is_signature_warp(Team team) {
  return team.block == 0 && warp_idx() == num_warps() - 2;
}

// Begins operation `op`; all threads. False: the rank is stopped, and nothing may be touched. Block 0 tells the peers
// that this rank has come here, and with what. `early` runs once x is there, beside the reading of the counters.
template <class Early>
__device__ __forceinline__ bool begin(const CollectiveArgs& args, Team team, u8* shared, u32 op, u32 mode,
                                      Operation* found, Early early) {
  const World& world = args.world;
  // Active ranks; then what an earlier kernel wrote may be read.
  load_active(world);
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) waits_at(shared)[i] = 0;
  __syncthreads();
  list_active(world);
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  early();
  // The counters of this rank: stopped, or the next operation.
  const u64 stop = ptx::load_cached(&world.state->aborted), last = ptx::load_cached(&world.state->combine_seq);
  const u64 number = ptx::load_cached(&world.state->sample_head);
  if (is_stopped(stop, last, number)) return false;
  *found = {op, mode, last + 1, ptx::now_ns(), number, static_cast<i32>((last + 1) & 1)};
  // Tell the peers.
  if (is_signature_warp(team)) {
    warp_send_started(world, FLAG_COMBINE_STARTED, found->seq);
#pragma unroll 1
    for (i32 peer = lane_idx(); peer < world.size; peer += 32)
      if (is_active(peer))
        ptx::store_pair(signature_at(args, peer, found->slot, world.rank), found->seq, args.signature);
  }
  return true;
}

__device__ __forceinline__ bool begin(const CollectiveArgs& args, Team team, u8* shared, u32 op, u32 mode,
                                      Operation* found) {
  return begin(args, team, shared, op, mode, found, [] {});
}

// Everything that this block stores for peers in a stage is stored: its flag goes to all of them. All threads.
__device__ __forceinline__ void notify_blocks(const CollectiveArgs& args, Team team, u32 stage, u64 seq) {
  const World& world = args.world;
  __syncthreads();
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) {
    const i32 peer = (world.rank + i) % world.size;
    if (is_active(peer)) ptx::store_release_sys(arrival_at(args, peer, stage, team.block, world.rank), seq);
  }
}

// Waits for this block's counterpart at every active peer. All threads, which then see what it stored. False after a
// failed wait.
__device__ __forceinline__ bool await_blocks(const CollectiveArgs& args, Team team, u32 stage, const Operation& op,
                                             u8* shared) {
  const World& world = args.world;
  bool failed = false;
  for (i32 peer = threadIdx.x; peer < world.size; peer += THREADS) {
    if (!is_active(peer) || peer == world.rank) continue;
    failed |= !spin::wait_for(world, arrival_at(args, world.rank, stage, team.block, peer), op.seq, op.op,
                              stage == kFirst ? PHASE_SHARDS : PHASE_SUMS, peer);
    note_wait(waits_at(shared), peer, ptx::now_ns() - op.start);
  }
  return __syncthreads_or(failed) == 0;
}

// Waits until every active peer is in this operation, so that its `out` may be written. All threads.
__device__ __forceinline__ bool await_permission(const CollectiveArgs& args, const Operation& op) {
  return await_peers(args.world, FLAG_COMBINE_STARTED, op.seq, op.op, PHASE_CREDIT, op.start, nullptr);
}

struct Announced {
  u64 low, high;
};

// Reports a peer that is in another operation at the same seq. One warp; `waits`: for those that have not said yet,
// which is in vain after a failed wait.
__device__ __forceinline__ void compare_signatures(const CollectiveArgs& args, const Operation& op, bool waits) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 first = 0; first < world.size; first += 32) {
    // A lane for each peer: what it has announced.
    const i32 peer = min(first + lane_idx(), world.size - 1);
    const u8* at = signature_at(args, world.rank, op.slot, peer);
    Announced said = {0, 0};
    auto poll = [&] {
      said = is_active(peer) ? ptx::load_pair<Announced>(at) : Announced{op.seq, args.signature};
      return said.low == op.seq;
    };
    if (waits) spin::warp_wait(world, op.seq, op.op, PHASE_CREDIT, peer, poll);
    else poll();
    // The first that differs is reported, once.
    const bool differs = said.low == op.seq && said.high != args.signature;
    const u32 others = __ballot_sync(~0u, differs);
    if (others == 0 || lane_idx() != __ffs(others) - 1) continue;
    RoutingMismatch* report = &world.host->mismatch;
    if (ptx::load_relaxed_sys(&report->status) != 0) continue;
    report->op = op.op;
    report->peer = peer;
    report->mine = args.signature;
    report->theirs = said.high;
    ptx::store_release_sys(&report->status, 1);
  }
}

// The block stores nothing more; `ok`: no wait has failed. All threads; a block barrier, behind which all but two warps
// go on at once. The last block of the rank advances the counters; block 0 compares signatures.
__device__ __forceinline__ void finish_send(const CollectiveArgs& args, Team team, const Operation& op, bool ok) {
  __syncthreads();
  if (is_signature_warp(team)) compare_signatures(args, op, ok);
  if (threadIdx.x != THREADS - 1) return;
  if (team.num_blocks > 1 && !arrive(args.world, team, DONE_COMBINE_SEND)) return;
  args.world.state->combine_seq = op.seq;
  const u64 most = 0x7FFFFFFF;
  note_sent(args.world, op.op, op.mode, static_cast<i32>(min(args.x_bytes, most)), op.seq, op.start, args.words,
            team.num_blocks);
}

// Ends the operation for this block. All threads.
__device__ __forceinline__ void end(const CollectiveArgs& args, Team team, const Operation& op, u8* shared, bool ok) {
  if (ok) note_end(args.world, team, op.number, waits_at(shared));
}

}  // namespace ep::coll
