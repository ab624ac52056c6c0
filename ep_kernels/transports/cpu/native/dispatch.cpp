// Dispatch: tokens to the ranks that hold their experts. The receiver pulls.
//
// Send half: each rank routes its own tokens, writes places, weights and payload (quantised here, once per token) into
// a slot of its own region, and publishes the slot's sequence number. Receive half: each rank waits for every peer's
// number, reads the places of all tokens, so knows every row's final place without an exchange of counts, and copies
// each row from the source's slot straight into the output. Last, it publishes that it has consumed the slot.
//
// Example: R = 2, rank 1 sends token 0 to places (rank 0, slot 1) and (rank 1, slot 0). It writes the row once into its
// slot. Rank 0 finds `dest[0] = {1, 2}` there (stride 2): place 1 is its own expert 1; place 2 is not its business.
//
// Memory order: slot contents, then `published` (release); the reader's acquire of `published` makes them visible. The
// reader's loads, then `consumed` (release); the owner's acquire of `consumed` comes before it writes the slot again,
// max_in_flight dispatches later. Nobody but the owner ever writes a slot.
//
// Rows of other hosts come in chunks (remote.hpp). A rank needs the places of all tokens before it can place one row,
// so a source sends those first; then each chunk is placed when it is there, whatever the order: every row has one
// place, and no row is read by two chunks. Rows of this host are placed while nothing has come.
#include <algorithm>
#include <cstring>

#include "args.hpp"
#include "remote.hpp"

