// Low-latency dispatch: each token's row goes once to every rank that holds one of its experts, as lines that carry the
// operation's seq (device/lines.cuh). The receiver polls the lines themselves and puts each vector where it finally belongs,
// so rows are expanded per expert while the rest is still under way.
//
//   source rank: send blocks                            destination rank: receive blocks
//   last block: origin, rows, rows per expert -------->  heads, count_lines[source] -> where all rows go
//   per token, rank: experts, indices, weights ------->  meta_lines[source][position]
//   per token, rank: x[t] --quantise?--> units ------->  lines[source][position] -> rows (one per expert, or per rank)
//
// Routing is in device/walk.cuh. With a previous handle the keys come from it (Home); the rest follows from them again.
//
// Worked example: R = 2, K = 2, rank 1 sends token 0 to experts (rank 0, slot 1) and (rank 0, slot 0): one row lands in
// rank 0's lines[1][0] with the records {1, index}, {0, index}; rank 0 writes each of its vectors to both experts' groups.
//
// Memory order: none between lines; what a line says is complete in itself. Reuse of a slot: the peer's STARTED flag is in
// stream order after its last read of the slot (warp_await_credit). The link is first in, first out: what others wait for
// (counts, then records) leaves before rows fill it.
#pragma once

// ---- send ----

// What a lane knows of (token, k = lane).
struct Entry {
  i32 id;
  f32 weight;
  Home home;  // of a routing used again
};

__device__ __forceinline__ Entry load_entry(const DispatchArgs& args, i32 token) {
  Entry entry = {kNowhere, 0.0f, {kNowhere, -1, -1, -1}};
  if (lane_idx() >= args.world.topk || token >= args.num_tokens) return entry;
  const i32 at = token * args.world.topk + lane_idx();
  entry.weight = args.topk_weights[at];
  if (args.cached) entry.home = args.home[at];
  else entry.id = args.topk_ids[at];
  return entry;
}

// What this rank keeps of a token: where its rows go.
__device__ __forceinline__ void keep_home(const DispatchArgs& args, const Stops& stops, i32 key, i32 place, i32 token) {
  const i32 topk = args.world.topk, k = lane_idx(), at = token * topk + k;
  const i32 mine = of_hop(args.world, stops.low, stops.high, hop_of_rank(args.world, max(key, 0) >> 16));
  if (k < topk && !args.cached) args.home[at] = key < 0 ? Home{key, -1, -1, -1} : Home{key >> 16, mine, key & 0xFFFF, place};
  const bool valid = __all_sync(~0u, key != kGone);
  if (k == 0) args.valid[token] = valid;
}

// The token's records to one of its ranks.
__device__ __forceinline__ void send_records(const DispatchArgs& args, const LlScratch& scratch, const Entry& entry, i32 key,
                                             i32 place, i32 token, i32 hop, i32 position, u64 seq) {
  const World& world = args.world;
  const bool here = key >= 0 && key >> 16 == rank_of_hop(world, hop);
  const Vector record =
      vector_of(here ? key & 0xFFFF : ~0u, here ? place : ~0u, here ? __float_as_uint(entry.weight) : 0, token);
  u8* to = scratch.records_to[hop] + static_cast<i64>(position) * (world.meta_lines * kLineBytes);
#pragma unroll 1
  for (i32 line = 0; line < world.meta_lines; line += 4) {
    const i32 from = (line + (lane_idx() >> 3)) * kLineMetas + (lane_idx() & 7);
    Vector value = shuffle(record, from & 31);
    if (from >= world.topk) value = vector_of(~0u, ~0u, 0, token);
    store_lines(to + line * kLineBytes, min(4, world.meta_lines - line), value, seq);
  }
}

