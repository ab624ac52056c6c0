// What comes on a request connection becomes frames, checked against each other and against the limits of their kind
// before anything is taken for them, and rows where they belong. Neither a lock nor the interpreter is between the
// bytes and the rows. For TLS Python receives, into the same buffer or to the same place.
#include "frames.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifndef CD_BUILD_ID
#define CD_BUILD_ID "unknown"
#endif

namespace cd {
namespace {

using Wide = unsigned __int128;  // a product of any three numbers of a frame

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Of an element, by the code of its type; 0: there is none of that code.
uint32_t item_bytes(uint8_t dtype) { return dtype == 1 ? 4 : dtype == 2 || dtype == 3 ? 2 : 0; }

int ended(Line& l, int error) {
  l.error = error;
  return kEnded;
}

// Whether the fields fit each other and the rows that are said to follow.
bool fits(Line& l, const Forward& f) {
  const uint32_t item = item_bytes(f.dtype);
  const Wide rows = Wide(f.tokens) * (Wide(f.hidden) * item + 8 * Wide(f.topk));
  l.request_bytes = rows > UINT64_MAX ? UINT64_MAX : uint64_t(rows);
  return item && !f.zero && l.fields_bytes == sizeof(f) + f.model_bytes + f.trace_bytes &&
         l.rows_bytes == (f.place == kNowhere ? rows : 0);
}
bool fits(const Line& l, const Answer& a) {
  const Wide rows = Wide(a.tokens) * a.hidden * item_bytes(a.dtype);
  return item_bytes(a.dtype) && a.in_place <= 1 && l.fields_bytes == sizeof(a) + a.model_bytes &&
         l.rows_bytes == (a.in_place ? 0 : rows);
}

template <typename Fields>
bool fields_fit(Line& l) {
  Fields fields;
  if (l.fields_bytes < sizeof(fields)) return false;
  memcpy(&fields, l.buffer + l.fields_at, sizeof(fields));
  return fits(l, fields);
}

// The next frame, if the buffer has all of its header and fields.
int parsed(Line& l) {
  Header head;
  const uint32_t have = l.end - l.begin;
  if (have < sizeof(head)) return kNothing;
  memcpy(&head, l.buffer + l.begin, sizeof(head));
  const bool has_rows = head.kind == kForward || head.kind == kAnswer;
  if (head.zero || !head.kind || head.kind > kLastKind || head.fields_bytes > kMaxFieldsBytes) return kWrong;
  if (head.rows_bytes > (has_rows ? l.max_rows_bytes : 0)) return kWrong;
  if (have < sizeof(head) + head.fields_bytes) return kNothing;
  l.kind = head.kind;
  l.id = head.id;
  l.left = l.rows_bytes = head.rows_bytes;
  l.fields_bytes = head.fields_bytes;
  l.fields_at = l.begin + sizeof(head);
  l.begin = l.fields_at + head.fields_bytes;
  if (head.kind == kForward && !fields_fit<Forward>(l)) return kWrong;
  if (head.kind == kAnswer && !fields_fit<Answer>(l)) return kWrong;
  return head.kind;
}

// What is in the buffer moves to its beginning.
void compact(Line& l) {
  memmove(l.buffer, l.buffer + l.begin, l.end - l.begin);
  l.end -= l.begin;
  l.begin = 0;
}

// One `recv`, with the descriptor that comes beside it. The count; kNothing: there is nothing yet; kEnded.
int64_t received(Line& l, void* at, uint64_t room) {
  alignas(cmsghdr) char beside[CMSG_SPACE(sizeof(int))];
  iovec part{at, room};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (l.takes_descriptor) {
    message.msg_control = beside;
    message.msg_controllen = CMSG_LEN(sizeof(int));  // that of CMSG_SPACE would be room for two
  }
  const ssize_t count = l.takes_descriptor ? recvmsg(l.fd, &message, MSG_CMSG_CLOEXEC) : recv(l.fd, at, room, 0);
  if (count < 0) return errno == EAGAIN || errno == EINTR ? kNothing : ended(l, errno);
  if (!count) return ended(l, 0);
  for (cmsghdr* c = l.takes_descriptor ? CMSG_FIRSTHDR(&message) : nullptr; c; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(sizeof(int))) continue;
    if (l.descriptor >= 0) close(l.descriptor);
    memcpy(&l.descriptor, CMSG_DATA(c), sizeof(int));
  }
  l.heard_ns = now_ns();
  return count;
}

// Rows that are in the buffer go where they belong.
void take_here(Line& l) {
  const uint32_t count = uint32_t(std::min<uint64_t>(l.left, l.end - l.begin));
  if (l.into) {
    memcpy(l.into, l.buffer + l.begin, count);
    l.into += count;
  }
  l.begin += count;
  l.left -= count;
}

// kRows once all are here; kNothing: not yet.
int fill(Line& l) {
  take_here(l);
  if (l.begin == l.end) l.begin = l.end = 0;
  while (l.left && !l.is_tls) {
    const bool is_kept = l.into;
    const uint64_t room = is_kept ? l.left : std::min<uint64_t>(l.left, kBufferBytes);
    const int64_t count = received(l, is_kept ? l.into : l.buffer, room);
    if (count <= 0) return int(count);
    l.left -= uint64_t(count);
    if (is_kept) l.into += count;
  }
  l.are_coming = l.left != 0;
  return l.left ? kNothing : kRows;
}

// Narrowed to int32: what that cannot hold becomes another number that a worker refuses.
void copy_ids(uint8_t* out, const Rows& rows) {
  if (!rows.wide_ids) {
    memcpy(out, rows.ids, 4 * rows.num_ids);
    return;
  }
  for (uint64_t i = 0; i < rows.num_ids; ++i) {
    const int64_t id = static_cast<const int64_t*>(rows.ids)[i];
    const int32_t narrow = int32_t(std::clamp<int64_t>(id, INT32_MIN, INT32_MAX));
    memcpy(out + 4 * i, &narrow, 4);
  }
}

}  // namespace
}  // namespace cd

