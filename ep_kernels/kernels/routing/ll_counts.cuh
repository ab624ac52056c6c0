// Count exchange of LL dispatch: one block per source rank counts its rows and sends one packet per peer; every
// receiving block waits for the packets of all sources. A count packet has the number of rows and the routing's age; in
// per-expert layouts LL128 lines follow, with the rows per local expert.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/push.cuh"
#include "common/status.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "layout/ll128.cuh"
#include "routing/experts.cuh"
#include "routing/ll_scan.cuh"
#include "types.h"

namespace ep::ll {

// ---- source rank ----

// Rows per rank, and ids out of range. Rows per expert: scratch.expert_counts.
struct SendCounts {
  i32 rows[MAX_RANKS], num_invalid;
};

// Counts an entry in shared memory of one block, which starts as zeros; `first_of_rank`: the token's first entry for
// its rank. All lanes.
__device__ __forceinline__ void count_entry(const World& world, const LlScratch& scratch, SendCounts& send_counts,
                                            i32 key, bool first_of_rank) {
  const u32 same = __match_any_sync(~0u, first_of_rank ? key >> 16 : -1);
  if (first_of_rank && lane_idx() == __ffs(same) - 1) atomicAdd(&send_counts.rows[key >> 16], __popc(same));
  if (kPerExpert && key >= 0) atomicAdd(&scratch.expert_counts[expert_counter(world, key)], 1);
  if (key == kBadId) atomicAdd(&send_counts.num_invalid, 1);
}

// One warp; before rows fill the links. `low`: rows to rank `lane`; `high`: to rank 32 + lane.
__device__ __forceinline__ void send_count_packets(const DispatchArgs& args, i32 low, i32 high, u64 routing_id,
                                                   u64 seq) {
  const i32 rank = args.world.rank;
  for (i32 peer = lane_idx(); NETWORK && peer < args.world.size; peer += 32)  // for the block that pushes
    ptx::store_volatile(&args.world.state->network.rows[peer], peer < 32 ? low : high);
  for (i32 peer = lane_idx(); peer < args.world.size; peer += 32)
    if (is_active(peer))
      ptx::store_pair(count_packet_at(args, peer, rank),
                      static_cast<u32>(peer < 32 ? low : high) | (seq - routing_id) << 32, seq);
}

// One block, a warp per peer. The first warp, which also sends the count packets, is the last to get a peer.
__device__ __forceinline__ void send_expert_counts(const DispatchArgs& args, const LlScratch& scratch, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 peer = (warp_idx() + num_warps() - 1) % num_warps(); kPerExpert && peer < world.size; peer += num_warps()) {
    if (!is_active(peer)) continue;
    const i32* counts = scratch.expert_counts + peer * world.local_stride;
    auto word = [&](i32 i) -> u32 { return i < world.local_stride ? counts[i] : 0; };
#pragma unroll 1
    for (i32 line = 0; line < world.count_lines; line += 4) {
      const i32 at = (line + (lane_idx() >> 3)) * kLineInts + (lane_idx() & 7) * 4;
      store_lines(count_lines_at(args, peer, world.rank) + line * kLineBytes, min(4, world.count_lines - line),
                  vector_of(word(at), word(at + 1), word(at + 2), word(at + 3)), seq);
    }
  }
}

// ---- expert rank ----

__device__ __forceinline__ u64 routing_id_in(const Vector& count_packet) {
  return count_packet.high - (count_packet.low >> 32);
}

// Waits until everything of an operation has come from remote ranks, whose rows nobody will read. The next operation of
// this rank is credit for their slot, and a network may bring a row of this one behind those that take it next. One
// warp.
__device__ __noinline__ bool await_all_rows(const World& world, u64 seq) {
  bool ok = true;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 source = base + lane_idx();
    const bool awaited = source < world.size && is_active(source) && is_remote(world, source);
    ok &= net::warp_wait_for_rows(world, seq, PHASE_COUNTS, source, [] { return true; },
                                  [&] { return !awaited || net::look(world, FLAG_PAYLOAD, source, seq) >= seq; });
  }
  return ok;
}

// Waits for the count packets of all sources and writes their rows to scratch.recv_counts. One warp.
__device__ __forceinline__ Status await_count_packets(const DispatchArgs& args, const LlScratch& scratch,
                                                      u64 routing_id, u64 seq, u64 start, u64* waits) {
  const World& world = args.world;
  bool mismatch = false;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    // A lane for each source: poll until its packet has this seq.
    const i32 source = base + lane_idx();
    const bool expected = source < world.size && is_active(source);
    Vector packet = {0, seq};
    u64 waited = 0;
    const u8* at = count_packet_at(args, world.rank, expected ? source : world.rank);
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_COUNTS, source, [&] {
          if (expected && !net::has_head(world, source, seq)) {
            waited = ptx::now_ns() - start;
            return false;
          }
          if (expected) packet = ptx::load_pair<Vector>(at);
          if (packet.high != seq) waited = ptx::now_ns() - start;
          return packet.high == seq;
        }))
      return kFailed;
    // How long it took, whether its routing is this one, and its rows.
    if (expected && source != world.rank) note_wait(waits, source, waited);
    mismatch |= expected && routing_id_in(packet) != routing_id;
    if (source < world.size)
      scratch.recv_counts[source * recv_counts_stride(world)] = expected ? static_cast<i32>(packet.low) : 0;
  }
  mismatch = __any_sync(~0u, mismatch);
  if (NETWORK && mismatch && !await_all_rows(world, seq)) return kFailed;
  return mismatch ? kRoutingMismatch : kOk;
}

// Waits for the counts per local expert of one source. One warp; false after a failed wait.
__device__ __forceinline__ bool await_expert_counts(const DispatchArgs& args, const LlScratch& scratch, i32 source,
                                                    u64 seq) {
  const World& world = args.world;
  i32* counts = scratch.recv_counts + source * recv_counts_stride(world) + 1;
  if (!is_active(source)) {
    for (i32 i = lane_idx(); i < world.local_stride; i += 32) counts[i] = 0;
    return true;
  }
#pragma unroll 1
  for (i32 line = 0; line < world.count_lines; line += 4) {
    Vector mine = {};
    const u8* at = count_lines_at(args, world.rank, source) + line * kLineBytes;
    const i32 lines = min(4, world.count_lines - line);
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_COUNTS, source,
                         [&] {
                           return net::warp_has_head(world, source) && poll_lines(at, lines, seq, &mine);
                         }))
      return false;
    const i32 first = (line + (lane_idx() >> 3)) * kLineInts + (lane_idx() & 7) * 4;
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      if (!is_flag_lane() && lane_idx() < 8 * lines && first + i < world.local_stride)
        counts[first + i] = word_of(mine, i);
  }
  return true;
}

}  // namespace ep::ll
