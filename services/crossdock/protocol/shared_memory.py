"""Memory that both ends of a request connection of one host map: rows of requests lie there, and y is written over x.

The worker makes it when its client asks (`FrameKind.MEMORY`), seals its size, and sends its descriptor. The client says
where in it the rows of a request are; what it changes there while a step reads them spoils its own answer alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import torch

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LIBC = ctypes.CDLL(None)
PLACE_BYTES = 64
"""Rows of a request begin at a multiple of this."""


def is_sealed(descriptor: int, num_bytes: int) -> bool:
    """Whether it is memory of that size or more that nobody can make shorter. Raises OSError: it is no memfd."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    return seals & _SEALS == _SEALS and os.fstat(descriptor).st_size >= num_bytes


class SharedMemory:
    """A mapping; it lives until the last tensor made of it dies.

    Args:
        descriptor: of the memory; may be closed afterwards.

    Attributes:
        bytes, array, address: uint8 [num_bytes], for torch, for numpy and for native code.

    Raises:
        OSError: it is not what `make` makes (a shorter one could end this process), or there is no room.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        if not is_sealed(descriptor, num_bytes):
            raise OSError(f"memory: expected {num_bytes} bytes whose size is sealed, got something else")
        self.num_bytes = num_bytes
        with torch.inference_mode(False):  # `mmap.mmap` would keep a descriptor
            path = f"/proc/self/fd/{descriptor}"
            try:
                self.bytes = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:
                raise OSError(f"memory: cannot map {num_bytes} bytes: {error}") from None
        self.array, self.address = self.bytes.numpy(), self.bytes.data_ptr()
        self._used: dict[int, int] = {}

    @staticmethod
    def make(num_bytes: int, name: str = "crossdock-requests") -> tuple[SharedMemory, int]:
        """A new one, and its descriptor. name: in the kernel's lists. Raises OSError."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return SharedMemory(descriptor, num_bytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def has(self, rows: torch.Tensor) -> bool:
        """Whether rows of a request lie there."""
        return 0 <= rows.data_ptr() - self.address < self.num_bytes

    def free(self) -> None:
        """Give back the pages, also where the other end still maps them. What is written later takes new ones."""
        _LIBC.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.num_bytes), mmap.MADV_REMOVE)

    def take(self, num_bytes: int) -> int | None:
        """The first free place for so much; None: there is none. By one end alone, the client's."""
        begin, count = 0, -(-num_bytes // PLACE_BYTES) * PLACE_BYTES
        for place, end in sorted(self._used.items()):
            if place - begin >= count:
                break
            begin = end
        if begin + count > self.num_bytes:
            return None
        self._used[begin] = begin + count
        return begin

    def give_back(self, place: int) -> None:
        del self._used[place]
