// What benchmarks/gpu/network_push.py measures: the host's end of a round between a kernel and a proxy.
#include "clock.hpp"
#include "ring.hpp"

#define CN_API extern "C" __attribute__((visibility("default")))

CN_API uint64_t cn_bench_box_bytes() { return sizeof(cd::Outbox); }

// Takes `rounds` descriptors out of a ring that begins with zeros, and tells the kernel of each by a word, as a proxy
// does when a message has come. ns [rounds]: the host's clock in between. 0: done; 1: nothing came for `give_up_ns`.
CN_API int cn_bench_echo(cd::Outbox* box, std::atomic<uint64_t>* word, int64_t rounds, int64_t give_up_ns,
                         int64_t* ns) {
  cd::Order order;
  for (int64_t i = 0; i < rounds; ++i) {
    const int64_t until = cd::now_ns() + give_up_ns;
    while (!box->pop(&order)) {
      if (cd::now_ns() > until) return 1;
    }
    ns[i] = cd::now_ns();
    word->store(uint64_t(i + 1), std::memory_order_release);
  }
  return 0;
}
