#include "verbs.hpp"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace cd {
namespace ib {

bool Verbs::begin() {
  if (!port_.open(settings_, &about_)) return false;
  // Room for every completion that lanes can have: the queue cannot overrun.
  const int lanes = std::max(1, (memory_.ranks - 1) * memory_.lanes);
  const int room = port_.device.max_completions / lanes / 2 - kCredits;
  depth_ = std::min({kDepth, port_.device.max_requests - kCredits, room});
  if (depth_ < kLeast) {
    about_.say("verbs: the device's completion queue holds %d entries, too few for %d lanes; fewer network.lanes",
               port_.device.max_completions, lanes);
    return false;
  }
  const uint64_t needed = memory_.own_bytes + memory_.stride * uint64_t(memory_.ranks - 1);
  own_ = port_.reg(memory_.own, memory_.own_bytes, kLocalWrite, needed, &about_);
  if (!own_) return false;
  channel_ = port_.lib->create_comp_channel(port_.context);
  if (channel_) queue_ = port_.lib->create_cq(port_.context, 2 * lanes * (depth_ + kCredits), nullptr, channel_, 0);
  if (!queue_) {
    about_.say("verbs: no completion queue of %d entries: %s", 2 * lanes * (depth_ + kCredits), strerror(errno));
    return false;
  }
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = tag_;
  for (int fd : {channel_->fd, port_.context->async_fd}) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) return false;
  }
  is_dead_ = false;
  return true;
}

// No lane is left.
void Verbs::end() {
  if (channel_) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, channel_->fd, nullptr);
  if (port_.context) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, port_.context->async_fd, nullptr);
  if (queue_) {
    if (events_) port_.lib->ack_cq_events(queue_, unsigned(events_));
    port_.lib->destroy_cq(queue_);
  }
  if (channel_) port_.lib->destroy_comp_channel(channel_);
  if (own_) port_.lib->dereg_mr(own_);
  for (Region*& mirror : mirrors_) {
    if (mirror) port_.lib->dereg_mr(mirror);
    mirror = nullptr;
  }
  port_.close();
  own_ = nullptr;
  queue_ = nullptr;
  channel_ = nullptr;
  events_ = 0;
}

void Verbs::forsake() {
  for (auto& lanes : lanes_) {
    for (Lane* l : lanes) {
      if (l && l->exchange.fd >= 0) ::close(l->exchange.fd);
      free(l);
    }
  }
  if (channel_) ::close(channel_->fd);
  if (port_.context) {
    ::close(port_.context->async_fd);
    ::close(port_.context->cmd_fd);
  }
  free(this);
}

bool Verbs::post_recv(int peer, int lane, Lane& l) {
  RecvRequest request{id(peer, lane, l, Kind::recv), nullptr, nullptr, 0}, *bad;
  return port_.context->ops.post_recv(l.pair, &request, &bad) == 0;
}

bool Verbs::write(int peer, int lane, const Write& w) {
  Lane* l = lanes_[peer][lane];
  if (!l || l->error) {
    sink_.sent(sink_.owner, peer);
    return true;
  }
  if (!l->is_up || l->out == uint32_t(depth_) || l->written == l->granted) return false;
  Piece piece{reinterpret_cast<uint64_t>(w.from), w.bytes, own_->lkey};
  SendRequest request{}, *bad;
  request.id = id(peer, lane, *l, Kind::write);
  request.pieces = &piece;
  request.num_pieces = w.bytes ? 1 : 0;
  request.opcode = kWriteWithImm;
  request.flags = kSignaled;
  if (w.bytes && w.bytes <= kInlineBytes) request.flags |= kInline;
  request.imm = htonl(w.imm);
  request.remote_address = l->peer.base + w.to;
  request.rkey = l->peer.rkey;
  int error = w.to + w.bytes > l->peer.bytes ? EPROTO : port_.context->ops.post_send(l->pair, &request, &bad);
  if (error) {
    why_.say("verbs: a write of %u bytes cannot be posted: %s", w.bytes, strerror(error));
    fail(*l, error, why_.at);
    failed_ |= 1ull << peer;
    sink_.sent(sink_.owner, peer);
    return true;
  }
  ++l->out;
  ++l->written;
  return true;
}

void Verbs::fail(Lane& l, int error, const char* what) {
  if (l.error) return;
  l.error = error;
  if (what != why_.at) why_.say("%s", what);
}

// What the device has done. How many completions.
int Verbs::drain() {
  Completion batch[kBatch];
  int all = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int n = queue_->context->ops.poll_cq(queue_, kBatch, batch);
    for (int i = 0; i < n; ++i) complete(batch[i]);
    all += std::max(0, n);
    if (n < kBatch) break;
  }
  return all;
}

