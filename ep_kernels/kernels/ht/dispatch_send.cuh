// How a block of HT dispatch sends once it knows where its rows go (`home`): one warp, the clerk, tells the records of
// all its tokens first; the others move the rows, piece by piece, by the copy engine: loaded once, stored once per
// destination. No barrier stands between them: warps take pieces from counters, first from their block's, then from one
// that all blocks share.
//
// A unit is a piece of a row. The first one of each warp is loaded, and becomes fp8, before anybody knows where it
// goes.
//
// Per-expert layouts: a row whose stores are complete is announced to its destinations, which then copy it to its other
// places while later rows travel; on its own rank a row goes to all its places at once.
#pragma once

#include "common/block.cuh"
#include "common/math.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/quantize.cuh"
#include "common/wait.cuh"
#include "layout/region.cuh"
#include "routing/experts.cuh"
#include "routing/ht_scan.cuh"
#include "types.h"
#include "variant.h"

namespace ep::ht {

// ---- stages ----
//
// Where the rows of HT dispatch are while they move, global -> shared -> global by the copy engine: a few stages per
// warp, each of a piece of a row. Each lane starts its own stores (one destination per lane), so a row that goes to
// eight ranks is loaded once and leaves by eight lanes.
// A stage holds kStageExtra bytes past the piece, for the scales that a producing warp makes beside it.

constexpr u32 kStages = STAGES;
constexpr u32 kStageExtra = 512;

struct Pipe {
  u8* stages;      // [kStages][piece + extra] of this warp
  u64* barriers;   // [kStages]
  u32 piece_bytes;
  u32 parities;    // bit s: phase that stage s waits for next

  __device__ __forceinline__ u8* stage(u32 s) const { return stages + s * (piece_bytes + kStageExtra); }
};

// All threads of the block call it once, before any move.
__device__ __forceinline__ Pipe open_pipe(const Work& work, u8* shared) {
  Pipe pipe;
  pipe.barriers = reinterpret_cast<u64*>(shared) + warp_idx() * kStages;
  pipe.piece_bytes = work.piece_bytes;
  pipe.stages = shared + work.stage_offset + warp_idx() * kStages * (work.piece_bytes + kStageExtra);
  pipe.parities = 0;
  if (lane_idx() == 0) {
    for (u32 s = 0; s < kStages; ++s) ptx::barrier_init(pipe.barriers + s);
    ptx::fence_barrier_init();
    ptx::fence_proxy_shared();
  }
  __syncwarp();
  return pipe;
}

// A warp copies bytes by ordinary accesses: words where all three allow it.
__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, i32 num_bytes) {
  if (((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | static_cast<u64>(num_bytes)) & 3) == 0) {
    for (i32 i = lane_idx() * 4; i < num_bytes; i += 128)
      *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>(from + i);
  } else {
    for (i32 i = lane_idx(); i < num_bytes; i += 32) to[i] = from[i];
  }
}

// HT: the caller reads scales where senders put them, at the rows' final places; else they lie by (source, position)
// until they are moved there. Equal on all ranks.
__device__ __forceinline__ bool scales_land(const DispatchArgs& args) {
  return !kPerExpert && args.out_scales == scales_at(args, args.world.rank, 0, 0);
}

// HT: where the scales of a row of this source go.
__device__ __forceinline__ u8* scales_of(const DispatchArgs& args, i32 at, i32 position, i32 place) {
  const i64 number = scales_land(args) ? place : position_of(args.world, args.world.rank, position);
  return scales_at(args, at, 0, 0) + number * args.world.scale_bytes;
}

// ---- units ----

// Bytes of a column as loaded, where rows are quantised here; else 1.
constexpr i32 kWidth = static_cast<i32>(sizeof(X));
constexpr bool kQuantises = kWidth > 1;
constexpr i32 kStopped = -2;  // in place of a unit

// Bytes of a row, and pieces of it, as loaded.
__device__ __forceinline__ i32 loaded_bytes(const DispatchArgs& args) { return args.world.row_bytes * kWidth; }
__device__ __forceinline__ i32 pieces_per_row(const DispatchArgs& args) {
  return (loaded_bytes(args) + static_cast<i32>(args.work.piece_bytes) - 1) / static_cast<i32>(args.work.piece_bytes);
}

