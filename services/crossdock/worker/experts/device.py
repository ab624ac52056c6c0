"""The device of a worker: the CPU, or one GPU of this host. One process per GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ep_kernels import ConfigError
from ep_kernels.topology import probe

_COPY_BYTES, _COPIES = 32 << 20, 5
"""Larger than a processor's caches; the fastest copy counts."""


class DeviceLost(RuntimeError):
    """The GPU is lost to this process (illegal access, fallen off the bus): only a new process can use it."""


def choose(device_type: str, index: int, num_gpus: int) -> torch.device:
    """The device of a worker. Pure.

    Args:
        device_type: "cpu" or "cuda", what the transport moves.
        index: of the CUDA device.
        num_gpus: CUDA devices that this process sees.

    Raises:
        ConfigError: no such GPU.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if num_gpus == 0:
        raise ConfigError("worker.transport", "a CUDA device for each worker, or transport cpu", "no CUDA device")
    if index >= num_gpus:
        seen = f"one GPU per worker, device in 0..{num_gpus - 1} (this process sees {num_gpus})"
        raise ConfigError("worker.device", seen, index)
    return torch.device(device_type, index)


def num_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def enter(device: torch.device) -> None:
    """Make the device current in this thread; torch begins each thread on GPU 0.

    Raises:
        DeviceLost: it has failed.
        ConfigError: others have filled its memory.
    """
    if device.type == "cpu":
        return
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device, dtype=torch.float32)  # also makes its context current for the driver's own calls
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError("worker.device", "a GPU with free memory", f"{device}: {error}") from error
    except RuntimeError as error:
        raise DeviceLost(f"{device}: {error}") from error


def uuid_of(device: torch.device) -> str:
    """The GPU's UUID as NVML writes it; "" for a CPU."""
    return "" if device.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def peak_bytes_per_s(device: torch.device) -> float:
    """Most bytes per second between this device and its peers: the sum of a GPU's NVLinks in one direction as NVML
    tells it, 0 if it does not; of a CPU what one thread copies now."""
    if device.type == "cpu":
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu")
        copied = torch.zeros_like(source)
        return _COPY_BYTES / min(_seconds(lambda: copied.copy_(source)) for _ in range(_COPIES))
    own = uuid_of(device)
    return 1e9 * sum(gpu.nvlink_gbps for gpu in probe().gpus if gpu.uuid == own)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def used_bytes(device: torch.device) -> int:
    """Memory of the GPU in use, by all processes; 0 for a CPU, or a GPU that does not answer. Any thread."""
    if device.type == "cpu":
        return 0
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the GPU was lost: its worker ends
        return 0
    return total - free
