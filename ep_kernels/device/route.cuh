// Where every (token, k) of this source goes, tile by tile, in canonical order at any number of blocks.
// ep_kernels/routing.py is the definition. Worked example, K = 2, tokens [[2, 0], [2, 5]], experts 0-3 on rank 0 and 4-7 on
// rank 1: rank = [0, 0, 0, 1], lead = [0, 0, 0, 1] (token 0 sends rank 0 one row, at its k = 0), position = [0, ., 1, 0],
// expert_index = [0, 0, 1, 0].
//
// Memory: counters live in shared memory; a key is (rank * local_stride + local expert), or num_keys + rank for rows.
#pragma once

constexpr i32 kTileEntries = 1024;
constexpr i32 kNowhere = -1, kGone = -2, kInvalid = -3;  // Home.rank without a destination

// One logical expert: where it is, or where its active copies are listed; one 16-byte load.
struct alignas(16) Expert {
  i32 rank;  // kGone without an active copy
  i32 slot;
  i32 num_copies;
  i32 first_copy;
};

struct RouteTile {
  i32 rank[kTileEntries];          // destination, or below 0 as in Home
  i32 slot[kTileEntries];          // local expert there
  i32 lead[kTileEntries];          // first k of the token with the same destination
  i32 position[kTileEntries];      // at lead entries: index of the token's row among this source's rows for that rank
  i32 expert_index[kTileEntries];  // index among this source's rows for that expert
  i32 place[kTileEntries];         // final row at the destination, -1 = dropped (HT)
};

__device__ __forceinline__ i32 num_keys(const World& world) { return world.size * world.local_stride; }
__device__ __forceinline__ i32 num_counters(const World& world) { return num_keys(world) + world.size; }
__device__ __forceinline__ i32 tile_tokens(const World& world) { return kTileEntries / world.topk; }

// First k of the token with the same destination, for every entry of the tile.
__device__ __forceinline__ void find_leads(RouteTile& tile, i32 entries, i32 topk) {
  for (i32 e = threadIdx.x; e < entries; e += blockDim.x) {
    const i32 row = e / topk * topk;
    i32 lead = e - row;
    for (i32 k = e - row - 1; k >= 0; --k)
      if (tile.rank[row + k] == tile.rank[e]) lead = k;
    tile.lead[e] = lead;
  }
}

// Fills rank, slot and lead of tokens first .. first + count - 1. All threads of the block; ends with a block barrier.
__device__ __forceinline__ void load_tile(const DispatchArgs& args, RouteTile& tile, i32 first, i32 count) {
  const World& world = args.world;
  const i32 topk = world.topk;
  __syncthreads();
  for (i32 e = threadIdx.x; e < count * topk; e += blockDim.x) {
    const i32 token = first + e / topk;
    const i32 id = args.topk_ids[static_cast<i64>(first) * topk + e];
    i32 rank = id == -1 ? kNowhere : kInvalid, slot = -1;
    if (id >= 0 && id < world.num_experts) {
      const Expert expert = reinterpret_cast<const Expert*>(world.experts)[id];
      rank = expert.rank;
      slot = expert.slot;
      if (expert.num_copies > 1) {
        const i32 chosen = expert.first_copy + (world.rank + token) % expert.num_copies;
        rank = world.copies_rank[chosen];
        slot = world.copies_slot[chosen];
      }
    }
    tile.rank[e] = rank;
    tile.slot[e] = slot;
  }
  __syncthreads();
  find_leads(tile, count * topk, topk);
  __syncthreads();
}

// Fills the whole tile from the handle of an earlier dispatch: nothing is routed, counted or ordered again. As load_tile.
__device__ __forceinline__ void load_tile_again(const DispatchArgs& args, RouteTile& tile, i32 first, i32 count) {
  const i32 entries = count * args.world.topk;
  __syncthreads();
  for (i32 e = threadIdx.x; e < entries; e += blockDim.x) {
    const Home home = args.home[static_cast<i64>(first) * args.world.topk + e];
    tile.rank[e] = home.rank;
    tile.slot[e] = home.slot;
    tile.position[e] = home.position;
    tile.expert_index[e] = tile.place[e] = home.place;
  }
  __syncthreads();
  find_leads(tile, entries, args.world.topk);
  __syncthreads();
}

// Adds the tile's rows to the counters, in any order.
__device__ __forceinline__ void count_tile(const World& world, const RouteTile& tile, i32 count, i32* counters) {
  for (i32 e = threadIdx.x; e < count * world.topk; e += blockDim.x) {
    const i32 rank = tile.rank[e];
    if (rank < 0) continue;
    atomicAdd(&counters[rank * world.local_stride + tile.slot[e]], 1);
    if (tile.lead[e] == e % world.topk) atomicAdd(&counters[num_keys(world) + rank], 1);
  }
}

// One warp walks the tile in order: index[e] = counters[key(e)]++ for every entry with key(e) >= 0.
template <class Key>
__device__ __forceinline__ void number_entries(i32 num_entries, i32* counters, i32* index, Key key_of) {
  const u32 below = (1u << lane_idx()) - 1;
  for (i32 base = 0; base < num_entries; base += 32) {
    const i32 e = base + lane_idx();
    const i32 key = e < num_entries ? key_of(e) : -1;
    const u32 same = __match_any_sync(~0u, key);
    const i32 before = key >= 0 ? counters[key] : 0;
    __syncwarp();
    if (key >= 0) {
      index[e] = before + __popc(same & below);
      if ((same & below) == 0) counters[key] = before + __popc(same);
    }
    __syncwarp();
  }
}

// Numbers the tile's rows from the counters on and moves the counters past them. Ends with a block barrier.
__device__ __forceinline__ void order_tile(const World& world, RouteTile& tile, i32 count, i32* counters) {
  const i32 entries = count * world.topk;
  __syncthreads();
  if (warp_idx() == 0) {
    number_entries(entries, counters, tile.expert_index, [&](i32 e) {
      return tile.rank[e] >= 0 ? tile.rank[e] * world.local_stride + tile.slot[e] : -1;
    });
  } else if (warp_idx() == 1) {
    number_entries(entries, counters, tile.position, [&](i32 e) {
      return tile.rank[e] >= 0 && tile.lead[e] == e % world.topk ? num_keys(world) + tile.rank[e] : -1;
    });
  }
  __syncthreads();
}

// What the source keeps of its own tokens (unless it has it from a handle): home [T, K], of which `places` is tile.place or
// tile.expert_index; and what it tells the caller: valid [T], ids out of range. The first `skip` tokens of the tile are
// another block's to record.
__device__ __forceinline__ void record_tile(const DispatchArgs& args, const RouteTile& tile, const i32* places, i32 skip,
                                            i32 first, i32 count) {
  const i32 topk = args.world.topk;
  for (i32 e = skip * topk + threadIdx.x; e < count * topk; e += blockDim.x) {
    const i32 rank = tile.rank[e];
    if (rank == kInvalid) atomicAdd(&args.world.state->invalid_ids, 1ull);
    if (args.cached) continue;
    Home home = {rank, -1, -1, -1};
    if (rank >= 0) home = {rank, tile.position[e - e % topk + tile.lead[e]], tile.slot[e], places[e]};
    args.home[static_cast<i64>(first) * topk + e] = home;
  }
  for (i32 t = skip + threadIdx.x; t < count; t += blockDim.x) {
    bool valid = true;
    for (i32 k = 0; k < topk; ++k) valid = valid && tile.rank[t * topk + k] != kGone;
    args.valid[first + t] = valid;
  }
}