// This team's share of all records, one (token, rank) after the other; `entry` is of its first token.
__device__ __forceinline__ void send_all_records(const DispatchArgs& args, Team team, const LlScratch& scratch, Entry entry,
                                                 Divisor ranks, u64 seq) {
  const World& world = args.world;
  Walk walk = start_walk(world, scratch);
  const i32 step = num_items_at_once(team);
  i32 item = first_item(team), token = divide(item, ranks);
#pragma unroll 1
  while (token < args.num_tokens) {
    const Entry now = entry;
    const i32 current = token, hop = item - token * ranks.value;
    item += step;
    token = divide(item, ranks);
    if (token != current) entry = load_entry(args, token);
    walk_to(world, scratch, current >> 5, walk);
    const Stops stops = stops_of(world, walk, current);
    const bool goes = (hop < 32 ? stops.hops_low : stops.hops_high) >> (hop & 31) & 1;
    if (!goes && hop != 0) continue;
    const i32 key = args.cached ? key_of(world, now.home) : key_of(world, scratch.table, now.id, current);
    i32 place = now.home.place;
    if (kPerExpert && !args.cached)
      place = scratch.seen == nullptr || *scratch.twice ? rows_counted(args, scratch.table, current, key)
                                                        : rows_noted(world, scratch, current, key);
    if (goes) send_records(args, scratch, now, key, place, current, hop, of_hop(world, stops.low, stops.high, hop), seq);
    if (hop == 0) keep_home(args, stops, key, place, current);
  }
}

// The rows, unit by unit; this warp's first has been asked for.
__device__ __forceinline__ void send_rows(const DispatchArgs& args, const LlScratch& scratch, Queue& queue, Loaded asked,
                                          u64 seq) {
  const World& world = args.world;
  Walk walk = start_walk(world, scratch);
  const i32 lane = min(lane_idx(), world.size - 1), other = min(lane_idx() + 32, world.size - 1);
#pragma unroll 1
  while (queue.turn.position < args.num_tokens) {
    const Turn now = queue.turn;
    const Loaded loaded = asked;
    Unit row;
    if (kMakesFirst) row = make_unit(args, loaded);
    refill(queue);
    if (queue.turn.position < args.num_tokens) asked = load_unit<X>(args, queue.turn.position, queue.turn.index);
    walk_to(world, scratch, now.position >> 5, walk);
    const Stops stops = stops_of(world, walk, now.position);
    if (!kMakesFirst) row = make_unit(args, loaded);
    auto send_to = [&](u32 hops, const u8* lines, i32 position) {  // lane i: of its hop
      const i64 number = position * world.row_units + now.index;  // fewer than 2^31, as a unit is of 1024 bytes
      const u64 to = reinterpret_cast<u64>(lines) + number * kUnitBytes;
#pragma unroll 1
      for (u32 left = hops; left != 0; left &= left - 1)
        store_unit(reinterpret_cast<u8*>(__shfl_sync(~0u, to, __ffs(left) - 1)), row, seq);
    };
    send_to(stops.hops_low, scratch.lines_to[lane], stops.low);
    if (world.size > 32) send_to(stops.hops_high, scratch.lines_to[other], stops.high);
  }
}

// ---- receive ----

// Final row of a position, rank-wise layouts; kDropped past the capacity.
__device__ __forceinline__ i32 row_of(const DispatchArgs& args, const LlScratch& scratch, i32 source, i32 position) {
  return admit(first_row(args, scratch, source) + position, 0, args.world.capacity);
}

// Whether a warp adds up the counts of the sources before its own, where it needs them, instead of waiting for a layout.
__device__ __forceinline__ bool adds_up(const World& world) { return LAYOUT == EXPERT_MAJOR && world.size <= 16; }

// Final row that serves this lane's k; -1 = none.
__device__ __forceinline__ i32 place_of(const DispatchArgs& args, const LlScratch& scratch, const Meta& meta, i32 source,
                                        i32 position) {
  if (meta.local_expert < 0) return -1;
  if (!kPerExpert) return row_of(args, scratch, source, position);
  if (adds_up(args.world)) {
    i32 row = meta.local_expert * args.world.capacity + meta.place;
#pragma unroll 4
    for (i32 s = 0; s < source; ++s) row += scratch.arrived[s * arrived_stride(args.world) + 1 + meta.local_expert];
    return admit(row, meta.local_expert, args.world.capacity);
  }
  return admit(first_row(args, scratch, source, meta.local_expert) + meta.place, meta.local_expert, args.world.capacity);
}

