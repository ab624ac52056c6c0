// The thread that moves messages between queue pairs.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "fake.hpp"

namespace fake {
namespace {

constexpr int64_t kAgainNs = 2'000'000, kNotReadyNs = 500'000;
constexpr int kSilence = -1;  // no answer

bool is_cut(int number) {
  const Faults& f = state().faults[number];
  return f.absent || f.port_down || f.cut;
}

sockaddr_un name_of(uint32_t host, socklen_t* length) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "crossdock-fake-verbs-%08x", host);
  *length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(n));
  return name;
}

uint32_t host_in(const Gid& gid) {
  uint32_t host;
  memcpy(&host, gid.raw + 12, 4);
  return ntohl(host);
}

QueuePair* find(uint32_t number) {
  for (QueuePair* pair : state().pairs) {
    if (pair->number == number) return pair;
  }
  return nullptr;
}

MemoryRegion* region(uint32_t key) {
  for (MemoryRegion* one : state().regions) {
    if (one->lkey == key) return one;
  }
  return nullptr;
}

// Bytes of a region for a send, or where those of a receive go, at most so many at a time (`*bytes`): where they lie,
// or beside it.
uint8_t beside[1 << 16];
uint8_t* seen(const MemoryRegion* region, uint64_t address, size_t* bytes) {
  if (!region->is_copied) return reinterpret_cast<uint8_t*>(address) + region->shift;
  *bytes = std::min(*bytes, sizeof beside);
  return beside;
}

void copy(uint64_t to, uint64_t from, size_t bytes, uint64_t device_address) {
  const DeviceMemory* device = device_of(device_address, bytes);
  const Driver none{}, &d = device ? device->driver : none;
  if (!d.copy || d.enter(d.context) || d.copy(to, from, bytes, d.stream) || d.wait(d.stream)) {
    ++state().counts.wrong_calls;
  }
}

// Sends the first message of a queue pair as far as the socket takes it, and reads the answer.
void advance(QueuePair& q, int64_t now) {
  while (q.state == kReadyToSend && !q.sends.empty()) {
    const Work& w = q.sends.front();
    if (!q.until_ns) q.until_ns = now + state().faults[q.number_of_device].patience_ms * 1'000'000;
    if (now > q.until_ns) return fail(q, kRetriesExceeded);
    if (now < q.again_ns) return;
    if (is_cut(q.number_of_device)) return cut_off(q);
    const bool is_read = w.bytes && w.inlined.empty();
    const MemoryRegion* own = is_read ? covers(w.lkey, q.domain, uint64_t(w.from), w.bytes, 0) : nullptr;
    if (is_read && !own) return fail(q, kLocalProtection);
    if (q.fd < 0) {
      socklen_t length;
      const sockaddr_un name = name_of(host_in(q.peer), &length);
      q.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      q.sent = 0;
      if (connect(q.fd, reinterpret_cast<const sockaddr*>(&name), length) != 0) return cut_off(q);
    }
    const Head head{q.peer_pair, q.number, host_of(q.number_of_device), q.message, uint32_t(w.opcode), w.imm,
                    w.rkey,      w.bytes,  w.remote};
    while (q.sent < sizeof head + w.bytes) {
      const bool is_head = q.sent < sizeof head;
      size_t left = (is_head ? sizeof head : sizeof head + w.bytes) - q.sent;
      const uint8_t* at = reinterpret_cast<const uint8_t*>(&head) + q.sent;
      if (!is_head && !own) at = w.inlined.data() + (q.sent - sizeof head);
      if (!is_head && own) {
        const uint64_t from = uint64_t(w.from) + (q.sent - sizeof head);
        at = seen(own, from, &left);
        if (own->is_copied) copy(uint64_t(beside), from, left, from);
      }
      const ssize_t n = send(q.fd, at, left, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN) return;
      if (n <= 0) return cut_off(q);
      q.sent += size_t(n);
    }
    int32_t answer;
    const ssize_t n = recv(q.fd, &answer, sizeof answer, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n != sizeof answer) return cut_off(q);
    q.sent = 0;
    if (answer == kNotReady && ++q.refusals <= q.retries) {
      q.again_ns = now + kNotReadyNs;
      return;
    }
    if (answer) return fail(q, answer);
    Completion entry{};
    entry.id = w.id;
    q.sends.pop_front();
    ++q.message;
    q.until_ns = q.again_ns = q.refusals = 0;
    complete(q, q.send_queue, entry);
  }
}

