// Send phase of LL dispatch: token metadata, and rows as LL128 packets.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/quantize.cuh"
#include "common/scheduler.cuh"
#include "layout/ll128.cuh"
#include "routing/experts.cuh"
#include "routing/ll_scan.cuh"
#include "routing/recv_layout.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ll {

// ---- token metadata ----

// The entry (token, k = lane) as the caller, or a previous handle, has it.
struct Entry {
  i32 id;
  f32 weight;
  Route route;  // with a previous handle
};

__device__ __forceinline__ Entry load_entry(const DispatchArgs& args, i32 token) {
  Entry entry = {kNoExpert, 0.0f, {kNoExpert, -1, -1, -1}};
  if (lane_idx() >= args.world.topk || token >= args.num_tokens) return entry;
  const i32 at = token * args.world.topk + lane_idx();
  entry.weight = args.topk_weights[at];
  if (args.cached) entry.route = args.routes[at];
  else entry.id = args.topk_ids[at];
  return entry;
}

// Saves a token's routes in the handle, and whether all of its experts have an active copy.
__device__ __forceinline__ void save_routes(const DispatchArgs& args, const Destinations& dst, i32 key, i32 dst_row,
                                            i32 token) {
  const i32 topk = args.world.topk, k = lane_idx(), at = token * topk + k;
  const i32 position = value_at_offset(args.world, dst.position_low, dst.position_high,
                                       offset_of_rank(args.world, max(key, 0) >> 16));
  if (k < topk && !args.cached)
    args.routes[at] = key < 0 ? Route{key, -1, -1, -1} : Route{key >> 16, position, key & 0xFFFF, dst_row};
  const bool valid = __all_sync(~0u, key != kNoReplica);
  if (k == 0) args.valid[token] = valid;
}

// Rows of tokens before this one that a rank serves, one per (token, k), by expert masks or entry by entry. One warp.
__device__ __noinline__ i32 count_rows_before(const DispatchArgs& args, const LlScratch& scratch, i32 token,
                                              i32 rank) {
  const World& world = args.world;
  i32 count = 0;
  if (scratch.expert_masks == nullptr || *scratch.has_duplicates) {
#pragma unroll 1
    for (i32 e = lane_idx(); e < token * world.topk; e += 32)
      count += key_of(world, scratch.expert_table, args.topk_ids[e], e / world.topk) >> 16 == rank;
    return __reduce_add_sync(~0u, count);
  }
#pragma unroll 1
  for (i32 expert = lane_idx(); expert < world.local_stride; expert += 32) {
    const u32* tokens = scratch.expert_masks + expert_counter(world, rank << 16 | expert) * num_chunks(world);
    count += __popc(tokens[token >> 5] & ((1u << (token & 31)) - 1));
#pragma unroll 1
    for (i32 chunk = 0; chunk < token >> 5; ++chunk) count += __popc(tokens[chunk]);
  }
  return __reduce_add_sync(~0u, count);
}

// Where the rows of a token begin in the box of a remote rank (box_rows_of), which serves those k that are `served`;
// keeps each in the handle.
__device__ __forceinline__ i32 first_box_row(const DispatchArgs& args, const LlScratch& scratch, bool is_served,
                                             i32 token, i32 rank) {
  const i32 topk = args.world.topk;
  const u32 served = __ballot_sync(~0u, is_served && lane_idx() < topk);
  i32* mine = box_rows_of(args.world, args.routes) + static_cast<i64>(token) * topk + lane_idx();
  if (args.cached) {
    const i32 row = is_served && lane_idx() < topk ? *mine : 0;
    return __shfl_sync(~0u, row, __ffs(served) - 1);
  }
  const i32 first = count_rows_before(args, scratch, token, rank);
  if (served >> lane_idx() & 1) *mine = first + __popc(served & ((1u << lane_idx()) - 1));
  return first;
}

