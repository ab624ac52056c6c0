// The receiving half of low-latency dispatch: units and records as they arrive, each to where it finally belongs.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "layout/ll128.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ll_counts.cuh"
#include "routing/ll_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// What a lane has to do with the scales of a fp8 unit: lane b with those of its block b, wherever the row goes; lanes
// behind the last block pad packed words with zero bytes.
struct UnitScale {
  u32 bits;
  i64 offset;  // from the row's first scale, bytes
  bool wanted;
};

__device__ __forceinline__ UnitScale scale_in(const DispatchArgs& args, const Unit& unit, i32 index, i32 num_rows) {
  const i32 blocks = (args.world.hidden + quant::kBlock - 1) / quant::kBlock;
  const i32 first = index * kUnitBlocks, block = first + lane_idx();
  const bool packed = args.power_of_two == quant::kPacked;
  const bool real = lane_idx() < kUnitBlocks && block < blocks;
  const bool pads = packed && first + kUnitBlocks >= blocks && block >= blocks && block < (blocks + 3) / 4 * 4;
  const u32 bits = scale_of_block(unit, lane_idx());
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  const i64 offset = !packed ? block * 4 : args.scale_row_stride == 0 ? block : block / 4 * column * 4 + block % 4;
  return {real ? bits : 0, offset, real || pads};
}

// Byte in out_scales of a row's first scale.
__device__ __forceinline__ i64 scales_from(const DispatchArgs& args, i32 row) {
  const World& world = args.world;
  if (args.scale_row_stride == 0) return static_cast<i64>(row) * world.scale_bytes;
  if (LAYOUT == GROUPED || LAYOUT == FLAT) return static_cast<i64>(row) * args.scale_row_stride * 4;
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : world.max_tokens, group = row / per_group;
  return (group * static_cast<i64>(args.scale_group_stride) +
          (row - group * per_group) * static_cast<i64>(args.scale_row_stride)) *
         4;
}

// A unit of a received row to the final rows `rows` of this lane's that `placed` (a ballot) names.
__device__ __forceinline__ void write_unit(const DispatchArgs& args, const Unit& unit, i32 index, i32 row_of_lane,
                                           u32 placed, i32 num_rows) {
  const World& world = args.world;
  const i32 offset = first_offset() + index * (kQuantised ? kUnitColumns : kUnitData);
  const bool first = offset < world.row_bytes && !(kQuantised && is_tag_lane());
  const bool second = offset + kSecond < world.row_bytes && !is_tag_lane();
  u8* to = row_at(args, world.rank, 0) + offset;
  UnitScale scale = {};
  i64 scales_of_lane = 0;
  if constexpr (kQuantised) {
    scale = scale_in(args, unit, index, num_rows);
    scales_of_lane = scales_from(args, row_of_lane);
  }
#pragma unroll 1
  for (u32 left = placed; left != 0; left &= left - 1) {
    const i32 leader = __ffs(left) - 1, row = __shfl_sync(~0u, row_of_lane, leader);
    u8* at = to + static_cast<i64>(row) * world.row_bytes;
    if (first) *reinterpret_cast<Vector*>(at) = unit.first;
    if (second) *reinterpret_cast<Vector*>(at + kSecond) = unit.second;
    if constexpr (kQuantised) {
      u8* one = args.out_scales + __shfl_sync(~0u, scales_of_lane, leader) + scale.offset;
      if (scale.wanted && args.power_of_two == quant::kPacked) *one = static_cast<u8>(scale.bits >> 23);
      else if (scale.wanted) *reinterpret_cast<u32*>(one) = scale.bits;
      continue;
    }
    if (world.scale_bytes == 0) continue;
    u8* scales = args.out_scales + static_cast<i64>(row) * world.scale_bytes;
    const i32 one = offset - world.row_bytes, two = one + kSecond;
    if (one >= 0 && one < world.scale_bytes) store_bytes(scales + one, unit.first, world.scale_bytes - one);
    if (two >= 0 && two < world.scale_bytes && !is_tag_lane())
      store_bytes(scales + two, unit.second, world.scale_bytes - two);
  }
}

