// Where every (token, k) of this source goes in HT dispatch, in canonical order at any number of blocks. ep_kernels/routing.py is the
// definition. A block routes its own range of tokens once: numbers of its rows from 0 go to `home`, their counts to the other blocks
// and ranks; when those of the others are there, the numbers move on to the final ones.
//
// A tile of tokens is numbered by all warps, each in order through its part of them, and then moved on by the parts before.
// Worked example, K = 2, tokens [[2, 0], [2, 5]], experts 0-3 on rank 0 and 4-7 on rank 1: ranks [0, 0, 0, 1]; leads, the first k
// with the same rank, [0, 0, 0, 1]: token 0 sends rank 0 one row; positions [0, ., 1, 0]; indices per expert [0, 0, 1, 0].
//
// Memory: a counter is (rank * local_stride + local expert), or num_keys + rank for rows.
#pragma once

constexpr i32 kTileEntries = 2048;
constexpr i32 kTileParts = THREADS / 32;  // of a tile: one for each warp

struct RouteTile {
  i32 key[kTileEntries];       // rank << 16 | local expert, or below 0 as Home.rank
  u16 position[kTileEntries];  // at leads: index of the token's row among its part's rows for that rank
  u16 index[kTileEntries];     // index among its part's rows for that expert
  u8 lead[kTileEntries];       // first k of the token with the same rank
  u8 twins[kTileEntries];      // earlier k of the token with the same key; kMore: there are later ones too
};
constexpr u8 kMore = 0x80;

constexpr u32 kBroken = 1 << 16;

// Shared memory of a block; the stages follow at work.stage_offset. total, offset, row_start: of what arrives here.
struct HtScratch : Scratch {
  RouteTile* tile;
  u16* parts;     // [kTileParts, num_counters] rows of the tile, by part; then of the parts before
  i32* counters;  // [num_counters] rows of this block; then rows of the blocks before it
  i32* first;     // [num_counters] first row of this block's at the destination
  i32* all;       // [num_counters] rows of all sources
  i32* rows;      // [R] rows that each source sends here
  u32* next_unit;     // of this block's own units: the next to be sent
  u32* next_arrival;  // of the rows that arrive: the next to be looked after by this block
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
  scratch.first = scratch.counters + n;
  scratch.all = scratch.first + n;
  scratch.total = scratch.all + world.rank * world.local_stride;
  scratch.start = nullptr;
  scratch.rows = scratch.all + n;
  scratch.row_start = scratch.rows + world.size;
  scratch.offset = scratch.row_start + world.size + 1;
  scratch.next_unit = reinterpret_cast<u32*>(scratch.offset + groups + 1);
  scratch.next_arrival = scratch.next_unit + 1;
  scratch.warps_sent = scratch.next_unit + 2;
  scratch.lacking = scratch.next_unit + 3;
  return scratch;
}

__device__ __forceinline__ i32 tile_tokens(const World& world) { return kTileEntries / world.topk; }

struct Range {
  i32 first, past;
};

// Tokens of a block: a contiguous range.
__device__ __forceinline__ Range block_tokens(const DispatchArgs& args, i32 block, i32 num_blocks) {
  const i64 tokens = args.num_tokens;
  return {static_cast<i32>(tokens * block / num_blocks), static_cast<i32>(tokens * (block + 1) / num_blocks)};
}

// Keys, leads and twins of tokens first .. first + count - 1. All threads; ends with a block barrier.
__device__ __forceinline__ void load_tile(const DispatchArgs& args, RouteTile& tile, i32 first, i32 count) {
  const World& world = args.world;
  for (i32 e = threadIdx.x; e < count * world.topk; e += blockDim.x) {
    const i32 id = args.topk_ids[static_cast<i64>(first) * world.topk + e];
    i32 key = id == -1 ? kNowhere : kInvalid;
    if (id >= 0 && id < world.num_experts) {
      const Expert expert = reinterpret_cast<const Expert*>(world.experts)[id];
      key = expert.rank < 0 ? expert.rank : expert.rank << 16 | expert.slot;
      if (expert.num_copies > 1) {
        const i32 chosen = expert.first_copy + (world.rank + first + e / world.topk) % expert.num_copies;
        key = world.copies_rank[chosen] << 16 | world.copies_slot[chosen];
      }
    }
    tile.key[e] = key;
  }
  __syncthreads();
  for (i32 e = threadIdx.x; e < count * world.topk; e += blockDim.x) {
    const i32 row = e / world.topk * world.topk, key = tile.key[e];
    i32 lead = e - row, twins = 0;
    for (i32 k = world.topk - 1; k >= 0; --k) {
      const i32 other = tile.key[row + k];
      if (k < e - row && other >> 16 == key >> 16) lead = k;
      if (other == key) twins = k < e - row ? twins + 1 : k > e - row ? kMore : twins;
    }
    tile.lead[e] = static_cast<u8>(lead);
    tile.twins[e] = static_cast<u8>(twins);
  }
  __syncthreads();
}

__device__ __forceinline__ i32 expert_counter(const World& world, i32 key) { return (key >> 16) * world.local_stride + (key & 0xFFFF); }

// Part of a tile of `count` tokens that its token t belongs to, and first token of a part.
__device__ __forceinline__ i32 part_of(i32 count, i32 t) { return (kTileParts * (t + 1) - 1) / count; }
__device__ __forceinline__ i32 part_begin(i32 count, i32 part) { return count * part / kTileParts; }

