// Sums of 16-byte vectors of X in fp32, in ascending rank, rounded once: the bits of collective_reference.py.
#pragma once

#include "collective_types.h"
#include "collectives/bytes.cuh"
#include "collectives/operation.cuh"
#include "common/numeric.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

constexpr i32 kElements = kColumns<X>;  // of a vector

struct Sum {
  f32 at[kElements];
};

// Starts at -0, so that the first term is added like any other: -0 + x is x, and -0 + -0 is -0.
__device__ __forceinline__ Sum no_terms() {
  Sum sum;
#pragma unroll
  for (i32 i = 0; i < kElements; ++i) sum.at[i] = -0.0f;
  return sum;
}

__device__ __forceinline__ void add(Sum& sum, const Vector& term) {
  u32 words[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) words[i] = ll::word_of(term, i);
#pragma unroll
  for (i32 i = 0; i < kElements; ++i) sum.at[i] = __fadd_rn(sum.at[i], value_in<X>(words, i));
}

__device__ __forceinline__ Vector rounded(const Sum& sum) {
  Vec<X, kElements> values;
#pragma unroll
  for (i32 i = 0; i < kElements; ++i) values.at[i] = narrow<X>(sum.at[i]);
  return *reinterpret_cast<const Vector*>(&values);
}

constexpr i32 kTermsAtOnce = 4;

// The sum, over all active ranks, of 16 bytes at `at` of this rank's chunk, of which `left` bytes are left; this rank's
// own at `own`, those of the others in their rows of `reduce`.
__device__ __forceinline__ Vector sum_at(const CollectiveArgs& args, const Operation& op, const u8* own, i64 at,
                                         i64 left) {
  Sum sum = no_terms();
#pragma unroll 1
  for (i32 first = 0; first < num_active(); first += kTermsAtOnce) {
    Vector terms[kTermsAtOnce];
#pragma unroll
    for (i32 i = 0; i < kTermsAtOnce; ++i) {
      if (first + i >= num_active()) continue;
      const i32 rank = active_order[first + i];
      terms[i] = rank == args.world.rank ? load_part(own + at, left)
                                         : load_aligned(reduce_row_at(args, args.world.rank, op.slot, rank) + at);
    }
#pragma unroll
    for (i32 i = 0; i < kTermsAtOnce; ++i)
      if (first + i < num_active()) add(sum, terms[i]);
  }
  return rounded(sum);
}

}  // namespace ep::coll
