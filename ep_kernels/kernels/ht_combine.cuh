// High-throughput combine: each rank sums the rows that serve one (source,
// position) in fp32, in ascending k, rounds once and pushes the partial
// straight home; home sums the partials of a token in ascending rank, as they
// arrive.
//
//   owner rank                                              home rank
//   y[places[source][position][k]] --bulk load--> rows
//     fp32, ascending k -> made (or rows as they are)
//     made --bulk store------------------------------> home[owner][position]
//   CHUNK positions complete: progress[owner][chunk] = seq   ==>  bulk load -->
//   home stages
//                                                            z[t] = sum over
//                                                            ranks ascending,
//                                                            fp32 -> output
//                                                            dtype
//
// Both halves run side by side in every block, a task per warp: one loads rows
// of y, one stores, one tells peers what has come, one loads what has come
// home; the others add. Stages of shared memory (rings.cuh) lie between them.
//
// KIND 0: rows per expert, combine weights them. 1: rows per rank, moved as
// they are. 2: exact: every routed row travels to home[token][k] and is
// weighted at home, in ascending k. Y is the output dtype, C the combine dtype
// (e4m3: block-128 scales travel behind the columns). Rows of this very rank
// that need no change are read where they lie, where one launch does both
// halves.
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its
// position 1, and to rank 1 (k = 1). Rank 0 writes bf16(w0 * y0 + w3 * y3) to
// rank 2's home[0][1] and, with positions 0..3 complete, sets rank 2's
// progress[0][0]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in its own
// `home` table, awaits both chunks and adds the two rows.
//
// A partial whose rows were all dropped travels as +0. Memory order: a bulk
// store that is complete is ordered before what its thread does next: a counter
// in shared memory (release, block), acquired by the telling warp, whose fence
// (system) stands before the words of progress. Home acquires these, and a
// proxy fence stands before its loads. Progress only grows: a higher seq
// vouches for a lower one, for its kernel came later on the owner's stream.
// Reuse of a slot: a rank that has started num_in_flight combines more has, in
// stream order, read the slot. Which routing a rank brings is told before any
// row (FLAG_COMBINE): where they differ nobody waits for rows.
#pragma once

constexpr i32 PER_EXPERT = 0, PER_RANK = 1, EXACT = 2;
constexpr bool kCopies = kSameType && KIND != PER_EXPERT;  // rows travel as they are
constexpr i32 kSame = 0, kFailed = 1,
              kDiffers = 2;  // verdict of a block: one routing, a wait failed, several routings

// Tasks by warp; the rest of the block adds.
constexpr i32 kRowLoader = 0, kStorer = 1, kTeller = 2, kHomeLoader = 3, kFirstMaker = 4;
constexpr i32 kMakers = kCopies ? 0 : 8, kFirstSummer = kFirstMaker + kMakers, kSummers = THREADS / 32 - kFirstSummer;
constexpr u32 kReading = kCopies ? 4 : 3;  // stores that may still read their stages: less than there are
constexpr u32 kUntold = 8;                 // stores that may be under way before a chunk is known to be complete

__shared__ u32 chunks_done;  // chunks of this block whose stores are complete
__shared__ i32 verdict;

__device__ __forceinline__ i64 position_of(const World& world, i32 owner, i32 position) {
  return static_cast<i64>(owner) * world.max_tokens + position;
}

__device__ __forceinline__ u8* home_at(const CombineArgs& args, i32 rank, i64 row) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.home + args.slot * map.home_stride) + row * args.world.home_row_bytes;
}

__device__ __forceinline__ f32* home_weights_at(const CombineArgs& args, i32 rank, i64 position) {
  const RegionMap& map = args.world.map;
  return region_at<f32>(args.world, rank, map.home_weights + args.slot * map.home_weights_stride) + position * args.world.topk;
}

__device__ __forceinline__ u64 origins_at(const CombineArgs& args) {
  return args.world.map.home_origins + args.slot * args.world.map.home_origins_stride;
}

