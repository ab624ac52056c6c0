#include "remote.hpp"

#include <algorithm>
#include <cstddef>

#include "collector.hpp"

namespace cd {
namespace {

// What a rail had sent before its own connection with this rank ended may still be on its way through another one.
constexpr int64_t kSettleNs = 50'000'000;

int nth(uint64_t mask, int n) {
  for (; n > 0; --n) mask &= mask - 1;
  return __builtin_ctzll(mask);
}

// The rank that gets what `source` sends to a host, -1 if nobody of it is active.
int rail(const Comm& c, int source, int lowest) {
  const uint64_t there = c.ranks_of[lowest];
  if (!there) return -1;
  const int index = __builtin_popcountll(c.ranks_of[c.host[source]] & ((1ull << source) - 1));
  return nth(there, index % __builtin_popcountll(there));
}

uint32_t imm_of(Imm kind, int slot, uint64_t seq) {
  return uint32_t(kind) << 28 | uint32_t(slot) << kSeqBits | uint32_t(seq & kSeqMask);
}

// What one half of an operation sends. The first wait that fails ends it.
class Sender {
 public:
  Sender(Comm& c, Want want) : c_(c), want_(want) {}

  // Bytes of the region, or an immediate alone, in as many messages as it takes.
  void post(int to, Kind kind, uint64_t offset, int64_t bytes, uint32_t imm) {
    Sent& sent = c_.traffic[int(kind)];
    do {
      const uint64_t n = c_.outbox->most(offset, uint64_t(bytes));
      if (status_ == kOk && !c_.outbox->push(to, offset, uint32_t(n), imm)) {
        status_ = c_.wait_for_proxy(want_, c_.peers(), to, [&] {
          wake(*c_.outbox);
          return c_.outbox->push(to, offset, uint32_t(n), imm);
        });
      }
      if (status_ != kOk) return;
      ++sent.messages;
      sent.bytes += n;
      offset += n;
      bytes -= int64_t(n);
    } while (bytes > 0);
  }

  Status end() {
    if (c_.rails) wake(*c_.outbox);
    return status_;
  }

