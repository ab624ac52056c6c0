// Send phase of HT dispatch, once a block knows its routes (args.routes): the metadata warp sends the metadata of all
// the block's tokens first; the send warps move rows by the copy engine, segment by segment: loaded once, stored once
// per destination. No barrier separates them: warps take segments from work counters, first from their block's own,
// then from the rank's.
//
// A work item is a segment of a row. The first one of each warp is loaded, and becomes fp8, before its destination is
// known.
//
// Per-expert layouts: a flag notifies each destination of a row whose stores are complete; the destination copies the
// row to its other final rows while later rows travel. On its own rank a row is stored to all of them at once.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ht_scan.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

// ---- stages ----
//
// Rows move global -> shared -> global by the copy engine, through a few stages per warp, each of a segment of a row.
// Each lane starts its own stores (one destination per lane), so a row that goes to eight ranks is loaded once and
// stored by eight lanes. A stage has kStageExtra bytes behind the segment for the scales of its columns.

constexpr u32 kStages = STAGES;
constexpr u32 kStageExtra = 512;

struct WarpStages {
  u8* stages;      // [kStages][segment + extra] of this warp
  u64* barriers;   // [kStages]
  u32 segment_bytes;
  u32 parities;    // bit s: phase that the next wait for stage s needs

  __device__ __forceinline__ u8* stage(u32 s) const { return stages + s * (segment_bytes + kStageExtra); }
};

// All threads of the block call it once, before any load.
__device__ __forceinline__ WarpStages init_stages(const Work& work, u8* shared) {
  WarpStages stages;
  stages.barriers = reinterpret_cast<u64*>(shared) + warp_idx() * kStages;
  stages.segment_bytes = work.segment_bytes;
  stages.stages = shared + work.stage_offset + warp_idx() * kStages * (work.segment_bytes + kStageExtra);
  stages.parities = 0;
  if (lane_idx() == 0) {
    for (u32 s = 0; s < kStages; ++s) ptx::barrier_init(stages.barriers + s);
    ptx::fence_barrier_init();
    ptx::fence_proxy_shared();
  }
  __syncwarp();
  return stages;
}

// A warp copies bytes by ordinary accesses: words where addresses and size allow it.
__device__ __forceinline__ void copy_bytes(u8* dst, const u8* src, i32 num_bytes) {
  if (((reinterpret_cast<u64>(dst) | reinterpret_cast<u64>(src) | static_cast<u64>(num_bytes)) & 3) == 0) {
    for (i32 i = lane_idx() * 4; i < num_bytes; i += 128)
      *reinterpret_cast<u32*>(dst + i) = *reinterpret_cast<const u32*>(src + i);
  } else {
    for (i32 i = lane_idx(); i < num_bytes; i += 32) dst[i] = src[i];
  }
}

// Senders write scales beside the final rows, where the caller reads them; otherwise scales lie by (source,
// position) until they are moved. Equal on all ranks.
__device__ __forceinline__ bool scales_at_final_row(const DispatchArgs& args) {
  return !kPerExpert && args.out_scales == scales_at(args, args.world.rank, 0, 0);
}

// The scales, at rank `at`, of a row of this source.
__device__ __forceinline__ u8* dst_scales(const DispatchArgs& args, i32 at, i32 position, i32 dst_row) {
  const i64 index = scales_at_final_row(args) ? dst_row : position_of(args.world, args.world.rank, position);
  return scales_at(args, at, 0, 0) + index * args.world.scale_bytes;
}

// ---- work items ----

// Bytes of a column as loaded, where this dispatch quantises; else 1.
constexpr i32 kLoadedWidth = static_cast<i32>(sizeof(X));
constexpr bool kQuantises = kLoadedWidth > 1;
constexpr i32 kStopped = -2;  // in place of an item

// Bytes of a row, and its segments, as loaded.
__device__ __forceinline__ i32 loaded_bytes(const DispatchArgs& args) { return args.world.row_bytes * kLoadedWidth; }
__device__ __forceinline__ i32 segments_per_row(const DispatchArgs& args) {
  return (loaded_bytes(args) + static_cast<i32>(args.work.segment_bytes) - 1) /
         static_cast<i32>(args.work.segment_bytes);
}

// State of a send warp. A work item is token * segments per row + segment.
struct Sender {
  WarpStages stages;
  u32 num_staged;          // stages used so far
  i32 item;                // loaded or in flight; negative: none is left
  TokenRange mine;         // tokens of this block
  Divisor segments;        // of a row
  Divisor topk;
  TokenSplit split;        // of all tokens
  Divisor blocks;          // of the rank
  bool ready;              // the item is in its stage, in the payload dtype
  bool uses_rank_counter;  // the block's own items are used up
};

