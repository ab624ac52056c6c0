// Result of an operation, as one block sees it.
#pragma once

#include "types.h"

namespace ep {

// Kept in an i32 of shared memory; the largest value of a block's warps counts.
enum Status : i32 {
  kOk,
  kFailed,           // a wait failed (common/wait.cuh): the rank is stopped
  kRoutingMismatch,  // ranks brought different routings; the group stays usable
};

}  // namespace ep
