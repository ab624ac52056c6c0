"""A rank's region: device memory that peers of the same host or NVLink domain map into their own address space.

Handle kinds, best first, each really tried (allocate, export, import, map, touch) because device attributes lie:
fabric handles cross hosts; POSIX file descriptors need one host and a socket between the processes; CUDA IPC needs one
host and nothing else. What was refused, and why, is logged. Needs no privilege: no ptrace, no --privileged.

Memory is freed when the last view of it is gone, here and at every peer: `close`, the death of a process and a garbage
collector all end there. The driver counts who has it, but for CUDA IPC: there its owner keeps what peers still have
mapped (`keep`), as long as it lives. In a forked child none of this calls the driver, which has no context there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cuda

from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.gpu.driver import call
from ep_kernels.transports.nvlink.memory import sharing

log = logging.getLogger(__name__)


class HandleKind(enum.Enum):
    """How a region's memory is shared."""

    FABRIC = "fabric"
    POSIX_FD = "posix_fd"
    CUDA_IPC = "cuda_ipc"


_DRIVER_KIND = {
    HandleKind.FABRIC: cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
    HandleKind.POSIX_FD: cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
}
_PROBE_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 60
_IPC_UNIT = 2 << 20
"""Whole pages of the driver, so that an IPC handle shares nothing else of this process."""
_GIB = 1 << 30


class Mapping:
    """A range of device memory in this process's address space; unmapped when the last view of it dies.

    Attributes:
        address: device pointer.
        num_bytes: usable size.

    Args:
        device: whose kernels may use it; they end before it is unmapped.
        release: unmaps it.
        lease: given back then.
    """

    def __init__(
        self,
        address: int,
        num_bytes: int,
        device: int,
        release: Callable[[], Any],
        lease: socket.socket | None = None,
    ) -> None:
        self.address, self.num_bytes, self._device = address, num_bytes, torch.device("cuda", device)
        self._lease = lease
        self._finalizer = weakref.finalize(self, _release_idle, os.getpid(), device, release, lease)
        self._finalizer.atexit = False  # the process's end frees everything; the driver may be gone by then

    def close_in_child(self) -> None:
        if self._lease is not None:
            self._lease.close()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, keep: object = None) -> torch.Tensor:
        """A tensor over bytes [offset, ...) of this rank's own region; it keeps the mapping alive, and `keep`."""
        num_bytes = dtype.itemsize
        for n in shape:
            num_bytes *= n
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.as_tensor(_Bytes(self, offset, num_bytes, keep), device=self._device).view(dtype).view(shape)


def _release_idle(pid: int, device: int, release: Callable[[], Any], lease: socket.socket | None) -> None:
    if os.getpid() != pid:  # a forked child: the mapping is its parent's
        return
    with torch.cuda.device(device):
        with contextlib.suppress(RuntimeError):  # a device that broke is idle too
            torch.cuda.synchronize(device)
        release()
    if lease is not None:
        sharing.give_back(lease)


class _Bytes:
    """What torch needs to wrap foreign device memory."""

    def __init__(self, owner: Mapping, offset: int, num_bytes: int, keep: object) -> None:
        self.owner, self.keep = owner, keep
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (owner.address + offset, False),
            "version": 3,
        }


def _properties(kind: HandleKind, device: int) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = _DRIVER_KIND[kind]
    return properties


