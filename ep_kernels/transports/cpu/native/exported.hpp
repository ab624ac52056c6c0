// How a function of the C ABI is declared, and the hash that guards the byte maps.
#pragma once
#include <cstdint>

#define CD_API extern "C" __attribute__((visibility("default")))

namespace cd {

// FNV-1a of whole words.
constexpr uint64_t hash_of(const uint64_t* facts, int n) {
  uint64_t hash = 1469598103934665603ull;
  for (int i = 0; i < n; ++i) hash = (hash ^ facts[i]) * 1099511628211ull;
  return hash;
}

}  // namespace cd