 private:
  Comm& c_;
  const Want want_;
  Status status_ = kOk;
};

// Calls fn(offset in the region, bytes) for each run of these tokens that go to the host: rows, then scales.
template <typename Fn>
void for_each_run(const Comm& c, int slot, int lowest, Span tokens, Fn fn) {
  const Geometry& g = c.g;
  const uint64_t rows = uint64_t(c.own.d(slot) + c.map.d_rows), scales = uint64_t(c.own.d(slot) + c.map.d_scales);
  const auto goes = [&](int64_t t) { return c.goes_to[t] >> lowest & 1; };
  for (int64_t t = tokens.begin; t < tokens.end;) {
    if (!goes(t)) {
      ++t;
      continue;
    }
    const int64_t first = t;
    while (t < tokens.end && goes(t)) ++t;
    fn(rows + uint64_t(first * g.row_bytes), (t - first) * g.row_bytes);
    if (g.scale_bytes) fn(scales + uint64_t(first * g.scale_bytes), (t - first) * g.scale_bytes);
  }
}

// Calls fn(offset in the region, bytes) for the partials of a chunk of each of these sources: rows, then scales.
template <typename Fn>
void for_each_partials(const Comm& c, const CombineOp& op, int slot, uint64_t sources, int chunk, Fn fn) {
  const Geometry& g = c.g;
  const uint64_t rows = uint64_t(c.own.c(slot) + c.map.c_rows), scales = uint64_t(c.own.c(slot) + c.map.c_scales);
  for (const int s : Bits(sources)) {
    const Span span = chunk_of(op.routing.source_tokens[s], c.map.c_row_bytes, chunk);
    const int32_t* table = c.own.table(slot) + int64_t(s) * g.max_tokens * g.topk;
    int64_t first = 0, n = 0;  // they follow each other
    for (int64_t t = span.begin; t < span.end; ++t) {
      for (int k = 0; k < partials_of_token(c); ++k) {
        if (const int32_t at = table[t * g.topk + k]; at >= 0 && n++ == 0) first = at;
      }
    }
    if (n == 0) continue;
    fn(rows + uint64_t(first * c.map.c_row_bytes), n * c.map.c_row_bytes);
    if (c.map.c_scale_bytes) fn(scales + uint64_t(first * c.map.c_scale_bytes), n * c.map.c_scale_bytes);
  }
}

// How many messages `post` makes of that.
int messages_of(const Outbox& box, uint64_t offset, int64_t bytes) {
  int messages = 0;
  do {
    const uint64_t n = box.most(offset, uint64_t(bytes));
    ++messages;
    offset += n;
    bytes -= int64_t(n);
  } while (bytes > 0);
  return messages;
}

RegionView<uint8_t> mirror_of(Comm& c, int rank) { return {c.landing + int64_t(rank) * c.map.mirror, &c.map}; }

void notify_host(Comm& c) {
  for (const int r : Bits(c.here)) {
    if (r < c.g.ranks) c.notify(r);
  }
}

// The number nearest to `near` of which `low` are the low bits.
uint64_t whole(uint32_t low, uint64_t near) {
  return near + uint64_t(int64_t(int32_t((low - uint32_t(near)) << (32 - kSeqBits)) >> (32 - kSeqBits)));
}

// Words only grow, whatever order their messages come in.
void grow(Word& word, uint64_t seq) {
  if (seq > word.v.load(std::memory_order_relaxed)) word.v.store(seq, std::memory_order_release);
}

// What has come of slot `slot` of `rank` under number `seq`. Null: the number is stale.
Landing* landing_of(Comm& c, Op op, int rank, int slot, uint64_t seq) {
  Landing& l = c.landings[(int64_t(op) * c.g.ranks + rank) * c.g.in_flight + slot];
  if (seq < l.seq) return nullptr;
  if (seq > l.seq) l = {seq, false, {}};
  return &l;
}

// Whether more messages have come than there are.
bool is_beyond(const Parts& come, const Parts& all) {
  bool beyond = come.others > all.others;
  for (int i = 0; i < kChunks; ++i) beyond |= come.rows[i] > all.rows[i];
  return beyond;
}

enum class News { none, some, wrong };

// A message of a dispatch or combine; some: readers can go on.
News slot_came(Comm& c, Op op, int rank, Imm kind, int slot, int chunk, uint32_t low) {
  // Numbers as this rank counts: it may have been no rail of that rank for as many as the low bits tell apart.
  const uint64_t seq = whole(low, c.upcoming(op));
  if (c.slot_of(seq) != slot) return News::wrong;
  Landing* l = landing_of(c, op, rank, slot, seq);
  if (!l) return News::none;
  if (kind == Imm::dispatch_head || kind == Imm::combine_head) l->head = true;
  if (kind == Imm::dispatch_part || kind == Imm::combine_part) ++l->parts.others;
  if (kind == Imm::dispatch_rows || kind == Imm::combine_rows) ++l->parts.rows[chunk];
  const RegionView<uint8_t> mirror = mirror_of(c, rank);
  Control& words = mirror.control();
  const bool out = op == Op::dispatch;
  SlotMeta& meta = out ? *mirror.dispatch_meta(slot) : *mirror.combine_meta(slot);
  const Parts& all = meta.parts[c.host[c.g.rank]];
  if (!l->head || meta.seq != l->seq) return News::none;
  if (is_beyond(l->parts, all)) return News::wrong;
  if (l->parts.others != all.others) return News::none;
  uint64_t here = 0;
  for (int i = 0; i < kChunks; ++i) here |= uint64_t(l->parts.rows[i] == all.rows[i]) << i;
  Word& word = out ? words.dispatch_arrived[slot] : words.combine_arrived[slot];
  const uint64_t now = meta.seq << kChunks | here;
  const uint64_t before = word.v.load(std::memory_order_relaxed);
  if (now <= before) return News::none;
  if (before >> kChunks != meta.seq) meta.arrived_ns = now_ns();
  grow(word, now);
  if (here == kAllChunks) {
    meta.published_ns = now_ns();
    grow(out ? words.dispatch_published[slot] : words.combine_published[slot], meta.seq);
  }
  return News::some;
}

// An operation's number by itself: credit, or a rank that has come.
News word_came(Word& word, uint64_t seq, bool is_right) {
  if (is_right) grow(word, seq);
  return is_right ? News::some : News::wrong;
}

News arrived(Comm& c, int rank, uint32_t imm) {
  const Imm kind = Imm(imm >> 28);
  const int place = int(imm >> kSeqBits & 0x3ff), slot = place & ((1 << kSlotBits) - 1), chunk = place >> kSlotBits;
  const uint32_t low = imm & kSeqMask;
  Control& words = mirror_of(c, rank).control();
  Meeting& meeting = words.meeting;
  const auto number = [&](Op op) { return whole(low, c.upcoming(op)); };
  switch (kind) {
    case Imm::dispatch_part:
    case Imm::dispatch_head:
    case Imm::dispatch_rows:
      return slot_came(c, Op::dispatch, rank, kind, slot, chunk, low);
    case Imm::combine_part:
    case Imm::combine_head:
    case Imm::combine_rows:
      return slot_came(c, Op::combine, rank, kind, slot, chunk, low);
    case Imm::dispatch_consumed: {
      const uint64_t seq = number(Op::dispatch);
      return word_came(words.dispatch_consumed[slot], seq, place == c.slot_of(seq));
    }
    case Imm::combine_consumed: {
      const uint64_t seq = number(Op::combine);
      return word_came(words.combine_consumed[slot], seq, place == c.slot_of(seq));
    }
    case Imm::barrier:
      return word_came(meeting.barrier, number(Op::barrier), place == 0);
    case Imm::exchange: {
      const uint64_t seq = number(Op::exchange);
      const bool is_right = place == int(seq % 2);
      if (is_right) meeting.exchange[place].seq.store(seq, std::memory_order_release);
      return word_came(meeting.exchange_latest, seq, is_right);
    }
    case Imm::resync:
      if (place > 1) return News::wrong;
      meeting.resync[place].epoch_tag.store(meeting.resync[place].tag, std::memory_order_release);
      return News::some;
    case Imm::membership:
      return place > 1 ? News::wrong : word_came(meeting.membership, meeting.resync[place].tag, true);
  }
  return News::wrong;
}

// Whether `gone` in the mirror of `r` is news. Before the rank whose mirror it is has entered this set_active, the
// word may be of the connection that both make anew just now.
bool is_current_end(const Comm& c, int r, Want want) {
  const int through = rail(c, r, c.host[c.g.rank]);
  if (want.op != Op::set_active || through == c.g.rank) return true;
  const auto& entries = c.peer[through].control().meeting.resync;
  return std::any_of(entries, entries + 2, [&](const Resync& e) {
    return e.epoch_tag.load(std::memory_order_acquire) == want.seq;
  });
}

}  // namespace

void set_rails(Comm& c) {
  for (int place = 0; place < c.g.ranks * c.g.stride; ++place) c.host_of[place] = 1ull << c.host[place / c.g.stride];
  std::fill_n(c.ranks_of, c.g.ranks, 0);
  for (int r = 0; r < c.g.ranks; ++r) c.ranks_of[c.host[r]] |= uint64_t(c.is_active(r)) << r;
  c.rails = c.collects = 0;
  for (int r = 0; r < c.g.ranks; ++r) {
    c.carrier[r] = r;
    if (c.host[r] == r && !c.is_here(r)) {
      const int to = c.collector[r] = rail(c, c.g.rank, r);
      if (to >= 0) c.rails |= 1ull << to;
    }
    if (c.is_here(r) || !c.is_active(r)) continue;
    const int through = c.carrier[r] = rail(c, r, c.host[c.g.rank]);
    c.collects |= uint64_t(through == c.g.rank) << r;
    const uint8_t* landing = through == c.g.rank ? c.landing : c.landing_of[through];
    c.peer[r] = {landing + int64_t(r) * c.map.mirror, &c.map};
    c.meeting[r] = &c.peer[r].control().meeting;
  }
}

void expect(Comm& c, bool begins) {
  if (!c.rails || !c.helper.is_there()) return;
  c.outbox->expects.store(begins, std::memory_order_relaxed);
  if (begins) wake(*c.outbox);
}

// Bytes from `at` on of the words of meetings, or none, and `kind` of `want.seq`, to each other host.
static Status send_bytes(Comm& c, Imm kind, int slot, Want want, uint64_t at, int64_t bytes) {
  Sender sender(c, want);
  for (const int to : Bits(c.rails)) {
    sender.post(to, Kind::words, bytes ? kPage + at : 0, bytes, imm_of(kind, slot, want.seq));
  }
  return sender.end();
}

Status send_word(Comm& c, Imm kind, int slot, Want want) { return send_bytes(c, kind, slot, want, 0, 0); }

Status send_routes(Comm& c, const DispatchOp& op, int slot) {
  const int64_t tokens = op.routing.tokens, records = tokens * c.g.topk * 4;
  if (!c.rails) return kOk;
  // The hosts that each token goes to.
  for (int64_t t = 0; t < tokens; ++t) {
    uint64_t hosts = 0;
    for (const int32_t *p = op.routing.dest + t * c.g.topk, *end = p + c.g.topk; p < end; ++p) {
      if (*p >= 0) hosts |= c.host_of[*p];
    }
    c.goes_to[t] = hosts;
  }
  // To each host, by its rail: the head, which says how many messages will come; then places and weights.
  SlotMeta& meta = *c.own.dispatch_meta(slot);
  const uint64_t at = uint64_t(c.own.d(slot)), places = at + uint64_t(c.map.d_dest);
  const uint64_t weights = at + uint64_t(c.map.d_weights);
  const uint32_t part = imm_of(Imm::dispatch_part, slot, op.seq);
  Sender sender(c, {Op::dispatch, Phase::credit, op.seq});
  for (const int to : Bits(c.rails)) {
    const int lowest = c.host[to];
    Parts& parts = meta.parts[lowest] = {};
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      for_each_run(c, slot, lowest, chunk_of(tokens, c.g.row_bytes, chunk), [&](uint64_t offset, int64_t bytes) {
        parts.rows[chunk] += messages_of(*c.outbox, offset, bytes);
      });
    }
    if (records) parts.others = messages_of(*c.outbox, places, records) + messages_of(*c.outbox, weights, records);
    sender.post(to, Kind::records, at, head_bytes(c.g.ranks), imm_of(Imm::dispatch_head, slot, op.seq));
    if (records) sender.post(to, Kind::records, places, records, part);
    if (records) sender.post(to, Kind::records, weights, records, part);
  }
  return sender.end();
}

