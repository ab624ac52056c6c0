"""The CUDA driver's calls, with its errors mapped in one place. Knows addresses and sizes, no tensors."""

from __future__ import annotations

import logging
from typing import Any

from cuda.bindings import driver as cuda

from ep_kernels import jit
from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink import launch

log = logging.getLogger(__name__)


def call(name: str, *args: Any) -> Any:
    """`cuda.<name>(*args)`; its values (one, a tuple, or None). Raises TransportError with the driver's own words."""
    status, *values = getattr(cuda, name)(*args)
    if status != cuda.CUresult.CUDA_SUCCESS:
        _, text = cuda.cuGetErrorString(status)
        raise TransportError(f"{name}: {status.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if len(values) == 1 else tuple(values) or None


def architecture(device: int) -> str:
    """sm_90a, sm_100a, ... of a device."""
    kind = cuda.CUdevice_attribute
    major = call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return f"sm_{major}{minor}a"


def can_access(device: int, peer: int) -> bool:
    """Whether `device` can read and write the memory of `peer`."""
    return device == peer or bool(call("cuDeviceCanAccessPeer", device, peer))


class Function(launch.Kernel):
    """One kernel, loaded.

    Args:
        cubin: machine code.
        name: entry point.
        shared_bytes: dynamic shared memory per block.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        library = launch.load()
        self._module = call("cuModuleLoadData", cubin)
        function = call("cuModuleGetFunction", self._module, name.encode())
        limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, limit, shared_bytes)
        super().__init__(int(function), shared_bytes, library)


_loaded: dict[tuple[jit.Variant, int, int], Function] = {}


def load(compiler: jit.Compiler, variant: jit.Variant, device: int, shared_bytes: int) -> Function:
    """A variant, ready to launch on `device`; loaded once per process."""
    key = (variant, device, shared_bytes)
    if key not in _loaded:
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
