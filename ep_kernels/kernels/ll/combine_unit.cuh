// Units of low-latency combine: how many columns a lane has, and sums of them, as both halves need it.
#pragma once

#include "common/numeric.cuh"
#include "layout/ll128.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

constexpr i32 kSame = 0, kFailed = 1,
              kDiffers = 2;  // verdict of a block: all ranks combine this routing, a wait failed, they do not
constexpr bool kFp8 = sizeof(C) == 1;
constexpr i32 kVector = 16 / static_cast<i32>(sizeof(C));  // columns of a 16-byte vector as it travels
constexpr i32 kUnitWidth = kFp8 ? kUnitColumns : kUnitData / static_cast<i32>(sizeof(C));  // columns of a unit
constexpr i32 kTogether = !kFp8 ? 4 : KIND == EXACT ? 1 : 2;  // partials that a warp polls at a time

// First column of this lane's first vector in a unit; its second comes kSecond bytes later as they travel.
__device__ __forceinline__ i32 first_column() { return first_offset() / static_cast<i32>(sizeof(C)); }
constexpr i32 kSecondColumn = kSecond / static_cast<i32>(sizeof(C));

// -0, to which a first term may be added like any other, for -0 + x is x, and -0 + -0 is -0; 0 where there are no
// terms.
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

}  // namespace ep::ll
