// How the proxy sleeps without losing a push. It looks for work for `spin_ns`, then sets `asleep` in every outbox,
// looks once more, and waits in epoll. A rank that has pushed reads `asleep` and writes to the event descriptor. Both
// put a sequentially consistent operation between their write and their read, so one of them sees the other.
//
// A rank on a GPU cannot wake it; its host does when it launches a kernel that pushes, but not when it replays a graph.
// Where there is one, the proxy is awake for half a millisecond after the last work, and then sleeps for a quarter of
// the time that it has been idle, at most a millisecond, and from a second on 4 ms, and looks at the rings in between.
#include "proxy.hpp"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace cd {
namespace {

constexpr int64_t kStopNs = 1'000'000'000;  // for what peers have not read yet
constexpr int64_t kHalfClosedLookNs = 5'000'000;
// Where GPUs push, which cannot wake the proxy: shortest and longest sleep; and of one that has been idle for so long.
constexpr int64_t kShortNapUs = 20, kLongNapUs = 1000, kIdleNapUs = 4000, kIdleNs = 1'000'000'000;
// Between questions to epoll while a lane is hot; while what arrives comes by a queue that providers poll themselves.
constexpr int64_t kAskNs = 2000, kAskPolledNs = 20'000;
constexpr int64_t kPolledNs = 100'000;  // since the last arrival
// While a rank is within an operation, or may be as kernels do not say: awake so long after the last work.
constexpr int64_t kExpectNs = 500'000;

// epoll_wait with a limit in microseconds, -1: none. By number: older C libraries have no name for the call.
int wait_for(int epoll_fd, epoll_event* events, int most, int64_t limit_us) {
#ifdef SYS_epoll_pwait2
  const timespec limit{time_t(limit_us / 1'000'000), long(limit_us % 1'000'000) * 1000};
  const long n = syscall(SYS_epoll_pwait2, epoll_fd, events, most, limit_us < 0 ? nullptr : &limit, nullptr, 0);
  if (n >= 0 || errno != ENOSYS) return int(n);
#endif
  return epoll_wait(epoll_fd, events, most, limit_us < 0 ? -1 : int(limit_us / 1000) + 1);
}

}  // namespace

bool Proxy::start(int64_t spin_ns, const int32_t* cpus, int num_cpus) {
  spin_ns_ = spin_ns;
  next_ns_ = -1;
  mutex_ = PTHREAD_MUTEX_INITIALIZER;
  // Descriptors that it waits for, and the one by which it is woken.
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = kEventTag;
  sigset_t all, before;
  sigfillset(&all);
  bool ok = epoll_fd_ >= 0 && event_fd_ >= 0 && epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, event_fd_, &event) == 0;
  // The thread.
  if (ok) {
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
    ok = pthread_create(&thread_, nullptr, &Proxy::enter, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  // Else nothing is left behind.
  if (!ok) {
    const int error = errno;
    if (epoll_fd_ >= 0) close(epoll_fd_);
    if (event_fd_ >= 0) close(event_fd_);
    errno = error;
    return false;
  }
  pthread_setname_np(thread_, "crossdock-net");
  if (num_cpus > 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < num_cpus; ++i) CPU_SET(cpus[i], &set);
    pthread_setaffinity_np(thread_, sizeof set, &set);
  }
  return true;
}

void Proxy::stop() {
  stop_.store(true);
  const uint64_t one = 1;
  (void)!write(event_fd_, &one, sizeof one);
  pthread_join(thread_, nullptr);
  for (int i = 0; i < retired_count_; ++i) retired_[i]->close();
  for (int i = 0; i < half_closed_count_; ++i) close(half_closed_[i].fd);
  close(epoll_fd_);
  close(event_fd_);
}

void Proxy::close_in_child() {
  for_each([](NetChannel& c) {
    for (NetPeer& p : c.peers) {
      if (p.control_fd >= 0) close(p.control_fd);
    }
    c.provider->close_in_child();
  });
  for (int i = 0; i < retired_count_; ++i) retired_[i]->close_in_child();
  for (int i = 0; i < half_closed_count_; ++i) close(half_closed_[i].fd);
  close(epoll_fd_);
  close(event_fd_);
}

void* Proxy::enter(void* self) {
  static_cast<Proxy*>(self)->run();
  return nullptr;
}

