// The sending half of low-latency combine: this rank as owner of rows, which it sums to partials and sends home.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "layout/ll128.cuh"
#include "layout/region.cuh"
#include "ll/combine_unit.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// A unit of one partial (or, exact, of one routed row), as a warp sees it.
struct Task {
  i32 source, position, index;
  i32 only;     // exact: the k whose row travels
  i32 place;    // this lane's k: row of y
  f32 weight;   // this lane's k
  u32 taken;    // ballot of lanes whose row the partial takes
  i32 landing;  // exact: row of home_lines at the source
};

template <i32 N>
__device__ __forceinline__ Vector pack(const f32 (&value)[N]) {
  Vec<C, N> rounded;
#pragma unroll
  for (i32 i = 0; i < N; ++i) rounded.at[i] = narrow<C>(value[i]);
  return *reinterpret_cast<Vector*>(&rounded);
}

template <i32 N>
__device__ __forceinline__ Unit unit_of(const f32 (&first)[N], const f32 (&second)[N]) {
  if constexpr (N == 16)
    return quantize_unit(quant::columns_of(first), quant::columns_of(second), false);
  else
    return {pack(first), pack(second)};
}

// What a vector takes of a row of y.
using RowVector = Words<Y, kVector>;

// This lane's part of a row: both its vectors, weighted.
__device__ __forceinline__ void add_row(const RowVector (&y)[2], f32 weight, f32 (&sum)[2][kVector]) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    f32 term[kVector];
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) term[i] = __fmul_rn(value_in<Y>(y[half].at, i), weight);
    add_columns(term, sum[half]);
  }
}

// ---- rows of y on their way ----
//
// Rows of y on their way into a partial of low-latency combine. Where it is one row, that comes into registers. Where
// it is the sum of several (rows per expert), they come into shared memory by asynchronous copies, all of them
// together, with those of the next partial behind them: registers would hold two rows, and each load of a later one
// would be waited for by itself. A lane reads only what it has copied, so no barrier stands between.

constexpr bool kMoves = kSameType && KIND != PER_EXPERT;  // a row as it is
constexpr bool kStaged = KIND == PER_EXPERT;
constexpr i32 kVectorBytes = kVector * static_cast<i32>(sizeof(Y));  // of y, for a vector that travels
constexpr i32 kCopyBytes = kVectorBytes < 16 ? kVectorBytes : 16;    // of one copy
constexpr i32 kRowStage = 32 * 2 * kVectorBytes;                     // of a row, for a warp

// What has been asked for of a partial, perhaps on its way: this lane's part of it.
struct Asked {
  RowVector row[2];  // not staged
  u8* stage;         // staged: of the first row; others follow
  u32 left;          // staged: lanes whose rows have not been asked for
};

__device__ __forceinline__ const Y* expert_row(const CombineArgs& args, const Task& task, i32 k) {
  return reinterpret_cast<const Y*>(args.y) + static_cast<i64>(__shfl_sync(~0u, task.place, k)) * args.world.hidden;
}

// Copies a vector's columns of a row, zeros past its end; nobody waits.
__device__ __forceinline__ void stage_vector(const Y* row, i32 column, i32 past, u8* to) {
#pragma unroll
  for (i32 i = 0; i < kVectorBytes / kCopyBytes; ++i) {
    const i32 at = column + i * kCopyBytes / static_cast<i32>(sizeof(Y));
    const bool there = at < past;
    ptx::copy_async<kCopyBytes>(to + i * 32 * kCopyBytes, row + (there ? at : 0), there);
  }
}

__device__ __forceinline__ RowVector staged_vector(const u8* from) {
  RowVector y;
#pragma unroll
  for (i32 i = 0; i < kVectorBytes / kCopyBytes; ++i)
    reinterpret_cast<Vec<u32, kCopyBytes / 4>*>(&y)[i] =
        *reinterpret_cast<const Vec<u32, kCopyBytes / 4>*>(from + i * 32 * kCopyBytes);
  return y;
}

// Asks for this lane's part of a partial's rows, in ascending k: staged, of asked.left as many as there is room for,
// and the caller commits the copies.
__device__ __forceinline__ void ask_rows(const CombineArgs& args, const Task& task, Asked& asked) {
  const i32 hidden = args.world.hidden, column = task.index * kUnitWidth + first_column();
  const bool lone = is_tag_lane();
  if constexpr (!kStaged) {
    asked.row[0] = asked.row[1] = {};
    if (task.taken == 0) return;
    const Y* row = expert_row(args, task, __ffs(task.taken) - 1);
    if (!(kFp8 && lone)) asked.row[0] = load_words<Y, kVector>(row, column, hidden);
    if (!lone) asked.row[1] = load_words<Y, kVector>(row, column + kSecondColumn, hidden);
  } else {
    const u8* end = asked.stage + args.work.piece_bytes;
#pragma unroll 1
    for (u8* to = asked.stage; asked.left != 0 && to < end; to += kRowStage) {
      const Y* row = expert_row(args, task, __ffs(asked.left) - 1);
      asked.left &= asked.left - 1;
      stage_vector(row, column, kFp8 && lone ? 0 : hidden, to);
      stage_vector(row, column + kSecondColumn, lone ? 0 : hidden, to + kRowStage / 2);
    }
  }
}

