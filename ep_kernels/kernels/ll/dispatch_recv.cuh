// Receive phase of LL dispatch: polls packets and token metadata, and writes each to its final rows.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/push.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "common/signal.cuh"
#include "common/status.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "layout/ll128.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ll_counts.cuh"
#include "routing/ll_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// The scale that a lane writes for an fp8 packet: lane b that of block b, for every row to which the packet goes; lanes
// past the last block pad packed words with zero bytes.
struct LaneScale {
  u32 bits;
  i64 offset;  // bytes from the row's first scale
  bool writes;
};

__device__ __forceinline__ LaneScale lane_scale(const DispatchArgs& args, const Packet& packet, i32 index,
                                                i32 num_rows) {
  const i32 blocks = (args.world.hidden + quant::kBlock - 1) / quant::kBlock;
  const i32 first = index * kPacketBlocks, block = first + lane_idx();
  const bool packed = args.power_of_two == quant::kPacked;
  const bool real = lane_idx() < kPacketBlocks && block < blocks;
  const bool pads = packed && first + kPacketBlocks >= blocks && block >= blocks && block < (blocks + 3) / 4 * 4;
  const u32 bits = scale_of_block(packet, lane_idx());
  const i64 column = args.scale_column_stride != 0 ? args.scale_column_stride : aligned(num_rows, 4);
  const i64 offset = !packed ? block * 4 : args.scale_row_stride == 0 ? block : block / 4 * column * 4 + block % 4;
  return {real ? bits : 0, offset, real || pads};
}

// Byte offset in out_scales of a row's first scale.
__device__ __forceinline__ i64 first_scale(const DispatchArgs& args, i32 row) {
  const World& world = args.world;
  if (args.scale_row_stride == 0) return static_cast<i64>(row) * world.scale_bytes;
  if (LAYOUT == GROUPED || LAYOUT == FLAT) return static_cast<i64>(row) * args.scale_row_stride * 4;
  const i32 per_group = LAYOUT == EXPERT_MAJOR ? world.capacity : world.max_tokens, group = row / per_group;
  return (group * static_cast<i64>(args.scale_group_stride) +
          (row - group * per_group) * static_cast<i64>(args.scale_row_stride)) *
         4;
}

// Writes packet `index` of a row to the final row `dst_row` of every lane in `row_mask`.
__device__ __forceinline__ void write_packet(const DispatchArgs& args, const Packet& packet, i32 index, i32 dst_row,
                                             u32 row_mask, i32 num_rows) {
  const World& world = args.world;
  const i32 offset = first_offset() + index * (kQuantised ? kPacketColumns : kPacketData);
  const bool first = offset < world.row_bytes && !(kQuantised && is_flag_lane());
  const bool second = offset + kSecondOffset < world.row_bytes && !is_flag_lane();
  u8* to = row_at(args, world.rank, 0) + offset;
  LaneScale scale = {};
  i64 scales_of_lane = 0;
  if constexpr (kQuantised) {
    scale = lane_scale(args, packet, index, num_rows);
    scales_of_lane = first_scale(args, dst_row);
  }
#pragma unroll 1
  for (u32 left = row_mask; left != 0; left &= left - 1) {
    const i32 leader = __ffs(left) - 1, row = __shfl_sync(~0u, dst_row, leader);
    u8* at = to + static_cast<i64>(row) * world.row_bytes;
    if (first) *reinterpret_cast<Vector*>(at) = packet.first;
    if (second) *reinterpret_cast<Vector*>(at + kSecondOffset) = packet.second;
    if constexpr (kQuantised) {
      u8* one = args.out_scales + __shfl_sync(~0u, scales_of_lane, leader) + scale.offset;
      if (scale.writes && args.power_of_two == quant::kPacked) *one = static_cast<u8>(scale.bits >> 23);
      else if (scale.writes) *reinterpret_cast<u32*>(one) = scale.bits;
      continue;
    }
    if (world.scale_bytes == 0) continue;
    u8* scales = args.out_scales + static_cast<i64>(row) * world.scale_bytes;
    const i32 one = offset - world.row_bytes, two = one + kSecondOffset;
    if (one >= 0 && one < world.scale_bytes) store_bytes(scales + one, packet.first, world.scale_bytes - one);
    if (two >= 0 && two < world.scale_bytes && !is_flag_lane())
      store_bytes(scales + two, packet.second, world.scale_bytes - two);
  }
}

