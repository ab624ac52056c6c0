// A partial in the making: what both halves of a combine do to its columns.
#pragma once
#include <algorithm>

#include "args.hpp"

namespace cd {

constexpr int64_t kColumns = 1024;  // columns worked on at a time: a multiple of the fp8 block, small enough for L1
constexpr int kMaxTopk = 32;

// A partial in the making: rows and weights of one (token, rank), in ascending k.
struct Terms {
  const uint8_t* row[kMaxTopk];
  float weight[kMaxTopk];
  int n = 0;
  void push(const uint8_t* r, float w) {
    row[n] = r;
    weight[n++] = w;
  }
};

// acc [n] = sum of the terms' columns first .. first+n, +0 if there are none.
inline void reduce(const Comm& c, const Terms& terms, bool weighted, int64_t first, int64_t n, float* acc) {
  const Type type = c.g.out_type;
  const int64_t at = first * size_of(type);
  if (terms.n == 0) std::fill_n(acc, n, 0.0f);
  for (int i = 0; i < terms.n; ++i) {
    const uint8_t* row = terms.row[i] + at;
    if (weighted) {
      (i ? c.ops.scale_add : c.ops.scale)(acc, row, type, terms.weight[i], n);
    } else {
      (i ? c.ops.add : c.ops.load)(acc, row, type, n);
    }
  }
}

// Columns first .. first+n of a partial, as it travels: rounded to the combine dtype, or quantised.
inline void store_partial(const Comm& c, const float* acc, int64_t first, int64_t n, uint8_t* row, float* scales) {
  if (c.g.combine_type == Type::e4m3) {
    c.ops.quantize(row + first, scales + first / 128, acc, false, n);
  } else {
    c.ops.store(row + first * size_of(c.g.combine_type), acc, c.g.combine_type, n);
  }
}

// acc becomes what it would be after travelling in the combine dtype.
inline void cross(const Comm& c, float* acc, int64_t n) {
  if (c.g.combine_type != Type::e4m3) return c.ops.round(acc, c.g.combine_type, n);
  uint8_t q[kColumns];
  float scales[kColumns / 128];
  c.ops.quantize(q, scales, acc, false, n);
  c.ops.dequantize(acc, q, scales, n);
}

// A partial of one row without a weight has the row's own bits: the combine dtype is e4m3 or that of the rows.
inline bool is_row(const Comm& c, const Terms& terms, bool weighted) {
  return terms.n == 1 && !weighted && c.g.combine_type != Type::e4m3;
}

// Entries that a token has in tables of rows, and in tables of partials.
inline int width_of(const Comm& c) { return per_expert(c.g.layout) ? c.g.topk : 1; }
inline int partials_of_token(const Comm& c) { return c.g.exact ? width_of(c) : 1; }

}  // namespace cd
