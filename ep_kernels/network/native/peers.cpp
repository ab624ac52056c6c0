// The peers of a channel: how their connections begin and end.
//
// Connections are established when both ends have joined: each says so on its control connection. The end of one that
// was never established is not reported: it could come after a newer one has been made.
//
// A peer is down when all its lanes have ended, or when they have brought nothing for 50 ms since the first sign of an
// end (a lane, the control connection): what it had sent before is delivered first, since it counts. One that closes in
// order ends its lanes itself.
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "proxy.hpp"

namespace cd {
namespace {

constexpr int64_t kEndNs = 50'000'000;
constexpr uint32_t kJoined = 3, kLeftOut = 1, kCloses = 2;  // messages of a control connection: first and last words

struct ControlMessage {
  uint32_t kind, unused;
  uint64_t value;
};
static_assert(sizeof(ControlMessage) == 16);

uint64_t tag_of(const NetChannel& c, int rank, int lane) {
  return uint64_t(c.generation) << 32 | uint64_t(c.index) << 16 | uint64_t(rank) << 8 | uint64_t(lane);
}

void send_control(int fd, const ControlMessage& message) {
  (void)!send(fd, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

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

int Proxy::add(NetChannel* c) {
  Hold hold(*this, c->patience_ns);
  if (!hold) return ETIMEDOUT;
  for (int i = 0; i < kChannels; ++i) {
    if (channels_[i]) continue;
    // It gets the first free place; its outbox rings this thread.
    c->proxy = this;
    c->index = i;
    c->generation = ++generations_ & 0x7fffffff;
    c->outbox->event_fd = event_fd_;
    c->outbox->asleep.store(1);  // the proxy may be, and does not know this outbox yet
    // The provider may refuse.
    const Sink sink{c, &Proxy::sent, &Proxy::arrived, &Proxy::ended};
    if (!c->provider->open(sink, c->memory, epoll_fd_, tag_of(*c, kNoPeer, 0))) return EIO;
    while (c->outbox->stripe > c->provider->most_bytes()) c->outbox->stripe /= 2;
    channels_[i] = c;
    num_channels_ = std::max(num_channels_, i + 1);
    return 0;
  }
  return EMFILE;
}

void Proxy::remove(NetChannel* c) {
  Hold hold(*this, kForEver);  // else the proxy would go on in memory that is freed
  // Say goodbye to each peer, and leave its connections to be read to the end.
  for (int rank = 0; rank < c->memory.ranks; ++rank) {
    NetPeer& p = c->peers[rank];
    if (p.control_fd >= 0) {
      send_control(p.control_fd, {kCloses, 0, 0});
      close_after_peer(p.control_fd, c->patience_ns);
    }
    int fds[kMaxLanes];
    const int n = c->provider->release(rank, fds);
    for (int i = 0; i < n; ++i) close_after_peer(fds[i], c->patience_ns);
    p.control_fd = -1;
    p.up = p.established = false;
    p.backlog.free_memory();
  }
  // The provider goes at once, or when it has nothing under way.
  publish(*c);
  if (retired_count_ < kRetired && c->provider->retire()) {
    retired_[retired_count_++] = c->provider;
  } else {
    c->provider->close();
  }
  c->provider = nullptr;
  channels_[c->index] = nullptr;
  while (num_channels_ > 0 && !channels_[num_channels_ - 1]) --num_channels_;
}

// The peer reads what was sent before it sees the end: a socket closed with unread bytes in it resets the connection,
// and with it what is still under way. So: say that nothing more comes, read until the peer says so too.
void Proxy::close_after_peer(int fd, int64_t patience_ns) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  if (half_closed_count_ == kHalfClosed || shutdown(fd, SHUT_WR) != 0) {
    close(fd);
    return;
  }
  half_closed_[half_closed_count_++] = {fd, now_ns() + patience_ns};
  const uint64_t one = 1;
  (void)!write(event_fd_, &one, sizeof one);
}

int Proxy::join(NetChannel* c, int rank, int control_fd, const int32_t* lanes, int num_lanes) {
  Hold hold(*this, c->patience_ns);
  if (!hold) return ETIMEDOUT;
  NetPeer& p = c->peers[rank];
  if (!c->provider) return ECANCELED;
  if (num_lanes > kMaxLanes) return EINVAL;
  p.why = {};
  // A new connection in the place of an old one.
  if (p.up) disconnect(*c, rank, false);
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = tag_of(*c, rank, kControlLane);
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, control_fd, &event) != 0) return errno;
  // All lanes, or none.
  for (int lane = 0; lane < num_lanes; ++lane) {
    if (c->provider->connect(rank, lane, lanes[lane], tag_of(*c, rank, lane))) continue;
    const int error = errno ? errno : EIO;
    p.why.say("%s", c->provider->about());
    int fds[kMaxLanes];
    c->provider->release(rank, fds);  // the caller closes them
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, control_fd, nullptr);
    return error;
  }
  // The peer is up here; established, when it says the same.
  p.control_fd = control_fd;
  p.lanes = num_lanes;
  p.lanes_ended = p.error = p.message_bytes = 0;
  p.down_at_ns = 0;
  p.closed_in_order = false;
  p.left_out = 0;
  p.up = true;
  publish(*c);
  send_control(control_fd, {kJoined, 0, 0});
  return 0;
}

