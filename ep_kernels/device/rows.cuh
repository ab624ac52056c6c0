// Where the rows of HT dispatch are while they move, global -> shared -> global by the copy engine: a few stages per warp, each of
// a piece of a row. Each lane starts its own stores (one destination per lane), so a row that goes to eight ranks is loaded once and
// leaves by eight lanes.
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
    ptx::fence_proxy_shared();
  }
  __syncwarp();
  return pipe;
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