// What becomes of a message, as its head says.
int judge(const Incoming& in) {
  const Head& h = in.head;
  QueuePair* q = find(h.pair);
  const bool is_known = q && q->number_of_device == in.number_of_device && q->peer_pair == h.from_pair &&
                        host_in(q->peer) == h.from_host && q->state >= kReadyToReceive && q->state < kError;
  if (!is_known || is_cut(in.number_of_device)) return kSilence;
  if (int32_t(h.message - q->expected) < 0) return kSuccess;  // its answer was lost
  Faults& faults = state().faults[in.number_of_device];
  const bool is_allowed = !h.bytes || covers(h.rkey, q->domain, h.to, h.bytes, kRemoteWrite) != nullptr;
  if (h.opcode == kWriteWithImm && (!is_allowed || faults.denied > 0)) {
    faults.denied = std::max<int64_t>(0, faults.denied - 1);
    q->has_denied = true;
    return kRemoteAccess;
  }
  if (faults.not_ready > 0 || q->recvs.empty()) {
    faults.not_ready = std::max<int64_t>(0, faults.not_ready - 1);
    return kNotReady;
  }
  return kSuccess;
}

// The message is here.
bool finish(Incoming& in) {
  const Head& h = in.head;
  QueuePair* q = find(h.pair);
  if (in.verdict == kSilence || !q || is_cut(in.number_of_device)) return false;
  if (in.verdict == kSuccess && h.message == q->expected) {
    if (q->recvs.empty()) return false;  // in error meanwhile
    Completion entry{};
    entry.id = q->recvs.front();
    entry.opcode = h.opcode == kWriteWithImm ? kRecvWriteWithImm : kRecv;
    entry.imm = h.imm;
    entry.bytes = h.bytes;
    entry.pair = q->number;
    q->recvs.pop_front();
    ++q->expected;
    complete(*q, q->recv_queue, entry);
  }
  const int32_t answer = in.verdict;
  in.got = 0;
  return send(in.fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof answer;
}

// Reads what has come. False: the socket has ended, or is to end.
bool hear(Incoming& in) {
  static uint8_t nowhere[1 << 16];
  for (;;) {
    Head& h = in.head;
    uint8_t* to = reinterpret_cast<uint8_t*>(&h) + in.got;
    size_t left = sizeof h - in.got;
    const MemoryRegion* mirror = nullptr;
    const uint64_t there = h.to + in.got - sizeof h;
    if (in.got >= sizeof h) {
      left = h.bytes - (in.got - sizeof h);
      QueuePair* q = find(h.pair);
      const bool lands = in.verdict == kSuccess && q && h.message == q->expected;
      mirror = lands ? covers(h.rkey, q->domain, h.to, h.bytes, kRemoteWrite) : nullptr;
      to = mirror ? seen(mirror, there, &left) : nowhere;
      if (!mirror) left = std::min(left, sizeof nowhere);
    }
    const ssize_t n = recv(in.fd, to, left, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return true;
    if (n <= 0) return false;
    if (mirror && mirror->is_copied) copy(there, uint64_t(beside), size_t(n), there);
    in.got += size_t(n);
    if (in.got == sizeof h) in.verdict = judge(in);
    if (in.got == sizeof h + (in.got >= sizeof h ? h.bytes : 1) && !finish(in)) return false;
  }
}

// Until the next look, ms; -1: until something happens.
int turn(int64_t now) {
  int64_t next = -1;
  for (QueuePair* q : state().pairs) {
    advance(*q, now);
    if (q->state != kReadyToSend || q->sends.empty()) continue;
    const int64_t at = std::min(q->until_ns, q->again_ns > now ? q->again_ns : q->until_ns);
    next = next < 0 ? at : std::min(next, at);
  }
  for (QueuePair* q : state().pairs) {  // the writers above have read their answers
    if (!q->has_denied) continue;
    q->has_denied = false;
    AsyncEvent event{};
    event.pair = q;
    event.type = kPairAccess;
    tell(*static_cast<OpenDevice*>(q->context), event);
    fail(*q, kFlushed);
  }
  return next < 0 ? -1 : int(std::max<int64_t>(0, next - now) / 1'000'000) + 1;
}

void watch(std::vector<pollfd>* out) {
  State& s = state();
  out->assign({{s.kick, POLLIN, 0}, {s.listening[0], POLLIN, 0}, {s.listening[1], POLLIN, 0}});
  for (const Incoming& in : s.incoming) out->push_back({in.fd, POLLIN, 0});
  for (const QueuePair* q : s.pairs) {
    if (q->fd < 0 || q->sends.empty()) continue;
    const bool sends = q->sent < sizeof(Head) + q->sends.front().bytes;
    out->push_back({q->fd, short(sends ? POLLIN | POLLOUT : POLLIN), 0});
  }
}

void run() {
  State& s = state();
  std::vector<pollfd> fds;
  for (;;) {
    int timeout;
    {
      std::lock_guard<std::mutex> lock(s.mutex);
      timeout = turn(now_ns());
      watch(&fds);
    }
    poll(fds.data(), fds.size(), timeout);
    uint64_t count;
    (void)!read(s.kick, &count, sizeof count);
    std::lock_guard<std::mutex> lock(s.mutex);
    for (int i = 0; i < kDevices; ++i) {
      const int fd = accept4(s.listening[i], nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) s.incoming.push_back({fd, i, {}, 0, 0});
    }
    for (auto at = s.incoming.begin(); at != s.incoming.end();) {
      if (hear(*at)) {
        ++at;
        continue;
      }
      close(at->fd);
      at = s.incoming.erase(at);
    }
  }
}

}  // namespace

State& state() {
  static State* made = new State;  // the thread outlives all
  return *made;
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

uint32_t host_of(int number) { return uint32_t(getpid()) * kDevices + uint32_t(number); }

bool start() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.kick >= 0) return true;
  for (int i = 0; i < kDevices; ++i) {
    socklen_t length;
    const sockaddr_un name = name_of(host_of(i), &length);
    s.listening[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bind(s.listening[i], reinterpret_cast<const sockaddr*>(&name), length) != 0) return false;
    if (listen(s.listening[i], 256) != 0) return false;
  }
  s.kick = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  std::thread(run).detach();
  return true;
}

