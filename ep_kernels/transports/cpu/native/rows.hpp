// What is done to the columns of one row. Three builds of the same source (baseline, AVX2, AVX-512) fill one table
// each; all give the same bits: no contraction, no reassociation, every conversion round-to-nearest-even as torch's.
#pragma once
#include <cstdint>

#include "region.hpp"

namespace cd {

struct RowOps {
  // dst = src. Whole rows.
  void (*copy)(void* dst, const void* src, int64_t bytes);
  // The same past the caches, for more rows than they hold: no line of dst is read before it is written. dst: multiple
  // of 16.
  void (*stream)(void* dst, const void* src, int64_t bytes);
  // acc [n] fp32 = row; acc = acc + row.
  void (*load)(float* acc, const void* row, Type type, int64_t n);
  void (*add)(float* acc, const void* row, Type type, int64_t n);
  // acc = w * row; acc = acc + (w * row): product and sum are each rounded to fp32.
  void (*scale)(float* acc, const void* row, Type type, float w, int64_t n);
  void (*scale_add)(float* acc, const void* row, Type type, float w, int64_t n);
  // acc = fp32(type(acc)).
  void (*round)(float* acc, Type type, int64_t n);
  // row = type(acc).
  void (*store)(void* row, const float* acc, Type type, int64_t n);
  // Block-128 e4m3: q [n], scales [ceil(n/128)] from fp32 values. `pow2` rounds scales up to powers of two.
  void (*quantize)(uint8_t* q, float* scales, const float* values, bool pow2, int64_t n);
  // MXFP8: q [n], exponents [ceil(n/32)]. NVFP4: q [n / 2], e4m3 scales [n / 16], by the caller's scale of all.
  void (*quantize_mxfp8)(uint8_t* q, uint8_t* scales, const float* values, int64_t n);
  void (*quantize_nvfp4)(uint8_t* q, uint8_t* scales, const float* values, float global, int64_t n);
  // acc [n] fp32 = q * scales.
  void (*dequantize)(float* acc, const uint8_t* q, const float* scales, int64_t n);
};

const RowOps& row_ops();  // the best that this processor runs

extern const RowOps kRowsBaseline;
#if defined(__x86_64__)
extern const RowOps kRowsAvx2;
extern const RowOps kRowsAvx512;
#endif

}  // namespace cd
