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
  if (!memory_.box && !source(0)) return false;
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
  unreg_all();
  port_.close();
  queue_ = nullptr;
  channel_ = nullptr;
  events_ = 0;
}

void Verbs::close_in_child() {
  if (channel_) ::close(channel_->fd);
  if (port_.context) {
    ::close(port_.context->async_fd);
    ::close(port_.context->cmd_fd);
  }
  Lanes::close_in_child();
}

bool Verbs::post_recv(int peer, int lane, Lane& l) {
  RecvRequest request{id(peer, lane, l, Kind::recv), nullptr, nullptr, 0}, *bad;
  return port_.context->ops.post_recv(l.pair, &request, &bad) == 0;
}

int Verbs::post(int peer, int lane, Lane& l, const Write& w) {
  if (l.out == uint32_t(depth_)) return EAGAIN;
  Piece piece{reinterpret_cast<uint64_t>(w.from), w.bytes, source(peer)->lkey};
  SendRequest request{}, *bad;
  request.id = id(peer, lane, l, Kind::write);
  request.pieces = &piece;
  request.num_pieces = w.bytes ? 1 : 0;
  request.opcode = kWriteWithImm;
  request.flags = kSignaled;
  if (w.bytes && w.bytes <= kInlineBytes && !memory_.dma_bufs) request.flags |= kInline;
  request.imm = htonl(w.imm);
  request.remote_address = l.peer.base + w.to;
  request.rkey = l.peer.rkey;
  const int error = port_.context->ops.post_send(l.pair, &request, &bad);
  return error == EAGAIN ? EIO : error;  // the queue has room for all that may be out
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
  // What has succeeded.
  if (c.status == kSuccess) {
    if (kind == Kind::recv) return arrive(peer, lane, *l, c);
    if (kind == Kind::credit) {
      --l->credits_out;
      return grant(peer, lane, *l, depth_);
    }
    return sent(peer, *l);
  }
  // An error ends the lane, with the reason that the device gives.
  read_device_events();  // which may say why
  if (l->error) return;
  const int error = c.status == kRetriesExceeded ? ETIMEDOUT
                    : c.status == kNotReady      ? ENOBUFS
                    : c.status == kRemoteAccess  ? EACCES
                                                 : EIO;
  why_.say("verbs: %s of lane %d: %s (vendor error %#x)%s%s", kind == Kind::recv ? "receive" : "write", lane,
           port_.lib->wc_status_str(c.status), c.vendor_error, *event_.at ? "; before that: " : "", event_.at);
  fail(peer, *l, error);
}

void Verbs::arrive(int peer, int lane, Lane& l, const Completion& c) {
  if (!post_recv(peer, lane, l)) {
    why_.say("verbs: a receive cannot be posted");
    fail(peer, l, EIO);
  }
  const uint32_t imm = ntohl(c.imm);
  if (c.opcode == kRecv) return l.window.grant(imm, l.peer.depth);
  arrived(peer, l, imm);
  grant(peer, lane, l, depth_);
}

int Verbs::credit(int peer, int lane, Lane& l) {
  if (l.credits_out == kCredits) return EAGAIN;
  SendRequest request{}, *bad;
  request.id = id(peer, lane, l, Kind::credit);
  request.opcode = kSendWithImm;
  request.flags = kSignaled;
  request.imm = htonl(l.window.consumed);
  const int error = port_.context->ops.post_send(l.pair, &request, &bad);
  l.credits_out += error == 0;
  return error == EAGAIN ? EIO : error;
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
    read_device_events();
    return false;
  }
  read_control(peer, lane);
  return false;
}

// A port that goes down ends no lane: it may be back before the retries are used up; if not, they end it.
void Verbs::read_device_events() {
  AsyncEvent event{};
  while (port_.context && port_.lib->get_async_event(port_.context, &event) == 0) {
    // A pair's error, the port's state, or the end of the device.
    const int type = event.type;
    Pair* pair = type == kPairFatal || type == kPairRequest || type == kPairAccess ? event.pair : nullptr;
    const bool is_port = type == kPortUp || type == kPortDown;
    if (is_port) event_.say("%s (port %d)", port_.lib->event_type_str(type), event.port);
    if (type == kPortUp) event_ = {};
    is_dead_ |= type == kDeviceFatal || type == kQueueError;
    if (pair || is_dead_) why_.say("verbs: %s", port_.lib->event_type_str(type));
    // The lanes that it ends.
    for (int peer = 0; peer < kNetRanks && (pair || is_dead_); ++peer) {
      for (Lane* l : lanes_[peer]) {
        if (!l || (!is_dead_ && l->pair != pair)) continue;
        fail(peer, *l, is_dead_ ? ENODEV : EIO);
      }
    }
    port_.lib->ack_async_event(&event);
  }
}

int64_t Verbs::advance(int64_t) {
  if (queue_ && !is_dead_) drain();
  report_failures();
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
