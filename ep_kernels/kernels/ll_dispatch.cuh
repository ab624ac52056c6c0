// Low-latency dispatch: each token's row goes once to every rank that holds one of its experts, into a fixed slot, without
// exchanging counts first; the receiver expands rows to their final layout from its own memory.
//
//   source rank                          destination rank
//   route tokens (redundantly per block)
//   x[t] --quantise?--> one row per rank --> staged[source][position], meta[source][position], scales
//   counts, origin -------------------------> counts[source], origins[source]
//   every block: PAYLOAD[source] += share  =>  wait for all shares of all sources
//                                            counts -> offsets; staged -> rows (RANK_MAJOR: nothing to move)
//
// With a previous handle nothing is routed or counted: the source has every row's position in it (Home), the receiver every
// row's place; rows, records (weights may be new) and the origin of the routing travel.
//
// Worked example: R = 2, K = 2, rank 1 sends token 0 to experts (rank 0, slot 1) and (rank 0, slot 0): one row lands in
// rank 0's staged[1][0] with records {1, index}, {0, index}; rank 0 copies it to both experts' groups.
//
// Memory order. Rows and records: bulk and ordinary stores -> bulk_wait_all -> block barrier ->
// red.release.sys PAYLOAD, read by ld.acquire.sys -> block barrier -> fence.proxy.async -> loads and copies.
// Reuse of a slot: see credit_needed; the peer's STARTED flag is in stream order after its last read of the slot.
#pragma once

// Units of this block: a contiguous range, so that positions follow from the tokens before it.
__device__ __forceinline__ bool ll_send(const DispatchArgs& args, Team team, Pipe& pipe, Scratch& scratch, u64 seq) {
  const World& world = args.world;
  const i32 pieces = pieces_per_row(args), per_tile = tile_tokens(world);
  const i64 units = static_cast<i64>(args.num_tokens) * pieces;
  const i64 begin = units * team.block / team.num_blocks, end = units * (team.block + 1) / team.num_blocks;
  const i32 first = begin < end ? static_cast<i32>(begin / pieces) : args.num_tokens;
  const i32 past = begin < end ? static_cast<i32>((end - 1) / pieces) + 1 : args.num_tokens;
  RouteTile& tile = *scratch.tile;
  bool credit = true;  // awaited by one warp while the others route
  if (warp_idx() == num_warps() - 1)
    credit = warp_await_peers(world, FLAG_STARTED, credit_needed(world, args.slot, seq), OP_DISPATCH, PHASE_CREDIT);
  for (i32 i = threadIdx.x; i < num_counters(world); i += blockDim.x) scratch.counters[i] = 0;
  if (begin < end && !args.cached) {
    for (i32 token = 0; token < first; token += per_tile) {
      const i32 count = min(per_tile, first - token);
      load_tile(args, tile, token, count);
      count_tile(world, tile, count, scratch.counters);
    }
  }
  if (__syncthreads_or(!credit) != 0) return false;
  const bool announces = team.block == team.num_blocks - 1;
  if (announces && args.cached) announce_again(args, scratch.origin, seq);
  for (i32 token = first; token < past; token += per_tile) {
    const i32 count = min(per_tile, past - token);
    if (args.cached) {
      load_tile_again(args, tile, token, count);
    } else {
      load_tile(args, tile, token, count);
      order_tile(world, tile, count, scratch.counters);
    }
    record_tile(args, tile, tile.expert_index, static_cast<i64>(token) * pieces < begin ? 1 : 0, token, count);
    const i64 from = max(begin, static_cast<i64>(token) * pieces);
    const i64 to = min(end, static_cast<i64>(token + count) * pieces);
    send_tile(args, pipe, tile, token, from, to, false, [&](i32 entry) {
      return staged_at(args, tile.rank[entry], world.rank, tile.position[entry]);
    });
  }
  __syncthreads();
  if (announces && !args.cached) send_counts(args, scratch.counters, scratch.origin);
  return true;
}

