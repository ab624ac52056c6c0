// The receiving half of HT dispatch, once records are here (ht/dispatch_metadata.cuh): rows that several local experts
// share are copied to their other places as each arrives; what is left for the end are scales.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/wait.cuh"
#include "ht/dispatch_send.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ht_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

// Scales of one row to their final place: bytes, or packed words with their own strides.
__device__ __forceinline__ void place_scales(const DispatchArgs& args, i32 source, i32 position, i32 row,
                                             i32 num_rows) {
  const World& world = args.world;
  const u8* from = scales_at(args, world.rank, source, position);
  if (args.scale_row_stride == 0) {
    copy_bytes(args.out_scales + static_cast<i64>(row) * world.scale_bytes, from, world.scale_bytes);
    return;
  }
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : LAYOUT == RANK_MAJOR ? world.max_tokens : 1 << 30;
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  u32* to = reinterpret_cast<u32*>(args.out_scales) + static_cast<i64>(row / per_group) * args.scale_group_stride;
  for (i32 i = lane_idx(); i < world.scale_bytes / 4; i += 32)
    to[i * column + static_cast<i64>(row % per_group) * args.scale_row_stride] = reinterpret_cast<const u32*>(from)[i];
}

// ---- per-expert layouts: rows as they arrive ----

// A received row, as a warp looks after it.
struct Arrival {
  i32 source, position;  // source -1 = none is left; position -1 = no row has this number
  Meta meta;             // of this lane's k, if any; looked at when its turn comes, so that the load is not waited for
  i32 kept;              // where a routing is used again: its place
};

// Number `number` of this block: positions that a block of the source with this block's number sends, if blocks are as
// many there; sources in turn, the next rank first.
__device__ __forceinline__ Arrival arrival_of(const DispatchArgs& args, Team team, const HtScratch& scratch,
                                              i32 number) {
  const World& world = args.world;
  const i32 source = (world.rank + 1 + number % world.size) % world.size;
  const i32 rows = scratch.row_start[source + 1] - scratch.row_start[source];
  const i32 share = (rows + team.num_blocks - 1) / team.num_blocks, position = team.block * share + number / world.size;
  Arrival arrival = {source, number / world.size < share && position < rows ? position : -1, {-1, -1, 0.0f, -1}, -1};
  if (arrival.position < 0 || lane_idx() >= world.topk) return arrival;
  arrival.meta = meta_at(args, world.rank, source, position)[lane_idx()];
  if (args.cached) arrival.kept = args.places[position_of(world, source, position) * world.topk + lane_idx()];
  return arrival;
}

// The next of this block's.
__device__ __forceinline__ Arrival next_arrival(const DispatchArgs& args, Team team, const HtScratch& scratch,
                                                i32 numbers) {
  u32 taken = 0;
  if (lane_idx() == 0) taken = atomicAdd(scratch.next_arrival, 1u);
  const i32 number = static_cast<i32>(__shfl_sync(~0u, taken, 0));
  if (number >= numbers) return {-1, -1, {-1, -1, 0.0f, -1}, -1};
  return arrival_of(args, team, scratch, number);
}

__device__ __forceinline__ bool await_arrival(const DispatchArgs& args, const Arrival& arrival, u64 seq) {
  const World& world = args.world;
  const u64* flag = arrival_at(args, world.rank, arrival.source, arrival.position);
  const bool here = spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, arrival.source,
                                    [&] { return lane_idx() != 0 || ptx::load_acquire_sys(flag) == seq; });
  ptx::fence_proxy_global();
  __syncwarp();
  return here;
}

// From the first place to the others (place: of this lane's k): all pieces that fit the stages at a time.
__device__ __forceinline__ void copy_row(const DispatchArgs& args, Sender& sender, i32 place) {
  const World& world = args.world;
  Pipe& pipe = sender.pipe;
  const u32 placed = __ballot_sync(~0u, place >= 0);
  const i32 leader = __ffs(placed) - 1, most = args.work.piece_bytes;
  const u8* row = row_at(args, world.rank, __shfl_sync(~0u, place, leader));
  const bool stores = place >= 0 && lane_idx() != leader;
  for (i32 begin = 0; begin < world.row_bytes; begin += most * static_cast<i32>(kStages)) {
    ptx::bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < kStages; ++i) {
      const i32 at = begin + static_cast<i32>(i) * most;
      const u32 s = (sender.turn + i) % kStages;
      if (at < world.row_bytes && lane_idx() == 0)
        ptx::bulk_load(pipe.stage(s), row + at, min(most, world.row_bytes - at), pipe.barriers + s);
    }
    u32 used = 0;
#pragma unroll
    for (u32 i = 0; i < kStages; ++i) {
      const i32 at = begin + static_cast<i32>(i) * most;
      if (at >= world.row_bytes) continue;
      const u32 s = (sender.turn + i) % kStages;
      ptx::bulk_load_wait(pipe.barriers + s, pipe.parities >> s & 1);
      pipe.parities ^= 1u << s;
      if (stores) ptx::bulk_store(row_at(args, world.rank, place) + at, pipe.stage(s), min(most, world.row_bytes - at));
      ++used;
    }
    ptx::bulk_commit();
    sender.turn += used;
  }
}

