// All active ranks meet: each notifies all and waits for all. One block. The first barrier proves every link.
// Also writes the GPU's clock, so that the host can relate latency records to its own.
// The same kernel leaves ranks out: those that take no part any longer lose the permission to write here, and are
// informed that the others go on.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep {

// A rank X that was left out may live, and may launch an operation in which this rank gave it up. Before X stores to a
// row that this rank may use again (HT dispatch, exact combine), two things have happened:
//   permission: X has read, in its own memory, that every active rank is in this very operation: the rank's counts
//     (HT dispatch), STARTED (with a previous handle), COMBINE_STARTED (exact combine);
//   notice: X's block 0 has stored STARTED or COMBINE_STARTED to this rank. Every block of X has seen that: it waits
//     for the counts of X, which come after, or for the flag that block 0 stores to X itself at the same time.
// So survivors revoke the permission, at X. A kernel that had read it before has given notice, or does so within the
// first microseconds of its blocks. Hosts give that time, and then wait until X has sent what it gave notice of: SENT
// of X has come to STARTED of X (transports/nvlink/calls/left_out.py). Then nothing of X is under way, and nothing
// follows. What else X stores here lies in its own part of a slot, and its flags are of no later operation.
__device__ __forceinline__ void revoke(const World& world, i32 peer) {
  const RegionMap& map = world.map;
  ptx::store_relaxed_sys(flag_at(world, peer, FLAG_STARTED, world.rank), 0);
  ptx::store_relaxed_sys(flag_at(world, peer, FLAG_COMBINE_STARTED, world.rank), 0);
  const i64 pairs = static_cast<i64>(world.size) * (world.local_stride + 1) / 2 + 1;  // of a source: ht::pair_at
  for (u64 slot = map.counts; slot < map.arrivals; slot += map.counts_stride)
    for (i64 p = world.rank * pairs; p < (world.rank + 1) * pairs; ++p)
      ptx::store_pair(region_at<u8>(world, peer, slot) + p * PAIR_BYTES, 0, 0);
}

// A thread per rank. Ranks that were given up may live; memory of dead ranks is not touched. A rank that waits for
// another one that is left out is informed, too, so that its wait ends.
__device__ __forceinline__ void leave_out(const World& world, u64 epoch) {
  for (i32 peer = threadIdx.x; peer < world.size; peer += blockDim.x) {
    if (world.active[peer] || ptx::load_relaxed_sys(&world.gone[peer]) == GONE_DEAD) continue;
    if constexpr (NETWORK)
      if (is_remote(world, peer)) continue;  // its connections are closed (transports/nvlink/network/remote.py)
    revoke(world, peer);
    for (i32 other = 0; other < world.size; ++other)
      if (other != peer && !world.active[other])
        ptx::store_release_sys(flag_at(world, peer, FLAG_LEFT_OUT, other), epoch | ALSO_LEFT_OUT);
    ptx::store_release_sys(flag_at(world, peer, FLAG_LEFT_OUT, world.rank), epoch);
    for (u32 kind = FLAG_SENT; kind <= FLAG_COMBINE_SENT; ++kind)
      *flag_at(world, world.rank, kind, peer) = ptx::load_relaxed_sys(flag_at(world, peer, kind, peer));
  }
}

__device__ __forceinline__ void barrier_rank(const BarrierArgs& args) {
  const World& world = args.world;
  load_active(world);
  ptx::wait_for_previous_launch();
  if (ptx::load_volatile(&world.state->aborted) != STOP_RUNNING) return;
  if (args.left_out_epoch != 0) return leave_out(world, args.left_out_epoch);
  const u64 seq = ptx::load_acquire_gpu(&world.state->barrier_seq) + 1;
  __syncthreads();
  notify_peers(world, FLAG_BARRIER, seq);
  await_peers(world, FLAG_BARRIER, seq, OP_BARRIER, PHASE_BARRIER, 0, nullptr);
  if (threadIdx.x != 0) return;
  world.state->barrier_seq = seq;
  ptx::store_relaxed_sys(&world.host->clock_ns, ptx::now_ns());
}

}  // namespace ep

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) barrier(const __grid_constant__ ep::BarrierArgs args) {
  ep::barrier_rank(args);
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    barrier(const ep::BarrierArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  if (block % blocks_per_rank == 0) ep::barrier_rank(ranks[block / blocks_per_rank]);
}
#endif
