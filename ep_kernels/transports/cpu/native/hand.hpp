// A second thread of a rank, for copies that need nothing of the rank's own. It sleeps until it gets work.
#pragma once
#include <pthread.h>
#include <sys/types.h>

#include <atomic>

namespace cd {

class Hand {
 public:
  Hand() = default;
  Hand(const Hand&) = delete;
  Hand& operator=(const Hand&) = delete;
  ~Hand();
  bool start();  // false: there can be no thread
  bool is_there() const { return owner_ != 0; }
  // Calls work(with) on the thread, which has nothing to do now.
  void begin(void (*work)(void*), void* with);
  void finish();  // that has returned, or will not be called

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

}  // namespace cd
