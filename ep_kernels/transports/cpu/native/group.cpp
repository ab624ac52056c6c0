// Barrier, exchange, sleep, and the agreement after a loss.
//
// Exchange: two slots by parity are enough, without credit. A rank writes slot e % 2 again in exchange e + 2; it gets
// there only after every peer has entered e + 1, and a peer enters e + 1 only after it has read all of exchange e.
//
// A rank that will enter an exchange soon may say so: peers that sleep then enter it at once, so that it finds their
// words there. One that enters calls all others in any case, so nobody waits for good if the caller does not come.
//
// Agreement: first, what this rank has sent to those of other hosts is out of its region: no late write can meet a new
// one. Survivors of a lost rank have stopped anywhere. Each publishes its four counters under the new epoch and
// takes the maximum over all survivors; numbers below it are dead, so no stale word can look like a new one. When a
// rank passes, every survivor has entered, so nobody reads slots of the old membership any more and all of them are
// free. Two entries by parity suffice for the same reason as in exchange. A connection that one side has lost and the
// other has not is made anew while they wait (resync's caller does); then each sends its numbers again.
//
// A rank that was left out may live and go on reading; `membership`, changed before any slot is written again, shows it
// (Member::confirm). A barrier reads nothing and does not ask: a rank that leaves in good order meets the others in
// one, and they may go on before it has returned. Ranks of other hosts cannot read later: what their connection brings
// is theirs (remote.hpp).
#include "group.hpp"

#include <poll.h>

#include <algorithm>

namespace cd {

Status barrier(Member& m) {
  const uint64_t seq = m.take(Op::barrier);
  m.publish(m.own_meeting->barrier, seq);
  m.send_remote(RemoteWord::barrier, 0, seq);
  const Status status = m.wait({Op::barrier, Phase::arrival, seq}, [&](int r) {
    return m.meeting[r]->barrier.v.load(std::memory_order_acquire);
  });
  // Who has met the others may end its process: then its word has left it.
  return status == kOk ? m.flush(m.active, {Op::barrier, Phase::credit, seq}) : status;
}

Status exchange(Member& m, const int64_t* words, int64_t* all) {
  const int64_t started = now_ns();
  const uint64_t seq = m.take(Op::exchange);
  ExchangeSlot& mine = m.own_meeting->exchange[seq % 2];
  std::copy_n(words, kExchangeWords, mine.words);
  mine.seq.store(seq, std::memory_order_release);
  m.publish(m.own_meeting->exchange_latest, seq);
  m.send_remote(RemoteWord::exchange, int(seq % 2), seq);
  Sample sample{int32_t(Op::exchange), 0, 0, m.ranks, seq, started, now_ns() - started, 0, {}};
  const Status status = m.wait({Op::exchange, Phase::arrival, seq}, [&](int r) {
    const uint64_t theirs = m.meeting[r]->exchange[seq % 2].seq.load(std::memory_order_acquire);
    if (theirs >= seq) sample.peer_wait_ns[r] = now_ns() - started - sample.send_ns;  // once: it is waited for no more
    return theirs;
  });
  if (status != kOk) return status;
  sample.total_ns = now_ns() - started;
  m.samples.push(sample);
  for (int r = 0; r < m.ranks; ++r) {
    int64_t* row = all + r * kExchangeWords;
    if (m.is_active(r)) {
      std::copy_n(m.meeting[r]->exchange[seq % 2].words, kExchangeWords, row);
    } else {
      std::fill_n(row, kExchangeWords, 0);
    }
  }
  return m.confirm(Op::exchange);
}

void call_exchange(Member& m) { m.publish(m.own_meeting->exchange_called, m.upcoming(Op::exchange)); }

// kNothing unless this rank was woken, or a peer is in the next exchange, or has called it.
static Status called(Member& m) {
  if (m.stop.load(std::memory_order_acquire)) return kAborted;
  if (m.wakes.load(std::memory_order_relaxed) && m.wakes.exchange(0) > 0) return kOk;
  if (m.departed(m.peers(), m.membership) >= 0) return kOk;  // the exchange that follows says so
  const uint64_t next = m.next[int(Op::exchange)];
  for (uint64_t left = m.peers(); left; left &= left - 1) {
    const Meeting& theirs = *m.meeting[__builtin_ctzll(left)];
    if (theirs.exchange_latest.v.load(std::memory_order_acquire) >= next) return kOk;
    if (theirs.exchange_called.v.load(std::memory_order_acquire) >= next) return kOk;
  }
  return kNothing;
}

Status wait_for_peer(Member& m, int64_t timeout_ns) {
  const int64_t started = now_ns();
  for (;;) {
    const uint32_t events_before = m.event[m.rank]->count.load(std::memory_order_acquire);
    if (const Status status = called(m); status != kNothing) return status;
    const int64_t remaining = started + timeout_ns - now_ns();
    if (remaining <= 0) return kNothing;
    m.wait_for_event(events_before, remaining);
  }
}

Status look_for_peer(Member& m, int64_t timeout_ns, int fd) {
  const int64_t until = now_ns() + timeout_ns;
  pollfd polled{fd, POLLIN, 0};
  for (;;) {
    if (const Status status = called(m); status != kNothing) return status;
    if (poll(&polled, 1, 0) > 0 || now_ns() >= until) return kNothing;
    yield();
  }
}

// Publishes what this rank knows, and its mask.
static Status enter(Member& m, uint64_t mask, uint64_t tag) {
  if (const Status status = m.flush(mask, {Op::set_active, Phase::credit, tag}); status != kOk) return status;
  m.activate(mask);
  Resync& mine = m.own_meeting->resync[++m.resyncs % 2];
  std::copy_n(m.next, 4, mine.counters);
  mine.tag = tag;
  mine.epoch_tag.store(tag, std::memory_order_release);
  m.entered = tag;
  m.entered_ns = now_ns();
  m.has_joined();  // what follows goes over connections that stand
  m.notify_peers();
  m.send_remote(RemoteWord::resync, int(m.resyncs % 2), tag);
  return kOk;
}

Status resync(Member& m, uint64_t mask, uint64_t epoch, int64_t limit_ns) {
  const uint64_t tag = epoch + 1;
  if (m.entered != tag || m.active != mask) {
    if (const Status status = enter(m, mask, tag); status != kOk) return status;
  }
  const auto entry = [&](int r) -> const Resync* {
    for (const Resync& e : m.meeting[r]->resync) {
      if (e.epoch_tag.load(std::memory_order_acquire) == tag) return &e;
    }
    return nullptr;
  };
  const auto send_again = [&] {  // what went over the connection before a new one may be lost
    if (m.has_joined()) m.send_remote(RemoteWord::resync, int(m.resyncs % 2), tag);
    return false;
  };
  const Want want{Op::set_active, Phase::arrival, tag, m.entered_ns, limit_ns ? now_ns() + limit_ns : 0};
  const Status status = m.wait(want, [&](int r) { return entry(r) ? tag : uint64_t(0); }, send_again);
  if (status == kNothing) return status;
  m.entered = 0;
  if (status != kOk) return status;
  send_again();
  for (uint64_t left = m.peers(); left; left &= left - 1) {
    const Resync* theirs = entry(__builtin_ctzll(left));
    for (int i = 0; i < 4; ++i) m.set_upcoming(Op(i), std::max(m.next[i], theirs->counters[i]));
  }
  for (int i = 0; i < 4; ++i) m.base[i] = m.next[i] - 1;
  m.forget();
  m.membership = tag;
  m.own_meeting->membership.v.store(tag, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before any later write to what peers may read
  return kOk;
}

}  // namespace cd
