// Receive phase of HT dispatch, after the metadata have arrived (ht/dispatch_metadata.cuh): rows that several local
// experts share are copied to their other final rows as each arrives; scales of rank-wise layouts are moved at the end.
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

// Copies the scales of one row to where the caller reads them: bytes, or packed words with their own strides.
__device__ __forceinline__ void copy_scales(const DispatchArgs& args, i32 source, i32 position, i32 row,
                                            i32 num_rows) {
  const World& world = args.world;
  const u8* src = scales_at(args, world.rank, source, position);
  if (args.scale_row_stride == 0) {
    copy_bytes(args.out_scales + static_cast<i64>(row) * world.scale_bytes, src, world.scale_bytes);
    return;
  }
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : LAYOUT == RANK_MAJOR ? world.max_tokens : 1 << 30;
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  u32* dst = reinterpret_cast<u32*>(args.out_scales) + static_cast<i64>(row / per_group) * args.scale_group_stride;
  for (i32 i = lane_idx(); i < world.scale_bytes / 4; i += 32)
    dst[i * column + static_cast<i64>(row % per_group) * args.scale_row_stride] = reinterpret_cast<const u32*>(src)[i];
}

// ---- per-expert layouts: rows as they arrive ----

// A received row.
struct Arrival {
  i32 source, position;    // source -1 = none is left; position -1 = no row has this number
  TokenMetadata metadata;  // of this lane's k, if any; used only in the row's own iteration, so its load is not awaited
  i32 cached_row;          // cached routing: the final row of this lane's k
};

// Row `number` of this block. A block handles the positions that the block of the same index sends at the source, if
// both have as many blocks; sources in rotation, the next rank first.
__device__ __forceinline__ Arrival load_arrival(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                                i32 number) {
  const World& world = args.world;
  const i32 source = (world.rank + 1 + number % world.size) % world.size;
  const i32 rows = scratch.row_start[source + 1] - scratch.row_start[source];
  const i32 per_block = (rows + team.num_blocks - 1) / team.num_blocks,
            position = team.block * per_block + number / world.size;
  Arrival arrival = {
      source, number / world.size < per_block && position < rows ? position : -1, {-1, -1, 0.0f, -1}, -1};
  if (arrival.position < 0 || lane_idx() >= world.topk) return arrival;
  arrival.metadata = metadata_at(args, world.rank, source, position)[lane_idx()];
  if (args.cached) arrival.cached_row = args.dst_rows[position_of(world, source, position) * world.topk + lane_idx()];
  return arrival;
}

// The next row of this block, by its work counter.
__device__ __forceinline__ Arrival next_arrival(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                                i32 numbers) {
  u32 item = 0;
  if (lane_idx() == 0) item = atomicAdd(scratch.next_arrival, 1u);
  const i32 number = static_cast<i32>(__shfl_sync(~0u, item, 0));
  if (number >= numbers) return {-1, -1, {-1, -1, 0.0f, -1}, -1};
  return load_arrival(args, team, scratch, number);
}

__device__ __forceinline__ bool await_arrival(const DispatchArgs& args, const Arrival& arrival, u64 seq) {
  const World& world = args.world;
  const u64* flag = arrival_at(args, world.rank, arrival.source, arrival.position);
  const bool arrived = spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, arrival.source,
                                       [&] { return lane_idx() != 0 || ptx::load_acquire_sys(flag) == seq; });
  ptx::fence_proxy_global();
  __syncwarp();
  return arrived;
}

// Copies a row from its first final row to the others (dst_row: of this lane's k), as many segments at a time as the
// warp has stages.
__device__ __forceinline__ void replicate_row(const DispatchArgs& args, Sender& sender, i32 dst_row) {
  const World& world = args.world;
  WarpStages& stages = sender.stages;
  // The first row is the source; other lanes with a row store theirs.
  const u32 placed = __ballot_sync(~0u, dst_row >= 0);
  const i32 leader = __ffs(placed) - 1, stage_bytes = args.work.segment_bytes;
  const u8* row = row_at(args, world.rank, __shfl_sync(~0u, dst_row, leader));
  const bool stores = dst_row >= 0 && lane_idx() != leader;
  for (i32 begin = 0; begin < world.row_bytes; begin += stage_bytes * static_cast<i32>(kStages)) {
    // Load as many segments as there are stages, once earlier stores have read these.
    ptx::bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < kStages; ++i) {
      const i32 at = begin + static_cast<i32>(i) * stage_bytes;
      const u32 s = (sender.num_staged + i) % kStages;
      if (at < world.row_bytes && lane_idx() == 0)
        ptx::bulk_load(stages.stage(s), row + at, min(stage_bytes, world.row_bytes - at), stages.barriers + s);
    }
    // Store each when it is there.
    u32 used = 0;
#pragma unroll
    for (u32 i = 0; i < kStages; ++i) {
      const i32 at = begin + static_cast<i32>(i) * stage_bytes;
      if (at >= world.row_bytes) continue;
      const u32 s = (sender.num_staged + i) % kStages;
      ptx::bulk_load_wait(stages.barriers + s, stages.parities >> s & 1);
      stages.parities ^= 1u << s;
      if (stores)
        ptx::bulk_store(row_at(args, world.rank, dst_row) + at, stages.stage(s),
                        min(stage_bytes, world.row_bytes - at));
      ++used;
    }
    ptx::bulk_commit();
    sender.num_staged += used;
  }
}

