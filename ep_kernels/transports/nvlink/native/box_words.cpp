// What the network brings a rank on a GPU: words in pinned memory that its kernels wait for (kernels/common/push.cuh).
//
// Of a dispatch, counts and metadata are METADATA, rows PAYLOAD; rows come to one rank for all of its host, whose
// kernels read its words.
//
// An immediate is flag << 28 | parts - 1 << 18 | low bits of seq. A word becomes seq when all parts of operation seq
// and of those before it have come, in whatever order; numbers that a word has reached are stale. The proxy has put the
// bytes of a part in the inbox before it calls.
//
// Rows may come in slices, whose parts say so: kFlags + (0: dispatch, 1: combine) << 28 | slice << 23 | parts of the
// slice - 1 << 18 | low bits of seq. A slice's bit is set in the word of the next operation when all its parts are
// here.
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "ring.hpp"

#define CD_API extern "C" __attribute__((visibility("default")))

namespace {

// FLAGS of kernels/abi.py.
constexpr uint32_t kStarted = 0, kMetadata = 1, kPayload = 2;
constexpr uint32_t kCombineStarted = 3, kCombine = 4, kBarrier = 5, kLeftOut = 6;
constexpr uint32_t kFlags = 9;
constexpr int kSeqBits = 18, kPartBits = 10, kSlicePartBits = 5, kSlices = 32;
constexpr uint64_t kDead = 1;
constexpr uint64_t kWindow = 128;  // operations that one rank may be ahead of another: more than there are slots

struct Count {
  uint16_t come, of;
  uint32_t slices;  // all of whose parts have come
  uint8_t parts[kSlices];
};

struct Words {
  pthread_mutex_t mutex;
  int ranks;
  std::atomic<uint64_t>* words;  // [kFlags, ranks]; behind them:
  std::atomic<uint64_t>* slices;  // [2, ranks] low half of the next dispatch, combine; its slices that are here
  std::atomic<uint64_t>* gone;   // [ranks] World.gone
  // Of GPUs that do not promise the order of what NICs write; null: there is nothing to flush.
  int (*enter)(void*);
  void* context;
  int (*flush)(int target, int scope);
  Count counts[kFlags][cd::kNetRanks][kWindow];

