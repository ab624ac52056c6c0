// High-throughput dispatch: counts are exchanged first, inside the same launch; then every row goes once to each rank
// that holds one of its experts, straight to its final row in that rank's output. No ring, no epilogue copy: only a
// row that several experts of one rank share is replicated there, from its first final row, while others are in flight.
//
//   every rank                                        memory
//   routing scan of own tokens: indices from 0, counts  -->  block_counts: flagged pairs to the blocks after
//   last block: totals to all peers                     -->  counts[source]: flagged pairs
//   every block reads all counts; final rows            -->  args.routes, the routing table
//   metadata warps: token metadata                      ===> metadata[source], METADATA[source] += part of a total
//   send warps: x[t] --quantise?--> one row per rank    -->  rows[final row] at the destination; scales
//                per expert: row by row                 ===> arrivals[source][position] = seq
//   metadata warps, when METADATA is complete: final rows, weights, tokens, ids
//   per expert: copy warps replicate rows that have arrived
//   every block: PAYLOAD[source] += part of a total     ===> wait for all sources; scales
//
// METADATA and PAYLOAD are normalized arrival counters: an operation adds kArrivalTotal, whatever the number of blocks.
// A cached routing (previous handle) has every final row: nothing is counted, no counts are exchanged.
//
// Worked example: ranks 0 and 1 send 2 and 3 rows to rank 0 (FLAT). Both receive the counts [2, 3], so rank 1 writes
// its rows to rank 0's rows 2, 3, 4 while rank 0 writes 0, 1; no rank requests a slot.
//
// Memory order: a warp's stores -> their completion -> warp barrier -> (the last warp of the block to finish:) one
// release at system scope per peer (METADATA, PAYLOAD; arrivals: per row); the receiver acquires the flag, then reads;
// a proxy fence on either side precedes the copy engine's accesses. A peer's counts of this op also prove that it has
// started the op, so its output slot is free (credit); before the counts themselves are written, the slot's credit is
// awaited.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/status.cuh"
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

// Warps that only replicate arrived rows while others send; the metadata warp joins them.
constexpr i32 kNumCopyWarps = kPerExpert ? 2 : 0;

struct Phases {
  bool sends, receives;
};

// Send warps: the first of the block.
__device__ __forceinline__ i32 num_send_warps(Phases phases) {
  return num_warps() - 1 - (phases.receives ? kNumCopyWarps : 0);
}
__device__ __forceinline__ bool is_send_warp(Phases phases) {
  return phases.sends && warp_idx() < num_send_warps(phases);
}

// Receives the counts of all sources and derives all offsets from them. Count warps.
__device__ __forceinline__ Status receive_offsets(const DispatchArgs& args, DispatchScratch& scratch, u64 seq) {
  bool differs = false;
  const bool ok = receive_counts(args, scratch.dst_offset, scratch.all_sources, scratch.source_rows, seq, &differs);
  if (any_count_thread(!ok)) return kFailed;
  if (any_count_thread(differs)) return kRoutingMismatch;
  finalize_offsets(args, scratch);
  return kOk;
}

// The count exchange; dst_offset = rows of this block. Count warps.
__device__ __forceinline__ Status exchange_counts(const DispatchArgs& args, Team team, DispatchScratch& scratch,
                                                  Credit credit, u64 seq) {
  const World& world = args.world;
  send_block_counts(world, team, scratch.dst_offset, seq);
  if (any_count_thread(!sum_block_prefix(world, team, scratch.block_prefix, seq))) return kFailed;
  if (team.block == team.num_blocks - 1) {
    for (i32 i = first_counter(world) + count_thread_idx(); i < num_counters(world); i += num_count_warps() * 32)
      scratch.all_sources[i] = scratch.block_prefix[i] + scratch.dst_offset[i];
    sync_count_warps();
    send_counts(args, credit, scratch.all_sources, scratch.routing_id, seq);
  }
  sync_count_warps();
  return receive_offsets(args, scratch, seq);
}

// A cached routing: every final row is known. A peer must be in this very operation, not only past the slot's last use,
// because rows are written where they finally lie; a rank that continues without this one revokes that (barrier.cuh).
// All warps; only the metadata warp's status counts.
__device__ __forceinline__ Status reuse_routing(const DispatchArgs& args, Team team, DispatchScratch& scratch,
                                                Credit credit, u64 seq) {
  if (team.block == team.num_blocks - 1 && is_count_warp()) send_counts(args, credit, nullptr, scratch.routing_id, seq);
  const bool started =
      !is_metadata_warp() || warp_await_peers(args.world, FLAG_STARTED, seq, OP_DISPATCH, PHASE_CREDIT);
  return started ? kOk : kFailed;
}

