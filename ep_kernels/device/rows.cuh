// How rows move: global -> shared -> global by the copy engine, a few pieces in flight per warp. A unit is one piece of one
// row; a warp takes units first, first + step, ... < end. Each lane starts its own stores (one destination per lane), so a
// row that goes to eight ranks is loaded once and leaves by eight lanes.
// A stage holds kStageExtra bytes past the piece, for the scales that a producing warp makes beside it.
#pragma once

constexpr u32 kStages = STAGES;
constexpr u32 kStageExtra = 512;

struct Pipe {
  u8* stages;      // [kStages][piece + extra] of this warp
  u64* barriers;   // [kStages]
  u32 piece_bytes;
  u32 parities;    // bit s: phase that stage s waits for next

  __device__ __forceinline__ u8* stage(u32 s) const { return stages + s * (piece_bytes + kStageExtra); }
};

// All threads of the block call it once, before any move.
__device__ __forceinline__ Pipe open_pipe(const Work& work, u8* shared) {
  Pipe pipe;
  pipe.barriers = reinterpret_cast<u64*>(shared) + warp_idx() * kStages;
  pipe.piece_bytes = work.piece_bytes;
  pipe.stages = shared + work.stage_offset + warp_idx() * kStages * (work.piece_bytes + kStageExtra);
  pipe.parities = 0;
  if (lane_idx() == 0) {
    for (u32 s = 0; s < kStages; ++s) ptx::barrier_init(pipe.barriers + s);
    ptx::fence_barrier_init();
    ptx::fence_proxy_async();
  }
  __syncwarp();
  return pipe;
}

struct Piece {
  const u8* from;  // null = nothing to move
  u32 num_bytes;
};

// source(unit) -> Piece (same in all lanes); deliver(unit, stage, num_bytes) is called by all lanes and may start stores.
template <class Source, class Deliver>
__device__ __forceinline__ void copy_rows(Pipe& pipe, i64 first, i64 end, i64 step, Source source, Deliver deliver) {
  u32 turn = 0;
  auto load = [&](i64 unit, u32 s) -> Piece {
    Piece piece = {nullptr, 0};
    if (unit < end) piece = source(unit);
    if (piece.from != nullptr && lane_idx() == 0)
      ptx::bulk_load(pipe.stage(s), piece.from, piece.num_bytes, pipe.barriers + s);
    return piece;
  };
  if (first >= end) return;
  ptx::bulk_wait_read<0>();
  __syncwarp();
  Piece piece = load(first, 0);
  for (i64 unit = first; unit < end; unit += step, ++turn) {
    const u32 s = turn % kStages, next = (turn + 1) % kStages;
    ptx::bulk_wait_read<kStages - 2>();
    __syncwarp();
    const Piece ahead = load(unit + step, next);
    if (piece.from != nullptr) {
      ptx::bulk_load_wait(pipe.barriers + s, pipe.parities >> s & 1);
      pipe.parities ^= 1u << s;
      deliver(unit, pipe.stage(s), piece.num_bytes);
    }
    ptx::bulk_commit();
    piece = ahead;
  }
}

// produce(unit, stage) -> bytes written to the stage by the warp (0 = nothing to deliver).
template <class Produce, class Deliver>
__device__ __forceinline__ void make_rows(Pipe& pipe, i64 first, i64 end, i64 step, Produce produce, Deliver deliver) {
  u32 turn = 0;
  for (i64 unit = first; unit < end; unit += step, ++turn) {
    u8* stage = pipe.stage(turn % kStages);
    ptx::bulk_wait_read<kStages - 1>();
    __syncwarp();
    const u32 num_bytes = produce(unit, stage);
    ptx::fence_proxy_async();
    __syncwarp();
    if (num_bytes != 0) deliver(unit, stage, num_bytes);
    ptx::bulk_commit();
    __syncwarp();
  }
}

// A warp copies bytes by ordinary accesses: words where all three allow it.
__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, i32 num_bytes) {
  if (((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | static_cast<u64>(num_bytes)) & 3) == 0) {
    for (i32 i = lane_idx() * 4; i < num_bytes; i += 128)
      *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>(from + i);
  } else {
    for (i32 i = lane_idx(); i < num_bytes; i += 32) to[i] = from[i];
  }
}
