// The `tcp` provider: writes as frames on sockets.
//
// A frame is a header of 16 bytes (offset in the mirror, number of bytes, immediate) and the bytes. The receiver puts
// the bytes where the header says, if they fit the mirror of the rank at the other end, and reports the immediate. The
// last bytes of a frame go from the socket straight into the mirror; a short frame comes through the staging buffer,
// together with its neighbours, in one system call.
//
// The proxy's thread sends and receives. Where processors are plenty (`help`), another one sends what is long, while
// the proxy receives: the frames of a lane are a queue that the proxy fills and the holder of the lane's mutex empties,
// in order. A bit for each peer says to the other thread that there is something to send.
#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "hand.hpp"
#include "provider.hpp"
#include "ring.hpp"

namespace cd {
namespace {

constexpr int kWindow = 128;              // frames given to a lane and not yet in the socket
constexpr int kGather = 32;               // frames to one system call
constexpr size_t kStage = 64 * 1024;      // received bytes that have no known place yet
constexpr uint32_t kLong = 32 * 1024;     // a frame so long is worth a system call of its own
constexpr size_t kAhead = 1024;           // staged after one
// Sent to or received from one lane before the others, and the other way, get their turn. What a peer cannot begin
// without comes first in each way; a rank that sent all of its rows before it read would begin when half of the time
// is over.
constexpr uint64_t kTurnBytes = 512 << 10;
// What waits in a lane from which on the other thread sends it; how long that looks for more before it sleeps.
constexpr uint64_t kShared = 128 << 10;
constexpr int64_t kPatienceNs = 100'000;
constexpr uint64_t kMark = 0xcd17ull << 48;

struct Header {
  uint64_t where;  // kMark | offset
  uint32_t bytes, imm;
};
static_assert(sizeof(Header) == 16);

struct Frame {
  Header header;
  const uint8_t* from;
};

struct Lane {
  int fd = -1;  // changed by the proxy, under `sending`
  uint64_t tag = 0;
  // Sending: frames head..tail, of the first of which `gone` bytes (header included) are in the socket. The proxy moves
  // `tail`; all else is of him who holds the mutex.
  pthread_mutex_t sending = PTHREAD_MUTEX_INITIALIZER;
  Frame out[kWindow];
  std::atomic<uint64_t> head{0}, tail{0}, flushed{0};
  uint64_t gone = 0;
  bool wants_out = false;            // epoll says when the socket takes more
  std::atomic<bool> is_full{false};  // the socket, until it says so
  std::atomic<bool> refused{false};  // a frame found no room here
  uint64_t queued = 0;               // bytes of all frames so far, the proxy's own; `flushed` of them are in the socket
  // Receiving: a frame's bytes still to come, or staged bytes of which no frame is known yet.
  Header in{};
  uint64_t left = 0;
  size_t staged = 0;
  uint8_t stage[kStage];

  bool has_frames() const { return head.load(std::memory_order_acquire) != tail.load(std::memory_order_acquire); }
  // Of a new connection. Nobody sends, since there was none.
  void begin(int new_fd, uint64_t new_tag) {
    fd = new_fd;
    tag = new_tag;
    gone = 0;
    wants_out = false;
    is_full.store(false);
    in = {};
    left = 0;
    staged = 0;
  }
};

// The mutex of a lane.
class Sending {
 public:
  explicit Sending(Lane& l) : lane_(l) { pthread_mutex_lock(&l.sending); }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  ~Sending() { pthread_mutex_unlock(&lane_.sending); }

 private:
  Lane& lane_;
};

class Tcp final : public Provider {
 public:
  bool open(const Sink& sink, const NetMemory& memory, int epoll_fd, uint64_t) override {
    sink_ = sink;
    memory_ = memory;
    epoll_fd_ = epoll_fd;
    return true;
  }

