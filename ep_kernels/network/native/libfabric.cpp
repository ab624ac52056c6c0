// The `libfabric` provider: EFA and CXI by their own providers, others by `ofi_rxm`. A lane is an endpoint of its own
// for reliable datagrams, with a completion queue of its own, which so tells whose immediate has come; a write is
// fi_writedata. Writes arrive in any order.
//
// A provider may take a posted receive for an immediate, and its queue is finite: so there are credits. One is a
// message of 8 bytes.
#include <sys/epoll.h>

#include "clock.hpp"
#include "fabric_device.hpp"
#include "lanes.hpp"

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

struct Lane : LaneOf<Card> {
  Endpoint* endpoint = nullptr;
  Queue* queue = nullptr;
  Region *mirror = nullptr, *inbox = nullptr;  // of this lane alone, or null
  int wait_fd = -1;
  uint64_t address = kUnspecified;
  int64_t begun_ns = 0;
  bool is_proven = false;  // something was completed
  int free_slot = 0;
  Slot sends[kDepth], recvs[kRecvs];
  uint64_t credits[kRecvs];  // where messages arrive
};

}  // namespace

class Libfabric final : public Lanes<Libfabric, Lane, Region> {
 public:
  using Lanes::Lanes;

  bool poll(int peer, int lane, uint32_t) override {
    if (peer != kNoPeer) read_control(peer, lane);  // queues are read in `advance`
    return false;
  }
  int64_t advance(int64_t now) override;
  bool rest() override;
  uint64_t most_bytes() const override {
    return std::min<uint64_t>(access_.info->endpoint->max_message_bytes, 1 << 30);
  }

 private:
  friend Lanes;

  // For Lanes. The library's own descriptors stay open in a forked child.
  const char* name() const { return "libfabric"; }
  const char* words(int error) const { return access_.lib->strerror(error); }
  bool begin() {
    const int endpoints = std::max(1, memory_.ranks * memory_.lanes);
    return access_.open(settings_, endpoints, memory_.dma_bufs != nullptr, &about_) && (memory_.box || source(0));
  }
  void end() {
    unreg_all();
    access_.close();
  }
  Region* reg(const uint8_t* address, uint64_t bytes, bool lands, int number) {
    const uint64_t access = lands ? kRemoteWrite : kWrite;
    return memory_.dma_bufs
               ? access_.reg_device(address, bytes, access, memory_.dma_bufs[number], memory_.device, &about_)
               : access_.reg(address, bytes, access, &about_);
  }
  void unreg(Region* region) { close_one(region); }
  bool is_alive() { return true; }
  bool make(int peer, int lane, Lane& l, Card* card);
  int to_peer(int peer, int lane, Lane& l);
  int post(int peer, int lane, Lane& l, const Write& w);
  int credit(int peer, int lane, Lane& l);
  void drain(int peer, int lane) {
    while (drain(peer, lane, *lanes_[peer][lane])) {
    }
  }
  void shut(Lane& l);
  // ofi_rxm reads its queue of completions once more when it has closed the connection, and posts a receive on it for
  // each that has come (libfabric 1.17 to 2.4, its issue 11828): it must be empty and stay so.
  bool lingers() const { return strstr(access_.info->fabric->provider, "verbs;") != nullptr; }
  void discard(Lane& l);

  bool wake_by(Lane& l);
  Region* landing_of(int peer, Lane& l);
  bool post_recv(Lane& l, int i);
  bool drain(int peer, int lane, Lane& l);
  void take(int peer, Lane& l, const Entry& entry);
  void broken(int peer, Lane& l);
  bool check(int error, const char* what) {
    if (error) about_.say("libfabric: %s: %s", what, access_.lib->strerror(error));
    errno = error;
    return !error;
  }
  template <typename Thing>
  void close_one(Thing*& thing) {
    if (thing) thing->id.ops->close(&thing->id);
    thing = nullptr;
  }
  template <typename Fn>
  void for_each(Fn fn) {
    for (int peer = 0; peer < memory_.ranks; ++peer) {
      for (int lane = 0; lane < kMaxLanes; ++lane) {
        if (Lane* l = lanes_[peer][lane]) fn(peer, lane, *l);
      }
    }
  }

  Access access_;
  bool is_stuck_ = false;  // a write was refused since the last `advance`
};

