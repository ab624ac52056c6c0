// Runs a grid: one thread of the machine for each block. `fiber_main` is the kernel, called by every fiber.
#pragma once

namespace emulated {

void fiber_main();

inline thread_local const void* records;  // arguments of the kernel
inline thread_local int blocks_per_rank;
constexpr size_t kStackBytes = 64 << 10;

inline void start() {
  fiber_main();
  me().done = true;
  void* finished;
  if (--block->live == 0) emulated_switch(&finished, block->machine_stack);
  const int next = next_fiber();
  block->current = next;
  emulated_switch(&finished, block->fibers[next].stack_pointer);
  abort();
}

inline void run_block(unsigned index, unsigned num_blocks, unsigned num_threads, unsigned shared_bytes,
                      const void* arguments, int per_rank) {
  Block here{index, num_blocks, num_threads};
  here.live = num_threads;
  here.fibers.resize(num_threads);
  here.warps.resize(num_threads / 32);
  here.shared = static_cast<unsigned char*>(aligned_alloc(128, (shared_bytes + 255) / 128 * 128));
  memset(here.shared, 0xA5, shared_bytes);
  char* stacks = static_cast<char*>(aligned_alloc(4096, kStackBytes * num_threads));
  for (unsigned i = 0; i < num_threads; ++i) {
    void** top = reinterpret_cast<void**>(stacks + kStackBytes * (i + 1));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(start);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    here.fibers[i].stack_pointer = top;
  }
  block = &here;
  records = arguments;
  blocks_per_rank = per_rank;
  emulated_switch(&here.machine_stack, here.fibers[0].stack_pointer);
  for (Fiber& fiber : here.fibers) {  // the GPU completes what a kernel did not wait for
    for (std::vector<Copy>& group : fiber.stores.committed) perform(group);
    perform(fiber.stores.open);
  }
  free(stacks);
  free(here.shared);
}

}  // namespace emulated

extern "C" void emulated_launch(unsigned num_blocks, unsigned num_threads, unsigned shared_bytes, const void* records,
                                int blocks_per_rank) {
  std::vector<std::thread> blocks;
  for (unsigned i = 0; i < num_blocks; ++i)
    blocks.emplace_back(emulated::run_block, i, num_blocks, num_threads, shared_bytes, records, blocks_per_rank);
  for (std::thread& block : blocks) block.join();
}
