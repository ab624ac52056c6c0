// What providers with connections of their own share: `verbs`, `libfabric`.
//
// A lane begins on its TCP connection: each end sends a card, connects by the other's, says that it is ready, and
// writes when the other is. Its end is the end of the TCP connection, or an error. A new connection is a new lane, with
// a queue pair or an endpoint of its own, so nothing of an earlier one comes to it.
//
// Flow control: an immediate takes a posted receive of the peer, which refuses it if there is none. So a lane has at
// most `depth` writes outstanding. The peer posts a receive again for each that it has consumed, and returns the credit
// for half of them at a time.
//
// Lingering: some libraries must not close a connection while the peer may still send on it (`lingers`). Such a lane
// stays open, writes nothing and drops what it receives, until the peer ends its TCP connection, at most a second.
//
// Memory: what goes to a peer, and its mirror, is registered when it joins; without boxes, what goes to all at once.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "clock.hpp"
#include "exchange.hpp"
#include "provider.hpp"
#include "ring.hpp"

namespace cd {

struct Window {
  uint32_t written = 0, granted = 0;  // writes so far; how many of them the peer has receives for
  uint32_t consumed = 0, returned = 0;  // writes of the peer; for how many its credit has been returned

  bool is_full() const { return written == granted; }
  // The peer has received `received` writes in all. Reports may come out of order.
  void grant(uint32_t received, uint32_t depth) {
    if (int32_t(received + depth - granted) > 0) granted = received + depth;
  }
  bool owes(int depth) const { return consumed - returned >= uint32_t(depth / 2); }
};

constexpr int kMaxLingering = 64;  // at once; what is more is closed at once
constexpr int64_t kLingerNs = 1'000'000'000, kLingerTickNs = 1'000'000;

template <typename CardOf>
struct LaneOf {
  using Card = CardOf;
  Exchange<Card> exchange;
  Card peer{};
  Window window;
  uint32_t out = 0;    // writes posted, not completed
  bool is_up = false;  // the peer is ready
  int error = 0;       // it has failed; reported in `advance`
  // While it lingers: the TCP connection, whose end is awaited; until when.
  int linger_fd = -1, linger_peer = 0;
  int64_t linger_until_ns = 0;
};

// `Self` has:
//   const char* name() const;
//   bool begin();                               // false: `about_` says why
//   void end();                                 // no lane is left
//   bool is_alive();                            // before a lane is made; false: errno, `about_`
//   bool make(int peer, int lane, Lane&, Card*);  // false: errno, `about_`
//   int to_peer(int peer, int lane, Lane&);     // by the peer's card; 0 or an errno, `why_`
//   int post(int peer, int lane, Lane&, const Write&);  // 0, EAGAIN: later, or an errno
//   int credit(int peer, int lane, Lane&);      // sends the peer `window.consumed`; as post
//   void drain(int peer, int lane);             // takes all that has come until now
//   void shut(Lane&);                           // of what it has out nothing is read any more
//   bool lingers() const;                       // see above
//   void discard(Lane&);                        // throws away what has come
//   Region* reg(const uint8_t* address, uint64_t bytes, bool lands, int number);  // `number`: in memory_.dma_bufs;
//                                                                                 // null: errno, `about_`
//   void unreg(Region*);
//   const char* words(int error) const;
template <typename Self, typename LaneType, typename Region>
class Lanes : public Provider {
 public:
  using Lane = LaneType;

  explicit Lanes(const NetSettings& settings) : settings_(settings) {}

  bool open(const Sink& sink, const NetMemory& memory, int epoll_fd, uint64_t tag) override {
    sink_ = sink;
    memory_ = memory;
    epoll_fd_ = epoll_fd;
    tag_ = tag;
    if (self().begin()) return true;
    self().end();
    return false;
  }

