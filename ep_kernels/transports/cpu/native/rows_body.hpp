// The body of RowOps, compiled once per instruction set. Includers define CD_ROWS_TABLE, the table's name.
// Plain loops over columns: the compiler vectorises across columns and never reorders the sum of one column.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "convert.hpp"
#include "rows.hpp"

namespace {

using cd::Type;

constexpr int64_t kBlock = 128;
constexpr int64_t kAhead = 2048;  // bytes

// Calls fn(pointer, widen) with the reader of one column's type, which is bf16, f16 or f32.
template <typename Fn>
inline void with_reader(const void* row, Type type, Fn fn) {
  switch (type) {
    case Type::bf16:
      fn(static_cast<const uint16_t*>(row), [](uint16_t h) { return widen_bf16(h); });
      break;
    case Type::f16:
      fn(static_cast<const uint16_t*>(row), [](uint16_t h) { return widen_f16(h); });
      break;
    default:
      fn(static_cast<const float*>(row), [](float v) { return v; });
  }
}

void load(float* __restrict acc, const void* row, Type type, int64_t n) {
  with_reader(row, type, [&](const auto* __restrict p, auto widen) {
    for (int64_t i = 0; i < n; ++i) acc[i] = widen(p[i]);
  });
}

void add(float* __restrict acc, const void* row, Type type, int64_t n) {
  with_reader(row, type, [&](const auto* __restrict p, auto widen) {
    for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + widen(p[i]);
  });
}

void scale(float* __restrict acc, const void* row, Type type, float w, int64_t n) {
  with_reader(row, type, [&](const auto* __restrict p, auto widen) {
    for (int64_t i = 0; i < n; ++i) acc[i] = w * widen(p[i]);
  });
}

void scale_add(float* __restrict acc, const void* row, Type type, float w, int64_t n) {
  with_reader(row, type, [&](const auto* __restrict p, auto widen) {
    for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + w * widen(p[i]);
  });
}

void round(float* __restrict acc, Type type, int64_t n) {
  if (type == Type::bf16) {
    for (int64_t i = 0; i < n; ++i) acc[i] = widen_bf16(narrow_bf16(acc[i]));
  } else if (type == Type::f16) {
    for (int64_t i = 0; i < n; ++i) acc[i] = widen_f16(narrow_f16(acc[i]));
  }
}

void store(void* row, const float* __restrict acc, Type type, int64_t n) {
  if (type == Type::bf16) {
    auto* __restrict out = static_cast<uint16_t*>(row);
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_bf16(acc[i]);
  } else if (type == Type::f16) {
    auto* __restrict out = static_cast<uint16_t*>(row);
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_f16(acc[i]);
  } else {
    memcpy(row, acc, n * sizeof(float));
  }
}

// amax over the finite values of a block: as integers, magnitudes of floats keep their order.
inline float finite_amax(const float* __restrict v, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(v[i]) & 0x7fffffffu;
    const uint32_t finite = magnitude < 0x7f800000u ? magnitude : 0u;
    most = finite > most ? finite : most;
  }
  return float_of(most);
}

inline float block_scale(float amax, bool pow2) {
  if (amax == 0) return 1.0f;
  const float exact = amax / 448.0f;
  const float scale = exact < 0x1p-126f ? 0x1p-126f : exact;
  if (!pow2) return scale;
  const uint32_t u = bits_of(scale);
  return float_of(((u >> 23) + ((u & 0x7fffffu) != 0)) << 23);
}

// Calls keep(block, scale) for each block of `block` columns.
template <typename Keep>
inline void quantize_blocks(uint8_t* __restrict q, const float* __restrict values, bool pow2, int64_t n, int64_t block,
                            Keep keep) {
  for (int64_t b = 0; b * block < n; ++b) {
    const int64_t first = b * block, last = first + block < n ? first + block : n;
    const float scale = block_scale(finite_amax(values + first, last - first), pow2);
    const float inverse = 1.0f / scale;
    for (int64_t i = first; i < last; ++i) {
      const bool finite = (bits_of(values[i]) & 0x7fffffffu) < 0x7f800000u;
      const uint8_t code = narrow_e4m3(values[i] * inverse);
      q[i] = finite ? code : uint8_t(0x7f);
    }
    keep(b, scale);
  }
}

