// A second thread of whoever owns it, for work that needs nothing of the owner's thread. It sleeps until it gets work.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "clock.hpp"

namespace cd {

class Hand {
 public:
  Hand() = default;
  Hand(const Hand&) = delete;
  Hand& operator=(const Hand&) = delete;
  ~Hand() {
    if (owner_ != getpid()) return;
    pthread_mutex_lock(&mutex_);
    ends_.store(true);
    pthread_cond_signal(&given_);
    pthread_mutex_unlock(&mutex_);
    pthread_join(thread_, nullptr);
  }

  // False: there can be no thread. name: at most 15 characters.
  bool start(const char* name) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
    const bool started = pthread_create(&thread_, nullptr, &Hand::enter, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!started) return false;
    pthread_setname_np(thread_, name);
    owner_ = getpid();
    return true;
  }

  bool is_there() const { return owner_ != 0; }

  // Calls work(with) on the thread, which has nothing to do now.
  void begin(void (*work)(void*), void* with) {
    pthread_mutex_lock(&mutex_);
    work_ = work;
    with_ = with;
    state_.store(State::given);
    pthread_cond_signal(&given_);
    pthread_mutex_unlock(&mutex_);
  }

  // That has returned, or will not be called.
  void finish() {
    State given = State::given;
    if (state_.compare_exchange_strong(given, State::idle)) return;  // it has not woken yet
    for (int i = 1; state_.load(std::memory_order_acquire) != State::idle; ++i) {
      relax();
      if (i % 1000 == 0) sched_yield();
    }
  }

 private:
  enum class State { idle, given, taken };

  static void* enter(void* self) {
    static_cast<Hand*>(self)->run();
    return nullptr;
  }

  void run() {
    for (;;) {
      pthread_mutex_lock(&mutex_);
      while (state_.load() != State::given && !ends_.load()) pthread_cond_wait(&given_, &mutex_);
      pthread_mutex_unlock(&mutex_);
      if (ends_.load()) return;
      State given = State::given;
      if (!state_.compare_exchange_strong(given, State::taken)) continue;
      work_(with_);
      state_.store(State::idle, std::memory_order_release);
    }
  }

  pthread_t thread_;
  pid_t owner_ = 0;  // a forked child has no such thread
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t given_ = PTHREAD_COND_INITIALIZER;
  std::atomic<State> state_{State::idle};
  std::atomic<bool> ends_{false};
  void (*work_)(void*) = nullptr;
  void* with_ = nullptr;
};

}  // namespace cd
