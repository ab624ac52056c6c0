// The part of the ABI of libibverbs (IBVERBS_1.1) that the `verbs` provider uses, declared here so that building needs
// nothing of it. Names and meanings are those of <infiniband/verbs.h>; tests compare sizes and offsets with the header.
#pragma once
#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace cd::ib {

struct Context;
struct Device;
struct Domain;   // ibv_pd
struct Channel;  // ibv_comp_channel
struct Queue;    // ibv_cq
struct Pair;     // ibv_qp

enum PortState : int { kPortActive = 4 };
enum LinkLayer : uint8_t { kInfiniBand = 1, kEthernet = 2 };
enum GidType : uint32_t { kGidIb = 0, kGidRoceV1 = 1, kGidRoceV2 = 2 };
enum PairType : int { kReliable = 2 };
enum PairState : int { kInit = 1, kReadyToReceive = 2, kReadyToSend = 3 };
enum Access : int { kLocalWrite = 1, kRemoteWrite = 2 };
enum SendFlags : unsigned { kSignaled = 2, kInline = 8 };
enum Opcode : int { kWriteWithImm = 1, kSendWithImm = 3 };  // of ibv_wr_opcode
enum CompletedOpcode : int { kRecv = 128, kRecvWriteWithImm = 129 };
enum Status : int { kSuccess = 0, kFlushed = 5, kRemoteAccess = 10, kRetriesExceeded = 12, kNotReady = 13 };
enum Event : int { kQueueError = 0, kPairFatal = 1, kPairRequest = 2, kPairAccess = 3, kDeviceFatal = 8, kPortUp = 9,
                   kPortDown = 10 };
enum Change : int {
  kState = 1 << 0, kAccessFlags = 1 << 3, kKeyIndex = 1 << 4, kPort = 1 << 5, kAddress = 1 << 7, kPathMtu = 1 << 8,
  kTimer = 1 << 9, kRetryCount = 1 << 10, kNotReadyCount = 1 << 11, kRecvPsn = 1 << 12, kReads = 1 << 13,
  kNotReadyWait = 1 << 15, kSendPsn = 1 << 16, kPeerReads = 1 << 17, kPeerPair = 1 << 20,
};

struct Gid {
  uint8_t raw[16];
};

struct GidEntry {
  alignas(8) Gid gid;
  uint32_t index, port, type, interface;
};

struct DeviceAttr {
  char firmware[64];
  uint64_t node_guid, image_guid, max_region_bytes, page_sizes;
  uint32_t vendor, part, hardware;
  int max_pairs, max_requests;
  unsigned flags;
  int max_pieces, max_read_pieces, max_queues, max_completions;
  int others[22];
  uint16_t max_keys;
  uint8_t ack_delay, num_ports;
  uint8_t rest[64];
};

struct PortAttr {
  int state, max_mtu, active_mtu, num_gids;
  uint32_t flags, max_message_bytes, bad_keys, violations;
  uint16_t num_keys, lid, manager_lid;
  uint8_t lid_mask, num_lanes, manager_level, subnet_timeout, init_reply, width, speed, physical, link_layer, flags2;
  uint16_t flags3;
  uint8_t rest[32];
};

struct Region {  // ibv_mr
  Context* context;
  Domain* domain;
  void* address;
  size_t bytes;
  uint32_t handle, lkey, rkey;
};

struct Piece {  // ibv_sge
  uint64_t address;
  uint32_t bytes, lkey;
};

struct SendRequest {  // ibv_send_wr
  uint64_t id;
  SendRequest* next;
  Piece* pieces;
  int num_pieces, opcode;
  unsigned flags;
  uint32_t imm;  // network byte order
  uint64_t remote_address;
  uint32_t rkey;
  uint8_t rest[76];
};

struct RecvRequest {  // ibv_recv_wr
  uint64_t id;
  RecvRequest* next;
  Piece* pieces;
  int num_pieces;
};

struct Completion {  // ibv_wc
  uint64_t id;
  int status, opcode;
  uint32_t vendor_error, bytes;
  uint32_t imm;  // network byte order
  uint32_t pair, source_pair;
  unsigned flags;
  uint16_t key_index, source_lid;
  uint8_t level, path_bits;
};

struct Capacity {  // ibv_qp_cap
  uint32_t sends, recvs, send_pieces, recv_pieces, inline_bytes;
};

struct PairInit {  // ibv_qp_init_attr
  void* context;
  Queue *send_queue, *recv_queue;
  void* shared_recvs;
  Capacity capacity;
  int type, signal_all;
};

struct Route {  // ibv_global_route
  alignas(8) Gid gid;
  uint32_t flow_label;
  uint8_t own_gid_index, hop_limit, traffic_class;
};

struct Address {  // ibv_ah_attr
  Route route;
  uint16_t lid;
  uint8_t level, path_bits, rate, is_global, port;
};

struct PairAttr {  // ibv_qp_attr
  int state, current_state, mtu, migration;
  uint32_t key, recv_psn, send_psn, peer_pair;
  unsigned access;
  Capacity capacity;
  Address address, other_address;
  uint16_t key_index, other_key_index;
  uint8_t drained_notify, draining, reads, peer_reads, not_ready_timer, port, timeout, retries, not_ready_retries,
      other_port, other_timeout;
  uint32_t rate_limit;
};

struct AsyncEvent {
  union {
    Queue* queue;
    Pair* pair;
    int port;
  };
  int type;
};

struct Operations {  // ibv_context_ops
  void* before_poll[11];
  int (*poll_cq)(Queue*, int, Completion*);
  int (*req_notify_cq)(Queue*, int);
  void* between[12];
  int (*post_send)(Pair*, SendRequest*, SendRequest**);
  int (*post_recv)(Pair*, RecvRequest*, RecvRequest**);
  void* after_recv[5];
};

struct Context {
  Device* device;
  Operations ops;
  int cmd_fd, async_fd, num_vectors;
  pthread_mutex_t mutex;
  void* compat;
};

struct Channel {
  Context* context;
  int fd, references;
};

struct Queue {
  Context* context;
  Channel* channel;
  void* queue_context;
  uint32_t handle;
  int size;
};

struct Pair {
  Context* context;
  void* pair_context;
  Domain* domain;
  Queue *send_queue, *recv_queue;
  void* shared_recvs;
  uint32_t handle, number;
};

}  // namespace cd::ib
