// Ranks of other hosts.
//
// What a rank publishes, it also sends: once to each other host, to one rank there, its rail, whose proxy writes it
// into the mirror of this rank's region. All ranks of that host read the mirror as they read a region: dispatch.cpp and
// combine.cpp know no difference. A rank's own words (published, consumed, ...) are never written by the network: the
// rail's proxy stores them when everything that they promise has come, in whatever order, and notifies the ranks of the
// host.
//
// An immediate: kind << 28 | slot << 18 | low bits of the sequence number, of which the receiver's own next number says
// the rest: no rank is further from it, since all agree on numbers before any of them sends one (group.cpp). What no
// rank can mean ends the connection with EPROTO; numbers that index memory are checked where they are read. A slot is
// complete when its head has come and as many parts as the head says. Numbers below the one that a slot waits for are
// stale and dropped. Rows carry their chunk, too, above the slot: a receiver places the rows of a chunk of a dispatch
// while others are under way, as soon as it knows the places of all, and sums the tokens of a chunk of a combine as
// soon as all ranks' rows of it are here.
//
// Example: 2 hosts of 2 ranks. Rank 0 dispatches 4 tokens; 0, 1 and 3 have experts on ranks 2 or 3. It pushes for rank
// 2, its rail there: the meta (the head, which says 2 other parts and 2 of chunk 0), places, weights, then rows 0-1 and
// row 3 when they are staged. A head is one message; other runs may take several. Rank 2's proxy has the head and
// counts to 2: it stores arrived[slot] of rank 0's mirror and rings ranks 2 and 3, which compute places. It counts to 2
// for chunk 0, and stores arrived[slot] and published[slot].
#pragma once
#include "args.hpp"

namespace cd {

enum class Imm : uint32_t {
  dispatch_part = 0,
  dispatch_head = 1,
  combine_part = 2,
  combine_head = 3,
  dispatch_consumed = 4,
  combine_consumed = 5,
  barrier = 6,
  exchange = 7,  // slot: parity
  resync = 8,    // slot: index
  dispatch_rows = 9,  // chunk << kSlotBits | slot
  combine_rows = 10,  // the same
  membership = 11,    // slot: index of the entry that says of which set_active
};

constexpr int kSeqBits = 18;
constexpr uint32_t kSeqMask = (1u << kSeqBits) - 1;
constexpr int kSlotBits = 6;
static_assert(kMaxSlots <= 1 << kSlotBits && kChunks <= 1 << (10 - kSlotBits));

// Which rank of each other host is this rank's rail, and through whose mirrors ranks of other hosts are read. Both ends
// compute the same from `host` and `active`: the i-th active rank of a host takes the (i mod n)-th of the other's n.
void set_rails(Comm& c);

// An operation begins, or ends: meanwhile the proxy is awake, where processors are plenty.
void expect(Comm& c, bool begins);

// These wait while the ring is full, up to the deadline of `want`: the proxy empties it without waiting for anybody.
Status send_word(Comm& c, Imm kind, int slot, Want want);
// Head, places and weights, when the slot has them; then each chunk, when the rows of its tokens are staged.
Status send_routes(Comm& c, const DispatchOp& op, int slot);
Status send_rows(Comm& c, const DispatchOp& op, int slot, int chunk, Span tokens);
// The same, of the sources in `among`: head and tables (and row weights), which say where partials will lie; then those
// of each chunk. In two hops row weights follow the tables by themselves, and a rank that has nothing to send to a host
// says so by a late head: when its partials are staged.
Status send_tables(Comm& c, const CombineOp& op, int slot, uint64_t among);
Status send_row_weights(Comm& c, const CombineOp& op, int slot);
Status send_partials(Comm& c, const CombineOp& op, int slot, int chunk, uint64_t among);
Status send_late_heads(Comm& c, const CombineOp& op, int slot, uint64_t among);

// Called by the proxy. context: the Comm.
void on_network(void* context, int32_t rank, NetEvent event, uint64_t value);

}  // namespace cd
