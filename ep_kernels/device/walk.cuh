// How low-latency dispatch finds out where rows go: each block for itself, one barrier between the ids and the first row that
// leaves. ep_kernels/routing.py is the definition.
//
// A lane stands for a token: 32 tokens are a chunk. The warps of a block share the chunks and leave each token's ranks in
// shared memory; then each warp numbers rows with a ballot per rank, and counts the chunks before its own on its way.
// Worked example, 2 ranks, tokens to ranks {0}, {0, 1}, {1}: masks 01, 11, 10; ballot of rank 1 = 110, so token 2's row is
// position 1 there.
#pragma once

constexpr i32 kChoose = -4;  // in the table: several copies, which take turns

// Shared memory of a block.
struct LlScratch : Scratch {
  u64* masks;       // [T, rounded up to whole chunks] ranks of each token (bit r)
  u8** lines_to;    // [R] this rank's part of lines at each peer
  u8** records_to;  // [R] and of meta_lines
  i32* table;    // [E] rank << 16 | local expert, kGone, kChoose
  i32* before;   // [num_keys] rows per (rank, local expert): the block that tells
  i32* arrived;  // [R, 1 + local_stride] rows from each source, and for each local expert
  u32* seen;     // [num_keys, chunks of M] tokens that want an expert (bit of a token in its chunk), null = none
  bool* twice;   // whether a token wants one twice
};

__device__ __forceinline__ i32 arrived_stride(const World& world) { return 1 + (kPerExpert ? world.local_stride : 0); }

__device__ __forceinline__ i32 chunks_of(const World& world) { return (world.ll_tokens + 31) / 32; }

__device__ __forceinline__ LlScratch carve_ll(const World& world, u8* shared, bool* twice) {
  LlScratch scratch;
  scratch.twice = twice;
  const i32 keys = kPerExpert ? num_keys(world) : 0, groups = kPerExpert ? world.local_stride : 0;
  scratch.origin = 0;
  scratch.masks = reinterpret_cast<u64*>(after_waits(world, shared));
  scratch.lines_to = reinterpret_cast<u8**>(scratch.masks + chunks_of(world) * 32);
  scratch.records_to = scratch.lines_to + world.size;
  scratch.table = reinterpret_cast<i32*>(scratch.records_to + world.size);
  scratch.row_start = scratch.table + world.num_experts;
  scratch.before = scratch.row_start + world.size + 1;
  scratch.start = scratch.before + keys;
  scratch.total = scratch.start + keys;
  scratch.offset = scratch.total + groups;
  scratch.arrived = scratch.offset + groups + 1;
  const bool fits = kPerExpert && keys * chunks_of(world) <= MOST_SEEN;
  scratch.seen = fits ? reinterpret_cast<u32*>(scratch.arrived + world.size * (1 + groups)) : nullptr;
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
__device__ __forceinline__ i32 look_up(const World& world, const i32* table, i32 id) {
  const bool known = static_cast<u32>(id) < static_cast<u32>(world.num_experts);
  const i32 key = table[known ? id : 0];
  return known ? key : id == -1 ? kNowhere : kInvalid;
}

__device__ __forceinline__ i32 key_of(const World& world, const i32* table, i32 id, i32 token) {
  const i32 key = look_up(world, table, id);
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
    visit(args.cached ? key_of(args.world, args.home[base + k])
                      : key_of(args.world, scratch.table, args.topk_ids[base + k], token));
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
  const i32 topk = args.world.topk;
  const i32* ids = args.topk_ids + static_cast<i64>(token) * topk;
  bool rare = args.cached;
  auto add = [&](i32 id) {
    const i32 key = look_up(args.world, scratch.table, id);
    rare |= key == kChoose;
    add_key(routed, key);
  };
  if (!args.cached && topk % 4 == 0 && reinterpret_cast<u64>(args.topk_ids) % 16 == 0) {
#pragma unroll 2
    for (i32 k = 0; k < topk; k += 4) {
      const Vector four = *reinterpret_cast<const Vector*>(ids + k);
#pragma unroll
      for (i32 i = 0; i < 4; ++i) add(static_cast<i32>(word_of(four, i)));
    }
  } else {
#pragma unroll 4
    for (i32 k = 0; k < topk && !args.cached; ++k) add(ids[k]);
  }
  if (rare) {
    routed = {0, 0};
    for_rare_keys(args, scratch, token, [&](i32 key) { add_key(routed, key); });
  }
  return routed;
}

__device__ __forceinline__ u32 ballot_of(u64 mask, i32 rank) {
  const u32 half = static_cast<u32>(rank < 32 ? mask : mask >> 32);
  return __ballot_sync(~0u, half >> (rank & 31) & 1);
}

// Calls visit(routed) for each chunk that this warp routes for its block, the last warp the first chunk; masks are there after
// a block barrier.
template <class Visit>
__device__ __forceinline__ void route_chunks(const DispatchArgs& args, const LlScratch& scratch, Visit visit) {
#pragma unroll 1
  for (i32 chunk = num_warps() - 1 - warp_idx(); chunk * 32 < args.num_tokens; chunk += num_warps()) {
    const i32 token = chunk * 32 + lane_idx();
    const Routed routed = route(args, scratch, token);
    scratch.masks[token] = routed.ranks;
    visit(routed);
  }
}

// How far a warp has come in the order of tokens.
struct Walk {
  i32 chunk;      // that the masks are of
  i32 low, high;  // lane r: rows to rank r, and to rank 32 + r, in all chunks before
  u64 mask;       // ranks of this lane's token
};

__device__ __forceinline__ Walk start_walk(const LlScratch& scratch) { return {0, 0, 0, scratch.masks[lane_idx()]}; }

// Adds the rows of the chunk that the masks are of.
__device__ __forceinline__ void count_chunk(const World& world, Walk& walk) {
#pragma unroll 1
  for (i32 rank = 0; rank < world.size; ++rank) {
    const i32 rows = __popc(ballot_of(walk.mask, rank));
    if (rank == lane_idx()) walk.low += rows;
    if (rank == lane_idx() + 32) walk.high += rows;
  }
}

__device__ __forceinline__ void walk_to(const World& world, const LlScratch& scratch, i32 chunk, Walk& walk) {
#pragma unroll 1
  while (walk.chunk < chunk) {
    count_chunk(world, walk);
    ++walk.chunk;
    walk.mask = scratch.masks[walk.chunk * 32 + lane_idx()];
  }
}

// Position at a rank of a token of the walk's chunk that goes there. All lanes.
__device__ __forceinline__ i32 position_at(const Walk& walk, i32 token, i32 rank) {
  const i32 before = __shfl_sync(~0u, rank < 32 ? walk.low : walk.high, rank & 31);
  return before + __popc(ballot_of(walk.mask, rank) & ((1u << (token & 31)) - 1));
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
    work(rank, position_at(walk, token, rank));
  }
}