__device__ __forceinline__ i32 segment_size(const DispatchArgs& args, i32 segment) {
  const i32 size = args.work.segment_bytes;
  return min(size, loaded_bytes(args) - segment * size);
}

// The caller's own scales travel with the first segment of their row; behind it in its stage, where sizes allow it.
__device__ __forceinline__ bool stages_scales(const DispatchArgs& args) {
  if (kQuantises || args.x_scales == nullptr || args.world.scale_bytes > static_cast<i32>(kStageExtra)) return false;
  return ((reinterpret_cast<u64>(args.x_scales) | static_cast<u64>(args.world.scale_bytes)) & 15) == 0;
}

__device__ __forceinline__ const u8* scales_of_token(const DispatchArgs& args, i32 token) {
  return args.x_scales + static_cast<i64>(token) * args.world.scale_bytes;
}

struct Segment {
  i32 token, index;  // index in the row
};

__device__ __forceinline__ Segment segment_of(const Sender& sender, i32 item) {
  const i32 token = divide(item, sender.segments);
  return {token, item - token * sender.segments.value};
}

__device__ __forceinline__ void load_segment(const DispatchArgs& args, const Sender& sender, i32 item, u32 stage) {
  if (lane_idx() != 0 || item < 0) return;
  const auto [token, index] = segment_of(sender, item);
  const u8* row = args.x + static_cast<i64>(token) * loaded_bytes(args);
  u8* dst = sender.stages.stage(stage);
  u64* barrier = sender.stages.barriers + stage;
  const i32 num_bytes = segment_size(args, index),
            scale_bytes = index == 0 && stages_scales(args) ? args.world.scale_bytes : 0;
  ptx::bulk_expect(barrier, num_bytes + scale_bytes);
  ptx::bulk_load_part(dst, row + static_cast<i64>(index) * args.work.segment_bytes, num_bytes, barrier);
  if (scale_bytes != 0)
    ptx::bulk_load_part(dst + args.work.segment_bytes, scales_of_token(args, token), scale_bytes, barrier);
}

// NVLink does not serve all SMs alike, so a block reserves only the first quarter of its tokens for itself.
__device__ __forceinline__ i32 own_tokens(i32 num_tokens) { return (num_tokens + 3) / 4; }

// One warp: waits until the routes of all blocks of the rank are final.
__device__ __forceinline__ bool await_final_routes(const World& world, Team team) {
  bool ok = true;
  if (lane_idx() == 0)
    ok = spin::wait_for(world, &world.state->blocks_routed, team.num_blocks, OP_DISPATCH, PHASE_BLOCKS, world.rank);
  return __all_sync(~0u, ok);
}

// Items that a warp takes at once: whole rows, where rows have arrival flags.
__device__ __forceinline__ i32 items_at_once(const Sender& sender) { return kPerExpert ? sender.segments.value : 1; }

// Item `number` of the first quarter of this block's tokens, -1 = there is none.
__device__ __forceinline__ i32 own_item(const Sender& sender, i32 number) {
  const i32 item = number * items_at_once(sender), segments = sender.segments.value;
  return item < own_tokens(sender.mine.end - sender.mine.first) * segments ? sender.mine.first * segments + item : -1;
}

// The next item of this warp: the rest of its row, where rows have arrival flags; else from the block's own work
// counter, then from the rank's, which serves the blocks' tokens in rotation. -1 = none is left, kStopped = the rank
// was stopped. Without quantisation links are the bottleneck, and division by a reciprocal gained nothing
// (docs/kernels/ht.md).
__device__ __forceinline__ i32 next_item(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                         Sender& sender, i32 item) {
  const i32 segments = sender.segments.value, at_once = items_at_once(sender);
  if (kPerExpert && item >= 0 && segment_of(sender, item).index != segments - 1) return item + 1;
  if (!sender.uses_rank_counter) {
    u32 taken = 0;
    if (lane_idx() == 0) taken = atomicAdd(scratch.next_segment, 1u);
    const i32 own = own_item(sender, static_cast<i32>(__shfl_sync(~0u, taken, 0)));
    if (own >= 0) return own;
    sender.uses_rank_counter = true;
    if (!args.cached && !await_final_routes(args.world, team)) return kStopped;
  }
  const TokenSplit split = kQuantises ? sender.split : split_tokens(args.num_tokens, team.num_blocks);
  const i32 end = (split.max_tokens() - own_tokens(split.max_tokens())) * segments;
  for (;;) {
    u64 taken = 0;
    if (lane_idx() == 0) taken = atomicAdd(&args.world.state->segments_taken, 1ull);
    const i32 number = static_cast<i32>(__shfl_sync(~0u, taken, 0));
    const i32 round = kQuantises ? divide(number, sender.blocks) : number / team.num_blocks, index = round * at_once;
    if (index >= end) return -1;
    const TokenRange tokens = split.of(number - round * team.num_blocks);
    const i32 next = (tokens.first + own_tokens(tokens.end - tokens.first)) * segments + index;
    if (next < tokens.end * segments) return next;
  }
}