namespace cd {
namespace {

// What a rank receives of this size is not found in the caches by those who read it next; smaller, it is, and experts
// and combine are slower without it.
constexpr int64_t kCached = 8 << 20;

// Copy number (source + token) % n of each expert's n active copies.
template <typename Id>
void route(Comm& c, DispatchOp& op) {
  const Routing& r = op.routing;
  const auto* ids = static_cast<const Id*>(op.ids);
  int32_t invalid = 0;
  for (int64_t t = 0; t < r.tokens; ++t) {
    bool valid = true;
    for (int k = 0; k < c.g.topk; ++k) {
      const int64_t i = t * c.g.topk + k;
      const Id id = ids[i];
      // An id out of range is no expert; -1 says so, others are counted.
      r.dest[i] = -1;
      if (id < 0 || id >= c.g.experts) {
        invalid += id != -1;
        continue;
      }
      // The copy that serves this token. No copy left: the token's sum is not whole.
      const int32_t first = c.first[id], copies = c.first[id + 1] - first;
      if (copies == 0) {
        valid = false;
      } else {
        r.dest[i] = c.places[copies == 1 ? first : first + (c.g.rank + t) % copies];
      }
    }
    op.valid[t] = valid;
  }
  op.num_invalid = invalid;
}

// Payload of one token into the slot, quantised if so configured. A caller that used `dispatch_input` wrote it there.
void stage_row(Comm& c, const DispatchOp& op, int slot, int64_t t) {
  const Geometry& g = c.g;
  uint8_t* row = c.own.rows(slot) + t * g.row_bytes;
  uint8_t* scales = c.own.scales(slot) + t * g.scale_bytes;
  if (g.scales == Scales::none || g.scales == Scales::caller) {
    if (op.x != c.own.rows(slot)) c.ops.copy(row, static_cast<const uint8_t*>(op.x) + t * g.row_bytes, g.row_bytes);
    if (g.scale_bytes) memcpy(scales, static_cast<const uint8_t*>(op.scales) + t * g.scale_bytes, g.scale_bytes);
    return;
  }
  float* wide = c.wide.data();
  c.ops.load(wide, static_cast<const uint8_t*>(op.x) + t * g.hidden * size_of(g.x_type), g.x_type, g.hidden);
  if (g.scales == Scales::mxfp8) return c.ops.quantize_mxfp8(row, scales, wide, g.hidden);
  if (g.scales == Scales::nvfp4)
    return c.ops.quantize_nvfp4(row, scales, wide, *static_cast<const float*>(op.scales), g.hidden);
  c.ops.quantize(row, reinterpret_cast<float*>(scales), wide, g.scales != Scales::fp32, g.hidden);
}

void stage_routes(Comm& c, const DispatchOp& op, int slot) {
  const Routing& r = op.routing;
  const int64_t n = int64_t(r.tokens) * c.g.topk;
  memcpy(c.own.dest(slot), r.dest, n * 4);
  memcpy(c.own.weights(slot), r.weights, n * 4);
  SlotMeta& meta = *c.own.dispatch_meta(slot);
  meta.tokens = r.tokens;
  meta.mode = r.mode;
  meta.origin = r.origin;
  meta.seq = op.seq;
}

void stage_rows(Comm& c, const DispatchOp& op, int slot, Span tokens) {
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const int32_t* dest = op.routing.dest + t * c.g.topk;
    const bool needed = std::any_of(dest, dest + c.g.topk, [](int32_t place) { return place >= 0; });
    if (needed) stage_row(c, op, slot, t);
  }
}

// Local expert of a place on this rank, or -1; also of a place that no rank has.
struct Here {
  int32_t first, experts;
  int32_t operator()(int32_t place) const {
    const uint32_t local = uint32_t(place) - uint32_t(first);
    return local < uint32_t(experts) ? int32_t(local) : -1;
  }
};

Here here(const Comm& c) { return {c.g.rank * c.g.stride, c.g.local_experts}; }

// Calls fn(source, token, its K places) for all tokens of all active ranks in canonical order.
template <typename Fn>
void for_each_token(Comm& c, const DispatchOp& op, int slot, Fn fn) {
  for (int s = 0; s < c.g.ranks; ++s) {
    const int32_t* dest = c.peer[s].dest(slot);
    for (int64_t t = 0; t < op.routing.source_tokens[s]; ++t) fn(s, t, dest + t * c.g.topk);
  }
}

// Start of each group and the places of all rows, per-expert layouts. A row past the capacity is dropped.
void place_expert_rows(Comm& c, DispatchOp& op, int slot) {
  const Geometry& g = c.g;
  const Here local = here(c);
  const bool grouped = g.layout == Layout::grouped;
  Array<int64_t>& rows = c.group_rows;  // first how many each expert gets, then where its next one goes
  // Rows of each expert.
  for (int l = 0; l < g.local_experts; ++l) rows[l] = op.counts[l] = 0;
  for_each_token(c, op, slot, [&](int, int64_t, const int32_t* dest) {
    for (int k = 0; k < g.topk; ++k) {
      const int32_t l = local(dest[k]);
      if (l >= 0) ++rows[l];
    }
  });
  // Where each expert's group begins: one behind the other, aligned, or in slots of its own.
  int64_t next = 0;
  for (int l = 0; l < g.local_experts; ++l) {
    const int64_t padded = (rows[l] + g.alignment - 1) / g.alignment * g.alignment;
    rows[l] = grouped ? next : l * g.slots;
    op.offsets[l] = int32_t(std::min(next, g.capacity));
    next += padded;
  }
  op.offsets[g.local_experts] = int32_t(std::min(next, g.capacity));
  // A row for each (token, k): ranks ascend, and in each its tokens.
  for_each_token(c, op, slot, [&](int s, int64_t t, const int32_t* dest) {
    const int64_t at = (int64_t(s) * g.max_tokens + t) * g.topk;
    for (int k = 0; k < g.topk; ++k) {
      const int32_t l = local(dest[k]);
      int32_t row = -1;
      if (l >= 0) {
        if (rows[l] < (grouped ? g.capacity : (l + 1) * g.slots)) {
          row = int32_t(rows[l]);
          ++op.counts[l];
        } else {
          ++op.num_dropped;
        }
        ++rows[l];
      }
      op.routing.rows[at + k] = row;
    }
  });
}

// The same for rank-wise layouts: one row per token that has any expert here.
void place_rank_rows(Comm& c, DispatchOp& op, int slot) {
  const Geometry& g = c.g;
  const Here local = here(c);
  std::fill_n(op.counts, g.ranks, 0);
  std::fill_n(op.offsets, g.ranks + 1, 0);
  // By source, or one behind the other.
  int64_t next = 0;
  for_each_token(c, op, slot, [&](int s, int64_t t, const int32_t* dest) {
    int32_t row = -1;
    if (std::any_of(dest, dest + g.topk, [&](int32_t place) { return local(place) >= 0; })) {
      if (g.layout == Layout::rank_major) {
        row = int32_t(int64_t(s) * g.max_tokens + op.counts[s]);
      } else if (next < g.capacity) {
        row = int32_t(next);
      } else {
        ++op.num_dropped;
      }
      ++next;
      op.counts[s] += row >= 0;
    }
    op.routing.rows[int64_t(s) * g.max_tokens + t] = row;
  });
  for (int s = 0; s < g.ranks; ++s) op.offsets[s + 1] = op.offsets[s] + op.counts[s];
}

int32_t total_rows(const Comm& c, const DispatchOp& op) {
  if (c.g.layout == Layout::grouped) return op.offsets[c.g.local_experts];
  const int groups = per_expert(c.g.layout) ? c.g.local_experts : c.g.ranks;
  int32_t sum = 0;
  for (int i = 0; i < groups; ++i) sum += op.counts[i];
  return sum;
}

// Scales of one row. Packed: exponent bytes, four blocks to a word, the row index fastest.
void deliver_scales(const Comm& c, const DispatchOp& op, const uint8_t* from, int64_t row) {
  const Geometry& g = c.g;
  if (g.scales != Scales::ue8m0_packed) {
    memcpy(op.out_scales + row * g.scale_bytes, from, g.scale_bytes);
    return;
  }
  const int64_t blocks = blocks_of(g.hidden), words = (blocks + 3) / 4, stride = op.packed_stride;
  const int64_t plane = g.layout == Layout::expert_major ? g.slots : g.layout == Layout::rank_major ? g.max_tokens : 0;
  uint8_t* out = op.out_scales + (plane ? row / plane * words * stride + row % plane : row) * 4;
  for (int64_t b = 0; b < words * 4; ++b) {
    uint32_t bits = 0;
    if (b < blocks) memcpy(&bits, from + b * 4, 4);
    out[b / 4 * stride * 4 + b % 4] = uint8_t(bits >> 23);
  }
}

void deliver_ids(const Comm& c, const DispatchOp& op, const int32_t* dest, const float* weights, int64_t row) {
  const Here local = here(c);
  for (int k = 0; k < c.g.topk; ++k) {
    const int32_t l = local(dest[k]);
    op.out_ids[row * c.g.topk + k] = l >= 0 ? c.g.first_id + l : c.g.absent_id;
    op.out_weights[row * c.g.topk + k] = l >= 0 ? weights[k] : 0.0f;
  }
}

// The rows of these tokens of source s from its slot to their places.
void deliver(Comm& c, const DispatchOp& op, int slot, int s, Span tokens) {
  const Geometry& g = c.g;
  const bool rank_wise = !per_expert(g.layout);
  const int width = rank_wise ? 1 : g.topk;
  const auto copy = op.num_rows * g.row_bytes > kCached ? c.ops.stream : c.ops.copy;
  const RegionView<const uint8_t>& from = c.peer[s];
  const int32_t* rows = op.routing.rows + int64_t(s) * g.max_tokens * width;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    for (int k = 0; k < width; ++k) {
      const int64_t row = rows[t * width + k];
      if (row < 0) continue;
      copy(op.tokens + row * g.row_bytes, from.rows(slot) + t * g.row_bytes, g.row_bytes);
      if (g.scale_bytes) deliver_scales(c, op, from.scales(slot) + t * g.scale_bytes, row);
      if (rank_wise) deliver_ids(c, op, from.dest(slot) + t * g.topk, from.weights(slot) + t * g.topk, row);
    }
  }
}

