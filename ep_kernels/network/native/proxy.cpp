// How the proxy sleeps without losing a push. It looks for work for `spin_ns`, then sets `asleep` in every outbox, looks
// once more, and waits in epoll. A rank that has pushed reads `asleep` and writes to the event descriptor. Both put a
// sequentially consistent operation between their write and their read, so one of them sees the other.
//
// A peer is down when all its lanes have ended, or 50 ms after the first sign of an end (a lane, the control
// connection): what it had sent before is delivered first, since it counts.
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

constexpr int kControlLane = 0xff;
constexpr uint64_t kEventTag = ~0ull;
constexpr int64_t kEndNs = 50'000'000;
constexpr int64_t kLingerNs = 1'000'000'000;
constexpr int64_t kLingerLookNs = 5'000'000;
constexpr uint32_t kLeftOut = 1, kCloses = 2;  // messages of a control connection: the last words of a rank

struct ControlMessage {
  uint32_t kind, unused;
  uint64_t value;
};
static_assert(sizeof(ControlMessage) == 16);

void say(int fd, const ControlMessage& message) {
  (void)!send(fd, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

uint64_t tag_of(const NetChannel& c, int rank, int lane) {
  return uint64_t(c.generation) << 32 | uint64_t(c.index) << 16 | uint64_t(rank) << 8 | uint64_t(lane);
}

// epoll_wait with a limit in microseconds, -1: none. By number: older C libraries have no name for the call.
int wait_for(int epoll_fd, epoll_event* events, int most, int64_t limit_us) {
#ifdef SYS_epoll_pwait2
  const timespec limit{time_t(limit_us / 1'000'000), long(limit_us % 1'000'000) * 1000};
  const long n = syscall(SYS_epoll_pwait2, epoll_fd, events, most, limit_us < 0 ? nullptr : &limit, nullptr, 0);
  if (n >= 0 || errno != ENOSYS) return int(n);
#endif
  return epoll_wait(epoll_fd, events, most, limit_us < 0 ? -1 : int(limit_us / 1000) + 1);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int64_t net_now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

bool Backlog::push(const Order& order) {
  if (count_ == size_) {
    const uint64_t larger = size_ ? size_ * 2 : 64;
    auto* data = static_cast<Order*>(malloc(larger * sizeof(Order)));
    if (!data) return false;
    for (uint64_t i = 0; i < count_; ++i) data[i] = data_[(head_ + i) % size_];
    free(data_);
    data_ = data;
    size_ = larger;
    head_ = 0;
  }
  data_[(head_ + count_++) % size_] = order;
  return true;
}

uint64_t Backlog::clear() {
  const uint64_t count = count_;
  head_ = count_ = 0;
  return count;
}

void Backlog::free_memory() {
  free(data_);
  data_ = nullptr;
  size_ = head_ = count_ = 0;
}

class Proxy::Hold {
 public:
  explicit Hold(Proxy& proxy) : proxy_(proxy) {
    proxy.waiting_.fetch_add(1);
    pthread_mutex_lock(&proxy.mutex_);
    proxy.waiting_.fetch_sub(1);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { pthread_mutex_unlock(&proxy_.mutex_); }

 private:
  Proxy& proxy_;
};

bool Proxy::start(int64_t spin_ns, const int32_t* cpus, int num_cpus) {
  spin_ns_ = spin_ns;
  next_ns_ = -1;
  mutex_ = PTHREAD_MUTEX_INITIALIZER;
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = kEventTag;
  sigset_t all, before;
  sigfillset(&all);
  bool ok = epoll_fd_ >= 0 && event_fd_ >= 0 && epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, event_fd_, &event) == 0;
  if (ok) {
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
    ok = pthread_create(&thread_, nullptr, &Proxy::enter, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
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
  for (int i = 0; i < lingering_count_; ++i) close(lingering_[i].fd);
  close(epoll_fd_);
  close(event_fd_);
}

int Proxy::add(NetChannel* c) {
  Hold hold(*this);
  for (int i = 0; i < kChannels; ++i) {
    if (channels_[i]) continue;
    c->proxy = this;
    c->index = i;
    c->generation = ++generations_ & 0x7fffffff;
    c->outbox->event_fd = event_fd_;
    c->outbox->asleep.store(1);  // the proxy may be, and does not know this outbox yet
    if (!c->provider->open({c, &Proxy::sent, &Proxy::arrived, &Proxy::ended}, epoll_fd_)) return EIO;
    channels_[i] = c;
    num_channels_ = std::max(num_channels_, i + 1);
    return 0;
  }
  return EMFILE;
}

void Proxy::remove(NetChannel* c) {
  Hold hold(*this);
  for (int rank = 0; rank < c->ranks; ++rank) {
    NetPeer& p = c->peers[rank];
    if (p.control_fd >= 0) {
      say(p.control_fd, {kCloses, 0, 0});
      linger(p.control_fd);
    }
    int fds[kMaxLanes];
    const int n = c->provider->release(rank, fds);
    for (int i = 0; i < n; ++i) linger(fds[i]);
    p.control_fd = -1;
    p.up = false;
    p.backlog.free_memory();
  }
  c->provider->close();
  c->provider = nullptr;
  channels_[c->index] = nullptr;
  while (num_channels_ > 0 && !channels_[num_channels_ - 1]) --num_channels_;
}

// The peer reads what was sent before it sees the end: a socket closed with unread bytes in it resets the connection,
// and with it what is still under way. So: say that nothing more comes, read until the peer says so too.
void Proxy::linger(int fd) {
  if (lingering_count_ == kLingering || shutdown(fd, SHUT_WR) != 0) {
    close(fd);
    return;
  }
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  lingering_[lingering_count_++] = {fd, net_now_ns() + kLingerNs};
  const uint64_t one = 1;
  (void)!write(event_fd_, &one, sizeof one);
}

int Proxy::join(NetChannel* c, int rank, int control_fd, const int32_t* lanes, int num_lanes) {
  Hold hold(*this);
  NetPeer& p = c->peers[rank];
  if (num_lanes > kMaxLanes) return EINVAL;
  if (p.up) fall(*c, rank, false);
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = tag_of(*c, rank, kControlLane);
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, control_fd, &event) != 0) return errno;
  for (int lane = 0; lane < num_lanes; ++lane) {
    if (c->provider->connect(rank, lane, lanes[lane], tag_of(*c, rank, lane))) continue;
    const int error = errno ? errno : EIO;
    int fds[kMaxLanes];
    c->provider->release(rank, fds);  // the caller closes them
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, control_fd, nullptr);
    return error;
  }
  p.control_fd = control_fd;
  p.lanes = num_lanes;
  p.lanes_ended = p.next_lane = p.error = p.message_bytes = 0;
  p.ends_ns = 0;
  p.in_order = false;
  p.left_out = 0;
  p.up = true;
  c->handler(c->context, rank, NetEvent::up, 0);
  return 0;
}

void Proxy::leave(NetChannel* c, int rank, uint64_t tag) {
  Hold hold(*this);
  NetPeer& p = c->peers[rank];
  if (p.control_fd >= 0) {
    say(p.control_fd, {kLeftOut, 0, tag});
    linger(p.control_fd);
    p.control_fd = -1;
  }
  fall(*c, rank, false);
}

uint64_t Proxy::up(NetChannel* c) {
  Hold hold(*this);
  uint64_t mask = 0;
  for (int rank = 0; rank < c->ranks; ++rank) mask |= uint64_t(c->peers[rank].up) << rank;
  return mask;
}

void Proxy::traffic(NetChannel* c, Traffic* out) {
  Hold hold(*this);
  for (int rank = 0; rank < c->ranks; ++rank) out[rank] = c->peers[rank].traffic;
}

void Proxy::forsake() {
  for_each([](NetChannel& c) {
    for (NetPeer& p : c.peers) {
      if (p.control_fd >= 0) close(p.control_fd);
    }
    c.provider->close();
  });
  for (int i = 0; i < lingering_count_; ++i) close(lingering_[i].fd);
  close(epoll_fd_);
  close(event_fd_);
}

void* Proxy::enter(void* self) {
  static_cast<Proxy*>(self)->run();
  return nullptr;
}

void Proxy::run() {
  int64_t busy_ns = net_now_ns();
  while (!stop_.load(std::memory_order_relaxed)) {
    while (waiting_.load(std::memory_order_relaxed)) sched_yield();
    pthread_mutex_lock(&mutex_);
    bool busy = false;
    for (int i = 0; i < 8 && !busy; ++i) {
      busy = turn();
      if (!busy) relax();
    }
    epoll_event events[64];
    int n = epoll_wait(epoll_fd_, events, 64, 0);
    for (int i = 0; i < n; ++i) happen(events[i].data.u64, events[i].events);
    const int64_t now = net_now_ns();
    if (busy || n > 0) busy_ns = now;
    if (now - busy_ns < spin_ns_ || busy || n > 0) {
      pthread_mutex_unlock(&mutex_);
      continue;
    }
    for_each([](NetChannel& c) { c.outbox->asleep.store(1, std::memory_order_seq_cst); });
    const bool sleep = idle();
    const int64_t until = next_ns_;
    pthread_mutex_unlock(&mutex_);
    if (sleep) {
      const int64_t left_us = until < 0 ? -1 : std::max<int64_t>(0, (until - net_now_ns() + 999) / 1000);
      n = wait_for(epoll_fd_, events, 64, left_us);
    }
    pthread_mutex_lock(&mutex_);
    for_each([](NetChannel& c) { c.outbox->asleep.store(0, std::memory_order_relaxed); });
    for (int i = 0; i < n; ++i) happen(events[i].data.u64, events[i].events);
    pthread_mutex_unlock(&mutex_);
    busy_ns = net_now_ns();
  }
}

// Everything that needs no event: what was pushed, what a provider held back, what ends by the clock.
bool Proxy::turn() {
  bool busy = false;
  const int64_t now = net_now_ns();
  int64_t next = -1;
  const auto at = [&](int64_t when) {
    if (when >= 0 && (next < 0 || when < next)) next = when;
  };
  for_each([&](NetChannel& c) {
    busy |= flush(c);
    at(c.provider->advance(now));
    for (int rank = 0; rank < c.ranks; ++rank) {
      NetPeer& p = c.peers[rank];
      if (!p.up || !p.ends_ns) continue;
      if (now >= p.ends_ns) {
        fall(c, rank, true);
      } else {
        at(p.ends_ns);
      }
    }
  });
  for (int i = 0; i < lingering_count_;) {
    char waste[16384];
    const ssize_t got = recv(lingering_[i].fd, waste, sizeof waste, MSG_DONTWAIT);
    const bool over = got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    if (over || now >= lingering_[i].until_ns) {
      close(lingering_[i].fd);
      lingering_[i] = lingering_[--lingering_count_];
    } else {
      ++i;
    }
  }
  if (lingering_count_) at(now + kLingerLookNs);
  next_ns_ = next;
  return busy;
}

bool Proxy::flush(NetChannel& c) {
  Outbox& box = *c.outbox;
  uint64_t touched = 0;
  Order order;
  for (int i = 0; i < 256 && box.pop(&order); ++i) {
    NetPeer& p = c.peers[order.rank];
    if (!p.up || order.offset + order.bytes > c.own_bytes || !p.backlog.push(order)) {
      if (p.up) fall(c, order.rank, true);  // an order that cannot be carried out: the peer must not wait for it
      sent(&c, order.rank);
      continue;
    }
    touched |= 1ull << order.rank;
  }
  bool moved = touched != 0;
  for (int rank = 0; rank < c.ranks; ++rank) {
    NetPeer& p = c.peers[rank];
    while (Order* next = p.backlog.front()) {
      if (!c.provider->write(rank, p.next_lane, {c.own + next->offset, next->offset, next->bytes, next->imm})) break;
      p.next_lane = (p.next_lane + 1) % p.lanes;
      ++p.traffic.sent_messages;
      p.traffic.sent_bytes += next->bytes;
      p.backlog.pop();
      moved = true;
    }
  }
  return moved;
}

void Proxy::happen(uint64_t tag, uint32_t events) {
  if (tag == kEventTag) {
    uint64_t count;
    (void)!read(event_fd_, &count, sizeof count);
    return;
  }
  NetChannel* c = channels_[tag >> 16 & 0xffff];
  if (!c || c->generation != uint32_t(tag >> 32)) return;
  const int rank = int(tag >> 8 & 0xff), lane = int(tag & 0xff);
  if (!c->peers[rank].up) return;
  lane == kControlLane ? control(*c, rank) : c->provider->poll(rank, lane, events);
}

void Proxy::control(NetChannel& c, int rank) {
  const int error = hear(c, rank);
  if (error < 0) return;
  close(c.peers[rank].control_fd);
  c.peers[rank].control_fd = -1;
  ending(c, rank, error);
}

// What the control connection brings. -1: more may come; else it has ended, with an errno or in order.
int Proxy::hear(NetChannel& c, int rank) {
  NetPeer& p = c.peers[rank];
  for (;;) {
    const int wanted = int(sizeof p.message) - p.message_bytes;
    const ssize_t got = recv(p.control_fd, p.message + p.message_bytes, size_t(wanted), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return -1;
    if (got <= 0) return got < 0 ? errno : 0;
    p.message_bytes += int(got);
    if (p.message_bytes < int(sizeof p.message)) continue;
    p.message_bytes = 0;
    ControlMessage message;
    memcpy(&message, p.message, sizeof message);
    p.in_order |= message.kind == kCloses;
    if (message.kind == kLeftOut) p.left_out = message.value;
  }
}

void Proxy::ending(NetChannel& c, int rank, int error) {
  NetPeer& p = c.peers[rank];
  if (error) p.error = error;
  if (!p.ends_ns) p.ends_ns = net_now_ns() + kEndNs;
}

void Proxy::fall(NetChannel& c, int rank, bool tell) {
  NetPeer& p = c.peers[rank];
  p.up = false;
  if (p.control_fd >= 0) {
    hear(c, rank);  // its last word says why
    close(p.control_fd);
  }
  p.control_fd = -1;
  c.provider->disconnect(rank);
  for (uint64_t left = p.backlog.clear(); left > 0; --left) sent(&c, rank);
  if (!tell) return;
  if (p.left_out) {
    c.handler(c.context, rank, NetEvent::left_out, p.left_out);
  } else if (!p.in_order) {
    c.handler(c.context, rank, NetEvent::down, uint64_t(p.error));
  }
}

bool Proxy::idle() const {
  bool empty = true;
  for_each([&](const NetChannel& c) { empty &= c.outbox->empty(); });
  return empty;
}

void Proxy::sent(void* channel, int rank) {
  auto* c = static_cast<NetChannel*>(channel);
  c->outbox->done[rank].fetch_add(1, std::memory_order_release);
}

void Proxy::arrived(void* channel, int rank, uint32_t imm) {
  auto* c = static_cast<NetChannel*>(channel);
  ++c->peers[rank].traffic.received_messages;
  c->handler(c->context, rank, NetEvent::arrived, imm);
}

void Proxy::ended(void* channel, int rank, int error) {
  auto* c = static_cast<NetChannel*>(channel);
  NetPeer& p = c->peers[rank];
  if (!p.up) return;
  ++p.lanes_ended;
  c->proxy->ending(*c, rank, error);
  if (p.lanes_ended == p.lanes) c->proxy->fall(*c, rank, true);
}

}  // namespace cd
