// The C ABI that native.py calls. Nothing throws across it; every function returns a Status or a plain value.
#include <cstring>
#include <new>

#include "args.hpp"
#include "group.hpp"
#include "remote.hpp"

#define CD_API extern "C" __attribute__((visibility("default")))
#ifndef CD_BUILD_ID
#define CD_BUILD_ID "unknown"
#endif

namespace {

// Changes when any byte of a region may lie elsewhere.
constexpr uint64_t abi_hash() {
  const uint64_t facts[] = {cd::kAbi,
                            sizeof(cd::Control),
                            sizeof(cd::SlotMeta),
                            sizeof(cd::Geometry),
                            offsetof(cd::Control, exchange),
                            offsetof(cd::Control, resync),
                            offsetof(cd::Control, dispatch_arrived),
                            offsetof(cd::Control, dispatch_published),
                            offsetof(cd::SlotMeta, source),
                            offsetof(cd::SlotMeta, parts),
                            cd::kChunks,
                            cd::kMaxRanks,
                            cd::kMaxSlots};
  uint64_t hash = 1469598103934665603ull;
  for (const uint64_t fact : facts) hash = (hash ^ fact) * 1099511628211ull;
  return hash;
}

}  // namespace

CD_API const char* cd_build_id() { return CD_BUILD_ID; }
CD_API uint64_t cd_abi() { return abi_hash(); }
CD_API int64_t cd_region_bytes(const cd::Geometry* g) { return cd::RegionMap(*g).total; }
// Where each part begins, and the bytes of one slot of it: dispatch, combine, expert outputs.
CD_API void cd_region_parts(const cd::Geometry* g, int64_t* out) {
  const cd::RegionMap map(*g);
  const int64_t parts[] = {map.dispatch, map.d_size, map.combine, map.c_size, map.outputs, map.y_size};
  for (const int64_t part : parts) *out++ = part;
}
CD_API int64_t cd_outputs_offset(const cd::Geometry* g, int slot) {
  const cd::RegionMap map(*g);
  return map.outputs + slot * map.y_size;
}
CD_API int64_t cd_input_offset(const cd::Geometry* g, int slot) {
  const cd::RegionMap map(*g);
  return map.dispatch + slot * map.d_size + map.d_rows;
}
CD_API int64_t cd_sample_bytes() { return sizeof(cd::Sample); }

// first [E+1], places [first[E]]: every copy of every expert. Null when memory is short.
CD_API cd::Comm* cd_create(const cd::Geometry* g, const int32_t* first, const int32_t* places) {
  void* memory = aligned_alloc(alignof(cd::Comm), sizeof(cd::Comm));
  if (!memory) return nullptr;
  auto* c = new (memory) cd::Comm(*g);
  if (c->allocate(first, places)) return c;
  c->~Comm();
  free(memory);
  return nullptr;
}
CD_API void cd_destroy(cd::Comm* c) {
  c->~Comm();
  free(c);
}

// Writes the header of an own, fresh region.
CD_API void cd_stamp(uint8_t* region, const cd::Geometry* g, uint64_t nonce) {
  auto* control = reinterpret_cast<cd::Control*>(region + cd::kPage);
  control->nonce = nonce;
  control->total_bytes = cd::RegionMap(*g).total;
  control->rank = g->rank;
  control->magic = cd::kMagic;
}

CD_API void cd_attach_own(cd::Comm* c, uint8_t* region) { c->attach_own(region); }
CD_API int cd_attach_peer(cd::Comm* c, int rank, int region_fd, int process_fd, uint64_t nonce) {
  return c->attach_peer(rank, region_fd, process_fd, nonce);
}
// Ranks of other hosts. landing [R][cd_mirror_bytes]; host [R]: lowest rank of each rank's host. 0 or an errno.
CD_API int64_t cd_mirror_bytes(const cd::Geometry* g) { return cd::RegionMap(*g).mirror; }
CD_API int cd_attach_network(cd::Comm* c, uint8_t* landing) { return c->attach_network(landing); }
CD_API cd::NetHandler cd_network_handler() { return cd::on_network; }
CD_API void cd_set_outbox(cd::Comm* c, cd::Outbox* outbox) { c->outbox = outbox; }
CD_API void cd_set_hosts(cd::Comm* c, const int32_t* host) { c->set_hosts(host); }
CD_API int cd_attach_landing(cd::Comm* c, int rank, int landing_fd) { return c->attach_landing(rank, landing_fd); }
CD_API void cd_sent(const cd::Comm* c, cd::Sent* out) {
  for (int i = 0; i < 3; ++i) out[i] = c->traffic[i];
}