void deliver_weights(Comm& c, const DispatchOp& op, int slot) {
  const Routing& r = op.routing;
  for (int s = 0; s < c.g.ranks; ++s) {
    const int64_t n = int64_t(r.source_tokens[s]) * c.g.topk;
    memcpy(r.row_weights + int64_t(s) * c.g.max_tokens * c.g.topk, c.peer[s].weights(slot), n * 4);
  }
}

// The places of the tokens for which this rank is the collector; those that no rank has are none.
void keep_places(Comm& c, const DispatchOp& op, int slot) {
  for (const int s : Bits(c.collects)) {
    const int64_t n = int64_t(op.routing.source_tokens[s]) * c.g.topk;
    const int32_t* from = c.peer[s].dest(slot);
    int32_t* to = op.routing.source_dest + int64_t(s) * c.g.max_tokens * c.g.topk;
    const uint32_t places = uint32_t(c.g.ranks * c.g.stride);
    std::transform(from, from + n, to, [&](int32_t place) { return uint32_t(place) < places ? place : -1; });
  }
}

// Which chunks have been placed, and which can be. A rank with a helper shares them with it.
class Delivery {
 public:
  Delivery(Comm& c, const DispatchOp& op, int slot) : c_(c), op_(op), slot_(slot) {
    for (int s = 0; s < c.g.ranks; ++s) {
      const int64_t tokens = op.routing.source_tokens[s];
      missing_[s].fill(tokens ? num_chunks(tokens, c.g.row_bytes) : 0);
    }
    if (c.helper.is_there() && op.num_rows * c.g.row_bytes > kHelperBytes) c.helper.begin(&Delivery::help, this);
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;
  ~Delivery() {
    for (Chunks& left : missing_) left.drop();  // after a failure nobody shall place them
    if (c_.helper.is_there()) c_.helper.finish();
  }

  // Places a chunk that is here: of another host first, since it was just written. False: none is here.
  bool step() {
    for (const int s : Bits(c_.peers() & ~c_.here)) {
      if (place_one(s, arrived(s))) return true;
    }
    return place_local();
  }

  // When all have published.
  void finish() {
    for (int s = 0; s < c_.g.ranks; ++s) {
      while (place_one(s, ~0u)) {
      }
    }
  }

 private:
  static void help(void* self) {
    auto& mine = *static_cast<Delivery*>(self);
    HelperThread::help([&] { return mine.is_left(); }, [&] { return mine.step(); });
  }

  bool is_left() const {
    return std::any_of(missing_, missing_ + c_.g.ranks, [](const Chunks& of) { return of.left() != 0; });
  }

  bool place_local() {
    for (int s = 0; s < c_.g.ranks; ++s) {
      if (c_.is_here(s) && place_one(s, ~0u)) return true;
    }
    return false;
  }

  // A chunk in `among`. False: there is none.
  bool place_one(int s, uint32_t among) {
    const int chunk = missing_[s].take(among);
    if (chunk < 0) return false;
    deliver(c_, op_, slot_, s, chunk_of(op_.routing.source_tokens[s], c_.g.row_bytes, chunk));
    return true;
  }

  uint32_t arrived(int s) const {
    const uint64_t word = c_.peer[s].control().dispatch_arrived[slot_].v.load(std::memory_order_acquire);
    return word >> kChunks == op_.seq ? uint32_t(word & ((1u << kChunks) - 1)) : 0;
  }

  Comm& c_;
  const DispatchOp& op_;
  const int slot_;
  Chunks missing_[kMaxRanks];
};

uint64_t published(const Comm& c, int r, int slot) {
  return c.peer[r].control().dispatch_published[slot].v.load(std::memory_order_acquire);
}

void record(Comm& c, const DispatchOp& op, int slot) {
  const int64_t receive_ns = op.clock.receive_ns;
  Sample sample{int32_t(Op::dispatch), op.routing.mode, op.routing.tokens, c.g.ranks, op.seq,
                op.clock.start_ns,     op.clock.send_ns, op.clock.send_ns + now_ns() - receive_ns, {}};
  for (const int r : Bits(c.peers())) {
    sample.peer_wait_ns[r] = std::max<int64_t>(0, c.peer[r].dispatch_meta(slot)->published_ns - receive_ns);
  }
  c.samples.push(sample);
}

// Ends the receive half: this rank reads the slot no more. `status`, unless it has been left out meanwhile.
Status give_back(Comm& c, const DispatchOp& op, int slot, Status status) {
  c.publish(c.own.control().dispatch_consumed[slot], op.seq);
  const Status sent = send_word(c, Imm::dispatch_consumed, slot, {Op::dispatch, Phase::credit, op.seq});
  expect(c, false);
  const Status together = sent == kOk ? c.confirm(Op::dispatch) : sent;
  return together == kOk ? status : together;
}

// Ends a dispatch that ranks brought differently. Credit is for a slot of which everything has come: a row that is
// still on its way would land among those of the dispatch that takes the slot next.
Status differs(Comm& c, const DispatchOp& op, int slot, Status status) {
  const Want want{Op::dispatch, Phase::payload, op.seq, op.clock.receive_ns};
  const Status come = c.wait(want, [&](int r) { return published(c, r, slot); });
  return come == kOk ? give_back(c, op, slot, status) : come;
}

}  // namespace

