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
constexpr uint32_t kVersion = 1u << 16 | 17;  // of the interface; what an older library has is enough, too
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

Info* Access::find(const char* provider, const NetSettings& settings, int* error) {
  Info* hints = lib->dupinfo(nullptr);
  if (!hints) return *error = ENOMEM, nullptr;
  hints->caps = kMsg | kRma;
  hints->mode = kContext | kContext2 | kRecvForData;
  hints->endpoint->type = kReliableDatagram;
  hints->domain->threading = kThreadDomain;
  hints->domain->mr_mode = kMrLocal | kMrVirtual | kMrAllocated | kMrProviderKey | kMrEndpoint;
  hints->fabric->provider = strdup(provider);
  // A write counts as sent when no later one can overtake it: over one connection that is so anyway.
  if (!strstr(provider, "ofi_rxm")) hints->tx->op_flags = kDeliveryComplete;
  Info* found = nullptr;
  const char* node = speaks_ip(provider) && *settings.address ? settings.address : nullptr;
  *error = -lib->getinfo(std::min(kVersion, lib->version()), node, nullptr, node ? kSource : 0, hints, &found);
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

bool Access::open(const NetSettings& settings, int endpoints, Text* text) {
  lib = load(text);
  if (!lib) return false;
  char name[64];
  const char* wanted = named(settings, name);
  Text tried;
  int error = 0;
  for (const char* provider : kProviders) {
    if (wanted && provider != kProviders[0]) break;
    const char* asked = wanted ? wanted : provider;
    info = find(asked, settings, &error);
    if (info) break;
    char before[256];
    snprintf(before, sizeof before, "%.250s", tried.at);
    tried.say("%s%s%s: %s", before, *before ? ", " : "", asked, lib->strerror(error));
  }
  if (!info) {
    text->say("libfabric: no provider for %s%s (%s); `fi_info` lists them",
              *settings.devices ? "devices " : "this host", settings.devices, tried.at);
    return false;
  }
  info->tx->size = std::min(info->tx->size, kQueued);
  info->rx->size = std::min(info->rx->size, kQueued);
  VectorAttr vector{};
  vector.type = kAddressTable;
  vector.count = size_t(endpoints);
  const char* step = "fabric";
  error = -lib->fabric(info->fabric, &fabric, nullptr);
  if (!error) step = "domain", error = -fabric->ops->domain(fabric, info, &domain, nullptr);
  if (!error) step = "address vector", error = -domain->ops->av_open(domain, &vector, &peers, nullptr);
  if (error) {
    text->say("libfabric: no %s of %s: %s", step, info->fabric->provider, lib->strerror(error));
    return false;
  }
  text->say("libfabric %u.%u: %s, domain %s (%s)%s", lib->version() >> 16, lib->version() & 0xffff,
            info->fabric->provider, info->domain->name,
            *settings.devices ? "from network.devices" : wanted ? "the first one" : "the best one here",
            speaks_ip(info->fabric->provider) ? "" : "; never run on this hardware by the authors");
  return true;
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

bool list_domains(char* lines, size_t size, Text* text) {
  const Library* lib = load(text);
  if (!lib) return false;
  size_t at = 0;
  for (const char* provider : kProviders) {
    Info* hints = lib->dupinfo(nullptr);
    Info* found = nullptr;
    if (!hints) break;
    hints->endpoint->type = kReliableDatagram;
    hints->domain->mr_mode = kMrLocal | kMrVirtual | kMrAllocated | kMrProviderKey | kMrEndpoint;
    hints->mode = kContext | kContext2 | kRecvForData;
    hints->caps = kMsg | kRma;
    hints->fabric->provider = strdup(provider);
    if (lib->getinfo(std::min(kVersion, lib->version()), nullptr, nullptr, 0, hints, &found)) found = nullptr;
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
