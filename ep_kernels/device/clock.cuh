// The device end of the latency record: no event, no sync, survives graph replay. One record per operation, written by block 0
// to a ring in pinned host memory: op, mode, seq, tokens, start_ns, send_ns, total_ns, seal, then a wait per peer.
// Nothing waits for the host's memory: the seal is the record's number + 1 plus the sum of the other words, so that the host
// knows a whole record from a torn one. A reader that lags a whole ring behind loses the oldest.
#pragma once

// `words` are args.op (written by this block when it sent, or by an earlier launch), `waits` in shared memory. One block.
__device__ __forceinline__ void write_sample(const World& world, u32 op, u32 mode, i32 num_tokens, const u64* words,
                                             const u64* waits, u64 receive_start) {
  __syncthreads();
  if (warp_idx() != 0) return;
  const i32 lane = lane_idx();
  const u64 head = ptx::load_volatile(&world.state->sample_head);
  const u64 sent = ptx::load_volatile(words + 2);
  u64* record = world.samples + head % SAMPLE_CAPACITY * (SAMPLE_WORDS + world.size);
  u64 sum = 0;
  for (i32 peer = lane; peer < world.size; peer += 32) {
    const u64 wait = world.active[peer] ? waits[peer] : 0;
    record[SAMPLE_WORDS + peer] = wait;
    sum += wait;
  }
  u64 value = 0;
  if (lane == 0) value = op;
  if (lane == 1) value = mode;
  if (lane == 2) value = ptx::load_volatile(words);
  if (lane == 3) value = num_tokens;
  if (lane == 4) value = ptx::load_volatile(words + 1);
  if (lane == 5) value = sent;
  if (lane == 6) value = sent + ptx::now_ns() - receive_start;
  sum += value;
#pragma unroll
  for (i32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 7) value = sum + head + 1;
  if (lane < static_cast<i32>(SAMPLE_WORDS)) record[lane] = value;
  if (lane == 0) world.state->sample_head = head + 1;
}
