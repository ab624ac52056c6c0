// High-throughput combine: each rank sums the rows that serve one (source, position) in fp32, in ascending k, rounds
// once and pushes the partial straight home; home sums the partials of a token in ascending rank, as they arrive.
//
//   owner rank                                                home rank
//   y[places[source][position][k]]  --bulk load--> rows
//     fp32, ascending k -> made (or rows as they are)
//     made  --bulk store--------------------------------->    home[owner][position]
//   CHUNK positions complete: progress[owner][chunk] = seq    ==>  --bulk load--> home stages
//                                                             z[t] = sum over ranks ascending, fp32 -> output dtype
//
// Both halves run side by side in every block, a task per warp: one loads rows of y, one stores, one tells peers what
// has come, one loads what has come home; the others add. Stages of shared memory (ht/pipeline.cuh) lie between them.
// Blocks take chunks, and tokens, from counters.
//
// KIND 0: rows per expert, combine weights them. 1: rows per rank, moved as they are. 2: exact: every routed row
// travels to home[token][k] and is weighted at home, in ascending k. Y is the output dtype, C the combine dtype (e4m3:
// block-128 scales travel behind the columns). Rows of this very rank that need no change are read where they lie,
// where one launch does both halves. A partial whose rows were all dropped travels as +0.
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its position 1, and to rank 1 (k = 1). Rank 0
// writes bf16(w0 * y0 + w3 * y3) to rank 2's home[0][1] and, with positions 0..3 complete, sets rank 2's
// progress[0][0]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in its own `home` table, awaits both chunks and
// adds the two rows.
//
// Memory order: a bulk store that is complete is ordered before what its thread does next: a counter in shared memory
// (release, block), acquired by the telling warp, whose fence (system) stands before the words of progress. Home
// acquires these, and a proxy fence stands before its loads. Progress only grows: a higher seq vouches for a lower one,
// for its kernel came later on the owner's stream. Reuse of a slot: a rank that has started num_in_flight combines more
// has, in stream order, read the slot; the telling warp finds out (credit) and arrives at an mbarrier, which whoever
// writes to peers awaits. Rows are loaded and summed without. Which routing a rank brings is told before any row
// (FLAG_COMBINE): where they differ nobody waits for rows.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "ht/combine_block.cuh"
#include "ht/combine_send.cuh"
// Behind the half that sends: static shared memory lies in the order of definitions.
#include "ht/combine_recv.cuh"
#include "ht/combine_reduce.cuh"
#include "ht/pipeline.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

__device__ __forceinline__ Rooms open_rooms(const CombineArgs& args, u8* shared, Item* items) {
  const Rooms rooms = carve_rooms(args.rings, shared, shared + args.work.stage_offset, items);
  if (threadIdx.x == THREADS - 1) {  // of a warp that has nothing to load
    open_ring(rooms.rows, 1, kSums ? num_of_team(args.rings) : 1);
    if constexpr (!kCopies) open_ring(rooms.made, kSums ? num_of_team(args.rings) : 1, 1);
    open_ring(rooms.home, 1, num_summers(args.rings));
    ptx::barrier_init(&credit_known);
    for (u32 turn = 0; kSums && turn < kTurns; ++turn) ptx::barrier_init(turn_told + turn);
    ptx::barrier_init(&desk_full, 32);
    ptx::barrier_init(&desk_empty, 32);
    chunks_done = chunks_told = 0;
    verdict = kSame;
    ptx::fence_barrier_init();
    ptx::fence_proxy_shared();
  }
  return rooms;
}

struct Beginning {
  u64 stop, origin, seq;
  Credit credit;  // of the telling warp
};

extern "C" {  // see common/block.cuh
__shared__ u64 record;  // this operation's latency record; a register fewer through all tasks
}

// Everything is asked for before any of it is looked at. All threads; shared memory: after the next block barrier.
__device__ __forceinline__ Beginning begin(const CombineArgs& args, i32* rows, u64* waited) {
  const World& world = args.world;
  const bool sends = args.work.halves & kSend;
  const i32 peer = threadIdx.x;
  Beginning begun = {};
  begun.stop = ptx::load_volatile(&world.state->aborted);
  begun.origin = ptx::load_volatile(args.origin);
  begun.seq = sends ? ptx::load_volatile(&world.state->combine_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  const u64 number = record_number(world, args.work.halves, args.op);
  if (sends && warp_idx() == kTeller)
    begun.credit = warp_ask_credit(world, FLAG_COMBINE_STARTED, &world.state->combine_slot_seq[args.slot]);
  const i32 num_rows = sends && peer < world.size ? args.source_rows[peer] : 0;
  load_active(world);
  if (peer == 0) record = number;
  if (peer < world.size) {
    waited[peer] = 0;
    rows[peer] = is_active(peer) ? num_rows : 0;
  }
  return begun;
}

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  i32* rows = reinterpret_cast<i32*>(after_waits(world, shared));
  u64* waited = waits_at(shared);
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  const i32 warp = warp_idx();
  ptx::wait_for_previous_launch();
  const Beginning begun = begin(args, rows, waited);
  Item* items = reinterpret_cast<Item*>(rows + (world.size + 3) / 4 * 4);
  const Rooms rooms = open_rooms(args, shared, items);
  const Desk desk = {reinterpret_cast<Ask*>(items + kMostItems), 0};
  if (is_stopped(begun.stop, begun.seq, ~0ull)) {  // z is known where this launch receives
    if (receives) poison(args, team);
    return;
  }
  const u64 seq = begun.seq, origin = begun.origin;
  const u64 start = note_receive(world, team, args.work.halves, record);
  if (warp == kRowLoader) {
    if (sends) load_all_rows(args, team, rows, rooms.rows);
  } else if (warp == kStorer) {
    if (sends && lane_idx() == 0) store_pieces(args, kCopies ? rooms.rows : rooms.made);
  } else if (warp == kTeller) {
    if (sends) tell(args, team, find_credit(args, team, begun.credit, seq), seq, origin, start);
  } else if (warp == kHomeLoader) {
    if (receives) load_all_home(args, team, rooms.home, desk, seq, origin, start, waited);
  } else if (kCopies && warp == kAsker) {
    if (receives) load_what_is_asked(args, desk, rooms.home);
  } else if (warp < kFirstSummer) {
    if constexpr (kConverts) {
      if (sends) convert_rows(args, rooms.rows, rooms.made);
    } else if constexpr (!kCopies) {
      if (sends) make_all_partials(args, rooms.rows, rooms.made);
    }
  } else if (receives && warp < kFirstSummer + num_summers(args.rings)) {
    sum_home(args, rooms.home);
  }
  if (!receives) return;
  __syncthreads();
  // Where a wait failed nobody knows which tokens this block would have taken.
  if (verdict != kSame) poison(args, verdict == kFailed ? Team{0, 1} : team);
  if (verdict == kDiffers && team.block == 0) report_difference(world, OP_COMBINE, origins_at(args), origin);
  note_end(world, team, record, waited);
}

}  // namespace ep::ht

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_combine(const __grid_constant__ ep::CombineArgs args) {
  ep::ht::combine_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ht_combine(const ep::CombineArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::ht::combine_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
