// A member that moves tokens: its region and its peers' by the byte map, the routing tables, and what crosses hosts.
#pragma once
#include "helper.hpp"
#include "member.hpp"
#include "region.hpp"
#include "ring.hpp"
#include "rows.hpp"

namespace cd {

struct CombineOp;

// Messages of a dispatch, a combine or a word, since the communicator was made. Mirrored by native.py.
struct Sent {
  uint64_t messages, bytes;
};
enum class Kind : int32_t { rows = 0, records = 1, words = 2 };

// How far the parts of one slot of one rank of another host have come.
struct Landing {
  uint64_t seq;
  bool head;
  Parts parts;
};

struct Comm : Member {
  Geometry g;
  RegionMap map;
  const RowOps& ops;
  RegionView<uint8_t> own;
  RegionView<const uint8_t> peer[kMaxRanks];

  // Ranks of other hosts (remote.hpp). Without a network nothing of this is used.
  int32_t host[kMaxRanks] = {};                 // lowest rank of each rank's host
  Outbox* outbox = nullptr;
  uint8_t* landing = nullptr;                   // mirrors that this rank's proxy writes, one for each rank
  const uint8_t* landing_of[kMaxRanks] = {};    // those of the other ranks of this host
  uint64_t rails = 0;                           // the ranks, one on each other host, that get what this rank sends
  uint64_t ranks_of[kMaxRanks] = {};            // active ranks of a host, by its lowest rank
  int collector[kMaxRanks];                     // by a host's lowest rank: who collects there for this rank, its rail
  uint64_t collects = 0;                        // ranks of other hosts whose collector here this rank is
  CombineOp* collecting[kMaxSlots] = {};  // combines that this rank collects for in its waits (collector.hpp)
  int carrier[kMaxRanks];                       // the rank of this host through which a rank is read, or that rank
  Array<Landing> landings;                      // [2][R][F], of dispatch and combine; the proxy's
  Array<uint64_t> goes_to;                      // [M], hosts that a token of this rank goes to: bit of the lowest rank
  Array<uint64_t> host_of;                      // [R * stride], host of a place: the same bit
  Sent traffic[3] = {};                         // by Kind
  std::atomic<uint64_t> down{0};                // bit per rank whose connection with this one has ended
  std::atomic<int64_t> down_ns[kMaxRanks] = {};
  std::atomic<uint32_t> joins{0};               // connections made so far
  uint32_t joins_seen = 0;

  HelperThread helper;  // if processors are plenty

  Array<int32_t> all_first, all_places;  // every copy of every expert: place = rank * stride + slot
  Array<int32_t> first, places;          // those on active ranks

  uint64_t outputs_busy[kMaxSlots] = {};  // combine that peers may still be reading from an expert output buffer
  Array<float> wide;           // [H], one row in fp32
  Array<int64_t> group_rows;   // [L], rows of each local expert, then its next row

  explicit Comm(const Geometry& geometry);
  // first [E+1], places [first[E]]. False when memory is short.
  bool allocate(const int32_t* first_copies, const int32_t* copy_places);
  ~Comm();
  // A network: mirrors [R] of this rank's own, then which ranks share memory, then the mirrors of each of those. 0 or
  // an errno.
  int attach_network(uint8_t* own_landing);
  void set_hosts(const int32_t* lowest);
  int attach_landing(int r, int landing_fd);

  void destroy() override;
  void attached(int r) override;
  void activate(uint64_t mask) override;  // filters the expert copies, chooses the rails
  void forget() override;
  Status send_remote(RemoteWord what, int slot, Want want) override;
  Status flush(uint64_t mask, Want want) override;
  bool has_joined() override;
  void refuse_connection(int r) override;
  uint64_t gone_remotes(uint64_t among, Want want) const override;
  uint64_t carriers_of(uint64_t among) const override;
  Status progress() override;

  int slot_of(uint64_t seq) const { return int(seq % uint64_t(g.in_flight)); }
};

}  // namespace cd
