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

// Loads that a thread has in flight: vectors, and ranks of each vector.
constexpr i32 kSumsAtOnce = 4, kTermsAtOnce = 2;

// Sums over all active ranks, in ascending rank, of a range of this rank's chunk: store(at, vector, bytes left) for
// each 16 bytes of it. All threads of the block. The own terms are at `own`, those of the others at row_of(rank), a
// multiple of 16 bytes; the chunk has num_bytes.
template <class Row, class Store>
__device__ __forceinline__ void each_sum(const CollectiveArgs& args, const u8* own, Row row_of, Range range,
                                         i64 num_bytes, Store store) {
  constexpr i64 kStep = THREADS * kVector;
#pragma unroll 1
  for (i64 at = range.begin + threadIdx.x * kVector; at < range.end; at += kStep * kSumsAtOnce) {
    Sum sums[kSumsAtOnce];
#pragma unroll
    for (i32 u = 0; u < kSumsAtOnce; ++u) sums[u] = no_terms();
#pragma unroll 1
    for (i32 first = 0; first < num_active(); first += kTermsAtOnce) {
      // All loads of some ranks; then their sums, in the same order.
      Vector terms[kTermsAtOnce][kSumsAtOnce];
#pragma unroll
      for (i32 i = 0; i < kTermsAtOnce; ++i) {
        if (first + i >= num_active()) continue;
        const i32 rank = active_order[first + i];
        const u8* row = rank == args.world.rank ? own : row_of(rank);
#pragma unroll
        for (i32 u = 0; u < kSumsAtOnce; ++u) {
          const i64 here = at + u * kStep;
          if (here >= range.end) continue;
          terms[i][u] =
              rank == args.world.rank ? load_part(row + here, num_bytes - here) : load_aligned(row + here);
        }
      }
#pragma unroll
      for (i32 i = 0; i < kTermsAtOnce; ++i)
#pragma unroll
        for (i32 u = 0; u < kSumsAtOnce; ++u)
          if (first + i < num_active() && at + u * kStep < range.end) add(sums[u], terms[i][u]);
    }
    // Rounded once, when all ranks are in.
#pragma unroll
    for (i32 u = 0; u < kSumsAtOnce; ++u)
      if (at + u * kStep < range.end) store(at + u * kStep, rounded(sums[u]), num_bytes - at - u * kStep);
  }
}

// The same; terms of others stand in their rows of `reduce`.
template <class Store>
__device__ __forceinline__ void each_sum(const CollectiveArgs& args, const Operation& op, const u8* own, Range range,
                                         i64 num_bytes, Store store) {
  auto row_of = [&](i32 rank) -> const u8* { return reduce_row_at(args, args.world.rank, op.slot, rank); };
  each_sum(args, own, row_of, range, num_bytes, store);
}

}  // namespace ep::coll
