// The receiving half of low-latency combine: this rank as home of tokens, whose partials it sums as they arrive.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "layout/ll128.cuh"
#include "ll/combine_unit.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

template <i32 N>
__device__ __forceinline__ void unpack(const Vector& value, f32 scale, f32 (&out)[N]) {
  if constexpr (kFp8) {
#pragma unroll
    for (i32 i = 0; i < N; i += 4) {
      f32 four[4];
      quant::widen4(word_of(value, i / 4), four);
#pragma unroll
      for (i32 j = 0; j < 4; ++j) out[i + j] = __fmul_rn(four[j], scale);
    }
  } else {
    const Vec<C, N> loaded = *reinterpret_cast<const Vec<C, N>*>(&value);
#pragma unroll
    for (i32 i = 0; i < N; ++i) out[i] = widen(loaded.at[i]);
  }
}

template <i32 N>
__device__ __forceinline__ void add_term(const Vector& value, f32 scale, f32 weight, f32 (&sum)[N]) {
  f32 term[N];
  unpack(value, scale, term);
#pragma unroll
  for (i32 i = 0; KIND == EXACT && i < N; ++i) term[i] = __fmul_rn(term[i], weight);
  add_columns(term, sum);
}

template <i32 N>
__device__ __forceinline__ void write_columns(const CombineArgs& args, i64 token, i32 column, const f32 (&value)[N]) {
  constexpr i32 kStep = N < kColumns<Y> ? N : kColumns<Y>;
#pragma unroll
  for (i32 i = 0; i < N; i += kStep) {
    Vec<Y, kStep> z;
#pragma unroll
    for (i32 j = 0; j < kStep; ++j) z.at[j] = narrow<Y>(value[i + j]);
    if (column + i < args.world.hidden)
      *reinterpret_cast<Vec<Y, kStep>*>(reinterpret_cast<Y*>(args.z) + token * args.world.hidden + column + i) = z;
  }
}

// The partials that make up a token, as a warp takes them in the order of their sum: by rank, or (exact) by k.
struct Terms {
  u64 left;  // ranks, or ks, still to come
  i32 rank, position;
  f32 weight;  // of this lane's k
};

__device__ __forceinline__ Home load_home(const CombineArgs& args, i32 token) {
  const i32 k = lane_idx(), topk = args.world.topk;
  return k < topk && token < args.num_tokens ? args.home[static_cast<i64>(token) * topk + k] : Home{-1, -1, -1, -1};
}

__device__ __forceinline__ Terms list_terms(const CombineArgs& args, const Home& home, i32 token) {
  Terms terms = {0, home.rank, home.position, 1.0f};
  const bool here = home.rank >= 0;
  if (KIND == EXACT) {
    terms.left = __ballot_sync(~0u, here);
    if (here && args.apply_weights)
      terms.weight = args.topk_weights[static_cast<i64>(token) * args.world.topk + lane_idx()];
    return terms;
  }
  terms.left = __reduce_or_sync(~0u, here && home.rank < 32 ? 1u << home.rank : 0);
  if (args.world.size > 32)
    terms.left |= static_cast<u64>(__reduce_or_sync(~0u, here && home.rank >= 32 ? 1u << (home.rank - 32) : 0)) << 32;
  return terms;
}

// Takes the next term: who sends it, the row of home_lines at which it lands, its weight.
__device__ __forceinline__ void take_term(const CombineArgs& args, Terms& terms, i32 token, i32* owner, i32* row,
                                          f32* weight) {
  const i32 next = __ffsll(terms.left) - 1;
  terms.left &= terms.left - 1;
  if (KIND == EXACT) {
    *owner = __shfl_sync(~0u, terms.rank, next);
    *row = token * args.world.topk + next;
    *weight = __shfl_sync(~0u, terms.weight, next);
    return;
  }
  const i32 k = __ffs(__ballot_sync(~0u, terms.rank == next)) - 1;
  *owner = next;
  *row = next * args.world.ll_tokens + __shfl_sync(~0u, terms.position, k);
}

// Unit `index` of z[token]; false where the wait was ended.
__device__ __forceinline__ bool reduce_unit(const CombineArgs& args, Terms terms, i32 token, i32 index, const u8* home,
                                            const volatile i32* verdict, u64* waits, u64 start, u64 seq) {
  const World& world = args.world;
  f32 first[kVector], second[kVector];
  begin_sum(terms.left != 0, first);
  begin_sum(terms.left != 0, second);
#pragma unroll 1
  while (terms.left != 0) {
    Unit units[kTogether];
    i32 number[kTogether] = {}, owner[kTogether] = {}, late = -1;
    f32 weight[kTogether];
    i32 count = 0;
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      if (terms.left == 0) continue;
      i32 row;
      take_term(args, terms, token, &owner[j], &row, &weight[j]);
      number[j] = row * world.home_units + index;
      ++count;
    }
    i32 missing = world.rank;
    auto look = [&] {
      bool there = true;
#pragma unroll
      for (i32 j = 0; j < kTogether; ++j) {
        if (peek_unit(home + static_cast<i64>(number[j]) * kUnitBytes, seq, &units[j], j < count)) continue;
        there = false;
        missing = owner[j];
      }
      return there;
    };
    const bool there = look();
    if (!__all_sync(~0u, there)) {
      if (!there) late = missing;
      if (!spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, missing,
                           [&] { return *verdict != kSame || look(); }) ||
          __any_sync(~0u, *verdict != kSame))
        return false;
      if (late >= 0 && late != world.rank) note_wait(waits, late, ptx::now_ns() - start);
    }
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      if (j >= count) continue;
      f32 scale_first = 1.0f, scale_second = 1.0f;
      if constexpr (kFp8) {
        scale_first = __uint_as_float(scale_of_block(units[j], first_block()));
        scale_second = __uint_as_float(scale_of_block(units[j], second_block()));
      }
      add_term(units[j].first, scale_first, weight[j], first);
      add_term(units[j].second, scale_second, weight[j], second);
    }
  }
  const i32 column = index * kUnitWidth + first_column();
  if (!(kFp8 && is_tag_lane())) write_columns(args, token, column, first);
  if (!is_tag_lane()) write_columns(args, token, column + kSecondColumn, second);
  return true;
}

