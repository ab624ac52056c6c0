// High-throughput dispatch: counts travel first, inside the same launch; then every row goes once to each rank that
// holds one of its experts, straight to its final place in that rank's output. No ring, no epilogue copy: only a row
// that several experts of one rank share is replicated there, from its first place, while others are still under way.
//
//   every rank                                        memory
//   route own tokens: numbers from 0, counts     -->  block_counts: tagged pairs to the blocks after
//   last block: totals to all peers              -->  counts[source]: tagged pairs
//   every block reads all counts; final rows     -->  home
//   clerk warps: records                         ===> meta[source], RECORDS[source] += share
//   other warps: x[t] --quantise?--> one row per rank  -->  rows[final row] at the destination; scales
//                per expert: row by row          ===> arrivals[source][position] = seq
//   clerk warps, when RECORDS is whole: places, weights, tokens, ids
//   per expert: some warps copy rows that have arrived
//   every block: PAYLOAD[source] += share        ===> wait for all sources; scales
//
// With a previous handle there is no counting and no exchange: the source has every row's final place in it.
//
// Worked example: ranks 0 and 1 send 2 and 3 rows to rank 0 (FLAT). Both learn [2, 3], so rank 1 writes its rows to
// rank 0's rows 2, 3, 4 while rank 0 writes 0, 1; nobody asks anybody for a slot.
//
// Memory order: a warp's stores -> their completion -> warp barrier -> (the block's last warp to end:) one release at
// system scope per peer (RECORDS, PAYLOAD; arrivals: per row); the receiver acquires the flag, then reads; the copy
// engine's accesses stand behind a proxy fence on either side. A peer's counts of this op also prove that it has
// started the op, so its output slot is free (credit); before the counts themselves are written, the slot's credit is
// awaited.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "ht/dispatch_metadata.cuh"
#include "ht/dispatch_recv.cuh"
#include "ht/dispatch_send.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ht_counts.cuh"
#include "routing/ht_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

constexpr i32 kCopiers = kPerExpert ? 2 : 0;  // warps that look after arrivals while others send; the clerk joins them

struct Halves {
  bool sends, receives;
};

// Warps that send rows from the start, the block's first.
__device__ __forceinline__ i32 num_senders(Halves halves) { return num_warps() - 1 - (halves.receives ? kCopiers : 0); }
__device__ __forceinline__ bool is_sender(Halves halves) { return halves.sends && warp_idx() < num_senders(halves); }

enum Outcome { FAILED, DIFFERS, READY };

// Everybody's counts, and what follows from them. The crew.
__device__ __forceinline__ Outcome ht_learn(const DispatchArgs& args, HtScratch& scratch, u64 seq) {
  bool differs = false;
  const bool ok = read_counts(args, scratch.first, scratch.all, scratch.rows, seq, &differs);
  if (crew_any(!ok)) return FAILED;
  if (crew_any(differs)) return DIFFERS;
  lay_out_rows(args, scratch);
  return READY;
}

// Tells, and learns, counts: `first` = rows of this block. The crew.
__device__ __forceinline__ Outcome ht_exchange(const DispatchArgs& args, Team team, HtScratch& scratch, Credit credit,
                                               u64 seq) {
  const World& world = args.world;
  tell_blocks(world, team, scratch.first, seq);
  if (crew_any(!sum_blocks_before(world, team, scratch.before, seq))) return FAILED;
  if (team.block == team.num_blocks - 1) {
    for (i32 i = first_told(world) + crew_thread(); i < num_counters(world); i += crew_warps() * 32)
      scratch.all[i] = scratch.before[i] + scratch.first[i];
    crew_sync();
    tell_ranks(args, credit, scratch.all, scratch.origin, seq);
  }
  crew_sync();
  return ht_learn(args, scratch, seq);
}

// With a previous handle: all rows are placed already. Rows go to their final places, so a peer must be in this very
// operation, not only past the slot's last use: one that goes on without this rank takes that back (barrier.cuh). All
// warps; the clerk knows.
__device__ __forceinline__ Outcome ht_route_again(const DispatchArgs& args, Team team, HtScratch& scratch,
                                                  Credit credit, u64 seq) {
  if (team.block == team.num_blocks - 1 && in_crew()) tell_ranks(args, credit, nullptr, scratch.origin, seq);
  const bool started = !is_clerk() || warp_await_peers(args.world, FLAG_STARTED, seq, OP_DISPATCH, PHASE_CREDIT);
  return started ? READY : FAILED;
}

