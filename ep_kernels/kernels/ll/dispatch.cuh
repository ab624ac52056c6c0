// Low-latency dispatch: each token's row goes once to every rank that holds one of its experts, as LL128 packets that
// carry the operation's seq as flag (layout/ll128.cuh). The receiver polls the packets themselves and writes each
// vector to its final rows, so rows are expanded per expert while others are still under way.
//
//   source rank: send blocks                            expert rank: receive blocks
//   last block: count packet, rows per expert -------->  count_packets, count_lines[source] -> final layout
//   per token, rank: token metadata ------------------>  metadata_lines[source][position]
//   per token, rank: x[t] --quantise?--> packets ----->  row_lines[source][position] -> rows (per expert, or per rank)
//
// NETWORK: a row goes once to each other host, to the inbox of this rank's rail there, which all ranks of that host
// read; metadata say which row is whose.
//
// Routing: token mask scan (routing/ll_scan.cuh). With a previous handle the keys come from its routes; the rest is
// computed anew.
//
// Worked example: R = 2, K = 2, rank 1 sends token 0 to experts (rank 0, slot 1) and (rank 0, slot 0): one row lands in
// rank 0's row_lines[1][0] with the metadata {1, index}, {0, index}; rank 0 writes each of its vectors to both experts'
// groups.
//
// Memory order: none between lines; each line is complete in itself. Reuse of a slot: the peer's STARTED flag is in
// stream order after its last read of the slot (warp_await_credit). A link is first in, first out: what receivers
// wait for first (counts, then metadata) leaves before rows fill it.
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
#include "ll/dispatch_recv.cuh"
#include "ll/dispatch_send.cuh"
#include "routing/experts.cuh"
#include "routing/ll_counts.cuh"
#include "routing/ll_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// Counts and metadata for a remote rank.
struct Head {
  net::Run runs[3];
};

__device__ __forceinline__ Head head_of(const DispatchArgs& args, u64 rows) {
  const World& world = args.world;
  const RegionMap& box = box_map(world);
  const u64 slot = args.slot;
  return {{{box.count_packets + slot * box.count_packets_stride, COUNT_PACKET_BYTES},
           {box.count_lines + slot * box.count_lines_stride, static_cast<u64>(world.count_lines) * kLineBytes},
           {box.metadata_lines + slot * box.metadata_lines_stride, rows * world.metadata_lines * kLineBytes}}};
}

// A lane for each rank; sees all of it.
__device__ __forceinline__ void push_head(const DispatchArgs& args, i32 peer, u64 seq) {
  Head head = head_of(args, ptx::load_volatile(&args.world.state->network.rows[peer]));
  net::push_runs(args.world, peer, FLAG_METADATA, head.runs, 0, seq, OP_DISPATCH);
}

// A block that writes to the head has done so; its last warp. The last block pushes it, a lane for each rank.
__device__ __forceinline__ void finish_head(const DispatchArgs& args, i32 num_blocks, u64 seq) {
  const World& world = args.world;
  bool last = false;
  if (lane_idx() == 31) {
    u64* count = &world.state->network.heads_done;
    last = ptx::add_acq_rel_gpu(count, 1) == static_cast<u64>(num_blocks - 1);
    if (last) ptx::store_volatile(count, 0);
  }
  __syncwarp();
  if (!__any_sync(~0u, last)) return;
  net::for_remotes(world, [&](i32 peer) { push_head(args, peer, seq); });
}

// What a remote rank gets of this rank beside its slices: a lane for each. Every block has arrived.
__device__ __forceinline__ void push_dispatch(const DispatchArgs& args, i32 peer, bool has_head, u64 seq) {
  const World& world = args.world;
  if (!has_head) push_head(args, peer, seq);
  if ((world.state->network.rails >> offset_of_rank(world, peer) & 1) == 0) return;
  const u64 rows = ptx::load_volatile(&world.state->network.host_rows[peer]);
  u32 before = 0;
  net::Run runs[] = {net::rest_of(world, net::kDispatch, peer, rows_of(args), rows, before)};
  net::push_runs(world, peer, FLAG_PAYLOAD, runs, before, seq, OP_DISPATCH);
}

// End of the send phase of a block; its last thread, NETWORK: its last warp. When the last block arrives, every warp
// has loaded its counters (is_stopped), so those of the next operation may be set.
__device__ __forceinline__ void finish_send(const DispatchArgs& args, i32 num_blocks, i32 num_receivers, bool has_head,
                                            u64 seq, u64 start) {
  if (!net::last_arrives(args.world, num_blocks, DONE_DISPATCH_SEND)) return;
  net::for_remotes(args.world, [&](i32 peer) { push_dispatch(args, peer, has_head, seq); });
  if (threadIdx.x != THREADS - 1) return;
  args.world.state->items_taken[0] = 0;
  args.world.state->dispatch_seq = seq;
  args.world.state->dispatch_slot_seq[args.slot] = seq;
  note_sent(args.world, OP_DISPATCH, 0, args.num_tokens, seq, start, args.op, num_receivers);
}

