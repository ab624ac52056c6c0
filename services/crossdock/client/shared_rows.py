"""Rows of large requests in memory that a client and a worker of its host map: which, and where in it."""

from __future__ import annotations

import contextlib
import ctypes
import socket
from typing import NamedTuple

from crossdock.common import log
from crossdock.protocol import frames
from crossdock.protocol.frames import FrameSocket
from crossdock.protocol.rows import lay
from crossdock.protocol.shared_memory import SharedMemory

_log = log.get(__name__)

SHARED_BYTES = 8 << 20
"""Asked of a worker: for what a connection has there while its answers come."""


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
        self._num_live = 0

    def lay(self, rows: bytes, num_bytes: int) -> RowsPlace | None:
        """Copy the rows of a request to a free place. None: there is none."""
        begin = None if self._memory is None else self._memory.take(num_bytes)
        if self._memory is None or begin is None:
            self._ask(num_bytes)
            return None
        self._num_live += 1
        lay(rows, self._memory.address + begin)
        return RowsPlace(self._memory, begin)

    def is_due(self, num_bytes: int) -> bool:
        """Whether there will be one: after the worker's next answers."""
        return num_bytes <= SHARED_BYTES and (self._num_live > 0 or self._line.state.takes_descriptor)

    def give_back(self, place: RowsPlace) -> None:
        """No step has it, or will have it."""
        self._num_live -= 1
        place.memory.give_back(place.begin)

    def abandon(self) -> None:
        """The same of a place that a step may still write: no request lies there again."""
        self._num_live -= 1

    def got(self, num_bytes: int) -> None:
        """The worker's answer."""
        state = self._line.state
        descriptor, state.descriptor, state.takes_descriptor = state.descriptor, -1, False
        try:
            if descriptor < 0:
                raise OSError("expected a descriptor, got none")
            self._memory = SharedMemory(descriptor, num_bytes)
        except OSError as error:
            self._may_ask = False
            if num_bytes:
                _log.seldom("rows go through the socket: no memory is shared", why=str(error))
        finally:
            frames.close(descriptor)

    def _ask(self, num_bytes: int) -> None:
        """Ask for memory, once nothing is in what there is: the worker takes that back."""
        if not self._may_ask or self._num_live or self._line.state.takes_descriptor or num_bytes > SHARED_BYTES:
            return
        self._line.state.takes_descriptor, self._memory = True, None
        with contextlib.suppress(OSError):  # there is the end to read
            self._line.send([frames.memory(SHARED_BYTES)])
