// The outbox of one rank: a ring of descriptors that the rank pushes and the proxy thread pops.
//
// A descriptor says: write these bytes of my region to the same offset of my mirror at that rank, then hand it this
// immediate. A mirror is a copy of a rank's region that only the network writes; it lies at the receiving rank, one for
// each rank of other hosts. Since both have one byte map, an offset is enough, and the sender (a thread, later a
// kernel) needs no address of the other side.
//
// A rank on a GPU pushes from its kernels (kernels/common/push.cuh), and has an outbox for each rank in its region, of
// which the mirror there is the copy. It cannot wake the proxy, which therefore never sleeps for long.
//
// One rank pushes, one proxy pops. The last word of a descriptor carries the parity of its lap and is stored last, so
// the reader needs no index of the writer. The writer reads `popped` to know that there is room.
#pragma once
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace cd {

constexpr int kNetRanks = 64;

struct Descriptor {
  uint32_t bytes;  // 0: the immediate alone
  uint32_t imm;
  std::atomic<uint64_t> where;  // bits 0..47 offset, 48..55 rank, 63 parity of the lap

  static constexpr uint64_t kOffset = (1ull << 48) - 1;
  static constexpr uint64_t kParity = 1ull << 63;
};
static_assert(sizeof(Descriptor) == 16);

// What a descriptor says, taken out of the ring.
struct Order {
  uint64_t offset;
  uint32_t bytes, imm;
  int rank;
};

// What the proxy reports to a channel's owner, and the value that goes with it: an immediate arrived; the connections
// with a rank have ended (errno), though it neither closed them in order nor left this rank out; it left this rank out
// (tag of the epoch); they are established. Called under the proxy's lock; must neither block nor call the proxy.
enum class NetEvent : int32_t { arrived = 0, down = 1, left_out = 2, up = 3 };
using NetHandler = void (*)(void* context, int32_t rank, NetEvent event, uint64_t value);

struct Outbox {
  static constexpr uint64_t kSize = 4096;
  alignas(64) Descriptor ring[kSize];
  alignas(64) std::atomic<uint64_t> popped;
  alignas(64) std::atomic<uint32_t> asleep;  // the proxy waits for its event descriptor
  int32_t event_fd;
  std::atomic<bool> expects;  // the rank is within an operation: the proxy stays awake for longer
  // Several lanes: bytes of one place of the region always take the same lane, the one of their stripe, so that a later
  // write of them cannot be overtaken by an earlier one. No descriptor crosses a stripe.
  uint64_t stripe;
  std::atomic<uint64_t> refused;  // bit per rank that has sent what cannot be: the proxy ends the connections with it
  // A GPU pushes: `tail` is its own, and `pushed` is counted where descriptors are popped.
  std::atomic<bool> device;
  alignas(64) uint64_t tail, room_until;  // the writer's own; below `room_until` the ring has room for certain
  std::atomic<uint64_t> pushed[kNetRanks];
  // Written by the proxy: descriptors whose bytes it will not read again, sent or given up.
  alignas(64) std::atomic<uint64_t> done[kNetRanks];

  // How many of these bytes one descriptor may carry.
  uint64_t most(uint64_t offset, uint64_t bytes) const {
    const uint64_t left = stripe - offset % stripe;
    return bytes < left ? bytes : left;
  }

  // False: the ring is full, the proxy has to pop first.
  bool push(int rank, uint64_t offset, uint32_t bytes, uint32_t imm) {
    if (tail == room_until) {  // seldom, since it costs a cache line that the proxy has just written
      room_until = popped.load(std::memory_order_acquire) + kSize;
      if (tail == room_until) return false;
    }
    Descriptor& d = ring[tail % kSize];
    d.bytes = bytes;
    d.imm = imm;
    pushed[rank].store(pushed[rank].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    const uint64_t parity = (tail / kSize) % 2 == 0 ? Descriptor::kParity : 0;  // memory starts zeroed
    d.where.store(offset | uint64_t(rank) << 48 | parity, std::memory_order_release);
    ++tail;
    return true;
  }

  // The proxy's side. False: nothing is there.
  bool pop(Order* out) {
    const uint64_t at = popped.load(std::memory_order_relaxed);
    const uint64_t parity = (at / kSize) % 2 == 0 ? Descriptor::kParity : 0;
    Descriptor& d = ring[at % kSize];
    const uint64_t where = d.where.load(std::memory_order_acquire);
    if ((where & Descriptor::kParity) != parity) return false;
    *out = {where & Descriptor::kOffset, d.bytes, d.imm, int(where >> 48 & 0x7f)};
    if (device.load(std::memory_order_relaxed) && out->rank < kNetRanks) {
      pushed[out->rank].fetch_add(1, std::memory_order_relaxed);
    }
    popped.store(at + 1, std::memory_order_release);
    return true;
  }

  bool empty() const {
    const uint64_t at = popped.load(std::memory_order_acquire);
    const uint64_t parity = (at / kSize) % 2 == 0 ? Descriptor::kParity : 0;
    return (ring[at % kSize].where.load(std::memory_order_seq_cst) & Descriptor::kParity) != parity;
  }

  // Empty, as at first. Nobody pushes or pops.
  void restart() {
    for (Descriptor& d : ring) d.where.store(0, std::memory_order_relaxed);
    tail = room_until = 0;
    popped.store(0, std::memory_order_release);
  }

  // Nothing of this rank's region is still to be read on behalf of `rank`.
  bool is_quiet(int rank) const {
    if (device.load(std::memory_order_relaxed) && !empty()) return false;
    return done[rank].load(std::memory_order_acquire) == pushed[rank].load(std::memory_order_relaxed);
  }
};

// After a push: the proxy looks again if it sleeps.
inline void wake(Outbox& box) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (box.asleep.load(std::memory_order_seq_cst) == 0) return;
  const uint64_t one = 1;
  (void)!write(box.event_fd, &one, sizeof one);
}

}  // namespace cd
