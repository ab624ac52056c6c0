// For editors alone: what NVRTC knows by itself, as far as the kernels use it, so that clangd needs no CUDA
// installation (compile_flags.txt includes it before the file that is open). No kernel is compiled with it.
#pragma once

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __grid_constant__

struct Dim3 {
  unsigned x, y, z;
};
extern __device__ const Dim3 threadIdx, blockIdx, blockDim, gridDim;

__device__ void __syncthreads();
__device__ int __syncthreads_or(int);
__device__ void __syncwarp(unsigned mask = ~0u);
__device__ unsigned __ballot_sync(unsigned, int);
__device__ int __all_sync(unsigned, int);
__device__ int __any_sync(unsigned, int);
template <class T> __device__ unsigned __match_any_sync(unsigned, T);
template <class T> __device__ T __shfl_sync(unsigned, T, int, int width = 32);
template <class T> __device__ T __shfl_up_sync(unsigned, T, unsigned, int width = 32);
template <class T> __device__ T __shfl_xor_sync(unsigned, T, int, int width = 32);
template <class T> __device__ T __reduce_add_sync(unsigned, T);
template <class T> __device__ T __reduce_min_sync(unsigned, T);
template <class T> __device__ T __reduce_max_sync(unsigned, T);
template <class T> __device__ T __reduce_or_sync(unsigned, T);
template <class T> __device__ T atomicAdd(T*, T);
template <class T> __device__ T atomicMax(T*, T);
template <class T> __device__ T atomicOr(T*, T);
template <class T> __device__ T atomicCAS(T*, T, T);

__device__ int __ffs(int);
__device__ int __ffsll(long long);
__device__ int __popc(unsigned);
__device__ int __popcll(unsigned long long);
__device__ int __clz(int);
__device__ unsigned __umulhi(unsigned, unsigned);
__device__ float __uint_as_float(unsigned);
__device__ unsigned __float_as_uint(float);
__device__ float __fadd_rn(float, float);
__device__ float __fmul_rn(float, float);
__device__ float __fdiv_rn(float, float);
__device__ float fabsf(float);
__device__ float fmaxf(float, float);
__device__ unsigned long __cvta_generic_to_shared(const void*);
template <class A, class B> __device__ constexpr auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> __device__ constexpr auto max(A a, B b) -> decltype(a + b) { return a < b ? b : a; }
