"""Memory of every rank, mapped by every rank as the transport does it: what the kernels of `floor.cuh` write to and
poll."""

from __future__ import annotations

from typing import Any

import torch

from ep_kernels.transports.nvlink.memory.domain import Domain
from ep_kernels.transports.nvlink.memory.host_page import HostPage

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
        self._domain = Domain(group, DEADLINE_S, "floor", HostPage(group.size))
        try:
            ticket = self._domain.allocate(num_bytes, torch.device("cuda", device))
            self._domain.region.mapping.view(0, (num_bytes,), torch.uint8).zero_()
            torch.cuda.synchronize(device)
            self._domain.import_regions(group.all_gather(ticket, DEADLINE_S))
            group.all_gather(b"", DEADLINE_S)  # nobody closes its server before all have been there
        except BaseException:
            self._domain.close()
            raise
        self.addresses = self._domain.addresses

    def close(self) -> None:
        """Let go of all of it, once no kernel of any rank uses it."""
        self.addresses = []
        self._domain.close()