Status send_rows(Comm& c, const DispatchOp& op, int slot, int chunk, Span tokens) {
  const uint32_t imm = imm_of(Imm::dispatch_rows, chunk << kSlotBits | slot, op.seq);
  Sender sender(c, {Op::dispatch, Phase::credit, op.seq});
  for (const int to : Bits(c.rails)) {
    for_each_run(c, slot, c.host[to], tokens, [&](uint64_t offset, int64_t bytes) {
      sender.post(to, Kind::rows, offset, bytes, imm);
    });
  }
  return sender.end();
}

// Calls fn(offset in the region, bytes) for an array of T x K numbers of each of these sources.
template <typename Fn>
static void for_each_record(const Comm& c, const CombineOp& op, int slot, uint64_t sources, int64_t array, Fn fn) {
  for (const int s : Bits(sources)) {
    const int64_t bytes = int64_t(op.routing.source_tokens[s]) * c.g.topk * 4;
    if (bytes) fn(uint64_t(c.own.c(slot) + array + int64_t(s) * c.g.max_tokens * c.g.topk * 4), bytes);
  }
}

Status send_tables(Comm& c, const CombineOp& op, int slot, uint64_t among) {
  const bool two_hops = has_two_hops(c, op.routing);
  const uint32_t part = imm_of(Imm::combine_part, slot, op.seq);
  Sender sender(c, {Op::combine, Phase::credit, op.seq});
  for (const int to : Bits(c.rails)) {
    const uint64_t sources = c.ranks_of[c.host[to]] & among;
    // The head says how many messages will come: chunks of partials, and records.
    Parts& parts = c.own.combine_meta(slot)->parts[c.host[to]] = {};
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      for_each_partials(c, op, slot, sources, chunk, [&](uint64_t offset, int64_t bytes) {
        parts.rows[chunk] += messages_of(*c.outbox, offset, bytes);
      });
    }
    // Records of each source: its table, and its row weights.
    const auto count = [&](uint64_t offset, int64_t bytes) { parts.others += messages_of(*c.outbox, offset, bytes); };
    for_each_record(c, op, slot, sources, c.map.c_table, count);
    if (op.row_weights) for_each_record(c, op, slot, sources, c.map.c_row_weights, count);
    if (!sources) continue;
    // The head first.
    const auto post = [&](uint64_t offset, int64_t bytes) { sender.post(to, Kind::records, offset, bytes, part); };
    sender.post(to, Kind::records, uint64_t(c.own.c(slot)), head_bytes(c.g.ranks),
                imm_of(Imm::combine_head, slot, op.seq));
    for_each_record(c, op, slot, sources, c.map.c_table, post);
    if (op.row_weights && !two_hops) for_each_record(c, op, slot, sources, c.map.c_row_weights, post);
  }
  return sender.end();
}

