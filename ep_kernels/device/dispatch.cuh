// What both dispatch algorithms share: where things lie, sending the rows of a tile, the end of the sending half. The
// receiving half is in receive.cuh; what differs (where rows land on the wire) in kernels/.
//
// Compile-time numbers: LAYOUT (below) and X, the type that is quantised to fp8 (u8 = rows travel as they are).
#pragma once

constexpr i32 EXPERT_MAJOR = 0, GROUPED = 1, RANK_MAJOR = 2, FLAT = 3;
constexpr bool kPerExpert = LAYOUT == EXPERT_MAJOR || LAYOUT == GROUPED;
constexpr i32 kDropped = -2;  // a place past the receive capacity; -1 = not served here

// What travels beside a row, once per (token, k); 16 bytes, one store.
struct alignas(16) Meta {
  i32 local_expert;  // -1 = this k is not served here
  i32 place;         // Home.place
  f32 weight;
  i32 token;         // index at the source
};

// Shared memory of a block, in this order; the pieces of the pipes follow at work.stage_offset.
struct Scratch {
  RouteTile* tile;
  i32* counters;   // [num_counters] rows numbered so far
  i32* start;      // [num_counters] LL: by (source, local expert); HT: by (rank, local expert): first row
  i32* total;      // [num_counters] rows per local expert or per source
  i32* offset;     // [num_counters + 1] first row per local expert, padded
  i32* row_start;  // [R + 1] prefix sum of the rows that each source sent
  u64 origin;      // seq of the dispatch that made the routing: this one, or an earlier one whose handle is used again
};

__device__ __forceinline__ Scratch carve(const World& world, u8* shared) {
  Scratch scratch;
  scratch.origin = 0;
  scratch.tile = reinterpret_cast<RouteTile*>(after_waits(world, shared));
  scratch.counters = reinterpret_cast<i32*>(scratch.tile + 1);
  scratch.start = scratch.counters + num_counters(world);
  scratch.total = scratch.start + num_counters(world);
  scratch.offset = scratch.total + num_counters(world);
  scratch.row_start = scratch.offset + num_counters(world) + 1;
  return scratch;
}

__device__ __forceinline__ i64 position_of(const World& world, i32 source, i32 position) {
  return static_cast<i64>(source) * world.max_tokens + position;
}

__device__ __forceinline__ u8* array_at(const DispatchArgs& args, i32 rank, u64 offset, u64 stride) {
  return region_at<u8>(args.world, rank, offset + args.slot * stride);
}

// [num_counters] rows that `source` sends, in the region of rank `at`.
__device__ __forceinline__ i32* counts_at(const DispatchArgs& args, i32 at, i32 source) {
  const RegionMap& map = args.world.map;
  return reinterpret_cast<i32*>(array_at(args, at, map.counts, map.counts_stride)) + source * num_counters(args.world);
}

// [K] records of a position.
__device__ __forceinline__ Meta* meta_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return reinterpret_cast<Meta*>(array_at(args, at, map.meta, map.meta_stride)) +
         position_of(args.world, source, position) * args.world.topk;
}

__device__ __forceinline__ u8* scales_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.scales, map.scales_stride) +
         position_of(args.world, source, position) * args.world.scale_bytes;
}

__device__ __forceinline__ u8* row_at(const DispatchArgs& args, i32 at, i32 row) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.rows, map.rows_stride) + static_cast<i64>(row) * args.world.row_bytes;
}

__device__ __forceinline__ i32 pieces_per_row(const DispatchArgs& args) {
  return (args.world.row_bytes + args.work.piece_bytes - 1) / args.work.piece_bytes;
}

// First op of a peer that proves the slot's last use is over there: its start is in stream order after its last read of
// the slot. With as many slots as open dispatches, that is this very operation; with one more, the one before.
__device__ __forceinline__ u64 credit_needed(const World& world, i32 slot, u64 seq) {
  const u64 last = ptx::load_volatile(&world.state->dispatch_slot_seq[slot]);
  return last == 0 ? 0 : min(seq, last + world.num_in_flight);
}

__device__ __forceinline__ u64 origins_at(const DispatchArgs& args) {
  return args.world.map.origins + args.slot * args.world.map.origins_stride;
}

// The origin of the routing that this rank brings to operation `seq`.
__device__ __forceinline__ u64 origin_of(const DispatchArgs& args, u64 seq) {
  return args.cached ? ptx::load_volatile(args.origin) : seq;
}

