// A CUDA block on one thread of the machine: its CUDA threads are fibers. A fiber runs until it meets others (a warp's
// vote, a block barrier) or polls; then the next one that is not done goes on. x86-64 only.
#pragma once

#include <emmintrin.h>
#include <sched.h>
#include <time.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static thread_local

namespace emulated {

using Word = unsigned long long;

struct Copy {
  void* to;
  const void* from;
  unsigned num_bytes;
};

inline void perform(std::vector<Copy>& copies) {
  for (const Copy& copy : copies)
    copy.from ? memcpy(copy.to, copy.from, copy.num_bytes) : memset(copy.to, 0, copy.num_bytes);
  copies.clear();
}

// Of a thread's copies, those that happen no earlier than they must.
struct Groups {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> committed;  // and not waited for
};

// A word that a warp has loaded: its lanes load at once, and all see the same.
struct Early {
  const void* at;
  Word meeting, barrier;  // of the loading lanes: how often they had met before
  Word value;
};

struct Warp {
  std::vector<Early> early;
  Word values[2][32];  // of this meeting and of the one before, which some lanes still read
  int arrived[2] = {0, 0};
  Word meeting = 0;
};

struct Fiber {
  void* stack_pointer = nullptr;
  bool done = false;
  int line = 0;  // where it waits, for `report`
  Word meeting = 0, barrier = 0;
  Groups stores, copies;  // bulk stores, asynchronous copies
};

struct Block {
  unsigned index, num_blocks, num_threads;
  int current = 0, live = 0, arrived = 0, votes[2] = {0, 0};
  Word barrier = 0, rounds = 0;
  unsigned char* shared = nullptr;
  void* machine_stack = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
};

inline thread_local Block* block;
inline Fiber& me() { return block->fibers[block->current]; }
inline unsigned lane() { return block->current & 31; }

extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.globl emulated_switch
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// Where a block that goes round and round waits: lines of the kernel's source by warp.
inline void report(const Block& stuck) {
  static std::mutex one;
  const std::lock_guard<std::mutex> guard(one);
  fprintf(stderr, "emulated block %u waits:", stuck.index);
  for (unsigned w = 0; w < stuck.warps.size(); ++w) {
    std::map<int, int> lines;
    for (unsigned i = 0; i < 32; ++i) ++lines[stuck.fibers[w * 32 + i].done ? -1 : stuck.fibers[w * 32 + i].line];
    for (const auto& [line, count] : lines) fprintf(stderr, " warp %u: %d at %d", w, count, line);
  }
  fprintf(stderr, "\n");
}

// The next fiber that is not done; counts rounds of the block and lets other blocks run.
inline int next_fiber() {
  int next = block->current;
  do {
    if (++next < static_cast<int>(block->num_threads)) continue;
    next = 0;
    if (++block->rounds % 16 == 0) sched_yield();
    if (block->rounds % 200000 == 0) report(*block);
  } while (block->fibers[next].done);
  return next;
}

inline void yield() {
  const int from = block->current, next = next_fiber();
  if (next == from) return;
  block->current = next;
  emulated_switch(&block->fibers[from].stack_pointer, block->fibers[next].stack_pointer);
}

// All lanes of a warp bring a value and see those of the others.
inline const Word* meet(Word value, int line) {
  Warp& warp = block->warps[block->current / 32];
  Fiber& fiber = me();
  const Word number = fiber.meeting++;
  const int parity = number & 1;
  warp.values[parity][lane()] = value;
  fiber.line = line;
  if (++warp.arrived[parity] == 32) {
    warp.arrived[parity ^ 1] = 0;
    warp.meeting = number + 1;
  } else {
    while (warp.meeting <= number) yield();
  }
  fiber.line = 0;
  return warp.values[parity];
}

inline int block_barrier(int vote, int line) {
  Fiber& fiber = me();
  const Word number = fiber.barrier++;
  const int parity = number & 1;
  fiber.line = line;
  block->votes[parity] |= vote;
  if (++block->arrived == static_cast<int>(block->num_threads)) {
    block->arrived = block->votes[parity ^ 1] = 0;
    block->barrier = number + 1;
  } else {
    while (block->barrier <= number) yield();
  }
  fiber.line = 0;
  return block->votes[parity];
}

template <class T>
Word bits_of(T value) {
  Word bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T value_of(Word bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T shuffle(T value, int from, int line) {
  return value_of<T>(meet(bits_of(value), line)[from & 31]);
}

template <class T, class Combine>
unsigned fold(T value, int line, unsigned first, Combine combine) {
  const Word* all = meet(bits_of(value), line);
  unsigned result = first;
  for (unsigned i = 0; i < 32; ++i) result = combine(result, all[i], i);
  return result;
}

inline unsigned ballot(bool yes, int line) {
  return fold(yes, line, 0u,
              [](unsigned sum, Word one, unsigned i) { return sum | static_cast<unsigned>(one & 1) << i; });
}

template <class T>
unsigned match(T value, int line) {
  const Word mine = bits_of(value);
  return fold(value, line, 0u, [mine](unsigned sum, Word one, unsigned i) { return sum | unsigned(one == mine) << i; });
}

inline unsigned sum_of(unsigned value, int line) {
  return fold(value, line, 0u, [](unsigned sum, Word one, unsigned) { return sum + static_cast<unsigned>(one); });
}

inline unsigned most_of(unsigned value, int line) {
  return fold(value, line, 0u, [](unsigned most, Word one, unsigned) { return most > one ? most : unsigned(one); });
}

inline int least_of(int value, int line) {
  return fold(value, line, value, [](int least, Word one, unsigned) { return least < int(one) ? least : int(one); });
}

inline unsigned or_of(unsigned value, int line) {
  return fold(value, line, 0u, [](unsigned sum, Word one, unsigned) { return sum | static_cast<unsigned>(one); });
}

struct Index {
  unsigned x, y = 0;
};

}  // namespace emulated

#define threadIdx (emulated::Index{static_cast<unsigned>(emulated::block->current)})
#define blockIdx (emulated::Index{emulated::block->index})
#define blockDim (emulated::Index{emulated::block->num_threads})
#define gridDim (emulated::Index{emulated::block->num_blocks})
#define __syncthreads() ((void)emulated::block_barrier(0, __LINE__))
#define __syncthreads_or(vote) (emulated::block_barrier((vote) != 0, __LINE__))
#define __syncwarp() ((void)emulated::meet(0, __LINE__))
#define __shfl_sync(mask, v, from) emulated::shuffle(v, from, __LINE__)
#define __shfl_xor_sync(mask, v, with) emulated::shuffle(v, emulated::lane() ^ (with), __LINE__)
#define __shfl_up_sync(mask, v, by) \
  emulated::shuffle(v, int(emulated::lane()) >= int(by) ? emulated::lane() - (by) : emulated::lane(), __LINE__)
#define __ballot_sync(mask, yes) emulated::ballot(yes, __LINE__)
#define __all_sync(mask, yes) (emulated::ballot(yes, __LINE__) == ~0u)
#define __any_sync(mask, yes) (emulated::ballot(yes, __LINE__) != 0)
#define __match_any_sync(mask, v) emulated::match(v, __LINE__)
#define __reduce_add_sync(mask, v) emulated::sum_of(v, __LINE__)
#define __reduce_max_sync(mask, v) emulated::most_of(v, __LINE__)
#define __reduce_min_sync(mask, v) emulated::least_of(v, __LINE__)
#define __reduce_or_sync(mask, v) emulated::or_of(v, __LINE__)

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<emulated::Word>(a) * b >> 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __ffsll(emulated::Word v) { return __builtin_ffsll(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned v) { return emulated::value_of<float>(v); }
inline unsigned __float_as_uint(float v) { return static_cast<unsigned>(emulated::bits_of(v)); }

template <class T, class U>
T atomicAdd(T* at, U value) { return __atomic_fetch_add(at, static_cast<T>(value), __ATOMIC_SEQ_CST); }
template <class T, class U>
T atomicOr(T* at, U value) { return __atomic_fetch_or(at, static_cast<T>(value), __ATOMIC_SEQ_CST); }
template <class T, class U>
T atomicCAS(T* at, U expected, U value) {
  T seen = static_cast<T>(expected);
  __atomic_compare_exchange_n(at, &seen, static_cast<T>(value), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return seen;
}
template <class T, class U>
T atomicMax(T* at, U value) {
  T seen = *at;
  while (seen < static_cast<T>(value) &&
         !__atomic_compare_exchange_n(at, &seen, static_cast<T>(value), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return seen;
}
template <class A, class B>
auto max(A a, B b) { using T = std::common_type_t<A, B>; return T(a) > T(b) ? T(a) : T(b); }
template <class A, class B>
auto min(A a, B b) { using T = std::common_type_t<A, B>; return T(a) < T(b) ? T(a) : T(b); }
