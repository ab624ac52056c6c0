// Combine: the experts' rows back at their source rank, weighted and summed. The source rank reads them.
//
// Send half, expert rows anywhere in memory: this rank pre-reduces the rows of each (source, token) that it holds into
// one partial (fp32, ascending k, rounded once to the combine dtype), writes the partials of all sources into a slot of
// its own region, with a table that says where each token's partial lies, and publishes. Expert rows already in a
// registered buffer (`combine_input`): only the table is published, and the source rank computes the same partials
// itself; nothing is copied. Receive half: the source rank waits for every peer's number, and for each of its tokens
// sums the partials in ascending rank.
//
// Example: token 0 of rank 1 has k = 0 and 2 on rank 0 (rows 5, 9), k = 1 on rank 1 (row 2). Rank 0 writes the partial
// round(w0 * y[5] + w2 * y[9]); rank 1 writes round(w1 * y[2]); the source rank (1) adds the first and the second,
// in that order.
//
// Exact combine: every row travels on its own, rounded to the combine dtype, and the source rank sums w * row in
// ascending k.
//
// Memory order: as in dispatch.cpp, with `combine_published` and `combine_consumed`. A registered buffer is lent to the
// peers until they have consumed the combine; `outputs_busy` remembers that for the next writer of the buffer.
#include <algorithm>

#include "addends.hpp"
#include "collector.hpp"
#include "remote.hpp"

namespace cd {
namespace {

// The word of a slot of a rank of another host.
uint64_t arrived(const Comm& c, int r, int slot) {
  return c.peer[r].control().combine_arrived[slot].v.load(std::memory_order_acquire);
}

// Sums tokens of this rank, on one thread. from [R].
class Adder {
 public:
  Adder(const Comm& c, const CombineOp& op, const Contribution* from, WrongPlace& wrong)
      : c_(c), op_(op), from_(from), wrong_(wrong), two_hops_(has_two_hops(c, op.routing)) {}

  void sum_up(Span tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      collect(t);
      uint8_t* z = op_.z + t * c_.g.hidden * size_of(op_.z_type);
      c_.g.by_domain ? sum_by_domain(z) : sum(z);
      if (op_.z_weights) carry_weights(t);
    }
  }

 private:
  const int32_t* dest(int64_t t) const { return op_.routing.dest + t * c_.g.topk; }
  int rank_of(int32_t place) const { return place / c_.g.stride; }
  // Who gives this rank what rank r holds.
  int giver_of(int r) const { return two_hops_ && !c_.is_here(r) ? c_.collector[c_.host[r]] : r; }

  // The addends of token t, in the order in which they are summed.
  void collect(int64_t t) {
    n_ = 0;
    // Exact: every row by itself, in ascending k.
    if (c_.g.exact) {
      for (int k = 0; k < c_.g.topk; ++k) {
        if (dest(t)[k] >= 0) add_row(t, k, rank_of(dest(t)[k]));
      }
      return;
    }
    // Else one partial of each rank that has rows of the token, or the sum of its host: ranks ascend, or hosts and in
    // them ranks.
    uint64_t givers = 0;
    for (const int r : Bits(ranks_in(c_, dest(t)))) givers |= 1ull << giver_of(r);
    if (!c_.g.by_domain) {
      for (const int r : Bits(givers)) add_partial(t, r);
      return;
    }
    while (givers) {  // hosts in ascending order of their lowest rank, which need not hold a row of this token
      int lowest = kMaxRanks;
      for (const int r : Bits(givers)) lowest = std::min(lowest, c_.host[r]);
      const uint64_t together = givers & c_.ranks_of[lowest];
      givers &= ~together;
      for (const int r : Bits(together)) {
        add_partial(t, r);
        addends_[n_ - 1].domain = lowest;
      }
    }
  }

  Addend& next() {
    Addend& a = addends_[n_++];
    a.moved = nullptr;
    a.terms.n = 0;
    a.weighted = false;
    a.weight = 1.0f;
    return a;
  }

  void add_row(int64_t t, int k, int r) {
    const int64_t at = place_in(from_[r], r, from_[r].table[t * c_.g.topk + k], wrong_);
    Addend& a = next();
    if (op_.apply_weights) a.weight = op_.routing.weights[t * c_.g.topk + k];
    if (at < 0) return;
    if (from_[r].direct) {
      a.terms.push(from_[r].rows + at * c_.map.y_row_bytes, 1.0f);
    } else {
      point(c_, a, from_[r], at);
    }
  }

