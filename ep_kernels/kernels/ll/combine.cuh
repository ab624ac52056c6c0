// Low-latency combine: each expert rank sums the rows that serve one (source, position) in fp32, in ascending k, rounds
// once and sends the partial to the source rank as LL128 packets that carry the operation's seq as flag
// (layout/ll128.cuh). The source rank polls the packets of a token's partials and sums them in ascending rank as they
// arrive.
//
//   expert rank: send blocks                                    source rank: receive blocks
//   y[dst_rows[source][position][k]] * weight  ...
//     fp32, ascending k -> combine dtype -> packets -------->   combine_lines[expert rank][position]
//                                                               z[t] = sum over ranks ascending, fp32 -> output dtype
//
// KIND 0: rows per expert, weighted by combine. 1: rows per rank, moved unchanged. 2: exact: every routed row travels
// to combine_lines[token][k] and is weighted at the source, in ascending k. Y is the output dtype, C the combine dtype
// (e4m3: block-128 scales travel inside the packet).
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its position 1, and to rank 1 (k = 1). Rank 0
// writes bf16(w0 * y0 + w3 * y3) to rank 2's combine_lines[0][1]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in
// its routes.
//
// Exact, of a remote rank: rows lie in the box by token, then by k, without gaps (box_rows_of, layout/ll128.cuh).
//
// A partial whose rows were all dropped travels as +0. Memory order: none between lines. Reuse of a slot: a rank that
// has started the combine num_in_flight later has, in stream order, read the slot.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/push.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/status.cuh"
#include "common/trace.cuh"
#include "layout/ll128.cuh"
#include "ll/combine_recv.cuh"
#include "ll/combine_send.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// What a remote source gets of this rank beside slices: a lane for each. Every block has arrived.
__device__ __forceinline__ void push_combine(const CombineArgs& args, i32 source, u64 seq) {
  const World& world = args.world;
  const RegionMap& box = box_map(world);
  const u64 positions = min(args.source_rows[source], world.ll_tokens), slot = args.slot;
  const u64 weight_rows = args.row_weights != nullptr ? positions : 0;
  u32 before = 0;
  net::Run runs[] = {
      {box.routing_packets + slot * box.routing_packets_stride, COUNT_PACKET_BYTES},
      net::rest_of(world, net::kCombine, source, partials_of(args), num_partials(args, source), before),
      {box.weight_lines + slot * box.weight_lines_stride,
       weight_rows * lines_for(world.topk, kLineInts) * kLineBytes},
  };
  net::push_runs(world, source, FLAG_COMBINE, runs, before, seq, OP_COMBINE);
}

// End of the send phase of a block; its last thread, NETWORK: its last warp. When the last block arrives, every warp
// has loaded its counters (is_stopped), so those of the next operation may be set.
__device__ __forceinline__ void finish_send(const CombineArgs& args, i32 num_blocks, i32 num_receivers, u64 seq,
                                            u64 start) {
  if (!net::last_arrives(args.world, num_blocks, DONE_COMBINE_SEND)) return;
  net::for_remotes(args.world, [&](i32 source) { push_combine(args, source, seq); });
  if (threadIdx.x != THREADS - 1) return;
  args.world.state->items_taken[16] = 0;
  args.world.state->combine_seq = seq;
  args.world.state->combine_slot_seq[args.slot] = seq;
  note_sent(args.world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, num_receivers);
}

// Roles of the N blocks of a rank; S = args.work.num_senders. Both phases in one launch: blocks 0 .. S - 1 send, the
// others receive; S = N: every block sends, then receives. One phase alone: every block has it.
__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ i32 status;
  __shared__ u64 start, record;  // of the operation: time, and number of its latency record
  const World& world = args.world;
  u8** recv_buffers = reinterpret_cast<u8**>(after_waits(world, shared));  // [R] combine receive buffer of each rank
  u8* stages = shared + args.work.stage_offset + warp_idx() * 2 * args.work.segment_bytes + lane_idx() * kCopyBytes;
  const bool sends = args.work.phases & kSend, receives = args.work.phases & kReceive;
  const i32 num_senders = sends ? receives ? static_cast<i32>(args.work.num_senders) : team.num_blocks : 0;
  const bool split = num_senders < team.num_blocks, is_sender = team.block < num_senders;
  const Team send_team = {team.block, max(1, num_senders)};
  const Team recv_team = split ? Team{team.block - num_senders, team.num_blocks - num_senders} : team;
  const Divisor packets = divisor_of(packets_per_position(world)), sources = divisor_of(world.size);
  WarpWorkCounter work = warp_work_counter(send_team, num_warps(), packets, sources, world.state->items_taken + 16);
  load_active(world);
  net::init_arrived();
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) {
    waits_at(shared)[i] = 0;
    recv_buffers[i] = combine_recv_at(args, i, world.rank);
  }
  if (threadIdx.x == 0) status = kOk;
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  // All loads are issued before any result is used (load_recv_counts, the last, uses its own): a computation in between
  // would stall the later loads.
  const u64 stop = ptx::load_cached(&world.state->aborted), routing_id = ptx::load_cached(args.routing_id);
  const u64 last = ptx::load_cached(sends ? &world.state->combine_seq : args.op + kOpSeq);
  const u64 number = record_number(world, args.work.phases, args.op);
  Credit credit = {0, 0};
  RecvCounts counts = {0, 0, 0};
  if (is_sender) {
    credit = warp_load_credit(world, FLAG_COMBINE_STARTED, &world.state->combine_slot_seq[args.slot]);
    counts = load_recv_counts(args);
  }
  const u64 seq = last + sends;
  if (threadIdx.x == THREADS - 1) {
    start = ptx::now_ns();
    record = number;
  }
  if (is_sender) {
    Task task = {};
    const bool more = next_task(args, counts, work, task);
    const bool notifies = team.block == 0 && warp_idx() == num_warps() - 1;
    if (notifies && stop == STOP_RUNNING) warp_send_started(world, FLAG_COMBINE_STARTED, seq);
    if (stop == STOP_RUNNING)
      send_partials(args, recv_buffers, stages, counts, work, task, more, seq, [&] {
        const u64 needed = credit_needed(world, credit, seq);
        if (!warp_await_credit(world, FLAG_COMBINE_STARTED, credit, needed, OP_COMBINE)) return false;
        if (notifies) send_routing_id(args, routing_id, seq);
        return true;
      });
  }
  const bool is_receiver = receives && (!split || !is_sender);
  // `number` was stored to shared memory above, so only `last` has to go through the barrier.
  if (is_stopped(stop, last, ~0ull)) return is_receiver ? poison_packets(args, recv_team) : void();
  if (sends && is_last_to_send())
    finish_send(args, team.num_blocks, receives ? recv_team.num_blocks : team.num_blocks, seq, start);
  if (is_receiver) combine_receive(args, recv_team, shared, &status, record, routing_id, seq);
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
