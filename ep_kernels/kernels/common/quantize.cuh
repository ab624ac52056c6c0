// The fp8 quantiser, 16 columns per lane. LL quantises a packet in registers (layout/ll128.cuh). HT dispatch quantises
// a segment of a row in place, in shared memory: as many strides at a time as registers hold, without a branch per
// stride, so the loads, votes and conversions of several strides overlap, and each lane divides once for all of them.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "types.h"

namespace ep {

namespace quant {

constexpr i32 kWideColumns = 16;               // columns per lane
constexpr i32 kStride = 32 * kWideColumns;     // columns per warp
constexpr i32 kLanes = kBlock / kWideColumns;  // lanes that share a scale

// Strides at a time: 64 words per lane.
template <class T> constexpr i32 kUnroll = 16 / static_cast<i32>(sizeof(T));

// 16 columns as raw words.
template <class T>
struct Columns {
  static constexpr i32 kWords = 4 * static_cast<i32>(sizeof(T));
  u32 word[kWords];
};

template <class T>
__device__ __forceinline__ Columns<T> load_columns(const u8* from) {
  Columns<T> columns;
#pragma unroll
  for (i32 i = 0; i < Columns<T>::kWords / 4; ++i) {
    const Vec<u32, 4> four = reinterpret_cast<const Vec<u32, 4>*>(from)[i];
#pragma unroll
    for (i32 j = 0; j < 4; ++j) columns.word[4 * i + j] = four.at[j];
  }
  return columns;
}

template <class T>
__device__ __forceinline__ Columns<T> columns_of(const u32 (&word)[Columns<T>::kWords]) {
  Columns<T> columns;
#pragma unroll
  for (i32 i = 0; i < Columns<T>::kWords; ++i) columns.word[i] = word[i];
  return columns;
}

__device__ __forceinline__ Columns<f32> columns_of(const f32 (&value)[kWideColumns]) {
  Columns<f32> columns;
#pragma unroll
  for (i32 i = 0; i < kWideColumns; ++i) columns.word[i] = __float_as_uint(value[i]);
  return columns;
}

// Zeroes all but the first `count` columns; `count` is even for two-byte types.
template <class T>
__device__ __forceinline__ void cut(Columns<T>& columns, i32 count) {
#pragma unroll
  for (i32 i = 0; i < Columns<T>::kWords; ++i)
    if (i * 4 >= count * static_cast<i32>(sizeof(T))) columns.word[i] = 0;
}

template <class T>
__device__ __forceinline__ f32 column(const Columns<T>& columns, i32 i) {
  return value_in<T>(columns.word, i);
}

// Largest magnitude of 16 columns, as bits of T. Bits order as magnitudes do; infinity and NaN are above all finite
// values.
template <class T>
__device__ __forceinline__ u32 largest(const Columns<T>& columns) {
  u32 most = columns.word[0] & 0x7FFF7FFF;
#pragma unroll
  for (i32 i = 1; i < Columns<T>::kWords; ++i) most = ptx::max_u16x2(most, columns.word[i] & 0x7FFF7FFF);
  return max(most & 0xFFFF, most >> 16);
}
template <>
__device__ __forceinline__ u32 largest(const Columns<f32>& columns) {
  u32 most = 0;
#pragma unroll
  for (i32 i = 0; i < Columns<f32>::kWords; ++i) most = max(most, columns.word[i] & 0x7FFFFFFF);
  return most;
}

// fp32 bits of the largest finite magnitude.
template <class T>
__device__ __forceinline__ u32 finite_largest(const Columns<T>& columns) {
  f32 value[kWideColumns];
#pragma unroll
  for (i32 i = 0; i < kWideColumns; ++i) value[i] = column(columns, i);
  return finite_amax(value);
}

template <class T> constexpr u32 kInfinityOf = kInfinity;
template <> constexpr u32 kInfinityOf<bf16> = 0x7F80;
template <> constexpr u32 kInfinityOf<f16> = 0x7C00;

__device__ __forceinline__ u32 widen_bits(u32 bits, f32) { return bits; }
__device__ __forceinline__ u32 widen_bits(u32 bits, bf16) { return bits << 16; }
__device__ __forceinline__ u32 widen_bits(u32 bits, f16) { return __float_as_uint(widen(f16{static_cast<u16>(bits)})); }

// Reduces most[j] over groups of kAmong lanes: lane j of a group (mod the next power of two of N) gets the largest
// most[j]. The first steps halve the number of values per lane.
template <i32 kAmong, i32 N>
__device__ __forceinline__ u32 spread_largest(u32 (&most)[N]) {
  constexpr i32 kHalf = N > 8 ? 8 : N > 4 ? 4 : N > 2 ? 2 : N > 1 ? 1 : 0;
  static_assert(N <= 16 && 2 * kHalf <= kAmong);
#pragma unroll
  for (i32 step = kHalf; step >= 1; step /= 2) {
    const bool upper = lane_idx() & step;
#pragma unroll
    for (i32 j = 0; j < step; ++j) {
      const u32 other = j + step < N ? most[j + step] : most[j];
      most[j] = max(upper ? other : most[j], __shfl_xor_sync(~0u, upper ? most[j] : other, step));
    }
  }
#pragma unroll
  for (i32 step = kHalf == 0 ? 1 : 2 * kHalf; step < kAmong; step *= 2)
    most[0] = max(most[0], __shfl_xor_sync(~0u, most[0], step));
  return most[0];
}

template <class T>
__device__ __forceinline__ Vec<u32, 4> encode(const Columns<T>& columns, f32 inverse, bool all_finite) {
  Vec<u32, 4> q;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const f32 value[] = {column(columns, 4 * i), column(columns, 4 * i + 1), column(columns, 4 * i + 2),
                         column(columns, 4 * i + 3)};
    q.at[i] = all_finite ? encode4_finite(value[0], value[1], value[2], value[3], inverse) : encode4(value, inverse);
  }
  return q;
}

// in_place for columns first .. past - 1, at most kUnroll strides, of which some are not finite: stride by stride.
// Returns the scale of the block that this lane has in in_place.
template <class T>
__device__ __forceinline__ f32 in_place_slowly(u8* stage, i32 first, i32 past, bool power_of_two) {
  f32 mine = 1.0f;
#pragma unroll 1
  for (i32 stride = 0; first + stride * kStride < past; ++stride) {
    // The largest finite value of a block, spread over its lanes, gives the scale.
    const i32 base = first + stride * kStride + lane_idx() * kWideColumns;
    Columns<T> columns = {};
    if (base < past) columns = load_columns<T>(stage + base * static_cast<i32>(sizeof(T)));
    cut(columns, past - base);
    u32 amax = finite_largest(columns);
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const f32 scale = scale_of(amax, power_of_two);
    if (lane_idx() % kLanes == stride) mine = scale;
    __syncwarp();  // all lanes have read what the stores overwrite
    const Vec<u32, 4> q = encode<T>(columns, __fdiv_rn(1.0f, scale), false);
    if (base < past) *reinterpret_cast<Vec<u32, 4>*>(stage + base) = q;
  }
  return mine;
}

// Quantises `count` columns of T at `stage` in place, padded to 16 bytes. One warp; one lane per block of 128 calls
// keep(block, scale).
template <class T, class Keep>
__device__ __forceinline__ void in_place(u8* stage, i32 count, bool power_of_two, Keep keep) {
  constexpr i32 kStrides = kUnroll<T>;
  // This lane computes the scale of block `group` of stride `stride_idx`.
  const i32 stride_idx = lane_idx() % kLanes, group = lane_idx() / kLanes;
#pragma unroll 1
  for (i32 first = 0; first < count; first += kStrides * kStride) {
    const i32 base = first + lane_idx() * kWideColumns;
    Columns<T> columns[kStrides] = {};
    u32 amax[kStrides], most = 0;
#pragma unroll
    for (i32 j = 0; j < kStrides; ++j)
      if (base + j * kStride < count)
        columns[j] = load_columns<T>(stage + (base + j * kStride) * static_cast<i32>(sizeof(T)));
    if (count % kWideColumns != 0) {
#pragma unroll
      for (i32 j = 0; j < kStrides; ++j) cut(columns[j], count - base - j * kStride);
    }
#pragma unroll
    for (i32 j = 0; j < kStrides; ++j) most = max(most, amax[j] = largest<T>(columns[j]));
    f32 scale;
    if (__any_sync(~0u, most >= kInfinityOf<T>)) {
      scale = in_place_slowly<T>(stage, first, min(count, first + kStrides * kStride), power_of_two);
    } else {
      scale = scale_of(widen_bits(spread_largest<kLanes>(amax), T{}), power_of_two);
      const f32 inverse = __fdiv_rn(1.0f, scale);
      __syncwarp();  // all lanes have read what the stores overwrite
#pragma unroll
      for (i32 j = 0; j < kStrides; ++j) {
        const Vec<u32, 4> q = encode<T>(columns[j], __shfl_sync(~0u, inverse, group * kLanes + j), true);
        if (base + j * kStride < count) *reinterpret_cast<Vec<u32, 4>*>(stage + base + j * kStride) = q;
      }
    }
    const i32 block = first / kBlock + stride_idx * (32 / kLanes) + group;
    if (stride_idx < kStrides && block * kBlock < count) keep(block, scale);
  }
  __syncwarp();
}

}  // namespace quant

}  // namespace ep
