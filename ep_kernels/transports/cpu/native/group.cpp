// Barrier, exchange, sleep, and the agreement after a loss.
//
// Exchange: two slots by parity are enough, without credit. A rank writes slot e % 2 again in exchange e + 2; it gets
// there only after every peer has entered e + 1, and a peer enters e + 1 only after it has read all of exchange e.
//
// A rank that will enter an exchange soon may say so: peers that sleep then enter it at once, so that it finds their
// words there. One that enters calls all others in any case, so nobody waits for good if the caller does not come.
//
// Agreement: first, what this rank has sent to those of other hosts is out of its region: no late write can meet a new
// one. Survivors of a lost rank have stopped anywhere. Each publishes its four counters under the new epoch and takes
// the maximum over all survivors; numbers below it are dead, so no stale word can look like a new one. By then every
// survivor has entered, so nobody reads slots of the old membership any more and all of them are free. Two entries by
// parity suffice for the same reason as in exchange. Then each says so in `membership`, and waits for that of all
// others: nobody sends a new number before everybody can complete its low bits (remote.hpp). A connection that one side
// has lost and the other has not is made anew while they wait (resync's caller does); then each says again what it
// said.
//
// A rank that was left out may live and go on reading; `membership` of every survivor, changed before any of them
// writes a slot again, shows it (Member::confirm): also where the slot is one of another host, which a survivor's proxy
// writes while the left-out rank reads it beside that survivor. A barrier reads nothing and does not ask: a rank that
// leaves in good order meets the others in one, and they may go on before it has returned. What comes over the own
// connections of a rank that was left out is for it.
#include "group.hpp"

#include <poll.h>

#include <algorithm>

