// The send half of a combine: see combine.cpp.
#include <algorithm>
#include <cstring>

#include "collector.hpp"
#include "remote.hpp"

namespace cd {
namespace {

// Writes a partial of this rank to place `at` of the slot.
void stage_partial(Comm& c, const Terms& terms, bool weighted, int slot, int64_t at) {
  const Geometry& g = c.g;
  uint8_t* out = c.own.partials(slot) + at * c.map.c_row_bytes;
  // One row, unweighted: moved as it is.
  if (is_row(c, terms, weighted)) {
    c.ops.copy(out, terms.row[0], c.map.c_row_bytes);
    return;
  }
  // Else summed in fp32, some columns at a time, and rounded or quantised.
  float acc[kColumns];
  float* scales = c.own.partial_scales(slot) + at * blocks_of(g.hidden);
  for (int64_t first = 0; first < g.hidden; first += kColumns) {
    const int64_t n = std::min(kColumns, g.hidden - first);
    reduce(c, terms, weighted, first, n, acc);
    store_partial(c, acc, first, n, out, scales);
  }
}

// Whether a token of a source of another host has a row on any rank of this host.
bool is_for_this_host(const Comm& c, const CombineOp& op, int64_t token) {
  return ranks_in(c, op.routing.source_dest + token * c.g.topk) & c.active & c.here;
}

// Where the partials of the sources in `among` will lie: table[s][t][0] = the partial of everything that is held here
// of a token, -1 = nothing; exact: table[s][t][k]. Partials of one source follow each other, the sources ascend.
// `summed`: sources of which all that this host holds of a token gets one place.
void place_partials(Comm& c, const CombineOp& op, int slot, uint64_t among, uint64_t summed) {
  const Geometry& g = c.g;
  const int width = width_of(c);
  int32_t next = 0;
  for (int s = 0; s < g.ranks; ++s) {
    if (!(among >> s & 1)) continue;
    // The next free place for each token that has a row here, or for each of its rows.
    for (int64_t t = 0; t < op.routing.source_tokens[s]; ++t) {
      const int64_t token = int64_t(s) * g.max_tokens + t;
      int32_t* table = c.own.table(slot) + token * g.topk;
      const int32_t* rows = op.routing.rows + token * width;
      if (g.exact) {
        for (int k = 0; k < width; ++k) table[k] = rows[k] < 0 ? -1 : next++;
      } else if (summed >> s & 1) {
        table[0] = is_for_this_host(c, op, token) ? next++ : -1;
      } else {
        table[0] = std::any_of(rows, rows + width, [](int32_t row) { return row >= 0; }) ? next++ : -1;
      }
    }
  }
}

// Pre-reduces what is held here of some tokens of source s into the partials of the table.
void stage_partials(Comm& c, const CombineOp& op, int slot, int s, Span tokens) {
  const Geometry& g = c.g;
  const Routing& r = op.routing;
  const bool weighted = per_expert(g.layout) && op.apply_weights && !g.exact;
  const int width = width_of(c);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const int64_t token = int64_t(s) * g.max_tokens + t;
    const int32_t* table = c.own.table(slot) + token * g.topk;
    // The rows of the token that are here, with their weights.
    Terms terms;
    for (int k = 0; k < width; ++k) {
      const int32_t row = r.rows[token * width + k];
      if (row < 0) continue;
      terms.push(op.y + row * c.map.y_row_bytes, weighted ? r.row_weights[token * g.topk + k] : 1.0f);
      if (g.exact) {
        stage_partial(c, terms, false, slot, table[k]);
        terms.n = 0;
      }
    }
    // Their sum is the partial; an exact combine has staged each by itself.
    if (terms.n) stage_partial(c, terms, weighted, slot, table[0]);
  }
}

// Registered rows: the table alone, for sources of this host. table[s][t][k] = row of the expert outputs (rank-wise:
// k = 0 only).
void stage_table(Comm& c, const CombineOp& op, int slot) {
  const Geometry& g = c.g;
  const int width = width_of(c);
  for (int s = 0; s < g.ranks; ++s) {
    if (!c.is_here(s)) continue;
    const int64_t token = int64_t(s) * g.max_tokens;
    int32_t* table = c.own.table(slot) + token * g.topk;
    const int32_t* rows = op.routing.rows + token * width;
    for (int64_t t = 0; t < op.routing.source_tokens[s]; ++t) memcpy(table + t * g.topk, rows + t * width, width * 4);
  }
}

// Numbers that travel beside the rows: [s][t][k], whether the source rank reads them or not.
void stage_row_weights(Comm& c, const CombineOp& op, int slot) {
  const Geometry& g = c.g;
  const bool expert_rows = per_expert(g.layout);
  for (int s = 0; s < g.ranks; ++s) {
    for (int64_t t = 0; t < op.routing.source_tokens[s]; ++t) {
      const int64_t token = int64_t(s) * g.max_tokens + t;
      float* out = c.own.row_weights(slot) + token * g.topk;
      for (int k = 0; k < g.topk; ++k) {
        const int64_t row = op.routing.rows[expert_rows ? token * g.topk + k : token];
        out[k] = row < 0 ? 0.0f : op.row_weights[expert_rows ? row : row * g.topk + k];
      }
    }
  }
}

}  // namespace

