// Collectives: ranks write their own region, readers pull.
//
// An operation moves in rounds. In each, a rank stages the next chunk of its x and publishes the round's number; reads
// the chunk of every peer, in the order in which they come; and publishes that it has consumed the round. An x in the
// pool is not staged: all its rounds are published at once and peers read it where it lies; then the operation ends
// only when all peers have consumed it, for x is the caller's again.
//
//   all_gather       one slice. Peers copy it into their out.
//   reduce_scatter   R slices, one for each rank. Each reads its slice of every x, and sums.
//   all_reduce       one-shot: one slice, all read and sum all of it. Two-shot: as reduce_scatter, with a slice for
//                    each active rank; the sums of the own slice go to staging as well, are published (`reduced`), and
//                    peers copy them.
//
// Example: R = 2, 10 bytes, chunks of 4. Rank 0 stages bytes 0-3 in half 0, publishes 1; stages 4-7 in half 1,
// publishes 2; copies bytes 0-3 of rank 1 when rank 1 has published 1, publishes consumed 1; half 0 is free when rank 1
// has consumed 1: then bytes 8-9 go there.
//
// Memory order: contents, then `published` or `reduced` (release); the reader's acquire makes them visible. The
// reader's loads, then `consumed` (release); the owner's acquire of it comes before it writes the half, the slot or a
// registered x again. In place, out is written only where no peer reads x any more: two-shot, the one that reads a
// slice has published its sums by then; one-shot, x is staged; in the others, peers read other slices than the one
// written.
#include "collectives.hpp"

#include <algorithm>
#include <cstring>

