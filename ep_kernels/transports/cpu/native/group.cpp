// Barrier, exchange, sleep, and the agreement after a loss.
//
// Exchange: two slots by parity are enough, without credit. A rank writes slot e % 2 again in exchange e + 2; it gets
// there only after every peer has entered e + 1, and a peer enters e + 1 only after it has read all of exchange e.
//
// Agreement: first, what this rank has sent to those of other hosts is out of its region: no late write can meet a new
// one. Survivors of a lost rank have stopped anywhere. Each publishes its four counters under the new epoch and
// takes the maximum over all survivors; numbers below it are dead, so no stale word can look like a new one. When a
// rank passes, every survivor has entered, so nobody reads slots of the old membership any more and all of them are
// free. Two entries by parity suffice for the same reason as in exchange. A rank that was left out may live and go on
// reading; `membership`, changed before any slot is written again, tells it (Comm::confirm). A barrier reads nothing
// and does not ask: a rank that leaves in good order meets the others in one, and they may go on before it has
// returned. Ranks of other hosts cannot read later: what their connection brings is theirs (remote.hpp).
#include "group.hpp"

#include <algorithm>

#include "remote.hpp"

namespace cd {

Status barrier(Comm& c) {
  const uint64_t seq = c.take(Op::barrier);
  c.publish(c.own.control().barrier, seq);
  send_word(c, Imm::barrier, 0, seq);
  const Status status = c.wait({Op::barrier, Phase::arrival, seq}, [&](int r) {
    return c.peer[r].control().barrier.v.load(std::memory_order_acquire);
  });
  // Who has met the others may end its process: then its word has left it.
  return status == kOk ? flush(c, c.active, {Op::barrier, Phase::credit, seq}) : status;
}

Status exchange(Comm& c, const int64_t* words, int64_t* all) {
  const uint64_t seq = c.take(Op::exchange);
  ExchangeSlot& mine = c.own.control().exchange[seq % 2];
  std::copy_n(words, kExchangeWords, mine.words);
  mine.seq.store(seq, std::memory_order_release);
  c.publish(c.own.control().exchange_latest, seq);
  send_exchange(c, seq);
  const Status status = c.wait({Op::exchange, Phase::arrival, seq}, [&](int r) {
    return c.peer[r].control().exchange[seq % 2].seq.load(std::memory_order_acquire);
  });
  if (status != kOk) return status;
  for (int r = 0; r < c.g.ranks; ++r) {
    int64_t* row = all + r * kExchangeWords;
    if (c.is_active(r)) {
      std::copy_n(c.peer[r].control().exchange[seq % 2].words, kExchangeWords, row);
    } else {
      std::fill_n(row, kExchangeWords, 0);
    }
  }
  return c.confirm(Op::exchange);
}

Status wait_for_peer(Comm& c, int64_t timeout_ns) {
  const int64_t started = now_ns();
  for (;;) {
    const uint32_t bell_before = c.bell[c.g.rank]->bell.load(std::memory_order_acquire);
    if (c.stop.load(std::memory_order_acquire)) return kAborted;
    if (c.wakes.exchange(0) > 0) return kOk;
    if (c.leaver(c.peers(), c.membership) >= 0) return kOk;  // the exchange that follows says so
    for (uint64_t left = c.peers(); left; left &= left - 1) {
      const auto& latest = c.peer[__builtin_ctzll(left)].control().exchange_latest.v;
      if (latest.load(std::memory_order_acquire) >= c.next[int(Op::exchange)]) return kOk;
    }
    const int64_t remaining = started + timeout_ns - now_ns();
    if (remaining <= 0) return kNothing;
    c.sleep_on_bell(bell_before, remaining);
  }
}

Status resync(Comm& c, uint64_t mask, uint64_t epoch) {
  const uint64_t tag = epoch + 1;
  if (const Status status = flush(c, mask, {Op::set_active, Phase::credit, tag}); status != kOk) return status;
  c.activate(mask);
  Resync& mine = c.own.control().resync[c.resyncs++ % 2];
  std::copy_n(c.next, 4, mine.counters);
  mine.tag = tag;
  mine.epoch_tag.store(tag, std::memory_order_release);
  c.ring_peers();
  send_resync(c, int(&mine - c.own.control().resync), tag);
  const auto entry = [&](int r) -> const Resync* {
    for (const Resync& e : c.peer[r].control().resync) {
      if (e.epoch_tag.load(std::memory_order_acquire) == tag) return &e;
    }
    return nullptr;
  };
  const Status status =
      c.wait({Op::set_active, Phase::arrival, tag}, [&](int r) { return entry(r) ? tag : uint64_t(0); });
  if (status != kOk) return status;
  for (uint64_t left = c.peers(); left; left &= left - 1) {
    const Resync* theirs = entry(__builtin_ctzll(left));
    for (int i = 0; i < 4; ++i) c.set_upcoming(Op(i), std::max(c.next[i], theirs->counters[i]));
  }
  for (int i = 0; i < 4; ++i) c.base[i] = c.next[i] - 1;
  std::fill_n(c.outputs_busy, kMaxSlots, 0);
  c.membership = tag;
  c.own.control().membership.v.store(tag, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before any later write to what peers may read
  return kOk;
}

}  // namespace cd
