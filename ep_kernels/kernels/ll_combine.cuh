// Low-latency combine: each rank sums the rows that serve one (source, position) in fp32, in ascending k, rounds once and
// sends the partial home as lines that carry the operation's seq (device/lines.cuh); home polls the lines of a token's
// partials and sums them in ascending rank as they arrive.
//
//   owner rank: send blocks                                     home rank: receive blocks
//   y[places[source][position][k]] * weight  ...
//     fp32, ascending k -> combine dtype -> units ---------->   home_lines[owner][position]
//                                                               z[t] = sum over ranks ascending, fp32 -> output dtype
//
// KIND 0: rows per expert, combine weights them. 1: rows per rank, moved as they are. 2: exact: every routed row travels to
// home_lines[token][k] and is weighted at home, in ascending k.
// Y is the output dtype, C the combine dtype (e4m3: block-128 scales travel inside the unit).
//
// Worked example: token 5 of rank 2 went to rank 0 (k = 0 and 3) as its position 1, and to rank 1 (k = 1). Rank 0 writes
// bf16(w0 * y0 + w3 * y3) to rank 2's home_lines[0][1]; rank 2 finds (rank 0, position 1) and (rank 1, ..) in its `home` table.
//
// A partial whose rows were all dropped travels as +0. Memory order: none between lines. Reuse of a slot: a rank that has
// started num_in_flight combines more has, in stream order, read the slot.
#pragma once

// ---- send: this rank as owner ----

// What this warp sends; lane r: rows that source r, and source 32 + r, sent. After a dispatch that was stopped their memory may
// hold anything, and is looked at before the abort word is here: no more than there can be.
struct Owed {
  i32 low, high, most;
};

__device__ __forceinline__ Owed owed_rows(const CombineArgs& args) {
  const World& world = args.world;
  const i32 lane = lane_idx();
  Owed owed = {0, 0, 0};
  if (lane < world.size && is_active(lane)) owed.low = min(args.source_rows[lane], world.ll_tokens);
  if (lane + 32 < world.size && is_active(lane + 32)) owed.high = min(args.source_rows[lane + 32], world.ll_tokens);
  owed.most = __reduce_max_sync(~0u, max(owed.low, owed.high));
  return owed;
}

__device__ __forceinline__ bool is_whole_row(const CombineArgs& args) {
  return KIND == PER_RANK && args.positional && args.row_weights == nullptr;
}

__device__ __forceinline__ i32 units_per_row(const World& world) { return world.home_units * (KIND == EXACT ? world.topk : 1); }

// The task of queue.turn, or the first after it that there is; its places are loaded but not yet looked at. False: none is left.
__device__ __forceinline__ bool next_task(const CombineArgs& args, const Owed& owed, Queue& queue, Task& task) {
  const World& world = args.world;
  const i32 units = world.home_units, k = lane_idx(), topk = world.topk;
#pragma unroll 1
  for (; queue.turn.position < owed.most; refill(queue)) {
    const Turn turn = queue.turn;
    task.source = rank_of_hop(world, turn.source);
    task.position = turn.position;
    task.only = KIND == EXACT ? turn.index / units : 0;
    task.index = turn.index - task.only * units;
    const bool owes = task.position < __shfl_sync(~0u, task.source < 32 ? owed.low : owed.high, task.source & 31);
    if (owes) {
      const i64 at = position_of(world, task.source, task.position);
      task.place = static_cast<i32>(at);
      if (!is_whole_row(args)) {
        task.place = k < topk ? args.places[at * topk + k] : -1;
        task.weight = k < topk && args.apply_weights ? args.weights[at * topk + k] : 1.0f;
        if (KIND == EXACT) task.landing = args.tokens[at] * topk + task.only;
      }
    }
    if (owes) return true;
  }
  return false;
}

// Whether there is something to send, once the places are here.
__device__ __forceinline__ bool take_rows(const CombineArgs& args, Task& task) {
  if (is_whole_row(args)) {
    task.taken = 1;
    return true;
  }
  task.taken = __ballot_sync(~0u, task.place >= 0);
  if (KIND == PER_RANK) task.taken &= 0u - task.taken;
  if (KIND != EXACT) return true;
  task.taken &= 1u << task.only;
  return __shfl_sync(~0u, task.place, task.only) != -1;
}

