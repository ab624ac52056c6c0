// Receive phase of HT combine, on the source rank. One warp polls the progress flags of a batch of tokens and loads
// their partials, the receive reducers add them. Where rows are copied there are no reduce warps, and a load-issue warp
// starts the loads.
#pragma once

#include "common/block.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/status.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "ht/combine_block.cuh"
#include "ht/combine_reduce.cuh"
#include "ht/pipeline.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

// ---- partials into z ----

constexpr i32 kRecvColumns = kColumns<Y>;

// Columns of a partial as they lie in a stage.
template <class T>
struct PartialColumns {
  Words<T, kRecvColumns> values;
  f32 scale;
};

template <class T>
__device__ __forceinline__ void widen_partial(const PartialColumns<T>& partial, f32 (&value)[kRecvColumns]) {
  if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (i32 i = 0; i < kRecvColumns; i += quant::kLaneColumns) {
      f32 four[quant::kLaneColumns];
      quant::widen4(partial.values.at[i / quant::kLaneColumns], four);
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) value[i + j] = __fmul_rn(four[j], partial.scale);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < kRecvColumns; ++i) value[i] = value_in<T>(partial.values.at, i);
  }
}

template <bool kWeighted, i32 kRows, class Acc>
__device__ __forceinline__ void add_partials(Acc& acc, const PipelineSizes& sizes, const SegmentInfo (&infos)[kRows],
                                             u8* const (&stages)[kRows]) {
  acc.template add<PartialColumns<C>, kWeighted>(
      infos,
      [&](i32 row, i32 column) {
        PartialColumns<C> partial;
        partial.values = *reinterpret_cast<const decltype(partial.values)*>(stages[row] + column * sizeof(C));
        if constexpr (kFp8) {
          const f32* scales = reinterpret_cast<const f32*>(stages[row] + padded16(sizes.columns * sizeof(C)));
          partial.scale = scales[column / quant::kBlock];
        }
        return partial;
      },
      [](const PartialColumns<C>& partial, f32(&value)[kRecvColumns]) { widen_partial(partial, value); });
}

// ---- waits for peers ----

extern "C" {  // see common/block.cuh
__shared__ i32 block_status;
}

// One warp: every lane with `waits` set polls its peer's flag until it is ready. False where the rank was stopped.
__device__ __forceinline__ bool await_flags(const World& world, bool waits, i32 peer, const u64* flag, u64 seq,
                                            u64 start, u64* waited) {
  bool ready = !waits, missed = false;  // missed: an earlier poll found nothing
  return spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, peer, [&] {
    if (ready) return true;
    ready = ptx::load_acquire_sys(flag) >= seq;
    if (ready && missed && peer != world.rank) note_wait(waited, peer, ptx::now_ns() - start);
    missed = !ready;
    return ready;
  });
}

// One warp: waits for the routing_id of every expert rank. False where one differs, or does not come.
__device__ __forceinline__ bool routings_agree(const CombineArgs& args, u64 seq, u64 routing_id, u64 start,
                                               u64* waited) {
  const World& world = args.world;
  bool differs = false;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 peer = min(base + lane_idx(), world.size - 1);
    const bool active = is_active(peer);
    if (!await_flags(world, active, peer, flag_at(world, world.rank, FLAG_COMBINE, peer), seq, start, waited)) {
      if (lane_idx() == 0) block_status = kFailed;
      return false;
    }
    differs |= active && ptx::load_volatile(routing_id_at(world, world.rank, routing_ids_at(args), peer)) != routing_id;
  }
  differs = __any_sync(~0u, differs);
  if (differs && lane_idx() == 0) block_status = kRoutingMismatch;
  return !differs;
}

// ---- batches of tokens ----

// Work items: batches of as many tokens as a warp has lanes for, then kNumTailTokens single tokens per block, so that
// little work is left after the last arrival, and all blocks share it.
constexpr i32 kNumTailTokens = 3;

struct TokenBatch {
  i32 first, count;
};

struct TokenBatches {
  i32 batch_size, num_batches, total;  // total: batches and single tokens

  // Item -1: no tokens.
  __device__ __forceinline__ TokenBatch at(i32 item) const {
    return {item + min(item, num_batches) * (batch_size - 1), item < 0 ? 0 : item < num_batches ? batch_size : 1};
  }
};

