// A second thread of a rank, for copies that need nothing of the rank's own. It sleeps until it gets work.
#pragma once
#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "clock.hpp"

namespace cd {

// Operations of fewer bytes do not wake it.
constexpr int64_t kHelperBytes = 1 << 20;
// It looks for work so long after the last, then leaves the rest to the rank.
constexpr int64_t kHelperSpinNs = 500'000;

class HelperThread {
 public:
  HelperThread() = default;
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;
  ~HelperThread();
  bool start();  // false: there can be no thread
  bool is_there() const { return owner_ != 0; }
  // Calls work(with) on the thread, which has nothing to do now.
  void begin(void (*work)(void*), void* with);
  void finish();  // that has returned, or will not be called
  // What such work does: steps, while something is left. step(): false if nothing can be done just now.
  template <typename Left, typename Step>
  static void help(Left left, Step step);

 private:
  enum class State { idle, given, taken };

  static void* enter(void* self);
  void run();

  pthread_t thread_;
  pid_t owner_ = 0;  // a forked child has no such thread
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t given_ = PTHREAD_COND_INITIALIZER;
  std::atomic<State> state_{State::idle};
  std::atomic<bool> ends_{false};
  void (*work_)(void*) = nullptr;
  void* with_ = nullptr;
};

template <typename Left, typename Step>
void HelperThread::help(Left left, Step step) {
  for (int64_t last_ns = now_ns(); left();) {
    if (step()) {
      last_ns = now_ns();
    } else if (now_ns() - last_ns < kHelperSpinNs) {
      relax();
    } else {
      return;
    }
  }
}

// Chunks of an operation that a rank and its helper take in turns: a bit for each that nobody has taken.
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
