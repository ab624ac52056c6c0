// Send phase of HT combine, on the expert rank. One warp loads rows of y, reduce warps make partials of them (none
// where rows are copied), one thread stores these at their source ranks, one warp notifies source ranks of complete
// chunks.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/trace.cuh"
#include "ht/combine_block.cuh"
#include "ht/combine_reduce.cuh"
#include "ht/pipeline.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

// Stores that may still read their stages: fewer than the stages. Of partials just one, because teams wait for stages.
constexpr u32 kPendingRowReads = 3, kPendingPartialReads = 1,
              kPendingReads = kReduces ? kPendingPartialReads : kPendingRowReads;
constexpr u32 kPendingStores = 3;   // stores in flight before the send thread waits for the oldest
constexpr i32 kNumTailChunks = 3;   // last chunks per block: taken when their stages are free, not one ahead
constexpr i32 kMaxOpenChunks = 64;  // chunks that are loaded and not yet notified
constexpr u32 kAllDone = 1u << 31;  // in chunks_done: the count is final; in chunks_notified: no credit, do not wait

extern "C" {  // see common/block.cuh
__shared__ u64 chunk_words[kMaxOpenChunks];  // by the load warp, in its order: address of a chunk's progress flag
__shared__ u32 chunks_done;                  // by the send thread: number of complete chunks
__shared__ u32 chunks_notified;              // by the notify warp
__shared__ u64 credit_known;                 // mbarrier: has_credit is set
__shared__ bool has_credit;                  // this block may write to peers
}

// A few long rows saturate NVLink, and some SMs get far less bandwidth. Few rows are in flight per block, and a block
// takes a chunk only when it has stages for it, or receivers would stall on the slow SM.
__device__ __forceinline__ bool has_long_rows(const CombineArgs& args) {
  return kCopies && !has_short_rows(args.pipelines);
}

// Every thread that writes to peers.
__device__ __forceinline__ bool await_credit() {
  ptx::bulk_load_wait(&credit_known, 0);
  return has_credit;
}

// ---- chunks ----

// CHUNK positions of a source. All chunks of all sources have one order: by index, then by source, starting after this
// rank. So all links are busy at all times, and chunks leave in the order in which sources reduce them.
struct Chunk {
  i32 source, first, count;  // positions first .. first + count
};

// The order of all chunks. A lane of the load warp stands for two sources.
struct ChunkOrder {
  const i32* rows;
  i32 low, high;           // chunks of the sources at peer offsets lane and 32 + lane
  i32 index, num_before;  // the index reached, and the number of chunks with a lower one

  __device__ __forceinline__ i32 total() const { return __reduce_add_sync(~0u, low + high); }

  // Chunk `number` < total(); numbers ascend from call to call.
  __device__ __forceinline__ Chunk at(const World& world, i32 number) {
    u32 lows, highs;
    while (true) {
      lows = __ballot_sync(~0u, low > index);
      highs = __ballot_sync(~0u, high > index);
      const u32 num_sources = __popc(lows) + __popc(highs), ahead = number - num_before;
      if (ahead < num_sources) break;
      constexpr i32 kMax = 0x7FFFFFFF;
      const i32 fewest = __reduce_min_sync(~0u, min(low > index ? low : kMax, high > index ? high : kMax));
      // Indices at which the same sources have chunks.
      const i32 skipped = min(static_cast<i32>(ahead / num_sources), fewest - index);
      index += skipped;
      num_before += skipped * num_sources;
    }
    const i32 nth = number - num_before, num_low = __popc(lows);
    const u32 mask = nth < num_low ? lows : highs;
    const i32 nth_in_mask = nth < num_low ? nth : nth - num_low;
    const bool found = (mask >> lane_idx() & 1) && __popc(mask & ((1u << lane_idx()) - 1)) == nth_in_mask;
    const i32 peer_offset = __ffs(__ballot_sync(~0u, found)) - 1 + (nth < num_low ? 0 : 32);
    const i32 source = rank_at_offset(world, peer_offset), first = index * CHUNK;
    return {source, first, min(CHUNK, rows[source] - first)};
  }
};

