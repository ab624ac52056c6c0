// What both ends of a lane tell each other on its TCP connection, for providers with connections of their own: a card,
// what the other end needs to reach this one, and later one byte: ready. Then nothing, until it ends.
#pragma once
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace cd {

enum class Heard { nothing, card, ready, end };

template <typename Card>
struct Exchange {
  int fd = -1;
  size_t bytes = 0;
  int error = 0;  // with `end`: 0, closed in order
  uint8_t words[sizeof(Card) + 1];

  // Into an empty socket buffer, so it never waits. Then the descriptor is this lane's. False, and errno.
  bool begin(int epoll_fd, int given, uint64_t tag, const Card& card) {
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = tag;
    if (!say(given, &card, sizeof card) || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, given, &event) != 0) return false;
    fd = given;
    return true;
  }

  bool say_ready() const {
    const uint8_t ready = 1;
    return say(fd, &ready, 1);
  }

  // Call until it hears nothing or the end.
  Heard hear() {
    for (;;) {
      const size_t wanted = bytes < sizeof(Card) ? sizeof(Card) - bytes : 1;
      uint8_t beyond;
      const ssize_t got = recv(fd, bytes < sizeof words ? words + bytes : &beyond, wanted, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Heard::nothing;
      error = got < 0 ? errno : got == 0 ? 0 : EPROTO;
      if (got <= 0 || bytes == sizeof words) return Heard::end;
      bytes += size_t(got);
      if (bytes == sizeof(Card)) return Heard::card;
      if (bytes == sizeof words) return Heard::ready;
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
  static bool say(int to, const void* what, size_t size) {
    return send(to, what, size, MSG_DONTWAIT | MSG_NOSIGNAL) == ssize_t(size);
  }
};

}  // namespace cd