  void add_partial(int64_t t, int r) {
    const int32_t* table = from_[r].table + t * c_.g.topk;
    Addend& a = next();
    if (!from_[r].direct) {
      if (const int64_t at = place_in(from_[r], r, table[0], wrong_); at >= 0) point(c_, a, from_[r], at);
      return;
    }
    const bool expert_rows = per_expert(c_.g.layout);
    a.weighted = expert_rows && op_.apply_weights;
    for (int k = 0; k < width_of(c_); ++k) {
      if (expert_rows && (dest(t)[k] < 0 || rank_of(dest(t)[k]) != r)) continue;
      const int64_t at = place_in(from_[r], r, table[k], wrong_);
      if (at >= 0) a.terms.push(from_[r].rows + at * c_.map.y_row_bytes, op_.routing.weights[t * c_.g.topk + k]);
    }
  }

  void sum(uint8_t* z) {
    const Type type = op_.z_type;
    const bool weighted = c_.g.exact;
    // Some columns at a time: all addends in fp32, then rounded once.
    for (int64_t first = 0; first < c_.g.hidden; first += kColumns) {
      const int64_t n = std::min(kColumns, c_.g.hidden - first);
      alignas(64) float total[kColumns], value[kColumns];
      if (n_ == 0) std::fill_n(total, n, 0.0f);
      for (int i = 0; i < n_; ++i) {
        float* into = i == 0 && !weighted ? total : value;
        const Addend& a = addends_[i];
        // What has been moved as floats is added where it lies.
        if (i > 0 && !weighted && a.moved && c_.g.combine_type != Type::e4m3) {
          c_.ops.add(total, a.moved + first * size_of(c_.g.combine_type), c_.g.combine_type, n);
          continue;
        }
        fetch(c_, a, first, n, into);
        if (weighted) {
          (i ? c_.ops.scale_add : c_.ops.scale)(total, value, Type::f32, a.weight, n);
        } else if (i > 0) {
          c_.ops.add(total, value, Type::f32, n);
        }
      }
      c_.ops.store(z + first * size_of(type), total, type, n);
    }
  }

  // CombineOrder::DOMAIN. The addends of one host follow each other; a sum that its collector has made is one.
  void sum_by_domain(uint8_t* z) {
    for (int64_t first = 0; first < c_.g.hidden; first += kColumns) {
      const int64_t n = std::min(kColumns, c_.g.hidden - first);
      alignas(64) float total[kColumns], part[kColumns], value[kColumns];
      if (n_ == 0) std::fill_n(total, n, 0.0f);
      for (int i = 0; i < n_;) {
        // The addends of one host: summed by themselves, but for the first host, which begins the total.
        float* into = i == 0 ? total : part;
        const int begin = i, domain = addends_[i].domain;
        fetch(c_, addends_[i++], first, n, into);
        for (; i < n_ && addends_[i].domain == domain; ++i) {
          fetch(c_, addends_[i], first, n, value);
          c_.ops.add(into, value, Type::f32, n);
        }
        // What another host has summed was rounded when it crossed.
        if (i - begin > 1 && domain != c_.host[c_.g.rank]) cross(c_, into, n);
        if (begin > 0) c_.ops.add(total, part, Type::f32, n);
      }
      c_.ops.store(z + first * size_of(op_.z_type), total, op_.z_type, n);
    }
  }

  void carry_weights(int64_t t) {
    for (int k = 0; k < c_.g.topk; ++k) {
      const int32_t place = dest(t)[k];
      const int64_t at = t * c_.g.topk + k;
      op_.z_weights[at] = place < 0 ? 0.0f : from_[giver_of(rank_of(place))].row_weights[at];
    }
  }

  const Comm& c_;
  const CombineOp& op_;
  const Contribution* from_;
  WrongPlace& wrong_;
  const bool two_hops_;
  Addend addends_[kMaxRanks];
  int n_ = 0;
};

// The sums of this rank's tokens, chunk by chunk. A helper thread, where there is one, takes some of the chunks.
class SourceSums {
 public:
  SourceSums(Comm& c, const CombineOp& op, int slot) : c_(c), op_(op), slot_(slot) {
    for (int r = 0; r < c.g.ranks; ++r) {
      if (c.is_active(r)) from_[r] = contribution_of(c, r, slot, c.g.rank);
    }
    missing_.fill(kChunks);
    const bool is_large = op.routing.tokens * c.map.y_row_bytes > kHelperBytes;
    if (c.helper.is_there() && is_large) c.helper.begin(&SourceSums::help, this);
  }
  SourceSums(const SourceSums&) = delete;
  SourceSums& operator=(const SourceSums&) = delete;
  ~SourceSums() {
    missing_.drop();  // after a failure nobody shall sum them
    if (c_.helper.is_there()) c_.helper.finish();
  }

  // Sums the tokens of a chunk of which everything is here. False: there is none.
  bool step() { return sum_one(adder_, here()); }

  // When all have published.
  void finish() {
    while (sum_one(adder_, ~0u)) {
    }
    if (c_.helper.is_there()) c_.helper.finish();
  }

  const WrongPlace& wrong() const { return wrong_; }

