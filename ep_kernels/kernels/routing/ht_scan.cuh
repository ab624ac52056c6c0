// Where every (token, k) of this source goes in HT dispatch, in canonical order at any number of blocks.
// ep_kernels/routing.py is the definition. A block routes its own range of tokens once, tile by tile, and counts its
// rows; when the counts of the other blocks and ranks are there, every entry of `home` is given its final place.
//
// A thread stands for an entry (token, k) and notes its rank at the token. Then lanes stand for tokens, 32 of which are
// a chunk: a ballot per rank says which of them go there, so a popcount is a row's number. Numbers per expert are
// counted, by all warps, each in order through its part of the tile, and then moved on by the parts before.
// Worked example, K = 2, tokens [[2, 0], [2, 5]], experts 0-3 on rank 0 and 4-7 on rank 1: ranks of the tokens {0}, {0,
// 1}; of the chunk tokens 11 go to rank 0, 10 to rank 1; positions [0, 0, 1, 0]; indices per expert [0, 0, 1, 0].
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
  u64 ranks[kTileTokens];             // that a token goes to (bit of a rank)
  u32 tokens[kTileParts][MAX_RANKS];  // of a chunk, that go to a rank (bit of a token)
  i32 key[kTileEntries];              // rank << 16 | local expert, or below 0 as Home.rank
  u16 index[kTileEntries];            // per-expert layouts: index among its part's rows for that expert
  u8 twins[kTileEntries];             // and earlier k of the token with the same key; kMore: there are later ones too
};
constexpr u8 kMore = 0x80;

constexpr u32 kBroken = 1 << 16;

// Shared memory of a block; the stages follow at work.stage_offset. total, offset, row_start: of what arrives here.
struct HtScratch : Scratch {
  RouteTile* tile;
  u16* parts;     // [kTileParts, num_counters] rows of the tile per expert, by part; then of the parts before
  i32* counters;  // [num_counters] rows of this block's tiles before the last
  i32* before;    // [num_counters] rows of the blocks before this one
  i32* first;     // [num_counters] rows of this block; then the first row of this rank's at the destination
  i32* all;       // [num_counters] rows of all sources
  i32* rows;      // [R] rows that each source sends here
  i32* table;     // [E] where experts are (routing/experts.cuh)
  i32* room;      // [R] capacity of each rank
  u32* next_unit;     // of this block's own units: the next to be sent
  u32* next_arrival;  // of the rows that arrive: the next to be looked after by this block
  u32* next_record;   // of the positions whose records are worked up: the next few, likewise
  u32* warps_sent;    // warps that have ended, and kBroken for each that was stopped before it had sent all
  u32* lacking;       // 1 = records or rows did not come, or routings differ
};

__device__ __forceinline__ HtScratch carve_ht(const World& world, u8* shared) {
  HtScratch scratch;
  const i32 n = num_counters(world), groups = kPerExpert ? world.local_stride : 0;
  scratch.origin = 0;
  scratch.tile = reinterpret_cast<RouteTile*>(after_waits(world, shared));
  scratch.parts = reinterpret_cast<u16*>(scratch.tile + 1);
  scratch.counters = reinterpret_cast<i32*>(scratch.parts + kTileParts * n);
  scratch.before = scratch.counters + n;
  scratch.first = scratch.before + n;
  scratch.all = scratch.first + n;
  scratch.total = scratch.all + world.rank * world.local_stride;
  scratch.start = nullptr;
  scratch.rows = scratch.all + n;
  scratch.row_start = scratch.rows + world.size;
  scratch.offset = scratch.row_start + world.size + 1;
  scratch.table = scratch.offset + groups + 1;
  scratch.room = scratch.table + world.num_experts;
  scratch.next_unit = reinterpret_cast<u32*>(scratch.room + world.size);
  scratch.next_arrival = scratch.next_unit + 1;
  scratch.next_record = scratch.next_unit + 2;
  scratch.warps_sent = scratch.next_unit + 3;
  scratch.lacking = scratch.next_unit + 4;
  return scratch;
}

__device__ __forceinline__ i32 tile_tokens(const World& world) { return min(kTileEntries / world.topk, kTileTokens); }

struct Range {
  i32 first, past;
};

// Tokens of all blocks: so many each, a contiguous range, and one more in the first blocks.
struct Split {
  i32 least, more;

