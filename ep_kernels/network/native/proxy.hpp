// The proxy: one thread of a process that moves what its ranks have pushed, and reports what has arrived.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "bits.hpp"
#include "clock.hpp"
#include "provider.hpp"
#include "ring.hpp"

namespace cd {

constexpr int kControlLane = 0xff;     // in the tag of a descriptor: the control connection of a peer
constexpr uint64_t kEventTag = ~0ull;  // the proxy's own event descriptor

// Orders that wait for room in a provider's window. Bounded by what the ranks' own flow control lets them push.
class Backlog {
 public:
  bool push(const Order& order);  // false: memory is short
  Order* front() { return count_ ? &data_[head_] : nullptr; }
  void pop() {
    head_ = (head_ + 1) % size_;
    --count_;
  }
  uint64_t count() const { return count_; }
  uint64_t clear();  // how many there were
  void free_memory();

 private:
  Order* data_ = nullptr;
  uint64_t size_ = 0, head_ = 0, count_ = 0;
};

// Mirrored by network/proxy.py.
struct Traffic {
  uint64_t sent_messages, sent_bytes, received_messages, backlog_most;
};

// What has arrived at one end that is no rank's: a ping's. Mirrored by network/providers.py.
struct Mark {
  std::atomic<uint64_t> count;
  std::atomic<int64_t> at_ns;
};

// A rank at the other end of a control connection and of its lanes.
struct NetPeer {
  int control_fd = -1;
  int lanes = 0, lanes_ended = 0;
  bool up = false;      // this end has joined
  bool established = false;  // the other has, too
  bool reported_up = false;  // the owner was told of an established connection, and of no end since
  bool closed_in_order = false;  // it has announced its end
  uint64_t left_out = 0;  // it said that it leaves this rank out: tag of the epoch
  int error = 0;
  Text why;  // of the error, in the provider's words
  int64_t received_ns = 0;  // about when the last bytes came
  int64_t down_at_ns = 0;  // when it counts as down though a lane is still open; 0: it does not end
  uint8_t message[16];
  int message_bytes = 0;
  Backlog backlog;
  Traffic traffic{};
};

struct Proxy;

// One rank's use of the network: its outbox, its mirrors, its peers.
struct NetChannel {
  Proxy* proxy;
  int index;
  uint32_t generation;
  NetMemory memory;
  int64_t patience_ns;  // of NetSettings
  NetHandler handler;
  void* context;
  Provider* provider;
  Outbox* outbox;
  NetPeer peers[kNetRanks];
  std::atomic<uint64_t> joined, established;  // bit per rank whose connections this end, or both, have joined
};

struct Proxy {
  static constexpr int kChannels = 1024;
  static constexpr int kHalfClosed = 4096, kRetired = 64;
  static constexpr int kHot = 2;

  bool start(int64_t spin_ns, const int32_t* cpus, int num_cpus);
  void stop();  // every channel is closed; frees nothing

  // Any thread.
  int add(NetChannel* channel);     // 0 or an errno; EIO: the provider's `about` says more
  void remove(NetChannel* channel);  // no event comes any more
  // Replaces an established connection: a peer that dials anew has lost it. `join` and `leave` of another thread may
  // come after `remove`, and then do nothing.
  int join(NetChannel* channel, int rank, int control_fd, const int32_t* lanes, int num_lanes);
  int leave(NetChannel* channel, int rank, uint64_t tag);  // 0, or an errno
  void why(NetChannel* channel, int rank, Text* out);    // why its connection ended, "" if nothing is known
  void traffic(NetChannel* channel, Traffic* out);  // `out` stays as it is while the proxy stands still
  void restart_ring(NetChannel* channel);  // of kernels, none of which runs: takes what they have pushed, empties it
  void close_in_child();  // in a forked child: closes its copies of descriptors

 private:
  struct HalfClosed {
    int fd;
    int64_t until_ns;
  };
  class Hold;

  template <typename Fn>
  void for_each(Fn fn) const {
    for (int i = 0; i < num_channels_; ++i) {
      if (channels_[i]) fn(*channels_[i]);
    }
  }
  static void* enter(void* self);
  void run();
  bool turn();
  bool flush(NetChannel& c);
  void end_refused(NetChannel& c);
  bool handle(uint64_t tag, uint32_t events);
  void control(NetChannel& c, int rank);
  int read_control(NetChannel& c, int rank);
  void begin_end(NetChannel& c, int rank, int error);
  void check_end(NetChannel& c, int rank, int64_t now);
  void establish(NetChannel& c, int rank);
  static void publish(NetChannel& c);
  void disconnect(NetChannel& c, int rank, bool notify);
  void refuse(NetChannel& c, const Order& order, int error);
  void close_after_peer(int fd, int64_t patience_ns);
  void close_fd(int& fd);
  bool idle() const;
  bool expects() const;
  bool has_devices() const;
  static void sent(void* channel, int rank);
  static void arrived(void* channel, int rank, uint32_t imm);
  static void ended(void* channel, int rank, int error, const char* why);

  pthread_t thread_;
  pthread_mutex_t mutex_;
  std::atomic<int> waiting_;
  std::atomic<bool> stop_;
  int64_t spin_ns_, next_ns_, now_;
  // Lanes that brought something since the last sleep, newest first, read without asking epoll: a read that finds
  // nothing costs no more than the question. 0: none. A tag of a channel has a generation, so it is not 0.
  uint64_t hot_[kHot];
  int64_t asked_ns_, arrived_ns_;
  bool busy_;  // something arrived since the last turn
  int epoll_fd_, event_fd_;
  uint32_t generations_;
  int num_channels_;  // one more than the highest index in use
  NetChannel* channels_[kChannels];
  // Of channels that were removed: their last connections may not close yet.
  int retired_count_;
  Provider* retired_[kRetired];
  int half_closed_count_;
  HalfClosed half_closed_[kHalfClosed];
};

// What another thread waits for the mutex of the proxy, which stands still where a driver or a library does. Nothing is
// decided by a question that got no answer; what changes connections is as patient as the rank.
constexpr int64_t kAskedNs = 100'000'000, kForEver = -1;

// The mutex of the proxy, held by another thread; false: it was not to be had within `limit_ns`.
class Proxy::Hold {
 public:
  Hold(Proxy& proxy, int64_t limit_ns) : proxy_(proxy) {
    proxy.waiting_.fetch_add(1);
    if (limit_ns == kForEver) {
      held_ = pthread_mutex_lock(&proxy.mutex_) == 0;
    } else {
      const int64_t until_ns = now_ns() + limit_ns;
      while (!(held_ = pthread_mutex_trylock(&proxy.mutex_) == 0) && now_ns() < until_ns) nap(kRetryNs);
    }
    proxy.waiting_.fetch_sub(1);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() {
    if (held_) pthread_mutex_unlock(&proxy_.mutex_);
  }
  explicit operator bool() const { return held_; }

 private:
  static constexpr int64_t kRetryNs = 20'000;

  Proxy& proxy_;
  bool held_ = false;
};

}  // namespace cd