// A warp has sent all its rows. The last warp of the block adds the block's part to the arrival counters, the last
// block of the rank advances the sequence numbers.
__device__ __forceinline__ void finish_send(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                            u32 warps, u64 seq, u64 start, u64 num_ops, bool sent) {
  const World& world = args.world;
  u32 done = 0;
  __syncwarp();
  if (lane_idx() == 0)
    done = ptx::add_acq_rel_block(scratch.warps_done, sent ? 1 : 1 + kStoppedWarp) + (sent ? 1 : 1 + kStoppedWarp);
  done = __shfl_sync(~0u, done, 0);
  if (done % kStoppedWarp != warps) return;
  __syncwarp();
  if (done == warps) warp_add_arrival(world, team, FLAG_PAYLOAD, num_ops);
  if (lane_idx() != 0 || !arrive(world, team, DONE_DISPATCH_SEND)) return;
  note_sent(world, OP_DISPATCH, 1, args.num_tokens, seq, start, args.op, team.num_blocks);
  State* state = world.state;
  state->dispatch_seq = state->counted_dispatch_seq = seq;
  state->dispatch_slot_seq[args.slot] = seq;
  state->segments_taken = state->blocks_routed = 0;
  *args.num_invalid_ids = static_cast<i32>(state->invalid_ids);
  state->invalid_ids = 0;
}

// The work of each warp once this block has its routes. The metadata warp sends metadata, reads received metadata, then
// sends rows; send warps send first and then help with metadata, or in per-expert layouts replicate arrived rows, as
// the remaining warps do from the start. Two steps in a loop, so that each part is in the code once: code that is not
// in a cache is slow.
__device__ __forceinline__ void send_and_read(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                              Sender& sender, Phases phases, u64 seq, u64 num_ops, u64 start,
                                              Status status) {
  const World& world = args.world;
  const bool metadata = phases.sends && is_metadata_warp(), finishes = metadata || is_send_warp(phases);
  // Metadata first, which peers wait for.
  if (metadata && status == kOk) send_metadata(args, sender.mine);
  if (metadata && status != kFailed) warp_add_arrival(world, team, FLAG_METADATA, num_ops);
  bool ready = phases.receives && status == kOk, sent = status != kFailed;
#pragma unroll 1
  for (i32 step = 0; step < 2; ++step) {
    // What has arrived of metadata: send warps read it second, the others first.
    if (step == is_send_warp(phases)) {
      if (ready) ready = await_metadata(args, scratch.routing_id, seq);
      if (ready && (!kPerExpert || metadata || !phases.sends)) read_metadata(args, team, scratch);
    } else {
      if (status != kOk) drain_load(sender);
      else if (is_send_warp(phases) || (metadata && !(kPerExpert && phases.receives)))
        sent = send_rows(args, team, scratch, sender, seq);
      if (finishes)
        finish_send(args, team, scratch, num_warps() - (phases.receives ? kNumCopyWarps : 0), seq, start, num_ops,
                    sent);
    }
  }
  if constexpr (kPerExpert) {
    if (ready) ready = replicate_rows(args, team, scratch, sender, seq);
  }
  if (phases.receives && !ready) *scratch.incomplete = 1;
}

__device__ __forceinline__ void finish_receive(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                               u8* shared, u64 number, u64 seq, Status status) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.phases, number);
  if (team.block == 0 && status == kOk && !args.cached) write_counts(args, scratch);
  if (LAYOUT == FLAT && status == kOk)
    fill_entries(args, team, rows_delivered(args, scratch), world.filled_rows);
  const bool arrived =
      await_peers(world, FLAG_PAYLOAD, seq * kArrivalTotal, OP_DISPATCH, PHASE_PAYLOAD, start, waits_at(shared));
  if (arrived && status == kOk && *scratch.incomplete == 0) {  // await_metadata has compared the routing_ids
    if (team.block == 0 && args.cached) write_saved_counts(args);
    if (!kPerExpert && args.out_scales != nullptr && !scales_at_final_row(args)) copy_all_scales(args, team, scratch);
  } else {
    const bool differs =
        status == kRoutingMismatch || (arrived && routing_id_differs(world, routing_ids_at(args), scratch.routing_id));
    deliver_nothing(args, team, scratch, __syncthreads_or(differs) != 0 && arrived);
  }
  note_end(world, team, number, waits_at(shared));
}

