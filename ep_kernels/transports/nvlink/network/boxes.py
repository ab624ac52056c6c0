"""Where the boxes lie in which a GPU's kernels lay what goes to ranks of other hosts, and find what comes from them, each
rank alone or those of a host together."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ep_kernels.errors import TransportError

_NORESERVE = 0x4000
"""Linux: memory is counted when touched. Boxes of ranks that are mapped never are."""


@dataclass(frozen=True, slots=True)
class Flush:
    """How the proxy makes what a NIC has written to a GPU visible to its kernels, by addresses of C functions.

    Attributes:
        enter: int (*)(void* context), of the thread; 0 = done.
        context: of the GPU.
        run: int (*)(int target, int scope); 0 = done.
    """

    enter: int
    context: int
    run: int


class Boxes(Protocol):
    """Memory of boxes.

    Attributes:
        is_device: it is a GPU's, and NICs reach it.
        device: number of that GPU, as CUDA counts them in this process.
        flush: None: what has come is visible.
    """

    is_device: bool
    device: int
    flush: Flush | None

    def reserve(self, num_bytes: int) -> int:
        """That many addresses, the first of them. Raises TransportError."""

    def take(self, address: int, num_bytes: int) -> int:
        """Make a part of them, or of a `Landing`, memory of zeros that kernels reach. Descriptor of its dma-buf, or -1:
        there is none. Raises TransportError."""

    def close(self) -> None:
        """Once no kernel and no network uses it. Idempotent."""

    def close_in_child(self) -> None:
        """In a forked child: give back its copies of descriptors."""


class PinnedBoxes:
    """In host memory, which the proxy reads and writes, or a NIC.

    Args:
        register, unregister: make host memory reachable by the GPU, and give it back.
    """

    is_device, device = False, 0
    flush: Flush | None = None

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._taken: list[int] = []
        self._memory: list[mmap.mmap] = []

    def reserve(self, num_bytes: int) -> int:
        memory, address = _map(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.append(memory)
        return address

    def take(self, address: int, num_bytes: int) -> int:
        self._register(address, num_bytes)
        self._taken.append(address)
        return -1

    def close(self) -> None:
        while self._taken:
            self._unregister(self._taken.pop())

    def close_in_child(self) -> None:
        """See `Boxes`."""


class Landing:
    """What the network brings, in host memory that ranks of one host map: a file in memory, without a name. Zeros,
    counted when touched.

    Attributes:
        fd: of that file, for the other ranks; -1 once it was given back.
        address: where this process has it.
        memory: which it is, for as long as something reads it.

    Args:
        fd: of another rank's, which stays the caller's; None: a new one.

    Raises:
        TransportError: there is no room.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        self.fd = -1
        if fd is None:
            try:
                self.fd = fd = os.memfd_create("crossdock-landing", os.MFD_CLOEXEC)
                os.ftruncate(fd, num_bytes)
            except (OSError, OverflowError) as error:
                self.close()
                raise TransportError(f"nvlink: no file in memory of {num_bytes} bytes: {error}") from error
        try:
            self.memory, self.address = _map(fd, num_bytes, mmap.MAP_SHARED)
        except TransportError:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back; the memory stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _map(fd: int, num_bytes: int, flags: int) -> tuple[mmap.mmap, int]:
    """Memory and its address; none in forked children. Raises TransportError."""
    try:
        memory = mmap.mmap(fd, num_bytes, flags=flags | _NORESERVE)
        memory.madvise(mmap.MADV_DONTFORK)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"nvlink: no room for {num_bytes} bytes of addresses: {error}") from error
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pin(address: int, num_bytes: int) -> None:
    """Let the GPU reach host memory, at the same address. Raises TransportError."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(status):
        raise TransportError(
            f"nvlink: {num_bytes} bytes of host memory for ranks of other hosts cannot be pinned (cudaHostRegister: "
            f"{int(status)}); raise the limit of the container, or make max_tokens_per_rank smaller"
        )


def unpin(address: int) -> None:
    """Once no kernel uses it."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)