// What a warp polls: a packet of a row, or (item.index = row_packets) the metadata of its token.
struct Arrival {
  WorkItem item;
  const u8 *packet_at, *metadata_at;  // packet_at: null until metadata of a remote source, which name its row, are here
  Packet packet;
  Vector metadata;  // lane i: vector i of the first four metadata lines
  bool ready;       // this lane's lines have arrived
  bool delivered;   // before the counts had arrived
};

__device__ __forceinline__ bool is_metadata(const World& world, const Arrival& arrival) {
  return arrival.item.index == world.row_packets;
}

__device__ __forceinline__ i32 source_of_item(const World& world, WorkItem item) {
  const i32 source = item.source + world.rank;
  return source < world.size ? source : source - world.size;
}

// Computes the addresses that an arrival is polled at: once, as each is a chain of loads. Packet numbers fit in 31
// bits, as a packet is 1024 bytes.
__device__ __forceinline__ void set_addresses(const DispatchArgs& args, const LlScratch& scratch, Arrival& arrival) {
  const World& world = args.world;
  if constexpr (NETWORK) {
    const i32 source = source_of_item(world, arrival.item), position = arrival.item.position;
    const i64 packet = position * world.row_packets + arrival.item.index;
    arrival.packet_at = nullptr;
    if (!is_remote(world, source))
      arrival.packet_at = row_packets_at(args, world.rank, source) + packet * kPacketBytes;
    arrival.metadata_at = metadata_lines_at(args, world.rank, source) +
                          static_cast<i64>(position * world.metadata_lines) * kLineBytes;
    return;
  }
  const i32 number = line_position(world, source_of_item(world, arrival.item), arrival.item.position);
  arrival.packet_at =
      scratch.recv_base[0] + static_cast<i64>(number * world.row_packets + arrival.item.index) * kPacketBytes;
  arrival.metadata_at = scratch.recv_base[1] + static_cast<i64>(number * world.metadata_lines) * kLineBytes;
}

// Which row of its inbox holds the token of a remote source: its metadata say so, in flag lanes.
__device__ __forceinline__ i32 host_row_of(const Arrival& arrival) {
  return static_cast<i32>(shuffle(arrival.metadata, kLineEntries).low);
}

// Of a remote source: metadata, which name a row of its rail's inbox; then that row, which is complete when its slices
// are here. One warp.
__device__ __forceinline__ void poll_remote(const DispatchArgs& args, Arrival& arrival, i32 source, u64 seq) {
  const World& world = args.world;
  arrival.ready = false;
  if (arrival.packet_at == nullptr) {
    if (!net::warp_has_head(world, source)) return;
    const bool here = poll_lines(arrival.metadata_at, min(4, world.metadata_lines), seq, &arrival.metadata);
    if (!__all_sync(~0u, here)) return;  // of no row that the source sends
    const i64 packet = static_cast<i64>(host_row_of(arrival)) * world.row_packets + arrival.item.index;
    arrival.packet_at = row_packets_at(args, world.rank, source) + packet * kPacketBytes;
  }
  arrival.ready = is_metadata(world, arrival);
  if (arrival.ready) return;
  const u32 wanted = net::slices_for(world, net::kDispatch, host_row_of(arrival));
  arrival.ready = net::warp_has_arrived(world, net::kDispatch, source, seq, wanted) &&
                  poll_packet(arrival.packet_at, seq, &arrival.packet);
}

__device__ __forceinline__ void poll(const DispatchArgs& args, Arrival& arrival, u64 seq) {
  const World& world = args.world;
  if constexpr (NETWORK) {
    const i32 source = source_of_item(world, arrival.item);
    if (is_remote(world, source)) return poll_remote(args, arrival, source, seq);
  }
  arrival.ready = is_metadata(world, arrival) || poll_packet(arrival.packet_at, seq, &arrival.packet);
  if (kPerExpert || is_metadata(world, arrival))
    arrival.ready &= poll_lines(arrival.metadata_at, min(4, world.metadata_lines), seq, &arrival.metadata);
}

