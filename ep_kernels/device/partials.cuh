// Sums of HT combine, from rows in shared memory: of expert rows into a partial as it travels, and of partials into z.
// Several warps share a row: 32 x N columns at a time, in turn. A lane keeps its columns' sums in registers from the
// first row to the last.
//
// A piece of a partial as it travels: its columns, padded to 16 bytes; fp8: then its scales, fp32, one per 128 columns.
#pragma once

constexpr bool kFp8 = sizeof(C) == 1;
constexpr i32 kMostBytes = 16384;  // of a piece, as y and as it travels
constexpr i32 kMostColumns = kMostBytes / static_cast<i32>(sizeof(Y) > sizeof(C) ? sizeof(Y) : sizeof(C));

__device__ __forceinline__ u32 padded16(u32 num_bytes) { return (num_bytes + 15) / 16 * 16; }

// Bytes of a piece as it travels.
__device__ __forceinline__ u32 home_bytes_of(const Rings& rings, i32 columns) {
  return kFp8 ? rings.home_bytes : padded16(columns * sizeof(C));
}

__device__ __forceinline__ i32 columns_of(const World& world, const Rings& rings, i32 piece) {
  return min(rings.columns, world.hidden - piece * rings.columns);
}

// N columns of a lane in each of G groups, W warps sharing the row.
template <i32 N, i32 W, i32 G = (kMostColumns + 32 * N * W - 1) / (32 * N * W)>
struct Sums {
  f32 at[G][N];
  i32 warp;

  __device__ __forceinline__ i32 group(i32 g) const { return (g * W + warp) * 32 * N; }
  __device__ __forceinline__ i32 column(i32 g) const { return group(g) + lane_idx() * N; }

  // Adds a row: load(column) -> Values; widen_values(Values, f32[N]) makes numbers of them. The first row sets the
  // sums, so that -0 stays -0; columns that are not there are 0 or, weighted, anything.
  template <class Values, bool kWeighted, class Load, class Widen>
  __device__ __forceinline__ void add(const Item& item, Load load, Widen widen_values) {
    if (item.what & kFirst)
      add_row<Values, kWeighted, true>(item, load, widen_values);
    else
      add_row<Values, kWeighted, false>(item, load, widen_values);
  }

  template <class Values, bool kWeighted, bool kSets, class Load, class Widen>
  __device__ __forceinline__ void add_row(const Item& item, Load load, Widen widen_values) {
    const i32 columns = item.columns();
    constexpr i32 kAhead = G < 4 ? G : 4;
#pragma unroll
    for (i32 base = 0; base < G; base += kAhead) {
      if (group(base) >= columns) break;
      Values values[kAhead] = {};
#pragma unroll
      for (i32 j = 0; j < kAhead; ++j)
        if (base + j < G && column(base + j) < columns) values[j] = load(column(base + j));
#pragma unroll
      for (i32 j = 0; j < kAhead; ++j) {
        if (base + j >= G) continue;
        f32 value[N];
        widen_values(values[j], value);
#pragma unroll
        for (i32 i = 0; i < N; ++i) {
          const f32 term = kWeighted ? __fmul_rn(value[i], item.weight) : value[i];
          at[base + j][i] = kSets ? term : __fadd_rn(at[base + j][i], term);
        }
      }
    }
  }

  // write(column, sums of the lane) for every group of 32 x N columns that has any; all lanes.
  template <class Write>
  __device__ __forceinline__ void finish(i32 columns, Write write) {
#pragma unroll
    for (i32 g = 0; g < G; ++g)
      if (group(g) < columns) write(column(g), at[g]);
  }
};

// ---- the owner: rows of y, weighted, to a partial as it travels ----

constexpr i32 kMadeColumns = kFp8 ? quant::kLaneColumns : kColumns<Y>;

template <bool kWeighted, class Totals>
__device__ __forceinline__ void add_row(Totals& sums, const Item& item, const u8* stage) {
  using Values = Vec<Y, kMadeColumns>;
  sums.template add<Values, kWeighted>(
      item, [&](i32 column) { return *reinterpret_cast<const Values*>(stage + column * sizeof(Y)); },
      [](const Values& values, f32(&value)[kMadeColumns]) {
#pragma unroll
        for (i32 i = 0; i < kMadeColumns; ++i) value[i] = widen(values.at[i]);
      });
}

template <class Totals>
__device__ __forceinline__ void write_partial(Totals& sums, const Rings& rings, i32 columns, u8* stage) {
  f32* scales = reinterpret_cast<f32*>(stage + padded16(rings.columns * sizeof(C)));
  sums.finish(columns, [&](i32 column, auto& sum) {
    if constexpr (kFp8) {
      f32 scale;
      const u32 q = quant::block(sum, false, &scale);
      if (column < columns) *reinterpret_cast<u32*>(stage + column) = q;
      if (lane_idx() == 0) scales[column / quant::kBlock] = scale;
    } else {
      Vec<C, kMadeColumns> rounded;
#pragma unroll
      for (i32 i = 0; i < kMadeColumns; ++i) rounded.at[i] = narrow<C>(sum[i]);
      if (column < columns) *reinterpret_cast<Vec<C, kMadeColumns>*>(stage + column * sizeof(C)) = rounded;
    }
  });
}

// ---- home: partials to z ----

constexpr i32 kHomeColumns = kColumns<Y>;

// Columns of a partial as they lie in a stage.
template <class Moved>
struct Landed {
  Vec<Moved, kHomeColumns> values;
  f32 scale;
};

template <class Moved>
__device__ __forceinline__ void widen_landed(const Landed<Moved>& landed, f32 (&value)[kHomeColumns]) {
  if constexpr (sizeof(Moved) == 1) {
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; i += quant::kLaneColumns) {
      u32 packed = 0;
      f32 four[quant::kLaneColumns];
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) packed |= static_cast<u32>(landed.values.at[i + j].bits) << (8 * j);
      quant::widen4(packed, four);
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) value[i + j] = __fmul_rn(four[j], landed.scale);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; ++i) value[i] = widen(landed.values.at[i]);
  }
}

template <bool kWeighted, class Totals>
__device__ __forceinline__ void add_partial(Totals& sums, const Rings& rings, const Item& item, const u8* stage) {
  const f32* scales = reinterpret_cast<const f32*>(stage + padded16(rings.columns * sizeof(C)));
  sums.template add<Landed<C>, kWeighted>(
      item,
      [&](i32 column) {
        Landed<C> landed;
        landed.values = *reinterpret_cast<const Vec<C, kHomeColumns>*>(stage + column * sizeof(C));
        if constexpr (kFp8) landed.scale = scales[column / quant::kBlock];
        return landed;
      },
      [](const Landed<C>& landed, f32(&value)[kHomeColumns]) { widen_landed(landed, value); });
}

template <class Totals>
__device__ __forceinline__ void write_z(Totals& sums, i32 columns, u8* z) {
  sums.finish(columns, [&](i32 column, auto& sum) {
    Vec<Y, kHomeColumns> rounded;
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; ++i) rounded.at[i] = narrow<Y>(sum[i]);
    if (column < columns) *reinterpret_cast<Vec<Y, kHomeColumns>*>(z + column * sizeof(Y)) = rounded;
  });
}