  bool connect(int peer, int lane, int fd, uint64_t tag) override {
    Lane* l = lane_of(peer, lane);
    if (!l) {
      void* memory = malloc(sizeof(Lane));
      if (!memory) return false;
      l = new (memory) Lane;
      lanes_[peer][lane].store(l, std::memory_order_release);
    }
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = tag;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) return false;
    shut(peer, *l);  // an earlier connection
    const Sending held(*l);
    l->begin(fd, tag);
    return true;
  }

  bool write(int peer, int lane, const Write& w) override {
    Lane* l = lane_of(peer, lane);
    if (!l || l->fd < 0) {
      sink_.sent(sink_.owner, peer);
      return true;
    }
    const uint64_t tail = l->tail.load(std::memory_order_relaxed);
    if (tail - l->head.load(std::memory_order_acquire) == kWindow) {
      l->refused.store(true);
      if (tail - l->head.load() == kWindow) return false;
    }
    l->out[tail % kWindow] = {{kMark | w.to, w.bytes, w.imm}, w.from};
    l->queued += sizeof(Header) + w.bytes;
    l->tail.store(tail + 1, std::memory_order_release);
    to_send_ |= 1ull << peer;
    return true;
  }

  bool poll(int peer, int lane, uint32_t events) override {
    Lane* l = lane_of(peer, lane);
    if (!l || l->fd < 0) return false;
    const bool came = events & (EPOLLIN | EPOLLHUP | EPOLLERR) && receive(peer, *l);
    if (l->fd >= 0 && events & EPOLLOUT && pthread_mutex_trylock(&l->sending) == 0) {
      l->is_full.store(false);
      want_out(*l, false);
      pthread_mutex_unlock(&l->sending);
      to_send_ |= 1ull << peer;
    }
    return came;
  }

  // Sends of what `write` has taken.
  int64_t advance(int64_t now) override {
    const uint64_t peers = to_send_;
    to_send_ = 0;
    for (uint64_t left = peers; left; left &= left - 1) {
      const int peer = __builtin_ctzll(left);
      for_each_lane(peer, [&](Lane& l) {
        if (!l.has_frames() || l.is_full.load()) return;
        const bool is_long = l.queued - l.flushed.load(std::memory_order_relaxed) >= kShared;
        if (is_long && hand_.is_there()) {
          give(peer);
          if (is_awake_.load(std::memory_order_relaxed)) return;  // else this thread begins
        }
        if (pthread_mutex_trylock(&l.sending) != 0) return give(peer);
        if (send(peer, l)) to_send_ |= 1ull << peer;
        pthread_mutex_unlock(&l.sending);
      });
    }
    return to_send_ ? now : -1;
  }

  void disconnect(int peer) override {
    for_each_lane(peer, [&](Lane& l) { shut(peer, l); });
  }

  int release(int peer, int* fds) override {
    int n = 0;
    for_each_lane(peer, [&](Lane& l) {
      const Sending held(l);
      if (l.fd < 0) return;
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, l.fd, nullptr);
      fds[n++] = l.fd;
      l.fd = -1;
    });
    return n;
  }

  bool help() override { return hand_.is_there() || hand_.start("crossdock-send"); }

  // Also in a forked child, which has no other thread: there, nobody holds a mutex.
  void close() override {
    is_closed_.store(true);
    hand_.~Hand();
    for (auto& lanes : lanes_) {
      for (auto& lane : lanes) {
        Lane* l = lane.load(std::memory_order_relaxed);
        if (l && l->fd >= 0) ::close(l->fd);
        free(l);
      }
    }
    free(this);
  }

 private:
  uint8_t* mirror(int peer) const { return memory_.landing + uint64_t(peer) * memory_.stride; }

  void end(int peer, Lane& l, int error) {
    shut(peer, l);
    sink_.ended(sink_.owner, peer, error, nullptr);
  }

  Lane* lane_of(int peer, int lane) const { return lanes_[peer][lane].load(std::memory_order_acquire); }