Status dispatch_free(Comm& c) {
  const uint64_t seq = c.next[int(Op::dispatch)];
  if (seq <= c.base[int(Op::dispatch)] + c.g.in_flight) return kOk;
  return c.wait({Op::dispatch, Phase::credit, seq - c.g.in_flight}, [&](int r) {
    return c.peer[r].control().dispatch_consumed[c.slot_of(seq)].v.load(std::memory_order_acquire);
  });
}

Status dispatch_send(Comm& c, DispatchOp& op) {
  op.clock.start_ns = now_ns();
  // Number and slot; both are free when peers have taken what they had.
  expect(c, true);
  op.seq = c.next[int(Op::dispatch)];
  const int slot = c.slot_of(op.seq);
  if (const Status status = outputs_free(c, slot, Op::dispatch); status != kOk) return status;
  if (const Status status = dispatch_free(c); status != kOk) return status;
  c.take(Op::dispatch);
  // Routes, which peers read, and push to other hosts, before the rows.
  if (op.fresh) {
    op.wide_ids ? route<int64_t>(c, op) : route<int32_t>(c, op);
    op.routing.origin = op.seq;
  }
  memcpy(op.routing.weights, op.weights, int64_t(op.routing.tokens) * c.g.topk * 4);
  stage_routes(c, op, slot);
  Status sent = send_routes(c, op, slot);
  // Rows, chunk by chunk: one is under way while the next is staged.
  for (int chunk = 0; sent == kOk && chunk < num_chunks(op.routing.tokens, c.g.row_bytes); ++chunk) {
    const Span tokens = chunk_of(op.routing.tokens, c.g.row_bytes, chunk);
    stage_rows(c, op, slot, tokens);
    sent = send_rows(c, op, slot, chunk, tokens);
  }
  if (sent != kOk) return sent;
  // Publish.
  c.own.dispatch_meta(slot)->published_ns = now_ns();
  c.publish(c.own.control().dispatch_published[slot], op.seq);
  op.clock.send_ns = now_ns() - op.clock.start_ns;
  return kOk;
}

