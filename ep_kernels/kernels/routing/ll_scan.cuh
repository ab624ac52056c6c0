// Token mask scan: how LL dispatch finds the position of every row. Each block scans all tokens by itself, with one
// barrier between the ids and the first row that leaves. ep_kernels/routing.py is the definition.
//
// A thread per entry (token, k) sets the bit of its peer offset (common/scheduler.cuh) in the token's mask in shared
// memory. Then each warp scans the masks, a lane per token, in chunks of 32 tokens: a ballot per peer offset leaves in
// the lane of that number the mask of tokens that go there, so all positions of a token follow from popcounts; rows of
// earlier chunks are added up on the way.
// Worked example, rank 1 of 2, tokens to ranks {0}, {0, 1}, {1}: peer offset 0 is rank 0, masks 01, 11, 10; ballot of
// offset 1 = 110, so token 2's row is position 1 at rank 1.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/scheduler.cuh"
#include "routing/experts.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// Shared memory of a block. A peer offset indexes what is per destination, so that rows leave in that order.
struct LlScratch : Scratch {
  u64* dst_masks;        // [T, rounded up to whole chunks] peer offsets to which a token goes (bit i)
  u8** row_dst;          // [R] by peer offset: this rank's row packets at that peer
  u8** metadata_dst;     // [R] and its metadata lines
  const u8** recv_base;  // [2] where this rank's own row packets and metadata lines begin; not NETWORK
  i32* expert_table;     // [E] rank << 16 | local expert, kNoReplica, kReplicated
  i32* expert_counts;    // [num_keys] rows per (rank, local expert): only in the block that sends counts
  i32* recv_counts;      // [R, 1 + local_stride] rows from each source, and for each local expert
  u32* expert_masks;     // [num_keys, chunks of M] tokens of an expert (bit of a token in its chunk), null = none
  bool* has_duplicates;  // whether a token names an expert twice
};

__device__ __forceinline__ i32 recv_counts_stride(const World& world) {
  return 1 + (kPerExpert ? world.local_stride : 0);
}

__device__ __forceinline__ i32 num_chunks(const World& world) { return (world.ll_tokens + 31) / 32; }

__device__ __forceinline__ LlScratch make_ll_scratch(const World& world, u8* shared, bool* has_duplicates,
                                                     const u8** recv_base) {
  LlScratch scratch;
  scratch.has_duplicates = has_duplicates;
  scratch.recv_base = recv_base;
  const i32 keys = kPerExpert ? num_keys(world) : 0, groups = kPerExpert ? world.local_stride : 0;
  scratch.routing_id = 0;
  scratch.dst_masks = reinterpret_cast<u64*>(after_waits(world, shared));
  scratch.row_dst = reinterpret_cast<u8**>(scratch.dst_masks + num_chunks(world) * 32);
  scratch.metadata_dst = scratch.row_dst + world.size;
  scratch.expert_table = reinterpret_cast<i32*>(scratch.metadata_dst + world.size);
  scratch.row_start = scratch.expert_table + world.num_experts;
  scratch.expert_counts = scratch.row_start + world.size + 1;
  scratch.start = scratch.expert_counts + keys;
  scratch.total = scratch.start + keys;
  scratch.offset = scratch.total + groups;
  scratch.recv_counts = scratch.offset + groups + 1;
  const bool fits = kPerExpert && keys * num_chunks(world) <= MAX_MASK_WORDS;
  scratch.expert_masks = fits ? reinterpret_cast<u32*>(scratch.recv_counts + world.size * (1 + groups)) : nullptr;
  return scratch;
}

// Routing of a previous handle. After an aborted dispatch its memory may be garbage, and this runs before the abort
// word is known, so out-of-range values become kNoExpert. Together with `dst_row`, which the metadata needs, all four
// words are read on purpose: an unread load register is reused at once, and that stalls the warp until the load is
// complete (docs/lab/kernels/ht.md).
__device__ __forceinline__ i32 key_of(const World& world, const Route& route) {
  const bool valid = route.rank < world.size && route.position >= 0 &&
                     static_cast<u32>(route.local_expert) < static_cast<u32>(world.local_stride);
  return route.rank < 0 ? route.rank : valid ? route.rank << 16 | route.local_expert : kNoExpert;
}

// Ids of a thread's first entries, in flight.
constexpr i32 kPrefetchedIds = 2;
struct PrefetchedIds {
  i32 at[kPrefetchedIds];
};