def _rounded(num_bytes: int, kind: HandleKind, device: int) -> int:
    flag = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    unit = int(call("cuMemGetAllocationGranularity", _properties(kind, device), flag))
    return -(-num_bytes // unit) * unit


def _map(handle: Any, num_bytes: int, device: int) -> Mapping:
    """Map a physical allocation for `device`; takes over the handle."""
    address = None
    # An address, the memory there, access for this device.
    try:
        address = call("cuMemAddressReserve", num_bytes, 0, 0, 0)
        call("cuMemMap", address, num_bytes, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, num_bytes, [access], 1)
    # Nothing is left of it where that failed.
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

    return Mapping(int(address), num_bytes, device, release)


class Region:
    """This rank's own memory and the handle that peers redeem.

    Attributes:
        kind: how it is shared.
        mapping: where this rank sees it.
        fd: file descriptor to hand out (POSIX_FD), else -1; owned by the region.
        token: bytes that travel in the ticket (FABRIC, CUDA_IPC), else empty.
    """

    def __init__(self, kind: HandleKind, num_bytes: int, device: int) -> None:
        self.kind, self.fd, self.token = kind, -1, b""
        if kind is HandleKind.CUDA_IPC:
            pointer = call("cuMemAlloc", -(-num_bytes // _IPC_UNIT) * _IPC_UNIT)
            self.mapping = Mapping(int(pointer), num_bytes, device, lambda: cuda.cuMemFree(pointer))
            self.token = bytes(call("cuIpcGetMemHandle", pointer).reserved)
            return
        size = _rounded(num_bytes, kind, device)
        handle = call("cuMemCreate", size, _properties(kind, device), 0)
        self.mapping = _map(handle, size, device)
        exported = call("cuMemExportToShareableHandle", handle, _DRIVER_KIND[kind], 0)
        if kind is HandleKind.POSIX_FD:
            self.fd = int(exported)
        else:
            self.token = bytes(exported.data)

    def close(self) -> None:
        """Stop handing out the memory, which lives on in views of it only. Idempotent; also in a forked child."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if hasattr(self, "mapping"):
            del self.mapping

    close_in_child = close


_lent: deque[tuple[Mapping, Callable[[], bool]]] = deque()
"""CUDA_IPC regions of closed communicators, and whether a peer has them mapped."""


def keep(mapping: Mapping, is_lent: Callable[[], bool]) -> None:
    """Do not free a CUDA_IPC region while peers have it mapped: what they write would go anywhere, says the driver's
    manual. Peers do not report that: the next bring-up calls `free_returned`."""
    _lent.append((mapping, is_lent))


def free_returned() -> None:
    """Free kept regions that no peer has any more. Waits for nobody but this process's own device."""
    for _ in range(len(_lent)):
        try:
            mapping, is_lent = _lent.popleft()
        except IndexError:  # another thread has taken it
            return
        if is_lent():
            _lent.append((mapping, is_lent))


def allocate(kind: HandleKind, num_bytes: int, device: int, cure: str) -> Region:
    """A region. Raises TransportError; where the GPU has no room for it, that says how much there is and `cure`: what
    takes less."""
    try:
        return Region(kind, num_bytes, device)
    except TransportError as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
        free, total = (amount / _GIB for amount in call("cuMemGetInfo"))
        raise TransportError(
            f"nvlink: a region of {num_bytes / _GIB:.1f} GiB does not fit into device {device}, where {free:.1f} of "
            f"{total:.1f} GiB are free; {cure}"
        ) from error


def redeem(
    kind: HandleKind, num_bytes: int, device: int, fd: int, token: bytes, lease: socket.socket | None = None
) -> Mapping:
    """Map a peer's region. `fd` (POSIX_FD) stays the caller's; `lease` (CUDA_IPC: a connection to the peer's
    descriptor server) is the mapping's. Raises TransportError."""
    if kind is HandleKind.CUDA_IPC:
        packed = cuda.CUipcMemHandle()
        packed.reserved = token
        flag = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = call("cuIpcOpenMemHandle", packed, flag.value)
        return Mapping(int(pointer), num_bytes, device, lambda: cuda.cuIpcCloseMemHandle(pointer), lease)
    shared: Any = fd
    if kind is HandleKind.FABRIC:
        shared = cuda.CUmemFabricHandle()
        shared.data = token
    handle = call("cuMemImportFromShareableHandle", shared, _DRIVER_KIND[kind])
    return _map(handle, num_bytes, device)


def probe(kind: HandleKind, device: int) -> str:
    """Empty when the kind works here; else the reason why not."""
    try:
        region = Region(kind, _PROBE_BYTES, device)
        try:
            if kind is HandleKind.CUDA_IPC:
                _open_elsewhere(region.token, device)
            else:
                again = redeem(kind, region.mapping.num_bytes, device, region.fd, region.token)
                call("cuMemsetD8", again.address, 1, _PROBE_BYTES)
            call("cuCtxSynchronize")
            written = region.mapping.view(0, (_PROBE_BYTES,), torch.uint8)
            if not bool((written == 1).all()):
                return "what was written through the handle did not arrive"
        finally:
            region.close()
    except TransportError as error:
        return str(error)
    return ""


def _open_elsewhere(token: bytes, device: int) -> None:
    """IPC handles cannot be opened by the process that made them."""
    script = Path(__file__).with_name("ipc_probe.py")
    command = [sys.executable, "-P", str(script), str(device), token.hex(), str(_PROBE_BYTES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransportError(f"a process of its own: {error}") from error
    if done.returncode:
        words = (done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        raise TransportError(words[-1])


_probed = functools.cache(probe)


def choose_kind(device: int, handle: str = "auto") -> tuple[HandleKind, dict[HandleKind, str]]:
    """The first kind that works on this device, of all or of the one that the configuration names (`memory_handle`),
    and why each before it does not; logs both. A device is probed once. Raises TransportError if none works, with every
    reason."""
    refused: dict[HandleKind, str] = {}
    for kind in HandleKind if handle == "auto" else (HandleKind(handle),):
        reason = _probed(kind, device)
        if not reason:
            words = "; ".join(f"{k.value}: {why}" for k, why in refused.items()) or "nothing"
            log.info("nvlink: device %d shares its region by %s handles; refused before: %s", device, kind.value, words)
            return kind, refused
        refused[kind] = reason
    words = "; ".join(f"{k.value}: {why}" for k, why in refused.items())
    if handle != "auto":
        raise TransportError(f"nvlink: memory_handle={handle!r} does not work on device {device}: {words}")
    raise TransportError(f"nvlink: no way to share device memory works here: {words}")
