// What a rank tells ranks of other hosts: descriptors in a ring in pinned host memory, which the proxy thread takes
// (ep_kernels/network/native/ring.hpp). One descriptor: write these bytes of my outbox for that rank to the same place
// of its inbox of mine, then give it this immediate.
//
//   source rank                                        proxy              expert rank
//   all blocks: lines -> outbox
//   warp that completes a slice, last block: places
//   in the ring, fence, descriptors ---------------------> bytes --------> inbox
//                                                         immediates ---> words[kind][source] = seq, when all are here
//                                                                         or the bit of a slice, when it is here;
//                                                                         wait for either, then read lines
//
// A dispatch is two operations of that kind: the head (counts and metadata, METADATA) goes to each rank; rows (PAYLOAD)
// go once to each other host, to the source's rail there, in whose inbox all ranks of that host read them.
//
// Memory order. All blocks' stores happen before their arrival (arrive: acq_rel, gpu), those of a slice before they are
// counted (likewise); the fence of who pushes is of the system, and a descriptor is one 16-byte store behind it: a
// proxy that sees its parity sees the bytes. The proxy stores word or bit (release) after the bytes of every part; a
// kernel loads it (acquire, system), then the lines. Tags of lines say nothing here: the memory model does not promise
// that 128 bytes come as a whole.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "types.h"
#include "variant.h"

