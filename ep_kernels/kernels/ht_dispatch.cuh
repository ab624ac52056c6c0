// High-throughput dispatch: counts travel first, inside the same launch; then every row goes once to each rank that holds one
// of its experts, straight to its final place in that rank's output. No ring, no epilogue copy: only a row that several
// experts of one rank share is replicated there, from its first place.
//
//   every rank                                        memory
//   count own tokens per (rank, expert)          -->  block_counts; grid barrier; prefix over blocks
//   last block: totals to all peers              -->  counts[source], COUNTS[source] = seq
//   all blocks wait for all counts; every rank computes all offsets
//   route tokens again, in order: final rows known
//   x[t] --quantise?--> one row per rank         -->  rows[final row] at the destination, meta, scales
//   every block: PAYLOAD[source] += share       ===>  wait for all sources; replicate; record places
//
// With a previous handle there is no counting, no grid barrier and no exchange: the source has every row's final place in it.
//
// Worked example: ranks 0 and 1 send 2 and 3 rows to rank 0 (FLAT). Both learn [2, 3], so rank 1 writes its rows to rank 0's
// rows 2, 3, 4 while rank 0 writes 0, 1; nobody asks anybody for a slot.
//
// Memory order: all stores of a block -> block barrier -> one release at system scope per peer (COUNTS, PAYLOAD); the receiver
// acquires the flag, then reads; the copy engine's accesses stand behind a proxy fence on either side. A peer's COUNTS of this op
// also proves that it has started the op, so its output slot is free (credit); before the counts themselves are written, the
// slot's credit is awaited.
#pragma once

// This block's tokens: a contiguous range.
__device__ __forceinline__ i32 block_token(const DispatchArgs& args, Team team, i32 block) {
  return static_cast<i32>(static_cast<i64>(args.num_tokens) * block / team.num_blocks);
}

// Rows of this block's tokens per counter, to block_counts.
__device__ __forceinline__ void ht_count(const DispatchArgs& args, Team team, Scratch& scratch) {
  const World& world = args.world;
  const i32 first = block_token(args, team, team.block), past = block_token(args, team, team.block + 1);
  for (i32 i = threadIdx.x; i < num_counters(world); i += blockDim.x) scratch.counters[i] = 0;
  for (i32 token = first; token < past; token += tile_tokens(world)) {
    const i32 count = min(tile_tokens(world), past - token);
    load_tile(args, *scratch.tile, token, count);
    count_tile(world, *scratch.tile, count, scratch.counters);
  }
  __syncthreads();
  i32* mine = world.block_counts + static_cast<i64>(team.block) * num_counters(world);
  for (i32 i = threadIdx.x; i < num_counters(world); i += blockDim.x) mine[i] = scratch.counters[i];
}

// Totals to each peer as soon as that peer's slot is free: one that is silent must not silence this rank towards the others.
// A warp per peer.
__device__ __forceinline__ void tell_counts(const DispatchArgs& args, const i32* totals, u64 seq) {
  const World& world = args.world;
  const u64 credit = credit_needed(world, args.slot, seq);
  for (i32 i = warp_idx(); i < world.size; i += num_warps()) {
    const i32 peer = (world.rank + i) % world.size;
    if (!is_active(peer)) continue;
    const u64* started = flag_at(world, world.rank, FLAG_STARTED, peer);
    bool free = true;
    if (lane_idx() == 0) free = spin::wait_for(world, started, credit, OP_DISPATCH, PHASE_CREDIT, peer);
    if (!__all_sync(~0u, free)) continue;
    i32* theirs = counts_at(args, peer, world.rank);
    for (i32 key = lane_idx(); key < num_counters(world); key += 32) theirs[key] = totals[key];
    __syncwarp();
    if (lane_idx() != 0) continue;
    *origin_at(world, peer, origins_at(args), world.rank) = seq;
    ptx::store_release_sys(flag_at(world, peer, FLAG_COUNTS, world.rank), seq);
  }
}

// After the grid barrier: counters = rows of the blocks before this one; the last block sends the totals to all peers.
__device__ __forceinline__ bool ht_exchange_counts(const DispatchArgs& args, Team team, Scratch& scratch, u64 seq) {
  const World& world = args.world;
  const i32 n = num_counters(world);
  const bool last = team.block == team.num_blocks - 1;
  for (i32 i = threadIdx.x; i < n; i += blockDim.x) {
    i32 before = 0;
    for (i32 block = 0; block < team.block; ++block) before += world.block_counts[static_cast<i64>(block) * n + i];
    scratch.total[i] = before + scratch.counters[i];
    scratch.counters[i] = before;
  }
  __syncthreads();
  if (last) tell_counts(args, scratch.total, seq);
  return await_peers(world, FLAG_COUNTS, seq, OP_DISPATCH, PHASE_COUNTS, 0, nullptr);
}

