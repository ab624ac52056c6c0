// Bytes at any alignment, for a whole block. Stores that cross a link are 16 bytes and aligned, whatever the source's
// alignment; loads touch no aligned 16 bytes without a wanted one, so they never leave the caller's pages.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "layout/ll128.cuh"
#include "types.h"
#include "variant.h"

namespace ep::coll {

using ll::Vector;

constexpr i64 kVector = 16;

constexpr i64 kLineVectors = 8;  // of 128 bytes, which links and L2 move as one

// Bytes [begin, end) of a shard that a block handles; `begin` is a multiple of 16, and of 128 where each block has some
// lines.
struct Range {
  i64 begin, end;
};

__device__ __forceinline__ Range range_of(Team team, i64 num_bytes) {
  const i64 vectors = (num_bytes + kVector - 1) / kVector;
  const i64 unit = vectors >= team.num_blocks * kLineVectors * 2 ? kLineVectors : 1;
  const i64 units = (vectors + unit - 1) / unit;
  const i64 begin = units * team.block / team.num_blocks, end = units * (team.block + 1) / team.num_blocks;
  return {min(begin * unit * kVector, num_bytes), min(end * unit * kVector, num_bytes)};
}

__device__ __forceinline__ i32 misalignment(const void* address) {
  return static_cast<i32>(reinterpret_cast<u64>(address) & 15);
}

__device__ __forceinline__ Vector load_aligned(const u8* from) {
  const Vec<u32, 4> words = *reinterpret_cast<const Vec<u32, 4>*>(from);
  return ll::vector_of(words);
}

__device__ __forceinline__ void store_aligned(u8* to, const Vector& value) {
  Vec<u32, 4> words;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) words.at[i] = ll::word_of(value, i);
  *reinterpret_cast<Vec<u32, 4>*>(to) = words;
}

// 16 bytes from any address.
__device__ __forceinline__ Vector load_any(const u8* from) {
  const i32 skew = misalignment(from), shift = 8 * (skew & 7);
  if (skew == 0) return load_aligned(from);
  const Vector a = load_aligned(from - skew), b = load_aligned(from - skew + kVector);
  const u64 w0 = skew < 8 ? a.low : a.high, w1 = skew < 8 ? a.high : b.low, w2 = skew < 8 ? b.low : b.high;
  if (shift == 0) return {w0, w1};
  return {w0 >> shift | w1 << (64 - shift), w1 >> shift | w2 << (64 - shift)};
}

// The first `count` of up to 16 bytes, the rest 0.
__device__ __forceinline__ Vector load_part(const u8* from, i64 count) {
  return count >= kVector ? load_any(from) : ll::load_bytes(from, static_cast<i32>(count));
}

// Stores the first `count` of up to 16 bytes; `to` is aligned to T.
template <class T>
__device__ __forceinline__ void store_part(u8* to, const Vector& value, i64 count) {
  if (count >= kVector && misalignment(to) == 0) return store_aligned(to, value);
  const Vec<T, kColumns<T>> elements = *reinterpret_cast<const Vec<T, kColumns<T>>*>(&value);
#pragma unroll
  for (i32 i = 0; i < kColumns<T>; ++i)
    if (i * static_cast<i64>(sizeof(T)) < count) reinterpret_cast<T*>(to)[i] = elements.at[i];
}

// Copies n bytes, all threads of the block; source and destination may be the same, and overlap nowhere else.
__device__ __noinline__ void copy_range(u8* to, const u8* from, i64 n) {
  constexpr i32 kUnroll = 4;
  if (to == from || n <= 0) return;
  const i64 skew = misalignment(to), vectors = (skew + n + kVector - 1) / kVector;
#pragma unroll 1
  for (i64 first = threadIdx.x; first < vectors; first += static_cast<i64>(THREADS) * kUnroll) {
    // Loads of whole vectors first; then their stores, and single bytes at both ends.
    Vector value[kUnroll];
#pragma unroll
    for (i32 u = 0; u < kUnroll; ++u) {
      const i64 at = (first + static_cast<i64>(u) * THREADS) * kVector - skew;
      if (at >= 0 && at + kVector <= n) value[u] = load_any(from + at);
    }
#pragma unroll
    for (i32 u = 0; u < kUnroll; ++u) {
      const i64 at = (first + static_cast<i64>(u) * THREADS) * kVector - skew;
      if (at >= 0 && at + kVector <= n) {
        store_aligned(to + at, value[u]);
      } else if (at < n) {
#pragma unroll 1
        for (i64 i = max(at, static_cast<i64>(0)); i < min(at + kVector, n); ++i) to[i] = from[i];
      }
    }
  }
}

}  // namespace ep::coll
