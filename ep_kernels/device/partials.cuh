// Sums of HT combine, from rows in shared memory: of expert rows into a partial as it travels, and of partials into z.
// Several warps share a row, each a span of its columns, 32 x N at a time. A lane keeps its columns' sums in registers from
// the first row to the last.
//
// A piece of a partial as it travels: its columns, padded to 16 bytes; fp8: then its scales, fp32, one per 128 columns.
#pragma once

constexpr i32 kMostOfFp8 = 14336, kMostBytes = 16384;  // of a piece, as y and as it travels
constexpr i32 kMostColumns = (kFp8 ? kMostOfFp8 : kMostBytes) / static_cast<i32>(sizeof(Y) > sizeof(C) ? sizeof(Y) : sizeof(C));

__device__ __forceinline__ u32 padded16(u32 num_bytes) { return (num_bytes + 15) / 16 * 16; }

// Bytes of a piece as it travels.
__device__ __forceinline__ u32 home_bytes_of(const Rings& rings, i32 columns) {
  return kFp8 ? rings.home_bytes : padded16(columns * sizeof(C));
}

__device__ __forceinline__ i32 columns_of(const World& world, const Rings& rings, i32 piece) {
  return min(rings.columns, world.hidden - piece * rings.columns);
}

// N columns of a lane in each of G groups at most.
template <i32 N, i32 G>
struct Sums {
  static constexpr i32 kColumns = N, kGroups = G;
  f32 at[G][N];
  i32 begin, end;  // this warp's columns, of those that there are

  __device__ __forceinline__ i32 group(i32 g) const { return begin + g * 32 * N; }
  __device__ __forceinline__ i32 column(i32 g) const { return group(g) + lane_idx() * N; }

  // Adds rows, one after the other: load(row, column) -> Values; widen_values(Values, f32[N]) makes numbers of them. The first row
  // of a sum sets it, so that -0 stays -0; columns that are not there are 0 or, weighted, anything.
  template <class Values, bool kWeighted, i32 kRows, class Load, class Widen>
  __device__ __forceinline__ void add(const Item (&items)[kRows], Load load, Widen widen_values) {
    if (items[0].what & kFirst)
      add_rows<Values, kWeighted, true>(items, load, widen_values);
    else
      add_rows<Values, kWeighted, false>(items, load, widen_values);
  }

  template <class Values, bool kWeighted, bool kSets, i32 kRows, class Load, class Widen>
  __device__ __forceinline__ void add_rows(const Item (&items)[kRows], Load load, Widen widen_values) {
    const i32 columns = min(items[0].columns(), end);
    constexpr i32 kAhead = G < 4 ? G : 4;
#pragma unroll
    for (i32 base = 0; base < G; base += kAhead) {
      if (group(base) >= columns) break;
      Values values[kRows][kAhead] = {};
#pragma unroll
      for (i32 row = 0; row < kRows; ++row)
#pragma unroll
        for (i32 j = 0; j < kAhead; ++j)
          if (base + j < G && column(base + j) < columns) values[row][j] = load(row, column(base + j));
#pragma unroll
      for (i32 j = 0; j < kAhead; ++j) {
        if (base + j >= G || (N > quant::kLaneColumns && group(base + j) >= columns)) break;
#pragma unroll
        for (i32 row = 0; row < kRows; ++row) {
          f32 value[N];
          widen_values(values[row][j], value);
#pragma unroll
          for (i32 i = 0; i < N; ++i) {
            const f32 term = kWeighted ? __fmul_rn(value[i], items[row].weight) : value[i];
            at[base + j][i] = kSets && row == 0 ? term : __fadd_rn(at[base + j][i], term);
          }
        }
      }
    }
  }

  // visit(g) for every group of 32 x N columns that has any; all lanes.
  template <class Visit>
  __device__ __forceinline__ void for_groups(i32 columns, Visit visit) {
#pragma unroll
    for (i32 g = 0; g < G; ++g)
      if (group(g) < columns) visit(g);
  }
};

// Of `warps` warps that share `columns`, number `warp`.
template <class Totals>
__device__ __forceinline__ Totals sums_of(i32 warp, i32 warps, i32 columns) {
  constexpr i32 kGroup = 32 * Totals::kColumns;
  const i32 groups = (columns + kGroup - 1) / kGroup, span = (groups + warps - 1) / warps * kGroup;
  Totals sums;
  sums.begin = warp * span;
  sums.end = sums.begin + span;
  return sums;
}

// The sums, rounded to T.
template <class T, class Totals>
__device__ __forceinline__ void write_rounded(Totals& sums, i32 num_columns, u8* to) {
  const i32 columns = min(num_columns, sums.end);
  sums.for_groups(columns, [&](i32 g) {
    Vec<T, Totals::kColumns> rounded;
#pragma unroll
    for (i32 i = 0; i < Totals::kColumns; ++i) rounded.at[i] = narrow<T>(sums.at[g][i]);
    const i32 column = sums.column(g);
    if (column < columns) *reinterpret_cast<Vec<T, Totals::kColumns>*>(to + column * sizeof(T)) = rounded;
  });
}

