// What the ranks do together beside moving tokens.
#pragma once
#include "member.hpp"

namespace cd {

Status barrier(Member& m);
// All-gather of kExchangeWords words: `words` in, `all` [R, kExchangeWords] out (zeros for inactive ranks).
Status exchange(Member& m, const int64_t* words, int64_t* all);
void call_exchange(Member& m);  // any thread
// Sleeps until a peer is in an exchange that this rank has not entered, or wake(): kOk; kNothing at the timeout.
Status wait_for_peer(Member& m, int64_t timeout_ns);
// As wait_for_peer, but looks again and again; other threads run in between. kNothing, too, once `fd` can be read.
Status look_for_peer(Member& m, int64_t timeout_ns, int fd);
// Agreement of the survivors on the next sequence numbers, under a new epoch and mask. kNothing: not within `limit_ns`,
// or a connection has ended; the same call goes on. 0: no limit but the deadline.
Status resync(Member& m, uint64_t mask, uint64_t epoch, int64_t limit_ns);

}  // namespace cd