// Metadata entry k = lane of a ready arrival. The fifth line (K > 28) is awaited here; false: that wait failed.
__device__ __forceinline__ bool read_metadata(const DispatchArgs& args, const Arrival& arrival, u64 seq,
                                              TokenMetadata* metadata) {
  const World& world = args.world;
  const i32 k = lane_idx();
  Vector mine = shuffle(arrival.metadata, (k / kLineEntries * 8 + k % kLineEntries) & 31);
  if (world.metadata_lines > 4) {
    Vector fifth = {};
    const i32 source = source_of_item(world, arrival.item);
    const u8* at = arrival.metadata_at + 4 * kLineBytes;
    if (!spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source,
                         [&] { return poll_lines(at, 1, seq, &fifth); }))
      return false;
    const Vector of_fifth = shuffle(fifth, (k - 4 * kLineEntries) & 31);
    if (k >= 4 * kLineEntries) mine = of_fifth;
  }
  const i32 expert = k < world.topk ? static_cast<i32>(word_of(mine, 0)) : -1;
  *metadata = {expert, static_cast<i32>(word_of(mine, 1)), __uint_as_float(word_of(mine, 2)),
               static_cast<i32>(word_of(mine, 3))};
  return true;
}

// Final row of a position, rank-wise layouts; kDropped past the capacity.
__device__ __forceinline__ i32 dst_row_of(const DispatchArgs& args, const LlScratch& scratch, i32 source,
                                          i32 position) {
  return admit(first_row(args, scratch, source) + position, 0, args.world.capacity);
}

// Whether each warp sums the counts of earlier sources itself, instead of waiting for the block's layout of all rows.
__device__ __forceinline__ bool sums_counts_itself(const World& world) {
  return LAYOUT == EXPERT_MAJOR && world.size <= 16;
}

// Final row for (source, position, k = lane); -1 = not served here, kDropped past the capacity.
__device__ __forceinline__ i32 dst_row_of_topk(const DispatchArgs& args, const LlScratch& scratch,
                                               const TokenMetadata& metadata, i32 source, i32 position) {
  if (metadata.local_expert < 0) return -1;
  if (!kPerExpert) return dst_row_of(args, scratch, source, position);
  if (sums_counts_itself(args.world)) {
    i32 row = metadata.local_expert * args.world.capacity + metadata.dst_row;
#pragma unroll 4
    for (i32 s = 0; s < source; ++s)
      row += scratch.recv_counts[s * recv_counts_stride(args.world) + 1 + metadata.local_expert];
    return admit(row, metadata.local_expert, args.world.capacity);
  }
  return admit(first_row(args, scratch, source, metadata.local_expert) + metadata.dst_row, metadata.local_expert,
               args.world.capacity);
}

// Saves what combine and the caller need of a received position. One warp; lane k has entry k.
__device__ __forceinline__ void save_metadata(const DispatchArgs& args, const LlScratch& scratch,
                                              const TokenMetadata& metadata, i32 source, i32 position) {
  const World& world = args.world;
  const i32 topk = world.topk, k = lane_idx();
  const i32 at = source * world.max_tokens + position, entry = at * topk + k;  // 31 bits: plan.sizes_of
  if (k >= topk) return;
  args.dst_rows[entry] = dst_row_of_topk(args, scratch, metadata, source, position);
  args.weights[entry] = metadata.weight;
  if (k == 0) args.tokens[at] = metadata.token;
  if (kPerExpert) return;
  const i32 row = dst_row_of(args, scratch, source, position);
  if (row < 0) return;
  write_entry(args, row * topk + k, metadata);
}

// Writes a ready arrival to its final rows. False after a failed wait.
__device__ __forceinline__ bool deliver(const DispatchArgs& args, const LlScratch& scratch, const Arrival& arrival,
                                        i32 num_rows, u64 seq) {
  const World& world = args.world;
  const i32 source = source_of_item(world, arrival.item), position = arrival.item.position;
  TokenMetadata metadata = {-1, -1, 0.0f, 0};
  if ((kPerExpert || is_metadata(world, arrival)) && !read_metadata(args, arrival, seq, &metadata)) return false;
  if (is_metadata(world, arrival)) {
    save_metadata(args, scratch, metadata, source, position);
  } else {
    const i32 row = kPerExpert ? dst_row_of_topk(args, scratch, metadata, source, position)
                               : dst_row_of(args, scratch, source, position);
    const u32 row_mask = kPerExpert ? __ballot_sync(~0u, row >= 0) : row >= 0;
    write_packet(args, arrival.packet, arrival.item.index, row, row_mask, num_rows);
  }
  return true;
}

