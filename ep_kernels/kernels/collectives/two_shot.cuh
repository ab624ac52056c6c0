// Two-shot all-reduce: each active rank sums one chunk of x and sends the sums to all. The chunks are those of the
// active ranks, in ascending order; each but the last a multiple of 16 bytes.
//
//   rank r                                 rank p, chunk i                          rank q
//   chunk i of x  -- stage 1 -->           reduce[slot][r]
//                                          sum over all ranks, its own from x
//                                                           -- stage 2 -->          out (registered) or gather[slot]
//                                                                                   gather[slot] -> out
//
// Block b has the same range of every chunk on all ranks, so it waits for the blocks b alone, twice. out may be x: what
// a peer stores in stage 2 comes after this block's flag of stage 1, by when it has read that range.
//
// Where x is the registered out on all ranks (args.reads), there is no stage 1: rank i reads chunk i of every out.
// Nobody else reads or writes these bytes before it has, and it has before its flag of stage 2. What earlier kernels of
// a rank have left in its out is released before its permission.
#pragma once

#include "collective_types.h"
#include "collectives/bytes.cuh"
#include "collectives/operation.cuh"
#include "collectives/sum.cuh"
#include "common/scheduler.cuh"
#include "common/wait.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

// Of the chunks: bytes of one, the last one's apart.
__device__ __forceinline__ i64 chunk_bytes(const CollectiveArgs& args) {
  const i64 vectors = (static_cast<i64>(args.num_bytes) + kVector - 1) / kVector;
  return (vectors + num_active() - 1) / num_active() * kVector;
}

// This block's bytes of chunk i.
__device__ __forceinline__ Range range_of_chunk(const CollectiveArgs& args, Team team, i32 i) {
  const i64 chunk = chunk_bytes(args), first = i * chunk;
  const Range whole = range_of(team, chunk);
  const i64 end = max(min(static_cast<i64>(args.num_bytes) - first, whole.end), static_cast<i64>(0));
  return {min(whole.begin, end), end};
}

__device__ __forceinline__ void send_terms(const CollectiveArgs& args, Team team, const Operation& op) {
  const World& world = args.world;
  const i64 chunk = chunk_bytes(args);
  const i32 mine = active_index(world.rank);
#pragma unroll 1
  for (i32 step = 1; step < num_active(); ++step) {
    const i32 i = (mine + step) % num_active(), peer = active_order[i];
    const Range range = range_of_chunk(args, team, i);
    copy_range(reduce_row_at(args, peer, op.slot, world.rank) + range.begin, args.x + i * chunk + range.begin,
               range.end - range.begin);
  }
}

// Chunk `first` ... of the terms of another rank, where args.reads.
__device__ __forceinline__ const u8* terms_at(const CollectiveArgs& args, i32 rank, i64 first) {
  return region_at<u8>(args.world, rank, args.out_offset) + first;
}

// Where sums go at a rank: its registered out, or its slot.
__device__ __forceinline__ u8* sums_at(const CollectiveArgs& args, const Operation& op, i32 at) {
  return args.out_offset == NO_OFFSET ? gather_slot_at(args, at, op.slot)
                                      : region_at<u8>(args.world, at, args.out_offset);
}

__device__ __forceinline__ void send_sums(const CollectiveArgs& args, Team team, const Operation& op) {
  const World& world = args.world;
  const i32 mine = active_index(world.rank);
  const i64 first = mine * chunk_bytes(args);
  const Range range = range_of_chunk(args, team, mine);
  auto row_of = [&](i32 rank) -> const u8* {
    return args.reads ? terms_at(args, rank, first) : reduce_row_at(args, world.rank, op.slot, rank);
  };
  each_sum(args, args.x + first, row_of, range, static_cast<i64>(args.num_bytes) - first,
           [&](i64 at, const Vector& sum, i64 left) {
#pragma unroll 1
             for (i32 step = 1; step <= num_active(); ++step) {
               const i32 peer = active_order[(mine + step) % num_active()];
               store_part<X>(sums_at(args, op, peer) + first + at, sum, left);
             }
           });
}

__device__ __forceinline__ void copy_sums(const CollectiveArgs& args, Team team, const Operation& op) {
  const i64 chunk = chunk_bytes(args);
  const u8* slot = gather_slot_at(args, args.world.rank, op.slot);
#pragma unroll 1
  for (i32 i = 0; i < num_active(); ++i) {
    const Range range = range_of_chunk(args, team, i);
    const i64 at = i * chunk + range.begin;
    copy_range(args.out + at, slot + at, range.end - range.begin);
  }
}

__device__ __forceinline__ void two_shot_team(const CollectiveArgs& args, Team team, u8* shared) {
  Operation op;
  auto release = [&] {
    if (args.reads && is_signature_warp(team)) ptx::fence_sys();
  };
  if (!begin(args, team, shared, OP_ALL_REDUCE, 1, &op, release)) return;
  // Too large where it was captured when more ranks were active.
  if (!args.reads && chunk_bytes(args) > static_cast<i64>(args.map.reduce_row)) {
    if (threadIdx.x == 0) spin::give_up(args.world, STOP_ABORTED, op.op, PHASE_BLOCKS, args.world.rank, op.seq, 0, 0);
    return;
  }
  const bool registered = args.out_offset != NO_OFFSET;
  bool ok = true;
  if (!args.reads) {
    send_terms(args, team, op);
    notify_blocks(args, team, kFirst, op.seq);
    ok = await_blocks(args, team, kFirst, op, shared);
  }
  if (registered && ok) ok = await_permission(args, op);
  if (ok) {
    send_sums(args, team, op);
    notify_blocks(args, team, kSecond, op.seq);
  }
  finish_send(args, team, op, ok);
  if (ok) ok = await_blocks(args, team, kSecond, op, shared);
  if (ok && !registered) copy_sums(args, team, op);
  end(args, team, op, shared, ok);
}

}  // namespace ep::coll