  __device__ __forceinline__ i32 most() const { return least + (more != 0); }
  __device__ __forceinline__ Range of(i32 block) const {
    const i32 first = block * least + min(block, more);
    return {first, first + least + (block < more)};
  }
};

__device__ __forceinline__ Split split_tokens(i32 num_tokens, i32 num_blocks) {
  const i32 least = num_tokens / num_blocks;
  return {least, num_tokens - least * num_blocks};
}

// ---- one tile ----

// Ids of some entries of a tile, this thread's first and every THREADS-th behind it, on their way.
constexpr i32 kIdsTogether = 6;
struct Ids {
  i32 at[kIdsTogether];
};

__device__ __forceinline__ Ids ask_ids(const DispatchArgs& args, i32 first, i32 count, i32 entry) {
  const i32* ids = args.topk_ids + static_cast<i64>(first) * args.world.topk;
  const i32 past = count * args.world.topk;
  Ids asked;
#pragma unroll
  for (i32 j = 0; j < kIdsTogether; ++j) asked.at[j] = entry + j * THREADS < past ? ids[entry + j * THREADS] : -1;
  return asked;
}

// Keys of the `count` tokens from `first` on, and the ranks that each goes to; `ahead`: from this thread's first entry
// on. tile.ranks is 0 before. All threads; ends with a block barrier.
__device__ __forceinline__ void fill_tile(const DispatchArgs& args, const HtScratch& scratch, i32 first, i32 count,
                                          Ids ahead, Divisor topk) {
  RouteTile& tile = *scratch.tile;
#pragma unroll 1
  for (i32 entry = threadIdx.x; entry < count * topk.value;) {
#pragma unroll
    for (i32 j = 0; j < kIdsTogether; ++j) {
      const i32 e = entry + j * THREADS, token = divide(e, topk);
      if (e >= count * topk.value) break;
      const i32 key = key_of(args.world, scratch.table, ahead.at[j], first + token), rank = key >> 16;
      tile.key[e] = key;
      if (key >= 0) atomicOr(reinterpret_cast<u32*>(tile.ranks + token) + (rank >> 5), 1u << (rank & 31));
    }
    entry += kIdsTogether * THREADS;
    if (entry < count * topk.value) ahead = ask_ids(args, first, count, entry);
  }
  __syncthreads();
}

__device__ __forceinline__ i32 expert_counter(const World& world, i32 key) {
  return (key >> 16) * world.local_stride + (key & 0xFFFF);
}

// Part of a tile of `count` tokens that its token t belongs to, and first token of a part.
__device__ __forceinline__ i32 part_of(i32 count, i32 t) { return (kTileParts * (t + 1) - 1) / count; }
__device__ __forceinline__ i32 part_begin(i32 count, i32 part) { return count * part / kTileParts; }

// Earlier k of each entry's token with the same key.
__device__ __forceinline__ void find_twins(const World& world, RouteTile& tile, i32 count) {
  for (i32 e = threadIdx.x; e < count * world.topk; e += THREADS) {
    const i32 row = e / world.topk * world.topk, key = tile.key[e];
    i32 twins = 0;
    for (i32 k = world.topk - 1; k >= 0; --k)
      if (tile.key[row + k] == key) twins = k < e - row ? twins + 1 : k > e - row ? kMore : twins;
    tile.twins[e] = static_cast<u8>(twins);
  }
}

// Each warp numbers the rows of its part of a tile by expert from 0, token by token: what a token's lanes count are
// different counters.
__device__ __forceinline__ void number_part(const World& world, RouteTile& tile, u16* counters, i32 count) {
  const i32 topk = world.topk, lane = lane_idx();
#pragma unroll 1
  for (i32 t = part_begin(count, warp_idx()); t < part_begin(count, warp_idx() + 1); ++t) {
    const i32 e = t * topk + lane;
    const i32 key = lane < topk ? tile.key[e] : -1;
    const i32 by_expert = expert_counter(world, key);
    const u32 copies = key >= 0 ? counters[by_expert] : 0;
    __syncwarp();
    if (key >= 0) {
      const u32 twins = tile.twins[e], index = copies + (twins & ~kMore);
      tile.index[e] = static_cast<u16>(index);
      if ((twins & kMore) == 0) counters[by_expert] = static_cast<u16>(index + 1);
    }
    __syncwarp();
  }
}

