"""The CUDA driver's calls, with its errors mapped in one place. Knows addresses and sizes, no tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

from ep_kernels import jit
from ep_kernels.errors import TransportError


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


def _attribute(name: str, field: str) -> Any:
    attribute = cuda.CUlaunchAttribute()
    attribute.id = getattr(cuda.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    setattr(attribute.value, field, 1)
    return attribute


_COOPERATIVE = _attribute("COOPERATIVE", "cooperative")
_OVERLAPPED = _attribute("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed")


class Function:
    """One kernel, loaded.

    Args:
        cubin: machine code.
        name: entry point.
        shared_bytes: dynamic shared memory per block.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        self._module = call("cuModuleLoadData", cubin)
        self._function = call("cuModuleGetFunction", self._module, name.encode())
        self._shared_bytes = shared_bytes
        limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", self._function, limit, shared_bytes)

    def launch(
        self, num_blocks: int, num_threads: int, stream: int, *arguments: Any, cooperative: bool = False
    ) -> None:
        """Arguments are ctypes values. Cooperative: all blocks are resident together or the launch is refused.
        Otherwise the launch may be set up while the kernel before it ends; kernels wait for that end themselves."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        shape = cuda.CUlaunchConfig()
        shape.gridDimX, shape.gridDimY, shape.gridDimZ = num_blocks, 1, 1
        shape.blockDimX, shape.blockDimY, shape.blockDimZ = num_threads, 1, 1
        shape.sharedMemBytes, shape.hStream = self._shared_bytes, stream
        shape.attrs, shape.numAttrs = [_COOPERATIVE if cooperative else _OVERLAPPED], 1
        call("cuLaunchKernelEx", shape, self._function, ctypes.addressof(pointers), 0)


_loaded: dict[tuple[jit.Variant, int, int], Function] = {}


def load(compiler: jit.Compiler, variant: jit.Variant, device: int, shared_bytes: int) -> Function:
    """A variant, ready to launch on `device`; loaded once per process."""
    key = (variant, device, shared_bytes)
    if key not in _loaded:
        _loaded[key] = Function(compiler.get(variant, architecture(device)), variant.kernel, shared_bytes)
    return _loaded[key]