// The word in the region of rank `at` that says how far `owner` has come with the chunk of this position.
__device__ __forceinline__ u64* progress_at(const World& world, i32 at, i32 owner, i32 position) {
  const i32 chunks = (world.max_tokens + CHUNK - 1) / CHUNK;
  return region_at<u64>(world, at, world.map.flags) + NUM_FLAGS * world.size + static_cast<i64>(owner) * chunks +
         position / CHUNK;
}

// Rows of this very rank stay where they are.
__device__ __forceinline__ bool reads_own(const CombineArgs& args) { return kCopies && args.work.halves == (kSend | kReceive); }

// A warp looks at several (position, k), or (token, k), at once: a lane for each.
struct Lanes {
  i32 width, count;  // lanes of a position; positions at once, CHUNK at most
  i32 index, k;      // this lane's

  __device__ __forceinline__ u32 of(i32 position) const {
    return (width == 32 ? ~0u : (1u << width) - 1) << (position * width);
  }
};

__device__ __forceinline__ Lanes lanes_for(i32 topk) {
  i32 width = 1;
  while (width < topk) width *= 2;
  return {width, min(CHUNK, 32 / width), lane_idx() / width, lane_idx() % width};
}

// ---- send: this rank as owner ----

// The chunks of a block, in the order in which all its warps take them. Chunk numbers rise together over all sources and
// blocks; which source a block serves changes from chunk to chunk, so all links are busy at all times.
struct Chunk {
  i32 source, first, count;  // positions first .. first + count
};

struct Chunks {
  const i32* rows;
  i32 rank, size, num_sources, blocks;
  i64 at, past;

  __device__ __forceinline__ bool next(Chunk& chunk) {
    for (; at < past; at += blocks) {
      const i32 number = static_cast<i32>(at / num_sources);
      const i32 turn = static_cast<i32>((at + static_cast<i64>(number) * num_sources / blocks) % num_sources);
      chunk.source = (rank + 1 + turn) % size;
      chunk.first = number * CHUNK;
      chunk.count = min(CHUNK, rows[chunk.source] - chunk.first);
      if (chunk.count <= 0) continue;
      at += blocks;
      return true;
    }
    return false;
  }
};

__device__ __forceinline__ Chunks chunks_of(const CombineArgs& args, Team team, const i32* rows) {
  const World& world = args.world;
  Chunks chunks = {rows, world.rank, world.size, world.size - reads_own(args), team.num_blocks, team.block, 0};
  i32 most = 0;
  for (i32 turn = 0; turn < chunks.num_sources; ++turn) most = max(most, rows[(world.rank + 1 + turn) % world.size]);
  chunks.past = static_cast<i64>((most + CHUNK - 1) / CHUNK) * chunks.num_sources;
  return chunks;
}

// What a warp knows of a few positions of a chunk, each lane of its (position, k).
struct Batch {
  i32 source, first, count;
  bool present, ends_chunk;
  i32 place, token;
  f32 weight;
};

