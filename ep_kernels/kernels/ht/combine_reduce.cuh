// Sums of HT combine, from segments in shared memory: expert rows into a partial, partials into z. Several warps share
// a row, each a span of its columns, 32 x N columns per step. A lane keeps the sums of its columns in registers from
// the first row to the last.
//
// A segment of a partial as sent: its columns, padded to 16 bytes; fp8: then its scales, fp32, one per 128 columns.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "ht/combine_block.cuh"
#include "ht/pipeline.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

constexpr i32 kMaxFp8SegmentBytes = 14336, kMaxSegmentBytes = 16384;  // of a segment, both of y and as sent
constexpr i32 kMaxSegmentColumns = (kFp8 ? kMaxFp8SegmentBytes : kMaxSegmentBytes) / static_cast<i32>(sizeof(Y));

__device__ __forceinline__ u32 padded16(u32 num_bytes) { return (num_bytes + 15) / 16 * 16; }

// Bytes of a segment as sent.
__device__ __forceinline__ u32 sent_bytes(const PipelineSizes& sizes, i32 columns) {
  return kFp8 ? sizes.segment_bytes : padded16(columns * sizeof(C));
}

__device__ __forceinline__ i32 segment_columns(const World& world, const PipelineSizes& sizes, i32 segment) {
  return min(sizes.columns, world.hidden - segment * sizes.columns);
}

// The sums of a warp: N columns per lane in each of at most G groups.
template <i32 N, i32 G>
struct Accumulator {
  static constexpr i32 kColumns = N, kGroups = G;
  f32 value[G][N];
  i32 begin, end;  // columns of this warp; end may lie past the row

  __device__ __forceinline__ i32 group(i32 g) const { return begin + g * 32 * N; }
  __device__ __forceinline__ i32 column(i32 g) const { return group(g) + lane_idx() * N; }

  // Adds rows in order: load(row, column) -> Values; widen_values(Values, f32[N]) converts them. The first row of a sum
  // overwrites, so that -0 stays -0. Columns past the end of the row hold 0 or, weighted, anything.
  template <class Values, bool kWeighted, i32 kRows, class Load, class Widen>
  __device__ __forceinline__ void add(const SegmentInfo (&infos)[kRows], Load load, Widen widen_values) {
    if (infos[0].flags & kFirstRow)
      add_rows<Values, kWeighted, true>(infos, load, widen_values);
    else
      add_rows<Values, kWeighted, false>(infos, load, widen_values);
  }

  template <class Values, bool kWeighted, bool kOverwrites, i32 kRows, class Load, class Widen>
  __device__ __forceinline__ void add_rows(const SegmentInfo (&infos)[kRows], Load load, Widen widen_values) {
    const i32 columns = min(infos[0].columns(), end);
    constexpr i32 kUnroll = G < 4 ? G : 4;
#pragma unroll
    for (i32 base = 0; base < G; base += kUnroll) {
      if (group(base) >= columns) break;
      // Loads of some groups, all rows.
      Values values[kRows][kUnroll] = {};
#pragma unroll
      for (i32 row = 0; row < kRows; ++row)
#pragma unroll
        for (i32 j = 0; j < kUnroll; ++j)
          if (base + j < G && column(base + j) < columns) values[row][j] = load(row, column(base + j));
      // Added in the order of the rows; the first one may begin the sum.
#pragma unroll
      for (i32 j = 0; j < kUnroll; ++j) {
        if (base + j >= G || (N > quant::kLaneColumns && group(base + j) >= columns)) break;
#pragma unroll
        for (i32 row = 0; row < kRows; ++row) {
          f32 widened[N];
          widen_values(values[row][j], widened);
#pragma unroll
          for (i32 i = 0; i < N; ++i) {
            const f32 term = kWeighted ? __fmul_rn(widened[i], infos[row].weight) : widened[i];
            value[base + j][i] = kOverwrites && row == 0 ? term : __fadd_rn(value[base + j][i], term);
          }
        }
      }
    }
  }

  // visit(g) for every non-empty group of 32 x N columns; all lanes.
  template <class Visit>
  __device__ __forceinline__ void for_each_group(i32 columns, Visit visit) {
#pragma unroll
    for (i32 g = 0; g < G; ++g)
      if (group(g) < columns) visit(g);
  }
};

// For warp `warp` of `num_warps` that share `columns`.
template <class Acc>
__device__ __forceinline__ Acc make_accumulator(i32 warp, i32 num_warps, i32 columns) {
  constexpr i32 kGroup = 32 * Acc::kColumns;
  const i32 groups = (columns + kGroup - 1) / kGroup, span = (groups + num_warps - 1) / num_warps * kGroup;
  Acc acc;
  acc.begin = warp * span;
  acc.end = acc.begin + span;
  return acc;
}