// The first items of the block go to its warps by index, `number` to this one; loaded before the destination is known.
__device__ __forceinline__ void load_first_segment(const DispatchArgs& args, Sender& sender, i32 number) {
  sender.item = own_item(sender, number);
  load_segment(args, sender, sender.item, sender.num_staged % kStages);
}

// The route of this lane's k of the item's token; lanes past K, and no item, have none. Lanes store in lane order, so
// rank-wise layouts, where any k of a rank will do, start at another k with each token: otherwise a routing that is the
// same for all tokens would send the rows of all ranks to the same rank first.
__device__ __forceinline__ Route route_of(const DispatchArgs& args, const Sender& sender, i32 item) {
  const i32 topk = sender.topk.value;
  if (lane_idx() >= topk || item < 0) return {kNoExpert, -1, -1, -1};
  const i32 token = divide(item, sender.segments), shift = token + args.world.rank;
  const i32 k = lane_idx() + (kPerExpert ? 0 : shift - divide(shift, sender.topk) * topk);
  return args.routes[static_cast<i64>(token) * topk + (k < topk ? k : k - topk)];
}

// Lanes whose k is the first of the token at its rank.
__device__ __forceinline__ bool is_first_of_rank(const Route& route) {
  const u32 same = __match_any_sync(~0u, route.rank);
  return route.rank >= 0 && lane_idx() == __ffs(same) - 1;
}

// The columns of a segment, and the bytes of scales that travel with it. The last segment pads packed words.
struct SegmentColumns {
  i32 column, columns;
  i32 first_scale, scale_bytes, padding;
};

__device__ __forceinline__ SegmentColumns columns_of(const DispatchArgs& args, i32 segment) {
  const i32 column = segment * (static_cast<i32>(args.work.segment_bytes) / kLoadedWidth),
            columns = segment_size(args, segment) / kLoadedWidth;
  if (!kQuantises)
    return {column, columns, 0, segment == 0 && args.x_scales != nullptr ? args.world.scale_bytes : 0, 0};
  const i32 size = args.power_of_two == quant::kPacked ? 1 : 4, first = column / quant::kBlock * size;
  const i32 num_bytes = (columns + quant::kBlock - 1) / quant::kBlock * size;
  const i32 padding = column + columns == args.world.hidden ? args.world.scale_bytes - first - num_bytes : 0;
  return {column, columns, first, num_bytes + padding, padding};
}

// One warp: waits for the load of the sender's item and quantises it in place, its scales behind it.
__device__ __forceinline__ void prepare_segment(const DispatchArgs& args, Sender& sender) {
  // The load is there.
  const u32 s = sender.num_staged % kStages;
  ptx::bulk_load_wait(sender.stages.barriers + s, sender.stages.parities >> s & 1);
  sender.stages.parities ^= 1u << s;
  sender.ready = true;
  // Quantise it, scales behind the columns, padding zero; then the copy engine may read it.
  if constexpr (kQuantises) {
    const SegmentColumns part = columns_of(args, segment_of(sender, sender.item).index);
    const bool packed = args.power_of_two == quant::kPacked;
    u8 *stage = sender.stages.stage(s), *scales = stage + args.work.segment_bytes;
    quant::in_place<X>(stage, part.columns, args.power_of_two != quant::kFp32, [&](i32 block, f32 scale) {
      if (packed) scales[block] = static_cast<u8>(__float_as_uint(scale) >> 23);
      else reinterpret_cast<f32*>(scales)[block] = scale;
    });
    if (lane_idx() < part.padding) scales[part.scale_bytes - part.padding + lane_idx()] = 0;
    ptx::fence_proxy_shared();
    __syncwarp();
  }
}