__device__ __forceinline__ TokenBatches batches_of(i32 num_tokens, i32 batch_size, i32 num_blocks) {
  const i32 num_batches = max(num_tokens - kNumTailTokens * num_blocks, 0) / batch_size;
  return {batch_size, num_batches, num_tokens - num_batches * (batch_size - 1)};
}

// The route of this lane's (token, k), if it has one. Loads only the fields that are used: an unread load register is
// reused, and its reuse waits for the load.
__device__ __forceinline__ Route load_route(const CombineArgs& args, const Lanes& lanes, TokenBatch batch) {
  Route route = {-1, -1, -1, -1};
  if (lanes.index >= batch.count || lanes.k >= args.world.topk) return route;
  const Route* at = args.routes + static_cast<i64>(batch.first + lanes.index) * args.world.topk + lanes.k;
  route.rank = at->rank;
  route.position = at->position;
  if (kCopies) route.dst_row = *const_cast<const volatile i32*>(&at->dst_row);
  return route;
}

// One term of a token's sum: the partial or row of this lane.
struct Term {
  bool present, zeros;  // zeros: the row of zeros is loaded
  i32 index, count;     // index in the sum, terms of the sum
  f32 weight;
  const u8* src;
};

// A token without any term gets one of zeros.
__device__ __forceinline__ Term term_of(const CombineArgs& args, const Lanes& lanes, const Route& route,
                                        TokenBatch batch) {
  const World& world = args.world;
  const bool routed = route.rank >= 0;
  Term term = {routed, true, 0, 0, 1.0f, world.zeros};
  if (KIND == EXACT) {
    const u32 mask = __ballot_sync(~0u, routed) & lanes.mask_of(lanes.index);
    term.index = __popc(mask & ((1u << lane_idx()) - 1));
    term.count = __popc(mask);
  } else {
    const u64 mine = routed ? 1ull << route.rank : 0, ranks = lanes.prefix_or(mine);
    const u64 all = __shfl_sync(~0u, ranks, lane_idx() | (lanes.width - 1)), before = __shfl_up_sync(~0u, ranks, 1);
    term.present = routed && (lanes.k == 0 || (before & mine) == 0);
    term.index = __popcll(all & (mine - 1));
    term.count = __popcll(all);
  }
  if (term.count == 0) {
    term.present = lanes.k == 0 && lanes.index < batch.count;
    term.count = 1;
  }
  if (!routed || !term.present) return term;
  const i64 token = static_cast<i64>(batch.first) + lanes.index;
  if (KIND == EXACT && args.apply_weights) term.weight = args.topk_weights[token * world.topk + lanes.k];
  if (reads_own_rows(args) && route.rank == world.rank) {
    term.zeros = route.dst_row < 0;
    if (!term.zeros) term.src = args.y + static_cast<i64>(route.dst_row) * world.hidden * sizeof(Y);
  } else {
    const i64 row = KIND == EXACT ? token * world.topk + lanes.k : position_of(world, route.rank, route.position);
    term.zeros = false;
    term.src = combine_row_at(args, world.rank, row);
  }
  return term;
}

// ---- loads of received partials ----

// A lane's load: address, weight, index among the loads of the batch.
constexpr u32 kZeros = 4, kNumberShift = 8;

struct alignas(16) LoadRequest {
  const u8* src;
  f32 weight;
  u32 flags;  // kFirstRow, kLastRow, kZeros, index + 1 << kNumberShift; index + 1 = 0: no load
};
static_assert(sizeof(LoadRequest) == 16, "LOAD_REQUEST_BYTES of transports/nvlink/calls/plan.py");

__device__ __forceinline__ LoadRequest request_of(const Lanes& lanes, const Term& term) {
  const u32 present = __ballot_sync(~0u, term.present), before = (1u << (lanes.index * lanes.width)) - 1;
  const u32 number = term.present ? __popc(present & before) + term.index + 1 : 0;
  const u32 in_sum = (term.index == 0 ? kFirstRow : 0) | (term.index == term.count - 1 ? kLastRow : 0);
  return {term.src, term.weight, in_sum | (term.zeros ? kZeros : 0) | number << kNumberShift};
}

