// One-shot all-reduce: every rank sends all of x to all ranks as LL128 packets (layout/ll128.cuh), and sums what
// arrives, packet by packet. A packet carries its own flag, seq: no fence, no arrival flag, no permission.
//
//   rank r: packet i of x  -->  lines[slot][r][i] of every peer
//   every rank: out, packet i = sum over r, ascending, of lines[slot][r][i]; its own from x
//
// Warps take packets in turn, those of one warp spread over the blocks: 9 packets keep 9 blocks busy. A warp first
// sends all its packets, then receives them; it loads the first one beside the counters of the operation, and once. out
// may be x: a warp reads a packet of x again only before it writes it.
//
// Memory order: none between packets. Slots: collective_abi.py.
#pragma once

#include "collective_types.h"
#include "collectives/bytes.cuh"
#include "collectives/operation.cuh"
#include "collectives/sum.cuh"
#include "common/scheduler.cuh"
#include "layout/ll128.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

constexpr i32 kPollUnroll = 4;  // packets that a warp polls at a time

__device__ __forceinline__ u8* packet_at(const CollectiveArgs& args, i32 at, i32 slot, i32 from, i32 packet) {
  return region_at<u8>(args.world, at, args.map.lines) +
         (static_cast<u64>(slot) * args.world.size + from) * args.map.lines_row +
         static_cast<i64>(packet) * ll::kPacketBytes;
}

// This lane's part of packet i of x; 0 past the end.
__device__ __forceinline__ ll::Packet load_packet(const CollectiveArgs& args, i32 i) {
  const i64 first = static_cast<i64>(i) * ll::kPacketData + ll::first_offset(), second = first + ll::kSecondOffset;
  const i64 n = args.num_bytes;
  ll::Packet packet = {{0, 0}, {0, 0}};
  if (first < n) packet.first = load_part(args.x + first, n - first);
  if (!ll::is_flag_lane() && second < n) packet.second = load_part(args.x + second, n - second);
  return packet;
}

// `own`: this warp's first packet.
__device__ __forceinline__ void send_packets(const CollectiveArgs& args, Team team, i32 num_packets,
                                             const ll::Packet& own, const Operation& op) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 i = first_item(team); i < num_packets; i += num_items_at_once(team)) {
    const ll::Packet packet = i == first_item(team) ? own : load_packet(args, i);
#pragma unroll 1
    for (i32 p = 0; p < world.size - 1; ++p) {
      const i32 peer = rank_at_offset(world, p);
      if (is_active(peer)) ll::store_packet(packet_at(args, peer, op.slot, world.rank, i), packet, op.seq);
    }
  }
}

// Polls up to kPollUnroll packets of ranks active_order[first ...] until all are there. False after a failed wait.
__device__ __forceinline__ bool poll_packets(const CollectiveArgs& args, const Operation& op, i32 i, i32 first,
                                             const ll::Packet& own, ll::Packet (&packets)[kPollUnroll], u8* shared) {
  const World& world = args.world;
  i32 waited_for = world.rank;
  const bool ok = spin::warp_wait(world, op.seq, op.op, PHASE_SHARDS, waited_for, [&] {
    bool ready = true;
#pragma unroll
    for (i32 j = 0; j < kPollUnroll; ++j) {
      const bool present = first + j < num_active();
      const i32 rank = present ? active_order[first + j] : world.rank;
      const bool wanted = rank != world.rank;
      const bool here =
          ll::poll_packet(packet_at(args, world.rank, op.slot, rank, i), op.seq, &packets[j], wanted);
      if (!here && ready) waited_for = rank;
      ready &= here;
    }
    return ready;
  });
#pragma unroll
  for (i32 j = 0; j < kPollUnroll; ++j) {
    const i32 rank = first + j < num_active() ? active_order[first + j] : -1;
    if (rank == world.rank) packets[j] = own;
    if (rank >= 0 && rank != world.rank && lane_idx() == 0)
      note_wait(waits_at(shared), rank, ptx::now_ns() - op.start);
  }
  return ok;
}

// out, packet i, of which this rank's part is `own`. False after a failed wait.
__device__ __forceinline__ bool receive_packet(const CollectiveArgs& args, const Operation& op, i32 i,
                                               const ll::Packet& own, u8* shared) {
  Sum first = no_terms(), second = no_terms();
#pragma unroll 1
  for (i32 r = 0; r < num_active(); r += kPollUnroll) {
    ll::Packet packets[kPollUnroll];
    if (!poll_packets(args, op, i, r, own, packets, shared)) return false;
#pragma unroll
    for (i32 j = 0; j < kPollUnroll; ++j) {
      if (r + j >= num_active()) continue;
      add(first, packets[j].first);
      add(second, packets[j].second);
    }
  }
  const i64 at = static_cast<i64>(i) * ll::kPacketData + ll::first_offset(), n = args.num_bytes;
  if (at < n) store_part<X>(args.out + at, rounded(first), n - at);
  if (!ll::is_flag_lane() && at + ll::kSecondOffset < n)
    store_part<X>(args.out + at + ll::kSecondOffset, rounded(second), n - at - ll::kSecondOffset);
  return true;
}

__device__ __forceinline__ void one_shot_team(const CollectiveArgs& args, Team team, u8* shared) {
  Operation op;
  const i32 num_packets = static_cast<i32>((args.num_bytes + ll::kPacketData - 1) / ll::kPacketData);
  ll::Packet own = {{0, 0}, {0, 0}};
  auto load_first = [&] {
    if (first_item(team) < num_packets) own = load_packet(args, first_item(team));
  };
  if (!begin(args, team, shared, OP_ALL_REDUCE, 0, &op, load_first)) return;
  send_packets(args, team, num_packets, own, op);
  finish_send(args, team, op, true);
  bool ok = true;
#pragma unroll 1
  for (i32 i = first_item(team); ok && i < num_packets; i += num_items_at_once(team))
    ok = receive_packet(args, op, i, i == first_item(team) ? own : load_packet(args, i), shared);
  end(args, team, op, shared, __syncthreads_or(!ok) == 0);
}

}  // namespace ep::coll
