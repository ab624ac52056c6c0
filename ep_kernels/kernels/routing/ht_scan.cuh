// Routing scan of HT dispatch: the final row of every (token, k) of this source, in canonical order at any number of
// blocks. ep_kernels/routing.py is the definition. A block scans its own range of tokens once, tile by tile, and counts
// its rows; once the counts of the other blocks and ranks are known, every route gets its final row.
//
// A thread stands for an entry (token, k) and sets its rank's bit in the token's dst_mask. Then lanes stand for tokens,
// 32 per word: a ballot per rank gives the tokens that go there, so a row's index is a popcount. Indices per expert are
// counted by all warps, each in order through its part of the tile, and then shifted by the counts of the parts before.
// Worked example, K = 2, tokens [[2, 0], [2, 5]], experts 0-3 on rank 0 and 4-7 on rank 1: dst_mask of the tokens {0},
// {0, 1}; tokens 11 go to rank 0, tokens 10 to rank 1; positions [0, 0, 1, 0]; indices per expert [0, 0, 1, 0].
//
// Memory: a counter is (rank * local_stride + local expert), or num_keys + rank for rows.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "routing/experts.cuh"
#include "routing/ht_counts.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

constexpr i32 kTileEntries = 2048;
constexpr i32 kTileParts = THREADS / 32;  // of a tile: one for each warp
constexpr i32 kTileTokens = kTileParts * 32;

struct RouteTile {
  u64 dst_mask[kTileTokens];              // destinations of a token (bit of a rank)
  u32 token_mask[kTileParts][MAX_RANKS];  // tokens of 32 that go to a rank (bit of a token)
  i32 key[kTileEntries];                  // rank << 16 | local expert, or negative as Route.rank
  u16 index[kTileEntries];                // per-expert layouts: index among its part's rows for that expert
  u8 duplicates[kTileEntries];            // and earlier k of the token with the same key; kMore: later ones exist
};
constexpr u8 kMore = 0x80;

constexpr u32 kStoppedWarp = 1 << 16;

// Shared memory of a block; the stages follow at work.stage_offset. total, offset, row_start: of the rows that arrive.
struct DispatchScratch : Scratch {
  RouteTile* tile;
  u16* part_counts;    // [kTileParts, num_counters] rows of the tile per expert, by part; then of the parts before
  i32* tile_prefix;    // [num_counters] rows of this block's tiles before the last
  i32* block_prefix;   // [num_counters] rows of the blocks before this one
  i32* dst_offset;     // [num_counters] rows of this block; of the sources before; the first final row of this block
  i32* all_sources;    // [num_counters] rows of all sources
  i32* source_rows;    // [R] rows that each source sends to this rank
  i32* table;          // [E] table of experts (routing/experts.cuh)
  i32* capacities;     // [R] capacity of each rank
  u32* next_segment;   // work counter of the block: its own segments to send
  u32* next_arrival;   // likewise: rows that arrive
  u32* next_metadata;  // likewise: groups of positions whose metadata are read
  u32* warps_done;     // warps that have finished sending, plus kStoppedWarp for each that was stopped before
  u32* incomplete;     // 1 = metadata or rows did not arrive, or routings differ
};

__device__ __forceinline__ DispatchScratch make_scratch(const World& world, u8* shared) {
  DispatchScratch scratch;
  // Shared memory, one part behind the other: the tile, its prefixes, what counts are made into, work counters.
  const i32 n = num_counters(world), groups = kPerExpert ? world.local_stride : 0;
  scratch.routing_id = 0;
  scratch.tile = reinterpret_cast<RouteTile*>(after_waits(world, shared));
  scratch.part_counts = reinterpret_cast<u16*>(scratch.tile + 1);
  scratch.tile_prefix = reinterpret_cast<i32*>(scratch.part_counts + kTileParts * n);
  scratch.block_prefix = scratch.tile_prefix + n;
  scratch.dst_offset = scratch.block_prefix + n;
  scratch.all_sources = scratch.dst_offset + n;
  scratch.total = scratch.all_sources + world.rank * world.local_stride;
  scratch.start = nullptr;
  scratch.source_rows = scratch.all_sources + n;
  scratch.row_start = scratch.source_rows + world.size;
  scratch.offset = scratch.row_start + world.size + 1;
  scratch.table = scratch.offset + groups + 1;
  scratch.capacities = scratch.table + world.num_experts;
  scratch.next_segment = reinterpret_cast<u32*>(scratch.capacities + world.size);
  scratch.next_arrival = scratch.next_segment + 1;
  scratch.next_metadata = scratch.next_segment + 2;
  scratch.warps_done = scratch.next_segment + 3;
  scratch.incomplete = scratch.next_segment + 4;
  return scratch;
}

__device__ __forceinline__ i32 tile_tokens(const World& world) { return min(kTileEntries / world.topk, kTileTokens); }

