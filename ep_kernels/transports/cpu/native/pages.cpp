#include "pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "meeting.hpp"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace cd {
namespace {

constexpr int kPagesOfPiece = kLargePage / kPage;
// Operations after which an owner looks: slots have been used by then, and few looks are enough for what is used later.
constexpr uint64_t kLooks[] = {4, 32, 256, 2048};

bool is_time(uint64_t seq) {
  return std::any_of(kLooks, kLooks + sizeof kLooks / sizeof *kLooks, [&](uint64_t look) { return look == seq; });
}

// Whether at least half of a piece is in use.
bool is_used(uint8_t* piece) {
  unsigned char pages[kPagesOfPiece] = {};
  if (mincore(piece, kLargePage, pages) != 0) return false;
  return std::count_if(pages, pages + kPagesOfPiece, [](unsigned char page) { return page & 1; }) >= kPagesOfPiece / 2;
}

}  // namespace

uint8_t* map_memory(int fd, int64_t bytes, int protection) {
  const int64_t room = bytes + kLargePage;
  void* reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* first = static_cast<uint8_t*>(reserved);
  const int64_t before = int64_t(-reinterpret_cast<uintptr_t>(first) % kLargePage);
  void* all = mmap(first + before, bytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  if (all == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, room);
    errno = error;
    return nullptr;
  }
  if (before) munmap(first, before);
  const int64_t end = before + page_up(bytes);
  if (end < room) munmap(first + end, room - end);
  return static_cast<uint8_t*>(all);
}

LargePages::~LargePages() { free(is_done_); }

bool LargePages::watch(uint8_t* base, int64_t bytes) {
  is_done_ = static_cast<bool*>(calloc(bytes / kLargePage + 1, sizeof(bool)));
  base_ = base;
  pieces_ = is_done_ ? bytes / kLargePage : 0;
  return is_done_ != nullptr;
}

void LargePages::look(uint64_t seq) {
  if (!pieces_ || !is_time(seq)) return;
  for (int64_t i = 0; i < pieces_; ++i) {
    uint8_t* piece = base_ + i * kLargePage;
    if (is_done_[i] || !is_used(piece)) continue;
    is_done_[i] = true;
    if (madvise(piece, kLargePage, MADV_COLLAPSE) != 0 && errno == EINVAL) {
      pieces_ = 0;  // not with this kernel, or not in memfds
      return;
    }
  }
}

}  // namespace cd
