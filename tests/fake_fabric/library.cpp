// libfabric with memory of GPUs: the machine's own library, of which a provider over sockets says that it reaches such
// memory (FI_HMEM). Tests say which memory is a device's, and what goes wrong; and ask what was registered and set.
//
// The real library never hears of it: what it is asked is the question without FI_HMEM, and memory of a device, which
// here is a file in memory that is mapped, is registered with it as the host's. A dma-buf must be that very file.
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "fabric_abi.hpp"

#define FI extern "C" __attribute__((visibility("default")))

using namespace cd::fi;

namespace {

constexpr uint32_t kOld = 1u << 16 | 17, kNew = 1u << 16 | 20;

// Mirrored by __init__.py.
struct Faults {
  int64_t no_hmem = 0;    // no provider reaches memory of GPUs
  int64_t is_old = 0;     // the library is 1.17
  int64_t calls_cuda = 0;  // errno of FI_OPT_CUDA_API_PERMITTED = false
  int64_t no_peer = 0;     // errno of FI_OPT_FI_HMEM_P2P
  int64_t no_dma_buf = 0;  // errno of registrations of a dma-buf
  int64_t no_address = 0;  // errno of registrations of device memory by address
  int64_t granted = 0;     // ... after so many more of both
};
struct Counts {
  int64_t dma_bufs = 0, device_regions = 0;  // that are registered
  int64_t endpoints = 0;    // enabled for memory of devices
  int64_t wrong_calls = 0;  // which a real provider would take amiss
};
struct Made {
  Region* region;
  int64_t* count;
};

struct State {
  std::mutex mutex;
  Faults faults;
  Counts counts;
  std::vector<Piece> devices;
  std::vector<Made> regions;
  std::vector<std::pair<Endpoint*, int>> endpoints;  // options that were set, bits
};
State& state() {
  static State* made = new State;
  return *made;
}
using Lock = std::lock_guard<std::mutex>;

void must(bool right, const char* what) {
  if (right) return;
  ++state().counts.wrong_calls;
  fprintf(stderr, "fake fabric: %s\n", what);
}

template <typename Fn>
Fn* real(const char* name) {
  static void* library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  if (!library) fprintf(stderr, "fake fabric: %s\n", dlerror());
  return reinterpret_cast<Fn*>(dlsym(library, name));
}
#define REAL_OF(name) real<decltype(name)>(#name)

bool is_device(const void* address, size_t bytes) {
  const auto at = reinterpret_cast<uint64_t>(address);
  for (const Piece& one : state().devices) {
    const auto begin = reinterpret_cast<uint64_t>(one.address);
    if (at >= begin && at + bytes <= begin + one.bytes) return true;
  }
  return false;
}

// Whether that file is what is mapped at an address.
bool is_mapped(int fd, const void* address) {
  struct stat file;
  if (fstat(fd, &file) != 0) return false;
  FILE* maps = fopen("/proc/self/maps", "r");
  bool found = false;
  char line[512];
  while (maps && !found && fgets(line, sizeof line, maps)) {
    unsigned long begin, end, inode;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &begin, &end, &inode) != 3) continue;
    const auto at = reinterpret_cast<uint64_t>(address);
    found = at >= begin && at < end && inode == file.st_ino;
  }
  if (maps) fclose(maps);
  return found;
}

// What a table of functions was, and a copy in its place, which has those at its end that we do not know, too.
template <typename Ops>
struct Table {
  Ops *before, *ours;
};
template <typename Ops>
Table<Ops> replace(Ops** at) {
  Table<Ops> made{*at, static_cast<Ops*>(malloc((*at)->size))};
  memcpy(static_cast<void*>(made.ours), made.before, made.before->size);
  *at = made.ours;
  return made;
}

struct OurDomain {
  Domain* domain;
  int (*endpoint)(Domain*, Info*, Endpoint**, void*);
  int (*reg)(Id*, const void*, size_t, uint64_t, uint64_t, uint64_t, uint64_t, Region**, void*);
  bool is_gpu;
};
std::vector<OurDomain>& domains() {
  static auto* made = new std::vector<OurDomain>;
  return *made;
}
OurDomain ours(Domain* domain) {
  for (const OurDomain& one : domains()) {
    if (one.domain == domain) return one;
  }
  abort();
}