// A token's metadata to one of its ranks, an entry per k. `host_row`: of a remote rank, which row of the rail's inbox
// is the token's; it travels in flag lanes. One warp.
__device__ __forceinline__ void send_metadata(const DispatchArgs& args, const LlScratch& scratch, const Entry& entry,
                                              i32 key, i32 dst_row, i32 token, i32 peer_offset, i32 position,
                                              i32 host_row, u64 seq) {
  const World& world = args.world;
  const bool served = key >= 0 && key >> 16 == rank_at_offset(world, peer_offset);
  i32 origin = token;
  const i32 rank = rank_at_offset(world, peer_offset);
  if (NETWORK && kPerExpert && world.state->network.exact && is_remote(world, rank))
    origin = first_box_row(args, scratch, served, token, rank);
  const Vector metadata = vector_of(served ? key & 0xFFFF : ~0u, served ? dst_row : ~0u,
                                    served ? __float_as_uint(entry.weight) : 0, origin);
  u8* to = scratch.metadata_dst[peer_offset] + static_cast<i64>(position) * (world.metadata_lines * kLineBytes);
#pragma unroll 1
  for (i32 line = 0; line < world.metadata_lines; line += 4) {
    const i32 k = (line + (lane_idx() >> 3)) * kLineEntries + (lane_idx() & 7);
    Vector value = shuffle(metadata, k & 31);
    if (k >= world.topk) value = vector_of(~0u, ~0u, 0, origin);
    if constexpr (NETWORK) if (is_flag_lane()) value.low = static_cast<u32>(host_row);
    store_lines(to + line * kLineBytes, min(4, world.metadata_lines - line), value, seq);
  }
}

// Which rows of a rail's inbox are those of tokens, in the order of the scan. One warp.
struct HostRows {
  TokenMaskScan scan;

  __device__ __forceinline__ void begin(const World& world, const LlScratch& scratch) {
    if constexpr (NETWORK) scan = start_scan<Of::kRows>(world, scratch);
  }
  // Of a token that goes to a rank by a rail; 0 of one that is mapped.
  __device__ __forceinline__ i32 at(const World& world, const LlScratch& scratch, i32 token, i32 peer_offset) {
    if constexpr (!NETWORK) return 0;
    scan_to<Of::kRows>(world, scratch, token >> 5, scan);
    if (!is_remote(world, rank_at_offset(world, peer_offset))) return 0;
    const Destinations rows = destinations_of(world, scan, token);
    const i32 rail = static_cast<i32>(world.state->network.rail_of[peer_offset]);
    return value_at_offset(world, rows.position_low, rows.position_high, rail);
  }
};

// This team's part of all metadata: a (token, peer offset) per warp at a time. `entry` is of the warp's first token.
__device__ __forceinline__ void send_all_metadata(const DispatchArgs& args, Team team, const LlScratch& scratch,
                                                  Entry entry, Divisor ranks, u64 seq) {
  const World& world = args.world;
  TokenMaskScan scan = start_scan<Of::kRanks>(world, scratch);
  HostRows host_rows;
  host_rows.begin(world, scratch);
  const i32 step = num_items_at_once(team);
  i32 item = first_item(team), next_token = divide(item, ranks);
#pragma unroll 1
  while (next_token < args.num_tokens) {
    // This item's entry; the next token's is loaded while it is used.
    const Entry current = entry;
    const i32 token = next_token, peer_offset = item - next_token * ranks.value;
    item += step;
    next_token = divide(item, ranks);
    if (next_token != token) entry = load_entry(args, next_token);
    // The ranks that the token goes to, and its position at each.
    scan_to<Of::kRanks>(world, scratch, token >> 5, scan);
    const Destinations dst = destinations_of(world, scan, token);
    const i32 host_row = host_rows.at(world, scratch, token, peer_offset);
    const bool is_dst = (peer_offset < 32 ? dst.mask_low : dst.mask_high) >> (peer_offset & 31) & 1;
    if (!is_dst && peer_offset != 0) continue;
    // The final row of each of its ks.
    const i32 key =
        args.cached ? key_of(world, current.route) : key_of(world, scratch.expert_table, current.id, token);
    i32 dst_row = current.route.dst_row;
    if (kPerExpert && !args.cached)
      dst_row = scratch.expert_masks == nullptr || *scratch.has_duplicates
                  ? dst_row_by_entries(args, scratch.expert_table, token, key)
                  : dst_row_by_masks(world, scratch, token, key);
    // Send; one of the token's items saves its routes.
    if (is_dst)
      send_metadata(args, scratch, current, key, dst_row, token, peer_offset,
                    value_at_offset(world, dst.position_low, dst.position_high, peer_offset), host_row, seq);
    if (peer_offset == 0) save_routes(args, dst, key, dst_row, token);
  }
}