// Which tokens go to which rank, a chunk per warp; per-expert layouts: numbers by expert. All threads; ends with a
// block barrier.
__device__ __forceinline__ void number_tile(const World& world, const HtScratch& scratch, i32 count) {
  RouteTile& tile = *scratch.tile;
  const u64 ranks = tile.ranks[threadIdx.x];
  const u32 low = transposed(static_cast<u32>(ranks), min(world.size, 32));
  if (lane_idx() < world.size) tile.tokens[warp_idx()][lane_idx()] = low;
  if (world.size > 32) {
    const u32 high = transposed(static_cast<u32>(ranks >> 32), world.size - 32);
    if (lane_idx() + 32 < world.size) tile.tokens[warp_idx()][lane_idx() + 32] = high;
  }
  if constexpr (kPerExpert) {
    find_twins(world, tile, count);
    __syncthreads();
    number_part(world, tile, scratch.parts + warp_idx() * num_counters(world), count);
  }
  __syncthreads();
}

// Rows of a tile for a rank; of its tokens before `token`, where one is given.
__device__ __forceinline__ i32 rows_for(const RouteTile& tile, i32 rank, i32 token = kTileTokens) {
  const i32 own = token >> 5;
  const u32 below = (1u << (token & 31)) - 1;
  i32 rows = 0;
#pragma unroll
  for (i32 chunk = 0; chunk < kTileParts; ++chunk)
    rows += __popc(tile.tokens[chunk][rank] & (chunk < own ? ~0u : chunk == own ? below : 0));
  return rows;
}

// Rows of a numbered tile for counter i; parts then hold, per expert, those of the parts before.
__device__ __forceinline__ i32 rows_of(const World& world, const HtScratch& scratch, i32 i) {
  if (i >= num_keys(world)) return rows_for(*scratch.tile, i - num_keys(world));
  u32 sum = 0;
  for (i32 part = 0; part < kTileParts; ++part) {
    u16* rows = scratch.parts + part * num_counters(world) + i;
    const u32 mine = *rows;
    *rows = static_cast<u16>(sum);
    sum += mine;
  }
  return sum;
}

// Where entry e of a tile of `count` tokens goes, numbers counted from the block's first row.
__device__ __forceinline__ Home home_in_block(const World& world, const HtScratch& scratch, i32 e, i32 count,
                                              Divisor topk) {
  const RouteTile& tile = *scratch.tile;
  const i32 key = tile.key[e];
  if (key < 0) return {key, -1, -1, -1};
  const i32 token = divide(e, topk), rank = key >> 16;
  Home home = {rank, scratch.counters[num_keys(world) + rank] + rows_for(tile, rank, token), key & 0xFFFF, 0};
  if (!kPerExpert) return home;
  const i32 by_expert = expert_counter(world, key);
  home.place = scratch.counters[by_expert] + scratch.parts[part_of(count, token) * num_counters(world) + by_expert] +
               tile.index[e];
  return home;
}

// ---- a block's tokens ----

__device__ __forceinline__ void clear_tile(const World& world, const HtScratch& scratch) {
  scratch.tile->ranks[threadIdx.x] = 0;
#pragma unroll 1
  for (i32 i = threadIdx.x; kPerExpert && i < kTileParts * num_counters(world); i += THREADS) scratch.parts[i] = 0;
}

// Of a range, the tokens of the last tile, which stays in shared memory until its entries are settled.
__device__ __forceinline__ Range last_tile(const World& world, Range tokens) {
  const i32 most = tile_tokens(world), tiles = max(1, (tokens.past - tokens.first + most - 1) / most);
  return {tokens.first + (tiles - 1) * most, tokens.past};
}

// first = rows of this block's tokens; home = where the entries of all tiles but the last go, numbers counted from the
// block's first row. The first tile is clear, and `ahead` has its first ids. All threads; ends with a block barrier.
__device__ __forceinline__ void route_rows(const DispatchArgs& args, const HtScratch& scratch, Range tokens, Range last,
                                           Ids ahead, Divisor topk) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 token = tokens.first;; token += tile_tokens(world)) {
    const i32 count = min(tile_tokens(world), tokens.past - token);
    fill_tile(args, scratch, token, count, ahead, topk);
    number_tile(world, scratch, count);
    for (i32 i = first_told(world) + threadIdx.x; i < num_counters(world); i += THREADS)
      scratch.first[i] = scratch.counters[i] + rows_of(world, scratch, i);
    __syncthreads();
    if (__builtin_expect(token == last.first, 1)) return;
#pragma unroll 1
    for (i32 e = threadIdx.x; e < count * topk.value; e += THREADS)
      args.home[static_cast<i64>(token) * topk.value + e] = home_in_block(world, scratch, e, count, topk);
    __syncthreads();
    for (i32 i = first_told(world) + threadIdx.x; i < num_counters(world); i += THREADS)
      scratch.counters[i] = scratch.first[i];
    clear_tile(world, scratch);
    ahead = ask_ids(args, token + count, min(tile_tokens(world), tokens.past - token - count), threadIdx.x);
    __syncthreads();
  }
}

