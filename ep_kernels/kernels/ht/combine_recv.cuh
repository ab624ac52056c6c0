// The receiving half of HT combine: this rank as home of tokens. One warp waits for what makes up a token and loads it,
// the summing warps add. Where rows travel as they are there are no makers, and a warp of its own does the loading.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "ht/combine_block.cuh"
#include "ht/combine_reduce.cuh"
#include "ht/pipeline.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

// ---- partials to z ----

constexpr i32 kHomeColumns = kColumns<Y>;

// Columns of a partial as they lie in a stage.
template <class Moved>
struct Landed {
  Words<Moved, kHomeColumns> values;
  f32 scale;
};

template <class Moved>
__device__ __forceinline__ void widen_landed(const Landed<Moved>& landed, f32 (&value)[kHomeColumns]) {
  if constexpr (sizeof(Moved) == 1) {
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; i += quant::kLaneColumns) {
      f32 four[quant::kLaneColumns];
      quant::widen4(landed.values.at[i / quant::kLaneColumns], four);
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) value[i + j] = __fmul_rn(four[j], landed.scale);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < kHomeColumns; ++i) value[i] = value_in<Moved>(landed.values.at, i);
  }
}

template <bool kWeighted, i32 kRows, class Totals>
__device__ __forceinline__ void add_partials(Totals& sums, const Rings& rings, const Item (&items)[kRows],
                                             u8* const (&stages)[kRows]) {
  sums.template add<Landed<C>, kWeighted>(
      items,
      [&](i32 row, i32 column) {
        Landed<C> landed;
        landed.values = *reinterpret_cast<const decltype(landed.values)*>(stages[row] + column * sizeof(C));
        if constexpr (kFp8) {
          const f32* scales = reinterpret_cast<const f32*>(stages[row] + padded16(rings.columns * sizeof(C)));
          landed.scale = scales[column / quant::kBlock];
        }
        return landed;
      },
      [](const Landed<C>& landed, f32(&value)[kHomeColumns]) { widen_landed(landed, value); });
}

// ---- tokens ----

enum Verdict : i32 { kSame, kFailed, kDiffers };  // one routing; a wait failed; ranks bring different routings
extern "C" {  // see common/block.cuh
__shared__ i32 verdict;                           // of this block
}

// One warp: every lane waits until the word of its peer is there, if it waits at all. False where the rank was stopped.
__device__ __forceinline__ bool await_words(const World& world, bool waits, i32 peer, const u64* word, u64 seq,
                                            u64 start, u64* waited) {
  bool there = !waits, late = false;
  return spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, peer, [&] {
    if (there) return true;
    there = ptx::load_acquire_sys(word) >= seq;
    if (there && late && peer != world.rank) note_wait(waited, peer, ptx::now_ns() - start);
    late = !there;
    return there;
  });
}

// One warp: waits for all owners to say which routing they combine. False where one says another, or none.
__device__ __forceinline__ bool agree(const CombineArgs& args, u64 seq, u64 origin, u64 start, u64* waited) {
  const World& world = args.world;
  bool differs = false;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 peer = min(base + lane_idx(), world.size - 1);
    const bool asked = is_active(peer);
    if (!await_words(world, asked, peer, flag_at(world, world.rank, FLAG_COMBINE, peer), seq, start, waited)) {
      if (lane_idx() == 0) verdict = kFailed;
      return false;
    }
    differs |= asked && ptx::load_volatile(origin_at(world, world.rank, origins_at(args), peer)) != origin;
  }
  differs = __any_sync(~0u, differs);
  if (differs && lane_idx() == 0) verdict = kDiffers;
  return !differs;
}

// Units of tokens: batches of as many as a warp looks at, and after them, kLone for each block, single ones: what is
// left to be done when the last rows have come is then little, and shared by all blocks.
constexpr i32 kLone = 3;

struct Tokens {
  i32 first, count;
};

struct TokenUnits {
  i32 each, batches, total;  // tokens of a batch; batches; units