Status send_row_weights(Comm& c, const CombineOp& op, int slot) {
  const uint32_t part = imm_of(Imm::combine_part, slot, op.seq);
  Sender sender(c, {Op::combine, Phase::credit, op.seq});
  for (const int to : Bits(c.rails)) {
    const uint64_t sources = c.ranks_of[c.host[to]] & c.collects;
    for_each_record(c, op, slot, sources, c.map.c_row_weights, [&](uint64_t offset, int64_t bytes) {
      sender.post(to, Kind::records, offset, bytes, part);
    });
  }
  return sender.end();
}

Status send_partials(Comm& c, const CombineOp& op, int slot, int chunk, uint64_t among) {
  const uint32_t imm = imm_of(Imm::combine_rows, chunk << kSlotBits | slot, op.seq);
  Sender sender(c, {Op::combine, Phase::credit, op.seq});
  for (const int to : Bits(c.rails)) {
    const uint64_t sources = c.ranks_of[c.host[to]] & among;
    for_each_partials(c, op, slot, sources, chunk, [&](uint64_t offset, int64_t bytes) {
      sender.post(to, Kind::rows, offset, bytes, imm);
    });
  }
  return sender.end();
}

Status send_late_heads(Comm& c, const CombineOp& op, int slot, uint64_t among) {
  Sender sender(c, {Op::combine, Phase::credit, op.seq});
  for (const int to : Bits(c.rails)) {
    if (c.ranks_of[c.host[to]] & among) continue;
    sender.post(to, Kind::records, uint64_t(c.own.c(slot)), head_bytes(c.g.ranks),
                imm_of(Imm::combine_head, slot, op.seq));
  }
  return sender.end();
}