__device__ __forceinline__ ChunkOrder chunk_order(const CombineArgs& args, const i32* rows) {
  const World& world = args.world;
  const i32 num_sources = world.size - reads_own_rows(args);
  auto count = [&](i32 peer_offset) {
    return peer_offset < num_sources ? (rows[rank_at_offset(world, peer_offset)] + CHUNK - 1) / CHUNK : 0;
  };
  return {rows, count(lane_idx()), count(lane_idx() + 32), 0, 0};
}

// ---- load warp ----

// A few positions of a chunk; each lane has the values of its (position, k).
struct Batch {
  i32 source, first, count;
  bool present, ends_chunk;
  i32 row, token;
  f32 weight;
};

__device__ __forceinline__ Batch next_batch(const CombineArgs& args, const Lanes& lanes, ChunkOrder& order,
                                            BlockWorkCounter& chunk_counter, Chunk& chunk) {
  const World& world = args.world;
  Batch batch = {};
  batch.row = -1;
  if (chunk.count <= 0) {
    const i32 number = chunk_counter.next();
    if (number < 0) return batch;
    chunk = order.at(world, number);
  }
  batch.present = true;
  batch.source = chunk.source;
  batch.first = chunk.first;
  batch.count = min(lanes.count, chunk.count);
  batch.ends_chunk = batch.count == chunk.count;
  chunk.first += batch.count;
  chunk.count -= batch.count;
  if (lanes.index >= batch.count || lanes.k >= world.topk) return batch;
  const i64 at = position_of(world, batch.source, batch.first + lanes.index);
  batch.row = args.dst_rows[at * world.topk + lanes.k];
  if (KIND == EXACT) batch.token = args.tokens[at];
  if (KIND == PER_EXPERT && args.apply_weights)
    batch.weight = args.weights[at * world.topk + lanes.k];
  else
    batch.weight = 1.0f;
  return batch;
}

// Weights that travel beside the rows of a batch; later arrivals of this warp cover their stores.
__device__ __forceinline__ void send_weights(const CombineArgs& args, const Lanes& lanes, const Batch& batch) {
  const World& world = args.world;
  if (lanes.index < batch.count && lanes.k < world.topk) {
    const i64 index = KIND == PER_RANK ? static_cast<i64>(batch.row) * world.topk + lanes.k : batch.row;
    combine_weights_at(args, batch.source, position_of(world, world.rank, batch.first + lanes.index))[lanes.k] =
        batch.row >= 0 ? args.row_weights[index] : 0.0f;
  }
  __syncwarp();
}

// The loads of a batch; each lane has its own row, if it loads one.
struct BatchLoads {
  u32 load_lanes;  // lanes that load
  i32 count;       // positions
  bool has_row;    // else zeros replace rows that were all dropped
  u32 flags;       // of SegmentInfo: first and last of its sum, end of the chunk
  f32 weight;
  const u8* src;
  u8* dst;
};