  // None of them: no tokens.
  __device__ __forceinline__ Tokens at(i32 unit) const {
    return {unit + min(unit, batches) * (each - 1), unit < 0 ? 0 : unit < batches ? each : 1};
  }
};

__device__ __forceinline__ TokenUnits units_of(i32 num_tokens, i32 each, i32 blocks) {
  const i32 batches = max(num_tokens - kLone * blocks, 0) / each;
  return {each, batches, num_tokens - batches * (each - 1)};
}

// Of the lane's (token, k), if it has one. Only fields that are used: what is loaded beside them would have to arrive
// before its register served for something else.
__device__ __forceinline__ Home load_home(const CombineArgs& args, const Lanes& lanes, Tokens tokens) {
  Home home = {-1, -1, -1, -1};
  if (lanes.index >= tokens.count || lanes.k >= args.world.topk) return home;
  const Home* at = args.home + static_cast<i64>(tokens.first + lanes.index) * args.world.topk + lanes.k;
  home.rank = at->rank;
  home.position = at->position;
  if (kCopies) home.place = *const_cast<const volatile i32*>(&at->place);
  return home;
}

// The row that a lane knows of those that make up its token.
struct Term {
  bool present, zeros;  // zeros: nothing is there to load but zeros
  i32 index, count;     // its place in the sum, and of how many
  f32 weight;
  const u8* from;
};

// A token that no row serves has one of zeros.
__device__ __forceinline__ Term term_of(const CombineArgs& args, const Lanes& lanes, const Home& home, Tokens tokens) {
  const World& world = args.world;
  const bool served = home.rank >= 0;
  Term term = {served, true, 0, 0, 1.0f, world.zeros};
  if (KIND == EXACT) {
    const u32 here = __ballot_sync(~0u, served) & lanes.of(lanes.index);
    term.index = __popc(here & ((1u << lane_idx()) - 1));
    term.count = __popc(here);
  } else {
    const u64 mine = served ? 1ull << home.rank : 0, ranks = lanes.up_to(mine);
    const u64 all = __shfl_sync(~0u, ranks, lane_idx() | (lanes.width - 1)), before = __shfl_up_sync(~0u, ranks, 1);
    term.present = served && (lanes.k == 0 || (before & mine) == 0);
    term.index = __popcll(all & (mine - 1));
    term.count = __popcll(all);
  }
  if (term.count == 0) {
    term.present = lanes.k == 0 && lanes.index < tokens.count;
    term.count = 1;
  }
  if (!served || !term.present) return term;
  const i64 token = static_cast<i64>(tokens.first) + lanes.index;
  if (KIND == EXACT && args.apply_weights) term.weight = args.topk_weights[token * world.topk + lanes.k];
  if (reads_own(args) && home.rank == world.rank) {
    term.zeros = home.place < 0;
    if (!term.zeros) term.from = args.y + static_cast<i64>(home.place) * world.hidden * sizeof(Y);
  } else {
    const i64 row = KIND == EXACT ? token * world.topk + lanes.k : position_of(world, home.rank, home.position);
    term.zeros = false;
    term.from = home_at(args, world.rank, row);
  }
  return term;
}

// What a lane is to load, if anything: its row's number among those of the unit, and its place in the sum.
constexpr u32 kZeros = 4, kNumberShift = 8;

struct alignas(16) Ask {
  const u8* from;
  f32 weight;
  u32 what;  // kFirst, kLast, kZeros, and above them the number + 1, 0 = nothing
};
static_assert(sizeof(Ask) == 16, "the plan reserves so much per lane: ASKED_BYTES of transports/nvlink/rings.py");

__device__ __forceinline__ Ask ask_of(const Lanes& lanes, const Term& term) {
  const u32 present = __ballot_sync(~0u, term.present), before = (1u << (lanes.index * lanes.width)) - 1;
  const u32 number = term.present ? __popc(present & before) + term.index + 1 : 0;
  const u32 place_in_sum = (term.index == 0 ? kFirst : 0) | (term.index == term.count - 1 ? kLast : 0);
  return {term.from, term.weight, place_in_sum | (term.zeros ? kZeros : 0) | number << kNumberShift};
}