// Where a warp stands among the units: token * pieces + piece.
struct Sender {
  Pipe pipe;
  u32 turn;  // stages used so far
  i32 unit;  // loaded, or being so; below 0: none is left
  Range mine;      // tokens of this block
  Divisor pieces;  // of a row
  Divisor topk;
  Split split;     // of all tokens
  Divisor blocks;  // that share them
  bool made;    // the unit is here, as it travels
  bool pooled;  // the block's own units are used up
};

__device__ __forceinline__ i32 piece_size(const DispatchArgs& args, i32 piece) {
  const i32 most = args.work.piece_bytes;
  return min(most, loaded_bytes(args) - piece * most);
}

// The caller's own scales travel with the first piece of their row; behind it in its stage, where sizes allow it.
__device__ __forceinline__ bool stages_scales(const DispatchArgs& args) {
  if (kQuantises || args.x_scales == nullptr || args.world.scale_bytes > static_cast<i32>(kStageExtra)) return false;
  return ((reinterpret_cast<u64>(args.x_scales) | static_cast<u64>(args.world.scale_bytes)) & 15) == 0;
}

__device__ __forceinline__ const u8* scales_of_token(const DispatchArgs& args, i32 token) {
  return args.x_scales + static_cast<i64>(token) * args.world.scale_bytes;
}

// A unit: piece `piece` of a token's row.
struct Part {
  i32 token, piece;
};

__device__ __forceinline__ Part part_of_unit(const Sender& sender, i32 unit) {
  const i32 token = divide(unit, sender.pieces);
  return {token, unit - token * sender.pieces.value};
}

__device__ __forceinline__ void load_unit(const DispatchArgs& args, const Sender& sender, i32 unit, u32 stage) {
  if (lane_idx() != 0 || unit < 0) return;
  const auto [token, piece] = part_of_unit(sender, unit);
  const u8* row = args.x + static_cast<i64>(token) * loaded_bytes(args);
  u8* to = sender.pipe.stage(stage);
  u64* barrier = sender.pipe.barriers + stage;
  const i32 num_bytes = piece_size(args, piece),
            scale_bytes = piece == 0 && stages_scales(args) ? args.world.scale_bytes : 0;
  ptx::bulk_expect(barrier, num_bytes + scale_bytes);
  ptx::bulk_load_part(to, row + static_cast<i64>(piece) * args.work.piece_bytes, num_bytes, barrier);
  if (scale_bytes != 0)
    ptx::bulk_load_part(to + args.work.piece_bytes, scales_of_token(args, token), scale_bytes, barrier);
}

// Links do not serve all blocks alike, so a block keeps only the first quarter of its tokens to itself.
__device__ __forceinline__ i32 own_tokens(i32 num_tokens) { return (num_tokens + 3) / 4; }

// All blocks of the rank have settled their tokens. One warp.
__device__ __forceinline__ bool await_settled(const World& world, Team team) {
  bool ok = true;
  if (lane_idx() == 0)
    ok = spin::wait_for(world, &world.state->settled, team.num_blocks, OP_DISPATCH, PHASE_BLOCKS, world.rank);
  return __all_sync(~0u, ok);
}

// Units that a warp takes at once: rows that are announced go as a whole.
__device__ __forceinline__ i32 grain_of(const Sender& sender) { return kPerExpert ? sender.pieces.value : 1; }

// Number `number` of the units of the first quarter of this block's tokens, -1 = there are not so many.
__device__ __forceinline__ i32 own_unit(const Sender& sender, i32 number) {
  const i32 unit = number * grain_of(sender), pieces = sender.pieces.value;
  return unit < own_tokens(sender.mine.past - sender.mine.first) * pieces ? sender.mine.first * pieces + unit : -1;
}

// The next unit for this warp: of its block's own, then of what all blocks share, each block's in turn; where rows are
// announced, the rest of the warp's row first. -1 = none is left, kStopped = the rank was stopped. Where nothing is
// quantised, links are what limits, and division by a reciprocal gained nothing (docs/kernels/ht.md).
__device__ __forceinline__ i32 next_unit(const DispatchArgs& args, Team team, const HtScratch& scratch, Sender& sender,
                                         i32 unit) {
  const i32 pieces = sender.pieces.value, grain = grain_of(sender);
  if (kPerExpert && unit >= 0 && part_of_unit(sender, unit).piece != pieces - 1) return unit + 1;
  if (!sender.pooled) {
    u32 taken = 0;
    if (lane_idx() == 0) taken = atomicAdd(scratch.next_unit, 1u);
    const i32 own = own_unit(sender, static_cast<i32>(__shfl_sync(~0u, taken, 0)));
    if (own >= 0) return own;
    sender.pooled = true;
    if (!args.cached && !await_settled(args.world, team)) return kStopped;
  }
  const Split split = kQuantises ? sender.split : split_tokens(args.num_tokens, team.num_blocks);
  const i32 most = (split.most() - own_tokens(split.most())) * pieces;
  for (;;) {
    u64 taken = 0;
    if (lane_idx() == 0) taken = atomicAdd(&args.world.state->pool, 1ull);
    const i32 number = static_cast<i32>(__shfl_sync(~0u, taken, 0));
    const i32 round = kQuantises ? divide(number, sender.blocks) : number / team.num_blocks, index = round * grain;
    if (index >= most) return -1;
    const Range theirs = split.of(number - round * team.num_blocks);
    const i32 next = (theirs.first + own_tokens(theirs.past - theirs.first)) * pieces + index;
    if (next < theirs.past * pieces) return next;
  }
}

