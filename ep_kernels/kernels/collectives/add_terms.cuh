// Sum of terms that copy engines have brought: out = own + those in this rank's `reduce`, in fp32, in ascending rank,
// rounded once; where out_offset says so, into this rank's region as well, for peers to read. X: dtype.
//
// Waits for nobody: the stream has waited for the copies (transports/nvlink/copy_engines/collective_copies.py). out may
// be the own terms. In its record `reduce` is the slot of the operation, so that slot 0 is the only one.
//
// Worked example: rank 1 of 2, fp32, 5 elements: 2 vectors, the second with one element; out = reduce[0] + own.
#pragma once

#include "collective_types.h"
#include "collectives/bytes.cuh"
#include "collectives/operation.cuh"
#include "collectives/sum.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

__device__ __forceinline__ void add_terms_team(const CollectiveArgs& args, Team team) {
  load_active(args.world);
  __syncthreads();
  list_active(args.world);
  ptx::wait_for_previous_launch();
  if (__syncthreads_or(ptx::load_volatile(&args.world.state->aborted) != STOP_RUNNING) != 0) return;
  const bool shared = args.out_offset != NO_OFFSET;
  u8* seen = shared ? region_at<u8>(args.world, args.world.rank, args.out_offset) : nullptr;
  each_sum(args, Operation{}, args.x, range_of(team, args.num_bytes), args.num_bytes,
           [&](i64 at, const Vector& sum, i64 left) {
             store_part<X>(args.out + at, sum, left);
             if (shared) store_part<X>(seen + at, sum, left);
           });
}

}  // namespace ep::coll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    add_terms(const __grid_constant__ ep::CollectiveArgs args) {
  ep::coll::add_terms_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    add_terms(const ep::CollectiveArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::coll::add_terms_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
