"""A rank's region: device memory that peers of the same host or NVLink domain map into their own address space.

Handle kinds, best first, each really tried (allocate, export, import, map, touch) because device attributes lie:
fabric handles cross hosts; POSIX file descriptors need one host and a socket between the processes; CUDA IPC needs one
host and nothing else. What was refused, and why, is kept for the log. Needs no privilege: no ptrace, no --privileged.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import weakref
from typing import Any

import torch
from cuda.bindings import driver as cuda

from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.driver import call

log = logging.getLogger(__name__)


class Kind(enum.Enum):
    """How a region's memory is shared."""

    FABRIC = "fabric"
    POSIX_FD = "posix_fd"
    CUDA_IPC = "cuda_ipc"


_DRIVER_KIND = {
    Kind.FABRIC: cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
    Kind.POSIX_FD: cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
}
_PROBE_BYTES = 1 << 20


class Mapping:
    """A range of device memory in this process's address space; unmapped when the last view of it dies.

    Attributes:
        address: device pointer.
        num_bytes: usable size.
    """

    def __init__(self, address: int, num_bytes: int, release: Any) -> None:
        self.address, self.num_bytes = address, num_bytes
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False  # the process's end frees everything; the driver may be gone by then

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over bytes [offset, ...); it keeps the mapping alive."""
        num_bytes = dtype.itemsize
        for n in shape:
            num_bytes *= n
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cuda")
        return torch.as_tensor(_Bytes(self, offset, num_bytes), device="cuda").view(dtype).view(shape)


class _Bytes:
    """What torch needs to wrap foreign device memory."""

    def __init__(self, owner: Mapping, offset: int, num_bytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (owner.address + offset, False),
            "version": 3,
        }


def _properties(kind: Kind, device: int) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = _DRIVER_KIND[kind]
    return properties


def _rounded(num_bytes: int, kind: Kind, device: int) -> int:
    flag = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    unit = int(call("cuMemGetAllocationGranularity", _properties(kind, device), flag))
    return -(-num_bytes // unit) * unit


def _map(handle: Any, num_bytes: int, device: int) -> Mapping:
    """Map a physical allocation for `device`; takes over the handle."""
    address = None
    try:
        address = call("cuMemAddressReserve", num_bytes, 0, 0, 0)
        call("cuMemMap", address, num_bytes, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, num_bytes, [access], 1)
    except TransportError:
        if address is not None:
            cuda.cuMemUnmap(address, num_bytes)
            cuda.cuMemAddressFree(address, num_bytes)
        cuda.cuMemRelease(handle)
        raise

    def release() -> None:
        cuda.cuMemUnmap(address, num_bytes)
        cuda.cuMemRelease(handle)
        cuda.cuMemAddressFree(address, num_bytes)

    return Mapping(int(address), num_bytes, release)


class Region:
    """This rank's own memory and the handle that peers redeem.

    Attributes:
        kind: how it is shared.
        mapping: where this rank sees it.
        fd: file descriptor to hand out (POSIX_FD), else -1; owned by the region.
        token: bytes that travel in the ticket (FABRIC, CUDA_IPC), else empty.
    """

    def __init__(self, kind: Kind, num_bytes: int, device: int) -> None:
        self.kind, self.fd, self.token = kind, -1, b""
        if kind is Kind.CUDA_IPC:
            pointer = call("cuMemAlloc", num_bytes)
            self.mapping = Mapping(int(pointer), num_bytes, lambda: cuda.cuMemFree(pointer))
            self.token = bytes(call("cuIpcGetMemHandle", pointer).reserved)
            return
        size = _rounded(num_bytes, kind, device)
        handle = call("cuMemCreate", size, _properties(kind, device), 0)
        self.mapping = _map(handle, size, device)
        exported = call("cuMemExportToShareableHandle", handle, _DRIVER_KIND[kind], 0)
        if kind is Kind.POSIX_FD:
            self.fd = int(exported)
        else:
            self.token = bytes(exported.data)

    def close(self) -> None:
        """Stop handing out the memory; views keep it alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def redeem(kind: Kind, num_bytes: int, device: int, fd: int, token: bytes) -> Mapping:
    """Map a peer's region. `fd` (POSIX_FD) stays the caller's. Raises TransportError."""
    if kind is Kind.CUDA_IPC:
        packed = cuda.CUipcMemHandle()
        packed.reserved = token
        flag = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = call("cuIpcOpenMemHandle", packed, flag.value)
        return Mapping(int(pointer), num_bytes, lambda: cuda.cuIpcCloseMemHandle(pointer))
    shared: Any = fd
    if kind is Kind.FABRIC:
        shared = cuda.CUmemFabricHandle()
        shared.data = token
    handle = call("cuMemImportFromShareableHandle", shared, _DRIVER_KIND[kind])
    return _map(handle, num_bytes, device)


def _probe(kind: Kind, device: int) -> str:
    """Empty when the kind works here; else the reason why not."""
    try:
        region = Region(kind, _PROBE_BYTES, device)
        try:
            if kind is not Kind.CUDA_IPC:  # IPC handles cannot be opened by the process that made them
                again = redeem(kind, region.mapping.num_bytes, device, region.fd, region.token)
                call("cuMemsetD8", again.address, 1, _PROBE_BYTES)
            call("cuMemsetD8", region.mapping.address, 0, _PROBE_BYTES)
            call("cuCtxSynchronize")
        finally:
            region.close()
    except TransportError as error:
        return str(error)
    return ""


@functools.cache
def choose_kind(device: int) -> tuple[Kind, dict[Kind, str]]:
    """The best kind that works on this device, and why each better one does not. Raises TransportError if none does."""
    refused: dict[Kind, str] = {}
    for kind in Kind:
        reason = _probe(kind, device)
        if not reason:
            log.info("nvlink: regions shared by %s handles; refused: %s", kind.value, refused or "none")
            return kind, refused
        refused[kind] = reason
    raise TransportError(f"nvlink: no way to share device memory works here: {refused}")