  bool connect(int peer, int lane, int fd, uint64_t tag) override {
    if (!self().is_alive()) return false;
    Lane*& l = lanes_[peer][lane];
    // The lane's former connections end.
    drop(peer, l, true);
    for (int i = linger_count_ - 1; i >= 0; --i) {  // nothing of an earlier one may come behind what a new one brings
      Lane* earlier = lingering_[i];
      if (earlier->linger_peer != peer) continue;
      lingering_[i] = lingering_[--linger_count_];
      finish(earlier);
    }
    // A new one: what the provider needs, and the exchange of cards with the peer.
    void* memory = malloc(sizeof(Lane));
    if (!memory) return errno = ENOMEM, false;
    l = new (memory) Lane;
    typename Lane::Card card{};
    if (self().make(peer, lane, *l, &card) && l->exchange.begin(epoll_fd_, fd, tag, card)) return true;
    const int error = errno;
    drop(peer, l, false);
    errno = error ? error : EIO;
    return false;
  }

  bool write(int peer, int lane, const Write& w) override {
    // A lane that has ended takes writes, and forgets them.
    Lane* l = lanes_[peer][lane];
    if (!l || l->error) {
      sink_.sent(sink_.owner, peer);
      return true;
    }
    if (!l->is_up || l->window.is_full()) return false;
    // Post it; a write that cannot be posted ends the lane.
    const int error = w.to + w.bytes > l->peer.bytes ? EPROTO : self().post(peer, lane, *l, w);
    if (error == EAGAIN) return false;
    if (error) {
      why_.say("%s: a write of %u bytes cannot be posted: %s", self().name(), w.bytes, self().words(error));
      fail(peer, *l, error);
      sink_.sent(sink_.owner, peer);
      return true;
    }
    ++l->out;
    ++l->window.written;
    return true;
  }

  void disconnect(int peer) override {
    for (Lane*& l : lanes_[peer]) drop(peer, l, true);
  }
  int release(int peer, int* fds) override {
    int n = 0;
    for (Lane*& l : lanes_[peer]) {
      if (l && l->exchange.fd >= 0) fds[n++] = l->exchange.fd;
      drop(peer, l, false);
    }
    return n;
  }
  bool retire() override {
    if (linger_count_) unreg_all();
    return linger_count_ != 0;
  }
  int64_t part(int64_t now) override {
    for (int i = 0; i < linger_count_;) {
      Lane* l = lingering_[i];
      self().discard(*l);
      uint8_t byte;
      const ssize_t got = recv(l->linger_fd, &byte, 1, MSG_DONTWAIT);
      if (now < l->linger_until_ns && (got > 0 || (got < 0 && errno == EAGAIN))) {
        ++i;
        continue;
      }
      lingering_[i] = lingering_[--linger_count_];
      finish(l);
    }
    return linger_count_ ? now + kLingerTickNs : -1;
  }
  void close() override {
    for (int peer = 0; peer < kNetRanks; ++peer) disconnect(peer);
    while (linger_count_) finish(lingering_[--linger_count_]);
    self().end();
    free(this);
  }
  // The lanes' descriptors are what peers watch.
  void close_in_child() override {
    for (auto& lanes : lanes_) {
      for (Lane* l : lanes) {
        if (l && l->exchange.fd >= 0) ::close(l->exchange.fd);
        free(l);
      }
    }
    for (int i = 0; i < linger_count_; ++i) ::close(lingering_[i]->linger_fd);
    free(this);
  }
  const char* about() const override { return about_.at; }

 protected:
  Self& self() { return *static_cast<Self*>(this); }

  // Null: errno, `about_`.
  Region* source(int peer) {
    const int at = memory_.box ? peer : 0;
    Region*& made = sources_[at];
    return made ? made : made = self().reg(memory_.source(peer), memory_.source_bytes(), false, at);
  }
  Region* mirror(int peer) {
    Region*& made = mirrors_[peer];
    return made ? made : made = reg_mirror(peer);
  }
  Region* reg_mirror(int peer) {
    return self().reg(memory_.mirror(peer), memory_.stride, true, memory_.ranks + peer);
  }
  void unreg_all() {
    for (Region** regions : {sources_, mirrors_}) {
      for (int peer = 0; peer < kNetRanks; ++peer) {
        if (regions[peer]) self().unreg(regions[peer]);
        regions[peer] = nullptr;
      }
    }
  }

  // A write has left; one has come.
  void sent(int peer, Lane& l) {
    --l.out;
    sink_.sent(sink_.owner, peer);
  }
  void arrived(int peer, Lane& l, uint32_t imm) {
    ++l.window.consumed;
    sink_.arrived(sink_.owner, peer, imm);
  }

