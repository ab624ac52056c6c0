// The functions of libibverbs that the provider calls.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.hpp"

using namespace fake;

namespace {

using Lock = std::lock_guard<std::mutex>;

OpenDevice* of(Context* context) { return static_cast<OpenDevice*>(context); }
QueuePair* of(Pair* pair) { return static_cast<QueuePair*>(pair); }
CompletionQueue* of(Queue* queue) { return static_cast<CompletionQueue*>(queue); }
Faults& faults_of(Context* context) { return state().faults[of(context)->number]; }

bool is_gone(Context* context) {
  const bool gone = of(context)->is_dead || faults_of(context).absent;
  if (gone) errno = EIO;
  return gone;
}

void must(bool right, const char* what) {
  if (right) return;
  ++state().counts.wrong_calls;
  fprintf(stderr, "fake verbs: %s\n", what);
}

Gid gid_of(int number, int index) {
  Gid gid{};
  if (index == 0) gid.raw[0] = 0xfe, gid.raw[1] = 0x80;
  if (index == 1) gid.raw[10] = gid.raw[11] = 0xff;
  const uint32_t host = htonl(host_of(number));
  memcpy(gid.raw + 12, &host, 4);
  return gid;
}

int poll_cq(Queue* queue, int most, Completion* out) {
  Lock lock(state().mutex);
  CompletionQueue& q = *of(queue);
  int n = 0;
  for (; n < most && !q.done.empty() && !q.is_dead; ++n) {
    out[n] = q.done.front();
    q.done.pop_front();
  }
  return q.is_dead ? -1 : n;
}

int req_notify_cq(Queue* queue, int) {
  Lock lock(state().mutex);
  of(queue)->is_armed = true;
  return 0;
}

int post_send(Pair* pair, SendRequest* request, SendRequest** bad) {
  Lock lock(state().mutex);
  QueuePair& q = *of(pair);
  *bad = request;
  if (is_gone(q.context)) return EIO;
  if (q.state < kReadyToSend) return EINVAL;
  if (q.sends.size() == q.capacity.sends) return ENOMEM;
  Work w{request->id, request->opcode, nullptr, 0, 0, request->imm, request->rkey, request->remote_address, {}};
  if (request->num_pieces) {
    const Piece& piece = request->pieces[0];
    w.from = reinterpret_cast<const uint8_t*>(piece.address);
    w.bytes = piece.bytes;
    w.lkey = piece.lkey;
    if (w.bytes > faults_of(q.context).max_message) return EINVAL;
    if (request->flags & kInline) {
      must(!device_of(piece.address, piece.bytes), "the processor reads memory of a device");
      if (w.bytes > q.capacity.inline_bytes) return EINVAL;
      w.inlined.assign(w.from, w.from + w.bytes);
    }
  }
  q.sends.push_back(w);
  if (q.state == kError) fail(q, kFlushed);
  kick();
  return 0;
}

int post_recv(Pair* pair, RecvRequest* request, RecvRequest** bad) {
  Lock lock(state().mutex);
  QueuePair& q = *of(pair);
  *bad = request;
  if (is_gone(q.context)) return EIO;
  if (q.recvs.size() == q.capacity.recvs) return ENOMEM;
  q.recvs.push_back(request->id);
  if (q.state == kError) fail(q, kFlushed);
  return 0;
}

// A pipe whose read end the caller waits for.
bool make_pipe(int* in, int* out) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return false;
  *in = fds[0];
  *out = fds[1];
  return true;
}

void end_pipe(int in, int out) {
  close(in);
  close(out);
}

// Null, and errno: refused.
MemoryRegion* register_memory(Domain* domain, void* address, size_t bytes, int access) {
  Faults& f = faults_of(domain->context);
  if (is_gone(domain->context)) return nullptr;
  if (f.refused && f.granted-- <= 0) return errno = int(f.refused), nullptr;
  auto* made = new MemoryRegion{};
  made->context = domain->context;
  made->domain = domain;
  made->address = address;
  made->bytes = bytes;
  made->lkey = made->rkey = state().next_key++;
  made->allowed = access;
  state().regions.push_back(made);
  ++state().counts.regions;
  state().counts.bytes += int64_t(bytes);
  return made;
}

}  // namespace

IBV Device** ibv_get_device_list(int* count) {
  Lock lock(state().mutex);
  auto** list = static_cast<Device**>(calloc(kDevices + 1, sizeof(Device*)));
  *count = 0;
  for (Device& device : state().devices) {
    if (!state().faults[device.number].absent) list[(*count)++] = &device;
  }
  return list;
}
IBV void ibv_free_device_list(Device** list) { free(list); }
IBV const char* ibv_get_device_name(Device* device) { return device->name; }

