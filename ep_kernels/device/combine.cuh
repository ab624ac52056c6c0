// What both halves of HT combine share: who does what in a block, where things lie, how blocks share the work.
#pragma once

// Tasks by warp; the rest of the block adds.
constexpr i32 kRowLoader = 0, kStorer = 1, kTeller = 2, kHomeLoader = 3, kAsker = 4, kFirstMaker = kCopies ? 5 : 4;
constexpr i32 kMakers = kCopies ? 0 : kConverts ? 4 : 8;
constexpr i32 kFirstSummer = kFirstMaker + kMakers, kSummers = THREADS / 32 - kFirstSummer;

// Rows of so few bytes cost their warps latency.
constexpr u32 kShortBytes = 8192;
__device__ __forceinline__ bool short_rows(const Rings& rings) { return rings.num_pieces == 1 && rings.row_bytes <= kShortBytes; }

__device__ __forceinline__ i64 position_of(const World& world, i32 owner, i32 position) {
  return static_cast<i64>(owner) * world.max_tokens + position;
}

__device__ __forceinline__ u8* home_at(const CombineArgs& args, i32 rank, i64 row) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.home + args.slot * map.home_stride) + row * args.world.home_row_bytes;
}

__device__ __forceinline__ f32* home_weights_at(const CombineArgs& args, i32 rank, i64 position) {
  const RegionMap& map = args.world.map;
  return region_at<f32>(args.world, rank, map.home_weights + args.slot * map.home_weights_stride) +
         position * args.world.topk;
}

__device__ __forceinline__ u64 origins_at(const CombineArgs& args) {
  return args.world.map.home_origins + args.slot * args.world.map.home_origins_stride;
}

// The word in the region of rank `at` that says how far `owner` has come with the chunk of this position.
__device__ __forceinline__ u64* progress_at(const World& world, i32 at, i32 owner, i32 position) {
  const i32 chunks = (world.max_tokens + CHUNK - 1) / CHUNK;
  return region_at<u64>(world, at, world.map.flags) + NUM_FLAGS * world.size + static_cast<i64>(owner) * chunks +
         position / CHUNK;
}

// Rows of this very rank stay where they are.
__device__ __forceinline__ bool reads_own(const CombineArgs& args) {
  return kCopies && args.work.halves == (kSend | kReceive);
}

// A warp looks at several (position, k), or (token, k), at once: a lane for each.
struct Lanes {
  i32 width, count;  // lanes of a position; positions at once, CHUNK at most
  i32 index, k;      // this lane's

  __device__ __forceinline__ u32 of(i32 position) const {
    return (width == 32 ? ~0u : (1u << width) - 1) << (position * width);
  }

  // Bits of this lane and of those of its position that come before it. All lanes.
  __device__ __forceinline__ u64 up_to(u64 bits) const {
#pragma unroll 1
    for (i32 step = 1; step < width; step *= 2) {
      const u64 before = __shfl_up_sync(~0u, bits, step);
      if (k >= step) bits |= before;
    }
    return bits;
  }
};

__device__ __forceinline__ Lanes lanes_for(i32 topk) {
  i32 width = 1;
  while (width < topk) width *= 2;
  return {width, min(CHUNK, 32 / width), lane_idx() / width, lane_idx() % width};
}

// Units of work, numbered 0 .. total - 1, that the blocks of a rank take from a counter: links and memory do not serve
// all of them equally well. The first of each block is its own, unit `block`; the counter knows of those after them.
// One warp; it asks a unit ahead, so that the answer is there when it is needed, but from unit `late` on asks when it
// has room. Each block that had one of its own takes until it hears of one that does not exist; the last to hear sets
// the counter back for the next launch. A block that ends otherwise has a rank that was stopped, whose state is made
// anew.
struct Claims {
  u64* counter;
  i32 total, late, blocks;
  bool asked;  // a unit ahead
  u64 answer;  // of lane 0: to what was asked last; `blocks` before the unit

  __device__ __forceinline__ void ask() {
    if (lane_idx() == 0) answer = ptx::take_relaxed_gpu(counter, 1);
  }

  // The next unit; -1: there are no more, and this is not called again.
  __device__ __forceinline__ i32 next() {
    if (!asked) ask();
    const u64 unit = __shfl_sync(~0u, answer, 0) + blocks, most = static_cast<u64>(total);
    if (unit < most) {
      asked = static_cast<i32>(unit) < late;
      if (asked) ask();
      return static_cast<i32>(unit);
    }
    if (lane_idx() == 0 && unit == most + blocks - 1) ptx::store_volatile(counter, 0);
    return -1;
  }
};

// threadIdx.y is 0: were the counter known to be the same in all lanes, the compiler would wait for each answer there
// and then (queue_of in team.cuh).
__device__ __forceinline__ Claims claims_of(Team team, u64* counter, i32 total, i32 late) {
  return {counter + threadIdx.y, total, late, team.num_blocks, true,
          static_cast<u64>(static_cast<i64>(team.block - team.num_blocks))};
}
