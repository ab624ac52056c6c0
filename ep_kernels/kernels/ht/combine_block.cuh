// A block of HT combine: the roles of its warps, the layout of shared memory, the lanes of a warp over (position, k).
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "ht/pipeline.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

constexpr bool kFp8 = sizeof(C) == 1;                  // else C is Y
constexpr bool kReduces = KIND == PER_EXPERT;          // reduce warps sum rows into partials
constexpr bool kCopies = !kFp8 && KIND != PER_EXPERT;  // rows are copied, from stage to store
constexpr bool kConverts = kFp8 && KIND == PER_RANK;   // single rows become fp8 in the stage in which they lie
static_assert(kReduces + kCopies + kConverts == 1, "exact combine moves rows as they are");

// Roles of the first warps, one warp each; kIssueLoads only where rows are copied. Then come the reduce warps, then the
// receive reducers.
enum class Role : i32 { kLoadRows, kSend, kNotify, kLoadRecv, kIssueLoads };
constexpr i32 kFirstReduceWarp = kCopies ? 5 : 4;
constexpr i32 kNumReduceWarps = kCopies ? 0 : kConverts ? 4 : 8;
constexpr i32 kFirstRecvReducer = kFirstReduceWarp + kNumReduceWarps,
              kMaxRecvReducers = THREADS / 32 - kFirstRecvReducer;

// Maximum stages: of rows that are sent, of rows that are reduced, of partials, of received partials.
constexpr u32 kMaxSendStages = 12, kMaxReduceStages = 16, kMaxPartialStages = 4, kMaxRecvStages = 12;
constexpr u32 kMaxRowStages = kReduces ? kMaxReduceStages : kMaxSendStages,
              kMaxStages = kMaxRowStages + kMaxPartialStages + kMaxRecvStages;
constexpr u32 kPartialBarriers = kReduces ? 2 * kMaxPartialStages : kMaxRowStages;
static_assert(8 * (2 * kMaxRowStages + kPartialBarriers + 2 * kMaxRecvStages) <= kBarrierBytes, "mbarriers");

// Of a warp before kFirstReduceWarp.
__device__ __forceinline__ Role role_of(i32 warp) { return static_cast<Role>(warp); }

struct Pipelines {
  Pipeline rows, partials, recv;
};

// The pipelines of a block; every warp has its own copy with its own position.
__device__ __forceinline__ Pipelines make_pipelines(const PipelineSizes& sizes, u8* shared, u8* stages,
                                                    SegmentInfo* infos) {
  u64* barriers = reinterpret_cast<u64*>(shared);
  u8* partials = stages + sizes.num_row_stages * sizes.row_stage_bytes;
  u8* recv = partials + sizes.num_partial_stages * sizes.partial_stage_bytes;
  u64 *rows_empty = barriers + kMaxRowStages, *partials_full = barriers + 2 * kMaxRowStages;
  const Pipeline in_place = {stages, infos, partials_full, rows_empty, sizes.row_stage_bytes, sizes.num_row_stages,
                             0,      0};
  return {make_pipeline(stages, sizes.row_stage_bytes, sizes.num_row_stages, infos, barriers, kMaxRowStages),
          sizes.num_partial_stages == 0
              ? in_place
              : make_pipeline(partials, sizes.partial_stage_bytes, sizes.num_partial_stages, infos + kMaxRowStages,
                              partials_full, kMaxPartialStages),
          make_pipeline(recv, sizes.partial_stage_bytes, sizes.num_recv_stages,
                        infos + kMaxRowStages + kMaxPartialStages, partials_full + kPartialBarriers, kMaxRecvStages)};
}

// Short rows are bound by latency, not by bandwidth.
constexpr u32 kShortRowBytes = 8192;
__device__ __forceinline__ bool has_short_rows(const PipelineSizes& sizes) {
  return sizes.num_segments == 1 && sizes.row_stage_bytes <= kShortRowBytes;
}

// This rank's own rows are not copied; the receive phase reads y.
__device__ __forceinline__ bool reads_own_rows(const CombineArgs& args) {
  return kCopies && args.work.phases == (kSend | kReceive);
}

// Lanes of a warp over several (position, k), or (token, k).
struct Lanes {
  i32 width, count;  // lanes per position; positions per warp, CHUNK at most
  i32 index, k;      // of this lane: position and k

  // The lanes of a position.
  __device__ __forceinline__ u32 mask_of(i32 position) const {
    return (width == 32 ? ~0u : (1u << width) - 1) << (position * width);
  }

  // Inclusive prefix OR over the lanes of a position. All lanes.
  __device__ __forceinline__ u64 prefix_or(u64 bits) const {
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
