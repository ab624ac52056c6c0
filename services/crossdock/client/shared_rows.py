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

SHARED_BYTES = 8 << 20
"""Most of one connection, asked of a worker as requests have to wait for a place."""


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
        self._num_live = self._wanted = 0

    def lay(self, rows: bytes, num_bytes: int) -> RowsPlace | None:
        """Copy the rows of a request to a free place. None: there is none; in time there will be more of them."""
        memory = self._memory
        begin = None if memory is None else memory.take(num_bytes)
        if memory is None or begin is None:
            size = 0 if memory is None else memory.num_bytes
            if size < SHARED_BYTES and num_bytes <= SHARED_BYTES:
                self._wanted = max(self._wanted, num_bytes, min(SHARED_BYTES, 2 * size))
                self._ask()
            return None
        self._num_live += 1
        lay(rows, memory.address + begin)
        return RowsPlace(memory, begin)

    def is_due(self, num_bytes: int) -> bool:
        """Whether there may be a place soon: after the worker's next answers."""
        return num_bytes <= SHARED_BYTES and (self._num_live > 0 or self._line.state.takes_descriptor)

    def give_back(self, place: RowsPlace) -> None:
        """No step has it, or will have it."""
        self._num_live -= 1
        place.memory.give_back(place.begin)
        self._ask()

    def abandon(self, place: RowsPlace) -> None:
        """The same of a place that a step may still write: no request lies there again."""
        self._num_live -= 1
        self._wanted = max(self._wanted, place.memory.num_bytes)
        self._ask()

    def got(self, num_bytes: int) -> None:
        """The worker's answer."""
        state = self._line.state
        descriptor, state.descriptor, state.takes_descriptor = state.descriptor, -1, False
        try:
            if descriptor < 0:
                raise OSError("expected a descriptor, got none")
            self._memory = SharedMemory(descriptor, num_bytes)
            self._wanted = self._wanted if self._wanted > num_bytes else 0
        except OSError as error:
            self._may_ask = False
            if num_bytes:
                _log.seldom("rows go through the socket: no memory is shared", why=str(error))
            else:
                self._memory = self._former
        finally:
            self._former = None
            frames.close(descriptor)

    def _ask(self) -> None:
        """Ask for the memory that is wanted, once nothing is in what there is: the worker takes that back."""
        if not (self._wanted and self._may_ask) or self._num_live or self._line.state.takes_descriptor:
            return
        num_bytes, self._wanted = -(-self._wanted // mmap.PAGESIZE) * mmap.PAGESIZE, 0
        self._line.state.takes_descriptor, self._former, self._memory = True, self._memory, None
        with contextlib.suppress(OSError):  # there is the end to read
            self._line.send([frames.memory(num_bytes)])