struct TokenRange {
  i32 first, end;
};

// Tokens by block: a contiguous range of `quotient` tokens each, and one more in the first `remainder` blocks.
struct TokenSplit {
  i32 quotient, remainder;

  __device__ __forceinline__ i32 max_tokens() const { return quotient + (remainder != 0); }
  __device__ __forceinline__ TokenRange of(i32 block) const {
    const i32 first = block * quotient + min(block, remainder);
    return {first, first + quotient + (block < remainder)};
  }
};

__device__ __forceinline__ TokenSplit split_tokens(i32 num_tokens, i32 num_blocks) {
  const i32 quotient = num_tokens / num_blocks;
  return {quotient, num_tokens - quotient * num_blocks};
}

// ---- one tile ----

// Prefetched ids of a tile: the thread's first entry and every THREADS-th after it.
constexpr i32 kIdUnroll = 6;
struct Ids {
  i32 at[kIdUnroll];
};

__device__ __forceinline__ Ids prefetch_ids(const DispatchArgs& args, i32 first, i32 count, i32 entry) {
  const i32* topk_ids = args.topk_ids + static_cast<i64>(first) * args.world.topk;
  const i32 end = count * args.world.topk;
  Ids ids;
#pragma unroll
  for (i32 j = 0; j < kIdUnroll; ++j) ids.at[j] = entry + j * THREADS < end ? topk_ids[entry + j * THREADS] : -1;
  return ids;
}

// Keys and dst_mask of the `count` tokens from `first` on; `ids`: prefetched from this thread's first entry on.
// tile.dst_mask is 0 before. All threads; ends with a block barrier.
__device__ __forceinline__ void fill_tile(const DispatchArgs& args, const DispatchScratch& scratch, i32 first,
                                          i32 count, Ids ids, Divisor topk) {
  RouteTile& tile = *scratch.tile;
#pragma unroll 1
  for (i32 entry = threadIdx.x; entry < count * topk.value;) {
#pragma unroll
    for (i32 j = 0; j < kIdUnroll; ++j) {
      const i32 e = entry + j * THREADS, token = divide(e, topk);
      if (e >= count * topk.value) break;
      const i32 key = key_of(args.world, scratch.table, ids.at[j], first + token), rank = key >> 16;
      tile.key[e] = key;
      if (key >= 0) atomicOr(reinterpret_cast<u32*>(tile.dst_mask + token) + (rank >> 5), 1u << (rank & 31));
    }
    entry += kIdUnroll * THREADS;
    if (entry < count * topk.value) ids = prefetch_ids(args, first, count, entry);
  }
  __syncthreads();
}

__device__ __forceinline__ i32 expert_counter(const World& world, i32 key) {
  return (key >> 16) * world.local_stride + (key & 0xFFFF);
}

// The part that token t of a tile of `count` tokens belongs to, and the first token of a part.
__device__ __forceinline__ i32 part_of(i32 count, i32 t) { return (kTileParts * (t + 1) - 1) / count; }
__device__ __forceinline__ i32 part_begin(i32 count, i32 part) { return count * part / kTileParts; }

// Earlier k of each entry's token with the same key.
__device__ __forceinline__ void find_duplicates(const World& world, RouteTile& tile, i32 count) {
  for (i32 e = threadIdx.x; e < count * world.topk; e += THREADS) {
    const i32 row = e / world.topk * world.topk, key = tile.key[e];
    i32 duplicates = 0;
    for (i32 k = world.topk - 1; k >= 0; --k)
      if (tile.key[row + k] == key) duplicates = k < e - row ? duplicates + 1 : k > e - row ? kMore : duplicates;
    tile.duplicates[e] = static_cast<u8>(duplicates);
  }
}

// Each warp numbers the rows of its part of a tile by expert from 0, token by token. The lanes of a token update
// different counters.
__device__ __forceinline__ void number_part(const World& world, RouteTile& tile, u16* counters, i32 count) {
  const i32 topk = world.topk, lane = lane_idx();
#pragma unroll 1
  for (i32 t = part_begin(count, warp_idx()); t < part_begin(count, warp_idx() + 1); ++t) {
    const i32 e = t * topk + lane;
    const i32 key = lane < topk ? tile.key[e] : -1;
    const i32 by_expert = expert_counter(world, key);
    const u32 so_far = key >= 0 ? counters[by_expert] : 0;
    __syncwarp();
    if (key >= 0) {
      const u32 duplicates = tile.duplicates[e], index = so_far + (duplicates & ~kMore);
      tile.index[e] = static_cast<u16>(index);
      if ((duplicates & kMore) == 0) counters[by_expert] = static_cast<u16>(index + 1);
    }
    __syncwarp();
  }
}

