// Rows of y on their way into a partial of low-latency combine. Where it is one row, that comes into registers. Where it is the sum of
// several (rows per expert), they come into shared memory by asynchronous copies, all of them together, with those of the next partial
// behind them: registers would hold two rows, and each load of a later one would be waited for by itself. A lane reads only what it
// has copied, so no barrier stands between.
#pragma once

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

__device__ __forceinline__ const Y* row_of(const CombineArgs& args, const Task& task, i32 k) {
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

// Asks for this lane's part of a partial's rows, in ascending k: staged, of asked.left as many as there is room for, and the caller
// commits the copies.
__device__ __forceinline__ void ask_rows(const CombineArgs& args, const Task& task, Asked& asked) {
  const i32 hidden = args.world.hidden, column = task.index * kUnitWidth + first_column();
  const bool lone = is_tag_lane();
  if constexpr (!kStaged) {
    asked.row[0] = asked.row[1] = {};
    if (task.taken == 0) return;
    const Y* row = row_of(args, task, __ffs(task.taken) - 1);
    if (!(kFp8 && lone)) asked.row[0] = load_words<Y, kVector>(row, column, hidden);
    if (!lone) asked.row[1] = load_words<Y, kVector>(row, column + kSecondColumn, hidden);
  } else {
    const u8* end = asked.stage + args.work.piece_bytes;
#pragma unroll 1
    for (u8* to = asked.stage; asked.left != 0 && to < end; to += kRowStage) {
      const Y* row = row_of(args, task, __ffs(asked.left) - 1);
      asked.left &= asked.left - 1;
      stage_vector(row, column, kFp8 && lone ? 0 : hidden, to);
      stage_vector(row, column + kSecondColumn, lone ? 0 : hidden, to + kRowStage / 2);
    }
  }
}

// The sum of a partial's rows, weighted; those that were asked for are here, and one group of copies has been committed since.
__device__ __forceinline__ void sum_staged(const CombineArgs& args, const Task& task, Asked& asked, f32 (&sum)[2][kVector]) {
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

__device__ __forceinline__ Vector vector_in(const RowVector& y) { return vector_of(y.at[0], y.at[1], y.at[2], y.at[3]); }

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
