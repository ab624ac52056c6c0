// Chunks of an operation that a rank shares with its hand.
#pragma once
#include <atomic>
#include <cstdint>

namespace cd {

// Operations of fewer bytes do not wake it.
constexpr int64_t kHandBytes = 1 << 20;

// Chunks of an operation that a rank and its hand take in turns: a bit for each that nobody has taken.
class Chunks {
 public:
  void fill(int n) { left_.store((1u << n) - 1); }
  void drop() { left_.store(0); }
  uint32_t left() const { return left_.load(std::memory_order_relaxed); }
  // One of those in `among`, which is the caller's now; -1: there is none.
  int take(uint32_t among) {
    uint32_t left = left_.load(std::memory_order_relaxed);
    while (left & among) {
      const int chunk = __builtin_ctz(left & among);
      if (left_.compare_exchange_weak(left, left & ~(1u << chunk))) return chunk;
    }
    return -1;
  }

 private:
  std::atomic<uint32_t> left_{0};
};

}  // namespace cd
