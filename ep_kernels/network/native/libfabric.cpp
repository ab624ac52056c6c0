// The `libfabric` provider: EFA and CXI by their own providers, others by `ofi_rxm`. A lane is an endpoint of its own
// for reliable datagrams, with a completion queue of its own, which so tells whose immediate has come; a write is
// fi_writedata. Writes arrive in any order.
//
// A lane begins as one of `verbs` does: each end sends a card on the lane's TCP connection (address of the endpoint,
// key and address of the mirror), then says that it is ready. A new connection is a new endpoint, so nothing of an
// earlier one comes to it. Flow control is that of `verbs`, too: a provider may take a posted receive for an immediate,
// and its queue is finite. A credit is a message of 8 bytes.
#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "clock.hpp"
#include "exchange.hpp"
#include "fabric_device.hpp"
#include "ring.hpp"

namespace cd {
namespace fi {
namespace {

constexpr int kDepth = 64, kCredits = 4, kRecvs = kDepth + kCredits, kBatch = 16, kTurns = 16;
constexpr uint32_t kMagic = 0x43444632;  // version of the card
constexpr size_t kNameBytes = 64;
// Between looks without an event: after a refused write, or where a queue has no descriptor; while an endpoint is new;
// while it has carried nothing yet, as its connection is made behind the scenes; and else, where progress is manual.
constexpr int64_t kStuckNs = 50'000, kYoungTickNs = 500'000, kQuietTickNs = 10'000'000, kTickNs = 100'000'000;
constexpr int64_t kYoungNs = 200'000'000;

struct Card {
  uint32_t magic, depth;
  uint64_t key, base, bytes;
  char provider[32];
  uint32_t name_bytes, unused;
  uint8_t name[kNameBytes];
};
static_assert(sizeof(Card) == 136);

struct Slot {
  uint64_t context[8];  // the provider's
  int next;             // of the free ones
};

struct Lane {
  Exchange<Card> exchange;
  Endpoint* endpoint = nullptr;
  Queue* queue = nullptr;
  Region *mirror = nullptr, *inbox = nullptr;  // of this lane alone, or null
  int wait_fd = -1;
  Card peer{};
  uint64_t address = kUnspecified;
  int64_t begun_ns = 0;
  bool is_up = false;
  bool is_proven = false;  // something was completed
  int error = 0;  // the lane has failed; told in `advance`
  int out = 0, free_slot = 0;
  uint64_t written = 0, granted = 0, consumed = 0, told = 0;
  Slot sends[kDepth], recvs[kRecvs];
  uint64_t credits[kRecvs];  // where messages arrive
};

}  // namespace

class Libfabric final : public Provider {
 public:
  explicit Libfabric(const NetSettings& settings) : settings_(settings) {}

  bool open(const Sink& sink, const NetMemory& memory, int epoll_fd, uint64_t tag) override {
    sink_ = sink;
    memory_ = memory;
    epoll_fd_ = epoll_fd;
    tag_ = tag;
    if (access_.open(settings_, std::max(1, memory.ranks * memory.lanes), &about_)) {
      Text why;
      own_ = access_.reg(memory.own, memory.own_bytes, kWrite, &why);
      if (own_) return true;
      about_ = why;
    }
    access_.close();
    return false;
  }

  bool connect(int peer, int lane, int fd, uint64_t tag) override {
    Lane*& l = lanes_[peer][lane];
    drop(peer, l, true);
    void* memory = malloc(sizeof(Lane));
    if (!memory) return errno = ENOMEM, false;
    l = new (memory) Lane;
    Card card{};
    if (make(peer, *l, &card) && l->exchange.begin(epoll_fd_, fd, tag, card)) return true;
    const int error = errno;
    drop(peer, l, false);
    errno = error ? error : EIO;
    return false;
  }

  bool write(int peer, int lane, const Write& w) override;
  bool poll(int peer, int lane, uint32_t) override {
    if (peer == kNoPeer) return false;  // queues are read in `advance`
    Lane* l = lanes_[peer][lane];
    if (l && l->exchange.fd >= 0) hear(peer, lane, *l);
    return false;
  }
  int64_t advance(int64_t now) override;
  bool rest() override;
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
  void close() override {
    for (int peer = 0; peer < kNetRanks; ++peer) disconnect(peer);
    for (Region* mirror : mirrors_) shut(mirror);
    shut(own_);
    access_.close();
    free(this);
  }
  // The library's own descriptors stay open in the child; the lanes' are what peers watch.
  void forsake() override {
    for (auto& lanes : lanes_) {
      for (Lane* l : lanes) {
        if (l && l->exchange.fd >= 0) ::close(l->exchange.fd);
        free(l);
      }
    }
    free(this);
  }
  uint64_t most_bytes() const override {
    return std::min<uint64_t>(access_.info->endpoint->max_message_bytes, 1 << 30);
  }
  const char* about() const override { return about_.at; }