namespace cd {

Status barrier(Member& m) {
  const uint64_t seq = m.take(Op::barrier);
  m.publish(m.own_meeting->barrier, seq);
  const int64_t started = now_ns();
  Status status = m.send_remote(RemoteWord::barrier, 0, {Op::barrier, Phase::credit, seq, started});
  if (status != kOk) return status;
  status = m.wait({Op::barrier, Phase::arrival, seq, started}, [&](int r) {
    return m.meeting[r]->barrier.v.load(std::memory_order_acquire);
  });
  // Who has met the others may end its process: then its word has left it.
  return status == kOk ? m.flush(m.active, {Op::barrier, Phase::credit, seq, started}) : status;
}

Status exchange(Member& m, const int64_t* words, int64_t* all) {
  const int64_t started = now_ns();
  const uint64_t seq = m.take(Op::exchange);
  // Own words, for peers here and on other hosts.
  ExchangeSlot& mine = m.own_meeting->exchange[seq % 2];
  std::copy_n(words, kExchangeWords, mine.words);
  mine.seq.store(seq, std::memory_order_release);
  m.publish(m.own_meeting->exchange_latest, seq);
  Status status = m.send_remote(RemoteWord::exchange, int(seq % 2), {Op::exchange, Phase::credit, seq, started});
  if (status != kOk) return status;
  // Wait for all, and note how long for whom.
  Sample sample{int32_t(Op::exchange), 0, 0, m.ranks, seq, started, now_ns() - started, 0, {}};
  status = m.wait({Op::exchange, Phase::arrival, seq}, [&](int r) {
    const uint64_t theirs = m.meeting[r]->exchange[seq % 2].seq.load(std::memory_order_acquire);
    if (theirs >= seq) sample.peer_wait_ns[r] = now_ns() - started - sample.send_ns;  // once: it is waited for no more
    return theirs;
  });
  if (status != kOk) return status;
  sample.total_ns = now_ns() - started;
  m.samples.push(sample);
  // Everybody's words; zeros of inactive ranks.
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
  for (const int r : Bits(m.peers())) {
    const Meeting& theirs = *m.meeting[r];
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
    if (const Status status = m.look_for_signals(now_ns()); status != kOk) return status;
    m.wait_for_event(events_before, std::min(remaining, kSignalNs));
  }
}

Status look_for_peer(Member& m, int64_t timeout_ns, int fd) {
  const int64_t until = now_ns() + timeout_ns;
  pollfd polled{fd, POLLIN, 0};
  for (;;) {
    if (const Status status = called(m); status != kNothing) return status;
    const int64_t now = now_ns();
    if (poll(&polled, 1, 0) > 0 || now >= until) return kNothing;
    if (const Status status = m.look_for_signals(now); status != kOk) return status;
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
  m.agreed = false;
  m.has_joined();  // what follows goes over connections that stand
  m.notify_peers();
  return m.send_remote(RemoteWord::resync, int(m.resyncs % 2), {Op::set_active, Phase::credit, tag, m.entered_ns});
}

// All have entered: counters go on from the largest of each, and slots of the old membership are free.
template <typename Entry>
static Status agree(Member& m, Want want, Entry entry) {
  // The largest number that any rank has come to, for each kind of operation.
  for (const int r : Bits(m.peers())) {
    const Resync* theirs = entry(r);
    if (!theirs) {  // it has entered later ones since, without this rank
      const uint64_t now = m.meeting[r]->membership.v.load(std::memory_order_acquire);
      m.fail({Op::set_active, Phase::membership, m.membership}, r, now, Why::silent, m.entered_ns);
      return kDiffers;
    }
    for (int i = 0; i < 4; ++i) m.set_upcoming(Op(i), std::max(m.next[i], theirs->counters[i]));
  }
  // Slots are free, whatever was in them; peers may know.
  for (int i = 0; i < 4; ++i) m.base[i] = m.next[i] - 1;
  m.forget();
  m.agreed = true;
  m.membership = want.seq;
  m.publish(m.own_meeting->membership, want.seq);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before any later write to what peers may read
  return m.send_remote(RemoteWord::membership, int(m.resyncs % 2), want);
}

// One of the two meetings of a resync: until seen(peer) == want.seq for all.
template <typename Seen>
static Status meet(Member& m, Want want, Seen seen) {
  Status sent = kOk;
  const auto send_again = [&] {  // what went over the connection before a new one may be lost
    if (!m.has_joined()) return false;
    sent = m.send_remote(RemoteWord::resync, int(m.resyncs % 2), want);
    if (sent == kOk && m.agreed) sent = m.send_remote(RemoteWord::membership, int(m.resyncs % 2), want);
    return false;
  };
  const Status status = m.wait(want, seen, send_again);
  if (status == kOk) send_again();
  return sent == kOk ? status : sent;
}

Status resync(Member& m, uint64_t mask, uint64_t epoch, int64_t limit_ns) {
  const uint64_t tag = epoch + 1;
  Status status = kOk;
  // Enter, once, though a wait may end early and be taken up again.
  if (m.entered != tag || m.active != mask) status = enter(m, mask, tag);
  const auto entry = [&](int r) -> const Resync* {
    for (const Resync& e : m.meeting[r]->resync) {
      if (e.epoch_tag.load(std::memory_order_acquire) == tag) return &e;
    }
    return nullptr;
  };
  const Want want{Op::set_active, Phase::arrival, tag, m.entered_ns, limit_ns ? now_ns() + limit_ns : 0};
  // First meeting: all have entered with their numbers.
  if (status == kOk && !m.agreed) {
    status = meet(m, want, [&](int r) { return entry(r) ? tag : uint64_t(0); });
    if (status == kOk) status = agree(m, want, entry);
  }
  // Second meeting: all have agreed.
  if (status == kOk) {
    status = meet(m, want, [&](int r) { return m.meeting[r]->membership.v.load(std::memory_order_acquire); });
    if (status == kOk) status = m.confirm(Op::set_active);  // one that is further has left this rank out
  }
  if (status != kNothing) m.entered = 0;
  return status;
}

}  // namespace cd
