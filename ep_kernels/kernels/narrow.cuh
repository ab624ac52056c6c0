// Expert ids of 64 bits become those of 32 bits that dispatch reads: the nearest that there is, so out of range stays
// out of range. Beside them the weights of the dispatch are copied, where an exact combine will read them.
#pragma once

#include "common/ptx.cuh"
#include "types.h"
#include "variant.h"

namespace ep {

__device__ __forceinline__ void narrow_ids(const i64* ids, i32* to, i32 count, const f32* weights, f32* copy) {
  constexpr i64 kMost = 0x7fffffff, kLeast = -kMost - 1;
  ptx::wait_for_previous_launch();
  for (i32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
    const i64 id = ids[i];
    to[i] = static_cast<i32>(id > kMost ? kMost : id < kLeast ? kLeast : id);
    if (copy != nullptr) copy[i] = weights[i];
  }
}

}  // namespace ep

// No rank is in it, so loop-back has the same.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    narrow(const ep::i64* ids, ep::i32* to, ep::i32 count, const ep::f32* weights, ep::f32* copy) {
  ep::narrow_ids(ids, to, count, weights, copy);
}