// The sum of a partial's rows, weighted; those that were asked for are here, and one group of copies has been committed
// since.
__device__ __forceinline__ void sum_staged(const CombineArgs& args, const Task& task, Asked& asked,
                                           f32 (&sum)[2][kVector]) {
  begin_sum(true, sum[0]);
  begin_sum(true, sum[1]);
  u32 left = task.taken;
  ptx::copy_wait<1>();
  for (;;) {
#pragma unroll(kFp8 ? 1 : 2)
    for (const u8* from = asked.stage; left != asked.left; from += kRowStage) {
      const RowVector row[2] = {staged_vector(from), staged_vector(from + kRowStage / 2)};
      add_row(row, __shfl_sync(~0u, task.weight, __ffs(left) - 1), sum);
      left &= left - 1;
    }
    if (left == 0) return;
    ask_rows(args, task, asked);
    ptx::copy_commit();
    ptx::copy_wait<0>();
  }
}

__device__ __forceinline__ Vector vector_in(const RowVector& y) {
  return vector_of(y.at[0], y.at[1], y.at[2], y.at[3]);
}

// This lane's part of a partial, whose rows have been asked for. 0 if all were dropped.
__device__ __forceinline__ Unit make_partial(const CombineArgs& args, const Task& task, Asked& asked) {
  if constexpr (kMoves) {
    return {vector_in(asked.row[0]), vector_in(asked.row[1])};
  } else {
    if (task.taken == 0) return {};
    f32 sum[2][kVector];
    if constexpr (kStaged) {
      sum_staged(args, task, asked, sum);
    } else {
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        sum[0][i] = value_in<Y>(asked.row[0].at, i);
        sum[1][i] = value_in<Y>(asked.row[1].at, i);
      }
    }
    return unit_of(sum[0], sum[1]);
  }
}

// ---- partials ----

// What this warp sends; lane r: rows that source r, and source 32 + r, sent. After a dispatch that was stopped their
// memory may hold anything, and is looked at before the abort word is here: no more than there can be.
struct Owed {
  i32 low, high, most;
};

__device__ __forceinline__ Owed owed_rows(const CombineArgs& args) {
  const World& world = args.world;
  const i32 lane = lane_idx();
  Owed owed = {0, 0, 0};
  if (lane < world.size && is_active(lane)) owed.low = min(args.source_rows[lane], world.ll_tokens);
  if (lane + 32 < world.size && is_active(lane + 32)) owed.high = min(args.source_rows[lane + 32], world.ll_tokens);
  owed.most = __reduce_max_sync(~0u, max(owed.low, owed.high));
  return owed;
}

__device__ __forceinline__ bool is_whole_row(const CombineArgs& args) {
  return KIND == PER_RANK && args.positional && args.row_weights == nullptr;
}

__device__ __forceinline__ i32 units_per_row(const World& world) {
  return world.home_units * (KIND == EXACT ? world.topk : 1);
}

// The task of queue.turn, or the first after it that there is; its places are loaded but not yet looked at. False: none
// is left.
__device__ __forceinline__ bool next_task(const CombineArgs& args, const Owed& owed, Queue& queue, Task& task) {
  const World& world = args.world;
  const i32 units = world.home_units, k = lane_idx(), topk = world.topk;
#pragma unroll 1
  for (; queue.turn.position < owed.most; refill(queue)) {
    const Turn turn = queue.turn;
    task.source = rank_of_hop(world, turn.source);
    task.position = turn.position;
    task.only = KIND == EXACT ? turn.index / units : 0;
    task.index = turn.index - task.only * units;
    const bool owes = task.position < __shfl_sync(~0u, task.source < 32 ? owed.low : owed.high, task.source & 31);
    if (owes) {
      const i64 at = position_of(world, task.source, task.position);
      task.place = static_cast<i32>(at);
      if (!is_whole_row(args)) {
        task.place = k < topk ? args.places[at * topk + k] : -1;
        task.weight = k < topk && args.apply_weights ? args.weights[at * topk + k] : 1.0f;
        if (KIND == EXACT) task.landing = args.tokens[at] * topk + task.only;
      }
    }
    if (owes) return true;
  }
  return false;
}

