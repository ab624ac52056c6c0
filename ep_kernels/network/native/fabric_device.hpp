// libfabric: one domain of one of its providers, and memory registered there.
#pragma once
#include "fabric_abi.hpp"
#include "provider.hpp"

namespace cd::fi {

// The functions of libfabric that are no inline calls.
struct Library {
  int (*getinfo)(uint32_t, const char*, const char*, uint64_t, const Info*, Info**);
  Info* (*dupinfo)(const Info*);
  void (*freeinfo)(Info*);
  int (*fabric)(FabricAttr*, Fabric**, void*);
  const char* (*strerror)(int);
  uint32_t (*version)();
};

// Loaded once for the process. Null: `text` says why.
const Library* load(Text* text);

struct Access {
  const Library* lib = nullptr;
  Info* info = nullptr;
  Fabric* fabric = nullptr;
  Domain* domain = nullptr;
  Vector* peers = nullptr;  // addresses of endpoints of peers
  uint64_t next_key = 1;

  // The first domain that can be used of the providers, and of the devices, that settings name; `gpu`: it must reach
  // memory of GPUs, too. False: `text` says why.
  bool open(const NetSettings& settings, int endpoints, bool gpu, Text* text);
  void close();
  bool has(int mr_mode) const { return (info->domain->mr_mode & mr_mode) != 0; }
  bool takes_recvs() const { return ((info->mode | info->rx->mode) & kRecvForData) != 0; }
  bool is_manual() const {
    return info->domain->data_progress == kProgressManual || info->domain->control_progress == kProgressManual;
  }
  // Null: `text` says why.
  Region* reg(const void* address, uint64_t bytes, uint64_t access, Text* text);
  // Memory of a GPU: by its dma-buf, or with -1 by address, which the provider takes in its own way.
  Region* reg_device(const void* address, uint64_t bytes, uint64_t access, int dma_buf, int device, Text* text);
  // Before an endpoint that carries memory of GPUs is enabled: the NIC alone reads and writes it. CUDA would wait for
  // kernels that wait for the network. False: `text` says why.
  bool for_device(Endpoint* endpoint, Text* text) const;

 private:
  Info* find(const char* provider, const NetSettings& settings, bool gpu, int* error);
  bool begin(int endpoints, bool gpu, Text* text);
};

// Every domain of the providers that are tried, a line each, as verbs_device.hpp's. False: `text` says why.
bool list_domains(char* lines, size_t size, Text* text);

}  // namespace cd::fi