namespace cd {
namespace {

enum : int32_t { kStage, kArrive, kSums, kConsume, kRelease, kDone };

constexpr uint64_t number(uint64_t seq, int64_t rounds) { return seq << kRoundBits | uint64_t(rounds); }
constexpr int64_t align_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

Op kind(const Collective& op) { return Op(op.what.op); }
bool sums(const Collective& op) { return kind(op) != Op::all_gather; }
bool two_shot(const Collective& op) { return Algorithm(op.what.algorithm) == Algorithm::two_shot; }
int slot_index(const CollectiveMember& m, uint64_t seq) { return int(seq % uint64_t(m.g.in_flight)); }
CollectiveSlot& own_slot(CollectiveMember& m, uint64_t seq) { return m.control().slots[slot_index(m, seq)]; }

// The slice that rank `r` sums: of a two-shot, in which nobody else would, one for each active rank.
int64_t slice_of(const CollectiveMember& m, const Collective& op, int r) {
  if (two_shot(op)) return __builtin_popcountll(m.active & ((1ull << r) - 1));
  return op.slices > 1 ? r : 0;
}

// Bytes of slice `s`: the last ones may be short.
int64_t slice_bytes(const Collective& op, int64_t s) {
  if (!sums(op)) return op.stride_bytes;
  const int64_t total = op.count * size_of(op.type);
  return std::clamp<int64_t>(total - s * op.stride_bytes, 0, op.stride_bytes);
}

// [first, first + bytes) of slice `s` in round `round`.
struct Chunk {
  int64_t first, bytes;
};
Chunk chunk_of(const Collective& op, int64_t s, int64_t round) {
  const int64_t first = (round - 1) * op.chunk_bytes;
  return {first, std::clamp<int64_t>(slice_bytes(op, s) - first, 0, op.chunk_bytes)};
}

int64_t pitch(const Collective& op) { return align_up(op.chunk_bytes, kPitch); }

// Where slice `s` of a round is staged, within a region; s = slices: the sums.
int64_t staged_at(const CollectiveMember& m, const Collective& op, int64_t round, int64_t s) {
  const int64_t slot = m.g.staging() + slot_index(m, op.seq) * m.g.slot_bytes();
  return slot + (round - 1) % 2 * (m.g.slot_bytes() / 2) + s * pitch(op);
}

void plan(const CollectiveMember& m, Collective& op) {
  op.slices = two_shot(op) ? __builtin_popcountll(m.active) : kind(op) == Op::reduce_scatter ? m.ranks : 1;
  if (sums(op)) {
    const int64_t size = size_of(op.type);
    op.stride_bytes = (op.count + op.slices - 1) / op.slices * size;
  } else {
    op.stride_bytes = op.what.num_bytes;
  }
  const int64_t pieces = op.slices + (two_shot(op) ? 1 : 0);
  const int64_t whole = m.g.slot_bytes() / pieces / kPitch * kPitch;
  const int64_t half = m.g.slot_bytes() / 2 / pieces / kPitch * kPitch;
  op.chunk_bytes = op.stride_bytes <= whole ? op.stride_bytes : half;
  op.rounds = op.chunk_bytes ? (op.stride_bytes + op.chunk_bytes - 1) / op.chunk_bytes : 1;
  op.rounds = std::max<int64_t>(op.rounds, 1);
}

// Calls fn(part, first byte within it, byte of the chunk, bytes) for the parts that a chunk of the joined shard has.
template <typename Fn>
void for_each_part(const Collective& op, Chunk chunk, Fn fn) {
  int64_t begin = 0;
  for (int64_t i = 0; i < op.num_parts; ++i) {
    const Part& part = op.parts[i];
    const int64_t first = std::max(chunk.first, begin), last = std::min(chunk.first + chunk.bytes, begin + part.bytes);
    if (first < last) fn(i, first - begin, first - chunk.first, last - first);
    begin += part.bytes;
  }
}

void stage(CollectiveMember& m, const Collective& op, int64_t round) {
  if (!sums(op)) {
    uint8_t* to = m.region + staged_at(m, op, round, 0);
    for_each_part(op, chunk_of(op, 0, round), [&](int64_t i, int64_t first, int64_t at, int64_t bytes) {
      m.ops.copy(to + at, op.parts[i].x + first, bytes);
    });
    return;
  }
  const bool by_rank = kind(op) == Op::reduce_scatter;
  for (int64_t s = 0; s < op.slices; ++s) {
    const bool own = op.slices > 1 && s == slice_of(m, op, m.rank);
    if (own || (by_rank && !m.is_active(int(s)))) continue;  // no peer reads it
    const Chunk c = chunk_of(op, s, round);
    m.ops.copy(m.region + staged_at(m, op, round, s), op.x + s * op.stride_bytes + c.first, c.bytes);
  }
}

// kOk: all peers have consumed round `round`.
Status credit(CollectiveMember& m, const Collective& op, int64_t round, bool block) {
  Waiting waiting{m.peers(), 0, 0};
  Status status = kOk;
  while (status == kOk && waiting.missing) {
    status = m.wait_any({kind(op), Phase::credit, number(op.seq, round)}, waiting, block, [&](int r) {
      return m.slot_of(r, op.seq).consumed.v.load(std::memory_order_acquire);
    });
  }
  return status;
}

// Publishes the present round and, where its half is free, the next.
Status stage_ahead(CollectiveMember& m, Collective& op, bool block) {
  CollectiveSlot& slot = own_slot(m, op.seq);
  const int64_t most = std::min(op.rounds, op.round + 1);
  while (op.staged < most) {
    const int64_t next = op.staged + 1;
    const bool needed = next <= op.round;
    const Status status = next > 2 ? credit(m, op, next - 2, block && needed) : kOk;
    if (status == kNothing && !needed) return kOk;
    if (status != kOk) return status;
    stage(m, op, next);
    op.staged = next;
    m.publish(slot.published, number(op.seq, next));
  }
  return kOk;
}

// A registered x needs no staging; the sums of a two-shot do.
Status prepare(CollectiveMember& m, Collective& op, bool block) {
  if (!op.zero_copy) return stage_ahead(m, op, block);
  return two_shot(op) && op.round > 2 ? credit(m, op, op.round - 2, block) : kOk;
}

Status same_arguments(CollectiveMember& m, const Collective& op, int r) {
  const auto* mine = reinterpret_cast<const int64_t*>(&op.what);
  const auto* theirs = reinterpret_cast<const int64_t*>(&m.slot_of(r, op.seq).what);
  for (int i = 0; i < kFingerprintFields; ++i) {
    if (mine[i] == theirs[i]) continue;
    m.fault = {r, Why::silent, kind(op), Phase::arguments, mine[i], theirs[i], 0, i};
    return kDiffers;
  }
  return kOk;
}

// Where peer `r` has the chunk of slice `s`.
const uint8_t* chunk_at(const CollectiveMember& m, const Collective& op, int r, int64_t s) {
  const int64_t source = m.slot_of(r, op.seq).source;
  const int64_t at = source == -1 ? staged_at(m, op, op.round, s)
                                  : source + s * op.stride_bytes + chunk_of(op, s, op.round).first;
  return m.base_of(r) + at;
}

void gather_from(CollectiveMember& m, const Collective& op, int r) {
  const Chunk chunk = chunk_of(op, 0, op.round);
  const int64_t source = m.slot_of(r, op.seq).source;
  const uint8_t* base = m.base_of(r);
  const auto* sources = reinterpret_cast<const int64_t*>(base + staged_at(m, op, 1, 0));  // of each part
  for_each_part(op, chunk, [&](int64_t i, int64_t first, int64_t at, int64_t bytes) {
    const Part& part = op.parts[i];
    const uint8_t* from = source == -1 ? base + staged_at(m, op, op.round, 0) + at : base + sources[i] + first;
    m.ops.copy(part.out + r * part.bytes + first, from, bytes);
  });
}

// The own shard, unless it lies there already.
void keep_own(CollectiveMember& m, Collective& op) {
  for (int64_t i = 0; i < op.num_parts; ++i) {
    const Part& part = op.parts[i];
    uint8_t* place = part.out + m.rank * part.bytes;
    if (place != part.x) m.ops.copy(place, part.x, part.bytes);
  }
  op.arrived |= 1ull << m.rank;
}

// The present chunk of the slice that this rank sums, in ascending rank, into out and, two-shot, into staging.
void sum_chunk(CollectiveMember& m, const Collective& op) {
  const int64_t s = slice_of(m, op, m.rank), size = size_of(op.type);
  const Chunk chunk = chunk_of(op, s, op.round);
  // Where each active rank's part of the slice lies, in ascending rank.
  const uint8_t* from[kMaxRanks];
  int n = 0;
  for (const int r : Bits(m.active)) {
    from[n++] = r == m.rank ? op.x + s * op.stride_bytes + chunk.first : chunk_at(m, op, r, s);
  }
  const bool whole = kind(op) == Op::all_reduce;
  // Tile by tile: load the first, add the others, round once.
  uint8_t* out = op.out + (whole ? s * op.stride_bytes : 0) + chunk.first;
  float* acc = m.sum.data();
  for (int64_t first = 0; first < chunk.bytes; first += CollectiveMember::kSumTile * size) {
    const int64_t count = std::min(CollectiveMember::kSumTile, (chunk.bytes - first) / size);
    m.ops.load(acc, from[0] + first, op.type, count);
    for (int i = 1; i < n; ++i) m.ops.add(acc, from[i] + first, op.type, count);
    m.ops.store(out + first, acc, op.type, count);
  }
  if (two_shot(op)) m.ops.copy(m.region + staged_at(m, op, op.round, op.slices), out, chunk.bytes);
}

void copy_sums(CollectiveMember& m, const Collective& op, int r) {
  const int64_t s = slice_of(m, op, r);
  const Chunk chunk = chunk_of(op, s, op.round);
  const uint8_t* from = m.base_of(r) + staged_at(m, op, op.round, op.slices);
  m.ops.copy(op.out + s * op.stride_bytes + chunk.first, from, chunk.bytes);
}

// Takes the chunk of each peer that comes; sums need all of them.
Status arrive(CollectiveMember& m, Collective& op, bool block, bool one_shard) {
  const Want want{kind(op), Phase::payload, number(op.seq, op.round)};
  while (op.waiting.missing) {
    // Wait until some of the missing ones are there.
    const uint64_t before = op.waiting.missing;
    const Status status = m.wait_any(want, op.waiting, block, [&](int r) {
      return m.slot_of(r, op.seq).published.v.load(std::memory_order_acquire);
    });
    if (status != kOk) return status;
    // Compare their arguments; take a shard at once.
    for (const int r : Bits(before & ~op.waiting.missing)) {
      if (const Status same = same_arguments(m, op, r); same != kOk) {
        op.waiting.missing = before;  // the next call returns the same error
        return same;
      }
      if (sums(op)) continue;
      gather_from(m, op, r);
      if (op.round == op.rounds) op.arrived |= 1ull << r;
    }
    if (one_shard) return kOk;
  }
  if (sums(op)) sum_chunk(m, op);
  return kOk;
}

Status take_sums(CollectiveMember& m, Collective& op, bool block) {
  const Want want{kind(op), Phase::sums, number(op.seq, op.round)};
  while (op.waiting.missing) {
    const uint64_t before = op.waiting.missing;
    const Status status = m.wait_any(want, op.waiting, block, [&](int r) {
      return m.slot_of(r, op.seq).reduced.v.load(std::memory_order_acquire);
    });
    if (status != kOk) return status;
    for (const int r : Bits(before & ~op.waiting.missing)) copy_sums(m, op, r);
  }
  return kOk;
}

// Registered x: no peer reads it any more.
Status released(CollectiveMember& m, Collective& op, bool block) {
  const Want want{kind(op), Phase::release, number(op.seq, op.rounds)};
  while (op.waiting.missing) {
    const Status status = m.wait_any(want, op.waiting, block, [&](int r) {
      return m.slot_of(r, op.seq).consumed.v.load(std::memory_order_acquire);
    });
    if (status != kOk) return status;
  }
  return kOk;
}

// A peer that failed in this operation may have changed what was read of it.
Status unchanged(CollectiveMember& m, const Collective& op) {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (const int r : Bits(m.peers())) {
    const uint64_t given_up = m.slot_of(r, op.seq).given_up.v.load(std::memory_order_relaxed);
    if (given_up != op.seq) continue;
    m.fault = {r, Why::silent, kind(op), Phase::release, int64_t(op.seq), int64_t(given_up), 0, 0};
    return kDiffers;
  }
  return m.confirm(kind(op));
}

void record(CollectiveMember& m, const Collective& op) {
  const int64_t most = INT32_MAX;
  Sample sample{int32_t(op.what.op), int32_t(op.what.algorithm), int32_t(std::min(op.what.num_bytes, most)),
                m.ranks, op.seq, op.clock.start_ns, op.clock.send_ns, op.inside_ns, {}};
  for (const int r : Bits(m.peers())) {
    const int64_t sent = op.clock.start_ns + op.clock.send_ns;
    sample.peer_wait_ns[r] = std::max<int64_t>(0, m.slot_of(r, op.seq).published_ns - sent);
  }
  m.samples.push(sample);
}

void enter(CollectiveMember& m, Collective& op, int32_t phase) {
  op.phase = phase;
  op.waiting = {m.peers(), 0, 0};
}

// One phase; kOk: the next one has been entered, or `arrived` has grown.
Status step(CollectiveMember& m, Collective& op, bool block, bool one_shard) {
  CollectiveSlot& slot = own_slot(m, op.seq);
  Status status = kOk;
  switch (op.phase) {
    case kStage:
      status = prepare(m, op, block);
      if (status == kOk) enter(m, op, kArrive);
      return status;
    case kArrive:
      status = arrive(m, op, block, one_shard);
      if (status != kOk || (one_shard && op.waiting.missing)) return status;
      if (two_shot(op)) m.publish(slot.reduced, number(op.seq, op.round));
      enter(m, op, two_shot(op) ? kSums : kConsume);
      return kOk;
    case kSums:
      status = take_sums(m, op, block);
      if (status == kOk) enter(m, op, kConsume);
      return status;
    case kConsume:
      m.publish(slot.consumed, number(op.seq, op.round));
      if (op.round < op.rounds) {
        ++op.round;
        enter(m, op, kStage);
        return kOk;
      }
      status = unchanged(m, op);
      if (status == kOk) enter(m, op, op.zero_copy ? kRelease : kDone);
      return status;
    default:
      status = released(m, op, block);
      if (status == kOk) op.phase = kDone;
      return status;
  }
}

}  // namespace

CollectiveMember::CollectiveMember(const CollectiveGeometry& geometry)
    : Member(geometry.rank, geometry.ranks, geometry.timeout_ns, geometry.total()), g(geometry), ops(row_ops()) {}

void CollectiveMember::destroy() {
  this->~CollectiveMember();
  free(this);
}

const CollectiveSlot& CollectiveMember::slot_of(int r, uint64_t seq) const {
  return reinterpret_cast<const CollectiveControl*>(base_of(r) + kPage)->slots[slot_index(*this, seq)];
}

Status begin(CollectiveMember& m, Collective& op) {
  op.clock.start_ns = now_ns();
  op.seq = m.next[0];
  const int index = slot_index(m, op.seq);
  plan(m, op);
  if (op.rounds > kMaxRounds) return kNothing;
  // The slot is free when all ranks have taken what its last operation left there.
  if (op.seq > m.base[0] + m.g.in_flight) {
    const uint64_t before = op.seq - m.g.in_flight;
    const Want want{kind(op), Phase::credit, number(before, m.slot_rounds[index])};
    const Status status = m.wait(want, [&](int r) {
      return m.slot_of(r, op.seq).consumed.v.load(std::memory_order_acquire);
    });
    if (status != kOk) return status;
  }
  // The operation has begun: its number is taken, and the slot says what it is.
  m.set_upcoming(Op(0), op.seq + 1);
  m.slot_rounds[index] = op.rounds;
  op.round = 1;
  op.staged = 0;
  op.arrived = 0;
  CollectiveSlot& slot = own_slot(m, op.seq);
  slot.what = op.what;
  slot.source = op.zero_copy ? op.source : -1;
  slot.published_ns = now_ns();
  enter(m, op, kStage);
  // Publish where registered tensors lie, or stage what fits without waiting.
  Status status = kOk;
  if (op.zero_copy) {
    auto* sources = reinterpret_cast<int64_t*>(m.region + staged_at(m, op, 1, 0));
    for (int64_t i = 0; i < op.num_parts; ++i) sources[i] = op.parts[i].source;
    m.publish(slot.published, number(op.seq, op.rounds));
  } else {
    status = stage_ahead(m, op, false);
  }
  if (!sums(op)) keep_own(m, op);
  op.clock.send_ns = op.inside_ns = now_ns() - op.clock.start_ns;
  return status;
}

Status advance(CollectiveMember& m, Collective& op, bool block, bool one_shard) {
  if (op.phase == kDone) return kOk;
  const int64_t started = now_ns();
  const uint64_t before = op.arrived;
  if (block) op.waiting.started = 0;  // a deadline is that of one call
  Status status = kOk;
  while (status == kOk && op.phase != kDone && !(one_shard && op.arrived != before)) {
    status = step(m, op, block, one_shard);
  }
  op.inside_ns += now_ns() - started;
  if (status == kOk && op.phase == kDone) record(m, op);
  if (status != kOk && status != kNothing && op.zero_copy) {
    m.publish(own_slot(m, op.seq).given_up, op.seq);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before anything that the caller writes to x
  }
  return status;
}

}  // namespace cd
