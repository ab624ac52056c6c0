// A member that moves tokens: its memory, and which expert copies count.
#include "comm.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "remote.hpp"

namespace cd {

Comm::Comm(const Geometry& geometry)
    : Member(geometry.rank, geometry.ranks, geometry.timeout_ns, RegionMap(geometry).total),
      g(geometry),
      map(geometry),
      ops(row_ops()) {}

bool Comm::allocate(const int32_t* first_copies, const int32_t* copy_places) {
  const int64_t copies = first_copies[g.experts];
  if (!all_first.allocate(g.experts + 1) || !all_places.allocate(copies) || !first.allocate(g.experts + 1) ||
      !places.allocate(copies) || !wide.allocate(g.hidden) || !group_rows.allocate(g.local_experts) ||
      !samples.allocate()) {
    return false;
  }
  std::copy_n(first_copies, g.experts + 1, all_first.data());
  std::copy_n(copy_places, copies, all_places.data());
  return true;
}

Comm::~Comm() {
  for (int r = 0; r < ranks; ++r) {
    if (landing_of[r]) munmap(const_cast<uint8_t*>(landing_of[r]), map.mirror * ranks);
  }
}

void Comm::destroy() {
  this->~Comm();
  free(this);
}

void Comm::attached(int r) {
  if (r == rank) own = {region, &map};
  peer[r] = {r == rank ? region : mapped[r], &map};
}

int Comm::attach_network(uint8_t* own_landing) {
  landing = own_landing;
  const bool ok = landings.allocate(int64_t(2) * g.ranks * g.in_flight) && goes_to.allocate(g.max_tokens) &&
                  host_of.allocate(int64_t(g.ranks) * g.stride);
  return ok ? 0 : ENOMEM;
}

void Comm::set_hosts(const int32_t* lowest) {
  std::copy_n(lowest, g.ranks, host);
  here = 0;
  for (int r = 0; r < g.ranks; ++r) here |= uint64_t(host[r] == host[g.rank]) << r;
}

int Comm::attach_landing(int r, int landing_fd) {
  void* all = mmap(nullptr, map.mirror * g.ranks, PROT_READ, MAP_SHARED | MAP_NORESERVE, landing_fd, 0);
  if (all == MAP_FAILED) return errno;
  landing_of[r] = static_cast<const uint8_t*>(all);
  return 0;
}

void Comm::activate(uint64_t mask) {
  active = mask;
  std::fill_n(collecting, kMaxSlots, nullptr);  // operations of the membership before are void
  int32_t kept = 0;
  for (int e = 0; e < g.experts; ++e) {
    first[e] = kept;
    for (int32_t i = all_first[e]; i < all_first[e + 1]; ++i) {
      if (is_active(all_places[i] / g.stride)) places[kept++] = all_places[i];
    }
  }
  first[g.experts] = kept;
  if (outbox) set_rails(*this);
}

void Comm::forget() { std::fill_n(outputs_busy, kMaxSlots, 0); }

}  // namespace cd
