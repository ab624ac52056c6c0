// High-throughput combine: each rank sums the rows that serve one (source, position) in fp32, in ascending k, rounds once and
// pushes the partial straight home; home sums the partials of a token in ascending rank.
//
//   owner rank                                       home rank
//   y[places[source][position][k]] * weight  ...     home[owner][position]  (slot by combine slot)
//     fp32, ascending k -> combine dtype    ----->
//   every block: COMBINE[owner] += share   ======>   wait for all shares of all owners
//                                                    z[t] = sum over ranks ascending, fp32 -> output dtype
//
// KIND 0: rows per expert, combine weights them. 1: rows per rank, moved as they are. 2: exact: every routed row travels to
// home[token][k] and is weighted at home, in ascending k.
// Y is the output dtype, C the combine dtype (e4m3: block-128 scales travel beside the row).
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its position 1, and to rank 1 (k = 1). Rank 0 writes
// bf16(w0 * y0 + w3 * y3) to rank 2's home[0][1]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in its own `home` table.
//
// A partial whose rows were all dropped travels as +0. Memory order: as in ht_dispatch.cuh, with COMBINE. Reuse of a slot: a
// rank that has started num_in_flight combines more has, in stream order, read the slot.
#pragma once

constexpr i32 PER_EXPERT = 0, PER_RANK = 1, EXACT = 2;
constexpr bool kFp8 = sizeof(C) == 1;
constexpr i32 kHomeGroups = 2;                               // 16-byte groups of z that a lane sums at a time
constexpr i32 kHomeColumns = 32 * kColumns<Y> * kHomeGroups;  // columns of a row that one warp sums

__device__ __forceinline__ i64 position_of(const World& world, i32 owner, i32 position) {
  return static_cast<i64>(owner) * world.max_tokens + position;
}

__device__ __forceinline__ i32 num_scale_blocks(const World& world) { return (world.hidden + quant::kBlock - 1) / quant::kBlock; }

__device__ __forceinline__ u8* home_at(const CombineArgs& args, i32 rank, i64 row) {
  const RegionMap& map = args.world.map;
  return region_at<u8>(args.world, rank, map.home + args.slot * map.home_stride) + row * args.world.home_row_bytes;
}

__device__ __forceinline__ f32* home_scales_at(const CombineArgs& args, i32 rank, i64 row) {
  const RegionMap& map = args.world.map;
  return region_at<f32>(args.world, rank, map.home_scales + args.slot * map.home_scales_stride) +
         row * num_scale_blocks(args.world);
}

__device__ __forceinline__ f32* home_weights_at(const CombineArgs& args, i32 rank, i64 position) {
  const RegionMap& map = args.world.map;
  return region_at<f32>(args.world, rank, map.home_weights + args.slot * map.home_weights_stride) +
         position * args.world.topk;
}

__device__ __forceinline__ u64 origins_at(const CombineArgs& args) {
  return args.world.map.home_origins + args.slot * args.world.map.home_origins_stride;
}

// ---- send: this rank as owner ----

// One unit of work of a warp: a piece of one partial (or, exact, of one routed row).
struct Task {
  bool present;
  i32 source, position;
  i32 column, num_columns;
  i32 place;   // this lane's k: row of y, kept only where the partial takes it
  f32 weight;  // this lane's k
  u32 taken;   // ballot of lanes whose row the partial takes
  i64 landing; // row of `home` at the source
};

__device__ __forceinline__ Task task_of(const CombineArgs& args, const i32* rows, i64 unit) {
  const World& world = args.world;
  const i32 lane = lane_idx(), topk = world.topk;
  const i32 columns = args.work.piece_bytes / sizeof(C), pieces = (world.hidden + columns - 1) / columns;
  Task task;
  task.column = static_cast<i32>(unit % pieces) * columns;
  task.num_columns = min(columns, world.hidden - task.column);
  unit /= pieces;
  const i32 only = KIND == EXACT ? static_cast<i32>(unit % topk) : 0;
  if (KIND == EXACT) unit /= topk;
  task.source = (world.rank + 1 + static_cast<i32>(unit % world.size)) % world.size;
  task.position = static_cast<i32>(unit / world.size);
  task.present = task.position < rows[task.source];
  if (!task.present) return task;
  const i64 at = position_of(world, task.source, task.position);
  task.place = lane < topk ? args.places[at * topk + lane] : -1;
  task.weight = lane < topk && args.apply_weights ? args.weights[at * topk + lane] : 1.0f;
  task.taken = __ballot_sync(~0u, task.place >= 0);
  task.landing = position_of(world, world.rank, task.position);
  if (KIND == PER_RANK) task.taken &= 0u - task.taken;
  if (KIND == EXACT) {
    task.present = __shfl_sync(~0u, task.place, only) != -1;
    task.taken &= 1u << only;
    task.landing = static_cast<i64>(args.tokens[at]) * topk + only;
  }
  return task;
}

