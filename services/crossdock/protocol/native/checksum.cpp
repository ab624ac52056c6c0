// XXH64 of bytes while they are copied: the copy waits for memory, and the sums cost nothing beside it.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "frames.hpp"

namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F, kP3 = 0x165667B19E3779F9;
constexpr uint64_t kP4 = 0x85EBCA77C2B2AE63, kP5 = 0x27D4EB2F165667C5;
constexpr int kLanes = 4, kStripe = 8 * kLanes;
// Shorter copies stay in the cache: somebody reads them soon.
constexpr uint64_t kStreamedBytes = 256 << 10;

uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }
uint64_t round_of(uint64_t sum, uint64_t word) { return rotated(sum + word * kP2, 31) * kP1; }
uint64_t merged(uint64_t hash, uint64_t sum) { return (hash ^ round_of(0, sum)) * kP1 + kP4; }

template <typename Word>
Word read(const uint8_t* at) {
  Word word;
  memcpy(&word, at, sizeof(word));
  return word;
}

enum class Copy { kNone, kCached, kStreamed };

template <Copy copy>
void put(uint8_t* to, uint64_t word) {
#if defined(__x86_64__)
  if (copy == Copy::kStreamed) return _mm_stream_si64(reinterpret_cast<long long*>(to), (long long)word);
#endif
  if (copy != Copy::kNone) memcpy(to, &word, sizeof(word));
}

// Whole stripes; the four sums.
template <Copy copy>
uint64_t stripes(uint64_t (&sums)[kLanes], uint8_t* to, const uint8_t* from, uint64_t n) {
  uint64_t at = 0;
  for (; at + kStripe <= n; at += kStripe) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t word = read<uint64_t>(from + at + 8 * lane);
      put<copy>(to + at + 8 * lane, word);
      sums[lane] = round_of(sums[lane], word);
    }
  }
#if defined(__x86_64__)
  if (copy == Copy::kStreamed) _mm_sfence();
#endif
  return at;
}

uint64_t tail(uint64_t hash, const uint8_t* at, uint64_t n) {
  for (; n >= 8; at += 8, n -= 8) hash = rotated(hash ^ round_of(0, read<uint64_t>(at)), 27) * kP1 + kP4;
  if (n >= 4) {
    hash = rotated(hash ^ read<uint32_t>(at) * kP1, 23) * kP2 + kP3;
    at += 4, n -= 4;
  }
  for (; n; ++at, --n) hash = rotated(hash ^ *at * kP5, 11) * kP1;
  hash = (hash ^ hash >> 33) * kP2;
  hash = (hash ^ hash >> 29) * kP3;
  return hash ^ hash >> 32;
}

}  // namespace

// XXH64 of n bytes with that seed, which are copied to `to` unless it is null.
CD_API uint64_t cd_copy_hashed(uint8_t* to, const uint8_t* from, uint64_t n, uint64_t seed) {
  uint64_t sums[kLanes] = {seed + kP1 + kP2, seed + kP2, seed, seed - kP1}, hash = seed + kP5, at = 0;
  if (n >= kStripe) {
    at = !to                  ? stripes<Copy::kNone>(sums, to, from, n)
         : n < kStreamedBytes ? stripes<Copy::kCached>(sums, to, from, n)
                              : stripes<Copy::kStreamed>(sums, to, from, n);
    hash = rotated(sums[0], 1) + rotated(sums[1], 7) + rotated(sums[2], 12) + rotated(sums[3], 18);
    for (const uint64_t sum : sums) hash = merged(hash, sum);
  }
  if (to) memcpy(to + at, from + at, n - at);
  return tail(hash + n, from + at, n - at);
}
