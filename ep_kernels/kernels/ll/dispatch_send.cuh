// The sending half of low-latency dispatch: what travels beside a token's row, and the rows, unit by unit.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "layout/ll128.cuh"
#include "routing/experts.cuh"
#include "routing/ll_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// ---- records ----

// What a lane knows of (token, k = lane).
struct Entry {
  i32 id;
  f32 weight;
  Home home;  // of a routing used again
};

__device__ __forceinline__ Entry load_entry(const DispatchArgs& args, i32 token) {
  Entry entry = {kNowhere, 0.0f, {kNowhere, -1, -1, -1}};
  if (lane_idx() >= args.world.topk || token >= args.num_tokens) return entry;
  const i32 at = token * args.world.topk + lane_idx();
  entry.weight = args.topk_weights[at];
  if (args.cached) entry.home = args.home[at];
  else entry.id = args.topk_ids[at];
  return entry;
}

// What this rank keeps of a token: where its rows go.
__device__ __forceinline__ void keep_home(const DispatchArgs& args, const Stops& stops, i32 key, i32 place, i32 token) {
  const i32 topk = args.world.topk, k = lane_idx(), at = token * topk + k;
  const i32 mine = of_hop(args.world, stops.low, stops.high, hop_of_rank(args.world, max(key, 0) >> 16));
  if (k < topk && !args.cached)
    args.home[at] = key < 0 ? Home{key, -1, -1, -1} : Home{key >> 16, mine, key & 0xFFFF, place};
  const bool valid = __all_sync(~0u, key != kGone);
  if (k == 0) args.valid[token] = valid;
}

// The token's records to one of its ranks.
__device__ __forceinline__ void send_records(const DispatchArgs& args, const LlScratch& scratch, const Entry& entry,
                                             i32 key, i32 place, i32 token, i32 hop, i32 position, u64 seq) {
  const World& world = args.world;
  const bool here = key >= 0 && key >> 16 == rank_of_hop(world, hop);
  const Vector record =
      vector_of(here ? key & 0xFFFF : ~0u, here ? place : ~0u, here ? __float_as_uint(entry.weight) : 0, token);
  u8* to = scratch.records_to[hop] + static_cast<i64>(position) * (world.meta_lines * kLineBytes);
#pragma unroll 1
  for (i32 line = 0; line < world.meta_lines; line += 4) {
    const i32 from = (line + (lane_idx() >> 3)) * kLineMetas + (lane_idx() & 7);
    Vector value = shuffle(record, from & 31);
    if (from >= world.topk) value = vector_of(~0u, ~0u, 0, token);
    store_lines(to + line * kLineBytes, min(4, world.meta_lines - line), value, seq);
  }
}

// This team's share of all records, one (token, rank) after the other; `entry` is of its first token.
__device__ __forceinline__ void send_all_records(const DispatchArgs& args, Team team, const LlScratch& scratch,
                                                 Entry entry, Divisor ranks, u64 seq) {
  const World& world = args.world;
  Walk walk = start_walk(world, scratch);
  const i32 step = num_items_at_once(team);
  i32 item = first_item(team), token = divide(item, ranks);
#pragma unroll 1
  while (token < args.num_tokens) {
    const Entry now = entry;
    const i32 current = token, hop = item - token * ranks.value;
    item += step;
    token = divide(item, ranks);
    if (token != current) entry = load_entry(args, token);
    walk_to(world, scratch, current >> 5, walk);
    const Stops stops = stops_of(world, walk, current);
    const bool goes = (hop < 32 ? stops.hops_low : stops.hops_high) >> (hop & 31) & 1;
    if (!goes && hop != 0) continue;
    const i32 key = args.cached ? key_of(world, now.home) : key_of(world, scratch.table, now.id, current);
    i32 place = now.home.place;
    if (kPerExpert && !args.cached)
      place = scratch.seen == nullptr || *scratch.twice ? rows_counted(args, scratch.table, current, key)
                                                        : rows_noted(world, scratch, current, key);
    if (goes)
      send_records(args, scratch, now, key, place, current, hop, of_hop(world, stops.low, stops.high, hop), seq);
    if (hop == 0) keep_home(args, stops, key, place, current);
  }
}

// ---- rows ----

