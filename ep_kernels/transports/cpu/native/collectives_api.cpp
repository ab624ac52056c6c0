// The C ABI of the collectives, which native.py calls; member_api.cpp has what all members share.
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
// Of what native.py declares once more.
CD_API int64_t cd_collective_bytes() { return sizeof(cd::Collective); }
CD_API int64_t cd_collectives_pool_offset(const cd::CollectiveGeometry* g) { return g->pool(); }

// Null when memory is short.
CD_API cd::Member* cd_collectives_create(const cd::CollectiveGeometry* g) {
  return cd::make<cd::CollectiveMember>(*g);
}

CD_API int cd_collective_begin(cd::Member* m, cd::Collective* op) { return cd::begin(member(m), *op); }
CD_API int cd_collective_advance(cd::Member* m, cd::Collective* op, int block, int one_shard) {
  return cd::advance(member(m), *op, block != 0, one_shard != 0);
}
