#include "verbs_device.hpp"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace cd::ib {
namespace {

constexpr const char* kInstall = "install rdma-core (Debian: libibverbs1 ibverbs-providers)";

// IBVERBS_1.1 changed most functions of 1.0, and left some as they were.
template <typename Fn>
bool find(void* library, const char* name, Fn** out) {
  *out = reinterpret_cast<Fn*>(dlvsym(library, name, "IBVERBS_1.1"));
  if (!*out) *out = reinterpret_cast<Fn*>(dlvsym(library, name, "IBVERBS_1.0"));
  return *out != nullptr;
}

bool resolve(void* from, Library* l) {
  return find(from, "ibv_get_device_list", &l->get_device_list) &&
         find(from, "ibv_free_device_list", &l->free_device_list) &&
         find(from, "ibv_get_device_name", &l->get_device_name) && find(from, "ibv_open_device", &l->open_device) &&
         find(from, "ibv_close_device", &l->close_device) && find(from, "ibv_query_device", &l->query_device) &&
         find(from, "ibv_query_port", &l->query_port) && find(from, "ibv_query_gid", &l->query_gid) &&
         find(from, "ibv_alloc_pd", &l->alloc_pd) && find(from, "ibv_dealloc_pd", &l->dealloc_pd) &&
         find(from, "ibv_reg_mr", &l->reg_mr) && find(from, "ibv_dereg_mr", &l->dereg_mr) &&
         find(from, "ibv_create_comp_channel", &l->create_comp_channel) &&
         find(from, "ibv_destroy_comp_channel", &l->destroy_comp_channel) &&
         find(from, "ibv_create_cq", &l->create_cq) && find(from, "ibv_destroy_cq", &l->destroy_cq) &&
         find(from, "ibv_get_cq_event", &l->get_cq_event) && find(from, "ibv_ack_cq_events", &l->ack_cq_events) &&
         find(from, "ibv_create_qp", &l->create_qp) && find(from, "ibv_modify_qp", &l->modify_qp) &&
         find(from, "ibv_destroy_qp", &l->destroy_qp) && find(from, "ibv_get_async_event", &l->get_async_event) &&
         find(from, "ibv_ack_async_event", &l->ack_async_event) &&
         find(from, "ibv_wc_status_str", &l->wc_status_str) && find(from, "ibv_event_type_str", &l->event_type_str);
}

bool is_mapped(const Gid& gid) {  // ::ffff:a.b.c.d
  static const uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return !memcmp(gid.raw, kPrefix, sizeof kPrefix);
}

bool is_zero(const Gid& gid) {
  return std::all_of(gid.raw, gid.raw + 16, [](uint8_t byte) { return byte == 0; });
}

// RoCE v2 crosses routers, which v1 does not; an IPv4 address is what operators set up; fe80:: stays on its link.
int rank_of(const Gid& gid, uint32_t type) {
  const bool local = gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
  return (type == kGidRoceV2 ? 4 : 0) + (is_mapped(gid) ? 2 : local ? 0 : 1);
}

const char* why(const Choice& chosen) {
  static const char* const kWhy[] = {"RoCE v1, link-local: no better one is there", "RoCE v1: no v2 is there",
                                     "RoCE v1 with an IPv4 address: no v2 is there", "",
                                     "RoCE v2, link-local: no routable one is there",
                                     "RoCE v2 with an IPv6 address: none with IPv4 is there",
                                     "RoCE v2 with an IPv4 address"};
  return kWhy[std::min(chosen.rank, 6)];
}

bool read_gid(const Library& lib, Context* context, int port, int index, Choice* out) {
  *out = {};
  out->index = index;
  if (lib.query_gid_ex) {
    GidEntry entry{};
    if (lib.query_gid_ex(context, uint32_t(port), uint32_t(index), &entry, 0, sizeof entry)) return false;
    out->gid = entry.gid;
    out->type = entry.type;
  } else {  // the type is not given: of two equal addresses, the one of v2 has the higher index
    if (lib.query_gid(context, uint8_t(port), index, &out->gid)) return false;
    out->type = kGidRoceV2;
  }
  out->rank = rank_of(out->gid, out->type);
  return !is_zero(out->gid);
}

// The GID of a port: the one named, or on Ethernet the best one, or on InfiniBand the first.
bool choose_gid(const Library& lib, Context* context, int port, const PortAttr& attr, int wanted, Choice* best) {
  *best = {};
  if (wanted >= 0) return read_gid(lib, context, port, wanted, best);
  if (attr.link_layer != kEthernet) return read_gid(lib, context, port, 0, best);
  const bool typed = lib.query_gid_ex != nullptr;
  for (int i = 0; i < attr.num_gids; ++i) {
    Choice here;
    if (read_gid(lib, context, port, i, &here) && (here.rank > best->rank || (!typed && here.rank == best->rank))) {
      *best = here;
    }
  }
  return best->index >= 0;
}

int mtu_of(int32_t bytes) {
  int code = 1;
  while (code < 5 && 256 << (code - 1) < bytes) ++code;
  return code;
}

const char* state_of(int state) {
  static const char* const kStates[] = {"unknown", "down", "initializing", "armed", "active", "active (deferred)"};
  return kStates[state >= 0 && state < 6 ? state : 0];
}

// Whether settings name this port, as mlx5_0 or mlx5_0:1, or name none. Port 0: any of the device.
bool is_wanted(const char* devices, const char* name, int port) {
  if (!*devices) return true;
  const size_t length = strlen(name);
  for (const char* at = devices; *at;) {
    const size_t n = strcspn(at, ",");
    if (n >= length && !strncmp(at, name, length)) {
      if (n == length) return true;
      if (at[length] == ':' && (port == 0 || atoi(at + length + 1) == port)) return true;
    }
    at += n + (at[n] == ',');
  }
  return false;
}

}  // namespace

