// The parts of a member that every operation shares: event counts, liveness, the ring of samples.
//
// How a waiter is woken without a lost wake-up. A rank waits on its own event count only. A writer of something that it
// may wait for notifies: count += 1, then wakes if `waiters` > 0. The waiter: reads the count, looks at what it waits
// for, announces itself in `waiters`, sleeps if the count still has the value read. Both sides put a sequentially
// consistent operation between their write and their read, so either the writer sees the waiter or the waiter sees the
// new count.
#include "member.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace cd {

Member::Member(int own_rank, int num_ranks, int64_t deadline_ns, int64_t num_bytes)
    : rank(own_rank), ranks(num_ranks), timeout_ns(deadline_ns), region_bytes(num_bytes) {
  std::fill_n(pidfd, kMaxRanks, -1);
}

Member::~Member() {
  for (int r = 0; r < ranks; ++r) {
    if (!mapped[r]) continue;
    munmap(event[r], kPage);
    munmap(const_cast<uint8_t*>(mapped[r]), region_bytes);
    close(pidfd[r]);
  }
}

void Member::attach_own(uint8_t* own_region, uint64_t nonce) {
  region = own_region;
  event[rank] = reinterpret_cast<EventPage*>(region);
  own_meeting = reinterpret_cast<Meeting*>(region + kPage);
  own_meeting->nonce = nonce;
  own_meeting->total_bytes = region_bytes;
  own_meeting->rank = rank;
  own_meeting->magic = kMagic;
  meeting[rank] = own_meeting;
  attached(rank);
}

int Member::attach_peer(int r, int region_fd, int process_fd, uint64_t nonce) {
  // All of it to read; its first page, where a waiter is woken, to write.
  void* all = mmap(nullptr, region_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, region_fd, 0);
  if (all == MAP_FAILED) return errno;
  void* events = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, region_fd, 0);
  if (events == MAP_FAILED) {
    const int error = errno;
    munmap(all, region_bytes);
    return error;
  }
  event[r] = static_cast<EventPage*>(events);
  mapped[r] = static_cast<const uint8_t*>(all);
  meeting[r] = reinterpret_cast<const Meeting*>(mapped[r] + kPage);
  pidfd[r] = process_fd;
  attached(r);
  // Is it the region that the ticket means, of the same geometry?
  const Meeting& theirs = *meeting[r];
  const bool ours = theirs.magic == kMagic && theirs.nonce == nonce && theirs.rank == r &&
                    theirs.total_bytes == uint64_t(region_bytes);
  return ours ? 0 : -1;
}

void Member::notify(int r) {
  if (!event[r]) return;
  event[r]->count.fetch_add(1, std::memory_order_seq_cst);
  if (event[r]->waiters.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &event[r]->count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

void Member::notify_peers() {
  for (const int r : Bits(peers() & here)) notify(r);
}

void Member::publish(Word& word, uint64_t seq) {
  word.v.store(seq, std::memory_order_release);
  notify_peers();
}

void Member::wait_for_event(uint32_t seen_events, int64_t limit_ns) {
  EventPage& mine = *event[rank];
  mine.waiters.fetch_add(1, std::memory_order_seq_cst);
  if (mine.count.load(std::memory_order_seq_cst) == seen_events) {
    const timespec limit{time_t(limit_ns / 1'000'000'000), long(limit_ns % 1'000'000'000)};
    syscall(SYS_futex, &mine.count, FUTEX_WAIT, seen_events, &limit, nullptr, 0);
  }
  mine.waiters.fetch_sub(1, std::memory_order_seq_cst);
}

bool Member::spins(int64_t waited_ns, int64_t limit_ns) {
  if (waited_ns >= limit_ns) return false;
  if (waited_ns < kSpinNs) {
    relax();
    return true;
  }
  const int64_t before = now_ns();
  if (before < yields_from_ns.load(std::memory_order_relaxed)) return false;
  yield();
  const int64_t after = now_ns();
  if (after - before > kStallNs) yields_from_ns.store(after + kNoYieldNs, std::memory_order_relaxed);
  return true;
}

uint64_t Member::gone_peers(uint64_t among, Want want) const {
  pollfd polls[kMaxRanks];
  int ranks[kMaxRanks], n = 0;
  uint64_t gone = among & ~here ? gone_remotes(among & ~here, want) : 0;
  for (const int r : Bits(among & here)) {
    if (pidfd[r] < 0) continue;
    polls[n] = {pidfd[r], POLLIN, 0};
    ranks[n++] = r;
  }
  if (n == 0 || poll(polls, n, 0) <= 0) return gone;
  for (int i = 0; i < n; ++i) {
    if (polls[i].revents & POLLIN) gone |= 1ull << ranks[i];
  }
  return gone;
}

int Member::departed(uint64_t among, uint64_t tag) const {
  for (const int r : Bits(among & ~here)) {
    if (left_out[r].load(std::memory_order_acquire) > tag) return r;
  }
  return -1;
}

Status Member::confirm(Op op) {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (const int r : Bits(peers())) {
    const uint64_t theirs = is_here(r) ? meeting[r]->membership.v.load(std::memory_order_relaxed)
                                       : left_out[r].load(std::memory_order_acquire);
    if (is_here(r) ? theirs == membership : theirs <= membership) continue;
    fail({op, Phase::membership, membership}, r, theirs, Why::silent, now_ns());
    return kDiffers;
  }
  return kOk;
}

Status Member::look_for_signals(int64_t now) {
  if (now - signals_ns.load(std::memory_order_relaxed) < kSignalNs) return kOk;
  signals_ns.store(now, std::memory_order_relaxed);
  return signal_raised() ? kInterrupted : kOk;
}

// Errno with which the connection with a rank of another host ended; 0: it was closed.
static int64_t end_of(const Meeting& mirror) {
  const uint64_t ended = mirror.gone.v.load(std::memory_order_acquire);
  return ended ? int64_t(ended - 1) : 0;
}

Status Member::fail(Want want, int peer_rank, uint64_t seen, Why why, int64_t started) {
  const int64_t error = why == Why::disconnected ? end_of(*meeting[peer_rank]) : 0;
  fault = {peer_rank, why, want.op, want.phase, int64_t(want.seq), int64_t(seen), now_ns() - started, error};
  return kTimeout;
}

Status Member::refuse(Op op, Wrong what, int peer, int64_t value, int64_t most) {
  fault = {peer, Why::silent, op, Phase::contents, most, value, 0, int64_t(what)};
  refuse_connection(peer);
  return kDiffers;
}

void SampleRing::push(const Sample& sample) {
  pthread_mutex_lock(&mutex_);
  memcpy(&ring_[int64_t(head_++ % kSize)], &sample, sample.used_bytes());
  if (head_ - tail_ > uint64_t(kSize)) tail_ = head_ - kSize;
  pthread_mutex_unlock(&mutex_);
}

int64_t SampleRing::drain(uint8_t* out, int64_t most) {
  int64_t n = 0, before = -1;
  while (n < most && n != before) {
    before = n;
    pthread_mutex_lock(&mutex_);
    for (const int64_t end = std::min(most, n + 64); tail_ < head_ && n < end; ++n) {
      const Sample& oldest = ring_[int64_t(tail_++ % kSize)];
      memcpy(out, &oldest, oldest.used_bytes());
      out += oldest.used_bytes();
    }
    pthread_mutex_unlock(&mutex_);
  }
  return n;
}

}  // namespace cd