// Numbers carried home beside a position, from whoever sends its first row's first unit.
__device__ __forceinline__ void send_weight_lines(const CombineArgs& args, const Task& task, u64 seq) {
  const World& world = args.world;
  const i32 topk = world.topk;
  const u32 here = __ballot_sync(~0u, lane_idx() < topk && task.place != -1);
  if (KIND == EXACT && task.only != __ffs(here) - 1) return;
  const i32 first = __shfl_sync(~0u, task.place, (__ffs(here) - 1) & 31);
  const i64 row = KIND == PER_RANK ? static_cast<i64>(first) * topk + lane_idx() : task.place;
  const f32 mine = lane_idx() < topk && task.place >= 0 ? args.row_weights[row] : 0.0f;
  const i32 num_lines = lines_for(topk, kLineInts), base = (lane_idx() >> 3) * kLineInts + (lane_idx() & 7) * 4;
  u32 word[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) word[i] = __float_as_uint(__shfl_sync(~0u, mine, (base + i) & 31));
  u8* at = weight_lines_at(args, task.source, line_position(world, world.rank, task.position));
  store_lines(at, num_lines, vector_of(word[0], word[1], word[2], word[3]), seq);
}

__device__ __forceinline__ void send_partial(const CombineArgs& args, u8* const* homes, const Task& task, Asked& asked, u64 seq) {
  const i32 row = KIND == EXACT ? task.landing : line_position(args.world, args.world.rank, task.position);
  u8* to = homes[task.source] + static_cast<i64>(row * args.world.home_units + task.index) * kUnitBytes;
  store_unit(to, make_partial(args, task, asked), seq);
  if (task.index == 0 && args.row_weights != nullptr) send_weight_lines(args, task, seq);
}

// Asks for the rows of a task whose places are here; false: it has none. Meanwhile the places of the next task are asked for.
__device__ __forceinline__ bool begin_task(const CombineArgs& args, const Owed& owed, Queue& queue, Task& task, Asked& asked,
                                           Task& next, bool& more) {
  const bool sends = take_rows(args, task);
  asked.left = task.taken;
  if (sends) ask_rows(args, task, asked);
  refill(queue);
  more = next_task(args, owed, queue, next);
  return sends;
}

// Units of all partials, by position, then by source, side by side with other blocks. `next` is the first, if there is one; while its
// rows are under way, permit() waits until homes may be written. Loads would queue behind a warp's own stores, so sums run ahead
// (kStaged; `stages` has room for two partials): while one partial leaves, the rows of the second and the places of the third are under
// way. Else a partial leaves before the next begins.
template <class Permit>
__device__ __forceinline__ void send_partials(const CombineArgs& args, u8* const* homes, u8* stages, const Owed& owed, Queue& queue,
                                              Task next, bool more, u64 seq, Permit permit) {
  Task now = {};
  Asked asked = {};
  asked.stage = stages;
  u8* vacant = stages + args.work.piece_bytes;
  bool sends = false, permitted = false;
#pragma unroll 1
  do {
    if (!kStaged && sends) send_partial(args, homes, now, asked, seq);
    Task second = next;
    Asked ahead = {};
    ahead.stage = vacant;
    const bool follows = more && begin_task(args, owed, queue, second, ahead, next, more);
    if (kStaged) ptx::copy_commit();
    if (!permitted) permitted = permit();
    if (!permitted) break;
    if (kStaged && sends) send_partial(args, homes, now, asked, seq);
    vacant = asked.stage;
    now = second;
    asked = ahead;
    sends = follows;
  } while (more || sends);
  if (kStaged) ptx::copy_wait<0>();
}

// Exact rows land by (token, k), anywhere in the slot: home must be in this very operation, not only past the slot's last use
// (one that goes on without this rank takes that back: kernels/barrier.cuh). Partials land in this rank's own part of it.
__device__ __forceinline__ u64 credit_needed(const World& world, Credit credit, u64 seq) {
  if (KIND == EXACT) return seq;
  return free_from(world, credit.last, seq);
}

// The routing that this rank combines, to each home: before its rows fill the links. One warp.
__device__ __forceinline__ void tell_origin(const CombineArgs& args, u64 origin, u64 seq) {
  for (i32 peer = lane_idx(); peer < args.world.size; peer += 32)
    if (is_active(peer)) ptx::store_pair(head_at(args, peer, args.world.rank), origin, seq);
}

