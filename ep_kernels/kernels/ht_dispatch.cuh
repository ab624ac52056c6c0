// High-throughput dispatch: counts travel first, inside the same launch; then every row goes once to each rank that holds one
// of its experts, straight to its final place in that rank's output. No ring, no epilogue copy: only a row that several
// experts of one rank share is replicated there, from its first place, while others are still under way.
//
//   every rank                                        memory
//   route own tokens: numbers from 0, counts     -->  home (relative), block_counts: tagged pairs to the blocks after
//   last block: totals to all peers              -->  counts[source]: tagged pairs
//   every block reads all counts; final rows     -->  home
//   clerk warps: records                         ===> meta[source], RECORDS[source] += share
//   other warps: x[t] --quantise?--> one row per rank  -->  rows[final row] at the destination; scales
//                per expert: row by row          ===> arrivals[source][position] = seq
//   clerk warps, when RECORDS is whole: places, weights, tokens, ids; per expert: some warps copy rows that have arrived
//   every block: PAYLOAD[source] += share        ===> wait for all sources; scales
//
// With a previous handle there is no counting and no exchange: the source has every row's final place in it.
//
// Worked example: ranks 0 and 1 send 2 and 3 rows to rank 0 (FLAT). Both learn [2, 3], so rank 1 writes its rows to rank 0's
// rows 2, 3, 4 while rank 0 writes 0, 1; nobody asks anybody for a slot.
//
// Memory order: a warp's stores -> their completion -> warp barrier -> (the block's last warp to end:) one release at system scope
// per peer (RECORDS, PAYLOAD; arrivals: per row); the receiver acquires the flag, then reads; the copy engine's accesses stand behind
// a proxy fence on either side. A peer's counts of this op also prove that it has started the op, so its output slot is free
// (credit); before the counts themselves are written, the slot's credit is awaited.
#pragma once

constexpr i32 kCopiers = kPerExpert ? 2 : 0;  // warps that look after arrivals while others send; the clerk joins them

struct Halves {
  bool sends, receives;
};

__device__ __forceinline__ bool is_clerk() { return warp_idx() == num_warps() - 1; }

// Whether this warp sends rows from the start.
__device__ __forceinline__ bool is_sender(Halves halves) {
  return halves.sends && warp_idx() < num_warps() - 1 - (halves.receives ? kCopiers : 0);
}

enum Outcome { FAILED, DIFFERS, READY };

// Everybody's counts, and what follows from them. All threads; ends with a block barrier.
__device__ __forceinline__ Outcome ht_learn(const DispatchArgs& args, HtScratch& scratch, u64 seq) {
  bool differs = false;
  const bool ok = read_counts(args, scratch.first, scratch.all, scratch.rows, seq, &differs);
  if (__syncthreads_or(!ok) != 0) return FAILED;
  if (__syncthreads_or(differs) != 0) return DIFFERS;
  lay_out_rows(args, scratch);
  return READY;
}

// Routes this block's tokens and tells, and learns, counts. All threads; ends with a block barrier.
__device__ __forceinline__ Outcome ht_route(const DispatchArgs& args, Team team, HtScratch& scratch, u64 seq) {
  const World& world = args.world;
  const Range tokens = block_tokens(args, team.block, team.num_blocks);
  route_rows(args, scratch, tokens);
  tell_blocks(world, team, scratch.counters, seq);
  if (__syncthreads_or(!sum_blocks_before(world, team, scratch.first, seq)) != 0) return FAILED;
  for (i32 i = first_told(world) + threadIdx.x; i < num_counters(world); i += blockDim.x) {
    scratch.all[i] = scratch.first[i] + scratch.counters[i];
    scratch.counters[i] = scratch.first[i];
  }
  __syncthreads();
  if (team.block == team.num_blocks - 1) {
    tell_ranks(args, scratch.all, scratch.origin, seq);
    __syncthreads();
  }
  const Outcome outcome = ht_learn(args, scratch, seq);
  if (outcome != READY) return outcome;
  settle_rows(args, scratch, tokens);
  if (threadIdx.x == 0) ptx::add_release_gpu(&world.state->settled, 1);
  return READY;
}

// With a previous handle: all rows are placed already. Rows go to their final places, so a peer must be in this very
// operation, not only past the slot's last use: one that has gone on without this rank never is. All threads.
__device__ __forceinline__ Outcome ht_route_again(const DispatchArgs& args, Team team, HtScratch& scratch, u64 seq) {
  bool credit = true;
  if (warp_idx() == 0) credit = warp_await_peers(args.world, FLAG_STARTED, seq, OP_DISPATCH, PHASE_CREDIT);
  if (__syncthreads_or(!credit) != 0) return FAILED;
  if (team.block == team.num_blocks - 1) tell_ranks(args, nullptr, scratch.origin, seq);
  __syncthreads();
  return READY;
}