// fp32 values of G groups of N columns, at column + 32 * N * group: rows in ascending k, from the first; 0 if every row was
// dropped. A row's groups are all loaded before the first is used.
template <i32 N, i32 G>
__device__ __forceinline__ void partial_sum(const CombineArgs& args, const Task& task, i32 column, f32 (&sum)[G][N]) {
  const i32 past = task.column + task.num_columns;
#pragma unroll
  for (i32 g = 0; g < G; ++g)
#pragma unroll
    for (i32 i = 0; i < N; ++i) sum[g][i] = 0.0f;
  bool first = true;
  for (u32 left = task.taken; left != 0; left &= left - 1) {
    const i32 k = __ffs(left) - 1;
    const Y* row = reinterpret_cast<const Y*>(args.y) + static_cast<i64>(__shfl_sync(~0u, task.place, k)) * args.world.hidden;
    const f32 weight = __shfl_sync(~0u, task.weight, k);
    Vec<Y, N> y[G] = {};
#pragma unroll
    for (i32 g = 0; g < G; ++g)
      if (column + 32 * N * g < past) y[g] = *reinterpret_cast<const Vec<Y, N>*>(row + column + 32 * N * g);
#pragma unroll
    for (i32 g = 0; g < G; ++g)
#pragma unroll
      for (i32 i = 0; i < N; ++i) {
        const f32 value = KIND == PER_EXPERT ? __fmul_rn(widen(y[g].at[i]), weight) : widen(y[g].at[i]);
        sum[g][i] = first ? value : __fadd_rn(sum[g][i], value);
      }
    first = false;
  }
}

template <class Moved>
__device__ __forceinline__ u32 make_partial(const CombineArgs& args, const Task& task, u8* stage) {
  if constexpr (sizeof(Moved) == 1) {
    f32* scales = reinterpret_cast<f32*>(stage + args.work.piece_bytes);
    constexpr i32 N = quant::kLaneColumns, G = 4;
    for (i32 base = 0; base < task.num_columns; base += G * quant::kBlock) {
      f32 sum[G][N], scale;
      partial_sum(args, task, task.column + base + lane_idx() * N, sum);
#pragma unroll
      for (i32 g = 0; g < G; ++g) {
        const i32 at = base + g * quant::kBlock, mine = at + lane_idx() * N;
        if (at >= task.num_columns) continue;
        const u32 q = quant::block(sum[g], false, &scale);
        if (mine < task.num_columns) *reinterpret_cast<u32*>(stage + mine) = q;
        if (lane_idx() == 0) scales[at / quant::kBlock] = scale;
      }
    }
  } else {
    constexpr i32 N = kColumns<Y>, G = 4;
    for (i32 base = lane_idx() * N; base < task.num_columns + lane_idx() * N; base += G * 32 * N) {
      f32 sum[G][N];
      partial_sum(args, task, task.column + base, sum);
#pragma unroll
      for (i32 g = 0; g < G; ++g) {
        const i32 mine = base + g * 32 * N;
        Vec<Moved, N> rounded;
#pragma unroll
        for (i32 i = 0; i < N; ++i) rounded.at[i] = narrow<Moved>(sum[g][i]);
        if (mine < task.num_columns) *reinterpret_cast<Vec<Moved, N>*>(stage + mine * sizeof(Moved)) = rounded;
      }
    }
  }
  return (task.num_columns * sizeof(C) + 15) / 16 * 16;
}

