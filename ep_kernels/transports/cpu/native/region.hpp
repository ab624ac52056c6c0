// The byte map of one rank's region, as types. A region is a memfd that only its owner writes; peers map it read-only,
// the event page excepted. So a slow, stale or dead peer can never corrupt anybody's memory.
//
//   page 0, 1..       meeting.hpp    event count; words of meetings
//   behind them       Control        sequence words: what the owner has published and consumed
//   dispatch slots    F x { SlotMeta | dest int32 [M,K] | weights f32 [M,K] | payload [M,row] | scales [M,scale] }
//   combine slots     F x { SlotMeta | rows int32 [R,M,K] | weights f32 [R,M,K] | partials [P,row] | scales [P,scale] }
//   expert outputs    F x { [rows, H] output dtype }: what combine_input() hands out
//
// A mirror is a copy of a region up to its expert outputs, which the network writes, on each other host (remote.hpp).
//
// F = max_in_flight, M = max tokens, K = topk, R = ranks, P = R*M (exact: R*M*K). Memory is sparse until touched.
#pragma once
#include <cstdint>
#include <type_traits>

#include "meeting.hpp"

namespace cd {

constexpr uint32_t kAbi = 8;  // raise when the meaning of a byte changes without its offset
constexpr int kMaxSlots = 64;
constexpr int kChunks = 16;

enum class Type : int32_t { bytes = 0, bf16 = 1, f16 = 2, f32 = 3, e4m3 = 4 };
enum class Layout : int32_t { expert_major = 0, grouped = 1, rank_major = 2, flat = 3 };
enum class Scales : int32_t { none = 0, fp32 = 1, ue8m0 = 2, ue8m0_packed = 3, caller = 4, mxfp8 = 5, nvfp4 = 6 };

constexpr int64_t size_of(Type t) {
  return t == Type::f32 ? 4 : (t == Type::bf16 || t == Type::f16) ? 2 : 1;
}
constexpr int64_t blocks_of(int64_t hidden) { return (hidden + 127) / 128; }

// Everything that fixes shapes. Equal on all ranks, `rank` and `local_experts` apart. Mirrored by native.py.
struct Geometry {
  int32_t rank, ranks, experts, local_experts, stride, topk, max_tokens, in_flight;
  int32_t hidden, exact, alignment, by_domain;
  Type x_type, out_type, combine_type;
  Layout layout;
  Scales scales;
  int32_t first_id, absent_id;  // of a row's experts, as the caller reads them
  int32_t two_hop_tokens;       // by_domain: a combine of so many tokens of a rank, at least, goes by collectors
  int64_t row_bytes;    // one payload row as it travels
  int64_t scale_bytes;  // its scales as they are staged; 0 = none
  int64_t capacity;     // rows of the output in all (per-expert slots for EXPERT_MAJOR times local_experts)
  int64_t slots;        // EXPERT_MAJOR: rows per expert
  int64_t y_rows;       // rows of one registered expert output buffer; the largest of all ranks
  int64_t timeout_ns;
};

constexpr bool per_expert(Layout l) { return l == Layout::expert_major || l == Layout::grouped; }

struct Control {
  Meeting meeting;
  // In a mirror: (seq << kChunks | bit per chunk of rows that is there), once all else of the slot is. In a region,
  // of a combine by collectors: the same of what ranks of the own host may read of the partials for other hosts.
  Word dispatch_arrived[kMaxSlots], combine_arrived[kMaxSlots];
  Word dispatch_published[kMaxSlots], dispatch_consumed[kMaxSlots];
  Word combine_published[kMaxSlots], combine_consumed[kMaxSlots];
};

enum class Source : int32_t { staged = 0, outputs = 1 };

// Messages of a slot to one other host: those with rows by chunk, all others together.
struct Parts {
  int32_t others;
  int32_t rows[kChunks];
};

constexpr uint64_t kAllChunks = (1ull << kChunks) - 1;

// A chunk: the tokens of one rank that a bit of `arrived` stands for. As many as there are 256 KiB of rows.
constexpr int num_chunks(int64_t tokens, int64_t row_bytes) {
  const int64_t n = tokens * row_bytes / (256 << 10);
  return n < 1 ? 1 : n < kChunks ? int(n) : kChunks;
}

struct Span {
  int64_t begin, end;
};

// Tokens of chunk `i` of a message of `tokens` tokens: none from the last chunk on. The first and the last have a
// quarter of the tokens of others, those beside them a half: rows leave early, and few are left when all have come.
constexpr Span chunk_of(int64_t tokens, int64_t row_bytes, int i) {
  const int n = num_chunks(tokens, row_bytes);
  int64_t before = 0, own = 0, all = 0;  // quarters
  for (int j = 0; j < n; ++j) {
    const int edge = j < n - 1 - j ? j : n - 1 - j, share = edge < 2 ? 1 << edge : 4;
    before += j < i ? share : 0;
    own += j == i ? share : 0;
    all += share;
  }
  return {tokens * before / all, tokens * (before + own) / all};
}

// Head of a dispatch or combine slot; valid once the slot's `published` word carries its sequence number.
struct alignas(64) SlotMeta {
  int64_t published_ns;  // CLOCK_MONOTONIC of the reader's host; in a mirror: when the last byte came
  int64_t arrived_ns;    // the same, in a mirror: when all but the rows had come
  uint64_t seq;          // as `published`
  uint64_t origin;       // sequence number of the dispatch that made the routing: equal on all ranks
  int32_t tokens;        // dispatch: T of the owner
  Source source;         // combine: rows lie in this slot, or in the owner's expert outputs (zero copy); other hosts
                         //   find them in this slot always
  int32_t outputs_slot;  // which expert output buffer
  int32_t mode;          // dispatch: the algorithm, equal on all ranks
  Parts parts[kMaxRanks];  // to each other host, by the lowest rank of the host; the head itself apart
};

// Bytes of a head that are used in a group of `ranks` ranks.
constexpr int64_t head_bytes(int ranks) { return int64_t(offsetof(SlotMeta, parts) + ranks * sizeof(Parts)); }

// Offsets of the parts; a pure function of Geometry.
struct RegionMap {
  int64_t d_dest, d_weights, d_rows, d_scales, d_size;
  int64_t c_table, c_row_weights, c_rows, c_scales, c_size;
  int64_t partials, c_row_bytes, c_scale_bytes, y_row_bytes, y_size;
  int64_t dispatch, combine, outputs, total;
  int64_t mirror;  // bytes of a mirror: all but the expert outputs

