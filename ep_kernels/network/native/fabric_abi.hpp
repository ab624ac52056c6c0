// The part of the ABI of libfabric that the `libfabric` provider uses, declared here so that building needs nothing of
// it. Names and meanings are those of <rdma/fabric.h> and its neighbours; tests compare sizes and offsets with them.
// Structures grow at their end from version to version, and the large ones are made by the library itself.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace cd::fi {

constexpr uint64_t kMsg = 1ull << 1, kRma = 1ull << 2, kWrite = 1ull << 9, kRecv = 1ull << 10, kTransmit = 1ull << 11,
                   kRemoteWrite = 1ull << 13, kRemoteData = 1ull << 17, kDeliveryComplete = 1ull << 28,
                   kSource = 1ull << 57, kHmem = 1ull << 47, kMrDmaBuf = 1ull << 40;
constexpr uint64_t kContext = 1ull << 59, kContext2 = 1ull << 52, kRecvForData = 1ull << 56;  // modes
constexpr int kMrLocal = 1 << 2, kMrVirtual = 1 << 4, kMrAllocated = 1 << 5, kMrProviderKey = 1 << 6,
              kMrEndpoint = 1 << 9, kMrHmem = 1 << 10;
constexpr int kReliableDatagram = 3, kThreadDomain = 3, kProgressManual = 2, kAddressTable = 2, kWithData = 3;
constexpr int kWaitNone = 0, kWaitFd = 3, kGetWait = 5, kEnable = 6;
constexpr int kCuda = 1;  // kind of memory
constexpr int kOfEndpoint = 0, kPeerToPeer = 8, kCudaPermitted = 10, kPeerToPeerRequired = 1;  // options
constexpr int kErrorAvailable = 259;
constexpr uint64_t kUnspecified = ~0ull;

struct Id;

struct IdOps {
  size_t size;
  int (*close)(Id*);
  int (*bind)(Id*, Id*, uint64_t);
  int (*control)(Id*, int, void*);
  void* rest[3];
};

struct Id {
  size_t kind;
  void* context;
  IdOps* ops;
};

struct TxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t inject_size, size, iov_limit, rma_iov_limit;
  uint32_t traffic_class;
};

struct RxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t buffered, size, iov_limit;
};

struct EndpointAttr {
  int type;
  uint32_t protocol, protocol_version;
  size_t max_message_bytes, prefix, max_raw, max_war, max_waw;
  uint64_t tag_format;
  size_t tx_contexts, rx_contexts, key_bytes;
  uint8_t* key;
};

struct DomainAttr {
  void* domain;
  char* name;
  int threading, control_progress, data_progress, resources, av_type, mr_mode;
  size_t mr_key_bytes, data_bytes;
};

struct FabricAttr {
  void* fabric;
  char *name, *provider;
  uint32_t provider_version, api_version;
};

struct Info {
  Info* next;
  uint64_t caps, mode;
  uint32_t address_format;
  size_t source_bytes, target_bytes;
  void *source, *target;
  Id* handle;
  TxAttr* tx;
  RxAttr* rx;
  EndpointAttr* endpoint;
  DomainAttr* domain;
  FabricAttr* fabric;
};

struct Region {  // fid_mr
  Id id;
  void* descriptor;
  uint64_t key;
};

struct Piece {  // iovec
  const void* address;
  size_t bytes;
};

struct DmaBuf {  // fi_mr_dmabuf, of 1.20
  int fd;
  uint64_t offset;
  size_t bytes;
  const void* address;
};

struct RegionAttr {  // fi_mr_attr
  const void* what;  // Piece, or DmaBuf
  size_t count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t key_bytes;
  uint8_t* key;
  int memory;
  uint64_t device;
  uint64_t rest[8];  // of newer versions
};

struct Vector {  // fid_av
  Id id;
  struct Ops {
    size_t size;
    int (*insert)(Vector*, const void*, size_t, uint64_t*, uint64_t, void*);
    void* between[2];
    int (*remove)(Vector*, uint64_t*, size_t, uint64_t);
  }* ops;
};

struct VectorAttr {
  int type, rx_bits;
  size_t count, per_node;
  const char* name;
  void* map;
  uint64_t flags;
};

struct Entry {  // fi_cq_data_entry
  void* context;
  uint64_t flags;
  size_t bytes;
  void* buffer;
  uint64_t data;
};

struct ErrorEntry {  // fi_cq_err_entry
  void* context;
  uint64_t flags;
  size_t bytes;
  void* buffer;
  uint64_t data, tag;
  size_t overflow;
  int error, provider_error;
  void* error_data;
  size_t error_data_bytes;
  uint64_t rest[8];  // of newer versions
};

struct Queue {  // fid_cq
  Id id;
  struct Ops {
    size_t size;
    ssize_t (*read)(Queue*, void*, size_t);
    void* readfrom;
    ssize_t (*readerr)(Queue*, ErrorEntry*, uint64_t);
    void* between[3];
    const char* (*strerror)(Queue*, int, const void*, char*, size_t);
  }* ops;
};

struct QueueAttr {
  size_t size;
  uint64_t flags;
  int format, wait, vector, condition;
  void* wait_set;
};

struct Endpoint {
  Id id;
  struct Options {
    size_t size;
    void* between[2];
    int (*setopt)(Id*, int, int, const void*, size_t);
  }* options;
  struct Names {
    size_t size;
    void* setname;
    int (*getname)(Id*, void*, size_t*);
  }* names;
  struct Messages {
    size_t size;
    ssize_t (*recv)(Endpoint*, void*, size_t, void*, uint64_t, void*);
    void* between[5];
    ssize_t (*inject)(Endpoint*, const void*, size_t, uint64_t);
  }* messages;
  struct Rma {
    size_t size;
    void* before[7];
    ssize_t (*writedata)(Endpoint*, const void*, size_t, void*, uint64_t, uint64_t, uint64_t, uint64_t, void*);
  }* rma;
};

struct Domain {
  Id id;
  struct Ops {
    size_t size;
    int (*av_open)(Domain*, VectorAttr*, Vector**, void*);
    int (*cq_open)(Domain*, QueueAttr*, Queue**, void*);
    int (*endpoint)(Domain*, Info*, Endpoint**, void*);
  }* ops;
  struct Registering {
    size_t size;
    int (*reg)(Id*, const void*, size_t, uint64_t, uint64_t, uint64_t, uint64_t, Region**, void*);
    void* between;
    int (*regattr)(Id*, const RegionAttr*, uint64_t, Region**);
  }* registering;
};

struct Fabric {
  Id id;
  struct Ops {
    size_t size;
    int (*domain)(Fabric*, Info*, Domain**, void*);
    void* between[3];
    int (*trywait)(Fabric*, Id**, int);
  }* ops;
};

}  // namespace cd::fi
