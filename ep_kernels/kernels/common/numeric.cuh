// Payload types, their conversions, and the scalar parts of the fp8 quantiser; ep_kernels/quant.py defines the bits.
// Every sum and product is one IEEE fp32 operation, rounded to nearest even, never fused.
#pragma once

#include "common/ptx.cuh"
#include "types.h"

namespace ep {

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct e4m3 { u8 bits; };
template <class T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;

__device__ __forceinline__ f32 widen(f32 value) { return value; }
__device__ __forceinline__ f32 widen(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }
__device__ __forceinline__ f32 widen(f16 value) { return ptx::f32_from_f16(value.bits); }

template <class T> __device__ __forceinline__ T narrow(f32 value);
template <> __device__ __forceinline__ f32 narrow<f32>(f32 value) { return value; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(f32 value) { return {ptx::bf16_from_f32(value)}; }
template <> __device__ __forceinline__ f16 narrow<f16>(f32 value) { return {ptx::f16_from_f32(value)}; }

// N values, loaded and stored as one access (16 bytes at most).
template <class T, i32 N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec { T at[N]; };

// N values of T as raw 32-bit words. With 16-bit elements the compiler would unpack them right after the load, and so
// wait for each.
template <class T, i32 N>
using Words = Vec<u32, N * static_cast<i32>(sizeof(T)) / 4>;

// N values of a row from `column` on, loaded 16 bytes at a time; 0 past the end of the row.
template <class T, i32 N>
__device__ __forceinline__ Words<T, N> load_words(const T* row, i32 column, i32 hidden) {
  constexpr i32 kWords = N * static_cast<i32>(sizeof(T)) / 4, kStep = kWords < 4 ? kWords : 4;
  Words<T, N> words = {};
#pragma unroll
  for (i32 i = 0; i < kWords; i += kStep) {
    const i32 at = column + i * 4 / static_cast<i32>(sizeof(T));
    if (at >= hidden) continue;
    const Vec<u32, kStep> loaded = *reinterpret_cast<const Vec<u32, kStep>*>(row + at);
#pragma unroll
    for (i32 j = 0; j < kStep; ++j) words.at[i + j] = loaded.at[j];
  }
  return words;
}

// Value i of such words, widened to fp32; exact.
template <class T>
__device__ __forceinline__ f32 value_in(const u32* word, i32 i) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(word[i]);
  const u32 pair = word[i / 2];
  if constexpr (kIsBf16<T>) return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
  return widen(f16{static_cast<u16>(pair >> (i % 2 * 16))});
}

// Values of T in a 16-byte access.
template <class T> constexpr i32 kColumns = 16 / static_cast<i32>(sizeof(T));

namespace quant {

constexpr i32 kBlock = 128;       // columns that share a scale
constexpr i32 kLaneColumns = 4;   // columns per lane where a warp handles one block
constexpr u32 kNan = 0x7F, kInfinity = 0x7F800000;  // e4m3 NaN; fp32 infinity
constexpr f32 kMax = 448.0f, kMinScale = 1.17549435e-38f, kLargest = 3.40282347e38f;

// Scale formats, as in args.power_of_two.
constexpr i32 kFp32 = 0, kPowerOfTwo = 1, kPacked = 2;

__device__ __forceinline__ bool finite(f32 value) { return fabsf(value) <= kLargest; }

// fp32 bits of the largest magnitude. Bits order as magnitudes do; infinity and NaN are above all finite values.
template <i32 N>
__device__ __forceinline__ u32 amax(const f32 (&value)[N]) {
  f32 most = fabsf(value[0]);
#pragma unroll
  for (i32 i = 1; i < N; ++i) most = ptx::max_or_nan(most, fabsf(value[i]));
  return __float_as_uint(most);
}

// The same over the finite values only.
template <i32 N>
__device__ __forceinline__ u32 finite_amax(const f32 (&value)[N]) {
  const u32 all = amax(value);
  if (all < kInfinity) return all;
  u32 most = 0;
#pragma unroll
  for (i32 i = 0; i < N; ++i)
    if (finite(value[i])) most = max(most, __float_as_uint(fabsf(value[i])));
  return most;
}

__device__ __forceinline__ f32 scale_of(u32 amax, bool power_of_two) {
  const f32 scale = amax == 0 ? 1.0f : fmaxf(__fdiv_rn(__uint_as_float(amax), kMax), kMinScale);
  const u32 bits = __float_as_uint(scale);
  return power_of_two ? __uint_as_float(((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23) : scale;
}

// Replaces infinities by NaN; fp8 has no infinity.
template <i32 N>
__device__ __forceinline__ void make_nan(f32 (&value)[N]) {
#pragma unroll
  for (i32 i = 0; i < N; ++i) value[i] = finite(value[i]) ? value[i] : __uint_as_float(0x7FFFFFFF);
}

// Four finite values as fp8, the first in the low byte.
__device__ __forceinline__ u32 encode4_finite(f32 a, f32 b, f32 c, f32 d, f32 inverse) {
  const u32 low = ptx::e4m3x2_from_f32(__fmul_rn(b, inverse), __fmul_rn(a, inverse));
  const u32 high = ptx::e4m3x2_from_f32(__fmul_rn(d, inverse), __fmul_rn(c, inverse));
  return low | high << 16;
}

// Four values, finite or not, as fp8, the first in the low byte.
__device__ __forceinline__ u32 encode4(const f32* value, f32 inverse) {
  u32 packed = encode4_finite(value[0], value[1], value[2], value[3], inverse);
  if (finite(value[0]) && finite(value[1]) && finite(value[2]) && finite(value[3])) return packed;
#pragma unroll
  for (i32 i = 0; i < 4; ++i)
    if (!finite(value[i])) packed = (packed & ~(0xFFu << (8 * i))) | kNan << (8 * i);
  return packed;
}

__device__ __forceinline__ void widen4(u32 packed, f32 (&value)[kLaneColumns]) {
#pragma unroll
  for (i32 pair = 0; pair < 2; ++pair) {
    const u32 halves = ptx::f16x2_from_e4m3x2(static_cast<u16>(packed >> (16 * pair)));
    value[2 * pair] = ptx::f32_from_f16(static_cast<u16>(halves));
    value[2 * pair + 1] = ptx::f32_from_f16(static_cast<u16>(halves >> 16));
  }
}

}  // namespace quant

}  // namespace ep