__device__ __forceinline__ i32 load_id(const DispatchArgs& args, i32 entry) {
  return !args.cached && entry < args.num_tokens * args.world.topk ? args.topk_ids[entry] : kNoExpert;
}

__device__ __forceinline__ PrefetchedIds prefetch_ids(const DispatchArgs& args) {
  PrefetchedIds ids;
#pragma unroll
  for (i32 a = 0; a < kPrefetchedIds; ++a) ids.at[a] = load_id(args, threadIdx.x + a * THREADS);
  return ids;
}

// Calls visit(token, key) for every entry (token, k), a thread per entry; lanes past the last entry pass kNoExpert. All
// threads of a block.
template <class Visit>
__device__ __forceinline__ void for_entries(const DispatchArgs& args, const LlScratch& scratch,
                                            const PrefetchedIds& ids, Divisor topk, Visit visit) {
  const World& world = args.world;
  const i32 entries = args.num_tokens * world.topk;
  auto visit_entry = [&](i32 entry, i32 id) {
    const i32 token = divide(entry, topk);
    i32 key = kNoExpert;
    if (!args.cached) key = key_of(world, scratch.expert_table, id, token);
    else if (entry < entries) key = key_of(world, args.routes[entry]);
    visit(token, key);
  };
  i32 next = load_id(args, threadIdx.x + kPrefetchedIds * THREADS);  // from here on one id is in flight
#pragma unroll
  for (i32 a = 0; a < kPrefetchedIds; ++a)
    if (warp_idx() * 32 + a * THREADS < entries) visit_entry(threadIdx.x + a * THREADS, ids.at[a]);
#pragma unroll 1
  for (i32 entry = threadIdx.x + kPrefetchedIds * THREADS; entry - lane_idx() < entries; entry += THREADS) {
    const i32 id = next;
    next = load_id(args, entry + THREADS);
    visit_entry(entry, id);
  }
}

// Sets the bit of a key's rank in the token's mask; returns whether it was set before. scratch.dst_masks starts as
// zeros; a block barrier must follow the last call.
__device__ __forceinline__ bool set_dst_bit(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  const i32 peer_offset = offset_of_rank(world, key >> 16);
  const u32 bit = 1u << (peer_offset & 31);
  return atomicOr(reinterpret_cast<u32*>(scratch.dst_masks + token) + (peer_offset >> 5), bit) & bit;
}

// State of a warp's scan. Lane i has peer offsets i (low) and 32 + i (high).
struct TokenMaskScan {
  i32 chunk;
  i32 rows_low, rows_high;      // rows to that peer in all earlier chunks
  u32 tokens_low, tokens_high;  // tokens of this chunk that go to it (bit of a token)
};

// Which peers a scan is of: the ranks of a token's experts; or those that get its row, of another host the rail alone.
enum class Of { kRanks, kRows };

// Peer offsets that get the row of a token that goes to `dst_mask`.
__device__ __forceinline__ u64 row_mask(const World& world, u64 dst_mask) {
  const Network& network = world.state->network;
  u64 mask = dst_mask;
#pragma unroll 1
  for (u64 left = network.rails; left != 0; left &= left - 1) {
    const i32 rail = __ffsll(left) - 1;
    const u64 members = network.members[rail];
    mask = (mask & ~members) | (dst_mask & members ? 1ull << rail : 0);
  }
  return mask;
}

template <Of kOf>
__device__ __forceinline__ void load_chunk(const World& world, const LlScratch& scratch, i32 chunk,
                                           TokenMaskScan& scan) {
  u64 dst_mask = scratch.dst_masks[chunk * 32 + lane_idx()];
  if constexpr (NETWORK && kOf == Of::kRows) dst_mask = row_mask(world, dst_mask);
  scan.chunk = chunk;
  scan.tokens_low = transposed(static_cast<u32>(dst_mask), min(world.size, 32));
  if (world.size > 32) scan.tokens_high = transposed(static_cast<u32>(dst_mask >> 32), world.size - 32);
}

template <Of kOf>
__device__ __forceinline__ TokenMaskScan start_scan(const World& world, const LlScratch& scratch) {
  TokenMaskScan scan = {0, 0, 0, 0, 0};
  load_chunk<kOf>(world, scratch, 0, scan);
  return scan;
}