// ---- rows ----

// 16 bytes of a token's row as it travels: x, then the caller's scales, then zeros.
__device__ __forceinline__ Vector load_row_vector(const DispatchArgs& args, i32 token, i32 offset) {
  const World& world = args.world;
  const i64 row = static_cast<i64>(token) * world.row_bytes;
  if (offset < world.row_bytes) return *reinterpret_cast<const Vector*>(args.x + row + offset);
  const i32 at = offset - world.row_bytes;
  const u8* scales = args.x_scales + static_cast<i64>(token) * world.scale_bytes;
  return at < world.scale_bytes ? load_bytes(scales + at, world.scale_bytes - at)
                                : Vector{0, 0};
}

// This lane's part of a packet as x has it, perhaps in flight. Bytes that are not quantised stay 64-bit vectors: of
// 32-bit words the compiler would wait at once, to take the loads apart.
template <class T>
struct LoadedPacketOf {
  quant::Columns<T> first, second;
};
template <>
struct LoadedPacketOf<u8> : Packet {};
using LoadedPacket = LoadedPacketOf<X>;

// Starts the loads of packet `index` of a token's row.
template <class T>
__device__ __forceinline__ LoadedPacketOf<T> load_packet(const DispatchArgs& args, i32 token, i32 index) {
  const World& world = args.world;
  const i32 at = first_offset();
  LoadedPacketOf<T> loaded = {};
  if constexpr (sizeof(T) > 1) {
    const T* row = reinterpret_cast<const T*>(args.x) + static_cast<i64>(token) * world.hidden;
    if (!is_flag_lane()) {
      loaded.first = quant::columns_of<T>(load_words<T, 16>(row, index * kPacketColumns + at, world.hidden).at);
      loaded.second =
          quant::columns_of<T>(load_words<T, 16>(row, index * kPacketColumns + at + kSecondOffset, world.hidden).at);
    }
  } else {
    const i32 offset = index * kPacketData + at;
    loaded.first = load_row_vector(args, token, offset);
    if (!is_flag_lane()) loaded.second = load_row_vector(args, token, offset + kSecondOffset);
  }
  return loaded;
}

// The packet as it travels.
template <class T>
__device__ __forceinline__ Packet make_packet(const DispatchArgs& args, const LoadedPacketOf<T>& loaded) {
  if constexpr (sizeof(T) > 1)
    return quantize_packet(loaded.first, loaded.second, args.power_of_two != quant::kFp32);
  else
    return loaded;
}

// Send warps per block. Half of them saturate NVLink; more only hold rows in flight when the work counter has run out.
// With 2 ranks half of the rows stay on this GPU and warps are the bottleneck, so all send, except for fp8, which has
// few bytes.
__device__ __forceinline__ i32 num_send_warps(const World& world) {
  return kQuantised || world.size > 2 ? num_warps() / 2 : num_warps();
}

__device__ __forceinline__ bool has_slices(const World& world) {
  return NETWORK && net::slice_rows(world, net::kDispatch) != 0;
}

// How many rows go to each rail, for the block that pushes them. One warp.
__device__ __forceinline__ void note_host_rows(const DispatchArgs& args, const LlScratch& scratch) {
  const World& world = args.world;
  TokenMaskScan scan = start_scan<Of::kRows>(world, scratch);
  scan_to<Of::kRows>(world, scratch, (max(args.num_tokens, 1) - 1) >> 5, scan);
  u64* rows = world.state->network.host_rows;
  auto note = [&](i32 peer_offset, i32 before, u32 tokens) {
    if (peer_offset < world.size)
      ptx::store_volatile(rows + rank_at_offset(world, peer_offset), before + __popc(tokens));
  };
  note(lane_idx(), scan.rows_low, scan.tokens_low);
  note(32 + lane_idx(), scan.rows_high, scan.tokens_high);
}

