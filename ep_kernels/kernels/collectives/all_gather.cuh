// All-gather by multiprocessors: every rank's shard to every rank. The bytes of all parts are a flat range of 16-byte
// pieces, divided among the blocks, so that a small shard fills them too.
//
// Push (args.push): the outs are registered. A block waits until all peers are in this operation, stores its range of
// the shard to every rank's out, then its arrival flag.
//
//   x [n] -- bulk load -> stage in shared memory -- bulk store -> out[rank * n ...] of rank + 1, ..., this rank
//
// Where x, out or n are no multiples of 16 bytes, threads copy instead of the copy engine (bytes.cuh).
//
// Pull: any out. A block copies its range into this rank's `gather` slot and announces it; then it reads the peers',
// rank + 1 first. A slot holds the parts one behind the other, each from a multiple of 16 bytes on.
//
// Worked example: 3 ranks, one part of 40 bytes, 2 blocks. 3 vectors: block 0 has bytes [0, 16), block 1 [16, 40).
// Block 1 of rank 0 stores its 24 bytes to out + 0 * 40 + 16 of ranks 1, 2 and 0.
//
// Memory order: operation.cuh. Bulk stores are complete (not only read) before the block barrier in front of the flag.
#pragma once

#include "collective_types.h"
#include "collectives/bytes.cuh"
#include "collectives/operation.cuh"
#include "common/ptx.cuh"
#include "common/scheduler.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

constexpr i32 kWarps = THREADS / 32, kBulkStages = 3, kBulkBytes = 4096;  // a stage of a warp
static_assert(kWarps * kBulkStages * 8 <= kBarrierBytes, "an mbarrier for each stage");

// Stages of this warp: its mbarriers and its part of shared memory.
struct Bulk {
  u64* barriers;
  u8* stages;
};

__device__ __forceinline__ Bulk init_bulk(const World& world, u8* shared) {
  const Bulk bulk = {reinterpret_cast<u64*>(shared) + warp_idx() * kBulkStages,
                     after_waits(world, shared) + (128 - (after_waits(world, shared) - shared) % 128) % 128 +
                         warp_idx() * kBulkStages * kBulkBytes};
  if (lane_idx() == 0) {
    for (i32 s = 0; s < kBulkStages; ++s) ptx::barrier_init(bulk.barriers + s);
    ptx::fence_barrier_init();
    ptx::fence_proxy_shared();
  }
  __syncwarp();
  return bulk;
}

__device__ __forceinline__ bool is_bulk(const GatherRange& part) {
  return (part.stride | part.num_bytes | reinterpret_cast<u64>(part.x) | part.out_offset) % 16 == 0;
}

__device__ __forceinline__ u8* shard_at(const CollectiveArgs& args, const GatherRange& part, i32 at) {
  return region_at<u8>(args.world, at, part.out_offset + args.world.rank * part.stride);
}

// Range of a part, chunk by chunk: lane 0 of each warp loads a chunk once and stores it to every active rank. `used`:
// chunks that went through this warp's stages before; returns it with this part's.
__device__ __forceinline__ u32 push_bulk(const CollectiveArgs& args, const GatherRange& part, Range range, Bulk bulk,
                                         u32 used) {
  const World& world = args.world;
  const bool in_place = part.x == shard_at(args, part, world.rank);
  const i64 chunks = (range.end - range.begin + kBulkBytes - 1) / kBulkBytes;
  const u32 mine = static_cast<u32>(chunks > warp_idx() ? (chunks - warp_idx() + kWarps - 1) / kWarps : 0);
  auto begin_of = [&](u32 i) { return range.begin + (warp_idx() + static_cast<i64>(i) * kWarps) * kBulkBytes; };
  auto size_of = [&](u32 i) {
    return static_cast<u32>(min(static_cast<i64>(kBulkBytes), range.end - begin_of(i)));
  };
  auto load = [&](u32 i) {
    const u32 s = (used + i) % kBulkStages;
    ptx::bulk_load(bulk.stages + s * kBulkBytes, part.x + begin_of(i), size_of(i), bulk.barriers + s);
  };
  for (u32 i = 0; i < min(mine, static_cast<u32>(kBulkStages - 1)); ++i) load(i);
#pragma unroll 1
  for (u32 i = 0; i < mine; ++i) {
    const u32 s = (used + i) % kBulkStages;
    ptx::bulk_load_wait(bulk.barriers + s, (used + i) / kBulkStages & 1);
#pragma unroll 1
    for (i32 p = 0; p < world.size; ++p) {
      const i32 peer = rank_at_offset(world, p);
      if (is_active(peer) && !(in_place && peer == world.rank))
        ptx::bulk_store(shard_at(args, part, peer) + begin_of(i), bulk.stages + s * kBulkBytes, size_of(i));
    }
    ptx::bulk_commit();
    if (i + kBulkStages - 1 >= mine) continue;
    ptx::bulk_wait_read<1>();  // the stores of the stage before this one have read it
    load(i + kBulkStages - 1);
  }
  ptx::bulk_wait_read<0>();  // the next part's loads may take any stage
  return used + mine;
}

