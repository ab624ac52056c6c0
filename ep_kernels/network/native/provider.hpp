// What a network must be able to do: reliable writes with a 32-bit immediate, in any order, between registered memory.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace cd {

// One write to a peer's mirror of this rank.
struct Write {
  const uint8_t* from;
  uint64_t to;  // offset in the mirror
  uint32_t bytes, imm;
};

// A message for people, cut at its end if it is too long.
struct Text {
  char at[512] = "";

  void say(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    va_list values;
    va_start(values, format);
    vsnprintf(at, sizeof at, format, values);
    va_end(values);
  }
};

// Where a provider reports; the calls come from inside `advance`, `poll`, `write` and `disconnect`, `ended` from the
// first two alone.
struct Sink {
  void* owner;
  // One write: its bytes will not be read again, and a later write of their place lands after them.
  void (*sent)(void* owner, int peer);
  void (*arrived)(void* owner, int peer, uint32_t imm);  // the bytes of that write are in the mirror
  // A lane brings nothing more. 0: closed in order. `why`: what else is known, or null.
  void (*ended)(void* owner, int peer, int error, const char* why);
};

// What writes are taken from, and where those of peers land: rank r's mirror is at landing + r * stride. Mirrored by
// proxy.py.
struct NetMemory {
  const uint8_t* own;
  uint64_t own_bytes;
  uint8_t* landing;
  uint64_t stride;
  uint64_t box;  // bytes of `own` for each rank: what goes to rank r lies from r * box on. 0: it may lie anywhere
  // [2, ranks], of what goes to each rank (without boxes: of all, the first) and of its mirror: the descriptor of its
  // dma-buf, or -1, by address. Read when a peer is joined. Null: all is host memory. Else a GPU's, which the processor
  // must not touch.
  const int32_t* dma_bufs;
  int ranks, lanes;
  int device, unused;  // number of that GPU, as CUDA counts them

  const uint8_t* source(int peer) const { return own + uint64_t(peer) * box; }
  uint64_t source_bytes() const { return box ? box : own_bytes; }
  uint8_t* mirror(int peer) const { return landing + uint64_t(peer) * stride; }
  // Most bytes that a provider registers: of all peers, if none is on this host.
  uint64_t most_bytes() const {
    const uint64_t peers = uint64_t(ranks - 1);
    return (box ? box * peers : own_bytes) + stride * peers;
  }
};

// What a provider is made by. Mirrored by proxy.py.
struct NetSettings {
  char provider[64];   // tcp, verbs, libfabric, libfabric(NAME)
  char devices[256];   // names, separated by commas; the first that can be used is. Empty: any
  char address[64];    // at which peers reach this rank, for providers that speak IP
  int32_t lanes, shuffled;
  int32_t gid_index;   // -1: chosen
  int32_t traffic_class, service_level;
  int32_t mtu;         // bytes; 0: the port's
  int32_t ack_timeout, retries;  // verbs: of a queue pair
  uint64_t seed;       // shuffle
  int64_t drop_after;  // shuffle: writes, on average, after which a lane is dropped; 0: never
  int64_t patience_ns;  // what was sent before an end in order may take so long to be read
};

constexpr int kNoPeer = 0xff;  // `poll` of the provider's own descriptors
constexpr int kMaxLanes = 16;

// Not thread-safe: the proxy calls. No method waits for a peer. A lane is made of a TCP connection that both ranks have
// proved membership on, `fd`: `tcp` moves the bytes on it; others exchange on it what their own connection needs, and
// its end is the end of the lane.
class Provider {
 public:
  // Epoll descriptor, and the tag for descriptors of the provider's own. False: it cannot be used, `about` says why.
  virtual bool open(const Sink&, const NetMemory&, int, uint64_t) { return false; }
  virtual bool connect(int, int, int, uint64_t) { return false; }  // peer, lane, fd, tag of the descriptor in epoll
  virtual bool write(int, int, const Write&) { return false; }     // peer, lane. False: its window is full
  virtual bool poll(int, int, uint32_t) { return false; }          // peer, lane, epoll events. True: bytes came
  virtual int64_t advance(int64_t) { return -1; }                  // now. When to be called again, ns; -1: need not
  // Before the proxy sleeps: from now on a descriptor in epoll wakes it. False: there is something to do already.
  virtual bool rest() { return true; }
  virtual void disconnect(int) {}                                  // its writes are given up: `sent` for each of them
  // Lets go of a peer in order: its descriptors, which the caller closes when the peer has; returns how many.
  virtual int release(int, int*) { return 0; }
  // Of connections that may not close yet, after `disconnect` or `release`: goes on with them. When to be called again.
  virtual int64_t part(int64_t) { return -1; }
  // After all were released: the channel's memory and sink are used no more. True: `part` until it says -1, then close.
  virtual bool retire() { return false; }
  virtual void close() {}                                          // closes all; frees itself
  virtual void close_in_child() { close(); }                              // in a forked child: closes its copies only
  virtual uint64_t most_bytes() const { return 1 << 30; }          // of one write
  virtual const char* about() const { return ""; }                 // what was chosen and why, or what went wrong

 protected:
  ~Provider() = default;
};

// Null: memory is short.
Provider* make_tcp();
Provider* make_verbs(const NetSettings& settings);
Provider* make_libfabric(const NetSettings& settings);
// Takes over `inner`.
Provider* make_shuffle(Provider* inner, uint64_t seed, int64_t drop_after);

}  // namespace cd
