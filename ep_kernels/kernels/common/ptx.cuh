// One PTX instruction (or one idiom) per function; no knowledge of byte map or algorithm. No CUDA header is included,
// so that a kernel compiles quickly.
#pragma once

#include "types.h"

namespace ep {

namespace ptx {

// ---- memory order: flags between GPUs (sys) and between blocks of one GPU (gpu) ----

__device__ __forceinline__ u64 load_acquire_sys(const u64* address) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(u64* address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void add_release_sys(u64* address, u64 value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_relaxed_sys(const u64* address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_sys(u64* address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// 16 bytes, relaxed at system scope: part of a line with its own flag. PTX guarantees a single access for .b128 only; a
// vector of two u64 counts as two accesses, though the machine instruction is the same.
__device__ __forceinline__ void store_pair(u8* address, u64 low, u64 high) {
  asm volatile("{\n .reg .b128 pair;\n mov.b128 pair, {%1, %2};\n st.relaxed.sys.global.b128 [%0], pair;\n}"
               ::"l"(address), "l"(low), "l"(high) : "memory");
}

template <class T>
__device__ __forceinline__ T load_pair(const u8* address) {
  T value;
  asm volatile("{\n .reg .b128 pair;\n ld.relaxed.sys.global.b128 pair, [%2];\n mov.b128 {%0, %1}, pair;\n}"
               : "=l"(value.low), "=l"(value.high) : "l"(address) : "memory");
  return value;
}

// The same if `wanted`; otherwise loads nothing and returns 0. No branch.
template <class T>
__device__ __forceinline__ T load_pair_if(const u8* address, bool wanted) {
  T value = {0, 0};
  asm volatile("{\n .reg .pred wanted;\n .reg .b128 pair;\n setp.ne.s32 wanted, %3, 0;\n mov.b128 pair, {%0, %1};\n"
               " @wanted ld.relaxed.sys.global.b128 pair, [%2];\n mov.b128 {%0, %1}, pair;\n}"
               : "+l"(value.low), "+l"(value.high) : "l"(address), "r"(static_cast<i32>(wanted)) : "memory");
  return value;
}

// Through L1: the value may be as old as the start of the kernel. One L2 request serves all warps of an SM; thousands
// of uncached loads of one line would queue.
__device__ __forceinline__ u64 load_cached(const u64* address) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

// Returns `address`, opaque to the compiler, which therefore keeps it instead of computing it again at each use.
__device__ __forceinline__ u8* opaque(u8* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// For data of earlier or later kernels, or that an acquire has made visible: unordered.
__device__ __forceinline__ u64 load_volatile(const u64* address) { return *const_cast<const volatile u64*>(address); }
__device__ __forceinline__ void store_volatile(u64* address, u64 value) { *const_cast<volatile u64*>(address) = value; }

// Sequentially consistent: also orders an earlier store before a later load. Of two threads that each store, fence and
// load the other's word, at least one sees the other's store.
__device__ __forceinline__ void fence_sc_gpu() { asm volatile("fence.sc.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Words in shared memory between warps of a block, without a barrier. Atomics, since racecheck reports any other access
// that no barrier separates.
__device__ __forceinline__ u32 load_acquire_block(u32* address) {
  u32 value;
  asm volatile("atom.acquire.cta.shared::cta.add.u32 %0, [%1], 0;"
               : "=r"(value) : "r"(shared_address(address)) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_block(u32* address, u32 value) {
  u32 old;
  asm volatile("atom.release.cta.shared::cta.exch.b32 %0, [%1], %2;"
               : "=r"(old) : "r"(shared_address(address)), "r"(value) : "memory");
}

__device__ __forceinline__ u64 load_relaxed_block(u64* address) {
  u64 value;
  asm volatile("atom.relaxed.cta.shared::cta.add.u64 %0, [%1], 0;"
               : "=l"(value) : "r"(shared_address(address)) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_block(u64* address, u64 value) {
  u64 old;
  asm volatile("atom.relaxed.cta.shared::cta.exch.b64 %0, [%1], %2;"
               : "=l"(old) : "r"(shared_address(address)), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_acquire_gpu(const u64* address) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_gpu(u64* address, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ u64 add_acq_rel_gpu(u64* address, u64 value) {
  u64 old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}

// Orders nothing.
__device__ __forceinline__ u64 take_relaxed_gpu(u64* address, u64 value) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}

// Nothing is returned, so nothing is waited for.
__device__ __forceinline__ void add_release_gpu(u64* address, u64 value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed_gpu(u64* address, u64 value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Among the threads of a block, of a word in shared memory.
__device__ __forceinline__ u32 add_acq_rel_block(u32* address, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(old) : "r"(shared_address(address)), "r"(value) : "memory");
  return old;
}

__device__ __forceinline__ void max_relaxed_gpu(u64* address, u64 value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ u64 compare_and_swap_gpu(u64* address, u64 expected, u64 value) {
  u64 old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old) : "l"(address), "l"(expected), "l"(value) : "memory");
  return old;
}

__device__ __forceinline__ void sleep_ns(u32 duration) { asm volatile("nanosleep.u32 %0;" ::"r"(duration)); }

__device__ __forceinline__ u64 now_ns() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// ---- neighbouring launches (PDL): the next kernel of the stream may be set up while this one ends ----

// Waits until the previous kernels are complete and their writes visible; returns at once without PDL.
__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- bulk copies (TMA, 1-D): addresses and sizes are multiples of 16 bytes ----

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// One arrival; signals threads of the block that poll the barrier.
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ bool barrier_is_complete(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred done;\n mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done != 0;
}

// Makes initialised mbarriers visible to the copy engine (async proxy).
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and lets the barrier's phase complete only after `num_bytes` bytes of bulk_load_part have landed.
__device__ __forceinline__ void bulk_expect(u64* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_load_part(void* to_shared, const void* from_global, u32 num_bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to_shared)), "l"(from_global), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_load(void* to_shared, const void* from_global, u32 num_bytes, u64* barrier) {
  bulk_expect(barrier, num_bytes);
  bulk_load_part(to_shared, from_global, num_bytes, barrier);
}

// Waits for a local copy, which the hardware always completes, so without deadline; waits for peers: common/wait.cuh.
__device__ __forceinline__ void bulk_load_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra again;\n}"
      ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_store(void* to_global, const void* from_shared, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to_global), "r"(shared_address(from_shared)), "r"(num_bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's store groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most `kPending` of this thread's store groups are incomplete; the writes of the others are ordered
// before what the thread does next.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all of this thread's store groups: their writes are ordered before what the thread does next.
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Starts a copy of 16 bytes to shared memory, part of this thread's next group; zeros unless `present`.
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to_shared)), "l"(from_global), "r"(present ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `kPending` groups of this thread's copies are complete.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary accesses and the copy engine's accesses to the same bytes. Without a state space the instruction
// compiles to a fence of the whole GPU.
__device__ __forceinline__ void fence_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- numbers ----

__device__ __forceinline__ u16 bf16_from_f32(f32 value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u16 f16_from_f32(f32 value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ f32 f32_from_f16(u16 bits) {
  f32 value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two e4m3fn in one word, `low` in the low byte; finite values past 448 saturate (the quantiser makes none).
__device__ __forceinline__ u16 e4m3x2_from_f32(f32 high, f32 low) {
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

// The larger; NaN if either is NaN.
__device__ __forceinline__ f32 max_or_nan(f32 a, f32 b) {
  f32 most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// The larger of each 16-bit half, unsigned.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
  u32 most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

// Two f16 (low half first) from two e4m3fn; exact.
__device__ __forceinline__ u32 f16x2_from_e4m3x2(u16 bits) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
  return halves;
}

}  // namespace ptx

}  // namespace ep