  // Says how many receives have been posted anew, when it is half of them. Whose writes have come is connected.
  void grant(int peer, int lane, Lane& l, int depth) {
    if (l.error || !l.window.owes(depth)) return;
    const int error = self().credit(peer, lane, l);
    if (error == EAGAIN) return;
    if (!error) {
      l.window.returned = l.window.consumed;
      return;
    }
    why_.say("%s: a credit cannot be sent: %s", self().name(), self().words(error));
    fail(peer, l, error);
  }

  // `why_` says more.
  void fail(int peer, Lane& l, int error) {
    if (!l.error) l.error = error;
    failed_ |= 1ull << peer;
  }

  // Drops the lanes that have failed, and reports them.
  void report_failures() {
    for (; failed_; failed_ &= failed_ - 1) {
      const int peer = __builtin_ctzll(failed_);
      for (Lane*& l : lanes_[peer]) {
        const int error = l ? l->error : 0;
        if (!error) continue;
        drop(peer, l, true);
        sink_.ended(sink_.owner, peer, error, why_.at);
      }
    }
  }

  // Reads the lane's TCP connection.
  void read_control(int peer, int lane) {
    Lane* l = lanes_[peer][lane];
    if (!l || l->exchange.fd < 0) return;
    int error = 0;
    for (;;) {
      const ControlMessage message = l->exchange.receive();
      if (message == ControlMessage::nothing) return;
      if (message == ControlMessage::ready) l->is_up = true;
      if (message == ControlMessage::address) error = meet(peer, lane, *l);
      if (message == ControlMessage::closed) error = l->exchange.error;
      if (message == ControlMessage::closed || error) break;
    }
    self().drain(peer, lane);  // what the peer had sent comes before its end
    if (lanes_[peer][lane] != l || l->error) return;  // reported in `advance`
    drop(peer, lanes_[peer][lane], true);
    sink_.ended(sink_.owner, peer, error, error ? why_.at : nullptr);
  }

  void drop(int peer, Lane*& l, bool close_fd) {
    Lane* gone = l;
    l = nullptr;
    if (!gone) return;
    // Its writes are over, as the channel counts them.
    for (; gone->out > 0; --gone->out) sink_.sent(sink_.owner, peer);
    const int fd = gone->exchange.fd;
    gone->exchange.end(epoll_fd_, false);
    // What is under way may still arrive: the lane lingers, by a descriptor of its own.
    const bool stays = self().lingers() && gone->is_up && !gone->error && linger_count_ < kMaxLingering;
    if (stays && (gone->linger_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0) {
      if (close_fd) shutdown(fd, SHUT_WR);
      gone->linger_peer = peer;
      gone->linger_until_ns = now_ns() + kLingerNs;
      lingering_[linger_count_++] = gone;
    } else {
      finish(gone);
    }
    if (close_fd && fd >= 0) ::close(fd);  // after the lane's own connection: a peer that sees it may close its own
  }

  void finish(Lane* l) {
    self().discard(*l);
    self().shut(*l);
    if (l->linger_fd >= 0) ::close(l->linger_fd);
    free(l);
  }

  NetSettings settings_;
  Sink sink_{};
  NetMemory memory_{};
  int epoll_fd_ = -1;
  uint64_t tag_ = 0;
  Lane* lanes_[kNetRanks][kMaxLanes] = {};
  Region *sources_[kNetRanks] = {}, *mirrors_[kNetRanks] = {};
  uint64_t failed_ = 0;  // bit per peer with a lane whose failure is to be reported
  Lane* lingering_[kMaxLingering];
  int linger_count_ = 0;
  Text about_, why_;

 private:
  // The peer's card is here. 0 or an errno.
  int meet(int peer, int lane, Lane& l) {
    memcpy(&l.peer, l.exchange.words, sizeof l.peer);
    if (const int error = self().to_peer(peer, lane, l)) return error;
    l.window.grant(0, l.peer.depth);
    why_.say("%s: the peer closed while it was being connected", self().name());
    if (!l.exchange.send_ready()) return ECONNRESET;
    why_ = {};
    return 0;
  }
};

}  // namespace cd