Status Comm::send_remote(RemoteWord what, int slot, Want want) {
  const uint64_t entry = offsetof(Meeting, resync) + uint64_t(slot) * sizeof(Resync);
  constexpr uint64_t kTag = offsetof(Resync, tag), kCounters = offsetof(Resync, counters);
  switch (what) {
    case RemoteWord::barrier:
      return send_word(*this, Imm::barrier, slot, want);
    case RemoteWord::exchange: {
      const uint64_t words = offsetof(Meeting, exchange) + uint64_t(slot) * sizeof(ExchangeSlot);
      constexpr int64_t kBytes = sizeof(ExchangeSlot::words);
      return send_bytes(*this, Imm::exchange, slot, want, words + offsetof(ExchangeSlot, words), kBytes);
    }
    case RemoteWord::resync:
      return send_bytes(*this, Imm::resync, slot, want, entry + kCounters, kTag + sizeof(uint64_t) - kCounters);
    case RemoteWord::membership:  // the same tag again: the entry may not be there yet
      return send_bytes(*this, Imm::membership, slot, want, entry + kTag, sizeof(uint64_t));
  }
  return kOk;
}

Status Comm::flush(uint64_t mask, Want want) {
  if (!outbox) return kOk;
  for (const int r : Bits(mask & ~here)) {
    const Status status = wait_for_proxy(want, mask, r, [&] {
      cd::wake(*outbox);
      return outbox->is_quiet(r);
    });
    if (status != kOk) return status;
  }
  return kOk;
}