IBV Context* ibv_open_device(Device* device) {
  if (!start()) return nullptr;
  Lock lock(state().mutex);
  auto* made = new OpenDevice{};
  made->device = device;
  made->number = device->number;
  made->ops.poll_cq = poll_cq;
  made->ops.req_notify_cq = req_notify_cq;
  made->ops.post_send = post_send;
  made->ops.post_recv = post_recv;
  made->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  made->async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  if (is_gone(made)) {
    close(made->cmd_fd);
    close(made->async_fd);
    delete made;
    return nullptr;
  }
  state().contexts.push_back(made);
  ++state().counts.contexts;
  return made;
}

IBV int ibv_close_device(Context* context) {
  Lock lock(state().mutex);
  for (const MemoryRegion* region : state().regions) must(region->context != context, "a device closed with regions");
  for (const QueuePair* pair : state().pairs) must(pair->context != context, "a device closed with queue pairs");
  close(context->cmd_fd);
  close(context->async_fd);
  state().contexts.remove(of(context));
  --state().counts.contexts;
  delete of(context);
  return 0;
}

IBV int ibv_query_device(Context* context, DeviceAttr* out) {
  Lock lock(state().mutex);
  *out = {};
  out->max_requests = 1 << 14;
  out->max_completions = int(faults_of(context).max_completions);
  out->num_ports = 1;
  return 0;
}

IBV int ibv_query_port(Context* context, uint8_t, PortAttr* out) {
  Lock lock(state().mutex);
  *out = {};
  out->state = faults_of(context).port_down ? 1 : kPortActive;
  out->max_mtu = out->active_mtu = 5;
  out->num_gids = 2;
  out->max_message_bytes = uint32_t(faults_of(context).max_message);
  out->link_layer = kEthernet;
  return 0;
}

IBV int ibv_query_gid(Context* context, uint8_t, int index, Gid* out) {
  if (index < 0 || index > 1) return EINVAL;
  *out = gid_of(of(context)->number, index);
  return 0;
}

IBV int _ibv_query_gid_ex(Context* context, uint32_t, uint32_t index, GidEntry* out, uint32_t, size_t) {
  out->type = kGidRoceV2;
  return ibv_query_gid(context, 1, int(index), &out->gid);
}

IBV Domain* ibv_alloc_pd(Context* context) {
  Lock lock(state().mutex);
  if (is_gone(context)) return nullptr;
  ++state().counts.domains;
  return new Domain{context};
}

IBV int ibv_dealloc_pd(Domain* domain) {
  Lock lock(state().mutex);
  for (const MemoryRegion* region : state().regions) must(region->domain != domain, "a domain freed with regions");
  for (const QueuePair* pair : state().pairs) must(pair->domain != domain, "a domain freed with queue pairs");
  --state().counts.domains;
  delete domain;
  return 0;
}

IBV Region* ibv_reg_mr(Domain* domain, void* address, size_t bytes, int access) {
  Lock lock(state().mutex);
  const Faults& f = faults_of(domain->context);
  const DeviceMemory* device = device_of(uint64_t(address), bytes);
  if (device && f.no_peermem) return errno = int(f.no_peermem), nullptr;
  MemoryRegion* made = register_memory(domain, address, bytes, access);
  if (!made || !device) return made;
  made->is_device = true;
  made->is_copied = device->driver.copy != nullptr;
  ++state().counts.device_regions;
  return made;
}

// The dma-buf of an ordinary file is mapped; that of a GPU cannot be.
IBV Region* ibv_reg_dmabuf_mr(Domain* domain, uint64_t offset, size_t bytes, uint64_t address, int fd, int access) {
  Lock lock(state().mutex);
  const Faults& f = faults_of(domain->context);
  if (f.no_dma_buf) return errno = int(f.no_dma_buf), nullptr;
  const DeviceMemory* device = device_of(address, bytes);
  void* mapped = MAP_FAILED;
  if (!device || !device->driver.copy) {
    mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset));
    if (mapped == MAP_FAILED) return errno = EINVAL, nullptr;
  }
  MemoryRegion* made = register_memory(domain, reinterpret_cast<void*>(address), bytes, access);
  if (!made) {
    if (mapped != MAP_FAILED) munmap(mapped, bytes);
    return nullptr;
  }
  made->is_dma_buf = true;
  made->is_copied = mapped == MAP_FAILED;
  made->shift = made->is_copied ? 0 : int64_t(mapped) - int64_t(address);
  ++state().counts.dma_bufs;
  return made;
}

IBV int ibv_dereg_mr(Region* given) {
  Lock lock(state().mutex);
  auto* region = static_cast<MemoryRegion*>(given);
  Counts& counts = state().counts;
  state().regions.remove(region);
  --counts.regions;
  counts.bytes -= int64_t(region->bytes);
  counts.dma_bufs -= region->is_dma_buf;
  counts.device_regions -= region->is_device;
  if (region->shift) munmap(reinterpret_cast<uint8_t*>(region->address) + region->shift, region->bytes);
  delete region;
  return 0;
}

IBV Channel* ibv_create_comp_channel(Context* context) {
  Lock lock(state().mutex);
  auto* made = new EventChannel{};
  made->context = context;
  if (is_gone(context) || !make_pipe(&made->fd, &made->out)) {
    delete made;
    return nullptr;
  }
  ++state().counts.channels;
  return made;
}