// Fills a block's shared memory, while the kernel before may still be running. All threads; a block barrier follows.
__device__ __forceinline__ void init_shared(const DispatchArgs& args, const LlScratch& scratch, u8* shared,
                                            SendCounts& send_counts, i32& status, u64& counts_barrier,
                                            bool sends_counts, bool scans, bool sets_expert_masks) {
  const World& world = args.world;
  load_active(world);
  fill_expert_table(world, scratch.expert_table);
  if (warp_idx() == num_warps() - 1) {  // a warp for each, as a block that starts late delays its peers
    for (i32 i = lane_idx(); i < world.size; i += 32)
      scratch.row_dst[i] = row_packets_at(args, rank_at_offset(world, i), world.rank);
  } else if (warp_idx() == num_warps() - 2) {
    for (i32 i = lane_idx(); i < world.size; i += 32)
      scratch.metadata_dst[i] = metadata_lines_at(args, rank_at_offset(world, i), world.rank);
  } else if (warp_idx() == num_warps() - 3) {
    for (i32 i = lane_idx(); i < world.size; i += 32) waits_at(shared)[i] = 0;
    for (i32 i = lane_idx(); i < MAX_RANKS; i += 32) send_counts.rows[i] = 0;
  } else if (threadIdx.x == 0) {
    if constexpr (!NETWORK) {
      scratch.recv_base[0] = row_packets_at(args, world.rank, 0);
      scratch.recv_base[1] = metadata_lines_at(args, world.rank, 0);
    }
    status = send_counts.num_invalid = 0;
    *scratch.has_duplicates = false;
    ptx::barrier_init(&counts_barrier);
  }
  net::init_arrived();
  for (i32 i = threadIdx.x; kPerExpert && sends_counts && i < num_keys(world); i += THREADS)
    scratch.expert_counts[i] = 0;
  for (i32 i = threadIdx.x; scans && i < aligned(max(args.num_tokens, 1), 32); i += THREADS) scratch.dst_masks[i] = 0;
  for (i32 i = threadIdx.x; sets_expert_masks && i < num_keys(world) * num_chunks(world); i += THREADS)
    scratch.expert_masks[i] = 0;
}

