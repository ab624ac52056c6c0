// The partials of low-latency combine: where they lie as lines, how a unit is made of expert rows and added up at home.
#pragma once

constexpr i32 PER_EXPERT = 0, PER_RANK = 1, EXACT = 2;
constexpr i32 kSame = 0, kFailed = 1,
              kDiffers = 2;  // verdict of a block: all ranks combine this routing, a wait failed, they do not
constexpr bool kFp8 = sizeof(C) == 1;
constexpr i32 kVector = 16 / static_cast<i32>(sizeof(C));  // columns of a 16-byte vector as it travels
constexpr i32 kUnitWidth = kFp8 ? kUnitColumns : kUnitData / static_cast<i32>(sizeof(C));  // columns of a unit
constexpr i32 kTogether = !kFp8 ? 4 : KIND == EXACT ? 1 : 2;  // partials that a warp polls at a time

__device__ __forceinline__ i64 position_of(const World& world, i32 owner, i32 position) {
  return static_cast<i64>(owner) * world.max_tokens + position;
}

// Where the rows begin that come home to a rank: unit row * home_units + index, fewer than 2^31, as a unit is of 1024 bytes.
__device__ __forceinline__ u8* home_lines_at(const CombineArgs& args, i32 rank) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.home_lines + args.slot * map.home_lines_stride);
}

__device__ __forceinline__ u8* weight_lines_at(const CombineArgs& args, i32 rank, i64 position) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.weight_lines + args.slot * map.weight_lines_stride) +
         position * lines_for(args.world.topk, kLineInts) * kLineBytes;
}

// {seq of the dispatch whose routing `from` combines, seq}.
__device__ __forceinline__ u8* head_at(const CombineArgs& args, i32 at, i32 from) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, at, map.home_heads + args.slot * map.home_heads_stride) + from * 16;
}

// First column of this lane's first vector in a unit; its second comes kSecond bytes later as they travel.
__device__ __forceinline__ i32 first_column() { return first_offset() / static_cast<i32>(sizeof(C)); }
constexpr i32 kSecondColumn = kSecond / static_cast<i32>(sizeof(C));

// A unit of one partial (or, exact, of one routed row), as a warp sees it.
struct Task {
  i32 source, position, index;
  i32 only;     // exact: the k whose row travels
  i32 place;    // this lane's k: row of y
  f32 weight;   // this lane's k
  u32 taken;    // ballot of lanes whose row the partial takes
  i32 landing;  // exact: row of home_lines at the source
};

template <i32 N>
__device__ __forceinline__ Vector pack(const f32 (&value)[N]) {
  Vec<C, N> rounded;
#pragma unroll
  for (i32 i = 0; i < N; ++i) rounded.at[i] = narrow<C>(value[i]);
  return *reinterpret_cast<Vector*>(&rounded);
}

template <i32 N>
__device__ __forceinline__ Unit unit_of(const f32 (&first)[N], const f32 (&second)[N]) {
  if constexpr (N == 16)
    return quantize_unit(quant::columns_of(first), quant::columns_of(second), false);
  else
    return {pack(first), pack(second)};
}

// What a vector takes of a row of y.
using RowVector = Words<Y, kVector>;

// -0, to which a first term may be added like any other, for -0 + x is x, and -0 + -0 is -0; 0 where there are no terms.
template <i32 N>
__device__ __forceinline__ void begin_sum(bool terms, f32 (&sum)[N]) {
#pragma unroll
  for (i32 i = 0; i < N; ++i) sum[i] = terms ? -0.0f : 0.0f;
}

template <i32 N>
__device__ __forceinline__ void add_columns(const f32 (&term)[N], f32 (&sum)[N]) {
#pragma unroll
  for (i32 i = 0; i < N; ++i) sum[i] = __fadd_rn(sum[i], term[i]);
}

// This lane's part of a row: both its vectors, weighted.
__device__ __forceinline__ void add_row(const RowVector (&y)[2], f32 weight, f32 (&sum)[2][kVector]) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    f32 term[kVector];
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) term[i] = __fmul_rn(value_in<Y>(y[half].at, i), weight);
    add_columns(term, sum[half]);
  }
}

template <i32 N>
__device__ __forceinline__ void unpack(const Vector& value, f32 scale, f32 (&out)[N]) {
  if constexpr (kFp8) {
#pragma unroll
    for (i32 i = 0; i < N; i += 4) {
      f32 four[4];
      quant::widen4(word_of(value, i / 4), four);
#pragma unroll
      for (i32 j = 0; j < 4; ++j) out[i + j] = __fmul_rn(four[j], scale);
    }
  } else {
    const Vec<C, N> loaded = *reinterpret_cast<const Vec<C, N>*>(&value);
#pragma unroll
    for (i32 i = 0; i < N; ++i) out[i] = widen(loaded.at[i]);
  }
}

template <i32 N>
__device__ __forceinline__ void add_term(const Vector& value, f32 scale, f32 weight, f32 (&sum)[N]) {
  f32 term[N];
  unpack(value, scale, term);
#pragma unroll
  for (i32 i = 0; KIND == EXACT && i < N; ++i) term[i] = __fmul_rn(term[i], weight);
  add_columns(term, sum);
}

template <i32 N>
__device__ __forceinline__ void write_columns(const CombineArgs& args, i64 token, i32 column, const f32 (&value)[N]) {
  constexpr i32 kStep = N < kColumns<Y> ? N : kColumns<Y>;
#pragma unroll
  for (i32 i = 0; i < N; i += kStep) {
    Vec<Y, kStep> z;
#pragma unroll
    for (i32 j = 0; j < kStep; ++j) z.at[j] = narrow<Y>(value[i + j]);
    if (column + i < args.world.hidden)
      *reinterpret_cast<Vec<Y, kStep>*>(reinterpret_cast<Y*>(args.z) + token * args.world.hidden + column + i) = z;
  }
}
