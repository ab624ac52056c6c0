// One rank's end of the group: its region, its peers', the clocks and the one wait loop.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "clock.hpp"
#include "region.hpp"
#include "ring.hpp"
#include "rows.hpp"

namespace cd {

enum Status : int32_t { kOk = 0, kTimeout = 1, kAborted = 2, kDiffers = 3, kNothing = 4 };
enum class Op : int32_t { dispatch = 0, combine = 1, barrier = 2, exchange = 3, set_active = 4 };
enum class Phase : int32_t { credit = 0, payload = 1, arrival = 2, outputs = 3, routing = 4, membership = 5 };

enum class Why : int32_t { silent = 0, gone = 1, given_up = 2, disconnected = 3 };

// Why a wait ended badly. Mirrored by native.py.
struct Fault {
  int32_t peer;
  Why why;
  Op op;
  Phase phase;
  int64_t expected, seen, waited_ns;
  int64_t error;  // disconnected: errno of the connection, 0 = closed
};

// One operation as this rank saw it. Mirrored by telemetry.py.
struct Sample {
  int32_t op, mode, tokens, ranks;
  uint64_t seq;
  int64_t start_ns, send_ns, total_ns;
  int64_t peer_wait_ns[kMaxRanks];
};

struct Clock {
  int64_t start_ns, send_ns;
};

// What a wait is for.
struct Want {
  Op op;
  Phase phase;
  uint64_t seq;
  int64_t since_ns = 0;  // from when the deadline counts; 0: from the first look
};

// A zeroed array of plain values. The library needs nothing of the C++ runtime: so any C++ compiler's output loads
// anywhere.
template <typename T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free(data_); }
  bool allocate(int64_t n) {
    data_ = static_cast<T*>(calloc(n > 0 ? n : 1, sizeof(T)));
    return data_ != nullptr;
  }
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
};

class SampleRing {
 public:
  static constexpr int64_t kSize = 4096;
  bool allocate() { return ring_.allocate(kSize); }
  void push(const Sample& sample);
  int64_t drain(Sample* out, int64_t most);  // oldest first

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Array<Sample> ring_;
  uint64_t head_ = 0, tail_ = 0;
};

// Messages of a dispatch, a combine or a word, since the communicator was made. Mirrored by native.py.
struct Sent {
  uint64_t messages, bytes;
};
enum class Kind : int32_t { rows = 0, records = 1, words = 2 };

// How far the parts of one slot of one rank of another host have come.
struct Landing {
  uint32_t seq;  // low bits of its number
  bool begun, head;
  Parts parts;
};

struct Comm {
  Geometry g;
  RegionMap map;
  const RowOps& ops;
  RegionView<uint8_t> own;
  RegionView<const uint8_t> peer[kMaxRanks];
  BellPage* bell[kMaxRanks] = {};
  int pidfd[kMaxRanks];
  uint64_t active = 0;  // bit per rank, own included

  // Ranks of other hosts (remote.hpp). Without a network, `here` is all ranks and nothing of this is used.
  uint64_t here = ~0ull;                        // bit per rank of this host, active or not
  int32_t host[kMaxRanks] = {};                 // lowest rank of each rank's host
  Outbox* outbox = nullptr;
  uint8_t* landing = nullptr;                   // mirrors that this rank's proxy writes, one for each rank
  const uint8_t* landing_of[kMaxRanks] = {};    // those of the other ranks of this host
  int rails[kMaxRanks];                         // the ranks, one on each other host, that get what this rank sends
  int num_rails = 0;
  Array<Landing> landings;                      // [2][R][F], of dispatch and combine; the proxy's
  Array<uint64_t> goes_to;                      // [M], other hosts that a token of this rank goes to: bit of the lowest
  Sent traffic[3] = {};                         // by Kind
  std::atomic<uint64_t> down{0};                // bit per rank whose connection with this one has ended
  std::atomic<int64_t> down_ns[kMaxRanks] = {};
  std::atomic<uint64_t> left_out[kMaxRanks] = {};  // tag under which that rank goes on without this one; 0: it does not

  Array<int32_t> all_first, all_places;  // every copy of every expert: place = rank * stride + slot
  Array<int32_t> first, places;          // those on active ranks

  uint64_t next[4] = {1, 1, 1, 1};  // next sequence number of dispatch, combine, barrier, exchange
  uint64_t base[4] = {0, 0, 0, 0};  // numbers up to here belong to an older membership: no credit is owed for them
  uint64_t outputs_busy[kMaxSlots] = {};  // combine that peers may still be reading from an expert output buffer
  uint64_t resyncs = 0;
  uint64_t membership = 0;  // as in Control

  std::atomic<uint32_t> stop{0};   // abort(): every wait ends
  std::atomic<uint32_t> wakes{0};  // wake() calls not yet seen by wait_for_peer
  std::atomic<uint64_t> lost{0};   // give_up(): bit per rank with which nothing is waited for any more
  Fault fault{};
  SampleRing samples;
  Array<float> wide;           // [H], one row in fp32
  Array<int64_t> group_rows;   // [L], rows of each local expert, then its next row

