// The makers of HT combine, between the loading warp and the storing one: rows to partials, where rows are summed, or become fp8.
#pragma once

// Where rows are summed the makers are teams, each with a sum of its own: most of a row's time is latency, which so overlaps. Sums are
// numbered in the order of their rows, and teams take turns. The loader says where a sum's rows begin once the first has a stage.
constexpr u32 kTurns = 32;
constexpr u32 kPhase = 0x40, kOver = 0x80, kFirstOver = 0xC0;  // beside the stage; instead of it: no more sums, and the first to hear of it
static_assert(kTurns >= 2 * kMostRows, "a turn is told when its row has a stage: the turn kTurns before it is over by then");
static_assert(kMostRows < kPhase, "what is told holds a stage");

__shared__ u64 turn_told[kTurns];  // mbarriers
__shared__ u8 turns[kTurns];

constexpr i32 kMostOfTeam = 4, kFewOfTeam = 2;  // warps: as few as can have all columns
constexpr i32 kMadeGroup = 32 * kMadeColumns, kMostGroups = (kMostColumns + kMostOfTeam * kMadeGroup - 1) / (kMostOfTeam * kMadeGroup);

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
      if (kTeams > 1) rows.await_empty();  // other teams' rows lie between, and the load of a lap ago may not have ended (convert_rows)
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
    rows.await_empty();  // loads end in any order: the stage may not have been filled a lap ago, which has the same parity as now
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
