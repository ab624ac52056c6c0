// What every region begins with, whatever it carries: the event count, and the words by which ranks meet and part.
//
//   page 0     EventPage   peers write here (notify), the owner sleeps here
//   page 1..   Meeting     sequence words of meetings; the rest of the region follows it
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cd {

constexpr int kMaxRanks = 64;
constexpr int kExchangeWords = 8;
constexpr int64_t kPage = 4096;
constexpr uint64_t kMagic = 0x4b434f4453534f52ull;

constexpr int64_t page_up(int64_t n) { return (n + kPage - 1) / kPage * kPage; }

struct alignas(64) Word {
  std::atomic<uint64_t> v;
};

struct EventPage {
  std::atomic<uint32_t> count;    // of events; futex word
  std::atomic<uint32_t> waiters;  // owner's threads that may be asleep on `count`
};

// What a survivor knew when it entered set_active: its counters, under the new epoch.
struct alignas(64) Resync {
  std::atomic<uint64_t> epoch_tag;  // epoch + 1; 0 = empty
  uint64_t counters[4];
  uint64_t tag;  // the same for those who read a mirror, where `epoch_tag` is stored after the rest has come
};

struct alignas(64) ExchangeSlot {
  std::atomic<uint64_t> seq;
  int64_t words[kExchangeWords];
};

struct Meeting {
  uint64_t magic, nonce, total_bytes;
  int64_t rank;
  Word barrier;
  Word membership;  // tag of the last set_active in which the owner has agreed on counters; 0 = as born
  Word gone;        // in a mirror: 1 + errno when the connection with the mirror's rank has ended
  Word exchange_latest;
  Word exchange_called;  // the owner will enter that exchange soon: peers may, too
  ExchangeSlot exchange[2];
  Resync resync[2];
};

}  // namespace cd
