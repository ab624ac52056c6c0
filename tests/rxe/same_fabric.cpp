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

SAME_VALUE(kMsg, FI_MSG);
SAME_VALUE(kRma, FI_RMA);
SAME_VALUE(kWrite, FI_WRITE);
SAME_VALUE(kRecv, FI_RECV);
SAME_VALUE(kTransmit, FI_TRANSMIT);
SAME_VALUE(kRemoteWrite, FI_REMOTE_WRITE);
SAME_VALUE(kRemoteData, FI_REMOTE_CQ_DATA);
SAME_VALUE(kDeliveryComplete, FI_DELIVERY_COMPLETE);
SAME_VALUE(kSource, FI_SOURCE);
SAME_VALUE(kContext, FI_CONTEXT);
SAME_VALUE(kContext2, FI_CONTEXT2);
SAME_VALUE(kRecvForData, FI_RX_CQ_DATA);
SAME_VALUE(kMrLocal, FI_MR_LOCAL);
SAME_VALUE(kMrVirtual, FI_MR_VIRT_ADDR);
SAME_VALUE(kMrAllocated, FI_MR_ALLOCATED);
SAME_VALUE(kMrProviderKey, FI_MR_PROV_KEY);
SAME_VALUE(kMrEndpoint, FI_MR_ENDPOINT);
SAME_VALUE(kReliableDatagram, FI_EP_RDM);
SAME_VALUE(kThreadDomain, FI_THREAD_DOMAIN);
SAME_VALUE(kProgressManual, FI_PROGRESS_MANUAL);
SAME_VALUE(kAddressTable, FI_AV_TABLE);
SAME_VALUE(kWithData, FI_CQ_FORMAT_DATA);
SAME_VALUE(kWaitNone, FI_WAIT_NONE);
SAME_VALUE(kWaitFd, FI_WAIT_FD);
SAME_VALUE(kGetWait, FI_GETWAIT);
SAME_VALUE(kEnable, FI_ENABLE);
SAME_VALUE(kErrorAvailable, FI_EAVAIL);
SAME_VALUE(kHmem, FI_HMEM);
SAME_VALUE(kMrHmem, FI_MR_HMEM);
SAME_VALUE(kCuda, FI_HMEM_CUDA);
SAME_VALUE(kOfEndpoint, FI_OPT_ENDPOINT);
SAME_VALUE(kPeerToPeer, FI_OPT_FI_HMEM_P2P);
SAME_VALUE(kPeerToPeerRequired, FI_HMEM_P2P_REQUIRED);
#if FI_VERSION_GE(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), FI_VERSION(1, 18))
SAME_VALUE(kCudaPermitted, FI_OPT_CUDA_API_PERMITTED);
#endif
#ifdef FI_MR_DMABUF
SAME_VALUE(kMrDmaBuf, FI_MR_DMABUF);
SAME_SIZE(DmaBuf, fi_mr_dmabuf);
#endif
SAME_SIZE(Piece, iovec);
SAME_PLACE(RegionAttr, memory, fi_mr_attr, iface);
SAME_PLACE(RegionAttr, device, fi_mr_attr, device);
static_assert(sizeof(RegionAttr) >= sizeof(fi_mr_attr), "RegionAttr");
SAME_PLACE(Endpoint, options, fid_ep, ops);
SAME_PLACE(Endpoint::Options, setopt, fi_ops_ep, setopt);
SAME_PLACE(Domain::Registering, regattr, fi_ops_mr, regattr);
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
SAME_SIZE(Entry, fi_cq_data_entry);
SAME_PLACE(Endpoint, names, fid_ep, cm);
SAME_PLACE(Endpoint, rma, fid_ep, rma);
SAME_PLACE(Endpoint::Messages, inject, fi_ops_msg, inject);
SAME_PLACE(Endpoint::Messages, recv, fi_ops_msg, recv);
SAME_PLACE(Endpoint::Rma, writedata, fi_ops_rma, writedata);
SAME_PLACE(Endpoint::Names, getname, fi_ops_cm, getname);
SAME_PLACE(Domain::Ops, endpoint, fi_ops_domain, endpoint);
SAME_PLACE(Domain, registering, fid_domain, mr);
SAME_PLACE(Fabric::Ops, trywait, fi_ops_fabric, trywait);
