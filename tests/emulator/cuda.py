"""A GPU that is none, for programs that ask torch and the driver for one: tensors lie in this process's memory, streams
do at once what they are given, regions are files in memory that other processes map, kernels run on the CPU.

    with pretended(rank):
        main(["--device", "cuda"])

What it does not show: speed, anything that a stream orders, NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ep_kernels import jit
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.transports.nvlink.memory import memory
from tests.emulator.build import PTX, compiled, program

NUM_SMS = 2
NAME = "Pretended GPU"


def here(value: Any) -> Any:
    """A device of this machine in place of a GPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class OnCpu(TorchFunctionMode):
    """torch's functions make and find everything on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it with CPUs for GPUs."""
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        given = {name: here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(here, args), **given)


class Generator(torch.Generator):
    """Of this machine."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Whatever the device."""
        return super().__new__(cls, here(device))  # type: ignore[call-arg]


class Event:
    """As torch.cuda.Event: a time of this process's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Now."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds; more than nothing, as a GPU's clock says."""
        assert self._at_s > 0
        assert end._at_s > 0
        return max(1e-3, 1e3 * (end._at_s - self._at_s))

    def synchronize(self) -> None:
        """It has passed."""
        assert self._at_s > 0, "an event that was not recorded"

    def query(self) -> bool:
        """It has passed."""
        return True


class Stream:
    """As torch.cuda.Stream: everything on it is done."""

    cuda_stream = device_index = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def synchronize(self) -> None:
        """It is done."""

    def record_event(self) -> Event:
        """Now."""
        event = Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        """It has passed."""
        event.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """It is done."""


class Graph:
    """As torch.cuda.CUDAGraph, of work that runs anew at each replay."""

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        self.replay = work


class FileMapping:
    """As `memory.Mapping`: bytes of a file in memory."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        self.address, self.num_bytes = self._bytes.data_ptr(), num_bytes

    def close_in_child(self) -> None:
        """Nothing is open."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, keep: object = None) -> torch.Tensor:
        """See `memory.Mapping`."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset : offset + num_bytes].view(dtype).view(shape)


class FileRegion:
    """As `memory.Region` of the kind POSIX_FD."""

    kind, token = memory.HandleKind.POSIX_FD, b""

    def __init__(self, kind: Any, num_bytes: int, device: int, cure: str = "") -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("pretended")
        os.ftruncate(self.fd, size)
        self.mapping = FileMapping(self.fd, size)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    close_in_child = close


def redeemed(kind: Any, num_bytes: int, device: int, fd: int, token: bytes, lease: Any = None) -> FileMapping:
    """As `memory.redeem`."""
    return FileMapping(fd, num_bytes)


_KERNEL = re.compile(r"__global__ [^;{]*?\b(\w+)\(const __grid_constant__ (\w+) args\)")


class EmulatedKernel:
    """As `driver.Function`, of a source of kernels that each take a structure.

    Args:
        text: C++ with the emulator's `common/ptx.cuh`.
        name: entry point.
    """

    def __init__(self, text: str, name: str, shared_bytes: int) -> None:
        found = _KERNEL.findall(text)
        calls = [f"case {n}: return {entry}(*static_cast<const {of}*>(records))" for n, (entry, of) in enumerate(found)]
        self._library = _library(program(text, f"switch (blocks_per_rank) {{ {'; '.join(calls)}; }}"), found[0][0])
        self._entry, self._shared_bytes = [entry for entry, _ in found].index(name), shared_bytes

    def launch(self, num_blocks: int, num_threads: int, stream: int, record: Any, *, overlapped: bool = True) -> None:
        """Run it to its end."""
        self._library.emulated_launch(
            ctypes.c_uint(num_blocks), ctypes.c_uint(num_threads), ctypes.c_uint(self._shared_bytes),
            ctypes.byref(record), ctypes.c_int(self._entry),
        )  # fmt: skip


_library = functools.cache(compiled)


@contextmanager
def pretended(rank: int = 0, size: int = 1, store: Any = None) -> Iterator[pytest.MonkeyPatch]:
    """This process has one; its process groups are of gloo, and over `store` where the environment would name one."""
    flatten = jit.flatten
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as life:
        _torch(patch, size)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(dist, "rendezvous", lambda url: iter([(store, rank, size)]))
        patch.setattr(dist, "get_node_local_rank", lambda fallback_rank=None: rank)
        patch.setattr(dist, "init_process_group", functools.partial(_init_process_group, dist.init_process_group))
        patch.setattr(memory, "choose_kind", lambda device, handle="auto": (memory.HandleKind.POSIX_FD, {}))
        patch.setattr(memory, "allocate", FileRegion)
        patch.setattr(memory, "redeem", redeemed)
        patch.setattr(driver, "architecture", lambda device: "sm_90a")
        patch.setattr(driver, "Function", EmulatedKernel)
        patch.setattr(jit, "flatten", lambda file, supplied: flatten(file, {**supplied, **PTX}))
        patch.setattr(jit, "compile_source", lambda text, name, arch: SimpleNamespace(cubin=text))
        life.enter_context(OnCpu())
        yield patch


def _init_process_group(real: Any, backend: str, device_id: Any = None, **given: Any) -> None:
    real("gloo", **given)


def _torch(patch: pytest.MonkeyPatch, size: int) -> None:
    nothing, properties = (lambda *_, **__: None), SimpleNamespace(
        multi_processor_count=NUM_SMS, pci_domain_id=0, pci_bus_id=1, pci_device_id=0
    )  # fmt: skip
    for name in ("synchronize", "empty_cache", "set_device", "_sleep", "init", "reset_peak_memory_stats"):
        patch.setattr(torch.cuda, name, nothing)
    answers = {
        "current_device": 0, "device_count": size, "is_available": True, "get_device_name": NAME,
        "get_device_properties": properties, "current_stream": Stream(), "max_memory_allocated": 0,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda.nccl, "version", lambda: (0, 0))