// Token masks per rank, 32 tokens per warp; per-expert layouts: indices by expert. All threads; ends with a block
// barrier.
__device__ __forceinline__ void number_tile(const World& world, const DispatchScratch& scratch, i32 count) {
  RouteTile& tile = *scratch.tile;
  const u64 dst_mask = tile.dst_mask[threadIdx.x];
  const u32 low = transposed(static_cast<u32>(dst_mask), min(world.size, 32));
  if (lane_idx() < world.size) tile.token_mask[warp_idx()][lane_idx()] = low;
  if (world.size > 32) {
    const u32 high = transposed(static_cast<u32>(dst_mask >> 32), world.size - 32);
    if (lane_idx() + 32 < world.size) tile.token_mask[warp_idx()][lane_idx() + 32] = high;
  }
  if constexpr (kPerExpert) {
    find_duplicates(world, tile, count);
    __syncthreads();
    number_part(world, tile, scratch.part_counts + warp_idx() * num_counters(world), count);
  }
  __syncthreads();
}

// Rows of a tile for a rank; with `token`: of the tokens before it.
__device__ __forceinline__ i32 rows_for_rank(const RouteTile& tile, i32 rank, i32 token = kTileTokens) {
  const i32 own = token >> 5;
  const u32 below = (1u << (token & 31)) - 1;
  i32 rows = 0;
#pragma unroll
  for (i32 word = 0; word < kTileParts; ++word)
    rows += __popc(tile.token_mask[word][rank] & (word < own ? ~0u : word == own ? below : 0));
  return rows;
}

// Rows of a numbered tile for counter i; afterwards `part_counts` holds, per expert, the rows of the parts before.
__device__ __forceinline__ i32 rows_of_counter(const World& world, const DispatchScratch& scratch, i32 i) {
  if (i >= num_keys(world)) return rows_for_rank(*scratch.tile, i - num_keys(world));
  u32 sum = 0;
  for (i32 part = 0; part < kTileParts; ++part) {
    u16* rows = scratch.part_counts + part * num_counters(world) + i;
    const u32 mine = *rows;
    *rows = static_cast<u16>(sum);
    sum += mine;
  }
  return sum;
}

// The route of entry e of a tile of `count` tokens, with indices relative to the block's first row.
__device__ __forceinline__ Route route_in_block(const World& world, const DispatchScratch& scratch, i32 e, i32 count,
                                               Divisor topk) {
  const RouteTile& tile = *scratch.tile;
  const i32 key = tile.key[e];
  if (key < 0) return {key, -1, -1, -1};
  const i32 token = divide(e, topk), rank = key >> 16;
  Route route = {rank, scratch.tile_prefix[num_keys(world) + rank] + rows_for_rank(tile, rank, token), key & 0xFFFF, 0};
  if (!kPerExpert) return route;
  const i32 by_expert = expert_counter(world, key);
  route.dst_row = scratch.tile_prefix[by_expert] +
                scratch.part_counts[part_of(count, token) * num_counters(world) + by_expert] + tile.index[e];
  return route;
}

// ---- the tokens of a block ----

__device__ __forceinline__ void clear_tile(const World& world, const DispatchScratch& scratch) {
  scratch.tile->dst_mask[threadIdx.x] = 0;
#pragma unroll 1
  for (i32 i = threadIdx.x; kPerExpert && i < kTileParts * num_counters(world); i += THREADS)
    scratch.part_counts[i] = 0;
}

// The tokens of the last tile of a range. That tile stays in shared memory until its routes are final.
__device__ __forceinline__ TokenRange last_tile(const World& world, TokenRange tokens) {
  const i32 size = tile_tokens(world), tiles = max(1, (tokens.end - tokens.first + size - 1) / size);
  return {tokens.first + (tiles - 1) * size, tokens.end};
}

// dst_offset = rows of this block's tokens; args.routes = routes of all tiles but the last, relative to the block's
// first row. The first tile is clear, and `ids` has its first ids. All threads; ends with a block barrier.
__device__ __forceinline__ void scan_tokens(const DispatchArgs& args, const DispatchScratch& scratch,
                                            TokenRange tokens, TokenRange last, Ids ids, Divisor topk) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 token = tokens.first;; token += tile_tokens(world)) {
    // Count the tile's routes, and number them.
    const i32 count = min(tile_tokens(world), tokens.end - token);
    fill_tile(args, scratch, token, count, ids, topk);
    number_tile(world, scratch, count);
    for (i32 i = first_counter(world) + threadIdx.x; i < num_counters(world); i += THREADS)
      scratch.dst_offset[i] = scratch.tile_prefix[i] + rows_of_counter(world, scratch, i);
    __syncthreads();
    // The last tile stays in shared memory.
    if (__builtin_expect(token == last.first, 1)) return;
    // Save the routes; the next tile begins where this one ended, and its ids are in flight.
#pragma unroll 1
    for (i32 e = threadIdx.x; e < count * topk.value; e += THREADS)
      args.routes[static_cast<i64>(token) * topk.value + e] = route_in_block(world, scratch, e, count, topk);
    __syncthreads();
    for (i32 i = first_counter(world) + threadIdx.x; i < num_counters(world); i += THREADS)
      scratch.tile_prefix[i] = scratch.dst_offset[i];
    clear_tile(world, scratch);
    ids = prefetch_ids(args, token + count, min(tile_tokens(world), tokens.end - token - count), threadIdx.x);
    __syncthreads();
  }
}