// The partials of a batch into stages, segment by segment, each token's in the order of its sum. Their progress flags
// have been acquired.
__device__ __forceinline__ void load_partials(const CombineArgs& args, const Lanes& lanes, Pipeline& recv,
                                              const LoadRequest& request, i32 first) {
  const PipelineSizes& sizes = args.pipelines;
  const i32 number = static_cast<i32>(request.flags >> kNumberShift) - 1,
            count = __popc(__ballot_sync(~0u, number >= 0));
  u8* z = args.z + (static_cast<i64>(first) + lanes.index) * args.world.hidden * sizeof(Y);
  ptx::fence_proxy_global();
#pragma unroll 1
  for (i32 segment = 0; segment < sizes.num_segments; ++segment) {
    const i32 columns = segment_columns(args.world, sizes, segment);
    const SegmentInfo info = {request.weight,
                              (request.flags & (kFirstRow | kLastRow)) | static_cast<u32>(columns) << kColumnsShift,
                              z + static_cast<i64>(segment) * sizes.columns * sizeof(Y)};
    const u8* src =
        request.flags & kZeros ? request.src : request.src + static_cast<i64>(segment) * sizes.segment_bytes;
    load_next_stages(recv, number, count, info, src, sent_bytes(sizes, columns), half_of_stages(recv));
  }
}

// Single-slot queue from the warp that polls flags to the load-issue warp; an entry is a batch. Every lane of either
// warp arrives by itself, because racecheck understands only that.
struct LoadQueue {
  LoadRequest* requests;  // [32], by lane
  u32 num_entries;        // so far
};

extern "C" {  // see common/block.cuh
__shared__ u64 load_queue_full, load_queue_empty;  // mbarriers
__shared__ i32 load_queue_first;                   // first token of the batch, -1 = end
}

// The warp that polls.
__device__ __forceinline__ void push(LoadQueue& queue, const LoadRequest& request, i32 first) {
  ptx::bulk_load_wait(&load_queue_empty, (queue.num_entries & 1) ^ 1);
  queue.requests[lane_idx()] = request;
  if (lane_idx() == 0) load_queue_first = first;
  ptx::barrier_arrive(&load_queue_full);
  ++queue.num_entries;
}

// The load-issue warp, from the first batch to the end.
__device__ __forceinline__ void issue_loads(const CombineArgs& args, LoadQueue queue, Pipeline recv) {
  const Lanes lanes = lanes_for(args.world.topk);
#pragma unroll 1
  for (;; ++queue.num_entries) {
    ptx::bulk_load_wait(&load_queue_full, queue.num_entries & 1);
    const LoadRequest request = queue.requests[lane_idx()];
    const i32 first = load_queue_first;
    ptx::barrier_arrive(&load_queue_empty);
    if (first < 0) break;
    load_partials(args, lanes, recv, request, first);
  }
  producer_tail(recv);
}

// Weights that arrived beside the rows of a batch.
__device__ __forceinline__ void receive_weights(const CombineArgs& args, const Lanes& lanes, const Route& route,
                                                TokenBatch batch) {
  const World& world = args.world;
  if (lanes.index >= batch.count || lanes.k >= world.topk) return;
  f32 weight = 0.0f;
  if (route.rank == world.rank && reads_own_rows(args)) {
    const i64 index = KIND == PER_RANK ? static_cast<i64>(route.dst_row) * world.topk + lanes.k : route.dst_row;
    if (route.dst_row >= 0) weight = args.row_weights[index];
  } else if (route.rank >= 0) {
    weight = combine_weights_at(args, world.rank, position_of(world, route.rank, route.position))[lanes.k];
  }
  args.z_weights[static_cast<i64>(batch.first + lanes.index) * world.topk + lanes.k] = weight;
}

// One warp: waits for the partials of a batch; loads may follow. False where the rank was stopped.
__device__ __forceinline__ bool await_partials(const CombineArgs& args, const Route& route, u64 seq, u64 start,
                                               u64* waited) {
  const World& world = args.world;
  const bool waits = route.rank >= 0 && !(reads_own_rows(args) && route.rank == world.rank);
  const i32 peer = max(route.rank, 0);
  const u64* flag = progress_at(world, world.rank, peer, max(route.position, 0));
  return await_flags(world, waits, peer, flag, seq, start, waited);
}