__device__ __forceinline__ BatchLoads loads_of(const CombineArgs& args, const Lanes& lanes, const Batch& batch) {
  const World& world = args.world;
  // Which lanes of this token have rows, and which are the first and the last of them.
  const bool has_row = batch.row >= 0;
  const u32 with_row = __ballot_sync(~0u, has_row) & lanes.mask_of(lanes.index), me = 1u << lane_idx();
  const bool first = (with_row & (me - 1)) == 0, last = (with_row & ~(me | (me - 1))) == 0;
  // Which lanes load: a token without any row gets zeros.
  const bool zero_fill = with_row == 0 && lanes.k == 0 && lanes.index < batch.count;
  const bool loads = KIND == EXACT ? batch.row != -1 : zero_fill || (has_row && (KIND == PER_EXPERT || first));
  const u32 load_lanes = __ballot_sync(~0u, loads);
  const bool ends = batch.ends_chunk && lane_idx() == 31 - __clz(load_lanes);
  // Where the sum goes, and what this row is in it.
  const i64 dst_row = KIND == EXACT ? static_cast<i64>(batch.token) * world.topk + lanes.k
                                    : position_of(world, world.rank, batch.first + lanes.index);
  const u32 in_sum = KIND == PER_EXPERT ? (first ? kFirstRow : 0) | (last ? kLastRow : 0) : kFirstRow | kLastRow;
  return {load_lanes,
          batch.count,
          has_row,
          in_sum | (ends ? kChunkEnd : 0),
          has_row ? batch.weight : 1.0f,
          has_row ? args.y + static_cast<i64>(batch.row) * world.hidden * sizeof(Y) : world.zeros,
          combine_row_at(args, batch.source, dst_row)};
}

constexpr i32 kMaxLongRowsAtOnce = 2;  // long rows that are reduced: loads started in parallel

// Position by position, segment by segment, in ascending k: the lanes load one after the other. Short rows, and rows of
// one segment that are reduced, are loaded in parallel. `sums`: number of sums started so far.
__device__ __forceinline__ void load_batch(const CombineArgs& args, const Lanes& lanes, Pipeline& rows,
                                           const BatchLoads& loads, u32& sums) {
  const PipelineSizes& sizes = args.pipelines;
  const u32 me = 1u << lane_idx();
  const bool starts_sum = kReduces && (loads.flags & kFirstRow);
  if (has_short_rows(sizes) || (!kCopies && sizes.num_segments == 1)) {
    const i32 number = (loads.load_lanes & me) != 0 ? __popc(loads.load_lanes & (me - 1)) : -1,
              columns = segment_columns(args.world, sizes, 0);
    const SegmentInfo info = {loads.weight, loads.flags | static_cast<u32>(columns) << kColumnsShift, loads.dst};
    const u32 starting = __ballot_sync(~0u, starts_sum && number >= 0), sum = sums + __popc(starting & (me - 1));
    load_next_stages(rows, number, __popc(loads.load_lanes), info, loads.src, columns * sizeof(Y),
                     has_short_rows(sizes) ? half_of_stages(rows) : kMaxLongRowsAtOnce, [&](const Pipeline& at) {
                       if (starts_sum) publish_ticket(sum, at.stage_idx | at.phase * kPhaseBit);
                     });
    sums += __popc(starting);
    return;
  }
#pragma unroll 1
  for (i32 i = 0; i < loads.count; ++i) {
#pragma unroll 1
    for (i32 segment = 0; segment < sizes.num_segments; ++segment) {
      const i32 columns = segment_columns(args.world, sizes, segment);
      const u32 flags = segment == sizes.num_segments - 1 ? loads.flags : loads.flags & ~kChunkEnd;
      const SegmentInfo info = {loads.weight, flags | static_cast<u32>(columns) << kColumnsShift,
                                loads.dst + static_cast<i64>(segment) * sizes.segment_bytes};
      const u8* src = loads.has_row ? loads.src + static_cast<i64>(segment) * sizes.columns * sizeof(Y) : loads.src;
#pragma unroll 1
      for (u32 left = loads.load_lanes & lanes.mask_of(i); left != 0; left &= left - 1) {
        const i32 lane = __ffs(left) - 1;
        load_next_stage(rows, lane_idx() == lane, info, src, columns * sizeof(Y), [&](const Pipeline& at) {
          if (starts_sum) publish_ticket(sums, at.stage_idx | at.phase * kPhaseBit);
        });
        sums += __shfl_sync(~0u, static_cast<u32>(starts_sum), lane);
      }
    }
  }
}