// Each warp numbers the rows of its part of a loaded tile from 0, token by token: what a token's lanes count are different counters.
__device__ __forceinline__ void number_part(const World& world, RouteTile& tile, u16* counters, i32 count) {
  const i32 topk = world.topk, lane = lane_idx();
#pragma unroll 1
  for (i32 t = part_begin(count, warp_idx()); t < part_begin(count, warp_idx() + 1); ++t) {
    const i32 e = t * topk + lane;
    const i32 key = lane < topk ? tile.key[e] : -1;
    const bool lead = key >= 0 && tile.lead[e] == lane;
    const i32 by_rank = num_keys(world) + (key >> 16), by_expert = expert_counter(world, key);
    const u32 rows = lead ? counters[by_rank] : 0, copies = kPerExpert && key >= 0 ? counters[by_expert] : 0;
    __syncwarp();
    if (lead) {
      tile.position[e] = static_cast<u16>(rows);
      counters[by_rank] = static_cast<u16>(rows + 1);
    }
    if (kPerExpert && key >= 0) {
      const u32 twins = tile.twins[e], index = copies + (twins & ~kMore);
      tile.index[e] = static_cast<u16>(index);
      if ((twins & kMore) == 0) counters[by_expert] = static_cast<u16>(index + 1);
    }
    __syncwarp();
  }
}

// counters = rows of this block's tokens; home = where its entries go, numbers counted from the block's first row. counters are 0
// before. All threads; ends with a block barrier.
__device__ __forceinline__ void route_rows(const DispatchArgs& args, const HtScratch& scratch, Range tokens) {
  const World& world = args.world;
  RouteTile& tile = *scratch.tile;
  const i32 n = num_counters(world), topk = world.topk, most = tile_tokens(world);
#pragma unroll 1
  for (i32 token = tokens.first; token < tokens.past; token += most) {
    const i32 count = min(most, tokens.past - token);
  #pragma unroll 1
  for (i32 i = threadIdx.x; i < kTileParts * n; i += blockDim.x) scratch.parts[i] = 0;
    load_tile(args, tile, token, count);
    number_part(world, tile, scratch.parts + warp_idx() * n, count);
    __syncthreads();
#pragma unroll 1
    for (i32 i = first_told(world) + threadIdx.x; i < n; i += blockDim.x) {
      u32 sum = 0;
      for (i32 part = 0; part < kTileParts; ++part) {
        const u32 mine = scratch.parts[part * n + i];
        scratch.parts[part * n + i] = static_cast<u16>(sum);
        sum += mine;
      }
      scratch.all[i] = sum;
    }
    __syncthreads();
    for (i32 e = threadIdx.x; e < count * topk; e += blockDim.x) {
      const i32 key = tile.key[e];
      Home home = {key, -1, -1, -1};
      if (key >= 0) {
        const u16* before = scratch.parts + part_of(count, e / topk) * n;
        const i32 by_rank = num_keys(world) + (key >> 16), by_expert = expert_counter(world, key);
        home = {key >> 16, scratch.counters[by_rank] + before[by_rank] + tile.position[e - e % topk + tile.lead[e]], key & 0xFFFF, 0};
        if (kPerExpert) home.place = scratch.counters[by_expert] + before[by_expert] + tile.index[e];
      }
      args.home[static_cast<i64>(token) * topk + e] = home;
    }
    __syncthreads();
    for (i32 i = first_told(world) + threadIdx.x; i < n; i += blockDim.x) scratch.counters[i] += scratch.all[i];
  }
  __syncthreads();
}

// first[key] = final row, at the destination, of this block's first row for that key; total, offset and row_start of what arrives
// here. From `first` = rows of the sources before, `all`, `rows` and `counters` = rows of the blocks before. All threads.
__device__ __forceinline__ void lay_out_rows(const DispatchArgs& args, HtScratch& scratch) {
  const World& world = args.world;
  const i32 stride = world.local_stride, keys = num_keys(world);
  __syncthreads();
#pragma unroll 1
  for (i32 rank = warp_idx(); LAYOUT == GROUPED && rank < world.size; rank += num_warps()) {
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
  __syncthreads();
#pragma unroll 1
  for (i32 i = first_told(world) + threadIdx.x; i < num_counters(world); i += blockDim.x) {
    i32 row = scratch.first[i] + scratch.counters[i];
    if (LAYOUT == EXPERT_MAJOR && i < keys) row += i % stride * world.capacities[i / stride];
    scratch.first[i] = row;
  }
  __syncthreads();
}

// Final place of an entry of this block.
__device__ __forceinline__ Home settle(const DispatchArgs& args, const HtScratch& scratch, Home home) {
  const World& world = args.world;
  if (home.rank < 0) return home;
  const i32 by_rank = num_keys(world) + home.rank, by_expert = home.rank * world.local_stride + home.slot;
  const i32 in_block = home.position;
  home.position += scratch.counters[by_rank];
  if (LAYOUT == RANK_MAJOR) home.place = world.rank * world.max_tokens + home.position;
  else if (LAYOUT == FLAT) home.place = admit(scratch.first[by_rank] + in_block, 0, world.capacities[home.rank]);
  else home.place = admit(scratch.first[by_expert] + home.place, home.slot, world.capacities[home.rank]);
  return home;
}

// home = final places of this block's entries. All threads; ends with a block barrier.
__device__ __forceinline__ void settle_rows(const DispatchArgs& args, const HtScratch& scratch, Range tokens) {
  constexpr i32 kTogether = 4;
  const i64 past = static_cast<i64>(tokens.past) * args.world.topk;
  for (i64 base = static_cast<i64>(tokens.first) * args.world.topk + threadIdx.x; base < past; base += kTogether * blockDim.x) {
    Home home[kTogether];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * blockDim.x < past) home[j] = args.home[base + j * blockDim.x];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * blockDim.x < past) args.home[base + j * blockDim.x] = settle(args, scratch, home[j]);
  }
  __syncthreads();
}
