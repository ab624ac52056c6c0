// The C ABI of what all members share. `m` is what cd_create or cd_collectives_create made.
#include "exported.hpp"
#include "group.hpp"

#ifndef CD_BUILD_ID
#define CD_BUILD_ID "unknown"
#endif

CD_API const char* cd_build_id() { return CD_BUILD_ID; }
CD_API int64_t cd_sample_bytes() { return sizeof(cd::Sample); }

CD_API void cd_destroy(cd::Member* m) { m->destroy(); }
CD_API int64_t cd_region_bytes(const cd::Member* m) { return m->region_bytes; }
CD_API void cd_attach_own(cd::Member* m, uint8_t* region, uint64_t nonce) { m->attach_own(region, nonce); }
CD_API int cd_attach_peer(cd::Member* m, int rank, int region_fd, int process_fd, uint64_t nonce) {
  return m->attach_peer(rank, region_fd, process_fd, nonce);
}
CD_API void cd_activate(cd::Member* m, uint64_t mask) { m->activate(mask); }
// The numbers of the next dispatch (or collective), combine, barrier and exchange, which the caller may read.
CD_API const uint64_t* cd_next(const cd::Member* m) { return m->next; }
CD_API int cd_barrier(cd::Member* m) { return cd::barrier(*m); }
CD_API int cd_exchange(cd::Member* m, const int64_t* words, int64_t* all) { return cd::exchange(*m, words, all); }
CD_API int cd_wait_for_peer(cd::Member* m, int64_t timeout_ns) { return cd::wait_for_peer(*m, timeout_ns); }
CD_API int cd_look_for_peer(cd::Member* m, int64_t timeout_ns, int fd) {
  return cd::look_for_peer(*m, timeout_ns, fd);
}
CD_API int cd_resync(cd::Member* m, uint64_t mask, uint64_t epoch, int64_t limit_ns) {
  return cd::resync(*m, mask, epoch, limit_ns);
}

CD_API void cd_set_spin(cd::Member* m, int64_t step_ns, int64_t meet_ns) {
  m->step_spin_ns = step_ns;
  m->meet_spin_ns = meet_ns;
}

// From any thread.
CD_API void cd_wake(cd::Member* m) {
  m->wakes.fetch_add(1);
  m->notify(m->rank);
}
CD_API void cd_call_exchange(cd::Member* m) { cd::call_exchange(*m); }
CD_API void cd_stop(cd::Member* m) {
  m->stop.store(1, std::memory_order_release);
  m->notify(m->rank);
}
CD_API void cd_give_up(cd::Member* m, uint64_t ranks) {
  m->lost.fetch_or(ranks, std::memory_order_release);
  m->notify(m->rank);
}

CD_API void cd_fault(const cd::Member* m, cd::Fault* out) { *out = m->fault; }
CD_API int64_t cd_samples(cd::Member* m, uint8_t* out, int64_t most) { return m->samples.drain(out, most); }
