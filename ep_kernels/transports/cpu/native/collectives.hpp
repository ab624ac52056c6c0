// Collectives over shared memory: a member with staging slots and a pool instead of tokens.
//
//   page 0, 1..        meeting.hpp          event count; words of meetings
//   behind them        CollectiveControl    a CollectiveSlot for each operation in flight
//   staging            F x { two halves }   shards of tensors that are not in the pool
//   pool               registered tensors   peers read them in place
//
// F = max_in_flight. Only the owner writes its region; peers map it read-only. Memory is sparse until touched.
#pragma once
#include "member.hpp"
#include "rows.hpp"

namespace cd {

constexpr uint32_t kCollectiveAbi = 3;  // raise when the meaning of a byte changes without its offset
constexpr int kMaxCollectives = 16;
constexpr int64_t kPitch = 64;  // staged slices begin at multiples of it

// Progress within an operation: seq << kRoundBits | rounds. Grows from operation to operation.
constexpr int kRoundBits = 24;
constexpr int64_t kMaxRounds = (1 << kRoundBits) - 1;

enum class Algorithm : int32_t { pull = 0, one_shot = 1, two_shot = 2 };

// What all ranks must bring alike.
struct Fingerprint {
  int64_t op, num_bytes, dtype, parts, algorithm;
};
constexpr int kFingerprintFields = 5;

// Valid once `published` carries the operation's number.
struct CollectiveSlot {
  Word published;  // rounds whose input is readable
  Word reduced;    // two-shot: rounds whose sums of the owner's slice are readable
  Word consumed;   // rounds of all peers that the owner has read
  Word given_up;   // number of an operation on a registered x that failed here: the caller may have changed x
  int64_t published_ns;  // CLOCK_MONOTONIC
  int64_t source;        // where x begins in the owner's region, or -1: staged; -2: `part_source` in staging says
  Fingerprint what;
};

struct CollectiveControl {
  Meeting meeting;
  CollectiveSlot slots[kMaxCollectives];
};

// Mirrored by native.py, as are the structs below.
struct CollectiveGeometry {
  int32_t rank, ranks, in_flight, pad;
  int64_t staging_bytes, pool_bytes, timeout_ns;

  // A half holds a slice for each rank and one of sums, of a page at least.
  int64_t slot_bytes() const {
    const int64_t least = 2 * (ranks + 1) * kPage;
    return page_up(staging_bytes > least ? staging_bytes : least);
  }
  int64_t staging() const { return kPage + page_up(sizeof(CollectiveControl)); }
  int64_t pool() const { return staging() + in_flight * slot_bytes(); }
  int64_t total() const { return pool() + page_up(pool_bytes); }
};

// One tensor of an all-gather.
struct Part {
  const uint8_t* x;  // [bytes]
  uint8_t* out;      // [R][bytes]
  int64_t bytes;
  int64_t source;    // where x lies in the own region, or -1
};

struct Collective {
  // In.
  Fingerprint what;
  const Part* parts;  // all-gather
  int64_t num_parts;
  const uint8_t* x;   // sums
  uint8_t* out;
  int64_t source;     // sums: where x lies in the own region, or -1
  int64_t count;      // sums: elements of x, in all slices
  Type type;          // sums: of the elements
  int32_t zero_copy;  // peers read x where it lies
  // State. Rounds count from 1.
  uint64_t seq;
  Clock clock;
  int64_t inside_ns;       // spent in this operation
  int64_t slices;          // 1, or one for each rank that sums a part
  int64_t stride_bytes;    // of a slice
  int64_t chunk_bytes;     // of a slice, in one round
  int64_t rounds, round, staged;
  Waiting waiting;         // of the present phase
  int32_t phase, status;
  uint64_t arrived;        // all-gather: bit per rank whose whole shard is in out
};

struct CollectiveMember : Member {
  CollectiveGeometry g;
  const RowOps& ops;
  int64_t slot_rounds[kMaxCollectives] = {};  // of the last operation in each slot
  Array<float> sum;                           // [kSumTile]

  explicit CollectiveMember(const CollectiveGeometry& geometry);
  bool allocate() { return sum.allocate(kSumTile) && samples.allocate(); }
  void destroy() override;

  static constexpr int64_t kSumTile = 4096;
  CollectiveControl& control() const { return *reinterpret_cast<CollectiveControl*>(region + kPage); }
  const CollectiveSlot& slot_of(int r, uint64_t seq) const;
  const uint8_t* base_of(int r) const { return r == rank ? region : mapped[r]; }
};

// Takes a number, waits until the slot is free, and publishes what can be published without waiting.
Status begin(CollectiveMember& m, Collective& op);
// Goes on as far as it can; where `block` is set, to the end. kNothing: it would have to wait. `one_shard`: returns
// kOk as soon as `arrived` has grown.
Status advance(CollectiveMember& m, Collective& op, bool block, bool one_shard);

}  // namespace cd
