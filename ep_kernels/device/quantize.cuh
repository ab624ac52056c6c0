// The quantiser of HT dispatch: a piece of a row in shared memory becomes fp8 where it lies, 16 columns per lane, a scale per 8 lanes.
// Same bits as quant::block.
#pragma once

namespace quant {

constexpr i32 kWideColumns = 16;               // of a lane
constexpr i32 kStride = 32 * kWideColumns;     // of a warp
constexpr i32 kTogether = 2;                   // strides at a time, so that their divisions overlap
constexpr i32 kLanes = kBlock / kWideColumns;  // lanes that share a scale

// 16 columns as they lie, 16 bytes at a time.
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

// Value i as fp32; exact.
__device__ __forceinline__ f32 column(const Columns<f32>& columns, i32 i) { return __uint_as_float(columns.word[i]); }
__device__ __forceinline__ f32 column(const Columns<bf16>& columns, i32 i) {
  const u32 pair = columns.word[i / 2];
  return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
}
__device__ __forceinline__ f32 column(const Columns<f16>& columns, i32 i) {
  return widen(f16{static_cast<u16>(columns.word[i / 2] >> (i % 2 * 16))});
}

// Largest magnitude of 16 columns, as bits of T: these are ordered as the magnitudes are, and what is not finite is above all.
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

template <class T> constexpr u32 kInfinityOf = kInfinity;
template <> constexpr u32 kInfinityOf<bf16> = 0x7F80;
template <> constexpr u32 kInfinityOf<f16> = 0x7C00;

__device__ __forceinline__ u32 widen_bits(u32 bits, f32) { return bits; }
__device__ __forceinline__ u32 widen_bits(u32 bits, bf16) { return bits << 16; }
__device__ __forceinline__ u32 widen_bits(u32 bits, f16) { return __float_as_uint(widen(f16{static_cast<u16>(bits)})); }

// Two strides of 16 columns per lane: bits of each block's amax to its 8 lanes, and whether all values of the warp are finite.
template <class T>
__device__ __forceinline__ bool block_amaxes(const Columns<T> (&columns)[kTogether], u32 (&amax)[kTogether]) {
  u32 most = 0;
#pragma unroll
  for (i32 j = 0; j < kTogether; ++j) most = max(most, amax[j] = largest<T>(columns[j]));
  const bool all_finite = !__any_sync(~0u, most >= kInfinityOf<T>);
#pragma unroll
  for (i32 j = 0; j < kTogether; ++j) {
    if (!all_finite) {
      f32 value[kWideColumns];
#pragma unroll
      for (i32 i = 0; i < kWideColumns; ++i) value[i] = column(columns[j], i);
      amax[j] = finite_amax(value);
    }
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) amax[j] = max(amax[j], __shfl_xor_sync(~0u, amax[j], step));
    if (all_finite) amax[j] = widen_bits(amax[j], T{});
  }
  return all_finite;
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

// One warp: `count` columns of T at `stage` become fp8 there; keep(block, scale) is called by one lane per block of 128.
template <class T, class Keep>
__device__ __forceinline__ void in_place(u8* stage, i32 count, bool power_of_two, Keep keep) {
#pragma unroll 1
  for (i32 base = lane_idx() * kWideColumns; __any_sync(~0u, base < count); base += kTogether * kStride) {
    Columns<T> columns[kTogether] = {};
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
      if (base + j * kStride < count)
        columns[j] = load_columns<T>(stage + (base + j * kStride) * static_cast<i32>(sizeof(T)));
    u32 amax[kTogether];
    const bool all_finite = block_amaxes<T>(columns, amax);
    f32 scale[kTogether];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) scale[j] = scale_of(amax[j], power_of_two);
    __syncwarp();  // everybody has read what is written over
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      const Vec<u32, 4> q = encode<T>(columns[j], __fdiv_rn(1.0f, scale[j]), all_finite);
      if (base + j * kStride >= count) continue;
      *reinterpret_cast<Vec<u32, 4>*>(stage + base + j * kStride) = q;
      if (lane_idx() % kLanes == 0) keep((base + j * kStride) / kBlock, scale[j]);
    }
  }
  __syncwarp();
}

}  // namespace quant
