// One rank's end of a group, whatever the group moves: its region's and its peers' meeting words, the processes behind
// them, and the one wait loop. comm.hpp adds dispatch and combine, collectives.hpp the collectives.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "bits.hpp"
#include "clock.hpp"
#include "meeting.hpp"

namespace cd {

enum Status : int32_t { kOk = 0, kTimeout = 1, kAborted = 2, kDiffers = 3, kNothing = 4, kInterrupted = 5 };
enum class Op : int32_t {
  dispatch = 0,
  combine = 1,
  barrier = 2,
  exchange = 3,
  set_active = 4,
  all_gather = 5,
  reduce_scatter = 6,
  all_reduce = 7,
};
enum class Phase : int32_t {
  credit = 0,
  payload = 1,
  arrival = 2,
  outputs = 3,
  routing = 4,
  membership = 5,
  arguments = 6,
  sums = 7,
  release = 8,
  contents = 9,
};

// unsent: not the peer's fault, or not seen to be: what this rank has for it does not leave.
enum class Why : int32_t { silent = 0, gone = 1, given_up = 2, disconnected = 3, unsent = 4 };
// What of a peer's contents cannot be.
enum class Wrong : int64_t { tokens = 0, place = 1 };

// Why a wait ended badly. Mirrored by native.py.
struct Fault {
  int32_t peer;
  Why why;
  Op op;
  Phase phase;
  int64_t expected, seen, waited_ns;
  int64_t error;  // disconnected: errno of the connection, 0 = closed; arguments: which of them; contents: Wrong
};

// One operation as this rank saw it. Mirrored by telemetry.py.
struct Sample {
  int32_t op, mode, tokens, ranks;
  uint64_t seq;
  int64_t start_ns, send_ns, total_ns;
  int64_t peer_wait_ns[kMaxRanks];  // valid: the first `ranks`

  int64_t used_bytes() const { return int64_t(offsetof(Sample, peer_wait_ns)) + ranks * int64_t(sizeof(int64_t)); }
};

struct Clock {
  int64_t start_ns, send_ns, receive_ns;  // when it began, how long the send half took, when the receive half began
};

// What a wait is for.
struct Want {
  Op op;
  Phase phase;
  uint64_t seq;
  int64_t since_ns = 0;  // from when the deadline counts; 0: from the first look
  // From when on the wait ends with kNothing; it does so, too, where a connection has ended that may be made again. 0:
  // never.
  int64_t until_ns = 0;
};

// A wait that may go on over several calls.
struct Waiting {
  uint64_t missing;  // bit per peer that has not arrived
  int64_t started, looked;  // 0: it has not begun
  int64_t began = 0;        // the first look, or the last work: it spins from then on
};

// Python runs handlers of signals between two of its instructions, on its main thread, so not while that one waits
// here. This runs those that are due, on the main thread; elsewhere, and without Python, nothing. True: one has raised
// an exception, which is kept for `cd_raise_kept` (signals.cpp).
bool signal_raised();

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
  // Moves up to `most` records to `out`, oldest first, of each its used bytes. A push waits for 64 of them at most.
  int64_t drain(uint8_t* out, int64_t most);

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Array<Sample> ring_;
  uint64_t head_ = 0, tail_ = 0;
};

// Spins this long before it sleeps: about what a wake-up costs. More where there is a processor for each rank.
constexpr int64_t kSpinNs = 3000;
// A yield that took longer went to a thread that computes; no other until so much later.
constexpr int64_t kStallNs = 500'000, kNoYieldNs = 20'000'000;
// Sleeps at most this long between looks at the peers' processes.
constexpr int64_t kSliceNs = 4'000'000;
// Between two questions of a waiting main thread whether a signal handler of Python's is to run.
constexpr int64_t kSignalNs = 100'000'000;
// A nap while the own proxy is waited for, which rings no bell.
constexpr int64_t kNapNs = 20'000;

// Words of a meeting that also travel to other hosts.
enum class RemoteWord { barrier, exchange, resync, membership };

struct Member {
  const int rank, ranks;
  const int64_t timeout_ns;
  const int64_t region_bytes;  // equal on all ranks

  uint8_t* region = nullptr;  // the own one, which belongs to Python
  Meeting* own_meeting = nullptr;
  const Meeting* meeting[kMaxRanks] = {};  // of all ranks; of another host's: in its mirror
  EventPage* event[kMaxRanks] = {};
  const uint8_t* mapped[kMaxRanks] = {};  // peers' regions on this host, read-only but for the event page
  int pidfd[kMaxRanks];
  uint64_t active = 0;   // bit per rank, own included
  uint64_t here = ~0ull;  // bit per rank of this host, active or not
  std::atomic<uint64_t> left_out[kMaxRanks] = {};  // tag under which that rank of another host goes on without this one

  uint64_t next[4] = {1, 1, 1, 1};  // next sequence number of dispatch (or a collective), combine, barrier, exchange
  uint64_t base[4] = {0, 0, 0, 0};  // numbers up to here belong to an older membership: no credit is owed for them
  uint64_t resyncs = 0;
  uint64_t entered = 0;    // tag of the set_active that has begun and not ended
  bool agreed = false;     // in it: on the counters
  int64_t entered_ns = 0;
  uint64_t membership = 0;  // as in Meeting