__device__ __forceinline__ Batch next_batch(const CombineArgs& args, const Lanes& lanes, Chunks& chunks, Chunk& chunk) {
  const World& world = args.world;
  Batch batch = {};
  batch.place = -1;
  batch.present = chunk.count > 0 || chunks.next(chunk);
  if (!batch.present) return batch;
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

// Rows of y that make one row of `home`, piece by piece: those of the lanes in `taken`, ascending; none: zeros.
__device__ __forceinline__ void load_rows(const CombineArgs& args, Ring& rows, const Batch& batch, u32 taken, u8* to,
                                          bool ends) {
  const World& world = args.world;
  const Rings& rings = args.rings;
#pragma unroll 1
  for (i32 piece = 0; piece < rings.num_pieces; ++piece) {
    const i32 columns = columns_of(world, rings, piece);
    const u32 end = kLast | (ends && piece == rings.num_pieces - 1 ? kChunkEnd : 0);
    u32 left = taken, what = kFirst | static_cast<u32>(columns) << kColumnsShift;
    u8* home = to + static_cast<i64>(piece) * rings.home_bytes;
    do {
      const i32 lane = left == 0 ? 0 : __ffs(left) - 1;
      const i32 place = __shfl_sync(~0u, batch.place, lane);
      const f32 weight = __shfl_sync(~0u, batch.weight, lane);
      const u8* row = args.y + (static_cast<i64>(place) * world.hidden + piece * rings.columns) * sizeof(Y);
      const bool last = (left & (left - 1)) == 0;
      load_stage(rows, {left == 0 ? 1.0f : weight, what | (last ? end : 0), home}, left == 0 ? world.zeros : row,
                 columns * sizeof(Y));
      what &= ~kFirst;
      left &= left - 1;
    } while (left != 0);
  }
}

__device__ __forceinline__ void load_batch(const CombineArgs& args, const Lanes& lanes, Ring& rows, const Batch& batch) {
  const World& world = args.world;
  if (args.row_weights != nullptr) send_weights(args, lanes, batch);
  const u32 served = __ballot_sync(~0u, batch.place != -1), kept = __ballot_sync(~0u, batch.place >= 0);
#pragma unroll 1
  for (i32 i = 0; i < batch.count; ++i) {
    const bool ends = batch.ends_chunk && i == batch.count - 1;
    if constexpr (KIND == EXACT) {
      for (u32 left = served & lanes.of(i); left != 0; left &= left - 1) {
        const i32 lane = __ffs(left) - 1;
        const i64 row = static_cast<i64>(__shfl_sync(~0u, batch.token, lane)) * world.topk + lane % lanes.width;
        load_rows(args, rows, batch, kept & 1u << lane, home_at(args, batch.source, row), ends && (left & (left - 1)) == 0);
      }
    } else {
      u32 taken = kept & lanes.of(i);
      if (KIND == PER_RANK) taken &= 0u - taken;
      const i64 row = position_of(world, world.rank, batch.first + i);
      load_rows(args, rows, batch, taken, home_at(args, batch.source, row), ends);
    }
  }
}

// One warp: everything that this block owes.
__device__ __forceinline__ void load_all_rows(const CombineArgs& args, Chunks chunks, Ring rows) {
  const Lanes lanes = lanes_for(args.world.topk);
  Chunk chunk = {};
  Batch next = next_batch(args, lanes, chunks, chunk);
#pragma unroll 1
  while (next.present) {
    const Batch batch = next;
    next = next_batch(args, lanes, chunks, chunk);
    load_batch(args, lanes, rows, batch);
  }
  close_ring(rows);
}

// The makers: rows to partials.
template <i32 kWarps>
__device__ __forceinline__ void make_partials(const CombineArgs& args, Ring rows, Ring made) {
  Sums<kMadeColumns, kWarps> sums;
  sums.warp = warp_idx() - kFirstMaker;
#pragma unroll 1
  while (true) {
    const Item item = take_stage(rows);
    if ((item.what & kNoMore) == 0) add_row<KIND == PER_EXPERT>(sums, item, rows.stage());
    give_back(rows);
    if ((item.what & (kLast | kNoMore)) == 0) continue;
    made.await_empty();
    if (item.what & kLast) write_partial(sums, args.rings, item.columns(), made.stage());
    if (sums.warp == 0 && lane_idx() == 0) made.items[made.at] = item;
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_idx() == 0) ptx::barrier_arrive(made.full + made.at);
    made.move_on();
    if (item.what & kNoMore) return;
  }
}

// One thread: pieces to their homes, and how many chunks are complete. Stages go back as soon as they have been read.
__device__ __forceinline__ void store_pieces(const CombineArgs& args, Ring from) {
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
    ptx::bulk_wait<kUntold>();
    if (ends >> kUntold & 1) ptx::store_release_block(&chunks_done, ++done);
  }
  ptx::bulk_wait_all();
  ptx::store_release_block(&chunks_done, done + __popc(ends & ((1u << kUntold) - 1)));
}

// One thread: tells homes which chunks are complete.
__device__ __forceinline__ void tell_chunks(const World& world, Chunks chunks, u64 seq) {
  Chunk chunk;
  u32 told = 0;
  bool more = chunks.next(chunk);
#pragma unroll 1
  while (more) {
    const u32 done = ptx::load_acquire_block(&chunks_done);
    if (done == told) {
      ptx::sleep_ns(64);
      continue;
    }
    ptx::fence_sys();
    for (; told < done; ++told) {
      ptx::store_relaxed_sys(progress_at(world, chunk.source, world.rank, chunk.first), seq);
      more = chunks.next(chunk);
    }
  }
}