 private:
  bool make(int peer, Lane& l, Card* card);
  bool wake_by(Lane& l);
  Region* mirror_of(int peer, Lane& l);
  int to_peer(int peer, Lane& l);
  bool post_recv(Lane& l, int i);
  void hear(int peer, int lane, Lane& l);
  bool drain(int peer, Lane& l);
  void take(int peer, Lane& l, const Entry& entry);
  void broken(Lane& l);
  bool check(int error, const char* what) {
    if (error) about_.say("libfabric: %s: %s", what, access_.lib->strerror(error));
    errno = error;
    return !error;
  }
  template <typename Thing>
  void shut(Thing*& thing) {
    if (thing) thing->id.ops->close(&thing->id);
    thing = nullptr;
  }
  void drop(int peer, Lane*& l, bool close_fd);
  template <typename Fn>
  void for_each(Fn fn) {
    for (int peer = 0; peer < memory_.ranks; ++peer) {
      for (Lane*& l : lanes_[peer]) {
        if (l) fn(peer, l);
      }
    }
  }

  NetSettings settings_;
  Sink sink_{};
  NetMemory memory_{};
  int epoll_fd_ = -1;
  uint64_t tag_ = 0;
  Access access_;
  Region* own_ = nullptr;
  Region* mirrors_[kNetRanks] = {};
  Lane* lanes_[kNetRanks][kMaxLanes] = {};
  bool is_stuck_ = false;  // a write was refused since the last `advance`
  Text about_, why_;
};

bool Libfabric::make(int peer, Lane& l, Card* card) {
  const Access& a = access_;
  l.begun_ns = now_ns();
  for (int i = 0; i < kDepth; ++i) l.sends[i].next = i + 1;
  QueueAttr queue{};
  queue.size = 2 * (kDepth + kCredits);
  queue.format = kWithData;
  queue.wait = kWaitFd;
  int error = -a.domain->ops->cq_open(a.domain, &queue, &l.queue, nullptr);
  if (error) {  // it has no descriptor to wait for: read by the clock
    queue.wait = kWaitNone;
    error = -a.domain->ops->cq_open(a.domain, &queue, &l.queue, nullptr);
  }
  if (!check(error, "no completion queue")) return false;
  Endpoint*& e = l.endpoint;
  if (!check(-a.domain->ops->endpoint(a.domain, a.info, &e, nullptr), "no endpoint")) return false;
  if (!check(-e->id.ops->bind(&e->id, &a.peers->id, 0), "the address vector is refused")) return false;
  if (!check(-e->id.ops->bind(&e->id, &l.queue->id, kTransmit | kRecv), "the queue is refused")) return false;
  if (!check(-e->id.ops->control(&e->id, kEnable, nullptr), "the endpoint is not enabled")) return false;
  Region* mirror = mirror_of(peer, l);
  if (!mirror) return false;
  if (a.has(kMrLocal) && !(l.inbox = access_.reg(l.credits, sizeof l.credits, kRecv, &about_))) return false;
  size_t bytes = kNameBytes;
  if (!check(-e->names->getname(&e->id, card->name, &bytes), "the endpoint's address is not known")) return false;
  for (int i = 0; i < (a.takes_recvs() ? kRecvs : kCredits); ++i) {
    if (!post_recv(l, i)) return about_.say("libfabric: a receive cannot be posted"), false;
  }
  uint8_t* at = memory_.landing + uint64_t(peer) * memory_.stride;
  card->magic = kMagic;
  card->depth = kDepth;
  card->key = mirror->key;
  card->base = a.has(kMrVirtual) ? reinterpret_cast<uint64_t>(at) : 0;
  card->bytes = memory_.stride;
  card->name_bytes = uint32_t(bytes);
  snprintf(card->provider, sizeof card->provider, "%s", a.info->fabric->provider);
  return queue.wait == kWaitNone || wake_by(l);
}

// The queue's descriptor wakes the proxy, once each time that `rest` says so: it may stay readable.
bool Libfabric::wake_by(Lane& l) {
  if (!check(-l.queue->id.ops->control(&l.queue->id, kGetWait, &l.wait_fd), "no descriptor to wait for")) return false;
  epoll_event event{EPOLLONESHOT, {}};
  event.data.u64 = tag_;
  return epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, l.wait_fd, &event) == 0;
}

Region* Libfabric::mirror_of(int peer, Lane& l) {
  const bool apart = access_.has(kMrEndpoint);
  Region*& made = apart ? l.mirror : mirrors_[peer];
  if (made) return made;
  made = access_.reg(memory_.landing + uint64_t(peer) * memory_.stride, memory_.stride, kRemoteWrite, &about_);
  if (!made || !apart) return made;
  int error = -made->id.ops->bind(&made->id, &l.endpoint->id, 0);
  if (!error) error = -made->id.ops->control(&made->id, kEnable, nullptr);
  return check(error, "the mirror is not enabled") ? made : nullptr;
}

bool Libfabric::post_recv(Lane& l, int i) {
  void* descriptor = l.inbox ? l.inbox->descriptor : nullptr;
  return l.endpoint->messages->recv(l.endpoint, &l.credits[i], 8, descriptor, kUnspecified, &l.recvs[i]) == 0;
}

void Libfabric::hear(int peer, int lane, Lane& l) {
  int error = 0;
  for (;;) {
    const Heard heard = l.exchange.hear();
    if (heard == Heard::nothing) return;
    if (heard == Heard::ready) l.is_up = true;
    if (heard == Heard::card) error = to_peer(peer, l);
    if (heard == Heard::end) error = l.exchange.error;
    if (heard == Heard::end || error) break;
  }
  while (drain(peer, l)) {  // what the peer had sent comes before its end
  }
  if (l.error) return;  // told in `advance`
  drop(peer, lanes_[peer][lane], true);
  sink_.ended(sink_.owner, peer, error, error ? why_.at : nullptr);
}

// Inserts the address of the peer's card. 0 or an errno.
int Libfabric::to_peer(int, Lane& l) {
  memcpy(&l.peer, l.exchange.words, sizeof(Card));
  Card& p = l.peer;
  p.provider[sizeof p.provider - 1] = 0;
  why_.say("libfabric: the peer's card is none of this version");
  if (p.magic != kMagic || p.name_bytes > kNameBytes || p.depth == 0) return EPROTO;
  why_.say("libfabric: the peer uses %s, this rank %s; name one in network.provider", p.provider,
           access_.info->fabric->provider);
  if (strcmp(p.provider, access_.info->fabric->provider) != 0) return EPROTO;
  const int inserted = access_.peers->ops->insert(access_.peers, p.name, 1, &l.address, 0, nullptr);
  why_.say("libfabric: the peer's address cannot be inserted");
  if (inserted != 1) return EADDRNOTAVAIL;
  l.granted = p.depth;
  why_.say("libfabric: the peer closed while it was being connected");
  if (!l.exchange.say_ready()) return ECONNRESET;
  why_ = {};
  return 0;
}

bool Libfabric::write(int peer, int lane, const Write& w) {
  Lane* l = lanes_[peer][lane];
  if (!l || l->error) {
    sink_.sent(sink_.owner, peer);
    return true;
  }
  if (!l->is_up || l->free_slot == kDepth || l->written == l->granted) return false;
  Slot& slot = l->sends[l->free_slot];
  const int next = slot.next;
  ssize_t error = EPROTO;
  if (w.to + w.bytes <= l->peer.bytes) {
    error = -l->endpoint->rma->writedata(l->endpoint, w.from, w.bytes, own_->descriptor, w.imm, l->address,
                                         l->peer.base + w.to, l->peer.key, slot.context);
  }
  if (error == EAGAIN) {
    is_stuck_ = true;
    return false;
  }
  if (error) {
    why_.say("libfabric: a write of %u bytes cannot be posted: %s", w.bytes, access_.lib->strerror(int(error)));
    l->error = int(error);
    sink_.sent(sink_.owner, peer);
    return true;
  }
  l->free_slot = next;
  ++l->out;
  ++l->written;
  return true;
}

// True: there was something.
bool Libfabric::drain(int peer, Lane& l) {
  Entry batch[kBatch];
  bool any = false;
  for (int turn = 0; turn < kTurns && !l.error; ++turn) {
    const ssize_t n = l.queue->ops->read(l.queue, batch, kBatch);
    if (n == -EAGAIN || n == 0) break;
    any = true;
    if (n == -kErrorAvailable) {
      broken(l);
      break;
    }
    if (n < 0) {
      why_.say("libfabric: the completion queue fails: %s", access_.lib->strerror(int(-n)));
      l.error = int(-n);
      break;
    }
    for (ssize_t i = 0; i < n; ++i) take(peer, l, batch[i]);
  }
  // Says how many immediates have been taken, when it is half of what the peer may send.
  if (l.is_up && !l.error && l.consumed - l.told >= kDepth / 2) {
    const ssize_t error = -l.endpoint->messages->inject(l.endpoint, &l.consumed, sizeof l.consumed, l.address);
    if (error == 0) l.told = l.consumed;
    if (error == EAGAIN) is_stuck_ = true;
    if (error && error != EAGAIN) {
      why_.say("libfabric: a credit cannot be sent: %s", access_.lib->strerror(int(error)));
      l.error = int(error);
    }
  }
  return any;
}

void Libfabric::take(int peer, Lane& l, const Entry& entry) {
  auto* slot = static_cast<Slot*>(entry.context);
  l.is_proven = true;
  const bool is_recv = slot >= l.recvs && slot < l.recvs + kRecvs;
  if (entry.flags & kRemoteData) {
    ++l.consumed;
    sink_.arrived(sink_.owner, peer, uint32_t(entry.data));
  } else if (is_recv) {
    l.granted = std::max(l.granted, l.credits[slot - l.recvs] + l.peer.depth);
  } else if (slot >= l.sends && slot < l.sends + kDepth) {
    slot->next = l.free_slot;
    l.free_slot = int(slot - l.sends);
    --l.out;
    sink_.sent(sink_.owner, peer);
  }
  if (is_recv && !post_recv(l, int(slot - l.recvs))) {
    why_.say("libfabric: a receive cannot be posted");
    l.error = EIO;
  }
}

void Libfabric::broken(Lane& l) {
  ErrorEntry entry{};
  char words[128] = "";
  const ssize_t n = l.queue->ops->readerr(l.queue, &entry, 0);
  const char* more = "";
  if (n >= 0) more = l.queue->ops->strerror(l.queue, entry.provider_error, entry.error_data, words, sizeof words);
  why_.say("libfabric: %s: %s (%s)", access_.info->fabric->provider,
           access_.lib->strerror(n < 0 ? int(-n) : entry.error), more ? more : "");
  l.error = n < 0 || entry.error <= 0 || entry.error >= 134 ? EIO : entry.error;  // the rest are libfabric's own
}

int64_t Libfabric::advance(int64_t now) {
  int64_t tick = is_stuck_ ? kStuckNs : -1;
  is_stuck_ = false;
  for_each([&](int peer, Lane*& l) {
    drain(peer, *l);
    if (!l) return;
    if (l->error) {
      const int error = l->error;
      drop(peer, l, true);
      sink_.ended(sink_.owner, peer, error, why_.at);
      return;
    }
    const bool young = !l->is_proven && now - l->begun_ns < kYoungNs;
    int64_t mine = access_.is_manual() ? kTickNs : -1;
    if (!l->is_proven) mine = young ? kYoungTickNs : kQuietTickNs;
    if (l->wait_fd < 0) mine = kStuckNs;
    if (mine >= 0 && (tick < 0 || mine < tick)) tick = mine;
  });
  return tick < 0 ? -1 : now + tick;
}

bool Libfabric::rest() {
  bool ready = true;
  for_each([&](int, Lane*& l) {
    if (l->wait_fd < 0) return;
    Id* id = &l->queue->id;
    ready &= access_.fabric->ops->trywait(access_.fabric, &id, 1) == 0;
    epoll_event event{EPOLLIN | EPOLLONESHOT, {}};
    event.data.u64 = tag_;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, l->wait_fd, &event);
  });
  return ready;
}

void Libfabric::drop(int peer, Lane*& l, bool close_fd) {
  Lane* gone = l;
  l = nullptr;
  if (!gone) return;
  gone->exchange.end(epoll_fd_, close_fd);
  if (gone->wait_fd >= 0) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, gone->wait_fd, nullptr);
  shut(gone->endpoint);
  shut(gone->queue);
  shut(gone->mirror);
  shut(gone->inbox);
  if (gone->address != kUnspecified) access_.peers->ops->remove(access_.peers, &gone->address, 1, 0);
  for (; gone->out > 0; --gone->out) sink_.sent(sink_.owner, peer);
  free(gone);
}

}  // namespace fi

Provider* make_libfabric(const NetSettings& settings) {
  void* memory = malloc(sizeof(fi::Libfabric));
  return memory ? new (memory) fi::Libfabric(settings) : nullptr;
}

}  // namespace cd
