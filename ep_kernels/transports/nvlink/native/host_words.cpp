// What the network brings of the hosts' words of ranks of other hosts: see transports/nvlink/memory/remote_pages.py.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "ring.hpp"

#define CD_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kPageWords = 512, kBlockWords = 9, kBlocks = 4, kAgreed = 3;
constexpr int64_t kDead = 1;  // abi.DEAD
using Word = std::atomic<int64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

struct HostWords {
  const int64_t* landing;  // [R][kPageWords]: as the network writes them, in any order
  Word* pages;             // [R][kPageWords]: as the hosts read them
  Word* gone;              // [R]: the rank is not waited for; kernels read it
  Word* joined;            // [R]: how often connections with the rank were made
};

// The first word of a block vouches for the others, and only grows.
void take(const HostWords& w, int rank, uint64_t block) {
  const uint64_t at = uint64_t(rank) * kPageWords + block * kBlockWords;
  if (w.landing[at] <= w.pages[at].load(std::memory_order_relaxed)) return;
  for (uint64_t i = 1; i < kBlockWords; ++i) w.pages[at + i].store(w.landing[at + i], std::memory_order_relaxed);
  w.pages[at].store(w.landing[at], std::memory_order_release);
}

void happen(void* context, int32_t rank, cd::NetEvent event, uint64_t value) {
  const HostWords& w = *static_cast<const HostWords*>(context);
  if (event == cd::NetEvent::arrived && value < kBlocks) take(w, rank, value);
  if (event == cd::NetEvent::down) w.gone[rank].store(kDead, std::memory_order_release);
  if (event == cd::NetEvent::up) {
    int64_t dead = kDead;  // a rank that is given up stays so
    w.gone[rank].compare_exchange_strong(dead, 0);
    w.joined[rank].fetch_add(1, std::memory_order_release);
  }
  if (event == cd::NetEvent::left_out) {
    Word& agreed = w.pages[uint64_t(rank) * kPageWords + kAgreed * kBlockWords];
    if (int64_t(value) > agreed.load(std::memory_order_relaxed)) {
      agreed.store(int64_t(value), std::memory_order_release);
    }
  }
}

}  // namespace

// Null: memory is short. All areas start as zeros.
CD_API void* cd_words_open(const int64_t* landing, int64_t* pages, int64_t* gone, int64_t* joined) {
  void* memory = malloc(sizeof(HostWords));
  if (!memory) return nullptr;
  return new (memory) HostWords{landing, reinterpret_cast<Word*>(pages), reinterpret_cast<Word*>(gone),
                                reinterpret_cast<Word*>(joined)};
}
CD_API void cd_words_close(void* words) { free(words); }
CD_API void* cd_words_handler() { return reinterpret_cast<void*>(&happen); }
