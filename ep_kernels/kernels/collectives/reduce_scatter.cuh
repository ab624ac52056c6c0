// Reduce-scatter: rank p gets the sum over all ranks of chunk p, in fp32, in ascending rank, rounded once. X: dtype.
//
//   source rank r                                   rank p
//   x + p * stride  -- 16-byte stores -->           reduce[slot][r]
//                                                   out = sum over r of reduce[slot][r]; its own chunk from x
//
// A chunk of num_bytes is a flat range of 16-byte pieces, divided among the blocks; block b sums what the blocks b of
// all ranks have stored. out may be this rank's chunk of x: a thread reads a piece before it writes it.
//
// Worked example: 2 ranks, fp32, chunks of 5 elements, 1 block: 2 vectors, the second with one element. Rank 0 stores
// x[5..9] to rank 1's reduce[slot][0]; rank 1 adds its own x[5..9] to that.
//
// Memory order: operation.cuh.
#pragma once

#include "collective_types.h"
#include "collectives/bytes.cuh"
#include "collectives/operation.cuh"
#include "collectives/sum.cuh"
#include "common/scheduler.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

__device__ __forceinline__ void send_chunks(const CollectiveArgs& args, Range range, const Operation& op) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 p = 0; p < world.size - 1; ++p) {
    const i32 peer = rank_at_offset(world, p);
    if (is_active(peer))
      copy_range(reduce_row_at(args, peer, op.slot, world.rank) + range.begin,
                 args.x + peer * args.stride + range.begin, range.end - range.begin);
  }
}

__device__ __forceinline__ void scatter_team(const CollectiveArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  Operation op;
  if (!begin(args, team, shared, OP_REDUCE_SCATTER, 1, &op)) return;
  const Range range = range_of(team, args.num_bytes);
  send_chunks(args, range, op);
  notify_blocks(args, team, kFirst, op.seq);
  finish_send(args, team, op, true);
  const bool ok = await_blocks(args, team, kFirst, op, shared);
  const u8* own = args.x + args.world.rank * args.stride;
  if (ok)
    each_sum(args, op, own, range, args.num_bytes,
             [&](i64 at, const Vector& sum, i64 left) { store_part<X>(args.out + at, sum, left); });
  end(args, team, op, shared, ok);
}

}  // namespace ep::coll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reduce_scatter(const __grid_constant__ ep::CollectiveArgs args) {
  ep::coll::scatter_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reduce_scatter(const ep::CollectiveArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::coll::scatter_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