static Status send(Comm& c, CombineOp& op) {
  op.clock.start_ns = now_ns();
  expect(c, true);
  op.seq = c.next[int(Op::combine)];
  const int slot = c.slot_of(op.seq);
  if (op.seq > c.base[int(Op::combine)] + c.g.in_flight) {
    const Status status = c.wait({Op::combine, Phase::credit, op.seq - c.g.in_flight}, [&](int r) {
      return c.peer[r].control().combine_consumed[slot].v.load(std::memory_order_acquire);
    });
    if (status != kOk) return status;
  }
  c.take(Op::combine);
  SlotMeta& meta = *c.own.combine_meta(slot);
  // A buffer is lent to one combine at a time: outputs_busy holds one number.
  const bool lend = op.outputs_slot >= 0 && c.outputs_busy[op.outputs_slot] == 0;
  meta.source = lend ? Source::outputs : Source::staged;
  meta.outputs_slot = op.outputs_slot;
  if (lend) {
    c.outputs_busy[op.outputs_slot] = op.seq;
    stage_table(c, op, slot);
  }
  // In two hops this rank sends the sums of those for whom it collects, else its own partials for all.
  const bool two_hops = has_two_hops(c, op.routing);
  const uint64_t sends = two_hops ? c.collects : ~0ull;
  place_partials(c, op, slot, lend ? ~c.here : ~0ull, two_hops ? c.collects : 0);
  if (op.row_weights) stage_row_weights(c, op, slot);
  meta.tokens = op.routing.tokens;
  meta.origin = op.routing.origin;
  meta.seq = op.seq;
  Status sent = send_tables(c, op, slot, sends);
  // Partials for other hosts, chunk by chunk: one is under way while the next is staged.
  Word& staged = c.own.control().combine_arrived[slot];
  if (two_hops) begin_collecting(c, op, slot);
  const int32_t* tokens = op.routing.source_tokens;
  const int32_t most = *std::max_element(tokens, tokens + c.g.ranks);
  const int chunks = c.rails ? num_chunks(most, c.map.c_row_bytes) : 0;
  for (int chunk = 0; sent == kOk && chunk < chunks; ++chunk) {
    for (int s = 0; s < c.g.ranks; ++s) {
      if (!c.is_here(s)) stage_partials(c, op, slot, s, chunk_of(tokens[s], c.map.c_row_bytes, chunk));
    }
    if (two_hops) {
      c.publish(staged, op.seq << kChunks | (chunk + 1 < chunks ? (2ull << chunk) - 1 : kAllChunks));
      while ((sent = c.progress()) == kOk) {
      }
      if (sent == kNothing) sent = kOk;
    } else {
      sent = send_partials(c, op, slot, chunk, sends);
    }
  }
  if (sent == kOk && two_hops) sent = send_late_heads(c, op, slot, sends);
  if (sent != kOk) return sent;
  for (int s = 0; s < c.g.ranks && !lend; ++s) {
    if (c.is_here(s)) stage_partials(c, op, slot, s, {0, tokens[s]});
  }
  meta.published_ns = now_ns();
  c.publish(c.own.control().combine_published[slot], op.seq);
  op.clock.send_ns = now_ns() - op.clock.start_ns;
  return kOk;
}

Status combine_send(Comm& c, CombineOp& op) {
  op.to_collect = 0;
  const Status status = send(c, op);
  if (status != kOk) c.collecting[c.slot_of(op.seq)] = nullptr;
  return status;
}

}  // namespace cd
