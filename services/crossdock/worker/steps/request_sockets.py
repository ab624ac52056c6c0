"""Sockets on which clients announce requests, and the thread that reads them.

While the thread of the steps is awake it polls them itself, between two steps: no other thread has to wake up, and
to wait for the interpreter. Before it sleeps, or begins what takes long, it arms them: then the thread that selects
this object finds it readable, and reads them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable

from crossdock.common import log

_log = log.get(__name__)

_MANY = 64
"""Sockets that are read in one poll; the others have their turn in the next."""


class RequestSockets:
    """Any thread may call anything. An object for selectors: readable once a socket is, while armed."""

    def __init__(self) -> None:
        self._sockets, self._outer = select.epoll(), select.epoll()
        self._outer.register(self._sockets, select.EPOLLIN)
        self._armed, self._reading = True, threading.Lock()
        self._readers: dict[int, Callable[[], None]] = {}
        self._again, self._alarm = deque[Callable[[], None]](), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.register(self._alarm, select.EPOLLIN)
        self._readers[self._alarm] = self._hear
        weakref.finalize(self, os.close, self._alarm)

    def fileno(self) -> int:
        """For selectors."""
        return self._outer.fileno()

    def sockets_fileno(self) -> int:
        """Readable once a socket is, armed or not."""
        return self._sockets.fileno()

    def add(self, sock: socket.socket, read: Callable[[], None]) -> None:
        """Call `read` when `sock` has something to read (see `watch`), by one thread at a time."""
        self._readers[sock.fileno()] = read
        self._sockets.register(sock, select.EPOLLIN)

    def watch(self, sock: socket.socket, *, readable: bool, writable: bool) -> None:
        """Call `read` when `sock` has something to read, or can be written; at its end in any case."""
        events = select.EPOLLIN * readable | select.EPOLLOUT * writable | select.EPOLLRDHUP
        with contextlib.suppress(OSError):
            self._sockets.modify(sock, events)

    def again(self, read: Callable[[], None]) -> None:
        """Call `read` in the next poll, which is due: there is more for it than its socket says."""
        self._again.append(read)
        os.eventfd_write(self._alarm, 1)

    def remove(self, sock: socket.socket) -> None:
        """Before the socket is closed."""
        with contextlib.suppress(OSError):
            self._sockets.unregister(sock)
        self._readers.pop(sock.fileno(), None)

    def poll(self, wait: bool = False) -> None:
        """Read all sockets that have something, unless another thread does. wait: when that one has ended."""
        if not self._readers or not self._reading.acquire(blocking=wait):
            return
        try:
            for _ in range(len(self._again)):
                self._call(self._again.popleft())
            for number, _ in self._sockets.poll(0, _MANY):
                self._call(self._readers.get(number))
        finally:
            self._reading.release()

    def _call(self, read: Callable[[], None] | None) -> None:
        try:
            if read is not None:
                read()
        except Exception:  # one socket must not end the others
            _log.seldom("a request socket failed", traceback=traceback.format_exc().strip())

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._alarm)

    def poll_selected(self) -> None:
        """As `poll`, by the thread that has found this object readable."""
        self.poll(wait=True)  # at once it would only be called again

    def arm(self) -> None:
        """Another thread is to read what comes."""
        if not self._armed:
            self._armed = True
            self._outer.modify(self._sockets, select.EPOLLIN)

    def disarm(self) -> None:
        """This thread will poll, and soon."""
        if self._armed:
            self._armed = False
            self._outer.modify(self._sockets, 0)