// What one warp looks at: a unit of a row, or (index = row_units) its records.
struct Arrival {
  Turn turn;
  const u8 *lines, *records;  // where they land
  Unit unit;
  Vector record;  // lane i: vector i of the first four lines of records
  bool there;     // this lane's lines are
  bool delivered; // before the counts were here
};

__device__ __forceinline__ bool is_records(const World& world, const Arrival& arrival) {
  return arrival.turn.index == world.row_units;
}

__device__ __forceinline__ i32 source_at(const World& world, Turn turn) {
  const i32 source = turn.source + world.rank;
  return source < world.size ? source : source - world.size;
}

// Where to look: found out once, for each address is a chain of loads. Units are fewer than 2^31, as they are of 1024
// bytes.
__device__ __forceinline__ void locate(const DispatchArgs& args, const LlScratch& scratch, Arrival& arrival) {
  const World& world = args.world;
  const i32 number = line_position(world, source_at(world, arrival.turn), arrival.turn.position);
  arrival.lines = scratch.here[0] + static_cast<i64>(number * world.row_units + arrival.turn.index) * kUnitBytes;
  arrival.records = scratch.here[1] + static_cast<i64>(number * world.meta_lines) * kLineBytes;
}

__device__ __forceinline__ void look(const DispatchArgs& args, Arrival& arrival, u64 seq) {
  const World& world = args.world;
  arrival.there = is_records(world, arrival) || peek_unit(arrival.lines, seq, &arrival.unit);
  if (kPerExpert || is_records(world, arrival))
    arrival.there &= peek_lines(arrival.records, min(4, world.meta_lines), seq, &arrival.record);
}

// This lane's record (k = lane) of an arrival that is there. K > 28: the fifth line is awaited here; false: in vain.
__device__ __forceinline__ bool record_of(const DispatchArgs& args, const Arrival& arrival, u64 seq, Meta* record) {
  const World& world = args.world;
  const i32 k = lane_idx();
  Vector got = shuffle(arrival.record, (k / kLineMetas * 8 + k % kLineMetas) & 31);
  if (world.meta_lines > 4) {
    Vector more = {};
    const i32 source = source_at(world, arrival.turn);
    const u8* at = arrival.records + 4 * kLineBytes;
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source, [&] { return peek_lines(at, 1, seq, &more); }))
      return false;
    const Vector late = shuffle(more, (k - 4 * kLineMetas) & 31);
    if (k >= 4 * kLineMetas) got = late;
  }
  const i32 expert = k < world.topk ? static_cast<i32>(word_of(got, 0)) : -1;
  *record = {expert, static_cast<i32>(word_of(got, 1)), __uint_as_float(word_of(got, 2)),
             static_cast<i32>(word_of(got, 3))};
  return true;
}

// Final row of a position, rank-wise layouts; kDropped past the capacity.
__device__ __forceinline__ i32 row_of(const DispatchArgs& args, const LlScratch& scratch, i32 source, i32 position) {
  return admit(first_row(args, scratch, source) + position, 0, args.world.capacity);
}

// Whether a warp adds up the counts of the sources before its own, where it needs them, instead of waiting for a
// layout.
__device__ __forceinline__ bool adds_up(const World& world) { return LAYOUT == EXPERT_MAJOR && world.size <= 16; }

// Final row that serves this lane's k; -1 = none.
__device__ __forceinline__ i32 place_of(const DispatchArgs& args, const LlScratch& scratch, const Meta& meta,
                                        i32 source, i32 position) {
  if (meta.local_expert < 0) return -1;
  if (!kPerExpert) return row_of(args, scratch, source, position);
  if (adds_up(args.world)) {
    i32 row = meta.local_expert * args.world.capacity + meta.place;
#pragma unroll 4
    for (i32 s = 0; s < source; ++s) row += scratch.arrived[s * arrived_stride(args.world) + 1 + meta.local_expert];
    return admit(row, meta.local_expert, args.world.capacity);
  }
  return admit(first_row(args, scratch, source, meta.local_expert) + meta.place, meta.local_expert,
               args.world.capacity);
}

