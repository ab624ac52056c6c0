// The `verbs` provider: InfiniBand and RoCE. A lane is a queue pair of a reliable connection; a write is one RDMA write
// with immediate. A credit is a send with immediate, for which four more receives are posted: the peer cannot be more
// than two ahead.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "lanes.hpp"
#include "verbs_device.hpp"

namespace cd {
namespace ib {
namespace {

constexpr int kDepth = 128, kLeast = 8, kCredits = 4;
constexpr uint32_t kInlineBytes = 64;  // an exchange; larger ones the device reads itself
constexpr int kBatch = 32, kTurns = 16;
// A peer that is not ready is asked six times more, 0.6 ms apart, which it is only if it breaks the flow control.
constexpr uint8_t kNotReadyRetries = 6, kNotReadyTimer = 12;
constexpr uint32_t kMagic = 0x43445631;  // version of the card

struct Card {
  uint32_t magic, pair, psn, rkey;
  uint64_t base, bytes;
  Gid gid;
  uint16_t lid;
  uint8_t link_layer, mtu;
  uint32_t depth;
};
static_assert(sizeof(Card) == 56);

enum class Kind : uint8_t { write, credit, recv };

struct Lane : LaneOf<Card> {
  uint32_t generation = 0;
  Pair* pair = nullptr;
  uint32_t psn = 0;
  uint32_t credits_out = 0;
};

class Verbs final : public Lanes<Verbs, Lane, Region> {
 public:
  using Lanes::Lanes;

  bool poll(int peer, int lane, uint32_t events) override;
  int64_t advance(int64_t now) override;
  bool rest() override;
  void close_in_child() override;
  uint64_t most_bytes() const override { return std::min<uint64_t>(port_.attr.max_message_bytes, 1 << 30); }

 private:
  friend Lanes;

  // For Lanes.
  const char* name() const { return "verbs"; }
  const char* words(int error) const { return strerror(error); }
  bool begin();
  void end();
  bool is_alive();
  bool make(int peer, int lane, Lane& l, Card* card);
  int to_peer(int peer, int lane, Lane& l);
  int post(int peer, int lane, Lane& l, const Write& w);
  int credit(int peer, int lane, Lane& l);
  void drain(int, int) {
    while (drain() == kTurns * kBatch) {
    }
  }
  void shut(Lane& l) {
    if (l.pair) port_.lib->destroy_qp(l.pair);
  }
  bool lingers() const { return false; }
  void discard(Lane&) {}

  Region* reg(const uint8_t* address, uint64_t bytes, bool lands, int number) {
    const int access = lands ? kLocalWrite | kRemoteWrite : kLocalWrite;
    return memory_.dma_bufs ? port_.reg_device(address, bytes, access, memory_.dma_bufs[number], &about_)
                            : port_.reg(address, bytes, access, memory_.most_bytes(), &about_);
  }
  void unreg(Region* region) { port_.lib->dereg_mr(region); }

  bool make_pair(int peer, int lane, Lane& l);
  bool post_recv(int peer, int lane, Lane& l);
  int drain();
  void complete(const Completion& c);
  void arrive(int peer, int lane, Lane& l, const Completion& c);
  void read_device_events();
  uint64_t id(int peer, int lane, const Lane& l, Kind kind) const {
    return uint64_t(l.generation) << 32 | uint64_t(peer) << 16 | uint64_t(lane) << 8 | uint64_t(kind);
  }

