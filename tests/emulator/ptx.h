// What kernels/common/ptx.cuh has, for fibers: memory order is sequential, bulk copies happen when they are waited for
// and not before.
#pragma once

namespace ep::ptx {

// A fiber that polls lets the others run.
inline u64 polled(const u64* at) {
  emulated::yield();
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
inline u64 loaded(const u64* at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
inline void stored(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
inline u64 added(u64* at, u64 value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }

inline u64 load_acquire_sys(const u64* at) { return polled(at); }
inline u64 load_acquire_gpu(const u64* at) { return loaded(at); }
inline u64 load_relaxed_sys(const u64* at) { return loaded(at); }
inline u64 load_relaxed_block(u64* at) { return polled(at); }
inline u8* opaque(u8* address) { return address; }
// Words that are looked at when a kernel begins. The lanes of a warp load at once on a GPU, and decide alike; fibers
// come one after the other while other blocks write, so the first of them reads for all.
inline u64 load_cached(const u64* at) {
  std::vector<emulated::Early>& early = emulated::block->warps[emulated::block->current / 32].early;
  const emulated::Fiber& fiber = emulated::me();
  for (const emulated::Early& word : early)
    if (word.at == at && word.meeting == fiber.meeting && word.barrier == fiber.barrier) return word.value;
  early.push_back({at, fiber.meeting, fiber.barrier, loaded(at)});
  return early.back().value;
}
inline u64 load_volatile(const u64* at) { return loaded(at); }
inline void store_release_sys(u64* at, u64 value) { stored(at, value); }
inline void store_relaxed_sys(u64* at, u64 value) { stored(at, value); }
inline void store_relaxed_block(u64* at, u64 value) { stored(at, value); }
inline void store_volatile(u64* at, u64 value) { stored(at, value); }
inline void store_release_gpu(u64* at, u64 value) { stored(at, value); }
inline u64 add_release_sys(u64* at, u64 value) { return added(at, value); }
inline u64 add_acq_rel_gpu(u64* at, u64 value) { return added(at, value); }
inline u64 take_relaxed_gpu(u64* at, u64 value) { return added(at, value); }
inline u64 add_release_gpu(u64* at, u64 value) { return added(at, value); }
inline u64 add_relaxed_gpu(u64* at, u64 value) { return added(at, value); }
inline void max_relaxed_gpu(u64* at, u64 value) { atomicMax(at, value); }
inline u64 compare_and_swap_gpu(u64* at, u64 expected, u64 value) { return atomicCAS(at, expected, value); }
inline u32 add_acq_rel_block(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
inline void store_release_block(u32* at, u32 value) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
inline u32 load_acquire_block(const u32* at) {
  emulated::yield();
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

// 16 aligned bytes as one, as processors with AVX move them; other processes may map them, too.
inline void store_pair(u8* at, u64 low, u64 high) {
  asm volatile("movdqa %1, %0" : "=m"(*reinterpret_cast<__m128i*>(at)) : "x"(_mm_set_epi64x(high, low)) : "memory");
}
template <class T>
T load_pair(const u8* at) {
  __m128i both;
  asm volatile("movdqa %1, %0" : "=x"(both) : "m"(*reinterpret_cast<const __m128i*>(at)) : "memory");
  T value;
  value.low = _mm_cvtsi128_si64(both);
  value.high = _mm_cvtsi128_si64(_mm_unpackhi_epi64(both, both));
  return value;
}

template <class T>
T load_pair_if(const u8* at, bool wanted) {
  return wanted ? load_pair<T>(at) : T{0, 0};
}

inline void fence_sys() {}
inline void fence_sc_gpu() {}
inline void fence_proxy_shared() {}
inline void fence_proxy_global() {}
inline void fence_barrier_init() {}
inline void wait_for_previous_launch() {}
inline void allow_next_launch() {}
inline void sleep_ns(u32) { emulated::yield(); }

// Slower than the time of day, since everything is: deadlines are meant for a GPU.
inline u64 now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec * 1000000000ull + now.tv_nsec) / SLOWNESS;
}

// mbarriers: the word in shared memory is only their name.
struct Barrier {
  unsigned count = 1, left = 1, phase = 0, awaited = 0;  // awaited: bytes that loads are still to be asked for
  std::vector<emulated::Copy> loads;
  emulated::Word round = 0;  // of the block, before which they do not end

  void complete() {
    ++phase;
    left = count;
  }
  bool is_past(u32 parity) {
    const bool is_complete = left == 0 && awaited == 0 && (phase & 1) == parity;
    if (is_complete && emulated::block->rounds >= round) {  // loads happen as late as this
      emulated::perform(loads);
      complete();
    }
    return (phase & 1) != parity;
  }
};
inline Barrier& barrier_of(u64* name) {
  static thread_local std::map<u64*, Barrier> barriers;
  return barriers[name];
}
inline void must(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated: %s\n", what);
  abort();
}
inline void barrier_init(u64* name, u32 count = 1) {
  barrier_of(name) = Barrier();
  barrier_of(name).count = barrier_of(name).left = count;
}
inline void barrier_arrive(u64* name) {
  Barrier& barrier = barrier_of(name);
  must(barrier.left != 0, "more arrivals at an mbarrier than it counts");
  if (--barrier.left == 0 && barrier.awaited == 0 && barrier.loads.empty()) barrier.complete();
}
inline bool barrier_is_complete(u64* name, u32 parity) {
  emulated::yield();
  return barrier_of(name).is_past(parity);
}
inline void bulk_load_wait(u64* name, u32 parity) {
  while (!barrier_of(name).is_past(parity)) emulated::yield();
}

inline void check_bulk(const void* to, const void* from, u32 num_bytes) {
  const u64 all = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | num_bytes;
  must(all % 16 == 0 && num_bytes != 0, "a bulk copy that is not of whole aligned 16 bytes");
}
// Rounds of the block. Loads end in any order: one in sixteen comes long after those that were asked for behind it.
inline unsigned lateness() {
  static thread_local unsigned drawn = 0;
  drawn = drawn * 1664525 + 1013904223;
  return drawn >> 28 == 0 ? 200 : 0;
}
inline void bulk_expect(u64* name, u32 num_bytes) {
  Barrier& barrier = barrier_of(name);
  must(barrier.left != 0, "a bulk load on an mbarrier that is complete");
  barrier.awaited += num_bytes;
  barrier.round = emulated::block->rounds + lateness();
  --barrier.left;
}
inline void bulk_load_part(void* to, const void* from, u32 num_bytes, u64* name) {
  check_bulk(to, from, num_bytes);
  Barrier& barrier = barrier_of(name);
  must(barrier.awaited >= num_bytes, "a bulk load of more bytes than its mbarrier expects");
  barrier.loads.push_back({to, from, num_bytes});
  barrier.awaited -= num_bytes;
}
inline void bulk_load(void* to, const void* from, u32 num_bytes, u64* name) {
  bulk_expect(name, num_bytes);
  bulk_load_part(to, from, num_bytes, name);
}
inline void bulk_store(void* to, const void* from, u32 num_bytes) {
  check_bulk(to, from, num_bytes);
  emulated::me().stores.open.push_back({to, from, num_bytes});
}
inline void commit(emulated::Groups& copies) {
  copies.committed.push_back(copies.open);
  copies.open.clear();
}
inline void finish(emulated::Groups& copies, size_t most) {
  for (; copies.committed.size() > most; copies.committed.pop_front()) emulated::perform(copies.committed.front());
}
inline void bulk_commit() { commit(emulated::me().stores); }
template <int kPending>
void bulk_wait_read() { finish(emulated::me().stores, kPending); }
template <int kPending>
void bulk_wait() { finish(emulated::me().stores, kPending); }
inline void bulk_wait_all() {
  bulk_commit();
  finish(emulated::me().stores, 0);
}
inline void copy_async(void* to, const void* from, bool present) {
  constexpr int kBytes = 16;
  must(reinterpret_cast<u64>(to) % kBytes == 0, "an asynchronous copy to an address that is not aligned");
  must(!present || reinterpret_cast<u64>(from) % kBytes == 0, "an asynchronous copy of what is not aligned");
  emulated::me().copies.open.push_back({to, present ? from : nullptr, kBytes});
}
inline void copy_commit() { commit(emulated::me().copies); }
template <int kPending>
void copy_wait() { finish(emulated::me().copies, kPending); }

inline u16 bf16_from_f32(f32 value) {
  const u32 bits = __float_as_uint(value);
  return std::isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u16 f16_from_f32(f32 value) { return emulated::value_of<u16>(emulated::bits_of(static_cast<_Float16>(value))); }
inline f32 f32_from_f16(u16 bits) { return static_cast<f32>(emulated::value_of<_Float16>(bits)); }

inline f32 e4m3_value(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const f32 size = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7) : std::ldexp(fraction / 8.0f, -6);
  return code & 0x80 ? -size : size;
}
inline u8 e4m3(f32 value) {
  if (std::isnan(value)) return 0x7F;
  const u8 sign = std::signbit(value) ? 0x80 : 0;
  const f32 size = std::fabs(value);
  if (size >= 448.0f) return sign | 0x7E;
  int below = 0, above = 0x7E;  // codes grow with their values
  while (below < above) {
    const int middle = (below + above + 1) / 2;
    if (e4m3_value(middle) <= size) below = middle;
    else above = middle - 1;
  }
  const f32 down = size - e4m3_value(below), up = e4m3_value(below + 1) - size;
  return sign | (below == 0x7E || down < up || (down == up && below % 2 == 0) ? below : below + 1);
}
inline u16 e4m3x2_from_f32(f32 high, f32 low) { return e4m3(high) << 8 | e4m3(low); }
inline u32 f16x2_from_e4m3x2(u16 bits) {
  auto half = [](int code) -> u32 { return (code & 0x7F) == 0x7F ? 0x7FFF : f16_from_f32(e4m3_value(code)); };
  return half(bits & 255) | half(bits >> 8) << 16;
}
inline f32 max_or_nan(f32 a, f32 b) { return a != a || b != b ? __uint_as_float(0x7FFFFFFF) : a < b ? b : a; }
inline u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

}  // namespace ep::ptx
