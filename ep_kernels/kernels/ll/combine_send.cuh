// Send phase of LL combine: an expert rank sums its expert rows to partials and sends them to the source ranks.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "layout/ll128.cuh"
#include "layout/region.cuh"
#include "ll/combine_packet.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// Work of a warp: one packet of one partial (exact: of one routed row).
struct Task {
  i32 source, position, index;
  i32 exact_k;   // exact: the k whose row travels
  i32 src_row;   // of y, for this lane's k; -1 = not served here, -2 = dropped
  f32 weight;    // of this lane's k
  u32 row_mask;  // lanes whose rows the partial sums
  i32 recv_row;  // exact: row of the source's combine receive buffer; of a remote source as box_rows_of, behind M' rows
                 // of each rank before this one
};

template <i32 N>
__device__ __forceinline__ Vector pack(const f32 (&value)[N]) {
  Vec<C, N> rounded;
#pragma unroll
  for (i32 i = 0; i < N; ++i) rounded.at[i] = narrow<C>(value[i]);
  return *reinterpret_cast<Vector*>(&rounded);
}

template <i32 N>
__device__ __forceinline__ Packet packet_of(const f32 (&first)[N], const f32 (&second)[N]) {
  if constexpr (N == 16)
    return quantize_packet(quant::columns_of(first), quant::columns_of(second), false);
  else
    return {pack(first), pack(second)};
}

// Columns of y that one vector of a packet holds.
using RowVector = Words<Y, kVectorColumns>;

// Adds this lane's part of a row, both vectors, weighted.
__device__ __forceinline__ void add_row(const RowVector (&y)[2], f32 weight, f32 (&sum)[2][kVectorColumns]) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    f32 term[kVectorColumns];
#pragma unroll
    for (i32 i = 0; i < kVectorColumns; ++i) term[i] = __fmul_rn(value_in<Y>(y[half].at, i), weight);
    add_columns(term, sum[half]);
  }
}

// ---- prefetch of expert rows ----
//
// A single row goes to registers. The rows of a sum (rows per expert) go to shared memory by cp.async, all of them
// together, with those of the next partial behind them: registers would hold two rows, and each later row would cost a
// wait of its own. A lane reads back only its own copies, so no barrier is needed.

constexpr bool kMoves = !kFp8 && KIND != PER_EXPERT;  // rows travel unchanged
constexpr bool kStaged = KIND == PER_EXPERT;
constexpr i32 kVectorBytes = kVectorColumns * static_cast<i32>(sizeof(Y));  // of y, for one vector of a packet
constexpr i32 kCopyBytes = 16;                                              // of one copy
constexpr i32 kRowStage = 32 * 2 * kVectorBytes;                            // of one row, for a warp

// This lane's part of a partial's rows, perhaps in flight.
struct Prefetch {
  RowVector row[2];  // not staged
  u8* stage;         // staged: of the first row; the others follow
  u32 left;          // staged: lanes whose rows have not been started
};

__device__ __forceinline__ const Y* expert_row(const CombineArgs& args, const Task& task, i32 k) {
  return reinterpret_cast<const Y*>(args.y) + static_cast<i64>(__shfl_sync(~0u, task.src_row, k)) * args.world.hidden;
}

