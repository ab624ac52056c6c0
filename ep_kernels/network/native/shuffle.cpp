// The `shuffle` provider, for tests: wraps another provider, delays and reorders its writes by a seeded generator, as a
// network with several paths does, and can drop lanes. Code that is right over it is right for any order of arrival.
//
// A network delays bytes that a NIC has read long before, so `write` copies them: what is written to their place
// meanwhile does not change what arrives. The copies for a peer lie in its arena, which is filled from the start again
// once all that lay there has been sent. The wrapped provider sends from arenas, so it registers those. Of a GPU's
// memory, which the processor must not touch, nothing is copied.
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "provider.hpp"
#include "ring.hpp"

namespace cd {
namespace {

constexpr int kHeld = 64;  // maximum delayed writes of one peer
constexpr uint64_t kArena = 8 << 20, kMostBytes = 4 << 20;

struct Held {
  Write write;
  int lane;
  int64_t due_ns;
};

class Shuffle final : public Provider {
 public:
  Shuffle(Provider* inner, uint64_t seed, int64_t drop_after) : inner_(inner), state_(seed * 2 + 1) {
    until_drop_ = drop_after ? 1 + int64_t(random() % uint64_t(2 * drop_after)) : -1;
  }

  bool open(const Sink& sink, const NetMemory& memory, int epoll_fd, uint64_t tag) override {
    sink_ = sink;
    NetMemory inner = memory;
    if (!memory.dma_bufs) {
      size_ = uint64_t(memory.ranks) * kArena;
      void* arenas = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (arenas == MAP_FAILED) return false;
      arenas_ = static_cast<uint8_t*>(arenas);
      inner.own = arenas_;
      inner.own_bytes = size_;
      inner.box = kArena;
    }
    return inner_->open({this, &Shuffle::sent, &Shuffle::arrived, &Shuffle::ended}, inner, epoll_fd, tag);
  }
  bool connect(int peer, int lane, int fd, uint64_t tag) override {
    fds_[peer][lane] = fd;
    return inner_->connect(peer, lane, fd, tag);
  }
  bool poll(int peer, int lane, uint32_t events) override { return inner_->poll(peer, lane, events); }

  bool write(int peer, int lane, const Write& w) override {
    if (counts_[peer] == kHeld) return false;
    Write copy = w;
    if (w.bytes && arenas_ && !(copy.from = copied(peer, w))) return false;
    ++outstanding_[peer];
    // One of 16 is delayed by more than its successors take, so that they overtake it.
    const int64_t delay_ns = random() % 16 ? int64_t(random() % 100'000) : int64_t(random() % 3'000'000);
    held_[peer][counts_[peer]++] = {copy, lane, now_ + delay_ns};
    return true;
  }

  int64_t advance(int64_t now) override {
    now_ = now;
    int64_t next = -1;
    for (int peer = 0; peer < kNetRanks; ++peer) {
      int& n = counts_[peer];
      // Pass on what is due; the earliest of the others says when to come back.
      for (int i = n - 1; i >= 0; --i) {
        Held& h = held_[peer][i];
        if (h.due_ns <= now && pass(peer, h)) {
          h = held_[peer][--n];
          continue;
        }
        const int64_t again = h.due_ns > now ? h.due_ns : now + 100'000;
        if (next < 0 || again < next) next = again;
      }
    }
    const int64_t inner = inner_->advance(now);
    return next < 0 ? inner : inner < 0 ? next : next < inner ? next : inner;
  }

  void disconnect(int peer) override {
    give_up(peer);
    inner_->disconnect(peer);
  }
  int release(int peer, int* fds) override {
    give_up(peer);
    return inner_->release(peer, fds);
  }
  int64_t part(int64_t now) override { return inner_->part(now); }
  bool retire() override { return inner_->retire(); }
  void close() override {
    inner_->close();
    end();
  }
  void close_in_child() override {
    inner_->close_in_child();
    end();
  }
  bool rest() override { return inner_->rest(); }
  uint64_t most_bytes() const override { return std::min(inner_->most_bytes(), kMostBytes); }
  const char* about() const override { return inner_->about(); }

 private:
  static void sent(void* self, int peer) {
    auto& mine = *static_cast<Shuffle*>(self);
    if (--mine.outstanding_[peer] == 0) mine.used_[peer] = 0;
    mine.sink_.sent(mine.sink_.owner, peer);
  }
  static void arrived(void* self, int peer, uint32_t imm) {
    const Sink& sink = static_cast<Shuffle*>(self)->sink_;
    sink.arrived(sink.owner, peer, imm);
  }
  static void ended(void* self, int peer, int error, const char* why) {
    const Sink& sink = static_cast<Shuffle*>(self)->sink_;
    sink.ended(sink.owner, peer, error, why);
  }

  // Null: the peer's arena is full.
  const uint8_t* copied(int peer, const Write& w) {
    if (used_[peer] + w.bytes > kArena) return nullptr;
    uint8_t* at = arenas_ + uint64_t(peer) * kArena + used_[peer];
    used_[peer] += w.bytes;
    memcpy(at, w.from, w.bytes);
    return at;
  }
  void end() {
    if (arenas_) munmap(arenas_, size_);
    free(this);
  }
  bool pass(int peer, const Held& h) {
    if (!inner_->write(peer, h.lane, h.write)) return false;
    if (until_drop_ > 0 && --until_drop_ == 0) shutdown(fds_[peer][h.lane], SHUT_RDWR);
    return true;
  }
  void give_up(int peer) {
    for (; counts_[peer] > 0; --counts_[peer]) sent(this, peer);
  }
  uint64_t random() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return state_ >> 33;
  }

  Provider* inner_;
  Sink sink_{};
  uint64_t state_;
  int64_t now_ = 0, until_drop_;
  uint8_t* arenas_ = nullptr;
  uint64_t size_ = 0, used_[kNetRanks] = {};
  int counts_[kNetRanks] = {}, outstanding_[kNetRanks] = {};
  Held held_[kNetRanks][kHeld];
  int fds_[kNetRanks][kMaxLanes] = {};
};

}  // namespace

Provider* make_shuffle(Provider* inner, uint64_t seed, int64_t drop_after) {
  void* memory = malloc(sizeof(Shuffle));
  return memory ? new (memory) Shuffle(inner, seed, drop_after) : nullptr;
}

}  // namespace cd
