// libibverbs, and one port of one device: which one, with which GID, and memory registered there.
#pragma once
#include "provider.hpp"
#include "verbs_abi.hpp"

namespace cd::ib {

// The functions of libibverbs that are no inline calls.
struct Library {
  Device** (*get_device_list)(int*);
  void (*free_device_list)(Device**);
  const char* (*get_device_name)(Device*);
  Context* (*open_device)(Device*);
  int (*close_device)(Context*);
  int (*query_device)(Context*, DeviceAttr*);
  int (*query_port)(Context*, uint8_t, PortAttr*);
  int (*query_gid)(Context*, uint8_t, int, Gid*);
  Domain* (*alloc_pd)(Context*);
  int (*dealloc_pd)(Domain*);
  Region* (*reg_mr)(Domain*, void*, size_t, int);
  int (*dereg_mr)(Region*);
  Channel* (*create_comp_channel)(Context*);
  int (*destroy_comp_channel)(Channel*);
  Queue* (*create_cq)(Context*, int, void*, Channel*, int);
  int (*destroy_cq)(Queue*);
  int (*get_cq_event)(Channel*, Queue**, void**);
  void (*ack_cq_events)(Queue*, unsigned);
  Pair* (*create_qp)(Domain*, PairInit*);
  int (*modify_qp)(Pair*, PairAttr*, int);
  int (*destroy_qp)(Pair*);
  int (*get_async_event)(Context*, AsyncEvent*);
  void (*ack_async_event)(AsyncEvent*);
  const char* (*wc_status_str)(int);
  const char* (*event_type_str)(int);
  // Of newer versions; null: not there.
  Region* (*reg_dmabuf_mr)(Domain*, uint64_t, size_t, uint64_t, int, int);
  int (*query_gid_ex)(Context*, uint32_t, uint32_t, GidEntry*, uint32_t, size_t);
};

// Loaded once for the process. Null: `text` says why.
const Library* load(Text* text);

// A GID of a port and how good it is: the highest rank is chosen.
struct Choice {
  Gid gid{};
  int index = -1, rank = -1;
  uint32_t type = 0;
};

struct Port {
  const Library* lib = nullptr;
  Context* context = nullptr;
  Domain* domain = nullptr;
  PortAttr attr{};
  DeviceAttr device{};
  Choice gid;
  uint8_t number = 0;
  int mtu = 0;  // as libibverbs counts: 1 is 256 bytes, each next one twice as many
  bool ethernet = false;

  // The first port that can be used of those that settings name. False: `text` says what was wrong with each.
  bool open(const NetSettings& settings, Text* text);
  void close();
  // Memory of a GPU: by its dma-buf, or with -1 by address, which nvidia-peermem must allow. Null: `text` says why.
  Region* reg_device(const uint8_t* address, uint64_t bytes, int access, int dma_buf, Text* text) const;
  // Null: `text` names the limit, the number of bytes needed and how to raise it.
  Region* reg(const uint8_t* address, uint64_t bytes, int access, uint64_t needed, Text* text) const;

 private:
  bool take(Context* opened, int port, const NetSettings& settings, const char* name, Text* text);
};

// Every port of every device, a line each: name, port, state, link layer, GID index, GID, why. False: `text` says why.
bool list_ports(char* lines, size_t size, Text* text);

}  // namespace cd::ib