// A routing used again needs no counts: peers get its origin. COUNTS is told all the same, so that a peer that brought no
// handle goes on, and finds out. One block, once the slot is free everywhere.
__device__ __forceinline__ void announce_again(const DispatchArgs& args, u64 origin, u64 seq) {
  send_origin(args.world, origins_at(args), origin);
  __syncthreads();
  tell_peers(args.world, FLAG_COUNTS, seq);
}

// This rank's rows per counter and the origin of its routing, to all peers. One block.
__device__ __forceinline__ void send_counts(const DispatchArgs& args, const i32* counters, u64 origin) {
  const World& world = args.world;
  send_origin(world, origins_at(args), origin);
  const i32 n = num_counters(world);
  for (i32 i = threadIdx.x; i < world.size * n; i += blockDim.x) {
    const i32 peer = (world.rank + i / n) % world.size;
    if (is_active(peer)) counts_at(args, peer, world.rank)[i % n] = counters[i % n];
  }
}

// ---- send ----

// Records of a token and the caller's own scales, to each of its ranks. One warp; `row` is the token's first entry.
__device__ __forceinline__ void send_meta(const DispatchArgs& args, const RouteTile& tile, i32 row, i64 token) {
  const World& world = args.world;
  const i32 lane = lane_idx(), topk = world.topk;
  const f32 weight = lane < topk ? args.topk_weights[token * topk + lane] : 0.0f;
  for (i32 k = 0; k < topk; ++k) {
    const i32 rank = tile.rank[row + k];
    if (rank < 0 || tile.lead[row + k] != k) continue;
    const i32 position = tile.position[row + k];
    if (lane < topk) {
      const bool here = tile.rank[row + lane] == rank;
      const i32 place = tile.place[row + lane];
      Meta* records = meta_at(args, rank, world.rank, position);
      records[lane] = {here ? tile.slot[row + lane] : -1, place, here ? weight : 0.0f, static_cast<i32>(token)};
    }
    if (args.x_scales != nullptr)
      copy_bytes(scales_at(args, rank, world.rank, position), args.x_scales + token * world.scale_bytes, world.scale_bytes);
  }
}

// Quantises columns [column, column + count) of a row into the stage; scales go behind the piece.
template <class T>
__device__ __forceinline__ void quantize_piece(const DispatchArgs& args, const T* row, i32 column, i32 count, u8* stage) {
  u8* scales = stage + args.work.piece_bytes;
  constexpr i32 kTogether = 4;  // blocks whose columns are loaded before the first is used
  for (i32 base = 0; base < count; base += kTogether * quant::kBlock) {
    Vec<T, quant::kLaneColumns> loaded[kTogether] = {};
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      const i32 mine = base + j * quant::kBlock + lane_idx() * quant::kLaneColumns;
      if (mine < count) loaded[j] = *reinterpret_cast<const Vec<T, quant::kLaneColumns>*>(row + column + mine);
    }
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      const i32 at = base + j * quant::kBlock, mine = at + lane_idx() * quant::kLaneColumns;
      if (at >= count) continue;
      f32 value[quant::kLaneColumns], scale;
      for (i32 i = 0; i < quant::kLaneColumns; ++i) value[i] = widen(loaded[j].at[i]);
      const u32 q = quant::block(value, args.power_of_two != quant::kFp32, &scale);
      if (mine < count) *reinterpret_cast<u32*>(stage + mine) = q;
      if (lane_idx() != 0) continue;
      const i32 block = at / quant::kBlock;
      if (args.power_of_two == quant::kPacked) scales[block] = static_cast<u8>(__float_as_uint(scale) >> 23);
      else reinterpret_cast<f32*>(scales)[block] = scale;
    }
  }
}

