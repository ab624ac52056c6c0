// Copy engines in a CUDA graph: what a stream's own waits do outside of one, by two warps of one block. The number of
// an operation is counted on the device, so that a replay finds a new one. Always a pull, so that the copies of a graph
// that is replayed by a rank that has stopped write to no peer.
//
//   phase 0  GRAPH_SHARD -> peers: this rank's shard may be read; wait GRAPH_SHARD of peers
//   copies   shards of peers -> out, nodes of the graph (transports/nvlink/gpu/copy_schedule.py)
//   phase 1  GRAPH_READY -> peers: their shards have been read; wait GRAPH_READY of peers; the operation is over
//
// Memory order. What the stream did before a phase comes before its flags (release); an acquire of them before what the
// stream does next.
#pragma once

#include "collective_types.h"
#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

// 16 bytes: seq, signature.
__device__ __forceinline__ u64* copy_flag_at(const CollectiveArgs& args, i32 at, u32 row, i32 from) {
  return region_at<u64>(args.world, at, args.map.copy_flags) + 2 * (static_cast<i64>(row) * args.world.size + from);
}

// All threads.
__device__ __forceinline__ void send_flags(const CollectiveArgs& args, u32 row, u64 seq) {
  const World& world = args.world;
  for (i32 peer = threadIdx.x; peer < world.size; peer += THREADS) {
    if (!is_active(peer) || peer == world.rank) continue;
    u64* flag = copy_flag_at(args, peer, row, world.rank);
    ptx::store_relaxed_sys(flag + 1, args.signature);
    ptx::store_release_sys(flag, seq);
  }
}

// All threads. Reports a peer that brought something else. False after a failed wait.
__device__ __forceinline__ bool await_flags(const CollectiveArgs& args, u32 row, u64 seq, u32 phase) {
  const World& world = args.world;
  bool failed = false;
  for (i32 peer = threadIdx.x; peer < world.size; peer += THREADS) {
    if (!is_active(peer) || peer == world.rank) continue;
    const u64* flag = copy_flag_at(args, world.rank, row, peer);
    failed |= !spin::wait_for(world, flag, seq, OP_ALL_GATHER, phase, peer);
    // The first difference is reported.
    const u64 theirs = ptx::load_relaxed_sys(flag + 1);
    RoutingMismatch* report = &world.host->mismatch;
    if (failed || theirs == args.signature || ptx::load_relaxed_sys(&report->status) != 0) continue;
    report->op = OP_ALL_GATHER;
    report->peer = peer;
    report->mine = args.signature;
    report->theirs = theirs;
    ptx::store_release_sys(&report->status, 1);
  }
  return __syncthreads_or(failed) == 0;
}

__device__ __forceinline__ void copy_wait_rank(const CollectiveArgs& args) {
  const World& world = args.world;
  load_active(world);
  ptx::wait_for_previous_launch();
  if (__syncthreads_or(ptx::load_volatile(&world.state->aborted) != STOP_RUNNING) != 0) return;
  const u64 seq = ptx::load_volatile(&world.state->dispatch_seq) + 1;
  const bool begins = args.num_parts == 0;
  const u32 row = begins ? COPY_FLAG_GRAPH_SHARD : COPY_FLAG_GRAPH_READY;
  send_flags(args, row, seq);
  if (!await_flags(args, row, seq, begins ? PHASE_SHARDS : PHASE_CREDIT)) return;
  if (!begins && threadIdx.x == 0) world.state->dispatch_seq = seq;
}

}  // namespace ep::coll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    copy_wait(const __grid_constant__ ep::CollectiveArgs args) {
  ep::coll::copy_wait_rank(args);
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    copy_wait(const ep::CollectiveArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  if (block % blocks_per_rank == 0) ep::coll::copy_wait_rank(ranks[block / blocks_per_rank]);
}
#endif
