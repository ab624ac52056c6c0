"""Host memory that the network writes for ranks of one host, who map it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from ep_kernels.errors import TransportError

_NORESERVE = 0x4000
"""Linux: memory is counted when touched. What is for ranks that are mapped never is."""


class Landing:
    """What the network brings, in host memory that ranks of one host map: a file in memory, without a name. Zeros,
    counted when touched.

    Attributes:
        fd: of that file, for the other ranks, until it is closed; -1: it is another rank's.
        num_bytes: of it.
        address: where this process has it.
        memory: which it is, for as long as something reads it.

    Args:
        fd: of another rank's, which stays the caller's; None: a new one.

    Raises:
        TransportError: there is no room.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        self.fd, self.num_bytes = -1, num_bytes
        if fd is None:
            try:
                self.fd = fd = os.memfd_create("crossdock-landing", os.MFD_CLOEXEC)
                self._closed = weakref.finalize(self, os.close, fd)
                os.ftruncate(fd, num_bytes)
            except (OSError, OverflowError) as error:
                raise TransportError(f"nvlink: no file in memory of {num_bytes} bytes: {error}") from error
        self.memory, self.address = mapped(fd, num_bytes, mmap.MAP_SHARED)

    def close(self) -> None:
        """Give the descriptor back, if it was not collected before; the memory stays. Idempotent."""
        self._closed()

    close_in_child = close


def mapped(fd: int, num_bytes: int, flags: int) -> tuple[mmap.mmap, int]:
    """Memory and its address; none in forked children. Raises TransportError."""
    try:
        memory = mmap.mmap(fd, num_bytes, flags=flags | _NORESERVE)
        memory.madvise(mmap.MADV_DONTFORK)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"nvlink: no room for {num_bytes} bytes of addresses: {error}") from error
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