CD_API void cd_activate(cd::Comm* c, uint64_t mask) { c->activate(mask); }

CD_API uint64_t cd_next(const cd::Comm* c, int op) { return c->next[op]; }
CD_API int cd_dispatch_free(cd::Comm* c) { return cd::dispatch_free(*c); }
CD_API int cd_dispatch_send(cd::Comm* c, cd::DispatchOp* op) { return cd::dispatch_send(*c, *op); }
CD_API int cd_dispatch_receive(cd::Comm* c, cd::DispatchOp* op) { return cd::dispatch_receive(*c, *op); }
CD_API int cd_combine_send(cd::Comm* c, cd::CombineOp* op) { return cd::combine_send(*c, *op); }
CD_API int cd_combine_receive(cd::Comm* c, cd::CombineOp* op) { return cd::combine_receive(*c, *op); }
CD_API int cd_outputs_free(cd::Comm* c, int slot) { return cd::outputs_free(*c, slot, cd::Op::combine); }
CD_API int cd_barrier(cd::Comm* c) { return cd::barrier(*c); }
CD_API int cd_exchange(cd::Comm* c, const int64_t* words, int64_t* all) { return cd::exchange(*c, words, all); }
CD_API int cd_wait_for_peer(cd::Comm* c, int64_t timeout_ns) { return cd::wait_for_peer(*c, timeout_ns); }
CD_API int cd_resync(cd::Comm* c, uint64_t mask, uint64_t epoch) { return cd::resync(*c, mask, epoch); }

// From any thread.
CD_API void cd_wake(cd::Comm* c) {
  c->wakes.fetch_add(1);
  c->ring(c->g.rank);
}
CD_API void cd_stop(cd::Comm* c) {
  c->stop.store(1, std::memory_order_release);
  if (c->bell[c->g.rank]) c->ring(c->g.rank);
}

CD_API void cd_give_up(cd::Comm* c, uint64_t ranks) {
  c->lost.fetch_or(ranks, std::memory_order_release);
  if (c->bell[c->g.rank]) c->ring(c->g.rank);
}

CD_API void cd_fault(const cd::Comm* c, cd::Fault* out) { *out = c->fault; }
CD_API int64_t cd_samples(cd::Comm* c, cd::Sample* out, int64_t most) { return c->samples.drain(out, most); }

// For tests: the arithmetic of one row by a named build (0 baseline, 1 AVX2, 2 AVX-512, -1 the chosen one).
static const cd::RowOps& rows_of(int build) {
#if defined(__x86_64__)
  if (build == 1) return cd::kRowsAvx2;
  if (build == 2) return cd::kRowsAvx512;
#endif
  return build == 0 ? cd::kRowsBaseline : cd::row_ops();
}
CD_API void cd_quantize(int build, uint8_t* q, float* scales, const float* values, int pow2, int64_t n) {
  rows_of(build).quantize(q, scales, values, pow2 != 0, n);
}
CD_API void cd_scale_add(int build, float* acc, const void* row, int type, float w, int64_t n) {
  rows_of(build).scale_add(acc, row, cd::Type(type), w, n);
}
// fp32 -> `type` when `narrow`, else `type` -> fp32.
CD_API void cd_convert(int build, void* out, const void* in, int type, int narrow, int64_t n) {
  const cd::RowOps& ops = rows_of(build);
  if (narrow) {
    ops.store(out, static_cast<const float*>(in), cd::Type(type), n);
  } else {
    ops.load(static_cast<float*>(out), in, cd::Type(type), n);
  }
}
