// The `verbs` provider: InfiniBand and RoCE. A lane is a queue pair of a reliable connection; a write is one RDMA write
// with immediate. A credit is a send with immediate, for which four more receives are posted: the peer cannot be more
// than two ahead.
#pragma once
#include "lanes.hpp"
#include "verbs_device.hpp"

namespace cd::ib {

constexpr int kDepth = 128, kLeast = 8, kCredits = 4;
constexpr uint32_t kInlineBytes = 64;  // an exchange; larger ones the device reads itself
constexpr int kBatch = 32, kTurns = 16;
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

}  // namespace cd::ib