// The question or the answer that the real library knows.
struct Plain {
  uint64_t caps;
  int mode;
  Info* info;
  explicit Plain(const Info* given) : caps(given->caps), mode(given->domain->mr_mode), info(const_cast<Info*>(given)) {
    info->caps &= ~kHmem;
    info->domain->mr_mode &= ~kMrHmem;
  }
  ~Plain() {
    info->caps = caps;
    info->domain->mr_mode = mode;
  }
};

int setopt(Id* id, int level, int option, const void* value, size_t size) {
  Lock lock(state().mutex);
  const Faults& f = state().faults;
  if (level != kOfEndpoint) return -ENOPROTOOPT;
  for (auto& [endpoint, set] : state().endpoints) {
    if (&endpoint->id != id) continue;
    if (option == kCudaPermitted) {
      must(size == 1 && !*static_cast<const bool*>(value), "CUDA must not be permitted");
      if (f.is_old || f.calls_cuda) return f.is_old ? -ENOPROTOOPT : int(-f.calls_cuda);
      set |= 1;
      return 0;
    }
    must(option == kPeerToPeer && size == 4, "an option that is none");
    if (f.no_peer) return int(-f.no_peer);
    set |= 2;
    return 0;
  }
  return -ENOPROTOOPT;
}

int (*control_before)(Id*, int, void*);
int (*close_before)(Id*);
int control(Id* id, int command, void* argument) {
  {
    Lock lock(state().mutex);
    for (auto& [endpoint, set] : state().endpoints) {
      if (&endpoint->id != id || command != kEnable) continue;
      must(set & 1, "an endpoint for memory of devices may call CUDA");
      ++state().counts.endpoints;
    }
  }
  return control_before(id, command, argument);
}
int close_endpoint(Id* id) {
  {
    Lock lock(state().mutex);
    auto& all = state().endpoints;
    for (size_t i = 0; i < all.size(); ++i) {
      if (&all[i].first->id == id) all.erase(all.begin() + long(i--));
    }
  }
  return close_before(id);
}

int make_endpoint(Domain* domain, Info* info, Endpoint** out, void* context) {
  const OurDomain of = ours(domain);
  const Plain plain(info);
  const int error = of.endpoint(domain, info, out, context);
  if (error || !of.is_gpu) return error;
  Lock lock(state().mutex);
  state().endpoints.push_back({*out, 0});
  replace(&(*out)->options).ours->setopt = setopt;
  const auto ids = replace(&(*out)->id.ops);
  control_before = ids.before->control;
  close_before = ids.before->close;
  ids.ours->control = control;
  ids.ours->close = close_endpoint;
  return 0;
}

int (*close_region_before)(Id*);
int close_region(Id* id) {
  {
    Lock lock(state().mutex);
    auto& all = state().regions;
    for (size_t i = 0; i < all.size(); ++i) {
      if (&all[i].region->id != id) continue;
      --*all[i].count;
      all.erase(all.begin() + long(i--));
    }
  }
  return close_region_before(id);
}

int reg(Id* id, const void* address, size_t bytes, uint64_t access, uint64_t offset, uint64_t key, uint64_t flags,
        Region** out, void* context) {
  {
    Lock lock(state().mutex);
    must(!is_device(address, bytes), "memory of a device registered as the host's");
  }
  return ours(reinterpret_cast<Domain*>(id)).reg(id, address, bytes, access, offset, key, flags, out, context);
}