// Whether there is something to send, once the places are here.
__device__ __forceinline__ bool take_rows(const CombineArgs& args, Task& task) {
  if (is_whole_row(args)) {
    task.taken = 1;
    return true;
  }
  task.taken = __ballot_sync(~0u, task.place >= 0);
  if (KIND == PER_RANK) task.taken &= 0u - task.taken;
  if (KIND != EXACT) return true;
  task.taken &= 1u << task.only;
  return __shfl_sync(~0u, task.place, task.only) != -1;
}

// Numbers carried home beside a position, from whoever sends its first row's first unit.
__device__ __forceinline__ void send_weight_lines(const CombineArgs& args, const Task& task, u64 seq) {
  const World& world = args.world;
  const i32 topk = world.topk;
  const u32 here = __ballot_sync(~0u, lane_idx() < topk && task.place != -1);
  if (KIND == EXACT && task.only != __ffs(here) - 1) return;
  const i32 first = __shfl_sync(~0u, task.place, (__ffs(here) - 1) & 31);
  const i64 row = KIND == PER_RANK ? static_cast<i64>(first) * topk + lane_idx() : task.place;
  const f32 mine = lane_idx() < topk && task.place >= 0 ? args.row_weights[row] : 0.0f;
  const i32 num_lines = lines_for(topk, kLineInts), base = (lane_idx() >> 3) * kLineInts + (lane_idx() & 7) * 4;
  u32 word[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) word[i] = __float_as_uint(__shfl_sync(~0u, mine, (base + i) & 31));
  u8* at = weight_lines_at(args, task.source, line_position(world, world.rank, task.position));
  store_lines(at, num_lines, vector_of(word[0], word[1], word[2], word[3]), seq);
}

__device__ __forceinline__ void send_partial(const CombineArgs& args, u8* const* homes, const Task& task, Asked& asked,
                                             u64 seq) {
  const i32 row = KIND == EXACT ? task.landing : line_position(args.world, args.world.rank, task.position);
  u8* to = homes[task.source] + static_cast<i64>(row * args.world.home_units + task.index) * kUnitBytes;
  store_unit(to, make_partial(args, task, asked), seq);
  if (task.index == 0 && args.row_weights != nullptr) send_weight_lines(args, task, seq);
}

// Asks for the rows of a task whose places are here; false: it has none. Meanwhile the places of the next task are
// asked for.
__device__ __forceinline__ bool begin_task(const CombineArgs& args, const Owed& owed, Queue& queue, Task& task,
                                           Asked& asked, Task& next, bool& more) {
  const bool sends = take_rows(args, task);
  asked.left = task.taken;
  if (sends) ask_rows(args, task, asked);
  refill(queue);
  more = next_task(args, owed, queue, next);
  return sends;
}

// Units of all partials, by position, then by source, side by side with other blocks. `next` is the first, if there is
// one; while its rows are under way, permit() waits until homes may be written. Loads would queue behind a warp's own
// stores, so sums run ahead (kStaged; `stages` has room for two partials): while one partial leaves, the rows of the
// second and the places of the third are under way. Else a partial leaves before the next begins.
template <class Permit>
__device__ __forceinline__ void send_partials(const CombineArgs& args, u8* const* homes, u8* stages, const Owed& owed,
                                              Queue& queue, Task next, bool more, u64 seq, Permit permit) {
  Task now = {};
  Asked asked = {};
  asked.stage = stages;
  u8* vacant = stages + args.work.piece_bytes;
  bool sends = false, permitted = false;
#pragma unroll 1
  do {
    if (!kStaged && sends) send_partial(args, homes, now, asked, seq);
    Task second = next;
    Asked ahead = {};
    ahead.stage = vacant;
    const bool follows = more && begin_task(args, owed, queue, second, ahead, next, more);
    if (kStaged) ptx::copy_commit();
    if (!permitted) permitted = permit();
    if (!permitted) break;
    if (kStaged && sends) send_partial(args, homes, now, asked, seq);
    vacant = asked.stage;
    now = second;
    asked = ahead;
    sends = follows;
  } while (more || sends);
  if (kStaged) ptx::copy_wait<0>();
}

// Exact rows land by (token, k), anywhere in the slot: home must be in this very operation, not only past the slot's
// last use (one that goes on without this rank takes that back: barrier.cuh). Partials land in this rank's own part of
// it.
__device__ __forceinline__ u64 credit_needed(const World& world, Credit credit, u64 seq) {
  if (KIND == EXACT) return seq;
  return free_from(world, credit.last, seq);
}

// The routing that this rank combines, to each home: before its rows fill the links. One warp.
__device__ __forceinline__ void tell_origin(const CombineArgs& args, u64 origin, u64 seq) {
  for (i32 peer = lane_idx(); peer < args.world.size; peer += 32)
    if (is_active(peer)) ptx::store_pair(head_at(args, peer, args.world.rank), origin, seq);
}

}  // namespace ep::ll
