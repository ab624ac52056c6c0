// Token metadata of HT dispatch, 16 bytes per (token, k): the metadata warp sends those of its block's tokens to their
// ranks; a rank writes what arrives to the caller and for combine.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/signal.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ht_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"

namespace ep::ht {

// Lanes of a warp over several (token, k), or (position, k).
struct TopkLanes {
  i32 num_tokens, token, k;  // tokens per warp; of this lane: token among them, and k
  u32 token_lanes;           // lanes of its token; 0: this lane is idle

  __device__ __forceinline__ bool has(i32 index, TokenRange tokens) const {
    return token_lanes != 0 && index < tokens.end;
  }
};

__device__ __forceinline__ TopkLanes topk_lanes(i32 topk) {
  const i32 num_tokens = 32 / topk, token = lane_idx() / topk;
  return {num_tokens, token, lane_idx() % topk,
          token < num_tokens ? (topk == 32 ? ~0u : (1u << topk) - 1) << (token * topk) : 0};
}

// ---- send phase ----

// Routes and weights of a lane of the metadata warp, for several groups of tokens: each is a chain of shuffles, and the
// chains overlap.
struct TokenEntries {
  static constexpr i32 kUnroll = 2;
  Route route[kUnroll];
  f32 weight[kUnroll];
};

__device__ __forceinline__ TokenEntries load_entries(const DispatchArgs& args, const TopkLanes& lanes, i32 first,
                                                     TokenRange tokens) {
  TokenEntries entries;
#pragma unroll
  for (i32 i = 0; i < TokenEntries::kUnroll; ++i) {
    const i32 token = first + i * lanes.num_tokens + lanes.token;
    const bool present = lanes.has(token, tokens);
    const i64 entry = static_cast<i64>(token) * args.world.topk + lanes.k;
    entries.route[i] = present ? args.routes[entry] : Route{kNoExpert, -1, -1, -1};
    entries.weight[i] = present ? args.topk_weights[entry] : 0.0f;
  }
  return entries;
}

// Sends the metadata of these tokens once to each of their ranks. All lanes.
__device__ __forceinline__ void send_entries(const DispatchArgs& args, const TopkLanes& lanes,
                                             const TokenEntries& entries, i32 first) {
  constexpr i32 kUnroll = TokenEntries::kUnroll;
  u64 ranks[kUnroll], dst[kUnroll];  // ranks of this k and of those before it; the metadata at this k's rank
  u32 left[kUnroll];                 // lanes whose rank is still to be served: the first k of each rank
#pragma unroll
  for (i32 i = 0; i < kUnroll; ++i) ranks[i] = entries.route[i].rank < 0 ? 0 : 1ull << entries.route[i].rank;
  // Ranks of the ks before each, by doubling.
#pragma unroll 1
  for (i32 step = 1; step < args.world.topk; step *= 2)
#pragma unroll
    for (i32 i = 0; i < kUnroll; ++i) {
      const u64 before = __shfl_up_sync(~0u, ranks[i], step);
      if (lanes.k >= step) ranks[i] |= before;
    }
  // The first k of each rank stands for it.
#pragma unroll
  for (i32 i = 0; i < kUnroll; ++i) {
    const Route& route = entries.route[i];
    const u64 before = __shfl_up_sync(~0u, ranks[i], 1);
    const bool is_first = route.rank >= 0 && (lanes.k == 0 || (before >> route.rank & 1) == 0);
    dst[i] = is_first ? reinterpret_cast<u64>(metadata_at(args, route.rank, args.world.rank, route.position)) : 0;
    left[i] = __ballot_sync(~0u, is_first) & lanes.token_lanes;
  }
#pragma unroll 1
  for (;;) {
    u32 some = 0;
#pragma unroll
    for (i32 i = 0; i < kUnroll; ++i) some |= left[i];
    if (!__any_sync(~0u, some != 0)) return;
#pragma unroll
    for (i32 i = 0; i < kUnroll; ++i) {
      const Route& route = entries.route[i];
      const i32 from = left[i] != 0 ? __ffs(left[i]) - 1 : 0, rank = __shfl_sync(~0u, route.rank, from);
      TokenMetadata* const metadata = reinterpret_cast<TokenMetadata*>(__shfl_sync(~0u, dst[i], from));
      const bool serves = route.rank == rank;
      if (left[i] != 0)
        metadata[lanes.k] = {serves ? route.local_expert : -1, route.dst_row, serves ? entries.weight[i] : 0.0f,
                             first + i * lanes.num_tokens + lanes.token};
      left[i] &= left[i] - 1;
    }
  }
}

// The metadata warp: sends the metadata of this block's tokens, writes valid [T] to the caller and counts ids out of
// range.
__device__ __forceinline__ void send_metadata(const DispatchArgs& args, TokenRange tokens) {
  constexpr i32 kUnroll = TokenEntries::kUnroll;
  const TopkLanes lanes = topk_lanes(args.world.topk);
  u32 bad_ids = 0;
  TokenEntries next = load_entries(args, lanes, tokens.first, tokens);
#pragma unroll 1
  for (i32 first = tokens.first; first < tokens.end; first += kUnroll * lanes.num_tokens) {
    // The next entries are loaded while these are used.
    const TokenEntries entries = next;
    next = load_entries(args, lanes, first + kUnroll * lanes.num_tokens, tokens);
#pragma unroll
    for (i32 i = 0; i < kUnroll; ++i) {
      const i32 token = first + i * lanes.num_tokens + lanes.token;
      const u32 no_replica = __ballot_sync(~0u, entries.route[i].rank == kNoReplica);
      bad_ids += __popc(__ballot_sync(~0u, entries.route[i].rank == kBadId));
      if (lanes.k == 0 && lanes.has(token, tokens)) args.valid[token] = (no_replica & lanes.token_lanes) == 0;
    }
    send_entries(args, lanes, entries, first);
  }
  // Ids out of range, once for the block.
  if (bad_ids != 0 && lane_idx() == 0) atomicAdd(&args.world.state->invalid_ids, static_cast<u64>(bad_ids));
  __syncwarp();
}

// ---- receive phase ----

// One warp: waits for the metadata of every peer. False where a wait failed or a peer's routing_id differs.
__device__ __noinline__ bool await_metadata(const DispatchArgs& args, u64 routing_id, u64 seq) {
  const World& world = args.world;
  if (!__all_sync(~0u, warp_await_peers(world, FLAG_METADATA, seq * kArrivalTotal, OP_DISPATCH, PHASE_PAYLOAD)))
    return false;
  bool differs = false;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32)
    differs |= is_active(peer) &&
               ptx::load_volatile(routing_id_at(world, world.rank, routing_ids_at(args), peer)) != routing_id;
  return !__any_sync(~0u, differs);
}

