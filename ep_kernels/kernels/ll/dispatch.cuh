// Low-latency dispatch: each token's row goes once to every rank that holds one of its experts, as lines that carry the
// operation's seq (layout/ll128.cuh). The receiver polls the lines themselves and puts each vector where it finally
// belongs, so rows are expanded per expert while the rest is still under way.
//
//   source rank: send blocks                            destination rank: receive blocks
//   last block: origin, rows, rows per expert -------->  heads, count_lines[source] -> where all rows go
//   per token, rank: experts, indices, weights ------->  meta_lines[source][position]
//   per token, rank: x[t] --quantise?--> units ------->  lines[source][position] -> rows (one per expert, or per rank)
//
// Routing is in routing/ll_scan.cuh. With a previous handle the keys come from it (Home); the rest follows from them
// again.
//
// Worked example: R = 2, K = 2, rank 1 sends token 0 to experts (rank 0, slot 1) and (rank 0, slot 0): one row lands in
// rank 0's lines[1][0] with the records {1, index}, {0, index}; rank 0 writes each of its vectors to both experts'
// groups.
//
// Memory order: none between lines; what a line says is complete in itself. Reuse of a slot: the peer's STARTED flag is
// in stream order after its last read of the slot (warp_await_credit). The link is first in, first out: what others
// wait for (counts, then records) leaves before rows fill it.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "layout/ll128.cuh"
#include "ll/dispatch_recv.cuh"
#include "ll/dispatch_send.cuh"
#include "routing/experts.cuh"
#include "routing/ll_counts.cuh"
#include "routing/ll_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// One thread of a block. When the last comes here, every warp has its counters (is_stopped): the next operation's are
// set at once.
__device__ __forceinline__ void advance(const DispatchArgs& args, i32 num_blocks, i32 receivers, u64 seq, u64 start) {
  if (!arrive(args.world, {0, num_blocks}, TICKET_DISPATCH_SEND)) return;
  args.world.state->taken[0] = 0;
  args.world.state->dispatch_seq = seq;
  args.world.state->dispatch_slot_seq[args.slot] = seq;
  note_sent(args.world, OP_DISPATCH, 0, args.num_tokens, seq, start, args.op, receivers);
}