const Library* load(Text* text) {
  static Library library;
  static bool is_loaded = false;
  if (is_loaded) return &library;
  void* from = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!from) {
    text->say("verbs: libibverbs.so.1 cannot be loaded (%s); %s", dlerror(), kInstall);
    return nullptr;
  }
  if (!resolve(from, &library)) {
    text->say("verbs: libibverbs.so.1 has not the functions of IBVERBS_1.1 (%s)", dlerror());
    return nullptr;
  }
  // What newer libraries have; null elsewhere.
  library.query_gid_ex = reinterpret_cast<decltype(library.query_gid_ex)>(dlsym(from, "_ibv_query_gid_ex"));
  library.reg_dmabuf_mr = reinterpret_cast<decltype(library.reg_dmabuf_mr)>(dlsym(from, "ibv_reg_dmabuf_mr"));
  is_loaded = true;
  return &library;
}

bool Port::open(const NetSettings& settings, Text* text) {
  lib = load(text);
  if (!lib) return false;
  int count = 0;
  Device** devices = lib->get_device_list(&count);
  text->say(!devices || count == 0 ? "verbs: no RDMA device here (`rdma link` and /dev/infiniband show them)"
                                   : "verbs: expected one of the devices %s, found none of them", settings.devices);
  bool found = false;
  for (int i = 0; i < count && !found; ++i) {
    // The first device that is wanted and has a port that can be used.
    const char* name = lib->get_device_name(devices[i]);
    if (!is_wanted(settings.devices, name, 0)) continue;
    Context* opened = lib->open_device(devices[i]);
    if (!opened || lib->query_device(opened, &device)) {
      text->say("verbs: %s cannot be opened: %s; the process needs /dev/infiniband/uverbs*", name, strerror(errno));
      if (opened) lib->close_device(opened);
      continue;
    }
    for (int port = 1; port <= device.num_ports && !found; ++port) {
      found = is_wanted(settings.devices, name, port) && take(opened, port, settings, name, text);
    }
    if (!found) lib->close_device(opened);
  }
  if (devices) lib->free_device_list(devices);
  return found;
}

bool Port::take(Context* opened, int port, const NetSettings& settings, const char* name, Text* text) {
  // The port is active and has the GID.
  if (lib->query_port(opened, uint8_t(port), &attr)) return false;
  if (attr.state != kPortActive) {
    text->say("verbs: port %d of %s is %s, expected active", port, name, state_of(attr.state));
    return false;
  }
  if (!choose_gid(*lib, opened, port, attr, settings.gid_index, &gid)) {
    text->say("verbs: port %d of %s has no GID %d", port, name, settings.gid_index);
    return false;
  }
  domain = lib->alloc_pd(opened);
  if (!domain) {
    text->say("verbs: %s gives no protection domain: %s", name, strerror(errno));
    return false;
  }
  // It is taken; say what was chosen, and why.
  context = opened;
  number = uint8_t(port);
  ethernet = attr.link_layer == kEthernet;
  mtu = settings.mtu ? std::min(mtu_of(settings.mtu), attr.active_mtu) : attr.active_mtu;
  char shown[64] = "";
  inet_ntop(AF_INET6, gid.gid.raw, shown, sizeof shown);
  text->say("verbs: %s:%d (%s, %s), GID %d %s (%s), MTU %d", name, port, ethernet ? "RoCE" : "InfiniBand",
            *settings.devices ? "from network.devices" : "the first active port", gid.index, shown,
            settings.gid_index >= 0 ? "network.gid_index" : ethernet ? why(gid) : "the port's", 128 << mtu);
  return true;
}

