// The clock and the pause of every spinning wait, for the network and the transports above it.
#pragma once
#include <sched.h>
#include <time.h>

#include <cstdint>

namespace cd {

// CLOCK_MONOTONIC.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void nap(int64_t ns) {
  const timespec limit{0, long(ns)};
  nanosleep(&limit, nullptr);
}

// Where another thread may want this processor.
inline void yield() { sched_yield(); }

}  // namespace cd