// Advances to `chunk`, which is not before the present one.
template <Of kOf>
__device__ __forceinline__ void scan_to(const World& world, const LlScratch& scratch, i32 chunk, TokenMaskScan& scan) {
#pragma unroll 1
  while (scan.chunk < chunk) {
    scan.rows_low += __popc(scan.tokens_low);
    scan.rows_high += __popc(scan.tokens_high);
    load_chunk<kOf>(world, scratch, scan.chunk + 1, scan);
  }
}

// Destinations of a token: masks of its peer offsets, 0 .. 31 and 32 .. 63; in lane i, its positions at peer offsets i
// and 32 + i, valid where the masks have them.
struct Destinations {
  u32 mask_low, mask_high;
  i32 position_low, position_high;
};

// `token` is of the scan's chunk.
__device__ __forceinline__ Destinations destinations_of(const World& world, const TokenMaskScan& scan, i32 token) {
  const u32 bit = 1u << (token & 31);
  return {__ballot_sync(~0u, scan.tokens_low & bit), world.size > 32 ? __ballot_sync(~0u, scan.tokens_high & bit) : 0,
          scan.rows_low + __popc(scan.tokens_low & (bit - 1)), scan.rows_high + __popc(scan.tokens_high & (bit - 1))};
}

// Value that the lane of a peer offset holds in `low` or `high`. All lanes; each names its own peer offset.
__device__ __forceinline__ i32 value_at_offset(const World& world, i32 low, i32 high, i32 peer_offset) {
  const i32 from_low = __shfl_sync(~0u, low, peer_offset & 31);
  if (world.size <= 32) return from_low;
  const i32 from_high = __shfl_sync(~0u, high, peer_offset & 31);
  return peer_offset < 32 ? from_low : from_high;
}

__device__ __forceinline__ i32 expert_counter(const World& world, i32 key) {
  return (key >> 16) * world.local_stride + (key & 0xFFFF);
}

// Sets a token's bit in the mask of an expert. scratch.expert_masks starts as zeros; a block barrier must follow the
// last call.
__device__ __forceinline__ void set_expert_bit(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  const u32 bit = 1u << (token & 31);
  const u32 before =
      atomicOr(&scratch.expert_masks[expert_counter(world, key) * num_chunks(world) + (token >> 5)], bit);
  if (before & bit) *scratch.has_duplicates = true;
}

// Route.dst_row: rows of this source for the same local expert before (token, k = lane), by expert masks. `key` is this
// lane's, negative past K.
__device__ __forceinline__ i32 dst_row_by_masks(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  if (key < 0) return -1;
  const u32* tokens = scratch.expert_masks + expert_counter(world, key) * num_chunks(world);
  i32 dst_row = __popc(tokens[token >> 5] & ((1u << (token & 31)) - 1));
#pragma unroll 4
  for (i32 chunk = 0; chunk < token >> 5; ++chunk) dst_row += __popc(tokens[chunk]);
  return dst_row;
}

// The same without masks, or where a token names an expert twice: each lane reads every 32nd entry before the token and
// compares it with kTargets of the token's keys at a time.
__device__ __noinline__ i32 dst_row_by_entries(const DispatchArgs& args, const i32* expert_table, i32 token, i32 key) {
  constexpr i32 kTargets = 4;
  const i32 topk = args.world.topk;
  i32 dst_row = 0;
#pragma unroll 1
  for (i32 first = 0; first < topk; first += kTargets) {
    // Some of the token's keys, as all lanes know them.
    i32 target[kTargets], count[kTargets] = {};
#pragma unroll
    for (i32 j = 0; j < kTargets; ++j) target[j] = __shfl_sync(~0u, key, (first + j) & 31);
    // Earlier entries that have one of them.
#pragma unroll 1
    for (i32 e = lane_idx(); e < token * topk; e += 32) {
      const i32 other = key_of(args.world, expert_table, args.topk_ids[e], e / topk);
#pragma unroll
      for (i32 j = 0; j < kTargets; ++j) count[j] += other == target[j];
    }
    // To the lane whose key it is.
#pragma unroll
    for (i32 j = 0; j < kTargets; ++j) {
      const i32 all = __reduce_add_sync(~0u, count[j]);
      if (lane_idx() == first + j) dst_row = all;
    }
  }
  return dst_row + __popc(__match_any_sync(~0u, key) & ((1u << lane_idx()) - 1));
}

}  // namespace ep::ll
