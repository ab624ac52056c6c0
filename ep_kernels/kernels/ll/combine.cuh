// Low-latency combine: each rank sums the rows that serve one (source, position) in fp32, in ascending k, rounds once
// and sends the partial home as lines that carry the operation's seq (layout/ll128.cuh); home polls the lines of a
// token's partials and sums them in ascending rank as they arrive.
//
//   owner rank: send blocks                                     home rank: receive blocks
//   y[places[source][position][k]] * weight  ...
//     fp32, ascending k -> combine dtype -> units ---------->   home_lines[owner][position]
//                                                               z[t] = sum over ranks ascending, fp32 -> output dtype
//
// KIND 0: rows per expert, combine weights them. 1: rows per rank, moved as they are. 2: exact: every routed row
// travels to home_lines[token][k] and is weighted at home, in ascending k. Y is the output dtype, C the combine dtype
// (e4m3: block-128 scales travel inside the unit).
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its position 1, and to rank 1 (k = 1). Rank 0
// writes bf16(w0 * y0 + w3 * y3) to rank 2's home_lines[0][1]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in
// its `home` table.
//
// A partial whose rows were all dropped travels as +0. Memory order: none between lines. Reuse of a slot: a rank that
// has started num_in_flight combines more has, in stream order, read the slot.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "layout/ll128.cuh"
#include "ll/combine_recv.cuh"
#include "ll/combine_send.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// One thread of a block. When the last comes here, every warp has its counters (is_stopped): the next operation's are
// set at once.
__device__ __forceinline__ void advance(const CombineArgs& args, i32 num_blocks, i32 receivers, u64 seq, u64 start) {
  if (!arrive(args.world, {0, num_blocks}, TICKET_COMBINE_SEND)) return;
  args.world.state->taken[16] = 0;
  args.world.state->combine_seq = seq;
  args.world.state->combine_slot_seq[args.slot] = seq;
  note_sent(args.world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, receivers);
}

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ i32 verdict;
  __shared__ u64 start, number;  // of the operation; its record
  const World& world = args.world;
  u8** homes = reinterpret_cast<u8**>(after_waits(world, shared));  // [R] where partials of all owners lie
  u8* stages = shared + args.work.stage_offset + warp_idx() * 2 * args.work.piece_bytes + lane_idx() * kCopyBytes;
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  const i32 senders = sends ? receives ? static_cast<i32>(args.work.num_senders) : team.num_blocks : 0;
  const bool apart = senders < team.num_blocks, here = team.block < senders;
  const Team sending = {team.block, max(1, senders)};
  const Team receiving = apart ? Team{team.block - senders, team.num_blocks - senders} : team;
  const Divisor items = divisor_of(units_per_row(world)), sources = divisor_of(world.size);
  Queue queue = queue_of(sending, num_warps(), items, sources, world.state->taken + 16);
  load_active(world);
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) {
    waits_at(shared)[i] = 0;
    homes[i] = home_lines_at(args, i);
  }
  if (threadIdx.x == 0) verdict = kSame;
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  // All is asked for before anything is looked at (owed_rows does, last): what is computed from an answer, above, would
  // be waited for.
  const u64 stop = ptx::load_cached(&world.state->aborted), origin = ptx::load_cached(args.origin);
  const u64 last = ptx::load_cached(sends ? &world.state->combine_seq : args.op + kOpSeq);
  const u64 record = record_number(world, args.work.halves, args.op);
  Credit credit = {0, 0};
  Owed owed = {0, 0, 0};
  if (here) {
    credit = warp_ask_credit(world, FLAG_COMBINE_STARTED, &world.state->combine_slot_seq[args.slot]);
    owed = owed_rows(args);
  }
  const u64 seq = last + sends;
  if (threadIdx.x == THREADS - 1) {
    start = ptx::now_ns();
    number = record;
  }
  if (here) {
    Task task = {};
    const bool more = next_task(args, owed, queue, task);
    const bool first = team.block == 0 && warp_idx() == num_warps() - 1;
    if (first && stop == STOP_RUNNING) warp_tell_started(world, FLAG_COMBINE_STARTED, seq);
    if (stop == STOP_RUNNING)
      send_partials(args, homes, stages, owed, queue, task, more, seq, [&] {
        const u64 needed = credit_needed(world, credit, seq);
        if (!warp_await_credit(world, FLAG_COMBINE_STARTED, credit, needed, OP_COMBINE)) return false;
        if (first) tell_origin(args, origin, seq);
        return true;
      });
  }
  const bool reads = receives && (!apart || !here);
  if (is_stopped(stop, last, ~0ull)) return reads ? poison_units(args, receiving) : void();  // `number` is stored
  if (sends && threadIdx.x == THREADS - 1)
    advance(args, team.num_blocks, receives ? receiving.num_blocks : team.num_blocks, seq, start);
  if (reads) combine_receive(args, receiving, shared, &verdict, number, origin, seq);
}

}  // namespace ep::ll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS) ll_combine(const __grid_constant__ ep::CombineArgs args) {
  ep::ll::combine_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS)
    ll_combine(const ep::CombineArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::ll::combine_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