Status dispatch_place(Comm& c, DispatchOp& op) {
  op.clock.receive_ns = now_ns();
  const int slot = c.slot_of(op.seq);
  // The routes of all ranks are there.
  const Status routed = c.wait({Op::dispatch, Phase::payload, op.seq, op.clock.receive_ns}, [&](int r) {
    if (c.is_here(r)) return published(c, r, slot);
    return c.peer[r].control().dispatch_arrived[slot].v.load(std::memory_order_acquire) >> kChunks;
  });
  if (routed != kOk) return routed;
  // All ranks dispatch by the same routing, in the same mode.
  const Status same = c.agree({Op::dispatch, Phase::routing, op.routing.origin},
                              [&](int r) { return c.peer[r].dispatch_meta(slot)->origin; });
  if (same != kOk) return differs(c, op, slot, same);
  const Status alike = c.agree({Op::dispatch, Phase::arguments, uint64_t(op.routing.mode)},
                               [&](int r) { return uint64_t(c.peer[r].dispatch_meta(slot)->mode); });
  if (alike != kOk) return differs(c, op, slot, alike);
  // How many tokens each has: no more than M, for which there is room; of an older routing as many as then.
  for (int s = 0; s < c.g.ranks; ++s) {
    const int32_t tokens = c.is_active(s) ? c.peer[s].dispatch_meta(slot)->tokens : 0;
    int32_t& known = op.routing.source_tokens[s];
    const int32_t most = op.fresh ? c.g.max_tokens : known;
    if (uint32_t(tokens) > uint32_t(most) || (!op.fresh && tokens != known)) {
      return c.refuse(Op::dispatch, Wrong::tokens, s, tokens, most);
    }
    known = tokens;
  }
  // Rows of this rank: of a new routing counted now, else as they were.
  if (op.fresh) {
    op.num_dropped = 0;
    per_expert(c.g.layout) ? place_expert_rows(c, op, slot) : place_rank_rows(c, op, slot);
    op.num_rows = total_rows(c, op);
  }
  if (c.g.scales == Scales::ue8m0_packed) {
    const int64_t plane = c.g.layout == Layout::expert_major ? c.g.slots
                          : c.g.layout == Layout::rank_major ? c.g.max_tokens
                          : op.exact_shapes                  ? op.num_rows
                                                             : c.g.capacity;
    op.packed_stride = int32_t((plane + 3) / 4 * 4);
  }
  if (per_expert(c.g.layout)) deliver_weights(c, op, slot);
  if (op.fresh && c.g.by_domain) keep_places(c, op, slot);
  return kOk;
}

Status dispatch_receive(Comm& c, DispatchOp& op) {
  const int slot = c.slot_of(op.seq);
  const Want want{Op::dispatch, Phase::payload, op.seq, op.clock.receive_ns};
  {
    Delivery delivery(c, op, slot);
    const Status status = c.wait(want, [&](int r) { return published(c, r, slot); }, [&] { return delivery.step(); });
    if (status != kOk) return status;
    delivery.finish();
  }
  record(c, op, slot);
  return give_back(c, op, slot, kOk);
}

}  // namespace cd