// ---- receive: this rank as home ----

// The partials that make up a token, as a warp takes them in the order of their sum: by rank, or (exact) by k.
struct Terms {
  u64 left;  // ranks, or ks, still to come
  i32 rank, position;
  f32 weight;  // of this lane's k
};

__device__ __forceinline__ Home load_home(const CombineArgs& args, i32 token) {
  const i32 k = lane_idx(), topk = args.world.topk;
  return k < topk && token < args.num_tokens ? args.home[static_cast<i64>(token) * topk + k] : Home{-1, -1, -1, -1};
}

__device__ __forceinline__ Terms list_terms(const CombineArgs& args, const Home& home, i32 token) {
  Terms terms = {0, home.rank, home.position, 1.0f};
  const bool here = home.rank >= 0;
  if (KIND == EXACT) {
    terms.left = __ballot_sync(~0u, here);
    if (here && args.apply_weights) terms.weight = args.topk_weights[static_cast<i64>(token) * args.world.topk + lane_idx()];
    return terms;
  }
  terms.left = __reduce_or_sync(~0u, here && home.rank < 32 ? 1u << home.rank : 0);
  if (args.world.size > 32)
    terms.left |= static_cast<u64>(__reduce_or_sync(~0u, here && home.rank >= 32 ? 1u << (home.rank - 32) : 0)) << 32;
  return terms;
}

// Takes the next term: who sends it, the row of home_lines at which it lands, its weight.
__device__ __forceinline__ void take_term(const CombineArgs& args, Terms& terms, i32 token, i32* owner, i32* row, f32* weight) {
  const i32 next = __ffsll(terms.left) - 1;
  terms.left &= terms.left - 1;
  if (KIND == EXACT) {
    *owner = __shfl_sync(~0u, terms.rank, next);
    *row = token * args.world.topk + next;
    *weight = __shfl_sync(~0u, terms.weight, next);
    return;
  }
  const i32 k = __ffs(__ballot_sync(~0u, terms.rank == next)) - 1;
  *owner = next;
  *row = next * args.world.ll_tokens + __shfl_sync(~0u, terms.position, k);
}

// Unit `index` of z[token]; false where the wait was ended.
__device__ __forceinline__ bool reduce_unit(const CombineArgs& args, Terms terms, i32 token, i32 index,
                                            const u8* home, const volatile i32* verdict, u64* waits, u64 start, u64 seq) {
  const World& world = args.world;
  f32 first[kVector], second[kVector];
  begin_sum(terms.left != 0, first);
  begin_sum(terms.left != 0, second);
#pragma unroll 1
  while (terms.left != 0) {
    Unit units[kTogether];
    i32 number[kTogether] = {}, owner[kTogether] = {}, late = -1;
    f32 weight[kTogether];
    i32 count = 0;
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      if (terms.left == 0) continue;
      i32 row;
      take_term(args, terms, token, &owner[j], &row, &weight[j]);
      number[j] = row * world.home_units + index;
      ++count;
    }
    i32 missing = world.rank;
    auto look = [&] {
      bool there = true;
#pragma unroll
      for (i32 j = 0; j < kTogether; ++j) {
        if (peek_unit(home + static_cast<i64>(number[j]) * kUnitBytes, seq, &units[j], j < count)) continue;
        there = false;
        missing = owner[j];
      }
      return there;
    };
    const bool there = look();
    if (!__all_sync(~0u, there)) {
      if (!there) late = missing;
      if (!spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, missing, [&] { return *verdict != kSame || look(); }) ||
          __any_sync(~0u, *verdict != kSame))
        return false;
      if (late >= 0 && late != world.rank) note_wait(waits, late, ptx::now_ns() - start);
    }
#pragma unroll
    for (i32 j = 0; j < kTogether; ++j) {
      if (j >= count) continue;
      f32 scale_first = 1.0f, scale_second = 1.0f;
      if constexpr (kFp8) {
        scale_first = __uint_as_float(scale_of_block(units[j], first_block()));
        scale_second = __uint_as_float(scale_of_block(units[j], second_block()));
      }
      add_term(units[j].first, scale_first, weight[j], first);
      add_term(units[j].second, scale_second, weight[j], second);
    }
  }
  const i32 column = index * kUnitWidth + first_column();
  if (!(kFp8 && is_tag_lane())) write_columns(args, token, column, first);
  if (!is_tag_lane()) write_columns(args, token, column + kSecondColumn, second);
  return true;
}