  std::atomic<uint64_t>& at(uint32_t flag, int rank) {
    return words[uint64_t(flag) * uint64_t(ranks) + uint64_t(rank)];
  }
};

// Makes what NICs have written visible to this GPU's kernels. False: the GPU is lost.
bool flushed(const Words& w) {
  constexpr int kCurrentContext = 0, kToOwner = 100;  // of the driver's enumerations
  return !w.flush || (w.enter(w.context) == 0 && w.flush(kCurrentContext, kToOwner) == 0);
}

// What of the operation after `done` is here.
void tell_slices(Words& w, uint32_t flag, int rank, uint64_t done) {
  const uint64_t next = done + 1;
  const uint32_t slices = w.counts[flag][rank][next % kWindow].slices;
  w.slices[uint64_t(flag == kCombine) * uint64_t(w.ranks) + uint64_t(rank)].store(next << 32 | slices,
                                                                                 std::memory_order_release);
}

void arrived(Words& w, int rank, uint32_t imm) {
  // What the immediate value says: which flag, of which operation, which part of how many.
  const uint32_t low = imm & ((1u << kSeqBits) - 1), what = imm >> kSeqBits & ((1u << kPartBits) - 1);
  uint32_t flag = imm >> 28;
  const bool is_slice = flag == kFlags || flag == kFlags + 1;
  if (is_slice) flag = flag == kFlags ? kPayload : kCombine;
  if (flag >= kFlags || flag == kLeftOut) return;
  std::atomic<uint64_t>& word = w.at(flag, rank);
  // A word that is not counted is there at once.
  uint64_t now = word.load(std::memory_order_relaxed);
  const int64_t ahead = int32_t((low - uint32_t(now)) << (32 - kSeqBits)) >> (32 - kSeqBits);
  if (ahead <= 0) return;
  const bool is_counted = flag == kMetadata || flag == kPayload || flag == kCombine;
  if (!is_counted) return word.store(now + uint64_t(ahead), std::memory_order_release);
  // Of a counted one a part has come: of a slice, or of the rest.
  if (uint64_t(ahead) >= kWindow) return;
  Count* counts = w.counts[flag][rank];
  Count& count = counts[(now + uint64_t(ahead)) % kWindow];
  ++count.come;
  bool is_whole = false;  // a slice
  if (is_slice) {
    const uint32_t slice = what >> kSlicePartBits, parts = (what & ((1u << kSlicePartBits) - 1)) + 1;
    is_whole = ++count.parts[slice] == parts;
    count.slices |= uint32_t(is_whole) << slice;
  } else {
    count.of = uint16_t(what + 1);
  }
  // Operations that are whole now, in order.
  const uint64_t before = now;
  for (Count* next; next = &counts[(now + 1) % kWindow], next->of && next->come == next->of; ++now) *next = {};
  if ((now == before && !is_whole) || !flushed(w)) return;
  if (flag != kMetadata) tell_slices(w, flag, rank, now);
  if (now != before) word.store(now, std::memory_order_release);
}

void on_network(void* context, int32_t rank, cd::NetEvent event, uint64_t value) {
  Words& w = *static_cast<Words*>(context);
  pthread_mutex_lock(&w.mutex);
  switch (event) {
    case cd::NetEvent::arrived:
      arrived(w, rank, uint32_t(value));
      break;
    case cd::NetEvent::down:
      w.gone[rank].store(kDead, std::memory_order_release);
      break;
    case cd::NetEvent::up: {
      uint64_t dead = kDead;
      w.gone[rank].compare_exchange_strong(dead, 0);
      break;
    }
    case cd::NetEvent::left_out:
      w.at(kLeftOut, rank).store(value, std::memory_order_release);
      break;
  }
  pthread_mutex_unlock(&w.mutex);
}

}  // namespace

// words [FLAGS + 2, ranks], gone [ranks]: pinned. Null: memory is short.
CD_API void* cd_boxes_new(int ranks, uint64_t* words, uint64_t* gone) {
  void* memory = calloc(1, sizeof(Words));
  if (!memory) return nullptr;
  auto* w = new (memory) Words;
  w->mutex = PTHREAD_MUTEX_INITIALIZER;
  w->ranks = ranks;
  w->words = reinterpret_cast<std::atomic<uint64_t>*>(words);
  w->slices = w->words + uint64_t(kFlags) * uint64_t(ranks);
  w->gone = reinterpret_cast<std::atomic<uint64_t>*>(gone);
  return w;
}
CD_API void cd_boxes_flush(Words* w, int (*enter)(void*), void* context, int (*flush)(int, int)) {
  w->enter = enter;
  w->context = context;
  w->flush = flush;
}
CD_API cd::NetHandler cd_boxes_handler() { return &on_network; }
// All ranks go on from these numbers: what has come of other operations counts no more.
CD_API void cd_boxes_restart(Words* w, uint64_t dispatch, uint64_t combine, uint64_t barrier) {
  pthread_mutex_lock(&w->mutex);
  for (int rank = 0; rank < w->ranks; ++rank) {
    // The words of each rank.
    const auto set = [&](uint32_t flag, uint64_t seq) { w->at(flag, rank).store(seq, std::memory_order_release); };
    set(kStarted, dispatch);
    set(kMetadata, dispatch);
    set(kPayload, dispatch);
    set(kCombineStarted, combine);
    set(kCombine, combine);
    set(kBarrier, barrier);
    set(kLeftOut, 0);
    // Parts of operations that were under way count no more.
    for (auto& counts : w->counts) {
      for (Count& count : counts[rank]) count = {};
    }
    tell_slices(*w, kPayload, rank, dispatch);
    tell_slices(*w, kCombine, rank, combine);
  }
  pthread_mutex_unlock(&w->mutex);
}
CD_API void cd_boxes_free(Words* w) { free(w); }
