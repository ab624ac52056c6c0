"""How many GPUs a process started here would see, without torch: `up` asks before it starts anything."""

from __future__ import annotations

import ctypes


def num_gpus() -> int:
    """CUDA devices as the driver counts them, CUDA_VISIBLE_DEVICES regarded; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
