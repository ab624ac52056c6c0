// Frames of a request connection (docs/request-protocol.md) as bytes, and the end of a connection that reads them.
// native.py declares the same structs.
#pragma once
#include <cstdint>

#define CD_API extern "C" __attribute__((visibility("default")))

namespace cd {

constexpr uint32_t kMaxFieldsBytes = 4096, kNowhere = UINT32_MAX;
// Read at once: a small request comes in one piece with its header.
constexpr uint32_t kBufferBytes = 32 << 10;

enum Kind : uint8_t { kForward = 3, kAnswer = 4, kLastKind = 11 };

// Every number is little-endian, without padding, as is every machine that this is built for.
struct __attribute__((packed)) Header {
  uint32_t rows_bytes;
  uint16_t fields_bytes;
  uint8_t kind, zero;
  uint64_t id;
};
struct __attribute__((packed)) Forward {
  uint32_t layer, tokens, hidden;
  uint16_t topk;
  uint8_t dtype, zero;
  uint32_t timeout_ms;
  uint16_t model_bytes, trace_bytes;
  uint32_t place;
};
struct __attribute__((packed)) Answer {
  uint64_t queue_ns, dispatch_ns, experts_ns, combine_ns;
  uint32_t steps, tokens, hidden;
  uint8_t dtype, in_place;
  uint16_t model_bytes;
};

// What `cd_next` and its like have found; else the kind of a frame that came.
enum Got : int { kNothing = 0, kRows = 100, kEnded = -1, kWrong = -2 };

// The reading end. Python has it, and may read all of it.
struct Line {
  int32_t fd;                // does not block
  int32_t is_tls;            // Python receives
  int32_t takes_descriptor;  // one may come beside the next frame
  int32_t descriptor;        // which came; -1: none
  int32_t error;             // errno of kEnded; 0: the other end has closed it
  uint32_t max_rows_bytes;   // of a frame that comes in
  uint32_t rows_bytes;       // of the frame that came last, as what is below of it
  uint32_t are_coming;       // its rows: `cd_rows` has said where, and not all were here
  uint8_t* into;             // where they go; null: nowhere
  uint64_t left;             // bytes of them that are to come
  uint32_t begin, end;       // of what the buffer has
  int64_t heard_ns;          // when something came last
  uint64_t id;
  uint64_t request_bytes;    // of its x, ids and weights, wherever they are
  uint32_t fields_at;        // in the buffer
  uint16_t fields_bytes, kind;
  uint8_t buffer[kBufferBytes];
};

// The tensors of a call: addresses, sizes, the code of x's type, whether ids are int64.
struct Described {
  uint64_t x, ids, weights;
  uint32_t tokens, hidden, topk;
  uint16_t dtype, wide_ids;
};

// The rows of a request, on its way to a worker: x [T, H], ids [T, K] of int32 or int64, weights float32 [T, K].
struct Rows {
  const void *x, *ids, *weights;
  uint64_t x_bytes, num_ids;
  uint64_t wide_ids;
};

}  // namespace cd

// x, ids and weights of a request, one behind the other; frames.cpp.
CD_API void cd_lay(uint8_t* out, const cd::Rows* rows);
