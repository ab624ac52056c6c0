// The only wait loops for peers and for other blocks. Every wait has a deadline; on expiry the first waiter sets the
// sticky abort word, writes a post-mortem record to host memory and returns false. Nothing traps, nothing hangs. A
// kernel that finds the word set at its start touches only its own outputs: a graph may outlive its communicator.
#pragma once

#include "common/ptx.cuh"
#include "common/words.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep {

constexpr u32 kArrivalTotalBits = 20;
constexpr u64 kArrivalTotal = 1ull << kArrivalTotalBits;  // what an operation adds to a normalized arrival counter

namespace spin {

constexpr u32 kLookAround = 64;       // polls between checks of clock, abort word and the peer's LEFT_OUT flag
constexpr u32 kLookAtHost = 64 * 64;  // polls between checks of host memory (a PCIe read)

__device__ __noinline__ bool give_up(const World& world, u64 why, u32 op, u32 phase, u32 peer, u64 expected, u64 seen,
                                     u64 waited_ns) {
  if (ptx::compare_and_swap_gpu(&world.state->aborted, STOP_RUNNING, why) != STOP_RUNNING) return false;
  Postmortem* record = &world.host->postmortem;
  record->op = op;
  record->phase = phase;
  record->peer = peer;
  record->expected = expected;
  record->seen = seen;
  record->waited_ns = waited_ns;
  record->block = blockIdx.x;
  ptx::fence_sys();
  ptx::store_release_sys(&record->status, why);
  return false;
}

struct Reason {
  u64 why, seen;  // STOP_RUNNING = continue
};

// Whether a wait for `peer` that began at `start` must end now, and why.
__device__ __noinline__ Reason reason_to_stop(const World& world, u32 polls, u64 start, u32 peer) {
  const u64 aborted = ptx::load_acquire_gpu(&world.state->aborted);
  if (aborted != STOP_RUNNING) return {aborted, 0};
  const u64 left_in = is_remote(world, peer) ? net::look(world, FLAG_LEFT_OUT, peer, 1)
                                             : ptx::load_relaxed_sys(flag_at(world, world.rank, FLAG_LEFT_OUT, peer));
  if (left_in != 0) return {STOP_LEFT_OUT, left_in};
  if (ptx::now_ns() - start > world.timeout_ns) return {STOP_TIMED_OUT, 0};
  if (polls % kLookAtHost != 0) return {STOP_RUNNING, 0};
  if (ptx::load_relaxed_sys(&world.host->abort) != 0) return {STOP_ABORTED, 0};
  return {ptx::load_relaxed_sys(&world.gone[peer]) != 0 ? STOP_GONE : STOP_RUNNING, 0};
}

// Polls until poll() is true in all lanes. One warp; each lane names the peer it waits for, which poll() may change.
// False when the rank was stopped. After a reason to stop there is one more poll, so that data a dying peer still sent
// counts.
template <class Poll>
__device__ __forceinline__ bool warp_wait(const World& world, u64 expected, u32 op, u32 phase, const i32& peer,
                                          Poll poll) {
  u64 start = 0;
  Reason reason = {STOP_RUNNING, 0};
#pragma unroll 1
  for (u32 polls = 1;; ++polls) {
    const bool ready = poll();
    if (__all_sync(~0u, ready)) return true;
    const u32 stopped = __ballot_sync(~0u, reason.why != STOP_RUNNING);
    if (stopped != 0) {
      if ((threadIdx.x & 31) == __ffs(stopped) - 1)
        give_up(world, reason.why, op, phase, peer, expected, reason.seen, ptx::now_ns() - start);
      return false;
    }
    if (polls == 1) start = ptx::now_ns();
    if (polls % kLookAround == 0 && !ready) reason = reason_to_stop(world, polls, start, peer);
  }
}

// Polls until *flag >= expected; everything that the peer wrote before is then visible to this thread. In PHASE_PAYLOAD
// the flag is a normalized arrival counter; the post-mortem record has whole operations.
__device__ __noinline__ bool wait_for(const World& world, const u64* flag, u64 expected, u32 op, u32 phase, u32 peer) {
  const u32 shift = phase == PHASE_PAYLOAD ? kArrivalTotalBits : 0;
  u64 seen = ptx::load_acquire_sys(flag);
  if (seen >= expected) return true;
  const u64 start = ptx::now_ns();
  for (u32 polls = 1;; ++polls) {
    seen = ptx::load_acquire_sys(flag);
    if (seen >= expected) return true;
    // Now and then: this rank is stopped, or left out by the peer, or it has waited long enough.
    if (polls % kLookAround != 0) continue;
    if (ptx::load_acquire_gpu(&world.state->aborted) != STOP_RUNNING) return false;
    const u64 waited = ptx::now_ns() - start;
    const u64 left_in = ptx::load_relaxed_sys(flag_at(world, world.rank, FLAG_LEFT_OUT, peer));
    const u64 whole = expected >> shift;
    if (left_in != 0) return give_up(world, STOP_LEFT_OUT, op, phase, peer, whole, left_in, waited);
    if (waited > world.timeout_ns) return give_up(world, STOP_TIMED_OUT, op, phase, peer, whole, seen >> shift, waited);
    // Less often, since it is far away: what the host says.
    if (polls % kLookAtHost != 0) continue;
    if (ptx::load_relaxed_sys(&world.host->abort) != 0)
      return give_up(world, STOP_ABORTED, op, phase, peer, whole, seen >> shift, waited);
    if (ptx::load_relaxed_sys(&world.gone[peer]) != 0) {
      seen = ptx::load_acquire_sys(flag);  // the peer may have stored it just before it died
      return seen >= expected || give_up(world, STOP_GONE, op, phase, peer, whole, seen >> shift, waited);
    }
  }
}

}  // namespace spin

}  // namespace ep