  std::atomic<uint32_t> stop{0};   // abort(): every wait ends
  std::atomic<uint32_t> wakes{0};  // wake() calls not yet seen by wait_for_peer
  std::atomic<uint64_t> lost{0};   // give_up(): bit per rank with which nothing is waited for any more
  std::atomic<int64_t> signals_ns{0};  // when a wait asked last for signals
  Fault fault{};
  SampleRing samples;
  int64_t step_spin_ns = kSpinNs, meet_spin_ns = kSpinNs;  // of dispatch and combine; where a peer may be asleep
  std::atomic<int64_t> yields_from_ns{0};

  Member(int own_rank, int num_ranks, int64_t deadline_ns, int64_t num_bytes);
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  ~Member();  // unmaps the peers' regions and closes their process descriptors
  virtual void destroy() {}  // each kind: ends and frees what `make` has made

  void attach_own(uint8_t* own_region, uint64_t nonce);  // fresh: its head is written
  // Maps a peer's region. Owns `process_fd` from now on. 0, an errno, or -1 when the head is not what the ticket
  // promised.
  int attach_peer(int r, int region_fd, int process_fd, uint64_t nonce);

  // What a kind of member adds. Other hosts are reached by Comm alone; these are what others do: nothing.
  virtual void attached(int) {}  // the region of that rank of this host can be read
  virtual void activate(uint64_t mask) { active = mask; }
  virtual void forget() {}  // a new membership: credit of the old one is void
  virtual Status send_remote(RemoteWord, int, Want) { return kOk; }
  virtual Status flush(uint64_t, Want) { return kOk; }
  virtual bool has_joined() { return false; }  // a connection was made since this was asked last
  virtual uint64_t gone_remotes(uint64_t, Want) const { return 0; }
  virtual uint64_t carriers_of(uint64_t) const { return 0; }  // ranks of this host through which those are read
  // Does a part of what this rank owes others of an operation that it has begun. kNothing: there is none now; else
  // what ends the wait.
  virtual Status progress() { return kNothing; }

  bool is_active(int r) const { return active >> r & 1; }
  bool is_here(int r) const { return here >> r & 1; }
  uint64_t peers() const { return active & ~(1ull << rank); }
  void publish(Word& word, uint64_t seq);  // release, then notify every active peer of this host
  void notify(int r);  // of this host
  void notify_peers();
  void wait_for_event(uint32_t seen_events, int64_t limit_ns);
  // A moment of a wait that has lasted `waited_ns`; false: it is to sleep. After kSpinNs other threads run in between;
  // where one of them has kept the processor, waits sleep at once for a while: who sleeps is let in sooner.
  bool spins(int64_t waited_ns, int64_t limit_ns);
  // The next number of an operation: the proxy reads it to complete the low bits that travel.
  uint64_t upcoming(Op op) const { return __atomic_load_n(&next[int(op)], __ATOMIC_RELAXED); }
  void set_upcoming(Op op, uint64_t seq) { __atomic_store_n(&next[int(op)], seq, __ATOMIC_RELAXED); }
  uint64_t take(Op op) {
    const uint64_t seq = next[int(op)];
    set_upcoming(op, seq + 1);
    return seq;
  }
  uint64_t gone_peers(uint64_t among, Want want) const;
  // A peer among these that has left this rank out, later than under `tag`; or -1.
  int departed(uint64_t among, uint64_t tag) const;

  // The one wait loop. Until seen(peer) >= want.seq for one of the missing peers, at least: those are then taken out.
  // Where `block` is false, kNothing instead of waiting. Meanwhile work(): false if there is none now.
  template <typename Seen, typename Work>
  Status wait_any(Want want, Waiting& waiting, bool block, Seen seen, Work work);
  // The same for what this rank's own proxy does: room in its ring, or that what is for `peer` has left it. Until
  // ready(). `among`: the ranks that the operation needs.
  template <typename Ready>
  Status wait_for_proxy(Want want, uint64_t among, int peer, Ready ready);
  template <typename Seen>
  Status wait_any(Want want, Waiting& waiting, bool block, Seen seen) {
    return wait_any(want, waiting, block, seen, [] { return false; });
  }
  // Until seen(peer) >= want.seq for each active peer.
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

  // What ends every wait at once: abort(), or give_up() of a rank among these. Such an operation will never succeed,
  // whichever rank is waited for just now. kOk: neither.
  template <typename Seen>
  Status look(Want want, uint64_t among, int64_t started, Seen seen);
  Status look_for_signals(int64_t now);  // kInterrupted: a handler has raised an exception (signals.cpp)

  Status fail(Want want, int peer, uint64_t seen, Why why, int64_t started);
  // A value that a peer cannot mean: it is broken, or of another version.
  Status refuse(Op op, Wrong what, int peer, int64_t value, int64_t most);
  virtual void refuse_connection(int) {}
};

