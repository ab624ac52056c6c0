// The control messages of a lane, on its TCP connection, for providers with connections of their own: first each end's
// address (`Card`: all that the peer needs to connect to it), later one byte: ready. Then nothing, until it is closed.
#pragma once
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace cd {

enum class ControlMessage { nothing, address, ready, closed };

template <typename Card>
struct Exchange {
  int fd = -1;
  size_t bytes = 0;
  int error = 0;  // with `closed`: 0, in order
  uint8_t words[sizeof(Card) + 1];

  // Into an empty socket buffer, so it never waits. Then the descriptor is this lane's. False, and errno.
  bool begin(int epoll_fd, int given, uint64_t tag, const Card& card) {
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = tag;
    if (!send_all(given, &card, sizeof card) || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, given, &event) != 0) return false;
    fd = given;
    return true;
  }

  bool send_ready() const {
    const uint8_t ready = 1;
    return send_all(fd, &ready, 1);
  }

  // Call until it gives `nothing` or `closed`.
  ControlMessage receive() {
    for (;;) {
      const size_t wanted = bytes < sizeof(Card) ? sizeof(Card) - bytes : 1;
      uint8_t beyond;
      const ssize_t got = recv(fd, bytes < sizeof words ? words + bytes : &beyond, wanted, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return ControlMessage::nothing;
      error = got < 0 ? errno : got == 0 ? 0 : EPROTO;
      if (got <= 0 || bytes == sizeof words) return ControlMessage::closed;
      bytes += size_t(got);
      if (bytes == sizeof(Card)) return ControlMessage::address;
      if (bytes == sizeof words) return ControlMessage::ready;
    }
  }

  // Lets the descriptor go; closes it if it is this lane's to close.
  void end(int epoll_fd, bool close_fd) {
    if (fd < 0) return;
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, nullptr);
    if (close_fd) close(fd);
    fd = -1;
  }

 private:
  static bool send_all(int to, const void* what, size_t size) {
    return send(to, what, size, MSG_DONTWAIT | MSG_NOSIGNAL) == ssize_t(size);
  }
};

}  // namespace cd
