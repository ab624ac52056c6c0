"""GPUDirect: boxes in GPU memory, which a NIC reads and writes by itself, where provider and GPU can do so.

    boxes, chosen = choose(network, rank, gpu)
    boxes.is_device, chosen.access, chosen.why

Ways, best first, each tried with a box of its own: the driver exports the memory as a dma-buf that the NIC's driver
imports; the NIC's driver takes a device pointer, which the module nvidia-peermem lets it do (libfabric: as its provider
sees fit); else boxes lie in pinned host memory.

Memory order. A NIC reports a write by an entry in host memory, which says nothing about when the GPU's kernels see the
bytes, unless the GPU promises the order of such writes; no provider of libfabric promises more. Where the GPU does not,
the proxy flushes them before it tells kernels; where that cannot be done either, boxes are not on the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.network.network import Channel, ChannelMemory, Network
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.network.boxes import Boxes, Flush

log = logging.getLogger(__name__)

NEVER_RUN = "never run on a NIC by the authors"
_DIRECT = ("verbs", "libfabric")
"""Providers that register memory of a GPU; libfabric(NAME) is one of libfabric's."""
_TRIAL_S = 10.0


class BoxAccess(enum.Enum):
    """How a NIC reaches boxes."""

    DMA_BUF = "dma-buf"
    PEERMEM = "peermem"
    STAGED = "off"


@dataclass(frozen=True, slots=True)
class Chosen:
    """An access, and why no better one."""

    access: BoxAccess
    why: str

    def __str__(self) -> str:
        where = (
            "pinned host memory"
            if self.access is BoxAccess.STAGED
            else f"GPU memory, by {self.access.value} ({NEVER_RUN})"
        )
        return f"boxes in {where}: {self.why}"


class GpuMemory(Protocol):
    """What a GPU must offer."""

    def order(self) -> tuple[Flush | None, str]:
        """How what NICs write becomes visible, None: it is; and in words. Raises TransportError: it cannot."""

    def boxes(self, access: BoxAccess, flush: Flush | None) -> Boxes:
        """In its memory; or, STAGED, in pinned host memory. Raises TransportError."""


def choose(network: NetworkConfig, rank: int, gpu: GpuMemory) -> tuple[Boxes, Chosen]:
    """Boxes of a rank, and why they lie there; logged. Raises TransportError: what `network.gpu_direct` names
    cannot be had."""
    chosen, flush = _choose(network, rank, gpu)
    log.info("nvlink: rank %d: %s", rank, chosen)
    return gpu.boxes(chosen.access, flush), chosen


def probe(network: NetworkConfig, gpu: GpuMemory) -> Chosen:
    """What `choose` would choose. Raises as it."""
    return _choose(network, 0, gpu)[0]


def _choose(network: NetworkConfig, rank: int, gpu: GpuMemory) -> tuple[Chosen, Flush | None]:
    wanted = network.gpu_direct
    if wanted == BoxAccess.STAGED.value:
        return Chosen(BoxAccess.STAGED, "network.gpu_direct is off"), None
    try:
        if network.carrier.partition("(")[0] not in _DIRECT:
            raise TransportError(f"provider {network.carrier} sends from host memory")
        flush, order = gpu.order()
        accesses = (BoxAccess.DMA_BUF, BoxAccess.PEERMEM) if wanted == "auto" else (BoxAccess(wanted),)
        access, refused = _first(network, rank, gpu, accesses, flush)
    except TransportError as error:
        if wanted != "auto":
            raise TransportError(f"nvlink: network.gpu_direct {wanted} cannot be had: {error}") from error
        return Chosen(BoxAccess.STAGED, str(error)), None
    return Chosen(access, "; ".join([*refused, order])), flush


def _first(
    network: NetworkConfig, rank: int, gpu: GpuMemory, accesses: Sequence[BoxAccess], flush: Flush | None
) -> tuple[BoxAccess, list[str]]:
    """The first access that works, and why each before it does not. Raises TransportError: none does."""
    refused: list[str] = []
    for access in accesses:
        try:
            _try(network, rank, gpu.boxes(access, flush))
            return access, refused
        except TransportError as error:
            refused.append(f"{access.value}: {error}")
    raise TransportError("; ".join(refused))


def _try(network: NetworkConfig, rank: int, boxes: Boxes) -> None:
    """Register a box with the provider. Raises TransportError."""
    with contextlib.closing(boxes):
        address = boxes.reserve(abi.BOX_UNIT)
        descriptors = (ctypes.c_int32 * 2)(boxes.take(address, abi.BOX_UNIT), -1)
        memory = ChannelMemory(
            address, abi.BOX_UNIT, address, abi.BOX_UNIT, launch.library().cd_boxes_handler(), 0,
            dma_bufs=ctypes.addressof(descriptors), device=boxes.device,
        )  # fmt: skip
        channel = Channel(Network.of(network), rank, 1, memory, _TRIAL_S)
        channel.close()
        channel.free()
