// Sums of HT combine, from rows in shared memory: of expert rows into a partial as it travels, and of partials into z.
// Several warps share a row, each a span of its columns, 32 x N at a time. A lane keeps its columns' sums in registers
// from the first row to the last.
//
// A piece of a partial as it travels: its columns, padded to 16 bytes; fp8: then its scales, fp32, one per 128 columns.
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

constexpr i32 kMostOfFp8 = 14336, kMostBytes = 16384;  // of a piece, as y and as it travels
constexpr i32 kMostColumns =
    (kFp8 ? kMostOfFp8 : kMostBytes) / static_cast<i32>(sizeof(Y) > sizeof(C) ? sizeof(Y) : sizeof(C));

__device__ __forceinline__ u32 padded16(u32 num_bytes) { return (num_bytes + 15) / 16 * 16; }

// Bytes of a piece as it travels.
__device__ __forceinline__ u32 home_bytes_of(const Rings& rings, i32 columns) {
  return kFp8 ? rings.home_bytes : padded16(columns * sizeof(C));
}

__device__ __forceinline__ i32 piece_columns(const World& world, const Rings& rings, i32 piece) {
  return min(rings.columns, world.hidden - piece * rings.columns);
}

// N columns of a lane in each of G groups at most.
template <i32 N, i32 G>
struct Sums {
  static constexpr i32 kColumns = N, kGroups = G;
  f32 at[G][N];
  i32 begin, end;  // this warp's columns, of those that there are

  __device__ __forceinline__ i32 group(i32 g) const { return begin + g * 32 * N; }
  __device__ __forceinline__ i32 column(i32 g) const { return group(g) + lane_idx() * N; }

  // Adds rows, one after the other: load(row, column) -> Values; widen_values(Values, f32[N]) makes numbers of them.
  // The first row of a sum sets it, so that -0 stays -0; columns that are not there are 0 or, weighted, anything.
  template <class Values, bool kWeighted, i32 kRows, class Load, class Widen>
  __device__ __forceinline__ void add(const Item (&items)[kRows], Load load, Widen widen_values) {
    if (items[0].what & kFirst)
      add_rows<Values, kWeighted, true>(items, load, widen_values);
    else
      add_rows<Values, kWeighted, false>(items, load, widen_values);
  }

  template <class Values, bool kWeighted, bool kSets, i32 kRows, class Load, class Widen>
  __device__ __forceinline__ void add_rows(const Item (&items)[kRows], Load load, Widen widen_values) {
    const i32 columns = min(items[0].columns(), end);
    constexpr i32 kAhead = G < 4 ? G : 4;
#pragma unroll
    for (i32 base = 0; base < G; base += kAhead) {
      if (group(base) >= columns) break;
      Values values[kRows][kAhead] = {};
#pragma unroll
      for (i32 row = 0; row < kRows; ++row)
#pragma unroll
        for (i32 j = 0; j < kAhead; ++j)
          if (base + j < G && column(base + j) < columns) values[row][j] = load(row, column(base + j));
#pragma unroll
      for (i32 j = 0; j < kAhead; ++j) {
        if (base + j >= G || (N > quant::kLaneColumns && group(base + j) >= columns)) break;
#pragma unroll
        for (i32 row = 0; row < kRows; ++row) {
          f32 value[N];
          widen_values(values[row][j], value);
#pragma unroll
          for (i32 i = 0; i < N; ++i) {
            const f32 term = kWeighted ? __fmul_rn(value[i], items[row].weight) : value[i];
            at[base + j][i] = kSets && row == 0 ? term : __fadd_rn(at[base + j][i], term);
          }
        }
      }
    }
  }

  // visit(g) for every group of 32 x N columns that has any; all lanes.
  template <class Visit>
  __device__ __forceinline__ void for_groups(i32 columns, Visit visit) {
#pragma unroll
    for (i32 g = 0; g < G; ++g)
      if (group(g) < columns) visit(g);
  }
};

// Of `warps` warps that share `columns`, number `warp`.
template <class Totals>
__device__ __forceinline__ Totals sums_of(i32 warp, i32 warps, i32 columns) {
  constexpr i32 kGroup = 32 * Totals::kColumns;
  const i32 groups = (columns + kGroup - 1) / kGroup, span = (groups + warps - 1) / warps * kGroup;
  Totals sums;
  sums.begin = warp * span;
  sums.end = sums.begin + span;
  return sums;
}

