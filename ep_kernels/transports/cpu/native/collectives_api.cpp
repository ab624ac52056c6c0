// The C ABI of the collectives, which native_collectives.py calls; member_api.cpp has what all members share.
#include <cstdlib>
#include <new>

#include "collectives.hpp"
#include "exported.hpp"

namespace {

// What cd_collectives_create made.
cd::CollectiveMember& member(cd::Member* m) { return *static_cast<cd::CollectiveMember*>(m); }

}  // namespace

// Changes when any byte of a region may lie elsewhere.
CD_API uint64_t cd_collectives_abi() {
  constexpr uint64_t facts[] = {cd::kCollectiveAbi,
                                sizeof(cd::CollectiveControl),
                                sizeof(cd::CollectiveSlot),
                                sizeof(cd::CollectiveGeometry),
                                offsetof(cd::Meeting, exchange),
                                offsetof(cd::Meeting, resync),
                                offsetof(cd::CollectiveSlot, what),
                                cd::kMaxRanks,
                                cd::kMaxCollectives};
  return cd::hash_of(facts, sizeof(facts) / sizeof(facts[0]));
}
// Of what native_collectives.py declares once more.
CD_API int64_t cd_collective_bytes() { return sizeof(cd::Collective); }
CD_API int64_t cd_collectives_region_bytes(const cd::CollectiveGeometry* g) { return g->total(); }
CD_API int64_t cd_collectives_pool_offset(const cd::CollectiveGeometry* g) { return g->pool(); }

// Null when memory is short.
CD_API cd::Member* cd_collectives_create(const cd::CollectiveGeometry* g) {
  void* memory = aligned_alloc(alignof(cd::CollectiveMember), sizeof(cd::CollectiveMember));
  if (!memory) return nullptr;
  auto* m = new (memory) cd::CollectiveMember(*g);
  if (m->allocate()) return m;
  m->~CollectiveMember();
  free(memory);
  return nullptr;
}
CD_API void cd_collectives_destroy(cd::Member* m) {
  member(m).~CollectiveMember();
  free(m);
}

// The own, fresh region.
CD_API void cd_collectives_attach_own(cd::Member* m, uint8_t* region, uint64_t nonce) {
  cd::Member::stamp(region, m->rank, m->region_bytes, nonce);
  m->attach_own_region(region);
  member(m).own = region;
}
CD_API int cd_collectives_attach_peer(cd::Member* m, int rank, int region_fd, int process_fd, uint64_t nonce) {
  return m->attach_peer_region(rank, region_fd, process_fd, nonce);
}

CD_API int cd_collective_begin(cd::Member* m, cd::Collective* op) { return cd::begin(member(m), *op); }
CD_API int cd_collective_advance(cd::Member* m, cd::Collective* op, int block, int one_shard) {
  return cd::advance(member(m), *op, block != 0, one_shard != 0);
}
