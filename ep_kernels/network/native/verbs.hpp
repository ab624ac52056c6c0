// The `verbs` provider: InfiniBand and RoCE. A lane is a queue pair of a reliable connection; a write is one RDMA write
// with immediate.
//
// A lane begins on its TCP connection: each end sends a card (queue pair, GID, key and address of the mirror), connects
// its queue pair by the other's card, says that it is ready, and writes when the other is. Its end is the end of the
// TCP connection, an error of the queue pair or of the device. A new connection is a new queue pair.
//
// Flow control: an immediate takes a posted receive of the peer, and a peer that has none posted refuses it. So a lane
// has at most `depth` writes out whose receives the peer has not said to have posted anew. It says so by a send with
// immediate after each half of them, for which four more receives are posted: it cannot be more than two ahead.
#pragma once
#include <algorithm>
#include <cstdlib>

#include "exchange.hpp"
#include "ring.hpp"
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

struct Lane {
  Exchange<Card> exchange;
  uint32_t generation = 0;
  Pair* pair = nullptr;
  Card peer{};
  uint32_t psn = 0;
  bool is_up = false;
  int error = 0;            // the lane has failed; told in `advance`
  uint32_t out = 0;         // writes posted, not completed
  uint32_t credits_out = 0;
  uint32_t written = 0, granted = 0;  // writes so far; how many of them the peer has receives for
  uint32_t consumed = 0, told = 0;    // the other direction
};

class Verbs final : public Provider {
 public:
  explicit Verbs(const NetSettings& settings) : settings_(settings) {}

  bool open(const Sink& sink, const NetMemory& memory, int epoll_fd, uint64_t tag) override {
    sink_ = sink;
    memory_ = memory;
    epoll_fd_ = epoll_fd;
    tag_ = tag;
    if (begin()) return true;
    end();
    return false;
  }

  bool connect(int peer, int lane, int fd, uint64_t tag) override;
  bool write(int peer, int lane, const Write& w) override;
  bool poll(int peer, int lane, uint32_t events) override;
  int64_t advance(int64_t now) override;
  bool rest() override;
  void disconnect(int peer) override {
    for (Lane*& l : lanes_[peer]) drop(peer, l, true);
  }
  int release(int peer, int* fds) override;
  void close() override {
    for (int peer = 0; peer < kNetRanks; ++peer) disconnect(peer);
    end();
    free(this);
  }
  void forsake() override;
  uint64_t most_bytes() const override { return std::min<uint64_t>(port_.attr.max_message_bytes, 1 << 30); }
  const char* about() const override { return about_.at; }

 private:
  bool begin();
  void end();
  bool make_pair(int peer, int lane, Lane& l);
  void hear(int peer, int lane, Lane& l);
  int to_peer(int lane, Lane& l);
  bool post_recv(int peer, int lane, Lane& l);
  void complete(const Completion& c);
  void arrive(int peer, int lane, Lane& l, const Completion& c);
  void grant(int peer, int lane, Lane& l);
  int drain();
  void hear_device();
  void fail(Lane& l, int error, const char* what);
  void drop(int peer, Lane*& l, bool close_fd);
  uint64_t id(int peer, int lane, const Lane& l, Kind kind) const {
    return uint64_t(l.generation) << 32 | uint64_t(peer) << 16 | uint64_t(lane) << 8 | uint64_t(kind);
  }

  NetSettings settings_;
  Sink sink_{};
  NetMemory memory_{};
  int epoll_fd_ = -1;
  uint64_t tag_ = 0;
  Port port_;
  Channel* channel_ = nullptr;
  Queue* queue_ = nullptr;
  Region* own_ = nullptr;
  Region* mirrors_[kNetRanks] = {};
  Lane* lanes_[kNetRanks][kMaxLanes] = {};
  uint64_t failed_ = 0;  // bit per peer with a lane that is to be told of
  int depth_ = 0, events_ = 0;
  uint32_t generations_ = 0;
  bool is_dead_ = false;  // the device is gone
  Text about_, why_, event_;
};

}  // namespace cd::ib
