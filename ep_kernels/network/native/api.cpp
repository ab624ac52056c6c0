// The C ABI that network/proxy.py calls. Nothing throws across it.
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "fabric_device.hpp"
#include "proxy.hpp"
#include "verbs_device.hpp"

#define CN_API extern "C" __attribute__((visibility("default")))
#ifndef CD_BUILD_ID
#define CD_BUILD_ID "unknown"
#endif

namespace {
constexpr size_t kPage = 4096;  // a GPU's driver maps whole pages
constexpr size_t kBoxBytes = (sizeof(cd::Outbox) + kPage - 1) / kPage * kPage;

// Null: memory is short.
cd::Provider* make(const cd::NetSettings& settings) {
  cd::Provider* inner = nullptr;
  if (!strcmp(settings.provider, "tcp")) inner = cd::make_tcp();
  if (!strcmp(settings.provider, "verbs")) inner = cd::make_verbs(settings);
  if (!strncmp(settings.provider, "libfabric", 9)) inner = cd::make_libfabric(settings);
  if (!inner || !settings.shuffled) return inner;
  cd::Provider* outer = cd::make_shuffle(inner, settings.seed, settings.drop_after);
  if (!outer) inner->close();
  return outer;
}

void mark(void* context, int32_t, cd::NetEvent event, uint64_t) {
  if (event != cd::NetEvent::arrived) return;
  auto* m = static_cast<cd::Mark*>(context);
  m->at_ns.store(cd::now_ns(), std::memory_order_relaxed);
  m->count.store(m->count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}
}  // namespace

CN_API const char* cd_build_id() { return CD_BUILD_ID; }

// Of the structures that Python mirrors: NetMemory, NetSettings, Text, Traffic.
CN_API void cn_sizes(uint64_t* out) {
  const uint64_t sizes[] = {sizeof(cd::NetMemory), sizeof(cd::NetSettings), sizeof(cd::Text), sizeof(cd::Traffic)};
  memcpy(out, sizes, sizeof sizes);
}

// Lines of ports that a provider can use (verbs_device.hpp). 0: `text` says why there are none.
CN_API int cn_devices(const char* provider, char* lines, size_t size, cd::Text* text) {
  lines[0] = 0;
  if (!strcmp(provider, "verbs")) return cd::ib::list_ports(lines, size, text);
  if (!strncmp(provider, "libfabric", 9)) return cd::fi::list_domains(lines, size, text);
  text->say("%s: has no devices of its own", provider);
  return 0;
}

// Null, and errno, when there can be no thread.
CN_API cd::Proxy* cn_open(int64_t spin_ns, const int32_t* cpus, int num_cpus) {
  void* memory = calloc(1, sizeof(cd::Proxy));
  if (!memory) return nullptr;
  auto* proxy = new (memory) cd::Proxy;
  if (proxy->start(spin_ns, cpus, num_cpus)) return proxy;
  free(memory);
  return nullptr;
}
CN_API void cn_shut(cd::Proxy* proxy) {
  proxy->stop();
  free(proxy);
}
CN_API void cn_close_in_child(cd::Proxy* proxy) { proxy->close_in_child(); }

// Null, and errno; `text` says more if the provider cannot be used, else what was chosen.
CN_API cd::NetChannel* cn_channel(cd::Proxy* proxy, const cd::NetMemory* memory, const cd::NetSettings* settings,
                                  cd::NetHandler handler, void* context, cd::Text* text) {
  // Memory of all parts first: what is begun below has to be ended.
  void* made = calloc(1, sizeof(cd::NetChannel));
  void* box = aligned_alloc(kPage, kBoxBytes);
  cd::Provider* provider = make(*settings);
  errno = ENOMEM;
  if (made && box && provider) {
    memset(box, 0, sizeof(cd::Outbox));
    auto* c = new (made) cd::NetChannel;
    c->memory = *memory;
    c->patience_ns = settings->patience_ns;
    c->handler = handler;
    c->context = context;
    c->provider = provider;
    c->outbox = static_cast<cd::Outbox*>(box);
    c->outbox->stripe = settings->lanes > 1 ? 256 << 10 : 1 << 30;
    const int error = proxy->add(c);
    text->say("%s", error == ETIMEDOUT ? "the proxy thread does not answer" : provider->about());
    if (error == 0) return c;
    errno = error;
  }
  const int error = errno;
  free(made);
  free(box);
  if (provider) provider->close();
  errno = error;
  return nullptr;
}
CN_API cd::Outbox* cn_outbox(cd::NetChannel* c) { return c->outbox; }
// Before any peer joins: kernels push. `stripe`: see Outbox; smaller where the provider's writes are. out [5]:
// addresses of the ring and of the number of popped descriptors, bytes of the memory that begins with the ring,
// descriptors of a ring, stripe.
CN_API void cn_device(cd::NetChannel* c, uint64_t stripe, uint64_t* out) {
  while (stripe > c->provider->most_bytes()) stripe /= 2;
  c->outbox->stripe = stripe;
  c->outbox->device.store(true);
  const uint64_t one = 1;
  (void)!write(c->outbox->event_fd, &one, sizeof one);  // from now on the proxy must not sleep for long
  out[0] = reinterpret_cast<uint64_t>(c->outbox->ring);
  out[1] = reinterpret_cast<uint64_t>(&c->outbox->popped);
  out[2] = kBoxBytes;
  out[3] = cd::Outbox::kSize;
  out[4] = stripe;
}
// No kernel runs, and kernels count from 0 again: those that gave up have left places of the ring empty.
CN_API void cn_device_restart(cd::NetChannel* c) { c->proxy->restart_ring(c); }
// Descriptors are about to be pushed by those that cannot wake the proxy.
CN_API void cn_wake(cd::NetChannel* c) { cd::wake(*c->outbox); }
// The handler of a ping's end, whose context is a Mark.
CN_API cd::NetHandler cn_mark_handler() { return mark; }
// What a rank's native half does by itself; for tests and benchmarks. 0: the ring is full.
CN_API int cn_push(cd::NetChannel* c, int rank, uint64_t offset, uint32_t bytes, uint32_t imm) {
  const bool pushed = c->outbox->push(rank, offset, bytes, imm);
  cd::wake(*c->outbox);
  return pushed;
}

// Takes over the descriptors when it returns 0; else an errno.
CN_API int cn_join(cd::NetChannel* c, int rank, int control_fd, const int32_t* lanes, int num_lanes) {
  return c->proxy->join(c, rank, control_fd, lanes, num_lanes);
}
CN_API int cn_leave(cd::NetChannel* c, int rank, uint64_t tag) { return c->proxy->leave(c, rank, tag); }
// Bit per rank whose connections stand; that this end has joined.
CN_API uint64_t cn_up(cd::NetChannel* c) { return c->established.load(std::memory_order_acquire); }
CN_API uint64_t cn_joined(cd::NetChannel* c) { return c->joined.load(std::memory_order_acquire); }
CN_API void cn_why(cd::NetChannel* c, int rank, cd::Text* out) { c->proxy->why(c, rank, out); }
CN_API void cn_traffic(cd::NetChannel* c, cd::Traffic* out) { c->proxy->traffic(c, out); }
// 1 if nothing of this rank's region is still to be read for the ranks of `mask`.
CN_API int cn_quiet(const cd::NetChannel* c, uint64_t mask) {
  for (const int rank : cd::Bits(mask)) {
    if (!c->outbox->is_quiet(rank)) return 0;
  }
  return 1;
}
// No event comes any more, and nothing of the caller's memory is touched. The outbox goes with `cn_free`.
CN_API void cn_close(cd::NetChannel* c) { c->proxy->remove(c); }
CN_API void cn_free(cd::NetChannel* c) {
  free(c->outbox);
  free(c);
}
