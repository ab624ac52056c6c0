// Compiled by tests where the headers of libfabric are installed: our declarations are theirs.
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "fabric_abi.hpp"
#include "same.hpp"

using namespace cd::fi;

static_assert(FI_MSG == kMsg, "kMsg");
static_assert(FI_RMA == kRma, "kRma");
static_assert(FI_WRITE == kWrite, "kWrite");
static_assert(FI_RECV == kRecv, "kRecv");
static_assert(FI_TRANSMIT == kTransmit, "kTransmit");
static_assert(FI_REMOTE_WRITE == kRemoteWrite, "kRemoteWrite");
static_assert(FI_REMOTE_CQ_DATA == kRemoteData, "kRemoteData");
static_assert(FI_DELIVERY_COMPLETE == kDeliveryComplete, "kDeliveryComplete");
static_assert(FI_SOURCE == kSource, "kSource");
static_assert(FI_CONTEXT == kContext, "kContext");
static_assert(FI_CONTEXT2 == kContext2, "kContext2");
static_assert(FI_RX_CQ_DATA == kRecvForData, "kRecvForData");
static_assert(FI_MR_LOCAL == kMrLocal, "kMrLocal");
static_assert(FI_MR_VIRT_ADDR == kMrVirtual, "kMrVirtual");
static_assert(FI_MR_ALLOCATED == kMrAllocated, "kMrAllocated");
static_assert(FI_MR_PROV_KEY == kMrProviderKey, "kMrProviderKey");
static_assert(FI_MR_ENDPOINT == kMrEndpoint, "kMrEndpoint");
static_assert(FI_EP_RDM == kReliableDatagram, "kReliableDatagram");
static_assert(FI_THREAD_DOMAIN == kThreadDomain, "kThreadDomain");
static_assert(FI_PROGRESS_MANUAL == kProgressManual, "kProgressManual");
static_assert(FI_AV_TABLE == kAddressTable, "kAddressTable");
static_assert(FI_CQ_FORMAT_DATA == kWithData, "kWithData");
static_assert(FI_WAIT_NONE == kWaitNone, "kWaitNone");
static_assert(FI_WAIT_FD == kWaitFd, "kWaitFd");
static_assert(FI_GETWAIT == kGetWait, "kGetWait");
static_assert(FI_ENABLE == kEnable, "kEnable");
static_assert(FI_EAVAIL == kErrorAvailable, "kErrorAvailable");
static_assert(sizeof(Info)==sizeof(fi_info)-8, "");
SAME_PLACE(Info, domain, fi_info, domain_attr);
SAME_PLACE(TxAttr, size, fi_tx_attr, size);
SAME_PLACE(RxAttr, size, fi_rx_attr, size);
SAME_PLACE(EndpointAttr, max_message_bytes, fi_ep_attr, max_msg_size);
SAME_PLACE(DomainAttr, data_bytes, fi_domain_attr, cq_data_size);
SAME_PLACE(DomainAttr, mr_mode, fi_domain_attr, mr_mode);
SAME_PLACE(FabricAttr, provider, fi_fabric_attr, prov_name);
SAME_PLACE(IdOps, control, fi_ops, control);
SAME_PLACE(Region, key, fid_mr, key);
SAME_PLACE(Vector::Ops, remove, fi_ops_av, remove);
SAME_PLACE(VectorAttr, flags, fi_av_attr, flags);
SAME_PLACE(ErrorEntry, error_data_bytes, fi_cq_err_entry, err_data_size);
SAME_PLACE(Queue::Ops, strerror, fi_ops_cq, strerror);
SAME_PLACE(QueueAttr, wait_set, fi_cq_attr, wait_set);
static_assert(sizeof(Entry)==sizeof(fi_cq_data_entry), "");
SAME_PLACE(Endpoint, names, fid_ep, cm);
SAME_PLACE(Endpoint, rma, fid_ep, rma);
SAME_PLACE(Endpoint::Messages, inject, fi_ops_msg, inject);
SAME_PLACE(Endpoint::Messages, recv, fi_ops_msg, recv);
SAME_PLACE(Endpoint::Rma, writedata, fi_ops_rma, writedata);
SAME_PLACE(Endpoint::Names, getname, fi_ops_cm, getname);
SAME_PLACE(Domain::Ops, endpoint, fi_ops_domain, endpoint);
SAME_PLACE(Domain, registering, fid_domain, mr);
SAME_PLACE(Fabric::Ops, trywait, fi_ops_fabric, trywait);