// The sums, rounded to T.
template <class T, class Acc>
__device__ __forceinline__ void write_rounded(Acc& acc, i32 num_columns, u8* dst) {
  const i32 columns = min(num_columns, acc.end);
  acc.for_each_group(columns, [&](i32 g) {
    Vec<T, Acc::kColumns> rounded;
#pragma unroll
    for (i32 i = 0; i < Acc::kColumns; ++i) rounded.at[i] = narrow<T>(acc.value[g][i]);
    const i32 column = acc.column(g);
    if (column < columns) *reinterpret_cast<Vec<T, Acc::kColumns>*>(dst + column * sizeof(T)) = rounded;
  });
}

// ---- rows of y, weighted, into a partial as sent ----

constexpr i32 kReduceColumns = kFp8 ? quant::kLaneColumns : kColumns<Y>;

template <class Acc>
__device__ __forceinline__ void add_row(Acc& acc, const SegmentInfo& info, const u8* stage) {
  using Values = Words<Y, kReduceColumns>;
  const SegmentInfo infos[] = {info};
  acc.template add<Values, true>(
      infos, [&](i32, i32 column) { return *reinterpret_cast<const Values*>(stage + column * sizeof(Y)); },
      [](const Values& values, f32(&value)[kReduceColumns]) {
#pragma unroll
        for (i32 i = 0; i < kReduceColumns; ++i) value[i] = value_in<Y>(values.at, i);
      });
}

// This warp's columns of a partial as fp8, up to eight groups per round. One lane divides for each group, and no branch
// separates the groups of a round, so their latencies overlap.
template <class Acc>
__device__ __forceinline__ void write_quantised(Acc& acc, i32 num_columns, u8* stage, f32* scales) {
  constexpr i32 kRounds = (Acc::kGroups + 7) / 8, kUnroll = Acc::kGroups / kRounds;
  static_assert(kRounds * kUnroll == Acc::kGroups);
  const i32 columns = min(num_columns, acc.end);
#pragma unroll
  for (i32 base = 0; base < Acc::kGroups; base += kUnroll) {
    if (base != 0 && acc.group(base) >= columns) break;
    // The largest value of each group that this lane has.
    u32 largest[kUnroll], all = 0;
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j) {
      largest[j] = acc.column(base + j) < columns ? quant::amax(acc.value[base + j]) : 0;
      all = max(all, largest[j]);
    }
    // Rare: not all is finite. Scales come of what is, and the rest becomes NaN.
    if (__any_sync(~0u, all >= quant::kInfinity)) {
#pragma unroll
      for (i32 j = 0; j < kUnroll; ++j) {
        largest[j] = acc.column(base + j) < columns ? quant::finite_amax(acc.value[base + j]) : 0;
        quant::make_nan(acc.value[base + j]);
      }
    }
    // A lane for each group's scale.
    const f32 scale = quant::scale_of(quant::spread_largest<32>(largest), false), inverse = __fdiv_rn(1.0f, scale);
    // Quantise by it.
#pragma unroll
    for (i32 j = 0; j < kUnroll; ++j) {
      const f32 factor = __shfl_sync(~0u, inverse, j);
      const f32(&sum)[4] = acc.value[base + j];
      const u32 q = quant::encode4_finite(sum[0], sum[1], sum[2], sum[3], factor);
      if (acc.column(base + j) < columns) *reinterpret_cast<u32*>(stage + acc.column(base + j)) = q;
    }
    const i32 mine = acc.group(base + lane_idx());
    if (lane_idx() < kUnroll && mine < columns) scales[mine / quant::kBlock] = scale;
  }
}

template <class Acc>
__device__ __forceinline__ void write_partial(Acc& acc, const PipelineSizes& sizes, i32 columns, u8* stage) {
  if constexpr (kFp8) {
    write_quantised(acc, columns, stage, reinterpret_cast<f32*>(stage + padded16(sizes.columns * sizeof(C))));
  } else {
    write_rounded<C>(acc, columns, stage);
  }
}

// ---- reduce warps ----
//
// Between the load warp and the send thread: rows into partials, or single rows into fp8.
//
// Reduce warps form 2 or 4 teams; each team owns one partial, so the latencies of several partials overlap. Partials
// are numbered in the order of their rows, and teams take them in rotation. The load warp publishes a ticket per
// partial: the stage of its first row, as soon as that stage is acquired.
constexpr u32 kTickets = 32;
// A ticket: a stage and perhaps kPhaseBit; or: no more partials; or: the same for the team that ends `partials`.
constexpr u32 kPhaseBit = 0x40, kNoMore = 0x80, kFirstNoMore = 0xC0;
static_assert(kTickets >= 2 * kMaxRowStages,
              "ticket n + kTickets is published only after the stage of ticket n was released");
static_assert(kMaxRowStages < kPhaseBit, "a ticket holds a stage");

extern "C" {  // see common/block.cuh
__shared__ u64 ticket_ready[kTickets];  // mbarriers
__shared__ u8 tickets[kTickets];
}