// What combine and the caller need of a received position. One warp; lane k has record k.
__device__ __forceinline__ void record_row(const DispatchArgs& args, const LlScratch& scratch, const Meta& meta,
                                           i32 source, i32 position) {
  const World& world = args.world;
  const i32 topk = world.topk, k = lane_idx();
  const i32 at = source * world.max_tokens + position, entry = at * topk + k;  // 31 bits: plan.sizes_of
  if (k >= topk) return;
  args.places[entry] = place_of(args, scratch, meta, source, position);
  args.weights[entry] = meta.weight;
  if (k == 0) args.tokens[at] = meta.token;
  if (kPerExpert) return;
  const i32 row = row_of(args, scratch, source, position);
  if (row < 0) return;
  args.out_ids[row * topk + k] = meta.local_expert;
  args.out_weights[row * topk + k] = meta.weight;
}

// An arrival whose lines are here, to its final rows. False after a failed wait.
__device__ __forceinline__ bool deliver(const DispatchArgs& args, const LlScratch& scratch, const Arrival& arrival,
                                        i32 num_rows, u64 seq) {
  const World& world = args.world;
  const i32 source = source_at(world, arrival.turn), position = arrival.turn.position;
  Meta record = {-1, -1, 0.0f, 0};
  if ((kPerExpert || is_records(world, arrival)) && !record_of(args, arrival, seq, &record)) return false;
  if (is_records(world, arrival)) {
    record_row(args, scratch, record, source, position);
  } else {
    const i32 row =
        kPerExpert ? place_of(args, scratch, record, source, position) : row_of(args, scratch, source, position);
    const u32 placed = kPerExpert ? __ballot_sync(~0u, row >= 0) : row >= 0;
    write_unit(args, arrival.unit, arrival.turn.index, row, placed, num_rows);
  }
  return true;
}

// All threads; ends with a block barrier. `verdict` is kHere before. Meanwhile a warp looks at its first item; a unit
// whose place does not depend on the counts goes there at once, and `first` is then no item any more.
__device__ __forceinline__ i32 await_counts(const DispatchArgs& args, const LlScratch& scratch, i32* verdict,
                                            u64* heads_here, Arrival& first, u64 origin, u64 seq, u64 start,
                                            u64* waits) {
  i32 found = kHere;
  const i32 helper = num_warps() - 1 - warp_idx();  // in small steps items are the first warps'
  const bool asks = helper == (kPerExpert ? min(args.world.size, num_warps() - 1) : 1);
  const bool helps = asks || (kPerExpert && helper < args.world.size);
  if (asks) found = await_heads(args, scratch, origin, seq, start, waits);
  for (i32 source = helper; kPerExpert && source < args.world.size; source += num_warps())
    if (!await_count_lines(args, scratch, source, seq)) found = kFailed;
  if (found != kHere && lane_idx() == 0) atomicMax(verdict, found);
  if (asks && lane_idx() == 0) ptx::barrier_arrive(heads_here);
  if (first.turn.position < args.world.ll_tokens) {
    locate(args, scratch, first);
    look(args, first, seq);
    while (!helps && !__all_sync(~0u, first.there || ptx::barrier_is_complete(heads_here, 0))) look(args, first, seq);
    if (LAYOUT == RANK_MAJOR && !is_records(args.world, first) && __all_sync(~0u, first.there))
      first.delivered = deliver(args, scratch, first, 0, seq);
  }
  __syncthreads();
  return *verdict;
}

// Whether the source sends this item.
__device__ __forceinline__ bool is_sent(const World& world, const LlScratch& scratch, Turn turn) {
  return turn.position < scratch.arrived[source_at(world, turn) * arrived_stride(world)];
}

__device__ __forceinline__ void swap(Arrival& a, Arrival& b) {
  const Arrival kept = a;
  a = b;
  b = kept;
}

// Goes on to the next item that arrives, in the order in which they are likely to: by position, then by source. False:
// none is left.
__device__ __forceinline__ bool next_arrival(const DispatchArgs& args, const LlScratch& scratch, Turn& turn, Turn step,
                                             i32 most, Arrival& next, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  while (turn.position < most) {
    next.turn = turn;
    move_on(turn, step, world.row_units + 1, world.size);
    if (!is_sent(world, scratch, next.turn)) continue;
    locate(args, scratch, next);
    look(args, next, seq);
    return true;
  }
  return false;
}

