// Arithmetic of a lane and of a warp: division by a precomputed reciprocal, prefix sums, transposition of a bit matrix.
#pragma once

#include "common/block.cuh"
#include "types.h"

namespace ep {

__device__ __forceinline__ i32 aligned(i32 count, i32 alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

// A divisor with its reciprocal. Dividends are not negative.
struct Divisor {
  i32 value;
  u32 reciprocal;  // (2^32 - 1) / value, rounded down: a quotient is at most one too small
};

__device__ __forceinline__ Divisor divisor_of(i32 value) { return {value, ~0u / static_cast<u32>(value)}; }

__device__ __forceinline__ i32 divide(i32 number, Divisor by) {
  const i32 quotient = static_cast<i32>(__umulhi(number, by.reciprocal));
  return quotient + (number - quotient * by.value >= by.value);
}

// Exclusive prefix sum by one warp: out[i] = sum of value(0 .. i-1) for i < n. Returns the total.
template <class Value>
__device__ __forceinline__ i32 prefix_sum(i32 n, i32* out, Value value) {
  i32 carried = 0;
#pragma unroll 1
  for (i32 base = 0; base < n; base += 32) {
    const i32 i = base + lane_idx(), mine = i < n ? value(i) : 0;
    i32 sum = mine;
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) {
      const i32 below = __shfl_up_sync(~0u, sum, step);
      if (lane_idx() >= step) sum += below;
    }
    if (i < n) out[i] = carried + sum - mine;
    carried += __shfl_sync(~0u, sum, 31);
  }
  return carried;
}

// Transposes a 32 x 32 bit matrix across a warp: lane i gets the mask of lanes whose bit i is set. Only the first
// `count` bits of a lane may be set.
__device__ __forceinline__ u32 transposed(u32 bits, i32 count) {
  constexpr i32 kUnroll = 4;
  u32 found = 0;
#pragma unroll 1
  for (i32 first = 0; first < count; first += kUnroll)
#pragma unroll
    for (i32 i = 0; i < kUnroll; ++i) {
      const u32 lanes = __ballot_sync(~0u, bits & 1);
      if (first + i == lane_idx()) found = lanes;
      bits >>= 1;
    }
  return found;
}

}  // namespace ep