// Pushes a finished piece home, with what belongs beside it.
__device__ __forceinline__ void push_partial(const CombineArgs& args, const Task& task, u8* stage, u32 num_bytes) {
  const World& world = args.world;
  if (lane_idx() == 0)
    ptx::bulk_store(home_at(args, task.source, task.landing) + task.column * sizeof(C), stage, num_bytes);
  if constexpr (kFp8) {
    const i32 blocks = (task.num_columns + quant::kBlock - 1) / quant::kBlock;
    copy_bytes(reinterpret_cast<u8*>(home_scales_at(args, task.source, task.landing) + task.column / quant::kBlock),
               stage + args.work.piece_bytes, blocks * 4);
  }
  if (args.row_weights == nullptr || task.column != 0 || lane_idx() >= world.topk) return;
  const i64 home = position_of(world, world.rank, task.position);
  const i64 index = KIND == PER_RANK ? static_cast<i64>(task.place) * world.topk + lane_idx() : task.place;
  if (KIND == EXACT && (task.taken >> lane_idx() & 1) == 0 && task.place >= 0) return;  // its own unit sends it
  home_weights_at(args, task.source, home)[lane_idx()] = task.place >= 0 ? args.row_weights[index] : 0.0f;
}

__device__ __forceinline__ void push_rows(const CombineArgs& args, Team team, Pipe& pipe, const i32* rows) {
  const World& world = args.world;
  const i32 columns = args.work.piece_bytes / sizeof(C), pieces = (world.hidden + columns - 1) / columns;
  i32 most = 0;
  for (i32 source = 0; source < world.size; ++source) most = max(most, rows[source]);
  const i64 units = static_cast<i64>(most) * world.size * pieces * (KIND == EXACT ? world.topk : 1);
  const i64 first = team.block + static_cast<i64>(team.num_blocks) * warp_idx();
  const i64 step = static_cast<i64>(team.num_blocks) * num_warps();
  auto deliver = [&](i64 unit, u8* stage, u32 num_bytes) {
    push_partial(args, task_of(args, rows, unit), stage, num_bytes);
  };
  if constexpr (KIND == PER_RANK && kSameType) {
    auto source = [&](i64 unit) -> Piece {
      const Task task = task_of(args, rows, unit);
      if (!task.present) return {nullptr, 0};
      const i64 row = task.taken == 0 ? -1 : __shfl_sync(~0u, task.place, __ffs(task.taken) - 1);
      const u8* from = row < 0 ? world.zeros : args.y + row * world.hidden * sizeof(Y);
      return {from + task.column * sizeof(Y), static_cast<u32>(task.num_columns * sizeof(Y))};
    };
    copy_rows(pipe, first, units, step, source, deliver);
  } else {
    auto produce = [&](i64 unit, u8* stage) -> u32 {
      const Task task = task_of(args, rows, unit);
      return task.present ? make_partial<C>(args, task, stage) : 0;
    };
    make_rows(pipe, first, units, step, produce, deliver);
  }
}

// Exact rows land by (token, k), anywhere in the slot: home must be in this very operation, not only past the slot's last use
// (one that has gone on without this rank never is). Partials land in this rank's own part of it.
__device__ __forceinline__ u64 credit_needed(const CombineArgs& args, u64 seq) {
  const u64 last = ptx::load_volatile(&args.world.state->combine_slot_seq[args.slot]);
  if (KIND == EXACT) return seq;
  return last == 0 ? 0 : min(seq, last + args.world.num_in_flight);
}

__device__ __forceinline__ void combine_send(const CombineArgs& args, Team team, Pipe& pipe, i32* rows, u64 seq, u64 origin) {
  const World& world = args.world;
  const u64 start = ptx::now_ns();
  if (team.block == 0) tell_peers(world, FLAG_COMBINE_STARTED, seq);
  for (i32 s = threadIdx.x; s < world.size; s += blockDim.x) rows[s] = is_active(s) ? args.source_rows[s] : 0;
  bool credit = true;
  if (warp_idx() == num_warps() - 1)
    credit = warp_await_peers(world, FLAG_COMBINE_STARTED, credit_needed(args, seq), OP_COMBINE, PHASE_CREDIT);
  const bool sent = __syncthreads_or(!credit) == 0;
  if (sent && team.block == 0) send_origin(world, origins_at(args), origin);
  if (sent) push_rows(args, team, pipe, rows);
  const u64 num_ops = seq - ptx::load_volatile(&world.state->combine_shared);
  ptx::bulk_wait_all();
  __syncthreads();
  if (sent) add_share(world, team, FLAG_COMBINE, num_ops);
  if (threadIdx.x != blockDim.x - 1 || !arrive(world, team, TICKET_COMBINE_SEND)) return;
  note_sent(world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, team.num_blocks);
  world.state->combine_seq = world.state->combine_shared = seq;
  world.state->combine_slot_seq[args.slot] = seq;
}

