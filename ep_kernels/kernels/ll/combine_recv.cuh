// Receive phase of LL combine: receive reducers of a source rank sum the partials of each token as they arrive.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/push.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/status.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "layout/ll128.cuh"
#include "ll/combine_packet.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

template <i32 N>
__device__ __forceinline__ void unpack(const Vector& value, f32 scale, f32 (&out)[N]) {
  if constexpr (kFp8) {
#pragma unroll
    for (i32 i = 0; i < N; i += 4) {
      f32 four[4];
      quant::widen4(word_of(value, i / 4), four);
#pragma unroll
      for (i32 j = 0; j < 4; ++j) out[i + j] = __fmul_rn(four[j], scale);
    }
  } else {
    const Vec<C, N> loaded = *reinterpret_cast<const Vec<C, N>*>(&value);
#pragma unroll
    for (i32 i = 0; i < N; ++i) out[i] = widen(loaded.at[i]);
  }
}

template <i32 N>
__device__ __forceinline__ void add_term(const Vector& value, f32 scale, f32 weight, f32 (&sum)[N]) {
  f32 term[N];
  unpack(value, scale, term);
#pragma unroll
  for (i32 i = 0; KIND == EXACT && i < N; ++i) term[i] = __fmul_rn(term[i], weight);
  add_columns(term, sum);
}

template <i32 N>
__device__ __forceinline__ void write_columns(const CombineArgs& args, i64 token, i32 column, const f32 (&value)[N]) {
  constexpr i32 kStep = N < kColumns<Y> ? N : kColumns<Y>;
#pragma unroll
  for (i32 i = 0; i < N; i += kStep) {
    Vec<Y, kStep> z;
#pragma unroll
    for (i32 j = 0; j < kStep; ++j) z.at[j] = narrow<Y>(value[i + j]);
    if (column + i < args.world.hidden)
      *reinterpret_cast<Vec<Y, kStep>*>(reinterpret_cast<Y*>(args.z) + token * args.world.hidden + column + i) = z;
  }
}

// The partials of a token that are not yet summed, in the order of their sum: by rank, or (exact) by k.
struct Partials {
  u64 left;            // mask of ranks, or of ks
  i32 rank, position;  // of this lane's k; exact: of a remote rank, row of the box
  f32 weight;          // likewise
};

__device__ __forceinline__ Route load_route(const CombineArgs& args, i32 token) {
  const i32 k = lane_idx(), topk = args.world.topk;
  return k < topk && token < args.num_tokens ? args.routes[static_cast<i64>(token) * topk + k] : Route{-1, -1, -1, -1};
}

__device__ __forceinline__ Partials list_partials(const CombineArgs& args, const Route& route, i32 token) {
  Partials partials = {0, route.rank, route.position, 1.0f};
  const bool routed = route.rank >= 0;
  // Exact: a partial for each k.
  if (KIND == EXACT) {
    partials.left = __ballot_sync(~0u, routed);
    if (routed && args.apply_weights)
      partials.weight = args.topk_weights[static_cast<i64>(token) * args.world.topk + lane_idx()];
    if (routed && is_remote(args.world, route.rank))
      partials.position =
          box_rows_of(args.world, args.routes)[static_cast<i64>(token) * args.world.topk + lane_idx()];
    return partials;
  }
  // Else one for each rank, as a bit.
  partials.left = __reduce_or_sync(~0u, routed && route.rank < 32 ? 1u << route.rank : 0);
  if (args.world.size > 32)
    partials.left |=
        static_cast<u64>(__reduce_or_sync(~0u, routed && route.rank >= 32 ? 1u << (route.rank - 32) : 0)) << 32;
  return partials;
}

// Takes the next partial: the rank that sends it, its row in the combine receive buffer, its weight (exact).
__device__ __forceinline__ void take_partial(const CombineArgs& args, Partials& partials, i32 token, i32* expert_rank,
                                             i32* row, f32* weight) {
  const i32 next = __ffsll(partials.left) - 1;
  partials.left &= partials.left - 1;
  if (KIND == EXACT) {
    *expert_rank = __shfl_sync(~0u, partials.rank, next);
    *row = token * args.world.topk + next;
    if constexpr (NETWORK) {
      const i32 position = __shfl_sync(~0u, partials.position, next);
      if (is_remote(args.world, *expert_rank)) *row = line_position(args.world, *expert_rank, position);
    }
    *weight = __shfl_sync(~0u, partials.weight, next);
    return;
  }
  const i32 k = __ffs(__ballot_sync(~0u, partials.rank == next)) - 1;
  *expert_rank = next;
  *row = next * args.world.ll_tokens + __shfl_sync(~0u, partials.position, k);
}

