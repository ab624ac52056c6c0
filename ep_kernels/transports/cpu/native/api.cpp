// The C ABI, which native.py calls. Nothing throws across it; every function returns a Status or a plain value.
#include <cerrno>
#include <cstring>

#include "args.hpp"
#include "collectives.hpp"
#include "exported.hpp"
#include "group.hpp"
#include "remote.hpp"

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
                            offsetof(cd::Meeting, exchange),
                            offsetof(cd::Meeting, resync),
                            offsetof(cd::Control, dispatch_arrived),
                            offsetof(cd::Control, combine_arrived),
                            offsetof(cd::Control, dispatch_published),
                            offsetof(cd::SlotMeta, source),
                            offsetof(cd::SlotMeta, parts),
                            cd::kChunks,
                            cd::kMaxRanks,
                            cd::kMaxSlots};
  return cd::hash_of(facts, sizeof(facts) / sizeof(facts[0]));
}

// kFree: waits, too, until the expert output buffer of the slot may be written.
enum Phases : int { kSend = 1, kReceive = 2, kFree = 4 };

// What cd_create made.
cd::Comm& moe(cd::Member* m) { return *static_cast<cd::Comm*>(m); }
// What cd_collectives_create made.
cd::CollectiveMember& member(cd::Member* m) { return *static_cast<cd::CollectiveMember*>(m); }

}  // namespace

// Of all members. `m` is what cd_create or cd_collectives_create made.

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

// Of dispatch and combine.

CD_API uint64_t cd_abi() { return abi_hash(); }
// Offset and slot size of each part; offset of the rows in a dispatch slot; size of a mirror, and of the region.
// Mirrored by native.py.
CD_API void cd_region_parts(const cd::Geometry* g, int64_t* out) {
  const cd::RegionMap map(*g);
  const int64_t parts[] = {map.dispatch, map.d_size, map.combine, map.c_size, map.outputs,
                           map.y_size,   map.d_rows, map.mirror,  map.total};
  for (const int64_t part : parts) *out++ = part;
}

// first [E+1], places [first[E]]: every copy of every expert. Null when memory is short.
CD_API cd::Member* cd_create(const cd::Geometry* g, const int32_t* first, const int32_t* places) {
  return cd::make<cd::Comm>(*g, first, places);
}

// Ranks of other hosts. landing [R][bytes of a mirror]; host [R]: lowest rank of each rank's host. 0 or an errno.
CD_API int cd_attach_network(cd::Member* m, uint8_t* landing) { return moe(m).attach_network(landing); }
CD_API cd::NetHandler cd_network_handler() { return cd::on_network; }
CD_API void cd_set_outbox(cd::Member* m, cd::Outbox* outbox) { moe(m).outbox = outbox; }
CD_API void cd_set_hosts(cd::Member* m, const int32_t* host) { moe(m).set_hosts(host); }
// A second thread for what comes from this host. 0 or an errno.
CD_API int cd_start_helper(cd::Member* m) { return moe(m).helper.start() ? 0 : EAGAIN; }
CD_API int cd_attach_landing(cd::Member* m, int rank, int landing_fd) {
  return moe(m).attach_landing(rank, landing_fd);
}
CD_API void cd_sent(cd::Member* m, cd::Sent* out) {
  for (int i = 0; i < 3; ++i) out[i] = moe(m).traffic[i];
}

CD_API int cd_dispatch_free(cd::Member* m) { return cd::dispatch_free(moe(m)); }
// `phases`: bits of Phases. Both in one call, or one after the other.
CD_API int cd_dispatch(cd::Member* m, cd::DispatchOp* op, int phases) {
  int status = phases & kSend ? cd::dispatch_send(moe(m), *op) : cd::kOk;
  if (status != cd::kOk || !(phases & kReceive)) return status;
  status = cd::dispatch_place(moe(m), *op);
  if (status == cd::kOk) status = cd::dispatch_receive(moe(m), *op);
  if (status != cd::kOk || !(phases & kFree)) return status;
  return cd::outputs_free(moe(m), moe(m).slot_of(op->seq), cd::Op::combine);
}
CD_API int cd_combine(cd::Member* m, cd::CombineOp* op, int phases) {
  const int status = phases & kSend ? cd::combine_send(moe(m), *op) : cd::kOk;
  return status == cd::kOk && phases & kReceive ? cd::combine_receive(moe(m), *op) : status;
}
CD_API int cd_outputs_free(cd::Member* m, int slot) { return cd::outputs_free(moe(m), slot, cd::Op::combine); }

// Of collectives.

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
CD_API void cd_quantize_mxfp8(int build, uint8_t* q, uint8_t* scales, const float* values, int64_t n) {
  rows_of(build).quantize_mxfp8(q, scales, values, n);
}
CD_API void cd_quantize_nvfp4(int build, uint8_t* q, uint8_t* scales, const float* values, float global, int64_t n) {
  rows_of(build).quantize_nvfp4(q, scales, values, global, n);
}
CD_API void cd_scale_add(int build, float* acc, const void* row, int type, float w, int64_t n) {
  rows_of(build).scale_add(acc, row, cd::Type(type), w, n);
}
// fp32 -> `type` when `narrow`, else `type` -> fp32.
CD_API void cd_convert(int build, void* out, const void* in, int type, int narrow, int64_t n) {
  const cd::RowOps& ops = rows_of(build);
  if (narrow) {
    ops.store(out, static_cast<const float*>(in), cd::Type(type), n);
  } else if (cd::Type(type) == cd::Type::e4m3) {
    const float one = 1.0f;
    constexpr int64_t kScaled = 128;  // numbers that one scale is for
    for (int64_t at = 0; at < n; at += kScaled) {
      const int64_t bytes = n - at < kScaled ? n - at : kScaled;
      ops.dequantize(static_cast<float*>(out) + at, static_cast<const uint8_t*>(in) + at, &one, bytes);
    }
  } else {
    ops.load(static_cast<float*>(out), in, cd::Type(type), n);
  }
}
