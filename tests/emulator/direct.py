"""An emulated GPU that NICs reach: boxes in files in memory, whose descriptors stand for dma-bufs."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.network import gpu_direct
from ep_kernels.transports.nvlink.network.boxes import Boxes, Flush, PinnedBoxes
from ep_kernels.transports.nvlink.network.gpu_direct import BoxAccess, Chosen
from tests.emulator.machine import Emulated

_MAP_FIXED = 0x10
_NOT = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Nic(Protocol):
    """Who must know which memory is the GPU's: `fake_verbs.Fake`, `fake_fabric.Fake`."""

    def device(self, address: int, num_bytes: int) -> None:
        """From now on."""

    def no_device(self, address: int) -> None:
        """No more."""


class FileBoxes:
    """See `Boxes`."""

    is_device, device = True, 0

    def __init__(self, nic: Nic, access: BoxAccess, flush: Flush | None) -> None:
        self.flush, self._nic = flush, nic
        self._access, self._reserved = access, list[tuple[int, int]]()
        self._taken, self._descriptors = list[int](), list[int]()

    def reserve(self, num_bytes: int) -> int:
        """See `Boxes`."""
        address = _libc.mmap(None, num_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert address != _NOT
        self._reserved.append((address, num_bytes))
        return int(address)

    def take(self, address: int, num_bytes: int) -> int:
        """See `Boxes`."""
        fd = os.memfd_create("box")
        os.ftruncate(fd, num_bytes)
        self._descriptors.append(fd)
        assert (
            _libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            == address
        )
        self._nic.device(address, num_bytes)
        self._taken.append(address)
        return fd if self._access is BoxAccess.DMA_BUF else -1

    def close(self) -> None:
        """See `Boxes`."""
        self.close_in_child()
        while self._taken:
            self._nic.no_device(self._taken.pop())
        while self._reserved:
            _libc.munmap(*self._reserved.pop())

    def close_in_child(self) -> None:
        """See `Boxes`."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class DirectGpu:
    """See `gpu_direct.GpuMemory`.

    Args:
        nic: that reaches it.
        flush: what it asks for; None: it promises the order of writes.
        refuses: why NICs cannot write to it; "": they can.
    """

    def __init__(self, nic: Nic, flush: Flush | None = None, refuses: str = "") -> None:
        self._nic, self._flush, self._refuses = nic, flush, refuses

    def order(self) -> tuple[Flush | None, str]:
        """See `GpuMemory`."""
        if self._refuses:
            raise TransportError(self._refuses)
        return self._flush, "in order" if self._flush is None else "flushed"

    def boxes(self, access: BoxAccess, flush: Flush | None) -> Boxes:
        """See `GpuMemory`."""
        return (
            PinnedBoxes(lambda *_: None, lambda _: None)
            if access is BoxAccess.STAGED
            else FileBoxes(self._nic, access, flush)
        )


class Direct(Emulated):
    """A machine whose GPU is that one.

    Attributes:
        chosen: for each rank.
    """

    def __init__(self, nic: Nic, flush: Flush | None = None) -> None:
        super().__init__()
        self._gpu = DirectGpu(nic, flush)
        self.chosen: list[Chosen] = []

    def boxes(self, network: NetworkConfig, rank: int) -> Boxes:
        """See `Machine`."""
        boxes, chosen = gpu_direct.choose(network, rank, self._gpu)
        self.chosen.append(chosen)
        return boxes