  explicit RegionMap(const Geometry& g) {
    // A dispatch slot: head, places, weights, rows, scales.
    const int64_t mk = int64_t(g.max_tokens) * g.topk;
    d_dest = sizeof(SlotMeta);
    d_weights = d_dest + mk * 4;
    d_rows = page_up(d_weights + mk * 4);
    d_scales = page_up(d_rows + g.max_tokens * g.row_bytes);
    d_size = page_up(d_scales + g.max_tokens * g.scale_bytes);

    // A combine slot: head, table of partials, row weights, partials, scales.
    partials = int64_t(g.ranks) * g.max_tokens * (g.exact ? g.topk : 1);
    c_row_bytes = g.hidden * size_of(g.combine_type);
    c_scale_bytes = g.combine_type == Type::e4m3 ? blocks_of(g.hidden) * 4 : 0;
    c_table = sizeof(SlotMeta);
    c_row_weights = c_table + g.ranks * mk * 4;
    c_rows = page_up(c_row_weights + g.ranks * mk * 4);
    c_scales = page_up(c_rows + partials * c_row_bytes);
    c_size = page_up(c_scales + partials * c_scale_bytes);

    y_row_bytes = g.hidden * size_of(g.out_type);
    y_size = page_up(g.y_rows * y_row_bytes);

    // The region: event page, control words, dispatch slots, combine slots, expert outputs.
    dispatch = kPage + page_up(sizeof(Control));
    combine = dispatch + g.in_flight * d_size;
    outputs = combine + g.in_flight * c_size;
    total = outputs + g.in_flight * y_size;
    mirror = outputs;
  }
};

// One region seen by address. `Byte` is const for a peer's.
template <typename Byte>
struct RegionView {
  Byte* base = nullptr;
  const RegionMap* map = nullptr;

  template <typename T>
  auto* at(int64_t offset) const {
    if constexpr (std::is_const_v<Byte>) {
      return reinterpret_cast<const T*>(base + offset);
    } else {
      return reinterpret_cast<T*>(base + offset);
    }
  }
  auto& control() const { return *at<Control>(kPage); }
  int64_t d(int slot) const { return map->dispatch + slot * map->d_size; }
  int64_t c(int slot) const { return map->combine + slot * map->c_size; }
  auto* dispatch_meta(int slot) const { return at<SlotMeta>(d(slot)); }
  auto* dest(int slot) const { return at<int32_t>(d(slot) + map->d_dest); }
  auto* weights(int slot) const { return at<float>(d(slot) + map->d_weights); }
  auto* rows(int slot) const { return at<uint8_t>(d(slot) + map->d_rows); }
  auto* scales(int slot) const { return at<uint8_t>(d(slot) + map->d_scales); }
  auto* combine_meta(int slot) const { return at<SlotMeta>(c(slot)); }
  auto* table(int slot) const { return at<int32_t>(c(slot) + map->c_table); }
  auto* row_weights(int slot) const { return at<float>(c(slot) + map->c_row_weights); }
  auto* partials(int slot) const { return at<uint8_t>(c(slot) + map->c_rows); }
  auto* partial_scales(int slot) const { return at<float>(c(slot) + map->c_scales); }
  auto* outputs(int slot) const { return at<uint8_t>(map->outputs + slot * map->y_size); }
};

}  // namespace cd
