// The sending half of HT combine: this rank as owner of rows. One warp loads rows, the makers make partials of them (or
// nobody does, where rows travel as they are), one thread stores these at their homes, one tells homes what is there.
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

// Stores that may still read their stages: fewer than there are. Of partials fewest: teams wait for these stages.
constexpr u32 kReadingRows = 3, kReadingMade = 1, kReading = kSums ? kReadingMade : kReadingRows;
constexpr u32 kUntold = 3;          // stores that may be under way before a chunk is known to be complete
constexpr i32 kLate = 3;            // the last chunks per block: taken when there is room for them
constexpr i32 kNamed = 64;          // chunks that are loaded and not told, at most
constexpr u32 kAllDone = 1u << 31;  // in chunks_done: no more come; as chunks_told: no one waits for the teller

extern "C" {  // see common/block.cuh
__shared__ u64 chunk_words[kNamed];  // by the loader, in its order: address of the word that tells of a chunk
__shared__ u32 chunks_done;           // by the storer: so many are complete
__shared__ u32 chunks_told;           // by the teller
__shared__ u64 credit_known;          // mbarrier: the teller has found out
__shared__ bool has_credit;           // then: whether this block may write to peers
}

// Few long rows fill the links, which do not serve all blocks alike: what a slow block holds comes late, and homes wait
// for it. So a block has fewer of them under way, and takes each chunk only when it has room.
__device__ __forceinline__ bool long_rows(const CombineArgs& args) { return kCopies && !short_rows(args.rings); }

// Anybody who writes to peers.
__device__ __forceinline__ bool await_credit() {
  ptx::bulk_load_wait(&credit_known, 0);
  return has_credit;
}

// CHUNK positions of a source. All chunks of all sources have one order: by number, then by source, beginning after
// this rank. So all links are busy at all times, and what homes sum first leaves first.
struct Chunk {
  i32 source, first, count;  // positions first .. first + count
};

// A lane of the loading warp stands for two sources.
struct Chunks {
  const i32* rows;
  i32 low, high;       // chunks of the sources 1 + lane and 33 + lane after this rank
  i32 number, before;  // chunks with a lower number than this one

  __device__ __forceinline__ i32 total() const { return __reduce_add_sync(~0u, low + high); }

  // Chunk `unit` < total(); units come in ascending order.
  __device__ __forceinline__ Chunk at(const World& world, i32 unit) {
    u32 lows, highs;
    while (true) {
      lows = __ballot_sync(~0u, low > number);
      highs = __ballot_sync(~0u, high > number);
      const u32 here = __popc(lows) + __popc(highs), ahead = unit - before;
      if (ahead < here) break;
      constexpr i32 kMost = 0x7FFFFFFF;
      const i32 fewest = __reduce_min_sync(~0u, min(low > number ? low : kMost, high > number ? high : kMost));
      // Numbers that all have chunks of the same sources.
      const i32 numbers = min(static_cast<i32>(ahead / here), fewest - number);
      number += numbers;
      before += numbers * here;
    }
    const i32 index = unit - before, num_low = __popc(lows);
    const u32 among = index < num_low ? lows : highs;
    const i32 rest = index < num_low ? index : index - num_low;
    const bool found = (among >> lane_idx() & 1) && __popc(among & ((1u << lane_idx()) - 1)) == rest;
    const i32 turn = __ffs(__ballot_sync(~0u, found)) - 1 + (index < num_low ? 0 : 32);
    const i32 source = rank_of_hop(world, turn), first = number * CHUNK;
    return {source, first, min(CHUNK, rows[source] - first)};
  }
};

__device__ __forceinline__ Chunks source_chunks(const CombineArgs& args, const i32* rows) {
  const World& world = args.world;
  const i32 num_sources = world.size - reads_own(args);
  auto count = [&](i32 turn) {
    return turn < num_sources ? (rows[rank_of_hop(world, turn)] + CHUNK - 1) / CHUNK : 0;
  };
  return {rows, count(lane_idx()), count(lane_idx() + 32), 0, 0};
}

// What a warp knows of a few positions of a chunk, each lane of its (position, k).
struct Batch {
  i32 source, first, count;
  bool present, ends_chunk;
  i32 place, token;
  f32 weight;
};

