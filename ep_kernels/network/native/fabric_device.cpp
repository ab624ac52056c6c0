#include "fabric_device.hpp"

#include <dlfcn.h>
#include <errno.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace cd::fi {
namespace {

// Best first: hardware, then what runs over it or over sockets.
constexpr const char* kProviders[] = {"efa", "cxi", "verbs;ofi_rxm", "tcp;ofi_rxm"};
// Of the interface; what an older library has is enough, too, for all but dma-bufs.
constexpr uint32_t kVersion = 1u << 16 | 17, kWithDmaBufs = 1u << 16 | 20;
constexpr size_t kQueued = 256;

template <typename Fn>
bool find_symbol(void* library, const char* name, Fn** out) {
  *out = reinterpret_cast<Fn*>(dlsym(library, name));
  return *out != nullptr;
}

// Whether addresses are those of IP: then the rank's own one says which interface.
bool speaks_ip(const char* provider) { return strcmp(provider, "efa") != 0 && strcmp(provider, "cxi") != 0; }

bool is_listed(const char* devices, const char* name) {
  if (!*devices) return true;
  const size_t length = strlen(name);
  for (const char* at = devices; *at;) {
    const size_t n = strcspn(at, ",");
    if (n == length && !strncmp(at, name, n)) return true;
    at += n + (at[n] == ',');
  }
  return false;
}

// NAME of libfabric(NAME), else null.
const char* named(const NetSettings& settings, char* name) {
  const char* from = strchr(settings.provider, '(');
  if (!from) return nullptr;
  const size_t n = strcspn(from + 1, ")");
  memcpy(name, from + 1, n);
  name[n] = 0;
  return name;
}

}  // namespace

const Library* load(Text* text) {
  static Library library;
  static bool is_loaded = false;
  if (is_loaded) return &library;
  void* from = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!from) {
    text->say("libfabric: libfabric.so.1 cannot be loaded (%s); install it (Debian: libfabric1; EFA: its installer)",
              dlerror());
    return nullptr;
  }
  if (!find_symbol(from, "fi_getinfo", &library.getinfo) || !find_symbol(from, "fi_dupinfo", &library.dupinfo) ||
      !find_symbol(from, "fi_freeinfo", &library.freeinfo) || !find_symbol(from, "fi_fabric", &library.fabric) ||
      !find_symbol(from, "fi_strerror", &library.strerror) || !find_symbol(from, "fi_version", &library.version)) {
    text->say("libfabric: libfabric.so.1 lacks a function (%s)", dlerror());
    return nullptr;
  }
  is_loaded = true;
  return &library;
}

Info* Access::find(const char* provider, const NetSettings& settings, bool gpu, int* error) {
  Info* hints = lib->dupinfo(nullptr);
  if (!hints) return *error = ENOMEM, nullptr;
  hints->caps = kMsg | kRma;
  hints->mode = kContext | kContext2 | kRecvForData;
  hints->endpoint->type = kReliableDatagram;
  hints->domain->threading = kThreadDomain;
  hints->domain->mr_mode = kMrLocal | kMrVirtual | kMrAllocated | kMrProviderKey | kMrEndpoint;
  if (gpu) hints->caps |= kHmem;
  if (gpu) hints->domain->mr_mode |= kMrHmem;
  hints->fabric->provider = strdup(provider);
  // A write counts as sent when the peer has it: nothing of it is lost when this end closes. A queue pair's is complete
  // no earlier; a socket's would be when the kernel has its bytes.
  if (!strstr(provider, "verbs;")) hints->tx->op_flags = kDeliveryComplete;
  Info* found = nullptr;
  const char* node = speaks_ip(provider) && *settings.address ? settings.address : nullptr;
  const uint32_t version = std::min(gpu ? kWithDmaBufs : kVersion, lib->version());
  *error = -lib->getinfo(version, node, nullptr, node ? kSource : 0, hints, &found);
  lib->freeinfo(hints);
  if (*error) return nullptr;
  Info* chosen = nullptr;
  for (Info* one = found; one && !chosen; one = one->next) {
    if (is_listed(settings.devices, one->domain->name) && one->domain->data_bytes >= 4) chosen = lib->dupinfo(one);
  }
  lib->freeinfo(found);
  *error = chosen ? 0 : ENODEV;
  return chosen;
}

