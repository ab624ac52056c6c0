"""A CUDA device as GPUDirect sees it: what it promises of writes by NICs, and boxes in its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from cuda.bindings import driver as cuda

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.gpu.driver import call
from ep_kernels.transports.nvlink.network.boxes import Boxes, Flush, PinnedBoxes, pin, unpin
from ep_kernels.transports.nvlink.network.gpu_direct import BoxAccess

_OWNER = int(cuda.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER)
_BY_HOST = int(cuda.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST)
_DMA_BUF = cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


class CudaGpu:
    """A CUDA device, whose context is current."""

    def __init__(self, device: int) -> None:
        self._device = device

    def order(self) -> tuple[Flush | None, str]:
        for name in ("GPU_DIRECT_RDMA_SUPPORTED", "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            if not self._attribute(name):
                raise TransportError(f"the GPU's driver does not support {name}")
        if self._attribute("GPU_DIRECT_RDMA_WRITES_ORDERING") >= _OWNER:
            return None, "the GPU promises the order of writes by NICs"
        if not self._attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & _BY_HOST:
            raise TransportError("the GPU neither promises the order of writes by NICs nor lets them be flushed")
        return flush_of(), "writes by NICs are flushed before kernels see their word"

    def boxes(self, access: BoxAccess, flush: Flush | None) -> Boxes:
        return PinnedBoxes(pin, unpin) if access is BoxAccess.STAGED else CudaBoxes(self._device, access, flush)

    def probe(self) -> str:
        """Without a provider: how NICs would reach its memory, in words."""
        boxes = CudaBoxes(self._device, BoxAccess.DMA_BUF, None)
        with contextlib.closing(boxes):
            try:
                _, order = self.order()
                boxes.take(boxes.reserve(abi.BOX_UNIT), abi.BOX_UNIT)
            except TransportError as error:
                return f"not by dma-buf: {error}"
        return f"by dma-buf; {order}"

    def _attribute(self, name: str) -> int:
        kind = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", kind, self._device))


def flush_of() -> Flush:
    """The flush of NIC writes of the current context's GPU."""
    library = ctypes.CDLL("libcuda.so.1")
    enter, run = (
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        for name in ("cuCtxSetCurrent", "cuFlushGPUDirectRDMAWrites")
    )
    return Flush(enter, int(call("cuCtxGetCurrent")), run)


class CudaBoxes:
    """In GPU memory that NICs may reach. See `Boxes`."""

    is_device = True

    def __init__(self, device: int, access: BoxAccess, flush: Flush | None) -> None:
        self.flush, self.device = flush, device
        self._access = access
        self._reserved: list[tuple[int, int]] = []
        self._taken: list[tuple[int, int, Any]] = []
        self._descriptors: list[int] = []

    def reserve(self, num_bytes: int) -> int:
        address = int(call("cuMemAddressReserve", num_bytes, abi.BOX_UNIT, 0, 0))
        self._reserved.append((address, num_bytes))
        return address

    def take(self, address: int, num_bytes: int) -> int:
        where = cuda.CUmemLocation()
        where.type, where.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, self.device
        kind = cuda.CUmemAllocationProp()
        kind.type, kind.location = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
        kind.allocFlags.gpuDirectRDMACapable = 1
        handle = call("cuMemCreate", num_bytes, kind, 0)
        try:
            call("cuMemMap", address, num_bytes, 0, handle, 0)
        except TransportError:
            cuda.cuMemRelease(handle)
            raise
        self._taken.append((address, num_bytes, handle))
        access = cuda.CUmemAccessDesc()
        access.location, access.flags = where, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, num_bytes, [access], 1)
        call("cuMemsetD8", address, 0, num_bytes)
        call("cuCtxSynchronize")
        if self._access is not BoxAccess.DMA_BUF:
            return -1
        self._descriptors.append(int(call("cuMemGetHandleForAddressRange", address, num_bytes, _DMA_BUF, 0)))
        return self._descriptors[-1]

    def close(self) -> None:
        self.close_in_child()
        while self._taken:
            address, num_bytes, handle = self._taken.pop()
            cuda.cuMemUnmap(address, num_bytes)
            cuda.cuMemRelease(handle)
        while self._reserved:
            cuda.cuMemAddressFree(*self._reserved.pop())

    def close_in_child(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
