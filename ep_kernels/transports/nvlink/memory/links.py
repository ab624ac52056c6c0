"""Where LL may run. Its lines are 128-byte stores that carry their own tag: a reader that sees the tag takes the
rest for written. NVLink, and a GPU's own memory, keep such a store whole; PCIe promises nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from ep_kernels.config import MoEConfig
from ep_kernels.errors import TransportError
from ep_kernels.topology import Gpu, nvml
from ep_kernels.transports.nvlink.memory import ticket
from ep_kernels.types import Mode

log = logging.getLogger(__name__)


def pci_number(domain: int, bus: int, device: int) -> int:
    """A GPU's place on the PCI bus in one number; MIG instances of a GPU have its place."""
    return domain << 16 | bus << 8 | device


def check(config: MoEConfig, tickets: Sequence[bytes]) -> None:
    """Refuse LL (TransportError) where GPUs are not joined by NVLink. Of this host's: NVML tells nothing of others, and
    regions of other hosts are mapped by fabric handles, which only NVLink has."""
    found = [ticket.read(rank, raw) for rank, raw in enumerate(tickets)]
    own = found[config.group.rank].host
    if own.boxes is not None or config.mode is Mode.LL or (config.mode is Mode.AUTO and config.ll_max_tokens != 0):
        places = [one.place if one.host.name == own.name else None for one in found]
        if len(set(places)) > 1:
            require_nvlink(places, nvml.read(Path("/sys")).gpus)


def lines_are_whole(tickets: Sequence[bytes]) -> bool:
    """Whether LL128 lines may travel among these ranks: NVLink joins all GPUs, or there is one. Equal on all ranks."""
    places = [ticket.read(rank, raw).place for rank, raw in enumerate(tickets)]
    if len(set(places)) <= 1:
        return True
    try:
        require_nvlink(places, nvml.read(Path("/sys")).gpus)
    except TransportError as error:
        log.warning("one-shot all-reduce is left out: %s", error)
        return False
    return True


def require_nvlink(places: Sequence[int | None], gpus: Sequence[Gpu]) -> None:
    """Raise TransportError unless each two ranks share a GPU or are joined by NVLink. What NVML does not know is
    allowed, with a warning. Equal on all ranks, since each looks at all pairs.

    Args:
        places: `pci_number` of each rank's GPU; None: it is of another host.
        gpus: of this host, as NVML tells.
    """
    found = {_place_of(gpu): gpu for gpu in gpus}
    for (a, first), (b, second) in combinations(enumerate(places), 2):
        if first is None or second is None or first == second:
            continue
        status = _nvlink_status(found.get(first), found.get(second))
        if status == "unknown":
            log.warning("LL: whether NVLink joins the GPUs of ranks %d and %d is unknown", a, b)
        elif status != "ok":
            raise TransportError(
                f"nvlink: LL: expected NVLink between all GPUs of the group, got none between rank {a} "
                f"({found[first].pci_address}) and rank {b} ({found[second].pci_address}) (NVML: {status}); "
                "use mode HT, or AUTO with ll_max_tokens = 0"
            )


def _nvlink_status(first: Gpu | None, second: Gpu | None) -> str:
    if first is None or second is None:
        return "unknown"
    return next((peer.nvlink for peer in first.peers if peer.index == second.index), "unknown")


def _place_of(gpu: Gpu) -> int:
    """`pci_number` of an address like "0000:1b:00.0"."""
    try:
        domain, bus, rest = gpu.pci_address.split(":")
        return pci_number(int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16))
    except ValueError:
        return -1