 private:
  static void help(void* self) {
    auto& sums = *static_cast<SourceSums*>(self);
    Adder adder(sums.c_, sums.op_, sums.from_, sums.wrong_);
    HelperThread::help([&] { return sums.missing_.left() != 0; }, [&] { return sums.sum_one(adder, sums.here()); });
  }

  uint32_t here() const {
    uint32_t chunks = missing_.left();
    for (const int r : Bits(chunks ? c_.peers() & ~c_.here : 0)) {
      const uint64_t word = arrived(c_, r, slot_);
      chunks &= word >> kChunks == op_.seq ? uint32_t(word) : 0;
    }
    return chunks;
  }

  bool sum_one(Adder& adder, uint32_t among) {
    const int chunk = missing_.take(among);
    if (chunk < 0) return false;
    adder.sum_up(chunk_of(op_.routing.tokens, c_.map.c_row_bytes, chunk));
    return true;
  }

  Comm& c_;
  const CombineOp& op_;
  const int slot_;
  Contribution from_[kMaxRanks];
  Chunks missing_;
  WrongPlace wrong_;
  Adder adder_{c_, op_, from_, wrong_};
};

// From when a wait for rank r is its own doing. In two hops a collector waits for the ranks of its host: from when all
// those had come.
int64_t begin_of(const Comm& c, const CombineOp& op, int r, int slot, int64_t receive_ns) {
  int64_t begin = receive_ns;
  if (c.is_here(r) || !has_two_hops(c, op.routing)) return begin;
  for (const int other : Bits(c.ranks_of[c.host[r]] & ~(1ull << r))) {
    begin = std::max(begin, c.peer[other].combine_meta(slot)->arrived_ns);
  }
  return begin;
}

void record(Comm& c, const CombineOp& op, int slot, int64_t receive_ns) {
  Sample sample{int32_t(Op::combine), op.routing.mode,  op.routing.tokens, c.g.ranks, op.seq,
                op.clock.start_ns,    op.clock.send_ns, op.clock.send_ns + now_ns() - receive_ns, {}};
  for (const int r : Bits(c.peers())) {
    const int64_t wait_ns = c.peer[r].combine_meta(slot)->published_ns - begin_of(c, op, r, slot, receive_ns);
    sample.peer_wait_ns[r] = std::max<int64_t>(0, wait_ns);
  }
  c.samples.push(sample);
}

}  // namespace

Status combine_receive(Comm& c, CombineOp& op) {
  const int64_t receive_ns = now_ns();
  const int slot = c.slot_of(op.seq);
  // Every peer's table is there: published, or arrived from another host.
  const Want want{Op::combine, Phase::payload, op.seq, receive_ns};
  const auto published = [&](int r) {
    return c.peer[r].control().combine_published[slot].v.load(std::memory_order_acquire);
  };
  Status status = c.wait(want, [&](int r) { return c.is_here(r) ? published(r) : arrived(c, r, slot) >> kChunks; });
  // All ranks of this host have: what is left to sum for other hosts, before the own tokens.
  if (status == kOk) status = finish_collecting(c, op, slot);
  c.collecting[slot] = nullptr;
  if (status != kOk) return status;
  // All ranks combine the same dispatch.
  const Status same = c.agree({Op::combine, Phase::routing, op.routing.origin},
                              [&](int r) { return c.peer[r].combine_meta(slot)->origin; });
  if (same == kOk) {
    // Sum the tokens, those whose partials are there first.
    {
      SourceSums sums(c, op, slot);
      status = c.wait(want, published, [&] { return sums.step(); });
      if (status != kOk) return status;
      sums.finish();
      const WrongPlace& wrong = sums.wrong();
      if (const int r = wrong.rank(); r >= 0) {
        const int64_t rows = contribution_of(c, r, slot, c.g.rank).num_rows;
        return c.refuse(Op::combine, Wrong::place, r, wrong.place(), rows - 1);
      }
    }
    record(c, op, slot, receive_ns);
  } else if (status = c.wait(want, published); status != kOk) {  // credit is for what has come: see dispatch.cpp
    return status;
  }
  // Give the slot back, here and on other hosts.
  c.publish(c.own.control().combine_consumed[slot], op.seq);
  const Status sent = send_word(c, Imm::combine_consumed, slot, {Op::combine, Phase::credit, op.seq});
  expect(c, false);
  const Status together = sent == kOk ? c.confirm(Op::combine) : sent;
  return together == kOk ? same : together;
}

Status outputs_free(Comm& c, int slot, Op op) {
  const uint64_t busy = c.outputs_busy[slot];
  if (busy == 0) return kOk;
  const int busy_slot = c.slot_of(busy);
  const Status status = c.wait({op, Phase::outputs, busy}, [&](int r) {
    return c.peer[r].control().combine_consumed[busy_slot].v.load(std::memory_order_acquire);
  });
  if (status == kOk) c.outputs_busy[slot] = 0;
  return status;
}

}  // namespace cd