// The sums, rounded to T.
template <class T, class Totals>
__device__ __forceinline__ void write_rounded(Totals& sums, i32 num_columns, u8* to) {
  const i32 columns = min(num_columns, sums.end);
  sums.for_groups(columns, [&](i32 g) {
    Vec<T, Totals::kColumns> rounded;
#pragma unroll
    for (i32 i = 0; i < Totals::kColumns; ++i) rounded.at[i] = narrow<T>(sums.at[g][i]);
    const i32 column = sums.column(g);
    if (column < columns) *reinterpret_cast<Vec<T, Totals::kColumns>*>(to + column * sizeof(T)) = rounded;
  });
}

// ---- rows of y, weighted, to a partial as it travels ----

constexpr i32 kMadeColumns = kFp8 ? quant::kLaneColumns : kColumns<Y>;

template <bool kWeighted, class Totals>
__device__ __forceinline__ void add_row(Totals& sums, const Item& item, const u8* stage) {
  using Values = Words<Y, kMadeColumns>;
  const Item items[] = {item};
  sums.template add<Values, kWeighted>(
      items, [&](i32, i32 column) { return *reinterpret_cast<const Values*>(stage + column * sizeof(Y)); },
      [](const Values& values, f32(&value)[kMadeColumns]) {
#pragma unroll
        for (i32 i = 0; i < kMadeColumns; ++i) value[i] = value_in<Y>(values.at, i);
      });
}

// A warp's share of a partial as fp8, up to eight groups at a time. A lane divides for a group, and nothing branches
// group by group: the groups' latencies overlap.
template <class Totals>
__device__ __forceinline__ void write_quantised(Totals& sums, i32 num_columns, u8* stage, f32* scales) {
  constexpr i32 kRounds = (Totals::kGroups + 7) / 8, kTogether = Totals::kGroups / kRounds;
  static_assert(kRounds * kTogether == Totals::kGroups);
  const i32 columns = min(num_columns, sums.end);
#pragma unroll
  for (i32 base = 0; base < Totals::kGroups; base += kTogether) {
    if (base != 0 && sums.group(base) >= columns) break;
    u32 most[kTogether], all = 0;
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      most[j] = sums.column(base + j) < columns ? quant::amax(sums.at[base + j]) : 0;
      all = max(all, most[j]);
    }
    if (__any_sync(~0u, all >= quant::kInfinity)) {
#pragma unroll
      for (i32 j = 0; j < kTogether; ++j) {
        most[j] = sums.column(base + j) < columns ? quant::finite_amax(sums.at[base + j]) : 0;
        quant::make_nan(sums.at[base + j]);
      }
    }
    const f32 scale = quant::scale_of(quant::spread_largest<32>(most), false), inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      const f32 by = __shfl_sync(~0u, inverse, j);
      const f32(&sum)[4] = sums.at[base + j];
      const u32 q = quant::encode4_finite(sum[0], sum[1], sum[2], sum[3], by);
      if (sums.column(base + j) < columns) *reinterpret_cast<u32*>(stage + sums.column(base + j)) = q;
    }
    const i32 mine = sums.group(base + lane_idx());
    if (lane_idx() < kTogether && mine < columns) scales[mine / quant::kBlock] = scale;
  }
}

template <class Totals>
__device__ __forceinline__ void write_partial(Totals& sums, const Rings& rings, i32 columns, u8* stage) {
  if constexpr (kFp8) {
    write_quantised(sums, columns, stage, reinterpret_cast<f32*>(stage + padded16(rings.columns * sizeof(C))));
  } else {
    write_rounded<C>(sums, columns, stage);
  }
}

// ---- makers ----
//
// The makers of HT combine, between the loading warp and the storing one: rows to partials, where rows are summed, or
// become fp8.

// Where rows are summed the makers are teams, each with a sum of its own: most of a row's time is latency, which so
// overlaps. Sums are numbered in the order of their rows, and teams take turns. The loader says where a sum's rows
// begin once the first has a stage.
constexpr u32 kTurns = 32;
// kPhase beside the stage; instead of it: no more sums, and the first to hear of it.
constexpr u32 kPhase = 0x40, kOver = 0x80, kFirstOver = 0xC0;
static_assert(kTurns >= 2 * kMostRows,
              "a turn is told when its row has a stage: the turn kTurns before it is over by then");
static_assert(kMostRows < kPhase, "what is told holds a stage");

extern "C" {  // see common/block.cuh
__shared__ u64 turn_told[kTurns];  // mbarriers
__shared__ u8 turns[kTurns];
}