void Proxy::establish(NetChannel& c, int rank) {
  NetPeer& p = c.peers[rank];
  if (p.established || !p.up) return;
  p.established = p.reported_up = true;
  publish(c);
  c.handler(c.context, rank, NetEvent::up, 0);
}

int Proxy::leave(NetChannel* c, int rank, uint64_t tag) {
  Hold hold(*this, c->patience_ns);
  if (!hold) return ETIMEDOUT;
  if (!c->provider) return 0;
  NetPeer& p = c->peers[rank];
  if (p.control_fd >= 0) {
    send_control(p.control_fd, {kLeftOut, 0, tag});
    close_after_peer(p.control_fd, c->patience_ns);
    p.control_fd = -1;
  }
  disconnect(*c, rank, false);
  p.reported_up = false;
  return 0;
}

// After each change of a peer's `up` or `established`.
void Proxy::publish(NetChannel& c) {
  uint64_t joined = 0, established = 0;
  for (int rank = 0; rank < c.memory.ranks; ++rank) {
    const NetPeer& p = c.peers[rank];
    joined |= uint64_t(p.up) << rank;
    established |= uint64_t(p.up && p.established) << rank;
  }
  c.joined.store(joined, std::memory_order_release);
  c.established.store(established, std::memory_order_release);
}

void Proxy::why(NetChannel* c, int rank, Text* out) {
  Hold hold(*this, kAskedNs);
  if (hold) *out = c->peers[rank].why;
}

// Ends the connection that a bad descriptor names, with the error: its receiver would wait for the bytes until the
// deadline. A descriptor that names no rank ends all connections.
void Proxy::refuse(NetChannel& c, const Order& order, int error) {
  const bool known = order.rank < c.memory.ranks;
  for (int rank = known ? order.rank : 0; rank < (known ? order.rank + 1 : c.memory.ranks); ++rank) {
    NetPeer& p = c.peers[rank];
    if (!p.up) continue;
    p.error = error;
    p.why.say("a descriptor of this rank cannot be carried out (%s): %u bytes at %llu to rank %d of %d",
              strerror(error), order.bytes, static_cast<unsigned long long>(order.offset), order.rank, c.memory.ranks);
    disconnect(c, rank, true);
  }
  if (known) sent(&c, order.rank);
}

void Proxy::traffic(NetChannel* c, Traffic* out) {
  Hold hold(*this, kAskedNs);
  for (int rank = 0; hold && rank < c->memory.ranks; ++rank) out[rank] = c->peers[rank].traffic;
}

void Proxy::restart_ring(NetChannel* c) {
  Hold hold(*this, kForEver);  // what follows counts from an empty ring
  while (!c->outbox->empty()) flush(*c);
  c->outbox->restart();
}

