#include "collector.hpp"

#include <cstring>

#include "remote.hpp"

namespace cd {
namespace {

// Bits of `to_collect`: one per chunk, and the row weights.
constexpr uint32_t kWeightsBit = 1u << kChunks;

// What all ranks of this host have staged: chunks, and with the tables the row weights.
uint32_t ready(const Comm& c, const CombineOp& op, int slot) {
  uint32_t ready = op.to_collect;
  for (const int r : Bits(c.active & c.here)) {
    const uint64_t word = c.peer[r].control().combine_arrived[slot].v.load(std::memory_order_acquire);
    ready &= word >> kChunks == op.seq ? uint32_t(word) | kWeightsBit : 0;
  }
  return ready;
}

// Ranks that bring other routings stage other tables: nobody reads those sums, but what was promised is sent.
bool is_of_one_dispatch(const Comm& c, const CombineOp& op, int slot) {
  bool is_one = true;
  for (const int r : Bits(c.peers() & c.here)) is_one &= c.peer[r].combine_meta(slot)->origin == op.routing.origin;
  return is_one;
}

// Sums tokens of a source of another host, each into its place of this rank's slot.
class HostSums {
 public:
  HostSums(Comm& c, const CombineOp& op, int slot, int source, WrongPlace& wrong)
      : c_(c), op_(op), slot_(slot), first_(int64_t(source) * c.g.max_tokens), wrong_(wrong) {
    for (const int r : Bits(c.active & c.here)) from_[r] = contribution_of(c, r, slot, source);
  }

  void sum_up(Span tokens) {
    const int32_t* table = c_.own.table(slot_) + first_ * c_.g.topk;
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      if (const int64_t to = table[t * c_.g.topk]; to >= 0) sum_token(t, to);
    }
  }

 private:
  void sum_token(int64_t t, int64_t to) {
    // The partials of the ranks that were chosen; one that has dropped all its rows of the token has none: zeros.
    n_ = 0;
    bool is_own = false;
    const uint64_t chosen = ranks_in(c_, op_.routing.source_dest + (first_ + t) * c_.g.topk);
    for (const int r : Bits(chosen & c_.active & c_.here)) {
      Addend& a = addends_[n_++];
      a.moved = nullptr;
      is_own = r == c_.g.rank;
      if (is_own && !is_held(t)) continue;
      const int64_t at = is_own ? to : place_in(from_[r], r, from_[r].table[t * c_.g.topk], wrong_);
      if (at >= 0) point(c_, a, from_[r], at);
    }
    uint8_t* out = c_.own.partials(slot_) + to * c_.map.c_row_bytes;
    float* scales = c_.own.partial_scales(slot_) + to * blocks_of(c_.g.hidden);
    if (n_ != 1 || !addends_[0].moved) {
      sum(out, scales);
    } else if (!is_own) {  // alone: it crosses as it is
      c_.ops.copy(out, addends_[0].moved, c_.map.c_row_bytes);
      memcpy(scales, addends_[0].scales, size_t(c_.map.c_scale_bytes));
    }
  }

  // Whether this rank has a partial of the token.
  bool is_held(int64_t t) const {
    const int width = width_of(c_);
    const int32_t* rows = op_.routing.rows + (first_ + t) * width;
    return std::any_of(rows, rows + width, [](int32_t row) { return row >= 0; });
  }

  // Some columns at a time: one of the addends may lie where the sum goes.
  void sum(uint8_t* out, float* scales) {
    for (int64_t first = 0; first < c_.g.hidden; first += kColumns) {
      const int64_t columns = std::min(kColumns, c_.g.hidden - first);
      alignas(64) float total[kColumns], value[kColumns];
      if (n_ == 0) std::fill_n(total, columns, 0.0f);
      for (int i = 0; i < n_; ++i) {
        fetch(c_, addends_[i], first, columns, i ? value : total);
        if (i) c_.ops.add(total, value, Type::f32, columns);
      }
      store_partial(c_, total, first, columns, out, scales);
    }
  }

  Comm& c_;
  const CombineOp& op_;
  const int slot_;
  const int64_t first_;  // the source's first token
  WrongPlace& wrong_;
  Contribution from_[kMaxRanks];
  Addend addends_[kMaxRanks];  // of the token that is summed, ranks ascend
  int n_ = 0;
};

// Numbers of a source's rows, each from the rank that serves it.
void gather_row_weights(Comm& c, const CombineOp& op, int slot, int source) {
  const int64_t begin = int64_t(source) * c.g.max_tokens * c.g.topk;
  const int64_t n = int64_t(op.routing.source_tokens[source]) * c.g.topk;
  float* out = c.own.row_weights(slot) + begin;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t place = op.routing.source_dest[begin + i];
    if (place < 0) continue;
    const int r = place / c.g.stride;
    if (r != c.g.rank && c.is_here(r) && c.is_active(r)) out[i] = c.peer[r].row_weights(slot)[begin + i];
  }
}

// Sums one chunk of these, for all sources, and sends it.
Status forward(Comm& c, CombineOp& op, int slot, uint32_t among) {
  const uint64_t sources = is_of_one_dispatch(c, op, slot) ? c.collects : 0;
  // The row weights first: with the tables, which have left already, they are what readers wait for.
  if (among & kWeightsBit) {
    op.to_collect &= ~kWeightsBit;
    for (const int s : Bits(sources)) gather_row_weights(c, op, slot, s);
    return send_row_weights(c, op, slot);
  }
  const int chunk = __builtin_ctz(among);
  op.to_collect &= ~(1u << chunk);
  WrongPlace wrong;
  for (const int s : Bits(sources)) {
    HostSums(c, op, slot, s, wrong).sum_up(chunk_of(op.routing.source_tokens[s], c.map.c_row_bytes, chunk));
  }
  if (const int r = wrong.rank(); r >= 0) {
    return c.refuse(Op::combine, Wrong::place, r, wrong.place(), c.map.partials - 1);
  }
  return send_partials(c, op, slot, chunk, c.collects);
}

}  // namespace

bool has_two_hops(const Comm& c, const Routing& routing) {
  if (!c.g.by_domain || !c.rails) return false;
  return *std::max_element(routing.source_tokens, routing.source_tokens + c.g.ranks) >= c.g.two_hop_tokens;
}

void begin_collecting(Comm& c, CombineOp& op, int slot) {
  op.to_collect = c.collects ? uint32_t(kAllChunks) | (op.row_weights ? kWeightsBit : 0) : 0;
  c.collecting[slot] = &op;
}

Status finish_collecting(Comm& c, CombineOp& op, int slot) {
  Status status = kOk;
  while (status == kOk && op.to_collect) status = forward(c, op, slot, op.to_collect);
  return status;
}

Status Comm::progress() {
  for (int slot = 0; g.by_domain && slot < g.in_flight; ++slot) {
    CombineOp* op = collecting[slot];
    if (!op) continue;
    if (const uint32_t among = ready(*this, *op, slot)) return forward(*this, *op, slot, among);
  }
  return kNothing;
}

}  // namespace cd