// Who does what. The first `num_senders` blocks send rows, but the last of them tells and keeps the counts; the others
// send records, whose loads would queue behind rows, and receive. A rank of one block does all.
__device__ __forceinline__ void ll_dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ i32 verdict;     // what await_counts found
  __shared__ u64 heads_here;  // mbarrier
  __shared__ bool twice;
  __shared__ Told told;
  const World& world = args.world;
  __shared__ const u8* here_at[2];
  LlScratch scratch = carve_ll(world, shared, &twice, here_at);
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  const i32 senders = sends ? receives ? static_cast<i32>(args.work.num_senders) : team.num_blocks : 0;
  const bool apart = senders < team.num_blocks, here = team.block < senders, tells = here && team.block == senders - 1;
  const Team rows = {team.block, max(1, senders - 1)};
  const Team arrivals = apart ? Team{max(0, team.block - senders), team.num_blocks - senders} : team;
  const bool carries = here && rows.block < rows.num_blocks;
  const bool keeps = receives && (apart && sends ? tells : team.block == team.num_blocks - 1);
  const Team records = apart ? arrivals : rows;
  const bool notes = sends && (apart ? !here : carries) && records.block < args.num_tokens * world.size;
  const Divisor units = divisor_of(world.row_units), arriving = divisor_of(world.row_units + 1);
  const Divisor sources = divisor_of(world.size), topk = divisor_of(world.topk), one = divisor_of(1);
  const bool wants = kPerExpert && notes && !args.cached && scratch.seen != nullptr, routes = tells || carries || notes;
  load_active(world);
  fill_table(world, scratch.table);
  if (warp_idx() == num_warps() - 1) {  // each by a warp of its own: a late block's start is waited for
    for (i32 i = lane_idx(); i < world.size; i += 32)
      scratch.lines_to[i] = lines_at(args, rank_of_hop(world, i), world.rank);
  } else if (warp_idx() == num_warps() - 2) {
    for (i32 i = lane_idx(); i < world.size; i += 32)
      scratch.records_to[i] = meta_lines_at(args, rank_of_hop(world, i), world.rank);
  } else if (warp_idx() == num_warps() - 3) {
    for (i32 i = lane_idx(); i < world.size; i += 32) waits_at(shared)[i] = 0;
    for (i32 i = lane_idx(); i < MAX_RANKS; i += 32) told.rows[i] = 0;
  } else if (threadIdx.x == 0) {
    scratch.here[0] = lines_at(args, world.rank, 0);
    scratch.here[1] = meta_lines_at(args, world.rank, 0);
    verdict = told.invalid = 0;
    twice = false;
    ptx::barrier_init(&heads_here);
  }
  for (i32 i = threadIdx.x; kPerExpert && tells && i < num_keys(world); i += THREADS) scratch.before[i] = 0;
  for (i32 i = threadIdx.x; routes && i < aligned(max(args.num_tokens, 1), 32); i += THREADS) scratch.masks[i] = 0;
  for (i32 i = threadIdx.x; wants && i < num_keys(world) * chunks_of(world); i += THREADS) scratch.seen[i] = 0;
  Queue queue = queue_of(rows, num_carriers(world), units, one, world.state->taken);
  const Turn none = {world.ll_tokens, 0, 0};
  const Turn arrival = apart && here ? none : turn_of(first_item(arrivals), arriving, sources);
  const Turn arrival_step = turn_of(num_items_at_once(arrivals), arriving, sources);
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  // All is asked for before anything is looked at; what is computed from an answer, above, would be waited for.
  const u64 stop = ptx::load_cached(&world.state->aborted);
  const u64 last = ptx::load_cached(sends ? &world.state->dispatch_seq : args.op + kOpSeq);
  Credit credit = {0, 0};
  if (here || notes) credit = warp_ask_credit(world, FLAG_STARTED, &world.state->dispatch_slot_seq[args.slot]);
  Ids ids = {};
  if (routes) ids = ask_ids(args);
  Entry entry = {};
  if (notes) entry = load_entry(args, divide(first_item(records), sources));
  const u64 number = record_number(world, args.work.halves, args.op);
  Loaded unit = {};
  const bool moves = carries && warp_idx() < num_carriers(world);
  if (moves && queue.turn.position < args.num_tokens) unit = load_unit<X>(args, queue.turn.position, queue.turn.index);
  const u64 start = threadIdx.x == THREADS - 1 ? ptx::now_ns() : 0, seq = last + sends, origin = origin_of(args, seq);
  // Before anything of this operation waits for peers.
  if (tells && stop == STOP_RUNNING && warp_idx() == num_warps() - 2)
    warp_tell_started(world, FLAG_STARTED, seq);
  bool granted = false;
  if (here || notes) {
    const u64 needed = free_from(world, credit.last, seq);
    granted = stop == STOP_RUNNING && warp_await_credit(world, FLAG_STARTED, credit, needed, OP_DISPATCH);
  }
  if (routes)
    for_entries(args, scratch, ids, topk, [&](i32 token, i32 key) {
      const bool fresh = key >= 0 && !note_rank(world, scratch, token, key);
      if (wants && key >= 0) note_want(world, scratch, token, key);
      if (tells) count_entry(world, scratch, told, key, fresh);
    });
  if (is_stopped(stop, last, number)) return keeps ? write_no_counts(args) : void();
  if (tells && threadIdx.x == 0) *args.num_invalid_ids = told.invalid;
  if (tells && warp_idx() == 0 && granted)
    tell_heads(args, told.rows[lane_idx()], told.rows[lane_idx() + 32], origin, seq);
  if (tells && kPerExpert && granted) tell_counts(args, scratch, seq);
  if (notes && first_item(records) < args.num_tokens * world.size && granted)
    send_all_records(args, records, scratch, entry, sources, seq);
  if (moves && granted) send_rows(args, scratch, queue, unit, seq);
  if (here) __syncthreads();
  if (sends && threadIdx.x == THREADS - 1)
    advance(args, team.num_blocks, receives ? arrivals.num_blocks + (apart ? 1 : 0) : team.num_blocks, seq, start);
  const Team receiving = here && apart ? Team{arrivals.num_blocks, arrivals.num_blocks + 1} : arrivals;
  if (receives && (!apart || !here || keeps))
    ll_receive(args, receiving, scratch, shared, &verdict, &heads_here, arrival, arrival_step, keeps, number, origin,
               seq);
}

}  // namespace ep::ll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS) ll_dispatch(const __grid_constant__ ep::DispatchArgs args) {
  ep::ll::ll_dispatch_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS)
    ll_dispatch(const ep::DispatchArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::ll::ll_dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