// From everybody's counts: start[key] = final row, at the destination, of this source's first row for that key. False where a
// peer brought a handle and so no counts.
__device__ __forceinline__ bool send_layout(const DispatchArgs& args, Scratch& scratch) {
  const World& world = args.world;
  const i32 stride = world.local_stride, keys = num_keys(world);
  const bool differs = origin_differs(world, origins_at(args), scratch.origin);
  for (i32 key = threadIdx.x; key < num_counters(world); key += blockDim.x) {
    i32 before = 0, sum = 0;
    for (i32 source = 0; source < world.size; ++source) {
      if (source == world.rank) before = sum;
      if (is_active(source)) sum += counts_at(args, world.rank, source)[key];
    }
    scratch.total[key] = sum;
    scratch.start[key] = before;
    if (LAYOUT == EXPERT_MAJOR && key < keys) scratch.start[key] += key % stride * world.capacities[key / stride];
  }
  if (__syncthreads_or(differs) != 0) return false;
  for (i32 rank = warp_idx(); LAYOUT == GROUPED && rank < world.size; rank += num_warps()) {
    prefix_sum(stride, scratch.offset + rank * stride,
               [&](i32 e) { return aligned(scratch.total[rank * stride + e], world.alignment); });
    __syncwarp();
    for (i32 e = lane_idx(); e < stride; e += 32) scratch.start[rank * stride + e] += scratch.offset[rank * stride + e];
  }
  __syncthreads();
  return true;
}

// Final rows of a tile's entries.
__device__ __forceinline__ void place_tile(const DispatchArgs& args, Scratch& scratch, i32 count) {
  const World& world = args.world;
  RouteTile& tile = *scratch.tile;
  for (i32 e = threadIdx.x; e < count * world.topk; e += blockDim.x) {
    const i32 rank = tile.rank[e];
    if (rank < 0) continue;
    const i32 position = tile.position[e - e % world.topk + tile.lead[e]];
    if (LAYOUT == RANK_MAJOR) tile.place[e] = world.rank * world.max_tokens + position;
    else if (LAYOUT == FLAT) tile.place[e] = admit(scratch.start[num_keys(world) + rank] + position, 0, world.capacities[rank]);
    else tile.place[e] = admit(scratch.start[rank * world.local_stride + tile.slot[e]] + tile.expert_index[e], tile.slot[e],
                               world.capacities[rank]);
  }
  __syncthreads();
}

// Where the payload of a lead entry lands: the first place that was not dropped among the token's experts on that rank.
__device__ __forceinline__ u8* landing_of(const DispatchArgs& args, const RouteTile& tile, i32 entry) {
  const i32 topk = args.world.topk, rank = tile.rank[entry];
  for (i32 e = entry; e < entry - entry % topk + topk; ++e)
    if (tile.rank[e] == rank && tile.place[e] >= 0) return row_at(args, rank, tile.place[e]);
  return nullptr;
}

__device__ __forceinline__ void ht_send_rows(const DispatchArgs& args, Team team, Pipe& pipe, Scratch& scratch) {
  const World& world = args.world;
  const i32 pieces = pieces_per_row(args);
  const i32 first = block_token(args, team, team.block), past = block_token(args, team, team.block + 1);
  RouteTile& tile = *scratch.tile;
  for (i32 token = first; token < past; token += tile_tokens(world)) {
    const i32 count = min(tile_tokens(world), past - token);
    if (args.cached) {
      load_tile_again(args, tile, token, count);
    } else {
      load_tile(args, tile, token, count);
      order_tile(world, tile, count, scratch.counters);
      place_tile(args, scratch, count);
    }
    record_tile(args, tile, tile.place, 0, token, count);
    send_tile(args, pipe, tile, token, static_cast<i64>(token) * pieces, static_cast<i64>(token + count) * pieces,
              [&](i32 entry) { return landing_of(args, tile, entry); });
  }
}

