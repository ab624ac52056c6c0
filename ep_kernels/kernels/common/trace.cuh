// Latency records, device side: no events, no extra synchronisation of blocks, valid under graph replay. One record per
// operation, in a ring in device memory: op, mode, seq, tokens, start_ns, send_ns (until the last block has sent), time
// at which receiving began (0: in the launch that sent), time at which the last block ended, parts; then the wait per
// peer of the first receiving block.
//
// The last block to send fills in the record and advances the ring; each receiving block adds its end. `parts` reaches
// kCompleteRecord when all have: the sender adds kCompleteRecord less the number of receiving blocks, each of these
// adds 1. No fence orders them: the host (transports/nvlink/memory/samples.py) copies the ring, and takes a record only
// from a copy made after one in which it was complete. A reader that lags a whole ring behind loses the oldest.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep {

constexpr u32 kOpSeq = 0, kOpRecord = 1, kNumOpWords = 2;  // words of args.op
constexpr u32 kReceived = 6, kEnd = 7, kParts = 8;         // words of a record
constexpr u64 kCompleteRecord = 1ull << 32;

__device__ __forceinline__ u64* record_at(const World& world, u64 number) {
  return world.samples + number % SAMPLE_CAPACITY * (SAMPLE_WORDS + world.size);
}

// Number of this operation's record. Any thread, before its block arrives at the end of sending.
__device__ __forceinline__ u64 record_number(const World& world, u32 phases, const u64* words) {
  return ptx::load_cached(phases & kSend ? &world.state->sample_head : words + kOpRecord);
}

// End of the send phase, successful or not: its stores are issued, which SENT announces (barrier.cuh). One thread of
// the last block; `receivers`: number of blocks that will call note_end.
__device__ __forceinline__ void note_sent(const World& world, u32 op, u32 mode, i32 num_tokens, u64 seq, u64 start,
                                          u64* words, i32 receivers) {
  const u64 number = ptx::load_volatile(&world.state->sample_head);
  ptx::store_relaxed_sys(flag_at(world, world.rank, op == OP_DISPATCH ? FLAG_SENT : FLAG_COMBINE_SENT, world.rank),
                         seq);
  words[kOpSeq] = seq;
  words[kOpRecord] = number;
  u64* record = record_at(world, number);
  const u64 values[] = {op, mode, seq, static_cast<u64>(num_tokens), start, ptx::now_ns() - start};
#pragma unroll
  for (u32 i = 0; i < kReceived; ++i) record[i] = values[i];
  u64* next = record_at(world, number + 1);
  next[kReceived] = next[kEnd] = next[kParts] = 0;
  world.state->sample_head = number + 1;
  ptx::add_relaxed_gpu(record + kParts, kCompleteRecord - receivers);
}

// Notes a warp's wait for a peer; the block keeps the longest.
__device__ __forceinline__ void note_wait(u64* waits, i32 peer, u64 waited) { atomicMax(&waits[peer], waited); }

// Start of the receive phase. Returns the time, from which waits are counted.
__device__ __forceinline__ u64 note_receive(const World& world, Team team, u32 phases, u64 number) {
  const u64 start = ptx::now_ns();
  if (phases == kReceive && team.block == 0 && threadIdx.x == 0) record_at(world, number)[kReceived] = start;
  return start;
}

// End of the operation for this block; `waits` are its waits in shared memory. All threads.
__device__ __forceinline__ void note_end(const World& world, Team team, u64 number, const u64* waits) {
  __syncthreads();
  if (warp_idx() != 0) return;
  u64* record = record_at(world, number);
#pragma unroll 1
  for (i32 peer = lane_idx(); team.block == 0 && peer < world.size; peer += 32)
    record[SAMPLE_WORDS + peer] = is_active(peer) ? waits[peer] : 0;
  __syncwarp();
  if (lane_idx() != 0) return;
  ptx::max_relaxed_gpu(record + kEnd, ptx::now_ns());
  ptx::add_relaxed_gpu(record + kParts, 1);
}

}  // namespace ep
