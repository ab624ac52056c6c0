// Compiled by tests where the headers of libibverbs are installed: our declarations are theirs.
#include <infiniband/verbs.h>

#include "same.hpp"
#include "verbs_abi.hpp"

using namespace cd::ib;

SAME_SIZE(GidEntry, ibv_gid_entry);
static_assert(sizeof(DeviceAttr)>=sizeof(ibv_device_attr), "");
SAME_PLACE(DeviceAttr, max_completions, ibv_device_attr, max_cqe);
SAME_PLACE(DeviceAttr, max_requests, ibv_device_attr, max_qp_wr);
SAME_PLACE(DeviceAttr, num_ports, ibv_device_attr, phys_port_cnt);
static_assert(sizeof(PortAttr)>=sizeof(ibv_port_attr), "");
SAME_PLACE(PortAttr, lid, ibv_port_attr, lid);
SAME_PLACE(PortAttr, link_layer, ibv_port_attr, link_layer);
SAME_PLACE(PortAttr, max_message_bytes, ibv_port_attr, max_msg_sz);
SAME_PLACE(PortAttr, active_mtu, ibv_port_attr, active_mtu);
SAME_SIZE(Region, ibv_mr);
SAME_PLACE(Region, rkey, ibv_mr, rkey);
SAME_SIZE(Piece, ibv_sge);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_PLACE(SendRequest, imm, ibv_send_wr, imm_data);
SAME_PLACE(SendRequest, rkey, ibv_send_wr, wr.rdma.rkey);
SAME_PLACE(SendRequest, remote_address, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendRequest, opcode, ibv_send_wr, opcode);
SAME_SIZE(RecvRequest, ibv_recv_wr);
SAME_SIZE(Completion, ibv_wc);
SAME_PLACE(Completion, imm, ibv_wc, imm_data);
SAME_PLACE(Completion, vendor_error, ibv_wc, vendor_err);
SAME_SIZE(PairInit, ibv_qp_init_attr);
SAME_PLACE(PairInit, capacity, ibv_qp_init_attr, cap);
SAME_PLACE(PairInit, type, ibv_qp_init_attr, qp_type);
SAME_SIZE(Address, ibv_ah_attr);
SAME_PLACE(Address, port, ibv_ah_attr, port_num);
SAME_PLACE(Route, traffic_class, ibv_global_route, traffic_class);
SAME_SIZE(PairAttr, ibv_qp_attr);
SAME_PLACE(PairAttr, address, ibv_qp_attr, ah_attr);
SAME_PLACE(PairAttr, key_index, ibv_qp_attr, pkey_index);
SAME_PLACE(PairAttr, port, ibv_qp_attr, port_num);
SAME_PLACE(PairAttr, not_ready_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(PairAttr, not_ready_retries, ibv_qp_attr, rnr_retry);
SAME_PLACE(PairAttr, retries, ibv_qp_attr, retry_cnt);
SAME_PLACE(PairAttr, reads, ibv_qp_attr, max_rd_atomic);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_PLACE(AsyncEvent, type, ibv_async_event, event_type);
SAME_SIZE(Context, ibv_context);
SAME_SIZE(Operations, ibv_context_ops);
SAME_PLACE(Operations, poll_cq, ibv_context_ops, poll_cq);
SAME_PLACE(Operations, post_send, ibv_context_ops, post_send);
SAME_PLACE(Operations, post_recv, ibv_context_ops, post_recv);
SAME_PLACE(Context, async_fd, ibv_context, async_fd);
SAME_PLACE(Channel, fd, ibv_comp_channel, fd);
SAME_PLACE(Queue, size, ibv_cq, cqe);
SAME_PLACE(Pair, number, ibv_qp, qp_num);
SAME_VALUE(kRecv, IBV_WC_RECV);
SAME_VALUE(kRecvWriteWithImm, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(kWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kSendWithImm, IBV_WR_SEND_WITH_IMM);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kInline, IBV_SEND_INLINE);
SAME_VALUE(kReliable, IBV_QPT_RC);
SAME_VALUE(kPeerPair, IBV_QP_DEST_QPN);
SAME_VALUE(kPeerReads, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kReads, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kSendPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kNotReadyWait, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kPortDown, IBV_EVENT_PORT_ERR);
SAME_VALUE(kNotReady, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(kRetriesExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(kRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kQueueError, IBV_EVENT_CQ_ERR);
SAME_VALUE(kPairFatal, IBV_EVENT_QP_FATAL);
SAME_VALUE(kPairAccess, IBV_EVENT_QP_ACCESS_ERR);
SAME_VALUE(kDeviceFatal, IBV_EVENT_DEVICE_FATAL);
SAME_VALUE(kPortUp, IBV_EVENT_PORT_ACTIVE);
