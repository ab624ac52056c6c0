// What a network must be able to do: reliable writes with a 32-bit immediate, in any order, between registered memory.
#pragma once
#include <cstdint>

namespace cd {

// One write to a peer's mirror of this rank.
struct Write {
  const uint8_t* from;
  uint64_t to;  // offset in the mirror
  uint32_t bytes, imm;
};

// Where a provider reports; the calls come from inside `poll`, `write` and `disconnect`.
struct Sink {
  void* owner;
  void (*sent)(void* owner, int peer);                 // one write: its bytes will not be read again
  void (*arrived)(void* owner, int peer, uint32_t imm);  // the bytes of that write are in the mirror
  void (*ended)(void* owner, int peer, int error);     // a lane brings nothing more; 0: closed in order
};

// Where a peer's writes land.
struct Mirror {
  uint8_t* base;
  uint64_t bytes;
};

// Not thread-safe: the proxy calls. No method blocks. A provider with connections of its own kind makes them of what
// the control connection carried; `fd` is such a connection already.
class Provider {
 public:
  virtual bool open(const Sink&, int) { return false; }  // epoll descriptor; descriptors are registered with a tag
  virtual void reg(int, Mirror) {}
  virtual bool connect(int, int, int, uint64_t) { return false; }  // peer, lane, fd, tag of the descriptor in epoll
  virtual bool write(int, int, const Write&) { return false; }     // peer, lane. False: its window is full
  virtual bool poll(int, int, uint32_t) { return false; }          // peer, lane, epoll events. True: bytes came
  virtual int64_t advance(int64_t) { return -1; }                  // now. When to be called again, ns; -1: need not
  virtual void disconnect(int) {}                                  // its writes are given up: `sent` for each of them
  // Lets go of a peer in order: its descriptors, which the caller closes when the peer has; returns how many.
  virtual int release(int, int*) { return 0; }
  virtual void close() {}                                          // closes all; frees itself

 protected:
  ~Provider() = default;
};

constexpr int kMaxLanes = 16;

// Null: memory is short.
Provider* make_tcp();
// Takes over `inner`. `drop_after`: number of writes, on average, after which the lane of the last is dropped; 0:
// never.
Provider* make_shuffle(Provider* inner, uint64_t seed, int64_t drop_after);

}  // namespace cd