// Rows from staged to their final rows, one load for all the experts that a row serves.
__device__ __forceinline__ void ll_expand(const DispatchArgs& args, Team team, Pipe& pipe, const Scratch& scratch) {
  const World& world = args.world;
  const i32 pieces = pieces_per_row(args), piece_bytes = args.work.piece_bytes;
  const i64 units = static_cast<i64>(scratch.row_start[world.size]) * pieces;
  auto source = [&](i64 unit) -> Piece {
    const i64 row = unit / pieces;
    const i32 piece = static_cast<i32>(unit % pieces), from = source_of(scratch, row);
    const u8* staged = staged_at(args, world.rank, from, static_cast<i32>(row - scratch.row_start[from]));
    return {staged + static_cast<i64>(piece) * piece_bytes,
            static_cast<u32>(min(piece_bytes, world.row_bytes - piece * piece_bytes))};
  };
  auto deliver = [&](i64 unit, u8* stage, u32 num_bytes) {
    const i64 row = unit / pieces;
    const i32 from = source_of(scratch, row), position = static_cast<i32>(row - scratch.row_start[from]);
    const i32 place = lane_place(args, scratch, from, position, false);
    const u32 placed = __ballot_sync(~0u, place >= 0);
    const bool mine = kPerExpert ? place >= 0 : placed != 0 && lane_idx() == __ffs(placed) - 1;
    if (mine) ptx::bulk_store(row_at(args, world.rank, place) + unit % pieces * piece_bytes, stage, num_bytes);
  };
  copy_rows(pipe, team.block + static_cast<i64>(team.num_blocks) * warp_idx(), units,
            static_cast<i64>(team.num_blocks) * num_warps(), source, deliver);
  ptx::bulk_wait_all();
}

__device__ __forceinline__ void ll_receive(const DispatchArgs& args, Team team, Pipe& pipe, Scratch& scratch, u8* shared, u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(team, args.op);
  const bool arrived =
      await_peers(world, FLAG_PAYLOAD, seq * kWhole, OP_DISPATCH, PHASE_PAYLOAD, start, waits_at(shared));
  if (arrived && receive_layout(args, scratch)) {
    if (team.block == 0) args.cached ? write_kept_counts(args) : write_counts(args, scratch);
    if (LAYOUT != RANK_MAJOR) ll_expand(args, team, pipe, scratch);
    record_rows(args, team, scratch, false);
    if (args.out_scales != nullptr) place_all_scales(args, team, scratch, false);
  } else {
    deliver_nothing(args, team, scratch, arrived);
  }
  write_sample(world, team, OP_DISPATCH, 0, args.num_tokens, args.work.halves, args.op, waits_at(shared));
}

__device__ __forceinline__ void ll_dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  const World& world = args.world;
  Pipe pipe = open_pipe(args.work, shared);
  Scratch scratch = carve(world, shared);
  ptx::wait_for_previous_launch();
  const u64 stop = ptx::load_volatile(&world.state->aborted);
  const bool sends = args.work.halves & kSend;
  const u64 seq = sends ? ptx::load_volatile(&world.state->dispatch_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  if (stop != STOP_RUNNING) return deliver_nothing(args, team, scratch, false);
  scratch.origin = origin_of(args, seq);
  if (sends) {
    const u64 start = ptx::now_ns();
    if (team.block == 0) tell_peers(world, FLAG_STARTED, seq);
    const bool sent = ll_send(args, team, pipe, scratch, seq);
    finish_send(args, team, seq, start, sent);
  }
  ptx::allow_next_launch();
  if (args.work.halves & kReceive) ll_receive(args, team, pipe, scratch, shared, seq);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS, 1) ll_dispatch(const __grid_constant__ DispatchArgs args) {
  ll_dispatch_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS, 1) ll_dispatch(const DispatchArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  ll_dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