// Exact rows land by (token, k), anywhere in the slot: home must be in this very operation, not only past the slot's last use
// (one that has gone on without this rank never is). Partials land in this rank's own part of it.
__device__ __forceinline__ u64 credit_needed(const CombineArgs& args, u64 last, u64 seq) {
  if (KIND == EXACT) return seq;
  return last == 0 ? 0 : min(seq, last + args.world.num_in_flight);
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
__device__ __forceinline__ void tell(const CombineArgs& args, Team team, Chunks chunks, bool sent, u64 seq, u64 origin,
                                     u64 start) {
  const World& world = args.world;
  if (sent && team.block == 0) tell_origin(args, origin, seq);
  if (lane_idx() != 0) return;
  if (sent) tell_chunks(world, chunks, seq);
  ptx::allow_next_launch();
  if (!arrive(world, team, TICKET_COMBINE_SEND)) return;
  note_sent(world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, team.num_blocks);
  world.state->combine_seq = seq;
  world.state->combine_slot_seq[args.slot] = seq;
}

// ---- receive: this rank as home ----

// One warp: every lane waits until the word of its peer is there, if it waits at all. False where the rank was stopped.
__device__ __forceinline__ bool await_words(const World& world, bool waits, i32 peer, const u64* word, u64 seq, u64 start,
                                            u64* waited) {
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

// Tokens of a block: lanes.count at a time, in turn.
__device__ __forceinline__ Home load_home(const CombineArgs& args, const Lanes& lanes, i64 first) {
  const i64 token = first + lanes.index;
  Home home = {-1, -1, -1, -1};
  if (lanes.index < lanes.count && lanes.k < args.world.topk && token < args.num_tokens)
    home = args.home[token * args.world.topk + lanes.k];
  return home;
}

// The rows that make up the tokens of a batch, as its lanes know them.
struct Terms {
  u32 present;     // lanes that have one
  i32 index;       // this one's place in the sum of its token
  const u8* from;  // its row
};

__device__ __forceinline__ Terms terms_of(const CombineArgs& args, const Lanes& lanes, const Home& home, i64 first) {
  const World& world = args.world;
  const bool served = home.rank >= 0;
  const u32 same = __match_any_sync(~0u, served ? lanes.index * MAX_RANKS + home.rank : -1);
  const bool term = served && (KIND == EXACT || __ffs(same) - 1 == lane_idx());
  Terms terms = {__ballot_sync(~0u, term), 0, world.zeros};
  for (i32 k = 0; k < lanes.width; ++k) {
    const i32 other = lanes.index * lanes.width + k, rank = __shfl_sync(~0u, home.rank, other);
    if (terms.present >> other & 1) terms.index += KIND == EXACT ? k < lanes.k : rank < home.rank;
  }
  if (!term) return terms;
  if (reads_own(args) && home.rank == world.rank) {
    if (home.place >= 0) terms.from = args.y + static_cast<i64>(home.place) * world.hidden * sizeof(Y);
  } else {
    const i64 row = KIND == EXACT ? (first + lanes.index) * world.topk + lanes.k : position_of(world, home.rank, home.position);
    terms.from = home_at(args, world.rank, row);
  }
  return terms;
}

// The next token of a batch: its rows to stages, piece by piece.
__device__ __forceinline__ void load_token(const CombineArgs& args, const Lanes& lanes, Ring& ring, const Terms& terms,
                                           i32 token, f32 weight, u8* z) {
  const Rings& rings = args.rings;
  const u32 mine = lanes.of(token), here = terms.present & mine;
  const i32 count = max(1, __popc(here));
#pragma unroll 1
  for (i32 piece = 0; piece < rings.num_pieces; ++piece) {
    const i32 columns = columns_of(args.world, rings, piece);
    const u32 what = static_cast<u32>(columns) << kColumnsShift;
#pragma unroll 1
    for (i32 i = 0; i < count; ++i) {
      const u32 found = __ballot_sync(~0u, (here >> lane_idx() & 1) && terms.index == i);
      const i32 lane = found == 0 ? 0 : __ffs(found) - 1;
      const u8* row = reinterpret_cast<const u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(terms.from), lane));
      const f32 of_row = __shfl_sync(~0u, weight, lane);
      const bool zero = found == 0 || row == args.world.zeros;
      const Item item = {found == 0 ? 1.0f : of_row, what | (i == 0 ? kFirst : 0) | (i == count - 1 ? kLast : 0),
                         z + static_cast<i64>(piece) * rings.columns * sizeof(Y)};
      load_stage(ring, item, zero ? row : row + static_cast<i64>(piece) * rings.home_bytes, home_bytes_of(rings, columns));
    }
  }
}