__device__ __forceinline__ void push_shards(const CollectiveArgs& args, Team team, u8* shared) {
  const World& world = args.world;
  const Bulk bulk = init_bulk(world, shared);
  ptx::fence_proxy_global();  // the copy engine reads what earlier kernels wrote, and writes where peers allowed it
  u32 used = 0;
#pragma unroll 1
  for (i32 i = 0; i < args.num_parts; ++i) {
    const GatherRange& part = args.parts[i];
    const Range range = range_of(team, part.num_bytes);
    // By the copy engine, where addresses allow it; one lane issues.
    if (is_bulk(part)) {
      if (lane_idx() == 0) used = push_bulk(args, part, range, bulk, used);
      continue;
    }
    // By threads, to one active rank after the other.
#pragma unroll 1
    for (i32 p = 0; p < world.size; ++p) {
      const i32 peer = rank_at_offset(world, p);
      if (is_active(peer))
        copy_range(shard_at(args, part, peer) + range.begin, part.x + range.begin, range.end - range.begin);
    }
  }
  // The engine has read x and written everywhere.
  if (lane_idx() == 0) ptx::bulk_wait_all();
}

// Moves every part between its place in a slot and one shard of its tensor. move(part, offset in the slot, range).
template <class Move>
__device__ __forceinline__ void each_part(const CollectiveArgs& args, Team team, Move move) {
  i64 offset = 0;
#pragma unroll 1
  for (i32 i = 0; i < args.num_parts; ++i) {
    const GatherRange& part = args.parts[i];
    move(part, offset, range_of(team, part.num_bytes));
    offset += (static_cast<i64>(part.num_bytes) + kVector - 1) / kVector * kVector;
  }
}

__device__ __forceinline__ void stage_shards(const CollectiveArgs& args, Team team, const Operation& op) {
  u8* slot = gather_slot_at(args, args.world.rank, op.slot);
  each_part(args, team, [&](const GatherRange& part, i64 offset, Range range) {
    copy_range(slot + offset + range.begin, part.x + range.begin, range.end - range.begin);
    copy_range(part.out + args.world.rank * part.stride + range.begin, part.x + range.begin, range.end - range.begin);
  });
}

// One peer after the other, each as soon as its block has announced it. False after a failed wait.
__device__ __forceinline__ bool pull_shards(const CollectiveArgs& args, Team team, const Operation& op, u8* shared) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 p = 0; p < world.size - 1; ++p) {
    const i32 peer = rank_at_offset(world, p);
    if (!is_active(peer)) continue;
    bool failed = false;
    if (threadIdx.x == 0) {
      failed = !spin::wait_for(world, arrival_at(args, world.rank, kFirst, team.block, peer), op.seq, op.op,
                               PHASE_SHARDS, peer);
      note_wait(waits_at(shared), peer, ptx::now_ns() - op.start);
    }
    if (__syncthreads_or(failed) != 0) return false;
    const u8* slot = gather_slot_at(args, peer, op.slot);
    each_part(args, team, [&](const GatherRange& part, i64 offset, Range range) {
      copy_range(part.out + peer * part.stride + range.begin, slot + offset + range.begin, range.end - range.begin);
    });
  }
  return true;
}

__device__ __forceinline__ void gather_team(const CollectiveArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  Operation op;
  if (!begin(args, team, shared, OP_ALL_GATHER, 1, &op)) return;
  bool ok = true;
  if (args.push) {
    ok = await_permission(args, op);
    if (ok) push_shards(args, team, shared);
  } else {
    stage_shards(args, team, op);
  }
  if (ok) notify_blocks(args, team, kFirst, op.seq);
  finish_send(args, team, op, ok);
  if (ok) ok = args.push ? await_blocks(args, team, kFirst, op, shared) : pull_shards(args, team, op, shared);
  end(args, team, op, shared, ok);
}

}  // namespace ep::coll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather(const __grid_constant__ ep::CollectiveArgs args) {
  ep::coll::gather_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather(const ep::CollectiveArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::coll::gather_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