// z_weights[token]: for each k what the rank that served it carried home.
__device__ __forceinline__ bool receive_weights(const CombineArgs& args, const Home& home, i64 token,
                                                const volatile i32* verdict, u64 seq) {
  const World& world = args.world;
  const i32 k = lane_idx(), topk = world.topk, num_lines = lines_for(topk, kLineInts);
  const i32 rank = home.rank, position = home.position;
  f32 mine = 0.0f;
  for (u32 left = __ballot_sync(~0u, rank >= 0); left != 0;) {
    const i32 lead = __ffs(left) - 1, from = __shfl_sync(~0u, rank, lead);
    const u8* at = weight_lines_at(args, world.rank, line_position(world, from, __shfl_sync(~0u, position, lead)));
    Vector loaded = {};
    if (!spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, from,
                         [&] { return *verdict != kSame || peek_lines(at, num_lines, seq, &loaded); }))
      return false;
    const Vector got = shuffle(loaded, k / kLineInts * 8 + k % kLineInts / 4);
    if (rank == from) mine = __uint_as_float(word_of(got, k % 4));
    left &= ~__ballot_sync(~0u, rank == from);
  }
  if (k < topk) args.z_weights[token * topk + k] = mine;
  return true;
}

// Whether all owners combine this routing. One warp, beside those that take the rows: these are told through `verdict`.
__device__ __forceinline__ void await_origins(const CombineArgs& args, volatile i32* verdict, u64 origin, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 owner = base + lane_idx();
    const bool asked = owner < world.size && is_active(owner);
    Vector head = {origin, seq};
    const u8* at = head_at(args, world.rank, asked ? owner : world.rank);
    const bool ok = spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, owner, [&] {
      if (asked) head = ptx::load_pair<Vector>(at);
      return head.high == seq;
    });
    const bool same = __all_sync(~0u, head.low == origin);
    if (lane_idx() == 0 && !(ok && same)) *verdict = ok ? kDiffers : kFailed;
    if (!ok) return;
  }
}

// Unit `index` of z[token] as NaN, in every output dtype.
__device__ __forceinline__ void poison_unit(const CombineArgs& args, i64 token, i32 index) {
  const f32 nan = __uint_as_float(~0u);
  f32 values[kVector];
#pragma unroll
  for (i32 i = 0; i < kVector; ++i) values[i] = nan;
  const i32 column = index * kUnitWidth + first_column();
  if (!(kFp8 && is_tag_lane())) write_columns(args, token, column, values);
  if (!is_tag_lane()) write_columns(args, token, column + kSecondColumn, values);
  if (args.z_weights != nullptr && index == 0 && lane_idx() < args.world.topk)
    args.z_weights[token * args.world.topk + lane_idx()] = nan;
}

// z of this team's units, or NaN.
template <class Make>
__device__ __forceinline__ void for_units(const CombineArgs& args, Team team, Make make) {
  const Divisor units = divisor_of(args.world.home_units);
  i32 item = first_item(team), position = divide(item, units);
  Home next = load_home(args, position);
#pragma unroll 1
  while (position < args.num_tokens) {
    const i32 token = position, index = item - position * units.value;
    const Home home = next;
    item += num_items_at_once(team);
    position = divide(item, units);
    next = load_home(args, position);
    make(home, token, index);
  }
}

__device__ __forceinline__ void poison_units(const CombineArgs& args, Team team) {
  for_units(args, team, [&](const Home&, i32 token, i32 index) { poison_unit(args, token, index); });
}

__device__ __forceinline__ void combine_receive(const CombineArgs& args, Team team, u8* shared, i32* verdict,
                                                u64 number, u64 origin, u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  u64* waits = waits_at(shared);
  const u8* lines = ptx::known(home_lines_at(args, world.rank));
  if (warp_idx() == num_warps() - 1) await_origins(args, verdict, origin, seq);
  for_units(args, team, [&](const Home& home, i32 token, i32 index) {
    bool ok = reduce_unit(args, list_terms(args, home, token), token, index, lines, verdict, waits, start, seq);
    if (ok && args.z_weights != nullptr && index == 0) ok = receive_weights(args, home, token, verdict, seq);
    if (!ok && lane_idx() == 0) atomicCAS(verdict, kSame, kFailed);
  });
  __syncthreads();
  if (*verdict != kSame) poison_units(args, team);
  if (*verdict == kDiffers && team.block == 0 && threadIdx.x == 0)
    report_difference(world, OP_COMBINE, origin,
                      [&](i32 peer) { return ptx::load_pair<Vector>(head_at(args, world.rank, peer)).low; });
  note_end(world, team, number, waits);
}

}  // namespace ep::ll