void Proxy::control(NetChannel& c, int rank) {
  const int error = read_control(c, rank);
  if (error < 0) return;
  close_fd(c.peers[rank].control_fd);
  begin_end(c, rank, error);
}

// What the control connection brings. -1: more may come; else it has ended, with an errno or in order.
int Proxy::read_control(NetChannel& c, int rank) {
  NetPeer& p = c.peers[rank];
  for (;;) {
    // What there is of a message.
    const int wanted = int(sizeof p.message) - p.message_bytes;
    const ssize_t got = recv(p.control_fd, p.message + p.message_bytes, size_t(wanted), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return -1;
    if (got <= 0) return got < 0 ? errno : 0;
    p.message_bytes += int(got);
    if (p.message_bytes < int(sizeof p.message)) continue;
    // A whole one.
    p.message_bytes = 0;
    ControlMessage message;
    memcpy(&message, p.message, sizeof message);
    if (message.kind == kJoined) establish(c, rank);
    p.closed_in_order |= message.kind == kCloses;
    if (message.kind == kLeftOut) p.left_out = message.value;
  }
}

// Closes a descriptor; out of epoll first, since a forked child's copy would keep it there.
void Proxy::close_fd(int& fd) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  close(fd);
  fd = -1;
}

void Proxy::begin_end(NetChannel& c, int rank, int error) {
  NetPeer& p = c.peers[rank];
  if (error) p.error = error;
  if (!p.down_at_ns) p.down_at_ns = now_ns() + (p.closed_in_order ? c.patience_ns : kEndNs);
}

// The time of an end has passed: the peer is down, unless its lanes still bring what it had sent.
void Proxy::check_end(NetChannel& c, int rank, int64_t now) {
  NetPeer& p = c.peers[rank];
  bool more = false;
  for (int lane = 0; lane < p.lanes && p.up; ++lane) more |= c.provider->poll(rank, lane, EPOLLIN);
  if (!p.up) return;
  if (more || now - p.received_ns < kEndNs) {
    p.down_at_ns = now + kEndNs;
  } else {
    disconnect(c, rank, true);
  }
}

void Proxy::disconnect(NetChannel& c, int rank, bool notify) {
  NetPeer& p = c.peers[rank];
  // Nothing more is sent to it.
  p.up = p.established = false;
  publish(c);
  if (p.control_fd >= 0) {
    read_control(c, rank);  // its last word says why
    close_fd(p.control_fd);
  }
  // Orders that wait are over.
  c.provider->disconnect(rank);
  for (uint64_t left = p.backlog.clear(); left > 0; --left) sent(&c, rank);
  if (!notify) return;
  // The channel hears how it ended, if it had heard of the peer.
  const bool reported_up = p.reported_up;
  p.reported_up = false;
  if (p.left_out) {
    c.handler(c.context, rank, NetEvent::left_out, p.left_out);
  } else if (reported_up && !p.closed_in_order) {
    c.handler(c.context, rank, NetEvent::down, uint64_t(p.error));
  }
}

void Proxy::sent(void* channel, int rank) {
  auto* c = static_cast<NetChannel*>(channel);
  c->outbox->done[rank].fetch_add(1, std::memory_order_release);
}

void Proxy::arrived(void* channel, int rank, uint32_t imm) {
  auto* c = static_cast<NetChannel*>(channel);
  NetPeer& p = c->peers[rank];
  ++p.traffic.received_messages;
  p.received_ns = c->proxy->arrived_ns_ = c->proxy->now_;
  c->proxy->busy_ = true;
  c->proxy->establish(*c, rank);  // who writes has joined
  c->handler(c->context, rank, NetEvent::arrived, imm);
}

void Proxy::ended(void* channel, int rank, int error, const char* why) {
  auto* c = static_cast<NetChannel*>(channel);
  NetPeer& p = c->peers[rank];
  if (!p.up) return;
  ++p.lanes_ended;
  if (why && !*p.why.at) p.why.say("%s", why);
  c->proxy->begin_end(*c, rank, error);
  if (p.lanes_ended == p.lanes) c->proxy->disconnect(*c, rank, true);
}

}  // namespace cd
