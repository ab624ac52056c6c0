// Packets of LL combine: the columns that a lane has, and sums of them, for both phases.
#pragma once

#include "common/numeric.cuh"
#include "layout/ll128.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

constexpr bool kFp8 = sizeof(C) == 1;  // else C is Y
static_assert(!(kFp8 && KIND == EXACT), "exact combine moves rows as they are");
constexpr i32 kVectorColumns = 16 / static_cast<i32>(sizeof(C));  // of a 16-byte vector as it travels
constexpr i32 kCombineColumns =                                   // of a packet
    kFp8 ? kPacketColumns : kPacketData / static_cast<i32>(sizeof(C));
constexpr i32 kPollUnroll = kFp8 ? 2 : 4;  // partials that a warp polls at a time

// First column of this lane's first vector in a packet; kSecondColumn: distance to that of its second vector.
__device__ __forceinline__ i32 first_column() { return first_offset() / static_cast<i32>(sizeof(C)); }
constexpr i32 kSecondColumn = kSecondOffset / static_cast<i32>(sizeof(C));

// Starts at -0, so the first term is added like any other: -0 + x is x, and -0 + -0 is -0. A sum without terms is +0.
template <i32 N>
__device__ __forceinline__ void begin_sum(bool has_terms, f32 (&sum)[N]) {
#pragma unroll
  for (i32 i = 0; i < N; ++i) sum[i] = has_terms ? -0.0f : 0.0f;
}

template <i32 N>
__device__ __forceinline__ void add_columns(const f32 (&term)[N], f32 (&sum)[N]) {
#pragma unroll
  for (i32 i = 0; i < N; ++i) sum[i] = __fadd_rn(sum[i], term[i]);
}

}  // namespace ep::ll
