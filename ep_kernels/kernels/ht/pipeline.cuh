// Stages of shared memory between the warps of a block that have one task each: one side fills them in order, the other
// empties them in the same order (teams of makers: each those of its sums). Beside each stage lies an item that says
// what is in it. transports/nvlink/rings.py decides how many stages there are.
//
//   rows    loader -> makers (or, where rows travel as they are, the storing warp)    pieces of y
//   made    makers -> storing warp                                                    pieces of partials; where rows
//           become fp8 one by one, in the stages of `rows`, which go back to the loader from the storing warp
//   home    home loader -> summing warps                                              pieces that have come home
//
// A stage is handed over by two mbarriers. `full`: filled (a bulk load completes on it; makers arrive on it); `empty`:
// read. Arrivals release and waits acquire, so an item, and whatever its writer had seen, is visible to who takes the
// stage. Waits here are for warps of this block and for local copies: the former wait for peers only in
// common/wait.cuh, which ends (so does the wait for credit, ht/combine_send.cuh, for the telling warp).
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "types.h"

namespace ep::ht {

constexpr u32 kFirst = 1, kLast = 2, kChunkEnd = 4,
              kNoMore = 8;  // first, last row of a sum; last of a chunk; no more items
constexpr u32 kColumnsShift = 8;

struct alignas(16) Item {
  f32 weight;
  u32 what;  // bits above, columns << kColumnsShift
  u8* to;    // where the result goes

  __device__ __forceinline__ i32 columns() const { return static_cast<i32>(what >> kColumnsShift); }
};

struct Ring {
  u8* stages;
  Item* items;
  u64 *full, *empty;
  u32 stage_bytes, size;
  u32 at, phase;  // this warp's place

  __device__ __forceinline__ u8* stage() const { return stages + at * stage_bytes; }
  __device__ __forceinline__ void move_on() {
    if (++at == size) {
      at = 0;
      phase ^= 1;
    }
  }
  // So many stages on, `size` at most.
  __device__ __forceinline__ Ring ahead(u32 stages) const {
    Ring ring = *this;
    ring.at += stages;
    if (ring.at >= size) {
      ring.at -= size;
      ring.phase ^= 1;
    }
    return ring;
  }
  __device__ __forceinline__ void await_full() const { ptx::bulk_load_wait(full + at, phase); }
  __device__ __forceinline__ void await_empty() const { ptx::bulk_load_wait(empty + at, phase ^ 1); }
};

__device__ __forceinline__ Ring carve_ring(u8* stages, u32 stage_bytes, u32 size, Item* items, u64* barriers,
                                           u32 most) {
  return {stages, items, barriers, barriers + most, stage_bytes, size, 0, 0};
}

// One thread, before a block barrier that comes before any use. `fillers`, `readers`: warps that arrive per stage.
__device__ __forceinline__ void open_ring(const Ring& ring, u32 fillers, u32 readers) {
  for (u32 s = 0; s < ring.size; ++s) {
    ptx::barrier_init(ring.full + s, fillers);
    ptx::barrier_init(ring.empty + s, readers);
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()(const Ring&) const {}
};

// One lane of the loading warp: fills the stage with `num_bytes` (a multiple of 16) of `from`, after granted(ring): the
// stage is empty.
template <class Granted>
__device__ __forceinline__ void fill_stage(const Ring& ring, const Item& item, const u8* from, u32 num_bytes,
                                           Granted granted) {
  ring.await_empty();
  granted(ring);
  ring.items[ring.at] = item;
  ptx::bulk_load(ring.stage(), from, num_bytes, ring.full + ring.at);
}

// The loading warp; the lane that has it at hand fills the next stage.
template <class Granted = Nothing>
__device__ __forceinline__ void load_stage(Ring& ring, bool at_hand, const Item& item, const u8* from, u32 num_bytes,
                                           Granted granted = {}) {
  if (at_hand) fill_stage(ring, item, from, num_bytes, granted);
  __syncwarp();
  ring.move_on();
}

// So many stages that whoever reads the others meanwhile need not wait.
__device__ __forceinline__ i32 half_of(const Ring& ring) { return static_cast<i32>(ring.size + 1) / 2; }

// The same with the next `count` stages, a lane for each, which has it at hand as its `number`th; below 0: a lane that
// has none. `most` at a time, for which that many stages must come free.
template <class Granted = Nothing>
__device__ __forceinline__ void load_stages(Ring& ring, i32 number, i32 count, const Item& item, const u8* from,
                                            u32 num_bytes, i32 most, Granted granted = {}) {
#pragma unroll 1
  for (i32 first = 0; first < count; first += most) {
    const i32 ahead = number - first;
    if (ahead >= 0 && ahead < most) fill_stage(ring.ahead(ahead), item, from, num_bytes, granted);
    __syncwarp();
    ring = ring.ahead(min(most, count - first));
  }
}

// The filling side: nothing comes after this; so often, where the readers take turns. A warp of it.
__device__ __forceinline__ void close_ring(Ring& ring, i32 readers = 1) {
  for (i32 i = 0; i < readers; ++i) {
    if (lane_idx() == 0) {
      ring.await_empty();
      ring.items[ring.at] = {0.0f, kNoMore, nullptr};
      ptx::barrier_arrive(ring.full + ring.at);
    }
    __syncwarp();
    ring.move_on();
  }
}

// A reading warp: the next stage, once it is full.
__device__ __forceinline__ Item take_stage(const Ring& ring) {
  ring.await_full();
  return ring.items[ring.at];
}

// It has been read.
__device__ __forceinline__ void give_back(Ring& ring) {
  __syncwarp();
  if (lane_idx() == 0) ptx::barrier_arrive(ring.empty + ring.at);
  ring.move_on();
}

}  // namespace ep::ht