// Looks after this block's share of the rows that arrive: copies, scales. One warp; its stages are free. False when the
// rank was stopped before all were here.
__device__ __forceinline__ bool look_after_rows(const DispatchArgs& args, Team team, const HtScratch& scratch,
                                                Sender& sender, u64 seq) {
  const World& world = args.world;
  i32 most = 0;
  for (i32 source = 0; source < world.size; ++source)
    most = max(most, scratch.row_start[source + 1] - scratch.row_start[source]);
  const i32 numbers = (most + team.num_blocks - 1) / team.num_blocks * world.size,
            delivered = rows_delivered(args, scratch);
  bool here = true;
  Arrival ahead = next_arrival(args, team, scratch, numbers);
  while (ahead.source >= 0) {
    const Arrival arrival = ahead;
    const i32 place = arrival.meta.local_expert < 0 ? -1 : args.cached ? arrival.kept : arrival.meta.place;
    ahead = next_arrival(args, team, scratch, numbers);
    const u32 placed = __ballot_sync(~0u, place >= 0);
    const bool copies = arrival.source != world.rank && (placed & (placed - 1)) != 0,
               scales = args.out_scales != nullptr;
    if (!copies && !(scales && placed != 0)) continue;
    here = await_arrival(args, arrival, seq);
    if (!here) break;
    if (copies) copy_row(args, sender, place);
    for (u32 left = scales ? placed : 0; left != 0; left &= left - 1)
      place_scales(args, arrival.source, arrival.position, __shfl_sync(~0u, place, __ffs(left) - 1), delivered);
  }
  ptx::bulk_wait_all();
  return here;
}

// ---- rank-wise layouts: scales at the end ----

// Rows of a source that were not dropped, which lie one behind the other in both places.
__device__ __forceinline__ i32 rows_kept(const DispatchArgs& args, const HtScratch& scratch, i32 source) {
  const i32 rows = scratch.row_start[source + 1] - scratch.row_start[source];
  return LAYOUT == FLAT ? max(0, min(rows, args.world.capacity - scratch.row_start[source])) : rows;
}

// All threads of the rank move num_bytes; V is what a thread moves at a time.
template <class V>
__device__ __forceinline__ void copy_all(Team team, u8* to, const u8* from, i64 num_bytes) {
  constexpr i32 kTogether = 6;
  const i64 count = num_bytes / static_cast<i64>(sizeof(V)), step = static_cast<i64>(team.num_blocks) * blockDim.x;
#pragma unroll 1
  for (i64 base = static_cast<i64>(team.block) * blockDim.x + threadIdx.x; base < count; base += kTogether * step) {
    V kept[kTogether];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * step < count) kept[j] = reinterpret_cast<const V*>(from)[base + j * step];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * step < count) reinterpret_cast<V*>(to)[base + j * step] = kept[j];
  }
}

// Packed words with strides of their own: a lane per row, so that neighbours write neighbours.
__device__ __forceinline__ void place_packed_scales(const DispatchArgs& args, Team team, const HtScratch& scratch,
                                                    i32 source) {
  const World& world = args.world;
  const i64 column =
      args.scale_column_stride != 0 ? args.scale_column_stride : aligned(rows_delivered(args, scratch), 4);
  u32* to = reinterpret_cast<u32*>(args.out_scales);
  const i32 first = LAYOUT == FLAT ? scratch.row_start[source] : 0, words = world.scale_bytes / 4;
  if (LAYOUT == RANK_MAJOR) to += static_cast<i64>(source) * args.scale_group_stride;
#pragma unroll 1
  for (i32 i = team.block * blockDim.x + threadIdx.x; i < rows_kept(args, scratch, source);
       i += team.num_blocks * blockDim.x) {
    const u32* from = reinterpret_cast<const u32*>(scales_at(args, world.rank, source, i));
#pragma unroll 4
    for (i32 word = 0; word < words; ++word)
      to[word * column + static_cast<i64>(first + i) * args.scale_row_stride] = from[word];
  }
}

// Scales of every received row to their final places.
__device__ __forceinline__ void place_all_scales(const DispatchArgs& args, Team team, const HtScratch& scratch) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 source = 0; source < world.size; ++source) {
    if (args.scale_row_stride != 0) {
      place_packed_scales(args, team, scratch, source);
      continue;
    }
    u8* to = args.out_scales + static_cast<i64>(first_row(args, scratch, source)) * world.scale_bytes;
    const u8* from = scales_at(args, world.rank, source, 0);
    const i64 num_bytes = static_cast<i64>(rows_kept(args, scratch, source)) * world.scale_bytes;
    const u64 together = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | static_cast<u64>(num_bytes);
    if (together % 16 == 0) copy_all<Vec<u32, 4>>(team, to, from, num_bytes);
    else if (together % 4 == 0) copy_all<u32>(team, to, from, num_bytes);
    else copy_all<u8>(team, to, from, num_bytes);
  }
}

}  // namespace ep::ht
