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
// has come, one loads what has come home; the others add. Stages of shared memory (rings.cuh) lie between them. Blocks
// take chunks, and tokens, from counters.
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
// has, in stream order, read the slot. Which routing a rank brings is told before any row (FLAG_COMBINE): where they
// differ nobody waits for rows.
#pragma once

__device__ __forceinline__ Rooms open_rooms(const CombineArgs& args, u8* shared, Item* items) {
  const Rooms rooms = carve_rooms(args.rings, shared, shared + args.work.stage_offset, items);
  if (threadIdx.x == 0) {
    open_ring(rooms.rows, 1, kCopies || kConverts ? 1 : kMakers);
    if constexpr (!kCopies) open_ring(rooms.made, kConverts ? 1 : kMakers, 1);
    open_ring(rooms.home, 1, kSummers);
    ptx::fence_barrier_init();
    ptx::fence_proxy_async();
  }
  return rooms;
}

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  i32* rows = reinterpret_cast<i32*>(after_waits(world, shared));
  const Rooms rooms = open_rooms(args, shared, reinterpret_cast<Item*>(rows + (world.size + 3) / 4 * 4));
  u64* waited = waits_at(shared);
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  const i32 warp = warp_idx();
  load_active(world);
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) waited[i] = 0;
  if (threadIdx.x == 0) {
    chunks_done = chunks_told = 0;
    verdict = kSame;
  }
  __syncthreads();
  ptx::wait_for_previous_launch();
  const u64 stop = ptx::load_volatile(&world.state->aborted), origin = ptx::load_volatile(args.origin);
  const u64 seq = sends ? ptx::load_volatile(&world.state->combine_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  if (__syncthreads_or(stop != STOP_RUNNING) != 0) {  // z is known where this launch receives
    if (receives) poison(args, team);
    return;
  }
  const bool takes_rows = sends && warp == kRowLoader, takes_tokens = receives && warp == kHomeLoader;
  Claims claims = {takes_rows ? &world.state->chunks_taken : &world.state->tokens_taken, 0, team.num_blocks, 0};
  if (takes_rows || takes_tokens) claims.ask();
  const u64 number = record_number(world, args.work.halves, args.op);
  const u64 start = note_receive(world, team, args.work.halves, number);
  const u64 last = ptx::load_volatile(&world.state->combine_slot_seq[args.slot]);
  bool credit = true;
  for (i32 s = threadIdx.x; sends && s < world.size; s += THREADS) rows[s] = is_active(s) ? args.source_rows[s] : 0;
  if (sends && warp == kTeller) {
    if (team.block == 0) warp_tell_started(world, FLAG_COMBINE_STARTED, seq);
    credit = warp_await_peers(world, FLAG_COMBINE_STARTED, credit_needed(args, last, seq), OP_COMBINE, PHASE_CREDIT);
  }
  const bool sent = sends && __syncthreads_or(!credit) == 0;
  if (warp == kRowLoader) {
    if (sent) load_all_rows(args, claims, rows, rooms.rows);
  } else if (warp == kStorer) {
    if (sent && lane_idx() == 0) store_pieces(args, kCopies ? rooms.rows : rooms.made);
  } else if (warp == kTeller) {
    if (sends) tell(args, team, sent, seq, origin, start);
  } else if (warp == kHomeLoader) {
    if (receives) load_all_home(args, claims, rooms.home, seq, origin, start, waited);
  } else if (warp < kFirstSummer) {
    if constexpr (kConverts) {
      if (sent) convert_rows(args, rooms.rows, rooms.made);
    } else if constexpr (!kCopies) {
      if (sent) make_partials<kMakers>(args, rooms.rows, rooms.made);
    }
  } else if (receives) {
    sum_home(args, rooms.home);
  }
  if (!receives) return;
  __syncthreads();
  // Where a wait failed nobody knows which tokens this block would have taken.
  if (verdict != kSame) poison(args, verdict == kFailed ? Team{0, 1} : team);
  if (verdict == kDiffers && team.block == 0) report_difference(world, OP_COMBINE, origins_at(args), origin);
  note_end(world, team, number, waited);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_combine(const __grid_constant__ CombineArgs args) {
  combine_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_combine(const CombineArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  combine_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
