// What benchmarks measure where Python would be most of the time: benchmarks/network.py and, at the end, the host's
// half of benchmarks/gpu/network_push.py.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "proxy.hpp"

#define CD_API extern "C" __attribute__((visibility("default")))

CD_API const char* cd_build_id() { return CD_BUILD_ID; }

namespace {

constexpr int64_t kGiveUpNs = 60'000'000'000, kMessageNs = 10'000'000'000;

// Spins; gives the processor away now and then, which another thread may need.
template <typename Done>
void spin_until(Done done) {
  for (int i = 1; !done(); ++i) {
    cd::relax();
    if (i % 20'000 == 0) sched_yield();
  }
}

// Both ends of a ping-pong: each arrival is answered by the handler, on the proxy's own thread. Mirrored by
// tests/rxe/yardsticks.py.
struct Pong {
  cd::Outbox* box;
  int64_t* ns;  // [rounds] of there and back; null: this end answers only
  int64_t rounds, at_ns;
  std::atomic<int64_t> done;
  int32_t rank;  // -1: counts, and answers nothing
  uint32_t bytes;
};

void pong(void* context, int32_t, cd::NetEvent event, uint64_t) {
  if (event != cd::NetEvent::arrived) return;
  auto* p = static_cast<Pong*>(context);
  const int64_t round = p->done.load(std::memory_order_relaxed), now = cd::now_ns();
  if (p->ns) p->ns[round] = now - p->at_ns;
  p->at_ns = now;
  if (p->rank >= 0 && (!p->ns || round + 1 < p->rounds)) p->box->push(p->rank, 0, p->bytes, 0);
  p->done.store(round + 1, std::memory_order_release);
}

struct Pusher {
  cd::Outbox* box;
  int64_t rounds;
  std::atomic<int64_t> pushed_ns;
};

void* push_all(void* given) {
  auto& p = *static_cast<Pusher*>(given);
  for (int64_t i = 0; i < p.rounds; ++i) {
    p.pushed_ns.store(cd::now_ns(), std::memory_order_relaxed);
    p.box->push(0, uint64_t(i), 8, 0);
    spin_until([&] { return p.box->popped.load(std::memory_order_acquire) == uint64_t(i + 1); });
  }
  return nullptr;
}

}  // namespace

CD_API void* cd_bench_ponger() { return reinterpret_cast<void*>(&pong); }
// Starts a ping-pong of `p->rounds`; `p->done` counts them.
CD_API void cd_bench_ping(void* pong) {
  auto* p = static_cast<Pong*>(pong);
  p->at_ns = cd::now_ns();
  p->box->push(p->rank, 0, p->bytes, 0);
  cd::wake(*p->box);
}

// ns [rounds]: from before a push, by another thread, until after the pop. 0 or an errno.
CD_API int cd_bench_ring(int64_t rounds, int64_t* ns) {
  void* memory = aligned_alloc(64, sizeof(cd::Outbox));
  if (!memory) return ENOMEM;
  memset(memory, 0, sizeof(cd::Outbox));
  Pusher pusher{static_cast<cd::Outbox*>(memory), rounds, {0}};
  pthread_t thread;
  const int error = pthread_create(&thread, nullptr, push_all, &pusher);
  if (error == 0) {
    // The other thread pushes one when this one has popped the last.
    for (int64_t i = 0; i < rounds; ++i) {
      cd::Order order;
      spin_until([&] { return !pusher.box->empty(); });
      const int64_t pushed_ns = pusher.pushed_ns.load(std::memory_order_relaxed);  // of this one until it is popped
      pusher.box->pop(&order);
      ns[i] = cd::now_ns() - pushed_ns;
    }
    pthread_join(thread, nullptr);
  }
  free(memory);
  return error;
}

// ns [rounds]: from before the push until the other end's handler; `at` is the cd::Mark of that end. 0, or ETIMEDOUT:
// one has not come in 10 s.
CD_API int cd_bench_mail(cd::NetChannel* c, void* at, int rank, uint32_t bytes, int64_t rounds, int64_t* ns) {
  cd::Mark& m = *static_cast<cd::Mark*>(at);
  for (int64_t i = 0; i < rounds; ++i) {
    const uint64_t before = m.count.load(std::memory_order_acquire);
    const int64_t begun = cd::now_ns();
    c->outbox->push(rank, 0, bytes, 0);
    cd::wake(*c->outbox);
    bool late = false;
    spin_until([&] {
      late = cd::now_ns() - begun > kMessageNs;
      return late || m.count.load(std::memory_order_acquire) != before;
    });
    if (late) return ETIMEDOUT;
    ns[i] = m.at_ns.load(std::memory_order_relaxed) - begun;
  }
  return 0;
}

// The same without ring and proxy: one thread, one connection, 16 bytes and `bytes`. 0 or an errno.
CD_API int cd_bench_sockets(int out, int in, const void* from, void* to, uint32_t bytes, int64_t rounds, int64_t* ns) {
  char header[16] = {};
  for (int64_t i = 0; i < rounds; ++i) {
    const int64_t begun = cd::now_ns();
    uint64_t sent = 0, got = 0;
    const uint64_t all = sizeof header + bytes;
    while (got < all) {
      // Send what the socket takes, header and body as one message.
      if (sent < all) {
        const uint64_t of_header = sent < sizeof header ? sizeof header - sent : 0, of_body = sent + of_header - 16;
        iovec parts[2] = {{header + 16 - of_header, of_header},
                          {const_cast<char*>(static_cast<const char*>(from)) + of_body, bytes - of_body}};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = 2;
        const ssize_t n = sendmsg(out, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return errno;
        if (n > 0) sent += uint64_t(n);
      }
      // Take what has come.
      const ssize_t n = recv(in, static_cast<char*>(to) + got, all - got, MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN) return errno;
      if (n == 0) return ECONNRESET;
      if (n > 0) got += uint64_t(n);
    }
    ns[i] = cd::now_ns() - begun;
  }
  return 0;
}

// Sends `count` messages, each to its rank and from the end of the one before, the first from `offset`, and waits until
// `until` have come here in all and the own are gone. `nap_ns`: between looks; 0: spins. Nanoseconds, -1: it took too
// long.
CD_API int64_t cd_bench_stream(cd::NetChannel* c, void* here, const int32_t* ranks, const uint32_t* bytes,
                               int64_t count, uint64_t offset, uint64_t until, int64_t nap_ns) {
  cd::Mark& m = *static_cast<cd::Mark*>(here);
  const int64_t begun = cd::now_ns();
  for (int64_t i = 0; i < count; ++i) {
    spin_until([&] { return c->outbox->push(ranks[i], offset, bytes[i], 0); });
    cd::wake(*c->outbox);
    offset += bytes[i];
  }
  for (int64_t i = 0; i < count;) {
    if (m.count.load(std::memory_order_acquire) >= until && c->outbox->is_quiet(ranks[i])) {
      ++i;
      continue;
    }
    if (cd::now_ns() - begun > kGiveUpNs) return -1;
    if (nap_ns) cd::nap(nap_ns);  // spinning would take a processor from the proxies
    cd::relax();
  }
  return cd::now_ns() - begun;
}

CD_API uint64_t cd_bench_box_bytes() { return sizeof(cd::Outbox); }

// Takes `rounds` descriptors out of a ring that begins with zeros, and tells the kernel of each by a word, as a proxy
// does when a message has come. ns [rounds]: the host's clock in between. 0: done; 1: nothing came for `give_up_ns`.
CD_API int cd_bench_echo(cd::Outbox* box, std::atomic<uint64_t>* word, int64_t rounds, int64_t give_up_ns,
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
