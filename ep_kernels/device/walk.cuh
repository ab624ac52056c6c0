// How low-latency dispatch finds out where rows go: each warp for itself, in registers. No block barrier, no counters in memory
// stand between the ids and the first row that leaves. ep_kernels/routing.py is the definition.
//
// A lane stands for a token: 32 tokens are a chunk, and a ballot per rank numbers their rows. A warp that has rows of later
// chunks counts those before on its way.
// Worked example, 2 ranks, tokens to ranks {0}, {0, 1}, {1}: masks 01, 11, 10; ballot of rank 1 = 110, so token 2's row is
// position 1 there.
#pragma once

constexpr i32 kChoose = -4;  // in the table: several copies, which take turns

// Shared memory of a block.
struct LlScratch : Scratch {
  i32* table;    // [E] rank << 16 | local expert, kGone, kChoose
  i32* before;   // [num_keys] rows per (rank, local expert): the block that tells
  i32* arrived;  // [R, 1 + local_stride] rows from each source, and for each local expert
};

__device__ __forceinline__ i32 arrived_stride(const World& world) { return 1 + (kPerExpert ? world.local_stride : 0); }

__device__ __forceinline__ LlScratch carve_ll(const World& world, u8* shared) {
  LlScratch scratch;
  const i32 keys = kPerExpert ? num_keys(world) : 0, groups = kPerExpert ? world.local_stride : 0;
  scratch.origin = 0;
  scratch.table = reinterpret_cast<i32*>(after_waits(world, shared));
  scratch.row_start = scratch.table + world.num_experts;
  scratch.before = scratch.row_start + world.size + 1;
  scratch.start = scratch.before + keys;
  scratch.total = scratch.start + keys;
  scratch.offset = scratch.total + groups;
  scratch.arrived = scratch.offset + groups + 1;
  return scratch;
}

// What does not change while kernels run. All threads; a block barrier follows.
__device__ __forceinline__ void fill_table(const World& world, const LlScratch& scratch) {
  for (i32 i = threadIdx.x; i < world.num_experts; i += THREADS) {
    const Expert expert = reinterpret_cast<const Expert*>(world.experts)[i];
    scratch.table[i] = expert.num_copies > 1 ? kChoose : expert.rank < 0 ? expert.rank : expert.rank << 16 | expert.slot;
  }
}

__device__ __noinline__ i32 choose_copy(const World& world, i32 id, i32 token) {
  const Expert expert = reinterpret_cast<const Expert*>(world.experts)[id];
  const i32 chosen = expert.first_copy + (world.rank + token) % expert.num_copies;
  return world.copies_rank[chosen] << 16 | world.copies_slot[chosen];
}

// rank << 16 | local expert of an id, below 0 as Home.rank; kChoose is left to choose_copy. No branch.
__device__ __forceinline__ i32 look_up(const World& world, const LlScratch& scratch, i32 id) {
  const bool known = static_cast<u32>(id) < static_cast<u32>(world.num_experts);
  const i32 key = scratch.table[known ? id : 0];
  return known ? key : id == -1 ? kNowhere : kInvalid;
}

__device__ __forceinline__ i32 key_of(const World& world, const LlScratch& scratch, i32 id, i32 token) {
  const i32 key = look_up(world, scratch, id);
  return key == kChoose ? choose_copy(world, id, token) : key;
}

// Of a routing used again. After a dispatch that was stopped its memory may hold anything, and the abort word is not here yet
// when this is looked at: what cannot be is nowhere.
__device__ __forceinline__ i32 key_of(const World& world, const Home& home) {
  const bool known = home.rank < world.size && static_cast<u32>(home.slot) < static_cast<u32>(world.local_stride);
  return home.rank < 0 ? home.rank : known ? home.rank << 16 | home.slot : kNowhere;
}

// Calls visit(key) for each k of a token that is not as most are: its routing is used again, or copies take turns.
template <class Visit>
__device__ __forceinline__ void for_rare_keys(const DispatchArgs& args, const LlScratch& scratch, i32 token, Visit visit) {
  const i64 base = static_cast<i64>(token) * args.world.topk;
#pragma unroll 1
  for (i32 k = 0; k < args.world.topk; ++k)
    visit(args.cached ? key_of(args.world, args.home[base + k]) : key_of(args.world, scratch, args.topk_ids[base + k], token));
}

// Ranks to which a token goes (bit r) and how many of its ids are out of range.
struct Routed {
  u64 ranks;
  i32 invalid;
};