// first[key] = final row, at the destination, of this rank's first row for that key; total, offset and row_start of
// what arrives here. From `first` = rows of the sources before, `all`, `rows` and `before`. The crew.
__device__ __forceinline__ void lay_out_rows(const DispatchArgs& args, HtScratch& scratch) {
  const World& world = args.world;
  const i32 stride = world.local_stride, keys = num_keys(world);
  crew_sync();
#pragma unroll 1
  for (i32 rank = crew_warp(); LAYOUT == GROUPED && rank < world.size; rank += crew_warps()) {
    i32 carried = 0;
#pragma unroll 1
    for (i32 base = 0; base < stride; base += 32) {
      const i32 e = base + lane_idx(), mine = e < stride ? aligned(scratch.all[rank * stride + e], world.alignment) : 0;
      i32 sum = mine;
#pragma unroll
      for (i32 step = 1; step < 32; step *= 2) {
        const i32 below = __shfl_up_sync(~0u, sum, step);
        if (lane_idx() >= step) sum += below;
      }
      if (e < stride) scratch.first[rank * stride + e] += carried + sum - mine;
      if (rank == world.rank && e < world.num_local) scratch.offset[e] = carried + sum - mine;
      carried += __shfl_sync(~0u, sum, 31);
    }
    if (rank == world.rank && lane_idx() == 0) scratch.offset[world.num_local] = carried;
  }
  if (warp_idx() == num_warps() - 1)
    scratch.row_start[world.size] = prefix_sum(world.size, scratch.row_start, [&](i32 s) { return scratch.rows[s]; });
  crew_sync();
#pragma unroll 1
  for (i32 i = first_told(world) + crew_thread(); i < num_counters(world); i += crew_warps() * 32) {
    i32 row = scratch.first[i] + scratch.before[i];
    if (LAYOUT == EXPERT_MAJOR && i < keys) row += i % stride * scratch.room[i / stride];
    scratch.first[i] = row;
  }
}

// Final place of an entry of this block, whose numbers count from the block's first row.
__device__ __forceinline__ Home settle(const DispatchArgs& args, const HtScratch& scratch, Home home) {
  const World& world = args.world;
  if (home.rank < 0) return home;
  const i32 by_rank = num_keys(world) + home.rank, by_expert = home.rank * world.local_stride + home.slot;
  const i32 in_block = home.position;
  home.position += scratch.before[by_rank];
  if (LAYOUT == RANK_MAJOR) home.place = world.rank * world.max_tokens + home.position;
  else if (LAYOUT == FLAT) home.place = admit(scratch.first[by_rank] + in_block, 0, scratch.room[home.rank]);
  else home.place = admit(scratch.first[by_expert] + home.place, home.slot, scratch.room[home.rank]);
  return home;
}

// home = final places of this block's entries. All threads; ends with a block barrier.
__device__ __forceinline__ void settle_rows(const DispatchArgs& args, const HtScratch& scratch, Range tokens,
                                            Range last, Divisor topk) {
  constexpr i32 kTogether = 4;
  const i64 first = static_cast<i64>(last.first) * topk.value;
#pragma unroll 1
  for (i64 base = static_cast<i64>(tokens.first) * topk.value + threadIdx.x; __builtin_expect(base < first, 0);
       base += kTogether * THREADS) {
    Home home[kTogether];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * THREADS < first) home[j] = args.home[base + j * THREADS];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * THREADS < first) args.home[base + j * THREADS] = settle(args, scratch, home[j]);
  }
  const i32 count = last.past - last.first;
#pragma unroll 1
  for (i32 e = threadIdx.x; e < count * topk.value; e += THREADS)
    args.home[first + e] = settle(args, scratch, home_in_block(args.world, scratch, e, count, topk));
  __syncthreads();
}

}  // namespace ep::ht