// Starts the copy of a vector's columns; zeros past the end of the row.
__device__ __forceinline__ void stage_vector(const Y* row, i32 column, i32 past, u8* to) {
#pragma unroll
  for (i32 i = 0; i < kVectorBytes / kCopyBytes; ++i) {
    const i32 at = column + i * kCopyBytes / static_cast<i32>(sizeof(Y));
    const bool present = at < past;
    ptx::copy_async(to + i * 32 * kCopyBytes, row + (present ? at : 0), present);
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

// Starts the loads of this lane's part of a partial's rows, in ascending k. Staged: as many of prefetch.left as the
// stage has room for; the caller commits the copies.
__device__ __forceinline__ void prefetch_rows(const CombineArgs& args, const Task& task, Prefetch& prefetch) {
  const i32 hidden = args.world.hidden, column = task.index * kCombineColumns + first_column();
  const bool single = is_flag_lane();  // has one vector; none in fp8
  // Not staged: the one row of a partial, into registers.
  if constexpr (!kStaged) {
    prefetch.row[0] = prefetch.row[1] = {};
    if (task.row_mask == 0) return;
    const Y* row = expert_row(args, task, __ffs(task.row_mask) - 1);
    if (!(kFp8 && single)) prefetch.row[0] = load_words<Y, kVectorColumns>(row, column, hidden);
    if (!single) prefetch.row[1] = load_words<Y, kVectorColumns>(row, column + kSecondColumn, hidden);
  } else {
    // Staged: rows into shared memory, one behind the other.
    const u8* end = prefetch.stage + args.work.segment_bytes;
#pragma unroll 1
    for (u8* to = prefetch.stage; prefetch.left != 0 && to < end; to += kRowStage) {
      const Y* row = expert_row(args, task, __ffs(prefetch.left) - 1);
      prefetch.left &= prefetch.left - 1;
      stage_vector(row, column, kFp8 && single ? 0 : hidden, to);
      stage_vector(row, column + kSecondColumn, single ? 0 : hidden, to + kRowStage / 2);
    }
  }
}

// Weighted sum of a partial's rows. Expects that the copies of its first rows, and one group since, were committed.
__device__ __forceinline__ void sum_staged(const CombineArgs& args, const Task& task, Prefetch& prefetch,
                                           f32 (&sum)[2][kVectorColumns]) {
  begin_sum(true, sum[0]);
  begin_sum(true, sum[1]);
  u32 left = task.row_mask;
  ptx::copy_wait<1>();
  for (;;) {
#pragma unroll(kFp8 ? 1 : 2)
    for (const u8* from = prefetch.stage; left != prefetch.left; from += kRowStage) {
      const RowVector row[2] = {staged_vector(from), staged_vector(from + kRowStage / 2)};
      add_row(row, __shfl_sync(~0u, task.weight, __ffs(left) - 1), sum);
      left &= left - 1;
    }
    if (left == 0) return;
    prefetch_rows(args, task, prefetch);
    ptx::copy_commit();
    ptx::copy_wait<0>();
  }
}

__device__ __forceinline__ Vector vector_in(const RowVector& y) {
  return vector_of(y.at[0], y.at[1], y.at[2], y.at[3]);
}

// This lane's part of a partial whose rows were prefetched; 0 if all were dropped.
__device__ __forceinline__ Packet make_partial(const CombineArgs& args, const Task& task, Prefetch& prefetch) {
  if constexpr (kMoves) {
    return {vector_in(prefetch.row[0]), vector_in(prefetch.row[1])};
  } else {
    if (task.row_mask == 0) return {};
    f32 sum[2][kVectorColumns];
    if constexpr (kStaged) {
      sum_staged(args, task, prefetch, sum);
    } else {
#pragma unroll
      for (i32 i = 0; i < kVectorColumns; ++i) {
        sum[0][i] = value_in<Y>(prefetch.row[0].at, i);
        sum[1][i] = value_in<Y>(prefetch.row[1].at, i);
      }
    }
    return packet_of(sum[0], sum[1]);
  }
}

// ---- partials ----

// Rows that arrived in dispatch and go back; lane r: from source r (low) and source 32 + r (high). After an aborted
// dispatch the counts may be garbage, and they are used before the abort word is known: hence the limit.
struct RecvCounts {
  i32 low, high, max_rows;
};

__device__ __forceinline__ RecvCounts load_recv_counts(const CombineArgs& args) {
  const World& world = args.world;
  const i32 lane = lane_idx();
  RecvCounts counts = {0, 0, 0};
  if (lane < world.size && is_active(lane)) counts.low = min(args.source_rows[lane], world.ll_tokens);
  if (lane + 32 < world.size && is_active(lane + 32)) counts.high = min(args.source_rows[lane + 32], world.ll_tokens);
  counts.max_rows = __reduce_max_sync(~0u, max(counts.low, counts.high));
  return counts;
}

// Whether the row of y is the position itself, so that no table is read.
__device__ __forceinline__ bool is_positional(const CombineArgs& args) {
  return KIND == PER_RANK && args.positional && args.row_weights == nullptr;
}

__device__ __forceinline__ i32 packets_per_position(const World& world) {
  return world.combine_packets * (KIND == EXACT ? world.topk : 1);
}

// The task of work.item, or the first existing one after it; its table entries are in flight. False: none is left.
__device__ __forceinline__ bool next_task(const CombineArgs& args, const RecvCounts& counts, WarpWorkCounter& work,
                                          Task& task) {
  const World& world = args.world;
  const i32 row_packets = world.combine_packets, k = lane_idx(), topk = world.topk;
#pragma unroll 1
  for (; work.item.position < counts.max_rows; take_next(work)) {
    // The item's source and position, and whether the source has that row here.
    const WorkItem item = work.item;
    task.source = rank_at_offset(world, item.source);
    task.position = item.position;
    task.exact_k = KIND == EXACT ? item.index / row_packets : 0;
    task.index = item.index - task.exact_k * row_packets;
    const bool exists =
        task.position < __shfl_sync(~0u, task.source < 32 ? counts.low : counts.high, task.source & 31);
    // Its row, and where its sum goes.
    if (exists) {
      const i64 at = position_of(world, task.source, task.position);
      task.src_row = static_cast<i32>(at);
      if (!is_positional(args)) {
        task.src_row = k < topk ? args.dst_rows[at * topk + k] : -1;
        task.weight = k < topk && args.apply_weights ? args.weights[at * topk + k] : 1.0f;
        if (KIND == EXACT) {
          const i32 row = args.tokens[at];
          task.recv_row = row * topk + task.exact_k;
          if (is_remote(world, task.source)) task.recv_row = line_position(world, world.rank, row);
        }
      }
    }
    if (exists) return true;
  }
  return false;
}

// Sets the rows that a partial sums; waits for the task's table entries. False: nothing to send (exact only).
__device__ __forceinline__ bool select_rows(const CombineArgs& args, Task& task) {
  if (is_positional(args)) {
    task.row_mask = 1;
    return true;
  }
  task.row_mask = __ballot_sync(~0u, task.src_row >= 0);
  if (KIND == PER_RANK) task.row_mask &= 0u - task.row_mask;
  if (KIND != EXACT) return true;
  if (is_remote(args.world, task.source))
    task.recv_row += __popc(__ballot_sync(~0u, task.src_row != -1) & ((1u << task.exact_k) - 1));
  task.row_mask &= 1u << task.exact_k;
  return __shfl_sync(~0u, task.src_row, task.exact_k) != -1;
}

// Sends the row weights of a position, beside the first packet of its first row.
__device__ __forceinline__ void send_weight_lines(const CombineArgs& args, const Task& task, u64 seq) {
  const World& world = args.world;
  const i32 topk = world.topk;
  const u32 served = __ballot_sync(~0u, lane_idx() < topk && task.src_row != -1);
  if (KIND == EXACT && task.exact_k != __ffs(served) - 1) return;
  const i32 first = __shfl_sync(~0u, task.src_row, (__ffs(served) - 1) & 31);
  const i64 row = KIND == PER_RANK ? static_cast<i64>(first) * topk + lane_idx() : task.src_row;
  const f32 mine = lane_idx() < topk && task.src_row >= 0 ? args.row_weights[row] : 0.0f;
  const i32 num_lines = lines_for(topk, kLineInts), base = (lane_idx() >> 3) * kLineInts + (lane_idx() & 7) * 4;
  u32 word[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) word[i] = __float_as_uint(__shfl_sync(~0u, mine, (base + i) & 31));
  u8* at = weight_lines_at(args, task.source, world.rank, task.position);
  store_lines(at, num_lines, vector_of(word[0], word[1], word[2], word[3]), seq);
}

// recv_buffers: [R] the combine receive buffer of each rank.
__device__ __forceinline__ void send_packet(const CombineArgs& args, u8* const* recv_buffers, const Task& task,
                                            Prefetch& prefetch, u64 seq) {
  const i32 row = KIND == EXACT ? task.recv_row : line_position(args.world, args.world.rank, task.position);
  u8* to = recv_buffers[task.source] + static_cast<i64>(row * args.world.combine_packets + task.index) * kPacketBytes;
  store_packet(to, make_partial(args, task, prefetch), seq);
  if (task.index == 0 && args.row_weights != nullptr) send_weight_lines(args, task, seq);
}

__device__ __forceinline__ net::RowRun partials_of(const CombineArgs& args) {
  const RegionMap& box = box_map(args.world);
  const u32 packets = static_cast<u32>(args.world.combine_packets);
  return {box.combine_lines + args.slot * box.combine_lines_stride, static_cast<u64>(packets) * kPacketBytes, packets};
}

// How many there are for a remote source: one for each of its positions, or (exact) each row of them.
__device__ __forceinline__ u64 num_partials(const CombineArgs& args, i32 source) {
  const World& world = args.world;
  const i32 positions = min(args.source_rows[source], world.ll_tokens);
  if (KIND != EXACT || positions <= 0) return positions;
  const i64 last = position_of(world, source, positions - 1);
  i32 count = args.tokens[last];
#pragma unroll 1
  for (i32 k = 0; k < world.topk; ++k) count += args.dst_rows[last * world.topk + k] != -1;
  return min(count, world.ll_tokens * world.topk);
}

// Packets of a warp that are not counted yet (net::Staged): lane i for sources i and 32 + i.
struct StagedPartials {
  net::RowRun rows;
  net::Staged of[2];

  __device__ __forceinline__ void begin(const CombineArgs& args) {
    if constexpr (!NETWORK) return;
    rows = partials_of(args);
    of[0] = of[1] = {0, 0};
  }
  __device__ __forceinline__ void note(const CombineArgs& args, const Task& task, u64 seq) {
    if (!NETWORK || net::slice_rows(args.world, net::kCombine) == 0 || !is_remote(args.world, task.source)) return;
    const bool mine = (task.source & 31) == lane_idx();
    net::Staged& staged = of[task.source < 32 ? 0 : 1];
    const i32 row = KIND == EXACT ? task.recv_row - line_position(args.world, args.world.rank, 0) : task.position;
    net::note_staged(args.world, net::kCombine, task.source, rows, mine, row, staged, seq, OP_COMBINE);
  }
  __device__ __forceinline__ void end(const CombineArgs& args, u64 seq) {
    if constexpr (!NETWORK) return;
#pragma unroll
    for (i32 half = 0; half < 2; ++half)
      net::note_last_staged(args.world, net::kCombine, 32 * half + lane_idx(), rows, of[half], seq, OP_COMBINE);
  }
};

// Prefetches the rows of a task and the table entries of the next one. False: the task has nothing to send.
__device__ __forceinline__ bool begin_task(const CombineArgs& args, const RecvCounts& counts, WarpWorkCounter& work,
                                           Task& task, Prefetch& prefetch, Task& next, bool& more) {
  const bool sends = select_rows(args, task);
  prefetch.left = task.row_mask;
  if (sends) prefetch_rows(args, task, prefetch);
  take_next(work);
  more = next_task(args, counts, work, next);
  return sends;
}

// Sends the packets of all partials, by position, then by source, shared with the other blocks. `next` is the first
// task, valid if `more`; await_credit() runs while its rows are in flight. Loads queue behind a warp's own stores, so
// sums are software-pipelined (kStaged; `stages` holds two partials): while one partial is stored, the rows of the
// second and the table entries of the third are in flight. Otherwise a partial is stored before the next one begins.
template <class AwaitCredit>
__device__ __forceinline__ void send_partials(const CombineArgs& args, u8* const* recv_buffers, u8* stages,
                                              const RecvCounts& counts, WarpWorkCounter& work, Task next, bool more,
                                              u64 seq, AwaitCredit await_credit) {
  Task now = {};
  Prefetch prefetch = {};
  StagedPartials staged;
  staged.begin(args);
  prefetch.stage = stages;
  u8* free_stage = stages + args.work.segment_bytes;
  bool sends = false, granted = false;
#pragma unroll 1
  do {
    // Not staged: the partial is stored before the next one loads.
    if (!kStaged && sends) {
      send_packet(args, recv_buffers, now, prefetch, seq);
      staged.note(args, now, seq);
    }
    // Begin the second one.
    Task second = next;
    Prefetch second_prefetch = {};
    second_prefetch.stage = free_stage;
    const bool second_sends = more && begin_task(args, counts, work, second, second_prefetch, next, more);
    if (kStaged) ptx::copy_commit();
    // Nothing is stored before the peers' slots are free.
    if (!granted) granted = await_credit();
    if (!granted) break;
    if (kStaged && sends) {
      send_packet(args, recv_buffers, now, prefetch, seq);
      staged.note(args, now, seq);
    }
    // The second becomes the first.
    free_stage = prefetch.stage;
    now = second;
    prefetch = second_prefetch;
    sends = second_sends;
  } while (more || sends);
  if (kStaged) ptx::copy_wait<0>();
  staged.end(args, seq);
}

// Credit that sending needs. Exact rows land by (token, k) anywhere in the slot: the source must have started this very
// operation, not just finished with the slot (ranks that continue without this one revoke that: barrier.cuh). Partials
// land in this rank's own part of the slot.
__device__ __forceinline__ u64 credit_needed(const World& world, Credit credit, u64 seq) {
  if (KIND == EXACT) return seq;
  return free_from(world, credit.last, seq);
}

// Sends the routing_id that this rank combines to every source, before rows fill the links. One warp.
__device__ __forceinline__ void send_routing_id(const CombineArgs& args, u64 routing_id, u64 seq) {
  for (i32 peer = lane_idx(); peer < args.world.size; peer += 32)
    if (is_active(peer)) ptx::store_pair(routing_packet_at(args, peer, args.world.rank), routing_id, seq);
}

}  // namespace ep::ll
