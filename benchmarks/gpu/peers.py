"""Memory of every rank, mapped by every rank: what the kernels of `floor.cuh` write to and poll.

Uses the transport's own ways of sharing (`memory`, `sharing`), so it works wherever the transport does.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from ep_kernels.transports.nvlink import memory, sharing

DEADLINE_S = 30.0


class Peers:
    """Zeroed memory of this rank, and everybody's addresses. Construction is collective.

    Attributes:
        addresses: [R] device pointers, as this process sees them.

    Args:
        group: as `MoEConfig.group`.
        num_bytes: of each rank.
        device: index of this rank's GPU.

    Raises TransportError where a peer's memory cannot be mapped.
    """

    def __init__(self, group: Any, num_bytes: int, device: int) -> None:
        kind, _ = memory.choose_kind(device)
        self._region = memory.Region(kind, num_bytes, device)
        desk = sharing.Desk([self._region.fd] if self._region.fd >= 0 else [])
        try:
            self._region.mapping.view(0, (num_bytes,), torch.uint8).zero_()
            torch.cuda.synchronize(device)
            mine = json.dumps(
                [kind.value, self._region.mapping.num_bytes, desk.address.hex(), self._region.token.hex()]
            )
            tickets = group.all_gather(mine.encode(), DEADLINE_S)
            self._mappings = [
                self._region.mapping if rank == group.rank else _redeem(rank, ticket, device)
                for rank, ticket in enumerate(tickets)
            ]
            group.all_gather(b"", DEADLINE_S)  # nobody closes its desk before all have been there
        finally:
            desk.close()
        self.addresses = [mapping.address for mapping in self._mappings]

    def close(self) -> None:
        """Let go of all of it, once no kernel of any rank uses it."""
        self._mappings, self.addresses = [], []
        self._region.close()


def _redeem(rank: int, ticket: bytes, device: int) -> memory.Mapping:
    name, num_bytes, address, token = json.loads(ticket)
    kind = memory.HandleKind(name)
    if kind is not memory.HandleKind.POSIX_FD:
        return memory.redeem(kind, num_bytes, device, -1, bytes.fromhex(token))
    (fd,), _ = sharing.fetch(rank, bytes.fromhex(address), 1, DEADLINE_S)
    try:
        return memory.redeem(kind, num_bytes, device, fd, b"")
    finally:
        os.close(fd)
