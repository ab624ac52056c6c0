"""The memory of a channel, by address: what it sends from and writes to, and the ring of one that kernels push into."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ep_kernels.network import proxy


@dataclass(frozen=True, slots=True)
class DeviceRing:
    """Ring into which kernels push: memory that a GPU must be able to reach.

    Attributes:
        ring, popped: addresses of the descriptors, and of the number of those that the proxy has taken.
        num_bytes: of the memory that holds both, from `ring` on.
        size: descriptors of the ring.
        stripe: bytes; no descriptor may cross a multiple of it.
    """

    ring: int
    popped: int
    num_bytes: int
    size: int
    stripe: int


@dataclass(frozen=True, slots=True)
class ChannelMemory:
    """What a channel works on, by address.

    Attributes:
        own, own_bytes: the rank's region: what may be sent.
        landing, stride: the mirrors; rank r's starts at landing + r * stride and has stride bytes.
        handler, context: `cd::NetHandler` and its first argument; called on the proxy thread.
        box: bytes of the region for each rank: what goes to rank r lies from r * box on, and lands at the same place of
            its mirror, which has as many; both are there before `connect` names it. 0: what goes to any rank may lie
            anywhere.
        dma_bufs: [2, ranks] int32 by address, of a GPU's memory: descriptors of the dma-buf of what goes to each rank
            and of its mirror, read when it is joined; -1: it is registered by address. 0: all is host memory.
        device: number of that GPU, as CUDA counts them in this process.
    """

    own: int
    own_bytes: int
    landing: int
    stride: int
    handler: int
    context: int
    box: int = 0
    dma_bufs: int = 0
    device: int = 0

    def native(self, ranks: int, lanes: int) -> proxy.NetMemory:
        """For the library."""
        return proxy.NetMemory(
            own=self.own,
            own_bytes=self.own_bytes,
            landing=self.landing,
            stride=self.stride,
            box=self.box,
            dma_bufs=ctypes.cast(self.dma_bufs, ctypes.POINTER(ctypes.c_int32)),
            ranks=ranks,
            lanes=lanes,
            device=self.device,
        )
