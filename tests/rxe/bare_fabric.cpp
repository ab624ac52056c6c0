// The yardstick of `libfabric`: a loop of fi_writedata between two processes, and nothing else. Ping-pong of `ping`
// bytes, then a stream of `count` times `bulk` bytes, each to a place of its own, with 64 writes under way. Prints
// "<p50 us of one way> <MB/s>".
//
// "waits": by a completion queue that has a descriptor, so that a thread could sleep, which it does not.
//
//     bare_fabric PROVIDER ADDRESS ROUNDS PING BULK COUNT [waits]
#include <dlfcn.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bare_loop.hpp"
#include "fabric_abi.hpp"

using namespace cd::fi;

namespace {

constexpr int kWindow = 64;

void need(bool ok, const char* what, long code) {
  if (ok) return;
  fprintf(stderr, "%s: %ld\n", what, code);
  exit(1);
}

void check(int error, const char* what) { need(error == 0, what, error); }

struct Told {
  uint8_t name[64];
  uint64_t name_bytes, key, base;
};

struct Side {
  Queue* queue = nullptr;
  Endpoint* endpoint = nullptr;
  Region *to = nullptr, *from = nullptr;
  uint8_t *buffer = nullptr, *source = nullptr;
  uint64_t peer = 0, contexts[kWindow][8], recvs[kWindow][8], inbox[kWindow];
  Told told{};
  long sent = 0, done = 0, arrived = 0;
  bool takes_recvs = false;

  void poll() {
    Entry batch[16];
    const ssize_t n = queue->ops->read(queue, batch, 16);
    need(n >= 0 || n == -EAGAIN, "read", long(n));
    for (ssize_t i = 0; i < n; ++i) {
      if (batch[i].flags & kRemoteData) {
        ++arrived;
        if (takes_recvs) post(int((static_cast<uint64_t*>(batch[i].context) - recvs[0]) / 8));
      } else {
        ++done;
      }
    }
  }
  void post(int i) {
    const ssize_t e = endpoint->messages->recv(endpoint, &inbox[i], 8, nullptr, kUnspecified, recvs[i]);
    need(e == 0, "recv", long(e));
  }
  void write(size_t bytes, size_t at = 0) {
    for (;;) {
      ssize_t e = -EAGAIN;
      if (sent - done < kWindow) {
        e = endpoint->rma->writedata(endpoint, source + at, bytes, from->descriptor, 1, peer, told.base + at, told.key,
                                     contexts[sent % kWindow]);
      }
      if (e == 0) break;
      need(e == -EAGAIN, "write", long(e));
      poll();
    }
    ++sent;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const long rounds = atol(argv[3]), count = atol(argv[6]);
  const size_t ping = size_t(atol(argv[4])), bulk = size_t(atol(argv[5]));
  int pipe_of[2];
  socketpair(AF_UNIX, SOCK_STREAM, 0, pipe_of);
  const bool first = fork() != 0;
  const int fd = pipe_of[first ? 0 : 1];
  void* lib = dlopen("libfabric.so.1", RTLD_NOW);
  need(lib != nullptr, "libfabric.so.1", 0);
  auto getinfo = reinterpret_cast<int (*)(uint32_t, const char*, const char*, uint64_t, const Info*, Info**)>(
      dlsym(lib, "fi_getinfo"));
  auto dupinfo = reinterpret_cast<Info* (*)(const Info*)>(dlsym(lib, "fi_dupinfo"));
  auto fabric_of = reinterpret_cast<int (*)(FabricAttr*, Fabric**, void*)>(dlsym(lib, "fi_fabric"));
  Info *hints = dupinfo(nullptr), *info = nullptr;
  hints->caps = kMsg | kRma;
  hints->mode = kContext | kContext2 | kRecvForData;
  hints->endpoint->type = kReliableDatagram;
  hints->domain->threading = kThreadDomain;
  hints->domain->mr_mode = kMrLocal | kMrVirtual | kMrAllocated | kMrProviderKey;
  hints->fabric->provider = strdup(argv[1]);
  // As ours: a write is complete when the peer has it.
  if (!strstr(argv[1], "verbs;")) hints->tx->op_flags = kDeliveryComplete;
  check(getinfo(1u << 16 | 17, argv[2], nullptr, kSource, hints, &info), "fi_getinfo");
  info->tx->size = std::min<size_t>(info->tx->size, 256);
  info->rx->size = std::min<size_t>(info->rx->size, 256);
  Fabric* fabric;
  Domain* domain;
  Vector* peers;
  VectorAttr vector{};
  vector.type = kAddressTable;
  QueueAttr queue{};
  queue.format = kWithData;
  if (argc > 7) queue.wait = kWaitFd;
  queue.size = 4 * kWindow;
  Side s;
  check(fabric_of(info->fabric, &fabric, nullptr), "fabric");
  check(fabric->ops->domain(fabric, info, &domain, nullptr), "domain");
  check(domain->ops->av_open(domain, &vector, &peers, nullptr), "av");
  check(domain->ops->cq_open(domain, &queue, &s.queue, nullptr), "cq");
  check(domain->ops->endpoint(domain, info, &s.endpoint, nullptr), "endpoint");
  Id* id = &s.endpoint->id;
  check(id->ops->bind(id, &peers->id, 0), "bind av");
  check(id->ops->bind(id, &s.queue->id, kTransmit | kRecv), "bind cq");
  check(id->ops->control(id, kEnable, nullptr), "enable");
  const size_t bytes = std::max(ping, bulk * size_t(count));
  s.buffer = static_cast<uint8_t*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  s.source = static_cast<uint8_t*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  memset(s.source, 1, bytes);
  memset(s.buffer, 1, bytes);
  auto reg = domain->registering->reg;
  check(reg(&domain->id, s.buffer, bytes, kRemoteWrite, 0, 1, 0, &s.to, nullptr), "reg");
  check(reg(&domain->id, s.source, bytes, kWrite, 0, 2, 0, &s.from, nullptr), "reg");
  Told mine{};
  size_t name_bytes = sizeof mine.name;
  check(s.endpoint->names->getname(id, mine.name, &name_bytes), "getname");
  mine.key = s.to->key;
  mine.base = info->domain->mr_mode & kMrVirtual ? reinterpret_cast<uint64_t>(s.buffer) : 0;
  need(write(fd, &mine, sizeof mine) == sizeof mine && read(fd, &s.told, sizeof mine) == sizeof mine, "pipe", errno);
  need(peers->ops->insert(peers, s.told.name, 1, &s.peer, 0, nullptr) == 1, "insert", 0);
  s.takes_recvs = ((info->mode | info->rx->mode) & kRecvForData) != 0;
  for (int i = 0; s.takes_recvs && i < kWindow; ++i) s.post(i);

  const double one_way_us = bare::ping_pong_us(s, first, rounds, ping);
  const double begun = bare::now_us();
  for (long i = 0; i < count && first; ++i) s.write(bulk, size_t(i) * bulk);
  const long until = rounds + (first ? 1 : count);
  while (s.arrived < until) s.poll();
  if (!first) s.write(0);
  if (first) printf("%.2f %.2f\n", one_way_us, double(count) * double(bulk) / (bare::now_us() - begun));
  fflush(stdout);
  const char over = 1;
  need(write(fd, &over, 1) == 1, "pipe", errno);
  char other;
  while (recv(fd, &other, 1, MSG_DONTWAIT) != 1) s.poll();
  if (first) wait(nullptr);
  _exit(0);
}
