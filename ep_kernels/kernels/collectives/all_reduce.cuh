// All-reduce: every rank gets the sum of all ranks' x, in fp32, in ascending rank, rounded once. X: dtype.
// KIND 0: one-shot (one_shot.cuh), for few bytes; 1: two-shot (two_shot.cuh). The result does not depend on it.
#pragma once

#include "collective_types.h"
#include "collectives/one_shot.cuh"
#include "collectives/two_shot.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

constexpr i32 kOneShot = 0;

__device__ __forceinline__ void reduce_team(const CollectiveArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  if constexpr (KIND == kOneShot) one_shot_team(args, team, shared);
  else two_shot_team(args, team, shared);
}

}  // namespace ep::coll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_reduce(const __grid_constant__ ep::CollectiveArgs args) {
  ep::coll::reduce_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_reduce(const ep::CollectiveArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::coll::reduce_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