// ---- receive: this rank as home ----

// The rows of `home` that make up a token, in the order of their sum, and their weights (exact); list of this warp.
__device__ __forceinline__ i32 list_terms(const CombineArgs& args, i64 token, i64* list, f32* weights) {
  const i32 lane = lane_idx(), topk = args.world.topk;
  Home home = {-1, -1, -1, -1};
  if (lane < topk) home = args.home[token * topk + lane];
  const i32 rank = home.rank, position = home.position;
  const u32 same = __match_any_sync(~0u, rank);
  const bool term = rank >= 0 && (KIND == EXACT || __ffs(same) - 1 == lane);
  const u32 terms = __ballot_sync(~0u, term);
  i32 index = 0;
  for (u32 left = terms; left != 0; left &= left - 1) {
    const i32 other = __ffs(left) - 1, other_rank = __shfl_sync(~0u, rank, other);
    index += KIND == EXACT ? other < lane : other_rank < rank;
  }
  __syncwarp();
  if (term) {
    list[index] = KIND == EXACT ? token * topk + lane : position_of(args.world, rank, position);
    if (KIND == EXACT) weights[index] = args.apply_weights ? args.topk_weights[token * topk + lane] : 1.0f;
  }
  __syncwarp();
  return __popc(terms);
}

// N columns of one term, as they lie in memory.
template <i32 N>
struct Loaded {
  Vec<C, N> values;
  f32 scale;
};

template <i32 N>
__device__ __forceinline__ Loaded<N> load_term(const CombineArgs& args, i64 row, i32 column) {
  Loaded<N> loaded;
  loaded.values = *reinterpret_cast<const Vec<C, N>*>(home_at(args, args.world.rank, row) + column * sizeof(C));
  if constexpr (kFp8) loaded.scale = home_scales_at(args, args.world.rank, row)[column / quant::kBlock];
  return loaded;
}

template <i32 N>
__device__ __forceinline__ void widen_term(const Loaded<N>& loaded, f32 (&value)[N]) {
  if constexpr (kFp8) {
#pragma unroll
    for (i32 i = 0; i < N; i += quant::kLaneColumns) {
      u32 packed = 0;
      f32 four[quant::kLaneColumns];
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) packed |= static_cast<u32>(loaded.values.at[i + j].bits) << (8 * j);
      quant::widen4(packed, four);
#pragma unroll
      for (i32 j = 0; j < quant::kLaneColumns; ++j) value[i + j] = __fmul_rn(four[j], loaded.scale);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < N; ++i) value[i] = widen(loaded.values.at[i]);
  }
}

// Columns [column, column + N) of z and the same 32 * N further on: kTogether terms are loaded before the first is added.
__device__ __forceinline__ void sum_terms(const CombineArgs& args, i64 token, i32 column, i32 past, i32 terms,
                                          const i64* list, const f32* weights) {
  constexpr i32 N = kColumns<Y>, kTogether = 4, G = kHomeGroups;
  f32 sum[G][N] = {};
  for (i32 base = 0; base < terms; base += kTogether) {
    Loaded<N> loaded[kTogether][G];
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j)
#pragma unroll
      for (i32 g = 0; g < G; ++g)
        if (base + j < terms && column + 32 * N * g < past)
          loaded[j][g] = load_term<N>(args, list[base + j], column + 32 * N * g);
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      if (base + j >= terms) continue;
#pragma unroll
      for (i32 g = 0; g < G; ++g) {
        f32 value[N];
        widen_term(loaded[j][g], value);
#pragma unroll
        for (i32 i = 0; i < N; ++i) {
          const f32 term = KIND == EXACT ? __fmul_rn(value[i], weights[base + j]) : value[i];
          sum[g][i] = base + j == 0 ? term : __fadd_rn(sum[g][i], term);
        }
      }
    }
  }
#pragma unroll
  for (i32 g = 0; g < G; ++g) {
    Vec<Y, N> z;
#pragma unroll
    for (i32 i = 0; i < N; ++i) z.at[i] = narrow<Y>(sum[g][i]);
    if (column + 32 * N * g < past)
      *reinterpret_cast<Vec<Y, N>*>(reinterpret_cast<Y*>(args.z) + token * args.world.hidden + column + 32 * N * g) = z;
  }
}