// A member in memory of its own, which `allocate` gives what else it needs. Null when memory is short.
template <typename Kind, typename Geometry, typename... Tables>
Member* make(const Geometry& geometry, Tables... tables) {
  void* memory = aligned_alloc(alignof(Kind), sizeof(Kind));
  if (!memory) return nullptr;
  auto* made = new (memory) Kind(geometry);
  if (made->allocate(tables...)) return made;
  made->destroy();
  return nullptr;
}

template <typename Seen>
Status Member::look(Want want, uint64_t among, int64_t started, Seen seen) {
  if (stop.load(std::memory_order_acquire)) return kAborted;
  if (const uint64_t out = lost.load(std::memory_order_acquire) & among) {
    const int r = __builtin_ctzll(out);
    return fail(want, r, seen(r), Why::given_up, started);
  }
  return kOk;
}

template <typename Seen, typename Work>
Status Member::wait_any(Want want, Waiting& waiting, bool block, Seen seen, Work work) {
  const uint64_t missing = waiting.missing;
  for (;;) {
    const uint32_t events_before = event[rank]->count.load(std::memory_order_acquire);
    int silent = -1;
    for (const int r : Bits(missing)) {
      if (seen(r) >= want.seq) {
        waiting.missing &= ~(1ull << r);
      } else if (silent < 0) {
        silent = r;
      }
    }
    if (silent < 0 || waiting.missing != missing) return kOk;
    const int64_t now = now_ns();
    if (waiting.started == 0) {
      waiting.started = want.since_ns != 0 ? want.since_ns : now;
      waiting.began = waiting.looked = now;
    }
    if (const Status status = look(want, peers(), waiting.started, seen); status != kOk) return status;
    if (!block) return kNothing;
    if (now - waiting.started < timeout_ns) {
      const Status owed = progress();
      if (owed != kOk && owed != kNothing) return owed;
      if (owed == kOk || work()) {
        waiting.began = now_ns();
        continue;
      }
    }
    if (spins(now - waiting.began, want.op <= Op::combine ? step_spin_ns : meet_spin_ns)) continue;
    if (now - waiting.started >= timeout_ns) {
      // Of a rank that carries what others send, and is silent itself, before those others.
      if (const uint64_t carriers = carriers_of(waiting.missing) & waiting.missing) silent = __builtin_ctzll(carriers);
      return fail(want, silent, seen(silent), Why::silent, waiting.started);
    }
    if (now - waiting.looked >= kSliceNs) {
      waiting.looked = now;
      if (const Status status = look_for_signals(now); status != kOk) return status;
      if (const int r = departed(missing, want.op == Op::set_active ? want.seq : membership); r >= 0) {
        const uint64_t theirs = left_out[r].load(std::memory_order_relaxed);
        fail({want.op, Phase::membership, membership}, r, theirs, Why::silent, waiting.started);
        return kDiffers;
      }
      for (const int r : Bits(gone_peers(missing, want))) {
        // Whatever it published before it died counts.
        const uint64_t last = seen(r);
        if (last >= want.seq) continue;
        if (want.until_ns && !is_here(r)) return kNothing;
        return fail(want, r, last, is_here(r) ? Why::gone : Why::disconnected, waiting.started);
      }
      // What comes through a rank that is dead comes no more.
      const uint64_t dead = gone_peers(carriers_of(missing) & ~missing & peers(), want);
      for (const int r : Bits(dead ? missing & ~here : 0)) {
        const uint64_t through = carriers_of(1ull << r) & dead;
        if (through && seen(r) < want.seq) {
          return fail(want, __builtin_ctzll(through), seen(r), Why::gone, waiting.started);
        }
      }
    }
    if (want.until_ns && now >= want.until_ns) return kNothing;
    wait_for_event(events_before, kSliceNs);
  }
}

template <typename Seen, typename Work>
Status Member::wait(Want want, Seen seen, Work work) {
  Waiting waiting{peers(), 0, 0};
  while (waiting.missing) {
    if (const Status status = wait_any(want, waiting, true, seen, work); status != kOk) return status;
  }
  return kOk;
}

template <typename Ready>
Status Member::wait_for_proxy(Want want, uint64_t among, int peer, Ready ready) {
  const int64_t began = now_ns(), started = want.since_ns ? want.since_ns : began;
  const auto nothing = [](int) { return uint64_t(0); };
  while (!ready()) {
    const int64_t now = now_ns();
    if (const Status status = look(want, among, started, nothing); status != kOk) return status;
    if (const Status status = look_for_signals(now); status != kOk) return status;
    if (now - started >= timeout_ns) return fail(want, peer, 0, Why::unsent, started);
    now - began < kSpinNs ? relax() : nap(kNapNs);
  }
  return kOk;
}

template <typename Seen>
Status Member::agree(Want want, Seen seen) {
  for (const int r : Bits(peers())) {
    if (const uint64_t value = seen(r); value != want.seq) {
      fail(want, r, value, Why::silent, now_ns());
      return kDiffers;
    }
  }
  return kOk;
}

}  // namespace cd