// dst_offset[counter] = first final row, at the destination, of this block's rows; total, offset and row_start of the
// rows that arrive. From dst_offset = rows of the sources before, all_sources, source_rows and block_prefix. Count
// warps.
__device__ __forceinline__ void finalize_offsets(const DispatchArgs& args, DispatchScratch& scratch) {
  const World& world = args.world;
  const i32 stride = world.local_stride, keys = num_keys(world);
  sync_count_warps();
  // GROUPED: aligned prefix of each rank's experts, a warp per rank.
#pragma unroll 1
  for (i32 rank = count_warp_idx(); LAYOUT == GROUPED && rank < world.size; rank += num_count_warps()) {
    i32 carried = 0;
#pragma unroll 1
    for (i32 base = 0; base < stride; base += 32) {
      const i32 e = base + lane_idx(),
                mine = e < stride ? aligned(scratch.all_sources[rank * stride + e], world.alignment) : 0;
      i32 sum = mine;
#pragma unroll
      for (i32 step = 1; step < 32; step *= 2) {
        const i32 below = __shfl_up_sync(~0u, sum, step);
        if (lane_idx() >= step) sum += below;
      }
      if (e < stride) scratch.dst_offset[rank * stride + e] += carried + sum - mine;
      if (rank == world.rank && e < world.num_local) scratch.offset[e] = carried + sum - mine;
      carried += __shfl_sync(~0u, sum, 31);
    }
    if (rank == world.rank && lane_idx() == 0) scratch.offset[world.num_local] = carried;
  }
  // Rows from the sources before each.
  if (warp_idx() == num_warps() - 1)
    scratch.row_start[world.size] =
        prefix_sum(world.size, scratch.row_start, [&](i32 s) { return scratch.source_rows[s]; });
  sync_count_warps();
  // This block's rows begin behind those of the blocks before it.
#pragma unroll 1
  for (i32 i = first_counter(world) + count_thread_idx(); i < num_counters(world); i += num_count_warps() * 32) {
    i32 row = scratch.dst_offset[i] + scratch.block_prefix[i];
    if (LAYOUT == EXPERT_MAJOR && i < keys) row += i % stride * scratch.capacities[i / stride];
    scratch.dst_offset[i] = row;
  }
}

// The final route from one that is relative to the block's first row.
__device__ __forceinline__ Route final_route(const DispatchArgs& args, const DispatchScratch& scratch, Route route) {
  const World& world = args.world;
  if (route.rank < 0) return route;
  const i32 by_rank = num_keys(world) + route.rank, by_expert = route.rank * world.local_stride + route.local_expert;
  const i32 in_block = route.position;
  route.position += scratch.block_prefix[by_rank];
  if (LAYOUT == RANK_MAJOR) route.dst_row = world.rank * world.max_tokens + route.position;
  else if (LAYOUT == FLAT)
    route.dst_row = admit(scratch.dst_offset[by_rank] + in_block, 0, scratch.capacities[route.rank]);
  else
    route.dst_row =
        admit(scratch.dst_offset[by_expert] + route.dst_row, route.local_expert, scratch.capacities[route.rank]);
  return route;
}

// args.routes = final routes of this block's entries. All threads; ends with a block barrier.
__device__ __forceinline__ void finalize_routes(const DispatchArgs& args, const DispatchScratch& scratch,
                                                TokenRange tokens, TokenRange last, Divisor topk) {
  constexpr i32 kUnroll = 4;
  const i64 first = static_cast<i64>(last.first) * topk.value;
#pragma unroll 1
  for (i64 base = static_cast<i64>(tokens.first) * topk.value + threadIdx.x; __builtin_expect(base < first, 0);
       base += kUnroll * THREADS) {
    Route route[kUnroll];
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j)
      if (base + j * THREADS < first) route[j] = args.routes[base + j * THREADS];
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j)
      if (base + j * THREADS < first) args.routes[base + j * THREADS] = final_route(args, scratch, route[j]);
  }
  const i32 count = last.end - last.first;
#pragma unroll 1
  for (i32 e = threadIdx.x; e < count * topk.value; e += THREADS)
    args.routes[first + e] = final_route(args, scratch, route_in_block(args.world, scratch, e, count, topk));
  __syncthreads();
}

}  // namespace ep::ht