// Calls work(token, first column, past) for this warp's share of z.
template <class Work>
__device__ __forceinline__ void for_home_units(const CombineArgs& args, Team team, Work work) {
  const i32 hidden = args.world.hidden, pieces = (hidden + kHomeColumns - 1) / kHomeColumns;
  const i64 units = static_cast<i64>(args.num_tokens) * pieces;
  for (i64 unit = team.block + static_cast<i64>(team.num_blocks) * warp_idx(); unit < units;
       unit += static_cast<i64>(team.num_blocks) * num_warps()) {
    const i32 first = static_cast<i32>(unit % pieces) * kHomeColumns;
    work(unit / pieces, first, min(first + kHomeColumns, hidden));
  }
}

__device__ __forceinline__ void reduce_home(const CombineArgs& args, Team team, u8* shared) {
  const World& world = args.world;
  i64* list = reinterpret_cast<i64*>(shared + args.work.stage_offset) + warp_idx() * 64;
  f32* weights = reinterpret_cast<f32*>(list + 32);
  for_home_units(args, team, [&](i64 token, i32 first, i32 past) {
    const i32 terms = list_terms(args, token, list, weights);
    sum_terms(args, token, first + lane_idx() * kColumns<Y>, past, terms, list, weights);
    if (args.z_weights != nullptr && first == 0 && lane_idx() < world.topk) {
      const i64 entry = token * world.topk + lane_idx();
      const Home home = args.home[entry];
      const i64 from = home.rank < 0 ? 0 : position_of(world, home.rank, home.position);
      args.z_weights[entry] = home.rank < 0 ? 0.0f : home_weights_at(args, world.rank, from)[lane_idx()];
    }
  });
}

// After a failed wait, or where ranks brought different routings: NaN everywhere, in every output dtype, by the warps that
// sum the same columns.
__device__ __forceinline__ void poison(const CombineArgs& args, Team team) {
  const i32 topk = args.world.topk;
  for_home_units(args, team, [&](i64 token, i32 first, i32 past) {
    u16* row = reinterpret_cast<u16*>(reinterpret_cast<Y*>(args.z) + token * args.world.hidden);
    constexpr i32 kHalves = sizeof(Y) / 2;
    for (i32 i = first * kHalves + lane_idx(); i < past * kHalves; i += 32) row[i] = 0xFFFF;
    if (args.z_weights != nullptr && first == 0 && lane_idx() < topk)
      args.z_weights[token * topk + lane_idx()] = __uint_as_float(~0u);
  });
}

__device__ __forceinline__ void combine_receive(const CombineArgs& args, Team team, u8* shared, u64 number, u64 seq, u64 origin) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  if (await_peers(world, FLAG_COMBINE, seq * kWhole, OP_COMBINE, PHASE_PAYLOAD, start, waits_at(shared))) {
    const bool differs = origin_differs(world, origins_at(args), origin);  // asked for here, needed only at the end:
    reduce_home(args, team, shared);                                       // rows of another routing are only numbers
    if (__syncthreads_or(differs) != 0) {
      poison(args, team);
      if (team.block == 0) report_difference(world, OP_COMBINE, origins_at(args), origin);
    }
  } else {
    poison(args, team);
  }
  note_end(world, team, number, waits_at(shared));
}

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  Pipe pipe = open_pipe(args.work, shared);
  i32* rows = reinterpret_cast<i32*>(after_waits(args.world, shared));
  load_active(args.world);
  __syncthreads();
  ptx::wait_for_previous_launch();
  const u64 stop = ptx::load_volatile(&args.world.state->aborted);
  const bool sends = args.work.halves & kSend;
  const u64 seq = sends ? ptx::load_volatile(&args.world.state->combine_seq) + 1 : ptx::load_volatile(args.op + kOpSeq);
  if (stop != STOP_RUNNING) {  // z is known where this launch receives
    if (args.work.halves & kReceive) poison(args, team);
    return;
  }
  const u64 origin = ptx::load_volatile(args.origin), number = record_number(args.world, args.work.halves, args.op);
  if (sends) combine_send(args, team, pipe, rows, seq, origin);
  ptx::allow_next_launch();
  __syncthreads();
  if (args.work.halves & kReceive) combine_receive(args, team, shared, number, seq, origin);
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