// The first of the block's units are its warps', `number` of this one: asked for before anybody knows where it goes.
__device__ __forceinline__ void load_first_unit(const DispatchArgs& args, Sender& sender, i32 number) {
  sender.unit = own_unit(sender, number);
  load_unit(args, sender, sender.unit, sender.turn % kStages);
}

// This lane's k of the unit's token; lanes past K, and no unit, go nowhere. Lanes store in their order, so rank-wise
// layouts, where any k of a rank will do, begin at another k with each token: else a routing that is the same for all
// tokens would send all rows of all ranks to the same rank first.
__device__ __forceinline__ Home home_of(const DispatchArgs& args, const Sender& sender, i32 unit) {
  const i32 topk = sender.topk.value;
  if (lane_idx() >= topk || unit < 0) return {kNowhere, -1, -1, -1};
  const i32 token = divide(unit, sender.pieces), turn = token + args.world.rank;
  const i32 k = lane_idx() + (kPerExpert ? 0 : turn - divide(turn, sender.topk) * topk);
  return args.home[static_cast<i64>(token) * topk + (k < topk ? k : k - topk)];
}

// Lanes whose k is the first of the token at its rank.
__device__ __forceinline__ bool leads(const Home& home) {
  const u32 same = __match_any_sync(~0u, home.rank);
  return home.rank >= 0 && lane_idx() == __ffs(same) - 1;
}

// The columns of a piece, and the bytes of scales that travel with it. The last piece pads packed words.
struct Piece {
  i32 column, columns;
  i32 first_scale, scale_bytes, padding;
};

__device__ __forceinline__ Piece piece_of(const DispatchArgs& args, i32 piece) {
  const i32 column = piece * (static_cast<i32>(args.work.piece_bytes) / kWidth),
            columns = piece_size(args, piece) / kWidth;
  if (!kQuantises) return {column, columns, 0, piece == 0 && args.x_scales != nullptr ? args.world.scale_bytes : 0, 0};
  const i32 size = args.power_of_two == quant::kPacked ? 1 : 4, first = column / quant::kBlock * size;
  const i32 num_bytes = (columns + quant::kBlock - 1) / quant::kBlock * size;
  const i32 padding = column + columns == args.world.hidden ? args.world.scale_bytes - first - num_bytes : 0;
  return {column, columns, first, num_bytes + padding, padding};
}

// Waits for the sender's unit, and makes fp8 of it where it lies, its scales behind it. One warp.
__device__ __forceinline__ void make_unit(const DispatchArgs& args, Sender& sender) {
  const u32 s = sender.turn % kStages;
  ptx::bulk_load_wait(sender.pipe.barriers + s, sender.pipe.parities >> s & 1);
  sender.pipe.parities ^= 1u << s;
  sender.made = true;
  if constexpr (kQuantises) {
    const Piece piece = piece_of(args, part_of_unit(sender, sender.unit).piece);
    const bool packed = args.power_of_two == quant::kPacked;
    u8 *stage = sender.pipe.stage(s), *scales = stage + args.work.piece_bytes;
    quant::in_place<X>(stage, piece.columns, args.power_of_two != quant::kFp32, [&](i32 block, f32 scale) {
      if (packed) scales[block] = static_cast<u8>(__float_as_uint(scale) >> 23);
      else reinterpret_cast<f32*>(scales)[block] = scale;
    });
    if (lane_idx() < piece.padding) scales[piece.scale_bytes - piece.padding + lane_idx()] = 0;
    ptx::fence_proxy_shared();
    __syncwarp();
  }
}