// Final rows, weights, tokens and ids of received positions, for combine and for the caller. One warp, a lane per
// (position, k); the warps of the block take groups of positions from a work counter until the block's part is done.
__device__ __forceinline__ void read_metadata(const DispatchArgs& args, Team team, const DispatchScratch& scratch) {
  constexpr i32 kUnroll = 4;
  const World& world = args.world;
  const TopkLanes lanes = topk_lanes(world.topk);
  const i32 topk = world.topk, per_warp = lanes.num_tokens, k = lanes.k;
  const i32 rows = scratch.row_start[world.size];
#pragma unroll 1
  for (;;) {
    // Take a group of positions.
    u32 item = 0;
    if (lane_idx() == 0) item = atomicAdd(scratch.next_metadata, 1u);
    const i32 group = static_cast<i32>(__shfl_sync(~0u, item, 0)) * team.num_blocks + team.block;
    const i32 first = group * kUnroll * per_warp;
    if (first >= rows) return;
    // Their metadata: all loads first.
    TokenMetadata metadata[kUnroll];
    i32 source[kUnroll];
    i32 from = 0;
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j) {
      const i32 i = first + j * per_warp + lanes.token;
      source[j] = -1;
      if (lanes.token_lanes == 0 || i >= rows) continue;
      while (i >= scratch.row_start[from + 1]) ++from;
      source[j] = from;
      metadata[j] = metadata_at(args, world.rank, from, i - scratch.row_start[from])[k];
    }
    // Save what combine needs; rank-wise layouts: tell the caller.
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j) {
      if (source[j] < 0) continue;
      const i32 position = first + j * per_warp + lanes.token - scratch.row_start[source[j]];
      const i64 at = position_of(world, source[j], position);
      args.weights[at * topk + k] = metadata[j].weight;
      if (!args.cached) {
        args.dst_rows[at * topk + k] = metadata[j].local_expert < 0 ? -1 : metadata[j].dst_row;
        if (k == 0) args.tokens[at] = metadata[j].token;
      }
      if (kPerExpert) continue;
      const i32 row = admit(first_row(args, scratch, source[j]) + position, 0, world.capacity);
      if (row < 0) continue;
      write_entry(args, static_cast<i64>(row) * topk + k, metadata[j]);
    }
  }
}

}  // namespace ep::ht