// The rows of a unit's tokens to stages, piece by piece, each token's in the order of its sum. Words of progress have
// been acquired.
__device__ __forceinline__ void load_tokens(const CombineArgs& args, const Lanes& lanes, Ring& ring, const Ask& ask,
                                            i32 first) {
  const Rings& rings = args.rings;
  const i32 number = static_cast<i32>(ask.what >> kNumberShift) - 1, count = __popc(__ballot_sync(~0u, number >= 0));
  u8* z = args.z + (static_cast<i64>(first) + lanes.index) * args.world.hidden * sizeof(Y);
  ptx::fence_proxy_global();
#pragma unroll 1
  for (i32 piece = 0; piece < rings.num_pieces; ++piece) {
    const i32 columns = piece_columns(args.world, rings, piece);
    const Item item = {ask.weight, (ask.what & (kFirst | kLast)) | static_cast<u32>(columns) << kColumnsShift,
                       z + static_cast<i64>(piece) * rings.columns * sizeof(Y)};
    const u8* from = ask.what & kZeros ? ask.from : ask.from + static_cast<i64>(piece) * rings.home_bytes;
    load_stages(ring, number, count, item, from, home_bytes_of(rings, columns), half_of(ring));
  }
}

// From the warp that awaits words to the one that loads: a unit at a time. Every lane of either arrives for itself,
// which racecheck understands.
struct Desk {
  Ask* asks;  // [32] a lane's
  u32 turn;   // units so far
};

extern "C" {  // see common/block.cuh
__shared__ u64 desk_full, desk_empty;  // mbarriers
__shared__ i32 desk_first;             // the unit's first token, -1 = no more
}

// The warp that awaits.
__device__ __forceinline__ void put_down(Desk& desk, const Ask& ask, i32 first) {
  ptx::bulk_load_wait(&desk_empty, (desk.turn & 1) ^ 1);
  desk.asks[lane_idx()] = ask;
  if (lane_idx() == 0) desk_first = first;
  ptx::barrier_arrive(&desk_full);
  ++desk.turn;
}

// The warp that loads, from the first unit to the last.
__device__ __forceinline__ void load_what_is_asked(const CombineArgs& args, Desk desk, Ring ring) {
  const Lanes lanes = lanes_for(args.world.topk);
#pragma unroll 1
  for (;; ++desk.turn) {
    ptx::bulk_load_wait(&desk_full, desk.turn & 1);
    const Ask ask = desk.asks[lane_idx()];
    const i32 first = desk_first;
    ptx::barrier_arrive(&desk_empty);
    if (first < 0) break;
    load_tokens(args, lanes, ring, ask, first);
  }
  close_ring(ring);
}

// The numbers that came home beside a unit's rows.
__device__ __forceinline__ void receive_weights(const CombineArgs& args, const Lanes& lanes, const Home& home,
                                                Tokens tokens) {
  const World& world = args.world;
  if (lanes.index >= tokens.count || lanes.k >= world.topk) return;
  f32 weight = 0.0f;
  if (home.rank == world.rank && reads_own(args)) {
    const i64 index = KIND == PER_RANK ? static_cast<i64>(home.place) * world.topk + lanes.k : home.place;
    if (home.place >= 0) weight = args.row_weights[index];
  } else if (home.rank >= 0) {
    weight = home_weights_at(args, world.rank, position_of(world, home.rank, home.position))[lanes.k];
  }
  args.z_weights[static_cast<i64>(tokens.first + lanes.index) * world.topk + lanes.k] = weight;
}

// One warp, a few tokens: waits for their rows; loads may follow. False where the rank was stopped.
__device__ __forceinline__ bool await_rows(const CombineArgs& args, const Home& home, u64 seq, u64 start, u64* waited) {
  const World& world = args.world;
  const bool comes = home.rank >= 0 && !(reads_own(args) && home.rank == world.rank);
  const i32 from = max(home.rank, 0);
  const u64* word = progress_at(world, world.rank, from, max(home.position, 0));
  return await_words(world, comes, from, word, seq, start, waited);
}

