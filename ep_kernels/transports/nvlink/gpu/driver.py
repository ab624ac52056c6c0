"""The CUDA driver's calls, with its errors mapped in one place. Knows addresses and sizes, no tensors."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver as cuda

from ep_kernels import jit
from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.gpu import launch

log = logging.getLogger(__name__)

OLDEST_GPU = 9
"""Major compute capability: mbarriers with bulk copies, and launches that overlap, came with Hopper."""
_ATTRIBUTE = cuda.CUdevice_attribute
_EVENT_PATIENCE_S = 0.1


def call(name: str, *args: Any) -> Any:
    """`cuda.<name>(*args)`; its values (one, a tuple, or None). Raises TransportError with the driver's own words."""
    status, *values = getattr(cuda, name)(*args)
    _check(name, status)
    return values[0] if len(values) == 1 else tuple(values) or None


def _check(name: str, status: Any) -> None:
    if status != cuda.CUresult.CUDA_SUCCESS:
        _, text = cuda.cuGetErrorString(status)
        raise TransportError(f"{name}: {status.name}: {text.decode() if text else 'unknown error'}")


def architecture(device: int) -> str:
    """sm_90a, sm_100a, ... of a device. Raises TransportError where it is older than the kernels' instructions."""
    major = call("cuDeviceGetAttribute", _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    if major < OLDEST_GPU:
        need = f"compute capability {OLDEST_GPU}.0 (Hopper) or newer"
        raise TransportError(f"nvlink: device {device}: expected {need}, got {major}.{minor}")
    return f"sm_{major}{minor}a"


def block_bytes(device: int) -> int:
    """Dynamic shared memory that a block may take on a device, if it has no other."""
    return int(call("cuDeviceGetAttribute", _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device))


class Function(launch.Kernel):
    """One kernel, loaded."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        library = launch.load()
        self._module = call("cuModuleLoadData", cubin)
        function = call("cuModuleGetFunction", self._module, name.encode())
        limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, limit, shared_bytes)
        super().__init__(int(function), shared_bytes, library)


_loaded: dict[tuple[jit.Variant, int, int], Function] = {}


def load(compiler: jit.Compiler, variant: jit.Variant, device: int, shared_bytes: int) -> Function:
    """A variant, ready to launch on `device`; loaded once per process. Raises TransportError: GPUs for workstations,
    for one, have less than half of the shared memory that HT's kernels take."""
    key = (variant, device, shared_bytes)
    if key not in _loaded:
        most = block_bytes(device)
        if shared_bytes > most:
            need = (
                f"a device whose blocks may have {shared_bytes} bytes of shared memory, as {variant.kernel} takes here"
            )
            raise TransportError(f"nvlink: device {device}: expected {need}, got one with {most}")
        _loaded[key] = _load(compiler, variant, architecture(device), shared_bytes)
    return _loaded[key]


def _load(compiler: jit.Compiler, variant: jit.Variant, arch: str, shared_bytes: int) -> Function:
    try:
        return Function(compiler.get(variant, arch), variant.kernel, shared_bytes)
    except TransportError as error:  # a cubin of a newer compiler than this driver understands
        if not compiler.is_shipped(variant, arch):
            raise
        log.warning("nvlink: the packaged kernel %s is compiled here instead: %s", variant.name, error)
        return Function(compiler.get(variant, arch, shipped=False), variant.kernel, shared_bytes)


class Reader:
    """Copies device memory to the host, or back, beside whatever the device does: on a stream of its own, from any
    thread, also while a thread of this process captures a graph. Made where the device's context is current.

    Args:
        memory: owner of the host's end of all copies. Kept until no copy is under way, also when the reader is gone.
    """

    def __init__(self, memory: object) -> None:
        self._context = call("cuCtxGetCurrent")
        self._stream = call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        weakref.finalize(self, _retire, os.getpid(), self._context, self._stream, memory).atexit = False

    def read(self, to: int, address: int, num_bytes: int, patience_s: float) -> bool:
        """Whether the bytes at `address` have come to pinned memory at `to` in time. If not they come later, but
        before those of the next call. One thread at a time. Raises TransportError."""
        return self._copy("cuMemcpyDtoHAsync", to, address, num_bytes, patience_s)

    def _copy(self, name: str, to: int, source: int, num_bytes: int, patience_s: float) -> bool:
        with _apart(self._context):
            call(name, to, source, num_bytes, self._stream)
            return _passed(self._stream, patience_s)

    def write(self, address: int, source: int, num_bytes: int, patience_s: float) -> bool:
        """As `read`, the other way: pinned memory at `source` to the device."""
        return self._copy("cuMemcpyHtoDAsync", address, source, num_bytes, patience_s)


class TimedEvents:
    """See `copy_times.DeviceEvents`. Made where the device's context is current."""

    def __init__(self) -> None:
        self._context = call("cuCtxGetCurrent")
        self._stream = call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._made: list[Any] = []

    def create(self) -> int:
        made = call("cuEventCreate", cuda.CUevent_flags.CU_EVENT_DEFAULT)
        self._made.append(made)
        return int(made)

    def pass_now(self, event: int) -> bool:
        with contextlib.suppress(TransportError), _apart(self._context):
            call("cuEventRecord", event, self._stream)
            return _passed(self._stream, _EVENT_PATIENCE_S)
        return False

    def between_ns(self, first: int, second: int) -> int | None:
        with contextlib.suppress(TransportError), _apart(self._context):
            return int(call("cuEventElapsedTime", first, second) * 1e6)
        return None

    def close(self) -> None:
        made, self._made = self._made, []
        with contextlib.suppress(TransportError), _apart(self._context):  # a device that is lost has none
            for event in made:
                call("cuEventDestroy", event)
            if made:
                call("cuStreamDestroy", self._stream)


def _passed(stream: Any, patience_s: float) -> bool:
    """Whether a stream has come to its end in time."""
    deadline = time.monotonic() + patience_s
    while True:
        (status,) = cuda.cuStreamQuery(stream)
        if status != cuda.CUresult.CUDA_ERROR_NOT_READY:
            _check("cuStreamQuery", status)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-5)


@contextlib.contextmanager
def _apart(context: Any) -> Iterator[None]:
    """Run in that context, with calls allowed that would otherwise break a stream capture of this thread."""
    call("cuCtxPushCurrent", context)
    try:
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            call("cuThreadExchangeStreamCaptureMode", mode)
    finally:
        call("cuCtxPopCurrent")


_retired: deque[tuple[Any, Any, object]] = deque()
"""Context, stream and memory of readers that are gone, where a copy was still to come."""


def _retire(pid: int, context: Any, stream: Any, memory: object) -> None:
    """Ends the streams of retired readers, this one's among them, whose copies have come; the others' turn comes with a
    later reader. A garbage collector calls this, in any thread, perhaps amid another call: nothing here waits. In a
    forked child of the process `pid` it only keeps them, for the driver does not work there."""
    _retired.append((context, stream, memory))
    if os.getpid() != pid:
        return
    for _ in range(len(_retired)):
        try:
            oldest = _retired.popleft()
        except IndexError:  # another thread has taken it
            return
        if not _ended(*oldest[:2]):
            _retired.append(oldest)


def _ended(context: Any, stream: Any) -> bool:
    with contextlib.suppress(TransportError), _apart(context):  # a device that is lost writes no more
        if cuda.cuStreamQuery(stream)[0] == cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call("cuStreamDestroy", stream)
    return True
