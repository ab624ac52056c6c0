// The argument structs of the C ABI, each declared once and mirrored by native.py. Both halves of an operation get the
// same struct, so what the send half learned is there when the receive half runs.
#pragma once
#include <cstdint>

#include "comm.hpp"

namespace cd {

// What a handle keeps of a dispatch, on this rank. Memory belongs to Python; M and K as in Geometry.
struct Routing {
  int32_t* dest;            // [T, K] own tokens: place = rank * stride + slot, -1 = none
  float* weights;           // [T, K] own tokens
  int32_t* rows;            // [R, M, W] every source's tokens: row of this rank's output, -1 = not here or dropped;
                            //   W = K for per-expert layouts, else 1
  float* row_weights;       // [R, M, K] every source's weights; per-expert layouts only
  int32_t* source_tokens;   // [R] T of each source
  int32_t* source_dest;     // [R, M, K] by_domain: `dest` of the sources for which this rank is the collector
  uint64_t origin;          // sequence number of the dispatch that made it; set there
  int32_t tokens, mode;
};

struct DispatchOp {
  uint64_t seq;             // out
  Clock clock;              // out
  Routing routing;          // filled here, or taken over when `fresh` is 0
  const void* x;            // [T, row]
  const void* scales;       // [T, scale_bytes] or null
  const void* ids;          // [T, K] int32, or int64 where `wide_ids`
  const float* weights;     // [T, K]
  int32_t fresh, exact_shapes, wide_ids, pad;
  // Receive half.
  uint8_t* valid;           // [T] bool, out
  uint8_t* tokens;          // [capacity, row_bytes], out
  uint8_t* out_scales;      // [capacity, scale_bytes] or packed, out, or null
  int32_t* out_ids;         // [capacity, K], out, rank-wise layouts
  float* out_weights;       // [capacity, K], out, rank-wise layouts
  int32_t* counts;          // [L] or [R], out; the source of counts when `fresh` is 0
  int32_t* offsets;         // [L+1] or [R+1], out
  int32_t num_rows, num_dropped, num_invalid, packed_stride;  // out
};

struct CombineOp {
  uint64_t seq;             // out
  Clock clock;              // out
  Routing routing;
  const uint8_t* y;         // rows as the dispatch's tokens, [*, H] output dtype
  const float* row_weights; // one per row, or K per row in rank-wise layouts; or null
  int32_t outputs_slot;     // expert output buffer that y is, or -1
  int32_t apply_weights;
  // Receive half.
  uint8_t* z;               // [T, H], out
  float* z_weights;         // [T, K], out, or null
  Type z_type;              // of z: the sums, which are fp32, are rounded to it once
  uint32_t to_collect;      // what this rank has still to sum for other hosts, bits as in collector.cpp; set there
};

// Waits until no peer reads the slot of the next dispatch any more.
Status dispatch_free(Comm& c);
Status dispatch_send(Comm& c, DispatchOp& op);
// The receive half: how many rows there will be, and where; then the rows.
Status dispatch_place(Comm& c, DispatchOp& op);
Status dispatch_receive(Comm& c, DispatchOp& op);
Status combine_send(Comm& c, CombineOp& op);
Status combine_receive(Comm& c, CombineOp& op);
// Waits until no peer reads expert output buffer `slot` any more, on behalf of `op`.
Status outputs_free(Comm& c, int slot, Op op);

}  // namespace cd