// z_weights[token]: for each k what the rank that served it carried home.
__device__ __forceinline__ bool receive_weights(const CombineArgs& args, const Home& home, i64 token,
                                                const volatile i32* verdict, u64 seq) {
  const World& world = args.world;
  const i32 k = lane_idx(), topk = world.topk, num_lines = lines_for(topk, kLineInts);
  const i32 rank = home.rank, position = home.position;
  f32 mine = 0.0f;
  for (u32 left = __ballot_sync(~0u, rank >= 0); left != 0;) {
    const i32 lead = __ffs(left) - 1, from = __shfl_sync(~0u, rank, lead);
    const u8* at = weight_lines_at(args, world.rank, line_position(world, from, __shfl_sync(~0u, position, lead)));
    Vector loaded = {};
    if (!spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, from,
                         [&] { return *verdict != kSame || peek_lines(at, num_lines, seq, &loaded); }))
      return false;
    const Vector got = shuffle(loaded, k / kLineInts * 8 + k % kLineInts / 4);
    if (rank == from) mine = __uint_as_float(word_of(got, k % 4));
    left &= ~__ballot_sync(~0u, rank == from);
  }
  if (k < topk) args.z_weights[token * topk + k] = mine;
  return true;
}

// Whether all owners combine this routing. One warp, beside those that take the rows: these are told through `verdict`.
__device__ __forceinline__ void await_origins(const CombineArgs& args, volatile i32* verdict, u64 origin, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  for (i32 base = 0; base < world.size; base += 32) {
    const i32 owner = base + lane_idx();
    const bool asked = owner < world.size && is_active(owner);
    Vector head = {origin, seq};
    const u8* at = head_at(args, world.rank, asked ? owner : world.rank);
    const bool ok = spin::warp_wait(world, seq, OP_COMBINE, PHASE_PAYLOAD, owner, [&] {
      if (asked) head = ptx::load_pair<Vector>(at);
      return head.high == seq;
    });
    const bool same = __all_sync(~0u, head.low == origin);
    if (lane_idx() == 0 && !(ok && same)) *verdict = ok ? kDiffers : kFailed;
    if (!ok) return;
  }
}

// Unit `index` of z[token] as NaN, in every output dtype.
__device__ __forceinline__ void poison_unit(const CombineArgs& args, i64 token, i32 index) {
  const f32 nan = __uint_as_float(~0u);
  f32 values[kVector];
#pragma unroll
  for (i32 i = 0; i < kVector; ++i) values[i] = nan;
  const i32 column = index * kUnitWidth + first_column();
  if (!(kFp8 && is_tag_lane())) write_columns(args, token, column, values);
  if (!is_tag_lane()) write_columns(args, token, column + kSecondColumn, values);
  if (args.z_weights != nullptr && index == 0 && lane_idx() < args.world.topk)
    args.z_weights[token * args.world.topk + lane_idx()] = nan;
}

// z of this team's units, or NaN.
template <class Make>
__device__ __forceinline__ void for_units(const CombineArgs& args, Team team, Make make) {
  const Divisor units = divisor_of(args.world.home_units);
  i32 item = first_item(team), position = divide(item, units);
  Home next = load_home(args, position);
#pragma unroll 1
  while (position < args.num_tokens) {
    const i32 token = position, index = item - position * units.value;
    const Home home = next;
    item += num_items_at_once(team);
    position = divide(item, units);
    next = load_home(args, position);
    make(home, token, index);
  }
}

__device__ __forceinline__ void poison_units(const CombineArgs& args, Team team) {
  for_units(args, team, [&](const Home&, i32 token, i32 index) { poison_unit(args, token, index); });
}

__device__ __forceinline__ void combine_receive(const CombineArgs& args, Team team, u8* shared, i32* verdict, u64 number,
                                                u64 origin, u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  u64* waits = waits_at(shared);
  const u8* lines = ptx::known(home_lines_at(args, world.rank));
  if (warp_idx() == num_warps() - 1) await_origins(args, verdict, origin, seq);
  for_units(args, team, [&](const Home& home, i32 token, i32 index) {
    bool ok = reduce_unit(args, list_terms(args, home, token), token, index, lines, verdict, waits, start, seq);
    if (ok && args.z_weights != nullptr && index == 0) ok = receive_weights(args, home, token, verdict, seq);
    if (!ok && lane_idx() == 0) atomicCAS(verdict, kSame, kFailed);
  });
  __syncthreads();
  if (*verdict != kSame) poison_units(args, team);
  if (*verdict == kDiffers && team.block == 0 && threadIdx.x == 0)
    report_difference(world, OP_COMBINE, origin,
                      [&](i32 peer) { return ptx::load_pair<Vector>(head_at(args, world.rank, peer)).low; });
  note_end(world, team, number, waits);
}

