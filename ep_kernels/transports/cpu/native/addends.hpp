// What a token's sum is made of: partials or rows of several ranks, where they lie and how their columns are read. For
// whoever sums: the source rank, and the collector of another host (collector.hpp).
#pragma once
#include <algorithm>

#include "partials.hpp"

namespace cd {

// One rank's contribution to the tokens of one source in a combine, as those who sum read it.
struct Contribution {
  const int32_t* table;      // [T, K]
  const float* row_weights;  // [T, K]
  const uint8_t* rows;
  const float* scales;
  bool direct;
  uint32_t num_rows;  // that a place of the table may name
};

// A source of another host finds partials in the slot always, one of this host perhaps the experts' own rows.
inline Contribution contribution_of(const Comm& c, int r, int slot, int source) {
  const SlotMeta& meta = *c.peer[r].combine_meta(slot);
  const int64_t begin = int64_t(source) * c.g.max_tokens * c.g.topk;
  const bool direct = meta.source == Source::outputs && c.is_here(r) && c.is_here(source);
  const int32_t buffer = meta.outputs_slot;
  const int64_t num_rows = !direct ? c.map.partials : uint32_t(buffer) < uint32_t(c.g.in_flight) ? c.g.y_rows : 0;
  return {c.peer[r].table(slot) + begin, c.peer[r].row_weights(slot) + begin,
          direct ? c.peer[r].outputs(buffer) : c.peer[r].partials(slot), c.peer[r].partial_scales(slot),
          direct, uint32_t(num_rows)};
}

constexpr int32_t kNone = -1;  // in a table: nothing is held there

// The first place found that cannot be, by whichever thread; none: rank -1.
class WrongPlace {
 public:
  void note(int rank, int32_t place) {
    uint64_t none = 0;
    found_.compare_exchange_strong(none, uint64_t(rank + 1) << 32 | uint32_t(place));
  }
  int rank() const { return int(found_.load() >> 32) - 1; }
  int32_t place() const { return int32_t(uint32_t(found_.load())); }

 private:
  std::atomic<uint64_t> found_{0};
};

// A place that rank r's table names, read once: a peer may write the table at any time. kNone: there is no row.
inline int64_t place_in(const Contribution& from, int r, const int32_t& entry, WrongPlace& wrong) {
  const int32_t at = __atomic_load_n(&entry, __ATOMIC_RELAXED);
  if (uint32_t(at) < from.num_rows) return at;
  if (at != kNone) wrong.note(r, at);
  return kNone;
}

// One addend of a token's sum: a partial or row that was moved, or rows of which the source rank makes the partial;
// weighted there if exact. As made: no rows, so zeros.
struct Addend {
  const uint8_t* moved = nullptr;  // as staged, combine dtype
  const float* scales = nullptr;
  Terms terms;  // direct
  int domain = 0;  // lowest rank of the host that it comes from
  bool weighted = false;
  float weight = 1.0f;  // exact
};

inline void point(const Comm& c, Addend& a, const Contribution& from, int64_t at) {
  a.moved = from.rows + at * c.map.c_row_bytes;
  a.scales = from.scales + at * blocks_of(c.g.hidden);
}

// acc [n] = columns first .. first+n of the addend.
inline void fetch(const Comm& c, const Addend& a, int64_t first, int64_t n, float* acc) {
  if (!a.moved) {
    reduce(c, a.terms, a.weighted, first, n, acc);
    if (!is_row(c, a.terms, a.weighted)) cross(c, acc, n);
  } else if (c.g.combine_type == Type::e4m3) {
    c.ops.dequantize(acc, a.moved + first, a.scales + first / 128, n);
  } else {
    c.ops.load(acc, a.moved + first * size_of(c.g.combine_type), c.g.combine_type, n);
  }
}

// The ranks of which `dest` [K] names a place.
inline uint64_t ranks_in(const Comm& c, const int32_t* dest) {
  uint64_t ranks = 0;
  for (int k = 0; k < c.g.topk; ++k) {
    if (dest[k] >= 0) ranks |= 1ull << (dest[k] / c.g.stride);
  }
  return ranks;
}

}  // namespace cd