__device__ __forceinline__ i32 index_of(const World& world, i32 key) {
  return (key >> 16) * world.local_stride + (key & 0xFFFF);
}

// Notes in scratch.seen, which is zero, which tokens want which expert. All threads of a block; a block barrier follows.
__device__ __forceinline__ void note_wants(const DispatchArgs& args, const LlScratch& scratch, Divisor topk) {
  const i32 chunks = chunks_of(args.world);
#pragma unroll 2
  for (i32 e = threadIdx.x; e < args.num_tokens * args.world.topk; e += THREADS) {
    const i32 token = divide(e, topk), key = key_of(args.world, scratch.table, args.topk_ids[e], token);
    if (key < 0) continue;
    const u32 bit = 1u << (token & 31);
    if (atomicOr(&scratch.seen[index_of(args.world, key) * chunks + (token >> 5)], bit) & bit) *scratch.twice = true;
  }
}

// How many of this source's rows for the same local expert come before (token, k = lane): Home.place. `key` is this lane's,
// below 0 past K.
__device__ __forceinline__ i32 rows_noted(const World& world, const LlScratch& scratch, i32 token, i32 key) {
  if (key < 0) return -1;
  const u32* seen = scratch.seen + index_of(world, key) * chunks_of(world);
  i32 found = __popc(seen[token >> 5] & ((1u << (token & 31)) - 1));
#pragma unroll 4
  for (i32 chunk = 0; chunk < token >> 5; ++chunk) found += __popc(seen[chunk]);
  return found;
}

// The same where nothing is noted, or a token wants an expert twice: a lane looks at every 32nd entry before the token, for
// kTargets of its keys at a time.
__device__ __noinline__ i32 rows_counted(const DispatchArgs& args, const i32* table, i32 token, i32 key) {
  constexpr i32 kTargets = 4;
  const i32 topk = args.world.topk;
  i32 found = 0;
#pragma unroll 1
  for (i32 first = 0; first < topk; first += kTargets) {
    i32 target[kTargets], count[kTargets] = {};
#pragma unroll
    for (i32 j = 0; j < kTargets; ++j) target[j] = __shfl_sync(~0u, key, (first + j) & 31);
#pragma unroll 1
    for (i32 e = lane_idx(); e < token * topk; e += 32) {
      const i32 other = key_of(args.world, table, args.topk_ids[e], e / topk);
#pragma unroll
      for (i32 j = 0; j < kTargets; ++j) count[j] += other == target[j];
    }
#pragma unroll
    for (i32 j = 0; j < kTargets; ++j) {
      const i32 all = __reduce_add_sync(~0u, count[j]);
      if (lane_idx() == first + j) found = all;
    }
  }
  return found + __popc(__match_any_sync(~0u, key) & ((1u << lane_idx()) - 1));
}