// Scales of a quantised piece to every rank of the token; the last piece pads packed words with zero bytes.
__device__ __forceinline__ void send_piece_scales(const DispatchArgs& args, const RouteTile& tile, i32 row, i32 column,
                                                  i32 count, u8* stage) {
  const World& world = args.world;
  u8* scales = stage + args.work.piece_bytes;
  const i32 size = args.power_of_two == quant::kPacked ? 1 : 4;
  const i32 first = column / quant::kBlock * size;
  i32 num_bytes = (count + quant::kBlock - 1) / quant::kBlock * size;
  if (column + count == world.hidden) {
    if (lane_idx() < world.scale_bytes - first - num_bytes) scales[num_bytes + lane_idx()] = 0;
    num_bytes = world.scale_bytes - first;
    __syncwarp();
  }
  for (i32 k = 0; k < world.topk; ++k) {
    const i32 rank = tile.rank[row + k];
    if (rank < 0 || tile.lead[row + k] != k) continue;
    copy_bytes(scales_at(args, rank, world.rank, tile.position[row + k]) + first, scales, num_bytes);
  }
}

// Sends units [begin, end) (unit = token * pieces + piece) of a routed tile that starts at token `first`, once per
// destination rank. landing(entry) -> where the entry's row lies at its destination, null = no payload (dropped).
template <class Landing>
__device__ __forceinline__ void send_tile(const DispatchArgs& args, Pipe& pipe, const RouteTile& tile, i32 first, i64 begin,
                                          i64 end, Landing landing) {
  const World& world = args.world;
  const i32 pieces = pieces_per_row(args), piece_bytes = args.work.piece_bytes;
  auto entry_of = [&](i64 unit) { return static_cast<i32>(unit / pieces - first) * world.topk; };
  auto leads = [&](i32 row) {
    return lane_idx() < world.topk && tile.rank[row + lane_idx()] >= 0 && tile.lead[row + lane_idx()] == lane_idx();
  };
  auto store = [&](i64 unit, u8* stage, u32 num_bytes) {
    const i32 row = entry_of(unit), piece = static_cast<i32>(unit % pieces);
    if (leads(row)) {
      u8* to = landing(row + lane_idx());
      if (to != nullptr) ptx::bulk_store(to + static_cast<i64>(piece) * piece_bytes, stage, num_bytes);
    }
    if (piece == 0) send_meta(args, tile, row, unit / pieces);
  };
  auto size_of = [&](i32 piece) { return min(piece_bytes, world.row_bytes - piece * piece_bytes); };
  if constexpr (sizeof(X) == 1) {
    auto source = [&](i64 unit) -> Piece {
      if (!__any_sync(~0u, leads(entry_of(unit)))) return {nullptr, 0};
      const i32 piece = static_cast<i32>(unit % pieces);
      const u8* row = args.x + unit / pieces * world.row_bytes;
      return {row + static_cast<i64>(piece) * piece_bytes, static_cast<u32>(size_of(piece))};
    };
    copy_rows(pipe, begin + warp_idx(), end, num_warps(), source, store);
  } else {
    auto produce = [&](i64 unit, u8* stage) -> u32 {
      if (!__any_sync(~0u, leads(entry_of(unit)))) return 0;
      const i32 piece = static_cast<i32>(unit % pieces);
      const X* row = reinterpret_cast<const X*>(args.x) + unit / pieces * world.hidden;
      quantize_piece(args, row, piece * piece_bytes, size_of(piece), stage);
      return size_of(piece);
    };
    auto deliver = [&](i64 unit, u8* stage, u32 num_bytes) {
      store(unit, stage, num_bytes);
      const i32 piece = static_cast<i32>(unit % pieces);
      send_piece_scales(args, tile, entry_of(unit), piece * piece_bytes, num_bytes, stage);
    };
    make_rows(pipe, begin + warp_idx(), end, num_warps(), produce, deliver);
  }
}

// Every block signals its share as soon as its own rows are away; the last one moves the counters on, off the fast path.
__device__ __forceinline__ void finish_send(const DispatchArgs& args, Team team, u64 seq, u64 start, bool sent) {
  const World& world = args.world;
  const u64 num_ops = seq - ptx::load_volatile(&world.state->dispatch_shared);
  ptx::bulk_wait_all();
  __syncthreads();
  if (sent) add_share(world, team, FLAG_PAYLOAD, num_ops);
  if (threadIdx.x != blockDim.x - 1 || !arrive(world, team, TICKET_DISPATCH_SEND)) return;
  note_sent(world, OP_DISPATCH, 1, args.num_tokens, seq, start, args.op, team.num_blocks);
  State* state = world.state;
  state->dispatch_seq = state->dispatch_shared = seq;
  state->dispatch_slot_seq[args.slot] = seq;
  *args.num_invalid_ids = static_cast<i32>(state->invalid_ids);
  state->invalid_ids = 0;
}
