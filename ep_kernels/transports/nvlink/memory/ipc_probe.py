"""Opens a CUDA IPC handle in a process of its own, as a peer would, and fills its memory with ones.

    python ipc_probe.py <device> <handle in hex> <bytes>

Exit status 0 when that worked; else 1, with the driver's words on standard output. Imports cuda-bindings only.
"""

from __future__ import annotations

import sys
from typing import Any

from cuda.bindings import driver as cuda


def fill(device: int, handle: bytes, num_bytes: int) -> str:
    """Empty when it worked, else what failed."""
    packed = cuda.CUipcMemHandle()
    packed.reserved = handle
    flag = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value

    def failed(status: Any) -> bool:
        return bool(status != cuda.CUresult.CUDA_SUCCESS)

    (status,) = cuda.cuInit(0)
    if failed(status):
        return f"cuInit: {status.name}"
    status, context = cuda.cuDevicePrimaryCtxRetain(device)
    if failed(status):
        return f"cuDevicePrimaryCtxRetain: {status.name}"
    cuda.cuCtxSetCurrent(context)
    status, address = cuda.cuIpcOpenMemHandle(packed, flag)
    if failed(status):
        return f"cuIpcOpenMemHandle: {status.name}"
    cuda.cuMemsetD8(address, 1, num_bytes)
    (status,) = cuda.cuCtxSynchronize()
    cuda.cuIpcCloseMemHandle(address)
    return f"writing: {status.name}" if failed(status) else ""


if __name__ == "__main__":
    problem = fill(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
    print(problem)
    sys.exit(bool(problem))