// The receive load warp: the batches of this block, loaded here or pushed to the load-issue warp.
__device__ __forceinline__ void load_recv(const CombineArgs& args, Team team, Pipeline recv, LoadQueue queue, u64 seq,
                                          u64 routing_id, u64 start, u64* waited) {
  const Lanes lanes = lanes_for(args.world.topk);
  const TokenBatches batches = batches_of(args.num_tokens, lanes.count, team.num_blocks);
  BlockWorkCounter token_counter =
      block_work_counter(team, &args.world.state->tokens_taken, batches.total, batches.total);
  // The routes of the first batch are in flight while routings are compared.
  TokenBatch next = batches.at(token_counter.next());
  Route next_route = load_route(args, lanes, next);
  bool ok = routings_agree(args, seq, routing_id, start, waited);
#pragma unroll 1
  while (ok && next.count != 0) {
    const TokenBatch batch = next;
    const Route route = next_route;
    next = batches.at(token_counter.next());
    next_route = load_route(args, lanes, next);  // in flight, as the next item is, while progress flags are polled
    const Term term = term_of(args, lanes, route, batch);
    ok = await_partials(args, route, seq, start, waited);
    if (!ok) {
      if (lane_idx() == 0) block_status = kFailed;
      break;
    }
    if (args.z_weights != nullptr) receive_weights(args, lanes, route, batch);
    const LoadRequest request = request_of(lanes, term);
    if constexpr (kCopies) push(queue, request, batch.first);
    else load_partials(args, lanes, recv, request, batch.first);
  }
  while (next.count != 0) next = batches.at(token_counter.next());
  if constexpr (kCopies) push(queue, {nullptr, 0.0f, 0}, -1);
  else producer_tail(recv);
}

// ---- receive reducers ----

// Number of receive reducers. For copied rows: just enough to cover the row, because every warp must arrive on every
// stage.
constexpr i32 kRecvReduceColumns = 32 * kRecvColumns * kMaxRecvReducers;  // per group of all warps
using RecvAccumulator =
    Accumulator<kRecvColumns, (kMaxSegmentColumns + kRecvReduceColumns - 1) / kRecvReduceColumns>;

__device__ __forceinline__ i32 num_recv_reducers(const PipelineSizes& sizes) {
  constexpr i32 kWarpColumns = 32 * kRecvColumns * RecvAccumulator::kGroups;
  return kCopies ? (sizes.columns + kWarpColumns - 1) / kWarpColumns : kMaxRecvReducers;
}

// Stages into z. Copied rows: two of a token per step, because a step is mostly latency.
__device__ __forceinline__ void reduce_recv(const CombineArgs& args, Pipeline recv) {
  RecvAccumulator acc = make_accumulator<RecvAccumulator>(warp_idx() - kFirstRecvReducer,
                                                          num_recv_reducers(args.pipelines), args.pipelines.columns);
#pragma unroll 1
  while (true) {
    SegmentInfo info = consumer_wait(recv);
    if (info.flags & kEnd) return;
    // Add a stage, or two of one token; its last row writes the sum.
    if (kCopies && (info.flags & kLastRow) == 0) {
      const Pipeline next = recv.ahead(1);
      const SegmentInfo second = consumer_wait(next);
      add_partials<KIND == EXACT, 2>(acc, args.pipelines, {info, second}, {recv.stage(), next.stage()});
      consumer_release(recv);
      info = second;
    } else {
      add_partials<KIND == EXACT, 1>(acc, args.pipelines, {info}, {recv.stage()});
    }
    consumer_release(recv);
    if (info.flags & kLastRow) write_rounded<Y>(acc, info.columns(), info.dst);
  }
}

// NaN in every output dtype, in this block's part of z or in all of it.
__device__ __forceinline__ void fill_with_nan(const CombineArgs& args, Team team) {
  const i64 halfwords = static_cast<i64>(args.num_tokens) * args.world.hidden * (sizeof(Y) / 2);
  const i64 weights = args.z_weights == nullptr ? 0 : static_cast<i64>(args.num_tokens) * args.world.topk;
  const i64 first = static_cast<i64>(team.block) * THREADS + threadIdx.x,
            step = static_cast<i64>(team.num_blocks) * THREADS;
  for (i64 i = first; i < halfwords; i += step) reinterpret_cast<u16*>(args.z)[i] = 0xFFFF;
  for (i64 i = first; i < weights; i += step) args.z_weights[i] = __uint_as_float(~0u);
}

}  // namespace ep::ht