// Stores a segment once per rank, at the first final row that was not dropped; on this rank at all of them. Its scales
// travel with it.
__device__ __forceinline__ void store_segment(const DispatchArgs& args, const Route& route, i32 token,
                                              const SegmentColumns& part, u8* stage) {
  const World& world = args.world;
  // Test all four words: if one is unread, the compiler reuses its register and waits for the load.
  const bool placed = (route.rank | route.position | route.local_expert | route.dst_row) >= 0;
  const u32 same = __match_any_sync(~0u, route.rank) & __ballot_sync(~0u, placed);
  const bool stores = placed && lane_idx() == __ffs(same) - 1;
  if (stores || (kPerExpert && placed && route.rank == world.rank))
    ptx::bulk_store(row_at(args, route.rank, route.dst_row) + part.column, stage, part.columns);
  if (part.scale_bytes == 0) return;
  const bool staged = kQuantises || stages_scales(args);
  const u8* scales = staged ? stage + args.work.segment_bytes : scales_of_token(args, token);
  u8* dst = stores ? dst_scales(args, route.rank, route.position, route.dst_row) + part.first_scale : nullptr;
  if (staged && (part.first_scale | part.scale_bytes | world.scale_bytes) % 16 == 0) {
    if (stores) ptx::bulk_store(dst, scales, part.scale_bytes);
  } else {
    for (u32 left = __ballot_sync(~0u, stores); left != 0; left &= left - 1)
      copy_bytes(reinterpret_cast<u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(dst), __ffs(left) - 1)), scales,
                 part.scale_bytes);
  }
}

// A row that was sent to this lane's rank.
struct SentRow {
  i32 rank, position;  // rank -1 = none
};

// The stores of all lanes are complete, and a warp barrier has followed.
__device__ __forceinline__ void notify_arrival(const DispatchArgs& args, SentRow sent, u64 seq) {
  if (sent.rank >= 0) ptx::store_release_sys(arrival_at(args, sent.rank, args.world.rank, sent.position), seq);
}

// One warp: sends items from sender.item on until none is left; on return all its stores are complete. False when the
// rank was stopped before. The next load starts before an item is quantised; without quantisation behind the item's
// stores, so that the first stores leave at once.
__device__ __forceinline__ bool send_rows(const DispatchArgs& args, Team team, const DispatchScratch& scratch,
                                          Sender& sender, u64 seq) {
  constexpr SentRow kNone = {-1, 0};
  SentRow ended = kNone, before = kNone;  // rows that ended with the item before this, and with the one before that
  ptx::fence_proxy_global();  // the copy engine writes where peers have started this operation
  bool more = true;
  while (more) {
    const bool present = sender.item >= 0;
    const Route route = route_of(args, sender, sender.item);
    const u32 s = sender.num_staged % kStages;
    const Segment segment = segment_of(sender, sender.item);
    auto send = [&] {
      if (!present) return;
      if (!sender.ready) prepare_segment(args, sender);
      sender.ready = false;
      store_segment(args, route, segment.token, columns_of(args, segment.index), sender.stages.stage(s));
      ptx::bulk_commit();
    };
    if (!kQuantises) send();
    // Stores that may be in flight when a stage is filled again.
    constexpr i32 kPending = kQuantises ? kStages - 2 : kStages - 1;
    if constexpr (kPerExpert) {
      static_assert(kStages == 3, "the row before the last two items is complete, and only two rows are remembered");
      ptx::bulk_wait<kPending>();
      __syncwarp();
      notify_arrival(args, before, seq);
      before = ended;
      ended = present && segment.index == sender.segments.value - 1
                  ? SentRow{is_first_of_rank(route) ? route.rank : -1, route.position}
                  : kNone;
    } else {
      ptx::bulk_wait_read<kPending>();
      __syncwarp();
    }
    const i32 next = next_item(args, team, scratch, sender, sender.item);
    load_segment(args, sender, next, (sender.num_staged + present) % kStages);
    if (kQuantises) send();
    sender.item = next;
    sender.num_staged += present;
    more = next >= 0;
  }
  ptx::bulk_wait_all();
  __syncwarp();
  if constexpr (kPerExpert) {
    notify_arrival(args, before, seq);
    notify_arrival(args, ended, seq);
  }
  return sender.item != kStopped;
}

// Nothing is sent: the prefetched segment must have arrived before the block ends.
__device__ __forceinline__ void drain_load(Sender& sender) {
  if (sender.item >= 0 && !sender.ready)
    ptx::bulk_load_wait(sender.stages.barriers + sender.num_staged % kStages, 0);
}

}  // namespace ep::ht