void Proxy::run() {
  int64_t busy_ns = now_ns(), stop_ns = 0;
  for (;;) {
    // Stop: when half-closed connections have ended, or soon.
    if (stop_.load(std::memory_order_relaxed)) {
      if (!stop_ns) stop_ns = now_ns() + kStopNs;
      if (half_closed_count_ + retired_count_ == 0 || now_ns() > stop_ns) return;
    }
    // A caller that wants to hold this thread goes first.
    while (waiting_.load(std::memory_order_relaxed)) sched_yield();
    pthread_mutex_lock(&mutex_);
    // Work without events; then lanes that were busy; then, now and then, what epoll knows.
    bool busy = false;
    for (int i = 0; i < 8 && !busy; ++i) busy = turn();
    if (!busy) relax();
    bool came = false;
    for (int i = 0; i < kHot; ++i) came |= handle(hot_[i], EPOLLIN);
    epoll_event events[64];
    int n = 0;
    const bool polled = !hot_[0] && now_ - arrived_ns_ < kPolledNs;
    if (now_ - asked_ns_ >= (hot_[0] ? kAskNs : polled ? kAskPolledNs : 0)) {
      asked_ns_ = now_;
      n = epoll_wait(epoll_fd_, events, 64, 0);
    }
    busy |= came;
    for (int i = 0; i < n; ++i) handle(events[i].data.u64, events[i].events);
    // Busy a moment ago: go on without sleeping.
    const int64_t now = now_ns();
    if (busy || n > 0) busy_ns = now;
    const int64_t rest_ns = now - busy_ns;
    if (busy || n > 0 || rest_ns < spin_ns_ || (rest_ns < kExpectNs && expects())) {
      pthread_mutex_unlock(&mutex_);
      continue;
    }
    // Sleep: announce it, then look once more for what was pushed before that was seen.
    std::fill_n(hot_, kHot, 0);
    for_each([](NetChannel& c) { c.outbox->asleep.store(1, std::memory_order_seq_cst); });
    bool sleep = idle();
    for_each([&](NetChannel& c) { sleep &= c.provider->rest(); });
    const bool naps = has_devices();
    const int64_t until = stop_ns ? now_ns() + kHalfClosedLookNs : next_ns_;
    // In naps, where a device brings rows without an event.
    while (sleep) {
      int64_t left_us = until < 0 ? -1 : std::max<int64_t>(0, (until - now_ns() + 999) / 1000);
      const int64_t idle_ns = now_ns() - busy_ns, longest_us = idle_ns < kIdleNs ? kLongNapUs : kIdleNapUs;
      const int64_t nap_us = std::clamp(idle_ns / 4000, kShortNapUs, longest_us);
      const bool is_nap = naps && (left_us < 0 || nap_us < left_us);
      pthread_mutex_unlock(&mutex_);
      n = wait_for(epoll_fd_, events, 64, is_nap ? nap_us : left_us);
      while (waiting_.load(std::memory_order_relaxed)) sched_yield();
      pthread_mutex_lock(&mutex_);
      sleep = is_nap && n == 0 && idle();  // nothing that an idle nap has to do but to look at the rings
    }
    // Awake.
    for_each([](NetChannel& c) { c.outbox->asleep.store(0, std::memory_order_relaxed); });
    for (int i = 0; i < n; ++i) handle(events[i].data.u64, events[i].events);
    pthread_mutex_unlock(&mutex_);
    if (n > 0 || !naps) busy_ns = now_ns();
  }
}

// Everything that needs no event: what was pushed, what a provider held back, what ends by the clock.
bool Proxy::turn() {
  bool busy = false;
  const int64_t now = now_ = now_ns();
  int64_t next = -1;
  // When to come back: the earliest of the times below.
  const auto at = [&](int64_t when) {
    if (when >= 0 && (next < 0 || when < next)) next = when;
  };
  // Each channel: orders, what its provider holds back, peers that are ending.
  for_each([&](NetChannel& c) {
    busy |= flush(c);
    end_refused(c);
    const int64_t again = c.provider->advance(now);
    if (busy_) flush(c);  // what was pushed in answer
    if (again == now) {
      busy = true;
    } else {
      at(again);
    }
    at(c.provider->part(now));
    for (int rank = 0; rank < c.memory.ranks; ++rank) {
      NetPeer& p = c.peers[rank];
      if (!p.up || !p.down_at_ns) continue;
      if (now >= p.down_at_ns) check_end(c, rank, now);
      if (p.up) at(p.down_at_ns);
    }
  });
  // Providers whose channels are gone.
  for (int i = 0; i < retired_count_;) {
    const int64_t again = retired_[i]->part(now);
    at(again);
    if (again >= 0) {
      ++i;
      continue;
    }
    retired_[i]->close();
    retired_[i] = retired_[--retired_count_];
  }
  // Connections that are read to their end.
  for (int i = 0; i < half_closed_count_;) {
    ssize_t got = 1;
    for (int turns = 0; turns < 16 && got > 0; ++turns) {
      got = recv(half_closed_[i].fd, nullptr, 1 << 20, MSG_DONTWAIT | MSG_TRUNC);  // bytes of a stream are thrown away
    }
    busy |= got > 0;
    const bool over = got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    if (over || now >= half_closed_[i].until_ns) {
      close(half_closed_[i].fd);
      half_closed_[i] = half_closed_[--half_closed_count_];
    } else {
      ++i;
    }
  }
  if (half_closed_count_) at(now + kHalfClosedLookNs);
  next_ns_ = next;
  busy |= busy_;
  busy_ = false;
  return busy;
}