// Sums packet `index` of z[token]. False after a failed wait, or once another warp has set `status`.
__device__ __forceinline__ bool reduce_packet(const CombineArgs& args, Partials partials, i32 token, i32 index,
                                              const u8* recv_buffer, const volatile i32* status, u64* waits, u64 start,
                                              u64 seq) {
  const World& world = args.world;
  f32 first[kVectorColumns], second[kVectorColumns];
  begin_sum(partials.left != 0, first);
  begin_sum(partials.left != 0, second);
#pragma unroll 1
  while (partials.left != 0) {
    Packet packets[kPollUnroll];
    i32 number[kPollUnroll] = {}, expert_rank[kPollUnroll] = {}, waited_for = -1;
    f32 weight[kPollUnroll];
    i32 count = 0;
#pragma unroll
    for (i32 j = 0; j < kPollUnroll; ++j) {
      if (partials.left == 0) continue;
      i32 row;
      take_partial(args, partials, token, &expert_rank[j], &row, &weight[j]);
      number[j] = row * world.combine_packets + index;
      ++count;
    }
    i32 missing = world.rank;
    auto poll = [&] {
      bool ready = true;
      // Before any is read: what is here of one rank of another host would be read again with each look.
#pragma unroll
      for (i32 j = 0; NETWORK && j < kPollUnroll; ++j) {
        if (j >= count || !is_remote(world, expert_rank[j])) continue;
        const i32 position = number[j] / world.combine_packets - line_position(world, expert_rank[j], 0);
        const u32 wanted = net::slices_for(world, net::kCombine, position);
        if (net::warp_has_arrived(world, net::kCombine, expert_rank[j], seq, wanted)) continue;
        missing = expert_rank[j];
        return false;
      }
#pragma unroll
      for (i32 j = 0; j < kPollUnroll; ++j) {
        const u8* at = recv_buffer + static_cast<i64>(number[j]) * kPacketBytes;
        if (j < count && is_remote(world, expert_rank[j]))
          at = combine_recv_at(args, world.rank, expert_rank[j]) + static_cast<i64>(number[j]) * kPacketBytes;
        if (poll_packet(at, seq, &packets[j], j < count)) continue;
        ready = false;
        missing = expert_rank[j];
      }
      return ready;
    };
    const bool ready = poll();
    if (!__all_sync(~0u, ready)) {
      if (!ready) waited_for = missing;
      if (!spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, missing,
                           [&] {  // NETWORK: lanes may see different statuses, and ask together what has arrived
                             const bool polled = NETWORK && poll();
                             return polled || *status != kOk || (!NETWORK && poll());
                           }) ||
          __any_sync(~0u, *status != kOk))
        return false;
      if (waited_for >= 0 && waited_for != world.rank) note_wait(waits, waited_for, ptx::now_ns() - start);
    }
#pragma unroll
    for (i32 j = 0; j < kPollUnroll; ++j) {
      if (j >= count) continue;
      f32 scale_first = 1.0f, scale_second = 1.0f;
      if constexpr (kFp8) {
        scale_first = __uint_as_float(scale_of_block(packets[j], first_block()));
        scale_second = __uint_as_float(scale_of_block(packets[j], second_block()));
      }
      add_term(packets[j].first, scale_first, weight[j], first);
      add_term(packets[j].second, scale_second, weight[j], second);
    }
  }
  const i32 column = index * kCombineColumns + first_column();
  if (!(kFp8 && is_flag_lane())) write_columns(args, token, column, first);
  if (!is_flag_lane()) write_columns(args, token, column + kSecondColumn, second);
  return true;
}

// z_weights[token]: for each k, the row weight that the rank of its expert sent.
__device__ __forceinline__ bool receive_weights(const CombineArgs& args, const Route& route, i64 token,
                                                const volatile i32* status, u64 seq) {
  const World& world = args.world;
  const i32 k = lane_idx(), topk = world.topk, num_lines = lines_for(topk, kLineInts);
  const i32 rank = route.rank, position = route.position;
  f32 mine = 0.0f;
  for (u32 left = __ballot_sync(~0u, rank >= 0); left != 0;) {
    // A rank at a time, which has the weights of all its ks in the lines of the first.
    const i32 leader = __ffs(left) - 1, from = __shfl_sync(~0u, rank, leader);
    const u8* at = weight_lines_at(args, world.rank, from, __shfl_sync(~0u, position, leader));
    Vector loaded = {};
    if (!spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, from,
                         [&] {
                           if (!net::warp_has_arrived(world, net::kCombine, from, seq, net::kAllSlices))
                             return *status != kOk;
                           return *status != kOk || poll_lines(at, num_lines, seq, &loaded);
                         }))
      return false;
    // To the lanes of its ks.
    const Vector got = shuffle(loaded, k / kLineInts * 8 + k % kLineInts / 4);
    if (rank == from) mine = __uint_as_float(word_of(got, k % 4));
    left &= ~__ballot_sync(~0u, rank == from);
  }
  if (k < topk) args.z_weights[token * topk + k] = mine;
  return true;
}