// The numbers that came home beside a batch's rows.
__device__ __forceinline__ void receive_weights(const CombineArgs& args, const Lanes& lanes, const Home& home, i64 first) {
  const World& world = args.world;
  const i64 token = first + lanes.index;
  if (lanes.index >= lanes.count || lanes.k >= world.topk || token >= args.num_tokens) return;
  f32 weight = 0.0f;
  if (home.rank == world.rank && reads_own(args)) {
    const i64 index = KIND == PER_RANK ? static_cast<i64>(home.place) * world.topk + lanes.k : home.place;
    if (home.place >= 0) weight = args.row_weights[index];
  } else if (home.rank >= 0) {
    weight = home_weights_at(args, world.rank, position_of(world, home.rank, home.position))[lanes.k];
  }
  args.z_weights[token * world.topk + lanes.k] = weight;
}

// One warp: everything that comes home to this block.
__device__ __forceinline__ void load_all_home(const CombineArgs& args, Team team, Ring ring, u64 seq, u64 origin, u64 start,
                                              u64* waited) {
  const World& world = args.world;
  const Lanes lanes = lanes_for(world.topk);
  const i64 step = static_cast<i64>(team.num_blocks) * lanes.count;
  i64 first = static_cast<i64>(team.block) * lanes.count;
  Home next = load_home(args, lanes, first);
  bool ok = agree(args, seq, origin, start, waited);
#pragma unroll 1
  for (; ok && first < args.num_tokens; first += step) {
    const Home home = next;
    next = load_home(args, lanes, first + step);
    const i64 entry = (first + lanes.index) * world.topk + lanes.k;
    const f32 weight = KIND == EXACT && home.rank >= 0 && args.apply_weights ? args.topk_weights[entry] : 1.0f;
    const bool comes = home.rank >= 0 && !(reads_own(args) && home.rank == world.rank);
    const i32 from = max(home.rank, 0);
    ok = await_words(world, comes, from, progress_at(world, world.rank, from, max(home.position, 0)), seq, start, waited);
    if (!ok) {
      if (lane_idx() == 0) verdict = kFailed;
      break;
    }
    ptx::fence_proxy_async();
    const Terms terms = terms_of(args, lanes, home, first);
    if (args.z_weights != nullptr) receive_weights(args, lanes, home, first);
#pragma unroll 1
    for (i32 i = 0; i < lanes.count && first + i < args.num_tokens; ++i)
      load_token(args, lanes, ring, terms, i, weight, args.z + (first + i) * world.hidden * sizeof(Y));
  }
  close_ring(ring);
}

// The summing warps: stages to z.
__device__ __forceinline__ void sum_home(const CombineArgs& args, Ring ring) {
  Sums<kHomeColumns, kSummers> sums;
  sums.warp = warp_idx() - kFirstSummer;
#pragma unroll 1
  while (true) {
    const Item item = take_stage(ring);
    if (item.what & kNoMore) return;
    add_partial<KIND == EXACT>(sums, args.rings, item, ring.stage());
    give_back(ring);
    if (item.what & kLast) write_z(sums, item.columns(), item.to);
  }
}

