"""Where the boxes lie in which a GPU's kernels lay what goes to ranks of other hosts, and find what comes from them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.memory.landing import mapped


@dataclass(frozen=True, slots=True)
class Flush:
    """How the proxy makes what a NIC has written to a GPU visible to its kernels, by addresses of C functions.

    Attributes:
        enter: int (*)(void* context), of the thread; 0 = done.
        context: of the GPU.
        run: int (*)(int target, int scope); 0 = done.
    """

    enter: int
    context: int
    run: int


class Boxes(Protocol):
    """Memory of boxes.

    Attributes:
        is_device: it is a GPU's, and NICs reach it.
        device: number of that GPU, as CUDA counts them in this process.
        flush: None: what has come is visible.
    """

    is_device: bool
    device: int
    flush: Flush | None

    def reserve(self, num_bytes: int) -> int:
        """That many addresses, the first of them. Raises TransportError."""

    def take(self, address: int, num_bytes: int) -> int:
        """Make a part of them, or of a `Landing`, memory of zeros that kernels reach. Descriptor of its dma-buf, or -1:
        there is none. Raises TransportError."""

    def close(self) -> None:
        """Once no kernel and no network uses it. Idempotent."""

    def close_in_child(self) -> None:
        """In a forked child: give back its copies of descriptors."""


class PinnedBoxes:
    """In host memory, which the proxy reads and writes, or a NIC.

    Args:
        register, unregister: make host memory reachable by the GPU, and give it back.
    """

    is_device, device = False, 0
    flush: Flush | None = None

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._taken: list[int] = []
        self._memory: list[mmap.mmap] = []

    def reserve(self, num_bytes: int) -> int:
        memory, address = mapped(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.append(memory)
        return address

    def take(self, address: int, num_bytes: int) -> int:
        self._register(address, num_bytes)
        self._taken.append(address)
        return -1

    def close(self) -> None:
        while self._taken:
            self._unregister(self._taken.pop())

    def close_in_child(self) -> None:
        """See `Boxes`."""


def pin(address: int, num_bytes: int) -> None:
    """Let the GPU reach host memory, at the same address. Raises TransportError."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(status):
        raise TransportError(
            f"nvlink: {num_bytes} bytes of host memory for ranks of other hosts cannot be pinned (cudaHostRegister: "
            f"{int(status)}); raise the limit of the container, or make max_tokens_per_rank smaller"
        )


def unpin(address: int) -> None:
    """Once no kernel uses it."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)
