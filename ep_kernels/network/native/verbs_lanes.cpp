// The lanes of `verbs`: how a queue pair is made, connected by the cards of both ends, and let go of.
#include <errno.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "verbs.hpp"

namespace cd::ib {
namespace {

// A peer that is not ready is asked six times more, 0.6 ms apart, which it is only if it breaks the flow control.
constexpr uint8_t kNotReadyRetries = 6, kNotReadyTimer = 12;

}  // namespace

// A device that came back is opened anew.
bool Verbs::is_alive() {
  if (!is_dead_) return true;
  for (int peer = 0; peer < kNetRanks; ++peer) disconnect(peer);
  end();
  if (begin()) return true;
  end();
  return errno = ENODEV, false;
}

bool Verbs::make(int peer, int lane, Lane& l, Card* card) {
  if (!make_pair(peer, lane, l)) return false;
  const Region& landing = *mirror(peer);
  *card = {kMagic, l.pair->number, l.psn, landing.rkey, reinterpret_cast<uint64_t>(landing.address), memory_.stride,
           port_.gid.gid, port_.attr.lid, port_.attr.link_layer, uint8_t(port_.mtu), uint32_t(depth_)};
  return true;
}

bool Verbs::make_pair(int peer, int lane, Lane& l) {
  if (!source(peer) || !mirror(peer)) return false;
  // The pair, with a queue for its writes and receives.
  PairInit init{};
  init.send_queue = init.recv_queue = queue_;
  const uint32_t room = uint32_t(depth_ + kCredits);
  init.capacity = {room, room, 1, 1, kInlineBytes};
  init.type = kReliable;
  l.pair = port_.lib->create_qp(port_.domain, &init);
  if (!l.pair) return about_.say("verbs: no queue pair: %s", strerror(errno)), false;
  // First sequence number, by chance: late packets of an earlier pair must not fit.
  if (getrandom(&l.psn, sizeof l.psn, 0) != sizeof l.psn) l.psn = l.pair->number * 2654435761u;
  l.psn &= 0xffffff;
  // Start it: receives may be posted from then on.
  PairAttr attr{};
  attr.state = kInit;
  attr.port = port_.number;
  attr.access = kLocalWrite | kRemoteWrite;
  if (int error = port_.lib->modify_qp(l.pair, &attr, kState | kKeyIndex | kPort | kAccessFlags)) {
    about_.say("verbs: the queue pair does not start: %s", strerror(error));
    return errno = error, false;
  }
  for (uint32_t i = 0; i < room; ++i) {
    if (!post_recv(peer, lane, l)) return about_.say("verbs: no receive can be posted"), false;
  }
  return true;
}

// Connects the queue pair by the peer's card. 0 or an errno.
int Verbs::to_peer(int, int lane, Lane& l) {
  const Card& p = l.peer;
  why_.say("verbs: the peer's card is none of this version, or of another kind of network");
  if (p.magic != kMagic || p.depth < kLeast || p.link_layer != port_.attr.link_layer) return EPROTO;
  PairAttr attr{};
  attr.state = kReadyToReceive;
  attr.mtu = std::max(1, std::min(port_.mtu, int(p.mtu)));
  attr.peer_pair = p.pair;
  attr.recv_psn = p.psn;
  attr.peer_reads = 1;
  attr.not_ready_timer = kNotReadyTimer;
  Address& to = attr.address;
  to.port = port_.number;
  to.lid = p.lid;
  to.level = uint8_t(settings_.service_level);
  // InfiniBand needs the global route only beyond the subnet, of which the first half of the GID is the name.
  to.is_global = port_.ethernet || settings_.gid_index >= 0 || memcmp(p.gid.raw, port_.gid.gid.raw, 8) != 0;
  to.route.gid = p.gid;
  to.route.own_gid_index = uint8_t(port_.gid.index);
  to.route.hop_limit = 64;
  to.route.traffic_class = uint8_t(settings_.traffic_class);
  // RoCE: drivers derive the UDP source port, by which switches choose a path, from the label: each lane has its own.
  to.route.flow_label = (l.psn & 0x3fff & ~(kMaxLanes - 1u)) | uint32_t(lane);
  const int path = kAddress | kPathMtu | kPeerPair | kRecvPsn | kPeerReads | kNotReadyWait;
  int error = port_.lib->modify_qp(l.pair, &attr, kState | path);
  if (!error) {
    attr = {};
    attr.state = kReadyToSend;
    attr.send_psn = l.psn;
    attr.timeout = uint8_t(settings_.ack_timeout);
    attr.retries = uint8_t(settings_.retries);
    attr.not_ready_retries = kNotReadyRetries;
    attr.reads = 1;
    error = port_.lib->modify_qp(l.pair, &attr, kState | kTimer | kRetryCount | kNotReadyCount | kSendPsn | kReads);
  }
  why_.say("verbs: the queue pair cannot be connected: %s; is the peer's GID reachable from GID %d here?",
           strerror(error), port_.gid.index);
  return error;
}

}  // namespace cd::ib