// A warp has sent what it had to; the last of the block's adds the block's shares, the last of the rank's moves the
// counters on.
__device__ __forceinline__ void end_send(const DispatchArgs& args, Team team, const HtScratch& scratch, u32 warps,
                                         u64 seq, u64 start, u64 num_ops, bool sent) {
  const World& world = args.world;
  u32 ended = 0;
  __syncwarp();
  if (lane_idx() == 0)
    ended = ptx::add_acq_rel_block(scratch.warps_sent, sent ? 1 : 1 + kBroken) + (sent ? 1 : 1 + kBroken);
  ended = __shfl_sync(~0u, ended, 0);
  if (ended % kBroken != warps) return;
  __syncwarp();
  if (ended == warps) warp_add_share(world, team, FLAG_PAYLOAD, num_ops);
  if (lane_idx() != 0 || !arrive(world, team, TICKET_DISPATCH_SEND)) return;
  note_sent(world, OP_DISPATCH, 1, args.num_tokens, seq, start, args.op, team.num_blocks);
  State* state = world.state;
  state->dispatch_seq = state->dispatch_shared = seq;
  state->dispatch_slot_seq[args.slot] = seq;
  state->pool = state->settled = 0;
  *args.num_invalid_ids = static_cast<i32>(state->invalid_ids);
  state->invalid_ids = 0;
}

// What each warp does once this block knows where its rows go: the clerk tells records, works up those that come in,
// and sends; others send first and then help with the records, or in per-expert layouts with the arrivals, which the
// rest looks after. Each part stands here once: code that is not in a cache comes slowly.
__device__ __forceinline__ void ht_work(const DispatchArgs& args, Team team, const HtScratch& scratch, Sender& sender,
                                        Halves halves, u64 seq, u64 num_ops, u64 start, Outcome outcome) {
  const World& world = args.world;
  const bool clerk = halves.sends && is_clerk(), shares = clerk || is_sender(halves);
  if (clerk && outcome == READY) tell_records(args, sender.mine);
  if (clerk && outcome != FAILED) warp_add_share(world, team, FLAG_RECORDS, num_ops);
  bool here = halves.receives && outcome == READY, sent = outcome != FAILED;
#pragma unroll 1
  for (i32 turn = 0; turn < 2; ++turn) {
    if (turn == is_sender(halves)) {
      if (here) here = await_records(args, scratch.origin, seq);
      if (here && (!kPerExpert || clerk || !halves.sends)) record_rows(args, team, scratch);
    } else {
      if (outcome != READY) drop_unit(sender);
      else if (is_sender(halves) || (clerk && !(kPerExpert && halves.receives)))
        sent = send_rows(args, team, scratch, sender, seq);
      if (shares)
        end_send(args, team, scratch, num_warps() - (halves.receives ? kCopiers : 0), seq, start, num_ops, sent);
    }
  }
  if constexpr (kPerExpert) {
    if (here) here = look_after_rows(args, team, scratch, sender, seq);
  }
  if (halves.receives && !here) *scratch.lacking = 1;
}

__device__ __forceinline__ void ht_receive(const DispatchArgs& args, Team team, const HtScratch& scratch, u8* shared,
                                           u64 number, u64 seq, Outcome outcome) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  if (team.block == 0 && outcome == READY && !args.cached) write_counts(args, scratch);
  const bool arrived =
      await_peers(world, FLAG_PAYLOAD, seq * kWhole, OP_DISPATCH, PHASE_PAYLOAD, start, waits_at(shared));
  if (arrived && outcome == READY && *scratch.lacking == 0) {  // whoever awaited the records looked at their origins
    if (team.block == 0 && args.cached) write_kept_counts(args);
    if (!kPerExpert && args.out_scales != nullptr && !scales_land(args)) place_all_scales(args, team, scratch);
  } else {
    const bool differs = outcome == DIFFERS || (arrived && origin_differs(world, origins_at(args), scratch.origin));
    deliver_nothing(args, team, scratch, __syncthreads_or(differs) != 0 && arrived);
  }
  note_end(world, team, number, waits_at(shared));
}

