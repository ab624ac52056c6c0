// Rows to MXFP8 or NVFP4, in front of a dispatch that moves them, and their scales, as they are. ep_kernels/quant.py
// defines the bits. A thread has a block: the columns that share a scale.
//
//   H = 64, NVFP4    thread 0 of a row: columns 0..15 -> 8 bytes of codes and one scale; thread 1: columns 16..31
//   H = 48, MXFP8    thread 0: columns 0..31 -> 32 bytes; thread 1: columns 32..47 -> 16 bytes, a short block
#pragma once

#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "types.h"
#include "variant.h"

namespace ep {

constexpr i32 kWide = quant::kWideColumns;
constexpr bool kIsMx = FORMAT == MXFP8;
constexpr i32 kShared = kIsMx ? 32 : 16;  // columns of a block
constexpr f32 kMostE2m1 = 6.0f;

__device__ __forceinline__ f32 value_of_e4m3(u8 code) {
  return ptx::f32_from_f16(static_cast<u16>(ptx::f16x2_from_e4m3x2(code)));
}

// Code of |x * inverse|, ties to the even one, with the sign of x.
__device__ __forceinline__ u32 e2m1_of(f32 x, f32 inverse) {
  const f32 size = fabsf(__fmul_rn(x, inverse));
  const u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                   (size >= 3.5f) + (size > 5.0f);
  return code | __float_as_uint(x) >> 31 << 3;
}

// 16 columns; writes 8 bytes and returns the scale. A NaN or an infinity makes the scale NaN.
__device__ __forceinline__ u8 nvfp4_block(const u8* x, u8* rows, f32 global_scale) {
  const quant::Columns<X> columns = quant::load_columns<X>(x);
  f32 value[kWide];
#pragma unroll
  for (i32 i = 0; i < kWide; ++i) value[i] = quant::column(columns, i);
  // The scale.
  const u32 most = quant::amax(value);
  const f32 exact = __fmul_rn(__fdiv_rn(__uint_as_float(most), kMostE2m1), global_scale);
  const f32 fitting = exact > quant::kMax ? quant::kMax : exact;
  const u8 scale = most < quant::kInfinity ? static_cast<u8>(ptx::e4m3x2_from_f32(0.0f, fitting)) : quant::kNan;
  // Two columns to a byte, the even one low.
  const f32 number = value_of_e4m3(scale), inverse = number == 0.0f ? 0.0f : __fdiv_rn(global_scale, number);
  Vec<u32, 2> codes = {};
#pragma unroll
  for (i32 i = 0; i < kWide; ++i) codes.at[i / 8] |= e2m1_of(value[i], inverse) << (4 * (i % 8));
  *reinterpret_cast<Vec<u32, 2>*>(rows) = codes;
  return scale;
}

// Up to 32 columns, at least 16; writes as many bytes and returns the scale's exponent.
__device__ __forceinline__ u8 mxfp8_block(const u8* x, u8* rows, bool is_short) {
  quant::Columns<X> first = quant::load_columns<X>(x), second = {};
  if (!is_short) second = quant::load_columns<X>(x + kWide * sizeof(X));
  const u32 most = max(quant::finite_largest(first), quant::finite_largest(second));
  const f32 scale = quant::scale_of(most, true), inverse = __fdiv_rn(1.0f, scale);
  auto* out = reinterpret_cast<Vec<u32, 4>*>(rows);
  out[0] = quant::encode<X>(first, inverse, false);
  if (!is_short) out[1] = quant::encode<X>(second, inverse, false);
  return static_cast<u8>(__float_as_uint(scale) >> 23);
}

__device__ __forceinline__ void quantize_rank(const QuantizeArgs& args, i32 block_idx, i32 num_blocks) {
  ptx::wait_for_previous_launch();
  const i32 per_row = (args.hidden + kShared - 1) / kShared, row_bytes = kIsMx ? args.hidden : args.hidden / 2;
  const f32 global_scale = kIsMx ? 1.0f : *args.global_scale;
  const i64 total = static_cast<i64>(args.num_tokens) * per_row, step = static_cast<i64>(num_blocks) * THREADS;
  for (i64 i = static_cast<i64>(block_idx) * THREADS + threadIdx.x; i < total; i += step) {
    const i64 token = i / per_row;
    const i32 first = static_cast<i32>(i - token * per_row) * kShared;
    const u8* x = args.x + (token * args.hidden + first) * static_cast<i32>(sizeof(X));
    u8* rows = args.rows + token * row_bytes + (kIsMx ? first : first / 2);
    if constexpr (kIsMx) args.scales[i] = mxfp8_block(x, rows, args.hidden - first < kShared);
    else args.scales[i] = nvfp4_block(x, rows, global_scale);
  }
}

}  // namespace ep

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) quantize(const __grid_constant__ ep::QuantizeArgs args) {
  ep::quantize_rank(args, blockIdx.x, gridDim.x);
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantize(const ep::QuantizeArgs* ranks, ep::i32 blocks_per_rank) {
  const ep::i32 block = blockIdx.x;
  ep::quantize_rank(ranks[block / blocks_per_rank], block % blocks_per_rank, blocks_per_rank);
}
#endif