void quantize(uint8_t* __restrict q, float* __restrict scales, const float* __restrict values, bool pow2, int64_t n) {
  quantize_blocks(q, values, pow2, n, kBlock, [=](int64_t b, float scale) { scales[b] = scale; });
}

void quantize_mxfp8(uint8_t* __restrict q, uint8_t* __restrict scales, const float* __restrict values, int64_t n) {
  quantize_blocks(q, values, true, n, 32, [=](int64_t b, float scale) { scales[b] = uint8_t(bits_of(scale) >> 23); });
}

// Sign and code of x * inverse; the sign is that of x. Ties go to the even code.
inline uint8_t narrow_e2m1(float x, float inverse) {
  const float size = float_of(bits_of(x * inverse) & 0x7fffffffu);
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                   (size >= 3.5f) + (size > 5.0f);
  return uint8_t(code | (bits_of(x) >> 31) << 3);
}

void quantize_nvfp4(uint8_t* __restrict q, uint8_t* __restrict scales, const float* __restrict values, float global,
                    int64_t n) {
  for (int64_t first = 0; first < n; first += 16) {
    // The scale, from the largest magnitude; as bits, Inf and NaN are above all others.
    uint32_t most = 0;
    for (int64_t i = first; i < first + 16; ++i) {
      const uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
    const float exact = float_of(most) / 6.0f * global;
    const uint8_t scale = most < 0x7f800000u ? narrow_e4m3(exact < 448.0f ? exact : 448.0f) : uint8_t(0x7f);
    // Two columns to a byte, the even one low.
    const float number = widen_e4m3(scale), inverse = number == 0 ? 0.0f : global / number;
    for (int64_t i = first; i < first + 16; i += 2)
      q[i / 2] = uint8_t(narrow_e2m1(values[i], inverse) | narrow_e2m1(values[i + 1], inverse) << 4);
    scales[first / 16] = scale;
  }
}

void dequantize(float* __restrict acc, const uint8_t* __restrict q, const float* __restrict scales, int64_t n) {
  for (int64_t b = 0; b * kBlock < n; ++b) {
    const int64_t first = b * kBlock, last = first + kBlock < n ? first + kBlock : n;
    for (int64_t i = first; i < last; ++i) acc[i] = widen_e4m3(q[i]) * scales[b];
  }
}

// A row usually lands in memory that no cache holds: asking for its lines early, for writing, is worth a third of the
// time.
void copy(void* __restrict dst, const void* __restrict src, int64_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(to + i + kAhead, 1);
    __builtin_prefetch(from + i + kAhead, 0);
    memcpy(to + i, from + i, 64);
  }
  memcpy(to + i, from + i, bytes - i);
}

#if defined(__x86_64__)
#if defined(__AVX512F__)
using Wide = __m512i;
inline void put(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<Wide*>(to), _mm512_loadu_si512(from));
}
#elif defined(__AVX2__)
using Wide = __m256i;
inline void put(char* to, const char* from) {
  _mm256_stream_si256(reinterpret_cast<Wide*>(to), _mm256_loadu_si256(reinterpret_cast<const Wide*>(from)));
}
#else
using Wide = __m128i;
inline void put(char* to, const char* from) {
  _mm_stream_si128(reinterpret_cast<Wide*>(to), _mm_loadu_si128(reinterpret_cast<const Wide*>(from)));
}
#endif

void stream(void* __restrict dst, const void* __restrict src, int64_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const int64_t apart = int64_t(-reinterpret_cast<uintptr_t>(to) % sizeof(Wide));
  int64_t i = apart < bytes ? apart : bytes;
  memcpy(to, from, i);
  for (; i + int64_t(sizeof(Wide)) <= bytes; i += sizeof(Wide)) {
    __builtin_prefetch(from + i + kAhead, 0);
    put(to + i, from + i);
  }
  memcpy(to + i, from + i, bytes - i);
  _mm_sfence();  // such stores are not ordered by a later release
}
#else
void stream(void* __restrict dst, const void* __restrict src, int64_t bytes) { copy(dst, src, bytes); }
#endif

}  // namespace

const cd::RowOps cd::CD_ROWS_TABLE = {copy, stream, load, add, scale, scale_add, round, store, quantize,
                                          quantize_mxfp8, quantize_nvfp4, dequantize};
