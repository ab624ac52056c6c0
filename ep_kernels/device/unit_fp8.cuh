// A unit of lines (device/lines.cuh) whose rows become fp8 on the way: 56 vectors of 16 columns, and in the first two tag lanes the
// scales of their 7 blocks. A lane holds vectors `index` and 28 + `index`; tag lanes hold none: zeros.
//
//   block      0       1        2         3               4         5         6
//   vectors    0..7    8..15    16..23    24..27 28..31   32..39    40..47    48..55
//              first of a lane                   second of a lane
//
// Lane b divides for block b, so a warp divides twice per unit.
#pragma once

constexpr i32 kUnitBlocks = kUnitColumns / quant::kBlock;

// Among the vectors of a unit, this lane's first.
__device__ __forceinline__ i32 vector_index() { return lane_idx() - (lane_idx() >> 3); }
__device__ __forceinline__ i32 first_block() { return vector_index() / 8; }
__device__ __forceinline__ i32 second_block() { return (28 + vector_index()) / 8; }

__device__ __forceinline__ Vector vector_of(const Vec<u32, 4>& words) {
  return vector_of(words.at[0], words.at[1], words.at[2], words.at[3]);
}

// 16 columns of each vector as fp8, with the scales of their blocks. Absent columns are 0.
template <class T>
__device__ __forceinline__ Unit quantize_unit(const quant::Columns<T>& first, const quant::Columns<T>& second, bool power_of_two) {
  u32 amax_first = quant::largest(first), amax_second = quant::largest(second);
  const bool all_finite = !__any_sync(~0u, max(amax_first, amax_second) >= quant::kInfinityOf<T>);
  if (all_finite) {
    amax_first = quant::widen_bits(amax_first, T{});
    amax_second = quant::widen_bits(amax_second, T{});
  } else {
    amax_first = quant::finite_largest(first);
    amax_second = quant::finite_largest(second);
  }
  u32 amax = 0;  // of block `lane`
#pragma unroll
  for (i32 b = 0; b < kUnitBlocks; ++b) {
    u32 mine = b <= 3 && first_block() == b ? amax_first : 0;
    if (b >= 3 && second_block() == b) mine = max(mine, amax_second);
    const u32 most = __reduce_max_sync(~0u, mine);
    if (lane_idx() == b) amax = most;
  }
  const f32 scale = quant::scale_of(amax, power_of_two), inverse = __fdiv_rn(1.0f, scale);
  const f32 inverse_first = __shfl_sync(~0u, inverse, first_block()), inverse_second = __shfl_sync(~0u, inverse, second_block());
  const u32 told = lane_idx() < kUnitBlocks ? __float_as_uint(scale) : 0;
  u32 scales[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) scales[i] = __shfl_sync(~0u, told, (lane_idx() >> 3) * 4 + i);
  const Vec<u32, 4> a = quant::encode(first, inverse_first, all_finite), b = quant::encode(second, inverse_second, all_finite);
  if (is_tag_lane()) return {vector_of(scales[0], scales[1], scales[2], scales[3]), {0, 0}};
  return {vector_of(a), vector_of(b)};
}

// Scale of block b of a unit, as bits, to every lane by its own b.
__device__ __forceinline__ u32 scale_of_block(const Unit& unit, i32 b) {
  const Vector scales = shuffle(unit.first, b / 4 * 8 + 7);
  return word_of(scales, b % 4);
}
