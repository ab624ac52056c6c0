// A libibverbs without hardware: state that its functions (library.cpp, asked.cpp) share with the thread that moves
// bytes (nic.cpp).
//
// There are two devices of one port. A queue pair reaches one of any process of this machine by a Unix socket, a
// message at a time: the thread of the sender's process reads registered memory when it likes, that of the receiver's
// process writes where a registered region allows it. Tests say what goes wrong (Faults), and ask what was left
// (Counts).
#pragma once
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <vector>

#include "verbs_abi.hpp"

#define IBV extern "C" __attribute__((visibility("default")))

namespace cd::ib {
struct Device {
  int number;
  char name[8];
};
struct Domain {
  Context* context;
};
}  // namespace cd::ib

namespace fake {

using namespace cd::ib;

constexpr int kDevices = 2, kError = 6;  // kError: a state of queue pairs
constexpr int kLocalProtection = 4;      // ibv_wc_status

// Of one device. Mirrored by __init__.py.
struct Faults {
  int64_t absent = 0;        // neither listed nor opened
  int64_t port_down = 0;     // nothing crosses
  int64_t cut = 0;           // nothing crosses, and the port is active
  int64_t not_ready = 0;     // so many messages find no receive
  int64_t denied = 0;        // so many writes of peers are where none is allowed
  int64_t refused = 0;       // errno of registrations ...
  int64_t granted = 0;       // ... after so many more
  int64_t no_dma_buf = 0;    // errno of registrations of a dma-buf
  int64_t no_peermem = 0;    // errno of registrations of device memory by address
  int64_t max_completions = 1 << 16;
  int64_t max_message = 1 << 30;
  int64_t patience_ms = 5000; // until a message without answer has failed
};

// Of the process. Mirrored by __init__.py.
struct Counts {
  int64_t contexts = 0, domains = 0, regions = 0, channels = 0, queues = 0, pairs = 0, bytes = 0;
  int64_t dma_bufs = 0;     // of the regions
  int64_t device_regions = 0;  // of the regions, of device memory by address
  int64_t wrong_calls = 0;  // for which the library would hang, or leave things behind
};

struct OpenDevice : Context {
  int number;
  std::deque<AsyncEvent> events;  // async_fd counts them
  bool is_dead;  // as after IBV_EVENT_DEVICE_FATAL
};

struct EventChannel : Channel {
  int out;
};

struct CompletionQueue : Queue {
  std::deque<Completion> done;
  int64_t told = 0, acknowledged = 0;
  bool is_armed = false, is_dead = false;
};

struct MemoryRegion : Region {
  int allowed;
  int64_t shift;     // where this process's thread sees it, less its address
  bool is_dma_buf, is_device;
  bool is_copied;    // by a driver: the processor cannot touch it
};

// How a GPU's driver copies, beside the kernels that run: cuCtxSetCurrent, cuMemcpyAsync, cuStreamSynchronize. Mirrored
// by __init__.py.
struct Driver {
  int (*enter)(void* context);
  void* context;
  int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
  int (*wait)(void* stream);
  void* stream;
};

// What a test says to be memory of a device. Without a driver the processor sees it.
struct DeviceMemory {
  uint64_t address, bytes;
  Driver driver;
};

struct Work {
  uint64_t id;
  int opcode;
  const uint8_t* from;
  uint32_t bytes, lkey, imm, rkey;
  uint64_t remote;
  std::vector<uint8_t> inlined;
};

struct QueuePair : Pair {
  int number_of_device, state = 0;
  Capacity capacity;
  std::deque<Work> sends;
  std::deque<uint64_t> recvs;
  Gid peer{};
  uint32_t peer_pair = 0;
  int retries = 0;  // of a peer that is not ready
  // The message that is under way.
  int fd = -1, refusals = 0;
  size_t sent = 0;
  int64_t until_ns = 0, again_ns = 0;
  uint32_t message = 0, expected = 0;  // numbers of the next message to the peer, and from it
  int64_t told = 0, acknowledged = 0;  // events of the device
  bool has_denied = false;             // the peer has its answer first, as on a wire
};

// The other end of a peer's socket.
struct Head {
  uint32_t pair, from_pair, from_host, message, opcode, imm, rkey, bytes;
  uint64_t to;
};
struct Incoming {
  int fd, number_of_device;
  Head head;
  size_t got;
  int verdict;
};

struct State {
  std::mutex mutex;
  Device devices[kDevices] = {{0, "fake0"}, {1, "fake1"}};
  Faults faults[kDevices];
  Counts counts;
  std::list<OpenDevice*> contexts;
  std::list<QueuePair*> pairs;
  std::list<MemoryRegion*> regions;
  std::list<Incoming> incoming;
  std::vector<DeviceMemory> device_memory;
  int listening[kDevices] = {-1, -1}, kick = -1;
  uint32_t next_key = 0x1000, next_pair = 0x100;
};

State& state();

inline bool is_of_pair(int type) { return type == kPairFatal || type == kPairRequest || type == kPairAccess; }

// nic.cpp; all but `start` under the mutex.
bool start();                // once in a process: sockets and the thread
void kick();                 // there is something to send
uint32_t host_of(int number);  // the last four bytes of a device's GIDs
void tell(OpenDevice& context, const AsyncEvent& event);
void complete(QueuePair& pair, Queue* queue, Completion entry);
void fail(QueuePair& pair, int status);  // what is posted ends: the first send with `status`, the rest as flushed
void cut_off(QueuePair& pair);
// The region that allows it; null: there is none.
MemoryRegion* covers(uint32_t key, const Domain* domain, uint64_t address, uint64_t bytes, int access);
const DeviceMemory* device_of(uint64_t address, uint64_t bytes);
int64_t now_ns();

}  // namespace fake