void kick() {
  const uint64_t one = 1;
  (void)!write(state().kick, &one, sizeof one);
}

MemoryRegion* covers(uint32_t key, const Domain* domain, uint64_t address, uint64_t bytes, int access) {
  MemoryRegion* r = region(key);
  const uint64_t base = r ? uint64_t(r->address) : 0;
  const bool allows = r && r->domain == domain && (r->allowed & access) == access && address >= base &&
                      address + bytes <= base + r->bytes;
  return allows ? r : nullptr;
}

const DeviceMemory* device_of(uint64_t address, uint64_t bytes) {
  for (const DeviceMemory& one : state().device_memory) {
    if (address >= one.address && address + bytes <= one.address + one.bytes) return &one;
  }
  return nullptr;
}

void tell(OpenDevice& context, const AsyncEvent& event) {
  context.events.push_back(event);
  const uint64_t one = 1;
  (void)!write(context.async_fd, &one, sizeof one);
}

void complete(QueuePair& pair, Queue* queue, Completion entry) {
  auto* q = static_cast<CompletionQueue*>(queue);
  if (q->is_dead) return;
  if (int(q->done.size()) == q->size) {
    q->is_dead = true;
    AsyncEvent event{};
    event.queue = q;
    event.type = kQueueError;
    return tell(*static_cast<OpenDevice*>(pair.context), event);
  }
  q->done.push_back(entry);
  if (!q->is_armed) return;
  q->is_armed = false;
  (void)!write(static_cast<EventChannel*>(q->channel)->out, &queue, sizeof queue);
}

void cut_off(QueuePair& pair) {
  if (pair.fd >= 0) close(pair.fd);
  pair.fd = -1;
  pair.sent = 0;
  pair.again_ns = now_ns() + kAgainNs;
}

void fail(QueuePair& pair, int status) {
  cut_off(pair);
  pair.state = kError;
  Completion entry{};
  entry.status = status;
  for (const Work& w : pair.sends) {
    entry.id = w.id;
    complete(pair, pair.send_queue, entry);
    entry.status = kFlushed;
  }
  entry.status = kFlushed;
  for (uint64_t id : pair.recvs) {
    entry.id = id;
    complete(pair, pair.recv_queue, entry);
  }
  pair.sends.clear();
  pair.recvs.clear();
}

}  // namespace fake