__device__ __forceinline__ net::RowRun rows_of(const DispatchArgs& args) {
  const RegionMap& box = box_map(args.world);
  const u32 packets = static_cast<u32>(args.world.row_packets);
  return {box.row_lines + args.slot * box.row_lines_stride, static_cast<u64>(packets) * kPacketBytes, packets};
}

// Packets of a warp that are not counted yet (net::Staged): lane i for the rails at peer offsets i and 32 + i.
struct StagedRows {
  net::RowRun rows;
  i32 peers[2];
  bool remote[2];
  net::Staged of[2];

  __device__ __forceinline__ void begin(const DispatchArgs& args) {
    if constexpr (!NETWORK) return;
    const World& world = args.world;
    rows = rows_of(args);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 peer_offset = 32 * half + lane_idx();
      peers[half] = rank_at_offset(world, min(peer_offset, world.size - 1));
      remote[half] =
          peer_offset < world.size && has_slices(world) && is_active(peers[half]) && is_remote(world, peers[half]);
      of[half] = {0, 0};
    }
  }
  __device__ __forceinline__ void note(const DispatchArgs& args, const Destinations& dst, u64 seq) {
    if (!has_slices(args.world)) return;
    const u32 bit = 1u << lane_idx();
    net::note_staged(args.world, net::kDispatch, peers[0], rows, remote[0] && (dst.mask_low & bit), dst.position_low,
                     of[0], seq, OP_DISPATCH);
    if (args.world.size > 32)
      net::note_staged(args.world, net::kDispatch, peers[1], rows, remote[1] && (dst.mask_high & bit),
                       dst.position_high, of[1], seq, OP_DISPATCH);
  }
  __device__ __forceinline__ void end(const DispatchArgs& args, u64 seq) {
    if constexpr (!NETWORK) return;
#pragma unroll
    for (i32 half = 0; half < 2; ++half)
      net::note_last_staged(args.world, net::kDispatch, peers[half], rows, of[half], seq, OP_DISPATCH);
  }
};

// Sends packets, taken from the work counter, to all ranks of their tokens, of another host to the rail alone.
// `prefetched` is the packet of work.item.
__device__ __forceinline__ void send_rows(const DispatchArgs& args, const LlScratch& scratch, WarpWorkCounter& work,
                                          LoadedPacket prefetched, u64 seq) {
  const World& world = args.world;
  TokenMaskScan scan = start_scan<Of::kRows>(world, scratch);
  const i32 low = min(lane_idx(), world.size - 1), high = min(lane_idx() + 32, world.size - 1);
  StagedRows staged;
  staged.begin(args);
#pragma unroll 1
  while (work.item.position < args.num_tokens) {
    // This packet; the next one is in flight while it is sent.
    const WorkItem item = work.item;
    const LoadedPacket loaded = prefetched;
    take_next(work);
    if (work.item.position < args.num_tokens)
      prefetched = load_packet<X>(args, work.item.position, work.item.index);
    scan_to<Of::kRows>(world, scratch, item.position >> 5, scan);
    const Destinations dst = destinations_of(world, scan, item.position);
    const Packet packet = make_packet(args, loaded);
    // To each of them, one after the other; all lanes store.
    auto send_to = [&](u32 mask, const u8* row_dst, i32 position) {  // lane i: of peer offset i
      const i64 number = position * world.row_packets + item.index;  // 31 bits, as a packet is 1024 bytes
      const u64 to = reinterpret_cast<u64>(row_dst) + number * kPacketBytes;
#pragma unroll 1
      for (u32 left = mask; left != 0; left &= left - 1)
        store_packet(reinterpret_cast<u8*>(__shfl_sync(~0u, to, __ffs(left) - 1)), packet, seq);
    };
    send_to(dst.mask_low, scratch.row_dst[low], dst.position_low);
    if (world.size > 32) send_to(dst.mask_high, scratch.row_dst[high], dst.position_high);
    staged.note(args, dst, seq);
  }
  staged.end(args, seq);
}

}  // namespace ep::ll
