"""Memory of one layer's experts. On a CPU it is a memfd, which other workers of the host may map and copy from: the
holder's processor takes no part in that, and what they map stays as it is, whatever the holder does next."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch

from crossdock.protocol import native
from crossdock.protocol.frames import close
from crossdock.protocol.shared_memory import SharedMemory

PIECE_BYTES = 1 << 20
"""Tensors are hashed in pieces of so many bytes: the seed of each is the hash of the one before."""


def hashed(source: int, num_bytes: int, seed: int, target: int | None = None) -> int:
    """XXH64 of so many bytes at that address, copied to another one. Without the interpreter lock."""
    return int(native.load().cd_copy_hashed(target, source, num_bytes, seed))


def hashed_in_pieces(source: int, num_bytes: int, seed: int, target: int | None = None) -> int:
    """The hash of a tensor's bytes, as `hashed` otherwise."""
    for at in range(0, num_bytes, PIECE_BYTES):
        to = None if target is None else target + at
        seed = hashed(source + at, min(PIECE_BYTES, num_bytes - at), seed, to)
    return seed


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
        self._sums: dict[int, int] = {}

    def place(self, tensor: torch.Tensor) -> int:
        """Of its first byte, for a tensor that lies here."""
        return tensor.data_ptr() - self._address

    def note(self, tensors: Sequence[torch.Tensor], total: int) -> None:
        """The hash of an expert that lies here."""
        self._sums[self.place(tensors[0])] = total

    def sum_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """The same, computed where it is not known: soon after they were written, while they are in the cache."""
        total = self._sums.get(self.place(tensors[0]))
        if total is None:
            total = 0
            for tensor in tensors:
                total = hashed_in_pieces(tensor.data_ptr(), tensor.nbytes, total)
            self.note(tensors, total)
        return total

    def reader(self) -> int:
        """Another descriptor, which only reads. Raises OSError."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
