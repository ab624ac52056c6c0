// The `tcp` provider: writes as frames on sockets.
//
// A frame is a header of 16 bytes (offset in the mirror, number of bytes, immediate) and the bytes. The receiver puts
// the bytes where the header says, if they fit the mirror of the rank at the other end, and reports the immediate. The
// last bytes of a frame go from the socket straight into the mirror; a short frame comes through the staging buffer,
// together with its neighbours, in one system call.
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "bits.hpp"
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
  int fd = -1;
  uint64_t tag = 0;
  bool wants_out = false;
  // Sending: frames head..tail, of the first of which `gone` bytes (header included) are in the socket.
  Frame out[kWindow];
  uint64_t head = 0, tail = 0, gone = 0;
  // Receiving: a frame's bytes still to come, or staged bytes of which no frame is known yet.
  Header in{};
  uint64_t left = 0;
  size_t staged = 0;
  uint8_t stage[kStage];
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
    void* memory = malloc(sizeof(Lane));
    if (!memory) return false;
    Lane* made = new (memory) Lane;
    made->fd = fd;
    made->tag = tag;
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = tag;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
      free(made);
      return false;
    }
    free(lanes_[peer][lane]);  // of an earlier connection
    lanes_[peer][lane] = made;
    return true;
  }

  bool write(int peer, int lane, const Write& w) override {
    Lane* l = lanes_[peer][lane];
    if (!l || l->fd < 0) {
      sink_.sent(sink_.owner, peer);
      return true;
    }
    if (l->tail - l->head == kWindow) return false;
    l->out[l->tail++ % kWindow] = {{kMark | w.to, w.bytes, w.imm}, w.from};
    to_send_ |= 1ull << peer;
    return true;
  }

  bool poll(int peer, int lane, uint32_t events) override {
    Lane* l = lanes_[peer][lane];
    if (!l || l->fd < 0) return false;
    const bool came = events & (EPOLLIN | EPOLLHUP | EPOLLERR) && receive(peer, *l);
    if (l->fd >= 0 && events & EPOLLOUT) send(peer, *l);
    return came;
  }

  // Sends of what `write` has taken.
  int64_t advance(int64_t now) override {
    const uint64_t peers = to_send_;
    to_send_ = 0;
    for (const int peer : Bits(peers)) {
      for (int lane = 0; lane < kMaxLanes && lanes_[peer][lane]; ++lane) {
        Lane& l = *lanes_[peer][lane];
        if (l.fd >= 0 && l.head != l.tail && !l.wants_out) send(peer, l);
      }
    }
    return to_send_ ? now : -1;
  }

  void disconnect(int peer) override {
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      if (Lane* l = lanes_[peer][lane]) shut(peer, *l);
    }
  }

  int release(int peer, int* fds) override {
    int n = 0;
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      Lane* l = lanes_[peer][lane];
      if (!l || l->fd < 0) continue;
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, l->fd, nullptr);
      fds[n++] = l->fd;
      l->fd = -1;
    }
    return n;
  }

  void close() override {
    for (auto& lanes : lanes_) {
      for (Lane*& l : lanes) {
        if (l && l->fd >= 0) ::close(l->fd);
        free(l);
        l = nullptr;
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

  void shut(int peer, Lane& l) {
    if (l.fd < 0) return;
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, l.fd, nullptr);  // a forked child's copy would keep it there
    ::close(l.fd);
    l.fd = -1;
    for (; l.head != l.tail; ++l.head) sink_.sent(sink_.owner, peer);
  }

  void want_out(Lane& l, bool want) {
    if (l.wants_out == want) return;
    l.wants_out = want;
    epoll_event event{EPOLLIN | (want ? uint32_t(EPOLLOUT) : 0u), {}};
    event.data.u64 = l.tag;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, l.fd, &event);
  }

  void send(int peer, Lane& l) {
    uint64_t budget = kTurnBytes;
    while (l.head != l.tail && budget > 0) {
      iovec parts[2 * kGather];
      int n = 0;
      uint64_t skip = l.gone, room = budget;
      const auto add = [&](const void* from, uint64_t bytes) {
        const uint64_t cut = std::min(skip, bytes), taken = std::min(bytes - cut, room);
        skip -= cut;
        room -= taken;
        if (taken) parts[n++] = {const_cast<uint8_t*>(static_cast<const uint8_t*>(from)) + cut, taken};
      };
      const uint64_t end = std::min(l.tail, l.head + kGather);
      for (uint64_t i = l.head; i != end; ++i) {
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
        if (errno == EAGAIN || errno == EWOULDBLOCK) return want_out(l, true);
        // What the peer had sent before it went is still to be read: receive() ends the lane.
        return want_out(l, false);
      }
      l.gone += uint64_t(sent);
      budget -= uint64_t(sent);
      while (l.head != l.tail && l.gone >= sizeof(Header) + l.out[l.head % kWindow].header.bytes) {
        l.gone -= sizeof(Header) + l.out[l.head % kWindow].header.bytes;
        ++l.head;
        sink_.sent(sink_.owner, peer);
      }
    }
    want_out(l, false);
    if (l.head != l.tail) to_send_ |= 1ull << peer;
  }

  // True: bytes came.
  bool receive(int peer, Lane& l) {
    int64_t budget = int64_t(kTurnBytes);
    while (budget > 0 && l.fd >= 0) {
      // After a long frame another one is likely: then its first bytes alone come by the way of the stage.
      const size_t room = l.in.bytes >= kLong ? std::max(kAhead, l.staged + sizeof(Header)) : kStage;
      const uint64_t wanted = l.left + (room - l.staged);
      const ssize_t got = read(peer, l, room);
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

  // The rest of a frame, and what follows it up to `room` staged bytes.
  ssize_t read(int peer, Lane& l, size_t room) {
    iovec parts[2] = {{mirror(peer) + (l.in.where & ~kMarkBits) + (l.in.bytes - l.left), l.left},
                      {l.stage + l.staged, room - l.staged}};
    if (!l.left) return recv(l.fd, parts[1].iov_base, parts[1].iov_len, MSG_DONTWAIT);  // cheaper by a fifth
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    return recvmsg(l.fd, &message, MSG_DONTWAIT);
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
  Lane* lanes_[kNetRanks][kMaxLanes] = {};
};

}  // namespace

Provider* make_tcp() {
  void* memory = malloc(sizeof(Tcp));
  return memory ? new (memory) Tcp : nullptr;
}

}  // namespace cd
