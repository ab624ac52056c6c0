// What one launch needs beside its arguments; found in the driver by `cd_open` (launch.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

#define CD_API extern "C" __attribute__((visibility("default")))

// A launch of which only stream and arguments are still open. kIsCooperative: all blocks are resident together, or the
// launch is refused. kIsOverlapped: the grid may be set up while the kernel before it on the stream still runs, and
// must itself wait for that kernel's end.
struct Prepared {
  void* function;
  uint32_t blocks, threads, shared_bytes, flags;
};
enum Flags : uint32_t { kIsCooperative = 1, kIsOverlapped = 2 };

constexpr int kCaptured = -1;

// Words of which one that is above its `most` means that Python must look.
struct QuietWord {
  const volatile int64_t* word;
  int64_t most;
};
struct Quiet {
  const QuietWord* words;
  int64_t count;
};

// The driver's status. `arguments`: addresses of the parameters.
CD_API int cd_launch(const Prepared* p, void* stream, void** arguments);

// Launch a kernel with one parameter, at this address. The driver's status; kCaptured where a CUDA graph took it.
CD_API int cd_launch_one(const Prepared* p, void* stream, void* argument);

namespace cd {

inline bool is_quiet(const Quiet* quiet) {
  for (const QuietWord* each = quiet->words; each < quiet->words + quiet->count; ++each)
    if (*each->word > each->most) return false;
  return true;
}
// Whether a graph captures the stream; no where the driver cannot say.
bool is_captured(void* stream);
// The context that is current on this thread; null where the driver cannot say.
void* current_context();
// Bytes between any two memories, in the order of the stream. The driver's status.
int copy(uint64_t to, uint64_t from, size_t num_bytes, void* stream);
// Whether the stream still has work. False on any error: the caller synchronises next, and gets the error there.
bool is_busy(void* stream);

}  // namespace cd
