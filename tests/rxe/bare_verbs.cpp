// The yardstick of `verbs` whose messages are ours: RDMA writes with immediate between two processes, each of which
// takes a posted receive and a completion, and nothing else. perftest's writes have no immediate, and its receiver
// polls memory. Ping-pong of `ping` bytes, then a stream of `bulk` bytes with 64 writes under way. Prints
// "<p50 us of one way> <MB/s>".
//
//     bare_verbs DEVICE DEVICE ROUNDS PING BULK COUNT
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "bare_loop.hpp"
#include "verbs_device.hpp"

using namespace cd::ib;

namespace {

constexpr int kWindow = 64;
constexpr uint64_t kSend = 1;  // ids of completions

void need(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

struct Told {
  uint32_t pair, rkey;
  uint64_t base;
  Gid gid;
};

struct Side {
  Port port;
  Queue* queue = nullptr;
  Pair* pair = nullptr;
  Region *to = nullptr, *from = nullptr;
  Told told{};
  long sent = 0, done = 0, arrived = 0;

  void post() {
    RecvRequest request{0, nullptr, nullptr, 0}, *bad;
    need(port.context->ops.post_recv(pair, &request, &bad) == 0, "receive");
  }
  void poll() {
    Completion batch[16];
    const int n = queue->context->ops.poll_cq(queue, 16, batch);
    for (int i = 0; i < n; ++i) {
      need(batch[i].status == kSuccess, port.lib->wc_status_str(batch[i].status));
      if (batch[i].id == kSend) {
        ++done;
      } else {
        ++arrived;
        post();
      }
    }
  }
  void write(size_t bytes) {
    while (sent - done == kWindow) poll();
    Piece piece{reinterpret_cast<uint64_t>(from->address), uint32_t(bytes), from->lkey};
    SendRequest request{}, *bad;
    request.id = kSend;
    request.pieces = &piece;
    request.num_pieces = bytes ? 1 : 0;
    request.opcode = kWriteWithImm;
    request.flags = kSignaled;
    if (bytes && bytes <= 64) request.flags |= kInline;
    request.remote_address = told.base;
    request.rkey = told.rkey;
    need(port.context->ops.post_send(pair, &request, &bad) == 0, "write");
    ++sent;
  }
  void open(const char* device, size_t bytes) {
    cd::NetSettings settings{};
    settings.gid_index = -1;
    snprintf(settings.devices, sizeof settings.devices, "%s", device);
    cd::Text text;
    need(port.open(settings, &text), text.at);
    for (Region** region : {&to, &from}) {
      void* memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
      memset(memory, 1, bytes);
      *region = port.lib->reg_mr(port.domain, memory, bytes, kLocalWrite | kRemoteWrite);
      need(*region != nullptr, "memory");
    }
    queue = port.lib->create_cq(port.context, 4 * kWindow, nullptr, nullptr, 0);
    need(queue != nullptr, "queue");
    PairInit init{};
    init.send_queue = init.recv_queue = queue;
    init.capacity = {kWindow, 2 * kWindow, 1, 1, 64};
    init.type = kReliable;
    pair = port.lib->create_qp(port.domain, &init);
    need(pair != nullptr, "queue pair");
    PairAttr attr{};
    attr.state = kInit;
    attr.port = port.number;
    attr.access = kLocalWrite | kRemoteWrite;
    need(!port.lib->modify_qp(pair, &attr, kState | kKeyIndex | kPort | kAccessFlags), "start");
    for (int i = 0; i < 2 * kWindow; ++i) post();
  }
  void join(int fd) {
    const Told mine{pair->number, to->rkey, reinterpret_cast<uint64_t>(to->address), port.gid.gid};
    need(::write(fd, &mine, sizeof mine) == sizeof mine && read(fd, &told, sizeof told) == sizeof told, "other end");
    PairAttr attr{};
    attr.state = kReadyToReceive;
    attr.mtu = port.mtu;
    attr.peer_pair = told.pair;
    attr.peer_reads = 1;
    attr.not_ready_timer = 12;
    attr.address.port = port.number;
    attr.address.is_global = 1;
    attr.address.route.gid = told.gid;
    attr.address.route.own_gid_index = uint8_t(port.gid.index);
    attr.address.route.hop_limit = 64;
    const int path = kAddress | kPathMtu | kPeerPair | kRecvPsn | kPeerReads | kNotReadyWait;
    need(!port.lib->modify_qp(pair, &attr, kState | path), "connect");
    attr = {};
    attr.state = kReadyToSend;
    attr.timeout = 14;
    attr.retries = attr.not_ready_retries = 6;
    attr.reads = 1;
    const int timers = kTimer | kRetryCount | kNotReadyCount;
    need(!port.lib->modify_qp(pair, &attr, kState | timers | kSendPsn | kReads), "ready");
    char ready = 1;
    need(::write(fd, &ready, 1) == 1 && read(fd, &ready, 1) == 1, "other end");
  }
};

}  // namespace

int main(int, char** argv) {
  const long rounds = atol(argv[3]), count = atol(argv[6]);
  const size_t ping = size_t(atol(argv[4])), bulk = size_t(atol(argv[5]));
  int pipe_of[2];
  socketpair(AF_UNIX, SOCK_STREAM, 0, pipe_of);
  const bool first = fork() != 0;
  const int fd = pipe_of[first ? 0 : 1];
  Side s;
  s.open(argv[first ? 1 : 2], std::max(ping, bulk));
  s.join(fd);
  const double one_way_us = bare::ping_pong_us(s, first, rounds, ping);
  while (s.done < s.sent) s.poll();
  const double begun = bare::now_us();
  for (long i = 0; i < count && first; ++i) s.write(bulk);
  while (first && s.done < s.sent) s.poll();
  if (first) printf("%.2f %.2f\n", one_way_us, double(count) * double(bulk) / (bare::now_us() - begun));
  fflush(stdout);
  while (!first && s.arrived < rounds + count) s.poll();
  char over = 1;
  need(::write(fd, &over, 1) == 1 && read(fd, &over, 1) == 1, "other end");
  if (first) wait(nullptr);
  _exit(0);
}
