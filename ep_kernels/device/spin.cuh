// The only wait loop for peers and for the other blocks. Every wait has a deadline; on expiry the first waiter writes a
// post-mortem record to host memory, sets the sticky abort word and returns false. Nothing traps, nothing hangs.
#pragma once

namespace spin {

constexpr u32 kLookAround = 64;       // polls between two looks at clock and abort word
constexpr u32 kLookAtHost = 64 * 64;  // polls between two looks at host memory (a PCIe read)

// Why this rank stopped.
constexpr u64 kRunning = 0, kTimedOut = 1, kAbortedByHost = 2, kPeerGone = 3;

__device__ __noinline__ bool give_up(const World& world, u64 why, u32 op, u32 phase, u32 peer, u64 expected, u64 seen,
                                     u64 waited_ns) {
  if (ptx::compare_and_swap_gpu(&world.state->aborted, kRunning, why) != kRunning) return false;
  Postmortem* record = &world.host->postmortem;
  record->op = op;
  record->phase = phase;
  record->peer = peer;
  record->expected = expected;
  record->seen = seen;
  record->waited_ns = waited_ns;
  ptx::fence_sys();
  ptx::store_release_sys(&record->status, why);
  return false;
}

// True once *flag >= expected, with everything that the peer wrote before visible to this thread.
__device__ __forceinline__ bool wait_for(const World& world, const u64* flag, u64 expected, u32 op, u32 phase, u32 peer) {
  u64 seen = ptx::load_acquire_sys(flag);
  if (seen >= expected) return true;
  const u64 start = ptx::now_ns();
  for (u32 polls = 1;; ++polls) {
    seen = ptx::load_acquire_sys(flag);
    if (seen >= expected) return true;
    if (polls % kLookAround != 0) continue;
    if (ptx::load_acquire_gpu(&world.state->aborted) != kRunning) return false;
    const u64 waited = ptx::now_ns() - start;
    if (waited > world.timeout_ns) return give_up(world, kTimedOut, op, phase, peer, expected, seen, waited);
    if (polls % kLookAtHost != 0) continue;
    if (ptx::load_relaxed_sys(&world.host->abort) != 0)
      return give_up(world, kAbortedByHost, op, phase, peer, expected, seen, waited);
    if (ptx::load_relaxed_sys(&world.gone[peer]) != 0) {
      seen = ptx::load_acquire_sys(flag);  // its last words count
      return seen >= expected || give_up(world, kPeerGone, op, phase, peer, expected, seen, waited);
    }
  }
}

__device__ __forceinline__ bool stopped(const World& world) {
  return ptx::load_acquire_gpu(&world.state->aborted) != kRunning;
}

}  // namespace spin