  template <typename Fn>
  void for_each_lane(int peer, Fn fn) {
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      if (Lane* l = lane_of(peer, lane)) fn(*l);
    }
  }

  void shut(int peer, Lane& l) {
    const Sending held(l);
    if (l.fd >= 0) {
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, l.fd, nullptr);  // a forked child's copy would keep it there
      ::close(l.fd);
      l.fd = -1;
    }
    const uint64_t tail = l.tail.load(std::memory_order_relaxed);
    for (uint64_t i = l.head.load(std::memory_order_relaxed); i != tail; ++i) sink_.sent(sink_.owner, peer);
    l.head.store(tail);
    l.flushed.store(l.queued, std::memory_order_relaxed);
  }

  void want_out(Lane& l, bool want) {
    if (l.wants_out == want) return;
    l.wants_out = want;
    epoll_event event{EPOLLIN | (want ? uint32_t(EPOLLOUT) : 0u), {}};
    event.data.u64 = l.tag;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, l.fd, &event);
  }

  // Something of this peer's is for the other thread.
  void give(int peer) {
    given_.fetch_or(1ull << peer);
    if (is_serving_.exchange(true)) return;  // it looks once more before it ends
    hand_.finish();
    hand_.begin(&Tcp::serve, this);
  }

  // The other thread.
  static void serve(void* self) {
    auto& tcp = *static_cast<Tcp*>(self);
    int64_t looked_ns = now_ns();
    tcp.is_awake_.store(true);
    while (!tcp.is_closed_.load(std::memory_order_relaxed)) {
      if (tcp.send_given()) {
        looked_ns = now_ns();
      } else if (now_ns() - looked_ns < kPatienceNs) {
        relax();
      } else {
        tcp.is_awake_.store(false);
        tcp.is_serving_.store(false);
        if (tcp.given_.load() == 0 || tcp.is_serving_.exchange(true)) return;
        tcp.is_awake_.store(true);
      }
    }
  }

  // False: nothing was given.
  bool send_given() {
    const uint64_t peers = given_.exchange(0);
    for (uint64_t left = peers; left; left &= left - 1) {
      const int peer = __builtin_ctzll(left);
      for_each_lane(peer, [&](Lane& l) {
        const Sending held(l);
        if (l.fd < 0 || !l.has_frames()) return;
        if (send(peer, l)) given_.fetch_or(1ull << peer);
        // The proxy, which may sleep, has more for this lane.
        const bool has_room = !l.is_full.load() && l.tail.load() - l.head.load() <= kWindow / 2;
        if (has_room && l.refused.exchange(false)) want_out(l, true);
      });
    }
    return peers != 0;
  }

  // By him who holds the mutex. True: there are more frames, and the socket may take them.
  bool send(int peer, Lane& l) {
    uint64_t budget = kTurnBytes;
    while (l.has_frames() && budget > 0 && !l.is_full.load()) {
      iovec parts[2 * kGather];
      int n = 0;
      uint64_t skip = l.gone, room = budget;
      const auto add = [&](const void* from, uint64_t bytes) {
        const uint64_t cut = std::min(skip, bytes), taken = std::min(bytes - cut, room);
        skip -= cut;
        room -= taken;
        if (taken) parts[n++] = {const_cast<uint8_t*>(static_cast<const uint8_t*>(from)) + cut, taken};
      };
      const uint64_t head = l.head.load(std::memory_order_relaxed);
      const uint64_t end = std::min(l.tail.load(std::memory_order_acquire), head + kGather);
      for (uint64_t i = head; i != end; ++i) {
        const Frame& f = l.out[i % kWindow];
        add(&f.header, sizeof(Header));
        if (f.header.bytes) add(f.from, f.header.bytes);
      }
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = size_t(n);
      const ssize_t sent = sendmsg(l.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        const bool is_full = errno == EAGAIN || errno == EWOULDBLOCK;
        l.is_full.store(is_full);
        want_out(l, is_full);
        return false;  // what a peer that went had sent before is still to be read: receive() ends the lane
      }
      budget -= uint64_t(sent);
      went(peer, l, uint64_t(sent));
    }
    return l.has_frames() && !l.is_full.load();
  }

  // So many bytes more are in the socket.
  void went(int peer, Lane& l, uint64_t bytes) {
    l.flushed.fetch_add(bytes, std::memory_order_relaxed);
    l.gone += bytes;
    uint64_t head = l.head.load(std::memory_order_relaxed);
    const uint64_t tail = l.tail.load(std::memory_order_acquire);
    while (head != tail && l.gone >= sizeof(Header) + l.out[head % kWindow].header.bytes) {
      l.gone -= sizeof(Header) + l.out[head++ % kWindow].header.bytes;
      l.head.store(head);
      sink_.sent(sink_.owner, peer);
    }
  }

  // True: bytes came.
  bool receive(int peer, Lane& l) {
    int64_t budget = int64_t(kTurnBytes);
    while (budget > 0 && l.fd >= 0) {
      iovec parts[2];
      int n = 0;
      if (l.left) parts[n++] = {mirror(peer) + (l.in.where & ~kMarkBits) + (l.in.bytes - l.left), l.left};
      // After a long frame another one is likely: then its first bytes alone come by the way of the stage.
      const size_t room = l.in.bytes >= kLong ? std::max(kAhead, l.staged + sizeof(Header)) : kStage;
      parts[n++] = {l.stage + l.staged, room - l.staged};
      const uint64_t wanted = l.left + (room - l.staged);
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = size_t(n);
      const ssize_t got = recvmsg(l.fd, &message, MSG_DONTWAIT);
      if (got < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) end(peer, l, errno);
        break;
      }
      if (got == 0) {
        end(peer, l, l.left || l.staged ? ECONNABORTED : 0);
        break;
      }
      budget -= got;
      const bool all = uint64_t(got) < wanted;  // there was no more; what comes from now on is an event again
      const uint64_t placed = std::min(l.left, uint64_t(got));
      if (placed) {
        l.left -= placed;
        if (l.left == 0) sink_.arrived(sink_.owner, peer, l.in.imm);
      }
      l.staged += size_t(uint64_t(got) - placed);
      if (!sort(peer, l)) end(peer, l, EPROTO);
      if (all) break;
    }
    return budget < int64_t(kTurnBytes);
  }

  // Takes frames out of the staged bytes. False: they are none.
  bool sort(int peer, Lane& l) {
    size_t at = 0;
    while (l.left == 0 && l.staged - at >= sizeof(Header)) {
      memcpy(&l.in, l.stage + at, sizeof(Header));
      at += sizeof(Header);
      const uint64_t offset = l.in.where & ~kMarkBits;
      if ((l.in.where & kMarkBits) != kMark || offset + l.in.bytes > memory_.stride) return false;
      const size_t here = std::min(size_t(l.in.bytes), l.staged - at);
      if (here) memcpy(mirror(peer) + offset, l.stage + at, here);
      at += here;
      l.left = l.in.bytes - here;
      if (l.left == 0) sink_.arrived(sink_.owner, peer, l.in.imm);
    }
    l.staged -= at;
    if (l.staged) memmove(l.stage, l.stage + at, l.staged);
    return true;
  }

  static constexpr uint64_t kMarkBits = 0xffffull << 48;

  Sink sink_{};
  int epoll_fd_ = -1;
  uint64_t to_send_ = 0;  // bit per peer: frames wait for `advance`
  NetMemory memory_{};
  std::atomic<Lane*> lanes_[kNetRanks][kMaxLanes] = {};
  // The other thread, if there is one: peers to which it has something to send; whether it is to look,
  // and does.
  Hand hand_;
  std::atomic<uint64_t> given_{0};
  std::atomic<bool> is_serving_{false}, is_awake_{false}, is_closed_{false};
};

}  // namespace

Provider* make_tcp() {
  void* memory = malloc(sizeof(Tcp));
  return memory ? new (memory) Tcp : nullptr;
}

}  // namespace cd