  Port port_;
  Channel* channel_ = nullptr;
  Queue* queue_ = nullptr;
  int depth_ = 0, events_ = 0;
  uint32_t generations_ = 0;
  bool is_dead_ = false;  // the device is gone
  Text event_;
};

}  // namespace

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

// The lanes: how a queue pair is made, and connected by the cards of both ends.

// A device that came back is opened anew.
bool Verbs::is_alive() {
  if (!is_dead_) return true;
  for (int peer = 0; peer < kNetRanks; ++peer) disconnect(peer);
  end();
  if (begin()) return true;
  end();
  return errno = ENODEV, false;
}

bool Verbs::make(int peer, int lane, Lane& l, Card* card) {
  if (!make_pair(peer, lane, l)) return false;
  const Region& landing = *mirror(peer);
  *card = {kMagic, l.pair->number, l.psn, landing.rkey, reinterpret_cast<uint64_t>(landing.address), memory_.stride,
           port_.gid.gid, port_.attr.lid, port_.attr.link_layer, uint8_t(port_.mtu), uint32_t(depth_)};
  return true;
}

bool Verbs::make_pair(int peer, int lane, Lane& l) {
  if (!source(peer) || !mirror(peer)) return false;
  // The pair, with a queue for its writes and receives.
  PairInit init{};
  init.send_queue = init.recv_queue = queue_;
  const uint32_t room = uint32_t(depth_ + kCredits);
  init.capacity = {room, room, 1, 1, kInlineBytes};
  init.type = kReliable;
  l.pair = port_.lib->create_qp(port_.domain, &init);
  if (!l.pair) return about_.say("verbs: no queue pair: %s", strerror(errno)), false;
  // First sequence number, by chance: late packets of an earlier pair must not fit.
  if (getrandom(&l.psn, sizeof l.psn, 0) != sizeof l.psn) l.psn = l.pair->number * 2654435761u;
  l.psn &= 0xffffff;
  // Start it: receives may be posted from then on.
  PairAttr attr{};
  attr.state = kInit;
  attr.port = port_.number;
  attr.access = kLocalWrite | kRemoteWrite;
  if (int error = port_.lib->modify_qp(l.pair, &attr, kState | kKeyIndex | kPort | kAccessFlags)) {
    about_.say("verbs: the queue pair does not start: %s", strerror(error));
    return errno = error, false;
  }
  for (uint32_t i = 0; i < room; ++i) {
    if (!post_recv(peer, lane, l)) return about_.say("verbs: no receive can be posted"), false;
  }
  return true;
}

// Connects the queue pair by the peer's card. 0 or an errno.
int Verbs::to_peer(int, int lane, Lane& l) {
  const Card& p = l.peer;
  why_.say("verbs: the peer's card is none of this version, or of another kind of network");
  if (p.magic != kMagic || p.depth < kLeast || p.link_layer != port_.attr.link_layer) return EPROTO;
  PairAttr attr{};
  attr.state = kReadyToReceive;
  attr.mtu = std::max(1, std::min(port_.mtu, int(p.mtu)));
  attr.peer_pair = p.pair;
  attr.recv_psn = p.psn;
  attr.peer_reads = 1;
  attr.not_ready_timer = kNotReadyTimer;
  Address& to = attr.address;
  to.port = port_.number;
  to.lid = p.lid;
  to.level = uint8_t(settings_.service_level);
  // InfiniBand needs the global route only beyond the subnet, of which the first half of the GID is the name.
  to.is_global = port_.ethernet || settings_.gid_index >= 0 || memcmp(p.gid.raw, port_.gid.gid.raw, 8) != 0;
  to.route.gid = p.gid;
  to.route.own_gid_index = uint8_t(port_.gid.index);
  to.route.hop_limit = 64;
  to.route.traffic_class = uint8_t(settings_.traffic_class);
  // RoCE: drivers derive the UDP source port, by which switches choose a path, from the label: each lane has its own.
  to.route.flow_label = (l.psn & 0x3fff & ~(kMaxLanes - 1u)) | uint32_t(lane);
  const int path = kAddress | kPathMtu | kPeerPair | kRecvPsn | kPeerReads | kNotReadyWait;
  int error = port_.lib->modify_qp(l.pair, &attr, kState | path);
  if (!error) {
    attr = {};
    attr.state = kReadyToSend;
    attr.send_psn = l.psn;
    attr.timeout = uint8_t(settings_.ack_timeout);
    attr.retries = uint8_t(settings_.retries);
    attr.not_ready_retries = kNotReadyRetries;
    attr.reads = 1;
    error = port_.lib->modify_qp(l.pair, &attr, kState | kTimer | kRetryCount | kNotReadyCount | kSendPsn | kReads);
  }
  why_.say("verbs: the queue pair cannot be connected: %s; is the peer's GID reachable from GID %d here?",
           strerror(error), port_.gid.index);
  return error;
}

}  // namespace ib

Provider* make_verbs(const NetSettings& settings) {
  void* memory = malloc(sizeof(ib::Verbs));
  return memory ? new (memory) ib::Verbs(settings) : nullptr;
}

}  // namespace cd