__device__ __forceinline__ Batch next_batch(const CombineArgs& args, const Lanes& lanes, Chunks& chunks, Claims& claims,
                                            Chunk& chunk) {
  const World& world = args.world;
  Batch batch = {};
  batch.place = -1;
  if (chunk.count <= 0) {
    const i32 unit = claims.next();
    if (unit < 0) return batch;
    chunk = chunks.at(world, unit);
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
  batch.place = args.places[at * world.topk + lanes.k];
  if (KIND == EXACT) batch.token = args.tokens[at];
  if (KIND == PER_EXPERT && args.apply_weights)
    batch.weight = args.weights[at * world.topk + lanes.k];
  else
    batch.weight = 1.0f;
  return batch;
}

// The numbers that go home beside a batch: later arrivals of this warp carry them.
__device__ __forceinline__ void send_weights(const CombineArgs& args, const Lanes& lanes, const Batch& batch) {
  const World& world = args.world;
  if (lanes.index < batch.count && lanes.k < world.topk) {
    const i64 index = KIND == PER_RANK ? static_cast<i64>(batch.place) * world.topk + lanes.k : batch.place;
    home_weights_at(args, batch.source, position_of(world, world.rank, batch.first + lanes.index))[lanes.k] =
        batch.place >= 0 ? args.row_weights[index] : 0.0f;
  }
  __syncwarp();
}

// What becomes of a batch: each lane knows its own row, if it loads one.
struct Loads {
  u32 loading;  // lanes that load
  i32 count;    // positions
  bool kept;    // else zeros stand in for rows that were all dropped
  u32 what;     // its place in the sum, and whether it ends the chunk
  f32 weight;
  const u8* from;
  u8* to;
};

__device__ __forceinline__ Loads loads_of(const CombineArgs& args, const Lanes& lanes, const Batch& batch) {
  const World& world = args.world;
  const bool kept = batch.place >= 0;
  const u32 here = __ballot_sync(~0u, kept) & lanes.of(lanes.index), me = 1u << lane_idx();
  const bool first = (here & (me - 1)) == 0, last = (here & ~(me | (me - 1))) == 0;
  const bool stands_in = here == 0 && lanes.k == 0 && lanes.index < batch.count;
  const bool loads = KIND == EXACT ? batch.place != -1 : stands_in || (kept && (KIND == PER_EXPERT || first));
  const u32 loading = __ballot_sync(~0u, loads);
  const bool ends = batch.ends_chunk && lane_idx() == 31 - __clz(loading);
  const i64 row = KIND == EXACT ? static_cast<i64>(batch.token) * world.topk + lanes.k
                                : position_of(world, world.rank, batch.first + lanes.index);
  const u32 place_in_sum = KIND == PER_EXPERT ? (first ? kFirst : 0) | (last ? kLast : 0) : kFirst | kLast;
  return {loading,
          batch.count,
          kept,
          place_in_sum | (ends ? kChunkEnd : 0),
          kept ? batch.weight : 1.0f,
          kept ? args.y + static_cast<i64>(batch.place) * world.hidden * sizeof(Y) : world.zeros,
          home_at(args, batch.source, row)};
}

constexpr i32 kLongTogether = 2;  // long rows that are loaded side by side, where any are

// Position by position, piece by piece, in ascending k: the lanes take turns. Rows of one piece that makers work on,
// and short ones, side by side. `sums`: begun so far.
__device__ __forceinline__ void load_batch(const CombineArgs& args, const Lanes& lanes, Ring& rows,
                                           const Loads& loads, u32& sums) {
  const Rings& rings = args.rings;
  const u32 me = 1u << lane_idx();
  const bool begins = kSums && (loads.what & kFirst);
  if (short_rows(rings) || (!kCopies && rings.num_pieces == 1)) {
    const i32 number = (loads.loading & me) != 0 ? __popc(loads.loading & (me - 1)) : -1,
              columns = piece_columns(args.world, rings, 0);
    const Item item = {loads.weight, loads.what | static_cast<u32>(columns) << kColumnsShift, loads.to};
    const u32 beginning = __ballot_sync(~0u, begins && number >= 0), sum = sums + __popc(beginning & (me - 1));
    load_stages(rows, number, __popc(loads.loading), item, loads.from, columns * sizeof(Y),
                short_rows(rings) ? half_of(rows) : kLongTogether, [&](const Ring& at) {
                  if (begins) tell_turn(sum, at.at | at.phase * kPhase);
                });
    sums += __popc(beginning);
    return;
  }
#pragma unroll 1
  for (i32 i = 0; i < loads.count; ++i) {
#pragma unroll 1
    for (i32 piece = 0; piece < rings.num_pieces; ++piece) {
      const i32 columns = piece_columns(args.world, rings, piece);
      const u32 what = piece == rings.num_pieces - 1 ? loads.what : loads.what & ~kChunkEnd;
      const Item item = {loads.weight, what | static_cast<u32>(columns) << kColumnsShift,
                         loads.to + static_cast<i64>(piece) * rings.home_bytes};
      const u8* from = loads.kept ? loads.from + static_cast<i64>(piece) * rings.columns * sizeof(Y) : loads.from;
#pragma unroll 1
      for (u32 left = loads.loading & lanes.of(i); left != 0; left &= left - 1) {
        const i32 lane = __ffs(left) - 1;
        load_stage(rows, lane_idx() == lane, item, from, columns * sizeof(Y),
                   [&](const Ring& at) { if (begins) tell_turn(sums, at.at | at.phase * kPhase); });
        sums += __shfl_sync(~0u, static_cast<u32>(begins), lane);
      }
    }
  }
}

// The loading warp, lane 0: chunk `named` of this block is the one that `batch` ends.
__device__ __forceinline__ void name_chunk(const World& world, const Batch& batch, u32 named) {
  while (static_cast<i32>(named - ptx::load_acquire_block(&chunks_told)) >= kNamed) ptx::sleep_ns(100);
  u64* word = progress_at(world, batch.source, world.rank, batch.first);
  ptx::store_relaxed_block(chunk_words + named % kNamed, reinterpret_cast<u64>(word));
}

// One warp: the rows that this block takes, with or without credit; it writes nothing to peers but the numbers.
__device__ __forceinline__ void load_all_rows(const CombineArgs& args, Team team, const i32* counts, Ring rows) {
  const Lanes lanes = lanes_for(args.world.topk);
  Chunks chunks = source_chunks(args, counts);
  const i32 total = chunks.total();
  Claims claims =
      claims_of(team, &args.world.state->chunks_taken, total, long_rows(args) ? 0 : total - kLate * team.num_blocks);
  Chunk chunk = {};
  u32 named = 0, sums = 0;
  Batch next = next_batch(args, lanes, chunks, claims, chunk);
  auto begin = [&](const Batch& batch) {
    if (batch.ends_chunk && lane_idx() == 0) name_chunk(args.world, batch, named);
    __syncwarp();  // before the lane that fills the chunk's last stage
    named += batch.ends_chunk;
    if (args.row_weights != nullptr && await_credit()) send_weights(args, lanes, batch);
    return loads_of(args, lanes, batch);
  };
  // Two loops: in one, of which a branch chose the order, the compiler would wait for what is looked up ahead, 10 % of
  // a chunk.
#pragma unroll 1
  while (next.present && claims.asked) {
    const Loads loads = begin(next);
    next = next_batch(args, lanes, chunks, claims, chunk);  // asked for after the last look at this one: one scoreboard
    load_batch(args, lanes, rows, loads, sums);
  }
#pragma unroll 1
  while (next.present) {  // the last chunks, or all
    const Loads loads = begin(next);
    load_batch(args, lanes, rows, loads, sums);
    next = next_batch(args, lanes, chunks, claims, chunk);
  }
  if constexpr (kSums) {
    const u32 teams = kMakers / num_of_team(args.rings);
    if (static_cast<u32>(lane_idx()) < teams) tell_turn(sums + lane_idx(), lane_idx() == 0 ? kFirstOver : kOver);
  } else {
    close_ring(rows, kConverts ? kMakers : 1);
  }
}

// One thread, without credit: what has been loaded goes nowhere, and nobody waits for a stage.
__device__ __forceinline__ void drop_pieces(Ring from) {
#pragma unroll 1
  while ((take_stage(from).what & kNoMore) == 0) {
    ptx::barrier_arrive(from.empty + from.at);
    from.move_on();
  }
}

// One thread: pieces to their homes, and how many chunks are complete. Stages go back as soon as they have been read.
__device__ __forceinline__ void store_pieces(const CombineArgs& args, Ring from) {
  if (!await_credit()) return drop_pieces(from);
  ptx::fence_proxy_global();  // what peers have read, the copy engine writes
  const u32 untold = long_rows(args) ? 1 : kUntold;
  // Bit i of ends: the store before the last i ended a chunk.
  u32 ends = 0, done = 0, stored = 0, freed = 0;
#pragma unroll 1
  while (true) {
    const Item item = take_stage(from);
    if (item.what & kNoMore) break;
    ptx::bulk_store(item.to, from.stage(), home_bytes_of(args.rings, item.columns()));
    ptx::bulk_commit();
    from.move_on();
    ends = ends << 1 | ((item.what & kChunkEnd) != 0);
    if (++stored > kReading) {
      ptx::bulk_wait_read<kReading>();
      ptx::barrier_arrive(from.empty + freed);
      freed = freed + 1 == from.size ? 0 : freed + 1;
    }
    if (untold == 1) ptx::bulk_wait<1>();
    else ptx::bulk_wait<kUntold>();
    if (ends >> untold & 1) ptx::store_release_block(&chunks_done, ++done);
  }
  ptx::bulk_wait_all();
  ptx::store_release_block(&chunks_done, done + __popc(ends & ((1u << untold) - 1)) | kAllDone);
}

// One thread: tells homes which chunks are complete.
__device__ __forceinline__ void tell_chunks(u64 seq) {
#pragma unroll 1
  for (u32 told = 0;;) {
    const u32 known = ptx::load_acquire_block(&chunks_done), done = known & ~kAllDone;
    if (told != done) {
      ptx::fence_sys();
      for (; told != done; ++told)
        ptx::store_relaxed_sys(reinterpret_cast<u64*>(ptx::load_relaxed_block(chunk_words + told % kNamed)), seq);
      ptx::store_release_block(&chunks_told, told);
    } else if (known & kAllDone) {
      return;
    } else {
      ptx::sleep_ns(64);
    }
  }
}

// Exact rows land by (token, k), anywhere in the slot: home must be in this very operation, not only past the slot's
// last use (one that goes on without this rank takes that back: barrier.cuh). Partials land in this rank's own part of
// it.
__device__ __forceinline__ u64 credit_needed(const CombineArgs& args, u64 last, u64 seq) {
  if (KIND == EXACT) return seq;
  return free_from(args.world, last, seq);
}

// The telling warp: whether this block may write to peers, which rows and makers do not wait for.
__device__ __forceinline__ bool find_credit(const CombineArgs& args, Team team, Credit credit, u64 seq) {
  const World& world = args.world;
  if (team.block == 0) warp_tell_started(world, FLAG_COMBINE_STARTED, seq);
  const u64 needed = credit_needed(args, credit.last, seq);
  const bool granted = warp_await_credit(world, FLAG_COMBINE_STARTED, credit, needed, OP_COMBINE);
  __syncwarp();
  if (lane_idx() == 0) {
    has_credit = granted;
    if (!granted) ptx::store_release_block(&chunks_told, kAllDone);
    ptx::barrier_arrive(&credit_known);
  }
  return granted;
}

// One warp of one block: which routing this rank brings, to all peers.
__device__ __forceinline__ void tell_origin(const CombineArgs& args, u64 origin, u64 seq) {
  const World& world = args.world;
  for (i32 peer = lane_idx(); peer < world.size; peer += 32) {
    if (!is_active(peer)) continue;
    *origin_at(world, peer, origins_at(args), world.rank) = origin;
    ptx::store_release_sys(flag_at(world, peer, FLAG_COMBINE, world.rank), seq);
  }
}

// The telling warp, from the first word to the last; then the block has sent.
__device__ __forceinline__ void tell(const CombineArgs& args, Team team, bool sent, u64 seq, u64 origin, u64 start) {
  const World& world = args.world;
  if (sent && team.block == 0) tell_origin(args, origin, seq);
  if (lane_idx() != 0) return;
  if (sent) tell_chunks(seq);
  ptx::allow_next_launch();
  if (!arrive(world, team, TICKET_COMBINE_SEND)) return;
  note_sent(world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, team.num_blocks);
  world.state->combine_seq = seq;
  world.state->combine_slot_seq[args.slot] = seq;
}

}  // namespace ep::ht