// What combine and the caller need of a received position. One warp; lane k has record k.
__device__ __forceinline__ void record_row(const DispatchArgs& args, const LlScratch& scratch, const Meta& meta, i32 source,
                                           i32 position) {
  const World& world = args.world;
  const i32 topk = world.topk, k = lane_idx();
  const i32 at = source * world.max_tokens + position, entry = at * topk + k;  // 31 bits: plan.sizes_of
  if (k >= topk) return;
  args.places[entry] = place_of(args, scratch, meta, source, position);
  args.weights[entry] = meta.weight;
  if (k == 0) args.tokens[at] = meta.token;
  if (kPerExpert) return;
  const i32 row = row_of(args, scratch, source, position);
  if (row < 0) return;
  args.out_ids[row * topk + k] = meta.local_expert;
  args.out_weights[row * topk + k] = meta.weight;
}

// An arrival whose lines are here, to its final rows. False after a failed wait.
__device__ __forceinline__ bool deliver(const DispatchArgs& args, const LlScratch& scratch, const Arrival& arrival,
                                        i32 num_rows, u64 seq) {
  const World& world = args.world;
  const i32 source = source_at(world, arrival.turn), position = arrival.turn.position;
  Meta record = {-1, -1, 0.0f, 0};
  if ((kPerExpert || is_records(world, arrival)) && !record_of(args, arrival, seq, &record)) return false;
  if (is_records(world, arrival)) {
    record_row(args, scratch, record, source, position);
  } else {
    const i32 row = kPerExpert ? place_of(args, scratch, record, source, position) : row_of(args, scratch, source, position);
    const u32 placed = kPerExpert ? __ballot_sync(~0u, row >= 0) : row >= 0;
    write_unit(args, arrival.unit, arrival.turn.index, row, placed, num_rows);
  }
  return true;
}

// All threads; ends with a block barrier. `verdict` is kHere before. Meanwhile a warp looks at its first item; a unit whose
// place does not depend on the counts goes there at once, and `first` is then no item any more.
__device__ __forceinline__ i32 await_counts(const DispatchArgs& args, const LlScratch& scratch, i32* verdict, u64* heads_here,
                                            Arrival& first, u64 origin, u64 seq, u64 start, u64* waits) {
  i32 found = kHere;
  const i32 helper = num_warps() - 1 - warp_idx();  // in small steps items are the first warps'
  const bool asks = helper == (kPerExpert ? min(args.world.size, num_warps() - 1) : 1);
  const bool helps = asks || (kPerExpert && helper < args.world.size);
  if (asks) found = await_heads(args, scratch, origin, seq, start, waits);
  for (i32 source = helper; kPerExpert && source < args.world.size; source += num_warps())
    if (!await_count_lines(args, scratch, source, seq)) found = kFailed;
  if (found != kHere && lane_idx() == 0) atomicMax(verdict, found);
  if (asks && lane_idx() == 0) ptx::barrier_arrive(heads_here);
  if (first.turn.position < args.world.ll_tokens) {
    locate(args, scratch, first);
    look(args, first, seq);
    while (!helps && !__all_sync(~0u, first.there || ptx::barrier_is_complete(heads_here, 0))) look(args, first, seq);
    if (LAYOUT == RANK_MAJOR && !is_records(args.world, first) && __all_sync(~0u, first.there))
      first.delivered = deliver(args, scratch, first, 0, seq);
  }
  __syncthreads();
  return *verdict;
}

// Whether the source sends this item.
__device__ __forceinline__ bool is_sent(const World& world, const LlScratch& scratch, Turn turn) {
  return turn.position < scratch.arrived[source_at(world, turn) * arrived_stride(world)];
}

__device__ __forceinline__ void swap(Arrival& a, Arrival& b) {
  const Arrival kept = a;
  a = b;
  b = kept;
}

// Goes on to the next item that arrives, in the order in which they are likely to: by position, then by source. False: none is left.
__device__ __forceinline__ bool next_arrival(const DispatchArgs& args, const LlScratch& scratch, Turn& turn, Turn step,
                                             i32 most, Arrival& next, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  while (turn.position < most) {
    next.turn = turn;
    move_on(turn, step, world.row_units + 1, world.size);
    if (!is_sent(world, scratch, next.turn)) continue;
    locate(args, scratch, next);
    look(args, next, seq);
    return true;
  }
  return false;
}

