"""Rows of large requests in memory that a client and a worker of its host map: which, and where in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import socket
from typing import NamedTuple

from crossdock.common import log
from crossdock.protocol import frames
from crossdock.protocol.frames import FrameSocket
from crossdock.protocol.rows import lay
from crossdock.protocol.shared_memory import SharedMemory

_log = log.get(__name__)

MOST_BYTES = 64 << 20
"""Asked of one worker at once."""


class RowsPlace(NamedTuple):
    """Where the rows of a request lie, and then those of its answer."""

    memory: SharedMemory
    begin: int

    def pick_up(self, address: int, num_bytes: int) -> None:
        """Copy y from there; other threads run meanwhile."""
        ctypes.memmove(address, self.memory.address + self.begin, num_bytes)


class SharedRows:
    """What one connection shares with its worker: nothing until the first large request, nor with another host. Used
    under the connection's lock.
    """

    def __init__(self, line: FrameSocket) -> None:
        self._line, self._may_ask = line, line.sock.family == socket.AF_UNIX
        self._memory: SharedMemory | None = None
        self._former: SharedMemory | None = None
        self._num_bytes = 0

    def lay(self, rows: bytes, num_bytes: int) -> RowsPlace | None:
        """Copy the rows of a request to a free place. None: there is none yet, and they go through the socket."""
        begin = None if self._memory is None else self._memory.take(num_bytes)
        if self._memory is None or begin is None:
            self._ask(num_bytes)
            return None
        lay(rows, self._memory.address + begin)
        return RowsPlace(self._memory, begin)

    def give_back(self, place: RowsPlace | None) -> None:
        if place is not None:
            place.memory.give_back(place.begin)

    def abandon(self, place: RowsPlace | None) -> None:
        """A step may still write it: later requests go to other memory."""
        if place is not None:
            self._memory, self._former = (
                None if each is place.memory else each for each in (self._memory, self._former)
            )

    def got(self, num_bytes: int) -> None:
        """The worker's answer."""
        descriptor, self._line.state.descriptor, self._line.state.takes_descriptor = (
            self._line.state.descriptor,
            -1,
            False,
        )
        if not num_bytes:  # what there was before stays
            self._memory, self._may_ask = self._former, False
            return
        try:
            if descriptor < 0:
                raise OSError("expected a descriptor, got none")
            self._memory, self._num_bytes = SharedMemory(descriptor, num_bytes), num_bytes
        except OSError as error:
            self._may_ask = False
            _log.seldom("rows go through the socket: no memory is shared", why=str(error))
        finally:
            frames.close(descriptor)

    def _ask(self, num_bytes: int) -> None:
        """Ask for more; until the answer nothing lies there, since the worker may have changed to the new memory."""
        wanted = max(num_bytes, self._num_bytes * (1 if self._memory is None else 2))
        if not self._may_ask or self._line.state.takes_descriptor or wanted > MOST_BYTES:
            return
        self._line.state.takes_descriptor, self._former, self._memory = True, self._memory, None
        with contextlib.suppress(OSError):  # there is the end to read
            self._line.send([frames.memory(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE)])