IBV int ibv_destroy_comp_channel(Channel* channel) {
  Lock lock(state().mutex);
  must(channel->references == 0, "a channel destroyed with queues");
  end_pipe(channel->fd, static_cast<EventChannel*>(channel)->out);
  --state().counts.channels;
  delete static_cast<EventChannel*>(channel);
  return 0;
}

IBV Queue* ibv_create_cq(Context* context, int size, void* given, Channel* channel, int) {
  Lock lock(state().mutex);
  if (is_gone(context)) return nullptr;
  if (size > faults_of(context).max_completions) return errno = EINVAL, nullptr;
  auto* made = new CompletionQueue;
  made->context = context;
  made->channel = channel;
  made->queue_context = given;
  made->size = size;
  ++channel->references;
  ++state().counts.queues;
  return made;
}

IBV int ibv_destroy_cq(Queue* queue) {
  Lock lock(state().mutex);
  must(of(queue)->told == of(queue)->acknowledged, "a queue destroyed with events that are not acknowledged");
  for (const QueuePair* pair : state().pairs) must(pair->send_queue != queue, "a queue destroyed with queue pairs");
  --queue->channel->references;
  --state().counts.queues;
  delete of(queue);
  return 0;
}

IBV int ibv_get_cq_event(Channel* channel, Queue** queue, void** context) {
  if (read(channel->fd, queue, sizeof *queue) != sizeof *queue) return -1;
  Lock lock(state().mutex);
  ++of(*queue)->told;
  *context = (*queue)->queue_context;
  return 0;
}

IBV void ibv_ack_cq_events(Queue* queue, unsigned number) {
  Lock lock(state().mutex);
  of(queue)->acknowledged += number;
}

IBV Pair* ibv_create_qp(Domain* domain, PairInit* init) {
  Lock lock(state().mutex);
  if (is_gone(domain->context)) return nullptr;
  auto* made = new QueuePair;
  made->context = domain->context;
  made->domain = domain;
  made->send_queue = init->send_queue;
  made->recv_queue = init->recv_queue;
  made->number = state().next_pair++;
  made->number_of_device = of(domain->context)->number;
  made->capacity = init->capacity;
  state().pairs.push_back(made);
  ++state().counts.pairs;
  return made;
}

IBV int ibv_modify_qp(Pair* pair, PairAttr* attr, int changed) {
  Lock lock(state().mutex);
  QueuePair& q = *of(pair);
  if (is_gone(q.context)) return EIO;
  if (q.state == kError || !(changed & kState) || attr->state != q.state + 1) return EINVAL;
  if (attr->state == kReadyToReceive) {
    if (attr->address.route.own_gid_index > 1 || !attr->address.is_global) return EINVAL;
    q.peer = attr->address.route.gid;
    q.peer_pair = attr->peer_pair;
  }
  if (attr->state == kReadyToSend) q.retries = attr->not_ready_retries;
  q.state = attr->state;
  return 0;
}

IBV int ibv_destroy_qp(Pair* pair) {
  Lock lock(state().mutex);
  QueuePair* q = of(pair);
  must(q->told == q->acknowledged, "a queue pair destroyed with events that are not acknowledged");
  std::deque<AsyncEvent>& events = of(q->context)->events;
  events.erase(std::remove_if(events.begin(), events.end(),
                              [&](const AsyncEvent& event) { return is_of_pair(event.type) && event.pair == q; }),
               events.end());
  cut_off(*q);
  state().pairs.remove(q);
  --state().counts.pairs;
  delete q;
  return 0;
}

IBV int ibv_get_async_event(Context* context, AsyncEvent* out) {
  uint64_t one;
  if (read(context->async_fd, &one, sizeof one) != sizeof one) return -1;
  Lock lock(state().mutex);
  std::deque<AsyncEvent>& events = of(context)->events;
  if (events.empty()) return -1;  // its queue pair is gone
  *out = events.front();
  events.pop_front();
  if (is_of_pair(out->type)) ++of(out->pair)->told;
  return 0;
}

IBV void ibv_ack_async_event(AsyncEvent* event) {
  Lock lock(state().mutex);
  if (is_of_pair(event->type)) ++of(event->pair)->acknowledged;
}

IBV const char* ibv_wc_status_str(int status) {
  return status == kRetriesExceeded ? "transport retry counter exceeded"
         : status == kNotReady      ? "RNR retry counter exceeded"
         : status == kFlushed       ? "Work Request Flushed Error"
         : status == kRemoteAccess  ? "remote access error"
                                    : "local protection error";
}

IBV const char* ibv_event_type_str(int type) {
  return type == kQueueError    ? "CQ error"
         : type == kPairFatal   ? "local work queue catastrophic error"
         : type == kPairAccess  ? "local access violation work queue error"
         : type == kDeviceFatal ? "local catastrophic error"
         : type == kPortUp      ? "port active"
         : type == kPortDown    ? "port error"
                                : "unknown";
}
