// Mappings of memfds, and large pages under the parts of them that are used.
//
// A copy between memory that no cache holds spends up to a quarter of its time on translations of pages of 4 KiB. The
// kernel gives a memfd larger ones by request only (MADV_COLLAPSE, Linux 6.1), which copies what is there. So an owner
// asks after a few operations, and only for pieces of which at least half is in use: memory stays sparse elsewhere.
#pragma once
#include <cstdint>

namespace cd {

constexpr int64_t kLargePage = 2 << 20;

// Maps all of a memfd at a multiple of kLargePage: only there can its large pages be mapped as such. Null, and errno.
uint8_t* map_memory(int fd, int64_t bytes, int protection);

// Of one mapping of this process's own.
class LargePages {
 public:
  LargePages() = default;
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;
  ~LargePages();
  bool watch(uint8_t* base, int64_t bytes);  // at a multiple of kLargePage. False: memory is short
  // After operation number `seq`: asks for what has come into use, now and then.
  void look(uint64_t seq);

 private:
  uint8_t* base_ = nullptr;
  int64_t pieces_ = 0;        // 0: none, or the kernel gives none
  bool* is_done_ = nullptr;   // [pieces]: asked for, with whatever answer
};

}  // namespace cd
