// The only wait loop for peers and for the other blocks. Every wait has a deadline; on expiry the first waiter writes a
// post-mortem record to host memory, sets the sticky abort word and returns false. Nothing traps, nothing hangs. A kernel that
// finds the word set at its start touches nothing but its own outputs: a graph may outlive its communicator.
#pragma once

template <class T>
__device__ __forceinline__ T* region_at(const World& world, i32 rank, u64 offset) {
  return reinterpret_cast<T*>(world.peers[rank] + offset);
}

// The word that rank `from` writes and rank `at` polls.
__device__ __forceinline__ u64* flag_at(const World& world, i32 at, u32 kind, i32 from) {
  return region_at<u64>(world, at, world.map.flags) + static_cast<u64>(kind) * world.size + from;
}

namespace spin {

constexpr u32 kLookAround = 64;       // polls between two looks at clock, abort word and whether the peer has left us out
constexpr u32 kLookAtHost = 64 * 64;  // polls between two looks at host memory (a PCIe read)

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
    if (ptx::load_acquire_gpu(&world.state->aborted) != STOP_RUNNING) return false;
    const u64 waited = ptx::now_ns() - start;
    const u64 left_in = ptx::load_relaxed_sys(flag_at(world, world.rank, FLAG_LEFT_OUT, peer));
    if (left_in != 0) return give_up(world, STOP_LEFT_OUT, op, phase, peer, expected, left_in, waited);
    if (waited > world.timeout_ns) return give_up(world, STOP_TIMED_OUT, op, phase, peer, expected, seen, waited);
    if (polls % kLookAtHost != 0) continue;
    if (ptx::load_relaxed_sys(&world.host->abort) != 0)
      return give_up(world, STOP_ABORTED, op, phase, peer, expected, seen, waited);
    if (ptx::load_relaxed_sys(&world.gone[peer]) != 0) {
      seen = ptx::load_acquire_sys(flag);  // its last words count
      return seen >= expected || give_up(world, STOP_GONE, op, phase, peer, expected, seen, waited);
    }
  }
}

}  // namespace spin