// ---- the owner: rows of y, weighted, to a partial as it travels ----

constexpr i32 kMadeColumns = kFp8 ? quant::kLaneColumns : kColumns<Y>;

template <bool kWeighted, class Totals>
__device__ __forceinline__ void add_row(Totals& sums, const Item& item, const u8* stage) {
  using Values = Words<Y, kMadeColumns>;
  const Item items[] = {item};
  sums.template add<Values, kWeighted>(
      items, [&](i32, i32 column) { return *reinterpret_cast<const Values*>(stage + column * sizeof(Y)); },
      [](const Values& values, f32(&value)[kMadeColumns]) {
#pragma unroll
        for (i32 i = 0; i < kMadeColumns; ++i) value[i] = value_in<Y>(values.at, i);
      });
}

// A warp's share of a partial as fp8, up to eight groups at a time. A lane divides for a group, and nothing branches group by group:
// the groups' latencies overlap.
template <class Totals>
__device__ __forceinline__ void write_quantised(Totals& sums, i32 num_columns, u8* stage, f32* scales) {
  constexpr i32 kRounds = (Totals::kGroups + 7) / 8, kTogether = Totals::kGroups / kRounds;
  static_assert(kRounds * kTogether == Totals::kGroups);
  const i32 columns = min(num_columns, sums.end);
#pragma unroll
  for (i32 base = 0; base < Totals::kGroups; base += kTogether) {
    if (base != 0 && sums.group(base) >= columns) break;
    u32 most[kTogether], all = 0;
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      most[j] = sums.column(base + j) < columns ? quant::amax(sums.at[base + j]) : 0;
      all = max(all, most[j]);
    }
    if (__any_sync(~0u, all >= quant::kInfinity)) {
#pragma unroll
      for (i32 j = 0; j < kTogether; ++j) {
        most[j] = sums.column(base + j) < columns ? quant::finite_amax(sums.at[base + j]) : 0;
        quant::make_nan(sums.at[base + j]);
      }
    }
    const f32 scale = quant::scale_of(quant::spread_largest<32>(most), false), inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      const f32 by = __shfl_sync(~0u, inverse, j);
      const f32(&sum)[4] = sums.at[base + j];
      const u32 q = quant::encode4_finite(sum[0], sum[1], sum[2], sum[3], by);
      if (sums.column(base + j) < columns) *reinterpret_cast<u32*>(stage + sums.column(base + j)) = q;
    }
    const i32 mine = sums.group(base + lane_idx());
    if (lane_idx() < kTogether && mine < columns) scales[mine / quant::kBlock] = scale;
  }
}

template <class Totals>
__device__ __forceinline__ void write_partial(Totals& sums, const Rings& rings, i32 columns, u8* stage) {
  if constexpr (kFp8) {
    write_quantised(sums, columns, stage, reinterpret_cast<f32*>(stage + padded16(rings.columns * sizeof(C))));
  } else {
    write_rounded<C>(sums, columns, stage);
  }
}

// ---- home: partials to z ----

constexpr i32 kHomeColumns = kColumns<Y>;

// Columns of a partial as they lie in a stage.
template <class Moved>
struct Landed {
  Words<Moved, kHomeColumns> values;
  f32 scale;
};

template <class Moved>
__device__ __forceinline__ void widen_landed(const Landed<Moved>& landed, f32 (&value)[kHomeColumns]) {
  if constexpr (sizeof(Moved) == 1) {
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; i += quant::kLaneColumns) {
      f32 four[quant::kLaneColumns];
      quant::widen4(landed.values.at[i / quant::kLaneColumns], four);
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) value[i + j] = __fmul_rn(four[j], landed.scale);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; ++i) value[i] = value_in<Moved>(landed.values.at, i);
  }
}

template <bool kWeighted, i32 kRows, class Totals>
__device__ __forceinline__ void add_partials(Totals& sums, const Rings& rings, const Item (&items)[kRows], u8* const (&stages)[kRows]) {
  sums.template add<Landed<C>, kWeighted>(
      items,
      [&](i32 row, i32 column) {
        Landed<C> landed;
        landed.values = *reinterpret_cast<const decltype(landed.values)*>(stages[row] + column * sizeof(C));
        if constexpr (kFp8) {
          const f32* scales = reinterpret_cast<const f32*>(stages[row] + padded16(rings.columns * sizeof(C)));
          landed.scale = scales[column / quant::kBlock];
        }
        return landed;
      },
      [](const Landed<C>& landed, f32(&value)[kHomeColumns]) { widen_landed(landed, value); });
}