// Everything that arrives, to its place. A warp looks at its next item while it puts the present one where it belongs.
// `next` is the first, which may not exist: it was looked at before the counts were here.
__device__ __forceinline__ bool receive_rows(const DispatchArgs& args, const LlScratch& scratch, Arrival next, Turn step,
                                             u64 seq, u64 start, u64* waits) {
  const World& world = args.world;
  Turn turn = next.turn;
  move_on(turn, step, world.row_units + 1, world.size);
  const i32 num_rows = LAYOUT == GROUPED || LAYOUT == FLAT ? rows_delivered(args, scratch) : 0;  // else no scales depend on it
  i32 most = 0;
  for (i32 source = lane_idx(); source < world.size && turn.position < world.ll_tokens; source += 32)
    most = max(most, scratch.arrived[source * arrived_stride(world)]);
  most = __reduce_max_sync(~0u, most);
  bool more = !next.delivered && is_sent(world, scratch, next.turn);
  if (!more) more = next_arrival(args, scratch, turn, step, most, next, seq);
#pragma unroll 1
  while (more) {
    Arrival now = next;
    more = next_arrival(args, scratch, turn, step, most, next, seq);
    if (!more) next.there = false;
    if (!__all_sync(~0u, now.there)) {  // two are looked at together: rows overtake one another on their way
      const i32 source = source_at(world, now.turn);
      i32 looks = 0;  // the one before may be from long ago
      if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source, [&] {
            if (more && __all_sync(~0u, next.there)) return true;
            ++looks;
            look(args, now, seq);
            if (more) look(args, next, seq);
            return now.there;
          }))
        return false;
      if (!__all_sync(~0u, now.there))
        swap(now, next);
      else if (looks > 1 && lane_idx() == 0 && source != world.rank)
        note_wait(waits, source, ptx::now_ns() - start);
    }
    if (!deliver(args, scratch, now, num_rows, seq)) return false;
  }
  return true;
}

// Receives this team's items, from `turn` on. One block `keeps`: it also writes the counts that the caller gets.
// Nothing may look delivered after a failed wait, whoever finds out first: the keeper looks for a failure after it has
// written, and whoever fails zeroes the counts after it has said so. The fences between are sequentially consistent:
// with weaker ones each could miss what the other did.
__device__ __forceinline__ void ll_receive(const DispatchArgs& args, Team team, LlScratch& scratch, u8* shared, i32* verdict,
                                           u64* heads_here, Turn turn, Turn step, bool keeps, u64 number, u64 origin,
                                           u64 seq) {
  const World& world = args.world;
  const u64 start = note_receive(world, team, args.work.halves, number);
  u64* waits = waits_at(shared);
  Arrival first;
  first.turn = turn;
  first.delivered = false;
  const i32 counts = await_counts(args, scratch, verdict, heads_here, first, origin, seq, start, waits);
  bool ok = counts != kFailed;
  if (counts == kHere) {
    if (LAYOUT == RANK_MAJOR) {
      if (keeps && warp_idx() == 0)
        write_rank_counts(args, [&](i32 source) { return scratch.arrived[source * arrived_stride(world)]; });
    } else if (keeps || !adds_up(world)) {
      lay_out(args, scratch, kPerExpert, false,
              [&](i32 source, i32 e) { return scratch.arrived[source * arrived_stride(world) + 1 + e]; });
      if (keeps) write_counts(args, scratch);
    }
    ok = receive_rows(args, scratch, first, step, seq, start, waits);
  } else if (counts == kDiffers && keeps) {
    write_no_counts(args);
    if (threadIdx.x == 0)
      report_difference(world, OP_DISPATCH, origin,
                        [&](i32 peer) { return origin_told(ptx::load_pair<Vector>(head_at(args, world.rank, peer))); });
  }
  if (keeps) {
    ptx::fence_sc_gpu();
    ok &= ptx::load_volatile(&world.state->aborted) == STOP_RUNNING;
  }
  if (__syncthreads_or(!ok) != 0) {
    ptx::fence_sc_gpu();
    write_no_counts(args);
  }
  note_end(world, team, number, waits);
}