// Rows that several local experts share: from the first place to the others.
__device__ __forceinline__ void ht_replicate(const DispatchArgs& args, Team team, Pipe& pipe, const Scratch& scratch) {
  const World& world = args.world;
  const i32 pieces = pieces_per_row(args), piece_bytes = args.work.piece_bytes;
  const i64 units = static_cast<i64>(scratch.row_start[world.size]) * pieces;
  auto place_at = [&](i64 unit) {
    const i64 row = unit / pieces;
    const i32 from = source_of(scratch, row), position = static_cast<i32>(row - scratch.row_start[from]);
    return lane_place(args, from, position);
  };
  auto source = [&](i64 unit) -> Piece {
    const i32 place = place_at(unit), piece = static_cast<i32>(unit % pieces);
    const u32 placed = __ballot_sync(~0u, place >= 0);
    if (__popc(placed) < 2) return {nullptr, 0};
    const u8* row = row_at(args, world.rank, __shfl_sync(~0u, place, __ffs(placed) - 1));
    return {row + static_cast<i64>(piece) * piece_bytes,
            static_cast<u32>(min(piece_bytes, world.row_bytes - piece * piece_bytes))};
  };
  auto deliver = [&](i64 unit, u8* stage, u32 num_bytes) {
    const i32 place = place_at(unit);
    const u32 placed = __ballot_sync(~0u, place >= 0);
    if (place >= 0 && lane_idx() != __ffs(placed) - 1)
      ptx::bulk_store(row_at(args, world.rank, place) + unit % pieces * piece_bytes, stage, num_bytes);
  };
  copy_rows(pipe, team.block + static_cast<i64>(team.num_blocks) * warp_idx(), units,
            static_cast<i64>(team.num_blocks) * num_warps(), source, deliver);
  ptx::bulk_wait_all();
}

__device__ __forceinline__ bool ht_send(const DispatchArgs& args, Team team, Pipe& pipe, Scratch& scratch, u64 seq) {
  ht_count(args, team, scratch);
  if (!meet(args.world, team, OP_DISPATCH)) return false;
  if (!ht_exchange_counts(args, team, scratch, seq)) return false;
  if (send_layout(args, scratch)) ht_send_rows(args, team, pipe, scratch);
  return true;
}

// With a previous handle: all rows are placed already. Rows go to their final places, so a peer must be in this very
// operation, not only past the slot's last use: one that has gone on without this rank never is.
__device__ __forceinline__ bool ht_send_again(const DispatchArgs& args, Team team, Pipe& pipe, Scratch& scratch, u64 seq) {
  bool credit = true;
  if (warp_idx() == 0) credit = warp_await_peers(args.world, FLAG_STARTED, seq, OP_DISPATCH, PHASE_CREDIT);
  if (__syncthreads_or(!credit) != 0) return false;
  if (team.block == team.num_blocks - 1) announce_again(args, scratch.origin, seq);
  ht_send_rows(args, team, pipe, scratch);
  return true;
}

__device__ __forceinline__ void ht_receive(const DispatchArgs& args, Team team, Pipe& pipe, Scratch& scratch, u8* shared, u64 number, u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  const bool arrived =
      await_peers(world, FLAG_PAYLOAD, seq * kWhole, OP_DISPATCH, PHASE_PAYLOAD, start, waits_at(shared));
  if (arrived && receive_layout(args, scratch)) {
    if (team.block == 0) args.cached ? write_kept_counts(args) : write_counts(args, scratch);
    if (kPerExpert) ht_replicate(args, team, pipe, scratch);
    record_rows(args, team, scratch);
    if (args.out_scales != nullptr) place_all_scales(args, team, scratch);
  } else {
    deliver_nothing(args, team, scratch, arrived);
  }
  note_end(world, team, number, waits_at(shared));
}

__device__ __forceinline__ void ht_dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  Pipe pipe = open_pipe(args.work, shared);
  Scratch scratch = carve(world, shared);
  load_active(world);
  __syncthreads();
  const u64 stop = ptx::load_volatile(&world.state->aborted);
  const bool sends = args.work.halves & kSend;
  const u64 seq = sends ? ptx::load_volatile(&world.state->dispatch_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  if (stop != STOP_RUNNING) return deliver_nothing(args, team, scratch, false);
  const u64 number = record_number(world, args.work.halves, args.op);
  scratch.origin = origin_of(args, seq);
  if (sends) {
    const u64 start = ptx::now_ns();
    if (team.block == 0) tell_peers(world, FLAG_STARTED, seq);
    const bool sent = args.cached ? ht_send_again(args, team, pipe, scratch, seq) : ht_send(args, team, pipe, scratch, seq);
    finish_send(args, team, seq, start, sent);
  }
  if (args.work.halves & kReceive) ht_receive(args, team, pipe, scratch, shared, number, seq);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_dispatch(const __grid_constant__ DispatchArgs args) {
  ht_dispatch_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1) ht_dispatch(const DispatchArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  ht_dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