void Verbs::complete(const Completion& c) {
  const int peer = int(c.id >> 16 & 0xff), lane = int(c.id >> 8 & 0xff);
  Lane* l = lanes_[peer][lane];
  if (!l || l->generation != uint32_t(c.id >> 32)) return;  // of an earlier queue pair
  const Kind kind = Kind(c.id & 0xff);
  if (c.status == kSuccess) {
    if (kind == Kind::recv) return arrive(peer, lane, *l, c);
    if (kind == Kind::credit) {
      --l->credits_out;
      return grant(peer, lane, *l);
    }
    --l->out;
    return sink_.sent(sink_.owner, peer);
  }
  if (l->error) return;
  const int error = c.status == kRetriesExceeded ? ETIMEDOUT
                    : c.status == kNotReady      ? ENOBUFS
                    : c.status == kRemoteAccess  ? EACCES
                                                 : EIO;
  why_.say("verbs: %s of lane %d: %s (vendor error %#x)%s%s", kind == Kind::recv ? "receive" : "write", lane,
           port_.lib->wc_status_str(c.status), c.vendor_error, *event_.at ? "; before that: " : "", event_.at);
  fail(*l, error, why_.at);
  failed_ |= 1ull << peer;
}

void Verbs::arrive(int peer, int lane, Lane& l, const Completion& c) {
  if (!post_recv(peer, lane, l)) {
    fail(l, EIO, "verbs: a receive cannot be posted");
    failed_ |= 1ull << peer;
  }
  const uint32_t imm = ntohl(c.imm);
  if (c.opcode == kRecv) {
    l.granted = imm + l.peer.depth;
    return;
  }
  ++l.consumed;
  grant(peer, lane, l);
  sink_.arrived(sink_.owner, peer, imm);
}

// Says how many receives have been posted anew, when it is half of them.
void Verbs::grant(int peer, int lane, Lane& l) {
  if (l.consumed - l.told < uint32_t(depth_ / 2) || l.credits_out == kCredits || l.error) return;
  SendRequest request{}, *bad;
  request.id = id(peer, lane, l, Kind::credit);
  request.opcode = kSendWithImm;
  request.flags = kSignaled;
  request.imm = htonl(l.consumed);
  if (int error = port_.context->ops.post_send(l.pair, &request, &bad)) {
    fail(l, error, "verbs: a credit cannot be posted");
    failed_ |= 1ull << peer;
    return;
  }
  l.told = l.consumed;
  ++l.credits_out;
}

bool Verbs::poll(int peer, int lane, uint32_t) {
  if (peer == kNoPeer) {
    Queue* queue;
    void* context;
    while (channel_ && port_.lib->get_cq_event(channel_, &queue, &context) == 0) {
      if (++events_ == 1024) {
        port_.lib->ack_cq_events(queue_, unsigned(events_));
        events_ = 0;
      }
    }
    hear_device();
    return false;
  }
  Lane* l = lanes_[peer][lane];
  if (l && l->exchange.fd >= 0) hear(peer, lane, *l);
  return false;
}

// A port that goes down ends no lane: it may be back before the retries are used up, which tell otherwise.
void Verbs::hear_device() {
  AsyncEvent event{};
  while (port_.context && port_.lib->get_async_event(port_.context, &event) == 0) {
    const int type = event.type;
    Pair* pair = type == kPairFatal || type == kPairRequest || type == kPairAccess ? event.pair : nullptr;
    const bool is_port = type == kPortUp || type == kPortDown;
    if (is_port) event_.say("%s (port %d)", port_.lib->event_type_str(type), event.port);
    if (type == kPortUp) event_ = {};
    is_dead_ |= type == kDeviceFatal || type == kQueueError;
    if (pair || is_dead_) why_.say("verbs: %s", port_.lib->event_type_str(type));
    for (int peer = 0; peer < kNetRanks && (pair || is_dead_); ++peer) {
      for (Lane* l : lanes_[peer]) {
        if (!l || (!is_dead_ && l->pair != pair)) continue;
        fail(*l, is_dead_ ? ENODEV : EIO, why_.at);
        failed_ |= 1ull << peer;
      }
    }
    port_.lib->ack_async_event(&event);
  }
}

int64_t Verbs::advance(int64_t) {
  if (queue_ && !is_dead_) drain();
  for (; failed_; failed_ &= failed_ - 1) {
    const int peer = __builtin_ctzll(failed_);
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      Lane*& l = lanes_[peer][lane];
      if (!l || !l->error) continue;
      const int error = l->error;
      drop(peer, l, true);
      sink_.ended(sink_.owner, peer, error, why_.at);
    }
  }
  return -1;
}

bool Verbs::rest() {
  if (!queue_ || is_dead_) return true;
  if (queue_->context->ops.req_notify_cq(queue_, 0) != 0) return false;
  return drain() == 0 && !failed_;
}

}  // namespace ib

Provider* make_verbs(const NetSettings& settings) {
  void* memory = malloc(sizeof(ib::Verbs));
  return memory ? new (memory) ib::Verbs(settings) : nullptr;
}

}  // namespace cd