// Ends the connections with ranks that have sent what the channel's owner refuses.
void Proxy::end_refused(NetChannel& c) {
  if (c.outbox->refused.load(std::memory_order_relaxed) == 0) return;
  for (const int rank : Bits(c.outbox->refused.exchange(0))) {
    NetPeer& p = c.peers[rank];
    if (!p.up) continue;
    p.error = EPROTO;
    p.why.say("rank %d sent what no rank of this version sends", rank);
    disconnect(c, rank, true);
  }
}

bool Proxy::flush(NetChannel& c) {
  Outbox& box = *c.outbox;
  uint64_t touched = 0;
  Order order;
  // Take orders from the ring: refuse what names foreign memory, queue the rest by peer.
  for (int i = 0; i < 256 && box.pop(&order); ++i) {
    if (order.rank >= c.memory.ranks) {
      refuse(c, order, EINVAL);
      continue;
    }
    NetPeer& p = c.peers[order.rank];
    const uint64_t from = order.bytes ? c.memory.box * uint64_t(order.rank) : 0;
    const bool fits = order.offset >= from && order.offset + order.bytes <= from + c.memory.source_bytes() &&
                      order.bytes <= box.most(order.offset, ~0ull);
    if (!p.up || !fits || !p.backlog.push(order)) {
      refuse(c, order, fits ? ENOMEM : EINVAL);
      continue;
    }
    touched |= 1ull << order.rank;
    p.traffic.backlog_most = std::max(p.traffic.backlog_most, p.backlog.count());
  }
  // Write what the lanes take.
  bool moved = touched != 0;
  for (int rank = 0; rank < c.memory.ranks; ++rank) {
    NetPeer& p = c.peers[rank];
    while (Order* next = p.backlog.front()) {
      const int lane = int(next->offset / box.stripe % uint64_t(p.lanes));
      const uint64_t to = next->offset - uint64_t(rank) * (next->bytes ? c.memory.box : 0);
      if (!c.provider->write(rank, lane, {c.memory.own + next->offset, to, next->bytes, next->imm})) break;
      ++p.traffic.sent_messages;
      p.traffic.sent_bytes += next->bytes;
      p.backlog.pop();
      moved = true;
    }
  }
  return moved;
}

// True: bytes came.
bool Proxy::handle(uint64_t tag, uint32_t events) {
  // Woken: that was all.
  if (tag == kEventTag) {
    uint64_t count;
    (void)!read(event_fd_, &count, sizeof count);
    return false;
  }
  // The channel and peer that the tag means, if they are still those.
  NetChannel* c = channels_[tag >> 16 & 0xffff];
  if (!c || c->generation != uint32_t(tag >> 32)) return false;
  const int rank = int(tag >> 8 & 0xff), lane = int(tag & 0xff);
  if (rank == kNoPeer) return c->provider->poll(kNoPeer, lane, events) && false;
  if (!c->peers[rank].up) return false;
  if (lane == kControlLane) {
    control(*c, rank);
    return false;
  }
  // A lane. One that brings something is looked at first from now on.
  if (!c->provider->poll(rank, lane, events)) return false;
  c->peers[rank].received_ns = now_;
  for (int i = 0; i < kHot; ++i) {
    if (hot_[i] == tag) return true;
  }
  for (int i = kHot - 1; i > 0; --i) hot_[i] = hot_[i - 1];
  hot_[0] = tag;
  return true;
}

bool Proxy::has_devices() const {
  bool any = false;
  for_each([&](const NetChannel& c) { any |= c.outbox->device.load(std::memory_order_relaxed); });
  return any;
}

bool Proxy::expects() const {
  bool any = false;
  for_each([&](const NetChannel& c) {
    any |= c.outbox->expects.load(std::memory_order_relaxed) || c.outbox->device.load(std::memory_order_relaxed);
  });
  return any;
}

bool Proxy::idle() const {
  bool empty = true;
  for_each([&](const NetChannel& c) {
    empty &= c.outbox->empty() && c.outbox->refused.load(std::memory_order_seq_cst) == 0;
  });
  return empty;
}

}  // namespace cd