bool Access::open(const NetSettings& settings, int endpoints, bool gpu, Text* text) {
  lib = load(text);
  if (!lib) return false;
  // The configured provider, or the first that reaches this host's network.
  char name[64];
  const char* wanted = named(settings, name);
  Text tried;
  int error = 0;
  for (const char* provider : kProviders) {
    if (wanted && provider != kProviders[0]) break;
    const char* asked = wanted ? wanted : provider;
    info = find(asked, settings, false, &error);
    if (info && gpu) {  // of the provider that would carry host memory, and no other
      lib->freeinfo(info);
      info = find(asked, settings, true, &error);
      if (info) break;
      text->say("libfabric: %s does not reach memory of GPUs here (FI_HMEM: %s)", asked, lib->strerror(error));
      return false;
    }
    if (info) break;
    // It does not; the error will name all that were tried.
    char before[256];
    snprintf(before, sizeof before, "%.250s", tried.at);
    tried.say("%s%s%s: %s", before, *before ? ", " : "", asked, lib->strerror(error));
  }
  if (!info) {
    text->say("libfabric: no provider for %s%s (%s); `fi_info` lists them",
              *settings.devices ? "devices " : "this host", settings.devices, tried.at);
    return false;
  }
  // Open it, and say what was chosen.
  if (!begin(endpoints, gpu, text)) return false;
  text->say("libfabric %u.%u: %s, domain %s (%s)%s", lib->version() >> 16, lib->version() & 0xffff,
            info->fabric->provider, info->domain->name,
            *settings.devices ? "from network.devices" : wanted ? "the first one" : "the best one here",
            speaks_ip(info->fabric->provider) ? "" : "; never run on this hardware by the authors");
  return true;
}

bool Access::begin(int endpoints, bool gpu, Text* text) {
  // Fabric, domain and address vector, one of each.
  info->tx->size = std::min(info->tx->size, kQueued);
  info->rx->size = std::min(info->rx->size, kQueued);
  VectorAttr vector{};
  vector.type = kAddressTable;
  vector.count = size_t(endpoints);
  const char* step = "fabric";
  int error = -lib->fabric(info->fabric, &fabric, nullptr);
  if (!error) step = "domain", error = -fabric->ops->domain(fabric, info, &domain, nullptr);
  if (!error) step = "address vector", error = -domain->ops->av_open(domain, &vector, &peers, nullptr);
  if (error) {
    text->say("libfabric: no %s of %s: %s", step, info->fabric->provider, lib->strerror(error));
    return false;
  }
  if (!gpu) return true;
  // GPU memory: whether an endpoint takes it shows only by asking one.
  Endpoint* tried = nullptr;
  error = -domain->ops->endpoint(domain, info, &tried, nullptr);
  if (error) return text->say("libfabric: no endpoint: %s", lib->strerror(error)), false;
  const bool may = for_device(tried, text);
  tried->id.ops->bind(&tried->id, &peers->id, 0);  // ofi_rxm cannot close one without
  tried->id.ops->close(&tried->id);
  return may;
}

bool Access::for_device(Endpoint* endpoint, Text* text) const {
  const bool permitted = false;
  const int required = kPeerToPeerRequired;
  Id* id = &endpoint->id;
  int error = -endpoint->options->setopt(id, kOfEndpoint, kCudaPermitted, &permitted, sizeof permitted);
  if (error) {
    text->say("libfabric: %s may call CUDA while it moves bytes of a GPU, which can wait for ever (libfabric 1.18 or "
              "newer, FI_OPT_CUDA_API_PERMITTED: %s)", info->fabric->provider, lib->strerror(error));
    return false;
  }
  error = -endpoint->options->setopt(id, kOfEndpoint, kPeerToPeer, &required, sizeof required);
  if (!error || error == ENOPROTOOPT) return true;
  text->say("libfabric: %s lets no NIC reach memory of GPUs (FI_OPT_FI_HMEM_P2P: %s)", info->fabric->provider,
            lib->strerror(error));
  return false;
}