// Where the rows go, before the first one leaves. Meanwhile warps that have no part in counting make their first piece.
// All threads; ends with a block barrier.
__device__ __forceinline__ Outcome ht_route(const DispatchArgs& args, Team team, HtScratch& scratch, Sender& sender,
                                            Halves halves, Credit credit, Ids ids, u64 seq) {
  const Range last = last_tile(args.world, sender.mine);
  Outcome outcome = READY;
  if (halves.sends && team.block == 0 && is_clerk()) warp_tell_started(args.world, FLAG_STARTED, seq);
  if (args.cached) {
    if (halves.sends) outcome = ht_route_again(args, team, scratch, credit, seq);
  } else {
    if (halves.sends) route_rows(args, scratch, sender.mine, last, ids, sender.topk);
    if (in_crew())
      outcome = halves.sends ? ht_exchange(args, team, scratch, credit, seq) : ht_learn(args, scratch, seq);
  }
  if (kQuantises && !kPerExpert && sender.unit >= 0) make_unit(args, sender);
  if (__syncthreads_or(outcome == FAILED) != 0) return FAILED;
  if (__syncthreads_or(outcome == DIFFERS) != 0) return DIFFERS;
  if (!halves.sends || args.cached) return READY;
  settle_rows(args, scratch, sender.mine, last, sender.topk);
  if (is_clerk() && lane_idx() == 0) ptx::add_release_gpu(&args.world.state->settled, 1);
  return READY;
}

__device__ __forceinline__ void ht_dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  const Halves halves = {(args.work.halves & kSend) != 0, (args.work.halves & kReceive) != 0};
  const Split split = split_tokens(args.num_tokens, team.num_blocks);
  const Range mine = split.of(team.block);
  // All is asked for before anything is looked at; words of the state through L1, for a thousand warps queue at one
  // line of L2.
  const u64 stop = ptx::load_cached(&world.state->aborted);
  const u64 last = ptx::load_cached(halves.sends ? &world.state->dispatch_seq : args.op + kOpSeq);
  const u64 shared_last = ptx::load_cached(&world.state->dispatch_shared);
  const u64 number = record_number(world, args.work.halves, args.op);
  const bool routes = halves.sends && !args.cached;
  const Ids ids =
      routes ? ask_ids(args, mine.first, min(tile_tokens(world), mine.past - mine.first), threadIdx.x) : Ids{};
  const u8 active = ask_active(world);
  const i32 room = threadIdx.x < static_cast<u32>(world.size) ? world.capacities[threadIdx.x] : 0;
  Credit credit = {0, 0};
  if (halves.sends && team.block == team.num_blocks - 1 && in_crew())
    credit = warp_ask_credit(world, FLAG_STARTED, &world.state->dispatch_slot_seq[args.slot]);
  HtScratch scratch = carve_ht(world, shared);
  Sender sender = {open_pipe(args.work, shared), 0, -1, mine, divisor_of(pieces_per_row(args)), divisor_of(world.topk),
                   split, divisor_of(team.num_blocks), false, false};
  if (is_sender(halves)) load_first_unit(args, sender, warp_idx());
  clear_tile(world, scratch);
  for (i32 i = threadIdx.x; i < num_counters(world); i += blockDim.x) scratch.counters[i] = 0;
  if (threadIdx.x == 0) {
    *scratch.next_unit = num_senders(halves);
    *scratch.next_arrival = *scratch.next_record = *scratch.warps_sent = *scratch.lacking = 0;
  }
  if (routes) fill_table(world, scratch.table);
  if (threadIdx.x < static_cast<u32>(world.size)) scratch.room[threadIdx.x] = room;
  keep_active(world, active);
  // One answer for the block: another block may stop the rank just now, and barriers want all threads.
  if (is_stopped(stop, last & shared_last, number)) {
    drop_unit(sender);
    return deliver_nothing(args, team, scratch, false);
  }
  const u64 seq = last + halves.sends, start = ptx::now_ns();
  scratch.origin = origin_of(args, seq);
  if (args.cached && warp_idx() == 1)
    scratch.row_start[world.size] =
        prefix_sum(world.size, scratch.row_start, [&](i32 s) { return args.source_rows[s]; });
  const Outcome outcome = ht_route(args, team, scratch, sender, halves, credit, ids, seq);
  ht_work(args, team, scratch, sender, halves, seq, seq - shared_last, start, outcome);
  __syncthreads();
  if (halves.receives) ht_receive(args, team, scratch, shared, number, seq, outcome);
}

}  // namespace ep::ht

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_dispatch(const __grid_constant__ ep::DispatchArgs args) {
  ep::ht::ht_dispatch_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ht_dispatch(const ep::DispatchArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::ht::ht_dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