// Lane 0: records the progress flag of chunk `number` of this block, which `batch` ends.
__device__ __forceinline__ void record_chunk(const World& world, const Batch& batch, u32 number) {
  while (static_cast<i32>(number - ptx::load_acquire_block(&chunks_notified)) >= kMaxOpenChunks) ptx::sleep_ns(100);
  u64* word = progress_at(world, batch.source, world.rank, batch.first);
  ptx::store_relaxed_block(chunk_words + number % kMaxOpenChunks, reinterpret_cast<u64>(word));
}

// The load warp: the rows of this block's chunks. It does not wait for credit, except before it sends weights.
__device__ __forceinline__ void load_rows(const CombineArgs& args, Team team, const i32* counts, Pipeline rows) {
  const Lanes lanes = lanes_for(args.world.topk);
  ChunkOrder order = chunk_order(args, counts);
  const i32 total = order.total();
  BlockWorkCounter chunk_counter = block_work_counter(team, &args.world.state->chunks_taken, total,
                                   has_long_rows(args) ? 0 : total - kNumTailChunks * team.num_blocks);
  Chunk chunk = {};
  u32 num_chunks = 0, sums = 0;
  Batch next = next_batch(args, lanes, order, chunk_counter, chunk);
  auto begin = [&](const Batch& batch) {
    if (batch.ends_chunk && lane_idx() == 0) record_chunk(args.world, batch, num_chunks);
    __syncwarp();  // before the lane that fills the last stage of the chunk
    num_chunks += batch.ends_chunk;
    if (args.row_weights != nullptr && await_credit()) send_weights(args, lanes, batch);
    return loads_of(args, lanes, batch);
  };
  // Two loops on purpose: with one loop and a branch the compiler waits for the prefetch in each iteration, 10 % of a
  // chunk.
#pragma unroll 1
  while (next.present && chunk_counter.prefetched) {
    const BatchLoads loads = begin(next);
    // The prefetch follows the last use of the present batch: one scoreboard serves both.
    next = next_batch(args, lanes, order, chunk_counter, chunk);
    load_batch(args, lanes, rows, loads, sums);
  }
#pragma unroll 1
  while (next.present) {  // tail chunks; all chunks of long rows
    const BatchLoads loads = begin(next);
    load_batch(args, lanes, rows, loads, sums);
    next = next_batch(args, lanes, order, chunk_counter, chunk);
  }
  if constexpr (kReduces) {
    const u32 num_teams = kNumReduceWarps / num_team_warps(args.pipelines);
    if (static_cast<u32>(lane_idx()) < num_teams)
      publish_ticket(sums + lane_idx(), lane_idx() == 0 ? kFirstNoMore : kNoMore);
  } else {
    producer_tail(rows, kConverts ? kNumReduceWarps : 1);
  }
}

// ---- send thread ----

// Without credit: drains the pipeline, so that no producer waits for a stage.
__device__ __forceinline__ void drain_segments(Pipeline segments) {
#pragma unroll 1
  while ((consumer_wait(segments).flags & kEnd) == 0) {
    ptx::barrier_arrive(segments.empty + segments.stage_idx);
    segments.advance();
  }
}

// One thread: stores segments at their source ranks and counts complete chunks. A stage is released once it is read.
__device__ __forceinline__ void send_segments(const CombineArgs& args, Pipeline segments) {
  if (!await_credit()) return drain_segments(segments);
  ptx::fence_proxy_global();  // peers' reads of the slot precede the copy engine's writes
  const u32 max_pending = has_long_rows(args) ? 1 : kPendingStores;
  // Bit i of ends: the store before the last i ended a chunk.
  u32 ends = 0, done = 0, stored = 0, released = 0;
#pragma unroll 1
  while (true) {
    const SegmentInfo info = consumer_wait(segments);
    if (info.flags & kEnd) break;
    ptx::bulk_store(info.dst, segments.stage(), sent_bytes(args.pipelines, info.columns()));
    ptx::bulk_commit();
    segments.advance();
    ends = ends << 1 | ((info.flags & kChunkEnd) != 0);
    if (++stored > kPendingReads) {
      ptx::bulk_wait_read<kPendingReads>();
      ptx::barrier_arrive(segments.empty + released);
      released = released + 1 == segments.num_stages ? 0 : released + 1;
    }
    if (max_pending == 1) ptx::bulk_wait<1>();
    else ptx::bulk_wait<kPendingStores>();
    if (ends >> max_pending & 1) ptx::store_release_block(&chunks_done, ++done);
  }
  ptx::bulk_wait_all();
  ptx::store_release_block(&chunks_done, done + __popc(ends & ((1u << max_pending) - 1)) | kAllDone);
}