void Access::close() {
  if (peers) peers->id.ops->close(&peers->id);
  if (domain) domain->id.ops->close(&domain->id);
  if (fabric) fabric->id.ops->close(&fabric->id);
  if (info) lib->freeinfo(info);
  peers = nullptr;
  domain = nullptr;
  fabric = nullptr;
  info = nullptr;
}

Region* Access::reg(const void* address, uint64_t bytes, uint64_t access, Text* text) {
  Region* made = nullptr;
  const uint64_t key = has(kMrProviderKey) ? 0 : next_key++;
  const int error = -domain->registering->reg(&domain->id, address, bytes, access, 0, key, 0, &made, nullptr);
  if (!error) return made;
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  text->say("libfabric: %llu bytes cannot be registered: %s; RLIMIT_MEMLOCK is %lld (-1: none): raise it (ulimit -l, "
            "LimitMEMLOCK=infinity) or give the container IPC_LOCK",
            static_cast<unsigned long long>(bytes), lib->strerror(error), static_cast<long long>(limit.rlim_cur));
  errno = error;
  return nullptr;
}

Region* Access::reg_device(const void* address, uint64_t bytes, uint64_t access, int dma_buf, int device, Text* text) {
  // By address, or by a dma-buf where the library is new enough.
  const Piece piece{address, bytes};
  const DmaBuf exported{dma_buf, 0, bytes, address};
  RegionAttr attr{};
  attr.what = dma_buf < 0 ? static_cast<const void*>(&piece) : &exported;
  attr.count = 1;
  attr.access = access;
  attr.requested_key = has(kMrProviderKey) ? 0 : next_key++;
  attr.memory = kCuda;
  attr.device = uint64_t(device);
  Region* made = nullptr;
  int error = ENOSYS;
  if (dma_buf < 0 || lib->version() >= kWithDmaBufs) {
    error = -domain->registering->regattr(&domain->id, &attr, dma_buf < 0 ? 0 : kMrDmaBuf, &made);
  }
  if (!error) return made;
  text->say("libfabric: %llu bytes of GPU memory cannot be registered by %s: %s",
            static_cast<unsigned long long>(bytes),
            dma_buf < 0 ? "address (FI_HMEM_CUDA)" : "dma-buf (libfabric 1.20 or newer)", lib->strerror(error));
  errno = error;
  return nullptr;
}

bool list_domains(char* lines, size_t size, Text* text) {
  const Library* lib = load(text);
  if (!lib) return false;
  size_t at = 0;
  for (const char* provider : kProviders) {
    // What a transport would ask for, of this provider.
    Info* hints = lib->dupinfo(nullptr);
    Info* found = nullptr;
    if (!hints) break;
    hints->endpoint->type = kReliableDatagram;
    hints->domain->mr_mode = kMrLocal | kMrVirtual | kMrAllocated | kMrProviderKey | kMrEndpoint;
    hints->mode = kContext | kContext2 | kRecvForData;
    hints->caps = kMsg | kRma;
    hints->fabric->provider = strdup(provider);
    if (lib->getinfo(std::min(kVersion, lib->version()), nullptr, nullptr, 0, hints, &found)) found = nullptr;
    // A line for each domain; those of several protocols follow each other.
    const char* last = "";
    for (Info* one = found; one && at < size; one = one->next) {
      if (!strcmp(last, one->domain->name)) continue;
      last = one->domain->name;
      at += size_t(snprintf(lines + at, size - at, "%s\t0\tactive\t%s\t-1\t\t\n", last, one->fabric->provider));
    }
    lib->freeinfo(hints);
    if (found) lib->freeinfo(found);
  }
  return true;
}

}  // namespace cd::fi