bool Libfabric::make(int peer, int, Lane& l, Card* card) {
  Access& a = access_;
  if (!source(peer)) return false;
  l.begun_ns = now_ns();
  // Completion queue, with a descriptor where the provider has one.
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
  // Endpoint, bound to the peers' addresses and to the queue.
  Endpoint*& e = l.endpoint;
  if (!check(-a.domain->ops->endpoint(a.domain, a.info, &e, nullptr), "no endpoint")) return false;
  if (memory_.dma_bufs && !a.for_device(e, &about_)) return errno = EOPNOTSUPP, false;
  if (!check(-e->id.ops->bind(&e->id, &a.peers->id, 0), "the address vector is refused")) return false;
  if (!check(-e->id.ops->bind(&e->id, &l.queue->id, kTransmit | kRecv), "the queue is refused")) return false;
  if (!check(-e->id.ops->control(&e->id, kEnable, nullptr), "the endpoint is not enabled")) return false;
  // Memory that the peer writes to, and receives for its immediate values.
  Region* landing = landing_of(peer, l);
  if (!landing) return false;
  if (a.has(kMrLocal) && !(l.inbox = a.reg(l.credits, sizeof l.credits, kRecv, &about_))) return false;
  size_t bytes = kNameBytes;
  if (!check(-e->names->getname(&e->id, card->name, &bytes), "the endpoint's address is not known")) return false;
  for (int i = 0; i < (a.takes_recvs() ? kRecvs : kCredits); ++i) {
    if (!post_recv(l, i)) return about_.say("libfabric: a receive cannot be posted"), false;
  }
  // The card that the peer needs to reach it.
  card->magic = kMagic;
  card->depth = kDepth;
  card->key = landing->key;
  card->base = a.has(kMrVirtual) ? reinterpret_cast<uint64_t>(memory_.mirror(peer)) : 0;
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

Region* Libfabric::landing_of(int peer, Lane& l) {
  if (!access_.has(kMrEndpoint)) return mirror(peer);
  l.mirror = reg_mirror(peer);
  if (!l.mirror) return nullptr;
  int error = -l.mirror->id.ops->bind(&l.mirror->id, &l.endpoint->id, 0);
  if (!error) error = -l.mirror->id.ops->control(&l.mirror->id, kEnable, nullptr);
  return check(error, "the mirror is not enabled") ? l.mirror : nullptr;
}

bool Libfabric::post_recv(Lane& l, int i) {
  void* descriptor = l.inbox ? l.inbox->descriptor : nullptr;
  return l.endpoint->messages->recv(l.endpoint, &l.credits[i], 8, descriptor, kUnspecified, &l.recvs[i]) == 0;
}

// Inserts the address of the peer's card. 0 or an errno.
int Libfabric::to_peer(int, int, Lane& l) {
  Card& p = l.peer;
  p.provider[sizeof p.provider - 1] = 0;
  why_.say("libfabric: the peer's card is none of this version");
  if (p.magic != kMagic || p.name_bytes > kNameBytes || p.depth == 0) return EPROTO;
  why_.say("libfabric: the peer uses %s, this rank %s; name one in network.provider", p.provider,
           access_.info->fabric->provider);
  if (strcmp(p.provider, access_.info->fabric->provider) != 0) return EPROTO;
  const int inserted = access_.peers->ops->insert(access_.peers, p.name, 1, &l.address, 0, nullptr);
  why_.say("libfabric: the peer's address cannot be inserted");
  return inserted == 1 ? 0 : EADDRNOTAVAIL;
}

int Libfabric::post(int peer, int, Lane& l, const Write& w) {
  if (l.free_slot == kDepth) return EAGAIN;
  Slot& slot = l.sends[l.free_slot];
  const int next = slot.next;
  const ssize_t error = -l.endpoint->rma->writedata(l.endpoint, w.from, w.bytes, source(peer)->descriptor, w.imm,
                                                    l.address, l.peer.base + w.to, l.peer.key, slot.context);
  is_stuck_ |= error == EAGAIN;
  if (!error) l.free_slot = next;
  return int(error);
}

int Libfabric::credit(int, int, Lane& l) {
  const uint64_t credit = l.window.consumed;
  const ssize_t error = -l.endpoint->messages->inject(l.endpoint, &credit, sizeof credit, l.address);
  is_stuck_ |= error == EAGAIN;
  return int(error);
}

// True: there was something.
bool Libfabric::drain(int peer, int lane, Lane& l) {
  Entry batch[kBatch];
  bool any = false;
  for (int turn = 0; turn < kTurns && !l.error; ++turn) {
    const ssize_t n = l.queue->ops->read(l.queue, batch, kBatch);
    if (n == -EAGAIN || n == 0) break;
    any = true;
    // A write has failed, or the queue itself.
    if (n == -kErrorAvailable) {
      broken(peer, l);
      break;
    }
    if (n < 0) {
      why_.say("libfabric: the completion queue fails: %s", access_.lib->strerror(int(-n)));
      fail(peer, l, int(-n));
      break;
    }
    for (ssize_t i = 0; i < n; ++i) take(peer, l, batch[i]);
  }
  grant(peer, lane, l, kDepth);
  return any;
}

void Libfabric::take(int peer, Lane& l, const Entry& entry) {
  auto* slot = static_cast<Slot*>(entry.context);
  l.is_proven = true;
  // Data of the peer, credit that it grants, or the end of an own write.
  const bool is_recv = slot >= l.recvs && slot < l.recvs + kRecvs;
  if (entry.flags & kRemoteData) {
    arrived(peer, l, uint32_t(entry.data));
  } else if (is_recv) {
    l.window.grant(uint32_t(l.credits[slot - l.recvs]), l.peer.depth);
  } else if (slot >= l.sends && slot < l.sends + kDepth) {
    slot->next = l.free_slot;
    l.free_slot = int(slot - l.sends);
    sent(peer, l);
  }
  // A receive is posted again at once.
  if (is_recv && !post_recv(l, int(slot - l.recvs))) {
    why_.say("libfabric: a receive cannot be posted");
    fail(peer, l, EIO);
  }
}

void Libfabric::broken(int peer, Lane& l) {
  ErrorEntry entry{};
  char words[128] = "";
  const ssize_t n = l.queue->ops->readerr(l.queue, &entry, 0);
  const char* more = "";
  if (n >= 0) more = l.queue->ops->strerror(l.queue, entry.provider_error, entry.error_data, words, sizeof words);
  why_.say("libfabric: %s: %s (%s)", access_.info->fabric->provider,
           access_.lib->strerror(n < 0 ? int(-n) : entry.error), more ? more : "");
  fail(peer, l, n < 0 || entry.error <= 0 || entry.error >= 134 ? EIO : entry.error);  // others are libfabric's own
}

int64_t Libfabric::advance(int64_t now) {
  int64_t tick = is_stuck_ ? kStuckNs : -1;
  is_stuck_ = false;
  for_each([&](int peer, int lane, Lane& l) { drain(peer, lane, l); });
  report_failures();
  for_each([&](int, int, const Lane& l) {
    const bool young = !l.is_proven && now - l.begun_ns < kYoungNs;
    int64_t mine = access_.is_manual() ? kTickNs : -1;
    if (!l.is_proven) mine = young ? kYoungTickNs : kQuietTickNs;
    if (l.wait_fd < 0) mine = kStuckNs;
    if (mine >= 0 && (tick < 0 || mine < tick)) tick = mine;
  });
  return tick < 0 ? -1 : now + tick;
}

bool Libfabric::rest() {
  bool ready = true;
  for_each([&](int, int, const Lane& l) {
    if (l.wait_fd < 0) return;
    Id* id = &l.queue->id;
    ready &= access_.fabric->ops->trywait(access_.fabric, &id, 1) == 0;
    epoll_event event{EPOLLIN | EPOLLONESHOT, {}};
    event.data.u64 = tag_;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, l.wait_fd, &event);
  });
  return ready;
}

void Libfabric::discard(Lane& l) {
  if (l.wait_fd >= 0) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, l.wait_fd, nullptr);
  l.wait_fd = -1;
  Entry batch[kBatch];
  ErrorEntry entry{};
  for (int turn = 0; turn < 2 * kTurns && l.queue; ++turn) {
    const ssize_t n = l.queue->ops->read(l.queue, batch, kBatch);
    if (n == -kErrorAvailable ? l.queue->ops->readerr(l.queue, &entry, 0) <= 0 : n <= 0) break;
  }
}

void Libfabric::shut(Lane& l) {
  close_one(l.endpoint);
  close_one(l.queue);
  close_one(l.mirror);
  close_one(l.inbox);
  if (l.address != kUnspecified) access_.peers->ops->remove(access_.peers, &l.address, 1, 0);
}

}  // namespace fi

Provider* make_libfabric(const NetSettings& settings) {
  void* memory = malloc(sizeof(fi::Libfabric));
  return memory ? new (memory) fi::Libfabric(settings) : nullptr;
}

}  // namespace cd
