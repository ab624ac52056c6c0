"""Memory of one layer's experts. On a CPU it is a memfd, which other workers of the host may map and copy from: the
holder's processor takes no part in that, and what they map stays as it is, whatever the holder does next."""

from __future__ import annotations

import os
import weakref

import torch

from crossdock.protocol.frames import close
from crossdock.protocol.shared_memory import SharedMemory


class WeightMemory:
    """A memfd, mapped here. Its descriptor lives as long as this does, its mapping as long as a tensor in it.

    Attributes:
        descriptor: of the memory.
        num_bytes: of it.
        bytes: uint8 [num_bytes].

    Raises:
        MemoryError: there is no room.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            shared, self.descriptor = SharedMemory.make(num_bytes, "crossdock-experts")
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes of weights: {error}") from error
        weakref.finalize(self, close, self.descriptor)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)  # else a write to memory that is not there ends us
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes of weights: {error}") from error
        self.num_bytes, self.bytes, self._address = num_bytes, shared.bytes, shared.address

    def place(self, tensor: torch.Tensor) -> int:
        """Of its first byte, for a tensor that lies here."""
        return tensor.data_ptr() - self._address

    def reader(self) -> int:
        """Another descriptor, which only reads. Raises OSError."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
