// A block of HT combine: which warp has which task, how its shared memory is divided, what a lane of a warp looks at.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "ht/pipeline.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

constexpr bool kFp8 = sizeof(C) == 1;
constexpr bool kCopies = kSameType && KIND != PER_EXPERT;  // rows travel as they are
constexpr bool kConverts = kFp8 && KIND != PER_EXPERT;     // each becomes fp8 by itself, in the stage in which it lies
constexpr bool kSums = !kCopies && !kConverts;             // makers sum them

// Tasks by warp; the rest of the block adds.
constexpr i32 kRowLoader = 0, kStorer = 1, kTeller = 2, kHomeLoader = 3, kAsker = 4, kFirstMaker = kCopies ? 5 : 4;
constexpr i32 kMakers = kCopies ? 0 : kConverts ? 4 : 8;
constexpr i32 kFirstSummer = kFirstMaker + kMakers, kSummers = THREADS / 32 - kFirstSummer;

// Stages at most: of rows that are sent, of rows that are summed, of partials, of what comes home.
constexpr u32 kMostSent = 12, kMostSummed = 16, kMostMade = 4, kMostHome = 12;
constexpr u32 kMostRows = kSums ? kMostSummed : kMostSent, kMostItems = kMostRows + kMostMade + kMostHome;
constexpr u32 kMadeBarriers = kSums ? 2 * kMostMade : kMostRows;
static_assert(8 * (2 * kMostRows + kMadeBarriers + 2 * kMostHome) <= kBarrierBytes, "mbarriers");

struct Rooms {
  Ring rows, made, home;
};

// The rings of a block; every warp gets a copy, and goes its own way through it.
__device__ __forceinline__ Rooms carve_rooms(const Rings& rings, u8* shared, u8* stages, Item* items) {
  u64* barriers = reinterpret_cast<u64*>(shared);
  u8* made = stages + rings.num_rows * rings.row_bytes;
  u8* home = made + rings.num_made * rings.made_bytes;
  u64 *rows_empty = barriers + kMostRows, *made_full = barriers + 2 * kMostRows;
  const Ring in_place = {stages, items, made_full, rows_empty, rings.row_bytes, rings.num_rows, 0, 0};
  return {carve_ring(stages, rings.row_bytes, rings.num_rows, items, barriers, kMostRows),
          rings.num_made == 0
              ? in_place
              : carve_ring(made, rings.made_bytes, rings.num_made, items + kMostRows, made_full, kMostMade),
          carve_ring(home, rings.made_bytes, rings.num_home, items + kMostRows + kMostMade, made_full + kMadeBarriers,
                     kMostHome)};
}

// Rows of so few bytes cost their warps latency.
constexpr u32 kShortBytes = 8192;
__device__ __forceinline__ bool short_rows(const Rings& rings) {
  return rings.num_pieces == 1 && rings.row_bytes <= kShortBytes;
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

}  // namespace ep::ht