// One thread of a block. When the last comes here, every warp has its counters (is_stopped): the next operation's are
// set at once.
__device__ __forceinline__ void advance(const CombineArgs& args, i32 num_blocks, i32 receivers, u64 seq, u64 start) {
  if (!arrive(args.world, {0, num_blocks}, TICKET_COMBINE_SEND)) return;
  args.world.state->taken[16] = 0;
  args.world.state->combine_seq = seq;
  args.world.state->combine_slot_seq[args.slot] = seq;
  note_sent(args.world, OP_COMBINE, args.mode, args.num_tokens, seq, start, args.op, receivers);
}

__device__ __forceinline__ void combine_team(const CombineArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ i32 verdict;
  __shared__ u64 start, number;  // of the operation; its record
  const World& world = args.world;
  u8** homes = reinterpret_cast<u8**>(after_waits(world, shared));  // [R] where partials of all owners lie
  u8* stages = shared + args.work.stage_offset + warp_idx() * 2 * args.work.piece_bytes + lane_idx() * kCopyBytes;
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  const i32 senders = sends ? receives ? static_cast<i32>(args.work.num_senders) : team.num_blocks : 0;
  const bool apart = senders < team.num_blocks, here = team.block < senders;
  const Team sending = {team.block, max(1, senders)};
  const Team receiving = apart ? Team{team.block - senders, team.num_blocks - senders} : team;
  const Divisor items = divisor_of(units_per_row(world)), sources = divisor_of(world.size);
  Queue queue = queue_of(sending, num_warps(), items, sources, world.state->taken + 16);
  load_active(world);
  for (i32 i = threadIdx.x; i < world.size; i += THREADS) {
    waits_at(shared)[i] = 0;
    homes[i] = home_lines_at(args, i);
  }
  if (threadIdx.x == 0) verdict = kSame;
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  // All is asked for before anything is looked at (owed_rows does, last): what is computed from an answer, above, would be waited for.
  const u64 stop = ptx::load_cached(&world.state->aborted), origin = ptx::load_cached(args.origin);
  const u64 last = ptx::load_cached(sends ? &world.state->combine_seq : args.op + kOpSeq);
  const u64 record = record_number(world, args.work.halves, args.op);
  Credit credit = {0, 0};
  Owed owed = {0, 0, 0};
  if (here) {
    credit = warp_ask_credit(world, FLAG_COMBINE_STARTED, &world.state->combine_slot_seq[args.slot]);
    owed = owed_rows(args);
  }
  const u64 seq = last + sends;
  if (threadIdx.x == THREADS - 1) {
    start = ptx::now_ns();
    number = record;
  }
  if (here) {
    Task task = {};
    const bool more = next_task(args, owed, queue, task);
    const bool first = team.block == 0 && warp_idx() == num_warps() - 1;
    if (first && stop == STOP_RUNNING) warp_tell_started(world, FLAG_COMBINE_STARTED, seq);
    if (stop == STOP_RUNNING)
      send_partials(args, homes, stages, owed, queue, task, more, seq, [&] {
        const u64 needed = credit_needed(world, credit, seq);
        if (!warp_await_credit(world, FLAG_COMBINE_STARTED, credit, needed, OP_COMBINE)) return false;
        if (first) tell_origin(args, origin, seq);
        return true;
      });
  }
  const bool reads = receives && (!apart || !here);
  if (is_stopped(stop, last, record)) return reads ? poison_units(args, receiving) : void();
  if (sends && threadIdx.x == THREADS - 1)
    advance(args, team.num_blocks, receives ? receiving.num_blocks : team.num_blocks, seq, start);
  if (reads) combine_receive(args, receiving, shared, &verdict, number, origin, seq);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS) ll_combine(const __grid_constant__ CombineArgs args) {
  combine_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS) ll_combine(const CombineArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  combine_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
