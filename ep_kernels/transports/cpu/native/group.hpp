// What the ranks do together beside moving tokens.
#pragma once
#include "comm.hpp"

namespace cd {

Status barrier(Comm& c);
// All-gather of kExchangeWords words: `words` in, `all` [R, kExchangeWords] out (zeros for inactive ranks).
Status exchange(Comm& c, const int64_t* words, int64_t* all);
// Sleeps until a peer is in an exchange that this rank has not entered, or wake(): kOk; kNothing at the timeout.
Status wait_for_peer(Comm& c, int64_t timeout_ns);
// Agreement of the survivors on the next sequence numbers, under a new epoch and mask.
Status resync(Comm& c, uint64_t mask, uint64_t epoch);

}  // namespace cd