// Everything that arrives, to its place. A warp looks at its next item while it puts the present one where it belongs.
// `next` is the first, which may not exist: it was looked at before the counts were here.
__device__ __forceinline__ bool receive_rows(const DispatchArgs& args, const LlScratch& scratch, Arrival next,
                                             Turn step, u64 seq, u64 start, u64* waits) {
  const World& world = args.world;
  Turn turn = next.turn;
  move_on(turn, step, world.row_units + 1, world.size);
  // Else no scales depend on it.
  const i32 num_rows = LAYOUT == GROUPED || LAYOUT == FLAT ? rows_delivered(args, scratch) : 0;
  i32 most = 0;
  for (i32 source = lane_idx(); source < world.size && turn.position < world.ll_tokens; source += 32)
    most = max(most, scratch.arrived[source * arrived_stride(world)]);
  most = __reduce_max_sync(~0u, most);
  bool more = !next.delivered && is_sent(world, scratch, next.turn);
  if (!more) more = next_arrival(args, scratch, turn, step, most, next, seq);
#pragma unroll 1
  while (more) {
    Arrival now = next;
    more = next_arrival(args, scratch, turn, step, most, next, seq);
    if (!more) next.there = false;
    if (!__all_sync(~0u, now.there)) {  // two are looked at together: rows overtake one another on their way
      const i32 source = source_at(world, now.turn);
      i32 looks = 0;  // the one before may be from long ago
      if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source, [&] {
            if (more && __all_sync(~0u, next.there)) return true;
            ++looks;
            look(args, now, seq);
            if (more) look(args, next, seq);
            return now.there;
          }))
        return false;
      if (!__all_sync(~0u, now.there))
        swap(now, next);
      else if (looks > 1 && lane_idx() == 0 && source != world.rank)
        note_wait(waits, source, ptx::now_ns() - start);
    }
    if (!deliver(args, scratch, now, num_rows, seq)) return false;
  }
  return true;
}

// Receives this team's items, from `turn` on. One block `keeps`: it also writes the counts that the caller gets.
// Nothing may look delivered after a failed wait, whoever finds out first: the keeper looks for a failure after it has
// written, and whoever fails zeroes the counts after it has said so. The fences between are sequentially consistent:
// with weaker ones each could miss what the other did.
__device__ __forceinline__ void ll_receive(const DispatchArgs& args, Team team, LlScratch& scratch, u8* shared,
                                           i32* verdict, u64* heads_here, Turn turn, Turn step, bool keeps, u64 number,
                                           u64 origin, u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  u64* waits = waits_at(shared);
  Arrival first;
  first.turn = turn;
  first.delivered = false;
  const i32 counts = await_counts(args, scratch, verdict, heads_here, first, origin, seq, start, waits);
  bool ok = counts != kFailed;
  if (counts == kHere) {
    if (LAYOUT == RANK_MAJOR) {
      if (keeps && warp_idx() == 0)
        write_rank_counts(args, [&](i32 source) { return scratch.arrived[source * arrived_stride(world)]; });
    } else if (keeps || !adds_up(world)) {
      lay_out(args, scratch, kPerExpert, false,
              [&](i32 source, i32 e) { return scratch.arrived[source * arrived_stride(world) + 1 + e]; });
      if (keeps) write_counts(args, scratch);
    }
    ok = receive_rows(args, scratch, first, step, seq, start, waits);
  } else if (counts == kDiffers && keeps) {
    write_no_counts(args);
    if (threadIdx.x == 0)
      report_difference(world, OP_DISPATCH, origin,
                        [&](i32 peer) { return origin_told(ptx::load_pair<Vector>(head_at(args, world.rank, peer))); });
  }
  if (keeps) {
    ptx::fence_sc_gpu();
    ok &= ptx::load_volatile(&world.state->aborted) == STOP_RUNNING;
  }
  if (__syncthreads_or(!ok) != 0) {
    ptx::fence_sc_gpu();
    write_no_counts(args);
  }
  note_end(world, team, number, waits);
}

}  // namespace ep::ll