// Final routes, before the first row leaves. Warps that do not count prepare their first segment meanwhile. All
// threads; ends with a block barrier.
__device__ __forceinline__ Status route_tokens(const DispatchArgs& args, Team team, DispatchScratch& scratch,
                                               Sender& sender, Phases phases, Credit credit, Ids ids, u64 seq) {
  const TokenRange last = last_tile(args.world, sender.mine);
  Status status = kOk;
  if (phases.sends && team.block == 0 && is_metadata_warp()) warp_send_started(args.world, FLAG_STARTED, seq);
  if (args.cached) {
    if (phases.sends) status = reuse_routing(args, team, scratch, credit, seq);
  } else {
    if (phases.sends) scan_tokens(args, scratch, sender.mine, last, ids, sender.topk);
    if (is_count_warp())
      status = phases.sends ? exchange_counts(args, team, scratch, credit, seq) : receive_offsets(args, scratch, seq);
  }
  if (kQuantises && !kPerExpert && sender.item >= 0) prepare_segment(args, sender);
  if (__syncthreads_or(status == kFailed) != 0) return kFailed;
  if (__syncthreads_or(status == kRoutingMismatch) != 0) return kRoutingMismatch;
  if (!phases.sends || args.cached) return kOk;
  finalize_routes(args, scratch, sender.mine, last, sender.topk);
  if (is_metadata_warp() && lane_idx() == 0) ptx::add_release_gpu(&args.world.state->blocks_routed, 1);
  return kOk;
}

__device__ __forceinline__ void dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  const Phases phases = {(args.work.phases & kSend) != 0, (args.work.phases & kReceive) != 0};
  const TokenSplit split = split_tokens(args.num_tokens, team.num_blocks);
  const TokenRange mine = split.of(team.block);
  // All loads are issued before any result is used; words of the state through L1, because a thousand warps would queue
  // at one line of L2.
  const u64 stop = ptx::load_cached(&world.state->aborted);
  const u64 last = ptx::load_cached(phases.sends ? &world.state->dispatch_seq : args.op + kOpSeq);
  const u64 shared_last = ptx::load_cached(&world.state->counted_dispatch_seq);
  const u64 number = record_number(world, args.work.phases, args.op);
  const bool routes = phases.sends && !args.cached;
  const Ids ids =
      routes ? prefetch_ids(args, mine.first, min(tile_tokens(world), mine.end - mine.first), threadIdx.x) : Ids{};
  const u8 active = prefetch_active(world);
  const i32 capacity = threadIdx.x < static_cast<u32>(world.size) ? world.capacities[threadIdx.x] : 0;
  Credit credit = {0, 0};
  if (phases.sends && team.block == team.num_blocks - 1 && is_count_warp())
    credit = warp_load_credit(world, FLAG_STARTED, &world.state->dispatch_slot_seq[args.slot]);
  DispatchScratch scratch = make_scratch(world, shared);
  Sender sender = {init_stages(args.work, shared), 0, -1, mine, divisor_of(segments_per_row(args)),
                   divisor_of(world.topk), split, divisor_of(team.num_blocks), false, false};
  if (is_send_warp(phases)) load_first_segment(args, sender, warp_idx());
  clear_tile(world, scratch);
  for (i32 i = threadIdx.x; i < num_counters(world); i += blockDim.x) scratch.tile_prefix[i] = 0;
  if (threadIdx.x == 0) {
    *scratch.next_segment = num_send_warps(phases);
    *scratch.next_arrival = *scratch.next_metadata = *scratch.warps_done = *scratch.incomplete = 0;
  }
  if (routes) fill_expert_table(world, scratch.table);
  if (threadIdx.x < static_cast<u32>(world.size)) scratch.capacities[threadIdx.x] = capacity;
  store_active(world, active);
  // One answer for the whole block: another block may stop the rank at this moment, and barriers need all threads.
  if (is_stopped(stop, last & shared_last, number)) {
    drain_load(sender);
    return deliver_nothing(args, team, scratch, false);
  }
  const u64 seq = last + phases.sends, start = ptx::now_ns();
  scratch.routing_id = routing_id_of(args, seq);
  if (args.cached && warp_idx() == 1)
    scratch.row_start[world.size] =
        prefix_sum(world.size, scratch.row_start, [&](i32 s) { return args.source_rows[s]; });
  const Status status = route_tokens(args, team, scratch, sender, phases, credit, ids, seq);
  send_and_read(args, team, scratch, sender, phases, seq, seq - shared_last, start, status);
  __syncthreads();
  if (phases.receives) finish_receive(args, team, scratch, shared, number, seq, status);
}

}  // namespace ep::ht

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_dispatch(const __grid_constant__ ep::DispatchArgs args) {
  ep::ht::dispatch_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ht_dispatch(const ep::DispatchArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::ht::dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