// Waits for the counts of all sources. All threads; ends with a block barrier; `status` is kOk before. Meanwhile each
// warp polls its first arrival; a packet whose final row does not depend on the counts is delivered at once.
__device__ __forceinline__ i32 await_counts(const DispatchArgs& args, const LlScratch& scratch, i32* status,
                                            u64* counts_barrier, Arrival& first, u64 routing_id, u64 seq, u64 start,
                                            u64* waits) {
  // Some warps read counts, the last ones first.
  i32 found = kOk;
  const i32 helper = num_warps() - 1 - warp_idx();  // from the last warp: in small steps the first ones have items
  const bool reads_count_packets = helper == (kPerExpert ? min(args.world.size, num_warps() - 1) : 1);
  const bool reads_counts = reads_count_packets || (kPerExpert && helper < args.world.size);
  if (reads_count_packets) found = await_count_packets(args, scratch, routing_id, seq, start, waits);
  for (i32 source = helper; kPerExpert && source < args.world.size; source += num_warps())
    if (!await_expert_counts(args, scratch, source, seq)) found = kFailed;
  if (found != kOk && lane_idx() == 0) atomicMax(status, found);
  if (reads_count_packets && lane_idx() == 0) ptx::barrier_arrive(counts_barrier);
  // Each polls its first packet meanwhile, and delivers it if its row does not depend on counts.
  if (first.item.position < args.world.ll_tokens) {
    set_addresses(args, scratch, first);
    poll(args, first, seq);
    while (!reads_counts && !__all_sync(~0u, first.ready || ptx::barrier_is_complete(counts_barrier, 0)))
      poll(args, first, seq);
    if (LAYOUT == RANK_MAJOR && !is_metadata(args.world, first) && __all_sync(~0u, first.ready))
      first.delivered = deliver(args, scratch, first, 0, seq);
  }
  __syncthreads();
  return *status;
}

// Whether the source sends this item.
__device__ __forceinline__ bool is_sent(const World& world, const LlScratch& scratch, WorkItem item) {
  return item.position < scratch.recv_counts[source_of_item(world, item) * recv_counts_stride(world)];
}

__device__ __forceinline__ void swap(Arrival& a, Arrival& b) {
  const Arrival old = a;
  a = b;
  b = old;
}

// Advances to the next item that is sent, and polls it once. Items are in the order in which they are likely to arrive:
// by position, then by source. False: none is left.
__device__ __forceinline__ bool next_arrival(const DispatchArgs& args, const LlScratch& scratch, WorkItem& item,
                                             WorkItem step, i32 max_rows, Arrival& next, u64 seq) {
  const World& world = args.world;
#pragma unroll 1
  while (item.position < max_rows) {
    next.item = item;
    advance_item(item, step, world.row_packets + 1, world.size);
    if (!is_sent(world, scratch, next.item)) continue;
    set_addresses(args, scratch, next);
    poll(args, next, seq);
    return true;
  }
  return false;
}

// Until poll() is true; names the source, or who brings its rows.
template <class Poll>
__device__ __forceinline__ bool wait_for_row(const World& world, u64 seq, i32 source, const Arrival& now, Poll poll) {
  if constexpr (NETWORK)
    if (is_remote(world, source))
      return net::warp_wait_for_rows(world, seq, PHASE_PAYLOAD, source, [&] { return now.packet_at != nullptr; }, poll);
  return spin::warp_wait(world, seq, OP_DISPATCH, PHASE_PAYLOAD, source, poll);
}