using cd::Line;

CD_API const char* cd_build_id() { return CD_BUILD_ID; }
CD_API uint64_t cd_line_bytes() { return sizeof(Line); }

// kRows once rows that were under way are whole, else the kind of the next frame, whose rows are due to `cd_rows`
// then, or a Got. Receives at most once for a header.
CD_API int cd_next(Line* l) {
  if (l->are_coming) return cd::fill(*l);
  const int got = cd::parsed(*l);
  if (got != cd::kNothing) return got;
  cd::compact(*l);
  if (l->is_tls) return cd::kNothing;
  const int64_t count = cd::received(*l, l->buffer + l->end, cd::kBufferBytes - l->end);
  if (count <= 0) return int(count);
  l->end += uint32_t(count);
  return cd::parsed(*l);
}

// The same once there is something, or kNothing after so many ns, or when it can be written and `writes`. A signal
// ends it early.
CD_API int cd_wait(Line* l, int64_t timeout_ns, int writes) {
  if (l->fd < 0) return cd::ended(*l, EBADF);  // closed: nothing would end the wait
  pollfd polled{l->fd, short(POLLIN | (writes ? POLLOUT : 0)), 0};
  const timespec limit{time_t(timeout_ns / 1'000'000'000), long(timeout_ns % 1'000'000'000)};
  if (ppoll(&polled, 1, &limit, nullptr) <= 0) return cd::kNothing;
  return polled.revents & ~POLLOUT ? cd_next(l) : cd::kNothing;
}

// The rows of the frame that came last go there; null: nowhere. kRows, or a Got: `cd_next` goes on.
CD_API int cd_rows(Line* l, uint8_t* into) {
  l->into = into;
  l->are_coming = 1;
  return cd::fill(*l);
}

// x, ids and weights of a request, one behind the other.
CD_API void cd_lay(uint8_t* out, const cd::Rows* rows) {
  memcpy(out, rows->x, rows->x_bytes);
  cd::copy_ids(out + rows->x_bytes, *rows);
  memcpy(out + rows->x_bytes + 4 * rows->num_ids, rows->weights, 4 * rows->num_ids);
}

// Copies of ids and weights that came, or these where they are: 0, or 1: an id is none of -1..most, 2: a weight is not
// finite.
CD_API int cd_copy_routing(int32_t* ids_out, float* weights_out, const int32_t* ids, const float* weights, int64_t n,
                           int32_t most) {
  if (ids_out != ids) memcpy(ids_out, ids, 4 * n);
  if (weights_out != weights) memcpy(weights_out, weights, 4 * n);
  bool ids_fit = true, are_finite = true;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, weights_out + i, 4);
    ids_fit &= ids_out[i] >= -1 && ids_out[i] <= most;
    are_finite &= (bits & 0x7F800000u) != 0x7F800000u;
  }
  return !ids_fit ? 1 : !are_finite ? 2 : 0;
}