// One thread of a block. When the last comes here, every warp has its counters (is_stopped): the next operation's are
// set at once.
__device__ __forceinline__ void advance(const DispatchArgs& args, i32 num_blocks, i32 receivers, u64 seq, u64 start) {
  if (!arrive(args.world, {0, num_blocks}, TICKET_DISPATCH_SEND)) return;
  args.world.state->taken[0] = 0;
  args.world.state->dispatch_seq = seq;
  args.world.state->dispatch_slot_seq[args.slot] = seq;
  note_sent(args.world, OP_DISPATCH, 0, args.num_tokens, seq, start, args.op, receivers);
}

// Of a block that sends, so many warps carry rows. Half, where the links are what limits: more fill them no better, and hold what others
// could have sent when the queue runs dry. Of two ranks' rows half stay at home, and warps limit; but rows that become fp8 are few bytes.
__device__ __forceinline__ i32 num_carriers(const World& world) {
  return kQuantised || world.size > 2 ? num_warps() / 2 : num_warps();
}

// Who does what. The first `num_senders` blocks send rows, but the last of them tells and keeps the counts; the others send
// records, whose loads would queue behind rows, and receive. A rank of one block does all.
__device__ __forceinline__ void ll_dispatch_team(const DispatchArgs& args, Team team) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ i32 verdict;     // what await_counts found
  __shared__ u64 heads_here;  // mbarrier
  __shared__ bool twice;
  __shared__ Told told;
  const World& world = args.world;
  __shared__ const u8* here_at[2];
  LlScratch scratch = carve_ll(world, shared, &twice, here_at);
  const bool sends = args.work.halves & kSend, receives = args.work.halves & kReceive;
  const i32 senders = sends ? receives ? static_cast<i32>(args.work.num_senders) : team.num_blocks : 0;
  const bool apart = senders < team.num_blocks, here = team.block < senders, tells = here && team.block == senders - 1;
  const Team rows = {team.block, max(1, senders - 1)};
  const Team arrivals = apart ? Team{max(0, team.block - senders), team.num_blocks - senders} : team;
  const bool carries = here && rows.block < rows.num_blocks;
  const bool keeps = receives && (apart && sends ? tells : team.block == team.num_blocks - 1);
  const Team records = apart ? arrivals : rows;
  const bool notes = sends && (apart ? !here : carries) && records.block < args.num_tokens * world.size;
  const Divisor units = divisor_of(world.row_units), arriving = divisor_of(world.row_units + 1);
  const Divisor sources = divisor_of(world.size), topk = divisor_of(world.topk), one = divisor_of(1);
  const bool wants = kPerExpert && notes && !args.cached && scratch.seen != nullptr, routes = tells || carries || notes;
  load_active(world);
  fill_table(world, scratch.table);
  if (warp_idx() == num_warps() - 1) {  // each by a warp of its own: a late block's start is waited for
    for (i32 i = lane_idx(); i < world.size; i += 32) scratch.lines_to[i] = lines_at(args, rank_of_hop(world, i), world.rank);
  } else if (warp_idx() == num_warps() - 2) {
    for (i32 i = lane_idx(); i < world.size; i += 32) scratch.records_to[i] = meta_lines_at(args, rank_of_hop(world, i), world.rank);
  } else if (warp_idx() == num_warps() - 3) {
    for (i32 i = lane_idx(); i < world.size; i += 32) waits_at(shared)[i] = 0;
    for (i32 i = lane_idx(); i < MAX_RANKS; i += 32) told.rows[i] = 0;
  } else if (threadIdx.x == 0) {
    scratch.here[0] = lines_at(args, world.rank, 0);
    scratch.here[1] = meta_lines_at(args, world.rank, 0);
    verdict = told.invalid = 0;
    twice = false;
    ptx::barrier_init(&heads_here);
  }
  for (i32 i = threadIdx.x; kPerExpert && tells && i < num_keys(world); i += THREADS) scratch.before[i] = 0;
  for (i32 i = threadIdx.x; routes && i < aligned(max(args.num_tokens, 1), 32); i += THREADS) scratch.masks[i] = 0;
  for (i32 i = threadIdx.x; wants && i < num_keys(world) * chunks_of(world); i += THREADS) scratch.seen[i] = 0;
  Queue queue = queue_of(rows, num_carriers(world), units, one, world.state->taken);
  const Turn none = {world.ll_tokens, 0, 0};
  const Turn arrival = apart && here ? none : turn_of(first_item(arrivals), arriving, sources);
  const Turn arrival_step = turn_of(num_items_at_once(arrivals), arriving, sources);
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  // All is asked for before anything is looked at; what is computed from an answer, above, would be waited for.
  const u64 stop = ptx::load_cached(&world.state->aborted);
  const u64 last = ptx::load_cached(sends ? &world.state->dispatch_seq : args.op + kOpSeq);
  Credit credit = {0, 0};
  if (here || notes) credit = warp_ask_credit(world, FLAG_STARTED, &world.state->dispatch_slot_seq[args.slot]);
  Ids ids = {};
  if (routes) ids = ask_ids(args);
  Entry entry = {};
  if (notes) entry = load_entry(args, divide(first_item(records), sources));
  const u64 number = record_number(world, args.work.halves, args.op);
  Loaded unit = {};
  const bool moves = carries && warp_idx() < num_carriers(world);
  if (moves && queue.turn.position < args.num_tokens) unit = load_unit<X>(args, queue.turn.position, queue.turn.index);
  const u64 start = threadIdx.x == THREADS - 1 ? ptx::now_ns() : 0, seq = last + sends, origin = origin_of(args, seq);
  if (tells && stop == STOP_RUNNING && warp_idx() == num_warps() - 2)  // before anything of this operation waits for peers
    warp_tell_started(world, FLAG_STARTED, seq);
  bool granted = false;
  if (here || notes) {
    const u64 needed = free_from(world, credit.last, seq);
    granted = stop == STOP_RUNNING && warp_await_credit(world, FLAG_STARTED, credit, needed, OP_DISPATCH);
  }
  if (routes)
    for_entries(args, scratch, ids, topk, [&](i32 token, i32 key) {
      const bool fresh = key >= 0 && !note_rank(world, scratch, token, key);
      if (wants && key >= 0) note_want(world, scratch, token, key);
      if (tells) count_entry(world, scratch, told, key, fresh);
    });
  if (is_stopped(stop, last, number)) return keeps ? write_no_counts(args) : void();
  if (tells && threadIdx.x == 0) *args.num_invalid_ids = told.invalid;
  if (tells && warp_idx() == 0 && granted)
    tell_heads(args, told.rows[lane_idx()], told.rows[lane_idx() + 32], origin, seq);
  if (tells && kPerExpert && granted) tell_counts(args, scratch, seq);
  if (notes && first_item(records) < args.num_tokens * world.size && granted)
    send_all_records(args, records, scratch, entry, sources, seq);
  if (moves && granted) send_rows(args, scratch, queue, unit, seq);
  if (here) __syncthreads();
  if (sends && threadIdx.x == THREADS - 1)
    advance(args, team.num_blocks, receives ? arrivals.num_blocks + (apart ? 1 : 0) : team.num_blocks, seq, start);
  const Team receiving = here && apart ? Team{arrivals.num_blocks, arrivals.num_blocks + 1} : arrivals;
  if (receives && (!apart || !here || keeps))
    ll_receive(args, receiving, scratch, shared, &verdict, &heads_here, arrival, arrival_step, keeps, number, origin, seq);
}

#ifndef LOOPBACK
extern "C" __global__ void __launch_bounds__(THREADS) ll_dispatch(const __grid_constant__ DispatchArgs args) {
  ll_dispatch_team(args, {static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)});
}
#else  // all ranks on one GPU: blocks_per_rank consecutive blocks are one rank
extern "C" __global__ void __launch_bounds__(THREADS) ll_dispatch(const DispatchArgs* ranks, i32 blocks_per_rank) {
  const i32 block = blockIdx.x;
  ll_dispatch_team(ranks[block / blocks_per_rank], {block % blocks_per_rank, blocks_per_rank});
}
#endif
