#include "helper.hpp"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include "clock.hpp"

namespace cd {

bool HelperThread::start() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
  const bool started = pthread_create(&thread_, nullptr, &HelperThread::enter, this) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started) return false;
  pthread_setname_np(thread_, "crossdock-help");
  owner_ = getpid();
  return true;
}

HelperThread::~HelperThread() {
  if (owner_ != getpid()) return;
  pthread_mutex_lock(&mutex_);
  ends_.store(true);
  pthread_cond_signal(&given_);
  pthread_mutex_unlock(&mutex_);
  pthread_join(thread_, nullptr);
}

void HelperThread::begin(void (*work)(void*), void* with) {
  pthread_mutex_lock(&mutex_);
  work_ = work;
  with_ = with;
  state_.store(State::given);
  pthread_cond_signal(&given_);
  pthread_mutex_unlock(&mutex_);
}

void HelperThread::finish() {
  State given = State::given;
  if (state_.compare_exchange_strong(given, State::idle)) return;  // it has not woken yet
  for (int i = 1; state_.load(std::memory_order_acquire) != State::idle; ++i) {
    relax();
    if (i % 1000 == 0) sched_yield();
  }
}

void* HelperThread::enter(void* self) {
  static_cast<HelperThread*>(self)->run();
  return nullptr;
}

void HelperThread::run() {
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

}  // namespace cd