// Replicates this block's part of the rows that arrive, and moves their scales. One warp; its stages are free. False
// when the rank was stopped before all had arrived.
__device__ __forceinline__ bool replicate_rows(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                               Sender& sender, u64 seq) {
  const World& world = args.world;
  // Arrivals by position, then by source: as the sources send them.
  i32 max_rows = 0;
  for (i32 source = 0; source < world.size; ++source)
    max_rows = max(max_rows, scratch.row_start[source + 1] - scratch.row_start[source]);
  const i32 numbers = (max_rows + team.num_blocks - 1) / team.num_blocks * world.size,
            delivered = rows_delivered(args, scratch);
  bool ok = true;
  Arrival next = next_arrival(args, team, scratch, numbers);
  while (next.source >= 0) {
    const Arrival arrival = next;
    // Its final rows; the next arrival's metadata is in flight meanwhile.
    const i32 dst_row = arrival.metadata.local_expert < 0 ? -1
                        : args.cached                     ? arrival.cached_row
                                                          : arrival.metadata.dst_row;
    next = next_arrival(args, team, scratch, numbers);
    // A row with one place is there already, unless its scales are to be moved.
    const u32 placed = __ballot_sync(~0u, dst_row >= 0);
    const bool copies = arrival.source != world.rank && (placed & (placed - 1)) != 0,
               scales = args.out_scales != nullptr;
    if (!copies && !(scales && placed != 0)) continue;
    ok = await_arrival(args, arrival, seq);
    if (!ok) break;
    if (copies) replicate_row(args, sender, dst_row);
    for (u32 left = scales ? placed : 0; left != 0; left &= left - 1)
      copy_scales(args, arrival.source, arrival.position, __shfl_sync(~0u, dst_row, __ffs(left) - 1), delivered);
  }
  ptx::bulk_wait_all();
  return ok;
}

// ---- rank-wise layouts: scales at the end ----

// Rows of a source that were not dropped; they are contiguous in both places.
__device__ __forceinline__ i32 rows_kept(const DispatchArgs& args, const DispatchScratch& scratch, i32 source) {
  const i32 rows = scratch.row_start[source + 1] - scratch.row_start[source];
  return LAYOUT == FLAT ? max(0, min(rows, args.world.capacity - scratch.row_start[source])) : rows;
}

// All threads of the rank copy num_bytes; a thread copies a V at a time.
template <class V>
__device__ __forceinline__ void copy_all(Team team, u8* dst, const u8* src, i64 num_bytes) {
  constexpr i32 kUnroll = 6;
  const i64 count = num_bytes / static_cast<i64>(sizeof(V)), step = static_cast<i64>(team.num_blocks) * blockDim.x;
#pragma unroll 1
  for (i64 base = static_cast<i64>(team.block) * blockDim.x + threadIdx.x; base < count; base += kUnroll * step) {
    V value[kUnroll];
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j)
      if (base + j * step < count) value[j] = reinterpret_cast<const V*>(src)[base + j * step];
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j)
      if (base + j * step < count) reinterpret_cast<V*>(dst)[base + j * step] = value[j];
  }
}

// Packed words with their own strides: a lane per row, so that neighbouring lanes write neighbouring words.
__device__ __forceinline__ void copy_packed_scales(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                                   i32 source) {
  const World& world = args.world;
  const i64 column =
      args.scale_column_stride != 0 ? args.scale_column_stride : aligned(rows_delivered(args, scratch), 4);
  u32* dst = reinterpret_cast<u32*>(args.out_scales);
  const i32 first = LAYOUT == FLAT ? scratch.row_start[source] : 0, words = world.scale_bytes / 4;
  if (LAYOUT == RANK_MAJOR) dst += static_cast<i64>(source) * args.scale_group_stride;
#pragma unroll 1
  for (i32 i = team.block * blockDim.x + threadIdx.x; i < rows_kept(args, scratch, source);
       i += team.num_blocks * blockDim.x) {
    const u32* src = reinterpret_cast<const u32*>(scales_at(args, world.rank, source, i));
#pragma unroll 4
    for (i32 word = 0; word < words; ++word)
      dst[word * column + static_cast<i64>(first + i) * args.scale_row_stride] = src[word];
  }
}

// Copies the scales of all received rows to their final places.
__device__ __forceinline__ void copy_all_scales(const DispatchArgs& args, Team team, const DispatchScratch& scratch) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 source = 0; source < world.size; ++source) {
    if (args.scale_row_stride != 0) {
      copy_packed_scales(args, team, scratch, source);
      continue;
    }
    u8* dst = args.out_scales + static_cast<i64>(first_row(args, scratch, source)) * world.scale_bytes;
    const u8* src = scales_at(args, world.rank, source, 0);
    const i64 num_bytes = static_cast<i64>(rows_kept(args, scratch, source)) * world.scale_bytes;
    const u64 alignment = reinterpret_cast<u64>(dst) | reinterpret_cast<u64>(src) | static_cast<u64>(num_bytes);
    if (alignment % 16 == 0) copy_all<Vec<u32, 4>>(team, dst, src, num_bytes);
    else if (alignment % 4 == 0) copy_all<u32>(team, dst, src, num_bytes);
    else copy_all<u8>(team, dst, src, num_bytes);
  }
}

}  // namespace ep::ht
