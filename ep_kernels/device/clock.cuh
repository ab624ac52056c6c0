// The device end of the latency record: no event, no sync, survives graph replay. One record per operation, to a ring in
// pinned host memory, by the last of the rank's blocks to finish, so that its end is the operation's: op, mode, seq, tokens,
// start_ns, send_ns, total_ns, seal, then the wait per peer as that block had it. send_ns ends when the last block had sent.
// Nothing waits for the host's memory: the seal is the record's number + 1 plus the sum of the other words, so that the host
// knows a whole record from a torn one. A reader that lags a whole ring behind loses the oldest.
#pragma once

constexpr u32 kSend = 1, kReceive = 2, kWholeOperation = kSend | kReceive;            // work.halves
constexpr u32 kOpSeq = 0, kOpStart = 1, kOpSent = 2, kOpReceive = 3, kNumOpWords = 4;  // words of args.op

// The sending half begins / has ended; one thread of block 0 / of the last block to send.
__device__ __forceinline__ void note_start(u64* words, u64 seq, u64 start) {
  words[kOpSeq] = seq;
  words[kOpStart] = start;
}
__device__ __forceinline__ void note_sent(u64* words) { words[kOpSent] = ptx::now_ns() - ptx::load_volatile(words + kOpStart); }

// The receiving half begins; `start` is returned to time the waits.
__device__ __forceinline__ u64 note_receive(Team team, u64* words) {
  const u64 start = ptx::now_ns();
  if (team.block == 0 && threadIdx.x == 0) words[kOpReceive] = start;
  return start;
}

// The operation has ended for this block. `words` are args.op (filled by an earlier launch where `halves` says so), `waits`
// this block's, in shared memory. All threads.
__device__ __forceinline__ void write_sample(const World& world, Team team, u32 op, u32 mode, i32 num_tokens, u32 halves,
                                             const u64* words, const u64* waits) {
  __syncthreads();
  if (warp_idx() != 0) return;
  const i32 lane = lane_idx();
  const bool last = lane == 0 && arrive(world, team, TICKET_RECEIVE);
  if (!__shfl_sync(~0u, last, 0)) return;
  const u64 end = ptx::now_ns();
  const u64 head = ptx::load_volatile(&world.state->sample_head);
  const u64 word = lane < static_cast<i32>(kNumOpWords) ? ptx::load_volatile(words + lane) : 0;
  const u64 seq = __shfl_sync(~0u, word, kOpSeq), start = __shfl_sync(~0u, word, kOpStart);
  const u64 sent = __shfl_sync(~0u, word, kOpSent), received = __shfl_sync(~0u, word, kOpReceive);
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
  if (lane == 2) value = seq;
  if (lane == 3) value = num_tokens;
  if (lane == 4) value = start;
  if (lane == 5) value = sent;
  if (lane == 6) value = halves == kWholeOperation ? end - start : sent + end - received;
  sum += value;
#pragma unroll
  for (i32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 7) value = sum + head + 1;
  if (lane < static_cast<i32>(SAMPLE_WORDS)) record[lane] = value;
  if (lane == 0) world.state->sample_head = head + 1;
}