namespace ep::net {

__device__ __forceinline__ u32 immediate(u32 kind, u32 parts, u64 seq) {
  return kind << 28 | (parts - 1) << SEQ_BITS | static_cast<u32>(seq & ((1u << SEQ_BITS) - 1));
}

// Waits until the ring has room for descriptor `at`. The proxy takes descriptors without waiting for anybody.
__device__ __noinline__ bool await_room(const World& world, u64 at, u32 op, i32 peer) {
  Network& network = world.state->network;
  const bool ok = spin::wait_for(world, network.popped, at + 1 - RING_SIZE, op, PHASE_CREDIT, peer);
  ptx::max_relaxed_gpu(&network.popped_seen, ptx::load_relaxed_sys(network.popped));
  return ok;
}

// Places of the ring that a thread has taken and must fill, each with a descriptor, in order. Any threads at once.
struct Places {
  u64 next, popped;  // popped: of an earlier look
};

// Two trips to the L2 at once, in front of the fence: they are over when it is.
__device__ __forceinline__ Places take_places(const World& world, u32 count) {
  Network& network = world.state->network;
  const u64 popped = ptx::load_volatile(&network.popped_seen);  // in flight beside the next
  return {ptx::take_relaxed_gpu(&network.tail, count), popped};
}

__device__ __forceinline__ void push(const World& world, Places& places, i32 peer, u64 offset, u32 num_bytes, u32 imm,
                                     u32 op) {
  const Network& network = world.state->network;
  const u64 at = places.next++;
  if (at >= places.popped + RING_SIZE) {
    if (!await_room(world, at, op, peer)) return;
    places.popped = ptx::load_volatile(&network.popped_seen);
  }
  const u64 parity = (at / RING_SIZE) % 2 == 0 ? 1ull << 63 : 0;
  ptx::store_pair(network.ring + at % RING_SIZE * 16, num_bytes | static_cast<u64>(imm) << 32,
                  offset | static_cast<u64>(peer) << 48 | parity);
}

// A word without bytes: `kind` of this rank is `seq` at `peer`.
__device__ __forceinline__ void push_word(const World& world, i32 peer, u32 kind, u64 seq, u32 op) {
  Places place = take_places(world, 1);
  push(world, place, peer, 0, 0, immediate(kind, 1, seq), op);
}

// Bytes of the outbox for `peer`.
struct Run {
  u64 offset, num_bytes;
};

__device__ __forceinline__ u32 parts_of(const Network& network, const Run& run) {
  if (run.num_bytes == 0) return 0;
  return static_cast<u32>((run.offset + run.num_bytes - 1) / network.stripe - run.offset / network.stripe + 1);
}

// Sets the runs' offsets to those of the outbox for `peer`. How many descriptors they take.
template <i32 N>
__device__ __forceinline__ u32 place_runs(const World& world, i32 peer, Run (&runs)[N]) {
  const Network& network = world.state->network;
  u32 parts = 0;
#pragma unroll 1
  for (i32 i = 0; i < N; ++i) {
    runs[i].offset += peer * network.stride;
    parts += parts_of(network, runs[i]);
  }
  return parts;
}

// Placed runs, each with this immediate. One thread that sees all of their bytes: the fence of the system between those
// and the descriptors is here.
template <i32 N>
__device__ __forceinline__ void push_placed(const World& world, i32 peer, Run (&runs)[N], u32 parts, u32 imm, u32 op) {
  const Network& network = world.state->network;
  Places places = take_places(world, parts);
  ptx::fence_sys();
#pragma unroll 1
  for (i32 i = 0; i < N; ++i) {
    Run left = runs[i];
#pragma unroll 1
    while (left.num_bytes != 0) {
      const u64 in_stripe = network.stripe - left.offset % network.stripe;
      const u64 n = left.num_bytes < in_stripe ? left.num_bytes : in_stripe;
      push(world, places, peer, left.offset, static_cast<u32>(n), imm, op);
      left.offset += n;
      left.num_bytes -= n;
    }
  }
}

// All runs of one operation for `peer` that have not been pushed, and with the last part of it, in whatever order they
// come, flag[kind] = seq there. `before`: parts that have been pushed.
template <i32 N>
__device__ __forceinline__ void push_runs(const World& world, i32 peer, u32 kind, Run (&runs)[N], u32 before, u64 seq,
                                          u32 op) {
  const u32 parts = place_runs(world, peer, runs);
  if (parts != 0) return push_placed(world, peer, runs, parts, immediate(kind, before + parts, seq), op);
  Places place = take_places(world, 1);
  push(world, place, peer, 0, 0, immediate(kind, before + 1, seq), op);
}

// ---- slices: rows that leave as soon as they are in the outbox ----
//
// Slice i is the rows i * slice_rows to (i + 1) * slice_rows of an outbox; only whole ones are pushed by themselves.
// Warps count the packets that they have stored, and the one that completes a slice pushes it.

// Where rows lie in an outbox, and how many bytes and packets each has.
struct RowRun {
  u64 offset, row_bytes;
  u32 row_packets;
};

__device__ __forceinline__ u64 slice_rows(const World& world, u32 which) {
  return world.state->network.slice_rows[which];
}

__device__ __forceinline__ Run slice_run(const World& world, u32 which, const RowRun& rows, u64 slice) {
  const u64 num_bytes = slice_rows(world, which) * rows.row_bytes;
  return {rows.offset + slice * num_bytes, num_bytes};
}

template <i32 N>
__device__ __forceinline__ void push_slice(const World& world, u32 which, i32 peer, u32 slice, Run (&runs)[N], u64 seq,
                                           u32 op) {
  const u32 parts = place_runs(world, peer, runs);
  push_placed(world, peer, runs, parts, immediate(NUM_FLAGS + which, (slice << 5 | (parts - 1)) + 1, seq), op);
}

__device__ __forceinline__ u64* staged_at(const World& world, u32 which, i32 peer, u64 slice) {
  return world.state->network.staged + (which * MAX_RANKS + peer) * 32 + slice;
}

// Packets that a warp has stored and not counted, a lane for each remote rank that it stores for.
struct Staged {
  u32 slice, packets;
};

// Counts them. Behind a warp barrier that follows their stores.
__device__ __noinline__ void count_staged(const World& world, u32 which, i32 peer, const RowRun& rows, Staged& staged,
                                          u64 seq, u32 op) {
  u64* count = staged_at(world, which, peer, staged.slice);
  const u64 now = ptx::add_acq_rel_gpu(count, staged.packets) + staged.packets;
  staged.packets = 0;
  if (now != slice_rows(world, which) * rows.row_packets) return;
  ptx::store_volatile(count, 0);
  Run runs[] = {slice_run(world, which, rows, staged.slice)};
  push_slice(world, which, peer, staged.slice, runs, seq, op);
}

// Notes a packet of the row at `position`, if `stores` (for `peer`, this lane's). One warp.
__device__ __forceinline__ void note_staged(const World& world, u32 which, i32 peer, const RowRun& rows, bool stores,
                                            i32 position, Staged& staged, u64 seq, u32 op) {
  const u32 slice = stores ? static_cast<u32>(position / static_cast<i32>(slice_rows(world, which))) : staged.slice;
  const bool counts = staged.packets != 0 && slice != staged.slice;
  if (__any_sync(~0u, counts)) {
    __syncwarp();
    if (counts) count_staged(world, which, peer, rows, staged, seq, op);
    __syncwarp();
  }
  staged.slice = slice;
  staged.packets += stores;
}

__device__ __forceinline__ void note_last_staged(const World& world, u32 which, i32 peer, const RowRun& rows,
                                                 Staged& staged, u64 seq, u32 op) {
  __syncwarp();
  if (staged.packets != 0) count_staged(world, which, peer, rows, staged, seq, op);
  __syncwarp();
}

// The rows that are in no whole slice, when every block has stored its own; `before`: parts of those that are.
__device__ __forceinline__ Run rest_of(const World& world, u32 which, i32 peer, const RowRun& rows, u64 num_rows,
                                       u32& before) {
  const u64 per_slice = slice_rows(world, which), slices = per_slice != 0 ? num_rows / per_slice : 0;
  if (per_slice != 0) ptx::store_volatile(staged_at(world, which, peer, slices), 0);
#pragma unroll 1
  for (u64 slice = 0; slice < slices; ++slice) {
    Run run[] = {slice_run(world, which, rows, slice)};
    before += place_runs(world, peer, run);
  }
  const u64 in_slices = slices * per_slice;
  return {rows.offset + in_slices * rows.row_bytes, (num_rows - in_slices) * rows.row_bytes};
}

// ---- what has come ----

// [R] slices of this operation that a warp of this block has seen to be here from that rank; all bits: everything.
__device__ __forceinline__ u32* arrived_from() {
  __shared__ u32 arrived[MAX_RANKS];
  return arrived;
}

// [R] likewise, whether the head of this dispatch is.
__device__ __forceinline__ u32* heads_from() {
  __shared__ u32 heads[MAX_RANKS];
  return heads;
}

// 1 = a warp of this block looks at slices.
__device__ __forceinline__ i32* looks_at_slices() {
  __shared__ i32 looks;
  return &looks;
}

// All threads, once; a block barrier must follow before has_arrived is called.
__device__ __forceinline__ void init_arrived() {
  if constexpr (!NETWORK) return;
  if (threadIdx.x < MAX_RANKS) arrived_from()[threadIdx.x] = heads_from()[threadIdx.x] = 0;
  if (threadIdx.x == 0) *looks_at_slices() = 0;
}

// The slices that must be here before a row of an inbox is read: its own and the one `slice_lag` later, or all of them,
// where there is no such one.
__device__ __forceinline__ u32 slices_for(const World& world, u32 which, i32 row) {
  const u64 rows = slice_rows(world, which);
  if (rows == 0) return kAllSlices;
  const u64 slice = row / static_cast<i32>(rows), later = slice + world.state->network.slice_lag;
  return later < MAX_SLICES ? 1u << slice | 1u << later : kAllSlices;
}

// Whether `wanted` slices of what `source` sends in operation `seq` are here; true for ranks that are mapped, whose
// lines say it themselves. Then this thread sees them.
__device__ __forceinline__ bool has_arrived(const World& world, u32 which, i32 source, u64 seq, u32 wanted) {
  if (!is_remote(world, source)) return true;
  u32* arrived = arrived_from() + source;
  if ((ptx::load_acquire_block(arrived) & wanted) == wanted) return true;
  u32 here = 0;
  if (slice_rows(world, which) != 0)
    here = look_at_slices(world, which, source, seq, wanted);
  else if (look(world, which == 0 ? FLAG_PAYLOAD : FLAG_COMBINE, source, seq) >= seq)
    here = kAllSlices;
  if ((here & wanted) != wanted) return false;
  ptx::store_release_block(arrived, here);
  return true;
}

// The same for a warp whose lanes name one source. Of slices, and of rows of a dispatch, one warp of the block at a
// time asks; else one of them alone does, and others read what it has found.
__device__ __forceinline__ bool warp_has_arrived(const World& world, u32 which, i32 source, u64 seq, u32 wanted) {
  if (!is_remote(world, source)) return true;
  if (__all_sync(~0u, (ptx::load_acquire_block(arrived_from() + source) & wanted) == wanted)) return true;
  const bool asks = which == kDispatch || slice_rows(world, which) != 0;
  if (asks && lane_idx() == 0 && atomicCAS(looks_at_slices(), 0, 1) == 0) {
    has_arrived(world, which, source, seq, wanted);
    ptx::store_release_block(reinterpret_cast<u32*>(looks_at_slices()), 0);
  }
  return false;
}

// Whether counts and metadata of `source` are here, as has_arrived.
__device__ __forceinline__ bool has_head(const World& world, i32 source, u64 seq) {
  if (!is_remote(world, source)) return true;
  u32* head = heads_from() + source;
  if (ptx::load_acquire_block(head) != 0) return true;
  if (look(world, FLAG_METADATA, source, seq) < seq) return false;
  ptx::store_release_block(head, 1);
  return true;
}

// What another warp of the block, which waits for all heads, has found. The lanes name one source.
__device__ __forceinline__ bool warp_has_head(const World& world, i32 source) {
  return !is_remote(world, source) || __all_sync(~0u, ptx::load_acquire_block(heads_from() + source) != 0);
}

// Whether a wait for rows, whose head is here, must name their source: it is known to be gone, or goes on without this
// rank. `polls`: of the wait, as it counts them.
__device__ __noinline__ bool is_lost(const World& world, i32 source, u32 polls) {
  return (polls % spin::kLookAround == 0 && look(world, FLAG_LEFT_OUT, source, 1) != 0) ||
         (polls % spin::kLookAtHost == 0 && ptx::load_relaxed_sys(&world.gone[source]) != 0);
}

// spin::warp_wait for rows of a remote source, a lane each. Once has_head(), it names the rank of this host that brings
// them, where this is another one.
template <class HasHead, class Poll>
__device__ __forceinline__ bool warp_wait_for_rows(const World& world, u64 seq, u32 phase, i32 source, HasHead has_head,
                                                   Poll poll) {
  i32 named = source;
  u32 polls = 0;
  bool lost = false;
  return spin::warp_wait(world, seq, OP_DISPATCH, phase, named, [&] {
    const bool ready = poll();
    ++polls;
    if (ready || !has_head()) return ready;
    lost = lost || is_lost(world, source, polls);
    const i32 carrier = static_cast<i32>(world.state->network.carriers[source]);
    named = lost || carrier == world.rank ? source : carrier;
    return false;
  });
}

}  // namespace ep::net