// 16 bytes of what travels for a token: the row, then the caller's scales.
__device__ __forceinline__ Vector load_raw(const DispatchArgs& args, i32 token, i32 offset) {
  const World& world = args.world;
  const i64 row = static_cast<i64>(token) * world.row_bytes;
  if (offset < world.row_bytes) return *reinterpret_cast<const Vector*>(args.x + row + offset);
  const i32 at = offset - world.row_bytes;
  const u8* scales = args.x_scales + static_cast<i64>(token) * world.scale_bytes;
  return at < world.scale_bytes ? load_bytes(scales + at, world.scale_bytes - at)
                                : Vector{0, 0};
}

// This lane's part of a unit as it lies in x, perhaps on its way. Not words where bytes travel: the compiler would take
// loads apart, and so wait for them, as soon as they are under way.
template <class T>
struct LoadedOf {
  quant::Columns<T> first, second;
};
template <>
struct LoadedOf<u8> : Unit {};
using Loaded = LoadedOf<X>;
constexpr bool kMakesFirst = sizeof(X) == 4;  // before the next is asked for: registers do not hold two

// Asks for unit `index` of a token's row.
template <class T>
__device__ __forceinline__ LoadedOf<T> load_unit(const DispatchArgs& args, i32 token, i32 index) {
  const World& world = args.world;
  const i32 at = first_offset();
  LoadedOf<T> loaded = {};
  if constexpr (sizeof(T) > 1) {
    const T* row = reinterpret_cast<const T*>(args.x) + static_cast<i64>(token) * world.hidden;
    if (!is_tag_lane()) {
      loaded.first = quant::columns_of<T>(load_words<T, 16>(row, index * kUnitColumns + at, world.hidden).at);
      loaded.second =
          quant::columns_of<T>(load_words<T, 16>(row, index * kUnitColumns + at + kSecond, world.hidden).at);
    }
  } else {
    const i32 offset = index * kUnitData + at;
    loaded.first = load_raw(args, token, offset);
    if (!is_tag_lane()) loaded.second = load_raw(args, token, offset + kSecond);
  }
  return loaded;
}

// The unit as it travels.
template <class T>
__device__ __forceinline__ Unit make_unit(const DispatchArgs& args, const LoadedOf<T>& loaded) {
  if constexpr (sizeof(T) > 1) return quantize_unit(loaded.first, loaded.second, args.power_of_two != quant::kFp32);
  else return loaded;
}

// Of a block that sends, so many warps carry rows. Half, where the links are what limits: more fill them no better, and
// hold what others could have sent when the queue runs dry. Of two ranks' rows half stay at home, and warps limit; but
// rows that become fp8 are few bytes.
__device__ __forceinline__ i32 num_carriers(const World& world) {
  return kQuantised || world.size > 2 ? num_warps() / 2 : num_warps();
}

// The rows, unit by unit; this warp's first has been asked for.
__device__ __forceinline__ void send_rows(const DispatchArgs& args, const LlScratch& scratch, Queue& queue,
                                          Loaded asked, u64 seq) {
  const World& world = args.world;
  Walk walk = start_walk(world, scratch);
  const i32 lane = min(lane_idx(), world.size - 1), other = min(lane_idx() + 32, world.size - 1);
#pragma unroll 1
  while (queue.turn.position < args.num_tokens) {
    const Turn now = queue.turn;
    const Loaded loaded = asked;
    Unit row;
    if (kMakesFirst) row = make_unit(args, loaded);
    refill(queue);
    if (queue.turn.position < args.num_tokens) asked = load_unit<X>(args, queue.turn.position, queue.turn.index);
    walk_to(world, scratch, now.position >> 5, walk);
    const Stops stops = stops_of(world, walk, now.position);
    if (!kMakesFirst) row = make_unit(args, loaded);
    auto send_to = [&](u32 hops, const u8* lines, i32 position) {  // lane i: of its hop
      const i64 number = position * world.row_units + now.index;  // fewer than 2^31, as a unit is of 1024 bytes
      const u64 to = reinterpret_cast<u64>(lines) + number * kUnitBytes;
#pragma unroll 1
      for (u32 left = hops; left != 0; left &= left - 1)
        store_unit(reinterpret_cast<u8*>(__shfl_sync(~0u, to, __ffs(left) - 1)), row, seq);
    };
    send_to(stops.hops_low, scratch.lines_to[lane], stops.low);
    if (world.size > 32) send_to(stops.hops_high, scratch.lines_to[other], stops.high);
  }
}

}  // namespace ep::ll