__device__ __forceinline__ void add_key(Routed& routed, i32 key) {
  routed.ranks |= key >= 0 ? 1ull << (key >> 16) : 0;
  routed.invalid += key == kInvalid;
}

// This lane's token; none past the last.
__device__ __forceinline__ Routed route(const DispatchArgs& args, const LlScratch& scratch, i32 token) {
  Routed routed = {0, 0};
  if (token >= args.num_tokens) return routed;
  const i32* ids = args.topk_ids + static_cast<i64>(token) * args.world.topk;
  bool rare = args.cached;
#pragma unroll 8
  for (i32 k = 0; k < args.world.topk && !args.cached; ++k) {
    const i32 key = look_up(args.world, scratch, ids[k]);
    rare |= key == kChoose;
    add_key(routed, key);
  }
  if (rare) {
    routed = {0, 0};
    for_rare_keys(args, scratch, token, [&](i32 key) { add_key(routed, key); });
  }
  return routed;
}

__device__ __forceinline__ u32 ballot_of(u64 mask, i32 rank) { return __ballot_sync(~0u, mask >> rank & 1); }

// How far a warp has come in the order of tokens.
struct Walk {
  i32 chunk;      // that the masks are of
  i32 low, high;  // lane r: rows to rank r, and to rank 32 + r, in all chunks before
  u64 mask;       // ranks of this lane's token
};

__device__ __forceinline__ Walk start_walk(const DispatchArgs& args, const LlScratch& scratch) {
  return {0, 0, 0, route(args, scratch, lane_idx()).ranks};
}

__device__ __forceinline__ void walk_to(const DispatchArgs& args, const LlScratch& scratch, i32 chunk, Walk& walk) {
#pragma unroll 1
  while (walk.chunk < chunk) {
#pragma unroll 1
    for (i32 rank = 0; rank < args.world.size; ++rank) {
      const i32 rows = __popc(ballot_of(walk.mask, rank));
      if (rank == lane_idx()) walk.low += rows;
      if (rank == lane_idx() + 32) walk.high += rows;
    }
    ++walk.chunk;
    walk.mask = route(args, scratch, walk.chunk * 32 + lane_idx()).ranks;
  }
}

// Calls work(rank, position) for each rank that a token of the walk's chunk goes to, from the next rank on; all lanes.
template <class Work>
__device__ __forceinline__ void for_ranks(const World& world, const Walk& walk, i32 token, Work work) {
  const i32 lane = token & 31;
  const u64 ranks = __shfl_sync(~0u, walk.mask, lane);
  u64 later = ranks & (~1ull << world.rank), sooner = ranks & ~later;
#pragma unroll 1
  while ((later | sooner) != 0) {
    const i32 rank = __ffsll(later != 0 ? later : sooner) - 1;
    later &= ~(1ull << rank);
    sooner &= ~(1ull << rank);
    const i32 before = __shfl_sync(~0u, rank < 32 ? walk.low : walk.high, rank & 31);
    work(rank, before + __popc(ballot_of(walk.mask, rank) & ((1u << lane) - 1)));
  }
}

// How many of this source's rows for the same local expert come before (token, k = lane): Home.place. `id` is this lane's, -1
// past K. Lanes k, k + width, .. look for the same id in every (32 / width)-th token before.
__device__ __forceinline__ i32 rows_before(const DispatchArgs& args, const LlScratch& scratch, i32 token, i32 id) {
  const World& world = args.world;
  const i32 topk = world.topk, bits = 32 - __clz(topk - 1), width = 1 << bits;
  const i32 target = __shfl_sync(~0u, id, lane_idx() & (width - 1));
  const bool turns = static_cast<u32>(target) < static_cast<u32>(world.num_experts) && scratch.table[target] == kChoose;
  const i32 copies = turns ? reinterpret_cast<const Expert*>(world.experts)[target].num_copies : 1;
  i32 found = 0;
#pragma unroll 1
  for (i32 earlier = lane_idx() >> bits; earlier < token; earlier += 32 >> bits) {
    const i32* ids = args.topk_ids + static_cast<i64>(earlier) * topk;
    i32 same = 0;
#pragma unroll 8
    for (i32 k = 0; k < topk; ++k) same += ids[k] == target;
    if (same != 0 && (copies == 1 || (token - earlier) % copies == 0)) found += same;
  }
#pragma unroll 1
  for (i32 step = width; step < 32; step *= 2) found += __shfl_xor_sync(~0u, found, step);
  return found + __popc(__match_any_sync(~0u, id) & ((1u << lane_idx()) - 1));
}
