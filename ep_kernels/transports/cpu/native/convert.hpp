// Number formats, one value at a time, in integer arithmetic that compilers turn into vector code. Bit for bit as torch
// on x86: round to nearest even; a NaN narrows to 0xFFFF in bf16 and keeps its top payload bits (made quiet) in fp16.
// Internal linkage throughout: each build of rows_body.hpp must get its own copy.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

inline uint32_t bits_of(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}

inline float widen_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }

inline uint16_t narrow_bf16(float v) {
  const uint32_t u = bits_of(v);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0xffffu : rounded);
}

inline float widen_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t shifted = uint32_t(h & 0x7fff) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = (shifted + (224u << 23)) | ((shifted & 0x7fffffu) ? 0x400000u : 0u);
  // Subnormal: shifted + 2^-14, minus 2^-14, is exact.
  const uint32_t small = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
  const uint32_t magnitude = exponent == 0 ? small : exponent == 0x0f800000u ? special : normal;
  return float_of(sign | magnitude);
}

inline uint16_t narrow_f16(float v) {
  const uint32_t u = bits_of(v);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  // Adding 0.5 aligns a value below 2^-14 so that its low bits are the subnormal, rounded by the addition itself.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < (113u << 23) ? small : normal;
  const uint32_t inside = magnitude >= 0x477ff000u ? 0x7c00u : finite;
  return uint16_t(sign | (magnitude > 0x7f800000u ? nan : inside));
}

inline float widen_e4m3(uint8_t q) {
  const uint32_t sign = uint32_t(q & 0x80) << 24;
  const uint32_t shifted = uint32_t(q & 0x7f) << 20;
  const uint32_t normal = shifted + (120u << 23);
  const uint32_t small = bits_of(float_of(shifted + (121u << 23)) - float_of(121u << 23));
  const uint32_t magnitude = (q & 0x7f) == 0x7f ? 0x7fc00000u : (q & 0x78) == 0 ? small : normal;
  return float_of(sign | magnitude);
}

// |v| must not round past 448; the quantiser's scales see to that. Non-finite values become 0x7F, whatever their sign.
inline uint8_t narrow_e4m3(float v) {
  const uint32_t u = bits_of(v);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  // Adding 2^14 leaves units of 2^-9, the e4m3 subnormal step, in the low bits.
  const uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20;
  const uint32_t finite = sign | (magnitude < (121u << 23) ? small : normal);
  return uint8_t(magnitude >= 0x7f800000u ? 0x7fu : finite);
}

}  // namespace