// A warp has sent what it had to; the last of the block's adds the block's shares, the last of the rank's moves the counters on.
__device__ __forceinline__ void end_send(const DispatchArgs& args, Team team, const HtScratch& scratch, u32 warps, u64 seq, u64 start,
                                         u64 num_ops, bool sent) {
  const World& world = args.world;
  u32 ended = 0;
  __syncwarp();
  if (lane_idx() == 0) ended = ptx::add_acq_rel_block(scratch.warps_sent, sent ? 1 : 1 + kBroken) + (sent ? 1 : 1 + kBroken);
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

// What each warp does once this block knows where its rows go: the clerk tells records, then works up those that come in; others
// send, and in per-expert layouts the rest looks after arrivals, in the end all do. Each part stands here once: code that is not
// in a cache comes slowly.
__device__ __forceinline__ void ht_work(const DispatchArgs& args, Team team, const HtScratch& scratch, Sender& sender, Halves halves,
                                        u64 seq, u64 start, Outcome outcome) {
  const World& world = args.world;
  const bool clerk = halves.sends && is_clerk(), shares = clerk || is_sender(halves);
  const u64 num_ops = halves.sends ? seq - ptx::load_volatile(&world.state->dispatch_shared) : 0;
  if (clerk && outcome == READY) tell_records(args, block_tokens(args, team.block, team.num_blocks));
  if (clerk && outcome != FAILED) warp_add_share(world, team, FLAG_RECORDS, num_ops);
  bool here = halves.receives && outcome == READY;
  if (here && !is_sender(halves)) {
    here = await_records(args, scratch.origin, seq);
    const i32 mine = halves.sends ? 0 : warp_idx(), recorders = halves.sends ? 1 : num_warps();
    if (here && (clerk || !halves.sends)) record_rows(args, scratch, team.block + team.num_blocks * mine, team.num_blocks * recorders);
  }
  bool sent = outcome != FAILED;
  if (outcome != READY) drop_unit(sender);
  else if (is_sender(halves) || (clerk && !(kPerExpert && halves.receives))) sent = send_rows(args, team, scratch, sender, seq);
  if (shares) end_send(args, team, scratch, num_warps() - (halves.receives ? kCopiers : 0), seq, start, num_ops, sent);
  if constexpr (kPerExpert) {
    if (here && is_sender(halves)) here = await_records(args, scratch.origin, seq);
    if (here) here = look_after_rows(args, team, scratch, sender, seq);
  }
  if (halves.receives && !here) *scratch.lacking = 1;
}

__device__ __forceinline__ void ht_receive(const DispatchArgs& args, Team team, const HtScratch& scratch, u8* shared, u64 number,
                                           u64 seq, Outcome outcome) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  if (team.block == 0 && outcome == READY && !args.cached) write_counts(args, scratch);
  const bool arrived =
      await_peers(world, FLAG_PAYLOAD, seq * kWhole, OP_DISPATCH, PHASE_PAYLOAD, start, waits_at(shared));
  const bool differs = outcome == DIFFERS || (arrived && origin_differs(world, origins_at(args), scratch.origin));
  const bool any_differs = __syncthreads_or(differs) != 0;
  if (arrived && !any_differs && outcome == READY && *scratch.lacking == 0) {
    if (team.block == 0 && args.cached) write_kept_counts(args);
    if (!kPerExpert && args.out_scales != nullptr && !scales_land(args)) place_all_scales(args, team, scratch);
  } else {
    deliver_nothing(args, team, scratch, arrived && any_differs);
  }
  note_end(world, team, number, waits_at(shared));
}

__device__ __forceinline__ void ht_dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  const Halves halves = {(args.work.halves & kSend) != 0, (args.work.halves & kReceive) != 0};
  HtScratch scratch = carve_ht(world, shared);
  Sender sender = {open_pipe(args.work, shared), 0, -1, pieces_per_row(args), false};
  const u64 stop = ptx::load_volatile(&world.state->aborted);
  const u64 seq = halves.sends ? ptx::load_volatile(&world.state->dispatch_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  load_active(world);
  for (i32 i = threadIdx.x; i < num_counters(world); i += blockDim.x) scratch.counters[i] = 0;
  if (threadIdx.x == 0) *scratch.next_unit = *scratch.next_arrival = *scratch.warps_sent = *scratch.lacking = 0;
  // One answer for the block: another block may stop the rank just now, and barriers want all threads.
  if (__syncthreads_or(stop != STOP_RUNNING) != 0) return deliver_nothing(args, team, scratch, false);
  const u64 number = record_number(world, args.work.halves, args.op), start = ptx::now_ns();
  scratch.origin = origin_of(args, seq);
  Outcome outcome = READY;
  if (args.cached && warp_idx() == 1)
    scratch.row_start[world.size] = prefix_sum(world.size, scratch.row_start, [&](i32 s) { return args.source_rows[s]; });
  if (halves.sends) {
    if (team.block == 0 && is_clerk()) warp_tell_started(world, FLAG_STARTED, seq);
    if (is_sender(halves)) load_first_unit(args, team, scratch, sender);
    outcome = args.cached ? ht_route_again(args, team, scratch, seq) : ht_route(args, team, scratch, seq);
  } else if (!args.cached) {
    outcome = ht_learn(args, scratch, seq);
  }
  __syncthreads();
  ht_work(args, team, scratch, sender, halves, seq, start, outcome);
  __syncthreads();
  if (halves.receives) ht_receive(args, team, scratch, shared, number, seq, outcome);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_dispatch(const __grid_constant__ DispatchArgs args) {
  ht_dispatch_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_dispatch(const DispatchArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  ht_dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