constexpr i32 kMostOfTeam = 4, kFewOfTeam = 2;  // warps: as few as can have all columns
constexpr i32 kMadeGroup = 32 * kMadeColumns,
              kMostGroups = (kMostColumns + kMostOfTeam * kMadeGroup - 1) / (kMostOfTeam * kMadeGroup);

__device__ __forceinline__ i32 num_of_team(const Rings& rings) {
  return rings.columns <= kFewOfTeam * kMostGroups * kMadeGroup ? kFewOfTeam : kMostOfTeam;
}

__device__ __forceinline__ void tell_turn(u32 number, u32 what) {
  turns[number % kTurns] = what;
  ptx::barrier_arrive(turn_told + number % kTurns);
}

// The makers, in teams of kEach, a warp for kGroups groups of columns at most: rows to partials, a team one at a time.
template <i32 kEach, i32 kGroups>
__device__ __forceinline__ void make_partials(const CombineArgs& args, Ring rows, Ring made) {
  constexpr i32 kTeams = kMakers / kEach;
  const i32 maker = warp_idx() - kFirstMaker;
  auto sums = sums_of<Sums<kMadeColumns, kGroups>>(maker % kEach, kEach, args.rings.columns);
  u32 turn = maker / kEach;
  made = made.ahead(turn);
#pragma unroll 1
  for (;; turn += kTeams) {
    ptx::bulk_load_wait(turn_told + turn % kTurns, turn / kTurns & 1);
    const u32 told = turns[turn % kTurns];
    if (told == kOver) return;
    Item item = {0.0f, kNoMore, nullptr};
    rows.at = told & (kPhase - 1);
    rows.phase = (told & kPhase) != 0;
    while ((told & kOver) == 0) {
      // Other teams' rows lie between, and the load of a lap ago may not have ended (convert_rows).
      if (kTeams > 1) rows.await_empty();
      item = take_stage(rows);
      add_row<KIND == PER_EXPERT>(sums, item, rows.stage());
      give_back(rows);
      if (item.what & kLast) break;
    }
    made.await_empty();
    if (item.what & kLast) write_partial(sums, args.rings, item.columns(), made.stage());
    if (sums.begin == 0 && lane_idx() == 0) made.items[made.at] = item;
    ptx::fence_proxy_shared();
    __syncwarp();
    if (lane_idx() == 0) ptx::barrier_arrive(made.full + made.at);
    if (item.what & kNoMore) return;
    made = made.ahead(kTeams);
  }
}

// A loop's code is for as many groups as there may be, whether a row has them or not, and what is not near costs time.
template <i32 kEach>
__device__ __forceinline__ void make_partials_of(const CombineArgs& args, const Ring& rows, const Ring& made) {
  constexpr i32 kFew = kMostGroups > 8 ? 8 : kMostGroups - 1;  // groups; of 7168 columns of bf16 7
  if (args.rings.columns <= kEach * kFew * kMadeGroup) make_partials<kEach, kFew>(args, rows, made);
  else make_partials<kEach, kMostGroups>(args, rows, made);
}

__device__ __forceinline__ void make_all_partials(const CombineArgs& args, const Ring& rows, const Ring& made) {
  if (num_of_team(args.rings) == kMostOfTeam) make_partials_of<kMostOfTeam>(args, rows, made);
  else make_partials_of<kFewOfTeam>(args, rows, made);
}

// The makers, where each row by itself becomes fp8: every one takes every kMakers-th stage, so their latencies overlap.
__device__ __forceinline__ void convert_rows(const CombineArgs& args, Ring rows, Ring made) {
  const auto move_on = [&](i32 stages) {
    for (i32 i = 0; i < stages; ++i) {
      rows.move_on();
      made.move_on();
    }
  };
  move_on(warp_idx() - kFirstMaker);
#pragma unroll 1
  while (true) {
    // Loads end in any order: the stage may not have been filled a lap ago, which has the same parity as now.
    rows.await_empty();
    const Item item = take_stage(rows);
    if ((item.what & kNoMore) == 0) {
      f32* scales = reinterpret_cast<f32*>(rows.stage() + padded16(args.rings.columns * sizeof(C)));
      quant::in_place<Y>(rows.stage(), item.columns(), false, [&](i32 block, f32 scale) { scales[block] = scale; });
      ptx::fence_proxy_shared();
    }
    __syncwarp();
    if (lane_idx() == 0) ptx::barrier_arrive(made.full + made.at);
    if (item.what & kNoMore) return;
    move_on(kMakers);
  }
}

}  // namespace ep::ht