void Port::close() {
  if (domain) lib->dealloc_pd(domain);
  if (context) lib->close_device(context);
  domain = nullptr;
  context = nullptr;
}

Region* Port::reg(const uint8_t* address, uint64_t bytes, int access, uint64_t needed, Text* text) const {
  Region* made = lib->reg_mr(domain, const_cast<uint8_t*>(address), bytes, access);
  if (made) return made;
  const int error = errno;
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur != RLIM_INFINITY && needed > limit.rlim_cur) {
    text->say("verbs: %llu bytes cannot be registered (%s): this rank needs %llu bytes of locked memory, "
              "RLIMIT_MEMLOCK is %llu; raise it (ulimit -l, LimitMEMLOCK=infinity) or give the container IPC_LOCK",
              static_cast<unsigned long long>(bytes), strerror(error), static_cast<unsigned long long>(needed),
              static_cast<unsigned long long>(limit.rlim_cur));
  } else {
    text->say("verbs: %llu bytes cannot be registered: %s", static_cast<unsigned long long>(bytes), strerror(error));
  }
  errno = error ? error : ENOMEM;
  return nullptr;
}

Region* Port::reg_device(const uint8_t* address, uint64_t bytes, int access, int dma_buf, Text* text) const {
  Region* made = nullptr;
  errno = ENOSYS;  // a libibverbs before 34
  if (dma_buf < 0) {
    made = lib->reg_mr(domain, const_cast<uint8_t*>(address), bytes, access);
  } else if (lib->reg_dmabuf_mr) {
    made = lib->reg_dmabuf_mr(domain, 0, bytes, reinterpret_cast<uint64_t>(address), dma_buf, access);
  }
  if (made) return made;
  const int error = errno;
  text->say("verbs: %llu bytes of GPU memory cannot be registered by %s: %s", static_cast<unsigned long long>(bytes),
            dma_buf < 0 ? "address (nvidia-peermem)" : "dma-buf", strerror(error));
  errno = error ? error : ENOMEM;
  return nullptr;
}

bool list_ports(char* lines, size_t size, Text* text) {
  const Library* lib = load(text);
  if (!lib) return false;
  int count = 0;
  Device** devices = lib->get_device_list(&count);
  size_t at = 0;
  for (int i = 0; i < count; ++i) {
    Context* opened = lib->open_device(devices[i]);
    const char* name = lib->get_device_name(devices[i]);
    DeviceAttr device{};
    if (opened) lib->query_device(opened, &device);
    // A line for each port.
    for (int port = 1; port <= device.num_ports && at < size; ++port) {
      PortAttr attr{};
      if (lib->query_port(opened, uint8_t(port), &attr)) continue;
      Choice gid;
      const bool has = choose_gid(*lib, opened, port, attr, -1, &gid);
      char shown[64] = "";
      if (has) inet_ntop(AF_INET6, gid.gid.raw, shown, sizeof shown);
      at += size_t(snprintf(lines + at, size - at, "%s\t%d\t%s\t%s\t%d\t%s\t%s\n", name, port, state_of(attr.state),
                            attr.link_layer == kEthernet ? "Ethernet" : "InfiniBand", gid.index, shown,
                            !has ? "no GID" : attr.link_layer == kEthernet ? why(gid) : "the port's"));
    }
    // A device that does not open gets one, too.
    if (opened) {
      lib->close_device(opened);
    } else if (at < size) {
      at += size_t(snprintf(lines + at, size - at, "%s\t0\tnot opened: %s\t\t-1\t\t\n", name, strerror(errno)));
    }
  }
  if (devices) lib->free_device_list(devices);
  return true;
}

}  // namespace cd::ib