// ---- notify warp ----

// One thread: writes the progress flags of complete chunks.
__device__ __forceinline__ void notify_chunks(u64 seq) {
#pragma unroll 1
  for (u32 notified = 0;;) {
    const u32 word = ptx::load_acquire_block(&chunks_done), done = word & ~kAllDone;
    if (notified != done) {
      ptx::fence_sys();
      for (; notified != done; ++notified)
        ptx::store_relaxed_sys(
            reinterpret_cast<u64*>(ptx::load_relaxed_block(chunk_words + notified % kMaxOpenChunks)), seq);
      ptx::store_release_block(&chunks_notified, notified);
    } else if (word & kAllDone) {
      return;
    } else {
      ptx::sleep_ns(64);
    }
  }
}

// The combine that a peer must have started before this rank writes to it. Exact rows go to (token, k), anywhere in the
// slot: the source rank must be in this very operation, not only past the slot's last use (a rank that continues
// without this one revokes that: barrier.cuh). Partials go to this rank's own part of the slot.
__device__ __forceinline__ u64 credit_needed(const CombineArgs& args, u64 last, u64 seq) {
  if (KIND == EXACT) return seq;
  return free_from(args.world, last, seq);
}

// The notify warp: waits for credit and publishes it to the block. Loads and reduce warps do not wait for it.
__device__ __forceinline__ bool publish_credit(const CombineArgs& args, Team team, Credit credit, u64 seq) {
  const World& world = args.world;
  if (team.block == 0) warp_send_started(world, FLAG_COMBINE_STARTED, seq);
  const u64 needed = credit_needed(args, credit.last, seq);
  const bool granted = warp_await_credit(world, FLAG_COMBINE_STARTED, credit, needed, OP_COMBINE);
  __syncwarp();
  if (lane_idx() == 0) {
    has_credit = granted;
    if (!granted) ptx::store_release_block(&chunks_notified, kAllDone);
    ptx::barrier_arrive(&credit_known);
  }
  return granted;
}

// One warp of one block: sends the routing_id of this rank to all peers.
__device__ __forceinline__ void send_routing_id(const CombineArgs& args, u64 routing_id, u64 seq) {
  const World& world = args.world;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32) {
    if (!is_active(peer)) continue;
    *routing_id_at(world, peer, routing_ids_at(args), world.rank) = routing_id;
    ptx::store_release_sys(flag_at(world, peer, FLAG_COMBINE, world.rank), seq);
  }
}

// The notify warp, from the first flag to the last; then the send phase of the block is complete.
__device__ __forceinline__ void notify(const CombineArgs& args, Team team, bool granted, u64 seq, u64 routing_id,
                                       u64 start) {
  const World& world = args.world;
  if (granted && team.block == 0) send_routing_id(args, routing_id, seq);
  if (lane_idx() != 0) return;
  if (granted) notify_chunks(seq);
  ptx::allow_next_launch();
  if (!arrive(world, team, DONE_COMBINE_SEND)) return;
  note_sent(world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, team.num_blocks);
  world.state->combine_seq = seq;
  world.state->combine_slot_seq[args.slot] = seq;
}

}  // namespace ep::ht
