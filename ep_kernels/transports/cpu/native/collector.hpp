// Combine over several hosts in two hops (CombineOrder::DOMAIN): a host sends one row per token, not one per rank.
//
// Each rank of a host stages its partials for the ranks of other hosts in its own slot, where the others of its host
// read them. Of each such source, one rank is the collector: its rail, which gets the source's rows in a dispatch. It
// sums the partials of its host in ascending rank, in fp32, rounds the sum once to the combine dtype (a partial alone
// stays as it is), and sends it home in a slot of its own, as it would send its own partials: tables, chunks and words
// are those of remote.hpp. So the network knows no difference, and a source reads one contribution per host.
//
// Example: ranks 0, 1 on host A, 2, 3 on host B. Token 0 of rank 2 has rows on 0, 1 and 3. Rank 0, the collector of
// rank 2 on A, keeps place 0 for it. Both stage their partials, p0 and p1; each says which chunks are there in
// `combine_arrived` of its own region. Rank 0 makes place 0 round(p0 + p1), and sends it to rank 2, which adds p3.
//
// The sum takes the place of the collector's own partial, or a place without one: a source has M places either way.
//
// A collector sums what is there in its waits, whatever it waits for (Comm::progress): so a rank that has begun a
// combine and goes on to other operations keeps nobody waiting.
#pragma once
#include "addends.hpp"

namespace cd {

// Whether combines of this routing go by collectors: the same on all ranks, which know all sources' tokens.
bool has_two_hops(const Comm& c, const Routing& routing);

// From now on waits collect for `op`, until it has been collected or given up. `op` lives so long.
void begin_collecting(Comm& c, CombineOp& op, int slot);
// The rest, when all ranks of this host have published.
Status finish_collecting(Comm& c, CombineOp& op, int slot);

}  // namespace cd