// Checks that all expert ranks combine this routing. One warp, beside the receive reducers, which it stops through
// `status`.
__device__ __forceinline__ void await_routing_ids(const CombineArgs& args, volatile i32* status, u64 routing_id,
                                                  u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 expert_rank = base + lane_idx();
    const bool expected = expert_rank < world.size && is_active(expert_rank);
    Vector packet = {routing_id, seq};
    const u8* at = routing_packet_at(args, world.rank, expected ? expert_rank : world.rank);
    const bool ok = spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, expert_rank, [&] {
      if (expected && !net::has_arrived(world, net::kCombine, expert_rank, seq, net::kAllSlices)) return false;
      if (expected) packet = ptx::load_pair<Vector>(at);
      return packet.high == seq;
    });
    const bool same = __all_sync(~0u, packet.low == routing_id);
    if (lane_idx() == 0 && !(ok && same)) *status = ok ? kRoutingMismatch : kFailed;
    if (!ok) return;
  }
}

// Writes NaN to packet `index` of z[token], in every output dtype.
__device__ __forceinline__ void poison_packet(const CombineArgs& args, i64 token, i32 index) {
  const f32 nan = __uint_as_float(~0u);
  f32 values[kVectorColumns];
#pragma unroll
  for (i32 i = 0; i < kVectorColumns; ++i) values[i] = nan;
  const i32 column = index * kCombineColumns + first_column();
  if (!(kFp8 && is_flag_lane())) write_columns(args, token, column, values);
  if (!is_flag_lane()) write_columns(args, token, column + kSecondColumn, values);
  if (args.z_weights != nullptr && index == 0 && lane_idx() < args.world.topk)
    args.z_weights[token * args.world.topk + lane_idx()] = nan;
}

// Calls visit(routes, token, index) for every packet of this warp. NETWORK: a block's last warp has none, since it
// waits for the routing ids, which other hosts send last.
template <class Visit>
__device__ __forceinline__ void for_packets(const CombineArgs& args, Team team, Visit visit) {
  const Divisor packets = divisor_of(args.world.combine_packets);
  if (NETWORK && warp_idx() == num_warps() - 1) return;
  i32 item = first_item(team), next_token = divide(item, packets);
  Route next = load_route(args, next_token);
#pragma unroll 1
  while (next_token < args.num_tokens) {
    const i32 token = next_token, index = item - next_token * packets.value;
    const Route route = next;
    item += NETWORK ? num_items_at_once(team) - team.num_blocks : num_items_at_once(team);
    next_token = divide(item, packets);
    next = load_route(args, next_token);
    visit(route, token, index);
  }
}

__device__ __forceinline__ void poison_packets(const CombineArgs& args, Team team) {
  for_packets(args, team, [&](const Route&, i32 token, i32 index) { poison_packet(args, token, index); });
}

__device__ __forceinline__ void combine_receive(const CombineArgs& args, Team team, u8* shared, i32* status,
                                                u64 record, u64 routing_id, u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.phases, record);
  u64* waits = waits_at(shared);
  const u8* recv_buffer = ptx::opaque(combine_recv_at(args, world.rank, world.rank));
  if (warp_idx() == num_warps() - 1) await_routing_ids(args, status, routing_id, seq);
  for_packets(args, team, [&](const Route& route, i32 token, i32 index) {
    bool ok = reduce_packet(args, list_partials(args, route, token), token, index, recv_buffer, status, waits, start,
                            seq);
    if (ok && args.z_weights != nullptr && index == 0) ok = receive_weights(args, route, token, status, seq);
    if (!ok && lane_idx() == 0) atomicCAS(status, kOk, kFailed);
  });
  __syncthreads();
  if (*status != kOk) poison_packets(args, team);
  if (*status == kRoutingMismatch && team.block == 0 && threadIdx.x == 0)
    report_mismatch(world, OP_COMBINE, routing_id, [&](i32 peer) {
      return ptx::load_pair<Vector>(routing_packet_at(args, world.rank, peer)).low;
    });
  note_end(world, team, record, waits);
}

}  // namespace ep::ll