// One warp: the tokens that this block takes, loaded here or asked for at the desk.
__device__ __forceinline__ void load_all_home(const CombineArgs& args, Team team, Ring ring, Desk desk, u64 seq,
                                              u64 origin, u64 start, u64* waited) {
  const Lanes lanes = lanes_for(args.world.topk);
  const TokenUnits units = units_of(args.num_tokens, lanes.count, team.num_blocks);
  Claims claims = claims_of(team, &args.world.state->tokens_taken, units.total, units.total);
  Tokens tokens = units.at(claims.next());
  Home home = load_home(args, lanes, tokens);
  bool ok = agree(args, seq, origin, start, waited);
#pragma unroll 1
  while (ok && tokens.count != 0) {
    const Tokens now = tokens;
    const Home here = home;
    tokens = units.at(claims.next());
    home = load_home(args, lanes, tokens);  // on its way, as the next claim is, while words of progress are looked at
    const Term term = term_of(args, lanes, here, now);
    ok = await_rows(args, here, seq, start, waited);
    if (!ok) {
      if (lane_idx() == 0) verdict = kFailed;
      break;
    }
    if (args.z_weights != nullptr) receive_weights(args, lanes, here, now);
    const Ask ask = ask_of(lanes, term);
    if constexpr (kCopies) put_down(desk, ask, now.first);
    else load_tokens(args, lanes, ring, ask, now.first);
  }
  while (tokens.count != 0) tokens = units.at(claims.next());
  if constexpr (kCopies) put_down(desk, {nullptr, 0.0f, 0}, -1);
  else close_ring(ring);
}

// So many warps sum. Where rows travel as they are, no more than hold all columns: each has its part in handing over
// every stage.
constexpr i32 kSummed = 32 * kHomeColumns * kSummers;  // columns at a time
using HomeSums = Sums<kHomeColumns, (kMostColumns + kSummed - 1) / kSummed>;

__device__ __forceinline__ i32 num_summers(const Rings& rings) {
  constexpr i32 kEach = 32 * kHomeColumns * HomeSums::kGroups;
  return kCopies ? (rings.columns + kEach - 1) / kEach : kSummers;
}

// The summing warps: stages to z. Where rows travel as they are, two of a token at a time, for a step is mostly
// latency.
__device__ __forceinline__ void sum_home(const CombineArgs& args, Ring ring) {
  HomeSums sums = sums_of<HomeSums>(warp_idx() - kFirstSummer, num_summers(args.rings), args.rings.columns);
#pragma unroll 1
  while (true) {
    Item item = take_stage(ring);
    if (item.what & kNoMore) return;
    if (kCopies && (item.what & kLast) == 0) {
      const Ring next = ring.ahead(1);
      const Item second = take_stage(next);
      add_partials<KIND == EXACT, 2>(sums, args.rings, {item, second}, {ring.stage(), next.stage()});
      give_back(ring);
      item = second;
    } else {
      add_partials<KIND == EXACT, 1>(sums, args.rings, {item}, {ring.stage()});
    }
    give_back(ring);
    if (item.what & kLast) write_rounded<Y>(sums, item.columns(), item.to);
  }
}

// NaN in every token, in every output dtype: this block's share, or all of them.
__device__ __forceinline__ void poison(const CombineArgs& args, Team team) {
  const i64 halves = static_cast<i64>(args.num_tokens) * args.world.hidden * (sizeof(Y) / 2);
  const i64 weights = args.z_weights == nullptr ? 0 : static_cast<i64>(args.num_tokens) * args.world.topk;
  const i64 first = static_cast<i64>(team.block) * THREADS + threadIdx.x,
            step = static_cast<i64>(team.num_blocks) * THREADS;
  for (i64 i = first; i < halves; i += step) reinterpret_cast<u16*>(args.z)[i] = 0xFFFF;
  for (i64 i = first; i < weights; i += step) args.z_weights[i] = __uint_as_float(~0u);
}

}  // namespace ep::ht
