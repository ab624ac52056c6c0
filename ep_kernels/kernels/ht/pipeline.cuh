// Pipelines of shared-memory stages between the warps of a block, one role per warp. Producers fill the stages in
// order, consumers release them in the same order (reduce teams: each the stages of its own sums). A stage holds one
// segment of a row; the SegmentInfo beside it says which. transports/nvlink/calls/plan.py sizes the
// pipelines.
//
//   rows       load warp -> reduce warps (or the send thread, where rows are copied)    segments of y
//   partials   reduce warps -> send thread       segments of partials. Where single rows become fp8: the stages of
//              `rows`, which the send thread releases to the load warp
//   recv       receive load warp -> receive reducers                                    segments of received partials
//
// Two mbarriers hand a stage over. `full`: filled (a bulk load completes on it, or reduce warps arrive on it); `empty`:
// read. Arrivals release and waits acquire, so the consumer of a stage sees its SegmentInfo and everything that the
// producer had seen. Waits in this file are for warps of this block and for local copies. Load warps wait for peers
// only in common/wait.cuh, which has a deadline; so does the notify warp's wait for credit (ht/combine_send.cuh).
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "types.h"

namespace ep::ht {

// SegmentInfo.flags: first, last row of a sum; last segment of a chunk; end of the pipeline.
constexpr u32 kFirstRow = 1, kLastRow = 2, kChunkEnd = 4, kEnd = 8;
constexpr u32 kColumnsShift = 8;

struct alignas(16) SegmentInfo {
  f32 weight;
  u32 flags;  // flags above, columns << kColumnsShift
  u8* dst;    // address of the result

  __device__ __forceinline__ i32 columns() const { return static_cast<i32>(flags >> kColumnsShift); }
};

struct Pipeline {
  u8* stages;
  SegmentInfo* infos;
  u64 *full, *empty;
  u32 stage_bytes, num_stages;
  u32 stage_idx, phase;  // position of this warp

  __device__ __forceinline__ u8* stage() const { return stages + stage_idx * stage_bytes; }
  __device__ __forceinline__ void advance() {
    if (++stage_idx == num_stages) {
      stage_idx = 0;
      phase ^= 1;
    }
  }
  // `count` stages further, num_stages at most.
  __device__ __forceinline__ Pipeline ahead(u32 count) const {
    Pipeline pipeline = *this;
    pipeline.stage_idx += count;
    if (pipeline.stage_idx >= num_stages) {
      pipeline.stage_idx -= num_stages;
      pipeline.phase ^= 1;
    }
    return pipeline;
  }
  __device__ __forceinline__ void wait_full() const { ptx::bulk_load_wait(full + stage_idx, phase); }
  __device__ __forceinline__ void wait_empty() const { ptx::bulk_load_wait(empty + stage_idx, phase ^ 1); }
};

__device__ __forceinline__ Pipeline make_pipeline(u8* stages, u32 stage_bytes, u32 num_stages, SegmentInfo* infos,
                                                  u64* barriers, u32 max_stages) {
  return {stages, infos, barriers, barriers + max_stages, stage_bytes, num_stages, 0, 0};
}

// One thread, before a block barrier that precedes any use. `num_producers`, `num_consumers`: warps that arrive per
// stage.
__device__ __forceinline__ void init_pipeline(const Pipeline& pipeline, u32 num_producers, u32 num_consumers) {
  for (u32 s = 0; s < pipeline.num_stages; ++s) {
    ptx::barrier_init(pipeline.full + s, num_producers);
    ptx::barrier_init(pipeline.empty + s, num_consumers);
  }
}

// ---- producers ----

__device__ __forceinline__ void producer_acquire(const Pipeline& pipeline) { pipeline.wait_empty(); }

// One warp that wrote the stage by ordinary stores, behind a proxy fence where the copy engine reads them.
__device__ __forceinline__ void producer_commit(const Pipeline& pipeline) {
  __syncwarp();
  if (lane_idx() == 0) ptx::barrier_arrive(pipeline.full + pipeline.stage_idx);
}

struct NoCallback {
  __device__ __forceinline__ void operator()(const Pipeline&) const {}
};

// One lane of the load warp: acquires the stage, calls on_acquire(pipeline) and starts a bulk load of `num_bytes` (a
// multiple of 16), which commits the stage when it completes.
template <class OnAcquire>
__device__ __forceinline__ void load_stage(const Pipeline& pipeline, const SegmentInfo& info, const u8* src,
                                           u32 num_bytes, OnAcquire on_acquire) {
  producer_acquire(pipeline);
  on_acquire(pipeline);
  pipeline.infos[pipeline.stage_idx] = info;
  ptx::bulk_load(pipeline.stage(), src, num_bytes, pipeline.full + pipeline.stage_idx);
}

// The load warp fills the next stage; the lane with `loads` set has the arguments.
template <class OnAcquire = NoCallback>
__device__ __forceinline__ void load_next_stage(Pipeline& pipeline, bool loads, const SegmentInfo& info, const u8* src,
                                                u32 num_bytes, OnAcquire on_acquire = {}) {
  if (loads) load_stage(pipeline, info, src, num_bytes, on_acquire);
  __syncwarp();
  pipeline.advance();
}

// A batch that leaves the consumers enough full stages to work on meanwhile.
__device__ __forceinline__ i32 half_of_stages(const Pipeline& pipeline) {
  return static_cast<i32>(pipeline.num_stages + 1) / 2;
}

// The load warp fills the next `count` stages in parallel: the lane with index `number` fills stage `number`; -1 = idle
// lane. At most `max_at_once` stages are acquired together.
template <class OnAcquire = NoCallback>
__device__ __forceinline__ void load_next_stages(Pipeline& pipeline, i32 number, i32 count, const SegmentInfo& info,
                                                 const u8* src, u32 num_bytes, i32 max_at_once,
                                                 OnAcquire on_acquire = {}) {
#pragma unroll 1
  for (i32 first = 0; first < count; first += max_at_once) {
    const i32 ahead = number - first;
    if (ahead >= 0 && ahead < max_at_once) load_stage(pipeline.ahead(ahead), info, src, num_bytes, on_acquire);
    __syncwarp();
    pipeline = pipeline.ahead(min(max_at_once, count - first));
  }
}

// One producer warp: ends the pipeline. One end per consumer, where consumers take stages in rotation.
__device__ __forceinline__ void producer_tail(Pipeline& pipeline, i32 num_consumers = 1) {
  for (i32 i = 0; i < num_consumers; ++i) {
    if (lane_idx() == 0) {
      producer_acquire(pipeline);
      pipeline.infos[pipeline.stage_idx] = {0.0f, kEnd, nullptr};
      ptx::barrier_arrive(pipeline.full + pipeline.stage_idx);
    }
    __syncwarp();
    pipeline.advance();
  }
}

// ---- consumers ----

// One consumer warp or thread: waits until the next stage is full.
__device__ __forceinline__ SegmentInfo consumer_wait(const Pipeline& pipeline) {
  pipeline.wait_full();
  return pipeline.infos[pipeline.stage_idx];
}

// One consumer warp, when all its lanes have read the stage.
__device__ __forceinline__ void consumer_release(Pipeline& pipeline) {
  __syncwarp();
  if (lane_idx() == 0) ptx::barrier_arrive(pipeline.empty + pipeline.stage_idx);
  pipeline.advance();
}

}  // namespace ep::ht