// After a failed wait, or where ranks brought different routings: NaN in all tokens of this block, in every output dtype.
__device__ __forceinline__ void poison(const CombineArgs& args, Team team) {
  const i32 topk = args.world.topk, halves = args.world.hidden * static_cast<i32>(sizeof(Y)) / 2;
  const Lanes lanes = lanes_for(topk);
  const i64 step = static_cast<i64>(team.num_blocks) * lanes.count;
  for (i64 first = static_cast<i64>(team.block) * lanes.count; first < args.num_tokens; first += step) {
    const i32 count = static_cast<i32>(min(static_cast<i64>(lanes.count), args.num_tokens - first));
    u16* rows = reinterpret_cast<u16*>(args.z) + first * halves;
    for (i64 i = threadIdx.x; i < static_cast<i64>(count) * halves; i += THREADS) rows[i] = 0xFFFF;
    for (i32 i = threadIdx.x; args.z_weights != nullptr && i < count * topk; i += THREADS)
      args.z_weights[first * topk + i] = __uint_as_float(~0u);
  }
}

// ---- both ----

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  i32* rows = reinterpret_cast<i32*>(after_waits(world, shared));
  Item* items = reinterpret_cast<Item*>(rows + (world.size + 3) / 4 * 4);
  Rooms rooms = carve_rooms(args.rings, shared, shared + args.work.stage_offset, items);
  u64* waited = waits_at(shared);
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  load_active(world);
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) waited[i] = 0;
  if (threadIdx.x == 0) {
    chunks_done = 0;
    verdict = kSame;
    open_ring(rooms.rows, 1, kCopies ? 1 : kMakers);
    if constexpr (!kCopies) open_ring(rooms.made, kMakers, 1);
    open_ring(rooms.home, 1, kSummers);
    ptx::fence_barrier_init();
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::wait_for_previous_launch();
  const u64 stop = ptx::load_volatile(&world.state->aborted), origin = ptx::load_volatile(args.origin);
  const u64 seq = sends ? ptx::load_volatile(&world.state->combine_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  if (__syncthreads_or(stop != STOP_RUNNING) != 0) {  // z is known where this launch receives
    if (receives) poison(args, team);
    return;
  }
  const u64 number = record_number(world, args.work.halves, args.op),
            start = note_receive(world, team, args.work.halves, number);
  const u64 last = ptx::load_volatile(&world.state->combine_slot_seq[args.slot]);
  bool credit = true;
  for (i32 s = threadIdx.x; sends && s < world.size; s += THREADS) rows[s] = is_active(s) ? args.source_rows[s] : 0;
  if (sends && warp_idx() == kTeller) {
    if (team.block == 0) warp_tell_started(world, FLAG_COMBINE_STARTED, seq);
    credit = warp_await_peers(world, FLAG_COMBINE_STARTED, credit_needed(args, last, seq), OP_COMBINE, PHASE_CREDIT);
  }
  const bool sent = sends && __syncthreads_or(!credit) == 0;
  const i32 warp = warp_idx();
  if (warp == kRowLoader) {
    if (sent) load_all_rows(args, chunks_of(args, team, rows), rooms.rows);
  } else if (warp == kStorer) {
    if (sent && lane_idx() == 0) store_pieces(args, kCopies ? rooms.rows : rooms.made);
  } else if (warp == kTeller) {
    if (sends) tell(args, team, chunks_of(args, team, rows), sent, seq, origin, start);
  } else if (warp == kHomeLoader) {
    if (receives) load_all_home(args, team, rooms.home, seq, origin, start, waited);
  } else if (warp < kFirstSummer) {
    if constexpr (!kCopies)
      if (sent) make_partials<kMakers>(args, rooms.rows, rooms.made);
  } else if (receives) {
    sum_home(args, rooms.home);
  }
  if (!receives) return;
  __syncthreads();
  if (verdict != kSame) poison(args, team);
  if (verdict == kDiffers && team.block == 0) report_difference(world, OP_COMBINE, origins_at(args), origin);
  note_end(world, team, number, waited);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_combine(const __grid_constant__ CombineArgs args) {
  combine_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_combine(const CombineArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  combine_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