// Stores a piece once per rank, at the first place that was not dropped; on this rank at all of them. Its scales go
// with it.
__device__ __forceinline__ void deliver_unit(const DispatchArgs& args, const Home& home, i32 token, const Piece& piece,
                                             u8* stage) {
  const World& world = args.world;
  // All words, since none of them is below 0 then: the register of one that nobody reads would be used for something
  // else at once, which waits until the load is here.
  const bool placed = (home.rank | home.position | home.slot | home.place) >= 0;
  const u32 same = __match_any_sync(~0u, home.rank) & __ballot_sync(~0u, placed);
  const bool leads = placed && lane_idx() == __ffs(same) - 1;
  if (leads || (kPerExpert && placed && home.rank == world.rank))
    ptx::bulk_store(row_at(args, home.rank, home.place) + piece.column, stage, piece.columns);
  if (piece.scale_bytes == 0) return;
  const bool staged = kQuantises || stages_scales(args);
  const u8* scales = staged ? stage + args.work.piece_bytes : scales_of_token(args, token);
  u8* to = leads ? scales_of(args, home.rank, home.position, home.place) + piece.first_scale : nullptr;
  if (staged && (piece.first_scale | piece.scale_bytes | world.scale_bytes) % 16 == 0) {
    if (leads) ptx::bulk_store(to, scales, piece.scale_bytes);
  } else {
    for (u32 left = __ballot_sync(~0u, leads); left != 0; left &= left - 1)
      copy_bytes(reinterpret_cast<u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(to), __ffs(left) - 1)), scales,
                 piece.scale_bytes);
  }
}

// A row that this lane's rank gets.
struct Sent {
  i32 rank, position;  // rank -1 = none
};

// The stores of all lanes are complete, and a warp barrier has followed.
__device__ __forceinline__ void announce(const DispatchArgs& args, Sent sent, u64 seq) {
  if (sent.rank >= 0) ptx::store_release_sys(arrival_at(args, sent.rank, args.world.rank, sent.position), seq);
}

// Sends units until none is left, from sender.unit on, if there is one. One warp; on return all its stores are
// complete. False when the rank was stopped before. The next unit is asked for while one becomes fp8; else behind its
// stores, so that the first leave at once.
__device__ __forceinline__ bool send_rows(const DispatchArgs& args, Team team, const HtScratch& scratch, Sender& sender,
                                          u64 seq) {
  constexpr Sent kNone = {-1, 0};
  Sent ended = kNone, before = kNone;  // rows that ended with the unit before this, and with the one before that
  ptx::fence_proxy_global();  // the copy engine writes where peers have started this operation
  bool more = true;
  while (more) {
    const bool present = sender.unit >= 0;
    const Home home = home_of(args, sender, sender.unit);
    const u32 s = sender.turn % kStages;
    const Part part = part_of_unit(sender, sender.unit);
    auto send = [&] {
      if (!present) return;
      if (!sender.made) make_unit(args, sender);
      sender.made = false;
      deliver_unit(args, home, part.token, piece_of(args, part.piece), sender.pipe.stage(s));
      ptx::bulk_commit();
    };
    if (!kQuantises) send();
    // Stores that need not be over when a stage is filled again.
    constexpr i32 kPending = kQuantises ? kStages - 2 : kStages - 1;
    if constexpr (kPerExpert) {
      static_assert(kStages == 3, "the row before the last two units is complete, and no other is kept in mind");
      ptx::bulk_wait<kPending>();
      __syncwarp();
      announce(args, before, seq);
      before = ended;
      ended =
          present && part.piece == sender.pieces.value - 1 ? Sent{leads(home) ? home.rank : -1, home.position} : kNone;
    } else {
      ptx::bulk_wait_read<kPending>();
      __syncwarp();
    }
    const i32 ahead = next_unit(args, team, scratch, sender, sender.unit);
    load_unit(args, sender, ahead, (sender.turn + present) % kStages);
    if (kQuantises) send();
    sender.unit = ahead;
    sender.turn += present;
    more = ahead >= 0;
  }
  ptx::bulk_wait_all();
  __syncwarp();
  if constexpr (kPerExpert) {
    announce(args, before, seq);
    announce(args, ended, seq);
  }
  return sender.unit != kStopped;
}

// Nothing is to be sent: what was loaded ahead must be here before the block ends.
__device__ __forceinline__ void drop_unit(Sender& sender) {
  if (sender.unit >= 0 && !sender.made) ptx::bulk_load_wait(sender.pipe.barriers + sender.turn % kStages, 0);
}

}  // namespace ep::ht