int regattr(Id* id, const RegionAttr* attr, uint64_t flags, Region** out) {
  Lock lock(state().mutex);
  Faults& f = state().faults;
  const bool is_dma_buf = flags & kMrDmaBuf;
  const auto* piece = static_cast<const Piece*>(attr->what);
  const auto* exported = static_cast<const DmaBuf*>(attr->what);
  const Piece at = is_dma_buf ? Piece{exported->address, exported->bytes} : *piece;
  must(attr->count == 1 && attr->memory == kCuda && attr->device == 0, "another device, or several pieces");
  must(is_device(at.address, at.bytes), "memory of no device registered as one's");
  must(!is_dma_buf || !f.is_old, "a dma-buf for an old library");
  must(!is_dma_buf || is_mapped(exported->fd, at.address), "a dma-buf of other memory");
  const int64_t refused = is_dma_buf ? f.no_dma_buf : f.no_address;
  if (refused && f.granted-- <= 0) return int(-refused);
  const OurDomain of = ours(reinterpret_cast<Domain*>(id));
  const int error = of.reg(id, at.address, at.bytes, attr->access, 0, attr->requested_key, 0, out, nullptr);
  if (error) return error;
  int64_t* count = is_dma_buf ? &state().counts.dma_bufs : &state().counts.device_regions;
  ++*count;
  state().regions.push_back({*out, count});
  const auto ids = replace(&(*out)->id.ops);
  close_region_before = ids.before->close;
  ids.ours->close = close_region;
  return 0;
}

int (*domain_before)(Fabric*, Info*, Domain**, void*);
int make_domain(Fabric* fabric, Info* info, Domain** out, void* context) {
  const bool is_gpu = info->caps & kHmem;
  const Plain plain(info);
  if (const int error = domain_before(fabric, info, out, context)) return error;
  Lock lock(state().mutex);
  const auto ops = replace(&(*out)->ops);
  const auto registering = replace(&(*out)->registering);
  std::vector<OurDomain>& all = domains();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].domain == *out) all.erase(all.begin() + long(i--));
  }
  all.push_back({*out, ops.before->endpoint, registering.before->reg, is_gpu});
  ops.ours->endpoint = make_endpoint;
  registering.ours->reg = reg;
  registering.ours->regattr = regattr;
  return 0;
}

}  // namespace

FI uint32_t fi_version() { return state().faults.is_old ? kOld : kNew; }
FI const char* fi_strerror(int error) { return REAL_OF(fi_strerror)(error); }
FI void fi_freeinfo(Info* info) { REAL_OF(fi_freeinfo)(info); }
FI Info* fi_dupinfo(const Info* info) {
  if (!info) return REAL_OF(fi_dupinfo)(info);
  const uint64_t gpu = info->caps & kHmem;
  const Plain plain(info);
  Info* made = REAL_OF(fi_dupinfo)(info);
  if (made && gpu) {
    made->caps |= kHmem;
    made->domain->mr_mode |= kMrHmem;
  }
  return made;
}
FI int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const Info* hints,
                  Info** out) {
  const bool gpu = hints && hints->caps & kHmem;
  if (gpu) {
    must(hints->domain->mr_mode & kMrHmem, "FI_HMEM asked for without FI_MR_HMEM");
    if (state().faults.no_hmem) return -ENODATA;
  }
  const Plain plain(hints);
  const int error = REAL_OF(fi_getinfo)(version < kOld ? version : kOld, node, service, flags, hints, out);
  for (Info* one = error ? nullptr : *out; one && gpu; one = one->next) {
    one->caps |= kHmem;
    one->domain->mr_mode |= kMrHmem;
  }
  return error;
}
FI int fi_fabric(FabricAttr* attr, Fabric** out, void* context) {
  const int error = REAL_OF(fi_fabric)(attr, out, context);
  if (error || (*out)->ops->domain == make_domain) return error;
  const auto ops = replace(&(*out)->ops);
  domain_before = ops.before->domain;
  ops.ours->domain = make_domain;
  return 0;
}

FI Faults* fake_faults() { return &state().faults; }
FI void fake_counts(Counts* out) {
  Lock lock(state().mutex);
  *out = state().counts;
}
FI void fake_sizes(uint64_t* out) {
  out[0] = sizeof(Faults);
  out[1] = sizeof(Counts);
}
FI void fake_device(uint64_t address, uint64_t bytes) {
  Lock lock(state().mutex);
  state().devices.push_back({reinterpret_cast<void*>(address), bytes});
}
FI void fake_no_device(uint64_t address) {
  Lock lock(state().mutex);
  auto& all = state().devices;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].address == reinterpret_cast<void*>(address)) all.erase(all.begin() + long(i--));
  }
}