void Comm::refuse_connection(int r) {
  if (is_here(r) || rail(*this, r, host[rank]) != rank) return;  // the rail's, which reads the same
  outbox->refused.fetch_or(1ull << r);
  cd::wake(*outbox);
}

bool Comm::has_joined() {
  const uint32_t now = joins.load(std::memory_order_acquire), before = joins_seen;
  joins_seen = now;
  return now != before;
}

uint64_t Comm::gone_remotes(uint64_t among, Want want) const {
  uint64_t gone = 0;
  const uint64_t ended_here = down.load(std::memory_order_acquire);
  const int64_t now = ended_here ? now_ns() : 0;
  for (const int r : Bits(among)) {
    const bool ended = is_current_end(*this, r, want) && meeting[r]->gone.v.load(std::memory_order_acquire) != 0;
    const bool cut_off = ended_here >> r & 1 && now - down_ns[r].load(std::memory_order_relaxed) > kSettleNs;
    gone |= uint64_t(ended || cut_off) << r;
  }
  return gone;
}

uint64_t Comm::carriers_of(uint64_t among) const {
  uint64_t carriers = 0;
  for (const int r : Bits(among & ~here)) carriers |= 1ull << carrier[r];
  return carriers;
}

void on_network(void* context, int32_t rank, NetEvent event, uint64_t value) {
  Comm& c = *static_cast<Comm*>(static_cast<Member*>(context));
  switch (event) {
    case NetEvent::arrived: {
      const News news = arrived(c, rank, uint32_t(value));
      if (news == News::some) notify_host(c);
      if (news == News::wrong) c.outbox->refused.fetch_or(1ull << rank);
      return;
    }
    case NetEvent::down:
      c.down_ns[rank].store(now_ns(), std::memory_order_relaxed);
      c.down.fetch_or(1ull << rank, std::memory_order_release);
      mirror_of(c, rank).control().meeting.gone.v.store(1 + value, std::memory_order_release);
      return notify_host(c);
    case NetEvent::up:
      mirror_of(c, rank).control().meeting.gone.v.store(0, std::memory_order_release);
      c.down.fetch_and(~(1ull << rank), std::memory_order_release);
      c.joins.fetch_add(1, std::memory_order_release);
      return c.notify(c.g.rank);
    case NetEvent::left_out:
      c.left_out[rank].store(value, std::memory_order_release);
      return c.notify(c.g.rank);
  }
}

}  // namespace cd
