// All active ranks meet: each tells everybody and waits for everybody. One block. The first barrier proves every link.
// Also writes the GPU's clock, so that the host can relate latency records to its own.
// The same kernel tells ranks that take no part any longer that the others have gone on: their waits end at once.
#pragma once

__device__ __forceinline__ void tell_left_out(const World& world, u64 epoch) {
  for (i32 peer = threadIdx.x; peer < world.size; peer += blockDim.x)
    if (!world.active[peer] && ptx::load_relaxed_sys(&world.gone[peer]) == 0)
      ptx::store_release_sys(flag_at(world, peer, FLAG_LEFT_OUT, world.rank), epoch);
}

__device__ __forceinline__ void barrier_rank(const BarrierArgs& args) {
  const World& world = args.world;
  load_active(world);
  ptx::wait_for_previous_launch();
  if (ptx::load_volatile(&world.state->aborted) != STOP_RUNNING) return;
  if (args.left_out_epoch != 0) return tell_left_out(world, args.left_out_epoch);
  const u64 seq = ptx::load_acquire_gpu(&world.state->barrier_seq) + 1;
  __syncthreads();
  tell_peers(world, FLAG_BARRIER, seq);
  await_peers(world, FLAG_BARRIER, seq, OP_BARRIER, PHASE_BARRIER, 0, nullptr);
  if (threadIdx.x != 0) return;
  world.state->barrier_seq = seq;
  ptx::store_relaxed_sys(&world.host->clock_ns, ptx::now_ns());
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) barrier(const __grid_constant__ BarrierArgs args) {
  barrier_rank(args);
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1) barrier(const BarrierArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  if (block % blocks_per_rank == 0) barrier_rank(ranks[block / blocks_per_rank]);
}
#endif
