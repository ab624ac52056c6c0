// The parts of Comm that every operation shares: clock, bells, liveness, the ring of samples.
//
// How a sleeper is woken without a lost wake-up. A rank sleeps on its own bell only. Whoever changes something that it
// may wait for rings: bell += 1, then wakes if `sleepers` > 0. The sleeper: reads the bell, looks at what it waits for,
// announces itself in `sleepers`, sleeps if the bell still has the value read. Both sides put a sequentially consistent
// operation between their write and their read, so either the ringer sees the sleeper or the sleeper sees the new bell.
#include "comm.hpp"
#include "remote.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace cd {

Comm::Comm(const Geometry& geometry) : g(geometry), map(geometry), ops(row_ops()) {
  std::fill_n(pidfd, kMaxRanks, -1);
}

bool Comm::allocate(const int32_t* first_copies, const int32_t* copy_places) {
  const int64_t copies = first_copies[g.experts];
  if (!all_first.allocate(g.experts + 1) || !all_places.allocate(copies) || !first.allocate(g.experts + 1) ||
      !places.allocate(copies) || !wide.allocate(g.hidden) || !group_rows.allocate(g.local_experts) ||
      !samples.allocate()) {
    return false;
  }
  std::copy_n(first_copies, g.experts + 1, all_first.data());
  std::copy_n(copy_places, copies, all_places.data());
  return true;
}

Comm::~Comm() {
  for (int r = 0; r < g.ranks; ++r) {
    if (r == g.rank || !bell[r]) continue;
    munmap(bell[r], kPage);
    munmap(const_cast<uint8_t*>(peer[r].base), map.total);
    if (landing_of[r]) munmap(const_cast<uint8_t*>(landing_of[r]), map.mirror * g.ranks);
    close(pidfd[r]);
  }
}

void Comm::attach_own(uint8_t* region) {
  own = {region, &map};
  peer[g.rank] = {region, &map};
  bell[g.rank] = own.at<BellPage>(0);
}

int Comm::attach_peer(int rank, int region_fd, int process_fd, uint64_t nonce) {
  void* all = mmap(nullptr, map.total, PROT_READ, MAP_SHARED | MAP_NORESERVE, region_fd, 0);
  if (all == MAP_FAILED) return errno;
  void* bells = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, region_fd, 0);
  if (bells == MAP_FAILED) {
    const int error = errno;
    munmap(all, map.total);
    return error;
  }
  bell[rank] = static_cast<BellPage*>(bells);
  peer[rank] = {static_cast<const uint8_t*>(all), &map};
  pidfd[rank] = process_fd;
  const Control& theirs = peer[rank].control();
  const bool ours = theirs.magic == kMagic && theirs.nonce == nonce && theirs.rank == rank &&
                    theirs.total_bytes == uint64_t(map.total);
  return ours ? 0 : -1;
}

int Comm::attach_network(uint8_t* own_landing) {
  landing = own_landing;
  return landings.allocate(int64_t(2) * g.ranks * g.in_flight) && goes_to.allocate(g.max_tokens) ? 0 : ENOMEM;
}

void Comm::set_hosts(const int32_t* lowest) {
  std::copy_n(lowest, g.ranks, host);
  here = 0;
  for (int r = 0; r < g.ranks; ++r) here |= uint64_t(host[r] == host[g.rank]) << r;
}

int Comm::attach_landing(int rank, int landing_fd) {
  void* all = mmap(nullptr, map.mirror * g.ranks, PROT_READ, MAP_SHARED | MAP_NORESERVE, landing_fd, 0);
  if (all == MAP_FAILED) return errno;
  landing_of[rank] = static_cast<const uint8_t*>(all);
  return 0;
}

void Comm::activate(uint64_t mask) {
  active = mask;
  int32_t kept = 0;
  for (int e = 0; e < g.experts; ++e) {
    first[e] = kept;
    for (int32_t i = all_first[e]; i < all_first[e + 1]; ++i) {
      if (is_active(all_places[i] / g.stride)) places[kept++] = all_places[i];
    }
  }
  first[g.experts] = kept;
  if (outbox) set_rails(*this);
}

void Comm::ring(int r) {
  if (!bell[r]) return;
  bell[r]->bell.fetch_add(1, std::memory_order_seq_cst);
  if (bell[r]->sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &bell[r]->bell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

void Comm::ring_peers() {
  for (uint64_t left = peers() & here; left; left &= left - 1) ring(__builtin_ctzll(left));
}

void Comm::publish(Word& word, uint64_t seq) {
  word.v.store(seq, std::memory_order_release);
  ring_peers();
}

void Comm::sleep_on_bell(uint32_t seen_bell, int64_t limit_ns) {
  BellPage& mine = *bell[g.rank];
  mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (mine.bell.load(std::memory_order_seq_cst) == seen_bell) {
    const timespec limit{time_t(limit_ns / 1'000'000'000), long(limit_ns % 1'000'000'000)};
    syscall(SYS_futex, &mine.bell, FUTEX_WAIT, seen_bell, &limit, nullptr, 0);
  }
  mine.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

uint64_t Comm::gone_peers(uint64_t among, Want want) const {
  pollfd polls[kMaxRanks];
  int ranks[kMaxRanks], n = 0;
  uint64_t gone = among & ~here ? gone_remotes(*this, among & ~here, want) : 0;
  for (uint64_t left = among & here; left; left &= left - 1) {
    const int r = __builtin_ctzll(left);
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

int Comm::leaver(uint64_t among, uint64_t tag) const {
  for (uint64_t left = among & ~here; left; left &= left - 1) {
    const int r = __builtin_ctzll(left);
    if (left_out[r].load(std::memory_order_acquire) > tag) return r;
  }
  return -1;
}

Status Comm::confirm(Op op) {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (uint64_t left = peers(); left; left &= left - 1) {
    const int r = __builtin_ctzll(left);
    const uint64_t theirs = is_here(r) ? peer[r].control().membership.v.load(std::memory_order_relaxed)
                                       : left_out[r].load(std::memory_order_acquire);
    if (is_here(r) ? theirs == membership : theirs <= membership) continue;
    fail({op, Phase::membership, membership}, r, theirs, Why::silent, now_ns());
    return kDiffers;
  }
  return kOk;
}

Status Comm::fail(Want want, int peer_rank, uint64_t seen, Why why, int64_t started) {
  const int64_t error = why == Why::disconnected ? end_of(*this, peer_rank) : 0;
  fault = {peer_rank, why, want.op, want.phase, int64_t(want.seq), int64_t(seen), now_ns() - started, error};
  return kTimeout;
}

void SampleRing::push(const Sample& sample) {
  pthread_mutex_lock(&mutex_);
  ring_[int64_t(head_++ % kSize)] = sample;
  if (head_ - tail_ > uint64_t(kSize)) tail_ = head_ - kSize;
  pthread_mutex_unlock(&mutex_);
}

int64_t SampleRing::drain(Sample* out, int64_t most) {
  int64_t n = 0;
  pthread_mutex_lock(&mutex_);
  while (tail_ < head_ && n < most) out[n++] = ring_[int64_t(tail_++ % kSize)];
  pthread_mutex_unlock(&mutex_);
  return n;
}

}  // namespace cd