// Delivers all items of this warp; it polls the next one while it writes the present one. `next` is the first item,
// which was polled before the counts had arrived and may turn out not to be sent.
__device__ __forceinline__ bool receive_rows(const DispatchArgs& args, const LlScratch& scratch, Arrival next,
                                             WorkItem step, u64 seq, u64 start, u64* waits) {
  const World& world = args.world;
  WorkItem item = next.item;
  advance_item(item, step, world.row_packets + 1, world.size);
  // Other layouts of scales do not depend on it.
  const i32 num_rows = LAYOUT == GROUPED || LAYOUT == FLAT ? rows_delivered(args, scratch) : 0;
  i32 max_rows = 0;
  for (i32 source = lane_idx(); source < world.size && item.position < world.ll_tokens; source += 32)
    max_rows = max(max_rows, scratch.recv_counts[source * recv_counts_stride(world)]);
  max_rows = __reduce_max_sync(~0u, max_rows);
  bool more = !next.delivered && is_sent(world, scratch, next.item);
  if (!more) more = next_arrival(args, scratch, item, step, max_rows, next, seq);
#pragma unroll 1
  while (more) {
    Arrival now = next;
    more = next_arrival(args, scratch, item, step, max_rows, next, seq);
    if (!more) next.ready = false;
    if (!__all_sync(~0u, now.ready)) {  // poll both: rows overtake one another on their way
      const i32 source = source_of_item(world, now.item);
      i32 polls = 0;  // the poll before this wait may be old
      if (!wait_for_row(world, seq, source, now, [&] {
            if (more && __all_sync(~0u, next.ready)) return true;
            ++polls;
            poll(args, now, seq);
            if (more) poll(args, next, seq);
            return now.ready;
          }))
        return false;
      if (!__all_sync(~0u, now.ready))
        swap(now, next);
      else if (polls > 1 && lane_idx() == 0 && source != world.rank)
        note_wait(waits, source, ptx::now_ns() - start);
    }
    if (!deliver(args, scratch, now, num_rows, seq)) return false;
  }
  return true;
}

// Receives this team's items, from `item` on. One block is the finalizer: it also writes the caller's counts. After a
// failed wait nothing may look delivered, whichever block fails: the finalizer checks for a failure after it has
// written the counts, and a block that fails zeroes them after it has announced the failure (give_up). The fences
// between are sequentially consistent: with acquire-release fences each side could miss the other's store.
__device__ __forceinline__ void dispatch_receive(const DispatchArgs& args, Team team, LlScratch& scratch, u8* shared,
                                                 i32* status, u64* counts_barrier, WorkItem item, WorkItem step,
                                                 bool is_finalizer, u64 record, u64 routing_id, u64 seq) {
  const World& world = args.world;
  // Counts of all sources.
  const u64 start = note_receive(world, team, args.work.phases, record);
  u64* waits = waits_at(shared);
  Arrival first;
  first.item = item;
  first.delivered = false;
  const i32 counts = await_counts(args, scratch, status, counts_barrier, first, routing_id, seq, start, waits);
  bool ok = counts != kFailed;
  // The layout that they give; then the rows.
  if (counts == kOk) {
    if (LAYOUT == RANK_MAJOR) {
      if (is_finalizer && warp_idx() == 0)
        write_rank_counts(args, [&](i32 source) { return scratch.recv_counts[source * recv_counts_stride(world)]; });
    } else if (is_finalizer || !sums_counts_itself(world)) {
      lay_out(args, scratch, kPerExpert, false,
              [&](i32 source, i32 e) { return scratch.recv_counts[source * recv_counts_stride(world) + 1 + e]; });
      if (is_finalizer) write_counts(args, scratch);
    }
    if (LAYOUT == FLAT) fill_entries(args, team, rows_delivered(args, scratch), world.size * world.ll_tokens);
    ok = receive_rows(args, scratch, first, step, seq, start, waits);
    if constexpr (NETWORK) ok = ok && net::warp_takes_part(world, OP_DISPATCH, seq);
  } else if (counts == kRoutingMismatch && is_finalizer) {
    write_no_counts(args);
    if (threadIdx.x == 0)
      report_mismatch(world, OP_DISPATCH, routing_id, [&](i32 peer) {
        return routing_id_in(ptx::load_pair<Vector>(count_packet_at(args, world.rank, peer)));
      });
  }
  if (is_finalizer) {
    ptx::fence_sc_gpu();
    ok &= ptx::load_volatile(&world.state->aborted) == STOP_RUNNING;
  }
  if (__syncthreads_or(!ok) != 0) {
    ptx::fence_sc_gpu();
    write_no_counts(args);
  }
  note_end(world, team, record, waits);
}

}  // namespace ep::ll