// Roles of the N blocks of a rank; S = args.work.num_senders.
//
//   phases           block          sends                      receives
//   send + receive   0 .. S - 2     rows
//                    S - 1          counts (S = 1: and rows)   counts: it is the finalizer
//                    S .. N - 1     metadata                   packets and metadata
//   the same, S = N  as in the two launches below, at once
//   send             0 .. N - 2     rows, metadata
//                    N - 1          counts (N = 1: all)
//   receive          0 .. N - 1                                packets and metadata; N - 1 is the finalizer
//
// Metadata is left to the receive blocks since its loads would queue behind a block's own row stores. The finalizer
// writes the caller's counts.
__device__ __forceinline__ void dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ i32 status;          // of await_counts
  __shared__ u64 counts_barrier;  // mbarrier: count packets have arrived
  __shared__ bool has_duplicates;
  __shared__ SendCounts send_counts;
  const World& world = args.world;
  __shared__ const u8* recv_base[2];
  LlScratch scratch = make_ll_scratch(world, shared, &has_duplicates, recv_base);
  const bool sends = args.work.phases & kSend, receives = args.work.phases & kReceive;
  const i32 num_senders = sends ? receives ? static_cast<i32>(args.work.num_senders) : team.num_blocks : 0;
  const bool split = num_senders < team.num_blocks, is_sender = team.block < num_senders;
  const bool sends_counts = is_sender && team.block == num_senders - 1;
  const Team row_team = {team.block, max(1, num_senders - 1)};
  const Team recv_team = split ? Team{max(0, team.block - num_senders), team.num_blocks - num_senders} : team;
  const bool sends_rows = is_sender && row_team.block < row_team.num_blocks;
  const bool is_finalizer = receives && (split && sends ? sends_counts : team.block == team.num_blocks - 1);
  const Team metadata_team = split ? recv_team : row_team;
  const bool sends_metadata =
      sends && (split ? !is_sender : sends_rows) && metadata_team.block < args.num_tokens * world.size;
  const Divisor row_packets = divisor_of(world.row_packets), items = divisor_of(world.row_packets + 1);
  const Divisor sources = divisor_of(world.size), topk = divisor_of(world.topk), one = divisor_of(1);
  const bool sets_expert_masks = kPerExpert && sends_metadata && !args.cached && scratch.expert_masks != nullptr;
  const bool scans = sends_counts || sends_rows || sends_metadata;
  init_shared(args, scratch, shared, send_counts, status, counts_barrier, sends_counts, scans, sets_expert_masks);
  WarpWorkCounter work = warp_work_counter(row_team, num_send_warps(world), row_packets, one, world.state->items_taken);
  const WorkItem none = {world.ll_tokens, 0, 0};
  const WorkItem first_arrival = split && is_sender ? none : work_item_at(first_item(recv_team), items, sources);
  const WorkItem arrival_step = work_item_at(num_items_at_once(recv_team), items, sources);
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  // All loads are issued before any result is used: a computation in between would stall the later loads.
  const u64 stop = ptx::load_cached(&world.state->aborted);
  const u64 last = ptx::load_cached(sends ? &world.state->dispatch_seq : args.op + kOpSeq);
  Credit credit = {0, 0};
  if (is_sender || sends_metadata)
    credit = warp_load_credit(world, FLAG_STARTED, &world.state->dispatch_slot_seq[args.slot]);
  PrefetchedIds ids = {};
  if (scans) ids = prefetch_ids(args);
  Entry entry = {};
  if (sends_metadata) entry = load_entry(args, divide(first_item(metadata_team), sources));
  const u64 record = record_number(world, args.work.phases, args.op);
  LoadedPacket packet = {};
  const bool is_send_warp = sends_rows && warp_idx() < num_send_warps(world);
  if (is_send_warp && work.item.position < args.num_tokens)
    packet = load_packet<X>(args, work.item.position, work.item.index);
  const u64 start = threadIdx.x == THREADS - 1 ? ptx::now_ns() : 0, seq = last + sends;
  const u64 routing_id = routing_id_of(args, seq);
  // Announced before anything of this operation waits for peers.
  if (sends_counts && stop == STOP_RUNNING && warp_idx() == num_warps() - 2)
    warp_send_started(world, FLAG_STARTED, seq);
  bool granted = false;
  if (is_sender || sends_metadata) {
    const u64 needed = free_from(world, credit.last, seq);
    granted = stop == STOP_RUNNING && warp_await_credit(world, FLAG_STARTED, credit, needed, OP_DISPATCH);
  }
  if (scans)
    for_entries(args, scratch, ids, topk, [&](i32 token, i32 key) {
      const bool first_of_rank = key >= 0 && !set_dst_bit(world, scratch, token, key);
      if (sets_expert_masks && key >= 0) set_expert_bit(world, scratch, token, key);
      if (sends_counts) count_entry(world, scratch, send_counts, key, first_of_rank);
    });
  if (is_stopped(stop, last, record)) return is_finalizer ? write_no_counts(args) : void();
  if (sends_counts && threadIdx.x == 0) *args.num_invalid_ids = send_counts.num_invalid;
  if (sends_counts && warp_idx() == 0 && granted)
    send_count_packets(args, send_counts.rows[lane_idx()], send_counts.rows[lane_idx() + 32], routing_id, seq);
  if (NETWORK && sends_counts && warp_idx() == 0 && granted) note_host_rows(args, scratch);
  if (sends_counts && kPerExpert && granted) send_expert_counts(args, scratch, seq);
  if (sends_metadata && first_item(metadata_team) < args.num_tokens * world.size && granted)
    send_all_metadata(args, metadata_team, scratch, entry, sources, seq);
  if (is_send_warp && granted) send_rows(args, scratch, work, packet, seq);
  if (is_sender || (NETWORK && sends)) __syncthreads();
  // Counts and metadata go ahead where they are staged by blocks that send no rows.
  const bool has_head = NETWORK && sends && split && num_senders > 1 && has_slices(world);
  if (has_head && (!is_sender || sends_counts) && is_last_to_send())
    finish_head(args, team.num_blocks - num_senders + 1, seq);
  if (sends && is_last_to_send())
    finish_send(args, team.num_blocks, receives ? recv_team.num_blocks + (split ? 1 : 0) : team.num_blocks, has_head,
                seq, start);
  // A finalizer that sends counts has no packets, and is the last of the receivers.
  const Team receiver = is_sender && split ? Team{recv_team.num_blocks, recv_team.num_blocks + 1} : recv_team;
  if (receives && (!split || !is_sender || is_finalizer))
    dispatch_receive(args, receiver, scratch, shared, &status, &counts_barrier, first_arrival, arrival_step,
                     is_finalizer, record, routing_id, seq);
}

}  // namespace ep::ll

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS) ll_dispatch(const __grid_constant__ ep::DispatchArgs args) {
  ep::ll::dispatch_team(args, {static_cast<ep::i32>(blockIdx.x), static_cast<ep::i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS)
    ll_dispatch(const ep::DispatchArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::ll::dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
