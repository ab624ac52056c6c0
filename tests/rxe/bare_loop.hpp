// What the bare loops have in common: the clock, and the ping-pong.
#pragma once

#include <time.h>

#include <algorithm>
#include <vector>

namespace bare {

inline double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e6 + double(t.tv_nsec) / 1e3;
}

// p50 in us of one way, of `rounds` messages of so many bytes there and back; `side` has counted no arrival before.
template <class Side>
double ping_pong_us(Side& side, bool first, long rounds, size_t bytes) {
  std::vector<double> took;
  took.reserve(size_t(rounds));
  for (long i = 0; i < rounds; ++i) {
    const double begun = now_us();
    if (first) side.write(bytes);
    while (side.arrived <= i) side.poll();
    if (!first) side.write(bytes);
    took.push_back((now_us() - begun) / 2);
  }
  std::sort(took.begin(), took.end());
  return took[size_t(rounds) / 2];
}

}  // namespace bare
