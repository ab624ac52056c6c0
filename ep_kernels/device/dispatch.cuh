// Roles that both dispatch algorithms share: sending the rows of a tile, the layout of what arrives, the bookkeeping of
// received rows, and the operation's end. What differs (where rows land on the wire) is in kernels/.
//
// Compile-time numbers: LAYOUT (below) and X, the type that is quantised to fp8 (u8 = rows travel as they are).
#pragma once

constexpr i32 EXPERT_MAJOR = 0, GROUPED = 1, RANK_MAJOR = 2, FLAT = 3;
constexpr bool kPerExpert = LAYOUT == EXPERT_MAJOR || LAYOUT == GROUPED;
constexpr u32 kSend = 1, kReceive = 2;
constexpr i32 kDropped = -2;  // a place past the receive capacity; -1 = not served here
constexpr u32 kOpSeq = 0, kOpStart = 1, kOpSent = 2;  // words of args.op

// What travels beside a row, once per (token, k); 16 bytes, one store.
struct alignas(16) Meta {
  i32 local_expert;  // -1 = this k is not served here
  i32 place;         // LL: index among the source's rows for the expert. HT: final row or kDropped
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
};

__device__ __forceinline__ Scratch carve(const World& world, u8* shared) {
  Scratch scratch;
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

__device__ __forceinline__ u8* staged_at(const DispatchArgs& args, i32 at, i32 source, i32 position) {
  const RegionMap& map = args.world.map;
  return array_at(args, at, map.staged, map.staged_stride) +
         position_of(args.world, source, position) * args.world.row_bytes;
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

// This rank's rows per counter, to all peers. One block.
__device__ __forceinline__ void send_counts(const DispatchArgs& args, const i32* counters) {
  const World& world = args.world;
  const i32 n = num_counters(world);
  for (i32 i = threadIdx.x; i < world.size * n; i += blockDim.x) {
    const i32 peer = (world.rank + i / n) % world.size;
    if (world.active[peer]) counts_at(args, peer, world.rank)[i % n] = counters[i % n];
  }
}

// ---- send ----

// Records of a token and the caller's own scales, to each of its ranks. One warp; `row` is the token's first entry.
__device__ __forceinline__ void send_meta(const DispatchArgs& args, const RouteTile& tile, i32 row, i64 token, bool direct) {
  const World& world = args.world;
  const i32 lane = lane_idx(), topk = world.topk;
  const f32 weight = lane < topk ? args.topk_weights[token * topk + lane] : 0.0f;
  for (i32 k = 0; k < topk; ++k) {
    const i32 rank = tile.rank[row + k];
    if (rank < 0 || tile.lead[row + k] != k) continue;
    const i32 position = tile.position[row + k];
    if (lane < topk) {
      const bool here = tile.rank[row + lane] == rank;
      const i32 place = direct ? tile.place[row + lane] : tile.expert_index[row + lane];
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
                                          i64 end, bool direct, Landing landing) {
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
    if (piece == 0) send_meta(args, tile, row, unit / pieces, direct);
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
  ptx::bulk_wait_all();
  __syncthreads();
  if (sent) add_share(world, team, FLAG_PAYLOAD);
  if (threadIdx.x != blockDim.x - 1) return;
  if (team.block == 0) {
    args.op[kOpSeq] = seq;
    args.op[kOpStart] = start;
    args.op[kOpSent] = ptx::now_ns() - start;
  }
  if (!arrive(world, team, TICKET_DISPATCH_SEND)) return;
  State* state = world.state;
  state->dispatch_seq = seq;
  state->dispatch_slot_seq[args.slot] = seq;
  *args.num_invalid_ids = static_cast<i32>(state->invalid_ids);
  state->invalid_ids = 0;
}

// ---- receive ----

// Exclusive prefix sum by one warp: out[i] = sum of value(0 .. i-1) for i < n. Returns the sum of all.
template <class Value>
__device__ __forceinline__ i32 prefix_sum(i32 n, i32* out, Value value) {
  i32 carried = 0;
  for (i32 base = 0; base < n; base += 32) {
    const i32 i = base + lane_idx(), mine = i < n ? value(i) : 0;
    i32 sum = mine;
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) {
      const i32 below = __shfl_up_sync(~0u, sum, step);
      if (lane_idx() >= step) sum += below;
    }
    if (i < n) out[i] = carried + sum - mine;
    carried += __shfl_sync(~0u, sum, 31);
  }
  return carried;
}

__device__ __forceinline__ i32 aligned(i32 count, i32 alignment) { return (count + alignment - 1) / alignment * alignment; }

// From everybody's counts: row_start, total, offset and start for the rows that reach this rank. All threads; ends with a
// block barrier. start[source * local_stride + e] (or start[source]) is the final row of the source's first row.
__device__ __forceinline__ void receive_layout(const DispatchArgs& args, Scratch& scratch) {
  const World& world = args.world;
  const i32 stride = world.local_stride;
  auto count = [&](i32 source, i32 key) { return world.active[source] ? counts_at(args, world.rank, source)[key] : 0; };
  __syncthreads();
  if (warp_idx() == 0)
    scratch.row_start[world.size] =
        prefix_sum(world.size, scratch.row_start, [&](i32 s) { return count(s, num_keys(world) + world.rank); });
  for (i32 e = threadIdx.x; kPerExpert && e < world.num_local; e += blockDim.x) {
    i32 sum = 0;
    for (i32 source = 0; source < world.size; ++source) {
      scratch.start[source * stride + e] = sum;
      sum += count(source, world.rank * stride + e);
    }
    scratch.total[e] = sum;
  }
  __syncthreads();
  if (kPerExpert && warp_idx() == 0)
    scratch.offset[world.num_local] =
        prefix_sum(world.num_local, scratch.offset, [&](i32 e) { return aligned(scratch.total[e], world.alignment); });
  for (i32 s = threadIdx.x; !kPerExpert && s < world.size; s += blockDim.x) {
    scratch.total[s] = scratch.row_start[s + 1] - scratch.row_start[s];
    scratch.start[s] = LAYOUT == FLAT ? scratch.row_start[s] : s * world.max_tokens;
  }
  __syncthreads();
  for (i32 i = threadIdx.x; kPerExpert && i < world.size * world.num_local; i += blockDim.x) {
    const i32 source = i / world.num_local, e = i % world.num_local;
    scratch.start[source * stride + e] += LAYOUT == GROUPED ? scratch.offset[e] : e * world.capacity;
  }
  __syncthreads();
}

// A final row, or kDropped past the capacity. `capacity` is slots per expert (EXPERT_MAJOR) or rows.
__device__ __forceinline__ i32 admit(i32 row, i32 local_expert, i32 capacity) {
  if (LAYOUT == RANK_MAJOR) return row;
  return row < (LAYOUT == EXPERT_MAJOR ? (local_expert + 1) * capacity : capacity) ? row : kDropped;
}

// The final row that this lane's record asks for, kDropped, or -1 = none. Lanes past K give -1.
__device__ __forceinline__ i32 place_of(const DispatchArgs& args, const Scratch& scratch, const Meta& meta, i32 source,
                                        i32 position, bool direct) {
  if (meta.local_expert < 0) return -1;
  if (direct) return meta.place;
  if (!kPerExpert) return admit(scratch.start[source] + position, 0, args.world.capacity);
  const i32 row = scratch.start[source * args.world.local_stride + meta.local_expert] + meta.place;
  return admit(row, meta.local_expert, args.world.capacity);
}

__device__ __forceinline__ Meta load_meta(const DispatchArgs& args, i32 source, i32 position) {
  if (lane_idx() >= args.world.topk) return {-1, -1, 0.0f, 0};
  return meta_at(args, args.world.rank, source, position)[lane_idx()];
}

__device__ __forceinline__ i32 source_of(const Scratch& scratch, i64 row) {
  i32 source = 0;
  while (row >= scratch.row_start[source + 1]) ++source;
  return source;
}

// Scales of one row to their final place: bytes, or packed words with their own strides.
__device__ __forceinline__ void place_scales(const DispatchArgs& args, i32 source, i32 position, i32 row, i32 num_rows) {
  const World& world = args.world;
  const u8* from = scales_at(args, world.rank, source, position);
  if (args.scale_row_stride == 0) {
    copy_bytes(args.out_scales + static_cast<i64>(row) * world.scale_bytes, from, world.scale_bytes);
    return;
  }
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : LAYOUT == RANK_MAJOR ? world.max_tokens : 1 << 30;
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  u32* to = reinterpret_cast<u32*>(args.out_scales) + static_cast<i64>(row / per_group) * args.scale_group_stride;
  for (i32 i = lane_idx(); i < world.scale_bytes / 4; i += 32)
    to[i * column + static_cast<i64>(row % per_group) * args.scale_row_stride] = reinterpret_cast<const u32*>(from)[i];
}

__device__ __forceinline__ i32 rows_delivered(const DispatchArgs& args, const Scratch& scratch) {
  const i32 all = LAYOUT == GROUPED ? scratch.offset[args.world.num_local] : scratch.row_start[args.world.size];
  return min(all, args.world.capacity);
}

// The final row that a record asks for, as place_of, for one thread of its own.
__device__ __forceinline__ i32 record_place(const DispatchArgs& args, const Scratch& scratch, i64 entry, i32 source,
                                            bool direct, Meta* meta) {
  const i32 topk = args.world.topk;
  const i32 position = static_cast<i32>(entry / topk);
  *meta = meta_at(args, args.world.rank, source, position)[entry % topk];
  return place_of(args, scratch, *meta, source, position, direct);
}

// What combine and the caller need of every received position: places, weights, tokens, ids. A thread per (position, k), so
// that a source's records are read and written in one sweep.
__device__ __forceinline__ void record_rows(const DispatchArgs& args, Team team, const Scratch& scratch, bool direct) {
  const World& world = args.world;
  const i32 topk = world.topk;
  for (i64 i = team.block * blockDim.x + threadIdx.x; i < static_cast<i64>(scratch.row_start[world.size]) * topk;
       i += static_cast<i64>(team.num_blocks) * blockDim.x) {
    const i32 source = source_of(scratch, i / topk);
    const i64 entry = i - static_cast<i64>(scratch.row_start[source]) * topk;
    Meta meta;
    const i32 place = record_place(args, scratch, entry, source, direct, &meta);
    const i64 at = static_cast<i64>(source) * world.max_tokens * topk + entry;
    args.places[at] = place;
    args.weights[at] = meta.weight;
    if (entry % topk == 0) args.tokens[at / topk] = meta.token;
    if (kPerExpert) continue;
    const i32 position = static_cast<i32>(entry / topk), row = admit(scratch.start[source] + position, 0, world.capacity);
    if (row < 0) continue;
    args.out_ids[static_cast<i64>(row) * topk + entry % topk] = meta.local_expert;
    args.out_weights[static_cast<i64>(row) * topk + entry % topk] = meta.weight;
  }
}

// Scales of every received row to their final places. A warp per position.
__device__ __forceinline__ void place_all_scales(const DispatchArgs& args, Team team, const Scratch& scratch, bool direct) {
  const World& world = args.world;
  for (i64 r = team.block * num_warps() + warp_idx(); r < scratch.row_start[world.size];
       r += static_cast<i64>(team.num_blocks) * num_warps()) {
    const i32 source = source_of(scratch, r), position = static_cast<i32>(r - scratch.row_start[source]);
    const i32 place = place_of(args, scratch, load_meta(args, source, position), source, position, direct);
    const u32 placed = __ballot_sync(~0u, place >= 0);
    for (u32 left = kPerExpert ? placed : placed & (0u - placed); left != 0; left &= left - 1)
      place_scales(args, source, position, __shfl_sync(~0u, place, __ffs(left) - 1), rows_delivered(args, scratch));
  }
}

// Counts, offsets and totals of DispatchOutput. One block.
__device__ __forceinline__ void write_counts(const DispatchArgs& args, const Scratch& scratch) {
  const World& world = args.world;
  const i32 groups = kPerExpert ? world.num_local : world.size;
  __shared__ i32 kept_sum, total_sum;
  if (threadIdx.x == 0) kept_sum = total_sum = 0;
  __syncthreads();
  for (i32 g = threadIdx.x; g < groups; g += blockDim.x) {
    const i32 total = scratch.total[g];
    const i32 first = LAYOUT == GROUPED ? scratch.offset[g] : LAYOUT == FLAT ? scratch.row_start[g] : 0;
    const i32 kept = LAYOUT == RANK_MAJOR ? total : max(0, min(total, world.capacity - first));
    args.counts[g] = kept;
    atomicAdd(&kept_sum, kept);
    atomicAdd(&total_sum, total);
  }
  for (i32 g = threadIdx.x; LAYOUT == GROUPED && g <= groups; g += blockDim.x)
    args.offsets[g] = min(scratch.offset[g], world.capacity);
  for (i32 s = threadIdx.x; s < world.size; s += blockDim.x)
    args.source_rows[s] = scratch.row_start[s + 1] - scratch.row_start[s];
  __syncthreads();
  if (threadIdx.x == 0) {
    *args.num_rows = LAYOUT == GROUPED ? rows_delivered(args, scratch) : kept_sum;
    *args.num_dropped = total_sum - kept_sum;
  }
}

// After a failed wait nothing may look delivered. One block.
__device__ __forceinline__ void write_no_counts(const DispatchArgs& args) {
  const i32 groups = kPerExpert ? args.world.num_local : args.world.size;
  for (i32 g = threadIdx.x; g < groups; g += blockDim.x) args.counts[g] = 0;
  for (i32 g = threadIdx.x; LAYOUT == GROUPED && g <= groups; g += blockDim.x) args.offsets[g] = 0;
  for (i32 s = threadIdx.x; s < args.world.size; s += blockDim.x) args.source_rows[s] = 0;
  if (threadIdx.x == 0) *args.num_rows = *args.num_dropped = 0;
}
