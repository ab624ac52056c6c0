// High-throughput combine: each rank sums the rows that serve one (source, position) in fp32, in ascending k, rounds
// once and stores the partial at the source rank; the source rank sums the partials of a token in ascending rank, as
// they arrive.
//
//   expert rank                                             source rank
//   y[dst_rows[source][position][k]]  --bulk load--> rows
//     fp32, ascending k -> partials (or rows as they are)
//     partials  --bulk store----------------------------->    receive buffer [expert rank][position]
//   CHUNK positions complete: progress[expert rank][chunk] = seq  ==>  --bulk load--> recv
//                                                           z[t] = sum over ranks ascending, fp32 -> output dtype
//
// Both phases run side by side in every block, a role per warp (enum Role). Pipelines of stages in shared memory
// (ht/pipeline.cuh) connect the roles. Blocks take chunks, and batches of tokens, from work counters.
//
// KIND 0: rows per expert, combine weights them. 1: rows per rank, moved as they are. 2: exact: every routed row goes
// to receive buffer [token][k] and is weighted at the source rank, in ascending k. Y is the output dtype, C the combine
// dtype (e4m3: block-128 scales travel behind the columns). Copied rows of this rank itself are read where they lie,
// where one launch does both phases. A partial whose rows were all dropped travels as +0.
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its position 1, and to rank 1 (k = 1). Rank 0
// writes bf16(w0 * y0 + w3 * y3) to row [0][1] of rank 2's receive buffer and, with positions 0..3 complete, sets rank
// 2's progress[0][0]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in its routing table, awaits both chunks and
// adds the two rows.
//
// Memory order: a complete bulk store is ordered before what its thread does next: the release (block scope) of a
// counter in shared memory. The notify warp acquires the counter, and its fence (system scope) precedes the progress
// flags. The source rank acquires the flags; a proxy fence precedes its loads. Flags only grow: a higher seq implies a
// lower one, because its kernel came later on the expert rank's stream. Reuse of a slot: a rank that has started
// num_in_flight combines more has, in stream order, read the slot. The notify warp polls for that (credit) and arrives
// at an mbarrier; every thread that writes to peers waits there. Rows are loaded and reduced without credit. Each rank
// sends its routing_id before any row (FLAG_COMBINE): where they differ no rank waits for rows.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "ht/combine_block.cuh"
#include "ht/combine_send.cuh"
// After the send phase: static shared memory lies in the order of definitions.
#include "ht/combine_recv.cuh"
#include "ht/combine_reduce.cuh"
#include "ht/pipeline.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

__device__ __forceinline__ Pipelines init_pipelines(const CombineArgs& args, u8* shared, SegmentInfo* infos) {
  const Pipelines pipelines = make_pipelines(args.pipelines, shared, shared + args.work.stage_offset, infos);
  if (threadIdx.x == THREADS - 1) {  // of a warp that has nothing to load
    init_pipeline(pipelines.rows, 1, kReduces ? num_team_warps(args.pipelines) : 1);
    if constexpr (!kCopies) init_pipeline(pipelines.partials, kReduces ? num_team_warps(args.pipelines) : 1, 1);
    init_pipeline(pipelines.recv, 1, num_recv_reducers(args.pipelines));
    ptx::barrier_init(&credit_known);
    for (u32 i = 0; kReduces && i < kTickets; ++i) ptx::barrier_init(ticket_ready + i);
    ptx::barrier_init(&load_queue_full, 32);
    ptx::barrier_init(&load_queue_empty, 32);
    chunks_done = chunks_notified = 0;
    block_status = kOk;
    ptx::fence_barrier_init();
    ptx::fence_proxy_shared();
  }
  return pipelines;
}

struct LaunchState {
  u64 stop, routing_id, seq;
  Credit credit;  // of the notify warp
};

extern "C" {  // see common/block.cuh
__shared__ u64 record;  // number of this operation's latency record; in shared memory it costs the roles no register
}

// All loads are issued before any result is used. All threads; the words in shared memory are valid after the next
// block barrier.
__device__ __forceinline__ LaunchState load_state(const CombineArgs& args, i32* rows, u64* waited) {
  const World& world = args.world;
  const bool sends = args.work.phases & kSend;
  const i32 peer = threadIdx.x;
  LaunchState state = {};
  // Issue all loads.
  state.stop = ptx::load_volatile(&world.state->aborted);
  state.routing_id = ptx::load_volatile(args.routing_id);
  state.seq = sends ? ptx::load_volatile(&world.state->combine_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  const u64 number = record_number(world, args.work.phases, args.op);
  if (sends && role_of(warp_idx()) == Role::kNotify)
    state.credit = warp_load_credit(world, FLAG_COMBINE_STARTED, &world.state->combine_slot_seq[args.slot]);
  const i32 num_rows = sends && peer < world.size ? args.source_rows[peer] : 0;
  // Use them: words for the other threads of the block.
  load_active(world);
  if (peer == 0) record = number;
  if (peer < world.size) {
    waited[peer] = 0;
    rows[peer] = is_active(peer) ? num_rows : 0;
  }
  return state;
}

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  i32* rows = reinterpret_cast<i32*>(after_waits(world, shared));
  u64* waited = waits_at(shared);
  const bool sends = args.work.phases & kSend, receives = args.work.phases & kReceive;
  const i32 warp = warp_idx();
  ptx::wait_for_previous_launch();
  const LaunchState state = load_state(args, rows, waited);
  SegmentInfo* infos = reinterpret_cast<SegmentInfo*>(rows + (world.size + 3) / 4 * 4);
  const Pipelines pipelines = init_pipelines(args, shared, infos);
  const LoadQueue queue = {reinterpret_cast<LoadRequest*>(infos + kMaxStages), 0};
  if (is_stopped(state.stop, state.seq, ~0ull)) {  // z is known where this launch receives
    if (receives) fill_with_nan(args, team);
    return;
  }
  const u64 seq = state.seq, routing_id = state.routing_id;
  const u64 start = note_receive(world, team, args.work.phases, record);
  switch (role_of(warp)) {
    case Role::kLoadRows:
      if (sends) load_rows(args, team, rows, pipelines.rows);
      break;
    case Role::kSend:
      if (sends && lane_idx() == 0) send_segments(args, kCopies ? pipelines.rows : pipelines.partials);
      break;
    case Role::kNotify:
      if (sends) notify(args, team, publish_credit(args, team, state.credit, seq), seq, routing_id, start);
      break;
    case Role::kLoadRecv:
      if (receives) load_recv(args, team, pipelines.recv, queue, seq, routing_id, start, waited);
      break;
    default:  // roles of several warps; as cases of this switch they would compile to other code
      if (kCopies && role_of(warp) == Role::kIssueLoads) {
        if (receives) issue_loads(args, queue, pipelines.recv);
      } else if (warp < kFirstRecvReducer) {
        if constexpr (kConverts) {
          if (sends) convert_rows(args, pipelines.rows, pipelines.partials);
        } else if constexpr (!kCopies) {
          if (sends) reduce_rows(args, pipelines.rows, pipelines.partials);
        }
      } else if (receives && warp < kFirstRecvReducer + num_recv_reducers(args.pipelines)) {
        reduce_recv(args, pipelines.recv);
      }
  }
  if (!receives) return;
  __syncthreads();
  // After a failed wait it is unknown which tokens this block would have taken: it fills all of z.
  if (block_status != kOk) fill_with_nan(args, block_status == kFailed ? Team{0, 1} : team);
  if (block_status == kRoutingMismatch && team.block == 0)
    report_mismatch(world, OP_COMBINE, routing_ids_at(args), routing_id);
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