  explicit Comm(const Geometry& geometry);
  // first [E+1], places [first[E]]. False when memory is short.
  bool allocate(const int32_t* first_copies, const int32_t* copy_places);
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  ~Comm();  // unmaps the peers' regions and closes their process descriptors; the own region belongs to Python
  void attach_own(uint8_t* region);
  // Maps a peer's region, read-only but for the bell page. Owns `process_fd` from now on. 0, an errno, or -1 when the
  // header is not what the ticket promised.
  int attach_peer(int rank, int region_fd, int process_fd, uint64_t nonce);
  // A network: mirrors [R] of this rank's own, then which ranks share memory, then the mirrors of each of those. 0 or
  // an errno.
  int attach_network(uint8_t* own_landing);
  void set_hosts(const int32_t* lowest);
  int attach_landing(int rank, int landing_fd);
  void activate(uint64_t mask);  // filters the expert copies, chooses the rails

  bool is_active(int r) const { return active >> r & 1; }
  bool is_here(int r) const { return here >> r & 1; }
  uint64_t peers() const { return active & ~(1ull << g.rank); }
  int slot_of(uint64_t seq) const { return int(seq % uint64_t(g.in_flight)); }
  void publish(Word& word, uint64_t seq);  // release, then ring every active peer of this host
  void ring(int r);  // of this host
  // The next number of an operation: the proxy reads it to complete the low bits that travel.
  uint64_t upcoming(Op op) const { return __atomic_load_n(&next[int(op)], __ATOMIC_RELAXED); }
  void set_upcoming(Op op, uint64_t seq) { __atomic_store_n(&next[int(op)], seq, __ATOMIC_RELAXED); }
  uint64_t take(Op op) {
    const uint64_t seq = next[int(op)];
    set_upcoming(op, seq + 1);
    return seq;
  }
  void ring_peers();
  void sleep_on_bell(uint32_t seen_bell, int64_t limit_ns);
  uint64_t gone_peers(uint64_t among, Want want) const;
  // A peer among these that has left this rank out, later than under `tag`; or -1.
  int leaver(uint64_t among, uint64_t tag) const;

  // The one wait loop: until seen(peer) >= want.seq for each active peer. Meanwhile work(): false if there is none now.
  template <typename Seen, typename Work>
  Status wait(Want want, Seen seen, Work work);
  template <typename Seen>
  Status wait(Want want, Seen seen) {
    return wait(want, seen, [] { return false; });
  }
  // kDiffers unless seen(peer) == want.seq for each active peer.
  template <typename Seen>
  Status agree(Want want, Seen seen);
  // After the last read of what peers gave: kDiffers if one of them has gone on without this rank. What was read may
  // then belong to others: survivors use their slots again without this rank's consent.
  Status confirm(Op op);

  Status fail(Want want, int peer, uint64_t seen, Why why, int64_t started);
};

// Spins this long before it sleeps: about what a wake-up costs.
constexpr int64_t kSpinNs = 3000;
// Sleeps at most this long between looks at the peers' processes.
constexpr int64_t kSliceNs = 4'000'000;

template <typename Seen, typename Work>
Status Comm::wait(Want want, Seen seen, Work work) {
  uint64_t missing = peers();
  int64_t started = want.since_ns, began = 0, looked = 0;
  for (;;) {
    const uint32_t bell_before = bell[g.rank]->bell.load(std::memory_order_acquire);
    int silent = -1;
    for (uint64_t left = missing; left; left &= left - 1) {
      const int r = __builtin_ctzll(left);
      if (seen(r) >= want.seq) {
        missing &= ~(1ull << r);
      } else if (silent < 0) {
        silent = r;
      }
    }
    if (silent < 0) return kOk;
    if (stop.load(std::memory_order_acquire)) return kAborted;
    const int64_t now = now_ns();
    if (began == 0) began = looked = now;
    if (started == 0) started = now;
    // An operation that a lost rank takes part in will never end well, whoever else is waited for just now.
    if (const uint64_t out = lost.load(std::memory_order_acquire) & peers()) {
      const int r = __builtin_ctzll(out);
      return fail(want, r, seen(r), Why::given_up, started);
    }
    if (now - started < g.timeout_ns && work()) continue;
    if (now - began < kSpinNs) {
      relax();
      continue;
    }
    if (now - started >= g.timeout_ns) return fail(want, silent, seen(silent), Why::silent, started);
    if (now - looked >= kSliceNs) {
      looked = now;
      if (const int r = leaver(missing, want.op == Op::set_active ? want.seq : membership); r >= 0) {
        const uint64_t theirs = left_out[r].load(std::memory_order_relaxed);
        fail({want.op, Phase::membership, membership}, r, theirs, Why::silent, started);
        return kDiffers;
      }
      for (uint64_t gone = gone_peers(missing, want); gone; gone &= gone - 1) {
        const int r = __builtin_ctzll(gone);
        // Whatever it published before it died counts.
        if (seen(r) < want.seq) return fail(want, r, seen(r), is_here(r) ? Why::gone : Why::disconnected, started);
      }
    }
    sleep_on_bell(bell_before, kSliceNs);
  }
}

template <typename Seen>
Status Comm::agree(Want want, Seen seen) {
  for (uint64_t left = peers(); left; left &= left - 1) {
    const int r = __builtin_ctzll(left);
    if (const uint64_t value = seen(r); value != want.seq) {
      fail(want, r, value, Why::silent, now_ns());
      return kDiffers;
    }
  }
  return kOk;
}

}  // namespace cd