constexpr i32 kMaxTeamWarps = 4, kMinTeamWarps = 2;  // the fewest that can hold all columns
constexpr i32 kReduceGroup = 32 * kReduceColumns,
              kMaxGroups = (kMaxSegmentColumns + kMaxTeamWarps * kReduceGroup - 1) / (kMaxTeamWarps * kReduceGroup);

__device__ __forceinline__ i32 num_team_warps(const PipelineSizes& sizes) {
  return sizes.columns <= kMinTeamWarps * kMaxGroups * kReduceGroup ? kMinTeamWarps : kMaxTeamWarps;
}

__device__ __forceinline__ void publish_ticket(u32 number, u32 ticket) {
  tickets[number % kTickets] = ticket;
  ptx::barrier_arrive(ticket_ready + number % kTickets);
}

// Teams of kTeamWarps warps, at most kGroups groups of columns per warp: each team reduces one partial at a time.
template <i32 kTeamWarps, i32 kGroups>
__device__ __forceinline__ void reduce_in_teams(const CombineArgs& args, Pipeline rows, Pipeline partials) {
  constexpr i32 kTeams = kNumReduceWarps / kTeamWarps;
  const i32 warp = warp_idx() - kFirstReduceWarp;
  auto acc =
      make_accumulator<Accumulator<kReduceColumns, kGroups>>(warp % kTeamWarps, kTeamWarps, args.pipelines.columns);
  u32 number = warp / kTeamWarps;
  partials = partials.ahead(number);
#pragma unroll 1
  for (;; number += kTeams) {
    ptx::bulk_load_wait(ticket_ready + number % kTickets, number / kTickets & 1);
    const u32 ticket = tickets[number % kTickets];
    if (ticket == kNoMore) return;
    SegmentInfo info = {0.0f, kEnd, nullptr};
    rows.stage_idx = ticket & (kPhaseBit - 1);
    rows.phase = (ticket & kPhaseBit) != 0;
    while ((ticket & kNoMore) == 0) {
      // Rows of other teams lie between, and the load of a lap ago may not have ended (convert_rows).
      if (kTeams > 1) rows.wait_empty();
      info = consumer_wait(rows);
      add_row(acc, info, rows.stage());
      consumer_release(rows);
      if (info.flags & kLastRow) break;
    }
    producer_acquire(partials);
    if (info.flags & kLastRow) write_partial(acc, args.pipelines, info.columns(), partials.stage());
    if (acc.begin == 0 && lane_idx() == 0) partials.infos[partials.stage_idx] = info;
    ptx::fence_proxy_shared();
    producer_commit(partials);
    if (info.flags & kEnd) return;
    partials = partials.ahead(kTeams);
  }
}

// Unrolled for the maximum row width. A second copy for narrow rows keeps the loop inside the instruction cache.
template <i32 kTeamWarps>
__device__ __forceinline__ void reduce_with_teams_of(const CombineArgs& args, const Pipeline& rows,
                                                     const Pipeline& partials) {
  constexpr i32 kFewGroups = kMaxGroups > 8 ? 8 : kMaxGroups - 1;  // 7168 columns of bf16 have 7
  if (args.pipelines.columns <= kTeamWarps * kFewGroups * kReduceGroup)
    reduce_in_teams<kTeamWarps, kFewGroups>(args, rows, partials);
  else
    reduce_in_teams<kTeamWarps, kMaxGroups>(args, rows, partials);
}

__device__ __forceinline__ void reduce_rows(const CombineArgs& args, const Pipeline& rows, const Pipeline& partials) {
  if (num_team_warps(args.pipelines) == kMaxTeamWarps) reduce_with_teams_of<kMaxTeamWarps>(args, rows, partials);
  else reduce_with_teams_of<kMinTeamWarps>(args, rows, partials);
}

// Single rows become fp8 in place: each reduce warp takes every kNumReduceWarps-th stage, so their latencies overlap.
__device__ __forceinline__ void convert_rows(const CombineArgs& args, Pipeline rows, Pipeline partials) {
  const auto advance = [&](i32 stages) {
    for (i32 i = 0; i < stages; ++i) {
      rows.advance();
      partials.advance();
    }
  };
  advance(warp_idx() - kFirstReduceWarp);
#pragma unroll 1
  while (true) {
    // Loads complete in any order: without this wait the stage may be one whole lap behind, with the same parity.
    rows.wait_empty();
    const SegmentInfo info = consumer_wait(rows);
    if ((info.flags & kEnd) == 0) {
      f32* scales = reinterpret_cast<f32*>(rows.stage() + padded16(args.pipelines.columns * sizeof(C)));
      quant::in_place<Y>(rows.stage(), info.columns(), false, [&](i32 block, f32 scale) { scales[block] = scale; });
      ptx::fence_proxy_shared();
    }
    producer_commit(partials);
    if (info.flags & kEnd) return;
    advance(kNumReduceWarps);
  }
}

}  // namespace ep::ht
